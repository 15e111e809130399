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
    """Where interrupts may be delivered: on none of the CPUs to ``avoid``; those that have no other, on ``free``.

    Without CPUs to avoid they have their own places. ``dry_run``: count what would be moved, change nothing.
    """

    avoid: CpuSet = EMPTY
    free: CpuSet = EMPTY
    dry_run: bool = False


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
    """Where the kernel's files contradict the record of exclusive CPUs of one container.

    ``record``: the CPUs of the kubelet's checkpoint, or of bypassd's own choice; ``kernel``: those of the group that
    has the container's processes. ``shared``: those of ``record`` that are in other containers' CPU sets, too;
    ``beside``: these containers, as text.
    """

    record: CpuSet
    kernel: CpuSet
    shared: CpuSet = EMPTY
    beside: tuple[str, ...] = ()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the container may run on CPUs that are not its own."""
        return not self.kernel <= self.record


class CpuPreferences(Struct, frozen=True, kw_only=True):
    """A pod's CPU preferences from its annotations. None, empty and False: not set.

    ``pool`` is Katalyst's ``cpuset_pool``. ``nodes`` are NUMA nodes of a decision (a scheduler's result) or that the
    pod names; ``node_count`` on how many it wants CPUs, as many on each. ``cpus`` is a scheduler's own choice of CPUs.
    ``full_cores``, ``distribute`` and ``align_socket`` are the kubelet's full-pcpus-only, distribute-cpus-across-numa
    and align-by-socket for this pod only. ``spread_cores``: every CPU on a core of its own, instead of whole cores;
    ``strict_cores``: one of the two was required, so a message reports when it is impossible. ``apart``: see
    `AntiAffinity`. ``numa_share`` False: no other pod is to be bound to its nodes, if it is bound itself. ``lends``:
    whether BE may use its own CPUs where the config lets it at all; False refuses. ``burst_percent`` is of the quota, 0
    switches bursts off; ``burst_us`` instead of it is an amount in one period. ``quota_burst_percent``: how far a quota
    may be raised, of the limit (100 is the limit itself), for at most ``quota_burst_s`` seconds at full use (-1: for
    ever). ``main``: the container on whose CPUs the side-cars without CPUs of their own run.
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
    spread_cores: bool | None = None
    strict_cores: bool = False
    apart: AntiAffinity | None = None
    numa_share: bool | None = None
    lends: bool | None = None
    topology_policy: TopologyPolicy | None = None
    burst_policy: BurstLimit | None = None
    burst_percent: int | None = None
    burst_us: int | None = None
    quota_burst_percent: int | None = None
    quota_burst_s: int | None = None
    main: str | None = None


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
    """One group's CPU over the last sampling interval. Units: thousandths of a CPU; seconds.

    ``throttled``: the share of its CFS periods in which it was throttled, 0.0-1.0; ``throttled_milli``: the CPU time
    that this withheld, as a rate; None where the group has no quota or the kernel does not report it. ``age_s`` is of
    the newest reading, and an old one is unknown, never good. ``peak_milli``: the fading peak of its use, and
    ``known_s``: for how long its use has been known (None: since before the agent started, or not kept), both by
    `reconciler.placement.estimate`.
    """

    cpu_milli: int
    throttled: float | None = None
    throttled_milli: int | None = None
    interval_s: float = 1.0
    age_s: float = 0.0
    peak_milli: float | None = None
    known_s: float | None = None


class Measured(Struct, frozen=True, kw_only=True):
    """One measured number, and how old it is (s)."""

    value: float
    age_s: float = 0.0


class PodIndicators(Struct, frozen=True, kw_only=True):
    """What the size of a pool may follow of one pod besides its CPU use. None: not measured, or not certain.

    ``wait_milli``: tasks that waited in the run queue, on average, in thousandths, without those that the pod's own
    quotas stopped. ``cpi``: cycles per instruction. ``use_milli``: its CPU use of the same interval as its waiting.
    """

    wait_milli: Measured | None = None
    cpi: Measured | None = None
    use_milli: Measured | None = None


class PodIsolation(Struct, frozen=True, kw_only=True):
    """State of an online pod with many runnable threads (`reconciler.placement.isolation`).

    ``hits``: samples above the limits in a row, and ``hit_at`` the time of the last one; ``isolated``: enough of them;
    ``calm_since``: since when an isolated pod has had none (None: it has). Times are on the view's clock.
    """

    hits: int = 0
    hit_at: float = 0.0
    isolated: bool = False
    calm_since: float | None = None


class KernelScheduler(Struct, frozen=True, kw_only=True):
    """What a kernel's fair scheduler does with an idle class, where that differs by version.

    ``threads_yield``: SCHED_IDLE of a thread is heeded beyond the thread's own group (until Linux 6.5). ``eevdf``: the
    next task is chosen by lag and deadline (from 6.6 on). Neither is known where both are False. ``runner_keeps``: a
    group with a small weight may have no CPU for seconds (`cgroupfs.scheduling.runner_keeps_cpu`).
    """

    threads_yield: bool = True
    eevdf: bool = False
    runner_keeps: bool = False


class HarmReading(Struct, frozen=True, kw_only=True):
    """The state of the harm law (`reconciler.policies.harm`) as the planner needs it; None in its place: not measured.

    ``ceiling_milli``: what BE work may use; ``unknown_since``: since when nothing is known of online pods' waiting.
    Of the last cut: ``uid`` of the online pod (or a host workload's subject), the percentage that it waited and what it
    waits without BE work.
    ``comparing``: BE work is at its minimum to learn that.
    """

    ceiling_milli: int
    unknown_since: float | None = None
    cuts: int = 0
    uid: str | None = None
    waits_percent: float = 0.0
    own_percent: float = 0.0
    comparing: bool = False


class HarmTerms(Struct, frozen=True, kw_only=True):
    """What the harm law works with. ``cpus``: those that BE work may use; ``in_force``: it decides the BE budget.

    ``grain_milli``: its ceilings are multiples of it: whole CPUs, where a cut takes these.
    """

    cpus: CpuSet
    top_milli: int
    floor_milli: int
    grain_milli: int = 1
    in_force: bool = False


class StartPlan(Struct, frozen=True, kw_only=True):
    """BE pods' CPU weights, and the start allowance with the state of its bounds (`policies.start_allowance`).

    ``even``: no online pod is in the besteffort directory. ``pods``: uids of those that start or end with the
    allowance; ``raised``: those of them whose directory has the highest weight. ``floor_milli``: the CPU that BE work
    has at least for that, 0 for none.

    On the view's clock: ``created`` and ``executed``, since when containers are in creation, and in the moment of the
    exec; ``ending``, since when pods are being deleted; ``due``, when this ends or changes by itself. ``spent_s``:
    tokens spent at ``at``.
    """

    even: bool = True
    pods: frozenset[str] = frozenset()
    raised: frozenset[str] = frozenset()
    floor_milli: int = 0
    created: Mapping[str, float] = {}
    executed: Mapping[str, float] = {}
    ending: Mapping[str, float] = {}
    due: float | None = None
    spent_s: float = 0.0
    at: float = 0.0


class PoolSize(Struct, frozen=True, kw_only=True):
    """Planned size of an online pool and the reason; state of the step limits.

    ``wanted_milli``: demand as estimated (thousandths of a CPU); ``cpus``: the size after limits and sharing;
    ``asked_cpus``: the size after limits, before sharing with others (0: the same); ``changed_at``, ``shrunk_at``: on
    the view's clock. ``small_cpus``: the last size that turned out too small under the pid policy (0: none), and
    ``small_milli``: what the pods used then.
    """

    wanted_milli: int
    cpus: int
    asked_cpus: int = 0
    changed_at: float = 0.0
    shrunk_at: float = 0.0
    small_cpus: int = 0
    small_milli: int = 0
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
    """What online pools will need, for the policies that take CPUs before them. Part of one plan only, never kept.

    ``own``: pods may have pools besides the default one; ``cpus``: by pool, a size that does not follow from its pods'
    requests; ``leave``: CPUs of BE work's own.
    """

    own: bool = True
    cpus: Mapping[str, int] = {}
    leave: int = 0


Uses = Mapping[str, GroupUse]
"""By group path."""
