"""CPU use by class: counters of the machine and of the pods, combined into one `NodeCpu`.

Where two readings leave a choice, the result gives BE work less, not more.
Units: ticks of /proc/stat, nanoseconds of pods; results are thousandths of a CPU. Source: kernel documentation,
filesystems/proc (1.7, /proc/stat).
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import shown
from cgroupfs.cpuset import CpuSet
from cgroupfs.lines import lines_of
from cgroupfs.usage import SHORTEST_S
from reconciler.policies.idle_buffer import IdleSample
from state.model import NodeCpu, PodClass

ONLINE: Final = "online"
RECLAIMED: Final = "reclaimed"
"""Names of the two sides, where they are sampled like two pods."""
_CPU: Final = 1000
_WOBBLE: Final = 2
"""Ticks that iowait may step back on its own."""


class CpuTicks(NamedTuple):
    """Ticks of one CPU since boot."""

    busy: int
    idle: int


class CpuReading(Struct, frozen=True, kw_only=True):
    """The machine's and the pods' counters at one moment of the monotonic clock. ``pods``: CPU nanoseconds by uid."""

    at_s: float
    cpus: Mapping[int, CpuTicks]
    pods: Mapping[str, int] = {}


def parse_stat(text: str) -> dict[int, CpuTicks]:
    """The ``cpuN`` lines of /proc/stat. Offline CPUs have none.

    Errors: `ValueError` without such a line, or with one that is not numbers.
    """
    cpus: dict[int, CpuTicks] = {}
    for line in lines_of(text):
        if not line.startswith("cpu"):
            break  # they are first, and the interrupt line below them is long
        if line.startswith("cpu "):
            continue
        try:
            # The ninth and tenth are guest time, which is inside user time already.
            name, user, nice, system, idle, *more = line.split()[:9]
            waiting, *rest = map(int, more) if more else (0,)
            # iowait is idle: a CPU that waits for a disk runs any other task. (rubik counts it as busy, which throttles
            # CPU work because of a disk.)
            unused = int(idle) + waiting
            # Steal, in the rest, is busy: the hypervisor took that time, and no pod accounts for it.
            cpus[int(name[3:])] = CpuTicks(int(user) + int(nice) + int(system) + sum(rest), unused)
        except ValueError as exc:
            raise ValueError(f"{shown(line)} is not a CPU line of /proc/stat") from exc
    if not cpus:
        raise ValueError(f"no cpuN line in {text[:60]!r}")
    return cpus


def idle_shares(before: Mapping[int, CpuTicks], after: Mapping[int, CpuTicks]) -> dict[int, float]:
    """Idle share of each CPU between two readings, 0.0-1.0; a CPU without a usable difference is missing."""
    shares: dict[int, float] = {}
    for cpu, now in after.items():
        then = before.get(cpu)
        if then is None:
            continue  # plugged in since
        busy, idle = now.busy - then.busy, now.idle - then.idle
        # iowait may step back by a tick or two on its own; a counter that restarted steps back by far more.
        if -_WOBBLE <= idle < 0:
            idle = 0
        # Both are 0 where the two readings are in one tick.
        if busy < 0 or idle < 0 or busy + idle == 0:
            continue
        shares[cpu] = idle / (busy + idle)
    return shares


def idle_milli(cpu: NodeCpu | None, cpus: CpuSet) -> tuple[float, float] | None:
    """Idle time of some CPUs together in thousandths of a CPU, and its age in seconds; None: unknown of all of them."""
    if cpu is None or cpu.age_s is None:
        return None
    known = [cpu.idle[number] for number in cpus if number in cpu.idle]
    # A CPU without a usable difference is busy, as everywhere.
    return (1000.0 * sum(known), cpu.age_s) if known else None


def node_cpu(before: CpuReading, after: CpuReading, classes: Mapping[str, PodClass]) -> NodeCpu | None:
    """CPU use between two readings; None when they are too close or in the wrong order.

    Time of a removed pod is neither side's: it is system use.
    """
    interval_s = after.at_s - before.at_s
    if interval_s < SHORTEST_S:
        return None
    idle = idle_shares(before.cpus, after.cpus)
    # A CPU without a usable difference is busy.
    busy = sum(_CPU - int(idle.get(cpu, 0.0) * _CPU) for cpu in after.cpus)
    most_ns = int(interval_s * len(after.cpus) * 1e9)
    used_ns = {True: 0, False: 0}
    for uid, total in after.pods.items():
        then = before.pods.get(uid)
        # New since the last reading, or counted again: the counter is the use since. More than the machine has is older
        # use that cannot be dated, and remains system use.
        used = total - then if then is not None and total >= then else total
        if used <= most_ns:
            # A pod of unknown class is online.
            used_ns[classes.get(uid, PodClass.SHARED).online] += used
    return NodeCpu(
        busy_milli=busy,
        online_milli=_milli(used_ns[True], interval_s),
        reclaimed_milli=_milli(used_ns[False], interval_s),
        idle=idle,
        interval_s=interval_s,
        age_s=0.0,
    )


def idle_sample(
    before: CpuReading, after: CpuReading, cpus: CpuSet, *, reclaimed_ns: tuple[int | None, int | None] = (None, None)
) -> IdleSample:
    """Input of the idle buffer: idle time on ``cpus``, and BE use from two readings of its directory's counter.

    A CPU without a usable difference counts as busy; if none has one, idle time is unknown.
    """
    top = _CPU * len(cpus)
    interval_s = after.at_s - before.at_s
    shares = idle_shares(before.cpus, after.cpus) if interval_s >= SHORTEST_S else {}
    known = [shares[cpu] for cpu in cpus if cpu in shares]
    then, now = reclaimed_ns
    return IdleSample(
        top_milli=top,
        idle_milli=int(sum(known) * _CPU) if known else None,
        reclaimed_milli=_milli(now - then, interval_s)
        if then is not None and now is not None and now >= then and interval_s >= SHORTEST_S
        else None,
    )


@final
class UseBySide:
    """Online and BE use from the directories' own counters, instead of one read for each pod.

    The besteffort directory counts all BE pods and kubepods counts everything, removed pods included; only *odd* pods
    (BE by label outside besteffort, online ones inside) are read one by one.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, int] = {}
        self._online = 0
        self._reclaimed = 0

    def add(
        self, used: Mapping[str, int], all_pods: str, besteffort: str, odd: Mapping[str, PodClass]
    ) -> tuple[int, int]:
        """Add counters by group path (ns); returns both sides' use since the first call (ns), never falling.

        A group that is missing in ``used`` or was counted again adds nothing.
        """
        # A new odd pod counts on its directory's side until it has been read twice.
        grown = {path: max(0, ns - self._before[path]) for path, ns in used.items() if path in self._before}
        self._before = dict(used)
        reclaimed = grown.get(besteffort, 0)
        for path, pod_class in odd.items():
            reclaimed += -grown.get(path, 0) if pod_class.online else grown.get(path, 0)
        # The counters of the directory and of its odd pods are not read at one moment.
        reclaimed = max(0, reclaimed)
        self._reclaimed += reclaimed
        self._online += max(0, grown.get(all_pods, 0) - reclaimed)
        return self._online, self._reclaimed


@final
class CpuSampler:
    """Keeps the last reading and the last result, so that a missing reading shows as age and not as a wrong number."""

    def __init__(self) -> None:
        self._before: CpuReading | None = None
        self._last: NodeCpu | None = None
        self._last_at_s = 0.0

    def sample(self, reading: CpuReading, classes: Mapping[str, PodClass]) -> NodeCpu | None:
        """Take a reading, and return CPU use since the last one; until there are two: None."""
        if self._before is None or reading.at_s < self._before.at_s:
            self._before = reading
            return self.current(reading.at_s)
        cpu = node_cpu(self._before, reading, classes)
        if cpu is not None:
            self._before, self._last, self._last_at_s = reading, cpu, reading.at_s
        return self.current(reading.at_s)

    def current(self, now: float) -> NodeCpu | None:
        if self._last is None:
            return None
        return replace(self._last, age_s=max(0.0, now - self._last_at_s))


def _milli(ns: int, interval_s: float) -> int:
    return max(0, round(ns / interval_s / 1_000_000))


SPAN_S: Final = 1.0
"""The load is of this long: shorter spans count single ticks of the kernel's clock."""


@final
class LoadMeter:
    """Load of the machine and its variation, for `quota_turbo`: keeps a second's readings and a window's loads."""

    def __init__(self) -> None:
        self._readings: deque[CpuReading] = deque()
        self._loads: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def forget(self) -> None:
        """A reading is missing: nothing is known of how steady the machine was."""
        self._readings.clear()
        self._loads.clear()
        self._since = None

    def add(self, reading: CpuReading, window_s: float) -> tuple[float | None, float | None]:
        """Add a reading; returns the load of the last second, and the spread of the window's loads (percent points).

        Each is None until the readings cover that time; readings that go back in time restart both.
        """
        now = reading.at_s
        if self._readings and now < self._readings[-1].at_s:
            self.forget()
        # The first one remains the newest that is at least a second old.
        while len(self._readings) > 1 and now - self._readings[1].at_s >= SPAN_S:
            self._readings.popleft()
        self._readings.append(reading)
        before = self._readings[0]
        if now - before.at_s < max(SHORTEST_S, SPAN_S * 0.9) or not reading.cpus:
            return None, None
        shares = idle_shares(before.cpus, reading.cpus)
        load = 100.0 * (1.0 - sum(shares.get(cpu, 0.0) for cpu in reading.cpus) / len(reading.cpus))
        if self._since is None:
            self._since = now
        while self._loads and now - self._loads[0][0] > window_s:
            self._loads.popleft()
        self._loads.append((now, load))
        if now - self._since < window_s:
            return load, None
        loads = [value for _, value in self._loads]
        return load, max(loads) - min(loads)
