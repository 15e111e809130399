"""Nothing stays frozen without somebody who watches: what we froze is thawed when we stop, start, or stand back.

Every other setting may outlive the daemon (fail static). A frozen pod does nothing, answers no probe, and on cgroup v1
cannot even be killed; so this one value is taken back at a stop, before anything else at a start, by the unit after a
crash (``bypassctl thaw``), and under a hold as well.

Evictions stop a pod for half a second to kill who forks too fast. That is in their own journal, not in the ledger: the
daemon thaws such a pod when it takes the eviction up, `thaw_killed` is for where no daemon follows.
"""

import logging
from typing import Final

from cgroupfs.errors import CgroupError, StoreError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from state.entry import same_group
from state.ledger import Ledger
from state.schema import EVICTIONS
from state.store import Store

_LOG: Final = logging.getLogger(__name__)
FREEZE: Final = "freeze"
NEVER_KEPT: Final = frozenset({FREEZE})
"""Knobs whose values are given back even where a hold says that the file is to be left alone."""


def thaw(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> tuple[list[str], list[str]]:
    """Thaw every group that the ledger says is frozen by us. Control files are written here and now: 0.4 ms each.

    Returns the group paths that run again, and what could not be done, in a person's words. Errors: none.
    """
    knob = CATALOG[FREEZE]
    done: list[str] = []
    failed: list[str] = []
    for entry in [one for one in ledger if one.knob == FREEZE]:
        version = hierarchy.version(entry.controller)
        if version is None:
            continue
        directory = hierarchy.directory(entry.controller, entry.path)
        try:
            if not same_group(entry.inode, files.inode(hierarchy.trigger_directory(entry.path))):
                continue
            if knob.decode(files.read(directory, entry.file), version) == 0:
                continue
            files.write(directory, entry.file, knob.encode(0, version))
            ledger.wrote(entry.key, before=None, after=knob.normal(files.read(directory, entry.file), version))
            done.append(entry.path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, ValueError) as exc:
            failed.append(f"{entry.path}: still frozen: {exc}")
            _LOG.error("%s: still frozen: %s", entry.path, exc)
    return done, failed


def thaw_killed(hierarchy: Hierarchy, store: Store) -> tuple[list[str], list[str]]:
    """Thaw every pod that was being killed when the daemon ended; as `thaw`. A pod that runs is not touched."""
    # Not on nodes that never evict.
    from cgroupfs.subtree import Subtree  # noqa: PLC0415
    from reconciler.responses.journal import cases_of  # noqa: PLC0415
    from state.eviction import Step  # noqa: PLC0415

    done: list[str] = []
    failed: list[str] = []
    try:
        cases = cases_of(store.rows(EVICTIONS))
    except StoreError as exc:
        return done, [f"evictions cannot be read: {exc}"]
    for case in cases:
        if not case.open or case.step is not Step.KILL or case.boot != store.boot:
            continue
        group = case.target.group
        try:
            with Subtree.open(hierarchy, group, case.target.inodes) as tree:
                if tree.thaw():
                    done.append(group)
        except CgroupError as exc:
            failed.append(f"{group}: still frozen: {exc}")
    return done, failed
