"""Numbers with a unit as people write them: ``200ms``, ``4Gi``, ``500m``, ``75%``, and back into the same text.

A setting's name ends in its unit (``resync_s``, ``floor_milli``, ``limit_bytes``), and a bare number is in that unit,
so that no value ever means two things.

    100m   4Gi   1e3   0.5       a Kubernetes quantity: its suffixes and exponents
    200ms  2 h   500m  75%       a setting: the suffixes of its unit, no exponent

Values are exact fractions until the last step: ``0.1`` is one tenth.

Source: Kubernetes API conventions, "Quantities".
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from msgspec import Struct

_SHAPE: Final = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)( ?)(?:([eE][+-]?\d+)|([A-Za-z%]*))", re.ASCII)

SCALE: Final = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "Ki": Fraction(2**10),
    "M": Fraction(10**6),
    "Mi": Fraction(2**20),
    "G": Fraction(10**9),
    "Gi": Fraction(2**30),
    "T": Fraction(10**12),
    "Ti": Fraction(2**40),
    "P": Fraction(10**15),
    "Pi": Fraction(2**50),
    "E": Fraction(10**18),
    "Ei": Fraction(2**60),
}
"""Kubernetes' suffixes, by size."""

# No resource of a node has more digits; a longer text or a larger exponent is a mistake or an attack on our memory.
_LONGEST: Final = 64
_LARGEST_EXPONENT: Final = 30
_LARGEST_WHOLE: Final = 10**_LONGEST


class ParsedNumber(NamedTuple):
    """A number as written: its exact ``value`` without suffix and exponent, and these two as text.

    ``digits`` is the part before them, without a sign; ``spaced``: a space is between.
    """

    value: Fraction
    digits: str
    suffix: str
    exponent: str
    spaced: bool


def split_number(text: str) -> ParsedNumber | None:
    """The parts of a number with a suffix; None for any other text, and for one of more than 64 characters."""
    match = _SHAPE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return None
    sign, digits, space, exponent, suffix = match.groups()
    value = Fraction(digits)
    return ParsedNumber(-value if sign == "-" else value, digits, suffix or "", exponent or "", bool(space))


def parse_quantity(text: str | int) -> Fraction:
    """The exact value of one quantity.

    Errors: `ValueError` that describes the form of a quantity.
    """
    if isinstance(text, int):
        if abs(text) >= _LARGEST_WHOLE:
            raise ValueError(f"a number of {text.bit_length()} bits is not a quantity such as 100m, 4Gi, 1e3 or 0.5")
        return Fraction(text)
    number = split_number(text)
    if number is None or number.spaced or (number.suffix and number.suffix not in SCALE):
        raise ValueError(f"{text[:_LONGEST]!r} is not a quantity such as 100m, 4Gi, 1e3 or 0.5")
    if number.exponent:
        exponent = int(number.exponent[1:])
        if abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError(f"{text!r} has an exponent beyond ±{_LARGEST_EXPONENT}")
        return number.value * Fraction(10) ** exponent
    return number.value * SCALE[number.suffix] if number.suffix else number.value


def whole(text: str | int) -> int:
    """The value rounded up to a whole number: bytes, or thousandths where the resource counts them itself."""
    return _ceil(parse_quantity(text))


def milli(text: str | int) -> int:
    """The value in thousandths, rounded up. Units: ``"1"`` CPU is 1000."""
    return _ceil(parse_quantity(text) * 1000)


def _ceil(value: Fraction) -> int:
    # Up, as Kubernetes does: a request is never understated.
    return -(-value.numerator // value.denominator)


_MAX_TEXT: Final = 40
"""A longer text is not an intended number; the bound also keeps the arithmetic small."""


class Unit(Struct, frozen=True, kw_only=True):
    """One kind of number. ``factors`` maps each spelling to how many of the base it is, smallest first."""

    base: str
    noun: str
    example: str
    factors: Mapping[str, Decimal]


def _unit(base: str, noun: str, example: str, **factors: str) -> Unit:
    return Unit(base=base, noun=noun, example=example, factors={name: Decimal(of) for name, of in factors.items()})


_TIME: Final = {"us": "0.000001", "ms": "0.001", "s": "1", "m": "60", "h": "3600", "d": "86400"}


def _time(base: str) -> Unit:
    per = Decimal(_TIME[base])
    factors = {name: Decimal(of) / per for name, of in _TIME.items()}
    return Unit(base=base, noun="a duration", example="200ms, 10s or 5m", factors=factors)


SECONDS: Final = _time("s")
MILLISECONDS: Final = _time("ms")
MICROSECONDS: Final = _time("us")
BYTES: Final = _unit(
    "bytes",
    "a size",
    "512Mi or 4Gi",
    B="1",
    **{name: str(SCALE[name]) for name in ("k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti")},
)
MILLI: Final = _unit("m", "an amount of CPU", "500m or 2cpu", m="1", cpu="1000", cpus="1000")
PERCENT: Final = Unit(base="%", noun="a percentage", example="75%", factors={"%": Decimal(1)})
RATIO: Final = Unit(base="", noun="a share", example="75% or 0.75", factors={"%": Decimal("0.01")})

# The end of a setting's name is its unit (house style: names include the unit).
_BY_SUFFIX: Final[Mapping[str, Unit]] = {
    "_s": SECONDS,
    "_ms": MILLISECONDS,
    "_us": MICROSECONDS,
    "_bytes": BYTES,
    "_bps": BYTES,
    "_milli": MILLI,
    "_percent": PERCENT,
    "_ratio": RATIO,
    "_fraction": RATIO,
}


def unit_of(name: str) -> Unit | None:
    """The unit that a setting's name ends in; None for a plain number."""
    return next((unit for suffix, unit in _BY_SUFFIX.items() if name.endswith(suffix)), None)


def expected(unit: Unit | None, *, whole: bool) -> str:
    """What a person should have written: ``a duration such as 200ms, 10s or 5m``."""
    if unit is None:
        return "a whole number" if whole else "a number"
    return f"{unit.noun} such as {unit.example}"


def parse_number(text: str, unit: Unit | None, *, whole: bool) -> int | float:
    """Read ``text`` in ``unit``; ``whole`` asks for an int of the base (``1.5Ki`` is 1536 bytes, ``0.5B`` is refused).

    Errors: `ValueError` with what was expected and got.
    """
    want = f"expected {expected(unit, whole=whole)}"
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    number = split_number(text) if len(text) <= _MAX_TEXT else None
    if number is None or number.exponent or not (number.digits[0].isdigit() and number.digits[-1].isdigit()):
        raise ValueError(f"{want}; got {shown!r}")
    integer, name = number.digits.partition(".")[0], number.suffix
    if len(integer) > 1 and integer.startswith("0"):
        # YAML 1.1 reads 010 as 8, YAML 1.2 as 10: either may have been meant.
        raise ValueError(f"{want}; got {text!r}, whose leading zero reads as octal to some: leave it out")
    value = number.value
    if name:
        factors = unit.factors if unit is not None else {}
        if name not in factors:
            known = f"known here: {', '.join(factors)}" if factors else "it has none"
            raise ValueError(f"{want}; got {text!r}: unknown unit {name!r} ({known})")
        value *= Fraction(factors[name])
    if not whole:
        return float(value)
    if value.denominator != 1:
        base = f" of {unit.base}" if unit is not None and unit.base else ""
        raise ValueError(f"{want}; got {text!r}, which is not a whole number{base}")
    return int(value)


def format_number(value: float, unit: Unit | None) -> str:
    """The shortest exact words for ``value``: 0.2 s is ``200ms``, 4294967296 bytes are ``4Gi``; reads back the same."""
    exact = Decimal(repr(value))
    if unit is None or not exact or unit is RATIO:
        return _plain(exact) + (unit.base if unit is not None and unit is not RATIO and unit.base != "bytes" else "")
    whole: list[str] = []
    broken: list[str] = []
    for name, factor in unit.factors.items():
        scaled = exact / factor
        if scaled * factor == exact:
            message = _plain(scaled)
            (broken if "." in message else whole).append(f"{message}{name}")
    # 200ms before 0.2s; of the whole numbers the shortest, and of those the number in the largest unit (90s, but 1h).
    return min(reversed(whole or broken), key=len, default=_plain(exact))


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
