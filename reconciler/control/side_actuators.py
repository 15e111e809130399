"""The table of auxiliary actuators: a row each. How they are built, and how all are undone without a daemon.

A new one is a module that ends in ``ACTUATOR = ActuatorKind(...)``, a field of `state.plan.NodePlan`, and a row here. A
row says all that is needed before the module is imported: a node that needs none of them imports none.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    AuxiliaryActuator,
    LazyActuator,
    OfflineContext,
    PlanSnapshot,
)
from reconciler.actuators.codec import RowCodec
from reconciler.actuators.mode import WriteMode
from reconciler.actuators.restore import UndoKind
from reconciler.control.hub import NodeBase
from reconciler.control.record import NodeRecord
from reconciler.control.writes import CgroupWrites
from reconciler.policies.yielding import scheduler_of
from reconciler.runtime.lazy import load
from reconciler.runtime.supervisor import Component
from state.cache import CacheUsage
from state.closing import MarkStatus
from state.entry import RestoreResult
from state.kinds import CAPACITY, COOKIE, FILE, INTERRUPT, NETWORK, NODE_OBJECT, PROCESS, RESCTRL, SYSCTL, THREAD
from state.ledger import Ledger
from state.model import NodeView
from state.plan import NodePlan
from state.store import boot_id

if TYPE_CHECKING:
    from reconciler.clients.kube import KubeApi


class _ActuatorRow(Struct, frozen=True):
    """One actuator.

    ``field``: what of the `NodePlan` it is for; it is loaded when that is neither None nor empty. ``kinds``: of its
    rows in the ledger, by which an earlier run's changes are found. ``local``: only on the machine that the agent runs
    on, not on a copy of a node's files. ``controller``: only where a hierarchy has it.
    """

    name: str
    place: str
    field: str
    kinds: tuple[str, ...] = ()
    local: bool = True
    controller: str = ""

    def wanted(self, situation: PlanSnapshot) -> bool:
        part = attrgetter(self.field)(situation.plan)
        return part is not None and part != {}

    def load(self) -> ActuatorKind:
        kind = load(self.place)
        assert isinstance(kind, ActuatorKind)
        return kind


TABLE: Final = (
    _ActuatorRow("memory_reclaim", "reconciler.control.reclaim_loop:ACTUATOR", "memory.reclaim", (), False, "memory"),
    _ActuatorRow("node_files", "reconciler.actuators.files.node_files:ACTUATOR", "files", (SYSCTL, FILE), False),
    _ActuatorRow("interrupts", "reconciler.actuators.files.interrupts:ACTUATOR", "interrupts", (INTERRUPT,)),
    _ActuatorRow("oom_score", "reconciler.actuators.processes.oom_score:ACTUATOR", "oom_scores", (PROCESS,)),
    _ActuatorRow("idle_threads", "reconciler.actuators.processes.idle_threads:ACTUATOR", "idle_threads", (THREAD,)),
    _ActuatorRow("capacity", "reconciler.actuators.files.capacity:ACTUATOR", "capacity", (CAPACITY,), False),
    _ActuatorRow("core_sched", "reconciler.actuators.core_sched.actuator:ACTUATOR", "cookies", (COOKIE,)),
    _ActuatorRow("resctrl", "reconciler.control.cache_loop:ACTUATOR", "cache", (RESCTRL,)),
    _ActuatorRow("node_mark", "reconciler.actuators.node_mark:ACTUATOR", "closed", (NODE_OBJECT,)),
    _ActuatorRow("network", "reconciler.control.network_loop:ACTUATOR", "network", (NETWORK,)),
)
KINDS: Final[Mapping[str, tuple[str, ...]]] = {row.name: row.kinds for row in TABLE}
"""The kinds of an actuator's rows in the ledger, by its name."""


def codec_of(kind: str) -> RowCodec[Any] | None:  # of the kind's own state
    """The codec of a kind, from its module, which is imported only now; None for an unknown kind."""
    return next((row.load().codecs[kind] for row in TABLE if kind in row.kinds), None)


@final
class SideActuators:
    """Those that this node may need, as one: each gets every plan, and runs as a component of its own."""

    def __init__(self, actuators: Sequence[AuxiliaryActuator], mode: WriteMode, release: str = "") -> None:
        """``release``: the kernel's."""
        self.all = tuple(actuators)
        self._mode = mode
        self._release = release

    def planned(self, view: NodeView, plan: NodePlan) -> None:
        """Give all of them the newest plan. Does not wait."""
        situation = PlanSnapshot(view=view, plan=plan, enforce=self._mode.enforce, holds=self._mode.holds)
        for side in self.all:
            side.planned(situation)

    def components(self) -> list[Component]:
        return [Component(name=side.name, run=side.run) for side in self.all]

    def cache_use(self) -> CacheUsage | None:
        """Measured use of caches and memory bandwidth; None: no actuator measures it now."""
        return next((use for side in self.all if (use := side.measured())), None)

    def mark(self) -> MarkStatus | None:
        """The state of the mark of a closed node; None: no mark is wanted."""
        return next((status for side in self.all if (status := side.mark())), None)

    def notified(self) -> frozenset[str]:
        """Uids of the pods that read of a step before it: whose file of capacity could be written."""
        return frozenset[str]().union(*(side.notified() for side in self.all))

    def idle_containers(self) -> frozenset[str]:
        """The group paths of the containers with all threads in the idle class, if this kernel applies it.

        A thread with another policy of its own, and a sweep that has not come to a container yet, leave it out.
        """
        if not scheduler_of(self._release).threads_yield:
            return frozenset()
        for side in self.all:
            if side.name != "idle_threads":
                continue
            kept = side.status().get("kept")
            without = kept if isinstance(kept, Mapping) else {}
            return frozenset(
                path
                for path, statuses in side.statuses.items()
                if path not in without and any(status.state.is_in_force() for status in statuses.values())
            )
        return frozenset()

    def restore_table(self, only: str | None) -> dict[str, UndoKind]:
        """How they undo their kinds: each pauses meanwhile."""
        table: dict[str, UndoKind] = {}
        for side in self.all:
            table |= dict.fromkeys(KINDS.get(side.name) or (side.name,), partial(side.restore, only))
        return table


def build(
    base: NodeBase, record: NodeRecord, writes: CgroupWrites, api: "Callable[[], KubeApi]", node: str
) -> SideActuators:
    """Those that this node may need. A reload can enable a policy: each is loaded by what the newest plan wants.

    ``api`` makes a client of the API server; ``node``: the name of the node's object there.
    """
    place, files = base.place, base.files
    context = ActuatorContext(
        hierarchy=place.hierarchy,
        root=place.root,
        ledger=record.ledger,
        store_lane=record.lane,
        fastpath=writes.fastpath,
        writes=writes.actuator.writes,
        files=files,
        misses=base.samples.misses,
        kubelet_dir=place.kubelet.root_dir,
        api=api,
        node=node,
    )
    kinds = context.ledger.kinds()
    local = _is_this_machine(context.root)

    def make(row: _ActuatorRow) -> AuxiliaryActuator:
        return row.load().build(context)

    actuators = [
        LazyActuator(row.name, partial(make, row), row.wanted, leftover=any(kind in kinds for kind in row.kinds))
        for row in TABLE
        if (local or not row.local) and (not row.controller or context.hierarchy.version(row.controller) is not None)
    ]
    for actuator in actuators:
        base.hub.api_usable.subscribe(actuator.api_usable)
    return SideActuators(actuators, writes.mode, kernel_release(place.root, files))


def kernel_release(root: str, files: FileOps = REAL) -> str:
    """The kernel's release; empty where it cannot be read."""
    try:
        return files.read(f"{root.rstrip('/')}/proc/sys/kernel", "osrelease").strip()
    except OSError:
        return ""


def restore_table_without_daemon(
    root: str, ledger: Ledger, only: str | None, api: "Callable[[], KubeApi]"
) -> dict[str, UndoKind]:
    """How each kind is undone while no daemon runs: by the ledger, and by marks of ours where it is lost.

    Where the node is a copy, what is set by system call or belongs to this machine's processes cannot be undone.
    ``api`` makes a client of the API server.
    """
    context = OfflineContext(root=root, ledger=ledger, api=api, only=only)
    local = _is_this_machine(root)
    table: dict[str, UndoKind] = {}
    for row in TABLE:
        if row.kinds and (local or not row.local):
            table |= dict.fromkeys(row.kinds, partial(_undo, row, context))
    if local:
        table["private groups"] = partial(_restore_private, root, only)
    return table


async def _undo(row: _ActuatorRow, context: OfflineContext) -> Sequence[RestoreResult]:
    kind = row.load()
    if kind.undo_online is not None:
        return await kind.undo_online(context)
    assert kind.undo is not None
    await trio.lowlevel.checkpoint()
    return kind.undo(context)  # nothing else runs


async def _restore_private(root: str, only: str | None) -> Sequence[RestoreResult]:
    """The groups in which pods' pressure was counted. They are in no ledger, and found by bypassd's names."""
    from reconciler.signals.privatepsi import restore_groups

    await trio.lowlevel.checkpoint()
    try:
        return restore_groups(Hierarchy.detect(root), only)
    except SourceError:
        return ()


def _is_this_machine(root: str) -> bool:
    """Whether this is the node that bypassd runs on, not a copy: a system call acts on this machine's thread ids."""
    return boot_id(root) == boot_id() != ""
