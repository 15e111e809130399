"""The due steps for BE pods' veth devices, case by case."""

from collections.abc import Mapping

import pytest

from reconciler.actuators.network.actuator import Redirect
from reconciler.actuators.network.netlink import Link
from reconciler.actuators.network.pod_ceiling import ObservedLinks, PodLinks, decide
from reconciler.actuators.network.tc_pods import IfbState, VethFilters
from state.model import Hold
from state.setting_state import SettingState
from tests.reconciler.nodes import pod

CABLE = Link(index=7, name="veth7", kind="veth")
LED = Redirect(index=7, pod_uid="a", owns_qdisc=True)
OURS = VethFilters(kind="clsact", redirects_to=3)
THERE = {"veth7": LED}
UP = IfbState(index=3, complete=True)
HELD = {"pod:a": Hold(target="pod:a", reason="mine", by="me")}


def steps(
    place: PodLinks | None,
    entry: VethFilters = OURS,
    cables: Mapping[str, Redirect] = THERE,
    gather: IfbState | None = UP,
    holds: Mapping[str, Hold] | None = None,
    silent: frozenset[int] = frozenset(),
    *,
    there: bool = True,
    classes: bool = True,
) -> tuple[dict[str, Redirect], dict[str, Redirect], set[str], tuple[SettingState | None, str] | None]:
    """Led, let go, forgotten; and the pod's state. ``place`` None: it is no BE pod any more."""
    seen = ObservedLinks(
        pods={"a": place} if place is not None else {},
        filters={7: entry},
        present=frozenset(cables if there else ()),
        ifb=gather,
    )
    link_steps = decide({"a": pod("a")}, seen, cables, holds or {}, silent=silent, classes=classes)
    return (
        dict(link_steps.redirect),
        dict(link_steps.release),
        set(link_steps.forget),
        link_steps.states.get("a"),
    )


AT = PodLinks(veths=(CABLE,))


@pytest.mark.parametrize(
    ("entry", "cables", "made"),
    [
        (VethFilters(), {}, True),
        (VethFilters(kind="clsact"), {}, False),
        (VethFilters(kind="clsact", redirects_to=0), {}, True),
        (VethFilters(kind="clsact"), THERE, True),
        (VethFilters(kind="clsact"), {"veth7": Redirect(index=7, pod_uid="a", owns_qdisc=False)}, False),
        (VethFilters(kind="clsact", redirects_to=0), THERE, True),
        (VethFilters(kind="clsact", redirects_to=99), THERE, True),
        (VethFilters(), {"veth7": Redirect(index=7, pod_uid="a", owns_qdisc=False)}, True),
        (VethFilters(), {"veth7": Redirect(index=5, pod_uid="b", owns_qdisc=False)}, True),
        (OURS, {"veth7": Redirect(index=7, pod_uid="b", owns_qdisc=True)}, True),
    ],
    ids=[
        *("nothing there", "somebody's discipline", "a lost store", "killed before the filter", "the same, not ours"),
        *("our device is gone", "another device", "all removed", "another cable of the name", "another pod's before"),
    ],
)
def test_what_is_not_led_yet_is_led(entry: VethFilters, cables: Mapping[str, Redirect], made: bool) -> None:
    lead, let_go, forget, state_of_pod = steps(AT, entry, cables)
    assert lead == {"veth7": Redirect(index=7, pod_uid="a", owns_qdisc=made)}
    assert (let_go, forget, state_of_pod) == ({}, set(), (None, "veth7"))


@pytest.mark.parametrize("gather", [None, IfbState(index=3)], ids=["gone", "half made"])
def test_without_our_device_whole_everything_is_led_anew(gather: IfbState | None) -> None:
    assert steps(AT, gather=gather)[0] == THERE


def test_what_is_right_stays_as_it_is() -> None:
    assert steps(AT) == ({}, {}, set(), ("in place", "veth7"))


@pytest.mark.parametrize(
    ("place", "entry", "state"),
    [
        (
            AT,
            VethFilters(kind="clsact", redirects_to=3, foreign="a filter (bpf, pref 1)"),
            "veth7: a filter (bpf, pref 1)",
        ),
        (AT, VethFilters(kind="clsact", foreign="a filter (bpf, pref 1)"), "veth7: a filter (bpf, pref 1)"),
        (PodLinks(problem="its namespace is that of ns/b, too"), OURS, "its namespace is that of ns/b, too"),
        (PodLinks(), OURS, "no veth pair"),
    ],
    ids=["another's filter came", "another's filter is there", "an online pod's namespace", "no veth pair"],
)
def test_where_somebody_else_is_concerned_ours_goes(place: PodLinks, entry: VethFilters, state: str) -> None:
    lead, let_go, forget, state_of_pod = steps(place, entry)
    assert (lead, let_go, forget) == ({}, THERE, set())
    assert state_of_pod is not None
    assert state_of_pod[0] == "blocked"
    assert state in state_of_pod[1]


def test_one_cable_that_is_somebodys_does_not_free_the_other() -> None:
    two = PodLinks(veths=(CABLE, Link(index=8, name="net1", kind="veth")))
    seen = ObservedLinks(
        pods={"a": two},
        filters={7: VethFilters(), 8: VethFilters(kind="clsact", foreign="a filter (bpf, pref 1)")},
        present=frozenset(),
        ifb=UP,
    )
    link_steps = decide({"a": pod("a")}, seen, {}, {}, silent=frozenset(), classes=True)
    assert set(link_steps.redirect) == {"veth7"}
    assert link_steps.states["a"] == ("blocked", "net1: a filter (bpf, pref 1)")


def test_a_pod_that_is_no_be_pod_any_more_is_let_go_and_one_whose_device_is_gone_forgotten() -> None:
    assert steps(None) == ({}, THERE, set(), None)
    assert steps(None, there=False) == ({}, {}, {"veth7"}, None)
    assert steps(AT, VethFilters(), there=False)[::2] == ({"veth7": LED}, set())


@pytest.mark.parametrize(
    "place", [AT, PodLinks(pending=True), PodLinks(problem="shared")], ids=["be", "waits", "shared"]
)
def test_a_held_pod_is_left_as_it_is(place: PodLinks) -> None:
    assert steps(place, VethFilters(), holds=HELD) == ({}, {}, set(), ("held", "mine (by me)"))
    assert steps(None, holds=HELD) == ({}, {}, set(), None)


def test_a_pod_without_a_process_yet_keeps_what_it_has() -> None:
    assert steps(PodLinks(pending=True)) == ({}, {}, set(), ("waiting", "no process yet"))


def test_a_pod_in_the_hosts_network_is_held_by_its_class_or_said_not_to_be() -> None:
    assert steps(PodLinks(host=True), cables={}) == ({}, {}, set(), None)
    assert steps(PodLinks(host=True), cables={}, classes=False)[3] == (
        "blocked",
        "in the host network, where only net_cls identifies its packets",
    )


def test_packets_that_take_another_way_are_told() -> None:
    lead, let_go, _, state_of_pod = steps(AT, silent=frozenset({7}))
    assert (lead, let_go) == ({}, {})
    assert state_of_pod is not None
    assert state_of_pod[0] == "blocked"
    assert "XDP" in state_of_pod[1]
