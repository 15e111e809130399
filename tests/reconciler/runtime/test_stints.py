"""The daemon's own stints: each step of the loop and each worker's job counts as its component's."""

import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import trio

from reconciler.runtime import stints
from reconciler.runtime.stint_timer import STINT_S
from reconciler.runtime.stints import COMPONENT, OncePerPass, Stints, in_worker
from reconciler.runtime.supervisor import Component, Supervisor


class Clock:
    """CPU seconds that the test spends."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_a_step_lasts_from_one_checkpoint_to_the_next_and_is_its_components() -> None:
    used = Clock()
    stints = Stints(used)
    stints.start()

    async def work(name: str, steps: tuple[float, ...]) -> None:
        COMPONENT.set(name)
        for seconds in steps:
            used.s += seconds
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, "sampler", (0.9 * STINT_S, 2 * STINT_S, 3 * STINT_S))
        nursery.start_soon(work, "web", (STINT_S / 2,))
    stints.stop()
    values = stints.values
    sampler, web = values.components["sampler"], values.components["web"]
    assert sampler.long == 2
    assert sampler.longest_s == pytest.approx(3 * STINT_S)
    assert abs(sampler.cpu_s - 5.9 * STINT_S) < 1e-12
    assert web.long == 0
    assert abs(values.steps.total - 6.4 * STINT_S) < 1e-12


async def test_nothing_is_measured_after_stop_which_may_come_twice() -> None:
    used = Clock()
    stints = Stints(used)
    stints.stop()
    stints.start()
    await trio.lowlevel.checkpoint()
    stints.stop()
    stints.stop()
    before = stints.values
    used.s += 1.0
    await trio.lowlevel.checkpoint()
    await in_worker(burn, 0.001)
    assert stints.values == before


async def test_a_workers_job_counts_its_own_threads_time_also_when_it_fails() -> None:
    stints = Stints()
    stints.start()
    COMPONENT.set("keeper")

    def fail() -> None:
        burn(0.002)
        raise ValueError

    await in_worker(burn, 0.003)
    with suppress(ValueError):
        await in_worker(fail)
    stints.stop()
    values = stints.values
    assert sum(values.jobs.counts) == 2
    assert 0.005 <= values.jobs.total <= values.components["keeper"].cpu_s
    assert values.components["keeper"].long >= 2


async def test_tasks_of_a_component_are_its_own() -> None:
    found: list[str] = []

    async def child() -> None:
        found.append(COMPONENT.get())

    async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        supervisor.stop("done")
        await trio.sleep_forever()

    supervisor = Supervisor([[Component(name="reader", run=run)]])
    await supervisor.run()
    assert found == ["reader"]
    assert COMPONENT.get() == "daemon"


@pytest.mark.parametrize(("may_be_abandoned", "expected"), [(False, ["run", "stop"]), (True, ["stop"])])
async def test_a_job_that_may_be_abandoned_waits_in_the_kernel_without_the_timer(
    monkeypatch: pytest.MonkeyPatch, *, may_be_abandoned: bool, expected: list[str]
) -> None:
    calls: list[str] = []
    timer = SimpleNamespace(run=lambda: calls.append("run"), stop=lambda: calls.append("stop"))
    monkeypatch.setattr(stints, "TIMER", timer)
    await in_worker(burn, 0.0, abandon_on_cancel=may_be_abandoned)
    assert calls == expected


async def test_a_question_of_all_instruments_is_asked_once_in_each_pass() -> None:
    asked: list[bool] = []
    answers = iter([True, False, True, False, True])

    def ask() -> bool:
        asked.append(next(answers))
        return asked[-1]

    question = OncePerPass(ask)
    assert [question(), question()] == [True, False], "outside of the loop's passes nothing is kept"
    question.start()
    await trio.lowlevel.checkpoint()
    asked.clear()
    assert [question(), question()] == [True, True]
    await trio.lowlevel.checkpoint()
    assert [question(), question()] == [False, False]
    assert len(asked) == 2
    question.stop()
    question.stop()
    assert question()
