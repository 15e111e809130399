"""The control plane's settings of this node, as a part of the agent: nothing of it is loaded before it is wanted.

`reconciler.daemon.settings_reader` reads them; `reconciler.daemon.config_in_force` has the configuration with them.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, final

import trio

from reconciler.clients.kube_config import NodeSettings
from reconciler.config.load import changed, value_at
from reconciler.config.model import Config
from reconciler.control.record import NodeRecord
from reconciler.runtime.lazy import import_in_thread
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component
from reconciler.runtime.wakeup import WakeUp
from state.model import SourceStatus
from state.schema import META, NODE_SETTINGS

if TYPE_CHECKING:
    from reconciler.clients.kube import KubeApi
    from reconciler.config.node_settings import KeptSettings
    from reconciler.daemon.settings_reader import NodeSettingsReader


async def _ignored(_: "KeptSettings | None") -> None:
    """Of an agent without a daemon around it."""


class SettingsUse(NamedTuple):
    """``take`` gets what a control plane has set for this node, at the start and when it changes.

    ``facts``: what of that counts, for the state document. ``row``: that, for a recording; empty: nothing counts.
    """

    take: Callable[["KeptSettings | None"], Awaitable[None]] = _ignored
    facts: Callable[[], dict[str, object]] = dict
    row: Callable[[], bytes] = bytes


UNUSED: Final = SettingsUse()


@final
class NodeSettingsPart:
    """Makes the reader when settings are wanted, or stored."""

    def __init__(
        self, config: Config, record: NodeRecord, node: str, api: Callable[[], "KubeApi"], use: SettingsUse
    ) -> None:
        """``node``: the name of its object."""
        self._wanted = config.apiserver.node_settings
        self._record = record
        self._node = node
        self._api = api
        self._use = use
        self._reader: NodeSettingsReader | None = None
        self._stored = any(key == NODE_SETTINGS for key, _ in record.store.rows(META))
        self._wake = WakeUp()

    def reconfigure(self, config: Config) -> None:
        self._wanted = config.apiserver.node_settings
        if self._reader is not None:
            self._reader.use(self._wanted)
        self._wake.set()

    def component(self) -> Component:
        return Component(name="node settings", run=self.run)

    def statuses(self) -> list[SourceStatus]:
        """Whether the settings can be read, where that is wanted."""
        return [] if self._reader is None else self._reader.statuses()

    def facts(self) -> dict[str, object]:
        return self._use.facts() | ({"wanted": self._wanted} if self._reader is None else self._reader.facts())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read, from the moment on that it is wanted; or remove what is stored."""
        task_status.started()
        while self._wanted is NodeSettings.OFF and not self._stored:
            await self._wake.wait()
        await import_in_thread("reconciler.daemon.settings_reader")
        from reconciler.daemon.settings_reader import NodeSettingsReader, stored_row

        if self._reader is None:
            store, lane = self._record.store, self._record.lane
            row = await in_worker(stored_row, store, limiter=lane)
            self._reader = NodeSettingsReader(
                store, lane, self._node, self._api, row=row, wanted=self._wanted, changed=self._use.take
            )
        await self._reader.run()


def changes(before: Config, after: Config) -> Iterator[str]:
    """``setting from -> to`` of each setting that is another one."""
    from reconciler.config.docs import shown  # for an event only

    for name in changed(before, after):
        yield f"{name} {shown(value_at(before, name))} -> {shown(value_at(after, name))}"
