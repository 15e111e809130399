"""Available memory of each NUMA node: a hint for the CPUs of new work.

Available is what is free, half of the file pages on the reclaim lists and half of the reclaimable slab. That is the
lower bound of the kernel's own estimate: MemAvailable counts those lists less the smaller of half of them and the low
watermark. It needs no watermarks, which only /proc/zoneinfo has, zone by zone, and errs to the safe side: a node that
is skipped for lack of memory costs less than CPUs away from their memory. Shared memory is among FilePages but not on
these lists, so it does not count.

Source: kernel, si_mem_available (mm/show_mem.c) and drivers/base/node.c; filesystems/proc.rst (MemAvailable).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.log import get_log
from state.model import NumaMemory

_LOG: Final = get_log("numa_memory")
EVERY_S: Final = 10.0
_LINE: Final = re.compile(
    r"^Node \d+ (MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):\s*(\d{1,20}) kB$", re.MULTILINE | re.ASCII
)
_HALVED: Final = ("Active(file)", "Inactive(file)", "SReclaimable")


def parse_node_meminfo(text: str) -> int:
    """What one node could give, in bytes, from its ``meminfo``.

    Errors: `ValueError` when a line is missing: nothing is known then, and half of it is useless.
    """
    numbers = {name: int(kib) << 10 for name, kib in _LINE.findall(text)}
    missing = [name for name in ("MemFree", *_HALVED) if name not in numbers]
    if missing:
        raise ValueError(f"no line {', '.join(missing)} in a NUMA node's meminfo")
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
