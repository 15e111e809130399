"""Draws the rooms of the program and the imports between them, as SVG text.

Rooms are the packages under ``reconciler`` and the three below it. An arrow is from a room to one that it imports; an
arrow is left out where a longer way of arrows has the same ends, as the ways then give the same order with a quarter
of the lines. Rooms are in rows, each above all that it imports. An arrow over several rows has a place of its own
in each row between, so that none crosses a box. Everything is read from the checkout: a test compares the
file with what this module draws.

The rows, and the order in them, are those of a layered drawing (Sugiyama's method): longest ways first, then
neighbours towards their mean, in a fixed number of sweeps, so that the same checkout gives the same text.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from tests.sourcetrees import ROOT, nodes

SVG: Final = ROOT / "docs" / "architecture.svg"
BASE: Final = ("cgroupfs", "resctrl", "state")
CAPTIONS: Final[Mapping[str, str]] = {
    "actuators": "every write",
    "alerts": "messages to people",
    "cgroupfs": "control files",
    "cli": "bypassctl",
    "clients": "connections",
    "config": "model of all settings",
    "control": "the loop",
    "daemon": "wiring and status",
    "detectors": "signals to verdicts",
    "headroom": "what BE may be promised",
    "interference": "one pass over all rules",
    "placement": "which CPUs and nodes",
    "pods": "what a pod is",
    "policies": "what is wanted",
    "resctrl": "cache allocation files",
    "responses": "ladder and eviction",
    "runtime": "what any daemon needs",
    "settings": "YAML to checked values",
    "signals": "what is measured",
    "sources": "where knowledge comes from",
    "state": "models, ledger, store",
    "telemetry": "metrics",
    "web": "HTTP",
}
_BOX: Final = (184.0, 42.0)
_LANE: Final = 22.0
"""Room for an arrow that passes a row."""
_GAP: Final = 26.0
_PORT: Final = 26.0
"""Between two arrows at one box."""
_ROW: Final = 84.0
_MARGIN: Final = 30.0
_LEGEND: Final = "An arrow is an import. Those that a longer way implies are left out; none points up."
_TITLE: Final = 44.0
_SWEEPS: Final = 24
_STRAIGHT: Final = 20


class Arrow(NamedTuple):
    """One room imports another."""

    source: str
    target: str


class _Stop(NamedTuple):
    """A place in a row: of a room, or (``arrow`` set) of an arrow that passes it."""

    room: str
    row: int
    arrow: tuple[str, str] | None = None

    @property
    def width(self) -> float:
        return _BOX[0] if self.arrow is None else _LANE


def imports() -> list[Arrow]:
    """Every pair of rooms of which the first imports the second, sorted."""
    arrows: set[Arrow] = set()
    for package in (*BASE, "reconciler"):
        for path in sorted((ROOT / package).rglob("*.py")):
            source = _room(path.relative_to(ROOT).with_suffix("").parts)
            if source is None:
                continue
            names = _imported(path)
            targets = {_room(tuple(name.split("."))) for name in names} - {source}
            arrows.update(Arrow(source, target) for target in targets if target is not None)
    return sorted(arrows)


def _room(parts: Sequence[str]) -> str | None:
    """``("reconciler", "control", "planner")`` -> ``control``; None for what is no room of ours."""
    if parts[0] in BASE:
        return parts[0]
    if parts[0] != "reconciler" or len(parts) < 2 or not (ROOT / "reconciler" / parts[1]).is_dir():
        return None
    return parts[1]


def _imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from reconciler import config` names the room by what is imported.
            whole = node.module == "reconciler"
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if whole else (node.module,)


def needed(arrows: Sequence[Arrow]) -> list[Arrow]:
    """The arrows without those whose ends a longer way connects. Errors: `ValueError` for a circle."""
    after: dict[str, set[str]] = {}
    for arrow in arrows:
        after.setdefault(arrow.source, set()).add(arrow.target)
    below: dict[str, set[str]] = {}

    def reached(room: str, above: tuple[str, ...]) -> set[str]:
        if room in above:
            raise ValueError(f"rooms import each other in a circle: {' -> '.join((*above, room))}")
        if room not in below:
            nearest = after.get(room, set())
            below[room] = nearest.union(*(reached(text, (*above, room)) for text in sorted(nearest)))
        return below[room]

    return [
        arrow
        for arrow in arrows
        if reached(arrow.source, ())
        and not any(arrow.target in reached(other, ()) for other in after[arrow.source] - {arrow.target})
    ]


def draw() -> str:
    """The picture; the same checkout gives the same text."""
    arrows = needed(imports())
    rows, ways = _rows(arrows)
    xs = _placed(rows, ways)
    left = min(xs[stop] - stop.width / 2 for row in rows for stop in row) - _MARGIN
    right = max(xs[stop] + stop.width / 2 for row in rows for stop in row) + _MARGIN
    width, height = right - left, _TITLE + _ROW * (len(rows) - 1) + _BOX[1] + _MARGIN
    size = f"{width:.0f} {height:.0f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0,0 L8,4 L0,8 z" fill="#35618e"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{_MARGIN:.0f}" y="24" font-size="13" fill="#1d2733">{_LEGEND}</text>',
    ]
    leaving, arriving = _ports(ways, xs)
    for arrow in arrows:
        way = ways[arrow]
        passed = [(xs[stop] - left, stop) for stop in way[1:-1]]
        begin, end = leaving[arrow] - left, arriving[arrow] - left
        parts.append(_path(arrow, [(begin, way[0]), *passed, (end, way[-1])]))
    parts += [_box(xs[stop] - left, stop) for row in rows for stop in row if stop.arrow is None]
    return "\n".join([*parts, "</svg>", ""])


def _rows(arrows: Sequence[Arrow]) -> tuple[list[list[_Stop]], dict[tuple[str, str], list[_Stop]]]:
    """The rows from the top, and the stops of each arrow from its source to its target."""
    rank = dict.fromkeys(sorted({room for arrow in arrows for room in arrow}), 0)
    for _ in rank:
        for arrow in arrows:
            rank[arrow.target] = max(rank[arrow.target], rank[arrow.source] + 1)
    for room in sorted(rank, key=lambda room: -rank[room]):
        # As low as its importees allow: short arrows downwards.
        lower = [rank[arrow.target] for arrow in arrows if arrow.source == room]
        rank[room] = min(lower) - 1 if lower else rank[room]
    rows: list[list[_Stop]] = [[] for _ in range(max(rank.values()) + 1)]
    for room, row in rank.items():
        rows[row].append(_Stop(room, row))
    ways: dict[tuple[str, str], list[_Stop]] = {}
    for source, target in arrows:
        passed = [_Stop(source, row, (source, target)) for row in range(rank[source] + 1, rank[target])]
        for stop in passed:
            rows[stop.row].append(stop)
        ways[source, target] = [_Stop(source, rank[source]), *passed, _Stop(target, rank[target])]
    return rows, ways


def _placed(rows: list[list[_Stop]], ways: Mapping[tuple[str, str], list[_Stop]]) -> dict[_Stop, float]:
    """The middle of each stop. Orders the rows in place: each stop towards the mean of its neighbours."""
    above: dict[_Stop, list[_Stop]] = {}
    below: dict[_Stop, list[_Stop]] = {}
    for way in ways.values():
        for upper, lower in pairwise(way):
            below.setdefault(upper, []).append(lower)
            above.setdefault(lower, []).append(upper)
    xs = {stop: 100.0 * index for row in rows for index, stop in enumerate(row)}
    best: tuple[int, list[list[_Stop]]] | None = None
    for sweep in range(2 * _SWEEPS):
        if sweep == _SWEEPS and best is not None:
            # From here on the order stays, and only the places move.
            for row, order in zip(rows, best[1], strict=True):
                row[:] = order
        downwards = sweep % 2 == 0
        for row in rows if downwards else reversed(rows):
            wished = {stop: _mean(stop, above if downwards else below, xs) for stop in row}
            if sweep < _SWEEPS:
                row.sort(key=lambda stop: (wished[stop], stop.room, stop.arrow or ()))
            _spread(row, wished, xs)
        crossings = _crossings(ways, xs)
        if best is None or crossings < best[0]:
            best = crossings, [list(row) for row in rows]
    both = {stop: [*above.get(stop, ()), *below.get(stop, ())] for row in rows for stop in row}
    for sweep in range(10 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            _spread(row, {stop: _mean(stop, both, xs) for stop in row}, xs)
    return xs


def _crossings(ways: Mapping[tuple[str, str], list[_Stop]], xs: Mapping[_Stop, float]) -> int:
    """How many pairs of arrows cross between two rows."""
    parts = sorted((upper.row, xs[upper], xs[lower]) for way in ways.values() for upper, lower in pairwise(way))
    return sum(
        row[0] == other[0] and (row[1] - other[1]) * (row[2] - other[2]) < 0
        for index, row in enumerate(parts)
        for other in parts[:index]
    )


def _mean(stop: _Stop, neighbours: Mapping[_Stop, list[_Stop]], xs: Mapping[_Stop, float]) -> float:
    """The mean of the neighbours; an arrow that passes several rows is kept straight."""
    near = [(xs[item], _STRAIGHT if stop.arrow and item.arrow else 1) for item in neighbours.get(stop, ())]
    weight = sum(weight for _, weight in near)
    return sum(x * weight for x, weight in near) / weight if near else xs[stop]


def _spread(row: Sequence[_Stop], wished: Mapping[_Stop, float], xs: dict[_Stop, float]) -> None:
    """The places nearest to those wished at which nothing overlaps, in this order (pool adjacent violators)."""
    offsets: list[float] = []
    for index, stop in enumerate(row):
        before = row[index - 1]
        offsets.append(0.0 if not index else offsets[-1] + (before.width + stop.width) / 2 + _GAP)
    pools: list[tuple[float, int]] = []
    for offset, stop in zip(offsets, row, strict=True):
        mean, count = wished[stop] - offset, 1
        while pools and pools[-1][0] > mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    levels = [mean for mean, count in pools for _ in range(count)]
    xs.update((stop, level + offset) for stop, level, offset in zip(row, levels, offsets, strict=True))


def _ports(
    ways: Mapping[tuple[str, str], list[_Stop]], xs: Mapping[_Stop, float]
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Where each arrow leaves its source's box and enters its target's: side by side, in the order of their ways."""
    sides: list[dict[tuple[str, str], float]] = []
    for box, next_to_it in ((0, 1), (-1, -2)):
        at: dict[_Stop, list[tuple[float, tuple[str, str]]]] = {}
        for ends, way in ways.items():
            at.setdefault(way[box], []).append((xs[way[next_to_it]], ends))
        ports: dict[tuple[str, str], float] = {}
        for stop, arrows in at.items():
            for index, (_, ends) in enumerate(sorted(arrows)):
                ports[ends] = xs[stop] + (index - (len(arrows) - 1) / 2) * _PORT
        sides.append(ports)
    return sides[0], sides[1]


def _path(arrow: Arrow, stops: Sequence[tuple[float, _Stop]]) -> str:
    """Curves between the rows, straight down past a row's boxes."""
    x, y = stops[0][0], _TITLE + _ROW * stops[0][1].row + _BOX[1]
    commands = [f"M{x:.1f},{y:.0f}"]
    for next_x, stop in stops[1:]:
        top = _TITLE + _ROW * stop.row
        middle = (y + top) / 2
        commands.append(f"C{x:.1f},{middle:.0f} {next_x:.1f},{middle:.0f} {next_x:.1f},{top:.0f}")
        x, y = next_x, top
        if stop.arrow is not None:
            y = top + _BOX[1]
            commands.append(f"V{y:.0f}")
    return (
        f'<path d="{" ".join(commands)}" fill="none" stroke="#35618e" stroke-width="1.3" marker-end="url(#head)">'
        f"<title>{arrow.source} imports {arrow.target}</title></path>"
    )


def _box(x: float, stop: _Stop) -> str:
    y = _TITLE + _ROW * stop.row
    fill = "#eef3e6" if stop.room in BASE else "#e6eef7"
    return (
        f'<rect x="{x - _BOX[0] / 2:.1f}" y="{y:.0f}" width="{_BOX[0]:.0f}" height="{_BOX[1]:.0f}" rx="6" '
        f'fill="{fill}" stroke="#35618e"/>'
        f'<text x="{x:.1f}" y="{y + 18:.0f}" font-size="14" text-anchor="middle" fill="#1d2733">{stop.room}</text>'
        f'<text x="{x:.1f}" y="{y + 34:.0f}" font-size="11" text-anchor="middle" fill="#55606b">'
        f"{CAPTIONS[stop.room]}</text>"
    )
