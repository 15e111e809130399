"""The idle class hides a group's weight, and its end resets it: the earlier weight is restored after any end."""

from pathlib import Path

import pytest

from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all
from state.entry import RestoreOutcome
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.actuators.acting import POD, Acting, Stopped

MODES: list[Mode] = ["v1", "v2"]
WEIGHT = {"v1": "cpu.shares", "v2": "cpu.weight"}
LEAST = {"v1": "2", "v2": "1"}
HALF = {"v1": "512", "v2": "20"}


@pytest.fixture
def acting(acting: Acting, mode: Mode) -> Acting:
    """On a BE pod as the kubelet makes it: the least weight."""
    acting.kernel.write(acting.hierarchy.directory("cpu", POD), WEIGHT[mode], LEAST[mode])
    return acting


def values(acting: Acting) -> tuple[str, str]:
    """(cpu.idle, weight) of the pod."""
    kernel, directory = acting.kernel, acting.hierarchy.directory("cpu", POD)
    return kernel.read(directory, "cpu.idle").strip(), kernel.read(directory, WEIGHT[kernel.mode]).strip()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight", [None, 2, 512])
async def test_leaving_the_idle_class_gives_back_the_weight_that_is_wanted_or_was(
    acting: Acting, mode: Mode, weight: int | None
) -> None:
    weights = {} if weight is None else {"cpu.weight": weight}
    await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1, **weights})])
    assert values(acting)[0] == "1"
    count = acting.files.count
    for _ in range(3):
        await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1, **weights})])
    assert acting.files.count == count, "nobody fights for a weight that is not writable"
    assert acting.alerts == []
    await acting.actuator.apply([acting.target(POD, dict(weights))])
    assert values(acting) == ("0", HALF[mode] if weight == 512 else LEAST[mode])
    await acting.actuator.apply([acting.target(POD, {})])
    assert values(acting) == ("0", LEAST[mode])
    await acting.actuator.apply([acting.target(POD, {})])
    assert len(acting.ledger) == 0
    assert acting.alerts == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_weight_wanted_meanwhile_waits(acting: Acting, mode: Mode) -> None:
    await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1})])
    await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1, "cpu.weight": 512})])
    standing = acting.judge.statuses.get((POD, "cpu.weight"))
    assert standing is not None
    assert (standing.state, standing.detail) == ("in place", "takes effect once cpu.idle ends")
    await acting.actuator.apply([acting.target(POD, {"cpu.weight": 512})])
    assert values(acting) == ("0", HALF[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes", [0, 1, 2])
async def test_restore_gives_back_the_weight_after_a_crash_at_any_write(
    acting: Acting, tmp_path: Path, mode: Mode, writes: int
) -> None:
    acting.files.left = writes
    try:
        await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1, "cpu.weight": 512})])
    except* Stopped:
        pass
    acting.close()
    again = Acting(acting.kernel, acting.hierarchy, tmp_path)
    adopt_unjournaled_writes(acting.hierarchy, again.ledger, files=again.files)
    done = await restore_all(acting.hierarchy, again.ledger, again.writer, files=again.files)
    assert values(acting) == ("0", LEAST[mode])
    assert {result.undo for result in done} <= {RestoreOutcome.RESTORED, RestoreOutcome.ALREADY}
    assert len(again.ledger) == 0
    again.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes", [0, 1, 2])
async def test_a_crash_while_leaving_is_made_good_by_the_next_life(
    acting: Acting, tmp_path: Path, mode: Mode, writes: int
) -> None:
    await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1})])
    acting.ledger.flush()
    acting.files.left = acting.files.count + writes
    try:
        await acting.actuator.apply([acting.target(POD, {})])
    except* Stopped:
        pass
    acting.close()
    again = Acting(acting.kernel, acting.hierarchy, tmp_path)
    adopt_unjournaled_writes(acting.hierarchy, again.ledger, files=again.files)
    await again.actuator.apply([again.target(POD, {})])
    assert values(acting) == ("0", LEAST[mode])
    again.close()


@pytest.mark.parametrize("mode", MODES)
async def test_a_level_that_the_kernel_keeps_for_ever_stays_and_is_reported(tmp_path: Path, mode: Mode) -> None:
    kernel = FakeKernel(mode, root=str(tmp_path), distribution="openeuler")
    kernel.install()
    hierarchy = Hierarchy.detect(str(tmp_path))
    kernel.make_group(POD)
    acting = Acting(kernel, hierarchy, tmp_path)
    await acting.actuator.apply([acting.target(POD, {"cpu.qos": -1})])
    for _ in range(3):
        await acting.actuator.apply([acting.target(POD, {})])
    assert acting.alerts == []
    (undone,) = await restore_all(hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert (undone.undo, undone.detail) == (
        RestoreOutcome.REFUSED,
        "one way: the kernel does not allow increasing cpu.qos again: recreate the group",
    )
    assert kernel.read(hierarchy.directory("cpu", POD), "cpu.qos_level") == "-1\n"
    acting.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", ["", "\0", "max max max", "9" * 4300, "0-3", "٣", "1_0"])
async def test_an_unreadable_weight_ends_nothing_and_is_no_original(
    acting: Acting, mode: Mode, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = acting.files.read

    def garbled(directory: str, file: str) -> str:
        return text if file == WEIGHT[mode] else read(directory, file)

    with monkeypatch.context() as patched:
        patched.setattr(acting.files, "read", garbled)
        await acting.actuator.apply([acting.target(POD, {"cpu.idle": 1})])
        await acting.actuator.apply([acting.target(POD, {})])
    assert acting.judge.errors.counts["file", "ValueError"] > 0
    assert not [entry for entry in acting.ledger if entry.file == WEIGHT[mode]]
