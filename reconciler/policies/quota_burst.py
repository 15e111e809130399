"""quota burst: a throttled online container is lent quota above its limit for a while, as long as the node has room.

`step` is the control law of one container, and `guard` gives the state of the node; the sampler keeps their states and
runs them once a second. The loans reach the planner as ``NodeView.lent_us``.

Source: Koordinator's cfsQuotaBurst (up by a fifth while throttled, down by a fifth, between the limit and a percentage
of it; a guard on the use of the shared CPUs; a token bucket for each container).
"""

import zlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.policies import lending
from reconciler.policies.base import Policy, PolicyConfig
from reconciler.policies.lending import CPU_MILLI, QuotaBorrower, ceiling_us
from state.cpu import BurstLimit
from state.model import NodeCpu, NodeView, Pod, Pools, Setting
from state.plan import NodePlan
from state.pod_index import derived

NAME: Final = "quota_burst"
# Koordinator's numbers, up to `_GUARD_S`.
_UP: Final = (6, 5)
_DOWN: Final = (4, 5)
_COOLING: Final = 0.9
"""From this part of the threshold on no more is lent."""
_SPENDS_FROM: Final = 100
"""In percent of the limit."""
_SAVES_BELOW: Final = 60
_GUARD_SAMPLES: Final = 5
_GUARD_S: Final = 10.0
FRESH_S: Final = 3.0
"""After so long without a new reading the node is unknown."""
UNKNOWN_S: Final = 10.0
"""After so long without a reading a loan is taken back step by step: unknown does not count as good. Until then it
does not rise."""


class QuotaBurstConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which containers are lent quota above the limit, how much, and when lending stops."""

    enabled: Annotated[
        bool,
        Meta(description="lend quota above the limit to throttled online containers; excludes quota_turbo"),
    ] = False
    pods: Annotated[
        bool,
        Meta(
            description="while it and quota_turbo are off: apply to pods that request it (koordinator.sh/cpuBurst "
            "auto or cfsQuotaBurstOnly, katalyst cpu_burst_policy dynamic)"
        ),
    ] = True
    percent: Annotated[
        int, Meta(ge=100, le=1000, description="largest quota of a container, in percent of its limit")
    ] = 300
    budget_s: Annotated[
        int,
        Meta(
            ge=-1,
            le=86_400,
            description="seconds of full loan of a container, saved while it uses less than 60 % of its limit; -1: "
            "unlimited, 0: never",
        ),
    ] = -1
    threshold_percent: Annotated[
        int,
        Meta(ge=1, le=100, description="use of online pods' CPUs above which all loans are returned"),
    ] = 50

    # A loan that is not needed for a minute is returned. In Koordinator it remains until the node is overloaded, which
    # is when hundreds of containers with three times their limit do most harm.
    unused_s: ClassVar[float] = 60.0


class NodeCpuState(StrEnum):
    """Result of the guard: lend, lend no more, take back; unknown lends nothing."""

    IDLE = "idle"
    COOLING = "cooling"
    OVERLOAD = "overload"
    UNKNOWN = "unknown"


class BurstGuard(Struct, frozen=True, kw_only=True):
    """The guard's memory, oldest first: (when, use of the shared CPUs in thousandths of what they have)."""

    samples: tuple[tuple[float, int], ...] = ()
    state: NodeCpuState = NodeCpuState.UNKNOWN
    room_milli: int = 0
    """What is left below the threshold (thousandths of a CPU)."""


class BurstSample(Struct, frozen=True, kw_only=True):
    """What is known of one container now. ``use_milli`` and ``throttled`` None: unknown.

    ``percent``, ``budget_s``: its own, else the config's. ``cpus``: how many the node has.
    """

    borrower: QuotaBorrower
    percent: int
    budget_s: int
    cpus: int
    use_milli: int | None = None
    throttled: float | None = None


class BurstState(Struct, frozen=True, kw_only=True):
    """One container's loan and bucket.

    ``quota_us`` is what it holds, between its limit and the ceiling. ``tokens``: seconds at one percent of the limit,
    None without a bucket. ``known_at``: when its use was known last; ``needed_at``: when it needed the loan last.
    """

    quota_us: int
    limit_us: int
    tokens: float | None = None
    at: float = 0.0
    known_at: float = 0.0
    needed_at: float = 0.0


def guard(before: BurstGuard, cpu: NodeCpu | None, pools: Pools, now: float, threshold_percent: int) -> BurstGuard:
    """The state of the shared CPUs: the mean of at most five samples and ten seconds.

    Shared are CPUs that no container owns. Without a new reading the node is at best cooling, and soon unknown.
    """
    samples = tuple(look for look in before.samples if 0.0 <= now - look[0] < _GUARD_S)
    fresh = False
    cpus = pools.online_cpus - pools.dedicated_cpus
    top = CPU_MILLI * len(cpus)
    # An older reading is the one of the last step: each counts once in the mean.
    if cpu is not None and cpu.age_s is not None and cpu.age_s < cpu.interval_s / 2 and top:
        fresh = True
        # A CPU whose idle time is unknown is busy; iowait is idle.
        idle = int(sum(cpu.idle.get(number, 0.0) for number in cpus) * CPU_MILLI)
        # BE pods' use counts as room: they yield. Of one reading; Koordinator subtracts metrics of different ages.
        used = max(0, top - idle - cpu.reclaimed_milli)
        samples = (*samples, (now, used * 1000 // top))[-_GUARD_SAMPLES:]
    elif not samples or now - samples[-1][0] > FRESH_S:
        return BurstGuard(samples=samples)
    mean = sum(share for _, share in samples) / len(samples)
    limit = threshold_percent * 10
    state = NodeCpuState.IDLE
    if mean >= limit:
        state = NodeCpuState.OVERLOAD
    elif mean >= limit * _COOLING or not fresh:
        state = NodeCpuState.COOLING
    return BurstGuard(samples=samples, state=state, room_milli=int(max(0.0, limit - mean) * top / 1000))


def start(borrower: QuotaBorrower, now: float) -> BurstState:
    """No loan, and a bucket whose content is derived from the container's id."""
    return BurstState(quota_us=borrower.limit_us, limit_us=borrower.limit_us, at=now, known_at=now, needed_at=now)


def first_tokens(container_id: str, capacity: int) -> float:
    """Between nothing and half a bucket, the same at every start for the same container."""
    # Spread as by Koordinator's random number: bursts of replicas do not end in one second. Empty buckets would refuse
    # a burst to programs that just started, which need it most.
    return (zlib.crc32(container_id.encode()) % 1000) / 2000 * capacity


def step(
    state: BurstState, sample: BurstSample, node: NodeCpuState, now: float, config: QuotaBurstConfig
) -> BurstState:
    """One step for one container: its loan a fifth up, a fifth down, or unchanged."""
    borrower = sample.borrower
    if state.limit_us != borrower.limit_us:
        # Resized: a loan on the old limit has no meaning for the new one.
        state = replace(state, quota_us=borrower.limit_us, limit_us=borrower.limit_us)
    top = ceiling_us(borrower.limit_us, borrower.period_us, sample.percent, sample.cpus)
    tokens, may_spend = _bucket(state, sample, now)
    known_at = now if sample.use_milli is not None else min(state.known_at, now)
    needed_at = min(state.needed_at, now)
    throttled = sample.throttled is not None and sample.throttled > 0.0
    if throttled or (sample.use_milli is not None and sample.use_milli > borrower.limit_milli):
        needed_at = now
    quota = state.quota_us
    falls = (
        not may_spend
        or node is NodeCpuState.OVERLOAD
        or now - known_at > UNKNOWN_S
        or (not throttled and now - needed_at >= config.unused_s)
    )
    if falls:
        quota = quota * _DOWN[0] // _DOWN[1]
    elif throttled and node is NodeCpuState.IDLE and sample.use_milli is not None:
        # At least by one: a fifth of a small quota is rounded down.
        quota = max(quota + 1, quota * _UP[0] // _UP[1])
    return BurstState(
        quota_us=min(max(quota, borrower.limit_us), top),
        limit_us=borrower.limit_us,
        tokens=tokens,
        at=now,
        known_at=known_at,
        needed_at=needed_at,
    )


def _bucket(state: BurstState, sample: BurstSample, now: float) -> tuple[float | None, bool]:
    """The bucket after the time since the last step, and whether there is anything in it.

    Use at or above the limit spends what is above it, use below 60 % saves what is below the limit, both for as long as
    it lasted. Source: Koordinator's burst limiter.
    """
    if sample.budget_s < 0:
        return None, True
    capacity = sample.budget_s * (sample.percent - _SPENDS_FROM)
    if capacity <= 0:
        return None, False
    tokens = first_tokens(sample.borrower.container_id, capacity) if state.tokens is None else state.tokens
    seconds = max(0.0, now - state.at)
    if sample.use_milli is not None:
        use = sample.use_milli * 100 / sample.borrower.limit_milli
        if use >= _SPENDS_FROM:
            tokens -= (use - _SPENDS_FROM) * seconds
        elif use < _SAVES_BELOW:
            tokens += (_SPENDS_FROM - use) * seconds
    # A bucket in debt is as deep as it is high.
    tokens = min(max(tokens, -float(capacity)), float(capacity))
    return tokens, tokens > 0.0


def step_all(
    states: Mapping[str, BurstState],
    samples: Mapping[str, BurstSample],
    node: BurstGuard,
    now: float,
    config: QuotaBurstConfig,
) -> dict[str, BurstState]:
    """One step for every container of ``samples``, by group path; the state of any other container is dropped."""
    after: dict[str, BurstState] = {}
    grown: dict[str, float] = {}
    for path, sample in sorted(samples.items()):
        before = states.get(path) or start(sample.borrower, now)
        after[path] = step(before, sample, node.state, now, config)
        held = before.quota_us if before.limit_us == sample.borrower.limit_us else sample.borrower.limit_us
        if after[path].quota_us > held:
            grown[path] = (after[path].quota_us - held) * CPU_MILLI / sample.borrower.period_us
    # All new loans together within the node's room: in Koordinator every throttled container rises by a fifth at once,
    # and a node of many can jump over the guard in one step.
    for path, milli in lending.rationed(grown, node.room_milli).items():
        if milli < grown[path]:
            less_us = -int((milli - grown[path]) * samples[path].borrower.period_us // CPU_MILLI)
            quota = max(after[path].quota_us - less_us, after[path].limit_us)
            after[path] = replace(after[path], quota_us=quota)
    return after


def takes_part(pod: Pod, config: QuotaBurstConfig) -> bool:
    """Whether a pod's containers may borrow: by its annotation, else by the config."""
    burst_limit = pod.wish.burst_policy
    if burst_limit is None:
        return config.enabled
    return (config.enabled or config.pods) and burst_limit in {BurstLimit.QUOTA, BurstLimit.AUTO}


def borrowers(pods: Mapping[str, Pod], pools: Pools, config: QuotaBurstConfig) -> list[tuple[Pod, QuotaBorrower]]:
    if not config.enabled and not config.pods:
        return []
    return [
        (pod, borrower) for pod in derived(pods, _taking_part, config) for borrower in lending.borrowers(pod, pools)
    ]


def _taking_part(pods: Mapping[str, Pod], config: QuotaBurstConfig) -> Sequence[Pod]:
    return [pod for pod in pods.values() if takes_part(pod, config)]


def percent_of(pod: Pod, config: QuotaBurstConfig) -> int:
    """The pod's own ceiling, else the config's. Below 100 means no loan at all, like 100."""
    own = pod.wish.quota_burst_percent
    return config.percent if own is None else max(100, own)


def budget_of(pod: Pod, config: QuotaBurstConfig) -> int:
    """The pod's own seconds, else the config's."""
    own = pod.wish.quota_burst_s
    return config.budget_s if own is None else own


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: QuotaBurstConfig) -> list[Setting]:
    """The quotas of an online pod's containers that hold a loan, and its directory's."""
    if not takes_part(pod, config):
        return []
    return lending.wanted(pod, view, plan.pools, policy=NAME, percent=percent_of(pod, config))


def _requested(pod: Pod, config: QuotaBurstConfig) -> bool:
    return pod.pod_class.online and takes_part(pod, config)


POLICY = Policy(
    name=NAME,
    summary="lends quota above the limit to throttled online containers while CPU is free",
    config_type=QuotaBurstConfig,
    precedence=34,
    pod=for_pod,
    requested=_requested,
)
