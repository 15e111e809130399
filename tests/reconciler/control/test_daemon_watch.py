"""The node's other daemons: measured each second, their weight held near what they need, and restored."""

import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.control.host_watch import DaemonWatch
from reconciler.daemon.agent import Agent
from reconciler.policies.node_daemons import NodeDaemonsConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.workqueue import DirtyBatch
from reconciler.signals.root_groups import LIST_S, RootGroups
from reconciler.signals.runqueue import DelaySource
from reconciler.signals.taskstats import Delays
from state.daemons import DaemonGroup, Daemons
from state.model import PodMeta
from state.setting_state import SettingState
from tests.fakes.constants import varied
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.livenode import BATCH, LiveNode, begin, container_id, group
from tests.fakes.node import mounts_of

SLICE: Final = "/system.slice"
ON: Final = varied(NodeDaemonsConfig(enabled=True), window_s=10)
USE_NS: Final = 50_000_000
"""Of each second: 5 % of a CPU."""


class FakeTaskstats:
    """Processes by id, with what they have run and waited."""

    def __init__(self) -> None:
        self.times: dict[int, Delays] = {}
        self.asked: list[tuple[int, ...]] = []

    def query(self, pids: Sequence[int]) -> Mapping[int, Delays]:
        self.asked.append(tuple(pids))
        return {pid: self.times[pid] for pid in pids if pid in self.times}

    def close(self) -> None:
        pass


class Node:
    """A node whose services use 5 % of a CPU, one second after the other."""

    def __init__(self, path: Path, mode: KernelMode = "v1", config: NodeDaemonsConfig = ON) -> None:
        self.live = LiveNode(path, mode, files=False)
        self.live.config = replace(self.live.config, policies=PoliciesConfig(node_daemons=config))
        self.cpu = mounts_of(self.live.kernel)["cpu"]
        self.file = "cpu.shares" if mode == "v1" else "cpu.weight"
        self.now = time.monotonic()
        self.taskstats = FakeTaskstats()
        # The kubelet's: 8 CPUs.
        self.live.kernel.write(f"{self.cpu}/kubepods", self.file, "8192" if mode == "v1" else "313")

    def add(self, path: str = SLICE) -> None:
        """As systemd makes it: on v1 in the hierarchies that its units need."""
        kernel, mounts = self.live.kernel, mounts_of(self.live.kernel)
        for mount in {mounts[name] for name in ("cpu", "cpuacct") if name in mounts}:
            kernel.mkdir(mount + path)

    @contextmanager
    def agent(self) -> Iterator[Agent]:
        with self.live.agent() as agent:
            place = agent.place
            groups = RootGroups(
                place.hierarchy,
                agent.usage,
                place.layout.kubepods,
                root=place.root,
                files=self.live.kernel,
                taskstats=lambda: self.taskstats,
                clock=lambda: self.now,
            )
            agent.accounts.sampler.daemons = DaemonWatch(
                agent.control.reconciler,
                agent.record.ledger,
                place.hierarchy,
                agent.usage,
                files=self.live.kernel,
                groups=groups,
            )
            yield agent

    @property
    def weight(self) -> str:
        return self.live.kernel.read(self.cpu + SLICE, self.file).strip()

    async def second(self, agent: Agent, use_ns: int = USE_NS) -> None:
        mount = mounts_of(self.live.kernel).get("cpuacct", self.cpu)
        self.live.kernel.charge(mount + SLICE, cpu_ns=use_ns)
        self.now += 1.0
        await agent.accounts.sampler.daemons.round(self.now)
        if agent.hub.changed:
            await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())

    @asynccontextmanager
    async def played(self) -> AsyncIterator[Agent]:
        """The agent after its first pass, with nothing left to reconcile."""
        with self.agent() as agent:
            await self.live.look(agent)
            agent.hub.changed.take_nowait()
            yield agent


@pytest.fixture(params=["v1", "v2"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    node = Node(tmp_path, request.param)
    node.add()
    return node


async def until_low(node: Node, agent: Agent) -> None:
    for _ in range(60):
        await node.second(agent)


def low(node: Node) -> str:
    """A tenth of one CPU beside the pods of eight, which have 1024 shares a CPU; the v2 of it is exact to one."""
    return "114" if node.file == "cpu.shares" else "5"


async def test_the_weight_follows_the_need_and_is_in_the_ledger(node: Node) -> None:
    original = node.weight
    weights: list[str] = []

    async with node.played() as agent:
        for _ in range(60):
            await node.second(agent)
            weights.append(node.weight)
        status = agent.writes.judge.statuses.get((SLICE, "cpu.weight"))
        assert status is not None
        assert status.state in {SettingState.WRITTEN, SettingState.IN_PLACE}
        (row,) = agent.record.ledger.group(SLICE)
        assert (row.original, row.policy) == (original, "node_daemons")
        assert agent.control.reconciler.wanted[""][SLICE]["cpu.weight"].reason == "200 % of what its daemons need"
    assert weights[:10] == [original] * 10
    assert weights[-1] == low(node)
    halves = [int(weight) for weight in dict.fromkeys(weights)]
    assert halves == sorted(halves, reverse=True)
    assert all(after >= before // 2 - 1 or after == int(low(node)) for before, after in pairwise(halves))


async def test_an_idle_group_keeps_the_floor_which_is_a_part_of_what_a_service_has(node: Node) -> None:
    async with node.played() as agent:
        for _ in range(60):
            await node.second(agent, use_ns=0)
    # 50 of the 1024 shares that a service has are 5 of its weight of 100 on v2.
    assert node.weight == ("50" if node.file == "cpu.shares" else "5")


async def test_a_container_in_creation_raises_it_in_the_same_pass(node: Node) -> None:
    original = node.weight

    async with node.played() as agent:
        await until_low(node, agent)
        assert node.weight == low(node)
        pod = node.live.pods[BATCH]
        box = node.live.prepare(pod, "second", {"cpu": {"shares": 2}})
        node.live.make_groups(pod, box)
        agent.control.inventory._awaited = lambda _cid: True
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        assert node.weight == original


@pytest.mark.parametrize("announced", [False, True])
async def test_a_new_pod_raises_it_before_its_first_container(node: Node, *, announced: bool) -> None:
    """``announced``: by the API server, before the kubelet has made its group."""
    original, uid = node.weight, "0e0e0e0e-0000-4000-8000-000000000009"

    async with node.played() as agent:
        await until_low(node, agent)
        keys: frozenset[str] = frozenset({f"pod:{uid}"})
        await agent.control.reconciler.reconcile(DirtyBatch(keys, ()))
        assert node.weight == low(node), "no source has it"
        if announced:
            agent.control.inventory._metas = lambda _: [PodMeta(uid=uid, name="new", source="test")]
        else:
            node.live.kernel.make_group(f"/kubepods/burstable/pod{uid}")
        await agent.control.reconciler.reconcile(DirtyBatch(keys, ()))
        assert node.weight == original


async def test_a_removed_container_raises_it_and_what_its_removal_uses_is_no_need(node: Node) -> None:
    original = node.weight

    async with node.played() as agent:
        await until_low(node, agent)
        node.live.kernel.remove_group(f"{group(BATCH)}/{container_id(BATCH)}")
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        for _ in range(9):
            await node.second(agent, use_ns=10 * USE_NS)
            assert node.weight == original
        await until_low(node, agent)
        assert node.weight == low(node)


async def test_it_is_restored_by_off_by_a_restore_by_a_stop_and_after_a_killed_agent(node: Node) -> None:
    original = node.weight

    async with node.played() as agent:
        await until_low(node, agent)
        off = replace(agent.config, policies=PoliciesConfig(node_daemons=NodeDaemonsConfig()))
        agent.reconfigure(off)
        await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        assert node.weight == original
        assert agent.record.ledger.group(SLICE) == []

    async with node.played() as agent:
        await until_low(node, agent)
        await agent.commands.restore()
        assert node.weight == original

    async with node.played() as agent:
        await until_low(node, agent)
        others = [row.key for row in agent.record.ledger.control_files() if row.path != SLICE]
        await agent.commands.restore_daemon_weights()
        assert node.weight == original
        assert [row.key for row in agent.record.ledger.control_files()] == others != []

    async with node.played() as agent:
        await until_low(node, agent)
        begin(agent)
        assert node.weight == low(node)
    node.live.config = replace(node.live.config, policies=PoliciesConfig())
    async with node.played():
        assert node.weight == original


@pytest.mark.parametrize("kind", ["systemd", "kubelet"])
async def test_a_value_of_its_owner_becomes_the_original_and_ours_is_written_again(node: Node, kind: str) -> None:
    class Writers:
        def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
            return (kind, f"{kind} (pid 9)") if file == node.file else None

    async with node.played() as agent:
        await until_low(node, agent)
        agent.writes.judge.foreign_writes._attribution = Writers()
        node.live.kernel.write(node.cpu + SLICE, node.file, "70")
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        assert node.weight == low(node)
        await node.second(agent)
        assert agent.control.inventory.readings.daemons.groups[SLICE].original == 70
        await agent.commands.restore()
        assert node.weight == "70"


async def test_a_value_of_a_person_becomes_a_hold(node: Node) -> None:
    class Writers:
        def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
            return ("person", "bash (pid 7)") if file == node.file else None

    async with node.played() as agent:
        await until_low(node, agent)
        agent.writes.judge.foreign_writes._attribution = Writers()
        node.live.kernel.write(node.cpu + SLICE, node.file, "700")
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        assert node.weight == "700"
        assert [hold.by for hold in agent.mode.holds.values()] == ["bash (pid 7)"]


@pytest.mark.parametrize("mode", ["v1", "v2"])
async def test_without_the_policy_daemons_are_measured_and_nothing_is_written(tmp_path: Path, mode: KernelMode) -> None:
    node = Node(tmp_path, mode, NodeDaemonsConfig())
    node.add()
    original = node.weight

    async with node.played() as agent:
        await until_low(node, agent)
        daemons = agent.control.inventory.readings.daemons
        own, waits = int(original), daemons.groups[SLICE].waits
        assert daemons.groups == {SLICE: DaemonGroup(weight=own, original=own, use_milli=50, waits=waits)}
        assert agent.control.reconciler.plan is not None
        assert agent.control.reconciler.plan.reasons["node_daemons"] == "off"
    assert node.weight == original


async def test_without_the_policy_they_are_read_each_five_seconds_from_the_third_on(tmp_path: Path) -> None:
    node = Node(tmp_path, "v1", NodeDaemonsConfig())
    node.add()

    async with node.played() as agent:
        reads: list[float] = []
        watch = agent.accounts.sampler.daemons
        sample = watch._groups.sample

        async def counted(named: Collection[str]) -> Daemons:
            reads.append(node.now - began)
            return await sample(named)

        watch._groups.sample = counted  # type: ignore[method-assign]  # counts the readings
        began = node.now
        for _ in range(20):
            await node.second(agent)
        assert reads == [1, 2, 3, 8, 13, 18]


async def test_where_services_have_no_group_the_reason_is_reported(tmp_path: Path) -> None:
    node = Node(tmp_path)

    async with node.played() as agent:
        await agent.accounts.sampler.daemons.round(node.now + 1)
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        assert agent.control.reconciler.plan is not None
        reason = agent.control.reconciler.plan.reasons["node_daemons"]
        assert reason.startswith("/system.slice: not here: no such group in the CPU hierarchy: without CPU accounting")


async def test_the_pods_and_the_root_are_never_among_them(node: Node) -> None:
    node.add("/user.slice")
    node.add("/bypassd.slice")

    async with node.played() as agent:
        await node.second(agent)
        daemons = agent.control.inventory.readings.daemons
        assert set(daemons.groups) == {SLICE, "/user.slice"}
        view = agent.control.inventory.view(0.0, {})
        assert view.daemons is daemons


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/x.slice", "kubepods.slice", "bypassd.slice", "-x", "a b"])
def test_names_that_are_not_of_daemons_groups_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="groups"):
        NodeDaemonsConfig(groups=(name,))


async def test_waiting_is_that_of_the_process_that_waited_most(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.add()
    kernel = node.live.kernel
    kernel.mkdir(f"{node.cpu}{SLICE}/kubelet.service")
    pids = [kernel.spawn() for _ in range(3)]
    for pid in pids:
        kernel.write(f"{node.cpu}{SLICE}/kubelet.service", "cgroup.procs", str(pid))
        node.taskstats.times[pid] = Delays(0, 0, 0)

    def pass_time(waits: Sequence[float], ran: Sequence[float]) -> None:
        for pid, waited, used in zip(pids, waits, ran, strict=True):
            before = node.taskstats.times[pid]
            node.taskstats.times[pid] = Delays(
                before.run_ns + round(used * 1e9), before.wait_ns + round(waited * 1e9), before.switches + 1
            )

    async with node.played() as agent:
        await node.second(agent)
        assert agent.control.inventory.readings.daemons.groups[SLICE].waits is None
        pass_time((0.1, 0.9, 0.0), (0.05, 0.1, 0.0))
        await node.second(agent)
        assert agent.control.inventory.readings.daemons.groups[SLICE].waits == pytest.approx(0.9)
        for _ in range(int(LIST_S)):
            pass_time((0.1, 0.2, 0.0), (0.05, 0.1, 0.0))
            await node.second(agent)
        node.taskstats.asked.clear()
        pass_time((0.1, 0.2, 0.0), (0.05, 0.1, 0.0))
        await node.second(agent)
        assert set(node.taskstats.asked[0]) == {pids[0], pids[1]}, "between two listings only those that ran"


async def test_without_taskstats_waiting_is_unknown_and_the_rest_goes_on(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.add()

    def denied() -> DelaySource:
        raise SourceError("taskstats", "permission denied")

    async with node.played() as agent:
        groups = RootGroups(
            agent.place.hierarchy,
            agent.usage,
            "/kubepods",
            root=node.live.root,
            files=node.live.kernel,
            taskstats=denied,
            clock=lambda: node.now,
        )
        await groups.sample((SLICE,))
        node.now += 1
        read = await groups.sample((SLICE,))
        assert read.groups[SLICE].waits is None
        assert read.groups[SLICE].use_milli == 0
