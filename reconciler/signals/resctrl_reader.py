"""`llc.occupancy` and `memory.bandwidth` from resctrl's counters, as the resctrl actuator has read them.

These signals exist while the policy ``cache`` is enabled, as old as its last sweep.
"""

from collections.abc import Mapping
from typing import Final, final

from msgspec.structs import replace

from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import NODE, Sample, SampleFrame, pod_subject

_OCCUPANCY: Final = "llc.occupancy"
_BANDWIDTH: Final = "memory.bandwidth"
SIGNALS: Final = (_OCCUPANCY, _BANDWIDTH)
_MISSES: Final = "llc.misses"
_UNSURE: Final = 0.5
"""Misses no surer than this are not the last level's (AMD), or were counted for less than half of the time."""
_OFF: Final = "measured only with policies.cache enabled, on a machine whose resctrl counts it"


@final
class ResctrlReader(BaseReader):
    """`Reader` of the resctrl actuator's newest counters."""

    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        self._newest = shared.means.cache

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        """Enter what is known of the pods that there are, and the machine's bandwidth where all of it is known."""
        # Not read here: the monitoring groups are the actuator's, and a second reader would need last readings, too.
        use = self._newest()
        if use is None or use.at_s is None:
            return
        age_s = max(0.0, now - use.at_s)
        for uid, consumption in use.pods.items():
            if uid not in scene.view.pods:
                continue
            if consumption.occupancy_bytes is not None:
                sheet.put(pod_subject(uid), _OCCUPANCY, consumption.occupancy_bytes, age_s=age_s)
            if consumption.total_bytes_s is not None:
                sheet.put(pod_subject(uid), _BANDWIDTH, consumption.total_bytes_s, age_s=age_s)
        parts = [
            cache_consumption.total_bytes_s for domains in use.groups.values() for cache_consumption in domains.values()
        ]
        known = [part for part in parts if part is not None]
        if parts and len(known) == len(parts):
            sheet.put(NODE, _BANDWIDTH, sum(known), age_s=age_s)

    def problems(self) -> Mapping[str, str]:
        """Why they are unavailable, or not available of every pod at all times."""
        use = self._newest()
        return dict.fromkeys(SIGNALS, _OFF) if use is None else use.lacks


def misses_of(frame: SampleFrame | None, now: float) -> dict[str, Sample]:
    """The cache misses in a frame by pod uid, their age as of ``now``: input of the dynamic share.

    Samples with low confidence are left out: misses of the second level may be ten times those of the last.
    """
    if frame is None:
        return {}
    late_s = max(0.0, now - frame.at_s)
    return {
        uid: replace(sample, age_s=sample.age_s + late_s)
        for uid, pod in frame.pods.items()
        if (sample := frame.samples.get(pod.subject, {}).get(_MISSES)) is not None and sample.confidence > _UNSURE
    }
