"""Undoing what was done to resctrl, with or without a daemon: groups by their prefix, the rest by the store.

Threads need no record: removing a group sends them to the default group, where all of them were, as threads that
others had put into groups of theirs are never touched. Only the default group's own values and a mount of ours are in
the store, before the first touch.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from cgroupfs.errors import AgentError, CgroupGoneError, InputError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import QosClass, detect_layout
from reconciler.restore import Undo, Undone
from resctrl.capability import Capability, Status, read_capability
from resctrl.files import REAL as REAL_GROUPS
from resctrl.files import GroupFiles
from resctrl.groups import DEFAULT, PREFIX, Groups
from resctrl.monitor import Monitors
from resctrl.mount import Mounter, RealMounter
from resctrl.schemata import differing, format_schemata
from resctrl.tasks import gather
from state.schema import META
from state.store import Batch, Store

_LOG: Final = logging.getLogger(__name__)
ROW: Final = "resctrl"
"""Row of the store's META table: what of the node's own resctrl we have changed, and what it was before."""
_WRITTEN: Final = 2
_DEEPEST: Final = 4

Values = Mapping[str, Mapping[int, int]]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered, of one boot.

    ``place`` and ``ident``: the mount that we made (0: about to), None where somebody else has. ``original``: the
    default group's values before the first touch; ``written``: the last that we wrote, or were about to.
    """

    boot: str
    place: str | None = None
    ident: int = 0
    original: dict[str, dict[int, int]] | None = None
    written: tuple[dict[str, dict[int, int]], ...] = ()


def read_kept(store: Store) -> Kept:
    """What the store tells of this boot."""
    row = dict(store.rows(META)).get(ROW)
    try:
        kept = msgspec.msgpack.decode(row, type=Kept) if row is not None else None
    except msgspec.MsgspecError as exc:
        _LOG.warning("what is remembered of resctrl cannot be read: %s", exc)
        kept = None
    return kept if kept is not None and kept.boot == store.boot else Kept(boot=store.boot)


def write_kept(store: Store, kept: Kept) -> None:
    """Make it durable, or forget it when there is nothing in it (the store's lane). Errors: `StoreError`."""
    batch = Batch()
    if kept == Kept(boot=kept.boot):
        batch.delete(META, ROW)
    else:
        batch.put(META, ROW, msgspec.msgpack.encode(kept))
    store.apply(batch)


def about_to_write(kept: Kept, there: Values, wanted: Values) -> Kept:
    """What must be durable before the default group is written."""
    new = {name: dict(domains) for name, domains in wanted.items()}
    if kept.original is not None and kept.written and kept.written[-1] == new:
        return kept
    original = {name: dict(domains) for name, domains in there.items()} if kept.original is None else kept.original
    # The one before too: a crash may come before the write.
    return replace(kept, original=original, written=(*kept.written, new)[-_WRITTEN:])


def undo_all(files: GroupFiles, capability: Capability, kept: Kept, mounter: Mounter) -> tuple[list[Undone], Kept]:
    """Everything; with what is still to be remembered because it could not be undone. Errors: none."""
    root = capability.root
    if root is None:
        return [], Kept(boot=kept.boot)
    done = _groups(files, root)
    found = undo_default(files, capability, kept)
    if found is not None:
        done.append(found)
        if found.ok:
            kept = replace(kept, original=None, written=())
    if kept.place is not None:
        found = _mount(files, root, kept, mounter)
        done.append(found)
        if found.ok:
            kept = replace(kept, place=None, ident=0)
    return done, kept


def undo_default(files: GroupFiles, capability: Capability, kept: Kept) -> Undone | None:
    """The default group's own values; None when they were never touched."""
    original, root = kept.original, capability.root
    if original is None or root is None:
        return None
    groups = Groups(root, files)
    try:
        actual = groups.schemata(DEFAULT)
        touched = {name: original[name] for name in original if any(name in one for one in kept.written)}
        text = format_schemata({name: actual.get(name, {}) for name in touched}).rstrip("\n")
        if not differing(touched, actual, capability):
            return Undone(path=root, file="schemata", undo=Undo.ALREADY, text=text)
        ours = [one for one in kept.written if not differing(one, actual, capability)]
        if not ours:
            return Undone(path=root, file="schemata", undo=Undo.FOREIGN, text=text)
        groups.set_schemata(DEFAULT, touched, capability)
        return Undone(path=root, file="schemata", undo=Undo.RESTORED, text=format_schemata(touched).rstrip("\n"))
    except AgentError as exc:
        return Undone(path=root, file="schemata", undo=Undo.REFUSED, detail=str(exc))


def undo_pod(files: GroupFiles, root: str, uid: str, threads: Callable[[], Collection[int]]) -> list[Undone]:
    """One pod's threads go to the default group; a group that had nobody else in it goes too. Errors: none."""
    groups, monitors = Groups(root, files), Monitors(root, files)
    done: list[Undone] = []
    try:
        for name in groups.ours():
            members = groups.members(name)
            if not members & set(threads()):
                continue
            moved = gather(files, root, lambda members=members: set(threads()) & members)  # type: ignore[misc]
            undo = Undo.RESTORED if moved.settled else Undo.REFUSED
            detail = "" if moved.settled else f"{dict(moved.refused) or 'its threads come faster than they are moved'}"
            text = f"{moved.moved} threads"
            done.append(Undone(path=groups.path(name), file="tasks", undo=undo, text=text, detail=detail))
            if moved.settled and not groups.members(name):
                groups.remove(name)
        for name in (DEFAULT, *groups.ours()):
            mine = f"{PREFIX}{uid}"
            if mine in monitors.names(name)[0] and monitors.remove(name, mine):
                done.append(Undone(path=monitors.path(name, mine), file="mon_group", undo=Undo.RESTORED))
    except AgentError as exc:
        done.append(Undone(path=root, file="tasks", undo=Undo.REFUSED, detail=str(exc)))
    return done


def _groups(files: GroupFiles, root: str) -> list[Undone]:
    groups, monitors = Groups(root, files), Monitors(root, files)
    done: list[Undone] = []

    def note(path: str, file: str, remove: Callable[[], bool]) -> None:
        try:
            there = remove()
        except AgentError as exc:
            done.append(Undone(path=path, file=file, undo=Undo.REFUSED, detail=str(exc)))
        else:
            done.append(Undone(path=path, file=file, undo=Undo.RESTORED if there else Undo.GONE))

    for name in monitors.names(DEFAULT)[0]:
        note(monitors.path(DEFAULT, name), "mon_group", lambda name=name: monitors.remove(DEFAULT, name))  # type: ignore[misc]
    try:
        ours = groups.ours()
    except CgroupGoneError:
        return done
    except AgentError as exc:
        return [*done, Undone(path=root, file="group", undo=Undo.REFUSED, detail=str(exc))]
    for name in ours:
        note(groups.path(name), "group", lambda name=name: groups.remove(name))  # type: ignore[misc]
    return done


def _mount(files: GroupFiles, root: str, kept: Kept, mounter: Mounter) -> Undone:
    place = kept.place or root
    ident = mounter.ident(place)
    if ident is None:
        return Undone(path=place, file="mount", undo=Undo.GONE)
    if kept.ident not in {0, ident}:
        return Undone(path=place, file="mount", undo=Undo.FOREIGN, detail="another mount than ours")
    try:
        others = [*Groups(root, files).foreign(), *Monitors(root, files).names(DEFAULT)[1]]
        if others:
            detail = f"unmounting would delete the groups {', '.join(others)}"
            return Undone(path=place, file="mount", undo=Undo.FOREIGN, detail=detail)
        mounter.unmount(place)
    except AgentError as exc:
        return Undone(path=place, file="mount", undo=Undo.REFUSED, detail=str(exc))
    return Undone(path=place, file="mount", undo=Undo.RESTORED)


def threads_of(hierarchy: Hierarchy, path: str, files: FileOps = REAL) -> set[int]:
    """All threads below a group, in the tree that is watched. What cannot be read has none."""
    file = "tasks" if hierarchy.version(hierarchy.trigger) == 1 else "cgroup.threads"
    found: set[int] = set()
    here = [(hierarchy.trigger_directory(path), 0)]
    for directory, depth in here:
        try:
            found.update(map(int, files.read(directory, file).split()))
            if depth < _DEEPEST:
                here += [(f"{directory}/{name}", depth + 1) for name in files.groups(directory)]
        except OSError:
            continue
    return found


def pod_threads(hierarchy: Hierarchy, uid: str, files: FileOps = REAL) -> set[int]:
    """All threads of a pod, found by its name alone."""
    layout = detect_layout(hierarchy, None)
    paths = [layout.pod(qos, uid) for qos in QosClass] if layout is not None else []
    return set().union(*(threads_of(hierarchy, path, files) for path in paths))


def restore_resctrl(
    root: str,
    store: Store,
    only: str | None,
    *,
    files: GroupFiles = REAL_GROUPS,
    capability: Capability | None = None,
    mounter: Mounter | None = None,
) -> list[Undone]:
    """Undo while no daemon runs. Errors: `StoreError` when what is left cannot be remembered."""
    try:
        found = read_capability(root) if capability is None else capability
    except InputError as exc:
        return [Undone(path=root, file="schemata", undo=Undo.REFUSED, detail=str(exc))]
    if found.status is not Status.READY or found.root is None:
        return []
    if only is not None:
        try:
            hierarchy = Hierarchy.detect(root)
        except AgentError as exc:
            return [Undone(path=found.root, file="tasks", undo=Undo.REFUSED, detail=str(exc))]
        return undo_pod(files, found.root, only, lambda: pod_threads(hierarchy, only))
    kept = read_kept(store)
    done, left = undo_all(files, found, kept, mounter or RealMounter(root))
    if left != kept:
        write_kept(store, left)
    return done
