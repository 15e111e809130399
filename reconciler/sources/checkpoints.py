"""The kubelet's checkpoint files as a source: watch their directories, read when a file is renamed into place.

The files are read in the loop (a few hundred bytes, rarely); `allocations` decides how far they are reliable. A new
``kubelet.sock`` of the device plug-ins means that a kubelet has started.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, final

import trio
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.log import get_log
from cgroupfs.watch import APPEARED, CHILDREN, VANISHED, AncestorWatch, DirEvent, DirWatcher
from reconciler.placement.devices import affinity_of, read_pci_nodes, unplaced_addresses
from reconciler.pods.resize import Granted, granted
from reconciler.runtime.cooperative import PacedWork
from reconciler.runtime.wakeup import WakeUp
from reconciler.runtime.workqueue import NODE
from reconciler.sources.allocations import Allocations
from reconciler.sources.reassertion import RECONCILE_S, Reassertion
from state.checkpoint import CheckpointError, CheckpointFault, read_checkpoint
from state.kubelet import (
    ACTUATED_PODS,
    ALLOCATED_PODS,
    CPU_STATE,
    DEVICE_PLUGINS,
    DEVICES,
    KUBELET_ROOT,
    MEMORY_STATE,
    POD_STATUS,
    AllocationState,
    CpuManagerState,
    DeviceState,
    MemoryManagerState,
    parse_allocations,
    parse_cpu_manager_state,
    parse_devices,
    parse_memory_manager_state,
)
from state.model import KubeletView, Pod, SourceStatus

_NAME: Final = "kubelet checkpoints"
_LOG: Final = get_log("checkpoints")
_SOCKET: Final = "kubelet.sock"
_RESIZE_FILES: Final = (ALLOCATED_PODS, ACTUATED_PODS, POD_STATUS)
_DEVICES: Final = os.path.basename(DEVICES)
_FILES: Final = frozenset({CPU_STATE, MEMORY_STATE, _DEVICES, *_RESIZE_FILES})
_RESYNC_S: Final = 60.0
_RETRY_S: Final = 1.0
_RESTART_GAP_S: Final = 2.0
"""Starts of the kubelet count this often at most: pods of device plug-ins can make its socket, too."""
_T = TypeVar("_T")


class DirtyMarker(Protocol):
    """Takes the dirty marks; `reconciler.runtime.workqueue.DirtyKeys` is one."""

    def mark(self, key: str, /) -> None: ...

    def mark_all(self, why: str, /) -> None: ...


@final
class CheckpointSource:
    """Reads the checkpoints when they change, and publishes the kubelet's allocations.

    Before and without `run` the files are read once by the constructor, so that a one-shot command has them.
    ``allocations`` and ``reassertion`` are public: the loop passes the runtime's updates to the latter.
    """

    def __init__(
        self,
        marks: DirtyMarker,
        *,
        root: str = "/",
        kubelet_root: str = KUBELET_ROOT,
        reconcile_s: float = RECONCILE_S,
        on_restart: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``reconcile_s``: the period of the kubelet's CPU manager. ``on_restart``: its socket shows a new kubelet.

        ``clock``: monotonic seconds.
        """
        self.allocations = Allocations()
        self.reassertion = Reassertion(reconcile_s)
        self._reasserts = False
        self._on_restart = on_restart
        self.cpus: CpuManagerState | CheckpointError | None = None
        self.memory: MemoryManagerState | CheckpointError | None = None
        self.devices: DeviceState | CheckpointError | None = None
        self.resizes: dict[str, AllocationState | CheckpointError] = {}
        """The checkpoints as last read: the state, or why it is unusable; those of in-place resizing by file name."""
        self._outcomes: dict[str, tuple[object, Any]] = {}
        """By path: the version of the file that was read last, and what was in it."""
        self._faults: dict[str, str] = {}
        self._granted: Granted = {}
        self._affinity: Mapping[str, Mapping[str, CpuSet]] = {}
        self._marks = marks
        self._base = os.path.abspath(root)
        self._directory = os.path.join(self._base, kubelet_root.strip("/"))
        # Fixed: the socket and the devices' checkpoint are here, whatever the kubelet's root directory.
        self._plugins = os.path.join(self._base, DEVICE_PLUGINS.strip("/"))
        self._clock = clock
        self._read_at: float | None = None
        self._socket: tuple[int, float] | None = self._find_socket()
        self._wake = WakeUp()
        self.read_all()

    def read_all(self) -> None:
        for name in _FILES:
            self._read(name)

    def view(
        self,
        pods: Mapping[str, Pod] | None,
        *,
        reserved: CpuSet = EMPTY,
        strict_reserved: bool = False,
        listed: Collection[str] | None = None,
    ) -> KubeletView:
        """The allocations in force now; ``pods`` are those with a cgroup, None while that is not known.

        ``listed``: the uids in the kubelet's own list, None while it does not respond.

        When the result changes by time only, ``node`` is marked then (while `run` runs).
        """
        now = self._clock()
        kubelet_view = self.allocations.view(
            pods,
            now,
            reserved=reserved,
            strict_reserved=strict_reserved,
            reasserts_s=self._reasserts_s(now),
            listed=listed,
        )
        self._wake.set()
        return replace(kubelet_view, granted=self._granted, affinity=self._affinity, may_resize=self._may_resize())

    def _may_resize(self) -> bool:
        """Whether the kubelet can resize pods in place, by its checkpoints; True while that is not known."""
        # Every kubelet writes this one: without it the checkpoints are of none, or not readable.
        if isinstance(self.cpus, CheckpointError) and self.cpus.fault in {
            CheckpointFault.MISSING,
            CheckpointFault.UNREADABLE,
        }:
            return True
        # A kubelet with the feature (from 1.27 on, by default from 1.33 on) writes its checkpoint of admitted resources
        # when it starts, one without it never does. So no version is needed.
        return not all(map(_is_missing, self.resizes.values()))

    def restarted(self) -> None:
        """A kubelet has started: what it forgot or rewrites now is due to that."""
        self.allocations.restarted(self._clock())
        self.reassertion.restarted()
        self._marks.mark_all("kubelet restarted")

    def _reasserts_s(self, now: float) -> float | None:
        """The kubelet's rhythm; a change is logged, as settings are given up for it."""
        period_s = self.reassertion.period(now)
        if (period_s is not None) != self._reasserts:
            self._reasserts = period_s is not None
            if period_s is not None:
                _LOG.warning(
                    "the kubelet rewrites every container periodically: settings that it would undo are given up",
                    period_s=round(period_s, 2),
                )
            else:
                _LOG.info("the kubelet no longer rewrites every container periodically: all settings apply again")
        return period_s

    def status(self) -> SourceStatus:
        """Whether the files are good; those that not every kubelet has count only if they exist."""
        age = None if self._read_at is None else self._clock() - self._read_at
        faults = [str(self.cpus)] if isinstance(self.cpus, CheckpointError) else []
        faults += [fault for _, fault in sorted(self._faults.items()) if fault]
        return SourceStatus(name=_NAME, ok=not faults, age_s=age, detail="; ".join(faults) or self._directory)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Started when the directory is watched as far as it exists, and was read after that."""
        with DirWatcher[str](_NAME) as watcher:
            # The tokens: "" for the directories above, else the directory itself.
            watches = [AncestorWatch(watcher, self._base, path, "") for path in (self._directory, self._plugins)]
            self._watch(watcher, watches)
            self.read_all()
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._mark_when_due)
                await self._follow(watcher, watches)

    async def _follow(self, watcher: DirWatcher[str], watches: Sequence[AncestorWatch[str]]) -> None:
        deadline = trio.current_time() + _RESYNC_S
        wait_s = _RETRY_S
        restarted, counts_from, pace = False, -math.inf, PacedWork()
        while True:
            batch: Sequence[DirEvent[str]] = ()
            if self._unreadable():
                # No event reports when the kernel lets it be read again.
                deadline = min(deadline, trio.current_time() + wait_s)
                wait_s = min(2 * wait_s, _RESYNC_S)
            else:
                wait_s = _RETRY_S
            if restarted:
                # A start that followed another one too soon is reported then.
                deadline = min(deadline, counts_from)
            with trio.move_on_at(deadline):
                batch = await watcher.next_batch()
            # A pod of a device plug-in can make files there as often as it likes.
            with pace.measured():
                appeared = self._read_changed(watcher, watches, batch)
            restarted = restarted or appeared
            if not batch:
                deadline = trio.current_time() + _RESYNC_S
            if restarted and trio.current_time() >= counts_from:
                restarted, counts_from = False, trio.current_time() + _RESTART_GAP_S
                self.restarted()
                self._on_restart()
            await pace.rest()

    def _read_changed(
        self, watcher: DirWatcher[str], watches: Sequence[AncestorWatch[str]], batch: Sequence[DirEvent[str]]
    ) -> bool:
        """Read what changed, everything when there was no event; whether a kubelet has started."""
        # The kubelet renames ``.<digits>`` to the name, so the file is whole. A deleted one is read, too, to report it:
        # operators delete it to change the policy.
        # By name only: one of the two directories may be a symbolic link to the other, or to what leads to it.
        changed = {event.name for event in batch if event.mask & (APPEARED | VANISHED) and event.name in _FILES}
        restarted = any(event.name == _SOCKET and event.mask & APPEARED for event in batch)
        lost = not batch or any(event.overflow or event.rescan or event.ended for event in batch)
        for event in batch:
            for ancestors in watches:
                if ancestors.leads_on(event):
                    if event.mask & VANISHED:
                        ancestors.cut(event)
                    lost = True
        if lost:
            self._watch(watcher, watches)
            changed |= _FILES
            # A start whose event was lost.
            socket = self._find_socket()
            restarted = restarted or (socket is not None and socket != self._socket)
        if restarted:
            self._socket = self._find_socket()
        news = [self._read(name) for name in sorted(changed)]
        if any(news):
            self._marks.mark(NODE)
        return restarted

    def _unreadable(self) -> bool:
        """Whether the kernel would not let one of the files be read: not its content is at fault."""
        items = (self.cpus, self.memory, self.devices, *self.resizes.values())
        return any(isinstance(item, CheckpointError) and item.fault is CheckpointFault.UNREADABLE for item in items)

    def _watch(self, watcher: DirWatcher[str], watches: Sequence[AncestorWatch[str]]) -> None:
        """Watch what exists of both directories and of those above. They may be the same, or one in the other."""
        for ancestors in watches:
            if ancestors.extend():
                watcher.add(ancestors.target, CHILDREN, ancestors.target)

    async def _mark_when_due(self) -> None:
        """Mark the node when a waiting time of the allocations is over: no event does."""
        while True:
            due = min(filter(None, (self.allocations.recheck_at, self.reassertion.ends_at)), default=None)
            # A view was made meanwhile: it may have set another time.
            if await self._wake.wait(math.inf if due is None else max(0.01, due - self._clock())):
                continue
            self._marks.mark(NODE)
            # The next view sets another time; without one there is nothing to wait for.
            await self._wake.wait()

    def _read(self, name: str) -> bool:
        """Read one file; True when that is news to the planner."""
        now = self._clock()
        if name == CPU_STATE:
            return self._read_cpus(os.path.join(self._directory, name), now)
        if name == MEMORY_STATE:
            memory = self._outcome(os.path.join(self._directory, name), parse_memory_manager_state)
            self._note(name, memory)
            news, self.memory = _differ(memory, self.memory), memory
            if news:
                self._affinity = self._find_affinity()
        elif name in _RESIZE_FILES:
            news = self._read_resizes(name)
        else:
            devices = self._outcome(os.path.join(self._plugins, _DEVICES), parse_devices)
            self._note(name, devices)
            news, self.devices = _differ(devices, self.devices), devices
            if news:
                self._affinity = self._find_affinity()
        return news

    def _outcome(self, path: str, parse: Callable[[bytes, str], _T]) -> _T | CheckpointError:
        """What a file holds, or why it is unusable. One that is the same as last time is not read again."""
        # Before it is read: a file that replaces it meanwhile is another one at the next time.
        version = _version(path)
        result: _T | CheckpointError
        known, result = self._outcomes.get(path, (None, None))
        if version is not None and version == known:
            return result
        try:
            result = read_checkpoint(path, parse)
        except CheckpointError as exc:
            result = exc
            if exc.fault is CheckpointFault.UNREADABLE:
                # It may become readable without a change.
                version = None
        self._outcomes[path] = version, result
        return result

    def _read_resizes(self, name: str) -> bool:
        """One of the files of in-place resizing. A good reading outlasts a bad one, but not the file."""
        result, before = self._outcome(os.path.join(self._directory, name), parse_allocations), self.resizes.get(name)
        worse = self._note(name, result)
        if self._faults[name] and isinstance(before, AllocationState):
            return worse
        self.resizes[name] = result
        if news := _differ(result, before):
            self._granted = self._grant()
        return worse or news

    def _note(self, name: str, result: object) -> bool:
        """Remember what is wrong with a file, and log it once; whether that is news. A missing one is not wrong."""
        fault = (
            str(result) if isinstance(result, CheckpointError) and result.fault is not CheckpointFault.MISSING else ""
        )
        news, self._faults[name] = fault != self._faults.get(name, ""), fault
        if fault and news:
            _LOG.warning("a checkpoint cannot be used", error=str(result))
        return news

    def _grant(self) -> Granted:
        """What the kubelet has admitted; where there is a file of 1.33 and later, only that counts."""
        now = self.resizes.get(ALLOCATED_PODS)
        if _is_missing(now):
            now = self.resizes.get(POD_STATUS)
        return granted(now, self.resizes.get(ACTUATED_PODS))

    def _find_affinity(self) -> Mapping[str, Mapping[str, CpuSet]]:
        """Where memory and devices are that the kubelet has given out; of files that are no use, nothing is known."""
        memory = self.memory if isinstance(self.memory, MemoryManagerState) else None
        devices = self.devices if isinstance(self.devices, DeviceState) else None
        unplaced = unplaced_addresses(devices) if devices is not None else frozenset()
        return affinity_of(memory, devices, read_pci_nodes(unplaced, self._base))

    def _read_cpus(self, path: str, now: float) -> bool:
        result = self._outcome(path, parse_cpu_manager_state)
        news = _differ(result, self.cpus)
        # Also where it is missing: every kubelet writes this one.
        if news and isinstance(result, CheckpointError):
            _LOG.warning("a checkpoint cannot be used", error=str(result))
        elif isinstance(self.cpus, CheckpointError) and not isinstance(result, CheckpointError):
            _LOG.info("checkpoint readable again", path=path)
        self.cpus, self._read_at = result, now
        self.allocations.read(result, now)
        return news

    def _find_socket(self) -> tuple[int, float] | None:
        """Identity of a kubelet's socket; None while there is none."""
        try:
            # lstat: pods of device plug-ins write in the directory, and may make a link.
            status = os.lstat(os.path.join(self._plugins, _SOCKET))
        except OSError:
            return None
        return status.st_ino, status.st_ctime


def _version(path: str) -> object:
    """Changes when the file does; None while there is none."""
    try:
        # The kubelet replaces its files: each is another inode.
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_missing(result: object) -> bool:
    return isinstance(result, CheckpointError) and result.fault is CheckpointFault.MISSING


def _differ(now: object, before: object) -> bool:
    """Errors compare by their text: the same fault again is nothing new."""
    return str(now) != str(before) if isinstance(now, CheckpointError) else now != before
