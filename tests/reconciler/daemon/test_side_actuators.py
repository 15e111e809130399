"""Side actuators: nothing is loaded that is not wanted, and nothing that an earlier run has left is forgotten."""

from pathlib import Path

import trio

from reconciler.actuators import node_mark
from reconciler.actuators.base import AuxiliaryActuator, LazyActuator, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.core_sched.actuator import CoreSched
from reconciler.actuators.files import capacity, interrupts, node_files
from reconciler.actuators.mode import WriteMode, WriteSettings
from reconciler.actuators.processes import idle_threads, oom_score
from reconciler.control import side_actuators
from reconciler.control.cache_loop import CacheLoop
from reconciler.control.network_loop import NetworkLoop
from reconciler.control.planner import plan_node
from reconciler.control.reclaim_loop import MemoryReclaimLoop
from reconciler.policies.table import PoliciesConfig
from state.cache import CacheUsage
from state.entry import RestoreOutcome, RestoreResult
from state.kinds import CAPACITY, COOKIE, FILE, INTERRUPT, NETWORK, NODE_OBJECT, PROCESS, RESCTRL, SYSCTL, THREAD
from tests.reconciler.nodes import node

PROJECT = Path(__file__).parents[3]


class Noting(AuxiliaryActuator):
    """A side actuator that records its requests."""

    name = "noting"

    def __init__(self) -> None:
        self.situations: list[PlanSnapshot] = []
        self.ran = trio.Event()

    def planned(self, situation: PlanSnapshot) -> None:
        self.situations.append(situation)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        self.ran.set()
        await trio.sleep_forever()

    async def restore(self, only: str | None = None) -> list[RestoreResult]:
        return [RestoreResult(path=only or "all", file=self.name, undo=RestoreOutcome.RESTORED)]

    def status(self) -> dict[str, object]:
        return {"seen": len(self.situations)}

    def measured(self) -> CacheUsage:
        return CacheUsage(at_s=float(len(self.situations)))

    @property
    def statuses(self) -> dict[str, dict[str, SettingStatus]]:
        return {"/group": {}}

    def problems(self) -> list[str]:
        return ["one"]


def cache_use(*sides: AuxiliaryActuator) -> CacheUsage | None:
    return side_actuators.SideActuators(sides, WriteMode(WriteSettings())).cache_use()


def situation(*, enforce: bool) -> PlanSnapshot:
    view = node()
    return PlanSnapshot(view=view, plan=plan_node(view, None, PoliciesConfig()), enforce=enforce)


async def test_it_is_made_when_it_is_wanted_for_the_first_time_and_stays(nursery: trio.Nursery) -> None:
    made: list[Noting] = []

    def make() -> AuxiliaryActuator:
        made.append(Noting())
        return made[-1]

    side = LazyActuator("noting", make, lambda now: now.enforce)
    await nursery.start(side.run)
    side.planned(situation(enforce=False))
    assert (made, side.status(), side.problems(), await side.restore()) == ([], {}, (), ())
    assert (side.statuses, side.measured(), cache_use(side)) == ({}, None, None)
    side.planned(situation(enforce=True))
    side.planned(situation(enforce=False))
    (real,) = made
    assert [snapshot.enforce for snapshot in real.situations] == [True, False]
    await real.ran.wait()
    assert (side.status(), side.problems()) == ({"seen": 2}, ["one"])
    # What is shown and counted of the real one must not end at what loads it.
    assert side.statuses == {"/group": {}}
    assert side.measured() == CacheUsage(at_s=2.0) == cache_use(LazyActuator("no", make, lambda _: False), side)
    assert [result.path for result in await side.restore("uid")] == ["uid"]


async def test_what_an_earlier_run_left_is_taken_care_of_at_once(nursery: trio.Nursery) -> None:
    real = Noting()
    side = LazyActuator("noting", lambda: real, lambda _now: False, leftover=True)
    await nursery.start(side.run)
    await real.ran.wait()
    side.planned(situation(enforce=False))
    assert len(real.situations) == 1


def test_the_kinds_by_which_leftovers_are_known_are_those_that_the_modules_write() -> None:
    names = {
        CoreSched.name: {COOKIE},
        oom_score.OomScores.name: {PROCESS},
        idle_threads.IdleThreads.name: {THREAD},
        NetworkLoop.name: {NETWORK},
        CacheLoop.name: {RESCTRL},
        MemoryReclaimLoop.name: set(),
        node_files.NodeFiles.name: {SYSCTL, FILE},
        interrupts.InterruptPlaces.name: {INTERRUPT},
        capacity.CapacityFiles.name: {CAPACITY},
        node_mark.NodeMarker.name: {NODE_OBJECT},
    }
    assert names == {name: set(kinds) for name, kinds in side_actuators.KINDS.items()}
    for row in side_actuators.TABLE:
        kind = row.load()
        assert {name: codec.kind for name, codec in kind.codecs.items()} == {name: name for name in row.kinds}
        assert (kind.undo is not None or kind.undo_online is not None) == bool(row.kinds)
    assert side_actuators.codec_of("unknown") is None
