"""Which CPUs a pod may run on, as far as a view tells: what its containers have, else its pool. Pure."""

from cgroupfs.cpuset import EMPTY, CpuSet
from state.model import ContainerKind, NodeView, Pod, Pools


def pool_cpus(pools: Pools) -> dict[str, CpuSet]:
    """The pools that pods run in, by name; what containers own alone is one pool, ``dedicated``."""
    found = {"shared": pools.shared, "reclaimed": pools.reclaimed, "reserved": pools.reserved, **pools.named}
    if pools.interrupt:
        found["interrupt"] = pools.interrupt
    if pools.dedicated:
        found["dedicated"] = pools.dedicated_cpus
    return {name: cpus for name, cpus in found.items() if cpus}


def pod_cpus(pod: Pod, view: NodeView, pools: Pools | None) -> CpuSet:
    """Where its containers may run now; every online CPU when nothing tells."""
    seen = [
        value
        for container in pod.containers
        if container.kind is not ContainerKind.SANDBOX
        and isinstance(value := view.actual.get((container.group.path, "cpu.set")), CpuSet)
    ]
    cpus = CpuSet.union(seen) if seen else EMPTY
    if not cpus and pools is not None:
        if (name := pools.pool_of(pod)) == "dedicated":
            cpus = CpuSet.union(own for key, own in pools.dedicated.items() if key.startswith(f"{pod.uid}/"))
        elif name is not None:
            cpus = pool_cpus(pools).get(name, EMPTY)
    return cpus & view.topology.online or view.topology.online
