"""burst: online containers may save up unused quota and spend it later, in the kernel (CFS burst, Linux 5.14).

A burst of B µs lets a group that used less than its quota before use up to B µs more in one period. It raises no
average: only saved quota is spent. Off by default, as with the peers. Per pod: Katalyst's ``cpu_burst_policy`` and
``cpu_burst_percent``, Koordinator's ``cpuBurst``, rubik's ``quota-burst-time`` (microseconds in each period).

Source: Katalyst (quota x percent / 100, closed for reclaimed pods), Koordinator's cpuBurstOnly and auto, rubik's
quotaBurst; kernel documentation sched-bwc.
"""

from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, setting_of, unsupported_reason
from reconciler.policies.normalise import quota_of
from reconciler.policies.pinned import is_pinned, lifts_pod
from state.cpu import BurstLimit
from state.model import NodeView, Pod, Pools, Setting
from state.plan import NodePlan

NAME: Final = "burst"
KNOB: Final = "cpu.burst"
_FULL: Final = 100
"""The kernel returns EINVAL for a burst above the quota. Koordinator's default of 1000 percent is refused on every
container (2326, 2778)."""
_REQUESTS: Final = frozenset({BurstLimit.STATIC, BurstLimit.AUTO})


class BurstConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pods may burst, and how far."""

    enabled: Annotated[bool, Meta(description="let online containers save unused quota for bursts")] = False
    pods: Annotated[
        bool,
        Meta(
            description="while off: apply to pods that request it (koordinator.sh/cpuBurst auto or cpuBurstOnly, "
            "katalyst cpu_burst_policy, volcano.sh/quota-burst-time)"
        ),
    ] = True
    percent: Annotated[
        int,
        Meta(
            ge=0,
            le=_FULL,
            description="burst in percent of the quota, unless an annotation says otherwise; 0: only pods with one",
        ),
    ] = 100


def percent_of(pod: Pod, config: BurstConfig) -> int:
    """The pod's burst in percent of each quota, 0-100: none for BE pods, its own annotation, else the config's."""
    wish = pod.wish
    if not pod.pod_class.online or wish.burst_policy in {BurstLimit.CLOSED, BurstLimit.QUOTA}:
        return 0
    if wish.burst_percent is not None:
        return max(0, min(_FULL, wish.burst_percent))
    # Requested without a number: the maximum, also where other pods get none.
    return config.percent if wish.burst_policy is None else config.percent or _FULL


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: BurstConfig) -> Pools:
    """Say why there are none, or how large they are."""
    reason = (
        unsupported_reason(view, KNOB)
        or f"{config.percent} % of the quota of online containers, unless the pod's annotation differs"
    )
    return replace(pools, reasons={**pools.reasons, NAME: reason})


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: BurstConfig) -> list[Setting]:
    """The bursts of a pod's containers with a quota, and of its directory; 0 where there is to be none."""
    if unsupported_reason(view, KNOB) is not None:
        return []
    percent = percent_of(pod, config)
    closed = pod.wish.burst_policy in {BurstLimit.CLOSED, BurstLimit.QUOTA}
    amount = None if closed or pod.wish.burst_percent is not None else pod.wish.burst_us
    settings: list[Setting] = []
    total = 0
    for container in pod.workload:
        if is_pinned(pod, container, plan.pools):
            continue  # it has no CPU beyond its own to burst into
        quota = quota_of(pod, container, plan.pools)
        if not pod.pod_class.online:
            settings.append(setting_of(pod, container, KNOB, 0, policy=NAME, reason="no bursts for BE work"))
        elif quota is not None:
            value = quota * percent // _FULL
            reason = f"{percent} % of its quota of {quota} µs"
            if amount is not None:
                value = min(amount, quota)
                reason = f"{amount} µs by annotation, at most its quota of {quota} µs"
            total += value
            settings.append(setting_of(pod, container, KNOB, value, policy=NAME, reason=reason))
    own = view.actual.get((pod.group.path, "cpu.quota"))
    # A pod's directory with a quota throttles first, without a burst of its own.
    if settings and isinstance(own, int) and not lifts_pod(pod, plan.pools):
        reason = "sum of its containers' bursts"
        settings.append(setting_of(pod, None, KNOB, min(total, own), policy=NAME, reason=reason))
    return settings


def _requested(pod: Pod, config: BurstConfig) -> bool:
    wish = pod.wish
    by_annotation = wish.burst_policy in _REQUESTS or (wish.burst_policy is None and bool(wish.burst_us))
    return config.pods and pod.pod_class.online and by_annotation


POLICY = Policy(
    name=NAME,
    summary="online containers save unused quota for bursts",
    config_type=BurstConfig,
    precedence=26,
    decide_node=decide_node,
    pod=for_pod,
    requested=_requested,
)
