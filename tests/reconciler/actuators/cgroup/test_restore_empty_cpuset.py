"""A v2 set that was empty cannot be emptied again: it is restored to all CPUs of the group above."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.cgroup.restore import restore_all
from state.entry import RestoreOutcome
from tests.fakes.kernel import FakeKernel
from tests.reconciler.actuators.acting import BE, GROUP, POD, Acting


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[Acting]:
    """On a container with a process, in v2 groups whose sets were never written."""
    kernel = FakeKernel("v2", root=str(tmp_path), cpus=4)
    kernel.install()
    hierarchy = Hierarchy.detect(str(tmp_path))
    for path in ("/kubepods", BE, POD, GROUP):
        kernel.make_group(path)
    kernel.write(hierarchy.directory("cpuset", GROUP), "cgroup.procs", str(kernel.spawn()))
    made = Acting(kernel, hierarchy, tmp_path)
    yield made
    made.close()


async def test_restore_gives_a_set_that_was_empty_all_that_the_group_above_has(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2-3")})])
    with pytest.raises(OSError, match="No space left"):
        acting.write(GROUP, "cpu.set", "\n")
    (done,) = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert (done.undo, done.text) == (RestoreOutcome.RESTORED, "0-3")
    assert "is impossible" in done.detail
    assert acting.read(GROUP, "cpu.set") == "0-3"
    assert len(acting.ledger) == 0


async def test_a_group_above_that_we_narrowed_too_is_passed_over(acting: Acting) -> None:
    narrow = CpuSet.parse("1")
    await acting.actuator.apply([acting.target(path, {"cpu.set": narrow}) for path in (GROUP, POD, BE)])
    done = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert [result.undo for result in done] == [RestoreOutcome.RESTORED] * 3
    assert [acting.read(path, "cpu.set") for path in (BE, POD, GROUP)] == ["0-3"] * 3


async def test_a_set_that_is_no_longer_wanted_is_put_back_the_same_way(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2-3")})])
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert acting.read(GROUP, "cpu.set") == "0-3"
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert len(acting.ledger) == 0
