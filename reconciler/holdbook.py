"""The holds that people have put: remembered in the store, ended at their time, brought to whoever goes by them."""

import time
from collections.abc import Callable, Mapping
from typing import Final, final

import trio

from reconciler import logs
from reconciler.holds import active, check_target
from reconciler.keeper import Keeper
from state.model import Hold

_LOOK_S: Final = 30.0
"""The wall clock may be set while we sleep: never sleep for longer."""


@final
class HoldBook:
    """See the module's text. ``keeper`` makes them durable; set before anything is asked of the book."""

    keeper: Keeper

    def __init__(self, holds: dict[str, Hold], in_force: Callable[[Mapping[str, Hold]], None]) -> None:
        """``in_force`` is told of the holds in force, by target, whenever they may have changed."""
        self.all = holds
        """By target; those whose time is over until `run` has seen it."""
        self._in_force = in_force
        self._changed = trio.Event()
        self._log = logs.get("agent")

    def refresh(self) -> None:
        """Tell what is in force now."""
        self._in_force(active(self.all.values(), time.time()))
        self._changed.set()

    def by_hand(self, hold: Hold) -> None:
        """The judge honours what a person wrote: remember it like any other hold."""
        self.all[hold.target] = hold
        self.keeper.hold_soon(hold.target, hold)
        self._changed.set()

    async def put(self, hold: Hold) -> None:
        """Leave something alone until. Errors: `InputError` for a target that is none, `StoreError`."""
        check_target(hold.target)
        await self.keeper.hold(hold)
        self.all[hold.target] = hold
        self.refresh()

    async def release(self, target: str) -> bool:
        """End a hold; False when there was none. The caller refreshes. Errors: `StoreError`."""
        if target not in self.all:
            return False
        await self.keeper.release(target)
        del self.all[target]
        return True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take holds away whose time has come; nobody else would look at what they covered."""
        task_status.started()
        while True:
            now = time.time()
            for target in [one.target for one in self.all.values() if one.until is not None and one.until <= now]:
                del self.all[target]
                self.keeper.hold_soon(target, None)
                self._log.info("a hold has ended", target=target)
            self.refresh()
            self._changed = trio.Event()
            ends = [hold.until - now for hold in self.all.values() if hold.until is not None]
            with trio.move_on_after(min([*ends, _LOOK_S])):
                await self._changed.wait()
