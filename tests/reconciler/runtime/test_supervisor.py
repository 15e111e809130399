import logging
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from cgroupfs.errors import AgentError
from reconciler.runtime.supervisor import (
    Component,
    ComponentHealth,
    ComponentStatus,
    EssentialError,
    Supervisor,
)

Log = list[tuple[float, str]]


def component(
    name: str, log: Log, life: Callable[[], Awaitable[None]] = trio.sleep_forever, *, essential: bool = False
) -> Component:
    """Starts at once, lives ``life``, and writes each step with its time into ``log``."""

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        log.append((trio.current_time(), f"{name} starts"))
        task_status.started()
        try:
            await life()
        finally:
            log.append((trio.current_time(), f"{name} ends"))

    return Component(name=name, run=run, essential=essential)


async def test_layers_start_from_outside_and_end_from_inside(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    log: Log = []

    async def until_cancelled() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as exc:
            reasons.append(exc.reason)
            raise

    reasons: list[str | None] = []
    layers = [[component(name, log, until_cancelled)] for name in ("store", "loop", "web")]
    supervisor = Supervisor(layers)
    await nursery.start(supervisor.run)
    assert {name: status.health for name, status in supervisor.statuses.items()} == dict.fromkeys(
        ("store", "loop", "web"), ComponentHealth.RUNNING
    )
    await trio.sleep(5)
    supervisor.stop("SIGTERM")
    supervisor.stop("again")
    await trio.testing.wait_all_tasks_blocked()
    assert log == [
        (0, "store starts"),
        (0, "loop starts"),
        (0, "web starts"),
        (5, "web ends"),
        (5, "loop ends"),
        (5, "store ends"),
    ]
    assert reasons == ["stop: SIGTERM"] * 3
    assert {status.health for status in supervisor.statuses.values()} == {ComponentHealth.STOPPED}


async def test_an_inner_layers_clean_up_may_still_use_the_outer_one(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    log: Log = []

    async def slow_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(3, shield=True):
                await trio.sleep_forever()

    supervisor = Supervisor([[component("store", log)], [component("loop", log, slow_end)]])
    await nursery.start(supervisor.run)
    supervisor.stop("SIGTERM")
    await trio.sleep(4)
    assert log[2:] == [(3, "loop ends"), (3, "store ends")]


async def test_a_failed_component_starts_again_after_growing_waits_and_alone(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    log: Log = []
    reports: list[ComponentStatus] = []

    async def one_second() -> None:
        await trio.sleep(1)
        raise ConnectionError("lost")

    supervisor = Supervisor([[component("loop", log), component("web", log, one_second)]], reports.append)
    await nursery.start(supervisor.run)
    await trio.sleep(12)
    assert [entry for entry in log if entry[1] == "web starts"] == [
        (0, "web starts"),
        (1.5, "web starts"),
        (3.5, "web starts"),
        (6.5, "web starts"),
        (11.5, "web starts"),
    ]
    assert [entry for entry in log if entry[1].startswith("loop")] == [(0, "loop starts")]
    assert supervisor.statuses["web"] == ComponentStatus(
        name="web", health=ComponentHealth.RUNNING, failures=4, error="ConnectionError: lost"
    )
    assert [report.health for report in reports if report.name == "web"][:4] == [
        ComponentHealth.RUNNING,
        ComponentHealth.WAITING,
        ComponentHealth.STARTING,
        ComponentHealth.RUNNING,
    ]


async def test_a_long_calm_makes_the_wait_short_again(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    log: Log = []

    async def lives() -> None:
        await trio.sleep(60 if len(log) > 6 else 0)

    supervisor = Supervisor([[component("web", log, lives)]])
    await nursery.start(supervisor.run)
    await trio.sleep(70)
    starts = [at for at, what in log if what == "web starts"]
    assert starts == [0, 0.5, 1.5, 3.5, 64]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "loop ended: KeyError: 'x'"),
        (None, "loop ended: it returned"),
    ],
)
async def test_the_end_of_an_essential_component_ends_the_process_in_order(
    autojump_clock: MockClock, error: Exception | None, words: str
) -> None:
    log: Log = []

    async def ends() -> None:
        await trio.sleep(2)
        if error is not None:
            raise error

    layers = [[component("store", log)], [component("loop", log, ends, essential=True)], [component("web", log)]]
    with pytest.raises(EssentialError) as caught:
        await Supervisor(layers).run()
    assert str(caught.value) == words
    assert caught.value.__cause__ is error
    assert log[3:] == [(2, "loop ends"), (2, "web ends"), (2, "store ends")]


@pytest.mark.parametrize("error", [AgentError("EIO"), OSError(12, "Cannot allocate memory")])
async def test_what_the_node_refuses_an_essential_component_does_not_end_the_process(
    nursery: trio.Nursery, autojump_clock: MockClock, error: Exception
) -> None:
    log: Log = []

    async def ends() -> None:
        await trio.sleep(2)
        raise error

    layers = [[component("loop", log, ends, essential=True)], [component("web", log)]]
    supervisor = Supervisor(layers)
    await nursery.start(supervisor.run)
    await trio.sleep(100)
    assert supervisor.statuses["web"].health is ComponentHealth.RUNNING
    # Again and again, after a growing wait: 2 s of life and 0.5, 1, 2, 4 ... seconds in between.
    assert 4 <= supervisor.statuses["loop"].failures <= 8
    supervisor.stop("test")


async def test_an_essential_component_that_fails_at_its_start_keeps_the_inner_layers_from_starting(
    autojump_clock: MockClock,
) -> None:
    log: Log = []

    async def fails(*, task_status: trio.TaskStatus[None]) -> None:
        raise AgentError("no cgroups")

    layers = [[Component(name="loop", run=fails, essential=True)], [component("web", log)]]
    with pytest.raises(EssentialError, match="loop ended: no cgroups"):
        await Supervisor(layers).run()
    assert log == []


async def test_what_does_not_start_in_time_is_named_and_not_waited_for(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []

    async def never_ready(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    layers = [[Component(name="cri", run=never_ready)], [component("loop", log)]]
    with caplog.at_level(logging.WARNING):
        await nursery.start(Supervisor(layers).run)
    assert log == [(10, "loop starts")]
    assert [getattr(record, "fields", None) for record in caplog.records] == [{"components": "cri"}]


async def test_a_stop_during_the_start_ends_at_once(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def never_ready(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    supervisor = Supervisor([[Component(name="cri", run=never_ready)]])
    nursery.start_soon(supervisor.run)
    await trio.sleep(1)
    supervisor.stop("SIGTERM")
    await trio.testing.wait_all_tasks_blocked()
    assert supervisor.statuses["cri"].health is ComponentHealth.STOPPED
    assert trio.current_time() == 1


async def test_what_is_slow_to_stop_is_named(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def stubborn() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(20)

    supervisor = Supervisor([[component("slow", [], stubborn), component("quick", [])]])
    await nursery.start(supervisor.run)
    with caplog.at_level(logging.WARNING):
        supervisor.stop("SIGTERM")
        await trio.sleep(6)
    assert [getattr(record, "fields", None) for record in caplog.records] == [{"components": "slow", "after_s": 5.0}]


async def test_a_failure_of_several_tasks_of_one_component_is_one_failure(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async def two() -> None:
        await trio.sleep(1)
        raise ExceptionGroup("both", [ValueError("a"), KeyError("b")])

    supervisor = Supervisor([[component("web", [], two)]])
    await nursery.start(supervisor.run)
    await trio.sleep(1.1)
    assert supervisor.statuses["web"].failures == 1
    assert supervisor.statuses["web"].error == "ExceptionGroup: both (2 sub-exceptions)"


async def test_a_keyboard_interrupt_is_nobodys_to_swallow(autojump_clock: MockClock) -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as caught:
        await Supervisor([[component("web", [], interrupted)]]).run()
    assert caught.value.split(KeyboardInterrupt)[1] is None


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="component names must differ: web, web"):
        Supervisor([[component("web", [])], [component("web", [])]])
