"""Executes one eviction: notice, one method after another, proof that no process is left, the result. Resumable.

Every action on the pod is journalled first. An earlier run's case resumes at its step: an action that may or may not
have been done is repeated, as all of them may be; waiting continues with the time left.

It ends as - done: the pod's groups are empty in every hierarchy, and stayed so while the kubelet might have started it
again; - gone: they were empty before any action; - refused: its disruption budget refused or could not be asked, or the
daemon itself runs in it; - failed: every method has been tried; - abandoned: withdrawn, held by an operator, switched
off, or of another boot.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import CgroupError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.subtree import Subtree
from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.responses.eviction.journal import EvictionJournal
from reconciler.responses.means.base import EvictionMethod, EvictionResult, grace_of, pdb_blocks
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.notice import NoticeSender
from reconciler.responses.means.processes import OwnPodError, PodTermination, has_processes, thaw, wait_empty
from state.eviction import EvictionCase, EvictionMethodName, EvictionOrder, EvictionOutcome, EvictionStep


class _End(NamedTuple):
    """How the alert of a case's end speaks of it."""

    kind: AlertKind
    severity: Severity
    words: str


_ENDS: Final = {
    EvictionOutcome.DONE: _End(AlertKind.EVICTION_DONE, Severity.WARNING, "was evicted"),
    EvictionOutcome.GONE: _End(AlertKind.EVICTION_DONE, Severity.INFO, "ended before it was evicted"),
    EvictionOutcome.REFUSED: _End(AlertKind.EVICTION_REFUSED, Severity.WARNING, "was not evicted: refused"),
    EvictionOutcome.ABANDONED: _End(AlertKind.EVICTION_REFUSED, Severity.INFO, "eviction cancelled"),
    EvictionOutcome.FAILED: _End(AlertKind.EVICTION_FAILED, Severity.CRITICAL, "eviction failed"),
}
_MOST_RANKED: Final = 20
_LOCAL: Final = frozenset({EvictionMethodName.CRI, EvictionMethodName.SIGNAL})
"""Methods of which the kubelet is not informed: it may start the pod again."""
_LOOK_S: Final = 0.25
ACTED: Final = frozenset({EvictionStep.STOP, EvictionStep.TERMINATE, EvictionStep.KILL, EvictionStep.VERIFY})
"""Steps of methods that know no disruption budget."""
_BEFORE_ACTS: Final = frozenset({EvictionStep.PLANNED, EvictionStep.NOTICE})


def planned_alert(case: EvictionCase) -> Alert:
    text = f"will be evicted ({case.order.cause}): {case.order.evidence}"
    return _alert(case, AlertKind.EVICTION_PLANNED, Severity.WARNING, text, case.begun_s)


def unguarded_alert(case: EvictionCase, at_s: float) -> Alert:
    """Before the first action that no disruption budget has allowed."""
    text = (
        f"is ended without its disruption budget, which could not be asked ({case.unasked}): "
        f"{case.order.cause}: {case.order.evidence}"
    )
    return _alert(case, AlertKind.EVICTION_UNGUARDED, Severity.CRITICAL, text, at_s)


def ended_alert(case: EvictionCase) -> Alert:
    assert case.outcome is not None
    end = _ENDS[case.outcome]
    text = f"{end.words} ({case.order.cause}): {case.detail}"
    return _alert(case, end.kind, end.severity, text, case.ended_s, outcome=str(case.outcome))


def _alert(case: EvictionCase, kind: AlertKind, severity: Severity, text: str, at_s: float, **labels: str) -> Alert:
    order = case.order
    pod = {"namespace": order.namespace or "", "pod": order.name or order.title, "uid": order.uid, "cause": order.cause}
    means = {"means": str(case.means)} if case.means is not None else {}
    return Alert(
        kind=kind,
        key=f"eviction:{order.id}",
        summary=f"{order.title} {text}",
        severity=severity,
        at_s=at_s,
        labels={**pod, **means, **labels},
        details=_details(case),
        durable=True,
    )


def _details(case: EvictionCase) -> dict[str, str]:
    order = case.order
    texts = {
        "order": order.id,
        "evidence": order.evidence,
        "ranking": "\n".join(order.ranking[:_MOST_RANKED]),
        "tried": "\n".join(case.tried),
        "rounds": str(case.rounds) if case.rounds else "",
        "budget": case.budget,
        "unasked": case.unasked,
    }
    return {name: text for name, text in texts.items() if text}


class CaseTools(Struct, frozen=True, kw_only=True):
    """The tools and rules that all cases share.

    ``forbidden``: why a case must not go on (held, switched off, withdrawn); None: it may. ``turn``: of the cases whose
    disruption budgets could not be asked. ``critical``: whether an order's shortage would kill online pods now.
    ``boot``: this boot's id.
    """

    hierarchy: Hierarchy
    journal: EvictionJournal
    ways: Sequence[EvictionMethod]
    notices: NoticeSender
    config: EvictionMeans
    processes: PodTermination
    forbidden: Callable[[EvictionCase], str | None]
    turn: "SingleTurn"
    critical: Callable[[EvictionOrder], bool]
    boot: str = ""
    clock: Callable[[], float] = time.time


@final
class SingleTurn:
    """Lets one order at a time act."""

    def __init__(self) -> None:
        self._holders: set[str] = set()
        self._free_at = -math.inf

    def resume(self, orders: Iterable[str]) -> None:
        """At the start: orders that had acted in an earlier run precede all others."""
        self._holders = set(orders)

    def take(self, order: str) -> bool:
        """Whether it is this order's turn, which is its own then until `release`."""
        if order not in self._holders and (self._holders or trio.current_time() < self._free_at):
            return False
        self._holders.add(order)
        return True

    def release(self, order: str, *, rest_s: float = 0.0) -> None:
        """Give the turn back; the next begins after ``rest_s``. Harmless for an order that never had it."""
        if order in self._holders:
            self._holders.discard(order)
            # Of several orders of an earlier run the last one may end first: no rest cuts another short.
            self._free_at = max(self._free_at, trio.current_time() + rest_s)


class _CaseEnd(Exception):
    """Raised anywhere in a case to end it."""

    def __init__(self, outcome: EvictionOutcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


@final
class CaseRunner:
    """`EvictionWork` for one case. ``changed`` is called with every case that has become durable."""

    def __init__(self, case: EvictionCase, tools: CaseTools, changed: Callable[[EvictionCase], None]) -> None:
        self._case = case
        self._tools = tools
        self._changed = changed
        self._tree: Subtree | None = None
        # The step of an earlier run; None once this run is past it.
        self._resumed: EvictionStep | None = case.step if case.step is not EvictionStep.PLANNED else None
        self._stepped: float | None = None
        """When the present step became durable (trio's clock); None: in an earlier run."""
        self._way: EvictionMethodName | None = case.means
        self._broken: str | None = None

    # As `EvictionWork`

    @property
    def case(self) -> EvictionCase:
        return self._case

    @property
    def resumed(self) -> EvictionStep | None:
        return self._resumed

    @property
    def tree(self) -> Subtree:
        assert self._tree is not None
        return self._tree

    @property
    def processes(self) -> PodTermination:
        return self._tools.processes

    @property
    def grace_s(self) -> float:
        """The time that the pod has to end by itself."""
        return grace_of(self._case.order, self._case.target.grace_s, self._tools.config)

    def check(self) -> None:
        why = self._tools.forbidden(self._case)
        if why is not None:
            more = "; the API server had already accepted it" if self._case.accepted else ""
            raise _CaseEnd(EvictionOutcome.ABANDONED, why + more)

    def elapsed_s(self) -> float:
        """Time since the step was first journalled; never negative, even if the clock is set.

        For a step of this run by a clock that cannot be set, and from when the step was durable: while the store fails,
        the pod's time does not run.
        """
        if self._stepped is not None:
            return trio.current_time() - self._stepped
        return max(0.0, self._tools.clock() - self._case.step_s)

    async def step(
        self,
        step: EvictionStep,
        *,
        accepted: bool = False,
        pid_starts: Mapping[int, int] | None = None,
        stopped: tuple[str, ...] | None = None,
    ) -> None:
        if accepted:
            self._case = replace(self._case, accepted=True)  # known from here on, whatever `check` returns
        self.check()
        again = self._resumed is step
        self._resumed = None
        if again:
            return  # it is in the journal, with its start time
        case = replace(self._case, step=step, means=self._way, step_s=self._tools.clock())
        if pid_starts is not None:
            case = replace(case, pid_starts={str(pid): start for pid, start in pid_starts.items()})
        if stopped is not None:
            case = replace(case, stopped=stopped)
        await self._write(case)
        self._stepped = trio.current_time()

    async def replied(self, message: str, *, budget: bool = False) -> None:
        """See `EvictionWork`. Of the refusals the first is kept."""
        case = replace(self._case, reply=message, requests=self._case.requests + 1)
        await self._write(replace(case, budget=message) if budget and not case.budget else case)

    # The whole of it

    async def plan(self) -> None:
        """Journal the case, and alert that it is planned. No action on the pod."""
        now, case = self._tools.clock(), self._case
        try:
            with Subtree.open(self._tools.hierarchy, case.target.group) as tree:
                case = replace(case, target=replace(case.target, inodes=tree.inodes))
        except CgroupError as exc:
            self._broken = str(exc)  # in the journal all the same; `run` ends it
        case = replace(case, boot=self._tools.boot, begun_s=now, step_s=now)
        await self._write(case, planned_alert(case))

    async def run(self) -> EvictionCase:
        if self._case.boot != self._tools.boot:
            outcome, detail = EvictionOutcome.ABANDONED, "the machine was rebooted"
        elif self._broken is not None:
            outcome, detail = EvictionOutcome.FAILED, self._broken
        else:
            try:
                outcome, detail = await self._within_groups()
            finally:
                # One that has stayed ended was watched for as long; one that returned has to be ready before the next.
                returned = self._case.unguarded and self._case.rounds > 0
                rest_s = self._tools.config.restarts.watch_s if returned else 0.0
                self._tools.turn.release(self._case.order.id, rest_s=rest_s)
        case = replace(
            self._case,
            step=EvictionStep.ENDED,
            outcome=outcome,
            detail=detail,
            ended_s=self._tools.clock(),
            pid_starts={},
            stopped=(),
        )
        await self._write(case, ended_alert(case))
        return case

    async def _within_groups(self) -> tuple[EvictionOutcome, str]:
        """All of it while the groups are held open; how it ended."""
        try:
            # By the groups' inodes: a later pod of the same name is never touched.
            with Subtree.open(self._tools.hierarchy, self._case.target.group, self._case.target.inodes) as tree:
                self._tree = tree
                try:
                    await self._go()
                    end = _CaseEnd(
                        EvictionOutcome.FAILED, "; ".join(self._case.tried) or "no eviction method available"
                    )
                except _CaseEnd as exc:
                    end = exc
                except OwnPodError as exc:
                    end = _CaseEnd(EvictionOutcome.REFUSED, str(exc))
                await self._abandon(end.outcome)
                return end.outcome, end.detail
        except CgroupError as exc:
            return EvictionOutcome.FAILED, str(exc)

    async def _go(self) -> None:
        if not await has_processes(self.tree):
            await self._found_empty()
        self.check()
        await self._tools.processes.members(self.tree)  # raises when we are one of them
        await self._notice()
        for way in self._tools.ways:
            if way.means in self._case.left or self._record_step(way):
                continue
            if way.means is not EvictionMethodName.API:
                await self._carry_out()
            await self._try(way)
        self._obey(last=True)

    def _obey(self, *, last: bool = False) -> None:
        """Ends the case where its disruption budget has refused or could not be asked, also an earlier run.

        What has started to end is ended: half a pod helps neither it nor others. ``last``: no method is left to act.
        """
        begun = self._case.step in ACTED
        critical = self._case.order.critical and (begun or (not last and self._tools.critical(self._case.order)))
        if (why := pdb_blocks(self._case, self._tools.config, critical=critical)) is not None:
            raise _CaseEnd(EvictionOutcome.REFUSED, f"{why}: {self._case.budget or self._case.unasked}")

    async def _carry_out(self) -> None:
        """Before a method that knows no disruption budget; returns when one may be used.

        Of the cases whose budgets could not be asked one at a time acts, until its pod has stayed ended, or has been
        back, for ``restarts.watch_s``. The others follow only if their shortage is critical then. Before it acts it is
        reported.
        """
        self._obey()
        if not self._case.unguarded:
            return
        waited = False
        while not self._tools.turn.take(self._case.order.id):
            waited = True
            if await wait_empty(self.tree, _LOOK_S):
                raise _CaseEnd(EvictionOutcome.GONE, "ended before its turn")
            self.check()
            self._obey()
        if waited:
            await self._ask_again()
        if self._case.unguarded and not self._case.announced:
            await self._write(replace(self._case, announced=True), unguarded_alert(self._case, self._tools.clock()))

    async def _ask_again(self) -> None:
        """Request the eviction once more: while others had the turn the API server may have become reachable."""
        for way in self._tools.ways:
            if way.means is EvictionMethodName.API:
                left = tuple(means for means in self._case.left if means is not way.means)
                self._case = replace(self._case, left=left)
                await self._try(way)
        self._obey()

    def _record_step(self, way: EvictionMethod) -> bool:
        """Whether an earlier run was beyond this method already; the configured order may have changed since."""
        resumed_at = self._case.means if self._resumed is not None else None
        usable = [method.means for method in self._tools.ways]
        return resumed_at in usable and resumed_at is not way.means and resumed_at not in self._case.left

    async def _found_empty(self) -> None:
        if self._case.step is EvictionStep.PLANNED:
            raise _CaseEnd(EvictionOutcome.GONE, "no process was left")
        if self._case.step is EvictionStep.NOTICE:
            raise _CaseEnd(EvictionOutcome.DONE, "ended after the notice")
        await self._verify("had ended before the daemon resumed")

    async def _notice(self) -> None:
        if self._case.step not in _BEFORE_ACTS:
            return
        notices = self._tools.notices
        wish = notices.wanted(self._case)
        if wish is None:
            self._resumed = None
            return
        again = self._resumed is EvictionStep.NOTICE
        await self.step(EvictionStep.NOTICE)
        await thaw(self.tree)
        said = await notices.send(self, wish, again=again)
        self._case = replace(self._case, tried=(*self._case.tried, f"notice: {said}"))
        if not await has_processes(self.tree):
            raise _CaseEnd(EvictionOutcome.DONE, "ended after the notice")

    async def _try(self, way: EvictionMethod) -> None:
        """One means, again when the kubelet brings the pod back; returns when it does not help."""
        if self._case.means is not way.means:
            self._resumed = None
        if self._resumed is EvictionStep.VERIFY:
            # It has been started again between two checks, or had not quite ended.
            self._resumed = None
            await self._count_return()
        # After the API server has accepted it only the wait is left, which needs no connection.
        if self._resumed is not EvictionStep.WAIT and (result := way.unusable(self._case)) is not None:
            self._give_up(way.means, result)
            return
        self._way = way.means
        while True:
            result = await way.terminate(self)
            self._resumed = None
            if result.returned:
                await self._count_return()
                continue
            if result.outcome is None:
                self._give_up(way.means, result)
                return
            if result.outcome is not EvictionOutcome.DONE:
                raise _CaseEnd(result.outcome, result.detail)
            await self._verify(result.detail)

    def _give_up(self, means: EvictionMethodName, result: EvictionResult) -> None:
        """Durable with the next step; without one the end reports it."""
        case = self._case
        unasked = case.unasked
        if means is EvictionMethodName.API:
            unasked = result.detail if result.unasked else ""
        self._case = replace(
            case,
            tried=(*case.tried, f"{means}: {result.detail}"),
            left=(*case.left, means),
            unasked=unasked,
            pid_starts={},
        )

    async def _verify(self, detail: str) -> None:
        """Ends the case as done when the pod remains empty; returns when the kubelet has started it again."""
        self._way = self._case.means
        await self.step(EvictionStep.VERIFY)
        if self._case.means in _LOCAL and self.tree.exists:
            left_s = self._tools.config.restarts.watch_s - self.elapsed_s()
            if await self._comes_back(max(0.0, left_s)):
                await self._count_return()
                return
        raise _CaseEnd(EvictionOutcome.DONE, detail)

    async def _comes_back(self, within_s: float) -> bool:
        with trio.move_on_after(within_s):
            while self.tree.exists:
                if await has_processes(self.tree):
                    return True
                await trio.sleep(_LOOK_S)
        return await has_processes(self.tree)

    async def _count_return(self) -> None:
        rounds = self._case.rounds + 1
        self._case = replace(self._case, rounds=rounds, pid_starts={}, stopped=())
        if self._case.unguarded:
            raise _CaseEnd(
                EvictionOutcome.FAILED,
                "restarted by the kubelet after it was ended; not ended again, as its disruption budget could not be "
                f"asked: {self._case.unasked}",
            )
        most = self._tools.config.restarts.times
        if rounds > most:
            raise _CaseEnd(EvictionOutcome.FAILED, f"restarted by the kubelet {rounds} times after it was ended")

    async def _abandon(self, outcome: EvictionOutcome) -> None:
        """No process remains stopped, and no running pod waits for an end that is cancelled."""
        await thaw(self.tree)
        if outcome not in {EvictionOutcome.DONE, EvictionOutcome.FAILED} and await has_processes(self.tree):
            await self._tools.notices.withdraw(self._case)

    async def _write(self, case: EvictionCase, *due: Alert) -> None:
        await self._tools.journal.write(case, *due)
        self._case = case
        self._changed(case)
