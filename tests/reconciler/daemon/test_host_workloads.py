"""Host workloads in the agent, on the strict fake kernel: from groups to the budget's reason and the state document."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from reconciler.cli.exits import Exit
from reconciler.cli.main import main
from reconciler.config.model import HttpSection
from reconciler.daemon.agent import Agent
from reconciler.signals.host_config import HostWorkloadConfig
from reconciler.signals.host_meter import HostMeter
from reconciler.web.components import components
from state.hosts import CountsAs
from tests.fakes.kernel import IN_MODIFY, Event, FakeKernel
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.livenode import LiveNode
from tests.fakes.node import mounts_of
from tests.fakes.report import status_report
from tests.reconciler.signals.test_host_processes import V1, stat_text, status_text
from tests.reconciler.signals.test_runqueue import Answers

SECOND = 1_000_000_000


class NodeFiles:
    """The fake kernel's groups, and /proc as a directory."""

    def __init__(self, kernel: FakeKernel, root: str) -> None:
        self._kernel, self._proc = kernel, f"{root}/proc"

    def _of(self, directory: str) -> FileOps:
        of_proc = isinstance(directory, str) and directory.startswith(self._proc)
        return REAL if of_proc else cast(FileOps, self._kernel)

    def read(self, directory: str, file: str) -> str:
        return self._of(directory).read(directory, file)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return self._of(directory).groups(directory, most)

    def inode(self, directory: str) -> int:
        return self._of(directory).inode(directory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


class Beside:
    """A node with a group, a unit and a user's process beside its pods."""

    def __init__(self, path: Path, mode: KernelMode) -> None:
        self.live = LiveNode(path, mode)
        kernel = self.live.kernel
        for group in ("/batch", "/system.slice", "/system.slice/db.service"):
            kernel.make_group(group)
        self.live.config = replace(
            self.live.config,
            host_workloads={
                "scan": HostWorkloadConfig(match="cgroup:/bat*", counts_as=CountsAs.BE),
                "db": HostWorkloadConfig(match="unit:db", counts_as=CountsAs.VICTIM),
                "ci": HostWorkloadConfig(match="user:1001", counts_as=CountsAs.BE),
                "none": HostWorkloadConfig(match="docker:web", counts_as=CountsAs.VICTIM),
            },
        )
        self.now = time.monotonic()
        self.ticks = 100
        self.live.put("proc/77/status", status_text(uid=1001))
        self.live.put("proc/77/cgroup", V1.format("/user.slice"))
        self.live.put("proc/77/stat", stat_text(ticks=self.ticks))
        self.files = NodeFiles(kernel, self.live.root)

    @contextmanager
    def agent(self) -> Iterator[Agent]:
        agent = Agent(self.live.config, self.live.place(), files=cast(FileOps, self.files))
        try:
            yield agent
        finally:
            agent.close()

    def meter(self, agent: Agent) -> HostMeter:
        place = agent.place
        return HostMeter(
            agent.config.host_workloads,
            place.hierarchy,
            place.layout.kubepods,
            root=place.root,
            files=cast(FileOps, self.files),
            taskstats=Answers,
            clock=lambda: self.now,
        )

    def work(self) -> None:
        """A second in which the group uses half a CPU, the unit a tenth, and the user's process a fifth."""
        self.now += 1.0
        kernel = self.live.kernel
        mount = mounts_of(kernel).get("cpuacct", mounts_of(kernel)["cpu"])
        kernel.charge(f"{mount}/batch", cpu_ns=SECOND // 2)
        kernel.charge(f"{mount}/system.slice/db.service", cpu_ns=SECOND // 10)
        self.ticks += 20
        self.live.put("proc/77/stat", stat_text(ticks=self.ticks))

    def cpu_second(self) -> None:
        """Two of eight CPUs are busy since boot."""
        used = int(self.now * 100)
        rows = [f"cpu{cpu} {used if cpu < 2 else 0} 0 0 {0 if cpu < 2 else used} 0 0 0" for cpu in range(8)]
        self.live.put("proc/stat", "\n".join(["cpu  0 0 0 0", *rows, ""]))


@pytest.mark.parametrize("mode", ["v1", "hybrid", "v2"])
async def test_what_is_beside_the_pods_is_read_shown_and_never_written(tmp_path: Path, mode: KernelMode) -> None:
    node = Beside(tmp_path, mode)
    written: list[Event] = []
    node.live.kernel.subscribe(written.append)
    with node.agent() as agent:
        meter = node.meter(agent)
        sampler = agent.accounts.sampler
        await node.live.look(agent)
        for _ in range(3):
            node.work()
            node.cpu_second()
            agent.control.inventory.take(hosts=await meter.read(node.now))
            sampler.tick(node.now, fast=False)
        await meter.aclose()

        hosts = agent.control.inventory.readings.hosts
        uses = {name: host.value("cpu.use") for name, host in hosts.entries.items()}
        assert uses == {"scan": pytest.approx(500), "db": pytest.approx(100), "ci": pytest.approx(200), "none": None}
        assert hosts.be_milli == pytest.approx(700, abs=1)

        cpu = agent.control.inventory.readings.cpu
        assert cpu is not None
        assert cpu.host_be_milli == pytest.approx(700, abs=1)
        assert cpu.system_milli >= cpu.host_be_milli

        await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        show = status_report(agent)
        document: dict[str, Any] = dict(show.state(["agent", "hostlist", "budget", "settings"]))
        assert [row["name"] for row in document["hostlist"]] == ["ci", "db", "none", "scan"]
        assert document["agent"]["host_workloads"] == document["hostlist"]
        assert document["budget"]["used"]["host_be_milli"] == cpu.host_be_milli
        ours = [setting["path"] for setting in document["settings"]]
        assert ours
        assert not [path for path in ours if path.startswith(("/batch", "/system.slice"))]
    modified = [event.directory for event in written if event.mask & IN_MODIFY]
    assert any("kubepods" in path for path in modified), "the pods' groups are written"
    assert not [path for path in modified if "/batch" in path or "/system.slice" in path]


async def test_each_command_shows_them_as_rows_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = Beside(tmp_path, "v1")
    with node.agent() as agent:
        meter = node.meter(agent)
        await node.live.look(agent)
        for _ in range(3):
            node.work()
            agent.control.inventory.take(hosts=await meter.read(node.now))
        await meter.aclose()
        show = status_report(agent)
        with tempfile.TemporaryDirectory() as directory:
            socket = f"{directory}/s"

            async def run(*message: str) -> str:
                code = await trio.to_thread.run_sync(main, [*message, "--socket", socket])
                assert code == Exit.OK
                return capsys.readouterr().out

            async with trio.open_nursery() as nursery:
                (web,) = components(HttpSection(enabled=False, socket=socket), show, show)
                await nursery.start(web.run)
                pods = await run("pods", "--interval", "0")
                assert [line.split()[-1] for line in pods.splitlines() if "host:" in line][1] == "host:db"
                assert "host:none (no container of docker matches)" in pods
                top = await run("top", "--interval", "0.1")
                assert "BE       0.50 CPU" in top
                assert "and 1 more: bypassctl pods" in top
                why = await run("why", "host:db")
                assert "/system.slice/db.service" in why
                assert "0.10 CPU" in why
                status = await run("status")
                assert "4 host workloads: 2 victim, 2 BE that use 0.70 CPU; nothing matches: none" in status
                assert "host:" not in await run("diff")
                nursery.cancel_scope.cancel()
