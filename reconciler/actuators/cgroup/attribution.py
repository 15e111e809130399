"""Who wrote the files that we manage: remembers each file's last foreign writer, and marks its group dirty.

With fanotify every write on the node's hierarchies is seen with its process; without it, the directories that hold a
file of ours are watched and the writer stays unknown.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final, final

import trio

from cgroupfs.attribution import ObservedWrite, WriteWatch, watch_writes
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from reconciler.runtime.workqueue import NODE, DirtyKeys, pod_key
from state.model import SourceStatus

_LOG: Final = logging.getLogger(__name__)
_KEPT: Final = 10_000


@final
class WriteAttribution:
    """See the module's text. `last_writer` is what the actuator asks."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        dirty: DirtyKeys,
        *,
        kubepods: str,
        owner: Callable[[str], str | None],
        ours: Callable[[str], bool],
        watch: Callable[..., WriteWatch] = watch_writes,
    ) -> None:
        """``owner``: the pod uid of a group path (None: a directory above the pods). ``ours``: do we manage a group."""
        self._hierarchy = hierarchy
        self._dirty = dirty
        self._kubepods = kubepods
        self._owner = owner
        self._ours = ours
        self._make = watch
        self._watch: WriteWatch | None = None
        self._seen: dict[tuple[str, str], tuple[str, str]] = {}
        self._followed: set[str] = set()
        self.writes = 0
        self.lost = 0

    def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
        """(kind, process) of the last foreign write of one file; None when none was seen.

        What the kernel has told and this task has not yet read counts: a value may be read before its writer is.
        """
        if self._watch is not None:
            self._take(self._watch.take())
        return self._seen.get((directory, file))

    def follow(self, path: str) -> None:
        """Files of this group are ours from now on."""
        if path not in self._followed:
            self._followed.add(path)
            if self._watch is not None:
                self._each(path, self._watch.follow)

    def forget(self, path: str) -> None:
        """The group is gone."""
        if path in self._followed:
            self._followed.discard(path)
            if self._watch is not None:
                self._each(path, self._watch.forget)
        for mount in self._hierarchy.mounts():
            directory = mount.path(path)
            for file in _FILES:
                self._seen.pop((directory, file), None)

    def status(self) -> SourceStatus:
        """Whether writers are named here."""
        problem = "not running" if self._watch is None else self._watch.problem
        return SourceStatus(
            name="write attribution",
            ok=problem is None,
            age_s=0.0,
            detail=problem or "fanotify identifies every writer",
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        directories = [mount.directory for mount in self._hierarchy.mounts()]
        watch = self._watch = self._make(directories, files=_FILES, below=self._kubepods)
        try:
            for path in self._followed:
                self._each(path, watch.follow)
            task_status.started()
            while True:
                self._take(await watch.next_batch())
        finally:
            self._watch = None
            watch.close()

    def _take(self, batch: Iterable[ObservedWrite]) -> None:
        for write in batch:
            self.writes += 1
            if write.lost:
                self.lost += 1
                self._dirty.mark_all("lost writes")
            elif write.group and self._ours(write.group):
                if len(self._seen) > _KEPT:
                    self._seen.clear()
                directory = write.directory + write.group
                self._seen[directory, write.file] = (write.writer.kind.value, str(write.writer))
                uid = self._owner(write.group)
                self._dirty.mark(NODE if uid is None else pod_key(uid))

    def _each(self, path: str, call: Callable[[str, str], None]) -> None:
        for mount in self._hierarchy.mounts():
            call(mount.directory, path)


_FILES: Final = frozenset(form.file for knob in CATALOG.values() for form in knob.forms.values())
