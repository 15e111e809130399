"""From counters to control files, second by second, on the strict fake kernel in both versions. Time is given."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, final

import pytest
from msgspec.structs import replace

from cgroupfs.files import FileOps
from cgroupfs.usage import UsageReader
from reconciler.control.sampler import Sampler
from reconciler.daemon.agent import Agent
from reconciler.policies.quota_burst import QuotaBurstConfig
from reconciler.policies.quota_turbo import QuotaTurboConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.workqueue import DirtyBatch
from tests.fakes.constants import varied
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group

MAIN = f"{group(WEB)}/{container_id(WEB)}"
OFF = PoliciesConfig()
BURST = PoliciesConfig(quota_burst=QuotaBurstConfig(enabled=True))
TURBO = PoliciesConfig(
    quota_turbo=varied(QuotaTurboConfig(enabled=True, every_online_pod=True), swing_window_s=2.0, interval_s=1.0)
)
LIMIT, POD = 10_000, 30_000
"""The pod's directory has more than its container: another one may come, and there is overhead."""


@final
class Counting:
    """The fake kernel, with /proc/stat and one container's counters as the test has them."""

    def __init__(self, kernel: FileOps) -> None:
        self._kernel = kernel
        self.used_us = 0
        self.hit = 0
        self.lost = False
        self.ticks: list[int] | None = [0, 0]

    def read(self, directory: Any, file: str) -> str:
        if str(directory).endswith("/proc"):
            if self.ticks is None:
                raise FileNotFoundError(2, "gone", file)
            return "cpu 0\n" + "".join(f"cpu{cpu} {self.ticks[0]} 0 0 {self.ticks[1]} 0\n" for cpu in range(8))
        if self.lost and file in {"cpuacct.usage", "cpu.stat"} and str(directory).endswith(MAIN):
            raise OSError(5, "EIO", file)
        text = self._kernel.read(directory, file)
        if file == "cpuacct.usage" and str(directory).endswith(MAIN):
            return f"{self.used_us * 1000}\n"
        if file == "cpu.stat" and str(directory).endswith(MAIN):
            rows = f"nr_periods {self.hit}\nnr_throttled {self.hit}\n"
            waited_us = self.hit * 50_000
            if "usage_usec" in text:
                return f"usage_usec {self.used_us}\n{rows}throttled_usec {waited_us}\n"
            return f"{rows}throttled_time {waited_us * 1000}\n"
        return text

    def __getattr__(self, name: str) -> Any:  # the rest of `FileOps`, as the fake kernel has it
        return getattr(self._kernel, name)


class Seconds:
    """An agent that evaluates on command, one second after the other."""

    def __init__(self, node: LiveNode, agent: Agent, files: Counting) -> None:
        self.agent, self.files = agent, files
        self._node = node
        self.now = 1000.0
        usage = UsageReader(agent.place.hierarchy, ops=files, clock=lambda: self.now)
        self.ticker = Sampler(
            agent.control.reconciler,
            usage,
            root=node.root,
            files=files,
            lagged=agent.control.counters.lag.observe,
            read=lambda _cpu, _now: None,
            sampled=lambda: None,
            harm=agent.accounts.sampler.harm,
            daemons=agent.accounts.sampler.daemons,
        )

    async def look(self) -> None:
        await self.agent.control.reconciler.reconcile(self.agent.hub.changed.take_nowait())

    async def next(self, *, busy: bool | None = False, used_us: int = 100_000, hit: int = 5) -> tuple[str, str]:
        """One second more, with the machine idle, busy or unreadable (None); the two quotas after it."""
        self.now += 1.0
        self.files.used_us += used_us
        self.files.hit += hit
        ticks = self.files.ticks or [0, 0]
        self.files.ticks = None if busy is None else [ticks[0] + 100 * busy, ticks[1] + 100 * (not busy)]
        self.ticker.tick(self.now, fast=False)
        await self.look()
        return self.quotas

    @property
    def quotas(self) -> tuple[str, str]:
        """Container's and pod's."""
        return self._node.quota(MAIN), self._node.quota(group(WEB))


@asynccontextmanager
async def looking(node: LiveNode, policies: PoliciesConfig) -> AsyncIterator[Seconds]:
    """An agent with these policies on a node whose online container has a limit of a tenth of a CPU."""
    files = Counting(node.kernel)
    agent = Agent(replace(node.config, policies=policies), node.place(), files=files)
    try:
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        agent.control.reconciler.ready.set()
        yield Seconds(node, agent, files)
    finally:
        agent.close()


@pytest.fixture(params=["v1", "v2"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    mode: KernelMode = request.param
    made = LiveNode(tmp_path, mode, files=False)
    for path, value in ((group(WEB), POD), (MAIN, LIMIT)):
        if mode == "v2":
            made.write(path, "cpu", "cpu.max", f"{value} 100000")
        else:
            made.write(path, "cpu", "cpu.cfs_quota_us", str(value))
    state = f"run/containerd/runc/k8s.io/{container_id(WEB)}/state.json"
    cgroups = {"path": MAIN, "cpu_shares": 2, "cpu_quota": LIMIT, "cpu_period": 100_000}
    made.put(state, json.dumps({"id": container_id(WEB), "init_process_pid": 42, "config": {"cgroups": cgroups}}))
    return made


def went_back(quotas: tuple[str, str]) -> bool:
    return quotas == (str(LIMIT), str(POD))


async def test_a_loan_grows_by_fifths_with_its_pod_and_goes_back_by_fifths(node: LiveNode) -> None:
    async with looking(node, BURST) as seconds:
        pairs = [await seconds.next() for _ in range(5)]
        container, pod = zip(*pairs, strict=True)
        assert container == ("10000", "12000", "14400", "17280", "20736")
        assert pod == ("30000", "32000", "34400", "37280", "40736")
        for _ in range(12):
            quotas = await seconds.next(busy=True)
        assert went_back(quotas)
        assert not seconds.agent.record.ledger.group(MAIN)
        assert not seconds.agent.record.ledger.group(group(WEB))


async def test_what_a_pod_is_lent_is_in_the_period_of_its_directory(node: LiveNode) -> None:
    if node.kernel.mode == "v2":
        node.write(group(WEB), "cpu", "cpu.max", f"{POD // 2} 50000")
    else:
        node.write(group(WEB), "cpu", "cpu.cfs_period_us", "50000")
        node.write(group(WEB), "cpu", "cpu.cfs_quota_us", str(POD // 2))
    async with looking(node, BURST) as seconds:
        await seconds.next()
        assert await seconds.next() == ("12000", "16000")


async def test_an_unreadable_machine_lends_nothing_and_takes_back_in_the_end(node: LiveNode) -> None:
    async with looking(node, BURST) as seconds:
        for _ in range(3):
            before = await seconds.next()
        for _ in range(4):
            after = await seconds.next(busy=None)
        assert after <= before
        for _ in range(20):
            after = await seconds.next(busy=None)
        assert went_back(after)


@pytest.mark.parametrize("policies", [BURST, TURBO], ids=["burst", "turbo"])
async def test_a_policy_that_is_switched_off_leaves_nothing(node: LiveNode, policies: PoliciesConfig) -> None:
    async with looking(node, policies) as seconds:
        for _ in range(6):
            await seconds.next(used_us=0, hit=0)
        for _ in range(3):
            quotas = await seconds.next()
        assert int(quotas[0]) > LIMIT
        assert int(quotas[1]) - POD == int(quotas[0]) - LIMIT
        seconds.agent.reconfigure(replace(seconds.agent.config, policies=OFF))
        await seconds.look()
        assert went_back(seconds.quotas)
        await seconds.next()
        assert seconds.agent.control.inventory.readings.lent_us == {}
        assert not seconds.agent.record.ledger.group(MAIN)


async def test_one_law_takes_over_from_the_other(node: LiveNode) -> None:
    async with looking(node, BURST) as seconds:
        for _ in range(4):
            quotas = await seconds.next()
        assert int(quotas[0]) > LIMIT
        seconds.agent.reconfigure(replace(seconds.agent.config, policies=TURBO))
        assert went_back(await seconds.next()), "nothing is saved up yet"
        for _ in range(4):
            await seconds.next(used_us=0, hit=0)
        for _ in range(3):
            quotas = await seconds.next()
        assert LIMIT < int(quotas[0]) <= 2 * LIMIT


async def test_quota_turbo_gives_back_what_it_lent_when_the_average_is_reached(node: LiveNode) -> None:
    async with looking(node, TURBO) as seconds:
        for _ in range(5):
            await seconds.next(used_us=0, hit=0)
        held, used = [], 0
        for _ in range(20):
            burns = int(seconds.quotas[0]) * 10
            used += burns
            held.append(int((await seconds.next(used_us=burns))[0]))
        assert max(held) == 2 * LIMIT
        assert held[-1] == LIMIT
        assert used <= 25 * LIMIT * 10, "on average over all of these seconds: its limit"


async def test_quota_turbo_lends_nothing_more_on_a_reading_that_it_has_had(node: LiveNode) -> None:
    async with looking(node, TURBO) as seconds:
        for _ in range(5):
            await seconds.next(used_us=0, hit=0)
        (before, _) = await seconds.next()
        assert LIMIT < int(before) < 2 * LIMIT, "it would grow with another such second"
        seconds.files.lost = True
        (after, _) = await seconds.next()
        assert int(after) <= int(before)
        seconds.files.lost = False
        for _ in range(3):
            (after, _) = await seconds.next()
        assert int(after) > int(before)


async def test_a_pod_that_goes_takes_its_loan_along(node: LiveNode) -> None:
    async with looking(node, BURST) as seconds:
        for _ in range(4):
            await seconds.next()
        node.kernel.remove_group(MAIN)
        node.kernel.remove_group(group(WEB))
        seconds.agent.hub.changed.mark_all("test")
        await seconds.look()
        seconds.now += 1.0
        seconds.ticker.tick(seconds.now, fast=False)
        await seconds.look()
        assert seconds.agent.control.inventory.readings.lent_us == {}
        assert len(seconds.ticker.bursts.burst) == 0


async def test_only_those_that_may_borrow_are_read(node: LiveNode) -> None:
    async with looking(node, BURST) as seconds:
        await seconds.next()
        await seconds.next()
        assert seconds.agent.control.inventory.readings.uses.keys() == {MAIN}
        assert seconds.ticker.bursts.interval_s() is None
        seconds.agent.reconfigure(replace(seconds.agent.config, policies=TURBO))
        assert seconds.ticker.bursts.interval_s() == 1.0
        await seconds.next()
        assert seconds.agent.control.inventory.readings.uses == {}
        assert BATCH in seconds.agent.control.inventory.pods
