"""Marks the node's own object in the cluster while the node is closed to new BE pods. An auxiliary actuator.

One taint, or one condition (`state.closing`); headroom 0 is published elsewhere (`reconciler.headroom.report`). What
another client has set, changed or removed is not changed: each request names what was read (`NodeClient`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

import msgspec
import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from cgroupfs.errors import SourceError, StoreError
from cgroupfs.log import get_log
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    OfflineContext,
    PeriodicActuator,
    PeriodicWorker,
    PlanSnapshot,
)
from reconciler.actuators.codec import LedgerState, RowCodec, read_rows, row_of, write_rows
from reconciler.actuators.holds import holding
from reconciler.clients.node_object import (
    NodeAbsentError,
    NodeBusyError,
    NodeClient,
    NodeCondition,
    NodeConflictError,
    NodeObject,
    NodeRefusedError,
    NodeTaint,
    other_machine,
)
from state.closing import (
    CLOSED_CONDITION,
    CLOSED_KEY,
    NODE_MARK,
    TAINT_EFFECTS,
    ClosedNode,
    MarkState,
    MarkStatus,
    NodeMark,
)
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.kinds import NODE_OBJECT
from state.ledger import Ledger
from state.store import boot_id

NAME: Final = "node_mark"
_LOG: Final = get_log(NAME)
_ABSENT: Final = "none"
_CONDITION: Final = "condition"
_GAP_S: Final = 2.0
"""Least time between two changes of the object."""
_VERIFY_S: Final = 60.0
"""How often the mark is read again while it is in place."""
_FIRST_RETRY_S: Final = 5.0
_LAST_RETRY_S: Final = 60.0
"""As often as a mark in place is read. Only a retry shows that rights were granted again."""
_TRIES: Final = 4
"""In a row after conflicts with other clients. The last one sets a condition for any version of the object, of which
other clients change other parts all the time."""
_CONFLICT_S: Final = 0.1
_END_S: Final = 4.0
"""For the removal at an orderly end."""
_LATE_S: Final = 40.0
"""So long after its request a change without an answer may still be made: the API server's own limit is 34 s."""
_MOST_TEXTS: Final = 8
"""Texts of ours that a row keeps: the object has at most one of them."""
_LONGEST_MESSAGE: Final = 200
_FINE: Final = frozenset({MarkState.IN_PLACE, MarkState.HEADROOM_ONLY})


class MarkRow(Struct, frozen=True, kw_only=True):
    """One mark that the object may have. ``field``: a taint's effect, or ``condition``. ``ours``: its texts."""

    path: str
    field: str
    ours: tuple[str, ...]
    reason: str = ""


class MarkRows(Struct, frozen=True, kw_only=True):
    """All of them, by field: one node has one object."""

    rows: Mapping[str, MarkRow] = {}


_FIELDS: Final = frozenset({*TAINT_EFFECTS, _CONDITION})


def _load(rows: Iterable[LedgerEntry]) -> MarkRows:
    return MarkRows(
        rows={
            row.file: MarkRow(path=row.path, field=row.file, ours=row.ours, reason=row.reason)
            for row in rows
            if row.file in _FIELDS and row.path.startswith("/api/v1/nodes/")
        }
    )


def _dump(state: MarkRows) -> Iterable[LedgerEntry]:
    for field, row in sorted(state.rows.items()):
        made = row_of(NODE_OBJECT, row.path, field, knob=NODE_MARK, policy=NAME, original=_ABSENT, ours=row.ours)
        yield replace(made, reason=row.reason)


CODEC: Final = RowCodec(kind=NODE_OBJECT, load=_load, dump=_dump)


# The texts: what the object has, as the ledger keeps it


def taint_of(closed: ClosedNode, effect: str) -> NodeTaint:
    """The taint. Its value is its latest end, UTC: by it a person sees the taint of a dead agent."""
    value = time.strftime("until-%Y%m%dT%H%M%SZ", time.gmtime(closed.until_s))
    return NodeTaint(key=CLOSED_KEY, effect=effect, value=value)


def condition_of(closed: ClosedNode) -> NodeCondition:
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(closed.until_s))
    message = f"closed to new BE pods by bypassd, until {until} at most: {closed.reason}"[:_LONGEST_MESSAGE]
    return NodeCondition(type=CLOSED_CONDITION, status="True", reason="Shortage", message=message)


def _text(mark: NodeTaint | NodeCondition) -> str:
    return msgspec.json.encode(mark).decode()


def _present(node: NodeObject, field: str) -> str | None:
    """What the object has of a field now; None: nothing."""
    if field == _CONDITION:
        condition = node.condition(CLOSED_CONDITION)
        return None if condition is None else _text(condition)
    listed = node.taint(CLOSED_KEY, field)
    return None if listed is None else _text(listed.taint)


def _writer(node: NodeObject, field: str) -> str:
    """Who has written a field last, where that is known. Of taints the whole list is one field."""
    if field == _CONDITION:
        name = node.writer("f:status", "f:conditions", f'k:{{"type":"{CLOSED_CONDITION}"}}')
        return f" (written by {name})" if name else ""
    name = node.writer("f:spec", "f:taints")
    return f" (taints last written by {name})" if name else ""


async def _put(client: NodeClient, node: NodeObject, field: str, text: str, *, last: bool) -> NodeObject:
    """Set a field to ``text``; returns the object after that. Errors: `SourceError`."""
    if field == _CONDITION:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = decoded(msgspec.json.Decoder(NodeCondition).decode, text)
        return await client.set_condition(node, condition, at, any_version=last)
    taint = decoded(msgspec.json.Decoder(NodeTaint).decode, text)
    listed = node.taint(CLOSED_KEY, field)
    if listed is None:
        return await client.add_taint(node, taint)
    return await client.replace_taint(node, listed, taint)


class Removal(NamedTuple):
    """``wait_s``: the delay that the API server requests before it is tried again."""

    result: RestoreResult
    wait_s: float = 0.0


async def remove(client: NodeClient, row: MarkRow) -> Removal:
    """Remove a mark if it is ours, also after a conflict. Errors: none; they are in the result."""
    # The row's object, whatever name the node has now. One that is another machine's now has no text of ours.
    client = client.of(row.path)

    def result(undo: RestoreOutcome, detail: str = "", wait_s: float | None = None) -> Removal:
        outcome = RestoreResult(path=row.path, file=_shown(row.field), undo=undo, text=_ABSENT, detail=detail)
        return Removal(outcome, wait_s or 0.0)

    problem = ""
    for number in range(1, _TRIES + 1):
        try:
            node = await client.read()
            present = _present(node, row.field)
            if present is None:
                return result(RestoreOutcome.ALREADY)
            if present not in row.ours:
                return result(RestoreOutcome.FOREIGN)
            if row.field == _CONDITION:
                node = await client.remove_condition(node, CLOSED_CONDITION, any_version=number == _TRIES)
            elif (listed := node.taint(CLOSED_KEY, row.field)) is not None:
                node = await client.remove_taint(node, listed)
        except NodeConflictError as exc:
            problem = str(exc)
            await trio.sleep(_CONFLICT_S)
            continue
        except NodeAbsentError as exc:
            return result(RestoreOutcome.GONE, str(exc))
        except NodeBusyError as exc:
            return result(RestoreOutcome.REFUSED, str(exc), exc.wait_s)
        except SourceError as exc:
            return result(RestoreOutcome.REFUSED, str(exc))
        if _present(node, row.field) is None:
            return result(RestoreOutcome.RESTORED)
        problem = "accepted, but it is still there"
    return result(RestoreOutcome.REFUSED, problem)


def _shown(field: str) -> str:
    return f"condition {CLOSED_CONDITION}" if field == _CONDITION else f"taint {CLOSED_KEY}:{field}"


@final
class NodeMarker(PeriodicActuator):
    name = NAME

    def __init__(
        self,
        ledger: Ledger,
        lane: trio.CapacityLimiter,
        client: Callable[[], NodeClient],
        *,
        boot: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``lane``: the store's one-thread limiter. ``client``: made with the first request. ``boot``: the kernel's."""
        self._boot = boot
        self.counts: Counter[str] = Counter()
        self._rows = LedgerState(CODEC, ledger, lane)
        self._make = client
        self._made: NodeClient | None = None
        self._clock = clock
        super().__init__(PeriodicWorker(self._sweep, self._period_s, gap_s=_GAP_S))
        self._status: MarkStatus | None = None
        self._wanted: ClosedNode | None = None
        self._confirmed = ""
        """The uid of the object on which our mark was read back since the node was closed: if the mark is missing there
        now, another client has removed it. An object that was deleted and made again has another uid."""
        self._late_until = clock() + _LATE_S if self._rows.now.rows else float("-inf")
        """Until then a request without an answer may be carried out: a row stays even without its mark."""
        self._failures = 0
        self._retry_at = 0.0
        self._left: list[RestoreResult] = []
        self._left_wait_s = self._set_wait_s = self._allowed_at = 0.0

    # The interface of an auxiliary actuator

    def planned(self, situation: PlanSnapshot) -> None:
        """A reconciliation is over. Only another wanted mark or hold wakes a sweep, or what an earlier run left."""
        before = self._worker.situation
        wanted = _wanted(situation)
        changed = before is None or _wanted(before) != wanted or before.holds != situation.holds
        if wanted != self._wanted:
            self._wanted, self._confirmed = wanted, ""
            self._status = None if wanted is None else MarkStatus(mark=wanted.mark, state=MarkState.PENDING)
            self._failures, self._retry_at = 0, 0.0
        self._worker.planned(situation, wake=changed and (wanted is not None or bool(self._rows.now.rows)))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Set, verify and remove the mark, for ever; at the end it is removed."""
        try:
            await super().run(task_status=task_status)
        finally:
            # Nothing on the node would open it again.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
                await self.restore()
                if self._made is not None:
                    await self._made.aclose()
                    self._made = None

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Remove the mark; it belongs to no pod."""
        if only is not None:
            return ()
        async with self._worker.restoring():
            return await self._remove(self._rows.now.rows.values())

    def api_usable(self) -> bool:
        """Retry what has failed now, except within a delay that the API server has requested."""
        if not self._failures:
            return False
        self._failures, self._retry_at = 0, self._allowed_at
        self._worker.wake()
        return True

    def mark(self) -> MarkStatus | None:
        """What became of the mark; None: none is wanted."""
        return self._status

    def status(self) -> Mapping[str, object]:
        """The mark that is wanted, its state, and what is left of earlier ones; counts."""
        status, client = self._status, self._made
        return {
            "mark": None if status is None else status.mark,
            "state": None if status is None else status.state,
            "detail": "" if status is None else status.detail,
            "node": None if client is None else client.path,
            "recorded": [_shown(field) for field in sorted(self._rows.now.rows)],
            "requests": 0 if client is None else client.requests,
            "counts": dict(sorted(self.counts.items())),
        }

    def problems(self) -> Sequence[str]:
        """Why the mark is not in place, or not removed."""
        problems = []
        status = self._status
        if status is not None and status.state in {MarkState.REFUSED, MarkState.FAILED}:
            problems.append(f"mark {status.mark} on the node's object: {status.detail}")
        problems += [f"{result.file} is not removed: {result.detail}" for result in self._left]
        return problems

    # One sweep

    async def _sweep(self, situation: PlanSnapshot) -> None:
        if self._clock() < self._retry_at:
            return
        self._left_wait_s = self._set_wait_s = 0.0
        wanted = _wanted(situation)
        held = holding(situation.holds, path=self._client().path, knob=NODE_MARK, pod_uid=None) is not None
        field = None if wanted is None or held else _field(wanted.mark)
        path = self._client().path
        # Of another setting before, or of the node's earlier name.
        stale = [row for name, row in self._rows.now.rows.items() if name != field or row.path != path]
        failed = False
        if stale and not held:
            await self._remove(stale)
        if wanted is None:
            self._status = None
        elif held:
            self._set_status(wanted, MarkState.HEADROOM_ONLY, "on hold by an operator")
        elif field is None:
            self._set_status(wanted, MarkState.HEADROOM_ONLY, "closing.mark is none")
        else:
            failed = not await self._set(wanted, field)
        if not failed and not self._left:
            self._failures = 0
        else:
            self._failures += 1
            self._allowed_at = self._clock() + max(self._set_wait_s, self._left_wait_s)
            self._retry_at = max(self._allowed_at, self._clock() + self._backoff_s())

    async def _set(self, wanted: ClosedNode, field: str) -> bool:
        """Bring the mark into place; whether nothing has failed."""
        client = self._client()
        mark = condition_of(wanted) if field == _CONDITION else taint_of(wanted, field)
        text = _text(mark)
        try:
            for number in range(1, _TRIES + 1):
                try:
                    state, detail = await self._once(client, wanted, field, text, last=number == _TRIES)
                except NodeConflictError as exc:
                    state, detail = MarkState.FAILED, str(exc)
                    self.counts["conflict"] += 1
                    await trio.sleep(_CONFLICT_S)
                else:
                    break
        except NodeRefusedError as exc:
            state, detail = MarkState.REFUSED, str(exc)
        except NodeBusyError as exc:
            state, detail, self._set_wait_s = MarkState.FAILED, str(exc), exc.wait_s or 0.0
        except (NodeAbsentError, StoreError) as exc:
            state, detail = MarkState.FAILED, str(exc)
        failed = state in {MarkState.REFUSED, MarkState.FAILED}
        if failed and wanted.mark is NodeMark.AUTO:
            # Headroom is 0 in any case; rights for more are the operator's choice.
            state = MarkState.HEADROOM_ONLY
        self._set_status(wanted, state, detail)
        return not failed

    async def _once(
        self, client: NodeClient, wanted: ClosedNode, field: str, text: str, *, last: bool
    ) -> tuple[MarkState, str]:
        """One reading, and one change where it is needed. Errors: `SourceError`, `StoreError`."""
        if (why := client.unreachable()) is not None:
            return (MarkState.HEADROOM_ONLY if wanted.mark is NodeMark.AUTO else MarkState.FAILED), why
        node = await client.read()
        if (why := other_machine(node.name, node.boot, self._boot)) is not None:
            return MarkState.REFUSED, why
        row, present = self._rows.now.rows.get(field), _present(node, field)
        shown = _shown(field)
        if present == text and row is not None:
            self._confirmed = node.uid
            return MarkState.IN_PLACE, shown
        # Without a row an equal mark is another client's, too.
        if present is not None and (row is None or present not in row.ours):
            return MarkState.FOREIGN, f"{shown} has a value of another client{_writer(node, field)}; unchanged"
        if present is None and self._confirmed == node.uid:
            return MarkState.REMOVED, f"{shown} is not set again before the node has been open{_writer(node, field)}"
        # Durable before the request: after a crash the next start, or ``restore`` without a daemon, removes the mark.
        fresh = MarkRow(path=client.path, field=field, ours=_texts(row, present, text), reason=wanted.reason)
        await self._rows.save(MarkRows(rows={**self._rows.now.rows, field: fresh}))
        # A conflict and a refusal are final; after any other end the request may still be carried out.
        before, self._late_until = self._late_until, self._clock() + _LATE_S
        try:
            node = await _put(client, node, field, text, last=last)
        except (NodeConflictError, NodeRefusedError):
            self._late_until = before
            raise
        self._late_until = before
        self.counts["set"] += 1
        if _present(node, field) != text:
            return MarkState.FAILED, f"{shown}: accepted, but it reads {str(_present(node, field))[:100]}"
        self._confirmed = node.uid
        return MarkState.IN_PLACE, shown

    def _set_status(self, wanted: ClosedNode, state: MarkState, detail: str) -> None:
        before = self._status
        if before is None or before.state is not state:
            log = _LOG.info if state in _FINE else _LOG.warning
            log(f"mark of the closed node: {state}", mark=wanted.mark, detail=detail)
            self.counts[state.value] += 1
        at_s = before.at_s if before is not None and before.state is state else time.time()
        self._status = MarkStatus(mark=wanted.mark, state=state, detail=detail, at_s=at_s)

    async def _remove(self, rows: Iterable[MarkRow]) -> list[RestoreResult]:
        done: list[RestoreResult] = []
        finished: set[str] = set()
        self._left_wait_s = 0.0
        for row in list(rows):
            result, wait_s = await remove(self._client(), row)
            self._left_wait_s = max(self._left_wait_s, wait_s)
            done.append(result)
            if result.undo in {RestoreOutcome.RESTORED, RestoreOutcome.REFUSED}:
                # It is not there because of this removal, also where that had no answer.
                self._confirmed = ""
            if result.over:
                # Before `_late_until` a request without an answer may still set the mark: its row stays.
                if result.undo is RestoreOutcome.FOREIGN or self._clock() >= self._late_until:
                    finished.add(row.field)
                self.counts["removed"] += result.undo is RestoreOutcome.RESTORED
                _LOG.info("mark of the node removed", mark=result.file, outcome=result.undo.value)
        self._left = [result for result in done if not result.over]
        if finished:
            left = {field: row for field, row in self._rows.now.rows.items() if field not in finished}
            done = await self._rows.restored(MarkRows(rows=left), done)
        return done

    def _client(self) -> NodeClient:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        waiting_s = self._retry_at - self._clock()
        if waiting_s > 0:
            return waiting_s
        if self._left:
            return self._backoff_s()
        late_s = self._late_until - self._clock()
        if late_s > 0 and self._rows.now.rows and _wanted(situation) is None:
            # Read again when no request can be carried out any more.
            return late_s
        return None if _wanted(situation) is None else _VERIFY_S

    def _backoff_s(self) -> float:
        return min(_FIRST_RETRY_S * (1 << min(max(0, self._failures - 1), 10)), _LAST_RETRY_S)


def _texts(row: MarkRow | None, present: str | None, text: str) -> tuple[str, ...]:
    """The texts that the object can have of us: the one it has, the one that is set now, and those requested before.

    A request without an answer may have been carried out, or may still be.
    """
    last = (text,) if present in {None, text} else (present, text)
    earlier = () if row is None else tuple(each for each in dict.fromkeys(row.ours) if each not in last)
    return (*earlier[-(_MOST_TEXTS - len(last)) :], *last)


def _wanted(situation: PlanSnapshot) -> ClosedNode | None:
    return situation.plan.closed if situation.enforce else None


def _field(mark: NodeMark) -> str | None:
    return _CONDITION if mark is NodeMark.CONDITION else mark.taint


def _build(context: ActuatorContext) -> NodeMarker:
    return NodeMarker(
        context.ledger,
        context.store_lane,
        lambda: NodeClient(context.api(), context.node),
        boot=boot_id(context.root),
    )


async def _undo_offline(context: OfflineContext) -> Sequence[RestoreResult]:
    """Remove what the rows say, without a daemon. Errors: `StoreError`."""
    rows = read_rows(context.ledger, CODEC).rows
    if context.only is not None or not rows:
        return ()
    async with context.api() as api:
        client = NodeClient(api, "")
        done = [(await remove(client, row)).result for row in rows.values()]
    left = {row.field: row for row, result in zip(rows.values(), done, strict=True) if not result.over}
    if len(left) != len(rows):
        write_rows(context.ledger, CODEC, MarkRows(rows=left), dropped="restored")
    return done


ACTUATOR: Final = ActuatorKind(codecs={NODE_OBJECT: CODEC}, build=_build, undo_online=_undo_offline)
