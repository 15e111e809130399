"""Texts use plain technical English: no string literal, docstring or comment of a room has one of the words below.

A text names the thing and uses a technical verb: messages, reasons, help, log lines, configuration descriptions, and
the docstrings and comments of the code. Texts that only programs read have no blank and are not part of this test.
The same words are checked in the prose of the documents: README.md, CHANGELOG.md and docs.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconciler.cli.main import COMMANDS, parser
from reconciler.config.model import Config
from reconciler.settings.schema import section_of, settings
from tests.sourcetrees import ROOT, comments, module, nodes

ROOMS = (
    *("cgroupfs", "resctrl", "state"),
    *(
        f"reconciler/{room}"
        for room in (
            *("runtime", "clients", "pods", "sources", "signals", "placement", "policies", "headroom", "actuators"),
            *("control", "detectors", "responses", "alerts", "interference", "config"),
            *("telemetry", "web", "daemon", "cli", "settings"),
        )
    ),
)
FORBIDDEN = re.compile(
    r"\b(nobody|somebody|everybody|whom|whoever|told|tells|asked for|left alone|looked after|as it was|to be had|"
    r"see the module|module's (?:text|docstring)|cannot be had|stands|goes|foretold|likeliest|perhaps|as ever|by hand|"
    r"put right|thousandths of a CPU for)\b|"
    r"\bis no (?!longer\b|candidate\b)[a-z]|\bthere is no\b|\bit answered\b|\bit answers\b",
    re.IGNORECASE,
)
LITERARY = re.compile(
    r"\b(nobody|somebody|everybody|whom|whoever|told|tells|stands|goes|see the module|module's (?:text|docstring))\b",
    re.IGNORECASE,
)
"""Words that the docstrings and comments of tests do not have; what a fake says is not among them."""
ALLOWED = {
    "changed by somebody else since; left",
    "user name or number to run as; null: nobody if bypassd is root",
}
"""A value of a published field, which programs compare; and the name of a user."""


DOCUMENTS = ("README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_CODE = re.compile(r"`[^`]*`")


def prose(document: str) -> Iterator[tuple[int, str]]:
    """The paragraphs of a Markdown document with their first line's number; without blocks of code and code in a line.

    A paragraph is one text, so that a phrase is also found across a line's end.
    """
    lines: list[str] = []
    fenced = False
    for number, line in enumerate([*document.splitlines(), ""], start=1):
        fence = line.startswith("```")
        if fence or fenced or line.startswith("    ") or not line.strip():
            fenced ^= fence
            if lines:
                yield number - len(lines), _CODE.sub("`code`", " ".join(lines))
            lines = []
        else:
            lines.append(line.strip())


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The string literals of a module, docstrings included; of an f-string its fixed parts. And the comments."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    yield from comments(path)


@pytest.mark.parametrize("room", ROOMS)
def test_texts_of_a_room_use_technical_words(room: str) -> None:
    modules = sorted((ROOT / room).rglob("*.py"))
    assert modules
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {text[:100]!r}"
        for path in modules
        if not path.name.endswith("_pb2.py")
        for line, text in texts(path)
        if " " in text.strip() and text not in ALLOWED and FORBIDDEN.search(text)
    ]
    assert hits == []


def test_the_docstrings_and_comments_of_tests_use_technical_words() -> None:
    modules = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "test_words.py"]
    assert len(modules) > 500
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}"
        for path in modules
        if LITERARY.search(path.read_text(encoding="utf-8"))
        for line, text in (*module(path).docstrings, *comments(path))
        for match in LITERARY.finditer(re.sub(r"``[^`]*``|`[^`]*`", "", text))
    ]
    assert hits == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_prose_of_a_document_uses_technical_words(document: str) -> None:
    paragraphs = list(prose((ROOT / document).read_text(encoding="utf-8")))
    assert len(paragraphs) > 5
    # docs/config.md has the descriptions of settings.
    allowed = re.compile("|".join(map(re.escape, ALLOWED)))
    hits = [
        f"{document}:{line}: {match[0]!r}"
        for line, text in paragraphs
        for match in FORBIDDEN.finditer(allowed.sub("", text))
    ]
    assert hits == []


def test_prose_is_a_document_without_its_code() -> None:
    document = (
        "# Title\n\nThere is\nno `nobody` here.\n- goes\n\n"
        "```yaml\ntold: 1\n\nwhom: 2\n```\n\n    by hand\n| stands |\n"
    )
    paragraphs = list(prose(document))
    assert paragraphs == [(1, "# Title"), (3, "There is no `code` here. - goes"), (14, "| stands |")]
    assert [match[0] for _, text in paragraphs for match in FORBIDDEN.finditer(text)] == [
        "There is no",
        "goes",
        "stands",
    ]


def test_a_literary_word_is_found() -> None:
    result = [word for word in ("nobody goes", "is left alone until", "it answered 500") if FORBIDDEN.search(word)]
    assert len(result) == 3
    assert not FORBIDDEN.search("no pod is evicted; HTTP 500")


def test_every_command_and_option_has_a_short_help() -> None:
    assert all(len(command.help) <= 90 and not FORBIDDEN.search(command.help) for command in COMMANDS)
    assert not FORBIDDEN.search(parser().format_help())


def test_every_setting_with_a_description_uses_technical_words() -> None:
    result = [
        f"{path}: {field.description}"
        for path, field in settings(section_of(Config))
        if field.schema.struct is None and field.description not in ALLOWED and FORBIDDEN.search(field.description)
    ]
    assert result == []
