"""The order in which CFS bandwidth (quota, period, burst) of a tree of groups may be written. Pure.

The kernel's rules, v1: a limited group's quota/period ratio is at most that of the nearest limited group above it, at
every moment; "no limit" is always accepted. Both versions: burst is at most the quota (EINVAL for either of them).
v2 has no ratio rule, and quota and period share one file; it gets the same order.

Source: kernel/sched/core.c, tg_cfs_schedulable_down and tg_set_cfs_bandwidth; tried on 5.10, 6.1 and 6.18.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import UNSET, UnsetType

from cgroupfs.codecs import DEFAULT_PERIOD_US, MIN_BANDWIDTH_US, Version, cpu_max
from cgroupfs.knobs import CATALOG
from cgroupfs.steps import nearest_known

_QUOTA = CATALOG["cpu.quota"]
_PERIOD = CATALOG["cpu.period"]
_BURST = CATALOG["cpu.burst"]
_RATIO_RULE: Final = "cpu.quota: child ratio at most parent ratio"


class Band(NamedTuple):
    """Bandwidth of one group. What is not known is taken to be the kernel's default. Units: µs."""

    quota: int | None = None
    period: int = DEFAULT_PERIOD_US
    burst: int = 0

    @property
    def ratio(self) -> int | None:
        """CPUs in 2^-20ths, rounded as the kernel does; None: no limit."""
        return None if self.quota is None else (self.quota << 20) // self.period

    def at_least(self, ratio: int) -> "Band":
        """With the least quota whose ratio, as the kernel rounds it, is not below ``ratio``."""
        return self._replace(quota=max(MIN_BANDWIDTH_US, -(-ratio * self.period >> 20)))


class BandWrite(NamedTuple):
    """Write ``text`` to the knob's file of ``path``."""

    path: str
    knob: str
    text: str


class BandRefusal(NamedTuple):
    """Why one of the group's knobs cannot have its wanted value. As in `cgroupfs.steps.BlockedChange`."""

    rule: str
    reason: str
    by: str = ""
    instead: int | UnsetType = UNSET


class _Loss(NamedTuple):
    """Why a change ends in conflict, and the group that it conflicts with."""

    reason: str
    by: str


def order_bandwidth(
    want: Mapping[str, Band], have: Mapping[str, Band], version: Version, least: Collection[str] = ()
) -> tuple[list[BandWrite], dict[tuple[str, str], BandRefusal]]:
    """The writes that take the changed groups (``want``) from ``have`` (every known group) to where they may go.

    ``least``: the groups that get the least possible quota where a group inside (a tenant's, which no change lowers)
    has a larger ratio than wanted.
    """
    goal, refused = _feasible(want, have, version, least)
    order = sorted(goal, key=lambda path: (path.count("/"), path))
    # Lowered before the quotas and raised after them: a quota below the burst is EINVAL.
    writes = [_burst_write(path, goal[path], version) for path in order if goal[path].burst < have[path].burst]
    lowered = [path for path in order if _lowers(have[path].ratio, goal[path].ratio)]
    unlimited = [path for path in order if goal[path].quota is None]
    later = set(lowered) | set(unlimited)
    raised = [path for path in order if path not in later]
    # Only v1 has two files, between whose writes the group has a third ratio.
    crossing = version == 1 and any(goal[path].period != have[path].period for path in order)
    limited_above = _limited_above(have) if crossing else set()
    # "No limit" is always accepted; then ratios are lowered from the leaves up, and raised from the root down.
    for path in (*unlimited, *reversed(lowered), *raised):
        writes.extend(_quota_writes(path, have[path], goal[path], version, path not in limited_above))
    writes.extend(_burst_write(path, goal[path], version) for path in order if goal[path].burst > have[path].burst)
    return writes, refused


def _burst_write(path: str, band: Band, version: Version) -> BandWrite:
    return BandWrite(path, _BURST.name, _BURST.encode(band.burst, version))


def _lowers(old: int | None, new: int | None) -> bool:
    return old is not None and new is not None and new < old


def _limited_above(have: Mapping[str, Band]) -> set[str]:
    """Groups with a limited group somewhere below them."""
    above: set[str] = set()
    for path, band in have.items():
        if band.quota is None:
            continue
        up = nearest_known(path, have)
        while up is not None and up not in above:
            above.add(up)
            up = nearest_known(up, have)
    return above


def _quota_writes(path: str, old: Band, new: Band, version: Version, leaf: bool) -> Iterator[BandWrite]:
    """Quota and period of one group, such that every value in between is legal too."""
    if (old.quota, old.period) == (new.quota, new.period):
        return
    if version == 2:
        if old.period == new.period:
            yield BandWrite(path, _QUOTA.name, _QUOTA.encode(new.quota, 2))
        else:
            yield BandWrite(path, _PERIOD.name, cpu_max(new.quota, new.period))
        return
    quota = BandWrite(path, _QUOTA.name, _QUOTA.encode(new.quota, 1))
    period = BandWrite(path, _PERIOD.name, _PERIOD.encode(new.period, 1))
    if old.period == new.period:
        yield quota
    elif old.quota == new.quota:
        yield period
    elif new.quota is None:
        yield from (quota, period)
    elif old.quota is None:
        yield from (period, quota)
    elif leaf:
        # Through the smaller of the two ratios in between: it cannot exceed the parent's, and no group is below.
        yield from (quota, period) if new.quota * new.period <= old.quota * old.period else (period, quota)
    else:
        # Either ratio in between may hit the parent's or a child's; without a limit no ratio is compared.
        yield BandWrite(path, _QUOTA.name, _QUOTA.encode(None, 1))
        yield from (period, quota)


def _feasible(
    want: Mapping[str, Band], have: Mapping[str, Band], version: Version, least: Collection[str]
) -> tuple[dict[str, Band], dict[tuple[str, str], BandRefusal]]:
    """The wanted bands, less what breaks a rule in the end, and why."""
    goal: dict[str, Band] = {}
    refused: dict[tuple[str, str], BandRefusal] = {}
    for path, band in want.items():
        goal[path] = _with_legal_burst(path, band, have[path], refused)
    if version == 2:
        return goal, refused
    wished = dict(goal)
    lost: set[str] = set()
    raised: dict[str, int] = {}
    # Each round refuses a change or raises one to the ratio of a group inside, so the rounds end.
    while losers := _over_parent({**have, **goal}, have, goal, raised):
        for path, (reason, by) in losers.items():
            band = goal[path]
            why = BandRefusal(_RATIO_RULE, reason, by)
            if path in least and band.quota is not None and by.startswith(f"{path}/"):
                ratio, inner = _largest_inside(path, {**have, **goal}, goal)
                if ratio > raised.get(path, 0):
                    raised[path] = ratio
                    goal[path] = _with_legal_burst(path, band.at_least(ratio), have[path], refused)
                    message = f"{inner} inside it has {_cpus(ratio)} CPU: no less is possible"
                    refused[path, _QUOTA.name] = BandRefusal(_RATIO_RULE, message, inner, goal[path].quota or 0)
                    continue
            raised.pop(path, None)
            refused.pop((path, _QUOTA.name), None)
            if band.quota != have[path].quota:
                refused[path, _QUOTA.name] = why
            if band.period != have[path].period:
                refused[path, _PERIOD.name] = why
            goal[path] = _with_legal_burst(path, have[path]._replace(burst=band.burst), have[path], refused)
            lost.add(path)
    # A child refused because of a parent that was refused later may fit after all.
    final = {**have, **goal}
    fitting = [path for path in lost if _fits_above(path, wished[path], final)]
    again = {**goal, **{path: wished[path] for path in fitting}}
    if fitting and not _over_parent({**have, **again}, have, again, raised):
        goal = again
        for path in fitting:
            refused.pop((path, _QUOTA.name), None)
            refused.pop((path, _PERIOD.name), None)
    return goal, refused


def _largest_inside(path: str, final: Mapping[str, Band], goal: Collection[str]) -> tuple[int, str]:
    """The largest ratio of a limited group below this one, and that group: the deepest, if possible no changed one."""
    below = f"{path}/"
    found = (
        (band.ratio or 0, other not in goal, other.count("/"), other)
        for other, band in final.items()
        if other.startswith(below)
    )
    ratio, _, _, by = max(found)
    return ratio, by


def _fits_above(path: str, band: Band, final: Mapping[str, Band]) -> bool:
    ratio = band.ratio
    up = nearest_known(path, final)
    while up is not None and final[up].ratio is None:
        up = nearest_known(up, final)
    limit = None if up is None else final[up].ratio
    return ratio is None or limit is None or ratio <= limit


def _with_legal_burst(path: str, band: Band, old: Band, refused: dict[tuple[str, str], BandRefusal]) -> Band:
    if band.quota is None or band.burst <= band.quota:
        return band
    rule = "cpu.burst at most cpu.quota"
    if band.burst != old.burst:
        refused[path, _BURST.name] = BandRefusal(rule, f"burst {band.burst} µs is above the quota of {band.quota} µs")
        band = band._replace(burst=old.burst)
    if band.quota is not None and band.burst > band.quota != old.quota:
        refused[path, _QUOTA.name] = BandRefusal(
            rule, f"quota {band.quota} µs is below the burst of {band.burst} µs: lower cpu.burst with it"
        )
        band = band._replace(quota=old.quota)
    return band


def _over_parent(
    final: Mapping[str, Band], have: Mapping[str, Band], goal: Mapping[str, Band], raised: Collection[str] = ()
) -> dict[str, _Loss]:
    """Changes that end above their nearest limited ancestor, or below a descendant, and why.

    The child loses if it is a change, else the parent. ``raised``: children that have the least possible quota.
    """
    limits: dict[str, tuple[str, int] | None] = {}
    children: dict[str, _Loss] = {}
    parents: dict[str, _Loss] = {}
    largest: dict[str, int] = {}
    for path in sorted(final, key=lambda path: path.count("/")):
        up = nearest_known(path, final)
        inherited = limits[up] if up is not None else None
        ratio = final[path].ratio
        limits[path] = inherited if ratio is None else (path, ratio)
        if ratio is None or inherited is None or ratio <= inherited[1]:
            continue
        above, limit = inherited
        above_changes = above in goal and (goal[above].ratio != have[above].ratio or above in raised)
        path_changes = path in goal and goal[path].ratio != have[path].ratio
        # A child with the least possible quota is refused under an unchanged parent only.
        if path_changes and not (path in raised and above_changes):
            children[path] = _Loss(f"{_cpus(ratio)} CPU exceed the {_cpus(limit)} of {above}", above)
        elif above_changes:
            if ratio > largest.get(above, 0):
                largest[above] = ratio
                reason = f"its child {path} has {_cpus(ratio)} CPU, more than {_cpus(limit)}"
                parents[above] = _Loss(reason, path)
        else:
            # Neither has a new ratio, but a limit between them may have been lifted: that change is the cause.
            lifted = _lifted_between(path, above, have, goal)
            if lifted is not None:
                reason = f"its child {path} has {_cpus(ratio)} CPU, more than the {_cpus(limit)} of {above}"
                parents[lifted] = _Loss(reason, path)
    # Children wait as long as there are parents to refuse: they may fit under the parent's old value.
    return parents or children


def _lifted_between(path: str, above: str, have: Mapping[str, Band], goal: Mapping[str, Band]) -> str | None:
    up = nearest_known(path, have)
    while up is not None and up != above:
        if up in goal and goal[up].quota is None and have[up].quota is not None:
            return up
        up = nearest_known(up, have)
    return None


def _cpus(ratio: int) -> str:
    return f"{ratio / (1 << 20):.3g}"
