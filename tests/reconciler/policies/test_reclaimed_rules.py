"""BE work by a site's rules: their order and their filters apply, and no rule is called twice."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from reconciler.control.planner import plan_pools
from reconciler.placement.allocate import preference
from reconciler.placement.chain import PlacementContext, Plugin, Scored
from reconciler.placement.config import PlacementConfig
from reconciler.placement.demand import CpuDemand
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm, by_rules, choose_cpus
from reconciler.policies.table import PoliciesConfig
from state.model import CpuPolicy, NodeView, Pod, PodClass
from state.topology import CpuKind, Topology, uniform
from tests.reconciler.nodes import cpu, cpus, kubelet, node, pod

HERE = __name__
SMT = uniform(cores=4, threads=2)
FLAT = uniform(cores=8, threads=1)
HYBRID = replace(
    SMT, cpus=tuple(replace(item, kind=CpuKind.EFFICIENCY) if item.core < 2 else item for item in SMT.cpus)
)
ASKED: list[str] = []


class LowFirst(Plugin):
    """BE work begins with the low half."""

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> list[Scored]:
        ASKED.append(str(cpus))
        return [(CpuSet.span(4), 1.0)] if demand.pod_class is PodClass.RECLAIMED else []


class MiddleFirst(Plugin):
    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> list[Scored]:
        return [(CpuSet([2, 3, 8, 9]), 1.0)]


class NotThree(Plugin):
    """BE work never runs on CPU 3."""

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return CpuSet([3]) if demand.pod_class is PodClass.RECLAIMED else EMPTY


class Nowhere(Plugin):
    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return cpus


class Broken(Plugin):
    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> list[Scored]:
        raise RuntimeError("no idea")


def rules(*names: str, form: ReclaimedForm = ReclaimedForm.BOTH, per_node: int = 0) -> PoliciesConfig:
    placement = PlacementConfig(plugins={f"{HERE}:{name}": 5 for name in names})
    return PoliciesConfig(reclaimed=ReclaimedConfig(placement=placement, form=form, minimum_per_node=per_node))


def test_the_order_is_followed() -> None:
    view = node(pod("be"), cpu=cpu(online=2000))
    assert plan_pools(view, None, PoliciesConfig()).reclaimed == cpus("4-7")
    assert plan_pools(view, None, rules("LowFirst")).reclaimed == cpus("0-3")


def test_what_a_filter_keeps_out_is_no_capacity() -> None:
    view = node(pod("be"), cpu=cpu())
    pools = plan_pools(view, None, rules("NotThree"))
    assert 3 not in pools.reclaimed
    assert pools.budget_milli == plan_pools(view, None, PoliciesConfig()).budget_milli * 7 // 8
    assert pools.reasons["reclaimed"].endswith(f"; CPU 3 excluded by {HERE}:NotThree")


def test_a_held_cpu_that_is_excluded_is_returned() -> None:
    view = node(pod("be"), cpu=cpu(), topology=4)
    before = plan_pools(view, None, PoliciesConfig())
    assert 3 in before.reclaimed
    assert 3 not in plan_pools(view, before, rules("NotThree")).reclaimed


def test_rules_that_leave_nothing_are_not_followed() -> None:
    view = node(pod("be"), cpu=cpu())
    pools = plan_pools(view, None, rules("Nowhere"))
    assert pools.reclaimed == plan_pools(view, None, PoliciesConfig()).reclaimed
    assert pools.reasons["reclaimed"].endswith("exclude every CPU and are ignored")


def test_a_failing_rule_is_skipped_and_reported() -> None:
    view = node(pod("be"), cpu=cpu())
    pools = plan_pools(view, None, rules("Broken"))
    assert pools.reclaimed == plan_pools(view, None, PoliciesConfig()).reclaimed
    text = f"; plug-in {HERE}:Broken failed and was skipped: reclaimed: pre_score: RuntimeError: no idea"
    assert pools.reasons["reclaimed"].endswith(text)


def test_without_a_cpu_set_there_is_nothing_to_order() -> None:
    view = node(pod("be"), cpu=cpu())
    quota = PoliciesConfig(reclaimed=ReclaimedConfig(form=ReclaimedForm.QUOTA))
    ruled = plan_pools(view, None, rules("NotThree", form=ReclaimedForm.QUOTA))
    assert (ruled.budget_milli, ruled.reasons) == (
        plan_pools(view, None, quota).budget_milli,
        plan_pools(view, None, quota).reasons,
    )


def test_the_minimum_of_each_node_follows_the_order_too() -> None:
    view = node(pod("be"), cpu=cpu(online=8000), topology=uniform(sockets=2, nodes=2, cores=16, threads=1))
    assert plan_pools(view, None, rules("MiddleFirst", per_node=2)).reclaimed == cpus("2-3,8-9")
    assert plan_pools(view, None, rules("MiddleFirst")).reclaimed == cpus("3,8-9")


def test_a_rule_that_cannot_be_had_is_one_message() -> None:
    with pytest.raises(InputError, match="no_such"):
        ReclaimedConfig(placement=PlacementConfig(plugins={"no_such:Rule": 1}))


def test_rules_are_called_once_for_the_same_candidates() -> None:
    view = node(pod("be"), cpu=cpu(online=1000), topology=uniform(cores=12, threads=1))
    config = rules("LowFirst")
    ASKED.clear()
    pools = plan_pools(view, None, config)
    for online in (2000, 500, 4000):
        pools = plan_pools(replace(view, cpu=cpu(online=online)), pools, config)
    assert ASKED == ["0-11"]
    other = replace(view, topology=replace(view.topology, offline=CpuSet([99])))
    plan_pools(other, pools, config)
    assert ASKED == ["0-11", "0-11"], "another machine, another answer"


def test_the_cpus_of_network_interrupts_come_last_for_everybody() -> None:
    named = PoliciesConfig(exclusive=ExclusiveConfig(avoid_irqs=("eth0",)))
    view = node(pod("be"), cpu=cpu(online=2000), irq_cpus=cpus("6-7"))
    assert plan_pools(view, None, named).reclaimed == cpus("2-5")


@pytest.mark.parametrize("names", [("eth0", ""), ("a b",), ("../x",)])
def test_an_interface_is_a_name_or_a_pattern(names: tuple[str, ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="avoid_irqs"):
        msgspec.convert({"avoid_irqs": list(names)}, ExclusiveConfig)


masks = st.integers(1, 255).map(CpuSet.from_mask)


@given(count=st.integers(1, 8), candidates=masks, held=masks, topology=st.sampled_from([SMT, FLAT, HYBRID]))
def test_the_built_in_rules_order_as_the_choice_does_by_itself(
    count: int, candidates: CpuSet, held: CpuSet, topology: Topology
) -> None:
    tiers = preference(candidates, topology).tiers
    by_chain = choose_cpus(count, candidates, held & candidates, EMPTY, topology, tiers=tiers)
    assert by_chain == choose_cpus(count, candidates, held & candidates, EMPTY, topology)
    ruled = by_rules(candidates, topology, PlacementConfig(), interrupts=EMPTY)
    assert (ruled.candidates, tuple(ruled.tiers or ()), ruled.message) == (candidates, tiers, "")


# Who lends


FULL = BudgetConfig(limit_percent=100)


def lending(view: NodeView) -> CpuSet:
    config = PoliciesConfig(reclaimed=ReclaimedConfig(share_exclusive=True, budget=FULL))
    return plan_pools(view, None, config).reclaimed


def owner(uid: str, *, lends: bool | None = None, certain: bool = True) -> Pod:
    item = pod(uid, cls=PodClass.DEDICATED)
    return replace(
        item,
        wish=replace(item.wish, lends=lends),
        classification=replace(item.classification, certain=certain),
    )


OWNERS = {"a/main": "4-5", "b/main": "6-7"}


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ((owner("a"), owner("b")), "0-7"),
        ((owner("a", lends=True), owner("b")), "0-7"),
        ((owner("a", lends=False), owner("b")), "0-3,6-7"),
        ((owner("a", lends=False), owner("b", lends=False)), "0-3"),
        ((owner("a", certain=False), owner("b", lends=True)), "0-3,6-7"),
        ((owner("b"),), "0-7"),
    ],
    ids=["nobody says", "one lends", "one refuses", "both refuse", "one is not told of yet", "one is gone"],
)
@pytest.mark.parametrize("policy", [CpuPolicy.STATIC, CpuPolicy.UNKNOWN])
def test_be_work_runs_on_the_cpus_of_those_that_lend_or_do_not_say(
    owners: tuple[Pod, ...], expected: str, policy: CpuPolicy
) -> None:
    view = node(*owners, pod("be"), kubelet=kubelet(policy, default="0-3", exclusive=OWNERS))
    assert lending(view) == cpus(expected)
    without = plan_pools(view, None, PoliciesConfig(reclaimed=ReclaimedConfig(budget=FULL)))
    assert without.reclaimed == cpus("0-3"), "only where it is configured"


def test_where_every_cpu_is_dedicated_those_that_refuse_are_the_last() -> None:
    view = node(
        owner("a", lends=False),
        owner("b", lends=True),
        topology=4,
        kubelet=kubelet(default="", exclusive={"a/main": "0-1", "b/main": "2-3"}),
    )
    assert plan_pools(view, None, PoliciesConfig()).reclaimed == cpus("2-3")
