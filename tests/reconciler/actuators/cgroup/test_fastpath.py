"""Whether a container's last write came before its program: by the init's name, or by a file of the runtime."""

from pathlib import Path

import pytest

from reconciler.actuators.cgroup.fastpath import FastPath, FastResult, FastWrite


@pytest.mark.parametrize(
    ("comm", "waits", "before"),
    [
        ("runc:[2:INIT]", False, True),
        ("crun", True, True),
        ("3", True, True),
        ("crun", False, False),
        ("app", False, False),
    ],
)
def test_the_runtimes_file_proves_what_the_name_of_cruns_init_does_not(
    tmp_path: Path, comm: str, waits: bool, before: bool
) -> None:
    results: list[FastResult] = []
    fastpath = FastPath(results.append, waits=lambda name: waits and name == "a", root=str(tmp_path))
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "comm").write_text(f"{comm}\n")
    (tmp_path / "cgroup.procs").write_text("7\n")
    (tmp_path / "cpu.shares").write_text("1024")
    write = FastWrite(str(tmp_path), "cpu.shares", "2", ("cpu", "/g", "cpu.shares"))
    fastpath.prepare("a", [write], procs=str(tmp_path), settled=False)
    assert fastpath.execute("a", 0.0)
    assert [result.before_exec for result in results] == [before]
