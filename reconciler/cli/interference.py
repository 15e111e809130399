"""``bypassctl interference``: victims and suspects, evidence, and responses in force."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Final

from reconciler.cli.blocks import Block, Cell, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, head, line, show
from reconciler.cli.watched import SHOWN, STYLES
from reconciler.runtime import format as fmt

_MOST_UNKNOWN: Final = 5
_NO_SUSPECT: Final = "no suspect found"
_OF_VICTIMS: Final = ("findings", "ladder")


def run(options: Namespace) -> int:
    """Show it. `Exit.NOT_OK` while a victim is interfered.

    Errors: `CliError` when detection is disabled, or no daemon runs.
    """
    document = fetch(options, ("interference",), say=False)
    if not document.live:
        raise CliError(f"{document.down}; interference is known to a running daemon only", Exit.UNREACHABLE)
    seen: Row = document.body.get("interference") or {}
    if not seen:
        if options.output != "table":
            emit({"interference": None}, options.output)
        raise CliError("interference detection is disabled; enable: interference.enabled: true", Exit.NOT_FOUND)
    if options.namespace is not None:
        start = f"{options.namespace}/"
        seen = {**seen, **{key: [row for row in seen[key] if row["title"].startswith(start)] for key in _OF_VICTIMS}}
    if options.output == "table":
        show(_blocks(seen))
    else:
        emit({"interference": seen}, options.output)
    return Exit.NOT_OK if any(finding["verdict"] == "interfered" for finding in seen["findings"]) else Exit.OK


def _blocks(seen: Row) -> Iterator[Block]:
    yield Table(("RULE", "MODE", "OK", "SUSPECTED", "INTERFERED", "UNKNOWN", "RESPONSES"), list(_rules(seen)), _NUMBERS)
    yield from _records(seen)
    suffering = [finding for finding in seen["findings"] if finding["verdict"] in {"interfered", "suspect"}]
    for entry in sorted(
        suffering, key=lambda item: (item["verdict"] != "interfered", -item["severity"], item["title"])
    ):
        yield blank()
        yield from _finding(entry)
    climbs = [item for item in seen["ladder"] if item["steps"]]
    if climbs:
        yield blank()
        yield head("Actions")
        yield Table(("FOR", "RULE", "SINCE", "", "STEP"), [row for climb in climbs for row in _steps(climb)])
    yield from _unknown(seen)
    yield from _signals(seen)


_NUMBERS: Final = frozenset({2, 3, 4, 5})


def _rules(seen: Row) -> Iterator[tuple[Cell, ...]]:
    for name, rule in seen["rules"].items():
        counts = seen["verdicts"].get(name, {})
        mode: Cell = StyledText("dry run", "dim") if rule["dry_run"] else StyledText("enforced", "ok")
        cells = [_count(counts, verdict) for verdict in ("ok", "suspect", "interfered", "unknown")]
        yield (name, mode, *cells, ", ".join(rule["responses"]) or "report only")


def _records(seen: Row) -> Iterator[Block]:
    """Rules whose mode follows from evidence."""
    records = {name: rule["record"] for name, rule in seen["rules"].items() if rule.get("record")}
    if not records:
        return
    yield blank()
    yield head("Modes by evidence")
    rows: list[tuple[Cell, ...]] = []
    for name, record in records.items():
        mode = "enforced" if record["enforcing"] else "dry run"
        since = fmt.NONE if record["since_s"] is None else fmt.clock(record["since_s"])
        rows.append((name, mode, since, str(record["demotions"]), record["text"]))
    yield Table(("RULE", "MODE", "SINCE", "FAILED", "RECORD"), rows, frozenset({3}))


def _count(counts: Row, verdict: str) -> Cell:
    count = counts.get(verdict, 0)
    return StyledText(str(count), STYLES[verdict]) if count else StyledText("-", "dim")


def _finding(fields: Row) -> Iterator[Block]:
    since = fmt.duration(fields["for_s"])
    yield line(
        f"victim {fields['title']}  ",
        StyledText(str(SHOWN.get(fields["verdict"], fields["verdict"])), STYLES[fields["verdict"]]),
        StyledText(f" by rule {fields['rule']}, for {since}, severity {fields['severity']:.2f}", "dim"),
    )
    for text in fields["evidence"]:
        yield line(text, indent=2)
    rows = [(f"{suspect['score']:.2f}", suspect["title"], suspect["reason"]) for suspect in fields["suspects"]]
    if rows:
        yield Table(("  SCORE", "SUSPECT", "WHY"), rows, frozenset({0}))
    elif _NO_SUSPECT not in fields["evidence"]:
        yield line(StyledText(_NO_SUSPECT, "dim"), indent=2)


def _steps(climb: Row) -> Iterator[tuple[Cell, ...]]:
    for step in climb["steps"]:
        yield climb["title"], climb["rule"], fmt.duration(step["for_s"]), StyledText(_state(step), "dim"), step["words"]


def _state(step: Row) -> str:
    if step["dry_run"]:
        return "would"
    if step["response"] == "evict":
        return "terminating" if step["ending"] else "requested"
    return "in force" if step["judged"] else "evaluating"


def _unknown(seen: Row) -> Iterator[Block]:
    unknown = [finding for finding in seen["findings"] if finding["verdict"] == "unknown"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in unknown:
        reasons.setdefault((entry["rule"], "; ".join(entry["evidence"])), []).append(entry["title"])
    if reasons:
        yield blank()
        yield head("Cannot judge")
        rows = []
        for (rule, why), titles in sorted(reasons.items(), key=lambda item: -len(item[1]))[:_MOST_UNKNOWN]:
            whose = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"
            rows.append((rule, whose, why))
        yield Table(("RULE", "PODS", "WHY"), rows)
        if len(reasons) > _MOST_UNKNOWN:
            yield line(StyledText(f"and {len(reasons) - _MOST_UNKNOWN} more reasons: see -o json", "dim"))


def _signals(seen: Row) -> Iterator[Block]:
    by_reason: dict[str, list[str]] = {}
    for name, why in sorted(seen["signals"]["problems"].items()):
        by_reason.setdefault(why, []).append(name)
    if by_reason:
        yield blank()
        yield head("Signals missing on this node")
        for why, names in by_reason.items():
            yield line(StyledText(", ".join(names), "warn"), f": {why}", indent=2)
