"""Stores of every released schema open; a newer one is read, refused by the daemon, and converted for a restore."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest

from reconciler.actuators.codec import read_rows
from state.ledger import Ledger
from state.quarantine import convert_newer
from state.reader import read_dump, read_tables
from state.schema import (
    FILES,
    META,
    MIGRATIONS,
    OLDEST_READER,
    READABLE_BY,
    VERSION,
    NewerSchemaError,
    migrate,
    tables_of,
    unseal,
)
from state.store import Store
from tests.state.newer_store import KIND, NEWER, make_newer
from tests.state.release_store import BOOT, CONTROL_FILES, KNOWN, write
from tests.state.storing import batch_of

STORES = Path(__file__).parents[1] / "fixtures/store"
EACH = sorted(path.name for path in STORES.glob("schema-*"))


class Crash(BaseException):
    """The process ends here, as by SIGKILL."""


def copied(tmp_path: Path, name: str) -> str:
    shutil.copytree(STORES / name, tmp_path / "bypassd")
    return str(tmp_path / "bypassd/state.db")


@pytest.fixture
def newer(tmp_path: Path) -> str:
    path = copied(tmp_path, f"schema-{VERSION}")
    make_newer(path)
    return path


def assert_known(ledger: Ledger) -> None:
    """Every value of `tests.state.release_store`, with its original."""
    assert {codec.kind: read_rows(ledger, codec) for codec in KNOWN} == {
        codec.kind: state for codec, state in KNOWN.items()
    }
    originals = {entry.key: entry.original for entry in ledger.control_files()}
    assert originals == {entry.key: entry.original for entry in CONTROL_FILES}


def test_each_schema_since_the_first_release_has_a_store() -> None:
    assert [f"schema-{number}" for number in range(2, VERSION + 1)] == EACH


@pytest.mark.parametrize("name", EACH)
def test_the_store_of_each_release_opens_with_all_that_it_knows(tmp_path: Path, name: str) -> None:
    path = copied(tmp_path, name)
    dump: Any = read_dump(path)
    assert (dump["problems"], dump["newer"]) == ([], None)
    assert len(dump["files"]) == 4 + 17
    for _ in range(2):
        with closing(Store(path, boot=BOOT)) as store:
            assert_known(Ledger(store))
            assert (store.lost, store.damage, store.quarantined) == (False, None, None)
            assert msgpack.unpackb(dict(store.rows(META))[READABLE_BY]) == OLDEST_READER


def test_the_store_of_this_schema_is_what_this_version_writes(tmp_path: Path) -> None:
    write(str(tmp_path / "now"))
    now, kept = (read_dump(str(folder / "state.db")) for folder in (tmp_path / "now", STORES / f"schema-{VERSION}"))

    def settled(dump: dict[str, Any]) -> dict[str, Any]:
        rows = [{**row, "touched_at": 0.0} for row in dump["files"]]
        meta = {key: value for key, value in dump["meta"].items() if key != "lineage"}
        return {**dump, "files": rows, "meta": meta, "history": len(dump["history"])}

    assert settled(now) == settled(kept)


def test_a_store_of_the_first_schema_is_read_without_the_tables_of_later_ones(tmp_path: Path) -> None:
    assert set(tables_of(1)) < set(tables_of(2)) == set(tables_of(VERSION)) == set(tables_of(NEWER))
    path = str(tmp_path / "state.db")
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for table in set(tables_of(VERSION)) - set(tables_of(1)):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 1")
    assert read_tables(path).problems == ()
    with closing(Store(path)) as store:
        assert (store.damage, store.writable) == (None, True)


def test_the_daemon_refuses_a_newer_store_names_the_command_and_leaves_it_alone(newer: str) -> None:
    before = Path(newer).read_bytes()
    with pytest.raises(NewerSchemaError) as caught:
        Store(newer, boot=BOOT)
    assert caught.value.readable
    assert "bypassctl restore" in str(caught.value)
    assert Path(newer).read_bytes() == before


def test_a_newer_store_is_read_whole_but_for_what_only_it_knows(newer: str) -> None:
    before = Path(newer).read_bytes()
    tables = read_tables(newer)
    assert (tables.lost, tables.problems) == (False, ())
    assert tables.newer is not None
    assert tables.newer.version == NEWER
    dump: Any = read_dump(newer)
    assert dump["newer"] == dump["problems"][0] == str(tables.newer)
    assert len(dump["files"]) == 4 + 17 + 1
    assert len(dump["history"]) > 5
    assert Path(newer).read_bytes() == before


def test_its_copy_is_read_where_the_file_is_damaged(newer: str) -> None:
    Path(newer).write_bytes(b"no database" * 1000)
    tables = read_tables(newer)
    assert not tables.lost
    assert f"{KIND}:/moon:beam" in tables.rows[FILES]


@pytest.mark.parametrize("oldest", [NEWER, VERSION + 1, "3", None])
def test_one_that_this_version_cannot_read_is_refused_by_all(tmp_path: Path, oldest: Any) -> None:
    path = copied(tmp_path, f"schema-{VERSION}")
    make_newer(path, oldest=oldest)
    for reader in (Store, read_tables, read_dump, convert_newer):
        call: Callable[[str], object] = reader
        with pytest.raises(NewerSchemaError) as caught:
            call(path)
        assert not caught.value.readable
        assert "newer version again" in str(caught.value)


def test_without_that_row_a_newer_store_is_not_read(tmp_path: Path) -> None:
    path = copied(tmp_path, f"schema-{VERSION}")
    make_newer(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"DELETE FROM {META} WHERE key = ?", (READABLE_BY,))
    with pytest.raises(NewerSchemaError) as caught:
        read_tables(path)
    assert not caught.value.readable


def test_converted_it_has_every_row_and_the_newer_file_is_kept(newer: str) -> None:
    before = Path(newer).read_bytes()
    rows = read_tables(newer).rows
    aside = convert_newer(newer, clock=lambda: 1_700_000_000.0)
    assert aside == f"{newer}.schema-{NEWER}-20231114T221320Z"
    assert Path(aside).read_bytes() == before
    assert read_tables(newer) == (rows, False, (), None)
    with closing(Store(newer, boot=BOOT)) as store:
        ledger = Ledger(store)
        assert_known(ledger)
        assert [row.path for row in ledger.of_kind(KIND)] == ["/moon"]
        assert (store.lost, store.damage) == (False, None)
    assert convert_newer(newer) is None


def test_the_newer_version_takes_the_converted_one_again(newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_newer(newer)
    steps = (*MIGRATIONS, ("CREATE TABLE tides (key TEXT PRIMARY KEY NOT NULL, height REAL)",))
    monkeypatch.setattr("state.store.migrate", lambda connection, version: migrate(connection, version, steps))
    with closing(Store(newer, boot=BOOT)) as store:
        assert_known(Ledger(store))
    with closing(sqlite3.connect(newer)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (NEWER,)
        ((row,),) = connection.execute(f"SELECT row FROM {FILES} WHERE key = ?", (f"{KIND}:/moon:beam",)).fetchall()
    assert msgpack.unpackb(unseal(f"{KIND}:/moon:beam", row))["knob"] == "moon.beam"


@pytest.mark.parametrize("call", range(1, 12))
def test_a_crash_at_any_call_of_the_conversion_loses_nothing(
    newer: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_tables(newer).rows
    made = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal made
            made += 1
            if made == call:
                raise Crash
            return real(*given, **named)

        return wrapped

    with monkeypatch.context() as patched:
        for name in ("rename", "unlink", "open"):
            patched.setattr(os, name, counted(getattr(os, name)))
        patched.setattr("state.quarantine.migrate", counted(migrate))
        try:
            convert_newer(newer)
        except Crash:
            pass
        else:
            assert made < call
    convert_newer(newer)
    with closing(Store(newer, boot=BOOT)) as store:
        assert_known(Ledger(store))
        assert {key for key, _ in store.rows(FILES)} == rows[FILES].keys()


def test_where_it_cannot_be_converted_a_restore_reads_it(newer: str) -> None:
    with closing(Store(newer, boot=BOOT, must_record=False)) as store:
        assert not store.writable
        ledger = Ledger(store)
        assert_known(ledger)
        store.apply(batch_of(META, {"x": 1}))
        assert store.unrecorded is not None
