"""Starts of BE containers that wait for CPU time because a quota of bypassd throttles them: an alert, and a count.

Called once a second with what the last plan has of starts; a container is read only once it is late.
"""

from collections.abc import Container
from typing import Final, NamedTuple, final

from cgroupfs.errors import CgroupError, InputError
from cgroupfs.naming import QosClass
from cgroupfs.usage import UsageReader
from reconciler.control.reconciler import Reconciler
from reconciler.runtime.format import duration
from state.model import Pod, Setting

_THROTTLED: Final = 0.2
"""From this share of the time on the quota is why a start is late."""
_MOST: Final = 1000
"""Starts watched at once: a burst of more is not reported one by one anyway."""


class _WatchedStart(NamedTuple):
    uid: str
    path: str
    bound: str
    """The group whose quota bounds it."""
    at: float
    throttled_ns: int


@final
class StartWatch:
    """Searches for starts that a quota delays, and reports them. ``late``: how many starts were late so far."""

    def __init__(self, reconciler: Reconciler, usage: UsageReader) -> None:
        self._reconciler = reconciler
        self._usage = usage
        self._starts: dict[str, _WatchedStart] = {}
        self.late = 0

    def check(self, now: float) -> None:
        """Watch new starts; report those that are late, once each. ``now``: monotonic seconds."""
        plan = self._reconciler.plan
        if plan is None or plan.pools.quota_milli is None:
            self._starts.clear()
            return
        for cid in plan.starts.created:
            if cid not in self._starts and len(self._starts) < _MOST:
                self._begin(cid, now, plan.pools.quota_milli.keys())
        late_s = self._reconciler.policies.reclaimed.start.late_s
        for cid, start in list(self._starts.items()):
            if now - start.at >= late_s and not self._still_in_time(cid, start, now):
                del self._starts[cid]

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
