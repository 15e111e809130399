import time

import pytest
import trio
from trio.testing import MockClock

from reconciler.runtime.workqueue import DirtyBatch, DirtyKeys, container_key, pod_key


async def test_a_thousand_marks_of_one_key_are_one_look() -> None:
    dirty = DirtyKeys()
    for _ in range(1000):
        dirty.mark(pod_key("u"))
    dirty.mark(container_key("c"))
    assert await dirty.take() == DirtyBatch(frozenset({"pod:u", "container:c"}), ())
    assert not dirty
    assert dirty.marks == 1001


async def test_take_waits_for_the_first_mark(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    dirty = DirtyKeys()
    got: list[tuple[float, DirtyBatch]] = []

    async def taker() -> None:
        while True:
            batch = await dirty.take()
            got.append((trio.current_time(), batch))

    nursery.start_soon(taker)
    await trio.sleep(5)
    dirty.mark_all("overflow")
    dirty.mark_all("overflow")
    dirty.mark("node")
    await trio.sleep(1)
    nursery.cancel_scope.cancel()
    assert got == [(5.0, DirtyBatch(frozenset({"node"}), ("overflow",)))]
    assert dirty.resyncs == {"overflow": 2}


async def test_a_cancelled_take_loses_nothing(autojump_clock: MockClock) -> None:
    dirty = DirtyKeys()
    with trio.move_on_after(1):
        await dirty.take()
    dirty.mark("node")
    assert (await dirty.take()).keys == {"node"}


async def test_what_may_wait_joins_the_next_pass_or_has_one_in_time(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    dirty = DirtyKeys()
    got: list[tuple[float, list[str]]] = []

    async def taker() -> None:
        while True:
            keys = (await dirty.take()).keys
            got.append((round(trio.current_time(), 3), sorted(keys)))

    nursery.start_soon(taker)
    dirty.mark("a", within_s=0.1)
    await trio.sleep(0.05)
    dirty.mark("b", within_s=0.02)
    dirty.mark("c", within_s=0.5)
    await trio.sleep(1)
    dirty.mark("d", within_s=0.5)
    await trio.sleep(0.1)
    dirty.mark("node")
    await trio.sleep(1)
    nursery.cancel_scope.cancel()
    assert got == [(0.07, ["a", "b", "c"]), (1.15, ["d", "node"])]


@pytest.mark.parametrize("key", ["node", "tick", "files:a", "loan:a"])
async def test_a_key_of_no_creation_makes_nothing_late(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    dirty = DirtyKeys()
    dirty.mark(key)
    dirty.take_nowait()
    now += 1
    dirty.mark(key)
    assert dirty.waited_s() == 0
    dirty.mark("container:a")
    now += 0.25
    assert dirty.waited_s() == 0.25


async def test_how_long_the_oldest_urgent_key_waits_is_known_until_its_pass_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    dirty = DirtyKeys()
    dirty.mark("pod:a", within_s=5)
    now += 1
    assert dirty.waited_s() == 0
    dirty.mark("pod:b")
    now += 1
    dirty.take_nowait()
    dirty.mark("container:c")
    now += 1
    assert dirty.waited_s() == 2
    dirty.passed()
    assert dirty.waited_s() == 1
    dirty.take_nowait()
    dirty.passed()
    assert dirty.waited_s() == 0
    # A pass that takes again has the keys of both times.
    for key in ("pod:d", "pod:e"):
        dirty.mark(key)
        now += 1
        dirty.take_nowait()
    assert dirty.waited_s() == 2
    dirty.passed()
    assert dirty.waited_s() == 0
