"""NUMA nodes of the memory and the devices that the kubelet has assigned to containers. Pure but for sysfs.

The kubelet assigns them before the container exists: they are fixed hints, and the CPUs follow them where they can.

Source: kubelet_internal_checkpoint (device ids by NUMA node, -1 where the plug-in reports no topology); kernel
documentation, ABI/testing sysfs-bus-pci (``numa_node``, -1 for unknown).
"""

import os
import re
from collections.abc import Collection, Mapping
from typing import Final

from cgroupfs.cpuset import CpuSet
from state.kubelet import DeviceState, MemoryManagerState

_UNKNOWN: Final = -1
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII | re.IGNORECASE)
"""Plug-ins of SR-IOV and DPDK devices use it as the device's id; ids of other kinds (a GPU's UUID) have none."""
# The kernel's NODES_SHIFT is at most 10.
_LARGEST_NODE: Final = 1023


def affinity_of(
    memory: MemoryManagerState | None, devices: DeviceState | None, pci_nodes: Mapping[str, int]
) -> dict[str, dict[str, CpuSet]]:
    """``uid/container`` -> resource -> the nodes where the kubelet has assigned it already."""
    numbers: dict[str, dict[str, set[int]]] = {}
    for uid, containers in (memory.entries if memory is not None else {}).items():
        for name, blocks in containers.items():
            for block in blocks:
                numbers.setdefault(f"{uid}/{name}", {}).setdefault(block.kind, set()).update(block.nodes)
    places: dict[tuple[str, str, str], set[int]] = {}
    for entry in devices.entries if devices is not None else ():
        for node, ids in entry.devices.items():
            for text in ids:
                # The node that the plug-in reported to the kubelet, else the PCI bus's.
                number = node if node != _UNKNOWN else pci_nodes.get(text.lower(), _UNKNOWN)
                if 0 <= number <= _LARGEST_NODE:
                    places.setdefault((f"{entry.pod_uid}/{entry.container}", entry.resource, text), set()).add(number)
    for (key, resource, _), nodes in places.items():
        if len(nodes) == 1:  # a device that is equally near to several nodes needs none of them
            numbers.setdefault(key, {}).setdefault(resource, set()).update(nodes)
    return {
        key: {name: CpuSet(nodes) for name, nodes in sorted(resources.items()) if nodes}
        for key, resources in sorted(numbers.items())
    }


def unplaced_addresses(state: DeviceState) -> frozenset[str]:
    """The PCI addresses, in lower case, of the devices in use without a node in the checkpoint."""
    return frozenset(
        text.lower() for entry in state.entries for text in entry.devices.get(_UNKNOWN, ()) if _ADDRESS.fullmatch(text)
    )


def read_pci_nodes(addresses: Collection[str], root: str = "/") -> dict[str, int]:
    """The NUMA node of each PCI device that has one; a device that was removed or has none is left out."""
    nodes: dict[str, int] = {}
    for address in sorted(addresses):
        if not _ADDRESS.fullmatch(address):
            continue
        try:
            with open(
                os.path.join(root, "sys/bus/pci/devices", address, "numa_node"), encoding="ascii", newline="\n"
            ) as file:
                node = int(file.read(16))
        except (OSError, ValueError):
            continue
        if 0 <= node <= _LARGEST_NODE:
            nodes[address] = node
    return nodes
