"""A store that was damaged gives back nothing that was not written, and continues."""

import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroupfs.errors import StoreError
from state.mirror import copy_path
from state.quarantine import KEEP
from state.reader import read_history
from state.schema import FILES, HOLDS
from state.store import NewerSchemaError, Store, StoreBatch
from tests.examples import examples
from tests.state.storing import batch_of, content, usable


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


def test_a_reader_beside_the_daemon_is_no_other_writer(path: str) -> None:
    """SQLite gives the WAL its owner again at each opening by root, which changes its times."""
    store = Store(path)
    for number in range(3):
        store.apply(batch_of(FILES, {"a": number}))
        # A reader of root's in the same time stamp of the file system would not be seen.
        time.sleep(0.02)
        read_history(path, 10)
        assert store.check() is None
    os.utime(f"{path}-wal", ns=(1, 1))
    assert store.check() is not None


def test_of_the_history_only_rows_with_one_of_the_texts_are_read_and_damaged_ones_are_left_out(path: str) -> None:
    store = Store(path)
    batch = StoreBatch()
    batch.history = [msgpack.packb({"pod": f"ci/Ä-{number}"}) for number in range(12)]
    store.apply(batch)
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE history SET row = 'ci/Ä-7 as a text' WHERE seq = 8")
        connection.execute("UPDATE history SET row = CAST(row AS TEXT) WHERE seq = 9")
        connection.commit()

    def pods(limit: int, *about: str) -> list[object]:
        return [row["pod"] for row in read_history(path, limit, about)]

    assert pods(100, "Ä-1", "ci/Ä-5") == ["ci/Ä-11", "ci/Ä-10", "ci/Ä-5", "ci/Ä-1"]
    assert pods(6, "Ä-1", "ci/Ä-5") == ["ci/Ä-11", "ci/Ä-10"]
    assert pods(100, "Ä-7", "Ä-8", "ä-1", "%", "' OR 1 --") == []
    assert len(pods(100)) == 10
    assert pods(0) == pods(0, "ci") == []


def test_a_row_that_changed_by_itself_is_left_out_and_the_others_are_saved(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {f"file{number}": "original" * 5 for number in range(50)}))
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE files SET row = replace(row, x'6f726967', x'6f726968') WHERE key = 'file7'")
    connection.commit()
    connection.close()
    os.unlink(copy_path(path))
    again = Store(path)
    assert again.quarantined is not None
    assert again.lost
    assert again.salvaged == 49
    assert content(again, FILES) == {f"file{n}": "original" * 5 for n in range(50) if n != 7}


@settings(max_examples=examples(200), deadline=None)
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
    fields = content(again, FILES)
    assert fields.items() <= truth.items()
    if len(fields) < len(truth):
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
        os.mkdir(os.path.dirname(copy))
        # File by file: the directory holds the copies of earlier rounds, whose files go when their stores do.
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(f"{path}{suffix}"):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
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


@settings(max_examples=examples(40), deadline=None)
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
    fields = content(Store(str(copy / "state.db")), FILES)
    assert fields["first"] == "original"
    assert len(fields) in {1, 21}
    assert len(fields) == 21 or cut < after
    store.close()


def test_damage_met_while_reading_is_an_error_once_and_repaired(path: str) -> None:
    store = Store(path)
    store.apply(batch_of(FILES, {"a": 1, "b": 2}))
    other = sqlite3.connect(path)
    other.execute("UPDATE files SET row = x'00' WHERE key = 'a'")
    other.commit()
    other.close()
    os.unlink(copy_path(path))
    generation = store.generation
    with pytest.raises(StoreError, match=r"row 'a' is damaged.*a new store was created"):
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
