"""A configuration's plan for the pods of an older recording, beside the CPUs: the machine itself is not in it.

A frame has the pods with their classes, labels, annotations and containers, the knobs of the kernel and the node's
memory. CPU pools are not planned from it, and core scheduling as if every core had two threads. Recordings with views
are planned by `reconciler.cli.planreplay`.
"""

from typing import Final

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from cgroupfs.naming import Driver, Layout, QosClass
from reconciler.config.model import Config
from reconciler.control.planner import plan_node
from reconciler.pods.assemble import ContainerInput, PodInput, assemble
from reconciler.pods.selectors import ClassOverride
from state.evidence import PodSnapshot, SampleFrame
from state.memory import NodeMemoryReading
from state.model import ContainerKind, GroupRef, NodeView, Pod, PodMeta
from state.plan import NodePlan
from state.topology import uniform

_NODE: Final = "node"
_CONTROLLERS: Final = ("cpu", "cpuset", "memory", "pids")
_LAYOUT: Final = Layout(Driver.CGROUPFS)


def plan_frame(config: Config, frame: SampleFrame) -> NodePlan:
    """The plan for one frame. Its pools are made up, as the machine is."""
    pods = {uid: _pod(snapshot, config) for uid, snapshot in frame.pods.items()}
    v2 = "memory.high" in frame.knobs
    versions = dict.fromkeys(_CONTROLLERS, 2 if v2 else 1) | {"io" if v2 else "blkio": 2 if v2 else 1}
    if "net.classid" in frame.knobs:
        versions["net_cls"] = 1
    view = NodeView(
        topology=uniform(cores=max(1, -(-_cpus(frame) // 2)), threads=2),
        versions=versions,
        kubepods=_LAYOUT.kubepods,
        besteffort=_LAYOUT.qos(QosClass.BESTEFFORT),
        burstable=_LAYOUT.qos(QosClass.BURSTABLE),
        pods=pods,
        knobs=frozenset(frame.knobs),
        node_memory=_memory(frame),
    )
    return plan_node(view, None, config.policies)


def _cpus(frame: SampleFrame) -> int:
    """As many CPUs as the pods were seen on."""
    most = 0
    for pod in frame.pods.values():
        try:
            most = max(most, *CpuSet.parse(pod.cpus)) if pod.cpus else most
        except (InputError, ValueError):
            continue
    return most + 1


def _memory(frame: SampleFrame) -> NodeMemoryReading | None:
    samples = frame.samples.get(_NODE, {})
    total, available = samples.get("memory.total"), samples.get("memory.available")
    if total is None or available is None:
        return None
    return NodeMemoryReading(
        total_bytes=int(total.value), available_bytes=int(available.value), age_s=max(total.age_s, available.age_s)
    )


def _pod(snapshot: PodSnapshot, config: Config) -> Pod:
    qos = next((qos for qos in QosClass if qos.value.lower() == snapshot.qos.lower()), QosClass.BURSTABLE)
    override = ClassOverride(pod_class=snapshot.pod_class, uid=snapshot.uid, origin="recording")
    rules = replace(config.classes, overrides=(override,))
    name = snapshot.title.rpartition("/")[2]
    meta = PodMeta(
        uid=snapshot.uid,
        source="recording",
        namespace=snapshot.namespace,
        name=name,
        labels=snapshot.labels,
        annotations=snapshot.annotations,
        qos=qos,
    )
    known = PodInput(
        uid=snapshot.uid,
        qos=qos,
        group=GroupRef(path=snapshot.group),
        containers={container.id: GroupRef(path=container.path) for container in snapshot.containers},
        metas=(meta,),
        facts={
            container.id: ContainerInput(
                kind=ContainerKind.SANDBOX if container.sandbox else ContainerKind.APP, name=container.name
            )
            for container in snapshot.containers
        },
    )
    return assemble(known, rules)
