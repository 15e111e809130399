"""The teller, its couriers and the durable queue: nothing waits for a sink, and nothing durable is lost."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.errors import StoreError
from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.dispatcher import PREFIX
from reconciler.alerts.incident import Incident
from reconciler.alerts.sinks.base import SinkError
from state.schema import META
from state.store import Store, StoreBatch
from tests.fakes.threadclock import thread_clock
from tests.reconciler.alerts.durable import keep
from tests.reconciler.alerts.making import World, alert


@pytest.fixture
def autojump_clock() -> Iterator[MockClock]:
    with thread_clock(threshold_s=0.03) as clock:
        yield clock


async def settled(world: World) -> None:
    """Until everything has been delivered that can be, and the store knows it; however long both threads take."""
    await trio.sleep(0.5)
    for _ in range(1000):
        made = all(courier.name in world.made for courier in world.teller.couriers())
        if made and not world.teller._queue.unflushed and not world.lane.borrowed_tokens:
            return
        await trio.sleep(0.01)
    raise AssertionError("it does not settle")


async def running(nursery: trio.Nursery, tmp_path: Path, *names: str, **settings: Any) -> World:
    world = World(tmp_path, *names, **settings)
    await nursery.start(world.teller.run)
    await settled(world)
    return world


def about_sinks(world: World, name: str) -> list[Incident]:
    """The alerts that a sink got of others."""
    return [incident for incident in world.made[name].notices if incident.alert.kind is AlertKind.SOURCE]


async def test_every_sink_is_told_and_a_durable_alert_is_in_the_store_until_all_have_taken_it(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a", "b")
    world.made["b"].broken = SinkError("no")
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    world.teller.send(alert("plain"))
    await settled(world)
    assert sorted(world.made["a"].keys()) == ["k", "plain"]
    (row,) = world.rows()
    assert row.startswith(PREFIX)
    assert world.teller.status()["stored"][0]["to"] == ["b"]  # type: ignore[index]
    world.made["b"].broken = None
    await trio.sleep(10)
    assert sorted(world.made["b"].keys()) == ["k", "plain"]
    assert (world.rows(), world.teller.stored) == ([], 0)


async def test_when_keep_returns_the_row_is_there_and_what_nobody_wants_needs_none(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, "a", minimum=Severity.WARNING)
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    assert len(world.rows()) == 1
    await keep(world.teller, world.store, world.lane, alert("quiet", durable=True, severity=Severity.INFO))
    assert len(world.rows()) == 1
    await nursery.start(world.teller.run)
    await settled(world)
    assert (world.made["a"].log[0][1], world.rows()) == ([("k", 1)], [])


async def test_a_staged_alert_is_stored_with_its_event_or_not_at_all(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a")
    batch = StoreBatch()
    batch.put("assignments", "event", b"\xc0")
    stored = world.teller.stage(batch, alert(durable=True))
    await settled(world)
    assert (world.rows(), world.made["a"].log) == ([], [])
    await trio.to_thread.run_sync(world.store.apply, batch, limiter=world.lane)
    assert len(world.rows()) == 1
    stored()
    await settled(world)
    assert (world.rows(), world.made["a"].log[0][1]) == ([], [("k", 1)])


async def test_a_staged_alert_does_not_wait_for_a_sink_that_a_reload_removes_before_it_is_stored(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """While the store cannot be written that may take long."""
    world = await running(nursery, tmp_path, "a", "b")
    batch = StoreBatch()
    stored = world.teller.stage(batch, alert(durable=True))
    world.teller.reconfigure(world.configured("a"))
    await trio.to_thread.run_sync(world.store.apply, batch, limiter=world.lane)
    stored()
    await settled(world)
    assert (world.rows(), world.teller.stored, world.made["a"].log[0][1]) == ([], 0, [("k", 1)])


async def test_an_alert_that_was_delivered_is_not_stored_when_it_is_staged_again(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a")
    same = alert(durable=True)
    await keep(world.teller, world.store, world.lane, same)
    await settled(world)
    batch = StoreBatch()
    stored = world.teller.stage(batch, same)
    stored()
    await settled(world)
    assert (bool(batch), world.teller.stored, world.rows()) == (False, 0, [])
    assert len(world.made["a"].log) == 1


async def test_a_store_that_takes_nothing_is_said_once_and_the_alert_told_all_the_same(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, "a", "b")
    works = world.store.apply
    broken = True

    def apply(batch: StoreBatch) -> None:
        if broken:
            raise StoreError("the disk is full")
        works(batch)

    world.store.apply = apply  # type: ignore[method-assign]
    await nursery.start(world.teller.run)
    await settled(world)
    world.made["b"].broken = SinkError("no")
    world.teller.stage(StoreBatch(), alert(durable=True))()
    world.teller.stage(StoreBatch(), alert("two", durable=True))()
    await trio.sleep(20)
    assert {"k", "two"} <= set(world.made["a"].keys())
    assert "alerts are kept in memory only: the disk is full" in world.teller.problems()
    assert [record.message for record in caplog.records].count("alerts are kept in memory only") == 1
    broken = False
    await trio.sleep(6)
    assert (len(world.rows()), world.teller.problems()) == (2, ["alerts to b: no"])


@pytest.mark.parametrize("failures", [1, 2])
async def test_stored_alerts_are_reported_as_loaded_only_once_they_are(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    world = World(tmp_path, "a")
    works, errors = world.store.rows, [StoreError("damaged")] * failures

    def rows(table: str) -> list[tuple[str, bytes]]:
        if errors:
            raise errors.pop()
        return works(table)

    world.store.rows = rows  # type: ignore[method-assign]
    with suppress(StoreError):
        await world.teller._load()
    loaded = [record.message for record in caplog.records if record.message.startswith("stored alerts loaded")]
    assert len(loaded) == (failures == 1)


async def test_a_store_that_was_replaced_gets_all_rows_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    world = World(tmp_path, "a")
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    assert await world.teller._queue.flush()
    (tmp_path / "state.db").unlink()
    await keep(world.teller, world.store, world.lane, alert("two", durable=True))
    assert await world.teller._queue.flush()
    assert len(world.rows()) == 2


async def test_tries_wait_longer_and_longer_and_as_long_as_the_sink_asks(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a")
    sink = world.made["a"]
    sink.errors = [SinkError("no") for _ in range(12)] + [SinkError("wait", retry_after_s=1000)]
    world.teller.send(alert())
    await trio.sleep(6000)
    waits = [after - before for before, after in zip(sink.tries, sink.tries[1:], strict=False)]
    assert len(waits) == 13
    for number, wait in enumerate(waits[:12]):
        assert 0.5 * min(300, 2**number) <= wait <= 1.5 * min(300, 2**number) + 0.1
    assert waits[12] > 999.9
    assert (sink.log[0][1], world.teller.problems()) == ([("k", 1)], [])


async def test_a_sink_that_hangs_is_cut_off_and_holds_nobody_up(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a", "b", timeout_s=10.0)
    world.made["b"].hang_s = 1e6
    world.teller.send(alert())
    await settled(world)
    assert world.made["a"].log[0][1] == [("k", 1)]
    await trio.sleep(16)
    assert world.teller.problems() == ["alerts to b: no success within 15 s"]


async def test_after_its_age_or_its_tries_an_alert_is_given_up_and_let_go_from_the_store(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a", give_up_s=100.0)
    world.made["a"].broken = SinkError("no")
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    assert await world.teller._queue.flush()
    await trio.sleep(60)
    assert len(world.rows()) == 1
    await trio.sleep(300)
    (courier,) = world.teller.couriers()
    assert (world.rows(), courier.outbox.tally.failed) == ([], 1)
    world.config = world.configured("a", attempts=3)
    world.teller.reconfigure(world.config)
    await settled(world)
    before = len(world.made["a"].tries)
    await keep(world.teller, world.store, world.lane, alert("two", durable=True))
    assert await world.teller._queue.flush()
    await trio.sleep(300)
    assert (len(world.made["a"].tries) - before, world.rows()) == (3, [])


async def test_of_a_batch_that_is_refused_for_good_only_the_guilty_one_is_given_up(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a", batch_delay_s=1.0)
    sink = world.made["a"]
    plain = sink.send

    async def send(notices: Sequence[Incident]) -> None:
        if any(incident.alert.key == "bad" for incident in notices):
            raise SinkError("400", permanent=True)
        await plain(notices)

    sink.send = send  # type: ignore[method-assign]
    for key in ("x", "bad", "y"):
        world.teller.send(alert(key))
    await trio.sleep(5)
    assert sorted(sink.keys()) == ["x", "y"]
    assert world.teller.couriers()[0].outbox.tally.failed == 1


async def test_a_failing_sink_is_told_to_the_others_once_and_never_to_itself(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = await running(nursery, tmp_path, "a", "b")
    world.made["b"].broken = SinkError("no door")
    world.teller.send(alert())
    await trio.sleep(600)
    assert [(incident.alert.summary, incident.has_ended) for incident in about_sinks(world, "a")] == [
        ("alerts to b cannot be delivered: no door", False)
    ]
    assert [record.message for record in caplog.records].count("delivery failed, retrying") == 1
    world.made["b"].broken = None
    await trio.sleep(600)
    assert [incident.has_ended for incident in about_sinks(world, "a")] == [False, True]
    assert [incident.alert.key for incident in world.made["b"].notices] == ["k"]


@pytest.mark.parametrize("change", ["mended", "removed"])
async def test_a_failing_sink_that_a_reload_changes_or_removes_is_reported_as_ended_to_the_others(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, change: str
) -> None:
    world = await running(nursery, tmp_path, "a", "b")
    world.made["b"].broken = SinkError("no door")
    world.teller.send(alert())
    await trio.sleep(600)
    assert [incident.has_ended for incident in about_sinks(world, "a")] == [False]
    if change == "removed":
        world.teller.reconfigure(world.configured("a"))
    else:
        # The first change does not help.
        world.teller.reconfigure(world.configured("a", "b", timeout_s=3.0))
        await trio.sleep(60)
        assert [incident.has_ended for incident in about_sinks(world, "a")] == [False]
        world.made["b"].broken = None
        world.teller.reconfigure(world.configured("a", "b", timeout_s=4.0))
    await trio.sleep(60)
    ended = about_sinks(world, "a")[-1]
    words = {"mended": "alerts to b are delivered again", "removed": "alerts to b: the sink is no longer configured"}
    assert (ended.has_ended, ended.alert.summary) == (True, words[change])


async def test_what_an_earlier_run_left_is_told_with_its_id_and_goes_on_counting(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, "a", "gone")
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    assert await world.teller._queue.flush()
    (row,) = world.rows()
    world.config = world.configured("a", "new")
    world.teller = world.new_teller()
    # The event's journal did not have the delivery: it is sent again.
    await nursery.start(world.teller.run)
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    await settled(world)
    (incident,) = world.made["a"].notices
    assert (f"{PREFIX}{incident.id}", incident.count, world.rows(), world.made["new"].notices) == (row, 1, [], [])


async def test_what_a_state_began_as_is_known_to_its_end_in_the_next_run(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, "a")
    await keep(
        world.teller, world.store, world.lane, alert(kind=AlertKind.STORE, severity=Severity.CRITICAL, durable=True)
    )
    assert await world.teller._queue.flush()
    world.teller = world.new_teller()
    await nursery.start(world.teller.run)
    world.teller.send(alert(kind=AlertKind.STORE, severity=Severity.INFO, resolved=True))
    await settled(world)
    end = world.made["a"].notices[-1]
    assert (end.has_ended, end.alert.severity, end.began_as) == (True, Severity.INFO, Severity.CRITICAL)


async def test_rows_that_cannot_be_read_are_removed_and_those_of_a_newer_version_left(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, "a")
    batch = StoreBatch()
    batch.put(META, f"{PREFIX}bad", b"\xc1")
    batch.put(META, f"{PREFIX}odd", msgspec.msgpack.encode({"v": 1}))
    batch.put(META, f"{PREFIX}new", msgspec.msgpack.encode({"v": 2, "notice": 7}))
    await trio.to_thread.run_sync(world.store.apply, batch, limiter=world.lane)
    await nursery.start(world.teller.run)
    await settled(world)
    assert world.rows() == [f"{PREFIX}new"]


async def test_the_store_is_bounded_and_critical_rows_go_last(tmp_path: Path, autojump_clock: MockClock) -> None:
    world = World(tmp_path, "a", most=10)
    await keep(world.teller, world.store, world.lane, alert("loud", durable=True, severity=Severity.CRITICAL))
    assert await world.teller._queue.flush()
    for number in range(12):
        await keep(world.teller, world.store, world.lane, alert(str(number), durable=True))
    assert await world.teller._queue.flush()
    kept = [row["key"] for row in world.teller.status()["stored"]]  # type: ignore[attr-defined]
    assert kept == ["loud", *(str(number) for number in range(3, 12))]
    assert len(world.rows()) == 10


async def test_a_reload_adds_changes_and_takes_out_sinks_and_changed_ones_keep_what_waits(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a", "b")
    for sink in world.made.values():
        sink.broken = SinkError("no")
    await keep(world.teller, world.store, world.lane, alert(durable=True))
    assert await world.teller._queue.flush()
    await settled(world)
    world.made["a"].broken = None
    world.teller.reconfigure(world.configured("a", "c", timeout_s=3.0))
    await trio.sleep(5)
    assert (world.made["a"].log[-1][1], world.rows()) == ([("k", 1)], [])
    assert world.made["b"].closed == 1
    world.teller.send(alert("next"))
    await settled(world)
    assert [world.made[name].notices[-1].alert.key for name in "ac"] == ["next", "next"]
    assert [courier.name for courier in world.teller.couriers()] == ["a", "c"]


async def test_a_test_tells_each_sink_around_its_filters_and_says_what_came_of_it(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a", "b", minimum=Severity.CRITICAL)
    world.made["b"].broken = SinkError("no door")
    world.teller.reconfigure(replace(world.config, labels={"cluster": "east"}))
    results = await world.teller.test(None, "ana")
    assert [(result["sink"], result["ok"], result["detail"]) for result in results] == [
        ("a", True, "taken"),
        ("b", False, "no door"),
    ]
    (incident,) = world.made["a"].notices
    assert (incident.alert.kind, incident.labels, incident.alert.details) == (
        AlertKind.TEST,
        {"cluster": "east"},
        {"by": "ana"},
    )
    assert [fields["sink"] for fields in await world.teller.test("a", "ana")] == ["a"]


async def test_words_that_no_sink_can_write_are_made_writable_and_bounded(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world = await running(nursery, tmp_path, "a")
    odd = alert("a\udcff", durable=True, summary="x" * 9999, details={"comm\udc80\x1b": "\udc80ü\n<0>\u202e"})
    await keep(world.teller, world.store, world.lane, odd)
    await settled(world)
    (incident,) = world.made["a"].notices
    assert (incident.alert.key, len(incident.alert.summary)) == (r"a\udcff", 4096)
    assert incident.alert.details == {r"comm\udc80\x1b": r"\udc80ü" + "\n" + r"<0>\u202e"}


async def test_the_teller_goes_on_with_everything_after_it_was_started_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, "a")
    for key in ("one", "two"):
        async with trio.open_nursery() as nursery:
            await nursery.start(world.teller.run)
            await keep(world.teller, world.store, world.lane, alert(key, durable=True))
            await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
    assert [incident.alert.key for incident in world.made["a"].notices] == ["one", "two"]
    assert Store(str(tmp_path / "state.db")).rows(META)
    assert world.rows() == []
