"""Reading the store from another process, with the daemon up or down, without anything heavy imported.

The command line must answer in well under 100 ms, so this needs only sqlite3 and msgpack.
"""

import os
import sqlite3
from contextlib import closing, suppress
from typing import Final

import msgpack

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError
from state.schema import ASSIGNMENTS, DEFAULT_PATH, FILES, HOLDS, META, SETTINGS, schema_version, text_of, unseal

_DEEPEST: Final = 32
"""More than any row has; what is deeper breaks whoever renders it."""


def open_readonly(path: str) -> sqlite3.Connection:
    """A connection that cannot write, to a file that may be in use, or lie on a read-only file system.

    A WAL file needs a shared-memory file beside it; where that cannot be made, file and WAL are copied to memory-backed
    storage and read there, so that no committed row is overlooked.
    Errors: `StoreError` when there is no such file or it cannot be opened; `NewerSchemaError`.
    """
    if not os.path.exists(path):
        raise StoreError(f"{path}: there is no store here (bypassd never ran on this node, or keeps it elsewhere)")
    # SQLite would wait for whoever writes to a pipe.
    if not os.path.isfile(path):
        raise StoreError(f"{path}: cannot be read: not a regular file")
    try:
        connection = sqlite3.connect(f"file:{_uri(path)}?mode=ro", uri=True, timeout=2.0, isolation_level=None)
        try:
            version = schema_version(connection, path)
        except sqlite3.OperationalError:
            connection.close()
            connection = _copied(path)
            version = schema_version(connection, path)
    except (sqlite3.Error, ValueError, OSError) as exc:
        raise StoreError(f"{path}: cannot be read: {exc}") from exc
    except StoreError:
        connection.close()
        raise
    if version == 0:
        connection.close()
        raise StoreError(f"{path}: the store is empty: its first opening did not finish")
    connection.text_factory = text_of
    return connection


def _uri(path: str) -> str:
    # By hand: urllib.parse costs the command line 4 ms.
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _copied(path: str) -> sqlite3.Connection:
    """The same content from a private copy that is deleted at once (the open connection keeps it)."""
    import shutil  # noqa: PLC0415  (only on this rare path: 10 ms that the command line does not have)
    import tempfile  # noqa: PLC0415

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


def read_dump(path: str = DEFAULT_PATH, *, history: int = 200) -> dict[str, object]:
    """Everything the store holds, decoded, as one consistent snapshot of plain values.

    Keys: ``meta`` (dict), ``files`` (list in the order of first touch), ``settings`` (list), ``assignments`` (dict),
    ``holds`` (list), ``history`` (list, newest first, at most ``history``), ``problems`` (list of messages: rows that
    are damaged and therefore left out).
    Errors: `StoreError` when there is nothing to read; `NewerSchemaError`.
    """
    problems: list[str] = []
    with closing(open_readonly(path)) as connection:
        try:
            connection.execute("BEGIN")
            keyed = {
                table: _decoded(connection, table, problems) for table in (META, FILES, SETTINGS, ASSIGNMENTS, HOLDS)
            }
            entries = _history(connection, path, history, problems)
        except sqlite3.Error as exc:
            raise StoreError(f"{path}: cannot be read: {exc}") from exc
    return {
        "meta": keyed[META],
        "files": sorted(keyed[FILES].values(), key=_order),
        "settings": list(keyed[SETTINGS].values()),
        "assignments": keyed[ASSIGNMENTS],
        "holds": list(keyed[HOLDS].values()),
        "history": entries,
        "problems": problems,
    }


def read_history(path: str, limit: int) -> list[dict[str, object]]:
    """The newest entries of the history, newest first; damaged ones are left out. Errors: as `read_dump`."""
    with closing(open_readonly(path)) as connection:
        try:
            return _history(connection, path, limit, [])
        except sqlite3.Error as exc:
            raise StoreError(f"{path}: cannot be read: {exc}") from exc


def _history(connection: sqlite3.Connection, path: str, limit: int, problems: list[str]) -> list[dict[str, object]]:
    entries = []
    for seq, row in connection.execute("SELECT seq, row FROM history ORDER BY seq DESC LIMIT ?", (limit,)):
        try:
            body = decoded(msgpack.unpackb, unseal("history", row), deepest=_DEEPEST)
            entries.append({"seq": seq, **body})
        except (ValueError, TypeError) as exc:
            problems.append(f"{path}: history {seq}: {exc}")
    return entries


def _decoded(connection: sqlite3.Connection, table: str, problems: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, row in connection.execute(f"SELECT key, row FROM {table} ORDER BY rowid"):  # noqa: S608
        try:
            found[key] = decoded(msgpack.unpackb, unseal(key, row), deepest=_DEEPEST)
        except ValueError as exc:
            problems.append(f"{table}: {exc}")
    return found


def _order(row: object) -> int:
    order = row.get("order") if isinstance(row, dict) else None
    return order if isinstance(order, int) else 0
