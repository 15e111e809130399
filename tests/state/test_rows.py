"""Rows with a version that their owner holds, too: a newer one stays unchanged, a lost file gets all of them again."""

import os
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from cgroupfs.errors import StoreError
from state.rows import MirroredRows, RowForm
from state.schema import META
from state.store import Store, StoreBatch


class Row(Struct, frozen=True, kw_only=True):
    v: int = 2
    text: str


FORM = RowForm(Row, 2)


def test_a_row_of_a_newer_version_is_none_and_one_that_cannot_be_read_an_error() -> None:
    assert FORM.decode(FORM.encode(Row(text="a"))) == Row(text="a")
    assert FORM.decode(msgspec.msgpack.encode({"text": "old"})) == Row(text="old")
    assert FORM.decode(msgspec.msgpack.encode({"v": 3, "text": 7})) is None
    for body in (b"\xc1", msgspec.msgpack.encode({"v": 2}), msgspec.msgpack.encode([1])):
        with pytest.raises(msgspec.MsgspecError):
            FORM.decode(body)


def texts(store: Store) -> dict[str, str]:
    rows = {key: FORM.decode(body) for key, body in store.rows(META) if key.startswith("x:")}
    return {key: row.text for key, row in rows.items() if row is not None}


def test_a_file_that_was_lost_gets_all_that_is_held_below_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(str(path), boot="b")
    held = {"a": Row(text="a"), "b": Row(text="b")}
    rows = MirroredRows(store, META, FORM, "x:")

    def write(**changes: Row | None) -> None:
        batch = StoreBatch()
        for key, row in changes.items():
            rows.put(batch, key, row)
        rows.write(batch, lambda: dict(held))

    write(**held)
    assert (rows.current, texts(store)) == (True, {"x:a": "a", "x:b": "b"})
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    write(b=Row(text="newer"), c=None)
    assert texts(store) == {"x:a": "a", "x:b": "newer"}
    write(a=None)
    assert texts(store) == {"x:b": "newer"}, "only once"


def test_what_a_lost_file_lacks_is_written_as_soon_as_there_is_one(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    store = Store(str(directory / "state.db"), boot="b", retry_s=0.0)
    rows = MirroredRows(store, META, FORM, "x:")
    for name in os.listdir(directory):
        (directory / name).unlink()
    directory.rmdir()
    directory.write_text("no directory")
    with pytest.raises(StoreError):
        rows.write(StoreBatch(), lambda: {"a": Row(text="a")})
    directory.unlink()
    rows.write(StoreBatch(), lambda: {"a": Row(text="a")})
    assert texts(store) == {"x:a": "a"}
