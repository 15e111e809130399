"""Ledgers and entries for tests."""

import os
import shutil
import tempfile
from pathlib import Path

from state.ledger import FileKey, Ledger, LedgerEntry, OriginalSource
from state.store import Store

CPUS: FileKey = ("cpuset", "/kubepods/podA/c1", "cpuset.cpus")
QUOTA: FileKey = ("cpu", "/kubepods/podA/c1", "cpu.cfs_quota_us")


def entry(
    key: FileKey = CPUS, *, original: str | None = "0-7", inode: int = 1, origin: OriginalSource = OriginalSource.READ
) -> LedgerEntry:
    controller, path, file = key
    return LedgerEntry(
        controller=controller, path=path, file=file, knob="cpu.set", inode=inode, original=original, origin=origin
    )


def opened(path: Path, *, boot: str = "b") -> Ledger:
    return Ledger(Store(str(path / "state.db"), boot=boot))


def again(ledger: Ledger) -> Ledger:
    """The ledger as it would be after SIGKILL now: from a copy of the files, without the memory."""
    directory = Path(tempfile.mkdtemp(dir=os.path.dirname(ledger._store.path)))
    for suffix in ("", "-wal"):
        shutil.copy(ledger._store.path + suffix, directory / f"state.db{suffix}")
    return opened(directory)


def known(ledger: Ledger, key: FileKey = CPUS) -> LedgerEntry:
    ledger_entry = ledger.get(key)
    assert ledger_entry is not None
    return ledger_entry
