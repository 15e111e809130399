"""Cycles per instruction and cache misses of pods: which is counted when, what is reported, and what is released."""

import errno
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.hierarchy import UNIFIED, Hierarchy, HierarchyMode, Mount
from reconciler.signals.perf import LAW, TICK_S, PerfConfig, PerfReader, due, stretched_s
from reconciler.signals.perf_abi import CYCLES, PerfEvent, RealPerf, attributes
from reconciler.signals.readers import SampleContext, SampleSheet
from state.evidence import Sample
from state.model import ContainerKind, GroupRef, NodeView, Pod
from tests.fakes.constants import varied
from tests.fakes.perf import SOFTWARE, FakePerf
from tests.reconciler.nodes import container, node, online, pod
from tests.reconciler.signals.podtree import shared


def hierarchy(directory: Path) -> Hierarchy:
    mount = Mount(directory=str(directory), version=2, controllers=(UNIFIED,))
    return Hierarchy(root=str(directory), mode=HierarchyMode.HYBRID, controllers={UNIFIED: mount})


def scene(view: NodeView, *wanted: str) -> SampleContext:
    return SampleContext(view=view, pools=None, wanted=wanted or ("cpi", "llc.misses"))


class Machine:
    """A node of pods with directories, a fake PMU, and a reader that runs."""

    def __init__(self, directory: Path, nursery: trio.Nursery, **fake: int) -> None:
        self.directory = directory
        self.nursery = nursery
        self.fake = FakePerf(directory, **fake)  # type: ignore[arg-type]  # only numbers are given
        self.pods: dict[str, Pod] = {}
        self.cpus = 2
        self.actual: dict[tuple[str, str], Value] = {}

    async def start(self, config: PerfConfig = LAW) -> PerfReader:
        means = shared(hierarchy=hierarchy(self.directory), clock=trio.current_time)
        self.reader = PerfReader(means, config=config, calls=self.fake)
        await self.nursery.start(self.reader.run)
        assert await self.look() == {}
        return self.reader

    def add(self, item: Pod) -> Path:
        self.pods[item.uid] = item
        path = Path(f"{self.directory}{item.group.path}")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def path(self, uid: str) -> Path:
        return Path(f"{self.directory}{self.pods[uid].group.path}")

    async def look(self, *wanted: str) -> dict[str, dict[str, Sample]]:
        sheet = SampleSheet()
        await self.reader.read(
            scene(node(*self.pods.values(), topology=self.cpus, actual=self.actual), *wanted),
            sheet,
            trio.current_time(),
        )
        return sheet.samples

    async def sleep(self, seconds: float) -> None:
        """Look each second, as the observer does."""
        for _ in range(round(seconds)):
            await self.wait(1)
            await self.look()

    async def wait(self, seconds: float) -> None:
        """Time does not go on while the reader's thread works: the clock of tests would leap over it."""
        await trio.sleep(seconds)
        calm = 0
        while calm < 2:  # a probe is followed by a turn
            await trio.testing.wait_all_tasks_blocked()
            calm = 0 if self.reader._limiter.borrowed_tokens else calm + 1


Make = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock) -> Make:
    return lambda **fake: Machine(tmp_path, nursery, **fake)


async def test_an_online_pod_is_counted_for_a_window_and_what_it_told_grows_old(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine(counters=2)
    path = item.add(online("web"))
    item.add(pod("be"))
    reader = await item.start()
    await item.sleep(2)
    assert reader.descriptors == 4  # cycles and instructions: three events do not fit two counters
    item.fake.run(path, 0, 4.0, {0: 3e9, 1: 2e9})
    await item.sleep(12)
    assert reader.descriptors == 0
    assert item.fake.events == {}
    samples = await item.look()
    assert list(samples) == ["pod:web"]
    assert list(samples["pod:web"]) == ["cpi"]
    sample = samples["pod:web"]["cpi"]
    assert sample.value == pytest.approx(1.5)
    assert sample.confidence == 1.0
    before = sample.age_s
    await item.wait(7)
    assert (await item.look())["pod:web"]["cpi"].age_s == pytest.approx(before + 7)
    assert reader.problems()["llc.misses"].startswith("refused by the kernel")


async def test_misses_are_per_thousand_instructions_and_shared_counters_lower_the_confidence(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine(counters=3)
    path = item.add(online("web"))
    (path / "inner").mkdir()
    await item.start()
    await item.sleep(2)
    other = item.fake.open(attributes(CYCLES, leader=True), -1, 0, -1, 8)
    item.fake.enable(other)
    item.fake.run(path / "inner", 0, 1.0, {0: 4e9, 1: 2e9, 3: 6e6})
    await item.sleep(12)
    samples = (await item.look())["pod:web"]
    assert samples["cpi"].value == pytest.approx(2.0)
    assert samples["llc.misses"].value == pytest.approx(3.0)
    assert samples["cpi"].confidence == pytest.approx(3 / 4)


async def test_nothing_is_opened_while_nobody_wants_it_and_all_is_closed_when_nobody_does_any_more(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine()
    reader = await item.start()
    item.add(online("web"))
    await item.look("cpu.wait")
    await item.wait(5)
    assert item.fake.calls == []
    await item.look("cpi")
    await item.wait(2)
    assert reader.descriptors == 6
    await item.look("cpu.wait")
    await item.wait(2)
    assert item.fake.events == {}


async def test_few_pods_are_counted_at_a_time_and_all_in_a_period(machine: Make, autojump_clock: MockClock) -> None:
    item = machine()
    for number in range(24):
        item.add(online(f"web{number:02}"))
    reader = await item.start()
    most = 0
    texts: set[str] = set()
    for _ in range(75):
        await item.wait(1)
        for uid in item.pods:
            item.fake.run(item.path(uid), 1, 0.1, {0: 2e8, 1: 1e8})
        texts |= (await item.look()).keys()
        most = max(most, reader.descriptors)
    assert len(texts) == 24
    # 24 pods for 10 of 60 seconds are 4 at a time; windows end on ticks, so one or two more.
    assert 4 * 6 <= most <= 6 * 6
    assert reader.problems() == {}


async def test_a_pod_that_goes_is_let_go_at_once_and_one_that_comes_anew_has_no_past(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine()
    path = item.add(online("web"))
    reader = await item.start()
    await item.sleep(2)
    assert item.fake.holding(path) == 6
    item.fake.run(path, 0, 1.0, {0: 2e9, 1: 1e9})
    item.fake.remove(path)
    gone = item.pods.pop("web")
    await item.sleep(2)
    assert item.fake.holding(path) == 0
    item.fake.removed.clear()
    again = item.add(replace(gone, group=GroupRef(path=gone.group.path, inode=77)))
    await item.sleep(3)
    assert item.fake.holding(again) == 6
    item.pods["web"] = replace(gone, group=GroupRef(path=gone.group.path, inode=78))
    await item.sleep(1)
    assert await item.look() == {}
    assert reader.problems() == {}


async def test_cancelling_gives_all_descriptors_back(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        item = Machine(tmp_path, nursery)
        item.add(online("web"))
        reader = await item.start()
        await item.wait(3)
        assert reader.descriptors == 6
        nursery.cancel_scope.cancel()
    assert item.fake.events == {}


async def test_without_a_pmu_both_signals_say_why_and_it_is_tried_again_now_and_then(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine(refusal=errno.EACCES)
    path = item.add(online("web"))
    reader = await item.start()
    await item.sleep(3)
    assert set(reader.problems()) == {"cpi", "llc.misses"}
    assert "kernel.perf_event_paranoid" in reader.problems()["cpi"]
    assert item.fake.calls == ["open"]
    item.fake.refusal = 0
    await item.wait(590)
    assert "cpi" in reader.problems()
    await item.wait(15)
    assert reader.problems() == {}
    assert item.fake.holding(path) == 6


async def test_the_bound_on_descriptors_holds_and_says_what_it_costs(machine: Make, autojump_clock: MockClock) -> None:
    item = machine()
    for number in range(12):
        item.add(online(f"web{number:02}"))
    reader = await item.start(varied(LAW, descriptors=8))
    await item.sleep(30)
    assert reader.descriptors == 6
    assert reader.problems() == {"cpi": "8 file descriptors allow one measurement per pod every 99 s"}
    item.cpus = 4
    await item.sleep(15)
    assert reader.problems()["cpi"].startswith("12 pods need up to 12 file descriptors each, 8 are allowed")


async def test_where_no_descriptor_is_left_what_is_open_stays_and_no_more_is_asked_for(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine(most=7)
    for number in range(24):
        item.add(online(f"web{number:02}"))
    reader = await item.start()
    await item.sleep(4)
    assert reader.descriptors == 6
    assert "no file descriptor is left (EMFILE)" in reader.problems()["cpi"]
    refused = item.fake.calls.count("open")
    await item.sleep(5)
    assert item.fake.calls.count("open") == refused


async def test_a_pod_without_a_group_there_is_told_and_the_others_are_counted(
    machine: Make, autojump_clock: MockClock
) -> None:
    item = machine()
    item.add(online("a")).rmdir()
    item.add(online("b"))
    reader = await item.start()
    await item.sleep(4)
    assert reader.descriptors == 6
    assert reader.problems() == {"cpi": "pod ns/a: no group for hardware counters"}
    del item.pods["a"]
    await item.sleep(2)
    assert reader.problems() == {}


async def test_a_processor_whose_event_is_of_the_second_level_is_believed_less(
    machine: Make, autojump_clock: MockClock, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n")
    item = machine()
    path = item.add(online("web"))
    reader = await item.start()
    await item.sleep(2)
    item.fake.run(path, 0, 1.0, {0: 2e9, 1: 1e9, 3: 1e6})
    await item.sleep(12)
    samples = (await item.look())["pod:web"]
    assert (samples["cpi"].confidence, samples["llc.misses"].confidence) == (1.0, 0.5)
    assert "second-level" in reader.problems()["llc.misses"]


# Whose turn it is


@given(
    pods=st.integers(1, 150),
    window_s=st.floats(0.5, 20),
    period_s=st.floats(20, 120),
)
def test_every_pod_gets_its_window_each_period_and_few_stand_open_together(
    pods: int, window_s: float, period_s: float
) -> None:
    law = PerfConfig(window_s=window_s, period_s=period_s)
    uids = [f"p{number}" for number in range(pods)]
    begun: dict[str, float] = {}
    gaps: dict[str, float] = {}
    counting: dict[str, float] = {}
    for tick in range(math.ceil(4 * period_s)):
        now = tick * TICK_S
        counting = {uid: at for uid, at in counting.items() if now - at < window_s}
        for uid in due(uids, begun, now, law, counting=len(counting)):
            assert uid not in counting
            gaps[uid] = max(gaps.get(uid, 0.0), now - begun.get(uid, 0.0))
            begun[uid] = counting[uid] = now
        assert len(counting) <= pods * (window_s + TICK_S) / period_s + 2
    assert set(gaps) == set(uids)
    assert max(gaps.values()) <= period_s * 1.25 + 3 * TICK_S


def test_a_bound_stretches_the_period_by_what_is_wanted_of_it() -> None:
    assert stretched_s([6] * 10, 600, LAW) == 60.0
    assert stretched_s([6] * 100, 55, LAW) == pytest.approx(120.0)
    assert stretched_s([], 10, LAW) == 60.0


async def test_a_pod_is_counted_where_its_containers_may_run(machine: Make, autojump_clock: MockClock) -> None:
    item = machine(cpus=8)
    item.cpus = 8
    web = online("web", container("a"), container("b"), container("pause", kind=ContainerKind.SANDBOX))
    item.add(web)
    a, b, _ = (f"{web.group.path}/id-{name}" for name in ("a", "b", "pause"))
    # The CPUs of a sandbox are not read.
    item.actual = {(a, "cpu.set"): CpuSet([1, 2]), (b, "cpu.set"): CpuSet([2, 9])}
    reader = await item.start()
    await item.sleep(2)
    assert reader.descriptors == 3 * 2
    assert {event.cpu for event in item.fake.events.values()} == {1, 2}


# On this machine


@pytest.mark.kernel
async def test_the_reader_counts_real_pods_by_software_events(nursery: trio.Nursery) -> None:
    root = Path("/sys/fs/cgroup/unified")
    name = f"/bypassd-test-perf-reader-{os.getpid()}"
    group = Path(f"{root}{name}")
    events = tuple(
        PerfEvent(name=word, type=SOFTWARE, config=config) for word, config in (("a", 1), ("b", 0), ("c", 3))
    )
    try:
        group.mkdir()
        os.close(RealPerf().open(attributes(PerfEvent(name="x", type=SOFTWARE, config=1), leader=True), -1, 0, -1, 8))
    except OSError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no counters for groups below {root}: {exc}")
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # noqa: ASYNC220  # made at once
    view = node(replace(online("web"), group=GroupRef(path=name)), topology=os.cpu_count() or 1)
    assert len(events) == 3
    reader = PerfReader(
        shared(hierarchy=hierarchy(root)),
        config=PerfConfig(window_s=0.5, period_s=1),
        events=(events[0], events[1], events[2]),
    )
    try:
        (group / "cgroup.procs").write_text(str(hog.pid))
        await reader.read(scene(view), SampleSheet(), time.monotonic())
        await nursery.start(reader.run)
        sheet = SampleSheet()
        with trio.fail_after(60):
            while not sheet.samples:
                await trio.sleep(0.1)
                await reader.read(scene(view), sheet, time.monotonic())
        # Two clocks of one time on a CPU serve as cycles and instructions.
        sample = sheet.samples["pod:web"]["cpi"]
        assert sample.value == pytest.approx(1.0, rel=0.1)
        assert sample.confidence == 1.0
        assert reader.problems() == {}
    finally:
        nursery.cancel_scope.cancel()
        hog.kill()
        hog.wait()
        while (group / "cgroup.procs").read_text():
            time.sleep(0.01)  # noqa: ASYNC251  # the test is over
        group.rmdir()
