"""The publisher in time: what is due when, what is noted before it is written, and how it ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.errors import AgentError, SourceError
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.publisher import (
    BURST,
    FALL_S,
    FOREIGN_S,
    NAME,
    REFILL_S,
    RETRY_S,
    RISE_S,
    SEARCH_S,
    HeadroomPublisher,
    Published,
    PublishError,
)
from reconciler.headroom.shapes import Offer


class Target:
    """A target that keeps what it gets, with the time."""

    def __init__(self, name: ClusterTarget, journal: list[str]) -> None:
        self.name = name
        self.error: AgentError | None = None
        self.edit = ""
        self.missing = False
        self.writes: list[tuple[float, Offer]] = []
        self.withdrawn = 0
        self.tried: list[float] = []
        self._journal = journal

    async def find(self) -> None:
        self.tried.append(trio.current_time())
        if self.missing:
            raise PublishError("none", missing=True)
        if self.error is not None:
            raise self.error

    async def publish(self, offer: Offer) -> Published:
        await self.find()
        self._journal.append(f"publish {self.name}")
        self.writes.append((trio.current_time(), offer))
        return Published(offer, "there", 60.0, edit=self.edit)

    async def withdraw(self) -> None:
        if self.error is not None:
            raise self.error
        self._journal.append(f"withdraw {self.name}")
        self.withdrawn += 1

    async def aclose(self) -> None:
        self._journal.append("close")


class Scene:
    def __init__(self, wanted: ClusterTarget, noted: ClusterTarget | None) -> None:
        self.journal: list[str] = []
        self.targets = {name: Target(name, self.journal) for name in list(ClusterTarget)[2:]}
        self.wanted = wanted
        self.offer = Offer(cpu_milli=2000, memory_bytes=1)
        self.writes = True
        self.publisher = HeadroomPublisher(
            self.targets.__getitem__,
            wanted=lambda: self.wanted,
            offer=lambda: self.offer,
            writes=lambda: self.writes,
            note=self.note,
            noted=noted,
            wall=trio.current_time,
        )

    async def note(self, name: ClusterTarget | None) -> None:
        self.journal.append(f"note {name}")

    def change(self, *, cpu_milli: int | None = None, writes: bool | None = None) -> None:
        if cpu_milli is not None:
            self.offer = Offer(cpu_milli=cpu_milli, memory_bytes=1)
        if writes is not None:
            self.writes = writes
        self.publisher.changed()

    @property
    def node(self) -> Target:
        return self.targets[ClusterTarget.NODE]

    @property
    def written(self) -> list[int]:
        """CPU of the node's target."""
        return [offer.cpu_milli for _, offer in self.node.writes]


@asynccontextmanager
async def running(
    wanted: ClusterTarget = ClusterTarget.NODE, noted: ClusterTarget | None = None
) -> AsyncIterator[Scene]:
    scene = Scene(wanted, noted)
    async with trio.open_nursery() as nursery:
        await nursery.start(scene.publisher.run)
        yield scene
        nursery.cancel_scope.cancel()


async def test_it_is_noted_before_it_is_written(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(1)
        assert scene.journal == ["note node", "publish node"]
        assert scene.publisher.status()["cpu_milli"] == 2000
    # What is published stays while the parts are built again, or another daemon takes over.
    assert scene.journal[2:] == ["close"]
    await scene.publisher.end()
    assert scene.journal[3:] == ["withdraw node", "note None", "close"]


async def test_a_fall_is_written_soon_and_a_rise_later(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(1)
        assert not scene.publisher.is_falling()
        scene.change(cpu_milli=1000)
        assert scene.publisher.is_falling()
        await trio.sleep(FALL_S)
        assert not scene.publisher.is_falling()
        assert scene.written == [2000, 1000]
        scene.change(cpu_milli=3000)
        await trio.sleep(FALL_S + 1)
        assert len(scene.node.writes) == 2
        await trio.sleep(RISE_S)
        assert scene.written == [2000, 1000, 3000]


async def test_a_fall_does_not_wait_for_a_rise(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(0.1)
        scene.change(cpu_milli=3000)
        await trio.sleep(1)
        scene.change(cpu_milli=0)
        await trio.sleep(FALL_S)
        assert scene.written == [2000, 0]


async def test_nothing_is_published_before_something_was_written(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    scene = Scene(ClusterTarget.NODE, None)

    async def unwritten(offer: Offer) -> Published:
        return Published(offer, "measuring", 30.0, written=False)

    scene.node.publish = unwritten  # type: ignore[method-assign]
    await nursery.start(scene.publisher.run)
    await trio.sleep(40)
    assert scene.publisher.status()["cpu_milli"] is None
    assert scene.publisher.statuses()[0].age_s is None


async def test_a_control_plane_that_was_removed_has_nothing_to_withdraw(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    scene = Scene(ClusterTarget.NODE, ClusterTarget.KOORDINATOR)

    async def missing() -> None:
        raise PublishError("404", missing=True)

    scene.targets[ClusterTarget.KOORDINATOR].withdraw = missing  # type: ignore[method-assign]
    await nursery.start(scene.publisher.run)
    await trio.sleep(1)
    assert scene.journal == ["note None", "note node", "publish node"]


async def test_writes_are_bounded_however_often_it_changes(autojump_clock: MockClock) -> None:
    async with running() as scene:
        for number in range(600):
            scene.change(cpu_milli=2000 + number % 7)
            await trio.sleep(0.1)
        assert 2 < len(scene.node.writes) <= 60 / FALL_S + 1
        times = [at for at, _ in scene.node.writes]
        assert min(later - at for at, later in pairwise(times)) >= FALL_S - 1e-6


@pytest.mark.parametrize("change", ["a step down each second", "up and down", "to nothing and back"])
async def test_the_writes_of_an_hour_are_bounded_whatever_the_headroom_does(
    autojump_clock: MockClock, change: str
) -> None:
    async with running() as scene:
        late = 0.0
        for number in range(5400):
            amount = {
                "a step down each second": 1_000_000 - number,
                "up and down": 2000 + number % 2,
                "to nothing and back": 2000 * (number // 7 % 2),
            }[change]
            before = scene.publisher.is_falling()
            scene.change(cpu_milli=amount)
            await trio.sleep(1)
            late = late + 1 if before and scene.publisher.is_falling() else 0.0
            assert late <= REFILL_S
            if amount == 0 and scene.offer.cpu_milli == 0 and number % 7 > FALL_S:
                assert scene.node.writes[-1][1].cpu_milli == 0, "the end of an offer waits for nothing"
        times = [at for at, _ in scene.node.writes]
        for hour in (0, 1800):
            assert sum(hour <= at < hour + 3600 for at in times) <= BURST + 3600 / REFILL_S + 1
        assert len(times) > 200


async def test_it_is_written_again_before_it_is_outdated(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(3600)
        assert 59 <= len(scene.node.writes) <= 61


async def test_nothing_is_published_where_nothing_may_be_written(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(1)
        scene.change(writes=False)
        await trio.sleep(FALL_S)
        assert scene.journal[2:] == ["withdraw node", "note None"]
        assert scene.publisher.status()["target"] is None
        (status,) = scene.publisher.statuses()
        assert (status.name, status.ok) == (NAME, True)
        scene.change(writes=True)
        await trio.sleep(FALL_S)
        assert scene.journal[4:] == ["note node", "publish node"]


async def test_what_an_earlier_run_published_elsewhere_is_withdrawn_first(
    autojump_clock: MockClock,
) -> None:
    async with running(noted=ClusterTarget.KATALYST) as scene:
        await trio.sleep(1)
        assert scene.journal == ["withdraw katalyst", "note None", "note node", "publish node"]


async def test_an_earlier_run_is_withdrawn_where_it_is_switched_off(autojump_clock: MockClock) -> None:
    async with running(ClusterTarget.OFF, noted=ClusterTarget.NODE) as scene:
        await trio.sleep(1)
        assert scene.journal == ["withdraw node", "note None"]
        assert scene.publisher.statuses() == []


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ((), ClusterTarget.KOORDINATOR),
        ((ClusterTarget.KOORDINATOR,), ClusterTarget.KATALYST),
        ((ClusterTarget.KOORDINATOR, ClusterTarget.KATALYST), ClusterTarget.NODE),
    ],
)
async def test_the_control_plane_that_knows_the_node_is_found(
    autojump_clock: MockClock,
    missing: tuple[ClusterTarget, ...],
    found: ClusterTarget,
    nursery: trio.Nursery,
) -> None:
    scene = Scene(ClusterTarget.AUTO, None)
    for name in missing:
        scene.targets[name].missing = True
    await nursery.start(scene.publisher.run)
    await trio.sleep(1)
    assert scene.journal == [f"note {found}", f"publish {found}"]


async def test_unknown_is_not_absent(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    """A manager that cannot be queried may be there: writing another object would be beside it."""
    scene = Scene(ClusterTarget.AUTO, None)
    scene.targets[ClusterTarget.KOORDINATOR].error = PublishError("HTTP 403")
    await nursery.start(scene.publisher.run)
    await trio.sleep(1)
    assert scene.journal == []
    (status,) = scene.publisher.statuses()
    assert (status.ok, status.detail) == (False, "HTTP 403")


@pytest.mark.parametrize(
    ("error", "least", "most"),
    [
        (SourceError("api", "silent"), 6, 9),
        (PublishError("503"), 6, 9),
        (PublishError("403"), 6, 9),
        (PublishError("koordlet", foreign=True), 0, 1),
    ],
)
async def test_errors_are_tried_again_with_growing_pauses(
    autojump_clock: MockClock, error: AgentError, least: int, most: int
) -> None:
    async with running() as scene:
        await trio.sleep(1)
        scene.node.error = error
        asked: list[float] = []
        find = scene.node.find

        async def counted() -> None:
            asked.append(trio.current_time())
            await find()

        scene.node.find = counted  # type: ignore[method-assign]
        await trio.sleep(60 + FOREIGN_S - 10)
        assert not scene.publisher.statuses()[0].ok
        assert least <= len(asked) - 1 <= most
        scene.node.error = None
        await trio.sleep(FOREIGN_S if least == 0 else RETRY_S)
        assert scene.publisher.statuses()[0].ok


async def test_a_stop_does_not_wait_for_the_api_server(autojump_clock: MockClock) -> None:
    scene = Scene(ClusterTarget.NODE, None)

    async def hung() -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(scene.publisher.run)
        await trio.sleep(1)
        scene.node.withdraw = hung  # type: ignore[method-assign]
        nursery.cancel_scope.cancel()
    begun = trio.current_time()
    await scene.publisher.end()
    assert trio.current_time() - begun < 5
    assert "note None" not in scene.journal


async def test_an_object_that_disappears_while_it_is_published_is_tried_again_soon(
    autojump_clock: MockClock,
) -> None:
    async with running() as scene:
        await trio.sleep(1)
        scene.node.error = PublishError("gone", missing=True)
        scene.change(cpu_milli=1000)
        await trio.sleep(FALL_S)
        assert not scene.publisher.statuses()[0].ok
        scene.node.error = None
        await trio.sleep(RISE_S)
        assert scene.written == [2000, 1000]


async def test_a_control_plane_that_is_installed_later_gets_it(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    scene = Scene(ClusterTarget.AUTO, None)
    koordinator = scene.targets[ClusterTarget.KOORDINATOR]
    koordinator.missing = scene.targets[ClusterTarget.KATALYST].missing = True
    await nursery.start(scene.publisher.run)
    await trio.sleep(1)
    assert scene.journal == ["note node", "publish node"]
    koordinator.missing = False
    await trio.sleep(SEARCH_S + 60)
    assert [entry for entry in scene.journal if entry != "publish node"][1:5] == [
        "withdraw node",
        "note None",
        "note koordinator",
        "publish koordinator",
    ]


@pytest.mark.parametrize(
    ("error", "least_s"),
    [
        (SourceError("API server", "no answer"), 0),
        (PublishError("HTTP 403"), 0),
        (PublishError("HTTP 429", wait_s=200.0), 200),
    ],
    ids=str,
)
async def test_an_api_server_that_responds_again_gets_it_soon(
    autojump_clock: MockClock, error: AgentError, least_s: float
) -> None:
    async with running() as scene:
        scene.node.error = error
        scene.change(cpu_milli=1000)
        await trio.sleep(1000)
        tried_at = scene.node.tried[-1]
        now = trio.current_time()
        scene.node.error = None
        scene.node.writes.clear()
        for _ in range(3):
            scene.publisher.retry()
        await trio.sleep(RETRY_S)
        assert scene.node.writes[0][0] == pytest.approx(max(now + FALL_S, tried_at + least_s), abs=1.1)


async def test_a_delay_that_is_requested_counts(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(1)
        scene.node.error = PublishError("429", wait_s=45.0)
        scene.change(cpu_milli=1000)
        await trio.sleep(FALL_S)
        scene.node.error = None
        await trio.sleep(40)
        assert len(scene.node.writes) == 1
        await trio.sleep(6)
        assert len(scene.node.writes) == 2


async def test_what_others_change_is_counted_and_said(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await trio.sleep(1)
        assert (scene.publisher.edits, scene.publisher.status()["last_edit"]) == (0, None)
        scene.node.edit = "kubelet changed allocatable"
        scene.change(cpu_milli=1000)
        await trio.sleep(FALL_S)
        scene.node.edit = ""
        await trio.sleep(300)
        assert scene.publisher.edits == 1
        (status,) = scene.publisher.statuses()
        assert status.ok
        assert "changed by others 1 time, last 5 min ago: kubelet changed allocatable" in status.detail
        # One that fights is counted once, not with each attempt.
        scene.node.error = PublishError("manager changed it: left to it", foreign=True)
        await trio.sleep(3 * FOREIGN_S)
        (status,) = scene.publisher.statuses()
        assert (status.ok, status.detail, scene.publisher.edits) == (False, "manager changed it: left to it", 2)


@pytest.mark.parametrize("error", [None, PublishError("HTTP 403")], ids=str)
async def test_what_the_nodes_earlier_name_has_is_withdrawn_first_and_a_refusal_is_no_end(
    autojump_clock: MockClock, error: AgentError | None
) -> None:
    answers = [SourceError("API server", "no answer"), error]
    journal: list[str] = []

    async def withdraw() -> None:
        journal.append("withdraw earlier")
        if (answer := answers.pop(0)) is not None:
            raise answer

    async def note(name: ClusterTarget | None) -> None:
        journal.append(f"note {name}")

    target = Target(ClusterTarget.NODE, journal)
    publisher = HeadroomPublisher(
        lambda _: target,
        wanted=lambda: ClusterTarget.NODE,
        offer=Offer,
        writes=lambda: True,
        note=note,
        renamed=withdraw,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher.run)
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    assert journal[:5] == ["withdraw earlier", "withdraw earlier", "note None", "note node", "publish node"]
