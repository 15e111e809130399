"""group identity: separates online and BE groups in the scheduler of Anolis and Alibaba Cloud kernels.

``cpu.bvt_warp_ns`` is 2 for work that is never to wait for the rest (on a core's other thread too), -1 for work that
yields at each wake-up, 0 for the rest. Opt-in, and only where the kernel has the file; newer kernels also need the
sysctl ``kernel.sched_group_identity_enabled``, which ``bypassctl doctor`` checks and an administrator sets, as it is
machine-wide.

Source: Koordinator's groupidentity (online 2, BE -1, system 0; QoS directories burstable 2, besteffort -1, and 0 for
kubepods, which contains the other two).
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, setting_of, unsupported_reason
from state.model import NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan
from state.pod_index import index_of

NAME: Final = "group_identity"
KNOB: Final = "cpu.identity"
Identity = Annotated[int, Meta(ge=-1, le=2)]


class GroupIdentityConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which identity each side has."""

    enabled: Annotated[bool, Meta(description="mark online and BE groups; Anolis and Alibaba Cloud kernels only")] = (
        False
    )

    # The highest of Anolis kernels; system pods are unchanged.
    online: ClassVar[Identity] = 2
    # The lowest.
    reclaimed: ClassVar[Identity] = -1


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: GroupIdentityConfig) -> Pools:
    reason = unsupported_reason(view, KNOB) or f"online {config.online}, BE {config.reclaimed}"
    return replace(pools, reasons={**pools.reasons, NAME: reason})


def parents(view: NodeView, plan: NodePlan, config: GroupIdentityConfig) -> list[Setting]:
    """The QoS directories: without them both sides' pods meet as equals one level up."""
    if unsupported_reason(view, KNOB) is not None:
        return []
    wanted = [_setting(view.burstable, config.online, "it contains online pods")]
    # Not while an online pod is in it (Koordinator: always).
    if not index_of(view.pods).beside:
        wanted.append(_setting(view.besteffort, config.reclaimed, "it contains only BE pods"))
    return wanted


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: GroupIdentityConfig) -> list[Setting]:
    if pod.pod_class is PodClass.SYSTEM or unsupported_reason(view, KNOB) is not None:
        return []
    level = config.online if pod.pod_class.online else config.reclaimed
    reason = f"the pod is {pod.pod_class}"
    # The containers, too: a group that was made below another identity keeps it.
    return [setting_of(pod, item, KNOB, level, policy=NAME, reason=reason) for item in (None, *pod.workload)]


def _setting(path: str, value: int, reason: str) -> Setting:
    return Setting(path=path, knob=KNOB, value=value, policy=NAME, reason=reason)


POLICY = Policy(
    name=NAME,
    summary="online and BE groups marked for the scheduler of Anolis kernels",
    config_type=GroupIdentityConfig,
    precedence=44,
    decide_node=decide_node,
    parents=parents,
    pod=for_pod,
)
