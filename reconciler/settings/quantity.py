"""The one parser of numbers with a suffix: Kubernetes quantities, and the numbers that settings have with their units.

    100m   4Gi   1e3   0.5       a quantity: Kubernetes' suffixes and exponents
    200ms  2 h   500m  75%       a setting: the suffixes of its unit (`reconciler.settings.units`), no exponent

Binary floats never appear: ``0.1`` is one tenth. What must become a whole number of a resource is rounded up, as
Kubernetes does, so that a request is never understated.

Source: Kubernetes API conventions, "Quantities".
"""

import re
from fractions import Fraction
from typing import Final, NamedTuple

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
    return -(-value.numerator // value.denominator)
