"""The pods of a described machine: a short YAML list, or what ``kubectl get pods -o json`` writes.

    - {name: db, namespace: shop, class: dedicated, requests: {cpu: 4, memory: 8Gi}, limits: {cpu: 4, memory: 8Gi}}
    - {name: web, count: 3, requests: {cpu: 500m}, use: 300m}
    - {name: crunch, labels: {koordinator.sh/qosClass: BE}}

The manual page has the table of keys. Facts that a real node has in cgroups are derived as the kubelet and the runtime
would: QoS, group paths, shares, quotas.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from cgroupfs.bounded import decoded, read_file
from cgroupfs.errors import InputError
from cgroupfs.naming import QosClass
from reconciler.pods.marks import MarkReader
from reconciler.pods.resources import read_resources
from reconciler.settings.binder import Text, bind_list
from reconciler.settings.quantity import milli
from reconciler.sources.kubelet_api import decode_pods
from state.model import ContainerKind, ContainerMeta, PodClass, PodMeta, Resources

SOURCE: Final = "file"
_MOST: Final = 10_000
_LARGEST: Final = 64 << 20
"""Bytes: what kubectl writes of so many pods."""
_DEEPEST: Final = 64
_LARGEST_LIST: Final = 4 << 20
"""Characters of a YAML list."""

Quantities = Mapping[str, str]


class ContainerLine(Struct, frozen=True, forbid_unknown_fields=True):
    """One container of the list."""

    name: Annotated[str, Meta(min_length=1)] = "main"
    requests: Quantities = {}
    limits: Quantities = {}


class PodLine(Struct, frozen=True, forbid_unknown_fields=True, rename={"pod_class": "class"}):
    """One pod of the list, or ``count`` alike. Without ``containers`` it has one, with the pod's own requests."""

    name: Annotated[str, Meta(min_length=1)]
    namespace: Annotated[str, Meta(min_length=1)] = "default"
    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    pod_class: PodClass | None = None
    qos: QosClass | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    priority_class: str | None = None
    owner: str | None = None
    requests: Quantities = {}
    limits: Quantities = {}
    containers: tuple[ContainerLine, ...] = ()
    use: str = "0"

    def __post_init__(self) -> None:
        if self.containers and (self.requests or self.limits):
            raise ValueError("expected requests and limits in each container, or of the pod alone; got both")
        if self.use_milli < 0:
            raise ValueError(f"use: expected CPUs in use, such as 1500m or 2; got {self.use!r}")

    @property
    def use_milli(self) -> int:
        """The CPU in use, in thousandths; -1 if it is not a quantity."""
        try:
            return milli(self.use)
        except ValueError:
            return -1


class DescribedPod(NamedTuple):
    """One pod. ``use_milli``: the CPU that it uses now (thousandths); ``pod_class`` None: by the usual rules."""

    meta: PodMeta
    qos: QosClass
    pod_class: PodClass | None = None
    use_milli: int = 0


def read_pods_file(path: str, marks: MarkReader) -> tuple[list[DescribedPod], list[str]]:
    """The pods, and a message for each unusable part of one. ``marks`` takes what is kept of labels.

    Errors: `InputError` for a file that cannot be read or is neither of the two forms, `ConfigError` with every mistake
    of a list.
    """
    try:
        body = read_file(path, _LARGEST, pipes=True)
    except OSError as exc:
        raise InputError(path, exc.strerror or str(exc), "a readable file") from exc
    if body.lstrip().startswith(b"{"):
        pods, problems = _kubectl(path, body, marks)
    else:
        pods, problems = _listed(path, body)
    seen: set[str] = set()
    for pod in pods:
        if pod.meta.uid in seen:
            raise InputError(path, f"{pod.meta.namespace}/{pod.meta.name}", "each pod once (count: N makes several)")
        seen.add(pod.meta.uid)
    if len(pods) > _MOST:
        raise InputError(path, f"{len(pods)} pods", f"at most {_MOST}")
    return pods, problems


def _kubectl(path: str, body: bytes, marks: MarkReader) -> tuple[list[DescribedPod], list[str]]:
    try:
        answer = decoded(msgspec.json.decode, body, deepest=_DEEPEST)
        if isinstance(answer, dict) and answer.get("kind") == "List":
            # What kubectl calls the API server's PodList.
            body = msgspec.json.encode({**answer, "kind": "PodList"})
        metas, problems = decode_pods(body, marks)
    except ValueError as exc:
        raise InputError(path, str(exc), "what kubectl get pods -o json writes, or a YAML list") from exc
    return [DescribedPod(meta, meta.qos or qos_of(meta)) for meta in metas], list(problems)


def _listed(path: str, body: bytes) -> tuple[list[DescribedPod], list[str]]:
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise InputError(path, str(exc), "UTF-8 text") from exc
    lines, _ = bind_list(PodLine, Text(path, text), largest=_LARGEST_LIST)
    problems: list[str] = []
    return [pod for line in lines for pod in _made(line, problems)], problems


def _made(line: PodLine, problems: list[str]) -> Iterator[DescribedPod]:
    lines = line.containers or (ContainerLine(requests=line.requests, limits=line.limits),)
    texts: list[str] = []
    containers = tuple(_container(container_line, texts) for container_line in lines)
    problems += [f"{line.namespace}/{line.name}: {problem}" for problem in texts]
    for number in range(line.count):
        name = f"{line.name}-{number}" if line.count > 1 else line.name
        meta = PodMeta(
            uid=f"{line.namespace}.{name}",
            source=SOURCE,
            namespace=line.namespace,
            name=name,
            labels=line.labels,
            annotations=line.annotations,
            priority_class=line.priority_class,
            owner=line.owner,
            containers=containers,
        )
        yield DescribedPod(meta, line.qos or qos_of(meta), line.pod_class, line.use_milli)


def _container(line: ContainerLine, problems: list[str]) -> ContainerMeta:
    where = f"container {line.name}"
    requests, bad_requests = read_resources(f"{where}: requests", line.requests)
    limits, bad_limits = read_resources(f"{where}: limits", line.limits)
    problems += (*bad_requests, *bad_limits)
    # The API server's default: without a request the limit is the request.
    requests = Resources(
        cpu_milli=limits.cpu_milli if requests.cpu_milli is None else requests.cpu_milli,
        memory_bytes=limits.memory_bytes if requests.memory_bytes is None else requests.memory_bytes,
        batch_cpu_milli=requests.batch_cpu_milli,
        batch_memory_bytes=requests.batch_memory_bytes,
        mid=requests.mid,
    )
    return ContainerMeta(name=line.name, requests=requests, limits=limits)


def qos_of(meta: PodMeta) -> QosClass:
    """The QoS class that Kubernetes gives such a pod: by cpu and memory of all its containers, init ones too."""
    numbers = [
        (
            container_meta.requests.cpu_milli,
            container_meta.limits.cpu_milli,
            container_meta.requests.memory_bytes,
            container_meta.limits.memory_bytes,
        )
        for container_meta in meta.containers
        if container_meta.kind is not ContainerKind.SANDBOX
    ]
    if not any(number for row in numbers for number in row):
        return QosClass.BESTEFFORT
    whole = all(cpu and memory and ask_cpu == cpu and ask == memory for ask_cpu, cpu, ask, memory in numbers)
    return QosClass.GUARANTEED if whole else QosClass.BURSTABLE
