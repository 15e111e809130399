"""The resctrl groups of one machine: which groups exist, what each is allowed, and which pod is in which. Pure.

Control groups are few, so they are assigned in this order: one per class that has pods and differs from the default
group, one per level that some BE pod requests, and then one per *request* of single pods; pods with the same request
share a group and lose nothing. When no group is left, pods share by class, and the plan names them.

A BE pod's own share, range or level, is cut to what BE as a whole has: Koordinator lets a BE pod take any range by
annotation, rubik any level, and with it the cache of the pods that the policy is to protect. An online pod's range is
not cut.

Source: Koordinator's resctrl-qos, rubik's dynCache, goresctrl's partitions; `resctrl.shares` lists the differences.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from cgroupfs.errors import InputError
from reconciler.policies.cachewish import CacheLevelName, PodCacheShare, pod_share
from resctrl.capability import BandwidthCapability, CacheCapability, Capability, ResctrlStatus
from resctrl.groups import DEFAULT, PREFIX
from resctrl.schemata import largest
from resctrl.shares import bandwidth, overlay, partitions, percent_mask, range_mask, without_shared
from state.cache import CacheGroup, CacheLayout, CacheMode, CachePlan, CacheRequest, ClassShare, ShareLevel
from state.model import Pod, PodClass

CLASS_GROUPS: Final[Mapping[PodClass, str]] = {
    PodClass.RECLAIMED: f"{PREFIX}be",
    PodClass.SHARED: f"{PREFIX}ls",
    PodClass.DEDICATED: f"{PREFIX}lsr",
}
_LEVEL: Final = f"{CLASS_GROUPS[PodClass.RECLAIMED]}-"
_OWN: Final = f"{PREFIX}own-"
_RANK: Final = {PodClass.DEDICATED: 0, PodClass.SHARED: 1, PodClass.RECLAIMED: 2}
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
    having: frozenset[str] = frozenset(),
) -> CachePlan:
    """The groups and their members.

    ``level``: BE's size in mode dynamic and for pods that request it. ``foreign``: control groups of others.
    ``having``: bypassd's groups that exist: their members keep them.
    """
    if capability.status is not ResctrlStatus.READY or not capability.divisible:
        message = (
            capability.reason if capability.status is not ResctrlStatus.READY else "no resource can be partitioned here"
        )
        return CachePlan(problems=(message,))
    plan = _CachePlanner(wish, capability, level)
    ordered = sorted(pods, key=lambda pod: (_RANK.get(pod.pod_class, 3), pod.uid))
    classes = {pod.pod_class for pod in ordered}
    budget = capability.control_groups - 1 - foreign
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
            spare += [_of_class(name, values, pod_class)] if name in having else []
            continue
        if len(groups) >= budget:
            plan.problems.append(f"no free control group for class {pod_class}: its pods stay in the default group")
            continue
        groups[name] = _of_class(name, values, pod_class)
        homes[pod_class] = name
    members: dict[str, str] = {}
    wanting: dict[str, tuple[CacheGroup, list[Pod]]] = {}
    for pod in ordered:
        members[pod.uid] = homes.get(pod.pod_class, DEFAULT)
        if not wish.pods or pod.pod_class is PodClass.SYSTEM:
            continue
        share, problems = pod_share(pod)
        plan.problems += [f"{pod.title}: {problem}" for problem in problems]
        own = plan.own(pod, share) if share else None
        if own is not None and own.schemata != _held(groups, members[pod.uid], whole):
            wanting.setdefault(own.name, (own, []))[1].append(pod)
    crowded: dict[str, str] = {}
    for name, (own, askers) in sorted(wanting.items(), key=lambda pair: _order(pair[0], pair[1][1], having)):
        if len(groups) < budget:
            groups[name] = own
            members |= {pod.uid: name for pod in askers}
            continue
        for pod in askers:
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


def _order(name: str, askers: list[Pod], having: frozenset[str]) -> tuple[bool, bool, int, str]:
    """Levels first, as many pods share them; then pods that have a group already, then by class."""
    return not name.startswith(_LEVEL), name not in having, min(_RANK[pod.pod_class] for pod in askers), name


def _held(groups: Mapping[str, CacheGroup], name: str, whole: Values) -> Mapping[str, Mapping[int, int]]:
    return groups[name].schemata if name in groups else whole


class _CachePlanner:
    """The arithmetic of one request on one machine."""

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
        """What a class has."""
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
                    values[cache.name][domain] = self._asked(cache, pair, masks[cache.name], pod.pod_class)
        for part in self._bandwidths:
            for domain, asked_percent in share.percents.items():
                if domain in part.domains:
                    values[part.name][domain] = bandwidth(part, asked_percent, self._full(part))
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
        asking = (pod.pod_class.value, share.range, sorted(share.ranges.items()))
        text = f"{asking} {share.percent} {sorted(share.percents.items())}"
        name = f"{_OWN}{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return CacheGroup(name=name, schemata=values, reason=f"requested by annotation, class {pod.pod_class}")

    def _of_level(self, level: CacheLevelName, pod_class: PodClass) -> CacheGroup:
        """A level's own group, cut to what the class has: that may be less than the level, and moves with the law."""
        masks, percent = self._leveled(level)
        of_class, most = self._class(pod_class)
        inside = {cache.name: _inside(cache, masks[cache.name], of_class[cache.name]) for cache in self._caches}
        values = self._values(inside, min(percent, most))
        return CacheGroup(name=f"{_LEVEL}{level}", schemata=values, reason=f"level {level}", reclaimed=True)

    def _asked(self, cache: CacheCapability, pair: tuple[int, int], of_class: int, pod_class: PodClass) -> int:
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
            number = largest(part) if percent == 100 else bandwidth(part, percent, self._full(part))
            values[part.name] = dict.fromkeys(part.domains, number)
        return values

    def _full(self, part: BandwidthCapability) -> int | None:
        return self._wish.slow_bandwidth_mbps if part.name == "SMBA" else self._wish.bandwidth_mbps


def _inside(cache: CacheCapability, mask: int, of_class: int) -> int:
    """What of a mask lies in the class' own; all of that where too little does."""
    inside = mask & of_class
    return inside if inside.bit_count() >= max(1, cache.min_ways) else of_class
