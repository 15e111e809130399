"""Keeps an HTB tree on each named interface, and BE's ceiling in it where the law wants it. A side actuator.

What an interface had at its root is in the store before our tree replaces it; only a root that the kernel put there by
itself is replaced, because that one comes back by itself. Our tree is told by its handle (``4250:``), so it is found
and removed also when the store is lost. One thread hop a round does all interfaces.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.errors import SourceError, StoreError
from reconciler.actuators.side import Situation
from reconciler.actuators.tc import FILE, Rates, Tc
from reconciler.networklaw import Counted, lane, online_use, step
from reconciler.restore import Undo, Undone
from state.network import InterfaceWish, NetworkWish
from state.schema import META
from state.store import Batch, Store

_LOG: Final = logging.getLogger(__name__)
NAME: Final = "network"
ROW: Final = "network_roots"
"""Row of the store's META table: by interface, the kind of root that our tree stands in for."""
_IDLE_S: Final = 3600.0
T = TypeVar("T")


class Line(Struct, frozen=True, kw_only=True):
    """How one interface stands. Rates in bytes a second; ``problem`` empty: as wanted."""

    link: int = 0
    floor: int = 0
    ceiling: int = 0
    online: int | None = None
    be: int | None = None
    counted: Counted | None = None
    problem: str = ""
    would: str = ""


def read_roots(store: Store) -> dict[str, str]:
    """Interfaces that our tree was put on, with the kind of root there before."""
    row = dict(store.rows(META)).get(ROW)
    if row is None:
        return {}
    try:
        return msgspec.msgpack.decode(row, type=dict[str, str])
    except msgspec.MsgspecError as exc:
        _LOG.warning("the interfaces of the last run cannot be read: %s", exc)
        return {}


def write_roots(store: Store, roots: Mapping[str, str]) -> None:
    """Make them durable (the store's lane). Errors: `StoreError`."""
    batch = Batch()
    if roots:
        batch.put(META, ROW, msgspec.msgpack.encode(dict(roots)))
    else:
        batch.delete(META, ROW)
    store.apply(batch)


def remove_trees(tc: Tc, roots: Mapping[str, str]) -> list[Undone]:
    """Take our trees away, wherever they are; what is said of each interface. Synchronous; for a thread."""
    done = []
    try:
        found = tc.names()
    except SourceError as exc:
        # Without a network stack that answers there is nothing of ours on it, unless the store says so.
        return [_undone(name, Undo.REFUSED, str(exc)) for name in sorted(roots)]
    for name in sorted(found.keys() | roots.keys()):
        try:
            root = found.get(name)
            if root is None:
                done.append(_undone(name, Undo.ALREADY if tc.root(name) is not None else Undo.GONE))
                continue
            tc.remove(root.index)
            after = tc.root(name)
            done.append(_undone(name, Undo.RESTORED, after.kind if after is not None else ""))
        except SourceError as exc:
            done.append(_undone(name, Undo.REFUSED, str(exc)))
    return done


def restore_trees(tc: Tc, store: Store) -> list[Undone]:
    """The same while no daemon runs; also trees that a lost store does not tell of. Errors: `StoreError`."""
    roots = read_roots(store)
    done = remove_trees(tc, roots)
    if roots:
        left = {one.path for one in done if not one.ok}
        write_roots(store, {name: kind for name, kind in roots.items() if name in left})
    return done


def _undone(name: str, undo: Undo, words: str = "") -> Undone:
    if undo is Undo.RESTORED:
        return Undone(path=name, file=FILE, undo=undo, text=words)
    return Undone(path=name, file=FILE, undo=undo, detail=words)


def link_mbit(name: str, sys_net: str = "/sys/class/net") -> int | None:
    """The speed that an interface's driver tells, None where it tells none (virtual ones: -1 or an error)."""
    try:
        speed = int(Path(sys_net, name, "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


@final
class Network:
    """See the module's text."""

    name = NAME

    def __init__(
        self,
        tc: Tc,
        store: Store,
        lane: trio.CapacityLimiter,
        *,
        speed: Callable[[str], int | None] = link_mbit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``lane``: the store's limiter."""
        self.lines: dict[str, Line] = {}
        """By interface."""
        self._tc = tc
        self._store = store
        self._store_lane = lane
        self._speed = speed
        self._clock = clock
        self._roots = read_roots(store)
        self._situation: Situation | None = None
        self._woken = trio.Event()
        self._alone = trio.Lock()
        self._lane = trio.CapacityLimiter(1)

    # SideActuator

    def planned(self, situation: Situation) -> None:
        """See `SideActuator`. Wakes the task when something else is wanted than before."""
        before, self._situation = self._situation, situation
        if before is None or _wanted(before) != _wanted(situation):
            self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `SideActuator`."""
        task_status.started()
        while True:
            wish = self._situation.pools.network if self._situation is not None else None
            # Without anything wanted nothing is measured either.
            idle = wish is None and not self._roots
            with trio.move_on_after(_IDLE_S if idle else wish.interval_s if wish is not None else 1.0):
                await self._woken.wait()
            self._woken = trio.Event()
            if self._situation is not None:
                async with self._alone:
                    await self._round(self._situation)

    async def restore(self, only: str | None = None) -> Sequence[Undone]:
        """See `SideActuator`. A tree is nobody's in particular: nothing is done for a single pod."""
        if only is not None or not self._roots:
            return ()
        async with self._alone:
            done = await trio.to_thread.run_sync(partial(remove_trees, self._tc, self._roots), limiter=self._lane)
            left = {one.path for one in done if not one.ok}
            await self._remember({name: kind for name, kind in self._roots.items() if name in left})
            self.lines.clear()
        return done

    def facts(self) -> Mapping[str, object]:
        """See `SideActuator`. Rates in bytes a second."""
        return {
            "interfaces": {
                name: {
                    "instead_of": self._roots.get(name),
                    "link": line.link,
                    "be_floor": line.floor,
                    "be_ceiling": line.ceiling,
                    "online": line.online,
                    "be": line.be,
                    "state": line.problem or line.would or "in place",
                }
                for name, line in sorted(self.lines.items())
            }
        }

    def problems(self) -> Sequence[str]:
        """See `SideActuator`."""
        return [f"{name}: {line.problem}" for name, line in sorted(self.lines.items()) if line.problem]

    # One round

    async def _round(self, situation: Situation) -> None:
        wish = situation.pools.network or NetworkWish()
        enforce = situation.enforce and not wish.dry_run and "node" not in situation.holds
        wanted = {one.name: one for one in wish.interfaces}
        self.lines = {name: line for name, line in self.lines.items() if name in wanted}
        if enforce:
            await self._drop(set(self._roots) - wanted.keys())
        for name in sorted(wanted):
            try:
                self.lines[name] = await self._line(wanted[name], self.lines.get(name, Line()), enforce=enforce)
            except (SourceError, StoreError) as exc:
                words = str(exc)
                if words != self.lines.get(name, Line()).problem:
                    _LOG.warning("%s: %s", name, words)
                self.lines[name] = Line(problem=words)

    async def _line(self, wish: InterfaceWish, line: Line, *, enforce: bool) -> Line:
        """Bring one interface to what is wanted now. Errors: `SourceError`, `StoreError`."""
        root = await self._call(partial(self._tc.root, wish.name))
        if root is None:
            return Line(problem="there is no such interface")
        speed = wish.link_mbit or self._speed(wish.name)
        if speed is None:
            return Line(problem="its driver tells no speed; expected link_mbit in the configuration")
        bounds = lane(speed, wish.floor_percent, wish.ceiling_percent, wish.waterline_percent)
        if not (root.ours or root.default):
            return Line(problem=f"its root is {root.kind}, which somebody has set: left alone")
        # What stands is BE's floor until there is something to go by: an unknown takes no risk.
        ceiling = min(max(line.ceiling, bounds.floor), bounds.ceiling)
        if not root.complete and not enforce:
            return Line(
                link=bounds.link, floor=bounds.floor, ceiling=ceiling, would=f"would stand in place of {root.kind}"
            )
        if enforce and wish.name not in self._roots:
            # Durable before anything is done; a tree that a lost store knew of is entered again.
            await self._remember({**self._roots, wish.name: "" if root.ours else root.kind})
        if not root.complete:
            rates = Rates(link=bounds.link, floor=bounds.floor, ceiling=ceiling)
            await self._call(partial(self._tc.install, root.index, rates))
            return Line(link=bounds.link, floor=bounds.floor, ceiling=ceiling)
        sent = await self._call(partial(self._tc.counted, root.index))
        now = None if sent is None else Counted(at=self._clock(), online=sent[0], be=sent[1])
        online = None if now is None else online_use(line.counted, now)
        after = step(ceiling, online, bounds) if enforce else ceiling
        fresh = (line.link, line.floor) != (bounds.link, bounds.floor)
        if enforce and (after != line.ceiling or fresh):
            rates = Rates(link=bounds.link, floor=bounds.floor, ceiling=after)
            await self._call(partial(self._tc.change, root.index, rates))
        be = None
        if now is not None and line.counted is not None and now.at > line.counted.at and now.be >= line.counted.be:
            be = math.floor((now.be - line.counted.be) / (now.at - line.counted.at))
        return Line(link=bounds.link, floor=bounds.floor, ceiling=after, online=online, be=be, counted=now)

    async def _drop(self, names: set[str]) -> None:
        """Interfaces that are no longer wanted get their default back."""
        if not names:
            return
        roots = {name: self._roots[name] for name in names}
        done = await trio.to_thread.run_sync(partial(self._remove, roots), limiter=self._lane)
        left = {one.path for one in done if not one.ok}
        await self._remember({name: kind for name, kind in self._roots.items() if name not in names or name in left})

    def _remove(self, roots: Mapping[str, str]) -> list[Undone]:
        done = []
        for name in sorted(roots):
            try:
                root = self._tc.root(name)
                if root is not None and root.ours:
                    self._tc.remove(root.index)
                done.append(_undone(name, Undo.GONE if root is None else Undo.RESTORED, roots[name]))
            except SourceError as exc:
                done.append(_undone(name, Undo.REFUSED, str(exc)))
        return done

    async def _remember(self, roots: Mapping[str, str]) -> None:
        kept = dict(roots)
        await trio.to_thread.run_sync(partial(write_roots, self._store, kept), limiter=self._store_lane)
        self._roots = kept

    async def _call(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, limiter=self._lane)


def _wanted(situation: Situation) -> tuple[object, ...]:
    return situation.pools.network, situation.enforce, "node" in situation.holds
