"""The preset `full` with real containers: the forms of the idle class that this kernel has, and all of it undone.

By kernel: in the virtual machine, `tests/vm/run.sh` with ``BYPASSD_VM_KERNEL_OF``.
"""

import json
import os

import pytest

from cgroupfs.scheduling import IDLE, OTHER
from reconciler.policies.yielding import scheduler_of
from tests.e2e.agent import eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.node import Node
from tests.e2e.pods import best_effort, burstable
from tests.e2e.values import changes, snapshot

pytestmark = [pytest.mark.containerd, pytest.mark.quiet, pytest.mark.core]
SIDES = {"policies.idle_class.enabled": "idle class", "policies.idle_class.threads": "idle class of threads"}
LONG_S = 30.0


def test_full_has_the_idle_class_of_this_kernel_says_so_and_restores_everything(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    run_pod(burstable("web"))
    pod = run_pod(best_effort("be", run=("burn", "1")))
    be = pod["main"]
    idle = f"{os.path.dirname(be.directory('cpu'))}/cpu.idle"
    before = snapshot(containerd_node)
    scheduler = scheduler_of(os.uname().release)
    # From 6.6 on the least weight of besteffort does what the class of a group in it would.
    offered, groups = idle in before, idle in before and not scheduler.eevdf
    threads = not offered or scheduler.threads_yield

    def forms() -> tuple[bool, bool]:
        return snapshot(containerd_node).get(idle) == "1", os.sched_getscheduler(be.init_pid()) == IDLE

    daemon = agent(containerd_node, protect="full")
    eventually("the pod is in the idle class", lambda: forms() == (groups, threads), within_s=LONG_S)

    def law() -> str:
        return daemon.control("why", pod.spec.uid).stdout

    eventually("which is effective", lambda: "budget law harm" in law(), within_s=LONG_S)
    assert forms() == (groups, threads)
    explained = json.loads(daemon.control("config", "explain", "protect", "-o", "json").stdout)
    notes = {row["setting"]: row["note"] for row in explained["preset"]}
    assert tuple(not notes[name] for name in SIDES) == (offered, threads)
    findings = json.loads(daemon.control("doctor", "-o", "json").stdout)["findings"]
    (found,) = [row["found"] for row in findings if row["check"] == "protect"]
    (cpu,) = [part for part in found.split("; ") if part.startswith("cpu: ")]
    assert tuple(name in cpu.removeprefix("cpu: ").split(", ") for name in SIDES.values()) == (offered, threads)

    daemon.kill()
    restored = daemon.control("restore")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    assert os.sched_getscheduler(be.init_pid()) == OTHER
    assert changes(before, snapshot(containerd_node)) == {}
