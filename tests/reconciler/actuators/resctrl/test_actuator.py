"""Cache and bandwidth of pods on a strict model of the kernel's resctrl: every refusal, counter and id is its own."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import CgroupBusyError
from reconciler.actuators.base import AuxiliaryActuator
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.policies.cache import CachePolicyConfig
from reconciler.signals.processes import OUTSIDE
from resctrl.groups import ControlGroups
from state.cache import RESCTRL_GROUP, ClassShare
from state.entry import RestoreOutcome
from state.model import Hold
from tests.fakes.constants import varied
from tests.fakes.resctrl_model import Deed
from tests.fakes.resctrl_shapes import INTEL_L2, MPAM_SHAPES, NONE, SHAPES, Shape
from tests.reconciler.actuators.resctrl_world import (
    BATCH,
    BE,
    CRUNCH,
    MOUNT,
    NO_MONITOR,
    WEB,
    Boxes,
    World,
    annotated,
    wants,
)
from tests.reconciler.nodes import online
from tests.until import until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_all_threads_of_be_pods_share_a_group_and_online_ones_stay(world: World) -> None:
    world.config = NO_MONITOR
    batch, crunch, web = world.spawn(BATCH, 5), world.spawn(CRUNCH), world.spawn(WEB, 2)
    await world.sweep(BATCH, CRUNCH, WEB)
    assert world.places(batch, crunch) == [BE] * 6
    assert world.places(web) == [MOUNT] * 2
    assert world.model.read(BE, "schemata") == "    MB:0=100;1=100\n    L3:0=00f;1=00f\n"
    assert world.side.problems() == []
    assert world.writes["resctrl.groups", "written"] == 6
    standing = world.side.statuses[BATCH.group.path][RESCTRL_GROUP]
    assert (standing.state, standing.wanted, standing.actual) == ("in place", "bypassd-be", "bypassd-be")
    assert standing.setting.reason == "class reclaimed"
    assert WEB.group.path not in world.side.statuses


async def test_of_a_pod_in_gvisor_the_processes_in_its_own_group_move(world: World) -> None:
    """The groups of its containers exist, and are empty."""
    world.config = NO_MONITOR
    pid = world.spawn(BATCH)
    (path,) = world.boxes.pids
    world.boxes.pids = {path: [], path.rpartition("/")[0]: [pid]}
    await world.sweep(replace(BATCH, sandbox="gVisor"))
    assert world.places(pid) == [BE]


async def test_a_thread_outside_the_pid_namespace_does_not_move_the_daemon(world: World) -> None:
    world.config = NO_MONITOR
    seen = world.spawn(BATCH)
    world.boxes.pids[f"/cpuset{BATCH.containers[0].group.path}"].append(0)
    await world.sweep(BATCH)
    assert (world.places(seen), world.model.writer_in) == ([BE], "")
    status = world.side.statuses[BATCH.group.path][RESCTRL_GROUP]
    assert (status.state, status.detail) == ("waiting", OUTSIDE)


async def test_the_second_sweep_writes_nothing(world: World) -> None:
    world.spawn(BATCH, 3)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    before = len(world.model.deeds)
    await world.sweep(BATCH, WEB)
    assert world.model.deeds[before:] == []


async def test_everything_is_written_in_a_thread_of_its_own(world: World) -> None:
    """On hardware a single mkdir interrupts other CPUs, and a tasks file walks every thread of the machine."""
    threads: set[int] = set()
    world.model.before = lambda _: threads.add(threading.get_ident())
    world.spawn(BATCH, 3)
    await world.sweep(BATCH)
    await world.side.restore()
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("release", [(5, 10), (6, 1), (6, 12)])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if shape is not NONE], ids=lambda item: item.name)
async def test_every_machine_takes_what_it_is_given(tmp_path: Path, shape: Shape, release: tuple[int, int]) -> None:
    await taken(World(tmp_path, shape, release))


@pytest.mark.parametrize("shape", MPAM_SHAPES.values(), ids=lambda item: item.name)
async def test_so_does_arms(tmp_path: Path, shape: Shape) -> None:
    world = World(tmp_path, shape, (7, 0))
    await taken(world)
    before = len(world.model.deeds)
    await world.sweep(annotated(BATCH, limit="low"), WEB)
    assert world.model.deeds[before:] == []


async def taken(world: World) -> None:
    world.config = CachePolicyConfig(
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


async def test_a_thread_in_a_group_deep_below_its_container_stays_where_it_was_born(world: World) -> None:
    """A node in a pod, as kind makes one, with pods of its own."""
    world.config = NO_MONITOR
    first = world.spawn(BATCH)
    await world.sweep(BATCH)
    deep, inside = f"/cpuset{BATCH.containers[0].group.path}", "kubelet.slice/kubepods/burstable/pod1/box/init/app/it"
    for name in inside.split("/"):
        deep = f"{deep}/{name}"
        world.boxes.pids[deep] = []
    child = world.model.fake_tasks.spawn(parent=first)
    world.boxes.pids[deep].append(child)
    await world.sweep(BATCH)
    assert world.places(first, child) == [BE] * 2


class _Counting(Boxes):
    """Counts what is read. ``shown``: errors of single directories."""

    def __init__(self, boxes: Boxes) -> None:
        self.__dict__.update(boxes.__dict__)
        self.reads = 0
        self.errors: dict[str, int] = {}

    def read(self, directory: Any, file: str) -> str:
        self.reads += 1
        if code := self.errors.get(str(directory)):
            raise OSError(code, os.strerror(code))
        return super().read(directory, file)


async def test_a_tenants_groups_without_number_are_not_all_read_and_none_of_its_threads_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cgroupfs.threads.MOST_GROUPS", 20)
    world = World(tmp_path)
    world.config = NO_MONITOR
    world.boxes = counting = _Counting(world.boxes)
    world.start()
    first, other = world.spawn(BATCH), world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    box = f"/cpuset{BATCH.containers[0].group.path}"
    counting.pids |= {f"{box}/{number:03}": [] for number in range(100)}
    child, stranger = world.model.fake_tasks.spawn(parent=first), world.model.fake_tasks.spawn()
    counting.pids[f"{box}/099"].append(child)
    for tid in (stranger, other):
        world.model.write(BE, "tasks", f"{tid}\n")
    counting.reads = 0
    await world.sweep(BATCH, WEB)
    assert counting.reads < 100
    assert world.places(first, child) == [BE] * 2
    # Of the others only those are sent away that are known to be another pod's.
    assert world.places(stranger, other) == [BE, MOUNT]
    message = "only the threads of 20 groups in it are listed"
    assert world.side.problems() == [f"ns/batch: {message}"]
    status = world.side.statuses[BATCH.group.path][RESCTRL_GROUP]
    assert (status.state, status.detail) == ("waiting", message)
    done = await world.side.restore(BATCH.uid)
    assert [(result.undo, result.detail) for result in done] == [(RestoreOutcome.REFUSED, message)]
    assert world.places(first, child) == [MOUNT, BE]


async def test_a_thread_whose_group_cannot_be_read_now_is_not_sent_away(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.config = NO_MONITOR
    world.boxes = counting = _Counting(world.boxes)
    world.start()
    pid = world.spawn(BATCH, 3)
    await world.sweep(BATCH)
    counting.errors[f"/cpuset{BATCH.containers[0].group.path}"] = errno.EMFILE
    await world.sweep(BATCH)
    assert world.places(pid) == [BE] * 3
    assert world.side.problems() == ["ns/batch: cannot list its threads: EMFILE"]
    counting.errors.clear()
    await world.sweep(BATCH)
    assert (world.places(pid), world.side.problems()) == ([BE] * 3, [])


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
    assert "ns/batch: new threads appear faster than they are moved" in world.side.problems()
    assert world.side.statuses[BATCH.group.path][RESCTRL_GROUP].state == "waiting"
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
    assert world.side.problems() == ["ns/batch: 1 threads stay in the group of another program"]
    assert world.side.statuses[BATCH.group.path][RESCTRL_GROUP].state == "yielded"
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
    pids = [world.spawn(pod) for pod in pods]
    world.spawn(BATCH)
    await world.sweep(BATCH, *pods)
    assert len(world.controls()) == 3
    crowded = [pod for pod, place in zip(pods, world.places(*pids), strict=True) if place == MOUNT]
    assert len(crowded) == 2
    for item in crowded:
        assert "no free control group" in world.side.statuses[item.group.path][RESCTRL_GROUP].detail
        assert any(problem.startswith(f"{item.title}: no free control group") for problem in world.side.problems())
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
    assert any("ns/web: no free control group" in problem for problem in world.side.problems())


async def test_watching_changes_nothing(world: World) -> None:
    world.enforce = False
    world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.model.deeds == []
    assert world.side.statuses[BATCH.group.path][RESCTRL_GROUP].state == "would write"
    world.enforce, world.config = True, replace(NO_MONITOR, dry_run=True)
    await world.sweep(BATCH)
    assert world.model.deeds == []


async def test_a_policy_that_becomes_a_dry_run_removes_its_groups(world: World) -> None:
    world.config = NO_MONITOR
    batch = world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.places(batch) != [MOUNT]
    world.config = replace(NO_MONITOR, dry_run=True)
    for _ in range(2):
        await world.sweep(BATCH)
        assert world.places(batch) == [MOUNT]
        assert world.side.statuses[BATCH.group.path][RESCTRL_GROUP].state == "would write"


@pytest.mark.parametrize("target", ["node", "pod:batch"])
async def test_what_is_held_is_left(world: World, target: str) -> None:
    world.config = NO_MONITOR
    world.holds = {target: Hold(target=target, reason="a test", by="me")}
    batch = world.spawn(BATCH)
    await world.sweep(BATCH)
    assert world.places(batch) == [MOUNT]
    assert world.side.statuses[BATCH.group.path][RESCTRL_GROUP].state == "held"
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


async def test_nothing_is_mounted_unasked(world: World) -> None:
    world.model.umount()
    await world.sweep(BATCH)
    assert world.model.mountinfo() == ""
    assert world.side.problems() != []
    assert world.side.status()["status"] == "not-mounted"


async def test_of_an_unmounted_tree_no_groups_are_shown(world: World) -> None:
    world.model.mkdir(f"{MOUNT}/theirs")
    world.spawn(BATCH)
    await world.sweep(BATCH)
    world.model.umount()
    await world.sweep(BATCH, seconds=61)
    groups = world.side.status()["control_groups"]
    assert groups == {"limit": 0, "ours": [], "others": []}


async def test_a_machine_without_any_says_so_and_does_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, NONE)
    world.config = CachePolicyConfig(enabled=True, mount=True)
    await world.sweep(BATCH)
    assert world.model.deeds == []
    assert world.side.status()["status"] == "no-cpu"
    assert list(await world.side.restore()) == []


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
    assert world.writes["resctrl.schemata", "refused"] == 0, "what is not written is not refused"
    assert any("changed 5 times by another program" in problem for problem in world.side.problems())
    assert standing(world).state == "yielded", "its threads are in the group, which bounds nothing now"
    world.config = CachePolicyConfig(enabled=True, reclaimed=replace(world.config.reclaimed, cat_range_end_percent=50))
    await world.sweep(BATCH)
    assert "L3:0=03f" in world.model.read(BE, "schemata")
    assert standing(world).state == "in place"


async def test_changes_long_ago_count_no_more_and_what_was_left_is_tried_again(world: World) -> None:
    """Such as a nightly job that resets all values (``pqos -R``)."""
    world.spawn(BATCH)
    await world.sweep(BATCH)
    for _ in range(8):
        world.model.write(BE, "schemata", "L3:0=fff\n")
        await world.sweep(BATCH, seconds=1800)
        assert "L3:0=00f" in world.model.read(BE, "schemata")
    for _ in range(6):
        world.model.write(BE, "schemata", "L3:0=fff\n")
        await world.sweep(BATCH)
    assert standing(world).state == "yielded"
    await world.sweep(BATCH, seconds=3600)
    assert "L3:0=00f" in world.model.read(BE, "schemata")
    assert (standing(world).state, world.side.problems()) == ("in place", [])


def standing(world: World) -> SettingStatus:
    return world.side.statuses[BATCH.group.path][RESCTRL_GROUP]


@pytest.mark.parametrize("at", ["the begin", "the groups"])
async def test_nothing_is_in_force_where_the_kernel_does_not_answer(
    world: World, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.spawn(BATCH)
    await world.sweep(BATCH)
    assert standing(world).state == "in place"

    def broken(*_given: object) -> None:
        raise CgroupBusyError("/sys/fs/resctrl", "read: EIO")

    with monkeypatch.context() as patch:
        patch.setattr(ControlGroups, "foreign" if at == "the begin" else "of_others", broken)
        await world.sweep(BATCH)
        status = standing(world)
        assert (status.state, status.actual) == ("unreadable", None)
        assert "EIO" in status.detail
    await world.sweep(BATCH)
    assert standing(world).state == "in place"


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
    side: AuxiliaryActuator = world.side
    batch = world.spawn(BATCH)
    await nursery.start(side.run)
    side.planned(world.situation(BATCH))
    await until(lambda: world.places(batch)[0] != MOUNT)


async def test_a_look_that_changes_nothing_does_not_wake_it(world: World, nursery: trio.Nursery) -> None:
    world.config = varied(NO_MONITOR, sweep_s=300)
    await nursery.start(world.side.run)
    world.side.planned(world.situation(BATCH))
    await until(lambda: world.side.status()["sweeps"] == 1)
    world.side.planned(world.situation(BATCH))
    await trio.sleep(0.5)
    assert world.side.status()["sweeps"] == 1
    world.side.planned(world.situation(BATCH, WEB))
    await until(lambda: world.side.status()["sweeps"] == 2)


async def test_a_change_of_the_plan_is_not_one_by_another_program(world: World) -> None:
    world.spawn(BATCH)
    await world.sweep(BATCH)
    for end_percent in (50, 60, 70, 80, 90, 100):
        reclaimed = replace(world.config.reclaimed, cat_range_end_percent=end_percent)
        world.config = CachePolicyConfig(enabled=True, reclaimed=reclaimed)
        await world.sweep(BATCH)
    assert [event.kind for event in world.ledger.events_after(0) if event.kind == "foreign"] == []
