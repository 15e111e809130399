"""The resctrl groups of one machine: which groups exist, what each is allowed, and which pod is in which. Pure.

`plan_cache` has the groups, `pod_share` what a pod's annotations request, and `step` the control law of BE's share in
mode dynamic.

Source: Koordinator's resctrl-qos and its API (apis/extension/resctrl.go), rubik's dynCache, goresctrl's partitions;
`resctrl.schemata` lists the differences. The law: rubik's dynCache (+5, -50, a band between its two marks in which
nothing moves); Heracles (bandwidth first).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, TypeVar

from msgspec import Struct

from cgroupfs.errors import InputError
from reconciler.pods.annotations import JsonAnnotation, UnusableError, attempt, one_of, read_plain, whole_number
from reconciler.runtime.format import number, percent
from resctrl.capability import BandwidthCapability, CacheCapability, Capability, ResctrlStatus
from resctrl.groups import DEFAULT, PREFIX
from resctrl.schemata import bandwidth, largest, overlay, partitions, percent_mask, range_mask, without_shared
from state.cache import (
    CacheGroup,
    CacheLayout,
    CacheMode,
    CachePlan,
    CacheRequest,
    ClassShare,
    Contention,
    LevelControl,
    ShareLevel,
    ShareLevels,
)
from state.evidence import Sample
from state.model import Pod, PodClass

RESCTRL: Final = "node.koordinator.sh/resctrl"
CACHE_LIMIT: Final = "volcano.sh/cache-limit"
_REMEMBERED: Final = 256
_MOST_ENTRIES: Final = 256
"""Caches of one machine."""
CLASS_GROUPS: Final[Mapping[PodClass, str]] = {
    PodClass.RECLAIMED: f"{PREFIX}be",
    PodClass.SHARED: f"{PREFIX}ls",
    PodClass.DEDICATED: f"{PREFIX}lsr",
}
_LEVEL: Final = f"{CLASS_GROUPS[PodClass.RECLAIMED]}-"
_OWN: Final = f"{PREFIX}own-"
_RANK: Final = {PodClass.DEDICATED: 0, PodClass.SHARED: 1, PodClass.RECLAIMED: 2}


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


def step(state: LevelState, contention: Contention, now: float, law: LevelControl, levels: ShareLevels) -> LevelState:
    """The next state: small at once, and slowly larger. AIMD with a dead band.

    The answer remains within the levels low and high, also when these have changed.
    """
    cache, memory = state.level.cache_percent, state.level.mba_percent
    bandwidth = contention.bandwidth if contention.age_s <= law.stale_s else None
    misses = {uid: sample for uid, sample in contention.misses.items() if sample.age_s <= law.miss_stale_s}
    # Bandwidth is new at each step; misses are counted for some seconds of each minute. A count from before the ways
    # last changed does not show the effect of that change: it neither lowers nor raises them again, but while it is
    # high it keeps BE from growing.
    fresh = {uid for uid, sample in misses.items() if state.moved_at is None or now - sample.age_s > state.moved_at}
    # Per 1000 instructions: rubik's misses, in percent of references, are unreliable with few references.
    missing = {
        uid: sample.value for uid, sample in misses.items() if uid in fresh and sample.value > law.miss_high_per_1000
    }
    # Only where BE is part of the traffic: it is not responsible for what online work needs itself.
    full = {
        domain: used
        for domain, used in (bandwidth or {}).items()
        if used > law.bandwidth_high_percent and contention.reclaimed.get(domain, 100.0) >= law.suspect_percent
    }
    if contention.online and (missing or full):
        memory -= law.step_down_percent
        # A full bus takes no ways: fewer would make more traffic.
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
    obstacle = _obstacle(contention, bandwidth, misses, law)
    if obstacle:
        return LevelState(level=level, moved_at=state.moved_at, reason=obstacle)
    since = now if state.calm_since is None else state.calm_since
    waiting = LevelState(level=level, calm_since=since, moved_at=state.moved_at, reason="below the thresholds, waiting")
    if now - since < law.calm_s:
        return waiting
    up = law.step_up_percent
    grown = _within(cache + up, memory + up, levels)
    if grown == level:
        return waiting
    if contention.online and len(fresh) < len(misses):
        return LevelState(
            level=level,
            calm_since=since,
            moved_at=state.moved_at,
            reason="below the thresholds, waiting for newer cache miss counts",
        )
    return LevelState(level=grown, calm_since=now, moved_at=now, reason="calm")


def _obstacle(
    contention: Contention, bandwidth: Mapping[int, float] | None, misses: Mapping[str, Sample], law: LevelControl
) -> str:
    """Why it is not calm; empty: it is. Either all bandwidths must be known, or the misses of all online pods."""
    if contention.online == 0:
        return ""
    every_domain = bool(bandwidth) and not contention.blind
    if not every_domain and len(misses) < contention.online:  # rubik takes a missing count for calm
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


_T = TypeVar("_T")

Range = tuple[int, int]


class CacheLevelName(StrEnum):
    """rubik's levels. ``max`` is all that BE may have, ``dynamic`` what the law gives it now."""

    LOW = "low"
    MIDDLE = "middle"
    HIGH = "high"
    MAX = "max"
    DYNAMIC = "dynamic"


class PodCacheShare(Struct, frozen=True, kw_only=True):
    """A pod's own share: ranges of ways and percents of bandwidth, for all domains and for single ones.

    None and empty: as its class. ``level`` instead of all that: one of BE's sizes.
    """

    range: Range | None = None
    ranges: Mapping[int, Range] = {}
    percent: int | None = None
    percents: Mapping[int, int] = {}
    level: CacheLevelName | None = None

    def __bool__(self) -> bool:
        return self != PodCacheShare()


def pod_share(pod: Pod) -> tuple[PodCacheShare, tuple[str, ...]]:
    """A pod's requests, and the problems of those that could not be used: one message each, never an exception.

    Of Koordinator's ``node.koordinator.sh/resctrl``: ``llc.schemata.range``, ``llc.schemataPerCache``,
    ``mb.schemata.percent`` and ``mb.schemataPerCache``, ranges as percents. Of rubik's ``volcano.sh/cache-limit``: one
    of its levels, for BE pods. If both are given, the first counts.
    """
    # A plan is made at each pass: the texts are parsed only when they have changed.
    return _pod_share(pod.annotations.get(RESCTRL), pod.annotations.get(CACHE_LIMIT), pod.pod_class)


@lru_cache(maxsize=_REMEMBERED)
def _pod_share(
    resctrl: str | None, cache_limit: str | None, pod_class: PodClass
) -> tuple[PodCacheShare, tuple[str, ...]]:
    problems: list[str] = []
    texts = {name: text for name, text in ((RESCTRL, resctrl), (CACHE_LIMIT, cache_limit)) if text is not None}
    annotation = JsonAnnotation(texts, RESCTRL, problems)
    cache = annotation.read("llc", lambda value: _part(value, "range", _range, f"{RESCTRL}: llc", problems))
    memory = annotation.read("mb", lambda value: _part(value, "percent", _percent, f"{RESCTRL}: mb", problems))
    share = PodCacheShare(
        range=cache[0] if cache else None,
        ranges=cache[1] if cache else {},
        percent=memory[0] if memory else None,
        percents=memory[1] if memory else {},
    )
    level = read_plain(
        texts,
        CACHE_LIMIT,
        lambda value: one_of(value, {level_name.value: level_name for level_name in CacheLevelName}),
        problems,
    )
    if level is not None and pod_class is not PodClass.RECLAIMED:
        problems.append(f"annotation {CACHE_LIMIT}: {level.value!r}: levels are for BE pods; this one is {pod_class}")
    elif level is not None and not share:
        share = PodCacheShare(level=level)
    return share, tuple(problems)


def _part(
    value: Any,
    key: str,
    reader: Callable[[Any], _T],
    where: str,
    problems: list[str],  # untrusted JSON
) -> tuple[_T | None, dict[int, _T]]:
    if not isinstance(value, dict):
        raise UnusableError("an object with schemata or schemataPerCache")
    whole = value.get("schemata")
    everywhere: _T | None = None
    if whole is not None:
        everywhere = attempt(f"annotation {where}.schemata", whole, lambda item: _field(item, key, reader), problems)
    single: dict[int, _T] = {}
    entries = value.get("schemataPerCache") or []
    if not isinstance(entries, list):
        raise UnusableError("schemataPerCache as a list")
    if len(entries) > _MOST_ENTRIES:
        raise UnusableError(f"schemataPerCache with at most {_MOST_ENTRIES} entries")
    for entry in entries:
        pair = attempt(f"annotation {where}.schemataPerCache", entry, lambda item: _entry(item, key, reader), problems)
        if pair is not None:
            single[pair[0]] = pair[1]
    return everywhere, single


def _field(value: Any, key: str, reader: Callable[[Any], _T]) -> _T | None:  # untrusted JSON
    if not isinstance(value, dict):
        raise UnusableError(f"an object with {key}")
    return None if value.get(key) is None else reader(value[key])


def _entry(value: Any, key: str, reader: Callable[[Any], _T]) -> tuple[int, _T] | None:  # untrusted JSON
    result = _field(value, key, reader)
    # Go leaves a zero out when it writes the number of a cache.
    return None if result is None else (whole_number(value.get("cacheID", 0), 0, 1 << 20), result)


def _range(value: Any) -> Range:  # untrusted JSON
    expected = "a range [start, end] of percents, 0 <= start < end <= 100"
    if not isinstance(value, list) or len(value) != 2:
        raise UnusableError(expected)
    low, high = whole_number(value[0], 0, 100), whole_number(value[1], 0, 100)
    if low >= high:
        raise UnusableError(expected)
    return low, high


def _percent(value: Any) -> int:  # untrusted JSON
    return whole_number(value, 1, 100)


# Its own kind of group: it moves with the law also where the class' does not.
_DYNAMIC: Final = CacheLevelName.DYNAMIC

Values = dict[str, dict[int, int]]


def plan_cache(
    wish: CacheRequest,
    pods: Iterable[Pod],
    capability: Capability,
    *,
    level: ShareLevel,
    foreign: int = 0,
    existing: frozenset[str] = frozenset(),
) -> CachePlan:
    """The groups and their members.

    Control groups are few (8 to 16 on most machines, half with ``cdp``), so they are assigned in this order: one per
    class that has pods and differs from the default group, one per level that some BE pod requests, and then one per
    *request* of single pods. When no group is left, pods share by class, and the plan names them.

    ``level``: BE's size in mode dynamic and for pods that request it. ``foreign``: control groups of others.
    ``existing``: bypassd's groups that exist: their members keep them.
    """
    if capability.status is not ResctrlStatus.READY or not capability.divisible:
        message = (
            capability.reason if capability.status is not ResctrlStatus.READY else "no resource can be partitioned here"
        )
        return CachePlan(problems=(message,))
    plan = _CachePlanner(wish, capability, level)
    ordered = sorted(pods, key=lambda pod: (_RANK.get(pod.pod_class, 3), pod.uid))
    classes = {pod.pod_class for pod in ordered}
    budget = capability.control_groups - 1 - foreign  # one is the default group
    whole = plan.schemata(plan.shares(wish.system)) if wish.system is not None else plan.whole()
    groups: dict[str, CacheGroup] = {}
    homes: dict[PodClass, str] = {}
    spare: list[CacheGroup] = []
    for pod_class, name in CLASS_GROUPS.items():
        values = plan.of_class(pod_class)
        homes[pod_class] = DEFAULT
        if values == whole:
            continue
        if pod_class not in classes:
            spare += [_of_class(name, values, pod_class)] if name in existing else []
            continue
        if len(groups) >= budget:
            plan.problems.append(f"no free control group for class {pod_class}: its pods stay in the default group")
            continue
        groups[name] = _of_class(name, values, pod_class)
        homes[pod_class] = name
    members: dict[str, str] = {}
    requested: dict[str, tuple[CacheGroup, list[Pod]]] = {}
    for pod in ordered:
        members[pod.uid] = homes.get(pod.pod_class, DEFAULT)
        if not wish.pods or pod.pod_class is PodClass.SYSTEM:
            continue
        share, problems = pod_share(pod)
        plan.problems += [f"{pod.title}: {problem}" for problem in problems]
        own = plan.own(pod, share) if share else None
        home = groups.get(members[pod.uid])
        if own is not None and own.schemata != (whole if home is None else home.schemata):
            requested.setdefault(own.name, (own, []))[1].append(pod)
    crowded: dict[str, str] = {}
    for name, (own, requesters) in sorted(requested.items(), key=lambda pair: _order(pair[0], pair[1][1], existing)):
        if len(groups) < budget:
            groups[name] = own
            members |= {pod.uid: name for pod in requesters}
            continue
        for pod in requesters:
            message = f"no free control group ({budget} available): uses {members[pod.uid] or 'the default group'}"
            crowded[pod.uid] = message
            plan.problems.append(f"{pod.title}: {message}")
    # A class whose last pod has ended keeps its group while no other request needs it: its next pod reuses it.
    groups |= {group.name: group for group in spare[: max(0, budget - len(groups))]}
    return CachePlan(
        groups=tuple(groups.values()),
        members=members,
        crowded=crowded,
        default=whole if wish.system is not None else None,
        problems=tuple(dict.fromkeys(plan.problems)),
    )


def is_dynamic(name: str) -> bool:
    """Whether a control group of this name is of the level that moves with the law."""
    return name.startswith(f"{_LEVEL}{_DYNAMIC}")


def _of_class(name: str, values: Values, pod_class: PodClass) -> CacheGroup:
    return CacheGroup(
        name=name, schemata=values, reason=f"class {pod_class}", reclaimed=pod_class is PodClass.RECLAIMED
    )


def _order(name: str, pods: list[Pod], existing: frozenset[str]) -> tuple[bool, bool, int, str]:
    """Levels first, as many pods share them; then pods that have a group already, then by class."""
    return not name.startswith(_LEVEL), name not in existing, min(_RANK[pod.pod_class] for pod in pods), name


class _CachePlanner:
    def __init__(self, wish: CacheRequest, capability: Capability, level: ShareLevel) -> None:
        self.problems: list[str] = []
        self._wish = wish
        self._level = level
        self._caches = [
            cache for cache in capability.caches if cache.name.startswith(tuple(wish.caches)) and cache.domains
        ]
        self._bandwidths = [part for part in capability.bandwidths if part.domains and self._full(part) is not None]
        self._parts = {cache.name: self._partitions(cache) for cache in self._caches}

    def whole(self) -> Values:
        """Everything, for all classes: the default group's initial share."""
        return self._values({cache.name: cache.full for cache in self._caches}, 100)

    def shares(self, share: ClassShare) -> tuple[dict[str, int], int]:
        """A share as masks by cache and a percent of bandwidth."""
        low, high = share.cat_range_start_percent, share.cat_range_end_percent
        return {cache.name: range_mask(cache, low, high) for cache in self._caches}, share.mba_percent

    def schemata(self, parts: tuple[Mapping[str, int], int]) -> Values:
        """The same values in every domain."""
        return self._values(*parts)

    def of_class(self, pod_class: PodClass) -> Values:
        return self._values(*self._class(pod_class))

    def own(self, pod: Pod, share: PodCacheShare) -> CacheGroup | None:
        """The group that a pod requests; None for its class' group."""
        if share.level is CacheLevelName.MAX:
            return None
        if share.level is not None:
            return self._of_level(share.level, pod.pod_class)
        masks, percent = self._class(pod.pod_class)
        values = self._values(masks, percent if share.percent is None else share.percent)
        for cache in self._caches:
            for domain in cache.domains:
                pair = share.ranges.get(domain, share.range)
                if pair is not None:
                    values[cache.name][domain] = self._requested_mask(cache, pair, masks[cache.name], pod.pod_class)
        for part in self._bandwidths:
            for domain, own_percent in share.percents.items():
                if domain in part.domains:
                    values[part.name][domain] = bandwidth(part, own_percent, self._full(part))
        # Cut to what BE as a whole has: in Koordinator a BE pod takes any range by annotation, in rubik any level, and
        # with it the cache of the pods that the policy is to protect. An online pod's share is not cut.
        if pod.pod_class is PodClass.RECLAIMED:
            top = self._values(masks, percent)
            for part in self._bandwidths:
                values[part.name] = {
                    number: min(value, top[part.name][number]) for number, value in values[part.name].items()
                }
        domains = [cache.domains for cache in self._caches] + [part.domains for part in self._bandwidths]
        known = {domain for some in domains for domain in some}
        for domain in sorted({*share.ranges, *share.percents} - known):
            self.problems.append(f"{pod.title}: cache {domain} of its annotation does not exist on this machine")
        # The name is of the request: pods with the same one share a group, and find it again after a restart.
        cache_request = (pod.pod_class.value, share.range, sorted(share.ranges.items()))
        text = f"{cache_request} {share.percent} {sorted(share.percents.items())}"
        name = f"{_OWN}{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return CacheGroup(name=name, schemata=values, reason=f"requested by annotation, class {pod.pod_class}")

    def _of_level(self, level: CacheLevelName, pod_class: PodClass) -> CacheGroup:
        """A level's own group, cut to what the class has: that may be less than the level, and moves with the law."""
        masks, percent = self._leveled(level)
        of_class, most = self._class(pod_class)
        inside = {cache.name: _inside(cache, masks[cache.name], of_class[cache.name]) for cache in self._caches}
        values = self._values(inside, min(percent, most))
        return CacheGroup(name=f"{_LEVEL}{level}", schemata=values, reason=f"level {level}", reclaimed=True)

    def _requested_mask(self, cache: CacheCapability, pair: tuple[int, int], of_class: int, pod_class: PodClass) -> int:
        mask = range_mask(cache, *pair)
        if pod_class is not PodClass.RECLAIMED:
            return without_shared(cache, mask) if self._wish.avoid_shared else mask
        return _inside(cache, mask, of_class)

    def _class(self, pod_class: PodClass) -> tuple[dict[str, int], int]:
        if pod_class is PodClass.RECLAIMED and self._wish.mode is CacheMode.DYNAMIC:
            return self._leveled(_DYNAMIC)
        share = self._share(pod_class)
        masks, percent = self.shares(share)
        for cache in self._caches:
            parts = self._parts[cache.name]
            if parts is not None:
                masks[cache.name] = parts[pod_class]
            if self._wish.avoid_shared and pod_class.online:
                masks[cache.name] = without_shared(cache, masks[cache.name])
        return masks, percent

    def _leveled(self, name: CacheLevelName) -> tuple[dict[str, int], int]:
        levels = self._wish.levels
        fixed = {CacheLevelName.LOW: levels.low, CacheLevelName.MIDDLE: levels.middle, CacheLevelName.HIGH: levels.high}
        level = fixed.get(name, self._level)
        masks: dict[str, int] = {}
        for cache in self._caches:
            parts = self._parts[cache.name]
            start = self._wish.reclaimed.cat_range_start_percent
            if parts is not None:
                masks[cache.name] = overlay(cache, parts[PodClass.RECLAIMED], 0, level.cache_percent)
            else:
                masks[cache.name] = percent_mask(cache, level.cache_percent, -(-cache.ways * start // 100))
        return masks, level.mba_percent

    def _share(self, pod_class: PodClass) -> ClassShare:
        wish = self._wish
        return {PodClass.DEDICATED: wish.dedicated, PodClass.SHARED: wish.shared}.get(pod_class, wish.reclaimed)

    def _partitions(self, cache: CacheCapability) -> dict[PodClass, int] | None:
        """The classes' masks where they share no way; None where they may."""
        if self._wish.layout is not CacheLayout.EXCLUSIVE:
            return None
        widths = {
            pod_class: share.cat_range_end_percent - share.cat_range_start_percent
            for pod_class in CLASS_GROUPS
            for share in (self._share(pod_class),)
        }
        try:
            masks = partitions(cache, {pod_class.value: width for pod_class, width in widths.items()})
        except InputError as exc:
            self.problems.append(f"{cache.name} is not partitioned exclusively: {exc}")
            return None
        return {pod_class: masks[pod_class.value] for pod_class in widths}

    def _values(self, masks: Mapping[str, int], percent: int) -> Values:
        values: Values = {cache.name: dict.fromkeys(cache.domains, masks[cache.name]) for cache in self._caches}
        for part in self._bandwidths:
            # 100 % means unlimited: all of the configured maximum would be a limit.
            number = largest(part) if percent == 100 else bandwidth(part, percent, self._full(part))
            values[part.name] = dict.fromkeys(part.domains, number)
        return values

    def _full(self, part: BandwidthCapability) -> int | None:
        return self._wish.slow_bandwidth_mbps if part.name == "SMBA" else self._wish.bandwidth_mbps


def _inside(cache: CacheCapability, mask: int, of_class: int) -> int:
    """What of a mask lies in the class' own; all of that where too little does."""
    inside = mask & of_class
    return inside if inside.bit_count() >= max(1, cache.min_ways) else of_class
