"""What responses to interference ask of the plan. Policies turn it into settings, so that all of it can be undone."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from state.closing import ClosedNode


class SqueezeLimit(Struct, frozen=True, kw_only=True):
    """Bounds of a suspect for now; None: not bounded by this. ``reason`` names the victim and the cause.

    Units: for the whole pod thousandths of a CPU; bytes; bytes per second for reading and for writing, on each of
    ``disks`` (``major:minor`` of whole disks).
    """

    cpu_milli: int | None = None
    memory_high_bytes: int | None = None
    disk_bps: int | None = None
    disks: tuple[str, ...] = ()
    reason: str = ""


class Response(StrEnum):
    """The steps of the ladder, the mildest first."""

    HOLD = "hold"
    SQUEEZE = "squeeze"
    PARTITION = "partition"
    CLOSE = "close"
    FREEZE = "freeze"
    EVICT = "evict"


class AnnouncedStep(Struct, frozen=True, kw_only=True):
    """A squeeze or freeze of which the pod has notice. ``at_s``: when it begins, on the monotonic clock.

    ``squeeze``: the pod's limits from then on.
    """

    response: Response
    at_s: float
    squeeze: SqueezeLimit | None = None


class Restrictions(Struct, frozen=True, kw_only=True):
    """What responses ask of the plan at this moment; policies turn it into settings, so all of it can be restored.

    ``budget_milli``: what BE may have together at most, None: as the policies say. ``squeezed``, ``frozen`` (with the
    reason) by pod uid; ``announced``: what will be added to them. ``cache_percent``: what BE keeps of its share of
    caches and memory bandwidth. ``closed``: the node takes no new BE pods.
    """

    budget_milli: int | None = None
    budget_reason: str = ""
    squeezed: Mapping[str, SqueezeLimit] = {}
    frozen: Mapping[str, str] = {}
    announced: Mapping[str, AnnouncedStep] = {}
    cache_percent: int | None = None
    cache_reason: str = ""
    closed: ClosedNode | None = None
