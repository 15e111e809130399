"""The kubelet's checkpoint checksums: FNV-1a over Go's one-line picture of a struct, remade from the JSON.

The kubelet hashes a textual dump of its Go value (type names, fields in source order, map keys sorted), not the file. A
wrong guess here would make a good file look damaged, so the tests check every rendering against recorded files.

Source: recordings of kubelet 1.22, 1.26, 1.27; Kubernetes pkg/kubelet/checkpointmanager/checksum and the ``state``
packages of the managers.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# The values below are the result of a JSON decoder: their shape was checked by the caller, their element types vary by
# kubelet version. That is why they are Any here, in this module only.
Json = Any


def fnv1a(text: str) -> int:
    """FNV-1a, 32 bits, of the UTF-8 bytes."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def text(content: str) -> int:
    """Checksum of a checkpoint that keeps its content as one string (1.31 and later, allocations)."""
    return fnv1a(f"(string){content}")


def cpu_manager(policy: str, default_cpus: str, entries: Mapping[str, Json], *, by_id: bool) -> int:
    """Checksum of cpu_manager_state: pod uids to names to CPU lists; ``by_id``: container ids to CPU lists."""
    kind = "map[string]string" if by_id else "map[string]map[string]string"
    return fnv1a(
        f"(*state.CPUManagerCheckpoint){{PolicyName:(string){policy} DefaultCPUSet:(string){default_cpus} "
        f"Entries:({kind}){_go(entries)} Checksum:(checksum.Checksum)0}}"
    )


def memory_manager(policy: str, machine: Mapping[str, Json], entries: Mapping[str, Json]) -> int:
    # Keys are NUMA nodes: Go sorts them as numbers.
    nodes = _map({int(node): value for node, value in machine.items()}, _memory_node)
    blocks = _map(entries, lambda containers: _map(containers, lambda result: _list(result, _memory_block)))
    return fnv1a(
        f"(*state.MemoryManagerCheckpoint){{PolicyName:(string){policy} MachineState:(state.NUMANodeMap){nodes} "
        f"Entries:(state.ContainerMemoryAssignments){blocks} Checksum:(checksum.Checksum)0}}"
    )


def devices(entries: Sequence[Json] | None, registered: Mapping[str, Json] | None) -> int:
    """Checksum of kubelet_internal_checkpoint."""
    return fnv1a(
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){_list(entries, _device_entry)} "
        f"RegisteredDevices:(map[string][]string){_map(registered, _go)}}}"
    )


def _memory_node(node: Json) -> str:
    tables = _map(node.get("memoryMap"), _memory_table)
    return (
        f"<*>{{NumberOfAssignments:(int){node.get('numberOfAssignments', 0)} "
        f"MemoryMap:(map[v1.ResourceName]*state.MemoryTable){tables} Cells:([]int){_go(node.get('cells'))}}}"
    )


def _memory_table(table: Json) -> str:
    return (
        f"<*>{{TotalMemSize:(uint64){table['total']} SystemReserved:(uint64){table['systemReserved']} Allocatable:"
        f"(uint64){table['allocatable']} Reserved:(uint64){table['reserved']} Free:(uint64){table['free']}}}"
    )


def _memory_block(block: Json) -> str:
    nodes = _go(block.get("numaAffinity"))
    return f"{{NUMAAffinity:([]int){nodes} Type:(v1.ResourceName){block['type']} Size:(uint64){block['size']}}}"


def _device_entry(entry: Json) -> str:
    ids = entry.get("DeviceIDs")
    if isinstance(ids, list):  # before 1.20, without NUMA nodes
        shown = f"([]string){_go(ids)}"
    else:
        nodes = None if ids is None else {int(node): result for node, result in ids.items()}
        shown = f"(checkpoint.DevicesPerNUMA){_map(nodes, _go)}"
    answer = entry.get("AllocResp")
    octets = None if answer is None else list(base64.b64decode(answer))
    return (
        f"{{PodUID:(string){entry['PodUID']} ContainerName:(string){entry['ContainerName']} "
        f"ResourceName:(string){entry['ResourceName']} DeviceIDs:{shown} AllocResp:([]uint8){_go(octets)}}}"
    )


def _map(value: Mapping[Json, Json] | None, show: Callable[[Json], str]) -> str:
    if value is None:
        return "<nil>"
    return f"map[{' '.join(f'{key}:{show(value[key])}' for key in sorted(value))}]"


def _list(value: Sequence[Json] | None, show: Callable[[Json], str]) -> str:
    return "<nil>" if value is None else f"[{' '.join(show(item) for item in value)}]"


def _go(value: Json) -> str:
    """Plain maps, lists and scalars nested in each other."""
    if value is None or isinstance(value, Mapping):
        return _map(value, _go)
    if isinstance(value, list):
        return _list(value, _go)
    return str(value)
