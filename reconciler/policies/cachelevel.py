"""How large BE's share is in mode dynamic: down at once by much, up slowly by little, still in between. Pure.

The law is AIMD with a dead band. Misses of any one online pod above the mark shrink BE's ways and bandwidth; a memory
bus above its mark shrinks the bandwidth only (fewer ways would make more traffic), and only while BE is part of the
traffic: what online work needs itself is nobody's fault. Everything must be calm for a while before each step up, and
what is not known is not calm.

Source: rubik's dynCache (+5, -50, between 10 and 20 percent of misses nothing moves); Heracles (bandwidth first). rubik
takes no miss reading at all for calm.
"""

from collections.abc import Mapping

from msgspec import Struct

from state.cache import Level, LevelLaw, Levels


class Strain(Struct, frozen=True, kw_only=True):
    """How online pods fare. Units: percents.

    ``misses``: of the references, by online pod, where something counts them. ``bandwidth``: in use by domain, of what
    its memory can do; None: not measured. ``reclaimed``: BE's part of what is in use, by domain. ``online``: how many
    online pods there are: where there are none, nobody can suffer. ``age_s``: of the reading.
    """

    misses: Mapping[str, float] = {}
    bandwidth: Mapping[int, float] | None = None
    reclaimed: Mapping[int, float] = {}
    online: int = 1
    age_s: float = 0.0


class LevelState(Struct, frozen=True, kw_only=True):
    """Where BE's share stands. ``calm_since``: on the caller's clock; None: it is not calm."""

    level: Level
    calm_since: float | None = None
    reason: str = ""


def begin(levels: Levels) -> LevelState:
    """BE starts low: it has shown nothing yet."""
    return LevelState(level=levels.low, reason="starts low")


def step(state: LevelState, strain: Strain, now: float, law: LevelLaw, levels: Levels) -> LevelState:
    """The next state. The answer stays within the levels low and high, also when these have changed."""
    cache, memory = state.level.cache_percent, state.level.mba_percent
    fresh = strain.age_s <= law.stale_s
    missing = {uid: miss for uid, miss in strain.misses.items() if miss > law.miss_high_percent} if fresh else {}
    bandwidth = strain.bandwidth if fresh else None
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
            reason = f"{worst} misses the cache in {missing[worst]:.0f} % of its references"
        else:
            domain = max(sorted(full), key=lambda one: full[one])
            reason = f"the memory bandwidth of domain {domain} is {full[domain]:.0f} % used"
        return LevelState(level=_within(cache, memory, levels), reason=reason)
    if not _calm(strain, bandwidth, law, fresh=fresh):
        return LevelState(level=_within(cache, memory, levels), reason=_between(strain, bandwidth, fresh=fresh))
    since = now if state.calm_since is None else state.calm_since
    if now - since < law.calm_s:
        return LevelState(level=_within(cache, memory, levels), calm_since=since, reason="calm, waiting")
    up = law.step_up_percent
    return LevelState(level=_within(cache + up, memory + up, levels), calm_since=now, reason="calm")


def _calm(strain: Strain, bandwidth: Mapping[int, float] | None, law: LevelLaw, *, fresh: bool) -> bool:
    if strain.online == 0:
        return True
    known = fresh and bool(bandwidth or strain.misses)
    return (
        known
        and all(miss < law.miss_low_percent for miss in strain.misses.values())
        and all(used < law.bandwidth_low_percent for used in (bandwidth or {}).values())
    )


def _between(strain: Strain, bandwidth: Mapping[int, float] | None, *, fresh: bool) -> str:
    if not fresh or not (bandwidth or strain.misses):
        return "neither misses nor bandwidth are known now: nothing grows"
    return "between the marks"


def _within(cache: int, memory: int, levels: Levels) -> Level:
    low, high = levels.low, levels.high
    return Level(
        cache_percent=min(high.cache_percent, max(low.cache_percent, cache)),
        mba_percent=min(high.mba_percent, max(low.mba_percent, memory)),
    )
