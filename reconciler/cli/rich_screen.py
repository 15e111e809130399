"""The same blocks drawn with rich: colours, and the last cell of a row wrapped. Imported on terminals only.

A word that is wider than the terminal stays whole, as in plain text: a broken name cannot be copied or searched. Names
in tables that allow it are shortened before.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from reconciler.cli.blocks import (
    BELOW,
    LABEL,
    NARROW,
    STYLES,
    Block,
    Cell,
    Field,
    StyledText,
    Table,
    fitted,
    goes_below,
    has_headings,
    text_of,
    wrapped,
)

_GAP: Final = "  "


def draw(blocks: Iterable[Block], out: TextIO) -> None:
    """Draw on a terminal; rich itself obeys NO_COLOR and COLUMNS."""
    console = Console(file=out, highlight=False, emoji=False, markup=False)
    for block in blocks:
        if isinstance(block, Table):
            lines = list(_table(block, console))
        elif isinstance(block, Field):
            label = Text(text_of(block.label).ljust(LABEL), style="dim")
            lines = list(_beside(label, _joined(block.cells), console))
        else:
            lines = list(_beside(Text(" " * block.indent), _joined(block.cells), console))
        for line in lines:
            line.rstrip()
        if lines:
            # Wrapped already: rich would break words.
            console.print(Text("\n").join(lines), soft_wrap=True)


def _table(block: Table, console: Console) -> Iterator[Text]:
    if not block.rows:
        return
    block = fitted(block, console.width)
    heads = [Text(text_of(name), style="dim") for name in block.columns]
    rows = [*([heads] if has_headings(block) else []), *([_text(cell) for cell in row] for row in block.rows)]
    last = len(block.columns) - 1
    *widths, widest = (max(cell_len(row[column].plain) for row in rows) for column in range(last + 1))
    for row in rows:
        before = Text()
        for column, width in enumerate(widths):
            blanks = " " * (width - cell_len(row[column].plain))
            before.append(blanks if column in block.right else "")
            before.append_text(row[column])
            before.append(_GAP if column in block.right else blanks + _GAP)
        # Only the last one may give way: a cut-off value would be a wrong value.
        if not goes_below(cell_len(before.plain), console.width, widest):
            yield from _beside(before, row[last], console)
            continue
        yield before
        if row[last].plain:
            yield from _beside(Text(" " * BELOW), row[last], console)


def _beside(before: Text, text: Text, console: Console) -> Iterator[Text]:
    """The text behind another one, in as many lines as it needs."""
    left = cell_len(before.plain)
    # Each line ends before the blank at which the text is broken.
    ends = accumulate(len(part) + 1 for part in wrapped(text.plain, max(console.width - left, NARROW)))
    for number, part in enumerate(text.divide(list(ends)[:-1])):
        yield (before.copy() if not number else Text(" " * left)).append_text(part)


def _joined(cells: Iterable[Cell]) -> Text:
    whole = Text()
    for cell in cells:
        whole.append_text(_text(cell))
    return whole


def _text(cell: Cell) -> Text:
    # Text, never str: a str would be read for rich's markup if the console's settings ever changed.
    return Text(text_of(cell), style=STYLES.get(cell.style, "") if isinstance(cell, StyledText) else "")
