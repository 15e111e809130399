import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.detectors.rhythm import CorrelationLevels, correlation, pearson
from reconciler.detectors.suspects import MOST, SIGNALS, rank
from reconciler.detectors.uses import ResourceUses
from reconciler.runtime.cooperative import all_steps
from reconciler.signals import catalog
from state.evidence import NODE, ContendedResource, PodSnapshot, Suspect
from state.model import PodClass, Resources
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, be, facts

STEPS = 100
MIB = 1 << 20


def ranked(
    pods: list[PodSnapshot],
    uses: dict[str, dict[str, Values]],
    resource: ContendedResource = ContendedResource.CPU,
    victim: dict[str, Values] | None = None,
    subject: str = VICTIM,
    **more: Any,
) -> tuple[Suspect, ...]:
    if victim is None:
        victim = {"cpu.wait": lambda at: 20 if at >= 70 else 0.3}
    scene = Scene({subject: victim, **{f"pod:{uid}": signals for uid, signals in uses.items()}}, pods, **more)
    sight = scene.play(STEPS, subject)
    return all_steps(rank(sight, resource, 30, ResourceUses(sight.frame, sight.history, sight.fresh_s)))


def pearsons(suspect: Suspect) -> float:
    return float(suspect.reason.partition("(CPI²), ")[2].partition(" (Pearson)")[0])


def names(suspects: tuple[Suspect, ...]) -> list[str]:
    return [suspect.uid for suspect in suspects]


def test_of_several_the_one_that_goes_with_the_waiting_is_first() -> None:
    made = random.Random(5)
    steady = [made.gauss(2000, 20) for _ in range(STEPS)]
    uses: dict[str, dict[str, Values]] = {
        "steady": {"cpu.use": steady},
        "began": {"cpu.use": lambda at: 1200 if at >= 70 else 5},
        "ended": {"cpu.use": lambda at: 1500 if at < 70 else 5},
        "random": {"cpu.use": [made.uniform(0, 1500) for _ in range(STEPS)]},
    }
    suspects = ranked([be(uid) for uid in uses], uses)
    assert names(suspects) == ["began", "steady", "random"]
    assert suspects[0].score > 1.2 * suspects[1].score
    assert [abs(pearsons(suspect)) > 0.4 for suspect in suspects] == [True, False, False]
    assert suspects[0].reason.startswith("used 1.20 CPU (")
    assert "with cpu.wait: " in suspects[0].reason


def test_a_rhythm_is_followed() -> None:
    def burst(at: int) -> bool:
        return (at // 10) % 2 == 0

    uses: dict[str, dict[str, Values]] = {
        "in step": {"cpu.use": lambda at: 800 if burst(at) else 10},
        "against": {"cpu.use": lambda at: 10 if burst(at) else 3000},
        "steady": {"cpu.use": 1000},
    }
    victim: dict[str, Values] = {"cpu.wait": lambda at: 15 if burst(at) else 0.2}
    suspects = ranked([be(uid) for uid in uses], uses, victim=victim)
    assert names(suspects) == ["in step", "steady"]


def test_waiting_that_is_much_for_this_victim_alone_is_followed_too() -> None:
    made = random.Random(4)
    wait = [made.gauss(0.3, 0.05) + (2.0 if at >= 80 else 0.0) for at in range(STEPS)]
    uses: dict[str, dict[str, Values]] = {
        "began": {"cpu.use": lambda at: 900 if at >= 80 else 5},
        "steady": {"cpu.use": 900},
    }
    suspects = ranked([be("began"), be("steady")], uses, victim={"cpu.wait": wait})
    assert names(suspects) == ["began", "steady"]
    assert suspects[0].score > 0.8


def test_one_that_came_with_the_trouble_is_compared_with_the_time_before_it() -> None:
    uses: dict[str, dict[str, Values]] = {
        "new": {"cpu.use": lambda at: 1500 if at >= 70 else None},
        "old": {"cpu.use": 1500},
    }
    suspects = ranked([be("new"), be("old")], uses)
    assert names(suspects) == ["new", "old"]
    assert suspects[0].score > 0.9


def test_when_it_has_always_been_bad_the_heaviest_is_first_and_equals_are_equal() -> None:
    uses: dict[str, dict[str, Values]] = {"a": {"cpu.use": 500}, "b": {"cpu.use": 1500}, "c": {"cpu.use": 1500}}
    suspects = ranked([be(uid) for uid in uses], uses, victim={"cpu.wait": 20})
    assert names(suspects) == ["b", "c", "a"]
    assert suspects[0].score == suspects[1].score > 0.7
    assert suspects[2].score < 0.35


@pytest.mark.parametrize(
    "uses",
    [
        {"cpu.use": 4},  # next to nothing
        {"cpu.use": 0},
        {},  # not measured
        {"cpu.use": lambda at: 2000 if at < 80 else None},  # not measured any more
    ],
)
def test_who_did_nothing_is_not_blamed(uses: dict[str, Values]) -> None:
    assert ranked([be("a")], {"a": uses}) == ()


def test_cpus_that_the_victim_does_not_run_on_do_not_count() -> None:
    pods = [be("apart", cpus="4-7"), be("half", cpus="2-5"), be("all", cpus="0-3"), be("unknown", cpus="")]
    suspects = ranked(pods, {pod.uid: {"cpu.use": 1000} for pod in pods}, victim={"cpu.wait": 20})
    scores = {suspect.uid: suspect.score for suspect in suspects}
    assert set(scores) == {"half", "all", "unknown"}
    assert scores["half"] == pytest.approx(scores["all"] / 2, abs=0.002)
    reason = next(suspect.reason for suspect in suspects if suspect.uid == "half")
    assert reason.startswith("used 0.50 CPU (20 % of all other pods) on the victim's CPUs (50 % of its CPUs)")
    # Caches and disks know nothing of CPUs.
    assert names(ranked([be("apart", cpus="4-7")], {"apart": {"disk.read": 1e8}}, ContendedResource.IO)) == ["apart"]


def test_online_pods_are_told_as_such_and_the_victim_never() -> None:
    pods = [facts("online"), facts("system", PodClass.SYSTEM), be("b")]
    uses: dict[str, dict[str, Values]] = {"online": {"cpu.use": 900}, "system": {"cpu.use": 50}, "b": {"cpu.use": 800}}
    suspects = ranked(pods, uses, victim={"cpu.wait": 20, "cpu.use": 4000})
    assert names(suspects) == ["online", "b", "system"]
    assert [suspect.reason.endswith("; online pod: reported, never limited") for suspect in suspects] == [
        True,
        False,
        True,
    ]


def test_the_victim_s_own_quota_lowers_all() -> None:
    free = ranked([be("b")], {"b": {"cpu.use": 900}}, victim={"cpu.wait": 20})
    cut = ranked([be("b")], {"b": {"cpu.use": 900}}, victim={"cpu.wait": 20, "cpu.throttled": 40})
    assert cut[0].score == pytest.approx(free[0].score / 4, abs=0.002)
    assert cut[0].reason.endswith("; but the victim is throttled by its own limit (40 % of periods)")


def test_the_victim_at_its_own_limit_lowers_all() -> None:
    limited = facts("v", limits=Resources(cpu_milli=1000))
    suspects = ranked([limited, be("b")], {"b": {"cpu.use": 900}}, victim={"cpu.wait": 20, "cpu.use": 990})
    assert suspects[0].reason.endswith("; but the victim is at its own limit (0.99 of 1.00 CPU)")
    assert suspects[0].score < 0.5
    own: dict[str, Values] = {"memory.pressure": 30, "memory.use": 99.0 * MIB, "memory.limit": 100.0 * MIB}
    memory = ranked([be("b")], {"b": {"memory.use": 500.0 * MIB}}, ContendedResource.MEMORY, own)
    assert memory[0].reason.endswith("; but the victim is at its own limit (99 MiB of 100 MiB)")


def test_memory_by_growth_before_size() -> None:
    uses: dict[str, dict[str, Values]] = {
        "large": {"memory.use": 4000.0 * MIB},
        "grows": {"memory.use": lambda at: MIB * (100.0 + max(0, at - 70) * 30)},
        "shrinks": {"memory.use": lambda at: MIB * (2000.0 - at * 15)},
        "thrashes": {"memory.use": 300.0 * MIB, "memory.refaults": 500},
    }
    victim: dict[str, Values] = {"memory.pressure": lambda at: 30 if at >= 75 else 0}
    suspects = ranked([be(uid) for uid in uses], uses, ContendedResource.MEMORY, victim)
    assert names(suspects)[0] == "grows"
    assert suspects[0].reason.startswith("grew by 870 MiB (100 % of all other pods), held ")
    assert any("refaulted 500 pages/s" in suspect.reason for suspect in suspects if suspect.uid == "thrashes")


def test_disks_by_bytes_and_requests() -> None:
    uses: dict[str, dict[str, Values]] = {
        "stream": {"disk.read": 50e6, "disk.write": 50e6, "disk.ops": 100},
        "small": {"disk.read": 4e6, "disk.ops": 1000},
        "idle": {"disk.read": 10e3, "disk.ops": 1},
    }
    suspects = ranked([be(uid) for uid in uses], uses, ContendedResource.IO, {"io.pressure": 40})
    assert names(suspects) == ["stream", "small"]
    assert suspects[0].reason.startswith(
        "transferred 95.4 MiB/s (96.1 % of all other pods), disk requests: 100 per s (9.08 %"
    )


def test_cache_and_network() -> None:
    uses: dict[str, dict[str, Values]] = {
        "a": {"llc.occupancy": 20.0 * MIB, "memory.bandwidth": 5e9, "net.receive": 1e6, "net.transmit": 1e6},
        "b": {"llc.occupancy": 2.0 * MIB, "memory.bandwidth": 1e8, "net.receive": 9e7},
    }
    pods = [be("a"), be("b")]
    assert names(ranked(pods, uses, ContendedResource.CACHE, {"cpi": 3})) == ["a", "b"]
    assert names(ranked(pods, uses, ContendedResource.NETWORK, {"service.latency": 30})) == ["b", "a"]


def test_without_any_symptom_use_alone_counts_and_for_the_node_as_well() -> None:
    uses: dict[str, dict[str, Values]] = {"a": {"cpu.use": 900}, "b": {"cpu.use": 300}}
    pods = [be("a", cpus="0-1"), be("b", cpus="7")]
    assert [suspect.score for suspect in ranked([be("a"), be("b")], uses, victim={})] == [1.0, 0.333]
    suspects = ranked(pods, uses, victim={"cpu.pressure": 40}, subject=NODE)
    assert names(suspects) == ["a", "b"]


def test_late_samples_are_paired_by_time_and_gaps_left_out() -> None:
    made = random.Random(1)
    hog: list[float | None] = [1500.0 if at >= 70 else 5.0 for at in range(STEPS)]
    wait: list[float | None] = [20.0 if at >= 70 else 0.3 for at in range(STEPS)]
    for series in (hog, wait):
        for gap in made.sample(range(STEPS - 1), 20):
            series[gap] = None
    suspects = ranked([be("b")], {"b": {"cpu.use": hog}}, victim={"cpu.wait": wait})
    assert suspects[0].score > 0.8


def test_no_more_are_told_than_a_person_reads() -> None:
    pods = [be(f"p{number}") for number in range(40)]
    suspects = ranked(pods, {pod.uid: {"cpu.use": 100.0 + index} for index, pod in enumerate(pods)})
    assert len(suspects) == MOST
    assert suspects[0].uid == "p39"


def test_its_signals_are_in_the_catalog() -> None:
    assert set(SIGNALS) <= set(catalog.SIGNALS)


PAIRS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=40)


def apart(pairs: Sequence[tuple[float, float]], limit: float) -> tuple[CorrelationLevels, list[float]]:
    return CorrelationLevels([level for level, _ in pairs], limit), [use for _, use in pairs]


@given(PAIRS, st.floats(0, 1e5))
def test_correlations_stay_in_bounds(pairs: list[tuple[float, float]], limit: float) -> None:
    levels, uses = apart(pairs, limit)
    assert -1 <= correlation(levels, uses) <= 1
    assert -1 <= pearson(levels, uses) <= 1
    assert not math.isnan(pearson(levels, uses))


def test_correlation_is_cpi_s_formula() -> None:
    # Limit 2: half the use at 4 (1 - 2/4), a quarter at 1 (1/2 - 1), a quarter at the limit (0).
    assert correlation(*apart([(4, 2), (1, 1), (2, 1)], 2)) == pytest.approx(0.5 * 0.5 - 0.25 * 0.5)
    assert correlation(*apart([(4, 0)], 2)) == 0
