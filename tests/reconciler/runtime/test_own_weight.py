"""The weight of the daemon's first instructions: which group gets it, and which does not."""

from pathlib import Path

import pytest

from reconciler.runtime import own_weight
from reconciler.runtime.stint_timer import StintTimer

CFS, EEVDF = "5.10.0-32-amd64", "6.12.1"


class Process:
    """Its files below /proc, and its CPU hierarchy."""

    def __init__(self, directory: Path, group: str, *, version: int = 1, weight: str = "1024\n") -> None:
        mount = directory / "cpu"
        top = mount / group.strip("/").split("/")[0]
        top.mkdir(parents=True)
        self.file = top / ("cpu.shares" if version == 1 else "cpu.weight")
        self.file.write_text(weight)
        kind = f"cgroup {mount} cgroup rw,cpu,cpuacct 0 0" if version == 1 else f"cgroup2 {mount} cgroup2 rw 0 0"
        self.proc = directory / "proc"
        self.proc.mkdir()
        (self.proc / "mounts").write_text(f"proc /proc proc rw 0 0\n{kind}\n")
        (self.proc / "cgroup").write_text(f"2:cpu,cpuacct:{group}\n0::/\n" if version == 1 else f"0::{group}\n")

    def begins(self, release: str = CFS) -> str:
        """The weight after `own_weight.begin`."""
        beginning = own_weight.Beginning()
        before = self.file.read_text()
        own_weight.begin(str(self.proc), release, beginning)
        assert beginning.lowered == (self.file.read_text() != before)
        return self.file.read_text().strip()


@pytest.mark.parametrize(("version", "usual", "expected"), [(1, "1024\n", "200"), (2, "100\n", "20")])
def test_the_own_group_begins_with_the_weight_of_late_work(
    tmp_path: Path, version: int, usual: str, expected: str
) -> None:
    assert Process(tmp_path, "/bypassd.slice/bypassd.service", version=version, weight=usual).begins() == expected


def test_a_start_that_is_paced_keeps_the_usual_weight_and_only_that_of_the_own_group_is_paced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced: list[str] = []
    timer = StintTimer()
    for group in ("/bypassd.slice/a", "/system.slice/a"):

        def pace(*, on: bool, group: str = group) -> bool:
            paced.append(group)
            return on

        monkeypatch.setattr(timer, "pace", pace)
        process = Process(tmp_path / str(len(group)), group)
        own_weight.begin(str(process.proc), CFS, timer=timer)
        assert process.file.read_text() == "1024\n"
    assert paced == ["/bypassd.slice/a"]


@pytest.mark.parametrize("group", ["/system.slice/bypassd.service", "/kubepods/burstable/podx", "/bypassd.slices/a"])
def test_a_group_of_others_keeps_its_weight(tmp_path: Path, group: str) -> None:
    assert Process(tmp_path, group).begins() == "1024"


def test_a_weight_of_the_administrator_and_one_on_eevdf_stay(tmp_path: Path) -> None:
    assert Process(tmp_path / "own", "/bypassd.slice/a", weight="300\n").begins() == "300"
    assert Process(tmp_path / "later", "/bypassd.slice/a").begins(EEVDF) == "1024"


def test_a_process_without_a_cpu_hierarchy_or_a_weight_begins_without_an_error(tmp_path: Path) -> None:
    process = Process(tmp_path, "/bypassd.slice/a")
    process.file.unlink()
    own_weight.begin(str(process.proc), CFS)
    (process.proc / "mounts").write_text("proc /proc proc rw 0 0\n")
    own_weight.begin(str(process.proc), CFS)
    own_weight.begin(str(tmp_path / "none"), CFS)
    assert not process.file.exists()
