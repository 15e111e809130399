"""Reads the memory of BE containers, and reclaims requested amounts from them, one bounded action at a time.

`reconciler.control.reclaim_loop` decides the actions. Reclaimed memory needs no restore.

Source: kernel documentation admin-guide/cgroup-v2 (memory.reclaim, from 5.19 on) and cgroup-v1/memory (force_empty).
"""

import errno
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, final

import trio

from cgroupfs.codecs import PAGE
from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.lines import lines_of
from cgroupfs.log import get_log
from cgroupfs.pressure import parse_totals
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.holds import holding
from reconciler.runtime.format import size
from reconciler.runtime.stints import in_worker
from reconciler.signals.podnuma import parse_numa_cache
from state.memory import RECLAIM, GroupMemory, ReclaimAction, ReclaimRequest
from state.model import Container, Phase, Pod, PodClass

_LOG: Final = get_log("memory_reclaim")
_CACHE_ONLY: Final = " swappiness=0"
"""From 6.9 on: limits the reclaim to page cache."""
_CHUNK: Final = 16 << 20
"""Bytes of one write: an action on cgroup v2 can be cancelled between two."""
_SLICE_S: Final = 0.001
"""Of reading in the event loop, between two checkpoints."""
_HISTORY: Final = 50
_LACKING: Final = "this kernel has no memory.reclaim (from Linux 5.19 on)"


class ReclaimResult(NamedTuple):
    """One action and its outcome. ``at``: wall-clock seconds; ``got``: bytes, None: unknown."""

    action: ReclaimAction
    at: float
    took_s: float
    got: int | None
    outcome: str


@final
class ReclaimActuator:
    def __init__(
        self, hierarchy: Hierarchy, *, files: FileOps = REAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.version = hierarchy.version("memory") or 0
        """The cgroup version of the memory controller, 0 without one."""
        self.counts: Counter[str] = Counter()
        """Actions by kind and outcome, and ``bytes``."""
        self.done: deque[ReclaimResult] = deque(maxlen=_HISTORY)
        self.problems: dict[str, str] = {}
        """What cannot be read or done on this node, by subject."""
        self._hierarchy = hierarchy
        self._files = files
        self._clock = clock
        self._lane = trio.CapacityLimiter(1)
        self._unmeasured = ""
        """Why the pressure of a container could not be read."""
        self._has_swappiness = True
        """False after the kernel has refused it once. Used in the actuator's thread only."""

    async def read(self, situation: PlanSnapshot, request: ReclaimRequest, *, by_node: bool) -> list[GroupMemory]:
        """The memory of each BE container; ``by_node``: also its page cache by NUMA node."""
        group_memories: list[GroupMemory] = []
        since = self._clock()
        for uid in sorted(situation.view.pods):
            pod = situation.view.pods[uid]
            if pod.pod_class is not PodClass.RECLAIMED:
                continue
            for container in pod.workload:
                if container.phase is not Phase.SETTLED:
                    continue
                path = container.group.path
                if holding(situation.holds, path=path, knob=RECLAIM, pod_uid=uid) is not None:
                    continue
                group_memory = self._memory_of(pod, container, probing=request.probe, by_node=by_node)
                group_memories += [group_memory] if group_memory is not None else []
            if self._clock() - since > _SLICE_S:
                await trio.lowlevel.checkpoint()
                since = self._clock()
        if request.probe and group_memories and all(memory.stalled_us is None for memory in group_memories):
            why = f"no memory pressure per container, proactive reclaim is off: {self._unmeasured}"
            self.problems["pressure"] = why
        else:
            self.problems.pop("pressure", None)
        return group_memories

    def _memory_of(self, pod: Pod, container: Container, *, probing: bool, by_node: bool) -> GroupMemory | None:
        """The memory of a container; None if it no longer exists or cannot be read."""
        path = container.group.path
        directory = self._hierarchy.directory("memory", path)
        prefix, used = ("total_", "memory.usage_in_bytes") if self.version == 1 else ("", "memory.current")
        mapped_name = "total_mapped_file" if self.version == 1 else "file_mapped"
        # First: of a container that ends meanwhile the files below are not there either.
        stalled_us = self._stalled_us(path) if probing else None
        try:
            if container.group.inode and self._files.inode(self._hierarchy.trigger_directory(path)) != (
                container.group.inode
            ):
                return None
            used_bytes = int(self._files.read(directory, used))
            lines = (line.split() for line in lines_of(self._files.read(directory, "memory.stat")))
            stat = {name: int(number) for name, number in lines}
            cache = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
            mapped = stat[mapped_name]
        except (OSError, ValueError, KeyError):
            return None
        resources = container.requests
        request = resources.batch_memory_bytes if resources.batch_memory_bytes is not None else resources.memory_bytes
        return GroupMemory(
            path=path,
            pod_uid=pod.uid,
            at_s=self._clock(),
            used_bytes=used_bytes,
            droppable_bytes=max(0, cache - mapped),
            droppable_on=self._cache_on(directory) if by_node else None,
            stalled_us=stalled_us,
            asked_bytes=request or 0,
        )

    def _cache_on(self, directory: str) -> Mapping[int, int] | None:
        """A group's page cache by NUMA node, in bytes; None if the kernel does not report it."""
        try:
            return parse_numa_cache(self._files.read(directory, "memory.numa_stat"), self.version, PAGE)
        except (OSError, ValueError):
            return None

    def _stalled_us(self, path: str) -> int | None:
        try:
            directory = self._hierarchy.directory(UNIFIED, path)
            return parse_totals(self._files.read(directory, "memory.pressure")).some_us
        except (OSError, ValueError) as exc:
            self._unmeasured = str(exc)
            return None

    # One action

    async def take(self, action: ReclaimAction, *, dry_run: bool) -> None:
        """Run the action; with ``dry_run`` only record it. After a cancellation it ends at its next chunk."""
        if dry_run:
            self._record(ReclaimResult(action, time.time(), 0.0, None, "would reclaim"))
            return
        cancelled: list[bool] = []  # the thread sees what is appended
        started = self._clock()
        try:
            # One thread for all containers: never two actions at once. Abandoned, it ends at its next chunk.
            got, outcome = await in_worker(self._reclaim, action, cancelled, abandon_on_cancel=True, limiter=self._lane)
        except trio.Cancelled:
            self._record(ReclaimResult(action, time.time(), self._clock() - started, None, "cancelled"))
            raise
        finally:
            cancelled.append(True)
        self._record(ReclaimResult(action, time.time(), self._clock() - started, got, outcome))

    def _reclaim(self, action: ReclaimAction, cancelled: Sequence[bool]) -> tuple[int | None, str]:
        """In the actuator's thread: reclaim chunk by chunk."""
        directory = self._hierarchy.directory("memory", action.path)
        used = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        try:
            before = int(self._files.read(directory, used))
            outcome = self._reclaim_chunks(directory, action, cancelled)
            # The container may have allocated more than was reclaimed.
            got = max(0, before - int(self._files.read(directory, used)))
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ENODEV}:
                return None, f"refused: {errno_name(exc.errno)}"
            return None, _LACKING if self._lacks_reclaim(directory) else "gone"
        return got, outcome

    def _lacks_reclaim(self, directory: str) -> bool:
        """Whether the group exists and this kernel provides no such file in it."""
        try:
            names = self._files.files(directory)
        except OSError:
            return False
        return bool(names) and self.version == 2 and RECLAIM not in names

    def _reclaim_chunks(self, directory: str, action: ReclaimAction, cancelled: Sequence[bool]) -> str:
        """Errors: `OSError` as the kernel returns it, except EAGAIN (less than requested)."""
        if self.version == 1:
            # One call, 0.1 s for a full cache, which only a signal would end.
            self._files.write(directory, "memory.force_empty", "1")
            return "reclaimed"
        left = action.want_bytes
        while left > 0:
            if cancelled:
                return "cancelled"
            chunk = min(left, _CHUNK)
            try:
                self._reclaim_chunk(directory, chunk, cache_only=action.cache_only)
            except OSError as exc:
                if exc.errno == errno.EAGAIN:  # less than requested
                    return "partly reclaimed"
                raise
            left -= chunk
        return "reclaimed"

    def _reclaim_chunk(self, directory: str, chunk: int, *, cache_only: bool) -> None:
        """Reclaim one chunk. Errors: `OSError` as the kernel returns it."""
        if cache_only and self._has_swappiness:
            try:
                self._files.write(directory, RECLAIM, f"{chunk}{_CACHE_ONLY}")
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                self._has_swappiness = False
            else:
                return
        # Before 6.9 only the amount can be requested, and the kernel may swap.
        self._files.write(directory, RECLAIM, str(chunk))

    def _record(self, done: ReclaimResult) -> None:
        self.done.append(done)
        self.counts[f"{done.action.kind} {done.outcome}"] += 1
        self.counts["bytes"] += done.got or 0
        if done.outcome == _LACKING:
            self.problems["kernel"] = _LACKING
        amount = size(done.action.want_bytes) if done.action.want_bytes else "all page cache"
        # A relief is logged as information; probes are frequent, and are only counted.
        write = _LOG.info if done.action.kind == "relief" and done.got is not None else _LOG.debug
        write("memory reclaim", path=done.action.path, amount=amount, outcome=done.outcome, reason=done.action.why)
