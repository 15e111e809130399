"""A plan for a described machine: no node, no cgroups, nothing to compare with and nothing to write.

The kubelet's policy is none there (it assigns no CPUs itself), the kernel a mainline one with cgroup v1, and the CPU in
use is the pods file's.
"""

from typing import Final

from msgspec.structs import replace

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
from reconciler.runtime.format import cpu
from state.cpu import GroupUse
from state.model import (
    ContainerMeta,
    CpuPolicy,
    GroupRef,
    KubeletView,
    NodeCpu,
    NodeView,
    Pod,
    RuntimeSpec,
)
from state.topology import Topology

_VERSIONS: Final = {"cpu": 1, "cpuset": 1, "memory": 1, "pids": 1}
_PATCHED: Final = frozenset({"cpu.identity", "cpu.qos"})
"""Knobs of distributions' own kernels."""
LAYOUT: Final = Layout(Driver.CGROUPFS)


def plan_machine(topology: Topology, described: list[DescribedPod], config: Config, problems: list[str]) -> PlanResult:
    """What the agent would want there, as if it had just started and everything ran already."""
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
    desired = plan(view, None, config.policies)
    standings = tuple(
        OfflineSetting(setting, "wanted", _text(setting.value), None, "") for setting in desired.settings.values()
    )
    texts = [f"{pod.title}: {problem}" for pod in pods.values() for problem in pod.classification.problems]
    sources = {"pods": f"{len(pods)} described", "cpu": f"{cpu(sum(use.values()))} in use, as described"}
    return PlanResult(view, desired, standings, WritePlan(steps=()), sources, tuple(dict.fromkeys([*problems, *texts])))


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


def _cpu(topology: Topology, pods: dict[str, Pod], use: dict[str, int]) -> NodeCpu:
    sides = {True: 0, False: 0}
    for uid, pod in pods.items():
        sides[pod.pod_class.online] += use[uid]
    busy = sum(sides.values())
    return NodeCpu(
        busy_milli=min(busy, 1000 * len(topology.online)),
        online_milli=sides[True],
        reclaimed_milli=sides[False],
        age_s=0.0,
    )


def _uses(pods: dict[str, Pod], use: dict[str, int]) -> list[tuple[str, GroupUse]]:
    """By group: a pod's use, and each container's equal part of it."""
    uses: list[tuple[str, GroupUse]] = []
    for uid, pod in pods.items():
        uses.append((pod.group.path, GroupUse(cpu_milli=use[uid])))
        uses += [
            (container.group.path, GroupUse(cpu_milli=use[uid] // len(pod.containers))) for container in pod.containers
        ]
    return uses
