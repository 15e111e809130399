"""The use of BE pods beside a victim, and whether the victim's share of a resource has collapsed. Pure.

Detectors that see a shortage check here whether any BE work takes part in it: an effect of the victim and other online
pods on themselves is not interference.
"""

from bisect import bisect_right
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from cgroupfs.cpuset import CpuSet
from reconciler.detectors.base import VictimView
from reconciler.detectors.windows import spacing_s

RECENT_S: Final = 10.0
_BEFORE: Final = 10
"""Samples before the recent ones that make a past."""


@lru_cache(maxsize=512)
def cpu_mask(cpus: str) -> int:
    """A CPU list as bits; 0: not known."""
    return CpuSet.parse(cpus).mask


@lru_cache(maxsize=2048)
def overlap(ours: str, theirs: str) -> float:
    """The part of their CPUs that the victim shares; 1.0 where one of the sets is unknown: they may run anywhere."""
    our, their = cpu_mask(ours), cpu_mask(theirs)
    return (our & their).bit_count() / their.bit_count() if our and their else 1.0


def be_use(sight: VictimView, signal: str, *, near: bool = False) -> float | None:
    """What all BE pods and BE host workloads have of a signal together now; None: it is measured of none that exists.

    ``near``: by the part of each pod's CPUs that the victim runs on.
    """
    # Without ``near`` it is the same for all online victims, none of which is BE itself.
    if not near and (sight.pod is None or sight.pod.pod_class.online):
        return sight.memo(_be_use, signal)
    return _be_use(signal, sight, near=near)


def _be_use(signal: str, sight: VictimView, *, near: bool = False) -> float | None:
    total = 0.0
    measured = missing = False
    for uid, pod in chain(sight.frame.pods.items(), sight.frame.hosts.items()):
        if pod.pod_class.online or (sight.pod is not None and uid == sight.pod.uid):
            continue
        value = sight.value(signal, pod.subject)
        if value is None:
            missing = True
            continue
        measured = True
        total += value * (overlap(sight.pod.cpus, pod.cpus) if near and sight.pod is not None else 1.0)
    return None if missing and not measured else total


class NeighbourChange(NamedTuple):
    """The last 10 s of a signal against what was usual before (the median of the kept past)."""

    now: float
    usual: float

    @property
    def ratio(self) -> float:
        """1.0: as usual."""
        return self.now / self.usual if self.usual > 0 else 1.0


def change(sight: VictimView, signal: str) -> NeighbourChange | None:
    """How a signal of the victim has changed; None: no fresh sample, or too little of a past."""
    series = sight.history.series(sight.subject, signal)
    newest = sight.value(signal)
    if series is None or newest is None:
        return None
    since = sight.now - max(RECENT_S, spacing_s(sight, signal))
    times, values = series.all()
    place = bisect_right(times, since)
    if place < _BEFORE:
        return None
    before, recent = sorted(values[:place]), values[place:] or [newest]
    return NeighbourChange(sum(recent) / len(recent), before[len(before) // 2])


def collapsed(sight: VictimView, signal: str, left_fraction: float) -> tuple[NeighbourChange, bool] | None:
    """Whether the victim gets less than ``left_fraction`` of its usual amount, while it works as much as before.

    None: unknown.
    """
    result, work = change(sight, signal), change(sight, "cpu.use")
    if result is None or work is None:
        return None
    return result, result.ratio < left_fraction and work.ratio >= _WORKS


_WORKS: Final = 0.8
"""Of its usual CPU time: with less a victim has less to do."""
