"""The idle class on the threads of real containers, whose first act is to report their own scheduling policy."""

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.scheduling import IDLE, OTHER
from tests.e2e.agent import config_for, eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.containerd import Containerd
from tests.e2e.intime import STARTS
from tests.e2e.node import Node, Running
from tests.e2e.pods import best_effort, burstable

pytestmark = [pytest.mark.containerd, pytest.mark.quiet, pytest.mark.core]
POLICIES = {"idle_class": {"enabled": True, "group": False, "threads": True}}
SOON = {"policies.idle_class.sweep_s": 1}


def policy(container: Running) -> int:
    """Of its program now."""
    return os.sched_getscheduler(container.init_pid())


@pytest.mark.parametrize("runtime", ["", "crun"], ids=["runc", "crun"])
def test_a_be_container_is_in_the_idle_class_at_its_first_instruction(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, runtime: str
) -> None:
    if runtime and Containerd.missing_crun() is not None:
        pytest.skip(str(Containerd.missing_crun()))
    daemon = agent(containerd_node, policies=POLICIES, constants=SOON)
    for _ in range(STARTS):
        be = run_pod(replace(best_effort("be"), runtime_handler=runtime))
        if (report := be["main"].report()).policy == IDLE:
            break
    assert report.policy == IDLE, daemon.tail()
    web = run_pod(replace(burstable("web"), runtime_handler=runtime))
    assert web["main"].report().policy == OTHER

    def known() -> dict[str, object]:
        pod = daemon.pod(be.spec.uid) or {"containers": []}
        return next((item for item in pod["containers"] if item["id"] == be["main"].id), {})

    eventually("the start is recorded", lambda: bool(known().get("times")))
    times = known()["times"]
    assert isinstance(times, dict)
    # crun's signal is often before anything could be prepared; then a reconciliation sets it, before exec as well.
    assert times["init_class"] in ({"idle", None} if runtime else {"idle"})
    assert os.sched_getscheduler(os.getpid()) == OTHER
    containerd_node.reassert(be)
    assert policy(be["main"]) == IDLE, "runc update leaves it"


def test_running_containers_and_what_comes_from_outside_get_it_and_all_get_their_own_back(
    containerd_node: Node,
    run_pod: PodFactory,
    agent: StartAgent,
    visitor: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    earlier, web = run_pod(best_effort("earlier")), run_pod(burstable("web"))
    directory = str(tmp_path / "kept")
    daemon = agent(containerd_node, directory=directory, policies=POLICIES, constants=SOON)
    eventually("it is idle", lambda: policy(earlier["main"]) == IDLE)
    with open(f"{earlier['main'].directory('cpuset')}/cgroup.procs", "w", encoding="ascii") as file:
        file.write(str(visitor.pid))
    eventually("what came from outside is, too", lambda: os.sched_getscheduler(visitor.pid) == IDLE)
    assert policy(web["main"]) == OTHER
    assert "thread.policy idle" in daemon.control("why", earlier.spec.uid).stdout
    daemon.kill()
    assert policy(earlier["main"]) == IDLE

    again = agent(containerd_node, directory=directory, policies=POLICIES, constants=SOON)
    later = run_pod(best_effort("later"))
    eventually("the new run goes on with it", lambda: policy(later["main"]) == IDLE)
    again.write_config(config_for(containerd_node, directory, policies=POLICIES, mode="observe"))
    assert again.control("reload").returncode == 0
    another = run_pod(best_effort("another"))
    assert another["main"].report().policy == OTHER
    assert policy(earlier["main"]) == IDLE, "observe mode writes nothing, and undoes nothing"
    again.kill()

    restored = again.control("restore")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    containers = (earlier["main"], later["main"], another["main"])
    assert [policy(item) for item in containers] == [OTHER] * 3
    assert os.sched_getscheduler(visitor.pid) == OTHER
