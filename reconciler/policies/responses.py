"""Responses to interference: the ladder's requests become settings like any other, so that `restore` covers them.

- *hold*: the BE budget remains at or below its value at the time when interference with an online pod began.
- *squeeze*: one BE pod gets a quota, a ``memory.high`` or a disk bandwidth of its own, besides other policies' limits
  for it: the tighter one counts.
- *close*: the node takes no new BE pods (`reconciler.actuators.node_mark`, headroom 0).
- *freeze*: the tasks of one BE pod stop. The ladder bounds it in time; a daemon that starts thaws what an earlier one
  left frozen before anything else (`reconciler.actuators.cgroup.restore`).

`reconciler.responses` decides. An online pod is never squeezed or frozen, even if requested.
"""

from typing import Final

from msgspec.structs import replace

from cgroupfs.codecs import DeviceLimits
from reconciler.policies.base import (
    MILLI_MIN,
    SHARES_MIN,
    Policy,
    PolicyConfig,
    container_asks,
    owns_cpus,
    period_us,
    process_groups,
    quota_us,
    setting_of,
    unsupported_reason,
)
from reconciler.policies.be_quota import own_quota
from reconciler.runtime.format import cpu
from state.measures import Restrictions, SqueezeLimit
from state.model import NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan

NAME: Final = "responses"
FREEZE: Final = "freeze"


class ResponsesConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether responses reach the plan at all; which there are is set under ``interference``."""


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: ResponsesConfig) -> Pools:
    """Hold the BE budget where a response requests it."""
    measures = view.measures
    if measures.budget_milli is None or measures.budget_milli >= pools.budget_milli:
        return pools
    reasons = {**pools.reasons, NAME: f"BE budget limited to {cpu(measures.budget_milli)}: {measures.budget_reason}"}
    return replace(pools, budget_milli=measures.budget_milli, reasons=reasons)


def in_force(view: NodeView, pools: Pools) -> Restrictions:
    """What other policies apply of the responses: nothing where this policy is off or a dry run."""
    return Restrictions() if pools.reasons.get(NAME) == "off" or NAME in pools.trials else view.measures


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: ResponsesConfig) -> NodePlan:
    """Close the node to new BE pods where a response requests it."""
    return plan if view.measures.closed is None or config.dry_run else replace(plan, closed=view.measures.closed)


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: ResponsesConfig) -> list[Setting]:
    """What a suspect may have for now, and whether it runs."""
    measures = view.measures
    if pod.pod_class is not PodClass.RECLAIMED:
        return []
    settings: list[Setting] = []
    if (squeeze := measures.squeezed.get(pod.uid)) is not None:
        settings += _cpu(pod, view, plan.pools, squeeze)
        settings += _memory(pod, view, squeeze)
        settings += _disk(pod, view, squeeze)
    if (reason := measures.frozen.get(pod.uid)) is not None and unsupported_reason(view, FREEZE) is None:
        settings.append(setting_of(pod, None, FREEZE, 1, policy=NAME, reason=reason))
    return settings


def _cpu(pod: Pod, view: NodeView, pools: Pools, squeeze: SqueezeLimit) -> list[Setting]:
    if squeeze.cpu_milli is None:
        return []
    members = pod.workload if pod.sandbox is None else pod.members
    containers = [container for container in members if not owns_cpus(pod, container, pools)]
    # A quota limits how long its tasks run and not when: at the beginning of each period they compete with all others.
    yields = setting_of(pod, None, "cpu.weight", SHARES_MIN, policy=NAME, reason=squeeze.reason)
    bare = all(container.spec is not None and (container.spec.quota_us or -1) <= 0 for container in containers)
    # One for all on the pod's directory, where the runtime brings no quota for any of them: a smaller one above would
    # keep a container from starting again. In a machine of its own the pod has its processes there.
    if (len(containers) > 1 and bare) if pod.sandbox is None else len(containers) == len(members):
        value = quota_us(max(MILLI_MIN, squeeze.cpu_milli), period_us(view, pod.group.path))
        return [yields, setting_of(pod, None, "cpu.quota", value, policy=NAME, reason=squeeze.reason)]
    weights = {container.id: container_asks(container, view.capacity_milli) for container in containers}
    total = sum(weights.values())
    quotas = [
        setting_of(
            pod,
            container,
            "cpu.quota",
            own_quota(max(MILLI_MIN, squeeze.cpu_milli * weights[container.id] // total), container, view),
            policy=NAME,
            reason=squeeze.reason,
        )
        for container in containers
    ]
    return [yields, *quotas]


def _memory(pod: Pod, view: NodeView, squeeze: SqueezeLimit) -> list[Setting]:
    if squeeze.memory_high_bytes is None or unsupported_reason(view, "memory.high") is not None:
        return []
    return [setting_of(pod, None, "memory.high", squeeze.memory_high_bytes, policy=NAME, reason=squeeze.reason)]


def _disk(pod: Pod, view: NodeView, squeeze: SqueezeLimit) -> list[Setting]:
    if squeeze.disk_bps is None or not squeeze.disks:
        return []
    bps = squeeze.disk_bps
    if unsupported_reason(view, "io.max") is None:
        limits = DeviceLimits({disk: {"rbps": bps, "wbps": bps} for disk in squeeze.disks})
        return [setting_of(pod, None, "io.max", limits, policy=NAME, reason=squeeze.reason)]
    # A throttle of v1 binds the tasks of its own group only. A value of 0 would remove it.
    groups = process_groups(pod)
    return [
        setting_of(
            pod,
            group,
            knob,
            DeviceLimits({disk: {key: max(1, bps // len(groups))} for disk in squeeze.disks}),
            policy=NAME,
            reason=squeeze.reason,
        )
        for group in groups
        for knob, key in (("blkio.read_bps", "rbps"), ("blkio.write_bps", "wbps"))
        if unsupported_reason(view, knob) is None
    ]


POLICY = Policy(
    name=NAME,
    summary="responses to interference: limited BE budget, squeezed or frozen BE pods",
    config_type=ResponsesConfig,
    precedence=6,
    decide_node=decide_node,
    decide_resources=decide_resources,
    pod=for_pod,
)
