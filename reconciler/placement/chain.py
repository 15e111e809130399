"""The plug-in chain of the choice of CPUs: the interface of a rule, the enabled rules, and how they are called.

A rule is one small class, `Plugin`, that overrides one or more extension points:

    sort        in which order the demands choose
    filter      CPUs that this demand may not have
    post_filter which of those it may have after all when too few are left
    pre_score   single CPUs, in groups of one score each
    select      combinations worth a look: a handful, made out of the pools that the pre-scores give, no enumeration
    score       a whole combination, 0.0 to 1.0
    allocate    called with the CPUs that a demand owns in the end
    deallocate  called with the CPUs that it released

The best weighted sum of scores wins; of equal ones the combination that was selected first (plug-ins in the order of
their names in `BUILT_IN`, then the site's). Inside a combination the built-in ones take the lowest free ids.

Instances exist for one choice, so the same input has the same result whatever state they keep. A plug-in that raises or
returns an invalid result is skipped for that demand, its first error is reported, and no other is stopped.

Source: the CPU manager plug-in model proposed for the kubelet (sort, filter, post-filter, pre-score, select, score,
allocate, deallocate). Differences: pre-scores are given by groups (bit masks) instead of per CPU, so that a rule costs
the same on 8 and on 1,024 CPUs; select yields several combinations, for score to have something to compare; a
post-filter relaxes filters instead of evicting a pod. `reconciler.placement.plugin_runner` calls the plug-ins;
docs/cpu-plugins.md describes how a site writes one.
"""

# ruff: noqa: ARG002  (a plug-in's unused extension points use no argument)

from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

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

    An instance exists for one choice of all demands, and is called in the order in which they choose.
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
        """Combinations of ``question.count`` CPUs (more only to complete cores), the best first."""
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
