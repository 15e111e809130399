"""What a trigger is: a pure function from the recent past to pressures, with what it chose to remember.

A new trigger is one file that ends in ``TRIGGER = Trigger(...)``, its section in `TriggersConfig`, and its name in
`table.py`. It says what is lacking, where, and how much; who goes for it, and whether anybody may, is decided
elsewhere. It does not look at who is leaving: what leaving pods hold is credited later, the same for all triggers.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import fields

from reconciler.responses.eviction.config import TriggerConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.signals.catalog import SIGNALS
from state.evidence import NODE
from state.model import PodClass

C = TypeVar("C", bound=TriggerConfig)
M = TypeVar("M", bound=Struct)

RECLAIMED: Final = (PodClass.RECLAIMED,)
EVERY: Final = (PodClass.RECLAIMED, PodClass.SHARED, PodClass.DEDICATED)


class Shortage(Struct, frozen=True, kw_only=True):
    """Something is lacking. ``subject``: where (`state.evidence`), and the place whose goods count.

    ``need``: how much has to come back, in the good's unit; None: that cannot be told, one pod goes and the effect is
    awaited. ``hard``: several may go in one pass. ``classes``: who may go for it, before ``eviction.classes``.
    ``only``: uids beyond which nobody may go; None: no such bound. ``least``: a pod that holds less is no candidate.
    ``named``: the trigger has chosen whom; how much the pod holds does not matter.
    """

    trigger: str
    good: EvictedResource
    evidence: str
    subject: str = NODE
    need: float | None = None
    least: float = 0.0
    hard: bool = False
    classes: tuple[PodClass, ...] = RECLAIMED
    only: frozenset[str] | None = None
    named: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it the same pressure as a pass before."""
        return self.trigger, self.subject, self.good, ",".join(sorted(self.only)) if self.named and self.only else ""


class TriggerResult(Struct, frozen=True, kw_only=True):
    """What a trigger says at one moment. ``words``: how it stands, for a person. ``known``: False where it is blind."""

    words: str
    pressures: tuple[Shortage, ...] = ()
    known: bool = True


class NoState(Struct, frozen=True):
    """The memory of a trigger that needs none."""


class DurationTracker(Struct, frozen=True):
    """Since when (monotonic seconds) something has been so without a break, by subject or uid."""

    at: Mapping[str, float] = {}

    def observe(self, now: float, present: Iterable[str]) -> "DurationTracker":
        """With ``present`` true now; all others are forgotten."""
        return DurationTracker({key: self.at.get(key, now) for key in present})

    def lasted(self, key: str, now: float) -> float | None:
        """For how long; None: it is not so."""
        return now - self.at[key] if key in self.at else None


class Trigger(Struct, Generic[C, M], frozen=True, kw_only=True):
    """One of them. ``signals``: what it reads. ``features``: Koordinator's names of the same, for a pod's own list."""

    name: str
    summary: str
    config_type: type[C]
    memory_type: type[M]
    signals: tuple[str, ...]
    judge: Callable[[C, EvictionContext, M | None], tuple[TriggerResult, M]]
    features: tuple[str, ...] = ()


# The table holds triggers of every config and memory type; each is called only with its own.
AnyTrigger = Trigger[Any, Any]


def not_measurable(*lacking: str) -> TriggerResult:
    """The reading where something is not measured."""
    return TriggerResult(words=f"unknown: {', '.join(lacking)} not measured", known=False)


def registered(section: type[Struct], triggers: Iterable[AnyTrigger], named: str) -> tuple[AnyTrigger, ...]:
    """The table, checked when it is imported. ``named``: the section of what rules name, which has no trigger.

    Errors: `ValueError` for a duplicate, a name that is no identifier, no summary, a signal that the catalog does not
    have, a config without defaults, and a name without its field in ``section`` or the other way round.
    """
    table = tuple(triggers)
    sections = {field.name: field.type for field in fields(section)}
    names = {named}
    for trigger in table:
        if not trigger.name.isidentifier() or not trigger.summary:
            raise ValueError(f"trigger {trigger.name!r}: needs a name that is an identifier, and a summary")
        if trigger.name in names:
            raise ValueError(f"trigger {trigger.name}: registered twice")
        names.add(trigger.name)
        if sections.get(trigger.name) is not trigger.config_type:
            raise ValueError(f"trigger {trigger.name}: {section.__name__} has no field of this name and config type")
        try:
            trigger.config_type()
        except TypeError as exc:
            raise ValueError(f"trigger {trigger.name}: its config needs a default for each field ({exc})") from exc
        missing = [signal for signal in trigger.signals if signal not in SIGNALS]
        if missing:
            raise ValueError(f"trigger {trigger.name}: no signal is named {missing[0]}")
    if lost := sections.keys() - names:
        raise ValueError(f"{section.__name__} has fields without a trigger: {', '.join(sorted(lost))}")
    return table
