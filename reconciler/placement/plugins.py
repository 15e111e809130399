"""The built-in rules of the choice of CPUs, each one class.

A site's own has the same form and is named in the config.
"""

# ruff: noqa: ARG002  # an extension point has one signature, whether a rule needs all of it or not

from collections.abc import Iterable, Iterator
from typing import final

from cgroupfs.cpuset import CpuSet
from reconciler.placement.chain import PlacementContext, Plugin, PluginRequest, Scored
from reconciler.placement.cpu_accumulator import L3, NODE, SOCKET, CpuAccumulator
from reconciler.placement.demand import CpuDemand
from state.cpu import AntiAffinity
from state.model import PodClass
from state.topology import LOCAL_DISTANCE, CpuKind


@final
class PreferCoreKind(Plugin):
    """Performance cores for owners of CPUs, efficiency cores for BE work, where a machine has both (issue 106157)."""

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        return [(context.topology.kind_cpus(_kind(demand)) & cpus, 1.0)]

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return len(context.topology.kind_cpus(_kind(question.demand)) & cpus) / len(cpus)


def _kind(demand: CpuDemand) -> CpuKind:
    return CpuKind.EFFICIENCY if demand.pod_class is PodClass.RECLAIMED else CpuKind.PERFORMANCE


@final
class Interrupts(Plugin):
    """CPUs that serve a network card's interrupts last: they are taken away from their owner at each packet."""

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        return [(cpus - context.interrupts, 1.0)]

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return 1.0 - len(cpus & context.interrupts) / len(cpus)


@final
class WholeL3(Plugin):
    """One L3 domain where it fits, the best fitting first; else the fewest.

    The kubelet's prefer-align-cpus-by-uncorecache, on unless the demand says otherwise.
    """

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterator[CpuSet]:
        if question.demand.prefer_l3 and not question.kept:
            for pool in question.pools:
                yield from _if_any(context.fitter.single(question.count, pool.mask, L3))

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        if not question.demand.prefer_l3:
            return 1.0
        return 1.0 / sum(1 for domain in context.topology.l3_domains().values() if domain.mask & cpus.mask)


@final
class NearNodes(Plugin):
    """The fewest NUMA nodes, and near ones: what is owned beside more of it, else one node, one socket, the machine.

    The score is the local distance over the mean distance between all pairs of nodes used, less a share for each node
    beyond the first; twice that share with ``numa_binding``.
    """

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterator[CpuSet]:
        fitter = context.fitter
        for pool in question.pools:
            if question.kept:
                yield CpuSet.from_mask(fitter.grow(question.count, pool.mask, question.kept.mask))
                continue
            for level in {fitter.starts[name]: name for name in (NODE, SOCKET)}.values():
                yield from _if_any(fitter.single(question.count, pool.mask, level))
            yield CpuSet.from_mask(fitter.anywhere(question.count, pool.mask))
        if not question.kept and len(question.tiers) > 1:
            # No pool fits one node, but some of the best CPUs are on the node that does.
            yield from _if_any(fitter.single(question.count, question.candidates.mask, NODE, question.tiers))

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        used = len(context.fitter.nodes_of(cpus.mask))
        if used == 1:
            return 1.0
        mean = context.fitter.distance(cpus.mask, cpus.mask)
        near = min(1.0, LOCAL_DISTANCE / mean) if mean > 0 else 1.0
        return near / (2 * used - 1 if question.demand.numa_binding else used)


@final
class WholeCores(Plugin):
    """Cores without another owner's thread. A lone thread beside one is half as bad as breaking a free core.

    For a demand of single threads only sharing a core is bad.
    """

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        return (
            ()
            if demand.full_cores or demand.pod_class is PodClass.RECLAIMED
            else [(CpuSet.from_mask(context.fitter.whole(cpus.mask)), 1.0)]
        )

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        cores = context.fitter.touched(cpus.mask)
        available = (question.candidates | question.kept).mask
        bad, breaking = 0, 0 if question.demand.spread_cores else 2
        for core in cores:
            if core & ~cpus.mask:
                bad += 1 if core & ~available else breaking
        return 1.0 - bad / (2 * len(cores))


@final
class OneThread(Plugin):
    """SpreadByPCPUs: on request each CPU is on a core of its own, free ones first; one node counts more.

    Scores the part of the CPUs that do not share a core with another of its own. Source: Koordinator's CPU
    orchestration, where other pods may get the other threads of such cores, too.
    """

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterator[CpuSet]:
        if not question.demand.spread_cores:
            return
        fitter, candidates = context.fitter, question.candidates.mask
        for pool in (fitter.whole(candidates), candidates):
            single = fitter.one_each(pool, question.kept.mask)
            missing = question.count - single.bit_count()
            if missing > 0:
                if pool == candidates:
                    rest = candidates & ~single
                    yield CpuSet.from_mask(single | fitter.anywhere(missing, rest, single | question.kept.mask))
                continue
            if question.kept:
                yield CpuSet.from_mask(fitter.grow(question.count, single, question.kept.mask))
                continue
            for level in {fitter.starts[name]: name for name in (NODE, SOCKET)}.values():
                yield from _if_any(fitter.single(question.count, single, level))
            yield CpuSet.from_mask(fitter.anywhere(question.count, single))

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        if not question.demand.spread_cores:
            return 1.0
        return len(context.fitter.touched(cpus.mask)) / len(cpus)


@final
class KeepApart(Plugin):
    """Off the cores or NUMA nodes of other pods with the same wish for separation, while others are enough.

    Source: Koordinator's preferredCPUExclusivePolicy, where cores on one node have precedence over separate cores on
    two. Here the hints have chosen the node, and within it separation has precedence.
    """

    def __init__(self) -> None:
        self._seats: list[tuple[AntiAffinity, str, int]] = []

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return cpus & self._avoided(demand)

    def post_filter(self, demand: CpuDemand, context: PlacementContext, rejected: CpuSet, missing: int) -> CpuSet:
        return rejected & self._avoided(demand)

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        return [(cpus - self._avoided(demand), 1.0)] if demand.apart is not None else ()

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return 1.0 - len(cpus & self._avoided(question.demand)) / len(cpus)

    def allocate(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> None:
        if demand.apart is not None:
            fitter = context.fitter
            mask = sum(fitter.touched(cpus.mask)) if demand.apart is AntiAffinity.CORE else _whole_nodes(fitter, cpus)
            self._seats.append((demand.apart, demand.uid, mask))

    def _avoided(self, demand: CpuDemand) -> CpuSet:
        mask = 0
        if demand.apart is not None:
            for where, uid, seat in self._seats:
                if where is demand.apart and uid != demand.uid:
                    mask |= seat
        return CpuSet.from_mask(mask)


def _whole_nodes(fitter: CpuAccumulator, cpus: CpuSet) -> int:
    return fitter.node_mask(fitter.nodes_of(cpus.mask))


@final
class Spread(Plugin):
    """distribute-cpus-across-numa: what does not fit one node is spread evenly over the fewest nodes (KEP-2902).

    A demand of several nodes has as many CPUs on each of those that were chosen. The score is the evenness: for the
    latter from 0.5 on, and 0.0 on fewer nodes; 1.0 for one node and without the option.
    """

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterator[CpuSet]:
        demand, fitter, kept = question.demand, context.fitter, question.kept.mask
        available = question.candidates.mask
        if not demand.every_node and (
            not demand.distribute
            or any(
                not kept & ~mask and ((available | kept) & mask).bit_count() >= question.count + len(question.kept)
                for mask in fitter.nodes.values()
            )
        ):
            return
        group = fitter.threads if demand.full_cores else 1
        least = len(demand.nodes) if demand.every_node else 1
        if demand.align_socket:
            # As for nodes, the socket with the most room: what is left remains balanced.
            for socket in sorted(fitter.sockets, key=lambda mask: -(mask & available).bit_count()):
                if not kept & ~socket:
                    yield from _if_any(fitter.spread(question.count, available & socket, kept, group, nodes=least))
        yield from _if_any(fitter.spread(question.count, available, kept, group, nodes=least))

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        demand = question.demand
        if not (demand.distribute or demand.every_node):
            return 1.0
        sizes = [size for mask in context.fitter.nodes.values() if (size := (mask & cpus.mask).bit_count())]
        even = min(sizes) / max(sizes)
        if demand.every_node:
            return (1.0 + even) / 2 if len(sizes) == len(demand.nodes) else 0.0
        return even


@final
class OneSocket(Plugin):
    """align-by-socket: of equally few nodes those of one socket; more sockets only where one does not hold it."""

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        if not question.demand.align_socket:
            return 1.0
        return 1.0 / sum(1 for mask in context.fitter.sockets if mask & cpus.mask)


@final
class LeastMovement(Plugin):
    """CPUs that the demand had remain first; those that a removed container may return for are taken last."""

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        return [(demand.held & cpus, 1.0), (cpus - context.remembered - demand.held, 0.5)]

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        held = question.demand.held
        back = len(cpus & held) / len(held) if held else 1.0
        return (back + 1.0 - len((cpus - held) & context.remembered) / len(cpus)) / 2


def _if_any(mask: int) -> Iterator[CpuSet]:
    if mask:
        yield CpuSet.from_mask(mask)
