"""Plans: the order of the steps, and what is blocked by which rule; random trees are in test_plan_trees.py."""

import pytest

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.knobs import CATALOG
from cgroupfs.plan import KnobChange, WritePlan, order_changes
from tests.cputime import least_cpu_s

V1 = {"cpuset": 1, "cpu": 1, "memory": 1, "pids": 1}


V2 = {"cpuset": 2, "cpu": 2, "memory": 2, "pids": 2}


MEGA = 1 << 20


def sets(**values: str) -> dict[tuple[str, str], Value]:
    """Known cpu.set values: ``p_a="0-1"`` is group /p/a."""
    return {(_path(name), "cpu.set"): CpuSet.parse(text) for name, text in values.items()}


def want_sets(**values: str) -> list[KnobChange]:
    return [KnobChange(path=_path(name), knob="cpu.set", want=CpuSet.parse(text)) for name, text in values.items()]


def want(path: str, **values: Value) -> list[KnobChange]:
    return [KnobChange(path=path, knob=name.replace("_", "."), want=value) for name, value in values.items()]


def _path(name: str) -> str:
    return "/" + name.replace("_", "/")


def lines(plan: WritePlan) -> list[str]:
    return [f"{step.path} {step.file} {step.text}" for step in plan.steps]


def blocked(plan: WritePlan) -> list[tuple[str, str, str]]:
    return [(item.change.path, item.change.knob, item.rule) for item in plan.blocked]


# Sets


def test_sets_grow_from_the_root_down() -> None:
    plan = order_changes(want_sets(p="0-3", p_a="0-3", p_a_c="0-3"), sets(p="0", p_a="0", p_a_c="0"), V1)
    assert lines(plan) == ["/p cpuset.cpus 0-3", "/p/a cpuset.cpus 0-3", "/p/a/c cpuset.cpus 0-3"]
    assert not plan.blocked


def test_sets_shrink_from_the_leaves_up() -> None:
    plan = order_changes(want_sets(p="0", p_a="0", p_a_c="0"), sets(p="0-3", p_a="0-3", p_a_c="0-3"), V1)
    assert lines(plan) == ["/p/a/c cpuset.cpus 0", "/p/a cpuset.cpus 0", "/p cpuset.cpus 0"]


def test_partial_overlap_goes_through_the_union_only_where_a_child_stands_in_the_way() -> None:
    plan = order_changes(want_sets(p="2-3", p_a="2-3"), sets(p="0-1", p_a="0-1"), V1)
    assert lines(plan) == ["/p cpuset.cpus 0-3", "/p/a cpuset.cpus 2-3", "/p cpuset.cpus 2-3"]
    assert "child groups" in plan.steps[0].why


def test_a_leaf_is_written_once_even_on_partial_overlap() -> None:
    plan = order_changes(want_sets(p_a="1-2"), sets(p="0-3", p_a="0-1"), V1)
    assert lines(plan) == ["/p/a cpuset.cpus 1-2"]


def test_cpus_are_given_up_before_they_are_taken() -> None:
    plan = order_changes(want_sets(p_online="0-2", p_be="3"), sets(p="0-3", p_online="0-1", p_be="2-3"), V1)
    assert lines(plan) == ["/p/be cpuset.cpus 3", "/p/online cpuset.cpus 0-2"]
    back = order_changes(want_sets(p_be="2-3", p_online="0-1"), sets(p="0-3", p_online="0-2", p_be="3"), V1)
    assert lines(back) == ["/p/online cpuset.cpus 0-1", "/p/be cpuset.cpus 2-3"]


def test_a_fresh_v1_group_is_filled_below_its_parent() -> None:
    plan = order_changes(want_sets(p_a="0", p="0-1"), sets(p="", p_a=""), V1)
    assert lines(plan) == ["/p cpuset.cpus 0-1", "/p/a cpuset.cpus 0"]


def test_a_child_outside_its_parent_is_blocked_by_name() -> None:
    plan = order_changes(want_sets(p_a="0-3"), sets(p="0-1", p_a="0"), V1)
    assert blocked(plan) == [("/p/a", "cpu.set", "cpu.set: child inside parent")]
    assert plan.blocked[0].reason == "0-3 is not inside the 0-1 of /p"
    assert not plan.steps


def test_a_parent_that_would_shrink_below_an_unchanged_child_is_blocked() -> None:
    plan = order_changes(want_sets(p="0", p_b="0"), sets(p="0-1", p_a="0-1", p_b="0-1"), V1)
    assert blocked(plan) == [("/p", "cpu.set", "cpu.set: child inside parent")]
    assert lines(plan) == ["/p/b cpuset.cpus 0"]


def test_a_child_fits_again_when_the_parent_that_stood_against_it_is_blocked() -> None:
    plan = order_changes(want_sets(p="0", p_b="1"), sets(p="0-1", p_a="0-1", p_b="0"), V1)
    assert blocked(plan) == [("/p", "cpu.set", "cpu.set: child inside parent")]
    assert lines(plan) == ["/p/b cpuset.cpus 1"]


def test_groups_between_may_be_unknown() -> None:
    known = {("/p", "cpu.set"): CpuSet([0, 1]), ("/p/x/y/c", "cpu.set"): CpuSet([0, 1])}
    plan = order_changes([*want_sets(p="0"), *want("/p/x/y/c", cpu_set=CpuSet([0]))], known, V1)
    assert lines(plan) == ["/p/x/y/c cpuset.cpus 0", "/p cpuset.cpus 0"]


def test_v2_takes_a_child_outside_its_parent_but_gets_the_same_order() -> None:
    assert lines(order_changes(want_sets(p_a="0-3"), sets(p="0-1", p_a="0"), V2)) == ["/p/a cpuset.cpus 0-3"]
    plan = order_changes(want_sets(p="2-3", p_a="2-3"), sets(p="0-1", p_a="0-1"), V2)
    assert lines(plan) == ["/p cpuset.cpus 0-3", "/p/a cpuset.cpus 2-3", "/p cpuset.cpus 2-3"]


def test_an_unset_v2_set_counts_as_all_of_the_parents() -> None:
    plan = order_changes(want_sets(p="0", p_a="0"), sets(p="", p_a="0-1"), V2)
    assert lines(plan) == ["/p/a cpuset.cpus 0", "/p cpuset.cpus 0"]


# Bandwidth


def test_quotas_are_lowered_from_the_leaves_up_and_raised_from_the_root_down() -> None:
    known: dict[tuple[str, str], Value] = {("/p", "cpu.quota"): 50_000, ("/p/a", "cpu.quota"): 50_000}
    plan = order_changes([*want("/p", cpu_quota=20_000), *want("/p/a", cpu_quota=20_000)], known, V1)
    assert lines(plan) == ["/p/a cpu.cfs_quota_us 20000", "/p cpu.cfs_quota_us 20000"]
    plan = order_changes([*want("/p/a", cpu_quota=90_000), *want("/p", cpu_quota=90_000)], known, V1)
    assert lines(plan) == ["/p cpu.cfs_quota_us 90000", "/p/a cpu.cfs_quota_us 90000"]


def test_it_is_the_ratio_that_counts_and_the_nearest_limit_above() -> None:
    known: dict[tuple[str, str], Value] = {
        ("/p", "cpu.quota"): 50_000,
        ("/p/m", "cpu.quota"): None,
        ("/p/m/c", "cpu.quota"): None,
        ("/p/m/c", "cpu.period"): 10_000,
    }
    assert lines(order_changes(want("/p/m/c", cpu_quota=5_000), known, V1)) == ["/p/m/c cpu.cfs_quota_us 5000"]
    plan = order_changes(want("/p/m/c", cpu_quota=5_001), known, V1)
    assert blocked(plan) == [("/p/m/c", "cpu.quota", "cpu.quota: child ratio at most parent ratio")]
    assert plan.blocked[0].reason == "0.5 CPU exceed the 0.5 of /p"


def test_a_quota_below_a_childs_is_blocked_at_the_parent() -> None:
    known: dict[tuple[str, str], Value] = {("/p", "cpu.quota"): None, ("/p/a", "cpu.quota"): 50_000}
    plan = order_changes(want("/p", cpu_quota=40_000), known, V1)
    assert blocked(plan) == [("/p", "cpu.quota", "cpu.quota: child ratio at most parent ratio")]
    assert plan.blocked[0].reason == "its child /p/a has 0.5 CPU, more than 0.4"
    assert lines(order_changes(want("/p", cpu_quota=40_000), known, V2)) == ["/p cpu.max 40000"]


def test_a_limit_lifted_between_does_not_let_a_child_exceed_the_one_above() -> None:
    known: dict[tuple[str, str], Value] = {
        ("/p", "cpu.quota"): 80_000,
        ("/p/m", "cpu.quota"): 50_000,
        ("/p/m/c", "cpu.quota"): 50_000,
    }
    changes = [*want("/p", cpu_quota=30_000), *want("/p/m", cpu_quota=None)]
    plan = order_changes(changes, known, V1)
    assert blocked(plan) == [("/p", "cpu.quota", "cpu.quota: child ratio at most parent ratio")]
    assert lines(plan) == ["/p/m cpu.cfs_quota_us -1"]


def test_burst_falls_before_the_quota_and_rises_after_it() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.quota"): 50_000, ("/c", "cpu.burst"): 40_000}
    plan = order_changes(want("/c", cpu_quota=10_000, cpu_burst=0), known, V1)
    assert lines(plan) == ["/c cpu.cfs_burst_us 0", "/c cpu.cfs_quota_us 10000"]
    plan = order_changes(want("/c", cpu_quota=90_000, cpu_burst=80_000), known, V2)
    assert lines(plan) == ["/c cpu.max 90000", "/c cpu.max.burst 80000"]


@pytest.mark.parametrize("versions", [V1, V2])
def test_a_quota_below_the_burst_that_stays_is_blocked(versions: dict[str, int]) -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.quota"): 50_000, ("/c", "cpu.burst"): 40_000}
    plan = order_changes(want("/c", cpu_quota=10_000), known, versions)
    assert blocked(plan) == [("/c", "cpu.quota", "cpu.burst at most cpu.quota")]
    plan = order_changes(want("/c", cpu_burst=60_000), known, versions)
    assert blocked(plan) == [("/c", "cpu.burst", "cpu.burst at most cpu.quota")]


def test_v1_period_and_quota_of_a_leaf_go_through_the_smaller_ratio() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.quota"): 50_000, ("/c", "cpu.period"): 100_000}
    plan = order_changes(want("/c", cpu_quota=25_000, cpu_period=50_000), known, V1)
    assert lines(plan) == ["/c cpu.cfs_quota_us 25000", "/c cpu.cfs_period_us 50000"]


def test_v1_period_and_quota_above_a_limited_group_go_through_no_limit() -> None:
    known: dict[tuple[str, str], Value] = {
        ("/c", "cpu.quota"): 50_000,
        ("/c", "cpu.period"): 100_000,
        ("/c/d", "cpu.quota"): 50_000,
    }
    plan = order_changes(want("/c", cpu_quota=25_000, cpu_period=50_000), known, V1)
    assert lines(plan) == ["/c cpu.cfs_quota_us -1", "/c cpu.cfs_period_us 50000", "/c cpu.cfs_quota_us 25000"]


def test_v2_period_and_quota_are_one_line() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.quota"): 50_000, ("/c", "cpu.period"): 100_000}
    assert lines(order_changes(want("/c", cpu_period=50_000), known, V2)) == ["/c cpu.max 50000 50000"]
    plan = order_changes(want("/c", cpu_quota=None, cpu_period=50_000), known, V2)
    assert lines(plan) == ["/c cpu.max max 50000"]


def test_a_v2_period_without_a_known_quota_is_blocked() -> None:
    plan = order_changes(want("/c", cpu_period=50_000), {("/c", "cpu.period"): 100_000}, V2)
    assert blocked(plan) == [("/c", "cpu.period", "unknown")]


# The rest


def test_idle_blocks_the_weight_until_it_is_left() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.idle"): 1, ("/c", "cpu.weight"): 3}
    assert blocked(order_changes(want("/c", cpu_weight=100), known, V1)) == [
        ("/c", "cpu.weight", "cpu.idle blocks cpu.weight")
    ]
    plan = order_changes(want("/c", cpu_weight=100, cpu_idle=0), known, V1)
    assert lines(plan) == ["/c cpu.idle 0", "/c cpu.shares 100"]
    plan = order_changes(want("/c", cpu_weight=3, cpu_idle=0), known, V1)
    assert lines(plan) == ["/c cpu.idle 0", "/c cpu.shares 3"]


def test_the_weight_of_a_group_that_becomes_idle_is_written_before() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.idle"): 0, ("/c", "cpu.weight"): 2}
    plan = order_changes(want("/c", cpu_idle=1, cpu_weight=1_024), known, V2)
    assert lines(plan) == ["/c cpu.weight 39", "/c cpu.idle 1"]
    assert not plan.blocked
    assert lines(order_changes(want("/c", cpu_idle=1, cpu_weight=2), known, V2)) == ["/c cpu.idle 1"]


def test_levels_are_set_and_an_offline_group_never_comes_back() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.identity"): 0, ("/c", "cpu.qos"): 0, ("/d", "cpu.qos"): -1}
    plan = order_changes([*want("/c", cpu_identity=2, cpu_qos=-1), *want("/d", cpu_qos=0)], known, V1)
    assert lines(plan) == ["/c cpu.bvt_warp_ns 2", "/c cpu.qos_level -1"]
    assert blocked(plan) == [("/d", "cpu.qos", "one way")]
    assert lines(order_changes(want("/c", cpu_identity=-1), {("/c", "cpu.identity"): 2}, V2)) == [
        "/c cpu.bvt_warp_ns -1"
    ]


@pytest.mark.parametrize(
    ("old", "new", "order"),
    [
        ((2, 2), (4, 4), ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]),
        ((4, 4), (2, 2), ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]),
        ((None, None), (2, 2), ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]),
        ((2, 2), (None, None), ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]),
        ((2, 8), (4, 4), ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]),
    ],
)
def test_v1_memory_and_swap_never_cross(
    old: tuple[int | None, int | None], new: tuple[int | None, int | None], order: list[str]
) -> None:
    (limit, swap), (new_limit, new_swap) = ([None if n is None else n * MEGA for n in pair] for pair in (old, new))
    known = {("/c", "memory.max"): limit, ("/c", "memory.swap"): swap}
    plan = order_changes(want("/c", memory_max=new_limit, memory_swap=new_swap), known, V1)
    assert [step.file for step in plan.steps] == order


def test_v1_memory_above_a_swap_that_stays_is_blocked_and_so_is_the_reverse() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "memory.max"): 2 * MEGA, ("/c", "memory.swap"): 2 * MEGA}
    plan = order_changes(want("/c", memory_max=4 * MEGA), known, V1)
    assert blocked(plan) == [("/c", "memory.max", "memory.max at most memory.swap")]
    plan = order_changes(want("/c", memory_swap=MEGA), known, V1)
    assert blocked(plan) == [("/c", "memory.swap", "memory.swap at least memory.max")]


def test_a_v2_limit_below_usage_is_never_written() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "memory.max"): None}
    change = KnobChange(path="/c", knob="memory.max", want=8 * MEGA)
    assert blocked(order_changes([change], known, V2)) == [("/c", "memory.max", "memory.max below usage kills")]
    below = KnobChange(path="/c", knob="memory.max", want=8 * MEGA, usage_bytes=8 * MEGA + 1)
    assert "8388609 bytes in use" in order_changes([below], known, V2).blocked[0].reason
    fits = KnobChange(path="/c", knob="memory.max", want=8 * MEGA, usage_bytes=8 * MEGA)
    (step,) = order_changes([fits], known, V2).steps
    assert (step.slow, step.guard) == (True, "memory.current")


def test_a_raised_v2_limit_needs_no_usage_and_v1_answers_busy_by_itself() -> None:
    (raised,) = order_changes(want("/c", memory_max=None), {("/c", "memory.max"): MEGA}, V2).steps
    assert (raised.slow, raised.guard, raised.text) == (False, None, "max")
    lower = KnobChange(path="/c", knob="memory.max", want=MEGA, reclaim=True)
    (lowered,) = order_changes([lower], {("/c", "memory.max"): None}, V1).steps
    assert (lowered.slow, lowered.guard) == (True, None)


def test_a_limit_that_may_reclaim_goes_to_the_writer_and_one_that_may_not_is_guarded_on_v1_too() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "memory.max"): None}
    below = KnobChange(path="/c", knob="memory.max", want=8 * MEGA, usage_bytes=9 * MEGA, reclaim=True)
    (step,) = order_changes([below], known, V2).steps
    assert (step.slow, step.guard, step.reclaim) == (True, "memory.current", True)
    kept = KnobChange(path="/c", knob="memory.max", want=8 * MEGA)
    (step,) = order_changes([kept], known, V1).steps
    assert (step.guard, step.reclaim) == ("memory.usage_in_bytes", False)
    # What a group has in swap counts as well: its limit of memory may be above its memory, and this one below both.
    both = KnobChange(path="/c", knob="memory.swap", want=8 * MEGA)
    (step,) = order_changes([both], {("/c", "memory.max"): 8 * MEGA, ("/c", "memory.swap"): None}, V1).steps
    assert (step.guard, step.reclaim) == ("memory.memsw.usage_in_bytes", False)


@pytest.mark.parametrize(
    ("have", "reclaim", "slow", "guard"),
    [(None, True, True, "memory.current"), (None, False, True, None), (MEGA, True, False, None)],
)
def test_a_lowered_bound_takes_memory_first_where_it_may_and_is_written_in_any_case(
    have: int | None, reclaim: bool, slow: bool, guard: str | None
) -> None:
    change = KnobChange(path="/c", knob="memory.high", have=have, want=8 * MEGA, reclaim=reclaim)
    plan = order_changes([change], {}, V2)
    assert not plan.blocked
    (step,) = plan.steps
    assert (step.slow, step.guard) == (slow, guard)
    assert step.reclaim is step.anyway is (guard is not None)


def test_protections_soft_limits_and_the_oom_group_are_plain_writes() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "memory.high"): None}
    together = KnobChange(path="/c", knob="memory.oom_group", want=1)
    plan = order_changes([*want("/c", memory_min=MEGA, memory_low=2 * MEGA), together], known, V2)
    assert lines(plan) == ["/c memory.min 1048576", "/c memory.low 2097152", "/c memory.oom.group 1"]
    plan = order_changes(want("/c", memory_soft=MEGA), {("/c", "memory.soft"): None}, V1)
    assert [(step.file, step.text, step.slow) for step in plan.steps] == [
        ("memory.soft_limit_in_bytes", "1048576", False)
    ]


def test_slow_steps_come_last() -> None:
    known: dict[tuple[str, str], Value] = {("/a", "memory.max"): None, ("/b", "pids.max"): None}
    plan = order_changes([*want("/a", memory_max=MEGA), *want("/b", pids_max=9)], known, V1)
    assert [(step.file, step.slow) for step in plan.steps] == [("pids.max", False), ("memory.limit_in_bytes", True)]


@pytest.mark.parametrize(
    ("change", "versions", "rule"),
    [
        (KnobChange(path="/c", knob="cpu.colour", want=1), V1, "knob"),
        (KnobChange(path="/c", knob="cpu.weight", want=2), {"memory": 1}, "controller"),
        (KnobChange(path="/c", knob="memory.high", want=MEGA), V1, "version"),
        (KnobChange(path="/", knob="cpu.weight", want=2), V1, "root"),
        (KnobChange(path="/c", knob="cpu.weight", want=1), V1, "value"),
        (KnobChange(path="/c", knob="cpu.set", want=EMPTY), V1, "value"),
        (KnobChange(path="/c", knob="memory.max", want=0), V2, "value"),
        (KnobChange(path="/c", knob="cpu.set", want=CpuSet([0])), V1, "unknown"),
        (KnobChange(path="/c", knob="cpu.quota", want=5_000), V1, "unknown"),
    ],
)
def test_what_cannot_be_reached_is_blocked_with_its_rule(
    change: KnobChange, versions: dict[str, int], rule: str
) -> None:
    plan = order_changes([change], {}, versions)
    assert [(item.change, item.rule) for item in plan.blocked] == [(change, rule)]
    assert plan.blocked[0].reason
    assert not plan.steps


def test_a_value_that_is_there_already_makes_no_step() -> None:
    known: dict[tuple[str, str], Value] = {
        ("/c", "cpu.set"): CpuSet([1]),
        ("/c", "cpu.weight"): 1_000,
        ("/c", "memory.max"): 3 * MEGA,
    }
    changes = want("/c", cpu_set=CpuSet([1]), cpu_weight=1_024, memory_max=3 * MEGA + 1)
    assert order_changes(changes, known, V2) == WritePlan(steps=())


def test_the_later_of_two_changes_counts_and_have_goes_before_the_table() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.weight"): 2}
    plan = order_changes([*want("/c", cpu_weight=5), *want("/c", cpu_weight=6)], known, V1)
    assert lines(plan) == ["/c cpu.shares 6"]
    assert not order_changes([KnobChange(path="/c", knob="cpu.weight", have=6, want=6)], known, V1).steps


def test_mixed_versions_write_each_controllers_own_files() -> None:
    known: dict[tuple[str, str], Value] = {("/c", "cpu.quota"): None, ("/c", "memory.high"): None}
    changes = want("/c", cpu_quota=5_000, memory_high=MEGA)
    plan = order_changes(changes, known, {"cpu": 1, "memory": 2})
    assert [(step.controller, step.version, step.file) for step in plan.steps] == [
        ("cpu", 1, "cpu.cfs_quota_us"),
        ("memory", 2, "memory.high"),
    ]


def test_three_thousand_changes_are_ordered_in_linear_time() -> None:
    known: dict[tuple[str, str], Value] = {("/k", "cpu.set"): CpuSet.span(64), ("/k", "cpu.quota"): None}
    for pod in range(500):
        known[f"/k/p{pod}", "cpu.set"] = CpuSet.span(64)
        for container in range(2):
            known[f"/k/p{pod}/{container}", "cpu.set"] = CpuSet.span(32)
            known[f"/k/p{pod}/{container}", "cpu.quota"] = None
            known[f"/k/p{pod}/{container}", "cpu.weight"] = 2
    containers = [path for path, knob in known if knob == "cpu.weight"]
    changes = [
        change for path in containers for change in want(path, cpu_set=CpuSet([1]), cpu_quota=5_000, cpu_weight=9)
    ]
    assert len(changes) == 3_000
    assert len(order_changes(changes, known, V1).steps) == 3_000
    # Measured 25-30 ms.
    assert least_cpu_s(lambda: order_changes(changes, known, V1), 0.1) < 0.1


@pytest.mark.parametrize("version", [1, 2])
def test_no_knob_of_the_catalog_is_forgotten(version: int) -> None:
    versions = dict.fromkeys({knob.controller for knob in CATALOG.values()}, version)
    for knob in CATALOG.values():
        value: Value = CpuSet([0]) if knob.unit in {"CPUs", "nodes"} else 1 if knob.unit == "flag" else None
        path = "/" if knob.root_only else "/p"
        plan = order_changes([KnobChange(path=path, knob=knob.name, want=value)], {}, versions)
        assert len(plan.steps) + len(plan.blocked) == 1, knob.name
