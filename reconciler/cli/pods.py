"""``bypassctl pods``: the pods of the node, one line each, with their use between two readings of their counters."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Final

from reconciler.cli.blocks import Block, Cell, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, line, plain, show
from reconciler.runtime import format as fmt
from reconciler.runtime import streams

_LONGEST_S: Final = 60.0
_HEADS: Final = ("STATE", "CLASS", "CPUS", "QUOTA", "USE", "THROT", "WAIT", "POD")
_WIDE: Final = ("STATE", "CLASS", "POOL", "CPUS", "QUOTA", "USE", "THROT", "WAIT", "UID", "POD")
AMOUNTS: Final = ("QUOTA", "USE", "THROT", "WAIT")
_KEYS: Final[dict[str, Callable[[Row], tuple[bool, float] | str]]] = {
    "pod": lambda pod: str(pod["title"]),
    "class": lambda pod: str(pod["class"]),
    "pool": lambda pod: str(pod["pool"]),
    "cpus": lambda pod: str(pod["cpus"]),
    "quota": lambda pod: _amount(pod["quota_milli"]),
    "use": lambda pod: _amount(pod["use_milli"]),
    "throttled": lambda pod: _amount(pod["throttled_percent"]),
    "wait": lambda pod: _amount(pod["wait_percent"]),
    "state": lambda pod: str(pod["state"]),
}
_LARGEST_FIRST: Final = frozenset({"quota", "use", "throttled", "wait"})
_STATES: Final = {"managed": "ok", "frozen": "bad", "failing": "bad", "unmanaged": "dim", "observe": "dim"}


def run(options: Namespace) -> int:
    """List them once, or again and again until Ctrl-C. Errors: `CliError` without a daemon."""
    if not 0 <= options.interval <= _LONGEST_S:
        raise CliError(f"--interval {options.interval:g}: expected 0 to {_LONGEST_S:g} seconds", Exit.USAGE)
    if options.watch and not options.interval:
        raise CliError("--watch needs an --interval above 0", Exit.USAGE)
    try:
        return _run(options)
    except KeyboardInterrupt:
        if not options.watch:
            raise
        return Exit.OK


def _run(options: Namespace) -> int:
    before: dict[str, Row] = {}
    pods = _read(options)
    if options.interval:
        before = {pod["uid"]: pod for pod in pods}
        _wait(options.interval)
        pods = _read(options)
    while True:
        rows = listed(pods, before, options)
        if options.output in {"table", "wide"}:
            _show(rows, len(pods), options)
        else:
            emit({"pods": rows}, options.output)
        if not options.watch:
            return Exit.OK
        streams.finish()
        before = {pod["uid"]: pod for pod in pods}
        _wait(options.interval)
        pods = _read(options)


def _wait(seconds: float) -> None:
    time.sleep(seconds)


def _read(options: Namespace) -> list[Row]:
    document = fetch(options, ("podlist",), say=False)
    if not document.live:
        raise CliError(f"{document.down}; only a running daemon lists pods", Exit.UNREACHABLE)
    pods: list[Row] = document.body["podlist"]
    return pods


def listed(pods: list[Row], before: dict[str, Row], options: Namespace) -> list[Row]:
    """The chosen pods in order, with their rates since ``before``."""
    rows = [pod_row(pod, before.get(pod["uid"])) for pod in pods]
    rows = [row for row in rows if wanted(row, options)]
    if options.sort is not None:
        sort_rows(rows, options.sort)
    return rows


def sort_rows(rows: list[Row], column: str) -> None:
    """In place. Amounts: the largest first, what is not known last. Equal ones keep the daemon's order: class, name."""
    rows.sort(key=_KEYS[column], reverse=column in _LARGEST_FIRST)


def wanted(row: Row, options: Namespace) -> bool:
    """Whether the command line chooses this pod."""
    return (
        (options.namespace is None or row["namespace"] == options.namespace)
        and (options.pod_class is None or row["class"] == options.pod_class)
        and (options.pool is None or row["pool"] == options.pool)
        and (row["name"] or row["uid"]).startswith(options.prefix.rpartition("/")[2])
        and ("/" not in options.prefix or row["namespace"] == options.prefix.partition("/")[0])
    )


def pod_row(pod: Row, before: Row | None) -> Row:
    """A pod with its rates between two answers of the daemon."""
    counters, old = pod["counters"], {} if before is None else before["counters"]
    use_milli, shares = None, []
    for group, now in counters.items():
        then = old.get(group)
        if then is None or (seconds := now["at_s"] - then["at_s"]) <= 0:
            continue
        used = _grown(then["cpu_ns"], now["cpu_ns"])
        if group == "" and used is not None:
            use_milli = round(used / seconds / 1e6)
        periods, hit = (_grown(then[key], now[key]) for key in ("periods", "throttled_periods"))
        if periods and hit is not None:
            shares.append(min(100.0, 100.0 * hit / periods))
    return {
        "title": f"{pod['namespace']}/{pod['name']}" if pod["name"] else pod["uid"],
        **{key: pod[key] for key in ("uid", "namespace", "name", "class", "pool", "cpus", "quota_milli")},
        "use_milli": use_milli,
        "throttled_percent": round(max(shares), 1) if shares else None,
        "wait_percent": pod["wait_percent"],
        "state": pod["state"],
    }


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None or after < before else after - before


def _amount(value: float | None) -> tuple[bool, float]:
    return value is not None, value or 0.0


def _show(rows: list[Row], total: int, options: Namespace) -> None:
    blocks = list(_blocks(rows, total, wide=options.output == "wide"))
    if not options.watch:
        show(blocks)
    elif sys.stdout is not None and sys.stdout.isatty():
        _redraw(blocks)
    else:
        show([line(fmt.clock(time.time())), *blocks, blank()])


def _blocks(rows: list[Row], total: int, *, wide: bool) -> Iterator[Block]:
    if not rows:
        yield line(f"no such pod among {fmt.plural(total, 'pod')}" if total else "no pods")
        return
    heads = _WIDE if wide else _HEADS
    lines = []
    for row in rows:
        cells = pod_cells(row)
        lines.append(tuple(cells[head] for head in heads))
    amounts = frozenset(heads.index(head) for head in AMOUNTS)
    yield Table(heads, lines, right=amounts)


def pod_cells(row: Row) -> dict[str, Cell]:
    """The text of each column for one pod of `listed`."""
    return {
        "STATE": StyledText(row["state"], _STATES.get(row["state"], "warn")),
        "CLASS": row["class"],
        "POOL": row["pool"] or fmt.NONE,
        "CPUS": row["cpus"] or fmt.NONE,
        "QUOTA": fmt.cpus(row["quota_milli"]),
        "USE": fmt.cpus(row["use_milli"]),
        "THROT": _percent(row["throttled_percent"]),
        "WAIT": _percent(row["wait_percent"]),
        "UID": row["uid"],
        "POD": row["title"],
    }


def _percent(value: float | None) -> str:
    return fmt.NONE if value is None else fmt.percent(value)


def _redraw(blocks: list[Block]) -> None:
    """Over what is on the terminal, line by line and in one write, so that nothing flickers."""
    import shutil

    width, height = shutil.get_terminal_size()
    lines = [text[:width] for text in plain(blocks).splitlines()]
    if len(lines) > height - 1:
        lines = [*lines[: height - 2], f"and {len(lines) - height + 2} more"[:width]]
    with streams.guarded() as out:
        out.write("\x1b[H" + "".join(f"{text}\x1b[K\n" for text in lines) + "\x1b[J")
