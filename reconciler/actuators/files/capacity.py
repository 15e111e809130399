"""Writes the capacity files of BE pods, and removes them. An auxiliary actuator.

Each file is in an emptyDir volume that the pod names (`reconciler.policies.capacity`), and is written when its content
changes, and at intervals. The kubelet removes it with the pod.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar, final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.errors import StoreError, errno_name
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    OfflineContext,
    PeriodicActuator,
    PeriodicWorker,
    PlanSnapshot,
)
from reconciler.actuators.codec import LedgerState, RowCodec, row_of, undo_rows
from reconciler.actuators.holds import holding
from reconciler.runtime.notefile import EMPTY_DIRS, NoteFile, is_name
from reconciler.runtime.stints import in_worker
from state.capacity import CapacityPlan, CapacityState, PodCapacity
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.kinds import CAPACITY

SCHEMA: Final = 1
VALID_S: Final = 180.0
"""A file is current for this long: by it the reader sees whether the daemon still runs, which writes it three times as
often."""
_GAP_S: Final = 1.0
"""From one sweep to the next, so that a file is written at most once in this time."""
_FILE_S: Final = 2.0
"""For one file: the file system of its volume may hang."""
_LONGEST_REASON: Final = 400
_ABSENT: Final = "none"
_T = TypeVar("_T")
_PLACE: Final = re.compile(rf"(/.*)/([^/]+)/volumes/{re.escape(EMPTY_DIRS)}/([^/]+)")


class CapacityPlace(Struct, frozen=True, kw_only=True, order=True):
    """Where one file is. ``pods_dir``: the kubelet's directory of all pods, below the node's root."""

    pods_dir: str
    uid: str
    volume: str
    file: str

    @property
    def directory(self) -> str:
        """The volume's, below the node's root."""
        return f"{self.pods_dir}/{self.uid}/volumes/{EMPTY_DIRS}/{self.volume}"

    def note(self, root: str) -> NoteFile:
        """The file. Errors: `OSError` if a name is none."""
        # The pod controls the directory: the names are apart, so that none is followed as a link.
        return NoteFile(
            os.path.join(root, self.pods_dir.lstrip("/")),
            (self.uid, "volumes", EMPTY_DIRS, self.volume),
            self.file,
        )


class CapacityRows(Struct, frozen=True, kw_only=True):
    """The files that may exist."""

    places: frozenset[CapacityPlace] = frozenset()


def _load(rows: Iterable[LedgerEntry]) -> CapacityRows:
    places = set()
    for row in rows:
        match = _PLACE.fullmatch(row.path)
        if match is not None and is_name(match[3]) and is_name(row.file) and match[2] == row.pod_uid:
            places.add(CapacityPlace(pods_dir=match[1], uid=match[2], volume=match[3], file=row.file))
    return CapacityRows(places=frozenset(places))


def _dump(state: CapacityRows) -> Iterable[LedgerEntry]:
    for place in sorted(state.places):
        yield row_of(
            CAPACITY,
            place.directory,
            place.file,
            knob=CAPACITY,
            policy=CapacityFiles.name,
            original=_ABSENT,
            pod_uid=place.uid,
        )


CODEC: Final = RowCodec(kind=CAPACITY, load=_load, dump=_dump)


class NextState(Struct, frozen=True, kw_only=True):
    """A change that is announced. ``at``: seconds since the epoch."""

    state: CapacityState
    at: float


class CapacityDocument(Struct, frozen=True, kw_only=True, rename="camel"):
    """The content of a file: JSON. Units: thousandths of a CPU, bytes, seconds since the epoch."""

    schema: int
    at: float
    valid_until: float
    cpu_milli: int
    shared_with: int
    likely_cpu_milli: int
    cpus: str
    memory_bytes: int | None
    state: CapacityState
    next: NextState | None
    reason: str


def text_of(capacity: PodCapacity, wall_s: float, ahead_s: float) -> str:
    """The file's text. ``wall_s``: the time now; ``ahead_s``: by how much the wall clock is ahead of the view's."""
    announced = None
    if capacity.next_state is not None:
        announced = NextState(state=capacity.next_state, at=round(capacity.next_at + ahead_s, 1))
    document = CapacityDocument(
        schema=SCHEMA,
        at=round(wall_s, 1),
        valid_until=round(wall_s + VALID_S, 1),
        cpu_milli=capacity.cpu_milli,
        shared_with=capacity.shared_with,
        likely_cpu_milli=capacity.likely_cpu_milli,
        cpus=capacity.cpus,
        memory_bytes=capacity.memory_bytes,
        state=capacity.state,
        next=announced,
        reason=capacity.reason[:_LONGEST_REASON],
    )
    return msgspec.json.encode(document).decode() + "\n"


def remove(root: str, place: CapacityPlace) -> RestoreResult:
    """Remove one file. Errors: none; they are in the result."""
    outcome, detail = RestoreOutcome.GONE, ""
    try:
        if place.note(root).remove():
            outcome = RestoreOutcome.RESTORED
    except NotADirectoryError:
        pass  # a component is a link or a file by now: the volume of our file is not there any more
    except OSError as exc:
        outcome, detail = RestoreOutcome.REFUSED, errno_name(exc.errno)
    return RestoreResult(path=place.directory, file=place.file, undo=outcome, text=_ABSENT, detail=detail)


@final
class CapacityFiles(PeriodicActuator):
    name = "capacity"

    def __init__(
        self,
        context: ActuatorContext,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._root = context.root
        self._pods_dir = os.path.join(context.kubelet_dir, "pods")
        self._clock = clock
        self._wall = wall
        self._rows = LedgerState(CODEC, context.ledger, context.store_lane)
        super().__init__(PeriodicWorker(self._sweep, self._period_s, gap_s=_GAP_S), _relevant)
        self._threads = trio.CapacityLimiter(4)
        """A thread that was abandoned in a hanging file system keeps its place here."""
        self._busy: set[CapacityPlace] = set()
        """Files that a thread writes or removes now: no second thread tries one that hangs."""
        self._written: dict[CapacityPlace, tuple[PodCapacity, float]] = {}
        """The last write of each that has ended, also of those in `_problems`."""
        self._problems: dict[CapacityPlace, str] = {}
        """Why the last write of a file failed, or its removal."""

    # The interface of an auxiliary actuator

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        async with self._worker.restoring():
            return await self._remove(sorted(place for place in self._rows.now.places if only in {None, place.uid}))

    def status(self) -> Mapping[str, object]:
        """The content that was written last, by pod uid, without those whose last write failed; counts."""
        return {
            "pods": {
                place.uid: {
                    "cpu_milli": capacity.cpu_milli,
                    "likely_cpu_milli": capacity.likely_cpu_milli,
                    "state": capacity.state,
                    "next_state": capacity.next_state,
                }
                for place, (capacity, _) in sorted(self._written.items(), key=lambda item: item[0])
                if place not in self._problems
            },
            "counts": dict(sorted(self.counts.items())),
        }

    def notified(self) -> frozenset[str]:
        """Uids of the pods whose file was written, and whose last write has not failed."""
        return frozenset(place.uid for place in self._written.keys() - self._problems.keys())

    def problems(self) -> Sequence[str]:
        return [f"capacity file of pod {place.uid}: {text}" for place, text in sorted(self._problems.items())]

    # One sweep

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        plan = situation.plan.capacity
        # Also while a file could not be removed.
        wanted = plan is not None and plan.pods
        return VALID_S / 3 if wanted or (situation.enforce and self._rows.now.places) else None

    async def _sweep(self, situation: PlanSnapshot) -> None:
        plan = situation.plan.capacity
        if not situation.enforce:
            self._keep_problems(frozenset())
            return
        held = {
            uid: pod
            for uid, pod in situation.view.pods.items()
            if holding(situation.holds, path=pod.group.path, knob=CAPACITY, pod_uid=uid) is not None
        }
        wanted = {} if plan is None or plan.dry_run else self._wanted(plan)
        await self._remove(
            sorted(place for place in self._rows.now.places if place not in wanted and place.uid not in held)
        )
        now = self._wall()
        due = {
            place: capacity
            for place, capacity in wanted.items()
            if place.uid not in held and self._is_due(place, capacity, now)
        }
        self._keep_problems(wanted.keys() | self._rows.now.places)
        try:
            # Before the first write: a restore removes the file also after a crash.
            await self._rows.save(CapacityRows(places=self._rows.now.places | due.keys()))
        except StoreError as exc:
            self._problems.update(dict.fromkeys(due, str(exc)))
            return
        for place, capacity in due.items():
            await self._write(place, capacity)

    def _keep_problems(self, places: AbstractSet[CapacityPlace]) -> None:
        """The problems of these files only; of the others no failed write is kept either."""
        others = self._problems.keys() - places
        self._problems = {place: text for place, text in self._problems.items() if place not in others}
        self._written = {place: last for place, last in self._written.items() if place not in others}

    def _wanted(self, plan: CapacityPlan) -> dict[CapacityPlace, PodCapacity]:
        return {
            CapacityPlace(pods_dir=self._pods_dir, uid=uid, volume=capacity.volume, file=plan.file): capacity
            for uid, capacity in plan.pods.items()
        }

    def _is_due(self, place: CapacityPlace, capacity: PodCapacity, now: float) -> bool:
        written = self._written.get(place)
        # Also where the wall clock was set back.
        return written is None or written[0] != capacity or not 0 <= now - written[1] < VALID_S / 3

    async def _write(self, place: CapacityPlace, capacity: PodCapacity) -> None:
        now = self._wall()
        text = text_of(capacity, now, now - self._clock())
        try:
            note = place.note(self._root)
            await self._in_thread(place, lambda: note.write(text))
        except OSError as exc:
            self._failed(place, f"{place.directory}: {errno_name(exc.errno)}")
        except trio.TooSlowError:
            self._failed(place, f"{place.directory}: the file system does not answer")
        else:
            self._problems.pop(place, None)
            self.counts["written"] += 1
        # A failed write is tried again with the next content or interval.
        self._written[place] = capacity, now

    def _failed(self, place: CapacityPlace, text: str) -> None:
        self._problems[place] = text
        self.counts["failed"] += 1

    async def _remove(self, places: Iterable[CapacityPlace]) -> list[RestoreResult]:
        done: list[RestoreResult] = []
        finished: set[CapacityPlace] = set()
        for place in places:
            result = RestoreResult(
                path=place.directory,
                file=place.file,
                undo=RestoreOutcome.REFUSED,
                text=_ABSENT,
                detail="the file system does not answer",
            )
            with suppress(trio.TooSlowError):
                result = await self._in_thread(place, partial(remove, self._root, place))
            done.append(result)
            self._written.pop(place, None)
            self._problems.pop(place, None)
            if result.ok:
                finished.add(place)
            else:
                self._problems[place] = f"{place.directory}: {place.file} is not removed: {result.detail}"
        return await self._rows.restored(CapacityRows(places=self._rows.now.places - finished), done)

    async def _in_thread(self, place: CapacityPlace, act: Callable[[], _T]) -> _T:
        """Run it in a thread for at most `_FILE_S`. Errors: `trio.TooSlowError` if the file system hangs."""
        if place in self._busy:
            raise trio.TooSlowError
        began = False

        def work() -> _T:
            nonlocal began
            began = True
            try:
                return act()
            finally:
                self._busy.discard(place)

        self._busy.add(place)
        try:
            with trio.fail_after(_FILE_S):
                return await in_worker(work, abandon_on_cancel=True, limiter=self._threads)
        finally:
            # An abandoned thread frees the file itself, when its file system answers.
            if not began:
                self._busy.discard(place)


def _relevant(situation: PlanSnapshot) -> tuple[object, ...]:
    plan = situation.plan.capacity
    wanted = None if plan is None else (plan.file, plan.pods, plan.dry_run)
    return wanted, situation.enforce, situation.holds


def _undo_offline(context: OfflineContext) -> Sequence[RestoreResult]:
    def undo(state: CapacityRows) -> tuple[list[RestoreResult], CapacityRows]:
        chosen = sorted(place for place in state.places if context.only in {None, place.uid})
        done = {place: remove(context.root, place) for place in chosen}
        left = state.places - {place for place, result in done.items() if result.ok}
        return list(done.values()), CapacityRows(places=left)

    return undo_rows(context.ledger, CODEC, undo)


ACTUATOR: Final = ActuatorKind(codecs={CAPACITY: CODEC}, build=CapacityFiles, undo=_undo_offline)
