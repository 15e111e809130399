"""The CPUs that serve a network interface's interrupts, from trees as the kernel lays them out."""

import logging
from pathlib import Path

import pytest

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.signals.irqs import EVERY_S, IrqSampler, irq_cpus

PCI = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bridge with an interrupt of its own; a card of two ports behind it, one of them by virtio; a loopback."""
    card = tmp_path / PCI
    (card.parent / "msi_irqs").mkdir(parents=True)
    (card.parent / "msi_irqs/20").write_text("msi")
    for name, device, numbers in (
        ("eth0", card, (30, 31)),
        ("eth1", card.with_name("0000:01:00.1") / "virtio0", (40,)),
        ("usb0", card.with_name("0000:01:00.2") / "usb1/1-1/1-1:1.0", ()),
    ):
        (device / f"net/{name}").mkdir(parents=True)
        holder = device.parent if device.name.startswith("virtio") else device
        for number in numbers:
            (holder / "msi_irqs").mkdir(exist_ok=True)
            (holder / f"msi_irqs/{number}").write_text("msix")
        link = tmp_path / f"sys/class/net/{name}"
        link.mkdir(parents=True)
        (link / "device").symlink_to(device)
    (tmp_path / "sys/class/net/lo").mkdir()
    for number, effective, allowed in (
        (20, "0", "0-7"),
        (30, "2", "0-7"),
        (31, "5", "0-7"),
        (40, None, "6-7"),
    ):
        serve(tmp_path, number, effective, allowed)
    return tmp_path


def serve(root: Path, number: int, effective: str | None, allowed: str = "0-7") -> None:
    directory = root / f"proc/irq/{number}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "smp_affinity_list").write_text(f"{allowed}\n")
    if effective is not None:
        (directory / "effective_affinity_list").write_text(f"{effective}\n")


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        (("eth0",), "2,5"),
        (("eth*",), "2,5-7"),
        (("eth1",), "6-7"),
        (("eth0", "eth0", "nobody"), "2,5"),
        (("lo",), ""),
        (("usb0",), ""),
        ((), ""),
    ],
    ids=[
        "a card's",
        "by pattern",
        "behind virtio, on a kernel that does not tell where they are delivered",
        "twice",
        "no device",
        "none of its own: a bridge's are not its",
        "none requested",
    ],
)
def test_the_cpus_of_an_interfaces_interrupts(root: Path, interfaces: tuple[str, ...], expected: str) -> None:
    assert irq_cpus(interfaces, str(root)) == CpuSet.parse(expected)


@pytest.mark.parametrize("effective", ["", "nonsense"])
def test_what_is_not_told_is_taken_from_where_it_may_be_delivered(root: Path, effective: str) -> None:
    serve(root, 30, effective, "1")
    assert irq_cpus(["eth0"], str(root)) == CpuSet.parse("1,5")


def test_an_interrupt_that_went_away_serves_nobody(root: Path) -> None:
    (root / "proc/irq/30/effective_affinity_list").unlink()
    (root / "proc/irq/30/smp_affinity_list").unlink()
    assert irq_cpus(["eth0"], str(root)) == CpuSet.parse("5")
    assert irq_cpus(["eth0"], str(root / "nowhere")) == EMPTY


def test_they_are_looked_up_once_a_minute_or_when_others_are_asked_for(root: Path) -> None:
    sampler = IrqSampler(str(root))
    assert sampler.sample(["eth0"], 0.0) == CpuSet.parse("2,5")
    serve(root, 30, "3")
    assert sampler.sample(["eth0"], EVERY_S - 1) == CpuSet.parse("2,5")
    assert sampler.sample(["eth1"], EVERY_S - 1) == CpuSet.parse("6-7")
    assert sampler.sample(["eth0"], EVERY_S) == CpuSet.parse("3,5")
    serve(root, 30, "4")
    assert sampler.sample(["eth0"], 2 * EVERY_S) == CpuSet.parse("4-5")
    assert sampler.sample([], 2 * EVERY_S) == EMPTY


def test_interfaces_without_interrupts_are_told_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler = IrqSampler(str(root))
    with caplog.at_level(logging.WARNING):
        for now in (0.0, EVERY_S, 2 * EVERY_S):
            assert sampler.sample(["bond0"], now) == EMPTY
    assert [getattr(record, "fields", {}) for record in caplog.records] == [{"interfaces": "bond0"}]
