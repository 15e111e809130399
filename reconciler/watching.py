"""The observer's place in the agent: nothing is loaded while nobody asks for interference or eviction to be watched.

Switched on by a reload it begins, switched off it ends and takes back what it asked for.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, final

import trio
from msgspec import Struct

from reconciler.alerts.alert import Alert
from reconciler.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

    from reconciler.observer import Evictor, Node, Observer
    from reconciler.signals.reading import Means

NAME: Final = "interference"


def watched(config: Config) -> bool:
    """Whether anything is to be watched."""
    return config.interference.enabled or config.eviction.enabled or config.interference.record.directory is not None


class WatchNumbers(Struct, frozen=True, kw_only=True):
    """What is watched, in the metrics. Counts since the start, but ``verdicts`` and ``steps``, which are now.

    ``verdicts``: victims by rule and verdict. ``steps`` in force by response. ``changes``: what happened on the ladder,
    by response and turn (a rule in shadow has turns of its own, ``would-applied``). ``read_s``: CPU seconds by reader.
    ``orders``: evictions by outcome, ``open`` for those under way; ``would``: pods that a dry run wants gone now.
    """

    verdicts: Mapping[tuple[str, str], int] = {}
    steps: Mapping[str, int] = {}
    changes: Mapping[tuple[str, str], int] = {}
    read_s: Mapping[str, float] = {}
    pass_s: float = 0.0
    orders: Mapping[str, int] = {}
    would: int = 0


@final
class Watching:
    """See the module's text. ``evictor``: made when it is first needed."""

    def __init__(self, node: "Node", tell: "Callable[[Alert], None]", evictor: "Callable[[], Evictor | None]") -> None:
        self._node, self._tell, self._evictor = node, tell, evictor
        self._changed = trio.Event()
        self.observer: Observer | None = None

    def reconfigure(self) -> None:
        """The configuration is another one now."""
        self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch while the configuration asks for it."""
        task_status.started()
        while True:
            self._changed = trio.Event()
            if watched(self._node.config):
                await self._watch()
            else:
                await self._changed.wait()

    async def _watch(self) -> None:
        from reconciler.observer import Observer  # noqa: PLC0415  # detectors, readers, the ladder: not on every node

        self.observer = Observer(self._node, self._means, tell=self._tell, evictor=self._evictor())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.observer.run)
                while watched(self._node.config):
                    await self._changed.wait()
                    self._changed = trio.Event()
                nursery.cancel_scope.cancel(reason="nothing is to be watched any more")
        finally:
            self.observer = None

    def _means(self, config: Config) -> "Means":
        from reconciler.signals.reading import Means  # noqa: PLC0415

        place = self._node.place
        return Means(
            hierarchy=place.hierarchy,
            root=place.root,
            files=self._node.files,
            private_cgroup2=config.interference.private_cgroup2,
            filesystems={"nodefs": place.kubelet.root_dir, "imagefs": config.runtime.state_dir},
        )

    def numbers(self) -> WatchNumbers | None:
        """The metrics' part; None while nothing is watched."""
        if self.observer is None:
            return None
        from reconciler.observed import numbers  # noqa: PLC0415

        return numbers(self.observer)

    def facts(self) -> Mapping[str, object]:
        """The section of the state document; empty while nothing is watched."""
        if self.observer is None:
            return {}
        from reconciler.observed import facts  # noqa: PLC0415

        return facts(self.observer)
