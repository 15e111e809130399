"""Host workloads as plain values: of the state document's section ``agent``, and its view ``hostlist``."""

from collections.abc import Iterator
from typing import Final

from state.hosts import HostWorkload, HostWorkloads

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
