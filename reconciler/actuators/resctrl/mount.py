"""Where resctrl is: what this machine offers, a mount of ours, and what is remembered of both until it is undone."""

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
from resctrl.files import GroupFiles
from resctrl.mount import Mounter, unseen
from state.cache import CacheRequest
from state.ledger import Ledger
from state.undo import RestoreResult

_LOOK_AGAIN_S: Final = 60.0
_MOUNT_AGAIN_S: Final = 600.0
"""What the kernel or a filter refuses it goes on refusing, and each attempt is two writes to the store."""
T = TypeVar("T")


class _MountRefusal(NamedTuple):
    """A mount that did not work: how it was to be, why not, and when."""

    options: tuple[str, ...]
    error: AgentError
    at_s: float


class ResctrlWorker(Protocol):
    """Does what blocks, elsewhere than in the loop."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@final
class ResctrlMount:
    """See the module's text. All that it does to resctrl goes through ``work``."""

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
        """``place``: where to mount it if that has to be; ``read``: looks at what the machine offers."""
        self.capability: Capability | None = None
        """The newest answer; None before the first and where ``info`` cannot be understood."""
        self._place = place
        self._read = read
        self._files = files
        self._mounter = mounter
        self._kept = LedgerState(CODEC, ledger, store_lane)
        self._work = work
        self._clock = clock
        self._looked_at = float("-inf")
        self._left: ResctrlState | None = None
        self._refused: _MountRefusal | None = None

    @property
    def kept(self) -> ResctrlState:
        """What is remembered."""
        return self._kept.now

    @property
    def to_undo(self) -> bool:
        """Whether there may be something of ours that undoing has not been tried on; so at the start, too."""
        return self._looked_at == float("-inf") or self.kept not in (self._left, ResctrlState())

    async def offered(self, *, again: bool = False) -> Capability | None:
        """What the machine offers; looked at again now and then, and each time while it is not ready.

        Errors: `InputError` for an ``info`` file that does not hold what the kernel documents.
        """
        known, now = self.capability, self._clock()
        ready = known is not None and known.status is ResctrlStatus.READY
        if again or not ready or now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now
            try:
                self.capability = await self._work(self._read)
            except InputError:
                self.capability = None
                raise
        return self.capability

    async def mount(self, wish: CacheRequest) -> Capability | None:
        """Mount it, which is remembered first; what was refused is tried again now and then.

        Errors: `CgroupError`, `StoreError`.
        """
        options = tuple(option.value for option in wish.mount_options)
        if not await self._work(self._mounter.sees_the_host):
            raise unseen(self._place, options)
        last, now = self._refused, self._clock()
        if last is not None and last.options == options and now - last.at_s < _MOUNT_AGAIN_S:
            # Raised again and again, it would gather each caller in its traceback.
            raise last.error.with_traceback(None)
        await self.keep(replace(self.kept, place=self._place))
        try:
            await self._work(partial(self._mounter.mount, self._place, options))
        except AgentError as exc:
            self._refused = _MountRefusal(options, exc, now)
            await self.keep(replace(self.kept, place=None))
            raise
        self._refused = None
        return await self.offered(again=True)

    async def undo(self) -> list[RestoreResult]:
        """Take everything back that is ours. Errors: `StoreError` when what is left cannot be remembered."""
        capability = await self.offered(again=True)
        if capability is None:
            return []
        done, left = await self._work(partial(undo_all, self._files, capability, self.kept, self._mounter))
        await self.keep(left, dropped="restored")
        self.capability, self._left = None, left
        return done

    async def keep(self, kept: ResctrlState, *, dropped: str = "gone") -> None:
        """Make it durable. Errors: `StoreError`: then nothing may be touched."""
        try:
            await self._kept.save(kept, dropped=dropped)
        except StoreError as exc:
            raise StoreError(f"resctrl is unmanaged: its state cannot be recorded: {exc}") from exc
