"""Promised headroom in figures: what was promised, what was there, how often that was less, and by how much."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from reconciler.cli.document import Row
from reconciler.cli.screen import Block, Cell, StyledText, Table, section
from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES, Buckets
from reconciler.runtime import format as fmt

_RESOURCES: Final = {"cpu": ("milli", CPU_MILLI), "memory": ("bytes", MEMORY_BYTES)}
_SUMS: Final = ("kept", "broken", "unknown", "missing")


def add(total: Row, row: Row | None) -> None:
    """Add the promises of an hour's row (None: none were recorded) to ``total``, which is empty at first."""
    if row is None:
        return
    for resource in _RESOURCES:
        side, more = total.setdefault(resource, {}), row[resource]
        for name in _SUMS:
            side[name] = side.get(name, 0) + more[name]
        side["most_missing"] = max(side.get("most_missing", 0.0), more["most_missing"])
        for name in ("promised", "available"):
            _count(side.setdefault(name, {}), more[name])
    _count(total.setdefault("laws", {}), row["laws"])


def figures(row: Row | None) -> Row | None:
    """As ``-o json`` has them; None: nothing was recorded. Promised and available: medians of the known minutes."""
    if not row or not row["laws"]:
        return None
    result: Row = {"laws": dict(row["laws"])}
    for resource, (unit, buckets) in _RESOURCES.items():
        result[resource] = _side(row[resource], unit, buckets)
    return result


def _side(side: Row, unit: str, buckets: Buckets) -> Row:
    broken = side["broken"]
    return {
        "kept": side["kept"],
        "broken": broken,
        "unknown": side["unknown"],
        f"promised_{unit}": _median(side["promised"], buckets),
        f"available_{unit}": _median(side["available"], buckets),
        f"missing_{unit}": round(side["missing"] / broken) if broken else 0,
        f"most_missing_{unit}": round(side["most_missing"]),
    }


def _median(counts: Mapping[Any, int], buckets: Buckets) -> int | None:
    median = buckets.median({int(bucket): count for bucket, count in counts.items()})
    return None if median is None else round(median)


def _count(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def blocks(first: str, rows: Iterable[tuple[str, Row | None]], *, laws: bool = True) -> Iterator[Block]:
    """A table with one row for each name, for which something is known. ``first``: its first column."""
    lines: list[tuple[Cell, ...]] = []
    for name, row in rows:
        if row is None:
            continue
        line: tuple[Cell, ...] = (name, *(["+".join(sorted(row["laws"]))] if laws else []))
        line += tuple(_cells(row["cpu"], "milli", fmt.cpus)) + tuple(_cells(row["memory"], "bytes", fmt.size))
        lines.append(line)
    columns = (first, *(("LAW",) if laws else ()), "CPU", "HAD", "BROKEN", "SHORT", "MEMORY", "HAD", "BROKEN", "SHORT")
    table = Table(columns, lines, frozenset(range(1 + laws, len(columns))))
    yield from section("Headroom of the last hour against what BE work could have had, by minute", table)


def _cells(side: Row, unit: str, text: Callable[[Any], str]) -> Iterator[Cell]:
    known = side["kept"] + side["broken"]
    yield text(side[f"promised_{unit}"]) if known else fmt.NONE
    yield text(side[f"available_{unit}"]) if known else fmt.NONE
    share = f"{side['broken']}/{known}"
    yield StyledText(share, "warn") if side["broken"] else share
    yield text(side[f"missing_{unit}"]) if side["broken"] else fmt.NONE
