"""The kubelet's checkpoints of in-place resizing: what it has admitted for each container, in every format so far.

- 1.27 to 1.30, ``pod_status_manager_state``: requests only, and the state of a pod's resize
  (`kubelet.parse_pod_status`).
- 1.31 and 1.32: the same name, the content as JSON inside a string; from 1.32 requests and limits.
- from 1.33: ``allocated_pods_state`` (admitted) and ``actuated_pods_state`` (the runtime's last values). From 1.34 the
  entries have another shape; the newest kubelets add the whole pods in protobuf and keep these entries beside it.

Read strictly and never written back, like all checkpoints. Source: KEP-1287; the kubelet's status/state and
allocation/state packages; the checksum is checked against vectors of Kubernetes' own tests.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from state import checkpoint as read
from state import checksum
from state.checkpoint import CheckpointError, CheckpointFault
from state.kubelet import POD_STATUS, parse_pod_status

ALLOCATED_PODS: Final = "allocated_pods_state"
ACTUATED_PODS: Final = "actuated_pods_state"

_CHECKED_CHARS: Final = 32_768
"""Longer contents are not hashed: it takes 0.2 ms a kilobyte here, and a rename never leaves half a file anyway."""
_VERSIONS: Final = ("", "v2")
_REQUIREMENTS: Final = frozenset({"requests", "limits", "claims"})
_PLAIN: Final = frozenset({"allocationEntries", "resizeStatusEntries", "checksum"})


class AllocatedTexts(Struct, frozen=True, kw_only=True):
    """One container's resources as the kubelet's quantity texts. ``limits`` None: this format does not have them."""

    requests: Mapping[str, str]
    limits: Mapping[str, str] | None = None


class AllocationState(Struct, frozen=True, kw_only=True):
    """What was admitted: pod uid -> container name. ``resizes``: pod uid -> Proposed, InProgress, Deferred, Infeasible.

    ``verified`` False means that the checksum was not recomputed (1.27 to 1.30, long files), not that it is wrong.
    """

    pods: Mapping[str, Mapping[str, AllocatedTexts]] = {}
    resizes: Mapping[str, str] = {}
    verified: bool = True


def parse_allocations(data: bytes, where: str = ALLOCATED_PODS) -> AllocationState:
    """Read any of the three files. Errors: `CheckpointError`."""
    fields = read.load(data, where, {*_PLAIN, "data", "version"})
    if "data" not in fields:
        return _plain(data, where)
    version = read.text(fields, "version", where) if "version" in fields else ""
    if version not in _VERSIONS:
        raise CheckpointError(
            CheckpointFault.FUTURE, f"{where}: version", version, f"one of {', '.join(map(repr, _VERSIONS))}"
        )
    inner, stored = read.text(fields, "data", where), read.number(fields, "checksum", where)
    checked = len(inner) <= _CHECKED_CHARS
    if checked and stored != (expected := checksum.text(inner)):
        raise CheckpointError(CheckpointFault.CHECKSUM, f"{where}: checksum", stored, f"{expected} for this content")
    at = f"{where}: data"
    content = read.load(inner.encode(), at, {"allocationEntries", "resizeStatusEntries", "entries", "podList"})
    if content.get("podList") and not content.get("entries"):
        raise CheckpointError(
            CheckpointFault.FUTURE, f"{at}: podList", "protobuf", "entries beside it, as older kubelets need"
        )
    resizes = read.mapping(content, "resizeStatusEntries", at, optional=True)
    return AllocationState(
        verified=checked,
        pods={**_by_container(content, at), **_by_pod(content, at)},
        resizes={uid: read.text(resizes, uid, f"{at}.resizeStatusEntries") for uid in resizes},
    )


def _plain(data: bytes, where: str) -> AllocationState:
    status_state = parse_pod_status(data, where)
    pods = {
        uid: {name: AllocatedTexts(requests=amounts) for name, amounts in containers.items()}
        for uid, containers in status_state.allocations.items()
    }
    return AllocationState(pods=pods, resizes=status_state.resizes, verified=status_state.verified)


def _by_container(content: Mapping[str, Any], where: str) -> dict[str, dict[str, AllocatedTexts]]:
    """1.31 to 1.33: the containers at once, each with its requests (1.31) or with requests and limits."""
    pods = read.mapping(content, "allocationEntries", where, optional=True)
    at = f"{where}.allocationEntries"
    entries = {uid: read.mapping(pods, uid, at, optional=True) for uid in pods}
    shapes = [shape for entry in entries.values() for shape in entry.values() if isinstance(shape, dict) and shape]
    # A container without any resources looks the same in both shapes; another one of the file shows which it is.
    whole = any(_REQUIREMENTS & shape.keys() for shape in shapes)
    return {
        uid: {
            name: _requirements(fields, name, f"{at}.{uid}")
            if whole
            else AllocatedTexts(requests=_amounts(fields, name, f"{at}.{uid}"))
            for name in fields
        }
        for uid, fields in entries.items()
    }


def _by_pod(content: Mapping[str, Any], where: str) -> dict[str, dict[str, AllocatedTexts]]:
    """From 1.34: a record for each pod, with its containers' resources."""
    pods = read.mapping(content, "entries", where, optional=True)
    result: dict[str, dict[str, AllocatedTexts]] = {}
    for uid in pods:
        at = f"{where}.entries.{uid}"
        pod = read.mapping(pods, uid, f"{where}.entries")
        read.known(pod, at, {"ContainerResources", "PodLevelResources", "EmptyDirVolumeLimits"})
        containers = read.mapping(pod, "ContainerResources", at, optional=True)
        result[uid] = {name: _requirements(containers, name, f"{at}.ContainerResources") for name in containers}
    return result


def _requirements(fields: Mapping[str, Any], name: str, where: str) -> AllocatedTexts:
    at = f"{where}.{name}"
    resources = read.mapping(fields, name, where, optional=True)
    read.known(resources, at, set(_REQUIREMENTS))
    return AllocatedTexts(requests=_amounts(resources, "requests", at), limits=_amounts(resources, "limits", at))


def _amounts(fields: Mapping[str, Any], name: str, where: str) -> dict[str, str]:
    amounts = read.mapping(fields, name, where, optional=True)
    return {kind: read.text(amounts, kind, f"{where}.{name}") for kind in amounts}


__all__ = [
    "ACTUATED_PODS",
    "ALLOCATED_PODS",
    "POD_STATUS",
    "AllocatedTexts",
    "AllocationState",
    "parse_allocations",
]
