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

    async def one(self) -> tuple[str, RuntimeEvent | None]:
        """The next signal, alone."""
        await until(lambda: bool(self.log))
        (signal,) = self.take()
        return signal


class Node(Handler):
    """Does what runc and containerd's shim do with their directories."""

    def __init__(self, root: Path, dirs: RuntimeDirs | None = None, *, updates: bool = False) -> None:
        super().__init__()
        (root / "run").mkdir(exist_ok=True)
        self.dirs = dirs or find_runtime_dirs(str(root))
        self.source = RuntimeEvents(self.dirs, self, updates=lambda: updates, root=str(root))

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

    def read(self, name: str) -> None:
        """As each command of the runtime does at its begin."""
        (self.state(name) / "state.json").read_text()

    def remove(self, name: str) -> None:
        for directory in (self.bundle(name), self.state(name)):
            shutil.rmtree(directory)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_creation_and_update_end_in_a_signal_and_removal_in_gone(node: Node, nursery: trio.Nursery) -> None:
    node.create("old")
    node.settle("old")
    await nursery.start(node.source.run)
    assert node.take() == [("old", FOUND)]

    node.create("new")
    await until(lambda: node.source.covers("new"))
    assert node.take() == []
    node.settle("new")
    assert await node.one() == ("new", STATE)
    node.rename(node.bundle("new"), "init.pid")
    node.rename(node.bundle("new"), "shim.pid")
    assert await node.one() == ("new", INIT_PID)
    node.settle("new")
    assert await node.one() == ("new", STATE)

    node.remove("new")
    await until(lambda: not node.source.covers("new"))
    assert node.take() == [("new", None)]
    assert node.source.covers("old")
    assert node.source.repaired == 0


async def test_each_command_of_the_runtime_is_reported_at_once_and_taken_back_for_an_update(
    node: Node, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nursery.start(node.source.run)
    node.create("new")
    await until(lambda: node.source.covers("new"))
    node.settle("new")
    await node.one()
    (node.state("new") / "exec.fifo").write_text("")
    assert node.commands == []
    for _ in range(3):
        node.read("new")  # runc exec, runc kill
    await until(lambda: node.commands != [])
    await trio.sleep(0.2)
    assert node.commands == [("new", True)]
    node.settle("new")
    await until(lambda: len(node.log) == 1)
    assert (node.commands, node.take()) == ([("new", True)], [("new", STATE)])
    # runc update: it opens the file and replaces it, which takes longer here on a busy machine.
    monkeypatch.setattr("reconciler.sources.runtime_signal._UPDATE_S", 30.0)
    node.read("new")
    await until(lambda: len(node.commands) == 2)
    node.rename(node.bundle("new"), "init.pid")
    node.settle("new")
    await until(lambda: len(node.log) == 2)
    assert node.commands == [("new", True)] * 2 + [("new", False)]


async def test_a_reader_that_opens_the_directory_before_is_no_command_and_hides_no_other(
    node: Node, nursery: trio.Nursery
) -> None:
    for name in ("read", "other", "bundle"):
        node.create(name)
        node.settle(name)
    await nursery.start(node.source.run)
    with suppress(InputError):
        read_record(str(node.state("read") / "state.json"))
    os.listdir(node.bundle("bundle"))
    for name in ("other", "bundle"):
        node.read(name)
    await until(lambda: len(node.commands) == 2)
    assert node.commands == [("other", True), ("bundle", True)]
    node.read("read")
    await until(lambda: len(node.commands) == 3)
    assert node.commands[-1] == ("read", True)


async def test_where_the_kubelet_updates_containers_a_command_is_reported_once_it_is_no_update(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    node = Node(tmp_path, updates=True)
    await nursery.start(node.source.run)
    node.create("new")
    await until(lambda: node.source.covers("new"))
    node.settle("new")
    await until(lambda: len(node.log) == 1)
    node.read("new")  # runc update
    node.settle("new")
    await until(lambda: len(node.log) == 2)
    await trio.sleep(0.2)
    assert node.commands == []
    node.read("new")  # runc exec
    await until(lambda: node.commands == [("new", True)])


async def test_a_rename_that_came_before_the_watch_is_not_missed(node: Node, nursery: trio.Nursery) -> None:
    node.create("first")
    await nursery.start(node.source.run)
    for number in range(50):
        node.create(str(number))
        node.settle(str(number))
    await until(lambda: {(str(number), STATE) for number in range(50)} <= set(node.log))
    assert all(which is not None for _, which in node.log)


async def test_signals_are_told_before_everything_else_in_their_batch(node: Node, nursery: trio.Nursery) -> None:
    for name in ("a", "b"):
        node.create(name)
    await nursery.start(node.source.run)
    # No await in between: all of it is one batch, with the removal first.
    node.remove("a")
    node.settle("b")
    await until(lambda: len(node.log) == 2)
    assert node.take() == [("b", STATE), ("a", None)]


async def test_roots_that_come_late_go_and_come_again_are_followed(node: Node, nursery: trio.Nursery) -> None:
    await nursery.start(node.source.run)
    # A node on which nothing has run yet; kata's containers have no directory of runc's.
    status = node.source.status(sandboxed=1)
    assert status.ok
    assert "no container yet: waits for a runtime's state below" in status.detail
    status = node.source.status(["elsewhere"])
    assert not status.ok
    assert "verified until they are stable" in status.detail
    for root in (0, 1, 2):
        name = f"on-{root}"
        for _ in range(2):
            node.create(name, root)
            node.rename(node.state(name, root), "state.json")
            await until(partial(node.knows, name))
            assert node.source.status().ok
            shutil.rmtree(node.bundle(name))
            shutil.rmtree(node.state(name, root).parent)
            await until(partial(node.lost, name))
            assert not node.source.covers(name)
            node.take()
    assert not node.source.status(["on-2"]).ok


async def test_one_runtimes_root_inside_another_is_not_taken_for_a_container(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    dirs = RuntimeDirs(states=(f"{tmp_path}/run/runc", f"{tmp_path}/run/runc/k8s.io"), bundles=())
    (tmp_path / "run/runc/k8s.io/x").mkdir(parents=True)
    (tmp_path / "run/runc/state.json").touch()
    node = Node(tmp_path, dirs)
    await nursery.start(node.source.run)
    assert node.source.covers("x")
    assert not node.source.covers("k8s.io")


async def test_after_lost_events_every_container_is_told_again(node: Node, nursery: trio.Nursery) -> None:
    for name in ("a", "b", "c"):
        node.create(name)
    node.settle("a")
    node.settle("c")
    await nursery.start(node.source.run)
    node.take()
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    noise = [node.state("a").parent / f"x{number % 2}" for number in range(limit // 2 + 10)]
    for path in noise:
        path.mkdir()
        path.rmdir()
    node.settle("b")
    node.remove("c")
    await until(lambda: not node.source.covers("c"))
    log = node.take()
    assert ("a", FOUND) in log
    assert ("b", FOUND) in log
    assert ("c", None) in log
    assert ("a", None) not in log


async def test_the_periodic_listing_finds_what_no_event_told(
    node: Node,
    nursery: trio.Nursery,
    autojump_clock: MockClock,
) -> None:
    for name in ("goes", "stays"):
        node.create(name)
        node.settle(name)
    await nursery.start(node.source.run)
    node.take()
    watcher = node.source._watcher
    assert watcher is not None
    watcher.remove(str(node.state("x").parent))
    watcher.remove(str(node.bundle("x").parent))
    node.create("comes")
    node.settle("comes")
    node.remove("goes")
    await trio.sleep(61)
    assert Counter(node.take()) == {("comes", FOUND): 1, ("goes", None): 1}
    assert node.source.repaired == 4
    await trio.sleep(61)
    assert node.take() == []


async def test_without_watches_signals_are_found_by_polling(
    node: Node,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("cgroupfs.watch.INotify", refuse)
    await nursery.start(node.source.run)
    node.create("a")
    await trio.sleep(4.5)
    assert node.take() == [("a", ABSENT)]
    assert not node.source.covers("a")
    for _ in range(2):
        node.take()
        node.settle("a")
        await trio.sleep(1.5)
        assert set(node.take()) == {("a", FOUND)}
        await trio.sleep(3)
        assert node.take() == []
    assert not node.source.status().ok
    node.remove("a")
    await trio.sleep(1.5)
    assert node.take() == [("a", None)]


async def test_a_root_that_cannot_be_read_ends_nothing(
    node: Node,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    node.create("a")
    node.settle("a")
    await nursery.start(node.source.run)
    assert node.take() == [("a", FOUND)]

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        await trio.sleep(61)
        assert node.source.covers("a")
        assert node.take() == []
        assert "EMFILE" in node.source.status().detail
    await trio.sleep(61)
    assert node.source.status().ok


async def test_run_again_what_went_meanwhile_is_told(node: Node) -> None:
    for name in ("a", "b"):
        node.create(name)
        node.settle(name)
    for expected in ({("a", FOUND), ("b", FOUND)}, {("a", None), ("b", FOUND)}):
        async with trio.open_nursery() as nursery:
            await nursery.start(node.source.run)
            nursery.cancel_scope.cancel()
        assert set(node.take()) == expected
        if expected == {("a", FOUND), ("b", FOUND)}:
            node.remove("a")


async def test_the_recorded_signals_of_a_node_are_all_told_in_order(node: Node, nursery: trio.Nursery) -> None:
    """Replays runc's and the shim's renames of a traced node, in order, as fast as they are taken."""
    await nursery.start(node.source.run)
    expected: list[tuple[str, RuntimeEvent | None]] = []
    for line in (TIMELINES / "runtime.static-1.22.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = row["path"].rsplit("/", 1)[-1] if row["op"] != "renameto" else row["path"].split("/")[-2]
        if row["op"] == "mkdir" and len(name) == 64:
            # The cgroup's mkdir: bundle and state directory are there before it.
            node.create(name)
            await until(partial(node.source.covers, name))
        elif row["op"] == "rmdir" and len(name) == 64:
            node.remove(name)
            expected.append((name, None))
        elif row["op"] == "renameto":
            which = RuntimeEvent(row["path"].rsplit("/", 1)[-1])
            node.rename(node.state(name) if which is STATE else node.bundle(name), which.value)
            expected.append((name, which))
        await until(lambda: len(node.log) == len(expected))
    assert node.log == expected
    assert Counter(which for _, which in expected)[STATE] > Counter(which for _, which in expected)[INIT_PID] == 22
    assert node.source.stats is not None
    assert node.source.stats.overflows == node.source.repaired == 0
