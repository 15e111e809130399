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


@pytest.mark.parametrize(
    ("source", "first", "second"),
    [
        (STEADY, 0, 0),
        (ONCE, 0, 0),
        (ALWAYS, 0, 1),
        (FIXTURE, 0, 1),
        (MANY, 1, 0),  # decided by the first run
        (UNREADABLE, 2, 0),
        ("", 5, 0),  # a part without tests is a mistake of the Makefile
    ],
)
def test_a_few_failures_are_run_again_and_decide_then(tmp_path: Path, source: str, first: int, second: int) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(source)
    names = tmp_path / "names"
    names.mkdir()
    part = _python(tmp_path, "pytest", "-p", "tests.again", f"--again={names / 'part'}", "test_it.py")
    assert part.returncode == first, part.stdout + part.stderr
    if not list(names.iterdir()):
        assert second == 0  # as of no names: below
        return
    alone = _python(tmp_path, "tests.again", str(names))
    assert alone.returncode == second, alone.stdout + alone.stderr


def test_an_unsteady_test_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(STEADY)
    names = tmp_path / "names"
    names.mkdir()
    (names / "part").write_text("test_it.py::test_steady\n")
    done = _python(tmp_path, "tests.again", str(names))
    assert done.returncode == 0
    assert "test_it.py::test_steady" in done.stdout.partition("Unsteady")[2]


def test_without_names_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert again.run(tmp_path, []) == 0
    assert not capsys.readouterr().out
