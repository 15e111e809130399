"""What is wanted of the node's network interfaces: how BE's bandwidth is bounded, from configuration. Plain values."""

from typing import Final

from msgspec import Struct

MAJOR: Final = 0x4250
"""The major number of our queueing discipline (``4250:``): how it is told from anybody else's, also after a crash."""
HANDLE: Final = MAJOR << 16
ONLINE_CLASS: Final = HANDLE | 0x10
BE_CLASS: Final = HANDLE | 0x20


class InterfaceWish(Struct, frozen=True, kw_only=True):
    """One interface. ``link_mbit``: megabits a second, None: what the driver tells. The percents are of the link."""

    name: str
    link_mbit: int | None = None
    floor_percent: float = 10.0
    ceiling_percent: float = 40.0
    waterline_percent: float = 80.0


class NetworkWish(Struct, frozen=True, kw_only=True):
    """All of them, and how often BE's ceiling follows what online work uses."""

    interfaces: tuple[InterfaceWish, ...] = ()
    interval_s: float = 1.0
    dry_run: bool = False
