"""The files of the node, outside of every cgroup, that policies may set: the path of each, and the codec of its text.

A policy names one in a `state.plan.FileTarget`; `reconciler.actuators.files.node_files` writes and restores it. A new
file is one entry of the catalog; a new form of text needs a codec as well.

Source: kernel documentation, admin-guide/sysctl/vm; kernel/sched/debug.c.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.bounded import whole
from cgroupfs.scheduling import feature
from state.daemons import HRTICK, TURN_FILES
from state.kinds import FILE, SYSCTL
from state.memory import MIN_FREE, SCALE


class FileCodec(Struct, frozen=True):
    """The text of a file: decoded to a number (errors: `ValueError`), and encoded from one."""

    # Integers only: a target is bounded by `FileTarget.most_rise`.

    decode: Callable[[str], int]
    encode: Callable[[int], str]


NUMBER: Final = FileCodec(lambda text: whole(text.strip()), str)
"""A whole number."""
FEATURE: Final = FileCodec(lambda text: feature(text, HRTICK), lambda on: HRTICK if on else f"NO_{HRTICK}")
"""One of the scheduler's features, on or off; a write of its name changes no other."""


class NodeFile(Struct, frozen=True):
    """One file. ``path``: below the node's root; ``name``: in plans, holds and documents, the kernel's own name."""

    name: str
    path: str
    codec: FileCodec = NUMBER

    @property
    def kind(self) -> str:
        """The kind of its row in the ledger."""
        return SYSCTL if self.path.startswith("proc/sys/") else FILE


def _sysctl(name: str) -> NodeFile:
    return NodeFile(name, f"proc/sys/{name.replace('.', '/')}")


_FILES: Final = (
    _sysctl(MIN_FREE),
    _sysctl(SCALE),  # from Linux 4.6
    *(
        NodeFile(name, path, FEATURE if name.endswith(HRTICK) else NUMBER)
        for files in TURN_FILES
        for name, path in files.items()
    ),
)
FILES: Final[Mapping[str, NodeFile]] = {file.name: file for file in _FILES}
"""By name."""
