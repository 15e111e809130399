"""Undo everything: put back, in an order that the kernel accepts, what stood in every file before we touched it.

Works on a ledger alone, with or without a daemon, also after a SIGKILL half-way. A file that somebody else has changed
since is left to them; one whose original nobody knows is left and said. Restoring twice does nothing the second time.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from cgroupfs.codecs import Value
from cgroupfs.errors import AgentError, CgroupGoneError, cgroup_error
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.plan import Change, Known, order_changes
from cgroupfs.writer import StepWriter
from reconciler.actuators.putback import put_back
from reconciler.actuators.resets import muted
from state.entry import US, Entry, same_group
from state.ledger import Ledger

_AS_ABOVE: Final = "was empty, which a group with processes cannot be again: now all that the group above has"


class Undo(StrEnum):
    """What became of one file."""

    RESTORED = "restored"
    ALREADY = "already as before"
    GONE = "its group is gone"
    FOREIGN = "changed by somebody else since; left"
    UNKNOWN = "its original is not known; left"
    REFUSED = "the kernel refused"


class Undone(Struct, frozen=True, kw_only=True):
    """One file of the ledger and how undoing it ended. ``ok``: it is as if we had never touched it."""

    path: str
    file: str
    undo: Undo
    text: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """False where a person should look."""
        return self.undo in {Undo.RESTORED, Undo.ALREADY, Undo.GONE}


class _Pending(NamedTuple):
    entry: Entry
    restore: str
    actual: str


async def restore_all(
    hierarchy: Hierarchy,
    ledger: Ledger,
    writer: StepWriter,
    *,
    files: FileOps = REAL,
    only: str | None = None,
) -> list[Undone]:
    """Restore every file (``only``: those of one pod uid) and drop it from the ledger; the caller flushes it.

    After a daemon was killed `adopt_after_kill` comes first.
    The kernel's own rules order the writes; where they leave a choice, what was touched last is undone first.
    """
    done: list[Undone] = []
    pending: list[_Pending] = []
    versions = hierarchy.versions()
    for entry in ledger.backwards():
        if only is not None and entry.pod_uid != only:
            continue
        found = _look(hierarchy, ledger, entry, files)
        if isinstance(found, Undone):
            done.append(found)
            if found.ok:
                ledger.restored(entry.key, found.text)
        else:
            pending.append(found)
    changes = [_change(one, versions[one.entry.controller]) for one in pending]
    plan = order_changes(changes, _around(hierarchy, pending, files), versions)
    by_place = {(one.entry.path, one.entry.knob): one for one in pending}
    for blocked in plan.blocked:
        one = by_place.pop((blocked.change.path, blocked.change.knob), None)
        if one is not None:
            done.append(_undone(one.entry, Undo.REFUSED, one.actual, f"{blocked.rule}: {blocked.reason}"))
    inodes = {one.entry.path: one.entry.inode for one in pending}
    for outcome in await writer.perform(plan.steps, inodes):
        one = by_place.get((outcome.step.path, outcome.step.knob))
        if one is None:
            continue
        if outcome.error is not None:
            undo = Undo.GONE if isinstance(outcome.error, CgroupGoneError) else Undo.REFUSED
            done.append(_undone(one.entry, undo, outcome.before or "", str(outcome.error)))
            by_place.pop((outcome.step.path, outcome.step.knob), None)
    for one in by_place.values():
        detail = "" if one.restore == one.entry.restore_text else _AS_ABOVE
        done.append(_undone(one.entry, Undo.RESTORED, one.restore, detail))
        ledger.restored(one.entry.key, one.restore)
    return sorted(done, key=lambda one: (one.path, one.file))


def _look(hierarchy: Hierarchy, ledger: Ledger, entry: Entry, files: FileOps) -> Undone | _Pending:
    """Whether one file is to be written, or how it stands already."""

    def read(group: str, file: str) -> str:
        return files.read(hierarchy.directory(entry.controller, group), file)

    knob = CATALOG.get(entry.knob)
    version = hierarchy.version(entry.controller)
    if knob is None or version is None:
        return _undone(entry, Undo.GONE, "", f"no {entry.controller} controller here")
    try:
        inode = files.inode(hierarchy.trigger_directory(entry.path))
        if not same_group(entry.inode, inode):
            return _undone(entry, Undo.GONE, "")
        raw = files.read(hierarchy.directory(entry.controller, entry.path), entry.file).rstrip("\n")
    except OSError as exc:
        error = cgroup_error(entry.path, exc, "read")
        if isinstance(error, CgroupGoneError):
            return _undone(entry, Undo.GONE, "")
        return _undone(entry, Undo.REFUSED, "", str(error))
    try:
        actual = knob.normal(raw, version)
        original = put_back(knob, version, entry, ledger, read)
        restore = None if original is None else knob.normal(original, version)
        ours = {knob.normal(text, version) for text in (entry.seen, entry.wanted) if text is not None}
    except (ValueError, AgentError, OSError) as exc:
        return _undone(entry, Undo.UNKNOWN, raw, str(exc))
    if original is not None and entry.knob in muted(hierarchy, ledger, files, entry.path, ()):
        # Another file of ours hides it, and undoing that one resets it.
        return _Pending(entry, original, actual)
    if restore is not None and actual == restore:
        return _undone(entry, Undo.ALREADY, raw)
    # A crash between a write and its note leaves a file that holds what we wanted: ours as well.
    if entry.writer not in {US, ""} and entry.seen is not None and actual == knob.normal(entry.seen, version):
        return _undone(entry, Undo.FOREIGN, raw, f"by {entry.process or entry.writer}")
    if actual not in ours:
        return _undone(entry, Undo.FOREIGN, raw)
    if original is None:
        return _undone(entry, Undo.UNKNOWN, raw)
    return _Pending(entry, original, actual)


def _change(one: _Pending, version: int) -> Change:
    knob = CATALOG[one.entry.knob]
    return Change(
        path=one.entry.path,
        knob=one.entry.knob,
        have=knob.decode(one.actual, version),
        want=knob.decode(one.restore, version),
        why="restore",
        reclaim=True,
    )


def _around(hierarchy: Hierarchy, pending: Sequence[_Pending], files: FileOps) -> Known:
    """What the groups above and beside hold now: it bounds what may be written."""
    around: dict[tuple[str, str], Value] = {}
    for path in {above for one in pending for above in _above(one.entry.path)}:
        for name in ("cpu.set", "cpu.mems", "cpu.quota", "cpu.period"):
            knob = CATALOG[name]
            version = hierarchy.version(knob.controller)
            file = knob.file(version) if version is not None else None
            if version is None or file is None:
                continue
            try:
                text = files.read(hierarchy.directory(knob.controller, path), file).rstrip("\n")
                around[path, name] = knob.decode(text, version)
            except (OSError, ValueError):
                continue
    return around


def _above(path: str) -> list[str]:
    found = [path]
    while (path := path.rpartition("/")[0]) and path != "/":
        found.append(path)
    return found


def _undone(entry: Entry, undo: Undo, text: str, detail: str = "") -> Undone:
    return Undone(path=entry.path, file=entry.file, undo=undo, text=text, detail=detail)
