"""Views of the state document: the node's CPUs with their pools and use, and the host workloads."""

from collections.abc import Iterator
from typing import Final

from cgroupfs.cpuset import CpuSet
from reconciler.daemon.agent import Agent
from state.hosts import HostWorkload, HostWorkloads
from state.model import Pools


def cpu_rows(agent: Agent) -> Iterator[dict[str, object]]:
    """One row for each online CPU, by socket, node, cache and core.

    ``pools``: as in the document's ``pools``, but ``dedicated`` for all containers' own CPUs, the strictest first;
    ``pods``: uids of the pods whose own it is. ``busy_percent``: of the last second; null: unknown.
    """
    topology, cpu = agent.control.inventory.readings.topology, agent.control.inventory.readings.cpu
    pools = agent.control.reconciler.pools
    sets = pool_sets(pools) if pools is not None else {}
    owners = sorted(pools.dedicated.items()) if pools is not None else []
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
            "pools": [name for name, cpus in sets.items() if item.id in cpus],
            "pods": [owner.partition("/")[0] for owner, cpus in owners if item.id in cpus],
            "busy_percent": None if known is None else round(100 * (1 - known)),
        }


def pool_sets(pools: Pools) -> dict[str, CpuSet]:
    """The pools by name, the strictest first; that of interrupts only where there is one."""
    return {
        "reserved": pools.reserved,
        **({"interrupt": pools.interrupt} if pools.interrupt else {}),
        "dedicated": pools.dedicated_cpus,
        **dict(sorted(pools.named.items())),
        "shared": pools.shared,
        "reclaimed": pools.reclaimed,
    }


_GROUPS: Final = 8
"""Paths of one entry that are listed."""
_VALUES: Final = {
    "use_milli": "cpu.use",
    "wait_milli": "cpu.wait_milli",
    "wait_percent": "cpu.wait",
    "throttled_percent": "cpu.throttled",
    "cpu_pressure_percent": "cpu.pressure",
    "memory_pressure_percent": "memory.pressure",
    "io_pressure_percent": "io.pressure",
    "memory_bytes": "memory.use",
    "disk_read_bps": "disk.read",
    "disk_write_bps": "disk.write",
}


def host_rows(hosts: HostWorkloads, now: float) -> Iterator[dict[str, object]]:
    """One row for each entry, in the order of names. ``now``: the monotonic clock."""
    for _, host in sorted(hosts.entries.items()):
        yield _row(host, max(0.0, now - hosts.at_s))


def _row(host: HostWorkload, age_s: float) -> dict[str, object]:
    return {
        "name": host.name,
        "counts_as": host.counts_as.value,
        "match": host.match,
        "groups": list(host.groups[:_GROUPS]),
        "matched": host.matched,
        "read": len(host.groups),
        "processes": host.processes,
        "cpus": str(host.cpus) if host.cpus else None,
        "age_s": round(age_s, 1),
        "problem": host.problem,
        **{key: None if (value := host.value(name)) is None else round(value, 3) for key, name in _VALUES.items()},
    }
