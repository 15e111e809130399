"""The plug-in chain of the choice of CPUs: the interface of a rule, the enabled rules, and how they are called.

A rule is one small class, `Plugin`, that overrides one or more extension points: sort, filter, post_filter, pre_score,
select, score, allocate, deallocate. docs/cpu-plugins.md describes how a site writes one.

The combination with the best weighted sum of scores wins.

Source: the CPU manager plug-in model proposed for the kubelet. Differences: pre-scores are given by groups (bit masks)
instead of per CPU, so that a rule costs the same on 8 and on 1,024 CPUs; select yields several combinations, for score
to have something to compare; a post-filter relaxes filters instead of evicting a pod.
"""

# ruff: noqa: ARG002  (a plug-in's unused extension points use no argument)

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Final, TypeVar, final

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from reconciler.placement.config import BUILT_IN, PlacementConfig, weights
from reconciler.placement.cpu_accumulator import CpuAccumulator
from reconciler.placement.demand import CpuDemand
from reconciler.runtime.lazy import load as load_object
from reconciler.runtime.lazy import split
from state.topology import Topology

Scored = tuple[CpuSet, float]


class PlacementContext(Struct, frozen=True, kw_only=True):
    """Common input of all demands of one choice.

    ``interrupts``: CPUs that serve a network card's interrupts. ``remembered``: last CPUs of containers that were
    removed and may return. ``fitter``: the arithmetic over the topology's masks.
    """

    topology: Topology
    fitter: CpuAccumulator
    interrupts: CpuSet = EMPTY
    remembered: CpuSet = EMPTY


class PluginRequest(Struct, frozen=True, kw_only=True):
    """Choose ``count`` of ``candidates`` for ``demand`` beside ``kept``, which it has in any case.

    ``tiers``: the candidates by falling pre-score, disjoint. ``pools``: the first few unions of best tiers that hold
    enough CPUs, then all candidates.
    """

    demand: CpuDemand
    count: int
    candidates: CpuSet
    kept: CpuSet
    tiers: tuple[CpuSet, ...]
    pools: tuple[CpuSet, ...]


class Plugin:
    """One rule. Override its extension points; those not overridden are not called.

    An instance exists for one choice of all demands, and is called in the order in which they choose. So the same input
    has the same result whatever state it keeps.
    """

    def sort(self, demand: CpuDemand, context: PlacementContext) -> float:
        """Higher chooses earlier. Has precedence over priority; several in the order of the plug-ins."""
        return 0.0

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        """Those of ``cpus`` that the demand may not have."""
        return CpuSet()

    def post_filter(self, demand: CpuDemand, context: PlacementContext, rejected: CpuSet, missing: int) -> CpuSet:
        """Of the ``rejected`` CPUs those to let in again, ``missing`` being how many are too few."""
        return CpuSet()

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        """Sets of CPUs with the score, 0.0 to 1.0, that each CPU of the set gets; 0.0 for those not named."""
        return ()

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterable[CpuSet]:
        """Combinations of ``question.count`` CPUs (more only to complete cores), the best first.

        A handful, made out of ``question.pools``; no enumeration.
        """
        return ()

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        """How good the demand's CPUs would be, ``question.kept`` included: 0.0 to 1.0."""
        return 0.0

    def allocate(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> None:
        """The demand owns ``cpus`` now."""

    def deallocate(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> None:
        """The demand has given ``cpus`` back."""


POINTS: Final = ("sort", "filter", "post_filter", "pre_score", "select", "score", "allocate", "deallocate")


class EnabledPlugin(Struct, frozen=True, kw_only=True):
    """One loaded plug-in: its name in the configuration, its weight, and how to make one."""

    name: str
    weight: float
    make: Callable[[], Plugin]
    points: frozenset[str]


class PluginChain(Struct, frozen=True, kw_only=True):
    """The enabled plug-ins in their order, loaded and checked."""

    plugins: tuple[EnabledPlugin, ...]


def load(config: PlacementConfig, where: str = "placement.plugins") -> PluginChain:
    """The chain of a configuration; modules of a site's own are imported here and nowhere else.

    Errors: `InputError` naming ``where`` and the plug-in, when it cannot be imported, made, or is no `Plugin`.
    """
    enabled = {**weights(), **config.plugins}
    plugins = tuple(_enabled(name, weight, where) for name, weight in enabled.items() if weight > 0)
    return PluginChain(plugins=plugins)


def loaded(config: PlacementConfig) -> PluginChain:
    """The same, cached: a configuration is used at every plan, and loaded once. Errors: as `load`."""
    return _loaded(tuple(config.plugins.items()))


@cache
def _loaded(plugins: tuple[tuple[str, float], ...]) -> PluginChain:
    return load(PlacementConfig(plugins=dict(plugins)))


def _enabled(name: str, weight: float, where: str) -> EnabledPlugin:
    if name not in BUILT_IN:
        try:
            split(name)
        except ValueError as exc:
            raise InputError(where, name, f"one of {', '.join(BUILT_IN)}, or a class as package.module:Class") from exc
    try:
        result = BUILT_IN[name] if name in BUILT_IN else load_object(name)
    except Exception as exc:  # importing a site's module runs its code, which may raise anything
        raise InputError(where, name, f"a class that can be imported ({type(exc).__name__}: {exc})") from exc
    if not isinstance(result, type) or not issubclass(result, Plugin):
        raise InputError(where, name, f"a subclass of {Plugin.__module__}.Plugin")
    points = frozenset(point for point in POINTS if getattr(result, point) is not getattr(Plugin, point))
    if not points:
        raise InputError(where, name, f"a class that overrides at least one of {', '.join(POINTS)}")
    try:
        result()
    except Exception as exc:  # the same
        raise InputError(where, name, f"a class made without arguments ({type(exc).__name__}: {exc})") from exc
    return EnabledPlugin(name=name, weight=weight, make=result, points=points)


def checked(config: PlacementConfig) -> None:
    """Load a site's own rules, so that a wrong name is reported when the configuration is read.

    Errors: `InputError` naming the rule that cannot be loaded.
    """
    if not config.plugins.keys() <= BUILT_IN.keys():
        loaded(config)


_GROUPS_BY_MASK: Final = 12
"""Groups of pre-scores up to which each is one operation on masks; of more each CPU is counted."""
_POOLS: Final = 4
"""Of `PluginRequest`."""
_COMBINATIONS: Final = 16
"""Compared for one container: more cost time in the path of a start and win nothing."""
_SAME: Final = 9
"""Digits: what differs behind these is the order of additions."""

T = TypeVar("T")


@final
class PluginRunner:
    """The plug-ins of one choice. ``errors``: by plug-in, the first thing that went wrong with it.

    A plug-in that raises or returns an invalid result is skipped for that demand; no other is stopped.
    """

    def __init__(self, chain: PluginChain, context: PlacementContext) -> None:
        self.context = context
        self.errors: dict[str, str] = {}
        self._failed: set[tuple[str, str]] = set()
        self._at: dict[str, list[tuple[str, float, Plugin]]] = {point: [] for point in POINTS}
        for plugin in chain.plugins:
            try:
                made = plugin.make()
            except Exception as exc:  # noqa: BLE001  # one bad plug-in never stops the others
                self.errors[plugin.name] = f"{type(exc).__name__}: {exc}"
                continue
            for point in plugin.points:
                self._at[point].append((plugin.name, plugin.weight, made))

    def _answers(self, point: str, demand: CpuDemand, call: Callable[[Plugin], T]) -> Iterator[tuple[str, float, T]]:
        """The answers of all plug-ins with this extension point, without those that fail for this demand."""
        for name, weight, plugin in self._at[point]:
            if self._failed and (name, demand.key) in self._failed:
                continue
            try:
                answer = call(plugin)
            except Exception as exc:  # noqa: BLE001  # one bad plug-in never stops the others
                self._failed.add((name, demand.key))
                self.errors.setdefault(name, f"{demand.key}: {point}: {type(exc).__name__}: {exc}")
                continue
            yield name, weight, answer

    def ordered(self, demands: Iterable[CpuDemand]) -> list[CpuDemand]:
        """The order of choice: the plug-ins' sort, priority, demands of whole nodes, then the larger ones."""
        context = self.context

        def rank(demand: CpuDemand) -> tuple[tuple[float, ...], int, bool, int, str]:
            parts = {
                name: -value
                for name, _, value in self._answers(
                    "sort", demand, lambda plugin: _finite(plugin.sort(demand, context))
                )
            }
            sorters = tuple(parts.get(name, 0.0) for name, _, _ in self._at["sort"])
            return sorters, -demand.priority, not demand.numa_exclusive, -demand.count, demand.key

        return sorted(demands, key=rank)

    def allowed(self, demand: CpuDemand, cpus: CpuSet, count: int) -> tuple[CpuSet, tuple[str, ...]]:
        """``cpus`` without what the filters keep out, and which filters did; relaxed when fewer than ``count``."""
        left, names = cpus, []
        # Each filter sees all CPUs, whatever those before it exclude: their order does not matter.
        for name, _, out in self._answers(
            "filter", demand, lambda plugin: _cpus(plugin.filter(demand, self.context, cpus))
        ):
            if out & left:
                left -= out
                names.append(name)

        def relaxed(plugin: Plugin) -> CpuSet:
            missing, rejected = count - len(left), cpus - left
            if missing <= 0 or not rejected:
                return EMPTY
            return _cpus(plugin.post_filter(demand, self.context, rejected, missing)) & rejected

        for _, _, back in self._answers("post_filter", demand, relaxed):
            left |= back
        return left, tuple(names)

    def tiers(self, demand: CpuDemand, cpus: CpuSet) -> tuple[CpuSet, ...]:
        """``cpus`` by falling sum of weighted pre-scores: disjoint, none empty."""
        groups = [
            (mask, score * weight)
            for _, weight, groups_of_one in self._answers(
                "pre_score", demand, lambda plugin: _scored(plugin.pre_score(demand, self.context, cpus), cpus)
            )
            for mask, score in groups_of_one
            if mask != cpus.mask and score  # one for all CPUs distinguishes none
        ]
        if not groups:
            return (cpus,) if cpus else ()
        scores = self._by_group(groups, cpus) if len(groups) <= _GROUPS_BY_MASK else self._by_cpu(groups, cpus)
        return tuple(CpuSet.from_mask(scores[value]) for value in sorted(scores, reverse=True))

    def _by_group(self, groups: list[tuple[int, float]], cpus: CpuSet) -> dict[float, int]:
        scores: dict[float, int] = {0.0: cpus.mask}
        for mask, score in groups:
            split: dict[float, int] = {}
            for value, members in scores.items():
                for part, total in ((members & mask, round(value + score, _SAME)), (members & ~mask, value)):
                    if part:
                        split[total] = split.get(total, 0) | part
            scores = split
        return scores

    def _by_cpu(self, groups: list[tuple[int, float]], cpus: CpuSet) -> dict[float, int]:
        """For rules that score CPU by CPU: the work is their number, not the product of groups and tiers."""
        single: dict[int, float] = dict.fromkeys(cpus, 0.0)
        for mask, score in groups:
            for cpu in CpuSet.from_mask(mask):
                single[cpu] += score
        scores: dict[float, int] = {}
        for cpu, score in single.items():
            value = round(score, _SAME)
            scores[value] = scores.get(value, 0) | 1 << cpu
        return scores

    def best(self, demand: CpuDemand, count: int, candidates: CpuSet, kept: CpuSet) -> CpuSet:
        """The combination of ``count`` candidates that scores best, without ``kept``; empty if there are fewer."""
        if count <= 0 or len(candidates) < count:
            return EMPTY
        tiers = self.tiers(demand, candidates)
        pools = _nested(tiers, count, candidates)
        question = PluginRequest(demand=demand, count=count, candidates=candidates, kept=kept, tiers=tiers, pools=pools)
        combinations = self._selected(question)
        if len(combinations) == 1:
            return combinations[0]
        totals = [self._total(question, kept | cpus) for cpus in combinations]
        # Of equal ones the first selected: plug-ins in the order of `BUILT_IN`, then the site's.
        return combinations[totals.index(max(totals))]

    def _selected(self, question: PluginRequest) -> Sequence[CpuSet]:
        values: dict[int, None] = {}
        for _, _, masks_of_one in self._answers(
            "select",
            question.demand,
            lambda plugin: _combinations(plugin.select(question, self.context), question, _COMBINATIONS),
        ):
            values.update(dict.fromkeys(masks_of_one))
        fitter = self.context.fitter
        if not values:
            # Whatever is switched off or broken, there is a result.
            values[fitter.anywhere(question.count, question.pools[0].mask, question.kept.mask)] = None
        masks = list(values)[:_COMBINATIONS]
        if question.demand.full_cores:
            masks = list(dict.fromkeys(fitter.round_up(mask, question.candidates.mask) for mask in masks))
        return [CpuSet.from_mask(mask) for mask in masks]

    def _total(self, question: PluginRequest, whole: CpuSet) -> float:
        return round(
            sum(
                weight * score
                for _, weight, score in self._answers(
                    "score", question.demand, lambda plugin: _unit(plugin.score(question, self.context, whole))
                )
            ),
            _SAME,
        )

    def report(self, demand: CpuDemand, owned: CpuSet, given_back: CpuSet) -> None:
        """Report to the plug-ins what a demand owns now and what it released."""
        context = self.context
        # The lists: a generator calls no plug-in until it is read.
        if given_back and self._at["deallocate"]:
            list(self._answers("deallocate", demand, lambda plugin: plugin.deallocate(demand, context, given_back)))
        if owned and self._at["allocate"]:
            list(self._answers("allocate", demand, lambda plugin: plugin.allocate(demand, context, owned)))


def _nested(tiers: Sequence[CpuSet], count: int, candidates: CpuSet) -> tuple[CpuSet, ...]:
    """The first few unions of best tiers that hold ``count``, and everything."""
    pools: list[CpuSet] = []
    union = EMPTY
    for tier in tiers[:-1]:
        union |= tier
        if len(union) >= count and len(pools) < _POOLS - 1:
            pools.append(union)
    return (*pools, candidates)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r}")
    return value


def _unit(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"expected a score from 0.0 to 1.0, got {value!r}")
    return value


def _cpus(value: CpuSet) -> CpuSet:
    if not isinstance(value, CpuSet):
        raise TypeError(f"expected a CpuSet, got {value!r}")
    return value


def _scored(values: Iterable[Scored], cpus: CpuSet) -> list[tuple[int, float]]:
    """At most two groups a CPU: more would make no difference."""
    limit = 2 * len(cpus)
    return [(mask, _unit(score)) for group, score in islice(values, limit) if (mask := _cpus(group).mask & cpus.mask)]


def _combinations(values: Iterable[CpuSet], question: PluginRequest, limit: int) -> list[int]:
    """A plug-in's selection, checked: inside the candidates, and of the requested size."""
    combinations: list[int] = []
    for cpus in islice(values, limit):
        if not _cpus(cpus) <= question.candidates:
            raise ValueError(f"selected {cpus - question.candidates}, which is not allowed")
        if len(cpus) != question.count:
            raise ValueError(f"selected {len(cpus)} CPUs, expected {question.count}")
        combinations.append(cpus.mask)
    return combinations
