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
    item = daemon().up()
    wait_for(lambda: bounded(node, known.main), told=item.tail)
    pid, limits = item.pid, resource.prlimit(item.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free(pid), limits[1]))
    late = node.add("late", shares=102)
    wait_for(lambda: item.said("failed, retrying", "EMFILE"), told=item.tail)
    assert not bounded(node, late.main), "the limit does not work"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    wait_for(lambda: bounded(node, late.main), told=item.tail)

    assert item.metric_sum("bypassd_object_errors_total") > 0
    wait_for(lambda: item.call("GET", "/readyz")[0] == 200, told=item.tail)
    assert item.pid == pid
    assert item.stop() == 0


def lowest_free(pid: int) -> int:
    """The number that the next descriptor gets: with this limit what is open stays open, and nothing can be opened."""
    numbers = []
    for _ in range(50):  # some are open for a moment only
        held = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        numbers.append(min(set(range(len(held) + 1)) - held))
        time.sleep(0.01)
    return min(numbers)


def test_where_no_pod_gets_what_is_wanted_the_node_is_not_ready(node: DirectoryNode, daemon: Make) -> None:
    """Originals cannot be recorded from the start on, so nothing may be touched."""
    pod = node.add("be", shares=102)
    os.makedirs(node.store)
    item = daemon()
    item.start()
    wait_for(lambda: item.answers("/readyz") == 503 and item.standing(pod.main.group, "cpu.set"), told=item.tail)
    assert item.standing(pod.main.group, "cpu.set")["state"] == "not recorded"
    assert item.call("GET", "/readyz")[1]["ready"] is False
    assert not bounded(node, pod.main)
    os.rmdir(node.store)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    wait_for(lambda: item.answers("/readyz") == 200, told=item.tail)
    assert item.stop() == 0
