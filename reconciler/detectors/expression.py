"""expression: anything that can be said of signals in one line, true for a while.

The language is in `formula`; what is unknown stays unknown. ``clear``, if given, is what must be true before all is
well again.

Source: Caelus' expressions over metrics. Where we differ: our own parser instead of a library that runs what is
written, everything is checked when the configuration is read, and a missing sample is not zero.
"""

from typing import Annotated, Final

from msgspec import Meta

from reconciler.detectors.base import Detector, Sight, unknown
from reconciler.detectors.formula import MAX_TEXT, FormulaError, parse
from reconciler.detectors.formula_tree import Node, Ref, refs
from reconciler.detectors.formula_value import degree, newest, truth
from reconciler.detectors.hold import Hold, Timing, paused, step
from reconciler.detectors.subjects import VICTIM, subject_of
from reconciler.detectors.windows import measured_s
from reconciler.detectors.words import number, resource_of, shown
from state.evidence import Opinion, Resource, Verdict

WHEN: Final = "cpu.wait > 5 and cpu.throttled < 1"
_TOLD: Final = 6
"""Signals named in the evidence."""


class ExpressionConfig(Timing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An expression over signals, and how long it must be true."""

    when: Annotated[str, Meta(description=f"what is bad, at most {MAX_TEXT} characters; docs/detectors.md")] = WHEN
    clear: Annotated[
        str, Meta(description="what must be true before all is well again; empty: that ``when`` is false")
    ] = ""
    resource: Annotated[
        Resource | None, Meta(description="what the victim lacks then; left out: told by the first signal's name")
    ] = None

    def __post_init__(self) -> None:
        for name, text in (("when", self.when), ("clear", self.clear)):
            if text or name == "when":
                try:
                    found = parse(text)
                except FormulaError as exc:
                    raise ValueError(f"{name}: {exc}") from exc
                if not any(True for _ in refs(found)):
                    raise ValueError(f"{name}: {text!r} names no signal: it is always the same")


def judge(config: ExpressionConfig, sight: Sight, memory: Hold | None) -> tuple[Opinion, Hold]:
    """Work out the expression."""
    tree = parse(config.when)
    bad = truth(tree, sight)
    named = tuple(dict.fromkeys(refs(tree)))
    told = ", ".join(_told(ref, sight) for ref in named[:_TOLD])
    if bad is None:
        lacking = [ref for ref in named if newest(ref, sight) is None]
        what = f"no fresh {_name(lacking[0])}" if lacking else f"it has no value yet: {config.when}"
        return unknown(f"{what} ({told})"), paused(memory, sight.now)
    cleared = not bad if not config.clear else bool(truth(parse(config.clear), sight))
    look_s = max(sight.patience_s(ref.signal) for ref in named)
    held = step(memory, _measured(named, sight), config, breached=bad, cleared=cleared, look_s=look_s)
    text = f"{told}; bad when {config.when}"
    if held.verdict is Verdict.SUSPECT and held.since_s is not None:
        text += f" ({number(held.at_s - held.since_s)} of {number(config.for_s)} s)"
    elif held.active and not bad:
        text += ", not clear yet"
    resource = config.resource or resource_of(named[0].signal)
    return Opinion(
        verdict=held.verdict,
        told=text,
        resource=resource,
        severity=degree(tree, sight),
        gap=sight.value("cpu.wait_milli") if bad and resource is Resource.CPU else None,
    ), held


def _measured(named: tuple[Ref, ...], sight: Sight) -> float:
    """When the oldest of what it was worked out from was measured."""
    known = [ref for ref in named if newest(ref, sight) is not None]
    return min((measured_s(sight, subject_of(sight, ref.where), ref.signal) for ref in known), default=sight.now)


def _name(ref: Ref) -> str:
    return ref.signal if ref.where == VICTIM else f"{ref.where}.{ref.signal}"


def _told(ref: Ref, sight: Sight) -> str:
    found = newest(ref, sight)
    where = "" if ref.where == VICTIM else f"{ref.where}."
    return f"{_name(ref)} unknown" if found is None else where + shown(ref.signal, found)


def _signals(config: ExpressionConfig) -> tuple[str, ...]:
    trees: list[Node] = [parse(text) for text in (config.when, config.clear) if text]
    return tuple(dict.fromkeys(ref.signal for tree in trees for ref in refs(tree)))


DETECTOR = Detector(
    name="expression",
    summary="an expression over signals is true for a while",
    config_type=ExpressionConfig,
    memory_type=Hold,
    signals=_signals,
    judge=judge,
)
