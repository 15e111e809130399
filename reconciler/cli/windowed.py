"""The configuration at a moment, by its windows of time, and the window in force."""

import os
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from msgspec.structs import replace

from reconciler.cli import places
from reconciler.config import load
from reconciler.config.load import Loaded
from reconciler.config.model import Config
from reconciler.config.window_time import zone_of

if TYPE_CHECKING:
    from reconciler.config.node_settings import KeptSettings
    from reconciler.config.window_time import Decision, WindowTable
    from reconciler.settings.schema import Schema


@final
class WindowedConfig:
    """A configuration at the times of a recording, each window made once."""

    def __init__(self, loaded: Loaded, kept: "KeptSettings | None" = None, zone: str | None = None) -> None:
        """``loaded``: as the files have it. ``kept``: a control plane's settings where the recording has none.

        ``zone``: of windows without one; None: this machine's. One whose data is not here is UTC.
        """
        self._loaded = loaded
        self._own = self._kept = kept
        self._row = b""
        self.own_node = kept.node if kept is not None else None
        """Whose settings count where the recording has none; None: no settings do."""
        self._table = load.window_table(loaded.config, known_zone(zone)) if loaded.config.windows else None
        self._decision: Decision | None = None
        self._configs: dict[int | None, Config] = {None: self._layered(loaded)}

    def use(self, row: bytes) -> None:
        """Of a recording: what the control plane had set then, which applies below the files; empty: it has none."""
        if row != self._row:
            from reconciler.config.node_settings import decode_kept  # as below

            self._row, self._kept = row, (decode_kept(row) if row else None) or self._own
            self._configs = {None: self._layered(self._loaded)}

    @property
    def lacks_settings(self) -> bool:
        """Whether a control plane's settings count, and `use` had none."""
        return not self._row and self._loaded.config.apiserver.node_settings != "off"

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


class NodeMoment(NamedTuple):
    """A time, in seconds since the epoch, on a node whose files are below ``root``. ``zone`` None: as they have it."""

    at: float
    root: str = "/"
    zone: str | None = None

    def table(self, config: Config) -> "WindowTable":
        """The windows in the node's zone."""
        if self.root != "/":
            config = replace(config, node=replace(config.node, root=os.path.abspath(self.root)))
        return load.window_table(config, self.zone)

    def in_window(self, loaded: Loaded, top: "Schema | None" = None) -> Loaded:
        """The configuration in the window of then. ``top``: as of `load`."""
        return load.in_window(loaded, self.table(loaded.config).decide(self.at).window, top)


def moment_of(root: str) -> NodeMoment:
    """Now; of a copy of a node when it was made. A zone whose data is not here is UTC.

    Errors: `InputError` for a copy whose description is not what it should be.
    """
    if root == "/":
        return NodeMoment(time.time())
    from reconciler.cli.recorded import captured_at  # its decoders are needed for a copied node only

    at, recorded_zone = captured_at(root)
    zone = known_zone(None if at is None else recorded_zone, os.path.abspath(root))
    return NodeMoment(time.time() if at is None else at, root, zone)


def load_now(options: Namespace, top: "Schema | None" = None) -> tuple[Loaded, tuple[str, ...]]:
    """The configuration in the window of now (of a capture: of then), and the rest as of `with_node_settings`."""
    loaded = load.load(places.config_path(options), required=options.config is not None, top=top)
    if loaded.config.windows:
        loaded = moment_of(options.root).in_window(loaded, top)
    return places.with_node_settings(options, loaded, top)


def known_zone(zone: str | None, root: str = "/") -> str | None:
    """A zone by its name, UTC where its data is not here. None: that of the node below ``root``."""
    try:
        zone_of(zone, root)
    except ValueError:
        return "UTC"
    return zone


def window_facts(config: Config, moment: NodeMoment) -> dict[str, Any]:
    """The window in force and the next change, as the daemon's document has them; empty without windows."""
    if not config.windows:
        return {}
    table = moment.table(config)
    decision = table.decide(moment.at)
    return {
        "name": table.name(decision.window),
        "until": decision.until,
        "then": table.name(decision.then),
        "names": list(table.names),
    }
