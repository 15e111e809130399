"""The registration table: every detector. A new one is a file beside this one, a field and a name here."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from reconciler.detectors.bandwidth import DETECTOR as BANDWIDTH
from reconciler.detectors.bandwidth import BandwidthDetectorConfig
from reconciler.detectors.base import registered
from reconciler.detectors.cache import DETECTOR as CACHE
from reconciler.detectors.cache import CacheDetectorConfig
from reconciler.detectors.cpi import DETECTOR as CPI
from reconciler.detectors.cpi import CpiConfig
from reconciler.detectors.ewma import DETECTOR as EWMA
from reconciler.detectors.ewma import EwmaConfig
from reconciler.detectors.expression import DETECTOR as EXPRESSION
from reconciler.detectors.expression import ExpressionConfig
from reconciler.detectors.idle_cores import DETECTOR as IDLE_CORES
from reconciler.detectors.idle_cores import IdleCoresConfig
from reconciler.detectors.memory_events import DETECTOR as MEMORY_EVENTS
from reconciler.detectors.memory_events import MemoryEventsConfig
from reconciler.detectors.pressure import DETECTOR as PRESSURE
from reconciler.detectors.pressure import PressureDetectorConfig
from reconciler.detectors.run_queue import DETECTOR as RUN_QUEUE
from reconciler.detectors.run_queue import RunQueueConfig
from reconciler.detectors.threshold import DETECTOR as THRESHOLD
from reconciler.detectors.threshold import ThresholdConfig


class DetectorEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One detector of a rule: exactly one of these keys, with what it is to look for."""

    threshold: Annotated[ThresholdConfig | None, Meta(description="a signal above or below a value for a while")] = None
    pressure: Annotated[
        PressureDetectorConfig | None,
        Meta(description="waiting for CPU, memory or disk above a limit, or rising beyond it"),
    ] = None
    run_queue: Annotated[RunQueueConfig | None, Meta(description="tasks wait for a CPU without being throttled")] = None
    cpi: Annotated[CpiConfig | None, Meta(description="more cycles per instruction than usual for this workload")] = (
        None
    )
    idle_cores: Annotated[
        IdleCoresConfig | None,
        Meta(description="too little idle CPU in the victim's pool while BE work uses it"),
    ] = None
    memory_events: Annotated[
        MemoryEventsConfig | None,
        Meta(description="OOM kills, or refaults while the node is short of memory"),
    ] = None
    cache: Annotated[
        CacheDetectorConfig | None,
        Meta(description="more cache misses than usual, and cache space lost to others"),
    ] = None
    bandwidth: Annotated[
        BandwidthDetectorConfig | None,
        Meta(description="memory bandwidth near its peak, or the victim's bandwidth collapsed"),
    ] = None
    ewma: Annotated[EwmaConfig | None, Meta(description="a signal deviates from its recent values")] = None
    expression: Annotated[
        ExpressionConfig | None, Meta(description="an expression over signals is true for a while")
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise ValueError(f"expected exactly one detector, one of {', '.join(self.__struct_fields__)}; got {got}")

    @property
    def name(self) -> str:
        """Which one it is: its name in `DETECTORS`."""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def config(self) -> Struct:
        """What it is to look for."""
        found = getattr(self, self.name)
        assert isinstance(found, Struct)
        return found


DETECTORS: Final = registered(
    DetectorEntry,
    (THRESHOLD, PRESSURE, RUN_QUEUE, CPI, IDLE_CORES, MEMORY_EVENTS, CACHE, BANDWIDTH, EWMA, EXPRESSION),
)
