"""Chooses BE work's CPUs, given their number: the fewest CPU changes, and no pinned pod gets a BE neighbour.

A v1 ``cpuset.cpus`` write costs time in proportion to all cpusets of the machine, and a moved task loses its cache, so
assigned CPUs stay assigned. Two rules have precedence: a CPU that is no candidate is released at once, and a thread
whose sibling is dedicated or reserved is used for BE work only when no other is left.

Where a machine has efficiency cores they are taken before the others and released after them; a site's plug-ins can
order the CPUs otherwise (`reconciler.placement.allocate.preference`).

Source: Koordinator takes sibling pairs round-robin over sockets and starts from nothing at each step, Katalyst counts
from the highest ids down. bypassd keeps pairs and high ids (interrupts and host work gather on the low ones).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, final

from cgroupfs.cpuset import CpuSet
from reconciler.placement.config import PlacementConfig
from state.topology import CpuKind, Topology

if TYPE_CHECKING:
    from reconciler.placement.allocate import CpuPreference


def choose_cpus(
    count: int,
    candidates: CpuSet,
    held: CpuSet,
    taken: CpuSet,
    topology: Topology,
    *,
    tiers: Sequence[CpuSet] | None = None,
) -> CpuSet:
    """``count`` of ``candidates`` (all, if there are fewer): those ``held`` now as far as possible.

    ``taken`` are the CPUs of others; threads of the same core as one of them are given last. ``tiers`` are disjoint
    sets, the best first; candidates in none of them are last. Left out: efficiency cores, then the others.
    """
    if count >= len(candidates):
        return candidates
    if tiers is None:
        tiers = [cpus for cpus in (topology.kind_cpus(CpuKind.EFFICIENCY),) if cpus]
    rest = candidates
    for tier in tiers:
        rest -= tier
    ranked = [*tiers, rest]
    last = neighbours(candidates, taken, topology)
    first = candidates - last
    chosen = _fill(min(count, len(first)), first, held, topology, ranked)
    if len(chosen) == count:
        return chosen
    return chosen | _fill(count - len(chosen), last, held, topology, ranked)


class BeCpuRules(NamedTuple):
    """The candidates that a chain of rules leaves, their order for `choose_cpus`, and the message for people."""

    candidates: CpuSet
    tiers: Sequence[CpuSet] | None
    message: str


def by_rules(candidates: CpuSet, topology: Topology, config: PlacementConfig, *, interrupts: CpuSet) -> BeCpuRules:
    """What a site's rules make of the candidates; the ``interrupts`` among them are last.

    Rules that leave none are not followed: BE pods run already, and have to run somewhere.
    """
    plugins = tuple(config.plugins.items())
    cpu_preference = _preference(_SameShape(topology), candidates, plugins, interrupts)
    text = "".join(f"; plug-in {name} failed and was skipped: {error}" for name, error in cpu_preference.errors.items())
    allowed = CpuSet.union(cpu_preference.tiers)
    if not allowed:
        names = ", ".join(cpu_preference.filters)
        return BeCpuRules(candidates, None, f"{text}; rules {names} exclude every CPU and are ignored")
    if allowed != candidates:
        text += f"; CPU {candidates - allowed} excluded by {', '.join(cpu_preference.filters)}"
    return BeCpuRules(allowed, cpu_preference.tiers, text)


@final
class _SameShape:
    """A topology as a key: the same object is the same machine.

    Comparing a thousand CPUs at each plan saves nothing.
    """

    __slots__ = ("topology",)

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __hash__(self) -> int:
        return id(self.topology)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameShape) and other.topology is self.topology


@lru_cache(maxsize=8)
def _preference(
    machine: _SameShape, cpus: CpuSet, rules: tuple[tuple[str, float], ...], interrupts: CpuSet
) -> "CpuPreference":
    """Once for all plans that ask about the same CPUs: budgets change each second, candidates seldom."""
    from reconciler.placement.allocate import preference
    from reconciler.placement.chain import loaded  # see `placement.config`

    chain = loaded(PlacementConfig(plugins=dict(rules)))
    return preference(cpus, machine.topology, chain, interrupts=interrupts)


def neighbours(cpus: CpuSet, taken: CpuSet, topology: Topology) -> CpuSet:
    """Those of ``cpus`` that share a core with one of ``taken``."""
    # Over the masks: hundreds of cores are asked at each plan, and a set made for each of them costs the most.
    near = 0
    for core in topology.cores():
        if core.mask & taken.mask:
            near |= core.mask
    return CpuSet.from_mask(cpus.mask & near)


def _fill(count: int, pool: CpuSet, held: CpuSet, topology: Topology, tiers: Sequence[CpuSet]) -> CpuSet:
    kept = held & pool
    if len(kept) > count:
        return _release(kept, len(kept) - count, topology, tiers)
    missing = count - len(kept)
    if not missing:
        return kept
    free, begun = pool.mask & ~kept.mask, kept.mask
    # The highest first, as `Topology.cores` has them the other way round.
    cores = [core.mask for core in reversed(topology.cores()) if core.mask & free]
    # Prefer a core that BE work already has a thread of: its other thread is of little use to other work.
    cores.sort(key=lambda core: not core & begun)
    chosen = kept.mask
    for tier in tiers:
        room = free & tier.mask
        for core in cores:
            here = core & room
            while here:
                cpu = 1 << (here.bit_length() - 1)
                chosen |= cpu
                here ^= cpu
                missing -= 1
                if not missing:
                    return CpuSet.from_mask(chosen)
    return CpuSet.from_mask(chosen)


def _release(kept: CpuSet, count: int, topology: Topology, tiers: Sequence[CpuSet]) -> CpuSet:
    """Release lone threads first, then whole cores from the lowest: online work gets cores, not halves.

    The last tier is released first.
    """
    left = kept.mask
    cores = [core.mask for core in topology.cores() if core.mask & left]
    cores.sort(key=lambda core: (core & left).bit_count())
    for tier in reversed(tiers):
        room = kept.mask & tier.mask
        for core in cores:
            here = core & room
            while here:
                cpu = here & -here
                left ^= cpu
                here ^= cpu
                count -= 1
                if not count:
                    return CpuSet.from_mask(left)
    return CpuSet.from_mask(left)
