"""Output of a command, as plain values; printed with rich on a terminal if it is installed, else as plain text.

A pipe gets plain text without wrapping, so that grep and awk work on it.
"""

import os
import sys
from collections.abc import Iterable
from typing import Final, TextIO

from reconciler.cli.blocks import LABEL, Block, Cell, Field, Line, StyledText, Table
from reconciler.cli.names import shortened
from reconciler.runtime import streams
from state.printable import LONGEST, printable

HEADINGS: Final = {"printed": True}
"""Whether tables have their headings: ``--no-headers``."""
WHOLE_NAMES: Final = {"shown": False}
"""Whether names keep their length on a terminal, too: ``-o wide``."""
NARROW: Final = 20
"""Columns of a terminal: with less the last column of a table gets lines of its own."""
BELOW: Final = 4
"""Blanks before them."""


def line(*cells: Cell, indent: int = 0) -> Line:
    """A line of these parts."""
    return Line(cells, indent)


def field(label: str, *cells: Cell) -> Field:
    """A line with a label."""
    return Field(label, cells)


def head(text: str) -> Line:
    """A heading."""
    return Line((StyledText(text, "head"),))


def blank() -> Line:
    """An empty line."""
    return Line(())


def show(blocks: Iterable[Block], out: TextIO | None = None) -> None:
    """Draw on standard output (or ``out``). Errors: `OutputError` when it cannot be written."""
    if out is not None:
        _draw(blocks, out)
        return
    with streams.guarded() as standard:
        _draw(blocks, standard)


def _draw(blocks: Iterable[Block], out: TextIO) -> None:
    terminal = out.isatty()
    if terminal and os.environ.get("TERM") != "dumb":
        try:
            from reconciler.cli import rich_screen  # 80 ms; optional; for terminals only
        except ImportError:
            pass
        else:
            rich_screen.draw(blocks, out)
            return
    out.write(plain(blocks, _width(out) if terminal else None))


def plain(blocks: Iterable[Block], width: int | None = None) -> str:
    """As plain text; ``width`` None: never wrapped."""
    lines: list[str] = []
    for block in blocks:
        match block:
            case Table():
                lines += _table(block, width)
            case Field():
                lines += _field(block, width)
            case Line():
                lines += _line(block, width)
    return "".join(f"{text.rstrip()}\n" for text in lines)


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


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


def _line(block: Line, width: int | None) -> list[str]:
    text = "".join(map(text_of, block.cells))
    indent = " " * block.indent
    return [indent + part for part in wrapped(text, None if width is None else width - block.indent)]


def _field(block: Field, width: int | None) -> list[str]:
    text = "".join(map(text_of, block.cells))
    first, *more = wrapped(text, None if width is None else max(width - LABEL, NARROW))
    return [printable(block.label, LONGEST).ljust(LABEL) + first, *(" " * LABEL + part for part in more)]


def _table(block: Table, width: int | None) -> list[str]:
    if not block.rows:
        return []
    block = fitted(block, width)
    rows = [*([block.columns] if has_headings(block) else []), *(tuple(map(text_of, row)) for row in block.rows)]
    last = len(block.columns) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last)]
    left = sum(widths) + 2 * last
    below = goes_below(left, width, max(len(row[last]) for row in rows))
    room = None if width is None else width - (BELOW if below else left)
    lines: list[str] = []
    for row in rows:
        cells = [
            row[column].rjust(widths[column]) if column in block.right else row[column].ljust(widths[column])
            for column in range(last)
        ]
        parts = wrapped(row[last], room)
        if below:
            lines += ["  ".join(cells), *(" " * BELOW + part for part in parts if part)]
            continue
        lines.append("  ".join([*cells, parts[0]]))
        lines += [" " * left + part for part in parts[1:]]
    return lines


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


def _width(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except OSError:
        return 80
