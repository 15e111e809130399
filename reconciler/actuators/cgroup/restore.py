"""Undo everything: put back, in an order that the kernel accepts, what would stand in every file without us.

Works on a ledger alone, with or without a daemon, also after a SIGKILL half-way. Each file is compared three ways: what
it held before, or what the runtime's record says by now (`reconciler.actuators.cgroup.records`); what we may have left
there; and what it holds. A file that somebody else has changed since is left to them; one whose original nobody knows
is left and said. Restoring twice does nothing the second time.

A file is read again just before it is written. The runtime's record follows its writes by some milliseconds, so what
was put back into a container is held against the record once more, a moment later.

After a daemon was killed: what the files hold now, where its last writes may be missing from the ledger.

Outcomes reach the disk in batches, originals before the first write, and each value is noted just before it is
written (`state.intents`). So after a SIGKILL a file may hold a value of ours that the ledger has not noted, and which
ones those may be is known. Any other value was written by somebody else meanwhile: it is left, and said.

One value does not outlive the daemon: a frozen pod does nothing, answers no probe, and on cgroup v1 cannot even be
killed. `unfreeze` takes it back at a stop, before anything else at a start, by the unit after a crash (``bypassctl
thaw``), and under a hold as well. Evictions stop a pod for half a second to kill who forks too fast. That is in their
own journal, not in the ledger: the daemon thaws such a pod when it takes the eviction up, and
`reconciler.responses.eviction.journal.thaw_killed` is for where no daemon follows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import trio
from msgspec import structs

from cgroupfs.codecs import Value
from cgroupfs.errors import AgentError, CgroupChangedError, CgroupGoneError, cgroup_error
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.log import get_log
from cgroupfs.plan import KnobChange, Known, order_changes
from cgroupfs.steps import WriteStep
from cgroupfs.writer import StepWriter
from reconciler.actuators.cgroup.compare import FREEZE, intended, is_ours
from reconciler.actuators.cgroup.control_files import masked, restore_text
from reconciler.actuators.cgroup.records import NO_RECORDS, Records
from state.entry import US, FileKey, LedgerEntry, same_group
from state.ledger import Ledger
from state.undo import RestoreOutcome, RestoreResult

_LOG: Final = get_log("restore")
_ROUNDS: Final = 3
_UPDATE_S: Final = 0.1
"""From the runtime's write to the rename of its record 11 ms were recorded at the most."""
_AS_ABOVE: Final = "was empty, which is impossible for a group with processes: now equal to its parent"


def adopt_unjournaled_writes(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> int:
    """Note what stands in our files as written by us; how many values were not noted yet."""
    adopted = 0
    for entry in ledger.control_files():
        knob = CATALOG.get(entry.knob)
        version = hierarchy.version(entry.controller)
        if entry.writer not in {US, ""} or knob is None or version is None:
            continue
        try:
            if not same_group(entry.inode, files.inode(hierarchy.trigger_directory(entry.path))):
                continue
            raw = files.read(hierarchy.directory(entry.controller, entry.path), entry.file).rstrip("\n")
            actual = knob.normal(raw, version)
            known = [knob.normal(text, version) for text in (entry.seen, entry.restore_text) if text is not None]
            ours = is_ours(knob, version, entry, ledger, actual)
        except (OSError, ValueError):
            # Gone or unreadable: the next look finds out, and says so.
            continue
        if ours and actual not in known:
            ledger.wrote(entry.key, before=None, after=raw)
            adopted += 1
    return adopted


class _PendingRestore(NamedTuple):
    """``emptied``: it was empty and cannot be again."""

    entry: LedgerEntry
    restore: str
    actual: str
    emptied: bool


class _Scene(NamedTuple):
    hierarchy: Hierarchy
    ledger: Ledger
    files: FileOps
    records: Records

    def wanted(self, entry: LedgerEntry) -> str | None:
        """What should be in a file again; None: nobody knows. Errors: `ValueError`."""
        knob, version = CATALOG[entry.knob], self.hierarchy.version(entry.controller)
        return None if version is None else self.records.undoing(entry, knob, version)


async def restore_all(
    hierarchy: Hierarchy,
    ledger: Ledger,
    writer: StepWriter,
    *,
    files: FileOps = REAL,
    only: str | None = None,
    records: Records = NO_RECORDS,
) -> list[RestoreResult]:
    """Restore every file (``only``: those of one pod uid) and drop it from the ledger; the caller flushes it.

    After a daemon was killed `adopt_unjournaled_writes` comes first.
    The kernel's own rules order the writes; where they leave a choice, what was touched last is undone first.
    """
    scene = _Scene(hierarchy, ledger, files, records)
    done: dict[FileKey, RestoreResult] = {}
    todo = [entry for entry in ledger.backwards() if only is None or entry.pod_uid == only]
    for _ in range(_ROUNDS):
        todo = await _round(scene, writer, todo, done)
        if not todo:
            break
    restored = [
        entry for key, result in done.items() if result.undo is RestoreOutcome.RESTORED and (entry := ledger.get(key))
    ]
    if updated := await _updated(scene, restored):
        await _round(scene, writer, updated, done)
    for key, restore_result in done.items():
        if restore_result.undo is RestoreOutcome.RESTORED:
            ledger.restored(key, restore_result.text)
    return sorted(done.values(), key=lambda result: (result.path, result.file))


async def _round(
    scene: _Scene, writer: StepWriter, todo: Sequence[LedgerEntry], done: dict[FileKey, RestoreResult]
) -> list[LedgerEntry]:
    """Look at these files and write what is to be written; those that changed meanwhile, to be looked at again."""
    pending: list[_PendingRestore] = []
    for entry in todo:
        result = _look(scene, entry)
        if isinstance(result, RestoreResult):
            done[entry.key] = result
            if result.ok:
                scene.ledger.restored(entry.key, result.text)
        else:
            pending.append(result)
    versions = scene.hierarchy.versions()
    changes = [_change(restore, versions[restore.entry.controller]) for restore in pending]
    plan = order_changes(changes, _around(scene.hierarchy, pending, scene.files), versions)
    by_place = {(restore.entry.path, restore.entry.knob): restore for restore in pending}
    for blocked in plan.blocked:
        item = by_place.pop((blocked.change.path, blocked.change.knob), None)
        if item is not None:
            done[item.entry.key] = _undone(
                item.entry, RestoreOutcome.REFUSED, item.actual, f"{blocked.rule}: {blocked.reason}"
            )
    inodes = {restore.entry.path: restore.entry.inode for restore in pending}
    steps = list(_safe(plan.steps, by_place))
    # Killed half-way, the next restore must know these for ours.
    scene.ledger.intend(intended(steps))
    again: list[LedgerEntry] = []
    for outcome in await writer.perform(steps, inodes):
        item = by_place.get((outcome.step.path, outcome.step.knob))
        if item is None or outcome.error is None:
            continue
        undo = RestoreOutcome.GONE if isinstance(outcome.error, CgroupGoneError) else RestoreOutcome.REFUSED
        if isinstance(outcome.error, CgroupChangedError):
            undo = RestoreOutcome.FOREIGN
            again.append(item.entry)
        done[item.entry.key] = _undone(item.entry, undo, outcome.before or "", str(outcome.error))
        by_place.pop((outcome.step.path, outcome.step.knob), None)
    for item in by_place.values():
        detail = _AS_ABOVE if item.emptied else ""
        done[item.entry.key] = _undone(item.entry, RestoreOutcome.RESTORED, item.restore, detail)
    return again


async def _updated(scene: _Scene, restored: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """The files of containers whose record has changed since it was gone by: the runtime was in an update."""
    before = {entry.key: scene.wanted(entry) for entry in restored if scene.records.has(entry)}
    if not before:
        return []
    await trio.sleep(_UPDATE_S)
    scene.records.forget()
    return [entry for entry in restored if entry.key in before and scene.wanted(entry) != before[entry.key]]


def _safe(steps: Iterable[WriteStep], pending: Mapping[tuple[str, str], _PendingRestore]) -> Iterator[WriteStep]:
    """Nothing is written over a value that came since the look."""
    # What another write makes the kernel forget does not read as it was looked at.
    begun = {(path, CATALOG[restore.entry.knob].resets) for (path, _), restore in pending.items()}
    for step in steps:
        place = (step.path, step.knob)
        item = pending.get(place)
        yield structs.replace(step, expects=item.actual) if item is not None and place not in begun else step
        begun.add(place)


def _look(scene: _Scene, entry: LedgerEntry) -> RestoreResult | _PendingRestore:
    """Whether one file is to be written, or how it stands already."""
    hierarchy, ledger, files = scene.hierarchy, scene.ledger, scene.files

    def read(group: str, file: str) -> str:
        return files.read(hierarchy.directory(entry.controller, group), file)

    knob = CATALOG.get(entry.knob)
    version = hierarchy.version(entry.controller)
    if knob is None or version is None:
        return _undone(entry, RestoreOutcome.GONE, "", f"no {entry.controller} controller on this node")
    try:
        inode = files.inode(hierarchy.trigger_directory(entry.path))
        if not same_group(entry.inode, inode):
            return _undone(entry, RestoreOutcome.GONE, "")
        raw = files.read(hierarchy.directory(entry.controller, entry.path), entry.file).rstrip("\n")
    except OSError as exc:
        error = cgroup_error(entry.path, exc, "read")
        if isinstance(error, CgroupGoneError):
            return _undone(entry, RestoreOutcome.GONE, "")
        return _undone(entry, RestoreOutcome.REFUSED, "", str(error))
    try:
        actual = knob.normal(raw, version)
        text = scene.wanted(entry)
        original = restore_text((knob, version), entry, ledger, text, read)
        restore = None if original is None else knob.normal(original, version)
        ours = is_ours(knob, version, entry, ledger, actual)
    except (ValueError, AgentError, OSError) as exc:
        return _undone(entry, RestoreOutcome.UNKNOWN, raw, str(exc))
    if original is not None and entry.knob in masked(hierarchy, ledger, files, entry.path, ()):
        # Another file of ours hides it, and undoing that one resets it.
        return _PendingRestore(entry, original, actual, original != text)
    if restore is not None and actual == restore:
        return _undone(entry, RestoreOutcome.ALREADY, raw)
    # A crash between a write and its note leaves a file that holds what we wanted: ours as well.
    if entry.writer not in {US, ""} and entry.seen is not None and actual == knob.normal(entry.seen, version):
        return _undone(entry, RestoreOutcome.FOREIGN, raw, f"by {entry.process or entry.writer}")
    if not ours:
        return _undone(entry, RestoreOutcome.FOREIGN, raw)
    if original is None:
        return _undone(entry, RestoreOutcome.UNKNOWN, raw)
    return _PendingRestore(entry, original, actual, original != text)


def _change(restore: _PendingRestore, version: int) -> KnobChange:
    knob = CATALOG[restore.entry.knob]
    return KnobChange(
        path=restore.entry.path,
        knob=restore.entry.knob,
        have=knob.decode(restore.actual, version),
        want=knob.decode(restore.restore, version),
        why="restore",
        reclaim=True,
    )


def _around(hierarchy: Hierarchy, pending: Sequence[_PendingRestore], files: FileOps) -> Known:
    """What the groups above and beside hold now: it bounds what may be written."""
    around: dict[tuple[str, str], Value] = {}
    for path in {above for restore in pending for above in _above(restore.entry.path)}:
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
    texts = [path]
    while (path := path.rpartition("/")[0]) and path != "/":
        texts.append(path)
    return texts


def _undone(entry: LedgerEntry, undo: RestoreOutcome, text: str, detail: str = "") -> RestoreResult:
    return RestoreResult(path=entry.path, file=entry.file, undo=undo, text=text, detail=detail)


def unfreeze(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> tuple[list[str], list[str]]:
    """Thaw every group that the ledger says is frozen by us. Control files are written here and now: 0.4 ms each.

    Returns the group paths that run again, and what could not be done, in a person's words. Errors: none.
    """
    knob = CATALOG[FREEZE]
    done: list[str] = []
    failed: list[str] = []
    for entry in [row for row in ledger.control_files() if row.knob == FREEZE]:
        version = hierarchy.version(entry.controller)
        if version is None:
            continue
        directory = hierarchy.directory(entry.controller, entry.path)
        try:
            if not same_group(entry.inode, files.inode(hierarchy.trigger_directory(entry.path))):
                continue
            if knob.decode(files.read(directory, entry.file), version) == 0:
                continue
            files.write(directory, entry.file, knob.encode(0, version))
            ledger.wrote(entry.key, before=None, after=knob.normal(files.read(directory, entry.file), version))
            done.append(entry.path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, ValueError) as exc:
            failed.append(f"{entry.path}: still frozen: {exc}")
            _LOG.error("still frozen", path=entry.path, error=str(exc))
    return done, failed
