"""The kubelet's checkpoint files: its allocations, read strictly and never written back.

Every way in which a file is unusable has its own code (`CheckpointFault`), because the reaction differs: a torn or
emptied file must never shrink protection, a foreign policy must be shown, a newer format needs a newer agent.

Source: fixtures recorded from kubelet 1.22, 1.26 and 1.27; the CPU manager's version 1 from its source; KEP-1287; the
kubelet's status/state and allocation/state packages; the checksum is checked against vectors of Kubernetes' own tests.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from cgroupfs.bounded import digits
from cgroupfs.cpuset import CpuSet
from state import checkpoint as read
from state import checksum
from state.checkpoint import CheckpointError, CheckpointFault
from state.model import CpuPolicy

CPU_STATE: Final = "cpu_manager_state"
MEMORY_STATE: Final = "memory_manager_state"
POD_STATUS: Final = "pod_status_manager_state"
DEVICE_PLUGINS: Final = "/var/lib/kubelet/device-plugins"
"""The device manager's socket and checkpoint, whatever the kubelet's root directory is.

Source: Kubernetes, constants of the device plugin API (``DevicePluginPath``; the checkpoint is in the directory of
``KubeletSocket``), unchanged since 1.10.
"""
DEVICES: Final = f"{DEVICE_PLUGINS}/kubelet_internal_checkpoint"
KUBELET_ROOT: Final = "/var/lib/kubelet"
_CHECKED_BYTES: Final = 128 << 10
"""A longer checkpoint of the devices is not hashed: it takes up to 0.5 ms a kilobyte, in the loop."""
ALLOCATED_PODS: Final = "allocated_pods_state"
ACTUATED_PODS: Final = "actuated_pods_state"
_CHECKED_CHARS: Final = 32_768
"""Longer contents are not hashed: it takes 0.2 ms a kilobyte here, and a rename never leaves half a file anyway."""
_VERSIONS: Final = ("", "v2")
_REQUIREMENTS: Final = frozenset({"requests", "limits", "claims"})
_PLAIN: Final = frozenset({"allocationEntries", "resizeStatusEntries", "checksum"})
_MOST_NODES: Final = 1024
"""NUMA nodes of the largest Linux (NODES_SHIFT 10)."""


class CpuManagerState(msgspec.Struct, frozen=True, kw_only=True):
    """cpu_manager_state."""

    policy: CpuPolicy
    default_cpus: CpuSet
    # Pod uid -> container name -> exclusive CPUs. Kubelets before 1.18 write container id -> CPUs (version 1): that is
    # the value of the uid "".
    entries: Mapping[str, Mapping[str, CpuSet]] = {}
    verified: bool = True  # False: the file carries no checksum, which the kubelet accepts, too

    @property
    def exclusive_cpus(self) -> CpuSet:
        return CpuSet.union(cpus for containers in self.entries.values() for cpus in containers.values())

    def exclusive_of(self, uid: str, name: str, container_id: str) -> CpuSet | None:
        return self.entries.get(uid, {}).get(name) or self.entries.get("", {}).get(container_id)


class MemoryBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Memory promised to a container on certain NUMA nodes. ``kind``: ``memory`` or a size of huge pages."""

    nodes: CpuSet
    kind: str


class MemoryManagerState(msgspec.Struct, frozen=True, kw_only=True):
    """memory_manager_state."""

    policy: str  # None or Static
    entries: Mapping[str, Mapping[str, tuple[MemoryBlock, ...]]] = {}  # pod uid -> container name -> blocks


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one container. ``devices``: NUMA node (-1: unknown) -> device ids."""

    pod_uid: str
    container: str
    resource: str
    devices: Mapping[int, tuple[str, ...]]


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """kubelet_internal_checkpoint of the device manager."""

    entries: tuple[DeviceEntry, ...] = ()


def parse_cpu_manager_state(data: bytes, where: str = CPU_STATE) -> CpuManagerState:
    """Read cpu_manager_state, version 1 or 2. Errors: `CheckpointError`."""
    fields = read.load(data, where, {"policyName", "defaultCpuSet", "entries", "checksum"})
    policy_text = read.text(fields, "policyName", where)
    default_text = read.text(fields, "defaultCpuSet", where)
    entries = read.mapping(fields, "entries", where, optional=True)
    by_id = bool(entries) and all(isinstance(value, str) for value in entries.values())
    for uid in () if by_id else entries:
        for name in read.mapping(entries, uid, f"{where}: entries"):
            read.text(entries[uid], name, f"{where}: entries.{uid}")
    stored = read.number(fields, "checksum", where, optional=True)
    # Without entries only the checksums distinguish the two versions.
    versions = (by_id,) if entries else (False, True)
    expected = [checksum.cpu_manager(policy_text, default_text, entries, by_id=version) for version in versions]
    if stored and stored not in expected:
        read.verify(f"{where}: checksum", stored, expected[0])
    # After the checksum: the policy of a torn file shows nothing.
    if policy_text not in {CpuPolicy.NONE, CpuPolicy.STATIC}:
        raise CheckpointError(CheckpointFault.FOREIGN, f"{where}: policyName", policy_text, '"none" or "static"')
    if by_id:
        pods = {"": {cid: read.cpus(text, f"{where}: entries.{cid}") for cid, text in entries.items()}}
    else:
        pods = {
            uid: {name: read.cpus(text, f"{where}: entries.{uid}.{name}") for name, text in containers.items()}
            for uid, containers in entries.items()
        }
    return CpuManagerState(
        policy=CpuPolicy(policy_text),
        default_cpus=read.cpus(default_text, f"{where}: defaultCpuSet"),
        verified=bool(stored),
        entries=pods,
    )


def parse_memory_manager_state(data: bytes, where: str = MEMORY_STATE) -> MemoryManagerState:
    """Read memory_manager_state. Errors: `CheckpointError`."""
    fields = read.load(data, where, {"policyName", "machineState", "entries", "checksum"})
    policy = read.text(fields, "policyName", where)
    machine = read.mapping(fields, "machineState", where, optional=True)
    entries = read.mapping(fields, "entries", where, optional=True)
    for key in machine:
        if digits(key) is None:
            raise CheckpointError(CheckpointFault.INVALID, f"{where}: machineState", key, "a NUMA node number")
        _check_node(read.mapping(machine, key, f"{where}: machineState"), f"{where}: machineState.{key}")
    blocks = {
        uid: {
            name: tuple(
                _memory_block(block, f"{where}: entries.{uid}.{name}")
                for block in read.items(entries[uid], name, f"{where}: entries.{uid}")
            )
            for name in read.mapping(entries, uid, f"{where}: entries")
        }
        for uid in entries
    }
    stored = read.number(fields, "checksum", where)
    read.verify(f"{where}: checksum", stored, checksum.memory_manager(policy, machine, entries))
    if policy not in {"None", "Static", "BestEffort"}:
        raise CheckpointError(CheckpointFault.FOREIGN, f"{where}: policyName", policy, '"None" or "Static"')
    return MemoryManagerState(policy=policy, entries=blocks)


def parse_devices(data: bytes, where: str = DEVICES) -> DeviceState:
    """Read kubelet_internal_checkpoint, with or without NUMA nodes. Errors: `CheckpointError`."""
    outer = read.load(data, where, {"Data", "Checksum"})
    fields = read.mapping(outer, "Data", where)
    read.known(fields, f"{where}: Data", {"PodDeviceEntries", "RegisteredDevices"})
    entries = []
    for number, item in enumerate(read.items(fields, "PodDeviceEntries", f"{where}: Data", optional=True)):
        at = f"{where}: Data.PodDeviceEntries[{number}]"
        if not isinstance(item, dict):
            raise CheckpointError(CheckpointFault.INVALID, at, item, "an object")
        read.known(item, at, {"PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp"})
        if item.get("AllocResp") is not None:
            read.text(item, "AllocResp", at)
        nodes: dict[int, tuple[str, ...]] = {}
        if isinstance(item.get("DeviceIDs"), list):  # before 1.20
            nodes[-1] = read.texts(item, "DeviceIDs", at)
        else:
            for node in read.mapping(item, "DeviceIDs", at, optional=True):
                number_of = digits(node.removeprefix("-"))
                if number_of is None:
                    raise CheckpointError(CheckpointFault.INVALID, f"{at}.DeviceIDs", node, "a NUMA node number")
                ids = read.texts(item["DeviceIDs"], node, f"{at}.DeviceIDs")
                nodes[-number_of if node[0] == "-" else number_of] = ids
        uid, name, resource = (read.text(item, key, at) for key in ("PodUID", "ContainerName", "ResourceName"))
        entries.append(DeviceEntry(pod_uid=uid, container=name, resource=resource, devices=nodes))
    # Nothing needs it but the checksum.
    listed = read.mapping(fields, "RegisteredDevices", f"{where}: Data", optional=True)
    for name in listed:
        read.texts(listed, name, f"{where}: Data.RegisteredDevices")
    stored = read.number(outer, "Checksum", where)
    if len(data) <= _CHECKED_BYTES:
        try:
            expected = checksum.devices(fields.get("PodDeviceEntries"), fields.get("RegisteredDevices"))
        except ValueError as exc:
            raise CheckpointError(
                CheckpointFault.INVALID, f"{where}: Data.PodDeviceEntries.AllocResp", str(exc), "base64"
            ) from exc
        read.verify(f"{where}: Checksum", stored, expected)
    return DeviceState(entries=tuple(entries))


def _check_node(fields: Mapping[str, Any], where: str) -> None:
    """What the checksum is made of; nothing else needs it. Errors: `CheckpointError`."""
    tables = read.mapping(fields, "memoryMap", where, optional=True)
    for kind in tables:
        table = read.mapping(tables, kind, f"{where}.memoryMap")
        for name in ("total", "systemReserved", "allocatable", "reserved", "free"):
            read.number(table, name, f"{where}.memoryMap.{kind}")
    read.numbers(fields, "cells", where)
    read.number(fields, "numberOfAssignments", where)


def _memory_block(result: Any, where: str) -> MemoryBlock:
    if not isinstance(result, dict):
        raise CheckpointError(CheckpointFault.INVALID, where, result, "an object")
    nodes = read.numbers(result, "numaAffinity", where)
    if any(node >= _MOST_NODES for node in nodes):
        raise CheckpointError(CheckpointFault.INVALID, f"{where}: numaAffinity", nodes, "NUMA node numbers")
    read.number(result, "size", where)
    return MemoryBlock(nodes=CpuSet(nodes), kind=read.text(result, "type", where))


class AllocatedTexts(Struct, frozen=True, kw_only=True):
    """One container's resources as the kubelet's quantity texts. ``limits`` None: this format does not have them."""

    requests: Mapping[str, str]
    limits: Mapping[str, str] | None = None


class AllocationState(Struct, frozen=True, kw_only=True):
    """What was admitted: pod uid -> container name.

    ``resizes``: pod uid -> Proposed, InProgress, Deferred, Infeasible.
    """

    pods: Mapping[str, Mapping[str, AllocatedTexts]] = {}
    resizes: Mapping[str, str] = {}


def parse_allocations(data: bytes, where: str = ALLOCATED_PODS) -> AllocationState:
    """What the kubelet has admitted for each container (in-place resizing). Errors: `CheckpointError`.

    - 1.27 to 1.30, ``pod_status_manager_state``: requests only, and the state of a pod's resize.
    - 1.31 and 1.32: the same name, the content as JSON inside a string; from 1.32 requests and limits.
    - from 1.33: ``allocated_pods_state`` (admitted) and ``actuated_pods_state`` (the runtime's last values). From 1.34
      the entries have another shape; the newest kubelets add the whole pods in protobuf and keep these entries, too.
    """
    fields = read.load(data, where, {*_PLAIN, "data", "version"})
    if "data" not in fields:
        read.known(fields, where, set(_PLAIN))
        return _plain(fields, where)
    version = read.text(fields, "version", where) if "version" in fields else ""
    if version not in _VERSIONS:
        raise CheckpointError(
            CheckpointFault.FUTURE, f"{where}: version", version, f"one of {', '.join(map(repr, _VERSIONS))}"
        )
    inner, stored = read.text(fields, "data", where), read.number(fields, "checksum", where)
    if len(inner) <= _CHECKED_CHARS:
        read.verify(f"{where}: checksum", stored, checksum.text(inner))
    at = f"{where}: data"
    content = read.load(inner.encode(), at, {"allocationEntries", "resizeStatusEntries", "entries", "podList"})
    if content.get("podList") and not content.get("entries"):
        raise CheckpointError(
            CheckpointFault.FUTURE, f"{at}: podList", "protobuf", "entries beside it, as older kubelets need"
        )
    resizes = read.mapping(content, "resizeStatusEntries", at, optional=True)
    return AllocationState(
        pods={**_by_container(content, at), **_by_pod(content, at)},
        resizes={uid: read.text(resizes, uid, f"{at}.resizeStatusEntries") for uid in resizes},
    )


def _plain(fields: Mapping[str, Any], where: str) -> AllocationState:
    """Of 1.27 to 1.30. Errors: `CheckpointError`; never for the checksum."""
    raw = read.mapping(fields, "allocationEntries", where, optional=True)
    pods: dict[str, dict[str, AllocatedTexts]] = {}
    for uid in raw:
        at = f"{where}: allocationEntries.{uid}"
        for name in read.mapping(raw, uid, f"{where}: allocationEntries"):
            pods.setdefault(uid, {})[name] = AllocatedTexts(requests=_amounts(raw[uid], name, at))
    resizes = read.mapping(fields, "resizeStatusEntries", where, optional=True)
    texts = {uid: read.text(resizes, uid, f"{where}: resizeStatusEntries") for uid in resizes}
    # Not verified: a zero that the kubelet made itself hashes otherwise than one that it read; both are written "0".
    read.number(fields, "checksum", where)
    return AllocationState(pods=pods, resizes=texts)


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
