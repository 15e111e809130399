"""How the demo is shown: a live table on a terminal, a plain line every few seconds elsewhere, and the final report."""

import time
from collections.abc import Sequence
from typing import Final, Protocol, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tests.node.frame import Cell, Frame, Row, milliseconds, pools_text

LINE_S: Final = 5.0
_WIDE: Final = 90
_WIDEST: Final = 120
_PLAIN_WIDTH: Final = 100


class Screen(Protocol):
    """Where frames go."""

    console: Console

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, frame: Frame) -> None: ...

    def say(self, message: str) -> None: ...


class LiveScreen:
    """A table that is drawn again and again in its place."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, frame: Frame) -> None:
        self._live.update(picture(frame, self.console.width), refresh=True)

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False)


class LineScreen:
    """One line every few seconds, and one at each change of phase."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._next = 0.0
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, frame: Frame) -> None:
        now = time.monotonic()
        if frame.phase == self._phase and now < self._next:
            return
        self._phase, self._next = frame.phase, now + LINE_S
        self.say(line(frame))

    def say(self, message: str) -> None:
        # A line in a log is never wrapped: readers have different widths.
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


def screen_for(*, plain: bool = False) -> Screen:
    """A live table where there is a terminal."""
    console = Console()
    if console.is_terminal and not plain:
        return LiveScreen(console)
    return LineScreen(Console(width=_PLAIN_WIDTH, no_color=True, force_terminal=False))


def line(frame: Frame) -> str:
    parts = [f"[{frame.elapsed_s:4.0f} s] {frame.phase}"]
    if frame.label:
        parts.insert(0, frame.label)
    if frame.latency is not None:
        parts.append(f"online p50 {milliseconds(frame.latency.p50)}, p99 {milliseconds(frame.latency.p99)}")
    if frame.be_rate is not None:
        parts.append(f"BE {frame.be_rate:.0f} units/s")
    if frame.budget:
        parts.append(f"BE budget {frame.budget}")
    if frame.pools:
        parts.append(f"CPUs: {pools_text(frame.pools)}")
    parts.append(f"{sum(1 for row in frame.rows if row.qos)} pods")
    return " | ".join(parts)


def picture(frame: Frame, width: int) -> RenderableType:
    """A frame as a panel that fits ``width`` columns."""
    table = pods_table(frame.rows, width)
    head = Text()
    if frame.label:
        head.append(f"{frame.label}  ", style="bold red")
    head.append(frame.phase, style="bold")
    head.append(f"   {frame.left_s:.0f} s left", style="dim")
    numbers = Text()
    if frame.latency is not None:
        numbers.append("online latency ", style="cyan")
        numbers.append(f"p50 {milliseconds(frame.latency.p50)}  p99 {milliseconds(frame.latency.p99)}", style="bold")
        numbers.append("  (last 3 s)    ", style="dim")
    if frame.be_rate is not None:
        numbers.append("BE work ", style="yellow")
        numbers.append(f"{frame.be_rate:.0f} units/s", style="bold")
    agent = Text("\n".join(frame.agent), style="dim", overflow="ellipsis", no_wrap=True)
    parts: list[RenderableType] = [head, Text(frame.node, style="dim", overflow="ellipsis", no_wrap=True), table]
    if frame.pools:
        parts.append(Text(f"CPUs of the pools: {pools_text(frame.pools)}"))
    if numbers.plain:
        parts.append(numbers)
    parts.append(agent)
    title = f"bypassd on an embedded node  {frame.step}"
    label = f"{frame.label}: {title}" if frame.label else title
    return Panel(Group(*parts), title=label, title_align="left", box=box.ROUNDED, width=width)


def pods_table(rows: Sequence[Row], width: int) -> Table:
    """The pods with their pools and values; a wide screen shows the source of the class."""
    wide, widest = width >= _WIDE, width >= _WIDEST
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1))
    table.add_column("pod", no_wrap=True, ratio=3, min_width=16)
    if wide:
        table.add_column("Kubernetes", no_wrap=True)
    if widest:
        table.add_column("class", no_wrap=True)
        table.add_column("told by", no_wrap=True, ratio=3)
    table.add_column("pool", no_wrap=True)
    table.add_column("CPUs", no_wrap=True)
    table.add_column("quota", no_wrap=True)
    table.add_column("weight", no_wrap=True)
    table.add_column("progress", justify="right", no_wrap=True)
    for row in rows:
        style = "cyan" if row.online else "yellow" if row.qos else "dim"
        cells: list[RenderableType] = [Text(row.title, style=style)]
        if wide:
            cells.append(row.qos)
        if widest:
            cells += [row.pod_class, Text(row.source, style="dim", overflow="ellipsis")]
        cells += [row.pool, _cell(row.cpus), _cell(row.quota), _cell(row.weight), Text(row.progress)]
        table.add_row(*cells)
    return table


def _cell(cell: Cell) -> Text:
    if cell.wanted is None:
        return Text(cell.actual)
    return Text(str(cell), style="green" if cell.met else "red")


def comparison(rows: Sequence[tuple[str, ...]], title: str) -> Table:
    """The before/after table: phase, p50, p99, requests a second, BE work, CPU use beside all pods."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for name in ("online p50", "online p99", "requests/s", "BE work/s", "beside pods"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
