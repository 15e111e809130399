import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import CgroupGoneError, InputError
from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.usage import MemoryUsage, UsageCounters, UsageRates, UsageReader, rates_between
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.fakes.clock import Clock

POD = "/kubepods/pod1"
V1 = ("cpuset", "cpu", "cpuacct", "memory")


def hierarchy_v1(tmp_path: Path, *controllers: str, unified: bool = False) -> Hierarchy:
    mounts = {name: Mount(directory=str(tmp_path / name), version=1, controllers=(name,)) for name in controllers or V1}
    if unified:
        mounts["unified"] = Mount(directory=str(tmp_path / "unified"), version=2, controllers=("unified",))
    return Hierarchy(root=str(tmp_path), mode=HierarchyMode.HYBRID if unified else HierarchyMode.V1, controllers=mounts)


def hierarchy_v2(tmp_path: Path, *controllers: str) -> Hierarchy:
    mount = Mount(directory=str(tmp_path / "all"), version=2, controllers=(*controllers, "unified"))
    return Hierarchy(root=str(tmp_path), mode=HierarchyMode.V2, controllers=dict.fromkeys(mount.controllers, mount))


def put(tmp_path: Path, files: Mapping[str, str], group: str = POD) -> None:
    for name, text in files.items():
        tree, _, file = name.partition("/")
        path = tmp_path / tree / group.strip("/") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v1_files(cpu_ns: int, periods: int, throttled: int, throttled_ns: int, memory: int) -> dict[str, str]:
    return {
        "cpuset/cpuset.cpus": "0\n",
        "cpuacct/cpuacct.usage": f"{cpu_ns}\n",
        "cpu/cpu.stat": f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_time {throttled_ns}\n",
        "memory/memory.usage_in_bytes": f"{memory}\n",
    }


def test_v1_counters_come_from_three_hierarchies(tmp_path: Path) -> None:
    put(tmp_path, v1_files(1_500_000_000, 10, 4, 250_000_000, 4096))
    reader = UsageReader(hierarchy_v1(tmp_path), clock=Clock())
    assert reader.read(POD) == UsageCounters(
        at_s=100.0, cpu_ns=1_500_000_000, periods=10, throttled_periods=4, throttled_ns=250_000_000, memory_bytes=4096
    )


def test_v2_counters_are_microseconds_in_one_file(tmp_path: Path) -> None:
    stat = "usage_usec 1500000\nuser_usec 1\nsystem_usec 2\nnr_periods 10\nnr_throttled 4\nthrottled_usec 250000\n"
    put(tmp_path, {"all/cpu.stat": stat, "all/memory.current": "4096\n"})
    reader = UsageReader(hierarchy_v2(tmp_path, "cpu", "memory"), clock=Clock())
    assert reader.read(POD) == UsageCounters(
        at_s=100.0, cpu_ns=1_500_000_000, periods=10, throttled_periods=4, throttled_ns=250_000_000, memory_bytes=4096
    )


def test_a_v2_group_without_controllers_still_counts_cpu_time(tmp_path: Path) -> None:
    put(tmp_path, {"all/cpu.stat": "usage_usec 7\nuser_usec 4\nsystem_usec 3\n"})
    counters = UsageReader(hierarchy_v2(tmp_path), clock=Clock()).read(POD)
    assert counters == UsageCounters(at_s=100.0, cpu_ns=7000)


def test_a_hybrid_node_without_cpuacct_reads_cpu_time_from_the_unified_tree(tmp_path: Path) -> None:
    put(tmp_path, v1_files(1, 10, 4, 250, 4096) | {"unified/cpu.stat": "usage_usec 9\n"})
    counters = UsageReader(hierarchy_v1(tmp_path, "cpuset", "cpu", unified=True), clock=Clock()).read(POD)
    assert counters == UsageCounters(at_s=100.0, cpu_ns=9000, periods=10, throttled_periods=4, throttled_ns=250)


def test_what_is_not_there_yet_is_unknown_and_not_zero(tmp_path: Path) -> None:
    put(tmp_path, {"cpuset/cpuset.cpus": "0\n", "memory/memory.usage_in_bytes": "5\n"})
    counters = UsageReader(hierarchy_v1(tmp_path), clock=Clock()).read(POD)
    assert counters == UsageCounters(at_s=100.0, memory_bytes=5)


def test_cpu_time_is_read_on_either_version_and_unknown_when_the_group_is_gone(tmp_path: Path) -> None:
    put(tmp_path, v1_files(11, 0, 0, 0, 1) | {"all/cpu.stat": "usage_usec 12\n"})
    assert UsageReader(hierarchy_v1(tmp_path)).cpu_ns(POD) == 11
    assert UsageReader(hierarchy_v2(tmp_path, "cpu")).cpu_ns(POD) == 12_000
    assert UsageReader(hierarchy_v1(tmp_path)).cpu_ns("/kubepods/gone") is None
    assert UsageReader(hierarchy_v2(tmp_path, "cpu")).cpu_ns("/kubepods/gone") is None


def test_memory_in_use_is_read_with_its_droppable_part(tmp_path: Path) -> None:
    v1 = "inactive_file 9\ntotal_inactive_file 300\ntotal_active_file 200\ntotal_dirty 40\ntotal_writeback 10\n"
    v2 = "inactive_file 300\nactive_file 200\nfile_dirty 40\nfile_writeback 10\nshmem 99\n"
    put(tmp_path, {"memory/memory.usage_in_bytes": "1000\n", "memory/memory.limit_in_bytes": "4096\n"})
    put(tmp_path, {"all/memory.current": "1000\n", "all/memory.max": "max\n"})
    put(tmp_path, {"memory/memory.stat": v1, "all/memory.stat": v2})
    memory_usage = UsageReader(hierarchy_v1(tmp_path)).memory_use(POD)
    assert memory_usage == MemoryUsage(limit_bytes=4096, used_bytes=1000, droppable_bytes=450)
    assert memory_usage is not None
    assert memory_usage.kept_bytes == 550
    other = UsageReader(hierarchy_v2(tmp_path, "memory")).memory_use(POD)
    assert other == MemoryUsage(limit_bytes=None, used_bytes=1000, droppable_bytes=450)
    assert UsageReader(hierarchy_v1(tmp_path)).memory_use("/kubepods/gone") is None


@pytest.mark.parametrize(("enough", "droppable"), [(3000, 0), (4000, 450)])
def test_page_cache_is_not_read_where_enough_memory_is_left(tmp_path: Path, enough: int, droppable: int) -> None:
    put(tmp_path, {"memory/memory.usage_in_bytes": "1000\n", "memory/memory.limit_in_bytes": "4096\n"})
    put(tmp_path, {"memory/memory.stat": "total_inactive_file 450\n"})
    memory_usage = UsageReader(hierarchy_v1(tmp_path)).memory_use(POD, enough_bytes=enough)
    assert memory_usage == MemoryUsage(limit_bytes=4096, used_bytes=1000, droppable_bytes=droppable)


def test_a_group_without_any_counter_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CgroupGoneError, match="no counter is left"):
        UsageReader(hierarchy_v1(tmp_path)).read(POD)


def test_another_groups_inode_under_the_same_path_is_gone(tmp_path: Path) -> None:
    put(tmp_path, v1_files(1, 1, 1, 1, 1))
    inode = (tmp_path / "cpuset" / POD.strip("/")).stat().st_ino
    reader = UsageReader(hierarchy_v1(tmp_path))
    assert reader.read(POD, inode).cpu_ns == 1
    with pytest.raises(CgroupGoneError, match=f"inode {inode + 1} is gone, {inode} has its name"):
        reader.read(POD, inode + 1)


@pytest.mark.parametrize("files", [{"cpuacct/cpuacct.usage": "many\n"}, {"cpu/cpu.stat": "nr_periods\n"}])
def test_a_file_that_is_not_what_the_kernel_writes_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    put(tmp_path, v1_files(1, 1, 1, 1, 1) | files)
    with pytest.raises(InputError, match=r"/kubepods/pod1/cpu(acct\.usage|\.stat): .*: expected .*number"):
        UsageReader(hierarchy_v1(tmp_path)).read(POD)


def test_two_readings_give_the_rates_between_them() -> None:
    before = UsageCounters(at_s=10.0, cpu_ns=10**9, periods=100, throttled_periods=10, throttled_ns=0, memory_bytes=7)
    after = UsageCounters(
        at_s=12.0, cpu_ns=4 * 10**9, periods=120, throttled_periods=15, throttled_ns=5 * 10**8, memory_bytes=9
    )
    assert rates_between(before, after) == UsageRates(
        interval_s=2.0, cpu_milli=1500, throttled_share=0.25, throttled_milli=250, memory_bytes=9
    )


def test_a_group_without_a_quota_is_not_throttled() -> None:
    counters = UsageCounters(at_s=0.0, periods=0, throttled_periods=0)
    rates = rates_between(counters, UsageCounters(at_s=1.0, periods=0, throttled_periods=0))
    assert rates == UsageRates(interval_s=1.0, throttled_share=0.0)


def test_readings_at_the_same_moment_say_nothing() -> None:
    counters = UsageCounters(at_s=1.0, cpu_ns=5)
    assert rates_between(counters, counters) is None
    assert rates_between(UsageCounters(at_s=2.0), counters) is None


amounts = st.none() | st.integers(0, 2**63)
readings = st.builds(
    UsageCounters,
    at_s=st.floats(0, 1e6),
    cpu_ns=amounts,
    periods=amounts,
    throttled_periods=amounts,
    throttled_ns=amounts,
    memory_bytes=amounts,
)


@given(readings, readings)
def test_no_pair_of_readings_gives_a_negative_rate(before: UsageCounters, after: UsageCounters) -> None:
    rates = rates_between(before, after)
    if rates is None:
        assert after.at_s - before.at_s < 0.005
        return
    assert all(value is None or value >= 0 for value in (rates.cpu_milli, rates.throttled_milli, rates.interval_s))
    assert rates.throttled_share is None or 0 <= rates.throttled_share <= 1
    known = before.cpu_ns is not None and after.cpu_ns is not None and after.cpu_ns >= before.cpu_ns
    assert (rates.cpu_milli is not None) == known


@pytest.mark.kernel
@pytest.mark.alone
def test_a_real_spinner_under_a_real_quota_is_measured_and_seen_throttled() -> None:
    with kernel_groups("usage", "cpu", "cpuacct", "memory", "cpuset") as (hierarchy, group):
        if hierarchy.version("cpu") != 1:
            pytest.skip("needs the v1 cpu controller on this machine")
        reader = UsageReader(hierarchy)
        inode = os.stat(hierarchy.identity_directory(group)).st_ino
        Path(hierarchy.directory("cpu", group), "cpu.cfs_quota_us").write_text("20000")
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinner:
            try:
                for controller in ("cpu", "cpuacct", "memory"):
                    Path(hierarchy.directory(controller, group), "cgroup.procs").write_text(str(spinner.pid))
                # A busy machine stops the spinner before its quota does.
                for _ in range(40):
                    before = reader.read(group, inode)
                    time.sleep(0.5)
                    rates = rates_between(before, reader.read(group, inode))
                    if rates is not None and (rates.throttled_share or 0.0) > 0.3:
                        break
            finally:
                spinner.kill()
    assert rates is not None
    assert rates.cpu_milli is not None
    # The quota is 0.2 CPU; a slice may end late.
    assert 20 < rates.cpu_milli < 300
    assert rates.throttled_share is not None
    assert rates.throttled_share > 0.3
    assert rates.throttled_milli
    assert rates.memory_bytes is not None


def test_files_that_are_read_often_stay_open_and_those_of_removed_groups_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    put(tmp_path, v1_files(11, 0, 0, 0, 1))
    reader, before = UsageReader(hierarchy_v1(tmp_path)), len(os.listdir("/proc/self/fd"))
    assert reader.cpu_ns(POD) == 11
    for _ in range(12):
        now[0] += 1.0
        assert reader.cpu_ns("/kubepods/none") is None
        reader.cpu_ns(POD)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    for _ in range(12):
        now[0] += 1.0
        assert reader.cpu_ns("/kubepods/none") is None
    assert len(os.listdir("/proc/self/fd")) == before
