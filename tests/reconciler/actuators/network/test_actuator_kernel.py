"""The HTB tree of a real interface: two network namespaces of the test's own, a veth pair between, and real senders."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL
from cgroupfs.knobs import CATALOG
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.network.actuator import CODEC, restore_network
from reconciler.actuators.network.tc import ClassRates, RealTc, load_classifier
from reconciler.control.network_loop import NetworkLoop
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.network import BE_CLASS, HANDLE, Direction, InterfaceRequest, NetworkRequest
from state.store import Store
from tests.fakes.cables import FakeSpaces
from tests.real_cgroups import mount_of, remove_tree
from tests.reconciler.actuators.netns import ip, library, namespace, pod_tc
from tests.reconciler.actuators.network.test_actuator import situation

MBIT = 125_000
LINK = 80
SENDER = """
import ctypes, os, socket, sys, time
namespace, group, port = sys.argv[1:]
number = os.open(namespace, os.O_RDONLY)
if ctypes.CDLL(None).setns(number, 0x40000000):
    sys.exit("setns")
if group:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
end = socket.socket()
end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
end.connect(("10.213.0.2", int(port)))
block = bytes(1 << 14)
def send(seconds):
    sent, since = 0, time.monotonic()
    while (now := time.monotonic()) - since < seconds:
        sent += end.send(block)
    return sent / (now - since)
send(0.5)
print(send(1.0))
"""
RECEIVER = """
import ctypes, os, selectors, socket, sys
number = os.open(sys.argv[1], os.O_RDONLY)
if ctypes.CDLL(None).setns(number, 0x40000000):
    sys.exit("setns")
every = selectors.DefaultSelector()
for port in sys.argv[2:]:
    one = socket.create_server(("10.213.0.2", int(port)))
    every.register(one, selectors.EVENT_READ, True)
print("ready", flush=True)
while True:
    for key, _ in every.select():
        if key.data:
            every.register(key.fileobj.accept()[0], selectors.EVENT_READ, False)
        elif not key.fileobj.recv(1 << 18):
            every.unregister(key.fileobj)
            key.fileobj.close()
"""


class Cable:
    """``left`` and ``right``: namespaces joined by a cable whose left end is ``v0``."""

    def __init__(self, left: str, right: str, group: str, path: Path) -> None:
        self.left, self.right, self.group = f"/run/netns/{left}", f"/run/netns/{right}", group
        self.tc = RealTc(partial(library, left))
        self.store = Store(str(path / "state.db"))
        self.both = pod_tc(left), pod_tc(left, Direction.RECEIVED)
        self.network = NetworkLoop(
            self.tc,
            self.both,
            lambda: FakeSpaces({}),
            Ledger(self.store),
            trio.CapacityLimiter(1),
            speed=lambda _name: None,
        )

    async def rates(self, *senders: str) -> list[float]:
        """Megabits a second that each of ``be`` and ``online`` gets through when all send at once."""
        command = [sys.executable, "-c", RECEIVER, self.right, "7001", "7002"]
        receiver = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        values: dict[int, float] = {}

        async def send(number: int, which: str) -> None:
            group = self.group if which == "be" else ""
            port = "7001" if which == "be" else "7002"
            done = await trio.run_process([sys.executable, "-c", SENDER, self.left, group, port], capture_stdout=True)
            values[number] = float(done.stdout) / MBIT

        try:
            assert receiver.stdout is not None
            with trio.fail_after(60):
                assert (await receiver.stdout.receive_some()).startswith(b"ready")
                async with trio.open_nursery() as nursery:
                    for number, which in enumerate(senders):
                        nursery.start_soon(send, number, which)
        finally:
            receiver.kill()
            await receiver.wait()
        return [values[number] for number in range(len(senders))]


def _net_cls(stack: ExitStack, path: Path) -> str:
    """A net_cls group of the BE class; the hierarchy is mounted for the test where it is not."""
    try:
        mount = mount_of("net_cls")
    except pytest.skip.Exception:
        mount = str(path / "net_cls")
        os.mkdir(mount)
        done = subprocess.run(
            ["mount", "-t", "cgroup", "-o", "net_cls", "none", mount], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: net_cls cannot be mounted: {done.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", mount], check=False)
    group = f"{mount}/bypassd-test-network-{os.getpid()}"
    os.mkdir(group)
    stack.callback(remove_tree, group)
    knob = CATALOG["net.classid"]
    assert knob.probe(1, REAL.files(group))
    REAL.write(group, "net_cls.classid", knob.encode(BE_CLASS, 1))
    assert knob.decode(REAL.read(group, "net_cls.classid"), 1) == BE_CLASS
    os.mkdir(f"{group}/newcomer")
    assert knob.decode(REAL.read(f"{group}/newcomer", "net_cls.classid"), 1) == BE_CLASS
    return group


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Cable]:
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    try:
        os.close(load_classifier())
    except SourceError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
    with ExitStack() as stack:
        group = _net_cls(stack, tmp_path)
        left, right = (namespace(stack, side) for side in ("left", "right"))
        ip("-n", left, "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", right)
        for name, end, address in ((left, "v0", "10.213.0.1/24"), (right, "v1", "10.213.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", end)
            ip("-n", name, "link", "set", end, "up")
        made = Cable(left, right, group, tmp_path)
        stack.callback(made.store.close)
        yield made


def wanted() -> PlanSnapshot:
    interface = InterfaceRequest(name="v0", link_mbit=LINK)
    now = situation("v0")
    return replace(now, plan=replace(now.plan, network=NetworkRequest(interfaces=(interface,), interval_s=0.2)))


@pytest.mark.kernel
@pytest.mark.quiet
async def test_be_is_held_to_its_ceiling_and_gives_way_to_online_work(cable: Cable) -> None:
    network = cable.network
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        network.planned(wanted())
        with trio.fail_after(60):
            while network.lines.get("v0") is None or network.lines["v0"].ceiling < 32 * MBIT:  # a law has no event
                assert network.problems() == []
                await trio.sleep(0.05)
        (alone,) = await cable.rates("be")
        assert 10 < alone < 45, f"a ceiling of 32 Mbit/s: {alone:.1f}"
        be, online = await cable.rates("be", "online")
        assert online > 45, f"{LINK - 8} of {LINK} Mbit/s are guaranteed: {online:.1f} beside {be:.1f}"
        assert 1 < be < 25, f"a floor of 8 Mbit/s: {be:.1f} beside {online:.1f}"
        (online_alone,) = await cable.rates("online")
        assert online_alone > 50, f"online may have it all: {online_alone:.1f}"
        nursery.cancel_scope.cancel()
    done = await network.restore()
    assert [(result.path, result.undo, result.text) for result in done] == [("v0", RestoreOutcome.RESTORED, "noqueue")]
    root = cable.tc.root("v0")
    assert root is not None
    assert (root.kind, root.handle) == ("noqueue", 0)
    assert read_rows(Ledger(cable.store), CODEC).roots == {}


@pytest.mark.kernel
async def test_a_tree_of_which_only_a_part_was_made_is_completed_and_removed_without_a_daemon(cable: Cable) -> None:
    await cable.network._round(wanted())
    root = cable.tc.root("v0")
    assert root is not None
    assert (root.ours, root.complete, root.handle) == (True, True, HANDLE)
    with cable.tc._connect() as link:
        link.tc("del-filter", "bpf", root.index, handle=1, parent=HANDLE, prio=1, protocol=3)
    part = cable.tc.root("v0")
    assert part is not None
    assert (part.ours, part.complete) == (True, False)
    await trio.sleep(0.2)  # a round before the law's next step reads no tree
    await cable.network._round(wanted())
    again = cable.tc.root("v0")
    assert again == root
    for rates in (
        ClassRates(link=80 * MBIT, floor=8 * MBIT, ceiling=20 * MBIT),
        ClassRates(link=100_000 * MBIT, floor=40_000 * MBIT, ceiling=50_000 * MBIT),
    ):
        cable.tc.change(root.index, rates)
        counters = cable.tc.counted(root.index, rates)
        assert counters is not None
        assert counters.as_set, "also of more than 32 bits"
        other = cable.tc.counted(root.index, replace(rates, ceiling=rates.ceiling + 1))
        assert other is not None
        assert not other.as_set
    done = restore_network(cable.tc, cable.both, Ledger(cable.store))
    assert [(result.path, result.undo) for result in done] == [("v0", RestoreOutcome.RESTORED)]
    assert restore_network(cable.tc, cable.both, Ledger(cable.store)) == []
    assert cable.tc.root("nothing") is None


@pytest.mark.kernel
async def test_a_root_that_somebody_has_set_is_left_alone(cable: Cable) -> None:
    root = cable.tc.root("v0")
    assert root is not None
    with cable.tc._connect() as link:
        link.tc("add", "tbf", root.index, 0x1_0000, rate="100mbit", latency="50ms", burst=10_000)
    await cable.network._round(wanted())
    assert cable.network.problems() == ["v0: its root qdisc tbf belongs to another program: unchanged"]
    with pytest.raises(SourceError, match="belongs to another program"):
        cable.tc.install(root.index, ClassRates(link=1, floor=1, ceiling=1))
    assert await cable.network.restore() == ()
