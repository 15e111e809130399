"""Sets ``oom_score_adj`` of the processes of BE pods, and restores it. An auxiliary actuator.

After each reconciliation, and periodically for processes that ``exec`` started in a container: list the processes of
every BE container, including those of groups that it has created below its own, compare, write. A forked process has
its parent's value, so most never need a write and have no original of their own: the value of a container's oldest
process is the container's original, and each process with another value has its own recorded. Both are in the store
before the first write. A restore leaves values that are not ours unchanged.

Source: proc(5) on oom_score_adj. The file belongs to the user of its process: others need CAP_DAC_OVERRIDE. A writer
with CAP_SYS_RESOURCE also sets the minimum to which the process itself may return; without it no writer, bypassd
included, writes less than that minimum.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

import msgspec
import trio

from cgroupfs.bounded import whole
from cgroupfs.errors import SourceError, StoreError, errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import ActuatorContext, ActuatorKind, OfflineContext, PeriodicWorker, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import LedgerState, RowCodec, undo_rows
from reconciler.actuators.holds import holding
from reconciler.signals.processes import PodProcesses
from state.entry import LedgerEntry
from state.kinds import PROCESS
from state.ledger import Ledger
from state.memory import OOM_SCORE
from state.model import Setting
from state.plan import OomScorePlan
from state.setting_state import SettingState
from state.undo import RestoreOutcome, RestoreResult

FILE: Final = "oom_score_adj"
_OF_PROCESS: Final = f"{FILE} of "
"""Prefix of the ``pid:start`` of a process that has an original of its own."""


class OomScoreState(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one container.

    ``ours``: the values that we have written, the newest last. ``odd``: by ``pid:start``, the originals of processes
    that differed from the container's oldest one.
    """

    pod_uid: str
    inode: int
    ours: list[int]
    original: int
    odd: dict[str, int] = {}


class OomScoreRows(msgspec.Struct, frozen=True, kw_only=True):
    """The records of all containers, by group path."""

    containers: Mapping[str, OomScoreState] = {}


def _load(rows: Iterable[LedgerEntry]) -> OomScoreRows:
    containers: dict[str, OomScoreState] = {}
    odd: dict[str, dict[str, int]] = {}
    for row in rows:
        with suppress(ValueError):
            if row.original is None or not (row.file == FILE or row.file.startswith(_OF_PROCESS)):
                continue
            original, ours = whole(row.original), [whole(text) for text in row.ours]
            if row.file == FILE:
                containers[row.path] = OomScoreState(
                    pod_uid=row.pod_uid or "", inode=row.inode, ours=ours, original=original
                )
            else:
                process = row.file.removeprefix(_OF_PROCESS)
                pid, _, start = process.partition(":")
                whole(pid), whole(start)
                odd.setdefault(row.path, {})[process] = original
    return OomScoreRows(
        containers={path: msgspec.structs.replace(record, odd=odd.get(path, {})) for path, record in containers.items()}
    )


def _dump(state: OomScoreRows) -> Iterable[LedgerEntry]:
    for path, record in state.containers.items():
        originals = {
            FILE: record.original,
            **{f"{_OF_PROCESS}{process}": value for process, value in record.odd.items()},
        }
        ours = tuple(map(str, record.ours))
        for field, original in originals.items():
            yield LedgerEntry(
                kind=PROCESS,
                controller="",
                path=path,
                file=field,
                knob=OOM_SCORE,
                inode=record.inode,
                original=str(original),
                ours=ours,
                wanted=ours[-1] if ours else None,
                pod_uid=record.pod_uid or None,
                policy=OomScores.name,
            )


CODEC: Final = RowCodec(kind=PROCESS, load=_load, dump=_dump)


class OomScoreProcesses:
    """The processes of groups and their values, from /proc. All methods block and run in a thread."""

    def __init__(self, hierarchy: Hierarchy, root: str, files: FileOps) -> None:
        self._hierarchy = hierarchy
        self._pod_processes = PodProcesses(hierarchy, files)
        self._proc = os.path.join(root, "proc")
        self._files = files

    def scores_of(self, path: str, inode: int = 0) -> dict[str, int]:
        """``pid:start`` -> value, of all processes in a group and below it, the oldest first; empty if it is gone."""
        rows: list[tuple[int, str, int]] = []
        try:
            if inode and self._files.inode(self._hierarchy.trigger_directory(path)) != inode:
                return {}
        except OSError:
            return {}
        for pid in map(str, self._pod_processes.of_group(path)):
            try:
                start = self._start(pid)
                rows.append((start, f"{pid}:{start}", int(self._files.read(f"{self._proc}/{pid}", FILE))))
            except (OSError, ValueError):
                continue  # the process has exited
        return {key: number for _, key, number in sorted(rows)}

    def write(self, key: str, number: int) -> str:
        """Set one process's value. Returns an empty text, ``gone``, or the errno's name."""
        pid, _, start = key.partition(":")
        try:
            if self._start(pid) != int(start):
                return "gone"
            self._files.write(f"{self._proc}/{pid}", FILE, str(number))
        except ProcessLookupError:
            return "gone"
        except FileNotFoundError:
            return "gone"
        except (OSError, ValueError) as exc:
            return errno_name(exc.errno) if isinstance(exc, OSError) else "gone"
        return ""

    def _start(self, pid: str) -> int:
        # The name in brackets may contain any character, brackets too: count from the last bracket.
        return int(self._files.read(f"{self._proc}/{pid}", "stat").rpartition(")")[2].split()[19])

    def restore(self, path: str, record: OomScoreState) -> list[RestoreResult]:
        """Restore every process of a container to its own, else the container's original; one result per container."""
        failed = Counter[str]()
        restored = 0
        for key, number in self.scores_of(path, record.inode).items():
            original = record.odd.get(key, record.original)
            if number in record.ours and number != original:
                outcome = self.write(key, original)
                restored += not outcome
                failed[outcome] += bool(outcome) and outcome != "gone"
        why = "; ".join(f"{count} processes: {code}" for code, count in sorted(failed.items()) if count)
        undo = RestoreOutcome.REFUSED if why else RestoreOutcome.RESTORED if restored else RestoreOutcome.ALREADY
        return [RestoreResult(path=path, file=FILE, undo=undo, text=str(record.original), detail=why)]


def undo(
    processes: OomScoreProcesses, state: OomScoreRows, only: str | None = None
) -> tuple[list[RestoreResult], OomScoreRows]:
    """Restore all containers, or those of one pod (uid); returns the results and the remaining state. For a thread."""
    chosen = {path: record for path, record in sorted(state.containers.items()) if only in {None, record.pod_uid}}
    done = [result for path, record in chosen.items() for result in processes.restore(path, record)]
    failed = {result.path for result in done if not result.ok}
    left = {path: record for path, record in state.containers.items() if path not in chosen or path in failed}
    return done, OomScoreRows(containers=left)


def restore_scores(
    hierarchy: Hierarchy, ledger: Ledger, only: str | None = None, *, root: str = "/", files: FileOps = REAL
) -> list[RestoreResult]:
    """Restore everything while no daemon runs. Errors: `StoreError` if the result cannot be recorded."""
    processes = OomScoreProcesses(hierarchy, root, files)
    return undo_rows(ledger, CODEC, lambda state: undo(processes, state, only))


@final
class OomScores:
    """The auxiliary actuator for ``oom_score_adj``."""

    name = "oom_score"

    def __init__(
        self,
        hierarchy: Hierarchy,
        ledger: Ledger,
        lane: trio.CapacityLimiter,
        *,
        root: str = "/",
        files: FileOps = REAL,
    ) -> None:
        """``lane``: the store's one-thread limiter."""
        self.counts: Counter[str] = Counter()
        self.standings: dict[str, dict[str, SettingStatus]] = {}
        """By group path, then knob; as `cgroup.status.StatusTable.by_group`."""
        self._processes = OomScoreProcesses(hierarchy, root, files)
        self._rows = LedgerState(CODEC, ledger, lane)
        self._worker = PeriodicWorker(self._sweep, _period_s)
        self._problems: list[str] = []

    # The interface of an auxiliary actuator

    def planned(self, situation: PlanSnapshot) -> None:
        """A reconciliation is over."""
        self._worker.planned(situation, wake=situation.plan.oom_scores is not None or bool(self._containers))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sweep after each reconciliation, and periodically, for ever."""
        await self._worker.run(task_status=task_status)

    async def sweep(self) -> None:
        """Bring all BE processes to the newest plan's values; one sweep at a time."""
        await self._worker.sweep()

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Restore everything, or one pod's containers; the other pods keep their values."""
        async with self._worker.restoring():
            chosen = {
                path: record for path, record in sorted(self._containers.items()) if only in {None, record.pod_uid}
            }
            return await self._restore(chosen)

    def status(self) -> Mapping[str, object]:
        """The containers that have a value of ours, and counts."""
        return {
            "containers": {path: record.ours[-1] for path, record in sorted(self._containers.items())},
            "counts": dict(sorted(self.counts.items())),
        }

    def problems(self) -> Sequence[str]:
        """The refused writes of the last sweep."""
        return self._problems

    # One sweep

    @property
    def _containers(self) -> Mapping[str, OomScoreState]:
        """The containers that have a value of ours."""
        return self._rows.now.containers

    async def _sweep(self, situation: PlanSnapshot) -> None:
        self._problems = []
        wanted, left = self._wanted(situation)
        self.standings = {path: {OOM_SCORE: status} for path, status in left.items() if status is not None}
        await self._restore(await self._worker.work(partial(self._unwanted, situation, {*wanted, *left})))
        records, writes = await self._worker.work(partial(self._compare, wanted))
        unrecorded: set[str] = set()
        if records and not await self._save({**self._containers, **records}):
            unrecorded = {path for path in records if writes.pop(path, None) is not None}
        outcomes = await self._worker.work(partial(self._write, writes))
        for path, (setting, _) in wanted.items():
            self.standings[path] = {OOM_SCORE: _status(setting, outcomes.get(path), recorded=path not in unrecorded)}
        refused = sum(outcomes.values(), Counter[str]())
        self._problems += [
            f"{count} processes keep their oom_score_adj: {code}" for code, count in refused.items() if code
        ]

    def _unwanted(self, situation: PlanSnapshot, managed: Collection[str]) -> dict[str, OomScoreState]:
        """The containers with a row that are not in the view any more: restored if writing is allowed.

        Otherwise only rows without a process are dropped: the group is gone, and nothing is written.
        """
        plan = situation.plan.oom_scores or OomScorePlan()
        read_only = not situation.enforce or plan.dry_run
        return {
            path: record
            for path, record in self._containers.items()
            if path not in managed
            and (
                not (read_only or holding(situation.holds, path=path, knob=OOM_SCORE, pod_uid=record.pod_uid or None))
                or not self._processes.scores_of(path, record.inode)
            )
        }

    @staticmethod
    def _wanted(situation: PlanSnapshot) -> tuple[dict[str, tuple[Setting, int]], dict[str, SettingStatus | None]]:
        """By container: the wanted setting and the inode; and the status of those that are left unchanged."""
        plan = situation.plan.oom_scores or OomScorePlan()
        wanted: dict[str, tuple[Setting, int]] = {}
        left: dict[str, SettingStatus | None] = {}
        for uid, pod in sorted(situation.view.pods.items()):
            for container in pod.containers:
                path = container.group.path
                setting = plan.settings.get(path)
                hold = holding(situation.holds, path=path, knob=OOM_SCORE, pod_uid=uid)
                if hold is not None:
                    left[path] = _unchanged_status(setting, SettingState.HELD, f"{hold.reason} (by {hold.by})")
                elif not situation.enforce or plan.dry_run:
                    left[path] = _unchanged_status(setting, SettingState.WOULD_WRITE, "")
                elif setting is not None:
                    wanted[path] = setting, container.group.inode
        return wanted, left

    def _compare(
        self, wanted: Mapping[str, tuple[Setting, int]]
    ) -> tuple[dict[str, OomScoreState], dict[str, tuple[int, list[str]]]]:
        """In the thread: the new records, and the processes whose value differs from the wanted one."""
        records: dict[str, OomScoreState] = {}
        writes: dict[str, tuple[int, list[str]]] = {}
        for path, (setting, inode) in wanted.items():
            number, uid = setting.value, setting.pod_uid or ""
            assert isinstance(number, int)
            numbers = self._processes.scores_of(path, inode)
            record = self._containers.get(path)
            if record is not None and record.inode != inode:
                record = None
            differ = [key for key, has in numbers.items() if has != number]
            if not differ:
                continue
            # A former value of ours already has its original. At the first write no value is ours, and a process that
            # has the wanted value has it as its own original.
            others = numbers.keys() if record is None else differ
            if record is None:
                original = next(iter(numbers.values()))
                record = OomScoreState(pod_uid=uid, inode=inode, ours=[], original=original)
            odd = {key: numbers[key] for key in others if numbers[key] not in {record.original, *record.ours}}
            after = OomScoreState(
                pod_uid=uid,
                inode=inode,
                ours=[*(our for our in record.ours if our != number), number],
                original=record.original,
                odd={**odd, **{key: has for key, has in record.odd.items() if key in numbers}},
            )
            if after != self._containers.get(path):
                records[path] = after
            writes[path] = number, differ
        return records, writes

    def _write(self, writes: Mapping[str, tuple[int, list[str]]]) -> dict[str, Counter[str]]:
        """In the thread. By container: the outcomes, an empty one for a write; exited processes do not count."""
        counts: dict[str, Counter[str]] = {}
        for path, (number, keys) in writes.items():
            counts[path] = Counter(self._processes.write(key, number) for key in keys)
            self.counts.update({outcome or "written": count for outcome, count in counts[path].items()})
            del counts[path]["gone"]
        return counts

    async def _restore(self, chosen: Mapping[str, OomScoreState]) -> list[RestoreResult]:
        done: list[RestoreResult] = []
        if not chosen:
            return done
        for path, record in chosen.items():
            done += await self._worker.work(partial(self._processes.restore, path, record))
        self._problems += [f"{result.path}: {result.detail}" for result in done if not result.ok]
        finished = {result.path for result in done if result.ok}
        await self._save(
            {path: record for path, record in self._containers.items() if path not in finished}, dropped="restored"
        )
        return done

    async def _save(self, containers: Mapping[str, OomScoreState], *, dropped: str = "gone") -> bool:
        """Record these instead; returns whether that is durable, and in force."""
        try:
            await self._rows.save(OomScoreRows(containers=containers), dropped=dropped)
        except StoreError as exc:
            self._problems.append(str(exc))
            return False
        return True


def _period_s(situation: PlanSnapshot) -> float | None:
    plan = situation.plan.oom_scores
    return plan.sweep_s if plan is not None else None


def _unchanged_status(setting: Setting | None, state: SettingState, detail: str) -> SettingStatus | None:
    if setting is None:
        return None
    return SettingStatus(setting, state, str(setting.value), None, detail or setting.reason, time.time())


def _status(setting: Setting, outcome: Counter[str] | None, *, recorded: bool) -> SettingStatus:
    """The status of one container after a sweep."""
    wanted = str(setting.value)
    refused = ", ".join(f"{count} processes: {code}" for code, count in sorted((outcome or {}).items()) if code)
    if not recorded:
        return SettingStatus(
            setting,
            SettingState.NOT_RECORDED,
            wanted,
            None,
            "the oom_score_adj of its processes cannot be recorded",
            time.time(),
        )
    if refused:
        return SettingStatus(setting, SettingState.REFUSED, wanted, None, refused, time.time())
    return SettingStatus(
        setting, SettingState.WRITTEN if outcome else SettingState.IN_PLACE, wanted, wanted, "", time.time()
    )


def _build(context: ActuatorContext) -> OomScores:
    return OomScores(context.hierarchy, context.ledger, context.store_lane, root=context.root, files=context.files)


def _undo(context: OfflineContext) -> Sequence[RestoreResult]:
    try:
        hierarchy = Hierarchy.detect(context.root)
    except SourceError:
        return ()  # without cgroups nothing was ever written
    return restore_scores(hierarchy, context.ledger, context.only, root=context.root)


ACTUATOR: Final = ActuatorKind(codecs={PROCESS: CODEC}, build=_build, undo=_undo)
