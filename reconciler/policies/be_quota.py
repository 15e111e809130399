"""The BE budget as quotas: which group gets which part of it. Arithmetic only; units are thousandths of a CPU and µs.

The besteffort directory gets the whole budget where all BE pods and no others are in it and the kernel takes that quota
there; otherwise it is divided between the containers. The division is work-conserving: each taker has a fair part, in
proportion to its requests, and what it does not use is lent to those that their quota holds back.

Source: weighted max-min fairness (Bertsekas, Gallager: Data Networks, 6.5.2). The kernel does the same by weight below
one quota, but not between several. The sum never exceeds the budget, as far as the kernel takes quotas that small.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from cgroupfs.codecs import DEFAULT_PERIOD_US
from cgroupfs.naming import QosClass
from reconciler.policies.base import MILLI_MIN, container_asks, period_us, pod_asks, quota_us
from reconciler.runtime.format import cpu, plural
from state.cpu import GroupUse, QuotaFloor
from state.model import Container, NodeView, Pod, Pools
from state.owners import AS_IS
from state.pod_index import derived, index_of, of_each

_CPU: Final = 1000
_THROTTLED: Final = 0.05
"""From this share of its periods on, a taker needs more than it has."""
_STALE_S: Final = 3.0
"""An older reading is unknown: its taker has its fair part."""
_SPARE: Final = 1.5
"""A taker that is not throttled keeps its use times this."""
_RESERVE: Final = 8
"""A need is rounded up to steps of this part of the fair part, at least one: the room shows whether it needs more."""
_WORTH: Final = 8
"""Quotas are divided anew when a throttled taker would gain at least this part of its quota."""


class _Taker(NamedTuple):
    """``weight``: its request. ``most``: what it can use; None: all there is. ``held``: its quota may hold it back."""

    weight: int
    most: int | None
    held: bool


def split(budget: int, view: NodeView, before: Mapping[str, int] | None = None) -> tuple[dict[str, int], str]:
    """Divide the budget into quotas, by uid or, for the besteffort directory, path. ``before``: the last division.

    A taker without a request counts as one that requests a whole CPU.
    """
    index = index_of(view.pods)
    inside, outside, online = index.inside, index.outside, index.beside
    takers = {pod.uid: _taker_of(pod, view) for pod in outside}
    reason = "CPU quota on kubepods/besteffort"
    floor = floor_above(budget, view)
    if online:
        takers |= {pod.uid: _taker_of(pod, view) for pod in inside}
        first = min(pod.title for pod in online)
        reason = f"CPU quota per container: online pod {first} is inside kubepods/besteffort"
    elif floor is not None:
        takers |= {pod.uid: _taker_of(pod, view) for pod in inside}
        reason = (
            f"CPU quota per container: kubepods/besteffort takes no less than {cpu(floor.milli)}, because of {floor.by}"
        )
    else:
        takers[view.besteffort] = _taker(
            derived(view.pods, _weight_inside, view.capacity_milli, view.be_bonus),
            view.uses.get(view.besteffort),
        )
        if outside:
            reason = f"CPU quota on kubepods/besteffort and on {plural(len(outside), 'BE pod')} outside it"
    if not any(taker.weight for taker in takers.values()):
        return ({} if online or floor is not None else {view.besteffort: budget}), reason
    parts = _divide(budget, takers)
    return (dict(before) if before is not None and _still_serves(before, parts, takers, budget) else parts), reason


def floor_above(budget: int, view: NodeView) -> QuotaFloor | None:
    """Why the besteffort directory cannot have the budget as its quota: a group inside has more (v1); None: it can."""
    floor = view.quota_floors.get(view.besteffort)
    return floor if floor is not None and floor.milli > budget else None


def _divide(budget: int, takers: Mapping[str, _Taker]) -> dict[str, int]:
    """Weighted max-min: none has less than its fair part while it needs it, and nothing is left while one does."""
    total = sum(taker.weight for taker in takers.values())
    fair = {key: budget * taker.weight // total for key, taker in takers.items()}
    # From the smallest need, relative to the weight: who needs less than a fair part of the rest takes only that.
    needs = {
        key: _in_steps(taker.most, max(MILLI_MIN, fair[key] // _RESERVE))
        for key, taker in takers.items()
        if taker.weight and taker.most is not None
    }
    # The directory without a BE pod: it has a quota for the first one to come, and uses none.
    parts = {key: MILLI_MIN for key, taker in takers.items() if not taker.weight}
    left, weight = budget, total
    for key in sorted(needs, key=lambda key: (needs[key] / takers[key].weight, key)):
        if needs[key] * weight > left * takers[key].weight:
            break
        parts[key] = needs[key]
        left -= needs[key]
        weight -= takers[key].weight
    # The others need more than a fair part of the rest. Without any, the rest is room for everyone.
    rest = [key for key in takers if key not in parts] or list(takers)
    weight = sum(takers[key].weight for key in rest)
    for key in rest:
        parts[key] = parts.get(key, 0) + left * takers[key].weight // weight
    # The kernel takes no smaller quota: with more takers than hundredths of a CPU the sum exceeds the budget.
    quotas = {key: max(MILLI_MIN, parts.get(key, 0)) for key in sorted(takers)}
    return quotas | _within(budget, {key: part for key, part in quotas.items() if takers[key].weight})


def _within(budget: int, parts: dict[str, int]) -> dict[str, int]:
    """Where some were raised to the least quota: the others yield in proportion to what they have above it."""
    above = sum(parts.values()) - MILLI_MIN * len(parts)
    room = max(0, budget - MILLI_MIN * len(parts))
    if above <= room:
        return parts
    return {key: MILLI_MIN + (part - MILLI_MIN) * room // above for key, part in parts.items()}


def _in_steps(most: int, step: int) -> int:
    return max(step, -(-most // step) * step)


def _still_serves(
    before: Mapping[str, int], parts: Mapping[str, int], takers: Mapping[str, _Taker], budget: int
) -> bool:
    """Whether the last division still serves: of the same budget, and no throttled taker would gain much."""
    total = sum(before.values())
    # Rounding down loses less than one of each; above the budget is only what the kernel's least quotas need.
    if before.keys() != parts.keys() or not budget - len(parts) <= total <= max(budget, sum(parts.values())):
        return False
    return not any(taker.held and parts[key] - before[key] >= before[key] / _WORTH for key, taker in takers.items())


def _taker_of(pod: Pod, view: NodeView) -> _Taker:
    takers = _takers_in(pod, view).values()
    most = [taker.most for taker in takers]
    known = [number for number in most if number is not None]
    return _Taker(
        _with_bonus(pod_asks(pod, view.capacity_milli), pod, view.be_bonus),
        sum(known) if known and len(known) == len(most) else None,
        any(taker.held for taker in takers),
    )


def _weight_inside(pods: Mapping[str, Pod], most: int, bonus: Mapping[str, int]) -> int:
    asks = of_each(pods, pod_asks, most)
    return sum(_with_bonus(asks[pod.uid], pod, bonus) for pod in index_of(pods).inside)


def _with_bonus(weight: int, pod: Pod, bonus: Mapping[str, int]) -> int:
    """More for the pods of an owner that got less than its fair part (`reconciler.policies.owner_shares`)."""
    return weight * bonus.get(pod.uid, AS_IS) // AS_IS


def _takers_in(pod: Pod, view: NodeView) -> dict[str, _Taker]:
    return {
        container.id: _taker(
            container_asks(container, view.capacity_milli),
            view.uses.get(container.group.path),
            limit=_own_limit(container),
        )
        for container in pod.workload
    }


def _taker(weight: int, use: GroupUse | None, *, limit: int | None = None) -> _Taker:
    # A throttled one has its fair part again, so a loan ends with the next sample. Throttled None: it has never had a
    # period of its quota, so it has not run under it.
    if use is None or use.age_s > _STALE_S or (use.throttled or 0.0) >= _THROTTLED:
        return _Taker(weight, limit, held=True)
    return _Taker(weight, int(use.cpu_milli * _SPARE), held=False)


def _own_limit(container: Container) -> int | None:
    """What its own limits allow, the kubelet's and that on its batch CPU; None: none."""
    spec = container.spec
    limits = [container.limits.batch_cpu_milli]
    if spec is not None and spec.quota_us is not None and spec.quota_us > 0:
        limits.append(spec.quota_us * _CPU // (spec.period_us or DEFAULT_PERIOD_US))
    return min((limit for limit in limits if limit is not None), default=None)


def measured(pods: Iterable[Pod], pools: Pools | None, besteffort: str) -> dict[str, int]:
    """The groups whose use decides the division, path -> inode (0: not known); empty while one quota bounds all."""
    parts = pools.quota_milli if pools is not None else None
    if parts is None or parts.keys() <= {besteffort}:
        return {}
    groups = {
        container.group.path: container.group.inode for pod in pods if pod.uid in parts for container in pod.workload
    }
    return groups | ({besteffort: 0} if besteffort in parts else {})


def part_of_pod(pod: Pod, view: NodeView, pools: Pools) -> int | None:
    """The part of the budget of a pod that no directory bounds; None: one does, or none has a quota."""
    if pools.quota_milli is None or (pod.qos is QosClass.BESTEFFORT and view.besteffort in pools.quota_milli):
        return None
    return pools.quota_milli.get(pod.uid, MILLI_MIN)


def parts_of(pod: Pod, view: NodeView, pools: Pools) -> dict[str, int]:
    """The part of the budget of each container, for a pod that no directory bounds. Newcomers start with the least."""
    share = part_of_pod(pod, view, pools)
    if share is None:
        return {}
    takers = _takers_in(pod, view)
    return _divide(share, takers) if takers else {}


def own_quota(part: int, container: Container, view: NodeView) -> int:
    """The part as a quota, and never more than the kubelet has set."""
    value = quota_us(part, period_us(view, container.group.path, container))
    limit = container.spec.quota_us if container.spec is not None else None
    # On v1 a larger one would be above the pod's.
    return min(value, limit) if limit is not None and limit > 0 else value
