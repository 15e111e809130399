"""The tree of an expression over signals: what it is made of, which signals it names, and its text."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Final

from msgspec import Struct

from reconciler.detectors.subjects import VICTIM

COMPARISONS: Final = ("<", "<=", ">", ">=", "==", "!=")

# How tightly an operator binds; a comparison takes no other beside it.
OR, AND, NOT, COMPARE, SUM, PRODUCT, MINUS = range(1, 8)
BINDING: Final = {
    "or": OR,
    "and": AND,
    **dict.fromkeys(COMPARISONS, COMPARE),
    **dict.fromkeys("+-", SUM),
    **dict.fromkeys("*/", PRODUCT),
}


class Number(Struct, frozen=True):
    """A number as it was meant: ``2Ki`` is 2048."""

    value: float


class Ref(Struct, frozen=True):
    """The newest sample of a signal; ``where`` as in `reconciler.detectors.subjects`."""

    where: str
    signal: str


class Over(Struct, frozen=True):
    """A signal over the last ``seconds``."""

    function: str
    ref: Ref
    seconds: float


class Unary(Struct, frozen=True):
    """``-x`` or ``not x``."""

    operator: str
    operand: "Node"


class Binary(Struct, frozen=True):
    """Arithmetic, a comparison, ``and`` or ``or``."""

    operator: str
    left: "Node"
    right: "Node"


class Call(Struct, frozen=True):
    """``min``, ``max`` or ``abs`` of numbers."""

    function: str
    arguments: "tuple[Node, ...]"


Node = Number | Ref | Over | Unary | Binary | Call


def refs(node: Node) -> Iterator[Ref]:
    """Every signal in it, from left to right."""
    match node:
        case Ref():
            yield node
        case Over():
            yield node.ref
        case Unary():
            yield from refs(node.operand)
        case Binary():
            yield from refs(node.left)
            yield from refs(node.right)
        case Call():
            for argument in node.arguments:
                yield from refs(argument)
        case Number():
            pass


def render(node: Node, around: int = 0) -> str:
    """The text of a tree, which reads back as the same. ``around``: how tightly what stands around it binds."""
    match node:
        case Number():
            # No exponent, which the language does not have.
            return f"{Decimal(repr(node.value)):f}"
        case Ref():
            return node.signal if node.where == VICTIM else f"{node.where}.{node.signal}"
        case Over():
            return f"{node.function}({render(node.ref)}, {Decimal(repr(node.seconds)):f}s)"
        case Call():
            return f"{node.function}({', '.join(render(argument) for argument in node.arguments)})"
        case Unary():
            own = NOT if node.operator == "not" else MINUS
            text = f"{node.operator}{' ' if own == NOT else ''}{render(node.operand, own)}"
        case Binary():
            own = BINDING[node.operator]
            # To the left the same operator groups by itself; a comparison groups with none.
            left = render(node.left, own + (own == COMPARE))
            text = f"{left} {node.operator} {render(node.right, own + 1)}"
    return f"({text})" if own < around else text


def is_truth(node: Node) -> bool:
    """True for what is true or false, False for a number."""
    if isinstance(node, Unary | Binary):
        return node.operator in {"not", "and", "or", *COMPARISONS}
    return False
