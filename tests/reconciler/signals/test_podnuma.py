"""On which NUMA node a pod's anonymous memory is."""

from pathlib import Path

import pytest

from reconciler.signals.podnuma import PodNuma, parse_numa_cache, parse_numa_stat
from state.evidence import Sample
from state.model import Pod
from tests.reconciler.signals.podtree import Tree, read, scene

V1 = (
    "total=7058 N0=7058 N1=0\nfile=235 N0=235 N1=0\nanon=374 N0=374 N1=0\nunevictable=0 N0=0 N1=0\n"
    "hierarchical_total=70 N0=40 N1=30\nhierarchical_file=29 N0=10 N1=19\n"
    "hierarchical_anon=41 N0=30 N1=11 \nhierarchical_unevictable=0 N0=0 N1=0\n"
)
V2 = (
    "anon N0=122880 N1=45056\nfile N0=1 N1=2\nkernel_stack N0=3 N1=4\nanon_thp N0=9 N1=9\nfile_mapped N0=100 N1=9\n"
    "inactive_file N0=40000 N1=4\nactive_file N0=1060 N1=4\n"
)


@pytest.mark.parametrize(("text", "version"), [(V1, 1), (V2, 2)])
def test_the_line_of_the_whole_subtree_in_bytes(text: str, version: int) -> None:
    assert parse_numa_stat(text, version, 4096) == {0: 122880, 1: 45056}


@pytest.mark.parametrize(("text", "version"), [("total=1 N0=1\nanon=1 N0=1\n", 1), ("", 2), ("anon_thp N0=1\n", 2)])
def test_a_kernel_that_does_not_tell_it_is_no_zero(text: str, version: int) -> None:
    with pytest.raises(ValueError, match="no line of anonymous memory"):
        parse_numa_stat(text, version, 4096)


@pytest.mark.parametrize(
    ("text", "version", "cache"), [(V1, 1, {0: 40960, 1: 77824}), (V2, 2, {0: 40960, 1: 0})], ids=["v1", "v2"]
)
def test_page_cache_that_could_be_dropped_by_node(text: str, version: int, cache: dict[int, int]) -> None:
    assert parse_numa_cache(text, version, 4096) == cache


@pytest.mark.parametrize(("text", "version"), [("file=1 N0=1\n", 1), ("", 2), ("inactive_file N0=1\n", 2)])
def test_page_cache_by_node_that_is_not_told_is_no_zero(text: str, version: int) -> None:
    with pytest.raises(ValueError, match="no lines of page cache"):
        parse_numa_cache(text, version, 4096)


class Node:
    def __init__(self, tmp_path: Path) -> None:
        self.tree = Tree(tmp_path)
        self.pod = self.tree.pod()
        self.reader = PodNuma(self.tree.shared())

    def next(self, text: str, *pods: Pod, after_s: float = 0.0) -> dict[str, Sample]:
        """Of the pod's parts, or of those of other pods."""
        self.tree.put("memory", self.pod.group.path, "memory.numa_stat", text)
        self.tree.now += after_s
        sheet = read(self.reader, scene(self.tree, *(pods or (self.pod,))), self.tree.now)
        return {subject.partition("@")[2]: samples["memory.numa_rss"] for subject, samples in sheet.samples.items()}


def test_each_pods_part_of_each_node_read_every_five_seconds(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert {name: sample.value for name, sample in node.next(V1).items()} == {"numa:0": 122880, "numa:1": 45056}
    other = V1.replace("N0=30 N1=11", "N0=1 N1=11")
    assert node.next(other, after_s=4)["numa:0"] == Sample(122880, 4)
    assert node.next(other, after_s=1)["numa:0"].value == 4096
    assert node.reader.problems() == {}


def test_one_node_is_no_part_and_a_kernel_that_does_not_tell_is_asked_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.next("hierarchical_anon=41 N0=41\n") == {}
    assert node.next("total=1 N0=1\n", after_s=5) == {}
    assert "no memory per NUMA node" in node.reader.problems()["memory.numa_rss"]
    assert node.next(V1, after_s=5) == {}, "the kernel will not learn it"
    assert node.reader.problems()


def test_a_pod_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.next(V1)
    assert node.next(V1, node.tree.pod("b")) == {}
    assert node.next(V1.replace("N0=30 N1=11", "N0=1 N1=11"))["numa:0"].value == 4096
    assert node.reader.problems() == {}
