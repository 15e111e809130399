"""The network namespace of each pod's processes, as open files. Synchronous; for a thread.

Nothing is read from inside a pod: no file there is trusted.

Source: network_namespaces(7), namespaces(7).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.signals.processes import PodProcesses
from state.model import ContainerKind, Phase, Pod

_TRIED: Final = 3
"""Processes of a group that are tried, if the first ones have exited meanwhile."""


class NetworkNamespace(NamedTuple):
    """One namespace: an inode that identifies it while a file of it is open, and that file."""

    inode: int
    file: int


class NetworkNamespaces(Protocol):
    """Namespaces by pod, in a ``with`` block, at the end of which all files are closed."""

    @property
    def own(self) -> int:
        """The inode of our own namespace, which contains our devices."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def of(self, pods: Iterable[Pod]) -> Mapping[str, NetworkNamespace]:
        """By pod uid; a pod without a process is missing."""


@final
class RealNetworkNamespaces:
    def __init__(self, hierarchy: Hierarchy, *, files: FileOps = REAL) -> None:
        self.own = 0
        self._processes = PodProcesses(hierarchy, files)
        self._open: list[int] = []

    def __enter__(self) -> Self:
        self.own = os.stat("/proc/thread-self/ns/net").st_ino
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open:
            os.close(file)
        self._open.clear()

    def of(self, pods: Iterable[Pod]) -> Mapping[str, NetworkNamespace]:
        namespaces = {}
        for pod in pods:
            space = next(self._spaces(pod), None)
            if space is not None:
                namespaces[pod.uid] = space
        return namespaces

    def _spaces(self, pod: Pod) -> Iterator[NetworkNamespace]:
        # Before runc has finished a container its process may not have entered the pod's namespace yet.
        settled = [container for container in pod.containers if container.phase is Phase.SETTLED]
        # The sandbox's process never changes its namespace; a container's may have entered one that is not its pod's.
        for item in sorted(settled, key=lambda container: container.kind is not ContainerKind.SANDBOX):
            for pid in islice(filter(None, self._processes.of_group(item.group.path)), _TRIED):
                try:
                    file = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    continue
                self._open.append(file)
                # The process id may have been reused before the namespace was opened.
                if pid in self._processes.of_group(item.group.path):
                    yield NetworkNamespace(os.fstat(file).st_ino, file)
