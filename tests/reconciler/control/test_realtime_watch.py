"""Real-time threads of BE pods: found on every kernel, reported once, never changed, and bounded in work."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.scheduling import IDLE, OTHER
from reconciler.control.be_watch import RealtimeWatch
from reconciler.daemon.agent import Agent
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.table import PoliciesConfig
from tests.fakes.livenode import BATCH, LiveNode, group

FIFO, RR, DEADLINE, BATCHED = 1, 2, 6, 3


class Policies:
    """A `Scheduler` that must never write."""

    def __init__(self, policies: dict[int, int]) -> None:
        self.policies = policies
        self.reads = 0

    def policy(self, tid: int) -> int:
        self.reads += 1
        if tid not in self.policies:
            raise ProcessLookupError(tid)
        return self.policies[tid]

    def set_policy(self, tid: int, policy: int) -> None:
        raise AssertionError(f"{tid} set to {policy}")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    node = LiveNode(tmp_path, files=False)
    with node.agent() as agent:
        trio.run(node.look, agent)
        yield agent


def watch_of(agent: Agent, threads: dict[str, list[int]], scheduler: Policies) -> RealtimeWatch:
    return RealtimeWatch(
        agent.control.reconciler, busy(), threads=lambda path: threads.get(path, []), scheduler=scheduler
    )


def busy() -> Callable[[str], int]:
    """CPU times of groups that run all the time."""
    times = count()
    return lambda _: next(times)


@pytest.mark.parametrize(
    ("policy", "found"), [(FIFO, True), (RR, True), (DEADLINE, True), (OTHER, False), (IDLE, False), (BATCHED, False)]
)
def test_a_real_time_thread_of_a_be_pod_is_found_and_reported_once(agent: Agent, policy: int, found: bool) -> None:
    scheduler = Policies({1: OTHER, 2: policy})
    watch = watch_of(agent, {group(BATCH): [1, 3, 2]}, scheduler)
    for second in range(0, 60, 11):
        assert watch.check(float(second)) == (frozenset({BATCH}) if found else frozenset())
    assert (watch.found, agent.alerts.raised["realtime"]) == (int(found), int(found))


def test_it_ends_with_the_thread_and_is_reported_again(agent: Agent) -> None:
    scheduler = Policies({1: FIFO})
    watch = watch_of(agent, {group(BATCH): [1]}, scheduler)
    assert watch.check(0.0)
    scheduler.policies[1] = OTHER
    assert watch.check(5.0), "the last reading counts until the next"
    assert not watch.check(10.0)
    scheduler.policies[1] = RR
    assert watch.check(20.0)
    assert watch.found == 2


def test_one_reading_is_bounded_whatever_a_pod_has(agent: Agent) -> None:
    scheduler = Policies(dict.fromkeys(range(1, 50_001), OTHER))
    watch = watch_of(agent, {group(BATCH): list(range(1, 50_001))}, scheduler)
    watch.check(0.0)
    assert scheduler.reads == 1000


def test_many_pods_are_read_in_turn(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = agent.control.inventory.pods[BATCH]
    pods = {f"be-{number}": replace(pod, uid=f"be-{number}") for number in range(100)}
    monkeypatch.setattr(agent.control.inventory, "pods", pods)
    listed: list[str] = []

    def threads(path: str) -> list[int]:
        listed.append(path)
        return []

    watch = RealtimeWatch(agent.control.reconciler, busy(), threads=threads, scheduler=Policies({}))
    counts = []
    for second in range(5):
        watch.check(float(second))
        counts.append(len(listed))
    assert counts == [32, 64, 96, 100, 100]


def test_online_pods_may_have_real_time_threads(agent: Agent) -> None:
    scheduler = Policies({1: FIFO})
    watch = RealtimeWatch(
        agent.control.reconciler, busy(), threads=lambda path: [] if path == group(BATCH) else [1], scheduler=scheduler
    )
    assert not watch.check(0.0)


def test_threads_of_a_pod_that_has_not_run_are_not_read_again(agent: Agent) -> None:
    times = {group(BATCH): 5, group(BATCH).rpartition("/")[0]: 7}
    scheduler = Policies({1: OTHER})
    reads: list[str] = []

    def cpu_ns(path: str) -> int | None:
        reads.append(path)
        return times.get(path)

    watch = RealtimeWatch(agent.control.reconciler, cpu_ns, threads=lambda _: [1], scheduler=scheduler)
    for second in range(60):
        watch.check(float(second))
    assert (scheduler.reads, len(reads)) == (1, 7), "one counter of the directory each ten seconds"
    scheduler.policies[1] = FIFO
    times[group(BATCH).rpartition("/")[0]] += 1
    assert not watch.check(60.0), "another pod ran"
    times[group(BATCH)] += 1
    times[group(BATCH).rpartition("/")[0]] += 1
    assert watch.check(70.0) == frozenset({BATCH})
    scheduler.policies[1] = OTHER
    assert watch.check(80.0) == frozenset(), "a pod that has some is read, run or not"
    times.clear()
    scheduler.policies[1] = FIFO
    assert watch.check(90.0) == frozenset({BATCH}), "a counter that cannot be read excuses nothing"


def test_the_harm_law_needs_be_pods_without_them(live: LiveNode) -> None:
    """On kernels where groups have the class, too: it does not apply to a real-time thread."""
    with live.agent() as agent:
        agent.control.reconciler.policies = PoliciesConfig(idle_class=IdleClassConfig(enabled=True))

        async def reason() -> str:
            for _ in range(2):
                await live.look(agent)
            assert agent.control.reconciler.pools is not None
            return agent.control.reconciler.pools.reasons["law"]

        agent.control.inventory.take(realtime=frozenset({BATCH}))
        assert "real-time" in trio.run(reason)
        agent.control.inventory.take(realtime=frozenset())
        assert "real-time" not in trio.run(reason)
