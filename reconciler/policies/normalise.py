"""normalise: on a node with faster CPUs than limits were made for, a limit is worth less CPU time.

The ratio (1.0: unchanged) is the node's speed over the reference's: quota = ceil(quota / ratio), and the same for the
limits of BE pods in `batch`. It is a value of this node's configuration; where a control plane computes it, it is in an
annotation of the Node object (``apiserver.node_settings: koordinator``).

Source: Koordinator's cpunormalization (LS and unlabelled pods without a CPU set of their own).
"""

from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import QUOTA_MIN_US, Policy, PolicyConfig, owns_cpus, setting_of
from state.model import Container, ContainerKind, NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan

NAME: Final = "normalise"
_HUNDREDTHS: Final = 100
"""The ratio in whole hundredths: with 1.2 as a float 120000 becomes a quota of 100001."""


class NormaliseConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a CPU of this node is worth."""

    ratio: Annotated[
        float,
        Meta(
            ge=1.0,
            le=10.0,
            description="CPU speed relative to the reference CPU (Koordinator's cpu-normalization-ratio), divides "
            "quotas; 1.0: off",
        ),
    ] = 1.0


def normalised(amount: int, pools: Pools) -> int:
    """An amount of CPU time (a quota, thousandths of a CPU) as this node's: rounded up."""
    return -(-amount * _HUNDREDTHS // max(_HUNDREDTHS, round(pools.quota_ratio * _HUNDREDTHS)))


def applies(pod: Pod, container: Container, pools: Pools) -> bool:
    """Whether a container's own quota is normalised: online, and on CPUs that it shares."""
    return (
        pod.pod_class is PodClass.SHARED
        and container.kind is not ContainerKind.SANDBOX
        and not owns_cpus(pod, container, pools)
    )


def quota_of(pod: Pod, container: Container, pools: Pools) -> int | None:
    """The container's quota on this node without a loan (µs of its period); None: no limit."""
    quota = container.spec.quota_us if container.spec is not None else None
    if quota is None or quota <= 0:
        return None
    return max(QUOTA_MIN_US, normalised(quota, pools)) if applies(pod, container, pools) else quota


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: NormaliseConfig) -> Pools:
    """Pass the ratio to the other policies."""
    reason = "off: quotas are unchanged" if config.ratio <= 1 else f"quotas are divided by {config.ratio:g}"
    return replace(pools, quota_ratio=config.ratio, reasons={**pools.reasons, NAME: reason})


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: NormaliseConfig) -> list[Setting]:
    """The quotas of an online pod's containers."""
    settings: list[Setting] = []
    # Not the pod's own: with theirs lowered it bounds nothing, and lowered itself it makes container starts fail, as
    # the runtime writes the container's larger quota first (EINVAL on v1; Koordinator 2047, 2694).
    for container in pod.containers:
        spec = container.spec
        if spec is None or not applies(pod, container, plan.pools):
            continue
        value, limit = quota_of(pod, container, plan.pools), spec.quota_us
        # A loan was made on top of this value, and would lose beside it: of two quotas the planner takes the smaller.
        if value is None or value == limit or view.lent_us.get(container.group.path, 0) > value:
            continue
        reason = f"limit of {limit} µs divided by this node's ratio {plan.pools.quota_ratio:g}"
        settings.append(setting_of(pod, container, "cpu.quota", value, policy=NAME, reason=reason))
    return settings


POLICY = Policy(
    name=NAME,
    summary="quotas in units of a reference CPU",
    config_type=NormaliseConfig,
    precedence=32,
    decide_node=decide_node,
    pod=for_pod,
)
