"""What the daemon does again and again stays little: calls of product functions, which no load changes.

Beside BE work, on Linux before 6.6, each of them may delay an online task (docs/performance.md). A bound that a change
exceeds is a reason to look for what is computed again; that it may be raised is a decision.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pytest
import trio
import yaml

from reconciler.config.load import load
from reconciler.daemon.agent import Agent
from reconciler.interference.engine import Evaluation
from reconciler.interference.monitor import InterferenceMonitor, MonitorState
from reconciler.interference.service import InterferenceService
from reconciler.runtime import cooperative
from reconciler.runtime.workqueue import DirtyBatch
from reconciler.signals import counter_delta, runqueue
from reconciler.signals.onlinewait import OnlineWait
from reconciler.signals.taskstats import Delays
from state.measures import Restrictions
from state.model import NodeCpu
from tests.fakes.livenode import LiveNode
from tests.reconciler.control.test_harm_watch import watching

ROOT: Final = f"{Path(__file__).parents[2]}/"
PRODUCT: Final = ("cgroupfs/", "reconciler/", "resctrl/", "state/")


@pytest.fixture(autouse=True)
def endless_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slice of work is ever over: a turn for others calls again what waits, so a busy machine has more calls."""
    monkeypatch.setattr(cooperative, "_SLICE_S", float("inf"))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of the product's functions by name, generators' resumptions included."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.removeprefix(ROOT).startswith(PRODUCT):
            calls[f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


PROC: Final = {
    "stat": "cpu 1 0 1 9 0 0 0 0\ncpu0 1 0 1 9 0 0 0 0\n",
    "meminfo": "MemTotal: 8000000 kB\nMemFree: 4000000 kB\nMemAvailable: 6000000 kB\nInactive(file): 9 kB\n",
    "vmstat": "oom_kill 0\npgsteal_kswapd 1\npgsteal_direct 1\nworkingset_refault 1\n",
    "schedstat": "version 15\ncpu0 0 0 0 0 0 0 5 5 5\n",
}


def _config(node: LiveNode) -> dict[str, object]:
    return {
        "protect": "full",
        "operator_file": None,
        "node": {"root": node.root},
        "kubelet": {"endpoint": "off"},
        "runtime": {"cri": "off"},
        "store": {"path": node.config.store.path},
    }


def _monitor(service: InterferenceService) -> InterferenceMonitor:
    return InterferenceMonitor(
        service._base,
        service._record,
        service._control,
        config=lambda: service._config,
        means=service._means,
        tell=lambda *_: None,
        kept=MonitorState(),
    )


IDLE: Final = {
    # The most calls without pods, and for each pod. Once in 30 seconds:
    "a pass": (1700, 110),
    # 2
    "a sample": (210, 1),
    "a tick": (400, 1),
    "the retries": (40, 1),
    # 10
    "the statuses": (260, 2),
    "the owners' accounts": (60, 1),
    # 60
    "the limits": (260, 30),
    "a minute": (350, 14),
}
"""At 500 pods 2,500 calls a second. Of the pass alone there were 7,200 when it planned each pod again."""


async def _idle_calls(path: Path, pods: int, clock: list[float]) -> dict[str, int]:
    """What each periodic work of a node takes on which nothing has happened for a while."""
    path.mkdir()
    node = LiveNode(path)
    for name, text in PROC.items():
        node.put(f"proc/{name}", text)
    with node.kernel.mirrored_at_once():
        for number in range(pods):
            uid = f"{number:08x}-0000-4000-8000-000000000000"
            node.add(f"pod-{number}", uid=uid, qos="besteffort" if number % 2 else "burstable")
    config = path / "config.yaml"
    config.write_text(yaml.safe_dump({**_config(node), "protect": None, "mode": "enforce"}))
    agent = Agent(load(str(config)).config, node.place())
    control, accounts = agent.control, agent.accounts
    periodic, calls = DirtyBatch(frozenset(), ("periodic",)), dict[str, int]()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.sources.tree.run)
            await node.look(agent)
            for _ in range(15):
                # What is given slowly has been given.
                clock[0] += 2.0
                accounts.sampler.tick(clock[0], fast=False)
                await control.reconciler.reconcile(agent.hub.changed.take_nowait())
            for _ in range(3):
                clock[0] += 2.0
                with counted() as each:
                    await control.reconciler.reconcile(periodic)
                calls["a pass"] = each.total()
                with counted() as each:
                    accounts.sampler.tick(clock[0], fast=False)
                calls["a sample"] = each.total()
                with counted() as each:
                    control.reconciler._tick()
                calls["a tick"] = each.total()
                with counted() as each:
                    agent.writes.judge.due(clock[0])
                    agent.writes.judge.next_check()
                calls["the retries"] = each.total()
                with counted() as each:
                    agent.watched()
                calls["the statuses"] = each.total()
                with counted() as each:
                    await accounts.owners.sample()
                calls["the owners' accounts"] = each.total()
                kubelet = control.inventory.readings.kubelet
                with counted() as each:
                    await control.owner_check.limits.check(control.inventory.pods, kubelet.policy)
                calls["the limits"] = each.total()
                with counted() as each:
                    await accounts.minutes.sample()
                calls["a minute"] = each.total()
            nursery.cancel_scope.cancel()
    finally:
        agent.close()
    return calls


async def test_what_an_idle_node_costs_hardly_follows_from_the_number_of_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    few, many = 8, 24
    calls = [await _idle_calls(tmp_path / str(pods), pods, clock) for pods in (few, many)]
    assert calls[0].keys() == IDLE.keys()
    for name, (fixed, for_each) in IDLE.items():
        less, more = (of[name] for of in calls)
        # A pass lists some pods' directories each time, by their inodes: that is not the same share of both.
        assert more - less <= for_each * (many - few), (name, less, more)
        assert more <= fixed + for_each * (many + 3), (name, less, more)


async def test_a_plan_a_sample_and_a_pass_of_the_monitor_take_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any two readings are far enough apart.
    for module in (counter_delta, runqueue):
        monkeypatch.setattr(module, "SHORTEST_S", 0.0)
    node = LiveNode(tmp_path)
    for name, text in PROC.items():
        node.put(f"proc/{name}", text)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(_config(node)))
    agent = Agent(load(str(path)).config, node.place())
    try:
        await node.look(agent)
        monitor, sampler, now = _monitor(agent.interference), agent.accounts.sampler, time.monotonic()
        for second in range(3):
            with counted() as sample:
                sampler.tick(now + second, fast=False)
            with counted() as plan:
                agent.control.reconciler._tick()
            with counted() as judged:
                await monitor.evaluate()
        for reader in monitor._readers:
            await reader.aclose()
    finally:
        agent.close()
    assert sampler.problem is None
    # Half as many passes follow.
    assert not monitor._is_sign(monitor.judgement or Evaluation(at_s=0.0), Restrictions())
    for calls, most in ((sample, 200), (plan, 420), (judged, 940)):
        assert calls.total() <= most, "\n".join(f"{count} {name}" for name, count in calls.most_common(40))


class Resting:
    """A `DelaySource`: each process runs for a fifth of the time and waits for nothing."""

    run_ns = 0

    def query(self, pids: Sequence[int]) -> dict[int, Delays]:
        return {pid: Delays(self.run_ns, 0, 1) for pid in pids}

    def close(self) -> None:
        """Holds nothing."""


async def test_a_round_beside_online_pods_that_wait_for_nothing_takes_few_calls(tmp_path: Path) -> None:
    async with watching(LiveNode(tmp_path)) as rounds:
        sampler, inventory = rounds.agent.accounts.sampler, rounds.agent.control.inventory
        sampler.harm = rounds.watch
        await rounds.next(150)
        inventory.take(cpu=NodeCpu(busy_milli=0, online_milli=0, reclaimed_milli=500, idle={}, age_s=0.0))
        waits = OnlineWait(rounds.agent.place.hierarchy, taskstats=Resting, clock=lambda: rounds.now)
        rounds.watch._wait = waits
        waits._processes.get = lambda _pod, _now: (42,)  # type: ignore[method-assign,assignment]  # none here
        for _ in range(3):
            rounds.now += 0.5
            Resting.run_ns += 100_000_000
            with counted() as calls:
                works, due = sampler._reclaimed_works(), sampler._is_due(rounds.now)
                await rounds.watch.round(rounds.now)
                sampler._interval = rounds.agent.control.reconciler.plan, sampler.interval_s(rounds.now, works=works)
            sampler._sampled_at = rounds.now
        waits.close()
    assert works
    assert not due
    assert waits.processes == 1
    assert sampler._interval[1] == 5.0
    assert calls.total() <= 90, "\n".join(f"{count} {name}" for name, count in calls.most_common(40))
