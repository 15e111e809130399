"""Groups in a private cgroup2 hierarchy for the pods of a pure v1 node, so that their pressure is counted. Opt-in.

A thread makes them and moves the pods' processes into them.

**Cost**: for the node, the kernel stops all forks and exits for 8-20 ms at the first attach after a while; for the
pods, one more level of accounting at each task switch.
"""

import math
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, final

import trio

from cgroupfs.errors import CgroupError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.private import PrivateTree, private_tree
from reconciler.runtime.format import duration
from reconciler.runtime.stints import in_worker
from reconciler.signals.background_job import BackgroundJob
from reconciler.signals.processes import PodProcesses
from state.entry import RestoreOutcome, RestoreResult
from state.model import Pod

FILE: Final = "cgroup2 group"
"""Used in place of a file's name in the report of a restore."""
_EVERY_S: Final = 5.0
"""Processes are moved again: children start in their parent's group, but what the runtime starts in a container later
(``exec``) starts in the root.
"""
_SOON_S: Final = 1.0
"""After a pod or a container was added or removed."""
_FAILED_S: Final = 60.0
_AT_ONCE_S: Final = 2.0
"""A job ends after this long; the next one continues."""
_HANGS_S: Final = 30.0
"""A job that takes longer is reported."""
_SETTLE_S: Final = 5.0
"""At the end a job is awaited for so long, and the removal of the groups for `_CLEAR_S`."""
_CLEAR_S: Final = 10.0


class _AttachOutcome(NamedTuple):
    directories: Mapping[str, str]
    problem: str | None
    more: bool = False
    failed: bool = False
    """The problem is of all pods, not of one whose processes another program has placed."""


@final
class PrivateGroups:
    """`psi.PressureGroups` on a `PrivateTree`. ``wanted`` False: only remove what an earlier run has left."""

    def __init__(self, tree: PrivateTree, processes: PodProcesses, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._stuck: dict[str, set[int]] = {}
        self._tree = tree
        self._processes = processes
        self._job = BackgroundJob[_AttachOutcome]("private-cgroup2")
        self._directories: Mapping[str, str] = {}
        self._known: Mapping[str, tuple[str, ...]] = {}
        self._next_at = 0.0
        self._problem: str | None = None
        self._failed = False

    def directory(self, uid: str) -> str | None:
        return self._directories.get(uid)

    @property
    def problem(self) -> str | None:
        if self._job.busy_s() > _HANGS_S:
            return f"moving processes into a private cgroup2 group takes {duration(self._job.busy_s())} so far"
        return self._problem

    def update(self, pods: Mapping[str, Pod], now: float) -> None:
        try:
            outcome = self._job.take()
        except OSError as exc:
            self._problem, self._failed, self._next_at = f"private cgroup2 groups: {exc}", True, now + _FAILED_S
            return
        if outcome is not None:
            self._directories, self._problem, self._failed = outcome.directories, outcome.problem, outcome.failed
            # Nothing is left of an earlier run: once is enough.
            done_s = _EVERY_S if self._wanted else math.inf
            self._next_at = now + (0.0 if outcome.more else _FAILED_S if outcome.failed else done_s)
        texts = {uid: tuple(container.id for container in pod.containers) for uid, pod in pods.items()}
        if texts != self._known and self._wanted and not self._failed:
            self._next_at = min(self._next_at, now + _SOON_S)
        self._known = texts
        if now < self._next_at:
            return
        if not self._wanted:
            self._next_at = math.inf
            self._job.start(self._clear_once)
            return
        paths = {uid: pod.group.path for uid, pod in pods.items()}
        if self._job.start(lambda: self._work(paths)):
            self._next_at = now + _EVERY_S

    def _work(self, paths: Mapping[str, str]) -> _AttachOutcome:
        """In the thread: make, fill and remove."""
        until = time.monotonic() + _AT_ONCE_S
        directories: dict[str, str] = {}
        problem, more = None, False
        try:
            self._tree.open()
            for uid in self._tree.uids() - paths.keys():
                self._tree.remove(uid)
            self._stuck = {uid: pids for uid, pids in self._stuck.items() if uid in paths}
            for uid, path in paths.items():
                if time.monotonic() > until:
                    more = True
                    break
                foreign = self._fill(uid, path)
                if foreign:
                    problem = (
                        f"processes of pods are in {foreign} of the cgroup2 hierarchy, which another program manages"
                    )
                elif foreign is None:
                    # Valid only now that all of the pod's processes are in.
                    directories[uid] = self._tree.directory(uid)
        except CgroupError as exc:
            # What was made is good; the rest of the pods is not known.
            return _AttachOutcome(directories, f"private cgroup2 groups: {exc}", failed=True)
        return _AttachOutcome(directories, problem, more=more)

    def _fill(self, uid: str, path: str) -> str | None:
        """None: all of the pod's processes are in its group; empty: it has none; else where one is instead."""
        listed = set(self._processes.of_group(path)) - {0}
        if not listed:
            return ""
        missing = listed - self._tree.pids(uid)
        # A process that has ended and waits for its parent is listed by v1, and moves nowhere.
        stuck = self._stuck.get(uid, set()) & missing
        # No attach without need: it may stop all forks and exits of the node.
        if missing == stuck:
            return None
        attached = self._tree.attach(uid, missing - stuck, path)
        self._stuck[uid] = missing - self._tree.pids(uid) if attached.foreign is None else stuck
        return attached.foreign

    async def aclose(self) -> None:
        """Put everything back; what cannot be is found again by `restore` and by the next start."""
        with trio.CancelScope(shield=True):
            if not await self._job.wait_idle(_SETTLE_S):
                return
            with trio.move_on_after(_CLEAR_S):
                await in_worker(self._clear, abandon_on_cancel=True)

    def _clear_once(self) -> _AttachOutcome:
        self._problem = None
        self._clear()
        return _AttachOutcome({}, self._problem, failed=self._problem is not None)

    def _clear(self) -> None:
        try:
            if self._tree.traces():
                self._tree.open()
                self._tree.clear()
        except CgroupError as exc:
            self._problem = str(exc)


def restore_groups(hierarchy: Hierarchy, only: str | None = None) -> list[RestoreResult]:
    """Remove every private group (``only``: one pod's) while no daemon runs; one line for each."""
    tree = private_tree(hierarchy)
    if tree is None or not tree.traces():
        return []
    try:
        tree.open()
        done = tree.clear(only)
    except CgroupError as exc:
        return [RestoreResult(path=tree.root, file=FILE, undo=RestoreOutcome.REFUSED, detail=str(exc))]
    return [
        RestoreResult(
            path=tree.directory(uid),
            file=FILE,
            undo=RestoreOutcome.RESTORED if error is None else RestoreOutcome.REFUSED,
            detail="" if error is None else str(error),
        )
        for uid, error in done.items()
    ]
