"""A network of namespaces for a `DirectoryNode`: a host, pods with cables into it, a switch with a link, a server.

    pod ── host: eth0 ── switch: link of so many Mbit/s ── server
    pod ──┘

All of them are the test's own; the machine's devices are in none. A namespace lives as long as its process sleeps.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Self

import pytest

from tests.daemon.process import wait_for
from tests.fakes.daemonprocess import ROOT
from tests.fakes.node import Box, DirectoryNode, NodePod

MBIT: Final = 125_000
SERVER: Final = "10.214.1.2"
_PORT: Final = 7001
_SINK: Final = f"""
import selectors, socket
every = selectors.DefaultSelector()
every.register(socket.create_server(("{SERVER}", {_PORT}), backlog=64), selectors.EVENT_READ, True)
print("ready", flush=True)
while True:
    for key, _ in every.select():
        if key.data:
            every.register(key.fileobj.accept()[0], selectors.EVENT_READ, False)
        else:
            try:
                more = key.fileobj.recv(1 << 18)
            except OSError:
                more = b""
            if not more:
                every.unregister(key.fileobj)
                key.fileobj.close()
"""
_SENDER: Final = f"""
import os, socket, sys, time
for group in sys.argv[2:]:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
end = socket.socket()
end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
end.settimeout(60)
end.connect(("{SERVER}", {_PORT}))
block = bytes(1 << 14)
def send(until):
    sent = 0
    while time.monotonic() < until:
        sent += end.send(block)
    return sent
seconds = float(sys.argv[1])
print("ready", flush=True)
begin = float(input())  # the same moment for all, a while from now
send(begin)
print(send(begin + seconds) / seconds)
"""


_RECEIVER: Final = f"""
import socket, sys, time
server = socket.create_server(("", {_PORT}))
server.settimeout(60)
print("ready", flush=True)
end = server.accept()[0]
end.settimeout(60)
def receive(until):
    count = 0
    while time.monotonic() < until:
        count += len(end.recv(1 << 18))
    return count
seconds = float(sys.argv[1])
receive(time.monotonic() + seconds / 2)
print(receive(time.monotonic() + seconds) / seconds)
"""
_SOURCE: Final = f"""
import socket, sys
end = socket.create_connection((sys.argv[1], {_PORT}), 60)
block = bytes(1 << 14)
try:
    while True:
        end.send(block)
except OSError:
    pass
"""


class Netland:
    """Host, pods, switch and server as network namespaces.

    ``link_mbit``: what the switch lets through; None: as much as the machine can.
    """

    def __init__(self, node: DirectoryNode, *, link_mbit: int | None = None) -> None:
        self._node = node
        self._link_mbit = link_mbit
        self._stack = ExitStack()
        self._count = 0
        self.host = self.server = 0
        """Pids whose namespaces they are. The host's mounts are its own, too."""

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
        with self._stack:
            self.host, switch, self.server = self._asleep("--mount"), self._asleep(), self._asleep()
            self._cable(self.host, "eth0", "10.214.0.1/24", switch, "left", "10.214.0.2/24")
            self._cable(switch, "right", "10.214.1.1/24", self.server, "eth0", f"{SERVER}/24")
            for pid in (self.host, switch):
                self.run(pid, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            self.run(self.host, "ip", "route", "add", "default", "via", "10.214.0.2")
            self.run(self.server, "ip", "route", "add", "default", "via", "10.214.1.1")
            self.run(switch, "ip", "route", "add", "10.214.128.0/17", "via", "10.214.0.1")
            if self._link_mbit is not None:
                shape = ("tbf", "rate", f"{self._link_mbit}mbit", "burst", "32k", "latency", "20ms")
                self.run(switch, "tc", "qdisc", "add", "dev", "right", "root", *shape)
            sink = subprocess.Popen(
                [*self.inside(self.server), sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True
            )
            self._stack.callback(_end, sink)
            assert sink.stdout is not None
            with sink.stdout as io:
                assert io.readline() == "ready\n"
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def inside(pid: int) -> tuple[str, ...]:
        """The beginning of a command that is to run in the namespaces of a process."""
        return ("nsenter", "-t", str(pid), "-n", "-m", f"--wd={ROOT}", "--")

    def run(self, pid: int, *message: str) -> str:
        """What a program prints in there. Skips where the machine lacks what is requested."""
        done = subprocess.run([*self.inside(pid), *message], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: {' '.join(message)}: {done.stderr.strip()}")
        return done.stdout

    def join(self, pod: NodePod) -> str:
        """Give a pod a network of its own, whose namespace its pause process holds; the host's end of its cable."""
        self._count += 1
        pause = pod.boxes[0]
        pid = self._asleep(box=pause)
        for hierarchy in ("cpuset", "cpu"):
            self._node.write(pause.group, hierarchy, "cgroup.procs", str(pid))
        name = f"veth{self._count}"
        net = f"10.214.{128 + self._count}"
        self._cable(self.host, name, f"{net}.1/24", pid, "eth0", f"{net}.2/24")
        self.run(pid, "ip", "route", "add", "default", "via", f"{net}.1")
        return name

    def stay(self, pod: NodePod) -> None:
        """Have a pod in the host's network."""
        pause = pod.boxes[0]
        pause.process = subprocess.Popen([*self.inside(self.host), "sleep", "3600"])
        for hierarchy in ("cpuset", "cpu"):
            self._node.write(pause.group, hierarchy, "cgroup.procs", str(pause.process.pid))

    def net_cls(self) -> str:
        """Mount cgroup v1's net_cls where only what runs on the host sees it, with the node's own groups."""
        mount = f"{self._node.root}/net_cls"
        os.mkdir(mount)
        self.run(self.host, "mount", "-t", "cgroup", "-o", "net_cls", "none", mount)
        root = self._node.cgroup_root
        self._stack.callback(
            subprocess.run,
            [*self.inside(self.host), "find", f"{mount}{root}", "-depth", "-type", "d", "-delete"],
            check=False,
        )
        self.groups_in(mount, root, self._node.kubepods, self._node.besteffort, f"{self._node.kubepods}/burstable")
        return mount

    def groups_in(self, mount: str, *groups: str) -> None:
        """Make groups in a hierarchy that is mounted on the host only."""
        self.run(self.host, "mkdir", *(f"{mount}{group}" for group in groups))

    def send(self, *who: tuple[NodePod, Sequence[str]], seconds: float = 1.0) -> list[float]:
        """Megabits a second that each gets through when all send at once; with the groups that each is in."""
        senders = []
        for pod, groups in who:
            pause = pod.boxes[0].process
            pid = pause.pid if pause is not None else self.host
            spaces = ("nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{self.host}/ns/mnt", "--")
            command = [*spaces, sys.executable, "-c", _SENDER, str(seconds), *groups]
            senders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for sender in senders:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "ready\n"
        begin = time.monotonic() + seconds / 2
        for sender in senders:
            assert sender.stdin is not None
            sender.stdin.write(f"{begin}\n")
            sender.stdin.flush()
        answers = [sender.communicate(timeout=60)[0] for sender in senders]
        assert [sender.returncode for sender in senders] == [0] * len(senders)
        return [float(answer) / MBIT for answer in answers]

    def receive(self, pod: NodePod, *, seconds: float = 1.0) -> float:
        """Megabits a second that the server gets through to a pod with a network of its own."""
        pause = pod.boxes[0].process
        assert pause is not None
        spaces = ("nsenter", f"--net=/proc/{pause.pid}/ns/net", "--")
        (address,) = self.run(pause.pid, "hostname", "-I").split()
        command = [*spaces, sys.executable, "-c", _RECEIVER, str(seconds)]
        receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        source = subprocess.Popen([*self.inside(self.server), sys.executable, "-c", _SOURCE, address])
        try:
            return float(receiver.communicate(timeout=60)[0]) / MBIT
        finally:
            source.wait(timeout=60)

    def groups(self, pod: NodePod) -> list[str]:
        """The groups that a process of a pod's container is in, where this machine counts its processes."""
        return [self._node.path(pod.main.group, hierarchy) for hierarchy in ("cpuset", "cpu")]

    def traffic_control(self) -> Mapping[str, str]:
        """All there is of it in the host's namespace, by device; without counters and assigned numbers."""
        links = [line.split(": ")[1].split("@")[0] for line in self.run(self.host, "ip", "-o", "link").splitlines()]
        return {name: self._shown(name) for name in links}

    def _shown(self, name: str) -> str:
        filters = f"filter show dev {name}"
        lines = (f"qdisc show dev {name}", f"class show dev {name}", filters, f"{filters} ingress", f"{filters} egress")
        # Forced, as a device may go between being listed and being read.
        command = [*self.inside(self.host), "tc", "-force", "-batch", "-"]
        return subprocess.run(
            command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, check=False
        ).stdout

    def _asleep(self, *flags: str, box: Box | None = None) -> int:
        process = subprocess.Popen(["unshare", "--net", *flags, "sleep", "3600"])
        if box is not None:
            box.process = process
        else:
            self._stack.callback(_end, process)
        ours = os.stat("/proc/self/ns/net").st_ino
        comm = f"/proc/{process.pid}/comm"
        wait_for(lambda: os.stat(f"/proc/{process.pid}/ns/net").st_ino != ours and _read(comm) == "sleep")
        self.run(process.pid, "ip", "link", "set", "lo", "up")
        return process.pid

    def _cable(self, number: int, name: str, address: str, other: int, other_name: str, other_address: str) -> None:
        peer = ("peer", "name", other_name, "netns", str(other))
        self.run(number, "ip", "link", "add", name, "type", "veth", *peer)
        for pid, end, own in ((number, name, address), (other, other_name, other_address)):
            self.run(pid, "ip", "addr", "add", own, "dev", end)
            self.run(pid, "ip", "link", "set", end, "up")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _end(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
