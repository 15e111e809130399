import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import SourceError
from state.topology import Cpu, CpuKind, NumaNode, Topology, uniform
from state.topology_sysfs import read_online, read_topology

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def node(tmp_path: Path, files: Mapping[str, object]) -> str:
    made: set[str] = set()
    for name, content in files.items():
        directory, _, file = f"{tmp_path}/{name}".rpartition("/")
        if directory not in made:
            os.makedirs(directory, exist_ok=True)
            made.add(directory)
        with open(f"{directory}/{file}", "w") as text:
            text.write(f"{content}\n")
    return str(tmp_path)


def cpu_files(
    cpu: int,
    *,
    core: str,
    socket: int = 0,
    l3: str | None = None,
    l3_id: int | None = None,
    capacity: int | None = None,
) -> dict[str, object]:
    files: dict[str, object] = {
        f"{CPU}/cpu{cpu}/topology/core_cpus_list": core,
        f"{CPU}/cpu{cpu}/topology/physical_package_id": socket,
        f"{CPU}/cpu{cpu}/cache/index0/level": 1,
        f"{CPU}/cpu{cpu}/cache/index0/shared_cpu_list": core,
        f"{CPU}/cpu{cpu}/cache/index0/id": cpu,
    }
    if l3 is not None:
        files |= {f"{CPU}/cpu{cpu}/cache/index3/level": 3, f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list": l3}
    if l3_id is not None:
        files[f"{CPU}/cpu{cpu}/cache/index3/id"] = l3_id
    if capacity is not None:
        files[f"{CPU}/cpu{cpu}/cpu_capacity"] = capacity
    return files


def two_sockets(tmp_path: Path) -> str:
    """Two sockets with a node each, two cores of two threads each, core_id repeating per socket as on x86."""
    files: dict[str, object] = {f"{CPU}/online": "0-7", f"{CPU}/present": "0-7", f"{CPU}/isolated": ""}
    for cpu in range(8):
        socket, first = (cpu // 2) % 2, cpu % 4
        l3 = "0-1,4-5" if socket == 0 else "2-3,6-7"
        files |= cpu_files(cpu, core=f"{first},{first + 4}", socket=socket, l3=l3, l3_id=socket * 16)
        files[f"{CPU}/cpu{cpu}/topology/core_id"] = cpu % 2
    files |= {f"{NODE}/node0/cpulist": "0-1,4-5", f"{NODE}/node1/cpulist": "2-3,6-7", f"{NODE}/node2/cpulist": ""}
    return node(tmp_path, files)


def test_sockets_nodes_caches_cores_and_threads_are_read_from_sys(tmp_path: Path) -> None:
    topology = read_topology(two_sockets(tmp_path))
    assert topology.online == CpuSet.span(8)
    assert topology.cores() == tuple(CpuSet([n, n + 4]) for n in range(4))
    assert topology.siblings(6) == CpuSet([2, 6])
    assert topology.nodes() == (0, 1)
    assert topology.node_cpus(1) == CpuSet([2, 3, 6, 7])
    assert topology.sockets() == {0: CpuSet([0, 1, 4, 5]), 1: CpuSet([2, 3, 6, 7])}
    assert topology.l3_domains() == {0: CpuSet([0, 1, 4, 5]), 16: CpuSet([2, 3, 6, 7])}
    assert topology.cpu(6) == Cpu(id=6, core=2, socket=1, node=1, l3=16, thread=1)
    assert topology.smt
    assert (topology.offline, topology.isolated) == (EMPTY, EMPTY)
    assert topology.node_cpus(2) == EMPTY


def test_whole_cores_leave_out_lone_threads() -> None:
    topology = uniform(cores=4, threads=2)
    assert topology.whole_cores(CpuSet([0, 1, 4, 7])) == CpuSet([0, 4])
    assert topology.whole_cores(EMPTY) == EMPTY
    assert topology.whole_cores(topology.online) == topology.online


def test_an_offline_sibling_leaves_its_core_with_one_thread(tmp_path: Path) -> None:
    files: dict[str, object] = {f"{CPU}/online": "0,2-3", f"{CPU}/present": "0-3", f"{CPU}/isolated": "1,3"}
    for cpu, core in ((0, "0"), (2, "2-3"), (3, "2-3")):
        files |= cpu_files(cpu, core=core)
    topology = read_topology(node(tmp_path, files))
    assert topology.offline == CpuSet([1])
    assert topology.isolated == CpuSet([3])
    assert topology.cores() == (CpuSet([0]), CpuSet([2, 3]))
    assert topology.threads == 2, "of the core that has the most"
    with pytest.raises(KeyError):
        topology.siblings(1)


def test_intels_two_kinds_of_core_are_told_apart_by_their_pmus(tmp_path: Path) -> None:
    files: dict[str, object] = {
        f"{CPU}/online": "0-5",
        "sys/devices/cpu_core/cpus": "0-3",
        "sys/devices/cpu_atom/cpus": "4",
        "sys/devices/cpu_lowpower/cpus": "5",
    }
    topology = read_topology(node(tmp_path, files))
    assert topology.kind_cpus(CpuKind.EFFICIENCY) == CpuSet([4, 5])
    assert topology.kind_cpus(CpuKind.PERFORMANCE) == CpuSet.span(4)


def test_little_cores_are_told_by_capacity_and_favoured_or_mid_cores_are_not_little(tmp_path: Path) -> None:
    files: dict[str, object] = {f"{CPU}/online": "0-4"}
    for cpu, capacity in enumerate((1024, 1009, 871, 623, 290)):
        files |= cpu_files(cpu, core=str(cpu), capacity=capacity)
    topology = read_topology(node(tmp_path, files))
    assert topology.kind_cpus(CpuKind.EFFICIENCY) == CpuSet([3, 4])
    assert [cpu.capacity for cpu in topology.cpus] == [1024, 1009, 871, 623, 290]


def test_caches_without_ids_are_called_by_their_lowest_cpu(tmp_path: Path) -> None:
    files: dict[str, object] = {f"{CPU}/online": "0-3"}
    for cpu in range(4):
        files |= cpu_files(cpu, core=str(cpu), l3="0-1" if cpu < 2 else "2-3", l3_id=7 if cpu == 0 else None)
    assert read_topology(node(tmp_path, files)).l3_domains() == {0: CpuSet([0, 1]), 2: CpuSet([2, 3])}


def test_without_l3_the_cpus_of_one_socket_and_node_belong_together(tmp_path: Path) -> None:
    files: dict[str, object] = {f"{CPU}/online": "0-3", f"{NODE}/node0/cpulist": "0-1", f"{NODE}/node1/cpulist": "2-3"}
    for cpu in range(4):
        files |= cpu_files(cpu, core=str(cpu))
    assert read_topology(node(tmp_path, files)).l3_domains() == {0: CpuSet([0, 1]), 2: CpuSet([2, 3])}


def test_a_virtual_machine_that_tells_only_what_is_online_is_flat(tmp_path: Path) -> None:
    topology = read_topology(node(tmp_path, {f"{CPU}/online": "0-2"}))
    assert topology.cpus == tuple(Cpu(id=cpu, core=cpu) for cpu in range(3))
    assert topology.nodes() == (0,)
    assert topology.l3_domains() == {0: CpuSet.span(3)}
    assert not topology.smt


def test_without_the_online_file_the_cpus_speak_for_themselves(tmp_path: Path) -> None:
    root = node(
        tmp_path, {f"{CPU}/cpu0/uevent": "", f"{CPU}/cpu1/online": 1, f"{CPU}/cpu2/online": 0, f"{CPU}/cpuidle/x": 1}
    )
    assert read_topology(root).online == CpuSet([0, 1])


def test_without_sys_proc_stat_tells_the_cpus(tmp_path: Path) -> None:
    root = node(tmp_path, {"proc/stat": "cpu  1 2 3\ncpu0 1 2 3\ncpu3 1 2 3\nintr 5"})
    assert read_topology(root).online == CpuSet([0, 3])


def test_proc_stat_of_a_thousand_cpus_is_read_whole(tmp_path: Path) -> None:
    cpus = range(1024)
    lines = [f"cpu{cpu} 10132153 290696 3084719 46828483 16683 0 25195 0 175628 0\n" for cpu in cpus]
    assert read_topology(node(tmp_path, {"proc/stat": "".join(lines)})).online == CpuSet(cpus)


def test_a_cpu_list_of_more_than_a_page_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of nodes and cores are binary attributes, and one read of such a file has a page at most."""
    evens, odds = ",".join(map(str, range(0, 2048, 2))), ",".join(map(str, range(1, 2048, 2)))
    nodes = {"sys/devices/system/node/node0/cpulist": evens, "sys/devices/system/node/node1/cpulist": odds}
    real = os.read
    monkeypatch.setattr(os, "read", lambda number, most: real(number, min(most, 4096)))
    topology = read_topology(node(tmp_path, {f"{CPU}/online": "0-2047", **nodes}))
    assert [len(topology.node_cpus(number)) for number in (0, 1)] == [1024, 1024]


def test_nonsense_in_sys_falls_back_file_by_file(tmp_path: Path) -> None:
    files = {
        f"{CPU}/online": "0-1",
        f"{CPU}/present": "zero",
        f"{CPU}/cpu0/topology/core_cpus_list": "1",
        f"{CPU}/cpu0/topology/thread_siblings_list": "junk",
        f"{CPU}/cpu1/topology/physical_package_id": "-1",
        f"{CPU}/cpu1/cpu_capacity": "",
    }
    assert read_topology(node(tmp_path, files)) == Topology(online=CpuSet.span(2))


def test_no_trace_of_a_cpu_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no online CPU found: .*/cpu/online and .*/proc/stat"):
        read_topology(str(tmp_path))


def test_a_topology_of_bare_numbers_is_flat() -> None:
    topology = Topology(online=CpuSet([1, 3]))
    assert topology.cores() == (CpuSet([1]), CpuSet([3]))
    assert topology.node_cpus(0) == CpuSet([1, 3])


def test_cpus_that_do_not_match_what_is_online_are_refused() -> None:
    with pytest.raises(ValueError, match="CPUs 0 are described but 0-1 are online"):
        Topology(online=CpuSet.span(2), cpus=(Cpu(id=0, core=0),))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 16), st.integers(1, 4))
def test_a_uniform_machine_is_split_evenly(sockets: int, nodes: int, per: int, threads: int) -> None:
    cores = sockets * nodes * per
    topology = uniform(sockets=sockets, nodes=nodes, cores=cores, threads=threads)
    assert len(topology.online) == cores * threads
    assert {len(core) for core in topology.cores()} == {threads}
    assert topology.threads == threads
    assert len(topology.cores()) == cores
    for groups, count in ((topology.sockets(), sockets), (topology.l3_domains(), nodes)):
        assert [len(cpus) for cpus in groups.values()] == [cores * threads // count] * count
    assert sum(len(topology.node_cpus(number)) for number in topology.nodes()) == len(topology.online)
    assert topology == uniform(sockets=sockets, nodes=nodes, cores=cores, threads=threads)
    assert all(topology.siblings(cpu) <= topology.node_cpus(topology.cpu(cpu).node) for cpu in topology.online)


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(ValueError, match="3 cores cannot be split evenly into 2 sockets"):
        uniform(sockets=2, cores=3)


def test_cache_ids_that_repeat_in_each_socket_are_not_believed(tmp_path: Path) -> None:
    files: dict[str, object] = {f"{CPU}/online": "0-3"}
    for cpu in range(4):
        files |= cpu_files(cpu, core=str(cpu), socket=cpu // 2, l3="0-1" if cpu < 2 else "2-3", l3_id=0)
    assert read_topology(node(tmp_path, files)).l3_domains() == {0: CpuSet([0, 1]), 2: CpuSet([2, 3])}


def test_no_cpu_is_in_two_cores_whatever_the_lists_say(tmp_path: Path) -> None:
    files: dict[str, object] = {f"{CPU}/online": "0-3"}
    for cpu, core in enumerate(("0,2", "1-2", "1-2", "0-3")):
        files |= cpu_files(cpu, core=core)
    topology = read_topology(node(tmp_path, files))
    assert topology.cores() == (CpuSet([0, 2]), CpuSet([1]), CpuSet([3]))
    assert [cpu.thread for cpu in topology.cpus] == [0, 0, 1, 0]


def numa_files(distances: Mapping[int, str], *, memory: Mapping[int, int | None]) -> dict[str, object]:
    files: dict[str, object] = {f"{CPU}/online": "0-3"}
    for number, row in distances.items():
        files[f"{NODE}/node{number}/cpulist"] = {0: "0-1", 2: "2-3"}.get(number, "")
        files[f"{NODE}/node{number}/distance"] = row
        kib = memory.get(number)
        if kib is not None:
            files[f"{NODE}/node{number}/meminfo"] = (
                f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree: 1 kB"
            )
    return files


def test_distances_memory_and_nodes_without_cpus_are_read(tmp_path: Path) -> None:
    rows = {0: "10 21 17 28", 2: "21 10 28 17", 3: "17 28 10 28", 9: "28 17 28 10"}
    topology = read_topology(node(tmp_path, numa_files(rows, memory={0: 64, 2: 0, 3: 128, 9: None})))
    assert topology.nodes() == (0, 2)
    assert [node.id for node in topology.numa] == [0, 2, 3, 9]
    assert topology.distance(0, 2) == topology.distance(2, 0) == 21
    assert topology.distance(9, 2) == 17
    assert topology.nearest(0) == (0, 3, 2, 9)
    assert topology.nearest(9) == (9, 2, 0, 3)
    assert [node.memory_bytes for node in topology.numa] == [64 << 10, 0, 128 << 10, None]
    # What is not known may have some; what has none may not be named in cpuset.mems.
    assert topology.memory_nodes() == CpuSet([0, 3, 9])
    assert topology.node_sockets(3) == ()
    with pytest.raises(KeyError):
        topology.distance(0, 1)


def test_memory_of_a_node_is_without_huge_pages(tmp_path: Path) -> None:
    files = numa_files({0: "10 21", 2: "21 10"}, memory={0: 8 << 20, 2: 4 << 20})
    files[f"{NODE}/node0/hugepages/hugepages-2048kB/nr_hugepages"] = "512"
    files[f"{NODE}/node0/hugepages/hugepages-1048576kB/nr_hugepages"] = "5"
    files[f"{NODE}/node2/hugepages/hugepages-1048576kB/nr_hugepages"] = "4"
    topology = read_topology(node(tmp_path, files))
    assert topology.node(0).memory_bytes == 2 << 30
    # Huge pages are memory, too: pods may use them there.
    assert topology.memory_nodes() == CpuSet([0, 2])


@pytest.mark.parametrize("row", ["10", "10 x 20 20", "10 20 20 20 20", "10 -1 20 20", "10 999 20 20", ""])
def test_a_row_of_distances_that_cannot_be_is_not_believed_in_part(tmp_path: Path, row: str) -> None:
    rows = {0: row, 2: "21 10 28 17", 3: "17 28 10 28", 9: "28 17 28 10"}
    topology = read_topology(node(tmp_path, numa_files(rows, memory={})))
    assert topology.node(0).distances == ()
    assert [topology.distance(0, other) for other in (0, 2, 3, 9)] == [10, 20, 20, 20]
    assert topology.distance(2, 3) == 28


def test_a_node_is_nearest_to_itself_even_where_the_firmware_says_zero_of_it() -> None:
    nodes = (NumaNode(id=0, distances=(20, 10)), NumaNode(id=1, distances=(10, 20)))
    assert Topology(online=CpuSet([0]), numa=nodes).nearest(0) == (0, 1)


@pytest.mark.parametrize(
    ("numa", "message"),
    [
        ((NumaNode(id=1),), r"CPUs are in NUMA nodes \[0\], but the nodes described are \[1\]"),
        ((NumaNode(id=1), NumaNode(id=0)), r"the nodes described are \[1, 0\]"),
        ((NumaNode(id=0), NumaNode(id=0)), r"the nodes described are \[0, 0\]"),
        ((NumaNode(id=0, distances=(10, 20)),), "distances to other than the 1 nodes"),
    ],
)
def test_numa_nodes_that_do_not_fit_the_cpus_are_refused(numa: tuple[NumaNode, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(online=CpuSet([0]), numa=numa)


def test_a_cpu_has_a_node_and_a_node_its_sockets() -> None:
    topology = uniform(sockets=2, nodes=4, cores=8, threads=2)
    assert topology.node_of(13) == 2
    assert [topology.node_sockets(node) for node in range(4)] == [(0,), (0,), (1,), (1,)]
    assert topology.node_sockets(7) == ()
    with pytest.raises(KeyError):
        topology.node_of(16)


def test_8_sockets_16_nodes_and_1024_cpus_are_read_right(tmp_path: Path) -> None:
    expected = uniform(sockets=8, nodes=16, cores=512, threads=2)
    files: dict[str, object] = {f"{CPU}/online": "0-1023", f"{CPU}/present": "0-1023"}
    for cpu in expected.cpus:
        near = str(expected.node_cpus(cpu.node))
        core = str(expected.siblings(cpu.id))
        files |= cpu_files(cpu.id, core=core, socket=cpu.socket, l3=near, l3_id=cpu.l3)
    for number in range(16):
        row = [10 if other == number else 12 if other // 2 == number // 2 else 32 for other in range(16)]
        files[f"{NODE}/node{number}/cpulist"] = expected.node_cpus(number)
        files[f"{NODE}/node{number}/distance"] = " ".join(map(str, row))
    topology = read_topology(node(tmp_path, files))
    assert topology.cpus == expected.cpus
    assert [topology.node_sockets(number) for number in (13, 14, 15)] == [(6,), (7,), (7,)]
    assert topology.nearest(5) == (5, 4, 0, 1, 2, 3, *range(6, 16))
    assert topology.whole_cores(CpuSet([3, 515, 4])) == CpuSet([3, 515])


def test_the_online_list_is_told_as_it_stands(tmp_path: Path) -> None:
    assert read_online(str(tmp_path)) is None
    assert read_online(node(tmp_path, {f"{CPU}/online": "0,2-3"})) == "0,2-3"


@pytest.mark.kernel
def test_this_machine_agrees_with_what_the_process_sees() -> None:
    if not os.path.exists("/sys/devices/system/cpu/online"):
        pytest.skip("needs /sys/devices/system/cpu of a real kernel")
    topology = read_topology()
    assert CpuSet(os.sched_getaffinity(0)) <= topology.online
    assert len(topology.online) == os.sysconf("SC_NPROCESSORS_ONLN")
    union = EMPTY
    for core in topology.cores():
        assert not core & union
        union |= core
    assert union == topology.online
