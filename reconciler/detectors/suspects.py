"""Who may be the cause: pods that used what the victim lacks while it suffered, the likeliest first.

A score has three factors, each 0-1:

- share: what the pod used of the resource while the victim suffered, within ``window_s``, against the pod that used
  most: of ten that did the same each is as likely. CPU time counts by the part of the pod's CPUs that the victim runs
  on, too; memory by growth, size and refaults; disks by bytes and requests; the cache by occupancy and bandwidth; the
  network by bytes.
- time: whether the pod was active when the victim suffered and quiet when it did not, over all of the kept past. CPI²'s
  correlation, with the victim's symptom (run-queue wait for CPU) in place of CPI, and Pearson's where both vary.
- own: less than 1 when the victim is at its own limit, which no neighbour put there.

Whose use is not measured, or next to nothing, is no suspect. Online pods are told as well, for a person to see; what is
done about them is not decided here.

Source: CPI² section 4.2 (correlation), Netflix (waiting told together with own throttling). Where we differ: CPI² ranks
by correlation alone, so that of a pod with 2 CPUs and one with 0.02 that follow the same rhythm either may be first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from reconciler.detectors.base import Sight
from reconciler.detectors.neighbours import overlap
from reconciler.detectors.rhythm import Symptom, paired, rhythm, symptom_of
from reconciler.detectors.windows import spacing_s
from reconciler.detectors.words import amount, number
from state.evidence import PodFacts, Resource, Suspect

SIGNALS: Final = (
    *("cpu.use", "cpu.throttled", "memory.use", "memory.limit", "memory.refaults"),
    *("disk.read", "disk.write", "disk.ops", "llc.occupancy", "memory.bandwidth"),
)
"""What is read for it. Symptoms and network use are taken into account where a rule has them measured."""

MOST: Final = 10
"""Suspects told, and pods whose use is followed through time."""


class _Part(NamedTuple):
    """One way to measure use. ``least``: the sum of these signals below which a pod did nothing."""

    signals: tuple[str, ...]
    weight: float
    least: float
    unit: str
    words: str
    growth: bool = False


_PARTS: Final[Mapping[Resource, tuple[_Part, ...]]] = {
    Resource.CPU: (_Part(("cpu.use",), 1.0, 20.0, "milli-CPU", "used"),),
    Resource.MEMORY: (
        _Part(("memory.use",), 0.5, 16.0 * (1 << 20), "bytes", "grew by", growth=True),
        _Part(("memory.use",), 0.35, 16.0 * (1 << 20), "bytes", "held"),
        _Part(("memory.refaults",), 0.15, 10.0, "pages/s", "read back"),
    ),
    Resource.IO: (
        _Part(("disk.read", "disk.write"), 0.5, 64.0 * 1024, "bytes/s", "moved"),
        _Part(("disk.ops",), 0.5, 5.0, "per s", "made requests:"),
    ),
    Resource.CACHE: (
        _Part(("llc.occupancy",), 0.5, 256.0 * 1024, "bytes", "held in the cache"),
        _Part(("memory.bandwidth",), 0.5, 10e6, "bytes/s", "moved"),
    ),
    Resource.NETWORK: (_Part(("net.receive", "net.transmit"), 1.0, 100e3, "bytes/s", "moved"),),
}


def rank(sight: Sight, resource: Resource, window_s: float) -> tuple[Suspect, ...]:
    """The pods that may be why the victim lacks ``resource``, the likeliest first; empty: none can be told."""
    symptom = symptom_of(sight, resource, window_s)
    parts = _PARTS[resource]
    overlaps = _candidates(sight, resource)
    # By part, by pod.
    uses: list[dict[str, float]] = []
    for part in parts:
        found: dict[str, float] = {}
        for uid, near in overlaps.items():
            used = _used(sight, sight.frame.pods[uid].subject, part, symptom, window_s)
            if used is not None and used * near > 0:
                found[uid] = used * near
        uses.append(found)
    shares = _shares(parts, uses)
    own, excuse = _own(sight, resource, window_s)
    suspects: list[Suspect] = []
    for uid in sorted(shares, key=lambda one: (-shares[one], one))[:MOST]:
        pod = sight.frame.pods[uid]
        time, words = _time(sight, pod, parts, symptom)
        score = min(1.0, max(0.0, shares[uid] * time * own))
        told = [
            f"{part.words} {amount(used[uid], part.unit)} ({_percent(used[uid], used)} of what others did)"
            for part, used in zip(parts, uses, strict=True)
            if used.get(uid, 0.0) >= part.least
        ]
        where = _where(sight, resource, overlaps[uid])
        reason = ", ".join(told) + where + words + excuse
        if pod.pod_class.online:
            reason += "; online: told only"
        suspects.append(Suspect(uid=uid, title=pod.title, score=round(score, 3), reason=reason))
    return tuple(sorted(suspects, key=lambda one: (-one.score, one.title)))


def _candidates(sight: Sight, resource: Resource) -> dict[str, float]:
    """Every other pod with the part of its CPUs that the victim runs on, too; 1.0 where CPUs do not matter."""
    found: dict[str, float] = {}
    ours = sight.pod.cpus if sight.pod is not None and resource is Resource.CPU else ""
    for uid, pod in sight.frame.pods.items():
        if sight.pod is not None and uid == sight.pod.uid:
            continue
        part = overlap(ours, pod.cpus)
        if part:
            found[uid] = part
    return found


def _used(sight: Sight, subject: str, part: _Part, symptom: Symptom | None, window_s: float) -> float | None:
    """What a pod used while the victim suffered; None: not measured."""
    total: float | None = None
    for signal in part.signals:
        series = sight.history.series(subject, signal)
        if series is None or sight.value(signal, subject) is None:
            continue
        points = series.tail(sight.now - window_s)
        if part.growth:
            used = max(0.0, points[-1][1] - min(value for _, value in points))
        else:
            inside = (
                [value for _, value in paired(symptom.bad, points, spacing_s(sight, signal))]
                if symptom is not None and symptom.bad
                else [value for at, value in points if at > sight.now - window_s]
            )
            used = sum(inside) / len(inside) if inside else 0.0
        total = used if total is None else total + used
    return total


def _shares(parts: Sequence[_Part], uses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What each pod did against the one that did most; a way to measure in which nobody did anything tells nothing."""
    shares: dict[str, float] = {}
    active: set[str] = set()
    for part, used in zip(parts, uses, strict=True):
        total = math.fsum(used.values())
        if total < part.least:
            continue
        for uid, value in used.items():
            shares[uid] = shares.get(uid, 0.0) + part.weight * value / total
            if value >= part.least:
                active.add(uid)
    most = max(shares.values(), default=0.0)
    return {uid: share / most for uid, share in shares.items() if uid in active}


def _time(sight: Sight, pod: PodFacts, parts: Sequence[_Part], symptom: Symptom | None) -> tuple[float, str]:
    """The factor of time and words for it; 1.0 where nothing can be told."""
    if symptom is not None:
        for part in parts:
            found = None if part.growth else rhythm(sight, pod.subject, part.signals, symptom)
            if found is not None:
                return found[0], f"; {found[1]}"
    return 1.0, ""


def _own(sight: Sight, resource: Resource, window_s: float) -> tuple[float, str]:
    """How much of the suffering others can be blamed for, and the victim's own part in words."""
    if sight.pod is None:
        return 1.0, ""
    if resource is Resource.CPU:
        series = sight.history.series(sight.subject, "cpu.throttled")
        values = [value for _, value in series.tail(sight.now - window_s)] if series is not None else []
        cut = sum(values) / len(values) if values else 0.0
        if cut > _CUT:
            return 0.25, f"; but the victim's own quota cuts {number(cut)} % of its periods short"
        use, most = sight.value("cpu.use"), sight.pod.limits.cpu_milli
        if use is not None and most and use >= _AT_LIMIT * most:
            return 0.5, f"; but the victim is at its own limit ({number(use)} of {most} milli-CPU)"
    if resource is Resource.MEMORY:
        use, bound = sight.value("memory.use"), sight.value("memory.limit") or sight.pod.limits.memory_bytes
        if use is not None and bound and use >= _AT_LIMIT * bound:
            at = f"{amount(use, 'bytes')} of {amount(bound, 'bytes')}"
            return 0.25, f"; but the victim is at its own limit ({at})"
    return 1.0, ""


_CUT: Final = 1.0
_AT_LIMIT: Final = 0.95


def _percent(value: float, used: Mapping[str, float]) -> str:
    return f"{number(100 * value / math.fsum(used.values()))} %"


def _where(sight: Sight, resource: Resource, overlap: float) -> str:
    if resource is not Resource.CPU or sight.pod is None:
        return ""
    return (
        " on the victim's CPUs"
        if overlap >= 1
        else f" on the {number(100 * overlap)} % of its CPUs that are the victim's"
    )
