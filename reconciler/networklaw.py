"""The waterline law: how much of a link BE may use now, from what online work uses. Pure; bytes a second.

BE may use what online work leaves below the waterline, between its floor and its ceiling. Down at once, up by a tenth
of the way between floor and ceiling a step, so that a burst of online traffic finds room. What is not known (the first
reading, counters that went backwards, an interface that did not answer) never raises the ceiling.

Source: rubik's and volcano's network QoS, which know two states, low above the waterline and high below it; the link
minus online's use is Heracles'. Where we differ: in between there is no jump, so that BE does not swing between two
rates at each crossing, and the link never fills up above the waterline while BE is the one that fills it.
"""

from typing import Final

from msgspec import Struct

_STEPS: Final = 10
_DEAD: Final = 0.01
"""Of the link: a smaller change is not worth a call of the kernel."""


class Lane(Struct, frozen=True, kw_only=True):
    """One link's bounds in bytes a second."""

    link: int
    floor: int
    ceiling: int
    waterline: int


class Counted(Struct, frozen=True, kw_only=True):
    """A class's byte counters at one moment (monotonic seconds)."""

    at: float
    online: int
    be: int


def lane(link_mbit: int, floor_percent: float, ceiling_percent: float, waterline_percent: float) -> Lane:
    """The bounds of a link of so many megabits; never below 1 kB/s, which HTB needs to be anything at all."""
    link = link_mbit * 125_000
    floor = max(1_000, int(link * floor_percent / 100))
    return Lane(
        link=link,
        floor=floor,
        ceiling=max(floor, int(link * ceiling_percent / 100)),
        waterline=int(link * waterline_percent / 100),
    )


def online_use(before: Counted | None, now: Counted) -> int | None:
    """Bytes a second of online work between two readings; None when that cannot be told."""
    if before is None or now.at <= before.at or now.online < before.online:
        return None
    return int((now.online - before.online) / (now.at - before.at))


def step(ceiling: int, online: int | None, bounds: Lane) -> int:
    """BE's next ceiling, from the present one and online's use (None: unknown)."""
    present = min(max(ceiling, bounds.floor), bounds.ceiling)
    if online is None:
        return present
    room = min(max(bounds.waterline - online, bounds.floor), bounds.ceiling)
    if room < present:
        return room
    risen = min(room, present + max(1, (bounds.ceiling - bounds.floor) // _STEPS))
    if risen - present < bounds.link * _DEAD and risen != bounds.ceiling:
        return present
    return risen
