"""Groups directly below the root of the CPU hierarchy, besides the pods': the node's other daemons. Values only.

Units: weights as the kernel's file has them (cpu.shares on cgroup v1, cpu.weight on v2), thousandths of a CPU.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

HRTICK: Final = "HRTICK"
"""The scheduler's feature: the kernel's timer ends a turn when it is used up, and not the next tick."""
TURN_FILES: Final[tuple[Mapping[str, str], ...]] = (
    {
        "kernel.sched_latency_ns": "proc/sys/kernel/sched_latency_ns",
        "kernel.sched_min_granularity_ns": "proc/sys/kernel/sched_min_granularity_ns",
        "kernel.sched_wakeup_granularity_ns": "proc/sys/kernel/sched_wakeup_granularity_ns",
        "sched_features.HRTICK": "sys/kernel/debug/sched_features",
    },
    {
        "sched.latency_ns": "sys/kernel/debug/sched/latency_ns",
        "sched.min_granularity_ns": "sys/kernel/debug/sched/min_granularity_ns",
        "sched.wakeup_granularity_ns": "sys/kernel/debug/sched/wakeup_granularity_ns",
        "sched.features.HRTICK": "sys/kernel/debug/sched/features",
    },
    {
        "sched.base_slice_ns": "sys/kernel/debug/sched/base_slice_ns",
        "sched.features.HRTICK": "sys/kernel/debug/sched/features",
    },
)
"""The scheduler's files that decide how long a turn is, by their name in plans: of CFS until Linux 5.12, and from 5.13
to 6.5; of EEVDF from 6.6 on.
"""


class DaemonGroup(Struct, frozen=True, kw_only=True):
    """One group, as read last. None: not known."""

    weight: int | None = None
    original: int | None = None  # the weight without bypassd
    use_milli: int | None = None  # its CPU use over the last interval
    waits: float | None = None  # share of the time, 0.0-1.0, in which one of its tasks waited for a CPU
    # The weight by the law (`reconciler.policies.node_daemons`); None: it is not managed, or its need was not measured
    # over a whole window.
    wanted: int | None = None
    need_milli: int | None = None  # the largest use in that window


class DaemonRow(DaemonGroup, frozen=True, kw_only=True):
    """One group for people and metrics."""

    group: str
    credit_us: int | None = None  # CPU time that it may have at a wake-up before others


class Daemons(Struct, frozen=True, kw_only=True):
    """All of them, without the pods' group and bypassd's own."""

    groups: Mapping[str, DaemonGroup] = {}  # by path
    # By path: why a group that the configuration names is not among them, or cannot have a weight.
    refused: Mapping[str, str] = {}
    pods_weight: int | None = None  # of the group of all pods
    # The scheduler's period, half of which a group may be put back when it wakes up; None: this kernel shows none.
    latency_ns: int | None = None
    turns: Mapping[str, int] = {}  # `TURN_FILES` at the daemon's start; empty if not all of one row can be read
