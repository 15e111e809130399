"""Which groups' sockets have BE's class, and the limits of the interfaces."""

import msgspec
import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan
from reconciler.policies.network import InterfaceRule, NetworkConfig
from reconciler.policies.table import PoliciesConfig
from state.model import ContainerKind
from state.network import BE_CLASS, InterfaceRequest, NetworkRequest
from tests.reconciler.nodes import MAINLINE, V1, V2, container, node, online, pod

ON = PoliciesConfig(network=NetworkConfig(enabled=True, interfaces=(InterfaceRule(name="eth0", link_mbit=100),)))
CLASSES = V1 | {"net_cls": 1}
VIEW = node(pod("a", container("main"), container("pause", kind=ContainerKind.SANDBOX)), online("b"), versions=CLASSES)


def test_a_be_pods_directory_and_containers_have_its_class_and_nobody_else() -> None:
    desired = plan(VIEW, None, ON)
    ours = {path: setting.value for (path, knob), setting in desired.settings.items() if knob == "net.classid"}
    assert ours == {"/kubepods/besteffort/poda": BE_CLASS, "/kubepods/besteffort/poda/id-main": BE_CLASS}
    assert [refusal for refusal in desired.refusals if refusal.setting.knob == "net.classid"] == []
    assert desired.plan.network == NetworkRequest(
        interfaces=(InterfaceRequest(name="eth0", link_mbit=100),), pods_by="eth0"
    )


NO_PODS = PoliciesConfig(network=replace(ON.network, pods=False))


@pytest.mark.parametrize("versions", [V1, V2, CLASSES], ids=["v1 without net_cls", "v2", "v1"])
def test_pods_with_a_network_of_their_own_need_no_class_ids(versions: dict[str, int]) -> None:
    desired = plan(node(pod("a"), versions=versions), None, ON)
    wish = desired.plan.network
    assert wish is not None
    assert (wish.classes, wish.pods_by) == (versions is CLASSES, "eth0")
    assert bool([setting for setting in desired.settings.values() if setting.policy == "network"]) is wish.classes
    reported = (
        "except for pods in the host network: no net_cls controller is mounted" in desired.plan.reasons["network"]
    )
    assert reported is not wish.classes


def test_what_pods_receive_is_limited_on_request() -> None:
    desired = plan(VIEW, None, PoliciesConfig(network=replace(ON.network, receive=True)))
    assert desired.plan.network is not None
    assert desired.plan.network.receive
    assert "what BE pods receive by eth0 too" in desired.plan.reasons["network"]


def test_pods_leave_by_the_interface_that_is_said_or_else_the_first() -> None:
    two = (InterfaceRule(name="eth0"), InterfaceRule(name="eth1"))
    for by, text in ((None, "eth0"), ("eth1", "eth1")):
        config = PoliciesConfig(network=NetworkConfig(enabled=True, interfaces=two, pods_by=by))
        wish = plan(VIEW, None, config).plan.network
        assert wish is not None
        assert wish.pods_by == text
    wish = plan(VIEW, None, NO_PODS).plan.network
    assert wish is not None
    assert wish.pods_by == ""


@pytest.mark.parametrize(
    ("view", "config", "words"),
    [
        (VIEW, PoliciesConfig(), "off"),
        (VIEW, PoliciesConfig(network=NetworkConfig(enabled=True)), "no interface configured"),
        (node(pod("a")), NO_PODS, "no net_cls controller is mounted on this node"),
        (node(pod("a"), versions=CLASSES, knobs=MAINLINE - {"net.classid"}), NO_PODS, "this kernel has no net.classid"),
    ],
    ids=["off", "no interface", "not mounted", "not built"],
)
def test_nothing_is_wanted_where_it_cannot_work(view: object, config: PoliciesConfig, words: str) -> None:
    assert isinstance(view, type(VIEW))
    desired = plan(view, None, config)
    assert desired.plan.network is None
    assert words in desired.plan.reasons["network"]
    assert not [setting for setting in desired.settings.values() if setting.policy == "network"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"interfaces":[{"name":"a"},{"name":"a"}]}', "interfaces has 'a' twice"),
        (
            '{"interfaces":[{"name":"a","floor_percent":50}]}',
            "floor_percent is 50; expected at most ceiling_percent, 40",
        ),
        ('{"pods_by":"a"}', "pods_by is 'a'; expected one of the interfaces, null: interfaces is empty"),
        ('{"interfaces":[{"name":"a"}],"pods_by":"b"}', "pods_by is 'b'; expected one of the interfaces, a"),
        ('{"interfaces":[{"name":"an-interface-of-17"}]}', "length <= 15"),
        ('{"pods":false,"receive":true}', "receive is true; expected false where pods is false"),
    ],
    ids=["twice", "reversed", "no interface", "another", "name", "receive"],
)
def test_a_wrong_section_says_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.json.decode(text, type=NetworkConfig)
