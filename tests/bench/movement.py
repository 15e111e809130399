"""Random lives of pools on one machine, packed by ours and from scratch in name order: who moves how much.

A life is a sequence of events: a pool is made, ends, grows or shrinks, a pod gets CPUs of its own out of the pools' or
gives them back. Names are random, so that the order of names is not the order of arrival. Both packers get the same
sizes, and each is measured against what it had itself before.

"From scratch" is what Katalyst does: pools bound to a node first, then the others, each in the order of names, taken
either in topology order (whole sockets, caches, cores, threads) or core by core from each node in turn.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.control.planner import plan_pools
from reconciler.placement.pack import pack
from reconciler.placement.pool_members import DEFAULT
from reconciler.policies.shared import SharedConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences
from state.model import CpuPolicy, NodeView, Pod, PodClass, Pools, Resources
from state.topology import Topology, uniform
from tests.reconciler.nodes import container, cpu, kubelet, node, pod
from tests.reconciler.placement.packcost import cost

Sets = Mapping[str, CpuSet]
Take = Callable[[int, int, Topology], int]

MACHINES: Final = {
    "16 CPUs, 1 node": uniform(cores=8, threads=2),
    "64 CPUs, 2 nodes": uniform(sockets=2, nodes=2, cores=32, threads=2),
    "256 CPUs, 8 nodes": uniform(sockets=2, nodes=8, cores=128, threads=2),
}


EVENTS: Final = 40


class Event(NamedTuple):
    """The input of both packers."""

    sizes: Mapping[str, int]
    free: CpuSet
    within: Sets


class Step(NamedTuple):
    """What one packer did at one event. ``least``: the CPUs that no packer could have left where it had them.

    ``split`` and ``caches`` as in `PackCost`; ``pools``: how many have another set than before, each at least a write.
    """

    moved: int
    least: int
    pools: int
    split: int
    caches: int


def life(topology: Topology, events: int, chance: random.Random, *, bound: bool, taken: bool) -> Iterator[Event]:
    """Events that leave about a fifth of the machine to BE work on average.

    ``bound``: a third of the pools is bound to a NUMA node; ``taken``: pods get CPUs of their own and give them back.
    """
    nodes, cpus = topology.nodes(), len(topology.online)
    wanted: dict[str, int] = {}
    within: dict[str, CpuSet] = {}
    own: list[CpuSet] = []
    most = min(20, max(3, cpus // 5))
    mean = max(2, cpus // most)

    def come() -> None:
        name = f"{chance.randrange(1 << 20):05x}"
        wanted[name] = chance.randint(1, 2 * mean - 1)
        if bound and len(nodes) > 1 and chance.random() < 1 / 3:
            within[name] = topology.node_cpus(chance.choice(nodes))

    for _ in range(most * 3 // 4):
        come()
    for _ in range(events):
        kind = chance.choices(("come", "go", "resize", "take", "give"), (3, 2, 5, taken, taken))[0]
        free = topology.online
        for cpu_set in own:
            free -= cpu_set
        if (kind == "come" and len(wanted) < most) or not wanted:
            come()
        elif kind == "go":
            gone = chance.choice(sorted(wanted))
            del wanted[gone]
            within.pop(gone, None)
        elif kind == "take" and len(own) < 4 and len(free) > cpus // 2:
            # Whole cores wherever the kubelet finds them: it does not know our pools.
            cores = [core for core in topology.cores() if core <= free]
            start = chance.randrange(len(cores))
            own.append(CpuSet(cpu for core in cores[start : start + max(1, cpus // 32)] for cpu in core))
            free -= own[-1]
        elif kind == "give" and own:
            free |= own.pop(chance.randrange(len(own)))
        else:
            name = chance.choice(sorted(wanted))
            wanted[name] = max(1, wanted[name] + chance.choice((-8, -4, -2, -1, 1, 2, 4, 10)))
        # What can be had of it, so that no packer has to cut.
        sizes = {name: len(cpus) for name, cpus in pack(wanted, {}, free, topology, within).items()}
        yield Event(sizes, free, {name: cpus & free for name, cpus in within.items()})


def in_topology_order(count: int, free: int, topology: Topology) -> int:
    """Whole sockets, then whole caches, then whole cores, then threads, the lowest first."""
    number = 0
    for groups in (topology.sockets().values(), topology.l3_domains().values(), topology.cores()):
        for group in groups:
            mask = group.mask
            if mask & free == mask and not mask & number and mask.bit_count() <= count:
                number |= mask
                count -= mask.bit_count()
    return number | CpuSet.from_mask(free & ~number).lowest(count).mask


def core_by_core(count: int, free: int, topology: Topology) -> int:
    """A core from each NUMA node in turn, then threads."""
    queues: dict[int, list[int]] = {}
    for core in topology.cores():
        if (mask := core.mask) & free:
            first = topology.cpu((mask & -mask).bit_length() - 1)
            queues.setdefault(first.node, []).append(mask & free)
    number = 0
    for cores in zip_longest(*queues.values(), fillvalue=0):
        for mask in cores:
            if mask.bit_count() <= count:
                number |= mask
                count -= mask.bit_count()
    return number | CpuSet.from_mask(free & ~number).lowest(count).mask


def from_scratch(event: Event, topology: Topology, take: Take) -> Sets:
    """Nothing is remembered: bound pools, then the others, in the order of their names."""
    left = event.free.mask
    cpus: dict[str, CpuSet] = {}
    for name in sorted(event.sizes, key=lambda name: (name not in event.within, name)):
        usable = left & event.within[name].mask if name in event.within else left
        took = take(event.sizes[name], usable, topology)
        cpus[name] = CpuSet.from_mask(took)
        left &= ~took
    return cpus


def ours(event: Event, held: Sets, topology: Topology) -> Sets:
    """The packer of the product."""
    return pack(event.sizes, held, event.free, topology, event.within)


def step(event: Event, held: Sets, packed: Sets, topology: Topology) -> Step:
    """What lies between two packings of one packer."""
    result = cost(packed, held, event.free, topology)
    least = 0
    for name, size in event.sizes.items():
        may = event.free & event.within.get(name, event.free)
        least += max(0, size - len(held.get(name, EMPTY) & may))
    pools = sum(held.get(name) != packed.get(name) for name in held.keys() | packed.keys())
    return Step(result.moved, least, pools, result.split, result.caches)


class Lives(NamedTuple):
    """One life under each packer, event by event, and the CPU time of ours at each (s)."""

    ours: list[Step]
    in_topology_order: list[Step]
    core_by_core: list[Step]
    took: list[float]


def live(topology: Topology, events: int, seed: int, *, bound: bool = True, taken: bool = True) -> Lives:
    """The same life three times. The first event is of no packer's making and not counted."""
    held: list[Sets] = [{}, {}, {}]
    lives = Lives([], [], [], [])
    for number, event in enumerate(life(topology, events, random.Random(seed), bound=bound, taken=taken)):
        began = time.thread_time()
        mine = ours(event, held[0], topology)
        took = time.thread_time() - began
        packed = [mine, *(from_scratch(event, topology, take) for take in (in_topology_order, core_by_core))]
        if number:
            for steps, before, after in zip(lives[:3], held, packed, strict=True):
                steps.append(step(event, before, after, topology))
            lives.took.append(took)
        held = packed
    return lives


def table(lives: int, events: int) -> str:
    """The figures as a table for people."""
    rows = [
        "| machine | packer | moved: mean | median | p95 | p99 | pools changed | cores split | caches | lives |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    times = []
    for machine, topology in MACHINES.items():
        done = [live(topology, events, seed) for seed in range(lives)]
        sums = [[sum(item.moved for item in steps) for steps in found[:3]] for found in done]
        for index, packer in enumerate(("ours", "from scratch, topology order", "from scratch, core by core")):
            steps = [one for item in done for one in item[:3][index]]
            moved = sorted(item.moved for item in steps)
            total, mine = sum(row[index] for row in sums), sum(row[0] for row in sums)
            text = f"{total / mine:.1f} times ours; less in {sum(row[index] < row[0] for row in sums)}" if index else ""
            shown = [
                f"{statistics.fmean(moved):.2f}",
                *(f"{_at(moved, part):.0f}" for part in (0.5, 0.95, 0.99)),
                f"{statistics.fmean(item.pools for item in steps):.2f}",
                f"{statistics.fmean(item.split for item in steps):.1f}",
                f"{statistics.fmean(item.caches for item in steps):.1f}",
                text,
            ]
            rows.append(f"| {machine} | {packer} | {' | '.join(shown)} |")
        mine_steps = [our for item in done for our in item.ours]
        above = sum(mine_step.moved > mine_step.least for mine_step in mine_steps) / len(mine_steps)
        least = statistics.fmean(mine_step.least for mine_step in mine_steps)
        rows.append(
            f"| {machine} | lower bound | {least:.2f} | | | | | | | ours above it in {above:.1%} of the events |"
        )
        took = sorted(value * 1e3 for item in done for value in item.took)
        times.append(f"{machine}: median {_at(took, 0.5):.2f} ms, p99 {_at(took, 0.99):.2f} ms")
    return "\n".join([*rows, "", f"{lives} lives of {events} events each. CPU time of ours: {'; '.join(times)}."])


def _view(event: Event, topology: Topology) -> NodeView:
    """The pools of a benchmark's event as one pod each; what they may not have is a container's own."""
    members: list[Pod] = []
    for name, size in event.sizes.items():
        wish = CpuPreferences(pool=name)
        if name in event.within:
            wish = replace(wish, numa_binding=True, nodes=(topology.node_of(min(event.within[name])),))
        item = pod(name, container("main", requests=Resources(cpu_milli=1000 * size)), cls=PodClass.SHARED)
        members += [replace(item, wish=wish)] if size else []
    taken = topology.online - event.free
    owned = {"own/main": str(taken)} if taken else {}
    known = kubelet(CpuPolicy.STATIC, default=str(event.free), exclusive=owned)
    return node(*members, topology=topology, kubelet=known, cpu=cpu(online=100))


def _moved(before: Pools, after: Pools) -> int:
    """CPUs that an online pool gets and did not have, the default pool's included."""
    old = {**before.named, DEFAULT: before.shared}
    return sum(len(cpus - old.get(key, EMPTY)) for key, cpus in {**after.named, DEFAULT: after.shared}.items())


def planned_moves(topology: Topology, lives: int, config: PoliciesConfig) -> tuple[list[int], bool]:
    """CPUs moved at each event of whole plans, the default pool's included; and whether each CPU was in a pool."""
    steps: list[int] = []
    complete = True
    for seed in range(lives):
        pools: Pools | None = None
        for event in life(topology, EVENTS, random.Random(seed), bound=True, taken=True):
            after = plan_pools(_view(event, topology), pools, config)
            if pools is not None:
                steps.append(_moved(pools, after))
            complete &= CpuSet.union((after.shared, *after.named.values())) == event.free
            pools = after
    return steps, complete


def plans(lives: int) -> str:
    """Whole plans, with and without the expansion of pools, as a table for people."""
    rows = [
        "| machine | `shared.expand` | moved per event: mean | median | p95 | p99 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for machine, topology in MACHINES.items():
        for expansion in (False, True):
            moves, _ = planned_moves(topology, lives, PoliciesConfig(shared=SharedConfig(expand=expansion)))
            moves.sort()
            shown = [f"{statistics.fmean(moves):.2f}", *(f"{_at(moves, part)}" for part in (0.5, 0.95, 0.99))]
            rows.append(f"| {machine} | {str(expansion).lower()} | {' | '.join(shown)} |")
    return "\n".join(rows)


def prices(turns: int = 100) -> str:
    """CPU time of one packing of twenty pools, half of them bound: from nothing, and when all sizes change."""
    texts = []
    for cpus in (256, 1024):
        topology = uniform(sockets=2, nodes=8, cores=cpus // 2, threads=2)
        chance = random.Random(1)
        names = [f"p{number:02}" for number in range(20)]
        scratch, changed = [], []
        for _ in range(turns):
            within = {name: topology.node_cpus(chance.choice(topology.nodes())) for name in names[::2]}
            wanted = {name: chance.randint(1, cpus // 13) for name in names}
            held = pack(wanted, {}, topology.online, topology, within)
            sizes = {name: len(cpu_set) for name, cpu_set in held.items()}
            began = time.thread_time()
            pack(sizes, {}, topology.online, topology, within)
            scratch.append((time.thread_time() - began) * 1e3)
            sizes = {name: max(1, size + chance.randint(-4, 2)) for name, size in sizes.items()}
            began = time.thread_time()
            pack(sizes, held, topology.online, topology, within)
            changed.append((time.thread_time() - began) * 1e3)
        scratch.sort()
        changed.sort()
        texts.append(
            f"{cpus} CPUs, 20 pools: from nothing {_at(scratch, 0.5):.1f} ms (p99 {_at(scratch, 0.99):.1f}), "
            f"all sizes changed {_at(changed, 0.5):.1f} ms (p99 {_at(changed, 0.99):.1f})."
        )
    return "\n".join(texts)


def _at(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
