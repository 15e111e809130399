"""The interface of a trigger: a pure function from recent samples and its own memory to shortages.

A new trigger is one file that ends in ``TRIGGER = Trigger(...)``, its section in `TriggersConfig`, and one row in
`triggers.table`. It reports what is lacking, where, and how much; which pod is evicted for it, and whether one may
be, is decided elsewhere. It does not consider pods that are ending: their use is credited later, for all triggers
alike.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from reconciler.responses.eviction.config import TriggerConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.signals.catalog import SIGNALS
from state.evidence import NODE
from state.model import PodClass

C = TypeVar("C", bound=TriggerConfig)
M = TypeVar("M")

RECLAIMED: Final = (PodClass.RECLAIMED,)
EVERY: Final = (PodClass.RECLAIMED, PodClass.SHARED, PodClass.DEDICATED)


class Shortage(Struct, frozen=True, kw_only=True):
    """A shortage of a resource. ``subject``: where (`state.evidence`), and the place whose resources count.

    ``need``: how much has to be released, in the resource's unit; None: unknown, one pod is evicted and the effect is
    awaited. ``hard``: several may be evicted in one pass. ``classes``: which classes may be evicted for it, before
    ``eviction.classes``. ``only``: the only uids that may be evicted; None: no such bound. ``least``: a pod that uses
    less is no candidate. ``named``: the trigger has chosen the pods; how much they use does not matter. ``critical``:
    measured now: without an eviction the kernel or the kubelet kills pods, in an order that spares no online pod. Only
    then a BE pod is ended although its disruption budget could not be asked.
    """

    trigger: str
    good: EvictedResource
    evidence: str
    subject: str = NODE
    need: float | None = None
    least: float = 0.0
    hard: bool = False
    critical: bool = False
    classes: tuple[PodClass, ...] = RECLAIMED
    only: frozenset[str] | None = None
    named: bool = False


class TriggerResult(Struct, frozen=True, kw_only=True):
    """Result of a trigger at one moment. ``words``: its state, as text for people.

    ``known``: False without readings.
    """

    words: str
    pressures: tuple[Shortage, ...] = ()
    known: bool = True


Judged = tuple[TriggerResult, Mapping[str, M]]
Since = Mapping[str, float]


def since_when(before: Since, present: Iterable[str], now: float) -> Since:
    """Since when (monotonic seconds) each of ``present`` has been so without a break; all others are forgotten."""
    return {key: before.get(key, now) for key in present}


class Trigger(Struct, Generic[C, M], frozen=True, kw_only=True):
    """One of them. ``signals``: what it reads. ``features``: Koordinator's names of the same, for a pod's own list.

    ``judge``: gets back what it has returned at the pass before, by uid or place; empty at first.
    ``closes``: further BE pods would make the shortage worse, so the node is closed to them meanwhile.
    """

    name: str
    summary: str
    config_type: type[C]
    signals: tuple[str, ...]
    judge: Callable[[C, EvictionContext, Mapping[str, M]], Judged[M]]
    features: tuple[str, ...] = ()
    closes: bool = True


# The table holds triggers of every config and memory type; each is called only with its own.
AnyTrigger = Trigger[Any, Any]


def not_measurable(*lacking: str) -> TriggerResult:
    """The reading where something is not measured."""
    return TriggerResult(words=f"unknown: {', '.join(lacking)} not measured", known=False)


def check_trigger(trigger: AnyTrigger, sections: Mapping[str, Any]) -> None:
    """What a row of the table must have. ``sections``: the config types of `TriggersConfig` by name.

    Errors: `ValueError` for no summary, a config type that is not its section's or lacks a default, and a signal that
    the catalog does not have.
    """
    if not trigger.summary:
        raise ValueError("needs a summary")
    if sections.get(trigger.name) is not trigger.config_type:
        raise ValueError("the configuration has no section of this name and config type")
    try:
        trigger.config_type()
    except TypeError as exc:
        raise ValueError(f"its config needs a default for each field ({exc})") from exc
    missing = [signal for signal in trigger.signals if signal not in SIGNALS]
    if missing:
        raise ValueError(f"unknown signal {missing[0]}")


def check_sections(names: Collection[str], sections: Collection[str], named: str) -> None:
    """Errors: `ValueError` unless every trigger has a section, and every section but ``named`` a trigger.

    ``named``: the section of what rules name, which has no trigger.
    """
    if different := {*names, named} ^ set(sections):
        raise ValueError(f"triggers and sections differ: {', '.join(sorted(different))}")
