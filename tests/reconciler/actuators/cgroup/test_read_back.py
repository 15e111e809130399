"""Where the kernel's file differs from what was written, the file counts: in the status, the ledger and a restore."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgroupfs.codecs import DeviceLimits
from reconciler.actuators.cgroup.restore import restore_all
from state.entry import RestoreOutcome
from tests.fakes.kernel import FakeKernel
from tests.reconciler.actuators.acting import GROUP, POD, UID, Acting, StoppingFiles, make_node

WEIGHT = ("cpu", GROUP, "cpu.shares")


class AlteringFiles(StoppingFiles):
    """A kernel that accepts some texts and keeps others, and that refuses some."""

    def __init__(self, kernel: FakeKernel) -> None:
        super().__init__(kernel)
        self.kept: dict[str, str] = {}
        self.refused: dict[str, int] = {}

    def write(self, directory: str, file: str, text: str) -> None:
        if text in self.refused:
            raise OSError(self.refused[text], "refused", file)
        super().write(directory, file, self.kept.get(text, text))


class Altering(Acting):
    """An actuator on such a kernel."""

    files: AlteringFiles


@pytest.fixture
def altering(tmp_path: Path) -> Iterator[Altering]:
    kernel, hierarchy = make_node(tmp_path)
    acting = Altering(kernel, hierarchy, tmp_path)
    acting.files = acting.writer._files = AlteringFiles(kernel)
    yield acting
    acting.close()


async def test_a_value_that_the_kernel_altered_is_shown_as_it_reads_and_restored(altering: Altering) -> None:
    altering.files.kept = {"500": "400"}
    await altering.actuator.apply([altering.target(GROUP, {"cpu.weight": 500})])
    status = altering.judge.statuses.get((GROUP, "cpu.weight"))
    assert status is not None
    assert (status.state, status.actual) == ("refused", "400")
    assert "accepted, but the value is '400'" in status.detail
    await altering.actuator.apply([altering.target(GROUP, {"cpu.weight": 500})])
    assert altering.judge.foreign_writes.writes == {}, "it is no other program's value"
    await altering.actuator.apply([altering.target(GROUP, {})])
    assert altering.read(GROUP, "cpu.weight") == "2"
    assert altering.ledger.get(WEIGHT) is None


async def test_restore_takes_an_altered_value_for_ours(altering: Altering) -> None:
    altering.files.kept = {"500": "400"}
    await altering.actuator.apply([altering.target(GROUP, {"cpu.weight": 500})])
    (done,) = await restore_all(altering.hierarchy, altering.ledger, altering.writer, files=altering.files)
    assert (done.undo, altering.read(GROUP, "cpu.weight")) == (RestoreOutcome.RESTORED, "2")


async def test_the_disks_limited_before_a_refused_one_are_shown_and_released(altering: Altering) -> None:
    """Each disk is a write: the second one has been unplugged."""
    altering.files.refused = {"8:16 2000000": errno.ENODEV}
    limits = DeviceLimits({"8:0": {"rbps": 1_000_000}, "8:16": {"rbps": 2_000_000}})
    directory, file = altering.hierarchy.directory("blkio", POD), "blkio.throttle.read_bps_device"
    await altering.actuator.apply([altering.target(POD, {"blkio.read_bps": limits})])
    assert altering.kernel.read(directory, file) == "8:0 1000000\n"
    status = altering.judge.statuses.get((POD, "blkio.read_bps"))
    assert status is not None
    assert (status.state, status.actual) == ("refused", "8:0 1000000")
    await altering.actuator.apply([altering.target(POD, {})])
    assert altering.kernel.read(directory, file).strip() == "", "no limit is left that no record has"


async def test_a_refused_correction_is_reported_once_and_names_no_runtime(altering: Altering) -> None:
    """The other writer has exited, as any short command: it may have been the runtime, for a quarter of a second."""
    target = altering.target(GROUP, {"cpu.weight": 3})
    await altering.actuator.apply([target])
    altering.write(GROUP, "cpu.weight", "700")
    await altering.actuator.apply([target])
    assert altering.stood(GROUP, "cpu.weight") == "waiting"
    altering.files.refused = {"3": errno.EROFS}
    states = []
    for _ in range(4):
        # As time passes: the wait for the runtime, then the retries.
        updating = altering.judge.foreign_writes._updating
        altering.judge.foreign_writes._updating = {place: at - 1 for place, at in updating.items()}
        retries = altering.judge.statuses._retries
        for knobs in retries.values():
            knobs |= {knob: retry._replace(at=0.0) for knob, retry in knobs.items()}
        await altering.actuator.apply([target])
        states.append(altering.stood(GROUP, "cpu.weight"))
    assert states == ["refused"] * 4
    assert [kind for kind, _ in altering.alerts] == ["refused"]
    assert altering.judge.foreign_writes.writes == {"unknown": 1}


async def test_a_quota_is_planned_again_where_its_period_is_another_one(altering: Altering) -> None:
    """It reads as wanted, and is another share of a CPU: the plan takes the period from what was read."""
    target = altering.target(POD, {"cpu.quota": 50_000})
    await altering.actuator.apply([target])
    await altering.actuator.apply([target])
    assert altering.judge.due(time.monotonic()) == set()
    altering.kernel.write(altering.hierarchy.directory("cpu", POD), "cpu.cfs_period_us", "50000")
    await altering.actuator.apply([target])
    assert altering.judge.control_files.actual[POD, "cpu.period"] == 50_000
    assert altering.judge.due(time.monotonic()) == {UID}
    await altering.actuator.apply([target])
    assert altering.judge.due(time.monotonic()) == set(), "once"
    altering.kernel.write(altering.hierarchy.directory("cpu", POD), "cpu.cfs_period_us", "100000")
    assert altering.judge.is_settled(target), "each of its files reads as before"
    assert altering.judge.due(time.monotonic()) == {UID}


@pytest.mark.parametrize("what", ["the file", "the directory that identifies its group"])
async def test_a_file_that_is_mounted_over_is_not_called_restored(altering: Altering, what: str) -> None:
    """What would be written and read back is another file; and what identifies the group is another directory's."""
    await altering.actuator.apply([altering.target(GROUP, {"cpu.weight": 500})])
    path = f"{altering.hierarchy.directory('cpu', GROUP)}/cpu.shares"
    if what != "the file":
        path = altering.hierarchy.identity_directory(GROUP)
        assert "cpuset" in path
    table = Path(f"{altering.hierarchy.root}/proc/self/mountinfo")
    text = table.read_text()
    point = path.removeprefix(altering.hierarchy.root)
    table.write_text(f"{text}90 40 8:1 /tmp/fake {point} rw - ext4 /dev/sda1 rw\n")
    (done,) = await restore_all(altering.hierarchy, altering.ledger, altering.writer, files=altering.files)
    assert (done.undo, done.detail) == (
        RestoreOutcome.REFUSED,
        f"something else is mounted over it: umount {path}",
    )
    assert altering.ledger.get(WEIGHT) is not None
    table.write_text(text)
    (done,) = await restore_all(altering.hierarchy, altering.ledger, altering.writer, files=altering.files)
    assert (done.undo, altering.read(GROUP, "cpu.weight")) == (RestoreOutcome.RESTORED, "2")
