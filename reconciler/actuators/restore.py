"""Restore: one pass over the ledger, with or without a daemon.

Each kind of object is restored by the function that the table has for it. The table is built by the daemon, whose
actuators pause meanwhile, or from the ledger only (`reconciler.control.side_actuators`). A row of a kind that is not
in the table, or that its codec cannot decode, remains in the ledger and is reported.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from cgroupfs.errors import SourceError, StoreError
from reconciler.actuators.codec import RowCodec, not_understood
from state.entry import RestoreOutcome, RestoreResult
from state.ledger import Ledger

UndoKind = Callable[[], Awaitable[Sequence[RestoreResult]]]
"""Restores one kind and drops the restored rows from the ledger."""
CodecOf = Callable[[str], RowCodec[Any] | None]  # of a kind's own state
"""The codec of a kind; None for a kind that this version does not support."""
_NO_CODEC: Final = "its row cannot be understood or undone here"


async def restore_ledger(
    ledger: Ledger, table: Mapping[str, UndoKind], codec_of: CodecOf, only: str | None = None
) -> list[RestoreResult]:
    """Restore every kind in the order of the table; returns the result of each value.

    A function that the table has for several kinds is called once. ``only``: the table restores one pod's values (uid);
    only undecodable rows of that pod are reported.

    A kind for which the kernel does not answer is one refused result; the others are restored.

    Errors: `StoreError` if a result could not be recorded; every kind is restored nevertheless.
    """
    done: list[RestoreResult] = []
    unrecorded: StoreError | None = None
    kinds: dict[UndoKind, str] = {}
    for kind, undo in table.items():
        kinds.setdefault(undo, kind)
    for undo, kind in kinds.items():
        try:
            done += await undo()
        except SourceError as exc:
            done.append(RestoreResult(path="/", file=kind, undo=RestoreOutcome.REFUSED, detail=str(exc)))
        except StoreError as exc:
            unrecorded = unrecorded or exc
    if unrecorded is not None:
        raise unrecorded
    for kind in ledger.kinds():
        codec = codec_of(kind) if kind in table else None
        rows = not_understood(ledger, codec) if codec is not None else ledger.of_kind(kind)
        done += [
            RestoreResult(path=row.path, file=row.file, undo=RestoreOutcome.UNKNOWN, detail=_NO_CODEC)
            for row in rows
            if only in {None, row.pod_uid}
        ]
    return done
