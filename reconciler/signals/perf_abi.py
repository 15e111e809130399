"""The perf_event_open(2) interface for cgroup events: the system call, and its binary formats.

A cgroup's events are counted on one CPU by one descriptor each; groups below are counted, too.
Source: perf_event_open(2); include/uapi/linux/perf_event.h; kernel/events/core.c. Measured on 6.18 (2 CPUs): an open
costs 5 to 60 µs, the first after a pause 16 ms, a read 3 to 30 µs, a close 2 to 50 µs and occasionally 500.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from typing import Final, Protocol, final

from msgspec import Struct

HARDWARE: Final = 0
"""A type of event (``PERF_TYPE_HARDWARE``)."""

FLAG_CGROUP: Final = 1 << 2
FLAG_CLOEXEC: Final = 1 << 3

# PERF_ATTR_SIZE_VER0: all that is needed here, and known to every kernel.
_ATTR: Final = struct.Struct("=IIQQQQQIIQ")
_DISABLED: Final = 1 << 0
_ENABLED_TIME: Final = 1 << 0
_RUNNING_TIME: Final = 1 << 1
# The kernel puts a CPU's group on the counters together or not at all: ratios of its events are of the same moments.
_GROUP: Final = 1 << 3
_READ_FORMAT: Final = _ENABLED_TIME | _RUNNING_TIME | _GROUP
_ENABLE: Final = 0x2400
"""PERF_EVENT_IOC_ENABLE."""
_WHOLE_GROUP: Final = 1
"""PERF_IOC_FLAG_GROUP."""

_NUMBERS: Final[Mapping[str, int]] = {
    "x86_64": 298,
    "aarch64": 241,
    "riscv64": 241,
    "loongarch64": 241,
    "ppc64le": 319,
    "s390x": 331,
}
"""The system call's number on each architecture that nodes have."""


class PerfEvent(Struct, frozen=True, kw_only=True):
    """One kind of event. ``name`` for messages and results; ``type`` and ``config`` as the kernel numbers them."""

    name: str
    type: int
    config: int


CYCLES: Final = PerfEvent(name="cycles", type=HARDWARE, config=0)
INSTRUCTIONS: Final = PerfEvent(name="instructions", type=HARDWARE, config=1)
CACHE_MISSES: Final = PerfEvent(name="cache misses", type=HARDWARE, config=3)


class PerfReading(Struct, frozen=True, kw_only=True):
    """What one CPU's group has counted. ``enabled_ns``: while the cgroup ran there; ``running_ns``: and was counted."""

    enabled_ns: int
    running_ns: int
    counts: tuple[int, ...]


class PerfCalls(Protocol):
    """The calls, all of which raise plain `OSError`, as the kernel answers."""

    def open(self, attributes: bytes, pid: int, cpu: int, leader: int, flags: int) -> int:
        """A new descriptor. ``pid``: the cgroup's directory with `FLAG_CGROUP`, else -1 for all tasks on ``cpu``."""

    def enable(self, leader: int) -> None:
        """Begin to count with the whole group."""

    def read(self, leader: int, most: int) -> bytes:
        """The whole group's counts, for `decode`."""

    def close(self, descriptor: int) -> None: ...


@final
class RealPerf:
    """`PerfCalls` on the running kernel."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._number = _NUMBERS.get(platform.machine(), 0)

    def open(self, attributes: bytes, pid: int, cpu: int, leader: int, flags: int) -> int:
        if not self._number:
            raise OSError(errno.ENOSYS, f"perf_event_open has no known number on {platform.machine()}")
        text = ctypes.create_string_buffer(attributes, len(attributes))
        arguments = (ctypes.c_int(pid), ctypes.c_int(cpu), ctypes.c_int(leader), ctypes.c_ulong(flags))
        result = self._syscall(ctypes.c_long(self._number), text, *arguments)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"perf_event_open: {errno.errorcode.get(code, str(code))}")
        return int(result)

    def enable(self, leader: int) -> None:
        ioctl(leader, _ENABLE, _WHOLE_GROUP)

    def read(self, leader: int, most: int) -> bytes:
        return os.read(leader, most)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


def attributes(event: PerfEvent, *, leader: bool) -> bytes:
    """An event for `PerfCalls.open`: a leader waits for `PerfCalls.enable`, the others go with it."""
    return _ATTR.pack(event.type, _ATTR.size, event.config, 0, 0, _READ_FORMAT, _DISABLED if leader else 0, 0, 0, 0)


def length(events: Sequence[PerfEvent]) -> int:
    """How many bytes a group of these returns."""
    # Their number, and the times enabled and running, come first.
    return 8 * (3 + len(events))


def decode(answer: bytes, events: int) -> PerfReading | None:
    """One group's answer; None when it no longer has all its events, because its CPU went offline meanwhile."""
    # The kernel takes a group apart then: only the leader answers, or none (no bytes: an event in error).
    parts = struct.unpack(f"={len(answer) // 8}Q", answer[: len(answer) // 8 * 8])
    if len(parts) < 3 + events or parts[0] != events:
        return None
    return PerfReading(enabled_ns=parts[1], running_ns=parts[2], counts=parts[3 : 3 + events])
