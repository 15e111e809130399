"""How many CPUs each online pool gets: fast steps up, slow steps down, and a fair cut where they do not all fit.

Arithmetic only. Units: sizes are CPUs (hardware threads), demand is thousandths of a CPU, times are seconds on the
view's clock.

Source: Katalyst's regulator (a fixed reserve on top of the estimate, at most 10 CPUs up a step, at most 2 down and 30 s
apart, even numbers with SMT) and its proportional cut of pools that do not fit.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.runtime import format as fmt
from state.cpu import PoolSize

_CPU: Final = 1000
_NOISE_MILLI: Final = 500
"""Of each thread of a core: so much more than the demand has to fit a smaller size. Noise about a whole number moves
nothing."""
_REDUCED: Final = "; reduced to "
_Step = Annotated[int, Meta(ge=1, le=1024)]
_Percent = Annotated[int, Meta(ge=0, le=1000)]
_Seconds = Annotated[float, Meta(ge=0, le=86400)]


class SizeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of an online pool."""

    headroom_percent: Annotated[_Percent, Meta(description="margin added to a pool's demand")] = 10

    # Katalyst's: a pool in need grows at once by what a service may start.
    grow_step_cpus: ClassVar[_Step] = 10
    # The same for large pools; the larger of the two.
    grow_step_percent: ClassVar[_Percent] = 50
    # As often as the use is measured. A burst of pod events causes many calls: a step per call would be unlimited.
    grow_interval_s: ClassVar[_Seconds] = 1.0
    # Katalyst's: demand returns sooner than a pool should lose its CPUs.
    shrink_step_cpus: ClassVar[_Step] = 2
    # The same for large pools; the larger of the two. By two CPUs a pool of 200 that needs 20 shrinks for 45 minutes;
    # by a tenth, eleven.
    shrink_step_percent: ClassVar[Annotated[int, Meta(ge=0, le=100)]] = 10
    # A dip of the load is shorter than this.
    shrink_interval_s: ClassVar[_Seconds] = 30.0
    # A share of a small demand is less than one thread can use. Katalyst's four CPUs for every pool are most of a small
    # node.
    headroom_milli: ClassVar[int] = 1000
    # Katalyst's: a core with two threads.
    minimum_cpus: ClassVar[int] = 2


class NextSizes(NamedTuple):
    """One step down from a size, and the demands (thousandths of a CPU) for it and for one step up.

    ``noise``: what has to fit the lower size beside the demand.
    """

    lower: int
    shrinks_at: int
    noise: int
    grows_at: int


class FittedSizes(Struct, frozen=True, kw_only=True):
    """Sizes that fit together: CPUs of their own, at least one each.

    ``shared``: pools without a CPU of their own, sorted; one CPU is left for all of them, if there is any.
    """

    sizes: Mapping[str, int]
    shared: tuple[str, ...] = ()


def regulate(
    previous: PoolSize | None, wanted_milli: int, now: float, config: SizeConfig, *, threads: int = 1
) -> PoolSize:
    """One step of a pool's size towards its demand.

    A pool without a previous size gets its demand at once. ``threads``: of a core.
    """
    # A pool that ends in the middle of a core shares the core's caches with its neighbour.
    unit = max(1, threads)
    target = _target(wanted_milli, unit, config)
    text = f"demand with margin {fmt.cpu(wanted_milli)}: {fmt.plural(target, 'CPU')}"
    if previous is None:
        return PoolSize(wanted_milli=wanted_milli, cpus=target, changed_at=now, reason=text)
    elapsed = now - previous.changed_at
    # The clock went back: steps are taken as due, and the times start again.
    rebooted = elapsed < 0
    # From what the pool requested, not from what a cut left of it: a size that followed its own cut would give every
    # pool the same step, and so move CPUs from large pools to small ones at constant demand.
    old = previous.asked
    if target > old and (rebooted or elapsed >= config.grow_interval_s):
        step = max(config.grow_step_cpus, old * config.grow_step_percent // 100)
        size = min(target, _round_up(old + step, unit))
        note = text if size == target else f"{text}; grows by {size - old} per step"
        changed = replace(previous, wanted_milli=wanted_milli, cpus=size, asked_cpus=0, changed_at=now, reason=note)
        return replace(changed, shrunk_at=min(previous.shrunk_at, now))
    lower = _target(wanted_milli + _NOISE_MILLI * unit, unit, config)
    # A pool that has just grown does not shrink within the interval either.
    if lower < old and (rebooted or elapsed >= config.shrink_interval_s):
        # What others cut away already needs no steps.
        old = min(old, max(previous.cpus, lower))
        step = max(config.shrink_step_cpus, old * config.shrink_step_percent // 100)
        size = _round_up(old - step, unit)
        if size >= old:
            # The limit is less than a core: then a core it is.
            size = _below(old, unit)
        size = max(lower, size)
        note = text if size == lower else f"{text}; shrinks by {old - size} per step"
        changed = replace(previous, wanted_milli=wanted_milli, cpus=size, asked_cpus=0, changed_at=now, reason=note)
        return replace(changed, shrunk_at=now)
    if rebooted:
        return replace(previous, changed_at=now, shrunk_at=min(previous.shrunk_at, now))
    # With the demand and the reason of its decision: values that follow each sample would make every plan differ.
    return previous


def next_sizes(cpus: int, config: SizeConfig, *, threads: int = 1) -> NextSizes:
    """One step down and one step up from a size, and the demands that `regulate` takes them for."""
    unit = max(1, threads)
    lower, upper = _below(cpus, unit), _round_up(cpus + 1, unit)
    return NextSizes(
        lower=lower,
        shrinks_at=max(0, _most(lower, config) - _NOISE_MILLI * unit),
        noise=_NOISE_MILLI * unit,
        grows_at=max(0, _most(upper - unit, config) + 1),
    )


def granted(size: PoolSize, cpus: int, previous: PoolSize | None, now: float) -> PoolSize:
    """A regulated size after `fit` gave the pool ``cpus``; the previous value where that is what it had already.

    ``now``: the size changes at this time if the pool has other CPUs than before.
    """
    if previous is not None and cpus == previous.cpus and size.asked == previous.asked:
        return previous
    reason = size.reason.partition(_REDUCED)[0]
    at = now if previous is None or previous.cpus != cpus else size.changed_at
    if cpus >= size.asked:
        return replace(size, cpus=size.asked, asked_cpus=0, changed_at=at, reason=reason)
    reason += f"{_REDUCED}{cpus}: the pools do not all fit"
    return replace(size, cpus=cpus, asked_cpus=size.asked, changed_at=at, reason=reason)


def fit(sizes: Mapping[str, int], available: int) -> FittedSizes:
    """Cut the pools to ``available`` CPUs where they do not fit; where they do, each keeps its request.

    A pool requests its size, but at least one CPU. The rule where the sum is too large:

    1. Each pool's share is its part of ``available`` in proportion to its request; a pool whose share is below one CPU
       has one, and the others divide the rest in the same way.
    2. Shares are rounded down, and the CPUs left over are given one each to the largest remainders; of equal ones to
       the pool with the larger request, then to the lower name. (Katalyst rounds up from the largest on, which leaves
       the last in the list with what is left.)
    3. With fewer CPUs than pools, the pools with the smallest requests (of equal ones the higher names) share one CPU,
       and the others have one each.

    So every size is less than one CPU away from its exact share, and a larger request never results in less, nor in
    less than a smaller one gets. No rule of this kind can guarantee one thing as well (Balinski and Young): when a CPU
    is added, a pool may lose one, though never more. CPUs that are not requested are left to the caller.
    """
    numbers = {name: max(size, 1) for name, size in sizes.items()}
    if sum(numbers.values()) <= available:
        return FittedSizes(sizes={name: numbers[name] for name in sorted(numbers)})
    if available < len(numbers):
        order = sorted(numbers, key=lambda name: (-numbers[name], -sizes[name], name))
        own = order[: max(0, available - 1)]
        return FittedSizes(sizes=dict.fromkeys(sorted(own), 1), shared=tuple(sorted(set(order) - set(own))))
    return FittedSizes(sizes=proportional(numbers, dict.fromkeys(numbers, 1), available, sizes))


def proportional(
    numbers: Mapping[str, int], least: Mapping[str, int], available: int, sizes: Mapping[str, int]
) -> Mapping[str, int]:
    """All CPUs in proportion to positive ``numbers``, none below ``least``, which fit together; ``sizes`` settle a tie.

    Steps 1 and 2 of the rule of `fit`, in whole numbers: a share is ``room * number // total``.
    """
    fixed: dict[str, int] = {}
    while True:
        rest = [name for name in numbers if name not in fixed]
        room = available - sum(fixed.values())
        total = sum(numbers[name] for name in rest)
        short = [name for name in rest if room * numbers[name] < least[name] * total]
        if not short:
            break
        fixed.update((name, least[name]) for name in short)
    result = {name: room * numbers[name] // total for name in rest}
    over = room - sum(result.values())
    order = sorted(rest, key=lambda name: (-(room * numbers[name] % total), -numbers[name], -sizes[name], name))
    for name in order[:over]:
        result[name] += 1
    return dict(sorted((result | fixed).items()))


def _below(cpus: int, unit: int) -> int:
    return _round_up(cpus, unit) - unit


def _most(cpus: int, config: SizeConfig) -> int:
    """The largest demand that a size has room for with its headroom; below 0: none."""
    milli, percent = cpus * _CPU, config.headroom_percent
    share = milli * 100 // (100 + percent)
    # The headroom is rounded down, so a little more may fit.
    while share + 1 + (share + 1) * percent // 100 <= milli:
        share += 1
    return min(milli - config.headroom_milli, share)


def _target(wanted_milli: int, unit: int, config: SizeConfig) -> int:
    wanted = max(0, wanted_milli)
    headroom = max(config.headroom_milli, wanted * config.headroom_percent // 100)
    return _round_up(max(config.minimum_cpus, -(-(wanted + headroom) // _CPU)), unit)


def _round_up(cpus: int, unit: int) -> int:
    return -(-cpus // unit) * unit
