"""The section ``windows``: times in which some settings have other values, and which of them they have.

Loaded where a configuration has windows. `reconciler.config.window_time` has the law of their times.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal, final

from msgspec import Meta, Struct

from reconciler.config import window_time
from reconciler.config.window_time import Decision, ZonedTime, parse_when, zone_of
from reconciler.settings.schema import lazy_struct

if TYPE_CHECKING:
    from reconciler.detectors.rule import RuleConfig
else:
    RuleConfig = lazy_struct("reconciler.detectors.rule", "RuleConfig")

SETTINGS: Final[Mapping[str, str]] = {
    "protect": "protect",
    "limit_percent": "policies.reclaimed.budget.limit_percent",
    "reserve_percent": "policies.reclaimed.budget.harm.reserve_percent",
    "memory_reserve_percent": "headroom.memory.reserve_percent",
    "rules": "interference.rules",
}
"""The keys of a window, and the setting whose value each is while the window is in force."""
_PERCENT: Final = "in place of {}"


class WindowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time, and what is otherwise while it lasts. The mode is the same in every window."""

    name: Annotated[
        str,
        Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$", description="its name in events, metrics and reports"),
    ]
    when: Annotated[
        str,
        Meta(
            description=f"{window_time.FORM}; without a zone the node's",
            extra={"check": "reconciler.config.window_time:check_when"},
        ),
    ]
    protect: Annotated[Literal["cpu", "cpu+memory", "full"] | None, Meta(description="another level of protect")] = None
    limit_percent: Annotated[
        Annotated[int, Meta(ge=1, le=100)] | None, Meta(description=_PERCENT.format(SETTINGS["limit_percent"]))
    ] = None
    reserve_percent: Annotated[
        Annotated[int, Meta(ge=0, le=50)] | None, Meta(description=_PERCENT.format(SETTINGS["reserve_percent"]))
    ] = None
    memory_reserve_percent: Annotated[
        Annotated[int, Meta(ge=0, le=90)] | None, Meta(description=_PERCENT.format(SETTINGS["memory_reserve_percent"]))
    ] = None
    rules: Annotated[
        Mapping[str, RuleConfig], Meta(description="rules by name, key by key above those of interference.rules")
    ] = {}


def moved(index: int) -> Mapping[tuple[str | int, ...], str]:
    """Where the values of a window are written, and the settings that have them while it is in force."""
    return {("windows", index, key): setting for key, setting in SETTINGS.items()}


@final
class WindowTable:
    """The windows of a configuration in their zones."""

    def __init__(self, windows: Sequence[WindowConfig], root: str = "/", zone: str | None = None) -> None:
        """``zone``: of those without one; None: that of the node below ``root``.

        Errors: `ValueError` where a zone has no data.
        """
        self.names = tuple(window.name for window in windows)
        times = [parse_when(window.when) for window in windows]
        self._zoned = [ZonedTime(time, zone_of(time.zone or zone, root)) for time in times]

    def decide(self, at: float) -> Decision:
        """The window in force at an instant (seconds since the epoch), and the next change."""
        return window_time.decide(self._zoned, at)

    def name(self, index: int | None) -> str | None:
        """Of a window; None: no window is in force."""
        return None if index is None else self.names[index]

    def overlaps(self, at: float) -> Iterator[str]:
        """A line for each two windows that hold together at some moment of the weeks after ``at``."""
        for first, second in window_time.overlapping(self._zoned, at):
            yield f"windows {self.names[first]} and {self.names[second]} overlap: {self.names[first]} is in force then"
