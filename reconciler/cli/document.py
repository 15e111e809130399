"""The state document, from the daemon when it responds, else from the store."""

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from reconciler.cli import places
from reconciler.cli.client import ANSWER_S, DaemonRefused, Denied, Unreachable, ask, quoted
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime.streams import complain

UNKNOWN_SECTION: Final = 400
"""Status of a request for a section that the daemon does not have."""
_SEARCHED: Final = 10_000
"""Rows of the stored history in which those of a pod are looked for; as the daemon does."""
Row = dict[str, Any]
"""A part of the document: what JSON holds has no static type; docs/state.md describes it."""


class FetchedDocument(NamedTuple):
    """The document. ``down``: why it is not the daemon's; None when it is."""

    body: Row
    down: str | None

    @property
    def live(self) -> bool:
        """True when a running daemon produced it."""
        return self.down is None


def fetch(options: Namespace, sections: Sequence[str] = (), *, say: bool = True, pod: str = "") -> FetchedDocument:
    """The document, with at least the ``sections`` (none: all). With ``say``, a daemon that is down is reported.

    ``pod``: at least what is of the pods that it may mean (names, uids or container ids, with commas between them).
    The store's document, and that of an older daemon, has all pods; the store's history only rows with those texts.
    Errors: `CliError` when neither the daemon nor the store is available, or this user may not use the socket.
    """
    where = places.find(options)
    if where.socket is None:
        down = "copied node" if options.root != "/" else "no socket configured"
    else:
        try:
            asked = [f"section={','.join(sections)}"] if sections else []
            asked += [f"pod={quoted(pod)}"] if pod else []
            target = "/state" + (f"?{'&'.join(asked)}" if asked else "")
            return FetchedDocument(query(where.socket, where.reader, target), None)
        except Unreachable as exc:
            down = str(exc)
    body = _stored(where.store, down, pod)
    if say:
        complain(f"{down}; showing the state file {where.store}")
    return FetchedDocument(body, down)


def fetch_named(options: Namespace, sections: Sequence[str], *, say: bool = True) -> FetchedDocument:
    """As `fetch`, with the names of the pods: ``podnames`` if there is that section, else ``pods``."""
    return fetch_newest(options, (*sections, "podnames"), (*sections, "pods"), say=say)


def fetch_newest(
    options: Namespace, sections: Sequence[str], older: Sequence[str], *, say: bool = True
) -> FetchedDocument:
    """As `fetch`; with the sections ``older`` from a daemon of an older version, which lacks one of ``sections``."""
    try:
        return fetch(options, sections, say=say)
    except DaemonRefused as exc:
        if exc.status != UNKNOWN_SECTION:
            raise
        return fetch(options, older, say=say)


def query(path: str, reader: str | None, target: str, *, timeout_s: float = ANSWER_S) -> Row:
    """GET over root's socket, else the readers'. Errors: as of `ask`."""
    try:
        fields: Row = ask(path, "GET", target, timeout_s=timeout_s)
    except Denied:
        if reader is None or not os.path.exists(reader):
            raise
        try:
            fields = ask(reader, "GET", target, timeout_s=timeout_s)
        except Denied as exc:
            raise Denied(reader, _group(reader)) from exc
    return fields


def _group(path: str) -> str | None:
    """The group whose members may use the readers' socket."""
    import grp  # only for a message

    try:
        gid = os.stat(path).st_gid
        return grp.getgrgid(gid).gr_name if gid else None
    except (OSError, KeyError):
        return None


def _stored(path: str, down: str, pod: str) -> Row:
    # Here, because SQLite and msgpack cost 15 ms, and mostly the daemon answers.
    from cgroupfs.errors import StoreError
    from state.dump import from_store
    from state.reader import read_dump
    from state.schema import NewerSchemaError

    try:
        # Of one pod, what is in the newest rows may be of others only.
        dump = read_dump(path, history=_SEARCHED, about=pod.split(",")) if pod else read_dump(path)
        if dump["newer"] is not None:
            complain(str(dump["newer"]))
        return from_store(dump, time.time())
    except NewerSchemaError as exc:
        raise CliError(str(exc), Exit.REFUSED) from exc
    except StoreError as exc:
        raise CliError(f"{down}; {exc}", Exit.UNREACHABLE) from exc


def standings(body: Row) -> Iterator[tuple[Row | None, Row | None, Row]]:
    """Every setting with its status, as ``(pod, container, setting)``; only the daemon has it."""
    for group in body.get("directories", ()):
        for setting in group["settings"]:
            yield None, group, setting
    for pod in body["pods"]:
        for setting in pod.get("settings", ()):
            yield pod, None, setting
        for container in pod.get("containers", ()):
            for setting in container["settings"]:
                yield pod, container, setting
