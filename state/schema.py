"""The store's tables, their versions, and how one row is sealed against bit rot.

Imports nothing heavy: the command line reads the store with this and `state.reader` only.
"""

import sqlite3
import zlib
from collections.abc import Sequence
from typing import Final

import msgpack

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError
from state.kinds import OUTLIVE_BOOT

DEFAULT_PATH: Final = "/var/lib/bypassd/state.db"
APPLICATION_ID: Final = 0x62797064
"""``PRAGMA application_id``: the letters "bypd". Distinguishes the store from another program's SQLite file."""

FILES: Final = "files"
SETTINGS: Final = "settings"
ASSIGNMENTS: Final = "assignments"
HOLDS: Final = "holds"
META: Final = "meta"
EVICTIONS: Final = "evictions"
"""Evictions under way and lately ended, by order."""
KEYED: Final = (FILES, SETTINGS, ASSIGNMENTS, HOLDS, META, EVICTIONS)
SERIAL: Final = "serial"
"""Row of META: counts the transactions. It shows whether a store or its copy lacks some."""
OPENED_AT: Final = "opened_at"
"""Row of META: when the store was opened last (wall-clock seconds), by any version of bypassd."""
LINEAGE: Final = "lineage"
"""Row of META: a random name that a store gets when a version that keeps a copy opens it first."""
READABLE_BY: Final = "readable_by"
"""Row of META: the oldest schema version whose programs can read the keyed tables and restore by the ledger.

Absent: only the store's own version and later ones.
"""
RUNNING: Final = "running"
"""Row of META: a daemon works with the store; it is still there after a SIGKILL."""
UNRECORDED: Final = "unrecorded"
"""Row of META: the store began without a record, and these groups (path, inode) may have values of an earlier run."""
PUBLISHED: Final = "published"
"""Row of META: the kind of the cluster's object that has the headroom, until it is withdrawn there."""
NODE_SETTINGS: Final = "node_settings"
"""Row of META: the settings that a control plane has had last for this node."""
NO_COPY: Final = "its second copy is missing: the last changes may be lost"
PLACES: Final = "places"
"""Row of META: the directories that the last daemon worked with, for a restore while none runs."""
BOOT_BOUND: Final = (FILES, SETTINGS)
"""Tables about cgroups, which do not outlive a boot; but for some rows (`outlives_boot`)."""


def outlives_boot(key: str) -> bool:
    """Whether a row of `FILES` is about an object that a reboot leaves as it is."""
    return key.partition(":")[0] in OUTLIVE_BOOT


# One statement list per version; the index + 1 is the version it leads to. Never edit one that was released. Every
# keyed table is (key, sealed row): the row's meaning is up to its owner, so a new field needs no migration.
_KEYED_TABLE: Final = "CREATE TABLE {} (key TEXT PRIMARY KEY NOT NULL, row BLOB NOT NULL)"
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        *(_KEYED_TABLE.format(table) for table in (FILES, SETTINGS, ASSIGNMENTS, HOLDS, META)),
        "CREATE TABLE history (seq INTEGER PRIMARY KEY AUTOINCREMENT, row BLOB NOT NULL)",
    ),
    (_KEYED_TABLE.format(EVICTIONS),),
    # The ledger has rows of every kind of object (`state.schema2`). The tables are the same, but a version that takes
    # every row for a control file must not open the store.
    (),
)
VERSION: Final = len(MIGRATIONS)
OLDEST_READER: Final = 3
"""The value of `READABLE_BY` that this version writes.

A later version leaves it at 3 for as long as it changes no meaning of an existing table, row key or field, and makes no
index, view or trigger: new tables, new kinds of rows and new fields are ignored by older readers. Else it writes its
own number, and older programs refuse the store.
"""


MOST_ROWS: Final = 1_000_000
"""Of all tables. A node of 110 pods has some 5,000."""
MOST_BYTES: Final = 256 << 20
"""Of all their rows."""
_LONGEST: Final = 16 << 20
"""Bytes of a key or a row, and of a statement."""
_STEPS: Final = 1_000_000
"""Instructions of SQLite's virtual machine between two calls of the handler. Reading 5,000 rows takes 50,000."""
_MOST_CALLS: Final = 1_000
"""Of the handler, which then ends the statement: some 10 s."""
_OWN: Final = {
    words[2]: text
    for statements in MIGRATIONS
    for text in statements
    if (words := text.split())[:2] == ["CREATE", "TABLE"]
}
"""The tables by name, with the statement that SQLite keeps as the text of each."""
_MOST_OBJECTS: Final = 1_000


class NewerSchemaError(StoreError):
    """The file was written by a newer bypassd. It is left exactly as it is.

    ``readable``: this version can restore by it, and convert it (`state.quarantine`).
    """

    def __init__(self, path: str, version: int, oldest: int) -> None:
        self.version = version
        self.readable = oldest <= VERSION
        help_ = (
            "to continue with this version run: bypassctl restore (restores the original values and converts the store)"
            if self.readable
            else f"only versions of schema {oldest} or later can read it: install the newer version again, and run its "
            "bypassctl restore before a downgrade"
        )
        super().__init__(f"{path}: schema version {version} is of a newer bypassd; this one is of {VERSION}; {help_}")


def schema_version(connection: sqlite3.Connection, path: str, *, newer: bool = False) -> int:
    """The schema version of an open file; 0 is a file without any tables.

    ``newer``: accept a newer version's file if this version can read it.
    Errors: `NewerSchemaError`; `ValueError` when another program's tables are in it; `sqlite3.DatabaseError` when it is
    not a database.
    """
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise ValueError(f"{path} is a SQLite file of another program (application id {application:#x})")
    if version > VERSION:
        error = NewerSchemaError(path, version, _oldest_reader(connection, version))
        if not (newer and error.readable):
            raise error
    check_objects(connection, path)
    return version


def tables_of(version: int) -> tuple[str, ...]:
    """The keyed tables that a store of this schema version has; of a newer one, those that this version knows."""
    statements = [text for part in MIGRATIONS[:version] for text in part]
    return tuple(table for table in KEYED if _KEYED_TABLE.format(table) in statements)


def _oldest_reader(connection: sqlite3.Connection, version: int) -> int:
    """The row `READABLE_BY` of a newer store; its own version where the row is absent or damaged."""
    try:
        fields = connection.execute(f"SELECT key, row FROM {META} WHERE key = ?", (READABLE_BY,)).fetchone()  # noqa: S608
        oldest = decoded(msgpack.unpackb, unseal(*fields), deepest=1) if fields is not None else version
    except (sqlite3.DatabaseError, ValueError):
        return version
    return oldest if type(oldest) is int else version


def guard(connection: sqlite3.Connection) -> None:
    """For an untrusted file: no statement runs for long, its schema is not trusted.

    Call before the first statement. Lifted with `unguard`, for a connection that is kept. Source: SQLite documentation,
    "Defense Against The Dark Arts", "Run-Time Limits".
    """
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls > _MOST_CALLS

    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    connection.set_progress_handler(count, _STEPS)
    connection.execute("PRAGMA trusted_schema = OFF")


def unguard(connection: sqlite3.Connection) -> None:
    """Statements may run for as long as the connection exists; the checks remain in force."""
    connection.set_progress_handler(None, 0)


def check_objects(connection: sqlite3.Connection, path: str) -> None:
    """Errors: `ValueError` when the schema has what we do not make: a view, a trigger, a table that is computed."""
    cursor = connection.execute("SELECT type, name, rootpage, sql FROM sqlite_master LIMIT ?", (_MOST_OBJECTS + 1,))
    for number, (kind, name, page, text) in enumerate(cursor):
        if number >= _MOST_OBJECTS:
            raise ValueError(f"{path}: more than {_MOST_OBJECTS} objects in the schema")
        # A virtual table has no page of its own: its rows are computed.
        if kind not in {"table", "index"} or not page:
            raise ValueError(f"{path}: the schema has a {kind!s:.20} {name!r:.60}, which was not created by bypassd")
        if name in _OWN and (kind != "table" or text != _OWN[name]):
            raise ValueError(f"{path}: the table {name} was not created by bypassd")
        # SQLite's own index, of a primary key, has no text.
        if kind == "index" and text is not None:
            raise ValueError(f"{path}: the schema has an index {name!r:.60}, which was not created by bypassd")


def migrate(connection: sqlite3.Connection, version: int, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Bring a file from ``version`` to the newest one, one transaction each: a crash leaves a whole one."""
    for number, statements in enumerate(migrations[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def seal(key: str, body: bytes) -> bytes:
    """A row as it is stored: CRC-32 of key and body, then the body.

    SQLite notices damage to its own structure only; a flipped bit inside a value would come back as a wrong original.
    """
    return zlib.crc32(body, zlib.crc32(key.encode("utf-8", "surrogateescape"))).to_bytes(4, "big") + body


def text_of(data: bytes) -> str:
    """For `sqlite3.Connection.text_factory`: a key that is not UTF-8 damages its own row, not the whole table."""
    return data.decode("utf-8", "surrogateescape")


def unseal(key: object, row: object) -> bytes:
    """The body of a stored row. Errors: `ValueError` when it is not what was sealed."""
    if not isinstance(key, str) or not isinstance(row, bytes) or len(row) < 4 or seal(key, row[4:])[:4] != row[:4]:
        raise ValueError(f"row {key!r:.200} is damaged")
    return row[4:]
