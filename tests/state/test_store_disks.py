"""A disk that does not take what is written, or another writer in the way: an error, and a store that stays usable."""

import os
import shutil
import sqlite3
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from cgroupfs.errors import StoreError
from state.reader import read_dump
from state.schema import FILES
from state.store import Store
from tests.state.storing import batch_of, content, usable


def fill(ballast: Path) -> None:
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(fd, b"x" * 4096):
            pass
    os.close(fd)


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)


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
    with pytest.raises(StoreError, match="cannot write"):
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
