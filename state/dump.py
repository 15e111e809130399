"""The state dump: one document of plain values in a stable, documented shape, as JSON, YAML or msgpack.

The daemon makes it from what it holds (``/state``), the command line from the store when the daemon is down. Its shape
(``schema`` 1) is documented in docs/state.md. Keys are added, never renamed or removed within one schema number; every
key is always there. Nothing heavy is imported, for the command line's sake.

Units: times are wall-clock seconds since the epoch, 0.0 for never.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgpack

from cgroupfs.bounded import digits
from state.printable import encodable, printable_json

SCHEMA: Final = 1
FORMATS: Final = ("json", "yaml", "msgpack")

# The store leaves out what equals its default; the document does not. A test holds these against the structs.
FILE_DEFAULTS: Final[Mapping[str, object]] = {
    "kind": "cgroup",
    "ours": [],
    "controller": "",
    "path": "",
    "file": "",
    "knob": "",
    "inode": 0,
    "order": 0,
    "original": None,
    "origin": "read",
    "baseline": None,
    "wanted": None,
    "seen": None,
    "writer": "",
    "process": "",
    "touched_at": 0.0,
    "written_at": 0.0,
    "foreign_at": 0.0,
    "foreign_count": 0,
    "failures": 0,
    "failed_errno": 0,
    "failed_since": 0.0,
    "yielded": False,
    "pod_uid": None,
    "container_id": None,
    "policy": "",
    "reason": "",
}
EVENT_DEFAULTS: Final[Mapping[str, object]] = {
    "seq": 0,
    "at": 0.0,
    "kind": "",
    "controller": "",
    "path": "",
    "file": "",
    "before": None,
    "after": None,
    "wanted": None,
    "errno": 0,
    "error": "",
    "writer": "",
    "process": "",
    "policy": "",
    "reason": "",
    "pod_uid": None,
    "container_id": None,
    "number": 0,
    "pod": "",
    "before_source": "",
}
SETTING_DEFAULTS: Final[Mapping[str, object]] = {
    "path": "",
    "knob": "",
    "value": None,
    "policy": "",
    "reason": "",
    "pod_uid": None,
    "container_id": None,
}
HOLD_DEFAULTS: Final[Mapping[str, object]] = {
    "budget": False,
    "target": "",
    "reason": "",
    "by": "",
    "until": None,
    "seconds": None,
    "ends_boot_s": None,
    "boot_id": "",
}

Row = Mapping[str, object]

_ENDS: Final = frozenset({"interference-cleared", "node-opened", "response-undone"})
"""Kinds of alerts that are an end; a test holds them against `AlertKind.began`."""


def document(
    *,
    at: float,
    source: str,
    meta: Row,
    files: Iterable[Row] = (),
    settings: Iterable[Row] = (),
    pools: Row | None = None,
    headroom: Row | None = None,
    sides: Row | None = None,
    holds: Iterable[Row] = (),
    history: Iterable[Row] = (),
    pods: Iterable[Row] = (),
    sources: Iterable[Row] = (),
    alerts: Row | None = None,
    interference: Row | None = None,
    eviction: Row | None = None,
    problems: Iterable[str] = (),
) -> dict[str, object]:
    """The whole document from plain values. ``meta``: the store's, with ``agent_version``, ``node``, ``boot_id``."""
    ledger = sorted((_whole(FILE_DEFAULTS, row) for row in files), key=_by_order)
    return {
        "schema": SCHEMA,
        "kind": "bypassd-state",
        "source": source,
        "at": at,
        "agent": {
            "version": meta.get("agent_version", ""),
            "node": meta.get("node", ""),
            "boot_id": meta.get("boot_id", ""),
            "opened_at": meta.get("opened_at", 0.0),
            "ledger": dict(sorted(Counter(str(row["kind"]) for row in ledger).items())),
        },
        "pools": dict(sorted((pools or {}).items())),
        "headroom": headroom,
        "sides": dict(sides or {}),
        "pods": [dict(pod) for pod in pods],
        "settings": sorted((_whole(SETTING_DEFAULTS, row) for row in settings), key=_by_path),
        "files": ledger,
        "holds": sorted((_whole(HOLD_DEFAULTS, row) for row in holds), key=lambda row: str(row["target"])),
        "history": [_whole(EVENT_DEFAULTS, row) for row in history],
        "sources": [dict(row) for row in sources],
        "alerts": dict(alerts or {"sinks": [], "stored": [], "recent": []}),
        "interference": dict(interference or {}),
        "eviction": eviction,
        "problems": list(problems),
    }


_PUBLISHED: Final = dict.fromkeys(("cpu_milli", "memory_bytes", "detail", "at", "problem", "edits", "last_edit"))


def from_store(dump: Mapping[str, object], at: float) -> dict[str, object]:
    """The document from `state.reader.read_dump`: what can be known while the daemon is down.

    The table of assignments holds the pools (row ``pools``, with the CPU lists under ``lists``) and, as rows
    ``pod:<uid>``, names and class of each pod.
    """
    assignments = _row(dump.get("assignments"))
    return document(
        at=at,
        source="store",
        meta=_row(dump.get("meta")),
        files=_rows(dump.get("files")),
        settings=_rows(dump.get("settings")),
        pools=_row(_row(assignments.get("pools")).get("lists")),
        headroom=_headroom(_row(assignments.get("headroom")), at, _row(_row(dump.get("meta")).get("published"))),
        pods=[_row(row) for key, row in assignments.items() if key.startswith("pod:")],
        holds=_rows(dump.get("holds")),
        history=_rows(dump.get("history")),
        alerts={"sinks": [], "stored": list(_alerts(_row(dump.get("meta")))), "recent": []},
        problems=[str(problem) for problem in _list(dump.get("problems"))],
    )


def render(fields: Mapping[str, object], form: str) -> bytes:
    """The document in one of `FORMATS`; text forms end in a newline and are safe to print on a terminal.

    Errors: `ValueError` for another format.
    """
    renderer = _RENDERERS.get(form)
    if renderer is None:
        raise ValueError(f"{form!r} is not one of {', '.join(FORMATS)}")
    try:
        return renderer(fields)
    except UnicodeEncodeError:
        return renderer(encodable(fields))


def _json(fields: Mapping[str, object]) -> bytes:
    return (printable_json(json.dumps(fields, indent=2, ensure_ascii=False)) + "\n").encode()


def yaml_bytes(value: object) -> bytes:
    """Plain data as YAML, safe to print on a terminal."""
    import yaml  # 15 ms that the other formats do not pay

    # Readable first. The library then escapes C0 and C1 only, so text with other unprintable characters is all ASCII.
    for unicode in (True, False):
        text: str = yaml.dump(value, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=unicode, width=120)
        if text.replace("\n", "").isprintable():
            break
    return text.encode()


_RENDERERS: Final[Mapping[str, Callable[[Mapping[str, object]], bytes]]] = {
    "json": _json,
    "yaml": yaml_bytes,
    "msgpack": msgpack.packb,
}


def _headroom(row: Row, at: float, noted: Row) -> Row | None:
    """A daemon's form of the stored row ``headroom``: ``milli`` by NUMA node and memory, each with when.

    ``noted``: where it is still published; empty: nowhere.
    """
    nodes = {
        number: milli
        for node, milli in _row(row.get("milli")).items()
        if isinstance(milli, int) and (number := digits(str(node))) is not None
    }
    kept_at = row.get("at")
    if not isinstance(kept_at, float):
        return None
    return {
        "milli": sum(nodes.values()),
        "reason": "from the last saved state",
        "known_s": max(0.0, at - kept_at),
        "nodes": [
            {"numa_node": node, "milli": milli, "supply_milli": None, "cpus": None}
            for node, milli in sorted(nodes.items())
        ],
        "memory": _memory(row, at),
        "published": {**_PUBLISHED, "target": noted.get("target")} if noted else None,
    }


def _memory(row: Row, at: float) -> Row | None:
    promised, kept_at = row.get("memory_bytes"), row.get("memory_at")
    if not isinstance(promised, int) or not isinstance(kept_at, float):
        return None
    return {
        "bytes": promised,
        "supply_bytes": None,
        "reason": "from the last saved state",
        "known_s": max(0.0, at - kept_at),
    }


def _alerts(meta: Row) -> Iterator[Row]:
    """A daemon's form of the stored rows ``alert:<id>``: alerts that some sink has yet to take."""
    for key, row in meta.items():
        notice = _row(_row(row).get("notice"))
        alert = _row(notice.get("alert"))
        if not key.startswith("alert:") or not alert:
            continue
        ends = alert.get("resolved") is True or str(alert.get("kind")) in _ENDS
        yield {
            "id": key.removeprefix("alert:"),
            **{name: alert.get(name, "") for name in ("kind", "key", "severity", "summary")},
            "status": "resolved" if ends else "firing",
            "labels": {**_row(alert.get("labels")), **_row(notice.get("labels"))},
            "details": _row(alert.get("details")),
            **{name: notice.get(name, 0) for name in ("count", "first_s", "last_s")},
            "to": _list(_row(row).get("to")),
        }


def _whole(defaults: Row, row: Row) -> dict[str, object]:
    return {**defaults, **row}


def _row(value: object) -> Row:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _rows(value: object) -> list[Row]:
    return [row for row in _list(value) if isinstance(row, dict)]


def _by_order(row: Row) -> int:
    order = row["order"]
    return order if isinstance(order, int) else 0


def _by_path(row: Row) -> tuple[str, str]:
    return str(row["path"]), str(row["knob"])
