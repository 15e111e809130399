"""Notice before a squeeze or freeze: what is new for a pod with a capacity file waits until its time is over. Pure.

The former limits stay in force meanwhile, and the file shows what will follow. A pod delays a step by ``notice_s`` once
and no longer, whatever else is decided in that time: the time runs from the first announcement.
"""

from collections.abc import Collection

from msgspec.structs import replace

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
        at_s = now + notice_s if known is None else known.at_s
        if now < at_s:
            response = Response.FREEZE if freezes else Response.SQUEEZE
            waiting[uid] = AnnouncedStep(response=response, at_s=at_s, squeeze=squeeze)
    if not waiting:
        return wanted
    # Of these pods only what was in force already.
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
