"""exclusive: CPUs of their own for dedicated pods where the kubelet allocates none; which events they outlast."""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_pools
from reconciler.policies.exclusive import ExclusiveConfig, whole_cpus
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import AntiAffinity, CpuPreferences
from state.model import (
    Container,
    ContainerKind,
    CpuPolicy,
    NodeView,
    NumaMemory,
    Pod,
    PodClass,
    Pools,
    Resources,
    RuntimeSpec,
)
from state.plan import NodePlan
from state.topology import NumaNode, Topology, uniform
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, cpus, kubelet, node, online, pod

CONFIG = PoliciesConfig()
SMT = uniform(sockets=2, nodes=2, cores=8, threads=2)


def app(name: str, milli: int, kind: ContainerKind = ContainerKind.APP) -> Container:
    return container(name, kind=kind, requests=Resources(cpu_milli=milli))


def dedicated(uid: str, *containers: Container, **wish: Any) -> Pod:
    item = pod(uid, *(containers or (app("main", 2000),)), cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED)
    return replace(item, wish=CpuPreferences(**wish))


def sets(view: NodeView, previous: Pools | None = None, config: PoliciesConfig = CONFIG) -> dict[str, str]:
    """CPU sets wanted, by ``uid/container``."""
    desired = plan(view, NodePlan(pools=previous) if previous is not None else None, config)
    return {
        f"{setting.pod_uid}/{str(setting.container_id).removeprefix('id-')}": str(setting.value)
        for setting in desired.settings.values()
        if setting.knob == "cpu.set"
    }


def test_a_dedicated_pod_gets_cpus_of_its_own_and_everybody_else_is_moved_off_them() -> None:
    view = node(dedicated("d"), online("o"), pod("be"))
    pools = plan_pools(view, None, CONFIG)
    own = pools.dedicated["d/main"]
    assert len(own) == 2
    assert not own & (pools.shared | pools.reclaimed)
    texts = sets(view)
    assert texts["d/main"] == str(own)
    assert cpus(texts["o/main"]) == pools.shared
    assert not cpus(texts["be/main"]) & own


@pytest.mark.parametrize("policy", [CpuPolicy.STATIC, CpuPolicy.UNKNOWN])
def test_where_the_kubelet_gives_exclusive_cpus_we_give_none(policy: CpuPolicy) -> None:
    pools = plan_pools(node(dedicated("d"), kubelet=kubelet(policy, default="0-7")), None, CONFIG)
    assert (pools.placed, pools.dedicated) == ((), {})
    assert f"policy is {policy}" in pools.reasons["exclusive"]


def test_what_was_given_stays_while_the_kubelets_word_cannot_be_read() -> None:
    before = plan_pools(node(dedicated("d")), None, CONFIG)
    after = plan_pools(node(dedicated("d"), kubelet=kubelet(CpuPolicy.UNKNOWN)), before, CONFIG)
    assert (after.dedicated, after.placed) == (before.dedicated, before.placed)


def test_switched_to_static_the_kubelets_allocation_holds() -> None:
    before = plan_pools(node(dedicated("d")), None, CONFIG)
    view = node(dedicated("d"), kubelet=kubelet(default="0-5", exclusive={"d/main": "6-7"}))
    after = plan_pools(view, before, CONFIG)
    assert (after.placed, after.dedicated) == ((), {"d/main": cpus("6-7")})
    assert "d/main" not in sets(view, before)


@pytest.mark.parametrize(
    ("one", "count"),
    [
        (app("a", 2000), 2),
        (app("a", 1500), 2),
        (app("a", 1000), 1),
        (app("a", 999), 0),
        (container("a"), 0),
        (container("a", spec=RuntimeSpec(shares=4096)), 4),
    ],
)
def test_how_many_cpus_a_container_owns(one: Container, count: int) -> None:
    assert whole_cpus(one) == count


def test_a_side_car_runs_on_the_cpus_of_its_pods_largest_container() -> None:
    view = node(dedicated("d", app("small", 1000), app("large", 3000), app("side", 100)))
    texts = sets(view)
    assert texts["d/side"] == texts["d/large"]
    assert texts["d/small"] != texts["d/large"]
    assert not cpus(texts["d/small"]) & cpus(texts["d/large"])


def test_the_init_containers_cpus_go_over_to_the_app_container() -> None:
    init = node(dedicated("d", app("init", 2000, ContainerKind.INIT)), dedicated("e"))
    first = plan_pools(init, None, CONFIG)
    assert set(first.dedicated) == {"d/(init)", "e/main"}
    both = node(dedicated("d", app("init", 2000, ContainerKind.INIT), app("main", 2000)), dedicated("e"))
    second = plan_pools(both, first, CONFIG)
    assert second.dedicated == {"d/main": first.dedicated["d/(init)"], "e/main": first.dedicated["e/main"]}


def test_the_end_of_an_init_container_frees_nothing_that_is_in_use() -> None:
    """Kubernetes 105114: its CPUs went to the shared pool while the app container ran on them."""
    pools = plan_pools(node(dedicated("d", app("init", 3000, ContainerKind.INIT))), None, CONFIG)
    pools = plan_pools(node(dedicated("d", app("init", 3000, ContainerKind.INIT), app("main", 2000))), pools, CONFIG)
    held = pools.dedicated["d/main"]
    pools = plan_pools(node(dedicated("d", app("main", 2000)), online("o")), pools, CONFIG)
    assert pools.dedicated == {"d/main": held}
    assert not pools.shared & held
    assert len(pools.shared) == 6


def test_an_init_container_that_nobody_told_as_one_hands_its_cpus_on_as_well() -> None:
    """Not distinguished by the runtime: only by the kubelet's list, which not every node permits to read."""
    pools = plan_pools(node(dedicated("d", app("first", 2000)), online("o")), None, CONFIG)
    held = pools.dedicated["d/first"]
    for name in ("second", "main"):
        between = plan_pools(node(dedicated("d", app("pause", 0)), online("o")), pools, CONFIG)
        assert list(between.dedicated.values()) == [held], "nobody else gets them meanwhile"
        pools = plan_pools(node(dedicated("d", app(name, 2000)), online("o")), between, CONFIG)
        assert pools.dedicated == {f"d/{name}": held}
    # Beside another container of the pod nothing is taken from those who live, nor from one that starts again.
    two = plan_pools(node(dedicated("d", app("main", 2000), app("log", 1000))), pools, CONFIG)
    assert (two.dedicated["d/main"], len(two.dedicated["d/log"])) == (held, 1)
    gone = plan_pools(node(dedicated("d", app("log", 1000))), two, CONFIG)
    again = plan_pools(node(dedicated("d", app("main", 2000), app("log", 1000))), gone, CONFIG)
    assert again.dedicated == two.dedicated


def test_an_init_container_beside_apps_runs_on_all_that_its_pod_has() -> None:
    texts = sets(
        node(dedicated("d", app("a", 1000), app("b", 1000), app("init", 500, ContainerKind.INIT)), topology=SMT)
    )
    assert cpus(texts["d/init"]) == cpus(texts["d/a"]) | cpus(texts["d/b"])


def test_a_container_that_restarts_finds_its_cpus_again() -> None:
    first = plan_pools(node(dedicated("d", app("main", 2000), app("other", 1000))), None, CONFIG)
    between = plan_pools(node(dedicated("d", app("other", 1000)), dedicated("new")), first, CONFIG)
    assert between.dedicated["d/main"] == first.dedicated["d/main"]
    again = plan_pools(node(dedicated("d", app("main", 2000), app("other", 1000))), between, CONFIG)
    assert again.dedicated == first.dedicated


def test_a_pod_that_comes_again_after_the_nodes_restart_gets_what_it_had() -> None:
    both = node(dedicated("a"), dedicated("b"))
    first = plan_pools(both, None, CONFIG)
    empty = plan_pools(node(), first, CONFIG)
    assert (empty.dedicated, set(empty.remembered)) == ({}, {"a/main", "b/main"})
    late = plan_pools(node(dedicated("b")), empty, CONFIG)
    assert late.dedicated == {"b/main": first.dedicated["b/main"]}
    assert plan_pools(both, late, CONFIG).dedicated == first.dedicated


def test_only_so_many_are_remembered_the_newest() -> None:
    config = PoliciesConfig(exclusive=varied(ExclusiveConfig(), remember=1))
    pools = plan_pools(node(dedicated("a")), None, config)
    pools = plan_pools(node(dedicated("b")), pools, config)
    pools = plan_pools(node(), pools, config)
    assert set(pools.remembered) == {"b/main"}


def test_a_pod_whose_labels_nobody_has_told_yet_keeps_what_it_had() -> None:
    known = dedicated("d")
    first = plan_pools(node(known), None, CONFIG)
    untold = replace(
        known,
        classification=replace(known.classification, pod_class=PodClass.SHARED, certain=False),
        wish=CpuPreferences(),
    )
    assert plan_pools(node(untold), first, CONFIG).dedicated == first.dedicated
    message = replace(untold, classification=replace(untold.classification, certain=True))
    assert plan_pools(node(message), first, CONFIG).dedicated == {}


def test_some_cpus_stay_for_everybody_else() -> None:
    view = node(dedicated("d", app("main", 8000)), online("o"))
    pools = plan_pools(view, None, CONFIG)
    assert pools.dedicated == {}
    assert pools.shared == cpus("0-7")
    assert "d/main" in pools.reasons["exclusive"]
    assert sets(node(dedicated("d", app("main", 7000)), online("o")))["o/main"] == "7"


def test_without_numa_binding_a_dedicated_pod_works_and_with_it_stays_on_its_node() -> None:
    assert len(plan_pools(node(dedicated("d", app("main", 10_000)), topology=SMT), None, CONFIG).dedicated_cpus) == 10
    bound = dedicated("d", app("main", 4000), numa_binding=True, nodes=(1,))
    assert plan_pools(node(bound, topology=SMT), None, CONFIG).dedicated_cpus <= SMT.node_cpus(1)


def test_a_resized_container_keeps_what_it_can() -> None:
    first = plan_pools(node(dedicated("d", app("main", 4000)), topology=SMT), None, CONFIG)
    more = plan_pools(node(dedicated("d", app("main", 6000)), topology=SMT), first, CONFIG)
    assert len(more.dedicated_cpus) == 6
    assert first.dedicated_cpus <= more.dedicated_cpus
    less = plan_pools(node(dedicated("d", app("main", 2000)), topology=SMT), more, CONFIG)
    assert len(less.dedicated_cpus) == 2
    assert less.dedicated_cpus <= more.dedicated_cpus


def test_reserved_and_interrupt_cpus_are_never_given_away() -> None:
    view = node(dedicated("d", app("main", 6000)), kubelet=kubelet(CpuPolicy.NONE, reserved="0-1"))
    pools = plan_pools(view, None, CONFIG)
    assert not pools.dedicated_cpus & cpus("0-1")
    assert not pools.dedicated


def test_a_dedicated_pod_that_got_nothing_stays_off_the_cpus_of_those_who_did() -> None:
    view = node(dedicated("a", app("main", 5000)), dedicated("b", app("main", 5000)))
    pools = plan_pools(view, None, CONFIG)
    assert len(pools.dedicated) == 1
    ((owner, own),) = pools.dedicated.items()
    (other,) = {"a/main", "b/main"} - {owner}
    assert not cpus(sets(view)[other]) & own


def test_the_pause_container_is_left_alone() -> None:
    view = node(dedicated("d", app("main", 2000), container("pause", kind=ContainerKind.SANDBOX)))
    assert "d/pause" not in sets(view)


# More of the pods' wishes

WISHES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "nothing": ({}, {}, "0,8 | 1,9"),
    "an exclusive node": ({"numa_exclusive": True, "numa_binding": True}, {}, "0,8 | 4,12"),
    "a node shared with no other bound pod": (
        {"numa_share": False, "numa_binding": True},
        {"numa_binding": True},
        "0,8 | 4,12",
    ),
    "apart on nodes": ({"apart": AntiAffinity.NODE}, {"apart": AntiAffinity.NODE}, "0,8 | 4,12"),
    "apart on cores": ({"apart": AntiAffinity.CORE}, {"apart": AntiAffinity.CORE}, "0,8 | 1,9"),
    "single threads": ({"spread_cores": True}, {}, "0-1 | 2,10"),
    "single threads, required": ({"spread_cores": True, "strict_cores": True}, {"spread_cores": True}, "0-1 | 2-3"),
    "single threads and apart on cores": (
        {"spread_cores": True, "apart": AntiAffinity.CORE},
        {"apart": AntiAffinity.CORE},
        "0-1 | 2,10",
    ),
    "two nodes": ({"node_count": 2}, {}, "0,4 | 1,9"),
    "whole cores win over single threads": ({"spread_cores": True, "full_cores": True}, {}, "0,8 | 1,9"),
}


@pytest.mark.parametrize(("first", "second", "expected"), WISHES.values(), ids=WISHES.keys())
def test_wishes(first: dict[str, object], second: dict[str, object], expected: str) -> None:
    """The first pod runs already when the second one starts."""
    pods = (dedicated("a", **first), dedicated("b", **second))
    before = plan_pools(node(pods[0], topology=SMT), None, CONFIG)
    after = plan_pools(node(*pods, topology=SMT), before, CONFIG)
    assert f"{after.dedicated['a/main']} | {after.dedicated['b/main']}" == expected


def test_the_reason_of_the_choice_is_told_for_as_long_as_the_cpus_are_the_same() -> None:
    view = node(dedicated("a", spread_cores=True), topology=SMT)
    first = plan_pools(view, None, CONFIG)
    kept, why = plan_pools(view, first, CONFIG), "dedicated/a/main"
    assert kept.reasons[why] == first.reasons[why]
    larger = plan_pools(node(dedicated("a", app("main", 4000), spread_cores=True), topology=SMT), kept, CONFIG)
    assert larger.reasons[why] != first.reasons[why]


def test_a_required_wish_that_cannot_be_had_is_told() -> None:
    view = node(dedicated("a", app("main", 9000), spread_cores=True, strict_cores=True), topology=SMT)
    pools = plan_pools(view, None, CONFIG)
    assert pools.dedicated == {}
    assert pools.reasons["exclusive"] == (
        "a/main did not get the CPUs it requests: requests 9 CPUs; 8 free one per core; fragmented: 15 free on "
        "the whole machine"
    )
    softer = node(dedicated("a", app("main", 9000), spread_cores=True), topology=SMT)
    text = plan_pools(softer, None, CONFIG).reasons["dedicated/a/main"]
    assert text.endswith("chosen; only 8 cores for its 9 CPUs")


def test_a_bound_pod_of_the_shared_pool_is_company() -> None:
    bound = replace(online("s"), wish=CpuPreferences(numa_binding=True, nodes=(0,)))
    first = plan_pools(node(bound, topology=SMT), None, CONFIG)
    assert first.bound == {"s": "shared/share-NUMA0"}
    alone = dedicated("d", numa_binding=True, numa_share=False)
    second = plan_pools(node(bound, alone, topology=SMT), first, CONFIG)
    assert second.dedicated_cpus <= SMT.node_cpus(1)
    late = replace(online("t"), wish=CpuPreferences(numa_binding=True))
    third = plan_pools(node(bound, alone, late, topology=SMT), second, CONFIG)
    assert third.bound["t"] == "shared/share-NUMA0"


# Memory

GIB = 2**30
ROOMY = replace(SMT, numa=tuple(NumaNode(id=number, memory_bytes=64 * GIB) for number in (0, 1)))


def hungry(uid: str, gib: int) -> Pod:
    return dedicated(uid, container("main", requests=Resources(cpu_milli=2000, memory_bytes=gib * GIB)))


def memory(*free: int, age_s: float | None = 1.0) -> NumaMemory:
    return NumaMemory(free={node: gib * GIB for node, gib in enumerate(free)}, age_s=age_s)


@pytest.mark.parametrize(
    ("topology", "known", "first", "expected"),
    [
        (ROOMY, memory(10, 60), False, 1),
        (ROOMY, memory(60, 10), False, 0),
        (ROOMY, memory(10, 60), True, 0),
        (ROOMY, memory(10, 60, age_s=61.0), False, 0),
        (ROOMY, memory(10, 60, age_s=None), False, 0),
        (ROOMY, memory(10), False, 0),
        (ROOMY, None, False, 0),
        (SMT, memory(10, 60), False, 0),
    ],
    ids=["too little", "enough", "first look", "old", "never read", "in part", "unknown", "size unknown"],
)
def test_a_newcomer_goes_where_its_memory_is(
    topology: Topology, known: NumaMemory | None, first: bool, expected: int
) -> None:
    empty = plan_pools(node(topology=topology), None, CONFIG)
    view = node(hungry("d", 20), topology=topology, numa_memory=known)
    pools = plan_pools(view, None if first else empty, CONFIG)
    assert pools.dedicated_cpus <= topology.node_cpus(expected)


def test_newcomers_of_one_moment_do_not_count_on_the_same_memory() -> None:
    empty = plan_pools(node(topology=ROOMY), None, CONFIG)
    view = node(hungry("a", 40), hungry("b", 40), topology=ROOMY, numa_memory=memory(60, 60))
    pools = plan_pools(view, empty, CONFIG)
    assert pools.dedicated["a/main"] <= ROOMY.node_cpus(0)
    assert pools.dedicated["b/main"] <= ROOMY.node_cpus(1)
    assert "cpu and memory on NUMA node 1" in pools.reasons["dedicated/b/main"]


def test_memory_moves_nobody() -> None:
    empty = plan_pools(node(topology=ROOMY), None, CONFIG)
    first = plan_pools(node(hungry("a", 40), topology=ROOMY, numa_memory=memory(60, 60)), empty, CONFIG)
    second = plan_pools(node(hungry("a", 40), topology=ROOMY, numa_memory=memory(1, 60)), first, CONFIG)
    assert second.dedicated == first.dedicated


def test_init_containers_ask_for_memory_too() -> None:
    empty = plan_pools(node(topology=ROOMY), None, CONFIG)
    init = container("i", kind=ContainerKind.INIT, requests=Resources(cpu_milli=2000, memory_bytes=20 * GIB))
    pools = plan_pools(node(dedicated("d", init), topology=ROOMY, numa_memory=memory(1, 60)), empty, CONFIG)
    assert pools.dedicated["d/(init)"] <= ROOMY.node_cpus(1)


def test_cpus_of_network_interrupts_are_given_last() -> None:
    view = node(dedicated("d", app("main", 4000)), irq_cpus=cpus("0-2"))
    pools = plan_pools(view, None, CONFIG)
    assert pools.dedicated_cpus == cpus("3-6")
    assert pools.reasons["exclusive"].endswith("; CPU 0-2 (network interrupts) is allocated last")
    more = plan_pools(node(dedicated("d", app("main", 6000)), irq_cpus=cpus("0-2")), None, CONFIG)
    assert len(more.dedicated_cpus) == 6


def test_who_comes_back_does_not_take_what_another_has_taken_over() -> None:
    """Two containers of two CPUs each where only one finds room: the other takes over while the first restarts."""
    both = node(dedicated("a", app("c0", 2000), app("c1", 2000)), topology=4)
    first = plan_pools(both, None, CONFIG)
    ((owner, own),) = first.dedicated.items()
    other = next(name for name in ("c0", "c1") if f"a/{name}" != owner)
    between = plan_pools(node(dedicated("a", app(other, 2000)), topology=4), first, CONFIG)
    assert (between.dedicated, between.remembered) == ({f"a/{other}": own}, {})
    assert plan_pools(both, between, CONFIG).dedicated == {f"a/{other}": own}


def test_cpus_that_a_scheduler_chose_are_never_more_than_a_container_requests() -> None:
    shape = uniform(cores=32, threads=1)
    greedy = dedicated("d", app("main", 1000), cpus=cpus("1-31"))
    pools = plan_pools(node(greedy, online("o"), topology=shape), None, CONFIG)
    assert len(pools.dedicated["d/main"]) == 1
    assert len(pools.shared) >= 30


def test_several_containers_of_a_pod_share_the_cpus_that_a_scheduler_chose_for_it() -> None:
    wish = cpus("2-3,6,10-11,14")
    late = dedicated("d", app("b", 4000), cpus=wish)
    once = plan_pools(node(late, topology=SMT), None, CONFIG)
    assert once.dedicated == {"d/b": cpus("2-3,10-11")}
    both = dedicated("d", app("a", 2000), app("b", 4000), cpus=wish)
    pools = plan_pools(node(both, topology=SMT), once, CONFIG)
    assert pools.dedicated == {"d/a": cpus("6,14"), "d/b": cpus("2-3,10-11")}
    assert plan_pools(node(both, topology=SMT), pools, CONFIG).dedicated == pools.dedicated


def test_no_be_work_on_the_node_of_a_container_that_wants_it_for_itself() -> None:
    alone = dedicated("d", app("main", 2000), numa_binding=True, numa_exclusive=True)
    view = node(alone, pod("be"), topology=SMT)
    pools = plan_pools(view, None, CONFIG)
    (own,) = {SMT.node_of(number) for number in pools.dedicated["d/main"]}
    assert not pools.reclaimed & SMT.node_cpus(own)
    lent = plan_pools(view, None, PoliciesConfig(reclaimed=ReclaimedConfig(share_exclusive=True)))
    assert lent.reclaimed & SMT.node_cpus(own)
    # Where all nodes are such nodes BE work shares them after all.
    small = plan_pools(node(alone, pod("be"), topology=uniform(cores=8, threads=1)), None, CONFIG)
    assert small.reclaimed
    assert not small.reclaimed & small.dedicated["d/main"]


@pytest.mark.parametrize(("main", "owner"), [("b", "b"), (None, "a"), ("side", "a"), ("gone", "a")])
def test_side_cars_run_on_the_cpus_of_the_main_container(main: str | None, owner: str) -> None:
    item = dedicated("d", app("a", 4000), app("b", 2000), app("side", 100), main=main)
    texts = sets(node(item, topology=SMT))
    assert texts["d/side"] == texts[f"d/{owner}"]
