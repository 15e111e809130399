"""``bypassctl diff``: what is wanted against what is there. Exit code 1 when they differ."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from reconciler.cli import places
from reconciler.cli.document import FetchedDocument, Row, fetch, of_namespace, setting_statuses
from reconciler.cli.exits import Exit
from reconciler.cli.format import exact_text, without_file
from reconciler.cli.screen import Block, Cell, StyledText, Table, line, present
from reconciler.runtime import format as fmt
from state.setting_state import SettingState

_STYLES: Final = {
    **{state.value: "ok" for state in SettingState if state.is_in_force()},
    **{state.value: "dim" for state in SettingState if state.is_absent()},
}
"""Of the states of settings; those of a plan that need no write have the same names."""
_SHOWN: Final = 10
"""Refusals on a screen."""


def run(options: Namespace) -> int:
    """Compare. With the daemon down the kernel itself is read."""
    document = fetch(options, ("directories", "pods", "settings"))
    rows = list(_live(document.body)) if document.live else _read(options, document)
    rows = [row for row in rows if of_namespace(row["place"], options.namespace)]
    differing = [row for row in rows if not (_state(row).is_in_force() or _state(row).is_absent())]
    shown = rows if options.all else [row for row in rows if not _state(row).is_in_force()]
    refused = [
        {"place": pod["title"], **refusal}
        for pod in document.body["pods"]
        for refusal in pod.get("refusals", ())
        if of_namespace(pod["title"], options.namespace)
    ]
    facts = {
        "source": document.body["source"],
        "differing": len(differing),
        "settings": shown,
        "refused": refused,
    }
    present(options.output, facts, [*_blocks(rows, shown, differing), *_refused(refused)])
    return Exit.NOT_OK if differing else Exit.OK


def _live(body: Row) -> Iterator[Row]:
    keys = ("control_file", "knob", "wanted", "actual", "state", "detail", "policy", "reason")
    for place, path, fields in setting_statuses(body):
        yield {"place": place, "path": path, **{key: fields[key] for key in keys}}


def _read(options: Namespace, document: FetchedDocument) -> list[Row]:
    from reconciler.cli.limits import compare_settings  # models: only where the kernel is read

    titles = {pod["uid"]: pod["title"] for pod in document.body["pods"]}
    where = places.find(options)
    return compare_settings(document.body["settings"], titles, options.root, where.store)


def _blocks(rows: list[Row], shown: list[Row], differing: list[Row]) -> Iterator[Block]:
    yield settings_table(shown, lambda row: str(row["place"]))
    if differing:
        yield line(f"{fmt.plural(len(differing), 'setting')} of {len(rows)} not in force")
    elif rows:
        in_force = sum(_state(row).is_in_force() for row in rows)
        absent = f", {len(rows) - in_force} without a file" if in_force < len(rows) else ""
        yield line(f"{fmt.plural(in_force, 'setting')} in force{absent}, no differences")
    else:
        yield line("no settings")


def _refused(rows: list[Row]) -> Iterator[Block]:
    """What the planner left out or reduced, because the kernel would refuse it: no setting differs by it."""
    if rows:
        yield line(f"{fmt.plural(len(rows), 'setting')} refused by the planner:")
    for row in rows[:_SHOWN]:
        yield line(StyledText("! ", "bad"), f"{row['place']}: {row['knob']}: {row['reason']}")
    if len(rows) > _SHOWN:
        yield line(f"  and {len(rows) - _SHOWN} more: bypassctl diff -o json")


def settings_table(rows: Iterable[Row], place: Callable[[Row], str]) -> Table:
    """Wanted against actual values, of the daemon or of a plan. ``place``: what a row's group is called."""
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        values = (exact_text(row["knob"], row[key], row["control_file"]) for key in ("wanted", "actual"))
        state = StyledText(row["state"], _STYLES.get(row["state"], "warn"))
        detail = without_file(row["detail"], row["control_file"])
        cells.append((row["knob"], *values, state, f"{place(row)}: {detail}" if detail else place(row)))
    return Table(("KNOB", "WANTED", "ACTUAL", "STATE", "GROUP"), cells, names=4)


def _state(row: Row) -> SettingState:
    return SettingState(row["state"])
