"""A test that fails beside the other parts of `make test` decides by a second run, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again

STEADY = "def test_steady(): pass\n"
ONCE = """
from pathlib import Path
seen = Path(__file__).with_suffix(".seen")
def test_once():
    if not seen.exists():
        seen.touch()
        raise OSError("starved")
"""
ALWAYS = "def test_always(): assert not 1\n"
MANY = "import pytest\n@pytest.mark.parametrize('i', range(6))\ndef test_many(i): assert i < 0\n"
FIXTURE = "import pytest\n@pytest.fixture\ndef broken(): raise OSError\ndef test_needs(broken): pass\n"
UNREADABLE = "import no_such_module\n"


def _python(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": root,
        "PYTEST_ADDOPTS": "-q -p no:cacheprovider -o addopts=",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)


def _part(where: Path, *sources: str) -> tuple[int, Path]:
    """A part of `make test` with a file for each of the sources: its exit code, and the directory of the names."""
    (where / "pytest.ini").write_text("[pytest]\n")
    (names := where / "names").mkdir()
    for number, source in enumerate(sources):
        (where / f"test_{number}.py").write_text(source)
    return _python(where, "pytest", "-p", "tests.again", f"--again={names / 'part'}").returncode, names


def test_a_few_failures_are_run_again_and_decide_then(tmp_path: Path) -> None:
    code, names = _part(tmp_path, STEADY, ONCE, ALWAYS, FIXTURE)
    failed = ["test_1.py::test_once", "test_2.py::test_always", "test_3.py::test_needs"]
    assert (code, (names / "part").read_text().split()) == (0, failed)
    alone = _python(tmp_path, "tests.again", str(names))
    assert alone.returncode == 1, alone.stdout + alone.stderr
    assert "1 failed, 1 passed, 1 error" in alone.stdout


def test_an_unsteady_test_is_named(tmp_path: Path) -> None:
    code, names = _part(tmp_path, ONCE)
    done = _python(tmp_path, "tests.again", str(names))
    assert (code, done.returncode) == (0, 0)
    assert "test_0.py::test_once" in done.stdout.partition("Unsteady")[2]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (MANY, 1),
        (UNREADABLE, 2),
        ("", 5),  # a part without tests is a mistake of the Makefile
    ],
)
def test_everything_else_is_decided_by_the_first_run(tmp_path: Path, source: str, code: int) -> None:
    assert _part(tmp_path, source)[0] == code
    assert list((tmp_path / "names").iterdir()) == []


def test_without_names_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert again.run(tmp_path, []) == 0
    assert not capsys.readouterr().out
