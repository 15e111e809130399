"""From the record of `tests.protection` to tables: medians over rounds, against alone in the same round."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

CPUS: Final = os.cpu_count() or 1


class Outcome(NamedTuple):
    """One service at one load beside one kind of work under one law, over all rounds.

    ``p99``, ``p999``: ratio to alone, median of the rounds; ``spread``: the p99's smallest and largest. ``work``: of
    BE, as a share of what it does with the machine to itself, in proportion to the CPU that online leaves.
    ``alone_us``, ``alone_spread``: alone's p99, the median and the smallest and largest of all rounds.
    """

    service: str
    share: float
    hog: str
    law: str
    p99: float
    p999: float
    spread: tuple[float, float]
    work: float
    p99_us: float
    alone_us: float
    alone_spread: tuple[float, float]
    busy: float


def read_record(path: Path) -> list[dict[str, Any]]:
    """All lines of a record."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes(rows: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """The medians."""
    alone: dict[tuple[str, float, int], list[Mapping[str, Any]]] = {}
    machine: dict[tuple[str, str], float] = {}
    cells: dict[tuple[str, float, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "alone_work" in row:
            machine[row["service"], row["hog"]] = row["alone_work"]
        elif row["law"] == "alone":
            alone.setdefault((row["service"], row["share"], row["round"]), []).append(row)
        else:
            cells.setdefault((row["service"], row["share"], row["hog"], row["law"]), []).append(row)
    bases = {
        key: {name: statistics.median(row[name] for row in some) for name in ("p99", "p999", "busy")}
        for key, some in alone.items()
    }
    ever: dict[tuple[str, float], list[float]] = {}
    for (service, share, _), some in alone.items():
        ever.setdefault((service, share), []).extend(row["p99"] for row in some)
    result = []
    for (service, share, hog, law), some in cells.items():
        pairs = [(cell, bases[service, share, cell["round"]]) for cell in some]
        p99 = [cell["p99"] / base["p99"] for cell, base in pairs]
        whole = machine.get((service, hog), 0.0)
        work = [cell["work"] / (whole * max(0.05, 1 - base["busy"] / CPUS)) if whole else 0.0 for cell, base in pairs]
        result.append(
            Outcome(
                service=service,
                share=share,
                hog=hog,
                law=law,
                p99=statistics.median(p99),
                p999=statistics.median(cell["p999"] / base["p999"] for cell, base in pairs),
                spread=(min(p99), max(p99)),
                work=statistics.median(work),
                p99_us=statistics.median(cell["p99"] for cell, _ in pairs),
                alone_us=statistics.median(base["p99"] for _, base in pairs),
                alone_spread=(min(ever[service, share]), max(ever[service, share])),
                busy=statistics.median(cell["busy"] for cell, _ in pairs),
            )
        )
    return result


def tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each service, load and kind of work; a column for each law: p99 and p99.9 as ratios, and BE's work."""
    known = outcomes(rows)
    laws = list(dict.fromkeys(one.law for one in known))
    by = {(one.service, one.share, one.hog, one.law): one for one in known}
    lines = ["| service | load | BE work | alone p99 | " + " | ".join(laws) + " |", "|---" * (4 + len(laws)) + "|"]
    for service, share, hog in dict.fromkeys((one.service, one.share, one.hog) for one in known):
        some = [by.get((service, share, hog, law)) for law in laws]
        first = next(one for one in some if one is not None)
        least, most = first.alone_spread
        texts = ["-" if one is None else f"{one.p99:.2f} {one.p999:.2f}, {one.work:.0%}" for one in some]
        lines.append(
            f"| {service} | {share:.0%} | {hog} | {first.alone_us:.0f} us ({least:.0f}-{most:.0f}) | "
            + " | ".join(texts)
            + " |"
        )
    lines += ["", "Each cell: p99 and p99.9 as multiples of alone, BE's work as a share of what is left for it."]
    return "\n".join(lines)
