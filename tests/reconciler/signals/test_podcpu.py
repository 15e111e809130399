from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cgroupfs.naming import QosClass
from reconciler.signals.podcpu import PodCpu, Throttling, parse_cpu_stat
from tests.known import known
from tests.reconciler.signals.podtree import KUBEPODS, Tree, read, scene, values

V1 = "nr_periods {}\nnr_throttled {}\nthrottled_time {}\n"
V1_BURST = "nr_periods 12\nnr_throttled 3\nthrottled_time 450000000\nnr_bursts 1\nburst_time 99\n"
V2 = (
    "usage_usec 5000000\nuser_usec 4000000\nsystem_usec 1000000\ncore_sched.force_idle_usec 0\nnr_periods 12\n"
    "nr_throttled 3\nthrottled_usec 450000\nnr_bursts 0\nburst_usec 0\n"
)
V2_NO_CONTROLLER = "usage_usec 7\nuser_usec 4\nsystem_usec 3\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (V1.format(0, 0, 0), (0, 0, 0, None)),
        (V1.format(12, 3, 450_000_000), (12, 3, 450_000_000, None)),
        (V1_BURST, (12, 3, 450_000_000, None)),
        (V2, (12, 3, 450_000_000, 5_000_000_000)),
        (V2_NO_CONTROLLER, (0, 0, 0, 7_000)),
    ],
)
def test_cpu_stat_of_both_versions_in_one_unit(text: str, expected: tuple[object, ...]) -> None:
    assert tuple(parse_cpu_stat(text)) == expected


class Node:
    """A pod whose counters the test sets: CPU time, and by group periods, throttled ones and throttled ns (v1)."""

    def __init__(self, tmp_path: Path, version: int = 1, **pod: Any) -> None:
        self.tree = Tree(tmp_path, version)
        self.pod = self.tree.pod(**pod)
        self.groups = [container.group.path for container in self.pod.containers]
        self.reader = PodCpu(self.tree.shared())

    def use(self, ns: int) -> None:
        self.tree.put("cpuacct", self.pod.group.path, "cpuacct.usage", f"{ns}\n")

    def quota(self, *counts: int, of: Sequence[str] = ()) -> None:
        """Of these groups; by default the pod's own and its containers'."""
        for path in of or (self.pod.group.path, *self.groups):
            self.tree.put("cpu", path, "cpu.stat", V1.format(*counts))

    def next(self, after_s: float = 1.0) -> dict[str, float]:
        self.tree.now += after_s
        return values(read(self.reader, scene(self.tree, self.pod)))

    def throttling(self) -> Throttling:
        return known(self.reader.throttling("a"))


def test_rates_between_two_passes_and_the_quota_that_throttled_most(tmp_path: Path) -> None:
    node = Node(tmp_path, containers=2)
    node.use(1_000_000_000)
    node.quota(10, 0, 0)
    assert node.next() == {}
    assert node.reader.throttling("a") is None
    node.use(2_000_000_000)
    node.quota(30, 5, 100_000_000, of=node.groups[:1])
    node.quota(30, 15, 700_000_000, of=node.groups[1:])
    assert node.next(2.0) == {"cpu.use": 500.0, "cpu.throttled": 75.0, "cpu.throttled_milli": 400.0}
    throttling = node.throttling()
    assert (throttling.own_ns, throttling.above_ns, throttling.cpus) == (800_000_000, 0, 0.4)


def test_a_quota_set_a_second_ago_is_seen_at_the_next_pass(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.use(0)
    node.quota(0, 0, 0)
    assert [node.next().get("cpu.throttled") for _ in range(3)] == [None, 0.0, 0.0]
    node.quota(10, 10, 500_000_000, of=node.groups)
    assert node.next()["cpu.throttled"] == 100.0


def test_the_besteffort_directorys_quota_is_not_the_pods_own(tmp_path: Path) -> None:
    node, besteffort = Node(tmp_path, qos=QosClass.BESTEFFORT), [f"{KUBEPODS}/besteffort"]
    node.use(0)
    node.quota(0, 0, 0)
    node.quota(0, 0, 0, of=besteffort)
    node.next()
    node.quota(10, 10, 300_000_000, of=besteffort)
    assert node.next()["cpu.throttled"] == 0.0
    assert (node.throttling().own_ns, node.throttling().above_ns) == (0, 300_000_000)


def test_a_group_that_cannot_be_read_makes_throttling_unknown_and_not_zero(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.use(0)
    node.quota(0, 0, 0, of=[node.pod.group.path])
    node.next()
    assert node.next() == {"cpu.use": 0.0}
    assert not node.throttling().complete


def test_one_file_has_it_all_on_v2(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, sandbox=True, containers=0)
    for text in (V2, V2.replace("5000000", "5300000").replace("450000", "700000")):
        node.tree.put("unified", node.pod.group.path, "cpu.stat", text)
        result = node.next()
    assert result == {"cpu.use": 300.0, "cpu.throttled": 0.0, "cpu.throttled_milli": 250.0}


def test_a_counter_that_was_counted_anew_tells_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, containers=0)
    node.quota(0, 0, 0)
    for ns in (9_000_000_000, 1_000_000_000):
        node.use(ns)
        result = node.next()
    assert "cpu.use" not in result
