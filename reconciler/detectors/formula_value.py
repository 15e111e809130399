"""What an expression is worth now: a number, true, false, or unknown.

Unknown is carried on (Kleene): whatever is compared with it is unknown, but ``false and unknown`` is false and ``true
or unknown`` is true, because the unknown part could change nothing. What has no value (a division by zero) is unknown.
"""

import math
from collections.abc import Callable
from typing import Final

from reconciler.detectors.base import Sight
from reconciler.detectors.formula_tree import Binary, Call, Node, Number, Over, Ref, Unary
from reconciler.detectors.subjects import subject_of
from reconciler.detectors.threshold import severity
from reconciler.detectors.windows import seen, spacing_s

_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}


def truth(node: Node, sight: Sight) -> bool | None:
    """The worth of something true or false; None: unknown."""
    if isinstance(node, Unary):
        found = truth(node.operand, sight)
        return None if found is None else not found
    assert isinstance(node, Binary)
    if node.operator in {"and", "or"}:
        # False decides an "and", True an "or", whatever the other side is.
        decisive = node.operator == "or"
        sides = (truth(node.left, sight), truth(node.right, sight))
        return decisive if decisive in sides else None if None in sides else not decisive
    left, right = value(node.left, sight), value(node.right, sight)
    return None if left is None or right is None else _COMPARE[node.operator](left, right)


def value(node: Node, sight: Sight) -> float | None:
    """The worth of a number; None: unknown."""
    found: float | None
    match node:
        case Number():
            return node.value
        case Ref():
            return newest(node, sight)
        case Over():
            return _over(node, sight)
        case Unary():
            inner = value(node.operand, sight)
            found = None if inner is None else -inner
        case Call():
            known = [one for argument in node.arguments if (one := value(argument, sight)) is not None]
            if len(known) < len(node.arguments):
                return None
            found = abs(known[0]) if node.function == "abs" else min(known) if node.function == "min" else max(known)
        case Binary():
            found = _arithmetic(node.operator, value(node.left, sight), value(node.right, sight))
    return found if found is not None and math.isfinite(found) else None


def newest(ref: Ref, sight: Sight) -> float | None:
    """The newest sample, if it is fresh."""
    subject = subject_of(sight, ref.where)
    return None if subject is None else sight.value(ref.signal, subject)


def degree(node: Node, sight: Sight) -> float:
    """How far a true or false thing is beyond its limit, as `Opinion.severity`: 1.0 is just at it, unknown is 0.0."""
    if isinstance(node, Unary):
        found = truth(node, sight)
        return float(bool(found))
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


def _over(node: Over, sight: Sight) -> float | None:
    subject = subject_of(sight, node.ref.where)
    if newest(node.ref, sight) is None:
        return None
    if node.function == "rate":
        series = sight.history.series(subject, node.ref.signal) if subject is not None else None
        points = series.tail(sight.now - node.seconds) if series is not None else []
        span = points[-1][0] - points[0][0] if points else 0.0
        # The sample before the window may be long gone by.
        least = node.seconds - spacing_s(sight, node.ref.signal)
        if span <= 0 or not least <= span <= node.seconds + sight.patience_s(node.ref.signal):
            return None
        return (points[-1][1] - points[0][1]) / span
    window = seen(sight, subject, node.ref.signal, node.seconds)
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
