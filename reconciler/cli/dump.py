"""``bypassctl dump`` and ``state-dump``: the whole document, or its tables."""

from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli import words
from reconciler.cli.blocks import Block, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, head, line, show

_KEYS = ("schema", "kind", "source", "at")


def run(options: Namespace) -> int:
    """Show the document."""
    sections = [name for part in options.section for name in part.split(",") if name]
    found = fetch(options, sections)
    body = found.body
    if not found.live:
        for name in sections:
            if name not in body:
                raise CliError(f"--section {name}: not in the store; only a running daemon has it", Exit.USAGE)
        body = {key: value for key, value in body.items() if not sections or key in {*_KEYS, *sections}}
    if options.output == "table":
        show(_blocks(body))
    else:
        emit(body, options.output)
    return Exit.OK


def _blocks(body: Row) -> Iterator[Block]:
    yield line(f"{body['kind']} schema {body['schema']} from the {body['source']}, {words.clock(body['at'])}")
    for name, table in (
        ("pools", _pools),
        ("pods", _pods),
        ("settings", _settings),
        ("files", _files),
        ("holds", _holds),
        ("sources", _sources),
        ("history", _history),
    ):
        if name in body:
            made = table(body)
            yield blank()
            yield head(f"{name} ({len(made.rows)})")
            yield made
    for problem in body.get("problems", ()):
        yield blank()
        yield line(f"problem: {problem}")


def _pools(body: Row) -> Table:
    return Table(("POOL", "CPUS"), [(name, words.text(cpus)) for name, cpus in body["pools"].items()])


def _pods(body: Row) -> Table:
    rows = [(pod["class"], pod["qos"], pod["uid"][:8], pod["title"], pod["class_source"]) for pod in body["pods"]]
    return Table(("CLASS", "QOS", "UID", "POD", "CLASS FROM"), rows)


def _settings(body: Row) -> Table:
    rows = [(one["knob"], words.text(one["value"]), one["policy"], _place(body, one)) for one in body["settings"]]
    return Table(("KNOB", "WANTED", "POLICY", "WHERE"), rows)


def _files(body: Row) -> Table:
    rows = [
        (
            one["file"],
            words.text(one["seen"]),
            words.text(one["wanted"]),
            words.text(one["original"] if one["baseline"] is None else one["baseline"]),
            one["process"] or words.text(one["writer"]),
            _place(body, one),
        )
        for one in body["files"]
    ]
    return Table(("FILE", "SEEN", "WANTED", "TO RESTORE", "WRITER", "WHERE"), rows)


def _holds(body: Row) -> Table:
    rows = [(one["target"], words.until(one["until"]), one["by"], one["reason"]) for one in body["holds"]]
    return Table(("TARGET", "UNTIL", "BY", "REASON"), rows)


def _sources(body: Row) -> Table:
    rows = [
        (one["name"], "ok" if one["ok"] else "bad", words.span(one["age_s"]), one["detail"]) for one in body["sources"]
    ]
    return Table(("SOURCE", "STATE", "AGE", "DETAIL"), rows)


def _history(body: Row) -> Table:
    rows = [
        (
            words.clock(one["at"]),
            one["kind"],
            one["file"],
            f"{words.text(one['before'])} > {words.text(one['after'])}",
            _place(body, one) if one["path"] else one["reason"],
        )
        for one in body["history"]
    ]
    return Table(("TIME", "WHAT", "FILE", "BEFORE > AFTER", "WHERE"), rows)


def _place(body: Row, one: Row) -> str:
    return words.place(one["path"], {pod["group"]: pod["title"] for pod in body.get("pods", ())})
