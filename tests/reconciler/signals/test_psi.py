import errno
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from cgroupfs.files import REAL, ReadOps
from reconciler.signals.podcpu import Throttling
from reconciler.signals.psi import Psi
from reconciler.signals.readers import SampleSheet
from state.evidence import NODE
from state.model import Pod
from tests.reconciler.signals.podtree import Tree, read, scene, values
from tests.reconciler.signals.test_runqueue import Quota

RESOURCES = ("cpu", "memory", "io")
LINE = "{} avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"


def text(some: int, full: int | None = 0) -> str:
    return LINE.format("some", some) + ("" if full is None else LINE.format("full", full))


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


class Node:
    """A node with one pod; `next` is a pass, a second after the one before."""

    def __init__(self, tmp_path: Path, version: int = 2, *, unified: bool = False) -> None:
        self.tree = Tree(tmp_path, version, unified=unified)
        self.pod = self.tree.pod()
        self.psi()

    def psi(
        self, throttling: Throttling | None = None, *, private: Private | None = None, files: ReadOps = REAL
    ) -> None:
        shared = self.tree.shared(files=files, private_cgroup2=private is not None)
        self.reader = Psi(shared, Quota(throttling), private=private)

    def of_pod(self, controller: str = "unified", path: str = "", **totals: tuple[int, int | None]) -> None:
        for resource in RESOURCES:
            line = text(*totals.get(resource, (0, 0)))
            self.tree.put(controller, path or self.pod.group.path, f"{resource}.pressure", line)

    def of_node(self, **totals: tuple[int, int | None]) -> None:
        for resource in RESOURCES:
            self.tree.proc(f"pressure/{resource}", text(*totals.get(resource, (0, 0))))

    def next(self, after_s: float = 1.0, *wanted: str) -> SampleSheet:
        self.tree.now += after_s
        return read(self.reader, scene(self.tree, self.pod, wanted=wanted), self.tree.now)


def test_percent_of_the_time_between_two_passes_of_node_and_pod(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.of_node()
    node.of_pod()
    assert values(node.next()) == {}
    node.of_node(cpu=(1_000_000, 500), io=(200_000, 100_000))
    node.of_pod(cpu=(500_000, 100_000), memory=(3_000_000, 20_000))
    sheet = node.next(2.0)
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
    node = Node(tmp_path)
    node.psi(Throttling(1.0, 300_000_000, 300_000_000))
    node.of_pod()
    node.next()
    node.of_pod(cpu=(800_000, 500_000), memory=(500_000, 0))
    samples = node.next().samples["pod:a"]
    assert (samples["cpu.pressure"].value, samples["cpu.pressure"].confidence) == pytest.approx((20.0, 0.25))
    assert (samples["cpu.pressure_full"].value, samples["cpu.pressure_full"].confidence) == pytest.approx((0.0, 0.1))
    assert (samples["memory.pressure"].value, samples["memory.pressure"].confidence) == (50.0, 1.0)


def test_a_node_without_pressure_is_asked_again_after_half_a_minute(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for at in (100.0, 101.0, 129.0, 131.0, 132.0):
        sheet = node.next(at - node.tree.now)
        assert ("psi=1" in node.reader.problems().get("memory.pressure", "")) == (at < 131)
        node.of_node(memory=(int(at) * 100_000, 0))
    assert sheet.get(NODE, "memory.pressure") == pytest.approx(20.0)


def test_an_old_kernel_tells_no_full_cpu_pressure_and_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for total in (0, 100_000):
        node.of_pod(cpu=(total, None))
        sheet = node.next(1.0, "cpu.pressure", "cpu.pressure_full")
    assert values(sheet) == {"cpu.pressure": 10.0}
    assert "5.13" in node.reader.problems()["cpu.pressure_full"]


def test_a_hybrid_nodes_directory_counts_only_with_the_pods_processes_in_it(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, unified=True)
    node.of_node()
    node.of_pod()
    node.tree.put("unified", node.pod.group.path, "cgroup.events", "populated 0\nfrozen 0\n")
    node.next()
    assert values(node.next()) == {}
    assert "private_cgroup2" in node.reader.problems()["cpu.pressure"]
    node.tree.put("unified", node.pod.group.path, "cgroup.events", "populated 1\nfrozen 0\n")
    node.next(11.0)
    assert values(node.next())["io.pressure"] == 0.0
    assert node.reader.problems() == {}


def test_vendor_kernels_have_the_files_in_cpuacct(tmp_path: Path) -> None:
    node = Node(tmp_path, 1)
    node.of_pod("cpuacct")
    node.next()
    node.of_pod("cpuacct", memory=(400_000, 0))
    assert values(node.next())["memory.pressure"] == 40.0


def test_a_file_that_exists_and_is_not_supported_is_no_pressure_of_zero(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.of_node()
    node.of_pod()
    node.psi(files=Unsupported())
    node.next()
    assert node.next().samples == {}
    assert "psi=1" in node.reader.problems()["memory.pressure"]


def test_pressure_switched_off_for_a_group_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.tree.put("unified", node.pod.group.path, "cgroup.pressure", "0\n")
    node.of_node()
    node.next()
    assert "cgroup.pressure" in node.reader.problems()["cpu.pressure"]


def test_private_groups_are_used_once_they_are_filled(tmp_path: Path) -> None:
    node, private = Node(tmp_path, 1), Private({})
    node.psi(private=private)
    node.of_node()
    node.next()
    assert node.reader.problems()["cpu.pressure"].endswith("the pods' private groups are not filled yet")
    node.tree.group("/private")
    private.directories["a"] = node.tree.hierarchy.directory("pids", "/private")
    for total in (0, 100_000):
        node.of_pod("pids", "/private", cpu=(total, 0))
        sheet = node.next()
    assert values(sheet)["cpu.pressure"] == 10.0
    assert private.updated == 3
    private.refused = "refused by the kernel"
    assert node.reader.problems()["io.pressure"] == "refused by the kernel"
    trio.run(node.reader.aclose)
    assert private.closed


def test_a_pod_made_again_under_its_name_starts_without_a_past(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.of_pod(memory=(100, 0))
    node.next()
    before = node.pod.group.inode
    directory = Path(node.tree.hierarchy.directory("unified", node.pod.group.path))
    directory.rename(directory.with_name("old"))
    node.pod = node.tree.pod()
    assert node.pod.group.inode != before
    node.of_pod(memory=(900_000, 0))
    assert "memory.pressure" not in values(node.next())


def test_totals_of_one_resource_are_not_compared_with_those_of_another(tmp_path: Path) -> None:
    """A reload has swapped the one that is wanted."""
    node = Node(tmp_path)
    node.of_pod(cpu=(100_000, 0), memory=(600_000, 0))
    node.next(1.0, "cpu.pressure")
    assert values(node.next(1.0, "memory.pressure")) == {}
    node.of_pod(memory=(700_000, 0))
    assert values(node.next(1.0, "memory.pressure"))["memory.pressure"] == 10.0
