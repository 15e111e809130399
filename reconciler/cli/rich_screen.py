"""The same blocks drawn with rich: colours, and cells wrapped to the terminal. Imported on terminals only."""

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from reconciler.cli.blocks import LABEL, Block, Cell, Field, StyledText, Table
from reconciler.cli.screen import has_headings, text_of
from reconciler.cli.styles import STYLES


def draw(blocks: Iterable[Block], out: TextIO) -> None:
    """Draw on a terminal; rich itself obeys NO_COLOR and COLUMNS."""
    console = Console(file=out, highlight=False, emoji=False, markup=False)
    for block in blocks:
        if isinstance(block, Table):
            if block.rows:
                console.print(_table(block))
        elif isinstance(block, Field):
            grid = RichTable.grid()
            grid.add_column(width=LABEL, style="dim")
            grid.add_column(overflow="fold")
            grid.add_row(_text(block.label), _joined(block.cells))
            console.print(grid)
        else:
            whole = _joined(block.cells)
            console.print(Padding(whole, (0, 0, 0, block.indent)) if block.indent else whole)


def _table(block: Table) -> RichTable:
    shown = has_headings(block)
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=shown)
    last = len(block.columns) - 1
    for number, name in enumerate(block.columns):
        justify = "right" if number in block.right else "left"
        # Only the last one may give way: a cut-off value would be a wrong value.
        table.add_column(name, justify=justify, no_wrap=number != last, overflow="fold")  # type: ignore[arg-type]
    for row in block.rows:
        table.add_row(*map(_text, row))
    return table


def _joined(cells: Iterable[Cell]) -> Text:
    whole = Text()
    for cell in cells:
        whole.append_text(_text(cell))
    return whole


def _text(cell: Cell) -> Text:
    # Text, never str: a str would be read for rich's markup if the console's settings ever changed.
    return Text(text_of(cell), style=STYLES.get(cell.style, "") if isinstance(cell, StyledText) else "")
