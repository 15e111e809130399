"""One broken node of each kind: problems, metrics, alerts and doctor agree on it, and on its end."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from trio.testing import MockClock

from reconciler.alerts.source_health import SourceHealth, claim_states, source_states
from reconciler.cli.checks.finding import CheckState
from reconciler.cli.doctor import examine
from reconciler.cli.nodeview import inspect_node
from reconciler.cli.options import parser
from reconciler.config.model import AgentMode
from reconciler.daemon.agent import Agent
from reconciler.daemon.status import StatusReport
from reconciler.sources.outside import groups_outside
from state.model import ContainerMeta, PodMeta, Resources
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, PINNED, WEB, LiveNode, container_id, group
from tests.fakes.web import FakePulse
from tests.reconciler.telemetry.rendered import render

OUTSIDE = f"kubepods-besteffort-pod1.slice:cri-containerd:{'a' * 64}"
SHIM = "run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/shim-binary-path"


def box(uid: str) -> str:
    return f"{group(uid)}/{container_id(uid)}"


class Fault(NamedTuple):
    """``source``: of metric and alert. ``text``: in each place.

    ``check``: doctor's row, empty where it cannot see the fault; ``found``: its own words.
    """

    source: str
    text: str
    make: Callable[[LiveNode], object]
    mend: Callable[[LiveNode], object]
    check: str = ""
    found: str = ""
    kernel: Mode = "v1"
    mode: AgentMode = AgentMode.ENFORCE
    sandboxed: bool = False


FAULTS = {
    "a checkpoint that no file has": Fault(
        source="placement",
        text="CPU 7, its CPU set file has CPU 1-6",
        make=lambda live: live.write(box(PINNED), "cpuset", "cpuset.cpus", "1-6"),
        mend=lambda live: live.write(box(PINNED), "cpuset", "cpuset.cpus", "7"),
        check="CPU manager",
    ),
    "another container on exclusive CPUs": Fault(
        source="placement",
        text="web-0/main may run on CPU 7",
        make=lambda live: live.write(box(WEB), "cpuset", "cpuset.cpus", "0-7"),
        mend=lambda live: live.write(box(WEB), "cpuset", "cpuset.cpus", "0-6"),
        check="CPU manager",
        found=f"main of pod {WEB} may run on exclusive CPU 7",
    ),
    "a controller taken out": Fault(
        source="cgroup controllers",
        text=f"cpuset is not in cgroup.subtree_control of {group(BATCH)}",
        make=lambda live: live.write(group(BATCH), "cpuset", "cgroup.subtree_control", "-cpuset"),
        mend=lambda live: live.write(group(BATCH), "cpuset", "cgroup.subtree_control", "+cpuset"),
        check="kubepods",
        kernel="v2",
        mode=AgentMode.OBSERVE,
    ),
    "another cgroup driver": Fault(
        source="cgroup driver",
        text="outside",
        make=lambda live: os.makedirs(f"{live.root}/sys/fs/cgroup/cpuset/{OUTSIDE}"),
        mend=lambda live: os.rmdir(f"{live.root}/sys/fs/cgroup/cpuset/{OUTSIDE}"),
        check="kubepods",
    ),
    "a budget without a record": Fault(
        source="values of an earlier run",
        text="/kubepods/besteffort/cpu.cfs_quota_us is 10000",
        make=lambda live: live.write("/kubepods/besteffort", "cpu", "cpu.cfs_quota_us", "10000"),
        mend=lambda live: live.write("/kubepods/besteffort", "cpu", "cpu.cfs_quota_us", "-1"),
        mode=AgentMode.OBSERVE,
    ),
    "a CPU that left before the start": Fault(
        source="limits and CPU sets",
        text="its CPU set 0-6 lacks CPU 7 of the group above",
        make=lambda live: live.write(group(WEB), "cpuset", "cpuset.cpus", "0-6"),
        mend=lambda live: live.write(group(WEB), "cpuset", "cpuset.cpus", "0-7"),
    ),
    "a limit in gVisor that no group can have": Fault(
        source="pods in gVisor or kata",
        text="batch-7 in gVisor: no memory.max (the node's other pods bear what it uses beyond its limit)",
        make=lambda live: live.put(SHIM.format(container_id(BATCH)), "/usr/bin/containerd-shim-runsc-v1"),
        mend=lambda live: os.remove(f"{live.root}/{SHIM.format(container_id(BATCH))}"),
        sandboxed=True,
    ),
}


class Scene:
    """The agent on a broken node."""

    def __init__(self, live: LiveNode, agent: Agent, clock: MockClock) -> None:
        self.live, self.agent, self.clock = live, agent, clock
        self.report = StatusReport(agent, FakePulse(), statuses=list, reload=tuple)
        self.health = SourceHealth(60)

    async def look(self) -> None:
        """What the daemon does within a minute."""
        for _ in range(3):
            for uid in self.agent.inventory.pods:
                self.agent.inventory.refresh(container_id(uid))
            await self.live.look(self.agent)
            self.agent.outside = groups_outside(self.agent.place.hierarchy)
            await self.agent.owner_check.check()
            await self.agent.owner_check.limits.check(
                self.agent.inventory.pods, self.agent.inventory.readings.kubelet.policy
            )
            self.clock.jump(10.1)
        await self.live.look(self.agent)

    def problems(self, text: str) -> list[str]:
        problems = self.report.state(("problems",))["problems"]
        assert isinstance(problems, list)
        return [line for line in problems if text in line]

    def metric(self, source: str) -> str:
        text = render(self.report.metrics())[0].decode()
        rows = [line for line in text.splitlines() if f'source_up{{source="{source}"}}' in line]
        return rows[0].split()[-1] if rows else "not there"

    def alerts(self, now: float) -> list[str]:
        states = [*source_states(self.agent._watched()), *claim_states(self.agent.claims(), self.agent.inventory.pods)]
        return [f"{alert.resolved} {alert.labels['source']}" for alert in self.health.check(states, now, 0.0)]


def doctors(live: LiveNode, check: str, text: str) -> bool:
    rows = examine(inspect_node(parser().parse_args(["doctor", "--root", live.root])))
    (row,) = (result for result in rows if result.name == check)
    return row.state is CheckState.WARN and text in row.found


@pytest.mark.parametrize("name", FAULTS)
async def test_every_surface_has_the_fault_and_its_end(tmp_path: Path, name: str, mock_clock: MockClock) -> None:
    fault = FAULTS[name]
    live = LiveNode(tmp_path, fault.kernel)
    live.least_weight(group(BATCH))
    fault.make(live)
    with live.agent(replace(live.config, mode=fault.mode)) as agent:
        scene = Scene(live, agent, mock_clock)
        if fault.sandboxed:
            declared = (
                ContainerMeta(name="main", limits=Resources(batch_memory_bytes=1 << 28)),
                ContainerMeta(name="b"),
            )
            meta = PodMeta(uid=BATCH, source="kubelet", name="batch-7", namespace="ci", labels={}, annotations={})
            with_containers = replace(meta, containers=declared)
            agent.inventory._metas = lambda uid: [with_containers] if uid == BATCH else []
        await scene.look()
        assert scene.problems(fault.text), scene.report.state(("problems",))
        assert scene.metric(fault.source) in {"0", "0.0"}
        scene.alerts(0.0)
        assert f"False {fault.source}" in scene.alerts(60.0)
        if fault.check:
            assert doctors(live, fault.check, fault.found or fault.text)
        fault.mend(live)
        await scene.look()
        assert not scene.problems(fault.text)
        assert scene.metric(fault.source) in {"1", "1.0", "not there"}
        assert f"True {fault.source}" in scene.alerts(120.0)
        if fault.check:
            assert not doctors(live, fault.check, fault.found or fault.text)
