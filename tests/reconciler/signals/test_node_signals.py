"""Load, memory, disks and file systems of the node, pools, and BE work as a whole."""

import threading
import time
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.cpuset import CpuSet
from reconciler.signals.besteffort import BestEffortReader, limit_milli
from reconciler.signals.filesystems import FileSystems, FreeSpace, statvfs
from reconciler.signals.nodeload import NodeLoad, parse_loadavg
from reconciler.signals.nodememory import NodeMemoryReader
from reconciler.signals.pod_cpus import pod_cpus
from reconciler.signals.pools import PoolReader, parse_schedstat
from reconciler.signals.readers import SampleContext, SampleSheet
from reconciler.signals.vmstat import VmStat, refaulted, scanned, taken_back
from state.memory import MemoryPlan, NodeMemoryReading
from state.model import ContainerKind, NodeCpu, NodeView, PodClass, Pools, Resources
from tests.reconciler.nodes import container, online
from tests.reconciler.signals.podtree import KUBEPODS, Tree, read, scene, shared, values

MEMINFO = (
    "MemTotal:       24684096 kB\nMemFree:        23620392 kB\nMemAvailable:   24049676 kB\nBuffers: 1 kB\n"
    "Inactive(file):   155380 kB\nSwapTotal:       1024 kB\nSwapFree:         512 kB\nHugePages_Total:       0\n"
)
NODE0 = "Node 0 MemTotal: 1000 kB\nNode 0 MemFree:  600 kB\nNode 0 Inactive(file):  50 kB\nNode 0 HugePages_Free: 0\n"
ZONEINFO = """Node 0, zone      DMA
  per-node stats
      nr_inactive_file 26652
  pages free     3840
        boost    0
        min      21
        low      26
        high     31
        managed  3840
  pagesets
    cpu: 0
              count: 0
              high:  14
Node 0, zone   Normal
  pages free     100
        min      79
        low      74
        high     90
        managed  5000
Node 1, zone   Normal
  pages free     7
        min      5
        low      6
        high     7
        managed  10
"""
VMSTAT_4_18 = (
    "pgscan_kswapd 100\npgscan_direct 7\npgscan_direct_throttle 999\npgsteal_kswapd 90\npgsteal_direct 5\n"
    "workingset_refault 4\n"
)
VMSTAT_3_10 = (
    "pgsteal_kswapd_dma 1\npgsteal_kswapd_normal 2\npgsteal_direct_normal 3\npgscan_kswapd_normal 4\n"
    "pgscan_direct_throttle 9\n"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (VMSTAT_4_18, (90, 5, 107, 4)),
        (VMSTAT_3_10, (3, 3, 4, None)),
        ("workingset_refault_anon 3\nworkingset_refault_file 4\n", (None, None, None, 7)),
        ("", (None, None, None, None)),
    ],
)
def test_reclaim_counters_of_several_kernels(text: str, found: tuple[int | None, ...], tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text(text)
    counters = VmStat(str(tmp_path)).counters(1.0)
    assert (
        taken_back(counters, "kswapd"),
        taken_back(counters, "direct"),
        scanned(counters),
        refaulted(counters),
    ) == found


def test_memory_of_node_and_numa_nodes(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.proc("meminfo", MEMINFO)
    tree.proc("zoneinfo", ZONEINFO)
    numa = tmp_path / "sys/devices/system/node/node0"
    numa.mkdir(parents=True)
    (numa / "meminfo").write_text(NODE0)
    reader = NodeMemoryReader(tree.shared())
    tree.proc("vmstat", VMSTAT_4_18)
    read(reader, scene(tree), 100.0)
    tree.now += 2.0
    tree.proc("vmstat", VMSTAT_4_18.replace("pgsteal_kswapd 90", "pgsteal_kswapd 490"))
    sheet = read(reader, scene(tree), 102.0)
    assert values(sheet, "node") == {
        "memory.total": 24684096 * 1024,
        "memory.free": 23620392 * 1024,
        "memory.use": (24684096 - 23620392) * 1024,
        "memory.available": 24049676 * 1024,
        "memory.inactive_file": 155380 * 1024,
        "memory.low": 106 * PAGE,
        "memory.min": 105 * PAGE,
        "swap.total": 1024 * 1024,
        "swap.free": 512 * 1024,
        "memory.kswapd": 200.0,
        "memory.direct": 0.0,
        "memory.scanned": 0.0,
        "memory.refaults": 0.0,
    }
    assert values(sheet, "numa:0") == {
        "memory.total": 1000 * 1024,
        "memory.free": 600 * 1024,
        "memory.inactive_file": 50 * 1024,
        "memory.low": 100 * PAGE,
        "memory.min": 100 * PAGE,
    }
    # Its meminfo is missing: what is not known is not there.
    assert values(sheet, "numa:1") == {"memory.low": 6 * PAGE, "memory.min": 5 * PAGE}


def test_total_memory_of_node_and_numa_nodes_is_without_huge_pages(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.proc("meminfo", "MemTotal: 9000 kB\nMemFree: 600 kB\nMemAvailable: 700 kB\nHugetlb: 8192 kB\n")
    tree.proc("zoneinfo", ZONEINFO)
    directory = tmp_path / "sys/devices/system/node/node0"
    for size, count in ((2048, 1), (64, 3)):
        (directory / f"hugepages/hugepages-{size}kB").mkdir(parents=True)
        (directory / f"hugepages/hugepages-{size}kB/nr_hugepages").write_text(f"{count}\n")
    (directory / "meminfo").write_text(NODE0.replace("1000", "4000"))
    reader = NodeMemoryReader(tree.shared())
    sheet = read(reader, scene(tree), 100.0)
    assert values(sheet, "node")["memory.total"] == 808 * 1024
    assert values(sheet, "node")["memory.use"] == 208 * 1024
    assert values(sheet, "numa:0")["memory.total"] == (4000 - 2048 - 192) * 1024


def test_load_disks_and_cpu_of_the_node(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.proc("loadavg", "2.34 1.97 1.43 14/117 7733\n")
    reader = NodeLoad(tree.shared())
    disks = "8 0 sda {} 0 2048 100 20 0 4096 {} 0 {} 9\n8 16 sdb 5 0 8 2 3 0 16 4 0 6 6\n"
    tree.proc("diskstats", disks.format(10, 300, 1000))
    read(reader, scene(tree))
    tree.now += 2.0
    tree.proc("diskstats", disks.format(30, 500, 2500))
    context = scene(tree)
    cpu = NodeCpu(busy_milli=1500, online_milli=1, reclaimed_milli=1, idle={0: 0.25, 1: 0.5}, age_s=0.4)
    sheet = read(reader, SampleContext(view=_with(context, cpu=cpu), pools=None, wanted=context.wanted))
    assert values(sheet, "node") == {
        "cpu.use": 1500,
        "cpu.idle": 750.0,
        "load.1": 2.34,
        "load.runnable": 13,
        "disk.read": 0.0,
        "disk.write": 0.0,
        "disk.ops": 10.0,
        "disk.busy": 75.0,
        "disk.delay": 10.0,
    }
    assert sheet.samples["node"]["cpu.use"].age_s == 0.4


def _with(context: SampleContext, **fields: object) -> NodeView:
    return replace(context.view, **fields)


def test_other_texts_are_no_load() -> None:
    with pytest.raises(ValueError, match="loadavg"):
        parse_loadavg("0.1 0.2\n")


async def test_a_file_system_that_hangs_delays_nobody_and_is_told(tmp_path: Path) -> None:
    release = threading.Event()
    texts = []

    def ask_slowly(path: str) -> FreeSpace:
        texts.append(path)
        if path == "/hangs":
            release.wait(60)
        return statvfs(str(tmp_path))

    now = [1000.0]
    reader = FileSystems(shared(filesystems={"nodefs": "/hangs", "imagefs": "/fine"}, clock=lambda: now[0]), ask_slowly)
    context = SampleContext(view=scene(Tree(tmp_path)).view, pools=None, wanted=())
    sheet = SampleSheet()
    deadline = time.monotonic() + 50
    while "fs:imagefs" not in sheet.samples and time.monotonic() < deadline:
        await reader.read(context, sheet, 0.0)
        await trio.sleep(0.01)
    assert "fs:nodefs" not in sheet.samples
    assert sheet.samples["fs:imagefs"]["fs.size"].value > 0
    now[0] += 60.0
    for _ in range(3):
        await reader.read(context, SampleSheet(), 0.0)
    # No second thread beside the one that hangs.
    assert texts.count("/hangs") == 1
    release.set()
    await reader.aclose()


async def test_a_directory_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    reader = FileSystems(shared(filesystems={"nodefs": str(tmp_path / "missing")}))
    context = SampleContext(view=scene(Tree(tmp_path)).view, pools=None, wanted=())
    with trio.fail_after(60):
        while not reader.problems():
            await reader.read(context, SampleSheet(), 0.0)
            await trio.sleep(0.01)
    assert "No such file" in reader.problems()["fs.available"]


POOLS = Pools(
    online_cpus=CpuSet(range(4)),
    reserved=CpuSet([0]),
    dedicated={"d/c": CpuSet([1])},
    shared=CpuSet([2, 3]),
    reclaimed=CpuSet([3]),
    budget_milli=700,
)
BE = f"{KUBEPODS}/besteffort"
SCHEDSTAT = "version 15\ntimestamp 4295\n{}domain0 00000000,00000003 0 0 0\n"


def _schedstat(**cpus: tuple[int, int]) -> str:
    return SCHEDSTAT.format("".join(f"{cpu} 0 0 0 0 0 0 {run} {wait} 9\n" for cpu, (run, wait) in cpus.items()))


def test_schedstat_by_cpu() -> None:
    assert parse_schedstat(_schedstat(cpu0=(5, 7), cpu11=(1, 2))) == {0: (5, 7), 11: (1, 2)}
    with pytest.raises(ValueError, match="nine"):
        parse_schedstat("cpu0 1 2 3\n")


def test_pools_by_cpu_without_throttling(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod()
    reader = PoolReader(tree.shared())
    context = scene(tree, pod, pools=POOLS)
    cpu = NodeCpu(busy_milli=1, online_milli=1, reclaimed_milli=1, idle={2: 0.5, 3: 0.25}, age_s=0.0)
    context = SampleContext(view=_with(context, cpu=cpu), pools=POOLS, wanted=context.wanted)
    tree.proc("schedstat", _schedstat(cpu0=(0, 0), cpu1=(0, 0), cpu2=(0, 0), cpu3=(0, 0)))
    read(reader, context)
    tree.now += 2.0
    tree.proc(
        "schedstat", _schedstat(cpu0=(0, 0), cpu1=(0, 0), cpu2=(1_000_000_000, 0), cpu3=(2_000_000_000, 2_000_000_000))
    )
    sheet = SampleSheet()
    sheet.put("pod:a", "cpu.wait_own", 500.0)
    sheet.put("pod:a", "memory.use", 77.0)
    result = values(read(reader, context, 102.0, sheet), "pool:shared")
    assert result == {
        "pool.cpus": 2,
        "cpu.idle": 750.0,
        "cpu.use": 1250.0,
        "load.runnable": 2.0,
        "cpu.wait_milli": 500.0,
        "cpu.wait": 25.0,
        "memory.use": 77.0,
    }
    assert values(sheet, "pool:dedicated")["pool.cpus"] == 1


def test_without_schedstat_a_pool_is_the_sum_of_its_pods_and_half_as_sure(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    reader = PoolReader(tree.shared())
    sheet = SampleSheet()
    for uid, use, wait in (("a", 900.0, 100.0), ("b", 0.0, 0.0), ("c", 5.0, 5.0)):
        sheet.put(f"pod:{uid}", "cpu.use", use)
        sheet.put(f"pod:{uid}", "cpu.wait_milli", wait)
    pods = [tree.pod("a"), tree.pod("b"), tree.pod("c", pod_class=PodClass.RECLAIMED)]
    read(reader, scene(tree, *pods, pools=POOLS), sheet=sheet)
    shared = sheet.samples["pool:shared"]
    assert (shared["load.runnable"].value, shared["load.runnable"].confidence) == (1.0, 0.5)
    assert shared["cpu.wait"].value == pytest.approx(10.0)
    assert sheet.samples["pool:reclaimed"]["cpu.wait"].value == pytest.approx(50.0)
    assert "cpu.wait" not in sheet.samples["pool:reserved"]
    assert "/proc/schedstat" in reader.problems()["load.runnable"]


def test_be_work_as_a_whole(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    be = tree.pod(
        "be",
        pod_class=PodClass.RECLAIMED,
        containers=2,
        requests=Resources(batch_cpu_milli=1500, cpu_milli=2, memory_bytes=100),
    )
    online = tree.pod("on", requests=Resources(cpu_milli=900, memory_bytes=900))
    context = scene(tree, be, online, pools=POOLS)
    view = _with(
        context,
        cpu=NodeCpu(busy_milli=1, online_milli=1, reclaimed_milli=333, age_s=0.2),
        node_memory=NodeMemoryReading(total_bytes=10, available_bytes=5, reclaimed_bytes=4, age_s=0.1),
    )
    sheet = read(
        BestEffortReader(tree.shared()),
        SampleContext(view=view, pools=POOLS, wanted=(), memory=MemoryPlan(reclaimed_high_bytes=5000)),
    )
    assert values(sheet, "node") == {
        "be.request": 3000,
        "be.memory_request": 200,
        "be.use": 333,
        "be.memory_use": 4,
        "be.budget": 700,
        "be.limit": 1000,
        "be.memory_bound": 5000,
    }


@pytest.mark.parametrize(
    ("actual", "given", "expected"),
    [
        ({}, None, 1000),
        ({(BE, "cpu.quota"): 40_000}, None, 400),
        (
            {(BE, "cpu.quota"): 40_000, (BE, "cpu.period"): 50_000},
            None,
            800,
        ),
        ({(BE, "cpu.quota"): None}, {BE: 300, "x": 200}, 500),
        ({}, {BE: 9000}, 1000),
    ],
)
def test_what_be_work_can_use_is_the_smaller_of_cpus_and_quotas(
    tmp_path: Path, actual: dict[tuple[str, str], int], given: dict[str, int] | None, expected: int
) -> None:
    context = scene(Tree(tmp_path))
    assert limit_milli(_with(context, actual=actual), replace(POOLS, quota_milli=given)) == expected


def test_where_a_pod_may_run(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod, own = tree.pod(), tree.pod("d")
    view = scene(tree, pod, own).view
    assert pod_cpus(pod, view, None) == CpuSet(range(4))
    assert pod_cpus(pod, view, POOLS) == CpuSet([2, 3])
    assert pod_cpus(own, view, POOLS) == CpuSet([1])
    context = scene(tree, pod, own)
    set_now = _with(context, actual={(pod.containers[0].group.path, "cpu.set"): CpuSet([0, 9])})
    assert pod_cpus(pod, set_now, POOLS) == CpuSet([0])


def test_where_a_pod_may_run_is_known_when_it_is_of_all_its_containers_but_the_sandbox(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = online("web", container("a"), container("b"), container("pause", kind=ContainerKind.SANDBOX))
    a, b, _ = (item.group.path for item in pod.containers)
    context = scene(tree, pod)

    def found(**known: CpuSet) -> CpuSet:
        paths = {"a": a, "b": b}
        return pod_cpus(
            pod, _with(context, actual={(paths[name], "cpu.set"): cpus for name, cpus in known.items()}), None
        )

    assert found(a=CpuSet([1]), b=CpuSet([2, 9])) == CpuSet([1, 2])
    assert found(a=CpuSet([1])) == CpuSet(range(4))
    # On v2 an empty one has what is above it.
    assert found(a=CpuSet([1]), b=CpuSet()) == CpuSet(range(4))
