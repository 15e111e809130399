"""What flows upwards: events of the parts below, for those that are made after them.

Every other dependency points down: a part gets what it needs when it is made. The hub is made first and handed down, so
that a source can publish before the parts exist that use its events.
"""

from collections.abc import Callable, Mapping
from typing import Generic, ParamSpec, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.usage import UsageReader
from reconciler.actuators.cgroup.fastpath import FastResult
from reconciler.control.event_notes import WindowNow
from reconciler.runtime.workqueue import DirtyKeys
from reconciler.signals.latest import LatestSamples
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.kubelet_watch import KubeletChange
from reconciler.sources.node import NodeEnvironment
from reconciler.sources.runtime_signal import RuntimeEvent
from state.model import Hold, NodeView, Pod
from state.plan import NodePlan

P = ParamSpec("P")


@final
class Topic(Generic[P]):
    """One kind of event. Subscribers are called at once, in the order in which they subscribed: that of their making.

    They must not wait: a source reads no other event meanwhile.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[P, object], ...] = ()

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers = (*self._subscribers, subscriber)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)


@final
class Hub:
    """The topics, and the keys of what is to be checked again (``changed``)."""

    def __init__(self) -> None:
        self.changed = DirtyKeys()
        # The runtime, by container: it has finished writing, takes long for that, was called by a command, has removed
        # the container.
        self.settled: Topic[str, float, RuntimeEvent] = Topic()
        self.unfinished: Topic[str] = Topic()
        self.commanded: Topic[str, float | None] = Topic()
        self.gone: Topic[str] = Topic()
        # The fast path has written.
        self.executed: Topic[FastResult] = Topic()
        # A plan was made, of this view.
        self.planned: Topic[NodeView, NodePlan] = Topic()
        # The operator's holds in force, by target.
        self.held: Topic[Mapping[str, Hold]] = Topic()
        # A new kubelet process; and, when it has settled, the values that it runs with.
        self.kubelet_started: Topic[[]] = Topic()
        # The API server responds again, or there are other credentials: what has failed there may be tried.
        self.api_usable: Topic[[]] = Topic()
        self.kubelet_changed: Topic[KubeletConfig, tuple[KubeletChange, ...]] = Topic()


@final
class PodTable(dict[str, Pod]):
    """The pods that there are, by uid. Only the inventory fills it; parts that are made before it read it, too."""

    def title(self, uid: str) -> str:
        return pod.title if (pod := self.get(uid)) is not None else ""


@final
class NodeBase:
    """What every room is built on: the node as found, its files and counters, and what rooms publish to those below."""

    def __init__(
        self, place: NodeEnvironment, files: FileOps = REAL, window: Callable[[], WindowNow] = WindowNow
    ) -> None:
        """``window``: the window of time in force."""
        self.place = place
        self.window = window
        self.files = files
        self.usage = UsageReader(place.hierarchy, ops=files)
        self.hub = Hub()
        self.pods = PodTable()
        self.samples = LatestSamples()
