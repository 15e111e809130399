"""Knobs that this kernel offers, by the files of a group."""

from collections.abc import Mapping
from typing import Protocol

from cgroupfs.codecs import Version
from cgroupfs.files import REAL, FileOps
from cgroupfs.knobs import CATALOG


class HierarchyLookup(Protocol):
    """Where groups are, and on which version: what the probe needs of `cgroupfs.hierarchy.Hierarchy`."""

    def directory(self, controller: str, group_path: str) -> str:
        """A group's directory in one controller's hierarchy."""

    def versions(self) -> Mapping[str, Version]:
        """The version of each mounted controller."""


def offered(mounts: HierarchyLookup, group: str, files: FileOps = REAL) -> frozenset[str]:
    """The names of the knobs whose file a group has; empty while no such group exists.

    Not the root (but for the few that only it has): it lacks most files, and has some that cannot be written. A
    kernel's patches and build options decide, not its release: distributions take features into old kernels, and
    leave them out of new ones.

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
