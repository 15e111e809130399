"""How much CPU BE work may use: the budget law and the steps towards it. Arithmetic only.

Units: thousandths of a CPU throughout; times are seconds on the view's clock. Source: Koordinator's cpusuppress and
Volcano's CPU throttle (capacity x limit - online use - system use, growth by at most a tenth). Differences, and why:

- Only CPUs that BE work may run on count as capacity, and use on the others is not subtracted. A pinned pod's idle CPU
  does not count as capacity for BE work, its busy CPU no reason to throttle it.
- A missing or old signal has an end: peers keep the last budget for ever.
- Growth is a rate (a step per interval), not a step per call: a burst of pod events does not speed it up.
- A container's request is kept free while it starts: its use is measured a second later, and its start (JIT, caches) is
  what BE work disturbs most. The runtime makes its directory some 20 ms before its first instruction.
- Whole grains, and two of them before it grows: noise of one grain causes no write.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from cgroupfs.cpuset import CpuSet
from reconciler.placement.pool_members import container_milli
from reconciler.policies.base import MILLI_MIN
from reconciler.policies.harm import HarmConfig
from reconciler.runtime import format as fmt
from state.model import Container, ContainerKind, NodeCpu, NodeView, Pod, Pools
from state.pod_index import index_of

Percent = Annotated[int, Meta(ge=0, le=100)]
_CPU: Final = 1000


class BudgetLaw(StrEnum):
    """Which law sets the BE budget."""

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

    # Constants: no two nodes need them to differ.
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

    ``outside``: CPUs where BE work does not run; what is busy there is others' use that does not touch ``counted``.
    It is only credited where each one's idle time is known.
    """
    return idle_milli(counted, cpu, outside) - _CPU * len(counted) * (100 - config.limit_percent) // 100


def idle_milli(counted: CpuSet, cpu: NodeCpu, outside: CpuSet) -> int:
    """What online work and the system leave of these CPUs; may be negative. ``outside``: as in `budget_control`."""
    return _CPU * len(counted) - max(0, cpu.online_milli + cpu.system_milli - _elsewhere(cpu, outside))


def arriving_milli(view: NodeView, owns: Callable[[Pod, Container], bool], config: BudgetConfig) -> int:
    """The CPU requests of online containers that the runtime began to make within ``arrival_s``.

    ``owns``: whether a container has CPUs of its own, where it meets no BE work.
    """
    recent = {cid for cid, at in view.arrived.items() if view.now - at < config.arrival_s}
    if not recent:
        return 0
    return sum(
        container_milli(container) or 0
        for pod in index_of(view.pods).online
        for container in pod.containers
        if container.id in recent and container.kind is not ContainerKind.SANDBOX and not owns(pod, container)
    )


def _elsewhere(cpu: NodeCpu, outside: CpuSet) -> int:
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
    target = max(low, target - target % _grain(online, config))

    if since is not None:
        lost = before is None or view.now - since > config.unknown_hold_s
        milli = low if lost or before is None else min(before, target)
        text = "CPU use unknown" + ("" if lost else ": no increase")
    elif previous is None or before is None or target < before:
        milli = target
    else:
        milli = _grown(before, target, view.now - previous.budget_at, online, config)
        if milli == before < target:
            text += f"; raised when that is at least {fmt.cpu(before + 2 * _grain(online, config))}"
    if milli == low:
        text += f"; limited to the minimum, {fmt.cpu(low)}"
    if previous is not None and milli == previous.budget_milli and since == previous.unknown_since:
        # The previous text too: a reason that follows each sample would make every plan differ from the last one.
        return Budget(
            milli=milli, at=previous.budget_at, unknown_since=since, reason=previous.reasons.get("budget", text)
        )
    at = previous.budget_at if previous is not None and milli == previous.budget_milli else view.now
    return Budget(milli=milli, at=at, unknown_since=since, reason=text)


def cpu_count(budget: int, held: int, available: int, minimum: int, *, bounded: bool) -> int:
    """How many CPUs carry a budget.

    ``bounded``: a quota holds BE work to the budget as well, so the last CPU may be used in part; without one the
    count is rounded down (peers round up, and let BE work exceed the budget by most of a CPU). A CPU is added only
    once a quarter of it would be used, so that a budget that hovers about a whole number moves nothing.
    """

    def whole(milli: int) -> int:
        return -(-milli // _CPU) if bounded else milli // _CPU

    wanted = whole(budget)
    if 0 < held < wanted:
        wanted = max(held, whole(budget - _CPU // 4))
    return min(max(wanted, minimum, 1), available)


def _grain(online: CpuSet, config: BudgetConfig) -> int:
    return max(MILLI_MIN, _CPU * len(online) * config.grain_percent // 100)


def _grown(before: int, target: int, age: float, online: CpuSet, config: BudgetConfig) -> int:
    grain = _grain(online, config)
    elapsed = age if age >= 0 else config.grow_interval_s  # the clock restarted: a reboot
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
    elsewhere = min(used, _elsewhere(cpu, outside))
    # As much of the BE budget as they use is not the BE pods', whose bounds alone can hold it.
    hosts = f" ({fmt.cpus(cpu.host_be_milli)} by BE host workloads)" if cpu.host_be_milli else ""
    text = (
        f"target {fmt.percent(config.limit_percent)} of {fmt.plural(len(counted), 'CPU')} - "
        f"{fmt.cpus(cpu.system_milli)} used by system{hosts} - {fmt.cpus(cpu.online_milli)} online"
    )
    return f"{text} + {fmt.cpus(elsewhere)} on other CPUs" if elsewhere else text
