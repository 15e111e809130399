"""The node's reclaim counters from /proc/vmstat, read once a pass for all readers."""

from collections.abc import Mapping
from typing import Final, final

from cgroupfs.files import REAL, FileOps
from reconciler.signals.counter_delta import parse_counters, prefixes

_RECLAIM: Final = tuple(f"{what}_{by}" for what in ("pgsteal", "pgscan") for by in ("kswapd", "direct"))
_ZONES: Final = ("dma", "dma32", "normal", "high", "movable")
_NAMES: Final = (
    "oom_kill",
    *_RECLAIM,
    *("workingset_refault_anon", "workingset_refault_file", "workingset_refault"),
)
_BY_ZONE: Final = tuple(f"{name}_{zone}" for name in _RECLAIM for zone in _ZONES)
_PREFIXES: Final = prefixes(*_NAMES)
_ZONE_PREFIXES: Final = prefixes(*_BY_ZONE)


@final
class VmStat:
    """/proc/vmstat, read at most once a pass."""

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
                self._counters = _parsed(self._files.read(self._proc, "vmstat"))
            except OSError:
                self._counters = {}
        return self._counters


def _parsed(text: str) -> dict[str, int]:
    """The counters that are used: a tenth of what reading all of some two hundred lines takes."""
    known = zip(_NAMES, parse_counters(text, _PREFIXES), strict=True)
    counters = {name: count for name, count in known if count is not None}
    # Kernels before 4.8 count by zone.
    if "pgsteal_kswapd" not in counters:
        zones = zip(_BY_ZONE, parse_counters(text, _ZONE_PREFIXES), strict=True)
        counters |= {name: count for name, count in zones if count is not None}
    return counters


def taken_back(counters: Mapping[str, int], by: str) -> int | None:
    """Pages that were reclaimed ``by`` kswapd or direct; None: unknown."""
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
    zones = [f"{name}_{zone}" for zone in _ZONES]
    result = [counters[zone] for zone in zones if zone in counters]
    return sum(result) if result else None
