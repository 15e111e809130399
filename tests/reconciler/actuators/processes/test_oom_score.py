"""oom_score_adj of this machine's own processes: set, kept and restored, also after the agent was killed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.processes.oom_score import ACTUATOR, CODEC, OomScores
from reconciler.control.planner import plan_node
from reconciler.policies.oom_score import OomScoreConfig
from reconciler.policies.table import PoliciesConfig
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.memory import MemoryPreferences
from state.model import Hold, PodClass
from state.store import Store
from tests.reconciler.actuators.acting import context
from tests.reconciler.actuators.processes.live import Killed, Live, Mortal, live_container
from tests.reconciler.nodes import node
from tests.until import until

# All raise their number only: this machine's root may not be allowed to lower one below where it began.
ON = OomScoreConfig(enabled=True)
FORK = "import subprocess, sys; print(flush=True); sys.stdin.readline(); subprocess.run(['sleep', '60'])"


class Scored(Live[OomScores]):
    """With one actuator for ``oom_score_adj``."""

    def __init__(self, hierarchy: Hierarchy, root: str, path: Path) -> None:
        super().__init__(hierarchy, root, path, OomScores)

    def process(self, score: int, command: Sequence[str] = ("sleep", "60")) -> int:
        pid = self.start(command).pid
        REAL.write(f"/proc/{pid}", "oom_score_adj", str(score))
        return self.enter(pid)

    async def sweep(self, config: OomScoreConfig = ON, **how: Any) -> None:  # as `Live.situation`
        await self.apply(self.situation(PoliciesConfig(oom_score=config), **how))


def score(pid: int) -> int:
    return int(REAL.read(f"/proc/{pid}", "oom_score_adj"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Scored]:
    with live_container("oom", tmp_path, Scored) as made:
        yield made


@pytest.mark.kernel
async def test_all_processes_get_the_number_and_each_its_own_back(live: Scored) -> None:
    first, odd = live.process(100), live.process(300)
    await live.sweep()
    assert (score(first), score(odd)) == (1000, 1000)
    assert live.actuator.status()["containers"] == {live.main: 1000}
    await live.sweep(OomScoreConfig())
    assert (score(first), score(odd)) == (100, 300)
    assert read_rows(Ledger(live.store), CODEC).containers == {}


@pytest.mark.kernel
async def test_a_child_born_under_our_number_gets_its_containers_back(live: Scored) -> None:
    parent = live.process(100, ["python3", "-c", FORK])
    popen = live.started[-1]
    assert popen.stdin is not None
    assert popen.stdout is not None
    popen.stdout.readline()
    await live.sweep()
    popen.stdin.write(b"\n")
    popen.stdin.flush()
    children = Path(f"/proc/{parent}/task/{parent}/children")
    await until(lambda: children.read_text().split())
    child = int(children.read_text().split()[0])
    assert score(child) == 1000
    (done,) = await live.actuator.restore()
    assert (done.undo, score(child), score(parent)) == (RestoreOutcome.RESTORED, 100, 100)
    os.kill(child, 9)


@pytest.mark.kernel
@pytest.mark.parametrize("daemon", [True, False], ids=["by the daemon", "without a daemon"])
async def test_processes_in_groups_that_a_container_has_made_count_as_its_own(live: Scored, daemon: bool) -> None:
    first, inner, moved = live.process(100), live.process(300), live.process(100)
    live.move(inner, "docker/inner")
    await live.sweep()
    assert [score(pid) for pid in (first, inner, moved)] == [1000, 1000, 1000]
    live.move(moved, "system.slice/one.service")
    done = await live.actuator.restore() if daemon else live.undone(ACTUATOR)
    assert [result.undo for result in done] == [RestoreOutcome.RESTORED]
    assert [score(pid) for pid in (first, inner, moved)] == [100, 300, 100]


@pytest.mark.kernel
async def test_a_crash_loses_nothing_and_a_changed_wish_keeps_the_original(live: Scored) -> None:
    pid, late = live.process(100), 0
    await live.sweep(wish=MemoryPreferences(oom_priority=-1))
    assert score(pid) == 901
    live.crash()
    late = live.process(200)
    await live.sweep(wish=MemoryPreferences(oom_priority=-50))
    assert (score(pid), score(late)) == (950, 950)
    live.crash()
    assert [result.undo for result in live.undone(ACTUATOR, "another")] == []
    assert [result.undo for result in live.undone(ACTUATOR, "be")] == [RestoreOutcome.RESTORED]
    assert (score(pid), score(late)) == (100, 200)
    assert live.undone(ACTUATOR) == []


@pytest.mark.kernel
@pytest.mark.parametrize("daemon", [True, False], ids=["by the next daemon", "without a daemon"])
async def test_killed_at_any_step_each_process_gets_its_own_back(live: Scored, daemon: bool) -> None:
    pids = {live.process(100): 100, live.process(300): 300, live.process(100): 100}
    steps = 0
    while True:
        left = [steps]
        files, store = Mortal(REAL, "write", left), Mortal(live.store, "apply", left)
        live.actuator = OomScores(
            context(Ledger(cast(Store, store)), hierarchy=live.hierarchy, files=cast(FileOps, files))
        )
        ended = True
        try:
            await live.sweep(wish=MemoryPreferences(oom_priority=-1))
            await live.sweep(wish=MemoryPreferences(oom_priority=-50))
        except Killed:
            ended = False
        live.crash()
        done = await live.actuator.restore() if daemon else live.undone(ACTUATOR)
        assert all(result.ok for result in done), (steps, done)
        assert {pid: score(pid) for pid in pids} == pids, f"killed after {steps} changes"
        assert read_rows(Ledger(live.store), CODEC).containers == {}
        if ended:
            break
        steps += 1
    assert steps == 2 + 2 * len(pids), "two rows, and each process twice"


@pytest.mark.kernel
async def test_a_number_that_is_not_ours_is_left_when_ours_is_taken_back(live: Scored) -> None:
    pid = live.process(100)
    await live.sweep(wish=MemoryPreferences(oom_priority=-1))
    REAL.write(f"/proc/{pid}", "oom_score_adj", "950")
    (done,) = await live.actuator.restore("be")
    assert (done.undo, score(pid)) == (RestoreOutcome.ALREADY, 950)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"config": OomScoreConfig(enabled=True, dry_run=True)}, id="practised"),
        pytest.param({"wish": MemoryPreferences(oom_priority=-300)}, id="a pod to be left alone"),
    ],
)
async def test_nothing_is_written(live: Scored, how: dict[str, Any]) -> None:
    pid = live.process(100)
    await live.sweep(**how)
    assert score(pid) == 100
    assert read_rows(Ledger(live.store), CODEC).containers == {}


@pytest.mark.kernel
async def test_a_policy_that_becomes_a_dry_run_gives_the_numbers_back(live: Scored) -> None:
    """In a container of the view, and in one that it lacks."""
    pid = live.process(100)
    dry = replace(ON, dry_run=True)
    await live.sweep()
    await live.sweep(dry)
    assert (score(pid), standing(live)[0]) == (100, "would write")
    assert read_rows(Ledger(live.store), CODEC).containers == {}
    await live.sweep()
    assert score(pid) == 1000
    plan = plan_node(node(), None, PoliciesConfig(oom_score=dry))
    live.actuator.planned(PlanSnapshot(view=node(), plan=plan, enforce=True))
    await live.actuator.sweep()
    assert score(pid) == 100


KNOB = "oom.score"


def standing(live: Scored) -> tuple[str, str, str | None]:
    status = live.actuator.statuses[live.main]["oom.score"]
    return status.state, status.wanted, status.actual


@pytest.mark.kernel
async def test_how_each_container_stands_is_told(live: Scored) -> None:
    live.process(100)
    await live.sweep(enforce=False)
    assert standing(live) == ("would write", "1000", None)
    await live.sweep(holds={"knob:oom.score": Hold(target="knob:oom.score", reason="r", by="b")})
    assert standing(live) == ("held", "1000", None)
    await live.sweep()
    assert standing(live) == ("written", "1000", "1000")
    await live.sweep()
    assert standing(live) == ("in place", "1000", "1000")
    await live.sweep(cls=PodClass.SHARED)
    assert live.actuator.statuses == {}


class Resetting(Mortal):
    """Files whose writes of a score are undone at once, as by the process itself."""

    def write(self, directory: str, file: str, text: str) -> None:
        if file != "oom_score_adj":
            REAL.write(directory, file, text)


@pytest.mark.kernel
async def test_a_number_that_is_not_there_when_it_is_read_back_is_not_in_force(live: Scored) -> None:
    live.process(100)
    files = cast(FileOps, Resetting(REAL, "", [0]))
    live.actuator = OomScores(context(Ledger(live.store), hierarchy=live.hierarchy, files=files))
    await live.sweep()
    assert standing(live) == ("waiting", "1000", None)
    assert "1 of 1 processes get another value as fast as it is set" in live.actuator.statuses[live.main][KNOB].detail


@pytest.mark.kernel
async def test_a_container_without_a_process_has_no_number_that_was_read(live: Scored) -> None:
    await live.sweep()
    assert standing(live) == ("in place", "1000", None)
    assert live.actuator.statuses[live.main][KNOB].detail == "it has no processes now"


@pytest.mark.kernel
async def test_a_process_that_had_the_wanted_number_of_its_own_keeps_it(live: Scored) -> None:
    first, own = live.process(100), live.process(1000)
    await live.sweep()
    assert (score(first), score(own)) == (1000, 1000)
    assert all(result.ok for result in await live.actuator.restore())
    assert (score(first), score(own)) == (100, 1000)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("enforce", "config", "holds"),
    [
        (False, ON, {}),
        (False, replace(ON, dry_run=True), {}),
        (True, replace(ON, dry_run=True), {"node": Hold(target="node", reason="mine", by="me")}),
        (True, ON, {"node": Hold(target="node", reason="mine", by="me")}),
    ],
    ids=["observe", "dry run in observe mode", "dry run under a hold", "hold"],
)
async def test_a_container_that_the_view_lacks_is_not_written_where_nothing_may_be(
    live: Scored, *, enforce: bool, config: OomScoreConfig, holds: dict[str, Hold]
) -> None:
    pid = live.process(100)
    await live.sweep()
    plan = plan_node(node(), None, PoliciesConfig(oom_score=config))
    empty = PlanSnapshot(view=node(), plan=plan, enforce=enforce, holds=holds)
    live.actuator.planned(empty)
    await live.actuator.sweep()
    assert score(pid) == 1000
    assert set(read_rows(Ledger(live.store), CODEC).containers) == {live.main}
    live.end_processes()
    await live.actuator.sweep()
    assert read_rows(Ledger(live.store), CODEC).containers == {}
