from pathlib import Path

import pytest

from reconciler.placement.devices import device_supplies, read_pci_nodes, unplaced_addresses
from state.kubelet import DeviceEntry, DeviceState

UID = "11111111-1111-4111-8111-111111111111"
NICS = "vendor/nic"


def state(devices: dict[int, tuple[str, ...]], uid: str = UID) -> DeviceState:
    return DeviceState(entries=(DeviceEntry(pod_uid=uid, container="main", resource=NICS, devices=devices),))


@pytest.mark.parametrize(
    ("devices", "pci", "needed", "count"),
    [
        ({1: ("a",)}, {}, {1}, 1),
        ({0: ("a",), 1: ("b",)}, {}, {0, 1}, 2),
        # Near two nodes: either will do, and where the others are is best.
        ({0: ("a",), 1: ("a",)}, {}, {0, 1}, 1),
        ({0: ("a", "b"), 1: ("a",)}, {}, {0}, 1),
        # No topology from the plug-in: the bus knows, whatever the case of the address.
        ({-1: ("0000:3B:02.1",)}, {"0000:3b:02.1": 1}, {1}, 1),
        ({-1: ("0000:3b:02.1", "0000:86:00.0")}, {"0000:3b:02.1": 1}, {1}, 1),
    ],
)
def test_devices_are_wanted_where_they_are(
    devices: dict[int, tuple[str, ...]], pci: dict[str, int], needed: set[int], count: int
) -> None:
    (supply,) = device_supplies(state(devices), UID, "main", pci_nodes=pci, nodes=(0, 1))
    assert {node for node, amount in supply.free.items() if amount} == needed
    assert supply.request == count
    assert supply.name == NICS
    assert set(supply.total) == {0, 1}


@pytest.mark.parametrize(
    "devices",
    [{}, {-1: ("GPU-f3b1",)}, {-1: ("0000:3b:02.1",)}, {7: ("a",)}],
    ids=["none", "uuid", "no bus", "no node"],
)
def test_devices_of_unknown_place_ask_for_nothing(devices: dict[int, tuple[str, ...]]) -> None:
    assert device_supplies(state(devices), UID, "main", pci_nodes={}, nodes=(0, 1)) == ()


def test_other_containers_devices_do_not_count() -> None:
    found = state({1: ("a",)}, uid="another")
    assert device_supplies(found, UID, "main", pci_nodes={}, nodes=(0, 1)) == ()
    assert device_supplies(found, "another", "side", pci_nodes={}, nodes=(0, 1)) == ()


def test_only_addresses_without_a_node_are_looked_up() -> None:
    found = state({-1: ("0000:3B:02.1", "GPU-f3b1", "../0000:3b:02.1"), 0: ("0000:86:00.0",)})
    assert unplaced_addresses(found) == {"0000:3b:02.1"}


def test_the_bus_tells_the_node_and_minus_one_is_unknown(tmp_path: Path) -> None:
    for address, text in (("0000:3b:02.1", "1\n"), ("0000:86:00.0", "-1\n"), ("0000:af:00.0", "?\n")):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(text)
    asked = {"0000:3b:02.1", "0000:86:00.0", "0000:af:00.0", "0000:d8:00.0", "../etc"}
    assert read_pci_nodes(asked, str(tmp_path)) == {"0000:3b:02.1": 1}
