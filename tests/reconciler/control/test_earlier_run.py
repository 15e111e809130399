"""Values of an earlier run without its state directory: recognized by what kubelet and runtime leave, and said."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
from msgspec.structs import replace

from reconciler.config.model import AgentMode, Config
from reconciler.control.earlier_run import NAME
from reconciler.daemon.agent import Agent
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm
from reconciler.policies.table import PoliciesConfig
from state.model import Hold
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, BOX, PINNED, WEB, LiveNode, container_id, group

BE: Final = "/kubepods/besteffort"


@pytest.fixture(params=["v1", "v2"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    mode: Mode = request.param
    made = LiveNode(tmp_path, mode, files=False)
    made.least_weight(group(BATCH))
    return made


def without_quota(live: LiveNode, mode: AgentMode = AgentMode.ENFORCE) -> Config:
    """As where BE work may have all idle CPU: no quota is wanted anywhere."""
    reclaimed = ReclaimedConfig(form=ReclaimedForm.CPUSET)
    return replace(live.config, mode=mode, policies=PoliciesConfig(reclaimed=reclaimed))


def limit(live: LiveNode, path: str, milli: int | None) -> None:
    if live.kernel.mode == "v1":
        live.write(path, "cpu", "cpu.cfs_quota_us", "-1" if milli is None else str(milli * 100))
    else:
        live.write(path, "cpu", "cpu.max", "max" if milli is None else f"{milli * 100} 100000")


def limited(live: LiveNode, path: str) -> bool:
    return live.quota(path) not in {"-1", "max"}


def without_record(live: LiveNode) -> Path:
    """The runtime's record of the BE container is not there (yet); where it is to be."""
    (Path(live.bundles) / container_id(BATCH) / "config.json").unlink()
    record = Path(live.runc_root) / container_id(BATCH) / "state.json"
    return record.rename(record.with_name("away")).with_name("state.json")


def waiting(agent: Agent) -> set[str]:
    return {path for path, _ in agent.control.reconciler.earlier_run.unexamined or ()}


def problem(agent: Agent) -> str:
    return next((status.detail for status in agent.statuses() if status.name == NAME), "")


async def test_a_budget_without_a_record_is_not_the_nodes_own(live: LiveNode) -> None:
    limit(live, BE, 100)
    limit(live, BOX, 50)
    async with live.looked(without_quota(live)) as agent:
        assert not limited(live, BE)
        assert not limited(live, BOX)
        assert agent.alerts.raised["earlier run"] == 1
        assert not problem(agent)
        # The writer now is another program: what it writes stays.
        limit(live, BE, 300)
        await live.look(agent)
        assert limited(live, BE)
        assert agent.alerts.raised["earlier run"] == 1


async def test_the_original_of_a_planned_value_is_the_kubelets_not_the_leftover(live: LiveNode) -> None:
    limit(live, BE, 70)
    async with live.looked() as agent:
        assert limited(live, BE)
        assert agent.alerts.raised["earlier run"] == 1
        assert all(result.ok for result in await agent.commands.restore())
        assert not limited(live, BE)


@pytest.mark.parametrize("why", ["observe", "hold"])
async def test_where_nothing_may_be_written_it_is_a_problem(live: LiveNode, why: str) -> None:
    limit(live, BE, 100)
    mode = AgentMode.OBSERVE if why == "observe" else AgentMode.ENFORCE
    with live.agent(without_quota(live, mode)) as agent:
        if why == "hold":
            agent.record.holds.all["node"] = Hold(target="node", reason="upgrade", by="ana")
            agent.record.holds.refresh()
        await live.look(agent)
        assert limited(live, BE)
        if why == "observe":
            assert f"{BE}/cpu." in problem(agent)
            assert "kubelet and runtime leave" in problem(agent)
            limit(live, BE, None)
            await live.look(agent)
            assert not problem(agent)


@pytest.mark.parametrize(("policy", "default"), [("none", ""), ("static", "0-6")])
async def test_a_narrower_cpu_set_than_recorded_is_a_left_one_where_the_kubelet_changes_none(
    live: LiveNode, policy: str, default: str
) -> None:
    live.kubelet.cpu_manager(policy, default, {PINNED: {"main": "7"}} if default else {})
    live.write(BOX, "cpuset", "cpuset.cpus", "2-3")
    async with live.looked(without_quota(live, AgentMode.OBSERVE)) as agent:
        assert ("cpuset.cpus" in problem(agent)) is (policy == "none")


@pytest.mark.parametrize("then", [AgentMode.OBSERVE, AgentMode.ENFORCE])
async def test_a_restart_in_between_makes_no_leftover_the_nodes_own(live: LiveNode, then: AgentMode) -> None:
    limit(live, BE, 100)
    async with live.looked(without_quota(live, AgentMode.OBSERVE)) as agent:
        await agent.keeper.flush()
    async with live.looked(without_quota(live, then)) as agent:
        await agent.keeper.flush()
        assert limited(live, BE) is (then is AgentMode.OBSERVE)
        assert bool(problem(agent)) is (then is AgentMode.OBSERVE)
    if then is AgentMode.ENFORCE:
        # Looked for to the end: from now on another program's.
        limit(live, BE, 100)
        async with live.looked(without_quota(live)) as agent:
            assert limited(live, BE)


async def test_a_pod_left_in_the_idle_class_gets_its_weight_back(live: LiveNode) -> None:
    file = "cpu.shares" if live.kernel.mode == "v1" else "cpu.weight"
    weight = live.read(group(BATCH), "cpu", file)
    live.write(group(BATCH), "cpu", "cpu.idle", "1")
    with live.agent(without_quota(live)) as agent:
        for _ in range(3):
            await live.look(agent)
        assert live.read(group(BATCH), "cpu", "cpu.idle").strip() == "0"
        status = agent.writes.judge.statuses.get((group(BATCH), "cpu.weight"))
        assert status is not None
        assert status.state.is_in_force()
        assert all(result.ok for result in await agent.commands.restore())
        assert live.read(group(BATCH), "cpu", "cpu.idle").strip() == "0"
        assert live.read(group(BATCH), "cpu", file) == weight


async def test_a_container_whose_record_comes_later_is_examined_then(live: LiveNode) -> None:
    limit(live, BOX, 50)
    record = without_record(live)
    async with live.looked(without_quota(live)) as agent:
        await agent.keeper.flush()
        assert limited(live, BOX)
        assert BOX in waiting(agent)
        record.with_name("away").rename(record)
        agent.control.inventory.refresh(container_id(BATCH))
        await live.look(agent)
        await live.look(agent)
        assert not limited(live, BOX)
        assert agent.alerts.raised["earlier run"] == 1
        assert BOX not in waiting(agent)


async def test_what_is_left_over_a_restart_is_what_was_not_examined(live: LiveNode) -> None:
    limit(live, BOX, 50)
    record = without_record(live)
    async with live.looked(without_quota(live)) as agent:
        await agent.keeper.flush()
        assert waiting(agent)
    record.with_name("away").rename(record)
    limit(live, BE, 300)
    async with live.looked(without_quota(live)) as agent:
        assert not limited(live, BOX)
        assert limited(live, BE), "examined by the run before: it is another program's"


async def test_what_is_never_known_is_given_up_after_a_while(live: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    without_record(live)
    async with live.looked(without_quota(live)) as agent:
        assert BOX in waiting(agent)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 601)
        monkeypatch.setattr("reconciler.control.earlier_run.time", later)
        await live.look(agent)
        assert not waiting(agent)
        limit(live, BE, 300)
        await live.look(agent)
        assert limited(live, BE), "another program's"


async def test_a_group_that_is_made_later_has_no_values_of_an_earlier_run(live: LiveNode) -> None:
    without_record(live)
    async with live.looked(without_quota(live)) as agent:
        assert agent.control.reconciler.earlier_run.is_open
        limit(live, BE, 300)
        await live.look(agent)
        assert limited(live, BE), "examined once, what another program writes then stays"
        assert not agent.alerts.raised["earlier run"]


async def test_the_bound_of_memory_and_swap_is_taken_over_too(live: LiveNode) -> None:
    v1 = live.kernel.mode == "v1"
    files = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if v1 else ("memory.max", "memory.swap.max")
    for file, bound in zip(files, (64 << 20, 64 << 20 if v1 else 0), strict=True):
        live.write(BOX, "memory", file, str(bound))
    with live.agent(without_quota(live)) as agent:
        for _ in range(2):
            await live.look(agent)
        texts = [live.read(BOX, "memory", file) for file in files]
    assert all(text == "max" or int(text) > 1 << 50 for text in texts), texts


async def test_a_whole_run_whose_state_directory_is_lost_leaves_nothing_behind(live: LiveNode) -> None:
    async with live.looked() as agent:
        assert limited(live, BE)
        await agent.keeper.flush()
    shutil.rmtree(os.path.dirname(live.store))
    os.makedirs(os.path.dirname(live.store))
    async with live.looked(without_quota(live)) as agent:
        assert not limited(live, BE)


async def test_a_new_node_has_nothing_to_take_over(live: LiveNode) -> None:
    async with live.looked(without_quota(live)) as agent:
        assert not agent.alerts.raised["earlier run"]
        assert not agent.record.ledger.group(BE)
        # An online pod's quota is not left over: its runtime's record may be older than the file.
        limit(live, f"{group(WEB)}/{container_id(WEB)}", 500)
        await live.look(agent)
        assert limited(live, f"{group(WEB)}/{container_id(WEB)}")


async def test_with_a_record_a_value_is_the_nodes_own(live: LiveNode) -> None:
    async with live.looked(without_quota(live)) as agent:
        await agent.keeper.flush()
    limit(live, BE, 100)
    async with live.looked(without_quota(live)) as agent:
        assert limited(live, BE)
        assert not agent.alerts.raised["earlier run"]
