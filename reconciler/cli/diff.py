"""``bypassctl diff``: what is wanted against what is there. Exit code 1 when they differ."""

from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli import places
from reconciler.cli.document import FetchedDocument, Row, fetch, standings
from reconciler.cli.exits import Exit
from reconciler.cli.format import exact_text
from reconciler.cli.screen import Block, Cell, StyledText, Table, line, present
from reconciler.runtime import format as fmt
from state.setting_state import SettingState


def run(options: Namespace) -> int:
    """Compare. With the daemon down the kernel itself is read."""
    document = fetch(options, ("directories", "pods", "settings"))
    rows = list(_live(document.body)) if document.live else _read(options, document)
    if options.namespace is not None:
        rows = [row for row in rows if row["place"].startswith(f"{options.namespace}/")]
    differing = [row for row in rows if not (_state(row).is_in_force() or _state(row).is_absent())]
    shown = rows if options.all else [row for row in rows if not _state(row).is_in_force()]
    facts = {"source": document.body["source"], "differing": len(differing), "settings": shown}
    present(options.output, facts, _blocks(rows, shown, differing))
    return Exit.NOT_OK if differing else Exit.OK


def _live(body: Row) -> Iterator[Row]:
    for pod, inner, fields in standings(body):
        if pod is None:
            place, path = inner["path"] if inner else "", inner["path"] if inner else ""
        else:
            place = pod["title"] if inner is None else f"{pod['title']}/{inner['name'] or inner['id'][:12]}"
            path = pod["group"] if inner is None else inner["group"]
        keys = ("control_file", "knob", "wanted", "actual", "state", "detail", "policy", "reason")
        yield {"place": place, "path": path, **{key: fields[key] for key in keys}}


def _read(options: Namespace, document: FetchedDocument) -> list[Row]:
    from reconciler.cli.limits import compare_settings  # models: only where the kernel is read

    titles = {pod["uid"]: pod["title"] for pod in document.body["pods"]}
    where = places.find(options)
    return compare_settings(document.body["settings"], titles, options.root, where.store)


def _blocks(rows: list[Row], shown: list[Row], differing: list[Row]) -> Iterator[Block]:
    cells: list[tuple[Cell, ...]] = [
        (
            row["knob"],
            exact_text(row["knob"], row["wanted"], row["control_file"]),
            exact_text(row["knob"], row["actual"], row["control_file"]),
            StyledText(
                row["state"], "ok" if _state(row).is_in_force() else "dim" if _state(row).is_absent() else "warn"
            ),
            _where(row),
        )
        for row in shown
    ]
    yield Table(("KNOB", "WANTED", "ACTUAL", "STATE", "GROUP"), cells, names=4)
    if differing:
        yield line(f"{fmt.plural(len(differing), 'setting')} of {len(rows)} not in force")
    elif rows:
        yield line(f"{fmt.plural(len(rows), 'setting')} in force, no differences")
    else:
        yield line("no settings")


def _where(row: Row) -> str:
    detail = row["detail"] or ""
    return f"{row['place']}: {detail}" if detail else str(row["place"])


def _state(row: Row) -> SettingState:
    return SettingState(row["state"])
