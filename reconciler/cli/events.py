"""``bypassctl events``: what happened on this node, in order of time; with ``--follow`` also what happens next."""

import json
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import groupby
from time import sleep
from typing import Any, Final, NamedTuple

from reconciler.cli import places
from reconciler.cli.document import SEARCHED, Row, Unreachable, get, get_again, quoted, stored
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import before_text, file_text, short_path, without_file
from reconciler.cli.screen import StyledText, Table, emit, line, show
from reconciler.runtime import format as fmt
from reconciler.runtime import streams
from state.printable import printable_json

_POLL_S: Final = 0.5
_PASS_S: Final = 1.0
_KINDS: Final = {
    "write": ("write", "restored"),
    "failed": ("failed",),
    "foreign": ("foreign", "yield", "resume"),
    "plan": ("plan",),
    "verdict": ("alert:interference", "alert:interference-cleared"),
    "action": ("alert:response", "alert:response-undone", "alert:response-exhausted", "helped"),
    "eviction": tuple(f"alert:eviction-{step}" for step in ("planned", "unguarded", "done", "refused", "failed")),
    "hold": ("hold", "release"),
    "off": ("off",),
    "mode": ("mode",),
    "window": ("window",),
    "settings": ("settings",),
    "daemon": ("start", "stop"),
    "gap": ("lost", "gap"),
}
"""Kinds of the history by type of event; every other kind is an alert."""
_TYPES: Final = {kind: name for name, kinds in _KINDS.items() for kind in kinds}
_QUOTAS: Final = frozenset({"cpu.cfs_quota_us", "cpu.max"})
_STYLES: Final = {"failed": "bad", "eviction": "bad", "gap": "bad", "verdict": "warn", "foreign": "warn", "plan": "dim"}


class _Choice(NamedTuple):
    """What the command line chose: ``uid`` of the pod, or the text of a pod that is no longer on the node."""

    uid: str | None
    text: str | None
    namespace: str | None
    types: frozenset[str]

    @property
    def restricts(self) -> bool:
        return bool(self.types) or (self.uid, self.text, self.namespace) != (None, None, None)

    def matches(self, event: Row) -> bool:
        if event["type"] == "gap":
            return True
        if self.types and event["type"] not in self.types:
            return False
        namespace, _, name = event["pod"].rpartition("/")
        if self.namespace is not None and namespace != self.namespace:
            return False
        if self.uid is not None:
            return bool(event["pod_uid"] == self.uid)
        return self.text is None or event["pod"] == self.text or name.startswith(self.text)


def run(options: Namespace) -> int:
    """Print them. With ``--follow`` until Ctrl-C, which ends with `Exit.OK`. Errors: `CliError`."""
    try:
        return _run(options)
    except KeyboardInterrupt:
        if not options.follow:
            raise
        return Exit.OK


def _run(options: Namespace) -> int:
    choice = _choice(options)
    since = None if options.follow and options.since is None else time.time() - (options.since or 3600.0)
    target = "/events" if since is None else f"/events?since={since:.3f}"
    try:
        answer = get(places.find(options), target)
    except Unreachable as exc:
        if options.follow:
            raise exc.end("only a running daemon has events to follow") from exc
        answer = {"missing": 0, "events": _stored(options, str(exc), since or 0.0)}
    if not _print(_chosen(answer, choice), options) and not options.follow:
        such = "such " if choice.restricts else ""
        show([line(f"no {such}events since {fmt.clock(since)}")])
    while options.follow:
        streams.finish()
        sleep(_POLL_S)
        answer = _next(options, answer, choice)
    return Exit.OK


def _next(options: Namespace, before: Row, choice: _Choice) -> Row:
    """The next answer, printed."""
    target = f"/events?after={before['next']}&run={quoted(str(before['run']))}"
    answer = get_again(places.find(options), target, sleep)
    if answer["run"] != before["run"]:
        streams.complain("the daemon restarted; after a crash, events of its last 2 s are missing")
    _print(_chosen(answer, choice), options)
    return answer


def _stored(options: Namespace, down: str, since: float) -> list[Row]:
    """The history of the store while no daemon runs, the oldest first."""
    rows = stored(places.find(options).store, down, history=SEARCHED)["history"]
    return [row for row in reversed(rows) if row["kind"] not in {"touch", "gone"} and row["at"] >= since]


def _choice(options: Namespace) -> _Choice:
    types = frozenset(options.type)
    if options.pod is None:
        return _Choice(None, None, options.namespace, types)
    from reconciler.cli.targets import fetch_pod

    try:
        return _Choice(fetch_pod(options, options.pod)[1]["uid"], None, None, types)
    except CliError as exc:
        if exc.code is not Exit.NOT_FOUND:
            raise
        # Of a pod that was removed there are events with its name.
        return _Choice(None, options.pod.removeprefix("pod/"), options.namespace, types)


def _chosen(answer: Row, choice: _Choice) -> Iterator[Row]:
    """The chosen events of an answer; missing ones before them are an event of their own."""
    if answer["missing"]:
        at = answer["events"][0]["at"] if answer["events"] else time.time()
        text = f"{fmt.plural(answer['missing'], 'earlier event')} missing: more than the daemon keeps for a reader"
        yield {**_shown({"kind": "gap", "at": at}), "text": text}
    for row in answer["events"]:
        event = _shown(row)
        if choice.matches(event):
            yield event


def _shown(row: Row) -> Row:
    """One event as it is printed, with its type and text."""
    event = {
        "number": row.get("number", 0),
        "at": row["at"],
        "type": _TYPES.get(row["kind"], "alert"),
        "kind": row["kind"],
        "pod": row.get("pod") or "",
        **{key: row.get(key) for key in ("pod_uid", "path", "file", "before", "before_source", "after", "wanted")},
        **{key: row.get(key) or "" for key in ("writer", "process", "error", "policy", "reason")},
    }
    event["text"] = _text(event)
    return event


def _text(event: Row) -> str:
    kind, where = event["kind"], event["file"] or ""
    moved = f"{before_text(event)} -> {file_text(where, event['after'])}"
    match kind:
        case "write":
            return f"{where} {moved} ({event['policy']}: {event['reason']})" if event["policy"] else f"{where} {moved}"
        case "restored":
            return f"{where} {moved}, restored"
        case "failed":
            return f"{where} {file_text(where, event['wanted'])} refused: {without_file(event['error'], where)}"
        case "foreign":
            writer = "" if event["writer"] == "other" and event["process"] else event["writer"]
            by = " ".join(dict.fromkeys(part for part in (writer, event["process"]) if part)) or "unknown"
            return f"{where} {moved}, written by {by}"
        case "yield":
            return f"{where} left to the other writer: {event['reason']}"
        case "resume":
            return f"{where} set again: {event['reason']}"
        case "hold":
            # A knob or a file is named in the reason.
            target, until, rest = event["reason"].partition("until ")
            return f"{target}on hold {until}{rest} (by {event['process'] or 'unknown'})"
        case "off":
            return f"freed: {event['reason']}"
        case _:
            # The pod is named before it.
            text = str(event["reason"])
            if event["pod"]:
                for before in (f"{event['pod']} ", f"{event['pod']}: ", f"victim {event['pod']} "):
                    text = text.removeprefix(before)
            return text


def _print(events: Iterable[Row], options: Namespace) -> bool:
    """False: a table without rows, of which nothing is printed."""
    if options.output == "json":
        with streams.guarded() as out:
            for event in events:
                out.write(printable_json(json.dumps(event, ensure_ascii=False)) + "\n")
        return True
    if options.output == "yaml":
        chosen = list(events)
        if options.follow and not chosen:
            return True
        if options.follow:
            # A document for each answer that has events.
            streams.write("---\n")
            streams.finish()
        emit({"events": chosen}, options.output)
        return True
    # Of one pod each write is wanted; of a node the quotas of all BE pods, each second, hide everything else.
    runs = _runs(events) if options.output == "table" and options.pod is None else ([event] for event in events)
    rows: list[tuple[Any, ...]] = [
        (fmt.clock(run[0]["at"]), StyledText(run[0]["type"].ljust(8), _STYLES.get(run[0]["type"], "")), _folded(run))
        for run in runs
    ]
    if rows:
        show([Table(("TIME", "TYPE", "EVENT"), rows, headings=False)])
    return bool(rows)


def _runs(events: Iterable[Row]) -> Iterator[list[Row]]:
    """Writes that differ in their group only, or in a quota's value, as one; other events alone.

    Of a sequence of writes: those that follow each other, and those of one second, as a pass writes values by pod.
    """
    for is_write, following in groupby(events, lambda event: event["type"] == "write"):
        if not is_write:
            yield from ([event] for event in following)
            continue
        runs: list[list[Row]] = []
        last: dict[tuple[object, ...], list[Row]] = {}
        for event in following:
            run = last.get(kind := _kind_of_write(event))
            if run is not None and (run is runs[-1] or event["at"] - run[-1]["at"] <= _PASS_S):
                run.append(event)
            else:
                last[kind] = [event]
                runs.append(last[kind])
        yield from runs


def _kind_of_write(event: Row) -> tuple[object, ...]:
    value = None if event["file"] in _QUOTAS else event["after"]
    return (event["kind"], event["file"], event["policy"], value)


def _folded(run: list[Row]) -> str:
    if len(run) == 1:
        return _subject(run[0])
    groups = len({(event["pod"], event["path"]) for event in run})
    where = "to the same group" if groups == 1 else f"in {groups} groups"
    such = f"{len(run) - 1} more such {'write' if len(run) == 2 else 'writes'}"
    return f"{_subject(run[0])}; {such} {where} until {fmt.clock(run[-1]['at'])}"


def _subject(event: Row) -> str:
    """The pod, else the group, before the text."""
    name = event["pod"] or event["pod_uid"] or short_path(event["path"] or "")
    return f"{name}: {event['text']}" if name else str(event["text"])
