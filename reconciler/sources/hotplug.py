"""Detects CPUs that go online or offline while the daemon runs, and reads the machine's topology again.

A uevent (netlink), or else the sampler's check of the online CPUs within five seconds, is only a hint: the content of
/sys after it counts.

Source: kernel documentation, ABI/stable/sysfs-devices-system-cpu; lib/kobject_uevent.c on the messages' form.
"""

import contextlib
import ctypes
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, final

import trio

from cgroupfs.cpuset import EMPTY, MAX_CPUS, CpuSet
from cgroupfs.errors import SourceError
from cgroupfs.log import get_log
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.model import SourceStatus
from state.topology import Topology
from state.topology_sysfs import read_online, read_topology

_LOG: Final = get_log("hotplug")
NAME: Final = "CPU hot-plug"
_NETLINK_KOBJECT_UEVENT: Final = 15
_KERNEL: Final = 1
"""The multicast group of the kernel's own messages (2 is udev's)."""
_SO_ATTACH_FILTER: Final = 26
_LARGEST: Final = 8192
_OFFLINE: Final = re.compile(rb"offline@/devices/system/cpu/cpu(\d{1,4})\0")
_SYNTHETIC: Final = b"\0SYNTH_UUID="
"""A write to a device's uevent file has repeated the message: nothing has happened."""
_SETTLE_S: Final = 0.05
"""CPUs go offline one by one (switching SMT off, a VM that shrinks), and the kernel narrows the cpusets a moment later.
"""


class CpuChange(NamedTuple):
    """What happened. ``taken``: CPUs that went offline since the last report, also those that are back by now."""

    before: Topology
    after: Topology
    taken: CpuSet

    @property
    def back(self) -> CpuSet:
        """CPUs that are online now and were offline, if only for a moment."""
        return self.after.online - (self.before.online - self.taken)

    @property
    def describe(self) -> str:
        gone = self.taken - self.after.online
        parts = [f"CPU {gone} went offline"] if gone else []
        if self.back:
            parts.append(f"CPU {self.back} came online")
        return f"{' and '.join(parts) or 'the topology changed'}; online now: {self.after.online}"


@final
class HotplugSource:
    """Reports changes of the online CPUs. ``on_change`` is awaited for each change, one at a time."""

    def __init__(
        self,
        topology: Topology,
        on_change: Callable[[CpuChange], Awaitable[None]],
        *,
        root: str = "/",
        connect: "Callable[[], socket.socket] | None" = None,
        read: Callable[[str], Topology] = read_topology,
    ) -> None:
        """``connect`` makes the socket that uevents are read from; `OSError` means that they are unavailable."""
        self.topology = topology
        self.events = 0
        self.changes = 0
        self.problem: str | None = None
        self._root = root
        self._on_change = on_change
        self._connect = connect or open_uevents
        self._read = read
        self._no_events = "not running"
        self._taken = EMPTY
        self._hint = WakeUp()
        self._online = str(topology.online)

    def status(self) -> SourceStatus:
        how = f"polled with each CPU sample ({self._no_events})" if self._no_events else "kernel events"
        return SourceStatus(name=NAME, ok=self.problem is None, age_s=0.0, detail=self.problem or how)

    def check(self) -> None:
        """Check whether the list of online CPUs has changed: 5 µs, for the sampler."""
        online = read_online(self._root)
        # After a failed reading a CPU that went offline and is back by now is still to be reported.
        if self.problem is not None or (online is not None and online != self._online):
            self._hint.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            try:
                listener = self._connect()
            except OSError as exc:
                self._no_events = f"no uevents: {exc.strerror or exc}"
            else:
                self._no_events = ""
                nursery.start_soon(self._listen, listener)
            task_status.started()
            # What changed between the first reading of the topology and now.
            self.check()
            while True:
                await self._hint.wait(settle_s=_SETTLE_S)
                await self._read_again()

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                # A checkpoint for each message: others can send, too.
                await trio.lowlevel.wait_readable(listener)
                with contextlib.suppress(BlockingIOError):
                    self._take(_received(listener))

    def _take(self, message: bytes | None) -> None:
        self.events += 1
        match = _OFFLINE.match(message) if message is not None and _SYNTHETIC not in message else None
        if match is not None and int(match[1]) < MAX_CPUS:
            # It may be online again before /sys is read: on v1 every cpuset has lost it all the same.
            self._taken |= CpuSet([int(match[1])])
        self._hint.set()

    async def _read_again(self) -> None:
        taken, self._taken = self._taken, EMPTY
        before = self.topology
        try:
            # In a thread: 1,024 CPUs take 30 ms.
            after = await in_worker(self._read, self._root)
        except SourceError as exc:
            # The last topology remains; the sampler checks again.
            self._taken |= taken
            if self.problem is None:
                _LOG.warning(str(exc))
            self.problem = str(exc)
            return
        self.problem = None
        # In the file's form, which need not be the normal form; compared as text because there are many checks a
        # second.
        self._online = read_online(self._root) or str(after.online)
        if CpuSet.parse(self._online) != after.online:
            # Changed during the reading.
            self._hint.set()
        taken = (taken & before.online) | (before.online - after.online)
        if after == before and not taken:
            return
        self.topology = after
        self.changes += 1
        await self._on_change(CpuChange(before, after, taken))


def _received(listener: socket.socket) -> bytes | None:
    """One message of the kernel; None when some were lost, which also causes a reading. Errors: `BlockingIOError`."""
    try:
        message, sender = listener.recvfrom(_LARGEST)
    except BlockingIOError:
        raise
    except OSError:
        # ENOBUFS: the kernel has dropped messages (netlink(7)).
        return None
    # A netlink address: port and groups. The kernel's port is 0; a pod on the host's network with CAP_NET_ADMIN can
    # send to the same group.
    if sender and sender[0]:
        raise BlockingIOError
    return message


def open_uevents() -> socket.socket:
    """The kernel's uevents that begin with ``online@`` or ``offline@`` (CPUs, memory), without blocking.

    Errors: `OSError` without netlink (some sandboxes).
    """
    # A filter in the kernel: each container causes dozens of uevents for its network devices, which need no wake-up.
    # struct sock_filter: code, jump if true, jump if false, value. Loads are big-endian.
    program = b"".join(
        struct.pack("HBBI", *row)
        for row in (
            (0x20, 0, 0, 0),  # the first four bytes
            (0x15, 1, 0, int.from_bytes(b"onli", "big")),
            (0x15, 0, 1, int.from_bytes(b"offl", "big")),
            (0x06, 0, 0, 0xFFFFFFFF),  # take it whole
            (0x06, 0, 0, 0),
        )
    )
    buffer = ctypes.create_string_buffer(program)
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    listener = socket.socket(socket.AF_NETLINK, kind, _NETLINK_KOBJECT_UEVENT)
    try:
        attached = struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
        listener.bind((0, _KERNEL))
    except OSError:
        listener.close()
        raise
    return listener
