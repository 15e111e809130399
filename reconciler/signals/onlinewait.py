"""What online pods wait for a CPU, ten times a second: the harm law's signal.

The cheapest source that there is: taskstats by process (2 µs each, all threads in one reply, on every cgroup version);
else the pod's CPU pressure (cgroup v2), from which waiting is estimated; else schedstat by thread. Bounded: in pods and
processes of one round. First come the pods that the caller names and the busiest of their last round, in the rest
of the round the others in turn; a rate is always over the time since that process was read last.

A pod that its own quota stops waits as well, which BE work does not cause: it is left out of the round, as is one of
which nothing is known. All reads are of cgroupfs, procfs files without a lock that a user can hold (no memory map), and
netlink, whose replies do not wait: they are done in the loop, a few at a time, as the other readers' are.

Units: thousandths of a CPU, and of a task for waiting. Source: as `reconciler.signals.runqueue`.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, final

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from reconciler.policies.base import containers_of
from reconciler.policies.waiting import PodWaiting
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.growth import SHORTEST_S
from reconciler.signals.podcpu import parse_cpu_stat
from reconciler.signals.processes import OUTSIDE, PodProcesses
from reconciler.signals.psi import parse_totals
from reconciler.signals.runqueue import DelaySource, parse_schedstat
from reconciler.signals.taskstats import Delays, Taskstats
from state.model import Pod

_TRY_AGAIN_S: Final = 60.0
_PER_POD: Final = 64
"""Processes of one pod in one round; of more, the next ones follow in the next round."""
_THREADS: Final = 256
"""Threads of one process whose schedstat is read in one round."""
_TURN: Final = 4
"""This part of a round is for the pods in turn."""
_FORGET_S: Final = 30.0
"""A process that was not read for so long is forgotten."""


class _Last(NamedTuple):
    at_s: float
    delays: Delays


@final
class OnlineWait:
    """See the module's text. ``problem``: why nothing is known; None: something is."""

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
        self._open = taskstats
        self._clock = clock
        self._bandwidth = "cpu" if hierarchy.version("cpu") == 1 else UNIFIED
        self._unified = hierarchy.trigger == UNIFIED
        self._socket: DelaySource | None = None
        self._try_at = float("-inf")
        self._last: dict[tuple[str, int], _Last] = {}
        self._hits: dict[tuple[str, str], int] = {}
        self._demand: dict[str, float] = {}
        self._turn = 0
        self.problem: str | None = None
        self.processes = 0
        """Read in the last round."""

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def sample(
        self, pods: Mapping[str, Pod], first: Collection[str], *, most_pods: int, most_processes: int
    ) -> dict[str, PodWaiting] | None:
        """One round. ``first``: uids that are read in any case; None: unknown, see ``problem``.

        A pod is in the result from its second reading on.
        """
        now = self._clock()
        self._prepare(now)
        self._forget(pods, now)
        found: dict[str, PodWaiting] = {}
        slices = TimeSlice()
        self.processes = reached = 0
        for uid in self._chosen(pods, first, most_pods):
            pod = pods[uid]
            reached += bool(self._read(pod, found, now, min(_PER_POD, most_processes - self.processes)))
            await slices.checkpoint()
            if self.processes >= most_processes:
                break
        if pods and not reached and not found:
            self.problem = OUTSIDE if self._processes.outside else self.problem or "no processes of online pods found"
            return None
        self.problem = None
        for uid, waiting in found.items():
            self._demand[uid] = waiting.run_milli + waiting.wait_milli
        return found

    def _chosen(self, pods: Mapping[str, Pod], first: Collection[str], most: int) -> Iterator[str]:
        """The pods of one round, each once."""
        if len(pods) <= most:
            return iter(pods)
        wanted = [uid for uid in first if uid in pods]
        busy = sorted(pods, key=lambda uid: -self._demand.get(uid, 0.0))
        chosen = dict.fromkeys(islice(dict.fromkeys([*wanted, *busy]), most - max(1, most // _TURN)))
        others = [uid for uid in pods if uid not in chosen]
        begin = self._turn % len(others)
        chosen |= dict.fromkeys((others[begin:] + others[:begin])[: most - len(chosen)])
        self._turn += most
        return iter(chosen)

    def _prepare(self, now: float) -> None:
        if self._socket is not None or now < self._try_at:
            return
        self._try_at = now + _TRY_AGAIN_S
        try:
            self._socket = self._open()
        except SourceError as exc:
            self.problem = str(exc)

    def _forget(self, pods: Mapping[str, Pod], now: float) -> None:
        if self._demand.keys() - pods.keys():
            self._demand = {uid: demand for uid, demand in self._demand.items() if uid in pods}
            self._processes.keep_only(pods.keys())
            self._hits = {key: hits for key, hits in self._hits.items() if key[0] in pods}
        # Rarely, as it is a pass over all.
        if self._turn % 64 == 0 or len(self._last) > 65536:
            self._last = {
                key: last for key, last in self._last.items() if key[0] in pods and now - last.at_s < _FORGET_S
            }
        self._turn += 1

    def _read(self, pod: Pod, found: dict[str, PodWaiting], now: float, most: int) -> bool:
        """Read one pod; whether something of it could be read at all."""
        throttled = self._throttled(pod)
        if self._socket is None and self._unified:
            number = self._by_pressure(pod)
            pairs = None if number is None else [(-1, number)]
        else:
            pids = self._processes.get(pod, now)
            if not pids:
                return False
            if len(pids) > most:
                begin = self._turn * most % len(pids)
                pids = (*pids[begin:], *pids[:begin])[:most]
            self.processes += len(pids)
            pairs = self._by_process(pids) if self._socket is not None else self._by_thread(pids)
            if pairs is not None and len(pairs) < len(pids):
                self._processes.ended(pod.uid)
        if not pairs:
            return False
        at_s = self._clock()
        run = wait = 0.0
        known = False
        for pid, delays in pairs:
            before = self._last.get((pod.uid, pid))
            if before is not None and at_s - before.at_s < SHORTEST_S:
                continue
            self._last[pod.uid, pid] = _Last(at_s, delays)
            if before is None:
                continue
            ran, waited = delays.run_ns - before.delays.run_ns, delays.wait_ns - before.delays.wait_ns
            if ran >= 0 and waited >= 0:
                per_milli = (at_s - before.at_s) * 1e6
                run, wait, known = run + ran / per_milli, wait + waited / per_milli, True
        if known and not throttled:
            found[pod.uid] = PodWaiting(run, wait)
        return True

    def _by_process(self, pids: Sequence[int]) -> list[tuple[int, Delays]] | None:
        assert self._socket is not None
        try:
            return list(self._socket.query(pids).items())
        except (OSError, ValueError) as exc:
            # Its rights were removed, or memory is short.
            self.close()
            self.problem = f"taskstats: {exc}"
            return None

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
        if totals.some_us is None or stat.cpu_ns is None:
            return None
        return Delays(stat.cpu_ns, totals.some_us * 1000, 0)

    def _throttled(self, pod: Pod) -> bool:
        """Whether the pod's own quotas have stopped it since the last round; pods without any are not read."""
        limited = [
            container
            for container in containers_of(pod)
            if container.spec is None or (container.spec.quota_us or 0) > 0
        ]
        if not limited:
            return False
        stopped = False
        for group in (pod.group, *(container.group for container in limited)):
            try:
                text = self._files.read(self._hierarchy.directory(self._bandwidth, group.path), "cpu.stat")
            except OSError:
                continue
            hits = parse_cpu_stat(text).hit
            stopped |= self._hits.get((pod.uid, group.path), hits) != hits
            self._hits[pod.uid, group.path] = hits
        return stopped
