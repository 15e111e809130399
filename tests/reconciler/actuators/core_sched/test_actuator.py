"""Cookies for the threads of containers, on a machine that has core scheduling as strict as the kernel's.

Longer than other modules because every case needs the same machine of cores, threads and pods.
"""

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.core_sched import actuator as module
from reconciler.actuators.core_sched.actuator import CoreSched
from reconciler.actuators.core_sched.prctl import CookieCarrier
from reconciler.actuators.core_sched.tasks import CODEC, restore_cookies
from reconciler.control.planner import plan_node
from reconciler.policies.core_sched import CoreSchedConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import CORE_COOKIE, CookieGroups
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.model import ContainerKind, Hold, Pod, PodClass
from state.store import Store
from state.topology import uniform
from tests.fakes.constants import varied
from tests.fakes.cores import FakeCores
from tests.reconciler.actuators.acting import context
from tests.reconciler.nodes import container, node, online, pod

SMT = uniform(cores=4, threads=2)
BATCH, CRUNCH, WEB, SHOP = pod("batch"), pod("crunch"), online("web"), online("shop")


def place(item: Pod, index: int = 0) -> str:
    return item.containers[index].group.path


class World:
    """A machine, a store, and the agent's part on it, which can be started again."""

    def __init__(self, path: Path, version: int = 1) -> None:
        self.cores = FakeCores(path / "machine", version)
        self.path = str(path / "state.db")
        self.boot = "boot-1"
        self.config = CoreSchedConfig(enabled=True)
        self.writes: Counter[tuple[str, str]] = Counter()
        self.store = self._open()
        self.side = self._start()

    def _open(self) -> Store:
        return Store(self.path, boot=self.boot)

    def _start(self) -> CoreSched:
        self.ledger = Ledger(self.store)
        return CoreSched(
            context(self.ledger, hierarchy=self.cores.hierarchy(), writes=self.writes), self.cores, self.cores.proc
        )

    def again(self) -> None:
        """The agent is killed, and starts again."""
        self.store.close()
        self.store = self._open()
        self.side = self._start()

    def run(self, *pods: Pod, threads: int = 2) -> None:
        """Start the pods' containers, each with one process of so many threads."""
        for item in pods:
            for box in item.containers:
                self.cores.group(box.group.path)
                leader = self.cores.spawn(box.group.path)
                for _ in range(threads - 1):
                    self.cores.thread(leader)

    async def look(self, *pods: Pod, **more: Any) -> None:
        """One look of the agent, and the sweep after it."""
        view = node(*pods, topology=SMT)
        plan = plan_node(view, None, PoliciesConfig(core_sched=self.config))
        self.side.planned(PlanSnapshot(view=view, plan=plan, **({"enforce": True} | more)))
        await self.side.sweep()

    def one(self, *pods: Pod) -> int:
        """The one cookie that all threads of these pods have."""
        numbers = set().union(*(self.cores.cookies(box.group.path) for item in pods for box in item.containers))
        assert len(numbers) == 1, numbers
        return numbers.pop()

    def state(self, item: Pod, index: int = 0) -> str:
        return self.side.statuses[place(item, index)][CORE_COOKIE].state


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, request.param)
    yield made
    made.store.close()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(CookieGroups.RECLAIMED, (True, 0, 0), id="only BE has one"),
        pytest.param(CookieGroups.CLASS, (True, 1, 1), id="online pods share another"),
        pytest.param(CookieGroups.POD, (True, 1, 2), id="each online pod its own"),
    ],
)
async def test_be_pods_never_share_a_cookie_with_online_pods(
    world: World, groups: CookieGroups, expected: tuple[bool, int, int]
) -> None:
    world.config = CoreSchedConfig(enabled=True, groups=groups)
    pods = (BATCH, CRUNCH, WEB, SHOP)
    world.run(*pods)
    await world.look(*pods)
    web, shop = world.one(WEB), world.one(SHOP)
    be = world.one(BATCH, CRUNCH)
    assert (be not in {0, web, shop}, int(web != 0), len({web, shop} - {0})) == expected
    assert world.cores.alive == {be, web, shop} - {0}
    assert world.state(BATCH) == "written"
    await world.look(*pods)
    assert world.state(BATCH) == "in place"
    assert (place(WEB) in world.side.statuses) == (web != 0)


@pytest.mark.parametrize("runtime", ["kata", "gVisor"])
async def test_a_pod_in_a_machine_or_kernel_of_its_own_has_one_for_all_its_processes(
    world: World, runtime: str
) -> None:
    """In kata in its one group, which is the sandbox's; in gVisor in the pod's own."""
    box = container("box", kind=ContainerKind.SANDBOX if runtime == "kata" else ContainerKind.APP)
    item = replace(pod("boxed", box), sandbox=runtime)
    path = place(item) if runtime == "kata" else item.group.path
    world.cores.group(place(item))
    world.cores.spawn(path)
    await world.look(item, WEB)
    assert 0 not in world.cores.cookies(path)
    assert world.side.statuses[item.group.path][CORE_COOKIE].state == "written"
    await world.look(item, WEB)
    assert world.side.statuses[item.group.path][CORE_COOKIE].state == "in place"
    await world.side.restore()
    assert world.cores.cookies(path) == {0}


async def test_sandboxes_and_system_pods_have_none(world: World) -> None:
    sandboxed = pod("boxed", container("pause", kind=ContainerKind.SANDBOX), container("main"))
    system = pod("dns", cls=PodClass.SYSTEM)
    world.config = CoreSchedConfig(enabled=True, groups=CookieGroups.POD)
    world.run(sandboxed, system)
    await world.look(sandboxed, system)
    assert world.cores.cookies(place(sandboxed, 0)) == {0}
    assert world.cores.cookies(place(sandboxed, 1)) != {0}
    assert world.one(system) == 0


async def test_what_comes_by_exec_gets_it_and_what_is_forked_has_it(world: World) -> None:
    world.run(BATCH)
    await world.look(BATCH)
    cookie = world.one(BATCH)
    world.cores.fork(world.cores.tids(place(BATCH))[0])
    world.cores.spawn(place(BATCH))
    calls = len(world.cores.calls)
    await world.side.sweep()
    assert world.one(BATCH) == cookie
    assert [call for call, _ in world.cores.calls[calls:] if call != "get"] == ["share_from", "share_to"]


async def test_groups_below_a_container_belong_to_it(world: World) -> None:
    world.run(BATCH)
    world.cores.group(f"{place(BATCH)}/inner/most")
    world.cores.spawn(f"{place(BATCH)}/inner/most")
    await world.look(BATCH)
    assert world.cores.cookies(f"{place(BATCH)}/inner/most") == world.cores.cookies(place(BATCH)) != {0}


async def test_a_container_that_starts_again_gets_the_cookie_of_its_group(world: World) -> None:
    world.run(BATCH, CRUNCH)
    await world.look(BATCH, CRUNCH)
    cookie = world.one(CRUNCH)
    world.cores.remove(place(BATCH))
    world.run(BATCH)
    await world.look(BATCH, CRUNCH)
    assert world.one(BATCH, CRUNCH) == cookie


async def test_threads_that_come_amid_it_are_found_by_the_next_round(world: World) -> None:
    world.run(BATCH)
    first = world.cores.tids(place(BATCH))[0]
    born: list[int] = []

    def give_birth(call: str, tid: int) -> None:
        if call == "share_to" and tid == first and not born:
            # A thread without a cookie starts another, right before it is given one.
            born.append(world.cores.thread(first))

    world.cores.before = give_birth
    await world.look(BATCH)
    assert born
    assert world.one(BATCH)


async def test_threads_that_come_for_ever_end_the_sweep_all_the_same(world: World) -> None:
    world.run(BATCH)

    def spawn(call: str, tid: int) -> None:
        if call == "share_to":
            world.cores.spawn(place(BATCH))

    world.cores.before = spawn
    await world.look(BATCH)
    assert world.state(BATCH) == "waiting"
    world.cores.before = lambda _call, _tid: None
    await world.side.sweep()
    assert world.state(BATCH) == "written"


async def test_a_thread_that_ended_meanwhile_is_no_error_and_its_number_no_trap(world: World) -> None:
    world.run(BATCH)
    world.cores.group("/host")
    victim = world.cores.tids(place(BATCH))[0]

    def reuse(call: str, tid: int) -> None:
        if call == "share_to" and tid == victim and victim in world.cores.tids(place(BATCH)):
            world.cores.exit(victim)
            # The number is used again at once, for a process that is none of ours.
            world.cores.spawn("/host", tid=victim)

    world.cores.before = reuse
    await world.look(BATCH)
    assert world.cores.cookie(victim) == 0
    assert world.one(BATCH)
    assert world.side.problems() == []


async def test_the_thread_that_shows_the_cookie_may_end(world: World) -> None:
    world.run(BATCH, threads=1)
    await world.look(BATCH)
    source = world.cores.tids(place(BATCH))[0]
    world.cores.spawn(place(BATCH))

    def end(call: str, tid: int) -> None:
        if call == "share_from" and tid == source and source in world.cores.tids(place(BATCH)):
            world.cores.exit(source)

    world.cores.before = end
    await world.side.sweep()
    assert world.one(BATCH)
    assert set(world.side.status()["cookies"]) == {"reclaimed"}  # type: ignore[call-overload]


async def test_a_cookie_of_a_programs_own_is_left(world: World) -> None:
    world.run(BATCH, CRUNCH)
    tids = world.cores.tids(place(BATCH))
    own = world.cores.own(tids[0])
    await world.look(BATCH, CRUNCH)
    assert world.cores.cookie(tids[0]) == own
    assert world.cores.cookie(tids[1]) == world.one(CRUNCH) != own
    standing = world.side.statuses[place(BATCH)][CORE_COOKIE]
    assert (standing.state, standing.actual) == ("yielded", "1 of 2 threads")
    await world.side.restore()
    assert world.cores.cookie(tids[0]) == own


async def test_another_class_is_another_cookie(world: World) -> None:
    world.config = CoreSchedConfig(enabled=True, groups=CookieGroups.CLASS)
    world.run(BATCH, CRUNCH, WEB)
    await world.look(BATCH, CRUNCH, WEB)
    be, web = world.one(BATCH, CRUNCH), world.one(WEB)
    promoted = replace(BATCH, classification=replace(BATCH.classification, pod_class=PodClass.SHARED))
    await world.look(promoted, CRUNCH, WEB)
    assert (world.one(BATCH), world.one(CRUNCH)) == (web, be)
    system = replace(BATCH, classification=replace(BATCH.classification, pod_class=PodClass.SYSTEM))
    await world.look(system, CRUNCH, WEB)
    assert world.one(BATCH) == 0


async def test_without_the_policy_all_is_taken_back_and_then_nothing_is_looked_at(world: World) -> None:
    world.run(BATCH, WEB)
    await world.look(BATCH, WEB)
    world.config = CoreSchedConfig()
    await world.look(BATCH, WEB)
    assert world.one(BATCH) == 0
    assert world.cores.alive == set()
    assert world.side.statuses == {}
    world.again()
    world.cores.calls.clear()
    await world.look(BATCH, WEB)
    assert world.cores.calls == []


@pytest.mark.parametrize(
    ("dry_run", "more", "state"),
    [
        pytest.param(False, {"enforce": False}, "would write", id="observe"),
        pytest.param(True, {}, "would write", id="dry run"),
        pytest.param(False, {"holds": {"pod:batch": Hold(target="pod:batch", reason="r", by="b")}}, "held", id="pod"),
        pytest.param(
            False, {"holds": {f"knob:{CORE_COOKIE}": Hold(target="k", reason="r", by="b")}}, "held", id="knob"
        ),
        pytest.param(False, {"holds": {"node": Hold(target="node", reason="r", by="b")}}, "held", id="node"),
    ],
)
async def test_what_may_not_be_done_is_only_told(world: World, dry_run: bool, more: dict[str, Any], state: str) -> None:
    world.config = CoreSchedConfig(enabled=True, dry_run=dry_run)
    world.run(BATCH)
    await world.look(BATCH, **more)
    assert (world.one(BATCH), world.state(BATCH)) == (0, state)
    assert not world.side.status()["cookies"]
    world.config = CoreSchedConfig(enabled=True)
    await world.look(BATCH)
    cookie = world.one(BATCH)
    world.config = CoreSchedConfig()
    await world.look(BATCH, **more)
    assert world.one(BATCH) == (0 if dry_run else cookie)
    assert world.side.statuses == {}


async def test_a_policy_that_becomes_a_dry_run_takes_its_cookies_back(world: World) -> None:
    world.run(BATCH, CRUNCH)
    await world.look(BATCH, CRUNCH)
    world.config = CoreSchedConfig(enabled=True, dry_run=True)
    held = {"pod:crunch": Hold(target="pod:crunch", reason="r", by="b")}
    cookie = world.one(CRUNCH)
    await world.look(BATCH, CRUNCH, holds=held)
    assert (world.one(BATCH), world.state(BATCH), world.one(CRUNCH)) == (0, "would write", cookie)
    await world.look(BATCH, CRUNCH)
    assert (world.one(CRUNCH), world.state(CRUNCH)) == (0, "would write")
    assert (world.cores.alive, world.side.status()["cookies"]) == (set(), {})


# Restarts, crashes, restore


async def test_a_new_agent_goes_on_with_the_cookies_that_are_there(world: World) -> None:
    world.config = CoreSchedConfig(enabled=True, groups=CookieGroups.POD)
    world.run(BATCH, CRUNCH, WEB)
    await world.look(BATCH, CRUNCH, WEB)
    before = (world.one(BATCH, CRUNCH), world.one(WEB))
    world.again()
    world.cores.calls.clear()
    world.run(SHOP)
    await world.look(BATCH, CRUNCH, WEB, SHOP)
    assert (world.one(BATCH, CRUNCH), world.one(WEB)) == before
    assert world.one(SHOP) not in {0, *before}
    assert [call for call, _ in world.cores.calls if call == "create"] == ["create"]


async def test_a_cookie_is_in_the_store_before_a_thread_has_it(world: World) -> None:
    world.run(BATCH)
    known: list[bool] = []

    def look(call: str, tid: int) -> None:
        if call == "share_to":
            with_us = Store(world.path, boot=world.boot)
            known.append(set(read_rows(Ledger(with_us), CODEC).ours.values()) == {"reclaimed"})
            with_us.close()

    world.cores.before = look
    await world.look(BATCH)
    assert known == [True, True]


def _full(*_: object, **__: object) -> None:
    raise StoreError("no space left")


async def test_what_cannot_be_recorded_is_not_given(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(BATCH)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "record", _full)
        await world.look(BATCH)
        assert world.one(BATCH) == 0
        assert world.state(BATCH) == "not recorded"
        assert "no space left" in world.side.problems()[0]
    await world.side.sweep()
    assert world.one(BATCH)
    assert world.side.problems() == []


async def test_restore_takes_them_from_every_thread_wherever_it_is(world: World) -> None:
    world.run(BATCH, CRUNCH)
    await world.look(BATCH, CRUNCH)
    world.cores.group("/elsewhere")
    world.cores.move(world.cores.tids(place(BATCH))[0], "/elsewhere")
    done = await world.side.restore()
    assert world.cores.alive == set()
    assert [(result.path, result.undo, result.detail) for result in done] == [
        ("reclaimed", RestoreOutcome.RESTORED, "4 threads")
    ]
    assert read_rows(Ledger(world.store), CODEC).ours == {}
    # What was planned before is no reason to begin again; the next look says what holds now.
    await world.side.sweep()
    assert world.cores.alive == set()
    await world.look(BATCH, CRUNCH, enforce=False)
    assert world.cores.alive == set()
    assert await world.side.restore() == ()


async def test_a_restore_that_cannot_be_recorded_is_not_reported_as_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may give the number of a cookie of ours to another program, whose threads would be cleared next."""
    world.run(BATCH)
    await world.look(BATCH)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "record", _full)
        done = await world.side.restore()
    assert [(result.path, result.undo, result.detail) for result in done] == [
        ("reclaimed", RestoreOutcome.REFUSED, "no space left")
    ]
    assert world.side.problems() == []
    await world.side.restore()
    assert read_rows(Ledger(world.store), CODEC).ours == {}


async def test_a_refused_cookie_is_not_the_outcome_of_another_whose_thread_has_ended(world: World) -> None:
    world.config = CoreSchedConfig(enabled=True, groups=CookieGroups.CLASS)
    world.run(BATCH, WEB)
    await world.look(BATCH, WEB)
    (ending, _), (refusing, _) = (world.cores.tids(place(item)) for item in (BATCH, WEB))

    def end_or_refuse(call: str, tid: int) -> None:
        if call == "share_to" and tid == ending and tid in world.cores.tids(place(BATCH)):
            world.cores.exit(tid)
        if call == "share_to" and tid == refusing:
            raise PermissionError(errno.EPERM, "refused")

    world.cores.before = end_or_refuse
    done = {result.path: (result.undo, result.detail) for result in await world.side.restore()}
    assert done == {
        "reclaimed": (RestoreOutcome.RESTORED, "1 thread"),
        "online": (RestoreOutcome.REFUSED, "prctl: EPERM (CAP_SYS_PTRACE is needed)"),
    }


async def test_restore_of_one_pod_takes_a_group_of_any_name(world: World) -> None:
    """A tenant names the groups in its container; the kernel shows the bytes as they are."""
    world.run(BATCH, CRUNCH)
    await world.look(BATCH, CRUNCH)
    cookie, (tid, _) = world.one(CRUNCH), world.cores.tids(place(CRUNCH))
    listed = Path(f"{world.cores.proc}/{tid}/task/{tid}/cgroup")
    listed.write_bytes(b"3:cpuset:" + place(CRUNCH).encode() + b"/\xff\n")
    assert [result.detail for result in await world.side.restore("batch")] == ["2 threads"]
    assert (world.one(BATCH), world.one(CRUNCH)) == (0, cookie)


async def test_restore_of_one_pod_leaves_the_others(world: World) -> None:
    world.run(BATCH, CRUNCH)
    await world.look(BATCH, CRUNCH)
    cookie = world.one(CRUNCH)
    assert [result.detail for result in await world.side.restore("batch")] == ["2 threads"]
    assert (world.one(BATCH), world.one(CRUNCH)) == (0, cookie)


async def test_restore_without_a_daemon_needs_only_the_store(world: World) -> None:
    world.run(BATCH, WEB)
    await world.look(BATCH, WEB)
    world.again()
    assert [result.ok for result in restore_cookies(world.cores, Ledger(world.store), proc=world.cores.proc)] == [True]
    assert world.cores.alive == set()
    assert restore_cookies(world.cores, Ledger(world.store), proc=world.cores.proc) == []


async def test_another_boot_knows_nothing_of_them(world: World) -> None:
    world.run(BATCH)
    await world.look(BATCH)
    world.boot = "boot-2"
    world.again()
    assert read_rows(Ledger(world.store), CODEC).ours == {}


async def test_a_cookie_that_nobody_has_any_more_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.config = CoreSchedConfig(enabled=True, groups=CookieGroups.POD)
    world.run(BATCH, WEB)
    await world.look(BATCH, WEB)
    monkeypatch.setattr(module, "_PRUNE_S", 0.0)
    gone = world.one(WEB)
    world.cores.remove(place(WEB))
    await world.look(BATCH)
    assert gone not in read_rows(Ledger(world.store), CODEC).ours
    # Its number is used again, as a program's own: no more ours.
    tid = world.cores.tids(place(BATCH))[0]
    assert world.cores.own(tid) == gone
    await world.side.sweep()
    assert world.cores.cookie(tid) == gone
    assert world.state(BATCH) == "yielded"


# Machines that cannot


def _no_kernel(cores: FakeCores) -> None:
    cores.built = False


def _no_threads(cores: FakeCores) -> None:
    cores.smt = False


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        pytest.param(_no_kernel, "CONFIG_SCHED_CORE", id="no core scheduling"),
        pytest.param(_no_threads, "two online threads", id="no SMT any more"),
    ],
)
async def test_a_machine_that_cannot_says_so_once(
    world: World, break_it: Callable[[FakeCores], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    break_it(world.cores)
    world.run(BATCH, CRUNCH)
    for _ in range(3):
        await world.look(BATCH, CRUNCH)
    assert world.side.statuses == {}
    assert [words in problem for problem in world.side.problems()] == [True]
    assert sum(words in getattr(record, "fields", {}).get("reason", "") for record in caplog.records) == 1
    world.cores.built = world.cores.smt = True
    await world.look(BATCH, CRUNCH)
    assert world.one(BATCH, CRUNCH)
    assert world.side.problems() == []


async def test_hyper_threads_that_go_offline_amid_a_sweep_end_it(world: World) -> None:
    world.run(BATCH)

    def unplug(call: str, tid: int) -> None:
        world.cores.smt = call != "share_to" and world.cores.smt

    world.cores.before = unplug
    await world.look(BATCH)
    await world.side.sweep()
    assert ["two online threads" in problem for problem in world.side.problems()] == [True]
    [refused] = await world.side.restore()
    assert refused.undo is RestoreOutcome.REFUSED


async def test_what_a_sweep_could_not_read_is_not_in_place(world: World) -> None:
    world.run(BATCH)
    for _ in range(2):
        await world.look(BATCH)
    assert world.state(BATCH) == "in place"
    quiet = world.cores.before
    calls: list[str] = []

    def unplug(call: str, tid: int) -> None:
        calls.append(call)
        world.cores.smt = len(calls) == 1  # the first one asks whether it is available

    world.cores.before = unplug
    await world.look(BATCH)
    assert (world.state(BATCH), world.side.problems()) == ("unreadable", ["core scheduling failed: ENODEV"])
    world.cores.before, world.cores.smt = quiet, True
    await world.look(BATCH)
    assert (world.state(BATCH), world.side.problems()) == ("in place", [])


@pytest.mark.parametrize("end", ["the kernel refuses", "the store refuses", "cancelled"])
async def test_carriers_end_outside_the_event_loop_whatever_happens(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The end of one waits for its thread, which may be among thousands of threads that get a cookie."""
    made: list[CookieCarrier] = []
    closed: list[str] = []
    begin, close = CookieCarrier.__init__, CookieCarrier.close

    def noting(carrier: CookieCarrier) -> None:
        begin(carrier)
        made.append(carrier)

    def note_end(carrier: CookieCarrier) -> None:
        closed.append(threading.current_thread().name)
        close(carrier)

    monkeypatch.setattr(CookieCarrier, "__init__", noting)
    monkeypatch.setattr(CookieCarrier, "close", note_end)
    world.run(BATCH)
    with trio.CancelScope() as scope:
        token = trio.lowlevel.current_trio_token()

        def fail(call: str, _: int) -> None:
            if call == "create" and end == "the kernel refuses":
                world.cores.smt = False
            if call == "create" and end == "cancelled":
                trio.from_thread.run_sync(scope.cancel, trio_token=token)

        world.cores.before = fail
        if end == "the store refuses":
            monkeypatch.setattr(Ledger, "record", _full)
        await world.look(BATCH)
    assert made
    assert len(closed) == len(made)
    assert threading.main_thread().name not in closed


async def test_threads_that_may_not_be_looked_at_are_told(world: World) -> None:
    world.run(BATCH, CRUNCH)
    world.cores.forbidden = {world.cores.tids(place(BATCH))[0]}
    await world.look(BATCH, CRUNCH)
    standing = world.side.statuses[place(BATCH)][CORE_COOKIE]
    assert standing.state == "refused"
    assert "CAP_SYS_PTRACE" in standing.detail
    assert world.state(CRUNCH) == "written"


async def test_an_agent_in_a_pid_namespace_of_its_own_says_what_it_needs(world: World) -> None:
    world.cores.group(place(BATCH))
    Path(f"{world.cores.mount}{place(BATCH)}/{world.side._file}").write_text("0\n0\n")
    await world.look(BATCH)
    assert "hostPID" in world.side.statuses[place(BATCH)][CORE_COOKIE].detail


async def test_an_agent_that_has_a_cookie_itself_hands_out_nothing(world: World) -> None:
    world.run(BATCH)
    world.cores.create()
    await world.look(BATCH)
    assert world.one(BATCH) == 0
    assert ["bypassd itself" in problem for problem in world.side.problems()] == [True]


# What is reported


async def test_each_container_is_noted_once_and_each_thread_counted(world: World) -> None:
    world.run(BATCH, WEB, threads=3)
    await world.look(BATCH, WEB)
    for _ in range(2):
        world.cores.spawn(place(BATCH))
        await world.side.sweep()
    world.ledger.flush()
    rows = [row for _, row in world.store.history()]
    assert sum(b"core cookie" in row and b"write" in row for row in rows) == 1
    assert world.writes == {(CORE_COOKIE, "written"): 5, (CORE_COOKIE, "refused"): 0}
    standing = world.side.statuses[place(BATCH)][CORE_COOKIE]
    assert (standing.wanted, standing.actual, standing.detail) == ("reclaimed", "reclaimed", "5 threads")
    assert (standing.setting.policy, standing.setting.reason) == ("core_sched", "the pod is BE")


async def test_it_sweeps_after_looks_and_now_and_then(world: World) -> None:
    world.config = varied(CoreSchedConfig(enabled=True), sweep_s=0.5)
    world.run(BATCH)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.side.run)
        view = node(BATCH, topology=SMT)
        plan = plan_node(view, None, PoliciesConfig(core_sched=world.config))
        world.side.planned(PlanSnapshot(view=view, plan=plan, enforce=True))
        with trio.fail_after(60):
            while not all(world.cores.cookies(place(BATCH))):  # noqa: ASYNC110  (no event)
                await trio.sleep(0.01)
            # By exec: no event reports it.
            world.cores.spawn(place(BATCH))
            while not all(world.cores.cookies(place(BATCH))):  # noqa: ASYNC110  (no event)
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert world.one(BATCH)
