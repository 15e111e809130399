"""A store of a newer version becomes one of this version, before a restore with this version.

A newer version may have added tables, kinds of rows and fields. The tables that both know are copied with every row as
it is, also the rows that only the newer version can restore. The newer file, with its history, is moved aside and never
deleted; the newer version migrates the converted one again when it returns.
"""

import sqlite3
import time
from collections.abc import Callable

from cgroupfs.errors import StoreError, errno_name
from state.quarantine import replace_damaged
from state.reader import read_tables


def convert_newer(path: str, *, clock: Callable[[], float] = time.time) -> str | None:
    """Convert the store if a newer version wrote it; returns where that file is now, None if there was nothing to do.

    The caller has the instance lock. Errors: `NewerSchemaError` for one that this version cannot read; `StoreError`.
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
