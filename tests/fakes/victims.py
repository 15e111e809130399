"""Pods to be ended: real groups of this machine's kernel with real processes in them, made and removed by a test."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.subtree import Subtree
from state.eviction import EvictionOrder, EvictionTarget
from tests.cgroupfs.kernelgroup import kernel_groups, remove_tree

CONTROLLERS = ("cpu", "memory", "pids", "freezer", "unified")

IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(999)"
HEEDS_USR1 = (
    "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(0)); print(flush=True); signal.pause()"
)
# A parent that never waits for its children and never stops making some.
FORKS = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift; exec "$@"'


class Victim:
    """One pod: a group in several hierarchies, with one group below it for its container."""

    def __init__(self, hierarchy: Hierarchy, group: str) -> None:
        self.hierarchy = hierarchy
        self.group = group
        self.started: list[subprocess.Popen[bytes]] = []

    @property
    def target(self) -> EvictionTarget:
        with Subtree.open(self.hierarchy, self.group) as tree:
            return EvictionTarget(group=self.group, inodes=tree.inodes, grace_s=5.0)

    def directory(self, controller: str, below: str = "/c") -> str:
        return self.hierarchy.directory(controller, self.group + below)

    def run(self, *command: str, below: str = "/c") -> subprocess.Popen[bytes]:
        """Start a program inside, and wait until it is that program that runs there."""
        files = [f"{self.directory(controller, below)}/cgroup.procs" for controller in CONTROLLERS]
        process = subprocess.Popen(["/bin/sh", "-c", _ENTER, "sh", *files, "--", *command], stdout=subprocess.PIPE)
        self.started.append(process)
        parts = [word.encode() for word in command]
        deadline = time.monotonic() + 60
        while Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:-1] != parts:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return process

    def python(self, text: str) -> subprocess.Popen[bytes]:
        process = self.run(sys.executable, "-S", "-E", "-c", text)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def sleep(self) -> subprocess.Popen[bytes]:
        return self.run("/bin/sleep", "999")

    def pids(self) -> set[int]:
        with Subtree.open(self.hierarchy, self.group) as tree:
            return {pid for group in tree.groups() for pid in group.pids()}

    def empty(self) -> bool:
        with Subtree.open(self.hierarchy, self.group) as tree:
            return not any(tree.scan())

    def freeze(self, below: str = "") -> None:
        with open(f"{self.directory('freezer', below)}/freezer.state", "w", encoding="ascii") as file:
            file.write("FROZEN")
        deadline = time.monotonic() + 60
        while self.frozen(below) != "FROZEN" and time.monotonic() < deadline:
            time.sleep(0.005)

    def frozen(self, below: str = "") -> str:
        with open(f"{self.directory('freezer', below)}/freezer.state", encoding="ascii") as file:
            return file.read().strip()

    def limit(self, processes: int) -> None:
        with open(f"{self.directory('pids', '')}/pids.max", "w", encoding="ascii") as file:
            file.write(str(processes))

    def end(self) -> None:
        with Subtree.open(self.hierarchy, self.group) as tree:
            deadline = time.monotonic() + 60
            while any(tree.scan()) and time.monotonic() < deadline:
                tree.thaw()
                for pid in self.pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.reap()
        self.reap()

    def reap(self) -> None:
        """Our own children stay zombies until they are waited for."""
        for process in self.started:
            process.poll()
            if process.returncode is not None and process.stdout is not None:
                process.stdout.close()


@contextmanager
def a_victim(name: str) -> Iterator[Victim]:
    """A pod of this machine's kernel, or a skip that says what is missing."""
    with kernel_groups(f"{name}", *CONTROLLERS) as (hierarchy, group):
        victim = Victim(hierarchy, group)
        try:
            for controller in CONTROLLERS:
                os.makedirs(victim.directory(controller), exist_ok=True)
            yield victim
        finally:
            victim.end()
            for controller in CONTROLLERS:
                remove_tree(victim.directory(controller, ""))
                os.makedirs(victim.directory(controller, ""), exist_ok=True)  # `kernel_groups` removes it


def an_order(victim: Victim, **more: object) -> EvictionOrder:
    values: dict[str, object] = {
        "id": "order-1",
        "uid": victim.group.rpartition("-")[2],
        "title": "default/victim",
        "namespace": "default",
        "name": "victim",
        "owner": None,
        "cause": "node_memory",
        "evidence": "memory 91 %",
        "decided_s": time.time(),
    }
    make: Callable[..., EvictionOrder] = EvictionOrder
    return make(**{**values, **more})
