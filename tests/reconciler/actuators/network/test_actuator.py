"""The HTB tree of an interface, round by round, on a traffic control in memory; restores after a kill at any step."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY
from cgroupfs.errors import SourceError, StoreError
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.network.actuator import CODEC, restore_network
from reconciler.actuators.network.netlink import Link, link_mbit
from reconciler.actuators.network.tc import ClassRates, RootQdisc, TreeCounters
from reconciler.control.network_loop import NetworkLoop
from state.entry import RestoreOutcome, RestoreResult
from state.ledger import Ledger
from state.model import Hold, Pools
from state.network import HANDLE, InterfaceRequest, NetworkRequest
from state.plan import NodePlan
from state.store import Store
from tests.fakes.cables import FakePodTc, FakeSpaces, both_directions
from tests.reconciler.nodes import cpus, node

MBIT = 125_000


class Killed(BaseException):
    """The process ended here."""


class FakeTc:
    """Interfaces with a root each. ``left``: calls that change something, until the process is killed."""

    def __init__(self, left: int | None = None, **kinds: str) -> None:
        self.roots = {
            name: RootQdisc(index=number, kind=kind, handle=0x8001_0000 if kind == "cake" else 0)
            for number, (name, kind) in enumerate(kinds.items(), 2)
        }
        self.kinds = {root.index: root.kind for root in self.roots.values()}
        self.rates: dict[int, ClassRates] = {}
        self.sent = {root.index: [0, 0] for root in self.roots.values()}
        self.left = left
        self.calls = 0

    def _change(self) -> None:
        if self.left is not None and self.calls >= self.left:
            raise Killed
        self.calls += 1

    def _name(self, index: int) -> str:
        return next(name for name, root in self.roots.items() if root.index == index)

    def root(self, name: str) -> RootQdisc | None:
        return self.roots.get(name)

    def names(self) -> dict[str, RootQdisc]:
        return {name: root for name, root in self.roots.items() if root.ours}

    def install(self, index: int, rates: ClassRates) -> None:
        name = self._name(index)
        if not (self.roots[name].default or self.roots[name].ours):
            raise SourceError("network", "not ours to replace")
        self._change()
        self.roots[name] = RootQdisc(index=index, kind="htb", handle=HANDLE)
        self._change()
        self.roots[name] = RootQdisc(index=index, kind="htb", handle=HANDLE, complete=True)
        self.rates[index] = rates

    def change(self, index: int, rates: ClassRates) -> None:
        self._change()
        self.rates[index] = rates

    def counted(self, index: int, rates: ClassRates) -> TreeCounters | None:
        return TreeCounters(self.sent[index][0], self.sent[index][1], self.rates[index] == rates)

    def remove(self, index: int) -> None:
        self._change()
        self.roots[self._name(index)] = RootQdisc(index=index, kind=self.kinds[index], handle=0)


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def situation(*names: str, enforce: bool = True, held: bool = False, dry_run: bool = False) -> PlanSnapshot:
    interfaces = tuple(InterfaceRequest(name=name, link_mbit=100) for name in names)
    wish = NetworkRequest(interfaces=interfaces, dry_run=dry_run) if names else None
    pools = Pools(
        online_cpus=cpus("0-7"), reserved=EMPTY, dedicated={}, shared=cpus("0-7"), reclaimed=EMPTY, budget_milli=0
    )
    holds = {"node": Hold(target="node", reason="test", by="me")} if held else {}
    return PlanSnapshot(view=node(), plan=NodePlan(pools=pools, network=wish), enforce=enforce, holds=holds)


def roots(store: Store) -> dict[str, str]:
    return dict(read_rows(Ledger(store), CODEC).roots)


def restore_trees(tc: FakeTc, store: Store) -> list[RestoreResult]:
    return restore_network(tc, both_directions(), Ledger(store))


class Running:
    """The actuator with its rounds started one by one."""

    def __init__(self, tc: FakeTc, path: Path) -> None:
        self.tc = tc
        self.clock = Clock()
        self.store = Store(str(path / "state.db"))
        self.pods = FakePodTc()
        for number, name in enumerate(tc.roots, 2):
            self.pods.links[name] = Link(index=number, name=name)
        self.network = NetworkLoop(
            tc,
            both_directions(self.pods),
            lambda: FakeSpaces({}),
            Ledger(self.store),
            trio.CapacityLimiter(1),
            speed=lambda _name: None,
            clock=self.clock,
        )

    async def round(self, now: PlanSnapshot, *, seconds: float = 1.0, online: float = 0, be: float = 0) -> None:
        """One round after so many seconds of traffic (in megabits a second) on the first interface."""
        self.clock.now += seconds
        sent = self.tc.sent[2]
        sent[0] += int(online * MBIT * seconds)
        sent[1] += int(be * MBIT * seconds)
        await self.network._round(now)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """On one interface with the kernel's default."""
    made = Running(FakeTc(eth0="mq"), tmp_path)
    yield made
    made.store.close()


async def test_the_ceiling_follows_what_online_work_uses(running: Running) -> None:
    tc = running.tc
    now = situation("eth0")
    await running.round(now)
    assert tc.roots["eth0"].complete
    assert tc.rates[2] == ClassRates(link=100 * MBIT, floor=10 * MBIT, ceiling=10 * MBIT)
    assert roots(running.store) == {"eth0": "mq"}
    for _ in range(12):
        await running.round(now)
    assert tc.rates[2].ceiling == 40 * MBIT
    calls = tc.calls
    await running.round(now, be=30)
    assert tc.calls == calls, "nothing is changed where nothing changes"
    assert running.network.status() == {
        "interfaces": {
            "eth0": {
                "instead_of": "mq",
                "link": 100 * MBIT,
                "be_floor": 10 * MBIT,
                "be_ceiling": 40 * MBIT,
                "online": 0,
                "be": 30 * MBIT,
                "pods": 0,
                "state": "in place",
            }
        },
        "pods_devices": {},
        "pods_in_host_network": 0,
    }
    await running.round(now, online=60)
    assert tc.rates[2].ceiling == 20 * MBIT
    await running.round(now, online=95)
    assert tc.rates[2].ceiling == 10 * MBIT
    await running.round(situation())
    assert tc.roots["eth0"] == RootQdisc(index=2, kind="mq", handle=0)
    assert roots(running.store) == {}
    assert running.network.problems() == []


async def test_rates_that_another_program_has_set_are_set_again(running: Running) -> None:
    """Its record says what BE may send; the kernel's classes decide."""
    tc = running.tc
    now = situation("eth0")
    for _ in range(13):
        await running.round(now)
    ours, calls = tc.rates[2], tc.calls
    await running.round(now)
    assert (tc.calls, ours.ceiling) == (calls, 40 * MBIT), "the law's ceiling does not move any more"
    tc.rates[2] = replace(ours, ceiling=100 * MBIT)
    await running.round(now)
    assert tc.rates[2] == ours


@pytest.mark.parametrize(
    ("now", "state"),
    [
        (situation("eth0", enforce=False), "would replace mq"),
        (situation("eth0", dry_run=True), "would replace mq"),
        (situation("eth0", held=True), "would replace mq"),
        (situation("eth1"), "its root qdisc cake belongs to another program: unchanged"),
        (situation("eth9"), "no such interface"),
    ],
    ids=["observe", "dry run", "held", "somebody's", "missing"],
)
async def test_what_is_not_ours_to_change_is_left_alone(tmp_path: Path, now: PlanSnapshot, state: str) -> None:
    tc = FakeTc(eth0="mq", eth1="cake")
    running = Running(tc, tmp_path)
    await running.round(now)
    assert tc.calls == 0
    facts = running.network.status()["interfaces"]
    assert isinstance(facts, dict)
    assert [line["state"] for line in facts.values()] == [state]
    assert await running.network.restore() == ()
    running.store.close()


async def test_a_policy_that_becomes_a_dry_run_removes_its_trees(running: Running) -> None:
    await running.round(situation("eth0"))
    await running.round(situation("eth0", dry_run=True, held=True))
    assert running.tc.roots["eth0"].complete, "a hold keeps it"
    await running.round(situation("eth0", dry_run=True))
    assert (running.tc.roots["eth0"].kind, roots(running.store)) == ("mq", {})
    facts = running.network.status()["interfaces"]
    assert isinstance(facts, dict)
    assert facts["eth0"]["state"] == "would replace mq"
    await running.round(situation("eth0"))
    assert running.tc.roots["eth0"].complete


async def test_an_interface_without_a_speed_needs_one_in_the_configuration(running: Running) -> None:
    wish = NetworkRequest(interfaces=(InterfaceRequest(name="eth0"),))
    now = situation("eth0")
    await running.round(replace(now, plan=replace(now.plan, network=wish)))
    assert running.network.problems() == ["eth0: its driver reports no speed; set link_mbit in the configuration"]


async def test_a_tree_goes_where_the_links_speed_is_not_known_any_more(running: Running) -> None:
    tc = running.tc
    now = situation("eth0")
    untold = replace(now.plan, network=NetworkRequest(interfaces=(InterfaceRequest(name="eth0"),)))
    await running.round(now)
    await running.round(replace(now, plan=untold, enforce=False))
    assert tc.roots["eth0"].complete
    await running.round(replace(now, plan=untold))
    assert tc.roots["eth0"] == RootQdisc(index=2, kind="mq", handle=0)
    assert roots(running.store) == {}


async def test_after_a_kill_at_any_step_restore_gives_the_default_back(tmp_path: Path) -> None:
    for left in range(6):
        path = tmp_path / str(left)
        path.mkdir()
        tc = FakeTc(left, eth0="mq")
        first = Running(tc, path)
        with contextlib.suppress(Killed):
            for online in (0, 0, 60, 0):
                await first.round(situation("eth0"), online=online)
        first.store.close()
        tc.left = None
        store = Store(str(path / "state.db"))
        done = restore_trees(tc, store)
        assert [result.path for result in done] == ["eth0"]
        assert all(result.ok for result in done)
        assert tc.roots["eth0"] == RootQdisc(index=2, kind="mq", handle=0)
        assert restore_trees(tc, store) == []
        store.close()


async def test_a_next_run_goes_on_with_the_tree_that_is_there(tmp_path: Path) -> None:
    tc = FakeTc(3, eth0="mq")
    first = Running(tc, tmp_path)
    with contextlib.suppress(Killed):
        for _ in range(9):
            await first.round(situation("eth0"))
    first.store.close()
    tc.left = None
    second = Running(tc, tmp_path)
    await second.round(situation("eth0"))
    assert tc.rates[2].ceiling == 10 * MBIT, "nothing is known of online work yet"
    done = await second.network.restore()
    assert [(result.path, result.undo, result.text) for result in done] == [("eth0", RestoreOutcome.RESTORED, "mq")]
    second.store.close()


async def test_a_tree_that_a_lost_store_does_not_know_is_found_by_its_handle(tmp_path: Path) -> None:
    tc = FakeTc(eth0="mq", eth1="mq")
    first = Running(tc, tmp_path)
    await first.round(situation("eth0", "eth1"))
    first.store.close()
    (tmp_path / "state.db").unlink()
    (tmp_path / "state.db.copy").unlink()
    second = Running(tc, tmp_path)
    await second.round(situation("eth0"))
    assert roots(second.store) == {"eth0": ""}
    assert {result.path: result.undo for result in restore_trees(tc, second.store)} == {
        "eth0": RestoreOutcome.RESTORED,
        "eth1": RestoreOutcome.RESTORED,
    }
    assert not any(root.ours for root in tc.roots.values())
    second.store.close()


async def test_a_removed_tree_is_put_back_and_an_interface_that_goes_is_told(running: Running) -> None:
    tc = running.tc
    now = situation("eth0")
    await running.round(now)
    tc.remove(2)
    await running.round(now)
    assert tc.roots["eth0"].complete
    del tc.roots["eth0"], running.pods.links["eth0"]
    await running.round(now)
    assert running.network.problems() == ["eth0: no such interface"]
    done = await running.network.restore()
    assert [result.undo for result in done] == [RestoreOutcome.GONE]


def test_a_speed_is_what_the_driver_tells(tmp_path: Path) -> None:
    for name, text in (("eth0", "25000\n"), ("veth0", "-1\n"), ("odd", "fast\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(text)
    numbers = {name: link_mbit(name, str(tmp_path)) for name in ("eth0", "veth0", "odd", "none")}
    assert numbers == {"eth0": 25_000, "veth0": None, "odd": None, "none": None}


async def test_a_store_that_fails_is_a_problem_and_logged_once(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running.round(situation("eth0"))

    def full(_batch: object) -> None:
        raise StoreError("state.db", "no space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(running.store, "apply", full)
        for _ in range(5):
            await running.round(situation())
        assert [problem for problem in running.network.problems() if "no space left" in problem]
        assert len([line for line in caplog.messages if "no space left" in line]) == 1
    await running.round(situation())
    assert running.network.problems() == []
