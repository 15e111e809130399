"""The headroom in the shape that each control plane's scheduler, or the writer for its scheduler, reads. Pure.

- Koordinator: the status of the node's NodeMetric (`koordinator_status`).
- Katalyst: ``reclaimed_*`` in ``status.resources`` of the node's CustomNodeResource (`katalyst_status`).
- Neither: ``bypassd/batch-cpu`` (thousandths of a CPU) and ``bypassd/batch-memory`` (bytes) in the node's own status
  (`node_status`).

Each is a JSON merge patch (RFC 7386), which names only what is ours.

Source: Koordinator's batchresource plug-in and NodeMetric types (v1alpha1), Katalyst's scheduler cache and
CustomNodeResource types (v1alpha1); Kubernetes documentation, "Advertise Extended Resources for a Node".
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

OWN_CPU: Final = "bypassd/batch-cpu"
OWN_MEMORY: Final = "bypassd/batch-memory"
KATALYST_CPU: Final = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
KATALYST_MEMORY: Final = "resource.katalyst.kubewharf.io/reclaimed_memory"
KOORDINATOR_CPU: Final = "kubernetes.io/batch-cpu"
KOORDINATOR_MEMORY: Final = "kubernetes.io/batch-memory"
VALID_UNTIL: Final = "bypassd/headroom-valid-until"
"""Annotation of the node: RFC 3339. A value that is past is that of a daemon that has died."""
WITHHELD: Final = "bypassd-withheld"
_OWN: Final = (OWN_CPU, OWN_MEMORY)
_PARTS: Final = ("capacity", "allocatable")
_BE_PRIORITIES: Final = frozenset({"koord-batch", "koord-free"})


class Offer(Struct, frozen=True, kw_only=True):
    """CPU (thousandths) and memory (bytes) for BE pods. ``memory_bytes`` None: not promised, which is 0."""

    cpu_milli: int = 0
    memory_bytes: int | None = None

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.memory_bytes or 0


class PodUse(Struct, frozen=True, kw_only=True):
    """Use of one pod: thousandths of a CPU, bytes without page cache. ``priority`` and ``qos``: Koordinator's names."""

    namespace: str
    name: str
    cpu_milli: int
    memory_bytes: int
    priority: str
    qos: str


class NodeUse(Struct, frozen=True, kw_only=True):
    """What the node uses, in the same units; ``cpus_milli`` and ``total_bytes`` are what it has."""

    cpus_milli: int
    total_bytes: int
    cpu_milli: int
    memory_bytes: int
    pods: tuple[PodUse, ...] = ()

    @property
    def system(self) -> tuple[int, int]:
        """What no pod accounts for: CPU, bytes."""
        cpu = self.cpu_milli - sum(pod.cpu_milli for pod in self.pods)
        memory = self.memory_bytes - sum(pod.memory_bytes for pod in self.pods)
        return max(0, cpu), max(0, memory)

    @property
    def left_by_others(self) -> tuple[int, int]:
        """What all but BE work leaves of the node: CPU, bytes."""
        cpu, memory = self.system
        others = [pod for pod in self.pods if pod.priority not in _BE_PRIORITIES]
        cpu += sum(pod.cpu_milli for pod in others)
        memory += sum(pod.memory_bytes for pod in others)
        return max(0, self.cpus_milli - cpu), max(0, self.total_bytes - memory)


def node_status(offer: Offer | None, valid_until: str | None) -> dict[str, object]:
    """The patch of ``/api/v1/nodes/NAME/status``; ``offer`` None: withdrawn.

    A kubelet keeps extended resources that it does not know, and sets them to 0 when it registers the node again.
    """
    amounts = {
        OWN_CPU: None if offer is None else str(offer.cpu_milli),
        OWN_MEMORY: None if offer is None else str(offer.memory),
    }
    return {
        "metadata": {"annotations": {VALID_UNTIL: valid_until}},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def own_changes(seen: Mapping[str, object], offer: Offer, valid_until: str) -> list[dict[str, object]]:
    """A JSON patch (RFC 6902) of the same, refused if a field differs from what was ``seen`` last (`own_fields`)."""
    amounts = dict(zip(_OWN, (str(offer.cpu_milli), str(offer.memory)), strict=True))
    tests = [("test", name, text) for name, text in seen.items()]
    values = {f"status/{part}/{name}": text for part in _PARTS for name, text in amounts.items()}
    values[f"metadata/annotations/{VALID_UNTIL}"] = valid_until
    adds = [("add", name, text) for name, text in values.items()]
    return [{"op": operation, "path": _pointer(name), "value": text} for operation, name, text in (*tests, *adds)]


def own_fields(node: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The amounts of ours that a node's status has, by place; ``node``: its capacity and allocatable."""
    return {f"status/{part}/{name}": node[part][name] for part in _PARTS for name in _OWN if name in node.get(part, {})}


def _pointer(place: str) -> str:
    """RFC 6901. The last two parts are a name of ours, which has a slash."""
    path, domain, name = place.rsplit("/", 2)
    return f"/{path}/{domain}~1{name}"


def katalyst_status(offer: Offer | None) -> dict[str, object]:
    """The patch of a CustomNodeResource's status; withdrawn is 0: the scheduler keeps what it saw before a removal.

    Katalyst's scheduler never reads them in the node's status.
    """
    offer = offer or Offer()
    amounts = {KATALYST_CPU: str(offer.cpu_milli), KATALYST_MEMORY: str(offer.memory)}
    # No topology zones: they also steer the placement of dedicated pods.
    return {"status": {"resources": {"capacity": amounts, "allocatable": amounts}}}


def koordinator_status(use: NodeUse | None, held: Offer, now: str) -> dict[str, object]:
    """The patch of a NodeMetric's status. ``use`` None: withdrawn: without a time the manager resets at once.

    Koordinator's manager computes ``batch-cpu`` and ``batch-memory`` from it, and resets them when it is old
    (``degradeTimeMinutes``, 15). ``held``: what bypassd's law offers less than the manager would compute (`withheld`).
    """
    if use is None:
        return {"status": {"updateTime": None}}
    cpu, memory = use.system
    # The manager subtracts a host application of this priority. Also without use: it marks who has written this.
    usage = _resources(held.cpu_milli, held.memory)
    applications = [{"name": WITHHELD, "usage": usage, "priority": "koord-prod", "qos": "LS"}]
    return {
        "status": {
            "updateTime": now,
            "nodeMetric": {
                "nodeUsage": _resources(use.cpu_milli, use.memory_bytes),
                "systemUsage": _resources(cpu, memory),
            },
            "podsMetric": list(_pods(use.pods)),
            "hostApplicationMetric": applications,
        }
    }


def withheld(offer: Offer, use: NodeUse, computed: Offer | None, before: Offer) -> Offer:
    """What the manager is to subtract, so that it offers no more than ``offer``.

    ``computed``: its last result, as its safety margin is not known here; ``before``: what it subtracted for that.
    """
    cpu, memory = use.left_by_others
    return Offer(
        cpu_milli=_withheld_of(
            offer.cpu_milli, use.cpus_milli, cpu, None if computed is None else computed.cpu_milli, before.cpu_milli
        ),
        memory_bytes=_withheld_of(
            offer.memory, use.total_bytes, memory, None if computed is None else computed.memory, before.memory
        ),
    )


def _withheld_of(offer: int, total: int, left: int, computed: int | None, before: int) -> int:
    if offer <= 0:
        return total
    # Never more than a manager without a safety margin has to subtract: so the end of a shortage is seen soon.
    without_margin = max(0, left - offer)
    return without_margin if computed is None else min(without_margin, max(0, computed + before - offer))


def _pods(pods: Iterable[PodUse]) -> Iterable[dict[str, object]]:
    for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name)):
        usage = _resources(pod.cpu_milli, pod.memory_bytes)
        yield {
            "namespace": pod.namespace,
            "name": pod.name,
            "podUsage": usage,
            "priority": pod.priority,
            "qos": pod.qos,
        }


def _resources(cpu_milli: int, memory_bytes: int) -> Mapping[str, str]:
    return {"cpu": f"{cpu_milli}m", "memory": str(memory_bytes)}
