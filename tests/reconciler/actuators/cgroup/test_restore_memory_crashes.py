"""SIGKILL at any write of memory settings, reclaim included: restore writes the values before, and kills no process."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.actuators.acting import BE, GROUP, POD, Acting, Stopped

MEGA = 1 << 20
PATHS = ("/kubepods", BE, POD, GROUP)
Lives = list[dict[str, dict[str, Value]]]
LIVES: dict[str, Lives] = {
    "v1": [
        {
            GROUP: {
                "memory.max": 64 * MEGA,
                "memory.soft": 60 * MEGA,
                "cpu.mems": CpuSet([1]),
                "cpu.mems_migrate": 1,
            },
            BE: {"memory.soft": 200 * MEGA, "memory.max": 220 * MEGA},
        },
        {GROUP: {"memory.max": 48 * MEGA, "cpu.mems": CpuSet([0])}, BE: {"memory.soft": 100 * MEGA}},
        {GROUP: {"memory.soft": 10 * MEGA, "cpu.mems": CpuSet([1]), "cpu.mems_migrate": 1}},
    ],
    "v2": [
        {
            GROUP: {
                "memory.max": 64 * MEGA,
                "memory.high": 60 * MEGA,
                "memory.oom_group": 1,
                "cpu.mems": CpuSet([1]),
            },
            BE: {"memory.high": 200 * MEGA, "memory.max": 220 * MEGA},
            POD: {"memory.min": 5 * MEGA, "memory.low": 9 * MEGA},
        },
        {GROUP: {"memory.max": 48 * MEGA, "memory.low": 8 * MEGA}, BE: {"memory.high": 100 * MEGA}},
        {GROUP: {"memory.high": 10 * MEGA, "memory.min": 4 * MEGA}, "/kubepods": {"memory.low": 9 * MEGA}},
    ],
}


def made(root: Path, mode: Mode) -> tuple[FakeKernel, Hierarchy]:
    """Two NUMA nodes, one BE pod whose container has more page cache than the first limit leaves room for."""
    kernel = FakeKernel(mode, root=str(root), cpus=4, nodes=2)
    kernel.install()
    hierarchy = Hierarchy.detect(str(root))
    for path in PATHS:
        kernel.make_group(path)
        kernel.write(hierarchy.directory("cpuset", path), "cpuset.cpus", "0-3")
        kernel.write(hierarchy.directory("cpuset", path), "cpuset.mems", "0-1")
    pid = str(kernel.spawn())
    for directory in {hierarchy.directory(name, GROUP) for name in ("cpuset", "memory")}:
        kernel.write(directory, "cgroup.procs", pid)
    kernel.charge(hierarchy.directory("memory", GROUP), anon=32 * MEGA, cache=64 * MEGA)
    return kernel, hierarchy


def settings(kernel: FakeKernel, hierarchy: Hierarchy) -> dict[tuple[str, str], str]:
    """The text of every file that the lives may touch."""
    texts = {}
    for path in PATHS:
        for name, knob in CATALOG.items():
            version = hierarchy.version(knob.controller)
            file = knob.file(version) if version is not None else None
            if file is not None and name.startswith(("memory.", "cpu.mems")):
                texts[path, name] = kernel.read(hierarchy.directory(knob.controller, path), file)
    return texts


async def live(acting: Acting, wanted: Mapping[str, Mapping[str, Value]]) -> None:
    """One look with these settings, and nothing anywhere else."""
    await acting.actuator.apply([acting.target(path, wanted.get(path, {})) for path in PATHS])


@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize("converge", [True, False], ids=["the next life goes on first", "at once"])
async def test_memory_is_as_before_after_a_kill_at_any_write(tmp_path: Path, mode: Mode, converge: bool) -> None:
    stopped_at = 0
    while True:
        directory = tmp_path / f"at-{stopped_at}"
        directory.mkdir()
        kernel, hierarchy = made(directory, mode)
        before = settings(kernel, hierarchy)
        acting, ended = Acting(kernel, hierarchy, directory, writes=stopped_at), True
        try:
            for wanted in LIVES[mode]:
                await live(acting, wanted)
        except* Stopped:
            ended = False
        if ended:
            touched = {place for place, text in settings(kernel, hierarchy).items() if text != before[place]}
            last = {(path, knob) for path, wanted in LIVES[mode][-1].items() for knob in wanted}
            assert touched == last, "what the last life wants is there, and what it does not is gone already"
        after = Acting(kernel, hierarchy, directory)
        adopt_unjournaled_writes(hierarchy, after.ledger, files=after.files)
        if converge:
            for _ in range(2):
                await live(after, LIVES[mode][-1])
        done = await restore_all(hierarchy, after.ledger, after.writer, files=after.files)
        assert [result for result in done if not result.ok] == [], stopped_at
        assert settings(kernel, hierarchy) == before, f"stopped after {stopped_at} writes"
        assert kernel.killed == []
        assert len(after.ledger) == 0
        after.close()
        acting.close()
        if ended:
            break
        stopped_at += 1
    assert stopped_at > 10
