"""The configuration in force: what the files have, and what else decides while the daemon runs.

From the lowest: a setting's default, the control plane's settings of this node (``apiserver.node_settings``), the level
of ``protect``, the files. ``--observe`` decides the mode above all.
"""

from typing import TYPE_CHECKING, final

from msgspec.structs import replace

from reconciler.clients.kube_config import NodeSettings
from reconciler.config import load
from reconciler.config.load import Loaded
from reconciler.config.model import AgentMode, Config

if TYPE_CHECKING:
    from reconciler.config.node_settings import KeptSettings, SettingsInForce


@final
class ConfigInForce:
    """``loaded``: what was read last. ``config``: what applies."""

    def __init__(self, loaded: Loaded, *, observe: bool = False) -> None:
        """What a control plane had last is read from the store, so that it counts from the first plan on."""
        self.loaded = loaded
        self._observe = observe
        self._settings: SettingsInForce | None = None
        self._kept: KeptSettings | None = None
        if loaded.config.apiserver.node_settings is not NodeSettings.OFF:
            from reconciler.config.node_settings import kept_in  # most nodes have none

            self._kept = kept_in(loaded.config.store.path)
        self.config = self._composed()

    def reload(self) -> tuple[str, ...]:
        """Read the files again. The changed settings that only a restart can apply are returned.

        Errors: `ConfigError`; everything is unchanged then.
        """
        self.loaded, kept = load.reload(self.loaded)
        self.config = self._composed()
        return kept

    def use_node_settings(self, kept: "KeptSettings | None") -> bool:
        """Take what the control plane has now; None: nothing. Whether the configuration is another one."""
        before, self._kept = self.config, kept
        self.config = self._composed()
        return self.config != before

    def settings_facts(self) -> dict[str, object]:
        """What of the control plane's settings counts, and what does not; for the state document."""
        return {} if self._settings is None else self._settings.facts()

    def settings_left(self) -> tuple[str, ...]:
        """The values of the control plane that are not taken, each with its reason."""
        return () if self._settings is None else self._settings.left

    def _composed(self) -> Config:
        config, self._settings = self.loaded.config, None
        if config.apiserver.node_settings is not NodeSettings.OFF:
            from reconciler.config.node_settings import in_force

            self._settings = in_force(self.loaded, self._kept)
            config = self._settings.loaded.config
        return replace(config, mode=AgentMode.OBSERVE) if self._observe else config
