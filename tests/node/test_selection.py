"""What `make run` chooses to run on, from what is there."""

import os
from pathlib import Path

import pytest

from tests.fakes.kernel import FakeKernel
from tests.node.selection import Kind, choose, missing_for_real_groups


def _machine(root: Path, *, kubepods: bool = False, kubelet: bool = False) -> str:
    kernel = FakeKernel("v1", root=str(root), mirror=True)
    kernel.install()
    if kubepods:
        kernel.make_group("/kubepods")
    if kubelet:
        (root / "var/lib/kubelet").mkdir(parents=True)
        (root / "var/lib/kubelet/cpu_manager_state").write_text("{}")
    return str(root)


@pytest.mark.parametrize(
    ("kubepods", "kubelet", "kind"),
    [
        (False, False, Kind.EMBEDDED),
        (True, False, Kind.EMBEDDED),
        (False, True, Kind.EMBEDDED),
        (True, True, Kind.KUBELET),
    ],
)
def test_a_kubelet_is_a_root_directory_and_kubepods_together(
    tmp_path: Path, kubepods: bool, kubelet: bool, kind: Kind
) -> None:
    assert choose(_machine(tmp_path, kubepods=kubepods, kubelet=kubelet), euid=0).kind is kind


def test_without_root_the_fake_kernel_is_chosen_and_the_reason_said(tmp_path: Path) -> None:
    choice = choose(_machine(tmp_path), euid=1000)
    assert choice.kind is Kind.FAKE
    assert choice.missing == ("root: cgroups are made and bounded by root only (run it with sudo)",)


def test_each_missing_controller_is_named(tmp_path: Path) -> None:
    root = Path(_machine(tmp_path))
    table = root / "proc/self/mountinfo"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(line for line in lines if "/cpuset " not in line and "/memory " not in line) + "\n")
    texts = missing_for_real_groups(str(root), euid=0)
    assert [text.split(":")[0] for text in texts] == ["the cpuset controller", "the memory controller"]


def test_a_read_only_hierarchy_is_named(tmp_path: Path) -> None:
    root = Path(_machine(tmp_path))
    table = root / "proc/self/mountinfo"
    lines = [line.replace(" rw", " ro") if "/cpu " in line else line for line in table.read_text().splitlines()]
    table.write_text("\n".join(lines) + "\n")
    (text,) = missing_for_real_groups(str(root), euid=0)
    assert text.startswith("a writable cpu hierarchy")


def test_no_hierarchy_at_all_is_said(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "proc/self")
    (tmp_path / "proc/self/mountinfo").write_text("20 1 0:20 / / rw - ext4 /dev/root rw\n")
    (text,) = missing_for_real_groups(str(tmp_path), euid=0)
    assert text.startswith("cgroups: ")
    assert "mountinfo" in text


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    root = Path(_machine(tmp_path))
    before = sorted(str(path) for path in root.rglob("*"))
    choose(str(root), euid=0)
    assert sorted(str(path) for path in root.rglob("*")) == before
