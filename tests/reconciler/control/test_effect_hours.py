"""The hourly rows: minutes with and without BE work, counters that grow and begin again, and rows over restarts."""

from collections import Counter
from pathlib import Path

import trio

from reconciler.control.effect_hours import COUNTED, DAYS, ROW, STEP, EffectHours, bucket_of, load_effect
from reconciler.control.hour_rows import HOUR_S
from reconciler.control.pod_minutes import Minute
from state.schema import META
from state.store import Store, StoreBatch
from tests.reconciler.nodes import online, pod

START = 500_000 * HOUR_S + 60.0


class Books:
    def __init__(self, path: Path) -> None:
        self.now = START
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.mode = (True, False)
        self.store = Store(str(path / "state.db"), boot="boot-1")
        self.effect = self.opened()

    def opened(self) -> EffectHours:
        lane = trio.CapacityLimiter(1)
        return EffectHours(
            self.store, lane, counted=lambda: Counter(self.counters), mode=lambda: self.mode, wall=lambda: self.now
        )

    def minute(self, be_milli: float, *minutes: Minute) -> None:
        pods = [(pod("be"), Minute(be_milli, 0.0, None))]
        pods += [(online(f"web-{number}"), minute) for number, minute in enumerate(minutes)]
        self.effect.minute(pods)


def test_a_minute_is_one_with_be_work_or_without(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.minute(1500.0, Minute(100.0, 10.0, 20.0), Minute(100.0, None, 40.0))
    books.minute(10.0, Minute(100.0, 0.0, 5.0), Minute(100.0, 0.0, None))
    (hour,) = books.effect.hours.values()
    assert (hour.minutes, hour.enforced, hour.held) == (2, 2, 0)
    assert hour.be_cpu_s == (1.5 + 0.01) * 60
    assert (hour.with_be.minutes, hour.with_be.samples, hour.with_be.wait_milli) == (1, 2, 60.0)
    assert (hour.with_be.throttled_samples, hour.with_be.throttled_milli) == (1, 10.0)
    assert (hour.without_be.samples, hour.without_be.wait_milli) == (1, 5.0)


def test_counters_are_added_as_they_grow_also_after_they_began_again(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.counters["evictions"] = 2
    books.minute(0.0)
    books.minute(0.0)
    books.counters["evictions"] = 1  # the part that counts was built again
    books.minute(0.0)
    (hour,) = books.effect.hours.values()
    assert hour.counts == {"evictions": 3}


def test_rows_survive_a_restart_and_old_ones_are_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        books = Books(tmp_path)
        books.mode = (False, True)
        books.minute(1000.0, Minute(100.0, 1.0, 2.0))
        await books.effect.save()
        books.effect = books.opened()
        books.minute(1000.0, Minute(100.0, 1.0, 2.0))
        (hour,) = books.effect.hours.values()
        assert (hour.minutes, hour.enforced, hour.held, hour.with_be.samples) == (2, 0, 2, 2)
        books.now += DAYS * 86400
        books.minute(0.0)
        await books.effect.save()
        assert list(load_effect(books.store)) == [int(books.now) // HOUR_S]

    trio.run(run)


def test_a_row_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    books = Books(tmp_path)
    batch = StoreBatch()
    batch.put(META, f"{ROW}500000", b"\x81\xa7minutes\xff")
    books.store.apply(batch)
    assert load_effect(books.store) == {}


def test_a_bucket_ends_a_quarter_above_the_one_before() -> None:
    assert bucket_of(0.0) == 0
    assert bucket_of(0.05 * STEP**7 * 0.999) == 7
    assert bucket_of(0.05 * STEP**7 * 1.001) == 8
    assert bucket_of(1e12) == 64
