"""Memory, disk and network of pods."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.signals.devicestats import DiskDevices, IoCounters, blkio, parse_diskstats, parse_io_stat, whole_disks
from reconciler.signals.poddisk import PodDisk
from reconciler.signals.podmemory import PodMemory, parse_memory_stat
from reconciler.signals.podnet import PodNet, parse_net_dev, summed
from tests.reconciler.signals.podtree import Tree, read, scene, values

V1_419 = (
    "cache 0\nrss 4096\nhierarchical_memory_limit 9223372036854771712\nhierarchical_memsw_limit 9223372036854771712\n"
    "total_cache 8192\ntotal_rss 12288\ntotal_rss_huge 0\ntotal_shmem 0\n"
)
V1_618 = (
    "cache 0\nrss 0\nworkingset_refault_anon 1\nworkingset_refault_file 1\nhierarchical_memory_limit 1048576\n"
    "total_rss 7028736\ntotal_workingset_refault_anon 30\ntotal_workingset_refault_file 12\n"
)
V2_419 = "anon 4096\nfile 8192\nkernel_stack 0\nworkingset_refault 5\nworkingset_activate 4\npgscan 70\npgsteal 60\n"
V2_612 = (
    "anon 4096\nfile 8192\nfile_mapped 1\nworkingset_refault_anon 2\nworkingset_refault_file 3\npgscan 70\n"
    "pgscan_kswapd 60\npgscan_direct 10\n"
)


@pytest.mark.parametrize(
    ("text", "version", "expected"),
    [
        (V1_419, 1, (12288, None, None, 9223372036854771712)),
        (V1_618, 1, (7028736, 42, None, 1048576)),
        (V2_419, 2, (4096, 5, 70, None)),
        (V2_612, 2, (4096, 5, 70, None)),
    ],
)
def test_memory_stat_of_several_kernels(text: str, version: int, expected: tuple[object, ...]) -> None:
    assert tuple(parse_memory_stat(text, version)) == expected


def _memory(tree: Tree) -> PodMemory:
    return PodMemory(tree.shared())


def _v1(tree: Tree, path: str, *, failed: int = 0, killed: int = 0) -> None:
    tree.put("memory", path, "memory.failcnt", f"{failed}\n")
    tree.put("memory", path, "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}\n")


def test_memory_of_a_v1_pod(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    container = pod.containers[0].group.path
    reader = _memory(tree)
    for kills, refaults, failed in ((0, 12, 0), (1, 52, 30)):
        tree.proc("vmstat", f"pgfault 1\noom_kill {kills}\n")
        tree.put("memory", pod.group.path, "memory.usage_in_bytes", "8192000\n")
        tree.put("memory", pod.group.path, "memory.stat", V1_618.replace("_file 12", f"_file {refaults}"))
        _v1(tree, pod.group.path)
        _v1(tree, container, failed=failed, killed=kills)
        tree.now += 2.0
        sheet = read(reader, scene(tree, pod), tree.now)
    assert values(sheet) == {
        "memory.use": 8192000,
        "memory.rss": 7028736,
        "memory.limit": 1048576,
        "memory.refaults": 20.0,
        "memory.high_events": 15.0,
        "oom.kills": 1,
    }
    assert values(sheet, "node") == {"oom.kills": 1}
    assert "memory.scanned" in reader.problems()


def test_without_a_limit_there_is_no_sample_of_one(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    tree.put("memory", pod.group.path, "memory.stat", V1_419)
    reader = _memory(tree)
    assert values(read(reader, scene(tree, pod, wanted=["memory.limit"]))) == {"memory.rss": 12288}
    assert "refault counter" in reader.problems()["memory.refaults"]


def test_a_pods_statistics_are_read_again_when_its_use_or_the_nodes_reclaim_differs_or_after_ten_seconds(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = _memory(tree)

    def second(use: int, rss: int, refaulted: int) -> float | None:
        tree.proc("vmstat", f"pgscan_kswapd 5\npgscan_direct 0\nworkingset_refault_file {refaulted}\n")
        tree.put("memory", pod.group.path, "memory.usage_in_bytes", f"{use}\n")
        tree.put("memory", pod.group.path, "memory.stat", V1_618.replace("total_rss 7028736", f"total_rss {rss}"))
        tree.now += 1.0
        sheet = read(reader, scene(tree, pod), tree.now)
        assert values(sheet).get("memory.refaults", 0.0) == 0.0
        return values(sheet).get("memory.rss")

    assert [second(8192, 1, 7), second(8192, 2, 7), second(4096, 3, 7), second(4096, 4, 8)] == [1, 1, 3, 4]
    assert [second(4096, 10 + number, 8) for number in range(11)] == [*[4] * 9, 19, 19]


def test_kills_are_looked_for_only_when_the_node_had_one_and_a_new_container_counts_from_none(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = _memory(tree)
    _v1(tree, pod.group.path)
    _v1(tree, pod.containers[0].group.path, killed=3)
    tree.proc("vmstat", "oom_kill 7\n")
    assert "oom.kills" not in values(read(reader, scene(tree, pod, wanted=["oom.kills"]), 100.0))
    tree.now += 1.0
    os.unlink(Path(tree.hierarchy.directory("memory", pod.group.path)) / "memory.oom_control")
    assert values(read(reader, scene(tree, pod, wanted=["oom.kills"]), 101.0)) == {"oom.kills": 0}
    tree.now += 1.0
    _v1(tree, pod.group.path)
    restarted = tree.pod(containers=2)
    _v1(tree, restarted.containers[1].group.path, killed=2)
    tree.proc("vmstat", "oom_kill 9\n")
    assert values(read(reader, scene(tree, restarted, wanted=["oom.kills"]), 102.0)) == {"oom.kills": 2}


def test_memory_of_a_v2_pod(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    reader = _memory(tree)
    for high, scanned, killed in ((1, 70, 0), (4, 170, 2)):
        tree.proc("vmstat", f"oom_kill {killed}\n")
        tree.put("unified", pod.group.path, "memory.current", "4096\n")
        tree.put("unified", pod.group.path, "memory.max", "65536\n")
        tree.put("unified", pod.group.path, "memory.stat", V2_612.replace("pgscan 70", f"pgscan {scanned}"))
        events = f"low 0\nhigh {high}\nmax 2\noom 0\noom_kill {killed}\noom_group_kill 0\n"
        tree.put("unified", pod.group.path, "memory.events", events)
        tree.now += 1.0
        sheet = read(reader, scene(tree, pod), tree.now)
    assert values(sheet) == {
        "memory.use": 4096,
        "memory.rss": 4096,
        "memory.limit": 65536,
        "memory.refaults": 0.0,
        "memory.scanned": 100.0,
        "memory.high_events": 3.0,
        "oom.kills": 2,
    }
    assert reader.problems() == {}


IO_STAT = (
    "8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n"
    "253:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n"
    "7:0 rbytes=9 wbytes=9 rios=9 wios=9\n"
)
V1_BYTES = "8:0 Read 4096\n8:0 Write 8192\n8:0 Sync 12288\n8:0 Async 0\n8:0 Discard 0\n8:0 Total 12288\nTotal 12288\n"
V1_OPS = "8:0 Read 1\n8:0 Write 2\n8:0 Total 3\nTotal 3\n"


def test_texts_about_disks() -> None:
    assert parse_io_stat(IO_STAT)["8:0"] == IoCounters(4096, 8192, 3)
    assert parse_io_stat("8:0\n") == {"8:0": IoCounters()}
    assert blkio(V1_BYTES, V1_OPS) == {"8:0": IoCounters(4096, 8192, 3)}
    lines = (
        "   8       0 sda 906627 77640 15882538 769430 1859648 2617949 70395608 1211912 63 366520 2271379 1 2 3 4 5 6\n"
        "   8      16 sdb 1 0 8 2 3 0 16 4 0 5 6\n"
        "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0\n"
        "   8       1 sda1 5 6 7 8\n"
    )
    pairs = parse_diskstats(lines)
    assert pairs.keys() == {"sda", "sdb"}
    device, times = pairs["sdb"]
    assert (device, times.io, times.busy_ms, times.waited_ms) == ("8:16", IoCounters(4096, 8192, 4), 5, 6)


@given(st.text(max_size=200))
def test_no_text_about_disks_or_networks_raises(text: str) -> None:
    parse_diskstats(text)
    blkio(text, text)
    parse_net_dev(text)


def _disks(tmp_path: Path) -> None:
    """sda with LVM on it, and a loop device."""
    base = tmp_path / "sys/dev/block"
    for number, name, slaves in (("8:0", "sda", ()), ("253:0", "dm-0", ("sda",)), ("7:0", "loop0", ())):
        device = tmp_path / "sys/devices" / name
        (device / "slaves").mkdir(parents=True)
        for slave in slaves:
            (device / "slaves" / slave).mkdir()
        base.mkdir(parents=True, exist_ok=True)
        (base / number).symlink_to(device)


def test_stacked_devices_are_not_counted_twice(tmp_path: Path) -> None:
    _disks(tmp_path)
    devices = DiskDevices(str(tmp_path))
    assert [devices.counts(item) for item in ("8:0", "253:0", "7:0", "9:9")] == [True, False, False, True]
    assert whole_disks(str(tmp_path)) == ("8:0",)
    tree = Tree(tmp_path, 2)
    pod = tree.pod()
    reader = PodDisk(tree.shared())
    for text in (IO_STAT, IO_STAT.replace("rbytes=4096", "rbytes=8192").replace("rios=1", "rios=11")):
        tree.put("unified", pod.group.path, "io.stat", text)
        tree.now += 2.0
        sheet = read(reader, scene(tree, pod), tree.now)
    assert values(sheet) == {"disk.read": 2048.0, "disk.write": 0.0, "disk.ops": 5.0}


@pytest.mark.parametrize("recursive", [True, False])
def test_disks_of_a_v1_pod_with_and_without_recursive_files(tmp_path: Path, recursive: bool) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PodDisk(tree.shared())
    kind = "_recursive" if recursive else ""
    place = pod.group.path if recursive else pod.containers[0].group.path
    tree.put("blkio", pod.group.path, f"blkio.throttle.io_service_bytes{kind}", "Total 0\n")
    for text in ("", V1_BYTES):
        tree.put("blkio", place, f"blkio.throttle.io_service_bytes{kind}", text)
        tree.put("blkio", place, f"blkio.throttle.io_serviced{kind}", V1_OPS)
        tree.now += 1.0
        sheet = read(reader, scene(tree, pod), tree.now)
    assert values(sheet) == {"disk.read": 4096.0, "disk.write": 8192.0, "disk.ops": 3.0}


NET_DEV = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier\n"
    "    lo: 13920966   45566    0    0    0     0          0         0 13920966   45566    0    0    0    0   0   0\n"
    "  eth0:{}   27352    0    0    0     0          0         0  {}   15670    0    0    0     0       0          0\n"
)


def test_loopback_is_not_the_network() -> None:
    # Long numbers touch the colon.
    assert summed(parse_net_dev(NET_DEV.format(1086542430, 1460598))) == (1086542430, 1460598)


def _namespace(tree: Tree, pid: int, namespace: str, received: int) -> None:
    tree.proc(f"{pid}/net/dev", NET_DEV.format(received, 10))
    target = tree.root / f"namespace-{namespace}"
    target.touch()
    link = tree.root / f"proc/{pid}/ns/net"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        os.link(target, link)


def test_a_machine_of_a_pods_own_whose_tap_device_has_all_traffic_twice_has_no_value(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = replace(tree.pod("kata", containers=0, sandbox=True), sandbox="kata")
    tree.put("cpuset", pod.containers[0].group.path, "cgroup.procs", "11\n")
    reader = PodNet(tree.shared())
    for received in (1000, 5000):
        _namespace(tree, 1, "host", received)
        _namespace(tree, 11, "pod", received)
        tree.now += 2.0
        sheet = read(reader, scene(tree, pod), tree.now)
    assert values(sheet, "pod:kata") == {}


def test_a_pods_own_network_and_no_traffic_of_host_network_pods(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    own, host = tree.pod("own"), tree.pod("host")
    for pod, pid in ((own, 11), (host, 12)):
        tree.put("cpuset", pod.containers[0].group.path, "cgroup.procs", f"{pid}\n")
    reader = PodNet(tree.shared())
    for received in (1000, 5000):
        _namespace(tree, 1, "host", 3 * received)
        _namespace(tree, 11, "pod", received)
        _namespace(tree, 12, "host", 3 * received)
        tree.now += 2.0
        sheet = read(reader, scene(tree, own, host), tree.now)
    assert values(sheet, "pod:own") == {"net.receive": 2000.0, "net.transmit": 0.0}
    assert values(sheet, "pod:host") == {}
    assert values(sheet, "node") == {"net.receive": 6000.0, "net.transmit": 0.0}


def test_a_process_number_that_another_namespaces_process_has_by_now_is_not_the_pods_traffic(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    own = tree.pod("own")
    group = own.containers[0].group.path
    tree.put("cpuset", group, "cgroup.procs", "11\n12\n")
    reader, rates = PodNet(tree.shared()), list[dict[str, float]]()
    for number in range(4):
        _namespace(tree, 1, "host", 1)
        _namespace(tree, 12, "pod", 1000 + 2000 * number)
        if number < 2:
            _namespace(tree, 11, "pod", 1000 + 2000 * number)
        else:
            (tree.root / "proc/11/ns/net").unlink(missing_ok=True)
            _namespace(tree, 11, "other", 9_000_000 * number)
            tree.put("cpuset", group, "cgroup.procs", "12\n")
        tree.now += 1.0
        rates.append(values(read(reader, scene(tree, own), tree.now), "pod:own"))
    assert [rate.get("net.receive") for rate in rates] == [None, 2000.0, 2000.0, 2000.0]


def test_a_pod_with_more_devices_than_are_read_has_no_value_and_that_is_said(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    many, pod = tree.pod("many"), tree.pod("own")
    for each, pid in ((many, 11), (pod, 12)):
        tree.put("cpuset", each.containers[0].group.path, "cgroup.procs", f"{pid}\n")
    reader = PodNet(tree.shared())
    for received in (1000, 5000):
        _namespace(tree, 1, "host", 0)
        _namespace(tree, 12, "own", received)
        _namespace(tree, 11, "many", received)
        line = NET_DEV.format(received, 10).splitlines()[-1]
        tree.proc("11/net/dev", NET_DEV.format(received, 10) + f"{line}\n" * 10_000)
        tree.now += 2.0
        sheet = read(reader, scene(tree, many, pod), tree.now)
    assert values(sheet, "pod:many") == {}
    assert values(sheet, "pod:own") == {"net.receive": 2000.0, "net.transmit": 0.0}
    assert reader.problems() == dict.fromkeys(
        ("net.receive", "net.transmit"), "pod:many: too many network devices to read"
    )
    tree.proc("11/net/dev", NET_DEV.format(0, 0))
    tree.now += 2.0
    read(reader, scene(tree, many, pod), tree.now)
    assert reader.problems() == {}


@pytest.mark.parametrize("version", [1, 2])
def test_how_often_all_pods_meet_their_common_limit(tmp_path: Path, version: int) -> None:
    tree = Tree(tmp_path, version)
    pod = tree.pod()
    reader = _memory(tree)
    whole = scene(tree, pod, wanted=["memory.pods_hits"])
    for hits in (10, 50):
        if version == 1:
            tree.put("memory", whole.view.kubepods, "memory.failcnt", f"{hits}\n")
        else:
            # The subtree's count (memory.events) has the pods' own limits in it.
            tree.put("unified", whole.view.kubepods, "memory.events", "high 0\nmax 9999\n")
            tree.put("unified", whole.view.kubepods, "memory.events.local", f"high 0\nmax {hits}\n")
        tree.now += 2.0
        sheet = read(reader, whole, tree.now)
    assert values(sheet, "node") == {"memory.pods_hits": 20.0}
