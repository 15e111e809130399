"""The language of expressions over signals: text to a checked tree.

Example: ``avg(cpu.wait, 30s) > 5 and cpu.throttled < 1 or node.memory.available < 2Gi``

A name is a signal of the victim; a prefix ``pod.`` (the victim), ``node.``, ``pool.``, ``numa:0.`` or ``fs:nodefs.``
gives its subject. Numbers may have a size (``2Gi``) or ``%``, which changes nothing; they are in the signal's unit.
Arithmetic, one comparison at a time, ``and``, ``or``, ``not``; ``min``, ``max`` and ``abs`` of numbers; ``avg``,
``min``, ``max`` of a signal over a time, and ``rate``, its change each second.

Everything is checked when it is read: signals, their subjects, numbers against truth values, length and depth. The tree
has its parts and the signals that it names.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn, final

from msgspec import Struct

from reconciler.detectors.subjects import VICTIM, known_signal, whose
from reconciler.settings import units
from reconciler.signals.catalog import SIGNALS

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
    """A number with its unit applied: ``2Ki`` is 2048."""

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


def is_truth(node: Node) -> bool:
    """True for what is true or false, False for a number."""
    if isinstance(node, Unary | Binary):
        return node.operator in {"not", "and", "or", *COMPARISONS}
    return False


MAX_TEXT: Final = 500
MAX_DEPTH: Final = 20
WINDOWED: Final = ("avg", "min", "max", "rate")
PLAIN: Final = ("min", "max", "abs")


class FormulaError(ValueError):
    """The text is not an expression. ``column`` counts from 1 within it; the message begins with it."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(f"column {column}: {message}")
        self.column = column


class _Token(NamedTuple):
    kind: str
    text: str
    column: int

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


_TOKENS: Final = re.compile(
    r"(?P<blank>\s+)"
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)[A-Za-z%]*)"
    r"|(?P<name>(?:(?:numa:\d+|fs:[A-Za-z0-9_-]+)\.)?[A-Za-z_]\w*(?:\.\w+)*)"
    r"|(?P<sign><=|>=|==|!=|[-+*/<>(),])",
    re.ASCII,
)
_PLACE: Final = re.compile(r"(pod|node|pool|numa:\d+|fs:[A-Za-z0-9_-]+)\.(.+)", re.ASCII)


@lru_cache(maxsize=256)
def parse(text: str) -> Node:
    """Read an expression that is true or false. Errors: `FormulaError`."""
    if len(text) > MAX_TEXT:
        raise FormulaError(MAX_TEXT + 1, f"an expression has at most {MAX_TEXT} characters; this one has {len(text)}")
    return _Parser(text).whole()


@final
class _Parser:
    """Top-down operator precedence (Pratt)."""

    def __init__(self, text: str) -> None:
        self._tokens = tuple(_tokens(text))
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        column = self._next.column
        node = self._expression(0)
        if self._next.kind != "end":
            self._refuse(self._next, "expected an operator or the end")
        if not is_truth(node):
            raise FormulaError(column, "is a number; expected something true or false, such as a comparison")
        return node

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _refuse(self, token: _Token, expected: str) -> NoReturn:
        raise FormulaError(token.column, f"{expected}; got {token.shown}")

    def _expect(self, sign: str) -> None:
        if self._next.text != sign or self._next.kind != "sign":
            self._refuse(self._next, f"expected {sign!r}")
        self._at += 1

    def _expression(self, around: int) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise FormulaError(self._next.column, f"nested deeper than {MAX_DEPTH}")
        start = self._next
        left = self._prefix()
        while (binding := BINDING.get(self._next.text, 0)) > around:
            sign = self._take()
            truth = sign.text in {"and", "or"}
            if binding == COMPARE and isinstance(left, Binary) and left.operator in COMPARISONS:
                raise FormulaError(sign.column, "one comparison at a time; join two with 'and'")
            right_start = self._next
            right = self._expression(binding)
            _typed(left, start, truth, sign)
            _typed(right, right_start, truth, sign)
            left = Binary(sign.text, left, right)
        self._depth -= 1
        return left

    def _prefix(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return Number(_number(token))
        if token.text == "(":
            node = self._expression(0)
            self._expect(")")
            return node
        if token.text in {"-", "not"}:
            start = self._next
            operand = self._expression(NOT if token.text == "not" else MINUS)
            _typed(operand, start, token.text == "not", token)
            return Unary(token.text, operand)
        if token.kind != "name" or token.text in {"and", "or"}:
            self._refuse(token, "expected a signal, a number or '('")
        return self._call(token) if self._next.text == "(" else _ref(token)

    def _call(self, name: _Token) -> Node:
        if name.text not in {*WINDOWED, *PLAIN}:
            raise FormulaError(name.column, f"no function is named {name.text!r}; known: avg, rate, min, max, abs")
        self._expect("(")
        starts = [self._next]
        arguments = [self._expression(0)]
        while self._next.text == ",":
            self._at += 1
            starts.append(self._next)
            if (seconds := _seconds(self._next)) is not None and name.text in WINDOWED:
                self._at += 1
                self._expect(")")
                if len(arguments) > 1 or not isinstance(arguments[0], Ref):
                    raise FormulaError(starts[0].column, f"{name.text} over a time takes one signal before the time")
                return Over(name.text, arguments[0], seconds)
            arguments.append(self._expression(0))
        self._expect(")")
        if name.text not in PLAIN:
            raise FormulaError(name.column, f"{name.text} needs a time, such as {name.text}(cpu.use, 30s)")
        if (name.text == "abs") is not (len(arguments) == 1):
            want = "one number" if name.text == "abs" else "several numbers, or a signal and a time"
            raise FormulaError(name.column, f"{name.text} takes {want}")
        for argument, start in zip(arguments, starts, strict=True):
            _typed(argument, start, False, name)
        return Call(name.text, tuple(arguments))


def _typed(node: Node, start: _Token, truth: bool, sign: _Token) -> None:
    if is_truth(node) is not truth:
        want = "something true or false" if truth else "a number"
        raise FormulaError(start.column, f"expected {want} beside {sign.text!r}")


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise FormulaError(at + 1, f"unexpected {text[at]!r}")
        if match.lastgroup != "blank":
            yield _Token(match.lastgroup or "", match[0], at + 1)
        at = match.end()
    yield _Token("end", "", len(text) + 1)


_SIZE: Final = re.compile(r"([0-9.]+)(%|[kMGT]|[KMGT]i)?", re.ASCII)
_TIME: Final = re.compile(r"([0-9.]+)(ms|s|m|h)", re.ASCII)
_MAX_SECONDS: Final = 600.0


def _number(token: _Token) -> float:
    match = _SIZE.fullmatch(token.text)
    if match is None:
        time = _TIME.fullmatch(token.text)
        known = "known: %, k, Ki, M, Mi, G, Gi, T, Ti"
        why = "a time is allowed only after a signal, as in avg(cpu.use, 30s)" if time else known
        raise FormulaError(token.column, f"{token.text!r} is not a number; {why}")
    factor = units.BYTES.factors.get(match[2] or "", Decimal(1))
    return float(Decimal(match[1]) * factor)


def _seconds(token: _Token) -> float | None:
    match = _TIME.fullmatch(token.text) if token.kind == "number" else None
    if match is None:
        return None
    seconds = float(Decimal(match[1]) * units.SECONDS.factors[match[2]])
    if not 0 < seconds <= _MAX_SECONDS:
        raise FormulaError(token.column, f"expected a time above 0, up to 10m; got {token.text!r}")
    return seconds


def _ref(token: _Token) -> Ref:
    place = _PLACE.fullmatch(token.text)
    # "pool.cpus" is a signal by itself: a name in the catalog is not read as a subject and a signal.
    where, signal = (None, token.text) if place is None or token.text in SIGNALS else (place[1], place[2])
    try:
        of = SIGNALS[known_signal(signal)].of
        text = whose(signal, VICTIM if where == "pod" else where)
    except ValueError as exc:
        raise FormulaError(token.column, str(exc)) from exc
    if where == "pod" and "pod" not in of:
        raise FormulaError(token.column, f"{signal} is not measured of pods")
    return Ref(text, signal)
