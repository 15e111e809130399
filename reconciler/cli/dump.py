"""``bypassctl dump`` and ``state-dump``: the whole document, or its tables."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from reconciler.cli.document import Row, container_title, fetch, setting_statuses
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import exact_text, file_text, group_title, value_text
from reconciler.cli.screen import Block, Table, blank, head, line, present
from reconciler.runtime import format as fmt

_KEYS: Final = ("schema", "kind", "source", "at")
_NAMING: Final = ("pods", "directories")
"""Sections from which tables take the names of pods and containers, and the actual values."""
_QOS: Final = {"besteffort": "BestEffort pods", "burstable": "Burstable pods", "kubepods": "all pods"}


class _PlaceNames:
    """What the paths of the document are called, and which value is in force there."""

    def __init__(self, body: Row) -> None:
        """``body``: with the sections of `_NAMING`, as far as there are any."""
        self._pods: dict[str, str] = {}
        self._containers: dict[str, str] = {}
        self._statuses: dict[tuple[str, str], Row] = {}
        for pod in body.get("pods", ()):
            if pod.get("group"):
                self._pods[pod["group"]] = pod["title"]
            for container in pod.get("containers", ()):
                self._containers[container["group"]] = container_title(pod, container)
        if "pods" in body:
            self._statuses = {(path, setting["knob"]): setting for _, path, setting in setting_statuses(body)}

    def place(self, path: str) -> str:
        """The pod or container; a directory above the pods with what is in it; every other path as it is."""
        if path in self._pods:
            return f"{self._pods[path]} (pod)"
        # The store has no containers: a container is shown with its id.
        title = self._containers.get(path) or group_title(path, self._pods)
        return f"{_QOS[title.rpartition('/')[2]]}: {title}" if title.rpartition("/")[2] in _QOS else title

    def status(self, path: str, knob: str) -> Row | None:
        """The status of a wanted setting; only a running daemon has it."""
        return self._statuses.get((path, knob))


def run(options: Namespace) -> int:
    sections = [name for part in options.section for name in part.split(",") if name]
    tables = options.output == "table"
    document = fetch(options, [*sections, *_NAMING] if sections and tables else sections)
    body = document.body
    if not document.live:
        for name in sections:
            if name not in body:
                raise CliError(f"--section {name}: only available from a running daemon", Exit.USAGE)
    facts = {key: value for key, value in body.items() if not sections or key in {*_KEYS, *sections}}
    present(options.output, facts, _blocks(body, _PlaceNames(body), sections) if tables else ())
    return Exit.OK


def _blocks(body: Row, named: _PlaceNames, sections: Sequence[str]) -> Iterator[Block]:
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
        if name in body and (not sections or name in sections):
            made = table(body, named)
            yield blank()
            yield head(f"{name} ({len(made.rows)})")
            yield made
    for problem in body.get("problems", ()):
        yield blank()
        yield line(f"problem: {problem}")


def _pools(body: Row, _: _PlaceNames) -> Table:
    return Table(("POOL", "CPUS"), [(name, value_text(cpus)) for name, cpus in body["pools"].items()])


def _pods(body: Row, _: _PlaceNames) -> Table:
    rows = [(pod["class"], pod["qos"], pod["uid"][:8], pod["title"], pod["class_source"]) for pod in body["pods"]]
    return Table(("CLASS", "QOS", "UID", "POD", "CLASS FROM"), rows)


def _settings(body: Row, named: _PlaceNames) -> Table:
    files = {(file["path"], file["knob"]): file for file in body.get("files", ())}
    rows = [
        (setting["knob"], _wanted(setting, named, files), setting["policy"], named.place(setting["path"]))
        for setting in body["settings"]
    ]
    return Table(("KNOB", "WANTED", "POLICY", "WHERE"), rows)


def _wanted(setting: Row, named: _PlaceNames, files: Mapping[tuple[str, str], Row]) -> str:
    """What is written: the policies' value in the form of the node's cgroup version, as far as that is known."""
    place = setting["path"], setting["knob"]
    if (status := named.status(*place)) is not None and status["wanted"]:
        return exact_text(setting["knob"], status["wanted"], status.get("control_file"))
    if (file := files.get(place)) is not None and file["wanted"] is not None:
        return file_text(file["file"], file["wanted"])
    return exact_text(setting["knob"], setting["value"])


def _files(body: Row, named: _PlaceNames) -> Table:
    rows = []
    for file in body["files"]:
        status = named.status(file["path"], file["knob"])
        actual = file["seen"] if status is None or status["actual"] is None else status["actual"]
        texts = (file["wanted"], actual, file["original"] if file["baseline"] is None else file["baseline"])
        writer = "bypassd" if file["writer"] == "us" else file["process"] or value_text(file["writer"])
        rows.append(
            (file["file"], *(file_text(file["file"], text) for text in texts), writer, named.place(file["path"]))
        )
    return Table(("FILE", "WANTED", "ACTUAL", "TO RESTORE", "WRITER", "WHERE"), rows)


def _holds(body: Row, _: _PlaceNames) -> Table:
    rows = [(hold["target"], fmt.until(hold["until"]), hold["by"], hold["reason"]) for hold in body["holds"]]
    return Table(("TARGET", "UNTIL", "BY", "REASON"), rows)


def _sources(body: Row, _: _PlaceNames) -> Table:
    rows = [
        (source["name"], "ok" if source["ok"] else "bad", fmt.duration(source["age_s"]), source["detail"])
        for source in body["sources"]
    ]
    return Table(("SOURCE", "STATE", "AGE", "DETAIL"), rows)


def _history(body: Row, named: _PlaceNames) -> Table:
    rows = [
        (
            fmt.clock(entry["at"]),
            entry["kind"],
            entry["file"],
            f"{file_text(entry['file'], entry['before'])} > {file_text(entry['file'], entry['after'])}",
            named.place(entry["path"]) if entry["path"] else entry["reason"],
        )
        for entry in body["history"]
    ]
    return Table(("TIME", "WHAT", "FILE", "BEFORE > AFTER", "WHERE"), rows)
