"""What the agent's parts get from each other: each line of the agent's own wiring has an effect that shows."""

import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from reconciler.actuators.resctrl.actuator import ResctrlActuator
from reconciler.config.model import Config
from reconciler.control import side_actuators
from reconciler.control.cache_loop import CacheLoop
from reconciler.daemon.agent import Agent
from reconciler.detectors.config import InterferenceConfig
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.placement.provision import CpiGains, PidConfig, ProvisionConfig, ProvisionPolicy, WaitGains
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.shared import PoolSizing, SharedConfig, SharedPoolMode
from reconciler.runtime.supervisor import Component
from reconciler.signals.perf import PerfReader
from reconciler.signals.readers import SampleContext, SampleSheet
from reconciler.sources import pressure_events
from state.cache import CacheMode
from state.evidence import pod_subject
from tests.fakes.constants import varied
from tests.fakes.livenode import WEB, LiveNode, group
from tests.fakes.report import status_report
from tests.reconciler.actuators.resctrl_world import World
from tests.reconciler.telemetry.rendered import render
from tests.until import until

PROJECT = Path(__file__).parents[3]
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 8388608 kB\nMemAvailable: 8388608 kB\n"
PCI = "sys/devices/pci0000:00/0000:00:01.0"


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    live = LiveNode(tmp_path, files=False)
    live.put("proc/meminfo", MEMINFO)
    return live


class WithProc:
    """The fake kernel's control files, and the files of the node's own /proc. The online pod uses one CPU."""

    def __init__(self, live: LiveNode) -> None:
        self._kernel, self._proc = live.kernel, f"{live.root}/proc"

    def read(self, directory: Any, file: str) -> str:
        if str(directory).startswith(self._proc):
            return Path(directory, file).read_text()
        if file == "cpuacct.usage" and str(directory).endswith(group(WEB)):
            return f"{time.monotonic_ns()}\n"
        return self._kernel.read(directory, file)

    def __getattr__(self, name: str) -> Any:  # the rest of `FileOps`, as the fake kernel has it
        return getattr(self._kernel, name)


@contextmanager
def agent_on(live: LiveNode, config: Config | None = None) -> Iterator[Agent]:
    """The agent, built and closed; nothing of it runs by itself."""
    agent = Agent(config or live.config, live.place(), files=WithProc(live))
    try:
        yield agent
    finally:
        agent.close()


def component(agent: Agent, name: str) -> Component:
    """The component of this name, as the daemon would run it."""
    every = {each.name: each for group in agent.components() for each in group}
    return every[name]


@asynccontextmanager
async def running(agent: Agent, *names: str) -> AsyncIterator[None]:
    """These of the agent's components."""
    async with trio.open_nursery() as nursery:
        for name in names:
            await nursery.start(component(agent, name).run)
        yield
        nursery.cancel_scope.cancel()


def quantile(rank: float, buckets: Mapping[float, float]) -> float:
    """Prometheus' ``histogram_quantile`` of cumulative buckets; above the last bound it is that bound."""
    bounds = sorted(buckets)
    target, below, start = rank * buckets[float("inf")], 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= target:
            if bound == float("inf"):
                return bounds[-2]
            return start + (bound - start) * (target - below) / (buckets[bound] - below)
        below, start = buckets[bound], bound
    raise AssertionError("no bucket")


def lag_buckets(agent: Agent) -> dict[float, float]:
    """The buckets of the loop's lag, as Prometheus reads them from the daemon's page."""
    report = status_report(agent)
    text, _ = render(report.metrics())
    samples = [each for family in text_string_to_metric_families(text.decode()) for each in family.samples]
    return {float(each.labels["le"]): each.value for each in samples if each.name == "bypassd_loop_lag_seconds_bucket"}


async def test_a_blocked_loop_shows_in_the_metrics_and_makes_the_shipped_alert_fire(live: LiveNode) -> None:
    rules = (PROJECT / "deploy/alert-rules.yaml").read_text()
    alert = re.search(
        r"alert: BypassdLoopLate\n +expr: histogram_quantile\((\S+), rate\((\w+)\[10m\]\)\) > (\S+)\n", rules
    )
    assert alert is not None
    rank, name, limit_s = float(alert[1]), alert[2], float(alert[3])
    assert name == "bypassd_loop_lag_seconds_bucket"
    config = replace(live.config, node=replace(live.config.node, sample_s=0.1))
    with agent_on(live, config) as agent:
        await live.look(agent)
        async with running(agent, "ticker"):
            await until(lambda: lag_buckets(agent)[float("inf")] >= 3)
            # Only a ticker that sleeps until its next tick has a time to miss: not one that pauses amid a tick.
            await trio.testing.wait_all_tasks_blocked()
            before = lag_buckets(agent)
            assert quantile(rank, before) < limit_s
            time.sleep(0.5)  # noqa: ASYNC251  # the whole loop is blocked, on purpose
            await until(lambda: lag_buckets(agent)[float("inf")] > before[float("inf")])
            after = lag_buckets(agent)
    assert after[float("inf")] - after[limit_s] == 1
    assert quantile(rank, after) > limit_s


async def test_memory_headroom_is_measured_by_a_component_of_its_own(live: LiveNode) -> None:
    with agent_on(live) as agent:
        await live.look(agent)
        async with running(agent, "ticker"):
            await until(lambda: agent.control.inventory.node_memory is not None)
            assert agent.headroom.memory.status()["supply_bytes"] is None
            async with running(agent, "memory headroom"):
                await until(lambda: agent.headroom.memory.status()["supply_bytes"] is not None)
        report = status_report(agent)
        headroom: Any = dict(report.state(("headroom",)))["headroom"]
    assert 0 < headroom["memory"]["supply_bytes"] <= 8 << 30


async def test_the_law_of_peaks_learns_from_the_pods_minutes_and_bounds_what_is_promised(live: LiveNode) -> None:
    config = replace(live.config, headroom=HeadroomConfig(law=HeadroomLaw.HISTOGRAM))
    with agent_on(live, config) as agent:
        await live.look(agent)
        online = sum(pod.pod_class.online for pod in agent.control.inventory.pods.values())
        async with running(agent, "ticker"), running(agent, "workload peaks"):
            await until(lambda: agent.control.inventory.node_memory is not None)
            for _ in range(2):
                await agent.accounts.minutes.sample()
            await until(lambda: sum(agent.headroom.peaks.workloads().values()) > 0)
            await until(lambda: agent.headroom.report.state.known_at is not None)
        report = status_report(agent)
        state: Any = dict(report.state(("headroom", "budget", "effect")))
    assert agent.headroom.peaks.workloads() == {"known": 0, "cold": online}
    assert state["headroom"]["law"]["cold"] == online
    assert state["budget"]["headroom"].endswith(state["headroom"]["law"]["text"])
    assert [hour["promises"]["laws"] for hour in state["effect"]] == [{"histogram": 1}]


async def test_the_cpus_of_named_interrupts_reach_the_view_that_policies_get(live: LiveNode) -> None:
    """From the card's files through the sampler."""
    live.put(f"{PCI}/msi_irqs/30", "msix")
    live.put("proc/irq/30/effective_affinity_list", "5\n")
    link = Path(live.root, "sys/class/net/eth0")
    Path(live.root, PCI, "net/eth0").mkdir(parents=True)
    link.mkdir(parents=True)
    (link / "device").symlink_to(Path(live.root, PCI))
    policies = replace(live.config.policies, exclusive=ExclusiveConfig(avoid_irqs=("eth*",)))
    with agent_on(live, replace(live.config, policies=policies)) as agent:
        await live.look(agent)
        async with running(agent, "ticker"):
            await until(lambda: str(agent.control.current()[0].irq_cpus) == "5")


async def every_online_pod_misses_much(_: PerfReader, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
    """In place of counting the processor's events."""
    del now
    for uid, pod in scene.view.pods.items():
        if pod.pod_class.online:
            sheet.put(pod_subject(uid), "llc.misses", 30.0, age_s=0.5)
            sheet.put(pod_subject(uid), "cpi", 2.5, age_s=0.5)


async def test_cache_misses_reach_the_cache_share_that_moves(
    live: LiveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the reader of the processor's counters to the reason of the dynamic cache mode's step."""
    monkeypatch.setattr(PerfReader, "read", every_online_pod_misses_much)
    world, made = World(tmp_path / "world"), []

    def make(*args: Any, **given: Any) -> ResctrlActuator:
        machine = {"files": world.model, "capability": world.capability, "mounter": world, "clock": world.model.now}
        return ResctrlActuator(*args, **{**given, **machine})

    def make_loop(*args: Any, **given: Any) -> CacheLoop:
        made.append(CacheLoop(*args, **{**given, "clock": world.model.now}))
        return made[-1]

    monkeypatch.setattr("reconciler.control.cache_loop.ResctrlActuator", make)
    monkeypatch.setattr("reconciler.control.cache_loop.CacheLoop", make_loop)
    monkeypatch.setattr(side_actuators, "_is_this_machine", lambda _root: True)
    moving = CachePolicyConfig(enabled=True, mode=CacheMode.DYNAMIC, monitor=False)
    config = replace(live.config, policies=replace(live.config.policies, cache=moving))
    with agent_on(live, config) as agent:
        async with running(agent, "interference"):
            await live.look(agent)
            await until(lambda: WEB in agent.base.samples.misses())
            (cache,) = made
            world.model.advance(1.0)
            await cache.sweep()
            level: Any = cache.status()["level"]
    assert "30 cache misses per 1000 instructions" in level["reason"]


class Waiting:
    """`Reader` in the place of the one of the run queue: the online pods wait as long as they run."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        del now
        for uid, pod in scene.view.pods.items():
            if pod.pod_class.online:
                sheet.put(pod_subject(uid), "cpu.wait_milli", 4000.0)

    def problems(self) -> Mapping[str, str]:
        return {}

    async def aclose(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("pid", "expected"),
    [
        (PidConfig(cpu_sched_wait=WaitGains(target_percent=10.0)), "pid: cpu_sched_wait is above its target"),
        (PidConfig(cpi=CpiGains(target=1.0)), "pid: cpi is above its target"),
    ],
)
async def test_what_online_pods_wait_and_their_cpi_move_the_size_of_their_pool(
    live: LiveNode, monkeypatch: pytest.MonkeyPatch, pid: PidConfig, expected: str
) -> None:
    """From the readers to the reason of the pool's size, with nothing else that asks for the signals."""
    monkeypatch.setattr(PerfReader, "read", every_online_pod_misses_much)
    monkeypatch.setattr("reconciler.signals.runqueue.RunQueue", lambda *_, **__: Waiting())
    provision = ProvisionConfig(policy=ProvisionPolicy.PID, pid=varied(pid, settle_s=0.0))
    shared = SharedConfig(mode=SharedPoolMode.SEPARATE, sizing=PoolSizing.MEASURED, provision=provision)
    config = replace(live.config, policies=replace(live.config.policies, shared=shared))
    with agent_on(live, config) as agent:

        async def planned() -> str:
            await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
            pools = agent.control.reconciler.pools
            assert pools is not None
            return pools.sizes["shared"].reason

        await live.look(agent)
        async with running(agent, "interference", "ticker"):
            with trio.fail_after(60):
                while expected not in await planned():  # noqa: ASYNC110  # no event
                    await trio.sleep(0.1)


class Fires:
    """`PressureTrigger` that fires when it is set."""

    def __init__(self) -> None:
        self.spec = pressure_events.SPEC
        self.now = trio.Event()

    async def wait(self) -> None:
        await self.now.wait()
        self.now = trio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


async def test_pressure_that_begins_is_judged_at_once(live: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interval of a minute between two passes: from the trigger's file to the monitor's next pass."""
    triggers: dict[str, Fires] = {}
    monkeypatch.setattr(pressure_events, "open_trigger", lambda path, _spec: triggers.setdefault(path, Fires()))
    interference = InterferenceConfig(enabled=True, sample_s=60.0)
    with agent_on(live, replace(live.config, interference=interference)) as agent:
        await live.look(agent)
        async with running(agent, "interference"):
            await until(lambda: agent.interference.observer is not None and agent.interference.observer.passes == 1)
            observer = agent.interference.observer
            assert observer is not None
            await until(lambda: len(triggers) == 2)
            triggers[f"{live.root}/proc/pressure/memory"].now.set()
            began = trio.current_time()
            await until(lambda: observer.passes == 2)
            assert trio.current_time() - began < 5
            status: Any = agent.interference.status()
            assert status["woken"] == {"memory": 1}
            (events,) = (source for source in agent.statuses() if source.name == pressure_events.NAME)
            assert events.detail == "memory within 1 s; cpu within 1 s"
