"""What outlives a run of the daemon: the store, with the ledger of its writes and the operator's holds.

Opening it after a kill takes over what was written and not recorded, thaws what was frozen, and removes the groups of a
killed trial.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, final

import trio

from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler import __version__
from reconciler.actuators.cgroup.records import places_of
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, unfreeze
from reconciler.control.event_notes import EventNotes
from reconciler.control.hold_store import HoldManager, HoldRows
from reconciler.control.hub import NodeBase
from reconciler.runtime.trials import clean_left
from state.ledger import Ledger
from state.model import Setting, SourceStatus
from state.schema import META, PLACES, RUNNING
from state.store import Store, boot_id

_LOG: Final = get_log("agent")


def was_killed(store: Store) -> bool:
    """Whether the last daemon on this store ended without a word. Only true when none runs now."""
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
        """Whether the store can be written."""
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
        """Thaw what we have frozen, and give the store back."""
        self.thaw()
        self.notes.stopped()
        with suppress(StoreError):
            self.ledger.flush()
        self.store.close()
