"""Host workloads on this machine's kernel: processes in groups of this test, and no write to any of them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from inotify_simple import INotify, flags

from cgroupfs.hierarchy import Hierarchy
from reconciler.signals.host_config import HostWorkloadConfig
from reconciler.signals.host_meter import HostMeter
from state.hosts import CountsAs, HostWorkload, HostWorkloads
from tests.cgroupfs.kernelgroup import kernel_groups, remove_tree

pytestmark = pytest.mark.kernel
CONTROLLERS = ("cpu", "cpuacct", "memory")
WRITES = flags.MODIFY | flags.CREATE | flags.DELETE | flags.ATTRIB | flags.MOVED_FROM | flags.MOVED_TO
DEADLINE_S = 60.0
SPIN = """
import time
while True:
    end = time.process_time() + 0.002
    while time.process_time() < end:
        pass
    time.sleep(0.02)
"""


class Host:
    """Groups and processes beside the pods."""

    def __init__(self, stack: ExitStack, hierarchy: Hierarchy, top: str) -> None:
        self.stack, self.hierarchy, self.top = stack, hierarchy, top

    def directories(self, path: str) -> list[str]:
        return sorted({self.hierarchy.directory(name, path) for name in CONTROLLERS})

    def group(self, name: str) -> str:
        path = f"{self.top}/{name}"
        for directory in self.directories(path):
            os.mkdir(directory)
        return path

    def work(self, *paths: str, user: int = 0) -> subprocess.Popen[bytes]:
        """A process that uses some of a CPU now and then, in these groups."""
        # Not Popen's user: another one may have no right to this interpreter.
        text = f"import os\nos.setuid({user})\nprint(flush=True)\n{SPIN}"
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        assert process.stdout is not None
        self.stack.callback(process.stdout.close)
        assert process.stdout.readline()
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        for path in paths:
            for directory in self.directories(path):
                Path(directory, "cgroup.procs").write_text(str(process.pid))
        return process


@pytest.fixture
def host() -> Iterator[Host]:
    with kernel_groups("host", *CONTROLLERS) as (hierarchy, top), ExitStack() as stack:
        yield Host(stack, hierarchy, top)


async def until(meter: HostMeter, name: str, *signals: str) -> HostWorkload:
    """Read until all of these are known of an entry."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        read: HostWorkloads = await meter.read(time.monotonic())
        entry = read.entries[name]
        if all(signal in entry.values for signal in signals) and (entry.value("cpu.use") or 0) > 0:
            return entry
        assert time.monotonic() < deadline, entry
        await trio.sleep(0.2)


def meter_of(host: Host, kubepods: str, **entries: tuple[CountsAs, str]) -> HostMeter:
    configs = {name: HostWorkloadConfig(match=match, counts_as=role) for name, (role, match) in entries.items()}
    return HostMeter(configs, host.hierarchy, kubepods)


async def test_a_group_is_measured_and_nothing_is_written_to_it(host: Host) -> None:
    path = host.group("db")
    host.work(path)
    with INotify() as watch:
        for directory in (*host.directories(path), *host.directories(host.top)):
            watch.add_watch(directory, WRITES)
        meter = meter_of(host, "/kubepods", db=(CountsAs.VICTIM, f"cgroup:{host.top}/d*"))
        try:
            entry = await until(meter, "db", "cpu.use", "memory.use")
        finally:
            await meter.aclose()
        assert (entry.groups, entry.processes) == ((path,), 1)
        assert entry.cpus
        assert watch.read(timeout=0) == []
        # The watch does see a write.
        Path(host.directories(path)[0], "cgroup.clone_children").write_text("0")
        assert watch.read(timeout=0)


async def test_a_group_made_again_by_its_name_is_measured_anew(host: Host) -> None:
    path = host.group("db")
    first = host.work(path)
    meter = meter_of(host, "/kubepods", db=(CountsAs.BE, f"cgroup:{path}"))
    try:
        await until(meter, "db", "cpu.use")
        first.kill()
        first.wait()
        for directory in host.directories(path):
            remove_tree(directory)
        gone = await meter.read(time.monotonic())
        assert not gone.entries["db"].present
        host.group("db")
        host.work(path)
        assert (await until(meter, "db", "cpu.use")).processes == 1
    finally:
        await meter.aclose()


async def test_a_user_cannot_hide_in_a_group_that_is_named_like_the_pods(host: Host) -> None:
    kubepods, feigned = host.group("pods"), host.group("kubepods")
    uid = 60_000 + os.getpid() % 5_000
    pod, hidden = host.work(kubepods, user=uid), host.work(feigned, user=uid)
    meter = meter_of(host, kubepods, ci=(CountsAs.BE, f"user:{uid}"), all=(CountsAs.BE, f"cgroup:{host.top}/*"))
    try:
        entry = await until(meter, "ci", "cpu.use", "memory.use")
        every = await until(meter, "all", "cpu.use")
    finally:
        await meter.aclose()
    assert entry.processes == 1
    assert every.groups == (feigned,)
    assert {pod.poll(), hidden.poll()} == {None}
