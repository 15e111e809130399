"""The table of signal readers and, with each, the signals that it measures: unit, subjects, and what the value is.

A new signal is a file with its reader (`reconciler.signals.readers`) and one row here, with the signal's definition. A
signal that several readers measure, each of its own subjects, is defined with the first of them. Readers leave out what
this node cannot measure; detectors return ``unknown`` then. docs/contributing.md has an example.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

Unit = Literal[
    "milli-CPU", "percent", "µs", "ms", "bytes", "bytes/s", "pages/s", "per s", "count", "ratio", "per 1000", "CPUs"
]
Of = Literal["node", "pod", "pool", "numa", "fs"]


class SignalDefinition(Struct, frozen=True, kw_only=True):
    """A signal. ``of``: the kinds of subjects that have it."""

    name: str
    unit: Unit
    of: tuple[Of, ...]
    summary: str


class ReaderRow(Struct, frozen=True, kw_only=True):
    """A reader: its name, the path of its class or of a function that builds it, what it measures.

    ``defined``: the signals of which it is the first reader. ``needs``: readers that must run before it. ``of``: the
    subjects that it measures, where other readers measure the same signals of pods.
    """

    name: str
    path: str
    signals: tuple[str, ...]
    defined: tuple[SignalDefinition, ...]
    needs: tuple[str, ...] = ()
    of: Literal["node", "pool"] | None = None


def _s(name: str, unit: Unit, of: tuple[Of, ...], summary: str) -> SignalDefinition:
    return SignalDefinition(name=name, unit=unit, of=of, summary=summary)


def _reader(
    name: str,
    path: str,
    *signals: str | SignalDefinition,
    needs: tuple[str, ...] = (),
    of: Literal["node", "pool"] | None = None,
) -> ReaderRow:
    return ReaderRow(
        name=name,
        path=path,
        signals=tuple(signal if isinstance(signal, str) else signal.name for signal in signals),
        defined=tuple(signal for signal in signals if not isinstance(signal, str)),
        needs=needs,
        of=of,
    )


def _signals(readers: tuple[ReaderRow, ...]) -> Mapping[str, SignalDefinition]:
    """Errors: `ValueError` for a signal that is defined twice or never."""
    table: dict[str, SignalDefinition] = {}
    for reader in readers:
        for signal in reader.defined:
            if signal.name in table:
                raise ValueError(f"reader {reader.name}: signal {signal.name} is defined twice")
            table[signal.name] = signal
        if unknown := [name for name in reader.signals if name not in table]:
            raise ValueError(f"reader {reader.name}: unknown signal {unknown[0]}")
    return table


READERS: Final = (
    _reader(
        "cpu",
        "reconciler.signals.podcpu:PodCpu",
        _s("cpu.use", "milli-CPU", ("node", "pod", "pool"), "CPU time used"),
        _s("cpu.throttled", "percent", ("pod",), "scheduling periods in which the pod was throttled by its own quota"),
        _s("cpu.throttled_milli", "milli-CPU", ("pod",), "CPU time lost to throttling by the pod's own quota"),
    ),
    _reader(
        "runqueue",
        "reconciler.signals.runqueue:build",
        _s(
            "cpu.wait",
            "percent",
            ("pod", "pool"),
            "run queue wait as a share of waiting and running; without throttling",
        ),
        _s(
            "cpu.wait_milli",
            "milli-CPU",
            ("pod", "pool"),
            "tasks waiting in the run queue, on average; without throttling",
        ),
        _s("cpu.wait_own", "milli-CPU", ("pod",), "of the waiting tasks: throttled by quotas"),
        _s("cpu.delay", "µs", ("pod",), "mean run queue wait per time slice"),
        needs=("cpu",),
    ),
    _reader(
        "psi",
        "reconciler.signals.psi:build",
        _s("cpu.pressure", "percent", ("node", "pod"), "time in which some task waited for a CPU; without throttling"),
        _s("cpu.pressure_full", "percent", ("pod",), "time in which all tasks waited for a CPU; without throttling"),
        _s("memory.pressure", "percent", ("node", "pod"), "time in which some task waited for memory"),
        _s("memory.pressure_full", "percent", ("node", "pod"), "time in which all tasks waited for memory"),
        _s("io.pressure", "percent", ("node", "pod"), "time in which some task waited for a disk"),
        _s("io.pressure_full", "percent", ("node", "pod"), "time in which all tasks waited for a disk"),
        needs=("cpu",),
    ),
    _reader(
        "memory",
        "reconciler.signals.podmemory:PodMemory",
        _s("memory.use", "bytes", ("node", "pod", "pool"), "memory in use, page cache included"),
        _s("memory.rss", "bytes", ("pod",), "anonymous memory in use"),
        _s("memory.limit", "bytes", ("pod",), "the memory limit in force"),
        _s("memory.refaults", "pages/s", ("node", "pod"), "refaults: pages read again shortly after their reclaim"),
        _s("memory.scanned", "pages/s", ("node", "pod"), "pages scanned by reclaim"),
        _s("memory.high_events", "per s", ("pod",), "times the pod reached its memory.high, or its limit on v1"),
        _s("memory.pods_hits", "per s", ("node",), "times that all pods together reached the limit of kubepods"),
        _s("oom.kills", "count", ("node", "pod"), "OOM kills since the previous sample"),
    ),
    _reader(
        "numa",
        "reconciler.signals.podnuma:PodNuma",
        _s("memory.numa_rss", "bytes", ("pod",), "anonymous memory in use on one NUMA node (subject pod:UID@numa:N)"),
    ),
    _reader(
        "disk",
        "reconciler.signals.poddisk:PodDisk",
        _s("disk.read", "bytes/s", ("node", "pod"), "read from disks"),
        _s("disk.write", "bytes/s", ("node", "pod"), "written to disks"),
        _s("disk.ops", "per s", ("node", "pod"), "requests to disks"),
    ),
    _reader(
        "net",
        "reconciler.signals.podnet:PodNet",
        _s("net.receive", "bytes/s", ("node", "pod"), "received from the network"),
        _s("net.transmit", "bytes/s", ("node", "pod"), "sent to the network"),
    ),
    _reader(
        "node",
        "reconciler.signals.nodeload:NodeLoad",
        "cpu.use",
        _s("cpu.idle", "milli-CPU", ("node", "pool"), "idle CPU time"),
        _s("load.1", "count", ("node",), "load average of one minute"),
        _s("load.runnable", "count", ("node", "pool"), "tasks running or waiting for a CPU now"),
        "disk.read",
        "disk.write",
        "disk.ops",
        _s("disk.busy", "percent", ("node",), "time in which the busiest disk had requests"),
        _s("disk.delay", "ms", ("node",), "mean time of a request on the busiest disk"),
        of="node",
    ),
    _reader(
        "nodememory",
        "reconciler.signals.nodememory:NodeMemoryReader",
        "memory.use",
        _s("memory.available", "bytes", ("node",), "memory available without swapping (MemAvailable)"),
        _s("memory.total", "bytes", ("node", "numa"), "total memory without huge pages"),
        _s("memory.free", "bytes", ("node", "numa"), "free memory"),
        _s("memory.low", "bytes", ("node", "numa"), "low watermark, at which kswapd wakes"),
        _s("memory.min", "bytes", ("node", "numa"), "min watermark, at which tasks reclaim directly"),
        _s("memory.inactive_file", "bytes", ("node", "numa"), "inactive page cache"),
        _s("swap.free", "bytes", ("node",), "free swap"),
        _s("swap.total", "bytes", ("node",), "total swap"),
        _s("memory.kswapd", "pages/s", ("node",), "pages reclaimed by kswapd"),
        _s("memory.direct", "pages/s", ("node",), "pages reclaimed directly by allocating tasks"),
        "memory.scanned",
        "memory.refaults",
    ),
    _reader(
        "filesystems",
        "reconciler.signals.filesystems:FileSystems",
        _s("fs.available", "bytes", ("fs",), "space available to users of the file system"),
        _s("fs.size", "bytes", ("fs",), "size of the file system"),
        _s("fs.inodes_free", "count", ("fs",), "free inodes"),
        _s("fs.inodes", "count", ("fs",), "total inodes"),
    ),
    _reader(
        "fsuse",
        "reconciler.signals.fsuse:DirectoryUsageReader",
        _s(
            "fs.use",
            "bytes",
            ("pod",),
            "disk usage of the pod on the node's (pod:UID@fs:imagefs: the images') file system",
        ),
        _s("fs.inodes_use", "count", ("pod",), "inodes of the pod's files, if known"),
    ),
    _reader(
        "numacpu",
        "reconciler.signals.numacpu:NumaCpu",
        _s(
            "cpu.numa_use",
            "milli-CPU",
            ("numa", "pod"),
            "CPU time used on one NUMA node (subject pod:UID@numa:N: a pod that runs on that node alone)",
        ),
        _s("cpu.numa_idle", "milli-CPU", ("numa",), "idle CPU time of one NUMA node"),
        needs=("cpu",),
    ),
    _reader(
        "pools",
        "reconciler.signals.pools:PoolReader",
        _s("pool.cpus", "CPUs", ("pool",), "CPUs in the pool"),
        "cpu.use",
        "cpu.idle",
        "cpu.wait",
        "cpu.wait_milli",
        "load.runnable",
        "memory.use",
        needs=("cpu", "runqueue"),
        of="pool",
    ),
    _reader(
        "besteffort",
        "reconciler.signals.besteffort:BestEffortReader",
        _s("be.budget", "milli-CPU", ("node",), "CPU budget of BE work, by the plan"),
        _s("be.limit", "milli-CPU", ("node",), "CPU limit of BE work: its CPUs or its quota, the smaller"),
        _s("be.request", "milli-CPU", ("node",), "sum of the CPU requests of BE pods"),
        _s("be.use", "milli-CPU", ("node",), "CPU use of all BE pods"),
        _s("be.memory_request", "bytes", ("node",), "sum of the memory requests of BE pods"),
        _s("be.memory_bound", "bytes", ("node",), "memory limit of all BE pods, by the plan"),
        _s("be.memory_use", "bytes", ("node",), "memory in use below the besteffort directory"),
    ),
    _reader(
        "perf",
        "reconciler.signals.perf:PerfReader",
        _s("cpi", "ratio", ("pod",), "cycles per instruction"),
        _s("llc.misses", "per 1000", ("pod",), "last-level cache misses per 1000 instructions"),
    ),
    _reader(
        "latency",
        "reconciler.signals.latency:LatencyReader",
        _s("service.latency", "ms", ("pod",), "latency measured by the pod's probe"),
    ),
    _reader(
        "resctrl",
        "reconciler.signals.resctrl_reader:ResctrlReader",
        _s("llc.occupancy", "bytes", ("pod",), "last-level cache occupancy"),
        _s("memory.bandwidth", "bytes/s", ("node", "pod"), "memory bandwidth used"),
    ),
)
"""In the order in which they run."""

SIGNALS: Final = _signals(READERS)


def wanted_by(row: ReaderRow) -> frozenset[str]:
    """The names in a set of wanted signals for which this reader runs.

    A signal that pods have is wanted of pods, and of the node or a pool only by a name such as ``cpu.use@pool``.
    """
    if row.of is None:
        return frozenset(row.signals)
    return frozenset(f"{name}@{row.of}" if "pod" in SIGNALS[name].of else name for name in row.signals)


NODE_AND_POOLS: Final = frozenset(
    name for row in READERS if row.of is not None for name in wanted_by(row) if name.endswith(f"@{row.of}")
)
"""All such names: what a rule may read that names another subject than a pod."""
