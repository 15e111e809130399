"""The hourly rows: minutes with and without BE work, counters that grow and begin again, and rows over restarts."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import trio

from reconciler.control.effect_hours import (
    COUNTED,
    DAYS,
    ROW,
    STEP,
    EffectHour,
    EffectHours,
    ModeNow,
    bucket_of,
    load_effect,
)
from reconciler.control.hour_rows import HOUR_S
from reconciler.control.pod_minutes import Minute
from reconciler.headroom.promises import NodePromises, PromiseMinute
from state.reader import read_dump
from state.schema import META
from state.store import Store, StoreBatch
from tests.reconciler.nodes import online, pod

START = 500_000 * HOUR_S + 60.0
HOUR = 500_000
DAY_S = 86_400.0


class Books:
    """``now``: the true time; ``wrong``: by how much the wall clock is ahead of it."""

    def __init__(self, path: Path) -> None:
        self.now = START
        self.wrong = 0.0
        self.booted = START - 30 * DAY_S
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.mode = ModeNow(enforces=True, on_hold=False)
        self.promises = NodePromises("recent", PromiseMinute(4000, 4000), PromiseMinute(0, None))
        self.window: str | None = None
        self.path = str(path / "state.db")
        self.store = Store(self.path, boot="boot-1")
        self.effect = self.opened()

    def opened(self) -> EffectHours:
        lane = trio.CapacityLimiter(1)
        return EffectHours(
            self.store,
            lane,
            counted=lambda: Counter(self.counters),
            mode=lambda: self.mode,
            promises=lambda: self.promises,
            window=lambda: self.window,
            wall=lambda: self.now + self.wrong,
            uptime=lambda: self.now - self.booted,
        )

    def reboot(self, *, wrong: float = 0.0) -> None:
        """The next boot finds the store, and a clock that may be wrong."""
        self.store.close()
        self.booted, self.wrong = self.now, wrong
        self.store = Store(self.path, boot=f"boot-{self.now}")
        self.effect = self.opened()

    def put(self, rows: Mapping[str, bytes]) -> None:
        """Into the store, by the key after the prefix."""
        batch = StoreBatch()
        for key, row in rows.items():
            batch.put(META, f"{ROW}{key}", row)
        self.store.apply(batch)

    async def stored(self) -> dict[int, int]:
        """Minutes by hour, as the store has them after a save."""
        await self.effect.save()
        return {at - HOUR: hour.minutes for at, hour in sorted(load_effect(self.store).items())}

    def hours_of_this_boot(self) -> list[int]:
        """As the store has them."""
        (row,) = (row for key, row in self.store.rows(META) if key == f"{ROW}clock")
        return [at - HOUR for at in msgspec.msgpack.decode(row)["hours"]]

    def minute(self, be_milli: float, *minutes: Minute) -> None:
        pods = [(pod("be"), Minute(be_milli, 0.0, None))]
        pods += [(online(f"web-{number}"), minute) for number, minute in enumerate(minutes)]
        self.effect.minute(pods)


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def test_a_minute_is_one_with_be_work_or_without(books: Books) -> None:
    books.minute(1500.0, Minute(100.0, 10.0, 20.0), Minute(100.0, None, 40.0))
    books.mode = books.mode._replace(broken=True)
    books.minute(10.0, Minute(100.0, 0.0, 5.0), Minute(100.0, 0.0, None))
    (hour,) = books.effect.hours.values()
    assert (hour.minutes, hour.enforced, hour.held, hour.broken) == (2, 2, 0, 1)
    assert hour.be_cpu_s == (1.5 + 0.01) * 60
    assert (hour.with_be.minutes, hour.with_be.samples, hour.with_be.wait_milli) == (1, 2, 60.0)
    assert (hour.with_be.throttled_samples, hour.with_be.throttled_milli) == (1, 10.0)
    assert (hour.without_be.samples, hour.without_be.wait_milli) == (1, 5.0)


@pytest.mark.parametrize("window", [None, "office"])
async def test_commands_take_no_stored_row_for_a_damaged_one(books: Books, window: str | None) -> None:
    books.window = window
    books.minute(1500.0, Minute(100.0, 10.0, 20.0))
    await books.effect.save()
    dump = read_dump(books.path)
    assert dump["problems"] == []
    assert isinstance(dump["meta"], dict)
    assert {f"{ROW}{HOUR}", f"{ROW}clock"} <= dump["meta"].keys()


async def test_broken_promises_are_counted_by_hour_and_survive_a_restart(books: Books) -> None:
    books.minute(0.0)
    books.promises = NodePromises("histogram", PromiseMinute(4000, 1000), PromiseMinute(8 << 30, 9 << 30))
    books.minute(0.0)
    await books.effect.save()
    books.effect = books.opened()
    books.minute(0.0)
    (hour,) = books.effect.hours.values()
    cpu, memory = hour.promises.cpu, hour.promises.memory
    assert hour.promises.laws == {"recent": 1, "histogram": 2}
    assert (cpu.kept, cpu.broken, cpu.missing, cpu.most_missing) == (1, 2, 6000.0, 3000.0)
    assert (memory.kept, memory.broken, memory.unknown) == (2, 0, 1)


def test_counters_are_added_as_they_grow_also_after_they_began_again(books: Books) -> None:
    books.counters["evictions"] = 2
    books.minute(0.0)
    books.minute(0.0)
    books.counters["evictions"] = 1  # the part that counts was built again
    books.minute(0.0)
    (hour,) = books.effect.hours.values()
    assert hour.counts == {"evictions": 3}


async def test_rows_survive_a_restart_and_old_ones_are_deleted(books: Books) -> None:
    books.mode = ModeNow(enforces=False, on_hold=True, broken=True)
    books.minute(1000.0, Minute(100.0, 1.0, 2.0))
    await books.effect.save()
    books.effect = books.opened()
    books.minute(1000.0, Minute(100.0, 1.0, 2.0))
    (hour,) = books.effect.hours.values()
    assert (hour.minutes, hour.enforced, hour.held, hour.with_be.samples) == (2, 0, 2, 2)
    assert hour.broken == 0, "without writing nothing is promised"
    books.now += DAYS * 86400
    books.minute(0.0)
    assert await books.stored() == {DAYS * 24: 1}
    assert books.hours_of_this_boot() == [DAYS * 24]


async def test_a_node_that_boots_with_its_clock_behind_keeps_its_hours_and_gets_the_new_ones_at_their_time(
    books: Books,
) -> None:
    books.minute(0.0)
    await books.stored()
    books.now += 7 * HOUR_S
    books.reboot(wrong=-1_000 * DAY_S)
    for _ in range(2):
        books.minute(0.0)
    behind = 7 - 24_000
    assert await books.stored() == {behind: 2, 0: 1}
    # The time is set over the network.
    books.now += 60.0
    books.wrong = 0.0
    books.minute(0.0)
    assert await books.stored() == {0: 1, 7: 3}


async def test_a_step_while_the_daemon_was_down_moves_the_rows_of_this_boot_too(books: Books) -> None:
    books.reboot(wrong=-50 * HOUR_S)
    books.minute(0.0)
    assert await books.stored() == {-50: 1}
    books.now += 60.0
    books.wrong = 0.0
    books.effect = books.opened()
    books.minute(0.0)
    assert await books.stored() == {0: 2}


async def test_a_clock_that_is_wrong_for_hours_costs_no_row(books: Books) -> None:
    books.minute(0.0)
    await books.stored()
    books.now += 3 * HOUR_S
    books.reboot()
    books.minute(0.0)
    for wrong in (400 * DAY_S, -400 * DAY_S, 0.0):
        books.wrong = wrong
        books.now += HOUR_S
        books.minute(0.0)
        await books.stored()
    # The row of the boot before was never moved; those of this boot were, and back.
    assert await books.stored() == {0: 1, 3: 1, 4: 1, 5: 1, 6: 1}


async def test_small_corrections_move_nothing(books: Books) -> None:
    for wrong in (300.0, -300.0, 900.0):
        books.wrong = wrong
        books.minute(0.0)
    assert await books.stored() == {-1: 1, 0: 2}


async def test_rows_of_a_wrong_clock_are_bounded_and_dropped_when_the_clock_was_right_for_a_day(books: Books) -> None:
    row = msgspec.msgpack.encode(EffectHour(minutes=1))
    books.put({str(at): row for at in (*range(HOUR + 5_000, HOUR + 6_000), HOUR - 5_000)})
    books.reboot()
    books.minute(0.0)
    kept = await books.stored()
    assert len(kept) == 2 * DAYS * 24
    assert 0 in kept
    books.now += DAY_S
    books.minute(0.0)
    assert await books.stored() == {0: 1, 24: 1}


def test_rows_that_cannot_be_read_are_left_out(books: Books) -> None:
    clock = msgspec.msgpack.encode({"boot": "boot-1", "offset_s": "far"})
    books.put({"clock": clock, "500000": b"\x81\xa7minutes\xff"})
    assert load_effect(books.store) == {}
    books.effect = books.opened()
    books.minute(0.0)
    assert [(at - HOUR, hour.minutes) for at, hour in books.effect.hours.items()] == [(0, 1)]


def test_a_bucket_ends_a_quarter_above_the_one_before() -> None:
    assert bucket_of(0.0) == 0
    assert bucket_of(0.05 * STEP**7 * 0.999) == 7
    assert bucket_of(0.05 * STEP**7 * 1.001) == 8
    assert bucket_of(1e12) == 64


async def test_each_window_has_its_part_of_the_hour_also_after_a_restart(books: Books) -> None:
    books.minute(1000.0)
    for name in ("office", "office", ""):
        books.window = name
        books.counters["evictions"] += 1
        books.minute(1000.0, Minute(100.0, 1.0, 2.0))
    await books.stored()
    books.effect = books.opened()
    books.minute(0.0, Minute(100.0, 1.0, 4.0))
    (hour,) = books.effect.hours.values()
    office, outside = hour.windows["office"], hour.windows[""]
    assert hour.windows.keys() == {"office", ""}
    assert (hour.minutes, office.minutes, outside.minutes) == (5, 2, 2)
    assert (office.be_cpu_s, outside.be_cpu_s) == (120.0, 60.0)
    assert (office.with_be.samples, outside.with_be.samples, outside.without_be.wait_milli) == (2, 1, 4.0)
    assert (hour.counts["evictions"], office.counts["evictions"], outside.counts["evictions"]) == (6, 2, 4)


def test_rows_of_one_hour_have_the_parts_of_both_and_their_number_is_bounded(tmp_path: Path) -> None:
    first, second = Books(tmp_path / "a"), Books(tmp_path / "b")
    for books, names in ((first, ["one", "both"]), (second, ["both", *(f"w{number}" for number in range(80))])):
        for name in names:
            books.window = name
            books.minute(1000.0)
    (hour,), (other,) = first.effect.hours.values(), second.effect.hours.values()
    assert (other.minutes, len(other.windows)) == (81, 64)
    hour.merge(other)
    assert (hour.minutes, len(hour.windows), hour.windows["both"].minutes) == (83, 64, 2)


async def test_a_save_that_is_cancelled_while_it_waits_for_the_store_loses_no_minute(books: Books) -> None:
    """An end of the daemon while another part writes to the store: the last save has to have what the first had."""
    lane = trio.CapacityLimiter(1)
    books.effect = EffectHours(
        books.store,
        lane,
        counted=Counter,
        mode=lambda: books.mode,
        promises=lambda: books.promises,
        window=lambda: None,
        wall=lambda: books.now,
        uptime=lambda: books.now - books.booted,
    )
    books.minute(0.0)
    await lane.acquire_on_behalf_of("another part")
    with trio.move_on_after(0) as scope:
        await books.effect.save()
    assert scope.cancelled_caught
    lane.release_on_behalf_of("another part")
    assert await books.stored() == {0: 1}
