"""BE pods redirected to our IFB, round by round on a network in memory; and the restore after a kill at any step."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.actuators.codec import read_rows
from reconciler.actuators.network.actuator import CODEC, NetworkState, restore_network
from reconciler.actuators.network.netlink import Link
from reconciler.control.network_loop import NetworkLoop
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.model import Hold, Pod
from state.network import GATHER, RECEIVED_GATHER, RECEIVED_SHARE, SHARE, InterfaceRequest, NetworkRequest
from state.store import Store
from tests.fakes.cables import HOST, FakePodTc, FakeSpaces
from tests.reconciler.actuators.network.test_actuator import MBIT, Clock, FakeTc, Killed, situation
from tests.reconciler.nodes import node, online, pod

BE, SECOND, MINE = pod("be"), pod("second"), online("mine")
WISH = NetworkRequest(interfaces=(InterfaceRequest(name="eth0", link_mbit=100),), classes=False, pods_by="eth0")


class Steps:
    """Counts changes of the kernel and of the store, and ends the process before one of them."""

    def __init__(self) -> None:
        self.taken = 0
        self.left: int | None = None

    def __call__(self) -> None:
        if self.left is not None and self.taken >= self.left:
            raise Killed
        self.taken += 1


class World:
    """A host with three pods; `life` is one run of the agent on it."""

    def __init__(self, path: Path) -> None:
        self.steps = Steps()
        self.tc = FakeTc(eth0="mq")
        self.pods = FakePodTc(self.steps)
        self.both = self.pods, FakePodTc(self.steps, beside=self.pods)
        self.spaces = FakeSpaces({"be": 100, "second": 101, "mine": 102})
        self.clock = Clock()
        self.path = path
        self.speed: int | None = None
        for uid, inode in self.spaces.inodes.items():
            self.pods.join(f"veth-{uid}", inode)
        self.life()

    def life(self) -> None:
        self.store = Store(str(self.path / "state.db"))
        self.network = NetworkLoop(
            self.tc,
            self.both,
            lambda: self.spaces,
            Ledger(self.store),
            trio.CapacityLimiter(1),
            speed=lambda _name: self.speed,
            clock=self.clock,
        )

    async def round(
        self,
        *pods: Pod,
        wish: NetworkRequest | None = WISH,
        seconds: float = 1.0,
        online_mbit: float = 0,
        **more: object,
    ) -> None:
        """One round after so many seconds in which online work has used the link."""
        self.clock.now += seconds
        self.pods.send(int(online_mbit * MBIT * seconds))
        now = situation("eth0")
        view = node(*(pods or (BE, SECOND, MINE)))
        now = replace(now, view=view, plan=replace(now.plan, network=wish), **more)
        await self.network._round(now)

    async def rounds(self, count: int, **more: Any) -> None:  # as `round`
        for _ in range(count):
            await self.round(**more)

    @property
    def clean(self) -> bool:
        gathers = {GATHER, RECEIVED_GATHER} & set(self.pods.links)
        return (self.pods.filters, self.both[1].filters, self.pods.disciplines, gathers) == ({}, {}, {}, set())

    def state(self, uid: str) -> tuple[str, str]:
        status = self.network.statuses[f"/kubepods/besteffort/pod{uid}"][SHARE]
        return status.state, status.detail


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_be_pods_are_led_through_one_device_and_online_pods_are_not(world: World) -> None:
    await world.round()
    device = world.pods.links[GATHER].index
    assert world.pods.filters == {"veth-be": device, "veth-second": device}
    assert world.pods.rates == [10 * MBIT], "an unknown takes no risk"
    assert world.state("be") == ("written", "veth-be")
    kept = read_rows(Ledger(world.store), CODEC)
    assert (kept.sent.ifb, {name: (led.pod_uid, led.owns_qdisc) for name, led in kept.sent.redirects.items()}) == (
        True,
        {"veth-be": ("be", True), "veth-second": ("second", True)},
    )
    await world.rounds(12)
    assert world.pods.rates[-1] == 40 * MBIT
    taken = world.steps.taken
    await world.round(online_mbit=20)
    assert world.steps.taken == taken, "nothing is changed where nothing changes"
    await world.round(online_mbit=60)
    assert world.pods.rates[-1] == 20 * MBIT
    await world.round(online_mbit=95)
    assert world.pods.rates[-1] == 10 * MBIT
    await world.round(seconds=40)
    assert world.state("be") == ("in place", "veth-be")
    assert world.tc.calls == 0, "without class ids nothing stands on the interface"


async def test_what_be_pods_send_over_the_link_is_not_taken_for_online_work(world: World) -> None:
    for _ in range(13):
        await world.round()
        world.pods.gone_through += 40 * MBIT
        world.pods.send(40 * MBIT)
    await world.round(online_mbit=30)
    line = world.network.lines["eth0"]
    assert line.used is not None
    assert (line.used.online, line.used.pods) == (30 * MBIT, 40 * MBIT)
    assert world.pods.rates[-1] == 40 * MBIT


async def test_more_looks_do_not_make_the_ceiling_rise_faster(world: World) -> None:
    await world.round()
    await world.round()
    before = world.network.lines["eth0"]
    for number in range(5):
        await world.round(BE, SECOND, MINE, pod(f"new-{number}"), seconds=0.05)
    assert world.network.lines["eth0"] == before


async def test_a_pod_that_goes_is_forgotten_and_one_that_is_online_now_is_let_go(world: World) -> None:
    await world.round()
    world.pods.leave("veth-be")
    world.spaces.inodes.pop("be")
    await world.round(online("second"), MINE)
    assert read_rows(Ledger(world.store), CODEC).sent.redirects == {}
    assert (world.pods.filters, world.pods.disciplines) == ({}, {})
    assert world.pods.slots == {}
    assert GATHER in world.pods.links, "it is still wanted"
    await world.round(wish=None)
    assert world.clean
    assert read_rows(Ledger(world.store), CODEC) == NetworkState(), "nothing is left in the store"


async def test_each_cable_has_a_class_of_its_own_and_the_next_one_takes_what_is_free(world: World) -> None:
    await world.round()
    assert world.pods.slots == {1: "veth-be", 2: "veth-second"}
    await world.round(online("be"), SECOND, MINE)
    assert world.pods.slots == {2: "veth-second"}
    world.pods.join("veth-third", 103)
    world.spaces.inodes["third"] = 103
    await world.round(online("be"), SECOND, MINE, pod("third"))
    assert world.pods.slots == {1: "veth-third", 2: "veth-second"}
    assert {name: led.slot for name, led in read_rows(Ledger(world.store), CODEC).sent.redirects.items()} == {
        "veth-second": 2,
        "veth-third": 1,
    }


async def test_a_new_pod_is_led_at_the_look_that_shows_it_and_one_without_a_process_soon_after(world: World) -> None:
    await world.round(BE, MINE)
    world.spaces.inodes.pop("second")
    await world.round(BE, SECOND, MINE, seconds=0.05)
    assert world.state("second") == ("waiting", "no process yet")
    world.spaces.inodes["second"] = 101
    await world.round(BE, SECOND, MINE, seconds=1)
    assert "veth-second" not in world.pods.filters
    await world.round(BE, SECOND, MINE, seconds=2)
    assert "veth-second" in world.pods.filters


async def test_a_rate_that_another_program_has_set_is_set_again(world: World) -> None:
    await world.rounds(14)
    count = len(world.pods.rates)
    await world.round()
    assert (len(world.pods.rates), world.pods.rates[-1]) == (count, 40 * MBIT)
    world.pods.rates.append(100 * MBIT)
    await world.round()
    assert world.pods.rates[-1] == 40 * MBIT


async def test_a_device_that_somebody_removes_is_made_anew_at_once(world: World) -> None:
    await world.round()
    before = world.pods.links[GATHER].index
    world.pods.leave(GATHER)
    await world.round()
    await world.round()
    after = world.pods.links[GATHER].index
    assert after != before
    assert world.pods.filters == {"veth-be": after, "veth-second": after}


async def test_a_device_of_the_name_that_is_none_of_ours_stops_everything_and_is_left(world: World) -> None:
    world.pods.links[GATHER] = Link(index=99, name=GATHER, kind="dummy")
    await world.round()
    message = "network: bypassd-be is there, a dummy of somebody else"
    assert world.network.problems() == [message]
    assert world.state("be") == ("refused", message)
    assert (world.pods.filters, world.steps.taken) == ({}, 0)
    assert [result.undo for result in await world.network.restore()] == []
    assert world.pods.links[GATHER].kind == "dummy"


async def test_a_filter_that_the_kernel_refuses_is_told_and_leaves_nothing(world: World) -> None:
    world.pods.refuses = "this kernel has no u32"
    await world.round()
    assert world.state("be") == ("refused", "network: this kernel has no u32")
    assert read_rows(Ledger(world.store), CODEC).sent.redirects == {}
    assert world.pods.disciplines == {}


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"enforce": False}, ("would write", "veth-be")),
        ({"wish": replace(WISH, dry_run=True)}, ("would write", "veth-be")),
        ({"holds": {"node": Hold(target="node", reason="mine", by="me")}}, ("held", "mine (by me)")),
    ],
    ids=["observe", "dry run", "held"],
)
async def test_what_is_not_to_be_done_is_shown(
    world: World, more: Mapping[str, object], state: tuple[str, str]
) -> None:
    await world.round(**more)  # type: ignore[arg-type]  # mypy sees one type for all
    assert world.state("be") == state
    assert world.clean
    assert world.steps.taken == 0
    await world.round()
    assert world.state("be") == ("written", "veth-be"), "at once, as soon as it may be done"


@pytest.mark.parametrize("read", ["veths", "device"])
async def test_what_was_not_read_again_is_not_in_place(
    world: World, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object) -> None:
        raise SourceError("network", "ENOBUFS")

    await world.round()
    await world.round(seconds=40)
    assert world.state("be") == ("in place", "veth-be")
    with monkeypatch.context() as patch:
        patch.setattr(world.pods, read, fails)
        await world.round(seconds=40)
        assert world.state("be") == ("unreadable", "network: ENOBUFS")
    await world.round(seconds=40)
    assert world.state("be") == ("in place", "veth-be")


async def test_a_policy_that_becomes_a_dry_run_redirects_no_more(world: World) -> None:
    both = replace(WISH, receive=True)
    await world.round(wish=both)
    assert not world.clean
    await world.round(wish=replace(both, dry_run=True))
    assert (world.clean, world.state("be")) == (True, ("would write", "veth-be"))
    await world.round(wish=both)
    assert world.state("be") == ("written", "veth-be")


async def test_a_namespace_that_an_online_pod_has_too_is_left_alone(world: World) -> None:
    world.spaces.inodes["mine"] = 100
    await world.round()
    assert world.state("be") == ("blocked", "shares its network namespace with ns/mine")
    assert set(world.pods.filters) == {"veth-second"}


UNTOLD = replace(WISH, interfaces=(InterfaceRequest(name="eth0"),))
NO_SPEED = "eth0: its driver reports no speed; set link_mbit in the configuration"


async def test_nobody_is_led_where_the_links_speed_is_not_known(world: World) -> None:
    await world.round(wish=UNTOLD)
    await world.round(wish=UNTOLD)
    assert (world.clean, world.steps.taken) == (True, 0)
    assert world.state("be") == ("blocked", NO_SPEED)
    assert world.network.problems() == [NO_SPEED]
    world.speed = 100
    await world.rounds(13, wish=UNTOLD)
    assert set(world.pods.filters) == {"veth-be", "veth-second"}
    assert (world.pods.rates[0], world.pods.rates[-1]) == (10 * MBIT, 40 * MBIT)


async def test_all_are_let_go_while_the_interface_is_not_there_or_its_speed_is_taken_out(world: World) -> None:
    world.pods.disciplines["veth-be"] = "clsact"
    eth0 = world.pods.links["eth0"]
    for lost in (WISH, UNTOLD):
        await world.round()
        assert set(world.pods.filters) == {"veth-be", "veth-second"}
        if lost is WISH:
            del world.pods.links["eth0"]
        await world.round(wish=lost)
        assert world.pods.filters == {}
        assert world.pods.disciplines == {"veth-be": "clsact"}, "what was there before stays"
        assert read_rows(Ledger(world.store), CODEC).sent.redirects == {}
        message = "eth0: no such interface" if lost is WISH else NO_SPEED
        assert (world.state("be"), world.network.problems()) == (("blocked", message), [message])
        world.pods.links["eth0"] = eth0
    await world.rounds(13)
    assert world.pods.rates[-1] == 40 * MBIT


async def test_a_link_that_is_down_keeps_its_last_speed_and_another_of_its_name_does_not(world: World) -> None:
    world.speed = 100
    await world.round(wish=UNTOLD)
    world.speed = None
    await world.rounds(12, wish=UNTOLD)
    assert set(world.pods.filters) == {"veth-be", "veth-second"}
    assert world.pods.rates[-1] == 40 * MBIT
    world.pods.links["eth0"] = replace(world.pods.links["eth0"], index=77)
    await world.round(wish=UNTOLD)
    assert world.pods.filters == {}


async def test_what_is_observed_only_is_let_go_of_by_nobody(world: World) -> None:
    await world.round()
    await world.round(wish=UNTOLD, enforce=False)
    assert set(world.pods.filters) == {"veth-be", "veth-second"}
    assert world.state("be") == ("blocked", NO_SPEED)


async def test_a_tree_that_the_kernel_refuses_does_not_keep_the_pods_at_the_floor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(index: int, rates: object) -> None:
        raise SourceError("network", "no cls_bpf")

    monkeypatch.setattr(world.tc, "install", refuse)
    await world.rounds(14, wish=replace(WISH, classes=True))
    assert world.pods.rates[-1] == 40 * MBIT
    assert world.network.problems() == ["eth0: network: no cls_bpf"]


async def test_packets_that_do_not_come_by_are_noticed(world: World) -> None:
    await world.round()
    await world.round(seconds=31)
    world.pods.receive("veth-be", 5 << 20)
    await world.round(seconds=31)
    assert world.state("be")[0] == "blocked"
    assert "XDP" in world.state("be")[1]
    assert world.state("second")[0] == "in place"
    await world.round(BE, MINE)
    assert world.state("be")[0] == "blocked", "the end of another pod shows nothing of its packets"
    await world.round(BE, MINE, seconds=31)
    assert world.state("be")[0] == "in place"


async def test_pods_in_the_hosts_network_and_others_have_one_ceiling_together(world: World) -> None:
    world.spaces.inodes["second"] = HOST
    both = replace(WISH, classes=True)
    await world.rounds(14, wish=both)
    assert (world.tc.rates[2].ceiling, world.pods.rates[-1]) == (20 * MBIT, 20 * MBIT)
    for _ in range(20):
        world.pods.gone_through += world.pods.rates[-1]
        world.tc.sent[2][0] += world.pods.rates[-1]
        await world.round(wish=both)
    assert world.pods.rates[-1] + world.tc.rates[2].ceiling == 40 * MBIT
    assert world.pods.rates[-1] >= 35 * MBIT
    assert world.tc.rates[2].floor == 10 * MBIT
    assert world.network.status()["pods_in_host_network"] == 1


async def test_one_pod_can_be_restored_and_then_all(world: World) -> None:
    await world.round()
    done = await world.network.restore("be")
    assert [(result.path, result.undo) for result in done] == [("veth-be", RestoreOutcome.RESTORED)]
    assert set(world.pods.filters) == {"veth-second"}
    assert await world.network.restore("be") == ()
    done = await world.network.restore()
    assert [(result.path, result.undo) for result in done] == [
        ("veth-second", RestoreOutcome.RESTORED),
        (GATHER, RestoreOutcome.RESTORED),
    ]
    assert world.clean
    assert await world.network.restore() == ()


async def killed_lives(path: Path, steps: Sequence[int], wish: NetworkRequest) -> AsyncIterator[tuple[int, World]]:
    """Worlds whose agent was killed before one of its steps, each with a new agent; the steps that there were."""
    killed = 0
    for left in steps:
        path.joinpath(str(left)).mkdir(parents=True)
        world = World(path / str(left))
        world.steps.left = left
        with contextlib.suppress(Killed):
            await world.round(wish=wish)
            await world.round(online("be"), SECOND, MINE, wish=wish)
            await world.round(wish=None)
        killed += world.steps.taken == left
        world.store.close()
        world.steps.left = None
        world.life()
        yield left, world
        world.store.close()
    assert killed > 0.79 * len(steps), "the steps have become fewer than what is tried"


def assert_restores(world: World) -> None:
    assert all(result.ok for result in restore_network(world.tc, world.both, Ledger(world.store)))
    assert world.clean
    assert restore_network(world.tc, world.both, Ledger(world.store)) == []


@pytest.mark.parametrize("restored", [True, False])
async def test_after_a_kill_at_any_step_restore_leaves_nothing_and_the_next_run_goes_on(
    tmp_path: Path, restored: bool
) -> None:
    async for _, world in killed_lives(tmp_path, range(18), WISH):
        if restored:
            assert_restores(world)
        else:
            await world.round()
            assert set(world.pods.filters) == set(world.pods.disciplines) == {"veth-be", "veth-second"}
            await world.round(wish=None)
            assert world.clean


async def test_a_lost_store_does_not_hide_what_stands(world: World) -> None:
    await world.round()
    world.store.close()
    (world.path / "state.db").unlink()
    world.life()
    done = restore_network(world.tc, world.both, Ledger(world.store))
    assert [result.path for result in done] == ["veth-be", "veth-second", GATHER]
    assert world.clean


async def test_a_discipline_that_was_there_before_stays(world: World) -> None:
    world.pods.disciplines["veth-be"] = "clsact"
    await world.round()
    assert not read_rows(Ledger(world.store), CODEC).sent.redirects["veth-be"].owns_qdisc
    await world.network.restore()
    assert world.pods.disciplines == {"veth-be": "clsact"}


RECEIVE = replace(WISH, receive=True)


def received_state(network: NetworkLoop) -> object:
    fields = network.status()["received"]
    assert isinstance(fields, dict)
    return fields["state"]


async def test_what_be_pods_receive_has_a_ceiling_of_its_own_by_what_the_interface_receives(world: World) -> None:
    received = world.both[1]
    await world.round(wish=RECEIVE)
    device = received.links[RECEIVED_GATHER].index
    assert received.filters == {"veth-be": device, "veth-second": device}
    assert (received.rates, received.queues) == ([10 * MBIT], [40 * MBIT] * 2), "an unknown takes no risk"
    assert {knob: status.state for knob, status in world.network.statuses["/kubepods/besteffort/podbe"].items()} == {
        SHARE: "written",
        RECEIVED_SHARE: "written",
    }
    await world.rounds(12, wish=RECEIVE)
    assert (world.pods.rates[-1], received.rates[-1]) == (40 * MBIT, 40 * MBIT)
    taken = world.steps.taken
    received.receive("eth0", 20 * MBIT)
    await world.round(wish=RECEIVE)
    assert world.steps.taken == taken, "nothing is changed where nothing changes"
    received.receive("eth0", 65 * MBIT)
    await world.round(wish=RECEIVE)
    assert (world.pods.rates[-1], received.rates[-1]) == (40 * MBIT, 15 * MBIT), "each direction by its own use"
    assert received_state(world.network) == "in place"
    assert world.network.status()["received_devices"] == {"veth-be": "be", "veth-second": "second"}
    await world.round(wish=WISH)
    assert (received.filters, world.network.status().get("received")) == ({}, None)
    assert set(world.pods.filters) == {"veth-be", "veth-second"}, "what they send is limited as before"
    await world.round(wish=None)
    assert world.clean
    assert read_rows(Ledger(world.store), CODEC) == NetworkState()


async def test_what_a_pod_receives_may_be_held_alone(world: World) -> None:
    hold = Hold(target=f"file:/kubepods/besteffort/podbe:{RECEIVED_SHARE}", reason="mine", by="me")
    await world.round(wish=RECEIVE, holds={hold.target: hold})
    states = {knob: status.state for knob, status in world.network.statuses["/kubepods/besteffort/podbe"].items()}
    assert states == {SHARE: "written", RECEIVED_SHARE: "held"}
    assert set(world.both[1].filters) == {"veth-second"}


async def test_observe_mode_reports_the_limit_and_changes_nothing(world: World) -> None:
    await world.round(wish=RECEIVE, enforce=False)
    await world.round(wish=RECEIVE, enforce=False)
    assert (world.steps.taken, world.clean) == (0, True)
    status = world.network.statuses["/kubepods/besteffort/podbe"][RECEIVED_SHARE]
    assert (status.state, status.wanted, status.actual) == ("would write", "BE share of what eth0 receives", None)
    assert received_state(world.network) == "would limit what BE pods receive to 1250000 to 5000000 bytes/s"


@pytest.mark.parametrize("dry_run", [False, True], ids=["observe", "dry run"])
async def test_what_was_only_shown_is_no_more_once_it_is_switched_off(world: World, *, dry_run: bool) -> None:
    shown = replace(RECEIVE, dry_run=dry_run)
    await world.round(wish=shown, enforce=dry_run)
    await world.round(wish=replace(shown, receive=False), enforce=dry_run)
    knobs = {knob for statuses in world.network.statuses.values() for knob in statuses}
    assert knobs == {SHARE}
    await world.round(wish=None, enforce=dry_run)
    assert not any(world.network.statuses.values())
    await world.round(wish=shown, enforce=dry_run)
    assert world.state("be")[0] == "would write"


async def test_received_packets_that_pass_by_our_filter_are_reported(world: World) -> None:
    await world.round(wish=RECEIVE)
    await world.round(wish=RECEIVE, seconds=40)
    world.pods.deliver("veth-be", 3 << 20)
    await world.round(wish=RECEIVE, seconds=40)
    status = world.network.statuses["/kubepods/besteffort/podbe"]
    assert status[RECEIVED_SHARE].state == "blocked"
    assert "bypassed by its packets" in status[RECEIVED_SHARE].detail
    assert status[SHARE].state == "in place"


async def test_received_packets_that_are_handed_past_the_device_are_reported_while_they_are(world: World) -> None:
    await world.round(wish=RECEIVE)
    for past, state in ((0, "in place"), (9 << 20, "blocked"), (9 << 20, "in place"), (10 << 20, "in place")):
        world.both[1].past = {"veth-be": past}
        await world.round(wish=RECEIVE, seconds=40)
        status = world.network.statuses["/kubepods/besteffort/podbe"]
        assert (status[RECEIVED_SHARE].state, status[SHARE].state) == (state, "in place")
        assert ("bpf_redirect_peer" in status[RECEIVED_SHARE].detail) == (state == "blocked")


async def test_a_kernel_without_a_side_for_received_packets_says_so(world: World) -> None:
    world.both[1].refuses = "veth-be: this kernel has no clsact (CONFIG_NET_SCH_INGRESS)"
    await world.round(wish=RECEIVE)
    assert world.network.statuses["/kubepods/besteffort/podbe"][RECEIVED_SHARE].state == "refused"
    assert world.network.statuses["/kubepods/besteffort/podbe"][SHARE].state == "written"
    assert world.both[1].filters == {}


async def test_after_a_kill_at_any_step_of_both_directions_restore_leaves_nothing(tmp_path: Path) -> None:
    async for left, world in killed_lives(tmp_path, range(1, 32, 3), RECEIVE):
        if left % 2:
            await world.round(wish=RECEIVE)
            for side in world.both:
                assert set(side.filters) == {"veth-be", "veth-second"}
        assert_restores(world)
