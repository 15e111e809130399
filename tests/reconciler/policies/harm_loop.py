"""A closed loop for the harm law: a machine whose online pods wait by what BE work uses, and the law that sets that.

All of the law is in the loop, also what is learned of a pod's own waiting. The machine: online work runs ``load``
thousandths of a CPU and wakes up; BE work fills ``use`` thousandths of the rest. A wake-up then waits
``harm_us * fill ** steep`` for BE work, and the pod waits ``own`` percent of the time by itself. A sample is of the
time before the last step: the signal is late by one.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

from reconciler.policies.harm import HarmConfig, HarmSample, HarmState, interval_s, start, step, top_of
from reconciler.policies.waiting import PodJudgement, PodWaiting, is_quiet, judge, level_of, quiet_since

POD = "a"
CONFIG = HarmConfig()


class Machine(Struct, frozen=True, kw_only=True):
    """The parameters. ``noise``: relative deviation of each sample, normally distributed.

    ``whole``: a cut takes whole CPUs, as with a CPU set; else parts of one, as with a quota.
    """

    cpus: int = 8
    floor_milli: int = 160
    wakes_per_cpu: float = 2000.0
    harm_us: float = 1000.0
    steep: float = 2.0
    noise: float = 0.0
    seed: int = 1
    whole: bool = False

    @property
    def least_milli(self) -> int:
        """What no cut takes."""
        return 1000 if self.whole else self.floor_milli

    def usable(self, ceiling_milli: int) -> int:
        """What BE work can use of a ceiling."""
        return ceiling_milli // 1000 * 1000 if self.whole else ceiling_milli


MACHINE = Machine()


class Input(Struct, frozen=True, kw_only=True):
    """At one time: online load and BE work's demand in thousandths of a CPU, own waiting in percent of the time.

    ``known``: whether there is a sample; ``jump_s``: by how much the clock jumps before it.
    """

    load: float = 2000.0
    want: int = 1_000_000
    own: float = 0.0
    known: bool = True
    jump_s: float = 0.0


STEP_S = 10.0
"""When the step and the ramp of `TRACES` begin."""


def _bursts(every_s: float, for_s: float, high: Input, low: Input) -> "Trace":
    return lambda at: high if at % every_s < for_s else low


def _wave(period_s: float) -> "Trace":
    return lambda at: Input(load=3000 + 2500 * math.sin(2 * math.pi * at / period_s))


Trace = Callable[[float], Input]
CALM, BUSY = Input(load=200), Input(load=6000)
OWN = Input(own=30)
TRACES: Mapping[str, Trace] = {
    "constant": lambda _: Input(),
    "step": lambda at: CALM if at < STEP_S else BUSY,
    "ramp, 200 s": lambda at: Input(load=200 + 29 * min(200.0, max(0.0, at - STEP_S))),
    "bursts, 1 of 10 s": _bursts(10, 1, BUSY, CALM),
    "bursts, 0.3 of 3 s": _bursts(3, 0.3, BUSY, CALM),
    "sawtooth, 20 s": lambda at: Input(load=200 + 290 * (at % 20)),
    "wave, 0.4 s": _wave(0.4),
    "wave, 1 s": _wave(1),
    "wave, 8 s": _wave(8),
    "wave, 60 s": _wave(60),
    "3 of 10 samples missing": lambda at: Input(known=round(at * 10) % 10 > 2),
    "the clock jumps by an hour": lambda at: Input(jump_s=3600 if 60 < at < 60.15 else 0),
}
"""Online loads, for a machine of 8 CPUs; BE work wants everything, and its harm is `Machine`'s."""
OWN_TRACES: Mapping[str, Trace] = {
    "own waiting, 20 %": lambda _: Input(own=20),
    "own waiting, 50 %": lambda _: Input(own=50),
    "own bursts, 0.3 of 3 s": _bursts(3, 0.3, OWN, Input()),
    "own bursts, 1 of 10 s": _bursts(10, 1, OWN, Input()),
    "own bursts, 3 of 30 s": _bursts(30, 3, OWN, Input()),
    "own, 20 of 40 s": _bursts(40, 20, OWN, Input()),
}
"""Waiting that BE work does not cause at all: for `HARMLESS`."""
HARMLESS = Machine(harm_us=0.0)


class Moment(Struct, frozen=True, kw_only=True):
    """One step: what BE work used, and the state of the law that allowed it."""

    at: float
    took_s: float
    used: int
    state: HarmState
    machine: Machine
    item: Input

    @property
    def level(self) -> float:
        """The harm that BE work really caused."""
        return true_level(self.machine, self.item, self.used)

    @property
    def fair(self) -> int:
        """The most that BE work could use below the limits; its minimum at least."""
        return max(fair_use(self.machine, self.item), min(self.machine.least_milli, self.used))


def waited(machine: Machine, item: Input, used: float) -> PodWaiting:
    """What the online pod waits while BE work uses so much."""
    free = max(1.0, 1000.0 * machine.cpus - item.load)
    wakes = machine.wakes_per_cpu * item.load / 1000
    wait = wakes * machine.harm_us * min(1.0, used / free) ** machine.steep / 1000
    own = item.load * item.own / max(1.0, 100.0 - item.own)
    return PodWaiting(item.load, wait + own, wakes)


def true_level(machine: Machine, item: Input, used: float) -> float:
    """The harm in multiples of the limits, with the pod's own waiting known: what it waits with BE at its minimum."""
    least = waited(machine, item, min(used, machine.least_milli)).percent
    return level_of(waited(machine, item, used), least, CONFIG)


@lru_cache(maxsize=65536)
def fair_use(machine: Machine, item: Input) -> int:
    """The most that BE work can use while the harm is below the limits."""
    high = min(item.want, max(0, int(1000 * machine.cpus - item.load)))
    if true_level(machine, item, high) < 1:
        return high
    if machine.whole:
        fair = (milli for milli in range(high // 1000 * 1000, 0, -1000) if true_level(machine, item, milli) < 1)
        return next(fair, 0)
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if true_level(machine, item, middle) < 1 else (low, middle)
    return low


def run(
    trace: Trace,
    seconds: float,
    machine: Machine = MACHINE,
    *,
    config: HarmConfig = CONFIG,
    begin: int | None = None,
) -> Iterator[Moment]:
    """The law and the machine together."""
    source = random.Random(machine.seed)
    top = top_of(machine.cpus, machine.least_milli, config)
    least = machine.least_milli
    state, pod = start(top if begin is None else begin), PodJudgement()
    at = clock = 0.0
    late: PodWaiting | None = None
    since: float | None = None
    while at < seconds:
        took = interval_s(state, top, clock, config)
        item = trace(at)
        used = min(machine.usable(state.ceiling_milli), item.want, max(0, int(1000 * machine.cpus - item.load)))
        yield Moment(at=at, took_s=took, used=used, state=state, machine=machine, item=item)
        at += took
        clock += took + item.jump_s
        waiting = waited(machine, item, used)
        if machine.noise:
            wait = waiting.wait_milli * max(0.0, source.gauss(1.0, machine.noise))
            waiting = PodWaiting(waiting.run_milli, wait, waiting.waits)
        seen, late = late, waiting
        levels = None
        if item.known and seen is not None:
            since = quiet_since(since, clock, quiet=is_quiet(used, state.ceiling_milli, least))
            quiet = since is not None and clock - since >= config.settle_s
            pod = judge(pod, seen, clock, config, quiet=quiet)
            levels = {POD: pod.level}
        sample = HarmSample(
            top_milli=top,
            floor_milli=least,
            grain_milli=1000 if machine.whole else 1,
            used_milli=used,
            levels=levels,
        )
        state = step(state, sample, clock, config)


def turns(moments: Sequence[Moment]) -> int:
    """How often the ceiling turned from falling to rising or back."""
    return turns_of([moment.state.ceiling_milli for moment in moments])


def turns_of(ceilings: Sequence[int]) -> int:
    rises = [after > before for before, after in pairwise(ceilings) if after != before]
    return sum(before != after for before, after in pairwise(rises))


def lost_share(moments: Sequence[Moment]) -> float:
    """BE work that was not done although it would have been below the limits, as a share of that."""
    fair = lost = 0.0
    for moment in moments:
        could = moment.fair
        fair += could * moment.took_s
        lost += max(0, could - moment.used) * moment.took_s
    return lost / fair if fair else 0.0


def harmed_share(moments: Sequence[Moment], level: float = 1.0) -> float:
    """The share of the time in which the pod was really harmed, by BE work that could have been cut."""
    return harmed_shares(moments, level)[0]


def harmed_shares(moments: Sequence[Moment], *levels: float) -> list[float]:
    """The same for each of some levels."""
    harmed = [(m.level, m.took_s) for m in moments if m.used > 1.4 * m.machine.least_milli]
    whole = sum(m.took_s for m in moments)
    return [sum(took_s for number, took_s in harmed if number >= level) / whole for level in levels]


def settle_s(moments: Sequence[Moment], since: float) -> float:
    """Seconds from then until harm has ended for a second."""
    last = since
    for moment in moments:
        if moment.at >= since:
            if moment.level >= 1:
                last = moment.at + moment.took_s
            elif moment.at - last >= 1.0:
                break
    return last - since
