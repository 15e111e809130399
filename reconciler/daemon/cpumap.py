"""The node's CPUs for a picture: where each is, the pools that have it, and how busy it is."""

from collections.abc import Iterator

from cgroupfs.cpuset import CpuSet
from reconciler.daemon.agent import Agent


def cpu_rows(agent: Agent) -> Iterator[dict[str, object]]:
    """One row for each online CPU, by socket, node, cache and core.

    ``pools``: as in the document's ``pools``, but ``dedicated`` for all containers' own CPUs, the strictest first;
    ``pods``: uids of the pods whose own it is. ``busy_percent``: of the last second; null: unknown.
    """
    topology, cpu = agent.control.inventory.readings.topology, agent.control.inventory.readings.cpu
    sets, owners = _pools(agent)
    idle = cpu.idle if cpu is not None else {}
    for item in sorted(topology.cpus, key=lambda cpu: (cpu.socket, cpu.node, cpu.l3, cpu.core, cpu.thread)):
        known = idle.get(item.id)
        yield {
            "cpu": item.id,
            "socket": item.socket,
            "node": item.node,
            "l3": item.l3,
            "core": item.core,
            "thread": item.thread,
            "kind": item.kind.value,
            "isolated": item.id in topology.isolated,
            "pools": [name for name, cpus in sets if item.id in cpus],
            "pods": [uid for uid, cpus in owners if item.id in cpus],
            "busy_percent": None if known is None else round(100 * (1 - known)),
        }


def _pools(agent: Agent) -> tuple[list[tuple[str, CpuSet]], list[tuple[str, CpuSet]]]:
    pools = agent.control.reconciler.pools
    if pools is None:
        return [], []
    owners = [(owner.partition("/")[0], cpus) for owner, cpus in sorted(pools.dedicated.items())]
    sets = [
        ("reserved", pools.reserved),
        ("interrupt", pools.interrupt),
        ("dedicated", pools.dedicated_cpus),
        *sorted(pools.named.items()),
        ("shared", pools.shared),
        ("reclaimed", pools.reclaimed),
    ]
    return sets, owners
