"""The registration of the side actuators: which there are, when they are loaded, how all are undone without a daemon.

A new one is a file in `actuators` that implements `actuators.side.SideActuator`, and one entry in each function here.
Their modules are imported where they are made: a node that uses none of them pays for none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import AuxiliaryActuator, LazyActuator, PlanSnapshot, RestrictionsCache
from reconciler.config.environment import NodeEnvironment
from reconciler.config.model import Config
from state.cache import CacheUsage
from state.evidence import Sample
from state.ledger import Ledger
from state.schema import META
from state.store import Store, boot_id
from state.undo import RestoreResult

ROWS: Final = {
    "cores": "core_cookies",
    "network": "network",
    "oom": "oom_scores",
    "cache": "resctrl",
    "marks": "watermarks",
}
"""Rows of the store's META table by which an earlier run's traces are known; a test holds the modules to them."""


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


def build(
    config: Config, place: NodeEnvironment, store: Store, means: ActuatorContext
) -> tuple[AuxiliaryActuator, ...]:
    """Those that this node may need. A reload can enable a policy: each asks the newest pools what is wanted."""
    rows = {key for key, _ in store.rows(META)}

    def reclaim() -> AuxiliaryActuator:
        from reconciler.actuators.memory_reclaim.actuator import ReclaimActuator  # noqa: PLC0415
        from reconciler.control.reclaim_loop import MemoryReclaimLoop  # noqa: PLC0415

        actuator = ReclaimActuator(place.hierarchy, files=means.files)
        return MemoryReclaimLoop(actuator, root=place.root, files=means.files)

    def oom_scores() -> AuxiliaryActuator:
        from reconciler.actuators.files.oom_score import OomScores  # noqa: PLC0415

        return OomScores(place.hierarchy, store, means.store_lane, root=place.root, files=means.files)

    def watermarks() -> AuxiliaryActuator:
        from reconciler.actuators.files.watermarks import Watermarks  # noqa: PLC0415

        return Watermarks(store, means.store_lane, root=place.root, files=means.files)

    def core_sched() -> AuxiliaryActuator:
        from reconciler.actuators.core_sched.actuator import CoreSched  # noqa: PLC0415
        from reconciler.actuators.core_sched.prctl import RealPrctl  # noqa: PLC0415

        return CoreSched(
            RealPrctl(),
            place.hierarchy,
            store,
            means.ledger,
            means.store_lane,
            writes=means.writes,
            files=means.files,
        )

    def resctrl() -> AuxiliaryActuator:
        from reconciler.actuators.resctrl.actuator import ResctrlActuator  # noqa: PLC0415
        from reconciler.control.cache_loop import CacheLoop  # noqa: PLC0415

        make = partial(
            ResctrlActuator,
            place.hierarchy,
            store,
            means.ledger,
            means.store_lane,
            root=config.node.root,
            writes=means.writes,
            cgroups=means.files,
        )
        return CacheLoop(make, misses=means.misses)

    def network() -> AuxiliaryActuator:
        from reconciler.actuators.network.namespaces import RealNetworkNamespaces  # noqa: PLC0415
        from reconciler.actuators.network.tc import RealTc  # noqa: PLC0415
        from reconciler.actuators.network.tc_pods import RealPodTc  # noqa: PLC0415
        from reconciler.control.network_loop import NetworkLoop  # noqa: PLC0415

        spaces = partial(RealNetworkNamespaces, place.hierarchy, files=means.files)
        return NetworkLoop(RealTc(), RealPodTc(), spaces, store, means.store_lane)

    def lazily(
        name: str, make: Callable[[], AuxiliaryActuator], wanted: Callable[[PlanSnapshot], bool], row: str = ""
    ) -> AuxiliaryActuator:
        return LazyActuator(name, make, wanted, leftover=ROWS.get(row) in rows)

    sides: list[AuxiliaryActuator] = []
    if place.hierarchy.version("memory") is not None:
        sides.append(lazily("memory_reclaim", reclaim, lambda now: now.plan.memory.reclaim is not None))
    sides.append(lazily("watermarks", watermarks, lambda now: now.plan.sysctls is not None, "marks"))
    if _is_this_machine(config.node.root):
        sides.append(lazily("oom_score", oom_scores, lambda now: now.plan.oom_scores is not None, "oom"))
        sides.append(lazily("core_sched", core_sched, lambda now: now.plan.cookies is not None, "cores"))
        sides.append(lazily("resctrl", resctrl, lambda now: now.plan.cache is not None, "cache"))
        sides.append(lazily("network", network, lambda now: now.plan.network is not None, "network"))
    return tuple(sides)


def cache_use(sides: Iterable[AuxiliaryActuator]) -> CacheUsage | None:
    """What is measured of caches and memory bandwidth, by whichever of them measures it; None: by none, now."""
    return next((use for side in sides if isinstance(side, RestrictionsCache) and (use := side.measured())), None)


async def restore_without_daemon(root: str, store: Store, only: str | None) -> Sequence[RestoreResult]:
    """Undo what they left on this node, as the store and marks of ours tell. Errors: none; they are in the answer."""
    from reconciler.actuators.files.watermarks import restore_marks  # noqa: PLC0415

    marks = restore_marks(store, root=root) if only is None else []
    if not _is_this_machine(root):
        return tuple(marks)
    from reconciler.actuators.core_sched.prctl import RealPrctl  # noqa: PLC0415
    from reconciler.actuators.core_sched.tasks import restore_cookies  # noqa: PLC0415
    from reconciler.actuators.network.tc import RealTc  # noqa: PLC0415
    from reconciler.actuators.network.tc_pods import RealPodTc  # noqa: PLC0415
    from reconciler.actuators.network.undo import restore_network  # noqa: PLC0415
    from reconciler.actuators.resctrl.undo import restore_resctrl  # noqa: PLC0415

    return [
        *marks,
        *restore_cookies(RealPrctl(), store, only),
        *_restore_scores(root, store, only),
        *restore_resctrl(root, store, only),
        *restore_network(RealTc(), RealPodTc(), store, only),
        *_restore_private(root, only),
    ]


def _restore_private(root: str, only: str | None) -> Sequence[RestoreResult]:
    """The groups in which pods' pressure was counted: no actuator's, but as much a trace of ours."""
    from reconciler.signals.privatepsi import restore_groups  # noqa: PLC0415

    try:
        return restore_groups(Hierarchy.detect(root), only)
    except SourceError:
        return ()


def _restore_scores(root: str, store: Store, only: str | None) -> Sequence[RestoreResult]:
    from reconciler.actuators.files.oom_score import restore_scores  # noqa: PLC0415

    try:
        return restore_scores(Hierarchy.detect(root), store, only, root=root)
    except SourceError:
        return ()  # nobody has written anything on a node without cgroups


def _is_this_machine(root: str) -> bool:
    """Whether a node is the one that we run on, and no copy: what is set by system call is set here, by thread id."""
    return boot_id(root) == boot_id() != ""
