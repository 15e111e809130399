"""``bypassctl dump`` and ``state-dump``: the whole document, or its tables."""

from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli.blocks import Block, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import exact_text, file_text, group_title, value_text
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, head, line, show
from reconciler.runtime import format as fmt

_KEYS = ("schema", "kind", "source", "at")


def run(options: Namespace) -> int:
    """Show the document."""
    sections = [name for part in options.section for name in part.split(",") if name]
    document = fetch(options, sections)
    body = document.body
    if not document.live:
        for name in sections:
            if name not in body:
                raise CliError(f"--section {name}: only available from a running daemon", Exit.USAGE)
        body = {key: value for key, value in body.items() if not sections or key in {*_KEYS, *sections}}
    if options.output == "table":
        show(_blocks(body))
    else:
        emit(body, options.output)
    return Exit.OK


def _blocks(body: Row) -> Iterator[Block]:
    yield line(f"{body['kind']} schema {body['schema']} from the {body['source']}, {fmt.clock(body['at'])}")
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
    return Table(("POOL", "CPUS"), [(name, value_text(cpus)) for name, cpus in body["pools"].items()])


def _pods(body: Row) -> Table:
    rows = [(pod["class"], pod["qos"], pod["uid"][:8], pod["title"], pod["class_source"]) for pod in body["pods"]]
    return Table(("CLASS", "QOS", "UID", "POD", "CLASS FROM"), rows)


def _settings(body: Row) -> Table:
    rows = [
        (setting["knob"], exact_text(setting["knob"], setting["value"]), setting["policy"], _place(body, setting))
        for setting in body["settings"]
    ]
    return Table(("KNOB", "WANTED", "POLICY", "WHERE"), rows)


def _files(body: Row) -> Table:
    rows = [
        (
            file["file"],
            file_text(file["file"], file["seen"]),
            file_text(file["file"], file["wanted"]),
            file_text(file["file"], file["original"] if file["baseline"] is None else file["baseline"]),
            file["process"] or value_text(file["writer"]),
            _place(body, file),
        )
        for file in body["files"]
    ]
    return Table(("FILE", "SEEN", "WANTED", "TO RESTORE", "WRITER", "WHERE"), rows)


def _holds(body: Row) -> Table:
    rows = [(hold["target"], fmt.until(hold["until"]), hold["by"], hold["reason"]) for hold in body["holds"]]
    return Table(("TARGET", "UNTIL", "BY", "REASON"), rows)


def _sources(body: Row) -> Table:
    rows = [
        (source["name"], "ok" if source["ok"] else "bad", fmt.duration(source["age_s"]), source["detail"])
        for source in body["sources"]
    ]
    return Table(("SOURCE", "STATE", "AGE", "DETAIL"), rows)


def _history(body: Row) -> Table:
    rows = [
        (
            fmt.clock(entry["at"]),
            entry["kind"],
            entry["file"],
            f"{file_text(entry['file'], entry['before'])} > {file_text(entry['file'], entry['after'])}",
            _place(body, entry) if entry["path"] else entry["reason"],
        )
        for entry in body["history"]
    ]
    return Table(("TIME", "WHAT", "FILE", "BEFORE > AFTER", "WHERE"), rows)


def _place(body: Row, fields: Row) -> str:
    return group_title(fields["path"], {pod["group"]: pod["title"] for pod in body.get("pods", ())})
