"""The hour of each pod: rates of a minute, a bound on what is kept, and groups that are made again."""

from collections.abc import Sequence
from pathlib import Path
from sys import getsizeof

import pytest
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.usage import UsageCounters
from reconciler.control.pod_minutes import LENGTH, MINUTE_S, CpuSeconds, Minute, MinuteSeries, PodMinutes, _Counters
from state.model import Pod, PodClass
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


async def test_the_sum_of_a_class_keeps_what_pods_that_ended_have_used(tmp_path: Path) -> None:
    node = LiveNode(tmp_path)
    async with node.looked() as agent:
        pods = {BATCH: agent.control.inventory.pods[BATCH]}
        at = [0.0]
        minutes = PodMinutes(
            Hierarchy.detect(node.root),
            lambda: pods,
            sampled=lambda _: None,
            files=node.kernel,
            clock=lambda: at[0],
        )
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = LiveNode(tmp_path)
    async with node.looked() as agent:
        pod = agent.control.inventory.pods[BATCH]
        at = [0.0]
        minutes = PodMinutes(
            Hierarchy.detect(node.root),
            lambda: {BATCH: pod},
            sampled=lambda _: None,
            files=node.kernel,
            clock=lambda: at[0],
        )
        read: list[str] = []
        real = minutes._usage._read_cpu

        def counted(path: str) -> UsageCounters:
            read.append(path)
            return real(path)

        monkeypatch.setattr(minutes._usage, "_read_cpu", counted)
        counts = []
        for at[0] in (0.0, 60.0, 120.0, 180.0):
            if at[0] == 180.0:
                node.kernel.charge(f"{node.root}/sys/fs/cgroup/cpuacct{pod.group.path}", cpu_ns=STEP_NS)
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


async def test_pods_that_are_gone_are_forgotten_and_a_namesake_begins_anew(tmp_path: Path) -> None:
    node = LiveNode(tmp_path)
    async with node.looked() as agent:
        pods: dict[str, Pod] = dict(agent.control.inventory.pods)
        at = [0.0]

        def clock() -> float:
            at[0] += 1.0
            return at[0]

        sampled: list[Sequence[tuple[Pod, Minute]]] = []
        minutes = PodMinutes(
            Hierarchy.detect(node.root), lambda: pods, sampled=sampled.append, files=node.kernel, clock=clock
        )
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
