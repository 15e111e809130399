"""BE pods with a network of their own, under a running daemon: real namespaces, a real link, real connections."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from state.network import BE_CLASS
from tests.daemon.netland import Netland
from tests.daemon.process import Daemon, wait_for
from tests.fakes.node import DirectoryNode

pytestmark = pytest.mark.quiet
Make = Callable[..., Daemon]
FULL = bool(os.environ.get("BYPASSD_FULL"))
LONG = 5.0 if FULL else 0.8
LINK = 80
CEILING, FLOOR = 0.4 * LINK, 0.1 * LINK


@pytest.fixture
def land(node: DirectoryNode) -> Iterator[Netland]:
    with Netland(node, link_mbit=LINK) as made:
        yield made


def started(daemon: Make, land: Netland, **more: Any) -> Daemon:
    rule = {"name": "eth0", "link_mbit": LINK}
    policies = {"network": {"enabled": True, "interfaces": [rule], **more}}
    item = daemon(policies=policies, kubelet={"endpoint": "off"}, constants={"policies.network.interval_s": 0.1})
    item.host = land.host
    return item


def network(daemon: Daemon) -> dict[str, Any]:
    fields: dict[str, Any] = daemon.state("sides")["sides"].get("network", {})
    return fields


def risen(daemon: Daemon) -> bool:
    """BE's ceiling is at its top: no online pod uses the link."""
    line = network(daemon).get("interfaces", {}).get("eth0", {})
    return bool(line.get("be_ceiling", 0) >= CEILING * 125_000)


def restore(daemon: Daemon) -> str:
    """``bypassctl restore`` while no daemon runs."""
    done = daemon.control("restore")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_be_pods_share_their_ceiling_and_online_pods_keep_theirs(
    node: DirectoryNode, daemon: Make, land: Netland
) -> None:
    be, second, online = node.add("be"), node.add("second"), node.add("online", qos="burstable", shares=1024)
    devices = {land.join(pod): pod.uid for pod in (be, second)}
    land.join(online)
    clean = land.traffic_control()
    unheld, beside = land.send((be, land.groups(be)), (online, land.groups(online)), seconds=LONG)
    item = started(daemon, land).up()
    wait_for(lambda: network(item).get("pods_devices") == devices, told=item.tail)
    wait_for(lambda: risen(item), told=item.tail)
    (alone,) = land.send((be, land.groups(be)), seconds=LONG)
    held, kept = land.send((be, land.groups(be)), (online, land.groups(online)), seconds=2 * LONG)
    standing = item.standing(be.group, "net.share")
    assert (standing["state"], standing["wanted"]) == ("written", "BE share of eth0"), standing
    assert item.standing(online.group, "net.share") == {}
    # Fail static: what held BE pods before the crash holds them after it.
    wait_for(lambda: risen(item), told=item.tail)
    item.kill()
    two = land.send(*((pod, land.groups(pod)) for pod in (be, second, second)), seconds=LONG)
    print(
        f"\nlink {LINK}: without the agent BE {unheld:.1f} online {beside:.1f}; with it BE alone {alone:.1f} of "
        f"{CEILING:.0f}, two BE {two[0]:.1f}+({two[1]:.1f}+{two[2]:.1f}), BE {held:.1f} beside online {kept:.1f}"
    )
    assert 0.6 * CEILING < alone < 1.1 * CEILING
    assert 0.6 * CEILING < sum(two) < 1.1 * CEILING, "they share one ceiling"
    assert two[0] > 0.4 * sum(two), "a pod gets no more by having more connections"
    assert kept > 0.7 * LINK
    # Without the agent BE took more than with it; how much more is the machine's noise.
    assert held < 2 * FLOOR
    assert held < unheld
    assert land.traffic_control() != clean
    said = restore(item)
    assert "bypassd-be" in said
    assert land.traffic_control() == clean
    assert "nothing to restore" in restore(item)


def test_what_a_be_pod_receives_stays_below_its_ceiling(node: DirectoryNode, daemon: Make, land: Netland) -> None:
    pod = node.add("be")
    cable = land.join(pod)
    clean = land.traffic_control()
    without = land.receive(pod, seconds=LONG)
    item = started(daemon, land, receive=True).up()
    wait_for(lambda: network(item).get("received_devices") == {cable: pod.uid}, told=item.tail)
    wait_for(lambda: network(item)["received"]["be_ceiling"] >= CEILING * 125_000, told=item.tail)
    limited = land.receive(pod, seconds=LONG)
    status = item.standing(pod.group, "net.receive_share")
    assert (status["state"], status["wanted"]) == ("written", "BE share of what eth0 receives"), status
    print(f"\nlink {LINK}: a BE pod receives {without:.1f}, with the agent {limited:.1f} of {CEILING:.0f}")
    assert FLOOR / 2 < limited < 1.1 * CEILING
    assert limited < without
    item.kill()
    restore(item)
    assert land.traffic_control() == clean


def test_pods_in_the_hosts_network_share_the_same_ceiling_where_there_is_net_cls(
    node: DirectoryNode, daemon: Make, land: Netland
) -> None:
    mount = land.net_cls()
    host, own = node.add("host"), node.add("own")
    for pod in (host, own):
        land.groups_in(mount, pod.group, *(box.group for box in pod.boxes))
    land.stay(host)
    cable = land.join(own)
    clean = land.traffic_control()
    item = started(daemon, land).up()
    wait_for(lambda: network(item).get("pods_devices") == {cable: own.uid}, told=item.tail)
    assert network(item)["pods_in_host_network"] == 1
    wait_for(lambda: risen(item), told=item.tail)
    groups = {pod.uid: [f"{mount}{pod.main.group}", *land.groups(pod)] for pod in (host, own)}
    wait_for(lambda: item.standing(host.main.group, "net.classid").get("actual") == str(BE_CLASS), told=item.tail)
    (by_class,) = land.send((host, groups[host.uid]), seconds=LONG)
    both = land.send((own, groups[own.uid]), (host, groups[host.uid]), seconds=LONG)
    print(f"\nceiling {CEILING:.0f}: in the host's network {by_class:.1f}, own and host's {both[0]:.1f}+{both[1]:.1f}")
    assert 0.5 * CEILING < by_class < 1.1 * CEILING
    assert 0.6 * CEILING < sum(both) < 1.15 * CEILING
    item.kill()
    two = started(daemon, land).up()
    wait_for(lambda: network(two).get("pods_devices") == {cable: own.uid}, told=two.tail)
    status, answer = two.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert land.traffic_control() == clean
    classes = land.run(land.host, "cat", *(f"{mount}{one.group}/net_cls.classid" for one in (host, host.main, own)))
    assert classes.split() == ["0"] * 3


def test_a_pod_is_limited_from_its_start_and_leaves_nothing_when_removed(
    node: DirectoryNode, daemon: Make, land: Netland
) -> None:
    item = started(daemon, land).up()
    pod = node.add("late")
    cable = land.join(pod)
    wait_for(lambda: network(item).get("pods_devices") == {cable: pod.uid}, told=item.tail)
    held = land.traffic_control()
    assert held[cable] != ""
    node.remove(pod)
    # The kernel removes the cable with the namespace that its other end is in.
    wait_for(lambda: network(item).get("pods_devices") == {}, told=item.tail)
    assert item.problems() == []
    assert item.said("network") == []
    after = land.traffic_control()
    assert set(held) - set(after) == {cable}
    item.configure(policies={}, kubelet={"endpoint": "off"})
    item.signal(signal.SIGHUP)
    wait_for(lambda: "bypassd-be" not in land.traffic_control(), told=item.tail)


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05, 0.1, 0.3] if FULL else [0.01])
def test_restore_after_a_kill_amid_it_all(node: DirectoryNode, daemon: Make, land: Netland, delay_s: float) -> None:
    pods = [node.add() for _ in range(4)]
    for pod in pods:
        land.join(pod)
    clean = land.traffic_control()
    item = started(daemon, land)
    item.start()
    wait_for(lambda: os.path.exists(node.store), told=item.tail)
    wait_for(lambda: delay_s == 0 or land.traffic_control() != clean, told=item.tail)
    time.sleep(delay_s)
    item.kill()
    restore(item)
    assert land.traffic_control() == clean
