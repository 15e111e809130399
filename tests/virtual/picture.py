"""The record of `make virtual` as the table and the picture of docs/protection.md. Boots nothing.

    python -m tests.virtual.picture RECORD [SVG]

Writes the table to standard output, and the picture into the file SVG. Of each kind of boot (kernel, cgroup version,
load, BE pods) the newest is shown; boots with the kubelet-like daemon or with short-lived pods, whose tables are in
docs/performance.md, are left out.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.virtual.machine import Run
from tests.virtual.report import LawResult, be_share, compared, ratios, reference_of

_STYLE: Final = (
    "<style>text{font:13px sans-serif;fill:#222}.s{font-size:11px;fill:#555}.t{font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#aaa}.b{fill:#1b1b1b}}</style>"
)
_TAIL, _BE = "#0072b2", "#e69f00"
_LEFT, _RIGHT, _BARS, _WIDTH = 110, 590, 630, 800
_ROW: Final = 20
_NAMES: Final = {1: "10 µs", 2: "0.1 ms", 3: "1 ms", 4: "10 ms", 5: "100 ms", 6: "1 s", 7: "10 s"}
"""Of the powers of ten, in microseconds."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the record; the lines of one boot have the same ``at``."""

    at: str
    run: Run
    result: LawResult


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """The newest boot of its kind."""

    run: Run
    results: tuple[LawResult, ...]

    def title(self) -> str:
        """As in ``Linux 5.10, cgroup v1, 2000/s, BestEffort BE pods of 2 spinners``."""
        kernel = ".".join(self.results[0].kernel.split(".")[:2])
        return f"Linux {kernel}, cgroup {self.run.cgroup_version()}, {self.run.rate}/s, {self.run.be_pods()}"


def read_record(text: str) -> tuple[Scene, ...]:
    """The newest boot of each kind, in the order of the kinds' first lines. Errors: `ValueError` for a broken line."""
    boots: dict[str, dict[str, list[Measurement]]] = {}
    for line in text.splitlines():
        try:
            read = msgspec.json.decode(line, type=Measurement)
        except msgspec.MsgspecError as exc:
            raise ValueError(f"not a line of the record ({exc}): {line[:120]}") from exc
        if not (read.run.kubelet_like or read.run.starts_ms):
            kind = Scene(run=read.run, results=(read.result,)).title()
            boots.setdefault(kind, {}).setdefault(read.at, []).append(read)
    newest = [kind[max(kind)] for kind in boots.values()]
    return tuple(Scene(run=boot[0].run, results=tuple(read.result for read in boot)) for boot in newest)


def table(scenes: Iterable[Scene]) -> str:
    """Markdown; in brackets multiples of the scene's reference."""
    rows = [
        "| machine and load | law | p99, µs | p99.9, µs | BE work | daemon's CPU |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for scene in scenes:
        for number, result in enumerate(scene.results):
            beside = ratios(result, scene.results, scene.run.be_qos)
            reference = " (1)" if result.law == reference_of(scene.run.be_qos) else ""
            cells = (
                "" if number else scene.title(),
                f"`{result.law}`",
                compared(result.p99_us, beside and beside.p99) + reference,
                compared(result.p999_us, beside and beside.p999) + reference,
                f"{be_share(result):.1%}" if result.be_ms else "-",
                f"{result.agent_ms / result.wall_ms:.2%}" if result.agent_ms else "-",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def svg(scenes: Sequence[Scene]) -> str:
    """For each law a line from p99 to p99.9 on the scene's logarithmic scale, and a bar of BE work beside it."""
    parts: list[str] = []
    y = 20.0
    for scene in scenes:
        parts.append(f'<text x="12" y="{y:.0f}" class="t">{scene.title()}</text>')
        y += 18
        decades = _decades(scene.results)
        parts += _scale(y, y + _ROW * len(scene.results), decades)
        for result in scene.results:
            parts += _row(result, y + _ROW / 2, decades)
            y += _ROW
        y += 44
    height = max(y - 8, 40)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        'aria-label="online latency and BE work in virtual time, by law">'
    )
    ground = f'<rect class="b" width="{_WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, _STYLE, ground, *parts, "</svg>", ""])


def _decades(results: Sequence[LawResult]) -> range:
    """The powers of ten between which all latencies are, at most 10 s."""
    least, most = min(result.p99_us for result in results), max(result.p999_us for result in results)
    first = min(max(math.floor(math.log10(max(least, 1))), min(_NAMES)), max(_NAMES) - 1)
    return range(first, max(min(math.ceil(math.log10(max(most, 1))), max(_NAMES)), first + 1) + 1)


def _scale(top: float, bottom: float, decades: range) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="{bottom + 28:.0f}" class="s">latency of online requests: p99 to p99.9</text>'
    yield f'<text x="{_BARS}" y="{bottom + 14:.0f}" class="s">BE work, of what online leaves</text>'
    for exponent in decades:
        x = _across(10.0**exponent, decades)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}" stroke="#999" stroke-width="0.4"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="middle" class="s">{_NAMES[exponent]}</text>'


def _row(result: LawResult, y: float, decades: range) -> Iterator[str]:
    yield f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{result.law}</text>'
    from_, to = _across(result.p99_us, decades), _across(result.p999_us, decades)
    yield f'<line x1="{from_:.1f}" x2="{to:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_TAIL}" stroke-width="2"/>'
    yield f'<circle cx="{from_:.1f}" cy="{y:.1f}" r="4.5" fill="{_TAIL}"/>'
    yield f'<circle cx="{to:.1f}" cy="{y:.1f}" r="3.5" fill="#ffffff" stroke="{_TAIL}" stroke-width="2"/>'
    wide = 150 * min(be_share(result), 1.0)
    yield f'<rect x="{_BARS}" y="{y - 6:.1f}" width="{wide:.1f}" height="12" fill="{_BE}"/>'


def _across(value_us: float, decades: range) -> float:
    exponent = min(max(math.log10(max(value_us, 1)), decades[0]), decades[-1])
    return _LEFT + (exponent - decades[0]) / (decades[-1] - decades[0]) * (_RIGHT - _LEFT)


def main(parts: Sequence[str]) -> int:
    if len(parts) not in {1, 2}:
        print("python -m tests.virtual.picture RECORD [SVG]", file=sys.stderr)
        return 2
    scenes = read_record(Path(parts[0]).read_text())
    print(table(scenes))
    if len(parts) == 2:
        Path(parts[1]).write_text(svg(scenes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
