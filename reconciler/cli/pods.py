"""``bypassctl pods``: the pods of the node, one line each, with their use between two readings of their counters.

A pod is throttled by its own quota, or by that of a directory above it, which it shares with other pods: the larger
amount is shown, with a mark for a directory's. What throttles is judged as for ``why`` (`reconciler.cli.limits`).
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import sleep
from typing import Final, final

from cgroupfs.lines import lines_of
from reconciler.cli.document import Row, fetch_again, fetch_live
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import (
    HEADINGS,
    MARK,
    Block,
    Cell,
    StyledText,
    Table,
    blank,
    emit,
    line,
    may_mean,
    on_terminal,
    plain,
    show,
)
from reconciler.runtime import format as fmt
from reconciler.runtime import streams

_LONGEST_S: Final = 60.0
_HEADS: Final = ("STATE", "CLASS", "CPUS", "QUOTA", "USE", "THROT", "WAIT", "POD")
_WIDE: Final = ("STATE", "CLASS", "POOL", "CPUS", "QUOTA", "USE", "THROT", "BY", "WAIT", "UID", "POD")
AMOUNTS: Final = ("QUOTA", "USE", "THROT", "WAIT")
PARENTS: Final = "podparents"
"""The section with the directories above the pods."""
HOSTS: Final = "hostlist"
"""The section with the host workloads."""
_SECTIONS: Final = ("podlist", PARENTS, HOSTS)
_WITHOUT: Final = "only a running daemon lists pods"
ABOVE: Final = "^"
"""Behind an amount of throttling: by a directory above the pod."""
_KEYS: Final[dict[str, Callable[[Row], tuple[bool, float] | str]]] = {
    "pod": lambda pod: str(pod["title"]),
    "class": lambda pod: str(pod["class"]),
    "pool": lambda pod: str(pod["pool"]),
    "cpus": lambda pod: str(pod["cpus"]),
    "quota": lambda pod: _amount(pod["quota_milli"]),
    "use": lambda pod: _amount(pod["use_milli"]),
    "throttled": lambda pod: _amount(_throttled(pod)),
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
    rates = PodRates()
    complete = not options.interval
    body = fetch_live(options, _SECTIONS, _WITHOUT)
    while True:
        rows, hosts = rates.rows(body), _hosts(body[HOSTS], options)
        if complete:
            chosen = [row for row in rows if wanted(row, options)]
            if options.sort is not None:
                sort_rows(chosen, options.sort)
            if options.output in {"table", "wide"}:
                _show(chosen, len(rows), hosts, options)
            else:
                emit({"pods": chosen, "hosts": hosts}, options.output)
            if not options.watch:
                return Exit.OK
            streams.finish()
        # Two answers make a rate.
        complete = True
        sleep(options.interval)
        body = fetch_again(options, _SECTIONS, sleep) if options.watch else fetch_live(options, _SECTIONS, _WITHOUT)


def _hosts(rows: Sequence[Row], options: Namespace) -> list[Row]:
    """The host workloads that the command line chooses: none where it asks for what only pods have."""
    if options.namespace is not None or options.pod_class is not None or options.pool is not None:
        return []
    return [row for row in rows if may_mean(options.prefix.removeprefix("host:"), row["name"])]


def throttling_parents(before: Sequence[Row], after: Sequence[Row]) -> dict[str, Row]:
    """The directories above pods that throttled them between two answers, by path."""
    if not before or not after:
        return {}
    from reconciler.cli.limits import directories, throttlers  # the models: only for a rate

    # Without a quota now, it was removed meanwhile.
    known = (row for row in directories(before, after) if row["quota_milli"] is not None)
    return {row["path"]: row for row in throttlers(list(known))}


@final
class PodRates:
    """The pods of each answer of the daemon, with their rates since the answer before."""

    def __init__(self) -> None:
        self._pods: Mapping[str, Row] = {}
        self._parents: Sequence[Row] = ()

    def rows(self, body: Row) -> list[Row]:
        """``body``: with ``podlist`` and `PARENTS`."""
        throttling = throttling_parents(self._parents, body[PARENTS])
        rows = [pod_row(pod, self._pods.get(pod["uid"]), throttling) for pod in body["podlist"]]
        self._pods, self._parents = {pod["uid"]: pod for pod in body["podlist"]}, body[PARENTS]
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
        and _named(row, options.prefix)
    )


def _named(row: Row, prefix: str) -> bool:
    # Without a slash it is a name, not the start of a namespace.
    whole = "/" in prefix or MARK in prefix
    return may_mean(prefix, row["name"] or row["uid"]) or (whole and may_mean(prefix, row["title"]))


def pod_row(pod: Row, before: Row | None, throttling: Mapping[str, Row]) -> Row:
    """A pod with its rates between two answers of the daemon. ``throttling``: of `throttling_parents`."""
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
        "throttled_above": _above(pod.get("parent", ""), throttling),
        "wait_percent": pod["wait_percent"],
        "state": pod["state"],
    }


def _above(path: str, throttling: Mapping[str, Row]) -> Row | None:
    """Of the directories above a pod the one that throttles most; None: none does, or none is known."""
    found = []
    while path not in {"", "/"}:
        if path in throttling:
            found.append(throttling[path])
        path = path.rpartition("/")[0]
    if not found:
        return None
    worst = max(found, key=lambda row: float(row["throttled_share"]))
    percent = round(100 * worst["throttled_share"], 1)
    return {"path": worst["path"], "percent": percent, **{key: worst[key] for key in ("quota_milli", "quota_by")}}


def _throttled(row: Row) -> float | None:
    """By whatever throttles the pod most."""
    percent: float | None = row["throttled_above"]["percent"] if _by_parent(row) else row["throttled_percent"]
    return percent


def _by_parent(row: Row) -> bool:
    """Whether a directory above the pod throttles it more than its own quota."""
    parent = row["throttled_above"]
    return parent is not None and parent["percent"] > (row["throttled_percent"] or 0.0)


def parent_texts(rows: Sequence[Row]) -> list[str]:
    """One line for each directory that the rows have an `ABOVE` for."""
    parents = {row["throttled_above"]["path"]: row["throttled_above"] for row in rows if _by_parent(row)}
    return [
        f"{parent['path']}: quota of {fmt.cpu(parent['quota_milli'])}, by {parent['quota_by']}"
        for _, parent in sorted(parents.items())
    ]


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None or after < before else after - before


def _amount(value: float | None) -> tuple[bool, float]:
    return value is not None, value or 0.0


def _show(rows: list[Row], total: int, hosts: Sequence[Row], options: Namespace) -> None:
    blocks = list(_blocks(rows, total, wide=options.output == "wide"))
    if hosts:
        from reconciler.cli.hosts import table  # only where there are any

        blocks += [blank(), table(hosts)]
    if not options.watch:
        show(blocks)
    elif on_terminal():
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
    yield Table(heads, lines, right=amounts, names=len(heads) - 1)
    # A pipe gets the rows alone, for awk; -o wide names the directory.
    if not wide and HEADINGS["printed"] and on_terminal():
        for text in parent_texts(rows):
            yield line(StyledText(f"{ABOVE} ", "warn"), text)


def pod_cells(row: Row) -> dict[str, Cell]:
    """The text of each column for one row of `PodRates`."""
    return {
        "STATE": StyledText(row["state"], _STATES.get(row["state"], "warn")),
        "CLASS": row["class"],
        "POOL": row["pool"] or fmt.NONE,
        "CPUS": row["cpus"] or fmt.NONE,
        "QUOTA": fmt.cpus(row["quota_milli"]),
        "USE": fmt.cpus(row["use_milli"]),
        "THROT": fmt.percent(_throttled(row)) + (ABOVE if _by_parent(row) else ""),
        "BY": _by(row),
        "WAIT": fmt.percent(row["wait_percent"]),
        "UID": row["uid"],
        "POD": row["title"],
    }


def _by(row: Row) -> str:
    if not _by_parent(row):
        return "own" if row["throttled_percent"] else fmt.NONE
    parent = row["throttled_above"]
    return f"{parent['path']}: {parent['quota_by'].partition(' (')[0]}"


def _redraw(blocks: list[Block]) -> None:
    """Over what is on the terminal, line by line and in one write, so that nothing flickers."""
    import shutil

    width, height = shutil.get_terminal_size()
    lines = [text[:width] for text in lines_of(plain(blocks, width))]
    if len(lines) > height - 1:
        lines = [*lines[: height - 2], f"and {len(lines) - height + 2} more"[:width]]
    with streams.guarded() as out:
        out.write("\x1b[H" + "".join(f"{text}\x1b[K\n" for text in lines) + "\x1b[J")
