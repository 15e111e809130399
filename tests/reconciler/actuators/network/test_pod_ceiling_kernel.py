"""Redirects of a pod's packets on the running kernel: namespaces of the test's own, filters of others, and kills."""

import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.network.actuator import CODEC, NetworkState, restore_network
from reconciler.actuators.network.namespaces import RealNetworkNamespaces
from reconciler.actuators.network.netlink import Links
from reconciler.actuators.network.tc import connected, load_program
from reconciler.actuators.network.tc_pods import IfbState, RealPodTc, VethFilters
from reconciler.control.network_loop import NetworkLoop
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.model import Container, ContainerKind, GroupRef, Phase
from state.network import GATHER, RECEIVED_GATHER, RECEIVED_SHARE, SHARE, Direction, InterfaceRequest, NetworkRequest
from state.store import Store
from tests.fakes.cables import FakeSpaces
from tests.real_cgroups import mount_of, remove_tree
from tests.reconciler.actuators.netns import inside, ip, library, namespace, plain, pod_tc
from tests.reconciler.actuators.network.test_actuator import FakeTc, Killed, situation
from tests.reconciler.actuators.network.test_pod_ceiling import received_state
from tests.reconciler.nodes import node, pod

pytestmark = pytest.mark.kernel
MBIT = 125_000
_REDIRECT_PEER = 155
"""Source: bpf-helpers(7)."""


class World:
    """A host's namespace with a cable ``veth-be`` into a pod's."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self.host, self.pod = namespace(stack, "host"), namespace(stack, "pod")
        ip("-n", self.host, "link", "add", "eth0", "type", "veth", "peer", "name", "far")
        ip("-n", self.host, "link", "add", "veth-be", "type", "veth", "peer", "name", "eth0", "netns", self.pod)
        self.tc, self.received = self.both = pod_tc(self.host), pod_tc(self.host, Direction.RECEIVED)
        self.file = os.open(f"/run/netns/{self.pod}", os.O_RDONLY)
        stack.callback(os.close, self.file)
        self.path = path
        self.store = Store(str(path / "state.db"))
        stack.callback(self.end)
        self.clean = self.dump()

    def end(self) -> None:
        self.store.close()

    def again(self) -> None:
        self.end()
        self.store = Store(str(self.path / "state.db"))

    def network(self, pods: tuple[RealPodTc, RealPodTc] | None = None) -> NetworkLoop:
        # Its namespace's file is all that the kernel gets; the fake takes one number for both.
        spaces = FakeSpaces({"be": self.file})
        roots = FakeTc(eth0="noqueue")
        return NetworkLoop(roots, pods or self.both, lambda: spaces, Ledger(self.store), trio.CapacityLimiter(1))

    def killed(self, left: list[int]) -> tuple[RealPodTc, RealPodTc]:
        """The kernel, until so many changes are made."""

        def counting() -> Counting:
            return Counting(library(self.host), left)

        sent, received = (
            RealPodTc(direction, counting, lambda: Links(partial(plain, self.host))) for direction in Direction
        )
        return sent, received

    def tc_command(self, *message: str, lines: str | None = None) -> str:
        with inside(self.host):
            done = subprocess.run(["tc", *message], input=lines, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def link_state(self) -> str:
        """The cable's operational state, as the host sees it."""
        with inside(self.host):
            message = ["ip", "-br", "link", "show", "veth-be"]
            return subprocess.run(message, capture_output=True, text=True, check=True).stdout.split()[1]

    def dump(self) -> str:
        """Everything of traffic control, and the devices."""
        with inside(self.host):
            text = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
        shown = ["qdisc show"]
        for name in ("eth0", "veth-be", GATHER, RECEIVED_GATHER):
            if f"{name} " in text or f"{name}@" in text:
                filters = f"filter show dev {name}"
                shown += [f"class show dev {name}", filters, f"{filters} ingress", f"{filters} egress"]
        return text + self.tc_command("-batch", "-", lines="\n".join(shown) + "\n")

    @property
    def index(self) -> int:
        link = self.tc.device("veth-be")
        assert link is not None
        return link.index

    @property
    def gather(self) -> int:
        ifb_state = self.tc.ifb()
        assert ifb_state is not None
        return ifb_state.index

    def entry(self) -> VethFilters:
        return self.tc.filters_of([self.index])[self.index]

    @property
    def led(self) -> bool:
        gather = self.tc.ifb()
        assert gather is not None
        return gather.complete and self.entry().redirects_to == gather.index


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    with ExitStack() as stack:
        made = World(stack, tmp_path)
        try:
            made.tc.make(MBIT)
            made.tc.unmake()
        except SourceError as exc:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
        yield made


def wanted(*, on: bool = True, receive: bool = False) -> PlanSnapshot:
    now = situation("eth0")
    wish = NetworkRequest(
        interfaces=(InterfaceRequest(name="eth0", link_mbit=100),), classes=False, pods_by="eth0", receive=receive
    )
    return replace(now, view=node(pod("be")), plan=replace(now.plan, network=wish if on else None))


async def test_a_cable_is_found_from_outside_and_its_packets_are_led(world: World) -> None:
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        links = world.tc.veths({"be": world.file, "host": own})
    finally:
        os.close(own)
    assert [link.name for link in links["be"]] == ["veth-be"]
    assert links["host"] == (), "no cable leads there"
    network = world.network()
    await network._round(wanted())
    assert world.led
    assert (world.tc.ifb(), world.entry()) == (
        IfbState(index=world.gather, complete=True),
        VethFilters(kind="clsact", redirects_to=world.gather),
    )
    classes = world.tc_command("class", "show", "dev", GATHER)
    assert "4250:1 root rate 10Mbit ceil 10Mbit" in classes
    assert "4250:101 parent 4250:1" in classes
    assert "input dev veth-be" in world.tc_command("filter", "show", "dev", GATHER)
    await network._round(wanted(on=False))
    assert world.dump() == world.clean
    assert read_rows(Ledger(world.store), CODEC) == NetworkState()


class Counting:
    """A library's socket, of which so many changes of the kernel are made before the process is killed."""

    def __init__(self, made: Any, left: list[int]) -> None:  # pyroute2 has no types
        self._made = made
        self._left = left

    def __enter__(self) -> Self:
        self._made.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._made.__exit__(*what)

    def __getattr__(self, name: str) -> Any:  # as above
        return getattr(self._made, name)

    def tc(self, *message: Any, **more: Any) -> Any:
        self._change()
        return self._made.tc(*message, **more)

    def link(self, *message: Any, **more: Any) -> Any:
        self._change()
        return self._made.link(*message, **more)

    def _change(self) -> None:
        if self._left[0] == 0:
            raise Killed
        self._left[0] -= 1


async def test_after_a_kill_before_any_change_of_the_kernel_restore_gives_everything_back(world: World) -> None:
    ended = []
    for steps in range(1, 26, 2):
        left = [steps]
        network = world.network(world.killed(left))
        with contextlib.suppress(Killed):
            await network._round(wanted(receive=True))
            await network._round(wanted(on=False))
            ended.append(steps)
        world.again()
        assert all(result.ok for result in restore_network(FakeTc(), world.both, Ledger(world.store)))
        assert world.dump() == world.clean, f"killed before change {steps + 1}"
    assert ended, "there are more steps than were tried"
    assert len(ended) < 4, "the steps have become fewer than what is tried"


async def test_a_filter_of_somebody_else_is_left_alone_and_ours_goes_when_one_comes(world: World) -> None:
    world.tc_command("qdisc", "add", "dev", "veth-be", "clsact")
    before = world.dump()
    theirs = ("filter", "add", "dev", "veth-be", "ingress", "pref", "7", "protocol", "all")
    network = world.network()
    await network._round(wanted())
    assert world.led, "an empty discipline is in nobody's way"
    world.tc_command(*theirs, "u32", "match", "u32", "0", "0")
    network._pods.forget_rates()
    await network._round(wanted())
    entry = world.entry()
    assert (entry.redirects_to, entry.foreign) == (None, "a filter of another program (u32, pref 7)")
    standing = network.statuses["/kubepods/besteffort/podbe"][SHARE]
    assert (standing.state, standing.detail) == ("blocked", "veth-be: a filter of another program (u32, pref 7)")
    with pytest.raises(SourceError, match="belongs to another program"):
        world.tc.redirect("veth-be", world.index, world.gather, 1, MBIT)
    await network.restore()
    assert "pref 7" in world.dump()
    world.tc_command("filter", "del", "dev", "veth-be", "ingress", "pref", "7")
    assert world.dump() == before, "the discipline was there before us"


async def test_what_was_led_to_a_device_that_is_gone_is_led_to_the_new_one(world: World) -> None:
    network = world.network()
    await network._round(wanted())
    ip("-n", world.host, "link", "del", GATHER)
    assert world.entry().redirects_to == 0
    await network._round(wanted())
    network._last = (None, 0.0)
    await network._round(wanted())
    await network._round(wanted())
    assert world.led
    assert all(result.ok for result in await network.restore())
    assert world.dump() == world.clean


async def test_a_lost_store_does_not_hide_what_stands(world: World) -> None:
    await world.network()._round(wanted())
    world.store.close()
    (world.path / "state.db").unlink()
    world.store = Store(str(world.path / "state.db"))
    done = restore_network(FakeTc(), world.both, Ledger(world.store))
    assert {result.path: result.undo for result in done} == {
        "veth-be": RestoreOutcome.RESTORED,
        GATHER: RestoreOutcome.RESTORED,
    }
    assert world.dump() == world.clean


async def test_a_device_of_the_name_that_is_no_ifb_is_left(world: World) -> None:
    ip("-n", world.host, "link", "add", GATHER, "type", "veth", "peer", "name", "near")
    network = world.network()
    await network._round(wanted())
    assert network.problems() == ["network: bypassd-be exists as a veth of another program"]
    assert restore_network(FakeTc(), world.both, Ledger(world.store)) == []
    link = world.tc.device(GATHER)
    assert link is not None
    assert link.kind == "veth"


async def test_a_pod_that_goes_takes_its_cable_with_it(world: World) -> None:
    network = world.network()
    await network._round(wanted())
    ip("-n", world.host, "link", "del", "veth-be")
    now = wanted()
    await network._round(replace(now, view=node()))
    assert read_rows(Ledger(world.store), CODEC).sent.redirects == {}
    assert network.problems() == []
    assert "4250:101" not in world.tc_command("class", "show", "dev", GATHER)
    assert "input dev" not in world.tc_command("filter", "show", "dev", GATHER)


def rate_of(world: World, index: int) -> int | None:
    counters = world.tc.counted(index)
    return None if counters is None else counters.rate


def test_a_links_rate_may_be_more_than_32_bits(world: World) -> None:
    index = world.tc.make(125_000_000_000)
    assert "4250:1 root rate 1Tbit ceil 1Tbit" in world.tc_command("class", "show", "dev", GATHER)
    assert rate_of(world, index) == 125_000_000_000
    world.tc.rate(index, 1_000)
    assert "4250:1 root rate 8Kbit ceil 8Kbit" in world.tc_command("class", "show", "dev", GATHER)
    assert rate_of(world, index) == 1_000


def make_group(path: str) -> None:
    """A group that processes can be in, and those above it."""
    if not os.path.isdir(path):
        make_group(os.path.dirname(path))
        os.mkdir(path)
        for file in ("cpuset.cpus", "cpuset.mems"):
            with contextlib.suppress(FileNotFoundError):
                Path(path, file).write_text(Path(os.path.dirname(path), file).read_text())


def test_the_namespace_of_a_pod_is_that_of_its_pause_process(tmp_path: Path) -> None:
    """What runs in a container may have entered another one."""
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    hierarchy = Hierarchy.detect()
    top = f"{mount_of(hierarchy.trigger)}/bypassd-test-spaces-{os.getpid()}"
    with ExitStack() as stack:
        stack.callback(remove_tree, top)
        started = {}
        for name, flags in (("pause", ["--net"]), ("main", [])):
            make_group(f"{top}/{name}")
            process = subprocess.Popen(["unshare", *flags, "sleep", "600"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            Path(f"{top}/{name}/cgroup.procs").write_text(str(process.pid))
            started[name] = process.pid
        path = f"/{os.path.basename(top)}"
        kinds = {"main": ContainerKind.APP, "pause": ContainerKind.SANDBOX}
        boxes = tuple(
            Container(id=name, kind=kind, group=GroupRef(path=f"{path}/{name}")) for name, kind in kinds.items()
        )
        item = replace(pod("a"), containers=boxes, group=GroupRef(path=path))
        early = replace(item, uid="b", containers=(replace(boxes[0], phase=Phase.CREATING),))
        deadline = time.monotonic() + 60
        while os.stat(f"/proc/{started['pause']}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with RealNetworkNamespaces(hierarchy) as spaces:
            namespaces = spaces.of([item, early, pod("gone")])
            assert spaces.own == os.stat("/proc/self/ns/net").st_ino
            assert {uid: space.inode for uid, space in namespaces.items()} == {
                "a": os.stat(f"/proc/{started['pause']}/ns/net").st_ino
            }
            file = namespaces["a"].file
            assert os.fstat(file).st_ino == namespaces["a"].inode
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


def deliver(world: World, count: int, address: str = "10.215.0.2") -> None:
    """So many packets of 1,000 bytes of payload for an address, the pod's, without an answer."""
    with inside(world.host), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(bytes(1000), (address, 9))


def connect(world: World) -> None:
    """Addresses, and a neighbour entry: no other packet than the test's own is on the cable."""
    ip("-n", world.host, "addr", "add", "10.215.0.1/24", "dev", "veth-be")
    ip("-n", world.host, "link", "set", "veth-be", "up", "arp", "off")
    ip("-n", world.pod, "link", "set", "eth0", "up", "arp", "off")
    deadline = time.monotonic() + 20
    while world.link_state() != "UP":
        # The kernel reports the other end's state by a task of its own, up to a second later.
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pod_received(world: World) -> int:
    """Packets, in the pod's own namespace."""
    with inside(world.pod):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(counters[1])


async def test_packets_to_a_pod_pass_our_device_once_and_then_the_qdisc_of_others(world: World) -> None:
    world.tc_command(
        "qdisc", "add", "dev", "veth-be", "root", "tbf", "rate", "1gbit", "burst", "64k", "latency", "25ms"
    )
    connect(world)
    clean = world.dump()
    network = world.network()
    await network._round(wanted(receive=True))
    gather = world.received.ifb()
    assert gather is not None
    entry = world.received.filters_of([world.index])[world.index]
    assert (entry.kind, entry.redirects_to, entry.other_side) == ("clsact", gather.index, True)
    assert world.led, "what it sends is limited as before"
    assert "input dev veth-be" in world.tc_command("filter", "show", "dev", RECEIVED_GATHER)
    (leaf,) = (
        line for line in world.tc_command("qdisc", "show", "dev", RECEIVED_GATHER).splitlines() if "bfifo" in line
    )
    assert "parent 4250:101 limit 128Kb" in leaf
    states = network.statuses["/kubepods/besteffort/podbe"]
    assert {knob: status.state for knob, status in states.items()} == {SHARE: "written", RECEIVED_SHARE: "written"}
    before, arrived = world.received.filters_of([world.index])[world.index].redirected_bytes, pod_received(world)
    deliver(world, 50)
    deadline = time.monotonic() + 30
    while pod_received(world) - arrived < 50:
        assert time.monotonic() < deadline, world.tc_command("-s", "class", "show", "dev", RECEIVED_GATHER)
        await trio.sleep(0.01)
    passed = world.received.filters_of([world.index])[world.index].redirected_bytes - before
    assert 50 * 1042 <= passed < 100 * 1042, "each packet once: what our device returns is not redirected again"
    counters = world.received.counted(gather.index)
    assert counters is not None
    assert counters.sent >= 50 * 1042
    counted = world.tc_command("-s", "qdisc", "show", "dev", "veth-be", "root")
    assert int(counted.split("Sent ")[1].split()[0]) >= 50 * 1042, "the qdisc of another program applies as before"
    assert all(result.ok for result in await network.restore())
    assert world.dump() == clean


def hand_past(world: World) -> None:
    """A program at another device of the host, which hands each packet there to the pod past the pod's cable."""
    mov, call, end = 0xB7, 0x85, 0x95
    code = struct.pack("<" + "BBhi" * 4, mov, 1, 0, world.index, mov, 2, 0, 0, call, 0, 0, _REDIRECT_PEER, end, 0, 0, 0)
    program, near = load_program(code), world.tc.devices()["eth0"].index
    try:
        with connected(partial(library, world.host), "eth0") as link:
            link.tc("add", "clsact", near)
            link.tc("add-filter", "bpf", near, parent=0xFFFF_FFF2, prio=1, protocol=3, fd=program, name="p", flags=1)
    finally:
        os.close(program)


async def test_packets_that_a_program_hands_to_the_pod_are_known_by_the_counters_of_its_end(world: World) -> None:
    connect(world)
    network = world.network()
    await network._round(wanted(receive=True))
    veth = world.tc.devices()["veth-be"]
    deliver(world, 20)
    # The two ends are read one after the other: what arrives in between is counted at one of them.
    deadline = time.monotonic() + 30
    while world.received.handed_past([veth]) != {veth.index: 0}:
        assert time.monotonic() < deadline, "what passes the device"
        await trio.sleep(0.01)
    hand_past(world)
    ip("-n", world.host, "addr", "add", "10.216.0.1/24", "dev", "far")
    for name in ("far", "eth0"):
        ip("-n", world.host, "link", "set", name, "up", "arp", "off")
    arrived = pod_received(world)
    deliver(world, 20, "10.216.0.2")
    if pod_received(world) == arrived:
        pytest.skip("REAL KERNEL TEST NOT RUN: before Linux 6.7 nothing counts what bpf_redirect_peer hands over")
    assert world.received.handed_past([veth])[veth.index] >= 20 * 1000
    assert all(result.ok for result in await network.restore())


async def test_a_burst_for_a_pod_waits_in_a_queue_of_bytes_and_the_rest_is_dropped(world: World) -> None:
    connect(world)
    network = world.network()
    await network._round(wanted(receive=True))
    gather = world.received.ifb()
    assert gather is not None
    world.received.rate(gather.index, 1_000)
    deliver(world, 400)
    (shown,) = (
        text
        for text in world.tc_command("-s", "qdisc", "show", "dev", RECEIVED_GATHER).split("qdisc ")
        if "bfifo" in text
    )
    backlog = shown.split("backlog ")[1].split()[0]
    assert int(backlog.removesuffix("b").replace("K", "000")) <= 128 << 10
    assert int(shown.split("dropped ")[1].split(",")[0]) > 200
    assert all(result.ok for result in await network.restore())


@pytest.mark.parametrize(
    ("kind", "side", "words"),
    [
        ("clsact", "egress", "a filter of another program (u32, pref 7)"),
        ("clsact", "ingress", "a filter of another program (u32, pref 7) for packets from the pod"),
        ("ingress", "", "a queueing discipline ingress"),
    ],
)
async def test_received_packets_are_not_led_where_another_program_has_the_cable(
    world: World, kind: str, side: str, words: str
) -> None:
    """That of the bandwidth plug-in is of kind ingress, and has no side for packets to the pod."""
    world.tc_command("qdisc", "add", "dev", "veth-be", kind)
    if side:
        world.tc_command(
            "filter", "add", "dev", "veth-be", side, "pref", "7", "protocol", "all", "u32", "match", "u32", "0", "0"
        )
    before = world.dump()
    network = world.network()
    await network._round(wanted(receive=True))
    status = network.statuses["/kubepods/besteffort/podbe"][RECEIVED_SHARE]
    assert (status.state, status.detail) == ("blocked", f"veth-be: {words}")
    assert received_state(network) == "no pod is limited"
    await network.restore()
    assert world.dump() == before
    gather = world.received.make(MBIT)
    with pytest.raises(SourceError, match="belongs to another program"):
        world.received.redirect("veth-be", world.index, gather, 1, MBIT)
    world.received.unmake()
    assert world.dump() == before
