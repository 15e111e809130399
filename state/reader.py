"""Reading the store from another process, with the daemon up or down, without anything heavy imported.

The command line must take well under 100 ms, so this needs only sqlite3 and msgpack.

"Nothing" is a result only where it is certain: a store that may not be read, is damaged, or is missing from a directory
in which bypassd has run is an error of its own, unless the store's second copy (`state.mirror`) has the missing rows.
"""

import os
import sqlite3
from collections.abc import Collection, Generator, Iterator
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple

import msgpack

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError, errno_name
from state.mirror import Copied, Rows, is_stale, merge, read_copy, serial_of
from state.schema import (
    ASSIGNMENTS,
    DEFAULT_PATH,
    FILES,
    HOLDS,
    KEYED,
    META,
    MOST_BYTES,
    MOST_ROWS,
    NO_COPY,
    RUNNING,
    SERIAL,
    SETTINGS,
    VERSION,
    NewerSchemaError,
    guard,
    schema_version,
    tables_of,
    text_of,
    unseal,
)
from state.schema2 import convert
from state.shapes import HISTORY, fault

_DEEPEST: Final = 32
"""More than any row has; a deeper one breaks its renderer."""
_MOST_PROBLEMS: Final = 100


class NoStoreError(StoreError):
    """There has never been a store here: nothing was ever written."""


class StoreDeniedError(StoreError):
    """There may be a store, but this user may not read it."""


class LostStoreError(StoreError):
    """bypassd has run here, and its store is missing or damaged: its writes are unknown."""


class Tables(NamedTuple):
    """The rows of the keyed tables."""

    rows: Rows
    lost: bool  # some may be missing
    problems: tuple[str, ...]  # what is wrong, for a person
    newer: NewerSchemaError | None = None  # why this version's daemon refuses the store, if a newer one wrote it


def open_readonly(path: str, *, newer: bool = True) -> sqlite3.Connection:
    """A connection that cannot write, to a file that may be in use, or lie on a read-only file system.

    ``newer``: also to one of a newer version that this one can read.

    Errors: `NoStoreError`, `StoreDeniedError`, `LostStoreError`; `StoreError` when it cannot be opened;
    `NewerSchemaError`.
    """
    _check_exists(path)
    # SQLite would wait for the writer of a pipe.
    if not os.path.isfile(path):
        raise StoreError(f"{path}: cannot be read: not a regular file")
    try:
        connection = sqlite3.connect(f"file:{_uri(path)}?mode=ro", uri=True, timeout=2.0, isolation_level=None)
        try:
            guard(connection)
            version = schema_version(connection, path, newer=newer)
        except sqlite3.OperationalError:
            # Its WAL needs a shared-memory file next to it, which cannot be made here (read-only file system, missing
            # right). A copy is read with the WAL, so that no committed row is overlooked.
            connection.close()
            connection = _copied(path)
            guard(connection)
            version = schema_version(connection, path, newer=newer)
    except (sqlite3.Error, ValueError, OSError) as exc:
        raise StoreError(f"{path}: cannot be read: {exc}") from exc
    except StoreError:
        connection.close()
        raise
    if version == 0:
        connection.close()
        raise StoreError(f"{path}: the store is empty: it was never initialized completely")
    connection.text_factory = text_of
    return connection


def read_tables(path: str) -> Tables:
    """All rows that can be trusted, as bodies, in the order they were first put; from the copy where the store is not.

    Errors: as `open_readonly`; `LostStoreError` also where neither the store nor its copy can be read.
    """
    rows: Rows = {table: {} for table in KEYED}
    problems: list[str] = []
    copied: Copied | None = None
    newer: NewerSchemaError | None = None
    unread: list[str] = []
    # First: a daemon at work appends to the copy after its commit, so what is read later is not behind.
    try:
        copied = read_copy(path)
    except StoreError as exc:
        unread.append(str(exc))
    try:
        with closing(open_readonly(path)) as connection:
            connection.execute("BEGIN")  # one snapshot of all tables
            left = (MOST_ROWS, MOST_BYTES)
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            newer = NewerSchemaError(path, version, VERSION) if version > VERSION else None
            for table in tables_of(version):
                left = _rows(connection, table, rows[table], problems, left)
    except (NoStoreError, StoreDeniedError, NewerSchemaError):
        raise
    except (StoreError, sqlite3.Error) as exc:
        problems.append(f"{path}: {exc}" if isinstance(exc, sqlite3.Error) else str(exc))
    if copied is None and SERIAL in rows[META] and RUNNING in rows[META] and not problems:
        return Tables(rows, lost=True, problems=(f"{path}: {NO_COPY}", *unread), newer=newer)
    behind = copied is not None and copied.serial > serial_of(rows[META]) and not is_stale(copied, rows[META])
    if behind and not problems:
        problems.append(
            f"{path}: the last changes are missing but present in its copy: damaged, or replaced by an older file"
        )
    if not problems:
        return Tables(_converted(rows), lost=False, problems=(), newer=newer)
    if copied is None and not any(rows.values()):
        raise LostStoreError("; ".join((*problems, *unread)))
    rows, lost = merge(rows, copied)
    more = ": using its second copy" if copied is not None else ""
    more += "; data may be lost" if lost else ""
    rows = _converted({table: rows.get(table, {}) for table in KEYED})
    return Tables(rows, lost, (problems[0] + more, *problems[1:]), newer)


def read_meta(path: str, key: str) -> bytes | None:
    """One row of META, from the second copy where the store has none; None: there is none, or it cannot be read."""
    with suppress(StoreError, sqlite3.Error, ValueError), closing(open_readonly(path)) as connection:
        row = connection.execute(f"SELECT row FROM {META} WHERE key = ?", (key,)).fetchone()  # noqa: S608
        return None if row is None else unseal(key, row[0])
    with suppress(StoreError):
        copied = read_copy(path)
        return None if copied is None else copied.rows[META].get(key)
    return None


def _converted(rows: Rows) -> Rows:
    """With what schema 2 kept outside of the ledger in the ledger, where a store has not been opened since."""
    boot = _text(rows[META].get("boot_id"))
    converted = convert(rows, boot)
    if not converted.replaced:
        return rows
    meta = {key: body for key, body in rows[META].items() if key not in converted.replaced}
    return {**rows, META: meta, FILES: {**rows[FILES], **converted.files}}


def _text(body: bytes | None) -> str:
    try:
        text = decoded(msgpack.unpackb, body, deepest=_DEEPEST) if body is not None else ""
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _check_exists(path: str) -> None:
    """Whether there is a store to open. Errors: as `open_readonly`."""
    directory, name = os.path.split(os.path.abspath(path))
    exists, beside = False, []
    try:
        with suppress(FileNotFoundError):
            os.stat(path)
            exists = True
        with suppress(FileNotFoundError, NotADirectoryError):
            beside = [] if exists else os.listdir(directory)
    except PermissionError as exc:
        raise StoreDeniedError(f"{path}: permission denied: run with sudo") from exc
    except OSError as exc:
        raise StoreError(f"{path}: cannot be read: {errno_name(exc.errno)}") from exc
    if exists and not os.access(path, os.R_OK):
        raise StoreDeniedError(f"{path}: permission denied: run with sudo")
    if exists:
        return
    # The daemon's lock, the second copy, values about to be written, or a damaged store that was moved aside.
    if any(text == "lock" or text.startswith(f"{name}.") for text in beside):
        raise LostStoreError(f"{path}: state file missing although bypassd ran here")
    raise NoStoreError(f"{path}: no state file: bypassd never ran here")


def _rows(
    connection: sqlite3.Connection, table: str, rows: dict[str, bytes], problems: list[str], left: tuple[int, int]
) -> tuple[int, int]:
    """One table; ``left``: rows and bytes that there may be, and that there may be after it.

    Errors: `StoreError` for more; `sqlite3.Error`.
    """
    most, most_bytes = left
    for key, row in connection.execute(f"SELECT key, row FROM {table} ORDER BY rowid"):  # noqa: S608
        most -= 1
        most_bytes -= sum(len(entry) for entry in (key, row) if isinstance(entry, str | bytes))
        if most < 0 or most_bytes < 0:
            raise StoreError(f"{table}: more than {MOST_ROWS} rows, or {MOST_BYTES >> 20} MiB")
        try:
            rows[key] = unseal(key, row)
        except ValueError as exc:
            _note(problems, f"{table}: {exc}")
    return most, most_bytes


def _note(problems: list[str], text: str) -> None:
    if len(problems) < _MOST_PROBLEMS:
        problems.append(text)
    elif len(problems) == _MOST_PROBLEMS:
        problems.append("and more")


def _uri(path: str) -> str:
    # Encoded directly: importing urllib.parse costs the command line 4 ms.
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _copied(path: str) -> sqlite3.Connection:
    """The same content in memory, read from a private copy of the files, which is then deleted."""
    import shutil  # only on this rare path: 10 ms that the command line does not have
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        copy = os.path.join(directory, "state.db")
        shutil.copyfile(path, copy)
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        connection = sqlite3.connect(copy, isolation_level=None)
        memory = sqlite3.connect(":memory:", isolation_level=None)
        with closing(connection):
            connection.backup(memory)
        return memory


def read_dump(path: str = DEFAULT_PATH, *, history: int = 200, about: Collection[str] = ()) -> dict[str, object]:
    """Everything the store holds, decoded, as one consistent snapshot of plain values; the history may be newer.

    ``about``: as of `read_history`.

    Keys: ``meta`` (dict), ``files`` (list in the order of first touch), ``settings`` (list), ``assignments`` (dict),
    ``holds`` (list), ``history`` (list, newest first, at most ``history``), ``problems`` (list of messages: rows that
    are damaged, or differ from `state.shapes`, and left out), ``newer`` (why this version refuses it; None: no).
    Errors: `StoreError` when there is nothing to read; `NewerSchemaError`.
    """
    tables = read_tables(path)
    newer = None if tables.newer is None else str(tables.newer)
    problems = [*([] if newer is None else [newer]), *tables.problems]
    keyed = {
        table: _decoded(table, tables.rows[table], problems) for table in (META, FILES, SETTINGS, ASSIGNMENTS, HOLDS)
    }
    entries: list[dict[str, object]] = []
    try:
        with closing(open_readonly(path)) as connection:
            entries = list(_history(connection, path, history, problems, about))
    except (StoreError, sqlite3.Error) as exc:
        if not tables.problems:
            raise StoreError(f"{path}: cannot be read: {exc}") from exc
    return {
        "meta": keyed[META],
        "files": sorted(keyed[FILES].values(), key=_order),
        "settings": list(keyed[SETTINGS].values()),
        "assignments": keyed[ASSIGNMENTS],
        "holds": list(keyed[HOLDS].values()),
        "history": entries,
        "problems": problems,
        "newer": newer,
    }


def read_history(path: str, limit: int, about: Collection[str] = ()) -> list[dict[str, object]]:
    """The newest entries of the history, newest first; damaged ones are left out. Errors: as `read_dump`.

    ``about``: of these ``limit``, only entries whose row contains one of the texts; the others are not decoded.
    """
    return list(history_rows(path, limit, about))


def history_rows(path: str, limit: int, about: Collection[str] = ()) -> Generator[dict[str, object], None, None]:
    """The same one by one: what is not taken is not read. Close it, or take all; in one thread."""
    with closing(open_readonly(path)) as connection:
        try:
            yield from _history(connection, path, limit, [], about)
        except sqlite3.Error as exc:
            raise StoreError(f"{path}: cannot be read: {exc}") from exc


def _history(
    connection: sqlite3.Connection, path: str, limit: int, problems: list[str], about: Collection[str] = ()
) -> Iterator[dict[str, object]]:
    texts = [text.encode() for text in about]
    # By SQLite, which lets other threads run meanwhile.
    contains = " OR ".join(["instr(CAST(row AS BLOB), ?) > 0"] * len(texts)) or "1"
    newest = "SELECT max(seq) - ? FROM history"
    query = f"SELECT seq, row FROM history WHERE seq > ({newest}) AND ({contains}) ORDER BY seq DESC"  # noqa: S608
    for seq, row in connection.execute(query, (limit, *texts)):
        try:
            entry = {"seq": seq, **_shaped(HISTORY, "", unseal("history", row))}
        except ValueError as exc:
            _note(problems, f"{path}: history {seq!s:.20}: {exc}")
        else:
            yield entry


def _decoded(table: str, rows: dict[str, bytes], problems: list[str]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, body in rows.items():
        try:
            fields[key] = _shaped(table, key, body)
        except ValueError as exc:
            _note(problems, f"{table}: row {key!r:.200}: {exc}")
    return fields


def _shaped(table: str, key: str, body: bytes) -> Any:
    """A decoded row, as `state.shapes` has it. Errors: `ValueError`."""
    row = decoded(msgpack.unpackb, body, deepest=_DEEPEST)
    if why := fault(table, key, row):
        raise ValueError(why)
    return row


def _order(row: object) -> int:
    order = row.get("order") if isinstance(row, dict) else None
    return order if isinstance(order, int) else 0
