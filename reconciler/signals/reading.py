"""The registration of the readers of signals: which there are, in which order they run, and what each of them costs.

A new one is a module that implements `reconciler.signals.readers.Reader`, and one entry in `_TABLE`. Modules are
imported where their readers are made: a signal that nobody wants costs neither time nor memory.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from types import coroutine
from typing import Any, Final, NamedTuple, TypeVar, final

from msgspec import Struct

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.kept import FdCache, ReadOps
from cgroupfs.private import private_tree
from reconciler.signals.perf_config import PerfConfig
from reconciler.signals.podcpu import PodCpu
from reconciler.signals.probe_config import Probe
from reconciler.signals.processes import PodProcesses
from reconciler.signals.readers import Reader, SampleContext, SampleSheet
from reconciler.signals.vmstat import VmStat
from state.cache import CacheUsage

T = TypeVar("T")


def _nothing() -> None:
    """Nothing is measured."""


class ReaderContext(Struct, frozen=True, kw_only=True):
    """What readers work with. ``private_cgroup2``: where there is no PSI of pods, make groups of our own for it.

    ``filesystems``: directories by the name that their file system goes by, such as ``nodefs``. ``kubelet``: the
    kubelet's directory. Both without ``root``, the prefix of all paths. ``probes`` by name. ``cache``: what was
    measured last of caches and memory bandwidth.
    """

    hierarchy: Hierarchy
    root: str = "/"
    files: FileOps = REAL
    private_cgroup2: bool = False
    filesystems: Mapping[str, str] = {}
    kubelet: str = "/var/lib/kubelet"
    perf: PerfConfig = PerfConfig()
    probes: Mapping[str, Probe] = {}
    cache: Callable[[], CacheUsage | None] = _nothing


class ReaderCost(NamedTuple):
    """CPU time that reading took in the loop since the reader was made, and how many passes that was."""

    cpu_s: float = 0.0
    passes: int = 0


# What trio and a coroutine hand each other belongs to trio alone.
@coroutine
def _stepwise(work: Awaitable[T], spent: list[float]) -> Generator[Any, Any, T]:
    """Run a coroutine to its end; the CPU seconds of this thread, of each step, go into ``spent``."""
    steps = work.__await__()
    step: Callable[[], Any] = steps.__next__
    while True:
        began = time.thread_time()
        try:
            trap = step()
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            spent.append(time.thread_time() - began)
        try:
            answer = yield trap
        except BaseException as exc:  # noqa: BLE001  # handed on into the work, whatever it is
            step = _thrower(steps, exc)
        else:
            step = _sender(steps, answer)


def _sender(steps: Generator[Any, Any, T], answer: Any) -> Callable[[], Any]:
    return lambda: steps.send(answer)


def _thrower(steps: Generator[Any, Any, T], exc: BaseException) -> Callable[[], Any]:
    return lambda: steps.throw(exc)


@final
class SharedReaders:
    """What several readers have in common, made when the first of them is."""

    def __init__(self, means: ReaderContext) -> None:
        self.means = means
        self._processes: PodProcesses | None = None
        self._cpu: PodCpu | None = None
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
        """Give back what is kept open; whoever reads on opens it again."""
        if self._kept is not None:
            self._kept.close()

    @property
    def processes(self) -> PodProcesses:
        if self._processes is None:
            self._processes = PodProcesses(self.means.hierarchy, self.means.files)
        return self._processes

    @property
    def cpu(self) -> PodCpu:
        if self._cpu is None:
            self._cpu = PodCpu(self.means.hierarchy, files=self.fd_cache)
        return self._cpu


@final
class MeteredReader:
    """A `Reader` whose CPU time is counted: of its own steps only, not of what others do while it yields."""

    def __init__(self, reader: Reader, shared: SharedReaders) -> None:
        self.reader = reader
        self.shared = shared
        self.name = reader.name
        self.signals: Collection[str] = reader.signals
        self.cost = ReaderCost()

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        spent: list[float] = []
        self.shared.begin(now)
        try:
            await _stepwise(self.reader.read(scene, sheet, now), spent)
        finally:
            self.cost = ReaderCost(self.cost.cpu_s + sum(spent), self.cost.passes + 1)

    def problems(self) -> Mapping[str, str]:
        return self.reader.problems()

    async def aclose(self) -> None:
        self.shared.close()
        await self.reader.aclose()


def _cpu(shared: SharedReaders) -> Reader:
    return shared.cpu


def _runqueue(shared: SharedReaders) -> Reader:
    from reconciler.signals.runqueue import RunQueue  # noqa: PLC0415

    return RunQueue(shared.processes, shared.cpu, root=shared.means.root, files=shared.means.files)


def _psi(shared: SharedReaders) -> Reader:
    from reconciler.signals.privatepsi import PrivateGroups  # noqa: PLC0415
    from reconciler.signals.psi import Psi  # noqa: PLC0415

    means = shared.means
    tree = private_tree(means.hierarchy) if means.root == "/" else None
    groups = PrivateGroups(tree, shared.processes, wanted=means.private_cgroup2) if tree is not None else None
    return Psi(means.hierarchy, shared.cpu, private=groups, root=means.root, files=shared.fd_cache)


def _memory(shared: SharedReaders) -> Reader:
    from reconciler.signals.podmemory import PodMemory  # noqa: PLC0415

    return PodMemory(shared.means.hierarchy, shared.vmstat, files=shared.fd_cache)


def _numa(shared: SharedReaders) -> Reader:
    from reconciler.signals.podnuma import PodNuma  # noqa: PLC0415

    return PodNuma(shared.means.hierarchy, files=shared.fd_cache)


def _disk(shared: SharedReaders) -> Reader:
    from reconciler.signals.poddisk import PodDisk  # noqa: PLC0415

    return PodDisk(shared.means.hierarchy, root=shared.means.root, files=shared.fd_cache)


def _net(shared: SharedReaders) -> Reader:
    from reconciler.signals.podnet import PodNet  # noqa: PLC0415

    return PodNet(shared.processes, root=shared.means.root, files=shared.means.files)


def _node(shared: SharedReaders) -> Reader:
    from reconciler.signals.nodeload import NodeLoad  # noqa: PLC0415

    return NodeLoad(root=shared.means.root, files=shared.means.files)


def _node_memory(shared: SharedReaders) -> Reader:
    from reconciler.signals.nodememory import NodeMemoryReader  # noqa: PLC0415

    return NodeMemoryReader(shared.vmstat, root=shared.means.root, files=shared.means.files)


def _file_systems(shared: SharedReaders) -> Reader:
    from reconciler.signals.filesystems import FileSystems  # noqa: PLC0415

    prefix = shared.means.root.rstrip("/")
    return FileSystems({name: f"{prefix}{path}" for name, path in shared.means.filesystems.items()})


def _fs_use(shared: SharedReaders) -> Reader:
    from reconciler.signals.fsuse import DirectoryUsageReader  # noqa: PLC0415

    means = shared.means
    return DirectoryUsageReader(
        shared.processes, means.kubelet, images=means.filesystems.get("imagefs"), root=means.root
    )


def _pools(shared: SharedReaders) -> Reader:
    from reconciler.signals.pools import PoolReader  # noqa: PLC0415

    return PoolReader(root=shared.means.root, files=shared.means.files)


def _best_effort(_shared: SharedReaders) -> Reader:
    from reconciler.signals.besteffort import BestEffortReader  # noqa: PLC0415

    return BestEffortReader()


def _perf(shared: SharedReaders) -> Reader:
    from reconciler.signals.perf import PerfReader  # noqa: PLC0415

    return PerfReader(shared.means.hierarchy, shared.means.perf)


def _latency(shared: SharedReaders) -> Reader:
    from reconciler.signals.latency import LatencyReader  # noqa: PLC0415

    return LatencyReader(shared.means.probes)


def _cache(shared: SharedReaders) -> Reader:
    from reconciler.signals.resctrl_reader import ResctrlReader  # noqa: PLC0415

    return ResctrlReader(shared.means.cache)


class _ReaderEntry(NamedTuple):
    """``signals`` as in its module (a test holds them together); ``needs``: readers that must have run before."""

    signals: tuple[str, ...]
    make: Callable[[SharedReaders], Reader]
    needs: tuple[str, ...] = ()


def _pressures(*resources: str) -> tuple[str, ...]:
    return tuple(f"{resource}.pressure{full}" for resource in resources for full in ("", "_full"))


_TABLE: Final[Mapping[str, _ReaderEntry]] = {
    "cpu": _ReaderEntry(("cpu.use", "cpu.throttled", "cpu.throttled_milli"), _cpu),
    "runqueue": _ReaderEntry(("cpu.wait", "cpu.wait_milli", "cpu.wait_own", "cpu.delay"), _runqueue, ("cpu",)),
    "psi": _ReaderEntry(_pressures("cpu", "memory", "io"), _psi, ("cpu",)),
    "memory": _ReaderEntry(
        (
            "memory.use",
            "memory.rss",
            "memory.limit",
            "memory.refaults",
            "memory.scanned",
            "memory.high_events",
            "memory.pods_hits",
            "oom.kills",
        ),
        _memory,
    ),
    "numa": _ReaderEntry(("memory.numa_rss",), _numa),
    "disk": _ReaderEntry(("disk.read", "disk.write", "disk.ops"), _disk),
    "net": _ReaderEntry(("net.receive", "net.transmit"), _net),
    "node": _ReaderEntry(
        (
            "cpu.use",
            "cpu.idle",
            "load.1",
            "load.runnable",
            "disk.read",
            "disk.write",
            "disk.ops",
            "disk.busy",
            "disk.delay",
        ),
        _node,
    ),
    "nodememory": _ReaderEntry(
        (
            "memory.use",
            "memory.available",
            "memory.total",
            "memory.free",
            "memory.low",
            "memory.min",
            "memory.inactive_file",
            "swap.free",
            "swap.total",
            "memory.kswapd",
            "memory.direct",
            "memory.scanned",
            "memory.refaults",
        ),
        _node_memory,
    ),
    "filesystems": _ReaderEntry(("fs.available", "fs.size", "fs.inodes_free", "fs.inodes"), _file_systems),
    "fsuse": _ReaderEntry(("fs.use", "fs.inodes_use"), _fs_use),
    "pools": _ReaderEntry(
        ("pool.cpus", "cpu.use", "cpu.idle", "cpu.wait", "cpu.wait_milli", "load.runnable", "memory.use"),
        _pools,
        ("cpu", "runqueue"),
    ),
    "besteffort": _ReaderEntry(
        (
            "be.budget",
            "be.limit",
            "be.request",
            "be.use",
            "be.memory_request",
            "be.memory_bound",
            "be.memory_use",
        ),
        _best_effort,
    ),
    "perf": _ReaderEntry(("cpi", "llc.misses"), _perf),
    "latency": _ReaderEntry(("service.latency",), _latency),
    "resctrl": _ReaderEntry(("llc.occupancy", "memory.bandwidth"), _cache),
}
"""In the order in which they run."""


def build(
    wanted: Collection[str], means: ReaderContext, before: Sequence[MeteredReader] = ()
) -> tuple[MeteredReader, ...]:
    """The readers of these signals, and those that they rest on.

    ``before``: those in use. Whoever is still needed is kept with its past, unless ``means`` are others now; the caller
    closes those that are not in the answer.
    """
    chosen: set[str] = set()
    for name, entry in _TABLE.items():
        if not set(entry.signals).isdisjoint(wanted):
            chosen |= {name, *entry.needs}
    shared = next((one.shared for one in before if one.shared.means == means), None) or SharedReaders(means)
    kept = {one.name: one for one in before if one.shared is shared}
    return tuple(
        kept.get(name) or MeteredReader(_TABLE[name].make(shared), shared) for name in _TABLE if name in chosen
    )


def costs(readers: Sequence[MeteredReader]) -> dict[str, ReaderCost]:
    """What each has cost so far, by name."""
    return {one.name: one.cost for one in readers}
