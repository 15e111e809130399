"""On which NUMA node a pod's anonymous memory is."""

from pathlib import Path

import pytest

from reconciler.signals.podnuma import PodNuma, parse_numa_cache, parse_numa_stat
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


def test_each_pods_part_of_each_node_read_every_five_seconds(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PodNuma(tree.shared())
    tree.put("memory", pod.group.path, "memory.numa_stat", V1)
    sheet = read(reader, scene(tree, pod), tree.now)
    assert sheet.get(f"pod:{pod.uid}@numa:0", "memory.numa_rss") == 122880
    assert sheet.get(f"pod:{pod.uid}@numa:1", "memory.numa_rss") == 45056
    tree.put("memory", pod.group.path, "memory.numa_stat", V1.replace("N0=30 N1=11", "N0=1 N1=11"))
    tree.now += 4
    sheet = read(reader, scene(tree, pod), tree.now)
    assert sheet.samples[f"pod:{pod.uid}@numa:0"]["memory.numa_rss"].value == 122880
    assert sheet.samples[f"pod:{pod.uid}@numa:0"]["memory.numa_rss"].age_s == 4
    tree.now += 1
    assert read(reader, scene(tree, pod), tree.now).get(f"pod:{pod.uid}@numa:0", "memory.numa_rss") == 4096
    assert reader.problems() == {}


def test_one_node_is_no_part_and_a_kernel_that_does_not_tell_is_asked_once(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PodNuma(tree.shared())
    tree.put("memory", pod.group.path, "memory.numa_stat", "hierarchical_anon=41 N0=41\n")
    assert read(reader, scene(tree, pod), tree.now).samples == {}
    tree.put("memory", pod.group.path, "memory.numa_stat", "total=1 N0=1\n")
    tree.now += 5
    assert read(reader, scene(tree, pod), tree.now).samples == {}
    assert "no memory per NUMA node" in reader.problems()["memory.numa_rss"]
    # The kernel will not learn it.
    tree.put("memory", pod.group.path, "memory.numa_stat", V1)
    tree.now += 5
    assert read(reader, scene(tree, pod), tree.now).samples == {}
    assert reader.problems()


def test_a_pod_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PodNuma(tree.shared())
    tree.put("memory", pod.group.path, "memory.numa_stat", V1)
    assert read(reader, scene(tree, pod), tree.now).samples
    assert read(reader, scene(tree), tree.now).samples == {}
    other = tree.pod("b")
    assert read(reader, scene(tree, other), tree.now).samples == {}
    assert reader.problems() == {}
