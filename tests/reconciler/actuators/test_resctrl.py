"""Cache and bandwidth of pods on a strict model of the kernel's resctrl: every refusal, counter and id is its own.

Longer than other modules because every case needs the same node of pods, threads and groups.
"""

import dataclasses
import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from cgroupfs.hierarchy import Hierarchy, Mode, Mount
from reconciler.actuators.resctrl import Resctrl
from reconciler.actuators.resctrl_undo import ROW, Kept, restore_resctrl
from reconciler.actuators.side import ByGroup, MeasuresCache, SideActuator, Situation
from reconciler.actuators.siderow import SideRow
from reconciler.planner import plan_pools
from reconciler.policies.cache import KNOB, CacheConfig
from reconciler.policies.cachewish import CACHE_LIMIT, RESCTRL
from reconciler.policies.table import PoliciesConfig
from reconciler.restore import Undo
from resctrl.capability import Capability, Status, read_capability
from resctrl.mount import SOURCE
from resctrl.schemata import parse_schemata
from state.cache import CacheMode, ClassShare, Level, LevelLaw, Use
from state.evidence import Sample
from state.ledger import Ledger
from state.model import Hold, Pod
from state.schema import META
from state.store import Batch, Store
from tests.fakes.resctrl_model import Deed, ResctrlModel
from tests.fakes.resctrl_shapes import AMD, INTEL, INTEL_L2, L2_ONLY, NONE, SHAPES, MonitorShape, Shape
from tests.reconciler.nodes import node, online, pod

MOUNT = "/sys/fs/resctrl"
BATCH, CRUNCH, WEB, SHOP = pod("batch"), pod("crunch"), online("web"), online("shop")
BE = f"{MOUNT}/bypassd-be"


class Killed(BaseException):
    """The agent ends here, with nothing after it."""


class Boxes:
    """The cgroup files of pods: their threads, which live in the model."""

    def __init__(self, model: ResctrlModel) -> None:
        self._model = model
        self.pids: dict[str, list[int]] = {}

    def read(self, directory: Any, file: str) -> str:
        assert file == "tasks"
        alive = self._model.fake_tasks
        tids = [tid for pid in self.pids.get(str(directory), []) for tid in alive.tids(pid)]
        if str(directory) not in self.pids:
            raise FileNotFoundError(directory)
        return "".join(f"{tid}\n" for tid in tids)

    def groups(self, directory: Any) -> list[str]:
        inside = {path.removeprefix(f"{directory}/") for path in self.pids if path.startswith(f"{directory}/")}
        return sorted({path.partition("/")[0] for path in inside})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed here")


class World:
    """A machine with resctrl, a store, and the agent's part on it, which can be started again."""

    def __init__(self, path: Path, shape: Shape = INTEL, release: tuple[int, int] = (6, 12)) -> None:
        path.mkdir(exist_ok=True)
        self.model = ResctrlModel(shape, release)
        self.path = path
        self.boxes = Boxes(self.model)
        self.config = CacheConfig(enabled=True)
        self.enforce = True
        self.holds: dict[str, Hold] = {}
        self.writes: Counter[tuple[str, str]] = Counter()
        self.misses: dict[str, Sample] = {}
        self.mounted_by = "resctrl"
        self.hidden = False
        """The host's mounts are not this process'."""
        self.before: Callable[[str], None] = lambda _: None
        """Called around everything that outlives the agent: what is done to mounts, and to the store."""
        mount = Mount(directory="/cpuset", version=1, controllers=("cpuset",))
        self.hierarchy = Hierarchy(root="/", mode=Mode.V1, controllers={"cpuset": mount})
        self.store = Store(str(path / "state.db"), boot="boot-1")
        self.side = self.start()

    def start(self) -> Resctrl:
        self.ledger = Ledger(self.store)
        self.side = Resctrl(
            self.hierarchy,
            self.store,
            self.ledger,
            trio.CapacityLimiter(1),
            writes=self.writes,
            files=self.model,
            cgroups=self.boxes,
            capability=self.capability,
            mounter=self,
            misses=lambda: self.misses,
            clock=self.model.now,
        )
        return self.side

    def capability(self) -> Capability:
        copy = self.path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        self.model.install(str(copy))
        found = read_capability(str(copy))
        return replace(found, root=MOUNT) if found.status is Status.READY else found

    # The mounter

    def mount(self, place: str, options: Any) -> None:
        assert place == MOUNT
        self.before("mount")
        self.model.mount(tuple(options))
        self.mounted_by = SOURCE
        self.before("mounted")

    def unmount(self, place: str) -> None:
        self.before("unmount")
        self.model.umount()
        self.mounted_by = "resctrl"
        self.before("unmounted")

    def source(self, place: str) -> str | None:
        return self.mounted_by if self.model.mountinfo() else None

    def sees_the_host(self) -> bool:
        return not self.hidden

    # Pods

    def spawn(self, one: Pod, threads: int = 1, parent: int = 0, box: int = 0) -> int:
        pid = self.model.fake_tasks.spawn(threads, parent)
        self.boxes.pids.setdefault(f"/cpuset{one.containers[box].group.path}", []).append(pid)
        return pid

    def places(self, *pids: int) -> list[str]:
        tasks = self.model.fake_tasks
        return [self.model.place_of(tid) for pid in pids for tid in tasks.tids(pid)]

    def situation(self, *pods: Pod) -> Situation:
        view = node(*pods)
        pools = plan_pools(view, None, PoliciesConfig(cache=self.config))
        return Situation(view=view, pools=pools, enforce=self.enforce, holds=self.holds)

    async def sweep(self, *pods: Pod, seconds: float = 1.0) -> None:
        self.model.advance(seconds)
        self.side.planned(self.situation(*pods))
        await self.side.sweep()

    def state(self) -> tuple[list[str], dict[str, str], dict[int, str]]:
        """Everything that somebody else would see: groups, their values, where the threads are."""
        groups = sorted(self.model.groups(MOUNT)) + sorted(self.model.groups(f"{MOUNT}/mon_groups"))
        values = {name: self.model.read(f"{MOUNT}/{name}".rstrip("/"), "schemata") for name in ("", *self.controls())}
        places = {tid: self.model.place_of(tid) for tid, _ in self.model.fake_tasks.threads()}
        return groups, values, places

    def controls(self) -> list[str]:
        return sorted(set(self.model.groups(MOUNT)) - {"info", "mon_data", "mon_groups"})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def annotated(one: Pod, **annotations: str) -> Pod:
    names = {"limit": CACHE_LIMIT, "resctrl": RESCTRL}
    return replace(one, annotations={names[key]: value for key, value in annotations.items()})


def wants(one: Pod, low: int, high: int) -> Pod:
    return annotated(one, resctrl=f'{{"llc": {{"schemata": {{"range": [{low}, {high}]}}}}}}')


NO_MONITOR = CacheConfig(enabled=True, monitor=False)


async def test_all_threads_of_be_pods_share_a_group_and_online_ones_stay(world: World) -> None:
    world.config = NO_MONITOR
    batch, crunch, web = world.spawn(BATCH, 5), world.spawn(CRUNCH), world.spawn(WEB, 2)
    await world.sweep(BATCH, CRUNCH, WEB)
    assert world.places(batch, crunch) == [BE] * 6
    assert world.places(web) == [MOUNT] * 2
    assert world.model.read(BE, "schemata") == "    MB:0=100;1=100\n    L3:0=00f;1=00f\n"
    assert world.side.problems() == []
    assert world.writes["resctrl.tasks", "written"] == 6
    standing = world.side.standings[BATCH.group.path][KNOB]
    assert (standing.state, standing.wanted, standing.actual) == ("in place", "bypassd-be", "bypassd-be")
    assert standing.setting.reason == "class reclaimed"
    assert WEB.group.path not in world.side.standings


async def test_the_second_sweep_writes_nothing(world: World) -> None:
    world.spawn(BATCH, 3)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    before = len(world.model.deeds)
    await world.sweep(BATCH, WEB)
    assert world.model.deeds[before:] == []


@pytest.mark.parametrize("release", [(5, 10), (6, 1), (6, 12)])
@pytest.mark.parametrize("shape", [one for one in SHAPES.values() if one is not NONE], ids=lambda one: one.name)
async def test_every_machine_takes_what_it_is_given(tmp_path: Path, shape: Shape, release: tuple[int, int]) -> None:
    world = World(tmp_path, shape, release)
    world.config = CacheConfig(
        enabled=True,
        l2=True,
        shared=ClassShare(cat_range_start_percent=20, mba_percent=70),
        slow_bandwidth_mbps=4000,
        avoid_shared=True,
    )
    batch, web = world.spawn(BATCH), world.spawn(WEB)
    await world.sweep(annotated(BATCH, limit="low"), WEB)
    await world.sweep(annotated(BATCH, limit="low"), WEB)
    assert [deed for deed in world.model.deeds if deed.code] == []
    assert world.side.problems() == []
    assert world.places(batch)[0].startswith(f"{MOUNT}/bypassd-be-low")
    assert world.places(web)[0].startswith(f"{MOUNT}/bypassd-ls")


async def test_threads_that_exec_brings_in_are_found_by_the_next_sweep(world: World) -> None:
    world.config = NO_MONITOR
    first = world.spawn(BATCH)
    await world.sweep(BATCH)
    child = world.spawn(BATCH, parent=first)
    assert world.places(child) == [BE]
    stranger = world.spawn(BATCH)
    assert world.places(stranger) == [MOUNT]
    await world.sweep(BATCH)
    assert world.places(stranger) == [BE]


async def test_a_pod_that_forks_while_it_is_moved_is_moved_whole(world: World) -> None:
    world.config = NO_MONITOR
    first = world.spawn(BATCH)
    pids = [first]

    def fork(deed: Deed) -> None:
        if deed.path == f"{BE}/tasks" and len(pids) < 8:
            pids.append(world.spawn(BATCH, parent=pids[-1]))

    world.model.before = fork
    await world.sweep(BATCH)
    assert world.places(*pids) == [BE] * 8
    assert world.side.problems() == []


async def test_a_pod_that_forks_without_end_ends_a_sweep_and_shows(world: World) -> None:
    world.config = NO_MONITOR
    first = world.spawn(BATCH)

    def bomb(deed: Deed) -> None:
        if deed.what == "write" and deed.path == f"{BE}/tasks":
            world.spawn(BATCH)

    world.model.before = bomb
    calm = world.spawn(CRUNCH)
    with trio.fail_after(60):
        await world.sweep(BATCH, CRUNCH)
    assert world.places(first, calm) == [BE] * 2
    assert "ns/batch: its threads come faster than they are moved" in world.side.problems()
    assert world.side.standings[BATCH.group.path][KNOB].state == "waiting"
    world.model.before = None
    await world.sweep(BATCH, CRUNCH)
    assert set(world.places(*world.boxes.pids[f"/cpuset{BATCH.containers[0].group.path}"])) == {BE}
    assert world.side.problems() == []


async def test_a_thread_number_that_went_to_another_program_goes_home(world: World) -> None:
    world.config = NO_MONITOR
    world.spawn(BATCH)
    await world.sweep(BATCH)
    stranger = world.model.fake_tasks.spawn()
    world.model.write(BE, "tasks", f"{stranger}\n")
    await world.sweep(BATCH)
    assert world.places(stranger) == [MOUNT]


async def test_groups_and_threads_of_others_are_left(world: World) -> None:
    world.config = NO_MONITOR
    world.model.mkdir(f"{MOUNT}/theirs")
    mine, theirs = world.spawn(BATCH), world.spawn(BATCH)
    world.model.write(f"{MOUNT}/theirs", "tasks", f"{theirs}\n")
    await world.sweep(BATCH)
    assert world.places(mine, theirs) == [BE, f"{MOUNT}/theirs"]
    assert world.side.problems() == ["ns/batch: 1 threads are in a group of others, which they keep"]
    assert world.side.standings[BATCH.group.path][KNOB].state == "yielded"
    await world.side.restore()
    assert world.controls() == ["theirs"]
    assert world.places(theirs) == [f"{MOUNT}/theirs"]


async def test_groups_of_the_dead_are_removed(world: World) -> None:
    asking = wants(WEB, 50, 100)
    web = world.spawn(asking)
    await world.sweep(asking)
    assert len(world.controls()) == 1
    world.model.fake_tasks.end(web)
    await world.sweep()
    assert world.controls() == []
    assert world.model.groups(f"{MOUNT}/mon_groups") == []


async def test_a_pod_that_asks_for_less_later_moves_back(world: World) -> None:
    world.config = NO_MONITOR
    web = world.spawn(WEB, 2)
    await world.sweep(wants(WEB, 50, 100))
    assert world.places(web)[0].startswith(f"{MOUNT}/bypassd-own-")
    await world.sweep(WEB)
    assert world.places(web) == [MOUNT] * 2
    assert world.controls() == []


async def test_when_groups_run_out_pods_share_and_it_shows(tmp_path: Path) -> None:
    world = World(tmp_path, INTEL_L2)
    world.config = NO_MONITOR
    pods = [wants(online(f"p{number}"), 0, 20 + 10 * number) for number in range(4)]
    pids = [world.spawn(one) for one in pods]
    world.spawn(BATCH)
    await world.sweep(BATCH, *pods)
    assert len(world.controls()) == 3
    crowded = [one for one, place in zip(pods, world.places(*pids), strict=True) if place == MOUNT]
    assert len(crowded) == 2
    for one in crowded:
        assert "no control group is left" in world.side.standings[one.group.path][KNOB].detail
        assert any(problem.startswith(f"{one.title}: no control group is left") for problem in world.side.problems())
    assert [deed.code for deed in world.model.deeds if deed.code] == []


async def test_groups_that_others_take_meanwhile_are_an_answer_not_an_end(tmp_path: Path) -> None:
    world = World(tmp_path, INTEL_L2)
    world.config = NO_MONITOR
    web = world.spawn(WEB)
    taken: list[str] = []

    def take(deed: Deed) -> None:
        if deed.what == "mkdir" and "own" in deed.path and not taken:
            taken.extend(f"{MOUNT}/other{number}" for number in range(3))
            for name in taken:
                world.model.mkdir(name)

    world.model.before = take
    await world.sweep(wants(WEB, 50, 100))
    assert world.places(web) == [MOUNT]
    assert any("out of CLOSIDs" in problem for problem in world.side.problems())
    world.model.before = None
    await world.sweep(wants(WEB, 50, 100))
    assert any("ns/web: no control group is left" in problem for problem in world.side.problems())


async def test_watching_changes_nothing(world: World) -> None:
    world.enforce = False
    world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.model.deeds == []
    assert world.side.standings[BATCH.group.path][KNOB].state == "would write"
    world.enforce, world.config = True, replace(NO_MONITOR, dry_run=True)
    await world.sweep(BATCH)
    assert world.model.deeds == []


@pytest.mark.parametrize("target", ["node", "pod:batch"])
async def test_what_is_held_is_left(world: World, target: str) -> None:
    world.config = NO_MONITOR
    world.holds = {target: Hold(target=target, reason="a test", by="me")}
    batch = world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.places(batch) == [MOUNT]
    assert world.side.standings[BATCH.group.path][KNOB].state == "held"
    world.holds = {}
    await world.sweep(BATCH)
    world.holds = {target: Hold(target=target, reason="a test", by="me")}
    fresh = world.spawn(BATCH)
    await world.sweep(wants(BATCH, 0, 10))
    assert world.places(batch, fresh) == [BE, MOUNT]


async def test_a_restarted_agent_goes_on_with_what_is_there(world: World) -> None:
    batch = world.spawn(BATCH)
    asking = wants(WEB, 50, 100)
    web = world.spawn(asking)
    await world.sweep(BATCH, asking)
    places, deeds = world.places(batch, web), len(world.model.deeds)
    world.start()
    await world.sweep(BATCH, asking)
    assert world.places(batch, web) == places
    assert world.model.deeds[deeds:] == []


async def test_the_policy_switched_off_is_undone(world: World) -> None:
    batch = world.spawn(BATCH)
    before = world.state()
    await world.sweep(BATCH)
    world.config = CacheConfig()
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
    world.config = CacheConfig()
    world.start()
    await world.sweep(BATCH)
    assert world.state() == before


SYSTEM = CacheConfig(
    enabled=True,
    system=ClassShare(cat_range_start_percent=30),
    shared=ClassShare(cat_range_start_percent=40),
    avoid_shared=True,
)


async def test_restore_brings_everything_back_and_twice_does_nothing(world: World) -> None:
    world.config = SYSTEM
    world.model.write(MOUNT, "schemata", "MB:0=80\nL3:1=7ff\n")
    world.spawn(BATCH, 3)
    world.spawn(WEB, 2)
    before = world.state()
    await world.sweep(BATCH, WEB)
    assert "L3:0=ff0;1=ff0" in world.model.read(MOUNT, "schemata")
    done = await world.side.restore()
    assert all(one.ok for one in done)
    assert {one.file for one in done} == {"group", "schemata"}
    assert world.state() == before
    assert ROW.read(world.store) == Kept(boot="boot-1")
    assert await world.side.restore() == []


class Killing:
    """Ends the agent before its ``step``-th act on resctrl, the mount table or the store."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch, step: int) -> None:
        self.acts = 0
        self._step = step
        world.model.before = lambda deed: self.act(deed.what)
        world.before = self.act
        apply = Store.apply

        def applied(store: Store, batch: Batch) -> None:
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
        here = tmp_path / str(step)
        world = World(here)
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
            store = Store(str(here / "state.db"), boot="boot-1")
            with monkeypatch.context() as patched:
                try:
                    # Each attempt gets one act further than the last.
                    Killing(world, patched, attempt)
                    done = restore_resctrl(
                        "/", store, None, files=world.model, capability=world.capability(), mounter=world
                    )
                except Killed:
                    continue
                finally:
                    store.close()
            break
        assert all(one.ok for one in done), (step, done)
        assert (world.model.mountinfo() == "") == mount, step
        assert before is None or world.state() == before, step
        store = Store(str(here / "state.db"), boot="boot-1")
        assert ROW.read(store) == Kept(boot="boot-1"), step
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
    assert ROW.read(world.store).place == MOUNT
    world.model.mount()
    done = restore_resctrl("/", world.store, None, files=world.model, capability=world.capability(), mounter=world)
    assert done == []
    assert world.model.mountinfo() != ""
    assert ROW.read(world.store) == Kept(boot="boot-1")


def killed(*_: object) -> None:
    raise Killed


async def test_what_is_remembered_outlives_a_mount_that_cannot_be_seen(world: World) -> None:
    world.config = SYSTEM
    await world.sweep(BATCH)
    kept = ROW.read(world.store)
    assert kept.original is not None
    lost = Capability(status=Status.NOT_MOUNTED, reason="another mount namespace")
    world.hidden = True
    assert restore_resctrl("/", world.store, None, files=world.model, capability=lost, mounter=world) == []
    assert ROW.read(world.store) == kept
    world.hidden = False
    assert restore_resctrl("/", world.store, None, files=world.model, capability=lost, mounter=world) == []
    assert ROW.read(world.store) == Kept(boot="boot-1")


async def test_the_store_says_that_there_is_something_before_there_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its row alone the next start knows that groups of ours may be there."""
    rows: list[bool] = []
    world.spawn(BATCH)
    world.model.before = lambda _: rows.append(ROW.read(world.store).groups)
    await world.sweep(BATCH)
    assert rows
    assert all(rows)
    await world.side.restore()
    assert ROW.read(world.store) == Kept(boot="boot-1")


async def test_the_default_groups_values_that_somebody_changed_since_are_left(world: World) -> None:
    world.config = SYSTEM
    await world.sweep()
    world.model.write(MOUNT, "schemata", "L3:0=3f;1=3f\n")
    done = {one.file: one for one in await world.side.restore()}
    assert done["schemata"].undo is Undo.FOREIGN
    assert "L3:0=03f;1=03f" in world.model.read(MOUNT, "schemata")


async def test_a_default_group_that_is_no_longer_wanted_different_is_put_back(world: World) -> None:
    before = world.model.read(MOUNT, "schemata")
    world.config = SYSTEM
    await world.sweep()
    world.config = CacheConfig(enabled=True)
    await world.sweep()
    assert world.model.read(MOUNT, "schemata") == before
    assert ROW.read(world.store).original is None


async def test_one_pod_is_freed_alone(world: World) -> None:
    batch, crunch = world.spawn(BATCH, 2), world.spawn(CRUNCH)
    await world.sweep(BATCH, CRUNCH)
    world.boxes.pids["/cpuset/kubepods"] = []
    done = await world.side.restore("batch")
    assert all(one.ok for one in done)
    assert {one.file for one in done} == {"tasks", "mon_group"}
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
    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(SideRow, "write", full)
    world.config = SYSTEM
    await world.sweep(BATCH)
    assert world.model.deeds == []
    assert world.side.problems() == [
        "resctrl is left as it is, what is there cannot be recorded: the disk is full",
    ]


async def test_a_mount_of_ours_comes_and_goes_and_one_of_others_stays(world: World) -> None:
    world.model.umount()
    world.config = replace(NO_MONITOR, mount=True)
    batch = world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.places(batch) == [BE]
    done = await world.side.restore()
    assert [one.file for one in done] == ["group", "mount"]
    assert world.model.mountinfo() == ""
    world.model.mount()
    await world.sweep(BATCH)
    await world.side.restore()
    assert world.model.mountinfo() != ""


async def test_a_mount_of_ours_with_groups_of_others_stays(world: World) -> None:
    world.model.umount()
    world.config = replace(NO_MONITOR, mount=True)
    await world.sweep(BATCH)
    world.model.mkdir(f"{MOUNT}/theirs")
    done = {one.file: one for one in await world.side.restore()}
    assert done["mount"].undo is Undo.FOREIGN
    assert "theirs" in done["mount"].detail
    assert world.controls() == ["theirs"]
    assert ROW.read(world.store).place == MOUNT


async def test_nothing_is_mounted_unasked(world: World) -> None:
    world.model.umount()
    await world.sweep(BATCH)
    assert world.model.mountinfo() == ""
    assert world.side.problems() != []
    assert world.side.facts()["status"] == "not-mounted"


async def test_a_machine_without_any_says_so_and_does_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, NONE)
    world.config = CacheConfig(enabled=True, mount=True)
    await world.sweep(BATCH)
    assert world.model.deeds == []
    assert world.side.facts()["status"] == "no-cpu"
    assert list(await world.side.restore()) == []


async def test_use_of_cache_and_bandwidth_is_told_by_pod_or_not_known(world: World) -> None:
    world.spawn(BATCH)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    group = f"{BE}/mon_groups/bypassd-batch"
    world.model.bandwidth(group, 0, 3e9, 1e9)
    for _ in range(4):
        await world.sweep(BATCH, WEB, seconds=2.0)
    world.model.occupancy(group, 0, 1 << 20)
    await world.sweep(BATCH, WEB, seconds=2.0)
    assert world.side.use is not None
    rate = world.side.use.pods["batch"][0]
    assert rate.occupancy == 1 << 20
    assert rate.total_s == pytest.approx(3e9, rel=0.01)
    assert rate.local_s == pytest.approx(1e9, rel=0.01)
    world.model.answer(group, 0, "Unavailable")
    await world.sweep(BATCH, WEB, seconds=2.0)
    assert world.side.use.pods["batch"][0].total_s is None
    assert world.side.facts()["monitoring_groups"] == {"budget": 24, "used": 2, "waiting": {}}


async def test_what_is_measured_is_told_to_signals_and_metrics(world: World) -> None:
    assert isinstance(world.side, MeasuresCache)
    assert world.side.measured() is None
    world.config = CacheConfig(enabled=True, mode=CacheMode.DYNAMIC)
    world.spawn(BATCH)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    group = f"{BE}/mon_groups/bypassd-batch"
    world.model.bandwidth(group, 0, 3e9, 1e9)
    world.model.bandwidth(group, 1, 1e9, 1e9)
    for _ in range(4):
        await world.sweep(BATCH, WEB, seconds=2.0)
    world.model.answer(f"{MOUNT}/mon_groups/bypassd-web", 1, "Unavailable")
    world.model.occupancy(group, 0, 1 << 20)
    await world.sweep(BATCH, WEB, seconds=2.0)
    found = world.side.measured()
    assert found is not None
    assert found.at_s == world.model.now()
    assert found.pods["batch"].occupancy_bytes == 1 << 20
    assert found.pods["batch"].total_bytes_s == pytest.approx(4e9, rel=0.01)
    assert found.pods["web"] == Use()
    assert found.groups["bypassd-be"][1].total_bytes_s == pytest.approx(1e9, rel=0.01)
    assert found.groups["(default)"][1].total_bytes_s is None
    assert found.classes == {"bypassd-be": "reclaimed"}
    assert found.level == Level(cache_percent=20, mba_percent=10)
    assert found.lacks == {}
    world.config = CacheConfig()
    await world.sweep(BATCH, WEB)
    assert world.side.measured() is None


async def test_why_something_is_not_measured_is_told(tmp_path: Path) -> None:
    both = {"llc.occupancy", "memory.bandwidth"}
    blind = World(tmp_path / "blind", L2_ONLY)
    blind.side.planned(blind.situation(BATCH))
    told = blind.side.measured()
    assert told is not None
    assert dict(told.lacks) == dict.fromkeys(both, "resctrl has not been looked at yet")
    await blind.sweep(BATCH)
    told = blind.side.measured()
    assert told is not None
    assert told.lacks.keys() == both
    assert "no mbm_total_bytes in info/L3_MON" in told.lacks["memory.bandwidth"]
    few = World(
        tmp_path / "few",
        replace_monitor(INTEL, MonitorShape(rmids=9, domains=(0, 1), threshold=1 << 30, cache_bytes=16 << 20)),
    )
    await few.sweep(BATCH, WEB)
    told = few.side.measured()
    assert told is not None
    assert dict(told.lacks) == dict.fromkeys(both, "1 of 2 pods are watched now, by 1 monitoring groups")
    gone = World(tmp_path / "gone")
    gone.model.umount()
    await gone.sweep(BATCH)
    told = gone.side.measured()
    assert told is not None
    assert "not mounted" in told.lacks["llc.occupancy"]


async def test_where_ids_are_few_pods_are_watched_in_turns(tmp_path: Path) -> None:
    few = replace_monitor(INTEL, MonitorShape(rmids=10, domains=(0, 1), threshold=1 << 30, cache_bytes=16 << 20))
    world = World(tmp_path, few)
    world.config = CacheConfig(enabled=True, dwell_s=10)
    pods = [online(f"p{number}") for number in range(5)]
    for one in pods:
        world.spawn(one)
    seen: set[str] = set()
    for _ in range(12):
        await world.sweep(*pods, seconds=5.0)
        watched = world.model.groups(f"{MOUNT}/mon_groups")
        assert len(watched) <= 2
        seen |= set(watched)
    assert seen == {f"bypassd-p{number}" for number in range(5)}
    assert world.side.problems() == []


async def test_ids_that_are_still_busy_are_waited_for(tmp_path: Path) -> None:
    busy = replace_monitor(AMD, MonitorShape(rmids=17, domains=(0, 1, 2, 3), threshold=0, cache_bytes=16 << 20))
    world = World(tmp_path, busy)
    world.config = CacheConfig(enabled=True, dwell_s=2)
    pods = [online("p1"), online("p2")]
    for one in pods:
        world.spawn(one)
    await world.sweep(*pods)
    world.model.occupancy(f"{MOUNT}/mon_groups/bypassd-p1", 0, 1 << 20)
    for _ in range(6):
        await world.sweep(*pods, seconds=2.0)
    assert world.side.problems() == []
    assert len(world.model.groups(f"{MOUNT}/mon_groups")) <= 1


async def test_be_gives_way_to_bandwidth_and_gets_it_back_slowly(world: World) -> None:
    world.config = CacheConfig(enabled=True, mode=CacheMode.DYNAMIC, law=LevelLaw(calm_s=2.0))
    world.spawn(BATCH)
    world.spawn(WEB)
    for _ in range(12):
        await world.sweep(BATCH, WEB, seconds=2.0)
    grown = level(world)
    assert grown[0] > 20
    assert grown[1] > 10
    world.model.bandwidth(BE, 0, 19e9)
    for _ in range(2):
        await world.sweep(BATCH, WEB, seconds=2.0)
    cut = level(world)
    assert cut[0] >= grown[0]
    assert cut[1] == 10
    assert "MB:0= 10;1= 10" in world.model.read(BE, "schemata")
    world.misses = {"web": Sample(50.0, 1.0)}
    await world.sweep(BATCH, WEB, seconds=2.0)
    assert level(world) == (20, 10)
    assert "L3:0=003;1=003" in world.model.read(BE, "schemata")


async def test_bes_ways_shrink_at_a_victims_misses_and_grow_back_slowly(world: World) -> None:
    """Bandwidth is not counted on this machine: misses alone move BE's share, and only while they are counted."""
    world.config = CacheConfig(enabled=True, monitor=False, mode=CacheMode.DYNAMIC, law=LevelLaw(calm_s=2.0))
    world.spawn(BATCH)
    world.spawn(WEB)

    async def ways(missed: float | None) -> int:
        for domain in (0, 1):
            world.model.answer(MOUNT, domain, "Unavailable")
        # BE misses as it likes: it is nobody's victim.
        counted = {} if missed is None else {"web": Sample(missed, 0.5)}
        world.misses = {"batch": Sample(90.0, 0.5), **counted}
        await world.sweep(BATCH, WEB, seconds=2.0)
        return parse_schemata(world.model.read(BE, "schemata"))["L3"][0].bit_count()

    assert [await ways(None) for _ in range(4)] == [2, 2, 2, 2]
    grown = [await ways(1.0) for _ in range(16)]
    assert grown == sorted(grown)
    assert grown[-1] == 6
    assert max(after - before for before, after in itertools.pairwise(grown)) == 1
    assert await ways(30.0) == 2
    assert [await ways(30.0) for _ in range(3)] == [2, 2, 2]
    back = [await ways(1.0) for _ in range(4)]
    assert back == sorted(back)
    assert back[-1] < 6


def level(world: World) -> tuple[int, int]:
    found: Any = world.side.facts()["level"]
    return found["cache_percent"], found["mba_percent"]


async def test_counters_that_cannot_be_read_never_raise_be(world: World) -> None:
    world.config = CacheConfig(enabled=True, mode=CacheMode.DYNAMIC, law=LevelLaw(calm_s=0.0))
    world.spawn(BATCH)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    for domain in (0, 1):
        # The default group's own id still answers: its sum leaves out the pod's part without a word.
        world.model.answer(f"{MOUNT}/mon_groups/bypassd-web", domain, "Unavailable")
    for _ in range(5):
        await world.sweep(BATCH, WEB, seconds=2.0)
    assert level(world) == (20, 10)


async def test_values_that_somebody_changes_are_put_back_and_in_the_end_left(world: World) -> None:
    world.spawn(BATCH)
    await world.sweep(BATCH)
    for _ in range(5):
        world.model.write(BE, "schemata", "L3:0=fff\n")
        await world.sweep(BATCH)
        assert "L3:0=00f" in world.model.read(BE, "schemata")
    world.model.write(BE, "schemata", "L3:0=fff\n")
    await world.sweep(BATCH)
    assert "L3:0=fff" in world.model.read(BE, "schemata")
    assert any("somebody else has changed its values 5 times" in problem for problem in world.side.problems())
    world.config = CacheConfig(enabled=True, reclaimed=replace(world.config.reclaimed, cat_range_end_percent=50))
    await world.sweep(BATCH)
    assert "L3:0=03f" in world.model.read(BE, "schemata")


async def test_a_mount_that_goes_away_is_a_problem_and_comes_back(world: World) -> None:
    world.config = NO_MONITOR
    batch = world.spawn(BATCH)
    await world.sweep(BATCH)
    world.model.umount()
    await world.sweep(BATCH)
    assert world.side.problems() != []
    world.model.mount()
    await world.sweep(BATCH, seconds=61)
    await world.sweep(BATCH, seconds=61)
    assert world.places(batch) == [BE]
    assert world.side.problems() == []


async def test_it_runs_as_a_side_of_the_agent(world: World, nursery: trio.Nursery) -> None:
    assert isinstance(world.side, ByGroup)
    side: SideActuator = world.side
    batch = world.spawn(BATCH)
    await nursery.start(side.run)
    side.planned(world.situation(BATCH))
    await until(lambda: world.places(batch)[0] != MOUNT)
    nursery.cancel_scope.cancel()


async def test_a_look_that_changes_nothing_does_not_wake_it(world: World, nursery: trio.Nursery) -> None:
    world.config = replace(NO_MONITOR, sweep_s=300)
    await nursery.start(world.side.run)
    world.side.planned(world.situation(BATCH))
    await until(lambda: world.side.facts()["sweeps"] == 1)
    world.side.planned(world.situation(BATCH))
    await trio.sleep(0.5)
    assert world.side.facts()["sweeps"] == 1
    world.side.planned(world.situation(BATCH, WEB))
    await until(lambda: world.side.facts()["sweeps"] == 2)
    nursery.cancel_scope.cancel()


async def until(met: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not met():  # noqa: ASYNC110  # the model cannot tell when
            await trio.sleep(0.01)


def replace_monitor(shape: Shape, monitor: MonitorShape) -> Shape:
    return dataclasses.replace(shape, monitor=monitor)


def test_a_store_that_holds_something_else_is_no_record(world: World) -> None:
    batch = Batch()
    batch.put(META, ROW.key, b"\xc1")
    world.store.apply(batch)
    assert ROW.read(world.store) == Kept(boot="boot-1")
