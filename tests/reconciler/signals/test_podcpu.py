from pathlib import Path

import pytest

from cgroupfs.naming import QosClass
from reconciler.signals.podcpu import PodCpu, parse_cpu_stat
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


def _usage(tree: Tree, path: str, ns: int) -> None:
    tree.put("cpuacct", path, "cpuacct.usage", f"{ns}\n")


def test_rates_between_two_passes_and_the_quota_that_throttled_most(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod(containers=2)
    reader = PodCpu(tree.shared())
    first, second = (container.group.path for container in pod.containers)
    _usage(tree, pod.group.path, 1_000_000_000)
    for path in (pod.group.path, first, second):
        tree.put("cpu", path, "cpu.stat", V1.format(10, 0, 0))
    assert values(read(reader, scene(tree, pod))) == {}
    assert reader.throttling("a") is None
    tree.now += 2.0
    _usage(tree, pod.group.path, 2_000_000_000)
    tree.put("cpu", first, "cpu.stat", V1.format(30, 5, 100_000_000))
    tree.put("cpu", second, "cpu.stat", V1.format(30, 15, 700_000_000))
    result = values(read(reader, scene(tree, pod)))
    assert result == {"cpu.use": 500.0, "cpu.throttled": 75.0, "cpu.throttled_milli": 400.0}
    throttling = known(reader.throttling("a"))
    assert (throttling.own_ns, throttling.above_ns, throttling.cpus) == (800_000_000, 0, 0.4)


def test_a_quota_set_a_second_ago_is_seen_at_the_next_pass(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PodCpu(tree.shared())
    _usage(tree, pod.group.path, 0)
    for path in (pod.group.path, pod.containers[0].group.path):
        tree.put("cpu", path, "cpu.stat", V1.format(0, 0, 0))
    for _ in range(3):
        sheet = read(reader, scene(tree, pod))
        tree.now += 1.0
    assert values(sheet)["cpu.throttled"] == 0.0
    tree.put("cpu", pod.containers[0].group.path, "cpu.stat", V1.format(10, 10, 500_000_000))
    assert values(read(reader, scene(tree, pod)))["cpu.throttled"] == 100.0


def test_the_besteffort_directorys_quota_is_not_the_pods_own(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod(qos=QosClass.BESTEFFORT)
    reader = PodCpu(tree.shared())
    _usage(tree, pod.group.path, 0)
    for path in (pod.group.path, pod.containers[0].group.path, f"{KUBEPODS}/besteffort"):
        tree.put("cpu", path, "cpu.stat", V1.format(0, 0, 0))
    read(reader, scene(tree, pod))
    tree.now += 1.0
    tree.put("cpu", f"{KUBEPODS}/besteffort", "cpu.stat", V1.format(10, 10, 300_000_000))
    assert values(read(reader, scene(tree, pod)))["cpu.throttled"] == 0.0
    throttling = known(reader.throttling("a"))
    assert (throttling.own_ns, throttling.above_ns) == (0, 300_000_000)


def test_a_group_that_cannot_be_read_makes_throttling_unknown_and_not_zero(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PodCpu(tree.shared())
    _usage(tree, pod.group.path, 0)
    tree.put("cpu", pod.group.path, "cpu.stat", V1.format(0, 0, 0))
    read(reader, scene(tree, pod))
    tree.now += 1.0
    assert values(read(reader, scene(tree, pod))) == {"cpu.use": 0.0}
    throttling = known(reader.throttling("a"))
    assert not throttling.sure


def test_one_file_has_it_all_on_v2(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod(sandbox=True, containers=0)
    reader = PodCpu(tree.shared())
    tree.put("unified", pod.group.path, "cpu.stat", V2)
    read(reader, scene(tree, pod))
    tree.now += 1.0
    tree.put("unified", pod.group.path, "cpu.stat", V2.replace("5000000", "5300000").replace("450000", "700000"))
    result = values(read(reader, scene(tree, pod)))
    assert result == {"cpu.use": 300.0, "cpu.throttled": 0.0, "cpu.throttled_milli": 250.0}


def test_a_counter_that_was_counted_anew_tells_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod(containers=0)
    reader = PodCpu(tree.shared())
    tree.put("cpu", pod.group.path, "cpu.stat", V1.format(0, 0, 0))
    _usage(tree, pod.group.path, 9_000_000_000)
    read(reader, scene(tree, pod))
    tree.now += 1.0
    _usage(tree, pod.group.path, 1_000_000_000)
    assert "cpu.use" not in values(read(reader, scene(tree, pod)))
