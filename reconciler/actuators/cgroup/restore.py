"""Restores every managed file to its value without the agent, in an order that the kernel accepts.

Needs only a ledger, with or without a daemon, also after a SIGKILL at any point. Each file is compared three ways:
the value to restore (the original, or the runtime's record as of now, `reconciler.actuators.cgroup.records`), the
values that the agent may have left there, and the current value. A second restore does nothing.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import trio
from msgspec import structs

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, CgroupChangedError, CgroupGoneError, cgroup_error
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import FREEZER, Hierarchy, covered
from cgroupfs.knobs import CATALOG, SETS
from cgroupfs.naming import parse
from cgroupfs.plan import KnobChange, Known, order_changes
from cgroupfs.steps import WriteStep, ancestors
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.compare import FREEZE, intended, is_ours
from reconciler.actuators.cgroup.control_files import covering, masked, restore_text
from reconciler.actuators.cgroup.inner_groups import (
    InnerChange,
    InnerSet,
    ManagedSet,
    managed_above,
    plan_inner,
    walk,
)
from reconciler.actuators.cgroup.records import NO_RECORDS, Records
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.stints import in_worker
from state.entry import US, FileKey, LedgerEntry, RestoreOutcome, RestoreResult, same_group
from state.ledger import Ledger

_ROUNDS: Final = 3
"""Comparisons of a file that changes between comparison and write."""
_AT_ONCE: Final = 128
"""Groups inside a container that are compared, or written, before a pass may run: 60 ms."""
_UPDATE_S: Final = 0.1
"""From the runtime's write to the rename of its record at most 11 ms were recorded."""
_AS_PARENT: Final = "was empty, which is impossible for a group with processes: now equal to its parent"


def adopt_unjournaled_writes(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> int:
    """After a daemon was killed: record the values of ours that its ledger lacks; returns how many these are.

    Outcomes reach the disk in batches, so the last ones may be missing.
    """
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
            # All of ours are known: each was recorded just before it was written (`state.intents`).
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


_Place = tuple[str, str]
"""Group path and knob."""


class _InnerRows:
    """The groups inside one container. ``near``: a row of it or of one inside; ``rows``: by path.

    ``copies``: values of ours that a group made meanwhile may have copied.
    """

    def __init__(self, near: LedgerEntry) -> None:
        self.near = near
        self.rows: dict[str, LedgerEntry] = {}
        self.copies: set[int] = set()


class _RestoreContext(NamedTuple):
    """``done``: the results until now. ``between``: lets a pass of the daemon run.

    ``covered``: files and directories over which something else is mounted.
    """

    hierarchy: Hierarchy
    ledger: Ledger
    files: FileOps
    records: Records
    writer: KernelWriter
    done: dict[FileKey, RestoreResult]
    between: Callable[[], Awaitable[None]]
    covered: tuple[str, ...]

    def note(self, entry: LedgerEntry, result: RestoreResult) -> None:
        """A result that is final: a restored file leaves the ledger."""
        self.done[entry.key] = result
        if result.ok:
            self.ledger.restored(entry.key, result.text)

    def wanted(self, entry: LedgerEntry) -> str | None:
        """The value to restore; None: unknown. Errors: `ValueError`."""
        knob, version = CATALOG[entry.knob], self.hierarchy.version(entry.controller)
        return None if version is None else self.records.restore_text(entry, knob, version)


async def restore_all(
    hierarchy: Hierarchy,
    ledger: Ledger,
    writer: KernelWriter,
    *,
    files: FileOps = REAL,
    only: str | None = None,
    policy: str | None = None,
    records: Records = NO_RECORDS,
    between: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
) -> list[RestoreResult]:
    """Restore every file and drop it from the ledger; the caller flushes it.

    ``only``: those of one pod uid. ``policy``: those that one policy has set. ``between``: lets a pass of the daemon
    run; all but groups inside containers is restored and recorded then.

    After a daemon was killed `adopt_unjournaled_writes` is first.
    """
    done: dict[FileKey, RestoreResult] = {}
    context = _RestoreContext(hierarchy, ledger, files, records, writer, done, between, covered(hierarchy))
    todo: list[LedgerEntry] = []
    inside: dict[_Place, _InnerRows] = {}
    slices = TimeSlice()
    # Where the kernel's rules leave a choice, the last touched file is restored first.
    for entry in ledger.backwards():
        if (only is None or entry.pod_uid == only) and (policy is None or entry.policy == policy):
            place = _managed_place(context, entry)
            if place is None:
                todo.append(entry)
            else:
                inside.setdefault(place, _InnerRows(entry)).rows[entry.path] = entry
        await slices.checkpoint()
    for _ in range(_ROUNDS):
        todo = await _round(context, todo, inside)
        if not todo:
            break
    restored = [
        row for key, result in done.items() if result.undo is RestoreOutcome.RESTORED and (row := ledger.get(key))
    ]
    if updated := await _updated(context, restored):
        await _round(context, updated, inside)
    # Not before: another comparison needs the rows.
    for key, restore_result in done.items():
        if restore_result.undo is RestoreOutcome.RESTORED:
            ledger.restored(key, restore_result.text)
    # The tenant decides how many groups these are: last, in parts, and passes of the daemon run in between.
    for place, rows in inside.items():
        await _restore_inside(context, place, rows)
    return sorted(done.values(), key=lambda result: (result.path, result.file))


async def _round(
    context: _RestoreContext, todo: Sequence[LedgerEntry], inside: dict[_Place, _InnerRows]
) -> list[LedgerEntry]:
    """Compare these files and write where due. Returns those that changed meanwhile, to be compared again.

    Groups inside containers that lose CPUs are restored with them; of the others ``inside`` is completed.
    """
    pending: list[_PendingRestore] = []
    slices = TimeSlice()
    for entry in todo:
        await slices.checkpoint()
        result = _compare(context, entry)
        if isinstance(result, _PendingRestore):
            pending.append(result)
            continue
        context.note(entry, result)
        if result.undo is RestoreOutcome.ALREADY and entry.writer == US and entry.seen:
            # By a restore that was killed before it reached the groups inside.
            _expect_inside(context, inside, entry, entry.seen)
    found: dict[FileKey, _PendingRestore] = {}
    for restore in pending:
        place = _expect_inside(context, inside, restore.entry, restore.actual)
        if place is None:
            continue
        now, own = CpuSet.parse(restore.actual).mask, CpuSet.parse(restore.restore).mask
        # Groups inside have to leave these CPUs before their container does. They are widened after it.
        if now & ~own:
            managed = ManagedSet(place[0], now, own, own, frozenset({now}))
            found |= await _plan_inside(context, managed, inside.pop(place))
    pending = [*(restore for restore in pending if restore.entry.key not in found), *found.values()]
    # For groups inside a container it is enough to read from the container up: their own values were just read.
    around = await _bounding_values(context, {managed_above(item.entry.path) or item.entry.path for item in pending})
    steps, by_place = await _ordered(context, pending, around)
    again = await _perform(context, steps, by_place)
    for item in by_place.values():
        detail = _AS_PARENT if item.emptied else ""
        context.done[item.entry.key] = _result(item.entry, RestoreOutcome.RESTORED, item.restore, detail)
    return again


async def _ordered(
    context: _RestoreContext, pending: Sequence[_PendingRestore], around: Known
) -> tuple[list[WriteStep], dict[_Place, _PendingRestore]]:
    """The writes in the kernel's order, and the restore of each; those that are not possible are results."""
    versions = context.hierarchy.versions()
    slices = TimeSlice()
    changes = []
    for restore in pending:
        changes.append(_change(restore, versions[restore.entry.controller]))
        await slices.checkpoint()
    # Thousands of changes take too long in the event loop.
    if len(changes) <= _AT_ONCE:
        plan = order_changes(changes, around, versions)
    else:
        plan = await in_worker(order_changes, changes, around, versions)
    by_place = {(restore.entry.path, restore.entry.knob): restore for restore in pending}
    for blocked in plan.blocked:
        item = by_place.pop((blocked.change.path, blocked.change.knob), None)
        if item is not None:
            context.done[item.entry.key] = _result(
                item.entry, RestoreOutcome.REFUSED, item.actual, f"{blocked.rule}: {blocked.reason}"
            )
    steps = []
    for step in _guarded(plan.steps, by_place):
        steps.append(step)
        await slices.checkpoint()
    return steps, by_place


async def _perform(
    context: _RestoreContext, steps: Sequence[WriteStep], by_place: dict[_Place, _PendingRestore]
) -> list[LedgerEntry]:
    """Perform these steps. What fails is a result and leaves ``by_place``; returns the files that changed meanwhile."""
    # If this restore is killed, the next one must recognise these values as ours.
    context.ledger.intend((key, text) for key, text in intended(steps) if context.ledger.get(key) is not None)
    inodes = {step.path: item.entry.inode for step in steps if (item := by_place.get((step.path, step.knob)))}
    again: list[LedgerEntry] = []
    for begin in range(0, len(steps), _AT_ONCE):
        # In parts: the writer bounds the time of each.
        for outcome in await context.writer.perform(steps[begin : begin + _AT_ONCE], inodes):
            item = by_place.get((outcome.step.path, outcome.step.knob))
            if item is None or outcome.error is None:
                continue
            undo = RestoreOutcome.GONE if isinstance(outcome.error, CgroupGoneError) else RestoreOutcome.REFUSED
            if isinstance(outcome.error, CgroupChangedError):
                undo = RestoreOutcome.FOREIGN
                again.append(item.entry)
            context.done[item.entry.key] = _result(item.entry, undo, outcome.before or "", str(outcome.error))
            by_place.pop((outcome.step.path, outcome.step.knob), None)
    return again


# Groups inside containers


def _managed_place(context: _RestoreContext, entry: LedgerEntry) -> _Place | None:
    """The container, and the knob, that this row's group is inside of; None: it is not, or is restored like others."""
    if entry.knob not in SETS or context.hierarchy.version(entry.controller) != 1:
        return None
    top = managed_above(entry.path)
    return None if top is None else (top, entry.knob)


def _expect_inside(
    context: _RestoreContext, inside: dict[_Place, _InnerRows], entry: LedgerEntry, copied: str
) -> _Place | None:
    """A container's v1 set is restored: so are the groups inside, also copies of ``copied`` that have no row."""
    if entry.knob not in SETS or context.hierarchy.version(entry.controller) != 1 or parse(entry.path) is None:
        return None
    place = entry.path, entry.knob
    inside.setdefault(place, _InnerRows(entry)).copies.add(CpuSet.parse(copied).mask)
    return place


async def _plan_inside(
    context: _RestoreContext,
    managed: ManagedSet,
    inner: _InnerRows,
    between: Callable[[], Awaitable[None]] | None = None,
) -> dict[FileKey, _PendingRestore]:
    """The restores of the groups inside one container: with a row in the ledger or without."""
    key = inner.near.controller, managed.path, inner.near.file
    rows, found, groups = dict(inner.rows), dict[FileKey, _PendingRestore](), list[InnerSet]()
    slices = TimeSlice()

    def compare(row: LedgerEntry) -> _PendingRestore | None:
        result = _compare(context, row)
        if isinstance(result, _PendingRestore):
            found[row.key] = result
            return result
        context.note(row, result)
        return None

    for number, group in enumerate(walk(context.hierarchy, context.files, key, CATALOG[inner.near.knob], 1), start=1):
        row = rows.pop(group.path, None)
        restore = None if row is None else compare(row)
        groups.append(group if restore is None else group._replace(own=CpuSet.parse(restore.restore).mask))
        await slices.checkpoint()
        if between is not None and number % _AT_ONCE == 0:
            await between()
    for row in rows.values():
        compare(row)
        await slices.checkpoint()
    changes: list[InnerChange] = []
    if managed.wanted:
        in_loop = len(groups) <= _AT_ONCE
        changes = plan_inner(managed, groups) if in_loop else await in_worker(plan_inner, managed, groups)
    for change in changes:
        if change.is_write:
            place = (key[0], change.path, key[2])
            # One without a row was made meanwhile, a copy of the narrowed set: it would stay narrow, or be in the way.
            made = found[place].entry if place in found else _row_of(context, inner.near, change)
            wanted, now = CpuSet.from_mask(change.wanted), CpuSet.from_mask(change.now)
            found[place] = _PendingRestore(made, str(wanted), str(now), emptied=False)
        await slices.checkpoint()
    return found


async def _restore_inside(context: _RestoreContext, place: _Place, inner: _InnerRows) -> None:
    """The groups inside one container, which keeps the set that it has by now."""
    path, knob = place
    try:
        text = context.files.read(context.hierarchy.directory(inner.near.controller, path), inner.near.file).rstrip(
            "\n"
        )
        now = CpuSet.parse(CATALOG[knob].normal(text, 1)).mask
    except (OSError, ValueError):
        now = 0  # nothing is planned for groups inside; rows are compared all the same
    managed = ManagedSet(path, now, now, now, frozenset(inner.copies - {now}))
    pending = await _plan_inside(context, managed, inner, context.between)
    around = await _bounding_values(context, {path})
    steps, by_place = await _ordered(context, list(pending.values()), around)
    left = Counter((step.path, step.knob) for step in steps)
    for begin in range(0, len(steps), _AT_ONCE):
        part = steps[begin : begin + _AT_ONCE]
        await _perform(context, part, by_place)
        for step in part:
            at = step.path, step.knob
            left[at] -= 1  # a group may need two writes
            if not left[at] and (item := by_place.pop(at, None)) is not None:
                context.note(item.entry, _result(item.entry, RestoreOutcome.RESTORED, item.restore))
        await context.between()
    for item in by_place.values():
        context.note(item.entry, _result(item.entry, RestoreOutcome.RESTORED, item.restore))


def _row_of(context: _RestoreContext, near: LedgerEntry, change: InnerChange) -> LedgerEntry:
    """A row, not in the ledger, of a group inside that has none: a copy of the narrowed set."""
    inode = 0
    with suppress(OSError):
        inode = context.files.inode(context.hierarchy.trigger_directory(change.path))
    return LedgerEntry(
        controller=near.controller,
        path=change.path,
        file=near.file,
        knob=near.knob,
        inode=inode,
        original=str(CpuSet.from_mask(change.own)),
        pod_uid=near.pod_uid,
    )


async def _updated(context: _RestoreContext, restored: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """The files of containers whose record has changed since it was read: the runtime was in an update."""
    before = {entry.key: context.wanted(entry) for entry in restored if context.records.has(entry)}
    if not before:
        return []
    # The record follows the runtime's writes by some milliseconds.
    await trio.sleep(_UPDATE_S)
    context.records.forget()
    return [entry for entry in restored if entry.key in before and context.wanted(entry) != before[entry.key]]


def _guarded(steps: Iterable[WriteStep], pending: Mapping[tuple[str, str], _PendingRestore]) -> Iterator[WriteStep]:
    """A restore never overwrites a value that appeared after the comparison."""
    # A file that another write resets no longer holds the compared value.
    begun = {(path, CATALOG[restore.entry.knob].resets) for (path, _), restore in pending.items()}
    for step in steps:
        place = (step.path, step.knob)
        item = pending.get(place)
        yield structs.replace(step, expects=item.actual) if item is not None and place not in begun else step
        begun.add(place)


def _compare(context: _RestoreContext, entry: LedgerEntry) -> RestoreResult | _PendingRestore:
    """The restore that one file needs, or the result if it needs none."""
    hierarchy, ledger, files = context.hierarchy, context.ledger, context.files

    def read(group: str, file: str) -> str:
        return files.read(hierarchy.directory(entry.controller, group), file)

    knob = CATALOG.get(entry.knob)
    version = hierarchy.version(entry.controller)
    if knob is None:
        return _result(entry, RestoreOutcome.UNKNOWN, "", f"this version has no knob {entry.knob}")
    if version is None:
        return _result(entry, RestoreOutcome.GONE, "", f"no {entry.controller} controller on this node")
    path = f"{hierarchy.directory(entry.controller, entry.path)}/{entry.file}"
    # Of a group whose identifying directory is hidden nothing is known: another inode is not its end.
    for each in (path, hierarchy.identity_directory(entry.path)):
        if (place := covering(context.covered, each)) is not None:
            return _result(entry, RestoreOutcome.REFUSED, "", f"something else is mounted over it: umount {place}")
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
        text = context.wanted(entry)
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
    if entry.failures and not entry.written_at and not ours:
        # The kernel refused every write: the value of another program is there, and ours never was.
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


async def _bounding_values(context: _RestoreContext, tops: Collection[str]) -> Known:
    """The current values of these groups and their ancestors: they bound what may be written."""
    hierarchy, files = context.hierarchy, context.files
    around: dict[tuple[str, str], Value] = {}
    slices = TimeSlice()
    for path in {above for top in tops for above in _with_ancestors(top)}:
        await slices.checkpoint()
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
    """Thaw every group that the ledger records as frozen by us, also under a hold.

    A frozen pod answers no probe, and on cgroup v1 cannot even be killed: it must not outlive the daemon. So this runs
    at a stop, first at a start, and by the unit after a crash (``bypassctl thaw``). Pods that an eviction froze to kill
    them are in its own journal (`reconciler.responses.eviction.journal.thaw_killed`).

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
            files.write(directory, entry.file, knob.encode(0, version))  # in the event loop: 0.4 ms
            after = knob.normal(files.read(directory, entry.file), version)
            ledger.wrote(entry.key, before=None, after=after)
            if _is_frozen_above(hierarchy, files, entry.path, version):
                failed.append(f"{entry.path}: still frozen: a group above it is frozen by another program")
            elif knob.decode(after, version) != 0:
                failed.append(f"{entry.path}: still frozen: accepted, but it reads {after}")
            else:
                done.append(entry.path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, ValueError) as exc:
            failed.append(f"{entry.path}: still frozen: {exc}")
    return done, failed


def _is_frozen_above(hierarchy: Hierarchy, files: FileOps, path: str, version: int) -> bool:
    """Whether a group above one is frozen, and so its processes. Errors: `OSError`."""
    if version == 1:
        return files.read(hierarchy.directory(FREEZER, path), "freezer.parent_freezing").strip() == "1"
    directories = (hierarchy.directory(FREEZER, above) for above in ancestors(path) if above != "/")
    return any(files.read(directory, "cgroup.freeze").strip() == "1" for directory in directories)
