"""Replacing a store that is damaged, or of a newer version: whole rows are saved, the file is moved aside.

The order makes it safe to be killed at any point: the replacement is complete and on disk as ``<path>.new`` before the
damaged file is renamed, and `finish_interrupted` puts it in place if the process ended between the two renames.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Final

from cgroupfs.errors import StoreError, errno_name
from state.reader import read_tables
from state.schema import KEYED, MOST_ROWS, check_objects, guard, migrate, seal, unseal

KEEP: Final = 5
"""Damaged files kept: a disk that breaks one a minute must not be filled by them."""
_PARTS: Final = ("", "-wal", "-shm")


def salvage(connection: sqlite3.Connection) -> dict[str, dict[str, bytes]]:
    """Every row of the keyed tables that can still be read and whose seal is valid, from a damaged file."""
    chunks: dict[str, dict[str, bytes]] = {}
    try:
        guard(connection)
        check_objects(connection, "")
    except sqlite3.Error:
        pass  # damaged: what can be read of it counts
    except ValueError:
        return chunks  # its rows are computed by the table's creator
    for table in KEYED:
        rows = chunks.setdefault(table, {})
        for direction in ("ASC", "DESC"):
            # A broken page, index or text column ends a scan: the rows before it count, from both ends.
            with suppress(sqlite3.Error, UnicodeDecodeError):
                for key, row in connection.execute(
                    f"SELECT key, row FROM {table} NOT INDEXED ORDER BY rowid {direction} LIMIT {MOST_ROWS}"  # noqa: S608
                ):
                    with suppress(ValueError, AttributeError):
                        rows.setdefault(key, unseal(key, row))
    return chunks


def replace_damaged(path: str, rescued: Mapping[str, Mapping[str, bytes]], now: float, *, why: str = "corrupt") -> str:
    """Put a fresh store with the rescued rows in place of a damaged one; return where the damaged one went.

    That is ``<path>.<why>-<UTC time>``, with its WAL. Units: ``now`` is wall-clock seconds.
    Errors: OSError or `sqlite3.Error` when the replacement cannot be written; then nothing was moved.
    """
    fresh = f"{path}.new"
    _remove(fresh)
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        migrate(connection, 0)
        connection.execute("BEGIN")
        for table, rows in rescued.items():
            connection.executemany(
                f"INSERT INTO {table} VALUES (?, ?)",  # noqa: S608
                [(key, seal(key, body)) for key, body in rows.items()],
            )
        connection.execute("COMMIT")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    aside, number = f"{path}.{why}-{stamp}", 1
    while os.path.lexists(aside):
        number += 1
        aside = f"{path}.{why}-{stamp}-{number}"
    # The main file first: a damaged file that lost only its WAL would be salvaged again, without the WAL's rows.
    for part in _PARTS:
        with suppress(FileNotFoundError):
            os.rename(path + part, aside + part)
    finish_interrupted(path)
    _forget_old(path, why)
    return aside


def finish_interrupted(path: str) -> None:
    """Complete or throw away a replacement that a crash left behind. Call before every opening."""
    fresh = f"{path}.new"
    if not os.path.exists(fresh):
        return
    if os.path.exists(path):
        _remove(fresh)
        return
    for part in _PARTS[1:]:
        # Remains of the damaged file, whose rows are in the replacement: they must not be read as its own.
        with suppress(FileNotFoundError):
            os.unlink(path + part)
    os.rename(fresh, path)


def _remove(path: str) -> None:
    for part in ("-journal", *_PARTS):
        with suppress(FileNotFoundError):
            os.unlink(path + part)


def _forget_old(path: str, why: str) -> None:
    directory, name = os.path.split(path)
    aside = [entry for entry in os.listdir(directory) if entry.startswith(f"{name}.{why}-")]
    # By name, which is by time.
    for base in sorted(entry for entry in aside if not entry.endswith(("-wal", "-shm")))[:-KEEP]:
        with suppress(OSError):
            _remove(os.path.join(directory, base))


def convert_newer(path: str, *, clock: Callable[[], float] = time.time) -> str | None:
    """Convert the store if a newer version wrote it; returns where that file is now, None if there was nothing to do.

    The tables that both versions know are copied with every row as it is, also rows that only the newer one can
    restore. The caller has the instance lock. Errors: `NewerSchemaError` for one that this version cannot read;
    `StoreError`.
    """
    tables = read_tables(path)
    if tables.newer is None:
        return None
    try:
        return replace_damaged(path, tables.rows, clock(), why=f"schema-{tables.newer.version}")
    except OSError as exc:
        raise StoreError(f"{path}: cannot be converted: {errno_name(exc.errno)}") from exc
    except sqlite3.Error as exc:
        raise StoreError(f"{path}: cannot be converted: {exc}") from exc
