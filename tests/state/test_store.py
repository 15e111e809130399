import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroupfs.errors import StoreError
from state.quarantine import KEEP
from state.reader import read_dump
from state.schema import APPLICATION_ID, FILES, HOLDS, META, MIGRATIONS, SETTINGS, VERSION, migrate, seal, unseal
from state.store import Batch, NewerSchemaError, Store, boot_id


def packed(value: object) -> bytes:
    body: bytes = msgpack.packb(value)
    return body


def batch_of(table: str, rows: dict[str, object]) -> Batch:
    batch = Batch()
    for key, value in rows.items():
        batch.put(table, key, packed(value))
    return batch


def content(store: Store, table: str) -> dict[str, object]:
    return {key: msgpack.unpackb(body) for key, body in store.rows(table)}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lib" / "state.db")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(ballast: Path) -> None:
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(fd, b"x" * 4096):
            pass
    os.close(fd)


def usable(store: Store) -> bool:
    return store.writable


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)


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
        batch = Batch()
        batch.append(packed({"n": number}))
        store.apply(batch)
    found = [(seq, msgpack.unpackb(body)["n"]) for seq, body in store.history(100)]
    assert found == [(number + 1, number) for number in range(24, 14, -1)]


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


def test_a_newer_schema_is_refused_with_one_message_and_left_alone(path: str) -> None:
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = Path(path).read_bytes()
    with pytest.raises(NewerSchemaError, match=f"version {VERSION + 1} is of a newer bypassd"):
        Store(path)
    with pytest.raises(NewerSchemaError):
        read_dump(path)
    assert Path(path).read_bytes() == before
    assert [name for name in os.listdir(os.path.dirname(path)) if "corrupt" in name] == []


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


# Damage


def quarantined(path: str) -> list[str]:
    return sorted(name for name in os.listdir(os.path.dirname(path)) if ".corrupt-" in name)


@pytest.mark.parametrize("junk", [b"not a database at all, but long enough to be read as one" * 40, b"\0" * 8192])
def test_a_file_that_is_no_database_is_moved_aside_and_a_fresh_one_made(path: str, junk: bytes) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(junk)
    store = Store(path, clock=lambda: 0.0)
    assert store.quarantined == f"{path}.corrupt-19700101T000000Z"
    assert Path(store.quarantined).read_bytes() == junk
    assert usable(store)
    store.apply(batch_of(FILES, {"a": 1}))
    assert content(Store(path), FILES) == {"a": 1}


def test_another_programs_database_is_moved_aside_whole(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    store = Store(path)
    assert store.quarantined is not None
    assert store.damage is not None
    assert "another program" in store.damage
    assert sqlite3.connect(store.quarantined).execute("SELECT * FROM theirs").fetchall() == []


def test_a_row_that_changed_by_itself_is_left_out_and_the_others_are_saved(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {f"file{number}": "original" * 5 for number in range(50)}))
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE files SET row = replace(row, x'6f726967', x'6f726968') WHERE key = 'file7'")
    connection.commit()
    connection.close()
    again = Store(path)
    assert again.quarantined is not None
    assert again.salvaged == 49
    assert content(again, FILES) == {f"file{n}": "original" * 5 for n in range(50) if n != 7}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_give_back_anything_that_was_not_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = str(tmp_path_factory.mktemp("flip") / "state.db")
    store = Store(path)
    truth: dict[str, object] = {f"cpuset:/kubepods/pod{n}:cpuset.cpus": f"0-{n}" * 10 for n in range(80)}
    store.apply(batch_of(FILES, truth))
    store.close()
    whole = bytearray(Path(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 6), label="flips")):
        whole[data.draw(st.integers(0, len(whole) - 1), label="at")] ^= data.draw(st.integers(1, 255), label="with")
    Path(path).write_bytes(whole)
    try:
        again = Store(path)
    except NewerSchemaError:
        return  # the version number itself was hit: refused, nothing moved
    found = content(again, FILES)
    assert found.items() <= truth.items()
    if len(found) < len(truth):
        assert again.quarantined is not None
    assert again.writable
    again.apply(batch_of(FILES, truth))
    assert content(Store(path), FILES) == truth


def test_a_header_that_makes_sqlite_open_it_read_only_is_damage_too(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {"a": 1}))
    store.close()
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\x03")
    again = Store(path)
    assert usable(again)
    assert again.salvaged == 1
    assert content(again, FILES) == {"a": 1}


def test_a_crash_while_a_damaged_file_is_replaced_loses_no_rescued_row(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(path)
    truth: dict[str, object] = {f"file{number}": number for number in range(30)}
    store.apply(batch_of(FILES, truth))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE files SET row = x'00' WHERE key = 'file3'")
    connection.commit()
    del truth["file3"]
    for allowed in range(6):
        copy = f"{path}-{allowed}/state.db"
        shutil.copytree(os.path.dirname(path), os.path.dirname(copy))
        count = 0

        def rename(old: str, new: str, allowed: int = allowed) -> None:
            nonlocal count
            count += 1
            if count > allowed:
                raise KeyboardInterrupt
            os.replace(old, new)

        with monkeypatch.context() as patch:
            patch.setattr("state.quarantine.os.rename", rename)
            try:
                Store(copy)
            except KeyboardInterrupt:
                pass
            else:
                assert allowed >= 3, "a replacement takes at least three renames"
        assert content(Store(copy), FILES) == truth, allowed
    connection.close()


def test_only_a_few_damaged_files_are_kept(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    for second in range(KEEP + 3):
        Path(path).write_bytes(b"junk" * 1000)
        Store(path, clock=lambda second=second: float(second)).close()  # type: ignore[misc]
    assert quarantined(path) == [f"state.db.corrupt-19700101T0000{second:02}Z" for second in range(3, KEEP + 3)]


def test_damage_found_while_running_replaces_the_file_and_says_that_everything_must_be_written_again(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {f"file{number}": "x" * 500 for number in range(40)}))
    store.close()
    store = Store(path)
    generation = store.ready()
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (os.path.getsize(path) - 4096))
    os.truncate(f"{path}-wal", 0)
    assert store._connection is not None
    store._connection.execute("PRAGMA shrink_memory")
    for _ in range(5):
        with suppress(StoreError):
            store.apply(batch_of(FILES, {f"file{number}": "y" * 500 for number in range(40)}))
    assert store.ready() > generation
    assert store.quarantined is not None
    assert set(content(store, FILES).values()) == {"y" * 500}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_transaction_cut_short_at_any_byte_is_there_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    path = str(directory / "state.db")
    store = Store(path)
    store.apply(batch_of(FILES, {"first": "original"}))
    before = os.path.getsize(f"{path}-wal")
    store.apply(batch_of(FILES, {f"second{number}": "z" * 300 for number in range(20)}))
    after = os.path.getsize(f"{path}-wal")
    copy = directory / "copy"
    copy.mkdir()
    shutil.copy(path, copy / "state.db")
    shutil.copy(f"{path}-wal", copy / "state.db-wal")
    cut = data.draw(st.integers(before, after), label="cut")
    os.truncate(copy / "state.db-wal", cut)
    found = content(Store(str(copy / "state.db")), FILES)
    assert found["first"] == "original"
    assert len(found) in {1, 21}
    assert len(found) == 21 or cut < after
    store.close()


# Disks that do not take it


def test_a_read_only_disk_is_an_error_for_writes_and_still_gives_what_is_there(small_disk: Path) -> None:
    path = str(small_disk / "lib" / "state.db")
    store = Store(path, boot="b")
    store.apply(batch_of(FILES, {"a": 1}))
    store.close()
    remount(small_disk, "ro")
    now = [0.0]
    store = Store(path, boot="b", monotonic=lambda: now[0])
    assert not usable(store)
    assert content(store, FILES) == {"a": 1}
    with pytest.raises(StoreError, match="cannot be written"):
        store.apply(batch_of(FILES, {"b": 2}))
    assert read_dump(path)["meta"]
    remount(small_disk, "rw")
    with pytest.raises(StoreError):
        store.apply(batch_of(FILES, {"b": 2}))
    now[0] = 6.0
    store.apply(batch_of(FILES, {"b": 2}))
    assert usable(store)
    assert content(store, FILES) == {"a": 1, "b": 2}
    store.close()


def test_what_is_only_in_the_wal_of_a_read_only_disk_is_read_too(small_disk: Path) -> None:
    path = str(small_disk / "lib" / "state.db")
    crashed = str(small_disk / "crashed" / "state.db")
    store = Store(path, boot="b")
    store.apply(batch_of(FILES, {"a": 1}))
    os.mkdir(os.path.dirname(crashed))
    for suffix in ("", "-wal"):
        shutil.copy(path + suffix, crashed + suffix)
    store.close()
    remount(small_disk, "ro")
    assert content(Store(crashed, boot="b"), FILES) == {"a": 1}
    assert content(Store(crashed, boot="after a reboot"), FILES) == {}
    remount(small_disk, "rw")


def test_a_full_disk_stores_nothing_of_the_batch_and_works_again_when_there_is_room(small_disk: Path) -> None:
    path = str(small_disk / "lib" / "state.db")
    now = [0.0]
    store = Store(path, monotonic=lambda: now[0])
    store.apply(batch_of(FILES, {"a": 1}))
    ballast = small_disk / "ballast"
    fill(ballast)
    big: dict[str, object] = {f"file{number}": "x" * 2000 for number in range(100)}
    with pytest.raises(StoreError, match=r"full|disk I/O"):
        store.apply(batch_of(FILES, big))
    assert not usable(store)
    assert content(store, FILES) == {"a": 1}
    ballast.unlink()
    now[0] = 60.0
    store.apply(batch_of(FILES, {"b": 2}))
    assert usable(store)
    assert content(store, FILES) == {"a": 1, "b": 2}
    store.close()


def test_a_directory_that_cannot_be_made_is_reported_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "lib").write_text("a file where the directory should be")
    now = [0.0]
    store = Store(str(tmp_path / "lib" / "state.db"), monotonic=lambda: now[0])
    assert not usable(store)
    assert store.problem is not None
    assert "EEXIST" in store.problem or "ENOTDIR" in store.problem
    (tmp_path / "lib").unlink()
    now[0] = 60.0
    assert store.ready() == 1
    assert usable(store)


def test_a_file_deleted_under_us_is_noticed_before_the_next_write(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {"a": 1}))
    generation = store.ready()
    shutil.rmtree(os.path.dirname(path))
    assert store.ready() == generation + 1
    store.apply(batch_of(FILES, {"b": 2}))
    assert content(Store(path), FILES) == {"b": 2}


def test_another_writer_is_waited_for_then_reported_and_the_store_stays_usable(path: str) -> None:
    store = Store(path)
    assert store._connection is not None
    store._connection.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process"):
        store.apply(batch_of(FILES, {"a": 1}))
    assert usable(store)
    other.execute("ROLLBACK")
    store.apply(batch_of(FILES, {"a": 1}))
    other.close()


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
    assert dump["files"] == [{"order": 2}]
    assert dump["problems"] == ["files: row 'x' is damaged"]


@pytest.mark.parametrize("name", ["a b?mode=rw#x", "50%25", "ü"])
def test_any_directory_name_will_do(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name / "state.db")
    Store(path).apply(batch_of(FILES, {"x": {"order": 1}}))
    assert read_dump(path)["files"] == [{"order": 1}]


def test_no_store_and_no_database_are_one_clear_message_each(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store here"):
        read_dump(str(tmp_path / "state.db"))
    (tmp_path / "state.db").write_bytes(b"something else " * 300)
    with pytest.raises(StoreError, match="cannot be read"):
        read_dump(str(tmp_path / "state.db"))
    (tmp_path / "state.db").write_bytes(b"")
    with pytest.raises(StoreError, match="first opening did not finish"):
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


def test_damage_met_while_reading_is_an_error_once_and_repaired(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {"a": 1, "b": 2}))
    other = sqlite3.connect(path)
    other.execute("UPDATE files SET row = x'00' WHERE key = 'a'")
    other.commit()
    other.close()
    generation = store.generation
    with pytest.raises(StoreError, match=r"row 'a' is damaged.*a fresh one is in place"):
        store.rows(FILES)
    assert store.ready() == generation + 1
    assert content(store, FILES) == {"b": 2}
    store.close()
    broken = Store(path)
    assert broken._connection is not None
    broken._connection.execute("DROP TABLE holds")
    with pytest.raises(StoreError, match="no such table"):
        broken.rows(HOLDS)
    broken.close()
    assert content(Store(path), HOLDS) == {}


def test_two_damaged_files_of_one_second_both_stay(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    for _ in range(2):
        Path(path).write_bytes(b"junk" * 1000)
        Store(path, clock=lambda: 0.0).close()
    assert quarantined(path) == ["state.db.corrupt-19700101T000000Z", "state.db.corrupt-19700101T000000Z-2"]


def test_a_damaged_file_that_cannot_be_replaced_stays_where_it_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(b"junk" * 1000)

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("state.store.replace_damaged", full)
        store = Store(path, retry_s=0)
        assert not usable(store)
        assert store.problem is not None
        assert "ENOSPC" in store.problem
        assert store.history(5) == []
    assert Path(path).read_bytes() == b"junk" * 1000
    assert store.ready() == 1
    assert store.quarantined is not None
