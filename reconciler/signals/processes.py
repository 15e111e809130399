"""The processes of each pod, as its groups list them.

Listed again every few seconds, at once where a process has ended, a container was added or removed, or there was none
yet. **Cost**: 10 µs a group and listing. Source: kernel documentation, admin-guide/cgroup-v1/cgroups (cgroup.procs) and
admin-guide/cgroup-v2 (threaded).
"""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Final, NamedTuple, final

from cgroupfs.bounded import digits
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.steps import groups_below
from state.model import ContainerKind, Pod

_EVERY_S: Final = 5.0
_DEEPEST: Final = 8
"""Levels of groups below a pod's that are listed in the event loop."""
_UNUSED_S: Final = 60.0
"""A listing that no reader has requested for so long after it became old is of a removed pod."""
_MOST_GROUPS: Final = 2_048
"""Groups below a pod's that are listed in the event loop, 20 ms: a tenant makes any number of them."""
_MOST_IN_THREAD: Final = 65_536
"""The same of one group, for callers that take a bounded number of its processes, or are in a thread."""
OUTSIDE: Final = "its processes are outside this PID namespace: bypassd needs the host's (hostPID)"


class _ProcessList(NamedTuple):
    """``outside``: some process was listed as 0: it cannot be named from here, or was just ending."""

    pod: Pod
    pids: tuple[int, ...]
    again_at: float
    outside: bool


@final
class PodProcesses:
    """The process ids of each pod. One for all readers that need processes."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps = REAL) -> None:
        self._hierarchy = hierarchy
        self._files = files
        self._listed: dict[str, _ProcessList] = {}
        self._drop_at = 0.0

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def outside(self) -> bool:
        """Whether a process of some pod was listed as 0 last."""
        return any(known.outside for known in self._listed.values())

    def get(self, pod: Pod, now: float) -> tuple[int, ...]:
        """The pids of its containers' processes, nested groups included, in no order; empty if there are none.

        A sandbox's process always sleeps; a pod that has nothing else has none. In kata the whole machine is there.
        """
        known = self._listed.get(pod.uid)
        if (
            known is not None
            and known.pids
            and now < known.again_at
            and (known.pod is pod or same_groups(known.pod, pod))
        ):
            return known.pids
        sandboxes = {
            container.group.path.rpartition("/")[2]
            for container in pod.containers
            if container.kind is ContainerKind.SANDBOX and pod.sandbox is None
        }
        top = self._hierarchy.trigger_directory(pod.group.path)
        # Each once: v1's lists may have duplicates, and a process may move from one group to another meanwhile.
        found = dict.fromkeys(self._below(top, sandboxes))
        pids = tuple(pid for pid in found if pid)
        # Not all in one pass: a fifth of the pods each second.
        again_at = now + _EVERY_S * (0.8 + 0.4 * (hash(pod.uid) % 1000) / 1000)
        self._listed[pod.uid] = _ProcessList(pod, pids, again_at, 0 in found)
        if now >= self._drop_at:
            self._drop_at = now + _UNUSED_S
            self._listed = {uid: known for uid, known in self._listed.items() if now - known.again_at < _UNUSED_S}
        return pids

    def of_group(self, path: str) -> Iterator[int]:
        """The pids of one group and all below it, as they are listed, each once; and a 0 for each group.

        A caller that takes so many of them has listed no more groups than that.
        """
        return self._each(path, "cgroup.procs")

    def threads_of_group(self, path: str) -> Iterator[int]:
        """The same of its threads."""
        return self._each(path, "tasks" if self._hierarchy.version(self._hierarchy.trigger) == 1 else "cgroup.threads")

    def _each(self, path: str, file: str) -> Iterator[int]:
        seen = {0}
        top = self._hierarchy.trigger_directory(path)
        for directory in chain((top,), groups_below(self._files.groups, top, _MOST_IN_THREAD)):
            for number in self._listed_in(directory, file):
                if number not in seen:
                    seen.add(number)
                    yield number
            yield 0

    def ended(self, uid: str) -> None:
        """A process of this pod has ended: list the pod again at the next request."""
        if (known := self._listed.get(uid)) is not None:
            self._listed[uid] = known._replace(again_at=0.0)

    def _below(self, top: str, without: Collection[str]) -> Iterator[int]:
        """Also 0, see `_ProcessList`."""
        deepest = top.count("/") + _DEEPEST

        def names(directory: str, left: int) -> list[str]:
            inside = self._files.groups(directory, left) if directory.count("/") < deepest else []
            return [name for name in inside if name not in without]

        for directory in chain((top,), groups_below(names, top, _MOST_GROUPS)):
            yield from self._listed_in(directory, "cgroup.procs")

    def _listed_in(self, directory: str, file: str) -> Iterator[int]:
        try:
            text = self._files.read(directory, file)
        except OSError:
            # Removed, or a threaded group of v2, whose processes are listed above it.
            return iter(())
        return (pid for word in text.split() if (pid := digits(word)) is not None)


def same_groups(pod: Pod, other: Pod) -> bool:
    """Whether two readings of a pod have the same directories."""
    return pod.group == other.group and [a.group for a in pod.containers] == [b.group for b in other.containers]
