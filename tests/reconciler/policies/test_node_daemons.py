"""The weight of other daemons in the plan, and the scheduler's files with it."""

from pathlib import Path

import pytest

from cgroupfs.codecs import weight_to_shares
from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.usage import UsageReader
from reconciler.actuators.files.node_files import FileAccess
from reconciler.control.planner import plan_node
from reconciler.policies.node_daemons import NodeDaemonsConfig, parents
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.yielding import scheduler_of
from reconciler.signals.root_groups import RootGroups
from state.daemons import TURN_FILES, DaemonGroup, Daemons
from state.plan import NodePlan
from tests.fakes.kernel import FakeKernel
from tests.reconciler.nodes import node

MEASURED = DaemonGroup(weight=1024, original=1024, wanted=114)
CFS = (6_000_000, 750_000, 1_000_000, 0)
KERNEL = (CFS, CFS, (750_000, 0))
SHORT = ((3_000_000, 200_000, 200_000, 1), (3_000_000, 200_000, 200_000, 1), (200_000, 1))


def turns(row: int, values: tuple[int, ...] = ()) -> dict[str, int]:
    return dict(zip(TURN_FILES[row], values or KERNEL[row], strict=True))


def plan(present: dict[str, int], group: DaemonGroup = MEASURED, *, dry_run: bool = False) -> NodePlan:
    daemons = Daemons(groups={"/system.slice": group}, turns=present)
    config = NodeDaemonsConfig(enabled=True, dry_run=dry_run)
    return plan_node(node(daemons=daemons), None, PoliciesConfig(node_daemons=config))


def wanted(planned: NodePlan) -> dict[str, object]:
    return {name: target.setting.value for name, target in planned.files.items() if target.setting is not None}


@pytest.mark.parametrize(
    ("row", "present"),
    [
        *enumerate(KERNEL),
        *enumerate(SHORT),  # of the run before: it stays in the plan, and so is not restored
        (0, (24_000_000, 10_000_000, 15_000_000, 0)),  # eight CPUs, tuned's throughput-performance
        (2, (2_800_000, 1)),
    ],
)
def test_turns_are_shortened_with_the_weight(row: int, present: tuple[int, ...]) -> None:
    planned = plan(turns(row, present))
    assert planned.daemons == {"/system.slice": 114}
    assert wanted(planned) == turns(row, SHORT[row])


def test_a_lower_value_is_unchanged() -> None:
    assert wanted(plan(turns(0, (1_000_000, 750_000, 100_000, 1)))) == {
        "kernel.sched_min_granularity_ns": 200_000,
        "sched_features.HRTICK": 1,
    }


@pytest.mark.parametrize("group", [DaemonGroup(weight=1024, original=1024), DaemonGroup()])
def test_before_the_need_is_measured_no_file_is_planned(group: DaemonGroup) -> None:
    assert plan(turns(0), group).files == {}


def test_on_a_kernel_whose_running_groups_keep_the_cpu_no_weight_is_lowered() -> None:
    daemons = Daemons(groups={"/system.slice": MEASURED}, turns=turns(2))
    view = node(daemons=daemons, scheduler=scheduler_of("6.18.44-amd64"))
    planned = plan_node(view, None, PoliciesConfig(node_daemons=NodeDaemonsConfig(enabled=True)))
    assert (planned.daemons, wanted(planned)) == ({}, {})
    assert "/system.slice: not on this kernel" in planned.reasons["node_daemons"]
    view = node(daemons=daemons, scheduler=scheduler_of("6.18.45-amd64"))
    assert plan_node(view, None, PoliciesConfig(node_daemons=NodeDaemonsConfig(enabled=True))).daemons


def test_where_turns_cannot_be_shortened_the_weight_is_held_and_the_reason_says_so() -> None:
    planned = plan({})
    assert planned.daemons == {"/system.slice": 114}
    assert "turns are not shortened: the scheduler's files" in planned.reasons["node_daemons"]
    assert "turns" not in plan(turns(2)).reasons["node_daemons"]


@pytest.mark.parametrize(("version", "written"), [(1, 114), (2, weight_to_shares(114))])
@pytest.mark.parametrize(("original", "reason"), [(1024, "200 % of what"), (114, "its own weight: a pod is")])
def test_the_weight_is_a_setting_of_the_daemons_group(version: int, written: int, original: int, reason: str) -> None:
    group = DaemonGroup(weight=original, original=original, wanted=114)
    view = node(daemons=Daemons(groups={"/system.slice": group}, turns={}), versions={"cpu": version})
    (setting,) = parents(view, plan({}, group), NodeDaemonsConfig(enabled=True))
    assert (setting.path, setting.knob, setting.value) == ("/system.slice", "cpu.weight", written)
    assert setting.reason.startswith(reason)


def test_a_dry_run_of_the_policy_counts_for_the_files_too() -> None:
    assert {target.dry_run for target in plan(turns(1), dry_run=True).files.values()} == {True}


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_files_that_are_read_are_those_that_are_written_and_only_all_of_them(tmp_path: Path, row: int) -> None:
    FakeKernel("v1", root=str(tmp_path)).install()
    hierarchy = Hierarchy.detect(str(tmp_path))

    def read() -> dict[str, int]:
        groups = RootGroups(hierarchy, UsageReader(hierarchy), "/kubepods", root=str(tmp_path), files=REAL)
        return dict(groups.known.turns)

    texts = (*(f"{value}\n" for value in KERNEL[row][:-1]), "GENTLE_FAIR_SLEEPERS NO_HRTICK NO_DOUBLE_TICK\n")
    for path, text in zip(TURN_FILES[row].values(), texts, strict=True):
        assert read() == {}
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert read() == turns(row)
    access = FileAccess(str(tmp_path), REAL)
    assert {name: access.value(name) for name in TURN_FILES[row]} == turns(row)
    feature = list(TURN_FILES[row])[-1]
    # A file keeps what it is given; the kernel's answers with all of its features.
    access.set(feature, 1)
    assert (tmp_path / TURN_FILES[row][feature]).read_text().startswith("HRTICK")
    (tmp_path / TURN_FILES[row][feature]).write_text("GENTLE_FAIR_SLEEPERS\n")
    assert access.value(feature) == f"/{TURN_FILES[row][feature]} has an unexpected text"
    assert read() == {}
