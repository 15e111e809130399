import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.signals.cpu import (
    CpuReading,
    CpuSampler,
    CpuTicks,
    idle_sample,
    idle_shares,
    node_cpu,
    parse_stat,
)
from state.model import PodClass
from tests.known import known
from tests.reconciler.nodes import cpus

STAT = """cpu  30 0 30 300 30 0 0 3 0 0
cpu0 10 1 20 100 7 2 3 4 5 6
cpu2 20 0 10 200 0 0 0 0 0 0
intr 12345 0 9
ctxt 77
"""
S = 1_000_000_000
CLASSES = {"on": PodClass.SHARED, "be": PodClass.RECLAIMED, "sys": PodClass.SYSTEM}


def reading(at_s: float, busy: list[int], idle: list[int], **pods: int) -> CpuReading:
    ticks = {cpu: CpuTicks(busy[cpu], idle[cpu]) for cpu in range(len(busy))}
    return CpuReading(at_s=at_s, cpus=ticks, pods=pods)


def two(**pods: tuple[int | None, int | None]) -> tuple[CpuReading, CpuReading]:
    """One second of two CPUs, one three quarters busy, one idle; pods as (before, after), None for absent."""
    before = {uid: then for uid, (then, _) in pods.items() if then is not None}
    after = {uid: now for uid, (_, now) in pods.items() if now is not None}
    return reading(10.0, [100, 100], [500, 500], **before), reading(11.0, [175, 100], [525, 600], **after)


# --- /proc/stat ----------------------------------------------------------------------------------------------------


def test_waiting_for_a_disk_is_idle_stolen_time_is_busy_and_guests_are_not_counted_twice() -> None:
    assert parse_stat(STAT) == {0: CpuTicks(busy=40, idle=107), 2: CpuTicks(busy=30, idle=200)}
    assert parse_stat("cpu0 1 2 3 4\n") == {0: CpuTicks(busy=6, idle=4)}, "an old kernel has four counters"


@pytest.mark.parametrize("text", ["", "cpu  1 2 3 4\n", "intr 5\ncpu0 1 2 3 4\n", "cpu0 1 2 3\n", "cpu0 a b c d\n"])
def test_text_without_a_usable_cpu_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cpuN line|CPU line"):
        parse_stat(text)


def test_this_machines_own_file_is_read() -> None:
    with open("/proc/stat", encoding="ascii") as file:
        result = parse_stat(file.read())
    assert len(result) == os.sysconf("SC_NPROCESSORS_ONLN")


def test_idle_shares_need_a_difference() -> None:
    before = {0: CpuTicks(0, 0), 1: CpuTicks(5, 5), 2: CpuTicks(9, 9), 3: CpuTicks(0, 10)}
    after = {0: CpuTicks(25, 75), 1: CpuTicks(5, 5), 2: CpuTicks(1, 1), 3: CpuTicks(5, 9), 4: CpuTicks(1, 1)}
    assert idle_shares(before, after) == {0: 0.75, 3: 0.0}


# --- pods and machine together -------------------------------------------------------------------------------------


def test_use_is_split_into_online_reclaimed_and_system() -> None:
    use = known(node_cpu(*two(on=(S, S + S // 5), be=(0, S // 4), sys=(0, S // 10)), CLASSES))
    assert (use.busy_milli, use.online_milli, use.reclaimed_milli, use.system_milli) == (750, 300, 250, 200)
    assert use.idle == {0: 0.25, 1: 1.0}
    assert (use.interval_s, use.age_s) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("before", "after", "reclaimed"),
    [
        (None, S // 4, 250),
        (9 * S, S // 4, 250),
        (None, 900 * S, 0),
        (S, None, 0),
    ],
    ids=["new pod", "counter restarted", "older use than can be dated", "pod is gone"],
)
def test_counters_that_begin_or_end(before: int | None, after: int | None, reclaimed: int) -> None:
    use = known(node_cpu(*two(be=(before, after)), CLASSES))
    assert use.reclaimed_milli == reclaimed
    assert use.system_milli == 750 - reclaimed


def test_a_pod_of_unknown_class_is_online() -> None:
    use = known(node_cpu(*two(who=(0, S // 4)), CLASSES))
    assert (use.online_milli, use.reclaimed_milli) == (250, 0)


def test_a_cpu_just_plugged_in_is_busy_until_it_is_known_and_one_that_went_away_is_not_counted() -> None:
    use = known(node_cpu(reading(0.0, [0], [0]), reading(1.0, [0, 50], [100, 50]), {}))
    assert (use.busy_milli, use.idle) == (1000, {0: 1.0})
    assert known(node_cpu(reading(0.0, [0, 0], [0, 0]), reading(1.0, [0], [100]), {})).busy_milli == 0


@pytest.mark.parametrize("later", [-1.0, 0.0, 0.04])
def test_readings_too_close_or_in_the_wrong_order_say_nothing(later: float) -> None:
    assert node_cpu(reading(1.0, [0], [0]), reading(1.0 + later, [5], [5]), {}) is None


ticks = st.builds(CpuTicks, st.integers(0, 10_000), st.integers(0, 10_000))
readings = st.builds(
    CpuReading,
    at_s=st.floats(0, 10),
    cpus=st.dictionaries(st.integers(0, 5), ticks, min_size=1),
    pods=st.dictionaries(st.sampled_from(["on", "be", "x"]), st.integers(0, 10**12)),
)


@given(before=readings, after=readings)
def test_no_pair_of_readings_gives_an_impossible_number(before: CpuReading, after: CpuReading) -> None:
    use = node_cpu(before, after, CLASSES)
    if use is not None:
        top = 1000 * len(after.cpus)
        assert 0 <= use.busy_milli <= top
        assert min(use.online_milli, use.reclaimed_milli, use.system_milli) >= 0
        assert all(0.0 <= share <= 1.0 for share in use.idle.values())
        assert set(use.idle) <= set(after.cpus) & set(before.cpus)


# --- over time -----------------------------------------------------------------------------------------------------


def at(at_s: float, busy: int, idle: int) -> CpuReading:
    return reading(at_s, [busy], [idle])


def test_the_sampler_needs_two_readings_and_one_too_soon_keeps_the_last_answer_and_the_longer_interval() -> None:
    sampler = CpuSampler()
    assert sampler.sample(at(1.0, 0, 0), {}) is None
    first, later = known(sampler.sample(at(2.0, 30, 70), {})), known(sampler.current(7.5))
    assert [(use.busy_milli, use.age_s) for use in (first, later)] == [(300, 0.0), (300, 5.5)]
    assert known(sampler.sample(at(2.01, 31, 70), {})).busy_milli == 300
    again = known(sampler.sample(at(3.0, 80, 120), {}))
    assert (again.busy_milli, again.interval_s) == (500, 1.0)


def test_a_clock_that_went_back_begins_anew() -> None:
    sampler = CpuSampler()
    sampler.sample(at(100.0, 0, 0), {})
    assert sampler.sample(at(1.0, 30, 70), {}) is None
    fresh = known(sampler.sample(at(2.0, 40, 160), {}))
    assert fresh.busy_milli == 100


# --- the idle buffer's look ----------------------------------------------------------------------------------------


def test_the_look_counts_idle_time_on_the_watched_cpus_and_be_use() -> None:
    before, after = two()
    look = idle_sample(before, after, cpus("0-1"), reclaimed_ns=(S, S + S // 2))
    assert (look.top_milli, look.idle_milli, look.reclaimed_milli) == (2000, 1250, 500)
    # A CPU of which nothing is known is not idle.
    idle = [idle_sample(before, after, cpus(text)).idle_milli for text in ("0", "0-2", "2")]
    assert idle == [250, 1250, None]
    assert idle_sample(after, after, cpus("0-1"), reclaimed_ns=(0, 0)).idle_milli is None, "too soon"
    for counters in ((S, 0), (None, S)):
        assert idle_sample(before, after, cpus("0-1"), reclaimed_ns=counters).reclaimed_milli is None
