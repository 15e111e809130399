"""Where the replacement of an evicted pod will run, as far as this node can know. Pure.

Its controller makes a new pod at once, and the scheduler chooses a node: often the same one, which has room again. A
DaemonSet's pod always returns; the others are kept away by the mark of a closed node (`reconciler.responses.closing`),
if it was read back and they do not tolerate it. Headroom 0 keeps away what requests extended resources that follow it;
whether the cluster's scheduler sees them is not known here.
"""

from enum import IntEnum

from state.closing import NodeClosing, NodeMark
from state.evidence import PodSnapshot

_RETURNS = frozenset({"DaemonSet", "Node"})
"""``Node`` owns the API server's picture of a static pod."""


class Replacement(IntEnum):
    """The likelihood that it runs here again, the least first."""

    NONE = 0
    ELSEWHERE = 1
    AVOIDS = 2
    MAY_RETURN = 3
    RETURNS = 4

    @property
    def words(self) -> str:
        """As text, for a ranking."""
        return _WORDS[self]


_WORDS = {
    Replacement.NONE: "not replaced",
    Replacement.ELSEWHERE: "replaced elsewhere",
    Replacement.AVOIDS: "replaced elsewhere if possible",
    Replacement.MAY_RETURN: "may return here",
    Replacement.RETURNS: "returns here",
}


def replacement_of(pod: PodSnapshot, closing: NodeClosing | None) -> Replacement:
    """The likelihood by the pod's controller, its tolerations, and the mark that was read back."""
    kind = (pod.owner or "").partition("/")[0]
    if not kind:
        return Replacement.NONE
    if pod.static or kind in _RETURNS:
        return Replacement.RETURNS
    mark = None if closing is None or closing.closed_s is None else closing.mark
    effect = None if mark is None else mark.taint
    if effect is None or effect in pod.tolerates:
        return Replacement.MAY_RETURN
    return Replacement.ELSEWHERE if mark is NodeMark.NO_SCHEDULE else Replacement.AVOIDS
