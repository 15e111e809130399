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
    """One pod."""

    volume: str  # the emptyDir volume that it named
    cpu_milli: int  # what it may use now, together with the other BE pods that it shares with
    # What it will have of that at least in the next minute, if the node behaves as in the last minutes.
    likely_cpu_milli: int
    cpus: str
    shared_with: int = 0  # number of other BE pods
    memory_bytes: int | None = None  # the smallest of the limits above it; None: no limit
    state: CapacityState = CapacityState.RUNNING
    next_state: CapacityState | None = None  # announced; None: nothing is
    next_at: float = 0.0
    reason: str = ""


class CapacityPlan(Struct, frozen=True, kw_only=True):
    """The files that are wanted."""

    file: str  # its name in each volume
    pods: Mapping[str, PodCapacity] = {}  # by uid
    given_milli: int = 0  # what BE work may use and online work leaves
    # The least of it in each of the last intervals, with their starts, the newest last.
    lows: tuple[tuple[float, int], ...] = ()
    dry_run: bool = False  # write none
