"""What may be written now: the mode, the operator's holds, dry runs, and how memory limits are lowered.

Made before every part that writes, and read by each of them at each write.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import final

from msgspec import Struct

from reconciler.actuators.holds import holding
from state.model import Hold


class WriteSettings(Struct, frozen=True, kw_only=True):
    """What the configuration says. ``dry_policies``: their settings are shown and not written.

    ``reclaim``: memory of a group is reclaimed first where its new limit is below its usage.
    """

    enforce: bool = True
    dry_policies: frozenset[str] = frozenset()
    reclaim: bool = False


@final
class WriteMode:
    """What may be written now: mode, holds, dry runs, and the way to lower memory limits."""

    def __init__(self, settings: WriteSettings, holds: Mapping[str, Hold] = MappingProxyType({})) -> None:
        self._settings = settings
        self.enforce = settings.enforce
        """Whether what is planned is also written."""
        self.holds = holds
        """Those in force, by target."""

    @property
    def reclaim(self) -> bool:
        """Whether memory of a group is reclaimed first where its new limit is below its usage."""
        return self._settings.reclaim

    def hold_on(self, path: str, knob: str, pod_uid: str | None) -> Hold | None:
        return holding(self.holds, path=path, knob=knob, pod_uid=pod_uid)

    def is_dry(self, policy: str) -> bool:
        """Whether a policy's settings are shown and not written."""
        return policy in self._settings.dry_policies

    @property
    def has_dry_runs(self) -> bool:
        return bool(self._settings.dry_policies)

    def set_enforce(self, *, enforce: bool) -> None:
        """Write, or only show what would be written."""
        self.enforce = enforce

    def use_holds(self, holds: Mapping[str, Hold]) -> None:
        self.holds = holds

    def add_hold(self, hold: Hold) -> None:
        """Obey a hold at once, before it is stored."""
        self.holds = {**self.holds, hold.target: hold}

    def use(self, settings: WriteSettings) -> None:
        self._settings, self.enforce = settings, settings.enforce
