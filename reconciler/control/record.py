"""What outlives a run of the daemon: the store, with the ledger of its writes and the operator's holds.

Opening it after a kill takes over what was written and not recorded, thaws what was frozen, and removes the groups of a
killed trial.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol, final

import msgspec
import trio
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError, StoreError
from cgroupfs.log import get_log
from reconciler import __version__
from reconciler.actuators.cgroup.records import places_of
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, unfreeze
from reconciler.actuators.holds import LONGEST_S, MOST, OFF, active, check_target, tidied
from reconciler.control.event_notes import EventNotes
from reconciler.control.hour_rows import uptime_s
from reconciler.control.hub import NodeBase
from reconciler.runtime.format import duration
from reconciler.runtime.stints import in_worker
from reconciler.runtime.trials import clean_left
from reconciler.runtime.wakeup import WakeUp
from state.ledger import Ledger
from state.model import Hold, Setting, SourceStatus
from state.schema import HOLDS, META, PLACES, RUNNING
from state.store import Store, StoreBatch, boot_id

_HOLDS_LOG: Final = get_log("holds")
_LOOK_S: Final = 30.0
"""Longest sleep. The wall clock may be set while the task sleeps, and the sleep's clock stops in a suspend."""
_DRIFT_S: Final = 2.0
"""The wall clock's end follows when it is further off than this: a clock that is slewed writes no row each time."""


def read_holds(store: Store) -> dict[str, Hold]:
    holds: dict[str, Hold] = {}
    for key, row in store.rows(HOLDS):
        try:
            hold = decoded(msgspec.msgpack.Decoder(Hold).decode, row)
            if hold.target != key:
                _HOLDS_LOG.warning("cannot read a hold: its target differs from its key", key=key, target=hold.target)
                continue
            holds[key] = hold
        except ValueError as exc:
            _HOLDS_LOG.warning("cannot read a hold", key=key, error=str(exc))
    return holds


@final
class HoldRows:
    """The store's rows of holds. Those of a command are durable before it is answered, the others with a flush."""

    def __init__(self, store: Store, lane: trio.CapacityLimiter) -> None:
        """``lane``: the store's thread limiter."""
        self._store = store
        self._lane = lane
        self.pending: dict[str, Hold | None] = {}
        """By target, what the next flush has to write; None: the end of a hold."""
        self.urgent = WakeUp()
        """A flush is due now."""

    def stored(self) -> dict[str, Hold]:
        return read_holds(self._store)

    async def write(self, target: str, hold: Hold | None) -> None:
        """Make a hold (None: its end) durable. Errors: `StoreError`."""
        batch = StoreBatch()
        _add(batch, target, hold)
        await in_worker(self._store.apply, batch, limiter=self._lane)

    def soon(self, target: str, hold: Hold | None) -> None:
        """Make a hold (None: its end) durable with a flush of its own, soon; no caller waits for it."""
        self.pending[target] = hold
        self.urgent.set()

    def rewrite(self, holds: Mapping[str, Hold]) -> None:
        """All of these are to be written, but for those with a later row."""
        self.pending = {**holds, **self.pending}

    def stage(self, batch: StoreBatch) -> Callable[[], None]:
        """Put what is pending into a batch; call the answer when that is durable."""
        staged = dict(self.pending)
        for target, hold in staged.items():
            _add(batch, target, hold)

        def stored() -> None:
            self.pending = {key: hold for key, hold in self.pending.items() if key not in staged or hold != staged[key]}

        return stored


def _add(batch: StoreBatch, target: str, hold: Hold | None) -> None:
    if hold is None:
        batch.delete(HOLDS, target)
    else:
        batch.put(HOLDS, target, msgspec.msgpack.encode(hold))


@final
class HoldManager:
    """The holds in force. ``rows`` makes holds durable."""

    def __init__(
        self,
        rows: HoldRows,
        publish: Callable[[Mapping[str, Hold]], None],
        *,
        boot_id: str = "",
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = uptime_s,
    ) -> None:
        """``publish`` is called with the holds in force, by target, when they are others than before.

        What is stored may be of another boot or another version. ``wall`` and ``boot``: the clocks (seconds).
        """
        self.rows = rows
        self._wall, self._boot, self._boot_id = wall, boot, boot_id
        self._publish = publish
        self._changed = WakeUp()
        self._log = get_log("agent")
        self.all: dict[str, Hold] = {}
        """By target; includes expired holds until `run` has removed them."""
        self._unsaved: dict[str, Hold] = {}
        for target, hold in rows.stored().items():
            if len(self.all) >= MOST:
                self._log.warning("too many holds in the store; the others are ignored", most=MOST)
                break
            self._resume(target, hold)
        self._follow_clock()
        self.in_force: Mapping[str, Hold] = active(self.all.values(), self._wall())
        """By target, as published last."""
        self._refused = False
        """A hold is in force that is not one of these: the next refresh ends it."""

    def refresh(self) -> None:
        """Publish the holds in force now, if they are others."""
        self._follow_clock()
        before, self.in_force = self.in_force, active(self.all.values(), self._wall())
        if self.in_force != before or self._refused:
            self._refused = False
            self._publish(self.in_force)
        self._changed.set()

    def rewrite(self) -> None:
        """The store is another file than before: all holds are to be written to it."""
        self.rows.rewrite(self.all)

    def add_manual(self, hold: Hold) -> None:
        """The judge honours what a person wrote: remember it like any other hold."""
        if hold.target not in self.all and len(self.all) >= MOST:
            ends = {item.until: item.target for item in self.all.values() if item.until is not None}
            if not ends:
                self._log.warning("too many holds; this one is not stored", target=hold.target, most=MOST)
                self._refused = True
                return
            # The hold that would end first is dropped; a hold without an end remains.
            first = ends[min(ends)]
            self._log.warning("too many holds; one ended early", target=first, most=MOST)
            del self.all[first]
            self.rows.soon(first, None)
        self.all[hold.target] = held = self._dated(tidied(hold))
        self.rows.soon(hold.target, held)
        self._changed.set()

    def restored(self, uid: str, by: str, seconds: float) -> None:
        """A pod is restored: put it on hold for a while, unless it is held already. Errors: `InputError`.

        In force at once; durable soon, because undoing settings must not wait for a disk.
        """
        target = check_target(f"pod:{uid}")
        known = active(self.all.values(), self._wall())
        if target not in known and f"{OFF}{uid}" not in known and seconds > 0:
            reason = "restored manually"
            self.add_manual(Hold(target=target, reason=reason, by=by or "restore", until=self._wall() + seconds))
        self.refresh()

    async def put(self, hold: Hold) -> Hold:
        """Leave something alone until; the hold as it is kept.

        Errors: `InputError` for a target that is none, an end that is not within `LONGEST_S`, or too many holds;
        `StoreError`.
        """
        check_target(hold.target)
        if hold.until is not None and not 0 < hold.until - self._wall() <= LONGEST_S + _DRIFT_S:
            raise InputError("hold until", hold.until, f"a time within {duration(LONGEST_S)} from now")
        if hold.target not in self.all and len(self.all) >= MOST:
            raise InputError("holds", len(self.all), f"fewer than {MOST} holds; release some")
        held = self._dated(tidied(hold))
        await self.rows.write(hold.target, held)
        self.all[hold.target] = held
        self.refresh()
        return held

    async def release(self, target: str) -> bool:
        """End a hold; False when there was none. The caller refreshes. Errors: `StoreError`."""
        if target not in self.all:
            return False
        await self.rows.write(target, None)
        # Meanwhile it may have expired, or another release may have ended it.
        self.all.pop(target, None)
        return True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Remove expired holds; nothing else would reconcile what they covered."""
        task_status.started()
        while True:
            self.expire()
            self._changed.clear()
            left = [hold.until - self._wall() for hold in self.all.values() if hold.until is not None]
            await self._changed.wait(max(0.0, min([*left, _LOOK_S])))

    def expire(self) -> None:
        self._follow_clock()
        now = self._boot()
        for target in [
            item.target for item in self.all.values() if item.ends_boot_s is not None and item.ends_boot_s <= now
        ]:
            del self.all[target]
            self._unsaved.pop(target, None)
            self.rows.soon(target, None)
            self._log.info("hold ended", target=target)
        for target, hold in self._unsaved.items():
            self.rows.soon(target, hold)
        self._unsaved.clear()
        self.refresh()

    def _dated(self, hold: Hold) -> Hold:
        """A new hold with its end on the boot clock."""
        if hold.until is None:
            return hold
        seconds = hold.until - self._wall()
        return replace(hold, seconds=seconds, ends_boot_s=self._boot() + seconds, boot_id=self._boot_id)

    def _resume(self, target: str, hold: Hold) -> None:
        """Take over a stored hold.

        The time left is never more than its whole duration, whatever the clock reads now.
        """
        try:
            check_target(target)
        except InputError as exc:
            self._log.warning("ignoring an invalid hold in the store", error=str(exc))
            return
        if hold.until is not None:
            longest = min(hold.seconds if hold.seconds is not None and hold.seconds > 0 else LONGEST_S, LONGEST_S)
            if self._boot_id and hold.boot_id == self._boot_id and hold.ends_boot_s is not None:
                left = hold.ends_boot_s - self._boot()
            else:
                left = hold.until - self._wall()
            # NaN is over.
            left = min(left, longest) if left > 0 else 0.0
            ends, until = self._boot() + left, self._wall() + left
            resumed = replace(hold, until=until, seconds=longest, ends_boot_s=ends, boot_id=self._boot_id)
            if not (math.isclose(ends, hold.ends_boot_s or 0.0, abs_tol=0.001) and hold.boot_id == self._boot_id):
                self._unsaved[target] = resumed
            hold = resumed
        self.all[target] = tidied(hold)

    def _follow_clock(self) -> None:
        """Move the ends on the wall clock to where the boot clock has them."""
        ahead = self._wall() - self._boot()
        for target, hold in self.all.items():
            if hold.until is not None and hold.ends_boot_s is not None:
                until = hold.ends_boot_s + ahead
                if abs(until - hold.until) > _DRIFT_S:
                    self.all[target] = self._unsaved[target] = replace(hold, until=until)


_LOG: Final = get_log("agent")


def was_killed(store: Store) -> bool:
    """Whether the last daemon on this store ended without a stop. Meaningful only while none runs."""
    return any(key == RUNNING for key, _ in store.rows(META))


class StoreSettings(Protocol):
    """The configuration: the state file, and how many events it keeps."""

    @property
    def path(self) -> str: ...

    @property
    def history(self) -> int: ...


@final
class NodeRecord:
    """Store, ledger and holds. ``lane`` is the one-thread limiter of all calls that write to the store."""

    def __init__(
        self,
        base: NodeBase,
        config: StoreSettings,
        intents: str,
    ) -> None:
        """``intents``: as `Ledger`'s.

        Errors: `NewerSchemaError` when the store is of a newer version.
        """
        place, files = base.place, base.files
        self._hierarchy = place.hierarchy
        self._files = files
        self.lane = trio.CapacityLimiter(1)
        self.store = Store(
            config.path,
            boot=boot_id(place.root),
            version=__version__,
            node=place.name,
            history_limit=config.history,
            meta={PLACES: places_of(place.root, place.runtime, place.kubelet.root_dir, intents)},
        )
        self.ledger = Ledger(self.store, intents=intents, title_of=base.pods.title)
        if was_killed(self.store):
            adopted = adopt_unjournaled_writes(place.hierarchy, self.ledger, files=files)
            _LOG.info("the last run was killed; its values stay in force", files=len(self.ledger), not_noted=adopted)
        self.thaw()
        left = clean_left(place.hierarchy, os.path.dirname(config.path), place.root)
        for group in left.removed:
            _LOG.info("removed what a killed doctor --prove left", group=group)
        for group in left.remaining:
            _LOG.warning("what a killed doctor --prove left cannot be removed", group=group)
        self.holds = HoldManager(HoldRows(self.store, self.lane), base.hub.held, boot_id=self.store.boot)
        self.notes = EventNotes(self.ledger.note, __version__, self.holds.in_force)
        self.notes.window(base.window())
        base.hub.held.subscribe(self.notes.held)

    def report(self, alert: Callable[[str, str, Setting | None], None]) -> None:
        """Report what was wrong with the store when it was opened, if anything, and what became of it."""
        store = self.store
        if store.damage is not None:
            aside = f" and was moved to {store.quarantined}" if store.quarantined else ""
            saved = f"{len(self.ledger)} file records were recovered" if store.lost else "no data was lost"
            alert("store", f"the store was damaged ({store.damage}){aside}; {saved}", None)

    def statuses(self) -> list[SourceStatus]:
        store = self.store
        if not store.writable:
            return [SourceStatus(name="store", ok=False, age_s=None, detail=store.problem or "not writable")]
        return [SourceStatus(name="store", ok=True, age_s=0.0, detail=store.path)]

    def thaw(self) -> list[str]:
        """Thaw every group that bypassd has frozen; a response that still needs it freezes again.

        Returns the group paths.
        """
        done, failed = unfreeze(self._hierarchy, self.ledger, files=self._files)
        for path in done:
            _LOG.info("runs again", group=path)
        for message in failed:
            _LOG.error(message)
        return done

    def close(self) -> None:
        self.thaw()  # while no daemon runs nothing else would
        self.notes.stopped()
        with suppress(StoreError):
            self.ledger.flush()
        self.store.close()
