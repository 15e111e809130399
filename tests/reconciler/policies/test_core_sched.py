"""Which pods have threads that may share a core."""

import msgspec
import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan_node
from reconciler.policies.core_sched import (
    GROUP_LABEL,
    NAME,
    POLICY_LABEL,
    CoreSchedConfig,
    core_group,
)
from reconciler.policies.table import PoliciesConfig
from state.cpu import CORE_COOKIE, CookieGroups
from state.model import ContainerKind, PodClass
from state.plan import CookiePlan
from state.topology import uniform
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, node, online, pod

ALL = tuple(CookieGroups)


@pytest.mark.parametrize(
    ("cls", "labels", "expected"),
    [
        pytest.param(PodClass.RECLAIMED, {}, ("reclaimed",) * 3, id="BE"),
        pytest.param(PodClass.SHARED, {}, (None, "online", "pod/p"), id="shared"),
        pytest.param(PodClass.DEDICATED, {}, (None, "online", "pod/p"), id="dedicated"),
        pytest.param(PodClass.SYSTEM, {}, (None,) * 3, id="system"),
        pytest.param(PodClass.SHARED, {POLICY_LABEL: "none"}, (None,) * 3, id="an online pod opts out"),
        pytest.param(PodClass.RECLAIMED, {POLICY_LABEL: "none"}, ("reclaimed",) * 3, id="a BE pod cannot"),
        pytest.param(PodClass.SHARED, {POLICY_LABEL: "exclusive"}, ("pod/p",) * 3, id="by itself"),
        pytest.param(PodClass.RECLAIMED, {POLICY_LABEL: "exclusive"}, ("pod/p",) * 3, id="a BE pod by itself"),
        pytest.param(PodClass.SYSTEM, {POLICY_LABEL: "exclusive"}, (None,) * 3, id="a system pod never"),
        pytest.param(PodClass.SHARED, {GROUP_LABEL: "g"}, ("online/g",) * 3, id="a group of its own"),
        pytest.param(PodClass.RECLAIMED, {GROUP_LABEL: "g"}, ("reclaimed/g",) * 3, id="never one with online pods"),
        pytest.param(PodClass.RECLAIMED, {GROUP_LABEL: ""}, ("reclaimed",) * 3, id="an empty group is none"),
    ],
)
def test_the_group_of_a_pod(
    cls: PodClass, labels: dict[str, str], expected: tuple[str | None, str | None, str | None]
) -> None:
    item = replace(pod("p", cls=cls), labels=labels)
    result = [core_group(item, groups) for groups in ALL]
    assert tuple(group.name if group else None for group in result) == expected


def test_a_label_that_means_nothing_is_told_and_does_no_harm() -> None:
    group = core_group(replace(pod("p"), labels={POLICY_LABEL: "Exclusive"}), CookieGroups.RECLAIMED)
    assert group is not None
    assert group.name == "reclaimed"
    assert group.reason == f"the pod is BE; {POLICY_LABEL}: 'Exclusive' is none of '', 'none', 'exclusive'"


def test_it_is_wanted_where_cores_have_two_threads_and_somebody_asks() -> None:
    on = PoliciesConfig(
        core_sched=varied(CoreSchedConfig(enabled=True, groups=CookieGroups.POD, dry_run=True), sweep_s=9)
    )
    smt, single = node(topology=uniform(cores=2, threads=2)), node(topology=2)
    plan = plan_node(smt, None, on)
    assert plan.cookies == CookiePlan(sweep_s=9, dry_run=True)
    assert plan.reasons[NAME] == "BE pods share cores only with BE pods, online pods with no other pod"
    plan = plan_node(single, None, on)
    assert plan.cookies is None
    assert "core scheduling has no effect" in plan.reasons[NAME]
    plan = plan_node(smt, None, PoliciesConfig())
    assert plan.cookies is None
    assert plan.reasons[NAME] == "off"


def test_the_plan_has_the_group_of_every_container_but_sandboxes() -> None:
    on = PoliciesConfig(core_sched=CoreSchedConfig(enabled=True))
    be = pod("b", container("main"), container("pause", kind=ContainerKind.SANDBOX))
    cookies = plan_node(node(be, online("web"), topology=uniform(cores=2, threads=2)), None, on).cookies
    assert cookies is not None
    assert {path: (member.group, member.setting.knob) for path, member in cookies.members.items()} == {
        be.containers[0].group.path: ("reclaimed", CORE_COOKIE)
    }


def test_core_scheduling_and_group_identity_are_not_for_one_node() -> None:
    text = b'{"core_sched": {"enabled": true}, "group_identity": {"enabled": true}}'
    with pytest.raises(msgspec.ValidationError, match=r"core_sched\.enabled and group_identity\.enabled are both true"):
        msgspec.json.decode(text, type=PoliciesConfig)
