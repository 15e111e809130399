"""Rows of the ledger for values that are in no cgroup file, and how they are restored.

Each kind of object has one codec between an actuator's state and rows. A plain value is restored by `undo_values` with
a `ValueAccess`; a kind that needs a procedure (a group, a queueing discipline, a cookie) has it in its own module.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import StoreError, errno_name
from reconciler.runtime.stints import in_worker
from state.entry import LedgerEntry, OriginalSource, RestoreOutcome, RestoreResult
from state.ledger import Ledger

S = TypeVar("S", bound=Struct)


class RowCodec(Struct, Generic[S], frozen=True, kw_only=True):
    """One kind. ``load`` skips rows that it cannot decode; it never raises.

    A state is a value that can be compared; without rows it is the state of an actuator that has changed nothing.
    ``differing``: of two states the parts whose rows may differ; without it all of both.
    """

    kind: str
    load: Callable[[Iterable[LedgerEntry]], S]
    dump: Callable[[S], Iterable[LedgerEntry]]
    differing: Callable[[S, S], tuple[S, S]] | None = None


def row_of(
    kind: str,
    path: str,
    file: str,
    *,
    knob: str,
    policy: str,
    original: str | None,
    ours: Iterable[str] = (),
    inode: int = 0,
    pod_uid: str | None = None,
) -> LedgerEntry:
    """The row of one value. ``ours``: as in `LedgerEntry`; the newest is the wanted one."""
    texts = tuple(ours)
    return LedgerEntry(
        kind=kind,
        controller="",
        path=path,
        file=file,
        knob=knob,
        inode=inode,
        original=original,
        origin=OriginalSource.UNKNOWN if original is None else OriginalSource.READ,
        ours=texts,
        wanted=texts[-1] if texts else None,
        pod_uid=pod_uid,
        policy=policy,
    )


def read_rows(ledger: Ledger, codec: RowCodec[S]) -> S:
    return codec.load(ledger.of_kind(codec.kind))


def write_rows(ledger: Ledger, codec: RowCodec[S], state: S, *, dropped: str = "gone") -> None:
    """Make the ledger hold this state; runs in the store's thread. Rows that the codec cannot decode remain.

    ``dropped``: the kind of the event that a dropped row leaves in the history. Errors: `StoreError`: then nothing is
    changed.
    """
    _record(ledger, codec, read_rows(ledger, codec), state, dropped)


def undo_rows(
    ledger: Ledger, codec: RowCodec[S], undo: Callable[[S], tuple[Sequence[RestoreResult], S]]
) -> list[RestoreResult]:
    """Restore one kind from its rows in the ledger, while no actuator of it runs.

    ``undo`` returns the results and the remaining state. Errors: `StoreError` if that cannot be recorded.
    """
    before = read_rows(ledger, codec)
    done, left = undo(before)
    if left != before:
        _record(ledger, codec, before, left, "restored")
    return list(done)


def not_understood(ledger: Ledger, codec: RowCodec[S]) -> list[LedgerEntry]:
    """The rows of a kind that its codec cannot decode."""
    rows = ledger.of_kind(codec.kind)
    decoded = {row.key for row in codec.dump(codec.load(rows))}
    return [row for row in rows if row.key not in decoded]


def _record(ledger: Ledger, codec: RowCodec[S], was: S, now: S, dropped: str) -> None:
    """``was``: what the ledger holds."""
    before = {row.key for row in codec.dump(was)}
    after = {row.key: row for row in codec.dump(now)}
    changed = [row for key, row in after.items() if (known := ledger.get(key)) is None or not _same(known, row)]
    ledger.record(changed, sorted(before - after.keys()), kind=dropped)


def _same(before: LedgerEntry, after: LedgerEntry) -> bool:
    # The ledger itself sets these two.
    return before == replace(after, order=before.order, touched_at=before.touched_at)


@final
class LedgerState(Generic[S]):
    """The rows of one kind, used by the actuator that changes those objects."""

    def __init__(self, codec: RowCodec[S], ledger: Ledger, lane: trio.CapacityLimiter) -> None:
        """``lane``: the store's one-thread limiter."""
        self.now = read_rows(ledger, codec)
        """The state in the store."""
        self._codec = codec
        self._ledger = ledger
        self._limiter = lane

    async def save(self, state: S, *, dropped: str = "gone") -> None:
        """Record this state; it is durable on return. Errors: `StoreError`: then the old one remains in force."""
        if state == self.now:
            return
        await in_worker(self._write, state, dropped, limiter=self._limiter)
        self.now = state

    async def restored(self, left: S, done: Sequence[RestoreResult]) -> list[RestoreResult]:
        """Record what a restore has left. Returns its results, as refusals if that cannot be recorded."""
        try:
            await self.save(left, dropped="restored")
        except StoreError as exc:
            refusal = {"undo": RestoreOutcome.REFUSED, "detail": str(exc)}
            return [replace(result, **refusal) if result.ok else result for result in done]
        return list(done)

    def _write(self, state: S, dropped: str) -> None:
        """In the store's thread."""
        differing = self._codec.differing
        # Safe in a thread: the loop replaces `self.now` only after this.
        was, now = differing(self.now, state) if differing is not None else (self.now, state)
        _record(self._ledger, self._codec, was, now, dropped)


class ValueAccess(Protocol):
    """Reads and writes values of one kind. All methods block and run in a thread."""

    def is_same(self, row: LedgerEntry) -> bool:
        """Whether the object is the one that was changed, and not a later one of the same name."""

    def read(self, row: LedgerEntry) -> str:
        """The current value, in the form of ``original``. Errors: `OSError`, `ValueError`."""

    def write(self, row: LedgerEntry, text: str) -> None:
        """Set the value. Errors: `OSError`."""


def undo_value(row: LedgerEntry, access: ValueAccess) -> RestoreResult:
    """Restore one original if the current value is ours. Errors: none; they are in the result."""

    def result(undo: RestoreOutcome, detail: str = "") -> RestoreResult:
        return RestoreResult(path=row.path, file=row.file, undo=undo, text=row.original or "", detail=detail)

    try:
        if not access.is_same(row):
            return result(RestoreOutcome.GONE)
        if row.original is None:
            return result(RestoreOutcome.UNKNOWN)
        actual = access.read(row)
        if actual == row.original:
            return result(RestoreOutcome.ALREADY)
        # `ours` has more than the newest: after a crash the file may hold the value before it.
        if actual not in row.ours:
            return result(RestoreOutcome.FOREIGN)
        access.write(row, row.original)
        after = access.read(row)
    except OSError as exc:
        return result(RestoreOutcome.REFUSED, errno_name(exc.errno))
    except ValueError as exc:
        return result(RestoreOutcome.REFUSED, str(exc))
    if after != row.original:
        return result(RestoreOutcome.REFUSED, f"accepted, but it reads {after}")
    return result(RestoreOutcome.RESTORED)


def undo_values(rows: Iterable[LedgerEntry], access: ValueAccess) -> tuple[list[RestoreResult], list[LedgerEntry]]:
    """Restore the originals. Returns the results, and the rows that the ledger keeps because their restore failed."""
    done, left = [], []
    for row in rows:
        result = undo_value(row, access)
        done.append(result)
        if not result.over:
            left.append(row)
    return done, left
