"""Run and wait times of tasks from the kernel, by process: taskstats over a netlink socket of the agent's own.

One reply sums all threads of a process, those that have ended included, in 2 µs and some 50 ns a thread. Run times and
waiting are there with delay accounting (``kernel.task_delayacct``) on or off. Waiting counts everything between "may
run" and "runs", a group stopped by its own quota included.

Needs CAP_NET_ADMIN and the first network namespace. Source: kernel documentation, accounting/taskstats and
accounting/taskstats-struct; include/uapi/linux/taskstats.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from cgroupfs.errors import SourceError

# Numbers of netlink.h, genetlink.h and taskstats.h.
_GENERIC: Final = 16
_ERROR: Final = 2
_REQUEST: Final = 1
_CONTROL_FAMILY: Final = 16
_GET_FAMILY: Final = 3
_FAMILY_ID: Final = 1
_FAMILY_NAME: Final = 2
_GET: Final = 1
_ATTR_TGID: Final = 2
_TYPE_STATS: Final = 3
_TYPE_AGGREGATE: Final = 5
_HEADER: Final = struct.Struct("=IHHII")
_QUERY: Final = struct.Struct("=IHHIIBBHHHI")
_ATTR: Final = struct.Struct("=HH")
_REPLY_HEADER: Final = 20  # struct nlmsghdr and struct genlmsghdr
# Offsets in struct taskstats, the same since version 1: cpu_count and cpu_delay_total, then cpu_run_virtual_total.
_DELAY: Final = struct.Struct("=16xQQ40xQ")
# Header (kind, sequence number), both attributes' kinds, and the same three numbers, at once.
_USUAL: Final = tuple(struct.Struct(f"=4xH2xI10xH8x{padding}2xH16xQQ40xQ") for padding in ("", "4x"))
_BATCH: Final = 32
"""Replies wait in the socket's buffer (208 KiB by default), which holds about a hundred."""
_BUFFER: Final = 8192


class Delays(NamedTuple):
    """Since a process or thread began. ``switches``: how often one of its tasks got a CPU."""

    run_ns: int
    wait_ns: int
    switches: int


@final
class Taskstats:
    """The socket. Errors: `SourceError` when the kernel has no taskstats or does not let this process ask."""

    def __init__(self) -> None:
        try:
            # Plain: pyroute2 costs seventy times as much a request, and 13 MiB to import.
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _GENERIC)
        except OSError as exc:
            raise SourceError("taskstats", f"no netlink socket: {exc.strerror}") from exc
        try:
            # Connected to the kernel: it refuses what other processes send here.
            self._socket.connect((0, 0))
            # The kernel replies before ``send`` returns: a reply that is not there yet was dropped.
            self._socket.setblocking(False)
            self._family = self._family_id()
            delays = self.query([os.getpid()])
        except (OSError, ValueError) as exc:
            self.close()
            raise SourceError("taskstats", _error_text(exc)) from exc
        if not delays:
            self.close()
            raise SourceError("taskstats", "process not found: bypassd needs the host's PID namespace")

    def close(self) -> None:
        self._socket.close()

    def _family_id(self) -> int:
        # The number of a generic netlink family is assigned when the kernel starts.
        name = b"TASKSTATS\0"
        body = struct.pack("=BBHHH", _GET_FAMILY, 1, 0, 4 + len(name), _FAMILY_NAME) + name + b"\0\0"
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _CONTROL_FAMILY, _REQUEST, 0, 0) + body)
        answer = self._socket.recv(_BUFFER)
        _check(answer)
        at = _REPLY_HEADER
        # The id has two bytes.
        while at + _ATTR.size + 2 <= len(answer):
            length, kind = _ATTR.unpack_from(answer, at)
            if kind == _FAMILY_ID:
                return int(struct.unpack_from("=H", answer, at + _ATTR.size)[0])
            # Attributes are aligned to four bytes. Never less than one's header: a length of 0 would not end.
            at += max(_ATTR.size, length + 3 & ~3)
        raise ValueError("no family id in the kernel's answer")

    def query(self, pids: Sequence[int]) -> dict[int, Delays]:
        """What these processes have run and waited; those that have ended are missing. Nothing here waits.

        Errors: `OSError` for what stops all queries (EPERM, ENOBUFS).
        """
        delays: dict[int, Delays] = {}
        for begin in range(0, len(pids), _BATCH):
            batch = pids[begin : begin + _BATCH]
            self._socket.send(
                b"".join(
                    _QUERY.pack(_QUERY.size, self._family, _REQUEST, pid, 0, _GET, 1, 0, 8, _ATTR_TGID, pid)
                    for pid in batch
                )
            )
            for _ in batch:
                parsed = self._answer()
                if parsed is not None:
                    delays[parsed[0]] = parsed[1]
        return delays

    def _answer(self) -> tuple[int, Delays] | None:
        try:
            return parse_answer(self._socket.recv(_BUFFER))
        except BlockingIOError:
            # The kernel has dropped a reply: the socket's buffer was full.
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)) from None
        except OSError:
            self._drain()
            raise

    def _drain(self) -> None:
        """Discard the replies to an abandoned batch, so that they are not read as the next one's."""
        for _ in range(_BATCH):
            try:
                self._socket.recv(_BUFFER)
            except BlockingIOError:
                return
            except OSError:
                continue


def parse_answer(answer: bytes) -> tuple[int, Delays] | None:
    """The requested pid (it is the sequence number) and its times; None when no such process exists.

    Errors: `OSError` for any other refusal, `ValueError` for a malformed reply.
    """
    if len(answer) < _REPLY_HEADER:
        raise ValueError(f"a netlink message of {len(answer)} bytes")
    # Nearly every answer of a machine is laid out as this: nothing before the statistics, or one empty attribute.
    for usual in _USUAL:
        if len(answer) >= usual.size:
            kind, pid, aggregate, attribute, switches, wait_ns, run_ns = usual.unpack_from(answer)
            if kind > _ERROR and aggregate == _TYPE_AGGREGATE and attribute == _TYPE_STATS:
                return pid, Delays(run_ns, wait_ns, switches)
    _, kind, _, pid, _ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        _check(answer)
        return None
    switches, wait_ns, run_ns = _DELAY.unpack_from(answer, _stats(answer))
    return pid, Delays(run_ns, wait_ns, switches)


def _stats(answer: bytes) -> int:
    """Where struct taskstats begins. Some architectures have an empty attribute before it, to align it."""
    at, end = _REPLY_HEADER, len(answer)
    while at + _ATTR.size <= end:
        length, kind = _ATTR.unpack_from(answer, at)
        if kind == _TYPE_AGGREGATE:
            at += _ATTR.size
            continue
        if kind == _TYPE_STATS and at + _ATTR.size + _DELAY.size <= end:
            return at + _ATTR.size
        at += max(_ATTR.size, length + 3 & ~3)
    raise ValueError("an answer without statistics")


def _check(answer: bytes) -> None:
    """Raise the error of an error message; ESRCH is a valid reply, too."""
    if len(answer) < _REPLY_HEADER:
        raise ValueError(f"a netlink message of {len(answer)} bytes")
    if _HEADER.unpack_from(answer)[1] != _ERROR:
        return
    code = -int(struct.unpack_from("=i", answer, _HEADER.size)[0])
    if code not in {0, errno.ESRCH}:
        raise OSError(code, os.strerror(code))


def _error_text(exc: OSError | ValueError) -> str:
    if not isinstance(exc, OSError):
        return str(exc)
    if exc.errno == errno.ENOENT:
        return "the kernel has no taskstats (CONFIG_TASKSTATS), or this is not the initial network namespace"
    if exc.errno == errno.EPERM:
        return "permission denied: CAP_NET_ADMIN is needed"
    return f"refused by the kernel: {exc.strerror}"
