"""Rows of the store that decode but have another shape than expected: each is a problem that is named, and left out."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import msgpack
import pytest

from state.dump import EVENT_DEFAULTS
from state.schema import ASSIGNMENTS, FILES, HOLDS, META, SETTINGS
from state.store import Store, StoreBatch
from tests.fakes.livenode import BATCH, LiveNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.test_report import effect_row, now

LIVE: Final = (FILES, SETTINGS, ASSIGNMENTS)
COMMANDS: Final = (
    *(("why", "batch-7"), ("explain", "batch-7"), ("dump",), ("dump", "-o", "json"), ("diff", "--all"), ("status",)),
    *(("holds",), ("pods",), ("events",), ("report",), ("alerts",), ("headroom",), ("plan",)),
)
SUM: Final = {
    "kept": 1,
    "broken": 0,
    "unknown": 0,
    "promised": {"3": 1},
    "available": {"3": 1},
    "missing": 0,
    "most_missing": 0,
}
ROWS: Final[dict[tuple[str, str], Any]] = {
    (META, "agent_version"): "0.1.0",
    (META, "node"): "n1",
    (META, "boot_id"): "b",
    (META, "opened_at"): 1.0,
    (META, "published"): {"target": "node", "node": "n1"},
    (META, "alert:1"): {
        "notice": {
            "alert": {
                "kind": "test",
                "key": "k",
                "severity": "warning",
                "summary": "s",
                "labels": {"a": "b"},
                "details": {},
            },
            "labels": {"a": "b"},
            "count": 1,
            "first_s": 1.0,
            "last_s": 1.0,
        },
        "to": ["file"],
    },
    (META, f"effect:{now()}"): effect_row(now())
    | {
        "promises": {"laws": {"x": 1}, "cpu": SUM, "memory": SUM},
        "windows": {"": effect_row(now())},
    },
    (HOLDS, "pod:x"): {"target": "pod:x", "reason": "r", "by": "b", "until": 4e9, "seconds": 1.0, "ends_boot_s": 1e9},
    (ASSIGNMENTS, "headroom"): {"milli": {"0": 1}, "at": 1.0, "memory_bytes": 1, "memory_at": 1.0},
}


def broken(row: Any, wrong: object) -> Iterator[Any]:
    """The row with ``wrong`` in place of all of it, and of each part; and without each field."""
    yield wrong
    if isinstance(row, dict):
        for name, value in row.items():
            yield {key: item for key, item in row.items() if key != name}
            yield from ({**row, name: part} for part in broken(value, wrong))
            yield {**row, name: value, "1000": wrong}
    elif isinstance(row, list) and row:
        yield from ([part] for part in broken(row[0], wrong))


EVENT: Final = {
    **EVENT_DEFAULTS,
    "at": 1.0,
    "kind": "write",
    "path": "/kubepods",
    "file": "cpu.shares",
    "pod_uid": BATCH,
}
STEP: Final = 47
"""Each command is run for one in so many of the ways in which a row can be wrong, all tables' rows at once."""


@pytest.mark.parametrize(("first", "wrong"), list(enumerate([[], "x", float("nan"), 1 << 63, {"x": b"x"}])))
def test_rows_of_another_shape_are_left_out_and_named(run: Run, live: LiveNode, first: int, wrong: object) -> None:
    live.document()
    with closing(Store(live.store)) as store:
        samples = {
            (table, key): msgpack.unpackb(row) for table in LIVE for key, row in list(store.rows(table))[-2:]
        } | ROWS
        batch = StoreBatch()
        for event in broken(EVENT, wrong):
            batch.append(msgpack.packb(event))
        store.apply(batch)
    ways = {at: list(broken(row, wrong)) for at, row in samples.items()}
    for number in range(first, max(map(len, ways.values())), STEP):
        with closing(Store(live.store)) as store:
            batch = StoreBatch()
            for (table, key), rows in ways.items():
                batch.put(table, key, msgpack.packb(rows[number % len(rows)]))
            store.apply(batch)
        dumped = json.loads(run("dump", "-o", "json", "--root", live.root).out)
        assert any("history" in problem for problem in dumped["problems"])
        assert {problem.partition(":")[0] for problem in dumped["problems"]} & {
            FILES,
            SETTINGS,
            ASSIGNMENTS,
            HOLDS,
            META,
        }
        for command in COMMANDS:
            # An error that no command expects is a traceback here.
            run(*command, "--root", live.root)


def test_sound_rows_are_not_left_out(run: Run, live: LiveNode) -> None:
    live.document()
    with closing(Store(live.store)) as store:
        batch = StoreBatch()
        for (table, key), row in ROWS.items():
            batch.put(table, key, msgpack.packb(row))
        batch.append(msgpack.packb(EVENT | {"unknown": [1, None, {"newer": "x"}]}))
        store.apply(batch)
    dumped = json.loads(run("dump", "-o", "json", "--root", live.root).out)
    assert dumped["problems"] == []
    assert [hold["target"] for hold in dumped["holds"]] == ["pod:x"]
    assert dumped["headroom"]["published"]["target"] == "node"
    assert [alert["key"] for alert in dumped["alerts"]["stored"]] == ["k"]
