"""The size of BE's share in mode dynamic: down at once by much, up slowly by little, unchanged in between. Pure.

The law is AIMD with a dead band. Misses of any single online pod above the mark shrink BE's ways and bandwidth; a
memory bus above its mark shrinks the bandwidth only (fewer ways would make more traffic), and only while BE is part of
the traffic: BE is not responsible for what online work needs itself. All readings must be calm for a while before each
step up, and an unknown reading is not calm.

Bandwidth is new at each step; misses are not, as they are counted for some seconds of each minute. A count from before
the ways last changed does not show the effect of that change: it moves them neither down nor up again, but while it is
high it still keeps BE from growing.

Source: rubik's dynCache (+5, -50, a band between its two marks in which nothing moves); Heracles (bandwidth first).
rubik treats a missing miss count as calm, and takes misses in percent of references, which is unreliable with few
references.
"""

from collections.abc import Mapping

from msgspec import Struct

from reconciler.runtime.format import number, percent
from state.cache import Contention, LevelControl, ShareLevel, ShareLevels
from state.evidence import Sample


class LevelState(Struct, frozen=True, kw_only=True):
    """State of BE's share.

    On the caller's clock: ``calm_since``, None: not calm; ``moved_at``: when its ways last changed, or would have but
    for their bounds, None: never.
    """

    level: ShareLevel
    calm_since: float | None = None
    moved_at: float | None = None
    reason: str = ""


def begin(levels: ShareLevels) -> LevelState:
    """BE starts low: it has shown nothing yet."""
    return LevelState(level=levels.low, reason="start at level low")


def step(state: LevelState, strain: Contention, now: float, law: LevelControl, levels: ShareLevels) -> LevelState:
    """The next state. The answer stays within the levels low and high, also when these have changed."""
    cache, memory = state.level.cache_percent, state.level.mba_percent
    bandwidth = strain.bandwidth if strain.age_s <= law.stale_s else None
    misses = {uid: sample for uid, sample in strain.misses.items() if sample.age_s <= law.miss_stale_s}
    fresh = {uid for uid, sample in misses.items() if state.moved_at is None or now - sample.age_s > state.moved_at}
    missing = {
        uid: sample.value for uid, sample in misses.items() if uid in fresh and sample.value > law.miss_high_per_1000
    }
    full = {
        domain: used
        for domain, used in (bandwidth or {}).items()
        if used > law.bandwidth_high_percent and strain.reclaimed.get(domain, 100.0) >= law.suspect_percent
    }
    if strain.online and (missing or full):
        memory -= law.step_down_percent
        if missing:
            cache -= law.step_down_percent
            worst = max(sorted(missing), key=lambda uid: missing[uid])
            reason = f"{worst}: {number(missing[worst])} cache misses per 1000 instructions"
        else:
            domain = max(sorted(full), key=lambda item: full[item])
            reason = f"memory bandwidth of domain {domain}: {percent(round(full[domain]))} in use"
        return LevelState(
            level=_within(cache, memory, levels), moved_at=now if missing else state.moved_at, reason=reason
        )
    level = _within(cache, memory, levels)
    worry = _worry(strain, bandwidth, misses, law)
    if worry:
        return LevelState(level=level, moved_at=state.moved_at, reason=worry)
    since = now if state.calm_since is None else state.calm_since
    waiting = LevelState(level=level, calm_since=since, moved_at=state.moved_at, reason="below the thresholds, waiting")
    if now - since < law.calm_s:
        return waiting
    up = law.step_up_percent
    grown = _within(cache + up, memory + up, levels)
    if grown == level:
        return waiting
    if strain.online and len(fresh) < len(misses):
        return LevelState(
            level=level,
            calm_since=since,
            moved_at=state.moved_at,
            reason="below the thresholds, waiting for newer cache miss counts",
        )
    return LevelState(level=grown, calm_since=now, moved_at=now, reason="calm")


def _worry(
    strain: Contention, bandwidth: Mapping[int, float] | None, misses: Mapping[str, Sample], law: LevelControl
) -> str:
    """Why it is not calm; empty: it is. Either all bandwidths must be known, or the misses of all online pods."""
    if strain.online == 0:
        return ""
    every_domain = bool(bandwidth) and not strain.blind
    if not every_domain and len(misses) < strain.online:
        return "bandwidth or cache misses not fully known: no increase"
    calm = all(sample.value < law.miss_low_per_1000 for sample in misses.values()) and all(
        used < law.bandwidth_low_percent for used in (bandwidth or {}).values()
    )
    return "" if calm else "above the lower thresholds"


def _within(cache: int, memory: int, levels: ShareLevels) -> ShareLevel:
    low, high = levels.low, levels.high
    return ShareLevel(
        cache_percent=min(high.cache_percent, max(low.cache_percent, cache)),
        mba_percent=min(high.mba_percent, max(low.mba_percent, memory)),
    )
