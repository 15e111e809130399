"""One pod's facts from all sources, merged into one `Pod`. Pure.

Each source may have all, some or none of a pod's fields. A field is taken from the strongest source that has it;
"unknown" (None) never hides a weaker source's value, and an empty map is a value.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.pods.classify import KATALYST_QOS, KOORDINATOR_QOS, classification_input, classify
from reconciler.pods.cpu_annotations import memory_wish_of, parse, within_request
from reconciler.pods.disk_annotations import disk_preferences
from reconciler.pods.marks import limited, unobeyed
from reconciler.pods.resize import effective
from reconciler.pods.resources import cpu_request, with_extended
from reconciler.pods.selectors import ClassRules
from state.model import (
    Classification,
    Container,
    ContainerKind,
    ContainerMeta,
    GroupRef,
    LastClass,
    Phase,
    Pod,
    PodClass,
    PodMeta,
    Resize,
    Resources,
    RuntimeSpec,
    has_spec,
)

STRENGTH: Final = ("apiserver", "kubelet", "cri", "manifest", "bundle")
"""Sources of pod metadata, strongest first.

The API server's watch has labels and annotations before the kubelet's list; the rest of its pod counts only where the
kubelet does not list the pod (`reconciler.pods.metadata`).
The kubelet has the whole spec; CRI has labels and annotations; a manifest has its file's content; a bundle has names
and the annotations that the runtime is configured to pass on.
"""
_OR_UNKNOWN: Final = (
    *("namespace", "name", "labels", "annotations", "qos"),
    *("priority_class", "priority", "owner", "ip", "grace_s"),
)
"""Fields of which None is "unknown"."""


class ContainerInput(Struct, frozen=True, kw_only=True):
    """One container from the runtime's own files."""

    kind: ContainerKind = ContainerKind.UNKNOWN
    name: str | None = None
    spec: RuntimeSpec | None = None
    settled: bool = True
    sandbox: str | None = None


class PodInput(Struct, frozen=True, kw_only=True):
    """Everything known about one pod directory. ``metas`` in any order; ``containers`` maps id to directory.

    ``sandbox``: the runtime that gives the pod a machine or kernel of its own. ``granted``: by container name, the
    resources that the kubelet's checkpoint has as admitted.
    """

    uid: str
    qos: QosClass
    group: GroupRef
    containers: Mapping[str, GroupRef]
    metas: Sequence[PodMeta] = ()
    facts: Mapping[str, ContainerInput] = {}
    granted: Mapping[str, Resize] = {}
    exclusive: bool = False
    sandbox: str | None = None
    last: LastClass | None = None
    """The class when the pod's labels and annotations were last read."""


def merge_metas(uid: str, metas: Iterable[PodMeta]) -> PodMeta | None:
    """One description from several, field by field from the strongest that has it; None when there is none.

    Containers are joined by name, so that the ids of one source meet the requests of another.
    """
    ordered = sorted(metas, key=lambda meta: STRENGTH.index(meta.source) if meta.source in STRENGTH else len(STRENGTH))
    if not ordered:
        return None
    merged = ordered[0]
    for weaker in ordered[1:]:
        unknown = {name: getattr(weaker, name) for name in _OR_UNKNOWN if getattr(merged, name) is None}
        merged = replace(
            merged,
            **unknown,
            uid=uid,
            source=f"{merged.source}+{weaker.source}",
            static=merged.static or weaker.static,
            deleting=merged.deleting or weaker.deleting,
            containers=_join(merged, weaker),
            overhead=merged.overhead if merged.overhead != Resources() else weaker.overhead,
            tolerates=merged.tolerates or weaker.tolerates,
            sandbox_ids=tuple(dict.fromkeys(merged.sandbox_ids + weaker.sandbox_ids)),
            problems=limited(merged.problems + weaker.problems),
        )
    return merged


def _join(strong: PodMeta, weak: PodMeta) -> tuple[ContainerMeta, ...]:
    # CRI is stronger than a manifest, and its containers have no requests, kind and order: then the manifest's count.
    first, second = strong, weak
    if only_weak_has_spec := has_spec(weak.source) and not has_spec(strong.source):
        first, second = weak, strong
    # The runtime lists the newest of a name first.
    others = {container.name: container for container in reversed(second.containers)}
    joined = []
    for container in first.containers:
        other = others.pop(container.name, container)
        number = other.id or container.id if only_weak_has_spec else container.id or other.id
        joined.append(replace(container, id=number))
    return (*joined, *others.values())


def assemble(known: PodInput, rules: ClassRules) -> Pod:
    """The pod as policies see it: merged metadata, classified, each container with its kind, spec and resources."""
    meta = merge_metas(known.uid, known.metas)
    if meta is not None:
        containers, problems = with_extended(
            meta.containers, meta.annotations, by_webhook=rules.extended_spec_by_webhook
        )
        meta = replace(meta, containers=containers, problems=limited((*meta.problems, *problems)))
    classification = classify(
        classification_input(known.uid, known.qos, meta, exclusive=known.exclusive, last=known.last), rules
    )
    labels, annotations = (meta.labels or {}, meta.annotations or {}) if meta else ({}, {})
    wish, problems = parse(labels, annotations)
    wish, beyond = within_request(wish, cpu_request(meta.containers) if meta else 0)
    problems = (*problems, beyond) if beyond else problems
    memory, more = memory_wish_of(annotations)
    disks, of_disks = disk_preferences(annotations)
    unknown = _unknown_limits(meta, classification)
    messages = limited((*classification.problems, *unknown, *problems, *more, *of_disks))
    classification = replace(classification, problems=messages)
    metas = _ContainerMetas(meta)
    containers_now = tuple(
        _container(cid, group, known.facts.get(cid), metas, known.granted)
        for cid, group in sorted(known.containers.items())
    )
    return Pod(
        uid=known.uid,
        qos=known.qos,
        group=known.group,
        containers=containers_now,
        classification=classification,
        namespace=meta.namespace if meta else None,
        name=meta.name if meta else None,
        labels=labels,
        annotations=annotations,
        priority_class=meta.priority_class if meta else None,
        priority=meta.priority if meta else None,
        owner=meta.owner if meta else None,
        ip=meta.ip if meta else None,
        static=meta.static if meta else False,
        deleting=meta.deleting if meta else False,
        grace_s=meta.grace_s if meta else None,
        wish=wish,
        memory=memory,
        disks=disks,
        unobeyed=tuple(unobeyed(annotations)),
        meta_source=f"{meta.source}+cgroup" if meta else "cgroup",
        sandbox=known.sandbox,
        # Containers in a machine of the pod's own have no cgroups: the pod is managed by what its spec declares.
        declared=_admitted(meta, known.granted) if meta and known.sandbox else (),
        overhead=meta.overhead if meta and known.sandbox else Resources(),
        tolerates=meta.tolerates if meta else (),
    )


def _unknown_limits(meta: PodMeta | None, classification: Classification) -> Iterator[str]:
    """The message about a BE pod of a colocation control plane whose batch limits no source reports."""
    if meta is None or classification.pod_class is not PodClass.RECLAIMED or has_spec(meta.source):
        return
    marked = (meta.annotations or {}).get(KATALYST_QOS) or (meta.labels or {}).get(KOORDINATOR_QOS)
    limits = [item.limits for item in meta.containers]
    if marked and not any(item.batch_cpu_milli or item.batch_memory_bytes for item in limits):
        yield "batch requests and limits are not known, and not applied: no source has the pod's spec"


def _admitted(meta: PodMeta, granted: Mapping[str, Resize]) -> tuple[ContainerMeta, ...]:
    """The spec's containers with what the kubelet has admitted of a resize."""
    containers = []
    for spec in meta.containers:
        if spec.kind is ContainerKind.EPHEMERAL:
            continue  # it has none, and stays in the spec after its end
        counts = effective(spec.requests, spec.limits, spec.resize, granted.get(spec.name))
        containers.append(replace(spec, requests=counts.requests, limits=counts.limits, resize=None))
    return tuple(containers)


class _ContainerMetas:
    """One pod's container metadata, by id and by name."""

    def __init__(self, meta: PodMeta | None) -> None:
        containers = meta.containers if meta else ()
        self.by_id = {container_meta.id: container_meta for container_meta in containers if container_meta.id}
        self.by_name = {container_meta.name: container_meta for container_meta in containers}
        self.sandboxes = frozenset(meta.sandbox_ids) if meta else frozenset[str]()


def _container(
    cid: str, group: GroupRef, facts: ContainerInput | None, metas: _ContainerMetas, granted: Mapping[str, Resize]
) -> Container:
    name = facts.name if facts else None
    # By name for a container whose id the sources do not report yet: its bundle has the name.
    meta = metas.by_id.get(cid) or (metas.by_name.get(name) if name else None)
    kind = facts.kind if facts else ContainerKind.UNKNOWN
    if kind is ContainerKind.UNKNOWN and cid in metas.sandboxes:
        kind = ContainerKind.SANDBOX
    elif meta is not None and kind in (ContainerKind.UNKNOWN, ContainerKind.APP):
        # A bundle does not separate init containers from the others, the pod's spec does.
        kind = meta.kind
    name = name or (meta.name if meta else None)
    spec = meta or ContainerMeta(name="")
    counts = effective(spec.requests, spec.limits, spec.resize, granted.get(name) if name else None)
    return Container(
        id=cid,
        group=group,
        kind=kind,
        phase=Phase.SETTLED if facts is None or facts.settled else Phase.CREATING,
        name=name,
        spec=facts.spec if facts else None,
        requests=counts.requests,
        limits=counts.limits,
        resize=counts.resize if meta else None,
    )
