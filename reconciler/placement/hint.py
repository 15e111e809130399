"""The values of topology hints: what one resource says, and what came of all of them."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.cpuset import CpuSet

CPU: Final = "cpu"
MEMORY: Final = "memory"


class Hint(Struct, frozen=True, kw_only=True):
    """Nodes from which one resource can be had. ``score``: higher is better among hints that are equal otherwise."""

    nodes: CpuSet
    preferred: bool = False
    score: int = 0


class Hints(Struct, frozen=True, kw_only=True):
    """All hints of one resource. None: it does not care where; empty: it cannot be had anywhere."""

    name: str
    hints: tuple[Hint, ...] | None = None


class Merged(Struct, frozen=True, kw_only=True):
    """The nodes for a container, and what the policy says of it.

    ``nodes`` are the best there are even where the policy would not admit the container: nobody can refuse one that
    runs. ``by_resource`` tells more than ``nodes`` under ``numeric`` only. ``steps``: how many masks were looked at.
    """

    nodes: CpuSet
    preferred: bool
    admitted: bool
    reason: str
    by_resource: Mapping[str, CpuSet] = {}
    steps: int = 0
