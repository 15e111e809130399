"""The node's reclaim counters from /proc/vmstat, read once a pass for all readers."""

from collections.abc import Mapping
from typing import final

from cgroupfs.files import REAL, FileOps
from reconciler.signals.growth import numbers


@final
class VmStat:
    """See the module's text."""

    def __init__(self, root: str = "/", files: FileOps = REAL) -> None:
        self._proc = f"{root.rstrip('/')}/proc"
        self._files = files
        self._at: float | None = None
        self._counters: Mapping[str, int] = {}

    def counters(self, now: float) -> Mapping[str, int]:
        """By name, as of the pass ``now``; empty when it cannot be read."""
        if now != self._at:
            self._at = now
            try:
                self._counters = numbers(self._files.read(self._proc, "vmstat"))
            except OSError:
                self._counters = {}
        return self._counters


def taken_back(counters: Mapping[str, int], by: str) -> int | None:
    """Pages that were reclaimed ``by`` kswapd or direct; None: unknown. Kernels before 4.8 count by zone."""
    return _sum(counters, f"pgsteal_{by}")


def scanned(counters: Mapping[str, int]) -> int | None:
    """Pages that were scanned for reclaim, by kswapd or direct."""
    result = [count for by in ("kswapd", "direct") if (count := _sum(counters, f"pgscan_{by}")) is not None]
    return sum(result) if result else None


def refaulted(counters: Mapping[str, int]) -> int | None:
    """Pages that were read back soon after their reclaim; anonymous ones separate from 5.9 on."""
    split = [counters[name] for name in ("workingset_refault_anon", "workingset_refault_file") if name in counters]
    return sum(split) if split else counters.get("workingset_refault")


def _sum(counters: Mapping[str, int], name: str) -> int | None:
    if name in counters:
        return counters[name]
    zones = [f"{name}_{zone}" for zone in ("dma", "dma32", "normal", "high", "movable")]
    result = [counters[zone] for zone in zones if zone in counters]
    return sum(result) if result else None
