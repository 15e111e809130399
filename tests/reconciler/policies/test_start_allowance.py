"""Even weights among BE pods, and the start allowance: which pods have it, for how long, and its bounds."""

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_node
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.idle_buffer import IdleSample
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.start_allowance import StartConfig, next_starts, without_allowance
from reconciler.policies.table import PoliciesConfig
from state.cpu import StartPlan
from state.model import NodeView, Phase, Pod, PodClass, Resources
from state.plan import Desired, NodePlan
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, node, online, pod

DIRECTORY = "/kubepods/besteffort"
CONFIG = StartConfig()
FLOOR = BudgetConfig(limit_percent=1)
AT_FLOOR = PoliciesConfig(reclaimed=ReclaimedConfig(budget=FLOOR))
FLOOR_US = 16_000
"""Two percent of eight CPUs."""


def starting(uid: str, *, qos: QosClass = QosClass.BESTEFFORT, phase: Phase = Phase.CREATING) -> Pod:
    """A BE pod whose container is in creation, or has been created."""
    return pod(uid, replace(container(uid), phase=phase), qos=qos)


def batch(uid: str, milli: int, *more: str) -> Pod:
    asks = Resources(batch_cpu_milli=milli)
    return pod(uid, container("main", requests=asks), *(container(name) for name in more))


def at(now: float, *pods: Pod) -> NodeView:
    return node(*pods, now=now)


def steps(views: Iterable[NodeView], config: StartConfig = CONFIG) -> list[StartPlan]:
    done, plans = StartPlan(), []
    for view in views:
        done = next_starts(view, done, config)
        plans.append(done)
    return plans


def weights(*pods: Pod, config: PoliciesConfig = AT_FLOOR) -> dict[str, object]:
    desired = plan(at(10.0, *pods), None, config)
    return {path: setting.value for (path, knob), setting in desired.settings.items() if knob == "cpu.weight"}


def quota_us(desired: Desired, path: str = DIRECTORY) -> int:
    value = desired.settings[path, "cpu.quota"].value
    assert isinstance(value, int)
    return value


# --- even weights --------------------------------------------------------------------------------------------------


def test_a_be_pod_without_a_request_weighs_as_one_that_requests_a_whole_cpu() -> None:
    found = weights(pod("plain"), batch("two", 2000), batch("half", 500))
    assert [found[f"{DIRECTORY}/pod{uid}"] for uid in ("plain", "two", "half")] == [1024, 2048, 512]


def test_beside_an_online_pod_and_outside_of_besteffort_a_be_pod_has_the_least_weight() -> None:
    found = weights(pod("plain"), online("web", qos=QosClass.BESTEFFORT))
    assert found[f"{DIRECTORY}/podplain"] == 2
    found = weights(pod("plain"), pod("labelled", qos=QosClass.BURSTABLE), online("web"))
    assert (found[f"{DIRECTORY}/podplain"], found["/kubepods/burstable/podlabelled"]) == (1024, 2)


def test_a_container_without_a_request_is_not_starved_by_one_that_has_one_in_its_pod() -> None:
    found = weights(batch("be", 1000, "side"), pod("plain", container("one"), container("two")))
    path = f"{DIRECTORY}/podbe"
    assert (found[f"{path}/id-main"], found[f"{path}/id-side"]) == (1024, 1024)
    # Even already: nothing to write but what the kubelet has.
    assert {found[f"{DIRECTORY}/podplain/id-{name}"] for name in ("one", "two")} == {2}


# --- who has the allowance, and for how long -----------------------------------------------------------------------


def test_from_the_first_directory_until_the_exec_be_work_has_a_whole_cpu_and_the_pod_goes_first() -> None:
    made = plan(at(100.0, starting("new"), batch("burner", 4000)), None, AT_FLOOR)
    assert quota_us(made) == 100_000
    assert made.settings[f"{DIRECTORY}/podnew", "cpu.weight"].value == 262_144
    assert made.settings[f"{DIRECTORY}/podburner", "cpu.weight"].value == 4096
    done = starting("new", phase=Phase.SETTLED)
    signalled = plan(at(100.03, done), made.plan, AT_FLOOR)
    assert quota_us(signalled) == 100_000, "the program is executed now"
    assert signalled.plan.starts.due == pytest.approx(100.13)
    after = plan(at(100.13, done), signalled.plan, AT_FLOOR)
    assert quota_us(after) == FLOOR_US
    assert after.settings[f"{DIRECTORY}/podnew", "cpu.weight"].value == 1024
    assert (after.plan.starts.executed, after.plan.starts.due) == ({}, None)


def test_a_starting_batch_pod_goes_first_too() -> None:
    asks = replace(container("main", requests=Resources(batch_cpu_milli=100)), phase=Phase.CREATING)
    assert weights(pod("small", asks), batch("burner", 4000))[f"{DIRECTORY}/podsmall"] == 262_144


def test_a_budget_that_is_larger_than_the_allowance_stays_as_it_is() -> None:
    desired = plan(at(5.0, starting("new")), None, PoliciesConfig())
    assert quota_us(desired) == 512_000


def test_the_budget_and_its_division_are_the_same_with_and_without_an_allowance() -> None:
    others = (pod("outside", qos=QosClass.BURSTABLE), pod("be"))
    with_one = plan_node(at(9.0, starting("new"), *others), None, AT_FLOOR).pools
    settled = plan_node(at(9.0, starting("new", phase=Phase.SETTLED), *others), None, AT_FLOOR).pools
    assert with_one == settled


@pytest.mark.parametrize("beside", [None, QosClass.BESTEFFORT], ids=["outside of besteffort", "beside an online pod"])
def test_where_quotas_are_per_container_only_the_starting_pod_has_more_and_no_weight(beside: QosClass | None) -> None:
    new = starting("new", qos=QosClass.BURSTABLE if beside is None else QosClass.BESTEFFORT)
    other = pod("other", qos=new.qos)
    online_pods = [online("web", qos=beside)] if beside is not None else []
    view = at(3.0, new, other, *online_pods)
    desired = plan(view, None, AT_FLOOR)
    values = {item.uid: quota_us(desired, item.containers[0].group.path) for item in (new, other)}
    assert values["new"] == 100_000
    assert values["other"] < FLOOR_US
    assert desired.settings[new.group.path, "cpu.weight"].value == 2
    if beside is None:
        assert quota_us(desired) < FLOOR_US, "nothing starts in it"


def test_a_pod_that_ends_has_it_at_the_request_and_at_the_end_of_its_grace_period() -> None:
    ending = replace(pod("old"), deleting=True, grace_s=30.0)
    plans = steps(at(now, ending) for now in (100.0, 100.5, 101.0, 129.9, 130.0, 130.9, 131.0))
    assert [bool(done.pods) for done in plans] == [True, True, False, False, True, True, False]
    assert [done.due for done in plans][::3] == [101.0, 130.0, None]


def test_online_pods_and_containers_that_were_there_before_have_none() -> None:
    new = replace(container("web"), phase=Phase.CREATING)
    assert steps([at(1.0, pod("web", new, cls=PodClass.SHARED), pod("be"))])[0].pods == frozenset()


# --- what bounds it ------------------------------------------------------------------------------------------------


def test_a_container_that_hangs_in_its_creation_has_it_for_some_seconds_once() -> None:
    plans = steps(at(50.0 + second, starting("hangs")) for second in range(120))
    assert sum(bool(done.pods) for done in plans) == CONFIG.seconds
    assert plans[-1].created == {"id-hangs": 50.0}


@pytest.mark.parametrize("pace_s", [0.1, 0.35, 1.0])
def test_starts_without_end_have_it_for_a_small_share_of_the_time(pace_s: float) -> None:
    """A crash loop, or a controller that makes pods for ever: a new container at each step."""
    hours, count, lifted, done = 0.25, 0, 0.0, StartPlan()
    while count * pace_s < hours * 3600:
        before = done
        done = next_starts(at(count * pace_s, starting(f"pod-{count}")), done, CONFIG)
        lifted += pace_s * bool(before.pods)
        count += 1
    bound = CONFIG.burst_s + CONFIG.share_percent / 100 * hours * 3600
    assert bound / 2 < lifted <= bound + pace_s


def test_a_thousand_pods_at_once_have_one_allowance() -> None:
    many = plan(at(1.0, *(starting(f"pod-{number}") for number in range(1000))), None, AT_FLOOR)
    assert quota_us(many) == 100_000


def test_without_tokens_a_start_has_its_even_weight_and_the_budget() -> None:
    empty = NodePlan(pools=plan_node(at(0.0), None, AT_FLOOR).pools, starts=StartPlan(spent_s=CONFIG.burst_s, at=100.0))
    desired = plan(at(100.0, starting("new")), empty, AT_FLOOR)
    assert quota_us(desired) == FLOOR_US
    assert desired.settings[f"{DIRECTORY}/podnew", "cpu.weight"].value == 1024
    later = next_starts(at(111.0, starting("next")), desired.plan.starts, CONFIG)
    assert later.pods == {"next"}, "a tenth of the time has come back"


@pytest.mark.parametrize("off", [replace(CONFIG, cpu_milli=0), varied(CONFIG, burst_s=0.0)])
def test_it_can_be_switched_off(off: StartConfig) -> None:
    assert [done.pods for done in steps((at(now, starting("new")) for now in (1.0, 2.0)), off)] == [frozenset()] * 2


def test_a_plan_without_starts_does_not_differ_from_the_one_before() -> None:
    start, *rest = steps(at(now, pod("be")) for now in (1.0, 2.0, 500.0))
    assert rest == [start, start]


def test_a_clock_that_starts_again_gives_no_tokens_and_ends_no_start_early() -> None:
    before = StartPlan(pods=frozenset({"new"}), created={"id-new": 9000.0}, spent_s=4.0, at=9000.0)
    done = next_starts(at(5.0, starting("new")), before, CONFIG)
    assert (done.created, done.spent_s) == ({"id-new": 5.0}, 4.0)


# --- no fight with the idle buffer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "used", "seen"),
    [(0, 1000, (900, 100)), (500, 90, (500, 90)), (None, 1000, (None, 1000)), (3900, 1000, (4000, 100))],
)
def test_what_be_work_used_above_its_budget_is_no_need_of_online_pods(
    idle: int | None, used: int, seen: tuple[int | None, int]
) -> None:
    sample = IdleSample(top_milli=4000, idle_milli=idle, reclaimed_milli=used)
    changed = without_allowance(sample, 100)
    assert (changed.idle_milli, changed.reclaimed_milli) == seen


# --- the runtime's commands ----------------------------------------------------------------------------------------


def commanded(now: float, at: float, *pods: Pod) -> NodeView:
    return node(*pods, now=now, commands={"id-main": at})


def test_a_command_of_the_runtime_has_it_for_a_moment() -> None:
    views = [commanded(now, 10.0, pod("be")) for now in (10.0, 10.2, 10.3)]
    assert [bool(done.pods) for done in steps(views)] == [True, True, False]


def test_commands_leave_half_of_the_bucket_to_starts() -> None:
    """A probe ten times a second, for ever, and then a container that starts."""
    done, lifted = StartPlan(), 0.0
    view = commanded(0.0, 0.0, pod("be"))
    for step in range(9_000):
        lifted += 0.1 * bool(done.pods)
        now = step / 10
        done = next_starts(replace(view, now=now, commands=dict.fromkeys(view.commands, now)), done, CONFIG)
    assert lifted <= CONFIG.burst_s / 2 + 0.1 * 900 + 1.0
    assert done.spent_s <= CONFIG.burst_s / 2 + 0.2
    new = next_starts(commanded(900.0, 900.0, pod("be"), starting("new")), done, CONFIG)
    assert "new" in new.pods
