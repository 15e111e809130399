"""Control loop of cache and memory bandwidth: read resctrl, adapt BE's share, plan, apply the plan.

An auxiliary actuator: runs after each reconcile pass, and every few seconds. The readings of
`reconciler.actuators.resctrl.actuator` are the input of the control law and of the plan, both in
`reconciler.policies.cacheplan`; the actuator applies the plan.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final

from msgspec.structs import replace

from cgroupfs.errors import AgentError
from cgroupfs.log import get_log
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    OfflineContext,
    PeriodicActuator,
    PeriodicWorker,
    PlanSnapshot,
)
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.resctrl.actuator import ResctrlActuator, ResctrlReading
from reconciler.actuators.resctrl.mount import ResctrlWorker
from reconciler.actuators.resctrl.undo import CODEC, restore_resctrl
from reconciler.policies.cacheplan import LevelState, begin, is_dynamic, plan_cache, step
from reconciler.signals import resctrl
from resctrl.groups import DEFAULT
from state.cache import CacheMode, CachePlan, CacheRequest, CacheUsage
from state.entry import RestoreResult
from state.evidence import Sample
from state.kinds import RESCTRL
from state.model import PodClass

_LOG: Final = get_log("cache")
_GAP_S: Final = 0.2
_ABSENT_S: Final = 10.0
"""Between two searches for resctrl where there is none: most machines never have it."""
_ONLINE: Final = frozenset({PodClass.SHARED, PodClass.DEDICATED})


@final
class CacheLoop(PeriodicActuator):
    name = "resctrl"

    def __init__(
        self,
        make: Callable[[ResctrlWorker], ResctrlActuator],
        *,
        misses: Callable[[], Mapping[str, Sample]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make``: the actuator, given what does its blocking work.

        ``misses``: the newest cache misses of pods by uid, per 1000 instructions, their age as of the call.
        """
        self._misses = misses
        self._clock = clock
        self._level: LevelState | None = None
        super().__init__(PeriodicWorker(self._sweep_once, self._period_s, gap_s=_GAP_S, clock=clock), _substance)
        self._actuator = make(self._worker.work)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Remove bypassd's groups and mount, and restore the default group's values; or free one pod."""
        async with self._worker.restoring() as situation:
            return await self._actuator.restore(only, situation)

    @property
    def statuses(self) -> Mapping[str, Mapping[str, SettingStatus]]:
        return self._actuator.statuses

    def measured(self) -> CacheUsage | None:
        """Measured use of pods and groups, and the size of BE's share; None while no policy needs it."""
        situation = self._worker.situation
        wish = situation.plan.cache if situation is not None else None
        return None if situation is None or wish is None else self._actuator.measured(situation.view, wish)

    def status(self) -> Mapping[str, object]:
        return {**self._actuator.status(), "sweeps": self._worker.sweeps, "last_sweep_s": self._worker.swept_s}

    def problems(self) -> Sequence[str]:
        situation = self._worker.situation
        titles = {} if situation is None else {uid: pod.title for uid, pod in situation.view.pods.items()}
        return self._actuator.problems(titles)

    # One sweep

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        wish = situation.plan.cache
        if wish is None:
            return None
        # Without any change of the plan, too: threads that ``exec`` adds to a container inherit no group.
        return wish.sweep_s if self._actuator.use is not None else max(wish.sweep_s, _ABSENT_S)

    async def _sweep_once(self, situation: PlanSnapshot) -> None:
        try:
            await self._sweep(situation)
        except AgentError as exc:
            self._actuator.failed(exc)

    async def _sweep(self, situation: PlanSnapshot) -> None:
        wish = situation.plan.cache
        writes = situation.enforce and "node" not in situation.holds
        if wish is None or (wish.dry_run and writes and self._actuator.to_undo):
            self._level = None
            await self._actuator.leave(writes=writes)
        if wish is None:
            return
        writes = writes and not wish.dry_run
        reading = await self._actuator.observe(wish, writes=writes)
        if reading is None:
            return
        self._step(wish, situation, reading)
        plan = await self._worker.work(partial(self._plan, wish, situation, reading))
        await self._actuator.apply(plan, wish, situation, reading, writes=writes)

    def _plan(self, wish: CacheRequest, situation: PlanSnapshot, reading: ResctrlReading) -> CachePlan:
        """In the thread: some microseconds for each pod."""
        plan = plan_cache(
            wish,
            tuple(situation.view.pods.values()),
            reading.capability,
            level=(self._level or begin(wish.levels)).level,
            foreign=len(reading.foreign),
            existing=frozenset(reading.ours),
        )
        if self._level is None:
            return plan
        return replace(plan, level=self._level.level, level_reason=self._level.reason)

    def _step(self, wish: CacheRequest, situation: PlanSnapshot, reading: ResctrlReading) -> None:
        """Let the control law adapt BE's share, from the readings before this sweep."""
        if wish.mode is not CacheMode.DYNAMIC and not any(map(is_dynamic, reading.ours)):
            self._level = None
            return
        state = self._level if self._level is not None else begin(wish.levels)
        pods = situation.view.pods
        homes = {reading.homes.get(uid, DEFAULT) for uid, pod in pods.items() if pod.pod_class is PodClass.RECLAIMED}
        online = frozenset(uid for uid, pod in pods.items() if pod.pod_class in _ONLINE)
        now = self._clock()
        contention = resctrl.contention(
            reading.use,
            homes - {DEFAULT},
            bandwidth_mbps=wish.bandwidth_mbps,
            online=len(online),
            misses={uid: missed for uid, missed in self._misses().items() if uid in online},
            now=now,
        )
        self._level = step(state, contention, now, wish.law, wish.levels)
        if self._level.level != state.level:
            _LOG.info("BE share of cache and memory bandwidth changed", level=str(self._level))


def _substance(situation: PlanSnapshot) -> tuple[object, ...]:
    """The input of a sweep. Pods that have not changed are the same objects, so the comparison is cheap."""
    return situation.enforce, situation.plan.cache, situation.holds, situation.view.pods


def _build(context: ActuatorContext) -> CacheLoop:
    make = partial(
        ResctrlActuator,
        context.hierarchy,
        context.ledger,
        context.store_lane,
        root=context.root,
        writes=context.writes,
        cgroups=context.files,
    )
    return CacheLoop(make, misses=context.misses)


def _undo(context: OfflineContext) -> Sequence[RestoreResult]:
    return restore_resctrl(context.root, context.ledger, context.only)


ACTUATOR: Final = ActuatorKind(codecs={RESCTRL: CODEC}, build=_build, undo=_undo)
