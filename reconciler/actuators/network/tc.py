"""The kernel's traffic control as far as it is used here: one HTB tree per interface. Synchronous; for a thread.

pyroute2 is imported by the first call: 100 ms and 25 MB that a node without this feature does not pay.

Source: bpf(2), bpf-helpers(7) on bpf_get_cgroup_classid (4.3), tc-htb(8); measured on 6.18, where cls_cgroup is not
built.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, final

from msgspec import Struct

from cgroupfs.errors import SourceError
from reconciler.actuators.network.netlink import NAME
from state.network import BE_CLASS, HANDLE, ONLINE_CLASS, Direction

FILE: Final = "root qdisc"
_TREE: Final = HANDLE | 0x1
_IFBS: Final = frozenset(direction.device for direction in Direction)
_ROOT: Final = 0xFFFF_FFFF
ALL_PROTOCOLS: Final = 0x0003
_BPF: Final = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
"""The number of the system call bpf(2), by the machine."""
_PROG_LOAD: Final = 5
_SCHED_CLS: Final = 3
_CALL: Final = 0x85
_EXIT: Final = 0x95
_GET_CGROUP_CLASSID: Final = 17
_BURST_S: Final = 0.002
"""How long a class may send ahead of its rate: a timer of the kernel may be that late."""
_LEAST_BURST: Final = 10_000
_QUANTUM: Final = 60_000
"""Bytes per round among classes of equal priority; ours never share one. Without it the kernel warns about its default.
"""

Connect = Callable[[], Any]
"""Opens a pyroute2 socket (which has no types)."""


class RootQdisc(Struct, frozen=True, kw_only=True):
    """The root qdisc of an interface. ``handle`` 0: the kernel's own default, which it reinstalls by itself."""

    index: int
    kind: str
    handle: int
    complete: bool = False
    """It is ours, with its classes and its classifier."""

    @property
    def ours(self) -> bool:
        """Identified by kind and handle."""
        return self.kind == "htb" and self.handle == HANDLE

    @property
    def default(self) -> bool:
        """Whether it is the kernel's default, installed by no program."""
        return self.handle == 0


class ClassRates(Struct, frozen=True, kw_only=True):
    """The rates of the classes, bytes per second: link, BE's floor (online is guaranteed the rest), BE's ceiling.

    The ceiling of BE's class is below its floor if BE pods elsewhere use the rest of it.
    """

    link: int
    floor: int
    ceiling: int


class TreeCounters(NamedTuple):
    """What the kernel has of our classes: bytes sent by online and by BE; whether their rates are the given ones."""

    online: int
    be: int
    as_set: bool


class Tc(Protocol):
    """The kernel calls of `actuators.network`. All raise `SourceError` if the kernel refuses."""

    def root(self, name: str) -> RootQdisc | None:
        """The root qdisc of an interface; None if the interface does not exist."""

    def names(self) -> dict[str, RootQdisc]:
        """The interfaces with a tree of ours at their root; without our IFBs, which have one too."""

    def install(self, index: int, rates: ClassRates) -> None:
        """Install or complete our tree. The root must be ours or a default."""

    def change(self, index: int, rates: ClassRates) -> None: ...

    def counted(self, index: int, rates: ClassRates) -> TreeCounters | None:
        """The counters, and whether these rates are in force; None if our classes do not exist."""

    def remove(self, index: int) -> None:
        """Remove our tree; the kernel reinstalls its default. No error without a tree."""


def open_socket() -> Any:
    """A pyroute2 socket of our own namespace."""
    from pyroute2 import IPRoute  # lazy: 100 ms and 25 MB

    return IPRoute()


@final
class RealTc:
    def __init__(self, connect: Connect = open_socket) -> None:
        """``connect``: opens a socket of the namespace to change."""
        self._connect = connect

    def root(self, name: str) -> RootQdisc | None:
        with connected(self._connect, name) as link:
            result = link.link_lookup(ifname=name)
            return self._root(link, result[0]) if result else None

    def names(self) -> dict[str, RootQdisc]:
        with connected(self._connect, "interfaces") as link:
            ours = {qdisc["index"] for qdisc in link.get_qdiscs() if qdisc["handle"] == HANDLE}
            # One at a time: the library does not tell a dump of all devices that a change has interrupted.
            qdiscs = {
                entry.get_attr("IFLA_IFNAME"): self._root(link, entry["index"])
                for entry in (link.get_links(*sorted(ours)) if ours else ())
                if entry.get_attr("IFLA_IFNAME") not in _IFBS
            }
            return {name: root for name, root in qdiscs.items() if root is not None and root.ours}

    def install(self, index: int, rates: ClassRates) -> None:
        with connected(self._connect, str(index)) as link:
            # Again: the caller's reading is older than the row that it has stored since.
            root = self._root(link, index)
            if root is None or not (root.ours or root.default):
                raise SourceError(
                    NAME, f"its root is {root.kind if root else 'not known'}, which belongs to another program"
                )
            if not root.ours:
                link.tc("add", "htb", index, HANDLE, default=ONLINE_CLASS)
            _classes(link, index, rates, "replace-class")
            if not root.complete:
                program = load_classifier()
                try:
                    link.tc(
                        "replace-filter",
                        "bpf",
                        index,
                        handle=1,
                        fd=program,
                        name="bypassd",
                        parent=HANDLE,
                        prio=1,
                        protocol=ALL_PROTOCOLS,
                    )
                finally:
                    # The filter references the program from now on.
                    os.close(program)

    def change(self, index: int, rates: ClassRates) -> None:
        with connected(self._connect, str(index)) as link:
            _classes(link, index, rates, "change-class")

    def counted(self, index: int, rates: ClassRates) -> TreeCounters | None:
        with connected(self._connect, str(index)) as link:
            present = {entry["handle"]: entry for entry in link.get_classes(index=index)}
        online, be = present.get(ONLINE_CLASS), present.get(BE_CLASS)
        if online is None or be is None:
            return None
        as_set = all(
            handle in present and rates_of(present[handle]) == (rate, ceiling)
            for handle, _, rate, ceiling, _ in _shape(rates)
        )
        return TreeCounters(sent_of(online), sent_of(be), as_set)

    def remove(self, index: int) -> None:
        with connected(self._connect, str(index)) as link:
            root = self._root(link, index)
            if root is not None and root.ours:
                link.tc("del", "htb", index, HANDLE, parent=_ROOT)

    @staticmethod
    def _root(link: Any, index: int) -> RootQdisc | None:
        for qdisc in link.get_qdiscs(index=index):
            if qdisc["parent"] != _ROOT:
                continue
            root = RootQdisc(index=index, kind=qdisc.get_attr("TCA_KIND"), handle=qdisc["handle"])
            if not root.ours:
                return root
            classes = {each["handle"] for each in link.get_classes(index=index)}
            filters = [each.get_attr("TCA_KIND") for each in link.get_filters(index=index, parent=HANDLE)]
            whole = {_TREE, ONLINE_CLASS, BE_CLASS} <= classes and "bpf" in filters
            return RootQdisc(index=index, kind=root.kind, handle=root.handle, complete=whole)
        return None


@contextmanager
def connected(connect: Connect, what: str) -> Iterator[Any]:
    """A socket for a few calls (1.5-2.6 ms). Errors: `SourceError` about ``what`` instead of the library's."""
    from pyroute2.netlink.exceptions import NetlinkError  # lazy: 100 ms and 25 MB

    try:
        with connect() as link:
            yield link
    except NetlinkError as exc:
        raise SourceError(NAME, f"{what}: {errno.errorcode.get(exc.code, exc.code)}") from exc
    except OSError as exc:
        raise SourceError(NAME, f"{what}: {exc.strerror or exc}") from exc


def burst(rate: int, ceiling: int) -> dict[str, int]:
    """Burst and quantum of a class with these rates, in bytes; for `link.tc`."""
    return {
        "burst": max(_LEAST_BURST, int(rate * _BURST_S)),
        "cburst": max(_LEAST_BURST, int(ceiling * _BURST_S)),
        "quantum": _QUANTUM,
    }


def sent_of(entry: Any) -> int:  # pyroute2 has no types
    """Bytes that a class has sent."""
    return int(entry.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])


def rates_of(entry: Any) -> tuple[int, int]:
    """Rate and ceiling of a class of HTB, bytes per second. Source: net/sched/sch_htb.c, htb_dump_class."""
    options = entry.get_attr("TCA_OPTIONS")
    short = options.get_attr("TCA_HTB_PARMS")
    # Those of 4 GiB/s and more have an attribute of their own.
    rate, ceiling = options.get_attr("TCA_HTB_RATE64"), options.get_attr("TCA_HTB_CEIL64")
    return int(short["rate"] if rate is None else rate), int(short["ceil"] if ceiling is None else ceiling)


def _shape(rates: ClassRates) -> tuple[tuple[int, int, int, int, int], ...]:
    """The tree: the root class, online (guaranteed the link's rate less BE's floor), BE. Parents first.

    Of each its handle, parent, rate, ceiling and priority.
    """
    online = max(1_000, rates.link - rates.floor)  # HTB refuses a rate of 0
    return (
        (_TREE, HANDLE, rates.link, rates.link, 0),
        (ONLINE_CLASS, _TREE, online, rates.link, 0),
        (BE_CLASS, _TREE, min(rates.floor, rates.ceiling), rates.ceiling, 1),
    )


def _classes(link: Any, index: int, rates: ClassRates, command: str) -> None:
    for handle, parent, rate, ceiling, priority in _shape(rates):
        more = burst(rate, ceiling)
        link.tc(command, "htb", index, handle=handle, parent=parent, rate=rate, ceil=ceiling, prio=priority, **more)


def load_classifier() -> int:
    """Load the classifier; as `load_program`."""
    # Call and exit: it returns the class id of the sending socket's cgroup, which cls_bpf uses as the class if not 0.
    return load_program(struct.pack("<BBhiBBhi", _CALL, 0, 0, _GET_CGROUP_CLASSID, _EXIT, 0, 0, 0))


def load_program(code: bytes) -> int:
    """Load a program; its file descriptor. Errors: `SourceError` if the kernel or missing privileges refuse it."""
    number = _BPF.get(platform.machine())
    if number is None:
        raise SourceError(NAME, f"no bpf system call number for {platform.machine()}")
    # Any license: the helper that the classifier calls is not for GPL programs only.
    program, license_ = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"Apache-2.0")
    head = struct.pack("=IIQQ", _SCHED_CLS, len(code) // 8, ctypes.addressof(program), ctypes.addressof(license_))
    # The kernel takes a longer structure than it knows, if the rest is 0.
    attributes = ctypes.create_string_buffer(head.ljust(128, b"\0"), 128)
    libc = ctypes.CDLL(None, use_errno=True)
    opened = int(libc.syscall(number, _PROG_LOAD, attributes, len(attributes)))
    if opened < 0:
        code_ = ctypes.get_errno()
        raise SourceError(NAME, f"cannot load the classifier: {errno.errorcode.get(code_, code_)}")
    return opened
