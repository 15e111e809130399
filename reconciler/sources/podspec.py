"""The few fields of a Kubernetes pod that this agent reads, typed, and how they become a `PodMeta`.

The kubelet's list and a static pod's manifest are the same object, so both sources share this. Everything else in a
pod is skipped while decoding. A value of the wrong type spoils its pod (one message), never the list around it.

Source: Kubernetes API reference, Pod v1.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import Raw, Struct, field

from cgroupfs.naming import QosClass
from reconciler.pods.marks import LONGEST_NAME, MarkReader, limited, note, shortened, too_long
from reconciler.pods.resize import ResizeCondition, state_of
from reconciler.pods.resources import read_resources
from state.closing import CLOSED_KEY, TAINT_EFFECTS
from state.model import ContainerKind, ContainerMeta, PodMeta, Resize

CONFIG_HASH: Final = "kubernetes.io/config.hash"
CONFIG_MIRROR: Final = "kubernetes.io/config.mirror"
CONFIG_SOURCE: Final = "kubernetes.io/config.source"

MOST_CONTAINERS: Final = 256
"""Of each kind in a pod; the rest count as not described."""
_MOST_CONDITIONS: Final = 64
_LONGEST_MESSAGE: Final = 1024
LONGEST_UID: Final = 128

STATIC_SOURCES: Final = frozenset({"file", "http"})
"""The kubelet's sources of pods other than the API server (``api``)."""


class OwnerReference(Struct, frozen=True):
    """The owner of the pod; one of several may be the controller."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class Toleration(Struct, frozen=True):
    """A taint that the pod tolerates. Empty or None: of any key, any effect."""

    key: str | None = None
    operator: str | None = None
    effect: str | None = None


META_NAMES: Final = {
    "owners": "ownerReferences",
    "deletion_timestamp": "deletionTimestamp",
    "deletion_grace_s": "deletionGracePeriodSeconds",
}


class ObjectMeta(Struct, frozen=True, rename=META_NAMES):
    """``metadata`` without labels and annotations, which `Marks` holds."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    owners: list[OwnerReference] | None = None
    deletion_timestamp: str | None = None
    deletion_grace_s: float | None = None


class ResourceRequirements(Struct, frozen=True):
    """``resources`` of a container; the text of a quantity remains as it is."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class ContainerSpec(Struct, frozen=True, rename="camel"):
    """A container of any of the three lists."""

    name: str
    resources: ResourceRequirements | None = None
    restart_policy: str | None = None


class PodSpec(Struct, frozen=True, rename="camel"):
    """``spec``."""

    containers: list[ContainerSpec] | None = None
    init_containers: list[ContainerSpec] | None = None
    ephemeral_containers: list[ContainerSpec] | None = None
    priority_class_name: str | None = None
    priority: int | None = None
    grace_s: float | None = field(name="terminationGracePeriodSeconds", default=None)
    tolerations: list[Toleration] | None = None
    overhead: dict[str, str | int] | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """The parts of a container's status that name its directory and report a resize."""

    name: str
    container_id: str | None = field(name="containerID", default=None)
    allocated_resources: dict[str, str | int] | None = None
    resources: ResourceRequirements | None = None


class PodCondition(Struct, frozen=True):
    """One of ``status.conditions``."""

    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class PodIP(Struct, frozen=True):
    """One of ``status.podIPs``."""

    ip: str = ""


class PodStatus(Struct, frozen=True, rename="camel"):
    """``status``."""

    qos_class: str | None = None
    pod_ip: str | None = field(name="podIP", default=None)
    pod_ips: list[PodIP] | None = field(name="podIPs", default=None)
    resize: str | None = None
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    ephemeral_container_statuses: list[ContainerStatus] | None = None


class PodObject(Struct, frozen=True):
    kind: str | None = None
    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class MarkedMeta(Struct, frozen=True, rename=META_NAMES):
    """A pod's metadata with its parts as in the JSON, so that one of a wrong type does not lose the others."""

    name: Raw = Raw(b"null")
    namespace: Raw = Raw(b"null")
    uid: Raw = Raw(b"null")
    labels: Raw = Raw(b"null")
    annotations: Raw = Raw(b"null")
    owners: Raw = Raw(b"null")
    deletion_timestamp: Raw = Raw(b"null")
    deletion_grace_s: Raw = Raw(b"null")


class MarkedObject(Struct, frozen=True):
    """The part of a pod by which it is classified; everything else is passed over."""

    metadata: MarkedMeta = MarkedMeta()


class Marks(NamedTuple):
    """The labels and annotations of one pod that are kept; None: they could not be read."""

    labels: Mapping[str, str] | None
    annotations: Mapping[str, str] | None
    problems: tuple[str, ...] = ()


def marks_of(labels: Raw | Mapping[str, str], annotations: Raw | Mapping[str, str], reader: MarkReader) -> Marks:
    problems: list[str] = []
    read = reader.labels(labels, problems), reader.annotations(annotations, problems)
    return Marks(*read, tuple(problems))


def static_uid(annotations: Mapping[str, str], uid: str | None) -> str | None:
    """The uid under which the kubelet keeps a static pod's cgroup; None for a pod of the API server.

    The API server has such a pod as a mirror with a uid of its own; the mirror's annotation has the kubelet's.
    """
    mirrored = annotations.get(CONFIG_MIRROR)
    if mirrored:
        return mirrored
    if annotations.get(CONFIG_SOURCE) in STATIC_SOURCES:
        return annotations.get(CONFIG_HASH) or uid
    return None


def meta_of(pod: PodObject, source: str, marks: Marks, *, uid: str | None = None, static: bool = False) -> PodMeta:
    """The pod from one source. ``uid`` replaces the object's.

    Errors: `ValueError` for a pod without any uid: it could not be matched with anything.
    """
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    problems = list(marks.problems)
    kept_as = shortened(
        static_uid(marks.annotations or {}, metadata.uid), "uid in its annotations", problems, LONGEST_UID
    )
    uid = uid or kept_as or metadata.uid
    if not uid:
        raise ValueError(f"pod {(metadata.namespace or '')[:60]}/{(metadata.name or '')[:60]} has no uid")
    if len(uid) > LONGEST_UID:
        raise ValueError(too_long("uid", len(uid), LONGEST_UID))
    ids = dict(_ids(status, problems))
    resizes = dict(_resizes(status, problems))
    containers = tuple(_containers(spec, ids, resizes, problems))
    overhead, bad_overhead = read_resources("overhead", spec.overhead)
    for problem in bad_overhead:
        note(problems, problem)
    return PodMeta(
        uid=uid,
        source=source,
        namespace=shortened(metadata.namespace, "namespace", problems),
        name=shortened(metadata.name, "name", problems),
        labels=marks.labels,
        annotations=marks.annotations,
        qos=_qos(status.qos_class),
        priority_class=shortened(spec.priority_class_name, "priorityClassName", problems) or None,
        priority=spec.priority,
        owner=shortened(_owner(metadata.owners or ()), "ownerReferences", problems, 2 * LONGEST_NAME),
        ip=_address(status),
        static=static or kept_as is not None,
        deleting=metadata.deletion_timestamp is not None,
        grace_s=_grace_s(metadata, spec),
        containers=containers,
        overhead=overhead,
        tolerates=_tolerated(spec.tolerations or ()),
        problems=limited(problems),
    )


def _containers(
    spec: PodSpec, ids: Mapping[str, str | None], resizes: Mapping[str, Resize], problems: list[str]
) -> Iterator[ContainerMeta]:
    for group, kind in (
        (spec.init_containers, ContainerKind.INIT),
        (spec.containers, ContainerKind.APP),
        (spec.ephemeral_containers, ContainerKind.EPHEMERAL),
    ):
        if group is not None and len(group) > MOST_CONTAINERS:
            note(problems, f"more than {MOST_CONTAINERS} containers: the others count as not described")
        for container in (group or ())[:MOST_CONTAINERS]:
            if len(container.name) > LONGEST_NAME:
                note(problems, too_long("name of a container", len(container.name), LONGEST_NAME))
                continue
            # An init container that restarts always is a sidecar: it remains for the pod's life, like an app container.
            sidecar = kind is ContainerKind.INIT and container.restart_policy == "Always"
            where = f"container {container.name}"
            requirements = container.resources or ResourceRequirements()
            requests, bad_requests = read_resources(f"{where}: requests", requirements.requests)
            limits, bad_limits = read_resources(f"{where}: limits", requirements.limits)
            for problem in (*bad_requests, *bad_limits):
                note(problems, problem)
            yield ContainerMeta(
                name=container.name,
                kind=ContainerKind.APP if sidecar else kind,
                id=ids.get(container.name),
                requests=requests,
                limits=limits,
                resize=resizes.get(container.name),
            )


def _resizes(status: PodStatus, problems: list[str]) -> Iterator[tuple[str, Resize]]:
    """Each container's resources in the status, where it has any."""
    current = [
        ResizeCondition(condition.type, condition.reason or "", (condition.message or "")[:_LONGEST_MESSAGE])
        for condition in (status.conditions or ())[:_MOST_CONDITIONS]
        if condition.status == "True"
    ]
    state, message = state_of(status.resize, current)
    # Ephemeral containers have no resources.
    for group in (status.init_container_statuses, status.container_statuses):
        for container in (group or ())[:MOST_CONTAINERS]:
            values, has = container.allocated_resources, container.resources
            if values is None and has is None and state is None:
                continue
            where = f"status of container {container.name}"
            admitted, bad_admitted = read_resources(f"{where}: allocatedResources", values)
            requests, bad_requests = read_resources(f"{where}: requests", has.requests if has else None)
            limits, bad_limits = read_resources(f"{where}: limits", has.limits if has else None)
            for problem in (*bad_admitted, *bad_requests, *bad_limits):
                note(problems, problem)
            yield (
                container.name,
                # A map with an unreadable value counts as not reported: the rest of it would be less than is admitted.
                Resize(
                    requests=None if values is None or bad_admitted else admitted,
                    actual_requests=None if has is None or bad_requests else requests,
                    actual_limits=None if has is None or bad_limits else limits,
                    state=state,
                    message=message,
                ),
            )


def _ids(status: PodStatus, problems: list[str]) -> Iterator[tuple[str, str | None]]:
    """Name and bare id (``containerd://<id>`` without the scheme) of every container that has been made."""
    for group in (status.init_container_statuses, status.container_statuses, status.ephemeral_container_statuses):
        for container in group or ():
            if container.container_id:
                where = f"id of container {container.name[:LONGEST_NAME]}"
                yield container.name, shortened(container.container_id.rpartition("://")[2], where, problems)


def _address(status: PodStatus) -> str | None:
    """The pod's first address; None while it has none. An invalid address is left out: it would be used in URLs."""
    text = status.pod_ip or next((ip.ip for ip in status.pod_ips or ()), "")
    try:
        # A scope may be any text.
        return str(ipaddress.ip_address(text)) if text and "%" not in text else None
    except ValueError:
        return None


def _qos(text: str | None) -> QosClass | None:
    return QosClass(text) if text in set(QosClass) else None


def _grace_s(metadata: ObjectMeta, spec: PodSpec) -> float | None:
    """The deletion's grace, else the pod's own; an invalid value is unknown."""
    value = spec.grace_s if metadata.deletion_grace_s is None else metadata.deletion_grace_s
    return value if value is None or value >= 0 else None


def _owner(owners: list[OwnerReference] | tuple[()]) -> str | None:
    """``Kind/name`` of the controller, else of the first owner."""
    chosen = next((owner for owner in owners if owner.controller), owners[0] if owners else None)
    return f"{chosen.kind}/{chosen.name}" if chosen else None


def _tolerated(tolerations: list[Toleration] | tuple[()]) -> tuple[str, ...]:
    """The effects of the taint of a closed node that do not keep the pod away.

    Source: Kubernetes documentation, "Taints and Tolerations".
    """
    # The taint has another value each time, so that only ``Exists`` tolerates it.
    fitting = [
        toleration
        for toleration in tolerations[:MOST_CONTAINERS]
        if toleration.operator == "Exists" and (toleration.key or CLOSED_KEY) == CLOSED_KEY
    ]
    return tuple(effect for effect in TAINT_EFFECTS if any((each.effect or effect) == effect for each in fitting))
