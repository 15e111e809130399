"""One pass over a node's groups, from what is wanted to what is recorded: outcomes, order, failures, stops in between.

Longer than other modules because all of it uses one acting node, and a stop is tested against the pass it breaks.
"""

import errno
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all
from reconciler.actuators.mode import WriteSettings
from state.entry import LedgerEntry, RestoreOutcome
from state.model import Hold, RuntimeSpec
from tests.reconciler.actuators.acting import (
    BE,
    CID,
    FILES,
    GROUP,
    POD,
    UID,
    Acting,
    Stopped,
    make_node,
    snapshot,
)

WANTED: dict[str, CpuSet | int | None] = {"cpu.set": CpuSet.parse("2-3"), "cpu.weight": 3, "memory.max": 1 << 30}
SPEC = RuntimeSpec(shares=2)


async def test_what_is_wanted_is_written_read_back_and_remembered(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, WANTED), acting.target(BE, {"cpu.quota": 150_000})])
    assert [acting.read(GROUP, knob) for knob in WANTED] == ["2-3", "3", str(1 << 30)]
    assert acting.read(BE, "cpu.quota") == "150000"
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"written"}
    entry = acting.ledger.get(("cpuset", GROUP, "cpuset.cpus"))
    assert entry is not None
    assert (entry.original, entry.seen, entry.writer) == ("0-3", "2-3", "us")
    assert acting.followed.paths == {GROUP, BE}


async def test_a_second_look_at_a_node_that_is_right_writes_nothing(acting: Acting) -> None:
    target = acting.target(GROUP, WANTED)
    await acting.actuator.apply([target])
    count = acting.files.count
    await acting.actuator.apply([target])
    assert acting.files.count == count
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"in place"}


@pytest.mark.parametrize(
    "given",
    [WriteSettings(enforce=False), WriteSettings(dry_policies=frozenset({"reclaimed"}))],
    ids=["observe mode", "a policy that only practises"],
)
async def test_what_would_be_written_is_said_and_nothing_is_touched(acting: Acting, given: WriteSettings) -> None:
    before = snapshot(acting.kernel, acting.hierarchy)
    acting.mode.use(given)
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"would write"}
    assert snapshot(acting.kernel, acting.hierarchy) == before
    assert (len(acting.ledger), acting.files.count) == (0, 0)


async def test_a_policy_that_becomes_a_dry_run_gives_its_values_back(acting: Acting) -> None:
    """As one that is switched off; what it would write is shown all the same. Others keep theirs."""
    before = snapshot(acting.kernel, acting.hierarchy)
    target = acting.target(GROUP, WANTED)
    await acting.actuator.apply([target])
    acting.mode.use(WriteSettings(dry_policies=frozenset({"another"})))
    await acting.actuator.apply([target])
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"in place"}
    acting.mode.use(WriteSettings(dry_policies=frozenset({"reclaimed"})))
    hold = Hold(target="knob:cpu.set", reason="test", by="me")
    acting.mode.use_holds({hold.target: hold})
    await acting.actuator.apply([target])
    assert [acting.stood(GROUP, knob) for knob in WANTED] == ["in place", "would write", "would write"]
    assert acting.read(GROUP, "cpu.set") == "2-3", "what is held stays"
    acting.mode.use_holds({})
    for _ in range(2):
        await acting.actuator.apply([target])
        assert {acting.stood(GROUP, knob) for knob in WANTED} == {"would write"}
        assert snapshot(acting.kernel, acting.hierarchy) == before
    assert len(acting.ledger) == 0
    count = acting.files.count
    await acting.actuator.apply([target])
    assert acting.files.count == count
    acting.mode.use(WriteSettings())
    await acting.actuator.apply([target])
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"written"}
    acting.mode.use(WriteSettings(enforce=False, dry_policies=frozenset({"reclaimed"})))
    await acting.actuator.apply([target])
    assert [acting.read(GROUP, knob) for knob in WANTED] == ["2-3", "3", str(1 << 30)], "observe mode: values stay"


@pytest.mark.parametrize("how", ["dry run", "hold", "observe mode"])
async def test_what_was_prepared_is_not_written_once_it_may_not_be(acting: Acting, how: str) -> None:
    target = acting.target(GROUP, {"cpu.weight": 3}, creating=SPEC)
    await acting.actuator.apply([target])
    assert acting.stood(GROUP, "cpu.weight") == "prepared"
    hold = Hold(target="node", reason="test", by="me")
    acting.mode.use_holds({"node": hold} if how == "hold" else {})
    dry = frozenset({"reclaimed"}) if how == "dry run" else frozenset()
    acting.mode.use(WriteSettings(enforce=how != "observe mode", dry_policies=dry))
    await acting.actuator.apply([target])
    acting.lane.execute(CID, time.monotonic())
    assert acting.read(GROUP, "cpu.weight") == "2"
    assert acting.files.count == 0


async def test_what_is_no_longer_wanted_gets_its_old_value_back(acting: Acting) -> None:
    before = snapshot(acting.kernel, acting.hierarchy)
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert snapshot(acting.kernel, acting.hierarchy) == before
    assert len(acting.ledger) == 0


async def test_a_held_file_is_left_as_it_is(acting: Acting) -> None:
    acting.mode.use_holds({"knob:cpu.set": Hold(target="knob:cpu.set", reason="test", by="me")})
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert acting.read(GROUP, "cpu.set") == "0-3"
    assert acting.stood(GROUP, "cpu.set") == "held"
    assert acting.read(GROUP, "cpu.weight") == "3"


async def test_a_value_that_the_kernel_refused_leaves_nothing_to_restore(acting: Acting) -> None:
    """Another program has put the group in the idle class: no removal of bypassd may fail because of that."""
    directory = acting.hierarchy.directory("cpu", GROUP)
    acting.files.write(directory, "cpu.idle", "1")
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 500})])
    assert acting.stood(GROUP, "cpu.weight") == "refused"
    acting.files.write(directory, "cpu.idle", "0")
    (done,) = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert (done.undo, done.ok) == (RestoreOutcome.ALREADY, True)


async def test_a_value_that_was_never_written_is_not_ours(acting: Acting) -> None:
    """Wanted under a hold only: a program that writes this very value is another program all the same."""
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 3})])
    hold = Hold(target="knob:cpu.weight", reason="test", by="me")
    acting.mode.use_holds({hold.target: hold})
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 300})])
    acting.write(GROUP, "cpu.weight", "300")
    (done,) = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert (done.undo, acting.read(GROUP, "cpu.weight")) == (RestoreOutcome.FOREIGN, "300")


@pytest.mark.parametrize("ours", [3, 2], ids=["written", "in place before"])
async def test_a_foreign_value_is_corrected_then_waited_for_then_left(acting: Acting, ours: int) -> None:
    acting.names.writer = ("other", "tuned (pid 7)")
    target = acting.target(GROUP, {"cpu.weight": ours})
    await acting.actuator.apply([target])
    states = []
    for text in ("100", "200", "300"):
        acting.write(GROUP, "cpu.weight", text)
        await acting.actuator.apply([target])
        states.append((acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")))
        acting.judge.foreign_writes._rules._files[GROUP, "cpu.weight"].until = 0.0
    assert states == [("written", str(ours)), ("waiting", "200"), ("yielded", "300")]
    assert [kind for kind, _ in acting.alerts] == ["yield"]
    assert "changed 3 times in" in acting.alerts[0][1]
    assert acting.judge.foreign_writes.writes == {"other": 3}


@pytest.mark.parametrize("writer", ["kubelet", "systemd"])
async def test_a_resized_pod_is_restored_to_its_new_value_by_either_driver(acting: Acting, writer: str) -> None:
    await acting.actuator.apply([acting.target(POD, {"cpu.weight": 4})])
    acting.names.writer = (writer, writer)
    acting.write(POD, "cpu.weight", "600")
    await acting.actuator.apply([acting.target(POD, {"cpu.weight": 4})])
    assert acting.read(POD, "cpu.weight") == "4"
    await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert acting.read(POD, "cpu.weight") == "600"


async def test_a_daemon_reload_is_one_event_and_all_files_are_corrected_in_one_pass(acting: Acting) -> None:
    targets = [acting.target(POD, {"cpu.weight": 4}), acting.target(GROUP, {"cpu.weight": 3, "cpu.quota": 20_000})]
    await acting.actuator.apply(targets)
    acting.names.writer = ("systemd", "systemd (pid 1)")
    for reload in range(1, 9):
        acting.judge.foreign_writes._systemd_at -= 60.0
        for path, knob, text in ((POD, "cpu.weight", "2"), (GROUP, "cpu.weight", "2"), (GROUP, "cpu.quota", "-1")):
            acting.write(path, knob, text)
        await acting.actuator.apply(targets)
        assert [acting.read(POD, "cpu.weight"), acting.read(GROUP, "cpu.weight")] == ["4", "3"]
        assert acting.read(GROUP, "cpu.quota") == "20000"
        assert acting.judge.foreign_writes.systemd_events == reload
    assert acting.judge.foreign_writes.writes == {"systemd": 24}
    assert acting.alerts == []


async def test_a_persons_change_is_honoured_at_once(acting: Acting) -> None:
    acting.names.writer = ("person", "bash (pid 9)")
    target = acting.target(GROUP, {"cpu.weight": 3})
    await acting.actuator.apply([target])
    acting.write(GROUP, "cpu.weight", "500")
    await acting.actuator.apply([target])
    assert (acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")) == ("held", "500")
    assert [kind for kind, _ in acting.alerts] == ["hold"]
    assert [(hold.target, hold.by) for hold in acting.mode.holds.values()] == [
        (f"file:{GROUP}:cpu.weight", "bash (pid 9)")
    ]
    # It is a hold like any other: over when it is taken away, though the same value is still there.
    acting.mode.use_holds({})
    await acting.actuator.apply([target])
    assert (acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")) == ("written", "3")


async def test_a_persons_first_change_of_a_value_that_was_in_place_is_a_hold_too(acting: Acting) -> None:
    acting.names.writer = ("person", "bash (pid 9)")
    ours = int(acting.read(GROUP, "cpu.weight"))
    target = acting.target(GROUP, {"cpu.weight": ours})
    await acting.actuator.apply([target])
    assert (acting.stood(GROUP, "cpu.weight"), len(acting.ledger)) == ("in place", 0)
    assert acting.followed.paths == {GROUP}, "its writers are recorded"
    acting.write(GROUP, "cpu.weight", "500")
    await acting.actuator.apply([target])
    assert (acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")) == ("held", "500")
    assert [kind for kind, _ in acting.alerts] == ["hold"]
    acting.write(GROUP, "cpu.weight", "600")
    await acting.actuator.apply([target])
    assert acting.judge.foreign_writes.writes == {"person": 2}
    acting.mode.use_holds({})
    await acting.actuator.apply([target])
    assert (acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")) == ("written", str(ours))
    # It was bypassd's first write: without it the file would have the person's value.
    entry = acting.ledger.get(("cpu", GROUP, "cpu.shares"))
    assert entry is not None
    assert (entry.original, entry.writer) == ("600", "us")


@pytest.mark.parametrize("change", ["wanted", "not wanted", "creating", "observed"])
async def test_a_value_in_place_that_bypassd_no_longer_wants_there_is_no_foreign_one(
    acting: Acting, change: str
) -> None:
    acting.names.writer = ("person", "bash (pid 9)")
    ours = int(acting.read(GROUP, "cpu.weight"))
    creating = RuntimeSpec(shares=ours) if change == "creating" else None
    acting.mode.set_enforce(enforce=change != "observed")
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": ours}, creating=creating)])
    acting.mode.set_enforce(enforce=True)
    if change == "not wanted":
        await acting.actuator.apply([acting.target(GROUP, {})])
    if change != "wanted":
        acting.write(GROUP, "cpu.weight", "500")
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 700})])
    assert (acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")) == ("written", "700")
    assert acting.alerts == []


async def test_a_refused_write_is_told_once_and_tried_again_later(acting: Acting) -> None:
    target = acting.target(GROUP, {"cpu.set": CpuSet.parse("9")})
    await acting.actuator.apply([target])
    await acting.actuator.apply([target])
    state = acting.stood(GROUP, "cpu.set")
    assert state in {"refused", "blocked"}
    assert len(acting.alerts) == 1
    assert acting.judge.next_check() is not None


async def test_without_a_store_nothing_is_touched_for_the_first_time(tmp_path: Path) -> None:
    kernel, hierarchy = make_node(tmp_path)
    before = snapshot(kernel, hierarchy)
    (tmp_path / "store").write_text("not a directory")
    acting = Acting(kernel, hierarchy, tmp_path / "store")
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert snapshot(kernel, hierarchy) == before
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"not recorded"}
    acting.close()


async def test_a_container_in_creation_is_prepared_and_written_at_the_signal(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, WANTED, creating=SPEC)])
    assert acting.read(GROUP, "cpu.set") == "0-3"
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"prepared"}
    assert acting.lane.execute(CID, 0.0)
    assert [acting.read(GROUP, knob) for knob in WANTED] == ["2-3", "3", str(1 << 30)]
    (result,) = acting.results
    assert result.creation
    assert set(result.errnos) == {0}
    await acting.actuator.apply([acting.target(GROUP, WANTED, signalled=True)])
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"in place"}


@pytest.mark.parametrize(
    ("spec", "ahead"),
    [
        (SPEC, {"cpu.set", "cpu.quota", "memory.max"}),
        (RuntimeSpec(shares=2, cpus="0-3", memory_bytes=2 << 30), {"cpu.quota"}),
        # The limit would be above memory with swap as written ahead.
        (RuntimeSpec(shares=2, swap_bytes=2 << 30), {"cpu.set", "cpu.quota"}),
        (RuntimeSpec(shares=2, quota_us=50_000), {"cpu.set", "memory.max"}),
        (RuntimeSpec(shares=2, period_us=100_000), {"cpu.set", "cpu.quota", "memory.max"}),
        # The quota by another period would be another share, perhaps above its parent's.
        (RuntimeSpec(shares=2, period_us=5_000), {"cpu.set", "memory.max"}),
        (RuntimeSpec(), {"cpu.set", "cpu.weight", "cpu.quota", "memory.max"}),
    ],
)
async def test_of_a_long_creation_only_what_the_runtime_does_not_set_is_written_ahead(
    acting: Acting, spec: RuntimeSpec, ahead: set[str]
) -> None:
    wanted = {**WANTED, "cpu.quota": 30_000}
    before = {knob: acting.read(GROUP, knob) for knob in wanted}
    await acting.actuator.apply([acting.target(GROUP, wanted, creating=spec)])
    acting.lane.write_ahead(CID)
    assert {knob for knob in wanted if acting.read(GROUP, knob) != before[knob]} == ahead
    assert acting.lane.execute(CID, 0.0)
    assert {knob for knob in wanted if acting.read(GROUP, knob) != before[knob]} == set(wanted)


async def test_the_runtimes_update_is_undone_by_the_hot_lane(acting: Acting) -> None:
    wanted: dict[str, CpuSet | int | None] = {"cpu.set": CpuSet.parse("2-3")}
    await acting.actuator.apply([acting.target(GROUP, wanted, creating=SPEC)])
    acting.lane.execute(CID, 0.0)
    await acting.actuator.apply([acting.target(GROUP, wanted, signalled=True)])
    acting.write(GROUP, "cpu.set", "0-3")
    acting.lane.execute(CID, 1.0)
    assert acting.read(GROUP, "cpu.set") == "2-3"
    assert [result.creation for result in acting.results] == [True, False]


async def test_a_signal_amid_a_look_writes_nothing_that_the_look_has_given_up(acting: Acting) -> None:
    """An update whose rename falls between the look at the container and the end of the round."""
    wanted: dict[str, CpuSet | int | None] = {"cpu.set": CpuSet.parse("2-3"), "cpu.weight": 3}
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    acting.write(GROUP, "cpu.set", "0-3")  # the runtime has written, its rename is on the way
    record = acting.files.write

    def write(directory: str, file: str, text: str) -> None:
        acting.files.write = record  # type: ignore[method-assign]
        acting.lane.execute(CID, 1.0)
        record(directory, file, text)

    acting.files.write = write  # type: ignore[method-assign]
    kept: dict[str, CpuSet | int | None] = {"cpu.weight": 3}
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 200_000}), acting.target(GROUP, kept)])
    assert [[write.file for write in result.writes] for result in acting.results] == [["cpu.shares"]]
    assert (acting.read(GROUP, "cpu.set"), acting.read(GROUP, "cpu.weight")) == ("0-3", "3")
    assert [entry.knob for entry in acting.ledger.group(GROUP)] == ["cpu.weight"]


async def test_an_update_moves_what_is_restored_to(acting: Acting) -> None:
    wanted: dict[str, CpuSet | int | None] = {"cpu.set": CpuSet.parse("2-3")}
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    acting.actuator.rebase(acting.target(GROUP, wanted, creating=RuntimeSpec(cpus="1-3")))
    (done,) = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert done.undo is RestoreOutcome.RESTORED
    assert acting.read(GROUP, "cpu.set") == "1-3"
    acting.close()


LIVES: list[dict[str, dict[str, CpuSet | int | None]]] = [
    {
        GROUP: {"cpu.set": CpuSet.parse("2-3"), "cpu.weight": 3, "cpu.quota": 50_000},
        BE: {"cpu.quota": 200_000},
    },
    {GROUP: {"cpu.set": CpuSet.parse("1-2"), "cpu.weight": 3, "memory.max": 1 << 28}, BE: {"cpu.quota": 90_000}},
    {GROUP: {"cpu.set": CpuSet.parse("0")}, POD: {"cpu.weight": 7}, BE: {"cpu.quota": 20_000}},
]


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("converge", [True, False])
async def test_killed_at_any_write_the_tree_can_be_brought_back(tmp_path: Path, flush: bool, converge: bool) -> None:
    """SIGKILL after each write in turn, through three plans; then (or after converging) restore, byte for byte."""
    stopped_at = 0
    while True:
        directory = tmp_path / f"at-{stopped_at}"
        directory.mkdir()
        kernel, hierarchy = make_node(directory)
        before = snapshot(kernel, hierarchy)
        acting = Acting(kernel, hierarchy, directory, writes=stopped_at)
        ended = True
        try:
            for life in LIVES:
                await acting.actuator.apply([acting.target(path, wanted) for path, wanted in life.items()])
                if flush:
                    acting.ledger.flush()
        except Stopped:
            ended = False
        # No close, no flush: what the store has is what a killed process leaves.
        after = Acting(kernel, hierarchy, directory)
        adopt_unjournaled_writes(hierarchy, after.ledger, files=after.files)
        if converge:
            last = LIVES[-1]
            paths = dict.fromkeys([*last, GROUP, POD, BE])
            targets = [after.target(path, last.get(path, {})) for path in paths]
            await after.actuator.apply(targets)
            await after.actuator.apply(targets)
            assert after.read(GROUP, "cpu.set") == "0"
            assert after.read(BE, "cpu.quota") == "20000"
        done = await restore_all(hierarchy, after.ledger, after.writer, files=after.files)
        assert [result for result in done if not result.ok] == []
        assert snapshot(kernel, hierarchy) == before, f"stopped after {stopped_at} writes"
        assert len(after.ledger) == 0
        after.close()
        acting.close()
        if ended:
            break
        stopped_at += 1
    assert stopped_at > 6


async def test_restore_leaves_what_somebody_else_changed_and_says_so(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 3, "cpu.set": CpuSet.parse("1")})])
    acting.write(GROUP, "cpu.weight", "77")
    done = {
        result.file: result
        for result in await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    }
    assert done["cpu.shares"].undo is RestoreOutcome.FOREIGN
    assert done["cpuset.cpus"].undo is RestoreOutcome.RESTORED
    assert acting.read(GROUP, "cpu.weight") == "77"


async def test_restore_of_a_group_that_was_made_anew_touches_nothing(acting: Acting) -> None:
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 3})])
    acting.kernel.remove_group(GROUP)
    acting.kernel.make_group(GROUP)
    (done,) = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert done.undo is RestoreOutcome.GONE
    assert acting.read(GROUP, "cpu.weight") == "1024"


async def test_a_runtime_in_the_middle_of_its_update_is_left_to_finish_it(acting: Acting) -> None:
    """runc reads the shares back after writing them: the file must have its own value then."""
    acting.names.writer = ("runtime", "runc (pid 5)")
    wanted: dict[str, CpuSet | int | None] = {"cpu.weight": 3}
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    acting.write(GROUP, "cpu.weight", "256")
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    assert (acting.read(GROUP, "cpu.weight"), acting.stood(GROUP, "cpu.weight")) == ("256", "waiting")
    assert acting.judge.next_check() is not None
    await acting.actuator.apply([acting.target(GROUP, wanted, signalled=True)])
    assert acting.read(GROUP, "cpu.weight") == "3"
    assert not acting.judge.foreign_writes.is_waiting((GROUP, "cpu.weight"), time.monotonic())


async def test_an_update_without_an_event_is_corrected_and_is_the_value_to_restore(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """crun's update: neither an event nor a record of its values follows."""
    monkeypatch.setattr("reconciler.actuators.cgroup.conflict._UPDATE_S", 0.0)
    acting.names.writer = ("runtime", "crun (pid 5)")
    wanted: dict[str, CpuSet | int | None] = {"cpu.weight": 3}
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    acting.write(GROUP, "cpu.weight", "256")
    await acting.actuator.apply([acting.target(GROUP, wanted)])
    assert acting.read(GROUP, "cpu.weight") == "3"
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert acting.read(GROUP, "cpu.weight") == "256"


async def test_nothing_is_given_back_over_what_its_owner_wrote_meanwhile(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the write another file's original is made durable, which takes a disk's time."""
    await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 3})])
    record = acting.ledger.first_touches

    def slowly(entries: Sequence[LedgerEntry]) -> None:
        acting.write(GROUP, "cpu.weight", "256")
        record(entries)

    monkeypatch.setattr(acting.ledger, "first_touches", slowly)
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2-3")})])
    assert (acting.read(GROUP, "cpu.set"), acting.read(GROUP, "cpu.weight")) == ("2-3", "256")
    assert acting.actuator.writes["cpu.weight", "changed"] == 1
    due = acting.judge.next_check()
    assert due is not None
    assert acting.judge.due(due) == {UID}
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2-3")})])
    assert acting.read(GROUP, "cpu.weight") == "256"
    assert acting.ledger.get(("cpu", GROUP, "cpu.shares")) is None, "it is theirs again"
    assert acting.alerts == []


@pytest.mark.parametrize(
    ("late", "spec", "left"), [(False, "1", "1"), (False, "0-3", "0-3"), (False, "", "0-3"), (True, "1", "0-3")]
)
async def test_what_was_given_back_while_the_runtime_wrote_is_put_right_at_its_signal(
    acting: Acting, late: bool, spec: str, left: str
) -> None:
    """The kubelet gives the very CPU that was there as ours: its value equals ours until the signal."""
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("1")})])
    acting.write(GROUP, "cpu.set", "1")  # the runtime's, for the kubelet
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert acting.read(GROUP, "cpu.set") == "0-3"
    assert GROUP in acting.judge.recent_releases
    if late:
        given = acting.judge.recent_releases._files
        given.update({place: (at - 10.0, after) for place, (at, after) in given.items()})
        assert GROUP not in acting.judge.recent_releases, "nobody looks at the group for ever"
    update = acting.target(GROUP, {}, signalled=True)
    assert update.container is not None
    update = replace(update, container=replace(update.container, spec=RuntimeSpec(shares=2, cpus=spec)))
    for _ in range(2):
        await acting.actuator.apply([update])
        assert acting.read(GROUP, "cpu.set") == left
    assert acting.ledger.get(("cpuset", GROUP, "cpuset.cpus")) is None
    assert GROUP not in acting.judge.recent_releases or left == "1"


async def test_each_update_of_the_runtime_is_waited_for_anew(acting: Acting) -> None:
    """Also where the one before was answered between two readings, so that none found anything to correct."""
    acting.names.writer = ("runtime", "runc (pid 5)")
    target = acting.target(GROUP, {"cpu.weight": 3})
    await acting.actuator.apply([target])
    for _ in range(2):
        acting.write(GROUP, "cpu.weight", "256")
        await acting.actuator.apply([target])
        assert (acting.read(GROUP, "cpu.weight"), acting.stood(GROUP, "cpu.weight")) == ("256", "waiting")
        acting.write(GROUP, "cpu.weight", "3")
        await acting.actuator.apply([acting.target(GROUP, {"cpu.weight": 3}, signalled=True)])
        assert acting.stood(GROUP, "cpu.weight") == "in place"
        for place in acting.judge.foreign_writes._updating:
            acting.judge.foreign_writes._updating[place] -= 1.0


@pytest.mark.parametrize("writer", [("unknown", ""), None, ("runtime", "crun (pid 5)")])
async def test_a_writer_that_may_be_a_runtime_without_a_signal_is_waited_for_a_moment_only(
    acting: Acting, writer: tuple[str, str] | None
) -> None:
    acting.names.writer = writer
    target = acting.target(GROUP, {"cpu.weight": 3})
    await acting.actuator.apply([target])
    acting.write(GROUP, "cpu.weight", "256")
    await acting.actuator.apply([target])
    assert (acting.read(GROUP, "cpu.weight"), acting.stood(GROUP, "cpu.weight")) == ("256", "waiting")
    until = acting.judge.next_check()
    assert until is not None
    assert acting.judge.due(until - 0.2) == set(), "no look follows on the other meanwhile"
    assert acting.judge.due(until) == {UID}
    acting.judge.foreign_writes._updating[GROUP, "cpu.weight"] -= 1.0
    await acting.actuator.apply([target])
    assert acting.read(GROUP, "cpu.weight") == "3"


@pytest.mark.parametrize(("writer", "writes"), [(("runtime", "runc (pid 5)"), 1), (("other", "tuned (pid 7)"), 2)])
async def test_a_wait_for_another_writer_ends_with_its_group(
    acting: Acting, writer: tuple[str, str], writes: int
) -> None:
    acting.names.writer = writer
    target = acting.target(GROUP, {"cpu.weight": 3})
    await acting.actuator.apply([target])
    for _ in range(writes):
        acting.write(GROUP, "cpu.weight", "256")
        await acting.actuator.apply([target])
    waits = acting.judge.foreign_writes.is_waiting
    assert waits((GROUP, "cpu.weight"), time.monotonic())
    acting.judge.forget(POD)
    assert waits((GROUP, "cpu.weight"), time.monotonic())
    acting.judge.forget(GROUP)
    assert not waits((GROUP, "cpu.weight"), time.monotonic())


@pytest.mark.parametrize("how", ["hold", "policy off", "dry run", "observe mode"])
async def test_a_wait_for_the_runtime_ends_with_what_waits(acting: Acting, how: str) -> None:
    """The runtime's next update is waited for anew: runc fails it if its value is replaced before it reads it back."""
    acting.names.writer = ("runtime", "runc (pid 5)")
    target = acting.target(GROUP, {"cpu.weight": 3})
    await acting.actuator.apply([target])
    acting.write(GROUP, "cpu.weight", "256")
    await acting.actuator.apply([target])
    assert acting.stood(GROUP, "cpu.weight") == "waiting"
    hold = Hold(target="node", reason="test", by="me")
    acting.mode.use_holds({"node": hold} if how == "hold" else {})
    dry = frozenset({"reclaimed"}) if how == "dry run" else frozenset()
    acting.mode.use(WriteSettings(enforce=how != "observe mode", dry_policies=dry))
    await acting.actuator.apply([acting.target(GROUP, {}) if how == "policy off" else target])
    assert not acting.judge.foreign_writes.is_waiting((GROUP, "cpu.weight"), time.monotonic())


async def test_a_parent_that_was_seen_too_early_does_not_bar_its_children(acting: Acting) -> None:
    pod = GROUP.rpartition("/")[0]
    # Read between its mkdir and the kubelet's first write.
    acting.judge.control_files.actual[pod, "cpu.set"] = CpuSet()
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert acting.stood(GROUP, "cpu.set") == "written"
    # Known once, changed since by another program: read again before it counts.
    acting.judge.control_files.actual[pod, "cpu.set"] = CpuSet.parse("3")
    wider = acting.target(GROUP, {**WANTED, "cpu.set": CpuSet.parse("0-1")})
    await acting.actuator.apply([wider])
    assert (acting.stood(GROUP, "cpu.set"), acting.read(GROUP, "cpu.set")) == ("written", "0-1")


@pytest.mark.parametrize(
    "code", [errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.EACCES, errno.EOPNOTSUPP, errno.EIO, errno.ESTALE]
)
@pytest.mark.parametrize("knob", [*WANTED])
async def test_a_file_that_cannot_be_read_is_alone_with_it(
    acting: Acting, monkeypatch: pytest.MonkeyPatch, code: int, knob: str
) -> None:
    file, real = FILES[knob][1], acting.kernel.read

    def read(directory: str, name: str) -> str:
        if name == file and str(directory).endswith(CID):
            raise OSError(code, "refused", name)
        return real(directory, name)

    monkeypatch.setattr(acting.kernel, "read", read)
    await acting.actuator.apply([acting.target(GROUP, WANTED), acting.target(BE, {"cpu.quota": 150_000})])
    stood = {name: acting.stood(GROUP, name) for name in WANTED}
    assert stood == dict.fromkeys(WANTED, "written") | {knob: "unreadable"}
    assert acting.read(BE, "cpu.quota") == "150000"
    # Said once, tried again after a growing while.
    waits = []
    for _ in range(3):
        at = acting.judge.next_check()
        assert at is not None
        waits.append(round(at - time.monotonic()))
        assert acting.judge.due(at) == {UID}
        await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert waits == [1, 2, 4]
    assert [kind for kind, _ in acting.alerts] == ["unreadable"]
    assert acting.judge.errors.counts["file", errno.errorcode[code]] == 4
    monkeypatch.setattr(acting.kernel, "read", real)
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert {acting.stood(GROUP, name) for name in WANTED} == {"in place", "written"}
    assert acting.judge.next_check() is None


async def test_what_a_file_had_before_it_could_not_be_read_is_no_known_value(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = acting.kernel.read

    def read(directory: str, name: str) -> str:
        if name == "cpu.shares":
            raise OSError(errno.EIO, "refused", name)
        return real(directory, name)

    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    known = acting.judge.control_files.actual
    assert known[GROUP, "cpu.weight"] == 3
    monkeypatch.setattr(acting.kernel, "read", read)
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert (GROUP, "cpu.weight") not in known
    assert (GROUP, "cpu.set") in known


async def test_a_group_that_only_seemed_gone_is_looked_at_again(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = acting.kernel.read

    def read(directory: str, name: str) -> str:
        raise OSError(errno.ENODEV, "gone", name)

    monkeypatch.setattr(acting.kernel, "read", read)
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    at = acting.judge.next_check()
    assert at is not None
    assert acting.judge.due(at) == {UID}
    assert acting.alerts == []
    monkeypatch.setattr(acting.kernel, "read", real)
    await acting.actuator.apply([acting.target(GROUP, WANTED)])
    assert {acting.stood(GROUP, knob) for knob in WANTED} == {"written"}
    assert acting.judge.next_check() is None
