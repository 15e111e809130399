"""What one whole plan costs: CPU time and memory, and how both grow with pods and CPUs. No cgroup is touched.

    python -m tests.bench plan

The node is made up: a tenth of the pods own CPUs, two fifths are online (in a default pool, named pools and NUMA-bound
ones), half are BE. "again" plans with the pools of the plan before, as the daemon does at every event. In "large" those
with CPUs of their own request up to 40 each, far more than there are together, and most of them are refused; in
"exclusive" more of them request a node of their own than there are nodes.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_node, plan_pod
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.shared import SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences
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
from state.topology import Topology, uniform

_LEVEL = {
    QosClass.GUARANTEED: "/kubepods",
    QosClass.BURSTABLE: "/kubepods/burstable",
    QosClass.BESTEFFORT: "/kubepods/besteffort",
}
CONFIG = PoliciesConfig()
SEPARATE = PoliciesConfig(
    shared=SharedConfig(mode=SharedPoolMode.SEPARATE), reclaimed=ReclaimedConfig(minimum_per_node=1)
)


def machine(cpus: int) -> Topology:
    """Two sockets of two nodes each, two threads a core."""
    return uniform(sockets=2, nodes=min(8, max(2, cpus // 32)), cores=cpus // 2, threads=2)


def node(topology: Topology, pods: int) -> NodeView:
    """A full node: requests add up to about what it has."""
    made = {pod.uid: pod for pod in _pods(topology, pods)}
    everything = CpuSet.span(len(topology.online))
    actual = {(pod.group.path, "cpu.set"): everything for pod in made.values()}
    return NodeView(
        topology=topology,
        versions={"cpu": 1, "cpuset": 1, "memory": 1, "pids": 1},
        kubepods="/kubepods",
        besteffort=_LEVEL[QosClass.BESTEFFORT],
        burstable=_LEVEL[QosClass.BURSTABLE],
        pods=made,
        kubelet=KubeletView(policy=CpuPolicy.NONE, reserved=CpuSet([0, 1])),
        cpu=NodeCpu(
            busy_milli=len(topology.online) * 300,
            online_milli=len(topology.online) * 250,
            reclaimed_milli=len(topology.online) * 40,
            idle=dict.fromkeys(topology.online, 0.7),
            age_s=0.0,
        ),
        actual=actual,
        now=1000.0,
    )


def _pods(topology: Topology, count: int) -> Iterator[Pod]:
    cpus, nodes = len(topology.online), topology.nodes()
    dedicated = min(count // 10, cpus // 8)
    for number in range(count):
        uid = f"{number:08x}-0000-4000-8000-000000000000"
        wish = CpuPreferences()
        if number < dedicated:
            pod_class, qos, milli = PodClass.DEDICATED, QosClass.GUARANTEED, 1000 * (1 + number % 4)
        elif number % 2:
            pod_class, qos, milli = PodClass.SHARED, QosClass.BURSTABLE, max(10, cpus * 500 // count)
            if number % 5 == 0:
                wish = CpuPreferences(pool=f"pool{number % 3}")
            elif number % 7 == 0:
                wish = CpuPreferences(numa_binding=True, nodes=(nodes[number % len(nodes)],))
        else:
            pod_class, qos, milli = PodClass.RECLAIMED, QosClass.BESTEFFORT, 0
        path = f"{_LEVEL[qos]}/pod{uid}"
        names = (("pause", ContainerKind.SANDBOX), ("main", ContainerKind.APP), ("side", ContainerKind.APP))
        yield Pod(
            uid=uid,
            qos=qos,
            group=GroupRef(path=path, inode=number + 1),
            namespace="bench",
            name=f"pod-{number}",
            wish=wish,
            classification=Classification(pod_class=pod_class, source="bench"),
            containers=tuple(
                Container(
                    id=f"{number:032x}{place:032x}",
                    name=name,
                    kind=kind,
                    group=GroupRef(path=f"{path}/{number:032x}{place:032x}"),
                    spec=RuntimeSpec(shares=max(2, milli * 1024 // 1000) if name == "main" else 2),
                    requests=Resources(cpu_milli=milli if name == "main" else 10),
                )
                for place, (name, kind) in enumerate(names)
            ),
        )


def measure(cpus: int, pods: int, config: PoliciesConfig = CONFIG, rounds: int = 15) -> dict[str, object]:
    """Medians in milliseconds of CPU time; memory is the peak of one plan on top of the view, in MiB."""
    return times(node(machine(cpus), pods), config, rounds)


def times(view: NodeView, config: PoliciesConfig = CONFIG, rounds: int = 15) -> dict[str, object]:
    """The same of any view."""
    first = _time(lambda: plan(view, None, config), max(3, rounds // 3))
    before = plan_node(view, None, config)
    again = _time(lambda: plan(view, before, config), rounds)
    newcomer = replace(view.pods[min(view.pods)], uid="ffffffff-0000-4000-8000-000000000000")
    more = replace(view, pods={**view.pods, newcomer.uid: newcomer})
    value = _time(lambda: plan_pod(newcomer, more, plan_node(more, before, config), config), rounds)
    gc.collect()
    tracemalloc.start()
    desired = plan(view, before, config)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "cpus": len(view.topology.online),
        "pods": len(view.pods),
        "settings": len(desired.settings),
        "first_ms": first,
        "again_ms": again,
        "one_pod_comes_ms": value,
        "kept_mib": round(kept / 2**20, 2),
        "peak_mib": round(peak / 2**20, 2),
    }


def large(view: NodeView) -> NodeView:
    """The same node where every dedicated container requests 1 to 40 CPUs."""
    return _requesting(view, lambda place: (1 + 7 * place % 40, CpuPreferences()))


def exclusive(view: NodeView) -> NodeView:
    """The same node where one dedicated container more than there are nodes requests a node of its own."""
    alone = CpuPreferences(numa_binding=True, numa_exclusive=True)
    nodes = len(view.topology.nodes())
    return _requesting(view, lambda place: (1, alone if place <= nodes else CpuPreferences()))


def _requesting(view: NodeView, wanted: Callable[[int], tuple[int, CpuPreferences]]) -> NodeView:
    pods = dict(view.pods)
    for place, pod in enumerate([pod for pod in view.pods.values() if pod.pod_class is PodClass.DEDICATED]):
        cpus, wish = wanted(place)
        requests = Resources(cpu_milli=1000 * cpus)
        main = [replace(one, requests=requests) if one.name == "main" else one for one in pod.containers]
        pods[pod.uid] = replace(pod, wish=wish, containers=tuple(main))
    return replace(view, pods=pods)


def _time(work: "object", rounds: int) -> float:
    assert callable(work)
    times = []
    for _ in range(rounds):
        gc.collect()
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return round(statistics.median(times) * 1000, 2)


def run() -> dict[str, object]:
    """The issue's size, the same with separate pools, and the growth along both axes."""
    return {
        "plan": measure(256, 500),
        "separate": measure(256, 500, SEPARATE),
        "large": times(large(node(machine(256), 500))),
        "exclusive": times(exclusive(node(machine(256), 500))),
        "growth_pods": [measure(256, pods) for pods in (125, 250, 500, 1000)],
        "growth_cpus": [measure(cpus, 500) for cpus in (64, 128, 256, 512, 1024)],
    }
