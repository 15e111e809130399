"""Finds BE containers with real-time threads: neither the idle class of their pod nor a quota holds such threads back.

Only a container with CAP_SYS_NICE, or a real-time limit of its own, can have them. Called with each sample; reads some
threads each time, those of pods that have run since, in turn: a thread that sleeps holds nothing up. Nothing is
written: a policy that a thread has was given on purpose.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import nsmallest
from itertools import islice
from typing import Final, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.scheduling import REAL_SCHEDULER, REALTIME, Scheduler
from reconciler.control.reconciler import Reconciler
from state.model import Pod, Setting
from state.pod_index import derived, index_of

_EVERY_S: Final = 10.0
"""Seconds between two readings of a pod, where that fits into `_MOST_READ`."""
_MOST_READ: Final = 1000
"""Threads read at once, about one millisecond; of a pod with more, the first ones."""
_MOST_PODS: Final = 32
"""Pods read at once: a listing takes some 10 us."""


@final
class RealtimeWatch:
    """Searches BE pods for real-time threads, and reports them.

    ``found``: how many pods had real-time threads so far.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        cpu_ns: Callable[[str], int | None],
        files: FileOps = REAL,
        *,
        threads: Callable[[str], Iterable[int]] | None = None,
        scheduler: Scheduler = REAL_SCHEDULER,
    ) -> None:
        """``cpu_ns``: a group's CPU time. ``threads``: those of a group and below it; None: as ``files`` have them."""
        self._reconciler = reconciler
        self._files = files
        self._cpu_ns = cpu_ns
        self._table: Mapping[str, Pod] = {}
        self._threads = threads
        self._scheduler = scheduler
        self._read_at: dict[str, float] = {}
        self._ran: dict[str, tuple[int | None, int | None]] = {}
        """CPU time of a pod's directory and of the pod, before its threads were read last."""
        self._has: dict[str, str] = {}
        self.found = 0

    def check(self, now: float) -> frozenset[str]:
        """The uids of BE pods with real-time threads, from the last reading of each. ``now``: monotonic seconds."""
        table = self._reconciler.inventory.table
        pods = derived(table, _with_containers)
        if table is not self._table:
            self._table = table
            for known in (self._read_at, self._has, self._ran):
                for uid in known.keys() - pods.keys():
                    del known[uid]
        never = float("-inf")
        room = _MOST_READ
        directories: dict[str, int | None] = {}
        for uid in nsmallest(_MOST_PODS, pods, key=lambda uid: self._read_at.get(uid, never)):
            if room <= 0 or 0.0 <= now - self._read_at.get(uid, never) < _EVERY_S:
                break
            self._read_at[uid] = now
            if uid not in self._has and self._slept(pods[uid], directories):
                continue
            read, policy = self._policy_of(pods[uid], room)
            room -= max(1, read)
            if policy is None:
                self._has.pop(uid, None)
            elif uid not in self._has:
                self._report(pods[uid], policy)
                self._has[uid] = policy
        return frozenset(self._has)

    def _slept(self, pod: Pod, directories: dict[str, int | None]) -> bool:
        """Whether nothing of the pod ran since its threads were read. ``directories``: their CPU time, read now."""
        directory = pod.group.path.rpartition("/")[0]
        if directory not in directories:
            directories[directory] = self._cpu_ns(directory)
        before = self._ran.get(pod.uid)
        if before is not None and before[0] is not None and before[0] == directories[directory]:
            return True
        now = directories[directory], self._cpu_ns(pod.group.path)
        self._ran[pod.uid] = now
        return before is not None and before[1] is not None and before[1] == now[1]

    def _policy_of(self, pod: Pod, most: int) -> tuple[int, str | None]:
        """How many threads were read, and the real-time policy of the first that has one."""
        if self._threads is None:
            from reconciler.signals.processes import PodProcesses  # loaded with the first BE pod

            self._threads = PodProcesses(self._reconciler.actuator.judge.hierarchy, self._files).threads_of_group
        read = 0
        for tid in islice(self._threads(pod.group.path), most):
            read += 1
            try:
                policy = self._scheduler.policy(tid)
            except OSError:
                continue  # it has exited, or is outside of this PID namespace
            if policy in REALTIME:
                return read, REALTIME[policy]
        return read, None

    def _report(self, pod: Pod, policy: str) -> None:
        self.found += 1
        self._reconciler.actuator.judge.alert(
            "realtime",
            f"{pod.title} has real-time threads ({policy}): they run before every online pod, whatever its limits are",
            Setting(
                path=pod.group.path,
                knob="thread.policy",
                value=None,
                policy="idle_class",
                reason="the idle class and quotas do not apply to real-time threads",
                pod_uid=pod.uid,
            ),
        )


def _with_containers(pods: Mapping[str, Pod]) -> Mapping[str, Pod]:
    return {pod.uid: pod for pod in index_of(pods).reclaimed if pod.containers}
