"""All steps in force as one `Restrictions` value; of two that bound the same thing, the tighter. Pure.

**Notice**: a new squeeze or freeze of a pod with a capacity file waits until its time is over. The former limits remain
in force meanwhile, and the file shows what will follow.
"""

from collections.abc import Collection

from msgspec.structs import replace

from reconciler.responses.ladder import EscalationMemory, EscalationState, in_force
from reconciler.responses.steps import Dimension, ResponseStep
from reconciler.runtime.format import duration
from state.evidence import SampleFrame
from state.measures import AnnouncedStep, Response, Restrictions, SqueezeLimit


def announced(
    wanted: Restrictions, before: Restrictions, listeners: Collection[str], now: float, notice_s: float
) -> Restrictions:
    """The restrictions in force now. ``before``: the last result. ``listeners``: uids of pods that get notice."""
    waiting: dict[str, AnnouncedStep] = {}
    for uid in sorted(listeners):
        freezes = uid in wanted.frozen and uid not in before.frozen
        squeeze = wanted.squeezed.get(uid)
        if not (freezes or _is_tighter(squeeze, before.squeezed.get(uid))):
            continue
        known = before.announced.get(uid)
        # From the first announcement: whatever else is decided meanwhile, a pod delays a step once.
        at_s = now + notice_s if known is None else known.at_s
        if now < at_s:
            response = Response.FREEZE if freezes else Response.SQUEEZE
            waiting[uid] = AnnouncedStep(response=response, at_s=at_s, squeeze=squeeze)
    if not waiting:
        return wanted
    # Pods with notice keep what was in force already.
    squeezed = {uid: limit for uid, limit in wanted.squeezed.items() if uid not in waiting}
    squeezed |= {uid: limit for uid, limit in before.squeezed.items() if uid in waiting}
    frozen = {uid: reason for uid, reason in wanted.frozen.items() if uid not in waiting or uid in before.frozen}
    return replace(wanted, squeezed=dict(sorted(squeezed.items())), frozen=frozen, announced=waiting)


def _is_tighter(limit: SqueezeLimit | None, before: SqueezeLimit | None) -> bool:
    if limit is None:
        return False
    known = before if before is not None else SqueezeLimit()
    pairs = (
        (limit.cpu_milli, known.cpu_milli),
        (limit.memory_high_bytes, known.memory_high_bytes),
        (limit.disk_bps, known.disk_bps),
    )
    return any(mine is not None and (theirs is None or mine < theirs) for mine, theirs in pairs)


def demands_of(memory: EscalationMemory, frame: SampleFrame) -> Restrictions:
    """The restrictions that the responses in force require."""
    budget: tuple[int, str] | None = None
    cache: tuple[int, str] | None = None
    squeezed: dict[str, SqueezeLimit] = {}
    frozen: dict[str, str] = {}
    for climb, step in in_force(memory):
        if step.what is Dimension.BUDGET:
            budget = _tighter(budget, step, climb)
        elif step.what is Dimension.CACHE:
            cache = _tighter(cache, step, climb)
        elif step.response is Response.FREEZE and step.suspect is not None:
            frozen[step.suspect] = f"{_for(climb)}, at most {duration(step.amount)}"
        elif step.response is Response.SQUEEZE and step.suspect is not None:
            squeezed[step.suspect] = _squeezed(squeezed.get(step.suspect, SqueezeLimit()), step, climb, frame)
    return Restrictions(
        budget_milli=None if budget is None else budget[0],
        budget_reason="" if budget is None else budget[1],
        squeezed=dict(sorted(squeezed.items())),
        frozen=dict(sorted(frozen.items())),
        cache_percent=None if cache is None else cache[0],
        cache_reason="" if cache is None else cache[1],
    )


def _tighter(known: tuple[int, str] | None, step: ResponseStep, climb: EscalationState) -> tuple[int, str]:
    mine = int(step.amount), _for(climb)
    return mine if known is None or mine[0] < known[0] else known


def _squeezed(known: SqueezeLimit, step: ResponseStep, climb: EscalationState, frame: SampleFrame) -> SqueezeLimit:
    reason = f"{known.reason}; {_for(climb)}" if known.reason and _for(climb) not in known.reason else _for(climb)
    amount = int(step.amount)
    match step.what:
        case Dimension.CPU:
            return replace(known, cpu_milli=_least(known.cpu_milli, amount), reason=reason)
        case Dimension.MEMORY:
            return replace(known, memory_high_bytes=_least(known.memory_high_bytes, amount), reason=reason)
        case _:
            return replace(known, disk_bps=_least(known.disk_bps, amount), disks=frame.disks, reason=reason)


def _least(known: int | None, mine: int) -> int:
    return mine if known is None else min(known, mine)


def _for(climb: EscalationState) -> str:
    return f"for victim {climb.title} ({climb.rule})"
