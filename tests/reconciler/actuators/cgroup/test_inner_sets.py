"""Groups that a tenant has made inside a container follow its CPU set; afterwards their own set is restored."""

import errno
import time
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.actuators.cgroup import inner_groups
from reconciler.actuators.cgroup.inner_groups import InnerChange, InnerSet, ManagedSet, managed_above, plan_inner
from tests.reconciler.actuators.acting import GROUP, POD, Acting

DOCKER = f"{GROUP}/docker"
INNER = f"{DOCKER}/{'cd' * 32}"
UNIT = f"{GROUP}/system.slice/build.service"


def make_inner(acting: Acting, path: str, cpus: str | None = None) -> None:
    """As docker makes one: a copy of the set above, or one of its own."""
    acting.kernel.make_group(path)
    if cpus is not None:
        acting.write(path, "cpu.set", cpus)


async def container_on(acting: Acting, cpus: str | None, *, passes: int = 1) -> tuple[str, str | None]:
    """The container's set and status after some passes; None: bypassd has no wish any more."""
    for _ in range(passes):
        acting.retry_now()
        wanted = {} if cpus is None else {"cpu.set": CpuSet.parse(cpus)}
        await acting.actuator.apply([acting.target(GROUP, wanted)])
    return acting.read(GROUP, "cpu.set"), acting.stood(GROUP, "cpu.set")


def sets(acting: Acting, *paths: str) -> list[str]:
    return [acting.read(path, "cpu.set") for path in paths]


def later(acting: Acting) -> None:
    """It is time for the second reading."""
    for inside in acting.actuator._inner._inside.values():
        if inside.verify_at is not None:
            inside.verify_at = time.monotonic() - 1.0


# The plan, pure


def change(path: str, now: int, wanted: int, own: int, *, kept: bool = False, recorded: bool = False) -> InnerChange:
    return InnerChange(path, now, wanted, own, kept, recorded)


def test_a_group_keeps_what_its_parent_keeps_and_has_all_of_its_parents_set_where_none_is_left() -> None:
    managed = ManagedSet("/c", now=0b1111, wanted=0b1100, own=0b1111)
    groups = [
        InnerSet("/c/d", 0b1111),
        InnerSet("/c/d/e", 0b0110),
        InnerSet("/c/d/f", 0b0001),
        InnerSet("/c/g", 0b1000),
    ]
    assert plan_inner(managed, groups) == [
        change("/c/d", 0b1111, 0b1100, 0b1111),
        change("/c/d/e", 0b0110, 0b0100, 0b0110),
        change("/c/d/f", 0b0001, 0b1100, 0b0001),
    ]


def test_a_copy_of_the_narrowed_set_has_the_containers_own_and_a_pinned_group_is_remembered() -> None:
    managed = ManagedSet("/c", now=0b1100, wanted=0b1111, own=0b1111, copies=frozenset({0b1100}))
    assert plan_inner(managed, [InnerSet("/c/copy", 0b1100), InnerSet("/c/pinned", 0b1000)]) == [
        change("/c/copy", 0b1100, 0b1111, 0b1111)
    ]
    narrowing = ManagedSet("/c", now=0b1111, wanted=0b1100, own=0b1111)
    assert plan_inner(narrowing, [InnerSet("/c/pinned", 0b1100)]) == [
        change("/c/pinned", 0b1100, 0b1100, 0b1100, kept=True)
    ]
    assert plan_inner(managed, [InnerSet("/c/pinned", 0b1100, own=0b1100)]) == [
        change("/c/pinned", 0b1100, 0b1100, 0b1100, recorded=True)
    ]


def test_unset_groups_and_those_below_them_are_passed_over() -> None:
    managed = ManagedSet("/c", now=0b11, wanted=0b01, own=0b11)
    assert plan_inner(managed, [InnerSet("/c/d", 0), InnerSet("/c/d/e", 0)]) == []


def test_which_managed_group_a_group_is_inside_of() -> None:
    assert managed_above(INNER) == managed_above(UNIT) == GROUP
    assert managed_above(f"{POD}/crio-conmon-x.scope") == POD
    assert managed_above(GROUP) is managed_above(POD) is managed_above("/system.slice/x") is None


# The actuator


@pytest.mark.parametrize("path", [INNER, UNIT])
async def test_a_container_leaves_a_cpu_that_groups_inside_had(acting: Acting, path: str) -> None:
    above = path.rpartition("/")[0]
    make_inner(acting, path)
    acting.write(path, "cpu.set", "0,2")
    assert await container_on(acting, "2-3") == ("2-3", "written")
    assert sets(acting, above, path) == ["2-3", "2"]
    assert acting.alerts == []
    order = [name for name, _, code in acting.kernel.writes if name.endswith("cpuset.cpus") and not code][-3:]
    assert [name.rpartition("/")[0].rpartition("/cpuset")[2] for name in order] == [path, above, GROUP]
    rows = {entry.path: (entry.original, entry.seen, entry.pod_uid) for entry in acting.ledger.control_files()}
    assert rows[path][:2] == ("0,2", "2")
    assert rows[path][2] == rows[GROUP][2]


async def test_a_group_with_none_of_the_cpus_moves_to_all_of_them_and_back(acting: Acting) -> None:
    make_inner(acting, INNER, "0")
    assert await container_on(acting, "2-3") == ("2-3", "written")
    assert sets(acting, INNER) == ["2-3"]
    assert await container_on(acting, "0-1", passes=2) == ("0-1", "in place")
    assert sets(acting, DOCKER, INNER) == ["0-1", "0"]
    assert {entry.path for entry in acting.ledger.control_files()} == {GROUP, DOCKER}


async def test_when_the_container_grows_the_groups_inside_grow_after_it(acting: Acting) -> None:
    make_inner(acting, INNER)
    await container_on(acting, "3")
    # Made meanwhile: docker copies the narrowed set.
    make_inner(acting, copy := f"{DOCKER}/{'ee' * 32}")
    assert sets(acting, DOCKER, INNER, copy) == ["3", "3", "3"]
    assert await container_on(acting, "1-3") == ("1-3", "written")
    assert sets(acting, DOCKER, INNER, copy) == ["1-3", "1-3", "1-3"]
    await container_on(acting, None)
    assert sets(acting, GROUP, DOCKER, INNER, copy) == ["0-3"] * 4
    assert acting.ledger.group(INNER) == acting.ledger.group(copy) == acting.ledger.group(GROUP) == []


async def test_a_group_that_its_tenant_pinned_to_the_same_cpus_is_no_copy(acting: Acting) -> None:
    make_inner(acting, INNER, "3")
    await container_on(acting, "3")
    await container_on(acting, "0-3", passes=2)
    await container_on(acting, None, passes=2)
    assert sets(acting, DOCKER, INNER) == ["0-3", "3"]
    later(acting)
    await container_on(acting, None)
    assert list(acting.ledger.control_files()) == []


async def test_what_the_tenant_writes_since_is_its_own(acting: Acting) -> None:
    make_inner(acting, INNER)
    await container_on(acting, "2-3")
    acting.write(INNER, "cpu.set", "2")
    await container_on(acting, "0-3", passes=2)
    assert sets(acting, DOCKER, INNER) == ["0-3", "2"]
    await container_on(acting, None, passes=2)
    assert sets(acting, DOCKER, INNER) == ["0-3", "2"]


async def test_a_group_that_goes_or_is_made_again_meanwhile_fails_nothing(acting: Acting) -> None:
    make_inner(acting, INNER, "0-1")
    await container_on(acting, "1-3")
    assert sets(acting, INNER) == ["1"]
    acting.kernel.remove_group(INNER)
    make_inner(acting, INNER, "1-2")
    assert await container_on(acting, "2-3") == ("2-3", "written")
    assert sets(acting, INNER) == ["2"]
    acting.kernel.remove_group(DOCKER)
    assert (await container_on(acting, None))[0] == "0-3"


async def test_a_group_that_is_made_in_the_middle_of_the_change_is_found_by_the_second_reading(acting: Acting) -> None:
    make_inner(acting, INNER)
    await container_on(acting, "3")
    await container_on(acting, "2-3")
    # Its runtime read the parent's set before and writes it now.
    make_inner(acting, late := f"{DOCKER}/{'ee' * 32}", "3")
    later(acting)
    await container_on(acting, "2-3")
    assert sets(acting, late) == ["2-3"]
    later(acting)
    await container_on(acting, "2-3", passes=2)
    assert acting.actuator._inner._inside == {}


async def test_a_refusal_by_a_group_that_appears_in_between_is_planned_anew(acting: Acting) -> None:
    make_inner(acting, INNER)
    real = acting.writer.perform

    async def late(steps: object, inodes: object = None) -> object:
        make_inner(acting, f"{GROUP}/fresh", "0")
        return await real(steps, inodes)  # type: ignore[arg-type]

    acting.actuator._writer.perform = late  # type: ignore[method-assign, assignment]
    assert (await container_on(acting, "2-3"))[1] == "due"
    acting.actuator._writer.perform = real  # type: ignore[method-assign]
    assert await container_on(acting, "2-3") == ("2-3", "written")
    assert sets(acting, f"{GROUP}/fresh") == ["2-3"]
    assert acting.alerts == []


async def test_memory_nodes_of_groups_inside_follow(acting: Acting) -> None:
    kernel, hierarchy = acting.kernel, acting.hierarchy
    kernel.nodes = 2
    for tree in kernel.trees:
        if tree.controllers[0].name == "cpuset":
            tree.root.mems = 3
    mems = hierarchy.directory("cpuset", "/")
    for path in ("/kubepods", "/kubepods/besteffort", POD, GROUP):
        kernel.write(f"{mems.rstrip('/')}{path}", "cpuset.mems", "0-1")
    make_inner(acting, INNER)
    await acting.actuator.apply([acting.target(GROUP, {"cpu.mems": CpuSet.parse("1")})])
    assert kernel.read(hierarchy.directory("cpuset", GROUP), "cpuset.mems").strip() == "1"
    assert kernel.read(hierarchy.directory("cpuset", INNER), "cpuset.mems").strip() == "1"
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert kernel.read(hierarchy.directory("cpuset", INNER), "cpuset.mems").strip() == "0-1"


@pytest.mark.parametrize("mode", ["v2"])
async def test_an_old_kernels_v2_refuses_as_well_and_is_answered_the_same(acting: Acting) -> None:
    acting.kernel.release = (5, 10)
    make_inner(acting, INNER)
    acting.write(DOCKER, "cpu.set", "0-1")
    acting.write(INNER, "cpu.set", "0")
    assert (await container_on(acting, "2-3"))[1] == "due"
    assert await container_on(acting, "2-3") == ("2-3", "written")
    assert sets(acting, DOCKER, INNER) == ["2-3", "2-3"]
    await container_on(acting, None)
    assert sets(acting, DOCKER, INNER) == ["0-1", "0"]


async def test_twelve_hundred_groups_take_many_passes_of_bounded_work(acting: Acting) -> None:
    number = 1_200
    for index in range(number):
        acting.kernel.make_group(f"{DOCKER}/{index:064x}")
    acting.write(f"{DOCKER}/{0:064x}", "cpu.set", "0")
    passes, most_reads, most_writes, most_listings = 0, 0, 0, 0
    read, listed = acting.kernel.read, acting.kernel.groups
    reads = listings = 0

    def counted(directory: str, file: str) -> str:
        nonlocal reads
        reads += 1
        return read(directory, file)

    def listing(directory: str, most: int | None = None) -> list[str]:
        nonlocal listings
        listings += 1
        return listed(directory, most)

    acting.kernel.read = counted  # type: ignore[method-assign]
    acting.kernel.groups = listing  # type: ignore[method-assign]
    while acting.stood(GROUP, "cpu.set") != "written" and passes < 200:
        reads, listings, writes = 0, 0, acting.files.count
        await container_on(acting, "2-3")
        passes += 1
        most_reads, most_writes = max(most_reads, reads), max(most_writes, acting.files.count - writes)
        most_listings = max(most_listings, listings)
        if acting.stood(GROUP, "cpu.set") == "due":
            assert acting.judge.next_check() is not None
    # Reading takes three passes, writing ten or more, as its time allows.
    assert 10 <= passes <= 3 + number / 8
    assert most_writes <= inner_groups.WRITTEN_AT_ONCE + 1
    assert most_reads <= inner_groups.READ_AT_ONCE + 2 * inner_groups.WRITTEN_AT_ONCE + 50
    assert most_listings <= inner_groups.READ_AT_ONCE + 10
    assert sets(acting, GROUP, DOCKER, f"{DOCKER}/{0:064x}", f"{DOCKER}/{1:064x}") == ["2-3"] * 4
    # Growing needs no wait: the container's set is written in the first pass.
    await container_on(acting, "0-3")
    assert sets(acting, GROUP) == ["0-3"]
    await container_on(acting, "0-3", passes=3 + number // 8)
    assert sets(acting, DOCKER, f"{DOCKER}/{0:064x}", f"{DOCKER}/{number - 1:064x}") == ["0-3", "0", "0-3"]


async def test_the_slower_the_kernel_the_fewer_groups_are_written_in_one_pass(acting: Acting) -> None:
    """A write of a v1 set costs as much as the machine has sets: a look is not longer for it."""
    for index in range(200):
        acting.kernel.make_group(f"{DOCKER}/{index:064x}")
    write = acting.kernel.write

    def slow(directory: str, file: str, text: str) -> None:
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass
        write(directory, file, text)

    acting.kernel.write = slow  # type: ignore[method-assign]
    numbers: list[int] = []
    while acting.stood(GROUP, "cpu.set") != "written" and len(numbers) < 100:
        before = acting.files.count
        await container_on(acting, "2-3")
        numbers.append(acting.files.count - before)
    assert sum(numbers) == 202
    assert numbers[0] <= 30, "before it is measured"
    assert max(numbers[3:]) <= 10


async def test_a_group_that_is_written_twice_is_counted_once(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU in common: those with groups below them have both sets in between."""
    monkeypatch.setattr(inner_groups, "WRITTEN_AT_ONCE", 8)
    acting.write(GROUP, "cpu.set", "0-1")
    for index in range(10):
        make_inner(acting, f"{DOCKER}/{index:064x}/below")
    assert await container_on(acting, "2-3") == ("0-3", "due")
    status = acting.judge.statuses.get((GROUP, "cpu.set"))
    assert status is not None
    assert status.detail == "21 groups inside are changed first"


async def test_of_two_containers_each_has_its_turn(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the one with the most groups would keep the other from its own."""
    monkeypatch.setattr(inner_groups, "WRITTEN_AT_ONCE", 10)
    other = f"{POD}/{'ef' * 32}"
    for path in (GROUP, other):
        acting.kernel.make_group(path)
        acting.write(path, "cpu.set", "0-3")
        for index in range(40):
            acting.kernel.make_group(f"{path}/docker/{index:064x}")
    wanted = {"cpu.set": CpuSet.parse("2-3")}
    left: list[tuple[int, int]] = []
    for _ in range(20):
        acting.retry_now()
        await acting.actuator.apply([acting.target(path, wanted) for path in (GROUP, other)])
        wide = [
            sum(acting.read(f"{path}/docker/{index:064x}", "cpu.set") == "0-3" for index in range(40))
            for path in (GROUP, other)
        ]
        left.append((wide[0], wide[1]))
    assert left[-1] == (0, 0)
    assert all(abs(first - second) <= 20 for first, second in left), left


async def test_after_a_restart_in_the_middle_the_groups_inside_grow_with_the_next_start(
    tmp_path: Path, acting: Acting
) -> None:
    make_inner(acting, INNER)
    await container_on(acting, "3")
    acting.ledger.flush()
    acting.write(GROUP, "cpu.set", "0-3")
    acting.ledger.wrote(("cpuset", GROUP, "cpuset.cpus"), before=None, after="0-3")
    acting.ledger.flush()
    acting.close()
    again = Acting(acting.kernel, acting.hierarchy, tmp_path)
    await container_on(again, "0-3")
    assert sets(again, DOCKER, INNER) == ["0-3", "0-3"]
    again.close()


async def test_in_observe_mode_and_under_a_hold_nothing_inside_is_written(acting: Acting) -> None:
    make_inner(acting, INNER)
    acting.judge.mode.set_enforce(enforce=False)
    assert (await container_on(acting, "3"))[1] == "would write"
    assert sets(acting, DOCKER, INNER) == ["0-3", "0-3"]
    assert list(acting.ledger.control_files()) == []


async def test_a_group_that_cannot_be_narrowed_is_named_once_and_tried_after_growing_waits(acting: Acting) -> None:
    make_inner(acting, INNER)
    real, directory = acting.kernel.write, acting.hierarchy.directory("cpuset", INNER)

    def write(at: str, file: str, text: str) -> None:
        if at == directory:
            raise OSError(errno.EBUSY, "a deadline task")
        real(at, file, text)

    acting.kernel.write = write  # type: ignore[method-assign, assignment]
    waits = []
    for _ in range(8):
        await container_on(acting, "2-3")
        at = acting.judge.next_check()
        assert at is not None
        waits.append(round(at - time.monotonic()))
    assert acting.stood(GROUP, "cpu.set") == "refused"
    status = acting.judge.statuses.get((GROUP, "cpu.set"))
    assert status is not None
    assert f"{INNER.rpartition('/')[2]}/cpuset.cpus: write '2-3': EBUSY" in status.detail
    assert waits == [0, 2, 4, 8, 16, 32, 60, 60]
    assert [kind for kind, _ in acting.alerts] == ["refused"]
    del acting.kernel.write
    assert await container_on(acting, "2-3") == ("2-3", "written")
    assert sets(acting, DOCKER, INNER) == ["2-3", "2-3"]
