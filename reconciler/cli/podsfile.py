"""The pods of a described machine: a short YAML list, or what ``kubectl get pods -o json`` writes.

    - {name: db, namespace: shop, class: dedicated, requests: {cpu: 4, memory: 8Gi}, limits: {cpu: 4, memory: 8Gi}}
    - {name: web, count: 3, requests: {cpu: 500m}, use: 300m}
    - {name: crunch, labels: {koordinator.sh/qosClass: BE}}

The manual page has the table of keys. Facts that a real node has in cgroups are derived as the kubelet and the runtime
would: QoS, group paths, shares, quotas.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.bounded import decoded, read_file
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import Driver, Layout, QosClass
from cgroupfs.steps import WritePlan
from reconciler.cli.offline import OfflineSetting, PlanResult
from reconciler.config.model import Config
from reconciler.control.planner import plan
from reconciler.pods.assemble import ContainerInput, PodInput, assemble
from reconciler.pods.marks import MarkReader
from reconciler.pods.resources import read_resources
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.policies.base import PERIOD_US, QUOTA_MIN_US, SHARES_MIN
from reconciler.runtime.format import cpu, plural
from reconciler.settings.binder import Text, bind_list
from reconciler.settings.units import milli
from reconciler.sources.kubelet_api import decode_pods
from state.cpu import GroupUse
from state.model import (
    ContainerKind,
    ContainerMeta,
    CpuPolicy,
    GroupRef,
    KubeletView,
    NodeCpu,
    NodeView,
    Pod,
    PodClass,
    PodMeta,
    Pools,
    RuntimeSpec,
)
from state.plan import Desired, NodePlan
from state.topology import Topology

SOURCE: Final = "file"
_MOST: Final = 10_000
_LARGEST: Final = 64 << 20
"""Bytes: what kubectl writes of so many pods."""
_DEEPEST: Final = 64
_LARGEST_LIST: Final = 4 << 20
"""Characters of a YAML list."""

Quantities = Mapping[str, str]


class ContainerLine(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)] = "main"
    requests: Quantities = {}
    limits: Quantities = {}


class PodLine(Struct, frozen=True, forbid_unknown_fields=True, rename={"pod_class": "class"}):
    """One pod of the list, or ``count`` alike. Without ``containers`` it has one, with the pod's own requests."""

    name: Annotated[str, Meta(min_length=1)]
    namespace: Annotated[str, Meta(min_length=1)] = "default"
    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    pod_class: PodClass | None = None
    qos: QosClass | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    priority_class: str | None = None
    owner: str | None = None
    requests: Quantities = {}
    limits: Quantities = {}
    containers: tuple[ContainerLine, ...] = ()
    use: str = "0"

    def __post_init__(self) -> None:
        if self.containers and (self.requests or self.limits):
            raise ValueError("expected requests and limits in each container, or of the pod alone; got both")
        if self.use_milli < 0:
            raise ValueError(f"use: expected CPUs in use, such as 1500m or 2; got {self.use!r}")

    @property
    def use_milli(self) -> int:
        """The CPU in use, in thousandths; -1 if it is not a quantity."""
        try:
            return milli(self.use)
        except ValueError:
            return -1


class DescribedPod(NamedTuple):
    """One pod. ``use_milli``: the CPU that it uses now (thousandths); ``pod_class`` None: by the usual rules."""

    meta: PodMeta
    qos: QosClass
    pod_class: PodClass | None = None
    use_milli: int = 0


def read_pods_file(path: str, marks: MarkReader) -> tuple[list[DescribedPod], list[str]]:
    """The pods, and a message for each unusable part of one. ``marks`` takes what is kept of labels.

    Errors: `InputError` for a file that cannot be read or is neither of the two forms, `ConfigError` with every mistake
    of a list.
    """
    try:
        body = read_file(path, _LARGEST, pipes=True)
    except OSError as exc:
        raise InputError(path, exc.strerror or str(exc), "a readable file") from exc
    if body.lstrip().startswith(b"{"):
        pods, problems = _kubectl(path, body, marks)
    else:
        pods, problems = _listed(path, body)
    seen: set[str] = set()
    for pod in pods:
        if pod.meta.uid in seen:
            raise InputError(path, f"{pod.meta.namespace}/{pod.meta.name}", "each pod once (count: N makes several)")
        seen.add(pod.meta.uid)
    if len(pods) > _MOST:
        raise InputError(path, f"{len(pods)} pods", f"at most {_MOST}")
    return pods, problems


def _kubectl(path: str, body: bytes, marks: MarkReader) -> tuple[list[DescribedPod], list[str]]:
    try:
        answer = decoded(msgspec.json.decode, body, deepest=_DEEPEST)
        if isinstance(answer, dict) and answer.get("kind") == "List":
            # What kubectl calls the API server's PodList.
            body = msgspec.json.encode({**answer, "kind": "PodList"})
        metas, problems = decode_pods(body, marks)
    except ValueError as exc:
        raise InputError(path, str(exc), "what kubectl get pods -o json writes, or a YAML list") from exc
    return [DescribedPod(meta, meta.qos or qos_of(meta)) for meta in metas], list(problems)


def _listed(path: str, body: bytes) -> tuple[list[DescribedPod], list[str]]:
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise InputError(path, str(exc), "UTF-8 text") from exc
    lines, _ = bind_list(PodLine, Text(path, text), largest=_LARGEST_LIST)
    problems: list[str] = []
    return [pod for line in lines for pod in _made(line, problems)], problems


def _made(line: PodLine, problems: list[str]) -> Iterator[DescribedPod]:
    lines = line.containers or (ContainerLine(requests=line.requests, limits=line.limits),)
    texts: list[str] = []
    containers = tuple(_container(container_line, texts) for container_line in lines)
    problems += [f"{line.namespace}/{line.name}: {problem}" for problem in texts]
    for number in range(line.count):
        name = f"{line.name}-{number}" if line.count > 1 else line.name
        meta = PodMeta(
            uid=f"{line.namespace}.{name}",
            source=SOURCE,
            namespace=line.namespace,
            name=name,
            labels=line.labels,
            annotations=line.annotations,
            priority_class=line.priority_class,
            owner=line.owner,
            containers=containers,
        )
        yield DescribedPod(meta, line.qos or qos_of(meta), line.pod_class, line.use_milli)


def _container(line: ContainerLine, problems: list[str]) -> ContainerMeta:
    where = f"container {line.name}"
    requests, bad_requests = read_resources(f"{where}: requests", line.requests)
    limits, bad_limits = read_resources(f"{where}: limits", line.limits)
    problems += (*bad_requests, *bad_limits)
    # The API server's default: without a request the limit is the request.
    requests = replace(
        requests,
        cpu_milli=limits.cpu_milli if requests.cpu_milli is None else requests.cpu_milli,
        memory_bytes=limits.memory_bytes if requests.memory_bytes is None else requests.memory_bytes,
    )
    return ContainerMeta(name=line.name, requests=requests, limits=limits)


def qos_of(meta: PodMeta) -> QosClass:
    """The QoS class that Kubernetes gives such a pod: by cpu and memory of all its containers, init ones too."""
    sides = [(each.requests, each.limits) for each in meta.containers if each.kind is not ContainerKind.SANDBOX]
    numbers = [((ask.cpu_milli, ask.memory_bytes), (most.cpu_milli, most.memory_bytes)) for ask, most in sides]
    if not any(any(ask) or any(most) for ask, most in numbers):
        return QosClass.BESTEFFORT
    whole = all(all(most) and ask == most for ask, most in numbers)
    return QosClass.GUARANTEED if whole else QosClass.BURSTABLE


_VERSIONS: Final = {"cpu": 1, "cpuset": 1, "memory": 1, "pids": 1}
_PATCHED: Final = frozenset({"cpu.identity", "cpu.qos"})
"""Knobs of distributions' own kernels."""
_CPU: Final = 1000
_STEP_S: Final = 60.0
"""Between two plans: longer than each interval of the laws."""
_MOST_STEPS: Final = 200
LAYOUT: Final = Layout(Driver.CGROUPFS)


def plan_machine(topology: Topology, described: list[DescribedPod], config: Config, problems: list[str]) -> PlanResult:
    """What the agent would want there in the end, if it had just started and everything ran already.

    On a mainline kernel with cgroup v1, beside a kubelet without CPU manager.
    """
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
    settings = tuple(
        OfflineSetting(setting, "wanted", "no limit" if setting.value is None else str(setting.value), None, "")
        for setting in desired.settings.values()
    )
    texts = [f"{pod.title}: {problem}" for pod in pods.values() for problem in pod.classification.problems]
    rest = "steady state" if steps is not None else "no steady state"
    sources = {
        "pods": f"{len(pods)} described",
        "cpu": f"{cpu(sum(use.values()))} in use, as described; {rest} after {plural(steps or _MOST_STEPS, 'plan')}",
    }
    return PlanResult(view, desired, settings, WritePlan(steps=()), sources, tuple(dict.fromkeys([*problems, *texts])))


def _settled(view: NodeView, use: Mapping[str, int], config: Config) -> tuple[NodeView, Desired, int | None]:
    """Plan until two plans in a row are equal; how many that took, None: they never were."""
    # A first plan has no CPUs of BE work yet: it counts online work's use of all CPUs against BE work, also of those
    # where BE work will not run.
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
    """A plan without the times and texts of how it was made."""
    sizes = {key: size.cpus for key, size in desired.plan.pools.sizes.items()}
    pools = replace(desired.plan.pools, budget_at=0.0, unknown_since=None, reasons={}, sizes={})
    settings = {key: setting.value for key, setting in desired.settings.items()}
    return replace(desired.plan, pools=pools, reasons={}), sizes, settings


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
    """The spec that the kubelet would have passed to the runtime.

    Source: kubelet pkg/kubelet/cm/helpers_linux.go, MilliCPUToShares and MilliCPUToQuota.
    """
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
