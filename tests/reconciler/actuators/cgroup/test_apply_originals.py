"""The original is the value that bypassd's first write replaces, also where that is long after it was recorded."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from cgroupfs.errors import StoreError
from reconciler.actuators.cgroup.restore import restore_all
from state.entry import LedgerEntry, RestoreOutcome
from tests.reconciler.actuators.acting import BE, GROUP, Acting

LIMIT = 1 << 30
USED = 2 * LIMIT


async def limited(acting: Acting) -> str | None:
    """One pass that limits the container's memory, whatever was refused before."""
    acting.retry_now()
    await acting.actuator.apply([acting.target(GROUP, {"memory.max": LIMIT})])
    return acting.stood(GROUP, "memory.max")


def original(acting: Acting, path: str, knob: tuple[str, str]) -> str | None:
    entry = acting.ledger.get((knob[0], path, knob[1]))
    return None if entry is None else entry.original


async def test_a_value_that_its_owner_writes_while_the_kernel_refuses_ours_is_the_original(acting: Acting) -> None:
    directory = acting.hierarchy.directory("memory", GROUP)
    acting.kernel.charge(directory, anon=USED)
    assert await limited(acting) == "refused"
    acting.write(GROUP, "memory.max", str(4 * LIMIT))
    assert await limited(acting) == "refused"
    assert original(acting, GROUP, ("memory", "memory.limit_in_bytes")) == str(4 * LIMIT)
    acting.kernel.charge(directory, anon=-USED)
    acting.write(GROUP, "memory.max", str(3 * LIMIT))
    assert await limited(acting) == "written"
    await acting.actuator.apply([acting.target(GROUP, {})])
    assert acting.read(GROUP, "memory.max") == str(3 * LIMIT)
    assert len(acting.ledger) == 0


async def test_a_value_that_appears_while_the_original_becomes_durable_is_not_overwritten_unseen(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = acting.ledger.first_touches

    def slow(entries: Iterable[LedgerEntry]) -> int:
        count = record(entries)
        acting.write(BE, "cpu.quota", "250000")
        return count

    monkeypatch.setattr(acting.ledger, "first_touches", slow)
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 150_000})])
    assert acting.read(BE, "cpu.quota") == "250000"
    assert acting.stood(BE, "cpu.quota") == "due"
    monkeypatch.undo()
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 150_000})])
    assert acting.read(BE, "cpu.quota") == "150000"
    await acting.actuator.apply([acting.target(BE, {})])
    assert acting.read(BE, "cpu.quota") == "250000"


async def test_a_newer_original_is_durable_before_the_write_or_nothing_is_written(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = acting.hierarchy.directory("memory", GROUP)
    acting.kernel.charge(directory, anon=USED)
    assert await limited(acting) == "refused"
    acting.write(GROUP, "memory.max", str(4 * LIMIT))
    acting.kernel.charge(directory, anon=-USED)

    def full() -> int:
        raise StoreError("state.db", "no space left on device")

    monkeypatch.setattr(acting.ledger, "flush", full)
    assert await limited(acting) == "not recorded"
    assert acting.read(GROUP, "memory.max") == str(4 * LIMIT)
    monkeypatch.undo()
    assert await limited(acting) == "written"


async def test_a_value_of_ours_is_no_original_though_its_record_was_lost_with_the_process(
    acting: Acting, tmp_path: Path
) -> None:
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 150_000})])
    entry = acting.ledger.get(("cpu", BE, "cpu.cfs_quota_us"))
    assert entry is not None
    # As after SIGKILL between the write and the next flush: recorded, noted as about to be written, not as written.
    entry.writer, entry.seen = "", None
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 120_000})])
    assert acting.read(BE, "cpu.quota") == "120000"
    await acting.actuator.apply([acting.target(BE, {})])
    assert acting.read(BE, "cpu.quota") == "-1"


async def test_a_row_of_another_builds_knob_is_kept_and_reported_and_keeps_nothing_else_from_being_written(
    acting: Acting,
) -> None:
    """A build before or after this one managed another file of the container."""
    target = acting.target(GROUP, {"cpu.weight": 4}, signalled=True)
    later = LedgerEntry(
        controller="cpu", path=GROUP, file="cpu.later", knob="cpu.later", inode=target.group.inode, original="1"
    )
    acting.ledger.first_touches([later])
    acting.actuator.rebase(target)
    await acting.actuator.apply([target])
    assert (acting.stood(GROUP, "cpu.weight"), acting.read(GROUP, "cpu.weight")) == ("written", "4")
    done = await restore_all(acting.hierarchy, acting.ledger, acting.writer, files=acting.files)
    assert [(result.file, result.undo, result.detail) for result in done] == [
        ("cpu.later", RestoreOutcome.UNKNOWN, "this version has no knob cpu.later"),
        ("cpu.shares", RestoreOutcome.RESTORED, ""),
    ]
    assert [entry.knob for entry in acting.ledger] == ["cpu.later"]
