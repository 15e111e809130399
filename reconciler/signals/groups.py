"""CPU use and quota throttling of chosen groups: counters become `GroupUse`.

Only groups that an enabled policy needs are read; `sampled` lists them.
**Cost**: one stat and two small reads a group on v1 (one on v2), 10 µs: 500 groups once a second are 0.5 % of one CPU.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, final

from msgspec.structs import replace

from cgroupfs.errors import CgroupError, InputError
from cgroupfs.usage import SHORTEST_S, UsageCounters, UsageReader, rates_between
from reconciler.placement.estimate import remembered
from reconciler.policies import be_quota, quota_burst
from reconciler.policies.table import PoliciesConfig
from state.cpu import GroupUse
from state.model import Pod, Pools
from state.pod_index import index_of


class GroupDelta(NamedTuple):
    """Two readings of one group, for callers that need the kernel's own counts and not their rates."""

    before: UsageCounters
    after: UsageCounters


class _KnownGroup(NamedTuple):
    inode: int
    last: UsageCounters
    use: GroupUse | None
    moved: GroupDelta | None


@final
class GroupSampler:
    """Keeps the last reading of each group and the rates since the one before."""

    def __init__(self, usage: UsageReader) -> None:
        self._usage = usage
        self._known: dict[str, _KnownGroup] = {}

    def __len__(self) -> int:
        return len(self._known)

    def sample(self, groups: Mapping[str, int]) -> None:
        """Read these groups now (path -> inode, 0: not known) and forget all others."""
        known: dict[str, _KnownGroup] = {}
        for path, inode in groups.items():
            before = self._known.get(path)
            if before is not None and inode and before.inode != inode:
                before = None  # made again under its old path
            try:
                # Opens the files each time: kept open, they would halve the cost and take two descriptors a container.
                now = self._usage.read_cpu(path, inode)
            except (CgroupError, InputError):
                # Removed, or not in the kernel's format: the last reading ages until it expires; it is not zero.
                if before is not None:
                    known[path] = before
                continue
            known[path] = _delta(before, inode, now)
        self._known = known

    def current(self, now: float) -> dict[str, GroupUse]:
        """CPU use by group path, each with its age; groups with fewer than two readings are missing."""
        return {
            path: replace(group.use, age_s=max(0.0, now - group.last.at_s))
            for path, group in self._known.items()
            if group.use is not None
        }

    def current_of(self, path: str, now: float) -> GroupUse | None:
        """One group's CPU use, as in `current`."""
        group = self._known.get(path)
        return None if group is None or group.use is None else replace(group.use, age_s=max(0.0, now - group.last.at_s))

    def moved(self, path: str) -> GroupDelta | None:
        """The last two readings of one group; None when there are not two."""
        group = self._known.get(path)
        return None if group is None else group.moved


def _delta(before: _KnownGroup | None, inode: int, now: UsageCounters) -> _KnownGroup:
    if before is None:
        return _KnownGroup(inode, now, None, None)
    if 0.0 <= now.at_s - before.last.at_s < SHORTEST_S:
        # Too soon: the older reading remains, so that quick samples still add up to a rate.
        return before
    rates = rates_between(before.last, now)
    if rates is None or rates.cpu_milli is None:
        return _KnownGroup(inode, now, None, None)
    # A group that has never had a quota counts no periods: whether it would have been throttled is unknown.
    limited = bool(now.periods)
    use = GroupUse(
        cpu_milli=rates.cpu_milli,
        throttled=rates.throttled_share if limited else None,
        throttled_milli=rates.throttled_milli if limited else None,
        interval_s=rates.interval_s,
    )
    return _KnownGroup(inode, now, use, GroupDelta(before.last, now))


def sampled(pods: Mapping[str, Pod], policies: PoliciesConfig, pools: Pools | None, besteffort: str) -> dict[str, int]:
    """The groups whose CPU use some enabled policy needs, path -> inode, in path order. Pure.

    ``shared.measured``: online pods' own directories; else, where BE work overlaps with named pools, those of the pods
    in these. Where the BE budget is several quotas, the groups that have them. ``quota_burst``: the containers that may
    borrow. Not `quota_turbo`'s: it reads its own, ten times as often.
    """
    measured = policies.shared.enabled and policies.shared.measured
    wanted = {pod.group.path: pod.group.inode for pod in index_of(pods).online} if measured else {}
    if pools is not None:
        if pools.named and not pools.separate:
            bound = (pods[uid] for uid in pools.bound if uid in pods)
            wanted |= {pod.group.path: pod.group.inode for pod in bound}
        wanted |= be_quota.measured(index_of(pods).reclaimed, pools, besteffort)
        # No borrowers before the first pools, which list the containers with own CPUs.
        wanted |= {
            borrower.path: borrower.inode for _, borrower in quota_burst.borrowers(pods, pools, policies.quota_burst)
        }
    return dict(sorted(wanted.items()))


_FIRST: Final = 2
"""A rate takes two readings: work in the second one existed before the agent, and is not new."""


@final
class UsageHistory:
    """Between two readings: the fading peaks of CPU use by group, and since when each is known.

    `reconciler.placement.estimate.remembered` is the law.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, GroupUse] = {}
        self._at: float | None = None
        self._readings = 0

    def add(self, uses: Mapping[str, GroupUse], now: float, half_life_s: float) -> Mapping[str, GroupUse]:
        """The newest use of each group, with its memory. ``now`` on the monotonic clock."""
        before = None if self._readings < _FIRST else self._last
        elapsed_s = 0.0 if self._at is None else now - self._at
        self._readings += 1
        self._at = now
        self._last = remembered(before, uses, elapsed_s, half_life_s)
        return self._last
