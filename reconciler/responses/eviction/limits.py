"""How many pods may be evicted: past evictions, and the allowance left. Pure.

The history uses the monotonic clock, which cannot be set; `saved_history` and `load_history` carry it over a restart
by the wall clock, where a record from the future (the clock was set back) counts as of now.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.responses.eviction.config import LimitsConfig
from reconciler.runtime.format import duration
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome
from state.evidence import NODE, PodSnapshot, SampleFrame

KEEP_S: Final = 3600.0
"""No pause of the configuration is longer."""
_LOST_S: Final = 60.0
"""An order of which no case has come in this time was never begun (a crash just after it was given)."""
_MINUTE_S: Final = 60.0
_TEN_MINUTES_S: Final = 600.0
_COUNTED: Final = frozenset({None, EvictionOutcome.DONE, EvictionOutcome.FAILED})
"""Orders that count: those under way, done, and failed, for a failed one may have killed a part. Not the refused."""


class EvictionRecord(Struct, frozen=True, kw_only=True):
    """One order and its result. ``ended_s`` is valid once it has an outcome.

    ``frees``: its expected relief, for ``subject``. ``dying``: it has failed, and its victim is partly ended.
    ``unasked``: why no disruption budget could be asked (`EvictionCase.unguarded`). ``returned``: the kubelet has
    started the pod again.
    """

    id: str
    uid: str
    owner: str
    trigger: str
    at_s: float
    outcome: EvictionOutcome | None = None
    ended_s: float = 0.0
    frees: Mapping[str, float] = {}
    subject: str = NODE
    dying: bool = False
    unasked: str = ""
    returned: bool = False

    @property
    def open(self) -> bool:
        """True while its victim may still be ending."""
        return self.outcome is None


class EvictionHistory(Struct, frozen=True, kw_only=True):
    """All that was ordered in the last hour, the oldest first. As it is kept, times are seconds since the epoch."""

    turns: tuple[EvictionRecord, ...] = ()

    def leaving(self, config: LimitsConfig, frame: SampleFrame) -> dict[str, EvictionRecord]:
        """Victims being ended, by uid: of open turns, and partly ended ones until their end or the next attempt.

        A case that waits for a disk ends as soon as the disk responds; it does not justify another victim.
        """
        return {
            turn.uid: turn
            for turn in self.turns
            if turn.open or (turn.dying and turn.uid in frame.pods and frame.at_s - turn.ended_s < config.retry_s)
        }


def owner_of(pod: PodSnapshot) -> str:
    """The owner whose pods count together: a controller; a pod without one is its own."""
    return f"{pod.namespace or ''}/{pod.owner or pod.title}"


def turn_of(order: EvictionOrder, at_s: float) -> EvictionRecord:
    return EvictionRecord(
        id=order.id,
        uid=order.uid,
        owner=f"{order.namespace or ''}/{order.owner or order.title}",
        trigger=order.cause,
        at_s=at_s,
        frees=order.frees,
        subject=order.subject,
    )


def update(past: EvictionHistory, cases: Iterable[EvictionCase], frame: SampleFrame) -> EvictionHistory:
    """The history updated with the cases; records older than an hour are dropped, unless still open."""
    turns = {turn.id: turn for turn in past.turns}
    open_cases: set[str] = set()
    for case in cases:
        order = case.order
        known = turns.get(order.id)
        if case.open:
            open_cases.add(order.id)
        if known is None:
            # Of an earlier run without saved history: by the wall clock, and never of the future.
            known = turn_of(order, _then(frame, order.decided_s))
        if known.outcome is not case.outcome:
            ended_s = min(frame.at_s, _then(frame, case.ended_s)) if case.ended_s else frame.at_s
            known = replace(
                known,
                outcome=case.outcome,
                ended_s=0.0 if case.open else ended_s,
                dying=case.dying,
                unasked=case.unasked if case.unguarded else "",
                returned=case.rounds > 0,
            )
        turns[order.id] = known
    kept = []
    for turn in turns.values():
        if turn.open and turn.id not in open_cases and frame.at_s - turn.at_s > _LOST_S:
            turn = replace(turn, outcome=EvictionOutcome.ABANDONED, ended_s=frame.at_s)  # noqa: PLW2901
        if turn.open or frame.at_s - max(turn.at_s, turn.ended_s) <= KEEP_S:
            kept.append(turn)
    return EvictionHistory(turns=tuple(sorted(kept, key=lambda turn: (turn.at_s, turn.id))))


def cooldown_left(past: EvictionHistory, trigger: str, cooldown_s: float, now: float) -> float:
    """Seconds for which this trigger waits for the effect of its last success; 0.0: it does not."""
    ended = [turn.ended_s for turn in past.turns if turn.trigger == trigger and turn.outcome is EvictionOutcome.DONE]
    return max(0.0, max(ended) + cooldown_s - now) if ended else 0.0


def retry_block(
    config: LimitsConfig, past: EvictionHistory, uid: str, now: float, *, critical: bool = False
) -> str | None:
    """Why a pod that was ordered before is not ordered again now; None: it may be.

    ``critical``: for a shortage for which a pod is evicted although no disruption budget can be asked.
    """
    for turn in reversed(past.turns):
        if turn.uid != uid:
            continue
        ago = max(0.0, now - turn.ended_s)
        match turn.outcome:
            case None:
                return "is being evicted"
            case EvictionOutcome.REFUSED if critical and turn.unasked:
                return None
            case EvictionOutcome.FAILED if turn.returned and ago < max(config.again_s, config.retry_s):
                return f"was ended {duration(ago)} ago and restarted in place"
            case EvictionOutcome.REFUSED | EvictionOutcome.FAILED:
                word = "was refused" if turn.outcome is EvictionOutcome.REFUSED else "failed"
                return f"its eviction {word} {duration(ago)} ago" if ago < config.retry_s else None
            case EvictionOutcome.DONE:
                return f"was evicted {duration(ago)} ago and restarted in place" if ago < config.again_s else None
            case _:
                return None
    return None


def unasked_block(config: LimitsConfig, past: EvictionHistory, now: float) -> str | None:
    """Why no disruption budget can be asked at present; None: they can, or it is time to try again.

    Two pods whose budgets could not be asked, and none since whose eviction went on: further orders would be refused
    like these. A single one may be due to that pod.
    """
    refused: dict[str, str] = {}
    for turn in sorted(past.turns, key=lambda turn: turn.ended_s, reverse=True):
        if turn.open or now - turn.ended_s >= config.retry_s:
            continue
        if turn.outcome is EvictionOutcome.REFUSED and turn.unasked:
            refused.setdefault(turn.uid, turn.unasked)
        elif not turn.unasked and turn.outcome in {EvictionOutcome.DONE, EvictionOutcome.REFUSED}:
            break
        if len(refused) > 1:
            return next(iter(refused.values()))
    return None


class Allowance(Struct, frozen=True, kw_only=True):
    """How many pods may be evicted in this pass, and which limit applies."""

    count: int
    reason: str


def room(config: LimitsConfig, past: EvictionHistory, now: float) -> Allowance:
    """The smallest of the caps."""
    minute, ten = (_counted(past, now - length) for length in (_MINUTE_S, _TEN_MINUTES_S))
    return min(
        Allowance(count=config.per_pass, reason="limit per pass"),
        Allowance(count=config.per_minute - minute, reason=f"limit per minute, {minute} of {config.per_minute} used"),
        Allowance(
            count=config.per_10_minutes - ten, reason=f"limit per 10 minutes, {ten} of {config.per_10_minutes} used"
        ),
        key=lambda allowance: allowance.count,
    )


def owner_room(config: LimitsConfig, past: EvictionHistory, frame: SampleFrame) -> dict[str, int]:
    """How many pods may be evicted, by owner of the pods on this node.

    The share is of the pods that exist now and those that were evicted in the last ten minutes.
    """
    since = frame.at_s - _TEN_MINUTES_S
    gone: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for turn in past.turns:
        if _counts(turn, since):
            counts[turn.owner] = counts.get(turn.owner, 0) + 1
            gone.setdefault(turn.owner, set()).add(turn.uid)
    texts: dict[str, set[str]] = {}
    for pod in frame.pods.values():
        texts.setdefault(owner_of(pod), set()).add(pod.uid)
    numbers: dict[str, int] = {}
    for owner, uids in texts.items():
        there_were = len(uids | gone.get(owner, set()))
        most = min(config.per_owner, math.ceil(there_were * config.per_owner_percent / 100))
        numbers[owner] = most - counts.get(owner, 0)
    return numbers


def saved_history(past: EvictionHistory, frame: SampleFrame) -> EvictionHistory:
    """The past for the store, by the wall clock."""
    return _shifted(past, frame.wall_s - frame.at_s)


def load_history(past: EvictionHistory, *, at_s: float, wall_s: float) -> EvictionHistory:
    """The past from the store. What seems to be of the future is of now: a clock that was set back lifts no limit."""
    back = _shifted(past, at_s - wall_s)
    return EvictionHistory(
        turns=tuple(replace(turn, at_s=min(turn.at_s, at_s), ended_s=min(turn.ended_s, at_s)) for turn in back.turns)
    )


def _shifted(past: EvictionHistory, by: float) -> EvictionHistory:
    return EvictionHistory(
        turns=tuple(replace(turn, at_s=turn.at_s + by, ended_s=turn.ended_s + by) for turn in past.turns)
    )


def _then(frame: SampleFrame, wall_s: float) -> float:
    """A moment of the wall clock on the monotonic one, at the latest now."""
    return frame.at_s - max(0.0, frame.wall_s - wall_s)


def _counts(turn: EvictionRecord, since: float) -> bool:
    """Whether it counts in the time after ``since``: from the order to as long after its end.

    A long grace does not circumvent a cap.
    """
    return turn.outcome in _COUNTED and (turn.open or max(turn.at_s, turn.ended_s) > since)


def _counted(past: EvictionHistory, since: float) -> int:
    return sum(_counts(turn, since) for turn in past.turns)
