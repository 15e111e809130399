"""From what online pods wait to control files, on the strict fake kernel in both versions. Time is given."""

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from cgroupfs.usage import UsageReader
from reconciler.actuators.base import AuxiliaryActuator, PlanSnapshot
from reconciler.control.harm_watch import HarmWatch
from reconciler.control.reconciler import Reconciler
from reconciler.control.sampler import Sampler
from reconciler.daemon.agent import Agent
from reconciler.policies.budget import BudgetConfig, BudgetLaw
from reconciler.policies.capacity import ANNOTATION, CapacityConfig
from reconciler.policies.harm import HarmConfig
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.waiting import PodWaiting
from reconciler.runtime.workqueue import DirtyBatch
from reconciler.signals.host_meter import HostVictim
from state.cpu import HarmReading, HarmTerms
from state.model import NodeCpu, Pod, PodClass, Pools
from tests.fakes.constants import varied
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.livenode import BATCH, WEB, LiveNode, group
from tests.reconciler.nodes import pod

POLICIES = PoliciesConfig(idle_class=IdleClassConfig(enabled=True))
CALM = PodWaiting(500.0, 1.0)
UNLIMITED = {"max", "-1"}
HARM = PodWaiting(500.0, 500.0)


class Waits:
    """A `WaitSource`."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.now: PodWaiting | None = CALM
        self.hosts = CALM
        self.asked: list[list[str]] = []
        self.listed: Mapping[str, Sequence[int]] = {}

    async def sample(
        self,
        pods: Mapping[str, Pod],
        first: Collection[str],
        listed: Mapping[str, Sequence[int]],
        *,
        most_pods: int,
        most_processes: int,
    ) -> dict[str, PodWaiting] | None:
        del first, most_pods, most_processes
        self.listed = listed
        self.asked.append(sorted(pods))
        await trio.lowlevel.checkpoint()
        return None if self.now is None else {**dict.fromkeys(pods, self.now), **dict.fromkeys(listed, self.hosts)}

    def close(self) -> None:
        """Holds nothing."""


class Rounds:
    """An agent with a watch, round after round of a tenth of a second, and BE work that uses all it may."""

    def __init__(self, node: LiveNode, agent: Agent) -> None:
        self.node, self.agent = node, agent
        self.waits = Waits()
        self.hosts: dict[str, HostVictim] = {}
        self.now = time.monotonic()
        self.be_ns = 0
        self.want_milli: int | None = None
        usage = UsageReader(agent.place.hierarchy, ops=node.kernel, clock=lambda: self.now)
        usage.cpu_ns = lambda path: self.be_ns if path == agent.control.inventory.besteffort else 0  # type: ignore[method-assign]  # counters by hand
        self.watch = HarmWatch(agent.control.reconciler, usage, wait=lambda: self.waits, hosts=lambda: self.hosts)

    async def next(self, times: int = 1) -> HarmReading | None:
        for _ in range(times):
            self.now += 0.1
            used = self.pools.budget_milli if self.want_milli is None else self.want_milli
            self.be_ns += used * 100_000
            await self.watch.round(self.now)
            await self.look()
        return self.agent.control.inventory.readings.harm

    async def look(self) -> None:
        if (batch := self.agent.hub.changed.take_nowait()) is not None:
            await self.agent.control.reconciler.reconcile(batch)

    async def cut(self) -> HarmReading:
        """BE work has risen to the top, and harms."""
        await self.next(150)
        self.waits.now = HARM
        reading = await self.next()
        assert reading is not None
        return reading

    @property
    def pools(self) -> Pools:
        pools = self.agent.control.reconciler.pools
        assert pools is not None
        return pools

    @property
    def terms(self) -> HarmTerms:
        assert self.pools.harm is not None
        return self.pools.harm

    @property
    def in_force(self) -> bool:
        return self.pools.harm is not None and self.terms.in_force

    @property
    def quota(self) -> str:
        return self.node.quota(self.agent.control.inventory.besteffort)

    @property
    def limited(self) -> bool:
        return self.quota not in UNLIMITED


@asynccontextmanager
async def watching(node: LiveNode, policies: PoliciesConfig = POLICIES) -> AsyncIterator[Rounds]:
    agent = Agent(replace(node.config, policies=policies), node.place(), files=node.kernel)
    try:
        for _ in range(2):
            await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        agent.control.reconciler.ready.set()
        yield Rounds(node, agent)
    finally:
        agent.close()


@pytest.fixture(params=["v1", "v2"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    mode: KernelMode = request.param
    return LiveNode(tmp_path, mode, files=False)


def test_a_removed_pod_adds_nothing_to_the_use_of_be_work() -> None:
    """An online pod in besteffort was subtracted with its whole counter, and a BE pod elsewhere added with its own."""
    beside = pod("beside", cls=PodClass.SHARED)
    outside = pod("outside", qos=QosClass.BURSTABLE)
    second = 10**9
    counters = {"/be": 9000 * second, beside.group.path: 5000 * second, outside.group.path: 7000 * second}
    inventory = SimpleNamespace(besteffort="/be", table={})
    reconciler, usage = SimpleNamespace(inventory=inventory), SimpleNamespace(cpu_ns=counters.get)
    watch = HarmWatch(cast(Reconciler, reconciler), cast(UsageReader, usage), wait=Waits)
    found = []
    # They come, are read twice, and go; the directory made again counts from 0.
    for at, pods in enumerate([(), (beside, outside), (beside, outside), (), ()]):
        inventory.table = {item.uid: item for item in pods}
        found.append(watch._use(float(at)))
        for path, grown in zip(counters, (3, 1, 2), strict=True):
            counters[path] += grown * second
    assert found == [None, 3000, 4000, 3000, 3000]
    counters["/be"] = second
    assert watch._use(5.0) is None


async def test_it_rises_to_the_top_and_the_quota_ends(node: LiveNode) -> None:
    async with watching(node) as rounds:
        assert rounds.limited
        reading = await rounds.next(150)
        assert reading is not None
        assert rounds.in_force
        assert reading.ceiling_milli == rounds.terms.top_milli
        assert not rounds.limited


async def test_the_nodes_counters_are_read_each_five_seconds_while_the_law_takes_nothing(node: LiveNode) -> None:
    async with watching(node) as rounds:
        agent, sampler = rounds.agent, rounds.agent.accounts.sampler
        sampler.harm = rounds.watch
        await rounds.next(150)
        agent.control.inventory.take(cpu=NodeCpu(busy_milli=0, online_milli=0, reclaimed_milli=500, idle={}, age_s=0.0))
        assert sampler.interval_s(rounds.now) == 5.0
        policies = agent.control.reconciler.policies
        agent.control.reconciler.policies = replace(policies, capacity=CapacityConfig(enabled=True))
        assert sampler.interval_s(rounds.now) == 1.0
        agent.control.reconciler.policies = policies
        assert sampler.interval_s(rounds.now) == 5.0
        rounds.waits.now = None
        await rounds.next()
        assert sampler.interval_s(rounds.now) == 1.0
        rounds.waits.now = CALM
        await rounds.next(150)
        assert sampler.interval_s(rounds.now) == 5.0
        rounds.waits.now = HARM
        await rounds.next(3)
        assert sampler.interval_s(rounds.now) == 1.0


async def test_only_pods_that_share_cpus_with_be_are_measured(node: LiveNode) -> None:
    async with watching(node) as rounds:
        await rounds.next(2)
        assert rounds.waits.asked[-1] == [WEB]


async def test_a_host_workload_takes_part_where_it_shares_cpus_with_be(node: LiveNode) -> None:
    async with watching(node) as rounds:
        agent, uid = rounds.agent, "host:db /system.slice/db.service"
        pod = replace(agent.control.inventory.pods[WEB], uid=uid, containers=())
        rounds.hosts = {
            uid: HostVictim(pod, (21, 22), EMPTY),
            "host:far /far": HostVictim(pod, (23,), CpuSet([4711])),
        }
        await rounds.next(60)
        assert rounds.waits.listed == {uid: (21, 22)}
        assert rounds.waits.asked[-1] == [WEB, uid]
        rounds.waits.hosts = HARM
        reading = await rounds.next()
        assert reading is not None
        assert (reading.cuts, reading.uid) == (1, "host:db")
        facts = rounds.watch.facts()
        assert facts is not None
        assert facts["worst_uid"] == "host:db"


@pytest.mark.parametrize("form", list(ReclaimedForm))
async def test_harm_cuts_at_once_and_names_the_pod(node: LiveNode, form: ReclaimedForm) -> None:
    """By whole CPUs, or where only a quota is configured by that."""
    law = ReclaimedConfig(form=form)
    async with watching(node, replace(POLICIES, reclaimed=law)) as rounds:
        reading = await rounds.cut()
        assert reading.ceiling_milli == rounds.terms.top_milli // 2
        assert (reading.uid, reading.waits_percent, rounds.watch.cuts) == (WEB, 50.0, 1)
        assert len(rounds.pools.reclaimed) == reading.ceiling_milli // 1000
        assert rounds.pools.confined is not rounds.limited is (form is ReclaimedForm.QUOTA)


async def test_be_work_that_grows_again_after_a_cut_is_not_said_to_be_cut(node: LiveNode) -> None:
    async with watching(node) as rounds:
        cut = await rounds.cut()
        assert rounds.pools.reasons["budget"].startswith("cut, because online pods waited")
        assert rounds.pools.reasons["law"].startswith("harm: cut to ")
        rounds.waits.now = CALM
        reading: HarmReading | None = cut
        while reading is not None and reading.ceiling_milli <= cut.ceiling_milli:
            reading = await rounds.next()
        assert reading is not None
        assert cut.ceiling_milli < reading.ceiling_milli < rounds.terms.top_milli
        assert rounds.pools.reasons["budget"] == "grows, as no online pod waits for it"
        assert rounds.pools.reasons["law"].endswith("so far, as no online pod waits because of it")
        assert (await rounds.cut()).grown is False
        assert rounds.pools.reasons["budget"].startswith("cut, because online pods waited")


async def test_idle_cpu_time_that_a_cut_keeps_from_be_work_is_counted(node: LiveNode) -> None:
    async with watching(node) as rounds:
        reading, top = await rounds.cut(), rounds.terms.top_milli
        online = 1000 * len(rounds.agent.control.inventory.readings.topology.online)
        idle = (top - reading.ceiling_milli) // 2
        use = NodeCpu(busy_milli=online - idle, online_milli=0, reclaimed_milli=0, idle={}, age_s=0.0)
        rounds.agent.control.inventory.take(cpu=use)
        rounds.want_milli = reading.ceiling_milli
        assert rounds.watch.withheld_s == 0.0
        await rounds.next()
        assert rounds.watch.withheld_s == pytest.approx(idle / 1000 * 0.1), "no more than what was idle"
        rounds.want_milli = 0
        await rounds.next(2)
        counted = rounds.watch.withheld_s
        await rounds.next(3)
        assert rounds.watch.withheld_s == counted, "BE work wants no more"


@pytest.mark.parametrize(("form", "floor"), [(ReclaimedForm.BOTH, 1000), (ReclaimedForm.QUOTA, 160)])
async def test_waiting_that_stays_when_be_is_at_its_minimum_is_the_pods_own(
    node: LiveNode, form: ReclaimedForm, floor: int
) -> None:
    """By whole CPUs no cut takes the last one: there BE work is at its minimum."""
    law = ReclaimedConfig(form=form)
    async with watching(node, replace(POLICIES, reclaimed=law)) as rounds:
        await rounds.cut()
        reading = await rounds.next(260)
        assert reading is not None
        assert rounds.terms.floor_milli == floor
        assert reading.cuts
        assert reading.ceiling_milli == rounds.terms.top_milli


async def test_a_comparison_is_at_the_minimum_is_explained_and_ends(node: LiveNode) -> None:
    harm = varied(HarmConfig(), compare_s=1.0, compare_after_s=2.0)
    law = ReclaimedConfig(budget=BudgetConfig(harm=harm), form=ReclaimedForm.QUOTA)
    async with watching(node, replace(POLICIES, reclaimed=law)) as rounds:
        await rounds.next(150)
        seen: list[tuple[bool, bool]] = []
        for number in range(200):
            rounds.waits.now = HARM if number % 10 < 2 else CALM
            reading = await rounds.next()
            assert reading is not None
            seen.append((reading.comparing, reading.ceiling_milli == rounds.terms.floor_milli))
            assert reading.comparing == ("comparing" in rounds.pools.reasons["law"])
        assert (True, True) in seen
        assert (True, False) not in seen
        assert seen[-1] != (True, True) or not all(comparing for comparing, _ in seen[-20:])


async def test_be_work_that_sleeps_is_never_cut(node: LiveNode) -> None:
    async with watching(node) as rounds:
        await rounds.next(150)
        rounds.want_milli, rounds.waits.now = 0, HARM
        assert await rounds.next(20) is not None
        assert rounds.watch.cuts == 0


@pytest.mark.parametrize(("settle_s", "earlier", "cuts"), [(0.25, 2, 1), (0.25, 3, 0), (0.0, 0, 0)])
async def test_samples_of_the_time_in_which_be_work_falls_asleep_are_not_learned_as_waiting_without_it(
    node: LiveNode, settle_s: float, earlier: int, cuts: int
) -> None:
    """``earlier``: samples, a tenth of a second apart, since BE work sleeps."""
    law = ReclaimedConfig(budget=BudgetConfig(harm=varied(HarmConfig(), settle_s=settle_s)))
    async with watching(node, replace(POLICIES, reclaimed=law)) as rounds:
        await rounds.next(150)
        for sleeps, waits, times in ((True, CALM, earlier), (True, HARM, 1), (True, CALM, 10), (False, HARM, 1)):
            rounds.want_milli, rounds.waits.now = 0 if sleeps else None, waits
            await rounds.next(times)
        assert rounds.watch.cuts == cuts


async def test_unknown_for_long_is_the_quota_law_and_known_again_is_not(node: LiveNode) -> None:
    async with watching(node) as rounds:
        await rounds.next(150)
        rounds.waits.now = None
        await rounds.next(20)
        assert rounds.in_force
        assert rounds.watch.decides(rounds.now)
        assert not rounds.watch.decides(rounds.now + 30)
        rounds.waits.now = CALM
        await rounds.next()
        assert not rounds.watch.unknown


@pytest.mark.parametrize("case", ["class", "law"])
async def test_without_the_class_the_quota_is_back_with_the_same_plan(node: LiveNode, case: str) -> None:
    async with watching(node) as rounds:
        await rounds.next(150)
        quota = rounds.quota
        assert quota in UNLIMITED
        budget = BudgetConfig(law=BudgetLaw.QUOTA if case == "law" else BudgetLaw.AUTO)
        idle = IdleClassConfig(enabled=case != "class")
        rounds.agent.control.reconciler.policies = PoliciesConfig(
            idle_class=idle, reclaimed=ReclaimedConfig(budget=budget)
        )
        await rounds.agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        await rounds.agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("test",)))
        assert not rounds.in_force
        assert rounds.quota not in UNLIMITED
        assert await rounds.next() is None
        assert rounds.watch.facts() is None


async def test_a_foreign_write_that_ends_the_class_ends_the_law(node: LiveNode) -> None:
    async with watching(node) as rounds:
        await rounds.next(150)
        actual = rounds.agent.writes.judge.control_files.actual
        actual[group(BATCH), "cpu.idle"] = 0
        rounds.agent.hub.changed.mark("tick")
        await rounds.look()
        assert not rounds.in_force


async def test_a_capacity_file_follows_the_cpu_that_is_left_without_a_pass(node: LiveNode) -> None:
    """At the top nothing else changes when online use does: no control file, so no pass is due."""
    config = replace(POLICIES, capacity=CapacityConfig(enabled=True))
    async with watching(node, config) as rounds:
        agent = rounds.agent
        agent.control.inventory.pods[BATCH] = replace(
            agent.control.inventory.pods[BATCH], annotations={ANNOTATION: "volume:v"}
        )
        await rounds.next(150)
        told: list[int] = []

        def planned(situation: PlanSnapshot) -> None:
            assert situation.view is agent.control.reconciler.view
            assert situation.plan.capacity is not None
            told.append(situation.plan.capacity.pods[BATCH].cpu_milli)

        agent.sides.all = (cast("AuxiliaryActuator", SimpleNamespace(name="told", planned=planned)),)
        looks = agent.control.reconciler.looks
        for use in (1000, 1050, 4000):
            agent.control.inventory.take(
                cpu=NodeCpu(busy_milli=use, online_milli=use, reclaimed_milli=0, idle={}, age_s=0.0)
            )
            agent.hub.changed.mark("tick")
            await rounds.look()
        assert agent.control.reconciler.looks == looks
        assert len(told) == 2
        assert told[0] - told[1] == 3000


async def test_without_the_idle_class_nothing_is_measured(node: LiveNode) -> None:
    async with watching(node, PoliciesConfig()) as rounds:
        await rounds.next(20)
        assert rounds.waits.asked == []
        assert rounds.limited


async def test_the_sampler_steps_it_ten_times_a_second_while_be_works(
    node: LiveNode, autojump_clock: trio.testing.MockClock
) -> None:
    """On trio's clock: the loop's waits, not the machine's speed, give the number of rounds."""
    del autojump_clock
    async with watching(node) as rounds:
        sampler = Sampler(
            rounds.agent.control.reconciler,
            UsageReader(rounds.agent.place.hierarchy, ops=node.kernel),
            root=node.root,
            lagged=lambda _: None,
            read=lambda _cpu, _now: None,
            sampled=lambda: None,
            harm=rounds.watch,
            daemons=rounds.agent.accounts.sampler.daemons,
        )
        Path(node.root, "proc", "stat").write_text("cpu 1 0 1 9 0 0 0 0\ncpu0 1 0 1 9 0 0 0 0\n")
        await rounds.next(2)
        times: list[float] = []
        ticks: list[float] = []
        tick = sampler.tick

        def counted(now: float, *, fast: bool) -> None:
            ticks.append(now)
            tick(now, fast=fast)

        sampler.tick = counted  # type: ignore[method-assign]  # counts the readings of the node's counters

        async def measured(now: float) -> None:
            del now
            times.append(trio.current_time())

        rounds.watch.round = measured  # type: ignore[method-assign]  # counts the rounds
        with trio.move_on_after(1.05):
            await sampler.run()
        assert len(times) == pytest.approx(11, abs=1)
        # The node's counters are for the second's sample, and by the machine's clock: a slow run may have two.
        assert 1 <= len(ticks) <= 2
