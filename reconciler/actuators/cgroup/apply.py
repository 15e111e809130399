"""Brings the control files of the given groups to exactly the wanted settings. One caller at a time (the worker).

Level-triggered: apart from the ledger, all state can be rebuilt by another pass.

Longer than other modules because one pass, from a wanted value to its recorded outcome, is read as one sequence: each
step depends on what the one before left in the ledger and in the cache.
"""

import errno
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, final

import trio
from msgspec.structs import replace

from cgroupfs.codecs import DEFAULT_PERIOD_US, Value, Version
from cgroupfs.errors import CgroupChangedError, CgroupError, CgroupGoneError, CgroupUnderWayError, StoreError
from cgroupfs.knobs import CATALOG, SETS
from cgroupfs.log import get_log
from cgroupfs.plan import KnobChange, order_changes
from cgroupfs.steps import BlockedChange, WritePlan, WriteStep, ancestors
from cgroupfs.writer import KernelWriter, StepOutcome
from reconciler.actuators.cgroup.compare import (
    FileAction,
    FileWrite,
    GroupTarget,
    KnobFile,
    expected_after_runtime,
    intended,
    is_ours,
    spec_text,
)
from reconciler.actuators.cgroup.control_files import BOUNDS, MEMORY_PAIR, Relatives
from reconciler.actuators.cgroup.decide import ChangeDetector
from reconciler.actuators.cgroup.fastpath import FastPath, FastResult, FastWrite
from reconciler.actuators.cgroup.inner_groups import InnerGroups
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.stints import in_worker
from reconciler.runtime.workqueue import NODE, pod_key
from state.cpu import QuotaFloor
from state.entry import US, FileKey, LedgerEntry, OriginalSource
from state.ledger import Ledger
from state.model import RuntimeSpec
from state.setting_state import SettingState

_LOG: Final = get_log("apply")
_OF_RUNTIME: Final = frozenset(
    {"cpu.set", "cpu.mems", "cpu.weight", "cpu.quota", "memory.max", "memory.swap", "pids.max"}
)
"""Knobs that the runtime writes while it makes a container."""
_BOUNDING: Final = (*BOUNDS, "cpu.mems", "cpu.mems_migrate", "cpu.burst", "cpu.idle", *MEMORY_PAIR)
"""Knobs whose present value, in the group or one above it, decides the order of writes or whether one is possible."""
_MOVES_PAGES: Final = "cpu.mems"
"""Migrates the pages of a running container; the duration is unbounded, so never in the event loop."""
_BETWEEN_FILES: Final = frozenset({errno.EINVAL, errno.EACCES, errno.EBUSY, errno.ENOSPC})
"""The kernel's answers where a value does not fit those of the groups above or below it."""
_OVERTAKEN_MOST: Final = 3
"""Attempts of one file in a row that count as overtaken, not as refused."""
_REPLANS: Final = 3
"""Plans of one pass at most: one more each time that a group in the way has another value than was assumed."""
_LEAST_RETRY_S: Final = 5.0
"""Longest wait before a quota that a group inside forbids is tried again: that group is another program's."""
_FLOOR_HOLDS: Final = frozenset({SettingState.BLOCKED, SettingState.DUE, SettingState.UNDER_WAY})
"""States of a quota in which its floor, the least one that the kernel takes, counts in place of the wanted one."""
_FAST_LIMIT_BYTES: Final = 64 << 20
"""A v2 memory limit below the usage of the runtime's init would kill it; smaller limits use the guarded write."""


class GroupFollower(Protocol):
    """Watches the groups that hold managed files; implemented by `conflict.WriteAttribution`."""

    def follow(self, path: str) -> None: ...

    def forget(self, path: str) -> None: ...


@final
class CgroupActuator:
    def __init__(
        self,
        *,
        judge: ChangeDetector,
        ledger: Ledger,
        writer: KernelWriter,
        lane: FastPath,
        store_lane: trio.CapacityLimiter,
        watched: GroupFollower,
    ) -> None:
        """``store_lane``: the one-thread limiter of all calls that make ledger rows durable.

        ``watched`` is called for each group that gets its first managed file, and when the group no longer exists.
        """
        self.judge = judge
        self._ledger = ledger
        self._writer = writer
        self._fastpath = lane
        self._store_lane = store_lane
        self._follower = watched
        self._inner = InnerGroups(judge.hierarchy, ledger, judge.control_files)
        self._prepared: dict[str, dict[FileKey, FileWrite]] = {}
        self._under_way: dict[tuple[str, str], FileWrite] = {}
        self._overtaken: Counter[tuple[str, str]] = Counter()
        self._begun: set[str] = set()
        """Containers that the runtime had finished when their files were read, or has finished since."""
        self.writes: Counter[tuple[str, str]] = Counter()
        """By (knob, outcome): written, refused, overtaken, blocked, under way, gone, changed, restored, hot."""

    async def apply(self, targets: Sequence[GroupTarget]) -> None:
        """Apply the wanted settings. A file's failure never raises: it is recorded, reported and retried."""
        # First: the comparison below rests on what these writes have left in the files.
        await self._collect_finished()
        for target in targets:
            # Before `detect`, which drops the ledger entry where it reads the runtime's value: a signal after that
            # would write the old value into a file without an entry.
            self._retract(target)
        work: list[FileWrite] = []
        slices = TimeSlice()
        for target in targets:
            with self.judge.errors.contained(pod_key(target.pod_uid) if target.pod_uid is not None else NODE):
                work += self.judge.detect(target)
            # Also a group in which nothing is written: a later value of another program is to be noticed.
            if target.group.path in self.judge.in_place:
                self._follower.follow(target.group.path)
            await slices.checkpoint()
        await self._adopt()
        # What is done only for the directories above the pods is urgent: a container starts.
        of_pods = not targets or any(target.pod_uid is not None for target in targets)
        expansion = await self._inner.expand(work, self._may_follow, unfinished=of_pods)
        for waiting, why in expansion.waiting:
            self.judge.statuses.record(waiting, SettingState.DUE, why)
        work = await self._record(expansion.work, expansion.kept)
        began = time.thread_time()
        # The runtime would overwrite those of a container in creation: the fast path has them.
        await self._write([write for write in work if not write.target.creating])
        cpu_s = time.thread_time() - began
        prepared: dict[str, list[FileWrite]] = {}
        for item in work:
            if item.target.creating and _allowed_in_fastpath(item):
                prepared.setdefault(item.key[1], []).append(item)
        # After the writes: of a running container only values in force are prepared.
        for target in targets:
            self._prepare(target, prepared.get(target.group.path, ()))
        self._drop_floors()
        # A pass that writes much else shows nothing about the groups inside.
        within = sum(bool(write.within) for write in work)
        self._inner.finish_pass(within if 2 * within > len(work) else 0, cpu_s)
        for unfinished, at in self._inner.due():
            self.judge.statuses.recheck(unfinished, at)

    async def commit(self) -> None:
        """Wait, for a bounded time, until the kernel has finished the writes under way, and record their outcomes."""
        await self._writer.quiet()
        await self._collect_finished()

    def forget(self, path: str, container_id: str | None = None) -> None:
        """Drop all state of a group that no longer exists, and of its container."""
        for place in [place for place in self._under_way if place[0] == path]:
            del self._under_way[place]
        for place in [place for place in self._overtaken if place[0] == path]:
            del self._overtaken[place]
        self.judge.forget(path)
        self._inner.forget(path)
        # A group that a mount hides may have our values still: their originals are needed.
        if not self.judge.control_files.is_hidden(path):
            self._ledger.forget_group(path)
        self._follower.forget(path)
        if container_id is not None:
            self._fastpath.drop(container_id)
            self._prepared.pop(container_id, None)
            self._begun.discard(container_id)

    def cpus_changed(self) -> None:
        """The kernel has taken CPUs out of sets, or they are back: groups inside managed ones are compared again."""
        self._inner.resume()

    def runs(self, container_id: str) -> None:
        """The runtime had finished with this container before this run saw it."""
        self._begun.add(container_id)

    def rebase(self, target: GroupTarget) -> None:
        """The runtime's own record has changed: its values become the ones to restore."""
        if target.container is None:
            return
        # The first signal that this run has seen of the container.
        created = target.signalled and target.container.id not in self._begun
        self._begun |= {target.container.id} if target.signalled else set()
        for entry in self._ledger.group(target.group.path):
            # Read between the mkdir and the runtime's last write (on v1 no CPUs at all): only that write makes an
            # original.
            if created and entry.origin is OriginalSource.READ:
                self._correct(target, entry)
            file = self.judge.control_files.find(entry.path, entry.knob)
            if file is None:
                continue
            text = spec_text(file.knob, file.version, target.container.spec)
            # Where the original was lost, the baseline was derived without it: only a recorded value replaces it.
            if text is not None or entry.origin is not OriginalSource.UNKNOWN:
                self._ledger.rebase(entry.key, text)

    def _correct(self, target: GroupTarget, entry: LedgerEntry) -> None:
        """The original of a file that was written before the runtime had finished with its container."""
        file = self.judge.control_files.find(entry.path, entry.knob)
        if file is None or target.container is None or file.knob.name not in _OF_RUNTIME:
            return
        try:
            actual = file.knob.normal(self.judge.control_files.text(file), file.version)
            above = self.judge.control_files.text_above(file)
        except (CgroupError, ValueError):
            return
        if entry.writer == US and actual != entry.seen:
            # The runtime wrote after bypassd: the present value is its own.
            text, origin = actual, OriginalSource.READ
        else:
            spec = target.container.spec
            text, origin = expected_after_runtime(file.knob, file.version, spec, above), OriginalSource.SPEC
        self._ledger.correct(entry.key, text, origin)

    def on_executed(self, result: FastResult) -> None:
        """Record what the fast path wrote for one container. The next pass reads the values back."""
        works = self._prepared.get(result.container_id, {})
        for write, code in zip(result.writes, result.errnos, strict=True):
            work = works.get(write.key)
            knob = work.knob.name if work is not None else write.file
            self.writes[knob, "hot" if code == 0 else "refused"] += 1
            if code == 0 and work is not None:
                after = work.knob.normal(work.text, work.version)
                self._ledger.wrote(write.key, before=None, after=after)
                self.judge.statuses.record(work, SettingState.WRITTEN, actual=after)

    # Recording

    async def _adopt(self) -> None:
        """After the store was lost: record files whose wanted value only bypassd can have written."""
        writes, self.judge.adoptable = self.judge.adoptable, []
        if not writes:
            return
        entries = [self._entry(write) for write in writes]
        for entry, item in zip(entries, writes, strict=True):
            entry.seen, entry.writer, entry.written_at = item.actual, US, time.time()
        await self._adopted(writes, entries, "cannot record the values in force before the store was lost")

    async def take_over(self, writes: Sequence[FileWrite]) -> bool:
        """Record values of an earlier run that the store does not have: from now on they are managed like any other.

        False if they cannot be recorded.
        """
        entries = [
            replace(
                self._entry(write),
                original=None,
                baseline=write.text,  # the value without bypassd
                wanted=write.actual,
                seen=write.actual,
                writer=US,
                written_at=time.time(),
            )
            for write in writes
        ]
        return await self._adopted(writes, entries, "cannot record the values of an earlier run")

    async def _adopted(self, writes: Sequence[FileWrite], entries: Sequence[LedgerEntry], failure: str) -> bool:
        """Make these entries durable, and follow their groups; whether that succeeded."""
        try:
            await in_worker(self._ledger.adopt, entries, limiter=self._store_lane)
        except StoreError as exc:
            _LOG.warning(failure, error=str(exc))
            return False
        for path in {write.key[1] for write in writes}:
            self._follower.follow(path)
        return True

    async def _record(self, work: list[FileWrite], kept: Sequence[FileWrite] = ()) -> list[FileWrite]:
        """Make the originals of first touches durable, and of ``kept``. If that fails, the files are not written."""
        beside = [*kept]
        beside += [other for write in work if (other := self.judge.side_effect(write)) is not None]
        firsts = [
            write for write in (*beside, *work) if not self._ledger.is_durable(write.key, write.target.group.inode)
        ]
        outdated = [write for write in work if self._correct_unwritten(write)]
        if not firsts and not outdated:
            return work
        entries = [self._entry(write) for write in firsts]
        try:
            if outdated:
                # A corrected original has to be durable before the write, like a first one.
                await in_worker(self._ledger.flush, limiter=self._store_lane)
            # After the store was lost a file's text may be bypassd's: `adopt` takes none for an original.
            record = self._ledger.adopt if self.judge.lost else self._ledger.first_touches
            await in_worker(record, entries, limiter=self._store_lane)
        except StoreError as exc:
            firsts += outdated
            for first in firsts:
                # The store's failure is reported once by persistence, not for every file.
                if not first.within:
                    self.judge.statuses.refused(first, str(exc), SettingState.NOT_RECORDED, alert=False)
                else:
                    self._inner.refused((first.within, first.knob.name))
            barred = {write.key for write in firsts}
            return [write for write in work if write.key not in barred]
        for path in {write.key[1] for write in firsts if not write.within}:
            self._follower.follow(path)
        return work

    def _correct_unwritten(self, work: FileWrite) -> bool:
        """Whether a recorded file that bypassd has not written yet has another value by now: its owner's newer one."""
        # The kernel may have refused the first write for hours since the record.
        entry = self._unwritten(work)
        if entry is None or entry.original is None or work.target.creating:
            return False
        same = work.actual == work.knob.normal(entry.original, work.version)
        if same or is_ours(work.knob, work.version, entry, self._ledger, work.actual):
            return False
        self._ledger.correct(work.key, work.raw, OriginalSource.READ)
        return True

    def _unwritten(self, work: FileWrite) -> LedgerEntry | None:
        """The entry of a file that bypassd has not written yet, and that the kernel resets with none of its writes."""
        entry = self._ledger.get(work.key)
        if entry is None or entry.writer or work.within:
            return None
        others = (CATALOG.get(other.knob) for other in self._ledger.group(work.key[1]))
        resets = (knob.resets for knob in others if knob is not None)
        return None if work.knob.name in resets else entry

    def _entry(self, work: FileWrite) -> LedgerEntry:
        container, setting = work.target.container, work.setting
        spec = container.spec if container is not None else None
        # The own set of a group inside follows from its container's, whose value without bypassd is known.
        lost = self.judge.lost and not work.target.creating and not work.within
        return LedgerEntry(
            controller=work.key[0],
            path=work.key[1],
            file=work.key[2],
            knob=work.knob.name,
            inode=work.target.group.inode,
            original=None if lost else work.raw,
            origin=OriginalSource.UNKNOWN
            if lost
            else OriginalSource.SPEC
            if work.target.creating
            else OriginalSource.READ,
            baseline=self.judge.value_without_agent(work) if lost else spec_text(work.knob, work.version, spec),
            wanted=work.knob.normal(work.text, work.version),
            pod_uid=work.target.pod_uid,
            container_id=container.id if container is not None else None,
            policy=setting.policy if setting is not None else "",
            reason=setting.reason if setting is not None else "",
        )

    # Writing

    async def _write(self, work: Sequence[FileWrite]) -> None:
        if not work:
            return
        by_place = {write.place: write for write in work}
        await self._load_ancestors({write.key[1] for write in work if not write.within})
        plan = await self._plan(work)
        least: dict[tuple[str, str], BlockedChange] = {}
        for blocked in plan.blocked:
            item = by_place.get((blocked.change.path, blocked.change.knob))
            if item is not None and item.within:
                self._inner.refused((item.within, item.knob.name))
            elif item is not None:
                self.writes[item.knob.name, "blocked"] += 1
                self.judge.control_files.invalidate_ancestors(item.key[1])
                if isinstance(blocked.instead, int):
                    least[item.place] = blocked
                else:
                    self.judge.statuses.refused(item, f"{blocked.rule}: {blocked.reason}", SettingState.BLOCKED)
        # Without a step the least quota that the kernel takes is in force already.
        for place in least.keys() - {(step.path, step.knob) for step in plan.steps}:
            self._record_least(by_place[place], least[place], by_place[place].actual)
        inodes = {write.target.group.path: write.target.group.inode for write in work}
        # Before the writes: after a SIGKILL a restore recognises these values as bypassd's.
        self._ledger.intend(intended(plan.steps))
        outcomes = await self._writer.perform(self._guarded(plan.steps, by_place), inodes)
        for outcome in outcomes:
            # All of them before a refusal is judged: what this pass has written itself overtakes nothing.
            place = (outcome.step.path, outcome.step.knob)
            if outcome.ok and outcome.after is not None and place in by_place and not by_place[place].within:
                work_done = by_place[place]
                self.judge.control_files.actual[place] = work_done.knob.decode(outcome.after, work_done.version)
        slices = TimeSlice()
        for outcome in outcomes:
            place = (outcome.step.path, outcome.step.knob)
            if place not in by_place:
                continue
            await slices.checkpoint()
            if outcome.ok and place in least and outcome.after is not None:
                self.writes[place[1], "written"] += 1
                self._ledger.wrote(by_place[place].key, before=outcome.before, after=outcome.after)
                self._record_least(by_place[place], least[place], outcome.after)
            else:
                await self._record_outcome(outcome, by_place[place])

    async def _plan(self, work: Sequence[FileWrite]) -> WritePlan:
        """The plan of these writes. A group that blocks one is read again before it counts."""
        changes = [self._change(write) for write in work]
        control_files = self.judge.control_files
        plan = order_changes(changes, self._relatives(work), control_files.versions)
        slices = TimeSlice()
        for _ in range(_REPLANS):
            changed = False
            for blocked in {(item.by, item.change.knob): item for item in plan.blocked if item.by}.values():
                if control_files.read_again(blocked.by, blocked.change.knob):
                    changed = True
                    # Of the other groups below nothing is known either; the kernel's answer decides.
                    control_files.forget_unmanaged(blocked.change.path)
                await slices.checkpoint()
            if not changed:
                break
            plan = order_changes(changes, self._relatives(work), control_files.versions)
        return plan

    def _record_least(self, work: FileWrite, blocked: BlockedChange, actual: str) -> None:
        """The least quota that the kernel takes is in force in place of the wanted one."""
        judge, path = self.judge, work.key[1]
        reason = f"{blocked.rule}: {blocked.reason}"
        judge.statuses.refused(work, reason, SettingState.BLOCKED, longest_s=_LEAST_RETRY_S, actual=actual)
        period = judge.control_files.actual.get((path, "cpu.period"))
        period_us = period if isinstance(period, int) and period else DEFAULT_PERIOD_US
        quota_us = work.knob.decode(actual, work.version)
        # Rounded up: it is compared with a budget that has to be at least as large.
        floor = QuotaFloor(-(-quota_us * 1000 // period_us) if isinstance(quota_us, int) else 0, blocked.by)
        if floor != judge.control_files.floors.get(path) and work.target.pod_uid is None:
            # The next plan bounds the other pods by other means.
            judge.statuses.recheck(work, time.monotonic())
        judge.control_files.floors[path] = floor

    def _drop_floors(self) -> None:
        """Drop the floors of settings that are no longer wanted, or are in force."""
        floors, statuses = self.judge.control_files.floors, self.judge.statuses
        for path in list(floors):
            status = statuses.get((path, "cpu.quota"))
            if status is None or status.state not in _FLOOR_HOLDS:
                del floors[path]
        self.judge.control_files.expire()

    async def _collect_finished(self) -> None:
        """Record the outcomes of writes that were left under way."""
        for outcome in self._writer.finished():
            work = self._under_way.pop((outcome.step.path, outcome.step.knob), None)
            if work is None:
                continue  # its group was removed meanwhile
            await self._record_outcome(outcome, work)
            if outcome.ok and not work.within:
                # The wanted value may have changed meanwhile.
                self.judge.statuses.recheck(work, time.monotonic())

    def _change(self, work: FileWrite) -> KnobChange:
        have = work.knob.decode(work.actual, work.version)
        want = work.setting.value if work.setting is not None else work.knob.decode(work.text, work.version)
        why = work.setting.reason if work.setting is not None else "no longer wanted"
        usage = self.judge.control_files.memory_use(work) if work.knob.lowering_is_slow and work.version == 2 else None
        return KnobChange(
            path=work.key[1],
            knob=work.knob.name,
            have=have,
            want=want,
            why=why,
            usage_bytes=usage,
            reclaim=self.judge.mode.reclaim or work.setting is None,
            least=work.setting is not None,
        )

    def _relatives(self, work: Sequence[FileWrite]) -> Mapping[tuple[str, str], Value]:
        """Last values of the groups that bound these: all if a directory changes, else only those of ancestors."""
        if any(write.target.container is None for write in work):
            return self.judge.control_files.known()
        paths = {write.key[1] for write in work}
        inside = self.judge.control_files.known(paths)
        for path in list(paths):
            while (path := path.rpartition("/")[0]) and path not in paths:
                paths.add(path)
        actual = self.judge.control_files.actual
        return {
            **inside,
            **{(path, knob): actual[path, knob] for path in paths for knob in _BOUNDING if (path, knob) in actual},
        }

    async def _load_ancestors(self, paths: Iterable[str]) -> None:
        """Read the ancestors' values, which bound the allowed ones: other programs write them as well."""
        slices = TimeSlice()
        for above in {above for path in paths for above in ancestors(path) if above != "/"}:
            self.judge.control_files.load(above)
            await slices.checkpoint()

    async def _record_outcome(self, outcome: StepOutcome, work: FileWrite) -> None:
        error = outcome.error
        if work.within:
            self._record_inner(outcome, work)
            return
        if isinstance(error, CgroupUnderWayError):
            # The first write remains: the kernel is still executing it, whatever has become wanted since.
            self._under_way.setdefault(work.place, work)
            self.writes[work.knob.name, "under way"] += 1
            self.judge.statuses.under_way(work, str(error))
            return
        if isinstance(error, CgroupGoneError):
            self.writes[work.knob.name, "gone"] += 1
            self.judge.gone(work.target, error)
            return
        if isinstance(error, CgroupChangedError):
            self.writes[work.knob.name, "changed"] += 1
            self.judge.statuses.record(work, SettingState.DUE, str(error))
            self.judge.statuses.recheck(work, time.monotonic())
            return
        # Possibly for a group inside that was made since they were read.
        if error is not None and work.knob.name in SETS and error.errno in _BETWEEN_FILES:
            self._inner.refused(work.place)
        if error is not None and await self._is_overtaken(work, error.errno):
            self.writes[work.knob.name, "overtaken"] += 1
            self.judge.statuses.record(
                work, SettingState.DUE, f"{error}; other values have changed since it was planned"
            )
            self.judge.statuses.recheck(work, time.monotonic())
            return
        if error is not None or outcome.after is None:
            self.writes[work.knob.name, "refused"] += 1
            if error is not None:
                self.judge.errors.counted("file", error)
            reason = str(error) if error is not None else "reading it back failed"
            if (inside := self._inner.why_refused(work.place)) is not None:
                reason += f"; inside it {inside}"
            self._note_altered(outcome, work)
            self._ledger.failed(work.key, errno=error.errno if error is not None else 0, error=reason)
            self.judge.statuses.refused(work, reason, actual=outcome.after)
            return
        self._under_way.pop(work.place, None)
        self._overtaken.pop(work.place, None)
        self.judge.statuses.done(work)
        self.judge.control_files.actual[work.place] = work.knob.decode(outcome.after, work.version)
        if work.part:
            # The state of the setting follows with the second write.
            self.writes[work.knob.name, "written"] += 1
            self._ledger.wrote(work.key, before=outcome.before, after=outcome.after)
            return
        if work.action is FileAction.RELEASE:
            self.writes[work.knob.name, "restored"] += 1
            self._ledger.restored(work.key, outcome.after)
            self.judge.recent_releases.record(work, outcome.after)
            self.judge.statuses.released(work, outcome.after)
            return
        self.writes[work.knob.name, "written"] += 1
        self._ledger.wrote(work.key, before=outcome.before, after=outcome.after)
        self.judge.statuses.record(work, SettingState.WRITTEN, actual=outcome.after)

    def _note_altered(self, outcome: StepOutcome, work: FileWrite) -> None:
        """A write left another value than the wanted one, or the first of several was accepted and a later one not."""
        if not outcome.wrote or outcome.after is None or outcome.after == outcome.before:
            return
        self.judge.control_files.store(KnobFile(work.knob, work.version, work.directory, work.key), outcome.after)
        # The value is bypassd's all the same: no other program's, and to be restored.
        if work.action is not FileAction.RELEASE:
            self._ledger.wrote(work.key, before=outcome.before, after=outcome.after)

    def _record_inner(self, outcome: StepOutcome, work: FileWrite) -> None:
        if outcome.ok:
            self.judge.control_files.forget_unmanaged_group(work.key[1])
        if isinstance(outcome.error, CgroupUnderWayError):
            self._under_way.setdefault(work.place, work)
            self.writes[work.knob.name, "under way"] += 1
        elif outcome.error is not None or outcome.after is None:
            self._under_way.pop(work.place, None)
            gone = isinstance(outcome.error, CgroupGoneError)
            self.writes[work.knob.name, "gone" if gone else "refused"] += 1
            if outcome.error is not None and not gone:
                self._note_altered(outcome, work)
                self._ledger.failed(work.key, errno=outcome.error.errno, error=str(outcome.error))
            self._inner.refused(
                (work.within, work.knob.name), "" if gone else str(outcome.error or "it could not be read back")
            )
        elif work.action is FileAction.RELEASE:
            self._under_way.pop(work.place, None)
            self.writes[work.knob.name, "restored"] += 1
            self._ledger.restored(work.key, outcome.after)
        else:
            self._under_way.pop(work.place, None)
            self.writes[work.knob.name, "written"] += 1
            policy, reason = ("", "") if work.setting is None else (work.setting.policy, work.setting.reason)
            self._ledger.want(work.key, work.text, policy=policy, reason=reason)
            self._ledger.wrote(work.key, before=outcome.before, after=outcome.after)

    def _guarded(self, steps: Iterable[WriteStep], works: Mapping[tuple[str, str], FileWrite]) -> list[WriteStep]:
        """Has a release or a first write fail if the file changed after the comparison: that value is its owner's."""
        safe: list[WriteStep] = []
        # After a write that resets it, and after its own first of two steps, a file no longer holds the compared value.
        begun = {(path, work.knob.resets) for (path, _), work in works.items()}
        for step in steps:
            place = (step.path, step.knob)
            work = works.get(place)
            first = work is not None and (work.action is FileAction.RELEASE or self._unwritten(work) is not None)
            compared = place not in begun and first
            begun.add(place)
            safe.append(replace(step, expects=work.actual) if compared and work is not None else step)
        return safe

    def _may_follow(self, work: FileWrite) -> bool:
        """Whether the groups inside this one may be written now."""
        mode = self.judge.mode
        return mode.enforce and mode.hold_on(*work.place, work.target.pod_uid) is None

    async def _is_overtaken(self, work: FileWrite, code: int | None) -> bool:
        """Whether the fast path or another program changed what bounds this value after it was planned.

        Then the next pass decides, with the present values.
        """
        # A program that changes them in each pass would hide a refusal for ever.
        if code not in _BETWEEN_FILES or self._overtaken[work.place] >= _OVERTAKEN_MOST:
            self._overtaken.pop(work.place, None)
            return False
        relatives = await self.judge.control_files.overtaken(*work.place)
        if relatives is Relatives.UNFINISHED:
            return True
        if relatives is Relatives.SAME:
            self._overtaken.pop(work.place, None)
            return False
        self._overtaken[work.place] += 1
        return True

    # The fast path

    def _retract(self, target: GroupTarget) -> None:
        """Drop prepared writes that are no longer wanted."""
        container = target.container
        if container is None or container.id not in self._prepared:
            return
        works = self._prepared[container.id]
        remaining = {key: write for key, write in works.items() if write.knob.name in target.settings}
        if len(remaining) == len(works):
            return
        if not remaining:
            self._fastpath.drop(container.id)
            del self._prepared[container.id]
            return
        self._prepared[container.id] = remaining
        self._set_prepared(target, remaining)

    def _prepare(self, target: GroupTarget, fresh: Iterable[FileWrite]) -> None:
        """Prepare the fast path to write this container's settings at the runtime's next signal."""
        container = target.container
        if container is None:
            return
        works: dict[FileKey, FileWrite] = {write.key: write for write in fresh}
        if not target.creating:
            works = self._works_in_force(target, self._prepared.get(container.id, {}))
        for work in works.values():
            if target.creating:
                self.judge.statuses.record(work, SettingState.PREPARED)
        if not works:
            self._fastpath.drop(container.id)
            self._prepared.pop(container.id, None)
            return
        self._prepared[container.id] = works
        self._set_prepared(target, works)

    def _set_prepared(self, target: GroupTarget, works: Mapping[FileKey, FileWrite]) -> None:
        assert target.container is not None
        spec = target.container.spec
        writes = [
            FastWrite(
                write.directory, write.key[2], text, write.key, ahead=not _may_set(spec, write.knob.name, write.version)
            )
            for write in works.values()
            for text in write.knob.writes("", write.text, write.version)
        ]
        if target.creating:
            # The texts of a running container are in the ledger: they were written.
            self._ledger.intend((write.key, write.text) for write in works.values())
        procs = self.judge.hierarchy.trigger_directory(target.group.path)
        self._fastpath.prepare(target.container.id, writes, procs=procs, settled=not target.creating)

    def _works_in_force(self, target: GroupTarget, before: Mapping[FileKey, FileWrite]) -> dict[FileKey, FileWrite]:
        """The settings in force of a container whose runtime has finished."""
        works: dict[FileKey, FileWrite] = {}
        for name, setting in target.settings.items():
            file = self.judge.control_files.find(target.group.path, name)
            status = self.judge.statuses.get((target.group.path, name))
            if file is None or status is None or not status.state.is_in_force():
                continue
            # Slow ones would stop the event loop: of these the next pass corrects what an update has written.
            slow = file.knob.lowering_is_slow or name == _MOVES_PAGES
            if self._ledger.get(file.key) is None or slow or not self.judge.may_write(setting):
                continue
            earlier = before.get(file.key)
            if earlier is not None and earlier.text == status.wanted and earlier.target.signalled == target.signalled:
                works[file.key] = earlier
            else:
                works[file.key] = FileWrite(target, *file, setting, "", "", status.wanted, FileAction.CHANGE)
        return works


def _may_set(spec: RuntimeSpec | None, name: str, version: Version) -> bool:
    """Whether the runtime may set this while it makes the container, or what bounds it. One without a spec may."""
    if spec is None:
        return True
    # The runtime's period makes another share of the same quota, which the kernel compares with the group's above.
    if name == "cpu.quota" and spec.period_us not in {None, 0, DEFAULT_PERIOD_US}:
        return True
    # Either limit written ahead can make the kernel refuse the runtime's write of the other.
    names = MEMORY_PAIR if name in MEMORY_PAIR else (name,)
    return any(spec_text(CATALOG[each], version, spec) is not None for each in names)


def _allowed_in_fastpath(work: FileWrite) -> bool:
    value = work.setting.value if work.setting is not None else None
    if work.knob.name == "memory.swap":
        # v2: nothing is taken out of swap or killed by it. v1: a group in creation has nothing to reclaim.
        return True
    return not (
        work.knob.lowering_is_slow and work.version == 2 and isinstance(value, int) and value < _FAST_LIMIT_BYTES
    )
