"""What is wanted of the node's network interfaces: how BE's bandwidth is bounded, from configuration. Plain values."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

MAJOR: Final = 0x4250
"""The major number of bypassd's queueing discipline (``4250:``): its identity, also after a crash."""
HANDLE: Final = MAJOR << 16
ONLINE_CLASS: Final = HANDLE | 0x10
BE_CLASS: Final = HANDLE | 0x20
GATHER: Final = "bypassd-be"
"""bypassd's device through which the packets of BE pods with a network namespace of their own are redirected."""
RECEIVED_GATHER: Final = "bypassd-be-in"
"""The one of packets to these pods."""
PREFERENCE: Final = MAJOR
"""Of the filters that lead them there (``pref 16976``; ``16977`` for packets to pods).

Both share the device's qdisc, and the kernel lists its u32 filters by preference, not by direction.
"""
SHARE: Final = "net.share"
"""The name in ``explain`` and in holds of a pod's place there; no control file's."""
RECEIVED_SHARE: Final = "net.receive_share"
"""The same of packets to the pod."""


class Direction(StrEnum):
    """Seen from the pod."""

    SENT = "sent"
    RECEIVED = "received"

    @property
    def other(self) -> "Direction":
        return Direction.RECEIVED if self is Direction.SENT else Direction.SENT

    @property
    def device(self) -> str:
        return GATHER if self is Direction.SENT else RECEIVED_GATHER

    @property
    def preference(self) -> int:
        """Of the filters that lead to it."""
        return PREFERENCE if self is Direction.SENT else PREFERENCE + 1

    @property
    def knob(self) -> str:
        """The name of a pod's place there."""
        return SHARE if self is Direction.SENT else RECEIVED_SHARE


class InterfaceRequest(Struct, frozen=True, kw_only=True):
    """One interface. The percents are of the link."""

    name: str
    link_mbit: int | None = None  # megabits a second; None: the driver's
    floor_percent: float = 10.0
    ceiling_percent: float = 40.0
    waterline_percent: float = 80.0


class NetworkRequest(Struct, frozen=True, kw_only=True):
    """All interfaces."""

    interfaces: tuple[InterfaceRequest, ...] = ()
    interval_s: float = 1.0  # of BE's ceiling, which follows the use of online work
    dry_run: bool = False
    classes: bool = True  # sockets of BE pods have a class of their own, by which an interface classifies their packets
    # The interface whose BE share also limits pods with a network namespace of their own; empty: they are unmanaged.
    pods_by: str = ""
    receive: bool = False  # what these pods receive has a share of it, too


class LinkLimits(Struct, frozen=True, kw_only=True):
    """One link's bounds in bytes a second."""

    link: int
    floor: int
    ceiling: int
    waterline: int


class ByteCounters(Struct, frozen=True, kw_only=True):
    """An interface's byte counters at one moment."""

    at: float  # monotonic seconds
    online: int  # all without a class, the packets that it forwards for BE pods included
    be: int  # of BE's class
    pods: int = 0  # forwarded for BE pods


class Throughput(Struct, frozen=True, kw_only=True):
    """Bytes a second of online work, of BE's class, and of BE pods with a network of their own."""

    online: int
    be: int
    pods: int
