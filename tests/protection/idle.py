"""From the records of `tests/vm/idle.sh` to the tables of docs/cpu.md: what the idle classes do, by kernel.

python -m tests.protection.idle FILE...
"""

import errno
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.protection.report import read_record

PLACES: Final = {
    "besteffort": "in besteffort",
    "beside equal": "beside, equal weight",
    "beside": "beside, least weight",
    "above": "below, least weight",
}
SIDES: Final = ("", "threads", "group", "both")
_PLACED: Final = ("besteffort", "besteffort threads", "besteffort group", "besteffort both")


class Kernel(NamedTuple):
    """One that was measured. ``series``: its first two numbers."""

    series: str
    layout: str

    @property
    def title(self) -> str:
        return f"{self.series} {self.layout}"


Row = Mapping[str, Any]


class Measured(NamedTuple):
    """By kernel and form: ``waits`` on one CPU; ``placed`` on several, by their number and how many have no BE work.

    ``groups``: what its files accept, by kernel.
    """

    waits: Mapping[tuple[Kernel, str], Row]
    placed: Mapping[tuple[Kernel, str, int, int], float]
    groups: Mapping[Kernel, Row]
    inherited: Mapping[str, Row]


def series_of(release: str) -> str:
    """``6.1`` of ``6.1.0-56-cloud-amd64``."""
    return ".".join(release.split(".")[:2])


def measured(rows: Iterable[Row]) -> Measured:
    """All lines of the records."""
    waits: dict[tuple[Kernel, str], Row] = {}
    placed: dict[tuple[Kernel, str, int, int], float] = {}
    groups: dict[Kernel, Row] = {}
    inherited: dict[str, Row] = {}
    for row in rows:
        if row.get("fact") == "inherited":
            inherited[series_of(row["release"])] = row
            continue
        kernel = Kernel(series_of(row["release"]), row["layout"])
        if row.get("fact") == "group":
            groups[kernel] = row
        elif "placed" in row:
            placed[kernel, row["form"], row["cpus"], row["kept"]] = row["placed"]
        else:
            waits[kernel, row["form"]] = row
    return Measured(waits, placed, groups, inherited)


def tables(found: Measured) -> str:
    """Waiting by place, placement by CPUs, and the groups' files: a column for each kernel.

    A cell has one figure for each of ``SIDES``, in percent: no idle class, threads, group, both.
    """
    kernels = list(found.groups)
    lines = [_line("BE pod", *(kernel.title for kernel in kernels)), "|---" * (1 + len(kernels)) + "|"]
    for place, title in PLACES.items():
        forms = [f"{place} {side}".strip() for side in SIDES]
        lines.append(_line(title, *(_cell([_waited(found, kernel, form) for form in forms]) for kernel in kernels)))
    lines += ["", _line("CPUs", "without BE work", *(kernel.title for kernel in kernels))]
    lines.append("|---" * (2 + len(kernels)) + "|")
    for cpus, kept in sorted({(cpus, kept) for _, _, cpus, kept in found.placed}):
        cells = [_cell([_placed(found, kernel, form, cpus, kept) for form in _PLACED]) for kernel in kernels]
        lines.append(_line(str(cpus), str(kept), *cells))
    lines += ["", _line("files of a group", *(kernel.title for kernel in kernels)), "|---" * (1 + len(kernels)) + "|"]
    for field, title in _FILES.items():
        lines.append(_line(title, *(_value(found.groups[kernel].get(field)) for kernel in kernels)))
    return "\n".join(lines)


def _waited(found: Measured, kernel: Kernel, form: str) -> str:
    row = found.waits.get((kernel, form))
    return "-" if row is None else f"{100 * row['heavy']['waited']:.1f}"


def _placed(found: Measured, kernel: Kernel, form: str, cpus: int, kept: int) -> str:
    share = found.placed.get((kernel, form, cpus, kept))
    return "-" if share is None else f"{100 * share:.0f}"


def _cell(figures: Sequence[str]) -> str:
    return "/".join(figures)


_FILES: Final = {
    "idle": "`cpu.idle`",
    "least": "least weight, as read",
    "weight_idle": "weight, as read while idle",
    "weight_write": "a write of the weight while idle",
    "weight_after": "weight after `cpu.idle` 0",
}


QUOTAS: Final = {
    "besteffort": "none",
    "besteffort long quota": "40 % in 1 s",
    "besteffort quota": "40 % in 100 ms",
    "besteffort small quota": "10 % in 100 ms",
    "besteffort group quota": "40 % in 100 ms, BE pod in the idle class",
}


def quota_table(found: Measured) -> str:
    """What online pods wait, at both loads, while besteffort has a quota, in percent: a column for each kernel."""
    kernels = list(found.groups)
    lines = [_line("quota of besteffort", *(kernel.title for kernel in kernels)), "|---" * (1 + len(kernels)) + "|"]
    for form, title in QUOTAS.items():
        rows = [found.waits.get((kernel, form)) for kernel in kernels]
        lines.append(
            _line(
                title,
                *(
                    "-" if row is None else _cell([f"{100 * row[load]['waited']:.2f}" for load in ("light", "heavy")])
                    for row in rows
                ),
            )
        )
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "EINVAL" if value == errno.EINVAL else str(value)


def main(files: Sequence[str]) -> int:
    """Print the tables."""
    found = measured(row for file in files for row in read_record(Path(file)))
    print(f"{tables(found)}\n\n{quota_table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
