"""Reads control files, and caches the last values that bound what may be written."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Final, final

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import CgroupDeniedError, CgroupError, CgroupGoneError, cgroup_error
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, SETS, Knob
from cgroupfs.probe import cpus_in_effect, offered
from cgroupfs.steps import ancestors, groups_below
from reconciler.actuators.cgroup.compare import FileWrite, KnobFile
from reconciler.runtime.cooperative import TimeSlice
from state.cpu import QuotaFloor
from state.entry import LedgerEntry
from state.ledger import Ledger

SUBTREE_CONTROL: Final = "cgroup.subtree_control"
BOUNDS: Final = ("cpu.set", "cpu.quota", "cpu.period")
"""The knobs of a directory that limit the values of the groups below it."""
MEMORY_PAIR: Final = ("memory.max", "memory.swap")
"""On v1 neither file accepts a value that would put memory+swap below memory."""
_TOGETHER: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu.quota": ("cpu.quota", "cpu.period"),
    "cpu.period": ("cpu.quota", "cpu.period"),
    "cpu.set": ("cpu.set",),
    "cpu.mems": ("cpu.mems",),
}
"""Knobs whose value in one group is bounded by the groups above and below it, with those that bound it."""
_GROUPS_AT_ONCE: Final = 512
"""Groups below another one that are read in one pass; tenants decide how many there are."""
MOST_GROUPS: Final = 65_536
"""Groups below another one that are read at all."""
_UNMANAGED_S: Final = 60.0
"""How long the value of a group that bypassd does not manage is kept."""
# There is one, cpu.idle.
_RESETTING: Final = tuple(knob for knob in CATALOG.values() if knob.resets is not None)


def knob_file(hierarchy: Hierarchy, path: str, knob: Knob) -> KnobFile | None:
    """A knob's file in a group; None if the node has no such controller, or its version no such knob."""
    version = hierarchy.version(knob.controller)
    name = knob.file(version) if version else None
    if version is None or name is None:
        return None
    return KnobFile(knob, version, hierarchy.directory(knob.controller, path), (knob.controller, path, name))


class Relatives(Enum):
    """The result of reading again the groups that bound a refused value."""

    SAME = "same"
    """All have the values that the plan assumed: the refusal counts."""
    CHANGED = "changed"
    """The plan was made for other values."""
    UNFINISHED = "unfinished"
    """There are more groups below than are read in one pass; the next one continues."""


class _Nothing(Enum):
    """No value: the file does not exist, or cannot be decoded."""

    NOTHING = 0


_NOTHING: Final = _Nothing.NOTHING


class _Reading:
    """The groups below one, which are read over several passes."""

    def __init__(self, groups: Iterator[str]) -> None:
        self.groups = groups
        self.found: set[str] = set()
        self.changed = False


@final
class ControlFileCache:
    """Reads the control files of the node and keeps the last value of each."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps) -> None:
        self.hierarchy = hierarchy
        self.versions: Mapping[str, int] = hierarchy.versions()
        self.actual: dict[tuple[str, str], Value] = {}
        """By group path and knob; a knob whose text cannot be decoded is missing."""
        self.floors: dict[str, QuotaFloor] = {}
        """By path, where a group inside forbids the wanted quota."""
        self._unmanaged: dict[tuple[str, str], Value] = {}
        """The same as ``actual`` of groups that bypassd does not manage, as far as they bound a written value."""
        self._unmanaged_at: dict[str, float] = {}
        """When each of these groups was last read (monotonic seconds)."""
        self._readings: dict[tuple[str, str], _Reading] = {}
        self.unplugged: dict[int, float] = {}
        """When each CPU was last seen to go offline (wall clock): on v1 it leaves every cpuset for good."""
        self.covered: tuple[str, ...] = ()
        """Files and directories that are not the kernel's now: something is mounted over them."""
        self.files = files
        # Looked up for every file in each pass.
        self._forms = {
            knob.name: (knob, mount.version, mount, name)
            for knob in CATALOG.values()
            if (mount := hierarchy.controllers.get(knob.controller)) is not None
            and (name := knob.file(mount.version)) is not None
        }

    # Current text

    def find(self, path: str, name: str) -> KnobFile | None:
        """`knob_file` by the knob's name; None as well for one that only another build has."""
        form = self._forms.get(name)
        if form is None:
            return None
        knob, version, mount, file_name = form
        return KnobFile(knob, version, mount.path(path), (knob.controller, path, file_name))

    def text(self, file: KnobFile) -> str:
        """The file's text. Errors: `CgroupGoneError` if it does not exist (any more), else `CgroupError`."""
        return self._read(file.directory, file.key[2])

    def text_in(self, controller: str, path: str, file: str) -> str:
        """The same by names, for files that belong to no knob."""
        return self._read(self.hierarchy.directory(controller, path), file)

    def text_above(self, file: KnobFile) -> str | None:
        """The text of the same file in the parent group; None if that group no longer exists."""
        controller, path, name = file.key
        try:
            return self.text_in(controller, path.rpartition("/")[0] or "/", name)
        except CgroupGoneError:
            return None

    def is_unknown_here(self, file: KnobFile) -> bool:
        """True if the group exists and this kernel provides no such file in it."""
        try:
            names = self.files.files(file.directory)
        except OSError:
            return False
        # Every group has files: an empty list proves nothing.
        return bool(names) and file.key[2] not in names

    def taken_out(self, file: KnobFile) -> str | None:
        """On v2 the directory above this group that does not pass its controller on, as text; None: none is known."""
        controller, path, name = file.key
        if file.version != 2:
            return None
        parts = path.strip("/").split("/")
        for depth in range(len(parts)):
            above = f"/{'/'.join(parts[:depth])}" if depth else "/"
            try:
                passed = self.text_in(controller, above, SUBTREE_CONTROL).split()
            except CgroupError:
                return None
            if controller not in passed:
                return f"{controller} is not in {SUBTREE_CONTROL} of {above}, so this group has no {name}"
        return None

    def offered(self, path: str) -> frozenset[str]:
        """The knobs that this kernel offers, derived from a group's files; empty if the group does not exist."""
        return offered(self.hierarchy, path, self.files)

    def cpus_in_effect(self, path: str) -> CpuSet:
        """The CPUs that the kernel gives a group; empty: not known."""
        return cpus_in_effect(self.hierarchy, path, self.files)

    def memory_use(self, work: FileWrite) -> int | None:
        """Memory usage of a v2 group in bytes: a limit below it would kill. None if it cannot be read."""
        try:
            return int(self.files.read(work.directory, "memory.current"))
        except (OSError, ValueError):
            return None

    # Last values

    def load(self, path: str, knobs: tuple[str, ...] = BOUNDS) -> None:
        """Read values that bound what may be written, without managing the files."""
        for name in knobs:
            file = self.find(path, name)
            if file is None:
                continue
            if knobs is BOUNDS and name == "cpu.period" and self._is_unlimited(path):
                continue
            try:
                self.store(file, self.files.read(file.directory, file.key[2]).rstrip("\n"))
            except OSError:
                self.actual.pop((path, name), None)

    def _is_unlimited(self, path: str) -> bool:
        """Whether a group has no quota, so that its known period bounds nothing."""
        # None is a known "no limit"; what is not known has no key.
        return self.actual.get((path, "cpu.quota"), 0) is None and (path, "cpu.period") in self.actual

    def store(self, file: KnobFile, text: str) -> None:
        place = file.key[1], file.knob.name
        try:
            self.actual[place] = file.knob.decode(text, file.version)
        except ValueError:
            self.actual.pop(place, None)

    def invalidate_ancestors(self, path: str) -> None:
        """A write was refused because of the ancestors' cached values: drop these, so they are read again."""
        while (path := path.rpartition("/")[0]) and path != "/":
            for knob in CATALOG:
                self.actual.pop((path, knob), None)

    async def overtaken(self, path: str, name: str) -> Relatives:
        """Read again what bounds this knob of a group, above, in and below it; whether any differs from the cache.

        Groups that are new count as different. Of the groups below a bounded number is read in one call; the next call
        continues. Values of groups that no longer exist are dropped.
        """
        together = _TOGETHER.get(name, ())
        if not together:
            return Relatives.SAME
        changed = False
        for group in (path, *(above for above in ancestors(path) if above != "/")):
            changed |= self.read_again(group, name)
        key = path, name
        reading = self._readings.pop(key, None) or _Reading(self._below(CATALOG[name].controller, path))
        reading.changed |= changed
        slices = TimeSlice()
        for number, group in enumerate(reading.groups, start=1):
            reading.found.add(group)
            reading.changed |= self.read_again(group, name)
            if number >= _GROUPS_AT_ONCE:
                self._readings[key] = reading
                return Relatives.UNFINISHED
            await slices.checkpoint()
        if len(reading.found) < MOST_GROUPS:
            # All were listed, so a group that was not found does not exist any more.
            reading.changed |= self._drop_below(path, together, reading.found)
        return Relatives.CHANGED if reading.changed else Relatives.SAME

    def read_again(self, path: str, name: str) -> bool:
        """Read what bounds one knob in one group; whether it differs from the last values."""
        changed = False
        for knob in _TOGETHER.get(name, (name,)):
            place = path, knob
            values = self.actual if place in self.actual else self._unmanaged
            before, now = values.get(place), self._value(path, knob)
            if now is _NOTHING:
                changed |= values.pop(place, _NOTHING) is not _NOTHING
                continue
            changed |= place not in values or before != now
            values[place] = now
            if values is self._unmanaged:
                self._unmanaged_at[path] = time.monotonic()
        return changed

    def known(self, paths: Collection[str] | None = None) -> Mapping[tuple[str, str], Value]:
        """The last values of all groups, or (``paths``) of groups that are not managed below one of these."""
        if not self._unmanaged:
            return self.actual if paths is None else {}
        if paths is None:
            return {**self._unmanaged, **self.actual}
        return {
            (path, knob): value
            for (path, knob), value in self._unmanaged.items()
            if any(above in paths for above in ancestors(path))
        }

    def forget_unmanaged(self, path: str) -> None:
        """Drop the values of groups below this one that bypassd does not manage: they are read again where needed."""
        below = f"{path}/"
        for group in [group for group in self._unmanaged_at if group.startswith(below)]:
            self.forget_unmanaged_group(group)

    def expire(self) -> None:
        """Drop values of groups that bypassd does not manage and has not read for a while."""
        now = time.monotonic()
        for group in [group for group, at in self._unmanaged_at.items() if now - at > _UNMANAGED_S]:
            self.forget_unmanaged_group(group)

    def forget(self, path: str) -> None:
        """Drop all values of this group, and of groups below it that are not managed."""
        for knob in CATALOG:
            self.actual.pop((path, knob), None)
            self._readings.pop((path, knob), None)
        self.floors.pop(path, None)
        self.forget_unmanaged(path)
        self.forget_unmanaged_group(path)

    def forget_unmanaged_group(self, path: str) -> None:
        if self._unmanaged_at.pop(path, None) is not None:
            for knob in CATALOG:
                self._unmanaged.pop((path, knob), None)

    def _drop_below(self, path: str, knobs: Collection[str], found: Collection[str]) -> bool:
        """Drop these knobs' values of groups below that do not exist any more; whether there were any."""
        below, dropped = f"{path}/", False
        for values in (self.actual, self._unmanaged):
            gone = [place for place in values if place[1] in knobs and place[0].startswith(below)]
            for place in gone:
                if place[0] not in found:
                    del values[place]
                    dropped = True
        return dropped

    def _below(self, controller: str, path: str) -> Iterator[str]:
        """All groups below one, as they are found; the number is bounded."""

        def names(group: str, most: int) -> list[str]:
            return self.files.groups(self.hierarchy.directory(controller, group), most)

        return groups_below(names, path, MOST_GROUPS)

    def _value(self, path: str, knob: str) -> "Value | _Nothing":
        file = self.find(path, knob)
        if file is None:
            return _NOTHING
        try:
            return file.knob.decode(self.files.read(file.directory, file.key[2]).rstrip("\n"), file.version)
        except (OSError, ValueError):
            return _NOTHING

    def last_seen(self, entry: LedgerEntry | None, file: KnobFile, actual: str) -> str | None:
        """The text at the last read, without CPUs that the kernel has removed since. None if never read.

        Both texts in normal form.
        """
        if entry is None or entry.seen is None:
            return None
        last = file.knob.normal(entry.seen, file.version)
        if last != actual and file.knob.name == "cpu.set" and file.version == 1:
            # The kernel's removal of an offline CPU is not a foreign write.
            lost = CpuSet(cpu for cpu, at in self.unplugged.items() if at >= entry.written_at)
            if lost and CpuSet.parse(last) - lost <= CpuSet.parse(actual) < CpuSet.parse(last):
                return actual
        return last

    def _read(self, directory: str, file: str) -> str:
        if self.covered:
            self._check_uncovered(f"{directory}/{file}")
        try:
            return self.files.read(directory, file).rstrip("\n")
        except OSError as exc:
            raise cgroup_error(f"{directory}/{file}", exc, "read") from exc

    def _check_uncovered(self, path: str) -> None:
        """Errors: `CgroupDeniedError` if something is mounted over the kernel's file: its value is unknown."""
        if (place := covering(self.covered, path)) is not None:
            raise CgroupDeniedError(path, f"something else is mounted over it: umount {place}")

    def is_hidden(self, path: str) -> bool:
        """Whether a mount hides the directory that identifies a group: whether the group exists is not known then."""
        identity = self.hierarchy.identity_directory(path)
        return covering(self.covered, identity) is not None or self.hierarchy.is_hidden(path)

    def covering_group(self, path: str) -> str | None:
        """What is mounted over a group's directory in any hierarchy; None: nothing, as of the last full pass."""
        places = self.covered and (covering(self.covered, mount.path(path)) for mount in self.hierarchy.mounts())
        return next((place for place in places if place is not None), None)


def covering(covered: Collection[str], path: str) -> str | None:
    """Which of these places a file or directory is at, or below; None: none."""
    return next((place for place in covered if f"{path}/".startswith(f"{place}/")), None)


def masked(hierarchy: Hierarchy, ledger: Ledger, files: FileOps, path: str, wanted: Collection[str]) -> dict[str, str]:
    """Masked knobs of this group -> the knob that masks each; only masks that are managed or ``wanted``.

    Source: kernel/sched/fair.c, sched_group_set_idle; tried on 5.15 to 6.18.
    """
    texts: dict[str, str] = {}
    for knob in _RESETTING:
        file = knob_file(hierarchy, path, knob)
        if file is None or knob.resets is None or (knob.name not in wanted and ledger.get(file.key) is None):
            continue
        text = _read(files, file)
        # A group in the idle class shows the class's weight and refuses any other (EINVAL). When it leaves the class
        # the kernel writes its default weight, so the wanted one is written right after that.
        if text is not None and knob.decode(text, file.version) != 0:
            texts[knob.resets] = knob.name
    return texts


def reset_by(hierarchy: Hierarchy, files: FileOps, path: str, knob: Knob) -> tuple[KnobFile, str] | None:
    """The file of this group that ``knob`` resets, and its text; None if there is none."""
    file = knob_file(hierarchy, path, CATALOG[knob.resets]) if knob.resets is not None else None
    text = _read(files, file) if file is not None else None
    return None if file is None or text is None else (file, text)


def _read(files: FileOps, file: KnobFile) -> str | None:
    try:
        return files.read(file.directory, file.key[2]).rstrip("\n")
    except OSError:
        return None


def restore_text(
    place: tuple[Knob, int], entry: LedgerEntry, ledger: Ledger, original: str | None, read: Callable[[str, str], str]
) -> str | None:
    """The text that restores a file; None if the original is unknown. ``original``: the value to restore.

    ``read`` reads a file (second) of a group (first). Errors: those of ``read``.
    """
    knob, version = place
    if original is None or original.strip() or version != 2 or knob.name not in SETS:
        return original
    # A v2 set that was empty ("as the parent") cannot be emptied again with processes inside: ENOSPC, measured on 5.10
    # to 6.18. The parent's effective set is equivalent until the parent changes.
    group = _parent(entry.path)
    # A managed ancestor's set is ours, and is about to be restored as well.
    while group != "/" and ledger.get((entry.controller, group, entry.file)) is not None:
        group = _parent(group)
    return read(group, f"{entry.file}.effective").strip()


def _parent(group: str) -> str:
    return group.rpartition("/")[0] or "/"
