"""idle class: BE pods run only when no other task wants the CPU (``cpu.idle``, Linux 5.15).

A group in the idle class has the minimum weight, and any other task that wakes up preempts it at once: a weight of 2
alone lets BE work finish its time slice first. Opt-in: BE pods may starve for as long as online work fills their CPUs.

Only a pod's own directory: while ``cpu.idle`` is 1 writing shares fails (EINVAL), and the kubelet writes those of the
QoS directories every minute (Koordinator sets it there, and the kubelet cannot restart: 2732, 2986), the runtime those
of its containers. Inside the pod the containers keep their weights among each other.

The kernel drops the pod's weight meanwhile; a policy's weight setting stays in the plan, and is written when the class
is left.
"""

from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, owns_cpus, setting_of
from reconciler.policies.offers import unsupported_reason
from state.model import ContainerKind, NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan

NAME: Final = "idle_class"
KNOB: Final = "cpu.idle"


class IdleClassConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to set but whether."""

    enabled: Annotated[bool, Meta(description="BE pods run only on otherwise idle CPU time; they may starve")] = False


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: IdleClassConfig) -> Pools:
    """Say whether this kernel can."""
    del previous, config
    reason = unsupported_reason(view, KNOB) or "BE pods run only on idle CPU time"
    return replace(pools, reasons={**pools.reasons, NAME: reason})


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: IdleClassConfig) -> list[Setting]:
    """The idle class for a BE pod's directory; not where a container of it owns CPUs, which it would then share."""
    del config
    if pod.pod_class is not PodClass.RECLAIMED or unsupported_reason(view, KNOB) is not None:
        return []
    if any(
        container.kind is not ContainerKind.SANDBOX and owns_cpus(pod, container, plan.pools)
        for container in pod.containers
    ):
        return []
    reason = "BE runs only on idle CPU time"
    return [setting_of(pod, None, KNOB, 1, policy=NAME, reason=reason)]


POLICY = Policy(
    name=NAME,
    summary="BE pods in the kernel's idle class",
    config_type=IdleClassConfig,
    precedence=42,
    decide_node=decide_node,
    pod=for_pod,
)
