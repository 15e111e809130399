"""How often the cache loop reads whether resctrl is available."""

from pathlib import Path

import pytest
import trio
import trio.testing

from tests.reconciler.actuators.resctrl_world import BATCH, World


@pytest.mark.parametrize(("mounted", "least", "most"), [(True, 4, 6), (False, 2, 2)])
async def test_where_there_is_no_resctrl_it_is_looked_for_each_ten_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, *, mounted: bool, least: int, most: int
) -> None:
    world = World(tmp_path)
    if not mounted:
        world.model.umount()
    async with trio.open_nursery() as nursery:
        await nursery.start(world.side.run)
        world.side.planned(world.situation(BATCH))
        await trio.sleep(11.0)
        nursery.cancel_scope.cancel()
    assert least <= int(str(world.side.status()["sweeps"])) <= most
