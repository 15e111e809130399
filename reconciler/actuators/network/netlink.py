"""Network devices of our namespace, and its ids of other namespaces, over a plain netlink socket. For a thread.

pyroute2 takes some 300 µs of CPU for each device of the node, of which there are as many as pods; this module takes 20
µs. It also sets one kind of filter and one of queue that pyroute2 does not support.

Source: rtnetlink(7), include/uapi/linux/{if_link,net_namespace,netlink,pkt_cls}.h.
"""

import errno
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from msgspec import Struct

from cgroupfs.errors import SourceError, errno_name

NAME: Final = "network"
_ROUTE: Final = 0
_GET_LINK: Final = 18
_NEW_LINK: Final = 16
_GET_NSID: Final = 90  # from Linux 4.0 on
_NEW_NSID: Final = 88
_ERROR: Final = 2
_DONE: Final = 3
_REQUEST: Final = 1
_DUMP: Final = 0x300
_INTERRUPTED: Final = 0x10  # from Linux 3.1 on
_HEADER: Final = struct.Struct("=IHHII")
_LINK: Final = struct.Struct("=BxHiII")
_ATTR: Final = struct.Struct("=HH")
_FAMILY_AND_FILE: Final = struct.Struct("=BxxxHHI")
_KIND_MASK: Final = 0x3FFF
"""Removes the flags "nested" and "byte order"."""
_IFNAME: Final = 3
_LINKINFO: Final = 18
_INFO_KIND: Final = 1
_STATS64: Final = 23
_NETNSID: Final = 37  # from Linux 4.0 on
_FAR: Final = 5
_TARGET_NETNSID: Final = 46  # from Linux 4.15 on
_NSA_NSID: Final = 1
_NSA_FILE: Final = 3
_NEW_FILTER: Final = 44
_NEW_QDISC: Final = 36
_SET: Final = 0x505
"""Acknowledge; create it, or replace the one with this number."""
_FILTER: Final = struct.Struct("=BxxxiIII")
_TCA_KIND: Final = 1
_TCA_OPTIONS: Final = 2
_U32_CLASS: Final = 1
_U32_SELECTOR: Final = 5
_U32_INDEV: Final = 8
_EVERYTHING: Final = struct.pack("=BBBx12x16x", 1, 0, 1)
"""A selector that ends the search, of one key without a bit in its mask."""
_ALL_PROTOCOLS: Final = 3
_TABLE: Final = 0x8000_0000
_BYTES: Final = struct.Struct("=16xQQ")
_UP: Final = 1
_BUFFER: Final = 1 << 16
_WAIT_S: Final = 5.0
"""For one answer of the kernel."""
_TRIES: Final = 4
"""Dumps of the devices, each of which another change may interrupt."""


class Link(Struct, frozen=True, kw_only=True):
    """One device. ``kind``: veth, ifb, …, empty for hardware; ``peer``: the id of its other end's namespace.

    A veth device whose peer is in our own namespace has no ``peer``. ``far``: the other end's index there.
    ``received`` and ``sent``: bytes.
    """

    index: int
    name: str
    kind: str = ""
    peer: int | None = None
    far: int = 0
    up: bool = False
    received: int = 0
    sent: int = 0


def link_mbit(name: str, sys_net: str = "/sys/class/net") -> int | None:
    """The speed that an interface's driver reports (Mbit/s); None if it reports none: virtual or down."""
    try:
        speed = int(Path(sys_net, name, "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _ROUTE)
    try:
        # To the kernel, which then refuses what other processes send here.
        made.connect((0, 0))
    except OSError:
        made.close()
        raise
    return made


@final
class Links:
    """The socket, in a ``with`` block. Errors, here and in all calls: `SourceError`."""

    def __init__(self, connect: Callable[[], socket.socket] = _socket) -> None:
        """``connect``: opens a netlink socket of the namespace to read."""
        try:
            self._socket = connect()
        except OSError as exc:
            raise SourceError(NAME, f"no netlink socket: {exc.strerror}") from exc
        self._socket.settimeout(_WAIT_S)
        self._sequence = 0
        """Of the last request; its answers have the same."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def all(self) -> list[Link]:
        return list(self._links(_REQUEST | _DUMP, _LINK.pack(0, 0, 0, 0, 0)))

    def named(self, name: str) -> Link | None:
        """One device; None if it does not exist."""
        try:
            body = _LINK.pack(0, 0, 0, 0, 0) + _packed(_IFNAME, name.encode() + b"\0")
            return next(self._links(_REQUEST, body), None)
        except _NoSuchDeviceError:
            return None

    def handed_past(self, veth: Link) -> int | None:
        """Bytes that the other end of a veth device has received and this end has not sent; None: not known.

        A program has handed them over without this end (``bpf_redirect_peer``).
        """
        # From Linux 6.7 on the other end counts them as received.
        here = next(self._links(_REQUEST, _LINK.pack(0, 0, veth.index, 0, 0)), None)
        there = _LINK.pack(0, 0, veth.far, 0, 0) + _packed(_TARGET_NETNSID, struct.pack("=i", veth.peer or 0))
        far = next(self._links(_REQUEST, there), None)
        return None if here is None or far is None or far.kind != "veth" else far.received - here.sent

    def _links(self, flags: int, request: bytes) -> Iterator[Link]:
        for body in self._request(_GET_LINK, flags, request, _NEW_LINK):
            try:
                yield _link(body)
            except struct.error as exc:
                raise SourceError(NAME, f"no answer from the kernel about devices: {exc}") from exc

    def namespace_id(self, file: int) -> int | None:
        """Our namespace's id of another one, given an open file of it; None: no device connects to it."""
        body = _FAMILY_AND_FILE.pack(0, 8, _NSA_FILE, file)
        for answer in self._request(_GET_NSID, _REQUEST, body, _NEW_NSID):
            for kind, value in _attributes(answer, 4):
                if kind == _NSA_NSID and len(value) >= 4:
                    number = int(struct.unpack_from("=i", value)[0])
                    return number if number >= 0 else None
        return None

    def classify(
        self, index: int, parent: int, preference: int, number: int, *, input_device: str, class_id: int
    ) -> None:
        """Classify packets by their input device into a class of another device's tree.

        ``number``: the filter's, from 1 on.
        """
        options = _packed(_U32_CLASS, struct.pack("=I", class_id)) + _packed(_U32_SELECTOR, _EVERYTHING)
        options += _packed(_U32_INDEV, input_device.encode() + b"\0")
        info = preference << 16 | socket.htons(_ALL_PROTOCOLS)
        body = _FILTER.pack(0, index, _TABLE | number, parent, info)
        body += _packed(_TCA_KIND, b"u32\0") + _packed(_TCA_OPTIONS, options)
        self._request(_NEW_FILTER, _SET, body, 0)

    def queue(self, index: int, parent: int, limit: int) -> None:
        """Have a class queue at most ``limit`` bytes, first in first out; packets beyond it are dropped."""
        body = _FILTER.pack(0, index, 0, parent, 0)
        body += _packed(_TCA_KIND, b"bfifo\0") + _packed(_TCA_OPTIONS, struct.pack("=I", limit))
        self._request(_NEW_QDISC, _SET, body, 0)

    def _request(self, what: int, flags: int, body: bytes, answer: int) -> list[memoryview]:
        """The bodies of the kernel's answers of this kind, all of one state of the kernel's."""
        for _ in range(_TRIES):
            try:
                answers, interrupted = self._answers(what, flags, body, answer)
            except OSError as exc:
                raise SourceError(NAME, f"no answer from the kernel about devices: {exc.strerror or exc}") from exc
            except struct.error as exc:
                raise SourceError(NAME, f"no answer from the kernel about devices: {exc}") from exc
            if not interrupted:
                return answers
        raise SourceError(NAME, f"the devices changed while they were read, {_TRIES} times in a row")

    def _answers(self, what: int, flags: int, body: bytes, answer: int) -> tuple[list[memoryview], bool]:
        """The answers, and whether devices changed meanwhile: then a device that exists may be missing."""
        self._sequence += 1
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), what, flags, self._sequence, 0) + body)
        answers: list[memoryview] = []
        interrupted = False
        while True:
            received = memoryview(self._socket.recv(_BUFFER))
            at, ended = 0, False
            while at + _HEADER.size <= len(received):
                length, kind, marks, sequence, _ = _HEADER.unpack_from(received, at)
                content = received[at + _HEADER.size : at + length]
                at += max(_HEADER.size, length + 3 & ~3)  # a length of 0 would never end
                if sequence != self._sequence:
                    continue  # the late answer to a request that was given up
                interrupted |= bool(marks & _INTERRUPTED)
                # Of number 0: an acknowledgement, or the complete end of a dump.
                if kind in {_ERROR, _DONE}:
                    _raise_error(content)
                if kind == answer:
                    answers.append(content)
                # Only a dump has further messages, up to the one that ends it.
                ended |= kind == _DONE or flags & _DUMP != _DUMP
            if ended:
                return answers, interrupted


def _packed(kind: int, value: bytes) -> bytes:
    return _ATTR.pack(_ATTR.size + len(value), kind) + value.ljust(len(value) + 3 & ~3, b"\0")


class _NoSuchDeviceError(SourceError):
    """The kernel's error for a device name that does not exist."""


class NotOfferedError(SourceError):
    """This kernel was built without the requested feature."""


_ERRORS: Final[dict[int, type[SourceError]]] = {
    errno.ENODEV: _NoSuchDeviceError,
    errno.EINVAL: NotOfferedError,
    errno.EOPNOTSUPP: NotOfferedError,
}


def _raise_error(body: memoryview) -> None:
    code = -int(struct.unpack_from("=i", body)[0])
    if code:
        raise _ERRORS.get(code, SourceError)(NAME, f"the kernel refused a request about devices: {errno_name(code)}")


def _attributes(body: memoryview, at: int) -> Iterator[tuple[int, memoryview]]:
    while at + _ATTR.size <= len(body):
        length, kind = _ATTR.unpack_from(body, at)
        if length < _ATTR.size:
            return
        yield kind & _KIND_MASK, body[at + _ATTR.size : at + length]
        at += length + 3 & ~3


def _link(body: memoryview) -> Link:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    name = kind = ""
    peer: int | None = None
    far = received = sent = 0
    for what, value in _attributes(body, _LINK.size):
        if what == _IFNAME:
            name = _text(value)
        elif what == _LINKINFO:
            kind = next((_text(inner) for key, inner in _attributes(value, 0) if key == _INFO_KIND), "")
        elif what == _NETNSID:
            peer = int(struct.unpack_from("=i", value)[0])
        elif what == _FAR:
            far = int(struct.unpack_from("=I", value)[0])
        elif what == _STATS64:
            received, sent = _BYTES.unpack_from(value)
    return Link(
        index=index, name=name, kind=kind, peer=peer, far=far, up=bool(flags & _UP), received=received, sent=sent
    )


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("ascii", "replace")
