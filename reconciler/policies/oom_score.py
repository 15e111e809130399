"""oom score: processes of BE pods are the first that the OOM killer takes when the whole node is out of memory.

The kubelet gives processes of BestEffort pods 1000, the most there is, but those of a BE pod of another QoS class a
number by its request, which may be below an online pod's. Here every BE pod has a place in one band at the top. Online
pods keep the kubelet's numbers, unless ``online`` obeys Koordinator's annotations on them. Off by default. The actuator
of this name (`reconciler.actuators.processes.oom_score`) writes, and records the originals.

Source: Katalyst's OOM bands (its own kernel hook compares them; here they are mapped onto the kernel's scale);
Koordinator's oom-score-adj and oom-score-adj-spec. Kubernetes: "Node out of memory behavior" for the kubelet's numbers.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, setting_of
from state.memory import OOM_SCORE
from state.model import Container, NodeView, Phase, Pod, PodClass, Setting
from state.plan import NodePlan, ProcessValuePlan
from state.pod_index import derived, in_order, of_each

NAME: Final = "oom_score"
HIGHEST: Final = 1000
GUARANTEED: Final = -997
"""The kubelet's number for Guaranteed pods. -998 is for critical ones, -999 the kubelet's and the runtime's own."""
_REASON: Final = "BE processes are killed first when memory runs out"
_REQUESTED: Final = "the online pod's own number"
_IGNORE: Final = -300
"""Katalyst's "leave it alone"."""
_BAND: Final = 100
"""Katalyst's numbers for reclaimed pods: -100 to -1."""


class OomScoreConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The band, and the interval of the search for new processes."""

    enabled: Annotated[bool, Meta(description="set oom_score_adj of BE pods' processes")] = False
    lowest: Annotated[
        int, Meta(ge=0, le=HIGHEST, description="minimum oom_score_adj of BE processes, whatever the pod sets")
    ] = HIGHEST - _BAND + 1
    online: Annotated[
        bool,
        Meta(
            description="obey `koordinator.sh/oom-score-adj` and `oom-score-adj-spec` of online pods, too, within "
            f"{GUARANTEED} and below `lowest`; a tenant may then put itself behind others"
        ),
    ] = False

    # Processes inherit the score; only those that others start are found so late.
    sweep_s: ClassVar[float] = 10.0


def score_of(pod: Pod, container: Container, config: OomScoreConfig) -> int | None:
    """What the container's processes are to have; None: they are not managed.

    Within the band Katalyst's ``oom_priority`` decides, -100 (killed first) to -1, or Koordinator's ``oom-score-adj``,
    unchanged.
    """
    requested = dict(pod.memory.container_oom_scores).get(container.name or "", pod.memory.oom_score_adj)
    if pod.pod_class in (PodClass.SHARED, PodClass.DEDICATED):
        if not config.online or requested is None:
            return None
        # Below a Guaranteed pod's number are the node's own daemons. Where `lowest` is 0 a pod that asks for more must
        # not get a number that protects it from other online pods.
        return max(GUARANTEED, min(requested, max(config.lowest - 1, 0)))
    if pod.pod_class is not PodClass.RECLAIMED or pod.memory.oom_priority == _IGNORE:
        return None
    if requested is None:
        priority = min(-1, max(-_BAND, pod.memory.oom_priority)) if pod.memory.oom_priority is not None else -_BAND
        requested = HIGHEST - _BAND - priority  # -100, killed first, is 1000; -1 is 901
    # Clamped: no BE pod puts itself behind online ones.
    return max(config.lowest, min(HIGHEST, requested))


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: OomScoreConfig) -> NodePlan:
    """The number of every container that has started and is to have one."""
    settings = derived(view.pods, _settings, config)
    scores = ProcessValuePlan(settings=settings, sweep_s=config.sweep_s, dry_run=config.dry_run)
    reason = f"oom_score_adj of BE processes: {config.lowest} to {HIGHEST}"
    return replace(plan, oom_scores=scores, reasons={**plan.reasons, NAME: reason})


def _settings(pods: Mapping[str, Pod], config: OomScoreConfig) -> Mapping[str, Setting]:
    each, every = of_each(pods, _settings_of, config), dict[str, Setting]()
    for pod in in_order(pods):
        every.update(each[pod.uid])
    return every


def _settings_of(pod: Pod, config: OomScoreConfig) -> Mapping[str, Setting]:
    reason = _REQUESTED if pod.pod_class.online else _REASON
    return {
        container.group.path: setting_of(pod, container, OOM_SCORE, score, policy=NAME, reason=reason)
        for container in pod.workload
        if container.phase is Phase.SETTLED and (score := score_of(pod, container, config)) is not None
    }


POLICY = Policy(
    name=NAME,
    summary=_REASON,
    config_type=OomScoreConfig,
    precedence=74,
    decide_resources=decide_resources,
)
