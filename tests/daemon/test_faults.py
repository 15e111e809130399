"""The daemon while the machine refuses it something: it stays, says so, and is right again afterwards."""

import os
import resource
import time
from collections.abc import Callable

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]


def test_without_a_descriptor_to_spare_the_daemon_stays_and_recovers(node: DirectoryNode, daemon: Make) -> None:
    known = node.add("known", shares=102)
    one = daemon().up()
    wait_for(lambda: bounded(node, known.main), told=one.tail)
    pid, limits = one.pid, resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free(pid), limits[1]))
    late = node.add("late", shares=102)
    time.sleep(3)
    assert not bounded(node, late.main), "the limit does not work"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    wait_for(lambda: bounded(node, late.main), told=one.tail)
    assert one.said("EMFILE"), one.tail()
    assert one.metric_sum("bypassd_object_errors_total") > 0
    wait_for(lambda: one.call("GET", "/readyz")[0] == 200, told=one.tail)
    assert one.pid == pid
    assert one.stop() == 0


def lowest_free(pid: int) -> int:
    """The number that the next descriptor gets: with this limit what is open stays open, and nothing can be opened."""
    found = []
    for _ in range(50):  # some are open for a moment only
        held = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        found.append(min(set(range(len(held) + 1)) - held))
        time.sleep(0.01)
    return min(found)


def test_where_no_pod_gets_what_is_wanted_the_node_is_not_ready(node: DirectoryNode, daemon: Make) -> None:
    """Originals cannot be recorded from the start on, so nothing may be touched."""
    pod = node.add("be", shares=102)
    os.makedirs(node.store)
    one = daemon()
    one.start()
    wait_for(lambda: one.answers("/readyz") == 503 and one.standing(pod.main.group, "cpu.set"), told=one.tail)
    assert one.standing(pod.main.group, "cpu.set")["state"] == "not recorded"
    assert one.call("GET", "/readyz")[1]["ready"] is False
    assert not bounded(node, pod.main)
    os.rmdir(node.store)
    wait_for(lambda: bounded(node, pod.main), told=one.tail)
    wait_for(lambda: one.answers("/readyz") == 200, told=one.tail)
    assert one.stop() == 0
