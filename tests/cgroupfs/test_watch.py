import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cgroupfs.watch import (
    APPEARED,
    CHILDREN,
    MOVED_TO,
    VANISHED,
    AncestorWatch,
    DirEvent,
    DirWatcher,
    Mask,
    UnreadEvents,
)
from tests.fakes.watches import kernel_watches
from tests.real_cgroups import make_root, remove_tree


@pytest.fixture
def watcher() -> Iterator[DirWatcher[str]]:
    with DirWatcher[str]("test") as made:
        yield made


@pytest.fixture
def group() -> Iterator[str]:
    path = make_root("cpuset", "watch")
    yield path
    remove_tree(path)


async def batch(watcher: DirWatcher[str], seconds: float = 60) -> list[DirEvent[str]]:
    with trio.fail_after(seconds):
        return list(await watcher.next_batch())


async def quiet(watcher: DirWatcher[str]) -> bool:
    with trio.move_on_after(0.05):
        await watcher.next_batch()
        return False
    return True


class Kernel:
    """Simulates inotify's limits: refuses with an errno while ``refuse`` is set, and counts the attempts."""

    def __init__(self, watcher: DirWatcher[str]) -> None:
        self.refuse = 0
        self.attempts = 0
        assert watcher._inotify is not None
        self._real = watcher._inotify
        watcher._inotify = self
        self.fd = self._real.fd

    def add_watch(self, path: str, mask: int) -> int:
        self.attempts += 1
        if self.refuse:
            raise OSError(self.refuse, os.strerror(self.refuse), path)
        return int(self._real.add_watch(path, mask))

    def rm_watch(self, wd: int) -> None:
        self._real.rm_watch(wd)

    def close(self) -> None:
        self._real.close()


async def test_events_carry_token_path_name_and_what_happened(watcher: DirWatcher[str], tmp_path: Path) -> None:
    assert watcher.add(str(tmp_path), CHILDREN, "root")
    (tmp_path / "pod").mkdir()
    (tmp_path / "state.json.tmp").touch()
    (tmp_path / "state.json.tmp").rename(tmp_path / "state.json")
    events = await batch(watcher)
    assert [(event.token, event.path, event.name) for event in events] == [
        ("root", str(tmp_path), name) for name in ("pod", "state.json.tmp", "state.json.tmp", "state.json")
    ]
    assert [event.is_dir for event in events] == [True, False, False, False]
    assert [bool(event.mask & APPEARED) for event in events] == [True, True, False, True]
    assert events[2].mask & VANISHED
    assert events[3].mask == MOVED_TO


def test_a_directory_that_is_not_there_is_not_watched(watcher: DirWatcher[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not watcher.add(str(tmp_path / "missing"), CHILDREN, "x")
    assert not watcher.add(str(tmp_path / "file"), CHILDREN, "x")
    assert watcher.stats.watches == watcher.stats.polled == kernel_watches(watcher) == 0


def test_adding_twice_keeps_one_watch_with_the_new_token(watcher: DirWatcher[str], tmp_path: Path) -> None:
    for token in ("old", "new"):
        assert watcher.add(str(tmp_path), CHILDREN, token)
    assert kernel_watches(watcher) == watcher.stats.watches == 1
    (tmp_path / "alias").symlink_to(tmp_path)
    assert watcher.add(str(tmp_path / "alias"), CHILDREN, "alias")
    assert str(tmp_path) not in watcher
    assert kernel_watches(watcher) == watcher.stats.watches == 1


async def test_events_of_a_removed_watch_are_dropped(watcher: DirWatcher[str], tmp_path: Path) -> None:
    watcher.add(str(tmp_path), CHILDREN, "root")
    (tmp_path / "pod").mkdir()
    watcher.remove(str(tmp_path))
    watcher.remove(str(tmp_path))
    assert await quiet(watcher)
    assert kernel_watches(watcher) == 0


async def test_an_ordinary_directory_that_goes_away_ends_its_own_watch(
    watcher: DirWatcher[str], tmp_path: Path
) -> None:
    (tmp_path / "id").mkdir()
    watcher.add(str(tmp_path / "id"), CHILDREN, "id")
    (tmp_path / "id").rmdir()
    assert [event.ended for event in await batch(watcher)] == [True]
    assert str(tmp_path / "id") not in watcher
    watcher.remove(str(tmp_path / "id"))
    assert watcher.stats.watches == 0


@pytest.mark.kernel
async def test_a_removed_cgroup_keeps_its_watch_until_it_is_taken_away(watcher: DirWatcher[str], group: str) -> None:
    pod = f"{group}/pod"
    watcher.add(group, CHILDREN, "parent")
    os.mkdir(pod)
    watcher.add(pod, CHILDREN, "pod")
    os.rmdir(pod)
    events = await batch(watcher)
    assert [(event.token, bool(event.mask & VANISHED)) for event in events if event.name] == [
        ("parent", False),
        ("parent", True),
    ]
    # Kernels from 2026 on may report it; others must not leak.
    if not any(event.ended for event in events):
        assert kernel_watches(watcher) == 2
    watcher.remove(pod)
    assert kernel_watches(watcher) == watcher.stats.watches == 1


@pytest.mark.kernel
async def test_a_cgroup_made_again_under_its_name_is_watched_anew(watcher: DirWatcher[str], group: str) -> None:
    pod = f"{group}/pod"
    for token in ("first", "second"):
        os.mkdir(pod)
        assert watcher.add(pod, CHILDREN, token)
        if token == "first":
            os.rmdir(pod)
    os.mkdir(f"{pod}/container")
    assert [(event.token, event.name) for event in await batch(watcher) if event.name] == [("second", "container")]
    assert kernel_watches(watcher) == watcher.stats.watches == 1


async def test_a_full_queue_is_one_overflow_event_and_later_events_still_come(
    watcher: DirWatcher[str], tmp_path: Path
) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 200_000:
        pytest.skip(f"fs.inotify.max_queued_events is {limit}: filling it takes too long")
    watcher.add(str(tmp_path), int(Mask.CREATE | Mask.DELETE), "root")
    for number in range(limit // 2 + 10):
        path = tmp_path / str(number)
        path.touch()
        path.unlink()
    seen: list[DirEvent[str]] = []
    while not (seen and seen[-1].overflow):
        seen += await batch(watcher)
    assert sum(event.overflow for event in seen) == watcher.stats.overflows == 1
    (tmp_path / "after").touch()
    assert [event.name for event in await batch(watcher)] == ["after"]


async def test_a_cancelled_wait_loses_no_event(watcher: DirWatcher[str], tmp_path: Path) -> None:
    watcher.add(str(tmp_path), CHILDREN, "root")
    assert await quiet(watcher)
    (tmp_path / "pod").mkdir()
    with trio.CancelScope() as scope:
        scope.cancel()
        await watcher.next_batch()
    assert [event.name for event in await batch(watcher)] == ["pod"]


async def test_at_the_watch_limit_a_directory_is_polled_said_once_and_watched_again_later(
    watcher: DirWatcher[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    kernel = Kernel(watcher)
    kernel.refuse = errno.ENOSPC
    caplog.set_level("INFO")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert watcher.add(str(tmp_path / name), CHILDREN, name)
    assert len(caplog.messages) == 1
    assert "fs.inotify.max_user_watches" in getattr(caplog.records[0], "fields", {})["reason"]
    assert watcher.stats.polled == 2
    start = trio.current_time()
    looks = await watcher.next_batch()
    assert [(event.token, event.rescan, event.name) for event in looks] == [("a", True, ""), ("b", True, "")]
    assert trio.current_time() - start == pytest.approx(1)
    tried = kernel.attempts
    await watcher.next_batch()
    assert kernel.attempts == tried
    kernel.refuse = 0
    while watcher.stats.polled:
        looks = await watcher.next_batch()
    assert len(looks) == 2
    assert trio.current_time() - start == pytest.approx(30, abs=1.5)
    assert watcher.stats.problem is None
    assert kernel_watches(watcher) == 2
    assert len(caplog.messages) == 2


async def test_a_reader_that_already_waits_starts_polling(
    watcher: DirWatcher[str], tmp_path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    kernel = Kernel(watcher)
    seen: list[DirEvent[str]] = []

    async def reader() -> None:
        seen.extend(await watcher.next_batch())

    nursery.start_soon(reader)
    await trio.testing.wait_all_tasks_blocked()
    kernel.refuse = errno.ENOSPC
    watcher.add(str(tmp_path), CHILDREN, "late")
    await trio.sleep(5)
    assert [event.token for event in seen] == ["late"]


async def test_without_an_inotify_instance_everything_is_polled_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("cgroupfs.watch.INotify", refuse)
        watcher = DirWatcher[str]("test")
        assert watcher.add(str(tmp_path), CHILDREN, "root")
        assert not watcher.add(str(tmp_path / "missing"), CHILDREN, "x")
        assert "max_user_instances" in str(watcher.stats.problem)
        assert (watcher.stats.watches, watcher.stats.polled) == (0, 1)
        assert [event.rescan for event in await watcher.next_batch()] == [True]
    with watcher:
        while watcher.stats.polled:
            await watcher.next_batch()
        assert kernel_watches(watcher) == 1


async def test_closing_ends_a_waiting_reader(tmp_path: Path) -> None:
    watcher = DirWatcher[str]("test")
    watcher.add(str(tmp_path), CHILDREN, "root")
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.next_batch)
            await trio.testing.wait_all_tasks_blocked()
            watcher.close()
    with pytest.raises(trio.ClosedResourceError):
        await watcher.next_batch()


async def test_a_chain_follows_a_directory_that_comes_goes_and_comes_again(
    watcher: DirWatcher[str], tmp_path: Path
) -> None:
    target = tmp_path / "containerd" / "runc" / "k8s.io"
    chain = AncestorWatch(watcher, str(tmp_path), str(target), "way")

    async def settle() -> bool:
        """Feed every pending event to the chain; whether the target is there afterwards."""
        there = False
        while True:
            with trio.move_on_after(0.05) as scope:
                for event in await watcher.next_batch():
                    if chain.leads_on(event):
                        if event.mask & VANISHED:
                            chain.cut(event)
                        else:
                            there = chain.extend()
            if scope.cancelled_caught:
                return there

    assert not chain.extend()
    (tmp_path / "other").mkdir()
    assert not await settle()
    for _ in range(2):
        target.mkdir(parents=True)
        assert await settle()
        assert kernel_watches(watcher) == watcher.stats.watches == 3
        for path in (target, target.parent, target.parent.parent):
            path.rmdir()
        assert not await settle()
        assert kernel_watches(watcher) == watcher.stats.watches == 1


def test_a_chain_must_lead_downwards(watcher: DirWatcher[str]) -> None:
    with pytest.raises(ValueError, match="not below"):
        AncestorWatch(watcher, "/run", "/etc", "x")


async def test_unread_events_are_seen_until_they_are_read_and_after_close_there_are_none(tmp_path: Path) -> None:
    events = UnreadEvents()

    def unread() -> bool:
        return bool(events)

    assert not unread()
    with DirWatcher[str]("test", events) as watcher, DirWatcher[str]("quiet", events):
        watcher.add(str(tmp_path), CHILDREN, "token")
        assert not unread()
        (tmp_path / "pod").mkdir()
        assert unread()
        assert unread(), "asking reads nothing"
        with trio.fail_after(60):
            assert [event.name for event in await watcher.next_batch()] == ["pod"]
        assert not unread()
        (tmp_path / "other").mkdir()
    assert not unread()
