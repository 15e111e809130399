"""CPUs of their own, named pools, and which claims are cut for which: on the kernel, from pod to cpuset and back."""

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
POOL = {
    "katalyst.kubewharf.io/qos_level": "shared_cores",
    "katalyst.kubewharf.io/cpu_enhancement": '{"cpuset_pool": "batch"}',
}
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


def test_a_dedicated_pod_owns_a_cpu_and_everybody_else_leaves_it(node: DirectoryNode, daemon: Make) -> None:
    web, be = online(node, "web"), node.add("be", cpus="0-1")
    item = daemon().up()
    wait_for(lambda: node.cpus(be.main) != "0-1", told=item.tail)
    assert node.cpus(web.main) == "0-1"
    before = node.cpus(web.main)
    own = pinned(node)
    wait_for(lambda: node.cpus(own.main) != "0-1" and node.cpus(web.main) != "0-1", told=item.tail)
    cpu = node.cpus(own.main)
    assert {cpu, node.cpus(web.main)} == {"0", "1"}
    wait_for(lambda: node.cpus(be.main) == node.cpus(web.main), told=item.tail)
    assert item.state("pools")["pools"][f"dedicated/{own.uid}/main"] == cpu
    standing = item.standing(own.main.group, "cpu.set")
    assert (standing["policy"], standing["wanted"]) == ("exclusive", cpu)
    assert item.pod(own.uid)["pool"] == "dedicated"
    # Whole CPUs of its own: a quota could only throttle it.
    wait_for(lambda: node.quota(own.main.group) == "-1", told=item.tail)
    # Nothing is moved when its container starts again, nor by another agent's life.
    node.restart(own)
    wait_for(lambda: node.cpus(own.main) == cpu, told=item.tail)
    item.kill()
    again = daemon().up()
    again.look_again(1)
    assert (node.cpus(own.main), node.cpus(web.main)) == (cpu, "1" if cpu == "0" else "0")
    # And with the pod gone the online pod has what it had, as nothing requires it to be confined any more.
    node.remove(own)
    wait_for(lambda: node.cpus(web.main) == before, told=again.tail)


def test_a_claim_that_is_cut_is_a_message_and_a_metric_until_it_is_met(node: DirectoryNode, daemon: Make) -> None:
    """Two CPUs, one of which is always shared: the second dedicated pod gets none of its own."""
    pods = [node.add(f"own-{name}", qos="", annotations=DEDICATED, cpus="0-1", requests={"cpu": "1"}) for name in "ab"]
    item = daemon().up()

    def placement() -> dict[str, object]:
        return next(row for row in item.state("sources")["sources"] if row["name"] == "placement")

    wait_for(lambda: not placement()["ok"], told=item.tail)
    cut = [claim for claim in item.state("budget")["budget"]["claims"] if claim["cut"]]
    assert [(claim["asked"], claim["got"]) for claim in cut] == [(1, 0)]
    assert str(placement()["detail"]).startswith(f"{cut[0]['owner']} has 0 of 1 CPU")
    assert item.metric("bypassd_claims_cut") == {"": 1.0}
    assert item.metric("bypassd_claims_missing_cpus") == {"": 1.0}
    (loser,) = cut[0]["pods"]
    node.remove(next(pod for pod in pods if pod.uid != loser))
    wait_for(lambda: bool(placement()["ok"]), told=item.tail)
    assert item.metric("bypassd_claims_cut") == {"": 0.0}


def test_restore_puts_back_what_placement_moved(node: DirectoryNode, daemon: Make) -> None:
    online(node, "web")
    node.add("be", cpus="0-1")
    own = pinned(node)
    before = node.tree()
    item = daemon().up()
    wait_for(lambda: node.cpus(own.main) != "0-1", told=item.tail)
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert node.tree() == before


def test_a_named_pool_has_its_own_cpus_and_pods(node: DirectoryNode, daemon: Make) -> None:
    web, batch = online(node, "web"), online(node, "batch", POOL)
    item = daemon().up()
    wait_for(lambda: {node.cpus(web.main), node.cpus(batch.main)} == {"0", "1"}, told=item.tail)
    pools = item.state("pools")["pools"]
    assert pools["shared/batch"] == node.cpus(batch.main)
    assert item.pod(batch.uid)["pool"] == "shared/batch"
    node.remove(batch)
    wait_for(lambda: node.cpus(web.main) == "0-1", told=item.tail)


def test_online_pods_in_pools_are_corrected_once_each_time_the_kubelet_writes(
    node: DirectoryNode, daemon: Make
) -> None:
    """A static kubelet from 1.22 on: it writes at its own reasons, never in a rhythm. No conflict."""
    node.kubelet.cpu_manager("static", "0-1")
    web, batch = online(node, "web"), online(node, "batch", POOL)
    item = daemon().up()
    wait_for(lambda: {node.cpus(web.main), node.cpus(batch.main)} == {"0", "1"}, told=item.tail)
    ours = node.cpus(batch.main)
    for _ in range(2):
        node.settle(batch.main)
        wait_for(lambda: node.cpus(batch.main) == ours, told=item.tail)
    item.look_again(1)
    written = item.metric_sum("bypassd_writes_total")
    item.look_again(2)
    assert item.metric_sum("bypassd_writes_total") == written
    assert item.alerts("yield") == 0
    assert item.state("agent")["agent"]["kubelet_reasserts_s"] is None


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
