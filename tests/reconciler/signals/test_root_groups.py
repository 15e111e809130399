"""Groups directly below the root on the running kernel: read, written as any setting is, and restored."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.steps import WriteStep
from cgroupfs.usage import UsageReader
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.restore import restore_all
from reconciler.signals.root_groups import RootGroups
from state.entry import LedgerEntry, RestoreOutcome
from state.ledger import Ledger
from state.store import Store
from tests.real_cgroups import make_root, remove_tree

pytestmark = pytest.mark.kernel
GROUP = "/bypassd-test-daemons"
KUBEPODS = "/kubepods-of-no-node"


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    """On v1 the group is in the hierarchies of cpu and cpuacct only, as systemd makes a slice."""
    made = list(dict.fromkeys(make_root(controller, "daemons") for controller in ("cpu", "cpuacct")))
    yield Hierarchy.detect()
    for path in made:
        remove_tree(path)


@pytest.mark.alone
def test_use_weight_and_waiting_are_read(hierarchy: Hierarchy) -> None:
    groups = RootGroups(hierarchy, UsageReader(hierarchy), KUBEPODS)
    cpu = min(os.sched_getaffinity(0))
    script = f"import os, time; os.sched_setaffinity(0, {{{cpu}}}); end = time.monotonic() + 3\n"
    script += "while time.monotonic() < end: pass"

    async def scenario() -> None:
        for controller in ("cpu", "cpuacct"):
            for process in (worker, other):
                Path(hierarchy.directory(controller, GROUP), "cgroup.procs").write_text(str(process.pid))
        first = await groups.sample((GROUP,))
        assert (first.groups[GROUP].weight, first.groups[GROUP].use_milli) == (1024, None)
        assert first.refused == {}
        await trio.sleep(1)
        read = (await groups.sample((GROUP,))).groups[GROUP]
        assert read.use_milli is not None
        assert 50 <= read.use_milli <= 1100
        # Two of them share one CPU: each waits for half of the time.
        assert read.waits is not None
        assert 0.2 <= read.waits <= 1.0

    with (
        subprocess.Popen([sys.executable, "-c", script]) as worker,
        subprocess.Popen([sys.executable, "-c", script]) as other,
    ):
        try:
            trio.run(scenario)
        finally:
            worker.kill()
            other.kill()
            groups.close()


@pytest.mark.alone
async def test_reading_all_groups_takes_less_than_a_millisecond(hierarchy: Hierarchy) -> None:
    groups = RootGroups(hierarchy, UsageReader(hierarchy), KUBEPODS)
    times: list[float] = []

    await groups.sample((GROUP,))
    for _ in range(20):
        await trio.sleep(0.01)
        began = time.thread_time()
        await groups.sample((GROUP,))
        times.append(time.thread_time() - began)
    groups.close()
    assert sorted(times)[len(times) // 2] < 0.001


async def test_a_group_that_is_in_the_cpu_hierarchy_only_is_written_and_restored(
    hierarchy: Hierarchy, tmp_path: Path
) -> None:
    assert not os.path.isdir(hierarchy.directory("cpuset", GROUP))
    inode = REAL.inode(hierarchy.identity_directory(GROUP))
    store = Store(str(tmp_path / "state.db"), boot="boot-1")
    ledger = Ledger(store)
    entry = LedgerEntry(
        controller="cpu",
        path=GROUP,
        file="cpu.shares",
        knob="cpu.weight",
        inode=inode,
        original="1024",
        wanted="114",
        policy="node_daemons",
    )
    ledger.first_touches([entry])
    writer = KernelWriter(hierarchy)
    step = WriteStep(
        controller="cpu", path=GROUP, knob="cpu.weight", file="cpu.shares", text="114", version=1, why="test"
    )

    (outcome,) = await writer.perform([step], {GROUP: inode})
    assert (outcome.ok, outcome.after) == (True, "114")
    ledger.wrote(entry.key, before="1024", after="114")
    (result,) = await restore_all(hierarchy, ledger, writer)
    assert result.undo is RestoreOutcome.RESTORED
    store.close()
    assert Path(hierarchy.directory("cpu", GROUP), "cpu.shares").read_text() == "1024\n"
