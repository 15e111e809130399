"""What an online pool is to be sized for, by the provision policy of the pool. Pure; `sizes.regulate` limits the steps.

Units: thousandths of a CPU; times are seconds on the view's clock; indicators are in a unit of their own.
Source: Katalyst's provision policies none, canonical, rama (here: pid) and dynamic-quota, with its table of gains.
Where we differ, and why:

- pid works. Katalyst's rama is off as soon as CPUs are reserved for allocation, which is its default.
- A gain counts in sizes of the pool, not of the machine (so the numbers are ten times Katalyst's: a pool of a tenth of
  the machine moves alike). The error is a logarithm, so a gain of 1 takes an indicator that is inverse to the size
  exactly to its target, whatever the size; Katalyst's 0.10 of 128 CPUs is 3.2 for a pool of 4, and anything above 2
  swings ever wider. Down gains stay well below the up ones, which is what keeps a small pool from flipping.
- A step is taken from the size in force, once for each size: asking again (a burst of pod events) adds nothing up, a
  reading from before the last change is not used again, and a size that others cut short does not wind up.
- An indicator that is unknown or old means no change and, as the largest adjustment wins, keeps the others from
  shrinking the pool. With none at all the estimate decides, and only upwards.
- pid never goes below what the pods use, nor below what new ones ask for: a pod that just came shows in no indicator.
- Katalyst's dynamic-quota is a quota for BE work, reclaimed CPUs x (target - current) + BE use. As current x CPUs is
  the use of all, that is CPUs x target less what others use: the budget law (`reconciler.policies.budget`), which
  holds here under every policy. What is left of it here is the pool's side: the size that the pods fill to the target.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.placement.estimate import EstimateConfig, estimate, used_now
from state.cpu import PoolSize, Uses
from state.model import Pod

USAGE: Final = "cpu_usage_ratio"
"""The indicator that is made here where nobody else tells it: what the pool's pods use, of its CPUs."""
_CPU: Final = 1000


class ProvisionPolicy(StrEnum):
    """How a pool's demand is found."""

    NONE = "none"
    CANONICAL = "canonical"
    PID = "pid"
    DYNAMIC_QUOTA = "dynamic_quota"


_Up = Annotated[
    float, Meta(ge=0, le=2, description="gain above the target: pool size times this, per factor e of excess")
]
_Down = Annotated[float, Meta(ge=0, le=2, description="gain below the target")]
_Above = Annotated[float, Meta(ge=0, le=10, description="no change while it exceeds the target by at most this share")]
_Below = Annotated[float, Meta(ge=0, le=1, description="no change while it is below the target by at most this share")]


class PidGains(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an indicator moves the size of a pool."""

    up: _Up = 1.0
    down: _Down = 0.4
    above: _Above = 0.01
    below: _Below = 0.06


# A section's defaults are those of its type: each row of the table that differs is a type of its own.
class WaitGains(PidGains, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a waiting time or latency moves the size of a pool."""

    up: _Up = 0.5
    down: _Down = 0.09
    above: _Above = 0.05
    below: _Below = 0.20


class CpiGains(PidGains, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How cycles per instruction move the size of a pool."""

    above: _Above = 0.0
    below: _Below = 0.02


class PidConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pid policy: gains by indicator, and the largest step."""

    cpu_usage_ratio: PidGains = PidGains()
    cpu_sched_wait: WaitGains = WaitGains()
    mem_read_latency: WaitGains = WaitGains()
    mem_write_latency: WaitGains = WaitGains()
    l3_miss_latency: WaitGains = WaitGains()
    cpi: CpiGains = CpiGains()
    up_milli: Annotated[
        int, Meta(ge=0, le=1_024_000, description="largest increase per step, in thousandths of a CPU")
    ] = 10_000
    down_milli: Annotated[
        int, Meta(ge=0, le=1_024_000, description="largest decrease per step, in thousandths of a CPU")
    ] = 2000
    settle_s: Annotated[
        float, Meta(ge=0, le=3600, description="seconds after a change of size before an indicator counts again")
    ] = 5.0
    stale_after_s: Annotated[float, Meta(gt=0, le=3600, description="seconds after which an indicator is too old")] = (
        15.0
    )


class ProvisionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many CPUs online pools are sized for."""

    policy: Annotated[
        ProvisionPolicy,
        Meta(
            description="none: by requests; canonical: by use plus a margin; pid: towards the targets of the "
            "indicators; dynamic_quota: by the pool's target use"
        ),
    ] = ProvisionPolicy.CANONICAL
    pools: Annotated[
        Mapping[str, ProvisionPolicy],
        Meta(description="policy per pool, such as shared/NAME, if different"),
    ] = {}
    target_percent: Annotated[
        int, Meta(ge=5, le=100, description="target use of a pool's CPUs, for pid and dynamic_quota")
    ] = 60
    estimate: EstimateConfig = EstimateConfig()
    pid: PidConfig = PidConfig()


class PidIndicator(NamedTuple):
    """One measured number against its target. ``current`` or ``age_s`` None: unknown. Targets are above 0."""

    current: float | None
    target: float
    age_s: float | None = 0.0


def demand(
    pool: str,
    pods: Sequence[Pod],
    uses: Uses,
    indicators: Mapping[str, PidIndicator],
    previous: PoolSize | None,
    *,
    now: float,
    config: ProvisionConfig,
    starting: bool = False,
) -> tuple[int, str]:
    """What the pool's pods need (before headroom and step limits), and why, without numbers that follow each sample.

    ``starting``: the agent has no two readings yet; then a pool of an earlier run keeps its demand, so that a restart
    moves nothing. Not later: a sampler that stays silent must not starve new pods for ever.
    """
    policy = config.pools.get(pool, config.policy)
    if not pods:
        return 0, "no pod"
    if policy is ProvisionPolicy.NONE:
        asked = estimate(pods, {}, config.estimate)
        return asked.milli, "not measured: by requests"
    need = estimate(pods, uses, config.estimate)
    if starting and not need.known and previous is not None:
        return previous.wanted_milli, "not measured yet: as before the start"
    match policy:
        case ProvisionPolicy.PID if previous is not None:
            return _pid(pods, uses, indicators, previous, now=now, config=config)
        case ProvisionPolicy.DYNAMIC_QUOTA:
            margin = round(100 * 100 / config.target_percent) - 100
            filled = estimate(pods, uses, replace(config.estimate, margin_percent=margin))
            return filled.milli, f"dynamic_quota: target use {config.target_percent} %: {filled.describe}"
        case _:
            return need.milli, f"{policy}: {need.describe}"


def _pid(
    pods: Sequence[Pod],
    uses: Uses,
    indicators: Mapping[str, PidIndicator],
    previous: PoolSize,
    *,
    now: float,
    config: ProvisionConfig,
) -> tuple[int, str]:
    told = dict(indicators)
    if USAGE not in told and (own := usage_ratio(pods, uses, previous.cpus, config)) is not None:
        told[USAGE] = own
    wanted, why = pid_step(told, previous, now, config.pid)
    if why is None:
        need = estimate(pods, uses, config.estimate)
        return max(need.milli, previous.wanted_milli), f"pid: no indicator available: {need.describe}, no decrease"
    least = estimate(pods, uses, replace(config.estimate, margin_percent=0))
    if least.milli > wanted:
        return least.milli, f"pid: {why}; but at least {least.describe}"
    return wanted, f"pid: {why}"


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
    """The demand that brings the indicators to their targets, and which of them decided.

    No reason means that there is no indicator with gains. Gains without an indicator have no say: this node cannot
    measure them. The derivative gain is 0, as in the source.
    """
    settled = not previous.changed_at <= now < previous.changed_at + config.settle_s
    steps: list[tuple[float, str]] = []
    for name in sorted(indicators):
        gains = getattr(config, name, None)
        if not isinstance(gains, PidGains):
            continue
        one = indicators[name]
        known = one.current is not None and one.age_s is not None and one.age_s <= config.stale_after_s
        if one.current is None or not known or one.target <= 0:
            steps.append((0.0, f"{name} is unknown: no change"))
        elif not settled or now - (one.age_s or 0.0) < previous.changed_at <= now:
            steps.append((0.0, "waiting for the effect of the last change"))
        else:
            steps.append(_step(name, one.current, one.target, gains))
    if not steps:
        return previous.wanted_milli, None
    factor, why = max(steps)
    if factor == 0.0:
        return previous.wanted_milli, why
    moved = round(factor * previous.cpus * _CPU)
    # What others cut away is not asked for again and again on top.
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
