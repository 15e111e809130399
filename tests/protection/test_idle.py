"""The tables of docs/cpu.md are the record's, and what the daemon relies on is what was measured."""

from pathlib import Path
from typing import Final

import pytest

from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.yielding import scheduler_of
from tests.protection.idle import QUOTAS, Kernel, measured, quota_table, tables
from tests.protection.report import read_record
from tests.reconciler.nodes import MAINLINE, node, pod

DOCS: Final = Path(__file__).parents[2] / "docs"
FOUND: Final = measured(read_record(DOCS / "idle-class.jsonl"))
SERVED: Final = 0.995
NO_HARM: Final = 0.02
ENDANGERED: Final = 0.3
FOUND_ELSEWHERE: Final = 0.75
NOT_FOUND: Final = 0.2
V2: Final = [kernel for kernel in FOUND.groups if kernel.layout == "v2"]


def waits(kernel: Kernel, form: str) -> float:
    """Of what a pod that needs three quarters of the CPU runs and waits: its waiting."""
    return float(FOUND.waits[kernel, form]["heavy"]["waited"])


def test_the_document_has_the_tables_of_waiting_of_the_record() -> None:
    """Placement and files are printed by the program alone; docs/protection.md has a summary of the first."""
    document = (DOCS / "cpu.md").read_text()
    waiting, placement, files = tables(FOUND).split("\n\n")
    assert waiting in document
    for kernel in FOUND.groups:
        none, quota = (FOUND.waits[kernel, form]["light"]["waited"] for form in ("besteffort", "besteffort quota"))
        shown = f"{100 * quota:.2f} instead of {100 * none:.2f} % on {kernel.title}" in " ".join(document.split())
        assert shown == (kernel.title in {"5.10 v1", "6.12 v2"})
    assert quota_table(FOUND).count("\n") == 6
    assert placement.count("\n") == 7
    assert files.count("\n") == 6
    assert {kernel.title for kernel in FOUND.groups} == {"5.10 v1", "5.10 v2", "6.1 v1", "6.1 v2", "6.12 v2"}


@pytest.mark.parametrize("kernel", FOUND.groups, ids=lambda kernel: kernel.title)
def test_the_forms_of_the_preset_are_the_ones_that_do_no_harm_on_each_kernel(kernel: Kernel) -> None:
    knobs = MAINLINE if FOUND.groups[kernel]["idle"] else MAINLINE - {"cpu.idle"}
    for place, qos in (("besteffort", QosClass.BESTEFFORT), ("beside", QosClass.BURSTABLE)):
        view = node(pod("batch", qos=qos), knobs=knobs, scheduler=scheduler_of(f"{kernel.series}.0"))
        desired = plan(view, None, PoliciesConfig(idle_class=IdleClassConfig(enabled=True, threads=True)))
        groups = any(knob == "cpu.idle" for _, knob in desired.settings)
        threads = desired.plan.idle_threads is not None
        form = place + {(True, True): " both", (True, False): " group", (False, True): " threads"}.get(
            (groups, threads), ""
        )
        assert FOUND.waits[kernel, form]["light"]["at_once"] > SERVED
        assert waits(kernel, form) < NO_HARM
    assert CATALOG["cpu.idle"].forms[1 if kernel.layout == "v1" else 2].since == "5.15"


@pytest.mark.parametrize("kernel", FOUND.groups, ids=lambda kernel: kernel.title)
def test_beside_the_least_weight_a_quota_makes_online_pods_wait(kernel: Kernel) -> None:
    """Why a cut of the harm law takes CPUs and writes no quota."""
    waited = {form: FOUND.waits[kernel, form]["light"]["waited"] for form in QUOTAS if (kernel, form) in FOUND.waits}
    without = waited["besteffort"]
    assert max(waited["besteffort quota"], waited["besteffort small quota"]) >= 4 * without
    assert all(share >= without - 0.001 for share in waited.values())


@pytest.mark.parametrize("kernel", V2, ids=lambda kernel: kernel.title)
def test_threads_count_where_idle_threads_of_another_group_are_preempted(kernel: Kernel) -> None:
    usual, idle = (FOUND.waits[kernel, f"beside equal{side}"]["light"]["at_once"] for side in ("", " threads"))
    assert usual < SERVED
    assert (idle > SERVED) is scheduler_of(f"{kernel.series}.0").threads_yield


def placed(kernel: Kernel, cpus: int, kept: int) -> dict[str, float]:
    """How often a wake-up is placed on another CPU than the busy one, by form."""
    return {
        form: share
        for (measured_on, form, *rest), share in FOUND.placed.items()
        if measured_on == kernel and rest == [cpus, kept] and form.startswith("besteffort")
    }


@pytest.mark.parametrize("kernel", FOUND.groups, ids=lambda kernel: kernel.title)
def test_wake_ups_find_idle_class_cpus_before_6_0_and_later_only_below_the_limit_of_use(kernel: Kernel) -> None:
    before = (int(kernel.series.split(".")[0]), int(kernel.series.split(".")[1])) < (6, 0)
    for cpus, kept, below in ((2, 0, False), (4, 0, False), (4, 1, False), (8, 0, False), (8, 1, False), (8, 2, True)):
        assert ((cpus - kept) / cpus <= (1 - 1 / cpus) ** 0.5 / 1.17) is below, "the document's limit"
        shares = placed(kernel, cpus, kept)
        for form in set(shares) - {"besteffort"}:
            assert (shares[form] > FOUND_ELSEWHERE) is (before or below), (form, cpus, kept)
        assert shares["besteffort"] < NOT_FOUND


@pytest.mark.parametrize("kernel", FOUND.groups, ids=lambda kernel: kernel.title)
def test_what_the_harm_law_refuses_does_not_protect(kernel: Kernel) -> None:
    """`reconciler.policies.yielding`: threads without the least weight; a Guaranteed pod beside burstable."""
    below = [form for measured_on, form in FOUND.waits if measured_on == kernel and form.startswith("above")]
    assert len(below) in {2, 4}
    assert min(waits(kernel, form) for form in ("beside equal threads", *below)) > ENDANGERED
    assert waits(kernel, "beside threads") < NO_HARM


@pytest.mark.parametrize("row", FOUND.inherited.values(), ids=FOUND.inherited)
def test_the_class_of_a_thread_is_inherited_and_cannot_be_left_without_a_capability(row: dict[str, object]) -> None:
    assert [row[name] for name in ("thread", "fork", "exec", "leaves_unprivileged")] == [True, True, True, False]
