"""The input of interference detection: a `SampleFrame` is everything measured at one moment; findings are its result.

A frame holds plain numbers and facts only, so that it can be written to a file and evaluated again later with another
configuration: frames are the only input of detectors, ladder, eviction triggers and the choice of victims.

Subjects are ``node``, ``pod:UID``, ``host:NAME`` (a host workload: `state.hosts`), ``pool:NAME``, ``numa:N``,
``fs:NAME`` (a file system by what it is for, such as ``nodefs``), and ``pod:UID@numa:N`` or ``pod:UID@fs:NAME``: a
pod's part of such a place. Signals are named in `reconciler.signals.catalog`, which has their units.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from state.closing import NodeClosing
from state.model import PodClass, Resources

NODE: Final = "node"


HOST: Final = "host:"
"""Begins the subject of a host workload. No pod's uid has a colon (`cgroupfs.naming`): neither passes for the other."""


def pod_subject(uid: str) -> str:
    return uid if uid.startswith(HOST) else f"pod:{uid}"


def host_subject(name: str) -> str:
    """The subject of one host workload, which is its ``uid`` in a frame, too."""
    return f"{HOST}{name}"


def pool_subject(name: str) -> str:
    """The subject of one CPU pool, such as ``pool:shared``."""
    return f"pool:{name}"


def pod_at(uid: str, place: str) -> str:
    """The subject of one pod's part of a place, such as ``numa:0``."""
    return f"pod:{uid}@{place}"


class Sample(Struct, frozen=True, array_like=True, gc=False):
    """One measured number in its signal's unit.

    An unavailable signal is not in the frame at all: a missing sample is unknown, never good.
    """

    value: float
    age_s: float = 0.0  # when the frame was made
    # 1.0: measured exactly as the signal's definition; less: estimated, scaled up from a part of the time, or taken
    # from a proxy.
    confidence: float = 1.0


class ContainerSnapshot(Struct, frozen=True, kw_only=True):
    """One container of a pod, as far as a verdict or an eviction needs it."""

    id: str
    path: str
    name: str | None = None
    sandbox: bool = False


class PodSnapshot(Struct, frozen=True, kw_only=True):
    """One pod at the time of a frame."""

    uid: str
    title: str
    pod_class: PodClass
    group: str
    namespace: str | None = None
    qos: str = ""
    priority: int | None = None
    priority_class: str | None = None
    owner: str | None = None
    static: bool = False
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    containers: tuple[ContainerSnapshot, ...] = ()
    pool: str | None = None  # None: a system pod that runs everywhere
    cpus: str = ""  # that its containers may run on, as a list; empty: not known
    requests: Resources = Resources()
    # Requests as BE work, container by container; None: nothing, or (an old recording) as the plain requests have it.
    be_cpu_milli: int | None = None
    be_memory_bytes: int | None = None
    limits: Resources = Resources()
    created_s: float = 0.0  # wall-clock seconds at which its cgroup was made; 0.0: not known
    terminating: bool = False  # its end has started
    grace_s: float | None = None  # the time that it gets to end; None: unknown
    certain: bool = True  # some source has reported its labels
    held: bool = False  # an operator's hold covers it
    # The fields of the requests that not every container of the pod has: the sum is less than the pod may use.
    partial: tuple[str, ...] = ()
    # The effects of the taint of a closed node (`state.closing`) that do not keep it away.
    tolerates: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return pod_subject(self.uid)

    @property
    def is_host(self) -> bool:
        """Whether it is a host workload and not a pod: reported, and never acted on."""
        return self.uid.startswith(HOST)

    @property
    def paths(self) -> tuple[str, ...]:
        """Its groups: its own, and its containers'."""
        return self.group, *(snapshot.path for snapshot in self.containers)


class SampleFrame(Struct, frozen=True, kw_only=True):
    """Everything known at one moment."""

    at_s: float  # on the monotonic clock
    wall_s: float  # since the epoch
    pods: Mapping[str, PodSnapshot] = {}  # by uid
    samples: Mapping[str, Mapping[str, Sample]] = {}  # by subject, then by signal
    knobs: tuple[str, ...] = ()  # that this kernel offers, by their names in the catalog
    disks: tuple[str, ...] = ()  # major:minor of the whole disks
    enforce: bool = True  # what is planned is also written
    be_yields: bool = False  # every BE pod leaves the CPU to online pods by itself (`reconciler.policies.yielding`)
    # Whether the node is closed to new BE pods; None: it cannot be, so nothing waits for it.
    closing: NodeClosing | None = None
    # Host workloads by subject, as victims (class shared) or suspects (reclaimed). None of them is in the pods, so that
    # no response and no eviction ever chooses one.
    hosts: Mapping[str, PodSnapshot] = {}


class Verdict(StrEnum):
    """A detector's result for a victim."""

    OK = "ok"
    SUSPECT = "suspect"
    INTERFERED = "interfered"
    UNKNOWN = "unknown"


class ContendedResource(StrEnum):
    """What a victim lacks; decides how suspects are ranked and which squeeze fits."""

    CPU = "cpu"
    MEMORY = "memory"
    IO = "io"
    CACHE = "cache"
    NETWORK = "network"


class Suspect(Struct, frozen=True, kw_only=True):
    """One pod that may be the cause."""

    uid: str
    title: str
    score: float  # 0.0-1.0, the highest first
    reason: str  # for a person


class DetectorVerdict(Struct, frozen=True, kw_only=True, gc=False):
    """One detector's verdict on one victim at one moment."""

    verdict: Verdict
    text: str | Callable[[], str]  # the numbers; or what makes the text, as most are never read
    resource: ContendedResource = ContendedResource.CPU
    severity: float = 0.0  # measured by threshold: 1.0 is just at it
    # How much of the resource the victim lacks, where that is known (CPU: thousandths of a CPU; memory: bytes; io:
    # bytes/s).
    gap: float | None = None
    proxy: str | None = None  # the measure used where the detector's own signal is unavailable

    @property
    def evidence(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()


class RuleVerdict(Struct, frozen=True, kw_only=True, gc=False):
    """One rule's verdict on one victim."""

    rule: str
    victim: str
    title: str
    verdict: Verdict
    since_s: float  # since when the verdict has been the same, on the monotonic clock
    evidence: tuple[str, ...] = ()  # empty where the victim is ok and was before
    resource: ContendedResource = ContendedResource.CPU
    severity: float = 0.0
    gap: float | None = None
    suspects: tuple[Suspect, ...] = ()  # the most probable first
    unblamed: bool = False  # suspect only because no pod can be the cause


def signature(pod: PodSnapshot) -> str:
    """Identity of a workload: pods of one owner run the same program. ``namespace/owner``, else the pod's own name."""
    return f"{pod.namespace or ''}/{pod.owner or pod.title}"
