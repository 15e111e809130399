"""The daemon's priority is the loop's: what it leaves to threads and to programs stands no higher than the pods."""

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.daemonprocess import ROOT

NICE = -10
SCRIPT = f"""
import json, os, subprocess, sys, threading
from cgroupfs.log import get_log
from reconciler.daemon.main import _be_nice
_be_nice({NICE}, get_log("daemon"))
found = {{"loop": os.getpriority(os.PRIO_PROCESS, 0)}}
def look():
    found["thread"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
thread = threading.Thread(target=look)
thread.start()
thread.join()
program = [sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"]
found["program"] = int(subprocess.check_output(program))
print(json.dumps(found))
"""


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
def test_only_the_loop_has_a_higher_priority_than_pods() -> None:
    text = subprocess.check_output([sys.executable, "-c", SCRIPT], cwd=ROOT, text=True)
    assert json.loads(text.splitlines()[-1]) == {"loop": NICE, "thread": 0, "program": 0}


REFUSING = """
import errno, os
def refuse(*_):
    raise OSError(errno.EPERM, "refused")
os.sched_setscheduler = refuse
"""


@pytest.mark.skipif(not may_be_nice(), reason="REAL KERNEL TEST NOT RUN: no right to raise a priority (CAP_SYS_NICE)")
def test_a_sandbox_that_refuses_the_flag_leaves_the_loop_its_priority() -> None:
    """As systemd's RestrictRealtime does, which an operator's drop-in may set."""
    text = subprocess.check_output([sys.executable, "-c", REFUSING + SCRIPT], cwd=ROOT, text=True)
    assert json.loads(text.splitlines()[-1])["loop"] == NICE
