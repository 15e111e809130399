"""Groups that a tenant made inside its managed group: their CPU sets (and memory nodes) follow the managed group's.

docker, kind, systemd or buildkit in a container make such groups. On cgroup v1 a container cannot leave a CPU that a
group inside has (EBUSY), and a group inside does not grow with the container. So they are narrowed before it and
widened after it, in one plan (`cgroupfs.order_sets`). Each has a row of its own in the ledger, with its own set.

Source: kernel/cgroup/cpuset.c, validate_change; runc, cpuset_copy_if_needed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, final

import trio
from msgspec.structs import replace

from cgroupfs.codecs import Version
from cgroupfs.cpuset import CpuSet
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, SETS, Knob
from cgroupfs.naming import GroupKind, parse
from cgroupfs.order_sets import order_sets
from cgroupfs.steps import ancestors, groups_below
from reconciler.actuators.cgroup.compare import FileAction, FileWrite, GroupTarget, KnobFile
from reconciler.actuators.cgroup.control_files import MOST_GROUPS, ControlFileCache
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.stints import in_worker
from state.entry import US, LedgerEntry, same_group
from state.ledger import Ledger
from state.model import GroupRef, Setting

READ_AT_ONCE: Final = 512
"""Groups that are read in one pass; the next one continues. Tenants decide how many groups there are."""
WRITTEN_AT_ONCE: Final = 128
"""Groups that are written in one pass, at most; fewer where that would take longer than `_WRITING_S`."""
_LEAST_WRITTEN: Final = 8
"""So many are written however long that takes, so that each change ends."""
_WRITING_S: Final = 0.015
"""CPU time of one pass for the groups inside. A write of a v1 set costs as much as the machine has sets: 0.4 ms with
3,000."""
_FIRST_WRITE_S: Final = 0.0005
"""CPU time of one write, before any was measured."""
_MOST_COPIES: Final = 64
"""Values of ours that are remembered during a change, beyond which the earlier ones are forgotten."""
_RETRY_MAX_S: Final = 60.0
_FEW: Final = 256
"""Up to so many groups a plan is made in the loop: it takes less than 2 ms."""
_VERIFY_S: Final = 2.0
"""After a change the groups are read once more: a runtime inside may have copied the value from before."""


class InnerSet(NamedTuple):
    """One group inside. ``own``: its own set by its row in the ledger; None: no row. Sets are masks."""

    path: str
    now: int
    own: int | None = None


class InnerChange(NamedTuple):
    """What one group inside needs. ``kept``: its own set must be remembered though it is in force."""

    path: str
    now: int
    wanted: int
    own: int
    kept: bool
    recorded: bool

    @property
    def is_write(self) -> bool:
        """False where the group has the wanted set."""
        return self.wanted != self.now


class ManagedSet(NamedTuple):
    """The managed group: what it has, will have, and would have without bypassd.

    ``copies``: values of ours that a group inside may have copied.
    """

    path: str
    now: int
    wanted: int
    own: int
    copies: frozenset[int] = frozenset()


class _Place(NamedTuple):
    copies: frozenset[int]
    wanted: int
    own: int


def plan_inner(managed: ManagedSet, groups: Iterable[InnerSet]) -> list[InnerChange]:
    """The changes of the groups inside, parents first; those that need nothing and have no row are left out.

    ``groups`` have parents before their children. Pure.
    """
    places = {managed.path: _Place(managed.copies, managed.wanted, managed.own)}
    changes: list[InnerChange] = []
    for group in groups:
        above = next((places[path] for path in ancestors(group.path) if path in places), None)
        if above is None or not (group.now or group.own):
            continue  # an unset group has no processes, and no set group inside; one with a row has lost its last CPU
        own = group.own
        if own is None:
            # A group made as a copy of the narrowed set (docker copies its parent's) has its parent's own set.
            own = above.own if group.now in above.copies else group.now
        # All of its parent's where none of its own is left: a v1 set with processes cannot be emptied (ENOSPC).
        wanted = own & above.wanted or above.wanted
        copies = above.copies | {group.now} if own != group.now else above.copies
        places[group.path] = _Place(copies, wanted, own)
        # Equal to its parent's narrowed set without being a copy of it.
        kept = wanted == own == above.wanted and own != above.own
        recorded = group.own is not None
        if wanted != group.now or recorded or kept:
            changes.append(InnerChange(group.path, group.now, wanted, own, kept, recorded))
    return changes


def _plan(
    managed: ManagedSet, groups: Iterable[InnerSet], version: Version
) -> tuple[list[InnerChange], list[tuple[str, int]]]:
    """The changes, and the writes (path, mask) of these and of the managed group in the kernel's order."""
    changes = plan_inner(managed, groups)
    want = {change.path: change.wanted for change in changes if change.is_write}
    have = {change.path: change.now for change in changes if change.is_write} | {managed.path: managed.now}
    if managed.now != managed.wanted:
        want[managed.path] = managed.wanted
    moves, _ = order_sets(want, have, version)
    return changes, [(move.path, move.mask) for move in moves]


class Inside:
    """The groups inside one managed group, read over several passes, and the moves that follow from them."""

    def __init__(self, work: FileWrite, groups: Iterator[InnerSet], lane: trio.CapacityLimiter) -> None:
        self.work = work
        self._lane = lane
        self.copies = frozenset[int]()
        self.verify_at: float | None = None
        """When they are read anew (monotonic seconds); None: now."""
        self.found: dict[str, InnerSet] = {}
        self.complete = False
        self.refused = ""
        """Why a group inside could not be written in this pass."""
        self.failed = False
        self.failures = 0
        """Passes in a row in which the kernel refused one of the sets."""
        self._groups = groups
        self.changes: dict[str, InnerChange] = {}
        """By path, of the plan; as far as it has been carried out."""
        self._moves: list[tuple[str, int]] = []
        self._planned: ManagedSet | None = None

    async def read(self, most: int) -> int:
        """Read up to ``most`` further groups; returns how many there were."""
        slices = TimeSlice()
        number = 0
        for number, group in enumerate(self._groups, start=1):
            self.found[group.path] = group
            if number >= most:
                return number
            await slices.checkpoint()
        self.complete = True
        return number

    def again(self, groups: Iterator[InnerSet], *, verify_at: float | None = None) -> None:
        """Read them again, at ``verify_at`` or now."""
        self.found, self.complete, self._groups, self.verify_at = {}, False, groups, verify_at
        self._planned = None

    async def plan(self, managed: ManagedSet, version: Version) -> bool:
        """Plan the moves; False: a plan is being carried out, and its premises hold."""
        # The copies grow while the plan is carried out.
        if self._planned is not None and self._planned._replace(copies=managed.copies) == managed:
            return False
        found = list(self.found.values())
        if len(found) <= _FEW:
            changes, moves = _plan(managed, found, version)
        else:
            # Pure, and 25 ms for 3,000 groups.
            changes, moves = await in_worker(_plan, managed, found, version, limiter=self._lane)
        # From the end: the next ones are taken off it.
        self._moves = moves[::-1]
        self.changes = {change.path: change for change in changes}
        self._planned = managed
        return True

    @property
    def left(self) -> int:
        return len(self._moves)

    def groups_left(self, managed: str) -> int:
        """How many groups inside have moves left: one may have two."""
        return len({path for path, _ in self._moves} - {managed})

    def take(self, most: int) -> dict[str, int]:
        """The next part of the moves, in the kernel's order: each group's set after it."""
        taken: dict[str, int] = {}
        while self._moves and len(taken) < most:
            path, mask = self._moves.pop()
            taken[path] = mask
        return taken

    def assume(self, taken: Mapping[str, int], managed: str) -> None:
        """Count these moves as made; after one that is refused all groups are read again."""
        for path, mask in taken.items():
            if path == managed:
                if self._planned is not None:
                    self._planned = self._planned._replace(now=mask)
                continue
            change = self.changes[path]
            recorded = mask != change.own or change.kept
            self.found[path] = InnerSet(path, mask, change.own if recorded else None)
            if mask == change.wanted and not recorded:
                del self.changes[path]
            else:
                self.changes[path] = change._replace(now=mask, recorded=recorded)


class Expansion(NamedTuple):
    """One pass: its writes, groups inside included; rows without a write; and the writes that wait, with the reason."""

    work: list[FileWrite]
    kept: list[FileWrite]
    waiting: list[tuple[FileWrite, str]]


@final
class InnerGroups:
    """Adds the groups inside to the writes of a pass."""

    def __init__(self, hierarchy: Hierarchy, ledger: Ledger, control_files: ControlFileCache) -> None:
        self._hierarchy = hierarchy
        self._ledger = ledger
        self._control_files = control_files
        self._files = control_files.files
        self._inside: dict[tuple[str, str], Inside] = {}
        """By path and knob of the managed group, while a change is not finished."""
        self._refusing: set[tuple[str, str]] = set()
        """On v2: groups whose set the kernel refused for those inside."""
        self._resumed = False
        self._lane = trio.CapacityLimiter(1)
        self._write_s = _FIRST_WRITE_S
        """CPU time of one write, as measured."""

    def refused(self, place: tuple[str, str], why: str = "") -> None:
        """The kernel refused a set for a group inside, or (``why``) that group's own: read them again."""
        self._refusing.add(place)
        if (inside := self._inside.get(place)) is not None:
            inside.again(self._walk(inside.work))
            inside.refused = inside.refused or why
            inside.failed = True

    def why_refused(self, place: tuple[str, str]) -> str | None:
        """The kernel's refusal of a group inside in this pass; None: it refused none."""
        inside = self._inside.get(place)
        return inside.refused or None if inside is not None else None

    def resume(self) -> None:
        """Read all groups with a row again: the kernel has changed sets by itself."""
        self._resumed = False

    def forget(self, path: str) -> None:
        for knob in SETS:
            self._inside.pop((path, knob), None)
            self._refusing.discard((path, knob))

    def due(self) -> list[tuple[FileWrite, float]]:
        """The unfinished changes, and when each continues (monotonic seconds): the later the more often it failed."""
        now = time.monotonic()
        times: list[tuple[FileWrite, float]] = []
        for inside in self._inside.values():
            delay = 0.0
            # At once after the first failure: the groups are read again, and one may have been made meanwhile.
            if inside.failures > 1:
                delay = min(_VERIFY_S * 2 ** min(inside.failures - 2, 10), _RETRY_MAX_S)
            times.append((inside.work, now + delay if delay else inside.verify_at or now))
        return times

    def finish_pass(self, writes: int, cpu_s: float) -> None:
        """The pass is over: count the failures. ``writes``: of groups inside, which took ``cpu_s`` of CPU time."""
        if writes:
            self._write_s = (self._write_s + cpu_s / writes) / 2
        for inside in self._inside.values():
            inside.failures = inside.failures + 1 if inside.failed else 0
            inside.failed = False

    async def expand(
        self, work: Sequence[FileWrite], may_write: Callable[[FileWrite], bool], *, unfinished: bool = True
    ) -> Expansion:
        """The writes of this pass with those of the groups inside. ``unfinished``: earlier changes are continued."""
        self._resume()
        result = Expansion([], [], [])
        left = READ_AT_ONCE
        writes = max(_LEAST_WRITTEN, min(WRITTEN_AT_ONCE, int(_WRITING_S / self._write_s)))
        concerned: dict[tuple[str, str], FileWrite] = {}
        slices = TimeSlice()
        for write in work:
            if self._is_concerned(write):
                concerned[write.place] = write
            else:
                result.work.append(write)
            await slices.checkpoint()
        for place in list(self._inside) if unfinished else ():
            if place not in concerned:
                still = self._in_place(self._inside[place].work) if may_write(self._inside[place].work) else None
                if still is None:
                    del self._inside[place]
                elif (self._inside[place].verify_at or 0.0) <= time.monotonic():
                    concerned[place] = still
        # A container that has had a part is the last of the next pass.
        turns = [place for place in self._inside if place in concerned]
        for place in [*turns, *(place for place in concerned if place not in self._inside)]:
            write, inside = concerned[place], self._inside.get(place)
            if inside is None:
                inside = self._inside[place] = Inside(write, self._walk(write), self._lane)
            elif inside.verify_at is not None:
                inside.again(self._walk(write))
            inside.work, inside.refused = write, ""
            if not inside.complete and left > 0:
                left -= await inside.read(left)
            if inside.complete:
                writes -= await self._add(write, inside, result, writes)
            elif write.actual != write.text:
                managed = self._managed(write, inside)
                if not managed.now & ~managed.wanted:
                    # It only grows: no group inside is in the way.
                    inside.copies |= managed.copies
                    result.work.append(write)
                    continue
                result.waiting.append((write, f"reading the groups inside: {len(inside.found)} so far"))
        return result

    async def _add(self, write: FileWrite, inside: Inside, result: Expansion, most: int) -> int:
        """The next part of one managed group's change; the number of its writes. Its groups inside are all known."""
        managed = self._managed(write, inside)
        more = await inside.plan(managed, write.version) and await self._keep_rows(write, inside, result)
        whole = write.actual != write.text
        # No move is left but the managed group's own.
        if inside.left <= (1 if whole else 0):
            if whole:
                result.work.append(write)
            if not inside.found or (not whole and not more and inside.verify_at is None):
                del self._inside[write.place]
            else:
                inside.again(self._walk(write), verify_at=time.monotonic() + _VERIFY_S)
            return 0
        groups = inside.groups_left(managed.path)
        taken = inside.take(most)
        if taken:
            # To the end of the order of turns in `expand`.
            self._inside[write.place] = self._inside.pop(write.place)
        slices = TimeSlice()
        for path, mask in taken.items():
            if path != managed.path:
                result.work.append(self._write_of(write, inside.changes[path], mask))
                await slices.checkpoint()
        inside.copies = (inside.copies if len(inside.copies) < _MOST_COPIES else frozenset()) | managed.copies
        mask_now = taken.get(managed.path)
        if mask_now is not None:
            result.work.append(write if mask_now == managed.wanted else self._towards(write, mask_now))
        if whole and mask_now != managed.wanted:
            result.waiting.append((write, f"{groups} groups inside are changed first"))
        inside.assume(taken, managed.path)
        if not inside.left:
            inside.again(self._walk(write), verify_at=time.monotonic() + _VERIFY_S)
        return len(taken)

    async def _keep_rows(self, write: FileWrite, inside: Inside, result: Expansion) -> bool:
        """Groups that need a row but no write, and rows that are no longer needed; whether a part of them is left."""
        slices = TimeSlice()
        kept = 0
        for change in inside.changes.values():
            if not change.is_write and change.kept and not change.recorded:
                kept += 1
                if kept <= WRITTEN_AT_ONCE:
                    result.kept.append(self._write_of(write, change, change.wanted))
            elif not change.is_write and change.recorded and not change.kept and change.wanted == change.own:
                self._ledger.restored(self._key(write, change.path), str(CpuSet.from_mask(change.now)))
            await slices.checkpoint()
        return kept > WRITTEN_AT_ONCE

    def _managed(self, write: FileWrite, inside: Inside) -> ManagedSet:
        now, wanted = _mask(write.knob, write.version, write.actual), _mask(write.knob, write.version, write.text)
        entry = self._ledger.get(write.key)
        own = now
        if write.action is FileAction.RELEASE:
            own = wanted
        elif entry is not None and write.action is not FileAction.FIRST and entry.restore_text is not None:
            own = _mask(write.knob, write.version, entry.restore_text)
        return ManagedSet(write.key[1], now, wanted, own, inside.copies | ({now} if own != now else frozenset()))

    def _write_of(self, write: FileWrite, change: InnerChange, mask: int) -> FileWrite:
        """The write of one group inside; its row's original is its own set."""
        file = KnobFile(
            write.knob,
            write.version,
            self._hierarchy.directory(write.key[0], change.path),
            self._key(write, change.path),
        )
        setting = write.setting
        target = GroupTarget(
            group=GroupRef(path=change.path, inode=self._inode(change.path)), pod_uid=write.target.pod_uid
        )
        value = CpuSet.from_mask(mask)
        back = mask == change.own and not change.kept
        action = FileAction.RELEASE if back else FileAction.CHANGE if change.recorded else FileAction.FIRST
        made = Setting(
            path=change.path,
            knob=write.knob.name,
            value=value,
            policy=setting.policy if setting is not None else "",
            reason=f"inside {write.key[1]}",
            pod_uid=write.target.pod_uid,
        )
        own, now = (str(CpuSet.from_mask(number)) for number in (change.own, change.now))
        return FileWrite(target, *file, made, own, now, str(value), action, within=write.key[1])

    def _towards(self, write: FileWrite, mask: int) -> FileWrite:
        """A first write of the managed group, which keeps the CPUs that groups inside have not left yet."""
        value = CpuSet.from_mask(mask)
        setting = write.setting
        made = (
            Setting(path=write.key[1], knob=write.knob.name, value=value, policy="", reason="no longer wanted")
            if setting is None
            else replace(setting, value=value)
        )
        action = FileAction.CHANGE if write.action is FileAction.RELEASE else write.action
        return write._replace(setting=made, text=str(value), action=action, part=True)

    def _is_concerned(self, write: FileWrite) -> bool:
        if write.knob.name not in SETS or write.target.creating or write.target.pod_uid is None or write.within:
            return False
        # v2 takes any set, but for kernels up to 6.0, which refuse one for the groups below (EBUSY).
        if write.version != 1 and write.place not in self._refusing:
            return False
        if write.place in self._inside:
            return True  # an unfinished change continues
        with suppress(OSError):
            # The containers of a pod are not its groups inside; a container has any number of them.
            names = self._files.groups(write.directory, READ_AT_ONCE)
            return any(parse(f"{write.key[1]}/{name}") is None for name in names)
        return False

    def _in_place(self, write: FileWrite) -> FileWrite | None:
        """The same write with the value that the managed group has now: of the group itself nothing changes."""
        try:
            actual = write.knob.normal(self._files.read(write.directory, write.key[2]).rstrip("\n"), write.version)
        except (OSError, ValueError):
            return None
        entry = self._ledger.get(write.key)
        action = FileAction.CHANGE if entry is not None and entry.writer == US else FileAction.FIRST
        return write._replace(raw=actual, actual=actual, text=actual, action=action, part=False)

    def _walk(self, write: FileWrite) -> Iterator[InnerSet]:
        """The groups inside, with their own sets by the ledger."""
        for group in walk(self._hierarchy, self._files, write.key, write.knob, write.version):
            key = self._key(write, group.path)
            entry = self._ledger.get(key)
            if entry is None or not same_group(entry.inode, self._inode(group.path)):
                yield group
                continue
            text = str(CpuSet.from_mask(group.now))
            # A value that the tenant has written since is its own set from then on.
            if not is_recorded(entry, self._ledger, text) and not self._is_kernels(write, entry, key, text):
                self._ledger.restored(key, text)
                yield group
                continue
            own = entry.restore_text
            yield group if own is None else group._replace(own=_mask(write.knob, write.version, own))

    def _is_kernels(self, write: FileWrite, entry: LedgerEntry, key: tuple[str, str, str], text: str) -> bool:
        """Whether a set is the last one without the CPUs that have gone offline since (v1)."""
        file = KnobFile(write.knob, write.version, self._hierarchy.directory(key[0], key[1]), key)
        return self._control_files.last_seen(entry, file, text) == text

    def _key(self, write: FileWrite, path: str) -> tuple[str, str, str]:
        return write.key[0], path, write.key[2]

    def _inode(self, path: str) -> int:
        with suppress(OSError):
            return self._files.inode(self._hierarchy.trigger_directory(path))
        return 0  # unknown: matches any (`same_group`)

    def _resume(self) -> None:
        """After a start, or a change of the CPUs: groups inside may be narrower than their container allows."""
        if self._resumed:
            return
        self._resumed = True
        for entry in self._ledger.control_files():
            path = managed_above(entry.path) if entry.knob in SETS else None
            if path is None or (path, entry.knob) in self._inside:
                continue
            knob, version = CATALOG[entry.knob], self._hierarchy.version(entry.controller)
            if version is None:
                continue
            directory = self._hierarchy.directory(entry.controller, path)
            target = GroupTarget(group=GroupRef(path=path, inode=self._inode(path)), pod_uid=entry.pod_uid)
            key = entry.controller, path, entry.file
            write = FileWrite(target, knob, version, directory, key, None, "", "", "", FileAction.NOTHING)
            if (now := self._in_place(write)) is not None:
                self._inside[path, entry.knob] = Inside(now, self._walk(now), self._lane)


def managed_above(path: str) -> str | None:
    """The container (else the pod) that a group is inside of; None: it is not inside of one."""
    if parse(path) is not None:
        return None
    for above in ancestors(path):
        name = parse(above)
        if name is not None:
            return above if name.kind in {GroupKind.CONTAINER, GroupKind.POD} else None
    return None


def is_recorded(entry: LedgerEntry, ledger: Ledger, text: str) -> bool:
    """Whether a group inside holds a value of ours, or the one that was recorded (``text`` in normal form)."""
    return text in ledger.ours(entry) or (entry.writer == "" and text == entry.original)


def walk(
    hierarchy: Hierarchy, files: FileOps, key: tuple[str, str, str], knob: Knob, version: Version
) -> Iterator[InnerSet]:
    """The groups below one that are not managed themselves, parents first. Groups that cannot be read are left out."""
    controller, top, file = key

    def names(above: str, most: int) -> list[str]:
        found = files.groups(hierarchy.directory(controller, above), most)
        # A pod's containers are managed themselves.
        return [name for name in found if parse(f"{top}/{name}") is None] if above == top else found

    for path in groups_below(names, top, MOST_GROUPS):
        with suppress(OSError, ValueError):
            text = files.read(hierarchy.directory(controller, path), file).rstrip("\n")
            yield InnerSet(path, _mask(knob, version, text))


def _mask(knob: Knob, version: Version, text: str) -> int:
    value = knob.decode(text, version)
    return value.mask if isinstance(value, CpuSet) else 0
