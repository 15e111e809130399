"""CPU sets on v2 beside CPU partitions: the kernel takes a set that ends one, so bypassd does not write it."""

import pytest

from cgroupfs.cpuset import CpuSet
from tests.reconciler.actuators.acting import BE, GROUP, POD, Acting

SIDE = f"{POD}/{'ef' * 32}"


def partition(acting: Acting, path: str, cpus: str) -> None:
    acting.write(path, "cpu.set", cpus)
    acting.kernel.write(acting.hierarchy.directory("cpuset", path), "cpuset.cpus.partition", "root")
    assert state(acting, path) == "root"


def state(acting: Acting, path: str) -> str:
    return acting.kernel.read(acting.hierarchy.directory("cpuset", path), "cpuset.cpus.partition").strip()


@pytest.mark.parametrize("mode", ["v2"])
async def test_a_set_that_would_end_a_partition_of_the_pod_is_not_written_and_says_why(acting: Acting) -> None:
    acting.kernel.make_group(SIDE)
    acting.write(GROUP, "cpu.set", "1-2")
    for path in ("/kubepods", BE, POD):
        partition(acting, path, "1-3")
    partition(acting, SIDE, "3")
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2-3")})])
    assert acting.stood(GROUP, "cpu.set") == "blocked"
    assert (acting.read(GROUP, "cpu.set"), state(acting, SIDE)) == ("1-2", "root")
    ((_, text),) = acting.alerts
    assert text == (
        f"it would end a CPU partition: {SIDE[:120]} is a CPU partition (root) and keeps other groups off CPU 3"
    )
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2")})])
    assert (acting.read(GROUP, "cpu.set"), acting.stood(GROUP, "cpu.set")) == ("2", "written")
    assert state(acting, SIDE) == "root"
