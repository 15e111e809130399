"""The few fields of a Kubernetes pod that this agent reads, typed, and how they become a `PodMeta`.

The kubelet's list and a static pod's manifest are the same object, so both sources share this. Everything else in a
pod is skipped while decoding. A value of the wrong type spoils its pod (one message), never the list around it.

Source: Kubernetes API reference, Pod v1.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.naming import QosClass
from reconciler.resources import read_resources
from state.model import ContainerKind, ContainerMeta, PodMeta

CONFIG_HASH: Final = "kubernetes.io/config.hash"
CONFIG_MIRROR: Final = "kubernetes.io/config.mirror"
CONFIG_SOURCE: Final = "kubernetes.io/config.source"

# Nothing we read is nearly as long; kubectl's copy of the whole manifest would be most of what we keep in memory.
_LONGEST_ANNOTATION: Final = 16 * 1024
_UNUSED_ANNOTATIONS: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})

STATIC_SOURCES: Final = frozenset({"file", "http"})


class OwnerReference(Struct, frozen=True):
    """Who made the pod; one of several may be the controller."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class ObjectMeta(Struct, frozen=True, rename={"owners": "ownerReferences"}):
    """``metadata``."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owners: list[OwnerReference] | None = None


class ResourceRequirements(Struct, frozen=True):
    """``resources`` of a container; the text of a quantity stays as it is."""

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
    node_name: str | None = None


class ContainerStatus(Struct, frozen=True, rename={"container_id": "containerID"}):
    """The part of a container's status that names its directory."""

    name: str
    container_id: str | None = None


class PodStatus(Struct, frozen=True, rename="camel"):
    """``status``."""

    qos_class: str | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    ephemeral_container_statuses: list[ContainerStatus] | None = None


class PodObject(Struct, frozen=True):
    """One pod."""

    kind: str | None = None
    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


def static_uid(metadata: ObjectMeta) -> str | None:
    """The uid under which the kubelet keeps a static pod's cgroup; None for a pod of the API server.

    The API server knows such a pod as a mirror with a uid of its own; the mirror's annotation has the kubelet's.
    """
    annotations = metadata.annotations or {}
    mirrored = annotations.get(CONFIG_MIRROR)
    if mirrored:
        return mirrored
    if annotations.get(CONFIG_SOURCE) in STATIC_SOURCES:
        return annotations.get(CONFIG_HASH) or metadata.uid
    return None


def meta_of(pod: PodObject, source: str, *, uid: str | None = None, static: bool = False) -> PodMeta:
    """The pod as one source tells it. ``uid`` replaces what the object says.

    Errors: `ValueError` for a pod without any uid: nothing could be matched with it.
    """
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    kept_as = static_uid(metadata)
    uid = uid or kept_as or metadata.uid
    if not uid:
        raise ValueError(f"pod {metadata.namespace}/{metadata.name} has no uid")
    problems: list[str] = []
    ids = dict(_ids(status))
    containers = tuple(_containers(spec, ids, problems))
    return PodMeta(
        uid=uid,
        source=source,
        namespace=metadata.namespace,
        name=metadata.name,
        labels=metadata.labels or {},
        annotations=kept_annotations(metadata.annotations or {}),
        qos=_qos(status.qos_class),
        priority_class=spec.priority_class_name or None,
        priority=spec.priority,
        owner=_owner(metadata.owners or ()),
        static=static or kept_as is not None,
        containers=containers,
        problems=tuple(problems),
    )


def _containers(spec: PodSpec, ids: Mapping[str, str], problems: list[str]) -> Iterator[ContainerMeta]:
    for group, kind in (
        (spec.init_containers, ContainerKind.INIT),
        (spec.containers, ContainerKind.APP),
        (spec.ephemeral_containers, ContainerKind.APP),
    ):
        for container in group or ():
            # An init container that restarts always is a sidecar: it stays for the pod's life, like an app container.
            sidecar = kind is ContainerKind.INIT and container.restart_policy == "Always"
            where = f"container {container.name}"
            asked = container.resources or ResourceRequirements()
            requests, bad_requests = read_resources(f"{where}: requests", asked.requests)
            limits, bad_limits = read_resources(f"{where}: limits", asked.limits)
            problems += (*bad_requests, *bad_limits)
            yield ContainerMeta(
                name=container.name,
                kind=ContainerKind.APP if sidecar else kind,
                id=ids.get(container.name),
                requests=requests,
                limits=limits,
            )


def _ids(status: PodStatus) -> Iterator[tuple[str, str]]:
    """Name and bare id (``containerd://<id>`` without the scheme) of every container that has been made."""
    for group in (status.init_container_statuses, status.container_statuses, status.ephemeral_container_statuses):
        for container in group or ():
            if container.container_id:
                yield container.name, container.container_id.rpartition("://")[2]


def kept_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    """Without what nothing here reads and what is too long to be meant for us."""
    return {
        key: value
        for key, value in annotations.items()
        if key not in _UNUSED_ANNOTATIONS and len(value) <= _LONGEST_ANNOTATION
    }


def _qos(text: str | None) -> QosClass | None:
    return QosClass(text) if text in set(QosClass) else None


def _owner(owners: list[OwnerReference] | tuple[()]) -> str | None:
    """``Kind/name`` of the controller, else of the first owner."""
    chosen = next((owner for owner in owners if owner.controller), owners[0] if owners else None)
    return f"{chosen.kind}/{chosen.name}" if chosen else None
