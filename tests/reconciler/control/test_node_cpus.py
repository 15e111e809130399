"""A node whose kubepods directory has fewer CPUs than the machine: the others are none of the pods'."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.probe import cpus_in_effect
from reconciler.cli.main import parser
from reconciler.cli.nodeview import inspect_node
from reconciler.cli.offline import plan_node
from reconciler.cli.recorded import RecordedNode
from reconciler.control.planner import plan, plan_pools
from reconciler.daemon.agent import Agent
from reconciler.interference.nodesteps import NodeStep, NodeStepReader, NodeStepWriter, PlannerSettings
from reconciler.policies.reserve import ReserveConfig, spread
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.workqueue import NODE, DirtyBatch
from state.machine import parse
from state.model import Pools
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BOX, PINNED, QOS, LiveNode, container_id, group
from tests.reconciler.nodes import cpu, cpus, node, online, pod

TOP = "/kubepods"
SOME = "0-3,7"


@pytest.fixture(params=["v1", "v2"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    mode: Mode = request.param
    return LiveNode(tmp_path, mode, files=False)


def give(live: LiveNode, text: str, *, wider: bool = False) -> None:
    """As an administrator does: v2 takes it at the top, v1 needs every directory below to agree."""
    pods = [path for uid in QOS for path in (f"{group(uid)}/{container_id(uid)}", group(uid))]
    paths = [*pods, "/kubepods/burstable", "/kubepods/besteffort", TOP] if live.kernel.mode == "v1" else [TOP]
    for path in reversed(paths) if wider else paths:
        own = "7" if path.endswith(container_id(PINNED)) else text
        live.write(path, "cpuset", "cpuset.cpus", own)


def pools_of(agent: Agent) -> Pools:
    assert agent.control.reconciler.pools is not None
    return agent.control.reconciler.pools


async def test_cpus_outside_of_kubepods_are_in_no_pool_until_they_are_given_back(live: LiveNode) -> None:
    give(live, SOME)
    async with live.looked() as agent:
        pools = pools_of(agent)
        assert pools.online_cpus == cpus(SOME)
        assert pools.shared | pools.reclaimed | pools.reserved <= cpus(SOME)
        assert pools.reasons["cpus"] == "CPU 0-3,7 only: CPU 4-6 is outside of the CPU set of /kubepods"
        assert pools.budget_milli <= 4000
        assert cpus(live.read(BOX, "cpuset", "cpuset.cpus")) == pools.reclaimed
        assert not any(agent.control.reconciler.refusals.values())
        give(live, "0-7", wider=True)
        # The write is seen, or the next full pass reads it.
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset({NODE}), ()))
        assert pools_of(agent).online_cpus == cpus("0-7")
        assert "cpus" not in pools_of(agent).reasons


def test_a_plan_of_the_same_files_has_the_same_cpus(live: LiveNode) -> None:
    give(live, SOME)
    inspected = inspect_node(parser("plan").parse_args(["plan", "--root", live.root]))
    result = plan_node(inspected, RecordedNode(), files=live.kernel)
    assert result.desired.plan.pools.online_cpus == cpus(SOME)
    assert "CPU 4-6 is outside" in result.desired.plan.pools.reasons["cpus"]


def test_the_cpus_in_effect_are_read_from_one_file(live: LiveNode) -> None:
    hierarchy = Hierarchy.detect(live.root)
    give(live, SOME)
    assert cpus_in_effect(hierarchy, TOP, live.kernel) == cpus(SOME)
    assert cpus_in_effect(hierarchy, "/nowhere", live.kernel) == EMPTY
    if live.kernel.mode == "v2":
        give(live, "\n")
        assert cpus_in_effect(hierarchy, TOP, live.kernel) == cpus("0-7")


@pytest.mark.parametrize("read", ["", "12"], ids=["unreadable", "none of them online"])
def test_while_they_are_not_known_pods_may_have_all_cpus_and_that_is_reported(read: str) -> None:
    pools = plan_pools(node(pod("batch"), kubepods_cpus=cpus(read)), None, PoliciesConfig())
    assert pools.online_cpus == cpus("0-7")
    assert pools.reasons["cpus"] == "all online CPUs: those of /kubepods are not known"
    assert "cpus" not in plan_pools(node(pod("batch")), None, PoliciesConfig()).reasons


def test_with_one_usable_cpu_the_budget_is_of_one() -> None:
    """What runs on the other CPU is no reason to throttle BE work."""
    use = cpu(system=900, idle={0: 0.9, 1: 0.1})
    view = node(pod("batch"), online("web"), topology=2, kubepods_cpus=cpus("0"), cpu=use)
    desired = plan(view, None, PoliciesConfig())
    pools = desired.plan.pools
    assert (pools.reclaimed, pools.shared) == (cpus("0"), cpus("0"))
    assert 500 <= pools.budget_milli <= 650
    assert not desired.refusals


def test_reserved_cpus_are_chosen_among_them_and_named_if_they_are_elsewhere() -> None:
    machine = parse("2 nodes x 4 cores x 2 threads")
    assert spread(4, machine, cpus("4-15")) == cpus("4,8-9,12")
    view = node(pod("batch"), topology=machine, kubepods_cpus=cpus("4-15"))
    pools = plan_pools(view, None, PoliciesConfig(reserve=ReserveConfig(cpus="0,5")))
    assert (pools.reserved, pools.reasons["reserved"]) == (
        cpus("5"),
        "configured 0,5; CPU 0 is outside of /kubepods in any case",
    )


def test_a_recording_has_them() -> None:
    writer, reader = NodeStepWriter(), NodeStepReader()
    view = node(pod("batch"), kubepods_cpus=cpus("0-1"))
    for item in (view, replace(view, kubepods_cpus=EMPTY)):
        step = reader.step(writer.change(NodeStep(view=item, plan=None, settings=PlannerSettings())))
        assert step.view.kubepods_cpus == item.kubepods_cpus
        assert step.view.cpus == item.cpus
