"""What every kind of probe has in common: one measurement of one target at a time, and the number in its answer."""

import math
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from cgroupfs.bounded import decoded, digits

_LONGEST_SHOWN: Final = 80
_DEEPEST: Final = 64


class ProbeResult(NamedTuple):
    """Result of one measurement. ``ms`` None: no event that could be measured; that is not a failure."""

    ms: float | None
    confidence: float = 1.0


class ProbeSource(Protocol):
    """One target, measured repeatedly."""

    async def measure(self) -> ProbeResult:
        """Measure once, within the probe's own time. Errors: `SourceError`, whose text is for people."""

    async def aclose(self) -> None:
        """Give back what is kept between measurements."""


def number_in(body: bytes, field: str | None) -> float:
    """The number that a body is, or that is at ``field`` (``latency.p99``, ``0.value``) of its JSON.

    Errors: `ValueError` with a text for people; also for a number that cannot be a time (negative, infinite).
    """
    result: Any  # untrusted JSON
    if field is None:
        result = body.decode(errors="replace").strip()
    else:
        try:
            result = decoded(msgspec.json.decode, body, deepest=_DEEPEST)
        except ValueError as exc:
            raise ValueError(f"expected JSON; got {_shown(body.decode(errors='replace'))}") from exc
        for key in field.split("."):
            result = _inside(result, key, field)
    if isinstance(result, bool) or not isinstance(result, str | int | float):
        # Not what it holds: thousands of levels cannot be shown.
        what = (
            "a JSON object" if isinstance(result, dict) else "a JSON array" if isinstance(result, list) else str(result)
        )
        raise ValueError(f"expected a number{_at(field)}; got {_shown(what)}")  # noqa: TRY004  # bad input
    try:
        value = float(result)
    except (ValueError, OverflowError) as exc:
        raise ValueError(f"expected a number{_at(field)}; got {_shown(str(result))}") from exc
    if not math.isfinite(value) or value < 0 or (isinstance(result, str) and "_" in result):
        raise ValueError(f"expected a time{_at(field)}; got {_shown(str(result))}")
    return value


def _inside(result: Any, key: str, field: str) -> Any:
    if isinstance(result, dict) and key in result:
        return result[key]
    if isinstance(result, list) and (at := digits(key)) is not None and at < len(result):
        return result[at]
    raise ValueError(f"no {field!r} in the JSON: {key!r} is missing")


def _at(field: str | None) -> str:
    return "" if field is None else f" at {field!r}"


def _shown(text: str) -> str:
    message = " ".join(text.split())
    return (
        repr(message if len(message) <= _LONGEST_SHOWN else f"{message[: _LONGEST_SHOWN - 3]}...")
        if message
        else "nothing"
    )
