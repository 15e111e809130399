"""What a killed ``bypassctl doctor --prove`` left.

Removed by its next run, at the daemon's start, and by ``bypassctl restore``, which every uninstall runs.
"""

import os
import shutil
from typing import Final, NamedTuple

from cgroupfs.errors import AgentError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.trial import list_left, remove_left
from reconciler.runtime.lock import InstanceLock
from resctrl.trial import group_left, remove_left_groups

DIRECTORY: Final = "prove"
"""Beside the state file: the lock of a run, and the results of the last ones."""
CHAIN: Final = "chain"
"""Within it: the state file, configuration and alerts of the trial of the whole chain, while it runs."""


def clean(hierarchy: Hierarchy, root: str = "/") -> list[str]:
    """Remove all groups of trials. Only while the lock is held: a run's own groups have the same names."""
    return [*remove_left(hierarchy), *remove_left_groups(root)]


class LeftGroups(NamedTuple):
    """The groups of a killed run: those that were removed, and those that could not be removed."""

    removed: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


def clean_left(hierarchy: Hierarchy, state_directory: str, root: str = "/") -> LeftGroups:
    """The same without the lock: nothing where trials were never run here, or are running."""
    directory = os.path.join(state_directory, DIRECTORY)
    if not os.path.isdir(directory):
        return LeftGroups()
    try:
        lock = InstanceLock(directory)
    except AgentError:
        return LeftGroups()
    try:
        shutil.rmtree(os.path.join(directory, CHAIN), ignore_errors=True)
        removed = clean(hierarchy, root)
        return LeftGroups(tuple(removed), (*list_left(hierarchy), *group_left(root)))
    finally:
        lock.release()
