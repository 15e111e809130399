"""The interface of a signal reader: it measures some signals of the given subjects, once each sample interval.

A reader probes this kernel and machine, gives a reason for each signal that is unavailable, and leaves out what it
cannot measure. It reads control files in the loop, a millisecond at a time (`reconciler.runtime.cooperative`); anything
slower runs in a thread or a task of its own. Its state is keyed by inode or start time, as paths are used again, and
dropped for removed subjects.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar, final, runtime_checkable

import trio
from msgspec import Struct

from cgroupfs.files import REAL, FileOps, ReadOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.kept import FdCache
from reconciler.signals.probe_config import Probe
from reconciler.signals.vmstat import VmStat
from state.cache import CacheUsage
from state.evidence import Sample
from state.memory import MemoryPlan
from state.model import NodeView, Pools

if TYPE_CHECKING:
    from reconciler.signals.processes import PodProcesses


_R = TypeVar("_R", bound="BaseReader")


class SampleContext(Struct, frozen=True, kw_only=True):
    """The subjects to measure. ``wanted``: the signals in use; others need not be read.

    ``memory``: the bounds of BE's memory.
    """

    view: NodeView
    pools: Pools | None
    wanted: Collection[str]
    memory: MemoryPlan = MemoryPlan()


@final
class SampleSheet:
    """The samples of one frame while it is being filled, by subject and signal."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, Sample]] = {}

    def put(self, subject: str, signal: str, value: float, *, age_s: float = 0.0, confidence: float = 1.0) -> None:
        """Enter one. Of two of the same signal, the one with more confidence remains."""
        samples = self.samples.setdefault(subject, {})
        known = samples.get(signal)
        if known is None or confidence > known.confidence:
            samples[signal] = Sample(value, age_s, confidence)

    def enter(self, subject: str, values: Mapping[str, float | None], confidence: float = 1.0) -> None:
        """Enter several of one confidence, measured now; None: not known."""
        samples = self.samples.setdefault(subject, {})
        for signal, value in values.items():
            if value is not None and ((known := samples.get(signal)) is None or known.confidence < confidence):
                samples[signal] = Sample(value, 0.0, confidence)

    def merge(self, subject: str, samples: Mapping[str, Sample]) -> None:
        """Enter samples of another time; as in `put`."""
        for signal, sample in samples.items():
            self.put(subject, signal, sample.value, age_s=sample.age_s, confidence=sample.confidence)

    def get(self, subject: str, signal: str) -> float | None:
        """What has been entered so far."""
        sample = self.samples.get(subject, {}).get(signal)
        return None if sample is None else sample.value


class Reader(Protocol):
    """One of them; a row of `reconciler.signals.catalog`, in the order in which they run."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        """Enter what was measured. ``now``: the monotonic clock. Errors: none for what the node refuses; see below."""

    def problems(self) -> Mapping[str, str]:
        """Why a signal is unavailable here, or not fully available, by signal: text for people, with the remedy."""

    async def aclose(self) -> None:
        """Give back what it holds: file descriptors, mounts, groups of its own."""


class BaseReader:
    """A `Reader` of ``self._files``, with its reasons by signal in ``self._problems``; it holds nothing."""

    def __init__(self, shared: "SharedReaders") -> None:
        self._files = shared.fd_cache
        self._clock = shared.means.clock
        self._problems: dict[str, str] = {}

    def problems(self) -> Mapping[str, str]:
        return self._problems

    async def aclose(self) -> None:
        """Nothing is held."""


@runtime_checkable
class TaskReader(Reader, Protocol):
    """A reader whose measuring takes its own time: a task does it, and `Reader.read` enters the results so far."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure the subjects of the last `read`, until cancelled; see `reconciler.signals.reading`."""


def _nothing() -> None:
    """Nothing is measured."""


class ReaderContext(Struct, frozen=True, kw_only=True):
    """The environment of readers. ``private_cgroup2``: without PSI of pods, make private groups for it.

    ``filesystems``: directories by the name of their file system, such as ``nodefs``. ``kubelet``: the kubelet's
    directory. Both without ``root``, the prefix of all paths. ``probes`` by name. ``cache``: the last measurement of
    caches and memory bandwidth. ``clock``: of `Reader.read`.
    """

    hierarchy: Hierarchy
    root: str = "/"
    files: FileOps = REAL
    private_cgroup2: bool = False
    filesystems: Mapping[str, str] = {}
    kubelet: str = "/var/lib/kubelet"
    probes: Mapping[str, Probe] = {}
    cache: Callable[[], CacheUsage | None] = _nothing
    clock: Callable[[], float] = time.monotonic


@final
class SharedReaders:
    """What several readers have in common, made when the first of them is."""

    def __init__(self, means: ReaderContext) -> None:
        self.means = means
        self._processes: PodProcesses | None = None
        self._readers: list[BaseReader] = []
        self.vmstat = VmStat(means.root, means.files)
        self._kept = FdCache() if means.files is REAL else None
        self._pass: float | None = None

    @property
    def fd_cache(self) -> ReadOps:
        """For control files that are read in every pass."""
        return self.means.files if self._kept is None else self._kept

    def begin(self, now: float) -> None:
        """A reader is about to read in the pass ``now``."""
        if now != self._pass and self._kept is not None:
            self._kept.rotate()
        self._pass = now

    def close(self) -> None:
        """Close what is kept open; the next read opens it again."""
        if self._kept is not None:
            self._kept.close()

    @property
    def processes(self) -> "PodProcesses":
        if self._processes is None:
            from reconciler.signals.processes import PodProcesses  # loaded with its first reader

            self._processes = PodProcesses(self.means.hierarchy, self.means.files)
        return self._processes

    def reader(self, kind: type[_R]) -> _R:
        """The reader of this class that others take from, too: made by the first that needs it."""
        for reader in self._readers:
            if isinstance(reader, kind):
                return reader
        self._readers.append(made := kind(self))
        return made
