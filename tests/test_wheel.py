"""The wheel as it would be installed: built from a copy of the tree, without network."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import bytecode

PROJECT = Path(__file__).parents[1]
PACKAGES = ("cgroupfs", "resctrl", "state", "reconciler")
OUR_NAMES = {*PACKAGES, "bypassd", "bypassd_main"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    tree = directory / "tree"
    tree.mkdir()
    for name in (*PACKAGES, "deploy"):
        shutil.copytree(PROJECT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(PROJECT / name, tree)
    # What it says is of no concern here.
    (tree / "README.md").touch()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=60)
    (built,) = (directory / "dist").glob("*.whl")
    return built


def test_the_top_level_of_the_wheel_has_just_two_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if ".dist-info" not in name and ".data" not in name} == {"bypassd", "bypassd_main.py"}
    inside = {name.split("/")[1] for name in names if name.startswith("bypassd/")}
    assert inside == set(PACKAGES)
    assert not [name for name in names if "/test" in name]


def test_the_wheel_carries_the_unit_the_configuration_the_page_and_what_monitors_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        data = {name.partition("data/")[2] for name in archive.namelist() if ".data/" in name}
        assert "bypassd/reconciler/web/page.html" in archive.namelist()
    files = ("bypassd.service", "config.yaml", "alert-rules.yaml", "grafana-dashboard.json")
    completion = ("completion/bypassctl.bash", "completion/_bypassctl")
    assert data == {f"data/share/bypassd/{name}" for name in (*files, *completion)}


def test_the_installed_programs_find_their_packages(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert archive.read(entry).decode().split() == [
            "[console_scripts]",
            *("bypassctl", "=", "bypassd_main:bypassctl"),
            *("bypassd", "=", "bypassd_main:bypassd"),
            *("state-dump", "=", "bypassd_main:state_dump"),
        ]
    code = "import sys, bypassd_main; sys.argv = ['bypassd', '--version']; sys.exit(bypassd_main.bypassd())"
    bytecode.as_old_as_the_projects(tmp_path / "bypassd")
    with bytecode.kept_for(tmp_path / "bypassd") as environment:
        environ = {**environment, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd="/", env=environ, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (0, f"bypassd {importlib_version(wheel)}\n")


def importlib_version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def test_no_dependency_ships_a_name_of_ours() -> None:
    taken = {
        (distribution.name, file.parts[0])
        for distribution in importlib.metadata.distributions()
        if distribution.name != "bypassd"
        for file in distribution.files or ()
        if file.parts[0].removesuffix(".py") in OUR_NAMES
    }
    assert taken == set()


def test_the_daemon_starts_no_other_program_while_it_imports_its_libraries() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(PROJECT / "deploy")!r})
sys.argv = ["bypassd", "run", "--config", "/nonexistent/config.yaml"]
started = []
sys.addaudithook(lambda event, what: started.append(what[0]) if event == "subprocess.Popen" else None)
import bypassd_main
code = bypassd_main.bypassd()
import ctypes.util, inotify_simple
ctypes.CDLL(ctypes.util.find_library("c")).getpid()
assert "trio" in sys.modules
print(code, started)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "2 []\n"
