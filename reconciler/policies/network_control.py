"""The waterline law: how much of a link BE may use now, from what online work uses. Pure; bytes a second.

BE may use what online work leaves below the waterline, between its floor and its ceiling. Down at once, up by a tenth
of the way between floor and ceiling a step. An unknown reading (the first one, counters that went backwards, an
interface that could not be read) never raises the ceiling.

Source: rubik's and volcano's network QoS, which have two states, low above the waterline and high below it; the link
minus online's use is Heracles'. Differences: the ceiling does not jump in between, so that BE does not swing between
two rates at each crossing, and the link never fills up above the waterline because of BE.
"""

import math
from typing import Final

from state.network import ByteCounters, LinkLimits, Throughput

_STEPS: Final = 10
"""From the floor to the ceiling: a burst of online traffic has room meanwhile."""
_PARTS: Final = 20
"""Of the ceiling, for `split`: a small change of the use changes no limit, which would be a system call."""
_LEAST: Final = 2
"""Parts that each of the two has at least: a new sender has room."""
_DEAD: Final = 0.01
"""Of the link: a smaller change is not worth a call of the kernel."""


def limits_of(link_mbit: int, floor_percent: float, ceiling_percent: float, waterline_percent: float) -> LinkLimits:
    """The bounds of a link of so many megabits."""
    link = link_mbit * 125_000  # bytes a second
    # 1 kB/s: HTB needs that much to work at all.
    floor = max(1_000, int(link * floor_percent / 100))
    return LinkLimits(
        link=link,
        floor=floor,
        ceiling=max(floor, int(link * ceiling_percent / 100)),
        waterline=int(link * waterline_percent / 100),
    )


def use(before: ByteCounters | None, now: ByteCounters) -> Throughput | None:
    """Use between two readings; None when unknown."""
    if before is None or now.at <= before.at:
        return None
    grown = (now.online - before.online, now.be - before.be, now.pods - before.pods)
    if min(grown) < 0:
        return None
    # Pods' packets are counted before their route is known. What remains on the node or leaves by another interface
    # makes online use smaller by exactly what it makes BE's use bigger: their sum, which the law bounds, is right.
    all_others, be, pods = (count / (now.at - before.at) for count in grown)
    return Throughput(online=max(0, int(all_others - pods)), be=int(be), pods=int(pods))


def step(ceiling: int, online: int | None, bounds: LinkLimits) -> int:
    """BE's next ceiling, from the present one and online's use (None: unknown)."""
    present = min(max(ceiling, bounds.floor), bounds.ceiling)
    if online is None:
        return present
    room = min(max(bounds.waterline - online, bounds.floor), bounds.ceiling)
    if room < present:
        return room
    least = math.ceil(bounds.link * _DEAD)
    # Where floor and ceiling are close to each other a tenth of the way is less than what counts as a change.
    risen = min(room, present + max(1, least, (bounds.ceiling - bounds.floor) // _STEPS))
    # The last step, up to the ceiling, may be small: else the ceiling would never be reached.
    return present if risen - present < least and risen != bounds.ceiling else risen


def split(ceiling: int, be: int, pods: int) -> tuple[int, int]:
    """The ceiling, divided between BE's class and the pods by their use; together never more than all of it.

    In `_PARTS`, at least `_LEAST` each.
    """
    margin = ceiling / _STEPS
    part = (be + margin) / (be + pods + 2 * margin) if ceiling else 0.5
    mine = ceiling * min(_PARTS - _LEAST, max(_LEAST, round(_PARTS * part))) // _PARTS
    return mine, ceiling - mine
