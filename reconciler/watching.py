"""The observer's place in the agent: nothing is loaded while nobody asks for interference or eviction to be watched.

Switched on by a reload it begins, switched off it ends and takes back what it asked for.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, final

import trio

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

    def facts(self) -> Mapping[str, object]:
        """The section of the state document; empty while nothing is watched."""
        if self.observer is None:
            return {}
        from reconciler.observed import facts  # noqa: PLC0415

        return facts(self.observer)
