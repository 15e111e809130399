"""What BE work gains and what online pods pay for it, by hour: the material of ``bypassctl report``.

Each minute (`reconciler.control.pod_minutes`) is one with BE work or one without; the waits and the throttling of every
online pod are counted for the one or the other. Increases of counters (actions, evictions, foreign writes, late starts)
are added, and whether promised headroom was there (`reconciler.headroom.promises`). One row of META for each hour, of
the last `DAYS` days; stored each minute: a crash costs a minute.

Units: thousandths of a CPU, and CPU-seconds.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, final

import msgspec
import trio
from msgspec import Meta

from reconciler.control.hour_rows import HourRows, load_rows, uptime_s
from reconciler.control.pod_minutes import MINUTE_S, Minute
from reconciler.headroom.promises import NodePromises, PromiseHour
from state.model import Pod, PodClass
from state.store import Store

NAME: Final = "effect hours"
ROW: Final = "effect:"
"""Rows of the META table: ``effect:HOUR``, hours since the epoch."""
DAYS: Final = 8
BUSY_MILLI: Final = 50.0
"""BE work that used more in a minute makes it one with BE work."""
STEP: Final = 1.25
"""Ratio of two bounds of the waits' histogram: a quantile is exact to a quarter."""
SMALLEST_MILLI: Final = 0.05
_BUCKETS: Final = 64
_MOST_COUNTS: Final = 64
_MOST_WINDOWS: Final = 64
_STOP_S: Final = 2.0
_ONLINE: Final = frozenset({PodClass.SHARED, PodClass.DEDICATED})

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]


class OnlineMinutes(msgspec.Struct, kw_only=True):
    """Online pods in minutes with (or without) BE work. ``minutes``: of the node; ``samples``: pods' minutes.

    ``wait_milli`` and ``throttled_milli`` are sums over the samples; ``waits``: samples by bucket of the wait (texts:
    readers of the store refuse other keys).
    """

    minutes: Count = 0
    samples: Count = 0
    wait_milli: Amount = 0.0
    waits: Annotated[dict[str, Count], Meta(max_length=_BUCKETS + 1)] = {}
    throttled_samples: Count = 0
    throttled_milli: Amount = 0.0

    def add(self, minute: Minute) -> None:
        if minute.wait_milli is not None:
            self.samples += 1
            self.wait_milli += minute.wait_milli
            bucket = str(bucket_of(minute.wait_milli))
            self.waits[bucket] = self.waits.get(bucket, 0) + 1
        if minute.throttled_milli is not None:
            self.throttled_samples += 1
            self.throttled_milli += minute.throttled_milli

    def merge(self, other: "OnlineMinutes") -> None:
        for name in ("minutes", "samples", "wait_milli", "throttled_samples", "throttled_milli"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waits = dict(Counter(self.waits) + Counter(other.waits))


class ModeNow(NamedTuple):
    """Whether settings are written now, the whole node is on hold, and something planned is not in force."""

    enforces: bool
    on_hold: bool
    broken: bool = False


class EffectSums(msgspec.Struct, kw_only=True):
    """Minutes of one hour. ``be_cpu_s``: used by BE pods.

    ``enforced`` and ``held``: minutes in mode enforce, and on hold.
    ``broken``: minutes of mode enforce at whose end a condition of the node kept a setting from being in force, or a
    claim on CPUs was cut.

    ``counts``: what happened, by name: `COUNTED`.
    """

    be_cpu_s: Amount = 0.0
    minutes: Count = 0
    enforced: Count = 0
    held: Count = 0
    broken: Count = 0
    with_be: OnlineMinutes = msgspec.field(default_factory=OnlineMinutes)
    without_be: OnlineMinutes = msgspec.field(default_factory=OnlineMinutes)
    counts: Annotated[dict[str, Count], Meta(max_length=_MOST_COUNTS)] = {}
    promises: PromiseHour = msgspec.field(default_factory=PromiseHour)

    def add(self, other: "EffectSums") -> None:
        for name in ("be_cpu_s", "minutes", "enforced", "held", "broken"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.with_be.merge(other.with_be)
        self.without_be.merge(other.without_be)
        self.counts = dict(Counter(self.counts) + Counter(other.counts))
        self.promises.merge(other.promises)


class EffectHour(EffectSums, kw_only=True):
    """One hour. ``windows``: its minutes in each window, by name; empty: outside of all.

    Minutes of a configuration without windows are in no part, nor are any of earlier versions.
    """

    windows: Annotated[dict[str, EffectSums], Meta(max_length=_MOST_WINDOWS)] = {}

    def merge(self, other: "EffectHour") -> "EffectHour":
        self.add(other)
        for name, part in other.windows.items():
            if (own := self.part(name)) is not None:
                own.add(part)
        return self

    def part(self, name: str) -> EffectSums | None:
        """The minutes in a window; None where too many windows had other names in this hour."""
        if name not in self.windows and len(self.windows) >= _MOST_WINDOWS:
            return None
        return self.windows.setdefault(name, EffectSums())


COUNTED: Final = (
    *("starts", "late", "actions", "helped", "undone", "evictions", "evictions_failed", "foreign_writes", "yields"),
    *("host_be_ms", "host_wait_ms"),
)
"""Container starts whose outcome is known, late ones of them (the program ran before its settings), and so on.

``host_be_ms``, ``host_wait_ms``: CPU time of BE host workloads, and waiting of those that are victims.
"""
_DECODER: Final = msgspec.msgpack.Decoder(EffectHour)


@final
class EffectHours:
    """A component: the rows of ``bypassctl report``, one an hour."""

    def __init__(
        self,
        store: Store,
        lane: trio.CapacityLimiter,
        *,
        counted: Callable[[], Mapping[str, int]],
        mode: Callable[[], ModeNow],
        promises: Callable[[], NodePromises],
        window: Callable[[], str | None],
        wall: Callable[[], float] = time.time,
        uptime: Callable[[], float] = uptime_s,
    ) -> None:
        """``counted``: the counters `COUNTED` since some start. ``mode``: of this moment.

        ``promises``: of the minute that is over; called once in each. ``window``: the name of the one in force, empty
        outside of all; None: there are no windows.
        """
        self._counted = counted
        self._promises = promises
        self._mode = mode
        self._window = window
        self._last: Mapping[str, int] = {}
        self.hours: Final = load_effect(store)
        self._rows = HourRows(store, lane, ROW, self.hours, merge=EffectHour.merge, wall=wall, uptime=uptime)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            while True:
                await trio.sleep(MINUTE_S)
                await self.save()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _STOP_S):
                await self.save()

    def minute(self, pods: Sequence[tuple[Pod, Minute]]) -> None:
        hours = self._parts()
        uses = (minute.use_milli for pod, minute in pods if pod.pod_class is PodClass.RECLAIMED)
        be_milli = sum(use for use in uses if use is not None)
        now = self._mode()
        promised = self._promises()
        for hour in hours:
            hour.be_cpu_s += be_milli / 1000 * MINUTE_S
            hour.minutes += 1
            hour.enforced += now.enforces
            hour.held += now.on_hold
            hour.broken += now.enforces and now.broken
            side = hour.with_be if be_milli > BUSY_MILLI else hour.without_be
            side.minutes += 1
            for pod, minute in pods:
                if pod.pod_class in _ONLINE:
                    side.add(minute)
            hour.promises.add(promised)
        self._count(hours)

    def _count(self, hours: Sequence[EffectSums]) -> None:
        now = self._counted()
        for name in COUNTED:
            # A counter that is smaller than before began again.
            before, count = self._last.get(name, 0), now.get(name, 0)
            grown = count - before if count >= before else count
            for hour in hours if grown else ():
                hour.counts[name] = hour.counts.get(name, 0) + grown
        self._last = now

    def _parts(self) -> list[EffectSums]:
        """The present hour, and its part in the window in force."""
        at, name = self._rows.present(), self._window()
        self._rows.changed(at)
        hour = self.hours.setdefault(at, EffectHour())
        part = None if name is None else hour.part(name)
        return [hour] if part is None else [hour, part]

    async def save(self) -> None:
        await self._rows.save(DAYS)

    def status(self) -> list[dict[str, object]]:
        """The rows, the oldest first, as plain values; ``hour``: hours since the epoch."""
        return [{"hour": at, **msgspec.to_builtins(hour)} for at, hour in sorted(self.hours.items())]


def load_effect(store: Store) -> dict[int, EffectHour]:
    return dict(load_rows(store, ROW, _DECODER.decode))


def bucket_of(milli: float) -> int:
    """The histogram's bucket of a value; bucket N ends at ``SMALLEST_MILLI * STEP ** N``."""
    if milli <= SMALLEST_MILLI:
        return 0
    return min(_BUCKETS, math.ceil(math.log(milli / SMALLEST_MILLI, STEP)))
