"""Memory of the node as read, pods' memory preferences besides their requests, and the decisions about it.

Values only; `reconciler.signals.memory` reads the kernel, `reconciler.pods.cpu_annotations` the annotations, the
policies decide. Units: bytes, percent.

*Ordinary memory* is what the kernel manages less all huge pages. Huge pages are reserved for the programs that ask for
them: never available to others, also while they are unused. MemTotal contains them; MemFree and MemAvailable do not. So
each share of a node's memory is one of ordinary memory. Source: proc(5); kernel documentation,
admin-guide/mm/hugetlbpage.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from cgroupfs.bounded import digits

OOM_SCORE: Final = "oom.score"
"""The name of ``oom_score_adj`` in ``explain`` and in holds; no control file's."""
RECLAIM: Final = "memory.reclaim"
"""The kernel's file by which memory is taken from a group, and the name of that in holds."""
MIN_FREE: Final = "vm.min_free_kbytes"
SCALE: Final = "vm.watermark_scale_factor"
MARKS: Final = (MIN_FREE, SCALE)
"""The kernel's memory marks, by its names, which are those in holds too."""
MACHINE: Final = "/"
"""The path of what belongs to no group."""
_KILO: Final = 1024
_SIZE: Final = "hugepages-"


_USED: Final = (
    *("MemTotal", "MemFree", "MemAvailable", "Inactive(file)", "SwapTotal", "SwapFree"),
    *("Hugetlb", "Hugepagesize", "HugePages_Total"),
)


def meminfo_bytes(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo or of a NUMA node's (whose lines begin with ``Node N``): those that are used.

    Counts are left out. ``Hugetlb``: all huge pages; on kernels before 4.16, which lack it, those of the default size.
    """
    numbers: dict[str, int] = {}
    count = 0
    # Searched for, as it is read several times a second: most of the file's fifty lines are of no use here.
    for name in _USED:
        at = text.find(f"{name}:")
        # Else it is the end of a longer name.
        if at < 0 or (at and text[at - 1] not in "\n "):
            continue
        end = text.find("\n", at)
        parts = text[at + len(name) + 1 : end if end >= 0 else len(text)].split()
        if not parts or (number := digits(parts[0])) is None:
            continue
        if len(parts) == 2 and parts[1] == "kB":
            numbers[name] = number * _KILO
        # A NUMA node's count is of the default size only, and its file does not say which that is (`huge_bytes`).
        elif len(parts) == 1 and name == "HugePages_Total" and (not at or text[at - 1] == "\n"):
            count = number
    if count and "Hugepagesize" in numbers:
        numbers.setdefault("Hugetlb", count * numbers["Hugepagesize"])
    return numbers


def ordinary_bytes(total: int, huge: int) -> int:
    """Memory that can hold any page. More huge pages than memory are a wrong reading: none is left."""
    return max(0, total - huge)


def ordinary(numbers: Mapping[str, int], huge: int | None = None) -> dict[str, int]:
    """The same numbers, MemTotal without huge pages. ``huge``: their bytes where ``Hugetlb`` does not have them."""
    result = dict(numbers)
    if "MemTotal" in result:
        result["MemTotal"] = ordinary_bytes(result["MemTotal"], result.get("Hugetlb", 0) if huge is None else huge)
    return result


def huge_bytes(names: Iterable[str], count_of: Callable[[str], str]) -> int:
    """Huge pages of every size of one NUMA node, whose meminfo counts those of the default size only.

    ``names``: in its ``hugepages`` directory; others are ignored. ``count_of``: the text of ``nr_hugepages`` in one of
    them. Errors: those of ``count_of``. Source: drivers/base/node.c.
    """
    total = 0
    for name in names:
        size = digits(name.removeprefix(_SIZE).removesuffix("kB"))
        if name.startswith(_SIZE) and name.endswith("kB") and size:
            total += size * _KILO * (digits(count_of(name).strip()) or 0)
    return total


class NodeMemoryReading(Struct, frozen=True, kw_only=True):
    """The node's memory at one moment."""

    total_bytes: int  # ordinary memory: without huge pages
    # The kernel's own estimate (MemAvailable): what new work can have without swapping, page cache that can be dropped
    # included.
    available_bytes: int
    huge_bytes: int = 0
    reclaimed_bytes: int | None = None  # in use below the besteffort directory, page cache included; None: not known
    swap_bytes: int = 0  # all swap there is
    swap_free_bytes: int = 0  # what of it is free
    # The limit of kubepods, where the kubelet has set one below the machine's memory; None, as the next: no such limit,
    # or not known.
    pods_bytes: int | None = None
    pods_available_bytes: int | None = None  # what pods can have until they reach it
    age_s: float | None = None  # None or large: unknown, and an unknown never raises a limit

    @property
    def for_pods_bytes(self) -> int:
        """What there is for pods in all."""
        return self.total_bytes if self.pods_bytes is None else min(self.total_bytes, self.pods_bytes)

    @property
    def left_for_pods_bytes(self) -> int:
        """What new work in pods can have: whichever ends first, the machine's memory or that of all pods."""
        available = self.available_bytes
        return available if self.pods_available_bytes is None else min(available, self.pods_available_bytes)


class MemoryShortage(StrEnum):
    """How short of memory a NUMA node is."""

    NONE = "none"
    SOFT = "soft"
    """Free memory is near the mark below which the kernel starts to reclaim."""
    HARD = "hard"
    """It is at that mark or below."""


class ZoneNode(Struct, frozen=True, kw_only=True):
    """One NUMA node: sums over its zones."""

    managed_bytes: int
    free_bytes: int
    low_bytes: int  # kswapd wakes below it
    high_bytes: int  # kswapd sleeps above it
    min_bytes: int = 0  # tasks reclaim for themselves below it

    @property
    def rest_bytes(self) -> int:
        """Free memory from which on a node is at rest: what relief aims at, and where a shortage ends."""
        return self.high_bytes + max(self.high_bytes - self.low_bytes, self.managed_bytes // 200)


class MemoryPreferences(Struct, frozen=True, kw_only=True):
    """A pod's memory preferences from its annotations. None: not set.

    Percentages as in `reconciler.policies.memory_qos`.
    """

    off: bool = False  # none of memory QoS
    auto: bool = False  # all of it, also where it is off for the node
    min_percent: int | None = None
    low_percent: int | None = None
    throttling_percent: int | None = None
    oom_group: bool | None = None
    oom_priority: int | None = None  # Katalyst's, the lower is killed first
    oom_score_adj: int | None = None  # Koordinator's, as the kernel takes it
    container_oom_scores: tuple[tuple[str, int], ...] = ()  # the same by a container's name, which counts first


class ReclaimRequest(Struct, frozen=True, kw_only=True):
    """What is wanted of taking memory from BE containers; see `reconciler.policies.memory_reclaim` for each number."""

    dry_run: bool = False
    probe: bool = True
    relieve: bool = True
    interval_s: float = 6.0
    pressure_percent: float = 0.1
    probe_percent: float = 1.0
    rest_s: float = 60.0
    swap_percent: int = 80
    most_bytes: int = 256 << 20
    least_bytes: int = 64 << 20
    leave_bytes: int = 100 << 20


class GroupMemory(Struct, frozen=True, kw_only=True):
    """One reading of a container."""

    path: str
    pod_uid: str
    at_s: float
    used_bytes: int
    droppable_bytes: int  # page cache that no process has mapped
    # The same by NUMA node; None: unknown, then all of it may be on any node.
    droppable_on: Mapping[int, int] | None = None
    stalled_us: int | None = None  # time in which some task waited for memory, growing; None: unknown
    asked_bytes: int = 0  # its request

    def cache_on(self, nodes: Iterable[int]) -> int:
        """What of its page cache could be dropped on these NUMA nodes."""
        if self.droppable_on is None:
            return self.droppable_bytes
        return min(self.droppable_bytes, sum(self.droppable_on.get(node, 0) for node in nodes))


class ReclaimAction(Struct, frozen=True, kw_only=True):
    """Memory to be taken from one group."""

    path: str
    pod_uid: str
    kind: str
    want_bytes: int  # 0: all that can be dropped (v1)
    why: str
    cache_only: bool = True  # none of it is to be swapped


class MemoryProtection(Struct, frozen=True, kw_only=True):
    """What a directory must hold of both protections so that those below it count."""

    min_bytes: int = 0
    low_bytes: int = 0


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Decisions about memory for the node as a whole."""

    # Of all groups below the besteffort directory together: the use that is not throttled; None: no setting.
    reclaimed_high_bytes: int | None = None
    reclaimed_max_bytes: int | None = None  # their limit; None: no setting
    protected: Mapping[str, MemoryProtection] = {}  # by group path of a QoS directory
    reclaim: ReclaimRequest | None = None  # whether and how memory is taken from BE containers; None: it is not
    # By class, the swap beside a container's memory limit, as a share of it; a missing class has what its runtime set.
    swap_percent: Mapping[str, int] = {}
    batch_limits: bool = False  # batch memory limits are written, too
