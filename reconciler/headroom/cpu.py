"""CPU headroom: the CPU time allocatable to BE pods, per NUMA node; and the settings of all headroom.

Pure. The headroom is for all BE pods together and includes their present use: the size of the extended resource, not
the unused part of it. `update` makes one reading, `reconciler.headroom.smoothing` the headroom of many: up in steps,
down at once, nothing on an unknown. `reconciler.headroom.memory` has the memory headroom.

Units: thousandths of a CPU; times are seconds on the view's clock.
Source: Katalyst's CPU headroom (idle time on the reclaimed CPUs and what BE uses there; smallest and largest step).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from cgroupfs.cpuset import CpuSet
from reconciler.headroom.smoothing import SmoothedReading, SmoothingConfig
from reconciler.runtime.format import cpu
from state.model import NodeCpu, Pools
from state.topology import Topology

_CPU: Final = 1000


class ClusterTarget(StrEnum):
    """Where the headroom is published. ``AUTO``: the first control plane whose object exists for this node."""

    OFF = "off"
    AUTO = "auto"
    KOORDINATOR = "koordinator"
    KATALYST = "katalyst"
    NODE = "node"


class HeadroomLaw(StrEnum):
    """What bounds the headroom. ``RECENT``: what the last window has left. ``HISTOGRAM``: also predicted peaks."""

    RECENT = "recent"
    HISTOGRAM = "histogram"


WORKLOAD_LABELS: Final = frozenset(
    {
        "pod-template-hash",
        "statefulset.kubernetes.io/pod-name",
        "controller-revision-hash",
        "pod-template-generation",
        "job-name",
        "batch.kubernetes.io/job-name",
    }
)
"""Labels by which the law of peaks finds a pod's workload (`reconciler.headroom.peaks.workload_of`)."""


class MemoryHeadroomConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that the scheduler may allocate to BE pods."""

    reserve_percent: Annotated[int, Meta(ge=0, le=90, description="share of the pods' memory never offered to BE")] = 10
    reserve_bytes: Annotated[int, Meta(ge=0, le=1 << 50, description="the same in bytes; the larger applies")] = 0

    # Katalyst's: smaller increases change no placement.
    min_step_bytes: ClassVar[int] = 300 << 20
    # Katalyst's; decreases are not limited.
    max_step_bytes: ClassVar[int] = 5 << 30

    # Kept free for the growth of all other work, of its use, as Katalyst's: that counts 1.1 times.
    growth_percent: ClassVar[int] = 10


class HeadroomConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU and memory that the scheduler may allocate to BE pods."""

    law: Annotated[
        HeadroomLaw,
        Meta(
            description="`recent`: the mean of what was left in the last `window_s`; `histogram`: at most what the "
            "predicted peaks of online workloads leave"
        ),
    ] = HeadroomLaw.RECENT
    window_s: Annotated[float, Meta(ge=1, le=86400, description="window of the mean; at least 30s")] = 120.0
    file: Annotated[
        str | None, Meta(description="JSON file for an overcommit reporter; null: none", extra={"path": True})
    ] = None
    publish: Annotated[
        ClusterTarget,
        Meta(
            description="where the cluster gets the headroom: NodeMetric, CustomNodeResource, the node's own status; "
            "auto: the first that exists"
        ),
    ] = ClusterTarget.OFF
    memory: MemoryHeadroomConfig = MemoryHeadroomConfig()

    # Three readings of one second.
    stale_after_s: ClassVar[float] = 3.0
    # Katalyst's: pods are not lost for a restart of the agent.
    unknown_hold_s: ClassVar[float] = 240.0
    # As often as a scheduler reads it; each change is a write of the node's object.
    report_s: ClassVar[float] = 30.0
    # A smaller rise lets no further pod fit, and is a write of the node's object.
    min_step_milli: ClassVar[int] = 300
    # A batch scheduler fills what is offered within one report; falls are not limited.
    max_step_milli: ClassVar[int] = 4000

    @property
    def smoothing(self) -> SmoothingConfig:
        """Of CPU."""
        return SmoothingConfig(
            report_s=self.report_s,
            window_s=self.window_s,
            least=self.min_step_milli,
            most=self.max_step_milli,
            hold_s=self.unknown_hold_s,
            what="CPU use",
            most_words=cpu(self.max_step_milli),
        )


class HeadroomSample(SmoothedReading, frozen=True, kw_only=True):
    """One reading, by NUMA node. ``cpus``: where BE may run. ``budget``: what BE may use on all of them now."""

    cpus: Mapping[int, CpuSet]


def update(pools: Pools, topology: Topology, cpu: NodeCpu | None, config: HeadroomConfig) -> HeadroomSample:
    """One reading of the CPUs where BE may run: idle time, and BE work's use there.

    No floor raises the result (Katalyst: 4 CPUs on a full node), and no other resource's shortage makes it 0.
    """
    allowed = pools.reclaimed if pools.confined else pools.shared | pools.reclaimed
    # Each node by its own measurement. Katalyst gives nodes without bound pods an equal part of the sum.
    cpus = {node: topology.node_cpus(node) & allowed for node in topology.nodes()}
    fresh = cpu is not None and cpu.age_s is not None and cpu.age_s <= config.stale_after_s
    tops = {node: _CPU * len(cpu_set) for node, cpu_set in cpus.items()}
    if cpu is None or not fresh:
        return HeadroomSample(cpus=cpus, tops=tops, supply=None, budget=pools.budget_milli)
    idle: dict[int, int] = {}
    busy: dict[int, int] = {}
    for node, cpu_set in cpus.items():
        # A CPU whose idle time is unknown gives nothing.
        known = [min(1.0, max(0.0, cpu.idle[number])) for number in cpu_set if number in cpu.idle]
        idle[node] = int(sum(known) * _CPU)
        busy[node] = len(known) * _CPU - idle[node]
    all_busy = sum(busy.values())
    # BE use is measured for the whole machine only: split over the nodes as their busy time, and never more than that.
    used = min(max(0, cpu.reclaimed_milli), all_busy)
    supply = {node: idle[node] + (used * busy[node] // all_busy if all_busy else 0) for node in sorted(cpus)}
    return HeadroomSample(cpus=cpus, tops=tops, supply=supply, budget=pools.budget_milli)
