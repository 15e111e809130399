"""The store's second copy: the rows that must not be lost, in a file of another kind next to it (``<store>.copy``).

Each transaction is one frame with the store's serial number, appended after SQLite's own commit and before any action
on it: for a first touch that is before the file's first write. So the copy is never ahead of the store, unless the
store was damaged, set back, deleted, or has lost its WAL; then it has the missing rows.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, final

import msgpack

from cgroupfs.errors import StoreError, errno_name
from state import framed
from state.schema import EVICTIONS, FILES, HOLDS, LINEAGE, META, OPENED_AT, SERIAL

MIRRORED: Final = (FILES, HOLDS, META, EVICTIONS)
"""The tables that are in the copy; the others have facts that a pass reads again."""
_GROWTH_BYTES: Final = 1 << 20
"""A copy may grow to twice its content and this much more before it is rewritten."""

Rows = dict[str, dict[str, bytes]]
"""Bodies of rows by table and key."""


class Copied(NamedTuple):
    """What a copy holds."""

    serial: int  # of the store's last transaction in it
    boot: str
    rows: Rows
    whole: bool  # False: a part is damaged


def copy_path(store: str) -> str:
    return f"{store}.copy"


def read_copy(store: str) -> Copied | None:
    """The copy of a store; None when there is none, or nothing whole is in it. Errors: `StoreError`."""
    path = copy_path(store)
    try:
        data = framed.read(path)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StoreError(f"{path}: cannot be read: {errno_name(exc.errno)}") from exc
    bodies, whole = framed.frames(data)
    rows: Rows = {table: {} for table in MIRRORED}
    serial, boot, begun = 0, "", False
    for body in bodies:
        try:
            number, of_boot, fresh, cleared, changed = msgpack.unpackb(body)
            _apply(rows, cleared, changed)
            serial, boot = max(serial, int(number)), str(of_boot)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
            whole = False
            continue
        begun = begun or bool(fresh)
    if not bodies:
        return None
    return Copied(serial, boot, rows, whole and begun)


def serial_of(meta: Mapping[str, bytes]) -> int:
    """The number of a store's last transaction, from its rows of META; 0 where there is none that can be read."""
    with suppress(ValueError, TypeError, OverflowError):
        return int(msgpack.unpackb(meta[SERIAL])) if SERIAL in meta else 0
    return 0


def is_stale(copied: Copied, meta: Mapping[str, bytes]) -> bool:
    """Whether a version that keeps no copy has opened the store since, or has made it: a downgrade.

    Such a copy has no row of that time; its serial counts other transactions.
    """
    if LINEAGE in meta and meta[LINEAGE] != copied.rows[META].get(LINEAGE):
        # Another store of a version that keeps a copy was put in its place.
        return False
    then, now = _opened_at(copied.rows[META]), _opened_at(meta)
    return then is not None and now is not None and now > then


def _opened_at(meta: Mapping[str, bytes]) -> float | None:
    """Wall-clock seconds of the last opening; every version writes it at each. None: it cannot be read."""
    with suppress(ValueError, TypeError, OverflowError):
        return float(msgpack.unpackb(meta[OPENED_AT])) if OPENED_AT in meta else None
    return None


def merge(saved: Mapping[str, Mapping[str, bytes]], copied: Copied | None) -> tuple[Rows, bool]:
    """The rows of a damaged store, from what could be saved of it and its copy; True when some may be lost."""
    rows: Rows = {table: dict(some) for table, some in saved.items()}
    if copied is None:
        return rows, True
    meta = rows.get(META, {})
    behind = copied.serial < serial_of(meta) or is_stale(copied, meta)
    # Rows of a store that never counted its transactions are in no copy: none of them is left out.
    complete = copied.whole and not behind and (SERIAL in meta or not meta)
    for table in MIRRORED:
        ours, theirs = rows.get(table, {}), copied.rows[table]
        # A complete copy also shows which rows were removed; else none is left out.
        rows[table] = dict(theirs) if complete else {**theirs, **ours} if behind else {**ours, **theirs}
    rows[META][SERIAL] = msgpack.packb(max(copied.serial, serial_of(saved.get(META, {}))))
    return rows, not complete


@final
class CopyFile(framed.FrameFile):
    """The copy in use by the store that keeps it. ``problem`` None: it is whole."""

    def __init__(self, store: str) -> None:
        super().__init__(copy_path(store), "cannot write the second copy of the original values")
        self.problem = "not written yet"
        self._limit = 0

    def rewrite(self, serial: int, boot: str, rows: Mapping[str, Mapping[str, bytes]]) -> None:
        """Put all rows in place, synced: at each opening of the store, and when the copy has grown."""
        data = framed.frame(msgpack.packb([serial, boot, True, [], {table: dict(rows[table]) for table in MIRRORED}]))
        if self._replace(data, sync=True):
            self._limit = 2 * len(data) + _GROWTH_BYTES

    def append(
        self, serial: int, boot: str, cleared: Iterable[str], rows: Mapping[str, Mapping[str, bytes | None]]
    ) -> None:
        """Add one transaction, not synced."""
        if self.problem is not None:
            return
        cleared = [table for table in cleared if table in MIRRORED]
        changed = {table: dict(rows[table]) for table in MIRRORED if rows.get(table)}
        data = framed.frame(msgpack.packb([serial, boot, False, cleared, changed]))
        # 5 µs instead of a second fsync per container start: the rows are about cgroups of this boot, so that they have
        # to outlive the process and not the kernel, and the page cache is enough.
        try:
            framed.append(self._number, data)
        except OSError as exc:
            self._failed(exc)
            return
        self._size += len(data)

    @property
    def due(self) -> bool:
        """True when it should be rewritten: it lacks something, was changed by another program, or has grown."""
        if self.problem is not None or self._size > self._limit:
            return True
        try:
            opened, named = os.fstat(self._number), os.stat(self.path)
        except OSError:
            return True
        return (opened.st_ino, opened.st_dev) != (named.st_ino, named.st_dev) or named.st_size != self._size


def _apply(rows: Rows, cleared: Iterable[str], changed: Mapping[str, Mapping[object, object]]) -> None:
    """Errors: `ValueError` for rows of another form, which are left out; and as of other values."""
    wrong: list[object] = []
    # Tables of a newer version are left out, as in `state.reader`.
    for table in rows.keys() & set(cleared):
        rows[table] = {}
    for table, some in changed.items():
        if (held := rows.get(table)) is None:
            continue
        for key, body in some.items():
            if isinstance(key, str) and isinstance(body, bytes):
                held[key] = body
            elif isinstance(key, str) and body is None:
                held.pop(key, None)
            else:
                wrong.append(key)
    if wrong:
        raise ValueError(f"rows of another form: {len(wrong)}")
