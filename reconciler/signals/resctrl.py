"""Cache occupancy and memory bandwidth of control groups and pods, from resctrl's counters, as rates.

Synchronous, for a worker thread.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

from msgspec import Struct

from cgroupfs.errors import CgroupError
from resctrl.monitor import BandwidthRate, MonitorGroups, MonitorReading, rates, without
from state.cache import Contention
from state.evidence import Sample

FRESH_S: Final = 5.0
"""The occupancy of a monitoring group this young may be the last tenant's."""
_MEGA: Final = 1_000_000


class ResctrlUsage(Struct, frozen=True, kw_only=True):
    """One reading. ``groups`` by control group, ``pods`` by uid; each domain's rates. Seconds on the caller's clock."""

    at_s: float
    groups: Mapping[str, Mapping[int, BandwidthRate]] = {}
    pods: Mapping[str, Mapping[int, BandwidthRate]] = {}


@final
class ResctrlSampler:
    """Keeps the readings before, by directory."""

    def __init__(self, monitors: MonitorGroups) -> None:
        self._monitors = monitors
        self._before: dict[str, MonitorReading] = {}
        self._first: dict[str, tuple[int, float]] = {}
        self._inside: dict[str, dict[str, int]] = {}

    def sample(self, controls: Collection[str], watched: Mapping[str, tuple[str, str]], now: float) -> ResctrlUsage:
        """Read all of ``controls`` and the monitoring groups of ``watched``: uid -> (control group, name).

        A group that was removed, or whose files cannot be read, is missing in the result.
        """
        after: dict[str, MonitorReading] = {}
        inside = {name: self._monitors.inside(name) for name in controls}
        gone = {name: self._gone(name, numbers) for name, numbers in inside.items()}
        groups = {
            name: bandwidth_rates
            for name in controls
            if (bandwidth_rates := self._read(name, "", now, after, gone[name])) is not None
        }
        pods = {
            uid: bandwidth_rates
            for uid, (control, name) in watched.items()
            if (bandwidth_rates := self._read(control, name, now, after)) is not None
        }
        for uid, (control, name) in watched.items():
            reading = after.get(self._monitors.path(control, name))
            blind = [domain for domain, use in reading.domains.items() if use.total is None] if reading else []
            # A cache may have come online after its control group was read.
            for domain in groups.get(control, {}).keys() & blind if uid in pods else ():
                # The kernel's sum leaves out what it could not read, and does not say so.
                groups[control][domain] = BandwidthRate(occupancy=groups[control][domain].occupancy)
        self._before, self._inside = after, inside
        self._first = {path: first for path, first in self._first.items() if path in after}
        return ResctrlUsage(at_s=now, groups=groups, pods=pods)

    def _gone(self, control: str, numbers: Mapping[str, int]) -> list[MonitorReading | None]:
        """Counts of monitoring groups that have left a control group since the last reading; None: unknown."""
        readings: list[MonitorReading | None] = []
        for path, inode in self._inside.get(control, {}).items():
            if numbers.get(path) != inode:
                last = self._before.get(path)
                readings.append(last if last is not None and last.inode == inode else None)
        return readings

    def _read(
        self,
        control: str,
        name: str,
        now: float,
        after: dict[str, MonitorReading],
        gone: Sequence[MonitorReading | None] = (),
    ) -> dict[int, BandwidthRate] | None:
        path = self._monitors.path(control, name)
        try:
            reading = self._monitors.read(control, name, at_s=now)
        except CgroupError:
            return None
        after[path] = reading
        inode, since = self._first.get(path, (reading.inode, now))
        if inode != reading.inode:
            since = now
        self._first[path] = reading.inode, since
        before = self._before.get(path)
        # A monitoring group that has left is no longer in the control group's sum, so that it is subtracted from the
        # previous reading; with an unknown one the interval is unknown.
        bandwidth_rates = rates(before if before is None or not gone else without(before, gone), reading)
        if name and now - since < FRESH_S:
            return {
                domain: BandwidthRate(total_s=rate.total_s, local_s=rate.local_s)
                for domain, rate in bandwidth_rates.items()
            }
        return bandwidth_rates


def contention(
    use: ResctrlUsage | None,
    reclaimed: Collection[str],
    *,
    bandwidth_mbps: int,
    online: int,
    misses: Mapping[str, Sample],
    now: float,
) -> Contention:
    """Input of the control law: the bandwidth in use of each domain, and BE's part of it.

    ``reclaimed``: the control groups that contain BE pods only.
    """
    if use is None:
        return Contention(misses=misses, online=online)
    domains = sorted({domain for values in use.groups.values() for domain in values})
    used: dict[int, float] = {}
    of_be: dict[int, float] = {}
    for domain in domains:
        known = {name: values[domain].total_s for name, values in use.groups.items() if domain in values}
        # A control group's counters include its monitoring groups': the sum over control groups is the machine.
        whole = sum(value for value in known.values() if value is not None)
        # One unknown group: so is its domain, and reported as such (``blind``).
        if None in known.values():
            continue
        used[domain] = 100.0 * whole / (bandwidth_mbps * _MEGA)
        if reclaimed and whole > 0:
            of_be[domain] = 100.0 * sum(known.get(name) or 0.0 for name in reclaimed) / whole
    return Contention(
        misses=misses,
        bandwidth=used or None,
        blind=len(used) < len(domains),
        reclaimed=of_be,
        online=online,
        age_s=max(0.0, now - use.at_s),
    )
