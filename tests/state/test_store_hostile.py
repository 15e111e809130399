"""A store that another party has made: its schema and its rows are data, never a program."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cgroupfs.errors import StoreError
from state import reader, schema
from state.reader import open_readonly, read_dump, read_tables
from state.schema import APPLICATION_ID, FILES, KEYED, VERSION, seal
from state.store import Store
from tests.state.storing import batch_of, content

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS key, x AS row FROM c"
HISTORY = "CREATE TABLE history (seq INTEGER PRIMARY KEY AUTOINCREMENT, row BLOB NOT NULL)"
TABLE = "CREATE TABLE {} (key TEXT PRIMARY KEY NOT NULL, row BLOB NOT NULL)"


def made(path: Path, *statements: str) -> str:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.commit()
    return str(path)


def others(wrong: str) -> list[str]:
    return [HISTORY, *(TABLE.format(table) for table in KEYED if table not in wrong)]


WRONG: dict[str, Callable[[], list[str]]] = {
    "view": lambda: [HISTORY, *(f"CREATE VIEW {table} AS {ENDLESS}" for table in KEYED)],
    "another table": lambda: [
        *others("files"),
        "CREATE TABLE files (key TEXT PRIMARY KEY NOT NULL, row AS (hex(zeroblob(9000000))))",
    ],
    "trigger": lambda: [
        *others(""),
        f"CREATE TRIGGER t AFTER INSERT ON meta BEGIN INSERT INTO files {ENDLESS}; END",
    ],
    "view of another name": lambda: [*others(""), f"CREATE VIEW v AS {ENDLESS}"],
    "index": lambda: [*others(""), "CREATE INDEX i ON files (hex(zeroblob(length(row) * 1000)))"],
    "history": lambda: [*others("")[1:], f"CREATE VIEW history AS SELECT key AS seq, row FROM ({ENDLESS})"],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_schema_that_is_not_ours_is_not_read(tmp_path: Path, wrong: str) -> None:
    path = made(tmp_path / "state.db", *WRONG[wrong]())
    with pytest.raises(StoreError, match="not created by bypassd"):
        open_readonly(path)
    with pytest.raises(StoreError, match="not created by bypassd"):
        read_dump(path)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_daemon_moves_such_a_store_aside(tmp_path: Path, wrong: str) -> None:
    path = made(tmp_path / "state.db", *WRONG[wrong]())
    store = Store(path, boot="b")
    assert (store.writable, store.salvaged) == (True, 0)
    assert store.quarantined is not None
    assert os.path.exists(store.quarantined)
    store.close()


def test_a_statement_without_an_end_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A whole budget takes seconds; that it is one is a matter of its size.
    assert schema._MOST_CALLS * schema._STEPS <= 1_000_000_000
    monkeypatch.setattr(schema, "_MOST_CALLS", schema._MOST_CALLS // 100)
    path = made(tmp_path / "state.db", *others(""))
    with closing(open_readonly(path)) as connection:
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(f"SELECT count(*) FROM ({ENDLESS})").fetchone()
        with pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute("SELECT zeroblob(1 << 25)").fetchone()


@pytest.mark.parametrize(("bound", "most"), [("MOST_ROWS", 5), ("MOST_BYTES", 50)])
def test_rows_and_their_bytes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    path = made(tmp_path / "state.db", *others(""))
    with closing(sqlite3.connect(path)) as connection:
        rows = [(f"k{number}", seal(f"k{number}", b"12345")) for number in range(8)]
        connection.executemany("INSERT INTO files VALUES (?, ?)", rows)
        connection.commit()
    assert len(read_tables(path).rows[FILES]) == 8
    monkeypatch.setattr(reader, bound, most)
    tables = read_tables(path)
    assert tables.lost
    assert len(tables.rows[FILES]) < 8


def test_problems_are_bounded_in_number_and_length(tmp_path: Path) -> None:
    path = made(tmp_path / "state.db", *others(""))
    with closing(sqlite3.connect(path)) as connection:
        rows = [(f"{number}" + "k" * 5000, b"rotten") for number in range(1000)]
        connection.executemany("INSERT INTO files VALUES (?, ?)", [("good", seal("good", b"x")), *rows])
        connection.commit()
    problems = read_tables(path).problems
    assert 100 <= len(problems) <= 102
    assert max(map(len, problems)) < 500


@pytest.mark.parametrize("in_use", [False, True], ids=["when opened", "in use"])
def test_a_row_longer_than_any_is_damage_and_the_rest_is_kept(tmp_path: Path, *, in_use: bool) -> None:
    path = str(tmp_path / "state.db")
    store = Store(path, boot="b")
    store.apply(batch_of(FILES, {"good": "x"}))
    if not in_use:
        store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO files VALUES ('long', zeroblob(17 << 20))")
        connection.commit()
    if in_use:
        with pytest.raises(StoreError, match="was damaged"):
            store.rows(FILES)
    else:
        store = Store(path, boot="b")
    assert store.writable
    assert store.quarantined is not None
    assert content(store, FILES) == {"good": "x"}
    store.close()
