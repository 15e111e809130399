"""When the sampler reads each second, and when half as often: by the agent on a fake node."""

import os
import time
from collections.abc import Callable
from typing import Any, final

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from reconciler.control.sampler import Sampler
from reconciler.daemon.agent import Agent
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.harm import HarmState
from reconciler.policies.node_daemons import NodeDaemonsConfig
from reconciler.policies.shared import PoolSizing, SharedConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.workqueue import TICK, DirtyBatch
from state.cpu import StartPlan
from state.model import NodeCpu
from tests.fakes.constants import varied
from tests.fakes.livenode import BATCH, LiveNode

ASLEEP = NodeCpu(busy_milli=100, online_milli=100, reclaimed_milli=0, idle={}, age_s=0.0)


def works(agent: Agent) -> None:
    agent.control.inventory.take(cpu=replace(ASLEEP, reclaimed_milli=500))


def is_unknown(agent: Agent) -> None:
    agent.control.inventory.take(cpu=None)


def cannot_read(agent: Agent) -> None:
    agent.accounts.sampler.problem = "/proc/stat: EIO"


def measures_harm(agent: Agent) -> None:
    agent.accounts.sampler.harm._state = HarmState(ceiling_milli=1000)


def starts(agent: Agent) -> None:
    plan = agent.control.reconciler.plan
    assert plan is not None
    agent.control.reconciler.plan = replace(plan, starts=StartPlan(pods=frozenset({BATCH})))


def configured(**sections: object) -> Callable[[Agent], None]:
    def use(agent: Agent) -> None:
        agent.control.reconciler.policies = replace(agent.control.reconciler.policies, **sections)

    return use


@pytest.mark.parametrize(
    "what",
    [
        works,
        is_unknown,
        cannot_read,
        measures_harm,
        starts,
        configured(node_daemons=NodeDaemonsConfig(enabled=True)),
        configured(be_memory=varied(BeMemoryConfig(enabled=True), interval_s=1.0)),
        configured(shared=SharedConfig(sizing=PoolSizing.MEASURED)),
    ],
)
def test_samples_are_taken_half_as_often_only_while_nothing_needs_them(
    live: LiveNode, what: Callable[[Agent], None]
) -> None:
    with live.agent() as agent:
        trio.run(live.look, agent)
        agent.control.inventory.take(cpu=ASLEEP)
        assert agent.accounts.sampler.interval_s(0.0) == 2.0
        what(agent)
        assert agent.accounts.sampler.interval_s(0.0) == 1.0


def test_without_a_plan_nothing_is_known(live: LiveNode) -> None:
    with live.agent() as agent:
        assert agent.accounts.sampler.interval_s(0.0) == 1.0


@final
class WithProc:
    """The fake kernel, and the files in /proc as they are on the disk."""

    def __init__(self, kernel: FileOps) -> None:
        self._kernel = kernel

    def read(self, directory: str, file: str) -> str:
        return (REAL if directory.endswith("/proc") else self._kernel).read(directory, file)

    def __getattr__(self, name: str) -> Any:  # the rest of `FileOps`, as the fake kernel has it
        return getattr(self._kernel, name)


def sampler_of(live: LiveNode, agent: Agent) -> Sampler:
    return Sampler(
        agent.control.reconciler,
        agent.usage,
        root=live.root,
        files=WithProc(live.kernel),
        lagged=lambda _seconds: None,
        read=lambda _cpu, _now: None,
        sampled=lambda: None,
        harm=agent.accounts.sampler.harm,
        daemons=agent.accounts.sampler.daemons,
    )


async def test_where_cpu_use_cannot_be_read_the_law_of_memory_and_the_plan_go_on(live: LiveNode) -> None:
    """/proc/stat may be another file system's, such as lxcfs, which fails while the kernel's own files can be read."""
    live.config = replace(live.config, policies=PoliciesConfig(be_memory=BeMemoryConfig(enabled=True)))
    live.put("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {40 << 20} kB\n")
    async with live.looked() as agent:
        sampler, inventory, worker = sampler_of(live, agent), agent.control.inventory, agent.control.reconciler
        start = time.monotonic()
        sampler.tick(start, fast=False)
        assert inventory.readings.reclaimed_memory_bytes == 90 << 30
        os.unlink(f"{live.root}/proc/stat")
        live.put("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {5 << 20} kB\n")
        agent.hub.changed.take_nowait()
        sampler.tick(start + 10, fast=False)
        assert sampler.problem is not None
        assert inventory.readings.node_memory is not None
        assert inventory.readings.node_memory.available_bytes == 5 << 30
        assert inventory.readings.reclaimed_memory_bytes == 10 << 30, "the floor: BE work uses nothing"
        assert agent.hub.changed.take_nowait().keys == {TICK}
        sampler.tick(start + 10.1, fast=True)
        assert not agent.hub.changed.take_nowait().keys, "each second, also beside the idle buffer's rounds"
        assert worker.plan is not None
        await worker.reconcile(DirtyBatch(frozenset({TICK}), ()))
        assert worker.plan.memory.reclaimed_high_bytes == 10 << 30
