"""BE containers that no limit holds back (`RealtimeWatch`), or that a limit holds back too long (`StartWatch`)."""

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple, final

from cgroupfs.errors import CgroupError, InputError
from cgroupfs.files import REAL, FileOps
from cgroupfs.naming import QosClass
from cgroupfs.scheduling import REAL_SCHEDULER, REALTIME, Scheduler
from cgroupfs.usage import UsageReader
from reconciler.control.reconciler import Reconciler
from reconciler.runtime.format import duration
from state.model import Pod, Setting
from state.pod_index import derived, index_of

_EVERY_S: Final = 10.0
"""Seconds between two readings of a pod, where that fits into `_MOST_READ`."""
_MOST_READ: Final = 1000
"""Threads read at once, about one millisecond; of a pod with more, the first ones."""
_MOST_PODS: Final = 32
"""Pods read at once: a listing takes some 10 us."""
_THROTTLED: Final = 0.2
"""A start that is late was throttled for at least this share of the time if the quota is the cause."""
_MOST: Final = 1000
"""Starts watched at once: a burst of more is not reported one by one anyway."""


@final
class RealtimeWatch:
    """Searches BE pods for real-time threads, which neither the idle class nor a quota limits, and reports them.

    Only a container with CAP_SYS_NICE, or a real-time limit of its own, can have them. Changes none: a thread's policy
    was set on purpose.

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
        """When each pod's threads were read; the one that waits for longest is first."""
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
            self._read_at = dict.fromkeys(pods.keys() - self._read_at.keys(), float("-inf")) | self._read_at
        room = _MOST_READ
        directories: dict[str, int | None] = {}
        for uid, read_at in list(islice(self._read_at.items(), _MOST_PODS)):
            if room <= 0 or 0.0 <= now - read_at < _EVERY_S:
                break
            del self._read_at[uid]  # and so to the end of the order
            self._read_at[uid] = now
            # A thread that sleeps delays no other. A pod that was reported is read all the same, for its end.
            if uid not in self._has and self._slept(pods[uid], directories):
                continue
            read, policy = self._policy_of(pods[uid], room)
            room -= max(1, read)  # to list a pod without threads costs, too
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


class _WatchedStart(NamedTuple):
    uid: str
    path: str
    bound: str
    """The group whose quota bounds it."""
    at: float
    throttled_ns: int


@final
class StartWatch:
    """Searches for starts that a quota of bypassd delays, and reports them. ``late``: how many were late so far."""

    def __init__(self, reconciler: Reconciler, usage: UsageReader) -> None:
        self._reconciler = reconciler
        self._usage = usage
        self._starts: dict[str, _WatchedStart] = {}
        self._over: set[str] = set()
        """Containers that the plan has as starting, and that are watched no more."""
        self.late = 0

    def check(self, now: float) -> None:
        """Watch new starts; report those that are late, once each. ``now``: monotonic seconds."""
        plan = self._reconciler.plan
        if plan is None or plan.pools.quota_milli is None:
            self._starts.clear()
            self._over.clear()
            return
        self._over &= plan.starts.created.keys()
        for cid in plan.starts.created:
            if cid not in self._starts and cid not in self._over and len(self._starts) < _MOST:
                self._begin(cid, now, plan.pools.quota_milli.keys())
        late_s = self._reconciler.policies.reclaimed.start.late_s
        for cid, start in list(self._starts.items()):
            # Files are read of late starts only: most starts end long before.
            if now - start.at >= late_s and not self._still_in_time(cid, start, now):
                del self._starts[cid]
                self._over.add(cid)

    def _begin(self, cid: str, now: float, quotas: Container[str]) -> None:
        pod = self._pod(cid)
        path = next((item.group.path for item in pod.containers if item.id == cid), None) if pod is not None else None
        if pod is None or path is None:
            return
        besteffort = self._reconciler.inventory.besteffort
        bound = besteffort if pod.qos is QosClass.BESTEFFORT and besteffort in quotas else path
        self._starts[cid] = _WatchedStart(pod.uid, path, bound, now, self._throttled_ns(bound) or 0)

    def _still_in_time(self, cid: str, start: _WatchedStart, now: float) -> bool:
        """False when the start is over or has been reported."""
        pod = self._pod(cid)
        procs = self._reconciler.actuator.judge.hierarchy.trigger_directory(start.path)
        if pod is None or self._reconciler.lane.not_yet_executed(cid, procs) is not True:
            return False
        throttled_ns = self._throttled_ns(start.bound)
        took = now - start.at
        if throttled_ns is None or throttled_ns - start.throttled_ns < _THROTTLED * took * 1e9:
            return True
        self.late += 1
        text = f"a container of {pod.title} has not started within {duration(took)}: {start.bound} is throttled"
        reason = "the BE budget, the start allowance is used up or too small"
        self._reconciler.actuator.judge.alert(
            "start",
            text,
            Setting(
                path=start.path,
                knob="cpu.quota",
                value=None,
                policy="reclaimed",
                reason=reason,
                pod_uid=pod.uid,
                container_id=cid,
            ),
        )
        return False

    def _pod(self, cid: str) -> Pod | None:
        return self._reconciler.inventory.pods.get(self._reconciler.inventory.owner(cid) or "")

    def _throttled_ns(self, path: str) -> int | None:
        try:
            return self._usage.read_cpu(path).throttled_ns
        except (CgroupError, InputError):
            return None
