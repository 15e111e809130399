"""Disk reads and writes of each pod: io.stat on v2, the blkio throttling counters on v1.

**Cost**: one read a pod on v2, two on v1; two for each container on v1 kernels without the recursive files.
"""

from collections.abc import Mapping
from typing import Final, final

from cgroupfs.hierarchy import UNIFIED
from cgroupfs.kept import GroupDirectories
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.devicestats import DiskDevices, IoCounters, blkio, parse_io_stat
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.model import Pod

SIGNALS: Final = ("disk.read", "disk.write", "disk.ops")
# v1 counts writes of the page cache in the root group: a pod's buffered writes are only in v2's numbers.
_BYTES: Final = "blkio.throttle.io_service_bytes"
_OPS: Final = "blkio.throttle.io_serviced"
_EMPTY: Final = ("", "Total 0\n")
_NONE: Final = "no blkio or io controller is mounted"
_NOT_HERE: Final = "the pods' groups have no disk counters here"


@final
class PodDisk(BaseReader):
    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        hierarchy = shared.means.hierarchy
        self._places = GroupDirectories(hierarchy, "blkio" if hierarchy.version("blkio") == 1 else UNIFIED)
        self._v1 = hierarchy.version("blkio") == 1
        self._unified = hierarchy.version("io") == 2
        self._devices = DiskDevices(shared.means.root)
        self._grew = CounterDelta()
        self._recursive = True

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        if not self._v1 and not self._unified:
            self._problems = dict.fromkeys(SIGNALS, _NONE)
            return
        self._grew.rotate()
        self._devices.refresh(now)
        slices = TimeSlice()
        reported = False
        for uid, pod in scene.view.pods.items():
            counters = self._read_pod(pod)
            if counters is not None:
                reported = True
                grew = self._grew.grown(pod.group.inode or pod.group.path, self._clock(), tuple(counters))
                if grew is not None:
                    sheet.enter(f"pod:{uid}", {signal: grew.rate(index) for index, signal in enumerate(SIGNALS)})
            await slices.checkpoint()
        self._problems = dict.fromkeys(SIGNALS, _NOT_HERE) if scene.view.pods and not reported else {}

    def _read_pod(self, pod: Pod) -> IoCounters | None:
        path = pod.group.path
        try:
            if not self._v1:
                return self._sum(parse_io_stat(self._files.read(self._places(path), "io.stat")))
            if self._recursive:
                try:
                    return self._blkio(path, "_recursive")
                except FileNotFoundError:
                    # Either the group was removed or the kernel has no such files; another pod shows which.
                    self._blkio(path, "")
                    self._recursive = False
            parts = [
                self._blkio(group, "") for group in (path, *(container.group.path for container in pod.containers))
            ]
        except OSError:
            return None
        total = IoCounters()
        for part in parts:
            total = total.plus(part)
        return total

    def _blkio(self, path: str, kind: str) -> IoCounters:
        directory = self._places(path)
        served = self._files.read(directory, f"{_BYTES}{kind}")
        # Most groups have never had a request of their own: the counts are empty then.
        if served in _EMPTY:
            return IoCounters()
        return self._sum(blkio(served, self._files.read(directory, f"{_OPS}{kind}")))

    def _sum(self, devices: Mapping[str, IoCounters]) -> IoCounters:
        total = IoCounters()
        for device, io in devices.items():
            if self._devices.counts(device):
                total = total.plus(io)
        return total
