import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from cgroupfs.files import REAL
from reconciler.signals.podcpu import Throttling
from reconciler.signals.psi import Psi
from state.evidence import NODE
from state.model import Pod
from tests.reconciler.signals.podtree import Tree, read, scene, values

LINE = "{} avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"


def text(some: int, full: int | None = 0) -> str:
    return LINE.format("some", some) + ("" if full is None else LINE.format("full", full))


class Quota:
    def __init__(self, throttling: Throttling | None) -> None:
        self.now = throttling

    def throttling(self, uid: str) -> Throttling | None:
        return self.now


class Private:
    """`PressureGroups` that another part fills."""

    def __init__(self, directories: Mapping[str, str]) -> None:
        self.directories = dict(directories)
        self.updated = 0
        self.closed = False
        self.refused: str | None = None

    def directory(self, uid: str) -> str | None:
        return self.directories.get(uid)

    def update(self, pods: Mapping[str, Pod], now: float) -> None:
        self.updated += 1

    @property
    def problem(self) -> str | None:
        return self.refused

    async def aclose(self) -> None:
        self.closed = True


class Unsupported:
    """`ReadOps` on a kernel that has PSI switched off: its files exist and answer EOPNOTSUPP."""

    def read(self, directory: str, file: str) -> str:
        if file.endswith(".pressure") or directory.endswith("/pressure"):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return REAL.read(directory, file)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return REAL.groups(directory, most)


def _pressure(tree: Tree, controller: str, path: str, **totals: tuple[int, int | None]) -> None:
    for resource in ("cpu", "memory", "io"):
        tree.put(controller, path, f"{resource}.pressure", text(*totals.get(resource, (0, 0))))


def _node(tree: Tree, **totals: tuple[int, int | None]) -> None:
    for resource in ("cpu", "memory", "io"):
        tree.proc(f"pressure/{resource}", text(*totals.get(resource, (0, 0))))


def _psi(tree: Tree, throttling: Throttling | None = None, private: Private | None = None) -> Psi:
    return Psi(tree.shared(), Quota(throttling), private=private)


def test_percent_of_the_time_between_two_passes_of_node_and_pod(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    reader = _psi(tree)
    _node(tree)
    _pressure(tree, "unified", pod.group.path)
    assert values(read(reader, scene(tree, pod))) == {}
    tree.now += 2.0
    _node(tree, cpu=(1_000_000, 500), io=(200_000, 100_000))
    _pressure(tree, "unified", pod.group.path, cpu=(500_000, 100_000), memory=(3_000_000, 20_000))
    sheet = read(reader, scene(tree, pod), 102.0)
    assert values(sheet, "node") == {
        "cpu.pressure": 50.0,
        "memory.pressure": 0.0,
        "memory.pressure_full": 0.0,
        "io.pressure": 10.0,
        "io.pressure_full": 5.0,
    }
    assert values(sheet) == {
        "cpu.pressure": 25.0,
        "cpu.pressure_full": 5.0,
        "memory.pressure": 100.0,
        "memory.pressure_full": 1.0,
        "io.pressure": 0.0,
        "io.pressure_full": 0.0,
    }


def test_own_throttling_is_no_pressure_and_lowers_the_confidence(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    reader = _psi(tree, Throttling(1.0, 300_000_000, 300_000_000))
    _pressure(tree, "unified", pod.group.path)
    read(reader, scene(tree, pod))
    tree.now += 1.0
    _pressure(tree, "unified", pod.group.path, cpu=(800_000, 500_000), memory=(500_000, 0))
    samples = read(reader, scene(tree, pod), 101.0).samples["pod:a"]
    assert (samples["cpu.pressure"].value, samples["cpu.pressure"].confidence) == pytest.approx((20.0, 0.25))
    assert (samples["cpu.pressure_full"].value, samples["cpu.pressure_full"].confidence) == pytest.approx((0.0, 0.1))
    assert (samples["memory.pressure"].value, samples["memory.pressure"].confidence) == (50.0, 1.0)


def test_a_node_without_pressure_is_asked_again_after_half_a_minute(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    reader = _psi(tree)
    for at in (100.0, 101.0, 129.0, 131.0, 132.0):
        tree.now = at
        sheet = read(reader, scene(tree), at)
        assert ("psi=1" in reader.problems().get("memory.pressure", "")) == (at < 131)
        _node(tree, memory=(int(at) * 100_000, 0))
    assert sheet.get(NODE, "memory.pressure") == pytest.approx(20.0)


def test_an_old_kernel_tells_no_full_cpu_pressure_and_why(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    reader = _psi(tree)
    for total in (0, 100_000):
        _pressure(tree, "unified", pod.group.path, cpu=(total, None))
        sheet = read(reader, scene(tree, pod, wanted=["cpu.pressure", "cpu.pressure_full"]), tree.now)
        tree.now += 1.0
    assert values(sheet) == {"cpu.pressure": 10.0}
    assert "5.13" in reader.problems()["cpu.pressure_full"]


def test_a_hybrid_nodes_directory_counts_only_with_the_pods_processes_in_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path, unified=True)
    pod = tree.pod()
    reader = _psi(tree)
    _node(tree)
    _pressure(tree, "unified", pod.group.path)
    tree.put("unified", pod.group.path, "cgroup.events", "populated 0\nfrozen 0\n")
    for _ in range(2):
        sheet = read(reader, scene(tree, pod), tree.now)
        tree.now += 1.0
    assert values(sheet) == {}
    assert "private_cgroup2" in reader.problems()["cpu.pressure"]
    tree.put("unified", pod.group.path, "cgroup.events", "populated 1\nfrozen 0\n")
    tree.now += 10.0
    for _ in range(2):
        sheet = read(reader, scene(tree, pod), tree.now)
        tree.now += 1.0
    assert values(sheet)["io.pressure"] == 0.0
    assert reader.problems() == {}


def test_vendor_kernels_have_the_files_in_cpuacct(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = _psi(tree)
    _pressure(tree, "cpuacct", pod.group.path)
    read(reader, scene(tree, pod))
    tree.now += 1.0
    _pressure(tree, "cpuacct", pod.group.path, memory=(400_000, 0))
    assert values(read(reader, scene(tree, pod), 101.0))["memory.pressure"] == 40.0


def test_a_file_that_exists_and_is_not_supported_is_no_pressure_of_zero(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    _node(tree)
    _pressure(tree, "unified", pod.group.path)
    reader = Psi(tree.shared(files=Unsupported()), None)
    for _ in range(2):
        sheet = read(reader, scene(tree, pod), tree.now)
        tree.now += 1.0
    assert sheet.samples == {}
    assert "psi=1" in reader.problems()["memory.pressure"]


def test_pressure_switched_off_for_a_group_is_told(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    tree.put("unified", pod.group.path, "cgroup.pressure", "0\n")
    reader = _psi(tree)
    _node(tree)
    read(reader, scene(tree, pod))
    assert "cgroup.pressure" in reader.problems()["cpu.pressure"]


def test_private_groups_are_used_once_they_are_filled_and_closed_with_the_reader(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    private = Private({})
    reader = _psi(tree, private=private)
    read(reader, scene(tree, pod))
    tree.group("/private")
    place = tree.hierarchy.directory("pids", "/private")
    _pressure(tree, "pids", "/private")
    private.directories["a"] = place
    for total in (0, 100_000):
        tree.now += 1.0
        _pressure(tree, "pids", "/private", cpu=(total, 0))
        sheet = read(reader, scene(tree, pod), tree.now)
    assert values(sheet)["cpu.pressure"] == 10.0
    assert private.updated == 3


def test_a_pod_made_again_under_its_name_starts_without_a_past(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    reader = _psi(tree)
    _pressure(tree, "unified", pod.group.path, memory=(100, 0))
    read(reader, scene(tree, pod))
    directory = Path(tree.hierarchy.directory("unified", pod.group.path))
    directory.rename(directory.with_name("old"))
    again = tree.pod()
    assert again.group.inode != pod.group.inode
    _pressure(tree, "unified", pod.group.path, memory=(900_000, 0))
    tree.now += 1.0
    assert "memory.pressure" not in values(read(reader, scene(tree, again), 101.0))
