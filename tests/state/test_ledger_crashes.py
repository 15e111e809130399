"""A crash at any moment leaves a ledger that gives back the tree."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from state.ledger import FileKey, Ledger
from state.store import Store
from tests.state.ledgers import again, entry, opened

# Against a model: a node's files, our writes, others' writes, and a crash at any point between two calls.

NAMES = ("a", "b", "c")
FILES = ("cpuset.cpus", "cpu.shares")
TEXTS = st.sampled_from([str(number) for number in range(9)])


class CrashingLedger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.live: dict[FileKey, str] = {}
        self.inodes: dict[str, int] = {}
        self.truth: dict[FileKey, str] = {}
        self.touched: dict[FileKey, str] = {}
        self.next_inode = 0
        for name in NAMES:
            self._make(name, "0")
        self.ledger = opened(self.directory)

    def _make(self, name: str, text: str) -> None:
        self.next_inode += 1
        self.inodes[f"/{name}"] = self.next_inode
        for file in FILES:
            key = ("cpu", f"/{name}", file)
            self.live[key] = text
            self.truth.pop(key, None)
            self.touched.pop(key, None)

    @rule(name=st.sampled_from(NAMES), files=st.sets(st.sampled_from(FILES), min_size=1))
    def touch(self: Self, name: str, files: set[str]) -> None:
        made = []
        for file in files:
            key = ("cpu", f"/{name}", file)
            made.append(entry(key, original=self.live[key], inode=self.inodes[key[1]]))
            self.touched.setdefault(key, self.live[key])
        self.ledger.first_touches(made)

    @rule(name=st.sampled_from(NAMES), file=st.sampled_from(FILES), text=TEXTS, noted=st.booleans())
    def write(self, name: str, file: str, text: str, noted: bool) -> None:
        key = ("cpu", f"/{name}", file)
        if not self.ledger.is_durable(key, self.inodes[key[1]]):
            return
        before = self.live[key]
        self.truth.setdefault(key, self.touched[key])
        self.live[key] = text
        if noted:
            self.ledger.wrote(key, before=before, after=text)

    @rule(name=st.sampled_from(NAMES), file=st.sampled_from(FILES), text=TEXTS)
    def foreign(self, name: str, file: str, text: str) -> None:
        key = ("cpu", f"/{name}", file)
        if key in self.truth:
            self.live[key] = text
            self.ledger.saw(key, text, writer="kubelet")

    @rule(name=st.sampled_from(NAMES), text=TEXTS)
    def make_anew(self, name: str, text: str) -> None:
        self._make(name, text)

    @rule()
    def prune(self) -> None:
        self.ledger.prune(lambda each: self.inodes.get(each.path))

    @rule()
    def flush(self) -> None:
        self.ledger.flush()

    @rule(name=st.sampled_from(NAMES), file=st.sampled_from(FILES))
    def restore_one(self, name: str, file: str) -> None:
        key = ("cpu", f"/{name}", file)
        ledger_entry = self.ledger.get(key)
        if ledger_entry is None or not self.ledger.is_durable(key, self.inodes[key[1]]):
            return
        assert ledger_entry.restore_text is not None
        self.live[key] = ledger_entry.restore_text
        self.truth.pop(key, None)
        self.touched.pop(key, None)
        self.ledger.restored(key, ledger_entry.restore_text)
        self.ledger.flush()

    @rule()
    def crash(self) -> None:
        self.ledger = again(self.ledger)

    @precondition(lambda self: self.truth)
    @rule()
    def damage_and_crash(self) -> None:
        self.ledger.flush()
        self.ledger._store.close()
        with open(self.ledger._store.path, "r+b") as file:
            file.seek(-20, os.SEEK_END)
            file.write(b"\xff\xff\xff\xff")
        memory = {each.key: each.original for each in self.ledger}
        self.ledger = Ledger(Store(self.ledger._store.path, boot="b"))
        salvaged = {each.key: each.original for each in self.ledger}
        assert salvaged.items() <= memory.items()
        for key in memory.keys() - salvaged.keys():
            # What was really lost can only be adopted, without an original: nothing is promised for it.
            self.truth.pop(key, None)
            self.touched.pop(key, None)

    @invariant()
    def the_original_tree_can_be_given_back(self) -> None:
        after_a_kill = {each.key: each for each in again(self.ledger)}
        for key, text in self.truth.items():
            assert after_a_kill[key].original == text
            assert after_a_kill[key].inode == self.inodes[key[1]]

    def teardown(self) -> None:
        # Connections of "killed" ledgers are collected some time, and take their WAL files along.
        shutil.rmtree(self.directory, ignore_errors=True)


CrashingLedger.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


TestCrashingLedger = CrashingLedger.TestCase


WORKER = """
import sys
from state.ledger import LedgerEntry, Ledger
from state.schema import FILES as TABLE
from state.store import StoreBatch, Store
tree, path = sys.argv[1:]
ledger = Ledger(Store(path, boot="b"))
print("ready", flush=True)
turn = 0
while True:
    turn += 1
    for number in range(20):
        key = ("cpu", "/g", str(number))
        if not ledger.is_durable(key, 1):
            with open(f"{tree}/{number}") as file:
                text = file.read()
            made = LedgerEntry(controller="cpu", path="/g", file=str(number), knob="k", inode=1, original=text)
            ledger.first_touches([made])
        with open(f"{tree}/{number}", "w") as file:
            file.write(f"ours {turn}")
        ledger.wrote(key, before=None, after=f"ours {turn}")
    ledger.flush()
"""


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 6, 10, 20, 50])
def test_sigkill_at_any_moment_leaves_a_ledger_that_gives_back_the_tree(tmp_path: Path, delay_ms: int) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    originals = {str(number): f"original {number}" for number in range(20)}
    for name, text in originals.items():
        (tree / name).write_text(text)
    path = str(tmp_path / "lib" / "state.db")
    for _ in range(2):  # killed twice: the second run starts over our own values
        worker = subprocess.Popen([sys.executable, "-c", WORKER, tree, path], stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()
        time.sleep(delay_ms / 1000)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    for each in Ledger(Store(path, boot="b")).backwards():
        (tree / each.file).write_text(each.restore_text or "")
    assert {name: (tree / name).read_text() for name in originals} == originals
