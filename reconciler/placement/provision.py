"""The demand to size an online pool for, by the pool's provision policy. Pure; `sizes.regulate` limits the steps.

The indicators of pid are what this agent measures: the pool's CPU use, its pods' waiting in the run queue without what
their own quotas cause (`cpu.wait_milli`), and their cycles per instruction (`cpi`).

Units: thousandths of a CPU; times are seconds on the view's clock; indicators are in a unit of their own.
Source: Katalyst's provision policies none, canonical, rama (here: pid; rama is off as soon as CPUs are reserved for
allocation, which is its default) and dynamic-quota, with its table of gains. Katalyst's latencies of memory reads,
memory writes and L3 misses are measured by a collector of its own, in counters of single processor models.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.placement.estimate import EstimateConfig, estimate, used_now
from reconciler.placement.sizes import SizeConfig, next_sizes
from state.cpu import GroupUse, Measured, PodIndicators, PoolSize, Uses
from state.evidence import PodSnapshot, SampleFrame
from state.model import Pod

USAGE: Final = "cpu_usage_ratio"
"""The indicator that always exists: what the pool's pods use, of its CPUs."""
_WAIT: Final = "cpu.wait_milli"
_CPI: Final = "cpi"
_USE: Final = "cpu.use"
_CERTAIN: Final = 0.5
"""A sample of less confidence is left out."""
_QUIET_MILLI: Final = 20
"""Below this a pod's cycles per instruction say nothing of its pool."""
_CPU: Final = 1000
_SIZE: Final = SizeConfig()
_FULL_PERCENT: Final = 90
"""Of its CPUs: a pool that uses more could use more than it has."""
_LESS_PERCENT: Final = 90
"""Of the pods' use when a size was too small: below this it is tried again."""


class ProvisionPolicy(StrEnum):
    """How a pool's demand is found."""

    NONE = "none"
    CANONICAL = "canonical"
    PID = "pid"
    DYNAMIC_QUOTA = "dynamic_quota"


class PidGains(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an indicator moves the size of a pool.

    A gain counts in sizes of the pool, not of the machine. The error is a logarithm, so a gain of 1 takes an indicator
    that is inverse to the size exactly to its target, whatever the size. Katalyst's 0.10 of 128 CPUs is 3.2 for a pool
    of 4, and anything above 2 swings ever wider.
    """

    # Constants: no two nodes need them to differ. They are Katalyst's, the gains times ten: so a pool of a tenth of the
    # machine moves alike.
    # Gain above the target: pool size times this, per factor e of excess.
    up: ClassVar[float] = 1.0
    # Gain below the target: well below the other, which keeps a small pool from flipping.
    down: ClassVar[float] = 0.4
    # No change while it exceeds the target by at most this share.
    above: ClassVar[float] = 0.01
    # No change while it is below the target by at most this share.
    below: ClassVar[float] = 0.06


# A section's defaults are those of its type: each row of the table that differs is a type of its own.
class WaitGains(PidGains, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waiting in the run queue."""

    target_percent: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(
            description="waiting for a CPU as a share of waiting and running, throttling not counted; null: not used",
        ),
    ] = None
    up: ClassVar[float] = 0.5
    down: ClassVar[float] = 0.09
    above: ClassVar[float] = 0.05
    below: ClassVar[float] = 0.20


class CpiGains(PidGains, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cycles per instruction."""

    target: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(
            description="cycles per instruction of the pool's pods; needs a PMU; null: not measured",
        ),
    ] = None

    above: ClassVar[float] = 0.0
    below: ClassVar[float] = 0.02
    # Each pod is counted once in perf.period_s, a minute: two of them, and some.
    stale_after_s: ClassVar[float] = 130.0


class PidConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pid policy: gains by indicator, and the largest step."""

    cpu_sched_wait: WaitGains = WaitGains()
    cpi: CpiGains = CpiGains()

    cpu_usage_ratio: ClassVar[PidGains] = PidGains()
    # Katalyst's largest step up.
    up_milli: ClassVar[int] = 10_000
    # Katalyst's largest step down.
    down_milli: ClassVar[int] = 2000
    # What is measured sooner is partly of the time before the change.
    settle_s: ClassVar[float] = 5.0
    # Fifteen samples; cpi has its own.
    stale_after_s: ClassVar[float] = 15.0


class ProvisionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The demand of online pools."""

    policy: Annotated[
        ProvisionPolicy,
        Meta(
            description="none: by requests; canonical: by use plus a margin; pid: towards indicators' targets; "
            "dynamic_quota: by target use"
        ),
    ] = ProvisionPolicy.CANONICAL
    pools: Annotated[
        Mapping[str, ProvisionPolicy],
        Meta(description="policy per pool, such as shared/NAME, if different"),
    ] = {}
    target_percent: Annotated[
        int, Meta(ge=5, le=100, description="target use of a pool's CPUs, for pid and dynamic_quota")
    ] = 60
    pid: PidConfig = PidConfig()

    estimate: ClassVar[EstimateConfig] = EstimateConfig()


class PidIndicator(NamedTuple):
    """One measured number against its target. ``current`` or ``age_s`` None: unknown. Targets are above 0."""

    current: float | None
    target: float
    age_s: float | None = 0.0


def signals_of(config: ProvisionConfig) -> frozenset[str]:
    """The signals of pods that the interference monitor must measure for the pid policy."""
    if ProvisionPolicy.PID not in {config.policy, *config.pools.values()}:
        return frozenset()
    targets = {_WAIT: config.pid.cpu_sched_wait.target_percent, _CPI: config.pid.cpi.target}
    return frozenset(signal for signal, target in targets.items() if target is not None)


def pod_indicators(frame: SampleFrame, now: float) -> dict[str, PodIndicators]:
    """What a frame has of the online pods by uid, ages as of ``now`` (s, the frame's clock).

    A sample that is less than half certain is left out.
    """
    late_s = max(0.0, now - frame.at_s)

    def measured(pod: PodSnapshot, signal: str) -> Measured | None:
        sample = frame.samples.get(pod.subject, {}).get(signal)
        if sample is None or sample.confidence < _CERTAIN:
            return None
        return Measured(value=sample.value, age_s=sample.age_s + late_s)

    return {
        uid: PodIndicators(wait_milli=measured(pod, _WAIT), cpi=measured(pod, _CPI), use_milli=measured(pod, _USE))
        for uid, pod in frame.pods.items()
        if pod.pod_class.online
    }


def pool_indicators(
    pods: Sequence[Pod], uses: Uses, measured: Mapping[str, PodIndicators], config: PidConfig
) -> dict[str, PidIndicator]:
    """The indicators of a pool that have a target, from those of its pods. ``measured``: by pod uid.

    ``cpu_sched_wait``: percent, waiting of all pods by their waiting and running. ``cpi``: cycles of all pods by their
    instructions; pods that hardly run do not count. Unknown as soon as one pod that counts is unknown.
    """
    indicators: dict[str, PidIndicator] = {}
    if (target := config.cpu_sched_wait.target_percent) is not None:
        waits = [(use, measured[pod.uid].wait_milli if pod.uid in measured else None) for pod, use in _used(pods, uses)]
        indicators["cpu_sched_wait"] = _wait_indicator(waits, target)
    if (target := config.cpi.target) is not None:
        cpis = [
            (use, measured[pod.uid].cpi if pod.uid in measured else None)
            for pod, use in _used(pods, uses)
            if use is None or use.cpu_milli >= _QUIET_MILLI
        ]
        if cpis:
            indicators["cpi"] = _cpi_indicator(cpis, target)
    return indicators


def _used(pods: Sequence[Pod], uses: Uses) -> list[tuple[Pod, GroupUse | None]]:
    return [(pod, uses.get(pod.group.path)) for pod in pods]


def _wait_indicator(waits: Sequence[tuple[GroupUse | None, Measured | None]], target: float) -> PidIndicator:
    known = [(use, wait) for use, wait in waits if use is not None and wait is not None]
    if len(known) < len(waits):
        return PidIndicator(None, target, None)
    run_milli, wait_milli = sum(use.cpu_milli for use, _ in known), sum(wait.value for _, wait in known)
    age_s = max((max(use.age_s, wait.age_s) for use, wait in known), default=0.0)
    total = run_milli + wait_milli
    return PidIndicator(100.0 * wait_milli / total if total > 0 else 0.0, target, age_s)


def _cpi_indicator(cpis: Sequence[tuple[GroupUse | None, Measured | None]], target: float) -> PidIndicator:
    known = [(use, cpi) for use, cpi in cpis if use is not None and cpi is not None and cpi.value > 0]
    if len(known) < len(cpis):
        return PidIndicator(None, target, None)
    cycles = sum(use.cpu_milli for use, _ in known)
    instructions = sum(use.cpu_milli / cpi.value for use, cpi in known)
    return PidIndicator(cycles / instructions, target, max(cpi.age_s for _, cpi in known))


def demand(
    pool: str,
    pods: Sequence[Pod],
    uses: Uses,
    measured: Mapping[str, PodIndicators],
    previous: PoolSize | None,
    *,
    now: float,
    config: ProvisionConfig,
    size: SizeConfig = _SIZE,
    threads: int = 1,
    starting: bool = False,
) -> tuple[int, str]:
    """What the pool's pods need (before headroom and step limits), and why, without numbers that follow each sample.

    ``measured``: indicators of pods by uid, for the pid policy; ``size``, ``threads``: as for `sizes.regulate`.
    ``starting``: the agent has no two readings yet.
    """
    policy = config.pools.get(pool, config.policy)
    if not pods:
        return 0, "no pod"
    if policy is ProvisionPolicy.NONE:
        request = estimate(pods, {}, config.estimate)
        return request.milli, "not measured: by requests"
    need = estimate(pods, uses, config.estimate)
    # So a restart moves nothing. Only at the start: a sampler that remains silent must not starve new pods for ever.
    if starting and not need.known and previous is not None:
        return previous.wanted_milli, "not measured yet: as before the start"
    match policy:
        case ProvisionPolicy.PID if previous is not None:
            return _pid(pods, uses, measured, previous, now=now, config=config, size=size, threads=threads)
        case ProvisionPolicy.DYNAMIC_QUOTA:
            # The size that the pods fill to the target. Katalyst's is a quota for BE work, reclaimed CPUs x (target -
            # current) + BE use: CPUs x target less what others use, which the budget law holds here in any case.
            margin = round(100 * 100 / config.target_percent) - 100
            filled = estimate(pods, uses, replace(config.estimate, margin_percent=margin))
            milli, why = filled.milli, f"dynamic_quota: target use {config.target_percent} %: {filled.describe}"
        case _:
            milli, why = need.milli, f"{policy}: {need.describe}"
    if previous is not None and milli < previous.wanted_milli and _starved(pods, uses, previous, config):
        return previous.wanted_milli, f"{why}; not less while it has less than that"
    return milli, why


def with_experience(
    size: PoolSize, previous: PoolSize | None, pods: Sequence[Pod], uses: Uses, config: EstimateConfig
) -> PoolSize:
    """A size under the pid policy; where it is larger than the previous one, with that one as too small."""
    if previous is None or size.asked <= previous.asked:
        return size
    return replace(size, small_cpus=previous.cpus, small_milli=used_now(pods, uses, config).milli)


def _starved(pods: Sequence[Pod], uses: Uses, previous: PoolSize, config: ProvisionConfig) -> bool:
    """Whether others cut the pool, and it uses what it has: that is not what it needs."""
    used = used_now(pods, uses, config.estimate).milli
    return previous.cut and used * 100 >= previous.cpus * _CPU * _FULL_PERCENT


def _pid(
    pods: Sequence[Pod],
    uses: Uses,
    measured: Mapping[str, PodIndicators],
    previous: PoolSize,
    *,
    now: float,
    config: ProvisionConfig,
    size: SizeConfig,
    threads: int,
) -> tuple[int, str]:
    indicators = pool_indicators(pods, uses, measured, config.pid)
    if (usage := usage_ratio(pods, uses, previous.cpus, config)) is not None:
        indicators[USAGE] = usage
    wanted, why = pid_step(indicators, previous, now, config.pid)
    if why is None:
        # No indicator is known: the estimate decides, and only upwards.
        need = estimate(pods, uses, config.estimate)
        return max(need.milli, previous.wanted_milli), f"pid: no indicator available: {need.describe}, no decrease"
    least = estimate(pods, uses, replace(config.estimate, margin_percent=0))
    before = min(previous.wanted_milli, previous.cpus * _CPU)
    beside = next_sizes(previous.cpus, size, threads=threads)
    if wanted > before and previous.cut:
        # What others cut away may still rise to the requests.
        requests = estimate(pods, {}, replace(config.estimate, fallback_milli=0)).milli
        wanted = max(previous.wanted_milli, min(wanted, requests))
    elif wanted > before:
        # At least one step of the pool's size: a smaller one changes nothing, and the next one begins where it did.
        wanted = max(wanted, beside.grows_at)
    elif wanted < before:
        # Only to a size that is large enough, if the indicators rise as the CPUs get fewer. Some rise faster than that:
        # so a size that was too small is tried again only when the pods use a tenth less than then.
        goal = max(_goal(indicators, previous.cpus), least.milli)
        small = used_now(pods, uses, config.estimate).milli * 100 >= previous.small_milli * _LESS_PERCENT
        if goal + beside.noise > beside.lower * _CPU:
            wanted, why = previous.wanted_milli, f"{why}, but a smaller size has no room"
        elif beside.lower <= previous.small_cpus and small:
            wanted, why = previous.wanted_milli, f"{why}, but a smaller size was too small"
        else:
            wanted = min(max(wanted, goal), beside.shrinks_at)
    # The use, and the requests of new pods: a pod that just started shows in no indicator.
    if least.milli > wanted:
        return least.milli, f"pid: {why}; but at least {least.describe}"
    return wanted, f"pid: {why}"


def _goal(indicators: Mapping[str, PidIndicator], cpus: int) -> int:
    """The size (thousandths of a CPU) at which all known indicators are at their targets, if inverse to the size."""
    ratios = [item.current / item.target for item in indicators.values() if item.current is not None]
    return math.ceil(max(ratios, default=1.0) * cpus * _CPU)


def usage_ratio(pods: Sequence[Pod], uses: Uses, cpus: int, config: ProvisionConfig) -> PidIndicator | None:
    """`USAGE` of a pool of ``cpus`` CPUs: its own pods' use only, as BE work on the same CPUs gives way.

    None when the use of no pod is known at all; unknown when that of some pod is not.
    """
    used = used_now(pods, uses, config.estimate)
    if used.known == 0 or cpus < 1:
        return None
    current = used.milli / (cpus * _CPU) if used.known == used.pods else None
    return PidIndicator(current, config.target_percent / 100, used.age_s)


def pid_step(
    indicators: Mapping[str, PidIndicator], previous: PoolSize, now: float, config: PidConfig
) -> tuple[int, str | None]:
    """The demand that brings the indicators to their targets, and which of them decided; no reason without any.

    The derivative gain is 0, as in the source.
    """
    settled = not previous.changed_at <= now < previous.changed_at + config.settle_s
    steps: list[tuple[float, str]] = []
    for name in sorted(indicators):
        gains: PidGains = getattr(config, name)
        indicator = indicators[name]
        stale_after_s = gains.stale_after_s if isinstance(gains, CpiGains) else config.stale_after_s
        known = indicator.current is not None and indicator.age_s is not None and indicator.age_s <= stale_after_s
        # As the largest step wins, an unknown indicator keeps the others from shrinking the pool.
        if indicator.current is None or not known:
            steps.append((0.0, f"{name} is unknown: no change"))
        # One step for each size: repeated calls (a burst of pod events) add nothing up.
        elif not settled or now - (indicator.age_s or 0.0) < previous.changed_at <= now:
            steps.append((0.0, "waiting for the effect of the last change"))
        else:
            steps.append(_step(name, indicator.current, indicator.target, gains))
    if not steps:
        return previous.wanted_milli, None
    factor, why = max(steps)
    if factor == 0.0:
        return previous.wanted_milli, why
    moved = round(factor * previous.cpus * _CPU)
    # A part that others cut away is not requested again and again on top.
    start = min(previous.wanted_milli, previous.cpus * _CPU)
    return max(0, start + max(-config.down_milli, min(config.up_milli, moved))), why


def _step(name: str, current: float, target: float, gains: PidGains) -> tuple[float, str]:
    """In sizes of the pool. A ratio of nothing at all has no logarithm: it is taken for a thousandth of the target."""
    excess = (current - target) / target
    if -gains.below <= excess <= gains.above:
        return 0.0, f"{name} is near its target"
    error = math.log(max(current, target / 1000) / target)
    if error > 0:
        return gains.up * error, f"{name} is above its target"
    return gains.down * error, f"{name} is below its target"
