"""CPU sets of cgroup v2 that are not in effect, and the partitions that take the CPUs. Reads only.

A group's ``cpuset.cpus`` is a request on v2. A partition (``cpuset.cpus.partition`` is root or isolated) takes its
CPUs from every group outside of it: a group all of whose CPUs are taken runs on those of the group above it, and its
file shows the request as before.

Source: kernel documentation, cgroup-v2, "Cpuset Interface Files"; kernel/cgroup/cpuset.c, update_prstate.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.probe import cpus_in_effect
from cgroupfs.steps import groups_below

_FILE: Final = "cpuset.cpus.partition"
_OWN: Final = ("cpuset.cpus.exclusive.effective", "cpuset.cpus")
"""What a partition has: since 6.7, and before."""
_MEMBER: Final = "member"
_INVALID: Final = " invalid"
"""In the state of one that the kernel did not grant, before the reason: its set is empty or overlaps a sibling's, the
group above is not a partition, or has processes and would be left without a CPU."""
_LONGEST: Final = 120
_WITHIN: Final = 32
"""Groups inside one container that are read."""
_ABOVE: Final = 256
"""Groups directly below the root, and the groups in these, in which a partition is searched for."""


class Partition(NamedTuple):
    """A group that is a partition, or was to be one. ``cpus``: those that it takes; empty where it is none.

    Partitions inside it have a part of them.
    """

    path: str
    state: str
    cpus: CpuSet

    def __str__(self) -> str:
        if not self.cpus:
            return f"{self.path} is not the CPU partition that it asks to be: {self.state}"
        return f"{self.path} is a CPU partition ({self.state}) and keeps other groups off CPU {self.cpus}"


def partition_of(hierarchy: Hierarchy, path: str, files: FileOps) -> Partition | None:
    """What one group is; None for a member, on v1, and where the kernel has no partitions."""
    if hierarchy.version("cpuset") != 2:
        return None
    try:
        state = files.read(hierarchy.directory("cpuset", path), _FILE).strip()
    except OSError:
        return None
    if state in {"", _MEMBER}:
        return None
    cpus = EMPTY if _INVALID in state else _taken(hierarchy, path, files)
    return Partition(path[:_LONGEST], state[:_LONGEST], cpus)


def _taken(hierarchy: Hierarchy, path: str, files: FileOps) -> CpuSet:
    for file in _OWN:
        with suppress(OSError, ValueError):
            if cpus := CpuSet.parse(files.read(hierarchy.directory("cpuset", path), file)):
                return cpus
    return EMPTY


def partition_ended_by(hierarchy: Hierarchy, path: str, wanted: CpuSet, files: FileOps) -> Partition | None:
    """A partition next to a group that the kernel would end if the group's set were ``wanted``; None: none is known.

    Linux before 6.1 refuses that set.
    """
    if hierarchy.version("cpuset") != 2:
        return None
    above = path.rpartition("/")[0] or "/"
    try:
        names = files.groups(hierarchy.directory("cpuset", above), _ABOVE)
    except OSError:
        return None
    siblings = (f"{above.rstrip('/')}/{name}" for name in names)
    found = (partition_of(hierarchy, sibling, files) for sibling in siblings if sibling != path)
    return next((item for item in found if item is not None and item.cpus & wanted), None)


def partitions_in(hierarchy: Hierarchy, path: str, files: FileOps) -> Iterator[Partition]:
    """A container's group and the groups inside it, of which a tenant makes any number."""
    if hierarchy.version("cpuset") != 2:
        return

    def names(group: str, most: int) -> list[str]:
        return files.groups(hierarchy.directory("cpuset", group), most)

    for group in (path, *groups_below(names, path, _WITHIN)):
        if (found := partition_of(hierarchy, group, files)) is not None:
            yield found


def partitions_beside(hierarchy: Hierarchy, files: FileOps) -> Iterator[Partition]:
    """The partitions in the first two levels of the hierarchy: units and slices of the node."""

    def names(group: str, most: int) -> list[str]:
        with suppress(OSError):
            return sorted(files.groups(hierarchy.directory("cpuset", group), most))
        return []

    above = [f"/{name}" for name in names("/", _ABOVE)]
    inside = (f"{path}/{name}" for path in above for name in names(path, _ABOVE))
    for path in (*above, *islice(inside, _ABOVE)):
        found = partition_of(hierarchy, path, files)
        if found is not None and found.cpus:
            yield found


def not_in_effect(hierarchy: Hierarchy, path: str, wanted: CpuSet, files: FileOps) -> CpuSet | None:
    """The CPUs on which a group runs although its set has none of them; None: it runs where its set says."""
    if hierarchy.version("cpuset") != 2 or not wanted:
        return None
    have = cpus_in_effect(hierarchy, path, files)
    return have if have - wanted else None
