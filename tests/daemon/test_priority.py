"""The daemon's priority is the loop's: what it leaves to threads stands below the pods."""

import os
from collections.abc import Callable

import pytest

from tests.daemon.node import DirectoryNode
from tests.daemon.process import Daemon, wait_for

NICE = -10


def may_be_nice() -> bool:
    """Whether a process here may raise its priority."""
    child = os.fork()
    if child == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not may_be_nice(), reason="REAL KERNEL TEST NOT RUN: no right to raise a priority (CAP_SYS_NICE)")
def test_only_the_loop_stands_above_the_pods(node: DirectoryNode, daemon: Callable[..., Daemon]) -> None:
    one = daemon().up()
    wait_for(lambda: os.getpriority(os.PRIO_PROCESS, one.pid) == NICE, told=one.tail)
    # A look at the pods of another kind of work: the store, the metrics, what else goes to threads.
    node.add("be", shares=102)
    one.metric("bypassd_ready")

    def workers() -> list[int]:
        threads = [int(name) for name in os.listdir(f"/proc/{one.pid}/task")]
        return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads if thread != one.pid]

    assert wait_for(workers, told=one.tail).count(0) >= 1
    assert not [nice for nice in workers() if nice < 0]
