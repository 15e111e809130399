"""What online pods and host workloads wait for a CPU, ten times a second: the harm law's signal.

The cheapest source that there is: taskstats by process (2 µs each, all threads in one reply, on every cgroup version);
else the pod's CPU pressure (cgroup v2), from which waiting is estimated; else schedstat by thread. Bounded: in pods and
processes of one round.

Units: thousandths of a CPU, and of a task for waiting. Source: as `reconciler.signals.runqueue`.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.kept import FdCache
from cgroupfs.pressure import parse_totals
from cgroupfs.usage import SHORTEST_S
from reconciler.policies.waiting import PodWaiting
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.podcpu import parse_cpu_stat
from reconciler.signals.processes import OUTSIDE, PodProcesses
from reconciler.signals.runqueue import DelaySource, parse_schedstat
from reconciler.signals.taskstats import Delays, Taskstats
from state.model import Pod

_TRY_AGAIN_S: Final = 60.0
"""After taskstats was refused: the right can be given at any time."""
_PER_POD: Final = 64
"""Processes of one pod in one round; of more, the next ones follow in the next round."""
_THREADS: Final = 256
"""Threads of one process whose schedstat is read in one round."""
_TURN: Final = 4
"""This part of a round is for the pods in turn."""
_AT_ONCE: Final = 16
"""Pods whose processes are queried together."""
_RESTING: Final = 10
"""A pod that ran and waited less than a thousandth in its last round is read in one of so many rounds."""
_WAITS: Final = 1.0
"""Up to this share of waiting, in percent, the throttling of a pod is not read: two files each."""
_WHOLE: Final = -1
"""In place of a pid: the pod as a whole."""
_KEPT_OPEN: Final = 256
"""Files of groups with a quota that stay open between two rounds."""
_FORGET_S: Final = 30.0
"""A process that was not read for so long is forgotten."""


class _Last(NamedTuple):
    at_s: float
    delays: Delays


@final
class OnlineWait:
    """Measures what online pods wait for a CPU. ``problem``: why nothing is known; None: something is."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        *,
        root: str = "/",
        files: FileOps = REAL,
        taskstats: Callable[[], DelaySource] = Taskstats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hierarchy = hierarchy
        self._processes = PodProcesses(hierarchy, files)
        self._proc = f"{root.rstrip('/')}/proc"
        self._files = files
        self._kept = FdCache(_KEPT_OPEN) if files is REAL else None
        self._open = taskstats
        self._clock = clock
        self._bandwidth = "cpu" if hierarchy.version("cpu") == 1 else UNIFIED
        self._unified = hierarchy.trigger == UNIFIED
        self._socket: DelaySource | None = None
        self._try_at = float("-inf")
        self._last: dict[tuple[str, int], _Last] = {}
        """By the pod's uid and pid (`_WHOLE` for the pod as a whole)."""
        self._hits: dict[tuple[str, str], tuple[int, int]] = {}
        """By the pod's uid and group: the round in which its quota was read, and the periods throttled until then."""
        self._demand: dict[str, float] = {}
        """What each pod's tasks ran and waited in its last round (thousandths of a CPU)."""
        self._turn = 0
        """The number of this round."""
        self._reached = -_RESTING
        """The last round in which something could be read of a pod."""
        self._failed = False
        self._listed: Mapping[str, Sequence[int]] = {}
        self.problem: str | None = None
        self.processes = 0
        """Read in the last round."""

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def sample(
        self,
        pods: Mapping[str, Pod],
        first: Collection[str],
        listed: Mapping[str, Sequence[int]],
        *,
        most_pods: int,
        most_processes: int,
    ) -> dict[str, PodWaiting] | None:
        """One round. ``first``: uids that are read in any case; None: unknown, see ``problem``.

        A pod is in the result from its second reading on, unless its own quota stops it. ``listed``: the processes of
        those of ``pods`` that are host workloads.
        """
        self._listed = listed
        now = self._clock()
        if self._kept is not None:
            self._kept.rotate()
        self._prepare(now)
        self._forget(pods, now)
        found: dict[str, PodWaiting] = {}
        slices = TimeSlice()
        self.processes = reached = read = 0
        self._failed = False
        chosen = self._chosen(pods, first, most_pods)
        # In the loop, as the other readers: of cgroupfs, of procfs files without a lock that a user can hold (no memory
        # map), and of netlink, whose replies do not wait.
        for begin in range(0, len(chosen), _AT_ONCE):
            if begin:
                await slices.checkpoint()
            if (left := most_processes - self.processes) <= 0:
                break
            together = [pods[uid] for uid in chosen[begin : begin + _AT_ONCE]]
            read += len(together)
            for pod, delays in self._delays(together, now, left):
                reached += bool(delays)
                # BE work does not cause the wait of a pod that its own quota stops.
                if (
                    delays
                    and (waiting := self._enter(pod.uid, delays)) is not None
                    and not (waiting.percent >= _WAITS and self._throttled(pod))
                ):
                    found[pod.uid] = waiting
        if reached:
            self._reached = self._turn
        elif read and (self._failed or self._turn - self._reached > _RESTING):
            # Not after one round of pods that have no process: the others may only rest.
            self.problem = OUTSIDE if self._processes.outside else self.problem or "no processes of online pods found"
            return None
        self.problem = None
        for uid, waiting in found.items():
            self._demand[uid] = waiting.run_milli + waiting.wait_milli
        return found

    def _chosen(self, pods: Mapping[str, Pod], first: Collection[str], most: int) -> list[str]:
        """The pods of one round, each once: those named, the busiest of their last round, then the others in turn.

        Those that rest are read once in `_RESTING` rounds.
        """
        wanted = dict.fromkeys(uid for uid in first if uid in pods)
        turn, demand = self._turn, self._demand
        awake = [
            uid
            for uid in pods
            if uid not in wanted and (demand.get(uid, 1.0) >= 1.0 or (hash(uid) + turn) % _RESTING == 0)
        ]
        if len(wanted) + len(awake) <= most:
            return [*wanted, *awake]
        awake.sort(key=lambda uid: -demand.get(uid, 0.0))
        candidates, room = [*wanted, *awake], most - max(1, most // _TURN)
        chosen, others = candidates[:room], candidates[room:]
        begin = turn * most % len(others)
        return chosen + (others[begin:] + others[:begin])[: most - len(chosen)]

    def _prepare(self, now: float) -> None:
        if self._socket is not None or now < self._try_at:
            return
        self._try_at = now + _TRY_AGAIN_S
        try:
            self._socket = self._open()
        except SourceError as exc:
            self.problem = str(exc)

    def _forget(self, pods: Mapping[str, Pod], now: float) -> None:
        # Seldom, as it is a pass over all processes.
        if self._turn % 64 == 0 or len(self._last) > 65536:
            self._last = {
                key: last for key, last in self._last.items() if key[0] in pods and now - last.at_s < _FORGET_S
            }
            self._demand = {uid: demand for uid, demand in self._demand.items() if uid in pods}
            self._hits = {key: hits for key, hits in self._hits.items() if key[0] in pods}
        self._turn += 1

    def _delays(self, pods: Sequence[Pod], now: float, most: int) -> Iterator[tuple[Pod, Sequence[tuple[int, Delays]]]]:
        """What the processes of some pods have run and waited, in whole; empty where nothing could be read."""
        if self._socket is None and self._unified:
            for pod in pods:
                number = self._by_pressure(pod)
                # A user's processes have no group.
                threads = [] if number else self._by_thread(self._listed.get(pod.uid, ())[: min(_PER_POD, most)])
                yield pod, threads if number is None else [(_WHOLE, number)]
            return
        listed: dict[str, Sequence[int]] = {}
        for pod in pods:
            pids = self._listed[pod.uid] if pod.uid in self._listed else self._processes.get(pod, now)
            room = min(_PER_POD, most)
            # Other processes each round, so that a pod of many is read as a whole in time.
            if len(pids) > room:
                begin = self._turn * room % len(pids)
                pids = [*pids[begin:], *pids[:begin]][:room]
            listed[pod.uid] = pids
            most -= len(pids)
            self.processes += len(pids)
        replies = self._by_process([pid for pids in listed.values() for pid in pids]) if self._socket else None
        for pod in pods:
            pids = listed[pod.uid]
            if replies is not None:
                pairs = [(pid, replies[pid]) for pid in pids if pid in replies]
            else:
                pairs = [] if self._unified else self._by_thread(pids)
            if len(pairs) < len(pids):
                self._processes.ended(pod.uid)
            yield pod, pairs

    def _enter(self, uid: str, pairs: Sequence[tuple[int, Delays]]) -> PodWaiting | None:
        """The rates of one pod since each of its processes was read last; None: none of them was."""
        at_s = self._clock()
        run = wait = waits = 0.0
        known = False
        for pid, delays in pairs:
            before = self._last.get((uid, pid))
            if before is not None and at_s - before.at_s < SHORTEST_S:
                continue
            self._last[uid, pid] = _Last(at_s, delays)
            if before is None:
                continue
            ran, waited = delays.run_ns - before.delays.run_ns, delays.wait_ns - before.delays.wait_ns
            if ran >= 0 and waited >= 0:
                per_milli = (at_s - before.at_s) * 1e6
                run, wait, known = run + ran / per_milli, wait + waited / per_milli, True
                waits += max(0, delays.switches - before.delays.switches) / (at_s - before.at_s)
        return PodWaiting(run, wait, waits) if known else None

    def _by_process(self, pids: Sequence[int]) -> Mapping[int, Delays]:
        assert self._socket is not None
        try:
            return self._socket.query(pids)
        except (OSError, ValueError) as exc:
            # Its rights were removed, or memory is short.
            self.close()
            self.problem, self._failed = f"taskstats: {exc}", True
            return {}

    def _by_thread(self, pids: Sequence[int]) -> list[tuple[int, Delays]]:
        pairs: list[tuple[int, Delays]] = []
        for pid in pids:
            run_ns = wait_ns = switches = 0
            try:
                tids = self._files.groups(f"{self._proc}/{pid}/task")
            except OSError:
                continue
            read = False
            for tid in tids[:_THREADS]:
                try:
                    delays = parse_schedstat(self._files.read(f"{self._proc}/{pid}/task/{tid}", "schedstat"))
                except (OSError, ValueError):
                    continue
                read = True
                run_ns, wait_ns, switches = run_ns + delays[0], wait_ns + delays[1], switches + delays[2]
            if read:
                pairs.append((pid, Delays(run_ns, wait_ns, switches)))
        return pairs

    def _by_pressure(self, pod: Pod) -> Delays | None:
        """Pressure is an average over the CPUs on which the pod's tasks are; so is the use that it is compared with."""
        directory = self._hierarchy.directory(UNIFIED, pod.group.path)
        try:
            totals = parse_totals(self._files.read(directory, "cpu.pressure"))
            stat = parse_cpu_stat(self._files.read(directory, "cpu.stat"))
        except (OSError, ValueError):
            return None
        if stat.cpu_ns is None:
            return None
        return Delays(stat.cpu_ns, totals.some_us * 1000, 0)

    def _throttled(self, pod: Pod) -> bool:
        """Whether the pod's own quotas have stopped it since the last round, or may have: there was none.

        Pods without a quota are not read; of a host workload its group and those above are.
        """
        if pod.uid in self._listed:
            paths = _with_above(pod.group.path)
        else:
            limited = [
                container.group.path
                for container in pod.workload
                if container.spec is None or (container.spec.quota_us or 0) > 0
            ]
            # In a machine of its own, without groups for containers, the pod's directory alone has the kubelet's quota.
            paths = [pod.group.path, *limited] if limited or pod.sandbox is not None else []
        stopped, reads = False, self._files if self._kept is None else self._kept
        for path in paths:
            try:
                text = reads.read(self._hierarchy.directory(self._bandwidth, path), "cpu.stat")
            except OSError:
                continue
            hits = parse_cpu_stat(text).hit
            before = self._hits.get((pod.uid, path))
            stopped |= before is None or before[1] != hits or self._turn - before[0] > _RESTING
            self._hits[pod.uid, path] = self._turn, hits
        return stopped


def _with_above(path: str) -> list[str]:
    """A group and those above it but the root, which has no quota."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:count]) for count in range(len(parts), 0, -1)]
