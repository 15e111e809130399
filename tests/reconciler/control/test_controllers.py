"""cgroup v2: a controller that systemd took out of a directory is named, put back where that is safe, and reported."""

import errno
from pathlib import Path
from unittest.mock import patch

import pytest
from trio.testing import MockClock

from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.naming import Driver, Layout
from reconciler.alerts.agent_alerts import SourceHealth, source_states
from reconciler.cli.checks import CheckResult, CheckState
from reconciler.cli.doctor import examine
from reconciler.cli.main import parser
from reconciler.cli.nodeview import inspect_node
from reconciler.config.model import AgentMode
from reconciler.control.controllers import NAME, ControllerCheck
from reconciler.daemon.agent import Agent
from state.model import SourceStatus
from tests.fakes.livenode import BATCH, BOX, QOS, LiveNode, group

TOP = "/kubepods"
QOS_DIRECTORIES = ("/kubepods/burstable", "/kubepods/besteffort")


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    return LiveNode(tmp_path, "v2")


def control(live: LiveNode, path: str) -> str:
    return live.read(path, "cpuset", "cgroup.subtree_control")


def take_out(live: LiveNode, *paths: str, name: str = "cpuset") -> None:
    """From the bottom up, as the kernel requires."""
    for path in paths:
        live.write(path, "cpuset", "cgroup.subtree_control", f"-{name}")


def everywhere(live: LiveNode) -> None:
    take_out(live, *(group(uid) for uid in QOS), *QOS_DIRECTORIES, TOP)


def condition(agent: Agent) -> SourceStatus:
    return next(status for status in agent.watched() if status.name == NAME)


def cpus(live: LiveNode) -> str:
    return live.read(BOX, "cpuset", "cpuset.cpus").strip()


@pytest.mark.parametrize("where", ["pod", "kubepods"])
async def test_a_controller_is_put_back_from_the_top_and_the_settings_follow(live: LiveNode, where: str) -> None:
    async with live.looked() as agent:
        wanted = cpus(live)
        assert wanted not in {"", "0-7"}
        take_out(live, group(BATCH)) if where == "pod" else everywhere(live)
        with pytest.raises(FileNotFoundError):
            cpus(live)
        await live.look(agent)
        assert "cpuset" in control(live, group(BATCH))
        assert agent.alerts.raised["controllers"] == 1
        assert condition(agent).ok
        await live.look(agent)
        assert cpus(live) == wanted


@pytest.mark.parametrize("name", ["cpu", "memory"])
async def test_it_is_the_same_with_the_other_controllers(live: LiveNode, name: str) -> None:
    async with live.looked() as agent:
        take_out(live, group(BATCH), name=name)
        await live.look(agent)
        assert name in control(live, group(BATCH))


async def test_a_setting_names_the_directory_and_where_nothing_may_be_written_it_is_an_alert(live: LiveNode) -> None:
    async with live.looked() as agent:
        agent.mode.set_enforce(enforce=False)
        everywhere(live)
        await live.look(agent)
        status = agent.writes.judge.statuses.get((BOX, "cpu.set"))
        assert status is not None
        assert status.detail.startswith("cpuset is not in cgroup.subtree_control of /kubepods, so this group has no")
        found = condition(agent)
        assert not found.ok
        assert "cpuset is not in cgroup.subtree_control of /kubepods: nothing may be written now" in found.detail
        health = SourceHealth(60)
        assert not health.check(source_states([found]), 0.0, 0.0)
        assert len(health.check(source_states([found]), 60.0, 0.0)) == 1


async def test_a_directory_above_kubepods_is_reported_only(live: LiveNode) -> None:
    async with live.looked() as agent:
        everywhere(live)
        take_out(live, "/")
        await live.look(agent)
        assert "cpuset" not in control(live, "/")
        assert "of /: not bypassd's to change" in condition(agent).detail
        assert not agent.alerts.raised["controllers"]


async def test_what_is_taken_out_again_and_again_is_left_and_reported(live: LiveNode, mock_clock: MockClock) -> None:
    async with live.looked() as agent:
        for _ in range(3):
            take_out(live, group(BATCH))
            await live.look(agent)
            assert "cpuset" in control(live, group(BATCH))
        take_out(live, group(BATCH))
        await live.look(agent)
        assert "cpuset" not in control(live, group(BATCH))
        assert "taken out again 3 times within an hour" in condition(agent).detail
        mock_clock.jump(3600)
        await live.look(agent)
        assert "cpuset" in control(live, group(BATCH))


async def test_what_the_kernel_refuses_to_put_back_is_reported_as_that_however_often(live: LiveNode) -> None:
    async with live.looked() as agent:
        take_out(live, group(BATCH))
        refusing = live.failing("write", group(BATCH), "cpuset", "cgroup.subtree_control", errno.EBUSY)
        with patch.object(live.kernel, "write", refusing):
            for _ in range(5):
                await live.look(agent)
                assert condition(agent).detail.startswith(
                    f"cpuset is not in cgroup.subtree_control of {group(BATCH)}: cannot put it back: EBUSY"
                )
        await live.look(agent)
        assert condition(agent).ok


def test_doctor_names_the_directory(live: LiveNode) -> None:
    def checked() -> CheckResult:
        node = inspect_node(parser("doctor").parse_args(["doctor", "--root", live.root]))
        return next(result for result in examine(node) if result.name == "kubepods")

    assert checked().state is CheckState.OK
    everywhere(live)
    found = checked()
    assert found.state is CheckState.WARN
    assert "cpuset is not in cgroup.subtree_control of /kubepods" in found.found


async def test_a_cpuset_without_its_prefix_is_reported(tmp_path: Path) -> None:
    mount = Mount(directory=str(tmp_path), version=1, controllers=("cpuset",))
    hierarchy = Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"cpuset": mount})
    check = ControllerCheck(hierarchy, Layout(Driver.CGROUPFS), may_write=lambda: True, alert=lambda _: None)
    (tmp_path / "cpuset.cpus").write_text("0-7")
    await check.check({})
    assert check.status().ok
    (tmp_path / "cpuset.cpus").rename(tmp_path / "cpus")
    await check.check({})
    assert "mounted with noprefix" in check.status().detail


async def test_v1_has_no_such_thing(tmp_path: Path) -> None:
    live = LiveNode(tmp_path, files=False)
    with live.agent() as agent:
        assert agent.config.mode is AgentMode.ENFORCE
        await live.look(agent)
        assert condition(agent).ok
