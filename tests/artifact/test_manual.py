"""The manual pages: rendered from docs/, without a warning of the programs that show them, within 80 columns."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("bypassd.8", "bypassctl.1")


def load() -> ModuleType:
    """The renderer, which is in no package."""
    spec = importlib.util.spec_from_file_location("manual", ROOT / "deploy/artifact/manual.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MANUAL = load()


def render(page: str) -> str:
    text = (ROOT / f"docs/{page}.md").read_text()
    return str(MANUAL.roff(text, "2026-01-02", "bypassd 1.0"))


def check(*command: str | Path) -> str:
    """Run a program that must succeed and write no warning; its output."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"NOT RUN: {command[0]} is not installed")
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_mandoc_has_nothing_to_say_about_a_page(page: str, tmp_path: Path) -> None:
    (tmp_path / page).write_text(render(page))
    assert check("mandoc", "-Tlint", tmp_path / page) == ""


@pytest.mark.parametrize("page", PAGES)
def test_man_shows_a_page_within_80_columns_and_without_warnings(page: str, tmp_path: Path) -> None:
    (tmp_path / page).write_text(render(page))
    shown = check("man", "--warnings", "-E", "UTF-8", "-l", tmp_path / page)
    # A word of more than 60 characters, such as a path, cannot be broken.
    assert [line for line in shown.splitlines() if len(line) > 80 and max(map(len, line.split())) < 60] == []
    headings = re.findall(r"^## (.*)$", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE)
    assert [line for line in shown.splitlines() if line.isupper() and line[0] != " "] == [h.upper() for h in headings]


def test_whatis_finds_every_program(tmp_path: Path) -> None:
    for page in PAGES:
        (tmp_path / page).write_text(render(page))
    names = re.findall(r'"([\w-]+) - ', check("lexgrog", *(tmp_path / page for page in PAGES)))
    assert names == ["bypassd", "bypassctl", "state-dump"]


def lines(markdown: str) -> list[str]:
    """The lines below the head of a page."""
    return str(MANUAL.roff(f"# x(1)\n\n{markdown}", "2026-01-02", "x 1")).splitlines()[3:]


def test_a_table_becomes_a_list() -> None:
    assert lines("| a | b | c |\n|---|---|---|\n| `-n` | two | three |\n| m | | only |") == [
        *(".TP", r"\fB\-n\fR", "two; c: three", ".TP", "m", "c: only")
    ]


def test_no_text_is_a_request_or_an_escape() -> None:
    assert lines(".so /etc/passwd\n'x \\n `\\*(x` [ü](y.md)") == [
        *(".PP", r"\&.so /etc/passwd \(aqx \en \fB\e*(x\fR \fI\[u00FC]\fR")
    ]
    assert lines("    .ex 'a\n\n    -b") == [".PP", ".RS 2", ".nf", r"\&.ex \(aqa", "", r"\-b", ".fi", ".RE"]


def test_a_long_command_in_an_example_stays_one_command(tmp_path: Path) -> None:
    command = "    # printf %s\\\\n " + " ".join(f"word-{number}" for number in range(30))
    (tmp_path / "x.1").write_text("\n".join([".TH X 1 2026-01-02", ".nh", *lines(command)]))
    shown = check("man", "-E", "ASCII", "-l", tmp_path / "x.1")
    script = "\n".join(line[7:] for line in shown.splitlines() if "rintf" in line or "word" in line).strip()
    assert script.startswith("# ")
    output = subprocess.run(["sh", "-c", script[2:]], capture_output=True, text=True, check=True).stdout
    assert output.split() == [f"word-{number}" for number in range(30)]


@pytest.mark.parametrize("text", ["# no section", "## x(1)", "# x(1)\n\n> a quote", "# x(1)\n\n![a](b)"])
def test_what_the_pages_do_not_have_yet_is_an_error(text: str) -> None:
    with pytest.raises(MANUAL.ManualError):
        MANUAL.roff(text, "2026-01-02", "x 1")
