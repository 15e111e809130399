"""The task of one sink: takes due alerts from its outbox, sends them, retries with growing waits, gives up."""

import random
from collections.abc import Callable, Sequence
from typing import Final, final

import trio

from cgroupfs.log import get_log
from reconciler.alerts.config import SinkConfig
from reconciler.alerts.incident import Incident
from reconciler.alerts.outbox import Outbox, SinkRules
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkSetup
from reconciler.alerts.sinks.table import prepare
from reconciler.runtime.format import duration
from reconciler.runtime.wakeup import WakeUp

FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 300.0
MARGIN_S: Final = 5.0
"""A sink has its own deadline; this much later it is cut off."""
TELL_AFTER: Final = 3
"""So many failed tries in a row are reported to the other sinks."""
_CLOSE_S: Final = 2.0
_MOST_TRIED: Final = 4096


@final
class SinkWorker:
    """Sends the alerts of one outbox to its sink. ``settled`` is called with what need not be kept any longer."""

    def __init__(
        self,
        setup: SinkSetup,
        outbox: Outbox,
        build: Callable[[SinkSetup], AlertSink],
        *,
        settled: Callable[[Sequence[str], str], None],
        failing: Callable[[str, str | None], None],
        reported: bool = False,
    ) -> None:
        """``failing`` is called with the sink's name and its error when that has lasted, and None when it is over.

        ``reported``: it was called with an error for the same sink before.
        """
        self.name = setup.name
        self.setup = setup
        self.outbox = outbox
        self.problem: str | None = None
        self.reported = reported
        self._build = build
        self._settled = settled
        self._failing = failing
        self._sink: AlertSink | None = None
        self._turn = trio.Lock()
        self._scope = trio.CancelScope()
        self._wake = WakeUp()
        self._tries: dict[str, int] = {}
        self._fails = 0
        self._one_by_one = 0
        """How many alerts are still sent separately, after their batch was refused."""
        self._log = get_log("alerts", sink=setup.name)

    def wake(self) -> None:
        """Something has been put into the outbox."""
        self._wake.set()

    def stop(self) -> None:
        """End the task; what waits remains in the outbox."""
        self._scope.cancel(reason="the sink was removed or changed")

    async def run(self) -> None:
        self._scope = trio.CancelScope()
        self.outbox.failed()  # what a task that was stopped had taken waits again
        with self._scope:
            sink = await self._made()
            try:
                while True:
                    now = trio.current_time()
                    at = self.outbox.next_at(now)
                    if at <= now:
                        await self._tell(sink, self.outbox.take(now, 1 if self._one_by_one else sink.most))
                        continue
                    await self._wake.wait_until(at)
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                    await sink.aclose()

    async def deliver_once(self, notice: Incident) -> None:
        """Send this one now, around the outbox. Errors: `SinkError`."""
        await self._send(await self._made(), (notice,))

    async def _made(self) -> AlertSink:
        if self._sink is None:
            # In a thread: the HTTP library takes a while to load, which must not block the loop.
            await prepare(self.setup)
        if self._sink is None:
            self._sink = self._build(self.setup)
            self.outbox.rules = rules_of(self.setup.config, self.outbox.rules.most, self._sink)
        return self._sink

    async def _send(self, sink: AlertSink, notices: Sequence[Incident]) -> None:
        limit_s = self.setup.config.timeout_s + MARGIN_S
        try:
            async with self._turn:
                with trio.fail_after(limit_s):
                    await sink.send(notices)
        except trio.TooSlowError as exc:
            raise SinkError(f"no success within {duration(limit_s)}") from exc

    async def _tell(self, sink: AlertSink, batch: Sequence[Incident]) -> None:
        try:
            await self._send(sink, batch)
        except SinkError as exc:
            await trio.sleep(self._failed(batch, exc))
            return
        self._one_by_one = max(0, self._one_by_one - len(batch))
        self._done(batch, self.outbox.delivered(trio.current_time()))
        if self.problem is not None:
            self._log.info("delivery works again")
        if self.reported:
            self._failing(self.name, None)
        self.problem, self._fails, self.reported = None, 0, False

    def _failed(self, batch: Sequence[Incident], exc: SinkError) -> float:
        """Take note; how long to wait until the next try."""
        now = trio.current_time()
        if exc.permanent and len(batch) > 1:
            # One alert of the batch was refused: send the others separately.
            self._one_by_one = len(batch)
            self.outbox.failed()
            return 0.0
        given_up = [notice.id for notice in batch if self._is_hopeless(notice, exc, now)]
        for notice in batch:
            self._tries[notice.id] = self._tries.get(notice.id, 0) + 1
        while len(self._tries) > _MOST_TRIED:
            # Of alerts that were dropped meanwhile.
            del self._tries[next(iter(self._tries))]
        if given_up:
            self._log.warning("alerts dropped", count=len(given_up), error=str(exc))
            self._one_by_one = max(0, self._one_by_one - len(given_up))
            self._done([notice for notice in batch if notice.id in given_up], self.outbox.dropped(given_up, now))
        else:
            self.outbox.failed()
        if exc.permanent:
            # The peer responds: the next one may succeed.
            return 0.0
        if self.problem is None:
            self._log.warning("delivery failed, retrying", error=str(exc))
        self.problem = str(exc)
        self._fails += 1
        if self._fails == TELL_AFTER:
            self._failing(self.name, self.problem)
            self.reported = True
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._fails - 1, 20))
        # Many nodes lose the same server at the same moment, and must not come back at the same moment.
        wait_s *= random.uniform(0.5, 1.5)  # noqa: S311
        return max(wait_s, exc.retry_after_s or 0.0)

    def _is_hopeless(self, notice: Incident, exc: SinkError, now: float) -> bool:
        config = self.setup.config
        tries = self._tries.get(notice.id, 0) + 1
        old = self.outbox.waited_s(notice.id, now) >= config.give_up_s
        return exc.permanent or old or 0 < config.attempts <= tries

    def _done(self, batch: Sequence[Incident], settled: Sequence[str]) -> None:
        for notice in batch:
            self._tries.pop(notice.id, None)
        self._settled(settled, self.name)


def rules_of(config: SinkConfig, most: int, sink: AlertSink | None = None) -> SinkRules:
    """The configured rules, with those of the sink's kind once there is one."""
    repeat_s = sink.repeat_s if sink is not None else None
    return SinkRules(
        minimum=config.minimum,
        kinds=frozenset(config.kinds),
        batch_size=config.batch_size,
        batch_delay_s=config.batch_delay_s,
        repeat_s=config.repeat_s if repeat_s is None else repeat_s,
        resend_s=sink.resend_s if sink is not None else None,
        per_minute=config.per_minute,
        resolved=config.resolved,
        most=most,
    )
