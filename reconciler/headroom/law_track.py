"""What one law would have promised over recorded or made readings, and whether that was there. Pure.

For comparing laws. BE work's use is a fact of the series: it does not grow where a law promises more.
"""

from collections.abc import Sequence
from typing import Final, final

from msgspec.structs import replace

from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.memory import reserve_bytes, smoothing_of
from reconciler.headroom.peaks import (
    NodeReading,
    PeakPrediction,
    PodReading,
    WorkloadPeaks,
    cpu_left,
    memory_left,
)
from reconciler.headroom.promises import NodePromises, PromiseHour, PromiseWindow
from reconciler.headroom.smoothing import SmoothedAmount, SmoothedReading, available, step, step_below
from reconciler.runtime.cooperative import all_steps
from state.memory import NodeMemoryReading
from state.model import Pools


@final
class LawTrack:
    """What one law would have promised, and whether that was there. Times: as those of `reconciler.headroom.peaks`."""

    def __init__(self, config: HeadroomConfig, law: HeadroomLaw) -> None:
        self.config: Final = replace(config, law=law)
        self.hour = PromiseHour()
        self.prediction: PeakPrediction | None = None
        self._peaks = WorkloadPeaks()
        self._cpu = SmoothedAmount()
        self._memory = SmoothedAmount()
        self._windows = PromiseWindow(), PromiseWindow()

    def interrupted(self) -> None:
        """The series has a gap: the readings before it are not of the same window; what was learned remains."""
        self._cpu, self._memory = SmoothedAmount(), SmoothedAmount()

    def add_cpu(self, sample: SmoothedReading, pools: Pools, at_s: float) -> None:
        law = self.config.smoothing
        if self.config.law is HeadroomLaw.HISTOGRAM:
            left = None if self.prediction is None else cpu_left(self.prediction, pools)
            self._cpu = step_below(self._cpu, sample, left, at_s, law)
        else:
            self._cpu = step(self._cpu, sample, at_s, law)
        self._windows[0].add(self._cpu.total, available(sample))

    def add_memory(self, supply: SmoothedReading, node: NodeMemoryReading, at_s: float) -> None:
        law = smoothing_of(self.config)
        if self.config.law is HeadroomLaw.HISTOGRAM:
            reserve = reserve_bytes(node, self.config)
            left = None if self.prediction is None else memory_left(self.prediction, node, reserve)
            self._memory = step_below(self._memory, supply, left, at_s, law)
        else:
            self._memory = step(self._memory, supply, at_s, law)
        self._windows[1].add(self._memory.total, available(supply))

    def minute(self, pods: Sequence[PodReading], node: NodeReading, at_s: float, *, counted: bool) -> NodePromises:
        """A minute is over. ``counted``: it is added to `hour`."""
        if self.config.law is HeadroomLaw.HISTOGRAM:
            self.prediction = all_steps(self._peaks.minute(pods, node, at_s))
        promises = NodePromises(self.config.law.value, self._windows[0].minute(), self._windows[1].minute())
        if counted:
            self.hour.add(promises)
        return promises
