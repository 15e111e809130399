"""When the observer runs: while pods are to be monitored, and while BE's share of the cache moves by misses."""

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from reconciler.config.model import Config
from reconciler.detectors.config import InterferenceConfig
from reconciler.interference.service import watched
from reconciler.placement.isolation import IsolationConfig
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.shared import SharedConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.responses.eviction.config import EvictionConfig
from reconciler.responses.eviction.executor import Evictor
from reconciler.signals.perf import PerfReader
from reconciler.signals.readers import SampleContext, SampleSheet
from state.cache import CacheMode, LevelControl
from state.eviction import EvictionCase, EvictionOrder, EvictionTarget
from state.evidence import pod_subject
from tests.fakes.constants import varied
from tests.fakes.livenode import WEB, LiveNode
from tests.reconciler.actuators.resctrl_world import BATCH, World
from tests.reconciler.nodes import online
from tests.until import until

MOVING = varied(CachePolicyConfig(enabled=True, mode=CacheMode.DYNAMIC, monitor=False), law=LevelControl(calm_s=2.0))


async def every_online_pod_misses_much(_: PerfReader, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
    """In place of counting the processor's events."""
    del now
    assert set(scene.wanted) == {"llc.misses"}
    for uid, pod in scene.view.pods.items():
        if pod.pod_class.online:
            sheet.put(pod_subject(uid), "llc.misses", 30.0, age_s=0.5)


ISOLATING = replace(Config(), policies=PoliciesConfig(shared=SharedConfig(isolation=IsolationConfig(enabled=True))))


def with_cache(config: Config, cache: CachePolicyConfig) -> Config:
    return replace(config, policies=replace(config.policies, cache=cache))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), False),
        (Config(interference=InterferenceConfig(enabled=True)), True),
        (Config(eviction=EvictionConfig(enabled=True)), True),
        (with_cache(Config(), MOVING), True),
        (with_cache(Config(), replace(MOVING, enabled=False)), False),
        (with_cache(Config(), replace(MOVING, mode=CacheMode.STATIC)), False),
        (ISOLATING, True),
    ],
)
def test_the_monitor_runs_while_any_part_uses_it(config: Config, expected: bool) -> None:
    assert watched(config) is expected


async def test_a_share_that_moves_has_misses_counted_and_goes_by_them(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing else switched on."""
    monkeypatch.setattr(PerfReader, "read", every_online_pod_misses_much)
    live = LiveNode(tmp_path, files=False)
    world = World(tmp_path / "world")
    world.config = MOVING
    world.spawn(BATCH)
    world.spawn(online(WEB))
    with live.agent(with_cache(live.config, MOVING)) as agent:
        await live.look(agent)
        await nursery.start(agent.interference.run)
        await until(lambda: WEB in agent.base.samples.misses())
        for _ in range(8):
            await world.sweep(BATCH, online(WEB), seconds=2.0)
        assert level(world) > (20, 10)
        world.misses = dict(agent.base.samples.misses())
        await world.sweep(BATCH, online(WEB), seconds=2.0)
        assert level(world) == (20, 10)
        agent.reconfigure(with_cache(live.config, replace(MOVING, mode=CacheMode.STATIC)))
        await until(lambda: agent.interference.observer is None)
        assert agent.base.samples.misses() == {}
        nursery.cancel_scope.cancel()


async def test_the_monitor_reads_the_store_in_the_stores_lane(live: LiveNode) -> None:
    """The reconciler writes originals there meanwhile, and two threads in the store at once end the daemon."""
    with live.agent(replace(live.config, interference=InterferenceConfig(enabled=True))) as agent:
        await live.look(agent)
        # The agent closes the store only after the service has ended.
        async with trio.open_nursery() as nursery:
            async with agent.record.lane:
                await nursery.start(agent.interference.run)
                await trio.testing.wait_all_tasks_blocked()
                assert agent.interference.observer is None
            await until(lambda: agent.interference.observer is not None)
            nursery.cancel_scope.cancel()


async def test_an_eviction_under_way_survives_a_restart_of_the_component_after_eviction_was_disabled(
    live: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an error in the monitor: nothing else would complete it, or thaw its pod, before the daemon's end."""
    order = EvictionOrder(id="o", uid=WEB, title="a/b", namespace="a", name="b", owner=None, cause="x", evidence="y")
    target = EvictionTarget(group="/kubepods/x", inodes={})
    monkeypatch.setattr(Evictor, "cases", lambda _: (EvictionCase(order=order, target=target, boot="b"),))
    enabled = replace(live.config, eviction=EvictionConfig(enabled=True))
    with live.agent(enabled) as agent:
        service = agent.interference
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                await until(lambda: service.evictor is not None)
                agent.reconfigure(live.config)
                nursery.cancel_scope.cancel()
            assert service.evictor is None


def level(world: World) -> tuple[int, int]:
    result: Any = world.side.status()["level"]
    return result["cache_percent"], result["mba_percent"]
