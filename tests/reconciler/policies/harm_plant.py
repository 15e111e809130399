"""A simple model of a machine for the harm law: what online pods wait, by BE work's use and their own load."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from reconciler.policies.harm import HarmConfig, HarmSample, HarmState, start, step

TOP = 8000
FLOOR = 160
INTERVAL_S = 0.1
CONFIG = HarmConfig()

Room = Callable[[float], Mapping[str, int]]
"""At a time: what BE work can use before each online pod is harmed, by uid."""


class Moment(Struct, frozen=True):
    """One round: what BE work used, the harm that it caused, and the state after."""

    at: float
    used: int
    levels: Mapping[str, float]
    state: HarmState


def harm(used: int, room: int) -> float:
    """Nothing below the room; at a tenth above it the limit, and in proportion further up."""
    return max(0.0, (used - room) / (TOP / 10))


def run(
    room: Room,
    seconds: float,
    *,
    want: Callable[[float], int] = lambda _: TOP,
    delay: int = 0,
    noise: Callable[[float], float] = lambda _: 0.0,
    begin: int = TOP,
    config: HarmConfig = CONFIG,
) -> Iterator[Moment]:
    """The law and the machine together. ``delay``: samples by which the signal is late. ``want``: BE work's demand."""
    state = start(begin)
    late: deque[dict[str, float]] = deque([{}] * delay)
    for number in range(round(seconds / INTERVAL_S)):
        now = number * INTERVAL_S
        used = min(state.ceiling_milli, want(now))
        levels = {uid: harm(used, milli) for uid, milli in room(now).items()}
        late.append(levels)
        seen = {uid: level + noise(now) for uid, level in late.popleft().items()}
        sample = HarmSample(top_milli=TOP, floor_milli=FLOOR, used_milli=used, levels=seen)
        state = step(state, sample, now, config)
        yield Moment(now, used, levels, state)


def mean_use(moments: list[Moment], since: float = 0.0) -> float:
    used = [moment.used for moment in moments if moment.at >= since]
    return sum(used) / len(used)


def harmed_share(moments: list[Moment], since: float = 0.0, level: float = 1.0) -> float:
    """The share of the rounds in which some pod was harmed."""
    chosen = [moment for moment in moments if moment.at >= since]
    return sum(any(number >= level for number in moment.levels.values()) for moment in chosen) / len(chosen)
