"""CPUs go offline and online under the real agent, on the strict fake kernel's v1 and v2."""

import time
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from cgroupfs.files import REAL
from reconciler.config.model import AgentMode
from reconciler.daemon.agent import Agent
from reconciler.sources.hotplug import CpuChange
from state.model import Hold
from state.topology_sysfs import read_topology
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.livenode import BATCH, PINNED, WEB, LiveNode, container_id, group

TOP = "/kubepods"
BE = "/kubepods/besteffort"


class Node:
    """A live node whose CPUs can be pulled out."""

    def __init__(self, path: Path, mode: KernelMode = "v1") -> None:
        self.live = LiveNode(path, mode, files=False)

    def cpus(self, path: str) -> str:
        return self.live.read(path, "cpuset", "cpuset.cpus")

    def put(self, path: str, text: str) -> None:
        self.live.write(path, "cpuset", "cpuset.cpus", text)

    def main(self, uid: str) -> str:
        return f"{group(uid)}/{container_id(uid)}"

    async def switch(self, agent: Agent, *, off: str = "", on: str = "") -> None:
        """The kernel's part, then the agent's: what the source reports, and the pass that follows."""
        before = agent.control.inventory.readings.topology
        taken, came = CpuSet.parse(off), CpuSet.parse(on)
        for cpu in taken:
            self.live.kernel.unplug(cpu)
        for cpu in came:
            self.live.kernel.plug(cpu)
        self.live.put("sys/devices/system/cpu/online", f"{(before.online | came) - (taken - came)}\n")
        await agent.control.repair.changed(CpuChange(before, read_topology(self.live.root), taken))
        await self.live.look(agent)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_every_cpuset_gets_a_returned_cpu_back_on_v1(node: Node) -> None:
    async with node.live.looked() as agent:
        await node.switch(agent, off="3")
        assert agent.control.inventory.readings.topology.online == agent.control.reconciler.pools.online_cpus  # type: ignore[union-attr]
        assert node.cpus(TOP) == node.cpus(group(WEB)) == "0-2,4-7"
        assert node.cpus(node.main(WEB)) == "0-2,4-6"
        await node.switch(agent, on="3")
        for path in (TOP, BE, "/kubepods/burstable", group(WEB), group(BATCH), group(PINNED)):
            assert node.cpus(path) == "0-7"
        assert node.cpus(node.main(WEB)) == "0-6"
        assert agent.alerts.raised["hotplug"] == 2
        assert agent.hub.changed.resyncs["hotplug"] == 2


async def test_a_containers_settings_are_written_again_without_a_foreign_writer(node: Node) -> None:
    async with node.live.looked() as agent:
        wanted = node.cpus(node.main(BATCH))
        assert wanted not in {"0-7", "0-6"}
        first = wanted.split("-")[0].split(",")[0]
        for _ in range(6):
            await node.switch(agent, off=first)
            assert first not in node.cpus(node.main(BATCH)).split(",")
            await node.switch(agent, on=first)
            pools = agent.control.reconciler.pools
            assert pools is not None
            assert node.cpus(node.main(BATCH)) == str(pools.reclaimed)
        # A dozen narrowings that were foreign writes would have ended in a yield.
        assert not agent.writes.judge.foreign_writes.writes
        assert not agent.writes.judge.foreign_writes.yields
        assert agent.writes.judge.statuses.get((node.main(BATCH), "cpu.set")).state in {"in place", "written"}  # type: ignore[union-attr]


async def test_a_cpu_unplugged_for_a_moment_is_restored_too(node: Node) -> None:
    async with node.live.looked() as agent:
        await node.switch(agent, off="2", on="2")
        assert (node.cpus(TOP), node.cpus(node.main(WEB))) == ("0-7", "0-6")


async def test_whoever_was_kept_off_a_cpu_before_stays_off_it(node: Node) -> None:
    node.put(node.main(WEB), "0-2")
    node.put(group(WEB), "0-2")
    node.put("/kubepods/burstable", "0-2,4-7")
    async with node.live.looked() as agent:
        await node.switch(agent, off="1,3")
        await node.switch(agent, on="1,3")
        assert node.cpus(TOP) == "0-7"
        assert node.cpus("/kubepods/burstable") == "0-2,4-7"
        assert node.cpus(group(WEB)) == "0-2"


async def test_kubepods_itself_keeps_a_foreign_restriction(node: Node) -> None:
    for path in (*(node.main(uid) for uid in (WEB, BATCH)), group(WEB), group(BATCH), BE, "/kubepods/burstable"):
        node.put(path, "1-7")
    for path in (node.main(PINNED), group(PINNED), TOP):
        node.put(path, "1-7")
    async with node.live.looked() as agent:
        await node.switch(agent, off="0,1")
        await node.switch(agent, on="0,1")
        assert node.cpus(TOP) == node.cpus(group(WEB)) == "1-7"


async def test_a_container_gets_no_cpu_that_its_spec_does_not_name(node: Node) -> None:
    node.put(node.main(PINNED), "7")
    async with node.live.looked() as agent:
        await node.switch(agent, off="3")
        await node.switch(agent, on="3")
        assert node.cpus(node.main(PINNED)) == "7"
        assert node.cpus(group(PINNED)) == "0-7"


async def test_groups_inside_an_unmanaged_container_get_the_cpu_with_it(node: Node) -> None:
    docker, pinned = f"{node.main(WEB)}/docker", f"{node.main(WEB)}/pinned"
    deep = f"{docker}/{'cd' * 32}"
    for path in (deep, f"{pinned}/deep"):
        node.live.kernel.make_group(path)
    node.put(f"{pinned}/deep", "1-2")
    node.put(pinned, "1-2")
    async with node.live.looked() as agent:
        await node.switch(agent, off="3")
        assert [node.cpus(path) for path in (docker, deep, pinned)] == ["0-2,4-6", "0-2,4-6", "1-2"]
        await node.switch(agent, on="3")
        assert node.cpus(node.main(WEB)) == "0-6"
        assert [node.cpus(path) for path in (docker, deep)] == ["0-6", "0-6"]
        assert [node.cpus(path) for path in (pinned, f"{pinned}/deep")] == ["1-2", "1-2"]
        assert not list(agent.record.ledger.group(docker)), "the tenant's own value, restored: nothing is remembered"


async def test_a_pinned_group_inside_a_managed_container_keeps_its_own_set_in_the_record(node: Node) -> None:
    docker = f"{node.main(BATCH)}/docker"
    pinned, own = f"{docker}/pinned", CpuSet.parse("3,6")
    node.live.kernel.make_group(pinned)
    node.put(pinned, str(own))

    async def check(agent: Agent) -> CpuSet:
        """The container's set, after some passes; those inside follow it, the pinned one by what it has of its own."""
        for _ in range(3):
            await node.live.look(agent)
        container, outer, inner = (CpuSet.parse(node.cpus(path)) for path in (node.main(BATCH), docker, pinned))
        assert container
        assert outer == container
        assert inner == (own & container or container)
        entry = agent.record.ledger.get(("cpuset", pinned, "cpuset.cpus"))
        assert entry is not None
        assert entry.original == str(own)
        return container

    with node.live.agent() as agent:
        assert 6 in await check(agent)
        await node.switch(agent, off="6")
        assert 6 not in await check(agent)
        await node.switch(agent, on="6")
        await check(agent)
        await node.switch(agent, off="4,5")
        assert 6 in await check(agent)
        await node.switch(agent, off="6", on="6")
        await check(agent)


async def test_many_groups_inside_are_widened_in_parts_with_passes_between(node: Node) -> None:
    inside = [f"{node.main(WEB)}/g{number}" for number in range(100)]
    for path in inside:
        node.live.kernel.make_group(path)
    async with node.live.looked() as agent:
        passes: list[int] = []

        async def other() -> None:
            while True:
                async with agent.control.reconciler.paused():
                    passes.append(sum(node.cpus(path) == "0-6" for path in inside))
                await trio.lowlevel.checkpoint()

        await node.switch(agent, off="3")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await node.switch(agent, on="3")
            nursery.cancel_scope.cancel()
        assert {node.cpus(path) for path in inside} == {"0-6"}
        assert [count for count in sorted(set(passes)) if 0 < count < 100] == [32, 64, 96]


async def test_a_container_that_has_lost_its_last_cpu_is_named(node: Node) -> None:
    node.put(node.main(PINNED), "7")
    async with node.live.looked() as agent:
        await node.switch(agent, off="7")
        await node.switch(agent, on="7")
        assert node.cpus(node.main(PINNED)) == "7"
        events = agent.record.ledger.events_after(0)
        texts = [event.reason for event in events if event.kind == "alert:hotplug"]
    assert f"; no CPU left for {node.main(PINNED)}: its processes run in the parent group" in texts[0]
    assert "no CPU left" not in texts[1]
    assert "restored in " in texts[1]


async def test_a_new_cpu_is_handed_down_as_well(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.live.kernel.unplug(6)
    node.live.put("sys/devices/system/cpu/online", "0-5,7\n")
    async with node.live.looked() as agent:
        await node.switch(agent, on="6")
        assert node.cpus(TOP) == node.cpus(group(WEB)) == "0-7"


async def test_on_v2_the_kernel_keeps_the_sets_and_nothing_is_restored(tmp_path: Path) -> None:
    node = Node(tmp_path, "v2")
    async with node.live.looked() as agent:
        before = {path: node.cpus(path) for path in (TOP, BE, group(WEB), node.main(WEB))}
        await node.switch(agent, off="3")
        await node.switch(agent, on="3")
        assert {path: node.cpus(path) for path in before} == before
        assert agent.control.inventory.readings.topology.online == read_topology(node.live.root).online


@pytest.mark.parametrize("mode", [AgentMode.OBSERVE, AgentMode.ENFORCE], ids=["observe", "hold on the node"])
async def test_where_nothing_may_be_written_nothing_is_restored(node: Node, mode: AgentMode) -> None:
    with node.live.agent(replace(node.live.config, mode=mode)) as agent:
        if mode is AgentMode.ENFORCE:
            agent.record.holds.all["node"] = Hold(target="node", reason="kernel upgrade", by="ana")
            agent.record.holds.refresh()
        await node.live.look(agent)
        await node.switch(agent, off="3")
        await node.switch(agent, on="3")
        assert (node.cpus(TOP), node.cpus(node.main(WEB))) == ("0-2,4-7", "0-2,4-6")
        assert agent.control.inventory.readings.topology.online == read_topology(node.live.root).online


async def test_a_foreign_write_beside_the_kernels_is_still_a_foreign_write(node: Node) -> None:
    async with node.live.looked() as agent:
        await node.switch(agent, off="3")
        node.put(node.main(BATCH), "0-1")
        pools = agent.control.reconciler.pools
        assert pools is not None
        assert str(pools.reclaimed) != "0-1"
        await node.live.look(agent)
        # The writer is unknown: a runtime, maybe, that is not done yet.
        agent.writes.judge.foreign_writes._updating[node.main(BATCH), "cpu.set"] -= 1.0
        await node.live.look(agent)
        assert agent.writes.judge.foreign_writes.writes


async def test_the_ticker_notices_without_any_event(node: Node) -> None:
    with node.live.agent() as agent:
        seen: list[str] = []
        agent.control.hotplug._on_change = lambda change: _note(seen, change)
        agent.control.hotplug.check()
        assert not await agent.control.hotplug._hint.wait(0.0)
        node.live.put("sys/devices/system/cpu/online", "0-6\n")
        agent.accounts.sampler._files = REAL  # /proc is no part of the fake kernel
        agent.accounts.sampler.tick(time.monotonic(), fast=False)
        assert await agent.control.hotplug._hint.wait(0.0)
        await agent.control.hotplug._read_again()
        assert seen == ["CPU 7 went offline; online now: 0-6"]


async def _note(seen: list[str], change: CpuChange) -> None:
    seen.append(change.describe)


async def test_nothing_is_kept_of_pods_that_were_removed(node: Node) -> None:
    async with node.live.looked() as agent:
        for _ in range(2):
            await node.switch(agent, off="3")
            await node.switch(agent, on="3")
        assert group(BATCH) in agent.control.repair._lacking
        node.live.kernel.remove_group(group(BATCH))
        await node.live.look(agent)
        await node.switch(agent, off="3")
        await node.switch(agent, on="3")
        assert group(BATCH) not in agent.control.repair._lacking
        assert TOP in agent.control.repair._lacking
