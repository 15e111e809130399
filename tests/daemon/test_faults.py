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
