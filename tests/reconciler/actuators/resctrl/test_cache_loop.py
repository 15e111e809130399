"""How often the part that divides the cache looks for resctrl."""

from pathlib import Path

import pytest
import trio
import trio.testing

from tests.reconciler.actuators.resctrl_world import BATCH, World


@pytest.mark.parametrize(("mounted", "least", "most"), [(True, 4, 6), (False, 2, 2)])
def test_where_there_is_no_resctrl_it_is_looked_for_each_ten_seconds(
    tmp_path: Path, *, mounted: bool, least: int, most: int
) -> None:
    world = World(tmp_path)
    if not mounted:
        world.model.umount()

    async def some_seconds() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.side.run)
            world.side.planned(world.situation(BATCH))
            await trio.sleep(11.0)
            nursery.cancel_scope.cancel()

    # A sweep is in a thread, during which time is to stand: the clock advances once nothing has happened for so long.
    trio.run(some_seconds, clock=trio.testing.MockClock(autojump_threshold=0.05))
    assert least <= int(str(world.side.status()["sweeps"])) <= most
