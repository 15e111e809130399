"""Every command line in the documents has a command, options and files that exist, by the real parsers.

In a block of code a line of bypassctl or bypassd is parsed whole. In a line of text, where arguments are left out
(`bypassctl hold`, `bypassctl report --gate`), the command and its options must exist.
"""

import argparse
import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from reconciler.cli import main, options
from reconciler.cli.main import _command_first
from reconciler.daemon import main as daemon
from tests.bench import __main__ as bench
from tests.node import __main__ as demo
from tests.sourcetrees import ROOT, nodes

DOCUMENTS: Final = (
    ROOT / "README.md",
    ROOT / "deploy/alert-rules.yaml",
    *sorted((ROOT / "docs").glob("*.md")),
)
CONTRIBUTING: Final = " ".join((ROOT / "docs/contributing.md").read_text().split())
_PROGRAM: Final = re.compile(
    r"(?<![\w./=-])(?:bypassctl|bypassd|state-dump|install\.sh|make|python -m [\w.]+|pytest|tests/vm/\w+\.sh)(?=\s|$)"
)
_PROMPT: Final = re.compile(r"^(?:[#$] )?(?:sudo )?(?:/\S+/)?(?:\.venv/bin/)?")
_MODULES: Final = {"reconciler.cli": "bypassctl", "reconciler.daemon.main": "bypassd"}


class Line(NamedTuple):
    """A command line in a document. ``whole``: it is in a block of code and has all its arguments."""

    where: str
    text: str
    whole: bool


def command_lines(name: str, document: str) -> Iterator[Line]:
    """Those of blocks of code, and those of code in the text, which may be broken at a line's end."""
    text: list[str] = []
    fenced = False
    for number, line in enumerate(document.splitlines(), start=1):
        fence = line.startswith("```")
        fenced ^= fence
        if fence or not (fenced or line.startswith("    ")):
            text.append("" if fence else line)
            continue
        text.append("")
        command = _PROMPT.sub("", line.strip())
        if _PROGRAM.match(command):
            yield Line(f"{name}:{number}", command, whole=True)
        else:
            for found in re.finditer(r"(?:-- |: |sudo |`)(?=bypassctl )", line):
                yield Line(f"{name}:{number}", line[found.end() :].split("`")[0].rstrip(")"), whole=False)
    prose = "\n".join(text)
    for found in re.finditer(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose):
        code = " ".join(found[1].split())
        if start := _PROGRAM.search(code):
            at = prose.count("\n", 0, found.start()) + 1
            yield Line(f"{name}:{at}", code[start.start() :], whole=False)


def words(text: str) -> list[str]:
    """The words of the first command of a line."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found = []
    for word in lexer:
        if word and set(word) <= set("|&;<>"):
            break
        found.append(word)
    return found


def relaxed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, with every option and argument optional, and options that may lack their value."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                relaxed(command)
        elif action.nargs is None:
            action.nargs = "?"
            action.required = False
            # A name in capitals is in the place of a value: --for TIME.
            action.type = str
            action.choices = None
    for group in parser._mutually_exclusive_groups:
        group.required = False
    return parser


def fault(line: Line) -> str | None:
    first, *rest = words(line.text)
    if first == "python":
        module, *rest = rest[1:]
        if module == "pytest":
            first = module
        elif module in _MODULES:
            first = _MODULES[module]
        elif module == "tests.bench":
            return parsed(bench.parser(), [word if word != "N" else "1" for word in rest])
        else:
            return None if is_module(module) else f"no module {module}"
    if first == "make":
        return fault_of_make(rest)
    if first == "pytest":
        missing = [word for word in rest if word.startswith("tests/") and not (ROOT / word).exists()]
        # docs/contributing.md prints some of them; tests/test_contributing.py makes and runs them.
        missing = [word for word in missing if f"New file `{word}`" not in CONTRIBUTING]
        return f"not there: {missing}" if missing else None
    if first.startswith("tests/vm/"):
        return None if (ROOT / first).exists() else "no such script"
    if first == "install.sh":
        known = (ROOT / "deploy/artifact/install.sh").read_text()
        unknown = [word for word in rest if word.startswith("--") and f"{word})" not in known.replace(" | ", ")")]
        return f"unknown options {unknown}" if unknown else None
    return fault_of_program(first, rest, whole=line.whole)


def is_module(name: str) -> bool:
    """A module or a package that can be run."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def fault_of_make(rest: list[str]) -> str | None:
    """Targets, and the options of ``make run ARGS=...``."""
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in rest:
        name, _, value = word.partition("=")
        if name == "ARGS" and rest[0] == "run":
            if bad := parsed(demo.parser(), value.split()):
                return bad
        elif not name.isupper() and name not in targets:
            return f"no target {name}"
    return None


def fault_of_program(name: str, rest: list[str], *, whole: bool) -> str | None:
    """bypassctl, bypassd, state-dump."""
    if name == "bypassd":
        # It is also the name of a package and of a unit, and the first word of outputs.
        if not rest or rest[0] not in {"run", "check-config", "--version"}:
            return None
    else:
        rest = ["dump", *rest] if name == "state-dump" else _command_first(rest)
    complete = whole and not any(word.startswith("[") for word in rest)
    if not complete:
        rest = [part for word in rest if (part := word.strip("[]()")) and part != "..."]
        if not rest or {"OPTIONS", "[OPTIONS"} & set(rest):
            return None
    return parsed(program(name, complete), rest)


@cache
def program(name: str, complete: bool) -> argparse.ArgumentParser:
    """The parser of bypassd or bypassctl; not complete: for lines without all their arguments."""
    parser = daemon.parser() if name == "bypassd" else main.parser()
    return parser if complete else relaxed(parser)


def parsed(parser: argparse.ArgumentParser, rest: list[str]) -> str | None:
    """The parser's own message."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser.parse_args(rest)
        except SystemExit as exc:
            return (said.getvalue().splitlines() or ["ended"])[-1] if exc.code else None
    return None


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_line_of_a_document_exists(path: Path) -> None:
    lines = list(command_lines(path.name, path.read_text()))
    assert {f"{line.where}: {line.text}": bad for line in lines if (bad := fault(line))} == {}


def test_the_documents_have_command_lines() -> None:
    lines = [line for path in DOCUMENTS for line in command_lines(path.name, path.read_text())]
    assert len([line for line in lines if line.whole]) > 60
    used = {words(line.text)[1] for line in lines if line.text.startswith("bypassctl ")}
    assert {command.name for command in main.COMMANDS} - used == set()


@pytest.mark.parametrize("command", main.COMMANDS, ids=lambda command: command.name)
def test_the_manual_names_every_option_of_a_command(command: options.CliCommand) -> None:
    parser = argparse.ArgumentParser()
    if command.add is not None:
        command.add(parser)
    manual = (ROOT / "docs/bypassctl.1.md").read_text()
    # explain is the earlier name of why.
    name = "why" if command.name == "explain" else command.name
    (part,) = re.findall(rf"^### bypassctl {name}\b(.*?)^##", manual, re.MULTILINE | re.DOTALL)
    named = [action.option_strings for action in parser._actions if action.option_strings]
    everywhere = {"--help", "--namespace", "--by"}
    missing = [names for names in named if not everywhere & set(names) and not any(f"{name}" in part for name in names)]
    assert missing == []


def literals() -> Iterator[Line]:
    """Command lines in the program's own texts: messages, fixes, help."""
    for path in sorted((ROOT / "reconciler").rglob("*.py")):
        text = path.read_text()
        for node in nodes(path) if "bypassctl " in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for found in re.finditer(r"(?:^|[`(]|run |: |; )bypassctl ([a-z]+)\b([^`\n;:,()]*)", node.value):
                    options_ = " ".join(re.findall(r"--[a-z-]+", found[2]))
                    yield Line(
                        f"{path.relative_to(ROOT)}:{node.lineno}", f"bypassctl {found[1]} {options_}", whole=False
                    )


def test_every_command_in_the_texts_of_the_program_exists() -> None:
    lines = list(literals())
    assert len(lines) > 30
    assert {f"{line.where}: {line.text}": bad for line in lines if (bad := fault(line))} == {}


@pytest.mark.parametrize(
    "document",
    [
        "    # bypassctl pods --sort-by use\n",
        "    bypassctl off batch-7 --for 1h\n",
        "```sh\n.venv/bin/python -m reconciler.cli plan --machines x\n```\n",
        "Look at `bypassctl report\n--gates` then.\n",
        "`bypassctl look`\n",
        "`make everything`\n",
        "`make run ARGS=--kubelets`\n",
        "`python -m tests.bench nothing`\n",
        "`install.sh --remove`\n",
        "`tests/vm/none.sh v2`\n",
        "`bypassd check-config --file X`\n",
    ],
)
def test_a_wrong_command_line_is_found(document: str) -> None:
    (line,) = command_lines("x.md", document)
    assert fault(line)
