"""What was applied is read again, whatever ended the process; versions; reading beside the daemon."""

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import StoreError
from state.reader import read_dump
from state.schema import APPLICATION_ID, FILES, HOLDS, META, MIGRATIONS, SETTINGS, VERSION, migrate, seal, unseal
from state.store import Store, StoreBatch, boot_id
from tests.state.storing import batch_of, content, packed


def test_what_was_applied_is_there_after_the_process_is_gone_without_a_close(path: str) -> None:
    Store(path).apply(batch_of(FILES, {"a": 1, "b": [2]}))
    assert content(Store(path), FILES) == {"a": 1, "b": [2]}


def test_a_later_row_replaces_keeps_its_place_and_none_deletes(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {"a": 1, "b": 2, "c": 3}))
    batch = batch_of(FILES, {"a": 4})
    batch.delete(FILES, "b")
    batch.delete(FILES, "never there")
    store.apply(batch)
    assert list(content(store, FILES).items()) == [("a", 4), ("c", 3)]


def test_the_directory_and_the_files_are_for_root_alone(path: str) -> None:
    Store(path).apply(batch_of(FILES, {"a": 1}))
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    for name in os.listdir(os.path.dirname(path)):
        assert stat.S_IMODE(os.stat(os.path.join(os.path.dirname(path), name)).st_mode) == 0o600, name


def test_every_commit_is_synced(path: str) -> None:
    store = Store(path)
    assert store._connection is not None
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_history_is_bounded_newest_first_and_numbers_go_on(path: str) -> None:
    store = Store(path, history_limit=10)
    for number in range(25):
        batch = StoreBatch()
        batch.append(packed({"n": number}))
        store.apply(batch)
    pairs = [(seq, msgpack.unpackb(body)["n"]) for seq, body in store.history(100)]
    assert pairs == [(number + 1, number) for number in range(24, 14, -1)]


def test_two_threads_at_once_raise_instead_of_interleaving(path: str) -> None:
    store = Store(path)
    with store._alone():
        failures: list[BaseException] = []

        def intrude() -> None:
            try:
                store.apply(batch_of(FILES, {"a": 1}))
            except RuntimeError as exc:
                failures.append(exc)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(failures) == 1
    store.apply(batch_of(FILES, {"a": 1}))


def test_a_reboot_drops_what_was_about_cgroups_and_keeps_the_rest(path: str) -> None:
    store = Store(path, boot="one")
    for table in (FILES, SETTINGS, HOLDS):
        store.apply(batch_of(table, {"a": 1}))
    store.close()
    assert not Store(path, boot="one").rebooted
    again = Store(path, boot="two")
    assert again.rebooted
    assert (content(again, FILES), content(again, SETTINGS), content(again, HOLDS)) == ({}, {}, {"a": 1})
    assert msgpack.unpackb(again.history(1)[0][1])["kind"] == "reboot"
    assert content(again, META)["boot_id"] == "two"


def test_an_unknown_boot_id_is_never_taken_for_a_reboot(path: str) -> None:
    first = Store(path, boot="one")
    first.apply(batch_of(FILES, {"a": 1}))
    assert not Store(path, boot="").rebooted
    assert content(Store(path, boot="one"), FILES) == {"a": 1}


def test_boot_id_is_read_below_the_root_and_empty_without_one(tmp_path: Path) -> None:
    assert boot_id(str(tmp_path)) == ""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("0000-1\n")
    assert boot_id(str(tmp_path)) == "0000-1"


# Versions


def test_migrations_run_in_order_once_and_a_failing_one_leaves_the_version_before_it() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    steps = [*MIGRATIONS, ("CREATE TABLE extra (x)",), ("CREATE TABLE more (x)", "INSERT INTO nowhere VALUES (1)")]
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate(connection, 0, steps)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION + 1,)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert {"files", "history", "extra"} <= tables
    assert "more" not in tables
    migrate(connection, VERSION + 1, [*steps[:-1], ("CREATE TABLE more (x)",)])
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION + 2,)
    connection.close()


# Reading from another process


def test_the_dump_reads_while_the_daemon_writes_and_after_it_is_gone(path: str) -> None:
    store = Store(path, boot="b", version="0.1.0", node="node1")
    batch = batch_of(FILES, {"x": {"file": "x", "order": 2}, "y": {"file": "y", "order": 1}})
    batch.put(HOLDS, "node", packed({"target": "node"}))
    batch.append(packed({"kind": "write"}))
    store.apply(batch)
    dump = read_dump(path)
    assert dump["files"] == [{"file": "y", "order": 1}, {"file": "x", "order": 2}]
    assert dump["holds"] == [{"target": "node"}]
    assert dump["history"] == [{"seq": 1, "kind": "write"}]
    assert isinstance(dump["meta"], dict)
    assert (dump["meta"]["boot_id"], dump["meta"]["agent_version"], dump["meta"]["node"]) == ("b", "0.1.0", "node1")
    store.close()
    assert read_dump(path) == dump


def test_the_dump_names_damaged_rows_and_gives_the_others(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {"x": {"order": 1}, "y": {"order": 2}}))
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE files SET row = x'0000000000' WHERE key = 'x'")
    connection.commit()
    connection.close()
    dump = read_dump(path)
    assert dump["files"] == [{"order": 1}, {"order": 2}]
    assert dump["problems"] == ["files: row 'x' is damaged: using its second copy"]
    os.unlink(f"{path}.copy")
    dump = read_dump(path)
    assert dump["files"] == [{"order": 2}]
    assert dump["problems"] == ["files: row 'x' is damaged; data may be lost"]


@pytest.mark.parametrize("name", ["a b?mode=rw#x", "50%25", "ü"])
def test_any_directory_name_will_do(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name / "state.db")
    Store(path).apply(batch_of(FILES, {"x": {"order": 1}}))
    assert read_dump(path)["files"] == [{"order": 1}]


def test_no_store_and_no_database_are_one_clear_message_each(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no state file"):
        read_dump(str(tmp_path / "state.db"))
    (tmp_path / "state.db").write_bytes(b"something else " * 300)
    with pytest.raises(StoreError, match="cannot be read"):
        read_dump(str(tmp_path / "state.db"))
    (tmp_path / "state.db").write_bytes(b"")
    with pytest.raises(StoreError, match="never initialized completely"):
        read_dump(str(tmp_path / "state.db"))


def test_reading_imports_neither_msgspec_nor_trio() -> None:
    code = "import sys, state.reader, state.store; print(sorted({'msgspec', 'trio', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout.strip() == "[]"


@given(st.text(), st.binary())
def test_a_sealed_row_opens_only_under_its_own_key(key: str, body: bytes) -> None:
    assert unseal(key, seal(key, body)) == body
    with pytest.raises(ValueError, match="damaged"):
        unseal(key + "x", seal(key, body))
