"""Memory of the node and of each NUMA node: what is free, where the watermarks are, and what reclaim does.

``memory.total`` is ordinary memory, without huge pages (`state.memory`).

**Cost**: 60 µs for the node, 20 µs a NUMA node, 50 µs with huge pages. Source: proc(5); kernel documentation,
admin-guide/sysctl/vm.
"""

from collections.abc import Mapping
from typing import Final, final

from reconciler.signals import vmstat
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.memory import numa_huge_bytes, parse_zoneinfo
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import NODE
from state.memory import ZoneNode, meminfo_bytes, ordinary

_RATES: Final = ("memory.kswapd", "memory.direct", "memory.scanned", "memory.refaults")
SIGNALS: Final = (
    "memory.use",
    "memory.available",
    "memory.total",
    "memory.free",
    "memory.low",
    "memory.min",
    "memory.inactive_file",
    "swap.free",
    "swap.total",
    *_RATES,
)
_OF_NUMA: Final = {"memory.total": "MemTotal", "memory.free": "MemFree", "memory.inactive_file": "Inactive(file)"}
_OF_NODE: Final = {
    **_OF_NUMA,
    "memory.available": "MemAvailable",
    "swap.free": "SwapFree",
    "swap.total": "SwapTotal",
}
_ZONES_EVERY_S: Final = 30.0
"""/proc/zoneinfo lists each CPU for each zone, and the watermarks change only when an administrator changes them."""


@final
class NodeMemoryReader(BaseReader):
    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        self._counters = shared.vmstat
        self._root = shared.means.root.rstrip("/")
        self._proc_files = shared.means.files
        self._grew = CounterDelta()
        self._zones: Mapping[int, ZoneNode] = {}
        self._zones_at: float | None = None

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self._problems = {}
        wanted = set(scene.wanted)
        try:
            machine = ordinary(meminfo_bytes(self._proc_files.read(f"{self._root}/proc", "meminfo")))
        except OSError as exc:
            self._problems = dict.fromkeys(SIGNALS, f"/proc/meminfo: {exc.strerror}")
            machine = {}
        _enter(sheet, NODE, machine)
        if "MemTotal" in machine and "MemFree" in machine:
            sheet.put(NODE, "memory.use", machine["MemTotal"] - machine["MemFree"])
        if wanted.intersection(_RATES):
            self._rates(sheet, now)
        self._read_zones(now)
        for number, zones in self._zones.items():
            inside = self._numa(number, len(self._zones), machine)
            _enter(sheet, f"numa:{number}", inside)
            _marks(sheet, f"numa:{number}", zones)
        if self._zones:
            low = sum(node.low_bytes for node in self._zones.values())
            least = sum(node.min_bytes for node in self._zones.values())
            sheet.put(NODE, "memory.low", low)
            sheet.put(NODE, "memory.min", least)

    def _rates(self, sheet: SampleSheet, now: float) -> None:
        self._grew.rotate()
        counters = self._counters.counters(now)
        counts = (
            vmstat.taken_back(counters, "kswapd"),
            vmstat.taken_back(counters, "direct"),
            vmstat.scanned(counters),
            vmstat.refaulted(counters),
        )
        grew = self._grew.grown(NODE, self._clock(), counts)
        for index, signal in enumerate(_RATES):
            if counts[index] is None:
                self._problems[signal] = "not in this kernel's /proc/vmstat"
            elif grew is not None and (rate := grew.rate(index)) is not None:
                sheet.put(NODE, signal, rate)

    def _read_zones(self, now: float) -> None:
        if self._zones_at is not None and 0.0 <= now - self._zones_at < _ZONES_EVERY_S:
            return
        try:
            self._zones = parse_zoneinfo(self._proc_files.read(f"{self._root}/proc", "zoneinfo"))
            self._zones_at = now
        except (OSError, ValueError) as exc:
            self._zones = {}
            self._problems |= dict.fromkeys(("memory.low", "memory.min"), f"/proc/zoneinfo: {exc}")

    def _numa(self, number: int, count: int, machine: Mapping[str, int]) -> Mapping[str, int]:
        if count == 1:
            # The only node is the machine; a kernel without NUMA has no file of it.
            return machine
        try:
            directory = f"{self._root}/sys/devices/system/node/node{number}"
            inside = meminfo_bytes(self._proc_files.read(directory, "meminfo"))
        except OSError:
            return {}
        # Most machines have no huge pages: then the directories are not listed.
        return ordinary(inside, numa_huge_bytes(self._proc_files, directory) if machine.get("Hugetlb") else 0)


def _enter(sheet: SampleSheet, subject: str, meminfo: Mapping[str, int]) -> None:
    signals = _OF_NODE if subject == NODE else _OF_NUMA
    sheet.enter(subject, {signal: meminfo.get(name) for signal, name in signals.items()})


def _marks(sheet: SampleSheet, subject: str, zones: ZoneNode) -> None:
    sheet.put(subject, "memory.low", zones.low_bytes)
    sheet.put(subject, "memory.min", zones.min_bytes)
