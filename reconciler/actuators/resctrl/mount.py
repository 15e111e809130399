"""The mount of resctrl: the machine's capability, our own mount, and the recorded state of both."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import AgentError, InputError, StoreError
from reconciler.actuators.codec import LedgerState
from reconciler.actuators.resctrl.undo import CODEC, ResctrlState, undo_all
from resctrl.capability import Capability, ResctrlStatus
from resctrl.files import GroupFiles, Mounter, unseen
from state.cache import CacheRequest
from state.entry import RestoreResult
from state.ledger import Ledger

_REREAD_S: Final = 60.0
_REMOUNT_S: Final = 600.0
"""From a refused mount to the next attempt, which costs two writes to the store: a refusal by the kernel or a filter is
permanent."""
T = TypeVar("T")


class _MountRefusal(NamedTuple):
    """A failed mount: its options, the error, and when (monotonic seconds)."""

    options: tuple[str, ...]
    error: AgentError
    at_s: float


class ResctrlWorker(Protocol):
    """Runs blocking work outside the event loop."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@final
class ResctrlMount:
    """Mounts, reads and restores resctrl. All access to resctrl is done by ``work``."""

    def __init__(
        self,
        ledger: Ledger,
        store_lane: trio.CapacityLimiter,
        *,
        place: str,
        read: Callable[[], Capability],
        files: GroupFiles,
        mounter: Mounter,
        work: ResctrlWorker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``place``: the mount point to use if resctrl is not mounted; ``read``: reads the machine's capability."""
        self.capability: Capability | None = None
        """The newest one; None before the first reading, and if ``info`` cannot be parsed."""
        self._place = place
        self._read = read
        self._files = files
        self._mounter = mounter
        self._rows = LedgerState(CODEC, ledger, store_lane)
        self._work = work
        self._clock = clock
        self._read_at = float("-inf")
        self._unrestored: ResctrlState | None = None
        self._refused: _MountRefusal | None = None

    @property
    def state(self) -> ResctrlState:
        return self._rows.now

    @property
    def to_undo(self) -> bool:
        """Whether there may be changes of ours on which no restore was tried yet; True at the start."""
        return self._read_at == float("-inf") or self.state not in (self._unrestored, ResctrlState())

    async def offered(self, *, again: bool = False) -> Capability | None:
        """The machine's capability; read again periodically, and at each call while it may become ready.

        Errors: `InputError` for an ``info`` file that differs from the kernel's documentation.
        """
        cached, now = self.capability, self._clock()
        lasting = cached is not None and cached.status is not ResctrlStatus.NOT_MOUNTED
        if again or not lasting or now - self._read_at >= _REREAD_S:
            self._read_at = now
            try:
                self.capability = await self._work(self._read)
            except InputError:
                self.capability = None
                raise
        return self.capability

    async def mount(self, request: CacheRequest) -> Capability | None:
        """Mount resctrl after recording it; after a refusal it is tried again only after a delay.

        Errors: `CgroupError`, `StoreError`.
        """
        options = tuple(option.value for option in request.mount_options)
        if not await self._work(self._mounter.sees_the_host):
            raise unseen(self._place, options)
        last, now = self._refused, self._clock()
        if last is not None and last.options == options and now - last.at_s < _REMOUNT_S:
            # Raised repeatedly, it would collect each caller in its traceback.
            raise last.error.with_traceback(None)
        await self.save(replace(self.state, place=self._place))
        try:
            await self._work(partial(self._mounter.mount, self._place, options))
        except AgentError as exc:
            self._refused = _MountRefusal(options, exc, now)
            await self.save(replace(self.state, place=None))
            raise
        self._refused = None
        return await self.offered(again=True)

    async def undo(self) -> list[RestoreResult]:
        """Restore all changes of ours. Errors: `StoreError` if the remaining state cannot be recorded."""
        capability = await self.offered(again=True)
        if capability is None:
            return []
        done, left = await self._work(partial(undo_all, self._files, capability, self.state, self._mounter))
        await self.save(left, dropped="restored")
        # To be read again: resctrl may be unmounted now.
        self.capability, self._unrestored = None, left
        return done

    async def save(self, state: ResctrlState, *, dropped: str = "gone") -> None:
        """Make the state durable. Errors: `StoreError`: then nothing may be written."""
        try:
            await self._rows.save(state, dropped=dropped)
        except StoreError as exc:
            raise StoreError(f"resctrl is unmanaged: its state cannot be recorded: {exc}") from exc
