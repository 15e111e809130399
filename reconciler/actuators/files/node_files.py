"""Sets files of the node outside of every cgroup (`reconciler.actuators.file_catalog`). An auxiliary actuator."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import whole
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
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import LedgerState, RowCodec, row_of, undo_rows, undo_values
from reconciler.actuators.file_catalog import FILES
from reconciler.actuators.holds import holding
from state.entry import LedgerEntry, RestoreResult
from state.kinds import FILE, SYSCTL
from state.memory import MACHINE
from state.model import Setting
from state.plan import FileTarget
from state.setting_state import SettingState

NAME: Final = "node_files"
CHANGED: Final = "another program has written it just now"
_ALTERED: Final = "accepted, but it reads "
_PERIOD_S: Final = 60.0
_COUNTED: Final = frozenset({SettingState.WRITTEN, SettingState.REFUSED})


class NodeFileState(Struct, frozen=True, kw_only=True):
    """One file: its original value, and the values of ours that it may have, the newest last."""

    original: int
    ours: tuple[int, ...]
    policy: str


class FileRows(Struct, frozen=True, kw_only=True):
    values: Mapping[str, NodeFileState] = {}


def _codec(kind: str) -> RowCodec[FileRows]:
    """The rows of one kind: object ``/``, field the file's name."""

    def load(rows: Iterable[LedgerEntry]) -> FileRows:
        values = {}
        for row in rows:
            with suppress(ValueError):
                # The name is looked up later and never followed as a path.
                if row.path == MACHINE and row.original is not None and "/" not in row.file:
                    ours = tuple(map(whole, row.ours))
                    values[row.file] = NodeFileState(original=whole(row.original), ours=ours, policy=row.policy or "")
        return FileRows(values=values)

    def dump(state: FileRows) -> Iterable[LedgerEntry]:
        for name, value in state.values.items():
            yield _row(kind, name, value)

    return RowCodec(kind=kind, load=load, dump=dump)


def _row(kind: str, name: str, value: NodeFileState) -> LedgerEntry:
    ours = map(str, value.ours)
    return row_of(kind, MACHINE, name, knob=name, policy=value.policy, original=str(value.original), ours=ours)


CODECS: Final = {kind: _codec(kind) for kind in (SYSCTL, FILE)}


class FileAccess:
    """Reads and writes the files; as a `ValueAccess` it restores them. All methods block and run in a thread."""

    def __init__(self, root: str, files: FileOps) -> None:
        self._root = root
        self._files = files

    def value(self, name: str) -> int | str:
        """The value; or a text with the reason why it cannot be read."""
        file = FILES.get(name)  # a name that is not in it is never opened
        if file is None:
            return f"this version has no file named {name}"
        directory, base = os.path.split(os.path.join(self._root, file.path))
        try:
            return file.codec.decode(self._files.read(directory, base))
        except FileNotFoundError:
            return f"this kernel has no {name}"
        except OSError as exc:
            return f"cannot read: {errno_name(exc.errno)}"
        except ValueError:
            return f"/{file.path} has an unexpected text"

    def set(self, name: str, value: int, *, expected: int | None = None) -> str:
        """Write the value and read it back. Returns an empty text, or the reason of the failure.

        ``expected``: the value at the comparison; with another one nothing is written, and the reason is `CHANGED`.
        """
        if expected is not None and self.value(name) != expected:
            return CHANGED
        file = FILES[name]
        directory, base = os.path.split(os.path.join(self._root, file.path))
        try:
            self._files.write(directory, base, file.codec.encode(value))
        except OSError as exc:
            return errno_name(exc.errno)  # EROFS: /proc/sys is read-only in a container that is not privileged
        except ValueError as exc:
            return str(exc)
        result = self.value(name)
        return "" if result == value else f"{_ALTERED}{result}"

    def is_same(self, row: LedgerEntry) -> bool:
        """Always the same object while the kernel runs."""
        return row.path == MACHINE

    def read(self, row: LedgerEntry) -> str:
        """The value. Errors: `ValueError` with the reason why it cannot be read."""
        value = self.value(row.file)
        if isinstance(value, str):
            raise ValueError(value)  # noqa: TRY004  # an error returned by the kernel, not a wrong type
        return str(value)

    def write(self, row: LedgerEntry, text: str) -> None:
        """Write the value. Errors: `ValueError` with the errno's name."""
        if refused := self.set(row.file, whole(text)):
            raise ValueError(refused)


def undo(access: FileAccess, kind: str, state: FileRows) -> tuple[list[RestoreResult], FileRows]:
    """Restore the originals; returns the results and the remaining state. For a thread. Errors: none."""
    rows = sorted((_row(kind, name, value) for name, value in state.values.items()), key=lambda row: row.file)
    done, left = undo_values(rows, access)
    return done, CODECS[kind].load(left)


@final
class NodeFiles(PeriodicActuator):
    name = NAME

    def __init__(self, context: ActuatorContext) -> None:
        self.counts: Counter[str] = Counter()
        self._access = FileAccess(context.root, context.files)
        self._rows = {kind: LedgerState(codec, context.ledger, context.store_lane) for kind, codec in CODECS.items()}
        super().__init__(PeriodicWorker(self._sweep, self._period_s), _relevant)
        self._confirmed: set[str] = set()
        """Files in which a value of ours was read in this run: any other value there is another program's."""
        self._values: dict[str, int | str] = {}
        self._not_restored: dict[str, str] = {}
        """Files whose originals were refused, with the reason."""

    # The interface of an auxiliary actuator

    def _concerns(self, situation: PlanSnapshot) -> bool:
        return bool(situation.plan.files or self._changed)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Restore all of them; none belongs to a pod."""
        async with self._worker.restoring():
            return await self._restore(self._changed) if only is None else ()

    def status(self) -> Mapping[str, object]:
        """Current, original and wanted values by name; counts."""
        changed, statuses = self._changed, self._statuses.get(MACHINE, {})
        values = {
            name: {
                "now": value if isinstance(value, int) else None,
                "original": changed[name].original if name in changed else None,
                "wanted": status.setting.value if (status := statuses.get(name)) is not None else None,
                "state": status.state if status is not None else None,
                "detail": status.detail if status is not None else "",
            }
            for name, value in sorted(self._values.items())
        }
        return {"values": values, "counts": dict(sorted(self.counts.items()))}

    def problems(self) -> Sequence[str]:
        """The wanted values that are not in place, and the originals that are not restored, with the reason."""
        failing = [
            f"{name}: {status.detail}"
            for name, status in sorted(self._statuses.get(MACHINE, {}).items())
            if status.state.is_failing() or status.state.is_absent() or status.state is SettingState.YIELDED
        ]
        return failing + [f"{name}: not restored: {why}" for name, why in sorted(self._not_restored.items())]

    # One sweep

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        # Also while an original could not be restored.
        return _PERIOD_S if situation.plan.files or (situation.enforce and self._changed) else None

    @property
    def _changed(self) -> Mapping[str, NodeFileState]:
        return {name: value for rows in self._rows.values() for name, value in rows.now.values.items()}

    async def _sweep(self, situation: PlanSnapshot) -> None:
        targets = situation.plan.files
        names = sorted({*targets, *self._changed})
        self._values = await self._worker.work(partial(self._read, names))
        held = {name for name in names if holding(situation.holds, path=MACHINE, knob=name, pod_uid=None) is not None}
        self._not_restored = {}
        if situation.enforce:
            await self._restore(
                {
                    name: file
                    for name, file in self._changed.items()
                    if (name not in targets or targets[name].dry_run) and name not in held
                }
            )
        statuses: dict[str, SettingStatus] = {}
        for name, target in targets.items():
            if (setting := target.setting) is None:
                continue  # the value cannot be computed now; the current one remains
            dry = not situation.enforce or target.dry_run
            state, detail = await self._set(setting, target, held=name in held, dry=dry)
            value = self._values[name]
            actual = str(value) if isinstance(value, int) else None
            statuses[name] = SettingStatus(setting, state, str(setting.value), actual, detail, time.time())
            if state in _COUNTED:
                self.counts[state] += 1
        self._statuses = {MACHINE: statuses} if statuses else {}

    def _read(self, names: Iterable[str]) -> dict[str, int | str]:
        """In the thread."""
        return {name: self._access.value(name) for name in names}

    async def _set(self, setting: Setting, wanted: FileTarget, *, held: bool, dry: bool) -> tuple[SettingState, str]:
        """Bring one file to its value; returns its state, with the reason."""
        name, value = setting.knob, setting.value
        assert isinstance(value, int)
        present, before = self._values[name], self._changed.get(name)
        if isinstance(present, str):
            return SettingState.MISSING, present
        original = present if before is None else before.original
        target = max(value, original) if wanted.only_raise else value
        if before is not None and self._is_foreign(name, present, before):
            # sysctl's, tuned's, or the kernel's own as memory is plugged in.
            return SettingState.YIELDED, f"set to {present} by another program; unchanged"
        if present == target:
            if before is not None:
                self._confirmed.add(name)
            return SettingState.IN_PLACE, "" if target == value else f"never set below its original value {original}"
        if held:
            return SettingState.HELD, "on hold by an operator"
        if dry:
            return SettingState.WOULD_WRITE, ""
        if wanted.most_rise is not None and target - present > wanted.most_rise:
            return SettingState.WAITING, "not enough available memory for it"
        # The value that is in force, not the last recorded: that one may have been refused, or a kill came before it.
        ours = (*(() if present == original else (present,)), target)
        rows = self._rows[FILES[name].kind]
        fresh = NodeFileState(original=original, ours=ours, policy=setting.policy)
        try:
            # Durable before the write: the original, and each value of ours that the file may have after a crash.
            await rows.save(FileRows(values={**rows.now.values, name: fresh}))
        except StoreError as exc:
            return SettingState.NOT_RECORDED, str(exc)
        refused = await self._worker.work(partial(self._access.set, name, target, expected=present))
        if refused == CHANGED:
            # Its owner has written it while the original became durable: that value is the next sweep's original.
            rest = {file: state for file, state in rows.now.values.items() if file != name}
            try:
                await rows.save(FileRows(values=rest if before is None else {**rest, name: before}))
            except StoreError as exc:
                return SettingState.NOT_RECORDED, str(exc)
            return SettingState.DUE, CHANGED
        if refused:
            await self._note_altered(rows, name, refused)
            return SettingState.REFUSED, refused
        self._confirmed.add(name)
        self._values[name] = target
        return SettingState.WRITTEN, ""

    async def _note_altered(self, rows: LedgerState[FileRows], name: str, refused: str) -> None:
        """What the kernel has made of our value is ours, too: no other program's, and restored."""
        if not refused.startswith(_ALTERED):
            return
        self._values[name] = after = await self._worker.work(partial(self._access.value, name))
        state = rows.now.values[name]
        if isinstance(after, int) and after not in state.ours:
            altered = replace(state, ours=(*state.ours[:-1], after, state.ours[-1]))
            # If that cannot be recorded, the next sweep takes it for another program's value and leaves it.
            with suppress(StoreError):
                await rows.save(FileRows(values={**rows.now.values, name: altered}))

    def _is_foreign(self, name: str, present: int, before: NodeFileState) -> bool:
        """True if the value is neither ours nor the original, which remains if a crash preceded the write."""
        return present not in before.ours and (name in self._confirmed or present != before.original)

    async def _restore(self, chosen: Mapping[str, NodeFileState]) -> list[RestoreResult]:
        done: list[RestoreResult] = []
        for kind, rows in self._rows.items():
            selected = {name: file for name, file in chosen.items() if name in rows.now.values}
            if not selected:
                continue
            results, failed = await self._worker.work(partial(undo, self._access, kind, FileRows(values=selected)))
            finished = selected.keys() - failed.values.keys()
            self._confirmed -= finished
            self._not_restored = {name: why for name, why in self._not_restored.items() if name not in finished}
            self._not_restored |= {result.file: result.detail for result in results if result.file in failed.values}
            self._values |= await self._worker.work(partial(self._read, finished))
            left = {name: file for name, file in rows.now.values.items() if name not in finished}
            done += await rows.restored(FileRows(values=left), results)
        return done


def _relevant(situation: PlanSnapshot) -> tuple[object, ...]:
    targets = {name: (target.setting, target.dry_run) for name, target in situation.plan.files.items()}
    return targets, situation.enforce, situation.holds


def _undo_offline(context: OfflineContext) -> Sequence[RestoreResult]:
    if context.only is not None:
        return ()
    access = FileAccess(context.root, context.files)
    return [
        result
        for kind, codec in CODECS.items()
        for result in undo_rows(context.ledger, codec, partial(undo, access, kind))
    ]


ACTUATOR: Final = ActuatorKind(codecs=CODECS, build=NodeFiles, undo=_undo_offline)
