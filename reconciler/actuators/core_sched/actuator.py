"""Assigns core scheduling cookies to the threads of the pods' containers. An auxiliary actuator.

Source: kernel documentation, admin-guide/hw-vuln/core-scheduling. A difference from Koordinator, which runs a helper
process for each cookie and loses all of them with its cache: here the threads themselves keep a cookie alive.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, final

import trio

from cgroupfs.errors import StoreError, errno_name
from cgroupfs.log import get_log
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    OfflineContext,
    PeriodicActuator,
    PeriodicWorker,
    PlanSnapshot,
)
from reconciler.actuators.cgroup.status import SettingStatus, unread
from reconciler.actuators.codec import LedgerState
from reconciler.actuators.core_sched import tasks
from reconciler.actuators.core_sched.prctl import CookieCarrier, Prctl, RealPrctl, unable
from reconciler.actuators.core_sched.tasks import (
    CODEC,
    CookieAssignment,
    CookieState,
    CookieSteps,
    ObservedThreads,
    restore_cookies,
)
from reconciler.actuators.holds import holding
from reconciler.runtime.format import plural
from state.cpu import CORE_COOKIE, CORE_SCHED
from state.entry import US, LedgerEvent, RestoreResult
from state.kinds import COOKIE
from state.model import Setting
from state.plan import CookieMember, CookiePlan
from state.setting_state import SettingState

_LOG: Final = get_log("core_sched")
_ROUNDS: Final = 8
"""Readings of one sweep at most: threads start while cookies are assigned."""
_AT_ONCE: Final = 16
"""New cookies that are created together: each needs a thread of ours until it is in the store and assigned."""
_GAP_S: Final = 0.2
_PRUNE_S: Final = 60.0
"""Between two searches for cookies without threads, each of which reads every thread of the machine."""


class _CookieTarget(NamedTuple):
    """One container: its directory of threads, and their wanted cookie.

    ``member`` None: no cookie. ``left``: the state that forbids writing, with ``detail``; None: written. ``shown``: a
    dry run's, and no cookie of ours remains.
    """

    path: str
    directory: str
    member: CookieMember | None
    left: SettingState | None = None
    detail: str = ""
    shown: bool = False


class _CookieState(NamedTuple):
    """The cookies of a container's threads, and whether some were assigned just now."""

    tally: tasks.ThreadTally
    fresh: bool


@final
class CoreSched(PeriodicActuator):
    name = CORE_SCHED

    def __init__(self, context: ActuatorContext, prctl: Prctl, proc: str = "/proc") -> None:
        self._prctl = prctl
        self._hierarchy = hierarchy = context.hierarchy
        self._ledger = context.ledger
        self._writes = context.writes
        self._files = context.files
        self._proc = proc
        self._file = "tasks" if hierarchy.version(hierarchy.trigger) == 1 else "cgroup.threads"
        self._rows = LedgerState(CODEC, context.ledger, context.store_lane)
        super().__init__(PeriodicWorker(self._sweep, self._period_s, gap_s=_GAP_S))
        self._unable = ""
        self._unrecorded = ""
        self._refused = ""
        self._pruned_at = 0.0

    # The interface of an auxiliary actuator

    def _concerns(self, situation: PlanSnapshot) -> bool:
        return bool(situation.plan.cookies is not None or self._ours or self._unable)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Clear our cookies; from every thread of the machine, or from those of one pod."""
        async with self._worker.restoring():
            if not self._ours:
                return ()
            done, left = await self._worker.work(partial(tasks.undo, self._prctl, self._rows.now, only, self._proc))
            done = await self._rows.restored(left, done)
            for result in done:
                self._note("restored" if result.ok else "failed", result.path, group=result.path, why=result.detail)
            return done

    def status(self) -> Mapping[str, object]:
        """Whether it works, the groups with their cookies, and the last sweep."""
        groups: dict[str, list[str]] = {}
        for cookie, group in sorted(self._ours.items()):
            groups.setdefault(group, []).append(f"{cookie:#x}")
        return {
            "unable": self._unable,
            "cookies": groups,
            "sweeps": self._worker.sweeps,
            "last_sweep_s": self._worker.swept_s,
        }

    def problems(self) -> Sequence[str]:
        return [problem for problem in (self._unable, self._unrecorded, self._refused) if problem]

    # One sweep

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        # Processes that are started by ``exec`` inherit no cookie.
        if (plan := situation.plan.cookies) is not None:
            return plan.sweep_s
        # Cookies that could not be cleared.
        return _PRUNE_S if situation.enforce and self._ours else None

    @property
    def _ours(self) -> Mapping[int, str]:
        return self._rows.now.ours

    async def _sweep(self, situation: PlanSnapshot) -> None:
        plan = situation.plan.cookies
        if plan is None and not self._ours:
            self._statuses, self._unable, self._unrecorded, self._refused = {}, "", "", ""
            return
        why = unable(self._prctl)
        if why:
            if plan is not None and why != self._unable:
                _LOG.warning("core scheduling is not available", reason=why)
            self._statuses, self._unable = {}, why if plan is not None else ""
            self._unrecorded = self._refused = ""
            return
        self._unable = ""
        try:
            await self._apply(self._targets(situation))
            if plan is None or (plan.dry_run and situation.enforce) or time.monotonic() - self._pruned_at >= _PRUNE_S:
                await self._prune()
        except OSError as exc:
            # The last core lost its second thread during the sweep: the next sweep reports it.
            _LOG.warning("core scheduling failed", error=str(exc))
            self._refused = f"core scheduling failed: {errno_name(exc.errno)}"
            self._statuses = unread(self._statuses, self._refused)

    def _targets(self, situation: PlanSnapshot) -> list[_CookieTarget]:
        cookies = situation.plan.cookies or CookiePlan()
        places = []
        for uid, pod in sorted(situation.view.pods.items()):
            # In a machine or kernel of its own all its processes have one, wherever in the pod's group they are.
            for path in pod.paths[1:] if pod.sandbox is None else pod.paths[:1]:
                member = cookies.members.get(path)
                hold = holding(situation.holds, path=path, knob=CORE_COOKIE, pod_uid=uid)
                left: SettingState | None = None
                detail = ""
                if hold is not None:
                    left, detail = SettingState.HELD, f"{hold.reason} (by {hold.by})"
                elif not situation.enforce or cookies.dry_run:
                    left, detail = SettingState.WOULD_WRITE, member.setting.reason if member is not None else ""
                shown = situation.enforce and hold is None and cookies.dry_run
                directory = self._hierarchy.trigger_directory(path)
                places.append(_CookieTarget(path, directory, member, left, detail, shown))
        return places

    async def _apply(self, places: Sequence[_CookieTarget]) -> None:
        wanted = {target.path: target.member.group for target in places if target.member is not None}
        shown = frozenset(target.path for target in places if target.shown)
        left = frozenset(target.path for target in places if target.left is not None) - shown
        written_to = {path: group for path, group in wanted.items() if path not in shown}
        where = [(target.path, target.directory) for target in places]
        written: set[int] = set()
        self._unrecorded, refused = "", Counter[str]()
        for _ in range(_ROUNDS):
            # A copy: the event loop changes its own meanwhile. Thousands of threads take milliseconds: not in the loop.
            read = partial(self._read, where, written_to, dict(self._ours), left, written)
            observed, steps = await self._worker.work(read)
            # What was refused, or could not be recorded, would be so again.
            if not steps or self._unrecorded or refused:
                break
            for first in range(0, len(steps.assignments), _AT_ONCE):
                written |= await self._assign(steps.assignments[first : first + _AT_ONCE], refused)
            if steps.clears:
                assigned = await self._worker.work(partial(tasks.drop, self._prctl, steps.clears))
                self._count("restored", assigned, refused)
        self._refused = "; ".join(f"{_threads(count)}: {message}" for message, count in sorted(refused.items()))
        count = partial(_tallies, wanted, observed, dict(self._ours), written)
        self._record_statuses(places, observed, await self._worker.work(count))

    def _read(
        self,
        where: Sequence[tuple[str, str]],
        wanted: Mapping[str, str],
        ours: Mapping[int, str],
        left: frozenset[str],
        written: set[int],
    ) -> tuple[dict[str, ObservedThreads], CookieSteps]:
        """One reading, in a worker thread: the existing cookies, and the due steps."""
        observed = tasks.observe(where, self._file, self._prctl, self._files)
        if written:
            # A thread that exited before it got its cookie may have left its id to a thread that is not managed.
            unmanaged = written.difference(*(threads.threads for threads in observed.values()))
            if taken := tasks.with_cookie(self._prctl, sorted(unmanaged), ours):
                tasks.drop(self._prctl, taken)
        return observed, tasks.decide(wanted, observed, ours, left)

    async def _assign(self, shares: Sequence[CookieAssignment], refused: Counter[str]) -> set[int]:
        """Assign cookies; new ones are in the store before any thread gets them."""
        carriers = [CookieCarrier() for _ in shares]
        try:
            return await self._hand_out(carriers, shares, refused)
        finally:
            # Closing waits for the threads to end: not in the event loop, also after an error.
            with trio.CancelScope(shield=True):
                await self._worker.work(partial(_close, carriers))

    async def _hand_out(
        self, carriers: Sequence[CookieCarrier], shares: Sequence[CookieAssignment], refused: Counter[str]
    ) -> set[int]:
        written: set[int] = set()
        cookies = []
        for carrier, share in zip(carriers, shares, strict=True):
            load = partial(tasks.acquire, carrier, self._prctl, share.source, share.cookie)
            cookies.append(await self._worker.work(load))
        created = {
            cookie: share.group for cookie, share in zip(cookies, shares, strict=True) if cookie and not share.cookie
        }
        # Before any thread gets a new cookie: after a crash `restore` and the next run know whose it is.
        if created and not await self._save({**self._ours, **created}):
            return written
        for carrier, share, cookie in zip(carriers, shares, cookies, strict=True):
            if cookie:
                assign = partial(tasks.assign, carrier, self._prctl, share.tids)
                assigned = await self._worker.work(assign)
                written.update(assigned.done)
                self._count("written", assigned, refused)
        return written

    def _count(self, outcome: str, assigned: tasks.AssignResult, refused: Counter[str]) -> None:
        self._writes[CORE_COOKIE, outcome] += len(assigned.done)
        self._writes[CORE_COOKIE, "refused"] += len(assigned.refused)
        refused.update(assigned.errors)

    # The recorded cookies

    async def _save(self, ours: Mapping[int, str]) -> bool:
        try:
            await self._rows.save(CookieState(ours=dict(ours)))
        except StoreError as exc:
            self._unrecorded = f"no cookie is assigned that cannot be recorded: {exc}"
            return False
        return True

    async def _prune(self) -> None:
        """Drop cookies that no thread of the machine has any more."""
        self._pruned_at = time.monotonic()
        if not self._ours:
            return
        read = partial(tasks.cookie_threads, self._prctl, dict(self._ours), None, self._proc)
        held = set((await self._worker.work(read)).values())
        if held != self._ours.keys():
            await self._save({cookie: group for cookie, group in self._ours.items() if cookie in held})

    # Status and history

    def _record_statuses(
        self,
        places: Sequence[_CookieTarget],
        observed: Mapping[str, ObservedThreads],
        cookie_states: Mapping[str, _CookieState],
    ) -> None:
        before, statuses = self._statuses, dict[str, dict[str, SettingStatus]]()
        for target in places:
            path, member = target.path, target.member
            if member is None or path not in cookie_states:
                continue
            count, fresh = cookie_states[path]
            state, detail = self._state(target, observed[path], count, fresh=fresh)
            actual = member.group if count.right == count.total else f"{count.right} of {_threads(count.total)}"
            status = SettingStatus(member.setting, state, member.group, actual, detail, time.time())
            earlier = before.get(path, {}).get(CORE_COOKIE)
            if fresh and (
                earlier is None or earlier.wanted != member.group or earlier.state is SettingState.WOULD_WRITE
            ):
                self._note("write", path, group=member.group, why=member.setting.reason, setting=member.setting)
            statuses[path] = {CORE_COOKIE: status}
        self._statuses = statuses

    def _state(
        self, target: _CookieTarget, observed: ObservedThreads, tally: tasks.ThreadTally, *, fresh: bool
    ) -> tuple[SettingState, str]:
        if tally.right == tally.total and not observed.problem:
            return SettingState.WRITTEN if fresh else SettingState.IN_PLACE, _threads(tally.total)
        if target.left is not None:
            return target.left, target.detail
        if observed.problem:
            return SettingState.REFUSED, observed.problem
        if tally.foreign and not tally.wrong:
            return SettingState.YIELDED, f"{tally.foreign} of {_threads(tally.total)} keep their own cookie"
        if self._unrecorded:
            return SettingState.NOT_RECORDED, self._unrecorded
        return SettingState.WAITING, self._refused or "new threads appear faster than cookies can be assigned"

    def _note(self, kind: str, path: str, *, group: str, why: str, setting: Setting | None = None) -> None:
        self._ledger.note(
            LedgerEvent(
                at=time.time(),
                kind=kind,
                path=path,
                file=tasks.FILE,
                before="none" if setting is not None else group,
                after=group if setting is not None else "none",
                writer=US,
                policy=CORE_SCHED,
                reason=why,
                pod_uid=setting.pod_uid if setting is not None else None,
                container_id=setting.container_id if setting is not None else None,
            )
        )


def _threads(count: int) -> str:
    return plural(count, "thread")


def _tallies(
    wanted: Mapping[str, str], observed: Mapping[str, ObservedThreads], ours: Mapping[int, str], written: set[int]
) -> dict[str, _CookieState]:
    now = tasks.current(wanted, observed, ours)
    return {
        path: _CookieState(
            tasks.tally(group, observed[path], now, ours), not written.isdisjoint(observed[path].threads)
        )
        for path, group in wanted.items()
        if path in observed
    }


def _close(carriers: Sequence[CookieCarrier]) -> None:
    for carrier in carriers:
        carrier.close()


def _undo(context: OfflineContext) -> Sequence[RestoreResult]:
    return restore_cookies(RealPrctl(), context.ledger, context.only)


ACTUATOR: Final = ActuatorKind(
    codecs={COOKIE: CODEC},
    build=lambda context: CoreSched(context, RealPrctl()),
    undo=_undo,
)
