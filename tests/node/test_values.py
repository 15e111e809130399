"""Values by role, and what counts as a difference."""

from pathlib import Path

import pytest

from cgroupfs.hierarchy import Hierarchy
from tests.e2e.pods import PodSpec
from tests.fakes.kernel import FakeKernel
from tests.node.values import Place, Values, role_of


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    kernel = FakeKernel("v1", root=str(tmp_path), mirror=True)
    kernel.install()
    for group in ("/kubepods/burstable/poda", "/kubepods/burstable/podb"):
        kernel.make_group(group)
    return kernel


def _values(kernel: FakeKernel) -> Values:
    return Values(Hierarchy.detect(kernel.root), kernel)


def _cpu(kernel: FakeKernel, group: str) -> str:
    return f"{kernel.root}/sys/fs/cgroup/cpu{group}"


@pytest.mark.parametrize(("name", "role"), [("job-12", "job"), ("crunch-1", "crunch"), ("executor", "executor")])
def test_pods_that_differ_by_a_number_have_one_role(name: str, role: str) -> None:
    assert role_of(PodSpec(name=name, uid="u")) == role


def test_a_group_is_compared_with_what_its_role_had(kernel: FakeKernel) -> None:
    values = _values(kernel)
    before = values.snapshot({"/kubepods/burstable/poda": "job"})
    assert before[Place("job", "cpu.weight")] == "1024"
    kernel.write(_cpu(kernel, "/kubepods/burstable/podb"), "cpu.shares", "2")
    count, (difference,) = values.differences({"/kubepods/burstable/podb": "job"}, before)
    assert count == len(before)
    assert str(difference) == "/kubepods/burstable/podb/cpu.weight: was '1024', is '2'"
    kernel.write(_cpu(kernel, "/kubepods/burstable/podb"), "cpu.shares", "1024")
    assert values.differences({"/kubepods/burstable/podb": "job"}, before) == (count, [])


def test_a_role_that_was_not_there_before_is_a_difference(kernel: FakeKernel) -> None:
    count, differences = _values(kernel).differences({"/kubepods/burstable/poda": "new"}, {})
    assert count == len(differences) > 0


def test_only_the_weight_of_the_burstable_directory_is_the_kubelets_own(kernel: FakeKernel) -> None:
    values = _values(kernel)
    groups = {"/kubepods/burstable": "/kubepods/burstable"}
    before = values.snapshot(groups)
    kernel.write(_cpu(kernel, "/kubepods/burstable"), "cpu.shares", "512")
    kernel.write(_cpu(kernel, "/kubepods/burstable"), "cpu.cfs_quota_us", "50000")
    _, differences = values.differences(groups, before)
    assert [difference.file for difference in differences] == ["cpu.quota"]


def test_quotas_are_read_in_per_cent_of_one_cpu(kernel: FakeKernel) -> None:
    values = _values(kernel)
    assert values.quota_percent("/kubepods/burstable/poda") is None
    kernel.write(_cpu(kernel, "/kubepods/burstable/poda"), "cpu.cfs_quota_us", "150000")
    assert values.quota_percent("/kubepods/burstable/poda") == 150
    assert values.quota_percent("/kubepods/nowhere") == "?"
