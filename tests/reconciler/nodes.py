"""Nodes for policy tests, from a few words: `node`, `pod`, `container`, `kubelet`, `cpu`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from state.model import (
    Classification,
    Container,
    ContainerKind,
    CpuPolicy,
    GroupRef,
    KubeletView,
    NodeCpu,
    NodeView,
    Pod,
    PodClass,
    Resources,
    RuntimeSpec,
)
from state.pod_index import FixedTable
from state.topology import Topology, uniform

V1 = {"cpu": 1, "cpuset": 1, "memory": 1, "pids": 1}
V2 = dict.fromkeys(V1, 2)
MAINLINE = frozenset(CATALOG) - {"cpu.identity", "cpu.qos"}
"""What a kernel without a distribution's own features offers."""
_LEVELS = {
    QosClass.GUARANTEED: "/kubepods",
    QosClass.BURSTABLE: "/kubepods/burstable",
    QosClass.BESTEFFORT: "/kubepods/besteffort",
}


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def container(
    name: str,
    *,
    kind: ContainerKind = ContainerKind.APP,
    spec: RuntimeSpec | None = None,
    requests: Resources | None = None,
    limits: Resources | None = None,
) -> Container:
    """A container of no pod yet: `pod` gives it its directory."""
    return Container(
        id=f"id-{name}",
        name=name,
        kind=kind,
        group=GroupRef(path=""),
        spec=spec if spec is not None else RuntimeSpec(shares=2),
        requests=requests or Resources(),
        limits=limits or Resources(),
    )


def pod(
    uid: str,
    *containers: Container,
    cls: PodClass = PodClass.RECLAIMED,
    qos: QosClass = QosClass.BESTEFFORT,
) -> Pod:
    """A pod with the given containers, or with one named main."""
    path = f"{_LEVELS[qos]}/pod{uid}"
    return Pod(
        uid=uid,
        qos=qos,
        namespace="ns",
        name=uid,
        group=GroupRef(path=path),
        containers=tuple(
            replace(item, group=GroupRef(path=f"{path}/{item.id}")) for item in containers or (container("main"),)
        ),
        classification=Classification(pod_class=cls, source="test"),
    )


def online(uid: str, *containers: Container, qos: QosClass = QosClass.BURSTABLE) -> Pod:
    return pod(uid, *containers, cls=PodClass.SHARED, qos=qos)


def kubelet(
    policy: CpuPolicy = CpuPolicy.STATIC,
    default: str = "",
    exclusive: Mapping[str, str] | None = None,
    reserved: str = "",
    **more: Any,
) -> KubeletView:
    """``exclusive`` maps ``uid/container`` to a CPU list."""
    owners: dict[str, dict[str, CpuSet]] = {}
    for key, text in (exclusive or {}).items():
        uid, _, name = key.partition("/")
        owners.setdefault(uid, {})[name] = cpus(text)
    values = {"may_resize": False} | more
    return KubeletView(policy=policy, default_cpus=cpus(default), exclusive=owners, reserved=cpus(reserved), **values)


NONE = kubelet(CpuPolicy.NONE)


def cpu(online: int = 0, reclaimed: int = 0, system: int = 0, *, age: float | None = 0.0, idle: Any = None) -> NodeCpu:
    """CPU use in thousandths of a CPU."""
    return NodeCpu(
        busy_milli=online + reclaimed + system,
        online_milli=online,
        reclaimed_milli=reclaimed,
        idle=idle or {},
        age_s=age,
    )


@cache
def _plain(cores: int) -> Topology:
    return uniform(cores=cores, threads=1)


def node(*pods: Pod, topology: Topology | int = 8, **more: Any) -> NodeView:
    """A v1 node of single-threaded cores by default, kubelet policy none, idle."""
    shape = _plain(topology) if isinstance(topology, int) else topology
    values: dict[str, Any] = {"versions": V1, "kubelet": NONE, "cpu": cpu(), "knobs": MAINLINE} | more
    return NodeView(
        topology=shape,
        kubepods="/kubepods",
        besteffort="/kubepods/besteffort",
        burstable="/kubepods/burstable",
        pods=FixedTable({item.uid: item for item in pods}),
        **values,
    )


__all__ = ["EMPTY", "MAINLINE", "NONE", "V1", "V2", "container", "cpu", "cpus", "kubelet", "node", "online", "pod"]
