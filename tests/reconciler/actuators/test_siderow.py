from pathlib import Path

import pytest
import trio

from cgroupfs.errors import StoreError
from reconciler.actuators.base import BootState, PersistedValue, StateRow
from state.schema import META
from state.store import Store, StoreBatch


class Kept(BootState, frozen=True, kw_only=True):
    names: tuple[str, ...] = ()


ROW = StateRow("test_names", Kept, "names")


def store(path: Path, boot: str = "boot-1") -> Store:
    return Store(str(path / "state.db"), boot=boot)


def keys(kept: Store) -> set[str]:
    return {key for key, _ in kept.rows(META)}


def test_a_row_is_there_while_there_is_something_in_it(tmp_path: Path) -> None:
    with_row = store(tmp_path)
    assert ROW.read(with_row) == Kept(boot="boot-1")
    ROW.write(with_row, Kept(boot="boot-1", names=("a",)))
    with_row.close()
    again = store(tmp_path)
    assert ROW.read(again) == Kept(boot="boot-1", names=("a",))
    assert ROW.key in keys(again)
    ROW.write(again, Kept(boot="boot-1"))
    assert ROW.key not in keys(again)
    again.close()


def test_a_row_of_another_boot_or_of_something_else_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = store(tmp_path)
    ROW.write(kept, Kept(boot="boot-0", names=("a",)))
    assert ROW.read(kept) == Kept(boot="boot-1")
    assert caplog.text == ""
    batch = StoreBatch()
    batch.put(META, ROW.key, b"\xc1")
    kept.apply(batch)
    assert ROW.read(kept) == Kept(boot="boot-1")
    assert "cannot read the stored state of names" in caplog.text
    kept.close()


async def test_what_cannot_be_made_durable_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    remembered = PersistedValue(ROW, kept, trio.CapacityLimiter(1))
    first, second = Kept(boot="boot-1", names=("a",)), Kept(boot="boot-1", names=("a", "b"))
    await remembered.save(first)

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "apply", full)
        await remembered.save(first)
        with pytest.raises(StoreError):
            await remembered.save(second)
    assert (remembered.now, ROW.read(kept)) == (first, first)
    await remembered.save(second)
    assert (remembered.now, ROW.read(kept)) == (second, second)
    kept.close()
