"""The common values: pods, the kubelet's allocations, signals, the NodeView, settings, pools.

All are frozen. Sources produce the parts, `reconciler.pods.assemble` assembles them, policies read them and return
settings; no value is changed in place. Times are seconds on the monotonic clock unless a name implies otherwise.

Longer than other modules because it is one vocabulary: each value here is made of the ones above it.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Final

from msgspec import Struct

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from state.cpu import (
    CpuPreferences,
    GroupUse,
    HarmReading,
    HarmTerms,
    KernelScheduler,
    OwnerCpus,
    PodIndicators,
    PodIsolation,
    PoolSize,
    PoolTerms,
    QuotaFloor,
)
from state.daemons import Daemons
from state.disk import Disk, DiskPreference
from state.measures import Restrictions
from state.memory import MemoryPreferences, NodeMemoryReading
from state.topology import Topology


class PodClass(StrEnum):
    """How bypassd treats a pod (design: Katalyst's four classes in one word each)."""

    SYSTEM = "system"
    DEDICATED = "dedicated"
    SHARED = "shared"
    RECLAIMED = "reclaimed"

    @property
    def online(self) -> bool:
        """True for every class whose latency is protected."""
        return self is not PodClass.RECLAIMED


class ContainerKind(StrEnum):
    """The kind of container in a directory; the path does not show it (UNKNOWN)."""

    SANDBOX = "sandbox"
    INIT = "init"
    APP = "app"
    EPHEMERAL = "ephemeral"  # added to a running pod for debugging: without requests and limits, in no sum of them
    UNKNOWN = "unknown"


class Phase(StrEnum):
    """How far the runtime is with a container. Writes before SETTLED are lost (runc overwrites them)."""

    CREATING = "creating"
    SETTLED = "settled"


class Resources(Struct, frozen=True, kw_only=True):
    """Requests or limits of a container or pod; None is "not set". Units: thousandths of a CPU, bytes."""

    cpu_milli: int | None = None
    memory_bytes: int | None = None
    batch_cpu_milli: int | None = None
    batch_memory_bytes: int | None = None
    mid: bool = False  # the batch amounts are Koordinator's mid-tier resources, which online pods have, too
    # Only the pod's annotation requests these under the batch names: no scheduler has counted them
    # (`reconciler.policies.base.pod_asks`).
    claimed_cpu_milli: int | None = None
    claimed_memory_bytes: int | None = None

    @property
    def be_cpu_milli(self) -> int | None:
        """The CPU request of one container's BE work: under the names for BE work, else under the plain ones."""
        return self.cpu_milli if self.batch_cpu_milli is None else self.batch_cpu_milli

    def counted_cpu(self, most: int) -> int | None:
        """The same as a scheduler has counted it: at most what pods can have (thousandths of a CPU)."""
        milli = self.be_cpu_milli
        return None if milli is None else min(milli, most)

    @property
    def be_memory_bytes(self) -> int | None:
        return self.memory_bytes if self.batch_memory_bytes is None else self.batch_memory_bytes


class RuntimeSpec(Struct, frozen=True, kw_only=True):
    """Values that the runtime got for one container: config.json at creation, runc's state.json afterwards.

    None means that the spec does not name the value, so runc leaves the kernel's default (or copies the parent's
    cpuset). This is the value to restore to. Units: CPU lists, kernel shares, microseconds, bytes (-1 unlimited).
    """

    cpus: str | None = None
    mems: str | None = None
    shares: int | None = None
    quota_us: int | None = None
    period_us: int | None = None
    memory_bytes: int | None = None
    swap_bytes: int | None = None
    pids: int | None = None
    oom_kill_disable: bool = False


class GroupRef(Struct, frozen=True, kw_only=True):
    """One cgroup: its path below every controller's mount, and the inode, by which a later namesake differs."""

    path: str  # starts with /
    inode: int = 0  # of the directory in the trigger hierarchy (cpuset on v1); 0: unknown


class Resize(Struct, frozen=True, kw_only=True):
    """One source's report of a container's in-place resize; None: not reported.

    Only CPU and memory are meaningful in here.
    """

    requests: Resources | None = None  # admitted by the kubelet, as the limits
    limits: Resources | None = None
    actual_requests: Resources | None = None  # the runtime's, as the limits
    actual_limits: Resources | None = None
    state: str | None = None  # proposed, in progress, deferred or infeasible
    message: str = ""  # the kubelet's


class ContainerMeta(Struct, frozen=True, kw_only=True):
    """One container in a pod list, CRI or a manifest; ``requests`` and ``limits`` as in its spec."""

    name: str
    kind: ContainerKind = ContainerKind.APP
    id: str | None = None
    requests: Resources = Resources()
    limits: Resources = Resources()
    resize: Resize | None = None


class PodMeta(Struct, frozen=True, kw_only=True):
    """One source's report of one pod."""

    uid: str
    source: str
    namespace: str | None = None
    name: str | None = None
    # None, of this and of the annotations: not reported by this source; an empty map: the pod has none.
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    qos: QosClass | None = None
    priority_class: str | None = None
    priority: int | None = None
    owner: str | None = None
    ip: str | None = None
    static: bool = False
    deleting: bool = False
    """Its deletion was requested from the API server; the kubelet is ending it."""
    grace_s: float | None = None
    """Seconds between SIGTERM and SIGKILL; while it is being deleted, those of the deletion."""
    containers: tuple[ContainerMeta, ...] = ()
    overhead: Resources = Resources()
    """What its runtime needs besides the containers (``spec.overhead``, of a RuntimeClass)."""
    tolerates: tuple[str, ...] = ()
    """The effects of the taint of a closed node that do not keep it away (`state.closing`)."""
    sandbox_ids: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """What of this pod could not be used, as messages for a person; the rest is good."""


_SHARES_MIN: Final = 2
"""The kubelet's shares of a container without a CPU request (its MinShares)."""


class Container(Struct, frozen=True, kw_only=True):
    """One container directory that exists now."""

    id: str
    group: GroupRef
    kind: ContainerKind = ContainerKind.UNKNOWN
    phase: Phase = Phase.SETTLED
    name: str | None = None
    spec: RuntimeSpec | None = None
    requests: Resources = Resources()  # admitted by the kubelet, as the limits
    limits: Resources = Resources()
    resize: str | None = None  # for people: pending values of the spec, or missing ones of the runtime

    @property
    def request_milli(self) -> int | None:
        """Its CPU request in thousandths; if unreported, derived from its shares (1024 a CPU), None from the least."""
        if (milli := self.requests.cpu_milli) is not None:
            return milli
        shares = self.spec.shares if self.spec is not None else None
        if shares is None or shares <= _SHARES_MIN:
            return None
        # The kubelet rounds down when it turns thousandths into shares.
        return -(-shares * 1000 // 1024)


class LastClass(Struct, frozen=True, kw_only=True):
    """The class that a pod had when its labels and annotations were read, and its source."""

    pod_class: PodClass
    source: str


class Classification(Struct, frozen=True, kw_only=True):
    """A pod's class, its source, and the disagreements."""

    pod_class: PodClass
    source: str
    problems: tuple[str, ...] = ()  # messages for people
    # False: no source has reported labels and annotations yet. The class is that of the last time they were read, else
    # by the QoS; a later report may change it.
    certain: bool = True
    last: LastClass | None = None  # by the last reading, without operators' overrides; None: never read


_WITHOUT_SPEC = frozenset({"cri", "bundle", "cgroup"})


def has_spec(sources: str) -> bool:
    """Whether one of a pod's sources, joined by "+", has the pod's spec: requests, limits and priority."""
    return not _WITHOUT_SPEC.issuperset(sources.split("+"))


def sum_in_turn(amounts: Iterable[tuple[ContainerKind, int]]) -> int:
    """A pod's whole amount, by its containers in the spec's order: an init container ends before the next one starts.

    Sidecars before it run beside it. Source: Kubernetes documentation, "Sidecar Containers", resource sharing.
    """
    together = most = 0
    for kind, amount in amounts:
        if kind is ContainerKind.INIT:
            most = max(most, together + amount)
        else:
            together += amount
    return max(most, together)


class Pod(Struct, frozen=True, kw_only=True, dict=True):
    """One pod directory that exists now, with all that is known about it."""

    uid: str
    qos: QosClass
    group: GroupRef
    containers: tuple[Container, ...]
    classification: Classification
    namespace: str | None = None
    name: str | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    priority_class: str | None = None
    priority: int | None = None
    owner: str | None = None
    ip: str | None = None
    static: bool = False
    deleting: bool = False
    grace_s: float | None = None
    wish: CpuPreferences = CpuPreferences()
    memory: MemoryPreferences = MemoryPreferences()
    disks: tuple[DiskPreference, ...] = ()
    unobeyed: tuple[str, ...] = ()
    """Marks of a control plane's dialect that are known and have no effect here, each with what is nearest."""
    meta_source: str = "cgroup"
    """The sources that contributed, strongest first, joined by "+"."""
    sandbox: str | None = None
    """The runtime that runs the pod in a machine or kernel of its own: it is bounded at its directory, as a whole."""
    declared: tuple[ContainerMeta, ...] = ()
    """Of such a pod the containers of its spec, with their admitted resources: no group is theirs."""
    overhead: Resources = Resources()
    """Of such a pod what its runtime needs besides them."""
    tolerates: tuple[str, ...] = ()
    """As in `PodMeta`."""

    @cached_property
    def pod_class(self) -> PodClass:
        return self.classification.pod_class

    @property
    def spec_known(self) -> bool:
        """Whether its requests, limits and priority are known, none of them included."""
        return has_spec(self.meta_source)

    @property
    def title(self) -> str:
        """``namespace/name`` where known, else the uid: how a person finds it."""
        return f"{self.namespace}/{self.name}" if self.name else self.uid

    @cached_property
    def workload(self) -> tuple[Container, ...]:
        """Its containers, without the pause container."""
        return tuple(item for item in self.containers if item.kind is not ContainerKind.SANDBOX)

    @cached_property
    def request_milli(self) -> int:
        """Its request, in thousandths of a CPU: the sum of its app containers; 0 where it is unknown."""
        return sum(item.request_milli or 0 for item in self.members if item.kind is not ContainerKind.INIT)

    @cached_property
    def members(self) -> tuple[Container, ...]:
        """The containers that its resources are made of: all but the pause container.

        Of a pod in a machine or kernel of its own those of its spec, where that is known, in the pod's group: kata
        makes one group for all, gVisor one for each that no process is in.
        """
        if self.sandbox is None or not self.declared:
            return self.workload
        return tuple(
            Container(
                id=item.id or item.name,
                name=item.name,
                kind=item.kind,
                group=self.group,
                requests=item.requests,
                limits=item.limits,
            )
            for item in self.declared
        )

    def total(self, amount: Callable[[Container], int]) -> int:
        """What it has of something that its containers have, as scheduler and kubelet sum it up (`sum_in_turn`)."""
        members = self.members
        if self.sandbox is None or not self.declared:
            # In no order: what is there beside an init container are the sidecars before it.
            members = tuple(sorted(members, key=lambda item: item.kind is ContainerKind.INIT))
        return sum_in_turn((item.kind, amount(item)) for item in members)

    @property
    def paths(self) -> tuple[str, ...]:
        """Its groups: its own, and its containers'."""
        return self.group.path, *(container.group.path for container in self.containers)


class CpuPolicy(StrEnum):
    """The kubelet's CPU manager policy in its checkpoint."""

    NONE = "none"
    STATIC = "static"
    UNKNOWN = "unknown"


class KubeletView(Struct, frozen=True, kw_only=True):
    """The kubelet's allocations, cross-checked with the cgroups that exist."""

    policy: CpuPolicy = CpuPolicy.UNKNOWN
    default_cpus: CpuSet = EMPTY
    exclusive: Mapping[str, Mapping[str, CpuSet]] = {}  # pod uid -> container name -> CPUs
    # Pod uid -> container name -> resources admitted by the kubelet (in-place resize).
    granted: Mapping[str, Mapping[str, Resize]] = {}
    # uid/container -> NUMA nodes of its memory and devices, by the resource's name.
    affinity: Mapping[str, Mapping[str, CpuSet]] = {}
    reserved: CpuSet = EMPTY  # reservedSystemCPUs
    strict_reserved: bool = False
    # Period of the unconditional rewrite of every container (static policy, 1.21 and older); None: writes on change
    # only.
    reasserts_s: float | None = None
    may_resize: bool = True  # in place, or that is not known (`reconciler.sources.checkpoints`)
    # The checkpoint was torn, empty or of a foreign policy: these are the last good values, as protection is never
    # shrunk at once.
    held: bool = False
    problem: str | None = None  # why they are held


class SourceStatus(Struct, frozen=True, kw_only=True):
    """One source of knowledge: does it answer, since when, what is wrong."""

    name: str
    ok: bool
    age_s: float | None = None  # None: it never answered
    detail: str = ""


class NodeCpu(Struct, frozen=True, kw_only=True):
    """CPU use over the last sampling interval. Units: thousandths of a CPU."""

    busy_milli: int
    online_milli: int
    reclaimed_milli: int
    idle: Mapping[int, float] = {}  # by CPU, 0.0-1.0
    interval_s: float = 1.0
    age_s: float | None = None  # None or large: unknown, and an unknown never raises a budget
    host_be_milli: int = 0  # of the system's use, that of host workloads that count as BE (`state.hosts`)

    @property
    def system_milli(self) -> int:
        """What no pod accounts for: kubelet, runtime, kernel threads, host processes."""
        return max(0, self.busy_milli - self.online_milli - self.reclaimed_milli)


class NumaMemory(Struct, frozen=True, kw_only=True):
    """Memory that is available by NUMA node, in bytes (`reconciler.signals.memory`)."""

    free: Mapping[int, int]
    age_s: float | None = None  # None or large: unknown, and an unknown does not justify choosing a node


class Setting(Struct, frozen=True, kw_only=True):
    """A wanted value of a knob on a group, with the policy and the reason that want it."""

    path: str
    knob: str  # its name in the catalog
    # A `CpuSet` for cpu.set and cpu.mems, a `DeviceLimits` for what is set per disk, else an int in the knob's unit;
    # None: no limit.
    value: Value
    policy: str
    reason: str
    pod_uid: str | None = None
    container_id: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What the setting is about: group and knob. One desired state holds at most one setting per key."""
        return self.path, self.knob


class Refusal(Struct, frozen=True, kw_only=True):
    """A setting that the planner refuses."""

    setting: Setting
    rule: str
    reason: str  # for a person


class Pools(Struct, frozen=True, kw_only=True, dict=True):
    """Every CPU that pods can have in its pool, and the BE budget. Overlaps of pools are in ``reasons``."""

    online_cpus: CpuSet  # as in `NodeView.cpus`
    reserved: CpuSet
    dedicated: Mapping[str, CpuSet]  # by uid/container
    shared: CpuSet
    reclaimed: CpuSet
    budget_milli: int  # CPU time that BE pods may use together now (thousandths of a CPU)
    interrupt: CpuSet = EMPTY
    # Online pools besides the default one: shared/NAME, shared/NAME-NUMA1, system/NAME, and isolation/UID of an
    # isolated pod.
    named: Mapping[str, CpuSet] = {}
    bound: Mapping[str, str] = {}  # pod uid -> key of its pool in `Pools.named`
    placed: tuple[str, ...] = ()  # the keys of `Pools.dedicated` whose CPUs bypassd chose; the others are the kubelet's
    lenient: CpuSet = EMPTY  # the part of the reserved CPUs where online pods may run, too
    # Last CPUs of placed containers that were removed, so that they get them again.
    remembered: Mapping[str, CpuSet] = {}
    # Online containers of the default pool get the shared and lenient CPUs as their cpuset.
    confine_shared: bool = False
    separate: bool = False  # the reclaimed pool shares no CPU with online pools
    sizes: Mapping[str, PoolSize] = {}  # by pool, for the step limits
    isolation: Mapping[str, PodIsolation] = {}  # by pod uid, of the pods with many runnable threads
    confined: bool = True  # reclaimed containers get the reclaimed pool as their cpuset
    # The budget divided into quotas, by group path (the besteffort directory) or pod uid; None: no quota is wanted.
    quota_milli: Mapping[str, int] | None = None
    budget_at: float = 0.0  # when the budget last changed, on the view's clock
    unknown_since: float | None = None  # since when CPU use is not known, on the view's clock
    # Speed of this node's CPU relative to the CPU that limits were made for: quotas are divided by it.
    quota_ratio: float = 1.0
    reasons: Mapping[str, str] = {}  # by name of a pool
    terms: PoolTerms | None = None  # what online pools will need, while the plan is made; None in every finished plan
    # What the harm law works with; None: BE pods do not all yield, or it is not configured.
    harm: HarmTerms | None = None
    # The besteffort directory's least weight is to do what an idle class would do for its pods.
    weight_yields: bool = False
    # By key of `Pools.dedicated`, for containers that are not on their own CPUs only: the CPUs where the kernel lets
    # them run.
    elsewhere: Mapping[str, CpuSet] = {}
    trials: "Mapping[str, Pools]" = {}  # by policy in dry run: the pools as it would have them

    @property
    def dedicated_cpus(self) -> CpuSet:
        """All CPUs that some container owns."""
        return CpuSet.union(self.dedicated.values())

    @cached_property
    def placed_by_pod(self) -> Mapping[str, tuple[str, ...]]:
        """The keys of ``placed`` that have CPUs, by pod uid."""
        texts: dict[str, list[str]] = {}
        for key in self.placed:
            if key in self.dedicated:
                texts.setdefault(key.partition("/")[0], []).append(key)
        return {uid: tuple(keys) for uid, keys in texts.items()}

    def pool_of(self, pod: Pod) -> str | None:
        """The name of the pool that a pod's containers run in; None for a system pod that runs everywhere."""
        if pod.uid in self.bound:
            return self.bound[pod.uid]
        if any(key.startswith(f"{pod.uid}/") for key in self.dedicated):
            return "dedicated"
        if pod.pod_class is PodClass.SYSTEM:
            return None
        # A dedicated pod without CPUs of its own is like any online pod.
        return "reclaimed" if pod.pod_class is PodClass.RECLAIMED else "shared"


class Hold(Struct, frozen=True, kw_only=True):
    """An operator's "leave this alone until".

    As the wall clock may be set, its end is also kept on the boot clock.
    """

    # pod:UID, knob:NAME, file:PATH or node; or off:UID, of a pod that was freed, beside which a hold on the pod may
    # exist.
    target: str
    reason: str
    by: str
    until: float | None = None  # wall-clock seconds since the epoch; None: until released
    seconds: float | None = None  # how long the hold was to last; None, as the next: not entered yet
    ends_boot_s: float | None = None  # on CLOCK_BOOTTIME, which counts through suspend, of the boot below
    boot_id: str = ""
    budget: bool = False  # the freed pod is outside of the BE budget, too


def usable_cpus(online: CpuSet, kubepods: CpuSet | None) -> CpuSet:
    """The online CPUs that are in the kubepods directory's set; all of them while that is not known."""
    return online & kubepods if kubepods and online & kubepods else online


class NodeReadings(Struct, frozen=True, kw_only=True):
    """The newest readings of every source."""

    topology: Topology
    kubelet: KubeletView = KubeletView()
    cpu: NodeCpu | None = None
    reclaimed_ceiling_milli: int | None = None  # the idle buffer's ceiling of BE now; None: it sets none
    node_memory: NodeMemoryReading | None = None
    reclaimed_memory_bytes: int | None = None  # the same of the law that bounds BE memory
    uses: Mapping[str, GroupUse] = {}  # CPU use and throttling by group path, of the groups that a policy asks for
    # Quotas above the limit that a burst law lends now, by group path (µs of the group's period).
    lent_us: Mapping[str, int] = {}
    commands: Mapping[str, float] = {}  # by container id: when the runtime was last called for a BE container
    knobs: frozenset[str] = frozenset()  # names of the knobs that this kernel offers; empty: not read yet
    numa_memory: NumaMemory | None = None  # of machines with more than one NUMA node
    irq_cpus: CpuSet = EMPTY  # CPUs that serve the interrupts of the configured interfaces
    measures: Restrictions = Restrictions()  # demands of responses to interference now
    # By uid of a BE pod: how much its requests count when the BE budget is divided, percent; missing: 100.
    be_bonus: Mapping[str, int] = {}
    harm: HarmReading | None = None  # the harm law's ceiling of BE; None: nothing is measured for it
    # Group paths of the containers whose threads are all in the idle class, on kernels where that is effective beyond
    # their own group.
    idle_threads: frozenset[str] = frozenset()
    realtime: frozenset[str] = frozenset()  # uids of BE pods with real-time threads
    daemons: Daemons = Daemons()  # the other groups directly below the root of the CPU hierarchy
    # In effect in the kubepods directory; empty: could not be read; None: was not read.
    kubepods_cpus: CpuSet | None = None
    # By uid/container: owners of exclusive CPUs whose CPU sets contradict that, for longer than the kubelet takes to
    # correct them.
    owners: Mapping[str, OwnerCpus] = {}


class NodeView(NodeReadings, frozen=True, kw_only=True, dict=True):
    """The node at one moment. The only input of policies."""

    versions: Mapping[str, int]  # by controller: 1 or 2; absent: not mounted
    kubepods: str  # a group path, as the next two
    besteffort: str
    burstable: str
    pods: Mapping[str, Pod] = {}
    # Values last read, by group path and knob, of groups that matter to a decision: QoS and pod directories always,
    # containers where read.
    actual: Mapping[tuple[str, str], Value] = {}
    sources: tuple[SourceStatus, ...] = ()
    now: float = 0.0  # on the monotonic clock
    disks: Mapping[str, Disk] = {}  # by their names in the configuration
    # By pod uid, for sizes of pools; empty while no pool's size follows them.
    indicators: Mapping[str, PodIndicators] = {}
    # By container id: when it was first seen, of those that the runtime was still making then.
    arrived: Mapping[str, float] = {}
    scheduler: KernelScheduler = KernelScheduler()  # decides which idle class is used
    # By group path, where a group inside a container forbids the wanted quota.
    quota_floors: Mapping[str, QuotaFloor] = {}

    @cached_property
    def cpus(self) -> CpuSet:
        """The CPUs that pods can have: the online ones in the kubepods directory's set; all while that is not known."""
        return usable_cpus(self.topology.online, self.kubepods_cpus)

    @cached_property
    def capacity_milli(self) -> int:
        """The CPUs that pods can have, in thousandths of a CPU: no request counts for more."""
        return 1000 * len(self.cpus)

    @cached_property
    def online_in_besteffort(self) -> bool:
        """Whether an online pod is in the besteffort directory, beside the BE pods there."""
        return bool(self._beside)

    @cached_property
    def unweighed_in_besteffort(self) -> bool:
        """Whether an online pod without a mid-tier request is there: its directory has the least weight."""
        return any(
            not any(item.requests.mid and item.requests.batch_cpu_milli for item in pod.members) for pod in self._beside
        )

    @cached_property
    def _beside(self) -> list["Pod"]:
        # A comprehension: each plan asks, and a generator resumes for each pod.
        reclaimed, besteffort = PodClass.RECLAIMED, QosClass.BESTEFFORT
        return [pod for pod in self.pods.values() if pod.qos is besteffort and pod.pod_class is not reclaimed]
