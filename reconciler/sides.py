"""The registration of the side actuators: which there are, from configuration, and how all are undone without a daemon.

A new one is a file in `actuators` that implements `actuators.side.SideActuator`, and one entry in each function here.
"""

from collections import Counter
from collections.abc import Sequence

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.cookiestore import restore_cookies
from reconciler.actuators.core_sched import CoreSched
from reconciler.actuators.network import Network, restore_trees
from reconciler.actuators.oom_score import OomScores, restore_scores
from reconciler.actuators.prctl import RealPrctl
from reconciler.actuators.reclaim import Reclaimer
from reconciler.actuators.resctrl import Resctrl
from reconciler.actuators.resctrl_undo import restore_resctrl
from reconciler.actuators.side import SideActuator
from reconciler.actuators.tc import RealTc
from reconciler.config import Config
from reconciler.place import Place
from reconciler.restore import Undone
from state.ledger import Ledger
from state.store import Store, boot_id


class Means(Struct, frozen=True, kw_only=True):
    """What of the agent's own they may use.

    ``store_lane``: of everything that writes to the store; ``writes``: counts, by knob and outcome.
    """

    ledger: Ledger
    store_lane: trio.CapacityLimiter
    writes: Counter[tuple[str, str]]
    files: FileOps = REAL


def build(config: Config, place: Place, store: Store, means: Means) -> tuple[SideActuator, ...]:
    """Those that this node may need. A reload can enable a policy: each asks the newest pools what is wanted."""
    sides: list[SideActuator] = []
    if place.hierarchy.version("memory") is not None:
        sides.append(Reclaimer(place.hierarchy, root=place.root, files=means.files))
    if _is_this_machine(config.node.root):
        sides.append(OomScores(place.hierarchy, store, means.store_lane, root=place.root, files=means.files))
        sides.append(
            CoreSched(
                RealPrctl(),
                place.hierarchy,
                store,
                means.ledger,
                means.store_lane,
                writes=means.writes,
                files=means.files,
            )
        )
        sides.append(
            Resctrl(
                place.hierarchy,
                store,
                means.ledger,
                means.store_lane,
                root=config.node.root,
                writes=means.writes,
                cgroups=means.files,
            )
        )
        sides.append(Network(RealTc(), store, means.store_lane))
    return tuple(sides)


async def restore_without_daemon(root: str, store: Store, only: str | None) -> Sequence[Undone]:
    """Undo what they left on this node, as the store and marks of ours tell. Errors: none; they are in the answer."""
    if not _is_this_machine(root):
        return ()
    return [
        *restore_cookies(RealPrctl(), store, only),
        *_restore_scores(root, store, only),
        *restore_resctrl(root, store, only),
        *(restore_trees(RealTc(), store) if only is None else ()),
    ]


def _restore_scores(root: str, store: Store, only: str | None) -> Sequence[Undone]:
    try:
        return restore_scores(Hierarchy.detect(root), store, only, root=root)
    except SourceError:
        return ()  # nobody has written anything on a node without cgroups


def _is_this_machine(root: str) -> bool:
    """Whether a node is the one that we run on, and no copy: what is set by system call is set here, by thread id."""
    return boot_id(root) == boot_id() != ""
