import errno
import json
import os
import shutil
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.errors import InputError
from reconciler.sources.runtime_files import read_record
from reconciler.sources.runtime_roots import RuntimeDirs, find_runtime_dirs
from reconciler.sources.runtime_signal import RuntimeEvent, RuntimeEvents
from tests.until import until

TIMELINES: Final = Path(__file__).parents[2] / "fixtures" / "timeline"
STATE, INIT_PID, FOUND, ABSENT = RuntimeEvent.STATE, RuntimeEvent.INIT_PID, RuntimeEvent.FOUND, RuntimeEvent.ABSENT


class Runtime:
    """Does what runc and containerd's shim do with their directories."""

    def __init__(self, root: Path) -> None:
        self.dirs = find_runtime_dirs(str(root))

    def state(self, name: str, root: int = 0) -> Path:
        return Path(self.dirs.states[root], name)

    def bundle(self, name: str) -> Path:
        return Path(self.dirs.bundles[0], name)

    def rename(self, directory: Path, name: str) -> None:
        (directory / f".tmp-{name}").write_text("{}")
        (directory / f".tmp-{name}").rename(directory / name)

    def create(self, name: str, root: int = 0) -> None:
        self.state(name, root).mkdir(parents=True)
        self.bundle(name).mkdir(parents=True)

    def settle(self, name: str) -> None:
        self.rename(self.state(name), "state.json")

    def remove(self, name: str) -> None:
        for directory in (self.bundle(name), self.state(name)):
            shutil.rmtree(directory)


class Handler:
    """Takes signals; ``times`` are those of the settled ones."""

    def __init__(self) -> None:
        self.log: list[tuple[str, RuntimeEvent | None]] = []
        self.times: list[float] = []
        self.commands: list[tuple[str, bool]] = []
        """Container, and whether it was a command; False: the last one was an update."""
        self.long: list[str] = []

    def settled(self, container_id: str, at: float, which: RuntimeEvent, /) -> None:
        self.log.append((container_id, which))
        self.times.append(at)

    def commanded(self, container_id: str, at: float | None, /) -> None:
        self.commands.append((container_id, at is not None))

    def unfinished(self, container_id: str, /) -> None:
        self.long.append(container_id)

    def gone(self, container_id: str, /) -> None:
        self.log.append((container_id, None))

    def knows(self, name: str) -> bool:
        return any(entry[0] == name for entry in self.log)

    def lost(self, name: str) -> bool:
        return (name, None) in self.log

    def take(self) -> list[tuple[str, RuntimeEvent | None]]:
        taken, self.log = self.log, []
        return taken


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    (tmp_path / "run").mkdir()
    return Runtime(tmp_path)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def source(runtime: Runtime, handler: Handler, tmp_path: Path) -> RuntimeEvents:
    return RuntimeEvents(runtime.dirs, handler, root=str(tmp_path))


async def test_creation_and_update_end_in_a_signal_and_removal_in_gone(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    runtime.create("old")
    runtime.settle("old")
    await nursery.start(source.run)
    assert handler.take() == [("old", FOUND)]

    runtime.create("new")
    await until(lambda: source.covers("new"))
    assert handler.take() == []
    runtime.settle("new")
    await until(lambda: len(handler.log) == 1)
    assert handler.take() == [("new", STATE)]
    runtime.rename(runtime.bundle("new"), "init.pid")
    runtime.rename(runtime.bundle("new"), "shim.pid")
    await until(lambda: len(handler.log) == 1)
    assert handler.take() == [("new", INIT_PID)]
    runtime.settle("new")
    await until(lambda: len(handler.log) == 1)
    assert handler.take() == [("new", STATE)]

    runtime.remove("new")
    await until(lambda: not source.covers("new"))
    assert handler.take() == [("new", None)]
    assert source.covers("old")
    assert source.repaired == 0


async def test_each_command_of_the_runtime_is_reported_at_once_and_taken_back_for_an_update(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    await nursery.start(source.run)
    runtime.create("new")
    await until(lambda: source.covers("new"))
    runtime.settle("new")
    await until(lambda: len(handler.log) == 1)
    handler.take()
    (runtime.state("new") / "exec.fifo").write_text("")
    assert handler.commands == []
    for _ in range(3):
        (runtime.state("new") / "state.json").read_text()  # runc exec, runc kill
    await until(lambda: handler.commands != [])
    await trio.sleep(0.2)
    assert handler.commands == [("new", True)]
    runtime.settle("new")
    await until(lambda: len(handler.log) == 1)
    assert (handler.commands, handler.take()) == ([("new", True)], [("new", STATE)])
    # runc update: it opens the file and replaces it.
    (runtime.state("new") / "state.json").read_text()
    await until(lambda: len(handler.commands) == 2)
    runtime.rename(runtime.bundle("new"), "init.pid")
    runtime.settle("new")
    await until(lambda: len(handler.log) == 2)
    assert handler.commands == [("new", True)] * 2 + [("new", False)]


async def test_a_reader_that_opens_the_directory_before_is_no_command_and_hides_no_other(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    for name in ("read", "other", "bundle"):
        runtime.create(name)
        runtime.settle(name)
    await nursery.start(source.run)
    with suppress(InputError):
        read_record(str(runtime.state("read") / "state.json"))
    os.listdir(runtime.bundle("bundle"))
    for name in ("other", "bundle"):
        (runtime.state(name) / "state.json").read_text()
    await until(lambda: len(handler.commands) == 2)
    assert handler.commands == [("other", True), ("bundle", True)]
    (runtime.state("read") / "state.json").read_text()
    await until(lambda: len(handler.commands) == 3)
    assert handler.commands[-1] == ("read", True)


async def test_where_the_kubelet_updates_containers_a_command_is_reported_once_it_is_no_update(
    runtime: Runtime, tmp_path: Path, nursery: trio.Nursery
) -> None:
    handler = Handler()
    source = RuntimeEvents(runtime.dirs, handler, updates=lambda: True, root=str(tmp_path))
    await nursery.start(source.run)
    runtime.create("new")
    await until(lambda: source.covers("new"))
    runtime.settle("new")
    await until(lambda: len(handler.log) == 1)
    (runtime.state("new") / "state.json").read_text()  # runc update
    runtime.settle("new")
    await until(lambda: len(handler.log) == 2)
    await trio.sleep(0.2)
    assert handler.commands == []
    (runtime.state("new") / "state.json").read_text()  # runc exec
    await until(lambda: handler.commands == [("new", True)])


async def test_a_rename_that_came_before_the_watch_is_not_missed(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    runtime.create("first")
    await nursery.start(source.run)
    for number in range(50):
        runtime.create(str(number))
        runtime.settle(str(number))
    await until(lambda: {(str(number), STATE) for number in range(50)} <= set(handler.log))
    assert all(which is not None for _, which in handler.log)


async def test_signals_are_told_before_everything_else_in_their_batch(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    for name in ("a", "b"):
        runtime.create(name)
    await nursery.start(source.run)
    # No await in between: all of it is one batch, with the removal first.
    runtime.remove("a")
    runtime.settle("b")
    await until(lambda: len(handler.log) == 2)
    assert handler.take() == [("b", STATE), ("a", None)]


async def test_roots_that_come_late_go_and_come_again_are_followed(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    await nursery.start(source.run)
    # A node on which nothing has run yet; kata's containers have no directory of runc's.
    status = source.status(sandboxed=1)
    assert status.ok
    assert "no container yet: waits for a runtime's state below" in status.detail
    status = source.status(["elsewhere"])
    assert not status.ok
    assert "verified until they are stable" in status.detail
    for root in (0, 1, 2):
        name = f"on-{root}"
        for _ in range(2):
            runtime.create(name, root)
            runtime.rename(runtime.state(name, root), "state.json")
            await until(partial(handler.knows, name))
            assert source.status().ok
            shutil.rmtree(runtime.bundle(name))
            shutil.rmtree(runtime.state(name, root).parent)
            await until(partial(handler.lost, name))
            assert not source.covers(name)
            handler.take()
    assert not source.status(["on-2"]).ok


async def test_one_runtimes_root_inside_another_is_not_taken_for_a_container(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    dirs = RuntimeDirs(states=(f"{tmp_path}/run/runc", f"{tmp_path}/run/runc/k8s.io"), bundles=())
    (tmp_path / "run/runc/k8s.io/x").mkdir(parents=True)
    (tmp_path / "run/runc/state.json").touch()
    handler = Handler()
    source = RuntimeEvents(dirs, handler, root=str(tmp_path))
    await nursery.start(source.run)
    assert source.covers("x")
    assert not source.covers("k8s.io")


async def test_after_lost_events_every_container_is_told_again(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    for name in ("a", "b", "c"):
        runtime.create(name)
    runtime.settle("a")
    runtime.settle("c")
    await nursery.start(source.run)
    handler.take()
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    noise = [runtime.state("a").parent / f"x{number % 2}" for number in range(limit // 2 + 10)]
    for path in noise:
        path.mkdir()
        path.rmdir()
    runtime.settle("b")
    runtime.remove("c")
    await until(lambda: not source.covers("c"))
    log = handler.take()
    assert ("a", FOUND) in log
    assert ("b", FOUND) in log
    assert ("c", None) in log
    assert ("a", None) not in log


async def test_the_periodic_listing_finds_what_no_event_told(
    runtime: Runtime,
    source: RuntimeEvents,
    handler: Handler,
    nursery: trio.Nursery,
    autojump_clock: MockClock,
) -> None:
    for name in ("goes", "stays"):
        runtime.create(name)
        runtime.settle(name)
    await nursery.start(source.run)
    handler.take()
    watcher = source._watcher
    assert watcher is not None
    watcher.remove(str(runtime.state("x").parent))
    watcher.remove(str(runtime.bundle("x").parent))
    runtime.create("comes")
    runtime.settle("comes")
    runtime.remove("goes")
    await trio.sleep(61)
    assert Counter(handler.take()) == {("comes", FOUND): 1, ("goes", None): 1}
    assert source.repaired == 4
    await trio.sleep(61)
    assert handler.take() == []


async def test_without_watches_signals_are_found_by_polling(
    runtime: Runtime,
    source: RuntimeEvents,
    handler: Handler,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("cgroupfs.watch.INotify", refuse)
    await nursery.start(source.run)
    runtime.create("a")
    await trio.sleep(4.5)
    assert handler.take() == [("a", ABSENT)]
    assert not source.covers("a")
    for _ in range(2):
        handler.take()
        runtime.settle("a")
        await trio.sleep(1.5)
        assert set(handler.take()) == {("a", FOUND)}
        await trio.sleep(3)
        assert handler.take() == []
    assert not source.status().ok
    runtime.remove("a")
    await trio.sleep(1.5)
    assert handler.take() == [("a", None)]


async def test_a_root_that_cannot_be_read_ends_nothing(
    runtime: Runtime,
    source: RuntimeEvents,
    handler: Handler,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    runtime.create("a")
    runtime.settle("a")
    await nursery.start(source.run)
    assert handler.take() == [("a", FOUND)]

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        await trio.sleep(61)
        assert source.covers("a")
        assert handler.take() == []
        assert "EMFILE" in source.status().detail
    await trio.sleep(61)
    assert source.status().ok


async def test_run_again_what_went_meanwhile_is_told(runtime: Runtime, source: RuntimeEvents, handler: Handler) -> None:
    for name in ("a", "b"):
        runtime.create(name)
        runtime.settle(name)
    for expected in ({("a", FOUND), ("b", FOUND)}, {("a", None), ("b", FOUND)}):
        async with trio.open_nursery() as nursery:
            await nursery.start(source.run)
            nursery.cancel_scope.cancel()
        assert set(handler.take()) == expected
        if expected == {("a", FOUND), ("b", FOUND)}:
            runtime.remove("a")


async def test_the_recorded_signals_of_a_node_are_all_told_in_order(
    runtime: Runtime, source: RuntimeEvents, handler: Handler, nursery: trio.Nursery
) -> None:
    """Replays runc's and the shim's renames of a traced node, in order, as fast as they are taken."""
    await nursery.start(source.run)
    expected: list[tuple[str, RuntimeEvent | None]] = []
    for line in (TIMELINES / "runtime.static-1.22.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = row["path"].rsplit("/", 1)[-1] if row["op"] != "renameto" else row["path"].split("/")[-2]
        if row["op"] == "mkdir" and len(name) == 64:
            # The cgroup's mkdir: bundle and state directory are there before it.
            runtime.create(name)
            await until(partial(source.covers, name))
        elif row["op"] == "rmdir" and len(name) == 64:
            runtime.remove(name)
            expected.append((name, None))
        elif row["op"] == "renameto":
            which = RuntimeEvent(row["path"].rsplit("/", 1)[-1])
            runtime.rename(runtime.state(name) if which is STATE else runtime.bundle(name), which.value)
            expected.append((name, which))
        await until(lambda: len(handler.log) == len(expected))
    assert handler.log == expected
    assert Counter(which for _, which in expected)[STATE] > Counter(which for _, which in expected)[INIT_PID] == 22
    assert source.stats is not None
    assert source.stats.overflows == source.repaired == 0
