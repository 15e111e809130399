"""The source of CPU changes: a made /sys whose online list changes, and a socket with the kernel's messages."""

import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import trio

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import SourceError
from reconciler.sources.hotplug import CpuChange, HotplugSource, open_uevents
from state.topology import Topology
from state.topology_sysfs import read_topology
from tests.until import until


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def set_online(root: Path, online: str) -> None:
    directory = root / "sys/devices/system/cpu"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "present").write_text("0-3\n")
    (directory / "online").write_text(f"{online}\n")


def uevent(action: str, device: str = "cpu/cpu3", *more: str) -> bytes:
    path = f"/devices/system/{device}"
    lines = [f"{action}@{path}", f"ACTION={action}", f"DEVPATH={path}", "SUBSYSTEM=cpu", *more, "SEQNUM=814", ""]
    return "\0".join(lines).encode()


class Watching:
    """A source on a made node, its reports, and the kernel's end of its socket."""

    def __init__(self, root: Path, *, read: Callable[[str], Topology] = read_topology, deaf: bool = False) -> None:
        self.root = root
        set_online(root, "0-3")
        self.kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self.ours = ours
        self.told: list[CpuChange] = []
        connect = self._refuse if deaf else lambda: ours
        self.source = HotplugSource(read_topology(str(root)), self._note, root=str(root), connect=connect, read=read)

    def _refuse(self) -> socket.socket:
        raise OSError(93, "Protocol not supported")

    async def _note(self, change: CpuChange) -> None:
        self.told.append(change)

    async def until(self, count: int) -> list[CpuChange]:
        await until(lambda: len(self.told) >= count)
        return self.told

    def close(self) -> None:
        self.kernel.close()
        self.ours.close()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    item = Watching(tmp_path)
    yield item
    item.close()


async def test_an_event_of_the_kernel_has_the_topology_read_again(
    nursery: trio.Nursery, watching: Watching, tmp_path: Path
) -> None:
    await nursery.start(watching.source.run)
    set_online(tmp_path, "0-2")
    watching.kernel.send(uevent("offline"))
    (gone,) = await watching.until(1)
    assert (gone.taken, gone.back) == (cpus("3"), EMPTY)
    assert gone.after.online == watching.source.topology.online == cpus("0-2")
    assert gone.after.offline == cpus("3")
    assert gone.describe == "CPU 3 went offline; online now: 0-2"
    set_online(tmp_path, "0-3")
    watching.kernel.send(uevent("online"))
    _, back = await watching.until(2)
    assert (back.taken, back.back) == (EMPTY, cpus("3"))
    assert back.describe == "CPU 3 came online; online now: 0-3"
    assert watching.source.changes == 2


async def test_without_events_the_tickers_look_finds_it(nursery: trio.Nursery, tmp_path: Path) -> None:
    watching = Watching(tmp_path, deaf=True)
    await nursery.start(watching.source.run)
    assert watching.source.status().detail == "polled with each CPU sample (no uevents: Protocol not supported)"
    watching.source.check()
    set_online(tmp_path, "0-1,3")
    watching.source.check()
    (change,) = await watching.until(1)
    assert (change.taken, change.after.online) == (cpus("2"), cpus("0-1,3"))
    watching.close()


async def test_a_cpu_that_went_and_came_back_at_once_is_told_all_the_same(
    nursery: trio.Nursery, watching: Watching
) -> None:
    await nursery.start(watching.source.run)
    watching.kernel.send(uevent("offline"))
    watching.kernel.send(uevent("online"))
    (change,) = await watching.until(1)
    assert change.before == change.after
    assert (change.taken, change.back) == (cpus("3"), cpus("3"))
    assert change.describe == "CPU 3 came online; online now: 0-3"


async def test_many_cpus_in_a_row_are_one_change(nursery: trio.Nursery, watching: Watching, tmp_path: Path) -> None:
    await nursery.start(watching.source.run)
    set_online(tmp_path, "0")
    for cpu in (1, 2, 3):
        watching.kernel.send(uevent("offline", f"cpu/cpu{cpu}"))
    (change,) = await watching.until(1)
    assert change.taken == cpus("1-3")
    assert watching.source.events == 3


@pytest.mark.parametrize(
    "message",
    [
        uevent("online", "memory/memory32"),
        uevent("offline", "cpu/cpu3", "SYNTH_UUID=0"),
        uevent("offline", "cpu/cpu9999"),
        uevent("offline", "cpu/cpufreq"),
        b"",
        b"offline@/devices/system/cpu/cpu3",
    ],
    ids=["memory", "sent again by hand", "no such CPU", "no CPU", "empty", "cut off"],
)
async def test_an_event_that_changes_nothing_tells_nothing(
    nursery: trio.Nursery, watching: Watching, tmp_path: Path, message: bytes
) -> None:
    await nursery.start(watching.source.run)
    watching.kernel.send(message)
    await until(lambda: bool(watching.source.events))
    # What follows it is reported first.
    set_online(tmp_path, "0-2")
    watching.source.check()
    (change,) = await watching.until(1)
    assert change.taken == cpus("3")


async def test_what_changed_before_it_ran_is_found_at_its_start(
    nursery: trio.Nursery, watching: Watching, tmp_path: Path
) -> None:
    set_online(tmp_path, "0,2-3")
    await nursery.start(watching.source.run)
    (change,) = await watching.until(1)
    assert change.taken == cpus("1")


async def test_a_topology_that_cannot_be_read_keeps_the_last_one_until_it_can(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    failing = True

    def read(root: str) -> Topology:
        if failing:
            raise SourceError("topology", "no online CPU found")
        return read_topology(root)

    watching = Watching(tmp_path, read=read)
    await nursery.start(watching.source.run)
    set_online(tmp_path, "0-2")
    watching.kernel.send(uevent("offline"))
    await until(lambda: not watching.source.status().ok)
    assert watching.source.topology.online == cpus("0-3")
    failing = False
    watching.source.check()
    (change,) = await watching.until(1)
    assert change.taken == cpus("3")
    assert watching.source.status().ok
    assert watching.source.status().detail == "kernel events"
    watching.close()


async def test_a_cpu_that_came_back_while_the_topology_could_not_be_read_is_told_by_the_next_check(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    failing = True

    def read(root: str) -> Topology:
        if failing:
            raise SourceError("topology", "no online CPU found")
        return read_topology(root)

    watching = Watching(tmp_path, read=read)
    await nursery.start(watching.source.run)
    watching.kernel.send(uevent("offline"))
    watching.kernel.send(uevent("online"))
    await until(lambda: not watching.source.status().ok)
    failing = False
    watching.source.check()
    (change,) = await watching.until(1)
    assert (change.taken, change.back) == (cpus("3"), cpus("3"))
    assert watching.source.status().ok
    watching.close()


class Forged:
    """A socket whose messages another process has sent to the group of the kernel's."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner = inner
        self.port = 4711

    def fileno(self) -> int:
        return self.inner.fileno()

    def recvfrom(self, size: int) -> tuple[bytes, tuple[int, int]]:
        return self.inner.recv(size), (self.port, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.inner.close()


async def test_a_message_that_another_process_has_sent_is_no_event(nursery: trio.Nursery, watching: Watching) -> None:
    forged = Forged(watching.ours)
    watching.source._connect = lambda: forged  # type: ignore[assignment,return-value]
    await nursery.start(watching.source.run)
    for device in ("cpu/cpu1", "cpu/cpu2"):
        watching.kernel.send(uevent("offline", device))
    await until(lambda: not select.select([watching.ours], [], [], 0)[0])
    assert watching.source.events == 0
    forged.port = 0
    watching.kernel.send(uevent("offline"))
    (change,) = await watching.until(1)
    assert change.taken == cpus("3")


async def test_a_made_list_that_is_not_the_kernels_normal_form_is_no_change_each_second(
    nursery: trio.Nursery, watching: Watching, tmp_path: Path
) -> None:
    await nursery.start(watching.source.run)
    set_online(tmp_path, "0,1,2")
    watching.source.check()
    await watching.until(1)
    watching.source.check()
    set_online(tmp_path, "0-3")
    watching.source.check()
    _, back = await watching.until(2)
    assert back.back == cpus("3")


@pytest.mark.kernel
def test_the_kernel_hands_over_events_of_cpus_and_drops_the_others() -> None:
    """Writing into ``uevent`` has the message sent again; no CPU changes."""
    path = "/sys/devices/system/cpu/cpu0/uevent"
    try:
        listener = open_uevents()
    except OSError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no uevents here: {exc.strerror}")
    with listener:
        listener.settimeout(60)
        try:
            for action in ("change", "online"):
                with open(path, "w") as file:
                    file.write(action)
        except OSError as exc:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: {path} cannot be written: {exc.strerror}")
        message = listener.recv(8192)
    # A reported "change" would have been the first.
    assert message.startswith(b"online@/devices/system/cpu/cpu0\0")
    assert b"\0SYNTH_UUID=" in message
    assert os.path.exists(path)
