"""Installs BE's HTB trees on the configured interfaces, sets their rates, reads their counters, and removes them.

`actuators.network.pod_ceiling` does the same for pods with a network namespace of their own. The rates come from
`reconciler.control.network_loop`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import digits
from cgroupfs.errors import SourceError
from reconciler.actuators.base import PeriodicWorker
from reconciler.actuators.codec import LedgerState, RowCodec, row_of, undo_rows
from reconciler.actuators.network.netlink import NAME, Link, link_mbit
from reconciler.actuators.network.tc import FILE, ClassRates, Tc, TreeCounters
from reconciler.actuators.network.tc_pods import PodTc
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.kinds import NETWORK
from state.ledger import Ledger
from state.network import Direction

FILTER: Final = "ingress filter"
RECEIVED_FILTER: Final = "egress filter"
DEVICE: Final = "device"


class Redirect(Struct, frozen=True, kw_only=True):
    """A veth device whose packets are redirected to our IFB.

    ``owns_qdisc``: the qdisc of our filter is ours too; ``slot``: the number of its class in our IFB.
    """

    index: int
    pod_uid: str
    owns_qdisc: bool
    slot: int = 0


class Redirects(Struct, frozen=True, kw_only=True):
    """Those of one direction, by veth device. ``ifb``: our IFB of it may exist."""

    ifb: bool = False
    redirects: Mapping[str, Redirect] = {}

    def __bool__(self) -> bool:
        return self.ifb or bool(self.redirects)


class NetworkState(Struct, frozen=True, kw_only=True):
    """``roots``: by interface, the kind of root that our tree replaced; then what is redirected from and to pods."""

    roots: Mapping[str, str] = {}
    sent: Redirects = Redirects()
    received: Redirects = Redirects()

    def of(self, direction: Direction) -> Redirects:
        return self.sent if direction is Direction.SENT else self.received

    def with_(self, direction: Direction, redirects: Redirects) -> "NetworkState":
        return replace(self, sent=redirects) if direction is Direction.SENT else replace(self, received=redirects)


_FILTERS: Final = {Direction.SENT: FILTER, Direction.RECEIVED: RECEIVED_FILTER}
_NONE: Final = "none"
_INGRESS: Final = "ingress"
"""The original of a veth device that had an ingress qdisc already, to which our filter was added."""
_TREE: Final = "4250:"
"""The handle that identifies our tree, also when the store is lost."""
_SLOT: Final = "slot "


def _load(rows: Iterable[LedgerEntry]) -> NetworkState:
    roots: dict[str, str] = {}
    devices: set[str] = set()
    redirects: dict[str, dict[str, Redirect]] = {FILTER: {}, RECEIVED_FILTER: {}}
    for row in rows:
        if row.file == FILE:
            roots[row.path] = row.original or ""
        elif row.file == DEVICE:
            devices.add(row.path)
        elif row.file in redirects and row.ours and (slot := digits(row.ours[-1].removeprefix(_SLOT))) is not None:
            redirects[row.file][row.path] = Redirect(
                index=row.inode, pod_uid=row.pod_uid or "", owns_qdisc=row.original == _NONE, slot=slot
            )
    state = NetworkState(roots=roots)
    for direction, file in _FILTERS.items():
        state = state.with_(direction, Redirects(ifb=direction.device in devices, redirects=redirects[file]))
    return state


def _dump(state: NetworkState) -> Iterable[LedgerEntry]:
    for name, kind in state.roots.items():
        yield _row(name, FILE, kind or None, _TREE)
    for direction, file in _FILTERS.items():
        if state.of(direction).ifb:
            yield _row(direction.device, DEVICE, _NONE, direction.device)
        for name, redirect in state.of(direction).redirects.items():
            row = _row(name, file, _NONE if redirect.owns_qdisc else _INGRESS, f"{_SLOT}{redirect.slot}")
            yield replace(row, inode=redirect.index, pod_uid=redirect.pod_uid or None)


def _row(name: str, field: str, original: str | None, ours: str) -> LedgerEntry:
    return row_of(NETWORK, name, field, knob=f"network.{field}", policy=NAME, original=original, ours=(ours,))


CODEC: Final = RowCodec(kind=NETWORK, load=_load, dump=_dump)


def restore_network(tc: Tc, pods: Sequence[PodTc], ledger: Ledger, only: str | None = None) -> list[RestoreResult]:
    """Restore everything while no daemon runs, including what a lost store does not contain. Errors: `StoreError`."""
    return undo_rows(ledger, CODEC, lambda state: undo(tc, pods, state, only))


def undo(
    tc: Tc, pods: Sequence[PodTc], state: NetworkState, only: str | None = None
) -> tuple[list[RestoreResult], NetworkState]:
    """Remove everything (``only``: one pod's part); returns the results and the remaining state. Errors: none.

    ``pods``: of each direction.
    """
    done, left = [], state
    for each in pods:
        results, left = undo_pods(each, left, only)
        done += results
    if only is not None:
        return done, left
    trees = remove_trees(tc, state.roots)
    refused = {result.path for result in trees if not result.ok}
    return [*done, *trees], replace(left, roots={name: kind for name, kind in state.roots.items() if name in refused})


def undo_pods(pods: PodTc, state: NetworkState, only: str | None = None) -> tuple[list[RestoreResult], NetworkState]:
    """Remove one direction's redirects of all pods with a network namespace of their own, or of one. Errors: none."""
    direction, recorded = pods.direction, state.of(pods.direction)
    chosen = {name: redirect for name, redirect in recorded.redirects.items() if only in {None, redirect.pod_uid}}
    done = []
    if only is None:
        try:
            unrecorded = {name: index for name, index in pods.redirected().items() if name not in chosen}
        except SourceError as exc:
            # If the network stack cannot be read, only what the store records is assumed to be there.
            unrecorded = {}
            if recorded.ifb and not chosen:
                done.append(restore_result(direction.device, DEVICE, RestoreOutcome.REFUSED, str(exc)))
        # A filter of ours that a lost store does not contain was created with its qdisc.
        chosen |= {name: Redirect(index=index, pod_uid="", owns_qdisc=True) for name, index in unrecorded.items()}
    done += [release(pods, name, redirect) for name, redirect in sorted(chosen.items())]
    refused = {result.path for result in done if not result.ok}
    remaining = {
        name: redirect for name, redirect in recorded.redirects.items() if name not in chosen or name in refused
    }
    left = replace(recorded, redirects=remaining)
    # The device last, and only without any filter: packets redirected to a removed device are dropped.
    if only is None and not refused:
        try:
            if pods.unmake():
                done.append(restore_result(direction.device, DEVICE, RestoreOutcome.RESTORED))
            left = replace(left, ifb=False)
        except SourceError as exc:
            if recorded.ifb:
                done.append(restore_result(direction.device, DEVICE, RestoreOutcome.REFUSED, str(exc)))
    return done, state.with_(direction, left)


def release(pods: PodTc, name: str, redirect: Redirect) -> RestoreResult:
    """Remove one veth device's redirect. Errors: none."""
    file = _FILTERS[pods.direction]
    try:
        device = pods.device(name)
        if device is None or device.index != redirect.index:  # a later device of this name
            return restore_result(name, file, RestoreOutcome.GONE)
        entry = pods.filters_of([redirect.index])[redirect.index]
        pods.release(redirect.index, with_qdisc=redirect.owns_qdisc)
    except SourceError as exc:
        return restore_result(name, file, RestoreOutcome.REFUSED, str(exc))
    return restore_result(name, file, RestoreOutcome.ALREADY if entry.redirects_to is None else RestoreOutcome.RESTORED)


def remove_trees(tc: Tc, roots: Mapping[str, str], *, everywhere: bool = True) -> list[RestoreResult]:
    """Remove our trees, on all interfaces or on these; returns a result for each. Errors: none."""
    done = []
    try:
        qdiscs = {name: root for name, root in tc.names().items() if everywhere or name in roots}
    except SourceError as exc:
        return [restore_result(name, FILE, RestoreOutcome.REFUSED, str(exc)) for name in sorted(roots)]
    for name in sorted(qdiscs.keys() | roots.keys()):
        try:
            root = qdiscs.get(name)
            if root is None:
                done.append(
                    restore_result(
                        name, FILE, RestoreOutcome.ALREADY if tc.root(name) is not None else RestoreOutcome.GONE
                    )
                )
                continue
            tc.remove(root.index)
            after = tc.root(name)
            done.append(restore_result(name, FILE, RestoreOutcome.RESTORED, after.kind if after is not None else ""))
        except SourceError as exc:
            done.append(restore_result(name, FILE, RestoreOutcome.REFUSED, str(exc)))
    return done


def restore_result(name: str, file: str, undo: RestoreOutcome, message: str = "") -> RestoreResult:
    """The result for one object; ``message``: its current kind, or else the reason of the failure."""
    if undo is RestoreOutcome.RESTORED:
        return RestoreResult(path=name, file=file, undo=undo, text=message)
    return RestoreResult(path=name, file=file, undo=undo, detail=message)


class TreeReading(Struct, frozen=True, kw_only=True):
    """The tree of one interface. ``problem``: why there is none; ``would``: the change that observe mode does not make.

    ``sent``: bytes of online work and of BE's class since the tree was created, and whether its rates are the ones that
    were set last; None without a tree.
    """

    problem: str = ""
    would: str = ""
    sent: TreeCounters | None = None


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
        """Install a tree at the interface, with ``rates`` to start with, and read its counters and rates.

        Without ``enforce`` only report the change. Errors: `SourceError`, `StoreError`.
        """
        root = await self._worker.work(partial(self._tc.root, name))
        if root is None:
            return TreeReading(problem="no such interface")
        # A default is replaced, because the kernel reinstalls it by itself.
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
        return TreeReading(sent=await self._worker.work(partial(self._tc.counted, index, rates)))

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
