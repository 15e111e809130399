"""A plan for a described machine: no node, no cgroups, nothing to compare with and nothing to write.

The kubelet's policy is none there (it assigns no CPUs itself), the kernel a mainline one with cgroup v1, and the CPU in
use is the pods file's. The plan is the one at which the agent comes to rest there: a first plan has no CPUs of BE work
yet, so it counts online work's use of all CPUs against BE work, also of those where BE work will not run.
"""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import Driver, Layout, QosClass
from cgroupfs.steps import WritePlan
from reconciler.cli.offline import OfflineSetting, PlanResult
from reconciler.cli.podsfile import DescribedPod
from reconciler.config.model import Config
from reconciler.control.planner import plan
from reconciler.pods.assemble import ContainerInput, PodInput, assemble
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.policies.base import PERIOD_US, QUOTA_MIN_US, SHARES_MIN
from reconciler.runtime.format import cpu, plural
from state.cpu import GroupUse
from state.model import (
    ContainerMeta,
    CpuPolicy,
    GroupRef,
    KubeletView,
    NodeCpu,
    NodeView,
    Pod,
    PodClass,
    Pools,
    RuntimeSpec,
)
from state.plan import Desired, NodePlan
from state.topology import Topology

_VERSIONS: Final = {"cpu": 1, "cpuset": 1, "memory": 1, "pids": 1}
_PATCHED: Final = frozenset({"cpu.identity", "cpu.qos"})
"""Knobs of distributions' own kernels."""
_CPU: Final = 1000
_STEP_S: Final = 60.0
"""Between two plans: longer than each interval of the laws."""
_MOST_STEPS: Final = 200
LAYOUT: Final = Layout(Driver.CGROUPFS)


def plan_machine(topology: Topology, described: list[DescribedPod], config: Config, problems: list[str]) -> PlanResult:
    """What the agent would want there in the end, if it had just started and everything ran already."""
    pods = {pod.meta.uid: _pod(pod, config.classes) for pod in described}
    use = {pod.meta.uid: pod.use_milli for pod in described}
    view = NodeView(
        topology=topology,
        versions=_VERSIONS,
        kubepods=LAYOUT.kubepods,
        besteffort=LAYOUT.qos(QosClass.BESTEFFORT),
        burstable=LAYOUT.qos(QosClass.BURSTABLE),
        pods=pods,
        kubelet=KubeletView(policy=CpuPolicy.NONE),
        cpu=_cpu(topology, pods, use),
        uses=dict(_uses(pods, use)),
        knobs=frozenset(CATALOG) - _PATCHED,
    )
    view, desired, steps = _settled(view, use, config)
    if steps is None:
        problems = [*problems, f"no steady state after {_MOST_STEPS} plans: this is the last of them"]
    standings = tuple(
        OfflineSetting(setting, "wanted", _text(setting.value), None, "") for setting in desired.settings.values()
    )
    texts = [f"{pod.title}: {problem}" for pod in pods.values() for problem in pod.classification.problems]
    rest = "steady state" if steps is not None else "no steady state"
    sources = {
        "pods": f"{len(pods)} described",
        "cpu": f"{cpu(sum(use.values()))} in use, as described; {rest} after {plural(steps or _MOST_STEPS, 'plan')}",
    }
    return PlanResult(view, desired, standings, WritePlan(steps=()), sources, tuple(dict.fromkeys([*problems, *texts])))


def _settled(view: NodeView, use: Mapping[str, int], config: Config) -> tuple[NodeView, Desired, int | None]:
    """Plan until two plans in a row are equal; how many that took, None: they never were."""
    desired = plan(view, None, config.policies)
    for step in range(1, _MOST_STEPS):
        pools = desired.plan.pools
        view = replace(view, now=view.now + _STEP_S, cpu=_cpu(view.topology, view.pods, use, pools))
        following = plan(view, desired.plan, config.policies)
        if _lasting(following) == _lasting(desired):
            return view, plan(view, _reasoned_anew(following.plan), config.policies), step
        desired = following
    return view, desired, None


def _reasoned_anew(node: NodePlan) -> NodePlan:
    """The plan without the reason of the budget, which otherwise stays that of its last change."""
    reasons = {key: reason for key, reason in node.pools.reasons.items() if key != "budget"}
    return replace(node, pools=replace(node.pools, reasons=reasons))


def _lasting(desired: Desired) -> object:
    """A plan without the times and texts of how it came about."""
    sizes = {key: size.cpus for key, size in desired.plan.pools.sizes.items()}
    pools = replace(desired.plan.pools, budget_at=0.0, unknown_since=None, reasons={}, sizes={})
    settings = {key: setting.value for key, setting in desired.settings.items()}
    return replace(desired.plan, pools=pools, reasons={}), sizes, settings


def _text(value: object) -> str:
    return "no limit" if value is None else str(value)


def _pod(pod: DescribedPod, rules: ClassRules) -> Pod:
    uid, qos = pod.meta.uid, pod.qos
    # The name first: what people are shown of an id is its beginning.
    ids = {f"{container.name}-{uid}": container for container in pod.meta.containers}
    if pod.pod_class is not None:
        override = ClassOverride(pod_class=pod.pod_class, uid=uid, origin="pods file")
        rules = replace(rules, overrides=(override, *rules.overrides))
    known = PodInput(
        uid=uid,
        qos=qos,
        group=GroupRef(path=LAYOUT.pod(qos, uid)),
        containers={cid: GroupRef(path=LAYOUT.container(qos, uid, cid)) for cid in ids},
        metas=(pod.meta,),
        facts={
            cid: ContainerInput(kind=container.kind, name=container.name, spec=_spec(container))
            for cid, container in ids.items()
        },
    )
    return assemble(known, rules)


def _spec(container: ContainerMeta) -> RuntimeSpec:
    """The spec that the kubelet would have passed to the runtime."""
    number, limit = container.requests.cpu_milli, container.limits.cpu_milli
    return RuntimeSpec(
        shares=max(SHARES_MIN, (number or 0) * 1024 // 1000),
        quota_us=max(QUOTA_MIN_US, limit * PERIOD_US // 1000) if limit else None,
        period_us=PERIOD_US if limit else None,
        memory_bytes=container.limits.memory_bytes,
    )


def _cpu(topology: Topology, pods: Mapping[str, Pod], use: Mapping[str, int], pools: Pools | None = None) -> NodeCpu:
    """The node's use; with ``pools`` also each CPU's idle time: a pod's use is spread evenly over its CPUs."""
    sides = {True: 0, False: 0}
    busy = dict.fromkeys(topology.online, 0.0)
    for uid, pod in pods.items():
        sides[pod.pod_class.online] += use[uid]
        cpus = (_cpus_of(pod, pools) if pools is not None else EMPTY) & topology.online
        for number in cpus:
            busy[number] += use[uid] / (_CPU * len(cpus))
    return NodeCpu(
        busy_milli=min(sum(sides.values()), _CPU * len(topology.online)),
        online_milli=sides[True],
        reclaimed_milli=sides[False],
        age_s=0.0,
        idle={number: 1.0 - min(1.0, part) for number, part in busy.items()} if pools is not None else {},
    )


def _cpus_of(pod: Pod, pools: Pools) -> CpuSet:
    own = CpuSet.union(cpus for key, cpus in pools.dedicated.items() if key.partition("/")[0] == pod.uid)
    if own:
        return own
    if pod.pod_class is PodClass.RECLAIMED:
        return pools.reclaimed
    return pools.named.get(pools.bound.get(pod.uid, ""), pools.shared)


def _uses(pods: dict[str, Pod], use: dict[str, int]) -> list[tuple[str, GroupUse]]:
    """By group: a pod's use, and each container's equal part of it."""
    uses: list[tuple[str, GroupUse]] = []
    for uid, pod in pods.items():
        uses.append((pod.group.path, GroupUse(cpu_milli=use[uid])))
        uses += [
            (container.group.path, GroupUse(cpu_milli=use[uid] // len(pod.containers))) for container in pod.containers
        ]
    return uses
