"""Allocates CPUs to owners: held CPUs remain, then schedulers' choices, then resizes, then new demands.

A demand that cannot get its count keeps what it held, with the reason in ``refused``; if it lost all of it, it gets
what is available. Two owners never share a core that one requests whole. `_Allocator.result` has the order.

Source: the kubelet's static policy, KEP-2625, KEP-2902, KEP-3545; Katalyst's dynamic policy, which packs from scratch
in name order and never resizes, and returns an error for a container without NUMA binding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import final

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.chain import PlacementContext, PluginChain, PluginRunner, load
from reconciler.placement.config import PlacementConfig
from reconciler.placement.cpu_accumulator import CpuAccumulator
from reconciler.placement.demand import Allocation, CpuDemand
from state.model import PodClass
from state.topology import Topology


@cache
def default_chain() -> PluginChain:
    """The built-in plug-ins with their own weights."""
    return load(PlacementConfig())


def allocate(
    demands: Iterable[CpuDemand],
    free: CpuSet,
    topology: Topology,
    chain: PluginChain | None = None,
    *,
    interrupts: CpuSet = EMPTY,
    remembered: CpuSet = EMPTY,
    most: int | None = None,
    first: Sequence[str] = (),
    fitter: CpuAccumulator | None = None,
) -> Allocation:
    """Assign CPUs of ``free`` (held ones count as free) to demands. The order of ``demands`` does not matter.

    ``interrupts`` are best avoided, ``remembered`` are the last CPUs of containers that were removed and may return.
    ``most``: so many CPUs may have an owner in all, the rest is other work's; what is held remains held all the same.
    ``first``: demands that choose before all others, in this order. ``fitter``: the topology's, where there is one.
    Errors: `ValueError` for two demands with one key.
    """
    fitter = fitter or CpuAccumulator(topology)
    context = PlacementContext(topology=topology, fitter=fitter, interrupts=interrupts, remembered=remembered)
    run = PluginRunner(chain or default_chain(), context)
    return _Allocator(run, demands, free & topology.online, most, first).result()


class CpuPreference(Struct, frozen=True, kw_only=True):
    """A chain's ranking of CPUs for BE work.

    ``tiers``: disjoint, the best first, without CPUs that filters excluded. ``filters``: the filters that excluded
    some; ``errors``: by plug-in, the first error it raised; it was skipped then.
    """

    tiers: tuple[CpuSet, ...]
    filters: tuple[str, ...] = ()
    errors: Mapping[str, str] = {}


def preference(
    cpus: CpuSet, topology: Topology, chain: PluginChain | None = None, *, interrupts: CpuSet = EMPTY
) -> CpuPreference:
    """``cpus`` in the chain's order for BE work.

    By default efficiency cores are first, CPUs with interrupts last. A plug-in sees BE work by the demand's class.
    """
    run = PluginRunner(
        chain or default_chain(),
        PlacementContext(topology=topology, fitter=CpuAccumulator(topology), interrupts=interrupts),
    )
    # No combinations are selected or scored: BE work grows and shrinks CPU by CPU.
    demand = CpuDemand(key="reclaimed", count=max(1, len(cpus)), pod_class=PodClass.RECLAIMED)
    allowed, filters = run.allowed(demand, cpus, 1)
    return CpuPreference(tiers=run.tiers(demand, allowed), filters=filters, errors=dict(sorted(run.errors.items())))


@final
class _Allocator:
    """The state of one choice."""

    def __init__(
        self, run: PluginRunner, demands: Iterable[CpuDemand], free: CpuSet, most: int | None, first: Sequence[str]
    ) -> None:
        self._run = run
        self._fitter = run.context.fitter
        # Masks instead of sets: there are hundreds of them.
        self._avail = free.mask
        self._most = len(free) if most is None else most
        self._first = first
        self._owned: dict[str, int] = {}
        self._taken = 0
        self._refused: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._closed: dict[int, str] = {}
        self._order = run.ordered(sorted(demands, key=lambda demand: demand.key))
        keys = [demand.key for demand in self._order]
        if len(set(keys)) != len(keys):
            raise ValueError(f"two demands with one key: {sorted({key for key in keys if keys.count(key) > 1})}")

    def result(self) -> Allocation:
        # Never moved, whatever would be better now.
        self._keep_held()
        waiting = [demand for demand in self._order if demand.key not in self._notes]
        # What the others hold remains theirs while they are resized.
        for demand in waiting:
            self._claim(demand, demand.held.mask & self._avail)
        # Shrinking releases CPUs for those after it.
        for demand in waiting:
            self._shrink(demand)
        # A choice that is not free is ignored: the CPUs are chosen as if it did not exist, and a note reports it.
        for demand in self._waiting(waiting):
            if demand.explicit and self._choice_is_free(demand):
                self._finish(demand, demand.explicit.mask, "chosen by the scheduler")
        # Growing demands, and those that lost CPUs, take neighbours of what they keep; new ones are last.
        for demand in self._waiting(waiting, held=True):
            self._enlarge(demand)
        for demand in sorted(self._waiting(waiting, held=False), key=self._order_of_choice):
            self._enlarge(demand)
        for demand in self._order:
            self._notes[demand.key] += self._shared_nodes_note(demand)
        return Allocation(
            cpus={key: CpuSet.from_mask(self._owned[key]) for key in sorted(self._owned) if self._owned[key]},
            refused={key: self._refused[key] for key in sorted(self._refused)},
            notes={key: self._notes[key] for key in sorted(self._notes) if key not in self._refused},
            closed={node: self._closed[node] for node in sorted(self._closed)},
            errors={name: self._run.errors[name] for name in sorted(self._run.errors)},
        )

    def _order_of_choice(self, demand: CpuDemand) -> tuple[int, int]:
        """Those with the fewest nodes first: what they need there, the others can have elsewhere."""
        rank = self._first.index(demand.key) if demand.key in self._first else len(self._first)
        return rank, len(demand.nodes) or len(self._fitter.nodes)

    def _waiting(self, demands: Iterable[CpuDemand], *, held: bool | None = None) -> Iterator[CpuDemand]:
        for demand in demands:
            if demand.key not in self._notes and (held is None or bool(demand.held) is held):
                yield demand

    # What is held

    def _keep_held(self) -> None:
        for demand in self._order:
            held = demand.held.mask
            if held and not held & ~self._avail and self._suits(demand, held):
                self._finish(demand, held, "unchanged")

    def _suits(self, demand: CpuDemand, cpus: int) -> bool:
        """Whether CPUs are the requested count, in whole cores where requested; or the scheduler's own choice."""
        surplus = cpus.bit_count() - demand.count
        cores = self._fitter.touched(cpus) if demand.full_cores else []
        if demand.full_cores and sum(cores) != cpus:
            return False
        if demand.explicit is not None and demand.explicit.mask == cpus:
            return True
        # An odd count gets its last core whole: no other demand could use the other thread. The kubelet's
        # full-pcpus-only rejects such a pod (SMTAlignmentError), but here the pod runs already.
        return 0 <= surplus < min((core.bit_count() for core in cores), default=1)

    def _claim(self, demand: CpuDemand, mask: int) -> None:
        before = self._owned.get(demand.key, 0)
        self._owned[demand.key] = mask
        # What it held before and does not hold now is available again.
        self._avail = self._avail & ~mask | before & ~mask
        self._taken = self._taken & ~before | mask
        if demand.numa_exclusive:
            self._closed = {node: key for node, key in self._closed.items() if key != demand.key}
            for node in self._fitter.nodes_of(mask):
                self._closed.setdefault(node, demand.key)

    def _finish(self, demand: CpuDemand, mask: int, note: str) -> None:
        """Final: report the result to the plug-ins."""
        self._claim(demand, mask)
        self._notes[demand.key] = note
        self._run.report(demand, CpuSet.from_mask(mask), demand.held - CpuSet.from_mask(mask))

    def _shared_nodes_note(self, demand: CpuDemand) -> str:
        """Result of the wish for a node of its own; known when all have chosen."""
        if not demand.numa_exclusive:
            return ""
        mask = self._owned[demand.key]
        shared = [node for node in self._fitter.nodes_of(mask) if self._fitter.nodes[node] & self._taken & ~mask]
        return f"; node {', '.join(map(str, shared))} already used by other pods" if shared else ""

    def _shrink(self, demand: CpuDemand) -> None:
        """Shrink a demand that holds enough, in whole cores where it wants them."""
        base = self._base(demand)
        if base.bit_count() < demand.count or (demand.explicit is not None and self._choice_is_free(demand)):
            return
        even = demand.distribute or demand.every_node
        kept = self._fitter.shrink(base, demand.count, whole=demand.full_cores, even=even, spread=demand.spread_cores)
        self._finish(demand, kept, f"keeps {kept.bit_count()} of the {len(demand.held)} CPUs it had")

    def _base(self, demand: CpuDemand) -> int:
        """What it keeps: all that it holds, or the cores that it has whole or can complete, at most ``count``."""
        own = self._owned[demand.key]
        if not demand.full_cores:
            return own
        base = 0
        for core in sorted(self._fitter.touched(own), key=lambda core: (-(core & own).bit_count(), core & -core)):
            if base.bit_count() >= demand.count and core & ~own:
                continue
            if not core & ~own & ~self._avail:
                base |= core
        return base

    # What is chosen

    def _choice_is_free(self, demand: CpuDemand) -> bool:
        if not demand.explicit:
            return False
        wanted, own = demand.explicit.mask, self._owned[demand.key]
        if (wanted & ~own).bit_count() > self._spare():
            return False
        if wanted & ~(self._avail | own) or wanted & self._barred(demand, own):
            return False
        return not demand.full_cores or sum(self._fitter.touched(wanted)) == wanted

    def _barred(self, demand: CpuDemand, own: int) -> int:
        """Nodes that others have exclusively; for a demand with exclusive nodes, also nodes where others own CPUs."""
        barred = self._fitter.node_mask(node for node, key in self._closed.items() if key != demand.key)
        if demand.numa_exclusive:
            barred |= self._fitter.node_mask(self._fitter.nodes_of(self._taken & ~own))
        return barred

    def _enlarge(self, demand: CpuDemand) -> None:
        own = self._owned[demand.key]
        base = self._base(demand)
        missing = demand.count - base.bit_count()
        candidates = self._avail & ~base & ~self._barred(demand, own)
        if demand.nodes:
            candidates &= self._fitter.node_mask(demand.nodes)
        allowed, filters = self._run.allowed(demand, CpuSet.from_mask(candidates), missing)
        usable = self._fitter.whole(allowed.mask) if demand.full_cores else allowed.mask
        picked = 0
        if demand.count - own.bit_count() <= self._spare():
            picked = self._run.best(demand, missing, CpuSet.from_mask(usable), CpuSet.from_mask(base)).mask
        # The plug-ins may select two threads of a core: then they are offered one thread of each only.
        if demand.spread_cores and demand.strict_cores and picked != self._fitter.one_each(picked, base):
            usable = self._fitter.one_each(usable, base)
            picked = self._run.best(demand, missing, CpuSet.from_mask(usable), CpuSet.from_mask(base)).mask
        if picked or missing <= 0:
            # Completed cores may sum up to a core too many, and a smaller count may have waited for the scheduler's.
            chosen = self._fitter.shrink(base | picked, demand.count, whole=demand.full_cores, even=demand.distribute)
            if (chosen & ~own).bit_count() <= self._spare():
                self._finish(demand, chosen, self._note_of(demand, base, chosen))
                return
        short = self._shortage(demand, missing, candidates, usable, filters)
        if usable.bit_count() >= missing > self._spare():
            short += f", {max(0, self._spare())} of them not kept for other pods"
        scattered = min((self._avail & ~base & ~self._barred(demand, own)).bit_count(), self._spare())
        if scattered >= missing and not filters:
            short += f"; fragmented: {scattered} free on the whole machine"
        self._refused[demand.key] = short
        # A new demand gets none; one that lost all that it held gets what is available.
        rest = usable or allowed.mask
        self._finish(demand, own or (self._fitter.anywhere(demand.count, rest) if demand.held else 0), short)

    def _spare(self) -> int:
        """How many CPUs may still get an owner."""
        return self._most - self._taken.bit_count()

    def _note_of(self, demand: CpuDemand, base: int, chosen: int) -> str:
        more = "; the scheduler's choice was not free" if demand.explicit is not None else ""
        if demand.spread_cores:
            cores = len(self._fitter.touched(chosen))
            # With a core for each CPU there is nothing to report.
            more += f"; only {cores} cores for its {chosen.bit_count()} CPUs" if cores < chosen.bit_count() else ""
        if base:
            return f"keeps {(base & demand.held.mask).bit_count()} of the {len(demand.held)} CPUs it had{more}"
        return f"chosen{more}"

    def _shortage(self, demand: CpuDemand, missing: int, candidates: int, usable: int, filters: tuple[str, ...]) -> str:
        where = f" on node {','.join(map(str, demand.nodes))}" if demand.nodes else ""
        alone = " without other pods" if demand.numa_exclusive else ""
        kind = " in whole cores" if demand.full_cores else ""
        if demand.spread_cores and demand.strict_cores:
            kind = " one per core"
        more = " more" if missing < demand.count else ""
        text = f"requests {missing}{more} CPUs{where}{alone}; {usable.bit_count()} free{kind}"
        if filters and candidates.bit_count() >= missing:
            text += f" (excluded by {', '.join(filters)}: {(candidates & ~usable).bit_count()})"
        return text
