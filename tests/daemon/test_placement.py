"""What changes a node's pools while the daemon runs: the kubelet's policy, the configuration, a pod with many threads.

CPUs of a pod's own and named pools: tests/e2e/test_cpu.py. Claims that are cut: tests/reconciler/daemon.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.daemon.process import Daemon, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
SOON = {"samples": 2, "sample_s": 0.5, "release_s": 2}
DEDICATED = {"katalyst.kubewharf.io/qos_level": "dedicated_cores"}
pytestmark = pytest.mark.skipif(os.cpu_count() != 2, reason="REAL KERNEL TEST NOT RUN: it divides two CPUs")


def pinned(node: DirectoryNode) -> NodePod:
    """A dedicated pod of one CPU, as the runtime makes it under the kubelet's policy none."""
    return node.add(
        "pinned",
        qos="",
        annotations=DEDICATED,
        cpus="0-1",
        shares=1024,
        quota_us=100_000,
        requests={"cpu": "1"},
        limits={"cpu": "1"},
    )


def online(node: DirectoryNode, name: str, annotations: dict[str, str] | None = None) -> NodePod:
    return node.add(name, qos="burstable", annotations=annotations, cpus="0-1", shares=512, requests={"cpu": "500m"})


def test_the_kubelets_policy_is_switched_on_and_off(node: DirectoryNode, daemon: Make) -> None:
    web, own = online(node, "web"), pinned(node)
    item = daemon().up()
    wait_for(lambda: node.cpus(own.main) != "0-1", told=item.tail)
    # Drained of nothing, as a test may: the kubelet starts with the static policy and gives the pod CPU 1.
    node.kubelet.delete_checkpoint()
    wait_for(lambda: any("cpu_manager_state" in line for line in item.problems()), told=item.tail)
    assert node.cpus(own.main) != "0-1", "what was given stays while nobody can tell"
    node.kubelet.cpu_manager("static", "0", {own.uid: {"main": "1"}})
    spec = own.main.resources
    node.settle(own.main, {**spec, "cpu": {**spec["cpu"], "cpus": "1"}})
    node.settle(web.main, {**web.main.resources, "cpu": {**web.main.resources["cpu"], "cpus": "0"}})
    key = f"dedicated/{own.uid}/main"
    wait_for(lambda: item.state("pools")["pools"].get(key) == "1", told=item.tail)
    wait_for(lambda: (node.cpus(own.main), node.cpus(web.main)) == ("1", "0"), told=item.tail)
    assert item.standing(own.main.group, "cpu.set") == {}
    # Back to none: what the kubelet gave is not handed out again before it is certain that no task runs there.
    node.kubelet.cpu_manager("none", "")
    wait_for(lambda: any("changed from static to none" in line for line in item.problems()), told=item.tail)
    assert item.state("pools")["pools"][key] == "1"
    assert (node.cpus(own.main), node.cpus(web.main)) == ("1", "0")


def test_separate_pools_are_configured_and_switched_off_again(node: DirectoryNode, daemon: Make) -> None:
    web, be = online(node, "web"), node.add("be", cpus="0-1")
    separate = {"policies": {"shared": {"mode": "separate"}}}
    item = daemon(**separate).up()
    wait_for(lambda: {node.cpus(web.main), node.cpus(be.main)} == {"0", "1"}, told=item.tail)
    item.configure()
    item.signal(signal.SIGHUP)
    wait_for(lambda: node.cpus(web.main) == "0-1", told=item.tail)


def test_a_pod_with_many_runnable_threads_has_a_cpu_of_its_own_while_it_lasts(
    node: DirectoryNode, daemon: Make
) -> None:
    """Three processes that never wait, in a pod that requests half a CPU: measured by the kernel's own counters."""
    web, calm = online(node, "web"), online(node, "calm")
    isolation = {"enabled": True, "cpus_percent": 50}
    soon = {f"policies.shared.isolation.{name}": value for name, value in SOON.items()}
    item = daemon(policies={"shared": {"isolation": isolation}}, interference={"sample_s": 0.5}, constants=soon).up()
    wait_for(lambda: item.state("pools")["pools"].get("shared") == "0-1", told=item.tail)
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for spinner in spinners:
            for controller in ("cpuset", "cpu"):
                node.write(web.main.group, controller, "cgroup.procs", str(spinner.pid))
        key = f"isolation/{web.uid}"
        wait_for(lambda: key in item.state("pools")["pools"], told=item.tail)
        wait_for(lambda: {node.cpus(web.main), node.cpus(calm.main)} == {"0", "1"}, told=item.tail)
        assert item.pod(web.uid)["pool"] == key
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    wait_for(lambda: (node.cpus(web.main), node.cpus(calm.main)) == ("0-1", "0-1"), told=item.tail)
