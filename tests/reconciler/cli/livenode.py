"""A node on the strict fake kernel with the real agent on it: for real documents, real stores, and trees to capture."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
from msgspec.structs import replace

from reconciler.cli.recorded import UsageReading
from reconciler.config.environment import NodeEnvironment, find_place
from reconciler.config.model import (
    AgentMode,
    Config,
    EndpointSection,
    FeatureSwitch,
    KubeletSection,
    NodeSection,
    RuntimeSection,
    StoreConfig,
)
from reconciler.daemon.agent import Agent
from reconciler.daemon.status import StatusReport
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from reconciler.runtime.workqueue import DirtyBatch
from reconciler.signals.cpu import CpuReading, CpuSampler, parse_stat
from reconciler.sources.runtime_signal import RuntimeEvent
from state.kubelet import render_cpu_manager_state
from state.model import CpuPolicy, PodClass
from tests.fakes.kernel import FakeKernel
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.web import FakePulse

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


def container_id(uid: str) -> str:
    return uid[0] * 64


def group(uid: str) -> str:
    return f"/kubepods{QOS[uid]}/pod{uid}"


class LiveNode:
    """Eight CPUs, one online pod, one best-effort pod, one pod with CPU 7 of its own."""

    def __init__(self, path: Path, mode: KernelMode = "v1") -> None:
        self.root = str(path / "node")
        os.makedirs(self.root)
        self.kernel = FakeKernel(mode, root=self.root, cpus=8, mirror=True)
        self.kernel.install()
        self.config = Config(
            mode=AgentMode.ENFORCE,
            operator_file=None,
            node=NodeSection(root=self.root),
            kubelet=KubeletSection(endpoint=EndpointSection.OFF),
            runtime=RuntimeSection(cri=FeatureSwitch.OFF),
            store=StoreConfig(path=f"{self.root}/var/lib/bypassd/state.db"),
        )
        os.makedirs(f"{self.root}/var/lib/bypassd")
        self.put("proc/stat", "cpu  0 0 0 0\n" + "".join(f"cpu{cpu} 100 0 50 900 0 0 0 0 0 0\n" for cpu in range(8)))
        self.put("proc/sys/kernel/random/boot_id", "boot-1\n")
        self.put("sys/devices/system/cpu/online", "0-7\n")
        self.put("sys/devices/system/cpu/present", "0-7\n")
        for cpu in range(8):
            self.put(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{cpu}\n")
        self.put(
            "var/lib/kubelet/config.yaml",
            "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\ncpuManagerPolicy: static\nreservedSystemCPUs: '0'\n"
            f"staticPodURLHeader:\n  Authorization:\n  - Bearer {SECRET}\n",
        )
        state = render_cpu_manager_state(CpuPolicy.STATIC.value, "0-6", {PINNED: {"main": "7"}})
        self.put("var/lib/kubelet/cpu_manager_state", state)
        for qos in ("/kubepods/burstable", "/kubepods/besteffort"):
            self.kernel.make_group(qos)
        for uid in (WEB, BATCH, PINNED):
            self.kernel.make_group(group(uid))
            self.start(uid)

    def put(self, path: str, text: str) -> None:
        full = f"{self.root}/{path}"
        os.makedirs(os.path.dirname(full), exist_ok=True)
        Path(full).write_text(text)

    def start(self, uid: str) -> None:
        """The container as runc makes it: groups, bundle, state."""
        cid, (namespace, name) = container_id(uid), NAMES[uid]
        self.kernel.make_group(f"{group(uid)}/{cid}")
        annotations = {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-id": "f" * 64,
            "io.kubernetes.cri.sandbox-name": name,
            "io.kubernetes.cri.sandbox-namespace": namespace,
        }
        cpu = {"shares": 2, "cpus": "7" if uid == PINNED else "0-6"}
        bundle = {
            "ociVersion": "1.0.2",
            "process": {"args": ["/bin/app", f"--password={SECRET}"], "env": [f"TOKEN={SECRET}"]},
            "annotations": annotations,
            "linux": {"cgroupsPath": f"{group(uid)}/{cid}", "resources": {"cpu": cpu}},
        }
        self.put(f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{cid}/config.json", json.dumps(bundle))
        cgroups = {"path": f"{group(uid)}/{cid}", "cpu_shares": 2, "cpuset_cpus": cpu["cpus"]}
        state = {"id": cid, "init_process_pid": 42, "config": {"cgroups": cgroups, "labels": [f"token={SECRET}"]}}
        self.put(f"run/containerd/runc/k8s.io/{cid}/state.json", json.dumps(state))

    def place(self) -> NodeEnvironment:
        found = find_place(self.config)
        assert found is not None
        return found

    @contextmanager
    def agent(self, config: Config | None = None) -> Iterator[Agent]:
        """The agent, built and closed; nothing of it runs by itself."""
        agent = Agent(config or self.config, self.place(), files=self.kernel)
        try:
            yield agent
        finally:
            agent.close()

    async def look(self, agent: Agent) -> None:
        """One whole look, with what is learnt made durable."""
        sampler, now = CpuSampler(), time.monotonic()
        for one in USAGE:
            reading = CpuReading(at_s=now - 1 + one.at, cpus=parse_stat(one.stat), pods=one.pods)
            agent.knowledge.take(cpu=sampler.sample(reading, CLASSES))
        await agent.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        agent.reconciler.ready.set()

    def document(self, *, killed: bool = False, mode: AgentMode = AgentMode.ENFORCE) -> dict[str, Any]:
        """What the daemon shows after two looks. ``killed``: it ends without a word, as by SIGKILL."""

        async def live() -> dict[str, Any]:
            with self.agent(replace(self.config, mode=mode)) as agent:
                if killed:
                    await agent.keeper._mark(running=True)
                await self.look(agent)
                agent.reconciler.wait_idle(container_id(BATCH), trio.current_time(), RuntimeEvent.STATE)
                await agent.reconciler.reconcile(agent.dirty.take_nowait())
                agent.alert("yield", "cpu.quota: left to systemd", None)
                await agent.keeper.flush()
                show = StatusReport(agent, FakePulse(), statuses=_components, reload=tuple)
                return _plain(show.state(()))

        return trio.run(live)


def _components() -> list[ComponentStatus]:
    return [ComponentStatus(name="reconciler", health=ComponentHealth.RUNNING)]


def _plain(found: Mapping[str, object]) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found, enc_hook=str))
    return answer
