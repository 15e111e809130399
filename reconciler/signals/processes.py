"""The processes of each pod, as its groups list them.

Listed anew every few seconds, at once where a process has ended, a container has come or gone, or there was none yet:
a listing costs 10 µs a group, a process that nobody knows yet counts for nothing.
Source: kernel documentation, admin-guide/cgroup-v1/cgroups (cgroup.procs) and admin-guide/cgroup-v2 (threaded).
"""

import os
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from state.model import GroupRef, Pod

_EVERY_S: Final = 5.0
_DEEPEST: Final = 8
OUTSIDE: Final = "its processes are outside of this PID namespace: bypassd needs the host's (hostPID)"


class _Listed(NamedTuple):
    groups: tuple[GroupRef, ...]
    pids: tuple[int, ...]
    again_at: float


@final
class PodProcesses:
    """See the module's text. One for all readers that need processes."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps = REAL) -> None:
        self._hierarchy = hierarchy
        self._files = files
        self._listed: dict[str, _Listed] = {}
        self.outside = False
        """Some process was listed as 0: it cannot be named from here."""

    def of(self, pod: Pod, now: float) -> tuple[int, ...]:
        """The pids of all its processes, nested groups included, in no order; empty when it has none or is gone."""
        groups = (pod.group, *(container.group for container in pod.containers))
        known = self._listed.get(pod.uid)
        if known is not None and known.pids and known.groups == groups and now < known.again_at:
            return known.pids
        pids = tuple(dict.fromkeys(self._below(self._hierarchy.trigger_directory(pod.group.path), 0)))
        # Not all in one pass: a fifth of the pods each second.
        again_at = now + _EVERY_S * (0.8 + 0.4 * (hash(pod.uid) % 1000) / 1000)
        self._listed[pod.uid] = _Listed(groups, pids, again_at)
        return pids

    def of_group(self, path: str) -> tuple[int, ...]:
        """The pids of one group and all below it, listed now."""
        return tuple(dict.fromkeys(self._below(self._hierarchy.trigger_directory(path), 0)))

    def ended(self, uid: str) -> None:
        """A process of this pod is no more: list it anew when asked next."""
        if (known := self._listed.get(uid)) is not None:
            self._listed[uid] = known._replace(again_at=0.0)

    def keep(self, uids: Collection[str]) -> None:
        """Forget all other pods."""
        for uid in self._listed.keys() - set(uids):
            del self._listed[uid]

    def _below(self, directory: str, depth: int) -> Iterator[int]:
        try:
            text = self._files.read(directory, "cgroup.procs")
        except OSError:
            # Gone, or a threaded group of v2, whose processes are listed above it.
            text = ""
        for word in text.split():
            if word == "0":
                self.outside = True
            else:
                yield int(word)
        try:
            # Two links are its name and its own dot: nothing below. Asking is a tenth of listing.
            inner = [] if depth >= _DEEPEST or os.stat(directory).st_nlink == 2 else self._files.groups(directory)
        except OSError:
            return
        for name in inner:
            yield from self._below(f"{directory}/{name}", depth + 1)
