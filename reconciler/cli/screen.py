"""Output of a command: tables and lines for people, documents for programs, the same for every command.

Drawn with rich on a terminal if it is installed, else as plain text. A pipe gets plain text without wrapping, so that
grep and awk work on it.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TextIO

from reconciler.cli.blocks import (
    BELOW,
    LABEL,
    NARROW,
    Block,
    Cell,
    Field,
    Line,
    StyledText,
    Table,
    fitted,
    goes_below,
    has_headings,
    text_of,
    wrapped,
)
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime import streams
from reconciler.runtime.streams import guarded
from state.printable import LONGEST, printable


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


def _width(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except OSError:
        return 80


def emit(fields: Mapping[str, object], form: str) -> None:
    """Write a document to standard output as ``json``, ``yaml`` or ``msgpack``.

    Errors: `CliError` for msgpack on a terminal: it is binary, and a terminal would obey it; `OutputError`.
    """
    from state.dump import render  # msgpack: 5 ms that tables do not pay

    with guarded() as out:
        if form == "msgpack" and out.isatty():
            raise CliError("-o msgpack is binary; redirect it to a file or a pipe", Exit.USAGE)
        out.buffer.write(render(fields, form))
        out.buffer.flush()


def present(output: str, document: Mapping[str, object], blocks: Iterable[Block]) -> None:
    """A command's result: ``blocks`` for people (``table``, ``wide``), else the ``document`` in that form.

    ``blocks`` that are made as they are drawn cost a document nothing. Errors: as of `show` and `emit`.
    """
    if output in {"table", "wide"}:
        show(blocks)
    else:
        emit(document, output)
