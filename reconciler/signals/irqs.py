"""CPUs that serve the interrupts of chosen network interfaces: each packet interrupts work on them.

**Cost**: one listing and two directories an interface, and one read of 3 µs an interrupt, once a minute.
Source: kernel documentation, ABI/testing/sysfs-bus-pci (``msi_irqs``) and core-api/irq/irq-affinity.
"""

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, final

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.log import get_log

_LOG: Final = get_log("irqs")
EVERY_S: Final = 60.0
"""Interrupts that irqbalance moves are detected by then; a past choice of CPUs is not changed for them."""
_CARRIERS: Final = 2
"""Where ``msi_irqs`` may be: at the device itself, or at the bus device that carries it (virtio); above are bridges."""
_MOST: Final = 4096
"""Interrupts of one device."""


@final
class IrqSampler:
    """Keeps the last result while the same interfaces are requested."""

    def __init__(self, root: str = "/") -> None:
        self._root = root.rstrip("/")
        self._cpus = EMPTY
        self._interfaces: tuple[str, ...] = ()
        self._at: float | None = None

    def sample(self, interfaces: Sequence[str], now: float) -> CpuSet:
        """The CPUs of these interfaces (names or patterns), read again if the last reading is `EVERY_S` old.

        Interfaces without interrupts of their own (bridges, loopback) have no CPUs.
        """
        names = tuple(interfaces)
        if names != self._interfaces or self._at is None or not 0.0 <= now - self._at < EVERY_S:
            cpus = irq_cpus(names, self._root) if names else EMPTY
            # Once, not each minute.
            if names and not cpus and (names != self._interfaces or self._cpus):
                _LOG.warning("no interrupts of the network interfaces found", interfaces=", ".join(names))
            self._cpus, self._interfaces, self._at = cpus, names, now
        return self._cpus


def irq_cpus(interfaces: Sequence[str], root: str = "/") -> CpuSet:
    """The CPUs that serve the interrupts of all matching network interfaces; an unreadable interface has none."""
    net = os.path.join(root or "/", "sys/class/net")
    try:
        names = sorted(os.listdir(net))
    except OSError:
        return EMPTY
    cpus = EMPTY
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in interfaces):
            for number in _interrupts(os.path.join(net, name, "device")):
                cpus |= _served_by(os.path.join(root or "/", "proc/irq", number))
    return cpus


def _interrupts(device: str) -> Iterator[str]:
    """The numbers of a device's interrupts, or of the nearest device around it that has some."""
    if not os.path.exists(device):
        return
    place = os.path.realpath(device)
    for _ in range(_CARRIERS):
        try:
            numbers = [name for name in os.listdir(os.path.join(place, "msi_irqs")) if name.isdecimal()]
        except OSError:
            numbers = []
        if numbers:
            yield from sorted(numbers, key=int)[:_MOST]
            return
        place = os.path.dirname(place)


def _served_by(directory: str) -> CpuSet:
    """Where an interrupt is delivered; on kernels without that file, where it may be delivered."""
    for name in ("effective_affinity_list", "smp_affinity_list"):
        try:
            with open(os.path.join(directory, name), encoding="ascii", newline="\n") as file:
                cpus = CpuSet.parse(file.read().strip())
        except (OSError, ValueError):
            continue
        if cpus:
            return cpus
    return EMPTY
