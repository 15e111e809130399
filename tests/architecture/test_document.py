"""docs/architecture.md and the texts at the top of the rooms: what they name is there, and no room is missing."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture import drawing
from tests.sourcetrees import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = sorted((ROOT / "reconciler").rglob("__init__.py"))
ROOMS = sorted(path.parent.name for path in (ROOT / "reconciler").glob("*/__init__.py"))


def described(package: Path) -> str:
    return ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""


def section(title: str) -> str:
    """The text below the heading that begins with ``title``."""
    return next(part for part in TEXT.split("\n## ") if part.startswith(title))


def test_the_committed_drawing_is_what_the_imports_give() -> None:
    assert drawing.SVG.read_text(encoding="utf-8") == drawing.draw(), "the rooms' imports have changed: make docs"


def test_a_circle_of_rooms_cannot_be_drawn() -> None:
    circle = [drawing.Arrow("control", "pods"), drawing.Arrow("pods", "control")]
    with pytest.raises(ValueError, match="circle"):
        drawing.needed(circle)


def test_only_arrows_that_a_longer_way_implies_are_left_out() -> None:
    arrows = [drawing.Arrow("a", "b"), drawing.Arrow("a", "c"), drawing.Arrow("b", "c"), drawing.Arrow("a", "d")]
    assert drawing.needed(arrows) == [drawing.Arrow("a", "b"), drawing.Arrow("b", "c"), drawing.Arrow("a", "d")]


def test_every_room_has_its_line_and_its_box() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section("Rooms"), re.MULTILINE))
    packages = {room: ROOT / "reconciler" / room / "__init__.py" for room in ROOMS}
    packages |= {name: ROOT / name / "__init__.py" for name in drawing.BASE}
    assert rows == {name: described(path).partition("\n")[0].replace("``", "`") for name, path in packages.items()}
    assert set(drawing.CAPTIONS) == packages.keys()


def test_every_file_that_is_named_exists() -> None:
    files = set(re.findall(r"`([\w/]+\.(?:py|toml|svg))(?::[\w.]+)?`", TEXT))
    assert len(files) > 30
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_every_room_says_what_belongs_in_it_and_what_does_not(package: Path) -> None:
    text = described(package)
    _, mine, rest = text.partition("\n\nBelongs here: ")
    inside, others, outside = rest.partition("\n\nDoes not belong here: ")
    assert (bool(mine), bool(others)) == (True, True)
    assert min(len(inside), len(outside)) > 10
    named = set(re.findall(r"(?<!`)`([a-z_/]+)`(?!`)", outside))
    unknown = [name for name in sorted(named) if not any((top / name).is_dir() for top in (ROOT, ROOT / "reconciler"))]
    assert unknown == [], "a name in single backticks is a room"
