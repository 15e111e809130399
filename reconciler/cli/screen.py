"""Output of a command: tables and lines for people, documents for programs, the same for every command.

A terminal gets styles and wrapped lines; a pipe plain text without wrapping, so that grep and awk work on it.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TextIO

from cgroupfs.bounded import digits
from reconciler.cli.blocks import (
    BELOW,
    LABEL,
    NARROW,
    RESET,
    Block,
    Cell,
    Field,
    Line,
    StyledText,
    Table,
    codes,
    columns_of,
    fitted,
    goes_below,
    has_headings,
    text_of,
    wrapped,
)
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime import streams
from reconciler.runtime.streams import guarded


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
    if not out.isatty():
        out.write(plain(blocks))
        return
    width = _width(out)
    if os.environ.get("TERM") in {"dumb", "unknown"}:
        out.write(plain(blocks, width))
        return
    colours = not os.environ.get("NO_COLOR")
    out.write("".join(f"{rendered(cells, colours=colours)[0]}\n" for cells in laid_out(blocks, width)))


def plain(blocks: Iterable[Block], width: int | None = None) -> str:
    """As plain text; ``width`` None: never wrapped."""
    return "".join(f"{''.join(map(text_of, cells))}\n" for cells in laid_out(blocks, width))


def rendered(cells: Iterable[Cell], *, colours: bool) -> tuple[str, int]:
    """One line with a terminal's sequences, and its columns."""
    parts, width = [], 0
    for cell in cells:
        text = text_of(cell)
        width += columns_of(text)
        code = codes(cell.style, colours=colours) if text and isinstance(cell, StyledText) else ""
        parts.append(f"{code}{text}{RESET}" if code else text)
    return "".join(parts), width


def laid_out(blocks: Iterable[Block], width: int | None) -> Iterator[list[Cell]]:
    """The lines of the blocks, without blanks at their ends; as wide as their text where ``width`` is None.

    A word that is wider than the terminal stays whole: a broken name cannot be copied or searched.
    """
    for block in blocks:
        match block:
            case Table():
                lines = _table(block, width)
            case Field():
                lines = _beside([StyledText(text_of(block.label).ljust(LABEL), "dim")], block.cells, width)
            case Line():
                lines = _beside([" " * block.indent], block.cells, width, least=1)
        for cells in lines:
            yield _stripped(cells)


def _table(block: Table, width: int | None) -> Iterator[list[Cell]]:
    if not block.rows:
        return
    block = fitted(block, width)
    heads = tuple(StyledText(name, "dim") for name in block.columns)
    rows: list[tuple[Cell, ...]] = [*([heads] if has_headings(block) else []), *block.rows]
    last = len(block.columns) - 1
    *widths, widest = (max(columns_of(text_of(row[column])) for row in rows) for column in range(last + 1))
    below = goes_below(sum(widths) + 2 * last, width, widest)
    for row in rows:
        before: list[Cell] = []
        for column, room in enumerate(widths):
            blanks = " " * (room - columns_of(text_of(row[column])))
            before += [blanks, row[column], "  "] if column in block.right else [row[column], f"{blanks}  "]
        # Only the last one may give way: a cut-off value would be a wrong value.
        if not below:
            yield from _beside(before, row[last : last + 1], width)
            continue
        yield before
        if text_of(row[last]):
            yield from _beside([" " * BELOW], row[last : last + 1], width)


def _beside(
    before: list[Cell], cells: Iterable[Cell], width: int | None, *, least: int = NARROW
) -> Iterator[list[Cell]]:
    """The cells behind others, in as many lines as they need, each below the first cell and ``least`` columns wide."""
    shown = [(text_of(cell), cell.style if isinstance(cell, StyledText) else "") for cell in cells]
    left = sum(columns_of(text_of(cell)) for cell in before)
    whole = "".join(text for text, _ in shown)
    begin = 0
    for number, part in enumerate(wrapped(whole, None if width is None else max(width - left, least))):
        # Blanks at a break are in no line, however many they are.
        begin = whole.index(part, begin)
        yield [*(before if not number else [" " * left]), *_between(shown, begin, begin + len(part))]
        begin += len(part)


def _between(shown: Iterable[tuple[str, str]], begin: int, end: int) -> Iterator[Cell]:
    at = 0
    for text, style in shown:
        if part := text[max(0, begin - at) : max(0, end - at)]:
            yield StyledText(part, style)
        at += len(text)


def _stripped(cells: list[Cell]) -> list[Cell]:
    while cells and not (last := text_of(cells[-1]).rstrip()):
        cells = cells[:-1]
    if not cells:
        return []
    end = cells[-1]
    return [*cells[:-1], end._replace(text=last) if isinstance(end, StyledText) else last]


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def _width(out: TextIO) -> int:
    if columns := digits(os.environ.get("COLUMNS", "")):
        return columns
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
