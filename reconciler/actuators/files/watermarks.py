"""Sets the kernel's memory marks in /proc/sys/vm, and gives back what was there. An auxiliary actuator.

The original is durable before the first write, together with every value of ours that may stand there after a crash.
A value that is neither has come from somebody else (sysctl, tuned, the kernel itself as memory is plugged in): it is
left, told, and nobody's to give back any more.

Source: kernel documentation, admin-guide/sysctl/vm. ``watermark_scale_factor`` came with Linux 4.6; /proc/sys is
read-only in containers that are not privileged.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

import msgspec
import trio

from cgroupfs.bounded import whole
from cgroupfs.errors import StoreError, errno_name
from cgroupfs.files import REAL, FileOps
from reconciler.actuators.base import PeriodicWorker, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import LedgerState, RowCodec, undo_rows, undo_values
from reconciler.actuators.holds import holding
from state.entry import LedgerEntry
from state.kinds import SYSCTL
from state.ledger import Ledger
from state.memory import MACHINE, MARKS
from state.model import Setting
from state.plan import SysctlPlan, SysctlTarget
from state.undo import RestoreOutcome, RestoreResult

_PERIOD_S: Final = 60.0
_COUNTED: Final = frozenset({"written", "refused"})


class SysctlState(msgspec.Struct, frozen=True, kw_only=True):
    """One value: what was there before us, and what of ours may be there, the newest last."""

    original: int
    ours: tuple[int, ...]


class SysctlRows(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, by the kernel's name."""

    values: Mapping[str, SysctlState] = {}


def _load(rows: Iterable[LedgerEntry]) -> SysctlRows:
    values = {}
    for row in rows:
        with suppress(ValueError):
            if "/" not in row.file and row.path == MACHINE and row.original is not None:
                values[row.file] = SysctlState(original=whole(row.original), ours=tuple(map(whole, row.ours)))
    return SysctlRows(values=values)


def _dump(state: SysctlRows) -> Iterable[LedgerEntry]:
    for name, value in state.values.items():
        ours = tuple(map(str, value.ours))
        yield LedgerEntry(
            kind=SYSCTL,
            controller="",
            path=MACHINE,
            file=name,
            knob=name,
            original=str(value.original),
            ours=ours,
            wanted=ours[-1] if ours else None,
            policy=Watermarks.name,
        )


CODEC: Final = RowCodec(kind=SYSCTL, load=_load, dump=_dump)


class Sysctls:
    """The files. Everything in here is for a thread."""

    def __init__(self, root: str, files: FileOps) -> None:
        self._proc = os.path.join(root, "proc/sys")
        self._files = files

    def read(self, name: str) -> int | str:
        """The value; in words why there is none."""
        directory, file = self._place(name)
        try:
            return int(self._files.read(directory, file))
        except FileNotFoundError:
            return f"this kernel has no {name}"
        except OSError as exc:
            return f"cannot read: {errno_name(exc.errno)}"
        except ValueError:
            return "not a number"

    def write(self, name: str, value: int) -> str:
        """Set it and read it back. Empty when it is there, else why not."""
        directory, file = self._place(name)
        try:
            self._files.write(directory, file, str(value))
        except OSError as exc:
            return errno_name(exc.errno)
        result = self.read(name)
        return "" if result == value else f"accepted, but it reads {result}"

    def _place(self, name: str) -> tuple[str, str]:
        directory, _, file = name.rpartition(".")
        return os.path.join(self._proc, directory.replace(".", "/")), file


class SysctlAccess:
    """`ValueAccess`: by it an original is put back."""

    def __init__(self, sysctls: Sysctls) -> None:
        self._sysctls = sysctls

    def is_same(self, row: LedgerEntry) -> bool:
        """A name of /proc/sys means the same for as long as the kernel runs."""
        return row.path == MACHINE

    def read(self, row: LedgerEntry) -> str:
        """The value. Errors: `ValueError` says why there is none."""
        value = self._sysctls.read(row.file)
        if isinstance(value, str):
            raise ValueError(value)  # noqa: TRY004  # what the kernel answered, no mistake of types
        return str(value)

    def write(self, row: LedgerEntry, text: str) -> None:
        """Set it. Errors: `ValueError` with the errno's name."""
        if refused := self._sysctls.write(row.file, whole(text)):
            raise ValueError(refused)


def undo(sysctls: Sysctls, state: SysctlRows) -> tuple[list[RestoreResult], SysctlRows]:
    """Put the originals back; what is left to be put back. For a thread. Errors: none."""
    rows = sorted(_dump(state), key=lambda row: row.file)
    done, left = undo_values(rows, SysctlAccess(sysctls))
    return done, _load(left)


def restore_marks(ledger: Ledger, *, root: str = "/", files: FileOps = REAL) -> list[RestoreResult]:
    """Put everything back while no daemon runs. Errors: `StoreError` when that cannot be noted; it is done by then."""
    return undo_rows(ledger, CODEC, partial(undo, Sysctls(root, files)))


@final
class Watermarks:
    """See the module's text."""

    name = "watermarks"

    def __init__(self, ledger: Ledger, lane: trio.CapacityLimiter, *, root: str = "/", files: FileOps = REAL) -> None:
        """``lane``: the store's limiter."""
        self.counts: Counter[str] = Counter()
        self.standings: dict[str, dict[str, SettingStatus]] = {}
        self._sysctls = Sysctls(root, files)
        self._rows = LedgerState(CODEC, ledger, lane)
        self._turns = PeriodicWorker(self._sweep, _period_s)
        self._sure: set[str] = set()
        """Whose value of ours has been seen in the kernel in this life: anything else there is somebody else's."""
        self._there: dict[str, int | str] = {}

    # The seam

    def planned(self, situation: PlanSnapshot) -> None:
        """A look is over. What the marks are does not depend on pods: only a changed wish is worth a turn now."""
        before = self._turns.situation
        news = before is None or _of(before) != _of(situation)
        self._turns.planned(situation, wake=news and (situation.plan.sysctls is not None or bool(self._kept)))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compare after each change of what is wanted, and each minute, for ever."""
        await self._turns.run(task_status=task_status)

    async def sweep(self) -> None:
        """Bring the marks to what the newest look wants."""
        await self._turns.sweep()

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Give everything back; no pod has a part in it."""
        async with self._turns.restoring():
            return await self._give_back(self._kept) if only is None else ()

    def status(self) -> Mapping[str, object]:
        """What is there and what was, by the kernel's name; counts."""
        values = {
            name: {
                "now": there if isinstance(there, int) else None,
                "original": self._kept[name].original if name in self._kept else None,
                "wanted": standing.setting.value if (standing := self._standing(name)) is not None else None,
                "state": standing.state if standing is not None else None,
                "detail": standing.detail if standing is not None else "",
            }
            for name, there in sorted(self._there.items())
        }
        return {"values": values, "counts": dict(sorted(self.counts.items()))}

    def problems(self) -> Sequence[str]:
        """Which of the wanted values is not there, and why."""
        bad = {"refused", "not recorded", "yielded", "missing"}
        return [
            f"{name}: {standing.detail}"
            for name, standing in sorted(self.standings.get(MACHINE, {}).items())
            if standing.state in bad
        ]

    # One turn

    @property
    def _kept(self) -> Mapping[str, SysctlState]:
        return self._rows.now.values

    def _standing(self, name: str) -> SettingStatus | None:
        return self.standings.get(MACHINE, {}).get(name)

    async def _sweep(self, situation: PlanSnapshot) -> None:
        plan = situation.plan.sysctls or SysctlPlan()
        self._there = await self._turns.work(self._look)
        if any(target.setting is None for target in plan.targets.values()):
            return  # nothing can be computed, and nothing is unwanted
        dry = not situation.enforce or plan.dry_run
        held = {name for name in MARKS if holding(situation.holds, path=MACHINE, knob=name, pod_uid=None) is not None}
        if not dry:
            await self._give_back(
                {name: kept for name, kept in self._kept.items() if name not in {*plan.targets, *held}}
            )
        statuses: dict[str, SettingStatus] = {}
        for name, target in plan.targets.items():
            if (setting := target.setting) is not None:
                state, detail = await self._one(setting, target, held=name in held, dry=dry)
                statuses[name] = _noted(setting, state, detail, self._there[name])
                if state in _COUNTED:
                    self.counts[state] += 1
        self.standings = {MACHINE: statuses} if statuses else {}

    def _look(self) -> dict[str, int | str]:
        return {name: self._sysctls.read(name) for name in MARKS}

    async def _one(self, setting: Setting, wanted: SysctlTarget, *, held: bool, dry: bool) -> tuple[str, str]:
        """Bring one to its value; how it stands then, and why."""
        name, value = setting.knob, setting.value
        assert isinstance(value, int)
        there, kept = self._there[name], self._kept.get(name)
        if isinstance(there, str):
            return "missing", there
        original = there if kept is None else kept.original
        target = max(value, original)
        if kept is not None and self._is_foreign(name, there, kept):
            return "yielded", f"set to {there} by another program; unchanged"
        if there == target:
            if kept is not None:
                self._sure.add(name)
            return "in place", "" if target == value else f"never set below its original value {original}"
        if held:
            return "held", "on hold by an operator"
        if dry:
            return "would write", ""
        if wanted.most_rise is not None and target - there > wanted.most_rise:
            return "waiting", "not enough available memory for it"
        fresh = SysctlState(original=original, ours=(*(() if kept is None else kept.ours[-1:]), target))
        try:
            await self._rows.save(SysctlRows(values={**self._kept, name: fresh}))
        except StoreError as exc:
            return "not recorded", str(exc)
        refused = await self._turns.work(partial(self._sysctls.write, name, target))
        if refused:
            return "refused", refused
        self._sure.add(name)
        self._there[name] = target
        return "written", ""

    def _is_foreign(self, name: str, there: int, kept: SysctlState) -> bool:
        """Not ours, and not the original that stands there when a crash came before the write."""
        return there not in kept.ours and (name in self._sure or there != kept.original)

    async def _give_back(self, chosen: Mapping[str, SysctlState]) -> list[RestoreResult]:
        if not chosen:
            return []
        done, refused = await self._turns.work(partial(undo, self._sysctls, SysctlRows(values=chosen)))
        over = chosen.keys() - refused.values.keys()
        self._sure -= over
        left = {name: kept for name, kept in self._kept.items() if name not in over}
        try:
            await self._rows.save(SysctlRows(values=left), dropped="restored")
        except StoreError as exc:
            return [msgspec.structs.replace(result, undo=RestoreOutcome.REFUSED, detail=str(exc)) for result in done]
        return done


def _of(situation: PlanSnapshot) -> tuple[object, ...]:
    """All of a situation that matters here."""
    plan = situation.plan.sysctls
    settings = {name: target.setting for name, target in plan.targets.items()} if plan is not None else None
    return settings, plan is not None and plan.dry_run, situation.enforce, situation.holds


def _period_s(situation: PlanSnapshot) -> float | None:
    return _PERIOD_S if situation.plan.sysctls is not None else None


def _noted(setting: Setting, state: str, detail: str, there: int | str) -> SettingStatus:
    actual = str(there) if isinstance(there, int) else None
    return SettingStatus(setting, state, str(setting.value), actual, detail, time.time())
