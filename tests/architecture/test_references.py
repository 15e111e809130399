"""What docstrings, comments and documents name in our program exists: modules, files, classes, functions, fields.

In backticks (one on each side) a docstring names a thing of this program, or of a library that it imports; a word of
a file, a file's name and a value have two.
"""

import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.sourcetrees import ROOT, comments, defines, literals, module, product

PACKAGES: Final = ("cgroupfs", "resctrl", "state", "reconciler", "tests")
FOLDERS: Final = ("cgroupfs", "resctrl", "state", "reconciler", "tests", "deploy")
ROOMS: Final = tuple(sorted(path.parent.name for path in ROOT.glob("reconciler/*/__init__.py")))
DOCUMENTS: Final = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.md"))
# Names things that its reader makes, which tests/test_contributing.py makes and runs; the past has other names.
NOT_READ: Final = {ROOT / "docs/contributing.md", ROOT / "CHANGELOG.md", ROOT / "tests/fixtures/store/README.md"}
OTHERS: Final = {*dir(builtins), "PATH"}
"""First words in backticks that are not ours, beside the modules that our code imports."""

_NAME: Final = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_MODULE: Final = re.compile(rf"(?<![\w./-])((?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+)(?![\w/])")
_FILE: Final = re.compile(rf"(?<![\w./-])((?:{'|'.join((*FOLDERS, *ROOMS))})/(?:[\w-]+/)*\w+\.py)\b")
_IMPORT: Final = re.compile(r"^[ \t]*(?:import|from) +(\w+)", re.MULTILINE)
_CLASS: Final = re.compile(r"^class (\w+)", re.MULTILINE)
_SUFFIXES: Final = ("json", "db", "md", "py", "yaml", "writes")
"""``state.json`` is a file, and a package has no such module."""


class Place(NamedTuple):
    """One line of text, and where it is."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


@cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")))


@cache
def by_name() -> dict[str, tuple[Path, ...]]:
    """Modules and packages by the last part of their name."""
    modules: dict[str, tuple[Path, ...]] = {}
    for path in sources():
        name = path.parent.name if path.name == "__init__.py" else path.stem
        modules[name] = (*modules.get(name, ()), path)
    return modules


@cache
def everything() -> frozenset[str]:
    """All names of the product, and of the tests those of modules."""
    return frozenset(by_name()).union(*(defines(path) for path in product()))


@cache
def _texts() -> tuple[tuple[Path, str], ...]:
    return tuple((path, path.read_text(encoding="utf-8")) for path in sources())


@cache
def known(name: str) -> bool:
    """Whether any module defines it: of the tests those are taken apart that have the word, until one does."""
    return name in everything() or any(name in text and name in defines(path) for path, text in _texts())


@cache
def importers() -> dict[str, list[Path]]:
    """By the first word of an import, or of a line of text that begins as one: the modules that have it."""
    modules: dict[str, list[Path]] = {}
    for path, text in _texts():
        for word in set(_IMPORT.findall(text)):
            modules.setdefault(word, []).append(path)
    return modules


@cache
def is_library(word: str) -> bool:
    """Whether it is the first word of what is imported from elsewhere."""
    return word not in PACKAGES and any(word in module(path).imports for path in importers().get(word, ()))


def dotted(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def exists(name: str) -> bool:
    """A module by a whole name or the end of it, perhaps with a name in it; a class with a field; any name of ours."""
    parts = tuple(name.split("."))
    if parts[0] in OTHERS or is_library(parts[0]):
        return True
    for length in range(len(parts), 0, -1):
        rest = parts[length:]
        found = [path for path in by_name().get(parts[length - 1], ()) if dotted(path)[-length:] == parts[:length]]
        if found and (not rest or any(rest[0] in module(path).top and _within(rest) for path in found)):
            return True
    return not (len(parts) > 1 and parts[0] in PACKAGES) and _within(parts)


@cache
def _class_lines() -> dict[str, list[Path]]:
    """By the name in a line that begins a class, or in a line of text that looks so: the modules that have it."""
    modules: dict[str, list[Path]] = {}
    for path, text in _texts():
        for name in _CLASS.findall(text):
            modules.setdefault(name, []).append(path)
    return modules


@cache
def homes_of(name: str) -> tuple[Path, ...]:
    """The modules that have a class of this name."""
    return tuple(path for path in _class_lines().get(name, ()) if name in module(path).classes)


def _within(parts: tuple[str, ...]) -> bool:
    """Whether these are names that follow each other; of a class of ours, in the module that has it."""
    if not all(map(known, parts)):
        return False
    homes = homes_of(parts[0]) if len(parts) > 1 else ()
    return not homes or any(parts[1] in defines(path) for path in homes)


def written(path: Path) -> Iterator[Place]:
    """The comments and docstrings of a source, each line by itself."""
    # Most modules of the tests name nothing: these are not parsed.
    if not any(_may_name(text) for _, text in literals(path)):
        return
    yield from (Place(path, line, text) for line, text in comments(path))
    for start, text in module(path).texts:
        yield from (Place(path, start + number, line) for number, line in enumerate(text.splitlines()))


def _may_name(text: str) -> bool:
    """Whether a comment or string names something."""
    return any(pattern.search(text) for pattern in (_NAME, _MODULE, _FILE))


def documents() -> Iterator[Place]:
    for path in DOCUMENTS:
        if path not in NOT_READ:
            lines = path.read_text(encoding="utf-8").splitlines()
            yield from (Place(path, number, line) for number, line in enumerate(lines, start=1))


@cache
def places() -> tuple[Place, ...]:
    return (*(place for path in sources() for place in written(path)), *documents())


def test_every_name_in_backticks_exists() -> None:
    named = [
        (place, match[1]) for place in places() if place.file.suffix == ".py" for match in _NAME.finditer(place.text)
    ]
    assert len(named) > 1000
    assert [f"{place}: {name}" for place, name in named if not exists(name)] == []


def test_every_module_that_is_named_exists() -> None:
    named = [(place, match[1]) for place in places() for match in _MODULE.finditer(place.text)]
    wrong = [f"{place}: {name}" for place, name in named if name.split(".")[1] not in _SUFFIXES and not exists(name)]
    assert len(named) > 200
    assert wrong == []


def test_every_file_that_is_named_exists() -> None:
    named = [(place, match[1]) for place in places() for match in _FILE.finditer(place.text)]
    assert len(named) > 60
    assert [f"{place}: {name}" for place, name in named if not _is_file(name)] == []


def _is_file(name: str) -> bool:
    return any((ROOT / base / name).is_file() for base in ("", "reconciler", "tests/reconciler", "tests"))


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("reconciler.control.planner", True),
        ("reconciler.planner", False),
        ("state.ledger.Ledger", True),
        ("state.records", False),
        ("planner.plan_node", True),
        ("planner.plan_nodes", False),
        ("Ledger.ours", True),
        ("Ledger.wrote_it", False),
        ("NoSuchClassOfOurs", False),
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str, good: bool) -> None:
    assert exists(name) is good
