"""A real program that a real quota throttles is lent more and gives it back. Only the machine's load is made up."""

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, final

import pytest
import trio
import yaml

from cgroupfs.files import REAL
from reconciler.config import load
from reconciler.config.environment import find_place
from reconciler.config.model import Config
from reconciler.daemon.agent import Agent
from reconciler.runtime.supervisor import Supervisor
from tests.daemon.process import configuration
from tests.daemon.writers import Scribe
from tests.fakes.node import Box, DirectoryNode, NodePod

LIMIT = 10_000
"""A tenth of a CPU: a machine that others use has that much left, and they hardly feel it."""
WITHIN_S = 30.0
CALM, FULL = 0.1, 1.0


@final
class Machine:
    """`FileOps` on the running kernel, but /proc/stat says what the test says."""

    def __init__(self) -> None:
        self.busy = CALM
        self._at = time.monotonic()
        self._spent = [0.0, 0.0]

    def read(self, directory: str, file: str) -> str:
        if directory != "/proc" or file != "stat":
            return REAL.read(directory, file)
        now = time.monotonic()
        # Fine ticks: rounding them is not what is tested.
        passed, self._at = (now - self._at) * 1e6, now
        self._spent = [self._spent[0] + passed * self.busy, self._spent[1] + passed * (1 - self.busy)]
        busy, idle = map(int, self._spent)
        return "cpu  0 0 0 0\n" + "".join(f"cpu{cpu} {busy} 0 0 {idle} 0 0 0 0 0 0\n" for cpu in (0, 1))

    def inode(self, directory: str) -> int:
        return REAL.inode(directory)

    def write(self, directory: str, file: str, text: str) -> None:
        REAL.write(directory, file, text)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return REAL.groups(directory, most)

    def files(self, directory: str) -> list[str]:
        return REAL.files(directory)


@contextmanager
def burning(node: DirectoryNode, box: Box) -> Iterator["subprocess.Popen[bytes]"]:
    """A program in one container that takes all the CPU it gets."""
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as program:
        try:
            for hierarchy in ("cpu", "cpuacct"):
                node.write(box.group, hierarchy, "cgroup.procs", str(program.pid))
            yield program
        finally:
            program.kill()


def config_of(node: DirectoryNode, tmp_path: Path, **policies: object) -> Config:
    """The node's configuration, with these policies as well; read five times a second."""
    base = configuration(node)
    del base["constants"]
    more = {"node": {**_section(base, "node"), "sample_s": 0.2}, "policies": _section(base, "policies") | policies}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(base | more))
    return load.load(str(file)).config


def _section(base: dict[str, object], name: str) -> dict[str, Any]:
    result = base[name]
    assert isinstance(result, dict)
    return result


@asynccontextmanager
async def running(config: Config, machine: Machine) -> AsyncIterator[Agent]:
    """The agent's own parts under its own supervisor, within this test."""
    place = find_place(config)
    assert place is not None
    agent = Agent(config, place, files=machine)
    supervisor = Supervisor(agent.components())
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            with trio.fail_after(WITHIN_S):
                await agent.control.reconciler.ready.wait()
            yield agent
            supervisor.stop("the end of the test")
    finally:
        agent.close()


async def until(question: Callable[[], object], function: Callable[[], object]) -> None:
    """Wait for an answer that is true, within a generous bound."""
    deadline = time.monotonic() + WITHIN_S
    while not question():
        assert time.monotonic() < deadline, function()
        await trio.sleep(0.01)


def web(node: DirectoryNode, **more: Any) -> NodePod:
    """An online pod of two containers with the limit of one tenth each; its directory has the sum."""
    pod = node.add("web", qos="burstable", shares=102, quota_us=LIMIT, containers=2, limits={"cpu": "100m"}, **more)
    node.write(pod.group, "cpu", "cpu.cfs_quota_us", str(2 * LIMIT))
    return pod


def forgotten(agent: Agent, pod: NodePod) -> bool:
    """True when nothing of ours is left in the pod."""
    return not any(agent.record.ledger.group(path) for path in (pod.group, *(box.group for box in pod.boxes)))


class Quotas:
    """What the kernel says of one pod."""

    def __init__(self, node: DirectoryNode, pod: NodePod) -> None:
        self._node, self._pod = node, pod

    def __call__(self) -> tuple[int, int, int]:
        """Main container, the other one, pod."""
        _, main, side = self._pod.boxes
        read = self._node.quota
        return int(read(main.group)), int(read(side.group)), int(read(self._pod.group))

    @property
    def main(self) -> int:
        return self()[0]

    def untouched(self) -> bool:
        return self() == (LIMIT, LIMIT, 2 * LIMIT)


BURST = {"enabled": True, "percent": 250, "threshold_percent": 60}


async def test_a_throttled_container_is_lent_quota_until_the_node_is_busy(node: DirectoryNode, tmp_path: Path) -> None:
    pod, machine = web(node), Machine()
    quotas = Quotas(node, pod)
    config = config_of(node, tmp_path, quota_burst=BURST)
    with burning(node, pod.main):
        async with running(config, machine) as agent:
            await until(lambda: quotas.main >= 2 * LIMIT, quotas)
            await until(lambda: quotas() == (25_000, LIMIT, 35_000), quotas)
            assert agent.alerts.raised == {}
            machine.busy = FULL
            await until(quotas.untouched, quotas)
            await until(lambda: forgotten(agent, pod), lambda: list(agent.record.ledger))
            machine.busy = CALM
            await until(lambda: quotas.main > LIMIT, quotas)


async def test_a_loan_ends_with_a_restore_and_with_the_next_start(node: DirectoryNode, tmp_path: Path) -> None:
    pod, machine = web(node), Machine()
    quotas = Quotas(node, pod)
    with burning(node, pod.main):
        on, off = config_of(node, tmp_path, quota_burst=BURST), config_of(node, tmp_path)
        async with running(on, machine) as agent:
            await until(lambda: quotas.main > LIMIT, quotas)
            assert all(result.ok for result in await agent.commands.restore())
            assert quotas.untouched()
        async with running(on, machine):
            await until(lambda: quotas.main > LIMIT, quotas)
        assert quotas.main > LIMIT, "a stop leaves what is in force"
        async with running(off, machine):
            await until(quotas.untouched, quotas)


async def test_a_resize_during_a_loan_is_the_base_of_the_loan_and_of_its_return(
    node: DirectoryNode, tmp_path: Path
) -> None:
    """The kubelet raises the pod's directory, then has the runtime raise the container."""
    pod, machine = web(node), Machine()
    quotas = Quotas(node, pod)
    with burning(node, pod.main), Scribe("kubelet") as kubelet:
        async with running(config_of(node, tmp_path, quota_burst=BURST), machine) as agent:
            if not agent.writes.attribution.status().ok:
                pytest.skip(f"REAL KERNEL TEST NOT RUN: {agent.writes.attribution.status().detail}")
            await until(lambda: quotas() == (25_000, LIMIT, 35_000), quotas)
            kubelet.write(node.path(pod.group, "cpu", "cpu.cfs_quota_us"), "60000")
            await until(lambda: quotas()[2] == 75_000, quotas)
            node.settle(pod.main, {"cpu": {"shares": 102, "period": 100_000, "quota": 50_000}, "memory": {}})
            await until(lambda: quotas.main > 50_000, quotas)
            agent.reconfigure(config_of(node, tmp_path))
            await until(lambda: quotas() == (50_000, LIMIT, 60_000), quotas)
