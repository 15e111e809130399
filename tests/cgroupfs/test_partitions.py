"""Partitions of cgroup v2: what they take, which pods it concerns, and those that the kernel does not grant."""

from pathlib import Path

import pytest

from cgroupfs import partitions
from cgroupfs.cpuset import CpuSet
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.partitions import not_in_effect, partition_ended_by, partition_of, partitions_beside, partitions_in
from tests.fakes.kernel import FakeKernel, Mode

BOX = "/kubepods/besteffort/pod1/box"


def node(tmp_path: Path, mode: Mode = "v2") -> tuple[FakeKernel, Hierarchy]:
    kernel = FakeKernel(mode, root=str(tmp_path), cpus=8)
    kernel.install()
    hierarchy = Hierarchy.detect(str(tmp_path))
    kernel.make_group(BOX)
    return kernel, hierarchy


def write(kernel: FakeKernel, hierarchy: Hierarchy, path: str, file: str, text: str) -> None:
    kernel.write(hierarchy.directory("cpuset", path), file, text)


def test_a_group_whose_cpus_a_partition_has_taken_runs_elsewhere(tmp_path: Path) -> None:
    kernel, hierarchy = node(tmp_path)
    write(kernel, hierarchy, BOX, "cpuset.cpus", "6-7")
    assert not_in_effect(hierarchy, BOX, CpuSet.parse("6-7"), kernel) is None
    kernel.make_group("/low.slice/dpdk.service")
    for path in ("/low.slice", "/low.slice/dpdk.service"):
        write(kernel, hierarchy, path, "cpuset.cpus", "6-7")
        write(kernel, hierarchy, path, "cpuset.cpus.partition", "root")
    assert not_in_effect(hierarchy, BOX, CpuSet.parse("6-7"), kernel) == CpuSet.parse("0-5")
    outer, inner = partitions_beside(hierarchy, kernel)
    assert (outer.path, inner.path) == ("/low.slice", "/low.slice/dpdk.service")
    assert str(outer) == "/low.slice is a CPU partition (root) and keeps other groups off CPU 6-7"
    # A part of them is enough to run on the rest: the set holds.
    write(kernel, hierarchy, BOX, "cpuset.cpus", "5-7")
    assert not_in_effect(hierarchy, BOX, CpuSet.parse("5-7"), kernel) is None


def test_one_that_is_not_granted_keeps_nothing_and_says_why(tmp_path: Path) -> None:
    kernel, hierarchy = node(tmp_path)
    inner = f"{BOX}/docker/a"
    kernel.make_group(inner)
    write(kernel, hierarchy, inner, "cpuset.cpus", "1")
    write(kernel, hierarchy, inner, "cpuset.cpus.partition", "isolated")
    (found,) = partitions_in(hierarchy, BOX, kernel)
    assert (found.path, found.cpus) == (inner, CpuSet())
    assert str(found) == (
        f"{inner} is not the CPU partition that it asks to be: isolated invalid (Parent is not a partition root)"
    )
    assert list(partitions_beside(hierarchy, kernel)) == []


def test_of_a_tenants_groups_a_bounded_number_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, hierarchy = node(tmp_path)
    for index in range(100):
        kernel.make_group(f"{BOX}/docker/{index}")
    read: list[str] = []
    real = kernel.read

    def reading(directory: str, file: str) -> str:
        read.append(file)
        return real(directory, file)

    monkeypatch.setattr(kernel, "read", reading)
    assert list(partitions_in(hierarchy, BOX, kernel)) == []
    assert len(read) == partitions._WITHIN + 1


def test_v1_and_old_kernels_have_none(tmp_path: Path) -> None:
    kernel, hierarchy = node(tmp_path, "v1")
    assert partition_of(hierarchy, BOX, kernel) is None
    assert list(partitions_in(hierarchy, BOX, kernel)) == []
    assert not_in_effect(hierarchy, BOX, CpuSet.parse("0"), kernel) is None


def test_a_set_that_would_end_a_partition_beside_it_is_known_before(tmp_path: Path) -> None:
    kernel, hierarchy = node(tmp_path)
    kernel.make_group("/dpdk.slice")
    kernel.make_group("/other.slice")
    write(kernel, hierarchy, "/dpdk.slice", "cpuset.cpus", "6-7")
    write(kernel, hierarchy, "/dpdk.slice", "cpuset.cpus.partition", "isolated")
    for wanted, ends in (("5-6", True), ("0-5", False)):
        found = partition_ended_by(hierarchy, "/other.slice", CpuSet.parse(wanted), kernel)
        assert (found is not None) == ends
    assert partition_ended_by(hierarchy, "/dpdk.slice", CpuSet.parse("6"), kernel) is None
    write(kernel, hierarchy, "/other.slice", "cpuset.cpus", "5-6")
    found = partition_of(hierarchy, "/dpdk.slice", kernel)
    assert found is not None
    assert found.state == "isolated invalid (Cpu list in cpuset.cpus not exclusive)"
    assert partition_ended_by(hierarchy, "/other.slice", CpuSet.parse("5-7"), kernel) is None
