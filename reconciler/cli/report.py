"""``bypassctl report``: what BE work gained, what online pods paid for it, and whether that is within bounds.

Waits and throttling of online pods are compared between minutes with BE work and minutes without. A bound on what is
not known is neither met nor broken: the gate then has no evidence, which is an exit code of its own. It must not open
because nothing was measured, nothing started, or nothing was enforced.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from reconciler.cli import places
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, field, mark, present, section
from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES, Buckets
from reconciler.runtime import format as fmt

_HOUR_S: Final = 3600
_STEP: Final = 1.25
_SMALLEST_MILLI: Final = 0.05
"""As in `reconciler.control.effect_hours`, which is not imported here for the start-up's sake; a test compares."""
_FEWEST_MINUTES: Final = 10
"""Minutes with BE work, and without, that a comparison needs, and as many minutes of online pods in each of both."""
_FEWEST_STARTS: Final = 10
"""Container starts with a known result, before none of them being late means anything."""
_NOISE_MILLI: Final = 1.0
"""Waits and throttling up to this much (of a pod, on the mean) are within every ratio."""
DEFAULTS: Final[Mapping[str, float]] = {
    "wait": 1.2,
    "throttled": 1.2,
    "late": 0.01,
    "evictions": 1.0,
    "yields": 1.0,
    "held": 0.1,
    "missing": 0.1,
}
MEANINGS: Final[Mapping[str, str]] = {
    "wait": "mean wait of online pods with BE work / without",
    "throttled": "mean throttling of online pods with BE work / without",
    "late": "container starts before their settings / all",
    "evictions": "evictions an hour, failed ones included",
    "yields": "settings left to other writers, an hour",
    "held": "part of the time in which the node was on hold",
    "missing": "part of the time without a recorded minute in mode enforce",
}
_OUTSIDE: Final = "(none)"
_BEFORE: Final = "(before)"
_ANY_MODE: Final = frozenset({"held", "missing"})
"""Bounds that are known also where nothing was enforced."""


_NOT_MEASURED: Final = {
    "wait_milli": "not measured on this node: no cpu.pressure (cgroup v2), and no wait_sum in cpu.stat "
    "(kernel.sched_schedstats=1)",
    "throttled_milli": "no online pod was measured",
}
_NO_WAITS: Final = (
    "waits need online pods, and cpu.pressure (cgroup v2) or wait_sum in cpu.stat (kernel.sched_schedstats=1)"
)
_LONGEST_S: Final = 8 * 86400.0
"""The state file has no earlier hours."""
_RESOURCES: Final = {"cpu": ("milli", CPU_MILLI), "memory": ("bytes", MEMORY_BYTES)}
_LARGEST: Final = "most_missing"
"""A maximum: hours are not added."""


class GateState(StrEnum):
    """What one bound, or the whole gate, says."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"

    def exit_code(self) -> Exit:
        return {self.PASSED: Exit.OK, self.FAILED: Exit.NOT_OK, self.UNKNOWN: Exit.NO_EVIDENCE}[self]

    def mark(self) -> StyledText:
        return StyledText("unknown", "warn") if self is self.UNKNOWN else mark(ok=self is self.PASSED)


_TITLES: Final = {
    GateState.PASSED: "passed",
    GateState.FAILED: "not passed",
    GateState.UNKNOWN: "no evidence",
}


class GateResult(NamedTuple):
    """One bound. ``value`` None: not measured, ``detail`` has why."""

    name: str
    limit: float
    value: float | None
    state: GateState
    detail: str

    def as_row(self) -> Row:
        return {**self._asdict(), "state": self.state.value, "ok": self.state is GateState.PASSED}


def run(options: Namespace) -> int:
    """Show it. Returns the gate's exit code. Errors: `CliError` for a wrong gate, and for an empty report."""
    limits = gate_limits(options.gate) if options.gate is not None else None
    if options.since > _LONGEST_S:
        raise CliError("--since: at most 8d; earlier hours are not stored", Exit.USAGE)
    now = time.time()
    hours = _hours(options, now)
    if not hours and limits is None:
        raise CliError("no hour is recorded yet: the daemon records each minute", Exit.NOT_FOUND)
    total = sums(hours)
    facts: Row = {
        "since_s": options.since,
        "hours": [{"hour_s": row["hour"] * _HOUR_S, **figures(row)} for row in hours],
        "total": figures(total),
        "windows": {name: figures(part) for name, part in window_sums(hours).items()},
    }
    results = gate(total, limits, _span_min(options.since, now)) if limits is not None else []
    state = gate_state(results)
    if limits is not None:
        bounds = [result.as_row() for result in results]
        facts["gate"] = {"ok": state is GateState.PASSED, "state": state.value, "bounds": bounds}
    present(options.output, facts, _blocks(facts, results))
    return state.exit_code()


def gate_limits(text: str) -> dict[str, float]:
    """The bounds: the defaults with those of ``NAME=NUMBER,...``; ``NAME=off`` removes one. Errors: `CliError`."""
    limits = dict(DEFAULTS)
    for part in filter(None, text.split(",")):
        name, equals, number = part.partition("=")
        if name not in DEFAULTS or not equals:
            raise CliError(
                f"--gate {part!r}: expected NAME=NUMBER or NAME=off, NAME: {', '.join(DEFAULTS)}", Exit.USAGE
            )
        if number == "off":
            limits.pop(name, None)
            continue
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = -1.0  # refused below
        if not 0 <= limits[name] < 1e9:
            raise CliError(f"--gate {part!r}: {number!r} is not a number from 0", Exit.USAGE)
    return limits


def _hours(options: Namespace, now: float) -> list[Row]:
    """The rows up to now, the oldest first; the daemon's, else the store's. Whole hours."""
    document = fetch(options, ("effect",))
    if document.live:
        rows: list[Row] = document.body["effect"]
    else:
        rows = _stored(places.find(options).store)
    # The hour in which the time is belongs to it. Those in the future are of a clock that was set back.
    first, last = (int(at) // _HOUR_S for at in (now - options.since, now))
    return [row for row in rows if first <= row["hour"] <= last]


def _span_min(since_s: float, now: float) -> float:
    """Minutes from the start of the first hour in question up to now."""
    return (now - int(now - since_s) // _HOUR_S * _HOUR_S) / 60


def _stored(path: str) -> list[Row]:
    from state.reader import read_dump  # SQLite and msgpack: not with a running daemon

    meta: Any = read_dump(path, history=0)["meta"]
    rows = []
    for key, row in meta.items():
        name = str(key).removeprefix("effect:")
        if name != key and name.isascii() and name.isdecimal() and len(name) < 10 and isinstance(row, dict):
            rows.append({"hour": int(name), **row})
    return sorted(rows, key=lambda row: int(row["hour"]))


def sums(hours: list[Row]) -> Row:
    total: Row = {"be_cpu_s": 0.0, **dict.fromkeys(("minutes", "enforced", "held", "broken"), 0)}
    total |= {name: {} for name in ("counts", "with_be", "without_be", "promises")}
    for row in hours:
        _add(total, {name: row[name] for name in total if row.get(name) is not None})
    return total


def _add(total: Row, row: Row) -> None:
    """Every number, at its place; `_LARGEST` is the largest of all. Histograms are numbers by their bucket's text."""
    for name, value in row.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        else:
            known = total.get(name, 0)
            total[name] = max(known, value) if name == _LARGEST else known + value


def window_sums(hours: list[Row]) -> dict[str, Row]:
    """The minutes in each window of all hours, by name; those outside of all are ``(none)``.

    ``(before)``: minutes of a configuration without windows, where there are others. Empty where there are no others.
    """
    names = dict.fromkeys(name for row in hours for name in row.get("windows", {}))
    if not names:
        return {}
    parts = {
        name or _OUTSIDE: sums([row["windows"][name] for row in hours if name in row.get("windows", {})])
        for name in names
    }
    # Of promises the largest and smallest amounts are not sums.
    whole, within = (
        sums([{**row, "promises": None} for row in rows]) | {"promises": {}} for rows in (hours, parts.values())
    )
    rest = _less(whole, within) | {"promises": None}
    return {**parts, **({_BEFORE: rest} if rest["minutes"] else {})}


def _less(row: Row, part: Row) -> Row:
    """What is left of sums without a part of them."""
    left: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            left[name] = _less(value, part.get(name, {}))
        else:
            left[name] = max(0, value - part.get(name, 0))
    return left


def figures(row: Row) -> Row:
    """One hour, or all, as the report shows it. Waits and throttling: CPUs of one online pod, on the mean and p95."""
    return {
        "be_cpu_hours": round(row["be_cpu_s"] / _HOUR_S, 4),
        **{name: row[name] for name in ("minutes", "enforced", "held", "broken")},
        "with_be": _side(row["with_be"]),
        "without_be": _side(row["without_be"]),
        "counts": dict(row["counts"]),
        "promises": promise_figures(row.get("promises")),
    }


def _side(side: Row) -> Row:
    samples, throttled = side.get("samples", 0), side.get("throttled_samples", 0)
    return {
        "minutes": side.get("minutes", 0),
        "wait_milli": round(side["wait_milli"] / samples, 3) if samples else None,
        "wait_p95_milli": quantile(side["waits"], 0.95) if samples else None,
        "throttled_milli": round(side["throttled_milli"] / throttled, 3) if throttled else None,
    }


def quantile(waits: Mapping[Any, int], rank: float) -> float:
    """The upper bound of the bucket that has the quantile; 0 for the smallest. Thousandths of a CPU."""
    left = rank * sum(waits.values())
    for bucket in sorted(waits, key=int):
        left -= waits[bucket]
        if left <= 1e-9:  # 0, but for the rounding of ``rank``
            return 0.0 if int(bucket) == 0 else round(_SMALLEST_MILLI * _STEP ** int(bucket), 3)
    return 0.0


def gate(total: Row, limits: Mapping[str, float], span_min: float) -> list[GateResult]:
    """Each bound with its value. ``span_min``: minutes that the rows should cover."""
    results = []
    for name, limit in limits.items():
        value, detail = _measured(name, total, span_min)
        state = GateState.UNKNOWN
        if value is not None:
            state = GateState.PASSED if value <= limit else GateState.FAILED
        if name == "missing" and state is GateState.FAILED:
            # What was not recorded is not harm.
            state = GateState.UNKNOWN
        if name == "late" and state is GateState.PASSED and (few := _few_starts(total)):
            state, detail = GateState.UNKNOWN, few
        results.append(GateResult(name, limit, value, state, detail))
    return results


def gate_state(results: Iterable[GateResult]) -> GateState:
    """One broken bound is enough to fail, else one unknown bound to know nothing."""
    states = {result.state for result in results}
    return next((state for state in (GateState.FAILED, GateState.UNKNOWN) if state in states), GateState.PASSED)


def _measured(name: str, total: Row, span_min: float) -> tuple[float | None, str]:
    """A bound's value with its detail; None with why it is not known."""
    counts, minutes, enforced = total["counts"], total["minutes"], total["enforced"]
    if name == "missing":
        lack = max(0.0, 1 - enforced / max(span_min, 1.0))
        return lack, f"{fmt.duration(60.0 * enforced)} of {fmt.duration(60.0 * round(span_min))} enforced and recorded"
    if not minutes:
        return None, "no minute is recorded"
    if not enforced and name not in _ANY_MODE:
        return None, "nothing was enforced (mode observe)"
    if name in {"wait", "throttled"}:
        return _ratio(total, f"{name}_milli")
    if name == "held":
        return total["held"] / minutes, ""
    if name == "late":
        late, starts = counts.get("late", 0), counts.get("starts", 0)
        return (late / starts, f"{late} of {fmt.plural(starts, 'start')}") if starts else (None, _few_starts(total))
    number = counts.get(name, 0) + (counts.get("evictions_failed", 0) if name == "evictions" else 0)
    return number * 60 / minutes, f"{number} in {fmt.duration(60.0 * minutes)}"


def _few_starts(total: Row) -> str:
    """That there are too few, else nothing."""
    starts = total["counts"].get("starts", 0)
    if starts >= _FEWEST_STARTS:
        return ""
    return f"only {fmt.plural(starts, 'start')} with a known result; {_FEWEST_STARTS} are needed"


def _ratio(total: Row, name: str) -> tuple[float | None, str]:
    """Of the means with BE work and without; None with why it is not known."""
    measured = "throttled_samples" if name == "throttled_milli" else "samples"
    sides = [{**_side(total[side]), "samples": total[side].get(measured, 0)} for side in ("with_be", "without_be")]
    busy, quiet = sides[0][name], sides[1][name]
    if not any(side["samples"] for side in sides) and sum(side["minutes"] for side in sides) >= _FEWEST_MINUTES:
        # Before the minutes of one kind, which no time would complete.
        return None, _NOT_MEASURED[name]
    for side, what in zip(sides, ("with", "without"), strict=True):
        if side["minutes"] < _FEWEST_MINUTES:
            return None, f"only {fmt.plural(side['minutes'], 'minute')} {what} BE work; {_FEWEST_MINUTES} are needed"
    for side, what in zip(sides, ("with", "without"), strict=True):
        if side["samples"] < _FEWEST_MINUTES:
            few = fmt.plural(side["samples"], "minute")
            return None, f"only {few} of online pods measured {what} BE work; {_FEWEST_MINUTES} are needed"
    assert busy is not None  # as it has samples
    assert quiet is not None
    detail = f"{fmt.percent(busy / 10)} of a CPU with, {fmt.percent(quiet / 10)} without"
    return (1.0 if busy <= _NOISE_MILLI else busy / max(quiet, _NOISE_MILLI)), detail


def _blocks(facts: Row, results: list[GateResult]) -> Iterator[Block]:
    rows = [_row(_hour_name(row), row) for row in facts["hours"]]
    rows += [_row(name, row) for name, row in facts["windows"].items()]
    rows.append(_row("all", facts["total"]))
    heads = ("HOUR", "BE CPU-H", "MINUTES", "WAIT", "P95", "THROT", "ACT", "EVICT", "LATE")
    yield Table(heads, rows, right=frozenset(range(1, len(heads))))
    yield blank()
    total, counts = facts["total"], facts["total"]["counts"]
    yield field("gained", f"{fmt.number(total['be_cpu_hours'])} CPU-hours of BE work")
    sides = (total["with_be"], total["without_be"])
    for part, text in zip(sides, ("with BE", "without"), strict=True):
        yield field(text, "; ".join(_side_texts(part)))
    if any(part["minutes"] and part["wait_milli"] is None for part in sides):
        yield field("", StyledText(_NO_WAITS, "dim"))
    yield field(
        "actions",
        f"{counts.get('actions', 0)}, {counts.get('helped', 0)} helped, {counts.get('undone', 0)} undone; "
        f"{fmt.plural(counts.get('evictions', 0), 'eviction')}, {counts.get('evictions_failed', 0)} failed or refused",
    )
    yield field(
        "others",
        f"{fmt.plural(counts.get('foreign_writes', 0), 'foreign write')}, "
        f"{fmt.plural(counts.get('yields', 0), 'setting')} left to other writers; "
        f"{counts.get('late', 0)} of {fmt.plural(counts.get('starts', 0), 'start')} late",
    )
    if (be_ms := counts.get("host_be_ms", 0)) or counts.get("host_wait_ms", 0):
        be, waited = fmt.number(be_ms / 1000 / _HOUR_S), fmt.duration(counts.get("host_wait_ms", 0) / 1000)
        yield field("host", f"BE host workloads used {be} CPU-hours; tasks of victims waited {waited} for a CPU")
    mode = f"enforced {total['enforced']} of {fmt.plural(total['minutes'], 'minute')}, on hold {total['held']}"
    if total["broken"]:
        mode += f"; {total['broken']} of them with a setting or a claim not in force (bypassctl status)"
    yield field("mode", mode)
    named = [(_hour_name(row), row["promises"]) for row in facts["hours"]]
    named += [(name, row["promises"]) for name, row in facts["windows"].items()]
    yield from promise_blocks("HOUR", [*named, ("all", total["promises"])])
    if results:
        bounds = [_bound(result) for result in results]
        table = Table(("", "BOUND", "VALUE", "LIMIT", "DETAIL"), bounds, frozenset({2, 3}))
        yield from section(f"gate: {_TITLES[gate_state(results)]}", table)


def _hour_name(row: Row) -> str:
    return time.strftime("%a %H:00", time.localtime(row["hour_s"]))


def _side_texts(part: Row) -> Iterator[str]:
    """The minutes with or without BE work; of none there is nothing more to report."""
    yield fmt.plural(part["minutes"], "minute")
    if not part["minutes"]:
        return
    waited, throttled = part["wait_milli"], part["throttled_milli"]
    known = waited is not None
    yield f"an online pod waited {_share(waited)}, p95 {_share(part['wait_p95_milli'])}" if known else "waits unknown"
    yield f"throttled {_share(throttled)}" if throttled is not None else "throttling unknown"


def _row(name: str, row: Row) -> tuple[str, ...]:
    busy, quiet, counts = row["with_be"], row["without_be"], row["counts"]
    return (
        name,
        fmt.number(row["be_cpu_hours"]),
        f"{busy['minutes']}/{quiet['minutes']}",
        *(f"{_short(busy[key])}/{_short(quiet[key])}" for key in ("wait_milli", "wait_p95_milli", "throttled_milli")),
        str(counts.get("actions", 0)),
        str(counts.get("evictions", 0)),
        str(counts.get("late", 0)),
    )


def _bound(result: GateResult) -> tuple[Any, ...]:
    value = fmt.NONE if result.value is None else fmt.number(result.value)
    text = f"{MEANINGS[result.name]}{f': {result.detail}' if result.detail else ''}"
    return result.state.mark(), result.name, value, fmt.number(result.limit), text


def _short(milli: float | None) -> str:
    """Percent of a CPU, without the unit."""
    return fmt.NONE if milli is None else fmt.number(milli / 10)


def _share(milli: float) -> str:
    return f"{fmt.percent(milli / 10)} of a CPU"


# Promised headroom: what was promised, what was there, how often that was less, and by how much


def promise_figures(row: Row | None) -> Row | None:
    """As ``-o json`` has them; None: nothing was recorded. Promised and available: medians of the known minutes."""
    if not row or not row["laws"]:
        return None
    result: Row = {"laws": dict(row["laws"])}
    for resource, (unit, buckets) in _RESOURCES.items():
        result[resource] = _promised_side(row[resource], unit, buckets)
    return result


def _promised_side(side: Row, unit: str, buckets: Buckets) -> Row:
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


def promise_blocks(first: str, rows: Iterable[tuple[str, Row | None]], *, laws: bool = True) -> Iterator[Block]:
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
