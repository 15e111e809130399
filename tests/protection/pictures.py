"""The pictures of docs/protection.md, as SVG text: a heat map by cell, and the plane of online latency and BE work."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from tests.protection.report import AIM_P99, AIM_WORK, Outcome, is_control

_COLOURS: Final = ("#888888", "#cc79a7", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#b07aa1", "#d55e00", "#999933")
"""By law, in the order of the table; told apart by people who are colour-blind (Okabe and Ito), as are the shapes."""
_STYLE: Final = (
    "<style>text{font:12px sans-serif;fill:#222}.s{font-size:11px;fill:#555}.t{font-size:14px;font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#aaa}.b{fill:#1b1b1b}}</style>"
)
_LEAST, _MOST = 0.25, 64.0


def _svg(width: int, height: int, parts: Iterable[str], title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    ground = f'<rect class="b" width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, _STYLE, ground, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", cls: str = "") -> str:
    named = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{text}</text>'


def _shade(ratio: float) -> str:
    """Green up to the goal, through yellow to red at sixteen times the latency alone."""
    if ratio <= AIM_P99:
        return "#9fd8b4"
    step = min(1.0, math.log2(ratio / AIM_P99) / 4)
    return f"hsl({round(70 - 70 * step)} 75% {round(78 - 12 * step)}%)"


def heat_map(outcomes: Sequence[Outcome]) -> str:
    """A row for each service, load and kind of work, a column for each law: the ratio of p99, and BE's work."""
    laws = list(dict.fromkeys(one.law for one in outcomes))
    rows = list(dict.fromkeys((one.service, one.share, one.hog) for one in outcomes))
    by = {(one.service, one.share, one.hog, one.law): one for one in outcomes}
    left, top, wide, high = 190, 62, 92, 24
    parts = [_text(12, 20, "Online p99 as a multiple of alone, and BE work of what is left for it", cls="t")]
    parts += [_text(left + (i + 0.5) * wide, top - 10, law, anchor="middle") for i, law in enumerate(laws)]
    for number, (service, share, hog) in enumerate(rows):
        y = top + number * high
        parts.append(_text(12, y + 16, f"{service} {share:.0%}, {hog}"))
        for column, law in enumerate(laws):
            if (one := by.get((service, share, hog, law))) is None:
                continue
            box = f'x="{left + column * wide + 1}" y="{y + 1}" width="{wide - 2}" height="{high - 2}" rx="3"'
            parts.append(f'<rect {box} fill="{_shade(one.p99)}"/>')
            words = f"{one.p99:.1f}&#215;" + ("" if is_control(law) else f", {one.work:.0%}")
            style = 'style="fill:#222"'
            parts.append(
                f'<text x="{left + (column + 0.5) * wide:.1f}" y="{y + 16}" text-anchor="middle" {style}>{words}</text>'
            )
    height = top + len(rows) * high + 14
    return _svg(left + len(laws) * wide + 12, height, parts, "p99 and BE work by cell and law")


def _place(ratio: float, work: float) -> tuple[float, float]:
    bounded = min(max(ratio, _LEAST), _MOST)
    x = 70 + min(max(work, 0.0), 1.4) / 1.4 * 560
    y = 390 - math.log2(bounded / _LEAST) / math.log2(_MOST / _LEAST) * 340
    return x, y


def plane(outcomes: Sequence[Outcome]) -> str:
    """Each cell as a dot, each law's median as a large one: to the right BE's work, upwards the ratio of p99."""
    laws = [law for law in dict.fromkeys(one.law for one in outcomes) if not is_control(law)]
    parts = [_text(12, 20, "Where each law lies: online latency against BE work", cls="t")]
    x0, y0 = _place(AIM_P99, AIM_WORK)
    x1, y1 = _place(_LEAST, 1.4)
    parts.append(
        f'<rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" fill="#9fd8b4" opacity="0.5"/>'
    )
    parts.append(_text(x1 - 6, y1 - 8, "the goal", anchor="end", cls="s"))
    for exponent in range(-2, 7):
        _, y = _place(2.0**exponent, 0)
        parts.append(f'<line x1="70" x2="630" y1="{y:.1f}" y2="{y:.1f}" stroke="#999" stroke-width="0.4"/>')
        parts.append(_text(62, y + 4, f"{2.0**exponent:g}", anchor="end", cls="s"))
    for percent in range(0, 141, 20):
        x, _ = _place(1, percent / 100)
        parts.append(_text(x, 408, f"{percent} %", anchor="middle", cls="s"))
    parts.append(
        _text(350, 428, "BE work, of what the machine gives it in proportion to what online leaves", anchor="middle")
    )
    parts.append(_text(70, 40, "p99 of online requests, multiple of alone", cls="s"))
    for number, law in enumerate(laws):
        colour = _COLOURS[number % len(_COLOURS)]
        some = [one for one in outcomes if one.law == law]
        for one in some:
            x, y = _place(one.p99, one.work)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" opacity="0.55"/>')
        x, y = _place(_median([one.p99 for one in some]), _median([one.work for one in some]))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{colour}" stroke="#fff"/>')
        parts.append(f'<circle cx="660" cy="{62 + number * 22}" r="6" fill="{colour}"/>')
        parts.append(_text(674, 66 + number * 22, law))
    return _svg(800, 440, parts, "online latency against BE work, by law")


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
