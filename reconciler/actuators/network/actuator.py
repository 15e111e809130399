"""Installs BE's HTB trees on the configured interfaces, sets their rates, reads their counters, and removes them.

The kind of an interface's root qdisc is in the store before our tree replaces it; only a root that the kernel installed
as its default is replaced, because the kernel reinstalls that one by itself. Our tree is identified by its handle
(``4250:``), so it is found and removed also when the store is lost. `actuators.network.pod_ceiling` does the same for
pods with a network namespace of their own. The rates are set by `reconciler.control.network_loop`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.actuators.base import PeriodicWorker
from reconciler.actuators.codec import LedgerState
from reconciler.actuators.network.netlink import Link, link_mbit
from reconciler.actuators.network.tc import ClassRates, Tc
from reconciler.actuators.network.tc_pods import PodTc
from reconciler.actuators.network.undo import NetworkState, remove_trees, undo
from state.entry import RestoreResult


class TreeReading(Struct, frozen=True, kw_only=True):
    """The tree of one interface. ``problem``: why there is none; ``would``: the change that observe mode does not make.

    ``sent``: bytes of online work and of BE's class since the tree was created; None without one.
    """

    problem: str = ""
    would: str = ""
    sent: tuple[int, int] | None = None


@final
class NetworkActuator:
    """The actuator for BE's trees on interfaces. One call at a time."""

    def __init__(
        self,
        tc: Tc,
        pods: Sequence[PodTc],
        state: LedgerState[NetworkState],
        turns: PeriodicWorker,
        *,
        speed: Callable[[str], int | None] = link_mbit,
    ) -> None:
        """``pods``: of each direction; ``turns``: runs blocking work in its thread."""
        self._tc = tc
        self._pod_tc = pods
        self._speed = speed
        self._rows = state
        self._worker = turns

    @property
    def roots(self) -> Mapping[str, str]:
        """Interface with a tree of ours -> the kind of its former root qdisc."""
        return self._rows.now.roots

    @property
    def leftover(self) -> bool:
        """Whether anything of ours is installed."""
        state = self._rows.now
        return bool(state.roots or state.sent or state.received)

    async def undo(self, only: str | None = None) -> Sequence[RestoreResult] | None:
        """Remove everything, or one pod's redirects (uid); None: nothing is installed. Errors: `StoreError`."""
        state = self._rows.now
        redirects = (*state.sent.redirects.values(), *state.received.redirects.values())
        if not self.leftover or (only is not None and all(redirect.pod_uid != only for redirect in redirects)):
            return None
        done, left = await self._worker.work(partial(undo, self._tc, self._pod_tc, state, only))
        await self._rows.save(left, dropped="restored")
        return done

    async def link(self, name: str, *, ask_speed: bool) -> tuple[Link | None, int | None]:
        """An interface and, with ``ask_speed``, its speed (Mbit/s) as its driver reports it.

        None: the interface does not exist, or its driver reports no speed. Errors: `SourceError`.
        """
        return await self._worker.work(partial(self._link_and_speed, name, ask_speed=ask_speed))

    def _link_and_speed(self, name: str, *, ask_speed: bool) -> tuple[Link | None, int | None]:
        device = self._pod_tc[0].device(name)
        return device, self._speed(name) if device is not None and ask_speed else None

    async def tree(self, index: int, name: str, rates: ClassRates, *, enforce: bool) -> TreeReading:
        """Install a tree at the interface, with ``rates`` to start with, and read its counters.

        Without ``enforce`` only report the change. Errors: `SourceError`, `StoreError`.
        """
        root = await self._worker.work(partial(self._tc.root, name))
        if root is None:
            return TreeReading(problem="no such interface")
        if not (root.ours or root.default):
            return TreeReading(problem=f"its root qdisc {root.kind} belongs to another program: unchanged")
        state = self._rows.now
        if not root.complete and not enforce:
            return TreeReading(would=f"would replace {root.kind}")
        if enforce and name not in state.roots:
            # Durable before any write; a tree from a lost store is recorded again.
            kind = "" if root.ours else root.kind
            await self._rows.save(replace(state, roots={**state.roots, name: kind}))
        if not root.complete:
            await self._worker.work(partial(self._tc.install, index, rates))
        return TreeReading(sent=await self._worker.work(partial(self._tc.counted, index)))

    async def change(self, index: int, rates: ClassRates) -> None:
        """Set the rates of an interface's tree. Errors: `SourceError`."""
        await self._worker.work(partial(self._tc.change, index, rates))

    async def drop(self, names: set[str]) -> None:
        """Remove the trees of interfaces that have no wanted tree any more, or cannot have one."""
        state = self._rows.now
        roots = {name: state.roots[name] for name in names}
        if not roots:
            return
        done = await self._worker.work(partial(remove_trees, self._tc, roots, everywhere=False))
        left = {result.path for result in done if not result.ok}
        roots = {name: kind for name, kind in state.roots.items() if name not in names or name in left}
        await self._rows.save(replace(state, roots=roots), dropped="restored")
