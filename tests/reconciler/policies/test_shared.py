"""shared: the pool of each pod, its size and CPUs, and when online pods get a CPU set."""

from typing import Any

import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan, plan_pools
from reconciler.placement.pool_members import DEFAULT
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.shared import ConfineMode, PoolSizing, SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences, GroupUse
from state.model import ContainerKind, CpuPolicy, NodeView, Pod, PodClass, Pools, Resources
from state.plan import NodePlan
from state.topology import uniform
from tests.reconciler.nodes import container, cpu, cpus, kubelet, node, pod

TWO = uniform(sockets=2, nodes=2, cores=8, threads=2)


def asking(uid: str, milli: int = 1000, cls: PodClass = PodClass.SHARED, **wish: Any) -> Pod:
    item = pod(
        uid,
        container("pause", kind=ContainerKind.SANDBOX),
        container("main", requests=Resources(cpu_milli=milli)),
        cls=cls,
    )
    return replace(item, wish=CpuPreferences(**wish))


def config(**shared: Any) -> PoliciesConfig:
    return PoliciesConfig(shared=SharedConfig(**shared))


def sets(view: NodeView, given: PoliciesConfig, previous: Pools | None = None) -> dict[str, str]:
    """CPU sets wanted of online pods' containers, by uid."""
    desired = plan(view, NodePlan(pools=previous) if previous is not None else None, given)
    return {
        str(setting.pod_uid): str(setting.value)
        for setting in desired.settings.values()
        if setting.knob == "cpu.set" and setting.policy == "shared"
    }


def test_one_pool_needs_no_cpu_set() -> None:
    view = node(asking("a"), asking("b"))
    assert sets(view, config()) == {}
    assert plan_pools(view, None, config()).reasons["shared"] == (
        "neither reserved nor dedicated; online pods keep the CPU set from the kubelet"
    )


def test_a_named_pool_has_what_its_pods_ask_for_and_the_default_pool_the_rest() -> None:
    view = node(asking("a"), asking("b", 1500, pool="batch"), asking("c", 500, pool="batch"))
    pools = plan_pools(view, None, config(expand=False))
    assert (pools.named, pools.shared) == ({"shared/batch": cpus("6-7")}, cpus("0-5"))
    assert sets(view, config(expand=False)) == {"a": "0-5", "b": "6-7", "c": "6-7"}
    assert "requests of 2 pods: 2.00 CPU" in pools.reasons["shared/batch"]


def test_a_system_pod_that_names_a_pool_has_one_and_the_others_run_everywhere() -> None:
    view = node(asking("a", cls=PodClass.SYSTEM, pool="agents"), asking("b", cls=PodClass.SYSTEM), asking("c"))
    pools = plan_pools(view, None, config())
    assert set(pools.named) == {"system/agents"}
    assert set(sets(view, config())) == {"a", "c"}


def test_a_numa_bound_pool_lies_on_its_node() -> None:
    view = node(
        asking("a", 3000, pool="db", numa_binding=True, nodes=(1,)), asking("b", 2000, numa_binding=True), topology=TWO
    )
    pools = plan_pools(view, None, config(expand=False))
    assert pools.bound == {"a": "shared/db-NUMA1", "b": "shared/share-NUMA0"}
    assert pools.named["shared/db-NUMA1"] <= TWO.node_cpus(1)
    assert pools.named["shared/share-NUMA0"] <= TWO.node_cpus(0)
    assert [len(cpu_set) for cpu_set in pools.named.values()] == [3, 2]


def test_pools_that_do_not_fit_are_cut_in_proportion_and_never_to_nothing() -> None:
    view = node(asking("a", 6000), asking("b", 12_000, pool="big"), asking("c", 100, pool="small"))
    pools = plan_pools(view, None, config())
    assert {key: len(cpu_set) for key, cpu_set in pools.named.items()} == {"shared/big": 5, "shared/small": 1}
    assert len(pools.shared) == 2


def test_bound_pools_leave_a_cpu_to_those_without_a_node() -> None:
    bound = [asking(uid, 9000, numa_binding=True, nodes=(at,)) for at, uid in enumerate("ab")]
    view = node(*bound, asking("c"), topology=TWO)
    pools = plan_pools(view, None, config())
    assert pools.shared
    assert sum(map(len, pools.named.values())) + len(pools.shared) == 16


def test_more_pools_than_cpus_share_one() -> None:
    view = node(*(asking(name, 1000, pool=name) for name in "abcdef"), topology=4)
    pools = plan_pools(view, None, config())
    assert all(pools.named.values())
    own = [cpu_set for cpu_set in pools.named.values() if cpu_set != pools.shared]
    assert len(own) + len({cpu_set for cpu_set in pools.named.values() if cpu_set == pools.shared}) <= 4
    assert not any(cpu_set & pools.shared for cpu_set in own)


def test_who_comes_later_moves_nobody_that_need_not() -> None:
    first = plan_pools(node(asking("m", 2000, pool="m"), asking("z", 2000, pool="z")), None, config(expand=False))
    view = node(asking("a", 2000, pool="a"), asking("m", 2000, pool="m"), asking("z", 2000, pool="z"))
    second = plan_pools(view, first, config(expand=False))
    assert {key: second.named[key] for key in first.named} == first.named


@pytest.mark.parametrize(
    ("given", "confined"),
    [
        (config(), False),
        (config(confine=ConfineMode.ALWAYS), True),
        (config(confine=ConfineMode.NEVER), False),
        (config(mode=SharedPoolMode.SEPARATE), True),
        (config(mode=SharedPoolMode.SEPARATE, confine=ConfineMode.NEVER), False),
        (PoliciesConfig(reserve=ReserveConfig(interrupt_cpus="7")), True),
    ],
    ids=["auto", "always", "never", "separate", "separate, but never", "interrupt CPUs"],
)
def test_when_online_pods_get_a_cpu_set(given: PoliciesConfig, confined: bool) -> None:
    view = node(asking("a"))
    assert plan_pools(view, None, given).confine_shared is confined
    assert ("a" in sets(view, given)) is confined


def test_never_means_no_named_pools_either() -> None:
    view = node(asking("a", pool="batch"))
    pools = plan_pools(view, None, config(confine=ConfineMode.NEVER))
    assert (pools.named, pools.bound, pools.shared) == ({}, {}, cpus("0-7"))
    assert "confine: never" in pools.reasons["shared"]


def test_a_kubelet_that_rewrites_for_ever_is_not_fought() -> None:
    view = node(asking("a", pool="batch"), kubelet=kubelet(default="0-7", reasserts_s=10.0))
    assert sets(view, config(confine=ConfineMode.ALWAYS)) == {}


def test_under_the_static_policy_named_pools_leave_exclusive_cpus_alone() -> None:
    view = node(
        asking("a", 2000, pool="batch"),
        asking("b"),
        pod("g", cls=PodClass.DEDICATED),
        kubelet=kubelet(default="0-5", exclusive={"g/main": "6-7"}),
    )
    pools = plan_pools(view, None, config(expand=False))
    assert pools.named["shared/batch"] == cpus("4-5")
    assert sets(view, config(expand=False)) == {"a": "4-5", "b": "0-3"}


def test_reserved_cpus_are_open_to_online_pods_unless_strict() -> None:
    loose = node(asking("a"), asking("b", pool="x"), kubelet=kubelet(CpuPolicy.NONE, reserved="0"))
    strict = node(
        asking("a"), asking("b", pool="x"), kubelet=kubelet(CpuPolicy.NONE, reserved="0", strict_reserved=True)
    )
    assert sets(loose, config(expand=False)) == {"a": "0-6", "b": "7"}
    assert sets(strict, config(expand=False)) == {"a": "1-6", "b": "7"}


def test_separate_be_work_has_what_is_left_and_no_cpu_of_theirs() -> None:
    view = node(asking("a", 3000), asking("b", 1000, pool="x"), pod("be"))
    pools = plan_pools(view, None, config(mode=SharedPoolMode.SEPARATE))
    assert (len(pools.shared), len(pools.named["shared/x"]), len(pools.reclaimed)) == (3, 1, 4)
    assert not pools.reclaimed & (pools.shared | pools.named["shared/x"])
    assert pools.budget_milli == 4000


def test_separate_leaves_be_work_something_whatever_online_pods_ask() -> None:
    view = node(asking("a", 30_000), pod("be"))
    pools = plan_pools(view, None, config(mode=SharedPoolMode.SEPARATE, leave_cpus=2))
    assert (len(pools.shared), len(pools.reclaimed)) == (6, 2)


def test_a_fixed_size_stands_whatever_is_asked() -> None:
    view = node(asking("a"), asking("b", 100, pool="x"))
    assert len(plan_pools(view, None, config(fixed={"shared/x": 3})).named["shared/x"]) == 3
    with pytest.raises(ValueError, match=r"fixed.shared/x: 0 CPUs; expected at least 1"):
        SharedConfig(fixed={"shared/x": 0})


def test_a_measured_pool_grows_at_once_and_shrinks_slowly() -> None:
    given = config(mode=SharedPoolMode.SEPARATE, sizing=PoolSizing.MEASURED)
    view = node(asking("a", 1000), topology=uniform(cores=32, threads=1), cpu=cpu(online=1000))

    def using(milli: int, at: float, previous: Pools | None) -> Pools:
        path = view.pods["a"].group.path
        return plan_pools(replace(view, now=at, uses={path: GroupUse(cpu_milli=milli)}), previous, given)

    small = using(1000, 1000.0, None)
    large = using(12_000, 1002.0, small)
    assert len(small.shared) < len(large.shared) <= len(small.shared) + 10
    at_once = using(1000, 1003.0, large)
    assert len(at_once.shared) == len(large.shared)
    later = using(1000, 1040.0, large)
    assert len(large.shared) - 4 <= len(later.shared) < len(large.shared)
    assert not later.reclaimed & later.shared


def test_be_work_bound_to_a_node_gets_the_pools_part_there() -> None:
    be = replace(pod("be"), wish=CpuPreferences(numa_binding=True, nodes=(1,)))
    view = node(be, topology=TWO, cpu=cpu(online=13_000))
    given = PoliciesConfig(reclaimed=ReclaimedConfig(minimum_per_node=1))
    pools = plan_pools(view, None, given)
    assert all(pools.reclaimed & TWO.node_cpus(number) for number in TWO.nodes())
    (setting,) = [item for item in plan(view, None, given).settings.values() if item.knob == "cpu.set"]
    assert setting.value == pools.reclaimed & TWO.node_cpus(1)
    assert setting.reason == "BE pool on NUMA node 1"


def test_sizes_of_one_plan_are_where_the_next_begins() -> None:
    view = node(asking("a", 3000), asking("b", pool="x"))
    once = plan_pools(view, None, config(mode=SharedPoolMode.SEPARATE))
    assert plan_pools(view, once, config(mode=SharedPoolMode.SEPARATE)) == once
    assert set(once.sizes) == {DEFAULT, "shared/x"}


def test_isolated_cpus_are_in_no_pool_of_many() -> None:
    shape = replace(uniform(cores=8, threads=1), isolated=cpus("6-7"))
    pools = plan_pools(node(asking("a"), asking("b", 2000, pool="x"), topology=shape), None, config())
    assert pools.shared | pools.named["shared/x"] == cpus("0-5")
    everything = replace(shape, isolated=shape.online)
    assert plan_pools(node(asking("a"), topology=everything), None, config()).shared == cpus("0-7")


def test_a_pools_reason_counts_the_cpus_that_nobody_requests() -> None:
    def has(milli: int) -> list[str]:
        pools = plan_pools(node(asking("a", milli), asking("b", 4000, pool="x")), None, config())
        return [pools.reasons[key].split("; ")[1] for key in ("shared", "shared/x")]

    assert has(4000) == ["has 4", "has 4"]
    assert has(3000) == ["has 4, 1 of them requested by no pool", "has 4"]
