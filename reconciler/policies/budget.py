"""How much CPU BE work may use: the budget law, the steps towards it, and which law is in force. Arithmetic only.

Units: thousandths of a CPU throughout; times are seconds on the view's clock. Source: Koordinator's cpusuppress and
Volcano's CPU throttle (capacity x limit - online use - system use, growth by at most a tenth).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.policies.base import MILLI_MIN
from reconciler.policies.harm import HarmConfig, top_of
from reconciler.policies.yielding import obstacle
from reconciler.runtime import format as fmt
from state.cpu import HarmReading, HarmTerms
from state.evidence import HOST
from state.model import Container, NodeCpu, NodeView, Pod, Pools
from state.pod_index import index_of

Percent = Annotated[int, Meta(ge=0, le=100)]
_TARGET: Final = "target "
"""How a reason begins that has the target; up to the use it is of the configuration and the CPUs alone."""
_CPU: Final = 1000


class BudgetLaw(StrEnum):
    AUTO = "auto"
    QUOTA = "quota"


class BudgetConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budget laws' parameters."""

    law: Annotated[
        BudgetLaw,
        Meta(
            description="auto: harm while all BE pods are in an effective idle class, else quota; quota: always "
            "limit_percent and the idle buffer"
        ),
    ] = BudgetLaw.AUTO
    harm: HarmConfig = HarmConfig()
    limit_percent: Annotated[
        int, Meta(ge=1, le=100, description="target use of BE's CPUs, online and BE work together")
    ] = 65
    floor_percent: Annotated[
        Percent, Meta(description="the same as a share of all CPUs of the node; the larger applies")
    ] = 2

    # Smaller changes are noise, and each is a write of a quota.
    grain_percent: ClassVar[int] = 2
    # Two readings of the use with the budget of the last step.
    grow_interval_s: ClassVar[float] = 2.0
    # Three readings of one second; an older one must not raise the budget.
    stale_after_s: ClassVar[float] = 3.0
    # A kubelet or a daemon under load misses readings for some seconds; BE work must not collapse for that.
    unknown_hold_s: ClassVar[float] = 30.0
    # A BE pod that gets less cannot answer its probes, however small the node is; `floor_percent` of it, if more.
    floor_milli: ClassVar[int] = 100
    # Volcano's tenth: a full step must not overshoot the limit before the next reading.
    grow_percent: ClassVar[int] = 10
    # Readings follow a start by two seconds, and most programs are up by then.
    arrival_s: ClassVar[float] = 5.0


class Budget(Struct, frozen=True, kw_only=True):
    """A budget, since when it holds, since when CPU use is unknown (None: it is known), and why it is what it is."""

    milli: int
    at: float
    unknown_since: float | None
    reason: str


def budget_control(counted: CpuSet, cpu: NodeCpu, outside: CpuSet, config: BudgetConfig) -> int:
    """What BE work could use on ``counted`` without filling them beyond the limit; may be negative.

    Only CPUs that BE work may run on count: a pinned pod's idle CPU adds nothing to BE work's capacity, and its busy
    CPU does not throttle BE work. ``outside``: CPUs where BE work does not run.
    """
    return idle_milli(counted, cpu, outside) - _CPU * len(counted) * (100 - config.limit_percent) // 100


def idle_milli(counted: CpuSet, cpu: NodeCpu, outside: CpuSet) -> int:
    """What online work and the system leave of these CPUs; may be negative. ``outside``: as in `budget_control`."""
    # Use is measured for the whole machine: what is busy outside does not touch the counted CPUs.
    return _CPU * len(counted) - max(0, cpu.online_milli + cpu.system_milli - _busy_outside(cpu, outside))


def arriving_milli(view: NodeView, owns: Callable[[Pod, Container], bool], config: BudgetConfig) -> int:
    """The CPU requests of online containers that the runtime began to make within ``arrival_s``, which are kept free.

    ``owns``: whether a container has CPUs of its own, where it meets no BE work.
    """
    # Its use is measured a second later, and its start (JIT, caches) is what BE work disturbs most. The runtime makes
    # its directory some 20 ms before its first instruction.
    recent = {cid for cid, at in view.arrived.items() if view.now - at < config.arrival_s}
    if not recent:
        return 0
    return sum(
        container.request_milli or 0
        for pod in index_of(view.pods).online
        for container in pod.workload
        if container.id in recent and not owns(pod, container)
    )


def _busy_outside(cpu: NodeCpu, outside: CpuSet) -> int:
    """What is busy on the CPUs outside; 0 while that is not known of each of them."""
    if not all(number in cpu.idle for number in outside):
        return 0
    return sum(int((1.0 - min(1.0, max(0.0, cpu.idle[number]))) * _CPU) for number in outside)


def floor(online: CpuSet, counted: CpuSet, config: BudgetConfig) -> int:
    """The hard minimum: never above the CPUs that there are, never below what the kernel takes as a quota."""
    wanted = max(config.floor_milli, _CPU * len(online) * config.floor_percent // 100)
    return max(MILLI_MIN, min(wanted, _CPU * len(counted)))


def next_budget(
    view: NodeView,
    counted: CpuSet,
    previous: Pools | None,
    config: BudgetConfig,
    *,
    outside: CpuSet,
    ceiling: int,
    arriving: int = 0,
) -> Budget:
    """One step: down to the law at once, up by at most a step per interval, never up on an unknown.

    ``ceiling`` is what the policies before allow (the idle buffer); the floor has precedence over it. ``arriving``: as
    in `arriving_milli`, kept free.
    """
    online = view.cpus
    low, top = floor(online, counted, config), _CPU * len(counted)
    before = min(max(previous.budget_milli, low), top) if previous is not None else None
    cpu = view.cpu
    age = cpu.age_s if cpu is not None else None
    fresh = cpu is not None and age is not None and age <= config.stale_after_s
    since = None if fresh else _unknown_since(view.now, age, previous)

    if cpu is not None and age is not None:
        room, text = budget_control(counted, cpu, outside, config) - arriving, _reason(counted, cpu, outside, config)
        if arriving:
            text += f" - {fmt.cpus(arriving)} kept for starting online containers"
    else:
        room, text = top, "CPU use unknown"
    if room > ceiling:
        room, text = ceiling, f"limited by the idle buffer to {fmt.cpu(max(0, ceiling))}"
    target = min(max(room, low), top)
    grain = _grain(online, config)
    if low < target and target % grain:
        text += f", in steps of {fmt.cpu(grain)}"
    target = max(low, target - target % grain)

    if since is not None:
        # A missing signal has an end: peers keep the last budget for ever.
        lost = before is None or view.now - since > config.unknown_hold_s
        milli = low if lost or before is None else min(before, target)
        text = "CPU use unknown" + ("" if lost else ": no increase")
    elif previous is None or before is None or target < before:
        milli = target
    else:
        milli = _grown(before, target, view.now - previous.budget_at, online, config)
        if milli == before < target:
            text += f"; raised when that is at least {fmt.cpu(before + 2 * grain)}"
    if milli == low:
        text += f"; limited to the minimum, {fmt.cpu(low)}"
    if previous is not None and milli == previous.budget_milli and since == previous.unknown_since:
        # The previous text too: a reason that follows each sample would make every plan differ from the last one.
        known = previous.reasons.get("budget", text)
        targets = {reason.partition(" - ")[0] for reason in (known, text) if reason.startswith(_TARGET)}
        reason = known if len(targets) < 2 else text
        return Budget(milli=milli, at=previous.budget_at, unknown_since=since, reason=reason)
    at = previous.budget_at if previous is not None and milli == previous.budget_milli else view.now
    return Budget(milli=milli, at=at, unknown_since=since, reason=text)


def cpu_count(budget: int, held: int, available: int, minimum: int, *, bounded: bool) -> int:
    """How many CPUs carry a budget. ``bounded``: a quota holds BE work to the budget as well."""

    def whole(milli: int) -> int:
        # With a quota the last CPU may be used in part. Peers round up without one, and let BE work exceed the budget.
        return -(-milli // _CPU) if bounded else milli // _CPU

    wanted = whole(budget)
    # A CPU is added only once a quarter of it would be used: a budget that hovers about a whole number moves nothing.
    if 0 < held < wanted:
        wanted = max(held, whole(budget - _CPU // 4))
    return min(max(wanted, minimum, 1), available)


def _grain(online: CpuSet, config: BudgetConfig) -> int:
    return max(MILLI_MIN, _CPU * len(online) * config.grain_percent // 100)


def _grown(before: int, target: int, age: float, online: CpuSet, config: BudgetConfig) -> int:
    """The budget after a step up."""
    grain = _grain(online, config)
    elapsed = age if age >= 0 else config.grow_interval_s  # the clock restarted: a reboot
    # A step per interval, not per call: a burst of pod events does not add up. Two grains: noise causes no write.
    if elapsed < config.grow_interval_s or target < before + 2 * grain:
        return before
    step = max(grain, _CPU * len(online) * config.grow_percent // 100)
    grown = min(target, before + step)
    return max(before, grown - grown % grain)


def _unknown_since(now: float, age: float | None, previous: Pools | None) -> float:
    if previous is not None and previous.unknown_since is not None and previous.unknown_since <= now:
        return previous.unknown_since
    return now - age if age is not None else now


def _reason(counted: CpuSet, cpu: NodeCpu, outside: CpuSet, config: BudgetConfig) -> str:
    used = max(0, cpu.online_milli + cpu.system_milli)
    elsewhere = min(used, _busy_outside(cpu, outside))
    # As much of the BE budget as they use is not the BE pods', whose bounds only can hold it.
    hosts = f" ({fmt.cpus(cpu.host_be_milli)} by BE host workloads)" if cpu.host_be_milli else ""
    text = (
        f"{_TARGET}{fmt.percent(config.limit_percent)} of {fmt.plural(len(counted), 'CPU')} - "
        f"{fmt.cpus(cpu.system_milli)} used by system{hosts} - {fmt.cpus(cpu.online_milli)} online"
    )
    return f"{text} + {fmt.cpus(elsewhere)} on other CPUs" if elsewhere else text


class LawChoice(NamedTuple):
    """``terms`` None: the harm law cannot be in force. ``reading``: not None while it is. ``reason``: for people."""

    terms: HarmTerms | None
    reading: HarmReading | None
    reason: str


def choose_law(
    view: NodeView, pools: Pools, counted: CpuSet, squeezed: str | None, config: BudgetConfig, *, least_milli: int = 0
) -> LawChoice:
    """Which law. ``counted``: the CPUs that BE work may use; ``squeezed``: why they are others' own, if they are.

    The harm law is in force while it is configured, every BE pod runs in an effective idle class, and the waiting of
    online pods is measured. As soon as one of the three ends, the quota law decides, in the same plan. The sampler
    begins to measure when the first two hold (`Pools.harm`).

    ``least_milli``: what no cut takes, as a cut takes whole CPUs and writes no quota; 0: it is a quota.
    """
    if config.law is BudgetLaw.QUOTA:
        return LawChoice(None, None, "quota (configured)")
    if squeezed is not None:
        return LawChoice(None, None, f"quota: {squeezed}")
    if (why := obstacle(view, pools)) is not None:
        return LawChoice(None, None, f"quota: {why}")
    low, grain = floor(view.cpus, counted, config), 1000 if least_milli else 1
    low = max(low - low % grain, min(least_milli, 1000 * len(counted)))
    top = top_of(len(counted), low, config.harm)
    terms = HarmTerms(cpus=counted, top_milli=top, floor_milli=low, grain_milli=grain)
    reading = view.harm
    if reading is None:
        return LawChoice(terms, None, "quota: what online pods wait for a CPU is not measured yet")
    since = reading.unknown_since
    if since is not None and view.now - since > config.unknown_hold_s:
        unknown = fmt.duration(float(round(view.now - since)))
        return LawChoice(terms, None, f"quota: what online pods wait for a CPU is unknown for {unknown}")
    return LawChoice(replace(terms, in_force=True), reading, f"harm: {_cause(view, reading, terms)}")


def harm_budget(
    view: NodeView,
    choice: LawChoice,
    previous: Pools | None,
    config: BudgetConfig,
    *,
    outside: CpuSet,
    ceiling: int,
    arriving: int = 0,
) -> Budget:
    """The budget by the harm law. The other arguments are those of `reconciler.policies.budget.next_budget`."""
    terms, reading = choice.terms, choice.reading
    assert terms is not None
    assert reading is not None
    room, text = reading.ceiling_milli, "all idle CPU: BE pods run in the idle class"
    if room < terms.top_milli:
        cut = reading.cuts and not reading.grown
        text = "cut, because online pods waited for a CPU" if cut else "grows, as no online pod waits for it"
    if reading.comparing:
        text = "at the minimum for a moment, to learn what online pods wait without BE work"
    if reading.unknown_since is not None:
        text = "no increase: what online pods wait for a CPU is unknown"
    if arriving:
        left = terms.top_milli
        if view.cpu is not None and view.cpu.age_s is not None and view.cpu.age_s <= config.stale_after_s:
            left = min(left, budget_control(terms.cpus, view.cpu, outside, replace(config, limit_percent=100)))
        if left - arriving < room:
            room, text = left - arriving, f"{fmt.cpus(arriving)} kept for starting online containers"
    milli, least = min(max(room, terms.floor_milli), terms.top_milli), terms.floor_milli
    if milli > ceiling:
        # A quota enforces this ceiling, and no CPU set: the minimum is the quota's, not of whole CPUs.
        least = min(milli, floor(view.cpus, terms.cpus, config))
        milli, text = max(ceiling, least), f"limited to {fmt.cpu(max(0, ceiling))} by a response to interference"
    if milli == least < terms.top_milli:
        text += f"; limited to the minimum, {fmt.cpu(milli)}"
    same = previous is not None and milli == previous.budget_milli
    at = previous.budget_at if previous is not None and same else view.now
    return Budget(milli=milli, at=at, unknown_since=reading.unknown_since, reason=text)


def at_top(choice: LawChoice, budget: Budget, config: BudgetConfig) -> bool:
    """Whether BE work needs no limit at all, so that no quota is written: no cost of bandwidth control."""
    terms = choice.terms
    return terms is not None and terms.in_force and not config.harm.reserve_percent and budget.milli >= terms.top_milli


def _cause(view: NodeView, reading: HarmReading, terms: HarmTerms) -> str:
    if reading.unknown_since is not None:
        return "what online pods wait for a CPU is unknown; no increase"
    if terms.floor_milli >= terms.top_milli:
        return "BE pods yield by themselves, and have no CPU that a cut could take away"
    if reading.comparing:
        return "comparing what online pods wait with and without BE work, as cuts did not end their waiting"
    if reading.ceiling_milli >= terms.top_milli:
        return "no online pod waits for a CPU because of BE work"
    if not reading.cuts or reading.grown:
        return f"BE has up to {fmt.cpu(reading.ceiling_milli)} so far, as no online pod waits because of it"
    pod = view.pods.get(reading.uid or "")
    name = pod.title if pod is not None else "a pod that was removed"
    if reading.uid is not None and reading.uid.startswith(HOST):
        name = f"host workload {reading.uid.removeprefix(HOST)}"
    text = f"cut to {fmt.cpu(reading.ceiling_milli)}: {name} waited {fmt.percent(reading.waits_percent)} for a CPU"
    return f"{text}, {fmt.percent(reading.own_percent)} without BE work"
