"""Nodes and CPUs together: no claim is refused for lack of a second try."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.allocate import default_chain
from reconciler.placement.binding import ROUNDS, NodeBindingChoice, choose
from reconciler.placement.chain import EnabledPlugin, Plugin, PluginChain
from reconciler.placement.demand import CpuDemand
from state.cpu import AntiAffinity, CpuPreferences, TopologyPolicy
from state.topology import Topology, uniform
from tests.reconciler.placement.shapes import demand

# Node 0 is 0-3 and 8-11, node 1 is 4-7 and 12-15.
TWO = uniform(sockets=2, nodes=2, cores=8, threads=2)
FOUR = uniform(sockets=2, nodes=4, cores=16, threads=1)


def chosen(
    topology: Topology,
    demands: list[CpuDemand],
    free: CpuSet,
    wishes: Mapping[str, CpuPreferences],
    chain: PluginChain | None = None,
) -> NodeBindingChoice:
    return choose(
        demands,
        free,
        topology,
        chain or default_chain(),
        policy=TopologyPolicy.BEST_EFFORT,
        wishes=wishes,
        affinity={},
    )


def test_a_node_that_was_given_in_vain_is_replaced_by_one_with_room() -> None:
    """The first one is given two nodes, and takes another part of them than was thought."""
    got = chosen(FOUR, [demand("a", 6), demand("b", 5), demand("c", 1)], CpuSet.parse("0,2-13,15"), {})
    expected = {"a/c": "0,2,4-7", "b/c": "3,8-11", "c/c": "12"}
    assert {key: str(cpus) for key, cpus in got.allocation.cpus.items()} == expected
    assert got.allocation.refused == {}
    assert got.reasons["a/c"] == "cpu on NUMA nodes 0-1; chosen"
    assert got.reasons["b/c"].endswith("; chosen"), "what was said when it was chosen"


def test_an_impossible_request_is_reported_once() -> None:
    got = chosen(TWO, [demand("a", 16), demand("b", 1)], TWO.online, {})
    assert got.allocation.refused == {"b/c": "requests 1 CPUs; 0 free"}
    assert set(got.reasons) == {"a/c"}


def test_a_refused_demand_costs_no_other_round_where_all_others_keep_what_they_hold() -> None:
    rounds: list[Plugin] = []

    def counted() -> Plugin:
        rounds.append(Plugin())
        return rounds[-1]

    counter = EnabledPlugin(name="counter", weight=1, make=counted, points=frozenset())
    chain = PluginChain(plugins=(*default_chain().plugins, counter))
    demands = [demand("a", 2, held="0-1"), demand("b", 2, held="4-5")]
    demands.append(demand("z", 2, numa_binding=True, numa_exclusive=True))
    got = chosen(TWO, demands, TWO.online, {}, chain)
    assert got.allocation.refused.keys() == {"z/c"}
    assert len(rounds) == 1


flags = st.sampled_from([False, False, True])
wishes = st.builds(
    CpuPreferences,
    numa_binding=st.booleans(),
    numa_share=st.sampled_from([None, True, False]),
    apart=st.sampled_from([None, *AntiAffinity]),
    nodes=st.sampled_from([(), (), (1,), (7,)]),
)


@st.composite
def newcomers(draw: st.DrawFn) -> tuple[list[CpuDemand], Mapping[str, CpuPreferences]]:
    made: list[CpuDemand] = []
    preferences: dict[str, CpuPreferences] = {}
    for uid in "abcd"[: draw(st.integers(1, 4))]:
        preferences[uid] = wish = draw(wishes)
        more: dict[str, Any] = draw(st.sampled_from([{}, {"full_cores": True}, {"spread_cores": True}]))
        made.append(
            demand(
                uid,
                draw(st.integers(1, 6)),
                numa_exclusive=draw(flags),
                numa_binding=wish.numa_binding,
                strict_cores=draw(flags),
                apart=wish.apart,
                **more,
            )
        )
    return made, preferences


def would_fit(cpu_demand: CpuDemand, free: CpuSet, topology: Topology, got: NodeBindingChoice) -> bool:
    closed = CpuSet.union(topology.node_cpus(node) for node in got.allocation.closed)
    if cpu_demand.numa_exclusive:
        closed |= CpuSet.union(topology.node_cpus(topology.node_of(cpu)) for cpu in got.allocation.owned)
    left = free - got.allocation.owned - closed
    if cpu_demand.full_cores:
        left = topology.whole_cores(left)
    elif cpu_demand.spread_cores and cpu_demand.strict_cores:
        left = CpuSet(min(core & left) for core in topology.cores() if core & left)
    return len(left) >= cpu_demand.count


@given(newcomers(), st.sampled_from([TWO, FOUR]), st.data())
def test_no_request_is_refused_while_enough_is_left(
    drawn: tuple[list[CpuDemand], Mapping[str, CpuPreferences]], topology: Topology, data: st.DataObject
) -> None:
    demands, preferences = drawn
    assert len(demands) <= ROUNDS
    free = CpuSet(data.draw(st.sets(st.sampled_from(sorted(topology.online)))))
    got = chosen(topology, demands, free, preferences)
    assert chosen(topology, demands[::-1], free, preferences) == got, "the order does not matter"
    for cpu_demand in demands:
        assert (cpu_demand.key in got.allocation.refused) == (cpu_demand.key not in got.allocation.cpus)
        if cpu_demand.key in got.allocation.refused:
            assert not would_fit(cpu_demand, free, topology, got), got.allocation.refused[cpu_demand.key]
        else:
            assert len(got.allocation.cpus.get(cpu_demand.key, EMPTY)) >= cpu_demand.count
            assert got.reasons[cpu_demand.key]
