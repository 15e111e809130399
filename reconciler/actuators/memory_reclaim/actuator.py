"""Reclaims memory from BE containers as `reconciler.actuators.memory_reclaim.control` decides, in a thread of its own.

One look each interval, in the loop (a few small reads a container), then one action after the other in one thread: so
never two at once, for one container or for two. An action on cgroup v2 is cut into chunks, and ends between two of them
when it is no longer wanted; ``force_empty`` on v1 is one call, 0.1 s for a full cache, which only a signal would end.
Reclaiming leaves nothing to undo; what was taken is counted and told.

Source: kernel documentation admin-guide/cgroup-v2 (memory.reclaim, 5.19: EAGAIN is "less than asked"; from 6.9 on with
``swappiness=0``, which leaves all but page cache alone) and cgroup-v1/memory (force_empty).
"""

import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, final

import trio
from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.pressure import parse_pressure
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.holds import holding
from reconciler.actuators.memory_reclaim.control import (
    GroupMemory,
    ReclaimAction,
    ReclaimHistory,
    missing_bytes,
    probe,
    relieve,
)
from reconciler.runtime.format import size
from reconciler.signals.memory import Shortage, parse_meminfo, parse_zoneinfo, shortages
from reconciler.signals.podnuma import parse_numa_cache
from state.memory import ReclaimRequest
from state.model import Container, ContainerKind, Phase, Pod, PodClass
from state.undo import RestoreResult

_LOG: Final = logging.getLogger(__name__)
_KNOB: Final = "memory.reclaim"
_CACHE_ONLY: Final = " swappiness=0"
_CHUNK: Final = 16 << 20
_SLICE_S: Final = 0.001
_KEPT: Final = 50
_LACKING: Final = "this kernel has no memory.reclaim (from Linux 5.19 on)"


class ReclaimResult(NamedTuple):
    """One action and what came of it. ``at``: wall-clock seconds; ``got`` None: not known."""

    action: ReclaimAction
    at: float
    took_s: float
    got: int | None
    outcome: str


@final
class Reclaimer:
    """See the module's text."""

    name = "memory_reclaim"

    def __init__(
        self,
        hierarchy: Hierarchy,
        *,
        root: str = "/",
        files: FileOps = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Actions by kind and outcome, and ``bytes``."""
        self.done: deque[ReclaimResult] = deque(maxlen=_KEPT)
        self._hierarchy = hierarchy
        self._version = hierarchy.version("memory") or 0
        self._proc = os.path.join(root, "proc")
        self._files = files
        self._clock = clock
        self._situation: PlanSnapshot | None = None
        self._news = trio.Event()
        self._lane = trio.CapacityLimiter(1)
        self._tried: dict[str, ReclaimHistory] = {}
        self._short: dict[int, Shortage] = {}
        self._problems: dict[str, str] = {}
        self._running: trio.CancelScope | None = None
        self._knows_swappiness = True
        """Until the kernel has refused it once. Used in the lane's thread only."""

    # SideActuator

    def planned(self, situation: PlanSnapshot) -> None:
        """Keep it. What is no longer wanted at all ends now."""
        self._situation = situation
        if self._wish(situation) is None and self._running is not None:
            self._running.cancel()
        self._news.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look each interval, for ever, while it is wanted."""
        task_status.started()
        while True:
            wish = self._wish(self._situation)
            if wish is None:
                self._tried.clear()
                self._news = trio.Event()
                await self._news.wait()
                continue
            with trio.CancelScope() as self._running:
                await self.reclaim(wish)
            self._running = None
            await trio.sleep(wish.interval_s)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """End what is going on; there is nothing to put back."""
        if only is None:
            self._situation = None
        if self._running is not None:
            self._running.cancel()
        await trio.lowlevel.checkpoint()
        return ()

    def status(self) -> Mapping[str, object]:
        """Counts, the newest actions, and which NUMA nodes are short."""
        return {
            "wanted": self._wish(self._situation) is not None,
            "counts": dict(sorted(self.counts.items())),
            "short_nodes": {str(node): short.value for node, short in self._short.items()},
            "newest": [
                {
                    "at": one.at,
                    "path": one.action.path,
                    "pod_uid": one.action.pod_uid,
                    "kind": one.action.kind,
                    "asked_bytes": one.action.want_bytes or None,
                    "got_bytes": one.got,
                    "took_s": one.took_s,
                    "outcome": one.outcome,
                    "why": one.action.why,
                }
                for one in reversed(self.done)
            ],
        }

    def problems(self) -> Sequence[str]:
        """What cannot be read or done here."""
        return [] if self._wish(self._situation) is None else list(self._problems.values())

    # One look

    async def reclaim(self, wish: ReclaimRequest) -> None:
        """Read, decide, act."""
        situation = self._situation
        if situation is None:
            return
        try:
            node = parse_meminfo(self._files.read(self._proc, "meminfo"))
            zones = parse_zoneinfo(self._files.read(self._proc, "zoneinfo"))
        except (OSError, ValueError) as exc:
            # Unknown is no shortage, and no room either.
            self._problems["node"] = f"cannot read the node's memory: {exc}"
            return
        self._problems.pop("node", None)
        self._short = shortages(zones, self._short)
        missing = missing_bytes(zones, self._short) if wish.relieve else {}
        groups = await self._read(situation, wish, by_node=bool(missing) and len(zones) > 1)
        relief = relieve(groups, self._tried, missing, wish, version=self._version)
        # A node that is short is helped first; what it takes is enough for one look.
        actions = [relief] if relief is not None else []
        tried: dict[str, ReclaimHistory] = {}
        for group in groups:
            action, tried[group.path] = probe(self._tried.get(group.path), group, node, wish)
            if action is not None and wish.probe and relief is None:
                actions.append(action)
        self._tried = tried
        for action in actions:
            await self._act(action, wish, enforce=situation.enforce)

    async def _read(self, situation: PlanSnapshot, wish: ReclaimRequest, *, by_node: bool) -> list[GroupMemory]:
        """What each BE container has; ``by_node``: also where its page cache lies."""
        found: list[GroupMemory] = []
        since = self._clock()
        for uid in sorted(situation.view.pods):
            pod = situation.view.pods[uid]
            if pod.pod_class is not PodClass.RECLAIMED:
                continue
            for container in pod.containers:
                if container.kind is ContainerKind.SANDBOX or container.phase is not Phase.SETTLED:
                    continue
                path = container.group.path
                if holding(situation.holds, path=path, knob=_KNOB, pod_uid=uid) is not None:
                    continue
                one = self._read_one(pod, container, probing=wish.probe, by_node=by_node)
                found += [one] if one is not None else []
            if self._clock() - since > _SLICE_S:
                await trio.lowlevel.checkpoint()
                since = self._clock()
        return found

    def _read_one(self, pod: Pod, container: Container, *, probing: bool, by_node: bool) -> GroupMemory | None:
        """What a container has; None when it is gone or cannot be read."""
        path = container.group.path
        directory = self._hierarchy.directory("memory", path)
        prefix, used = ("total_", "memory.usage_in_bytes") if self._version == 1 else ("", "memory.current")
        mapped_name = "total_mapped_file" if self._version == 1 else "file_mapped"
        try:
            if container.group.inode and self._files.inode(self._hierarchy.trigger_directory(path)) != (
                container.group.inode
            ):
                return None
            used_bytes = int(self._files.read(directory, used))
            lines = (line.split() for line in self._files.read(directory, "memory.stat").splitlines())
            stat = {name: int(number) for name, number in lines}
            cache = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
            mapped = stat[mapped_name]
        except (OSError, ValueError, KeyError):
            return None
        asked = container.requests
        request = asked.batch_memory_bytes if asked.batch_memory_bytes is not None else asked.memory_bytes
        return GroupMemory(
            path=path,
            pod_uid=pod.uid,
            at_s=self._clock(),
            used_bytes=used_bytes,
            droppable_bytes=max(0, cache - mapped),
            droppable_on=self._cache_on(directory) if by_node else None,
            stalled_us=self._stalled_us(path) if probing else None,
            asked_bytes=request or 0,
        )

    def _cache_on(self, directory: str) -> Mapping[int, int] | None:
        """A group's page cache by NUMA node; None where the kernel does not tell that."""
        try:
            return parse_numa_cache(self._files.read(directory, "memory.numa_stat"), self._version, PAGE)
        except (OSError, ValueError):
            return None

    def _stalled_us(self, path: str) -> int | None:
        try:
            directory = self._hierarchy.directory(UNIFIED, path)
            some = parse_pressure(self._files.read(directory, "memory.pressure")).some
        except (OSError, ValueError) as exc:
            self._problems["pressure"] = f"no memory pressure per container, proactive reclaim is off: {exc}"
            return None
        self._problems.pop("pressure", None)
        return some.total_us if some is not None else None

    # One action

    async def _act(self, action: ReclaimAction, wish: ReclaimRequest, *, enforce: bool) -> None:
        if not enforce or wish.dry_run:
            self._note(ReclaimResult(action, time.time(), 0.0, None, "would reclaim"))
            return
        given_up: list[bool] = []
        started = self._clock()
        try:
            # Abandoned when cancelled: it then stops at its next chunk, by itself.
            got, outcome = await trio.to_thread.run_sync(
                self._take, action, given_up, abandon_on_cancel=True, limiter=self._lane
            )
        except trio.Cancelled:
            self._note(ReclaimResult(action, time.time(), self._clock() - started, None, "cancelled"))
            raise
        finally:
            given_up.append(True)
        self._note(ReclaimResult(action, time.time(), self._clock() - started, got, outcome))
        last = self._tried.get(action.path)
        if action.kind == "relief" and last is not None:
            self._tried[action.path] = replace(last, relieved_until=started + wish.rest_s)

    def _take(self, action: ReclaimAction, given_up: Sequence[bool]) -> tuple[int | None, str]:
        """In the lane's thread: ask the kernel, chunk by chunk."""
        directory = self._hierarchy.directory("memory", action.path)
        used = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        try:
            before = int(self._files.read(directory, used))
            outcome = self._ask(directory, action, given_up)
            got = max(0, before - int(self._files.read(directory, used)))
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ENODEV}:
                return None, f"refused: {errno_name(exc.errno)}"
            return None, _LACKING if self._lacks_reclaim(directory) else "gone"
        return got, outcome

    def _lacks_reclaim(self, directory: str) -> bool:
        """Whether the group is there and this kernel gave it no such file."""
        try:
            names = self._files.files(directory)
        except OSError:
            return False
        return bool(names) and self._version == 2 and _KNOB not in names

    def _ask(self, directory: str, action: ReclaimAction, given_up: Sequence[bool]) -> str:
        """Errors: `OSError` as the kernel answers, less than asked (EAGAIN) excepted."""
        if self._version == 1:
            self._files.write(directory, "memory.force_empty", "1")
            return "reclaimed"
        left = action.want_bytes
        while left > 0:
            if given_up:
                return "cancelled"
            chunk = min(left, _CHUNK)
            try:
                self._ask_for(directory, chunk, cache_only=action.cache_only)
            except OSError as exc:
                if exc.errno == errno.EAGAIN:
                    return "partly reclaimed"
                raise
            left -= chunk
        return "reclaimed"

    def _ask_for(self, directory: str, chunk: int, *, cache_only: bool) -> None:
        """Errors: `OSError` as the kernel answers. Before 6.9 it is asked for the amount alone, and may swap."""
        if cache_only and self._knows_swappiness:
            try:
                self._files.write(directory, _KNOB, f"{chunk}{_CACHE_ONLY}")
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                self._knows_swappiness = False
            else:
                return
        self._files.write(directory, _KNOB, str(chunk))

    def _note(self, done: ReclaimResult) -> None:
        self.done.append(done)
        self.counts[f"{done.action.kind} {done.outcome}"] += 1
        self.counts["bytes"] += done.got or 0
        if done.outcome == _LACKING:
            self._problems["kernel"] = _LACKING
        asked = size(done.action.want_bytes) if done.action.want_bytes else "all page cache"
        # A relief is news; probes happen all the time, and are counted.
        level = logging.INFO if done.action.kind == "relief" and done.got is not None else logging.DEBUG
        _LOG.log(level, "%s of %s: %s: %s", asked, done.action.path, done.outcome, done.action.why)

    @staticmethod
    def _wish(situation: PlanSnapshot | None) -> ReclaimRequest | None:
        wish = situation.pools.memory.reclaim if situation is not None else None
        return wish if wish is not None and (wish.probe or wish.relieve) else None
