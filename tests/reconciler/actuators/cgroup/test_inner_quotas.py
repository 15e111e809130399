"""A tenant's groups inside a container whose quotas v1 compares with those above them (docker, kind, systemd)."""

import time

import pytest

from reconciler.actuators.cgroup import control_files
from state.cpu import QuotaFloor
from tests.fakes.kernel import FakeKernel
from tests.reconciler.actuators.acting import BE, GROUP, POD, UID, Acting

DOCKER = f"{GROUP}/docker"
INNER = f"{DOCKER}/{'cd' * 32}"
UNIT = f"{GROUP}/system.slice/build.service"


def make_inner(acting: Acting, path: str, quota: int) -> None:
    acting.kernel.make_group(path)
    acting.write(path, "cpu.quota", str(quota))


async def be_quota(acting: Acting, quota: int, *, passes: int = 1) -> tuple[str, str | None]:
    """The quota and the status of besteffort after some passes with its retries due."""
    for _ in range(passes):
        acting.retry_now()
        await acting.actuator.apply([acting.target(BE, {"cpu.quota": quota})])
    return acting.read(BE, "cpu.quota"), acting.stood(BE, "cpu.quota")


@pytest.mark.parametrize("path", [INNER, UNIT, f"{GROUP}/docker"])
async def test_a_budget_below_an_inner_groups_quota_becomes_the_least_that_the_kernel_takes(
    acting: Acting, path: str
) -> None:
    make_inner(acting, path, 200_000)
    # The first pass reads the groups below, which nothing announces; the second one knows them.
    assert await be_quota(acting, 160_000, passes=2) == ("200000", "blocked")
    status = acting.judge.statuses.get((BE, "cpu.quota"))
    assert status is not None
    assert (status.wanted, status.actual) == ("160000", "200000")
    assert f"{path} inside it has 2 CPU" in status.detail
    assert acting.judge.control_files.floors[BE] == QuotaFloor(2_000, path)
    assert [kind for kind, _ in acting.alerts] == ["blocked"]
    # Another budget that it forbids as well is no further alert and no further write.
    writes = acting.files.count
    assert await be_quota(acting, 120_000, passes=2) == ("200000", "blocked")
    assert (acting.files.count, len(acting.alerts)) == (writes, 1)


async def test_the_budget_returns_when_the_inner_group_or_its_pod_has_gone(acting: Acting) -> None:
    make_inner(acting, INNER, 200_000)
    await be_quota(acting, 100_000, passes=2)
    acting.kernel.remove_group(DOCKER)
    assert await be_quota(acting, 100_000) == ("100000", "written")
    assert acting.judge.control_files.floors == {}


async def test_a_pod_that_goes_with_its_inner_groups_blocks_nothing(acting: Acting) -> None:
    make_inner(acting, INNER, 200_000)
    assert await be_quota(acting, 100_000, passes=2) == ("200000", "blocked")
    acting.kernel.remove_group(POD)
    acting.actuator.forget(POD)
    for budget in (100_000, 150_000, 120_000):
        assert await be_quota(acting, budget) == (str(budget), "written")


async def test_an_inner_quota_that_the_tenant_lowers_or_raises_counts_at_the_next_attempt(acting: Acting) -> None:
    make_inner(acting, INNER, 200_000)
    await be_quota(acting, 100_000, passes=2)
    acting.write(INNER, "cpu.quota", "150000")
    assert await be_quota(acting, 100_000, passes=2) == ("150000", "blocked")
    acting.write(INNER, "cpu.quota", "-1")
    assert await be_quota(acting, 100_000) == ("100000", "written")


async def test_the_least_quota_is_ours_and_is_restored(acting: Acting) -> None:
    make_inner(acting, INNER, 200_000)
    await be_quota(acting, 100_000, passes=2)
    await acting.actuator.apply([acting.target(BE, {})])
    assert acting.read(BE, "cpu.quota") == "-1"
    assert acting.ledger.group(BE) == []
    assert acting.judge.control_files.floors == {}


async def test_a_container_and_the_directory_above_take_the_least_together(acting: Acting) -> None:
    make_inner(acting, INNER, 200_000)
    for _ in range(3):
        acting.retry_now()
        await acting.actuator.apply(
            [acting.target(BE, {"cpu.quota": 100_000}), acting.target(GROUP, {"cpu.quota": 50_000})]
        )
    assert (acting.read(BE, "cpu.quota"), acting.read(GROUP, "cpu.quota")) == ("200000", "200000")
    assert (acting.stood(BE, "cpu.quota"), acting.stood(GROUP, "cpu.quota")) == ("blocked", "blocked")


async def test_thousands_of_inner_groups_are_read_over_several_passes(acting: Acting) -> None:
    kernel = acting.kernel
    for number in range(1_500):
        kernel.make_group(f"{DOCKER}/{number:064x}")
    acting.write(f"{DOCKER}/{1_499:064x}", "cpu.quota", "200000")
    assert acting.judge.control_files._unmanaged == {}
    reads: list[int] = []
    for _ in range(6):
        before = Counting.of(kernel)
        await be_quota(acting, 100_000)
        reads.append(before.count)
        before.end()
        if acting.stood(BE, "cpu.quota") == "blocked":
            break
        assert acting.stood(BE, "cpu.quota") == "due"
        assert UID in acting.judge.statuses.due(time.monotonic(), lambda _: False)
    assert acting.read(BE, "cpu.quota") == "200000"
    assert len(reads) == 4
    # Two files of each of at most 512 groups, and those of the groups above.
    assert max(reads) < 1_200
    assert acting.alerts[0][0] == "blocked"


class Counting:
    """Counts what is read."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.count = 0
        self._kernel, self._read = kernel, kernel.read

    @classmethod
    def of(cls, kernel: FakeKernel) -> "Counting":
        counting = cls(kernel)

        def read(directory: str, file: str) -> str:
            counting.count += 1
            return counting._read(directory, file)

        kernel.read = read  # type: ignore[method-assign]
        return counting

    def end(self) -> None:
        del self._kernel.read


async def test_values_of_groups_that_are_not_managed_expire(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    make_inner(acting, INNER, 200_000)
    await be_quota(acting, 100_000, passes=2)
    assert (INNER, "cpu.quota") in acting.judge.control_files._unmanaged
    monkeypatch.setattr(control_files, "_UNMANAGED_S", -1.0)
    await acting.actuator.apply([])
    assert acting.judge.control_files._unmanaged == {}
