"""Draws the way of a new container for docs/concepts.md: kubelet, runtime, its state file, daemon, control files.

``python -m tests.architecture.concept`` (``make docs``) writes docs/concepts.svg; a test compares the two.
"""

from pathlib import Path
from typing import Final, NamedTuple

SVG: Final = Path(__file__).resolve().parents[2] / "docs" / "concepts.svg"
_WIDTH: Final = 940
_HEIGHT: Final = 470
_STYLE: Final = (
    "text{font:13px sans-serif;fill:#1b1f24}.s{font-size:11.5px;fill:#57606a}.n{font-weight:bold}"
    ".b{fill:#f6f8fa;stroke:#57606a}.o{fill:#ddf4ff;stroke:#0969da}.f{fill:#fff8c5;stroke:#9a6700}"
    "path{stroke:#24292f;fill:none;stroke-width:1.5;marker-end:url(#a)}"
)


_DEFS: Final = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" style="fill:#24292f;stroke:none;marker-end:none"/></marker></defs>'
)
_LEGEND: Final = "blue: bypassd; grey: other programs; yellow: files. 1 to 6: a container's start, in order."


class Box(NamedTuple):
    """``kind``: ``b`` another program, ``o`` ours, ``f`` files."""

    x: int
    y: int
    width: int
    kind: str
    title: str
    lines: tuple[str, ...]

    @property
    def height(self) -> int:
        return 34 + 17 * len(self.lines)


class Arrow(NamedTuple):
    way: str
    x: int
    y: int
    text: str


BOXES: Final = (
    Box(20, 30, 205, "b", "kubelet", ("checkpoints: CPUs and owners", "pod list, QoS directories")),
    Box(20, 190, 205, "b", "containerd, runc", ("makes the container's group", "writes its first values")),
    Box(20, 350, 205, "f", "state.json", ("renamed into place when", "the group is complete")),
    Box(370, 30, 230, "o", "bypassd", ("watches, plans, writes only", "differences, reads back")),
    Box(
        370,
        350,
        230,
        "f",
        "container's control files",
        ("cpuset.cpus, cpu.shares,", "cpu.cfs_quota_us, memory, …"),
    ),
    Box(720, 30, 200, "f", "state.db", ("the original of each value,", "durable before the first write")),
    Box(720, 190, 200, "o", "bypassctl, metrics", ("why, diff, hold, off, restore", "scrapes, dashboard, alerts")),
    Box(720, 350, 200, "b", "the container's program", ("begins at least 7.7 ms after", "the rename (median 9.9 ms)")),
)
ARROWS: Final = (
    Arrow("M115 98V188", 123, 145, "1 CRI: start"),
    Arrow("M115 258V348", 123, 303, "3 rename"),
    Arrow("M225 224H357V380H368", 235, 216, "2 mkdir, values"),
    Arrow("M225 395H345V80H368", 235, 412, "4 inotify"),
    Arrow("M225 52H368", 233, 44, "reads, never writes"),
    Arrow("M480 98V348", 488, 250, "5 writes: 0.3 ms median"),
    Arrow("M600 52H718", 612, 44, "originals"),
    Arrow("M718 225H560V100", 606, 217, "asks, holds"),
    Arrow("M600 385H718", 612, 377, "6 exec"),
)


def drawing() -> str:
    """The SVG's text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">',
        "<title>From the runtime's rename to the control files, before the container's program begins</title>",
        f"<style>{_STYLE}</style>",
        _DEFS,
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    parts += [
        f'<path d="{arrow.way}"/><text class="s" x="{arrow.x}" y="{arrow.y}">{arrow.text}</text>' for arrow in ARROWS
    ]
    for box in BOXES:
        x, y = box.x + 12, box.y + 22
        parts.append(
            f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
            f'<text class="n" x="{x}" y="{y}">{box.title}</text>'
        )
        parts += [
            f'<text class="s" x="{x}" y="{y + 18 + 17 * number}">{line}</text>' for number, line in enumerate(box.lines)
        ]
    parts += [
        f'<text class="s" x="20" y="450">{_LEGEND}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    SVG.write_text(drawing(), encoding="utf-8")
