"""capacity: what each BE pod has and will likely have, in a file of its own, and notice of a squeeze or freeze.

BE work that can plan (a Spark executor, a build farm) reads it to size its next step and to save its state in time. A
pod requests the file with the annotation ``bypassd/capacity: volume:NAME``; NAME is an emptyDir volume of it. Off by
default. The actuator of this name (`reconciler.actuators.files.capacity`) writes the files and removes them.

Its numbers are no promise.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.policies.base import Policy, PolicyConfig, pod_total
from reconciler.policies.be_quota import part_of_pod
from reconciler.policies.budget import idle_milli
from reconciler.policies.reclaimed import pool_on_node
from reconciler.policies.responses import in_force
from reconciler.runtime import format as fmt
from reconciler.runtime.notefile import is_name
from state.capacity import CapacityPlan, CapacityState, PodCapacity
from state.measures import Response, SqueezeLimit
from state.model import Container, NodeView, Pod, PodClass, Pools
from state.plan import NodePlan
from state.pod_index import derived, in_order, index_of

NAME: Final = "capacity"
ANNOTATION: Final = "bypassd/capacity"
MOST: Final = 512
"""Files at most, more than a kubelet runs pods; the first ones by uid."""
_INTERVALS: Final = 10
"""The window is kept as the least budget of so many intervals."""
_LEAST_CHANGE: Final = 0.05
"""A smaller relative change of an amount is not worth a write."""
_NOISE: Final = 20
"""Changes of what online work leaves by up to this part of the CPUs are noise."""
_STALE_S: Final = 3.0
_CPU: Final = 1000
_STATES: Final = {Response.SQUEEZE: CapacityState.SQUEEZED, Response.FREEZE: CapacityState.FROZEN}
# It names no other pod: the file's reader is a tenant.
_CAUSE: Final = "an online pod suffers from interference"


class CapacityConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file, the window of the likely minimum, and the time between a notice and its step."""

    enabled: Annotated[
        bool, Meta(description="write a capacity file for BE pods with bypassd/capacity: volume:NAME")
    ] = False

    # The least of the last five minutes: a batch program plans its next piece of work with it.
    window_s: ClassVar[float] = 300.0
    # Programs in pods open it by this name.
    file: ClassVar[str] = "capacity.json"
    # A framework flushes or shrinks a pool within two seconds; interference lasts no longer for it.
    notice_s: ClassVar[float] = 2.0


def volume_of(pod: Pod) -> str | None:
    """The emptyDir volume that a BE pod names for its file; None: it requests none, or not in that form."""
    kind, _, name = pod.annotations.get(ANNOTATION, "").partition(":")
    return name if pod.pod_class is PodClass.RECLAIMED and kind == "volume" and is_name(name) else None


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: CapacityConfig) -> NodePlan:
    before = previous.capacity if previous is not None else None
    given = given_milli(view, plan.pools, before)
    lows = add_low(before.lows if before is not None else (), view.now, given, config.window_s)
    low = min(milli for _, milli in lows)
    known: Mapping[str, PodCapacity] = before.pods if before is not None else {}
    pods: dict[str, PodCapacity] = {}
    index = index_of(view.pods)
    # Counted once: pods choose whether they have a file, and for 500 of them each count is the square.
    common = _Common(given, low, len(index.reclaimed), len(index.inside))
    for pod, volume in derived(view.pods, _volumes):
        pods[pod.uid] = steady(known.get(pod.uid), capacity_of(pod, volume, view, plan, common))
    capacity = CapacityPlan(file=config.file, pods=pods, given_milli=given, lows=lows, dry_run=config.dry_run)
    return replace(plan, capacity=capacity, reasons={**plan.reasons, NAME: f"capacity files: {len(pods)}"})


def _volumes(pods: Mapping[str, Pod]) -> list[tuple[Pod, str]]:
    """The first pods that name a volume, with its name."""
    return [(pod, volume) for pod in in_order(pods) if (volume := volume_of(pod)) is not None][:MOST]


def given_milli(view: NodeView, pools: Pools, before: CapacityPlan | None) -> int:
    """What all BE pods have together now: the budget, of the harm law's ceiling what online work leaves.

    While CPU use is unknown it is not more than before, and without a former value the law's minimum.
    """
    budget, terms, cpu = pools.budget_milli, pools.harm, view.cpu
    if terms is None or not terms.in_force:
        return budget
    if cpu is None or cpu.age_s is None or cpu.age_s > _STALE_S:
        return min(budget, before.given_milli if before is not None else terms.floor_milli)
    # The law's ceiling is up to all CPUs, also while online pods and the system use some of them.
    room = max(0, idle_milli(terms.cpus, cpu, view.topology.online - terms.cpus))
    noise = _CPU * len(terms.cpus) // _NOISE
    if before is not None and abs(room - before.given_milli) <= noise:
        room = before.given_milli
    return min(budget, room)


def add_low(
    lows: tuple[tuple[float, int], ...], now: float, budget: int, window_s: float
) -> tuple[tuple[float, int], ...]:
    """The least budgets by interval, with this moment's. Intervals that ended before the window are dropped."""
    step = window_s / _INTERVALS
    kept = tuple(item for item in lows if now - window_s - step < item[0] <= now)
    if kept and now - kept[-1][0] < step:
        start, least = kept[-1]
        return (*kept[:-1], (start, min(least, budget)))
    return (*kept, (now, budget))


def likely(amount: int, budget: int, low: int) -> int:
    """The likely minimum in the next minute of an amount that follows ``budget``; ``low``: the least of the window."""
    return amount * min(low, budget) // budget if budget > 0 else 0


class _Common(NamedTuple):
    """What all files of a plan follow from. ``given``: what all BE pods have; ``low``: the least of the window.

    ``pods``: the number of BE pods; ``inside``: of those below the besteffort directory.
    """

    given: int
    low: int
    pods: int
    inside: int


def capacity_of(pod: Pod, volume: str, view: NodeView, plan: NodePlan, common: _Common) -> PodCapacity:
    pools = plan.pools
    measures = in_force(view, pools)
    cpu, sharing = _cpu(pod, view, plan, common)
    least = likely(cpu, common.given, common.low)
    reason = f"BE budget: {pools.reasons.get('budget', 'not limited')}"
    if common.given < pools.budget_milli:
        reason = f"{reason}; online pods and the system leave {fmt.cpu(common.given)}"
    if measures.budget_milli is not None:
        reason = f"{reason}; it does not grow while {_CAUSE}"
    state = CapacityState.RUNNING
    squeeze = measures.squeezed.get(pod.uid)
    if squeeze is not None:
        state, reason = CapacityState.SQUEEZED, f"squeezed, because {_CAUSE}"
        cpu, least = _at_most(cpu, squeeze), _at_most(least, squeeze)
    if pod.uid in measures.frozen:
        state, reason = CapacityState.FROZEN, f"frozen for a short time, because {_CAUSE}"
        cpu = least = 0
    announced = measures.announced.get(pod.uid)
    # Counts as begun for the likely minimum.
    if announced is not None:
        least = 0 if announced.response is Response.FREEZE else _at_most(least, announced.squeeze)
        reason = f"will be {_STATES[announced.response]}, because {_CAUSE}"
    return PodCapacity(
        volume=volume,
        cpu_milli=cpu,
        likely_cpu_milli=least,
        cpus=str(pool_on_node(pod, view, plan.pools)[0] if plan.pools.confined else plan.pools.online_cpus),
        shared_with=sharing,
        memory_bytes=_memory(pod, plan, squeeze),
        state=state,
        next_state=None if announced is None else _STATES[announced.response],
        next_at=0.0 if announced is None else announced.at_s,
        reason=reason,
    )


def steady(before: PodCapacity | None, fresh: PodCapacity) -> PodCapacity:
    """The former content, unless something else or one of the amounts of CPU has changed enough for a write."""
    if before is None or any(
        abs(mine - theirs) > _LEAST_CHANGE * theirs
        for mine, theirs in ((fresh.cpu_milli, before.cpu_milli), (fresh.likely_cpu_milli, before.likely_cpu_milli))
    ):
        return fresh
    same = replace(fresh, cpu_milli=before.cpu_milli, likely_cpu_milli=before.likely_cpu_milli, reason=before.reason)
    return before if same == before else fresh


def _cpu(pod: Pod, view: NodeView, plan: NodePlan, common: _Common) -> tuple[int, int]:
    """The part of the BE budget, and with how many other BE pods the pod shares it."""
    pools = plan.pools
    part = part_of_pod(pod, view, pools)
    if part is not None:
        return min(part, common.given), 0
    if pools.quota_milli is None:
        return common.given, common.pods - 1
    inside = common.inside - (pod.qos is QosClass.BESTEFFORT)
    return min(pools.quota_milli.get(view.besteffort, common.given), common.given), inside


def _memory(pod: Pod, plan: NodePlan, squeeze: SqueezeLimit | None) -> int | None:
    def own(item: Container) -> int | None:
        batch = item.limits.batch_memory_bytes if plan.memory.batch_limits else None
        return item.limits.memory_bytes if batch is None else batch

    limit = pod_total(pod, own)
    bounds = (
        None if limit is None else limit + (pod.overhead.memory_bytes or 0),
        plan.memory.reclaimed_high_bytes if pod.qos is QosClass.BESTEFFORT else None,
        squeeze.memory_high_bytes if squeeze is not None else None,
    )
    return min((bound for bound in bounds if bound is not None), default=None)


def _at_most(milli: int, squeeze: SqueezeLimit | None) -> int:
    return milli if squeeze is None or squeeze.cpu_milli is None else min(milli, squeeze.cpu_milli)


POLICY = Policy(
    name=NAME,
    summary="a file with a BE pod's present and likely capacity, and notice before it is squeezed or frozen",
    config_type=CapacityConfig,
    precedence=80,
    decide_resources=decide_resources,
)
