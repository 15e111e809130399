"""The store's second copy: damage of the store costs no original, is found while it is in use, and is reported."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroupfs.errors import StoreError
from state.framed import frame, frames
from state.ledger import Ledger
from state.mirror import copy_path, read_copy
from state.reader import LostStoreError, NoStoreError, StoreDeniedError, read_dump, read_tables
from state.schema import FILES, HOLDS, META, NO_COPY, OPENED_AT, RUNNING, seal
from state.store import Store
from state.store_files import file_marks
from tests.examples import examples
from tests.state.ledgers import entry
from tests.state.storing import batch_of, content

TRUTH: dict[str, object] = {f"cpuset:/kubepods/pod{n}:cpuset.cpus": {"original": f"0-{n}" * 20} for n in range(120)}


def stored(path: str) -> Store:
    store = Store(path, boot="b")
    store.apply(batch_of(FILES, TRUTH))
    store.apply(batch_of(HOLDS, {"node": {"target": "held"}}))
    return store


def overwrite(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(os.urandom(os.path.getsize(path) - 1024))


def cut(path: str) -> None:
    os.truncate(path, 4096)


def empty(path: str) -> None:
    os.truncate(path, 0)


def junk(path: str) -> None:
    Path(path).write_bytes(b"no database" * 1000)


def delete_all(path: str) -> None:
    for part in ("", "-wal", "-shm"):
        Path(path + part).unlink(missing_ok=True)


def delete_wal(path: str) -> None:
    os.unlink(f"{path}-wal")


def flip_a_row(path: str) -> None:
    other = sqlite3.connect(path)
    other.execute("UPDATE files SET row = x'00' WHERE rowid = 7")
    other.commit()
    other.close()


def set_back(path: str) -> None:
    """Another program puts an older file in place."""
    older = Store(f"{path}.older", boot="b")
    older.close()
    delete_all(path)
    os.rename(f"{path}.older", path)
    os.unlink(f"{path}.older.copy")


Damage = Callable[[str], None]
DAMAGES = [overwrite, cut, empty, junk, delete_all, flip_a_row, set_back]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_made_again_from_its_copy(path: str, damage: Damage) -> None:
    stored(path).close()
    damage(path)
    dump = read_dump(path)
    assert len(dump["files"]) == len(TRUTH)  # type: ignore[arg-type]
    assert dump["problems"]
    store = Store(path, boot="b")
    assert content(store, FILES) == TRUTH
    assert content(store, HOLDS) == {"node": {"target": "held"}}
    assert (store.lost, store.damage is not None, store.writable) == (False, True, True)
    store.close()
    assert read_dump(path)["problems"] == []


@pytest.mark.parametrize("folded", [False, True], ids=["all in the WAL", "in the file"])
@pytest.mark.parametrize("damage", [*DAMAGES, delete_wal])
@pytest.mark.parametrize("writes", [0, 2])
def test_damage_in_use_is_found_said_and_repaired(path: str, damage: Damage, folded: bool, writes: int) -> None:
    store = stored(path)
    if folded:
        store.close()
        store = Store(path, boot="b")
    assert store.check() is None
    generation = store.generation
    damage(path)
    for number in range(writes):
        # Our own writes do not hide it.
        with suppress(StoreError):
            store.apply(batch_of(HOLDS, {"node": {"target": str(number)}}))
    wrong = store.check()
    assert wrong is not None
    # What the WAL still has is put back from there.
    assert store.generation > generation or not folded, "owners write what they hold again"
    assert (store.lost, store.writable) == (False, True)
    assert content(store, FILES) == TRUTH
    assert store.check() is None
    store.apply(batch_of(HOLDS, {"node": {"target": "again"}}))
    fresh = read_dump(path)
    assert (len(fresh["files"]), fresh["problems"]) == (len(TRUTH), [])  # type: ignore[arg-type]
    store.close()


def test_a_whole_check_finds_what_left_no_trace_in_the_times(path: str) -> None:
    store = stored(path)
    store.close()
    store = Store(path, boot="b")
    overwrite(path)
    store._marks = file_marks(path)  # as if the medium had changed by itself
    assert store.check() is None
    assert store.check(full=True) is not None
    assert content(store, FILES) == TRUTH


def test_after_a_kill_the_deleted_wal_is_missed(path: str, tmp_path: Path) -> None:
    """What only the WAL had is gone from a store that opens without any error."""
    Store(path, boot="b").close()
    store = stored(path)
    killed = str(tmp_path / "killed" / "state.db")
    os.mkdir(os.path.dirname(killed))
    for part in ("", ".copy"):
        shutil.copyfile(path + part, killed + part)
    store.close()
    assert {key for key, _ in sqlite3.connect(killed).execute("SELECT key, row FROM files")} == set()
    assert len(read_dump(killed)["files"]) == len(TRUTH)  # type: ignore[arg-type]
    assert content(Store(killed, boot="b"), FILES) == TRUTH


def test_a_removed_row_does_not_come_back_with_the_copy(path: str) -> None:
    store = stored(path)
    batch = batch_of(FILES, {})
    first = next(iter(TRUTH))
    batch.delete(FILES, first)
    store.apply(batch)
    store.close()
    junk(path)
    assert first not in content(Store(path, boot="b"), FILES)


def test_a_damaged_copy_costs_nothing_and_is_written_again(path: str) -> None:
    store = stored(path)
    Path(copy_path(path)).write_bytes(b"no copy")
    assert content(store, FILES) == TRUTH
    assert store.check() is None
    store.close()
    copied = read_copy(path)
    assert copied is not None
    assert (copied.whole, len(copied.rows[FILES])) == (True, len(TRUTH))


@pytest.mark.parametrize("wrong", [{b"k": b"1"}, {"k": "1"}, {"k": 1}], ids=repr)
def test_a_row_of_another_form_in_the_copy_is_damage_and_the_others_count(
    path: str, wrong: dict[object, object]
) -> None:
    good = msgpack.packb("x")
    Path(path).parent.mkdir(exist_ok=True)
    Path(copy_path(path)).write_bytes(frame(msgpack.packb([3, "b", True, [], {FILES: {**wrong, "good": good}}])))
    copied = read_copy(path)
    assert copied is not None
    assert (copied.rows[FILES], copied.whole) == ({"good": good}, False)
    with closing(Store(path, boot="b")) as store:
        assert dict(store.rows(FILES)) == {"good": good}


def test_a_copy_on_a_disk_that_takes_nothing_is_a_problem_and_no_more(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored(path)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("state.framed.append", full)
        store.apply(batch_of(HOLDS, {"other": 1}))
        assert store.copy_problem is not None
        assert "ENOSPC" in store.copy_problem
    store.apply(batch_of(HOLDS, {"third": 1}))
    assert not store.copy_problem
    copied = read_copy(path)
    assert copied is not None
    assert set(copied.rows[HOLDS]) == {"node", "other", "third"}
    store.close()


def test_files_of_another_boot_do_not_come_back_with_the_copy(path: str) -> None:
    stored(path).close()
    junk(path)
    store = Store(path, boot="next")
    assert content(store, FILES) == {}
    assert content(store, HOLDS) == {"node": {"target": "held"}}


def test_store_and_copy_damaged_is_never_nothing(path: str) -> None:
    stored(path).close()
    junk(path)
    os.unlink(copy_path(path))
    with pytest.raises(LostStoreError):
        read_tables(path)
    store = Store(path, boot="b")
    assert store.lost


def test_no_store_no_right_and_a_store_that_went_are_told_apart(path: str) -> None:
    with pytest.raises(NoStoreError):
        read_dump(path)
    stored(path).close()
    delete_all(path)
    os.unlink(copy_path(path))
    Path(os.path.dirname(path), "lock").touch()
    with pytest.raises(LostStoreError):
        read_dump(path)


def test_a_user_without_rights_is_told_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: needs root, to be another user for a moment")
    # Outside of pytest's own directory, which each start of a pytest closes to others.
    with tempfile.TemporaryDirectory(prefix="bypassd-") as place:
        os.chmod(place, 0o755)
        path = f"{place}/lib/state.db"
        stored(path).close()
        os.chmod(os.path.dirname(path), 0o700)
        os.seteuid(65534)
        try:
            with pytest.raises(StoreDeniedError, match="permission denied"):
                read_dump(path)
        finally:
            os.seteuid(0)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_frames_give_back_what_was_written_and_nothing_else(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.binary(max_size=40), max_size=6), label="bodies")
    text = bytearray(b"".join(map(frame, bodies)))
    assert frames(bytes(text)) == (bodies, True)
    if text:
        end = data.draw(st.integers(0, len(text)), label="cut")
        del text[end:]
        if text:
            text[data.draw(st.integers(0, len(text) - 1), label="at")] ^= data.draw(st.integers(0, 255), label="with")
    chunks, _ = frames(bytes(text))
    assert all(item in bodies for item in chunks)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_damage_of_one_of_the_two_costs_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = str(tmp_path_factory.mktemp("two") / "state.db")
    stored(path).close()
    victim = data.draw(st.sampled_from([path, copy_path(path)]), label="victim")
    whole = bytearray(Path(victim).read_bytes())
    for _ in range(data.draw(st.integers(1, 8), label="flips")):
        whole[data.draw(st.integers(0, len(whole) - 1), label="at")] ^= data.draw(st.integers(1, 255), label="with")
    del whole[data.draw(st.integers(0, len(whole)), label="length") :]
    Path(victim).write_bytes(whole)
    try:
        store = Store(path, boot="b")
    except StoreError:
        return  # the version number itself was hit
    assert content(store, FILES) == TRUTH
    assert not store.lost
    store.close()


def test_the_ledger_writes_what_it_holds_into_a_repaired_store(path: str) -> None:
    store = Store(path, boot="b")
    ledger = Ledger(store)
    ledger.first_touches([entry()])
    ledger.want(entry().key, "2-3", policy="p", reason="r")
    junk(path)
    os.unlink(copy_path(path))
    assert store.check() is not None
    ledger.flush()
    store.close()
    (row,) = Ledger(Store(path, boot="b"))
    assert (row.original, row.wanted) == (entry().original, "2-3")
    assert content(store, META) is not None


# A downgrade: a version that knows neither serial nor copy works on the store


def by_an_old_version(path: str, opened_at: float, files: dict[str, bytes]) -> None:
    """What such a version leaves: its opening, and rows without a serial. The file is made where there is none."""
    if not os.path.exists(path):
        Store(path, boot="b").close()
        with closing(sqlite3.connect(path)) as made:
            made.execute("DELETE FROM meta")
            made.commit()
        os.unlink(copy_path(path))
    with closing(sqlite3.connect(path)) as connection:
        rows = {OPENED_AT: msgpack.packb(opened_at), RUNNING: msgpack.packb(True)}
        put = "INSERT INTO {} (key, row) VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET row = excluded.row"
        connection.executemany(put.format(META), [(key, seal(key, body)) for key, body in rows.items()])
        connection.executemany(put.format(FILES), [(key, seal(key, body)) for key, body in files.items()])
        connection.commit()


@pytest.mark.parametrize("fresh", [False, True], ids=["on the same file", "on a fresh file"])
def test_a_copy_older_than_a_downgrade_takes_nothing_from_the_store(path: str, fresh: bool) -> None:
    stored(path).close()
    if fresh:
        delete_all(path)
        os.rename(copy_path(path), f"{path}.kept")
    by_an_old_version(path, 4e9, {"cpu:/kubepods/late:cpu.shares": b"\x01"})
    if fresh:
        os.rename(f"{path}.kept", copy_path(path))
    tables = read_tables(path)
    assert (tables.lost, tables.problems) == (False, ())
    assert "cpu:/kubepods/late:cpu.shares" in tables.rows[FILES]
    store = Store(path, boot="b")
    assert (store.lost, store.damage) == (False, None)
    assert "cpu:/kubepods/late:cpu.shares" in dict(store.rows(FILES))
    store.close()


def test_a_store_damaged_after_a_downgrade_is_not_called_whole(path: str) -> None:
    stored(path).close()
    by_an_old_version(path, 4e9, {"cpu:/kubepods/late:cpu.shares": b"\x01"})
    flip_a_row(path)
    tables = read_tables(path)
    assert tables.lost
    assert "cpu:/kubepods/late:cpu.shares" in tables.rows[FILES]
    store = Store(path, boot="b")
    assert store.lost
    assert {"cpu:/kubepods/late:cpu.shares", *TRUTH} <= set(dict(store.rows(FILES)))
    store.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_store_of_a_killed_daemon_without_its_copy_cannot_be_called_whole(path: str, killed: bool) -> None:
    store = stored(path)
    if killed:
        store.apply(batch_of(META, {RUNNING: True}))
    store.close()
    os.unlink(copy_path(path))
    tables = read_tables(path)
    assert (tables.lost, any(NO_COPY in line for line in tables.problems)) == (killed, killed)
    store = Store(path, boot="b")
    assert (store.lost, store.damage is not None) == (killed, killed)
    store.close()
