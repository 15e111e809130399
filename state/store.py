"""The durable store of the agent's state: SQLite in WAL mode, ``synchronous=FULL``.

It has keyed tables and a bounded history; `state.ledger` and `state.rows` define the rows' meaning. All calls are
synchronous and belong to one thread at a time: call them from a worker thread with a limiter of one.

A file that another program has damaged, deleted or replaced is made again from what can be read of it and from its
second copy (`state.mirror`).

Longer than other modules because use, failure, check and repair of the file share its one connection.

Source: SQLite documentation, "Write-Ahead Logging", "Result and error codes".
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Final, final

import msgpack

from cgroupfs.errors import StoreError, errno_name
from state.mirror import MIRRORED, Copied, CopyFile, is_stale, merge, read_copy, serial_of
from state.quarantine import finish_interrupted, replace_damaged, salvage
from state.reader import NoStoreError, open_readonly, read_dump, read_tables
from state.schema import (
    BOOT_BOUND,
    DEFAULT_PATH,
    FILES,
    KEYED,
    LINEAGE,
    META,
    NO_COPY,
    OLDEST_READER,
    OPENED_AT,
    READABLE_BY,
    RUNNING,
    SERIAL,
    NewerSchemaError,
    guard,
    migrate,
    outlives_boot,
    schema_version,
    seal,
    text_of,
    unguard,
    unseal,
)
from state.schema2 import PRIVATE, convert
from state.store_files import Marks, check_header, file_marks, identity, sync_directory

__all__ = ["DEFAULT_PATH", "NewerSchemaError", "Store", "StoreBatch", "boot_id", "read_dump"]

_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""The file is damaged, whatever the call."""
# Where a file is read, every other error than these is damage: our SQL is right, so "no such table", a row longer than
# any (SQLITE_TOOBIG), more steps than a store needs, or (code 0, Python's own) text other than UTF-8 are the file's.
_ENVIRONMENT: Final = frozenset(
    {
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_NOLFS,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)
_PUT: Final = "INSERT INTO {} VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET row = excluded.row"


def boot_id(root: str = "/") -> str:
    """The kernel's id of this boot; empty where it cannot be read, which never counts as a reboot."""
    try:
        with open(os.path.join(root, "proc/sys/kernel/random/boot_id"), encoding="ascii", newline="\n") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


@final
class StoreBatch:
    """Changes that become durable together or not at all."""

    __slots__ = ("cleared", "history", "rows")

    def __init__(self) -> None:
        self.cleared: list[str] = []
        self.rows: dict[str, dict[str, bytes | None]] = {}
        self.history: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self.cleared or self.history or any(self.rows.values()))

    def put(self, table: str, key: str, body: bytes) -> None:
        """Insert or replace one row (``body`` is msgpack)."""
        self.rows.setdefault(table, {})[key] = body

    def delete(self, table: str, key: str) -> None:
        """Remove one row; a missing one is fine."""
        self.rows.setdefault(table, {})[key] = None

    def clear(self, table: str) -> None:
        """Empty a table before this batch's rows go in."""
        self.cleared.append(table)

    def append(self, body: bytes) -> None:
        self.history.append(body)


@final
class Store:
    """One open state file. Construction never fails for a bad disk or a damaged file, only for a newer schema.

    Errors: `NewerSchemaError` from the constructor (not for a readable one if ``must_record`` is False: it can be read
    only); `StoreError` from every write that did not become durable.
    """

    def __init__(
        self,
        path: str = DEFAULT_PATH,
        *,
        boot: str = "",
        version: str = "",
        node: str = "",
        history_limit: int = 10_000,
        retry_s: float = 5.0,
        meta: Mapping[str, object] | None = None,
        must_record: bool = True,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``meta``: more rows of META that each opening writes.

        ``must_record`` False: a write that cannot be made durable does not raise but sets ``unrecorded``: in a
        restore the files are first.
        """
        self.path = os.path.abspath(path)
        self.boot = boot
        self.generation = 0
        """Grows when the file was made or opened again: the owners of rows then write everything that they hold."""
        self.writable = False
        self.problem: str | None = None
        self.quarantined: str | None = None
        """The path of the damaged file that was moved aside last."""
        self.damage: str | None = None
        """What was wrong with it, or that its copy was missing."""
        self.salvaged = 0
        """Rows of the ledger that were saved from damaged files or their copies."""
        self.lost = False
        """Rows may be missing that the copy does not have either."""
        self.unrecorded: str | None = None
        """Why the last write of a restore did not become durable."""
        self.unreadable: str | None = None
        self.rebooted = False
        self._must_record = must_record
        self._serial = 0
        """Number of the last transaction."""
        self._copy = CopyFile(self.path)
        self._marks: Marks = ()
        """The files after this store's last write."""
        self._foreign = False
        """Another program has written the file since the last check."""
        self._reopened: str | None = None
        """The damage found when the file had to be opened again, until `check` returns it."""
        self._meta: dict[str, object] = {"boot_id": boot, "agent_version": version, "node": node, **(meta or {})}
        self._meta[READABLE_BY] = OLDEST_READER
        self._history_limit = history_limit
        self._retry_s = retry_s
        self._retry_at = 0.0
        self._clock = clock
        self._monotonic = monotonic
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._in_use = threading.Lock()
        try:
            self._open()
        except StoreError as exc:
            if isinstance(exc, NewerSchemaError) and (must_record or not exc.readable):
                raise

    def rows(self, table: str) -> list[tuple[str, bytes]]:
        """All rows of a keyed table, in the order they were first put. Also where the file can only be read.

        Without readable and trustworthy rows there are none, and ``unreadable`` has the reason. Errors: `StoreError`
        for damage that occurs while the store is in use.
        """
        with self._alone():
            connection = self._connection
            if connection is not None:
                try:
                    return list(_each(connection, table))
                except (sqlite3.Error, ValueError) as exc:
                    raise self._failed(exc, reading=True) from exc
            try:
                tables = read_tables(self.path)
            except NoStoreError:
                return []
            except StoreError as exc:
                self.unreadable = str(exc)
                return []
            self.lost = self.lost or tables.lost
            stale = self._is_other_boot(tables.rows[META].get("boot_id")) and table in BOOT_BOUND
            return [(key, row) for key, row in tables.rows[table].items() if not stale or outlives_boot(key)]

    def history(self, limit: int = 100) -> list[tuple[int, bytes]]:
        """The newest entries of the history, newest first, as (number, msgpack); none that cannot be read."""
        pairs: list[tuple[int, bytes]] = []
        with self._alone(), suppress(sqlite3.Error):
            if self._connection is None:
                return []
            for seq, row in self._connection.execute(
                "SELECT seq, row FROM history ORDER BY seq DESC LIMIT ?", (limit,)
            ):
                with suppress(ValueError):
                    pairs.append((seq, unseal("history", row)))
        return pairs

    def ready(self) -> int:
        """Make sure that a write could work now, and return the generation to compare with.

        Errors: `StoreError` while the file is unwritable (it is tried again at most every ``retry_s``).
        """
        with self._alone():
            with self._recording():
                self._ready()
            return self.generation

    def apply(self, batch: StoreBatch) -> None:
        """Make a batch durable in one transaction: after the return it survives SIGKILL and power loss.

        Errors: `StoreError`; then nothing of the batch is stored.
        """
        with self._alone(), self._recording():
            connection = self._ready()
            try:
                self._transact(connection, batch)
            except sqlite3.Error as exc:
                raise self._failed(exc) from exc
            self._mirror(batch)
            self._marks = file_marks(self.path)

    @property
    def is_untouched(self) -> bool:
        """Whether no other program has written to its files: five calls of stat(2), in any thread."""
        return (
            self._connection is not None
            and self._reopened is None
            and not self._written_by_others()
            and not self._copy.due
        )

    def check(self, *, full: bool = False) -> str | None:
        """Check for damage by other programs, and repair it; returns the damage, None: none.

        Does nothing while the store `is_untouched`; else, and when ``full``, everything is read again past SQLite's
        cache. Errors: `StoreError` where the repair cannot be written.
        """
        with self._alone():
            reopened, self._reopened = self._reopened, None
            if self._connection is None:
                self._reopened = reopened  # reported when it is open again
                return None
            if reopened is not None:
                return f"{self.path}: {reopened}; recreated"
            foreign = self._written_by_others() and self._held_by_name()
            if not (full or self._written_by_others() or self._copy.due):
                return None
            if foreign:
                # Pages that are in the WAL hide what was done to the file, until the WAL no longer exists; so they are
                # replaced now.
                with suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            wrong = self._examine()
            if wrong is None:
                if self._copy.due or full:
                    self._copy_all(self._connection)
                self._marks, self._foreign = file_marks(self.path), False
                return f"{self.path}: written by another program; its content is intact" if foreign else None
            before = self.quarantined
            self._retry_at = 0.0
            if self._held_by_name():
                try:
                    self._quarantine(wrong)
                except (OSError, sqlite3.Error, StoreError) as exc:
                    self._drop(checkpoint=False)
                    raise self._unwritable(exc) from exc
            else:
                # Deleted or replaced, or the WAL: what we still have open is folded into what may be there.
                self._drop(checkpoint=True)
            self._open()
            aside = f"; moved to {self.quarantined}" if self.quarantined not in {None, before} else ""
            return f"{self.path}: {wrong}{aside}; recreated"

    @property
    def copy_problem(self) -> str | None:
        """Why no second copy of the originals exists; None: it does."""
        return self._copy.problem if self.writable else None

    def close(self) -> None:
        """Fold the WAL into the file and let go of it. Nothing unflushed is saved here."""
        with self._alone():
            self._drop(checkpoint=True)
            self._copy.close()
            self.writable = False

    # Opening

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Raises instead of waiting: interleaved calls are a mistake in the caller's limiter.
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("two threads use the store at once: it belongs to one lane")
        try:
            yield
        finally:
            self._in_use.release()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except StoreError as exc:
            if self._must_record:
                raise
            self.unrecorded = str(exc)

    def _ready(self) -> sqlite3.Connection:
        if self._connection is not None and self._identity != identity(self.path):
            # Deleted or replaced while in use: SQLite would continue writing to a file without a name.
            self._drop(checkpoint=False)
            self._retry_at = 0.0
            self._reopened = "deleted or replaced by another program"
        elif self._connection is not None and not self._held_by_name():
            # What only the deleted WAL has is folded into the file, where the next opening finds it.
            self._drop(checkpoint=True)
            self._retry_at = 0.0
            self._reopened = "its WAL was deleted by another program"
        elif self._connection is not None:
            # Our own write is about to hide it.
            self._foreign = self._written_by_others()
        if self._connection is None:
            if self._monotonic() < self._retry_at:
                raise StoreError(self.problem or f"{self.path}: not open")
            self._open()
        assert self._connection is not None
        return self._connection

    def _open(self) -> None:
        """Open, quarantining a damaged file. Errors: `StoreError`, with `problem` and the next try set."""
        try:
            try:
                self._replace_missing()
                self._connect()
            except (sqlite3.DatabaseError, ValueError) as exc:
                if isinstance(exc, sqlite3.DatabaseError) and _code(exc) in _ENVIRONMENT:
                    raise
                self._quarantine(str(exc))
                self._connect()
        except NewerSchemaError as exc:
            self._drop(checkpoint=False)
            self.problem = str(exc)
            raise
        except (OSError, sqlite3.Error, ValueError) as exc:
            self._drop(checkpoint=False)
            raise self._unwritable(exc) from exc
        self.generation += 1
        self.writable, self.problem = True, None

    def _connect(self) -> None:
        directory = os.path.dirname(self.path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        finish_interrupted(self.path)
        # SQLite would make it with 0644.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_directory(directory)
        # isolation_level None: Python begins no transactions by itself. check_same_thread: the store's worker thread is
        # not always the same one.
        connection = sqlite3.connect(self.path, timeout=2.0, isolation_level=None, check_same_thread=False)
        connection.text_factory = text_of
        self._connection = connection
        guard(connection)
        check_header(self.path)
        version = schema_version(connection, self.path)
        # A cache of 256 KiB; a WAL that has grown is cut to 1 MiB.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "cache_size = -256", "journal_size_limit = 1048576"):
            connection.execute(f"PRAGMA {pragma}").fetchone()
        migrate(connection, version)
        check = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if check != "ok":
            raise ValueError(f"{self.path}: {check}")
        # Every seal is checked here, so that damage is found before a row is used.
        counts = {table: sum(1 for _ in _each(connection, table)) for table in KEYED}
        meta = dict(_each(connection, META))
        self._serial = serial_of(meta)
        copied = self._copied()
        # A daemon that was killed has left a copy, if it counted transactions: someone has deleted it.
        if copied is None and SERIAL in meta and RUNNING in meta:
            self.lost, self.damage = True, NO_COPY
        elif copied is not None and copied.serial > self._serial and not is_stale(copied, meta):
            raise ValueError(f"{copied.serial - self._serial} transactions are missing that its copy has")
        batch = StoreBatch()
        if self._is_other_boot(meta.get("boot_id")):
            self.rebooted = True
            for table in BOOT_BOUND:
                batch.clear(table)
            for key, row in _each(connection, FILES):
                if outlives_boot(key):
                    batch.put(FILES, key, row)
            reason = f"{counts[FILES]} files of an earlier boot"
            batch.append(_pack({"at": self._clock(), "kind": "reboot", "reason": reason}))
        self._convert(connection, meta, batch)
        for name, value in self._meta.items():
            if value:
                batch.put(META, name, _pack(value))
        if LINEAGE not in meta:
            batch.put(META, LINEAGE, _pack(os.urandom(8)))
        # Always a real write: it proves that the disk takes one.
        batch.put(META, OPENED_AT, _pack(self._clock()))
        self._transact(connection, batch)
        self._copy_all(connection)
        unguard(connection)
        self._identity = identity(self.path)
        self._marks, self._foreign = file_marks(self.path), False

    def _convert(self, connection: sqlite3.Connection, meta: dict[str, bytes], batch: StoreBatch) -> None:
        """Have what schema 2 kept outside of the ledger in the ledger; of another boot, drop it."""
        if not PRIVATE.isdisjoint(meta):
            converted = convert({META: meta, FILES: dict(_each(connection, FILES))}, self.boot)
            for key, body in converted.files.items() if not self.rebooted else ():
                batch.put(FILES, key, body)
            for name in converted.replaced:
                batch.delete(META, name)

    # The second copy

    def _copied(self) -> Copied | None:
        with suppress(StoreError):
            return read_copy(self.path)
        return None

    def _copy_all(self, connection: sqlite3.Connection) -> None:
        self._copy.rewrite(self._serial, self.boot, {table: dict(_each(connection, table)) for table in MIRRORED})

    def _mirror(self, batch: StoreBatch) -> None:
        """Append a transaction to the copy; where that does not do, write all of it. Never an error of the batch's."""
        serial = {META: {SERIAL: _pack(self._serial)}}
        rows = {**batch.rows, META: {**batch.rows.get(META, {}), **serial[META]}}
        self._copy.append(self._serial, self.boot, batch.cleared, rows)
        if self._copy.due and self._connection is not None:
            with suppress(sqlite3.Error, ValueError):
                self._copy_all(self._connection)

    def _replace_missing(self) -> None:
        """Make the file from its copy where it was deleted. Errors: OSError, `sqlite3.Error`."""
        finish_interrupted(self.path)
        if os.path.lexists(self.path):
            return
        copied = self._copied()
        if copied is not None:
            self._quarantine("the file was missing")

    def _examine(self) -> str | None:
        """What is wrong with the file as another process would read it; None: nothing."""
        if not self._held_by_name():
            return "the store or its WAL was deleted or replaced by another program"
        try:
            with closing(open_readonly(self.path, newer=False)) as fresh:
                check = fresh.execute("PRAGMA quick_check(1)").fetchone()[0]
                if check != "ok":
                    return str(check)
                for table in KEYED:
                    for _ in _each(fresh, table):
                        pass
                serial = serial_of(dict(_each(fresh, META)))
        except (StoreError, sqlite3.Error, ValueError) as exc:
            return f"damaged while in use ({exc})"
        return None if serial == self._serial else "replaced by an older file by another program"

    def _written_by_others(self) -> bool:
        return self._foreign or self._marks != file_marks(self.path)

    def _held_by_name(self) -> bool:
        """Whether the names still lead to the files that are open."""
        now, then = file_marks(self.path), self._marks
        return all(
            numbers is not None and other is not None and numbers[:2] == other[:2]
            for numbers, other in zip(now, then, strict=True)
            if other is not None
        )

    def _is_other_boot(self, known: bytes | None) -> bool:
        return bool(self.boot) and known is not None and msgpack.unpackb(known) not in {"", self.boot}

    def _transact(self, connection: sqlite3.Connection, batch: StoreBatch) -> None:
        # Takes the write lock at once: another writer is met here, and not between two statements.
        connection.execute("BEGIN IMMEDIATE")
        try:
            for table in batch.cleared:
                connection.execute(f"DELETE FROM {table}")  # noqa: S608
            # In each transaction: by it the store and its copy show which of them lacks some.
            connection.execute(_PUT.format(META), (SERIAL, seal(SERIAL, _pack(self._serial + 1))))
            for table, rows in batch.rows.items():
                gone = [(key,) for key, body in rows.items() if body is None]
                kept = [(key, seal(key, body)) for key, body in rows.items() if body is not None]
                connection.executemany(f"DELETE FROM {table} WHERE key = ?", gone)  # noqa: S608
                connection.executemany(_PUT.format(table), kept)
            if batch.history:
                connection.executemany(
                    "INSERT INTO history (row) VALUES (?)", [(seal("history", body),) for body in batch.history]
                )
                connection.execute(
                    "DELETE FROM history WHERE seq <= (SELECT max(seq) FROM history) - ?", (self._history_limit,)
                )
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        self._serial += 1

    # Failing

    def _failed(self, exc: sqlite3.Error | ValueError, *, reading: bool = False) -> StoreError:
        """What a failed transaction (``reading``: a read), or an invalid seal, means for the store from now on."""
        code = _code(exc) if isinstance(exc, sqlite3.Error) else sqlite3.SQLITE_CORRUPT
        if code == sqlite3.SQLITE_BUSY:
            # Nothing is wrong with the file, and the connection remains: the next write tries again.
            return StoreError(f"{self.path}: the store is in use by another process: {exc}")
        short = getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_SHORT_READ  # cut off under us
        # Without a code it may be our own mistake, such as a closed connection: the next opening decides.
        if code in _DAMAGED or short or (reading and code and code not in _ENVIRONMENT):
            try:
                self._quarantine(str(exc))
                self._connect()
            except (OSError, sqlite3.Error, ValueError, StoreError) as again:
                self._drop(checkpoint=False)
                return self._unwritable(again)
            self.generation += 1
            return StoreError(f"{self.path}: was damaged ({exc}), moved to {self.quarantined}; a new store was created")
        self._drop(checkpoint=False)
        return self._unwritable(exc)

    def _unwritable(self, exc: Exception) -> StoreError:
        self.writable = False
        self._retry_at = self._monotonic() + self._retry_s
        why = errno_name(exc.errno) if isinstance(exc, OSError) else str(exc)
        self.problem = f"{self.path}: cannot write: {why}"
        return StoreError(self.problem)

    def _quarantine(self, why: str) -> None:
        """Save what can be read into a fresh file and move the damaged one aside (``state.db.corrupt-<time>``).

        Errors: OSError, `sqlite3.Error`.
        """
        rescued: dict[str, dict[str, bytes]] = {}
        if self._connection is not None:
            rescued = salvage(self._connection)
        copied = self._copied()
        merged, self.lost = merge(rescued, copied)
        if copied is not None and self.boot and copied.boot not in {"", self.boot}:
            # A copy of an earlier boot: what it has of cgroups is about directories that no longer exist.
            kept = {key: row for key, row in merged.get(FILES, {}).items() if outlives_boot(key)}
            merged |= {table: rescued.get(table, {}) for table in BOOT_BOUND}
            merged[FILES] = kept | merged[FILES]
        self._drop(checkpoint=False)
        existed = os.path.lexists(self.path)
        aside = replace_damaged(self.path, merged, self._clock())
        self.quarantined = aside if existed else self.quarantined
        self.salvaged += len(merged.get(FILES, ()))
        self.damage = why

    def _drop(self, *, checkpoint: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                if checkpoint:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with suppress(sqlite3.Error):
                connection.close()


def _each(connection: sqlite3.Connection, table: str) -> Iterator[tuple[str, bytes]]:
    for key, row in connection.execute(f"SELECT key, row FROM {table} ORDER BY rowid"):  # noqa: S608
        yield key, unseal(key, row)


def _code(exc: sqlite3.Error) -> int:
    """The primary result code; extended codes carry more in the higher bits."""
    code: int = getattr(exc, "sqlite_errorcode", None) or 0
    return code & 0xFF


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
