"""How much a new plan moves: CPUs that change pools, and pools that change. The measure of packers.

A v1 ``cpuset.cpus`` write costs time in proportion to all cpusets of the machine, and a task that has to leave its CPU
loses its caches: so movement is counted, shown as a metric, and kept small by `reconciler.placement.pack`.
"""

from collections.abc import Mapping

from msgspec import Struct

from cgroupfs.cpuset import CpuSet
from state.model import Pools


class CpuChurn(Struct, frozen=True, kw_only=True):
    """``cpus``: CPUs that belong to other pools than before; ``pools_changed``: pools with different CPUs."""

    cpus: int = 0
    pools_changed: int = 0


NONE = CpuChurn()


def moved(before: Pools | None, after: Pools) -> CpuChurn:
    """The difference between two plans. A CPU that is set on- or offline counts: its work has to move."""
    if before is None:
        return NONE  # the earlier owners are unknown
    old, new = by_pool(before), by_pool(after)
    union = changed = 0
    for name in old.keys() | new.keys():
        mask = (old[name].mask if name in old else 0) ^ (new[name].mask if name in new else 0)
        union |= mask  # a CPU of two pools (BE work beside online pods) counts once
        changed += mask != 0
    return CpuChurn(cpus=union.bit_count(), pools_changed=changed)


def by_pool(pools: Pools) -> Mapping[str, CpuSet]:
    """The CPUs of every pool: the fixed ones by name, dedicated ones as ``dedicated/UID/CONTAINER``, others by key."""
    return {
        "reserved": pools.reserved,
        "interrupt": pools.interrupt,
        "shared": pools.shared,
        "reclaimed": pools.reclaimed,
        **{f"dedicated/{key}": cpus for key, cpus in pools.dedicated.items()},
        **pools.named,
    }
