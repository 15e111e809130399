"""The demo's three phases as one picture: the online pod's p99 and BE's work, second by second, as text and as SVG."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

BLOCKS: Final = "▁▂▃▄▅▆▇█"
_STYLE: Final = (
    "<style>text{font:13px sans-serif;fill:#222}.s{font-size:11px;fill:#555}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#aaa}.b{fill:#1b1b1b}}</style>"
)
_ONLINE, _BE = "#0072b2", "#e69f00"


class Second(NamedTuple):
    """``p99``: of the requests due in it, milliseconds; ``be``: BE's units of work in it. None: not measured."""

    p99: float | None
    be: float | None


def seconds_of(
    begin: float, end: float, samples: Sequence[tuple[float, float]], work: Sequence[tuple[float, int]]
) -> tuple[Second, ...]:
    """The whole seconds of a phase. ``samples``: (due, latency), ``work``: (time, units so far); seconds."""
    found = []
    for number in range(int(end - begin)):
        since, until = begin + number, begin + number + 1
        latencies = sorted(latency for due, latency in samples if since <= due < until)
        p99 = 1000 * latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))] if latencies else None
        first, last = _total(work, since), _total(work, until)
        found.append(Second(p99, last - first if first is not None and last is not None else None))
    return tuple(found)


def _total(work: Sequence[tuple[float, int]], at: float) -> float | None:
    """Units at a moment, between two readings in proportion."""
    for (before, less), (after, more) in itertools.pairwise(work):
        if before <= at <= after:
            return less + (more - less) * (at - before) / (after - before) if after > before else float(less)
    return float(work[-1][1]) if work and at > work[-1][0] else None


def strips(phases: Sequence[tuple[str, Sequence[Second]]]) -> Iterator[str]:
    """Two lines of blocks, a character a second, the phases side by side; the p99 on a logarithmic scale."""
    tails = [second.p99 for _, seconds in phases for second in seconds if second.p99 is not None]
    works = [second.be for _, seconds in phases for second in seconds if second.be is not None]
    if not tails:
        return
    low, high, most = min(tails), max(tails), max(works, default=0.0)
    wide = [max(len(name), len(seconds)) for name, seconds in phases]
    yield " " * 12 + " | ".join(name.ljust(width) for (name, _), width in zip(phases, wide, strict=True)).rstrip()
    for title, shown, note in (
        ("online p99  ", lambda one: _block(one.p99, low, high, log=True), f"{low:.1f} to {high:.1f} ms, log scale"),
        ("BE work     ", lambda one: _block(one.be, 0.0, most), f"up to {most:.0f} units/s"),
    ):
        cells = ("".join(map(shown, seconds)).ljust(width) for (_, seconds), width in zip(phases, wide, strict=True))
        yield f"{title}{' | '.join(cells)}   {note}"


def _block(value: float | None, low: float, high: float, *, log: bool = False) -> str:
    if value is None:
        return " "
    if log:
        value, low, high = (math.log(max(number, 1e-3)) for number in (value, low, high))
    share = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]


def svg(phases: Sequence[tuple[str, Sequence[Second]]]) -> str:
    """The same as SVG: bars by second, the p99 above on a logarithmic scale, BE's work below."""
    total = sum(len(seconds) for _, seconds in phases) or 1
    step = 700 / total
    works = [second.be for _, seconds in phases for second in seconds if second.be is not None]
    most = max(works, default=0.0) or 1.0
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 330" role="img" aria-label="three phases">',
        _STYLE,
        '<rect class="b" width="800" height="330" fill="#ffffff"/>',
        '<text x="70" y="44" class="s">online p99, ms (log scale)</text>',
        f'<text x="70" y="204" class="s">BE work, units a second (up to {most:.0f})</text>',
    ]
    for level in (3, 10, 30, 100):
        y = _height(level)
        parts.append(f'<line x1="70" x2="770" y1="{y:.1f}" y2="{y:.1f}" stroke="#999" stroke-width="0.4"/>')
        parts.append(f'<text x="62" y="{y + 4:.1f}" text-anchor="end" class="s">{level}</text>')
    x = 70.0
    for number, (name, seconds) in enumerate(phases):
        parts.append(f'<text x="{x + len(seconds) * step / 2:.1f}" y="22" text-anchor="middle">{name}</text>')
        if number:
            # In two parts: between them is the heading of the lower bars.
            for top, bottom in ((30, 186), (210, 310)):
                ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"'
                parts.append(f'<line {ends} stroke="#666" stroke-dasharray="4 3"/>')
        for second in seconds:
            wide = f'x="{x + step * 0.1:.1f}" width="{step * 0.8:.1f}"'
            if second.p99 is not None:
                y = _height(second.p99)
                parts.append(f'<rect {wide} y="{y:.1f}" height="{180 - y:.1f}" fill="{_ONLINE}"/>')
            if second.be is not None:
                tall = 95 * max(0.0, second.be) / most
                parts.append(f'<rect {wide} y="{310 - tall:.1f}" height="{tall:.1f}" fill="{_BE}"/>')
            x += step
    return "\n".join([*parts, "</svg>", ""])


def _height(milliseconds: float) -> float:
    share = math.log(min(max(milliseconds, 1.0), 200.0)) / math.log(200.0)
    return 180 - 125 * share
