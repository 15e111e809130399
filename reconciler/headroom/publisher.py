"""Publishes the headroom to the cluster: finds the object, writes when it changes and before it is outdated, withdraws.

What is published falls at once and rises with the headroom's own steps; usually there is one write a minute. What
others change in between is counted and reported.

It is withdrawn when the daemon stops (not when another one takes over), observes, or no longer may publish; by
``bypassctl headroom --withdraw`` of a daemon that was killed (the unit's ExecStopPost); by the next start, which finds
the note in the store.
"""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol, final

import trio

from cgroupfs.errors import AgentError
from cgroupfs.log import get_log
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.shapes import NodeUse, Offer
from reconciler.runtime.format import cpu, duration, plural, size
from reconciler.runtime.wakeup import WakeUp
from state.model import SourceStatus

NAME: Final = "published headroom"
FALL_S: Final = 2.0
"""From the last write to one of a lower amount."""
RISE_S: Final = 10.0
"""From the last write to any other."""
RETRY_S: Final = 60.0
"""The longest wait after an error: a try a minute is the usual load, and nothing else shows that rights were given."""
FOREIGN_S: Final = 300.0
"""For so long another writer has its object."""
BURST: Final = 60
REFILL_S: Final = 15.0
_IDLE_S: Final = 300.0
"""While nothing is to be published; a change ends the wait."""
SEARCH_S: Final = 600.0
"""``auto``: a control plane may be installed, or know the node, later."""
_FAILED_S: Final = 5.0
"""The wait after the first error; it doubles with each."""
_CLOSE_S: Final = 1.0
_WITHDRAW_S: Final = 3.0
"""The stop of the daemon may not wait for an API server; the unit's next step tries again."""
_LOG: Final = get_log("publisher")
_AUTO: Final = (ClusterTarget.KOORDINATOR, ClusterTarget.KATALYST, ClusterTarget.NODE)


class PublishError(AgentError):
    """It was not published. ``missing``: the object, or its kind, does not exist, as the API server itself says.

    ``wait_s``: not to be repeated before, as the API server requests; None: no request.
    ``foreign``: another program writes the same fields. ``invalid``: the API server does not take this change of the
    object as it is.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: bool = False,
        foreign: bool = False,
        invalid: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.foreign = foreign
        self.invalid = invalid
        self.wait_s = wait_s


class Published(NamedTuple):
    """What the API server answered: the amounts as they are there now. ``next_s``: when it is to be written again.

    ``written``: False: nothing was written yet, so nothing is published. ``edit``: who had changed what was published
    before, and how; it is restored now. Empty: no change.
    """

    offer: Offer
    detail: str
    next_s: float
    written: bool = True
    edit: str = ""


@final
class WriteAllowance:
    """Writes that may be made now: `BURST`, and one more each `REFILL_S`; so at most 300 in any hour.

    Where the headroom changes all the time, a write waits for up to `REFILL_S`.
    """

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at = -math.inf

    def take(self) -> None:
        """Count a write, also where none is left: then later ones wait longer."""
        self._left = self._now() - 1.0
        self._at = trio.current_time()

    def ready_at(self) -> float:
        """When the next one may be made, in trio's time."""
        return trio.current_time() + max(0.0, 1.0 - self._now()) * REFILL_S

    def _now(self) -> float:
        return min(float(BURST), self._left + (trio.current_time() - self._at) / REFILL_S)


class Meter(Protocol):
    """Measures the use of the node and of its pods (`reconciler.signals.node_use`)."""

    async def measure(self, window_s: float) -> NodeUse | None:
        """The means of this many seconds; None: not known yet."""


class PublishTarget(Protocol):
    """One control plane's object. Errors: `PublishError`; `cgroupfs.errors.SourceError` without an answer."""

    name: ClusterTarget

    async def find(self) -> None:
        """Read the object; nothing is written. Errors: as of the class, also where another writer is seen."""

    async def publish(self, offer: Offer) -> Published:
        """Write, and return what is there then."""

    async def withdraw(self) -> None:
        """Take it back. What another writer has put there since is left."""

    async def aclose(self) -> None:
        """Close the connection; it may be used again."""


@final
class HeadroomPublisher:
    """A component: keeps the cluster's object at the headroom. ``wanted`` may be replaced while it runs."""

    def __init__(
        self,
        make: Callable[[ClusterTarget], PublishTarget],
        *,
        wanted: Callable[[], ClusterTarget],
        offer: Callable[[], Offer],
        writes: Callable[[], bool],
        note: Callable[[ClusterTarget | None], Awaitable[None]],
        noted: ClusterTarget | None = None,
        renamed: Callable[[], Awaitable[None]] | None = None,
        changed: WakeUp | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``make``: a target's object, called once for each. ``offer``: the headroom as promised now.

        ``writes``: whether this mode changes anything. ``note``: makes durable where something is published (None:
        nowhere), before the first write and after the withdrawal; ``noted``: what an earlier run noted. ``renamed``:
        withdraws what the node published under another name.
        ``changed``: set when the headroom is another one.
        """
        self._make = make
        self._targets: dict[ClusterTarget, PublishTarget] = {}
        self._wanted = wanted
        self._offer = offer
        self._writes = writes
        self._note = note
        self._noted = noted
        self._renamed = renamed
        self._wall = wall
        self._changed = changed or WakeUp()
        self._found: ClusterTarget | None = None
        self._search_at = 0.0
        self._sent: Offer | None = None
        self._published: Published | None = None
        self._published_at: float | None = None
        self._problem = ""
        self._failures = 0
        self.edits = 0
        """Since the start: how often another program was found to have changed, or to write, what is published."""
        self._edit: tuple[str, float] | None = None
        self._again = False
        self._writes_left = WriteAllowance()
        self._allowed_at = -math.inf
        """Not before, as the API server has requested."""

    def retry(self) -> None:
        """The API server responds again, or there are other credentials: what has failed does not wait any longer."""
        if self._problem:
            self._failures, self._again = 0, True
            self._changed.set()

    def changed(self) -> None:
        """The headroom, the mode or the setting is another one."""
        self._changed.set()

    def status(self) -> dict[str, object]:
        """The state document's part: what was read back, and when."""
        published = self._published
        return {
            "target": self._noted.value if self._noted is not None else None,
            "cpu_milli": published.offer.cpu_milli if published is not None else None,
            "memory_bytes": published.offer.memory if published is not None else None,
            "detail": published.detail if published is not None else None,
            "at": self._published_at,
            "problem": self._problem or None,
            "edits": self.edits,
            "last_edit": None if self._edit is None else {"text": self._edit[0], "at": self._edit[1]},
        }

    def statuses(self) -> list[SourceStatus]:
        """Whether it is published, where that is wanted, or still is published where it is not."""
        if self._wanted() is ClusterTarget.OFF and self._noted is None:
            return []
        age_s = None if self._published_at is None else max(0.0, self._wall() - self._published_at)
        return [SourceStatus(name=NAME, ok=not self._problem, age_s=age_s, detail=self._problem or self._detail())]

    def _detail(self) -> str:
        if self._published is None or self._noted is None:
            return "nothing is published: bypassd observes" if not self._writes() else "not published yet"
        offer = self._published.offer
        text = f"{self._noted.value}: {cpu(offer.cpu_milli)}, {size(offer.memory)} ({self._published.detail})"
        if self._edit is None:
            return text
        edit, at = self._edit
        age = duration(max(0.0, self._wall() - at))
        return f"{text}; changed by others {plural(self.edits, 'time')}, last {age} ago: {edit}"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled. What is published then remains: the daemon may only build its parts again."""
        task_status.started()
        try:
            while True:
                wait_s = await self._round()
                await self._wait(wait_s)
        finally:
            await self._close()

    async def _wait(self, wait_s: float) -> None:
        """Until the next write is due, or sooner after a change: a fall soon, a rise later."""
        begun = trio.current_time()
        end = begun + wait_s
        while trio.current_time() < end:
            if not await self._changed.wait_until(end):
                return
            if self._again:
                self._again, end = False, min(end, max(trio.current_time() + FALL_S, self._allowed_at))
            if self._problem and self._wanted() is not ClusterTarget.OFF and self._writes():
                continue  # after an error a change of the headroom shortens no wait
            # A fall may come while a rise waits.
            while trio.current_time() < (due := min(self._due_at(begun), end)):
                await self._changed.wait_until(due)
            return

    def _due_at(self, last: float) -> float:
        """When a change is to be written; ``last``: the write before it."""
        if not self._active():
            return last + FALL_S
        at = last + (FALL_S if self._falls() else RISE_S)
        # Without an allowance, too: new pods must not be scheduled where nothing is left for them.
        return at if self._ends() else max(at, self._writes_left.ready_at())

    def _ends(self) -> bool:
        """Whether nothing is offered any more, of what is."""
        return self._offer().cpu_milli == 0 and (self._sent is None or self._sent.cpu_milli > 0)

    def _falls(self) -> bool:
        offer, sent = self._offer(), self._sent
        return sent is None or offer.cpu_milli < sent.cpu_milli or offer.memory < sent.memory

    def is_falling(self) -> bool:
        """Whether the cluster still has a higher amount than is offered now, and gets the present one soon."""
        return self._active() and self._published is not None and not self._problem and self._falls()

    def _active(self) -> bool:
        return self._writes() and self._wanted() is not ClusterTarget.OFF

    async def _round(self) -> float:
        """One write, or the withdrawal; the seconds until the next."""
        if self._renamed is not None:
            try:
                await self._withdraw_renamed(self._renamed)
            except AgentError as exc:
                return self._failed(exc)
        if not self._active():
            return await self._withdrawn()
        try:
            wanted = self._wanted()
            target = await self._find() if wanted is ClusterTarget.AUTO else wanted
            if self._noted is not target:
                await self._withdraw_noted()
                # Durable before the first write: after a kill the value is withdrawn by this note.
                await self._note(target)
                self._noted = target
            offer = self._offer()
            self._writes_left.take()  # a write without an answer counts, too
            published = await self._target(target).publish(offer)
        except AgentError as exc:
            return self._failed(exc)
        if published.edit:
            self._edited(published.edit)
            _LOG.warning("the published headroom was changed by another program and is restored", change=published.edit)
        if not published.written:
            return published.next_s
        self._published = published
        if self._problem:
            _LOG.info("the headroom is published", target=target.value)
        self._sent, self._published_at, self._problem, self._failures = offer, self._wall(), "", 0
        return self._published.next_s

    async def _withdraw_renamed(self, withdraw: Callable[[], Awaitable[None]]) -> None:
        """Once. That object may be another machine's now, or not within our rights: a refusal ends it."""
        try:
            await withdraw()
        except PublishError as exc:
            _LOG.warning(
                "what was published under the node's earlier name is not withdrawn; it expires", error=str(exc)
            )
        if self._noted is None:
            await self._note(None)
        self._renamed = None

    def _target(self, name: ClusterTarget) -> PublishTarget:
        if name not in self._targets:
            self._targets[name] = self._make(name)
        return self._targets[name]

    async def _find(self) -> ClusterTarget:
        """The first control plane that knows this node. Errors: `AgentError`: unknown is not absent."""
        if self._found is None or trio.current_time() >= self._search_at:
            self._search_at = trio.current_time() + SEARCH_S
            for name in _AUTO:
                try:
                    await self._target(name).find()
                except PublishError as exc:
                    if exc.missing and name is not _AUTO[-1]:
                        continue
                    raise
                self._found = name
                break
        assert self._found is not None
        return self._found

    async def _withdrawn(self) -> float:
        """Nothing is to be published. The seconds until that is tried again."""
        self._found = None  # another control plane may have the node when it is to be published again
        if self._noted is None:
            self._problem = ""
            return _IDLE_S
        try:
            await self._withdraw_noted()
        except AgentError as exc:
            return self._failed(exc)
        return _IDLE_S

    async def _withdraw_noted(self) -> None:
        if self._noted is None:
            return
        try:
            await self._target(self._noted).withdraw()
        except PublishError as exc:
            if not exc.missing:
                raise
        await self._note(None)
        self._noted = self._published = self._published_at = self._sent = None
        self._problem = ""

    async def end(self) -> None:
        """Withdraw: the daemon stops, and no other one takes over. Errors: none: the unit's next step tries again."""
        # Called in a ``finally``: a cancellation must not end the request, nor the API server delay the stop.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _WITHDRAW_S):
            try:
                await self._withdraw_noted()
            except AgentError as exc:
                _LOG.warning("the published headroom was not withdrawn", error=str(exc))
        await self._close()

    async def _close(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
            for target in self._targets.values():
                await target.aclose()

    def _edited(self, text: str) -> None:
        self.edits += 1
        self._edit = text, self._wall()

    def _failed(self, exc: AgentError) -> float:
        self._again = False
        self._failures += 1
        text = str(exc)
        foreign = isinstance(exc, PublishError) and exc.foreign
        if self._problem != text:
            _LOG.warning("the headroom was not published", error=text)
            if foreign:
                self._edited(text)
        self._problem = text
        if isinstance(exc, PublishError) and exc.missing:
            # Of ``auto``: another control plane may have the node now.
            self._found = None
        if foreign:
            return FOREIGN_S
        requested_s = getattr(exc, "wait_s", None) or 0.0
        self._allowed_at = trio.current_time() + requested_s
        # The exponent is bounded: 2.0**1024 raises OverflowError.
        return max(requested_s, min(RETRY_S, _FAILED_S * 2.0 ** min(self._failures - 1, 6)))
