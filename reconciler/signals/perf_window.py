"""Counts one pod's events for a while: opened on some CPUs, read once, closed. And probes what this machine can count.

Synchronous, for a worker thread.
"""

import errno
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

from msgspec import Struct

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import errno_name
from reconciler.signals.perf_abi import (
    FLAG_CGROUP,
    FLAG_CLOEXEC,
    PerfCalls,
    PerfEvent,
    attributes,
    decode,
    length,
)

_PARANOID: Final = "proc/sys/kernel/perf_event_paranoid"

# What the kernel means is not what the errno is called.
_WHY: Final[Mapping[int, str]] = {
    errno.ENOENT: "no hardware counter for it on this machine; in a virtual machine the host must pass its PMU "
    "through (QEMU: -cpu host,pmu=on); without it use rules on run queue wait",
    errno.EOPNOTSUPP: "the processor or the hypervisor does not support this event",
    errno.ENOSYS: "this kernel has no perf_event_open (CONFIG_PERF_EVENTS, or an unknown architecture)",
    errno.EINVAL: "refused by the kernel: too few counters for these events, or no CONFIG_CGROUP_PERF",
    errno.EBUSY: "the counters are in exclusive use by another program",
}


class PerfCounts(Struct, frozen=True, kw_only=True):
    """Counts of one pod. ``values`` by event name, scaled up where the counters were shared.

    ``coverage``: the part of the pod's time on a CPU that was counted, 0.0-1.0. ``busy_s``: that time.
    """

    values: Mapping[str, float]
    coverage: float
    busy_s: float


@final
class PerfWindow:
    """The open counters of one pod."""

    def __init__(self, calls: PerfCalls, events: Sequence[PerfEvent], directory: int, cpus: Iterable[int]) -> None:
        """Count from here on. ``directory``: the pod's, open; it can be closed afterwards. Offline CPUs are left out.

        Errors: `OSError`, with nothing left open: ENOENT the group was removed, EMFILE no more descriptors, ENODEV none
        of the CPUs is online; `why` has texts for the others.
        """
        self._calls = calls
        self._events = tuple(events)
        self._groups: list[list[int]] = []
        try:
            for cpu in cpus:
                self._open(directory, cpu)
        except OSError:
            self.close()
            raise
        if not self._groups:
            raise OSError(errno.ENODEV, "no CPU of the pod is online")

    @property
    def descriptors(self) -> int:
        return sum(map(len, self._groups))

    def _open(self, directory: int, cpu: int) -> None:
        group: list[int] = []
        self._groups.append(group)
        try:
            for event in self._events:
                leader = group[0] if group else -1
                text = attributes(event, leader=not group)
                group.append(self._calls.open(text, directory, cpu, leader, FLAG_CGROUP | FLAG_CLOEXEC))
            self._calls.enable(group[0])
        except OSError as exc:
            # The CPU is offline.
            if exc.errno != errno.ENODEV:
                raise
            self._groups.remove(group)
            _close(self._calls, group)

    def count(self) -> PerfCounts | None:
        """What was counted so far; None when the pod has not run, or never while its events had the counters.

        A CPU that went offline meanwhile is left out.
        """
        sums = [0.0] * len(self._events)
        enabled = running = 0
        for leader, *_ in self._groups:
            try:
                reading = decode(self._calls.read(leader, length(self._events)), len(self._events))
            except OSError as exc:
                if exc.errno != errno.ENODEV:
                    raise
                reading = None
            if reading is None:
                continue
            enabled += reading.enabled_ns
            running += reading.running_ns
            if reading.running_ns:
                # Others had the counters for the rest of the time: as if it was the same then.
                scale = reading.enabled_ns / reading.running_ns
                sums = [total + count * scale for total, count in zip(sums, reading.counts, strict=True)]
        if not running or not enabled:
            return None
        values = {event.name: total for event, total in zip(self._events, sums, strict=True)}
        return PerfCounts(values=values, coverage=min(1.0, running / enabled), busy_s=enabled / 1e9)

    def close(self) -> None:
        """Give all descriptors back; the pod's cgroup can be freed then."""
        groups, self._groups = self._groups, []
        for group in groups:
            _close(self._calls, group)


def _close(calls: PerfCalls, group: Sequence[int]) -> None:
    # The leader last: closed first, it would leave the others as groups of their own.
    for descriptor in reversed(group):
        calls.close(descriptor)


class PerfKey(NamedTuple):
    """One life of a pod's group."""

    uid: str
    inode: int


class PerfStart(NamedTuple):
    """One pod to count from now on. ``directory`` in the hierarchy that has the events."""

    key: PerfKey
    directory: str
    cpus: CpuSet


class PerfTurn(NamedTuple):
    """What `rotate` did: windows opened, what was counted (None: nothing), and what was refused."""

    opened: Mapping[PerfKey, PerfWindow]
    counted: Mapping[PerfKey, PerfCounts | None]
    failed: Mapping[PerfKey, OSError]


def rotate(
    calls: PerfCalls,
    events: Sequence[PerfEvent],
    finish: Mapping[PerfKey, PerfWindow],
    ended: Collection[PerfKey],
    begin: Iterable[PerfStart],
) -> PerfTurn:
    """Close what is to ``finish``, having counted it where it ``ended`` in time; then open what is to begin."""
    opened, counted, failed = dict[PerfKey, PerfWindow](), dict[PerfKey, PerfCounts | None](), dict[PerfKey, OSError]()
    for key, window in finish.items():
        try:
            if key in ended:
                counted[key] = window.count()
        except OSError as exc:
            failed[key] = exc
        finally:
            window.close()
    for start in begin:
        try:
            directory = os.open(start.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                opened[start.key] = PerfWindow(calls, events, directory, start.cpus)
            # The kernel's events hold the cgroup themselves.
            finally:
                os.close(directory)
        except OSError as exc:
            failed[start.key] = exc
    return PerfTurn(opened, counted, failed)


class PerfSupport(Struct, frozen=True, kw_only=True):
    """What this machine can count together. ``missing``: why not the others, by event name."""

    events: tuple[PerfEvent, ...] = ()
    missing: Mapping[str, str] = {}


def probe(
    calls: PerfCalls, needed: Sequence[PerfEvent], extra: Sequence[PerfEvent], cpu: int, root: str = "/"
) -> PerfSupport:
    """Try the events on one CPU, for all tasks: the rights and the counters are the same as for a pod.

    Without one of ``needed`` nothing is counted; of ``extra`` only the unavailable events are left out.
    """
    opened: list[int] = []
    events: list[PerfEvent] = []
    missing: dict[str, str] = {}
    try:
        for event in (*needed, *extra):
            leader = opened[0] if opened else -1
            try:
                opened.append(calls.open(attributes(event, leader=not opened), -1, cpu, leader, FLAG_CLOEXEC))
            except OSError as exc:
                message = why(exc, root)
                if event in needed:
                    return PerfSupport(missing={perf_event.name: message for perf_event in (*needed, *extra)})
                missing[event.name] = message
                continue
            events.append(event)
    finally:
        _close(calls, opened)
    return PerfSupport(events=tuple(events), missing=missing)


def why(exc: OSError, root: str = "/") -> str:
    """An error of `PerfCalls.open` in words, with the remedy."""
    code = exc.errno or 0
    if code in {errno.EACCES, errno.EPERM}:
        level = _paranoid(root)
        if code == errno.EPERM and level is not None and level <= 0:
            return "not permitted (EPERM): a seccomp filter blocks perf_event_open; allow it for bypassd"
        shown = "" if level is None else f" is {level}: it"
        return (
            f"not permitted ({errno_name(code)}): kernel.perf_event_paranoid{shown} must be 0 or less, or bypassd "
            "needs CAP_PERFMON (CAP_SYS_ADMIN before Linux 5.8) and a seccomp filter that allows perf_event_open"
        )
    if code in {errno.EMFILE, errno.ENFILE}:
        return f"no file descriptor is left ({errno_name(code)}): raise LimitNOFILE, or lower the configured number"
    return f"{_WHY.get(code, 'refused by the kernel')} ({errno_name(code)})"


def _paranoid(root: str) -> int | None:
    try:
        with open(os.path.join(root, _PARANOID), encoding="ascii", newline="\n") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
