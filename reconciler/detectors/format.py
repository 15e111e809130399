"""Signals in evidence: their text, the resource that each belongs to, and the gap beyond a limit."""

from typing import Final

from reconciler.runtime.format import quantity
from reconciler.signals.catalog import SIGNALS
from state.evidence import ContendedResource

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


def shown(signal: str, value: float) -> str:
    """``cpu.wait 7.2 %``."""
    return f"{signal} {quantity(value, SIGNALS[signal].unit)}"


def resource_of(signal: str) -> ContendedResource:
    """The resource that the victim lacks when this signal is bad; CPU unless the name implies another."""
    return next((resource for start, resource in _RESOURCES if signal.startswith(start)), ContendedResource.CPU)


def gap_of(resource: ContendedResource, signal: str, beyond: float) -> float | None:
    """``beyond`` as `DetectorVerdict.gap`; None when the signal's unit is not the unit of this resource."""
    return abs(beyond) if SIGNALS[signal].unit == _GAPS.get(resource) else None
