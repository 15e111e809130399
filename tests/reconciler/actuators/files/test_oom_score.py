"""BE processes' oom_score_adj on this machine's own processes: given, kept, taken back, over deaths of the agent."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.files.oom_score import CODEC, OomScores, restore_scores
from reconciler.control.planner import plan_node
from reconciler.policies.oom_score import OomScoreConfig
from reconciler.policies.table import PoliciesConfig
from state.ledger import Ledger
from state.memory import MemoryPreferences
from state.model import GroupRef, Hold, PodClass
from state.store import Store, StoreBatch
from state.undo import RestoreOutcome
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.reconciler.nodes import container, node, pod

# All raise their number only: this machine's root may not be allowed to lower one below where it began.
ON = OomScoreConfig(enabled=True)
FORK = "import subprocess, sys; print(flush=True); sys.stdin.readline(); subprocess.run(['sleep', '60'])"


class Live:
    """A container's group with processes of the test's own, and an actuator that can die and come again."""

    def __init__(self, hierarchy: Hierarchy, root: str, path: Path) -> None:
        self.hierarchy = hierarchy
        self.pod = f"{root}/podbe"
        self.main = f"{self.pod}/id-main"
        self.path = str(path / "state.db")
        self.store = Store(self.path, boot="one")
        self.started: list[subprocess.Popen[bytes]] = []
        above = hierarchy.trigger_directory(os.path.dirname(root))
        for group in (root, self.pod, self.main):
            directory = hierarchy.trigger_directory(group)
            if group != root:
                os.mkdir(directory)
            if hierarchy.trigger == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    REAL.write(directory, file, REAL.read(above, file).strip())
        self.actuator = self.make()

    def make(self) -> OomScores:
        return OomScores(self.hierarchy, Ledger(self.store), trio.CapacityLimiter(1))

    def crash(self) -> None:
        """The agent dies and comes again: only the store is left."""
        self.store.close()
        self.store = Store(self.path, boot="one")
        self.actuator = self.make()

    def process(self, score: int, command: list[str] | None = None) -> int:
        popen = subprocess.Popen(command or ["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(popen)
        REAL.write(f"/proc/{popen.pid}", "oom_score_adj", str(score))
        REAL.write(self.hierarchy.trigger_directory(self.main), "cgroup.procs", str(popen.pid))
        return popen.pid

    def move(self, pid: int, inside: str) -> None:
        """Into a group below the container's, made level by level as its own manager would."""
        above = self.hierarchy.trigger_directory(self.main)
        for name in inside.split("/"):
            below = f"{above}/{name}"
            if not os.path.isdir(below):
                os.mkdir(below)
                if self.hierarchy.trigger == "cpuset":
                    for file in ("cpuset.cpus", "cpuset.mems"):
                        REAL.write(below, file, REAL.read(above, file).strip())
            above = below
        REAL.write(above, "cgroup.procs", str(pid))

    async def sweep(
        self,
        config: OomScoreConfig = ON,
        *,
        enforce: bool = True,
        cls: PodClass = PodClass.RECLAIMED,
        wish: MemoryPreferences | None = None,
        holds: dict[str, Hold] | None = None,
    ) -> None:
        item = pod("be", container("main"), cls=cls)
        inode = REAL.inode(self.hierarchy.trigger_directory(self.main))
        main = replace(item.containers[0], group=GroupRef(path=self.main, inode=inode))
        item = replace(item, group=GroupRef(path=self.pod), containers=(main,), memory=wish or MemoryPreferences())
        view = node(item, versions=self.hierarchy.versions())
        plan = plan_node(view, None, PoliciesConfig(oom_score=config))
        self.actuator.planned(PlanSnapshot(view=view, plan=plan, enforce=enforce, holds=holds or {}))
        await self.actuator.sweep()

    def end_processes(self) -> None:
        for popen in self.started:
            popen.kill()
            popen.communicate()

    def end(self) -> None:
        self.end_processes()
        self.store.close()


def score(pid: int) -> int:
    return int(REAL.read(f"/proc/{pid}", "oom_score_adj"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with kernel_groups("oom", "cpuset") as (hierarchy, root):
        made = Live(hierarchy, root, tmp_path)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.kernel
async def test_all_processes_get_the_number_and_each_its_own_back(live: Live) -> None:
    first, odd = live.process(100), live.process(300)
    await live.sweep()
    assert (score(first), score(odd)) == (1000, 1000)
    assert live.actuator.status()["containers"] == {live.main: 1000}
    await live.sweep(OomScoreConfig())
    assert (score(first), score(odd)) == (100, 300)
    assert read_rows(Ledger(live.store), CODEC).containers == {}


@pytest.mark.kernel
async def test_a_child_born_under_our_number_gets_its_containers_back(live: Live) -> None:
    parent = live.process(100, ["python3", "-c", FORK])
    popen = live.started[-1]
    assert popen.stdin is not None
    assert popen.stdout is not None
    popen.stdout.readline()
    await live.sweep()
    popen.stdin.write(b"\n")
    popen.stdin.flush()
    children = Path(f"/proc/{parent}/task/{parent}/children")
    with trio.fail_after(20):
        while not children.read_text().split():  # noqa: ASYNC110  # a process wakes nobody
            await trio.sleep(0.02)
    child = int(children.read_text().split()[0])
    assert score(child) == 1000
    (done,) = await live.actuator.restore()
    assert (done.undo, score(child), score(parent)) == (RestoreOutcome.RESTORED, 100, 100)
    os.kill(child, 9)


@pytest.mark.kernel
@pytest.mark.parametrize("daemon", [True, False], ids=["by the daemon", "without a daemon"])
async def test_processes_in_groups_that_a_container_has_made_count_as_its_own(live: Live, daemon: bool) -> None:
    first, inner, moved = live.process(100), live.process(300), live.process(100)
    live.move(inner, "docker/inner")
    await live.sweep()
    assert [score(pid) for pid in (first, inner, moved)] == [1000, 1000, 1000]
    live.move(moved, "system.slice/one.service")
    done = await live.actuator.restore() if daemon else restore_scores(live.hierarchy, Ledger(live.store))
    assert [result.undo for result in done] == [RestoreOutcome.RESTORED]
    assert [score(pid) for pid in (first, inner, moved)] == [100, 300, 100]


@pytest.mark.kernel
async def test_a_crash_loses_nothing_and_a_changed_wish_keeps_the_original(live: Live) -> None:
    pid, late = live.process(100), 0
    await live.sweep(wish=MemoryPreferences(oom_priority=-1))
    assert score(pid) == 901
    live.crash()
    late = live.process(200)
    await live.sweep(wish=MemoryPreferences(oom_priority=-50))
    assert (score(pid), score(late)) == (950, 950)
    live.crash()
    assert [result.undo for result in restore_scores(live.hierarchy, Ledger(live.store), "another")] == []
    assert [result.undo for result in restore_scores(live.hierarchy, Ledger(live.store), "be")] == [
        RestoreOutcome.RESTORED
    ]
    assert (score(pid), score(late)) == (100, 200)
    assert restore_scores(live.hierarchy, Ledger(live.store)) == []


class Killed(BaseException):
    """The agent ends here, as by SIGKILL."""


class Mortal:
    """What is asked of another goes on to it, until the agent is killed before one more change."""

    def __init__(self, real: object, method: str, left: list[int]) -> None:
        self._real = real
        self._method = method
        self._left = left

    def __getattr__(self, name: str) -> Any:  # whatever the other has
        return self._change if name == self._method else getattr(self._real, name)

    def _change(self, *given: object) -> object:
        if not self._left[0]:
            raise Killed
        self._left[0] -= 1
        return getattr(self._real, self._method)(*given)


@pytest.mark.kernel
@pytest.mark.parametrize("daemon", [True, False], ids=["by the next daemon", "without a daemon"])
async def test_killed_at_any_step_each_process_gets_its_own_back(live: Live, daemon: bool) -> None:
    pids = {live.process(100): 100, live.process(300): 300, live.process(100): 100}
    steps = 0
    while True:
        left = [steps]
        files, store = Mortal(REAL, "write", left), Mortal(live.store, "apply", left)
        live.actuator = OomScores(
            live.hierarchy, Ledger(cast(Store, store)), trio.CapacityLimiter(1), files=cast(FileOps, files)
        )
        ended = True
        try:
            await live.sweep(wish=MemoryPreferences(oom_priority=-1))
            await live.sweep(wish=MemoryPreferences(oom_priority=-50))
        except Killed:
            ended = False
        live.crash()
        done = await live.actuator.restore() if daemon else restore_scores(live.hierarchy, Ledger(live.store))
        assert all(result.ok for result in done), (steps, done)
        assert {pid: score(pid) for pid in pids} == pids, f"killed after {steps} changes"
        assert read_rows(Ledger(live.store), CODEC).containers == {}
        if ended:
            break
        steps += 1
    assert steps == 2 + 2 * len(pids), "two rows, and each process twice"


@pytest.mark.kernel
async def test_a_number_that_is_not_ours_is_left_when_ours_is_taken_back(live: Live) -> None:
    pid = live.process(100)
    await live.sweep(wish=MemoryPreferences(oom_priority=-1))
    REAL.write(f"/proc/{pid}", "oom_score_adj", "950")
    (done,) = await live.actuator.restore("be")
    assert (done.undo, score(pid)) == (RestoreOutcome.ALREADY, 950)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"enforce": False}, id="observe mode"),
        pytest.param({"config": OomScoreConfig(enabled=True, dry_run=True)}, id="practised"),
        pytest.param({"cls": PodClass.SHARED}, id="an online pod"),
        pytest.param({"wish": MemoryPreferences(oom_priority=-300)}, id="a pod to be left alone"),
        pytest.param({"holds": {"node": Hold(target="node", reason="r", by="b")}}, id="a held node"),
    ],
)
async def test_nothing_is_written(live: Live, how: dict[str, object]) -> None:
    pid = live.process(100)
    await live.sweep(**how)  # type: ignore[arg-type]
    assert score(pid) == 100
    assert read_rows(Ledger(live.store), CODEC).containers == {}


@pytest.mark.kernel
async def test_what_cannot_be_remembered_is_not_written(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = live.process(100)
    apply = Store.apply

    def full(store: Store, batch: StoreBatch) -> None:
        raise StoreError("no space")

    monkeypatch.setattr(Store, "apply", full)
    await live.sweep()
    assert score(pid) == 100
    assert live.actuator.problems() == ["no space"]
    monkeypatch.setattr(Store, "apply", apply)
    await live.sweep()
    assert (score(pid), live.actuator.problems()) == (1000, [])


@pytest.mark.kernel
async def test_a_container_that_is_gone_is_forgotten(live: Live) -> None:
    pid = live.process(100)
    await live.sweep()
    for popen in live.started:
        popen.kill()
        popen.communicate()
    live.started.clear()
    assert not os.path.exists(f"/proc/{pid}")
    await live.sweep(OomScoreConfig())
    assert read_rows(Ledger(live.store), CODEC).containers == {}


def standing(live: Live) -> tuple[str, str, str | None]:
    status = live.actuator.standings[live.main]["oom.score"]
    return status.state, status.wanted, status.actual


@pytest.mark.kernel
async def test_how_each_container_stands_is_told(live: Live) -> None:
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
    assert live.actuator.standings == {}


@pytest.mark.kernel
async def test_a_process_that_had_the_wanted_number_of_its_own_keeps_it(live: Live) -> None:
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
        (True, replace(ON, dry_run=True), {}),
        (True, ON, {"node": Hold(target="node", reason="mine", by="me")}),
    ],
    ids=["observe", "dry run", "hold"],
)
async def test_a_container_that_the_view_lacks_is_not_written_where_nothing_may_be(
    live: Live, *, enforce: bool, config: OomScoreConfig, holds: dict[str, Hold]
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
