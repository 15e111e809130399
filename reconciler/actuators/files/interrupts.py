"""Confines interrupts to CPUs that no pod owns, and restores their own places. An auxiliary actuator.

Object: an interrupt's number, with its actions (devices). An interrupt's *place* is the set of CPUs that may get it.

Source: kernel documentation, core-api/irq/irq-affinity; kernel/irq/proc.c (errors of a write).
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import whole
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import StoreError, errno_name
from cgroupfs.files import FileOps
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    OfflineContext,
    PeriodicActuator,
    PeriodicWorker,
    PlanSnapshot,
)
from reconciler.actuators.codec import LedgerState, RowCodec, row_of, undo_rows, undo_values
from reconciler.actuators.holds import holding
from reconciler.runtime.format import plural
from state.cpu import INTERRUPTS, InterruptPlan
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.kinds import INTERRUPT
from state.memory import MACHINE
from state.printable import printable
from state.topology import Topology

NAME: Final = "interrupts"
FILE: Final = "smp_affinity_list"
_PERIOD_S: Final = 60.0
"""Each sweep is one listing, and one read of 3 us an interrupt."""
_RETRY: Final = 10
"""Sweeps of the same plan after which a refused move is tried again: each try writes rows of the store and of its
history."""
_MOST: Final = 8192
"""Interrupts that are read, by number."""
_LONGEST: Final = 200
"""Characters of an interrupt's actions."""
_SHOWN: Final = 16
_FIXED: Final = frozenset({errno.EIO, errno.EPERM, errno.EOPNOTSUPP})
"""The kernel places it itself (EIO: a queue, which serves what its own CPU requested), or no controller can move it."""


class MovedInterrupt(Struct, frozen=True, kw_only=True):
    """A moved interrupt: its actions, its original CPUs, and those of ours that it may have, the newest last."""

    device: str
    original: str
    ours: tuple[str, ...]


class InterruptRows(Struct, frozen=True, kw_only=True):
    by_number: Mapping[int, MovedInterrupt] = {}


def _load(rows: Iterable[LedgerEntry]) -> InterruptRows:
    found = {}
    for row in rows:
        number, _, device = row.path.partition(" ")
        with suppress(ValueError):
            if row.original is not None and row.file == FILE:
                found[whole(number)] = MovedInterrupt(device=device, original=row.original, ours=row.ours)
    return InterruptRows(by_number=found)


def _row(number: int, place: MovedInterrupt) -> LedgerEntry:
    path = f"{number} {place.device}"
    return row_of(INTERRUPT, path, FILE, knob=INTERRUPTS, policy=NAME, original=place.original, ours=place.ours)


def _dump(state: InterruptRows) -> Iterable[LedgerEntry]:
    return (_row(number, place) for number, place in state.by_number.items())


CODEC: Final = RowCodec(kind=INTERRUPT, load=_load, dump=_dump)


class InterruptFiles:
    """The kernel's files; as a `ValueAccess` it restores them. All methods block and run in a thread."""

    def __init__(self, root: str, files: FileOps) -> None:
        self._directory = os.path.join(root, "proc/irq")
        self._cpus = os.path.join(root, "sys/devices/system/cpu")
        self._files = files

    def numbers(self) -> list[int]:
        """Those of the machine. Errors: `OSError`."""
        names = self._files.groups(self._directory)
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 10)[:_MOST]

    def device(self, number: int) -> str:
        """The names of its actions: the directories in its own. Empty: it serves no device. Errors: `OSError`."""
        return printable(",".join(sorted(self._files.groups(f"{self._directory}/{number}"))))[:_LONGEST]

    def cpus(self, number: int) -> CpuSet:
        """Where it may be delivered. Errors: `OSError`, `ValueError`."""
        return CpuSet.parse(self._files.read(f"{self._directory}/{number}", FILE).strip())

    def place(self, number: int, cpus: CpuSet) -> None:
        """Confine it. Errors: `OSError`."""
        self._files.write(f"{self._directory}/{number}", FILE, str(cpus))

    def with_kernels(self, number: int, place: MovedInterrupt) -> MovedInterrupt:
        """The record; if the kernel chose the present place because our CPUs were offline, that counts as ours."""
        try:
            online = CpuSet.parse(self._files.read(self._cpus, "online").strip())
            now = self.cpus(number)
        except (OSError, ValueError):
            return place
        return replace(place, ours=(*place.ours, str(now))) if is_kernels(now, place, online) else place

    def is_same(self, row: LedgerEntry) -> bool:
        """Whether it is the moved interrupt: it serves the same device, or still has a place of ours."""
        number, _, device = row.path.partition(" ")
        try:
            # The kernel keeps a place while an interface is set down and up, or a second device joins a shared line. A
            # number that was given to another device has that device's place.
            return self.device(int(number)) == device or str(self.cpus(int(number))) in row.ours
        except FileNotFoundError:
            return False
        except (OSError, ValueError):
            return True  # it exists: reading its place reports the error

    def read(self, row: LedgerEntry) -> str:
        """Where it may be delivered, in the kernel's text."""
        return str(self.cpus(int(row.path.partition(" ")[0])))

    def write(self, row: LedgerEntry, text: str) -> None:
        self.place(int(row.path.partition(" ")[0]), CpuSet.parse(text))


def target_of(original: CpuSet, avoid: CpuSet, free: CpuSet, topology: Topology) -> CpuSet:
    """Where an interrupt may be delivered while pods own the CPUs to avoid.

    The rest of its own CPUs, else the free CPUs of its NUMA nodes, else all free ones.
    """
    if rest := (original & topology.online) - avoid:
        return rest
    near = CpuSet.union(cpus for node in topology.nodes() if (cpus := topology.node_cpus(node)) & original)
    return near & free or free


def is_kernels(now: CpuSet, place: MovedInterrupt, online: CpuSet) -> bool:
    """Whether the kernel chose this place because every CPU of ours was offline.

    Source: kernel/irq/cpuhotplug.c, a broken affinity becomes that of all online CPUs.
    """
    ours = CpuSet.parse(place.ours[-1]) if place.ours else CpuSet()
    # More may be in it: CPUs that went offline since.
    return bool(ours) and not ours & now and online - ours <= now


def undo(access: InterruptFiles, state: InterruptRows) -> tuple[list[RestoreResult], InterruptRows]:
    """Restore the originals; returns the results and the remaining state. For a thread. Errors: none."""
    known = {number: access.with_kernels(number, place) for number, place in state.by_number.items()}
    done, left = undo_values(list(_dump(InterruptRows(by_number=known))), access)
    return done, _load(left)


class _Sweep(Struct):
    """One comparison of all interrupts. ``moves``: by number, to be written."""

    moves: dict[int, tuple[MovedInterrupt, CpuSet]] = {}
    back: dict[int, MovedInterrupt] = {}
    gone: set[int] = set()
    foreign: dict[int, str] = {}


@final
class InterruptPlaces(PeriodicActuator):
    name = NAME

    def __init__(self, context: ActuatorContext) -> None:
        self._access = InterruptFiles(context.root, context.files)
        self._rows = LedgerState(CODEC, context.ledger, context.store_lane)
        super().__init__(PeriodicWorker(self._sweep, self._next_s), _relevant)
        self._confirmed: set[int] = set()
        """Interrupts at which a place of ours was read in this run: any other place there is another program's."""
        self._foreign: dict[int, str] = {}
        self._fixed: dict[int, str] = {}
        self._refused: dict[int, str] = {}
        self._plan: InterruptPlan | None = None
        self._sweeps = 0
        """Sweeps since the plan changed."""
        self._not_restored: dict[int, str] = {}
        """Interrupts whose originals were refused, with the reason."""
        self._failure = ""
        self._would = 0

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Restore the places of all; none belongs to a pod."""
        async with self._worker.restoring():
            return await self._restore(self._rows.now.by_number) if only is None else ()

    def status(self) -> Mapping[str, object]:
        moved = {n: place for n, place in self._rows.now.by_number.items() if n not in self._refused}
        return {
            "moved": len(moved),
            "would_move": self._would,
            "placed_by_kernel": len(self._fixed),
            "placed_by_others": len(self._foreign),
            "refused": len(self._refused),
            "not_restored": len(self._not_restored),
            "first": {
                str(number): {"device": place.device, "original": place.original, "now": place.ours[-1]}
                for number, place in sorted(moved.items())[:_SHOWN]
            },
        }

    def problems(self) -> Sequence[str]:
        """The interrupts that another program places, or that a write did not move."""
        found = [self._failure] if self._failure else []
        for items, text in (
            (self._foreign, "placed by another program (irqbalance?), such as {} on CPU {}; unchanged"),
            (self._refused, "not moved, such as {}: {}"),
            (self._not_restored, "not given back, such as {}: {}"),
        ):
            if items:
                found.append(f"{plural(len(items), 'interrupt')} {text.format(*min(items.items()))}")
        return found

    async def _sweep(self, situation: PlanSnapshot) -> None:
        plan = situation.plan.interrupts or InterruptPlan()
        held = holding(situation.holds, path=MACHINE, knob=INTERRUPTS, pod_uid=None) is not None
        topology = situation.view.topology
        self._not_restored, self._failure, self._would = {}, "", 0
        self._sweeps = self._sweeps + 1 if plan == self._plan else 0
        self._plan = plan
        if self._sweeps % _RETRY == 0:
            self._refused = {}
        if not plan.avoid:
            self._foreign.clear()
            self._fixed.clear()
        if plan.dry_run and situation.enforce and not held:
            await self._restore(self._rows.now.by_number)
        try:
            seen = await self._worker.work(partial(self._compare_all, plan, topology))
        except OSError as exc:
            self._failure = f"/proc/irq: {errno_name(exc.errno)}"
            return
        self._foreign |= seen.foreign
        forgotten = seen.gone | seen.foreign.keys()
        if forgotten:
            await self._save({n: p for n, p in self._rows.now.by_number.items() if n not in forgotten}, "gone")
        if held:
            return
        if plan.dry_run or not situation.enforce:
            self._would = len(seen.moves)
            return
        await self._restore(seen.back)
        if seen.moves and await self._save(
            {**self._rows.now.by_number, **{number: place for number, (place, _) in seen.moves.items()}}, "gone"
        ):
            others = await self._worker.work(partial(self._write, seen.moves))
            if others:
                kept = {n: p for n, p in self._rows.now.by_number.items() if n not in others}
                await self._save(kept | {n: p for n, p in others.items() if p is not None}, "gone")

    def _compare_all(self, plan: InterruptPlan, topology: Topology) -> _Sweep:
        """In the thread. Errors: `OSError` if they cannot be listed; one that cannot be read is left out."""
        seen, known = _Sweep(), self._rows.now.by_number
        numbers = self._access.numbers()
        seen.gone = known.keys() - set(numbers)
        for left in (self._fixed, self._foreign):
            # The kernel gives the number of a removed interrupt to another one.
            for number in left.keys() - set(numbers):
                del left[number]
        for number in numbers if plan.avoid else sorted(known.keys() - seen.gone):
            if number in self._fixed or number in self._foreign or number in self._refused:
                continue
            with suppress(OSError, ValueError):
                self._compare(number, plan, topology, seen)
        return seen

    def _compare(self, number: int, plan: InterruptPlan, topology: Topology, seen: _Sweep) -> None:
        now, before = self._access.cpus(number), self._rows.now.by_number.get(number)
        if before is None and not now & plan.avoid:
            return  # most are such: one read each
        device = self._access.device(number)
        if before is not None and device != before.device and str(now) not in before.ours:
            seen.gone.add(number)  # the number was given to another device
            before = None
        if before is not None and str(now) not in before.ours and not is_kernels(now, before, topology.online):
            # The original, where no place of ours was read yet: a kill came between the row and the write.
            if number in self._confirmed or str(now) != before.original:
                seen.foreign[number] = str(now)  # such as irqbalance's: not moved again while the daemon runs
                return
        elif before is not None:
            self._confirmed.add(number)
        original = now if before is None else CpuSet.parse(before.original)
        if not original & plan.avoid:
            if before is not None:
                seen.back[number] = before
            return
        wanted = target_of(original, plan.avoid, plan.free, topology)
        if now != wanted and device:  # one without a device serves nothing
            # The place that is in force, not the last recorded: a kill may have come between the two.
            last = (str(now),) if before is not None and now != original else ()
            place = MovedInterrupt(device=device, original=str(original), ours=(*last, str(wanted)))
            seen.moves[number] = (place, wanted)

    def _write(self, moves: Mapping[int, tuple[MovedInterrupt, CpuSet]]) -> dict[int, MovedInterrupt | None]:
        """In the thread. What to record of those that are not at their new places; None: no value of ours is there."""
        others: dict[int, MovedInterrupt | None] = {}
        for number, (place, wanted) in moves.items():
            refused = None
            try:
                self._access.place(number, wanted)
            except OSError as exc:
                refused = errno_name(exc.errno)
                (self._fixed if exc.errno in _FIXED else self._refused)[number] = refused
            try:
                now = self._access.cpus(number)
            except (OSError, ValueError) as exc:
                if refused is None:  # its place was changed: the row, which alone has the original, remains
                    self._refused[number] = errno_name(exc.errno) if isinstance(exc, OSError) else str(exc)
                else:
                    others[number] = _older(place)
                continue
            if refused is None and now == wanted:
                self._confirmed.add(number)
                continue
            if refused is None:
                self._refused[number] = f"accepted, but it reads {now}"
                others[number] = None if str(now) == place.original else replace(place, ours=(str(wanted), str(now)))
            else:
                others[number] = None if str(now) == place.original else _older(place)
        return others

    async def _restore(self, chosen: Mapping[int, MovedInterrupt]) -> list[RestoreResult]:
        if not chosen:
            return []
        results, failed = await self._worker.work(partial(undo, self._access, InterruptRows(by_number=chosen)))
        finished = chosen.keys() - failed.by_number.keys()
        self._confirmed -= finished
        reasons = {result.path: result.detail for result in results}
        self._not_restored |= {number: reasons[_row(number, place).path] for number, place in failed.by_number.items()}
        left = {number: place for number, place in self._rows.now.by_number.items() if number not in finished}
        if not await self._save(left, "restored"):
            return [replace(result, undo=RestoreOutcome.REFUSED, detail=self._failure) for result in results]
        return results

    def _next_s(self, situation: PlanSnapshot) -> float | None:
        # Also while an original could not be restored (its CPU may be offline), or after a failure.
        plan = situation.plan.interrupts
        return _PERIOD_S if self._not_restored or self._failure or (plan is not None and plan.avoid) else None

    async def _save(self, places: Mapping[int, MovedInterrupt], dropped: str) -> bool:
        try:
            await self._rows.save(InterruptRows(by_number=dict(places)), dropped=dropped)
        except StoreError as exc:
            self._failure = str(exc)
            return False
        return True


def _older(place: MovedInterrupt) -> MovedInterrupt | None:
    """What is left of a move that was refused: the place of ours before it, if there was one."""
    return replace(place, ours=place.ours[:-1]) if len(place.ours) > 1 else None


def _relevant(situation: PlanSnapshot) -> tuple[object, ...]:
    return situation.plan.interrupts, situation.enforce, situation.holds


def _undo_offline(context: OfflineContext) -> Sequence[RestoreResult]:
    if context.only is not None:
        return ()
    return undo_rows(context.ledger, CODEC, partial(undo, InterruptFiles(context.root, context.files)))


ACTUATOR: Final = ActuatorKind(codecs={INTERRUPT: CODEC}, build=InterruptPlaces, undo=_undo_offline)
