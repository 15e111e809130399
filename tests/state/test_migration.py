"""A store of schema 2 becomes one of this version: nothing that it knows is lost, however often it is interrupted."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from reconciler.actuators.codec import read_rows
from reconciler.actuators.files import node_files
from reconciler.actuators.files.node_files import FileRows
from state.dump import from_store
from state.entry import LedgerEntry, row_key
from state.kinds import CGROUP, SYSCTL
from state.ledger import Ledger
from state.reader import read_dump, read_tables
from state.schema import FILES, HOLDS, META, RUNNING, seal, unseal
from state.schema2 import PRIVATE
from state.store import Store, StoreBatch
from tests.state.release_store import BOOT, BOX, KNOWN

FIXTURE = Path(__file__).parents[1] / "fixtures/store/schema-2"


class Crash(BaseException):
    """The process ends here, as by SIGKILL."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    shutil.copytree(FIXTURE, tmp_path / "bypassd")
    return str(tmp_path / "bypassd/state.db")


def raw(path: str, table: str) -> dict[str, bytes]:
    """The rows of a file, without any of the program's own reading of tables."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute(f"SELECT key, row FROM {table} ORDER BY rowid")
        return {key: unseal(key, row) for key, row in rows}


def assert_whole(ledger: Ledger, before: dict[str, bytes]) -> None:
    """Every private row is in the ledger, and every control file is as it was."""
    assert ledger.problems == ()
    for codec, state in KNOWN.items():
        assert read_rows(ledger, codec) == state, codec.kind
    assert len(list(ledger.control_files())) == len(before) == 4
    for key, body in before.items():
        (entry,) = [entry for entry in ledger.control_files() if row_key(entry.key) == key]
        assert entry == msgspec.msgpack.decode(body, type=LedgerEntry)
    assert "4-7" in ledger.ours(ledger.backwards()[-1]), "what was about to be written"


def test_everything_that_it_knows_is_in_the_ledger_and_nothing_else_is_changed(path: str) -> None:
    before, meta, holds = raw(path, FILES), raw(path, META), raw(path, HOLDS)
    assert meta.keys() >= PRIVATE
    for _ in range(2):
        with closing(Store(path, boot=BOOT, version="0.1.0", node="node1", clock=lambda: 1_700_000_000.0)) as store:
            assert_whole(Ledger(store), before)
            assert (store.lost, store.damage, store.quarantined, store.rebooted) == (False, None, None, False)
            kinds = [msgpack.unpackb(body)["kind"] for _, body in store.history()]
    after = raw(path, META)
    assert not PRIVATE & after.keys()
    changing = {"serial", "opened_at", "readable_by"}
    assert {k: v for k, v in meta.items() if k not in PRIVATE | changing} == {
        k: v for k, v in after.items() if k not in changing
    }
    assert raw(path, HOLDS) == holds
    assert sorted(kinds) == ["failed", "foreign", *["touch"] * 4, "write", "write", "write", "yield"]
    assert {key: body for key, body in raw(path, FILES).items() if key in before} == before


def test_the_orders_of_first_touch_are_unique_and_those_of_control_files_stay(path: str) -> None:
    with closing(Store(path, boot=BOOT)) as store:
        ledger = Ledger(store)
        orders = [entry.order for entry in ledger]
        assert len(set(orders)) == len(orders) > 4 + 12
        assert max(entry.order for entry in ledger.control_files()) == 4


def test_reading_alone_shows_the_same_and_changes_nothing(path: str) -> None:
    before = Path(path).read_bytes()
    tables = read_tables(path)
    assert (tables.lost, tables.problems) == (False, ())
    assert not PRIVATE & tables.rows[META].keys()
    assert tables.rows[META].keys() >= {RUNNING}
    document = from_store(read_dump(path), at=1.0)
    files: Any = document["files"]
    originals = {(row["kind"], row["path"], row["file"]): row["original"] for row in files if row["kind"] != CGROUP}
    assert originals["sysctl", "/", "vm.min_free_kbytes"] == "67584"
    assert originals["process", BOX, "oom_score_adj of 812:55123"] == "-999"
    assert originals["resctrl", "/", "schemata"] == "L3:0=fffff;1=fffff\nMB:0=100;1=100"
    assert originals["network", "eth0", "root qdisc"] == "mq"
    assert originals["network", "eth1", "root qdisc"] is None
    assert originals["core_sched", "0x9bff8a4412c0", "core cookie"] == "none"
    assert len(originals) == 4 + 2 + 3 + 3 + 5
    assert Path(path).read_bytes() == before


def test_a_store_that_cannot_be_written_is_read_as_it_will_be(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = raw(path, FILES)

    def unwritable(*_: object) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr("state.store.migrate", unwritable)
    with closing(Store(path, boot=BOOT, must_record=False)) as store:
        assert not store.writable
        assert_whole(Ledger(store), before)
    assert raw(path, META).keys() >= PRIVATE


@pytest.mark.parametrize("step", ["migrate", "_transact", "_copy_all"])
def test_a_crash_at_any_step_of_the_opening_loses_nothing(
    path: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = raw(path, FILES)
    target: Any = "state.store.migrate" if step == "migrate" else f"state.store.Store.{step}"

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(target, crash)
        with pytest.raises(Crash):
            Store(path, boot=BOOT)
    with closing(Store(path, boot=BOOT)) as store:
        assert_whole(Ledger(store), before)
        assert not store.lost


def junk(path: str) -> None:
    Path(path).write_bytes(b"no database" * 1000)


def deleted(path: str) -> None:
    Path(path).unlink()


@pytest.mark.parametrize("damage", [junk, deleted])
def test_a_damaged_store_is_made_again_from_its_copy_of_schema_2(path: str, damage: Callable[[str], None]) -> None:
    before = raw(path, FILES)
    damage(path)
    with closing(Store(path, boot=BOOT)) as store:
        assert_whole(Ledger(store), before)
        assert not store.lost
    with closing(Store(path, boot=BOOT)) as store:
        assert_whole(Ledger(store), before)


def test_after_a_reboot_none_of_it_counts(path: str) -> None:
    with closing(Store(path, boot="another")) as store:
        assert len(Ledger(store)) == 0
        assert not PRIVATE & dict(store.rows(META)).keys()


def test_a_private_row_of_an_earlier_boot_is_dropped(path: str) -> None:
    key = "watermarks"
    with closing(sqlite3.connect(path)) as connection:
        body = msgpack.packb({"boot": "earlier", "values": {"vm.min_free_kbytes": {"original": 1, "ours": [2]}}})
        connection.execute("UPDATE meta SET row = ? WHERE key = ?", (seal(key, body), key))
        connection.commit()
    with closing(Store(path, boot=BOOT)) as store:
        assert read_rows(Ledger(store), node_files.CODECS[SYSCTL]) == FileRows()
        assert key not in dict(store.rows(META))


@pytest.mark.parametrize("key", sorted(PRIVATE))
def test_a_private_row_that_cannot_be_understood_stays_and_harms_no_other(path: str, key: str) -> None:
    Store(path, boot=BOOT).close()
    with closing(Store(path, boot=BOOT)) as store:
        batch = StoreBatch()
        batch.put(META, key, b"\xc1")
        store.apply(batch)
    for _ in range(2):
        with closing(Store(path, boot=BOOT)) as store:
            ledger = Ledger(store)
            assert {codec.kind: read_rows(ledger, codec) for codec in KNOWN} == {
                codec.kind: state for codec, state in KNOWN.items()
            }
            assert dict(store.rows(META))[key] == b"\xc1"
