"""Containers outside of their pods' directories: kubelet and runtime have different cgroup drivers.

Nothing that the kubelet or bypassd sets on kubepods or a pod reaches such a container, and no policy finds it.
"""

import contextlib
import glob
import os
import re
from typing import Final

from cgroupfs.hierarchy import Hierarchy
from reconciler.runtime.format import plural
from state.model import SourceStatus

NAME: Final = "cgroup driver"
# The systemd driver's SLICE:PREFIX:ID, which a runtime with the cgroupfs driver takes for a directory's name.
_LITERAL: Final = re.compile(r"[^:]*\.slice:[A-Za-z-]+:[0-9a-f]{12,}")
_POD: Final = re.compile(r"-pod([0-9a-f_]{1,64})\.slice:")
_LONGEST: Final = 80
_MOST: Final = 10_000


def groups_outside(hierarchy: Hierarchy) -> list[str]:
    root = hierarchy.trigger_directory("/")
    services = glob.glob(os.path.join(glob.escape(root), "system.slice", "*.service"))
    paths: list[str] = []
    # The runtime makes the directory at the root, or in the group of its own service.
    for directory in (root, *sorted(services)):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            paths += [entry.path for entry in entries if _LITERAL.fullmatch(entry.name)]
    return [f"/{os.path.relpath(path, root)}" for path in sorted(paths)[:_MOST]]


def outside_of_pods(paths: list[str]) -> dict[str, str]:
    """The first of these groups of each pod, by the pod's uid."""
    first: dict[str, str] = {}
    for path in paths:
        if (match := _POD.search(path)) is not None:
            first.setdefault(match[1].replace("_", "-"), path)
    return first


def outside_text(path: str) -> str:
    """What it means for a pod that this group has its container."""
    shown = path if len(path) <= _LONGEST else f"{path[:_LONGEST]}…"
    return f"its container is outside of its directory, in {shown}: no setting reaches it (cgroup drivers differ)"


def outside_status(paths: list[str]) -> SourceStatus:
    """Whether there are none; else how many, one of them, and what that means."""
    if not paths:
        return SourceStatus(name=NAME, ok=True, age_s=0.0, detail="no container is outside of its pod's directory")
    shown = paths[0] if len(paths[0]) <= _LONGEST else f"{paths[0][:_LONGEST]}…"
    detail = (
        f"{plural(len(paths), 'container')} outside of the pods' directories, such as {shown}: kubelet and runtime "
        "have different cgroup drivers, and no setting of a pod reaches them"
    )
    return SourceStatus(name=NAME, ok=False, age_s=0.0, detail=detail)
