"""Host workloads on the screen: the rows of ``pods``, ``top`` and ``status``, and ``why host:NAME``."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Final

from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import Block, Cell, StyledText, Table, field, line, present
from reconciler.runtime import format as fmt
from state.printable import printable

_PREFIX: Final = "host:"
_KINDS: Final[Row] = {"victim": "victim", "be": "BE"}
_HEADS: Final = ("AS", "CPUS", "USE", "WAIT", "CPU PSI", "MEMORY", "PROCS", "HOST WORKLOAD")
_NAMES: Final = 4
_SHOWN: Final = 200


def table(rows: Sequence[Row]) -> Table:
    lines: list[tuple[Cell, ...]] = [
        (
            str(_KINDS.get(row["counts_as"], row["counts_as"])),
            str(row["cpus"] or fmt.NONE),
            fmt.cpus(row["use_milli"]),
            fmt.percent(row["wait_percent"]),
            fmt.percent(row["cpu_pressure_percent"]),
            fmt.size(row["memory_bytes"]),
            str(row["processes"]),
            _named(row),
        )
        for row in rows
    ]
    return Table(_HEADS, lines, right=frozenset({2, 3, 4, 5, 6}), names=len(_HEADS) - 1)


def node_cells(rows: Sequence[Row]) -> Iterator[Cell]:
    """All of them in one line: how many, what BE ones use, and which match nothing."""
    victims = [row for row in rows if row["counts_as"] == "victim"]
    used = [row["use_milli"] for row in rows if row["counts_as"] == "be" and row["use_milli"] is not None]
    yield f"{fmt.plural(len(rows), 'host workload')}: {len(victims)} victim, {len(rows) - len(victims)} BE"
    if used:
        yield f" that use {fmt.cpu(sum(used))}"
    if absent := [row["name"] for row in rows if is_absent(row)]:
        more = f" and {len(absent) - _NAMES} more" if len(absent) > _NAMES else ""
        yield StyledText(f"; nothing matches: {', '.join(absent[:_NAMES])}{more}", "warn")


def is_absent(row: Row) -> bool:
    """Whether there is nothing of it on the node."""
    return not row["processes"] and not row["read"]


def top_lines(rows: Sequence[Row], most: int) -> Iterator[list[Cell]]:
    """For the head of ``top``: those that use most CPU."""
    busiest = sorted(rows, key=lambda row: (-(row["use_milli"] or 0), row["name"]))
    for row in busiest[:most]:
        text = (
            f"{_KINDS.get(row['counts_as'], row['counts_as']):<6} {fmt.cpus(row['use_milli']):>6} CPU  "
            f"wait {fmt.percent(row['wait_percent']):>6}  {_named(row)}"
        )
        yield [StyledText("host      ", "dim"), text]
    if len(rows) > most:
        yield [StyledText(f"          and {len(rows) - most} more: bypassctl pods", "dim")]


def is_one(options: Namespace, name: str) -> bool:
    """Whether the running daemon has a host workload of this name."""
    rows = fetch(options, ("agent",), say=False).body["agent"].get("host_workloads", ())
    return any(row["name"] == name for row in rows)


def show(options: Namespace, name: str) -> int:
    """``why``: what is read of it, and the verdicts in which it is. Errors: `CliError` for no such entry."""
    document = fetch(options, ("agent", "interference", "budget"), say=True)
    rows = document.body["agent"].get("host_workloads", ())
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        known = ", ".join(row["name"] for row in rows) or "none is configured"
        raise CliError(f"no host workload {printable(name, _SHOWN)!r} (host_workloads: {known})", Exit.NOT_FOUND)
    findings = (document.body.get("interference") or {}).get("findings", ())
    uid = f"{_PREFIX}{name}"
    facts: Row = {
        "host": row,
        "victim_of": [finding for finding in findings if finding["victim"] == uid],
        "suspect_of": [
            {key: finding[key] for key in ("rule", "title", "verdict")}
            | {key: suspect[key] for key in ("score", "reason")}
            for finding in findings
            for suspect in finding["suspects"]
            if suspect["uid"] == uid
        ],
    }
    present(options.output, facts, _blocks(facts))
    return Exit.OK


def _blocks(facts: Row) -> Iterator[Block]:
    row = facts["host"]
    role = "an online victim" if row["counts_as"] == "victim" else "BE use"
    yield line(StyledText(f"host workload {row['name']}", "head"), f": {row['match']}, counts as {role}")
    yield line("watched only: bypassd writes nothing to it, and never ends it")
    if row["problem"]:
        yield line(StyledText("! ", "warn"), row["problem"])
    if not is_absent(row):
        yield from _numbers(row)
    for finding in facts["victim_of"]:
        text = "; ".join(finding["evidence"])
        yield field("verdict", StyledText(finding["verdict"], "warn"), f" ({finding['rule']}): {text}")
        for suspect in finding["suspects"]:
            yield field("", f"suspect {suspect['title']} ({suspect['score']:.2f}): {suspect['reason']}")
    for found in facts["suspect_of"]:
        yield field("suspect", f"of {found['title']} ({found['rule']}, {found['score']:.2f}): {found['reason']}")


def _numbers(row: Row) -> Iterator[Block]:
    if row["groups"]:
        more = f" and {row['read'] - len(row['groups'])} more" if row["read"] > len(row["groups"]) else ""
        yield field("groups", ", ".join(printable(path, _SHOWN) for path in row["groups"]) + more)
    yield field("runs on", f"{fmt.plural(row['processes'], 'process', 'processes')}, CPUs {row['cpus'] or 'not known'}")
    throttled = f", throttled in {fmt.percent(row['throttled_percent'])} of periods" if row["throttled_percent"] else ""
    yield field("uses", f"{fmt.cpus(row['use_milli'])} CPU, {fmt.size(row['memory_bytes'])} of memory{throttled}")
    yield field(
        "waits", f"{fmt.percent(row['wait_percent'])} of its time for a CPU ({fmt.cpus(row['wait_milli'])} tasks)"
    )
    pressures = [(kind, row[f"{kind}_pressure_percent"]) for kind in ("cpu", "memory", "io")]
    known = [f"{kind} {fmt.percent(value)}" for kind, value in pressures if value is not None]
    yield field("pressure", ", ".join(known) or "not measured: no pressure files of its own")
    if row["disk_read_bps"] is not None:
        yield field("disk", f"reads {fmt.rate(row['disk_read_bps'])}, writes {fmt.rate(row['disk_write_bps'] or 0)}")


def _named(row: Row) -> str:
    text = f"{_PREFIX}{row['name']}"
    return f"{text} ({row['problem']})" if row["problem"] else text
