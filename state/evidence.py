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

    ``age_s``: its age when the frame was made. ``confidence``: 1.0 measured exactly as the signal's definition; less
    where it was estimated, scaled up from a part of the time, or taken from a proxy. An unavailable signal is not in
    the frame at all: a missing sample is unknown, never good.
    """

    value: float
    age_s: float = 0.0
    confidence: float = 1.0


class ContainerSnapshot(Struct, frozen=True, kw_only=True):
    """One container of a pod, as far as a verdict or an eviction needs it."""

    id: str
    path: str
    name: str | None = None
    sandbox: bool = False


class PodSnapshot(Struct, frozen=True, kw_only=True):
    """One pod at the time of a frame.

    ``cpus``: the CPUs that its containers may run on, as a list; empty: not known. ``pool``: None for a system pod that
    runs everywhere. ``created_s``: wall-clock seconds at which its cgroup was made, 0.0: not known. ``terminating``:
    its end has started. ``grace_s``: the time that it gets to end, None: unknown. ``certain``: some source has reported
    its labels. ``held``: an operator's hold covers it. ``partial``: the fields of ``requests`` that not every container
    of the pod has, so that the sum is less than the pod may use. ``be_cpu_milli``, ``be_memory_bytes``: its requests as
    BE work, container by container; None: nothing, or (an old recording) as ``requests`` have it. ``tolerates``: the
    effects of the taint of a closed node (`state.closing`) that do not keep it away.
    """

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
    pool: str | None = None
    cpus: str = ""
    requests: Resources = Resources()
    be_cpu_milli: int | None = None
    be_memory_bytes: int | None = None
    limits: Resources = Resources()
    created_s: float = 0.0
    terminating: bool = False
    grace_s: float | None = None
    certain: bool = True
    held: bool = False
    partial: tuple[str, ...] = ()
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
    """Everything known at one moment. ``at_s`` is the monotonic clock, ``wall_s`` seconds since the epoch.

    ``hosts``: host workloads by their subject, described like pods as far as verdicts need it. They are victims (class
    ``shared``) or suspects (``reclaimed``); as none is in ``pods``, no response and no eviction ever chooses one.
    ``samples``: by subject, then by signal. ``pods`` by uid. ``knobs``: what this kernel lets us set (names of the
    catalog). ``disks``: ``major:minor`` of the whole disks. ``enforce``: what is planned is also written.
    ``be_yields``: every BE pod leaves the CPU to online pods by itself (`reconciler.policies.yielding`). ``closing``:
    whether the node is closed to new BE pods; None: it cannot be, so nothing waits for it.
    """

    at_s: float
    wall_s: float
    pods: Mapping[str, PodSnapshot] = {}
    samples: Mapping[str, Mapping[str, Sample]] = {}
    knobs: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()
    enforce: bool = True
    be_yields: bool = False
    closing: NodeClosing | None = None
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
    """One pod that may be the cause. ``score`` 0.0-1.0, the highest first; ``reason`` for a person."""

    uid: str
    title: str
    score: float
    reason: str


class DetectorVerdict(Struct, frozen=True, kw_only=True, gc=False):
    """One detector's verdict on one victim at one moment.

    ``text``: the numbers; or a function that makes the text, as most are never read. ``severity``: measured by
    threshold, 1.0 is just at it. ``gap``: how much of ``resource`` the victim lacks, where that is known (CPU:
    thousandths of a CPU; memory: bytes; io: bytes/s). ``proxy``: the measure used where the detector's own signal is
    unavailable.
    """

    verdict: Verdict
    text: str | Callable[[], str]
    resource: ContendedResource = ContendedResource.CPU
    severity: float = 0.0
    gap: float | None = None
    proxy: str | None = None

    @property
    def evidence(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()


class RuleVerdict(Struct, frozen=True, kw_only=True, gc=False):
    """One rule's verdict on one victim.

    ``since_s``: monotonic seconds since when the verdict has been the same. ``evidence`` is empty where the victim is
    ``ok`` and was before. ``suspects`` ranked, the most probable first.
    """

    rule: str
    victim: str
    title: str
    verdict: Verdict
    since_s: float
    evidence: tuple[str, ...] = ()
    resource: ContendedResource = ContendedResource.CPU
    severity: float = 0.0
    gap: float | None = None
    suspects: tuple[Suspect, ...] = ()


def signature(pod: PodSnapshot) -> str:
    """Identity of a workload: pods of one owner run the same program. ``namespace/owner``, else the pod's own name."""
    return f"{pod.namespace or ''}/{pod.owner or pod.title}"
