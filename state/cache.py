"""Settings of cache and memory bandwidth: shares by class, levels of BE, the law's marks; and measured use.

Values only: the policy `cache` produces them, `reconciler.policies.cacheplan` turns them into masks on one machine.
Units: percents of a cache's ways, of a memory bandwidth, or of a law's input.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from state.evidence import Sample

CACHE: Final = "cache"
"""The policy that divides caches and memory bandwidth."""
RESCTRL_GROUP: Final = "resctrl.group"
"""The name under which a pod's group is shown, held and counted; no control file's."""


class CacheLayout(StrEnum):
    """Whether classes may have ways in common."""

    OVERLAPPING = "overlapping"
    EXCLUSIVE = "exclusive"


class CacheMode(StrEnum):
    """How large BE's share is."""

    STATIC = "static"
    DYNAMIC = "dynamic"


class MountOption(StrEnum):
    """How resctrl is mounted if it is not."""

    CDP = "cdp"
    CDPL2 = "cdpl2"
    MBPS = "mba_MBps"


class ClassShare(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class' share. Koordinator's resctrl-qos by its own names."""

    cat_range_start_percent: Annotated[
        int, Meta(ge=0, le=99, description="start of the class's ways in percent of the cache")
    ] = 0
    cat_range_end_percent: Annotated[
        int, Meta(ge=1, le=100, description="end of the class's ways in percent of the cache, rounded up to whole ways")
    ] = 100
    mba_percent: Annotated[
        int,
        Meta(ge=1, le=100, description="memory bandwidth in percent, rounded up to the hardware's step; 100: no limit"),
    ] = 100

    def __post_init__(self) -> None:
        if self.cat_range_start_percent >= self.cat_range_end_percent:
            raise ValueError(
                f"cat_range_start_percent {self.cat_range_start_percent} is not below cat_range_end_percent "
                f"{self.cat_range_end_percent}"
            )


class ReclaimedShare(ClassShare, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE's share: the same, with Koordinator's default of three tenths."""

    cat_range_end_percent: Annotated[
        int, Meta(ge=1, le=100, description="end of the class's ways in percent of the cache, rounded up to whole ways")
    ] = 30


class ShareLevel(Struct, frozen=True, kw_only=True):
    """A size of BE's share. Units: percent of the ways, percent of the memory bandwidth."""

    cache_percent: int
    mba_percent: int


class ShareLevels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """rubik's three sizes, in percent: a BE pod requests one by annotation; they also bound the dynamic share."""

    low_cache_percent: int = 20
    low_mba_percent: int = 10
    middle_cache_percent: int = 30
    middle_mba_percent: int = 30
    high_cache_percent: int = 50
    high_mba_percent: int = 50

    @property
    def low(self) -> ShareLevel:
        return ShareLevel(cache_percent=self.low_cache_percent, mba_percent=self.low_mba_percent)

    @property
    def middle(self) -> ShareLevel:
        return ShareLevel(cache_percent=self.middle_cache_percent, mba_percent=self.middle_mba_percent)

    @property
    def high(self) -> ShareLevel:
        return ShareLevel(cache_percent=self.high_cache_percent, mba_percent=self.high_mba_percent)


class LevelControl(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How BE's share moves between the levels low and high in mode dynamic."""

    # Cache misses of an online pod per 1000 instructions above which BE's share falls, and of all counted online pods
    # below which it may rise: between them it rests.
    miss_high_per_1000: float = 10.0
    miss_low_per_1000: float = 5.0
    # The same for the use of a domain's memory bandwidth.
    bandwidth_high_percent: float = 80.0
    bandwidth_low_percent: float = 60.0
    # By bandwidth only while BE uses at least this share of it: otherwise a smaller share frees nothing.
    suspect_percent: float = 5.0
    # Percentage points: down at once by half of everything, up in ten steps.
    step_down_percent: int = 50
    step_up_percent: int = 5
    # Below the thresholds before each step up.
    calm_s: float = 5.0
    # Bandwidth is read each second; without newer readings no step up.
    stale_s: float = 10.0
    # Cache misses are counted in a part of each minute.
    miss_stale_s: float = 180.0


class CacheRequest(Struct, frozen=True, kw_only=True):
    """The policy's whole request. ``system`` None: the default group is unmanaged. Bandwidths in MB/s per domain."""

    dedicated: ClassShare = ClassShare()
    shared: ClassShare = ClassShare()
    reclaimed: ClassShare = ReclaimedShare()
    system: ClassShare | None = None
    layout: CacheLayout = CacheLayout.OVERLAPPING
    mode: CacheMode = CacheMode.STATIC
    levels: ShareLevels = ShareLevels()
    law: LevelControl = LevelControl()
    caches: tuple[str, ...] = ("L3",)
    avoid_shared: bool = False
    pods: bool = True
    bandwidth_mbps: int = 20_000
    slow_bandwidth_mbps: int | None = None
    mount: bool = False
    mount_options: tuple[MountOption, ...] = ()
    monitor: bool = True
    dwell_s: float = 30.0
    sweep_s: float = 2.0
    dry_run: bool = False


class CacheGroup(Struct, frozen=True, kw_only=True):
    """One control group: what its schemata is to hold, and why."""

    name: str
    schemata: Mapping[str, Mapping[int, int]]
    reason: str
    reclaimed: bool = False  # it is one of BE's


class CachePlan(Struct, frozen=True, kw_only=True):
    """The planned groups."""

    groups: tuple[CacheGroup, ...] = ()  # BE's first: BE releases before others take
    members: Mapping[str, str] = {}  # pod uid -> group; the default group for those that are in none
    # Pods that requested a share of their own and share by class instead, with the reason.
    crowded: Mapping[str, str] = {}
    default: Mapping[str, Mapping[int, int]] | None = None  # the default group's planned content; None: it is unmanaged
    level: ShareLevel | None = None  # BE's share where it is dynamic
    level_reason: str = ""
    problems: tuple[str, ...] = ()


class Contention(Struct, frozen=True, kw_only=True):
    """State of online pods. Units: percents, but for the misses: per 1000 instructions."""

    misses: Mapping[str, Sample] = {}  # by online pod, where they are counted
    bandwidth: Mapping[int, float] | None = None  # in use by domain, of its memory's maximum; None: not measured
    blind: bool = False  # unknown for some domain
    reclaimed: Mapping[int, float] = {}  # BE's part of the bandwidth in use, by domain
    online: int = 1  # how many online pods there are: without any, no victim exists
    age_s: float = 0.0  # of the bandwidth


class CacheConsumption(Struct, frozen=True, kw_only=True):
    """Use of the last-level cache and of the memory bus. Bytes; bytes per second. None: unknown."""

    occupancy_bytes: int | None = None
    total_bytes_s: float | None = None


class CacheUsage(Struct, frozen=True, kw_only=True):
    """Everything measured at one moment."""

    at_s: float | None = None  # on the monotonic clock; None: nothing was measured
    pods: Mapping[str, CacheConsumption] = {}  # by uid, all caches together, only those that were monitored
    groups: Mapping[str, Mapping[int, CacheConsumption]] = {}  # control groups, by cache; together they are the machine
    classes: Mapping[str, str] = {}  # control group to the class of its pods, where that is one
    level: ShareLevel | None = None  # BE's share where it is dynamic
    # Why a signal is unavailable here, or not available of every pod, by its name in the catalog.
    lacks: Mapping[str, str] = {}
