"""The configuration at a moment, by its windows of time, and the window in force."""

from typing import TYPE_CHECKING, Any, final

from reconciler.config import load
from reconciler.config.load import Loaded
from reconciler.config.model import Config

if TYPE_CHECKING:
    from reconciler.config.node_settings import KeptSettings
    from reconciler.config.window_time import Decision


@final
class WindowedConfig:
    """A configuration at the times of a recording, each window made once."""

    def __init__(self, loaded: Loaded, kept: "KeptSettings | None" = None) -> None:
        """``loaded``: as the files have it. ``kept``: a control plane's settings, which apply below it."""
        self._loaded = loaded
        self._kept = kept
        self._table = load.window_table(loaded.config) if loaded.config.windows else None
        self._decision: Decision | None = None
        self._configs: dict[int | None, Config] = {None: self._layered(loaded)}

    def at(self, wall_s: float) -> Config:
        """In seconds since the epoch; the same object as long as the same window is in force."""
        if self._table is None:
            return self._configs[None]
        if self._decision is None or not self._decision.covers(wall_s):
            self._decision = self._table.decide(wall_s)
        window = self._decision.window
        if window not in self._configs:
            self._configs[window] = self._layered(load.in_window(self._loaded, window))
        return self._configs[window]

    def _layered(self, loaded: Loaded) -> Config:
        if self._kept is None:
            return loaded.config
        from reconciler.config.node_settings import in_force  # few nodes have some

        return in_force(loaded, self._kept).loaded.config


def window_facts(config: Config, at: float) -> dict[str, Any]:
    """The window in force and the next change, as the daemon's document has them; empty without windows."""
    if not config.windows:
        return {}
    table = load.window_table(config)
    decision = table.decide(at)
    return {
        "name": table.name(decision.window),
        "until": decision.until,
        "then": table.name(decision.then),
        "names": list(table.names),
    }
