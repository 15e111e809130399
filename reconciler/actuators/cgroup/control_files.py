"""Reads control files, and caches the last values that bound what may be written.

The kernel resets some knobs with another one; while that other one is set, the file shows a substitute value, and
afterwards the default. There is one such pair: a group in the idle class (``cpu.idle``) shows the class's weight and
refuses any other (EINVAL), and on leaving the class the kernel writes its own default weight. So the weight's original
is recorded with the first touch of ``cpu.idle``, its file is not written while the class lasts, and it is written again
directly afterwards. `masked` and `reset_by` handle this; `restore_text` handles CPU sets that cannot be emptied again.

Source: kernel/sched/fair.c, sched_group_set_idle; tried on 5.15 to 6.18.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Final, final

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import CgroupGoneError, cgroup_error
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, Knob
from cgroupfs.probe import cpus_in_effect, offered
from reconciler.actuators.cgroup.compare import FileWrite, KnobFile
from state.entry import LedgerEntry
from state.ledger import Ledger

BOUNDS: Final = ("cpu.set", "cpu.quota", "cpu.period")
"""The knobs of a directory that limit the values of the groups below it."""
_TOGETHER: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu.quota": ("cpu.quota", "cpu.period"),
    "cpu.period": ("cpu.quota", "cpu.period"),
    "cpu.set": ("cpu.set",),
    "cpu.mems": ("cpu.mems",),
}
"""Knobs whose value in one group is bounded by the groups above and below it, with those that bound it."""
_MOST_GROUPS: Final = 4096
_RESETTING: Final = tuple(knob for knob in CATALOG.values() if knob.resets is not None)
_SETS: Final = frozenset({"cpu.set", "cpu.mems"})


def knob_file(hierarchy: Hierarchy, path: str, knob: Knob) -> KnobFile | None:
    """A knob's file in a group; None if the node has no such controller, or its version no such knob."""
    version = hierarchy.version(knob.controller)
    name = knob.file(version) if version else None
    if version is None or name is None:
        return None
    return KnobFile(knob, version, hierarchy.directory(knob.controller, path), (knob.controller, path, name))


@final
class ControlFileCache:
    """Reads the control files of the node and keeps the last value of each."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps) -> None:
        self.hierarchy = hierarchy
        self.versions: Mapping[str, int] = hierarchy.versions()
        self.actual: dict[tuple[str, str], Value] = {}
        """By group path and knob; a knob whose text cannot be decoded is missing."""
        self.unplugged: dict[int, float] = {}
        """When each CPU was last seen to go offline (wall clock): on v1 it leaves every cpuset for good."""
        self._files = files

    # Current text

    def find(self, path: str, name: str) -> KnobFile | None:
        """`knob_file` by the knob's name."""
        return knob_file(self.hierarchy, path, CATALOG[name])

    def text(self, file: KnobFile) -> str:
        """The file's text. Errors: `CgroupGoneError` if it does not exist (any more), else `CgroupError`."""
        return self._read(file.directory, file.key[2])

    def text_in(self, controller: str, path: str, file: str) -> str:
        """The same by names, for files that belong to no knob."""
        return self._read(self.hierarchy.directory(controller, path), file)

    def text_above(self, file: KnobFile) -> str | None:
        """The text of the same file in the parent group; None if that group is gone."""
        controller, path, name = file.key
        try:
            return self.text_in(controller, path.rpartition("/")[0] or "/", name)
        except CgroupGoneError:
            return None

    def is_unknown_here(self, file: KnobFile) -> bool:
        """True if the group exists and this kernel provides no such file in it."""
        try:
            names = self._files.files(file.directory)
        except OSError:
            return False
        return bool(names) and file.key[2] not in names

    def offered(self, path: str) -> frozenset[str]:
        """The knobs that this kernel offers, derived from a group's files; empty if the group does not exist."""
        return offered(self.hierarchy, path, self._files)

    def cpus_in_effect(self, path: str) -> CpuSet:
        """The CPUs that the kernel gives a group; empty: not known."""
        return cpus_in_effect(self.hierarchy, path, self._files)

    def memory_use(self, work: FileWrite) -> int | None:
        """Memory usage of a v2 group in bytes: a limit below it would kill. None if it cannot be read."""
        try:
            return int(self._files.read(work.directory, "memory.current"))
        except (OSError, ValueError):
            return None

    # Last values

    def load(self, path: str, knobs: tuple[str, ...] = BOUNDS) -> None:
        """Read values that bound what may be written, without managing the files."""
        for name in knobs:
            file = self.find(path, name)
            if file is None:
                continue
            try:
                self.store(file, self._files.read(file.directory, file.key[2]).rstrip("\n"))
            except OSError:
                self.actual.pop((path, name), None)

    def store(self, file: KnobFile, text: str) -> None:
        """Record the text of a file."""
        place = file.key[1], file.knob.name
        try:
            self.actual[place] = file.knob.decode(text, file.version)
        except ValueError:
            self.actual.pop(place, None)

    def invalidate_ancestors(self, path: str) -> None:
        """A write was refused because of the ancestors' cached values: drop these, so they are read again."""
        while (path := path.rpartition("/")[0]) and path != "/":
            self.forget(path)

    def overtaken(self, path: str, name: str) -> bool:
        """Read again what bounds this knob of a group, above, in and below it; whether any differs from the cache.

        True: the plan behind a refused write was made for other values. Groups that are new count as different.
        """
        together = _TOGETHER.get(name, ())
        changed = False
        for group in self._relatives(path, name) if together else ():
            before = [self.actual.get((group, knob)) for knob in together]
            self.load(group, together)
            changed |= before != [self.actual.get((group, knob)) for knob in together]
        return changed

    def _relatives(self, path: str, name: str) -> list[str]:
        controller = CATALOG[name].controller
        groups = [path]
        for group in groups:
            if len(groups) >= _MOST_GROUPS:
                break
            with suppress(OSError):
                groups += [
                    f"{group}/{below}" for below in self._files.groups(self.hierarchy.directory(controller, group))
                ]
        while (path := path.rpartition("/")[0]) and path != "/":
            groups.append(path)
        return groups

    def forget(self, path: str) -> None:
        """Drop all values of this group; groups below it are forgotten by their own calls."""
        for knob in CATALOG:
            self.actual.pop((path, knob), None)

    def last_seen(self, entry: LedgerEntry | None, file: KnobFile, actual: str) -> str | None:
        """The text at the last read, adjusted for CPUs that the kernel has removed since: that is not a foreign write.

        None if never read. Both texts in normal form.
        """
        if entry is None or entry.seen is None:
            return None
        last = file.knob.normal(entry.seen, file.version)
        if last != actual and file.knob.name == "cpu.set" and file.version == 1:
            lost = CpuSet(cpu for cpu, at in self.unplugged.items() if at >= entry.written_at)
            if lost and CpuSet.parse(last) - lost <= CpuSet.parse(actual) < CpuSet.parse(last):
                return actual
        return last

    def _read(self, directory: str, file: str) -> str:
        try:
            return self._files.read(directory, file).rstrip("\n")
        except OSError as exc:
            raise cgroup_error(f"{directory}/{file}", exc, "read") from exc


def masked(hierarchy: Hierarchy, ledger: Ledger, files: FileOps, path: str, wanted: Collection[str]) -> dict[str, str]:
    """Masked knobs of this group -> the knob that masks each; only masks that are managed or ``wanted``."""
    texts: dict[str, str] = {}
    for knob in _RESETTING:
        file = knob_file(hierarchy, path, knob)
        if file is None or knob.resets is None or (knob.name not in wanted and ledger.get(file.key) is None):
            continue
        text = _read(files, file)
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

    On v2 a fresh group's set is empty, which means "as the parent"; once it has been set and processes are in the
    group, the kernel answers ENOSPC to every attempt to empty it. The parent's effective set is equivalent until the
    parent changes. An ancestor that is managed too is skipped: it is about to be restored as well. ``read`` reads a
    file (second) of a group (first).

    Source: kernel-measured on 5.10 to 6.18. Errors: those of ``read``.
    """
    knob, version = place
    if original is None or original.strip() or version != 2 or knob.name not in _SETS:
        return original
    group = _parent(entry.path)
    while group != "/" and ledger.get((entry.controller, group, entry.file)) is not None:
        group = _parent(group)
    return read(group, f"{entry.file}.effective").strip()


def _parent(group: str) -> str:
    return group.rpartition("/")[0] or "/"
