"""Restores resctrl, with or without a daemon: groups by their prefix, the rest from the store.

Before the first touch the ledger records the default group's own values, that groups of ours may exist, and that a
mount of ours may exist.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import AgentError, CgroupGoneError, InputError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import QosClass, detect_layout
from cgroupfs.threads import GroupThreads, threads_of, together
from reconciler.actuators.codec import RowCodec, row_of, undo_rows
from reconciler.runtime.format import plural
from resctrl.capability import Capability, ResctrlStatus, read_capability
from resctrl.files import REAL as REAL_GROUPS
from resctrl.files import SOURCE, GroupFiles, Mounter, RealMounter
from resctrl.groups import DEFAULT, PREFIX, ControlGroups, gather
from resctrl.monitor import MonitorGroups
from resctrl.schemata import differing, format_schemata, parse_schemata
from state.cache import CACHE as POLICY
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.kinds import RESCTRL
from state.ledger import Ledger

_WRITTEN: Final = 2
"""Values of ours that are recorded: the last ones, and those that are about to be written."""

Values = Mapping[str, Mapping[int, int]]


class ResctrlState(Struct, frozen=True, kw_only=True):
    """The recorded state: our changes of the node's resctrl, and the originals.

    ``groups``: groups of ours may exist. ``place``: where a mount of ours may be, None if another program has mounted
    it. ``original``: the default group's values before the first touch; ``written``: the last values that we wrote, or
    were about to write.
    """

    groups: bool = False
    place: str | None = None
    original: dict[str, dict[int, int]] | None = None
    written: tuple[dict[str, dict[int, int]], ...] = ()


_ROOT: Final = "/"
"""The object of rows about the tree: its root, wherever it is mounted."""
SCHEMATA: Final = "schemata"
GROUPS: Final = "groups"
MOUNTED: Final = "mount"
_NONE: Final = "none"


def _load(rows: Iterable[LedgerEntry]) -> ResctrlState:
    state = ResctrlState()
    for row in rows:
        if row.file == MOUNTED:
            state = replace(state, place=row.path)
        elif row.path != _ROOT:
            continue
        elif row.file == GROUPS:
            state = replace(state, groups=True)
        elif row.file == SCHEMATA and row.original is not None:
            with suppress(InputError):
                written = tuple(parse_schemata(text) for text in row.ours)
                state = replace(state, original=parse_schemata(row.original), written=written)
    return state


def _dump(state: ResctrlState) -> Iterable[LedgerEntry]:
    if state.original is not None:
        ours = tuple(_text(values) for values in state.written)
        yield _row(_ROOT, SCHEMATA, _text(state.original), ours)
    if state.groups:
        yield _row(_ROOT, GROUPS, _NONE, (f"{PREFIX}*",))
    if state.place is not None:
        yield _row(state.place, MOUNTED, _NONE, (SOURCE,))


def _row(path: str, field: str, original: str, ours: tuple[str, ...]) -> LedgerEntry:
    return row_of(RESCTRL, path, field, knob=f"resctrl.{field}", policy=POLICY, original=original, ours=ours)


def _text(values: Values) -> str:
    return format_schemata(values).rstrip("\n")


CODEC: Final = RowCodec(kind=RESCTRL, load=_load, dump=_dump)


def about_to_write(recorded: ResctrlState, existed: Values, wanted: Values) -> ResctrlState:
    """The state that must be durable before the default group is written."""
    new = {name: dict(domains) for name, domains in wanted.items()}
    if recorded.original is not None and recorded.written and recorded.written[-1] == new:
        return recorded
    original = (
        {name: dict(domains) for name, domains in existed.items()} if recorded.original is None else recorded.original
    )
    # The previous one too: a crash may precede the write.
    return replace(recorded, original=original, written=(*recorded.written, new)[-_WRITTEN:])


def undo_all(
    files: GroupFiles, capability: Capability, recorded: ResctrlState, mounter: Mounter
) -> tuple[list[RestoreResult], ResctrlState]:
    """Restore everything; returns the results, and the state of what could not be restored. Errors: none."""
    root = capability.root
    if capability.status is not ResctrlStatus.READY or root is None:
        # Unmounting removes all groups, and the kernel resets everything. A mount that we cannot see may still exist.
        gone = capability.status is ResctrlStatus.NOT_MOUNTED and mounter.sees_the_host()
        return [], ResctrlState() if gone else recorded
    done = _groups(files, root)
    recorded = replace(recorded, groups=not all(result.ok for result in done))
    restore_result = undo_default(files, capability, recorded)
    if restore_result is not None:
        done.append(restore_result)
        if restore_result.over:
            recorded = replace(recorded, original=None, written=())
    # By its source, not by the record: also after a kill, and where another program has mounted its own since.
    ours = mounter.source(root) == SOURCE
    if ours:
        restore_result = _mount(files, root, mounter)
        done.append(restore_result)
    if not ours or (restore_result is not None and restore_result.ok):
        recorded = replace(recorded, place=None)
    return done, recorded


def undo_default(files: GroupFiles, capability: Capability, recorded: ResctrlState) -> RestoreResult | None:
    """Restore the default group's own values; None if they were never touched."""
    original, root = recorded.original, capability.root
    if original is None or root is None:
        return None
    groups = ControlGroups(root, files)
    try:
        actual = groups.schemata(DEFAULT)
        # Only resources that we have written: the others may have been changed by their owner.
        touched = {name: original[name] for name in original if any(name in item for item in recorded.written)}
        text = format_schemata({name: actual.get(name, {}) for name in touched}).rstrip("\n")
        # A cache whose CPUs are all offline is not in the file; with its CPUs the kernel's own value returns.
        touched = _present(touched, actual)
        if not differing(touched, actual, capability):
            return RestoreResult(path=root, file="schemata", undo=RestoreOutcome.ALREADY, text=text)
        ours = [item for item in recorded.written if not differing(_present(item, actual), actual, capability)]
        if not ours:
            return RestoreResult(path=root, file="schemata", undo=RestoreOutcome.FOREIGN, text=text)
        groups.set_schemata(DEFAULT, touched, capability)
        return RestoreResult(
            path=root, file="schemata", undo=RestoreOutcome.RESTORED, text=format_schemata(touched).rstrip("\n")
        )
    except AgentError as exc:
        return RestoreResult(path=root, file="schemata", undo=RestoreOutcome.REFUSED, detail=str(exc))


def _present(values: Values, actual: Values) -> dict[str, dict[int, int]]:
    """Of these values those of domains that the kernel has now."""
    return {
        name: {domain: value for domain, value in domains.items() if domain in actual.get(name, {})}
        for name, domains in values.items()
    }


def undo_pod(files: GroupFiles, root: str, uid: str, threads: Callable[[], GroupThreads]) -> list[RestoreResult]:
    """Move one pod's threads to the default group, and remove a group that is empty then. Errors: none."""
    groups, monitors = ControlGroups(root, files), MonitorGroups(root, files)
    done: list[RestoreResult] = []
    try:
        for name in groups.ours():
            members, listed = groups.members(name), threads()
            missing = listed.missing if members else ""
            if not members & listed.ids and not missing:
                continue
            moved = gather(files, root, lambda members=members: threads().ids & members)  # type: ignore[misc]
            detail = missing
            if not moved.complete:
                detail = f"{dict(moved.refused) or 'new threads appear faster than they are moved'}"
            undo = RestoreOutcome.REFUSED if detail else RestoreOutcome.RESTORED
            text = plural(moved.moved, "thread")
            done.append(RestoreResult(path=groups.path(name), file="tasks", undo=undo, text=text, detail=detail))
            if moved.complete and not groups.members(name):
                groups.remove(name)
        for name in (DEFAULT, *groups.ours()):
            monitor = f"{PREFIX}{uid}"
            if monitor in monitors.names(name)[0] and monitors.remove(name, monitor):
                done.append(
                    RestoreResult(path=monitors.path(name, monitor), file="mon_group", undo=RestoreOutcome.RESTORED)
                )
    except AgentError as exc:
        done.append(RestoreResult(path=root, file="tasks", undo=RestoreOutcome.REFUSED, detail=str(exc)))
    return done


def _groups(files: GroupFiles, root: str) -> list[RestoreResult]:
    groups, monitors = ControlGroups(root, files), MonitorGroups(root, files)
    done: list[RestoreResult] = []

    def note(path: str, file: str, remove: Callable[[], bool]) -> None:
        try:
            existed = remove()
        except AgentError as exc:
            done.append(RestoreResult(path=path, file=file, undo=RestoreOutcome.REFUSED, detail=str(exc)))
        else:
            done.append(
                RestoreResult(path=path, file=file, undo=RestoreOutcome.RESTORED if existed else RestoreOutcome.GONE)
            )

    for name in monitors.names(DEFAULT)[0]:
        note(monitors.path(DEFAULT, name), "mon_group", lambda name=name: monitors.remove(DEFAULT, name))  # type: ignore[misc]
    try:
        ours = groups.ours()
    except CgroupGoneError:
        return done  # unmounted meanwhile, which removes all groups
    except AgentError as exc:
        return [*done, RestoreResult(path=root, file="group", undo=RestoreOutcome.REFUSED, detail=str(exc))]
    for name in ours:
        # Its threads go to the default group, where all of them were: those in groups of others are never moved.
        note(groups.path(name), "group", lambda name=name: groups.remove(name))  # type: ignore[misc]
    return done


def _mount(files: GroupFiles, place: str, mounter: Mounter) -> RestoreResult:
    try:
        others = [*ControlGroups(place, files).foreign(), *MonitorGroups(place, files).names(DEFAULT)[1]]
        if others:
            detail = f"unmounting would delete the groups {', '.join(others)}"
            return RestoreResult(path=place, file="mount", undo=RestoreOutcome.FOREIGN, detail=detail)
        mounter.unmount(place)
    except AgentError as exc:
        return RestoreResult(path=place, file="mount", undo=RestoreOutcome.REFUSED, detail=str(exc))
    return RestoreResult(path=place, file="mount", undo=RestoreOutcome.RESTORED)


def pod_threads(hierarchy: Hierarchy, uid: str, files: FileOps = REAL) -> GroupThreads:
    """All threads of a pod, found by its name only."""
    layout = detect_layout(hierarchy, None)
    paths = [layout.pod(qos, uid) for qos in QosClass] if layout is not None else []
    return together(threads_of(hierarchy, path, files) for path in paths)


def restore_resctrl(
    root: str,
    ledger: Ledger,
    only: str | None,
    *,
    files: GroupFiles = REAL_GROUPS,
    capability: Capability | None = None,
    mounter: Mounter | None = None,
) -> list[RestoreResult]:
    """Restore while no daemon runs. Errors: `StoreError` if the remaining state cannot be recorded."""
    try:
        result = read_capability(root) if capability is None else capability
    except InputError as exc:
        return [RestoreResult(path=root, file="schemata", undo=RestoreOutcome.REFUSED, detail=str(exc))]
    if only is not None:
        if result.status is not ResctrlStatus.READY or result.root is None:
            return []
        try:
            hierarchy = Hierarchy.detect(root)
        except AgentError as exc:
            return [RestoreResult(path=result.root, file="tasks", undo=RestoreOutcome.REFUSED, detail=str(exc))]
        return undo_pod(files, result.root, only, lambda: pod_threads(hierarchy, only))
    return undo_rows(ledger, CODEC, lambda recorded: undo_all(files, result, recorded, mounter or RealMounter(root)))
