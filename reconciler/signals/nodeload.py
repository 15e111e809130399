"""How busy the node is: CPU use by the sampler that the policies use, the load average, and its disks."""

from typing import Final, NamedTuple, final

from cgroupfs.bounded import shown, whole
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.devicestats import DiskDevices, DiskTimes, IoCounters, parse_diskstats
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import NODE
from state.model import NodeCpu

_DISKS: Final = ("disk.read", "disk.write", "disk.ops", "disk.busy", "disk.delay")
SIGNALS: Final = ("cpu.use", "cpu.idle", "load.1", "load.runnable", *_DISKS)


def parse_loadavg(text: str) -> tuple[float, int]:
    """The average of one minute, and how many tasks run or wait for a CPU now. Errors: `ValueError`."""
    parts = text.split()
    if len(parts) < 4:
        raise ValueError(f"{shown(text)} is not a line of /proc/loadavg")
    try:
        return float(parts[0]), whole(parts[3].partition("/")[0])
    except ValueError:
        raise ValueError(f"{shown(text)} is not a line of /proc/loadavg") from None


class _CpuBusy(NamedTuple):
    percent: float
    delay_ms: float | None


@final
class NodeLoad(BaseReader):
    """A `Reader`. **Cost**: 10 µs and 3 µs a block device that has ever been used."""

    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        self._proc = f"{shared.means.root.rstrip('/')}/proc"
        self._proc_files = shared.means.files
        self._devices = DiskDevices(shared.means.root)
        self._grew = CounterDelta()

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self._problems = {}
        if scene.view.cpu is not None:
            _enter_cpu(scene.view.cpu, sheet)
        try:
            load, runnable = parse_loadavg(self._proc_files.read(self._proc, "loadavg"))
        except (OSError, ValueError) as exc:
            self._problems |= dict.fromkeys(("load.1", "load.runnable"), f"/proc/loadavg: {exc}")
        else:
            sheet.put(NODE, "load.1", load)
            # This task is one of them.
            sheet.put(NODE, "load.runnable", max(0, runnable - 1))
        if not set(_DISKS).isdisjoint(scene.wanted):
            self._read_disks(sheet, now)

    def _read_disks(self, sheet: SampleSheet, now: float) -> None:
        try:
            pairs = parse_diskstats(self._proc_files.read(self._proc, "diskstats"))
        except OSError as exc:
            self._problems |= dict.fromkeys(_DISKS, f"/proc/diskstats: {exc.strerror}")
            return
        self._devices.refresh(now)
        disks = {device: times for device, times in pairs.values() if self._devices.counts(device)}
        if not disks:
            self._problems |= dict.fromkeys(_DISKS, "no disk activity since boot")
        self._grew.rotate()
        total = IoCounters()
        busiest: _CpuBusy | None = None
        for device, times in disks.items():
            total = total.plus(times.io)
            busy = self._busy(device, times)
            if busy is not None and (busiest is None or busy.percent > busiest.percent):
                busiest = busy
        grew = self._grew.grown(NODE, self._clock(), tuple(total)) if disks else None
        for index, signal in enumerate(_DISKS[:3]):
            if grew is not None and (rate := grew.rate(index)) is not None:
                sheet.put(NODE, signal, rate)
        if busiest is not None:
            sheet.put(NODE, "disk.busy", busiest.percent)
            # A disk without a request has delayed no task.
            sheet.put(NODE, "disk.delay", busiest.delay_ms or 0.0)

    def _busy(self, device: str, times: DiskTimes) -> _CpuBusy | None:
        grew = self._grew.grown(device, self._clock(), (times.busy_ms, times.waited_ms, times.io.ops))
        if grew is None or grew.by[0] is None:
            return None
        busy_ms, (waited_ms, ops) = grew.by[0], grew.by[1:]
        delay_ms = waited_ms / ops if ops and waited_ms is not None else None
        return _CpuBusy(min(100.0, busy_ms / grew.interval_s / 10), delay_ms)


def _enter_cpu(cpu: NodeCpu, sheet: SampleSheet) -> None:
    """Without an age nothing is known; no value is guessed."""
    if cpu.age_s is not None:
        sheet.put(NODE, "cpu.use", cpu.busy_milli, age_s=cpu.age_s)
        sheet.put(NODE, "cpu.idle", 1000 * sum(cpu.idle.values()), age_s=cpu.age_s)
