import threading

import trio
from trio.testing import MockClock

from reconciler.actuators.base import PeriodicWorker, PlanSnapshot
from reconciler.control.planner import plan_node
from reconciler.policies.table import PoliciesConfig
from tests.reconciler.nodes import node


class Actor:
    """Notes when it acts, and takes a second for it."""

    def __init__(self, period_s: float | None = None, gap_s: float = 0.0) -> None:
        self.log: list[tuple[float, bool]] = []
        self.began = trio.current_time()
        self.turns = PeriodicWorker(self.act, lambda _: period_s, gap_s=gap_s, clock=trio.current_time)

    async def act(self, now: PlanSnapshot) -> None:
        self.log.append((trio.current_time() - self.began, now.enforce))
        await trio.sleep(1)


def situation(*, enforce: bool = True) -> PlanSnapshot:
    view = node()
    return PlanSnapshot(view=view, plan=plan_node(view, None, PoliciesConfig()), enforce=enforce)


async def test_it_acts_after_looks_that_concern_it_and_when_it_is_due(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    actor = Actor(period_s=10)
    await nursery.start(actor.turns.run)
    await trio.sleep(100)
    assert actor.log == []
    actor.turns.planned(situation(), wake=True)
    await trio.sleep(5)
    actor.turns.planned(situation(enforce=False), wake=False)
    await trio.sleep(20)
    assert actor.log == [(100, True), (111, False), (122, False)]
    assert (actor.turns.sweeps, actor.turns.swept_s) == (3, 1.0)


async def test_of_many_looks_the_newest_counts_and_acts_keep_apart(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    actor = Actor(gap_s=2)
    await nursery.start(actor.turns.run)
    for number in range(6):
        actor.turns.planned(situation(enforce=number == 5), wake=True)
        await trio.sleep(0.1)
    await trio.sleep(10)
    assert actor.log == [(0, False), (3, True)]


async def test_never_two_acts_at_once_and_none_between_a_restore_and_the_next_look(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    actor = Actor(period_s=2)
    await nursery.start(actor.turns.run)
    first = situation()
    actor.turns.planned(first, wake=True)
    await trio.sleep(0.5)
    async with actor.turns.restoring() as last:
        assert last is first
        assert trio.current_time() - actor.began >= 1
        await trio.sleep(20)
    await actor.turns.sweep()
    await trio.sleep(20)
    assert actor.log == [(0, True)]
    actor.turns.planned(situation(), wake=True)
    await trio.sleep(0.5)
    assert len(actor.log) == 2


async def test_slow_work_is_done_in_one_thread_at_a_time() -> None:
    actor = Actor()
    busy = threading.Lock()

    def work() -> bool:
        with busy:
            return threading.current_thread() is not threading.main_thread()

    flags: list[bool] = []

    async def one() -> None:
        flags.append(await actor.turns.work(work))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert flags == [True] * 4
