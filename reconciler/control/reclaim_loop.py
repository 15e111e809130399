"""Control loop that reclaims memory from BE containers: read the node and the containers, run the laws, reclaim.

An auxiliary actuator with a step each interval. The laws are `reconciler.policies.memory_reclaim`;
`reconciler.actuators.memory_reclaim.actuator` reads containers and reclaims from them.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import trio
from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from reconciler.actuators.base import ActuatorContext, ActuatorKind, AuxiliaryActuator, PlanSnapshot
from reconciler.actuators.memory_reclaim.actuator import ReclaimActuator
from reconciler.policies.memory_reclaim import ReclaimHistory, missing_bytes, probe, relieve
from reconciler.signals.memory import parse_meminfo, parse_zoneinfo, shortages, without_huge
from state.entry import RestoreResult
from state.memory import MemoryShortage, ReclaimRequest


@final
class MemoryReclaimLoop(AuxiliaryActuator):
    name = "memory_reclaim"

    def __init__(
        self,
        actuator: ReclaimActuator,
        *,
        root: str = "/",
        files: FileOps = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actuator = actuator
        self._root = root
        self._proc = os.path.join(root, "proc")
        self._files = files
        self._clock = clock
        self._situation: PlanSnapshot | None = None
        self._news = trio.Event()
        self._tried: dict[str, ReclaimHistory] = {}
        self._short: dict[int, MemoryShortage] = {}
        self._problem = ""
        self._running: trio.CancelScope | None = None

    def planned(self, situation: PlanSnapshot) -> None:
        """Keep it. What is no longer wanted at all ends now."""
        self._situation = situation
        if _wish(situation) is None and self._running is not None:
            self._running.cancel()
        self._news.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run a step each interval while the policy is on, until cancelled."""
        task_status.started()
        while True:
            wish = _wish(self._situation)
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
        return {
            "wanted": _wish(self._situation) is not None,
            "counts": dict(sorted(self._actuator.counts.items())),
            "short_nodes": {str(node): short.value for node, short in self._short.items()},
            "newest": [
                {
                    "at": result.at,
                    "path": result.action.path,
                    "pod_uid": result.action.pod_uid,
                    "kind": result.action.kind,
                    "asked_bytes": result.action.want_bytes or None,
                    "got_bytes": result.got,
                    "took_s": result.took_s,
                    "outcome": result.outcome,
                    "why": result.action.why,
                }
                for result in reversed(self._actuator.done)
            ],
        }

    def problems(self) -> Sequence[str]:
        if _wish(self._situation) is None:
            return []
        return [*([self._problem] if self._problem else []), *self._actuator.problems.values()]

    async def reclaim(self, wish: ReclaimRequest) -> None:
        situation = self._situation
        if situation is None:
            return
        try:
            node = parse_meminfo(self._files.read(self._proc, "meminfo"))
            zones = parse_zoneinfo(self._files.read(self._proc, "zoneinfo"))
            if node.huge_bytes:
                zones = without_huge(zones, self._files, self._root)
        except (OSError, ValueError) as exc:
            # Unknown counts neither as shortage nor as room.
            self._problem = f"cannot read the node's memory: {exc}"
            return
        self._problem = ""
        self._short = shortages(zones, self._short)
        missing = missing_bytes(zones, self._short) if wish.relieve else {}
        if not (missing or wish.probe):
            # Nothing would be done, whatever the containers have.
            self._actuator.problems.pop("pressure", None)
            return
        groups = await self._actuator.read(situation, wish, by_node=bool(missing) and len(zones) > 1)
        relief = relieve(groups, self._tried, missing, wish, version=self._actuator.version)
        # A node that is short of memory is first; its reclaim is enough for one step.
        actions = [relief] if relief is not None else []
        tried: dict[str, ReclaimHistory] = {}
        for group in groups:
            action, tried[group.path] = probe(self._tried.get(group.path), group, node, wish)
            if action is not None and wish.probe and relief is None:
                actions.append(action)
        self._tried = tried
        dry_run = not situation.enforce or wish.dry_run
        for action in actions:
            started = self._clock()
            await self._actuator.take(action, dry_run=dry_run)
            last = self._tried.get(action.path)
            if action.kind == "relief" and last is not None and not dry_run:
                self._tried[action.path] = replace(last, relieved_until=started + wish.rest_s)


def _wish(situation: PlanSnapshot | None) -> ReclaimRequest | None:
    return situation.plan.memory.reclaim if situation is not None else None


def _build(context: ActuatorContext) -> MemoryReclaimLoop:
    actuator = ReclaimActuator(context.hierarchy, files=context.files)
    return MemoryReclaimLoop(actuator, root=context.root, files=context.files)


ACTUATOR: Final = ActuatorKind(codecs={}, build=_build)
