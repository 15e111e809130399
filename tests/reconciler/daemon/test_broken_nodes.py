"""One broken node of each kind: every surface has it, and its end.

The daemon's list of problems, a metric, an alert, the document that the page reads, ``status``, ``why POD``, ``pods``,
``report`` and ``doctor``, the last of them by its own eyes and by the daemon's list.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from reconciler.alerts.agent_alerts import SourceHealth, claim_states, source_states
from reconciler.cli.asking import QueryResults, _ask_daemon
from reconciler.cli.checks import CheckState
from reconciler.cli.checks.agent import agent as agent_checks
from reconciler.cli.doctor import examine
from reconciler.cli.main import main, parser
from reconciler.cli.nodeview import inspect_node
from reconciler.config.model import AgentMode, Config, HttpSection
from reconciler.daemon.agent import Agent
from reconciler.sources.outside import groups_outside
from reconciler.web.components import components
from state.model import ContainerMeta, PodMeta, Resources
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, BOX, INNER, PINNED, WEB, LiveNode, container_id, group
from tests.fakes.report import status_report
from tests.reconciler.telemetry.rendered import render

OUTSIDE = f"kubepods-besteffort-pod{BATCH.replace('-', '_')}.slice:cri-containerd:{'a' * 64}"
SHIM = "run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/shim-binary-path"


def box(uid: str) -> str:
    return f"{group(uid)}/{container_id(uid)}"


class Fault(NamedTuple):
    """``source``: of metric and alert. ``text``: in each place.

    ``check``: doctor's own row, empty where it cannot see the fault without the daemon; ``found``: its own words.
    ``pods``: whose ``why`` has the text (``said``, where it has words of its own); ``quiet``: what no surface may say
    meanwhile.
    """

    source: str
    text: str
    make: Callable[[LiveNode], object]
    mend: Callable[[LiveNode], object]
    check: str = ""
    found: str = ""
    kernel: Mode = "v1"
    mode: AgentMode = AgentMode.ENFORCE
    batch_memory: bool = False
    pods: tuple[str, ...] = ()
    said: str = ""
    quiet: tuple[str, ...] = ()
    config: Callable[[LiveNode], Config] = lambda live: live.config


def stuck(live: LiveNode) -> None:
    """A group inside that cannot be narrowed, as with a deadline task in it, on the CPU of the pod that owns it."""
    live.widen()
    live.kernel.write = live.failing("write", INNER, "cpuset", "cpuset.cpus", errno.EBUSY)  # type: ignore[method-assign]


def unreadable(live: LiveNode) -> None:
    live.kernel.read = live.failing("read", BOX, "cpu", "cpu.shares")  # type: ignore[method-assign]


def narrowed(live: LiveNode) -> None:
    """The BE pod may run on one CPU of the BE pool, and on the CPU of the pod that owns it."""
    for path in ("/kubepods/besteffort", group(BATCH), BOX):
        live.write(path, "cpuset", "cpuset.cpus", "0-7")
    live.write(BOX, "cpuset", "cpuset.cpus", "6-7")
    live.write(group(BATCH), "cpuset", "cpuset.cpus", "6-7")


def partition(live: LiveNode) -> None:
    """A unit of the node takes the CPU that a pod owns."""
    live.kernel.make_group("/isolated.slice")
    live.write("/isolated.slice", "cpuset", "cpuset.cpus", "7")
    live.write("/isolated.slice", "cpuset", "cpuset.cpus.partition", "isolated")


FAULTS = {
    "an inner group's quota above the budget": Fault(
        source="bounds of pods",
        text=f"{INNER} inside it has 8 CPU",
        make=LiveNode.inner_quota,
        mend=lambda live: live.kernel.remove_group(os.path.dirname(INNER)),
        config=LiveNode.by_quota,
        pods=(BATCH,),
        quiet=("enforced as CPU quota",),
    ),
    "an inner group that cannot be narrowed": Fault(
        source="bounds of pods",
        text="CPU 7 of main is not exclusive: ci/batch-7 still runs there",
        make=stuck,
        mend=lambda live: delattr(live.kernel, "write"),
        check="CPU manager",
        found=f"main of pod {BATCH} may run on exclusive CPU 7",
        pods=(PINNED,),
        quiet=("BE containers are limited to the BE pool", "exclusive CPUs are those of the kernel's files"),
    ),
    "a pod's directory with a part of the BE pool": Fault(
        source="bounds of pods",
        text=f"ci/batch-7: cpu.set: its parent {group(BATCH)} has only CPU 6-7: of 5-6, CPU 6 is set",
        make=narrowed,
        mend=lambda live: live.write(group(BATCH), "cpuset", "cpuset.cpus", "0-7"),
        pods=(BATCH,),
        quiet=("CPU 7 of main is not exclusive",),
    ),
    "a container that cannot leave a CPU": Fault(
        source="bounds of pods",
        text="ci/batch-7: cpu.set: ",
        make=stuck,
        mend=lambda live: delattr(live.kernel, "write"),
        pods=(BATCH,),
        quiet=("BE containers are limited to the BE pool",),
    ),
    "a limit without an OOM killer": Fault(
        source="bounds of pods",
        text="oom_kill_disable 1: at a limit its processes stop for ever",
        make=lambda live: live.write(BOX, "memory", "memory.oom_control", "1"),
        mend=lambda live: live.write(BOX, "memory", "memory.oom_control", "0"),
        batch_memory=True,
        pods=(BATCH,),
    ),
    "a control file that cannot be read": Fault(
        source="unreadable files",
        text=f"{BOX}: cpu.weight: ",
        make=unreadable,
        mend=lambda live: delattr(live.kernel, "read"),
        pods=(BATCH,),
    ),
    "a checkpoint that no file has": Fault(
        source="placement",
        text="CPU 7, its CPU set file has CPU 1-6",
        make=lambda live: live.write(box(PINNED), "cpuset", "cpuset.cpus", "1-6"),
        mend=lambda live: live.write(box(PINNED), "cpuset", "cpuset.cpus", "7"),
        check="CPU manager",
        pods=(PINNED,),
        quiet=("exclusive CPUs are those of the kernel's files",),
    ),
    "another container on exclusive CPUs": Fault(
        source="placement",
        text="web-0/main may run on CPU 7",
        make=lambda live: live.write(box(WEB), "cpuset", "cpuset.cpus", "0-7"),
        mend=lambda live: live.write(box(WEB), "cpuset", "cpuset.cpus", "0-6"),
        check="CPU manager",
        found=f"main of pod {WEB} may run on exclusive CPU 7",
        pods=(PINNED,),
        quiet=("exclusive CPUs are those of the kernel's files",),
    ),
    "a controller taken out": Fault(
        source="cgroup controllers",
        text=f"cpuset is not in cgroup.subtree_control of {group(BATCH)}",
        make=lambda live: live.write(group(BATCH), "cpuset", "cgroup.subtree_control", "-cpuset"),
        mend=lambda live: live.write(group(BATCH), "cpuset", "cgroup.subtree_control", "+cpuset"),
        check="kubepods",
        pods=(BATCH,),
        kernel="v2",
        mode=AgentMode.OBSERVE,
    ),
    "another cgroup driver": Fault(
        source="cgroup driver",
        text="outside",
        make=lambda live: os.makedirs(f"{live.root}/sys/fs/cgroup/cpuset/{OUTSIDE}"),
        mend=lambda live: os.rmdir(f"{live.root}/sys/fs/cgroup/cpuset/{OUTSIDE}"),
        check="kubepods",
        pods=(BATCH,),
        said="its container is outside of its directory, in /kubepods-besteffort-pod",
    ),
    "a budget without a record": Fault(
        source="values of an earlier run",
        text="/kubepods/besteffort/cpu.cfs_quota_us is 10000",
        make=lambda live: live.write("/kubepods/besteffort", "cpu", "cpu.cfs_quota_us", "10000"),
        mend=lambda live: live.write("/kubepods/besteffort", "cpu", "cpu.cfs_quota_us", "-1"),
        mode=AgentMode.OBSERVE,
    ),
    "a container's quota without a record": Fault(
        source="values of an earlier run",
        text=f"{BOX}/cpu.cfs_quota_us is 5000",
        make=lambda live: live.write(BOX, "cpu", "cpu.cfs_quota_us", "5000"),
        mend=lambda live: live.write(BOX, "cpu", "cpu.cfs_quota_us", "-1"),
        mode=AgentMode.OBSERVE,
        pods=(BATCH,),
    ),
    "a CPU that left before the start": Fault(
        source="limits and CPU sets",
        text="its CPU set 0-6 lacks CPU 7 of the group above",
        make=lambda live: live.write(group(WEB), "cpuset", "cpuset.cpus", "0-6"),
        mend=lambda live: live.write(group(WEB), "cpuset", "cpuset.cpus", "0-7"),
        pods=(WEB,),
    ),
    "a partition beside the pods": Fault(
        source="limits and CPU sets",
        text="its CPU set 7 is not in effect, it runs on CPU 0-6: /isolated.slice is a CPU partition (isolated)",
        make=partition,
        mend=lambda live: live.write("/isolated.slice", "cpuset", "cpuset.cpus.partition", "member"),
        kernel="v2",
        pods=(PINNED,),
    ),
    "a partition that the kernel does not grant": Fault(
        source="limits and CPU sets",
        text="asks to be: root invalid (Parent is not a partition root)",
        make=lambda live: live.write(BOX, "cpuset", "cpuset.cpus.partition", "root"),
        mend=lambda live: live.write(BOX, "cpuset", "cpuset.cpus.partition", "member"),
        kernel="v2",
        pods=(BATCH,),
    ),
    "a limit in gVisor that no group can have": Fault(
        source="pods in gVisor or kata",
        text="batch-7 in gVisor: no memory.max (the node's other pods bear what it uses beyond its limit)",
        make=lambda live: live.put(SHIM.format(container_id(BATCH)), "/usr/bin/containerd-shim-runsc-v1"),
        mend=lambda live: os.remove(f"{live.root}/{SHIM.format(container_id(BATCH))}"),
        batch_memory=True,
        pods=(BATCH,),
    ),
}


class Scene:
    """The agent on a broken node, with its web part on a socket."""

    def __init__(self, live: LiveNode, agent: Agent, clock: MockClock, capsys: pytest.CaptureFixture[str]) -> None:
        self.live, self.agent, self.clock = live, agent, clock
        self.report = status_report(agent)
        self.health = SourceHealth(60)
        self.socket = ""
        self._capsys = capsys

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory() as directory:
            self.socket = f"{directory}/s"
            async with trio.open_nursery() as nursery:
                (web,) = components(HttpSection(enabled=False, socket=self.socket), self.report, self.report)
                await nursery.start(web.run)
                yield
                nursery.cancel_scope.cancel()

    async def look(self) -> None:
        """What the daemon does within a minute."""
        for _ in range(4):
            for uid in self.agent.control.inventory.pods:
                self.agent.control.inventory.refresh(container_id(uid))
            await self.live.look_again(self.agent)
            self.agent.sources.outside = groups_outside(self.agent.place.hierarchy)
            await self.agent.control.owner_check.check()
            await self.agent.control.owner_check.limits.check(
                self.agent.control.inventory.pods, self.agent.control.inventory.readings.kubelet.policy
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
        states = [
            *source_states(self.agent.watched()),
            *claim_states(self.agent.control.claims(), self.agent.control.inventory.pods),
        ]
        return [f"{alert.resolved} {alert.labels['source']}" for alert in self.health.check(states, now, 0.0)]

    async def command(self, *words: str) -> str:
        """The output of ``bypassctl`` as one line."""
        await trio.to_thread.run_sync(main, [*words, "--socket", self.socket])
        return " ".join(self._capsys.readouterr().out.split())

    async def doctor_of_daemon(self) -> tuple[CheckState, str]:
        """Doctor's row of the running daemon's problems."""
        node = replace(
            inspect_node(parser("doctor").parse_args(["doctor", "--root", self.live.root])), socket=self.socket
        )
        results = QueryResults()
        await trio.to_thread.run_sync(_ask_daemon, node, results)
        (row,) = (row for row in agent_checks(node, results) if row.name == "problems")
        return row.state, row.found

    async def page(self) -> str:
        """The document by which the page shows what the node lacks, and its pods."""
        sections = "agent,holds,history,sources,alerts,interference,eviction,problems,pods,budget"
        document: Any = msgspec.to_builtins(self.report.state(tuple(sections.split(","))), enc_hook=str)
        shown = [*document["problems"], *(text for pod in document["pods"] for text in pod["problems"])]
        return "\n".join([*shown, *document["budget"].get("reasons", {}).values()])

    async def everywhere(self) -> dict[str, str]:
        """The text of each surface for people."""
        surfaces = {"page": await self.page(), "status": await self.command("status")}
        for uid in (WEB, BATCH, PINNED):
            surfaces[uid] = await self.command("why", uid)
        return surfaces

    async def minute(self) -> str:
        """The report after one more minute."""
        self.agent.accounts.effect.hours.clear()
        self.agent.accounts.effect.minute([])
        return await self.command("report")


def doctors(live: LiveNode, check: str, text: str) -> bool:
    rows = examine(inspect_node(parser("doctor").parse_args(["doctor", "--root", live.root])))
    (row,) = (result for result in rows if result.name == check)
    return row.state is CheckState.WARN and text in row.found


def with_batch_memory(agent: Agent) -> None:
    """The BE pod's limit is known, by the pod list."""
    limits = Resources(batch_memory_bytes=1 << 28)
    meta = PodMeta(uid=BATCH, source="kubelet", name="batch-7", namespace="ci", labels={}, annotations={})
    declared = replace(meta, containers=(ContainerMeta(name="main", limits=limits), ContainerMeta(name="b")))
    agent.sources.metadata.set_manifests([declared])


NOT_IN_FORCE = "1 of them with a setting or a claim not in force"


@pytest.mark.usefixtures("short_samples")
@pytest.mark.parametrize("name", FAULTS)
async def test_every_surface_has_the_fault_and_its_end(
    tmp_path: Path, name: str, mock_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    live = LiveNode(tmp_path, fault.kernel)
    mock_clock.rate = 1.0  # the web part waits, too
    live.least_weight(group(BATCH))
    fault.make(live)
    config = replace(fault.config(live), mode=fault.mode)
    with live.agent(config) as agent:
        scene = Scene(live, agent, mock_clock, capsys)
        if fault.batch_memory:
            with_batch_memory(agent)
        async with scene.served():
            await scene.look()
            assert scene.problems(fault.text), scene.report.state(("problems",))["problems"]
            assert scene.metric(fault.source) in {"0", "0.0"}
            scene.alerts(0.0)
            assert f"False {fault.source}" in scene.alerts(60.0)
            if fault.check:
                assert doctors(live, fault.check, fault.found or fault.text)
            state, found = await scene.doctor_of_daemon()
            assert state is CheckState.WARN
            assert fault.text in found
            surfaces = await scene.everywhere()
            for surface in ("page", "status"):
                assert fault.text in surfaces[surface], surfaces[surface]
            for uid in fault.pods:
                assert (fault.said or fault.text) in surfaces[uid], surfaces[uid]
            for quiet in fault.quiet:
                assert [surface for surface, text in surfaces.items() if quiet in text] == []
            enforced = fault.mode is AgentMode.ENFORCE
            assert (NOT_IN_FORCE in await scene.minute()) == enforced

            fault.mend(live)
            await scene.look()
            assert not scene.problems(fault.text)
            assert scene.metric(fault.source) in {"1", "1.0", "not there"}
            assert f"True {fault.source}" in scene.alerts(120.0)
            if fault.check:
                assert not doctors(live, fault.check, fault.found or fault.text)
            assert fault.text not in (await scene.doctor_of_daemon())[1]
            surfaces = await scene.everywhere()
            assert [surface for surface, text in surfaces.items() if fault.text in text] == []
            assert NOT_IN_FORCE not in await scene.minute()
