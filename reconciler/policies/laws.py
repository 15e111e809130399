"""Which law sets the BE budget now, and the budget by the harm law. Arithmetic only; units: thousandths of a CPU.

The harm law is in force while it is configured, every BE pod runs in an effective idle class, and the waiting of online
pods is measured. As soon as one of the three ends, the quota law (`reconciler.policies.budget`) decides, in the same
plan. The sampler begins to measure when the first two hold (`Pools.harm`).
"""

from typing import NamedTuple

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.policies.budget import Budget, BudgetConfig, BudgetLaw, budget_control, floor
from reconciler.policies.harm import top_of
from reconciler.policies.yielding import obstacle
from reconciler.runtime import format as fmt
from state.cpu import HarmReading, HarmTerms
from state.evidence import HOST
from state.model import NodeView, Pools


class LawChoice(NamedTuple):
    """``terms`` None: the harm law cannot be in force. ``reading``: not None while it is. ``reason``: for people."""

    terms: HarmTerms | None
    reading: HarmReading | None
    reason: str


def choose_law(
    view: NodeView, pools: Pools, counted: CpuSet, squeezed: str | None, config: BudgetConfig, *, least_milli: int = 0
) -> LawChoice:
    """Which law. ``counted``: the CPUs that BE work may use; ``squeezed``: why they are others' own, if they are.

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
        return LawChoice(
            terms, None, f"quota: what online pods wait for a CPU is unknown for {_seconds(view.now - since)}"
        )
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
        text = "cut, because online pods waited for a CPU" if reading.cuts else "grows, as no online pod waits for it"
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
    if not reading.cuts:
        return f"BE has up to {fmt.cpu(reading.ceiling_milli)} so far, as no online pod waits because of it"
    pod = view.pods.get(reading.uid or "")
    name = pod.title if pod is not None else "a pod that was removed"
    if reading.uid is not None and reading.uid.startswith(HOST):
        name = f"host workload {reading.uid.removeprefix(HOST)}"
    text = f"cut to {fmt.cpu(reading.ceiling_milli)}: {name} waited {fmt.percent(reading.waits_percent)} for a CPU"
    return f"{text}, {fmt.percent(reading.own_percent)} without BE work"


def _seconds(value: float) -> str:
    return fmt.duration(float(round(value)))
