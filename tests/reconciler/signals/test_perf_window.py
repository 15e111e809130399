"""Windows of counters, on the strict fake and (software events) on this machine's kernel: the same tests for both."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.signals.perf_abi import (
    CACHE_MISSES,
    CYCLES,
    INSTRUCTIONS,
    PerfCalls,
    PerfEvent,
    RealPerf,
    attributes,
    decode,
)
from reconciler.signals.perf_window import PerfKey, PerfStart, PerfWindow, probe, rotate, why
from tests.fakes.perf import SOFTWARE, FakePerf
from tests.known import known

TASK_CLOCK = PerfEvent(name="task clock", type=SOFTWARE, config=1)
CPU_CLOCK = PerfEvent(name="CPU clock", type=SOFTWARE, config=0)
SWITCHES = PerfEvent(name="switches", type=SOFTWARE, config=3)
ALL = (CYCLES, INSTRUCTIONS, CACHE_MISSES)
UNIFIED = Path("/sys/fs/cgroup/unified")


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


@pytest.fixture
def group(tmp_path: Path) -> Path:
    made = tmp_path / "pod" / "container"
    made.mkdir(parents=True)
    return made


def window(
    fake: PerfCalls, path: Path, events: tuple[PerfEvent, ...] = ALL, cpus: tuple[int, ...] = (0, 1)
) -> PerfWindow:
    number = opened(path)
    try:
        return PerfWindow(fake, events, number, cpus)
    finally:
        os.close(number)


# What both kernels answer


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty group of this machine, which the test may remove."""
    made = UNIFIED / f"bypassd-test-perf-{os.getpid()}"
    try:
        made.mkdir()
        window(RealPerf(), made, (TASK_CLOCK,), (0,)).close()
    except OSError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no counters for groups below {UNIFIED}: {exc}")
    yield made
    if made.is_dir():
        made.rmdir()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.kernel)])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PerfCalls, Path]:
    """The calls, and an empty group that they can count."""
    if request.param == "real":
        return RealPerf(), request.getfixturevalue("real")
    made = tmp_path / "g"
    made.mkdir()
    return FakePerf(tmp_path, cpus=os.cpu_count() or 1), made


def error_of(call: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno or 0


def test_the_kernel_refuses_what_the_fake_refuses(kernel: tuple[PerfCalls, Path], tmp_path: Path) -> None:
    calls, group = kernel
    number, other = opened(group), opened(Path("/proc"))
    leader = calls.open(attributes(TASK_CLOCK, leader=True), number, 0, -1, 12)
    text = attributes(SWITCHES, leader=False)
    assert error_of(lambda: calls.open(text, number, -1, -1, 12)) == errno.EINVAL
    assert error_of(lambda: calls.open(text, number, 100_000, -1, 12)) == errno.EINVAL
    assert error_of(lambda: calls.open(text, number, 1, leader, 12)) == errno.EINVAL
    assert error_of(lambda: calls.open(text, number, 0, 987_654, 12)) == errno.EBADF
    assert error_of(lambda: calls.open(text, number, 0, -1, 12 | 1 << 20)) == errno.EINVAL
    assert error_of(lambda: calls.open(text, other, 0, -1, 12)) == errno.EBADF
    none = PerfEvent(name="none", type=SOFTWARE, config=999)
    assert error_of(lambda: calls.open(attributes(none, leader=True), number, 0, -1, 12)) == errno.ENOENT
    sibling = calls.open(text, number, 0, leader, 12)
    assert error_of(lambda: calls.read(leader, 8)) == errno.ENOSPC
    answer = known(decode(calls.read(leader, 100), 2))
    assert (answer.enabled_ns, answer.running_ns, answer.counts) == (0, 0, (0, 0))
    calls.close(sibling)
    calls.close(leader)
    assert error_of(lambda: calls.read(leader, 100)) == errno.EBADF
    os.close(number)
    os.close(other)


def test_a_group_that_is_gone_is_enoent_and_an_open_window_outlives_it(kernel: tuple[PerfCalls, Path]) -> None:
    calls, group = kernel
    perf_window, number = window(calls, group, (TASK_CLOCK,)), opened(group)
    if isinstance(calls, FakePerf):
        calls.remove(group)
    else:
        group.rmdir()
    assert error_of(lambda: PerfWindow(calls, (TASK_CLOCK,), number, (0,))) == errno.ENOENT
    assert perf_window.count() is None
    perf_window.close()
    os.close(number)


@pytest.mark.kernel
def test_this_kernel_counts_a_group_of_events_of_the_groups_below(real: Path) -> None:
    inside = real / "container"
    inside.mkdir()
    events = (TASK_CLOCK, CPU_CLOCK, SWITCHES)
    cpus = os.sched_getaffinity(0)
    perf_window = window(RealPerf(), real, events, tuple(cpus))
    assert perf_window.descriptors == 3 * len(cpus)
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began = time.monotonic()
        (inside / "cgroup.procs").write_text(str(hog.pid))
        time.sleep(0.5)
        counts = perf_window.count()
        took_s = time.monotonic() - began
    finally:
        hog.kill()
        hog.wait()
        perf_window.close()
        while (inside / "cgroup.procs").read_text():
            time.sleep(0.01)
        inside.rmdir()
    assert counts is not None
    assert counts.coverage == 1.0
    assert 0.05 < counts.busy_s <= took_s + 0.05
    # Three clocks of the same time on a CPU, each by its own way through the kernel.
    assert counts.values["task clock"] / 1e9 == pytest.approx(counts.busy_s, rel=0.1)
    assert counts.values["CPU clock"] == pytest.approx(counts.values["task clock"], rel=0.1)
    assert counts.values["switches"] >= 0


@pytest.mark.kernel
def test_a_removed_group_is_freed_once_its_window_is_closed(real: Path) -> None:
    def dying() -> int:
        parts = (UNIFIED / "cgroup.stat").read_text().split()
        return int(parts[parts.index("nr_dying_descendants") + 1])

    perf_window = window(RealPerf(), real, (TASK_CLOCK,))
    real.rmdir()
    deadline = time.monotonic() + 60
    with_window = dying()
    assert with_window >= 1
    perf_window.close()
    # Others on this machine remove groups, too: less than before is enough.
    while dying() >= with_window:
        assert time.monotonic() < deadline, "the group was not freed"
        time.sleep(0.05)


# What only the fake can show


def test_counts_are_scaled_to_the_whole_time_and_say_how_much_of_it_was_counted(group: Path) -> None:
    fake = FakePerf(group.parents[1], counters=3)
    perf_window, other = window(fake, group.parent), window(fake, group)
    fake.run(group, 0, 2.0, {0: 4e9, 1: 2e9, 3: 6e6})
    fake.run(group, 1, 1.0, {0: 1e9, 1: 1e9, 3: 1e6})
    counts = known(perf_window.count())
    # Six events wanted three counters: each was counted half of the time, and half as much.
    assert counts.coverage == pytest.approx(0.5)
    assert counts.busy_s == pytest.approx(3.0)
    assert counts.values == pytest.approx({"cycles": 5e9, "instructions": 3e9, "cache misses": 7e6})
    for each in (perf_window, other):
        each.close()
    assert fake.events == {}


def test_a_group_that_did_not_run_tells_nothing(group: Path) -> None:
    fake = FakePerf(group.parents[1])
    perf_window = window(fake, group)
    assert perf_window.count() is None
    perf_window.close()


def test_a_cpu_that_goes_offline_takes_only_its_own_counts_along(group: Path) -> None:
    fake = FakePerf(group.parents[1])
    perf_window = window(fake, group)
    fake.run(group, 0, 1.0, {0: 3e9, 1: 1e9})
    fake.run(group, 1, 1.0, {0: 9e9, 1: 1e9})
    fake.unplug(1)
    counts = known(perf_window.count())
    assert (counts.values["cycles"], counts.busy_s) == (3e9, 1.0)
    perf_window.close()
    assert fake.events == {}


def test_offline_cpus_are_not_opened_and_none_online_is_an_error(group: Path) -> None:
    fake = FakePerf(group.parents[1])
    fake.unplug(0)
    perf_window = window(fake, group)
    assert perf_window.descriptors == 3
    perf_window.close()
    fake.unplug(1)
    assert error_of(lambda: window(fake, group)) == errno.ENODEV
    assert fake.events == {}


def test_a_window_that_cannot_be_opened_whole_leaves_nothing_open(group: Path) -> None:
    fake = FakePerf(group.parents[1], most=5)
    assert error_of(lambda: window(fake, group)) == errno.EMFILE
    assert fake.events == {}


@pytest.mark.parametrize(
    ("answer", "events"), [(b"", 2), (b"\1" * 12, 2), ((1).to_bytes(8, "little") + bytes(24), 2), (bytes(40), 2)]
)
def test_an_answer_of_a_group_that_was_taken_apart_is_none(answer: bytes, events: int) -> None:
    assert decode(answer, events) is None


def test_a_turn_counts_what_has_ended_drops_what_is_lost_and_goes_on_after_a_refusal(group: Path) -> None:
    fake = FakePerf(group.parents[1])
    old, lost, bad, new = (PerfKey(name, 1) for name in ("old", "lost", "bad", "new"))
    finish = {old: window(fake, group), lost: window(fake, group)}
    fake.run(group, 0, 1.0, {0: 2e9, 1: 1e9})
    begin = [PerfStart(bad, f"{group}/none", CpuSet([0])), PerfStart(new, str(group), CpuSet([0]))]
    done = rotate(fake, ALL, finish, [old], begin)
    assert {key: counts.values["cycles"] for key, counts in done.counted.items() if counts} == {old: pytest.approx(2e9)}
    assert {key: exc.errno for key, exc in done.failed.items()} == {bad: errno.ENOENT}
    assert list(done.opened) == [new]
    assert len(fake.events) == 3
    done.opened[new].close()


# What this machine can count


def test_a_probe_finds_all_events_and_gives_them_back(tmp_path: Path) -> None:
    fake = FakePerf(tmp_path)
    offer = probe(fake, ALL[:2], ALL[2:], 0)
    assert (offer.events, offer.missing, fake.events) == (ALL, {}, {})


def test_an_extra_event_is_left_out_alone(tmp_path: Path) -> None:
    offer = probe(FakePerf(tmp_path, hardware=(0, 1)), ALL[:2], ALL[2:], 0)
    assert offer.events == ALL[:2]
    assert offer.missing["cache misses"].startswith("no hardware counter for it")
    few = probe(FakePerf(tmp_path, counters=2), ALL[:2], ALL[2:], 0)
    assert few.events == ALL[:2]
    assert few.missing["cache misses"].startswith("refused by the kernel: too few counters")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOENT, "no hardware counter"),
        (errno.EOPNOTSUPP, "does not support"),
        (errno.ENOSYS, "CONFIG_PERF_EVENTS"),
        (errno.EACCES, "kernel.perf_event_paranoid is 2: it must be 0 or less, or bypassd needs CAP_PERFMON"),
        (errno.EMFILE, "LimitNOFILE"),
        (errno.EBUSY, "another program"),
        (errno.EIO, "refused by the kernel (EIO)"),
    ],
)
def test_without_a_needed_event_there_is_nothing_and_the_remedy_is_told(tmp_path: Path, code: int, words: str) -> None:
    paranoid = tmp_path / "proc/sys/kernel"
    paranoid.mkdir(parents=True)
    (paranoid / "perf_event_paranoid").write_text("2\n")
    offer = probe(FakePerf(tmp_path, refusal=code), ALL[:2], ALL[2:], 0, str(tmp_path))
    assert offer.events == ()
    assert set(offer.missing) == {"cycles", "instructions", "cache misses"}
    assert words in offer.missing["cycles"]


def test_eperm_where_the_level_allows_it_is_a_filter(tmp_path: Path) -> None:
    paranoid = tmp_path / "proc/sys/kernel"
    paranoid.mkdir(parents=True)
    (paranoid / "perf_event_paranoid").write_text("-1\n")
    assert why(OSError(errno.EPERM, ""), str(tmp_path)).startswith("not permitted (EPERM): a seccomp filter")


@pytest.mark.kernel
def test_this_machine_says_why_it_counts_no_cycles_or_counts_them() -> None:
    offer = probe(RealPerf(), (CYCLES, INSTRUCTIONS), (CACHE_MISSES,), 0)
    assert CYCLES in offer.events or "hardware counter" in offer.missing["cycles"] or "permitted" in str(offer.missing)
    assert probe(RealPerf(), (TASK_CLOCK,), (SWITCHES,), 0).events == (TASK_CLOCK, SWITCHES)
