"""The rows of the store follow what the daemon knows, also where another program has damaged the file."""

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from reconciler.daemon.agent import Agent
from reconciler.headroom.cpu import ClusterTarget
from state.model import Hold
from state.schema import ASSIGNMENTS, HOLDS, META, PUBLISHED, RUNNING, SETTINGS
from state.store import StoreBatch
from tests.fakes.livenode import BATCH, WEB, LiveNode, begin


def stored(agent: Agent) -> Mapping[str, Mapping[str, bytes]]:
    return {table: dict(agent.record.store.rows(table)) for table in (SETTINGS, ASSIGNMENTS, HOLDS)}


def wrong(agent: Agent) -> tuple[bool, bool]:
    """Whether damage was found, and whether there is a problem now."""
    return agent.keeper.damage is not None, agent.keeper.problem is not None


@pytest.mark.parametrize("damage", ["overwritten", "removed"])
async def test_a_store_that_another_program_has_damaged_gets_every_row_again(live: LiveNode, damage: str) -> None:
    async with live.looked() as agent:
        await agent.record.holds.put(Hold(target=f"pod:{BATCH}", reason="mine", by="ana"))
        await agent.headroom.row.note(ClusterTarget.KOORDINATOR)
        begin(agent)
        await agent.keeper.flush()
        await agent.keeper.check()
        before = stored(agent)
        assert all(before.values())
        assert wrong(agent) == (False, False)
        for path in Path(live.store).parent.iterdir():
            # With its copy, so that nothing of it can be saved.
            if damage == "overwritten":
                path.write_bytes(os.urandom(4096))
            else:
                path.unlink()
        await agent.keeper.check()
        assert wrong(agent) == (True, True)
        await agent.keeper.flush()
        assert stored(agent) == before
        assert {RUNNING, PUBLISHED} <= dict(agent.record.store.rows(META)).keys()
        assert wrong(agent) == (True, False), "the damage is shown until the daemon ends"
        assert agent.alerts.raised["store"] == 2, "the damage, and its end"


async def test_a_problem_ends_with_the_next_flush_also_where_nothing_has_changed(live: LiveNode) -> None:
    async with live.looked() as agent:
        await agent.keeper.flush()
        with closing(sqlite3.connect(live.store)) as other:
            other.execute("UPDATE meta SET row = row")
            other.commit()
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        await agent.keeper.check()
        assert wrong(agent) == (True, True)
        await agent.keeper.flush()
        assert wrong(agent) == (True, False)
        assert agent.alerts.raised["store"] == 2


async def test_a_store_that_failed_under_another_part_is_reported_where_nothing_has_changed(live: LiveNode) -> None:
    async with live.looked() as agent:
        begin(agent)
        await agent.keeper.flush()
        assert not agent.record.ledger.unflushed
        directory = Path(live.store).parent
        directory.rename(directory.with_name("aside"))
        directory.touch()
        batch = StoreBatch()
        batch.put(META, "of another part", b"\xc0")
        with pytest.raises(StoreError):
            agent.record.store.apply(batch)
        assert wrong(agent) == (False, False)
        await agent.keeper.flush()
        assert wrong(agent) == (False, True)
        directory.unlink()
        directory.with_name("aside").rename(directory)


async def test_the_pool_of_a_pod_that_is_otherwise_the_same_is_stored(live: LiveNode) -> None:
    """What the command line shows of it while the daemon is down."""
    async with live.looked() as agent:
        await agent.keeper.flush()
        worker = agent.control.reconciler
        assert worker.plan is not None
        pod = agent.control.inventory.pods[WEB]

        def pool() -> object:
            return msgspec.msgpack.decode(stored(agent)[ASSIGNMENTS][f"pod:{WEB}"])["pool"]

        assert pool() == "shared"
        worker.plan = replace(worker.plan, pools=replace(worker.plan.pools, bound={WEB: "shared/search"}))
        worker.changes += 1
        await agent.keeper.flush()
        assert agent.control.inventory.pods[WEB] is pod
        assert pool() == "shared/search"
