"""Sets the kernel's memory marks in /proc/sys/vm, and gives back what was there. A side actuator.

The original is durable before the first write, together with every value of ours that may stand there after a crash.
A value that is neither has come from somebody else (sysctl, tuned, the kernel itself as memory is plugged in): it is
left, told, and nobody's to give back any more.

Source: kernel documentation, admin-guide/sysctl/vm. ``watermark_scale_factor`` came with Linux 4.6; /proc/sys is
read-only in containers that are not privileged.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, final

import msgspec
import trio

from cgroupfs.errors import StoreError, errno_name
from cgroupfs.files import REAL, FileOps
from reconciler.actuators.base import BootState, PeriodicWorker, PersistedValue, PlanSnapshot, StateRow
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.holds import holding
from reconciler.policies.watermarks import KNOBS, NAME, REASONS, has_room, wanted
from state.memory import NodeMemoryReading
from state.model import Setting
from state.store import Store
from state.undo import RestoreOutcome, RestoreResult

MACHINE: Final = "/"
"""The path of what belongs to no group."""
_PERIOD_S: Final = 60.0
_COUNTED: Final = frozenset({"written", "refused"})


class SysctlState(msgspec.Struct, frozen=True, kw_only=True):
    """One value: what was there before us, and what of ours may be there, the newest last."""

    original: int
    ours: tuple[int, ...]


class SysctlRows(BootState, frozen=True, kw_only=True):
    """All of them, by the kernel's name."""

    values: Mapping[str, SysctlState] = {}


ROW: Final = StateRow("watermarks", SysctlRows, "memory watermarks")


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
        found = self.read(name)
        return "" if found == value else f"accepted, but it reads {found}"

    def restore(self, name: str, kept: SysctlState) -> RestoreResult:
        """Give one its original back, if what is there is ours."""
        there = self.read(name)
        undo, detail = RestoreOutcome.ALREADY, ""
        if isinstance(there, str):
            undo, detail = RestoreOutcome.REFUSED, there
        elif there != kept.original:
            undo = RestoreOutcome.FOREIGN
            if there in kept.ours:
                detail = self.write(name, kept.original)
                undo = RestoreOutcome.REFUSED if detail else RestoreOutcome.RESTORED
        return RestoreResult(path=MACHINE, file=name, undo=undo, text=str(kept.original), detail=detail)

    def _place(self, name: str) -> tuple[str, str]:
        directory, _, file = name.rpartition(".")
        return os.path.join(self._proc, directory.replace(".", "/")), file


def restore_marks(store: Store, *, root: str = "/", files: FileOps = REAL) -> list[RestoreResult]:
    """Put everything back while no daemon runs. Errors: `StoreError` when that cannot be noted; it is done by then."""
    values = ROW.read(store).values
    sysctls = Sysctls(root, files)
    done = [sysctls.restore(name, kept) for name, kept in sorted(values.items())]
    if values:
        refused = {one.file for one in done if one.undo is RestoreOutcome.REFUSED}
        ROW.write(store, SysctlRows(boot=store.boot, values={name: values[name] for name in sorted(refused)}))
    return done


@final
class Watermarks:
    """See the module's text."""

    name = NAME

    def __init__(self, store: Store, lane: trio.CapacityLimiter, *, root: str = "/", files: FileOps = REAL) -> None:
        """``lane``: the store's limiter."""
        self.counts: Counter[str] = Counter()
        self.standings: dict[str, dict[str, SettingStatus]] = {}
        self._sysctls = Sysctls(root, files)
        self._rows = PersistedValue(ROW, store, lane)
        self._turns = PeriodicWorker(self._sweep, _period_s)
        self._sure: set[str] = set()
        """Whose value of ours has been seen in the kernel in this life: anything else there is somebody else's."""
        self._there: dict[str, int | str] = {}

    # The seam

    def planned(self, situation: PlanSnapshot) -> None:
        """A look is over. What the marks are does not depend on pods: only a changed wish is worth a turn now."""
        before = self._turns.situation
        news = before is None or _of(before) != _of(situation)
        self._turns.planned(
            situation, wake=news and (situation.pools.memory.watermarks is not None or bool(self._kept))
        )

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
        wish, node = situation.pools.memory.watermarks, situation.view.node_memory
        self._there = await self._turns.work(self._look)
        if wish is not None and node is None:
            return  # nothing can be computed, and nothing is unwanted
        values = wanted(node.total_bytes, wish) if wish is not None and node is not None else {}
        dry = not situation.enforce or (wish is not None and wish.dry_run)
        held = {name for name in KNOBS if holding(situation.holds, path=MACHINE, knob=name, pod_uid=None) is not None}
        if not dry:
            await self._give_back({name: kept for name, kept in self._kept.items() if name not in {*values, *held}})
        here: dict[str, SettingStatus] = {}
        for name, value in values.items():
            state, detail = await self._one(name, value, node, held=name in held, dry=dry)
            here[name] = _noted(name, value, state, detail, self._there[name])
            if state in _COUNTED:
                self.counts[state] += 1
        self.standings = {MACHINE: here} if here else {}

    def _look(self) -> dict[str, int | str]:
        return {name: self._sysctls.read(name) for name in KNOBS}

    async def _one(
        self, name: str, value: int, node: NodeMemoryReading | None, *, held: bool, dry: bool
    ) -> tuple[str, str]:
        """Bring one to its value; how it stands then, and why."""
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
        if node is None or not has_room(name, there, target, node):
            return "waiting", "not enough available memory for it"
        fresh = SysctlState(original=original, ours=(*(() if kept is None else kept.ours[-1:]), target))
        try:
            await self._rows.save(msgspec.structs.replace(self._rows.now, values={**self._kept, name: fresh}))
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
        done: list[RestoreResult] = []
        for name, kept in sorted(chosen.items()):
            done.append(await self._turns.work(partial(self._sysctls.restore, name, kept)))
        over = {one.file for one in done if one.undo is not RestoreOutcome.REFUSED}
        self._sure -= over
        left = {name: kept for name, kept in self._kept.items() if name not in over}
        try:
            await self._rows.save(msgspec.structs.replace(self._rows.now, values=left))
        except StoreError as exc:
            return [msgspec.structs.replace(one, undo=RestoreOutcome.REFUSED, detail=str(exc)) for one in done]
        return done


def _of(situation: PlanSnapshot) -> tuple[object, ...]:
    """All of a situation that matters here."""
    known = situation.view.node_memory is not None
    return situation.pools.memory.watermarks, situation.enforce, situation.holds, known


def _period_s(situation: PlanSnapshot) -> float | None:
    return _PERIOD_S if situation.pools.memory.watermarks is not None else None


def _noted(name: str, value: int, state: str, detail: str, there: int | str) -> SettingStatus:
    setting = Setting(path=MACHINE, knob=name, value=value, policy=NAME, reason=REASONS[name])
    actual = str(there) if isinstance(there, int) else None
    return SettingStatus(setting, state, str(value), actual, detail, time.time())
