"""memory_events: a process of the victim was killed for lack of memory, or it reads back what reclaim took from it.

Killed: interference at once, unless the pod had filled its own limit. Reading back (refaults) above a limit counts
while the node as a whole is short of memory (`_node`).

Source: Katalyst's kswapd and refault thresholds, oomd (kills are the last sign, not the first).
"""

from functools import partial
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.limits import memory_at_limit
from reconciler.detectors.threshold import severity
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.runtime.format import duration, number
from state.evidence import NODE, ContendedResource, DetectorVerdict, Verdict

_MEMORY: Final = ContendedResource.MEMORY


class MemoryEventsConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many pages are many."""

    for_s: Annotated[float, Meta(ge=0, le=86400, description="duration of the refaults before they count")] = 5.0
    refaults: Annotated[
        float, Meta(gt=0, le=10_000_000, description="refaulted pages per second of the victim that are bad")
    ] = 200.0
    kswapd: Annotated[
        float,
        Meta(gt=0, le=10_000_000, description="pages a second reclaimed by kswapd that are a shortage of the node"),
    ] = 1000.0
    direct: Annotated[float, Meta(gt=0, le=10_000_000, description="the same for direct reclaim by tasks")] = 100.0

    # A victim that restarts is back by then.
    kill_s: ClassVar[float] = 60.0
    # Each hit is a reclaim in the way of an allocation.
    pods_hits: ClassVar[float] = 20.0


class _Node(NamedTuple):
    """Whether the node is short, by what is measured of it; ``degree``: how far beyond, 1.0 is just at a limit."""

    kswapd: float | None
    direct: float | None
    hits: float | None
    degree: float

    @property
    def known(self) -> bool:
        return self.kswapd is not None or self.direct is not None or self.hits is not None

    def describe(self) -> str:
        taken = [
            f"{name} {number(value)}"
            for value, name in ((self.kswapd, "kswapd"), (self.direct, "direct reclaim"))
            if value is not None
        ]
        text = f"node reclaim: {' and '.join(taken)} pages/s" if taken else ""
        if self.hits:
            text += f"{', ' if text else ''}kubepods hits its limit {number(self.hits)} times/s"
        return text or ("no shortage on the node" if self.known else "shortage on the node unknown")


def evaluate(
    config: MemoryEventsConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    node = sight.memo(_node, config)
    series = sight.series("memory.refaults")
    refaults = None if series is None else series.fresh(sight.now, sight.fresh_s)
    kills, killed_at = _kills(config, sight)
    if refaults is None and kills is None and not (sight.pod is None and node.known):
        return unknown("memory.refaults and oom.kills not available"), paused(memory, sight.now)
    # A pod at its own limit thrashes because of that limit: no other pod is a suspect.
    own = _own(sight, None)
    own_kill = own if killed_at is None else _own(sight, killed_at)
    # The node has no limit of its own, and its refaults without that harm no pod.
    many = node.degree > 1 if sight.pod is None else refaults is not None and refaults > config.refaults
    if many and not own and not node.known:
        return unknown(f"{_words(config, kills, refaults, node)}: may be caused by the victim itself"), paused(
            memory, sight.now
        )
    held = step(
        memory,
        sight.now if series is None else series.times[-1],
        config,
        breached=many and node.degree > 1 and not own,
        cleared=not many or bool(own),
        look_s=sight.fresh_s,
    )
    verdict, first = held.verdict, ""
    degree = node.degree if sight.pod is None else 0.0 if refaults is None else severity(refaults, config.refaults)
    if kills and not own_kill:
        # A kill is beyond any limit, however few pages are read back.
        verdict, degree = Verdict.INTERFERED, max(2.0, degree)
    elif (own and many) or (own_kill and kills):
        first = own_kill if own_kill and kills else own
        if verdict is not Verdict.INTERFERED:
            verdict, degree = Verdict.OK, 0.0
    elif many and verdict is Verdict.OK:
        # Many pages, and the node is not short: it may be the pod's own way to work.
        verdict = Verdict.SUSPECT
    return DetectorVerdict(
        verdict=verdict,
        text=partial(_words, config, kills, refaults, node, first),
        resource=_MEMORY,
        severity=degree,
        gap=_gap(sight) if verdict is Verdict.INTERFERED else None,
    ), held


def _words(
    config: MemoryEventsConfig, kills: float | None, refaults: float | None, node: _Node, first: str = ""
) -> str:
    texts = [first] if first else []
    if kills:
        texts.append(f"{number(kills)} OOM kills in the last {duration(config.kill_s)}")
    if refaults is not None:
        texts.append(f"{number(refaults)} refaulted pages/s, limit {number(config.refaults)}")
    return ", ".join([*texts, node.describe()])


def _node(config: MemoryEventsConfig, sight: VictimView) -> _Node:
    kswapd, direct = sight.value("memory.kswapd", NODE), sight.value("memory.direct", NODE)
    # Where kubepods has a limit of its own, the pods run short while the machine does not.
    hits = sight.value("memory.pods_hits", NODE)
    degree = 0.0
    if kswapd is not None:
        degree = max(degree, severity(kswapd, config.kswapd))
    if direct is not None:
        degree = max(degree, severity(direct, config.direct))
    if hits:
        degree = max(degree, severity(hits, config.pods_hits))
    return _Node(kswapd, direct, hits, degree)


def _kills(config: MemoryEventsConfig, sight: VictimView) -> tuple[float | None, float | None]:
    """How many were killed lately, and when the last one was; None: not measured."""
    series = sight.series("oom.kills")
    if series is None or series.fresh(sight.now, sight.fresh_s) is None:
        return None, None
    since = sight.now - config.kill_s
    if not any(series.after(since)[1]):
        return 0.0, None  # the usual case
    pairs = [(at, value) for at, value in series.since(since) if value > 0]
    return sum(value for _, value in pairs), pairs[-1][0] if pairs else None


def _own(sight: VictimView, killed_at: float | None) -> str:
    """As text, that the pod is at its own limit now, or was when a process of it was killed; empty: it is not."""
    text = memory_at_limit(sight, killed_at)
    return f"own limit: {text}" if text else ""


def _gap(sight: VictimView) -> float | None:
    """What the node lacks up to its low watermark, below which kswapd reclaims."""
    low, free = sight.value("memory.low", NODE), sight.value("memory.free", NODE)
    return low - free if low is not None and free is not None and free < low else None


DETECTOR = Detector(
    name="memory_events",
    summary="OOM kills, or refaults while the node is short of memory",
    config_type=MemoryEventsConfig,
    memory_type=DebounceState,
    signals=lambda _: (
        *("oom.kills", "memory.refaults", "memory.use", "memory.limit"),
        *("memory.kswapd", "memory.direct", "memory.pods_hits", "memory.low", "memory.free"),
    ),
    judge=evaluate,
)
