"""The ledger: for every value that bypassd ever changed, the original, the planned value, and the outcome.

An original is durable before the first write of its value and is never replaced afterwards (only corrected, where it
was read before the runtime had finished), so that a restore can undo everything at any moment, after any crash: control
files in the order of `Ledger.backwards`, each with its `LedgerEntry.restore_text`, the other kinds by their codecs.

Threads: `first_touches`, `adopt`, `record` and `flush` make rows durable (an fsync) and belong in the store's worker
thread. All other calls are dictionary work for the loop. Both may happen at once.

Longer than other modules because the rows in memory and the durable ones change under one lock.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, final

import msgspec
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError
from state.entry import (
    TEXTS,
    US,
    BeforeSource,
    FileKey,
    LedgerEntry,
    LedgerEvent,
    OriginalSource,
    path_of,
    row_key,
    same_group,
    stored_path,
)
from state.event_log import RECENT, EventLog
from state.intents import Intents, read_intents
from state.kinds import CGROUP
from state.rows import row_encoder
from state.schema import FILES, META, PLACES
from state.store import Store, StoreBatch

__all__ = ["US", "FileKey", "Ledger", "LedgerEntry", "LedgerEvent", "OriginalSource"]


class _Places(msgspec.Struct):
    intents: str = ""


_HISTORY_PENDING: Final = 8_000
"""Events that wait for a flush, at most: those of an unwritable store."""
_NOTED_PENDING: Final = 1_000
"""Values of one file that wait for it, at most: a law of BE's memory writes another one each second."""
_MOST_SHARED: Final = 20_000
"""With more texts the pool is emptied: those of removed pods and containers remain in it."""
_encode: Final = row_encoder()
_decode: Final = msgspec.msgpack.Decoder(LedgerEntry).decode


def _body(entry: LedgerEntry) -> bytes:
    path = stored_path(entry.path)
    return _encode(entry if path == entry.path else replace(entry, path=path))


@final
class Ledger:
    """All entries, in memory and in the store."""

    def __init__(
        self,
        store: Store,
        *,
        intents: str | None = None,
        title_of: Callable[[str], str] = lambda _: "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Load what the store holds. ``problems`` names rows that this version cannot understand.

        ``intents``: the file of the values about to be written; by default the last daemon's, else next to the store.
        ``title_of``: the title of a pod, by uid; empty: not known.
        """
        self.problems: tuple[str, ...] = ()
        path = intents or _intents_path(store)
        self._intents = Intents(path)
        self._about: dict[str, set[str]] = {}
        """By row key: what may have been written since the last flush, or is to be."""
        self._noted: dict[str, set[str]] = {}
        """The part of it whose outcome is known, which the next flush makes durable."""
        if store.rebooted:
            # Of cgroups that no longer exist; the file is on a disk where no runtime directory was given.
            self._intents.rewrite({})
        else:
            self._about = {key: set(texts) for key, texts in read_intents(path).items()}
        self._store = store
        self._clock = clock
        self._groups: dict[str, dict[tuple[str, str], LedgerEntry]] = {}
        """The control files: by group path, then controller and file."""
        self._kinds: dict[str, dict[FileKey, LedgerEntry]] = {}
        """The rows of every other kind."""
        self._pool: dict[str, str] = {}
        self._order = 0
        # Outcomes, last writers and failures are for people and for backoff: written in batches, by `flush`.
        self._dirty: dict[FileKey, None] = {}
        """Rows to be put, or deleted, by the next flush: in the order in which they changed."""
        self._pending: list[LedgerEvent] = []
        self._title_of = title_of
        self._lost_events = 0
        self._first: set[FileKey] = set()
        """Recorded, and not written yet: the first write's reading may correct the original."""
        self._lock = threading.Lock()
        self._generation = store.generation
        stored: list[tuple[int, bytes]] = []
        try:
            self._load()
            stored = store.history(RECENT)
        except StoreError as exc:
            self._generation = 0  # an open store has a higher one: the next write loads its rows
            self.problems = (str(exc),)
        self.events: Final = EventLog(row for _, row in reversed(stored))

    # Queries

    def __len__(self) -> int:
        return sum(map(len, list(self._groups.values()))) + sum(map(len, list(self._kinds.values())))

    def __iter__(self) -> Iterator[LedgerEntry]:
        """All entries of every kind; a snapshot, so that changes meanwhile do no harm."""
        yield from self.control_files()
        for rows in list(self._kinds.values()):
            yield from list(rows.values())

    def get(self, key: FileKey) -> LedgerEntry | None:
        if (kind := self._kinds.get(key[0])) is not None and key in kind:
            return kind[key]
        group = self._groups.get(key[1])
        return None if group is None else group.get((key[0], key[2]))

    def control_files(self) -> Iterator[LedgerEntry]:
        """The entries of control files, group by group; a snapshot."""
        for group in list(self._groups.values()):
            yield from list(group.values())

    def group(self, path: str) -> list[LedgerEntry]:
        return list(self._groups.get(path, {}).values())

    def has_group(self, path: str) -> bool:
        """Whether a control file of this group is in the ledger."""
        return path in self._groups

    def groups(self) -> list[str]:
        """The paths of all groups with a control file in the ledger."""
        return list(self._groups)

    def of_kind(self, kind: str) -> list[LedgerEntry]:
        """The rows of one kind other than control files, in the order of first touch."""
        return sorted(self._kinds.get(kind, {}).values(), key=lambda row: row.order)

    def counts(self) -> dict[str, int]:
        """The number of rows by kind; kinds without any are left out."""
        counts = {CGROUP: sum(map(len, list(self._groups.values())))}
        counts |= {kind: len(rows) for kind, rows in list(self._kinds.items())}
        return {kind: count for kind, count in sorted(counts.items()) if count}

    def kinds(self) -> list[str]:
        """The kinds other than control files that have rows."""
        return [kind for kind, rows in list(self._kinds.items()) if rows]

    def is_durable(self, key: FileKey, inode: int) -> bool:
        """True when this file, of this very group, may be written: its original is safe on disk."""
        entry = self.get(key)
        return entry is not None and same_group(entry.inode, inode)

    def ours(self, entry: LedgerEntry) -> set[str]:
        """Every text that bypassd may have left in a file, as written; any other content is another program's.

        After a SIGKILL, too: writes that no flush has stored are in `state.intents`.
        """
        key = row_key(entry.key)
        with self._lock:
            texts = self._about.get(key, set()) | self._noted.get(key, set())
        texts |= {text for text in (entry.wanted, entry.seen if entry.writer in {US, ""} else None) if text is not None}
        return texts | set(entry.ours)

    @property
    def intents_problem(self) -> str | None:
        """Why values about to be written cannot be noted; None: they are."""
        return self._intents.problem

    @property
    def unflushed(self) -> bool:
        """True when something has been noted that `flush` would make durable."""
        return bool(self._dirty or self._pending)

    def backwards(self) -> list[LedgerEntry]:
        """All control files, last touched first: the order to restore in."""
        return sorted(self.control_files(), key=lambda entry: -entry.order)

    def events_after(self, number: int) -> list[LedgerEvent]:
        """The events in memory with a higher number, the oldest first."""
        with self._lock:
            return self.events.after(number)

    # Durable at once (store's thread)

    def first_touches(self, entries: Iterable[LedgerEntry]) -> int:
        """Record originals before the first write of their files, in one transaction; return how many were new.

        A file that is known already (same inode) keeps its original. An entry of a group made again replaces the old
        one, which is moved to the history. Errors: `StoreError`; then nothing is recorded and none of the new files may
        be written.
        """
        touched = list(entries)

        def touch() -> list[LedgerEntry]:
            if not all(self.is_durable(entry.key, entry.inode) for entry in touched):
                # First: rows of a store that could not be read at start may have the true originals of these files.
                self._sync()
            new = self._new(touched)
            batch = StoreBatch()
            for entry in new:
                batch.put(FILES, row_key(entry.key), _body(entry))
                batch.append(_encode(_event(entry, "touch", entry.touched_at, before=entry.original)))
            if new:
                self._store.apply(batch)
            return new

        new = self._with_retry(touch)
        now = self._clock()
        for entry in new:
            replaced = self.get(entry.key)
            if replaced is not None:
                self.note(replace(_event(replaced, "gone", now), reason="the group was recreated"))
            # Only now that it is durable: `is_durable` allows the first write.
            self._insert(entry)
            self._first.add(entry.key)
        return len(new)

    def adopt(self, entries: Iterable[LedgerEntry]) -> int:
        """After the store was lost: enter live files that carry our values, with what is known of their originals.

        Like `first_touches`, but an entry without an original is marked `OriginalSource.UNKNOWN`, and the live value of
        a file is never taken for its original afterwards.
        Errors: `StoreError`.
        """
        made = []
        for entry in entries:
            if entry.original is None:
                entry.origin = OriginalSource.UNKNOWN
            made.append(entry)
        count = self.first_touches(made)
        for entry in made:
            self._first.discard(entry.key)  # the live value is bypassd's own
        return count

    def record(self, rows: Iterable[LedgerEntry], dropped: Iterable[FileKey] = (), *, kind: str = "gone") -> None:
        """Put rows of kinds other than control files, and drop others, in one transaction.

        Call it before the values are written: when it returns, the originals are durable. Order and time of the first
        touch are kept where the row is of the same object (inode). ``kind``: of the event that a dropped row leaves.
        Errors: `StoreError`; then nothing is changed, and nothing of it may be written.
        """
        put, gone = list(rows), list(dropped)
        ended: list[LedgerEvent] = []

        def store() -> list[LedgerEntry]:
            self._sync()
            ended.clear()  # of a first try
            now, order, made, batch = self._clock(), self._order, [], StoreBatch()
            for new in put:
                known = self.get(new.key)
                if known is not None and known.inode == new.inode:
                    row = replace(new, order=known.order, touched_at=known.touched_at)
                else:
                    order += 1
                    row = replace(new, order=order, touched_at=now)
                    batch.append(_encode(_event(row, "touch", now, before=row.original)))
                made.append(row)
                batch.put(FILES, row_key(row.key), _body(row))
            for key in gone:
                if (known := self.get(key)) is not None:
                    batch.delete(FILES, row_key(key))
                    after = known.original if kind == "restored" else None
                    ended.append(_event(known, kind, now, before=known.wanted, after=after))
            if batch:
                self._store.apply(batch)
            return made

        made = self._with_retry(store)
        for event in ended:
            # Among the other events in the order of time, and with the pod's title.
            self.note(event)
        with self._lock:
            for key in gone:
                self._kinds.get(key[0], {}).pop(key, None)
        for row in made:
            self._insert(row)

    def flush(self) -> int:
        """Make everything noted since the last flush durable; return how many rows were written.

        Errors: `StoreError`; then all of it is kept for the next flush.
        """
        self._sync()
        # What the loop notes from here on is of the next flush.
        with self._lock:
            dirty, self._dirty = self._dirty, {}
            events, self._pending = self._pending, []
            lost, self._lost_events = self._lost_events, 0
            noted, self._noted = self._noted, {}
        if lost:
            events.append(
                LedgerEvent(
                    at=self._clock(),
                    kind="lost",
                    reason=f"{lost} {'event was' if lost == 1 else 'events were'} dropped",
                )
            )
        batch = StoreBatch()
        for key in dirty:
            entry = self.get(key)
            if entry is None:
                batch.delete(FILES, row_key(key))
            else:
                batch.put(FILES, row_key(key), _body(entry))
        for event in events:
            batch.append(_encode(event))
        try:
            if batch:
                self._store.apply(batch)
        except BaseException:
            with self._lock:
                # The loop has changed rows and noted events meanwhile.
                self._dirty = {**dirty, **self._dirty}
                events += self._pending
                excess = max(0, len(events) - _HISTORY_PENDING)
                self._pending = events[excess:]
                self._lost_events += excess
                for row, texts in noted.items():
                    self._add_noted(row, texts)
            raise
        if noted:
            # What was intended or noted since is not in the store; under the lock, or an append would be lost.
            with self._lock:
                left = {key: texts | self._noted.get(key, set()) for key, texts in self._about.items()}
                self._intents.rewrite({**self._noted, **left})
        return len(dirty) + len(events)

    def _with_retry(self, store: Callable[[], list[LedgerEntry]]) -> list[LedgerEntry]:
        """The store may just have replaced a damaged file: then it can take everything again, at once."""
        try:
            return store()
        except StoreError:
            if not self._store.writable:
                raise
        return store()

    def _new(self, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        """The entries whose files are not known yet, numbered on from the last order."""
        new: dict[FileKey, LedgerEntry] = {}
        now = self._clock()
        for entry in entries:
            # A known file keeps its original: after a crash its live value may be bypassd's own.
            if not self.is_durable(entry.key, entry.inode):
                new[entry.key] = entry
        for order, entry in enumerate(new.values(), start=self._order + 1):
            entry.order, entry.touched_at = order, entry.touched_at or now
        return list(new.values())

    def _sync(self) -> None:
        """Synchronise with a store that was opened again since the last write: take its additional rows, add others."""
        generation = self._store.ready()
        if generation == self._generation:
            return
        # First: an original on disk that could not be read at start is the true one, a live value is not.
        self._load()
        batch = StoreBatch()
        for entry in self:
            batch.put(FILES, row_key(entry.key), _body(entry))
        self._store.apply(batch)
        self._generation = generation

    def _load(self) -> None:
        problems = []
        for key, body in self._store.rows(FILES):
            try:
                entry = decoded(_decode, body)
                entry.path = path_of(entry.path) if entry.kind == CGROUP else entry.path
            except ValueError as exc:
                problems.append(f"{key}: {exc}")
                continue
            # A row in memory is newer; one that is to be deleted by the next flush stays removed.
            if self.get(entry.key) is None and entry.key not in self._dirty:
                self._insert(entry)
        self.problems = tuple(problems)

    # Noting (the loop; durable with the next flush)

    def intend(self, values: Iterable[tuple[FileKey, str]]) -> None:
        """These texts are about to be written: call it before each write, whatever its outcome. Costs some 5 µs."""
        fresh: list[tuple[str, str]] = []
        with self._lock:
            for key, text in values:
                row = row_key(key)
                known = self._about.setdefault(row, set())
                if text not in known:
                    known.add(text)
                    if text not in self._noted.get(row, ()):
                        fresh.append((row, text))
            if fresh:
                self._intents.add(fresh)

    def want(self, key: FileKey, text: str, *, policy: str, reason: str) -> None:
        entry = self.get(key)
        if entry is not None and (entry.wanted, entry.policy, entry.reason) != (text, policy, reason):
            entry.wanted = self._shared(text)
            entry.policy, entry.reason = self._shared(policy), self._shared(reason)
            self._touch(entry)

    def rebase(self, key: FileKey, text: str | None) -> None:
        """What the kubelet or the runtime wants here from now on, None when its spec no longer names the value."""
        entry = self.get(key)
        if entry is not None and entry.baseline != text:
            entry.baseline = None if text is None else self._shared(text)
            self._touch(entry)

    def correct(self, key: FileKey, original: str, origin: OriginalSource) -> None:
        """The recorded original was read before the runtime had finished: the value of the file's owner is this one."""
        entry = self.get(key)
        if entry is not None and (entry.original, entry.origin) != (original, origin):
            entry.original, entry.origin = self._shared(original), origin
            self._touch(entry)

    def wrote(self, key: FileKey, *, before: str | None, after: str, at: float | None = None) -> None:
        """A text was written and read back.

        ``before`` is the previous content, None if it was not read: the event then has what is known of it, with its
        source.
        """
        entry = self.get(key)
        if entry is None:
            return
        previous = (before, BeforeSource.READ) if before is not None else _previous(entry)
        if key in self._first:
            self._first.discard(key)
            # The spec's value was recorded before the runtime wrote it: what was read is what it wrote.
            if entry.origin is OriginalSource.SPEC and before not in {None, after}:
                entry.original, entry.origin = self._shared(before or ""), OriginalSource.READ
        entry.seen, entry.writer, entry.process = self._shared(after), US, ""
        entry.written_at = self._clock() if at is None else at
        entry.failures, entry.failed_errno, entry.failed_since = 0, 0, 0.0
        self._touch(entry)
        self._is_noted(entry)
        event = _event(entry, "write", entry.written_at, before=previous[0], after=after)
        self.note(replace(event, before_source=previous[1]) if previous[1] else event)

    def failed(self, key: FileKey, *, errno: int, error: str, at: float | None = None) -> None:
        """A write was refused. The count falls to zero with the next success."""
        entry = self.get(key)
        if entry is None:
            return
        now = self._clock() if at is None else at
        entry.failures += 1
        entry.failed_errno = errno
        entry.failed_since = entry.failed_since or now
        self._touch(entry)
        self._is_noted(entry)
        self.note(replace(_event(entry, "failed", now), errno=errno, error=error))

    def saw(self, key: FileKey, text: str, *, writer: str, process: str = "", at: float | None = None) -> None:
        """The file has a value that bypassd did not write; with the writer, as far as known."""
        entry = self.get(key)
        if entry is None:
            return
        now = self._clock() if at is None else at
        before, entry.seen = entry.seen, self._shared(text)
        entry.writer, entry.process = self._shared(writer), self._shared(process)
        entry.foreign_at = now
        entry.foreign_count += 1
        self._touch(entry)
        self.note(_event(entry, "foreign", now, before=before, after=text))

    def set_yielded(self, key: FileKey, yielded: bool, *, reason: str) -> None:
        """Leave the file to the other writer (or take it up again)."""
        entry = self.get(key)
        if entry is not None and entry.yielded != yielded:
            entry.yielded = yielded
            self._touch(entry)
            self.note(replace(_event(entry, "yield" if yielded else "resume", self._clock()), reason=reason))

    def restored(self, key: FileKey, text: str) -> None:
        """The file has its old value again: it is no longer bypassd's. Until a flush, a crash restores it again."""
        self._remove(key, "restored", after=text)

    def forget_group(self, path: str) -> list[LedgerEntry]:
        """The group's directory was removed: drop its entries (and those below it) and return them."""
        below = f"{path.rstrip('/')}/"
        dropped = [
            entry for each in self.groups() if each == path or each.startswith(below) for entry in self.group(each)
        ]
        for entry in dropped:
            self._remove(entry.key, "gone")
        return dropped

    def prune(self, inode_now: Callable[[LedgerEntry], int | None]) -> list[LedgerEntry]:
        """Drop the entries of groups that were removed or made again; return them.

        ``inode_now`` returns the inode that an entry's group has now, None when no such directory exists.
        """
        dropped = []
        for entry in self.control_files():
            inode = inode_now(entry)
            if inode is None or not same_group(entry.inode, inode):
                self._remove(entry.key, "gone")
                dropped.append(entry)
        return dropped

    def note(self, event: LedgerEvent) -> None:
        """Add a free line to the history: a hold, an alert, a plan that was refused."""
        if event.pod_uid and not event.pod:
            event = replace(event, pod=self._title_of(event.pod_uid))
        with self._lock:
            event = self.events.add(event)
            if len(self._pending) >= _HISTORY_PENDING:
                # Unwritable for long: the newest are worth most.
                del self._pending[: _HISTORY_PENDING // 4]
                self._lost_events += _HISTORY_PENDING // 4
            self._pending.append(event)

    # Within

    def _insert(self, entry: LedgerEntry) -> None:
        """Take an entry in."""
        # A node has thousands of files, and a few dozen different texts.
        for name in TEXTS:
            text = getattr(entry, name)
            if text and (shared := self._shared(text)) is not text:
                setattr(entry, name, shared)
        names = (entry.controller, entry.file)
        with self._lock:
            if entry.kind == CGROUP:
                self._groups.setdefault(entry.path, {})[names] = entry
            else:
                self._kinds.setdefault(entry.kind, {})[entry.key] = entry
            self._order = max(self._order, entry.order)

    def _shared(self, text: str) -> str:
        if len(self._pool) > _MOST_SHARED:
            self._pool.clear()
        return self._pool.setdefault(text, text)

    def _touch(self, entry: LedgerEntry) -> None:
        with self._lock:
            self._dirty[entry.key] = None

    def _is_noted(self, entry: LedgerEntry) -> None:
        """The outcome of the writes of a file is known: after the next flush the store has it."""
        row = row_key(entry.key)
        with self._lock:
            texts = self._about.pop(row, None)
            if texts:
                self._add_noted(row, texts)

    def _add_noted(self, row: str, texts: set[str]) -> None:
        noted = self._noted.setdefault(row, set())
        if len(noted) >= _NOTED_PENDING:
            # Unwritable for long: what has been overwritten since is in no file.
            noted.clear()
        noted.update(texts)

    def _remove(self, key: FileKey, kind: str, *, after: str | None = None) -> None:
        with self._lock:
            group = self._groups.get(key[1], {})
            entry = group.pop((key[0], key[2]), None)
            if entry is None:
                return
            if not group:
                self._groups.pop(key[1], None)
        self._first.discard(key)
        self._touch(entry)
        self._is_noted(entry)
        self.note(_event(entry, kind, self._clock(), before=entry.seen, after=after))


def _intents_path(store: Store) -> str:
    """Where the last daemon noted the values about to be written."""
    with suppress(StoreError, msgspec.MsgspecError):
        places = dict(store.rows(META)).get(PLACES)
        if places is not None and (path := msgspec.msgpack.decode(places, type=_Places).intents):
            return path
    return f"{store.path}.writes"


def _previous(entry: LedgerEntry) -> tuple[str | None, BeforeSource]:
    """What is known of a file's content that was not read before a write."""
    if entry.seen is not None:
        return entry.seen, BeforeSource.SEEN
    if entry.original is None:
        return None, BeforeSource.READ
    return entry.original, BeforeSource.SPEC if entry.origin is OriginalSource.SPEC else BeforeSource.SEEN


def _event(
    entry: LedgerEntry, kind: str, at: float, *, before: str | None = None, after: str | None = None
) -> LedgerEvent:
    return LedgerEvent(
        at=at,
        kind=kind,
        controller=entry.controller,
        path=entry.path,
        file=entry.file,
        before=before,
        after=after,
        wanted=entry.wanted,
        writer=entry.writer,
        process=entry.process,
        policy=entry.policy,
        reason=entry.reason,
        pod_uid=entry.pod_uid,
        container_id=entry.container_id,
    )
