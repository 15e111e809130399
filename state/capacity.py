"""What one BE pod has and will likely have, for the capacity file in its volume. Values only.

Units: thousandths of a CPU, bytes; times are seconds on the view's clock.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class CapacityState(StrEnum):
    """What responses to interference do to a pod."""

    RUNNING = "running"
    SQUEEZED = "squeezed"
    FROZEN = "frozen"


class PodCapacity(Struct, frozen=True, kw_only=True):
    """One pod. ``volume``: the emptyDir volume that it named.

    ``cpu_milli``: what it may use now, together with ``shared_with`` other BE pods. ``likely_cpu_milli``: of that, what
    it will have at least in the next minute, if the node behaves as in the last minutes. ``memory_bytes``: the
    smallest of the limits above it, None: no limit. ``next_state``: announced for ``next_at``; None: nothing is.
    """

    volume: str
    cpu_milli: int
    likely_cpu_milli: int
    cpus: str
    shared_with: int = 0
    memory_bytes: int | None = None
    state: CapacityState = CapacityState.RUNNING
    next_state: CapacityState | None = None
    next_at: float = 0.0
    reason: str = ""


class CapacityPlan(Struct, frozen=True, kw_only=True):
    """The files that are wanted. ``pods``: by uid. ``file``: its name in each volume.

    ``given_milli``: what BE work may use and online work leaves. ``lows``: the least of it in each of the last
    intervals, with their starts, the newest last. ``dry_run``: write none.
    """

    file: str
    pods: Mapping[str, PodCapacity] = {}
    given_milli: int = 0
    lows: tuple[tuple[float, int], ...] = ()
    dry_run: bool = False
