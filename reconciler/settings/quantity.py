"""Kubernetes quantities: ``100m``, ``4Gi``, ``1e3``, ``0.5``, read exactly.

Binary floats never appear: ``0.1`` is one tenth. What must become a whole number is rounded up, as Kubernetes does, so
that a request is never understated.

Source: Kubernetes API conventions, "Quantities".
"""

import re
from fractions import Fraction
from typing import Final

_SHAPE: Final = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?", re.ASCII)

_SCALE: Final = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}

# No resource of a node has more digits; a longer text or a larger exponent is a mistake or an attack on our memory.
_LONGEST: Final = 64
_LARGEST_EXPONENT: Final = 30
_LARGEST_WHOLE: Final = 10**_LONGEST


def parse_quantity(text: str | int) -> Fraction:
    """The exact value of one quantity.

    Errors: `ValueError` that says what a quantity looks like.
    """
    if isinstance(text, int):
        if abs(text) >= _LARGEST_WHOLE:
            raise ValueError(f"a number of {text.bit_length()} bits is not a quantity such as 100m, 4Gi, 1e3 or 0.5")
        return Fraction(text)
    match = _SHAPE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text[:_LONGEST]!r} is not a quantity such as 100m, 4Gi, 1e3 or 0.5")
    sign, digits, suffix = match.groups()
    value = Fraction(digits) if sign != "-" else -Fraction(digits)
    if suffix is None:
        return value
    scale = _SCALE.get(suffix)
    if scale is None:
        exponent = int(suffix[1:])
        if abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError(f"{text!r} has an exponent beyond ±{_LARGEST_EXPONENT}")
        scale = Fraction(10) ** exponent
    return value * scale


def whole(text: str | int) -> int:
    """The value rounded up to a whole number: bytes, or thousandths where the resource counts them itself."""
    return _ceil(parse_quantity(text))


def milli(text: str | int) -> int:
    """The value in thousandths, rounded up. Units: ``"1"`` CPU is 1000."""
    return _ceil(parse_quantity(text) * 1000)


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
