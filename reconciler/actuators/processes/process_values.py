"""Brings one value of every process, or of every thread, of BE containers to the plan, and restores it.

The base of the auxiliary actuators of this package. A child has its parent's value, so most members never need a write
and have no original of their own: each container has one original, and each member with another value has its own
recorded (it is odd). What a container can cost is bounded.

Longer than other modules because a sweep and its undoing are read together: both rest on the same two kinds of
originals, a container's and an odd member's, and on the order in which these become durable.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeVar, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError, StoreError, errno_name
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.lines import stat_numbers
from reconciler.actuators.base import ActuatorContext, OfflineContext, PeriodicActuator, PeriodicWorker, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import LedgerState, undo_rows
from reconciler.actuators.holds import holding
from reconciler.actuators.processes.early_sweeps import EarlySweeps
from reconciler.actuators.processes.value_records import (
    ContainerRecord,
    ContainerRecords,
    ProcessValueKind,
    codec_of,
    with_records,
)
from reconciler.runtime.cooperative import TimeSlice
from state.entry import RestoreOutcome, RestoreResult
from state.model import GroupRef, Phase, Setting
from state.plan import ProcessValuePlan
from state.setting_state import SettingState

T = TypeVar("T")

_LEFT_S: Final = 60.0
"""Between two attempts to restore what is left after the policy's end."""
_ROUNDS: Final = 4
"""Rounds of one sweep, and of one restore: the next listing finds what was forked after the last one."""
_MOST_READ: Final = 20_000
"""Members that one sweep reads: 15 ms for policies, 0.3 s for files of /proc, and 0.5 s more where all are new."""
_MOST_ODD: Final = 1_000
"""Odd members of one container: each is a row of the ledger."""
_MOST_LISTINGS: Final = 64
"""Of one container in one round, if members are set as they are listed: with few members some 30 us each."""
_FORK_S: Final = 0.002
"""Longer than the fork of a small process takes, of which there may be thousands a second."""
_MOST_LISTED: Final = 4_000
"""Members in these listings: of one container, some 10 ms."""
_MOST_LISTED_IN_ALL: Final = 20_000
"""The same, of all containers of a round."""


_FEW: Final = 64
"""Members of a container that the loop reads itself, some 0.1 ms: waking up a thread costs more than that."""
_MOST_IN_LOOP: Final = 4 * _FEW
"""A container that has as many by now is read by the thread."""


class MemberAccess(Protocol):
    """Reads and writes the value of single members. Errors: `OSError`."""

    def ids(self, path: str) -> Iterable[int]:
        """The members of one group and all below it, as they are listed; a 0 for each group is listed, too."""

    def value_of(self, number: int) -> int:
        """The value of one member. Errors: `ValueError` as well."""

    def set_value(self, number: int, value: int) -> None: ...


class MembersSeen(NamedTuple):
    """One reading of a container. ``values``: by ``id:start``, the oldest first, without what was not requested.

    ``total``: the members read; ``pinned``: those that are never changed, which ``values`` lacks; ``ended``: those that
    exited meanwhile; ``listed``: the members and groups.
    """

    values: dict[str, int]
    total: int = 0
    pinned: int = 0
    ended: int = 0
    listed: int = 0


@final
class MemberValues:
    """The members of groups and their values. Many of them are read in a thread."""

    def __init__(
        self, kind: ProcessValueKind, access: MemberAccess, hierarchy: Hierarchy, root: str, files: FileOps
    ) -> None:
        self._kind = kind
        self._access = access
        self._hierarchy = hierarchy
        self._proc = os.path.join(root, "proc")
        self._files = files

    def of_group(
        self, path: str, inode: int = 0, *, without: int | None = None, most: int | None = _MOST_READ
    ) -> MembersSeen:
        """All members of a group and below it, except those that have the value ``without``; none if it was removed.

        ``most``: so many members and groups are read; None: all.
        """
        rows: list[tuple[int, str, int]] = []
        total = pinned = ended = listed = 0
        try:
            if inode and self._files.inode(self._hierarchy.trigger_directory(path)) != inode:
                return MembersSeen({})  # a later group of the same path
        except OSError:
            return MembersSeen({})
        for number in islice(self._access.ids(path), most):
            listed += 1
            if not number:
                continue
            try:
                value = self._access.value_of(number)
                total += 1
                if self._kind.pinned(value):
                    pinned += 1
                elif value != without:
                    # The kernel reuses ids; the start time identifies the member. It is one more file to read.
                    start = self._start(number)
                    rows.append((start, f"{number}:{start}", value))
            except (OSError, ValueError):
                ended += 1
        return MembersSeen({key: value for _, key, value in sorted(rows)}, total, pinned, ended, listed)

    def set_at_once(self, path: str, value: int, most: int) -> tuple[int, int]:
        """Set members as they are listed until three listings find none to set and none that has exited.

        For members that exist for less time than a round takes, each forked by the one before: what a set member forks
        inherits the value. ``most``: members in all listings. Returns the number of set members, and of listed ones.
        """
        done = listed = quiet = 0
        forks = False
        for _ in range(_MOST_LISTINGS):
            numbers = tuple(filter(None, islice(self._access.ids(path), _MOST_READ)))
            moved = False
            # The newest first: they are the ones that exit soon.
            for number in numbers[::-1][: most - listed]:
                try:
                    # Without its start: to read it takes longer than some members exist, and the kernel does not reuse
                    # an id within one listing.
                    if self._access.value_of(number) in self._kind.at_once:
                        self._access.set_value(number, value)
                        done += 1
                        moved = True
                except (ProcessLookupError, FileNotFoundError, ValueError):
                    moved = True  # it has exited: it may have forked before
                except OSError:
                    return done, listed + len(numbers)  # refused: the next round reports it
            listed += len(numbers)
            quiet = 0 if moved else quiet + 1
            forks |= moved
            if listed >= most or (quiet == 2 and not forks):
                break
            if quiet == 2:
                # A child of a fork that has begun is not listed yet, and has the value that its parent had then.
                time.sleep(_FORK_S)
                quiet, forks = 1, False
        return done, listed

    def has(self, key: str) -> bool:
        try:
            return self._is_same(key)
        except (OSError, ValueError):
            return False

    def write(self, key: str, value: int) -> str:
        """Set one member's value. Returns an empty text, ``gone``, or the errno's name."""
        try:
            if not self._is_same(key):
                return "gone"
            self._access.set_value(int(key.partition(":")[0]), value)
        except (ProcessLookupError, FileNotFoundError, ValueError):
            return "gone"
        except OSError as exc:
            return errno_name(exc.errno)
        return ""

    def _is_same(self, key: str) -> bool:
        number, _, start = key.partition(":")
        return self._start(int(number)) == int(start)

    def _start(self, number: int) -> int:
        (start,) = stat_numbers(self._files.read(f"{self._proc}/{number}", "stat"), 22)
        return start

    def restore(self, path: str, record: ContainerRecord) -> RestoreResult:
        """Restore every member of a container to its own original, else to the container's."""
        failed = Counter[str]()
        restored = 0
        for number in range(_ROUNDS + 1):
            due = {
                key: original
                # A member that is not read would keep our value after the end of its row.
                for key, value in self.of_group(path, record.inode, most=None).values.items()
                if value in record.ours and value != (original := record.odd.get(key, record.original))
            }
            if number == _ROUNDS and due:
                failed["started with it as others were restored"] = len(due)
                break
            outcomes = Counter(self.write(key, original) for key, original in due.items())
            restored += outcomes.pop("", 0)
            del outcomes["gone"]
            failed = outcomes
            if not due or failed:
                break
        why = "; ".join(f"{count} {self._kind.members}: {code}" for code, count in sorted(failed.items()))
        undo = RestoreOutcome.REFUSED if why else RestoreOutcome.RESTORED if restored else RestoreOutcome.ALREADY
        text = self._kind.text(record.original)
        return RestoreResult(path=path, file=self._kind.file, undo=undo, text=text, detail=why)


def _undo(
    members: MemberValues, state: ContainerRecords, only: str | None
) -> tuple[list[RestoreResult], ContainerRecords]:
    """Restore all containers, or those of one pod (uid); returns the results and the remaining state. For a thread."""
    chosen = _chosen(state.containers, only)
    done = [members.restore(path, record) for path, record in chosen.items()]
    finished = {result.path for result in done if result.ok}
    left = {path: record for path, record in state.containers.items() if path not in finished}
    return done, ContainerRecords(containers=left)


def _chosen(containers: Mapping[str, ContainerRecord], only: str | None) -> dict[str, ContainerRecord]:
    return {path: record for path, record in sorted(containers.items()) if only in {None, record.pod_uid}}


def undo_offline(
    kind: ProcessValueKind, access: Callable[[Hierarchy], MemberAccess], context: OfflineContext
) -> Sequence[RestoreResult]:
    """Restore everything while no daemon runs. Errors: `StoreError` if the result cannot be recorded."""
    try:
        hierarchy = Hierarchy.detect(context.root)
    except SourceError:
        return ()  # without cgroups nothing was ever written
    members = MemberValues(kind, access(hierarchy), hierarchy, context.root, context.files)
    return undo_rows(context.ledger, codec_of(kind), lambda state: _undo(members, state, context.only))


def _bounded(record: ContainerRecord, wanted: int) -> tuple[ContainerRecord, AbstractSet[str]]:
    """The record with as many odd members as it may have, and the members left out."""
    if len(record.odd) <= _MOST_ODD:
        return record, frozenset()
    # Last those that have the wanted value already: only a restore would need their original.
    order = sorted(record.odd, key=lambda key: record.odd[key] == wanted)
    odd = {key: record.odd[key] for key in order[:_MOST_ODD]}
    return replace(record, odd=odd), record.odd.keys() - odd.keys()


class _Outcome(NamedTuple):
    """One sweep of one container. ``written`` counts outcomes, by errno's name; the empty one is a write.

    ``restless``: members that had another value again when the last writes were read back; ``listed``: the members and
    groups that were read.
    """

    written: Counter[str]
    kept: int = 0
    total: int = 0
    problem: str = ""
    restless: int = 0
    listed: int = 0


class _Due(NamedTuple):
    """What is to be written in one container; ``record`` None: the recorded one covers it."""

    value: int
    keys: list[str]
    record: ContainerRecord | None


class _Demand(NamedTuple):
    """What the plan wants of one container. ``complete``: the runtime has created it."""

    group: GroupRef
    container_id: str
    complete: bool
    setting: Setting


class _Comparison(NamedTuple):
    """One reading of containers. ``room``: the members that may still be read; ``stopped``: where that ended."""

    room: int
    seen: dict[str, _Outcome]
    due: dict[str, _Due]
    stopped: str


class ProcessValueActuator(PeriodicActuator):
    def __init__(self, kind: ProcessValueKind, access: MemberAccess, context: ActuatorContext) -> None:
        self.counts: Counter[str] = Counter()
        self._kind = kind
        self._members = MemberValues(kind, access, context.hierarchy, context.root, context.files)
        self._rows = LedgerState(codec_of(kind), context.ledger, context.store_lane)
        self._saving = trio.Lock()
        super().__init__(PeriodicWorker(self._sweep, self._period_s))
        self._problems: list[str] = []
        self._kept: dict[str, int] = {}
        self._members_of: dict[str, int] = {}
        """How many members and groups a container had when it was last read."""
        self._demanded: Mapping[str, _Demand] = {}
        self._early = EarlySweeps(kind.early_s)
        self._changed: set[str] = set()
        """The containers for which the plan wants something else than at the last sweep."""
        self._whole = False
        """The next sweep reads every container."""
        self._swept_at = -math.inf
        """Of the last such sweep (trio's clock)."""
        self._first = ""
        """The container with which the next sweep begins: those before it have used up the last one."""

    # The interface of an auxiliary actuator

    def planned(self, situation: PlanSnapshot) -> None:
        """A reconciliation is over: sweep now the containers for which it wants another value than the last one."""
        before, then = self._worker.situation, self._demanded
        self._demanded = now = self._demand(situation)
        whole = before is None or self._general(before) != self._general(situation)
        changed = {path for path in then.keys() | now.keys() if then.get(path) != now.get(path)}
        if changed or whole:
            self._changed |= changed
            self._whole |= whole
            complete = {want.group: self._enters_unseen(want.container_id) for want in now.values() if want.complete}
            self._early.follow(complete, trio.current_time())
        concerned = self._kind.part(situation.plan) is not None or bool(self._containers)
        self._worker.planned(situation, wake=concerned and (whole or bool(changed)))

    def _enters_unseen(self, container_id: str) -> bool:
        """Whether processes of a new container may be without the value and no event shows when they enter."""
        del container_id
        return True

    def _demand(self, situation: PlanSnapshot) -> Mapping[str, _Demand]:
        """By path: the containers with a setting."""
        plan = self._kind.part(situation.plan)
        if plan is None or not plan.settings:
            return {}
        return {
            container.group.path: _Demand(container.group, container.id, container.phase is not Phase.CREATING, setting)
            for pod in situation.view.pods.values()
            for container in pod.containers
            if (setting := plan.settings.get(container.group.path)) is not None
        }

    def _general(self, situation: PlanSnapshot) -> object:
        """What concerns every container."""
        plan = self._kind.part(situation.plan)
        return situation.enforce, situation.holds, (plan.sweep_s, plan.dry_run) if plan is not None else None

    async def sweep(self) -> None:
        """Bring all members to the newest plan's values; one sweep at a time."""
        self._whole = True
        await super().sweep()

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Restore everything, or one pod's containers; the other pods keep their values."""
        async with self._worker.restoring():
            return await self._restore(_chosen(self._containers, only))

    def status(self) -> Mapping[str, object]:
        """The containers that have a value of ours, those with members that keep their own, and counts."""
        kind = self._kind
        return {
            "containers": {path: _plain(kind, record.ours[-1]) for path, record in sorted(self._containers.items())},
            "kept": dict(sorted(self._kept.items())),
            "counts": dict(sorted(self.counts.items())),
            "sweeps": self._worker.sweeps,
            "last_sweep_s": self._worker.swept_s,
        }

    def problems(self) -> Sequence[str]:
        """The refused writes of the last sweep."""
        return self._problems

    # One sweep

    @property
    def _containers(self) -> Mapping[str, ContainerRecord]:
        return self._rows.now.containers

    def _plan_period_s(self, situation: PlanSnapshot) -> float | None:
        plan = self._kind.part(situation.plan)
        if plan is not None:
            return plan.sweep_s
        # Originals that could not be restored.
        return _LEFT_S if situation.enforce and self._containers else None

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        # Periodic, as ``exec`` starts processes in a container without an event.
        period_s = self._plan_period_s(situation)
        if period_s is None:
            return None
        due = min(self._swept_at + period_s, self._early.next_at())
        return max(0.0, due - trio.current_time())

    async def _sweep(self, situation: PlanSnapshot) -> None:
        if self._is_whole(situation):
            await self._sweep_some(situation, None)
        elif some := self._changed.union(self._early.take(trio.current_time())):
            self._changed = set()
            # What is known from the last sweep of all containers remains.
            first, problems = self._first, self._problems
            await self._sweep_some(situation, some)
            self._first, self._problems = first or self._first, list(dict.fromkeys([*problems, *self._problems]))

    async def _sweep_some(self, situation: PlanSnapshot, only: AbstractSet[str] | None) -> None:
        """``only``: these containers; None: all."""
        self._problems = []
        wanted, left = self._wanted(situation, only)
        # The records of this moment: a later one may be of a container that this situation does not have yet.
        recorded = self._containers.keys() if only is None else self._containers.keys() & only
        plan = self._kind.part(situation.plan)
        # What a dry run shows is restored; a hold is decided with each container.
        shown = situation.enforce and plan is not None and plan.dry_run
        unmanaged = {path: self._containers[path] for path in recorded - ({*wanted} if shown else {*wanted, *left})}
        if unmanaged:
            await self._restore(await self._worker.work(partial(self._unwanted, situation, unmanaged)))
        await self._write_until_equal(wanted, left, only)

    def _is_whole(self, situation: PlanSnapshot) -> bool:
        """Whether this sweep reads every container."""
        now, period_s = trio.current_time(), self._plan_period_s(situation)
        if not self._whole and period_s is not None and now < self._swept_at + period_s:
            return False
        self._whole, self._swept_at = False, now
        self._changed = set()
        self._early.take(now)
        return True

    async def _write_until_equal(
        self,
        wanted: Mapping[str, tuple[Setting, int]],
        left: Mapping[str, SettingStatus | None],
        only: AbstractSet[str] | None,
    ) -> None:
        """Bring the members of these containers to the plan, and note the status of both.

        ``only``: the containers concerned, whose former status ends; None: all.
        """
        outcomes: dict[str, _Outcome] = {}
        # From `_first` on, then from the beginning.
        order = sorted(wanted, key=lambda path: (path < self._first, path))
        self._first, room = "", _MOST_READ
        for number in range(_ROUNDS + 1):
            compared = await self._compared({path: wanted[path] for path in order}, room)
            room, found, writes = compared.room, compared.seen, compared.due
            if number == 0:
                self._first = compared.stopped
            if number == _ROUNDS:
                # Only read back: what was written in the last round counts as far as it is there.
                for path in found:
                    restless = len(writes[path].keys) if path in writes else 0
                    outcomes[path] = outcomes[path]._replace(total=found[path].total, restless=restless)
                break
            records = {path: write.record for path, write in writes.items() if write.record is not None}
            if records and not await self._save(partial(with_records, records)):
                found |= dict.fromkeys(records, _Outcome(Counter(), problem=f"{self._kind.knob} cannot be recorded"))
                writes = {path: write for path, write in writes.items() if path not in records}
            written = await self._worker.work(partial(self._write, writes)) if writes else {}
            for path, seen in found.items():
                before = outcomes[path].written if path in outcomes else Counter[str]()
                outcomes[path] = seen._replace(written=before + written.get(path, Counter()))
            # A refusal would be repeated as it is.
            order = [path for path, counts in written.items() if not any(counts)]
            if not order:
                break
        if only is None:
            self._members_of = {path: count for path, count in self._members_of.items() if path in wanted}
        self._kept = _others(self._kept, only) | {
            path: outcome.kept for path, outcome in outcomes.items() if outcome.kept
        }
        self._statuses = {
            **_others(self._statuses, only),
            **{path: {self._kind.knob: status} for path, status in left.items() if status is not None},
            **{path: {self._kind.knob: self._status(wanted[path][0], outcomes.get(path))} for path in wanted},
        }
        refused = sum((outcome.written for outcome in outcomes.values()), Counter[str]())
        self._problems += [
            f"{count} {self._kind.members} keep their {self._kind.file}: {code}"
            for code, count in refused.items()
            if code
        ]

    def _unwanted(
        self, situation: PlanSnapshot, unmanaged: Mapping[str, ContainerRecord]
    ) -> dict[str, ContainerRecord]:
        """The containers to restore, of those for which no value is wanted any more."""
        # Also without permission to write where no member is left: a restore writes nothing there, and drops the row.
        return {
            path: record
            for path, record in unmanaged.items()
            if (situation.enforce and not self._held(situation, path, record.pod_uid or None))
            or not self._members.of_group(path, record.inode).total
        }

    def _held(self, situation: PlanSnapshot, path: str, uid: str | None) -> str:
        """The reason of a hold that covers a container; empty: none."""
        hold = holding(situation.holds, path=path, knob=self._kind.knob, pod_uid=uid)
        return f"{hold.reason} (by {hold.by})" if hold is not None else ""

    def _wanted(
        self, situation: PlanSnapshot, only: AbstractSet[str] | None
    ) -> tuple[dict[str, tuple[Setting, int]], dict[str, SettingStatus | None]]:
        """By container: the wanted setting and the inode; and the status of those that are left unchanged.

        ``only``: of these; None: of all.
        """
        plan = self._kind.part(situation.plan) or ProcessValuePlan()
        wanted: dict[str, tuple[Setting, int]] = {}
        left: dict[str, SettingStatus | None] = {}
        for uid, pod in sorted(situation.view.pods.items()):
            for container in pod.containers:
                path = container.group.path
                if only is not None and path not in only:
                    continue
                setting = plan.settings.get(path)
                if held := self._held(situation, path, uid):
                    left[path] = self._unchanged(setting, SettingState.HELD, held)
                elif not situation.enforce or plan.dry_run:
                    left[path] = self._unchanged(setting, SettingState.WOULD_WRITE)
                elif setting is not None and container.phase is Phase.CREATING:
                    left[path] = self._unchanged(setting, self._before_signal(container.id))
                elif setting is not None:
                    wanted[path] = setting, container.group.inode
        return wanted, left

    def _before_signal(self, container_id: str) -> SettingState:
        del container_id
        return SettingState.WAITING

    async def _compared(self, wanted: Mapping[str, tuple[Setting, int]], room: int) -> _Comparison:
        """Compare these containers, in this order: in the loop where each had few members, else in the thread."""
        if not all(self._members_of.get(path, _MOST_READ) <= _FEW for path in wanted):
            result = await self._worker.work(partial(self._compare, wanted, room))
        else:
            slices = TimeSlice()
            result = _Comparison(room, {}, {}, "")
            for path, item in wanted.items():
                compared = self._compare({path: item}, result.room, most=_MOST_IN_LOOP)
                if compared.stopped and result.room > 0:
                    # It has grown since its last reading.
                    compared = await self._worker.work(partial(self._compare, {path: item}, result.room))
                result.seen.update(compared.seen)
                result.due.update(compared.due)
                result = result._replace(room=compared.room, stopped=compared.stopped)
                if result.stopped:
                    break
                await slices.checkpoint()
        self._members_of |= {path: outcome.listed for path, outcome in result.seen.items()}
        return result

    def _compare(self, wanted: Mapping[str, tuple[Setting, int]], room: int, *, most: int = _MOST_READ) -> _Comparison:
        """Read these containers, in this order, until ``room`` members have been read, or one has ``most`` or more."""
        seen: dict[str, _Outcome] = {}
        due: dict[str, _Due] = {}
        stopped = ""
        for path, (setting, inode) in wanted.items():
            if room <= 0:
                stopped = path
                break
            assert isinstance(setting.value, int)
            record = self._containers.get(path)
            if record is not None and record.inode != inode:
                record = None
            # At the first write the wanted value, too, is a member's own.
            without = None if record is None else setting.value
            reading = self._members.of_group(path, inode, without=without, most=most)
            if most < _MOST_READ and reading.listed >= most:
                stopped = path
                break
            room -= reading.total
            keys = [key for key, value in reading.values.items() if value != setting.value]
            own = sum(value == setting.value for value in (record.odd if record is not None else {}).values())
            left = 0
            # A member that has exited meanwhile may have forked another.
            if keys or (reading.ended and self._kind.at_once):
                after = self._recorded(setting, inode, record, reading.values)
                after, beyond = _bounded(after, setting.value)
                # What has no room for its original is left, or members without number would keep out the others.
                kept = {key for key in keys if key in beyond and reading.values[key] not in self._kind.unrecorded}
                left, keys = len(kept), [key for key in keys if key not in kept]
                if keys or reading.ended:
                    due[path] = _Due(setting.value, keys, after if after != record else None)
            outcome = _Outcome(Counter(), reading.pinned + own + left, reading.total, listed=reading.listed)
            seen[path] = outcome
        return _Comparison(room, seen, due, stopped)

    def _recorded(
        self, setting: Setting, inode: int, record: ContainerRecord | None, values: Mapping[str, int]
    ) -> ContainerRecord:
        """The record of a container whose members get a value. A former value of ours already has its original."""
        number = setting.value
        assert isinstance(number, int)
        if record is None:
            record = ContainerRecord(
                pod_uid=setting.pod_uid or "", inode=inode, ours=[], original=self._kind.original(values)
            )
        odd = {key: value for key, value in values.items() if value not in {record.original, *record.ours}}
        return replace(
            record,
            ours=[*(our for our in record.ours if our != number), number],
            odd={**odd, **{key: had for key, had in record.odd.items() if key in values or self._members.has(key)}},
        )

    def _write(self, writes: Mapping[str, _Due]) -> dict[str, Counter[str]]:
        """In the thread. By container: the outcomes; exited members do not count."""
        counts: dict[str, Counter[str]] = {}
        room = _MOST_LISTED_IN_ALL
        for path, due in writes.items():
            counts[path] = Counter(self._members.write(key, due.value) for key in due.keys)
            if self._kind.at_once and room > 0:
                done, listed = self._members.set_at_once(path, due.value, min(room, _MOST_LISTED))
                counts[path][""] += done
                room -= listed
            counts[path] = +counts[path]  # an outcome of 0 is none
            self.counts.update({outcome or "written": count for outcome, count in counts[path].items()})
            del counts[path]["gone"]
        return counts

    async def _restore(self, chosen: Mapping[str, ContainerRecord]) -> list[RestoreResult]:
        done: list[RestoreResult] = []
        if not chosen:
            return done
        for path, record in chosen.items():
            done.append(await self._worker.work(partial(self._members.restore, path, record)))
        finished = {result.path for result in done if result.ok}
        async with self._saving:
            left = {path: record for path, record in self._containers.items() if path not in finished}
            done = await self._rows.restored(ContainerRecords(containers=left), done)
        self._problems += [f"{result.path}: {result.detail}" for result in done if not result.ok]
        return done

    async def _save(self, change: Callable[[Mapping[str, ContainerRecord]], Mapping[str, ContainerRecord]]) -> bool:
        """Record the changed records; returns whether that is durable, and in force.

        ``change`` gets the records of that moment: more than one task saves.
        """
        async with self._saving:
            try:
                await self._rows.save(ContainerRecords(containers=change(self._containers)))
            except StoreError as exc:
                self._problems.append(str(exc))
                return False
        return True

    # Status

    def _unchanged(self, setting: Setting | None, state: SettingState, detail: str = "") -> SettingStatus | None:
        if setting is None:
            return None
        return SettingStatus(setting, state, self._text(setting), None, detail or setting.reason, time.time())

    def _status(self, setting: Setting, outcome: _Outcome | None) -> SettingStatus:
        """The status of one container after a sweep; ``outcome`` None: the sweep did not reach it."""
        members, wanted = self._kind.members, self._text(setting)
        actual: str | None = None
        detail = ""
        if outcome is None:
            state, detail = SettingState.WAITING, f"other containers have too many {members} for one sweep"
        elif outcome.problem:
            state, detail = SettingState.NOT_RECORDED, outcome.problem
        elif any(outcome.written):
            state = SettingState.REFUSED
            detail = ", ".join(f"{count} {members}: {code}" for code, count in sorted(outcome.written.items()) if code)
        elif outcome.restless:
            state = SettingState.WAITING
            detail = f"{outcome.restless} of {outcome.total} {members} get another value as fast as it is set"
        elif not outcome.total:
            state, detail = SettingState.IN_PLACE, f"it has no {members} now"
        elif outcome.kept and outcome.kept >= outcome.total:
            state, detail = SettingState.YIELDED, f"all {outcome.kept} {members} keep their own"
        else:
            state, actual = SettingState.WRITTEN if outcome.written else SettingState.IN_PLACE, wanted
            detail = f"{outcome.kept} of {outcome.total} {members} keep their own" if outcome.kept else ""
        return SettingStatus(setting, state, wanted, actual, detail, time.time())

    def _text(self, setting: Setting) -> str:
        assert isinstance(setting.value, int)
        return self._kind.text(setting.value)


def _others(values: Mapping[str, T], only: AbstractSet[str] | None) -> dict[str, T]:
    """What is known of the containers that a sweep does not read."""
    return {} if only is None else {path: value for path, value in values.items() if path not in only}


def _plain(kind: ProcessValueKind, value: int) -> int | str:
    """A number remains one in documents."""
    return value if kind.text is str else kind.text(value)
