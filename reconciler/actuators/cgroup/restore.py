"""Restores every managed file to its value without the agent, in an order that the kernel accepts.

Works on a ledger alone, with or without a daemon, also after a SIGKILL at any point. Each file is compared three ways:
the value to restore (the original, or the runtime's record as of now, `reconciler.actuators.cgroup.records`), the
values that the agent may have left there, and the current value. A file that another program has changed since is left
unchanged; a file without a known original is left unchanged and reported. A second restore does nothing.

Groups that a tenant has made inside a container are widened after it, and narrowed before, whether they have a row or
were made as copies of the narrowed set (`reconciler.actuators.cgroup.inner_groups`).

A file is read again just before it is written. The runtime's record follows its writes by some milliseconds, so the
values restored to a container are compared with the record once more, `_UPDATE_S` later.

After a daemon was killed its last writes may be missing from the ledger: outcomes reach the disk in batches, while
originals are durable before the first write and each value is recorded just before it is written (`state.intents`). So
the values of ours that a file may hold are known, and `adopt_unjournaled_writes` records them. Any other value was
written by another program meanwhile: it is left unchanged and reported.

One value must not outlive the daemon: a frozen pod does nothing, answers no probe, and on cgroup v1 cannot even be
killed. `unfreeze` reverts it at a stop, before anything else at a start, by the unit after a crash (``bypassctl
thaw``), and under a hold as well. Evictions freeze a pod for half a second to kill one whose processes fork too fast.
That is recorded in their own journal, not in the ledger: the daemon thaws such a pod when it resumes the eviction, and
`reconciler.responses.eviction.journal.thaw_killed` does so if no daemon follows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import trio
from msgspec import structs

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, CgroupChangedError, CgroupGoneError, cgroup_error
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, Knob
from cgroupfs.log import get_log
from cgroupfs.naming import parse
from cgroupfs.plan import KnobChange, Known, order_changes
from cgroupfs.steps import WriteStep
from cgroupfs.writer import StepWriter
from reconciler.actuators.cgroup.compare import FREEZE, intended, is_ours
from reconciler.actuators.cgroup.control_files import masked, restore_text
from reconciler.actuators.cgroup.inner_groups import (
    SETS,
    InnerChange,
    InnerSet,
    ManagedSet,
    managed_above,
    plan_inner,
    walk,
)
from reconciler.actuators.cgroup.records import NO_RECORDS, Records
from reconciler.runtime.cooperative import TimeSlice
from state.entry import US, FileKey, LedgerEntry, same_group
from state.ledger import Ledger
from state.undo import RestoreOutcome, RestoreResult

_LOG: Final = get_log("restore")
_ROUNDS: Final = 3
_UPDATE_S: Final = 0.1
"""From the runtime's write to the rename of its record at most 11 ms were recorded."""
_AS_PARENT: Final = "was empty, which is impossible for a group with processes: now equal to its parent"


def adopt_unjournaled_writes(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> int:
    """Record the current values of managed files as written by us; returns how many were not recorded yet."""
    adopted = 0
    for entry in ledger.control_files():
        knob = CATALOG.get(entry.knob)
        version = hierarchy.version(entry.controller)
        if entry.writer not in {US, ""} or knob is None or version is None:
            continue
        try:
            if not same_group(entry.inode, files.inode(hierarchy.identity_directory(entry.path))):
                continue
            raw = files.read(hierarchy.directory(entry.controller, entry.path), entry.file).rstrip("\n")
            actual = knob.normal(raw, version)
            known = [knob.normal(text, version) for text in (entry.seen, entry.restore_text) if text is not None]
            ours = is_ours(knob, version, entry, ledger, actual)
        except (OSError, ValueError):
            # Gone or unreadable: the next pass detects and reports it.
            continue
        if ours and actual not in known:
            ledger.wrote(entry.key, before=None, after=raw)
            adopted += 1
    return adopted


class _PendingRestore(NamedTuple):
    """``emptied``: the file was empty and cannot be emptied again."""

    entry: LedgerEntry
    restore: str
    actual: str
    emptied: bool


class _RestoreContext(NamedTuple):
    hierarchy: Hierarchy
    ledger: Ledger
    files: FileOps
    records: Records

    def wanted(self, entry: LedgerEntry) -> str | None:
        """The value to restore; None: unknown. Errors: `ValueError`."""
        knob, version = CATALOG[entry.knob], self.hierarchy.version(entry.controller)
        return None if version is None else self.records.restore_text(entry, knob, version)


async def restore_all(
    hierarchy: Hierarchy,
    ledger: Ledger,
    writer: StepWriter,
    *,
    files: FileOps = REAL,
    only: str | None = None,
    policy: str | None = None,
    records: Records = NO_RECORDS,
) -> list[RestoreResult]:
    """Restore every file and drop it from the ledger; the caller flushes it.

    ``only``: those of one pod uid. ``policy``: those that one policy has set.

    After a daemon was killed `adopt_unjournaled_writes` comes first. The kernel's own rules order the writes; where
    they leave a choice, the last touched file is restored first.
    """
    scene = _RestoreContext(hierarchy, ledger, files, records)
    done: dict[FileKey, RestoreResult] = {}
    todo = [
        entry
        for entry in ledger.backwards()
        if (only is None or entry.pod_uid == only) and (policy is None or entry.policy == policy)
    ]
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
    scene: _RestoreContext, writer: StepWriter, todo: Sequence[LedgerEntry], done: dict[FileKey, RestoreResult]
) -> list[LedgerEntry]:
    """Compare these files and write where due. Returns those that changed meanwhile, to be compared again."""
    pending: list[_PendingRestore] = []
    settled: list[LedgerEntry] = []
    slices = TimeSlice()
    for entry in todo:
        await slices.checkpoint()
        result = _compare(scene, entry)
        if isinstance(result, RestoreResult):
            done[entry.key] = result
            if result.undo is RestoreOutcome.ALREADY and entry.writer == US:
                settled.append(entry)  # by a restore that was killed before it reached the groups inside
            if result.ok:
                scene.ledger.restored(entry.key, result.text)
        else:
            pending.append(result)
    inside = await _inside(scene, pending, settled)
    pending = [*(restore for restore in pending if restore.entry.key not in inside), *inside.values()]
    versions = scene.hierarchy.versions()
    changes = [_change(restore, versions[restore.entry.controller]) for restore in pending]
    plan = order_changes(changes, _bounding_values(scene.hierarchy, pending, scene.files), versions)
    by_place = {(restore.entry.path, restore.entry.knob): restore for restore in pending}
    for blocked in plan.blocked:
        item = by_place.pop((blocked.change.path, blocked.change.knob), None)
        if item is not None:
            done[item.entry.key] = _result(
                item.entry, RestoreOutcome.REFUSED, item.actual, f"{blocked.rule}: {blocked.reason}"
            )
    inodes = {restore.entry.path: restore.entry.inode for restore in pending}
    steps = list(_guarded(plan.steps, by_place))
    # If this restore is killed, the next one must recognise these values as ours.
    scene.ledger.intend((key, text) for key, text in intended(steps) if scene.ledger.get(key) is not None)
    again: list[LedgerEntry] = []
    for outcome in await writer.perform(steps, inodes):
        item = by_place.get((outcome.step.path, outcome.step.knob))
        if item is None or outcome.error is None:
            continue
        undo = RestoreOutcome.GONE if isinstance(outcome.error, CgroupGoneError) else RestoreOutcome.REFUSED
        if isinstance(outcome.error, CgroupChangedError):
            undo = RestoreOutcome.FOREIGN
            again.append(item.entry)
        done[item.entry.key] = _result(item.entry, undo, outcome.before or "", str(outcome.error))
        by_place.pop((outcome.step.path, outcome.step.knob), None)
    for item in by_place.values():
        detail = _AS_PARENT if item.emptied else ""
        done[item.entry.key] = _result(item.entry, RestoreOutcome.RESTORED, item.restore, detail)
    return again


async def _inside(
    scene: _RestoreContext, pending: Sequence[_PendingRestore], settled: Sequence[LedgerEntry]
) -> dict[FileKey, _PendingRestore]:
    """The restores of the groups inside containers whose v1 sets are restored: with a row in the ledger or without.

    A group that was made meanwhile is a copy of the narrowed set; it would stay narrow, or be in the way.
    """
    by_key = {restore.entry.key: restore for restore in pending}
    tops: dict[tuple[str, str], LedgerEntry] = {}
    for entry in (*settled, *(restore.entry for restore in pending)):
        if entry.knob in SETS and scene.hierarchy.version(entry.controller) == 1:
            tops.setdefault((managed_above(entry.path) or entry.path, entry.knob), entry)
    found: dict[FileKey, _PendingRestore] = {}
    slices = TimeSlice()
    for (top, name), entry in tops.items():
        if parse(top) is None:
            continue
        knob, key = CATALOG[name], (entry.controller, top, entry.file)
        try:
            managed = _managed(scene, knob, key, by_key.get(key), entry)
        except (OSError, ValueError):
            continue
        groups: list[InnerSet] = []
        for group in walk(scene.hierarchy, scene.files, key, knob, 1):
            row = by_key.get((entry.controller, group.path, entry.file))
            groups.append(group if row is None else group._replace(own=CpuSet.parse(row.restore).mask))
            await slices.checkpoint()
        for change in plan_inner(managed, groups):
            if change.is_write:
                place = (entry.controller, change.path, entry.file)
                row = by_key.get(place)
                made = _row_of(scene, entry, change) if row is None else row.entry
                wanted, now = CpuSet.from_mask(change.wanted), CpuSet.from_mask(change.now)
                found[place] = _PendingRestore(made, str(wanted), str(now), emptied=False)
    return found


def _managed(
    scene: _RestoreContext, knob: Knob, key: FileKey, restore: _PendingRestore | None, entry: LedgerEntry
) -> ManagedSet:
    """The container of a restore; without one of its own it keeps what it has. Errors: `OSError`, `ValueError`."""
    if restore is not None:
        now, own = CpuSet.parse(restore.actual).mask, CpuSet.parse(restore.restore).mask
        return ManagedSet(key[1], now, own, own, frozenset({now}))
    text = scene.files.read(scene.hierarchy.directory(key[0], key[1]), key[2]).rstrip("\n")
    now = CpuSet.parse(knob.normal(text, 1)).mask
    copies = frozenset({CpuSet.parse(entry.seen).mask}) if entry.path == key[1] and entry.seen else frozenset[int]()
    return ManagedSet(key[1], now, now, now, copies)


def _row_of(scene: _RestoreContext, near: LedgerEntry, change: InnerChange) -> LedgerEntry:
    """A row, not in the ledger, of a group inside that has none: a copy of the narrowed set."""
    inode = 0
    with suppress(OSError):
        inode = scene.files.inode(scene.hierarchy.trigger_directory(change.path))
    return LedgerEntry(
        controller=near.controller,
        path=change.path,
        file=near.file,
        knob=near.knob,
        inode=inode,
        original=str(CpuSet.from_mask(change.own)),
        pod_uid=near.pod_uid,
    )


async def _updated(scene: _RestoreContext, restored: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """The files of containers whose record has changed since it was read: the runtime was in an update."""
    before = {entry.key: scene.wanted(entry) for entry in restored if scene.records.has(entry)}
    if not before:
        return []
    await trio.sleep(_UPDATE_S)
    scene.records.forget()
    return [entry for entry in restored if entry.key in before and scene.wanted(entry) != before[entry.key]]


def _guarded(steps: Iterable[WriteStep], pending: Mapping[tuple[str, str], _PendingRestore]) -> Iterator[WriteStep]:
    """A restore never overwrites a value that appeared after the comparison."""
    # A file that another write resets no longer holds the compared value.
    begun = {(path, CATALOG[restore.entry.knob].resets) for (path, _), restore in pending.items()}
    for step in steps:
        place = (step.path, step.knob)
        item = pending.get(place)
        yield structs.replace(step, expects=item.actual) if item is not None and place not in begun else step
        begun.add(place)


def _compare(scene: _RestoreContext, entry: LedgerEntry) -> RestoreResult | _PendingRestore:
    """The restore that one file needs, or the result if it needs none."""
    hierarchy, ledger, files = scene.hierarchy, scene.ledger, scene.files

    def read(group: str, file: str) -> str:
        return files.read(hierarchy.directory(entry.controller, group), file)

    knob = CATALOG.get(entry.knob)
    version = hierarchy.version(entry.controller)
    if knob is None or version is None:
        return _result(entry, RestoreOutcome.GONE, "", f"no {entry.controller} controller on this node")
    try:
        inode = files.inode(hierarchy.identity_directory(entry.path))
        if not same_group(entry.inode, inode):
            return _result(entry, RestoreOutcome.GONE, "")
        raw = files.read(hierarchy.directory(entry.controller, entry.path), entry.file).rstrip("\n")
    except OSError as exc:
        error = cgroup_error(entry.path, exc, "read")
        if isinstance(error, CgroupGoneError):
            return _result(entry, RestoreOutcome.GONE, "")
        return _result(entry, RestoreOutcome.REFUSED, "", str(error))
    try:
        actual = knob.normal(raw, version)
        text = scene.wanted(entry)
        original = restore_text((knob, version), entry, ledger, text, read)
        restore = None if original is None else knob.normal(original, version)
        ours = is_ours(knob, version, entry, ledger, actual)
    except (ValueError, AgentError, OSError) as exc:
        return _result(entry, RestoreOutcome.UNKNOWN, raw, str(exc))
    if original is not None and entry.knob in masked(hierarchy, ledger, files, entry.path, ()):
        # Another managed file masks it, and restoring that one resets it.
        return _PendingRestore(entry, original, actual, original != text)
    if restore is not None and actual == restore:
        return _result(entry, RestoreOutcome.ALREADY, raw)
    # A crash between a write and its record leaves a file that holds the wanted value: ours as well.
    if entry.writer not in {US, ""} and entry.seen is not None and actual == knob.normal(entry.seen, version):
        return _result(entry, RestoreOutcome.FOREIGN, raw, f"by {entry.process or entry.writer}")
    if not ours:
        return _result(entry, RestoreOutcome.FOREIGN, raw)
    if original is None:
        return _result(entry, RestoreOutcome.UNKNOWN, raw)
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


def _bounding_values(hierarchy: Hierarchy, pending: Sequence[_PendingRestore], files: FileOps) -> Known:
    """The current values of these groups and their ancestors: they bound what may be written."""
    around: dict[tuple[str, str], Value] = {}
    # Groups inside a container have the container above them, and they are as they were read.
    tops = {managed_above(restore.entry.path) or restore.entry.path for restore in pending}
    for path in {above for top in tops for above in _with_ancestors(top)}:
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


def _with_ancestors(path: str) -> list[str]:
    texts = [path]
    while (path := path.rpartition("/")[0]) and path != "/":
        texts.append(path)
    return texts


def _result(entry: LedgerEntry, undo: RestoreOutcome, text: str, detail: str = "") -> RestoreResult:
    return RestoreResult(path=entry.path, file=entry.file, undo=undo, text=text, detail=detail)


def unfreeze(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> tuple[list[str], list[str]]:
    """Thaw every group that the ledger records as frozen by us. Writes the files directly: 0.4 ms each.

    Returns the paths of the thawed groups, and the failures as texts for people. Errors: none.
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
            if not same_group(entry.inode, files.inode(hierarchy.identity_directory(entry.path))):
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
