"""What holds for every machine and every sequence of arrivals, departures, resizes and CPUs offline and online."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.allocate import allocate
from reconciler.placement.demand import Allocation, CpuDemand
from state.cpu import AntiAffinity
from state.model import PodClass
from state.topology import Topology
from tests.reconciler.placement.shapes import demand, shape, with_efficiency, without


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    sockets = draw(st.sampled_from([1, 2]))
    nodes = sockets * draw(st.sampled_from([1, 2]))
    l3 = nodes * draw(st.sampled_from([1, 2]))
    cores = l3 * draw(st.integers(1, 4))
    made = shape(sockets=sockets, nodes=nodes, l3=l3, cores=cores, threads=draw(st.integers(1, 4)))
    if draw(st.booleans()):
        first = draw(st.integers(0, cores))
        made = with_efficiency(made, lambda cpu: cpu.core >= first)
    crossing = draw(st.integers(0, 3))
    if crossing:
        # Caches that lie across the nodes: sub-NUMA clusters, interleaved firmware, a hypervisor's nonsense.
        made = replace(made, cpus=tuple(replace(cpu, l3=cpu.core % crossing) for cpu in made.cpus))
    offline = draw(st.sets(st.sampled_from(sorted(made.online)), max_size=len(made.online) // 3))
    return without(made, offline)


def demands_on(topology: Topology) -> st.SearchStrategy[list[CpuDemand]]:
    sets = st.sets(st.sampled_from(sorted(topology.online)), max_size=8).map(CpuSet)
    strategy = st.builds(
        CpuDemand,
        key=st.integers(0, 99).map(lambda number: f"pod-{number:02}/c"),
        count=st.integers(1, max(1, len(topology.online) // 2)),
        nodes=st.sets(st.sampled_from(topology.nodes()), max_size=2).map(lambda nodes: tuple(sorted(nodes))),
        numa_binding=st.booleans(),
        numa_exclusive=st.sampled_from([False, False, False, True]),
        full_cores=st.booleans(),
        distribute=st.booleans(),
        align_socket=st.booleans(),
        prefer_l3=st.booleans(),
        spread_cores=st.booleans(),
        strict_cores=st.booleans(),
        apart=st.sampled_from([None, *AntiAffinity]),
        held=sets | st.just(EMPTY),
        explicit=st.none() | st.none() | sets,
        priority=st.integers(-1, 1),
    )
    strategy = strategy.map(lambda made: replace(made, spread_cores=made.spread_cores and not made.full_cores))
    return st.lists(strategy, max_size=8, unique_by=lambda demand: demand.key)


def check(demands: list[CpuDemand], free: CpuSet, topology: Topology, got: Allocation) -> None:
    owner: dict[int, str] = {}
    for key, cpus in got.cpus.items():
        assert cpus, key
        assert cpus <= free & topology.online, key
        for cpu in cpus:
            assert owner.setdefault(cpu, key) == key
    for demand_ in demands:
        cpus = got.cpus.get(demand_.key, EMPTY)
        assert (demand_.key in got.refused) != (demand_.key in got.notes)
        if demand_.key in got.refused:
            continue
        if cpus != demand_.explicit:
            largest = max(len(core) for core in topology.cores())
            assert 0 <= len(cpus) - demand_.count < (largest if demand_.full_cores else 1)
        if demand_.full_cores:
            assert topology.whole_cores(cpus) == cpus
            assert all(owner[cpu] == demand_.key for core in topology.cores() if core & cpus for cpu in core)
        if demand_.spread_cores and demand_.strict_cores and cpus != demand_.explicit:
            for core in topology.cores():
                assert len(core & (cpus - demand_.held)) <= 1, "what is chosen is on cores of its own"
                assert not core & (cpus - demand_.held) or not core & cpus & demand_.held


@given(st.data())
def test_any_demands_on_any_machine(data: st.DataObject) -> None:
    topology = data.draw(machines())
    free = topology.online - data.draw(st.sets(st.sampled_from(sorted(topology.online)), max_size=3).map(CpuSet))
    demands = data.draw(demands_on(topology))
    got = allocate(demands, free, topology)
    check(demands, free, topology, got)
    assert allocate(data.draw(st.permutations(demands)), free, topology) == got, "the order does not matter"
    claims: dict[int, int] = {}
    for cpu_demand in demands:
        for cpu in cpu_demand.held:
            claims[cpu] = claims.get(cpu, 0) + 1
    for cpu_demand in demands:
        alone = cpu_demand.held <= free and all(claims[cpu] == 1 for cpu in cpu_demand.held)
        if cpu_demand.held and alone:
            assert cpu_demand.key in got.cpus, "what held something is never left with nothing"
            if len(cpu_demand.held) == cpu_demand.count and not cpu_demand.full_cores:
                assert got.cpus[cpu_demand.key] == cpu_demand.held, "what is right never moves"
        if cpu_demand.held or cpu_demand.key in got.refused or got.cpus[cpu_demand.key] == cpu_demand.explicit:
            continue
        if cpu_demand.nodes:
            assert set(map(topology.node_of, got.cpus[cpu_demand.key])) <= set(cpu_demand.nodes)
        for node in {topology.node_of(cpu) for cpu in got.cpus[cpu_demand.key]}:
            assert got.closed.get(node, cpu_demand.key) == cpu_demand.key, "an exclusive node takes no newcomers"
    again = [replace(item, held=got.cpus.get(item.key, EMPTY)) for item in demands]
    settled = allocate(again, free, topology)
    for key in set(got.cpus) - set(got.refused):
        assert settled.cpus[key] == got.cpus[key], "a second look moves nobody"


@given(st.data())
def test_nothing_is_refused_that_fits(data: st.DataObject) -> None:
    topology = data.draw(machines())
    full, single = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    cpu_demand = demand(
        "pod",
        data.draw(st.integers(1, len(topology.online))),
        full_cores=full,
        spread_cores=single,
        strict_cores=single,
        distribute=data.draw(st.booleans()),
        align_socket=data.draw(st.booleans()),
        pod_class=data.draw(st.sampled_from([PodClass.DEDICATED, PodClass.RECLAIMED])),
    )
    free = data.draw(st.sets(st.sampled_from(sorted(topology.online))).map(CpuSet))
    usable = topology.whole_cores(free) if cpu_demand.full_cores else free
    usable = CpuSet(min(core & free) for core in topology.cores() if core & free) if single else usable
    got = allocate([cpu_demand], free, topology)
    assert bool(got.refused) == (len(usable) < cpu_demand.count)


class Node(RuleBasedStateMachine):
    """A node on which containers start, end and are resized, and CPUs go off and on line."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = shape(cores=4)
        self.topology = self.machine
        self.demands: dict[str, CpuDemand] = {}
        self.got = Allocation(cpus={})
        self.before: dict[str, CpuDemand] = {}
        self.number = 0

    @initialize(machine=machines())
    def start(self, machine: Topology) -> None:
        self.machine = self.topology = machine

    def free(self) -> CpuSet:
        return self.topology.online - self.topology.online.lowest(1)

    def look(self) -> None:
        self.before = dict(self.demands)
        self.got = allocate(list(self.demands.values()), self.free(), self.topology)
        self.demands = {
            key: replace(cpu_demand, held=self.got.cpus.get(key, EMPTY), explicit=None)
            for key, cpu_demand in self.demands.items()
        }

    @rule(
        count=st.integers(1, 6),
        full=st.booleans(),
        distribute=st.booleans(),
        exclusive=st.sampled_from([False] * 5 + [True]),
        explicit=st.none() | st.sets(st.integers(0, 15), min_size=1, max_size=4).map(CpuSet),
    )
    def arrive(self, count: int, full: bool, distribute: bool, exclusive: bool, explicit: CpuSet | None) -> None:
        key = f"pod-{self.number}/c"
        self.number += 1
        self.demands[key] = CpuDemand(
            key=key,
            count=count,
            full_cores=full,
            distribute=distribute,
            numa_exclusive=exclusive,
            explicit=explicit,
        )
        self.look()

    @precondition(lambda self: self.demands)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        del self.demands[data.draw(st.sampled_from(sorted(self.demands)))]
        self.look()

    @precondition(lambda self: self.demands)
    @rule(data=st.data(), count=st.integers(1, 8))
    def resize(self, data: st.DataObject, count: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.demands)))
        old = self.demands[key]
        self.demands[key] = replace(old, count=count)
        self.look()
        if old.held and not old.full_cores:
            kept = self.got.cpus[key] & old.held
            assert len(kept) == min(len(old.held), len(self.got.cpus[key])), "as many of the held as possible stay"

    @rule(data=st.data())
    def plug(self, data: st.DataObject) -> None:
        away = data.draw(st.sets(st.sampled_from(sorted(self.machine.online)), max_size=len(self.machine.online) // 2))
        self.topology = without(self.machine, away)
        self.look()

    @invariant()
    def holds(self) -> None:
        check(list(self.before.values()), self.free(), self.topology, self.got)
        for key, old in self.before.items():
            stays = old.held and old.held <= self.free() and len(old.held) == old.count
            if stays and (not old.full_cores or self.topology.whole_cores(old.held) == old.held):
                assert self.got.cpus[key] == old.held


TestNode: Any = Node.TestCase
