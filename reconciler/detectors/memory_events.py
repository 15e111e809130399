"""memory_events: a process of the victim was killed for lack of memory, or it reads back what reclaim took from it.

Killed: interference at once, unless the pod had filled its own limit. Reading back (refaults) above a limit counts
while the node as a whole is short of memory: kswapd or, worse, tasks themselves take pages back; or all pods together
meet the limit that the kubelet has set for them. A pod at its own limit thrashes by itself, and nobody else is blamed.

Source: Katalyst's kswapd and refault thresholds, oomd (kills are the last sign, not the first).
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from reconciler.detectors.base import Detector, Sight, unknown
from reconciler.detectors.hold import Hold, Timing, paused, step
from reconciler.detectors.threshold import severity
from reconciler.detectors.windows import measured_s
from reconciler.detectors.words import amount, number
from state.evidence import NODE, Opinion, Resource, Verdict

_AT_LIMIT: Final = 0.95
_BEFORE_S: Final = 15.0
"""How long before a kill the pod may have been at its limit: the kill itself frees memory."""


class MemoryEventsConfig(Timing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many pages are many."""

    for_s: Annotated[float, Meta(ge=0, le=86400, description="reading back must have lasted for this long")] = 5.0
    refaults: Annotated[
        float, Meta(gt=0, le=10_000_000, description="pages read back each second that are too many for the victim")
    ] = 200.0
    kswapd: Annotated[
        float,
        Meta(gt=0, le=10_000_000, description="pages each second from which on kswapd means shortage of the node"),
    ] = 1000.0
    direct: Annotated[
        float, Meta(gt=0, le=10_000_000, description="the same of tasks that take back for themselves")
    ] = 100.0
    pods_hits: Annotated[
        float,
        Meta(gt=0, le=10_000_000, description="times a second that all pods together meet the limit of kubepods"),
    ] = 20.0
    kill_s: Annotated[
        float, Meta(ge=1, le=3600, description="a kill counts for this long; at most as long as samples are kept")
    ] = 60.0


class _Node(Struct, frozen=True):
    """Whether the node is short: by its name, and how far beyond. ``known``: some of it is measured."""

    known: bool
    degree: float
    words: str


def judge(config: MemoryEventsConfig, sight: Sight, memory: Hold | None) -> tuple[Opinion, Hold]:
    """Look for kills, then for reading back."""
    node = _node(config, sight)
    refaults = sight.value("memory.refaults")
    kills, killed_at = _kills(config, sight)
    if refaults is None and kills is None and not (sight.pod is None and node.known):
        return unknown("no fresh memory.refaults and oom.kills"), paused(memory, sight.now)
    own = _own(sight, None)
    own_kill = _own(sight, killed_at)
    told: list[str] = []
    if kills:
        told.append(f"{number(kills)} killed for lack of memory in the last {number(config.kill_s)} s")
    if refaults is not None:
        told.append(f"reads back {number(refaults)} pages/s, bad above {number(config.refaults)}")
    told.append(node.words)
    # The node has no limit of its own, and what it reads back alone is no harm to anyone.
    many = node.degree > 1 if sight.pod is None else refaults is not None and refaults > config.refaults
    if many and not own and not node.known:
        return unknown(f"{', '.join(told)}: it may be its own work"), paused(memory, sight.now)
    held = step(
        memory,
        measured_s(sight, sight.subject, "memory.refaults"),
        config,
        breached=many and node.degree > 1 and not own,
        cleared=not many or bool(own),
        look_s=sight.fresh_s,
    )
    verdict = held.verdict
    degree = node.degree if sight.pod is None else 0.0 if refaults is None else severity(refaults, config.refaults)
    if kills and not own_kill:
        verdict, degree = Verdict.INTERFERED, max(2.0, degree)
    elif (own and many) or (own_kill and kills):
        told.insert(0, own_kill if own_kill and kills else own)
        if verdict is not Verdict.INTERFERED:
            verdict, degree = Verdict.OK, 0.0
    elif verdict is Verdict.OK and many:
        # Many pages, and the node is not short: perhaps only its own way to work.
        verdict = Verdict.SUSPECT
    return Opinion(
        verdict=verdict,
        evidence=", ".join(told),
        resource=Resource.MEMORY,
        severity=degree,
        gap=_gap(sight) if verdict is Verdict.INTERFERED else None,
    ), held


def _node(config: MemoryEventsConfig, sight: Sight) -> _Node:
    kswapd, direct = sight.value("memory.kswapd", NODE), sight.value("memory.direct", NODE)
    degrees = [0.0]
    words: list[str] = []
    for value, limit, name in ((kswapd, config.kswapd, "kswapd"), (direct, config.direct, "tasks themselves")):
        if value is not None:
            degrees.append(severity(value, limit))
            words.append(f"{name} {number(value)}")
    told = f"the node takes back by {' and by '.join(words)} pages/s" if words else ""
    # Where kubepods has a limit of its own, the pods run short while the machine does not.
    hits = sight.value("memory.pods_hits", NODE)
    if hits:
        degrees.append(severity(hits, config.pods_hits))
        told += f"{', ' if told else ''}kubepods meets its limit {number(hits)} times/s"
    known = bool(words) or hits is not None
    return _Node(
        known, max(degrees), told or ("the node is not short" if known else "whether the node is short: unknown")
    )


def _kills(config: MemoryEventsConfig, sight: Sight) -> tuple[float | None, float | None]:
    """How many were killed lately, and when the last one was; None: not measured."""
    series = sight.history.series(sight.subject, "oom.kills")
    if series is None or sight.value("oom.kills") is None:
        return None, None
    since = sight.now - config.kill_s
    found = [(at, value) for at, value in series.tail(since) if at > since and value > 0]
    return sum(value for _, value in found), found[-1][0] if found else None


def _own(sight: Sight, killed_at: float | None) -> str:
    """In words, that the pod is at its own limit now, or was when somebody of it was killed; empty: it is not."""
    limit = sight.value("memory.limit")
    if limit is None and sight.pod is not None and sight.pod.limits.memory_bytes:
        limit = float(sight.pod.limits.memory_bytes)
    use = sight.value("memory.use") if sight.pod is not None else None
    if killed_at is not None:
        series = sight.history.series(sight.subject, "memory.use")
        points = [] if series is None else series.tail(killed_at - _BEFORE_S)
        use = max((value for at, value in points if at <= killed_at), default=use)
    if not limit or use is None or use < _AT_LIMIT * limit:
        return ""
    return f"own limit: {amount(use, 'bytes')} of {amount(limit, 'bytes')}"


def _gap(sight: Sight) -> float | None:
    """What the node lacks up to its low watermark, where kswapd rests."""
    low, free = sight.value("memory.low", NODE), sight.value("memory.free", NODE)
    return low - free if low is not None and free is not None and free < low else None


DETECTOR = Detector(
    name="memory_events",
    summary="killed for lack of memory, or reading back what reclaim took while the node is short",
    config_type=MemoryEventsConfig,
    memory_type=Hold,
    signals=lambda _: (
        *("oom.kills", "memory.refaults", "memory.use", "memory.limit"),
        *("memory.kswapd", "memory.direct", "memory.pods_hits", "memory.low", "memory.free"),
    ),
    judge=judge,
)
