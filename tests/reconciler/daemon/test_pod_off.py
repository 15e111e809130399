"""``POST /off``: a pod freed for a time, beside a person's hold, with and without the BE budget, and back by itself."""

import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from cgroupfs.errors import InputError, StoreError
from reconciler.daemon.agent import Agent
from reconciler.daemon.podlist import pod_quota_milli
from reconciler.web.interface import HoldRequest, OffRequest, RestoreRequest
from state.model import Hold, PodClass
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group
from tests.fakes.report import status_report

POD = f"pod:{BATCH}"
OFF = f"off:{BATCH}"
MAIN = f"{group(BATCH)}/{container_id(BATCH)}"
ABOVE = "/kubepods/besteffort"


class OffScene:
    """The unit tests' node with its agent, after one pass."""

    def __init__(self, node: LiveNode, agent: Agent) -> None:
        self.node, self.agent = node, agent
        self.report = status_report(agent)

    def cpus(self) -> str:
        return self.node.kernel.read(self.agent.place.hierarchy.directory("cpuset", MAIN), "cpuset.cpus").strip()

    def quota(self, path: str) -> int:
        return int(self.node.kernel.read(self.agent.place.hierarchy.directory("cpu", path), "cpu.cfs_quota_us"))

    async def off(self, **fields: Any) -> Mapping[str, Any]:
        asked: dict[str, Any] = {"pod_uid": BATCH, "reason": "INC-42", "by": "ana", "seconds": 60.0} | fields
        return await self.report.off(OffRequest(**asked))

    async def reconcile(self) -> None:
        await self.agent.control.reconciler.reconcile(self.agent.hub.changed.take_nowait())

    async def end(self, target: str) -> None:
        """Let one hold run out."""
        hold = self.agent.record.holds.all[target]
        self.agent.record.holds.all[target] = replace(hold, ends_boot_s=0.0, until=time.time())
        self.agent.record.holds.expire()
        await self.reconcile()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[OffScene]:
    node = LiveNode(tmp_path, files=False)
    # All at one moment: the pools' sizes follow samples whose age is the machine's.
    with mock.patch.object(time, "monotonic", return_value=time.monotonic()):
        async with node.looked() as agent:
            yield OffScene(node, agent)


async def test_the_quota_of_a_pod_is_that_of_its_containers_where_bypassd_bounds_those(scene: OffScene) -> None:
    agent, pod = scene.agent, scene.agent.control.inventory.pods[BATCH]
    directory = agent.place.hierarchy.directory("cpu", MAIN)
    assert pod_quota_milli(agent, pod) is None
    scene.node.kernel.write(directory, "cpu.cfs_quota_us", "20000")
    # Of another program, and this container alone: the pod as a whole has no quota.
    before = agent.writes.judge.statuses.by_group.pop(MAIN, {})
    assert pod_quota_milli(agent, pod) is None
    status = next(iter(before.values()))
    agent.writes.judge.statuses.by_group[MAIN] = {**before, "cpu.quota": status}
    assert pod_quota_milli(agent, pod) == 200
    above = agent.place.hierarchy.directory("cpu", pod.group.path)
    scene.node.kernel.write(directory, "cpu.cfs_quota_us", "-1")
    scene.node.kernel.write(above, "cpu.cfs_quota_us", "50000")
    assert pod_quota_milli(agent, pod) == 500


async def test_a_freed_pod_has_its_values_back_and_is_managed_again_when_the_time_is_over(scene: OffScene) -> None:
    squeezed = scene.cpus()
    answer = await scene.off()
    assert answer["hold"]["target"] == OFF
    assert (answer["left"], answer["kept"]) == (0, None)
    assert scene.cpus() != squeezed
    await scene.reconcile()
    assert scene.cpus() != squeezed
    assert scene.quota(ABOVE) > 0  # the budget of all BE pods still bounds it
    await scene.end(OFF)
    assert scene.cpus() == squeezed
    assert not scene.agent.record.holds.all


async def test_a_persons_hold_stays_with_its_reason_and_end_and_is_shown(scene: OffScene) -> None:
    await scene.report.hold(HoldRequest(target=POD, reason="debugging", by="ben", seconds=600.0))
    before = scene.agent.record.holds.all[POD]
    squeezed = scene.cpus()
    answer = await scene.off()
    assert (answer["kept"]["target"], answer["kept"]["by"], answer["kept"]["reason"]) == (POD, "ben", "debugging")
    assert scene.agent.record.holds.all[POD] == before
    assert scene.cpus() != squeezed
    await scene.end(OFF)
    assert scene.cpus() != squeezed  # ben's hold is still there
    await scene.end(POD)
    assert scene.cpus() == squeezed


async def test_without_the_budget_no_quota_above_the_pod_is_left_and_it_comes_back(scene: OffScene) -> None:
    bounded = scene.quota(ABOVE)
    assert bounded > 0
    assert (await scene.off(budget=True))["hold"]["budget"]
    assert scene.quota(ABOVE) == -1
    assert scene.quota(MAIN) == -1
    assert scene.agent.control.inventory.pods[BATCH].pod_class is PodClass.SHARED
    await scene.end(OFF)
    assert scene.agent.control.inventory.pods[BATCH].pod_class is PodClass.RECLAIMED
    assert scene.quota(ABOVE) > 0


async def test_the_other_be_pods_stay_within_the_budget_while_one_is_outside_of_it(live: LiveNode) -> None:
    other = "dddddddd-4444-4444-8444-444444444444"
    live.kernel.make_group(f"{ABOVE}/pod{other}")
    live.kernel.make_group(f"{ABOVE}/pod{other}/{'d' * 64}")
    async with live.looked() as agent:
        scene = OffScene(live, agent)
        await scene.off(budget=True)
        pools = agent.control.reconciler.pools
        assert pools is not None
        assert pools.quota_milli is not None
        assert set(pools.quota_milli) == {other}
        assert pools.quota_milli[other] <= pools.budget_milli


async def test_an_online_pod_needs_no_budget_and_gets_no_other_class(scene: OffScene) -> None:
    answer = await scene.off(pod_uid=WEB, budget=True)
    assert not answer["hold"]["budget"]


async def test_a_second_off_takes_the_place_of_the_first(scene: OffScene) -> None:
    await scene.off(budget=True)
    answer = await scene.off(budget=True, reason="longer", seconds=7200.0)
    assert (answer["hold"]["reason"], answer["hold"]["budget"], answer["kept"]) == ("longer", True, None)
    assert [hold.target for hold in scene.agent.record.holds.all.values()] == [OFF]


async def test_a_freed_pod_stays_free_over_a_restart(live: LiveNode) -> None:
    async with live.looked() as agent:
        await OffScene(live, agent).off(budget=True)
        await agent.keeper.flush()
    async with live.looked() as agent:
        scene = OffScene(live, agent)
        assert agent.control.inventory.pods[BATCH].pod_class is PodClass.SHARED
        assert (scene.quota(ABOVE), scene.quota(MAIN)) == (-1, -1)


async def test_what_makes_no_sense_is_refused_before_anything_changes(scene: OffScene) -> None:
    for wrong in ({"pod_uid": "none"}, {"reason": " "}, {"seconds": None}, {"until_released": True}):
        with pytest.raises(InputError):
            await scene.off(**wrong)
    with pytest.raises(InputError):
        await scene.report.hold(HoldRequest(target=OFF, reason="x", by="ana", seconds=1.0))
    assert not scene.agent.record.holds.all


async def test_a_restore_on_a_full_disk_is_answered_with_what_was_restored(
    scene: OffScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error alone does not say whether the node has its original values."""

    def full(batch: object) -> None:
        raise StoreError("state.db: cannot write: database or disk is full")

    ours = scene.cpus()
    with monkeypatch.context() as patch:
        patch.setattr(scene.agent.record.store, "apply", full)
        answer: Any = await scene.report.restore(RestoreRequest(by="ana"))
    assert (answer["recorded"], answer["problem"]) == (False, "state.db: cannot write: database or disk is full")
    assert answer["restored"] == len(answer["files"]) > 0
    assert answer["left"] == 0
    assert scene.cpus() != ours
    again: Any = await scene.report.restore(RestoreRequest(by="ana"))
    assert (again["recorded"], again["problem"]) == (True, None)


async def test_restoring_a_freed_pod_adds_no_hold(scene: OffScene) -> None:
    await scene.off()
    await scene.agent.commands.restore(BATCH, by="ana")
    assert list(scene.agent.record.holds.all) == [OFF]
    assert isinstance(scene.agent.record.holds.all[OFF], Hold)
