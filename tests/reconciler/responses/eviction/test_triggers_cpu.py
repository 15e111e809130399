"""Triggers of CPU: formulas and defaults of Koordinator and Katalyst, and what they get wrong."""

import pytest

from reconciler.responses.eviction.config import (
    CpuSatisfactionConfig,
    NodeCpuConfig,
    PoolLoadConfig,
    SuppressionConfig,
)
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.triggers import cpu_satisfaction, node_cpu, pool_load, suppression
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.world import Judge, World, batch, be, uids

SATISFACTION = varied(CpuSatisfactionConfig(lower_percent=40), upper_percent=60, window_s=60)


@pytest.mark.parametrize(
    ("use", "limit", "asked", "release"),
    [
        (3800, 4000, 10000, 2000),  # 40 % of the requests: just short; up to 60 % of 10 CPUs
        (3800, 4010, 10000, 0),  # 40.1 %
        (3500, 4000, 10000, 0),  # uses 87.5 % of what it may have: it does not want more
        (1, 999, 10000, 10000 * (60 - 9.99) / 100),  # less than a CPU: always counts as used
        (0, 0, 10000, 6000),  # nothing at all is the worst shortage, not none
        (3800, 4000, 0, 0),
    ],
)
def test_release_is_what_brings_the_rest_to_the_upper_bound(
    use: float, limit: float, asked: float, release: float
) -> None:
    assert cpu_satisfaction.release_milli(SATISFACTION, use, limit, asked) == pytest.approx(release)


def test_satisfaction_is_judged_over_the_window_and_by_the_last_sample_and_the_smaller_release_counts() -> None:
    world = World()
    world.put(be__use=2000, be__limit=2000, be__request=10000)
    judge = Judge(cpu_satisfaction.TRIGGER, world, SATISFACTION)
    (pressure,) = judge.after(60).pressures
    assert (pressure.good, pressure.subject, pressure.hard) == (EvictedResource.CPU_REQUEST, "node", False)
    assert pressure.classes == (PodClass.RECLAIMED,)
    assert pressure.need == pytest.approx(4000)
    world.put(be__limit=3900, be__use=3900)
    world.at += 1
    (pressure,) = judge.now().pressures
    assert pressure.need == pytest.approx(2100)
    world.put(be__limit=9000, be__use=9000)
    world.at += 1
    assert judge.now().pressures == ()


def test_satisfaction_needs_a_third_of_its_window() -> None:
    world = World()
    world.put(be__use=2000, be__limit=2000, be__request=10000)
    judge = Judge(cpu_satisfaction.TRIGGER, world, SATISFACTION)
    reading = judge.after(15)
    assert (reading.pressures, reading.known) == ((), False)
    assert judge.after(10).pressures


def test_satisfaction_is_unknown_without_its_signals_and_when_they_are_old() -> None:
    world = World()
    world.put(be__use=2000, be__request=10000)
    judge = Judge(cpu_satisfaction.TRIGGER, world, SATISFACTION)
    reading = judge.after(60)
    assert (reading.known, reading.pressures) == (False, ())
    assert reading.words == "unknown: be.limit not measured"
    world.put(be__limit=2000)
    assert judge.after(60).pressures
    world.put(be__limit=None)
    assert judge.after(14).pressures
    assert not judge.after(2).known


def suppressed(*pods: object) -> World:
    world = World(*pods)  # type: ignore[arg-type]
    world.put(be__limit=1000)
    return world


def test_suppression_waits_five_minutes_without_a_break() -> None:
    world = suppressed(be("a", requests=batch(4000)), be("b", requests=batch(2000)))
    judge = Judge(suppression.TRIGGER, world)
    assert not judge.after(299).pressures
    (pressure,) = judge.after(1).pressures
    assert (uids([pressure]), pressure.need, pressure.hard) == (["a", "b"], 1000.0, False)
    world.put(be__limit=1200)
    assert not judge.after(1).pressures
    world.put(be__limit=1000)
    assert not judge.after(300).pressures
    assert judge.after(1).pressures


def test_a_pods_own_tolerance_counts_where_it_is_smaller() -> None:
    def rated(rate: str) -> dict[str, str]:
        return {"katalyst.kubewharf.io/cpu_enhancement": f'{{"suppression_tolerance_rate": "{rate}"}}'}

    own = rated("1.5")
    assert suppression.tolerance(be("a", annotations=own), 5.0) == 1.5
    for larger_or_broken in ("50", "much", "0", "-1", "nan", "1" * 21):
        assert suppression.tolerance(be("a", annotations=rated(larger_or_broken)), 5.0) == 5.0
    world = suppressed(be("a", requests=batch(1000), annotations=own), be("b", requests=batch(1000)))
    (pressure,) = Judge(suppression.TRIGGER, world).after(300).pressures
    assert uids([pressure]) == ["a"]
    assert pressure.need == pytest.approx(500)


def test_suppression_does_not_round_requests_up_to_whole_cpus() -> None:
    """Katalyst's Quantity.Value() makes 4.001 CPUs five."""
    world = suppressed(be("a", requests=batch(4001)))
    world.put(be__limit=900)
    config = varied(SuppressionConfig(), for_s=10)
    assert not Judge(suppression.TRIGGER, world, config).after(20).pressures


def test_a_new_pod_of_an_old_name_has_not_suffered_yet_and_who_is_gone_is_forgotten() -> None:
    """Katalyst remembers pods by name, for ever."""
    world = suppressed(be("a", title="ci/job", requests=batch(9000)))
    judge = Judge(suppression.TRIGGER, world)
    judge.after(200)
    world.pods = {"b": be("b", title="ci/job", requests=batch(9000))}
    assert not judge.after(150).pressures
    assert set(judge.memory) == {"b"}


def test_while_the_supply_is_not_known_nobodys_time_runs() -> None:
    world = suppressed(be("a", requests=batch(9000)))
    judge = Judge(suppression.TRIGGER, world)
    judge.after(200)
    world.put(be__limit=None)
    assert not judge.after(30).known
    world.put(be__limit=1000)
    assert not judge.after(299).pressures


def loaded(tasks: float, cpus: float = 10) -> World:
    world = World(be("web", cls=PodClass.SHARED), be("job"))
    world.put("pool:shared", load__runnable=tasks, pool__cpus=cpus)
    world.put("pod:web", cpu__use=9000, cpu__wait_milli=9000)
    return world


def test_a_pools_ring_must_be_full_before_it_is_judged() -> None:
    """Katalyst divides by the size that the ring will have, so that the mean is too low until it is full."""
    judge = Judge(pool_load.TRIGGER, loaded(30))
    reading = judge.after(89)
    assert (reading.pressures, reading.known, reading.words) == ((), False, "shared: 9 of 10 samples")
    (pressure,) = judge.after(1).pressures
    assert (pressure.subject, pressure.good, pressure.hard) == ("pool:shared", EvictedResource.LOAD, True)
    assert pressure.need == pytest.approx(30 - 18)
    assert uids([pressure]) == ["web"]


@pytest.mark.parametrize(("high", "met"), [(8, True), (7, False)])
def test_eighty_percent_of_the_samples_must_be_above(high: int, met: bool) -> None:
    world = loaded(5)
    judge = Judge(pool_load.TRIGGER, world)
    # A ring's sample is the mean of the ten seconds before it.
    judge.after((10 - high) * 10 - 10)
    world.at += 0.5
    world.put("pool:shared", load__runnable=12)
    reading = judge.after(high * 10)
    assert len(judge.memory["shared"].ratios) == 10
    assert bool(reading.pressures) is met
    if met:
        assert reading.pressures[0].hard is False


def test_a_pool_that_is_relieved_needs_nobody_although_its_ring_is_still_high() -> None:
    world = loaded(30)
    judge = Judge(pool_load.TRIGGER, world)
    assert judge.after(100).pressures
    world.put("pool:shared", load__runnable=1)
    assert not judge.after(20).pressures


def test_a_ring_with_a_gap_starts_anew() -> None:
    world = loaded(30)
    judge = Judge(pool_load.TRIGGER, world)
    assert judge.after(100).pressures
    world.at += 40
    assert not judge.after(50).pressures


@pytest.mark.parametrize("name", ["reclaimed", "dedicated", "reserved", "interrupt", "system/infra"])
def test_only_pools_that_online_pods_share_are_judged(name: str) -> None:
    assert not pool_load.evaluate_pool(name)
    world = World()
    world.put(f"pool:{name}", load__runnable=100, pool__cpus=1)
    assert not Judge(pool_load.TRIGGER, world).after(200).known


def test_a_pool_without_cpus_is_not_divided_by() -> None:
    world = loaded(10, cpus=0)
    assert not Judge(pool_load.TRIGGER, world).after(200).known


@pytest.mark.parametrize(
    ("use", "need"),
    [(9499, 0), (9500, 200), (9590, 290), (10000, 700)],
)
def test_node_cpu_frees_down_to_the_lower_bound_in_exact_numbers(use: float, need: float) -> None:
    """koordlet cuts 95.9 % to 95 %: with a threshold of 95.5 it would see nothing."""
    assert node_cpu.release_milli(NodeCpuConfig(), use, 10000 - use) == pytest.approx(need)


def test_a_peak_that_is_over_frees_nothing() -> None:
    world = World()
    world.put(cpu__use=10000, cpu__idle=0)
    judge = Judge(node_cpu.TRIGGER, world)
    (pressure,) = judge.after(30).pressures
    assert (pressure.good, pressure.hard) == (EvictedResource.CPU, False)
    assert pressure.need == pytest.approx(700)
    world.put(cpu__use=5000, cpu__idle=5000)
    assert not judge.after(1).pressures
    assert not Judge(node_cpu.TRIGGER, World()).now().known


def test_bounds_of_the_sections_contradict_nobody() -> None:
    with pytest.raises(ValueError, match=r"hard_ratio is 0.9; expected at least 1"):
        PoolLoadConfig(hard_ratio=0.9)
    with pytest.raises(ValueError, match="lower_percent is 99; expected at most threshold_percent"):
        NodeCpuConfig(lower_percent=99)
