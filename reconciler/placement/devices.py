"""On which NUMA nodes a container's devices are: as the device plug-in told the kubelet, else as the PCI bus tells.

The kubelet has given out the devices before anything of the container exists, so there is nothing to choose: they are a
`supply.fixed`, and the CPUs and the memory follow them where they can.

Source: kubelet_internal_checkpoint (device ids by NUMA node, -1 where the plug-in tells no topology); kernel
documentation, ABI/testing sysfs-bus-pci (``numa_node``, -1 for unknown). Plug-ins of SR-IOV and DPDK devices use the
PCI address as the device's id; ids of other kinds (a GPU's UUID) tell nothing.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from cgroupfs.cpuset import CpuSet
from reconciler.placement.supply import Supply, fixed
from state.kubelet import DeviceState

_UNKNOWN: Final = -1
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII | re.IGNORECASE)
_LARGEST_NODE: Final = 1023


def device_supplies(
    state: DeviceState, pod_uid: str, container: str, *, pci_nodes: Mapping[str, int], nodes: Iterable[int]
) -> tuple[Supply, ...]:
    """One `Supply` for each resource of the container of which any device's node is known, by name.

    ``pci_nodes``: NUMA node by PCI address in lower case (`read_pci_nodes`). ``nodes``: all of the machine; a device
    elsewhere (a node of the past) counts as unknown.
    """
    every = tuple(nodes)
    at: dict[str, dict[str, set[int]]] = {}
    for entry in state.entries:
        if (entry.pod_uid, entry.container) == (pod_uid, container):
            devices = at.setdefault(entry.resource, {})
            for node, ids in entry.devices.items():
                for one in ids:
                    told = node if node != _UNKNOWN else pci_nodes.get(one.lower(), _UNKNOWN)
                    devices.setdefault(one, set()).update({told} & set(every))
    found = (
        _supply(name, [nodes for nodes in devices.values() if nodes], every) for name, devices in sorted(at.items())
    )
    return tuple(supply for supply in found if supply is not None)


def _supply(name: str, devices: list[set[int]], every: tuple[int, ...]) -> Supply | None:
    """All nodes of the devices that are near one node only; else any one that is near to all the others."""
    needed = {min(nodes) for nodes in devices if len(nodes) == 1}
    if needed:
        return fixed(name, CpuSet(needed), every)
    shared = set.intersection(*devices) if devices else set()
    if not shared:
        return None
    there = dict.fromkeys(sorted(shared), 1)
    return Supply(name=name, request=1, total={node: there.get(node, 0) for node in every}, free=there)


def unplaced_addresses(state: DeviceState) -> frozenset[str]:
    """The PCI addresses, in lower case, of the devices in use whose node the checkpoint does not tell."""
    return frozenset(
        one.lower() for entry in state.entries for one in entry.devices.get(_UNKNOWN, ()) if _ADDRESS.fullmatch(one)
    )


def read_pci_nodes(addresses: Collection[str], root: str = "/") -> dict[str, int]:
    """The NUMA node of each PCI device that has one; a device that is gone or has none is left out."""
    found: dict[str, int] = {}
    for address in sorted(addresses):
        if not _ADDRESS.fullmatch(address):
            continue
        try:
            with open(os.path.join(root, "sys/bus/pci/devices", address, "numa_node"), encoding="ascii") as file:
                node = int(file.read(16))
        except (OSError, ValueError):
            continue
        if 0 <= node <= _LARGEST_NODE:
            found[address] = node
    return found
