"""Signals in rules and evidence: the subject, the text, the resource, and the gap beyond a limit.

The subject is the victim, the node, or the victim's pool, a NUMA node or a file system, written in a rule as
``victim``, ``node``, ``pool``, ``numa:N`` or ``fs:NAME``. If left out, the catalog decides: a signal that pods have is
the victim's, a signal that only the node has is the node's.
"""

import re
from typing import Final

from reconciler.detectors.base import VictimView
from reconciler.runtime.format import quantity
from reconciler.signals.catalog import SIGNALS
from state.evidence import NODE, ContendedResource, pool_subject

VICTIM: Final = "victim"
POOL: Final = "pool"
_PLACE: Final = re.compile(r"numa:\d{1,4}|fs:[A-Za-z0-9_.-]{1,64}", re.ASCII)


def known_signal(name: str) -> str:
    """The name, if the catalog has it. Errors: `ValueError` with a similar name, if there is one."""
    if name in SIGNALS:
        return name
    # Imported at the first mistake, as in the binder.
    from difflib import get_close_matches

    close = get_close_matches(name, SIGNALS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SIGNALS)}"
    raise ValueError(f"unknown signal {name!r}; {hint}")


def whose(signal: str, where: str | None) -> str:
    """``where``, checked, or the catalog's default.

    Errors: `ValueError` if the signal does not exist there, or if two subjects have it and neither is a pod.
    """
    of = SIGNALS[known_signal(signal)].of
    if where is None:
        if "pod" in of:
            return VICTIM
        if len(of) == 1 and of[0] in {NODE, POOL}:
            return of[0]
        raise ValueError(f"{signal} is not measured for pods; expected of: {' or '.join(_spelled(of))}")
    kind = where.partition(":")[0]
    if where not in {VICTIM, NODE, POOL} and not _PLACE.fullmatch(where):
        raise ValueError(f"expected victim, node, pool, numa:N or fs:NAME; got {where!r}")
    # A victim is a pod or the node.
    if not set(of) & ({"pod", "node"} if kind == VICTIM else {kind}):
        raise ValueError(f"{signal} is not measured of {where}, but of {' or '.join(_spelled(of))}")
    return where


def _spelled(of: tuple[str, ...]) -> list[str]:
    return [{"pod": VICTIM, "numa": "numa:N", "fs": "fs:NAME"}.get(kind, kind) for kind in of]


def subject_of(sight: VictimView, where: str) -> str | None:
    """The subject in frames; None where this victim has none (the pool of a pod that runs everywhere)."""
    if where == VICTIM:
        return sight.subject
    if where == POOL:
        return pool_subject(sight.pod.pool) if sight.pod is not None and sight.pod.pool else None
    return where


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
"""By how the signal's name begins, the special case before the general one."""
_GAPS: Final = {ContendedResource.CPU: "milli-CPU", ContendedResource.MEMORY: "bytes", ContendedResource.IO: "bytes/s"}
"""The units of `state.evidence.DetectorVerdict.gap`."""


def shown(signal: str, value: float) -> str:
    """``cpu.wait 7.2 %``."""
    return f"{signal} {quantity(value, SIGNALS[signal].unit)}"


def resource_of(signal: str) -> ContendedResource:
    """The resource that the victim lacks when this signal is bad; CPU unless the name implies another."""
    return next((resource for start, resource in _RESOURCES if signal.startswith(start)), ContendedResource.CPU)


def gap_of(resource: ContendedResource, signal: str, beyond: float) -> float | None:
    """``beyond`` as `DetectorVerdict.gap`; None when the signal's unit is not the unit of this resource."""
    return abs(beyond) if SIGNALS[signal].unit == _GAPS.get(resource) else None
