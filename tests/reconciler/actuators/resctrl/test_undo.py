"""All changes of resctrl are undone: by the policy switched off, by a restore, after a kill, and of one pod alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.errors import CgroupDeniedError, StoreError
from reconciler.actuators.codec import read_rows
from reconciler.actuators.resctrl.undo import CODEC, ResctrlState, restore_resctrl, undo_default
from reconciler.policies.cache import CachePolicyConfig
from resctrl.capability import Capability, ResctrlStatus
from state.cache import ClassShare, MountOption
from state.entry import RestoreOutcome
from state.kinds import RESCTRL
from state.ledger import Ledger
from state.store import Store, StoreBatch
from tests.fakes.constants import varied
from tests.reconciler.actuators.resctrl_world import BATCH, BE, CRUNCH, MOUNT, NO_MONITOR, SYSTEM, WEB, World
from tests.resctrl.machines import INTEL_L3, ready
from tests.resctrl.stub import Stub


class Killed(BaseException):
    """The agent ends here, with nothing after it."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_the_policy_switched_off_is_undone(world: World) -> None:
    batch = world.spawn(BATCH)
    before = world.state()
    await world.sweep(BATCH)
    world.config = CachePolicyConfig()
    await world.sweep(BATCH)
    assert world.state() == before
    assert world.places(batch) == [MOUNT]
    deeds = len(world.model.deeds)
    await world.sweep(BATCH)
    assert world.model.deeds[deeds:] == []


async def test_an_agent_that_was_off_when_it_started_undoes_what_is_left(world: World) -> None:
    world.spawn(BATCH)
    before = world.state()
    await world.sweep(BATCH)
    world.config = CachePolicyConfig()
    world.start()
    await world.sweep(BATCH)
    assert world.state() == before


async def test_restore_brings_everything_back_and_twice_does_nothing(world: World) -> None:
    world.config = SYSTEM
    world.model.write(MOUNT, "schemata", "MB:0=80\nL3:1=7ff\n")
    world.spawn(BATCH, 3)
    world.spawn(WEB, 2)
    before = world.state()
    await world.sweep(BATCH, WEB)
    assert "L3:0=ff0;1=ff0" in world.model.read(MOUNT, "schemata")
    done = await world.side.restore()
    assert all(result.ok for result in done)
    assert {result.file for result in done} == {"group", "schemata"}
    assert world.state() == before
    assert read_rows(Ledger(world.store), CODEC) == ResctrlState()
    assert await world.side.restore() == []


class Killing:
    """Ends the agent before its ``step``-th act on resctrl, the mount table or the store."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch, step: int) -> None:
        self.acts = 0
        self._step = step
        world.model.before = lambda deed: self.act(deed.what)
        world.before = self.act
        apply = Store.apply

        def applied(store: Store, batch: StoreBatch) -> None:
            self.act("store")
            apply(store, batch)
            self.act("stored")

        patch.setattr(Store, "apply", applied)

    def act(self, what: str) -> None:
        if self.acts == self._step:
            raise Killed(what)
        self.acts += 1


@pytest.mark.parametrize("mount", [False, True], ids=["another's mount", "our own mount"])
async def test_restore_after_a_kill_at_any_step_and_of_the_restore_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: bool
) -> None:
    step, died = 0, Counter[str]()
    while True:
        path = tmp_path / str(step)
        world = World(path)
        world.config = replace(SYSTEM, mount=mount)
        if mount:
            world.model.umount()
        world.spawn(BATCH, 2)
        world.spawn(WEB)
        before = None if mount else world.state()
        with monkeypatch.context() as patched:
            try:
                Killing(world, patched, step)
                await world.sweep(BATCH, WEB)
                died["nothing"] += 1
            except Killed as exc:
                died[str(exc)] += 1
        world.store.close()
        for attempt in range(100):
            store = Store(str(path / "state.db"), boot="boot-1")
            with monkeypatch.context() as patched:
                try:
                    # Each attempt gets one act further than the last.
                    Killing(world, patched, attempt)
                    done = restore_resctrl(
                        "/", Ledger(store), None, files=world.model, capability=world.capability(), mounter=world
                    )
                except Killed:
                    continue
                finally:
                    store.close()
            break
        assert all(result.ok for result in done), (step, done)
        assert (world.model.mountinfo() == "") == mount, step
        assert before is None or world.state() == before, step
        store = Store(str(path / "state.db"), boot="boot-1")
        assert read_rows(Ledger(store), CODEC) == ResctrlState(), step
        store.close()
        if died["nothing"]:
            break
        step += 1
    assert step > 15
    assert died["mounted"] == mount


async def test_a_mount_that_somebody_makes_after_a_kill_before_ours_is_theirs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.model.umount()
    world.config = replace(NO_MONITOR, mount=True)
    with monkeypatch.context() as patched:
        patched.setattr(world, "mount", killed)
        with pytest.raises(Killed):
            await world.sweep(BATCH)
    assert read_rows(Ledger(world.store), CODEC).place == MOUNT
    world.model.mount()
    done = restore_resctrl(
        "/", Ledger(world.store), None, files=world.model, capability=world.capability(), mounter=world
    )
    assert done == []
    assert world.model.mountinfo() != ""
    assert read_rows(Ledger(world.store), CODEC) == ResctrlState()


def killed(*_: object) -> None:
    raise Killed


async def test_what_is_remembered_outlives_a_mount_that_cannot_be_seen(world: World) -> None:
    world.config = SYSTEM
    await world.sweep(BATCH)
    kept = read_rows(Ledger(world.store), CODEC)
    assert kept.original is not None
    lost = Capability(status=ResctrlStatus.NOT_MOUNTED, reason="another mount namespace")
    world.hidden = True
    assert restore_resctrl("/", Ledger(world.store), None, files=world.model, capability=lost, mounter=world) == []
    assert read_rows(Ledger(world.store), CODEC) == kept
    world.hidden = False
    assert restore_resctrl("/", Ledger(world.store), None, files=world.model, capability=lost, mounter=world) == []
    assert read_rows(Ledger(world.store), CODEC) == ResctrlState()


async def test_the_store_says_that_there_is_something_before_there_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its row alone the next start knows that groups of ours may be there."""
    rows: list[bool] = []
    world.spawn(BATCH)
    world.model.before = lambda _: rows.append(read_rows(Ledger(world.store), CODEC).groups)
    await world.sweep(BATCH)
    assert rows
    assert all(rows)
    await world.side.restore()
    assert read_rows(Ledger(world.store), CODEC) == ResctrlState()


async def test_the_default_groups_values_that_somebody_changed_since_are_left(world: World) -> None:
    world.config = SYSTEM
    await world.sweep()
    world.model.write(MOUNT, "schemata", "L3:0=3f;1=3f\n")
    done = {result.file: result for result in await world.side.restore()}
    assert done["schemata"].undo is RestoreOutcome.FOREIGN
    assert "L3:0=03f;1=03f" in world.model.read(MOUNT, "schemata")
    assert read_rows(Ledger(world.store), CODEC).original is None, "there is nothing left to restore"


def test_a_cache_whose_cpus_are_offline_is_no_change_by_another_program() -> None:
    """The kernel leaves it out of the file, and has its own value when a CPU of it is back."""
    files = Stub({"schemata": "L3:0=0f0\n", "info/last_cmd_status": "ok\n"})
    capability = ready(replace(INTEL_L3, domains=(0,)), root="/r")
    recorded = ResctrlState(original={"L3": {0: 0xFFF, 1: 0xFFF}}, written=({"L3": {0: 0xF0, 1: 0xF0}},))
    done = undo_default(files, capability, recorded)
    assert done is not None
    assert (done.undo, done.text) == (RestoreOutcome.RESTORED, "L3:0=fff")
    assert files.texts["/r/schemata"].strip() == "L3:0=fff"
    again = undo_default(files, capability, recorded)
    assert again is not None
    assert again.undo is RestoreOutcome.ALREADY


async def test_a_default_group_that_is_no_longer_wanted_different_is_put_back(world: World) -> None:
    before = world.model.read(MOUNT, "schemata")
    world.config = SYSTEM
    await world.sweep()
    world.config = CachePolicyConfig(enabled=True)
    await world.sweep()
    assert world.model.read(MOUNT, "schemata") == before
    assert read_rows(Ledger(world.store), CODEC).original is None


async def test_what_somebody_has_given_the_default_group_since_is_its_own_from_then_on(world: World) -> None:
    world.config = SYSTEM
    await world.sweep()
    world.model.write(MOUNT, "schemata", "L3:0=3f;1=3f\n")
    world.config = CachePolicyConfig(enabled=True)
    await world.sweep()
    assert "L3:0=03f;1=03f" in world.model.read(MOUNT, "schemata")
    world.config = SYSTEM
    await world.sweep()
    assert "L3:0=03f;1=03f" not in world.model.read(MOUNT, "schemata")
    assert all(result.ok for result in await world.side.restore())
    assert "L3:0=03f;1=03f" in world.model.read(MOUNT, "schemata")


async def test_every_value_that_the_default_group_was_given_is_known_as_ours(world: World) -> None:
    before = world.model.read(MOUNT, "schemata")
    for percent in (30, 50):
        world.config = varied(SYSTEM, system=ClassShare(cat_range_start_percent=percent))
        await world.sweep()
    done = {result.file: result.undo for result in await world.side.restore()}
    assert (done["schemata"], world.model.read(MOUNT, "schemata")) == (RestoreOutcome.RESTORED, before)


async def test_one_pod_is_freed_alone(world: World) -> None:
    batch, crunch = world.spawn(BATCH, 2), world.spawn(CRUNCH)
    await world.sweep(BATCH, CRUNCH)
    world.boxes.pids["/cpuset/kubepods"] = []
    done = await world.side.restore("batch")
    assert all(result.ok for result in done)
    assert {result.file for result in done} == {"tasks", "mon_group"}
    assert world.places(batch) == [MOUNT] * 2
    assert world.places(crunch)[0].startswith(BE)


async def test_nothing_is_done_between_a_restore_and_the_next_look(world: World) -> None:
    world.spawn(BATCH)
    await world.sweep(BATCH)
    await world.side.restore()
    deeds = len(world.model.deeds)
    await world.side.sweep()
    assert world.model.deeds[deeds:] == []


async def test_without_a_record_nothing_is_touched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Ledger, "record", full)
    world.config = SYSTEM
    await world.sweep(BATCH)
    assert world.model.deeds == []
    assert world.side.problems() == [
        "resctrl is unmanaged: its state cannot be recorded: the disk is full",
    ]


async def test_a_mount_of_ours_comes_and_goes_and_one_of_others_stays(world: World) -> None:
    world.model.umount()
    world.config = replace(NO_MONITOR, mount=True)
    batch = world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.places(batch) == [BE]
    done = await world.side.restore()
    assert [result.file for result in done] == ["group", "mount"]
    assert world.model.mountinfo() == ""
    world.model.mount()
    await world.sweep(BATCH)
    await world.side.restore()
    assert world.model.mountinfo() != ""


async def test_a_mount_that_is_refused_is_not_asked_for_at_each_sweep(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Ledger] = []
    record = Ledger.record

    def counted(ledger: Ledger, *rows: Any, **more: Any) -> None:
        writes.append(ledger)
        record(ledger, *rows, **more)

    def refused(place: str, options: object) -> None:
        raise CgroupDeniedError(place, "mount resctrl: EPERM")

    monkeypatch.setattr(Ledger, "record", counted)
    world.model.umount()
    world.config = replace(NO_MONITOR, mount=True)
    # The unit gives the daemon mounts of its own.
    world.hidden = True
    for _ in range(30):
        await world.sweep(BATCH, seconds=2.0)
    assert writes == []
    assert "mount resctrl on the host instead, in /etc/fstab" in world.side.problems()[0]
    world.hidden = False
    with monkeypatch.context() as patched:
        patched.setattr(world, "mount", refused)
        for _ in range(30):
            await world.sweep(BATCH, seconds=2.0)
            assert "mount resctrl: EPERM" in world.side.problems()[0]
        assert len(writes) == 2
        # Another way to mount it is another question.
        world.config = replace(world.config, mount_options=(MountOption.CDP,))
        await world.sweep(BATCH, seconds=2.0)
        assert len(writes) == 4
    await world.sweep(BATCH, seconds=2.0)
    assert world.model.mountinfo() == ""
    await world.sweep(BATCH, seconds=601.0)
    assert ",cdp" in world.model.mountinfo()


async def test_a_mount_of_ours_with_groups_of_others_stays(world: World) -> None:
    world.model.umount()
    world.config = replace(NO_MONITOR, mount=True)
    await world.sweep(BATCH)
    world.model.mkdir(f"{MOUNT}/theirs")
    done = {result.file: result for result in await world.side.restore()}
    assert done["mount"].undo is RestoreOutcome.FOREIGN
    assert "theirs" in done["mount"].detail
    assert world.controls() == ["theirs"]
    assert read_rows(Ledger(world.store), CODEC).place == MOUNT


def test_a_row_that_holds_something_else_is_no_record_and_stays(world: World) -> None:
    ledger = Ledger(world.store)
    (row,) = CODEC.dump(ResctrlState(original={"L3": {0: 1}}))
    for text in ("L3:0=fff;0=fff", "\0", "L3:"):
        ledger.record([replace(row, original=text)])
        assert read_rows(Ledger(world.store), CODEC) == ResctrlState()
        assert restore_resctrl("/", ledger, None, files=world.model, capability=world.capability(), mounter=world) == []
    assert [left.original for left in ledger.of_kind(RESCTRL)] == ["L3:"]
