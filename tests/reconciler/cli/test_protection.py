"""protect on a running agent: what doctor says of a level is what the plan does, and a reload applies another level."""

import json
from pathlib import Path

import pytest

from cgroupfs.naming import QosClass
from reconciler.cli.checks.offers import offers_of
from reconciler.config.docs import preset_in_force
from reconciler.config.load import Loaded, load, reload
from reconciler.config.presets import effects
from reconciler.control.planner import plan
from reconciler.daemon.agent import Agent
from reconciler.policies.yielding import scheduler_of
from state.model import Setting
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, LiveNode, group
from tests.reconciler.cli.conftest import inspected
from tests.reconciler.nodes import node, pod


def write(live: LiveNode, level: str, **more: object) -> str:
    """The agent's configuration with a level; the path of the file."""
    given = {
        "protect": level,
        "operator_file": None,
        "node": {"root": live.root},
        "kubelet": {"endpoint": "off"},
        "runtime": {"cri": "off"},
        "store": {"path": live.store},
        **more,
    }
    live.put("etc/bypassd/config.yaml", json.dumps(given))
    return f"{live.root}/etc/bypassd/config.yaml"


def settings_of(agent: Agent) -> list[Setting]:
    """What the last plan sets in control files, of the pods and the directories above them."""
    groups = [group for wanted in agent.control.reconciler.wanted.values() for group in wanted.values()]
    return [setting for group in groups for setting in group.values()]


def knobs_of(agent: Agent) -> set[str]:
    """The control files that the last plan sets."""
    return {setting.knob for setting in settings_of(agent)}


def lacks(live: LiveNode) -> set[str]:
    return {name for effect in effects(offers_of(inspected(live.root))) for name in effect.lacks}


@pytest.mark.parametrize("mode", ["v1", "v2"])
async def test_a_plan_of_full_sets_what_doctor_does_not_miss(tmp_path: Path, mode: Mode) -> None:
    live = LiveNode(tmp_path, mode)
    async with live.looked(load(write(live, "full")).config) as agent:
        view, _ = agent.control.current()
        assert inspected(live.root).knobs == view.knobs
        assert knobs_of(agent) <= view.knobs
        missed = lacks(live)
        assert ("idle class" in missed) is ("cpu.idle" not in knobs_of(agent))
        assert ("protected memory requests" in missed) is (mode == "v1")


@pytest.mark.parametrize(
    ("release", "groups", "used"),
    [("5.10.0-32-cloud-amd64", False, True), ("6.1.0-56-amd64", True, True), ("6.12.117", True, False)],
)
def test_doctor_and_explain_name_the_forms_of_the_idle_class_that_the_plan_has(
    tmp_path: Path, release: str, groups: bool, used: bool
) -> None:
    """By kernel as in the virtual machine: docs/cpu.md."""
    live = LiveNode(tmp_path)
    live.put("proc/sys/kernel/osrelease", f"{release}\n")
    for path in [] if groups else list(tmp_path.rglob("cpu.idle")):
        path.unlink()
    loaded = load(write(live, "full"))
    there = inspected(live.root)
    # In burstable: in besteffort the least weight takes the place of the class from 6.6 on.
    beside = pod("batch", qos=QosClass.BURSTABLE)
    view = node(beside, knobs=there.knobs, scheduler=scheduler_of(release))
    desired = plan(view, None, loaded.config.policies)
    assert (("/kubepods/burstable/podbatch", "cpu.idle") in desired.settings) is groups
    assert (desired.plan.idle_threads is not None) is used

    offers = offers_of(there)
    given = {name for effect in effects(offers) for name in effect.gives}
    assert ("idle class" in given, "idle class of threads" in given) == (groups, used)
    notes = {row.setting: note for row, note in preset_in_force(loaded, offers)}
    assert (notes["policies.idle_class.threads"] is None) is used


async def test_a_reload_sets_and_releases_what_another_level_has(tmp_path: Path) -> None:
    live = LiveNode(tmp_path)
    first = load(write(live, "cpu"))
    with live.agent(first.config) as agent:

        async def level(before: Loaded, name: str, **more: object) -> Loaded:
            write(live, name, **more)
            loaded, kept = reload(before)
            assert kept == ()
            agent.reconfigure(loaded.config)
            await live.look(agent)
            return loaded

        def idle() -> str:
            return live.kernel.read(f"{live.root}/sys/fs/cgroup/cpu{group(BATCH)}", "cpu.idle").strip()

        await live.look(agent)
        assert idle() == "1"
        now = await level(first, "cpu", policies={"idle_class": {"enabled": False}})
        assert idle() == "0"
        now = await level(now, "cpu")
        assert idle() == "1"
        now = await level(now, "observe")
        assert not agent.mode.enforce
        await level(now, "full", mode="observe")
        assert not agent.mode.enforce
        assert "cpu.idle" in knobs_of(agent)
        assert agent.control.reconciler.plan is not None
        assert agent.control.reconciler.plan.reasons.keys() >= {
            "memory_qos",
            "be_memory",
            "memory_reclaim",
            "cache",
            "network",
        }
