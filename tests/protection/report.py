"""From the record of `tests.protection` to tables: medians over rounds, against alone in the same round."""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.protection.laws import LAWS

CPUS: Final = os.cpu_count() or 1
AIM_P99: Final = 1.1
AIM_P999: Final = 1.25
AIM_WORK: Final = 0.8
"""The aim: online p99 and p99.9 as multiples of alone, and BE work as a share of what is left for it."""
LATE_US: Final = 500.0
"""A generator that is itself later than this (p99) measures itself."""


class Outcome(NamedTuple):
    """One service at one load beside one kind of work under one law, over all rounds.

    ``p99``, ``p999``: ratio to alone, median of the rounds; ``spread``: the p99's smallest and largest. ``typical``:
    the same of the median quarter second's p99, None where the record has longer windows. ``work``: of BE, as a share
    of what it does with the machine to itself, in proportion to the CPU that online leaves.
    ``ran``: CPU time of a request as a multiple of alone; ``waited_us``: what a request waited for a CPU, microseconds;
    None where the record does not have them.
    ``alone_us``, ``alone_spread``: alone's p99, the median and the smallest and largest of all rounds.
    """

    service: str
    share: float
    hog: str
    law: str
    p99: float
    p999: float
    spread: tuple[float, float]
    typical: float | None
    work: float
    ran: float | None
    waited_us: float | None
    p99_us: float
    alone_us: float
    alone_spread: tuple[float, float]
    busy: float


def read_record(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes(rows: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    alone: dict[tuple[str, float, int, int], list[Mapping[str, Any]]] = {}
    machine: dict[tuple[str, str], float] = {}
    cells: dict[tuple[str, float, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "alone_work" in row:
            machine[row["service"], row["hog"]] = row["alone_work"]
        elif row["law"] == "alone":
            alone.setdefault(_base(row), []).append(row)
        else:
            cells.setdefault((row["service"], row["share"], row["hog"], row["law"]), []).append(row)
    bases = {
        key: {
            **{name: statistics.median(row.get(name, 0) for row in some) for name in ("p99", "p999", "busy", "ran_us")},
            "typical": _typical(window for row in some for window in row["windows"]),
        }
        for key, some in alone.items()
    }
    ever: dict[tuple[str, float], list[float]] = {}
    for (service, share, *_), some in alone.items():
        ever.setdefault((service, share), []).extend(row["p99"] for row in some)
    result = []
    for (service, share, hog, law), some in cells.items():
        pairs = [(cell, bases[_base(cell)]) for cell in some]
        p99 = [cell["p99"] / base["p99"] for cell, base in pairs]
        # Records from before 2026-11-23 have windows of a second, of which a cell has two.
        typical = [
            _typical(cell["windows"]) / base["typical"]
            for cell, base in pairs
            if "settle_s" in cell and base["typical"]
        ]
        whole = machine.get((service, hog), 0.0)
        work = [
            cell["work"] / (whole * max(0.05, 1 - base["busy"] / cell.get("cpus", CPUS))) if whole else 0.0
            for cell, base in pairs
        ]
        scheduled = [(cell, base) for cell, base in pairs if base["ran_us"]]
        result.append(
            Outcome(
                service=service,
                share=share,
                hog=hog,
                law=law,
                p99=statistics.median(p99),
                p999=statistics.median(cell["p999"] / base["p999"] for cell, base in pairs),
                spread=(min(p99), max(p99)),
                typical=statistics.median(typical) if typical else None,
                work=statistics.median(work),
                ran=statistics.median(cell["ran_us"] / base["ran_us"] for cell, base in scheduled)
                if scheduled
                else None,
                waited_us=statistics.median(cell["waited_us"] for cell, _ in scheduled) if scheduled else None,
                p99_us=statistics.median(cell["p99"] for cell, _ in pairs),
                alone_us=statistics.median(base["p99"] for _, base in pairs),
                alone_spread=(min(ever[service, share]), max(ever[service, share])),
                busy=statistics.median(cell["busy"] for cell, _ in pairs),
            )
        )
    return result


def _base(row: Mapping[str, Any]) -> tuple[str, float, int, int]:
    """Which alone a cell is compared with: its own; in records without pairs those of its round."""
    return row["service"], row["share"], row["round"], row.get("pair", 0)


def _typical(windows: Iterable[float]) -> float:
    some = [window for window in windows if window >= 0]
    return statistics.median(some) if some else 0.0


def summary(known: Sequence[Outcome]) -> str:
    """A line for each law over the cells that every law has; its last columns are the share of cells within the aim."""
    laws = list(dict.fromkeys(one.law for one in known))
    cells: dict[tuple[str, float, str], dict[str, Outcome]] = {}
    for one in known:
        cells.setdefault((one.service, one.share, one.hog), {})[one.law] = one
    whole = [some for some in cells.values() if len(some) == len(laws)]
    head = (
        "| law | p99 | geometric mean | nine of ten below | worst | of a quarter second | p99.9 "
        "| CPU time of a request | its wait for a CPU | BE work "
    )
    lines = [
        f"Medians over the {len(whole)} cells that all laws have:",
        "",
        f"{head}| p99 at most {AIM_P99} | p99.9 at most {AIM_P999} | BE work at least {AIM_WORK:.0%} |",
        "|---|" + "---:|" * 12,
    ]
    for law in laws if whole else ():
        some = [cell[law] for cell in whole]
        p99 = sorted(one.p99 for one in some)
        typical = [one.typical for one in some]
        work = [one.work for one in some]
        of_work = ("-", "-") if is_control(law) else (f"{statistics.median(work):.0%}", _share(work, AIM_WORK.__le__))
        lines.append(
            f"| `{law}` | {statistics.median(p99):.2g} | {statistics.geometric_mean(p99):.2g} "
            f"| {p99[math.ceil(0.9 * len(p99)) - 1]:.2g} | {p99[-1]:.2g} "
            f"| {_median(typical, '.2g')} "
            f"| {statistics.median(one.p999 for one in some):.2g} | {_median([one.ran for one in some], '.2f')} "
            f"| {_median([one.waited_us for one in some], '.1f', ' us')} | {of_work[0]} "
            f"| {_share(p99, AIM_P99.__ge__)} | {_share([one.p999 for one in some], AIM_P999.__ge__)} | {of_work[1]} |"
        )
    return "\n".join(lines)


def is_control(law: str) -> bool:
    """Whether there is no BE work under it."""
    return law in LAWS and LAWS[law].control


def _median(values: Iterable[float | None], form: str, unit: str = "") -> str:
    some = [value for value in values if value is not None]
    return f"{statistics.median(some):{form}}{unit}" if some else "-"


def _share(values: Sequence[float], reached: Callable[[float], bool]) -> str:
    return f"{sum(map(reached, values)) / len(values):.0%}"


def generator(rows: Iterable[Mapping[str, Any]]) -> str:
    """What the generator took and how late it was itself; of a record with its use. Else an empty text."""
    cells = [row for row in rows if "generator" in row]
    if not cells:
        return ""
    late = sum(row["late_p99"] > LATE_US for row in cells)
    return (
        f"The generator used at most {max(row['generator'] for row in cells):.2f} CPU (median "
        f"{statistics.median(row['generator'] for row in cells):.2f}); in {late} of {len(cells)} measurements it was "
        f"itself late by more than {LATE_US:.0f} us (p99)."
    )


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each service, load and kind of work; a column for each law: p99 and p99.9 as ratios, and BE's work."""
    known = outcomes(rows)
    laws = list(dict.fromkeys(one.law for one in known))
    by = {(one.service, one.share, one.hog, one.law): one for one in known}
    lines = ["| service | load | BE work | alone p99 | " + " | ".join(laws) + " |", "|---" * (4 + len(laws)) + "|"]
    for service, share, hog in dict.fromkeys((one.service, one.share, one.hog) for one in known):
        some = [by.get((service, share, hog, law)) for law in laws]
        first = next(one for one in some if one is not None)
        least, most = first.alone_spread
        texts = [
            "-" if one is None else f"{one.p99:.2f} {one.p999:.2f}{'' if is_control(one.law) else f', {one.work:.0%}'}"
            for one in some
        ]
        lines.append(
            f"| {service} | {share:.0%} | {hog} | {first.alone_us:.0f} us ({least:.0f}-{most:.0f}) | "
            + " | ".join(texts)
            + " |"
        )
    lines += ["", "Each cell: p99 and p99.9 as multiples of alone, BE's work as a share of what is left for it."]
    itself = generator(rows)
    lines += ["", itself] if itself else []
    lines += ["", summary(known)]
    return "\n".join(lines)
