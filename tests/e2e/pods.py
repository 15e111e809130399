"""What a test asks for: a pod, in the kubelet's terms, and what the kubelet makes of it.

Source: kubelet pkg/kubelet/cm/helpers_linux.go (shares, quota, pod values) and the QoS rules of the pod API.
"""

import uuid
from collections.abc import Callable
from typing import Final

from msgspec import Struct

MIN_SHARES: Final = 2
PERIOD_US: Final = 100_000
MIN_QUOTA_US: Final = 1_000

BEST_EFFORT: Final = "BestEffort"
BURSTABLE: Final = "Burstable"
GUARANTEED: Final = "Guaranteed"


def shares_of(milli: int) -> int:
    """Kernel shares for a CPU request in thousandths of a CPU."""
    return max(MIN_SHARES, milli * 1024 // 1000)


def quota_of(milli: int) -> int:
    """Microseconds per 100 ms for a CPU limit in thousandths of a CPU."""
    return max(MIN_QUOTA_US, milli * PERIOD_US // 1000)


class ContainerSpec(Struct, frozen=True, kw_only=True):
    """One container. ``run`` is what the test program does: ``("burn", "2")``. Units: thousandths of a CPU, bytes.

    ``("exec", PROGRAM, ...)`` is another program (`tests.node.scripted` only).

    ``batch_memory``: what a BE container asks for and may have of the overcommitted resource.
    """

    name: str = "main"
    run: tuple[str, ...] = ("sleep",)
    cpu_request: int = 0
    cpu_limit: int = 0
    memory_request: int = 0
    memory_limit: int = 0
    batch_memory: int = 0


class PodSpec(Struct, frozen=True, kw_only=True):
    """One pod. Labels and annotations reach the agent through CRI, as a user's do on a node.

    ``init`` run one after the other, each to its end, before the first of ``containers`` starts. ``runtime_handler``:
    what its RuntimeClass names; empty: the default, runc.
    """

    name: str
    namespace: str = "default"
    uid: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    containers: tuple[ContainerSpec, ...] = (ContainerSpec(),)
    init: tuple[ContainerSpec, ...] = ()
    runtime_handler: str = ""

    @property
    def qos(self) -> str:
        """The pod's QoS class, from requests and limits."""
        rows = [(c.cpu_request, c.cpu_limit, c.memory_request, c.memory_limit) for c in (*self.containers, *self.init)]
        if not any(any(values) for values in rows):
            return BEST_EFFORT
        if all(cpu and memory and cpu == want_cpu and memory == want for want_cpu, cpu, want, memory in rows):
            return GUARANTEED
        return BURSTABLE

    @property
    def exclusive(self) -> bool:
        """True if the static CPU manager gives some container whole CPUs of its own."""
        return self.qos == GUARANTEED and any(whole_cpus(self, c) for c in self.containers)


def whole_cpus(pod: PodSpec, container: ContainerSpec) -> int:
    """How many exclusive CPUs the static CPU manager gives; 0 for none."""
    if pod.qos != GUARANTEED or container.cpu_request % 1000:
        return 0
    return container.cpu_request // 1000


def pod_values(pod: PodSpec) -> dict[str, int]:
    """What the kubelet sets on the pod directory: ``shares``; ``quota`` and ``memory`` where all containers do."""
    if pod.qos == BEST_EFFORT:
        return {"shares": MIN_SHARES}
    every = (*pod.containers, *pod.init)
    values = {"shares": shares_of(_most(pod, lambda spec: spec.cpu_request))}
    if all(c.cpu_limit for c in every):
        values["quota"] = quota_of(_most(pod, lambda spec: spec.cpu_limit))
    if all(c.memory_limit for c in every):
        values["memory"] = _most(pod, lambda spec: spec.memory_limit)
    return values


def _most(pod: PodSpec, amount: Callable[[ContainerSpec], int]) -> int:
    """What a pod needs at once: all its containers together, or one of its init containers alone."""
    return max(sum(map(amount, pod.containers)), *map(amount, pod.init), 0)


def new_uid() -> str:
    """A uid as the API server makes them."""
    return str(uuid.uuid4())


def best_effort(name: str, *, run: tuple[str, ...] = ("sleep",), labels: dict[str, str] | None = None) -> PodSpec:
    return PodSpec(name=name, uid=new_uid(), labels=labels or {}, containers=(ContainerSpec(run=run),))


def burstable(
    name: str, *, cpu_request: int = 250, cpu_limit: int = 0, memory_limit: int = 0, run: tuple[str, ...] = ("sleep",)
) -> PodSpec:
    """An online pod of one container that may burst."""
    container = ContainerSpec(
        run=run,
        cpu_request=cpu_request,
        cpu_limit=cpu_limit,
        memory_limit=memory_limit,
        memory_request=memory_limit // 2,
    )
    return PodSpec(name=name, uid=new_uid(), containers=(container,))


def guaranteed(name: str, *, cpus: int = 1, memory: int = 64 << 20, run: tuple[str, ...] = ("sleep",)) -> PodSpec:
    """A pod that asks for whole CPUs; under the static policy they are its own."""
    container = ContainerSpec(
        run=run, cpu_request=cpus * 1000, cpu_limit=cpus * 1000, memory_request=memory, memory_limit=memory
    )
    return PodSpec(name=name, uid=new_uid(), containers=(container,))
