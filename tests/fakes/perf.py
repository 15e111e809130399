"""perf_event_open as the kernel answers it, for machines without a PMU: strict in what it takes, honest in counts.

`FakePerf.run` lets a group run on a CPU: every open event of it and of the groups above counts, as far as there are
hardware counters; where there are too few, groups of events share them over time, as the kernel's rotation does.
"""

import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_CGROUP, _CLOEXEC = 4, 8
_ATTR = struct.Struct("=IIQQQQQIIQ")
SOFTWARE = 1
"""``PERF_TYPE_SOFTWARE``."""
SOFTWARE_CONFIGS = frozenset(range(12))


@dataclass(eq=False)
class _Event:
    descriptor: int
    type: int
    config: int
    cpu: int
    group: Path | None
    leader: "_Event | None"
    enabled: bool
    siblings: list["_Event"] = field(default_factory=list)
    count: float = 0.0
    enabled_ns: int = 0
    running_ns: int = 0
    dead: bool = False

    @property
    def hardware(self) -> bool:
        return self.type == 0


class FakePerf:
    """`PerfCalls`. ``hardware``: configs that the PMU has; ``counters``: how many count at once on each CPU."""

    def __init__(
        self,
        root: Path,
        *,
        cpus: int = 2,
        hardware: tuple[int, ...] = (0, 1, 3),
        counters: int = 4,
        most: int = 1 << 16,
        refusal: int = 0,
    ) -> None:
        self.root = root
        self.online = set(range(cpus))
        self.hardware = hardware
        self.counters = counters
        self.most = most
        self.refusal = refusal
        self.events: dict[int, _Event] = {}
        self.removed: set[Path] = set()
        self.calls: list[str] = []
        self._cpus = cpus
        self._next = 1000

    # Requests to the kernel

    def open(self, attributes: bytes, pid: int, cpu: int, leader: int, flags: int) -> int:
        self.calls.append("open")
        kind, size, config, period, _sample, read_format, bits, *_ = _ATTR.unpack(attributes)
        if size != len(attributes) or period or read_format != 0b1011 or flags & ~(_CGROUP | _CLOEXEC):
            raise _error(errno.EINVAL)
        if self.refusal:
            raise _error(self.refusal)
        group = self._group(pid, flags)
        if not 0 <= cpu < self._cpus:
            raise _error(errno.EINVAL)
        if kind not in {0, 1} or config not in (self.hardware if kind == 0 else SOFTWARE_CONFIGS):
            raise _error(errno.ENOENT)
        if cpu not in self.online:
            raise _error(errno.ENODEV)
        above = self._leader(leader, cpu, group)
        event = _Event(self._next, kind, config, cpu, group, above, enabled=not bits & 1)
        members = [*([above, *above.siblings] if above else []), event]
        if sum(member.hardware for member in members) > self.counters:
            raise _error(errno.EINVAL)
        if len(self.events) >= self.most:
            raise _error(errno.EMFILE)
        if above is not None:
            above.siblings.append(event)
        self._next += 1
        self.events[event.descriptor] = event
        return event.descriptor

    def _group(self, pid: int, flags: int) -> Path | None:
        if not flags & _CGROUP:
            assert pid == -1, "only everybody on a CPU is asked for here"
            return None
        path = Path(os.readlink(f"/proc/self/fd/{pid}").removesuffix(" (deleted)"))
        if not path.is_relative_to(self.root):
            raise _error(errno.EBADF)
        if path in self.removed:
            raise _error(errno.ENOENT)
        return path

    def _leader(self, leader: int, cpu: int, group: Path | None) -> _Event | None:
        if leader == -1:
            return None
        above = self.events.get(leader)
        if above is None:
            raise _error(errno.EBADF)
        if above.leader is not None or above.cpu != cpu or above.group != group:
            raise _error(errno.EINVAL)
        return above

    def enable(self, leader: int) -> None:
        event = self._known(leader)
        for item in (event, *event.siblings):
            item.enabled = True

    def read(self, leader: int, most: int) -> bytes:
        self.calls.append("read")
        event = self._known(leader)
        members = [event] if event.dead else [event, *event.siblings]
        if most < 8 * (3 + len(members)):
            raise _error(errno.ENOSPC)
        parts = (len(members), event.enabled_ns, event.running_ns, *(int(member.count) for member in members))
        return struct.pack(f"={len(parts)}Q", *parts)

    def close(self, descriptor: int) -> None:
        self.calls.append("close")
        event = self._known(descriptor)
        del self.events[descriptor]
        if event.leader is not None:
            event.leader.siblings.remove(event)
        for sibling in event.siblings:
            sibling.leader = None

    def _known(self, descriptor: int) -> _Event:
        if descriptor not in self.events:
            raise _error(errno.EBADF)
        return self.events[descriptor]

    # What happens on the machine

    def run(self, group: Path, cpu: int, seconds: float, amounts: Mapping[int, float]) -> None:
        """Let a group run on a CPU: ``amounts`` by the hardware event's config."""
        assert cpu in self.online
        leaders = [
            event
            for event in self.events.values()
            if event.leader is None and event.cpu == cpu and event.enabled and not event.dead
            if event.group is None or group.is_relative_to(event.group)
        ]
        wanted = sum(sum(event.hardware for event in (leader, *leader.siblings)) for leader in leaders)
        share = min(1.0, self.counters / wanted) if wanted else 1.0
        for leader in leaders:
            for item in (leader, *leader.siblings):
                item.enabled_ns += int(seconds * 1e9)
                item.running_ns += int(seconds * 1e9 * share)
                item.count += amounts.get(item.config, 0.0) * share

    def unplug(self, cpu: int) -> None:
        """The CPU is taken offline: groups of events there are taken apart and count no more."""
        self.online.discard(cpu)
        for event in self.events.values():
            if event.cpu == cpu:
                event.dead = True

    def remove(self, group: Path) -> None:
        """Remove a group's directory, which open events of it survive."""
        group.rmdir()
        self.removed.add(group)

    def holding(self, group: Path) -> int:
        """How many events keep a group from being freed."""
        return sum(event.group == group for event in self.events.values())


def _error(code: int) -> OSError:
    return OSError(code, errno.errorcode[code])
