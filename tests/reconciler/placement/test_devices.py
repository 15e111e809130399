from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.placement.devices import affinity_of, read_pci_nodes, unplaced_addresses
from state.kubelet import DeviceEntry, DeviceState, MemoryBlock, MemoryManagerState

UID = "11111111-1111-4111-8111-111111111111"
NICS = "vendor/nic"


def state(devices: dict[int, tuple[str, ...]], uid: str = UID) -> DeviceState:
    return DeviceState(entries=(DeviceEntry(pod_uid=uid, container="main", resource=NICS, devices=devices),))


@pytest.mark.parametrize(
    ("devices", "pci", "needed"),
    [
        ({1: ("a",)}, {}, {1}),
        ({0: ("a",), 1: ("b",)}, {}, {0, 1}),
        # Equally near to two nodes: it does not matter, only the other one does.
        ({0: ("a", "b"), 1: ("a",)}, {}, {0}),
        # No topology from the plug-in: the bus knows, whatever the case of the address.
        ({-1: ("0000:3B:02.1",)}, {"0000:3b:02.1": 1}, {1}),
        ({-1: ("0000:3b:02.1", "0000:86:00.0")}, {"0000:3b:02.1": 1}, {1}),
    ],
)
def test_devices_are_wanted_where_they_are(
    devices: dict[int, tuple[str, ...]], pci: dict[str, int], needed: set[int]
) -> None:
    assert affinity_of(None, state(devices), pci) == {f"{UID}/main": {NICS: CpuSet(needed)}}


@pytest.mark.parametrize(
    "devices",
    [{}, {-1: ("GPU-f3b1",)}, {-1: ("0000:3b:02.1",)}, {0: ("a",), 1: ("a",)}, {5000: ("a",)}],
    ids=["none", "uuid", "no bus", "near both", "no node"],
)
def test_devices_of_unknown_or_any_place_ask_for_nothing(devices: dict[int, tuple[str, ...]]) -> None:
    assert affinity_of(None, state(devices), {}) == {}


def test_only_addresses_without_a_node_are_looked_up() -> None:
    device_state = state({-1: ("0000:3B:02.1", "GPU-f3b1", "../0000:3b:02.1"), 0: ("0000:86:00.0",)})
    assert unplaced_addresses(device_state) == {"0000:3b:02.1"}


def test_the_bus_tells_the_node_and_minus_one_is_unknown(tmp_path: Path) -> None:
    for address, text in (("0000:3b:02.1", "1\n"), ("0000:86:00.0", "-1\n"), ("0000:af:00.0", "?\n")):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(text)
    texts = {"0000:3b:02.1", "0000:86:00.0", "0000:af:00.0", "0000:d8:00.0", "../etc"}
    assert read_pci_nodes(texts, str(tmp_path)) == {"0000:3b:02.1": 1}


def test_what_is_given_out_already_is_told_by_container_and_resource() -> None:
    blocks = (
        MemoryBlock(nodes=CpuSet((0, 1)), kind="memory"),
        MemoryBlock(nodes=CpuSet((1,)), kind="hugepages-1Gi"),
    )
    memory = MemoryManagerState(policy="Static", entries={UID: {"main": blocks}, "other": {"main": ()}})
    devices = state({0: ("near-both", "a"), 1: ("near-both",), -1: ("0000:3b:02.1", "GPU-1")})
    cpus = affinity_of(memory, devices, {"0000:3b:02.1": 3})
    assert cpus == {
        f"{UID}/main": {"hugepages-1Gi": CpuSet((1,)), "memory": CpuSet((0, 1)), NICS: CpuSet((0, 3))},
    }
    assert affinity_of(None, None, {}) == {}
