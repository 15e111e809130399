"""Puts BE's trees on the named interfaces, sets their rates, reads what went through them, and takes them away.

What an interface had at its root is in the store before our tree replaces it; only a root that the kernel put there by
itself is replaced, because that one comes back by itself. Our tree is told by its handle (``4250:``), so it is found
and removed also when the store is lost. `actuators.network.pod_ceiling` does the same for pods with a network of their
own. The rates come from `reconciler.control.network_loop`.
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
from state.undo import RestoreResult


class TreeReading(Struct, frozen=True, kw_only=True):
    """One interface's tree. ``problem``: why there is none; ``would``: what there would be, if it might be written.

    ``sent``: bytes of online work and of BE's class since the tree was made; None without one.
    """

    problem: str = ""
    would: str = ""
    sent: tuple[int, int] | None = None


@final
class NetworkActuator:
    """See the module's text. One call at a time."""

    def __init__(
        self,
        tc: Tc,
        pods: PodTc,
        kept: LedgerState[NetworkState],
        turns: PeriodicWorker,
        *,
        speed: Callable[[str], int | None] = link_mbit,
    ) -> None:
        """``turns``: does what blocks, in its thread."""
        self._tc = tc
        self._pod_tc = pods
        self._speed = speed
        self._kept = kept
        self._turns = turns

    @property
    def roots(self) -> Mapping[str, str]:
        """By interface with a tree of ours: the kind of what stood there before."""
        return self._kept.now.roots

    @property
    def leftover(self) -> bool:
        """Whether there is anything of ours."""
        kept = self._kept.now
        return bool(kept.roots or kept.gather or kept.cables)

    async def undo(self, only: str | None = None) -> Sequence[RestoreResult] | None:
        """Take everything away, of a single pod (uid) its own cables; None: nothing is there. Errors: `StoreError`."""
        kept = self._kept.now
        if not self.leftover or (only is not None and all(led.pod_uid != only for led in kept.cables.values())):
            return None
        done, left = await self._turns.work(partial(undo, self._tc, self._pod_tc, kept, only))
        await self._kept.save(left, dropped="restored")
        return done

    async def link(self, name: str, *, ask_speed: bool) -> tuple[Link | None, int | None]:
        """An interface and, with ``ask_speed``, its speed (Mbit/s) as its driver reports it.

        None: there is none, or it reports none. Errors: `SourceError`.
        """
        return await self._turns.work(partial(self._asked, name, ask_speed=ask_speed))

    def _asked(self, name: str, *, ask_speed: bool) -> tuple[Link | None, int | None]:
        device = self._pod_tc.device(name)
        return device, self._speed(name) if device is not None and ask_speed else None

    async def tree(self, index: int, name: str, rates: ClassRates, *, enforce: bool) -> TreeReading:
        """Have a tree at the interface, which begins with ``rates``, and read its counters.

        Without ``enforce`` only say what would be done. Errors: `SourceError`, `StoreError`.
        """
        root = await self._turns.work(partial(self._tc.root, name))
        if root is None:
            return TreeReading(problem="no such interface")
        if not (root.ours or root.default):
            return TreeReading(problem=f"its root qdisc {root.kind} belongs to another program: unchanged")
        kept = self._kept.now
        if not root.complete and not enforce:
            return TreeReading(would=f"would replace {root.kind}")
        if enforce and name not in kept.roots:
            # Durable before anything is done; a tree that a lost store knew of is entered again.
            kind = "" if root.ours else root.kind
            await self._kept.save(replace(kept, roots={**kept.roots, name: kind}))
        if not root.complete:
            await self._turns.work(partial(self._tc.install, index, rates))
        return TreeReading(sent=await self._turns.work(partial(self._tc.counted, index)))

    async def change(self, index: int, rates: ClassRates) -> None:
        """Set the rates of an interface's tree. Errors: `SourceError`."""
        await self._turns.work(partial(self._tc.change, index, rates))

    async def drop(self, names: set[str]) -> None:
        """Interfaces at which nothing is wanted any more, or can be, get their default back."""
        kept = self._kept.now
        roots = {name: kept.roots[name] for name in names}
        if not roots:
            return
        done = await self._turns.work(partial(remove_trees, self._tc, roots, everywhere=False))
        left = {result.path for result in done if not result.ok}
        roots = {name: kind for name, kind in kept.roots.items() if name not in names or name in left}
        await self._kept.save(replace(kept, roots=roots), dropped="restored")
