"""Victims of one shortage: one ranking, a line for each candidate, and the fewest that cover it. Pure.

The ranking, first victim first: class (BE, shared, dedicated); Koordinator's ``eviction-priority``; priority;
Koordinator's label ``priority``; marks of preference; then relief per lost work, which is the pod's use of the lacking
resource divided by its running time; at last the newest. The keys before the relief are configured and have absolute
precedence over it; pods that are equal up to there are one tier, of which as few as needed are evicted. In a tier a pod
whose replacement is started here again is the last.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Final, NamedTuple

from msgspec import Struct

from reconciler.responses.eviction.config import EvictionConfig
from reconciler.responses.eviction.exemptions import ExemptionsConfig, age_s, matching_mark, policy_allows
from reconciler.responses.eviction.resources import EvictedResource, format_amount, usage_of
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import Shortage
from reconciler.runtime.format import duration
from state.closing import NodeClosing, NodeMark
from state.evidence import PodSnapshot
from state.model import PodClass

_RETURNS = frozenset({"DaemonSet", "Node"})
"""``Node`` owns the mirror pod of a static pod."""
_CLASSES: Final = {PodClass.RECLAIMED: 0, PodClass.SHARED: 1, PodClass.DEDICATED: 2}
_EVICTION_PRIORITY: Final = "koordinator.sh/eviction-priority"
_PRIORITY_LABEL: Final = "koordinator.sh/priority"
_PRIORITY_CLASS: Final = "koordinator.sh/priority-class"
# The middle of Koordinator's bands, for a pod without a reported priority (a runtime has only labels).
_BANDS: Final = {"koord-prod": 9500, "koord-mid": 7500, "koord-batch": 5500, "koord-free": 3500}
_LONGEST: Final = 12
"""Digits of a number in a label: a longer text is not a priority."""


class Replacement(IntEnum):
    """The likelihood that it runs here again, the least first."""

    NONE = 0
    ELSEWHERE = 1
    AVOIDS = 2
    MAY_RETURN = 3
    RETURNS = 4

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Replacement.NONE: "not replaced",
    Replacement.ELSEWHERE: "replaced elsewhere",
    Replacement.AVOIDS: "replaced elsewhere if possible",
    Replacement.MAY_RETURN: "may return here",
    Replacement.RETURNS: "returns here",
}


def replacement_of(pod: PodSnapshot, closing: NodeClosing | None) -> Replacement:
    """The likelihood by the pod's controller, its tolerations, and the mark that was read back.

    A controller makes a new pod at once, and the scheduler often chooses the same node, which has room again. Headroom
    0 does not count: whether the cluster's scheduler reads it is not known here.
    """
    kind = (pod.owner or "").partition("/")[0]
    if not kind:
        return Replacement.NONE
    if pod.static or kind in _RETURNS:
        return Replacement.RETURNS
    mark = None if closing is None or closing.closed_s is None else closing.mark
    effect = None if mark is None else mark.taint
    if effect is None or effect in pod.tolerates:
        return Replacement.MAY_RETURN
    return Replacement.ELSEWHERE if mark is NodeMark.NO_SCHEDULE else Replacement.AVOIDS


Owner = Callable[[PodSnapshot], str]


class PriorityKey(NamedTuple):
    """The declared criteria of a pod; the smallest is evicted first."""

    pod_class: int
    eviction_priority: int
    priority: int
    label_priority: int
    mark: int


class Candidate(Struct, frozen=True, kw_only=True):
    """A pod that may be evicted. ``relief``: its usage of the scarce resource; ``per_s``: that divided by its age."""

    pod: PodSnapshot
    standing: PriorityKey
    relief: float
    age_s: float
    replacement: Replacement = Replacement.MAY_RETURN

    @property
    def per_s(self) -> float:
        """Relief per second of work that is lost."""
        return self.relief / max(1.0, self.age_s)

    @property
    def order(self) -> tuple[PriorityKey, bool, float, float, str]:
        """The sort key: the smallest is evicted first."""
        returns = self.replacement is Replacement.RETURNS
        return self.standing, returns, -self.per_s, -self.pod.created_s, self.pod.uid


class Ranking(Struct, frozen=True, kw_only=True):
    """All pods ranked for one shortage.

    ``spared``: title, use, and the reason, of pods that use some of it and remain. ``small``: how many remain only
    because they use too little, ``unknown``: because their use is unknown.
    """

    candidates: tuple[Candidate, ...] = ()
    spared: tuple[tuple[str, float | None, str], ...] = ()
    small: int = 0
    unknown: int = 0

    @property
    def relief(self) -> float:
        return sum(candidate.relief for candidate in self.candidates)


def standing_of(pod: PodSnapshot, config: ExemptionsConfig) -> PriorityKey:
    """An unreadable value counts as absent."""
    band = _BANDS.get(pod.labels.get(_PRIORITY_CLASS, ""), 0)
    priority = band if pod.priority is None else pod.priority
    prefers, avoids = matching_mark(pod, config.prefer) is not None, matching_mark(pod, config.avoid) is not None
    return PriorityKey(
        pod_class=_CLASSES.get(pod.pod_class, len(_CLASSES)),
        eviction_priority=_number(pod.annotations.get(_EVICTION_PRIORITY), 0),
        priority=priority,
        label_priority=_number(pod.labels.get(_PRIORITY_LABEL), priority),
        mark=avoids - prefers,
    )


def rank(
    config: EvictionConfig,
    scene: EvictionContext,
    pressure: Shortage,
    *,
    need: float | None,
    spared: Mapping[str, str],
    features: tuple[str, ...],
) -> Ranking:
    """The candidates, ranked.

    ``need``: what is still lacking. ``spared``: by uid, why a pod is never evicted. ``features``: Koordinator's names
    of the trigger.
    """
    candidates: list[Candidate] = []
    staying: list[tuple[str, float | None, str]] = []
    small = unknown = 0
    least = max(pressure.least, 0.0 if need is None else need * config.least_percent / 100)
    for uid, pod in sorted(scene.frame.pods.items()):
        if pressure.only is not None and uid not in pressure.only:
            continue
        relief = usage_of(pressure.good, pod, pressure.subject, scene)
        reason = spared.get(uid)
        if reason is None and pod.pod_class not in pressure.classes:
            reason = f"class {pod.pod_class} is not evicted for this"
        reason = reason or policy_allows(pod, features)
        if reason is None and not pressure.named:
            reason = _too_little(pressure.good, relief, least)
            small += reason is not None and relief is not None
            unknown += relief is None
        if reason is None:
            candidates.append(
                Candidate(
                    pod=pod,
                    standing=standing_of(pod, config.spared),
                    relief=relief or 0.0,
                    age_s=min(age_s(pod, scene.frame), scene.frame.wall_s),
                    replacement=replacement_of(pod, scene.frame.closing),
                )
            )
        elif relief is None or relief > 0:
            staying.append((pod.title, relief, reason))
    candidates.sort(key=lambda candidate: candidate.order)
    staying.sort(key=lambda row: (-(row[1] or 0.0), row[0]))
    return Ranking(candidates=tuple(candidates), spared=tuple(staying), small=small, unknown=unknown)


def pick_minimum(
    candidates: Sequence[Candidate], need: float | None, owners: Mapping[str, int], owner: Owner
) -> list[Candidate]:
    """The victims, in order of the ranking; every allowed candidate when all are not enough.

    ``need`` None: only the first. ``owners``: allowed evictions by owner, ``owner``: the owner of a pod.
    Drops victims of earlier tiers if one later mandatory victim covers the need.
    """
    left = dict(owners)
    if need is None:
        return next(([candidate] for candidate in candidates if left.get(owner(candidate.pod), 0) > 0), [])
    taken: list[Candidate] = []
    gap = need
    for _, tier in groupby(candidates, key=lambda candidate: candidate.standing):
        for item in _fewest(list(tier), gap, left, owner):
            taken.append(item)
            gap -= item.relief
        if gap <= 0:
            break
    surplus = -gap
    kept: list[Candidate] = []
    # The most valuable pod is tried first: is the need covered without it?
    for item in sorted(taken, key=lambda candidate: candidate.order, reverse=True):
        if 0 <= item.relief <= surplus:
            surplus -= item.relief
        else:
            kept.append(item)
    return sorted(kept, key=lambda candidate: candidate.order)


def _fewest(tier: list[Candidate], need: float, left: dict[str, int], owner: Owner) -> list[Candidate]:
    """The fewest of a tier that cover ``need``, of several ways the way whose last member ranks first; else all."""
    taken: list[Candidate] = []
    while need > 0:
        free = [candidate for candidate in tier if left.get(owner(candidate.pod), 0) > 0]
        if not free:
            break
        enough = [candidate for candidate in free if candidate.relief >= need]
        chosen = enough[0] if enough else max(free, key=lambda candidate: candidate.relief)
        tier.remove(chosen)
        taken.append(chosen)
        left[owner(chosen.pod)] -= 1
        need -= chosen.relief
    return taken


def render(
    pressure: Shortage, weighed: Ranking, going: Sequence[Candidate], waiting: Mapping[str, str]
) -> tuple[str, ...]:
    """The ranking as text: a line for each candidate, then one for each exempt pod.

    ``waiting``: by uid, why a chosen pod is not evicted in this pass.
    """
    uids = {candidate.pod.uid for candidate in going}
    texts = []
    for place, item in enumerate(weighed.candidates, 1):
        word = "evict" if item.pod.uid in uids else f"wait: {waiting.get(item.pod.uid)}"
        if item.pod.uid not in uids and item.pod.uid not in waiting:
            word = "not needed: pressure already covered"
        texts.append(f"{place}. {word}: {_describe(pressure.good, item)}")
    for title, relief, reason in weighed.spared:
        holds = "usage unknown" if relief is None else format_amount(pressure.good, relief)
        texts.append(f"-. exempt: {title}: {reason} ({holds})")
    return tuple(texts)


def _describe(good: EvictedResource, candidate: Candidate) -> str:
    standing, pod = candidate.standing, candidate.pod
    parts = [f"class {pod.pod_class}"]
    if standing.eviction_priority:
        parts.append(f"eviction priority {standing.eviction_priority}")
    parts.append(f"priority {standing.priority}")
    if standing.label_priority != standing.priority:
        parts.append(f"label priority {standing.label_priority}")
    if standing.mark:
        parts.append("preferred" if standing.mark < 0 else "avoided")
    parts.append(f"{format_amount(good, candidate.relief)}, age {duration(candidate.age_s)}")
    parts.append(candidate.replacement.words)
    return f"{pod.title}: {', '.join(parts)}"


def _too_little(good: EvictedResource, relief: float | None, least: float) -> str | None:
    if relief is None:
        return "usage unknown"
    if relief <= 0:
        return "uses none of it"
    return f"uses too little: {format_amount(good, relief)}" if relief < least else None


def _number(text: str | None, default: int) -> int:
    if text is None or len(text) > _LONGEST:
        return default
    try:
        return int(text)
    except ValueError:
        return default
