"""The kernel's texts about block devices, and which of them are disks: /proc/diskstats, blkio, io.stat.

Source: kernel documentation, admin-guide/iostats, admin-guide/cgroup-v1/blkio-controller, admin-guide/cgroup-v2.
"""

import os
from typing import Final, NamedTuple, final

from cgroupfs.bounded import digits
from cgroupfs.lines import lines_of

_SECTOR: Final = 512
"""Of /proc/diskstats, whatever the device's own sectors are (kernel documentation, block/stat)."""
_NOT_DISKS: Final = ("loop", "ram", "zram", "fd", "sr", "nbd")
_REMEMBERED_S: Final = 60.0


class IoCounters(NamedTuple):
    """Since the device or group began. Bytes and requests."""

    read_bytes: int = 0
    written_bytes: int = 0
    ops: int = 0

    def plus(self, other: "IoCounters") -> "IoCounters":
        return IoCounters(
            self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes, self.ops + other.ops
        )


class DiskTimes(NamedTuple):
    """One line of /proc/diskstats. ``busy_ms``: requests were there; ``waited_ms``: all requests' times together."""

    io: IoCounters
    busy_ms: int
    waited_ms: int


def parse_diskstats(text: str) -> dict[str, tuple[str, DiskTimes]]:
    """By kernel name: device number and times, of everything that has ever had a request. Short lines are left out."""
    diskstats: dict[str, tuple[str, DiskTimes]] = {}
    for line in lines_of(text):
        parts = line.split()
        if len(parts) < 14:
            continue
        try:
            reads, _, read_sectors, read_ms, writes, _, write_sectors, write_ms, _, busy_ms = map(int, parts[3:13])
        except ValueError:
            continue
        if reads or writes:
            io = IoCounters(read_sectors * _SECTOR, write_sectors * _SECTOR, reads + writes)
            diskstats[parts[2]] = f"{parts[0]}:{parts[1]}", DiskTimes(io, busy_ms, read_ms + write_ms)
    return diskstats


def parse_io_stat(text: str) -> dict[str, IoCounters]:
    """v2's ``io.stat`` by device number."""
    counters: dict[str, IoCounters] = {}
    for line in lines_of(text):
        device, *parts = line.split() or ("",)
        if not device:
            continue
        counts = dict(word.partition("=")[::2] for word in parts)
        try:
            counters[device] = IoCounters(
                int(counts.get("rbytes", 0)),
                int(counts.get("wbytes", 0)),
                int(counts.get("rios", 0)) + int(counts.get("wios", 0)),
            )
        except ValueError:
            continue
    return counters


def parse_blkio(text: str) -> dict[str, dict[str, int]]:
    """A v1 blkio file by device number, then Read, Write, Sync, Async, Discard, Total."""
    numbers: dict[str, dict[str, int]] = {}
    for line in lines_of(text):
        parts = line.split()
        if len(parts) == 3 and (count := digits(parts[2])) is not None:
            numbers.setdefault(parts[0], {})[parts[1]] = count
    return numbers


def blkio(service_bytes: str, serviced: str) -> dict[str, IoCounters]:
    """v1's two files together."""
    ops = parse_blkio(serviced)
    return {
        device: IoCounters(
            kinds.get("Read", 0),
            kinds.get("Write", 0),
            ops.get(device, {}).get("Read", 0) + ops.get(device, {}).get("Write", 0),
        )
        for device, kinds in parse_blkio(service_bytes).items()
    }


@final
class DiskDevices:
    """Which device numbers are disks with nothing below them, from /sys; remembered for a minute."""

    def __init__(self, root: str = "/") -> None:
        self._base = f"{root.rstrip('/')}/sys/dev/block"
        self._known: dict[str, bool] = {}
        self._until = 0.0

    def refresh(self, now: float) -> None:
        if now >= self._until:
            self._known.clear()
            self._until = now + _REMEMBERED_S

    def counts(self, device: str) -> bool:
        """True for a whole disk that is not made of others, and for a device that /sys does not have."""
        counts = self._known.get(device)
        if counts is None:
            counts = self._known[device] = self._is_whole_disk(device)
        return counts

    def _is_whole_disk(self, device: str) -> bool:
        path = f"{self._base}/{device}"
        try:
            if os.path.basename(os.path.realpath(path)).startswith(_NOT_DISKS):
                return False
            if os.path.exists(f"{path}/partition"):
                return False
            # A request to a stacked device (LVM, md, dm-crypt) is counted there and again on each disk below it.
            return not os.listdir(f"{path}/slaves")
        except OSError:
            return True


def whole_disks(root: str = "/") -> tuple[str, ...]:
    """The device numbers of all disks with nothing below them; empty if /sys is unreadable."""
    devices = DiskDevices(root)
    try:
        names = os.listdir(f"{root.rstrip('/')}/sys/dev/block")
    except OSError:
        return ()
    return tuple(sorted(name for name in names if devices.counts(name)))
