"""Whether an evicted pod's replacement runs here again: by its controller, its tolerations, and the mark in place."""

import pytest
from msgspec.structs import replace

from reconciler.responses.eviction.config import LimitsConfig, NodeCpuConfig
from reconciler.responses.eviction.exemptions import ExemptionsConfig
from reconciler.responses.eviction.victims import Replacement, replacement_of
from state.closing import NodeClosing, NodeMark
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.plans import full, memory, only
from tests.reconciler.responses.eviction.world import Planner, World, be, reasons

PREFER = NodeClosing(closed_s=0.0, mark=NodeMark.PREFER_NO_SCHEDULE)
NO_SCHEDULE = NodeClosing(closed_s=0.0, mark=NodeMark.NO_SCHEDULE)


@pytest.mark.parametrize(
    ("owner", "tolerates", "closing", "expected"),
    [
        (None, (), NO_SCHEDULE, Replacement.NONE),
        ("DaemonSet/d", (), NO_SCHEDULE, Replacement.RETURNS),
        ("Node/n1", (), NO_SCHEDULE, Replacement.RETURNS),
        ("ReplicaSet/r", (), None, Replacement.MAY_RETURN),
        ("ReplicaSet/r", (), NodeClosing(), Replacement.MAY_RETURN),
        ("ReplicaSet/r", (), NodeClosing(closed_s=0.0), Replacement.MAY_RETURN),
        ("ReplicaSet/r", (), PREFER, Replacement.AVOIDS),
        ("ReplicaSet/r", ("PreferNoSchedule",), PREFER, Replacement.MAY_RETURN),
        ("ReplicaSet/r", ("PreferNoSchedule",), NO_SCHEDULE, Replacement.ELSEWHERE),
        ("Job/j", ("NoSchedule", "PreferNoSchedule"), NO_SCHEDULE, Replacement.MAY_RETURN),
        ("StatefulSet/s", (), NodeClosing(closed_s=0.0, mark=NodeMark.CONDITION), Replacement.MAY_RETURN),
    ],
)
def test_where_the_replacement_runs(
    owner: str | None, tolerates: tuple[str, ...], closing: NodeClosing | None, expected: Replacement
) -> None:
    assert replacement_of(be("a", owner=owner, tolerates=tolerates), closing) is expected


def test_a_pod_whose_replacement_is_started_here_again_is_the_last_of_its_tier() -> None:
    config = memory(spared=ExemptionsConfig(owner_kinds=()))
    world = full(be("a", owner="DaemonSet/d"), be("b"), used=75, a=20, b=12)
    (order,) = Planner(world, config).first().orders
    assert order.uid == "b"
    assert order.ranking[0].endswith("may return here")
    assert order.ranking[1].endswith("returns here")


def soft() -> tuple[World, Planner]:
    """A soft shortage: a pod that uses all CPU time."""
    world = World(be("a"))
    world.put(cpu__use=7900.0, cpu__idle=100.0)
    world.put("pod:a", cpu__use=4000.0)
    config = only("node_cpu", NodeCpuConfig(enabled=True), limits=varied(LimitsConfig(), quiet_s=0, closed_s=30))
    return world, Planner(world, config)


def test_a_soft_shortage_waits_for_the_effect_of_closing_the_node_first() -> None:
    world, planner = soft()
    world.closing = NodeClosing()
    assert planner.run(120) == []
    assert reasons(planner.decision)["node_cpu"] == (
        "closing: no new BE pods on this node first; its effect is awaited for 30 s"
    )
    world.closing = NodeClosing(closed_s=world.at)
    assert planner.run(29) == []
    assert planner.run(2) == ["a"]
    assert not any("closing" in line for line in planner.log)


@pytest.mark.parametrize("closing", [None, NodeClosing(closed_s=0.0)], ids=["it cannot be closed", "closed for long"])
def test_it_does_not_wait_for_what_is_over_or_will_not_be(closing: NodeClosing | None) -> None:
    world, planner = soft()
    world.closing = closing
    assert planner.run(60) == ["a"]


def test_a_hard_shortage_does_not_wait() -> None:
    world = full(be("a"), a=15)
    world.closing = NodeClosing()
    assert [order.uid for order in Planner(world, memory()).first().orders] == ["a"]


def test_a_dry_run_shows_what_would_be_ordered_once_the_node_is_closed() -> None:
    world, planner = soft()
    planner.config = replace(planner.config, dry_run=True)
    world.closing = NodeClosing()
    assert [order.uid for order in planner.first().would] == ["a"]
