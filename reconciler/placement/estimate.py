"""CPU demand of one pool's pods: measured use with a margin where it is known, else their requests.

Pure. Units: thousandths of a CPU; seconds. Source: Katalyst's canonical provision policy: max(use x 1.25, load) per
container; the request while it ramps up or when nothing is measured; four CPUs when neither is known.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from state.cpu import GroupUse, Uses
from state.model import Pod

_FADED: Final = 0.5


class EstimateConfig(Struct, frozen=True, kw_only=True):
    """The numbers of the estimate. No two nodes need them to differ."""

    # A peak counts half after this: online load repeats within minutes, and Autopilot sizes by the peaks of 5-minute
    # windows. Its 12 h are for limits that a restart is needed to correct; here a wrong size is corrected within
    # seconds, and hours would keep idle CPUs from BE work.
    half_life_s: float = 300.0
    # A new pod's use says nothing yet.
    ramp_up_s: float = 30.0
    # Fifteen readings of a second.
    stale_after_s: float = 15.0
    # Of a container with neither use nor request: the maximum of a single busy thread. Katalyst's four CPUs for each
    # side-car without a request fill a node.
    fallback_milli: int = 1000
    # Katalyst's quarter: a pool sized by its exact use queues at every burst.
    margin_percent: int = 25


class DemandEstimate(NamedTuple):
    """The demand of pods together, and how many of them were counted in which way (together: all that were counted).

    ``used``: by measured use; ``young``: by use and request, as they ramp up; ``asked``: by request, use unknown;
    ``guessed``: by the fallback, neither known.
    """

    milli: int = 0
    used: int = 0
    young: int = 0
    asked: int = 0
    guessed: int = 0

    @property
    def known(self) -> bool:
        """Whether the use of at least one of them is known now."""
        return self.used + self.young > 0

    @property
    def describe(self) -> str:
        """How it was derived, without numbers that change with every sample."""
        parts = (
            (self.used, "by use"),
            (self.young, "ramping up"),
            (self.asked, "by request, use unknown"),
            (self.guessed, "by the default, nothing known"),
        )
        return ", ".join(f"{count} {how}" for count, how in parts if count) or "no container"


class PoolUsage(NamedTuple):
    """Present use of pods: the sum over those whose use is ``known``, of so many ``pods``; the age of the oldest."""

    milli: int = 0
    pods: int = 0
    known: int = 0
    age_s: float = 0.0


class _Bounds(NamedTuple):
    """What a group may and wants to have; None: not set (for all of it)."""

    request: int | None
    limit: int | None


def remembered(before: Uses | None, sampled: Uses, elapsed_s: float, half_life_s: float) -> dict[str, GroupUse]:
    """The newest use combined with the fading peak, and for how long the use has been known.

    ``before``: the last result, None at the agent's start. ``elapsed_s``: since the last result; a negative one counts
    as none. Source: the Linux scheduler's util_est (up at once, down slowly).
    """
    elapsed_s = max(0.0, elapsed_s)
    factor = _FADED ** (elapsed_s / half_life_s)
    group_uses: dict[str, GroupUse] = {}
    for path in sorted(sampled):
        use = sampled[path]
        then = None if before is None else before.get(path)
        peak = float(use.cpu_milli)
        # None: not young. Pods that exist at the agent's start did not just start, so a restart makes no pool grow.
        known_s = None if before is None else 0.0
        if then is not None:
            # A reading that only aged does not prove a time without a peak.
            new = use.age_s < then.age_s + elapsed_s / 2
            last = then.cpu_milli if then.peak_milli is None else then.peak_milli
            # A pool that followed each sample would be too small for every burst, and move CPUs all the time.
            peak = max(peak, factor * last if new else last)
            known_s = then.known_s
            if known_s is not None and new:
                known_s += elapsed_s
        group_uses[path] = replace(use, peak_milli=peak, known_s=known_s)
    return group_uses


def estimate(pods: Sequence[Pod], uses: Uses, config: EstimateConfig) -> DemandEstimate:
    """The demand of these pods together. Sandboxes do not count; order does not matter.

    A pod is estimated by its containers where the use of all of them is known, else by its own directory, else by each
    container's use or request.
    """
    total = DemandEstimate()
    for pod in pods:
        total = _sum(total, _of_pod(pod, uses, config))
    return total


def of_group(use: GroupUse | None, request: int | None, limit: int | None, config: EstimateConfig) -> DemandEstimate:
    """One group (a container or a whole pod). ``limit`` None: unlimited; ``request`` None: no request."""
    if use is None:
        # A request above the limit is refused by every API server; a static pod's file can hold one all the same.
        if request is not None:
            return DemandEstimate(_least(request, limit), asked=1)
        return DemandEstimate(_least(config.fallback_milli, limit), guessed=1)
    peak = use.cpu_milli if use.peak_milli is None else max(use.peak_milli, use.cpu_milli)
    wants = round(peak * (100 + config.margin_percent) / 100)
    # CPU that the pod's quota keeps from it anyway does not count as demand (Katalyst's margin exceeds the limit). But
    # never below its use: a burst above the limit is lent on purpose.
    wants = max(_least(wants, limit), use.cpu_milli)
    number = request if request is not None else 0
    # Old use is unknown, which never lowers a demand.
    if use.age_s > config.stale_after_s:
        return DemandEstimate(max(wants, number), asked=1)
    if use.known_s is not None and use.known_s < config.ramp_up_s:
        return DemandEstimate(max(wants, number), young=1)
    return DemandEstimate(wants, used=1)


def used_now(pods: Sequence[Pod], uses: Uses, config: EstimateConfig) -> PoolUsage:
    """What these pods use together, without margin or memory; a pod with an old reading is not known."""
    milli = known = 0
    age_s = 0.0
    for pod in pods:
        containers = [uses.get(container.group.path) for container in pod.workload]
        whole = uses.get(pod.group.path)
        group_uses = [whole] if whole is not None else [group_use for group_use in containers if group_use is not None]
        complete = whole is not None or (group_uses and len(group_uses) == len(containers))
        if complete and all(group_use.age_s <= config.stale_after_s for group_use in group_uses):
            known += 1
            milli += sum(group_use.cpu_milli for group_use in group_uses)
            age_s = max(age_s, *(group_use.age_s for group_use in group_uses))
    return PoolUsage(milli, len(pods), known, age_s)


def _of_pod(pod: Pod, uses: Uses, config: EstimateConfig) -> DemandEstimate:
    containers = pod.workload
    whole = uses.get(pod.group.path)
    # In a machine or kernel of its own it has its processes there.
    if pod.sandbox is not None or (whole is not None and not all(item.group.path in uses for item in containers)):
        bounds = _bounds_of(pod)
        return of_group(whole, bounds.request, bounds.limit, config)
    total = DemandEstimate()
    for item in containers:
        number, limit = item.requests.cpu_milli, item.limits.cpu_milli
        total = _sum(total, of_group(uses.get(item.group.path), number, limit, config))
    return total


def _bounds_of(pod: Pod) -> _Bounds:
    """A whole pod's: requests add up where there is one; a limit holds only when every container has one."""
    request = overhead = pod.overhead.cpu_milli or 0
    request += pod.total(lambda item: item.requests.cpu_milli or 0)
    limit = overhead + pod.total(lambda item: item.limits.cpu_milli or 0)
    unlimited = not pod.members or any(item.limits.cpu_milli is None for item in pod.members)
    requested = any(item.requests.cpu_milli is not None for item in pod.members)
    return _Bounds(request=request if requested else None, limit=None if unlimited else limit)


def _least(milli: int, limit: int | None) -> int:
    return milli if limit is None else min(milli, limit)


def _sum(item: DemandEstimate, other: DemandEstimate) -> DemandEstimate:
    return DemandEstimate(
        item.milli + other.milli,
        item.used + other.used,
        item.young + other.young,
        item.asked + other.asked,
        item.guessed + other.guessed,
    )
