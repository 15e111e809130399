"""The configuration in force: what the files have, and what else decides while the daemon runs.

From the lowest: a setting's default, the level of ``protect``, the files. ``--observe`` decides the mode above all.
"""

from typing import final

from msgspec.structs import replace

from reconciler.config import load
from reconciler.config.load import Loaded
from reconciler.config.model import AgentMode, Config


@final
class ConfigInForce:
    """``loaded``: what was read last. ``config``: what applies."""

    def __init__(self, loaded: Loaded, *, observe: bool = False) -> None:
        self.loaded = loaded
        self._observe = observe
        self.config = self._composed()

    def reload(self) -> tuple[str, ...]:
        """Read the files again. The changed settings that only a restart can apply are returned.

        Errors: `ConfigError`; everything is unchanged then.
        """
        self.loaded, kept = load.reload(self.loaded)
        self.config = self._composed()
        return kept

    def _composed(self) -> Config:
        config = self.loaded.config
        return replace(config, mode=AgentMode.OBSERVE) if self._observe else config
