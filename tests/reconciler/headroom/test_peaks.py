"""Peaks of workloads: who is one, when its peak is known, what it adds up to, and which entry replaces which."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.config.model import Config
from reconciler.config.read_keys import read_keys
from reconciler.headroom.cpu import WORKLOAD_LABELS, HeadroomConfig, HeadroomLaw
from reconciler.headroom.peaks import (
    COLD_START_S,
    MOST,
    MOST_NEW,
    STALE_S,
    NodeReading,
    PeakPrediction,
    PodReading,
    WorkloadPeaks,
    cpu_left,
    memory_left,
    own_milli,
    reading_of,
    workload_of,
)
from reconciler.runtime.cooperative import all_steps
from state.memory import NodeMemoryReading
from state.model import ContainerKind, ContainerMeta, Pools, Resources
from tests.reconciler.nodes import cpus, online

GIB = 1 << 30
MINUTE = 60.0
NONE = NodeReading(0.0, 0.0)


class Days:
    """Minutes of a node; the time of the last one."""

    def __init__(self) -> None:
        self.peaks = WorkloadPeaks()
        self.at_s = 0.0

    def minutes(self, count: int, *pods: PodReading, node: NodeReading = NONE) -> PeakPrediction:
        assert count
        for _ in range(count):
            self.at_s += MINUTE
            result = all_steps(self.peaks.minute(pods, node, self.at_s))
        return result


def web(cpu_milli: float | None, memory: float | None = 1.0 * GIB, *, request: int = 500) -> PodReading:
    return PodReading("shop/Deployment/web", cpu_milli, memory, request, 2 * GIB)


def about(amount: float) -> object:
    """A bucket's width above, and the margin."""
    return pytest.approx(amount * 1.1, rel=0.08)


@pytest.mark.parametrize(
    ("owner", "labels", "name"),
    [
        ("ReplicaSet/web-6d4cf56db6", {"pod-template-hash": "6d4cf56db6"}, "ns/Deployment/web"),
        ("ReplicaSet/web-6d4cf56db6", {"pod-template-hash": "other"}, "ns/ReplicaSet/web-6d4cf56db6"),
        ("ReplicaSet/web", {"pod-template-hash": ""}, "ns/ReplicaSet/web"),
        ("ReplicaSet/-x", {"pod-template-hash": "x"}, "ns/ReplicaSet/-x"),
        ("Job/backup-28391230", {}, "ns/CronJob/backup"),
        ("Job/backup-1", {}, "ns/Job/backup-1"),
        ("Job/-28391230", {}, "ns/Job/-28391230"),
        ("StatefulSet/db", {}, "ns/StatefulSet/db"),
        ("Node/node-1", {}, "ns/Pod/web-0"),
        (None, {}, "ns/Pod/web-0"),
        ("odd", {}, "ns/Pod/web-0"),
    ],
)
def test_a_workload_is_what_stays_when_its_pod_is_replaced(
    owner: str | None, labels: dict[str, str], name: str
) -> None:
    pod = replace(online("web-0"), namespace="ns", name="web-0", owner=owner, labels=labels)
    assert workload_of(pod) == name


@pytest.mark.parametrize(
    ("name", "labels", "workload"),
    [
        ("web-6d4cf56db6-x7k2p", {"pod-template-hash": "6d4cf56db6"}, "ns/Deployment/web"),
        ("web-6d4cf56db6-x7k2p", {"pod-template-hash": "other"}, "ns/Pod/web-6d4cf56db6-x7k2p"),
        ("6d4cf56db6-x7k2p", {"pod-template-hash": "6d4cf56db6"}, "ns/Pod/6d4cf56db6-x7k2p"),
        ("db-0", {"statefulset.kubernetes.io/pod-name": "db-0"}, "ns/StatefulSet/db"),
        ("db-0", {"statefulset.kubernetes.io/pod-name": "other-0"}, "ns/Pod/db-0"),
        ("proxy-x7k2p", {"controller-revision-hash": "abc", "pod-template-generation": "1"}, "ns/DaemonSet/proxy"),
        ("db-0", {"controller-revision-hash": "abc"}, "ns/Pod/db-0"),
        ("backup-28391230-x7k2p", {"job-name": "backup-28391230"}, "ns/CronJob/backup"),
        ("sum-0-x7k2p", {"batch.kubernetes.io/job-name": "sum"}, "ns/Job/sum"),
        ("sum-x7k2p", {"job-name": "su"}, "ns/Pod/sum-x7k2p"),
        ("plain", {"pod-template-hash": "x", "job-name": "plain"}, "ns/Pod/plain"),
    ],
)
def test_without_a_known_owner_it_is_by_what_controllers_set(name: str, labels: dict[str, str], workload: str) -> None:
    assert workload_of(replace(online("u-1"), namespace="ns", name=name, owner=None, labels=labels)) == workload
    assert labels.keys() <= WORKLOAD_LABELS, "no other label of a pod is read"


def test_the_labels_of_workloads_are_read_for_that_law_only() -> None:
    config = Config()
    assert not WORKLOAD_LABELS & read_keys(config, config.classes).labels
    config = replace(config, headroom=HeadroomConfig(law=HeadroomLaw.HISTOGRAM))
    assert read_keys(config, config.classes).labels >= WORKLOAD_LABELS


def test_a_name_is_bounded_and_a_pod_without_one_is_its_uid() -> None:
    assert workload_of(replace(online("u-1"), namespace=None, name=None)) == "/Pod/u-1"
    assert len(workload_of(replace(online("u-1"), owner="Kind/" + "x" * 9000))) < 1000


def test_a_pods_requests_are_the_kubelets_and_its_own_cpus_are_not_counted() -> None:
    def box(name: str, kind: ContainerKind, milli: int, memory: int) -> ContainerMeta:
        return ContainerMeta(name=name, kind=kind, requests=Resources(cpu_milli=milli, memory_bytes=memory))

    app, init = ContainerKind.APP, ContainerKind.INIT
    boxes = (box("i", init, 9000, GIB), box("a", app, 3000, GIB), box("b", app, 500, GIB))
    pod = replace(
        online("web-0"),
        sandbox="kata",
        containers=(),
        declared=boxes,
        overhead=Resources(cpu_milli=250, memory_bytes=100),
    )
    reading = reading_of(pod, 3400.0, 5, {})
    assert (reading.cpu_request, reading.memory_request, reading.cpu_milli) == (9250, 2 * GIB + 100, 3400.0)
    reading = reading_of(pod, 3400.0, None, {pod.uid: 3000})
    assert (reading.cpu_request, reading.cpu_milli, reading.memory_bytes) == (6250, 400.0, None)
    assert reading_of(pod, 2000.0, None, {pod.uid: 3000}).cpu_milli == 0.0


def test_until_a_day_was_measured_requests_count_or_what_was_measured_if_that_is_more() -> None:
    days = Days()
    low = days.minutes(30, web(100.0), web(100.0))
    assert (low.known, low.cold, low.online_cpu_milli) == (0, 1, 1000)
    assert low.online_memory_bytes == 4 * GIB
    high = days.minutes(1, web(3000.0), web(3000.0))
    assert high.online_cpu_milli == about(6000)
    later = days.minutes(int(COLD_START_S / MINUTE) - 31, web(100.0), web(100.0))
    assert later.cold == 1
    assert later.online_cpu_milli == about(6000), "the most that was measured, not p95"
    after = days.minutes(1, web(100.0), web(100.0))
    assert (after.known, after.cold) == (1, 0)
    assert after.online_cpu_milli < 300, "one minute of a day is above p95"
    assert after.online_memory_bytes == about(2 * GIB)


def test_a_peak_of_three_hours_a_day_is_known_all_day_long() -> None:
    days = Days()
    for _ in range(2):
        days.minutes(21 * 60, web(500.0))
        days.minutes(180, web(2500.0))
    quiet = days.minutes(20 * 60, web(500.0))
    assert quiet.online_cpu_milli == about(2500)


def test_a_peak_counts_for_each_pod_and_a_leader_is_in_the_mean() -> None:
    days = Days()
    days.minutes(1500, web(4000.0), *[web(500.0)] * 3)
    assert days.minutes(1, web(4000.0), *[web(500.0)] * 3).online_cpu_milli == about(5500)
    assert days.minutes(1, web(4000.0), *[web(500.0)] * 7).online_cpu_milli == about(11_000)


def test_without_readings_a_workload_goes_back_to_its_requests() -> None:
    days = Days()
    days.minutes(1500, web(200.0))
    assert days.minutes(int(STALE_S / MINUTE), web(None, None)).known == 1
    stale = days.minutes(1, web(None, None, request=900))
    assert (stale.known, stale.cold, stale.online_cpu_milli) == (0, 1, 900)
    assert days.minutes(1, web(200.0)).known == 1


def test_evidence_fades_while_a_workload_has_no_pod() -> None:
    days = Days()
    days.minutes(1500, web(200.0))
    days.at_s += 24 * 3600
    assert days.minutes(1, web(200.0)).known == 1
    days.at_s += 4 * 24 * 3600
    assert days.minutes(1, web(200.0)).cold == 1


def test_what_no_pod_accounts_for_is_predicted_too() -> None:
    days = Days()
    first = days.minutes(1, node=NodeReading(700.0, 3.0 * GIB))
    assert first.system_cpu_milli == about(700)
    assert first.system_memory_bytes == about(3 * GIB)
    assert days.minutes(1, node=NodeReading(None, None)).system_cpu_milli == about(700)


def _churn(days: Days, minutes: int, *more: PodReading, each: int = 100) -> PeakPrediction:
    """New owners each minute, as jobs have them, or a tenant who names its pods anew."""
    for minute in range(minutes):
        made = [PodReading(f"evil/Pod/{minute}-{number}", 50.0, 1e6) for number in range(each)]
        result = days.minutes(1, *made, *more)
    return result


def test_short_lived_workloads_displace_one_another_and_no_known_one() -> None:
    days = Days()
    others = [PodReading(f"shop/Deployment/{number}", 100.0, 1e8) for number in range(20)]
    days.minutes(1500, *others, web(2500.0))
    # The known one is away for hours of churn.
    assert _churn(days, 200, *others).known == 20
    assert len(days.peaks) <= MOST
    assert days.minutes(1, web(500.0)).online_cpu_milli == about(2500)


def test_a_newcomer_is_learned_during_the_churn() -> None:
    days = Days()
    _churn(days, 3, each=MOST_NEW)
    _churn(days, 90, web(2500.0), each=MOST_NEW - 1)
    assert "shop/Deployment/web" in days.peaks.known
    assert days.minutes(1440, web(2500.0)).known == 1


def test_workloads_that_live_for_hours_do_not_displace_one_of_days() -> None:
    days = Days()
    days.minutes(2000, web(2500.0))
    for batch in range(5):
        days.minutes(130, *(PodReading(f"evil/Pod/{batch}-{number}", 50.0, 1e6) for number in range(MOST_NEW)))
    assert len(days.peaks) == MOST - MOST_NEW
    assert "shop/Deployment/web" in days.peaks.known
    assert days.minutes(1, web(500.0)).online_cpu_milli == about(2500)


def test_of_the_absent_those_with_the_least_evidence_make_room_and_a_present_one_does_not() -> None:
    days = Days()
    names = [f"shop/Pod/{number:03}" for number in range(MOST_NEW)]
    for minute in range(4):
        # One of four minutes, two, three or all.
        days.minutes(1, *(PodReading(name, 50.0, 1e6) for at, name in enumerate(names) if at % 4 >= 3 - minute))
    least = sorted(names, key=lambda name: (int(name[-3:]) % 4, name))
    made = [PodReading(f"evil/Pod/{number}", 50.0, 1e6) for number in range(40)]
    days.minutes(1, *made, PodReading(least[0], 50.0, 1e6))
    assert len(days.peaks.new) == MOST_NEW
    assert set(names) - days.peaks.new.keys() == set(least[1:41])
    assert days.peaks.new[least[0]].count > 1.9, "what was measured of the present one"


def test_beyond_the_bound_pods_count_by_their_requests() -> None:
    days = Days()
    many = [PodReading(f"shop/Pod/{number}", 50.0, 1e6, 100, 1000) for number in range(MOST_NEW + 50)]
    result = days.minutes(3, *many)
    assert len(days.peaks) == MOST_NEW
    assert (result.known, result.cold) == (0, MOST_NEW + 50)
    assert result.online_cpu_milli >= 100 * (MOST_NEW + 50)


def test_one_owner_of_many_pods_is_no_long_step() -> None:
    peaks = WorkloadPeaks()
    steps = peaks.minute([web(100.0)] * 500, NONE, MINUTE)
    assert sum(1 for _ in steps) >= 500 // 16


POOLS = Pools(
    online_cpus=CpuSet.span(16),
    reserved=cpus("0"),
    dedicated={"u-1/a": cpus("4-5"), "u-1/b": cpus("6"), "u-2/a": cpus("7")},
    shared=EMPTY,
    reclaimed=EMPTY,
    budget_milli=0,
)


def test_what_is_left_is_of_the_cpus_that_no_container_owns_alone() -> None:
    assert own_milli(POOLS) == {"u-1": 3000, "u-2": 1000}
    # The kubelet gives an init container's CPUs to an app container, and keeps both entries.
    passed_on = replace(POOLS, dedicated={"u-1/init": cpus("0-3"), "u-1/main": cpus("2-4")})
    assert own_milli(passed_on) == {"u-1": 5000}
    prediction = PeakPrediction(at_s=0.0, online_cpu_milli=7000, system_cpu_milli=500)
    assert cpu_left(prediction, POOLS) == 12_000 - 7500
    assert cpu_left(replace(prediction, online_cpu_milli=99_000), POOLS) == 0


@pytest.mark.parametrize(
    ("pods_bytes", "left"), [(None, 100 - 4 - 10 - 50), (80 * GIB, 80 - 10 - 50), (98 * GIB, 96 - 10 - 50)]
)
def test_memory_is_left_of_the_node_and_of_a_limit_of_all_pods(pods_bytes: int | None, left: int) -> None:
    node = NodeMemoryReading(total_bytes=100 * GIB, available_bytes=60 * GIB, pods_bytes=pods_bytes, age_s=0.0)
    prediction = PeakPrediction(at_s=0.0, online_memory_bytes=50 * GIB, system_memory_bytes=4 * GIB)
    assert memory_left(prediction, node, 10 * GIB) == left * GIB
    assert memory_left(replace(prediction, online_memory_bytes=500 * GIB), node, 0) == 0


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_pods_there_are_the_sums_and_the_bounds_hold(data: st.DataObject) -> None:
    peaks, at_s = WorkloadPeaks(), 0.0
    amounts = st.none() | st.floats(0, 1e7)
    pods = st.lists(
        st.builds(
            PodReading,
            st.integers(0, 400).map("ns/Pod/{}".format),
            amounts,
            amounts,
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 50),
        ),
        max_size=200,
    )
    for _ in range(data.draw(st.integers(1, 6))):
        at_s += data.draw(st.sampled_from([0.0, 60.0, 3600.0, 90_000.0, 1e9]))
        minute = data.draw(pods)
        result = all_steps(peaks.minute(minute, NodeReading(data.draw(amounts), data.draw(amounts)), at_s))
        assert len(peaks.known) <= MOST - MOST_NEW
        assert len(peaks.new) <= MOST_NEW
        assert not peaks.known.keys() & peaks.new.keys()
        assert result.known + result.cold == len({reading.workload for reading in minute})
        if not result.known:
            assert result.online_cpu_milli >= sum(reading.cpu_request for reading in minute)
            assert result.online_memory_bytes >= sum(reading.memory_request for reading in minute) * (1 - 1e-12)


def test_names_of_all_workloads_are_listed_once() -> None:
    days = Days()
    days.minutes(70, web(1.0))
    days.minutes(1, web(1.0), PodReading("ns/Pod/new", 1.0, 1.0))
    listed: Iterable[tuple[str, bool]] = [(name, known) for name, _, known in days.peaks.items()]
    assert list(listed) == [("shop/Deployment/web", True), ("ns/Pod/new", False), ("(system)", True)]
