"""A restore with groups that a tenant has made inside a container: their own sets are restored with the container's."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import trio

from cgroupfs.cpuset import CpuSet
from cgroupfs.steps import WriteStep
from cgroupfs.writer import KernelWriter, StepOutcome
from reconciler.actuators.cgroup.restore import restore_all
from state.entry import RestoreOutcome
from tests.reconciler.actuators.acting import GROUP, UID, Acting, make_node

DOCKER = f"{GROUP}/docker"
INNER, LATE = f"{DOCKER}/{'cd' * 32}", f"{DOCKER}/{'ee' * 32}"


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[Acting]:
    kernel, hierarchy = make_node(tmp_path)
    life = Acting(kernel, hierarchy, tmp_path)
    kernel.make_group(INNER)
    yield life
    life.close()


async def narrowed(acting: Acting, cpus: str) -> None:
    for _ in range(3):
        await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse(cpus)})])


async def restored(acting: Acting, *, only: str | None = None) -> dict[str, RestoreOutcome]:
    writer = KernelWriter(acting.hierarchy, files=acting.kernel)
    results = await restore_all(acting.hierarchy, acting.ledger, writer, files=acting.kernel, only=only)
    return {result.path: result.undo for result in results}


def sets(acting: Acting, *paths: str) -> list[str]:
    return [acting.read(path, "cpu.set") for path in paths]


@pytest.mark.parametrize("only", [None, UID])
async def test_narrowed_groups_and_copies_made_since_are_restored(acting: Acting, only: str | None) -> None:
    acting.write(INNER, "cpu.set", "0,3")
    await narrowed(acting, "3")
    acting.kernel.make_group(LATE)
    assert sets(acting, GROUP, DOCKER, INNER, LATE) == ["3"] * 4
    done = await restored(acting, only=only)
    assert sets(acting, GROUP, DOCKER, INNER, LATE) == ["0-3", "0-3", "0,3", "0-3"]
    assert done == dict.fromkeys((GROUP, DOCKER, INNER, LATE), RestoreOutcome.RESTORED)
    assert len(acting.ledger) == 0
    assert await restored(acting, only=only) == {}


async def test_a_group_that_the_tenant_has_set_or_removed_since_is_left_to_it(acting: Acting) -> None:
    await narrowed(acting, "2-3")
    acting.write(INNER, "cpu.set", "3")
    done = await restored(acting)
    assert sets(acting, GROUP, DOCKER, INNER) == ["0-3", "0-3", "3"]
    assert done[INNER] is RestoreOutcome.FOREIGN
    await narrowed(acting, "2")
    acting.kernel.remove_group(INNER)
    acting.kernel.make_group(INNER)
    acting.write(INNER, "cpu.set", "2")
    done = await restored(acting)
    assert sets(acting, GROUP, DOCKER) == ["0-3", "0-3"]
    assert RestoreOutcome.REFUSED not in done.values()


async def test_a_container_that_shrinks_back_takes_the_groups_inside_along(acting: Acting) -> None:
    for path in (INNER, DOCKER, GROUP):
        acting.write(path, "cpu.set", "0-1")
    await narrowed(acting, "1-3")
    assert sets(acting, GROUP, DOCKER, INNER) == ["1-3", "1", "1"]
    acting.kernel.make_group(LATE)
    acting.kernel.make_group(wide := f"{GROUP}/wide")
    assert sets(acting, LATE, wide) == ["1", "1-3"]
    assert RestoreOutcome.REFUSED not in (await restored(acting)).values()
    assert sets(acting, GROUP, DOCKER, INNER, LATE, wide) == ["0-1"] * 5


async def many(acting: Acting, number: int) -> list[str]:
    """The container narrowed with so many groups inside."""
    paths = [f"{DOCKER}/{index:064x}" for index in range(number)]
    for path in paths:
        acting.kernel.make_group(path)
    for _ in range(10 + number // 8):
        await narrowed(acting, "3")
        if {*sets(acting, GROUP, *paths)} == {"3"}:
            return paths
    raise AssertionError("not narrowed")


async def test_many_groups_are_restored_in_parts_and_passes_run_in_between(acting: Acting) -> None:
    paths = await many(acting, 600)
    seen: list[tuple[str, int, int]] = []

    async def between() -> None:
        await trio.lowlevel.checkpoint()
        wide = sum(text == "0-3" for text in sets(acting, *paths))
        seen.append((acting.read(GROUP, "cpu.set"), wide, len(acting.ledger)))

    writer = KernelWriter(acting.hierarchy, files=acting.kernel)
    results = await restore_all(acting.hierarchy, acting.ledger, writer, files=acting.kernel, between=between)
    assert {*sets(acting, GROUP, DOCKER, INNER, *paths)} == {"0-3"}
    assert {result.undo for result in results} == {RestoreOutcome.RESTORED}
    assert len(results) == 603
    assert all(text == "0-3" for text, _, _ in seen), "the container comes first"
    parts = [wide for _, wide, _ in seen if wide]
    assert all(after - before <= 128 for before, after in itertools.pairwise(parts))
    assert [rows for _, wide, rows in seen if wide == 600] == [0], "what is restored is recorded at once"
    assert any(0 < rows < 600 for _, _, rows in seen)


async def test_the_writers_deadline_is_for_a_part_and_not_for_all_of_them(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it cut off stayed narrow."""
    paths = await many(acting, 400)
    writer = KernelWriter(acting.hierarchy, files=acting.kernel)
    parts: list[int] = []
    perform = writer.perform

    async def counted(steps: Sequence[WriteStep], inodes: Mapping[str, int] | None = None) -> list[StepOutcome]:
        parts.append(len(steps))
        return await perform(steps, inodes)

    monkeypatch.setattr(writer, "perform", counted)
    results = await restore_all(acting.hierarchy, acting.ledger, writer, files=acting.kernel)
    assert {result.undo for result in results} == {RestoreOutcome.RESTORED}
    assert {*sets(acting, GROUP, *paths)} == {"0-3"}
    assert (sum(parts), max(parts) <= 128) == (403, True)


@pytest.mark.parametrize("writes", range(5))
async def test_a_restore_that_is_cut_short_is_completed_by_the_next_one(
    tmp_path: Path, acting: Acting, writes: int
) -> None:
    acting.write(INNER, "cpu.set", "0,3")
    await narrowed(acting, "3")
    acting.kernel.make_group(LATE)
    acting.ledger.flush()

    done = 0
    real = acting.kernel.write

    def write(directory: str, file: str, text: str) -> None:
        nonlocal done
        if done >= writes:
            raise KeyboardInterrupt
        done += 1
        real(directory, file, text)

    acting.kernel.write = write  # type: ignore[method-assign]
    if writes < 4:
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
            await restored(acting)
    del acting.kernel.write
    acting.close()
    again = Acting(acting.kernel, acting.hierarchy, tmp_path)
    await restored(again)
    assert sets(again, GROUP, DOCKER, INNER, LATE) == ["0-3", "0-3", "0,3", "0-3"]
    again.close()
