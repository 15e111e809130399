"""QoS level: BE pods are offline work to openEuler's scheduler, which runs them when no online task is runnable.

``cpu.qos_level`` is 0 for online and -1 for offline groups. The change is irreversible: the kernel never takes 0 again
for a group that is offline, and a group that is made below one is offline from the start. So it is opt-in. Restoring
leaves the value, and reports it.

Source: rubik's preemption feature and Volcano's cpu QoS on openEuler. Differences: they write on the first guess of a
pod's class, and report the kernel's refusal as an error at each event.
"""

from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, owns_cpus, setting_of, unsupported_reason
from state.model import NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan

NAME: Final = "qos_level"
KNOB: Final = "cpu.qos"
OFFLINE: Final = -1


class QosLevelConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to set but whether."""

    enabled: Annotated[
        bool,
        Meta(description="mark BE pods offline for openEuler's scheduler; cannot be undone for a pod"),
    ] = False


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: QosLevelConfig) -> Pools:
    reason = unsupported_reason(view, KNOB) or "BE pods are marked offline; the kernel cannot undo it"
    return replace(pools, reasons={**pools.reasons, NAME: reason})


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: QosLevelConfig) -> list[Setting]:
    """Offline for a BE pod and its containers; for an online one what it should be, where it is known to be offline."""
    if unsupported_reason(view, KNOB) is not None or not pod.classification.certain:
        return []
    # Never a directory in which other pods may be created: these would be offline, too.
    groups = (None, *pod.workload)
    if pod.pod_class is PodClass.RECLAIMED:
        # As in `idle_class`: on its own CPUs it is not to yield.
        if any(owns_cpus(pod, container, plan.pools) for container in pod.workload):
            return []
        return [setting_of(pod, item, KNOB, OFFLINE, policy=NAME, reason="the pod is BE") for item in groups]
    # For a pod that turned online later: the planner's refusal reports that only a new pod helps.
    online = [setting_of(pod, item, KNOB, 0, policy=NAME, reason="the pod is online") for item in groups]
    return [setting for setting in online if view.actual.get(setting.key) == OFFLINE]


POLICY = Policy(
    name=NAME,
    summary="BE pods are marked offline for openEuler's scheduler",
    config_type=QosLevelConfig,
    precedence=46,
    decide_node=decide_node,
    pod=for_pod,
)
