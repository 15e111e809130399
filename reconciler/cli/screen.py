"""What a command shows: lines, fields and tables with styles, or a document for programs; the same for every command.

A terminal gets styles and wrapped lines; a pipe plain text without wrapping, so that grep and awk work on it. Names
that are shortened on a terminal are accepted so where a pod is named.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TextIO

from reconciler.cli.exits import CliError, Exit
from reconciler.runtime import streams
from reconciler.runtime.streams import guarded
from state.printable import LONGEST, printable

MARK: Final = "..."
"""In place of the middle. No name of a pod has it (DNS labels); shells leave it as it is, and every terminal has it."""
LEAST: Final = 12
"""Columns that a shortened name has at least: with fewer, many pods would have the same."""


def shortened(text: str, width: int) -> str:
    """A text in at most ``width`` columns, or `LEAST` if that is more."""
    width = max(width, LEAST)
    if len(text) <= width:
        return text
    # In the middle, as systemctl does: the start has the workload, and by their ends its pods differ.
    end = (width - len(MARK)) // 2
    # A dot before the mark would be taken for a part of it.
    return f"{text[: width - len(MARK) - end].rstrip('.')}{MARK}{text[-end:]}"


def start_of(text: str) -> str:
    """What each name begins with that ``text`` may mean."""
    return text.partition(MARK)[0]


def may_mean(text: str, name: str) -> bool:
    """Whether ``text`` is the start of a name, or the whole name shortened."""
    start, _, end = text.partition(MARK)
    short = start and end and len(name) > len(text) and name.startswith(start) and name.endswith(end)
    return name.startswith(text) or bool(short)


STYLES: Final = {
    "ok": "green",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "dim",
    "head": "bold",
    "key": "reverse",
    # A drawing's CPUs; where BE work runs too, the pool's colour is ink instead of ground.
    "pool reserved": "black on yellow",
    "pool reserved be": "bold yellow",
    "pool interrupt": "white on magenta",
    "pool interrupt be": "bold magenta",
    "pool shared": "black on green",
    "pool shared be": "bold green",
    "pool named": "black on cyan",
    "pool named be": "bold cyan",
    "pool dedicated": "white on red",
    "pool dedicated be": "bold red",
    "pool reclaimed": "bold",
    "pool reclaimed be": "bold",
    "pool several": "reverse",
}
_CODES: Final = {"bold": 1, "dim": 2, "underline": 4, "reverse": 7}
_COLOURS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
RESET: Final = "\x1b[0m"


@lru_cache(maxsize=128)
def codes(style: str, *, colours: bool) -> str:
    """The sequence that begins a style; empty for none. Without ``colours`` only bold, dim, underlined and reverse.

    Source: ECMA-48, 8.3.117 (SGR). ``underline`` may follow a style's name.
    """
    name, _, more = style.partition(" +")
    numbers = []
    ground = 0  # inks are 30 to 37, grounds 40 to 47
    for word in [*STYLES.get(name, "").split(), *more.split()]:
        if word == "on":
            ground = 10
        elif word in _CODES:
            numbers.append(_CODES[word])
        elif colours:
            numbers.append(30 + ground + _COLOURS.index(word))
    if ground and not colours:
        numbers.append(_CODES["reverse"])
    return f"\x1b[{';'.join(map(str, numbers))}m" if numbers else ""


_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN: Final = "_.-=+*#@"
_UNKNOWN: Final = "?"


def sparkline(values: Sequence[float | None], width: int = 30) -> str:
    """At most ``width`` characters, the newest at the end; each is the largest of the values that it is made from.

    Zero is the lowest mark and the largest value the highest. Without blocks in the output's encoding, ASCII.
    """
    if not values:
        return ""
    size = -(-len(values) // width)
    # From the end, so that the newest mark does not change its part with every value.
    parts = [values[max(0, end - size) : end] for end in range(len(values), 0, -size)][::-1]
    largest = [max((value for value in part if value is not None), default=None) for part in parts]
    top = max((value for value in largest if value is not None), default=0.0) or 1.0
    marks = levels()
    return "".join(
        _UNKNOWN if value is None else marks[min(len(marks) - 1, int(value / top * len(marks)))] for value in largest
    )


def levels() -> str:
    """Marks from the lowest to the highest, in the output's encoding."""
    try:
        _BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN
    return _BLOCKS


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
    """The table with its names shortened to a terminal of ``width`` columns; drawing a table begins with it.

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


def columns_of(text: str) -> int:
    """The columns of a terminal that a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width  # 1 MiB of tables

    return sum(2 if east_asian_width(sign) in "WF" else not combining(sign) for sign in text)


def has_headings(table: Table) -> bool:
    return table.headings and HEADINGS["printed"]


def text_of(cell: Cell) -> str:
    """The text of a cell, without its style, as it may be shown."""
    return printable(cell.text if isinstance(cell, StyledText) else cell, LONGEST)


def style_of(cell: Cell) -> str:
    return cell.style if isinstance(cell, StyledText) else ""


def goes_below(left: int, width: int | None, widest: int) -> bool:
    """Whether a table's last column gets lines of its own: beside the others its ``widest`` cell has no room."""
    return width is not None and width - left < min(NARROW, widest)


def wrapped(text: str, width: int | None) -> list[str]:
    """Text in lines of at most ``width``, broken at blanks; a longer word stays whole."""
    if width is None or len(text) <= width:
        return [text]
    from textwrap import wrap  # only where a line is broken

    return wrap(text, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False) or [""]


def line(*cells: Cell, indent: int = 0) -> Line:
    return Line(cells, indent)


def field(label: str, *cells: Cell) -> Field:
    return Field(label, cells)


def head(text: str) -> Line:
    return Line((StyledText(text, "head"),))


def blank() -> Line:
    return Line(())


def section(title: str, *blocks: Block) -> Iterator[Block]:
    """A heading after an empty line, and what it is of; nothing without that, or for a table without rows."""
    if blocks and all(not isinstance(block, Table) or block.rows for block in blocks):
        yield blank()
        yield head(title)
        yield from blocks


def mark(*, ok: bool) -> StyledText:
    """How something is, in a column of its own."""
    return StyledText("ok", "ok") if ok else StyledText("bad", "bad")


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
    width = streams.columns(out)
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
        code = codes(style_of(cell), colours=colours) if text else ""
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
    shown = [(text_of(cell), style_of(cell)) for cell in cells]
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
    return sys.stdout is not None and sys.stdout.isatty()


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
