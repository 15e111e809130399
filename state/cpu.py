"""Pods' CPU placement preferences, their CPU use, and the sizes of online pools.

Values only; `reconciler.pods.cpu_annotations` reads the annotations, `reconciler.signals` the counters, the policies
decide.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet

SHARED_POOL = "share"
"""Katalyst's name of the pool of online pods that name none."""
CORE_SCHED: Final = "core_sched"
"""The policy that gives threads their core scheduling cookies."""
CORE_COOKIE: Final = "core.cookie"
"""The name of a container's cookie in ``explain`` and in holds; no control file's."""
THREAD_POLICY: Final = "thread.policy"
"""The name of the scheduling policy of a container's threads in ``explain`` and in holds; no control file's."""


INTERRUPTS: Final = "irq.affinity"
"""The name of the places of interrupts in holds and in the ledger; no control file's."""


class InterruptPlan(Struct, frozen=True, kw_only=True):
    """Where interrupts may be delivered. Without CPUs to avoid they have their own places."""

    avoid: CpuSet = EMPTY  # none of these
    free: CpuSet = EMPTY  # for those that could be delivered on CPUs to avoid only
    dry_run: bool = False  # count what would be moved, change nothing


class BurstLimit(StrEnum):
    """A pod's setting of bursts beyond its limit. Katalyst's words, then Koordinator's."""

    CLOSED = "closed"
    """None at all (closed; none)."""
    STATIC = "static"
    """The kernel's CFS burst only (static; cpuBurstOnly)."""
    QUOTA = "quota"
    """A raised quota while throttled only (cfsQuotaBurstOnly)."""
    AUTO = "auto"
    """Both (dynamic; auto)."""


class AntiAffinity(StrEnum):
    """Where a pod wants to be alone among the pods that want the same (Koordinator's exclusive policy)."""

    CORE = "core"
    NODE = "node"


class TopologyPolicy(StrEnum):
    """How strictly NUMA hints are merged: the kubelet's four policies and Katalyst's numeric."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"
    NUMERIC = "numeric"


class OwnerCpus(Struct, frozen=True, kw_only=True):
    """Where the kernel's files contradict the record of exclusive CPUs of one container."""

    record: CpuSet  # the kubelet's checkpoint, or bypassd's own choice
    kernel: CpuSet  # of the group that has the container's processes
    shared: CpuSet = EMPTY  # those of the record that are in other containers' CPU sets, too
    beside: tuple[str, ...] = ()  # these containers, as text

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the container may run on CPUs that are not its own."""
        return not self.kernel <= self.record


class CpuPreferences(Struct, frozen=True, kw_only=True):
    """A pod's CPU preferences from its annotations. None, empty and False: not set."""

    pool: str | None = None  # Katalyst's cpuset_pool
    numa_binding: bool = False
    numa_exclusive: bool = False
    nodes: tuple[int, ...] = ()  # NUMA nodes of a decision (a scheduler's result), or that the pod names
    node_count: int | None = None  # on how many nodes it wants CPUs, as many on each
    cpus: CpuSet | None = None  # a scheduler's own choice
    # The kubelet's full-pcpus-only, distribute-cpus-across-numa and align-by-socket, for this pod only.
    full_cores: bool | None = None
    distribute: bool | None = None
    align_socket: bool | None = None
    spread_cores: bool | None = None  # every CPU on a core of its own, instead of whole cores
    strict_cores: bool = False  # one of the two was required, so a message reports when it is impossible
    apart: AntiAffinity | None = None
    numa_share: bool | None = None  # False: no other pod is to be bound to its nodes, if it is bound itself
    lends: bool | None = None  # False: BE may not use its own CPUs, even where the configuration allows it
    topology_policy: TopologyPolicy | None = None
    burst_policy: BurstLimit | None = None
    burst_percent: int | None = None  # of the quota; 0: no bursts
    burst_us: int | None = None  # instead of the percentage: an amount in one period
    quota_burst_percent: int | None = None  # how far a quota may be raised, of the limit (100: the limit itself)
    quota_burst_s: int | None = None  # for at most so many seconds at full use; -1: for ever
    main: str | None = None  # the container on whose CPUs the side-cars without CPUs of their own run


class CookieGroups(StrEnum):
    """Which pods may run on two threads of one core at the same time."""

    RECLAIMED = "reclaimed"
    """BE pods with each other, all other pods with each other."""
    CLASS = "class"
    """BE pods with each other, online pods with each other, the rest of the machine by itself."""
    POD = "pod"
    """BE pods with each other, each online pod and the rest of the machine by itself."""


class QuotaFloor(NamedTuple):
    """The least CPU quota that a group takes (thousandths of a CPU), and the group inside it that is the reason (v1).

    That group is a tenant's, made inside a container (docker, kind, systemd): the kernel refuses a quota above it whose
    ratio is smaller.
    """

    milli: int
    by: str


class GroupUse(Struct, frozen=True, kw_only=True):
    """One group's CPU over the last sampling interval. Units: thousandths of a CPU; seconds."""

    cpu_milli: int
    throttled: float | None = None  # share of its CFS periods in which it was throttled, 0.0-1.0
    # CPU time that this withheld, as a rate; None: it has no quota, or the kernel does not report it.
    throttled_milli: int | None = None
    interval_s: float = 1.0
    age_s: float = 0.0  # of the newest reading; an old one is unknown, never good
    peak_milli: float | None = None  # the fading peak of its use, by `reconciler.placement.estimate`
    # For how long its use has been known; None: since before the agent started, or not kept.
    known_s: float | None = None


class Measured(Struct, frozen=True, kw_only=True):
    """One measured number, and how old it is (s)."""

    value: float
    age_s: float = 0.0


class PodIndicators(Struct, frozen=True, kw_only=True):
    """What the size of a pool may follow of one pod besides its CPU use. None: not measured, or not certain."""

    # Average number of tasks that waited in the run queue, in thousandths, without those that the pod's own quotas
    # stopped.
    wait_milli: Measured | None = None
    cpi: Measured | None = None  # cycles per instruction
    use_milli: Measured | None = None  # its CPU use of the same interval as its waiting


class PodIsolation(Struct, frozen=True, kw_only=True):
    """State of an online pod with many runnable threads (`reconciler.placement.isolation`). Times: the view's clock."""

    hits: int = 0  # samples above the limits in a row
    hit_at: float = 0.0  # time of the last one
    isolated: bool = False  # there were enough of them
    calm_since: float | None = None  # since when an isolated pod has had none; None: it has


class KernelScheduler(Struct, frozen=True, kw_only=True):
    """What a kernel's fair scheduler does with an idle class. The first two both False: it is not known."""

    threads_yield: bool = True  # SCHED_IDLE of a thread counts beyond its own group (until Linux 6.5)
    eevdf: bool = False  # the next task is chosen by lag and deadline (from 6.6 on)
    # A group with a small weight may have no CPU for seconds (`cgroupfs.scheduling.runner_keeps_cpu`).
    runner_keeps: bool = False


class HarmReading(Struct, frozen=True, kw_only=True):
    """The state of the harm law (`reconciler.policies.harm`) as the planner needs it."""

    ceiling_milli: int  # what BE work may use
    unknown_since: float | None = None  # since when nothing is known of online pods' waiting
    cuts: int = 0
    grown: bool = False  # since the last cut
    uid: str | None = None  # of the last cut, as the next two: the online pod, or a host workload's subject
    waits_percent: float = 0.0  # of its time, that it waited
    own_percent: float = 0.0  # what it waits without BE work
    comparing: bool = False  # BE work is at its minimum to learn that


class HarmTerms(Struct, frozen=True, kw_only=True):
    """What the harm law works with."""

    cpus: CpuSet  # that BE work may use
    top_milli: int
    floor_milli: int
    grain_milli: int = 1  # its ceilings are multiples of it: whole CPUs, where a cut takes these
    in_force: bool = False  # it decides the BE budget


class StartPlan(Struct, frozen=True, kw_only=True):
    """BE pods' CPU weights, and the start allowance with its bounds (`reconciler.policies.start_allowance`).

    Times are on the view's clock.
    """

    even: bool = True  # no online pod is in the besteffort directory
    pods: frozenset[str] = frozenset()  # uids of those that start or end with the allowance
    raised: frozenset[str] = frozenset()  # those of them whose directory has the highest weight
    floor_milli: int = 0  # the CPU that BE work has at least for that; 0: none
    created: Mapping[str, float] = {}  # since when containers are in creation
    executed: Mapping[str, float] = {}  # since when they are in the moment of the exec
    ending: Mapping[str, float] = {}  # since when pods are being deleted
    due: float | None = None  # when this ends or changes by itself
    spent_s: float = 0.0  # tokens spent at the time below
    at: float = 0.0


class PoolSize(Struct, frozen=True, kw_only=True):
    """Planned size of an online pool and the reason; state of the step limits. Times are on the view's clock."""

    wanted_milli: int  # demand as estimated (thousandths of a CPU)
    cpus: int  # the size after limits and sharing
    asked_cpus: int = 0  # the size after limits, before sharing with others; 0: the same
    changed_at: float = 0.0
    shrunk_at: float = 0.0
    small_cpus: int = 0  # the last size that turned out too small under the pid policy; 0: none
    small_milli: int = 0  # what the pods used then
    reason: str = ""

    @property
    def asked(self) -> int:
        """CPUs that it asks for, whatever it has."""
        return self.asked_cpus or self.cpus

    @property
    def cut(self) -> bool:
        """Whether it has less than it asks for, because the pools do not all fit."""
        return self.cpus < self.asked_cpus


class PoolTerms(Struct, frozen=True, kw_only=True):
    """What online pools will need, for the policies that take CPUs before them. Part of one plan only, never kept."""

    own: bool = True  # pods may have pools besides the default one
    cpus: Mapping[str, int] = {}  # by pool, a size that does not follow from its pods' requests
    leave: int = 0  # CPUs of BE work's own


Uses = Mapping[str, GroupUse]
"""By group path."""
