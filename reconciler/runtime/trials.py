"""What a killed ``bypassctl doctor --prove`` left: removed by its next run, and at the daemon's start."""

import os
import shutil
from typing import Final

from cgroupfs.errors import AgentError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.trial import remove_left
from reconciler.runtime.lock import InstanceLock
from resctrl.trial import remove_left_groups

DIRECTORY: Final = "prove"
"""Beside the state file: the lock of a run, and the results of the last ones."""
CHAIN: Final = "chain"
"""Within it: the state file, configuration and alerts of the trial of the whole chain, while it runs."""


def clean(hierarchy: Hierarchy, root: str = "/") -> list[str]:
    """Remove all groups of trials. Only while the lock is held: a run's own groups have the same names."""
    return [*remove_left(hierarchy), *remove_left_groups(root)]


def clean_left(hierarchy: Hierarchy, state_directory: str, root: str = "/") -> list[str]:
    """The same without the lock: nothing where trials were never run here, or are running."""
    directory = os.path.join(state_directory, DIRECTORY)
    if not os.path.isdir(directory):
        return []
    try:
        lock = InstanceLock(directory)
    except AgentError:
        return []
    try:
        shutil.rmtree(os.path.join(directory, CHAIN), ignore_errors=True)
        return clean(hierarchy, root)
    finally:
        lock.release()
