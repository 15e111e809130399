"""Holds last as long as requested, whatever the clocks, the store's rows and their number are."""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from cgroupfs.errors import InputError
from reconciler.actuators.holds import LONGEST_S, MOST
from reconciler.control.persistence import encoded
from reconciler.control.record import HoldManager, HoldRows
from reconciler.web.interface import HoldRequest, RestoreRequest
from state.model import Hold
from state.schema import HOLDS
from state.store import Store, StoreBatch
from tests.fakes.livenode import BATCH, LiveNode
from tests.fakes.report import status_report


class Rows:
    """The store's end of a book: what is durable."""

    def __init__(self) -> None:
        self.rows: dict[str, Hold] = {}

    def stored(self) -> dict[str, Hold]:
        return dict(self.rows)

    async def write(self, target: str, hold: Hold | None) -> None:
        self.soon(target, hold)

    def soon(self, target: str, hold: Hold | None) -> None:
        if hold is None:
            self.rows.pop(target, None)
        else:
            self.rows[target] = hold


class World:
    """Two clocks that are set by hand, and a store that outlives books. ``wall`` may be set, ``boot`` only runs."""

    def __init__(self) -> None:
        self.wall, self.boot, self.boot_id = 1_800_000_000.0, 1000.0, "boot-1"
        self.store = Rows()
        self.published: Mapping[str, Hold] = {}
        self.book = self.start()

    @property
    def in_force(self) -> Mapping[str, Hold]:
        """As the book has published them, if it has since it began; else as it began."""
        return self.published

    def start(self) -> HoldManager:
        """As the daemon does when it starts."""
        book = HoldManager(
            self.store,  # type: ignore[arg-type]
            lambda now: setattr(self, "published", now),
            boot_id=self.boot_id,
            wall=lambda: self.wall,
            boot=lambda: self.boot,
        )
        self.book, self.published = book, book.in_force
        book.expire()
        return book

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.boot += seconds
        self.book.expire()

    async def hold(self, seconds: float | None, target: str = "node") -> Hold:
        until = None if seconds is None else self.wall + seconds
        return await self.book.put(Hold(target=target, reason="r", by="ana", until=until))

    def held(self) -> bool:
        return "node" in self.in_force


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("jump", [-10 * 86400.0, -3600.0, 3600.0, 10 * 86400.0])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_clock_that_is_set_neither_ends_a_hold_nor_prolongs_it(
    world: World, jump: float, restart: bool
) -> None:
    await world.hold(1000)
    world.passes(400)
    world.wall += jump
    if restart:
        world.start()
    world.passes(590)
    assert world.held()
    assert world.in_force["node"].until == pytest.approx(world.wall + 10, abs=3)
    world.passes(11)
    assert not world.held()
    assert not world.store.rows


async def test_a_suspend_counts(world: World) -> None:
    await world.hold(1000)
    # Monotonic clocks stop meanwhile; these two do not.
    world.passes(1001)
    assert not world.held()


async def test_after_a_reboot_the_wall_clock_counts(world: World) -> None:
    await world.hold(1000)
    world.wall, world.boot, world.boot_id = world.wall + 600, 5.0, "boot-2"
    world.start()
    world.passes(399)
    assert world.held()
    world.passes(2)
    assert not world.held()


async def test_after_a_reboot_with_a_clock_of_long_ago_a_hold_lasts_no_longer_than_it_was_to(world: World) -> None:
    await world.hold(1000)
    world.wall, world.boot, world.boot_id = 0.0, 5.0, "boot-2"
    world.start()
    world.passes(500)
    world.wall = 1_800_000_500.0  # NTP has answered
    world.start()
    world.passes(490)
    assert world.held()
    world.passes(11)
    assert not world.held()


@pytest.mark.parametrize("until", [math.nan, -math.inf, -5.0, 0.0])
async def test_a_stored_end_that_makes_no_sense_is_over(world: World, until: float) -> None:
    world.store.rows["node"] = Hold(target="node", reason="r", by="b", until=until)
    world.start()
    assert not world.held()
    assert not world.store.rows


@pytest.mark.parametrize("until", [math.inf, 1e308, 1_800_000_000.0 + 1e9])
async def test_a_stored_end_beyond_the_bound_is_the_bound_counted_once(world: World, until: float) -> None:
    world.store.rows["node"] = Hold(target="node", reason="r", by="b", until=until)
    for _ in range(3):
        world.start()
        world.passes(LONGEST_S / 3 - 1)
    assert world.held()
    world.passes(4)
    assert not world.held()


async def test_a_stored_hold_without_an_end_stays_one(world: World) -> None:
    world.store.rows["node"] = Hold(target="node", reason="r" * 100_000, by="b\x1b[2J\n")
    world.start()
    world.passes(10 * LONGEST_S)
    assert world.held()
    assert world.in_force["node"].by == r"b\x1b[2J\n"
    assert len(world.in_force["node"].reason) < 1000


async def test_a_stored_row_that_is_no_hold_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state.db"))
    batch = StoreBatch()
    batch.put(HOLDS, "node", encoded(Hold(target="pod:other", reason="r", by="b")))
    batch.put(HOLDS, "pod:x", msgspec.msgpack.encode({"target": "pod:x", "reason": 5}))
    batch.put(HOLDS, "nonsense", encoded(Hold(target="nonsense", reason="r", by="b")))
    batch.put(HOLDS, "pod:y", encoded(Hold(target="pod:y", reason="r", by="b")))
    store.apply(batch)
    assert set(HoldManager(HoldRows(store, trio.CapacityLimiter(1)), print).all) == {"pod:y"}
    store.close()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, LONGEST_S + 10])
async def test_an_end_without_sense_is_refused(world: World, seconds: float) -> None:
    with pytest.raises(InputError, match="hold until"):
        await world.hold(seconds)
    assert not world.book.all


async def test_there_are_so_many_holds_and_no_more(world: World) -> None:
    for number in range(MOST):
        await world.hold(1000, f"pod:{number}")
    with pytest.raises(InputError, match="release some"):
        await world.hold(1000)
    await world.hold(500, "pod:7")
    # What a person has written meanwhile counts all the same, in the place of what would end first.
    world.book.add_manual(Hold(target="file:/x:cpu.set", reason="set manually", by="sh\x1b", until=world.wall + 60))
    assert len(world.book.all) == len(world.store.rows) == MOST
    assert "pod:7" not in world.book.all
    assert world.book.all["file:/x:cpu.set"].by == r"sh\x1b"


async def test_holds_in_the_store_beyond_the_bound_are_not_in_force(world: World) -> None:
    for number in range(MOST + 5):
        world.store.rows[f"pod:{number}"] = Hold(target=f"pod:{number}", reason="r", by="b")
    assert len(world.start().all) == MOST


@pytest.mark.parametrize("meanwhile", ["released by another", "expired"])
async def test_a_hold_may_end_while_its_release_waits_for_the_store(
    tmp_path: Path, world: World, meanwhile: str
) -> None:
    store, lane = Store(str(tmp_path / "state.db")), trio.CapacityLimiter(1)
    book = HoldManager(
        HoldRows(store, lane), lambda _holds: None, boot_id="b", wall=lambda: world.wall, boot=lambda: world.boot
    )
    await book.put(Hold(target="node", reason="r", by="ana", until=world.wall + 60))
    results: list[bool] = []

    async def release() -> None:
        results.append(await book.release("node"))

    await lane.acquire_on_behalf_of("another part")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(release)
        if meanwhile == "expired":
            await trio.testing.wait_all_tasks_blocked()
            world.wall, world.boot = world.wall + 61, world.boot + 61
            book.expire()
        else:
            nursery.start_soon(release)
            await trio.testing.wait_all_tasks_blocked()
        lane.release_on_behalf_of("another part")
    assert results == ([True] if meanwhile == "expired" else [True, True])
    assert not book.all
    assert not dict(store.rows(HOLDS))
    store.close()


# Through the daemon's own controls


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"seconds": 60.0, "until_released": True},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": LONGEST_S + 1},
        {"seconds": 60.0, "reason": ""},
        {"seconds": 60.0, "reason": "x" * 501},
        {"seconds": 60.0, "target": "pod:" + "x" * 5000},
        {"seconds": 60.0, "target": "pod:\x1b[2J"},
    ],
)
async def test_an_order_without_sense_is_refused(live: LiveNode, asked: dict[str, object]) -> None:
    with live.agent() as agent:
        show = status_report(agent)
        request = {"target": "node", "reason": "r", "by": "ana", **asked}
        with pytest.raises(InputError):
            await show.hold(msgspec.convert(request, HoldRequest))
        assert not agent.record.holds.all


async def test_restoring_a_pod_leaves_a_persons_hold_as_it_is(live: LiveNode) -> None:
    async with live.shown() as (agent, show):
        made = await show.hold(HoldRequest(target=f"pod:{BATCH}", reason="INC-42 debugging", by="ana", seconds=600.0))
        answer = await show.restore(RestoreRequest(pod_uid=BATCH, by="ben"))
        assert agent.record.holds.all == {f"pod:{BATCH}": made}
        assert msgspec.convert(answer["hold"], Hold) == made


async def test_restoring_a_pod_that_is_not_held_holds_it_for_a_while(live: LiveNode) -> None:
    async with live.shown() as (agent, show):
        answer = await show.restore(RestoreRequest(pod_uid=BATCH, by="ben"))
        (hold,) = agent.record.holds.all.values()
        assert (hold.target, hold.by) == (f"pod:{BATCH}", "ben")
        assert hold.seconds == pytest.approx(3600.0)
        assert msgspec.convert(answer["hold"], Hold) == hold
