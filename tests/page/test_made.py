"""The made node is as a real daemon's document: a key that the page reads and no daemon writes is a fault."""

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from reconciler.cli.events import _TYPES
from tests.fakes.livenode import BATCH, PINNED, LiveNode
from tests.fakes.report import status_report
from tests.page.made import SECTIONS, VIEWS, MadeNode
from tests.reconciler.cli.test_watched import BLAME, HELD, SQUEEZED, SUFFERS, watched

WANTED = (*SECTIONS, *VIEWS)


async def real_state(path: Path) -> Mapping[str, object]:
    node = LiveNode(path)
    async with node.looked() as agent:
        return status_report(agent).state(WANTED)


async def test_every_key_of_the_made_node_is_one_of_a_daemon(tmp_path: Path) -> None:
    real = await real_state(tmp_path)
    made = dict((await MadeNode(30).parts(WANTED))[0])
    assert real.keys() >= made.keys()
    for name in ("podlist", "podparents", "cpumap", "nodehour", "agent", "budget", "files", "sources"):
        assert lacking(made[name], real[name]) == set(), name


def test_the_interference_of_the_made_node_is_as_the_daemons() -> None:
    real = watched(replace(SUFFERS, suspects=(BLAME,)), steps=(HELD, SQUEEZED))
    made = MadeNode(30)._interference()
    assert made.keys() <= real.keys()
    for name in ("findings", "ladder", "signals"):
        assert lacking(made[name], real[name]) == set(), name
    for values in (made, real):
        signals = values["signals"]
        assert isinstance(signals, Mapping)
        assert isinstance(signals["problems"], Mapping)


def test_the_kinds_of_the_made_history_are_the_ledgers() -> None:
    assert {str(row["kind"]) for row in MadeNode(30)._history()} <= _TYPES.keys()


def lacking(made: object, real: object) -> set[str]:
    """Keys of the made value, or of its first row, that the real one has not."""
    made, real = (value[0] if isinstance(value, list) else value for value in (made, real))
    assert isinstance(made, Mapping)
    assert isinstance(real, Mapping)
    return {str(key) for key in made.keys() - real.keys()}


async def test_the_map_has_each_cpu_with_its_pools_and_owner(tmp_path: Path) -> None:
    rows = (await real_state(tmp_path))["cpumap"]
    assert isinstance(rows, list)
    assert [row["cpu"] for row in rows] == list(range(8))
    assert (rows[7]["pools"], rows[7]["pods"]) == (["dedicated"], [PINNED])
    assert all(row["pools"] and BATCH not in row["pods"] for row in rows)
    # By `tests.fakes.livenode.USAGE`: three of eight CPUs are busy.
    assert [row["busy_percent"] for row in rows] == [100, 100, 100, 0, 0, 0, 0, 0]
