"""Which groups' sockets are BE's, and what is wanted of the interfaces."""

import msgspec
import pytest

from reconciler.planner import plan
from reconciler.policies.network import InterfaceRule, NetworkConfig
from reconciler.policies.table import PoliciesConfig
from state.model import ContainerKind
from state.network import BE_CLASS, InterfaceWish, NetworkWish
from tests.reconciler.nodes import MAINLINE, V1, container, node, online, pod

ON = PoliciesConfig(network=NetworkConfig(enabled=True, interfaces=(InterfaceRule(name="eth0", link_mbit=100),)))
CLASSES = V1 | {"net_cls": 1}
VIEW = node(pod("a", container("main"), container("pause", kind=ContainerKind.SANDBOX)), online("b"), versions=CLASSES)


def test_a_be_pods_directory_and_containers_have_its_class_and_nobody_else() -> None:
    desired = plan(VIEW, None, ON)
    ours = {path: one.value for (path, knob), one in desired.settings.items() if knob == "net.classid"}
    assert ours == {"/kubepods/besteffort/poda": BE_CLASS, "/kubepods/besteffort/poda/id-main": BE_CLASS}
    assert [one for one in desired.refusals if one.setting.knob == "net.classid"] == []
    assert desired.pools.network == NetworkWish(interfaces=(InterfaceWish(name="eth0", link_mbit=100),))


@pytest.mark.parametrize(
    ("view", "config", "words"),
    [
        (VIEW, PoliciesConfig(), "off"),
        (VIEW, PoliciesConfig(network=NetworkConfig(enabled=True)), "no interface is named"),
        (node(pod("a")), ON, "no net_cls controller is mounted on this node"),
        (node(pod("a"), versions=CLASSES, knobs=MAINLINE - {"net.classid"}), ON, "this kernel has no net.classid"),
    ],
    ids=["off", "no interface", "not mounted", "not built"],
)
def test_nothing_is_wanted_where_it_cannot_work(view: object, config: PoliciesConfig, words: str) -> None:
    assert isinstance(view, type(VIEW))
    desired = plan(view, None, config)
    assert desired.pools.network is None
    assert words in desired.pools.reasons["network"]
    assert not [one for one in desired.settings.values() if one.policy == "network"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"interfaces":[{"name":"a"},{"name":"a"}]}', "interfaces has 'a' twice"),
        (
            '{"interfaces":[{"name":"a","floor_percent":50}]}',
            "floor_percent is 50; expected at most ceiling_percent, 40",
        ),
        ('{"interfaces":[{"name":"an-interface-of-17"}]}', "length <= 15"),
    ],
    ids=["twice", "reversed", "name"],
)
def test_a_wrong_section_says_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.json.decode(text, type=NetworkConfig)
