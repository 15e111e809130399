"""The auxiliary actuators: which there are, when they are loaded, how all are undone without a daemon.

A new one is a file in `actuators` that implements `AuxiliaryActuator`, with a codec where it changes values that must
be restored, and one entry in each table and function here.
Their modules are imported where they are made: a node that uses none of them pays for none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import AuxiliaryActuator, CacheUsageSource, LazyActuator, PlanSnapshot
from reconciler.actuators.codec import RowCodec
from reconciler.actuators.restore import UndoKind
from reconciler.config.environment import NodeEnvironment
from reconciler.config.model import Config
from reconciler.runtime.lazy import load
from state.cache import CacheUsage
from state.evidence import Sample
from state.kinds import COOKIE, NETWORK, PROCESS, RESCTRL, SYSCTL
from state.ledger import Ledger
from state.store import boot_id
from state.undo import RestoreResult

KINDS: Final = {
    "core_sched": COOKIE,
    "network": NETWORK,
    "oom_score": PROCESS,
    "resctrl": RESCTRL,
    "watermarks": SYSCTL,
}
"""By the actuator's name: the kind of its rows in the ledger, by which an earlier run's changes are known."""
_CODECS: Final = {
    COOKIE: "reconciler.actuators.core_sched.tasks:CODEC",
    NETWORK: "reconciler.actuators.network.undo:CODEC",
    PROCESS: "reconciler.actuators.files.oom_score:CODEC",
    RESCTRL: "reconciler.actuators.resctrl.undo:CODEC",
    SYSCTL: "reconciler.actuators.files.watermarks:CODEC",
}
"""Where the codec of each kind is; a test holds them to their kinds."""


def codec_of(kind: str) -> RowCodec[Any] | None:  # of the kind's own state
    """The codec of a kind, from its module, which is imported only now; None for an unknown kind."""
    path = _CODECS.get(kind)
    if path is None:
        return None
    codec: Any = load(path)
    assert isinstance(codec, RowCodec)
    return codec


class ActuatorContext(Struct, frozen=True, kw_only=True):
    """What of the agent's own they may use.

    ``store_lane``: of everything that writes to the store; ``writes``: counts, by knob and outcome; ``misses``: the
    newest cache misses of pods by uid, per 1000 instructions, with their age as of the call; who is not in it is not
    known (`reconciler.signals.resctrl_reader.misses_of`).
    """

    ledger: Ledger
    store_lane: trio.CapacityLimiter
    writes: Counter[tuple[str, str]]
    misses: Callable[[], Mapping[str, Sample]]
    files: FileOps = REAL


def build(config: Config, place: NodeEnvironment, means: ActuatorContext) -> tuple[AuxiliaryActuator, ...]:
    """Those that this node may need. A reload can enable a policy: each asks the newest pools what is wanted."""
    kinds = means.ledger.kinds()

    def reclaim() -> AuxiliaryActuator:
        from reconciler.actuators.memory_reclaim.actuator import ReclaimActuator
        from reconciler.control.reclaim_loop import MemoryReclaimLoop

        actuator = ReclaimActuator(place.hierarchy, files=means.files)
        return MemoryReclaimLoop(actuator, root=place.root, files=means.files)

    def oom_scores() -> AuxiliaryActuator:
        from reconciler.actuators.files.oom_score import OomScores

        return OomScores(place.hierarchy, means.ledger, means.store_lane, root=place.root, files=means.files)

    def watermarks() -> AuxiliaryActuator:
        from reconciler.actuators.files.watermarks import Watermarks

        return Watermarks(means.ledger, means.store_lane, root=place.root, files=means.files)

    def core_sched() -> AuxiliaryActuator:
        from reconciler.actuators.core_sched.actuator import CoreSched
        from reconciler.actuators.core_sched.prctl import RealPrctl

        return CoreSched(
            RealPrctl(),
            place.hierarchy,
            means.ledger,
            means.store_lane,
            writes=means.writes,
            files=means.files,
        )

    def resctrl() -> AuxiliaryActuator:
        from reconciler.actuators.resctrl.actuator import ResctrlActuator
        from reconciler.control.cache_loop import CacheLoop

        make = partial(
            ResctrlActuator,
            place.hierarchy,
            means.ledger,
            means.store_lane,
            root=config.node.root,
            writes=means.writes,
            cgroups=means.files,
        )
        return CacheLoop(make, misses=means.misses)

    def network() -> AuxiliaryActuator:
        from reconciler.actuators.network.namespaces import RealNetworkNamespaces
        from reconciler.actuators.network.tc import RealTc
        from reconciler.actuators.network.tc_pods import RealPodTc
        from reconciler.control.network_loop import NetworkLoop

        spaces = partial(RealNetworkNamespaces, place.hierarchy, files=means.files)
        return NetworkLoop(RealTc(), RealPodTc(), spaces, means.ledger, means.store_lane)

    def lazily(
        name: str, make: Callable[[], AuxiliaryActuator], wanted: Callable[[PlanSnapshot], bool]
    ) -> AuxiliaryActuator:
        return LazyActuator(name, make, wanted, leftover=KINDS.get(name) in kinds)

    sides: list[AuxiliaryActuator] = []
    if place.hierarchy.version("memory") is not None:
        sides.append(lazily("memory_reclaim", reclaim, lambda now: now.plan.memory.reclaim is not None))
    sides.append(lazily("watermarks", watermarks, lambda now: now.plan.sysctls is not None))
    if _is_this_machine(config.node.root):
        sides.append(lazily("oom_score", oom_scores, lambda now: now.plan.oom_scores is not None))
        sides.append(lazily("core_sched", core_sched, lambda now: now.plan.cookies is not None))
        sides.append(lazily("resctrl", resctrl, lambda now: now.plan.cache is not None))
        sides.append(lazily("network", network, lambda now: now.plan.network is not None))
    return tuple(sides)


def cache_use(sides: Iterable[AuxiliaryActuator]) -> CacheUsage | None:
    """What is measured of caches and memory bandwidth, by whichever of them measures it; None: by none, now."""
    return next((use for side in sides if isinstance(side, CacheUsageSource) and (use := side.measured())), None)


def restore_table(sides: Iterable[AuxiliaryActuator], only: str | None) -> dict[str, UndoKind]:
    """How the running actuators undo their kinds: each pauses meanwhile."""
    return {KINDS.get(side.name, side.name): partial(side.restore, only) for side in sides}


def restore_table_without_daemon(root: str, ledger: Ledger, only: str | None) -> dict[str, UndoKind]:
    """How each kind is undone while no daemon runs: by the ledger, and by marks of ours where it is lost.

    Where the node is a copy, what is set by system call or belongs to this machine's processes cannot be undone.
    """
    table: dict[str, UndoKind] = {SYSCTL: _blocking(partial(_restore_marks, root, ledger, only))}
    if _is_this_machine(root):
        table[COOKIE] = _blocking(partial(_restore_cookies, ledger, only))
        table[PROCESS] = _blocking(partial(_restore_scores, root, ledger, only))
        table[RESCTRL] = _blocking(partial(_restore_resctrl, root, ledger, only))
        table[NETWORK] = _blocking(partial(_restore_network, ledger, only))
        table["private groups"] = _blocking(partial(_restore_private, root, only))
    return table


def _blocking(undo: Callable[[], Sequence[RestoreResult]]) -> UndoKind:
    """In this thread: nothing else runs."""

    async def undo_now() -> Sequence[RestoreResult]:
        await trio.lowlevel.checkpoint()
        return undo()

    return undo_now


def _restore_marks(root: str, ledger: Ledger, only: str | None) -> Sequence[RestoreResult]:
    from reconciler.actuators.files.watermarks import restore_marks

    return restore_marks(ledger, root=root) if only is None else ()


def _restore_cookies(ledger: Ledger, only: str | None) -> Sequence[RestoreResult]:
    from reconciler.actuators.core_sched.prctl import RealPrctl
    from reconciler.actuators.core_sched.tasks import restore_cookies

    return restore_cookies(RealPrctl(), ledger, only)


def _restore_scores(root: str, ledger: Ledger, only: str | None) -> Sequence[RestoreResult]:
    from reconciler.actuators.files.oom_score import restore_scores

    try:
        return restore_scores(Hierarchy.detect(root), ledger, only, root=root)
    except SourceError:
        return ()  # nobody has written anything on a node without cgroups


def _restore_resctrl(root: str, ledger: Ledger, only: str | None) -> Sequence[RestoreResult]:
    from reconciler.actuators.resctrl.undo import restore_resctrl

    return restore_resctrl(root, ledger, only)


def _restore_network(ledger: Ledger, only: str | None) -> Sequence[RestoreResult]:
    from reconciler.actuators.network.tc import RealTc
    from reconciler.actuators.network.tc_pods import RealPodTc
    from reconciler.actuators.network.undo import restore_network

    return restore_network(RealTc(), RealPodTc(), ledger, only)


def _restore_private(root: str, only: str | None) -> Sequence[RestoreResult]:
    """The groups in which pods' pressure was counted: no actuator's and without a row, they have our names."""
    from reconciler.signals.privatepsi import restore_groups

    try:
        return restore_groups(Hierarchy.detect(root), only)
    except SourceError:
        return ()


def _is_this_machine(root: str) -> bool:
    """Whether a node is the one that we run on, and no copy: what is set by system call is set here, by thread id."""
    return boot_id(root) == boot_id() != ""
