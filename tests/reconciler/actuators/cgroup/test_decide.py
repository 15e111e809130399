"""What is due for one file, and when a group needs no comparison at all."""

from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from reconciler.actuators.cgroup.compare import FileAction, GroupTarget
from state.entry import FileKey
from state.model import Hold, RuntimeSpec
from tests.reconciler.actuators.acting import BE, GROUP, POD, Acting

WEIGHT: FileKey = ("cpu", GROUP, "cpu.shares")
SPEC = RuntimeSpec(shares=2)
IN_PLACE: Mapping[str, Value] = {"cpu.weight": 3, "cpu.set": CpuSet.parse("2-3")}


@pytest.mark.parametrize(
    ("before", "foreign", "wanted", "spec", "due", "state", "recorded"),
    [
        (None, None, 3, None, (FileAction.FIRST, "2", "3"), None, False),
        (None, None, 2, None, None, "in place", False),
        (3, None, 5, None, (FileAction.CHANGE, "3", "5"), "written", True),
        (3, None, 3, None, None, "in place", True),
        (3, "7", 5, None, (FileAction.FOREIGN, "7", "5"), "written", True),
        (3, "5", 5, None, None, "in place", True),
        (3, None, None, None, (FileAction.RELEASE, "3", "2"), None, True),
        (3, "7", None, None, None, None, False),
        (3, "2", None, None, None, None, False),
        # Before the runtime has written, its spec counts and not the file; nothing is released then.
        (None, None, 3, SPEC, (FileAction.FIRST, "2", "3"), None, False),
        (None, "7", 2, SPEC, None, "in place", False),
        (3, None, 5, SPEC, (FileAction.CHANGE, "2", "5"), "written", True),
        (3, "7", 2, SPEC, None, "in place", True),
        (3, None, None, SPEC, None, None, True),
    ],
)
async def test_the_write_that_is_due(
    acting: Acting,
    before: int | None,
    foreign: str | None,
    wanted: int | None,
    spec: RuntimeSpec | None,
    due: tuple[FileAction, str, str] | None,
    state: str | None,
    recorded: bool,
) -> None:
    acting.names.writer = ("systemd", "systemd (pid 1)")
    if before is not None:
        await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": before})])
    if foreign is not None:
        acting.write(GROUP, "cpu.weight", foreign)
    settings: dict[str, Value] = {} if wanted is None else {"cpu.weight": wanted}
    writes = acting.judge.detect(acting.target(GROUP, settings, creating=spec))
    assert [(write.action, write.actual, write.text) for write in writes] == ([] if due is None else [due])
    assert acting.stood(GROUP, "cpu.weight") == state
    assert (acting.ledger.get(WEIGHT) is not None) is recorded


async def test_a_release_is_put_right_at_the_runtimes_signal_alone_and_not_over_a_new_setting(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("1")})])
    await acting.actuator.apply([acting.target(GROUP, {})])

    def update(settings: Mapping[str, Value], *, signalled: bool) -> GroupTarget:
        target = acting.target(GROUP, settings, signalled=signalled)
        assert target.container is not None
        return replace(target, container=replace(target.container, spec=RuntimeSpec(shares=2, cpus="1")))

    await acting.actuator.apply([update({}, signalled=False)])
    assert (acting.read(GROUP, "cpu.set"), GROUP in acting.judge.recent_releases) == ("0-3", True)
    writes = acting.judge.detect(update({"cpu.set": CpuSet.parse("2-3")}, signalled=True))
    assert [(write.action, write.text) for write in writes] == [(FileAction.FIRST, "2-3")]
    assert GROUP not in acting.judge.recent_releases


def _foreign(acting: Acting, target: GroupTarget) -> GroupTarget:
    acting.write(GROUP, "cpu.weight", "500")
    return target


def _yielded(acting: Acting, target: GroupTarget) -> GroupTarget:
    acting.ledger.set_yielded(WEIGHT, yielded=True, reason="test")
    return target


def _held(acting: Acting, target: GroupTarget) -> GroupTarget:
    target = acting.target(GROUP, {"cpu.weight": 5})
    acting.mode.use_holds({"knob:cpu.weight": Hold(target="knob:cpu.weight", reason="test", by="me")})
    acting.judge.detect(target)
    return target


def _wanted(more: Mapping[str, Value], *, compared: bool) -> Callable[[Acting, GroupTarget], GroupTarget]:
    def change(acting: Acting, target: GroupTarget) -> GroupTarget:
        added = acting.target(GROUP, more).settings
        target = replace(target, settings={**target.settings, **added})
        if compared:
            acting.judge.detect(target)
        return target

    return change


@pytest.mark.parametrize(
    "change",
    [
        _foreign,
        _yielded,
        _held,
        _wanted({"cpu.weight": 3}, compared=False),
        _wanted({"cpu.quota": 50_000}, compared=False),
        _wanted({"cpu.set": CpuSet.parse("9")}, compared=True),
        _wanted({"memory.max": None}, compared=True),
        lambda acting, target: replace(target, settings={"cpu.weight": target.settings["cpu.weight"]}),
    ],
    ids=["foreign", "yielded", "held", "other", "more", "impossible", "of other files", "fewer"],
)
async def test_a_group_is_compared_again_after_every_change(
    acting: Acting, change: Callable[[Acting, GroupTarget], GroupTarget]
) -> None:
    target = acting.target(GROUP, IN_PLACE)
    for _ in range(2):
        await acting.actuator.apply([target])
    assert acting.judge.is_settled(target)
    assert not acting.judge.is_settled(change(acting, target))


async def test_a_group_whose_original_was_just_restored_is_compared_again(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, IN_PLACE)])
    released = acting.target(GROUP, {"cpu.weight": 3})
    for _ in range(2):
        await acting.actuator.apply([released])
    assert not acting.judge.is_settled(released)
    acting.judge.recent_releases.forget(GROUP)
    assert acting.judge.is_settled(released)


async def test_in_observe_mode_a_group_that_would_be_written_is_settled(acting: Acting) -> None:
    acting.mode.set_enforce(enforce=False)
    target = acting.target(GROUP, IN_PLACE)
    await acting.actuator.apply([target])
    assert acting.judge.is_settled(target)


async def test_values_without_a_record_are_those_that_neither_kubelet_nor_runtime_leaves(acting: Acting) -> None:
    for path in (BE, GROUP):
        acting.write(path, "cpu.quota", "50000")
    knobs = ("cpu.weight", "cpu.quota", "memory.max")
    found = {
        path: [(write.place[1], write.actual, write.text) for write in acting.judge.unrecorded_values(target, knobs)]
        for path in (BE, POD, GROUP)
        if (target := acting.target(path, {}))
    }
    # The pod's group has the kernel's 1024, which the kubelet lowers to 2.
    assert found == {
        BE: [("cpu.quota", "50000", "-1")],
        POD: [("cpu.weight", "1024", "2")],
        GROUP: [("cpu.quota", "50000", "-1")],
    }
    await acting.actuator.apply([acting.target(GROUP, {"cpu.quota": 20_000})])
    assert acting.judge.unrecorded_values(acting.target(GROUP, {}), knobs) == [], "it has its record"


@pytest.mark.parametrize("mode", ["v2"])
async def test_the_idle_class_and_the_weight_that_it_hides_are_one_value_without_a_record(acting: Acting) -> None:
    kernel, directory = acting.kernel, acting.hierarchy.directory("cpu", POD)
    kernel.write(directory, "cpu.weight", "1")
    assert acting.judge.unrecorded_values(acting.target(POD, {}), ("cpu.idle", "cpu.weight")) == []
    kernel.write(directory, "cpu.idle", "1")
    found = acting.judge.unrecorded_values(acting.target(POD, {}), ("cpu.idle", "cpu.weight"))
    # The end of the class leaves the kernel's weight of 100, which is not the kubelet's.
    assert [(write.place[1], write.text) for write in found] == [("cpu.idle", "0"), ("cpu.weight", "1")]


async def test_the_value_before_the_agent_is_the_original_while_the_last_write_is_ours(acting: Acting) -> None:
    before = acting.judge.value_before_agent
    assert before(GROUP, "cpu.quota") is None, "not read yet"
    acting.write(GROUP, "cpu.quota", "70000")
    acting.names.writer = ("other", "tuned (pid 7)")
    seen = []
    for text in (None, "60000", "50000"):
        if text is not None:
            acting.write(GROUP, "cpu.quota", text)
        await acting.actuator.apply([acting.target(GROUP, {"cpu.quota": 20_000})])
        seen.append((acting.read(GROUP, "cpu.quota"), before(GROUP, "cpu.quota")))
    # Written again at once the first time; the second time the other program is waited for, and its value counts.
    assert seen == [("20000", 70_000), ("20000", 70_000), ("50000", 50_000)]
