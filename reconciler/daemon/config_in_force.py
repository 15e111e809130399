"""The configuration in force: what the files have, and what else decides while the daemon runs.

From the lowest: a setting's default, the control plane's settings of this node (``apiserver.node_settings``), the level
of ``protect``, the files, the window that holds now (which may have another level instead). ``--observe`` decides the
mode above all; a window never does.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, final

from msgspec.structs import replace

from reconciler.clients.kube_config import NodeSettings
from reconciler.config import load
from reconciler.config.load import Loaded
from reconciler.config.model import AgentMode, Config
from reconciler.control.event_notes import WindowNow
from reconciler.runtime.stints import in_worker

if TYPE_CHECKING:
    from reconciler.config.node_settings import KeptSettings, SettingsInForce
    from reconciler.config.window_time import Decision, WindowTable


class _Decided(NamedTuple):
    """``base``: as the files have it. ``loaded``: in the window in force."""

    base: Loaded
    loaded: Loaded
    table: "WindowTable | None" = None
    decision: "Decision | None" = None


class _Composed(NamedTuple):
    """``config``: of the files and the window, with the control plane's settings, which were ``kept``."""

    decided: _Decided
    kept: "KeptSettings | None"
    settings: "SettingsInForce | None"
    config: Config


@final
class ConfigInForce:
    """``config``: what applies now."""

    def __init__(self, loaded: Loaded, *, observe: bool = False, wall: Callable[[], float] = time.time) -> None:
        """What a control plane had last is read from the store, so that it counts from the first plan on."""
        self._observe = observe
        self._wall = wall
        self._kept: KeptSettings | None = None
        if loaded.config.apiserver.node_settings is not NodeSettings.OFF:
            from reconciler.config.node_settings import kept_in  # most nodes have none

            self._kept = kept_in(loaded.config.store.path)
        self._take(_composed(_decided(loaded, wall()), self._kept))

    @property
    def loaded(self) -> Loaded:
        return self._now.decided.base

    async def reload(self) -> tuple[str, ...]:
        """Read the files again. The changed settings that only a restart can apply are returned.

        Not in the loop: it takes 20 ms and more. Errors: `ConfigError`; everything is unchanged then.
        """

        def read(kept: "KeptSettings | None") -> tuple[_Composed, tuple[str, ...]]:
            loaded, fixed = load.reload(self.loaded)
            return _composed(_decided(loaded, self._wall()), kept), fixed

        composed, fixed = await in_worker(read, self._kept)
        self._take(composed)
        return fixed

    def is_due(self) -> bool:
        """Whether the clock has left the time for which the window was decided.

        One comparison, made every second: a clock that was set and a suspend need nothing of their own.
        """
        decision = self._now.decided.decision
        return decision is not None and not decision.covers(self._wall())

    async def decide(self) -> bool:
        """Decide the window again; True if another one is in force. Errors: `ConfigError`; unchanged then."""

        def decided(before: _Composed, at: float) -> _Composed:
            after = _redecided(before.decided, at)
            if after.loaded is before.decided.loaded:
                return before._replace(decided=after)
            return _composed(after, before.kept)

        before = self._now
        composed = await in_worker(decided, before, self._wall())
        self._take(composed)
        return composed.decided.loaded is not before.decided.loaded

    def window(self) -> WindowNow:
        _, _, table, decision = self._now.decided
        level = self.loaded.config.protect
        if table is None or decision is None:
            return WindowNow(level=level)
        return WindowNow(
            name=table.name(decision.window),
            until=decision.until,
            then=table.name(decision.then),
            names=table.names,
            level=level,
        )

    async def use_node_settings(self, kept: "KeptSettings | None") -> bool:
        """Take what the control plane has now; None: nothing. Whether the configuration is another one.

        Not in the loop: it takes 6 ms and more.
        """
        before, self._kept = self.config, kept
        decided = self._now.decided
        composed = await in_worker(_composed, decided, kept)
        if self._now.decided is not decided:
            # The files, or the window, have changed meanwhile.
            composed = _composed(self._now.decided, kept)
        self._take(composed)
        return self.config != before

    def drop_settings_of_others(self, node: Callable[[], str]) -> None:
        """Do not use stored settings of another node: a copied disk has them. ``node``: the name of this one."""
        if self._kept is not None and self._kept.node != node():
            self._kept = None
            self._take(_composed(self._now.decided, None))

    def settings_facts(self) -> dict[str, object]:
        """What of the control plane's settings counts, and what does not; for the state document."""
        return {} if self._now.settings is None else self._now.settings.facts()

    def settings_left(self) -> tuple[str, ...]:
        """The values of the control plane that are not taken, each with its reason."""
        return () if self._now.settings is None else self._now.settings.left

    def settings_row(self) -> bytes:
        """What the control plane has set, for a recording; empty: nothing that counts."""
        kept = self._now.kept
        if kept is None or self._now.settings is None:
            return b""
        from reconciler.config.node_settings import encode_kept

        return encode_kept(kept)

    def _take(self, composed: _Composed) -> None:
        if composed.kept is not self._kept:
            # The control plane's settings have changed while a worker composed this.
            composed = _composed(composed.decided, self._kept)
        self._now = composed
        config = composed.config
        self.config: Config = replace(config, mode=AgentMode.OBSERVE) if self._observe else config


def _decided(loaded: Loaded, at: float) -> _Decided:
    if not loaded.config.windows:
        return _Decided(loaded, loaded)
    table = load.window_table(loaded.config)
    decision = table.decide(at)
    return _Decided(loaded, load.in_window(loaded, decision.window), table, decision)


def _redecided(before: _Decided, at: float) -> _Decided:
    """The same files at another time."""
    assert before.table is not None
    assert before.decision is not None
    decision = before.table.decide(at)
    if decision.window == before.decision.window:
        return before._replace(decision=decision)
    return before._replace(loaded=load.in_window(before.base, decision.window), decision=decision)


def _composed(decided: _Decided, kept: "KeptSettings | None") -> _Composed:
    loaded = decided.loaded
    if loaded.config.apiserver.node_settings is NodeSettings.OFF:
        return _Composed(decided, kept, None, loaded.config)
    from reconciler.config.node_settings import in_force

    settings = in_force(loaded, kept)
    return _Composed(decided, kept, settings, settings.loaded.config)
