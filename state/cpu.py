"""What pods ask of CPU placement beside their requests, how they use the CPU, and how large the online pools are.

Values only; `reconciler.wishes` reads the annotations, `reconciler.signals` the counters, the policies decide.
"""

from collections.abc import Mapping

from msgspec import Struct

from cgroupfs.cpuset import CpuSet

SHARED_POOL = "share"
"""Katalyst's name of the pool of online pods that name none."""


class CpuWish(Struct, frozen=True, kw_only=True):
    """What a pod's annotations ask of its CPUs. None, empty and False: it does not say.

    ``pool`` is Katalyst's ``cpuset_pool``. ``nodes`` are NUMA nodes that somebody has decided already (a scheduler's
    result) or that the pod names; ``node_count`` how many it wants. ``cpus`` is a scheduler's own choice of CPUs.
    ``full_cores``, ``distribute`` and ``align_socket`` are the kubelet's full-pcpus-only, distribute-cpus-across-numa
    and align-by-socket for this pod alone. ``burst_percent`` is of the quota, 0 switches bursts off.
    """

    pool: str | None = None
    numa_binding: bool = False
    numa_exclusive: bool = False
    nodes: tuple[int, ...] = ()
    node_count: int | None = None
    cpus: CpuSet | None = None
    full_cores: bool | None = None
    distribute: bool | None = None
    align_socket: bool | None = None
    burst_percent: int | None = None
    burst_policy: str | None = None


class GroupUse(Struct, frozen=True, kw_only=True):
    """One group's CPU over the last sampling interval. Units: thousandths of a CPU; seconds.

    ``throttled``: the share of its CFS periods in which it was throttled, 0.0-1.0; ``throttled_milli``: the CPU time it
    was kept from using by that, as a rate; None where the group has no quota or the kernel does not tell. ``age_s`` is
    of the newest reading, and an old one is unknown, never fine.
    """

    cpu_milli: int
    throttled: float | None = None
    throttled_milli: int | None = None
    interval_s: float = 1.0
    age_s: float = 0.0


class PoolSize(Struct, frozen=True, kw_only=True):
    """How many CPUs an online pool is to have and why; what the step limits need to know of the last time.

    ``wanted_milli``: demand as estimated (thousandths of a CPU); ``cpus``: what it became after limits and sharing;
    ``changed_at``, ``shrunk_at``: on the view's clock.
    """

    wanted_milli: int
    cpus: int
    changed_at: float = 0.0
    shrunk_at: float = 0.0
    reason: str = ""


Uses = Mapping[str, GroupUse]
"""By group path."""
