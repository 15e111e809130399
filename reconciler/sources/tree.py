"""Pods and containers from the cgroup directories of the trigger hierarchy: the one source that always exists.

It has the pods' uids, QoS classes, container ids and inodes, and keeps them in a model of the tree, with a watch on
every directory except the containers' own. After a loss of events a listing of the tree repairs the model.
"""

import errno
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Protocol, final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError, errno_name
from cgroupfs.log import get_log
from cgroupfs.naming import GroupKind, GroupName, Layout, QosClass
from cgroupfs.watch import CHILDREN, VANISHED, AncestorWatch, DirEvent, DirWatcher, UnreadEvents, WatchStats
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import plural
from reconciler.runtime.wakeup import WakeUp
from reconciler.runtime.workqueue import container_key, pod_key
from state.model import GroupRef, SourceStatus

_LOG: Final = get_log("tree")
_NAME: Final = "cgroup tree"
_ABOVE: Final = ""
"""Token of the watches between the hierarchy's root and kubepods; a group's own token is its path."""
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})
_RESYNC_S: Final = 60.0
_PASS_S: Final = 10.0
"""How much later this source's own listing is once a pass of the reconciler has listed the tree: the next one may, too.
"""
_WHOLE: Final = 8
"""Of so many periodic listings one reads each pod's directory; the others only where its links or its watch differ."""
_RETRY_S: Final = 1.0
"""The first wait before a directory that could not be read is read again; it doubles up to the periodic listing."""
_GONE_S: Final = 0.1
"""A removal's pass is this much later: a pod is removed in some 50 steps, for which one pass is enough."""


class TriggerTree(Protocol):
    """Where the directories of a group are; `cgroupfs.hierarchy.Hierarchy` is one."""

    def trigger_directory(self, group_path: str, /) -> str: ...


class TreeDirtyMarker(Protocol):
    """Takes the dirty marks; `reconciler.runtime.workqueue.DirtyKeys` is one."""

    def mark(self, key: str, /, *, within_s: float = 0.0) -> None: ...

    def mark_all(self, why: str, /) -> None: ...


class PodDirs(Struct, frozen=True, kw_only=True):
    """One pod's directories: its group, and its containers (sandbox included) by container id."""

    uid: str
    qos: QosClass
    group: GroupRef
    containers: Mapping[str, GroupRef] = {}


class Listing(NamedTuple):
    """The tree on disk. ``unread``: by group path, why a directory could not be read; all below it is unknown."""

    pods: Mapping[str, PodDirs]
    unread: Mapping[str, SourceError]

    def knows(self, path: str) -> bool:
        """Whether this listing would have a group, if there is one."""
        return not any(path == above or path.startswith(f"{above}/") for above in self.unread)


class _TreeNode:
    """One directory of the model."""

    __slots__ = ("children", "dirs", "inode", "name", "path")

    def __init__(self, path: str, name: GroupName, inode: int) -> None:
        self.path = path
        self.name = name
        self.inode = inode
        self.children: dict[str, _TreeNode] = {}
        self.dirs: PodDirs | None = None


def _groups(directory: str) -> list[tuple[str, int]]:
    """Name and inode of every group in a directory; nothing when it was removed.

    Errors: `SourceError` when it cannot be read for another reason: unknown is not empty.
    """
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.inode()) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as exc:
        if exc.errno in _GONE:
            return []
        raise SourceError(_NAME, f"cannot list {directory}: {errno_name(exc.errno)}") from exc


def _inode(directory: str) -> int | None:
    """Inode of a directory, None when it was removed. Errors: as `_groups`."""
    try:
        return os.stat(directory).st_ino
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise SourceError(_NAME, f"cannot read {directory}: {errno_name(exc.errno)}") from exc


@final
class TreeSource:
    """Keeps the model, and turns changes of the tree into dirty marks.

    A container that is added or removed marks ``container:<id>`` and ``pod:<uid>``, a pod ``pod:<uid>``; start, a full
    queue, and kubepods itself being added or removed mark everything.
    """

    def __init__(
        self,
        tree: TriggerTree,
        layout: Layout,
        marks: TreeDirtyMarker,
        *,
        resync_s: float = _RESYNC_S,
        unread: UnreadEvents | None = None,
    ) -> None:
        """``unread`` is to know whether events wait: a container in creation may be among them."""
        self._tree = tree
        self._unread_events = unread
        self._layout = layout
        self._marks = marks
        self._resync_s = resync_s
        self._watcher: DirWatcher[str] | None = None
        self._root: _TreeNode | None = None
        self._nodes: dict[str, _TreeNode] = {}
        self._owners: dict[str, _TreeNode] = {}
        self._seen_at: float | None = None
        self._ancestors: AncestorWatch[str] | None = None
        self._listed_at = float("-inf")
        """When the whole tree was listed last (trio's clock)."""
        self._round = 0
        self._grace_s = 0.0
        """How much later than a pass's next listing this source's own is."""
        self._unread: dict[str, SourceError] = {}
        """Directories of the model (by group path) that could not be read, and why."""
        self._failed = WakeUp()
        self.repaired = 0
        """Differences that only a periodic listing found. Anything but 0 is an event that the kernel did not send."""

    # Reading: the disk as it is now, without the model.

    def scan(self) -> dict[str, PodDirs]:
        """Every pod on disk now, by uid. Costs a listing per pod (30 µs each): see `scan_gently` and `pods`.

        Errors: `SourceError` when any of the tree cannot be read; that is never "no pods".
        """
        unread: dict[str, SourceError] = {}
        dirs = _newest(self._read(unread))
        if unread:
            raise next(iter(unread.values()))
        return dirs

    async def scan_gently(self) -> Listing:
        """`scan` that lets the loop run every millisecond. Errors: none; they are in the result, by directory."""
        dirs: list[PodDirs] = []
        unread: dict[str, SourceError] = {}
        clock = TimeSlice()
        for pod in self._read(unread):
            dirs.append(pod)
            await clock.checkpoint()
        return Listing(_newest(dirs), unread)

    async def list_again(self) -> Listing:
        """The whole tree, listed into the model: differences are marked and counted as repaired. Errors: as above.

        For the reconciler's periodic pass. While the source does not run: as `scan_gently`.
        """
        watcher, ancestors = self._watcher, self._ancestors
        if watcher is not None and ancestors is not None:
            # This source's own listing is due only when no pass has listed for longer.
            self._grace_s = _PASS_S
            self.repaired += await self._resync(watcher, ancestors, periodic=True)
            # Else the source has failed meanwhile, and the model may be incomplete.
            if self._watcher is watcher:
                unread = {self._layout.kubepods if at == _ABOVE else at: exc for at, exc in self._unread.items()}
                return Listing(self.pods(), unread)
        return await self.scan_gently()

    def rescan(self, uid: str) -> PodDirs | None:
        """One pod on disk now; None when it has no directory. Errors: `SourceError` when that cannot be determined."""
        places = [(self._layout.pod(qos, uid), qos) for qos in QosClass]
        return _newest(pod for path, qos in places if (pod := self._read_pod(path, uid, qos)) is not None).get(uid)

    def _read(self, unread: dict[str, SourceError]) -> Iterator[PodDirs]:
        """Every pod that can be read; what cannot be is entered in ``unread``."""
        for qos in QosClass:
            group = self._layout.qos(qos)
            try:
                names = [name for name, _ in _groups(self._tree.trigger_directory(group))]
            except SourceError as exc:
                unread[group] = exc
                continue
            for name in names:
                path = f"{group}/{name}"
                group_name = self._layout.parse(path)
                if group_name is not None and group_name.kind is GroupKind.POD and group_name.pod_uid is not None:
                    try:
                        pod = self._read_pod(path, group_name.pod_uid, qos)
                    except SourceError as exc:
                        unread[path] = exc
                        continue
                    if pod is not None:
                        yield pod

    def _read_pod(self, path: str, uid: str, qos: QosClass) -> PodDirs | None:
        directory = self._tree.trigger_directory(path)
        inode = _inode(directory)
        if inode is None:
            return None
        containers: dict[str, GroupRef] = {}
        for name, child in _groups(directory):
            group_name = self._layout.parse(f"{path}/{name}")
            if group_name is not None and group_name.container_id is not None:
                containers[group_name.container_id] = GroupRef(path=f"{path}/{name}", inode=child)
        return PodDirs(uid=uid, qos=qos, group=GroupRef(path=path, inode=inode), containers=containers)

    # The model: the result of the events so far.

    def pods(self) -> dict[str, PodDirs]:
        """Every pod of the model, by uid. Costs nothing; as old as the last event handled."""
        return _newest(_dirs(node) for node in self._nodes.values() if node.name.kind is GroupKind.POD)

    def locate(self, container_id: str) -> PodDirs | None:
        node = self._owners.get(container_id)
        return None if node is None else _dirs(node)

    @property
    def stats(self) -> WatchStats | None:
        """What the watcher holds; None while the source is not running."""
        return None if self._watcher is None else self._watcher.stats

    def status(self) -> SourceStatus:
        """Whether the tree exists and is watched, and when it was last read."""
        stats = self.stats
        problem = "not running" if stats is None else stats.problem or next(map(str, self._unread.values()), None)
        if self._root is None and problem is None:
            problem = f"{self._tree.trigger_directory(self._layout.kubepods)} does not exist (yet)"
        age = None if self._seen_at is None else time.monotonic() - self._seen_at
        pods = len([node for node in self._nodes.values() if node.name.kind is GroupKind.POD])
        return SourceStatus(name=_NAME, ok=problem is None, age_s=age, detail=problem or plural(pods, "pod"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Reports its start when the model is complete; run again, it keeps the model it has.

        A directory that cannot be read remains in the model unchanged, and is read again after a growing wait.
        """
        try:
            with DirWatcher[str](_NAME, self._unread_events) as watcher:
                self._watcher = watcher
                ancestors = AncestorWatch(
                    watcher,
                    self._tree.trigger_directory("/"),
                    self._tree.trigger_directory(self._layout.kubepods),
                    _ABOVE,
                )
                self._ancestors = ancestors
                self._marks.mark_all("start")
                await self._resync(watcher, ancestors)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._list_periodically, watcher, ancestors)
                    task_status.started()
                    await self._follow(watcher, ancestors)
        finally:
            self._watcher = self._ancestors = None

    async def _follow(self, watcher: DirWatcher[str], ancestors: AncestorWatch[str]) -> None:
        while True:
            batch = await watcher.next_batch()
            if any(event.overflow for event in batch):
                self._marks.mark_all("overflow")
                # The other events of the batch are covered by the listing.
                await self._resync(watcher, ancestors)
                continue
            clock = TimeSlice()
            for event in batch:
                self._handle(watcher, ancestors, event)
                await clock.checkpoint()
            self._seen_at = time.monotonic()

    async def _list_periodically(self, watcher: DirWatcher[str], ancestors: AncestorWatch[str]) -> None:
        """The safety net for an event that the kernel did not send."""
        # Safe beside `_follow`: `_compare` and `_handle` have no checkpoint, so each directory is treated as a whole.
        wait_s = _RETRY_S
        while True:
            failed = await self._failed.wait_until(self._due, settle_s=wait_s)
            if trio.current_time() >= self._due:
                self._grace_s = 0.0
                self.repaired += await self._resync(watcher, ancestors, periodic=True)
            elif failed:
                self._read_again(watcher, ancestors)
            wait_s = min(2 * wait_s, self._resync_s) if self._unread else _RETRY_S
            if self._unread:
                self._failed.set()
            else:
                self._failed.clear()

    @property
    def _due(self) -> float:
        """When this source lists the tree by itself (trio's clock)."""
        return self._listed_at + self._resync_s + self._grace_s

    def _read_again(self, watcher: DirWatcher[str], ancestors: AncestorWatch[str]) -> None:
        # A copy: what is read successfully is taken out.
        for path in list(self._unread):
            node = self._nodes.get(path)
            if node is not None:
                self._compare(watcher, node)
            else:
                # kubepods itself, or a directory removed since.
                self._unread.pop(path, None)
                self._open(watcher, ancestors)

    def _unreadable(self, path: str, exc: SourceError) -> None:
        if path not in self._unread:
            _LOG.warning(str(exc))
        self._unread[path] = exc
        self._failed.set()

    async def _resync(self, watcher: DirWatcher[str], ancestors: AncestorWatch[str], *, periodic: bool = False) -> int:
        """Watch and list the whole tree against the model; how many directories were not as the model had them.

        ``periodic``: no event is known to be lost.
        """
        self._listed_at = trio.current_time()
        self._round += periodic
        changes = self._open(watcher, ancestors)
        todo = [] if self._root is None else [self._root]
        clock = TimeSlice()
        # A source that failed and runs again has another watcher, and lists anew.
        while todo and self._watcher is watcher:
            node = todo.pop()
            # The kernel reports a loss of events, so without one a part of the directories is enough. By inode: each
            # round has as many.
            its_turn = not periodic or (node.inode + self._round) % _WHOLE == 0
            # An event may have removed the node since it was put into the list.
            if self._nodes.get(node.path) is node and (its_turn or not self._is_as_listed(watcher, node)):
                changes += self._compare(watcher, node)
                todo += [child for child in node.children.values() if child.name.container_id is None]
            await clock.checkpoint()
        self._seen_at = time.monotonic()
        return changes

    def _is_as_listed(self, watcher: DirWatcher[str], node: _TreeNode) -> bool:
        """Whether a pod's directory is watched and has as many groups inside as in the model: a stat, not a listing."""
        if node.name.kind is not GroupKind.POD or node.path in self._unread:
            return False
        directory = self._tree.trigger_directory(node.path)
        try:
            status = os.stat(directory)
        except OSError:
            return False
        # The links of a cgroup directory: two, and one for each directory in it.
        return (status.st_ino, status.st_nlink) == (node.inode, 2 + len(node.children)) and directory in watcher

    def _open(self, watcher: DirWatcher[str], ancestors: AncestorWatch[str]) -> int:
        """Find kubepods itself: 1 when it was added, removed, or made again."""
        try:
            inode = _inode(ancestors.target) if ancestors.extend() else None
        except SourceError as exc:
            self._unreadable(_ABOVE, exc)
            return 0
        self._unread.pop(_ABOVE, None)
        if self._root is not None and self._root.inode == inode:
            return 0
        changed = int(self._root is not None)
        if self._root is not None:
            self._vanished(watcher, self._root)
            self._root = None
            self._marks.mark_all("kubepods removed")
        if inode is not None:
            changed = 1
            self._root = _TreeNode(self._layout.kubepods, GroupName(kind=GroupKind.KUBEPODS), inode)
            self._nodes[self._root.path] = self._root
            self._marks.mark_all("kubepods appeared")
            self._compare(watcher, self._root)
        return changed

    def _handle(self, watcher: DirWatcher[str], ancestors: AncestorWatch[str], event: DirEvent[str]) -> None:
        if event.token == _ABOVE:
            if ancestors.leads_on(event):
                if event.mask & VANISHED:
                    ancestors.cut(event)
                self._open(watcher, ancestors)
            return
        parent = self._nodes.get(event.token or "")
        if parent is None:
            return
        if event.rescan or event.ended:
            # Removed: newer kernels drop the watch of a removed group themselves; its parent reports it.
            self._compare(watcher, parent)
        elif event.is_dir:
            path = f"{parent.path}/{event.name}"
            known = parent.children.get(path)
            # A directory made again under its name meanwhile has another inode than the known one.
            try:
                inode = None if event.mask & VANISHED else _inode(f"{event.path}/{event.name}")
            except SourceError as exc:
                self._unreadable(parent.path, exc)
                return
            if known is not None and known.inode == inode:
                return
            if known is not None:
                self._vanished(watcher, known)
                del parent.children[path]
                parent.dirs = None
            name = self._layout.parse(path)
            if name is None:
                return
            if inode is not None:
                self._appeared(watcher, parent, _TreeNode(path, name, inode))
            elif known is None:
                # Added and removed before it could be read: reported all the same.
                self._mark(name, within_s=_GONE_S)

    def _compare(self, watcher: DirWatcher[str], node: _TreeNode) -> int:
        """Watch one directory, then list it against the model; how many children were added or removed."""
        directory = self._tree.trigger_directory(node.path)
        # Watch, then list: else about half of the containers made right after their pod's directory would be missed.
        if not watcher.add(directory, CHILDREN, node.path):
            # It was removed: its parent reports that.
            self._unread.pop(node.path, None)
            return 0
        try:
            listed = {f"{node.path}/{name}": inode for name, inode in _groups(directory)}
        except SourceError as exc:
            self._unreadable(node.path, exc)
            return 0
        self._unread.pop(node.path, None)
        changes = 0
        for path, child in list(node.children.items()):
            # A static pod that is made again has its old uid, so its old path: only the inode differs.
            if listed.get(path) != child.inode:
                changes += 1
                self._vanished(watcher, child)
                del node.children[path]
                node.dirs = None
        for path, inode in listed.items():
            if path not in node.children and (name := self._layout.parse(path)) is not None:
                changes += 1
                self._appeared(watcher, node, _TreeNode(path, name, inode))
        return changes

    def _appeared(self, watcher: DirWatcher[str], parent: _TreeNode, node: _TreeNode) -> None:
        parent.children[node.path] = self._nodes[node.path] = node
        parent.dirs = None
        self._mark(node.name)
        if node.name.container_id is None:
            self._compare(watcher, node)
        else:
            self._owners[node.name.container_id] = parent

    def _vanished(self, watcher: DirWatcher[str], node: _TreeNode) -> None:
        for child in node.children.values():
            self._vanished(watcher, child)
        node.children.clear()
        del self._nodes[node.path]
        self._unread.pop(node.path, None)
        if node.name.container_id is None:
            # The kernel keeps the watch of a removed group, and counts it.
            watcher.remove(self._tree.trigger_directory(node.path))
        else:
            self._owners.pop(node.name.container_id, None)
        self._mark(node.name, within_s=_GONE_S)

    def _mark(self, name: GroupName, *, within_s: float = 0.0) -> None:
        if name.container_id is not None:
            self._marks.mark(container_key(name.container_id), within_s=within_s)
        if name.pod_uid is not None:
            self._marks.mark(pod_key(name.pod_uid), within_s=within_s)


def _dirs(node: _TreeNode) -> PodDirs:
    if node.dirs is None:
        assert node.name.pod_uid is not None
        assert node.name.qos is not None
        node.dirs = PodDirs(
            uid=node.name.pod_uid,
            qos=node.name.qos,
            group=GroupRef(path=node.path, inode=node.inode),
            containers={
                child.name.container_id: GroupRef(path=child.path, inode=child.inode)
                for child in node.children.values()
                if child.name.container_id is not None
            },
        )
    return node.dirs


def _newest(pods: Iterable[PodDirs]) -> dict[str, PodDirs]:
    """By uid. Of two directories with one uid (a pod that changed its QoS class) the later made one counts."""
    dirs: dict[str, PodDirs] = {}
    for pod in pods:
        before = dirs.get(pod.uid)
        # Inode numbers of cgroup directories only grow.
        if before is None or before.group.inode < pod.group.inode:
            dirs[pod.uid] = pod
    return dirs
