"""What a command shows, as plain values: lines, fields, tables, marks with a meaning; and how they fit a terminal."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from reconciler.cli.names import shortened
from state.printable import LONGEST, printable

LABEL: Final = 9
"""Columns of a label."""
HEADINGS: Final = {"printed": True}
"""Whether tables have their headings: ``--no-headers``."""
WHOLE_NAMES: Final = {"shown": False}
"""Whether names keep their length on a terminal, too: ``-o wide``."""
NARROW: Final = 20
"""Columns of a terminal: with less the last column of a table gets lines of its own."""
BELOW: Final = 4
"""Blanks before them."""


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


def fitted(table: Table, width: int | None) -> Table:
    """The table with its names shortened to a terminal of ``width`` columns; both ways of drawing begin with it.

    Another column than the last leaves at least `NARROW` columns to the last, which is wrapped.
    """
    column = table.names
    if width is None or column is None or not table.rows or WHOLE_NAMES["shown"]:
        return table
    last = len(table.columns) - 1
    rows = [*([table.columns] if has_headings(table) else []), *table.rows]
    widths = [max(len(text_of(row[number])) for row in rows) for number in range(last + 1)]
    left = sum(widths[:-1]) + 2 * last
    if column != last:
        room = max(NARROW, width - left + widths[column] - min(widths[last], NARROW))
    else:
        room = width - (BELOW if goes_below(left, width, widths[last]) else left)
    # Another one than the last is not wrapped: there its words are one name.
    return table._replace(
        rows=[
            (*row[:column], _short(row[column], room, words=column == last), *row[column + 1 :]) for row in table.rows
        ]
    )


def _short(cell: Cell, room: int, *, words: bool) -> Cell:
    text = text_of(cell)
    if len(text) <= room:
        return cell
    short = " ".join(shortened(word, room) for word in text.split(" ")) if words else shortened(text, room)
    return cell._replace(text=short) if isinstance(cell, StyledText) else short


def has_headings(table: Table) -> bool:
    """Whether this table's headings are printed."""
    return table.headings and HEADINGS["printed"]


def text_of(cell: Cell) -> str:
    """The text of a cell, without its meaning, as it may be shown: both ways of drawing take it from here."""
    return printable(cell.text if isinstance(cell, StyledText) else cell, LONGEST)


def goes_below(left: int, width: int | None, widest: int) -> bool:
    """Whether a table's last column gets lines of its own: beside the others its ``widest`` cell has no room."""
    return width is not None and width - left < min(NARROW, widest)


def wrapped(text: str, width: int | None) -> list[str]:
    """Text in lines of at most ``width``, broken at blanks; a longer word stays whole."""
    if width is None or len(text) <= width:
        return [text]
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]
