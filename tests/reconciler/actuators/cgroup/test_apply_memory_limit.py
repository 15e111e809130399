"""A memory limit below the use: reclaimed first, or not written; no process is killed either way."""

import threading
import time

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.compare import GroupTarget
from reconciler.actuators.mode import WriteSettings
from state.entry import US
from state.model import RuntimeSpec
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.actuators.acting import CID, GROUP, POD, UID, Acting, StoppingFiles

MEGA = 1 << 20


@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize(
    ("reclaim", "anon", "cache", "state", "left"),
    [
        pytest.param(True, 8, 24, "written", 16, id="the page cache makes room"),
        pytest.param(True, 24, 8, "refused", 24, id="there is not enough of it"),
        pytest.param(False, 8, 24, "refused", 32, id="nothing may be reclaimed"),
        pytest.param(False, 8, 8, "written", 16, id="it fits as it is"),
    ],
)
async def test_a_limit_below_usage(
    acting: Acting, mode: Mode, reclaim: bool, anon: int, cache: int, state: str, left: int
) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    acting.mode.use(WriteSettings(reclaim=reclaim))
    directory = hierarchy.directory("memory", GROUP)
    file, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if mode == "v1" else ("memory.max", "memory.current")
    )
    kernel.write(directory, "cgroup.procs", str(kernel.spawn()))
    kernel.charge(directory, anon=anon * MEGA, cache=cache * MEGA)
    before = kernel.read(directory, file)
    await acting.actuator.apply([acting.target(GROUP, {"memory.max": 16 * MEGA})])
    stood = acting.stood(GROUP, "memory.max")
    assert stood == state or (stood, mode, reclaim) == ("blocked", "v2", False)
    assert kernel.read(directory, file) == (f"{16 * MEGA}\n" if state == "written" else before)
    assert kernel.read(directory, used) == f"{left * MEGA}\n"
    assert kernel.killed == []
    # Wanted no more: the value before is restored, whatever has been used meanwhile.
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert kernel.read(directory, file) == before


class Held(StoppingFiles):
    """A kernel that takes its time over what is written in the slow lane, until the test says otherwise."""

    def __init__(self, kernel: FakeKernel) -> None:
        super().__init__(kernel)
        self.go_on = threading.Event()
        self.entered = threading.Event()

    def write(self, directory: str, file: str, text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go_on.wait(60)
        super().write(directory, file, text)


async def held(acting: Acting, files: Held, clock: MockClock, seconds: float, target: GroupTarget) -> None:
    """Apply a target whose value the kernel keeps for so long."""
    clock.rate = 1.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acting.actuator.apply, [target])
        assert await trio.to_thread.run_sync(files.entered.wait, 60)
        clock.jump(seconds)


async def test_a_value_reported_as_stuck_is_recorded_once_it_is_written(acting: Acting, mock_clock: MockClock) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    acting.mode.use(WriteSettings(reclaim=True))
    files = Held(kernel)
    acting.actuator._writer = KernelWriter(hierarchy, files=files, deadline_s=200, patience_s=50)
    before = acting.read(GROUP, "memory.max")
    lowered = acting.target(GROUP, {"memory.max": 16 * MEGA})
    await held(acting, files, mock_clock, 50, lowered)
    mock_clock.jump(200)
    acting.judge.statuses.recheck(acting.actuator._under_way[GROUP, "memory.max"], 0.0)
    await acting.actuator.apply([lowered])
    assert acting.stood(GROUP, "memory.max") == "refused"
    assert [(kind, "not done within 200 s" in message) for kind, message in acting.alerts] == [("refused", True)]
    files.go_on.set()
    with trio.fail_after(60):
        await acting.actuator._writer.quiet()
    await acting.actuator.apply([lowered])
    assert acting.read(GROUP, "memory.max") == str(16 * MEGA)
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert acting.read(GROUP, "memory.max") == before


@pytest.mark.parametrize(
    ("mode", "knob", "file"),
    [
        ("v1", "memory.max", "memory.limit_in_bytes"),
        ("v2", "memory.max", "memory.max"),
        ("v2", "memory.high", "memory.high"),
    ],
)
async def test_a_look_does_not_wait_for_what_takes_long_and_a_later_one_enters_it(
    acting: Acting, mode: Mode, knob: str, file: str, mock_clock: MockClock
) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    acting.mode.use(WriteSettings(reclaim=True))
    files = Held(kernel)
    acting.actuator._writer = KernelWriter(hierarchy, files=files, patience_s=1000, deadline_s=5000)
    directory = hierarchy.directory("memory", GROUP)
    kernel.charge(directory, anon=8 * MEGA, cache=24 * MEGA)
    before = kernel.read(directory, file)
    lowered = acting.target(GROUP, {knob: 16 * MEGA})
    await held(acting, files, mock_clock, 1000, lowered)
    assert (acting.stood(GROUP, knob), acting.alerts) == ("under way", [])
    assert acting.judge.next_check() is not None
    # Others are served meanwhile, and the file itself is left alone.
    with trio.fail_after(60):
        await acting.actuator.apply([acting.target(POD, {"cpu.weight": 7})])
        await acting.actuator.apply([lowered])
    assert acting.stood(POD, "cpu.weight") == "written"
    assert kernel.read(directory, file) == before
    files.go_on.set()
    with trio.fail_after(60):
        await acting.actuator.commit()
    assert acting.stood(GROUP, knob) == "written"
    assert kernel.read(directory, file) == f"{16 * MEGA}\n"
    (entry,) = acting.ledger.group(GROUP)
    assert (entry.writer, entry.seen) == (US, str(16 * MEGA))
    assert acting.judge.due(time.monotonic()) == {UID}
    # It is ours, so the value before is restored.
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert kernel.read(directory, file) == before
    assert acting.alerts == []


@pytest.mark.parametrize(("wanted", "had"), [(512, 256), (128, 256)], ids=["above memory+swap", "below"])
async def test_a_limit_and_memory_with_swap_are_written_in_the_order_that_the_kernel_takes(
    acting: Acting, wanted: int, had: int
) -> None:
    """The runtime has bounded both; a limit alone above memory+swap is EINVAL for ever."""
    kernel, hierarchy = acting.kernel, acting.hierarchy
    directory = hierarchy.directory("memory", GROUP)
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        kernel.write(directory, file, str(had * MEGA))
    both = {"memory.max": wanted * MEGA, "memory.swap": wanted * MEGA}
    await acting.actuator.apply([acting.target(GROUP, both)])
    assert (acting.read(GROUP, "memory.max"), acting.read(GROUP, "memory.swap")) == (str(wanted * MEGA),) * 2
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert (acting.read(GROUP, "memory.max"), acting.read(GROUP, "memory.swap")) == (str(had * MEGA),) * 2
    assert acting.alerts == []


async def test_a_limit_above_memory_with_swap_alone_says_which_rule_it_breaks(acting: Acting) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    directory = hierarchy.directory("memory", GROUP)
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        kernel.write(directory, file, str(256 * MEGA))
    await acting.actuator.apply([acting.target(GROUP, {"memory.max": 512 * MEGA})])
    assert acting.stood(GROUP, "memory.max") == "blocked"
    assert "the memory limit would be above memory+swap" in acting.alerts[0][1]


async def test_a_limit_below_the_use_says_what_is_used(acting: Acting) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    acting.mode.use(WriteSettings(reclaim=True))
    kernel.charge(hierarchy.directory("memory", GROUP), anon=24 * MEGA, cache=0)
    await acting.actuator.apply([acting.target(GROUP, {"memory.max": 16 * MEGA})])
    ((_, message),) = acting.alerts
    assert f"below the usage {24 * MEGA}, of which no more can be reclaimed (memory.usage_in_bytes)" in message


async def test_a_group_without_its_oom_killer_is_not_limited_and_that_is_reported(acting: Acting) -> None:
    """At the limit its processes would stop for ever."""
    kernel, hierarchy = acting.kernel, acting.hierarchy
    directory = hierarchy.directory("memory", GROUP)
    kernel.write(directory, "memory.oom_control", "1")
    before = acting.read(GROUP, "memory.max")
    limits = {"memory.max": 16 * MEGA, "memory.swap": 16 * MEGA}
    await acting.actuator.apply([acting.target(GROUP, limits)])
    assert (acting.stood(GROUP, "memory.max"), acting.stood(GROUP, "memory.swap")) == ("blocked", "blocked")
    assert acting.read(GROUP, "memory.max") == before
    assert "oom_kill_disable 1: at a limit its processes stop for ever" in acting.alerts[0][1]
    kernel.write(directory, "memory.oom_control", "0")
    acting.judge.statuses.forget(GROUP)  # the wait for the next try is over
    await acting.actuator.apply([acting.target(GROUP, limits)])
    assert acting.read(GROUP, "memory.max") == str(16 * MEGA)
    # Switched off by a person afterwards: the limit is in force, and what it does now is said.
    kernel.write(directory, "memory.oom_control", "1")
    await acting.actuator.apply([acting.target(GROUP, limits)])
    status = acting.judge.statuses.get((GROUP, "memory.max"))
    assert status is not None
    assert "oom_kill_disable 1" in status.detail


@pytest.mark.parametrize("mode", ["v1", "v2"])
async def test_memory_and_swap_are_bounded_at_the_runtimes_signal(acting: Acting, mode: Mode) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    swap = 256 * MEGA if mode == "v1" else 0
    wanted = {"memory.max": 256 * MEGA, "memory.swap": swap}
    await acting.actuator.apply([acting.target(GROUP, wanted, creating=RuntimeSpec(shares=2))])
    assert {acting.stood(GROUP, knob) for knob in wanted} == {"prepared"}
    acting.lane.execute(CID, time.monotonic())
    directory = hierarchy.directory("memory", GROUP)
    files = ("limit_in_bytes", "memsw.limit_in_bytes") if mode == "v1" else ("max", "swap.max")
    assert [kernel.read(directory, f"memory.{file}").strip() for file in files] == [str(256 * MEGA), str(swap)]
