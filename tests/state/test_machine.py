import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from reconciler.cli.options import SYNTAX
from state.machine import NUMBERINGS, MachineDescription, build, describe, explain, parse
from state.topology import Cpu, CpuKind, NumaNode, Topology, uniform


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def test_a_machine_is_numbered_as_firmware_does_it() -> None:
    machine = parse("2 sockets x 2 nodes x 2 cores x 2 threads")
    assert machine == uniform(sockets=2, nodes=4, cores=8, threads=2)
    assert machine.siblings(3) == cpus("3,11")
    assert [machine.node_sockets(node) for node in range(4)] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize(
    "text",
    [
        "2 sockets x 4 cores",
        "2 Socket * 4 CORES",
        "2 sockets, 4 cores",
        "2 sockets 4 cores",
        "  2sockets  \u00d7  4cores ;; ",
        "2 sockets x 1 node x 4 cores x 1 thread",
    ],
)
def test_a_shape_may_be_written_in_the_ways_that_people_write_it(text: str) -> None:
    assert parse(text) == uniform(sockets=2, nodes=2, cores=8, threads=1)


def test_the_numbering_may_be_adjacent_or_alternating() -> None:
    adjacent = parse("2 sockets x 2 cores x 2 threads; numbering adjacent")
    assert adjacent.cores() == (cpus("0-1"), cpus("2-3"), cpus("4-5"), cpus("6-7"))
    assert adjacent.sockets() == {0: cpus("0-3"), 1: cpus("4-7")}
    alternating = parse("2 sockets x 2 cores x 2 threads; numbering alternating")
    assert alternating.node_cpus(0) == cpus("0,2,4,6")
    assert alternating.siblings(1) == cpus("1,5")


def test_efficiency_cores_come_after_the_others_with_one_thread_each() -> None:
    machine = parse("2 cores x 2 threads + 3 e-cores; numbering adjacent")
    assert machine.kind_cpus(CpuKind.EFFICIENCY) == cpus("4-6")
    assert machine.cores() == (cpus("0-1"), cpus("2-3"), cpus("4"), cpus("5"), cpus("6"))


def test_efficiency_cores_may_be_named_by_one_of_their_threads() -> None:
    assert parse("4 cores x 2 threads; e-cores 2-3").kind_cpus(CpuKind.EFFICIENCY) == cpus("2-3,6-7")


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("l3 per node", ["0-3", "4-7", "8-11", "12-15"]),
        ("l3 per 2 cores", ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"]),
        ("l3 per socket", ["0-7", "8-15"]),
        ("l3 per core", [str(cpu) for cpu in range(16)]),
    ],
)
def test_caches(text: str, domains: list[str]) -> None:
    cpu_sets = parse(f"2 sockets x 2 nodes x 4 cores; {text}").l3_domains()
    assert {number: str(cpus) for number, cpus in cpu_sets.items()} == dict(enumerate(domains))


def test_an_offline_cpu_leaves_its_core_as_the_kernel_would_show_it() -> None:
    machine = parse("4 cores x 2 threads; offline 1,6; isolated 0-1")
    assert (machine.online, machine.offline, machine.isolated) == (cpus("0,2-5,7"), cpus("1,6"), cpus("0"))
    assert machine.cpu(5) == Cpu(id=5, core=5, thread=0)
    assert machine.siblings(2) == cpus("2")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("2 sockets; distance 10 21", [(10, 21), (21, 10)]),
        ("2 sockets x 2 nodes; distance 10 12 32", [(10, 12, 32, 32), (12, 10, 32, 32)]),
        ("2 nodes; distance 10 20; memory nodes 1", [(10, 20, 20), (20, 10, 20), (20, 20, 10)]),
        ("2 nodes; distance 11 20 / 30 12", [(11, 20), (30, 12)]),
        ("2 nodes", [(), ()]),
        ("1 core; distance 10", [(10,)]),
    ],
)
def test_distances(text: str, rows: list[tuple[int, ...]]) -> None:
    assert [node.distances for node in parse(text).numa][: len(rows)] == rows


def test_memory_and_nodes_of_memory_only() -> None:
    machine = parse("2 sockets; memory 64 GiB per node; memory nodes 1 of 512M")
    assert machine.numa == (
        NumaNode(id=0, memory_bytes=64 << 30),
        NumaNode(id=1, memory_bytes=64 << 30),
        NumaNode(id=2, memory_bytes=512 << 20),
    )
    assert machine.nodes() == (0, 1)
    assert parse("1 core; memory nodes 1").memory_nodes() == cpus("0-1")


def test_numa_off_is_one_node_over_all_sockets() -> None:
    machine = parse("2 sockets x 4 cores; numa off")
    assert machine.nodes() == (0,)
    assert machine.node_sockets(0) == (0, 1)
    assert len(machine.l3_domains()) == 2


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("", "''", "a number of sockets, nodes, cores, threads"),
        ("8 cors", "'8 cors'", "a number of sockets, nodes, cores, threads"),
        ("2 sockets x eight cores", "'eight cores'", "a number of"),
        ("2 threads x 8 cores", "'2 threads x 8 cores'", "sockets before nodes before cores before threads"),
        ("8 cores x 8 cores", "'8 cores x 8 cores'", "each once"),
        ("0 cores", "'0 cores'", "1 to 8192 cores"),
        ("100 sockets x 100 cores", "'100 sockets x 100 cores'", "at most 8192 CPUs; these are 10000"),
        ("2000 nodes", "'2000 nodes'", "at most 1024 nodes; these are 2000"),
        ("8 cores + 3 threads", "'+ 3 threads'", "a number of efficiency cores"),
        ("8 cores + 1 e-core + 1 e-core", "'+ 1 e-core'", "a number of efficiency cores"),
        ("8 cores; cache 4", "'cache 4'", "one of l3, e-cores, offline, isolated, distance"),
        ("8 cores; l3 per 3 cores", "'l3 per 3 cores'", "a number that divides the 8 cores of a node"),
        ("8 cores; l3 per 0 cores", "'l3 per 0 cores'", "a number that divides"),
        ("8 cores; l3 4", "'l3 4'", "l3 per 4 cores, l3 per core, l3 per node or l3 per socket"),
        ("8 cores; l3 per node; l3 per core", "'l3 per core'", "l3 only once"),
        ("8 cores; offline 8", "'offline 8'", "a CPU list such as 4-7,12 within 0-7"),
        ("8 cores; isolated 3-1", "'isolated 3-1'", "a CPU list"),
        ("8 cores; e-cores", "'e-cores'", "a CPU list"),
        ("8 cores; offline 0-7", "'offline 0-7'", "at least one CPU that stays online"),
        ("9999999999 cores", "'9999999999 cores'", "a number of"),
        ("2 nodes; distance 10 99999999", "'distance 10 99999999'", "distances from 1 to 255"),
        ("2 nodes; distance 10 near", "'distance 10 near'", "distances from 1 to 255"),
        ("2 nodes; distance 10", "'distance 10'", "two or three numbers, or 2 rows of 2 numbers"),
        ("2 nodes; distance 10 20 30 40", "'distance 10 20 30 40'", "two or three numbers"),
        ("2 nodes; distance 10 20 / 20", "'distance 10 20 / 20'", "2 rows of 2 numbers"),
        ("8 cores; memory much", "'memory much'", "a size such as 64G"),
        ("8 cores; memory nodes 0", "'memory nodes 0'", "memory nodes 2, or memory nodes 2 of 128G"),
        ("8 cores; numbering odd", "'numbering odd'", "numbering firmware, adjacent, alternating"),
        ("2 nodes x 1 core; numa off", "'numa off'", "numa off, and a shape without nodes"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(text: str, value: str, expected: str) -> None:
    with pytest.raises(InputError) as exception_info:
        parse(text)
    assert str(exception_info.value).startswith(f"machine: {value}")
    assert expected in exception_info.value.expected


@st.composite
def machines(draw: st.DrawFn) -> MachineDescription:
    """Any regular machine of up to 8 sockets and some hundred CPUs."""
    sockets, cores = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 6))
    numa_off = draw(st.booleans()) and sockets > 1
    nodes = 1 if numa_off else draw(st.integers(1, 3))
    threads = draw(st.sampled_from([1, 2, 4]))
    e_cores = draw(st.integers(0, 4)) if threads > 1 else 0
    memory_nodes = draw(st.integers(0, 2))
    count = (1 if numa_off else sockets * nodes) + memory_nodes
    rows = [tuple(draw(st.integers(10, 40)) for _ in range(count)) for _ in range(count)] if draw(st.booleans()) else []
    memory = draw(st.sampled_from([None, 0, 1 << 20, 3 << 30, 1000]))
    each = [n for n in range(1, cores + e_cores + 1) if (cores + e_cores) % n == 0]
    return MachineDescription(
        sockets=sockets,
        nodes=nodes,
        cores=cores,
        threads=threads,
        e_cores=e_cores,
        numa_off=numa_off,
        l3_cores=draw(st.sampled_from([None, *each])),
        isolated=CpuSet(draw(st.sets(st.integers(0, sockets * nodes * cores - 1)))),
        distances=tuple(rows) if count > 1 else ((10,),) if rows else (),
        memory_bytes=memory,
        memory_nodes=memory_nodes,
        memory_node_bytes=draw(st.sampled_from([None, 1 << 30])) if memory_nodes else None,
        numbering=draw(st.sampled_from(NUMBERINGS)),
    )


@given(machines())
def test_the_words_of_a_description_are_read_back(machine: MachineDescription) -> None:
    assert parse(explain(machine)) == build(machine)


@given(machines())
def test_a_regular_machine_has_a_text_and_the_text_is_the_machine(machine: MachineDescription) -> None:
    topology = build(machine)
    text = describe(topology)
    assert text is not None
    assert parse(text) == topology


@given(machines(), st.data())
def test_with_cpus_offline_the_text_is_the_machine_or_there_is_none(
    machine: MachineDescription, data: st.DataObject
) -> None:
    topology = build(machine)
    chosen = CpuSet(data.draw(st.sets(st.sampled_from(list(topology.online)), max_size=4)))
    if topology.online - chosen:
        topology = build(replace(machine, offline=chosen))
    text = describe(topology)
    assert text is None or parse(text) == topology


@pytest.mark.parametrize(
    "text",
    [
        "8 cores",
        "2 sockets x 8 cores x 2 threads",
        "2 sockets x 2 nodes x 8 cores x 2 threads; l3 per 4 cores; distance 10 12 32; memory 64G per node",
        "6 cores x 2 threads + 8 e-cores; numbering adjacent",
        "8 cores; e-cores 4-7",
        "8 cores x 2 threads; offline 3; isolated 4-7",
        "2 sockets x 4 cores; memory nodes 2 of 128G; numbering alternating",
        "2 sockets x 4 cores; numa off",
        "2 nodes x 1 core; distance 10 20 / 30 10",
    ],
)
def test_the_text_of_a_machine_is_the_one_that_a_person_would_write(text: str) -> None:
    assert describe(parse(text)) == text


def test_an_irregular_machine_has_no_text() -> None:
    odd = Topology(online=cpus("0-2"), cpus=(Cpu(id=0, core=0), Cpu(id=1, core=0, thread=1), Cpu(id=2, core=2)))
    assert describe(odd) is None
    assert describe(Topology(online=cpus("1"))) is None
    sockets = Topology(online=cpus("0-1"), cpus=(Cpu(id=0, core=0), Cpu(id=1, core=1, socket=36)))
    assert describe(sockets) is None


@pytest.mark.parametrize(
    "text",
    [
        # One thread of four is left in each core, and the sockets do not divide the nodes.
        "2 sockets x 2 cores x 4 threads; memory nodes 1; distance 10 20 30 / 20 10 31 / 30 31 11; offline 4-15",
        "4 sockets x 3 nodes x 2 cores x 4 threads; memory nodes 2; offline 24-95; distance "
        + " / ".join(
            " ".join(str(10 if index == other else 20 + index + other) for other in range(14)) for index in range(14)
        ),
    ],
    ids=["three-nodes", "fourteen-nodes"],
)
def test_a_machine_of_which_offline_cpus_hide_the_shape_has_no_text(text: str) -> None:
    assert describe(parse(text)) is None


def test_every_example_of_the_manual_and_of_the_help_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "machine.md").read_text()
    examples = [line.strip() for line in re.findall(r"^    (.+)$", page, re.MULTILINE)]
    assert len(examples) > 5
    for example in examples:
        assert parse(example).online != EMPTY
    for line in SYNTAX.splitlines()[2:4]:
        assert parse(line.split("   ")[0]).online != EMPTY
