"""The unit tests' node: a `DirectoryNode` of three pods on the strict fake kernel, with the real agent on it.

For real documents, real stores, and trees to capture. The runtime has written what its spec has.
"""

import errno
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import trio
from msgspec.structs import replace

from reconciler.cli.recorded import UsageReading
from reconciler.config.environment import find_place
from reconciler.config.model import (
    AgentMode,
    Config,
    EndpointSection,
    KubeletSection,
    NodeSection,
    RuntimeSection,
    StoreConfig,
)
from reconciler.daemon.agent import Agent
from reconciler.daemon.status import StatusReport
from reconciler.policies.budget import BudgetLaw
from reconciler.policies.reclaimed import ReclaimedForm
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from reconciler.runtime.workqueue import DirtyBatch
from reconciler.settings.schema import FeatureSwitch
from reconciler.signals.cpu import CpuReading, CpuSampler, parse_stat
from reconciler.sources.node import NodeEnvironment
from reconciler.sources.runtime_signal import RuntimeEvent
from state.model import PodClass
from state.schema import META, RUNNING
from state.store import StoreBatch
from tests.fakes.kernel import FakeKernel
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.kubelet.cpu_manager import STATIC
from tests.fakes.kubelet.fake import FakeKubelet
from tests.fakes.node import Box, DirectoryNode, NodePod, mounts_of
from tests.fakes.report import status_report

WEB = "aaaaaaaa-1111-4111-8111-111111111111"
BATCH = "bbbbbbbb-2222-4222-8222-222222222222"
PINNED = "cccccccc-3333-4333-8333-333333333333"
QOS = {WEB: "/burstable", BATCH: "/besteffort", PINNED: ""}
CLASSES = {WEB: PodClass.SHARED, BATCH: PodClass.RECLAIMED, PINNED: PodClass.DEDICATED}
NAMES = {WEB: ("shop", "web-0"), BATCH: ("ci", "batch-7"), PINNED: ("shop", "db-0")}
SECRET = "hunter2-s3cr3t"  # what must never be found in a capture


def _stat(second: int) -> str:
    """Three of eight CPUs busy; a second has 100 ticks."""
    ticks = 100 * second
    rows = [f"cpu{cpu} {ticks if cpu < 3 else 0} 0 0 {0 if cpu < 3 else ticks} 0 0 0 0 0 0" for cpu in range(8)]
    return "\n".join(["cpu  0 0 0 0", *rows, ""])


USAGE = (
    UsageReading(at=0.0, stat=_stat(0), pods={WEB: 0, BATCH: 0, PINNED: 0}),
    UsageReading(at=1.0, stat=_stat(1), pods={WEB: 2_000_000_000, BATCH: 700_000_000, PINNED: 0}),
)
"""Two CPUs' worth of online work, 0.7 of best-effort work, 0.3 of the system's."""


def begin(agent: Agent) -> None:
    """The store as after a daemon's start: one that ends without more was killed."""
    batch = StoreBatch()
    batch.put(META, RUNNING, msgspec.msgpack.encode(True))
    agent.record.store.apply(batch)


def container_id(uid: str) -> str:
    return uid[0] * 64


def group(uid: str) -> str:
    return f"/kubepods{QOS[uid]}/pod{uid}"


BOX = f"{group(BATCH)}/{container_id(BATCH)}"
INNER = f"{BOX}/docker/{'cd' * 32}"
"""A group that the BE pod's container has made inside."""


class LiveNode(DirectoryNode):
    """Eight CPUs, one online pod, one best-effort pod, one pod with CPU 7 of its own.

    ``files``: control files are on the disk as well, for commands and children, which read past the fake kernel.
    """

    def __init__(self, path: Path, mode: KernelMode = "v1", *, files: bool = True) -> None:
        root = str(path / "node")
        os.makedirs(root)
        self.kernel = FakeKernel(mode, root=root, cpus=8, mirror=True, mirror_files=files)
        self.kernel.install()
        kubelet = FakeKubelet(f"{root}/var/lib/kubelet", policy=STATIC, cpus=range(7), reserved={0})
        super().__init__(root, self.kernel, mounts_of(self.kernel), kubelet=kubelet)
        self.config = Config(
            mode=AgentMode.ENFORCE,
            operator_file=None,
            node=NodeSection(root=root),
            kubelet=KubeletSection(endpoint=EndpointSection.OFF),
            runtime=RuntimeSection(cri=FeatureSwitch.OFF),
            store=StoreConfig(path=self.store),
        )
        os.makedirs(os.path.dirname(self.store))
        self.put("proc/stat", "cpu  0 0 0 0\n" + "".join(f"cpu{cpu} 100 0 50 900 0 0 0 0 0 0\n" for cpu in range(8)))
        self.put("proc/sys/kernel/random/boot_id", "boot-1\n")
        self.put("sys/devices/system/cpu/online", "0-7\n")
        self.put("sys/devices/system/cpu/present", "0-7\n")
        for cpu in range(8):
            self.put(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{cpu}\n")
        kubelet.write_config(more=f"staticPodURLHeader:\n  Authorization:\n  - Bearer {SECRET}\n")
        kubelet.cpu_manager(STATIC, "0-6", {PINNED: {"main": "7"}})
        with self.kernel.mirrored_at_once():
            for qos in ("/kubepods/burstable", "/kubepods/besteffort"):
                self.kernel.make_group(qos)
            self.least_weight("/kubepods/besteffort")
            for uid, (namespace, name) in NAMES.items():
                self.admit(uid, namespace, name)
                self.run(uid)

    def admit(self, uid: str, namespace: str, name: str) -> NodePod:
        """A pod's group; `run` starts its container."""
        self.kernel.make_group(group(uid))
        qos = QOS[uid].strip("/")
        if qos == "besteffort" and self.kernel.mode == "v1":
            self.write(group(uid), "cpu", "cpu.shares", "2")
        pod = NodePod(uid=uid, name=name, namespace=namespace, qos=qos, group=group(uid), meta={}, boxes=[])
        self.pods[uid] = pod
        return pod

    def run(self, uid: str) -> None:
        """The container as runc makes it: groups, bundle, state."""
        cid, cpus = container_id(uid), "7" if uid == PINNED else "0-6"
        box = Box(id=cid, name="main", group=f"{group(uid)}/{cid}", resources={"cpu": {"cpus": cpus}})
        self.kernel.make_group(box.group)
        self.write(box.group, "cpuset", "cpuset.cpus", cpus)
        secrets = {"args": ["/bin/app", f"--password={SECRET}"], "env": [f"TOKEN={SECRET}"]}
        self.write_bundle(self.pods[uid], box, sandbox="f" * 64, **secrets)
        self.write_state(box, pid=42, annotations={"token": SECRET})

    def place(self) -> NodeEnvironment:
        environment = find_place(self.config)
        assert environment is not None
        return environment

    @contextmanager
    def agent(self, config: Config | None = None) -> Iterator[Agent]:
        """The agent, built and closed; nothing of it runs by itself."""
        agent = Agent(config or self.config, self.place(), files=self.kernel)
        try:
            yield agent
        finally:
            agent.close()

    def failing(
        self, call: str, path: str, controller: str, file: str, code: int = errno.EIO
    ) -> Callable[..., Any]:  # as the fake kernel's
        """The kernel's ``read`` or ``write``, which fails for one file."""
        real, directory = getattr(self.kernel, call), self.path(path, controller)

        def failing(at: object, name: str, *text: str) -> Any:
            if at == directory and name == file:
                raise OSError(code, os.strerror(code))
            return real(at, name, *text)

        return failing

    def widen(self) -> None:
        """BE work on the pinned pod's CPU, with a group inside, as before that pod."""
        self.kernel.make_group(INNER)
        for path in ("/kubepods/besteffort", group(BATCH), BOX, os.path.dirname(INNER), INNER):
            self.write(path, "cpuset", "cpuset.cpus", "0-7")

    def inner_quota(self) -> None:
        """A group inside that has all the CPU of the node."""
        self.kernel.make_group(INNER)
        self.write(INNER, "cpu", "cpu.cfs_quota_us", "800000")

    def by_quota(self) -> Config:
        """With a BE budget that is a quota."""
        reclaimed = self.config.policies.reclaimed
        reclaimed = replace(reclaimed, form=ReclaimedForm.QUOTA, budget=replace(reclaimed.budget, law=BudgetLaw.QUOTA))
        return replace(self.config, policies=replace(self.config.policies, reclaimed=reclaimed))

    @asynccontextmanager
    async def looked(self, config: Config | None = None) -> AsyncIterator[Agent]:
        """The agent after its first pass."""
        with self.agent(config) as agent:
            await self.look(agent)
            yield agent

    @asynccontextmanager
    async def shown(self, config: Config | None = None) -> AsyncIterator[tuple[Agent, StatusReport]]:
        """The same, with what it shows."""
        async with self.looked(config) as agent:
            yield agent, status_report(agent)

    async def look(self, agent: Agent) -> None:
        """One whole look, with what is learnt made durable."""
        sampler, now = CpuSampler(), time.monotonic()
        for usage_reading in USAGE:
            reading = CpuReading(
                at_s=now - 1 + usage_reading.at, cpus=parse_stat(usage_reading.stat), pods=usage_reading.pods
            )
            agent.control.inventory.take(cpu=sampler.sample(reading, CLASSES))
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        agent.control.reconciler.ready.set()

    async def look_again(self, agent: Agent, passes: int = 1) -> None:
        """Passes in which what was refused is tried again."""
        for _ in range(passes):
            agent.writes.judge.due(math.inf)
            await self.look(agent)

    def document(self, *, killed: bool = False, mode: AgentMode = AgentMode.ENFORCE) -> dict[str, Any]:
        """What the daemon shows after two looks. ``killed``: it ends without a word, as by SIGKILL."""

        async def live() -> dict[str, Any]:
            with self.agent(replace(self.config, mode=mode)) as agent:
                if killed:
                    begin(agent)
                await agent.sources.disks.refresh()
                await self.look(agent)
                agent.control.reconciler.settled(container_id(BATCH), trio.current_time(), RuntimeEvent.STATE)
                await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
                agent.alerts.alert("yield", "cpu.quota: left to systemd", None)
                await agent.keeper.flush()
                show = status_report(agent, statuses=_components)
                return _plain(show.state(()))

        # All of it at one moment: the document is the same on a machine that is busy.
        with mock.patch.object(time, "monotonic", return_value=time.monotonic()):
            return trio.run(live)


def _components() -> list[ComponentStatus]:
    return [ComponentStatus(name="reconciler", health=ComponentHealth.RUNNING)]


def _plain(fields: Mapping[str, object]) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields, enc_hook=str))
    return answer
