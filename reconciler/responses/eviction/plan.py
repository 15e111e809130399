"""One pass: triggers, victims, limits, and a decision. Pure: the same frames and cases give the same orders.

A dry run decides exactly as an enforced one would at the same moment: its orders are in `EvictionDecision.would`. Where
some triggers are enforced and others are not, orders are decided without the others, and ``would`` with all.

The reason of an order under way may expire, which no longer justifies ending a pod. Unknown is not expired: orders of
an earlier run of the daemon remain valid.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.actuators.holds import active
from reconciler.responses.eviction.config import EvictionConfig, TriggerConfig
from reconciler.responses.eviction.exemptions import name_of
from reconciler.responses.eviction.limits import EvictionHistory, turn_of, update
from reconciler.responses.eviction.resources import EvictedResource, usage_of
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.select import EvictionRefusal, PendingRelease, SelectionContext, Victim, select
from reconciler.responses.eviction.triggers.base import Shortage, TriggerResult
from reconciler.responses.eviction.triggers.named import NAME, RequestedVictim, pressure_of
from reconciler.responses.eviction.triggers.table import TRIGGERS
from reconciler.signals.history import History
from state.closing import NodeClosing
from state.eviction import EvictionCase, EvictionOrder
from state.evidence import NODE, RuleVerdict, SampleFrame, Verdict
from state.model import Hold, PodClass

EASED_S: Final = 10.0
"""A pressure absent for this long is over: a shorter time would order and withdraw in turn."""

Suffering = Collection[tuple[str, str]]
"""Rule and title of victims: without further words, of each that is not known to be well."""
_OVER_S: Final = 60.0
"""A state that has been absent for this long is over; a faster change counts as one state, reported once."""
_ASKED_S: Final = 60.0
"""A rule's request is granted in some pass of this time, or lapses."""
_FREES: Final = (EvictedResource.CPU, EvictedResource.MEMORY)


class EvictionReason(Struct, frozen=True, kw_only=True):
    """Of one order. ``named``: where a rule named the pod. ``pressed_s``: when it was last so (monotonic seconds)."""

    trigger: str
    subject: str
    uid: str
    pressed_s: float
    named: RequestedVictim | None = None


def still_active(
    reasons: Mapping[str, EvictionReason], readings: Mapping[str, TriggerResult], ill: Suffering | None, now: float
) -> dict[str, EvictionReason]:
    """The reasons, by order, now. ``ill`` None: the state of the rules' victims is unknown."""
    return {
        order: replace(reason, pressed_s=now) if _presses(reason, readings, ill) else reason
        for order, reason in reasons.items()
    }


def expired(
    reasons: Mapping[str, EvictionReason], readings: Collection[str], well: Suffering, now: float
) -> dict[str, str]:
    """The orders whose reason no longer applies, with a text. ``readings``: the triggers that are on.

    ``well``: rule and title of each victim that is known to be well.
    """
    return {
        order: _why_expired(reason, readings, well)
        for order, reason in reasons.items()
        if now - reason.pressed_s >= EASED_S
    }


def _why_expired(reason: EvictionReason, readings: Collection[str], well: Suffering) -> str:
    if (named := reason.named) is not None:
        if (named.rule, named.victim) in well:
            return f"{named.victim} has recovered"
        return f"rule {named.rule} no longer acts for {named.victim}"
    return "the shortage has ended" if reason.trigger in readings else f"trigger {reason.trigger} is off"


def _presses(reason: EvictionReason, readings: Mapping[str, TriggerResult], ill: Suffering | None) -> bool:
    if reason.trigger == NAME:
        named = reason.named
        return named is None or ill is None or (named.rule, named.victim) in ill
    reading = readings.get(reason.trigger)
    if reading is None:
        return False  # it was switched off
    # Without readings the shortage is unknown, which does not end an order.
    return not reading.known or any(
        shortage.subject == reason.subject and (shortage.only is None or reason.uid in shortage.only)
        for shortage in reading.pressures
    )


class EvictionDecision(Struct, frozen=True, kw_only=True):
    """Result of a pass. ``orders`` are to be carried out; ``would``: those of a dry run, newest ranking.

    ``over``: orders under way whose reason no longer applies, with the text; by id. ``readings``: the state of each
    enabled trigger. ``critical``: trigger and subject of the shortages that would kill online pods now. ``news``: lines
    for the log, of what has changed since. Between two passes a decision has no orders, none that expired and no news;
    the rest is unchanged.
    """

    orders: tuple[EvictionOrder, ...] = ()
    would: tuple[EvictionOrder, ...] = ()
    over: Mapping[str, str] = {}
    refusals: tuple[EvictionRefusal, ...] = ()
    pressures: tuple[Shortage, ...] = ()
    readings: Mapping[str, TriggerResult] = {}
    critical: frozenset[tuple[str, str]] = frozenset()
    news: tuple[str, ...] = ()


class Announced(Struct, frozen=True):
    """A line of the log, and when it was last so."""

    line: str
    at_s: float


class PendingRequest(Struct, frozen=True):
    """A suspect whose eviction a rule requests, and when it last did."""

    named: RequestedVictim
    at_s: float


class EvictionPlanState(Struct, frozen=True, kw_only=True):
    """What is remembered between passes. Only ``past`` is kept over a restart (`saved_history`, `initial_state`)."""

    started_s: float
    past: EvictionHistory = EvictionHistory()
    passed_s: float | None = None
    # Each trigger's own memory has its own type; only that trigger gets it back.
    triggers: Mapping[str, Mapping[str, Any]] = {}
    ending: Mapping[str, float] = {}
    """Since when each pod was seen terminating."""
    asked: Mapping[str, PendingRequest] = {}
    reasons: Mapping[str, EvictionReason] = {}
    """By order, for the orders of this run that are under way."""
    announced: Mapping[str, Announced] = {}
    last: EvictionDecision = EvictionDecision()


def initial_state(frame: SampleFrame, past: EvictionHistory = EvictionHistory()) -> EvictionPlanState:  # noqa: B008  # a frozen value
    """The memory of a daemon that starts now; ``past`` from `load_history`."""
    return EvictionPlanState(started_s=frame.at_s, past=past)


def signals_of(config: EvictionConfig, *, network: bool = True) -> frozenset[str]:
    """All signals that this needs: those of the triggers that are on, and what pods hold.

    ``network``: a rule may request an eviction for a lack of it.
    """
    if not config.enabled:
        return frozenset()
    wanted = {"cpu.use", "memory.rss", "memory.use"}
    for name in TRIGGERS:
        if _config_of(config, name).enabled:
            wanted |= set(TRIGGERS[name].signals)
            if name == "pool_load":
                wanted.add("cpu.wait_milli")
    if config.triggers.interference.enabled:
        wanted |= {"disk.read", "disk.write", "memory.bandwidth"}
        wanted |= {"net.receive", "net.transmit"} if network else set()
    return frozenset(wanted)


def decide(  # noqa: PLR0917  # all that a decision rests on, in the order in which it arises
    config: EvictionConfig,
    frame: SampleFrame,
    history: History,
    memory: EvictionPlanState | None = None,
    cases: Sequence[EvictionCase] = (),
    holds: Mapping[str, Hold] | None = None,
    named: Sequence[RequestedVictim] = (),
    findings: Sequence[RuleVerdict] | None = None,
) -> tuple[EvictionDecision, EvictionPlanState]:
    """The decision of this moment. ``history`` includes ``frame``.

    ``cases``: all that are open, and those that have ended since the last call (older ones do no harm). ``holds`` by
    target. ``named``: suspects whose eviction rules request; one request is valid for a minute, or until the victim is
    ok by the ``findings`` of the rules that enforce (None: unknown). A frame of a node on which nothing is enforced:
    all of it is a dry run.
    """
    memory = initial_state(frame) if memory is None else memory
    ill = None
    well: set[tuple[str, str]] = set()
    if findings is not None:
        ill = {(verdict.rule, verdict.title) for verdict in findings if verdict.verdict is not Verdict.OK}
        well = {(verdict.rule, verdict.title) for verdict in findings} - ill
    requests = {uid: request for uid, request in memory.asked.items() if _stands(request, ill, frame.at_s)}
    requests |= {victim.uid: PendingRequest(victim, frame.at_s) for victim in named}
    memory = replace(memory, past=update(memory.past, cases, frame), asked=requests)
    if not config.enabled:
        return EvictionDecision(), EvictionPlanState(started_s=memory.started_s, past=memory.past)
    if memory.passed_s is not None and 0 <= frame.at_s - memory.passed_s < config.interval_s:
        return replace(memory.last, orders=(), over={}, news=()), memory
    scene = EvictionContext(frame=frame, history=history, fresh_s=config.fresh_s)
    ending = {uid: memory.ending.get(uid, frame.at_s) for uid, pod in frame.pods.items() if pod.terminating}
    readings, kept = _read(config, scene, memory)
    pressures = [pressure for reading in readings.values() for pressure in reading.pressures]
    if config.triggers.interference.enabled:
        pressures += [pressure_of(request.named) for _, request in sorted(requests.items())]
    grounds = SelectionContext(
        config=config,
        scene=scene,
        past=memory.past,
        leaving=_leaving(config, frame, memory.past, ending),
        holds=active(holds.values(), frame.wall_s) if holds else {},
        started_s=memory.started_s,
    )
    everything = not frame.enforce or config.dry_run
    if frame.closing is not None and not everything:
        grounds = replace(grounds, closing_s=_closing_s(config, frame, frame.closing))
    dry = [shortage for shortage in pressures if everything or _config_of(config, shortage.trigger).dry_run]
    picks, refusals = select(grounds, [shortage for shortage in pressures if shortage not in dry])
    orders = tuple(_order(config, pick, scene) for pick in picks)
    would: tuple[EvictionOrder, ...] = ()
    if dry:
        # What is shown is what would be ordered once the node is closed: a dry run does not close it.
        shown, left = select(replace(grounds, closing_s=0.0), pressures)
        real = {order.uid for order in orders}
        would = tuple(
            _standing(_order(config, pick, scene), memory.last.would)
            for pick in shown
            if pick.pressure in dry and pick.candidate.pod.uid not in real
        )
        keys = {(shortage.trigger, shortage.subject, shortage.good) for shortage in dry}
        refusals = [
            *refusals,
            *(refusal for refusal in left if (refusal.trigger, refusal.subject, refusal.good) in keys),
        ]
    turns = tuple(turn_of(order, frame.at_s) for order in orders)
    under_way = {turn.id for turn in memory.past.turns if turn.open}
    reasons = {order: reason for order, reason in memory.reasons.items() if order in under_way}
    reasons = still_active(reasons, readings, ill, frame.at_s)
    decision = EvictionDecision(
        orders=orders,
        would=would,
        over=expired(reasons, readings, well, frame.at_s),
        refusals=tuple(refusals),
        pressures=tuple(pressures),
        readings=readings,
        critical=frozenset((shortage.trigger, shortage.subject) for shortage in pressures if shortage.critical),
    )
    for order in orders:
        named_by = requests[order.uid].named if order.cause == NAME else None
        reasons[order.id] = EvictionReason(
            trigger=order.cause, subject=order.subject, uid=order.uid, pressed_s=frame.at_s, named=named_by
        )
    announceds, news = _news(decision, memory.announced, frame.at_s)
    decision = replace(decision, news=news)
    return decision, EvictionPlanState(
        started_s=memory.started_s,
        past=EvictionHistory(turns=(*memory.past.turns, *turns)),
        passed_s=frame.at_s,
        triggers=kept,
        ending=ending,
        asked={uid: request for uid, request in requests.items() if uid not in {order.uid for order in orders}},
        reasons=reasons,
        announced=announceds,
        last=decision,
    )


def _read(
    config: EvictionConfig, scene: EvictionContext, memory: EvictionPlanState
) -> tuple[dict[str, TriggerResult], dict[str, Mapping[str, Any]]]:
    readings: dict[str, TriggerResult] = {}
    kept: dict[str, Mapping[str, Any]] = {}
    for name in TRIGGERS:
        own = _config_of(config, name)
        if own.enabled:
            readings[name], kept[name] = TRIGGERS[name].judge(own, scene, memory.triggers.get(name, {}))
    return readings, kept


def _config_of(config: EvictionConfig, trigger: str) -> TriggerConfig:
    trigger_config: TriggerConfig = getattr(config.triggers, trigger)
    return trigger_config


def _stands(request: PendingRequest, ill: Suffering | None, now: float) -> bool:
    """Whether a rule's request is still valid."""
    return now - request.at_s <= _ASKED_S and (ill is None or (request.named.rule, request.named.victim) in ill)


def _leaving(
    config: EvictionConfig, frame: SampleFrame, past: EvictionHistory, ending: Mapping[str, float]
) -> dict[str, PendingRelease]:
    """Pods that are releasing resources: victims, and pods that others end, for as long as that may take."""
    ours = past.leaving(config.limits, frame)
    releases = {uid: PendingRelease(turn.trigger, turn.subject, turn.frees) for uid, turn in ours.items()}
    for uid, since in ending.items():
        grace = frame.pods[uid].grace_s or 0.0
        if frame.at_s - since <= grace + config.credit_s:
            releases.setdefault(uid, PendingRelease())
    return releases


def _closing_s(config: EvictionConfig, frame: SampleFrame, closing: NodeClosing) -> float:
    """How long soft shortages still wait for the effect of closing the node to new BE pods."""
    since = frame.at_s if closing.closed_s is None else closing.closed_s
    return max(0.0, since + config.limits.closed_s - frame.at_s)


def _order(config: EvictionConfig, pick: Victim, scene: EvictionContext) -> EvictionOrder:
    pressure, pod, frame = pick.pressure, pick.candidate.pod, scene.frame
    frees = {str(good): value for good in _FREES if (value := usage_of(good, pod, NODE, scene)) is not None}
    frees[str(pressure.good)] = pick.candidate.relief
    return EvictionOrder(
        id=f"{frame.wall_s:.3f}-{pod.uid}",
        uid=pod.uid,
        title=pod.title,
        namespace=pod.namespace,
        name=name_of(pod),
        owner=pod.owner,
        cause=pressure.trigger,
        evidence=pressure.evidence,
        ranking=pick.ranking,
        subject=pressure.subject,
        frees=frees,
        grace_s=_grace_s(_config_of(config, pressure.trigger).grace_s, pod.grace_s),
        forced=pressure.hard,
        # Online pods are not saved by ending one of them.
        critical=pressure.critical and pod.pod_class is PodClass.RECLAIMED,
        decided_s=frame.wall_s,
    )


def _grace_s(most: float | None, own: float | None) -> float | None:
    """The pod's own time to end, but not more than the trigger gives."""
    if most is None:
        return own
    return most if own is None else min(most, own)


def _standing(order: EvictionOrder, before: Sequence[EvictionOrder]) -> EvictionOrder:
    """An order of a dry run that was there a pass ago is the same order, with the newest numbers."""
    for old in before:
        if (old.uid, old.cause, old.subject) == (order.uid, order.cause, order.subject):
            return replace(order, id=old.id, decided_s=old.decided_s)
    return order


def _news(
    decision: EvictionDecision, announceds: Mapping[str, Announced], now: float
) -> tuple[dict[str, Announced], tuple[str, ...]]:
    """Log lines for new orders, dry-run orders and refusals, and for their end; each once."""
    lines: dict[str, str] = {}
    for order in decision.orders:
        lines[f"evict {order.id}"] = f"{order.cause}: {order.title} is evicted: {order.evidence}"
    for order in decision.would:
        lines[f"would {order.cause} {order.subject} {order.uid}"] = (
            f"{order.cause}: {order.title} would be evicted (dry run): {order.evidence}"
        )
    for refusal in decision.refusals:
        if not refusal.why.transient:
            lines[f"{refusal.why} {refusal.trigger} {refusal.subject} {refusal.good}"] = (
                f"{refusal.trigger}: no pod evicted: {refusal.reason}; {refusal.evidence}"
            )
    for name, reading in decision.readings.items():
        if not reading.known:
            lines[f"blind {name}"] = f"{name}: cannot evaluate: {reading.words}"
    news = [line for key, line in lines.items() if key not in announceds]
    kept = {key: Announced(announceds[key].line if key in announceds else line, now) for key, line in lines.items()}
    for key, announced in announceds.items():
        if key in kept:
            continue
        if now - announced.at_s <= _OVER_S:
            kept[key] = announced
        elif not key.startswith("evict "):
            news.append(f"ended: {announced.line}")
    return kept, tuple(news)
