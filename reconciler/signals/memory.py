"""The node's memory from the kernel: /proc/meminfo, and the shortage of each NUMA node from /proc/zoneinfo.

Source: proc(5); kernel documentation admin-guide/sysctl/vm (watermark_scale_factor); mm/page_alloc.c,
si_mem_available (mm/show_mem.c) and drivers/base/node.c; filesystems/proc.rst (MemAvailable).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, final

from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.files import REAL, FileOps
from cgroupfs.log import get_log
from state.memory import MemoryShortage, NodeMemoryReading, ZoneNode, huge_bytes, meminfo_bytes, ordinary_bytes
from state.model import NumaMemory

_LOG: Final = get_log("numa_memory")
EVERY_S: Final = 10.0
_LINE: Final = re.compile(
    r"^Node \d+ (MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):\s*(\d{1,20}) kB$", re.MULTILINE | re.ASCII
)
_HALVED: Final = ("Active(file)", "Inactive(file)", "SReclaimable")
"""Not FilePages: shared memory is among those, and not on the reclaim lists."""
_NODE: Final = re.compile(r"(\d{1,4}), zone +\w")
_FIELD: Final = re.compile(r"^ +(?:pages )?(free|min|low|high|managed) +(\d{1,20})$", re.MULTILINE)


def parse_node_meminfo(text: str) -> int:
    """What one NUMA node could give, in bytes, from its ``meminfo``: a hint for the CPUs of new work.

    It is what is free, half of the file pages on the reclaim lists and half of the reclaimable slab.
    Errors: `ValueError` when a line is missing: nothing is known then, and half of it is useless.
    """
    numbers = {name: int(kib) << 10 for name, kib in _LINE.findall(text)}
    missing = [name for name in ("MemFree", *_HALVED) if name not in numbers]
    if missing:
        raise ValueError(f"no line {', '.join(missing)} in a NUMA node's meminfo")
    # The lower bound of the kernel's MemAvailable, which counts those lists less the smaller of half of them and the
    # low watermark (only /proc/zoneinfo has that). Too low is the safe side: a node that is skipped for lack of memory
    # costs less than CPUs away from their memory.
    return numbers["MemFree"] + sum(numbers[name] for name in _HALVED) // 2


@final
class NumaMemorySampler:
    """Keeps the last reading. On a machine of one node there is nothing to choose, and nothing is read."""

    def __init__(self, root: str = "/", files: FileOps = REAL) -> None:
        self._base = f"{root.rstrip('/')}/sys/devices/system/node"
        self._files = files
        self._free: Mapping[int, int] | None = None
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failed = False

    def sample(self, nodes: Sequence[int], now: float) -> NumaMemory | None:
        """The newest reading, made now if the last one is `EVERY_S` old; ``nodes``: those with CPUs.

        A failure is logged once, and the last reading ages. None: nothing is known.
        """
        if len(nodes) < 2:
            return None
        if self._tried_at is None or not 0.0 <= now - self._tried_at < EVERY_S:
            self._tried_at = now
            self._read(nodes, now)
        if self._free is None or self._read_at is None:
            return None
        return NumaMemory(free=self._free, age_s=max(0.0, now - self._read_at))

    def _read(self, nodes: Sequence[int], now: float) -> None:
        try:
            free = {node: parse_node_meminfo(self._files.read(f"{self._base}/node{node}", "meminfo")) for node in nodes}
        except (OSError, ValueError) as exc:
            if not self._failed:
                _LOG.warning("the memory of the NUMA nodes cannot be read", path=self._base, error=str(exc))
            self._failed = True
            return
        self._failed = False
        self._free, self._read_at = free, now


def parse_meminfo(text: str) -> NodeMemoryReading:
    """The node's memory, without what BE work uses of it.

    Errors: `ValueError` when MemTotal or MemAvailable is missing (kernels before 3.14) or no number, and when
    nothing is left besides huge pages.
    """
    numbers = meminfo_bytes(text)
    for name in ("MemTotal", "MemAvailable"):
        if name not in numbers:
            raise ValueError(f"no {name} line")
    huge = numbers.get("Hugetlb", 0)
    total = ordinary_bytes(numbers["MemTotal"], huge)
    if not total:
        raise ValueError("no memory beside huge pages")
    return NodeMemoryReading(
        total_bytes=total,
        huge_bytes=huge,
        available_bytes=numbers["MemAvailable"],
        swap_bytes=numbers.get("SwapTotal", 0),
        swap_free_bytes=numbers.get("SwapFree", 0),
    )


def parse_zoneinfo(text: str) -> dict[int, ZoneNode]:
    """Every NUMA node with memory, by number. Zones without pages of their own count nothing.

    Errors: `ValueError` without any zone.
    """
    sums: dict[int, dict[str, int]] = {}
    for part in f"\n{text}".split("\nNode ")[1:]:
        if (start := _NODE.match(part)) is None:
            continue
        node, zone = sums.setdefault(int(start[1]), {}), dict[str, int]()
        # Most of the text is before and after its own numbers; the per-CPU lists have a "high" of their own.
        body = part[max(0, part.find("\n  pages free")) :].partition("protection:")[0]
        for name, pages in _FIELD.findall(body):
            zone.setdefault(name, int(pages))
        if zone.get("managed"):
            for name, count in zone.items():
                node[name] = node.get(name, 0) + count
    if not sums:
        raise ValueError("no line that begins a zone")
    return {
        number: ZoneNode(
            managed_bytes=pages["managed"] * PAGE,
            free_bytes=pages.get("free", 0) * PAGE,
            low_bytes=pages.get("low", 0) * PAGE,
            high_bytes=pages.get("high", 0) * PAGE,
            min_bytes=pages.get("min", 0) * PAGE,
        )
        for number, pages in sorted(sums.items())
        if pages.get("managed")
    }


def numa_huge_bytes(files: FileOps, node: str) -> int:
    """Huge pages of every size of one NUMA node, by its directory in /sys. What cannot be read counts as none."""
    directory = f"{node}/hugepages"
    try:
        return huge_bytes(files.groups(directory), lambda name: files.read(f"{directory}/{name}", "nr_hugepages"))
    except OSError:
        return 0


def without_huge(zones: Mapping[int, ZoneNode], files: FileOps, root: str) -> dict[int, ZoneNode]:
    """The zones' memory as ordinary memory. On a machine without huge pages the call is needless."""
    base = f"{root.rstrip('/')}/sys/devices/system/node/node"
    return {
        number: replace(
            node, managed_bytes=ordinary_bytes(node.managed_bytes, numa_huge_bytes(files, f"{base}{number}"))
        )
        for number, node in zones.items()
    }


def shortage(node: ZoneNode) -> MemoryShortage:
    """Hard at the mark where the kernel starts to reclaim, soft up to the same distance above the mark where it stops.

    Difference from Katalyst: its marks are a fixed 4 GiB a node, which is a quarter of a small machine; the kernel's
    own follow ``min_free_kbytes`` and ``watermark_scale_factor``, which an administrator sets.
    """
    if node.free_bytes <= node.low_bytes:
        return MemoryShortage.HARD
    return MemoryShortage.SOFT if node.free_bytes < node.rest_bytes else MemoryShortage.NONE


def shortages(nodes: Mapping[int, ZoneNode], before: Mapping[int, MemoryShortage]) -> dict[int, MemoryShortage]:
    """How short each node is now; a shortage that was hard is over only when it is not even soft any more."""
    result: dict[int, MemoryShortage] = {}
    for number, node in sorted(nodes.items()):
        now = shortage(node)
        still_hard = before.get(number) is MemoryShortage.HARD and now is MemoryShortage.SOFT
        result[number] = MemoryShortage.HARD if still_hard else now
    return result
