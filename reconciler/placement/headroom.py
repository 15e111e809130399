"""Headroom: how much CPU BE pods may be promised, per NUMA node, in numbers that do not flap.

Pure. Units: thousandths of a CPU; times are seconds on the view's clock. It is what BE pods may have together, with
what they use already: the size of the extended resource, not what is left of it.

Source: Katalyst's CPU headroom (idle time on the reclaimed CPUs and what BE uses there; a window of four readings 30 s
apart, smallest and largest step). Where we differ, and why:

- Every reading (one a second) counts, not one in thirty: a mean of the whole time, not of four chance moments.
- What was promised last is kept here and in the agent's own store. Katalyst's util-based headroom asks the API server
  for it, and stops where there is none.
- It is never raised to a floor (Katalyst: 4 CPUs on a full node), and no other resource's shortage turns it to 0.
- Up by a largest step, and only from the smallest step on; down to the mean at once. So a promise is never above the
  mean of its window, and the window alone softens a fall (four readings: a quarter of it at a time).
- Each reading is capped by the budget of its moment, so a budget that dips for a second costs a 120th of it; CPUs that
  leave the pools leave the promise at once.
- Unknown is not the last value for ever: nothing grows on it, and after ``unknown_hold_s`` nothing is promised.
- Nodes are measured one by one. Katalyst gives nodes without bound pods an equal part of the sum.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from state.model import NodeCpu, Pools
from state.topology import Topology

_CPU: Final = 1000


class HeadroomConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What BE pods may be promised: its window, its steps, and where it is reported."""

    report_s: Annotated[float, Meta(ge=1, le=3600, description="seconds between two changes of what is promised")] = (
        30.0
    )
    window_s: Annotated[
        float, Meta(ge=1, le=86400, description="the promise is the mean of this long; at least one report_s counts")
    ] = 120.0
    min_step_milli: Annotated[
        int, Meta(ge=0, le=1_000_000, description="a NUMA node's promise does not grow by less than this")
    ] = 300
    max_step_milli: Annotated[
        int, Meta(ge=1, le=8_192_000, description="nor by more than this at once; it falls as far as it must")
    ] = 4000
    stale_after_s: Annotated[
        float, Meta(gt=0, le=3600, description="seconds after which a CPU reading is too old to count")
    ] = 3.0
    unknown_hold_s: Annotated[
        float, Meta(ge=0, le=86400, description="seconds without a good reading before nothing is promised any more")
    ] = 240.0
    file: Annotated[
        str | None,
        Meta(
            description="JSON file that an overcommit reporter reads, replaced at each change; null: none",
            extra={"path": True},
        ),
    ] = None


class Sample(Struct, frozen=True, kw_only=True):
    """One reading, by NUMA node. ``supply`` None: unknown. ``tops``: the CPUs where BE may run, as thousandths.

    ``cpus``: those CPUs. ``budget_milli``: what BE may use on all of them together now.
    """

    cpus: Mapping[int, CpuSet]
    supply: Mapping[int, int] | None
    budget_milli: int

    @property
    def tops(self) -> dict[int, int]:
        """What each node could give at most."""
        return {node: _CPU * len(cpus) for node, cpus in self.cpus.items()}


class Mean(Struct, frozen=True, kw_only=True):
    """Readings of one ``report_s``, up to ``until``."""

    until: float
    milli: Mapping[int, int]


class Headroom(Struct, frozen=True, kw_only=True):
    """What is promised by NUMA node, and what the next step needs to know.

    ``sums`` of ``count`` readings since ``since`` (None: the next one begins it) are not in the ``window`` yet.
    ``known_at``: the last good reading. ``changed_at``: when the promise changed last.
    """

    milli: Mapping[int, int] = {}
    window: tuple[Mean, ...] = ()
    since: float | None = None
    count: int = 0
    sums: Mapping[int, int] = {}
    known_at: float | None = None
    changed_at: float | None = None
    reason: str = "nothing is measured yet"

    @property
    def total_milli(self) -> int:
        """The sum over the nodes."""
        return sum(self.milli.values())


def take(pools: Pools, topology: Topology, cpu: NodeCpu | None, config: HeadroomConfig) -> Sample:
    """What the CPUs where BE may run have to give now: idle time, and what BE work uses there.

    A CPU whose idle time is not known gives nothing. BE use is told for the whole machine only: it is split over the
    nodes as the busy time of these CPUs is, and never more than that.
    """
    room = pools.reclaimed if pools.confined else pools.shared | pools.reclaimed
    cpus = {node: topology.node_cpus(node) & room for node in topology.nodes()}
    fresh = cpu is not None and cpu.age_s is not None and cpu.age_s <= config.stale_after_s
    if cpu is None or not fresh:
        return Sample(cpus=cpus, supply=None, budget_milli=pools.budget_milli)
    idle: dict[int, int] = {}
    busy: dict[int, int] = {}
    for node, here in cpus.items():
        known = [min(1.0, max(0.0, cpu.idle[one])) for one in here if one in cpu.idle]
        idle[node] = int(sum(known) * _CPU)
        busy[node] = len(known) * _CPU - idle[node]
    all_busy = sum(busy.values())
    used = min(max(0, cpu.reclaimed_milli), all_busy)
    supply = {node: idle[node] + (used * busy[node] // all_busy if all_busy else 0) for node in sorted(cpus)}
    return Sample(cpus=cpus, supply=supply, budget_milli=pools.budget_milli)


def step(state: Headroom, sample: Sample, now: float, config: HeadroomConfig) -> Headroom:
    """One reading: it is added up, and at the end of each ``report_s`` the promise follows the mean of the window."""
    tops = sample.tops
    held = {node: min(state.milli.get(node, 0), tops[node]) for node in sorted(tops)}
    if (state.since or now) > now or (state.known_at is not None and state.known_at > now):
        # The clock restarted. What is promised stays; what was measured cannot be dated.
        state = Headroom(milli=state.milli, known_at=now, reason=state.reason)
    if sample.supply is None:
        return _unknown(state, held, now, config)
    reading = _capped(sample.supply, sample.budget_milli)
    count = state.count + 1
    sums = {node: state.sums.get(node, 0) + reading.get(node, 0) for node in held}
    since, reason = state.since, state.reason
    if since is None:
        since, reason = now, f"measured for less than {config.report_s:g} s so far"
    state = _promising(replace(state, since=since, count=count, sums=sums, known_at=now), held, now, reason)
    if now - since < config.report_s:
        return state
    mean = Mean(until=now, milli={node: total // count for node, total in sums.items()})
    window = (*(one for one in state.window if one.until > now - config.window_s), mean)
    state = replace(state, window=window, since=now, count=0, sums={})
    milli, why = _followed(held, tops, window, config)
    return _promising(state, milli, now, why)


def restored(milli: Mapping[int, int], age_s: float, now: float, config: HeadroomConfig) -> Headroom:
    """The state at a start, from what an earlier run promised ``age_s`` ago; too old (or of the future) is nothing."""
    if not 0.0 <= age_s <= config.unknown_hold_s:
        return Headroom()
    return Headroom(milli=dict(milli), known_at=now - age_s, reason="as before the restart, until it is measured")


def _unknown(state: Headroom, held: Mapping[int, int], now: float, config: HeadroomConfig) -> Headroom:
    # Readings on both sides of a gap are no mean of the time between.
    state = replace(state, count=0, sums={}, since=None)
    if state.known_at is None:
        return _promising(state, dict.fromkeys(held, 0), now, "nothing is measured yet")
    if now - state.known_at > config.unknown_hold_s:
        words = f"CPU use has not been known for {config.unknown_hold_s:g} s: nothing is promised"
        return _promising(replace(state, window=()), dict.fromkeys(held, 0), now, words)
    return _promising(state, held, now, "CPU use is not known: nothing grows")


def _followed(
    held: Mapping[int, int], tops: Mapping[int, int], window: tuple[Mean, ...], config: HeadroomConfig
) -> tuple[dict[int, int], str]:
    milli: dict[int, int] = {}
    rising = 0
    for node, before in held.items():
        mean = min(tops[node], sum(one.milli.get(node, 0) for one in window) // len(window))
        if mean <= before:
            milli[node] = mean
        elif mean - before < config.min_step_milli:
            milli[node] = before
        else:
            milli[node] = min(mean, before + config.max_step_milli)
            rising += milli[node] < mean
    words = f"the mean of {len(window)} times {config.report_s:g} s"
    if rising:
        words += f"; grows by {config.max_step_milli} at a time"
    return milli, words


def _promising(state: Headroom, milli: Mapping[int, int], now: float, reason: str) -> Headroom:
    if milli == state.milli:
        return replace(state, reason=reason)
    return replace(state, milli=milli, changed_at=now, reason=reason)


def _capped(supply: Mapping[int, int], budget: int) -> Mapping[int, int]:
    """No more than the budget in all, cut in proportion."""
    total = sum(supply.values())
    if total <= max(0, budget):
        return supply
    return {node: milli * max(0, budget) // total for node, milli in supply.items()}
