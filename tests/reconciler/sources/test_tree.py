import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from cgroupfs.naming import Driver, GroupKind, Layout, QosClass
from reconciler.runtime.workqueue import DirtyKeys
from reconciler.sources import tree as sources_tree
from reconciler.sources.tree import TreeSource
from tests.fakes.watches import kernel_watches
from tests.known import known
from tests.real_cgroups import make_root, remove_tree
from tests.until import until

TIMELINES: Final = Path(__file__).parents[2] / "fixtures" / "timeline"
UID: Final = "11111111-1111-4111-8111-111111111111"
CGROUPFS: Final = Layout(Driver.CGROUPFS)

T = TypeVar("T")


class Tree:
    """A hierarchy whose root is any directory."""

    def __init__(self, root: str) -> None:
        self.root = root

    def trigger_directory(self, group_path: str, /) -> str:
        return self.root + group_path.rstrip("/")

    def make(self, group_path: str) -> str:
        os.makedirs(self.trigger_directory(group_path), exist_ok=True)
        return group_path

    def remove(self, group_path: str) -> None:
        remove_tree(self.trigger_directory(group_path))


class Log:
    """Takes marks and keeps their order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def mark(self, key: str, /, *, within_s: float = 0.0) -> None:
        self.log.append(key)

    def mark_all(self, why: str, /) -> None:
        self.log.append(f"*{why}")

    def take(self) -> list[str]:
        taken, self.log = self.log, []
        return taken


def container_id(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(str(tmp_path))


@pytest.fixture
def real() -> Iterator[Tree]:
    root = make_root("cpuset", "watch")
    yield Tree(root)
    remove_tree(root)


def make_pod(
    tree: Tree, layout: Layout = CGROUPFS, qos: QosClass = QosClass.BURSTABLE, uid: str = UID, containers: int = 1
) -> str:
    path = tree.make(layout.pod(qos, uid))
    for number in range(containers):
        tree.make(layout.container(qos, uid, container_id(number)))
    return path


def watches(source: TreeSource) -> int:
    assert source.stats is not None
    counted = kernel_watches(known(source._watcher))
    assert counted == source.stats.watches
    return counted


@pytest.mark.parametrize("driver", Driver)
@pytest.mark.parametrize("root", ["/", "/k8s"])
async def test_scanning_finds_every_pod_of_every_class(tree: Tree, driver: Driver, root: str) -> None:
    layout = Layout(driver, root)
    source = TreeSource(tree, layout, Log())
    for number, qos in enumerate(QosClass):
        make_pod(tree, layout, qos, f"pod-{number}", containers=number)
    tree.make(f"{layout.qos(QosClass.BURSTABLE)}/somebody-else")
    tree.make(f"{layout.pod(QosClass.BURSTABLE, 'pod-1')}/not-a-container")
    dirs = source.scan()
    assert {uid: (pod.qos, set(pod.containers)) for uid, pod in dirs.items()} == {
        f"pod-{number}": (qos, {container_id(index) for index in range(number)}) for number, qos in enumerate(QosClass)
    }
    for uid, pod in dirs.items():
        assert pod.group.path == layout.pod(pod.qos, uid)
        for group in (pod.group, *pod.containers.values()):
            assert group.inode == os.stat(tree.trigger_directory(group.path)).st_ino
        assert source.rescan(uid) == pod
    assert (await source.scan_gently()).pods == dirs
    assert source.rescan("pod-9") is None


def test_of_two_directories_with_one_uid_the_later_made_counts(real: Tree) -> None:
    source = TreeSource(real, CGROUPFS, Log())
    for qos in (QosClass.BESTEFFORT, QosClass.GUARANTEED):
        real.make(CGROUPFS.pod(qos, UID))
    assert source.scan()[UID].qos is QosClass.GUARANTEED
    dirs = known(source.rescan(UID))
    assert dirs.qos is QosClass.GUARANTEED


def test_a_tree_that_cannot_be_read_is_not_an_empty_one(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pod(tree)

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match="EMFILE"):
        TreeSource(tree, CGROUPFS, Log()).scan()


async def test_pods_and_containers_that_come_and_go_are_marked(tree: Tree, nursery: trio.Nursery) -> None:
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks)
    make_pod(tree, uid="old", containers=0)
    tree.make(CGROUPFS.qos(QosClass.BESTEFFORT))
    await nursery.start(source.run)
    assert marks.take() == ["*start", "*kubepods appeared", "pod:old"]
    assert source.status().ok
    assert watches(source) == 5

    make_pod(tree, containers=1)
    key = f"container:{container_id(0)}"
    await until(lambda: key in marks.log)
    assert marks.take() == [f"pod:{UID}", key, f"pod:{UID}"]
    located = known(source.locate(container_id(0)))
    assert located == source.pods()[UID] == source.rescan(UID)
    assert watches(source) == 6

    tree.remove(CGROUPFS.container(QosClass.BURSTABLE, UID, container_id(0)))
    await until(lambda: key in marks.log)
    assert marks.take() == [key, f"pod:{UID}"]
    assert source.locate(container_id(0)) is None
    assert source.pods()[UID].containers == {}

    tree.remove(CGROUPFS.pod(QosClass.BURSTABLE, UID))
    await until(lambda: UID not in source.pods())
    assert marks.take() == [f"pod:{UID}"]
    assert source.repaired == 0


@pytest.mark.parametrize("driver", Driver)
async def test_kubepods_that_comes_late_goes_and_comes_again_is_followed(
    tree: Tree, nursery: trio.Nursery, driver: Driver
) -> None:
    layout = Layout(driver, "/outer/inner")
    marks = Log()
    source = TreeSource(tree, layout, marks)
    await nursery.start(source.run)
    assert marks.take() == ["*start"]
    assert not source.status().ok
    top = "/" + layout.kubepods.split("/")[1]
    for _ in range(2):
        make_pod(tree, layout)
        await until(lambda: container_id(0) in str(marks.log))
        taken = marks.take()
        assert "*kubepods appeared" in taken
        assert set(source.pods()) == {UID}
        assert source.status().ok
        tree.remove(top)
        await until(lambda: not source.pods())
        assert "*kubepods removed" in marks.take()
        assert watches(source) == 1


@pytest.mark.kernel
async def test_a_static_pod_made_again_under_its_uid_is_told_by_its_inode(real: Tree, nursery: trio.Nursery) -> None:
    marks = Log()
    source = TreeSource(real, CGROUPFS, marks)
    make_pod(real)
    await nursery.start(source.run)
    before = source.pods()[UID].group
    marks.take()
    real.remove(CGROUPFS.pod(QosClass.BURSTABLE, UID))
    make_pod(real, containers=0)
    await until(lambda: source.pods().get(UID, None) is not None and source.pods()[UID].group != before)
    after = source.pods()[UID]
    assert after.group.path == before.path
    assert after.group.inode > before.inode
    assert f"container:{container_id(0)}" in marks.log
    assert source.locate(container_id(0)) is None
    assert watches(source) == 4


async def test_a_directory_made_before_its_parent_is_watched_is_found(tree: Tree, nursery: trio.Nursery) -> None:
    """The mkdir race: everything below kubepods exists before the first event is read."""
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks)
    tree.make(CGROUPFS.kubepods)
    await nursery.start(source.run)
    make_pod(tree, containers=3)
    await until(lambda: source.locate(container_id(2)) is not None)
    assert source.pods() == source.scan()
    for number in range(3):
        assert f"container:{container_id(number)}" in marks.log


async def test_lost_events_end_in_a_full_listing(tree: Tree, nursery: trio.Nursery) -> None:
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks)
    make_pod(tree)
    await nursery.start(source.run)
    marks.take()
    watcher = known(source._watcher)
    # The watch disappears behind the source's back, and then the queue overflows.
    besteffort = tree.make(CGROUPFS.qos(QosClass.BESTEFFORT))
    await until(lambda: tree.trigger_directory(besteffort) in watcher)
    watcher.remove(tree.trigger_directory(besteffort))
    make_pod(tree, qos=QosClass.BESTEFFORT, uid="missed", containers=0)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    burstable = tree.trigger_directory(CGROUPFS.qos(QosClass.BURSTABLE))
    for number in range(limit // 2 + 10):
        os.mkdir(f"{burstable}/x{number}")
        os.rmdir(f"{burstable}/x{number}")
    await until(lambda: "*overflow" in marks.log)
    await until(lambda: "missed" in source.pods())
    assert "pod:missed" in marks.log
    assert watches(source) == 6


async def test_the_periodic_listing_repairs_what_no_event_told(
    tree: Tree, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks, resync_s=60)
    make_pod(tree, uid="stays")
    make_pod(tree, uid="goes", containers=0)
    await nursery.start(source.run)
    watcher = known(source._watcher)
    marks.take()
    watcher.remove(tree.trigger_directory(CGROUPFS.qos(QosClass.BURSTABLE)))
    make_pod(tree, uid="comes", containers=0)
    tree.remove(CGROUPFS.pod(QosClass.BURSTABLE, "goes"))
    await trio.sleep(61)
    assert set(source.pods()) == {"stays", "comes"}
    assert sorted(marks.take()) == ["pod:comes", "pod:goes"]
    assert source.repaired == 2
    await trio.sleep(61)
    assert marks.take() == []
    assert source.repaired == 2


async def test_a_pass_and_the_source_list_the_tree_once_for_both(
    tree: Tree, nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks, resync_s=60)
    make_pod(tree, uid="stays")
    assert (await source.list_again()).pods == source.scan(), "a source that does not run lists the disk"
    await nursery.start(source.run)
    watcher = known(source._watcher)
    marks.take()
    listed: list[str] = []
    real = sources_tree._groups

    def counted(directory: str) -> list[tuple[str, int]]:
        listed.append(directory)
        return real(directory)

    monkeypatch.setattr(sources_tree, "_groups", counted)
    for _ in range(5):
        await trio.sleep(50)
        listed.clear()
        assert (await source.list_again()).pods == source.pods() == source.scan()
        await trio.lowlevel.checkpoint()
    assert (marks.take(), source.repaired) == ([], 0)
    # What no event reported is in the answer, marked and counted.
    watcher.remove(tree.trigger_directory(CGROUPFS.qos(QosClass.BURSTABLE)))
    make_pod(tree, uid="comes", containers=0)
    assert set((await source.list_again()).pods) == {"stays", "comes"}
    assert (marks.take(), source.repaired) == (["pod:comes"], 1)
    listed.clear()
    await trio.sleep(69)
    assert listed == [], "a pass that is late lists for both, too"
    await trio.sleep(2)
    assert listed, "without passes the source lists by itself"


async def test_a_listing_for_a_pass_says_what_it_could_not_read(
    tree: Tree, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TreeSource(tree, CGROUPFS, Log())
    make_pod(tree, uid="stays")
    await nursery.start(source.run)
    burstable = CGROUPFS.qos(QosClass.BURSTABLE)
    real = sources_tree._groups

    def refused(directory: str) -> list[tuple[str, int]]:
        if directory == tree.trigger_directory(burstable):
            raise SourceError("cgroup tree", "EIO")
        return real(directory)

    monkeypatch.setattr(sources_tree, "_groups", refused)
    listing = await source.list_again()
    assert set(listing.unread) == {burstable}
    assert not listing.knows(CGROUPFS.pod(QosClass.BURSTABLE, "stays"))
    assert set(listing.pods) == {"stays"}, "the model keeps what it cannot read"


async def test_without_watches_the_tree_is_polled(
    tree: Tree, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("cgroupfs.watch.INotify", refuse)
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks)
    await nursery.start(source.run)
    make_pod(tree)
    await trio.sleep(4.5)
    assert set(source.pods()) == {UID}
    assert f"container:{container_id(0)}" in marks.take()
    status = source.status()
    assert not status.ok
    assert "max_user_instances" in status.detail
    tree.remove(CGROUPFS.kubepods)
    await trio.sleep(1.5)
    assert source.pods() == {}


async def test_run_again_the_source_goes_on_with_its_model(tree: Tree) -> None:
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks)
    make_pod(tree, uid="stays", containers=0)
    make_pod(tree, uid="goes", containers=0)
    for expected in (["*kubepods appeared", "*start", "pod:goes", "pod:stays"], ["*start", "pod:comes", "pod:goes"]):
        async with trio.open_nursery() as nursery:
            await nursery.start(source.run)
            nursery.cancel_scope.cancel()
        assert sorted(marks.take()) == expected
        assert source.stats is None
        if "pod:stays" in expected:
            tree.remove(CGROUPFS.pod(QosClass.BURSTABLE, "goes"))
            make_pod(tree, uid="comes", containers=0)
    assert set(source.pods()) == {"stays", "comes"}


async def test_the_recorded_life_of_a_node_is_followed(tree: Tree, nursery: trio.Nursery) -> None:
    """Replays, as fast as possible, every cpuset directory that a real kubelet and runc made and removed."""
    marks = Log()
    source = TreeSource(tree, CGROUPFS, marks)
    await nursery.start(source.run)
    expected: set[str] = set()
    alive: set[str] = set()
    prefix = "/sys/fs/cgroup/cpuset"
    for line in (TIMELINES / "cpuset-tree.static-1.22.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "mark" in row:
            # A step of the recording ends: events and listing must agree.
            await until(lambda: source.pods() == source.scan())
            assert set(source.pods()) == {path.split("/pod")[-1] for path in alive}
            continue
        path = f"{row['dir'].removeprefix(prefix)}/{row['name']}"
        name = known(CGROUPFS.parse(path))
        if name.pod_uid is not None:
            expected.add(f"pod:{name.pod_uid}")
        if name.container_id is not None:
            expected.add(f"container:{name.container_id}")
        if row["mask"][0] == "CREATE":
            os.mkdir(tree.trigger_directory(path))
        else:
            os.rmdir(tree.trigger_directory(path))
        if name.kind is GroupKind.POD:
            (alive.add if row["mask"][0] == "CREATE" else alive.remove)(path)
        await trio.lowlevel.checkpoint()
    assert len(expected) == 30, "8 pods and 22 containers are in the recording"
    await until(lambda: expected <= set(marks.log))
    assert source.repaired == 0


@pytest.mark.kernel
async def test_a_thousand_pods_made_and_removed_at_full_speed_leave_nothing_behind(
    real: Tree, nursery: trio.Nursery
) -> None:
    marks = DirtyKeys()
    source = TreeSource(real, CGROUPFS, marks)
    for qos in QosClass:
        real.make(CGROUPFS.qos(qos))
    await nursery.start(source.run)
    empty = watches(source)
    marks.take_nowait()
    keys: set[str] = set()

    def storm() -> None:
        for number in range(1000):
            qos = list(QosClass)[number % 3]
            pod = real.trigger_directory(CGROUPFS.pod(qos, f"uid-{number}"))
            inner = real.trigger_directory(CGROUPFS.container(qos, f"uid-{number}", container_id(number)))
            os.mkdir(pod)
            os.mkdir(inner)
            if number % 2:
                os.rmdir(inner)
                os.rmdir(pod)
        for number in range(0, 1000, 2):
            qos = list(QosClass)[number % 3]
            os.rmdir(real.trigger_directory(CGROUPFS.container(qos, f"uid-{number}", container_id(number))))
            os.rmdir(real.trigger_directory(CGROUPFS.pod(qos, f"uid-{number}")))

    async def collect() -> None:
        while True:
            batch = await marks.take()
            assert not batch.everything, "the queue overflowed"
            keys.update(batch.keys)

    nursery.start_soon(collect)
    await trio.to_thread.run_sync(storm)
    pods = {f"pod:uid-{number}" for number in range(1000)}
    await until(lambda: pods <= keys and not source.pods(), within_s=20)
    # Those that lived long enough to be listed: half of the containers; the others were gone with their pods.
    lasting = {f"container:{container_id(number)}" for number in range(0, 1000, 2)}
    await until(lambda: lasting <= keys)
    assert watches(source) == empty
    assert source.scan() == {}
    assert source.repaired == 0
    assert source._owners == {}
    assert len(source._nodes) == 3
