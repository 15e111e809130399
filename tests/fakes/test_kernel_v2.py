"""The fake v2 kernel against a real one that offers cpu, cpuset, memory and pids; skipped where there is none."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from cgroupfs.files import REAL, FileOps
from tests.fakes.kernel import FakeKernel
from tests.real_cgroups import remove_tree

CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
NAME = f"bypassd-test-kwrite-v2-{os.getpid()}"
FAKE = f"/sys/fs/cgroup/{NAME}"
GROUPS = ("", "/a", "/a/c", "/b")
TEXTS = {
    "cpu.max": [
        *("50000", "50000 20000", "max", "2000 junk", "999", "5000 999", "5000 1000001", "-1", "2000abc", "1.5"),
        *("maxx", "max 5000", "", "\n", " 5000 6000", "17592186044415", "17592186044416", "0x2000", "010000"),
        *("5000\n", "max"),
    ],
    "cpu.weight": ["0", "1", "39", "10000", "10001", "abc", "-1", " 5", "", "\n", "0x10", "100"],
    "cpu.max.burst": ["5", "0", "-1", "abc", "99999", "0"],
    "cpu.idle": ["1", "2", "-1", "0", "abc"],
    "cpuset.cpus": ["0-1", "1", "9999", "abc", "1-0", "0,,1", "\n", "", "0"],
    "cpuset.mems": ["0", "900", "\n", "9999", "abc"],
    "memory.max": ["4097", "1M", "-1", "max", "abc", "1.5M", "", " 8192 ", "max"],
    "memory.high": ["1M", "abc", "-1", "max"],
    "memory.low": ["abc", "4097", "max", "0"],
    "memory.min": ["1M", "abc", "0"],
    "memory.swap.max": ["0", "max", "abc", "1M", "max"],
    "memory.oom.group": ["1", "2", "-1", "abc", "", " 0 "],
    "pids.max": ["-1", "5", "abc", "4194304", "4194305", " 7 ", "max"],
    "cgroup.freeze": ["2", "1", "0", "abc"],
    "cgroup.kill": ["2", "0", "abc"],
    "cgroup.subtree_control": ["+nothing", "cpu", "+rdma", "+cpu +memory", "-cpu -memory"],
}
RANDOM = {
    "cpu.max": ["max", "5000", "50000", "50000 20000", "1000 1000"],
    "cpu.max.burst": ["0", "5000", "20000"],
    "cpu.weight": ["1", "100", "10000"],
    "cpu.idle": ["0", "1"],
    "cpuset.cpus": ["0", "1", "0-1", "\n"],
    "memory.high": ["max", "64M"],
    "memory.low": ["0", "1M"],
}


class Pair:
    def __init__(self, mount: str) -> None:
        major, minor = os.uname().release.split(".")[:2]
        cpus = max(CpuSet.parse(Path("/sys/devices/system/cpu/possible").read_text())) + 1
        nodes = max(CpuSet.parse(Path("/sys/devices/system/node/has_memory").read_text())) + 1
        self.kernel = FakeKernel("v2", cpus=cpus, nodes=nodes, release=(int(major), int(minor)))
        self.real = f"{mount}/{NAME}"
        remove_tree(self.real)
        _build(REAL, os.mkdir, mount, self.real)
        _build(self.kernel, self.kernel.mkdir, "/sys/fs/cgroup", FAKE)

    def write(self, group: str, file: str, text: str) -> str:
        answers = [_answer(REAL, self.real + group, file, text), _answer(self.kernel, FAKE + group, file, text)]
        assert answers[0] == answers[1], f"{group}/{file} <- {text!r}: kernel {answers[0]}, fake {answers[1]}"
        return answers[0][0]


def _build(ops: FileOps, mkdir: Callable[[str], None], mount: str, top: str) -> None:
    names = " ".join(f"+{name}" for name in CONTROLLERS)
    for group in GROUPS:
        above = mount if not group else top + group.rpartition("/")[0]
        ops.write(above, "cgroup.subtree_control", names)
        mkdir(top + group)


def _answer(ops: FileOps, directory: str, file: str, text: str) -> tuple[str, str]:
    return _code(lambda: ops.write(directory, file, text)), _shown(ops, directory, file)


def _code(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "ok"


def _shown(ops: FileOps, directory: str, file: str) -> str:
    try:
        return ops.read(directory, file)
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


@pytest.fixture(scope="module")
def mount() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        if after.startswith("cgroup2 ") and set(CONTROLLERS) <= set(REAL.read(point, "cgroup.controllers").split()):
            break
    else:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no cgroup v2 hierarchy offers {', '.join(CONTROLLERS)}")
    on = REAL.read(point, "cgroup.subtree_control").split()
    try:
        yield point
    finally:
        remove_tree(f"{point}/{NAME}")
        for name in CONTROLLERS:
            if name not in on:
                REAL.write(point, "cgroup.subtree_control", f"-{name}")


@pytest.fixture
def pair(mount: str) -> Iterator[Pair]:
    made = Pair(mount)
    try:
        yield made
    finally:
        remove_tree(made.real)


@pytest.mark.kernel
def test_every_v2_text_gets_the_real_kernels_answer(pair: Pair) -> None:
    for group in ("/b", "/a/c"):
        for file, texts in TEXTS.items():
            for text in texts if os.path.exists(f"{pair.real}{group}/{file}") else ():
                pair.write(group, file, text)


@pytest.mark.kernel
def test_v2_processes_and_directories_get_the_real_kernels_answers(pair: Pair) -> None:
    process, other = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    fakes = {process.pid: pair.kernel.spawn(), other.pid: pair.kernel.spawn()}

    def attach(group: str, pid: int) -> str:
        real = _code(lambda: REAL.write(pair.real + group, "cgroup.procs", str(pid)))
        assert real == _code(lambda: pair.kernel.write(FAKE + group, "cgroup.procs", str(fakes[pid])))
        return real

    try:
        assert attach("/a", process.pid) == "EBUSY"
        assert attach("/a/c", process.pid) == "ok"
        pair.write("/a/c", "cpuset.cpus", "0")
        assert pair.write("/a/c", "cpuset.cpus", "\n") == "ENOSPC"
        assert pair.write("/a/c", "cgroup.subtree_control", "+memory") == "EBUSY"
        assert REAL.read(f"{pair.real}/a", "cgroup.events") == pair.kernel.read(f"{FAKE}/a", "cgroup.events")
        pair.write("/a/c", "cgroup.subtree_control", "+cpu")
        os.mkdir(f"{pair.real}/a/c/d")
        pair.kernel.mkdir(f"{FAKE}/a/c/d")
        assert attach("/a/c/d", other.pid) in {"ENOTSUP", "EOPNOTSUPP"}
        assert attach("/b", other.pid) == "ok"
        for group in ("/b", "/a"):
            codes = {_code(lambda: os.rmdir(pair.real + group)), _code(lambda: pair.kernel.rmdir(FAKE + group))}  # noqa: B023
            assert codes == {"EBUSY"}
    finally:
        for each in (process, other):
            each.kill()
            each.wait()


@pytest.mark.kernel
def test_random_v2_writes_get_the_real_kernels_answers(mount: str) -> None:
    writes = st.sampled_from(sorted(RANDOM)).flatmap(
        lambda file: st.tuples(st.sampled_from(GROUPS), st.just(file), st.sampled_from(RANDOM[file]))
    )

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(writes, max_size=40))
    def compare(sequence: list[tuple[str, str, str]]) -> None:
        pair = Pair(mount)
        try:
            for group, file, text in sequence:
                if os.path.exists(f"{pair.real}{group}/{file}"):
                    pair.write(group, file, text)
                for member in GROUPS:
                    shown = _shown(REAL, pair.real + member, "cpuset.cpus.effective")
                    assert shown == pair.kernel.read(FAKE + member, "cpuset.cpus.effective")
        finally:
            remove_tree(pair.real)

    compare()
