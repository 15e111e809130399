"""The newest samples of the monitor, for the parts below it that plan by them; nothing while it does not run."""

import time
from collections.abc import Mapping
from typing import final

from reconciler.placement.provision import pod_indicators
from state.cpu import PodIndicators
from state.evidence import Sample, SampleFrame


@final
class LatestSamples:
    """Holds the monitor's newest frame. Made first; the monitor puts its frames."""

    def __init__(self) -> None:
        self._frame: SampleFrame | None = None
        self._followed = False

    def put(self, frame: SampleFrame | None, *, followed: bool = False) -> None:
        """The newest frame; None: nothing is measured. ``followed``: pools follow signals of their pods."""
        self._frame, self._followed = frame, followed

    def misses(self) -> Mapping[str, Sample]:
        """The newest cache misses by pod uid; empty while they are not counted."""
        if self._frame is None:
            return {}
        from reconciler.signals.resctrl_reader import misses_of  # nothing is measured on most nodes

        return misses_of(self._frame, time.monotonic())

    def indicators(self) -> Mapping[str, PodIndicators]:
        """What the sizes of pools follow besides CPU use, by pod uid; empty where they follow nothing else."""
        return pod_indicators(self._frame, time.monotonic()) if self._frame is not None and self._followed else {}
