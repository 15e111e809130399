"""Limits of the runtime's record that the kernel's files do not have: a condition with both values, no write."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import QosClass
from reconciler.control.record_check import LIMITS_NAME
from reconciler.daemon.agent import Agent
from reconciler.daemon.podlist import PodProblems
from reconciler.pods.classify import classification_input
from reconciler.sources.bundles import InitProcess
from state.entry import LedgerEntry
from state.model import CpuPolicy, PodMeta, Resources, RuntimeSpec
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group

BOX = f"{group(WEB)}/{container_id(WEB)}"
MIB = 1 << 20


@pytest.fixture(params=["v1", "v2"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    mode: Mode = request.param
    return LiveNode(tmp_path, mode, files=False)


def recorded(agent: Agent, limits: Resources | None = None, **spec: Any) -> None:
    """The online container has these values in the runtime's record."""
    one = agent.control.inventory.pods[WEB]
    (box,) = one.containers
    agent.control.inventory.pods[WEB] = replace(
        one, containers=(replace(box, spec=RuntimeSpec(**({"cpus": "0-6"} | spec)), limits=limits or Resources()),)
    )


def put(live: LiveNode, *, memory: int | None = None, quota: int | None = None) -> None:
    v1 = live.kernel.mode == "v1"
    if memory is not None:
        live.write(BOX, "memory", "memory.limit_in_bytes" if v1 else "memory.max", str(memory))
    if quota is not None:
        text = str(quota) if v1 else f"{quota if quota > 0 else 'max'} 100000"
        live.write(BOX, "cpu", "cpu.cfs_quota_us" if v1 else "cpu.max", text)


async def looked(agent: Agent, times: int = 2) -> str:
    for _ in range(times):
        await agent.control.owner_check.limits.check(agent.control.inventory.pods, CpuPolicy.NONE)
    return next((status.detail for status in agent.statuses() if status.name == LIMITS_NAME), "")


async def test_a_limit_that_no_file_has_is_a_condition_with_both_values(live: LiveNode) -> None:
    async with live.looked() as agent:
        title = agent.control.inventory.pods[WEB].title
        recorded(agent, memory_bytes=256 * MIB, quota_us=50_000, period_us=100_000)
        put(live, memory=256 * MIB, quota=50_000)
        assert not await looked(agent)
        put(live, memory=512 * MIB, quota=-1)
        assert not await looked(agent, 1), "the kubelet may be at it"
        detail = await looked(agent, 1)
        assert f"{title}/main: the runtime's record has a CPU quota of 0.5, its file has no CPU quota" in detail
        assert "record has a memory limit of 256 MiB, its file has a memory limit of 512 MiB" in detail
        put(live, memory=256 * MIB, quota=50_000)
        assert not await looked(agent, 1)


async def test_a_limit_that_no_record_has_is_a_condition_where_the_pods_spec_is_known(live: LiveNode) -> None:
    async with live.looked() as agent:
        recorded(agent)
        put(live, memory=512 * MIB, quota=30_000)
        assert not await looked(agent), "a resize that only the spec shows may have added them"
        one = agent.control.inventory.pods[WEB]
        agent.control.inventory.pods[WEB] = replace(one, meta_source="kubelet")
        detail = await looked(agent)
        assert "the runtime's record has no CPU quota, its file has a CPU quota of 0.3" in detail
        assert "the runtime's record has no memory limit, its file has a memory limit of 512 MiB" in detail
        put(live, memory=-1 if live.kernel.mode == "v1" else 1 << 62, quota=-1)
        assert not await looked(agent, 1)


@pytest.mark.parametrize(
    ("quota", "differs"), [(12_345, False), (13_000, False), (14_000, True), (12_200, False), (12_199, True)]
)
async def test_a_quota_that_systemd_has_rounded_up_is_the_same(live: LiveNode, quota: int, differs: bool) -> None:
    async with live.looked() as agent:
        recorded(agent, quota_us=12_345, period_us=100_000)
        put(live, quota=quota)
        assert bool(await looked(agent)) == differs


@pytest.mark.parametrize(("recorded_bytes", "differs"), [(100, False), (4095, False), (4096, True), (-1, True)])
async def test_a_memory_limit_that_the_kernel_has_rounded_to_a_page_is_the_same(
    live: LiveNode, recorded_bytes: int, differs: bool
) -> None:
    """``recorded_bytes``: in the record above the limit in the file."""
    async with live.looked() as agent:
        recorded(agent, memory_bytes=256 * MIB + recorded_bytes)
        put(live, memory=256 * MIB)
        assert bool(await looked(agent)) == differs


async def test_what_the_kubelet_has_admitted_is_no_contradiction_of_an_older_record(live: LiveNode) -> None:
    async with live.looked() as agent:
        limits = Resources(memory_bytes=512 * MIB, cpu_milli=800)
        recorded(agent, limits, memory_bytes=256 * MIB, quota_us=50_000, period_us=100_000)
        put(live, memory=512 * MIB, quota=80_000)
        assert not await looked(agent)


async def test_files_of_bypassds_own_are_not_compared(live: LiveNode) -> None:
    async with live.looked() as agent:
        assert not await looked(agent)
        recorded(agent, memory_bytes=256 * MIB)
        put(live, memory=512 * MIB)
        assert await looked(agent)
        file = agent.writes.judge.control_files.find(BOX, "memory.max")
        assert file is not None
        controller, path, name = file.key
        entry = LedgerEntry(controller=controller, path=path, file=name, knob="memory.max", original=str(256 * MIB))
        agent.record.ledger.adopt([entry])
        assert not await looked(agent)


def placed(live: LiveNode, pid: int, start: int, **groups: str) -> None:
    """A process with its groups, by the text of the line's middle field (v2: empty)."""
    lines = [f"{number}:{'' if name == 'v2' else name}:{path}" for number, (name, path) in enumerate(groups.items())]
    live.put(f"proc/{pid}/cgroup", "\n".join(lines) + "\n")
    live.put(f"proc/{pid}/stat", f"{pid} (a) b) S 1 {'0 ' * 17}{start} 0 0\n")


async def test_a_process_that_left_its_containers_groups_is_a_condition(live: LiveNode) -> None:
    """No file of the group bounds it, while each reads as wanted."""
    v1 = live.kernel.mode == "v1"
    with live.agent() as agent:
        await live.look(agent)
        recorded(agent)
        agent.control.inventory._inits[container_id(WEB)] = InitProcess(4321, 77)
        inside = {"cpuset": BOX, "cpu,cpuacct": f"{BOX}/inner", "memory": BOX} if v1 else {"v2": BOX}
        placed(live, 4321, 77, pids="/", **inside)
        assert not await looked(agent)
        moved = inside | ({"cpu,cpuacct": "/"} if v1 else {"v2": "/system.slice"})
        placed(live, 4321, 77, pids="/", **moved)
        assert not await looked(agent, 1), "it may be at its start"
        where = "/ (cpu)" if v1 else "/system.slice (cpu, cpuset, memory)"
        detail = await looked(agent, 1)
        assert f"/main: its first process 4321 is in another group, which its settings do not bound: {where}" in detail
        assert PodProblems(agent).breaks(agent.control.inventory.pods[WEB]), "where it has settings it is failing"
        placed(live, 4321, 78, pids="/", **moved)
        assert not await looked(agent, 1), "another process has got the number of one that has exited"
        assert not PodProblems(agent).breaks(agent.control.inventory.pods[WEB])
        agent.control.inventory._inits[container_id(WEB)] = InitProcess(4321, 0)
        assert "in another group" in await looked(agent), "the record has no time of its start"
        placed(live, 4321, 77, pids="/", **inside)
        assert not await looked(agent)


@pytest.mark.parametrize("narrowed", ["/kubepods/burstable", group(WEB), BOX])
async def test_a_v1_set_that_a_cpu_left_before_the_start_is_reported(tmp_path: Path, narrowed: str) -> None:
    live = LiveNode(tmp_path, files=False)
    for path in (BOX, group(WEB), "/kubepods/burstable"):
        live.write(path, "cpuset", "cpuset.cpus", "0-2,4-7")
        if path == narrowed:
            break
    async with live.looked() as agent:
        recorded(agent, cpus=None)
        detail = await looked(agent)
        assert "its CPU set 0-2,4-7 lacks CPU 3 of the group above, which no record explains" in detail
        live.write(narrowed, "cpuset", "cpuset.cpus", "0-7")
        assert "lacks CPU 3 of" not in await looked(agent, 1) or narrowed != BOX


async def test_a_cpu_that_was_offline_before_the_start_is_missed_in_kubepods(tmp_path: Path) -> None:
    """The root alone has it again; every group below has the same CPUs as the one above it."""
    live = LiveNode(tmp_path, files=False)
    live.kernel.unplug(3)
    live.kernel.plug(3)
    async with live.looked() as agent:
        detail = await looked(agent)
        assert detail == ("/kubepods: its CPU set 0-2,4-7 lacks CPU 3 of the group above, which no record explains")
        check = agent.control.owner_check.limits
        for _ in range(2):
            await check.check(agent.control.inventory.pods, CpuPolicy.NONE, CpuSet.parse("3"))
        assert not await looked(agent, 0), "it is reserved: kept off the pods on purpose"


def test_a_list_that_has_another_qos_than_the_cgroup_is_a_problem_of_the_pod() -> None:
    meta = PodMeta(uid="u", source="kubelet", qos=QosClass.GUARANTEED)
    facts = classification_input("u", QosClass.BESTEFFORT, meta)
    assert facts.qos is QosClass.BESTEFFORT
    (problem,) = facts.meta.problems
    assert "BestEffort pod, kubelet has QoS Guaranteed" in problem
    assert not classification_input("u", QosClass.GUARANTEED, meta).meta.problems


async def test_what_another_program_has_written_is_named_within_the_kubelets_period(
    live: LiveNode, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    def named() -> bool:
        return any(status.name == LIMITS_NAME and not status.ok for status in agent.statuses())

    with live.agent() as agent:
        await live.look(agent)
        recorded(agent, memory_bytes=256 * MIB, quota_us=50_000, period_us=100_000)
        put(live, memory=256 * MIB, quota=50_000)
        await nursery.start(agent.control.owner_check.run)
        await trio.sleep(31)  # after the first check, long before the next
        put(live, quota=20_000)
        agent.control.writes.attribution.bounds_written += 1
        await trio.sleep(4)
        assert not named(), "the kubelet may be at it"
        await trio.sleep(7)
        assert named()
        put(live, quota=50_000)
        agent.control.writes.attribution.bounds_written += 1
        await trio.sleep(6)
        assert not named()


async def test_partitions_are_searched_once_for_all_containers_whose_cpus_one_has_taken(tmp_path: Path) -> None:
    live = LiveNode(tmp_path, "v2", files=False)
    boxes = [f"{group(uid)}/{container_id(uid)}" for uid in (WEB, BATCH)]
    async with live.looked() as agent:
        for box in boxes:
            live.write(box, "cpuset", "cpuset.cpus", "3")
        live.kernel.make_group("/dpdk.slice")
        live.write("/dpdk.slice", "cpuset", "cpuset.cpus", "3")
        live.write("/dpdk.slice", "cpuset", "cpuset.cpus.partition", "root")
        with patch.object(live.kernel, "read", wraps=live.kernel.read) as read:
            await looked(agent, 1)
        searched = [call for call in read.call_args_list if call.args[0].endswith("/dpdk.slice")]
        assert len([call for call in searched if call.args[1] == "cpuset.cpus.partition"]) == 1
        await looked(agent, 1)
        for uid in (WEB, BATCH):
            (text,) = agent.control.owner_check.limits.problems(uid)
            assert text.endswith(": /dpdk.slice is a CPU partition (root) and keeps other groups off CPU 3")
        live.write("/dpdk.slice", "cpuset", "cpuset.cpus.partition", "member")
        await looked(agent)
        assert not [text for uid in (WEB, BATCH) for text in agent.control.owner_check.limits.problems(uid)]
