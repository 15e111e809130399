"""Reads the control plane's settings of this node, keeps the last ones, and reports a change.

An object that cannot be read keeps its last values, and so do all of them after a restart without an API server. With
another control plane in the configuration the last values remain until the first complete answer of it; with ``off``
they are removed at once.
"""

import random
from collections.abc import Awaitable, Callable
from typing import Final, final

import trio

from cgroupfs.errors import InputError, StoreError
from cgroupfs.log import get_log
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import NodeSettings
from reconciler.clients.node_settings import (
    AdminQosTarget,
    ObjectState,
    SettingsAnswerError,
    SettingsClient,
    SettingsObject,
)
from reconciler.config.mapping import NODE_DOMAINS
from reconciler.config.node_settings import KeptObject, KeptSettings, decode_kept, encode_kept, kept_object
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.model import SourceStatus
from state.schema import META, NODE_SETTINGS
from state.store import Store, StoreBatch

NAME: Final = "node settings"
PERIOD_S: Final = 60.0
"""At most 120 requests an hour of Koordinator (Node and NodeSLO), 60 of Katalyst (its CustomNodeConfig)."""
_SPREAD: Final = 0.2
"""Nodes that start together request at different times. The interval only grows by it."""
_LONGEST_S: Final = 300.0
_RETRY_S: Final = 120.0
"""The delay after a failure: half of the usual load. Nothing else shows that rights were given back."""
_NOT_INSTALLED_S: Final = 300.0
"""A group of kinds that the API server does not know costs a second request each time."""
_NO_KIND: Final = " (its kind is not installed)"
_CLOSE_S: Final = 1.0
_LOG: Final = get_log("node_settings")


def stored_row(store: Store) -> bytes | None:
    """What an earlier run has stored; to be called in the store's lane."""
    return dict(store.rows(META)).get(NODE_SETTINGS)


@final
class NodeSettingsReader:
    def __init__(
        self,
        store: Store,
        lane: trio.CapacityLimiter,
        node: str,
        api: Callable[[], KubeApi],
        *,
        row: bytes | None,
        wanted: NodeSettings,
        changed: Callable[[KeptSettings | None], Awaitable[None]],
        fraction: Callable[[], float] = random.random,
    ) -> None:
        """``lane``: the store's one-thread limiter. ``node``: the name of the node's object. ``row``: `stored_row`.

        ``changed`` gets the stored settings, and others as soon as they are durable. ``fraction``: from 0 to 1.
        """
        self._store = store
        self._lane = lane
        self._node = node
        self._api = api
        self._wanted = wanted
        self._changed = changed
        self._fraction = fraction
        self.kept = None if row is None else decode_kept(row)
        if row is not None and self.kept is None:
            _LOG.warning("cannot read the stored settings of the node; none count before they are read again")
        self._of_another = self.kept is not None and self.kept.node != node
        self._generation = store.generation
        self._unsaved = False
        self._wake = WakeUp()
        self._client: SettingsClient | None = None
        self._problem = ""
        self._missing: tuple[str, ...] = ()
        self._answered_at: float | None = None

    def use(self, wanted: NodeSettings) -> None:
        if wanted is not self._wanted:
            self._wanted = wanted
            self._wake.set()

    def facts(self) -> dict[str, object]:
        return {
            "wanted": self._wanted,
            "source": None if self.kept is None else self.kept.source,
            "objects": [] if self.kept is None else [item.title for item in self.kept.objects],
            "missing": list(self._missing),
            "requests": 0 if self._client is None else self._client.requests,
            "problem": self._problem or None,
        }

    def statuses(self) -> list[SourceStatus]:
        """Whether the settings can be read, where that is wanted."""
        if self._wanted is NodeSettings.OFF:
            return []
        at = self._answered_at
        age_s = None if at is None else max(0.0, trio.current_time() - at)
        return [SourceStatus(name=NAME, ok=not self._problem, age_s=age_s, detail=self._problem or self._detail())]

    def _detail(self) -> str:
        if self._answered_at is None:
            return f"{self._wanted}: no answer yet{'; the last settings count' if self.kept is not None else ''}"
        missing = ", ".join(self._missing)
        return f"{self._wanted}{f'; not found: {missing}' if missing else ''}"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        if self.kept is not None and not self._of_another:
            await self._changed(self.kept)
        try:
            while True:
                await self._wake.wait(await self._round())
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                if self._client is not None:
                    await self._client.aclose()

    async def _round(self) -> float:
        """One reading; the seconds until the next."""
        if self._of_another:
            _LOG.warning("the stored settings are of another node and are not used")
            self._of_another = False
            await self._keep(None)
        if self._wanted is NodeSettings.OFF:
            self._problem = ""
            if self.kept is not None:
                await self._keep(None)
            return _LONGEST_S
        wanted = self._wanted
        try:
            kept, problem, wait_s = await self._read(wanted)
            row = None if kept is None else encode_kept(kept)
        except (SettingsAnswerError, InputError) as exc:
            kept, row, problem, wait_s = None, None, exc, getattr(exc, "wait_s", None)
        # A reload meanwhile: the answer is not of the control plane that is wanted now.
        if self._wanted is not wanted:
            return 0.0
        unsaved = self._unsaved or self._store.generation != self._generation
        if kept is not None and (unsaved or kept != self.kept):
            await self._keep(kept, row)
        if problem is None:
            self._answered_at = trio.current_time()
            if self._problem:
                _LOG.info("the node's settings are read again", source=wanted)
            self._problem = ""
            return self._spread(_NOT_INSTALLED_S if any(_NO_KIND in title for title in self._missing) else PERIOD_S)
        self._failed(str(problem))
        return max(self._spread(_RETRY_S), wait_s or 0.0)

    async def _read(self, wanted: NodeSettings) -> tuple[KeptSettings | None, Exception | None, float | None]:
        """The settings as they are now, what is wrong with an object of them, and the requested delay.

        Errors: `SettingsAnswerError`.
        """
        if self._client is None:
            self._client = SettingsClient(self._api(), self._node)
        client = self._client
        if (why := client.unreachable()) is not None:
            raise SettingsAnswerError(why)
        if wanted is NodeSettings.KATALYST:
            return await self._katalyst(client)
        objects: list[KeptObject] = []
        missing: list[str] = []
        problem: Exception | None = None
        wait_s: float | None = None
        for number, read in enumerate((lambda: client.node(NODE_DOMAINS), client.node_slo)):
            try:
                item = await read()
                objects.append(await in_worker(kept_object, item))
                missing += _missing(item)
            except (SettingsAnswerError, InputError) as exc:
                problem = exc
                wait_s = max(wait_s or 0.0, getattr(exc, "wait_s", None) or 0.0)
                last = self._last(wanted, number)
                if last is None:
                    # Of a control plane that is new here nothing counts before all of it is known.
                    return None, problem, wait_s
                objects.append(last)
        self._say_missing(tuple(missing))
        return KeptSettings(source=wanted, node=self._node, objects=tuple(objects)), problem, wait_s

    def _last(self, wanted: NodeSettings, number: int) -> KeptObject | None:
        kept = self.kept
        if kept is None or kept.source is not wanted or len(kept.objects) <= number:
            return None
        return kept.objects[number]

    async def _katalyst(self, client: SettingsClient) -> tuple[KeptSettings | None, Exception | None, float | None]:
        target = await client.admin_qos_target()
        if isinstance(target, ObjectState):
            title = f"CustomNodeConfig {self._node}"
            item = SettingsObject(title=title, state=target)
            version = ""
        else:
            version = _version(target)
            kept = self.kept
            # The AdminQoSConfiguration is read only after a change, which its hash in the CustomNodeConfig shows.
            if kept is not None and kept.source is NodeSettings.KATALYST and version and kept.version == version:
                self._say_missing(())
                return kept, None, None
            item = await client.admin_qos(target)
            if item.state is not ObjectState.FOUND:
                # Created again with the same content it has the same hash.
                version = ""
        try:
            only = await in_worker(kept_object, item)
        except InputError as exc:
            return None, exc, None
        self._say_missing(tuple(_missing(item)))
        kept = KeptSettings(source=NodeSettings.KATALYST, node=self._node, objects=(only,), version=version)
        return kept, None, None

    async def _keep(self, kept: KeptSettings | None, row: bytes | None = None) -> None:
        """Make settings durable, and report them; in any case, as they are the control plane's present ones."""
        batch = StoreBatch()
        if row is None:
            batch.delete(META, NODE_SETTINGS)
        else:
            batch.put(META, NODE_SETTINGS, row)
        # From before the write: where the store is replaced meanwhile, the next reading stores them again.
        self._generation, self._unsaved = self._store.generation, False
        try:
            await in_worker(self._store.apply, batch, limiter=self._lane)
        except StoreError as exc:
            # Tried again after the next reading.
            self._unsaved = True
            _LOG.warning("the node's settings are not stored and would be lost by a restart", error=str(exc))
        if kept != self.kept:
            self.kept = kept
            await self._changed(kept)

    def _spread(self, seconds: float) -> float:
        return seconds * (1.0 + _SPREAD * self._fraction())

    def _say_missing(self, missing: tuple[str, ...]) -> None:
        if missing != self._missing:
            for title in missing:
                _LOG.info("the control plane has no such settings of this node", missing=title)
        self._missing = missing

    def _failed(self, text: str) -> None:
        if text != self._problem:
            _LOG.warning("the node's settings cannot be read; the last ones stay", error=text)
        self._problem = text


def _missing(item: SettingsObject) -> list[str]:
    if item.state is ObjectState.FOUND:
        return []
    kind = item.title.partition(" ")[0]
    return [item.title if item.state is ObjectState.ABSENT else f"{kind}{_NO_KIND}"]


def _version(target: AdminQosTarget) -> str:
    """Empty: unknown, so that the object is read each time."""
    return f"{target.namespace}/{target.name} {target.hash}" if target.hash else ""
