"""Executes evictions: takes orders, journals them, runs a few at a time, and reports how each ended.

A component. Open cases of an earlier run are resumed first. It decides nothing: the submitter of orders decides which
pods and how many; `cases` has the open cases and the results of the last ones.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, final

import trio

from cgroupfs.errors import StoreError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.log import get_log
from reconciler.clients.kube import KubeApi
from reconciler.responses.eviction.case import ACTED, CaseRunner, CaseTools, SingleTurn
from reconciler.responses.eviction.journal import AlertStage, EvictionJournal
from reconciler.responses.means.base import EvictionMethod, MethodSetup
from reconciler.responses.means.config import NOTICE_ANNOTATION, EvictionMeans
from reconciler.responses.means.notice import NoticeSender
from reconciler.responses.means.processes import PodTermination
from reconciler.responses.means.table import build
from reconciler.runtime.wakeup import WakeUp
from reconciler.sources.cri import CriClient
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome, EvictionStep, EvictionTarget
from state.evidence import PodSnapshot
from state.model import SourceStatus
from state.store import Store

_LOG: Final = get_log("executor")
NAME: Final = "evictor"
KEEP_S: Final = 7200.0
"""An ended case is remembered this long: limits reach back an hour."""
_FORGET_S: Final = 60.0
_LOAD_AGAIN_S: Final = 5.0
_CLOSE_S: Final = 2.0
_CLOSING_S: Final = 5.0
"""So long an eviction waits for the node to be closed to new BE pods: longer would be a shortage without relief."""
_CLOSING_POLL_S: Final = 0.05
_RECENT_S: Final = 60.0
_STILL_UNDONE: Final = frozenset({EvictionStep.PLANNED, EvictionStep.NOTICE, EvictionStep.ASK})
_MAY_BE_FROZEN: Final = frozenset({EvictionStep.PLANNED, EvictionStep.ASK})


@final
class Evictor:
    """Takes orders and runs their cases. `submit` and `cases` may be called before it runs."""

    def __init__(
        self,
        config: EvictionMeans,
        *,
        hierarchy: Hierarchy,
        store: Store,
        lane: trio.CapacityLimiter,
        stage: AlertStage,
        api: KubeApi,
        cri: Callable[[], CriClient | None],
        kubelet_dir: str,
        pods: Callable[[str], PodSnapshot | None],
        forbidden: Callable[[EvictionOrder], str | None],
        closing: Callable[[], bool],
        ways: Sequence[EvictionMethod] | None = None,
        processes: PodTermination | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``api`` and what ``cri`` makes are for this only. ``kubelet_dir``: its root directory, root prefix included.

        ``cri`` is called again as long as it returns None: the socket is missing (yet), or CRI is off.

        ``pods``: a pod's present state, by uid. ``forbidden``: why an order must not be carried out (any more): a dry
        run, a hold; None: it may be.

        ``closing``: the node is being closed to new BE pods, and the cluster does not know it yet.
        """
        self._hierarchy = hierarchy
        self._api = api
        self._find_cri = cri
        self._cri: CriClient | None = None
        self._pods_dir = os.path.join(kubelet_dir, "pods")
        self._pods = pods
        self._forbidden = forbidden
        self._closing = closing
        self._fixed_ways = ways
        self._processes = processes or PodTermination()
        self._clock = clock
        self._boot = store.boot
        self._journal = EvictionJournal(store, lane, stage)
        self._cases: dict[str, EvictionCase] = {}
        self._new: dict[str, EvictionCase] = {}
        self._withdrawn: dict[str, str] = {}
        self._waiting: dict[str, trio.CancelScope] = {}
        """Cases that wait for their turn, by order."""
        self.ended: Final[dict[EvictionOutcome, int]] = dict.fromkeys(EvictionOutcome, 0)
        """Cases that ended in this run of the daemon, by outcome."""
        self._turn = SingleTurn()
        self._critical: Collection[tuple[str, str]] | None = None
        """Trigger and subject; None: not measured since the start."""
        self._wake = WakeUp()
        self._loaded = False
        self.reconfigure(config)

    # For the eviction planner

    def submit(self, order: EvictionOrder) -> None:
        """Have an order carried out. An order for an unknown pod, or for one that is being evicted, is dropped."""
        pod = self._pods(order.uid)
        if pod is None:
            _LOG.warning("not evicted: the pod is gone", pod=order.title)
            return
        if order.id in self._cases or any(case.open and case.order.uid == order.uid for case in self.cases()):
            _LOG.warning("the pod is already being evicted", pod=order.title)
            return
        target = EvictionTarget(
            group=pod.group,
            grace_s=pod.grace_s,
            static=pod.static,
            notice=pod.annotations.get(NOTICE_ANNOTATION),
        )
        now = self._clock()
        self._new[order.id] = EvictionCase(order=order, target=target, boot=self._boot, begun_s=now, step_s=now)
        self._wake.set()

    def withdraw(self, order: str, why: str) -> None:
        """The reason for an order no longer applies. A pod whose end has started is still ended."""
        case = next((case for case in self.cases() if case.open and case.order.id == order), None)
        if case is not None:
            self._withdrawn[order] = why
            if order in self._waiting and self._why_not(case) is not None:
                self._waiting[order].cancel()

    def measured(self, critical: Collection[tuple[str, str]]) -> None:
        """The shortages that would kill online pods now, by trigger and subject: only they end pods without budgets."""
        self._critical = critical

    def cases(self) -> tuple[EvictionCase, ...]:
        """All that are open, and those that ended in the last hours; the oldest first."""
        return (*self._cases.values(), *(case for key, case in self._new.items() if key not in self._cases))

    def ending(self) -> frozenset[str]:
        """Pods that must not be frozen now, by uid: their end is announced or under way."""
        return frozenset(
            case.order.uid for case in self._cases.values() if case.open and case.step not in _MAY_BE_FROZEN
        )

    def status(self) -> SourceStatus:
        problem = self._journal.problem
        count = sum(case.open for case in self.cases())
        return SourceStatus(name=NAME, ok=problem is None, age_s=0.0, detail=problem or f"{count} under way")

    def reconfigure(self, config: EvictionMeans) -> None:
        """For cases that begin from now on; those under way end as they began."""
        self._config = config
        ways = self._fixed_ways
        if ways is None:
            ways = build(MethodSetup(config=config, api=self._api, cri=self._runtime))
        self._tools = CaseTools(
            hierarchy=self._hierarchy,
            journal=self._journal,
            ways=ways,
            notices=NoticeSender(config.notice, self._pods_dir),
            config=config,
            processes=self._processes,
            forbidden=self._why_not,
            turn=self._turn,
            critical=self._is_critical,
            boot=self._boot,
            clock=self._clock,
        )
        self._turns = trio.CapacityLimiter(config.at_once)

    def _runtime(self) -> CriClient | None:
        if self._cri is None:
            self._cri = self._find_cri()
        return self._cri

    # Running

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry out orders for ever. Started when what an earlier run left is known, and is being taken up."""
        try:
            await self._load()
            async with trio.open_nursery() as nursery:
                for case in self._cases.values():
                    if case.open:
                        nursery.start_soon(self._carry_out, case, True, name=f"evict {case.order.title}")
                task_status.started()
                while True:
                    for case in [case for key, case in self._new.items() if key not in self._cases]:
                        self._cases[case.order.id] = case
                        nursery.start_soon(self._carry_out, case, False, name=f"evict {case.order.title}")
                    self._new.clear()
                    await self._wake.wait(_FORGET_S)
                    await self._forget()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                await self._api.aclose()
                if self._cri is not None:
                    await self._cri.aclose()

    async def _load(self) -> None:
        """The store's cases replace those that an earlier run of this component has left in memory."""
        while True:
            try:
                cases = await self._journal.load()
            except StoreError as exc:
                _LOG.warning("cannot read the evictions of the last run", error=str(exc))
                await trio.sleep(_LOAD_AGAIN_S)
            else:
                self._cases = {case.order.id: case for case in cases}
                acted = (case for case in cases if case.open and case.unguarded and case.step in ACTED)
                self._turn.resume(case.order.id for case in acted)
                return

    async def _carry_out(self, case: EvictionCase, known: bool) -> None:
        handling = CaseRunner(case, self._tools, self._changed)
        if not known:
            await handling.plan()  # before its turn: it is known and announced
            await self._until_closed(case.order)
        turns, order = self._turns, case.order.id
        try:
            # A withdrawn case ends without a turn: no action on the pod.
            with trio.CancelScope() as waiting:
                self._waiting[order] = waiting
                await turns.acquire()
        finally:
            del self._waiting[order]
        try:
            ended = await handling.run()
        finally:
            if not waiting.cancelled_caught:
                turns.release()
        self._withdrawn.pop(ended.order.id, None)
        if ended.outcome is not None:
            self.ended[ended.outcome] += 1
        _LOG.info("an eviction has ended", pod=ended.order.title, outcome=ended.outcome, detail=ended.detail)

    async def _until_closed(self, order: EvictionOrder) -> None:
        """Wait until the cluster can know that the node is closed, so that no replacement is scheduled here.

        Not for a critical shortage: the kernel would kill pods meanwhile.
        """
        with trio.move_on_after(_CLOSING_S):
            # Polled: three parts of the daemon decide it, and it is rare.
            while self._closing() and not self._is_critical(order) and order.id not in self._withdrawn:  # noqa: ASYNC110
                await trio.sleep(_CLOSING_POLL_S)

    def _is_critical(self, order: EvictionOrder) -> bool:
        """By the last measurement; before the first by the order itself, while it is recent."""
        if self._critical is None:
            return order.critical and abs(self._clock() - order.decided_s) <= _RECENT_S
        return (order.cause, order.subject) in self._critical

    def _changed(self, case: EvictionCase) -> None:
        self._cases[case.order.id] = case

    def _why_not(self, case: EvictionCase) -> str | None:
        withdrawn = self._withdrawn.get(case.order.id)
        if withdrawn is not None and case.step in _STILL_UNDONE and not case.accepted:
            return withdrawn
        return self._forbidden(case.order)

    async def _forget(self) -> None:
        before = self._clock() - KEEP_S
        old = [key for key, case in self._cases.items() if not case.open and case.ended_s < before]
        if old:
            await self._journal.forget(old)
            for key in old:
                del self._cases[key]
