"""What the laws of headroom promise under made loads of some days, and how much of it was there. Virtual time.

A node of 32 CPUs and 128 GiB with online workloads; each reading is ten seconds. BE work takes nothing: what it could
have is what online work and the system leave.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.law_track import LawTrack
from reconciler.headroom.memory import update
from reconciler.headroom.peaks import NodeReading, PodReading
from reconciler.headroom.promises import NodePromises, PromiseHour
from reconciler.headroom.smoothing import SmoothedReading
from state.memory import NodeMemoryReading
from state.model import Pools

CPUS: Final = 32
TOTAL: Final = 128 << 30
GIB: Final = 1 << 30
DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
STEP_S: Final = 10.0
_SYSTEM_MILLI: Final = 500.0
_SYSTEM_BYTES: Final = 4.0 * GIB
_POOLS: Final = Pools(
    online_cpus=CpuSet.span(CPUS),
    reserved=EMPTY,
    dedicated={},
    shared=CpuSet.span(CPUS),
    reclaimed=CpuSet.span(CPUS),
    budget_milli=1000 * CPUS,
)


class MadeWorkload(NamedTuple):
    """``cpu`` and ``memory``: of one pod at a time of the load (s); ``pods``: how many. Requests of one pod."""

    name: str
    pods: Callable[[float], int]
    cpu: Callable[[float], float]
    memory: Callable[[float], float]
    cpu_request: int = 1000
    memory_request: int = 2 * GIB


class Figures(NamedTuple):
    """One law under one load: all minutes after the warm-up, and those of the peak."""

    all: PromiseHour
    peak: PromiseHour
    known: int
    cold: int


def hour_of_day(at_s: float) -> float:
    """0.0-24.0."""
    return at_s % DAY_S / HOUR_S


def in_peak(at_s: float) -> bool:
    """The three hours of each day."""
    return 18 <= hour_of_day(at_s) < 21


def _level(low: float, high: float) -> Callable[[float], float]:
    return lambda at_s: high if in_peak(at_s) else low


def _daily(count: int) -> list[MadeWorkload]:
    """Services that use most of the node for three hours a day."""
    return [
        MadeWorkload(
            f"shop/Deployment/web-{number}", lambda _: 2, _level(500, 2500), _level(2.0 * GIB, 6.0 * GIB), 2000
        )
        for number in range(count)
    ]


def _wave(number: int) -> MadeWorkload:
    return MadeWorkload(
        f"shop/Deployment/wave-{number}",
        lambda _: 2,
        lambda at_s: 1200 + 900 * math.sin(2 * math.pi * at_s / DAY_S + number),
        lambda at_s: (4 + math.sin(2 * math.pi * at_s / DAY_S)) * GIB,
        2000,
    )


def _jobs(at_s: float) -> list[MadeWorkload]:
    """Twenty new pods each minute, each with an owner of its own, for one minute."""
    minute = int(at_s // 60)
    return [
        MadeWorkload(
            f"ci/Job/build-{minute}-{number}", lambda _: 1, lambda _: 100.0, lambda _: 0.1 * GIB, 100, GIB // 8
        )
        for number in range(20)
    ]


LOADS: Final[Mapping[str, Callable[[float], list[MadeWorkload]]]] = {
    "steady": lambda _: [
        MadeWorkload("shop/StatefulSet/db", lambda _: 4, _level(2000, 2000), _level(8.0 * GIB, 8.0 * GIB))
    ],
    "a peak of 3 h a day": lambda _: _daily(5),
    "waves of a day": lambda _: [_wave(number) for number in range(4)],
    "a peak, and 20 new owners a minute": lambda at_s: [*_daily(5), *_jobs(at_s)],
    "scaled from 2 to 8 pods in the peak": lambda _: [
        MadeWorkload(
            "shop/Deployment/api",
            lambda at_s: 8 if in_peak(at_s) else 2,
            _level(2500, 3000),
            _level(6.0 * GIB, 6.0 * GIB),
            2500,
        )
    ],
}


def run(load: str, law: HeadroomLaw, *, days: int = 3, warm_up_days: int = 2, seed: int = 1) -> Figures:
    """The law under one load; the days of the warm-up are not counted."""
    chance = random.Random(seed)
    config = HeadroomConfig()
    track = LawTrack(config, law)
    whole, peak = PromiseHour(), PromiseHour()
    for at_s, promises in _minutes(LOADS[load], track, days, chance):
        if at_s >= warm_up_days * DAY_S:
            whole.add(promises)
            if in_peak(at_s - 60.0):
                peak.add(promises)
    prediction = track.prediction
    return Figures(whole, peak, prediction.known if prediction else 0, prediction.cold if prediction else 0)


def _minutes(
    load: Callable[[float], list[MadeWorkload]], track: LawTrack, days: int, chance: random.Random
) -> Iterator[tuple[float, NodePromises]]:
    for minute in range(int(days * DAY_S // 60)):
        began = minute * 60.0
        workloads = load(began)
        pods = {work.name: work.pods(began) for work in workloads}
        cpu = dict.fromkeys(pods, 0.0)
        memory = {work.name: work.memory(began) for work in workloads}
        for step in range(int(60 / STEP_S)):
            at_s = began + step * STEP_S
            busy = _SYSTEM_MILLI
            for work in workloads:
                use = work.cpu(at_s) * chance.uniform(0.9, 1.1)
                cpu[work.name] += use * STEP_S / 60
                busy += use * pods[work.name]
            idle = max(0, int(1000 * CPUS - busy))
            sample = SmoothedReading(tops={0: 1000 * CPUS}, supply={0: idle}, budget=1000 * CPUS)
            track.add_cpu(sample, _POOLS, at_s)
        used = _SYSTEM_BYTES + sum(memory[name] * count for name, count in pods.items())
        node = NodeMemoryReading(total_bytes=TOTAL, available_bytes=max(0, int(TOTAL - used)), age_s=0.0)
        track.add_memory(update(node, 0, None, track.config, stale_after_s=10.0), node, began)
        readings = [
            PodReading(work.name, cpu[work.name], memory[work.name], work.cpu_request, work.memory_request)
            for work in workloads
            for _ in range(pods[work.name])
        ]
        yield began + 60, track.minute(readings, NodeReading(_SYSTEM_MILLI, _SYSTEM_BYTES), began + 60, counted=False)


def table() -> str:
    """A line for each load and law: medians, and the broken minutes of all and of the peak."""
    import msgspec

    from reconciler.cli.report import promise_figures

    lines = [
        "| load | law | CPU promised | had | broken | in the peak | memory promised | had | broken | known/cold |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for load in LOADS:
        for law in HeadroomLaw:
            result = run(load, law)
            both = [promise_figures(msgspec.to_builtins(hour)) for hour in (result.all, result.peak)]
            whole, peak = both
            assert whole is not None
            assert peak is not None
            cpu, memory = whole["cpu"], whole["memory"]
            lines.append(
                f"| {load} | {law} | {cpu['promised_milli'] / 1000:.1f} | {cpu['available_milli'] / 1000:.1f} "
                f"| {_share(cpu)} | {_share(peak['cpu'])} | {memory['promised_bytes'] / GIB:.0f} GiB "
                f"| {memory['available_bytes'] / GIB:.0f} GiB | {_share(memory)} | {result.known}/{result.cold} |"
            )
    return "\n".join(lines)


def _share(side: Mapping[str, int]) -> str:
    return f"{100 * side['broken'] / max(1, side['broken'] + side['kept']):.1f} %"
