"""Numbers of signals in words, for evidence and reasons: `7.2 %`, `340 milli-CPU`, `1.5 GiB/s`."""

from typing import Final

from reconciler.signals.catalog import SIGNALS
from state.evidence import ContendedResource

_STEPS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

_RESOURCES: Final = (
    ("memory.bandwidth", ContendedResource.CACHE),
    ("be.memory", ContendedResource.MEMORY),
    ("llc.", ContendedResource.CACHE),
    ("cpi", ContendedResource.CACHE),
    ("memory.", ContendedResource.MEMORY),
    ("swap.", ContendedResource.MEMORY),
    ("oom.", ContendedResource.MEMORY),
    ("io.", ContendedResource.IO),
    ("disk.", ContendedResource.IO),
    ("fs.", ContendedResource.IO),
    ("net.", ContendedResource.NETWORK),
)

_GAPS: Final = {ContendedResource.CPU: "milli-CPU", ContendedResource.MEMORY: "bytes", ContendedResource.IO: "bytes/s"}


def number(value: float) -> str:
    """Three digits that mean something, no exponent: ``0.123``, ``7.2``, ``1234``."""
    if value != value or value in {float("inf"), float("-inf")}:  # noqa: PLR0124  # NaN alone differs from itself
        return str(value)
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:.{places}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def amount(value: float, unit: str) -> str:
    """A number with its unit; bytes in the largest unit that leaves at least one."""
    if unit.startswith("bytes"):
        tail = unit.removeprefix("bytes")
        for name, factor in _STEPS:
            if abs(value) >= factor:
                return f"{number(value / factor)} {name}{tail}"
        return f"{number(value)} B{tail}"
    if unit in {"ratio", "count"}:
        return number(value)
    return f"{number(value)} {'%' if unit == 'percent' else unit}"


def shown(signal: str, value: float) -> str:
    """``cpu.wait 7.2 %``."""
    return f"{signal} {amount(value, SIGNALS[signal].unit)}"


def resource_of(signal: str) -> ContendedResource:
    """What a victim lacks when this signal is bad: CPU where the name tells nothing else."""
    return next((resource for start, resource in _RESOURCES if signal.startswith(start)), ContendedResource.CPU)


def gap_of(resource: ContendedResource, signal: str, beyond: float) -> float | None:
    """``beyond`` as `Opinion.gap`; None where the signal's unit is not the one in which this resource is told."""
    return abs(beyond) if SIGNALS[signal].unit == _GAPS.get(resource) else None
