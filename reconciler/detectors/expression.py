"""expression: a condition over signals in one line, true for a while.

The language is in `formula`; what is unknown stays unknown. ``clear``, if given, is the condition that must be true
before the state is ok again. The value of an expression is a number, true, false, or unknown.

Unknown is propagated (Kleene): a comparison with it is unknown, but ``false and unknown`` is false and ``true or
unknown`` is true, because the unknown part could change nothing. What has no value (a division by zero) is unknown.

Source: Caelus' expressions over metrics. Differences: a parser of its own instead of a library that executes the text,
everything is checked when the configuration is read, and a missing sample is not zero.
"""

import math
from collections.abc import Callable
from typing import Annotated, Final

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.format import resource_of, shown
from reconciler.detectors.formula import (
    MAX_TEXT,
    Binary,
    Call,
    FormulaError,
    Node,
    Number,
    Over,
    Ref,
    Unary,
    parse,
    refs,
)
from reconciler.detectors.subjects import VICTIM, subject_of
from reconciler.detectors.threshold import severity
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.detectors.windows import measured, spacing_s
from reconciler.runtime.format import duration
from state.evidence import ContendedResource, DetectorVerdict, Verdict

_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}


def truth(node: Node, sight: VictimView) -> bool | None:
    """The worth of something true or false; None: unknown."""
    if isinstance(node, Unary):
        flag = truth(node.operand, sight)
        return None if flag is None else not flag
    assert isinstance(node, Binary)
    if node.operator in {"and", "or"}:
        # False decides an "and", True an "or", whatever the other operand.
        decisive = node.operator == "or"
        sides = (truth(node.left, sight), truth(node.right, sight))
        return decisive if decisive in sides else None if None in sides else not decisive
    left, right = value(node.left, sight), value(node.right, sight)
    return None if left is None or right is None else _COMPARE[node.operator](left, right)


def value(node: Node, sight: VictimView) -> float | None:
    """The worth of a number; None: unknown."""
    result: float | None
    match node:
        case Number():
            return node.value
        case Ref():
            return newest(node, sight)
        case Over():
            return _over(node, sight)
        case Unary():
            inner = value(node.operand, sight)
            result = None if inner is None else -inner
        case Call():
            known = [item for argument in node.arguments if (item := value(argument, sight)) is not None]
            if len(known) < len(node.arguments):
                return None
            result = abs(known[0]) if node.function == "abs" else min(known) if node.function == "min" else max(known)
        case Binary():
            result = _arithmetic(node.operator, value(node.left, sight), value(node.right, sight))
    return result if result is not None and math.isfinite(result) else None


def newest(ref: Ref, sight: VictimView) -> float | None:
    """The newest sample, if it is fresh."""
    subject = subject_of(sight, ref.where)
    return None if subject is None else sight.value(ref.signal, subject)


def degree(node: Node, sight: VictimView) -> float:
    """How far a truth value is beyond its limit, as `DetectorVerdict.severity`: 1.0 is just at it, unknown is 0.0."""
    if isinstance(node, Unary):
        flag = truth(node, sight)
        return float(bool(flag))
    assert isinstance(node, Binary)
    if node.operator in {"and", "or"}:
        sides = degree(node.left, sight), degree(node.right, sight)
        return min(sides) if node.operator == "and" else max(sides)
    left, right = value(node.left, sight), value(node.right, sight)
    if left is None or right is None:
        return 0.0
    if node.operator in {"==", "!="}:
        return float(_COMPARE[node.operator](left, right))
    return severity(left, right, 1 if node.operator.startswith(">") else -1)


def _over(node: Over, sight: VictimView) -> float | None:
    subject = subject_of(sight, node.ref.where)
    if newest(node.ref, sight) is None:
        return None
    if node.function == "rate":
        series = sight.history.series(subject, node.ref.signal) if subject is not None else None
        points = series.tail(sight.now - node.seconds) if series is not None else []
        span = points[-1][0] - points[0][0] if points else 0.0
        # The sample before the window may be old.
        least = node.seconds - spacing_s(sight, node.ref.signal)
        if span <= 0 or not least <= span <= node.seconds + sight.patience_s(node.ref.signal):
            return None
        return (points[-1][1] - points[0][1]) / span
    window = measured(sight, subject, node.ref.signal, node.seconds)
    if window is None:
        return None
    return {"avg": window.mean, "min": window.low, "max": window.high}[node.function]


def _arithmetic(operator: str, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            return left / right if right else None


WHEN: Final = "cpu.wait > 5 and cpu.throttled < 1"
_TOLD: Final = 6
"""Signals named in the evidence."""


class ExpressionConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An expression over signals, and how long it must be true."""

    when: Annotated[str, Meta(description=f"bad condition, at most {MAX_TEXT} characters; docs/detectors.md")] = WHEN
    clear: Annotated[str, Meta(description="condition that clears it; empty: ``when`` is false")] = ""
    resource: Annotated[
        ContendedResource | None,
        Meta(description="the contended resource; omitted: derived from the first signal's name"),
    ] = None

    def __post_init__(self) -> None:
        for name, text in (("when", self.when), ("clear", self.clear)):
            if text or name == "when":
                try:
                    result = parse(text)
                except FormulaError as exc:
                    raise ValueError(f"{name}: {exc}") from exc
                if not any(True for _ in refs(result)):
                    raise ValueError(f"{name}: {text!r} contains no signal")


def evaluate(
    config: ExpressionConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    """Work out the expression."""
    tree = parse(config.when)
    bad = truth(tree, sight)
    named = tuple(dict.fromkeys(refs(tree)))
    message = ", ".join(_evidence(ref, sight) for ref in named[:_TOLD])
    if bad is None:
        lacking = [ref for ref in named if newest(ref, sight) is None]
        what = f"{_name(lacking[0])} not available" if lacking else f"no value yet: {config.when}"
        return unknown(f"{what} ({message})"), paused(memory, sight.now)
    cleared = not bad if not config.clear else bool(truth(parse(config.clear), sight))
    look_s = max(sight.patience_s(ref.signal) for ref in named)
    held = step(memory, _measured(named, sight), config, breached=bad, cleared=cleared, look_s=look_s)
    text = f"{message}; bad when {config.when}"
    if held.verdict is Verdict.SUSPECT and held.since_s is not None:
        text += f" ({duration(held.at_s - held.since_s)} of {duration(config.for_s)})"
    elif held.active and not bad:
        text += ", not cleared yet"
    resource = config.resource or resource_of(named[0].signal)
    return DetectorVerdict(
        verdict=held.verdict,
        text=text,
        resource=resource,
        severity=degree(tree, sight),
        gap=sight.value("cpu.wait_milli") if bad and resource is ContendedResource.CPU else None,
    ), held


def _measured(named: tuple[Ref, ...], sight: VictimView) -> float:
    """When the oldest of what it was worked out from was measured."""
    known = [ref for ref in named if newest(ref, sight) is not None]
    return min((sight.measured_at(ref.signal, subject_of(sight, ref.where)) for ref in known), default=sight.now)


def _name(ref: Ref) -> str:
    return ref.signal if ref.where == VICTIM else f"{ref.where}.{ref.signal}"


def _evidence(ref: Ref, sight: VictimView) -> str:
    result = newest(ref, sight)
    where = "" if ref.where == VICTIM else f"{ref.where}."
    return f"{_name(ref)} unknown" if result is None else where + shown(ref.signal, result)


def _signals(config: ExpressionConfig) -> tuple[str, ...]:
    trees: list[Node] = [parse(text) for text in (config.when, config.clear) if text]
    return tuple(dict.fromkeys(ref.signal for tree in trees for ref in refs(tree)))


DETECTOR = Detector(
    name="expression",
    summary="an expression over signals is true for a while",
    config_type=ExpressionConfig,
    memory_type=DebounceState,
    signals=_signals,
    judge=evaluate,
)
