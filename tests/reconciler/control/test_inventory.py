"""The inventory has one way in for readings, and the view of the moment has all of them."""

import ast
import re
from collections.abc import Callable
from typing import get_type_hints

import pytest
from msgspec.structs import fields, replace

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import Driver, Layout, QosClass
from reconciler.control.inventory import Inventory, InventoryReadings, NewReadings
from reconciler.pods.selectors import ClassRules
from reconciler.sources.runtime_roots import RuntimeDirs
from reconciler.sources.tree import PodDirs
from state.cpu import GroupUse, HarmReading, OwnerCpus
from state.daemons import DaemonGroup, Daemons
from state.hosts import HostWorkloads
from state.measures import Restrictions
from state.memory import NodeMemoryReading
from state.model import CpuPolicy, GroupRef, KubeletView, NodeCpu, NodeView, NumaMemory
from state.topology import uniform
from tests.fakes.marks import MARKS
from tests.reconciler.nodes import cpus
from tests.sourcetrees import ROOT, nodes, product

NEWS: NewReadings = {
    "topology": uniform(cores=4, threads=1),
    "kubelet": KubeletView(policy=CpuPolicy.STATIC),
    "cpu": NodeCpu(busy_milli=3, online_milli=2, reclaimed_milli=1),
    "reclaimed_ceiling_milli": 700,
    "node_memory": NodeMemoryReading(total_bytes=10, available_bytes=5),
    "reclaimed_memory_bytes": 4,
    "uses": {"/kubepods/poda": GroupUse(cpu_milli=5)},
    "lent_us": {"/kubepods/poda": 250_000},
    "commands": {"a" * 64: 7.0},
    "knobs": frozenset({"cpu.set"}),
    "daemons": Daemons(groups={"/system.slice": DaemonGroup(weight=1024)}),
    "numa_memory": NumaMemory(free={0: 1}),
    "irq_cpus": cpus("3"),
    "measures": Restrictions(budget_milli=100),
    "be_bonus": {"/kubepods/poda": 150},
    "harm": HarmReading(ceiling_milli=900),
    "idle_threads": frozenset({"/kubepods/besteffort/podb"}),
    "realtime": frozenset({"0a"}),
    "kubepods_cpus": CpuSet.span(3),
    "owners": {"a/main": OwnerCpus(record=cpus("7"), kernel=cpus("1-6"))},
    "hosts": HostWorkloads(be_milli=300),
}
UNPLANNED = {"hosts"}
"""What no policy decides by."""


@pytest.fixture
def inventory() -> Inventory:
    return inventory_of(lambda _: False)


def inventory_of(awaited: Callable[[str], bool]) -> Inventory:
    return Inventory(
        topology=uniform(cores=2, threads=1),
        versions={"cpu": 2},
        layout=Layout(Driver.CGROUPFS),
        dirs=RuntimeDirs(states=(), bundles=()),
        rules=ClassRules,
        metas=lambda _: [],
        signalled=lambda _: False,
        awaited=awaited,
        disks=dict,
        indicators=dict,
        marks=MARKS,
    )


def test_what_can_be_handed_in_is_what_the_view_has() -> None:
    names = {field.name for field in fields(InventoryReadings)}
    assert names == get_type_hints(NewReadings).keys() == NEWS.keys()
    assert names - UNPLANNED <= {field.name for field in fields(NodeView)}


@pytest.mark.parametrize("name", sorted(NEWS.keys() - UNPLANNED))
def test_a_reading_counts_from_then_on_and_changes_nothing_else(inventory: Inventory, name: str) -> None:
    before = inventory.view(1.0, {})
    inventory.take(**{name: NEWS[name]})  # type: ignore[literal-required]  # each name in turn
    after = inventory.view(1.0, {})
    changed = {field.name for field in fields(NodeView) if getattr(before, field.name) != getattr(after, field.name)}
    assert changed == {name}
    assert getattr(after, name) == NEWS[name]  # type: ignore[literal-required]


def test_the_answer_is_the_next_state_and_the_one_before_stays_as_it_was(inventory: Inventory) -> None:
    first = inventory.readings
    second = inventory.take(**NEWS)
    assert second is inventory.readings
    assert (first.cpu, second.cpu) == (None, NEWS["cpu"])


def test_no_other_module_assigns_an_attribute_of_the_inventory() -> None:
    texts = [
        f"{path.relative_to(ROOT)}:{target.lineno}"
        for path in product()
        if re.search(r"\b(knowledge|inventory)\b", path.read_text())
        for statement in nodes(path)
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[-1] in {"knowledge", "inventory"}
    ]
    assert texts == []


def test_a_container_in_creation_arrives_with_the_first_view_after_it_and_is_forgotten_with_its_directory() -> None:
    waiting = {"new"}
    inventory = inventory_of(lambda cid: cid in waiting)

    def pod(*ids: str) -> PodDirs:
        groups = {cid: GroupRef(path=f"/kubepods/poda/{cid}") for cid in ids}
        return PodDirs(uid="a", qos=QosClass.GUARANTEED, group=GroupRef(path="/kubepods/poda"), containers=groups)

    inventory.sample("a", pod("old"))
    assert inventory.view(1.0, {}).arrived == {}, "it ran before: its record may only be unreadable"
    inventory.sample("a", pod("old", "new"))
    assert inventory.view(2.0, {}).arrived == {"new": 2.0}
    waiting.clear()
    inventory.sample("a", pod("old", "new"))
    assert inventory.view(9.0, {}).arrived == {"new": 2.0}, "its start is its start"
    inventory.sample("a", pod("old"))
    assert inventory.view(10.0, {}).arrived == {}


def test_a_pods_group_without_a_container_arrives_and_removed_containers_are_counted() -> None:
    inventory = inventory_of(lambda _cid: False)
    empty = PodDirs(uid="a", qos=QosClass.GUARANTEED, group=GroupRef(path="/kubepods/poda"), containers={})
    filled = replace(empty, containers={cid: GroupRef(path=f"/kubepods/poda/{cid}") for cid in ("one", "two")})
    inventory.sample("a", empty)
    assert inventory.view(1.0, {}).arrived == {"a": 1.0}
    inventory.sample("a", filled)
    assert inventory.removed == 0
    inventory.sample("a", empty)
    assert inventory.view(3.0, {}).arrived == {"a": 1.0}, "it ends: that is no start"
    inventory.sample("a", None)
    assert (inventory.view(4.0, {}).arrived, inventory.removed) == ({}, 2)
