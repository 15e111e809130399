"""Groups of the node's other programs: any user's containers are among them, in any number and depth."""

from pathlib import Path

import pytest

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.usage import UsageReader
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals import root_groups
from reconciler.signals.root_groups import RootGroups
from tests.fakes.kernel import FakeKernel


class CountingKernel(FakeKernel):
    """Counts listings, and the names that they return."""

    listings = 0
    longest = 0

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        names = super().groups(directory, most)
        self.listings += 1
        self.longest = max(self.longest, len(names))
        return names


@pytest.fixture
def kernel(tmp_path: Path) -> CountingKernel:
    made = CountingKernel("v1", root=str(tmp_path), cpus=2)
    made.install()
    return made


async def test_a_bounded_number_of_a_users_groups_is_read_for_its_processes(
    kernel: CountingKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_groups, "_DIRECTORIES", 50)
    hierarchy = Hierarchy.detect(str(tmp_path))
    for index in range(300):
        kernel.make_group(f"/docker/{index:064x}/system.slice")
    groups = RootGroups(hierarchy, UsageReader(hierarchy, ops=kernel), "/kubepods", files=kernel)
    read: list[str] = []
    real = kernel.read

    def reading(directory: str, file: str) -> str:
        read.append(str(directory))
        return real(directory, file)

    monkeypatch.setattr(kernel, "read", reading)
    await groups._waits._listed("/docker", TimeSlice())
    assert len(read) == 51
    assert kernel.listings <= 51
    assert kernel.longest <= 50


async def test_a_named_group_is_found_beside_very_many(
    kernel: CountingKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_groups, "_LISTED", 10)
    for index in range(40):
        kernel.make_group(f"/a{index:02}")
    kernel.make_group("/zz.slice")
    hierarchy = Hierarchy.detect(str(tmp_path))
    groups = RootGroups(hierarchy, UsageReader(hierarchy, ops=kernel), "/kubepods", files=kernel)
    known = await groups.sample(("/zz.slice", "/none.slice", "/a01/nested"))
    groups.close()
    assert "/zz.slice" in known.groups
    assert len(known.groups) == 11
    assert {path: why for path, why in known.refused.items() if "no such group" in why}.keys() == {
        "/none.slice",
        "/a01/nested",
    }
