"""What the files of a group show of this kernel and node: the knobs that are offered, the CPUs in effect."""

from functools import lru_cache
from typing import Final

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import FREEZER, Hierarchy
from cgroupfs.knobs import CATALOG

_KEPT: Final = 64
"""Texts up to this length are parsed once: most groups of a node have the same set."""


def cpus_in_effect(mounts: Hierarchy, group: str, files: FileOps = REAL) -> CpuSet:
    """The CPUs that the kernel gives a group: no group below it has others. Empty: not known."""
    version = mounts.version("cpuset")
    if version is None:
        return EMPTY
    try:
        # v1 takes only CPUs that the parent has, so the set is in effect. On v2 it is a request, which may be empty.
        text = files.read(mounts.directory("cpuset", group), "cpuset.cpus" if version == 1 else "cpuset.cpus.effective")
        return _parsed(text) if len(text) <= _KEPT else CpuSet.parse(text)
    except (OSError, ValueError):
        return EMPTY


def is_frozen(mounts: Hierarchy, group: str, files: FileOps = REAL) -> bool:
    """Whether the tasks of a group are frozen, or being frozen, by any program; not where that cannot be read."""
    version = mounts.version(FREEZER)
    if version is None:
        return False
    try:
        text = files.read(mounts.directory(FREEZER, group), "freezer.state" if version == 1 else "cgroup.events")
    except OSError:
        return False
    return text.strip() in {"FROZEN", "FREEZING"} if version == 1 else "frozen 1" in text


@lru_cache(maxsize=128)
def _parsed(text: str) -> CpuSet:
    return CpuSet.parse(text)


def offered(mounts: Hierarchy, group: str, files: FileOps = REAL) -> frozenset[str]:
    """The names of the knobs whose file a group has; empty while no such group exists.

    The files decide, not the kernel's release: distributions take features into old kernels, and leave them out of new
    ones. ``group``: not the root, which lacks most files and has some that cannot be written.
    """
    versions = mounts.versions()
    listed: dict[tuple[str, bool], frozenset[str]] = {}
    for controller, at_root in {(knob.controller, knob.root_only) for knob in CATALOG.values()}:
        if controller in versions:
            try:
                listed[controller, at_root] = frozenset(
                    files.files(mounts.directory(controller, "/" if at_root else group))
                )
            except OSError:
                listed[controller, at_root] = frozenset()
    if not any(names for (_, at_root), names in listed.items() if not at_root):
        return frozenset()
    return frozenset(
        knob.name
        for knob in CATALOG.values()
        if (where := (knob.controller, knob.root_only)) in listed
        and knob.probe(versions[knob.controller], listed[where])
    )
