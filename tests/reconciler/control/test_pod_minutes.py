"""The hour of each pod and of the node: rates, a bound on what is kept, and groups that are made again."""

from collections.abc import Callable, Mapping, Sequence
from sys import getsizeof

import pytest
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.usage import UsageCounters
from reconciler.control.pod_minutes import (
    LENGTH,
    MINUTE_S,
    NODE_INTERVAL_S,
    NODE_LENGTH,
    CpuSeconds,
    Minute,
    MinuteSeries,
    NodeHour,
    PodMinutes,
    _Counters,
)
from state.model import NodeCpu, Pod, PodClass
from tests.fakes.livenode import BATCH, LiveNode

STEP_NS = int(MINUTE_S * 1e9)


def counters(minute: int, use: int | None = None, throttled: int | None = 0) -> _Counters:
    return _Counters(minute * MINUTE_S, use, throttled, None)


def test_a_minute_is_the_rate_between_two_readings_and_the_unknown_stays_unknown() -> None:
    series = MinuteSeries()
    series.add(counters(0, 0))
    assert series.series("use_milli") == []
    series.add(counters(1, STEP_NS // 2, STEP_NS // 4))
    series.add(counters(2, None, STEP_NS // 4))
    series.add(counters(3, 5, STEP_NS // 4))
    series.add(counters(4, 1, STEP_NS // 4))  # counted again
    assert series.series("use_milli") == [500, None, None, None]
    assert series.series("throttled_milli") == [250, 0, 0, 0]
    assert series.series("wait_milli") == [None] * 4


def test_a_total_never_falls_and_what_is_never_measured_is_no_zero() -> None:
    series = MinuteSeries()
    series.add(counters(0, 4 * STEP_NS, None))
    assert series.total == CpuSeconds()
    assert series.add(counters(1, 5 * STEP_NS, None)) == (Minute(1000.0, None, None), CpuSeconds(use=60.0))
    assert series.add(counters(2, STEP_NS, None)) == (
        Minute(None, None, None),
        CpuSeconds(),
    )  # a container is gone, or counted again
    series.add(counters(3, 2 * STEP_NS, 0))
    assert series.total == CpuSeconds(use=120.0)


def minutes_of(
    live: LiveNode,
    pods: Mapping[str, Pod],
    clock: Callable[[], float],
    sampled: Callable[[Sequence[tuple[Pod, Minute]]], None] = lambda _: None,
) -> PodMinutes:
    return PodMinutes(Hierarchy.detect(live.root), lambda: pods, sampled=sampled, files=live.kernel, clock=clock)


async def test_the_sum_of_a_class_keeps_what_pods_that_ended_have_used(live: LiveNode) -> None:
    async with live.looked() as agent:
        pods = {BATCH: agent.control.inventory.pods[BATCH]}
        at = [0.0]
        minutes = minutes_of(live, pods, lambda: at[0])
        used = [0.0]
        for at[0] in (1.0, 2.0):
            await minutes.sample()
            used.append(minutes.by_class[PodClass.RECLAIMED].use or 0.0)
        minutes.by_class[PodClass.RECLAIMED] = CpuSeconds(use=7.0)
        pods.clear()
        at[0] = 3.0
        await minutes.sample()
        assert minutes.by_class == {PodClass.RECLAIMED: CpuSeconds(use=7.0)}
        assert used == [0.0, 0.0, 0.0]


async def test_pods_are_read_again_only_if_something_ran_in_their_directory(
    live: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live.looked() as agent:
        pod = agent.control.inventory.pods[BATCH]
        at = [0.0]
        minutes = minutes_of(live, {BATCH: pod}, lambda: at[0])
        read: list[str] = []
        real = minutes._usage._read_cpu

        def counted(path: str) -> UsageCounters:
            read.append(path)
            return real(path)

        monkeypatch.setattr(minutes._usage, "_read_cpu", counted)
        counts = []
        for at[0] in (0.0, 60.0, 120.0, 180.0):
            if at[0] == 180.0:
                live.kernel.charge(f"{live.root}/sys/fs/cgroup/cpuacct{pod.group.path}", cpu_ns=STEP_NS)
            read.clear()
            await minutes.sample()
            counts.append(sum(path.startswith(pod.group.path) for path in read))
        assert counts == [2, 0, 0, 2]
        assert minutes.hour(pod)["use_milli"] == [0, 0, 1000]


def test_an_hour_is_kept_and_no_more() -> None:
    series = MinuteSeries()
    for minute in range(500):
        series.add(counters(minute, minute * STEP_NS))
    assert series.series("use_milli") == [1000] * LENGTH
    assert getsizeof(series._values) < 2048


async def test_pods_that_are_gone_are_forgotten_and_a_namesake_begins_anew(live: LiveNode) -> None:
    async with live.looked() as agent:
        pods: dict[str, Pod] = dict(agent.control.inventory.pods)
        at = [0.0]

        def clock() -> float:
            at[0] += 1.0
            return at[0]

        sampled: list[Sequence[tuple[Pod, Minute]]] = []
        minutes = minutes_of(live, pods, clock, sampled.append)
        await minutes.sample()
        await minutes.sample()
        pod = pods[BATCH]
        hour = minutes.hour(pod)
        assert hour["use_milli"] == [0]
        assert [len(values) for values in sampled] == [len(pods)], "the first reading is no minute"
        assert set(hour["above_milli"]) == {"/kubepods", "/kubepods/besteffort"}  # type: ignore[call-overload]
        pods[BATCH] = replace(pod, group=replace(pod.group, inode=pod.group.inode + 1))
        await minutes.sample()
        assert minutes.hour(pods[BATCH])["use_milli"] == []
        del pods[BATCH]
        await minutes.sample()
        assert pod.group.path not in minutes._groups
        pods.clear()
        await minutes.sample()
        assert not minutes._groups


def use(busy: int, online: int, reclaimed: int) -> NodeCpu:
    return NodeCpu(busy_milli=busy, online_milli=online, reclaimed_milli=reclaimed)


def test_a_value_is_the_mean_of_its_readings() -> None:
    now = 0.0
    hour = NodeHour(lambda: now)
    for second in range(11):
        now = float(second)
        hour.add(use(1500 + 100 * second, 1000, 400) if second < 4 else None, 2000 + second, 4, now)
    assert hour.series() == {
        "interval_s": 10.0,
        "age_s": 0.0,
        "online_milli": [1000],
        "reclaimed_milli": [400],
        "system_milli": [250],
        "idle_milli": [2350],
        "budget_milli": [2004],
    }


def test_what_was_not_known_is_null_and_what_was_not_read_is_a_gap() -> None:
    now = 0.0
    hour = NodeHour(lambda: now)
    hour.add(use(100, 100, 0), None, 1, 0.0)
    now = 35.0
    hour.add(None, None, 1, now)
    series = hour.series()
    assert (series["online_milli"], series["budget_milli"]) == ([100, None, None], [None, None, None])
    assert series["age_s"] == 5.0


def test_the_nodes_hour_is_kept_and_a_suspend_costs_no_loop() -> None:
    now = 0.0
    hour = NodeHour(lambda: now)
    for step in range(NODE_LENGTH + 50):
        now = step * NODE_INTERVAL_S
        hour.add(use(step, step, 0), 0, 8, now)
    online = hour.series()["online_milli"]
    assert isinstance(online, list)
    assert (len(online), online[-1]) == (NODE_LENGTH, NODE_LENGTH + 48)
    now = 1e9
    hour.add(use(1, 1, 0), 0, 8, now)
    assert hour.series()["online_milli"] == []
