"""Nothing of an embedded node outlives it, not even when its process is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.e2e import leftovers
from tests.e2e.mounts import directories
from tests.node.scripted import ROOT

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="REAL KERNEL TEST NOT RUN: cgroups are made by root only"),
]
TOP = "/bypassd-test-node-kill"

_NODE = f"""
import signal, time
from tests.e2e.pods import best_effort, burstable
from tests.fakes.kubelet.fake import Version
from tests.node.reaper import watched
from tests.node.scripted import ScriptedNode
# A test run in the background of a shell is started with SIGINT ignored, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
with ScriptedNode.start(cgroup_root="{TOP}") as node, watched(node.directory):
    node.kubelet.begin(Version.STATIC_122)
    node.run_pod(best_effort("crunch", run=("burn", "2")))
    node.run_pod(burstable("web", run=("serve", "1000")))
    print(node.directory, flush=True)
    time.sleep(600)
"""


def _until(holds: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _groups() -> list[str]:
    return [mount + TOP for mount in directories() if os.path.exists(mount + TOP)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_groups_processes_and_files_go_with_the_node(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _NODE], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            directory = process.stdout.readline().strip()
            assert os.path.isdir(directory)
            assert _groups()
            assert list(leftovers.processes_of(directory))
            process.send_signal(how)
            process.wait(90)
        finally:
            process.kill()
    try:
        assert _until(lambda: not _groups()), _groups()
        assert _until(lambda: not os.path.exists(directory))
        assert list(leftovers.processes_of(directory)) == []
        assert not os.path.exists(os.path.join(leftovers.RUNS, f"{os.path.basename(directory)}.json"))
    finally:
        leftovers.clean_up_crashed_runs()
