"""The runtime's event that it has finished with a container: the rename of runc's ``state.json`` or crun's ``status``.

runc writes its own values up to that rename, so a value written into a container's cgroup before it is lost; the
container's program is exec'ed a few milliseconds after it. ``runc update`` (the kubelet's CPU manager) ends in the same
rename. The files and the runtimes are in `reconciler.sources.runtime_files`.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Final, Protocol, final

import trio

from cgroupfs.errors import SourceError, errno_name
from cgroupfs.watch import (
    CHILDREN,
    MOVED_TO,
    OPENED,
    VANISHED,
    AncestorWatch,
    DirEvent,
    DirWatcher,
    Mask,
    UnreadEvents,
    WatchStats,
)
from reconciler.runtime.format import plural
from reconciler.runtime.wakeup import WakeUp
from reconciler.sources.runtime_files import FIFO, FILES, STATE_JSON, STATUS
from reconciler.sources.runtime_roots import RuntimeDirs
from state.model import SourceStatus

_NAME: Final = "runtime signal"
# OPENED: a command of the runtime (exec, kill, start) begins by opening the record, before it makes a process in the
# container's groups or signals one.
_RENAMES: Final = MOVED_TO | OPENED | int(Mask.ONLYDIR)
_RESYNC_S: Final = 60.0
"""Between two listings of everything: the safety net for an event that the kernel did not send."""
_SILENT_S: Final = 2.0
"""From a container's first directory to its event 30 ms were recorded, a few hundred at a load of 16."""
_LONG_S: Final = 0.5
"""Longer than a usual creation, and shorter than one on a busy machine, whose signal is read late."""
_LONGEST_S: Final = 60.0
"""Of a creation that a file proves: 5 s were measured when a kubelet started 110 pods at once on two CPUs."""
_UPDATE_S: Final = 0.05
"""An update opens the file, too, and replaces it some milliseconds later: within this time."""
_READING_S: Final = 1.0
"""A reader opens the file at most this long after the directory (`announce_reading`), on a busy node, too."""
_FRESH_S: Final = 0.1
"""A program is executed within that time of its container's event; crun's event comes with the directory itself."""
_SHOWN: Final = 3
_ID_SHOWN: Final = 13


class RuntimeEvent(StrEnum):
    """The kind of evidence that the runtime has finished writing.

    FOUND: it had finished before the watch began, the time is unknown. ABSENT: without evidence, and none
    is expected any more.
    """

    STATE = STATE_JSON
    STATUS = STATUS
    # In containerd's bundle, a little after the record.
    INIT_PID = "init.pid"
    FOUND = "found"
    ABSENT = "none"


_STATES: Final[Mapping[str, RuntimeEvent]] = {file.name: RuntimeEvent(file.name) for file in FILES}
_BUNDLES: Final[Mapping[str, RuntimeEvent]] = {"init.pid": RuntimeEvent.INIT_PID}


class RuntimeEventHandler(Protocol):
    """Takes the signals, in the reader's task. Must not wait, and should not take longer than the writes do."""

    def settled(self, container_id: str, at: float, which: RuntimeEvent, /) -> None:
        """The runtime has finished writing (creation or update). ``at``: monotonic seconds of the read.

        May be called twice for one rename, and is called for both files: compare values, not counts.
        """
        ...

    def commanded(self, container_id: str, at: float | None, /) -> None:
        """The runtime was called for this container: a process in its groups may wait for CPU time already.

        ``at``: monotonic seconds; None: the last command was an update.
        """
        ...

    def unfinished(self, container_id: str, /) -> None:
        """The container's creation is unfinished after `_LONG_S`, and each `_LONG_S` from then on."""
        ...

    def gone(self, container_id: str, /) -> None:
        """The runtime has removed all it kept of this container."""
        ...


class _WatchedDirectory:
    """One watched directory: a container's when ``container_id`` is set, else a root or an ancestor of one."""

    __slots__ = ("container_id", "expects", "seen")

    def __init__(self, container_id: str = "", expects: Mapping[str, RuntimeEvent] | None = None) -> None:
        self.container_id = container_id
        self.expects: Mapping[str, RuntimeEvent] = expects or {}
        """The names whose appearance is an event; of other directories, none."""
        self.seen: tuple[int, int] | None = None


class _RuntimeRoot:
    """A directory with one directory per container, which may not be there yet."""

    def __init__(
        self, path: str, expects: Mapping[str, RuntimeEvent], watcher: DirWatcher[_WatchedDirectory], base: str
    ) -> None:
        self.path = path
        self.expects = expects
        self.token = _WatchedDirectory()
        self.ancestors = AncestorWatch(watcher, base, path, _WatchedDirectory())
        self.exists = False
        self.containers: dict[str, _WatchedDirectory] = {}


@final
class RuntimeEvents:
    """Watches the runtimes' directories and calls the handler."""

    def __init__(
        self,
        dirs: RuntimeDirs,
        handler: RuntimeEventHandler,
        *,
        updates: Callable[[], bool] = lambda: False,
        root: str = "/",
        resync_s: float = _RESYNC_S,
        unread: UnreadEvents | None = None,
    ) -> None:
        """``updates``: whether the kubelet updates running containers, as its CPU manager's static policy does.

        ``unread`` is to know whether events wait.
        """
        self._unread_events = unread
        self._dirs = dirs
        self._handler = handler
        self._updates = updates
        self._opened: dict[str, float] = {}
        """When a command of the runtime opened a container's record last (monotonic)."""
        self._read: dict[str, float] = {}
        """Announced readings whose opening of the file is still to come."""
        self._base = os.path.join(root, "run")
        self._root = root
        self._resync_s = resync_s
        self._watcher: DirWatcher[_WatchedDirectory] | None = None
        self._roots: dict[str, _RuntimeRoot] = {}
        self._seen_at: float | None = None
        self._unread: str | None = None
        self._evidence: dict[str, RuntimeEvent] = {}
        self._silent_at: dict[str, float] = {}
        """When an awaited container is checked next (trio's clock), and given up if nothing came."""
        self._began: dict[str, float] = {}
        """Since when a container is awaited, or was until it was given up."""
        self._silence = WakeUp()
        self._fresh_until = 0.0
        self.repaired = 0
        """Containers that only a periodic listing found. Anything but 0 is an event that the kernel did not send."""

    def covers(self, container_id: str) -> bool:
        """Whether a signal can come for this container. If not: verify until its values remain."""
        return self._evidence.get(container_id) is not RuntimeEvent.ABSENT and self._watches(container_id)

    def awaits(self, container_id: str) -> bool:
        """Whether the event of the container's creation is still to come."""
        if container_id in self._silent_at:
            return True
        # Its group may be known before the runtime's directory was reported, or after its bundle was given up.
        began = self._began.get(container_id)
        if self.evidence(container_id) is not RuntimeEvent.ABSENT or not (directory := self._begun(container_id)):
            return False
        ended = any(os.path.exists(f"{directory}/{name}") for name in _STATES)
        return not ended and (began is None or trio.current_time() - began < _LONGEST_S)

    def _begun(self, container_id: str) -> str:
        """The directory in which the runtime has the FIFO of a container whose program was not started; else empty."""
        for root in self._roots.values():
            directory = f"{root.path}/{container_id}"
            if root.expects is _STATES and os.path.exists(f"{directory}/{FIFO}"):
                return directory
        return ""

    def awaits_any(self) -> bool:
        """Whether a container is in creation, or appeared or was finished a moment ago: its values may be late."""
        return bool(self._silent_at) or time.monotonic() < self._fresh_until

    def longest_s(self) -> float:
        """For how long the container whose creation takes the longest has been in creation; 0: none is."""
        began = min((self._began.get(name, math.inf) for name in self._silent_at), default=math.inf)
        return max(0.0, trio.current_time() - began) if began < math.inf else 0.0

    def evidence(self, container_id: str) -> RuntimeEvent:
        """The file that showed the end of the container's creation; ABSENT: none did."""
        return self._evidence.get(container_id, RuntimeEvent.ABSENT)

    def _watches(self, container_id: str) -> bool:
        return any(container_id in root.containers for root in self._roots.values())

    @property
    def stats(self) -> WatchStats | None:
        """What the watcher holds; None while the source is not running."""
        return None if self._watcher is None else self._watcher.stats

    def status(self, containers: Collection[str] = (), sandboxed: int = 0) -> SourceStatus:
        """Which signals there are, for how many of ``containers`` (those that have a cgroup), and for which none.

        ``sandboxed``: how many pods have no container with a cgroup of its own.
        """
        stats = self.stats
        existing = [root for root in self._roots.values() if root.exists and root.expects is _STATES]
        problem = "not running" if stats is None else stats.problem or self._unread
        waiting = ""
        if problem is None and not existing:
            states = ", ".join(self._dirs.states)
            if containers:
                problem = f"no runtime's state below {states}: values are verified until they are stable"
            else:
                # The runtime makes it with its first container.
                waiting = f"no container yet: waits for a runtime's state below {states}"
        watched = ", ".join(f"{root.path} ({plural(len(root.containers), 'container')})" for root in existing)
        detail = problem or waiting or watched
        if stats is not None:
            known = self._evidence
            # `map` and `Counter` loop in C: a node has hundreds of containers.
            signals = Counter(map(known.get, containers))
            unsignalled = [c for c in containers if known.get(c, RuntimeEvent.ABSENT) is RuntimeEvent.ABSENT]
            without = sorted(c for c in unsignalled if not self.awaits(c))
            signals[RuntimeEvent.ABSENT] = len(without)
            counts = [f"{which} {signals[which]}" for which in RuntimeEvent if signals[which]]
            detail = "; ".join([detail, *([f"containers by signal: {', '.join(counts)}"] if counts else [])])
            if sandboxed:
                detail = f"{detail}; kata or gVisor pods, set as a whole: {sandboxed}"
            if without:
                more = f" and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
                shown = ", ".join(container[:_ID_SHOWN] for container in without[:_SHOWN])
                detail = f"{detail}; without a signal, verified until their values stay: {shown}{more}"
                problem = problem or detail
        age = None if self._seen_at is None else time.monotonic() - self._seen_at
        return SourceStatus(name=_NAME, ok=problem is None, age_s=age, detail=detail)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Reports its start when every existing container has been reported (as FOUND)."""
        try:
            with DirWatcher[_WatchedDirectory](_NAME, self._unread_events) as watcher:
                self._watcher = watcher
                known = self._roots
                self._roots = {}
                self._evidence.clear()
                self._silent_at.clear()
                self._began.clear()
                for paths, expects in (
                    (self._dirs.states, _STATES),
                    (self._dirs.bundles, _BUNDLES),
                ):
                    for path in paths:
                        # /run always exists: of a directory below it nothing above is watched.
                        inside = path.startswith(f"{self._base}/")
                        self._roots[path] = _RuntimeRoot(path, expects, watcher, self._base if inside else self._root)
                self._resync(watcher, again=True)
                self._report_removed(known)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._list_periodically, watcher)
                    nursery.start_soon(self._end_silence)
                    task_status.started()
                    await self._follow(watcher, nursery)
        finally:
            self._watcher = None

    async def _follow(self, watcher: DirWatcher[_WatchedDirectory], nursery: trio.Nursery) -> None:
        settled = self._handler.settled
        while True:
            batch = await watcher.next_batch()
            at = time.monotonic()
            slow = False
            # The fast path, before anything else of the batch: every microsecond here delays the setting for the
            # container's first instruction.
            for directory, _, name, mask in batch:
                if mask & OPENED:
                    if directory is not None and name in _STATES:
                        self._on_opened(nursery, directory.container_id, at)
                    elif directory is not None and not name and directory.expects is _STATES:
                        # The directory itself was opened: see `announce_reading`.
                        self._read[directory.container_id] = at
                elif directory is not None and (which := directory.expects.get(name)) is not None:
                    self._fresh_until = at + _FRESH_S
                    settled(directory.container_id, at, which)
                    if name in _STATES:
                        self._on_replaced(directory.container_id, at)
                    self._note(directory.container_id, which)
                else:
                    slow = True
            self._seen_at = at
            if slow:
                # Those handled above change nothing there.
                for event in batch:
                    self._handle(watcher, event)
                if any(event.overflow for event in batch):
                    self._resync(watcher, again=True)

    def _on_opened(self, nursery: trio.Nursery, container_id: str, at: float) -> None:
        # A reader (the daemon, ``bypassctl``) has announced this one opening.
        if at - self._read.pop(container_id, -math.inf) < _READING_S:
            return
        # A command opens the file several times: it is one.
        if at - self._opened.get(container_id, -math.inf) < _UPDATE_S:
            return
        self._opened[container_id] = at
        if self._updates():
            # It may be one of the kubelet's updates: reported only where no replacement follows.
            nursery.start_soon(self._report_later, container_id, at)
        else:
            # At once, and taken back if it was an update: the command's process may wait for CPU time already.
            self._handler.commanded(container_id, at)

    def _on_replaced(self, container_id: str, at: float) -> None:
        opened = self._opened.pop(container_id, -math.inf)
        if at - opened < _UPDATE_S and not self._updates():
            self._handler.commanded(container_id, None)

    async def _report_later(self, container_id: str, at: float) -> None:
        await trio.sleep(_UPDATE_S)
        if self._opened.get(container_id) == at:
            self._handler.commanded(container_id, at)

    def _note(self, container_id: str, which: RuntimeEvent) -> None:
        """Keep the strongest evidence: that of the runtime's own file."""
        self._silent_at.pop(container_id, None)
        self._began.pop(container_id, None)
        before = self._evidence.get(container_id)
        if before is None or before not in _STATES.values():
            self._evidence[container_id] = which

    async def _end_silence(self) -> None:
        """Report the containers for which no event came in time. Sleeps while none is awaited."""
        while True:
            now = trio.current_time()
            for name in [name for name, at in self._silent_at.items() if at <= now]:
                # Its event is still to come, or to be read. In a burst of pods creations last longer than `_SILENT_S`:
                # while there is the FIFO that runc and crun make first, and not yet their record, it is awaited.
                if now - self._began[name] < _LONGEST_S and self._begun(name):
                    self._silent_at[name] = now + _LONG_S
                    self._handler.unfinished(name)
                    continue
                if now < self._began[name] + _SILENT_S:
                    self._silent_at[name] = self._began[name] + _SILENT_S
                    continue
                # From now on its values are verified after growing delays: its runtime may still overwrite them.
                del self._silent_at[name]
                self._evidence[name] = RuntimeEvent.ABSENT
                self._handler.settled(name, time.monotonic(), RuntimeEvent.ABSENT)
            await self._silence.wait_until(min(self._silent_at.values(), default=math.inf))

    async def _list_periodically(self, watcher: DirWatcher[_WatchedDirectory]) -> None:
        """The safety net. A task of its own, so that the reader's wait needs no deadline."""
        while True:
            await trio.sleep(self._resync_s)
            self.repaired += self._resync(watcher, again=False)

    def _handle(self, watcher: DirWatcher[_WatchedDirectory], event: DirEvent[_WatchedDirectory]) -> None:
        directory = event.token
        if directory is None:
            return
        if directory.container_id:
            if event.rescan:
                self._check(event.path, directory)
            return
        for root in self._roots.values():
            if root.ancestors.leads_on(event):
                if event.mask & VANISHED:
                    root.ancestors.cut(event)
                self._open(watcher, root, again=False)
        runtime_root = self._roots.get(event.path)
        if runtime_root is None:
            return
        if event.rescan or event.ended:
            self._open(watcher, runtime_root, again=False)
        elif event.is_dir and event.mask & VANISHED:
            self._vanished(watcher, runtime_root, event.name)
        elif event.is_dir:
            self._appeared(watcher, runtime_root, event.name, found=False)

    def _resync(self, watcher: DirWatcher[_WatchedDirectory], *, again: bool) -> int:
        """Watch and list everything; ``again``: report the known containers, too. Returns how many had been missed."""
        self._unread = None
        missed = sum(self._open(watcher, root, again=again) for root in self._roots.values())
        self._seen_at = time.monotonic()
        return missed

    def _open(self, watcher: DirWatcher[_WatchedDirectory], root: _RuntimeRoot, *, again: bool) -> int:
        """Watch the existing part of one root, then list it; how many containers appeared or vanished unnoticed."""
        root.exists = root.ancestors.extend() and watcher.add(root.path, CHILDREN, root.token)
        try:
            listed = self._list(root.path) if root.exists else set()
        except SourceError as exc:
            # Unknown is not empty: no container is reported as removed.
            self._unread = str(exc)
            return 0
        missing = root.containers.keys() - listed
        new = listed - root.containers.keys()
        for name in missing:
            self._vanished(watcher, root, name)
        for name in listed if again else new:
            self._appeared(watcher, root, name, found=True)
        return len(missing) + len(new)

    def _list(self, path: str) -> set[str]:
        try:
            with os.scandir(path) as entries:
                return {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            return set()
        except OSError as exc:
            raise SourceError(_NAME, f"cannot list {path}: {errno_name(exc.errno)}") from exc

    def _appeared(self, watcher: DirWatcher[_WatchedDirectory], root: _RuntimeRoot, name: str, *, found: bool) -> None:
        path = f"{root.path}/{name}"
        # A root may be inside another one: its name is not a container's.
        if path in self._roots or any(path in other.ancestors for other in self._roots.values()):
            return
        if not found:
            self._fresh_until = time.monotonic() + _FRESH_S
        directory = _WatchedDirectory(name, root.expects)
        if not watcher.add(path, _RENAMES, directory):
            return
        root.containers[name] = directory
        # List after watch: the rename may have been before.
        for file, which in root.expects.items():
            if os.path.exists(f"{path}/{file}"):
                self._note(name, which)
                self._handler.settled(name, time.monotonic(), RuntimeEvent.FOUND if found else which)
                return
        # A bundle may wait for its runtime so long that nothing was expected any more.
        begins = root.expects is _STATES and self.evidence(name) is RuntimeEvent.ABSENT
        if name not in self._silent_at and (begins or name not in self._evidence):
            self._evidence.pop(name, None)
            self._began[name] = now = trio.current_time()
            self._silent_at[name] = now + _LONG_S
            self._silence.set()

    def _vanished(self, watcher: DirWatcher[_WatchedDirectory], root: _RuntimeRoot, name: str) -> None:
        if root.containers.pop(name, None) is not None:
            watcher.remove(f"{root.path}/{name}")
            if not self._watches(name):
                self._opened.pop(name, None)
                self._read.pop(name, None)
                self._evidence.pop(name, None)
                self._silent_at.pop(name, None)
                self._began.pop(name, None)
                self._handler.gone(name)

    def _report_removed(self, before: dict[str, _RuntimeRoot]) -> None:
        """After a restart of the source: report containers that were removed meanwhile."""
        for name in {name for root in before.values() for name in root.containers}:
            if not self._watches(name):
                self._handler.gone(name)

    def _check(self, path: str, directory: _WatchedDirectory) -> None:
        """A polled directory: report when its file differs from the last reading."""
        for file, which in directory.expects.items():
            try:
                stat = os.stat(f"{path}/{file}")
            except OSError:
                continue
            seen = (stat.st_ino, stat.st_mtime_ns)
            if seen != directory.seen:
                directory.seen = seen
                self._note(directory.container_id, which)
                self._handler.settled(directory.container_id, time.monotonic(), RuntimeEvent.FOUND)
            return
