"""What a command shows, as plain values: lines, fields, tables, and marks with a meaning."""

from collections.abc import Sequence
from typing import Final, NamedTuple

LABEL: Final = 9
"""Columns of a label."""


class StyledText(NamedTuple):
    """Text with a meaning: ``ok``, ``warn``, ``bad``, ``dim``, ``head``."""

    text: str
    style: str


Cell = str | StyledText


class Line(NamedTuple):
    """One line, wrapped below its own indent where it is too long."""

    cells: tuple[Cell, ...]
    indent: int = 0


class Field(NamedTuple):
    """A label and what there is to say; wrapped beside the label, not below it."""

    label: str
    cells: tuple[Cell, ...]


class Table(NamedTuple):
    """Rows under headings. Columns keep their width; the last one is wrapped. ``right``: numbers.

    ``headings``: whether they are printed. ``names``: a column of names, which are shortened where a terminal has no
    room for them.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    right: frozenset[int] = frozenset()
    headings: bool = True
    names: int | None = None


Block = Line | Field | Table
