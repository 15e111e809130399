"""BE pods with a network of their own, under a running daemon: real namespaces, a real link, real connections."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.daemon.netland import Netland
from tests.daemon.node import DirectoryNode
from tests.daemon.process import ROOT, Daemon, environment, wait_for

Make = Callable[..., Daemon]
LINK = 80
CEILING, FLOOR = 0.4 * LINK, 0.1 * LINK


@pytest.fixture
def land(node: DirectoryNode) -> Iterator[Netland]:
    with Netland(node, link_mbit=LINK) as made:
        yield made


def started(daemon: Make, land: Netland, **more: Any) -> Daemon:
    rule = {"name": "eth0", "link_mbit": LINK}
    policies = {"network": {"enabled": True, "interval_s": 0.2, "interfaces": [rule], **more}}
    one = daemon(policies=policies, kubelet={"endpoint": "off"})
    one.within = land.inside(land.host)
    return one


def network(one: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = one.state("sides")["sides"].get("network", {})
    return found


def risen(one: Daemon) -> bool:
    """BE's ceiling has come to its top: nobody online uses the link."""
    line = network(one).get("interfaces", {}).get("eth0", {})
    return bool(line.get("be_ceiling", 0) >= CEILING * 125_000)


def restore(one: Daemon, land: Netland) -> str:
    """``bypassctl restore`` while no daemon runs."""
    done = subprocess.run(
        [*land.inside(land.host), sys.executable, "-m", "reconciler.cli", "restore", "--config", one.config_file],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_be_pods_share_their_ceiling_and_online_pods_keep_theirs(
    node: DirectoryNode, daemon: Make, land: Netland
) -> None:
    be, second, online = node.add("be"), node.add("second"), node.add("online", qos="burstable", shares=1024)
    devices = {land.join(pod): pod.uid for pod in (be, second)}
    land.join(online)
    clean = land.traffic_control()
    unheld, beside = land.send((be, land.groups(be)), (online, land.groups(online)))
    one = started(daemon, land).up()
    wait_for(lambda: network(one).get("pods_devices") == devices, told=one.tail)
    wait_for(lambda: risen(one), told=one.tail)
    (alone,) = land.send((be, land.groups(be)))
    two = land.send((be, land.groups(be)), (second, land.groups(second)))
    held, kept = land.send((be, land.groups(be)), (online, land.groups(online)), seconds=3.0)
    print(
        f"\nlink {LINK}: without the agent BE {unheld:.1f} online {beside:.1f}; with it BE alone {alone:.1f} of "
        f"{CEILING:.0f}, two BE {two[0]:.1f}+{two[1]:.1f}, BE {held:.1f} beside online {kept:.1f}"
    )
    assert 0.6 * CEILING < alone < 1.1 * CEILING
    assert 0.6 * CEILING < sum(two) < 1.1 * CEILING, "they share one ceiling"
    assert kept > 0.7 * LINK > beside
    assert held < 2 * FLOOR
    standing = one.standing(be.group, "net.share")
    assert (standing["state"], standing["wanted"]) == ("written", "BE's part of eth0"), standing
    assert one.standing(online.group, "net.share") == {}
    # Fail static: what held BE pods before the crash holds them after it.
    one.kill()
    assert land.send((be, land.groups(be)))[0] < 1.1 * CEILING
    assert land.traffic_control() != clean
    said = restore(one, land)
    assert "bypassd-be" in said
    assert land.traffic_control() == clean
    assert land.send((be, land.groups(be)))[0] > 1.3 * CEILING
    assert "0 files" in restore(one, land) or "nothing of ours" in restore(one, land)
