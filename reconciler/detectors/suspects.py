"""Possible causes: pods that used what the victim lacked during its bad moments, the most probable first.

A score is the product of three factors, each 0-1: the share of the use during the bad moments (`_shares`), whether the
pod was active then and quiet otherwise (`_time`), and the victim's own part (`_own`).

A pod whose use is not measured, or next to nothing, is not a suspect. Online pods are reported as well, for people;
responses are not decided here.

Source: CPI² section 4.2 (correlation), Netflix (waiting reported together with own throttling).
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from reconciler.detectors.base import VictimView
from reconciler.detectors.limits import AT_LIMIT, memory_at_limit
from reconciler.detectors.neighbours import overlap
from reconciler.detectors.rhythm import SymptomSeries, rhythm, symptom_of
from reconciler.detectors.uses import ResourceUse, ResourceUses, UsesInWindow
from reconciler.runtime.format import cpu, cpus, percent, quantity
from state.evidence import ContendedResource, PodSnapshot, Suspect

SIGNALS: Final = (
    *("cpu.use", "cpu.throttled", "memory.use", "memory.limit", "memory.refaults"),
    *("disk.read", "disk.write", "disk.ops", "llc.occupancy", "memory.bandwidth"),
)
"""What is read for it. Symptoms and network use are taken into account where a rule has them measured."""

MOST: Final = 10
"""Maximum number of suspects reported, and of pods whose use is followed through time."""
_STRIDE: Final = 50
"""Pods after which others may run: a tenth of a millisecond."""


class _SuspectScore(NamedTuple):
    """One way to measure use. ``least``: the sum of these signals below which a pod did nothing."""

    signals: tuple[str, ...]
    weight: float
    least: float
    unit: str
    words: str
    growth: bool = False


_PARTS: Final[Mapping[ContendedResource, tuple[_SuspectScore, ...]]] = {
    ContendedResource.CPU: (_SuspectScore(("cpu.use",), 1.0, 20.0, "milli-CPU", "used"),),
    ContendedResource.MEMORY: (
        _SuspectScore(("memory.use",), 0.5, 16.0 * (1 << 20), "bytes", "grew by", growth=True),
        _SuspectScore(("memory.use",), 0.35, 16.0 * (1 << 20), "bytes", "held"),
        _SuspectScore(("memory.refaults",), 0.15, 10.0, "pages/s", "refaulted"),
    ),
    ContendedResource.IO: (
        _SuspectScore(("disk.read", "disk.write"), 0.5, 64.0 * 1024, "bytes/s", "transferred"),
        _SuspectScore(("disk.ops",), 0.5, 5.0, "per s", "disk requests:"),
    ),
    ContendedResource.CACHE: (
        _SuspectScore(("llc.occupancy",), 0.5, 256.0 * 1024, "bytes", "cache occupancy"),
        _SuspectScore(("memory.bandwidth",), 0.5, 10e6, "bytes/s", "transferred"),
    ),
    ContendedResource.NETWORK: (_SuspectScore(("net.receive", "net.transmit"), 1.0, 100e3, "bytes/s", "transferred"),),
}


def rank(
    sight: VictimView, resource: ContendedResource, window_s: float, lately: ResourceUses
) -> Generator[None, None, tuple[Suspect, ...]]:
    """The pods that may be why the victim lacks ``resource``, the most probable first; empty: none found.

    It yields at intervals, so that others can run. ``lately``: what is shared by all victims of this frame.
    """
    symptom = symptom_of(sight, resource, window_s)
    parts = _PARTS[resource]
    overlaps = _candidates(sight, resource)
    meanwhile = UsesInWindow(symptom.bad if symptom is not None else ())
    # By part, by pod.
    uses: list[dict[str, float]] = []
    for part in parts:
        values: dict[str, float] = {}
        read = [lately.get(signal, window_s) for signal in part.signals]
        for count, (uid, near) in enumerate(overlaps.items()):
            used = _used(_neighbour(sight, uid).subject, read, meanwhile, growth=part.growth)
            if used is not None and used * near > 0:
                values[uid] = used * near
            if count % _STRIDE == _STRIDE - 1:
                yield
        uses.append(values)
        yield
    totals = [math.fsum(used.values()) for used in uses]
    shares = _shares(parts, uses, totals)
    own, excuse = _own(sight, resource, window_s)
    suspects: list[Suspect] = []
    for uid in sorted(shares, key=lambda text: (-shares[text], text))[:MOST]:
        pod = _neighbour(sight, uid)
        time, message = _time(sight, pod, parts, symptom)
        # CPI² ranks by correlation only: of pods with 2 and 0.02 CPUs in the same rhythm either may be first there.
        score = min(1.0, max(0.0, shares[uid] * time * own))
        texts = [
            f"{part.words} {quantity(used[uid], part.unit)} ({percent(100 * used[uid] / total)} of all other pods)"
            for part, used, total in zip(parts, uses, totals, strict=True)
            if used.get(uid, 0.0) >= part.least
        ]
        where = _where(sight, resource, overlaps[uid])
        reason = ", ".join(texts) + where + message + excuse
        if pod.pod_class.online:
            reason += f"; online {'workload' if pod.is_host else 'pod'}: reported, never limited"
        elif pod.is_host:
            reason += "; host workload: reported, never limited"
        suspects.append(Suspect(uid=uid, title=pod.title, score=round(score, 3), reason=reason))
        yield
    return tuple(sorted(suspects, key=lambda suspect: (-suspect.score, suspect.title)))


def _candidates(sight: VictimView, resource: ContendedResource) -> dict[str, float]:
    """Every other pod with the part of its CPUs that the victim runs on, too; 1.0 where CPUs do not matter."""
    mine = sight.pod.uid if sight.pod is not None else None
    ours = sight.pod.cpus if sight.pod is not None and resource is ContendedResource.CPU else ""
    if not ours:
        return {uid: 1.0 for uid in chain(sight.frame.pods, sight.frame.hosts) if uid != mine}
    everyone = chain(sight.frame.pods.items(), sight.frame.hosts.items())
    return {uid: part for uid, pod in everyone if uid != mine and (part := overlap(ours, pod.cpus)) > 0}


def _neighbour(sight: VictimView, uid: str) -> PodSnapshot:
    return sight.frame.pods.get(uid) or sight.frame.hosts[uid]


def _used(
    subject: str, read: Sequence[Callable[[str], ResourceUse | None]], meanwhile: UsesInWindow, *, growth: bool
) -> float | None:
    """A pod's use during the bad moments; None: not measured."""
    total: float | None = None
    for use_of in read:
        use = use_of(subject)
        if use is not None:
            used = use.growth() if growth else meanwhile.mean(use)
            total = used if total is None else total + used
    return total


def _shares(
    parts: Sequence[_SuspectScore], uses: Sequence[Mapping[str, float]], totals: Sequence[float]
) -> dict[str, float]:
    """Each pod's use against the pod with most; measures of which all pods have next to nothing are skipped."""
    shares: dict[str, float] = {}
    active: set[str] = set()
    for part, used, total in zip(parts, uses, totals, strict=True):
        if total < part.least:
            continue
        for uid, value in used.items():
            shares[uid] = shares.get(uid, 0.0) + part.weight * value / total
            if value >= part.least:
                active.add(uid)
    most = max(shares.values(), default=0.0)
    # Not against the sum: of ten with equal use each is as probable as a single one would be.
    return {uid: share / most for uid, share in shares.items() if uid in active}


def _time(
    sight: VictimView, pod: PodSnapshot, parts: Sequence[_SuspectScore], symptom: SymptomSeries | None
) -> tuple[float, str]:
    """The factor of time and a text, over all of the kept past; 1.0 where it is unknown.

    CPI²'s correlation, with the victim's symptom (run-queue wait for CPU) in place of CPI, and Pearson's where both
    vary.
    """
    if symptom is not None:
        for part in parts:
            pair = None if part.growth else rhythm(sight, pod.subject, part.signals, symptom)
            if pair is not None:
                return pair[0], f"; {pair[1]}"
    return 1.0, ""


def _own(sight: VictimView, resource: ContendedResource, window_s: float) -> tuple[float, str]:
    """The part of the interference that others may cause, and the victim's own part as text.

    Less than 1 when the victim is at its own limit, which no neighbour caused.
    """
    if sight.pod is None:
        return 1.0, ""
    if resource is ContendedResource.CPU:
        series = sight.series("cpu.throttled")
        values = series.after(sight.now - window_s)[1] if series is not None else []
        cut = sum(values) / len(values) if values else 0.0
        if cut > _CUT:
            return 0.25, f"; but the victim is throttled by its own limit ({percent(cut)} of periods)"
        use, most = sight.value("cpu.use"), sight.pod.limits.cpu_milli
        if use is not None and most and use >= AT_LIMIT * most:
            return 0.5, f"; but the victim is at its own limit ({cpus(use)} of {cpu(most)})"
    if resource is ContendedResource.MEMORY and (at := memory_at_limit(sight)):
        return 0.25, f"; but the victim is at its own limit ({at})"
    return 1.0, ""


_CUT: Final = 1.0
"""Percent of the periods: less throttling explains nothing."""


def _where(sight: VictimView, resource: ContendedResource, overlap: float) -> str:
    if resource is not ContendedResource.CPU or sight.pod is None:
        return ""
    return " on the victim's CPUs" if overlap >= 1 else f" on the victim's CPUs ({percent(100 * overlap)} of its CPUs)"
