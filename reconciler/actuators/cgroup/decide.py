"""Compares one group's files and returns the writes that are due, and records the status of every wanted setting.

Reads, compares, and checks what forbids a write: a hold, observe mode, another writer, a wait after a refusal. It
writes nothing and never waits.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, final

from msgspec.structs import replace

from cgroupfs.codecs import DEFAULT_PERIOD_US, Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import CgroupError, CgroupGoneError
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.lines import lines_of
from cgroupfs.partitions import partition_ended_by
from reconciler.actuators.cgroup.compare import (
    ALWAYS_RESTORED,
    FileAction,
    FileState,
    FileWrite,
    GroupTarget,
    KnobFile,
    compare,
    expected_after_runtime,
    spec_text,
    value_without_agent,
)
from reconciler.actuators.cgroup.conflict import ForeignWriteHandler, ForeignWrites, WriterLookup
from reconciler.actuators.cgroup.control_files import MEMORY_PAIR, ControlFileCache, masked, reset_by, restore_text
from reconciler.actuators.cgroup.status import Alert, StatusTable
from reconciler.actuators.mode import WriteMode
from reconciler.runtime.object_errors import ObjectErrors
from state.entry import US, LedgerEntry
from state.ledger import Ledger
from state.model import Hold, Setting
from state.setting_state import SettingState

_RACE_S: Final = 2.0
"""From the runtime's write to its signal at most 11 ms were recorded; on a busy machine many times that."""


@final
class RecentReleases:
    """The files of containers whose originals were restored within the last seconds.

    The kubelet takes a container over (an exclusive CPU, a resize): our value is no longer wanted and is released while
    the runtime writes the kubelet's. `reassert_runtime` corrects a release that came after the runtime's write.
    """

    def __init__(self, control_files: ControlFileCache) -> None:
        self._control_files = control_files
        self._files: dict[tuple[str, str], tuple[float, str]] = {}
        """(group path, knob) -> when (monotonic seconds), and the text of the file afterwards."""

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, path: str) -> bool:
        if not self._files:
            return False
        now = time.monotonic()
        return any(place[0] == path and now - at < _RACE_S for place, (at, _) in self._files.items())

    def record(self, work: FileWrite, after: str) -> None:
        """A file's original was restored; it now reads ``after``."""
        now = time.monotonic()
        self._files = {place: pair for place, pair in self._files.items() if now - pair[0] < _RACE_S}
        if work.target.container is not None:
            self._files[work.place] = now, work.knob.normal(after, work.version)

    def forget(self, path: str) -> None:
        self._files = {place: pair for place, pair in self._files.items() if place[0] != path}

    def places(self, target: GroupTarget) -> list[tuple[str, str]]:
        """The files of a group to pass to `reassert_runtime`: those released before the runtime's signal."""
        if not target.signalled or target.container is None:
            return []
        return [place for place in self._files if place[0] == target.group.path]

    def reassert_runtime(self, target: GroupTarget, place: tuple[str, str]) -> FileWrite | None:
        """The write after the runtime's signal: its spec's value, if the file still reads as after the release.

        Errors: `CgroupError`; then it is to be checked again.
        """
        assert target.container is not None
        at, after = self._files[place]
        file = self._control_files.find(*place)
        if file is None or time.monotonic() - at >= _RACE_S or place[1] in target.settings:
            del self._files[place]
            return None
        # If the runtime wrote first and its value equals ours, the release has overwritten it unnoticed. Only the spec
        # names it, and no further event would cause a write.
        text = spec_text(file.knob, file.version, target.container.spec)
        raw = self._control_files.text(file)
        # Not before the read: after an error it is tried again.
        del self._files[place]
        actual = file.knob.normal(raw, file.version)
        if text is None or actual != after or file.knob.normal(text, file.version) == after:
            return None
        return FileWrite(target, *file, None, raw, actual, text, FileAction.RELEASE)


@final
class ValuesInPlace:
    """The files that held the wanted value when they were compared, and that bypassd has never written.

    The ledger does not contain them; a later change is a foreign write all the same.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, str]] = {}
        """By group path and knob, in normal form."""

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def saw(self, place: tuple[str, str], actual: str) -> None:
        """The file holds the wanted value."""
        self._values.setdefault(place[0], {})[place[1]] = actual

    def is_changed(self, place: tuple[str, str], actual: str) -> bool:
        """Whether the file was in place and has another value now."""
        return self._values.get(place[0], {}).get(place[1], actual) != actual

    def keep_only(self, path: str, knobs: Collection[str]) -> None:
        """Drop those of a group that are no longer wanted."""
        if (values := self._values.get(path)) is not None:
            self._values[path] = {knob: value for knob, value in values.items() if knob in knobs}
            if not self._values[path]:
                del self._values[path]

    def forget(self, path: str) -> None:
        self._values.pop(path, None)


_BANDWIDTH: Final = ("cpu.period", "cpu.burst")
"""What bounds a quota in its own group: the kernel compares quota and period with the group above, and refuses a quota
below the burst."""
_OOM_CONTROL: Final = "memory.oom_control"
_SETTLED: Final = frozenset({SettingState.IN_PLACE, SettingState.WOULD_WRITE})
"""States that last as long as the files read the same."""
_OTHER_FILES: Final = frozenset({*MEMORY_PAIR, *(knob.name for knob in CATALOG.values() if knob.resets)})
"""Knobs whose state also follows from files other than their own."""


@final
class ChangeDetector:
    """Decides the writes of a group. State that outlives one pass is in its parts."""

    def __init__(
        self,
        *,
        hierarchy: Hierarchy,
        ledger: Ledger,
        foreign: ForeignWrites,
        attribution: WriterLookup | None,
        files: FileOps,
        alert: Alert,
        held: Callable[[Hold], None],
        errors: ObjectErrors,
        mode: WriteMode,
        in_place: ValuesInPlace | None = None,
        lost: bool = False,
    ) -> None:
        """``held`` is called with the holds that result from a person's own writes, so that they are stored.

        ``lost``: the store was lost: a file's current value may be ours, and is not recorded as an original.
        """
        self.hierarchy = hierarchy
        self.mode = mode
        self.control_files = ControlFileCache(hierarchy, files)
        self.statuses = StatusTable(alert)
        self.alert = alert
        self.foreign_writes = ForeignWriteHandler(
            ledger=ledger,
            rules=foreign,
            attribution=attribution,
            statuses=self.statuses,
            alert=alert,
            held=self._add_person_hold,
        )
        self._lost = lost
        self.adoptable: list[FileWrite] = []
        """Files that hold the wanted value, and not the one that the kubelet and the runtime would have left there."""
        self.recent_releases = RecentReleases(self.control_files)
        self.in_place = in_place or ValuesInPlace()
        self.errors = errors
        self.ledger = ledger
        self.files = files
        self._on_hold = held

    def detect(self, target: GroupTarget) -> list[FileWrite]:
        path, wanted = target.group.path, target.settings
        self.statuses.keep_only(path, wanted)
        self.foreign_writes.keep_waits(path, lambda knob: knob in wanted and self.may_write(wanted[knob]))
        writes: list[FileWrite | None] = []
        try:
            masked_knobs = self._masked(target)
            # What a dry run shows is released like what is no longer wanted: all of it is without effect.
            if shown := self._shown(wanted):
                target = replace(target, settings={name: wanted[name] for name in wanted.keys() - shown})
            self.in_place.keep_only(path, target.settings)
            for name, setting in wanted.items():
                if name not in masked_knobs:
                    with self._contained(target, name, setting):
                        writes.append(self._plan_set(target, name, setting))
            for entry in self.ledger.group(path):
                if entry.knob not in target.settings and entry.knob not in masked_knobs:
                    with self._contained(target, entry.knob, None):
                        writes.append(self._plan_release(target, entry))
            for place in self.recent_releases.places(target):
                with self._contained(target, place[1], None):
                    writes.append(self.recent_releases.reassert_runtime(target, place))
        except CgroupGoneError as exc:
            # Gone between discovery and use; the event of its parent follows and handles the rest. Without that event
            # it was not gone.
            self.gone(target, exc)
            return []
        self.statuses.readable(path, "")
        self._check_period(target, wanted)
        work = [write for write in writes if write is not None]
        work += [after for write in work if (after := self._dependent_write(write)) is not None]
        # Only now: most passes write neither, and each value is one more read.
        if any(write.knob.name == "cpu.quota" for write in work):
            self.control_files.load(path, _BANDWIDTH)
        if any(write.knob.name in MEMORY_PAIR for write in work):
            self.control_files.load(path, MEMORY_PAIR)
        return work

    def _shown(self, settings: Mapping[str, Setting]) -> set[str]:
        """The knobs that only a dry run wants, while bypassd writes others."""
        if not (self.mode.enforce and self.mode.has_dry_runs):
            return set()
        return {name for name, setting in settings.items() if self.mode.is_dry(setting.policy)}

    def _check_period(self, target: GroupTarget, settings: Mapping[str, Setting]) -> None:
        """Read the period of a group with a wanted quota; if it is not the one that the plan used, plan again."""
        path, setting = target.group.path, settings.get("cpu.quota")
        file = self.control_files.find(path, "cpu.period")
        if setting is None or file is None or target.creating:
            return
        spec = target.container.spec if target.container is not None else None
        default = spec.period_us if spec is not None and spec.period_us else DEFAULT_PERIOD_US
        before = self.control_files.actual.get((path, "cpu.period"), default)
        self.control_files.load(path, ("cpu.period",))
        # The same quota is another share of a CPU now, though its file reads as wanted.
        if self.control_files.actual.get((path, "cpu.period"), before) != before:
            work = FileWrite(target, *file, setting, "", "", "", FileAction.NOTHING)
            self.statuses.recheck(work, time.monotonic())

    def is_settled(self, target: GroupTarget) -> bool:
        """Whether each file of the group reads as when `detect` last found nothing to do, for the same settings.

        For passes that only the clock has caused. False if that is not certain.
        """
        path, settings = target.group.path, target.settings
        statuses = self.statuses.by_group.get(path, {})
        if self._lost or len(statuses) != len(settings) or self.statuses.has_retry(path):
            return False
        if path in self.recent_releases:
            return False
        shown = self._shown(settings)
        for entry in self.ledger.group(path):
            if entry.knob not in settings or entry.knob in shown or entry.knob in _OTHER_FILES or entry.yielded:
                return False
        for name, setting in settings.items():
            status = statuses.get(name)
            if status is None or status.setting is not setting or status.state not in _SETTLED or name in _OTHER_FILES:
                return False
            file = self.control_files.find(path, name)
            try:
                if file is None or self.control_files.text(file) != status.actual:
                    return False
            except CgroupError:
                return False
        self._check_period(target, settings)
        self.statuses.compared_again(path)
        return True

    def unrecorded_values(self, target: GroupTarget, knobs: Iterable[str]) -> list[FileWrite]:
        """Files without an entry that hold another value than kubelet and runtime leave there; the text is theirs.

        Without files that cannot be read, or whose value without bypassd is unknown.
        """
        writes: list[FileWrite] = []
        reset = ""
        for name in knobs:
            file = self.control_files.find(target.group.path, name)
            if file is None or self.ledger.get(file.key) is not None:
                continue
            try:
                # cpu.idle hides the weight (0 on v2), and its end resets it.
                raw = self.control_files.text(file) if name != reset else file.knob.default(file.version)
                actual = file.knob.normal(raw, file.version)
            except (CgroupError, ValueError):
                continue
            work = FileWrite(target, *file, None, raw, actual, raw, FileAction.RELEASE)
            theirs = self.value_without_agent(work)
            if theirs is not None and file.knob.normal(theirs, file.version) != actual:
                writes.append(work._replace(text=theirs))
                reset = file.knob.resets or reset
        return writes

    def gone(self, target: GroupTarget, exc: CgroupGoneError) -> None:
        """The kernel reports the group as gone: check it again."""
        self.errors.counted("group", exc)
        self.statuses.unreadable(target.group.path, "", target.pod_uid, str(exc), None)

    @contextmanager
    def _contained(self, target: GroupTarget, knob: str, setting: Setting | None) -> Iterator[None]:
        """Contain an error of one file: record it, retry later, and continue with the group's other files.

        Errors: `CgroupGoneError`, which concerns the whole group.
        """
        try:
            yield
        except CgroupGoneError:
            raise
        except (CgroupError, ValueError) as exc:
            # ValueError: a text that the knob's codec cannot decode.
            self.errors.counted("file", exc)
            self.control_files.actual.pop((target.group.path, knob), None)
            self.statuses.unreadable(target.group.path, knob, target.pod_uid, str(exc), setting)
        else:
            self.statuses.readable(target.group.path, knob)

    def may_write(self, setting: Setting) -> bool:
        """False if the setting is held, its policy is in dry run, or bypassd only observes."""
        return self.mode.enforce and not self.mode.is_dry(setting.policy) and self._hold(setting) is None

    @property
    def lost(self) -> bool:
        """Whether the originals were lost with the store, and the first pass is not over."""
        return self._lost

    def all_seen(self) -> None:
        """Every file was compared: from now on a value that bypassd has not recorded is not its own."""
        self._lost = False

    def forget(self, path: str) -> None:
        """Drop the state of a group that no longer exists; groups below it are forgotten by their own calls."""
        self.control_files.forget(path)
        self.recent_releases.forget(path)
        self.in_place.forget(path)
        self.statuses.forget(path)
        self.foreign_writes.forget(path)

    # The next check

    def next_check(self) -> float | None:
        """When the next wait or retry ends (monotonic seconds), None if there is none."""
        times = (self.statuses.next_retry(), self.foreign_writes.next_end(time.monotonic()))
        return min((at for at in times if at is not None), default=None)

    def due(self, now: float) -> set[str | None]:
        """The pods (None: the directories above them) with a file to check again. Each is returned once."""
        return self.statuses.due(now, lambda place: self.foreign_writes.is_waiting(place, now))

    # One wanted setting

    def _plan_set(self, target: GroupTarget, name: str, setting: Setting) -> FileWrite | None:
        file = self.control_files.find(target.group.path, name)
        if file is None:
            self._missing(setting, f"no {CATALOG[name].controller} controller with {name} on this node")
            return None
        knob, version = file.knob, file.version
        try:
            text = knob.encode(setting.value, version)
        except ValueError as exc:
            self._missing(setting, f"{setting.value!r} is not writable: {exc}")
            return None
        wanted = knob.normal(text, version)
        try:
            raw = self.control_files.text(file)
        except CgroupGoneError:
            if target.creating:
                # The cpu and memory directories appear 6-20 ms after the cpuset's.
                raw = self._expected(target, file, "")
            elif self.control_files.is_unknown_here(file):
                taken_out = self.control_files.taken_out(file)
                self._missing(setting, taken_out or f"this kernel has no {file.key[2]}")
                return None
            else:
                raise
        actual = knob.normal(raw, version)
        self.control_files.store(file, actual)
        entry = self.ledger.get(file.key)
        if entry is not None and self.may_write(setting):
            # A value that is only shown is never ours: otherwise a restore would overwrite another program's equal
            # value.
            self.ledger.want(file.key, wanted, policy=setting.policy, reason=setting.reason)
        action = compare(
            entry, FileState(actual, wanted, self.control_files.last_seen(entry, file, actual), restore=None)
        )
        if target.creating:
            # The runtime has yet to write, so the current text does not count; its spec's value does. A cpuset is empty
            # for half a millisecond after its mkdir, until the runtime has copied the pod's.
            raw = actual = self._expected(target, file, raw)
            action = (
                FileAction.NOTHING if actual == wanted else FileAction.CHANGE if entry is not None else FileAction.FIRST
            )
        work = FileWrite(target, *file, setting, raw, actual, text, action)
        return work if self._may_change(work, setting, entry) else None

    def _expected(self, target: GroupTarget, file: KnobFile, raw: str) -> str:
        """The value of a file after the runtime has finished, by its spec; ``raw`` is its text so far."""
        spec = target.container.spec if target.container is not None else None
        return expected_after_runtime(file.knob, file.version, spec, raw or self.control_files.text_above(file))

    def _may_change(self, work: FileWrite, setting: Setting, entry: LedgerEntry | None) -> bool:
        """Whether the write may be done now; if not, the setting's status is recorded."""
        if work.action is FileAction.NOTHING:
            self.statuses.done(work)
            self.foreign_writes.resolve(work.place)
            # A limit that is in place and hangs its group is shown, not changed.
            self.statuses.record(work, SettingState.IN_PLACE, self._hangs(work) or "")
            if entry is None and not work.target.creating and self.may_write(setting):
                self.in_place.saw(work.place, work.actual)
            if (
                self._lost
                and entry is None
                and self.may_write(setting)
                and self.value_without_agent(work) != work.actual
            ):
                self.adoptable.append(work)
            if entry is not None and entry.yielded:
                self.ledger.set_yielded(work.key, yielded=False, reason="correct again")
            return False
        foreign = work.action is FileAction.FOREIGN or (
            entry is None and not work.target.creating and self.in_place.is_changed(work.place, work.actual)
        )
        hold = self._hold(setting)
        if hold is not None:
            if foreign:
                # Recorded now, so that it does not count as a new write when the hold ends.
                self.foreign_writes.record(work, entry)
            self.statuses.record(work, SettingState.HELD, f"{hold.reason} (by {hold.by})")
            return False
        if not self.may_write(setting):
            self.statuses.record(work, SettingState.WOULD_WRITE, setting.reason)
            return False
        if foreign and not self.foreign_writes.may_reassert(work, entry):
            return False
        if (harm := self._hangs(work) or self._ends_partition(work)) is not None:
            self.statuses.refused(work, harm, SettingState.BLOCKED)
            return False
        return not self.statuses.is_waiting(work)

    def _hangs(self, work: FileWrite) -> str | None:
        """Why a limit of memory would stop the group instead of bounding it; None: it would not."""
        # v1 without its OOM killer: at the limit every process waits for free memory, for ever.
        if work.knob.name not in MEMORY_PAIR or work.version != 1 or work.setting is None or work.setting.value is None:
            return None
        spec = work.target.container.spec if work.target.container is not None else None
        if spec is None or not (work.target.creating and spec.oom_kill_disable):
            try:
                rows = lines_of(self.control_files.text_in("memory", work.key[1], _OOM_CONTROL))
            except CgroupError:
                return None  # not known: as for a group without it
            if "oom_kill_disable 1" not in rows:
                return None
        return f"{_OOM_CONTROL} has oom_kill_disable 1: at a limit its processes stop for ever, and none is killed"

    def _ends_partition(self, work: FileWrite) -> str | None:
        """Which CPU partition the kernel would end, without an error, if this set were written; None: none."""
        cpus = work.setting.value if work.setting is not None else None
        if work.knob.name != "cpu.set" or work.version != 2 or not isinstance(cpus, CpuSet):
            return None
        found = partition_ended_by(self.hierarchy, work.key[1], cpus, self.files)
        return None if found is None else f"it would end a CPU partition: {found}"

    def _missing(self, setting: Setting, why: str) -> None:
        self.statuses.record_unread(setting, SettingState.MISSING, why)

    def _hold(self, setting: Setting) -> Hold | None:
        return self.mode.hold_on(setting.path, setting.knob, setting.pod_uid)

    def _add_person_hold(self, hold: Hold) -> None:
        self.mode.add_hold(hold)
        self._on_hold(hold)

    # One managed file whose knob has no wanted setting any more

    def _plan_release(self, target: GroupTarget, entry: LedgerEntry) -> FileWrite | None:
        file = self.control_files.find(entry.path, entry.knob)
        if file is None or not self.mode.enforce or target.creating:
            # In creation the runtime has yet to write the value to compare; `_retract` has dropped the prepared one.
            return None
        knob, version = file.knob, file.version
        held = self.mode.hold_on(entry.path, knob.name, entry.pod_uid) is not None
        if held and knob.name not in ALWAYS_RESTORED:
            return None
        raw = self.control_files.text(file)
        actual = knob.normal(raw, version)
        self.control_files.store(file, actual)
        original = restore_text(
            (knob, version),
            entry,
            self.ledger,
            entry.restore_text,
            lambda group, name: self.control_files.text_in(entry.controller, group, name),
        )
        restore = None if original is None else knob.normal(original, version)
        seen = self.control_files.last_seen(entry, file, actual)
        action = compare(entry, FileState(actual=actual, wanted=None, seen=seen, restore=restore))
        if action is FileAction.DROP:
            self.ledger.restored(entry.key, raw)
        if action is not FileAction.RELEASE or original is None or knob.one_way:
            # What the kernel never takes back ends with its group; a restore reports it.
            return None
        return FileWrite(target, *file, None, raw, actual, original, action)

    # Knobs that another knob masks

    def _masked(self, target: GroupTarget) -> Mapping[str, str]:
        """The masked knobs of this group, not written for now; their status is recorded if they are wanted."""
        texts = masked(self.hierarchy, self.ledger, self.files, target.group.path, target.settings)
        for name, by in texts.items():
            if (setting := target.settings.get(name)) is not None:
                self.statuses.record_unread(setting, SettingState.IN_PLACE, f"takes effect once {by} ends")
        return texts

    def _dependent_write(self, work: FileWrite) -> FileWrite | None:
        """The follow-up write of a knob that the kernel resets with this one: the wanted value, else the former one."""
        write = self._reset_by(work) if work.knob.resets is not None and work.is_zero else None
        entry = self.ledger.get(write.key) if write is not None else None
        if write is None or entry is None:
            return None
        setting = work.target.settings.get(write.knob.name)
        if setting is not None and self.may_write(setting):
            return write._replace(
                setting=setting, text=write.knob.encode(setting.value, write.version), action=FileAction.CHANGE
            )
        text = entry.seen if setting is not None and entry.writer == US else entry.restore_text
        return None if text is None else write._replace(text=text)

    def side_effect(self, work: FileWrite) -> FileWrite | None:
        """The knob that a wanted value will make the kernel reset, as a write that is never done: its original counts.

        None for knobs that reset no other, for their return to 0, and if the other file cannot be read.
        """
        return None if work.knob.resets is None or work.is_zero else self._reset_by(work)

    def _reset_by(self, work: FileWrite) -> FileWrite | None:
        pair = reset_by(self.hierarchy, self.files, work.key[1], work.knob)
        if pair is None:
            return None
        file, raw = pair
        try:
            actual = file.knob.normal(raw, file.version)
        except ValueError as exc:
            # An unreadable value is not an original: the file is left unchanged, and reported with its group.
            self.errors.counted("file", exc)
            return None
        return FileWrite(work.target, *file, None, raw, actual, raw, FileAction.RELEASE)

    # The value without the agent

    def value_without_agent(self, work: FileWrite) -> str | None:
        """The value of the file if we had never written it; None if unknown."""
        try:
            above = self.control_files.text_above(KnobFile(work.knob, work.version, work.directory, work.key))
        except CgroupError:
            return None
        return value_without_agent(work.knob, work.version, work.key[1], work.target.container, above)

    def value_before_agent(self, path: str, name: str) -> Value:
        """The value of a file without our write: its original if the last write was ours, else the last one read.

        None for "no limit", and if unknown.
        """
        file = self.control_files.find(path, name)
        if file is None:
            return None
        entry = self.ledger.get(file.key)
        if entry is None or entry.writer != US:
            return self.control_files.actual.get((path, name))
        try:
            return None if entry.restore_text is None else file.knob.decode(entry.restore_text, file.version)
        except ValueError:
            return None
