"""CPU use of each NUMA node of described machines, and the pods that run on one node alone."""

from collections.abc import Mapping

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.signals.catalog import READERS
from reconciler.signals.numacpu import SIGNALS, NumaCpu, only_node
from reconciler.signals.readers import SampleContext, SampleSheet
from state.machine import parse
from state.model import NodeView, Pools
from state.topology import Topology
from tests.reconciler.nodes import container, cpu, node, pod
from tests.reconciler.signals.podtree import shared

TWO = parse("2 sockets x 4 cores")
FOUR = parse("4 sockets x 4 cores")


def sheet_of(view: NodeView, used: Mapping[str, float], pools: Pools | None = None) -> SampleSheet:
    """One pass, with the pods' use as the reader of their CPU time enters it."""
    sheet = SampleSheet()
    for uid, milli in used.items():
        sheet.put(f"pod:{uid}", "cpu.use", milli)
    trio.run(NumaCpu(shared()).read, SampleContext(view=view, pools=pools, wanted=SIGNALS), sheet, 100.0)
    return sheet


def on(view: NodeView, **sets: str) -> NodeView:
    """The view with the cpusets of the pods' containers as they were read."""
    actual = {
        (item.group.path, "cpu.set"): CpuSet.parse(sets[uid]) for uid in sets for item in view.pods[uid].containers
    }
    return replace(view, actual=actual)


def numbers(sheet: SampleSheet) -> dict[str, dict[str, float]]:
    """What was entered for NUMA nodes, and for pods' parts of them."""
    return {
        subject: {signal.removeprefix("cpu.numa_"): sample.value for signal, sample in samples.items()}
        for subject, samples in sheet.samples.items()
        if "numa:" in subject
    }


@pytest.mark.parametrize(("topology", "count"), [(TWO, 2), (FOUR, 4)])
def test_use_and_idle_time_of_each_node(topology: Topology, count: int) -> None:
    """Of four CPUs, node 0 has one at work, node 1 all but a quarter of one; of node 3 a CPU has no difference."""
    idle = dict.fromkeys(range(4 * count), 1.0) | {0: 0.0} | dict.fromkeys(range(4, 8), 0.0) | {5: 0.25}
    idle.pop(15, None)
    found = numbers(sheet_of(node(topology=topology, cpu=cpu(idle=idle, age=0.5)), {}))
    expected = {"numa:0": {"idle": 3000, "use": 1000}, "numa:1": {"idle": 250, "use": 3750}}
    if count == 4:
        expected |= {"numa:2": {"idle": 4000, "use": 0}, "numa:3": {"idle": 3000, "use": 1000}}
    assert found == expected


def test_the_age_is_that_of_the_sampler_and_without_a_reading_nothing_is_entered() -> None:
    idle = dict.fromkeys(range(8), 0.5)
    sheet = sheet_of(node(topology=TWO, cpu=cpu(idle=idle, age=0.5)), {})
    assert {sample.age_s for samples in sheet.samples.values() for sample in samples.values()} == {0.5}
    for unknown in (None, cpu(idle=idle, age=None), cpu()):
        assert numbers(sheet_of(node(topology=TWO, cpu=unknown), {})) == {}


def test_a_pod_on_one_node_has_all_of_its_use_there_and_a_pod_on_several_nowhere() -> None:
    two = pod("both", container("a"), container("b"))
    view = on(
        node(pod("left"), pod("right"), two, pod("wide"), topology=TWO), left="0-1", right="4-7", both="2-3", wide="3-4"
    )
    parts = sheet_of(view, {"left": 700, "right": 4000, "both": 100, "wide": 900})
    assert numbers(parts) == {
        "pod:left@numa:0": {"use": 700},
        "pod:right@numa:1": {"use": 4000},
        "pod:both@numa:0": {"use": 100},
    }
    # Containers on different nodes: the parts are unknown. A pod whose use is unknown has no part.
    apart = {
        (two.containers[0].group.path, "cpu.set"): CpuSet([0]),
        (two.containers[1].group.path, "cpu.set"): CpuSet([4]),
    }
    assert numbers(sheet_of(replace(view, actual=apart), {"both": 100})) == {}
    assert numbers(sheet_of(view, {})) == {}


def test_a_pod_whose_cpus_were_not_read_is_where_its_pool_is() -> None:
    pools = Pools(
        online_cpus=TWO.online,
        reserved=CpuSet(),
        dedicated={},
        shared=CpuSet.parse("0-5"),
        reclaimed=CpuSet.parse("6-7"),
        budget_milli=2000,
    )
    view = node(pod("be"), topology=TWO)
    assert numbers(sheet_of(view, {"be": 500}, pools)) == {"pod:be@numa:1": {"use": 500}}
    assert numbers(sheet_of(view, {"be": 500})) == {}


def test_on_one_node_the_pods_whole_is_its_part() -> None:
    view = on(node(pod("a"), topology=4, cpu=cpu(idle=dict.fromkeys(range(4), 0.5))), a="0")
    assert numbers(sheet_of(view, {"a": 500})) == {"numa:0": {"idle": 2000, "use": 2000}}


@pytest.mark.parametrize(
    ("cpus", "expected"), [("0-3", 0), ("12-15", 3), ("3-4", None), ("0-15", None), ("", None), ("15", 3)]
)
def test_the_node_that_has_all_of_the_cpus(cpus: str, expected: int | None) -> None:
    assert only_node(CpuSet.parse(cpus), FOUR) == expected


def test_the_reader_runs_after_the_one_whose_samples_it_takes() -> None:
    names = [row.name for row in READERS]
    assert names.index("cpu") < names.index("numacpu")
    assert next(row for row in READERS if row.name == "numacpu").needs == ("cpu",)
