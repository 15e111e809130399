"""Which law sets the BE budget, by what is in force in the kernel, and what of it is written."""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.budget import BudgetConfig, BudgetLaw
from reconciler.policies.harm import HarmConfig
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.yielding import scheduler_of
from state.cpu import HarmReading
from state.measures import Restrictions
from state.model import NodeView, Phase, Pod, Pools, Resources
from state.plan import Desired
from tests.reconciler.nodes import container, cpu, cpus, kubelet, node, online, pod

DIRECTORY = "/kubepods/besteffort"
WEB = online("web", container("main", requests=Resources(cpu_milli=2000)))
BATCH = pod("batch")
OUTSIDE = pod("outside", qos=QosClass.BURSTABLE)
IDLE = {("/kubepods/besteffort/podbatch", "cpu.idle"): 1}
TOP = HarmReading(ceiling_milli=8000)
CUT = HarmReading(ceiling_milli=3000, cuts=1, uid="web", waits_percent=22.5, own_percent=1.0)


def settled(item: Pod) -> Pod:
    return replace(item, containers=tuple(replace(inner, phase=Phase.SETTLED) for inner in item.containers))


def view(*pods: Pod, **more: Any) -> NodeView:
    values: dict[str, Any] = {"actual": IDLE, "harm": TOP, "now": 100.0} | more
    return node(*map(settled, pods or (WEB, BATCH)), **values)


def planned(
    scene: NodeView, *, form: ReclaimedForm = ReclaimedForm.BOTH, before: Desired | None = None, **more: Any
) -> Desired:
    config = PoliciesConfig(reclaimed=ReclaimedConfig(form=form, budget=BudgetConfig(**more)))
    return plan(scene, before.plan if before is not None else None, config)


def pools_of(scene: NodeView, **more: Any) -> Pools:
    return planned(scene, **more).plan.pools


def in_force(pools: Pools) -> bool:
    return pools.harm is not None and pools.harm.in_force


@pytest.mark.parametrize("form", list(ReclaimedForm))
def test_at_the_top_be_runs_on_all_cpus_without_a_quota(form: ReclaimedForm) -> None:
    desired = planned(view(), form=form)
    pools = desired.plan.pools
    assert in_force(pools)
    assert (pools.budget_milli, pools.quota_milli, pools.reclaimed) == (8000, None, cpus("0-7"))
    assert not [knob for _, knob in desired.settings if knob == "cpu.quota"]


@pytest.mark.parametrize("form", list(ReclaimedForm))
def test_back_at_the_top_it_has_all_cpus_again(form: ReclaimedForm) -> None:
    before = planned(view(harm=CUT), form=form)
    assert len(before.plan.pools.reclaimed) < 8 or form is ReclaimedForm.QUOTA
    assert planned(view(), form=form, before=before).plan.pools.reclaimed == cpus("0-7")


@pytest.mark.parametrize("form", [ReclaimedForm.BOTH, ReclaimedForm.CPUSET])
@pytest.mark.parametrize(("ceiling", "count"), [(3999, 3), (3000, 3), (1000, 1), (0, 1)])
def test_cut_it_has_fewer_whole_cpus_and_no_quota(form: ReclaimedForm, ceiling: int, count: int) -> None:
    desired = planned(view(harm=replace(CUT, ceiling_milli=ceiling)), form=form)
    assert (desired.plan.pools.quota_milli, len(desired.plan.pools.reclaimed)) == (None, count)
    assert not [knob for _, knob in desired.settings if knob == "cpu.quota"]


def test_the_law_cuts_down_to_the_configured_number_of_cpus() -> None:
    config = PoliciesConfig(reclaimed=ReclaimedConfig(minimum_cpus=2))
    pools = plan(view(harm=replace(CUT, ceiling_milli=0)), None, config).plan.pools
    assert pools.harm is not None
    assert (pools.harm.floor_milli, len(pools.reclaimed)) == (2000, 2)


def test_by_quota_alone_it_is_cut_by_a_quota() -> None:
    desired = planned(view(harm=CUT), form=ReclaimedForm.QUOTA)
    assert desired.settings[DIRECTORY, "cpu.quota"].value == 300_000


def test_without_a_cpu_set_that_could_be_narrowed_there_is_no_cut_and_no_quota() -> None:
    """The static CPU manager up to 1.21 writes every container's CPU set again."""
    scene = view(harm=CUT, kubelet=kubelet(default="0-7", reasserts_s=10.0))
    pools = pools_of(scene)
    assert pools.harm is not None
    assert (pools.confined, pools.quota_milli, pools.budget_milli) == (False, None, 8000)
    assert pools.harm.floor_milli == pools.harm.top_milli
    assert "yield" in pools.reasons["law"]
    assert pools_of(scene, form=ReclaimedForm.QUOTA).quota_milli == {DIRECTORY: 3000}


def test_a_reserve_is_a_quota() -> None:
    desired = planned(view(harm=replace(TOP, ceiling_milli=7840)), harm=HarmConfig(reserve_percent=2))
    assert desired.settings[DIRECTORY, "cpu.quota"].value == 784_000


def test_pods_outside_of_the_directory_have_no_quota_at_the_top_either() -> None:
    outside = {(settled(OUTSIDE).group.path, "cpu.idle"): 1}
    desired = planned(view(WEB, BATCH, OUTSIDE, actual=IDLE | outside))
    assert not [knob for _, knob in desired.settings if knob == "cpu.quota"]


@pytest.mark.parametrize(
    ("more", "law"),
    [
        ({"actual": {}}, BudgetLaw.AUTO),
        ({"actual": {("/kubepods/besteffort/podbatch", "cpu.idle"): 0}}, BudgetLaw.AUTO),
        ({"harm": None}, BudgetLaw.AUTO),
        ({"harm": replace(TOP, unknown_since=60.0)}, BudgetLaw.AUTO),
        ({}, BudgetLaw.QUOTA),
    ],
    ids=["not read", "not idle", "not measured", "unknown for long", "configured"],
)
def test_without_an_idle_class_or_a_signal_the_quota_law_decides_at_once(more: dict[str, Any], law: BudgetLaw) -> None:
    before = planned(view())
    pools = planned(view(cpu=cpu(online=1000), **more), before=before, law=law).plan.pools
    assert not in_force(pools)
    assert pools.budget_milli <= 8000 * 65 // 100 - 1000
    assert pools.quota_milli is not None


def test_one_pod_without_the_class_is_enough() -> None:
    pools = pools_of(view(WEB, BATCH, pod("other")))
    assert not in_force(pools)
    assert "ns/other" in pools.reasons["law"]


@pytest.mark.parametrize(("knob", "value"), [("cpu.idle", 1), ("cpu.qos", -1), ("cpu.identity", -1)])
def test_each_group_side_counts(knob: str, value: int) -> None:
    assert in_force(pools_of(view(actual={("/kubepods/besteffort/podbatch", knob): value})))


def test_threads_count_where_the_view_has_them() -> None:
    assert in_force(pools_of(view(actual={}, idle_threads=frozenset({BATCH.containers[0].group.path}))))


@pytest.mark.parametrize(
    ("weight", "idle", "counts"),
    [(2, True, True), (2, False, False), (None, True, False), (1024, True, False)],
    ids=["least weight", "no idle class configured", "not read", "raised by somebody"],
)
def test_from_linux_6_6_on_the_least_weight_that_was_read_counts_in_place_of_the_class(
    weight: int | None, idle: bool, counts: bool
) -> None:
    config = PoliciesConfig(idle_class=IdleClassConfig(enabled=idle), reclaimed=ReclaimedConfig())
    actual = {} if weight is None else {(DIRECTORY, "cpu.weight"): weight}
    scene = view(actual=actual, scheduler=scheduler_of("6.12.0"))
    assert in_force(plan(scene, None, config).plan.pools) is counts
    assert not in_force(plan(replace(scene, scheduler=scheduler_of("6.1.0")), None, config).plan.pools)
    beside = online("inside", qos=QosClass.BESTEFFORT)
    assert not in_force(plan(replace(scene, pods={**scene.pods, "inside": beside}), None, config).plan.pools)


def test_in_shadow_the_idle_class_changes_no_law() -> None:
    config = PoliciesConfig(idle_class=IdleClassConfig(enabled=True, dry_run=True))
    scene = view(actual={(DIRECTORY, "cpu.weight"): 2}, scheduler=scheduler_of("6.12.0"))
    assert not in_force(plan(scene, None, config).plan.pools)


def test_idle_threads_beside_online_pods_count_only_with_the_least_weight() -> None:
    batch = settled(OUTSIDE)
    threads = {"idle_threads": frozenset({batch.containers[0].group.path})}
    for weight, counts in ((1024, False), (None, False), (2, True)):
        actual = {} if weight is None else {(batch.group.path, "cpu.weight"): weight}
        assert in_force(pools_of(view(WEB, batch, actual=actual, **threads))) is counts


def test_idle_threads_beside_an_online_pod_in_besteffort_count_only_with_the_least_weight() -> None:
    inside = online("inside", qos=QosClass.BESTEFFORT)
    threads = {"idle_threads": frozenset({BATCH.containers[0].group.path})}
    for weight, counts in ((1024, False), (2, True)):
        actual = {(BATCH.group.path, "cpu.weight"): weight}
        assert in_force(pools_of(view(WEB, inside, BATCH, actual=actual, **threads))) is counts


def test_an_idle_pod_in_burstable_does_not_yield_to_a_guaranteed_pod_that_shares_its_cpus() -> None:
    """Measured: docs/cpu.md, "above". The directory between them has a weight of its own."""
    idle = {(settled(OUTSIDE).group.path, "cpu.idle"): 1}
    guaranteed = online("db", qos=QosClass.GUARANTEED)
    pools = pools_of(view(WEB, guaranteed, OUTSIDE, actual=idle))
    assert not in_force(pools)
    assert "ns/db" in pools.reasons["law"]
    assert in_force(pools_of(view(WEB, guaranteed, BATCH)))
    assert in_force(pools_of(view(WEB, guaranteed, OUTSIDE, actual=idle, kubelet=kubelet(exclusive={"db/main": "7"}))))


@pytest.mark.parametrize(
    ("actual", "effective"),
    [
        ({(DIRECTORY, "cpu.weight"): 1024}, False),
        ({(DIRECTORY, "cpu.weight"): 2}, True),
        ({(DIRECTORY, "cpu.weight"): 3, (DIRECTORY, "cpu.idle"): 1}, True),
    ],
)
def test_the_directory_of_be_pods_has_to_come_last_too(actual: dict[tuple[str, str], int], effective: bool) -> None:
    assert in_force(pools_of(view(actual=IDLE | actual))) is effective


@pytest.mark.parametrize(
    ("release", "effective"),
    [
        ("4.19.0-26-amd64", True),
        ("5.10.0-28-cloud-amd64", True),
        ("6.5.13", True),
        ("6.6.8", False),
        ("6.12.0", False),
        ("6.18.44-fc", False),
        ("7.0", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_threads_of_other_groups_yield_up_to_linux_6_5(release: str, effective: bool) -> None:
    assert scheduler_of(release).threads_yield is effective


def test_a_container_in_creation_or_its_first_seconds_changes_no_law() -> None:
    creating = pod("new", replace(container("new"), phase=Phase.CREATING))
    scene = view()
    assert in_force(pools_of(replace(scene, pods={**scene.pods, "new": creating})))
    assert in_force(pools_of(view(WEB, BATCH, pod("fresh", container("fresh")), arrived={"id-fresh": 99.0})))
    assert not in_force(pools_of(view(WEB, BATCH, pod("fresh", container("fresh")), arrived={"id-fresh": 97.0})))


def test_where_all_cpus_are_dedicated_the_quota_law_stays() -> None:
    exclusive = {f"g{number}/main": str(number) for number in range(8)}
    pools = pools_of(view(kubelet=kubelet(exclusive=exclusive)))
    assert not in_force(pools)
    assert pools.quota_milli


def test_on_reserved_cpus_the_harm_law_decides_where_online_pods_run_too() -> None:
    scene = view(topology=2, kubelet=kubelet(default="0", reserved="0", exclusive={"g/main": "1"}))
    top = pools_of(replace(scene, harm=HarmReading(ceiling_milli=1000)))
    assert (in_force(top), top.budget_milli, top.quota_milli, top.reclaimed) == (True, 1000, None, cpus("0"))
    assert "quota" not in top.reasons["reclaimed"]
    cut = pools_of(replace(scene, harm=replace(CUT, ceiling_milli=400)))
    assert (in_force(cut), cut.budget_milli, cut.quota_milli) == (True, 1000, None)
    cut = pools_of(replace(scene, harm=replace(CUT, ceiling_milli=400)), form=ReclaimedForm.QUOTA)
    assert (in_force(cut), cut.budget_milli) == (True, 400)
    assert cut.quota_milli == {DIRECTORY: 400}


def test_on_reserved_cpus_beside_the_system_alone_the_quota_law_stays() -> None:
    scene = view(kubelet=kubelet(default="0-1", reserved="0", exclusive={"g/main": "2-7"}))
    pools = pools_of(replace(scene, topology=replace(scene.topology, isolated=cpus("1"))))
    assert (pools.reclaimed, pools.shared) == (cpus("0"), cpus("1"))
    assert not in_force(pools)
    assert pools.quota_milli
    assert "quota" in pools.reasons["reclaimed"]


def test_the_idle_buffer_and_the_limit_do_not_apply_but_a_response_does() -> None:
    scene = view(cpu=cpu(online=7900))
    assert pools_of(scene).budget_milli == 8000
    held = pools_of(view(measures=Restrictions(budget_milli=500, budget_reason="test")))
    assert (held.budget_milli, held.quota_milli) == (500, {DIRECTORY: 500})
    least = pools_of(view(measures=Restrictions(budget_milli=0, budget_reason="test")))
    assert (least.budget_milli, least.quota_milli) == (160, {DIRECTORY: 160})


def test_a_response_on_a_node_where_nothing_can_be_cut_is_a_quota_too() -> None:
    scene = view(topology=2, kubelet=kubelet(default="0", reserved="0", exclusive={"g/main": "1"}))
    scene = replace(scene, harm=HarmReading(ceiling_milli=1000))
    held = pools_of(replace(scene, measures=Restrictions(budget_milli=300, budget_reason="test")))
    assert (held.budget_milli, held.quota_milli) == (300, {DIRECTORY: 300})


def test_an_arrival_is_kept_free_of_what_is_idle_now() -> None:
    scene = view(cpu=cpu(online=3000), arrived={WEB.containers[0].id: 98.0})
    desired = planned(scene)
    assert desired.plan.pools.budget_milli == 3000
    assert len(desired.plan.pools.reclaimed) == 3


def test_unknown_for_a_moment_keeps_the_budget_without_an_increase() -> None:
    pools = pools_of(view(harm=replace(CUT, unknown_since=99.0)))
    assert (in_force(pools), pools.budget_milli, pools.unknown_since) == (True, 3000, 99.0)


def test_never_below_the_floor() -> None:
    for form, least in ((ReclaimedForm.BOTH, 1000), (ReclaimedForm.CPUSET, 1000), (ReclaimedForm.QUOTA, 160)):
        pools = pools_of(view(harm=replace(CUT, ceiling_milli=0)), form=form)
        assert pools.harm is not None
        assert pools.budget_milli == pools.harm.floor_milli == least


def test_the_reason_names_the_pod_and_its_waiting_but_not_to_tenants() -> None:
    reasons = pools_of(view(harm=CUT)).reasons
    assert "ns/web waited 22.5 % for a CPU, 1 % without BE work" in reasons["law"]
    assert "web" not in reasons["budget"]
    host = pools_of(view(harm=replace(CUT, uid="host:db"))).reasons["law"]
    assert "host workload db waited 22.5 % for a CPU" in host


def test_a_new_pod_alone_is_not_believed_to_yield() -> None:
    """Its class may not be configured at all; beside a pod whose class was read back it is."""
    fresh = {"arrived": {"id-main": 99.5}, "actual": {}}
    assert not in_force(pools_of(view(WEB, BATCH, **fresh)))
    creating = replace(BATCH, containers=tuple(replace(box, phase=Phase.CREATING) for box in BATCH.containers))
    scene = node(settled(WEB), creating, actual={}, harm=TOP, now=100.0)
    assert not in_force(pools_of(scene))
    beside = node(settled(WEB), replace(creating, uid="new"), settled(BATCH), actual=IDLE, harm=TOP, now=100.0)
    assert in_force(pools_of(beside))
