"""Files with a line per disk: written and restored device by device, also after a kill between two of the writes."""

import contextlib
from pathlib import Path

import pytest

from cgroupfs.codecs import DeviceLimits
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all
from state.entry import RestoreOutcome
from state.model import RuntimeSpec
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.actuators.acting import BE, CID, GROUP, Acting, Stopped, make_node

TWO = {"254:0": {"rbps": 1000, "wiops": 10}, "8:0": {"rbps": 2000}}
MODEL: dict[str, int | str] = {
    "ctrl": "user",
    "model": "linear",
    **dict.fromkeys(("rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops"), 5),
}
WANTED: dict[Mode, dict[str, DeviceLimits]] = {
    "v1": {
        "blkio.read_bps": DeviceLimits({"254:0": {"rbps": 1000}, "8:0": {"rbps": 2000}}),
        "blkio.write_iops": DeviceLimits({"254:0": {"wiops": 10}}),
    },
    "v2": {"io.max": DeviceLimits(TWO)},
}
FILES: dict[Mode, tuple[str, ...]] = {
    "v1": ("blkio.throttle.read_bps_device", "blkio.throttle.write_iops_device"),
    "v2": ("io.max",),
}
SHOWN: dict[Mode, set[str]] = {
    "v1": {"254:0 1000", "8:0 2000", "254:0 10"},
    "v2": {"254:0 rbps=1000 wbps=max riops=max wiops=10", "8:0 rbps=2000 wbps=max riops=max wiops=max"},
}
MODES: list[Mode] = ["v1", "v2"]


def lines(kernel: FakeKernel, hierarchy: Hierarchy, mode: Mode, path: str) -> set[str]:
    directory = hierarchy.directory("blkio" if mode == "v1" else "io", path)
    return {line for file in FILES[mode] for line in kernel.read(directory, file).splitlines()}


@pytest.mark.parametrize("mode", MODES)
async def test_every_device_is_written_and_one_that_is_no_longer_wanted_is_freed(acting: Acting, mode: Mode) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    await acting.actuator.apply([acting.target(GROUP, WANTED[mode])])
    assert lines(kernel, hierarchy, mode, GROUP) == SHOWN[mode]
    count = acting.files.count
    await acting.actuator.apply([acting.target(GROUP, WANTED[mode])])
    assert acting.files.count == count, "what is there is not written again"
    name = "blkio.read_bps" if mode == "v1" else "io.max"
    await acting.actuator.apply([acting.target(GROUP, {name: DeviceLimits({"8:0": {"rbps": 7}})})])
    shown = "8:0 7" if mode == "v1" else "8:0 rbps=7 wbps=max riops=max wiops=max"
    assert lines(kernel, hierarchy, mode, GROUP) == {shown}
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert lines(kernel, hierarchy, mode, GROUP) == set()
    assert len(acting.ledger) == 0
    assert acting.alerts == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_kill_between_two_devices_is_undone_like_any_other(tmp_path: Path, mode: Mode) -> None:
    for writes in range(4):
        path = tmp_path / str(writes)
        path.mkdir()
        kernel, hierarchy = make_node(path, mode=mode)
        first = Acting(kernel, hierarchy, path, writes=writes)
        with contextlib.suppress(Stopped):
            await first.actuator.apply([first.target(GROUP, WANTED[mode])])
        first.close()
        second = Acting(kernel, hierarchy, path)
        adopt_unjournaled_writes(hierarchy, second.ledger, files=kernel)
        done = await restore_all(hierarchy, second.ledger, second.writer, files=kernel)
        assert all(result.ok for result in done), done
        assert lines(kernel, hierarchy, mode, GROUP) == set()
        second.close()


@pytest.mark.parametrize("mode", MODES)
async def test_the_hot_lane_writes_every_device_before_the_program_runs(acting: Acting, mode: Mode) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    await acting.actuator.apply([acting.target(GROUP, WANTED[mode], creating=RuntimeSpec(shares=2))])
    assert lines(kernel, hierarchy, mode, GROUP) == set()
    assert acting.lane.execute(CID, 0.0)
    assert lines(kernel, hierarchy, mode, GROUP) == SHOWN[mode]
    await acting.actuator.apply([acting.target(GROUP, WANTED[mode], signalled=True)])
    assert acting.alerts == []
    done = await restore_all(hierarchy, acting.ledger, acting.writer, files=kernel)
    assert {result.undo for result in done} == {RestoreOutcome.RESTORED}
    assert lines(kernel, hierarchy, mode, GROUP) == set()


@pytest.mark.parametrize("mode", ["v2"])
async def test_the_cost_model_of_the_machine_is_set_and_removed(acting: Acting) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    root = hierarchy.directory("io", "/")
    wanted = {
        "io.cost_qos": DeviceLimits({"254:0": {"enable": 1, "ctrl": "auto"}}),
        "io.cost_model": DeviceLimits({"254:0": MODEL}),
    }
    await acting.actuator.apply([acting.target("/", wanted)])
    assert kernel.read(root, "io.cost.qos").startswith("254:0 enable=1 ctrl=auto")
    assert kernel.read(root, "io.cost.model").startswith("254:0 ctrl=user model=linear rbps=5")
    done = await restore_all(hierarchy, acting.ledger, acting.writer, files=kernel)
    assert {result.undo for result in done} == {RestoreOutcome.RESTORED}
    assert kernel.read(root, "io.cost.qos").startswith("254:0 enable=0 ctrl=auto")
    assert kernel.read(root, "io.cost.model").startswith("254:0 ctrl=auto")


@pytest.mark.parametrize("mode", ["v2"])
async def test_a_removed_disk_is_reported_and_the_others_stay(acting: Acting) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    wanted = {"io.max": DeviceLimits({"8:0": {"rbps": 5}, "9:9": {"rbps": 5}})}
    await acting.actuator.apply([acting.target(BE, wanted)])
    assert acting.stood(BE, "io.max") == "refused"
    assert lines(kernel, hierarchy, "v2", BE) == {"8:0 rbps=5 wbps=max riops=max wiops=max"}
