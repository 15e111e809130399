"""A tenant that may make groups inside its container gives one a name that is not valid UTF-8, as the kernel allows."""

from pathlib import Path

import pytest

from state.schema import ASSIGNMENTS, FILES
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BOX, LiveNode

NAME = "x\udcffy"
"""The bytes ``x``, 0xff, ``y``, as Python has them."""
INNER = f"{BOX}/{NAME}"


def sets(live: LiveNode) -> tuple[str, str]:
    return live.read(BOX, "cpuset", "cpuset.cpus"), live.read(INNER, "cpuset", "cpuset.cpus")


async def test_its_set_follows_the_containers_and_is_restored_also_by_a_later_run(tmp_path: Path) -> None:
    live = LiveNode(tmp_path, files=False)
    live.kernel.make_group(INNER)
    assert sets(live) == ("0-6", "0-6")
    async with live.looked() as agent:
        assert sets(live) == ("5-6", "5-6")
        await agent.keeper.flush()
        assert len([key for key, _ in agent.record.store.rows(FILES) if "x//ffy" in key]) == 1
    async with live.looked() as agent:
        assert [entry.original for entry in agent.record.ledger.group(INNER)] == ["0-6"]
        await agent.commands.restore()
        assert sets(live) == ("0-6", "0-6")
        await agent.keeper.flush()
        assert not [key for key, _ in agent.record.store.rows(FILES) if "x//ffy" in key]


@pytest.mark.parametrize("mode", ["v1", "v2"])
async def test_a_quota_that_it_forbids_is_a_problem_and_everything_is_stored(tmp_path: Path, mode: Mode) -> None:
    live = LiveNode(tmp_path, mode, files=False)
    live.kernel.make_group(INNER)
    live.write(INNER, "cpu", "cpu.max" if mode == "v2" else "cpu.cfs_quota_us", "800000")
    async with live.looked(live.by_quota()) as agent:
        for _ in range(3):
            await live.look(agent)
        await agent.keeper.flush()
        assert agent.keeper.problem is None
        assert "pools" in dict(agent.record.store.rows(ASSIGNMENTS))
