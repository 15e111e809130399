"""A node that is closed to new BE pods: why, since when, how the cluster reads of it, and what became of that."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

CLOSED_KEY: Final = "bypassd/closed"
"""The taint's key. Its value is its latest end."""
NODE_MARK: Final = "node.mark"
"""The mark's name in the ledger, and of an operator's hold on it."""
CLOSED_CONDITION: Final = "BypassdClosed"
"""The node condition's type."""


class NodeMark(StrEnum):
    """What the node's object in the cluster has while the node is closed, besides headroom 0."""

    AUTO = "auto"
    """A taint of the effect PreferNoSchedule, where the API server allows it; else nothing."""
    NONE = "none"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_SCHEDULE = "NoSchedule"
    CONDITION = "condition"

    @property
    def taint(self) -> str | None:
        """The effect of the taint; None: it is none."""
        if self is NodeMark.AUTO:
            return NodeMark.PREFER_NO_SCHEDULE.value
        return self.value if self in {NodeMark.PREFER_NO_SCHEDULE, NodeMark.NO_SCHEDULE} else None


TAINT_EFFECTS: Final = (NodeMark.PREFER_NO_SCHEDULE.value, NodeMark.NO_SCHEDULE.value)


class ClosedNode(Struct, frozen=True, kw_only=True):
    """The node is closed to new BE pods. Seconds since the epoch."""

    reason: str  # the shortages at the time of closing
    since_s: float
    until_s: float  # the latest end, whatever becomes of them
    mark: NodeMark = NodeMark.AUTO


class MarkState(StrEnum):
    PENDING = "pending"
    IN_PLACE = "in place"
    """Read back from the node's object."""
    HEADROOM_ONLY = "headroom only"
    """No mark: by the configuration, or ``auto`` where the API server does not allow or answer it."""
    FOREIGN = "set by another client"
    REMOVED = "removed by another client"
    REFUSED = "refused"
    FAILED = "failed"


class MarkStatus(Struct, frozen=True, kw_only=True):
    """State of the mark."""

    mark: NodeMark
    state: MarkState
    detail: str = ""  # why it is not in place, or what was read back
    at_s: float = 0.0


class NodeClosing(Struct, frozen=True, kw_only=True):
    """What an evaluation of a frame knows of closing. Times on the frame's clock."""

    # Since when the node is closed, and the cluster could read it; None: it is not closed.
    closed_s: float | None = None
    mark: NodeMark | None = None  # read back from the node's object; None: nothing was
