"""From shortages to victims in one pass: credits for pods that are ending, candidates that cannot help, limits. Pure.

Hard shortages are first, each with as many victims as it needs and the limits allow. Of the soft ones only the
shortage whose victim ranks first is granted one, and only in a pass without another eviction: its effect is measured
first.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, final

from msgspec import Struct

from reconciler.actuators.holds import pod_hold
from reconciler.responses.eviction.config import EvictionConfig, TriggerConfig
from reconciler.responses.eviction.exemptions import exemption_reason
from reconciler.responses.eviction.limits import (
    EvictionHistory,
    cooldown_left,
    owner_of,
    owner_room,
    retry_block,
    room,
    unasked_block,
)
from reconciler.responses.eviction.resources import EvictedResource, format_amount, usage_of
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import Shortage
from reconciler.responses.eviction.triggers.table import TRIGGERS
from reconciler.responses.eviction.victims import Candidate, Ranking, pick_minimum, rank, render
from reconciler.runtime import format as fmt
from state.evidence import NODE, PodSnapshot
from state.model import Hold, PodClass


class RefusalReason(StrEnum):
    """Why no pod is evicted for a shortage."""

    STARTING = "starting"
    HELD = "held"
    COOLING = "cooling"
    COMING = "coming"
    NOBODY = "nobody"
    NOT_THEIRS = "not-theirs"
    UNKNOWN = "unknown"
    LIMIT = "limit"
    UNASKED = "unasked"
    CLOSING = "closing"
    TURN = "turn"

    @property
    def transient(self) -> bool:
        """True for what follows from an eviction that is already known, or from the step before it."""
        return self in {RefusalReason.COOLING, RefusalReason.COMING, RefusalReason.TURN, RefusalReason.CLOSING}


class EvictionRefusal(Struct, frozen=True, kw_only=True):
    """A shortage for which no pod is evicted now, the reason, and the ranking as far as computed."""

    trigger: str
    subject: str
    good: EvictedResource
    why: RefusalReason
    reason: str
    evidence: str
    ranking: tuple[str, ...] = ()


class Victim(NamedTuple):
    """A pod to evict, the shortage, and the whole ranking."""

    pressure: Shortage
    candidate: Candidate
    ranking: tuple[str, ...]


class Selection(NamedTuple):
    """The victims of a pass, and why no other pod is one."""

    picks: list[Victim]
    refusals: list[EvictionRefusal]


class PendingRelease(NamedTuple):
    """A pod that is ending: the trigger (empty: not evicted by bypassd), the expected relief, and its place."""

    trigger: str = ""
    subject: str = NODE
    frees: Mapping[str, float] = {}


class SelectionContext(Struct, frozen=True, kw_only=True):
    """Input of a pass. ``leaving`` by uid. ``holds`` by target, those that are in force.

    ``closing_s``: how long soft shortages still wait for the effect of closing the node to new BE pods.
    """

    config: EvictionConfig
    scene: EvictionContext
    past: EvictionHistory
    leaving: Mapping[str, PendingRelease]
    holds: Mapping[str, Hold]
    started_s: float
    closing_s: float = 0.0


class _ShortagePlan(NamedTuple):
    """The victims of one shortage, before the limits."""

    weighed: Ranking
    chosen: list[Candidate]


def select(grounds: SelectionContext, pressures: Sequence[Shortage]) -> Selection:
    """The victims of this pass. Hard shortages are handled in the order of ``pressures``."""
    return _Selector(grounds).run(pressures) if pressures else Selection([], [])


@final
class _Selector:
    def __init__(self, grounds: SelectionContext) -> None:
        self._grounds = grounds
        scene, past, config = grounds.scene, grounds.past, grounds.config
        self._room = room(config.limits, past, scene.now)
        self._owners = owner_room(config.limits, past, scene.frame)
        self._leaving = dict(grounds.leaving)
        pods = scene.frame.pods
        exempt = {uid: reason for uid, pod in pods.items() if (reason := self._exempt(pod)) is not None}
        resting = {
            uid: reason
            for uid in pods.keys() - exempt.keys()
            if (reason := retry_block(config.limits, past, uid, scene.now)) is not None
        }
        self._spared = exempt | resting
        self._unasked = {
            uid
            for uid in resting
            # An online pod's order is not critical: it would be refused again at once.
            if pods[uid].pod_class is PodClass.RECLAIMED
            and retry_block(config.limits, past, uid, scene.now, critical=True) is None
        }
        self._no_budget = unasked_block(config.limits, past, scene.now)
        self._refused = {
            uid: f"its disruption budget cannot be asked: {self._no_budget}"
            for uid, pod in pods.items()
            if self._no_budget is not None and pod.pod_class is not PodClass.RECLAIMED
        }
        self._picks: list[Victim] = []
        self._refusals: list[EvictionRefusal] = []

    def run(self, pressures: Sequence[Shortage]) -> Selection:
        for pressure in pressures:
            if pressure.hard:
                plan = self._plan(pressure)
                if plan is not None:
                    self._take(pressure, plan)
        self._soft([pressure for pressure in pressures if not pressure.hard])
        return Selection(self._picks, self._refusals)

    def _soft(self, pressures: Sequence[Shortage]) -> None:
        plans = [(pressure, plan) for pressure in pressures if (plan := self._plan(pressure)) is not None]
        if not plans:
            return
        first = min(plans, key=lambda pair: pair[1].chosen[0].order)
        for pressure, plan in plans:
            if self._picks or pressure is not first[0]:
                message = "another pod is evicted in this pass; waiting for the effect"
                if not self._picks:
                    message = f"{first[1].chosen[0].pod.title} ranks first"
                self._refuse(pressure, RefusalReason.TURN, message, self._lines(pressure, plan, (), message))
        if not self._picks:
            pressure, plan = first
            self._take(pressure, plan, most=1)

    def _plan(self, pressure: Shortage) -> _ShortagePlan | None:
        """The victims for it; None, with a refusal, when there is none."""
        config, scene = self._grounds.config, self._grounds.scene
        if (blocked := self._blocked(pressure)) is not None:
            self._refuse(pressure, *blocked)
            return None
        coming, who = self._coming(pressure)
        need = None if pressure.need is None else pressure.need - coming
        if who and (need is None or need <= 0):
            given = "their usage" if need is None else format_amount(pressure.good, coming)
            self._refuse(
                pressure, RefusalReason.COMING, f"eviction in progress: {', '.join(who)}; {given} will be freed"
            )
            return None
        features = TRIGGERS[pressure.trigger].features if pressure.trigger in TRIGGERS else ()
        spared: Mapping[str, str] = self._spared
        if pressure.critical:
            spared = {uid: reason for uid, reason in spared.items() if uid not in self._unasked}
            spared = {**self._refused, **spared}
        weighed = rank(config, scene, pressure, need=need, spared=spared, features=features)
        classes = "/".join(cls for cls in config.classes if cls in pressure.classes)
        if not weighed.candidates:
            why, message = RefusalReason.NOBODY, "no pod may be evicted for this"
            if weighed.unknown:
                why, message = (
                    RefusalReason.UNKNOWN,
                    f"usage of {weighed.unknown} candidates is unknown",
                )
            elif weighed.small:
                why, message = (
                    RefusalReason.NOT_THEIRS,
                    f"evicting {classes} pods cannot fix it: none uses enough of the resource",
                )
            self._refuse(pressure, why, message, render(pressure, weighed, (), {}))
            return None
        if need is not None and not pressure.named and weighed.relief * 100 < need * config.owned_percent:
            freed, lacking = format_amount(pressure.good, weighed.relief), format_amount(pressure.good, need)
            message = (
                f"evicting {classes} pods cannot fix it: all candidates use {freed} together, {lacking} must be freed"
            )
            waiting = {candidate.pod.uid: "cannot fix it" for candidate in weighed.candidates}
            self._refuse(pressure, RefusalReason.NOT_THEIRS, message, render(pressure, weighed, (), waiting))
            return None
        chosen = pick_minimum(weighed.candidates, need, self._owners, owner_of)
        if not chosen:
            message = "eviction limit of their owners reached"
            waiting = {candidate.pod.uid: message for candidate in weighed.candidates}
            self._refuse(pressure, RefusalReason.LIMIT, message, render(pressure, weighed, (), waiting))
            return None
        return _ShortagePlan(weighed, chosen)

    def _take(self, pressure: Shortage, plan: _ShortagePlan, most: int | None = None) -> None:
        """Add the victims that the limits allow."""
        free = max(0, self._room.count - len(self._picks))
        going = plan.chosen[: free if most is None else min(free, most)]
        message = self._room.reason if free < len(plan.chosen) else "one per pass"
        if not going:
            self._refuse(pressure, RefusalReason.LIMIT, message, self._lines(pressure, plan, (), message))
            return
        ranking = self._lines(pressure, plan, going, message)
        for candidate in going:
            self._picks.append(Victim(pressure, candidate, ranking))
            self._leaving[candidate.pod.uid] = PendingRelease(
                pressure.trigger, pressure.subject, {pressure.good: candidate.relief}
            )
            self._spared[candidate.pod.uid] = "already selected"
            self._unasked.discard(candidate.pod.uid)
            self._owners[owner_of(candidate.pod)] -= 1

    def _lines(
        self, pressure: Shortage, plan: _ShortagePlan, going: Sequence[Candidate], message: str
    ) -> tuple[str, ...]:
        waiting = {candidate.pod.uid: message for candidate in plan.chosen if candidate not in going}
        return render(pressure, plan.weighed, going, waiting)

    def _refuse(self, pressure: Shortage, why: RefusalReason, reason: str, ranking: tuple[str, ...] = ()) -> None:
        self._refusals.append(
            EvictionRefusal(
                trigger=pressure.trigger,
                subject=pressure.subject,
                good=pressure.good,
                why=why,
                reason=reason,
                evidence=pressure.evidence,
                ranking=ranking,
            )
        )

    def _blocked(self, pressure: Shortage) -> tuple[RefusalReason, str] | None:
        """The reason that blocks every eviction for it."""
        grounds, now = self._grounds, self._grounds.scene.now
        since = now - grounds.started_s
        quiet = grounds.config.limits.quiet_s
        if since < quiet:
            return RefusalReason.STARTING, f"quiet period after start: {fmt.duration(math.ceil(quiet - since))} left"
        hold = pod_hold(grounds.holds)
        if hold is not None:
            return RefusalReason.HELD, f"the node is on hold by {hold.by}: {hold.reason}"
        config: TriggerConfig = getattr(grounds.config.triggers, pressure.trigger)
        rest = cooldown_left(grounds.past, pressure.trigger, config.cooldown_s, now)
        if rest > 0:
            return RefusalReason.COOLING, f"cooldown after the last eviction: {fmt.duration(math.ceil(rest))} left"
        if not pressure.critical and self._no_budget is not None:
            message = f"disruption budgets cannot be asked, and no online pod is in danger: {self._no_budget}"
            return RefusalReason.UNASKED, message
        left = grounds.closing_s
        # An online pod that suffers (a rule's request) is not helped by fewer BE pods later.
        if left > 0 and not pressure.hard and pressure.trigger in TRIGGERS and TRIGGERS[pressure.trigger].closes:
            seconds = fmt.duration(math.ceil(left))
            return RefusalReason.CLOSING, f"no new BE pods on this node first; its effect is awaited for {seconds}"
        return None

    def _coming(self, pressure: Shortage) -> tuple[float, list[str]]:
        """The relief expected without a further eviction, and from which pods.

        A shortage of unknown size waits for every eviction ordered for its trigger.
        """
        total, who = 0.0, []
        for uid, going in sorted(self._leaving.items()):
            pod = self._grounds.scene.frame.pods.get(uid)
            awaited = pressure.need is None and going.trigger == pressure.trigger
            if pressure.named and not awaited and pressure.only is not None and uid not in pressure.only:
                continue
            amount = self._gives(pressure, pod, going)
            if amount > pressure.least or pressure.named or awaited:
                total += amount
                who.append(f"pod {uid}" if pod is None else pod.title)
        return total, who

    def _gives(self, pressure: Shortage, pod: PodSnapshot | None, going: PendingRelease) -> float:
        """The relief from a pod that is ending: its usage, or the expected relief if that is more.

        A pod whose main containers have ended uses nothing, and a mean over a window does not show that yet.
        """
        holds = None if pod is None else usage_of(pressure.good, pod, pressure.subject, self._grounds.scene)
        hoped = going.frees.get(pressure.good, 0.0)
        if pressure.subject in {going.subject, NODE}:
            return hoped if holds is None else max(holds, hoped)
        if holds is not None or pod is None:
            return holds or 0.0
        return hoped

    def _exempt(self, pod: PodSnapshot) -> str | None:
        grounds = self._grounds
        return exemption_reason(pod, grounds.config.spared, grounds.config.classes, grounds.scene.frame, grounds.holds)
