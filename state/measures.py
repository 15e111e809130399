"""What responses to interference ask of the plan. Policies turn it into settings, so that all of it can be undone."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from state.closing import ClosedNode


class SqueezeLimit(Struct, frozen=True, kw_only=True):
    """Bounds of a suspect for now; None: not bounded by this. Units: of the whole pod; bytes, bytes per second."""

    cpu_milli: int | None = None  # thousandths of a CPU
    memory_high_bytes: int | None = None
    disk_bps: int | None = None  # for reading and for writing, on each of the disks
    disks: tuple[str, ...] = ()  # major:minor of whole disks
    reason: str = ""  # names the victim and the cause


class Response(StrEnum):
    """The steps of the ladder, the mildest first."""

    HOLD = "hold"
    SQUEEZE = "squeeze"
    PARTITION = "partition"
    CLOSE = "close"
    FREEZE = "freeze"
    EVICT = "evict"


class AnnouncedStep(Struct, frozen=True, kw_only=True):
    """A squeeze or freeze of which the pod has notice."""

    response: Response
    at_s: float  # when it begins, on the monotonic clock
    squeeze: SqueezeLimit | None = None  # the pod's limits from then on


class Restrictions(Struct, frozen=True, kw_only=True):
    """What responses ask of the plan at this moment."""

    budget_milli: int | None = None  # what BE may have together at most; None: as the policies say
    budget_reason: str = ""
    squeezed: Mapping[str, SqueezeLimit] = {}  # by pod uid
    frozen: Mapping[str, str] = {}  # reason by pod uid
    announced: Mapping[str, AnnouncedStep] = {}  # by pod uid: what will be added to them
    cache_percent: int | None = None  # what BE keeps of its share of caches and memory bandwidth
    cache_reason: str = ""
    closed: ClosedNode | None = None  # the node takes no new BE pods
