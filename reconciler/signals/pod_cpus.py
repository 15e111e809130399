"""The CPUs that a pod may run on, as far as a view has them: its containers' sets, else its pool. Pure."""

from cgroupfs.cpuset import EMPTY, CpuSet
from state.model import NodeView, Pod, Pools


def pool_cpus(pools: Pools) -> dict[str, CpuSet]:
    """The pools that pods run in, by name; what containers own is one pool, ``dedicated``."""
    cpu_sets = {"shared": pools.shared, "reclaimed": pools.reclaimed, "reserved": pools.reserved, **pools.named}
    if pools.interrupt:
        cpu_sets["interrupt"] = pools.interrupt
    if pools.dedicated:
        cpu_sets["dedicated"] = pools.dedicated_cpus
    return {name: cpus for name, cpus in cpu_sets.items() if cpus}


def own_cpus(uid: str, pools: Pools) -> CpuSet:
    """The CPUs that a pod's containers own."""
    return CpuSet.union(cpus for key, cpus in pools.dedicated.items() if key.startswith(f"{uid}/"))


def pod_cpus(pod: Pod, view: NodeView, pools: Pools | None) -> CpuSet:
    """The CPUs of its containers, if each was read; every CPU that pods can have when nothing is known.

    Its sandbox does not count: it always sleeps, and its CPUs are not read.
    """
    working = pod.workload
    seen = [
        value
        for container in working
        if isinstance(value := view.actual.get((container.group.path, "cpu.set")), CpuSet) and value
    ]
    cpus = CpuSet.union(seen) if len(seen) == len(working) else EMPTY
    if not cpus and pools is not None:
        if (name := pools.pool_of(pod)) == "dedicated":
            cpus = own_cpus(pod.uid, pools)
        elif name is not None:
            cpus = pool_cpus(pools).get(name, EMPTY)
    return cpus & view.cpus or view.cpus
