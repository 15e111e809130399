"""A store as a later version leaves it, made from this version's: tests of reading, restore and conversion."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgpack

from state import framed
from state.mirror import copy_path
from state.schema import FILES, META, OLDEST_READER, READABLE_BY, SERIAL, VERSION, seal, unseal
from tests.state.release_store import BOOT

NEWER = VERSION + 1
KIND = "moonbeam"
"""A kind of object that this version has never heard of."""


def make_newer(path: str, *, oldest: int = OLDEST_READER) -> None:
    """Schema `NEWER`: one more table, in the copy too; a new kind of row; new fields of each row that there is.

    ``oldest``: the first version that can read it.
    """
    moon = {"kind": KIND, "controller": "", "path": "/moon", "file": "beam", "knob": "moon.beam", "order": 900}
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE tides (key TEXT PRIMARY KEY NOT NULL, height REAL)")
        connection.execute("INSERT INTO tides VALUES ('high', 3.5)")
        for key, row in connection.execute(f"SELECT key, row FROM {FILES}").fetchall():
            fields = {**msgpack.unpackb(unseal(key, row)), "phase": {"moon": "full"}}
            connection.execute(f"UPDATE {FILES} SET row = ? WHERE key = ?", (seal(key, msgpack.packb(fields)), key))
        _put(connection, FILES, f"{KIND}:/moon:beam", moon)
        _put(connection, META, READABLE_BY, oldest)
        connection.execute(f"PRAGMA user_version = {NEWER}")
        ((row,),) = connection.execute(f"SELECT row FROM {META} WHERE key = ?", (SERIAL,)).fetchall()
    serial = msgpack.unpackb(unseal(SERIAL, row))
    changed = {"tides": {"high": b"x"}, FILES: {f"{KIND}:/moon:beam": msgpack.packb(moon)}}
    with Path(copy_path(path)).open("ab") as copy:
        copy.write(framed.frame(msgpack.packb([serial, BOOT, False, ["tides"], changed])))


def _put(connection: sqlite3.Connection, table: str, key: str, value: object) -> None:
    query = f"INSERT INTO {table} VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET row = excluded.row"
    connection.execute(query, (key, seal(key, msgpack.packb(value))))
