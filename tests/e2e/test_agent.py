"""The agent on a node with real containers: classify, bound, adopt, a foreign write, restore.

The same on every cgroup layout: nothing here names a version's files or a driver's directories.
"""

import os
from pathlib import Path

import pytest

from tests.e2e.agent import eventually
from tests.e2e.conftest import DRIVER, PodFactory, StartAgent
from tests.e2e.intime import started_in_time
from tests.e2e.node import Node
from tests.e2e.pods import ContainerSpec, PodSpec, best_effort, burstable, guaranteed, new_uid
from tests.e2e.values import besteffort_quota, changes, cpus, snapshot, weight
from tests.fakes.kubelet.cgroups import read
from tests.fakes.kubelet.cpu_manager import STATIC

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.core,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="BE pods kept off some CPUs need a second one"),
]

NO_QUOTA = {"-1", "max"}


def labelled_be(name: str, *, cpu_request: int = 500) -> PodSpec:
    """A pod that Kubernetes thinks Burstable and its owner gave to BE work."""
    container = ContainerSpec(cpu_request=cpu_request)
    return PodSpec(name=name, uid=new_uid(), labels={"koordinator.sh/qosClass": "BE"}, containers=(container,))


def test_pods_are_classified_from_labels_and_else_from_kubernetes_qos(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    expected = {
        run_pod(best_effort("crunch")).spec.uid: "reclaimed",
        run_pod(burstable("web")).spec.uid: "shared",
        run_pod(labelled_be("batch")).spec.uid: "reclaimed",
        run_pod(best_effort("search", labels={"koordinator.sh/qosClass": "LS"})).spec.uid: "shared",
    }
    daemon = agent(containerd_node)
    expected[run_pod(best_effort("later", labels={"katalyst.kubewharf.io/qos_level": "x"})).spec.uid] = "reclaimed"

    def classes() -> dict[str, str]:
        return {pod["uid"]: pod["class"] for pod in daemon.state("pods")["pods"] if pod["uid"] in expected}

    eventually(f"classes are {expected}", lambda: classes() == expected)


def test_be_pods_are_bounded_and_online_pods_are_not(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    everywhere = frozenset(os.sched_getaffinity(0))
    earlier = run_pod(best_effort("earlier"))
    web = run_pod(burstable("web"))
    before = (cpus(web["main"]), weight(web["main"]))
    daemon = agent(containerd_node)
    eventually("a pod that was there is confined", lambda: cpus(earlier["main"]) not in {"", "0-1"})
    assert besteffort_quota(containerd_node) not in NO_QUOTA
    # Whatever it is now, its set was a part of the CPUs when the program began.
    started_in_time(
        containerd_node,
        run_pod,
        daemon,
        lambda: best_effort("later", run=("burn", "1")),
        lambda report: report.affinity < everywhere,
    )
    batch, _ = started_in_time(
        containerd_node, run_pod, daemon, lambda: labelled_be("batch"), lambda report: report.affinity < everywhere
    )
    assert weight(batch["main"]) <= 2
    assert (cpus(web["main"]), weight(web["main"])) == before
    assert run_pod(burstable("another"))["main"].report().affinity == everywhere


def test_exclusive_cpus_of_the_kubelet_are_adopted_never_fought(agent: StartAgent) -> None:
    with Node.start(cpu_policy=STATIC, cgroup_root="/bypassd-test-adopt", driver=DRIVER) as node:
        alone = node.run_pod(guaranteed("alone", cpus=1))
        mine = cpus(alone["main"])
        assert mine == "1"
        daemon = agent(node)
        later = node.run_pod(best_effort("later"))
        eventually(
            "the pod is known as dedicated", lambda: (daemon.pod(alone.spec.uid) or {}).get("class") == "dedicated"
        )
        eventually("BE work is kept off it", lambda: cpus(later["main"]) == "0")
        assert daemon.state("pools")["pools"][f"dedicated/{alone.spec.uid}/main"] == mine
        for _ in range(2):
            node.reassert(alone)
            node.reassert(later)
        assert cpus(alone["main"]) == mine
        eventually("BE work is kept off it after an update too", lambda: cpus(later["main"]) == "0")
        assert daemon.stop() == 0


def test_a_restarted_agent_adopts_what_is_in_force(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, tmp_path: Path
) -> None:
    original = snapshot(containerd_node)
    crunch = run_pod(best_effort("crunch"))
    directory = str(tmp_path / "agent")
    first = agent(containerd_node, directory=directory, forked=False)
    eventually("the pod is confined", lambda: cpus(crunch["main"]) not in {"", "0-1"})
    in_force = cpus(crunch["main"])
    first.kill()
    assert cpus(crunch["main"]) == in_force
    second = agent(containerd_node, directory=directory)
    assert cpus(crunch["main"]) == in_force
    containerd_node.remove_pod(crunch)
    assert second.stop() == 0
    assert snapshot(containerd_node) == original


def test_what_the_runtime_writes_again_is_corrected(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    daemon = agent(containerd_node)
    batch = run_pod(labelled_be("batch", cpu_request=500))
    wanted = weight(batch["main"])
    assert wanted <= 2
    containerd_node.reassert(batch)  # the kubelet's CPU manager: the request's shares again
    eventually("the least weight is back", lambda: weight(batch["main"]) == wanted)

    def state() -> list[str]:
        fields = daemon.pod(batch.spec.uid)
        assert fields is not None
        return [s["state"] for c in fields["containers"] for s in c["settings"] if s["knob"] == "cpu.weight"]

    # "written" until the look after it has read the value back.
    eventually("the agent has seen it in place", lambda: state() == ["in place"])


@pytest.mark.parametrize("killed", [False, True], ids=["daemon running", "daemon killed"])
def test_restore_puts_every_file_back(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, killed: bool
) -> None:
    run_pod(best_effort("crunch"))
    run_pod(labelled_be("batch"))
    run_pod(burstable("web", cpu_limit=500, memory_limit=64 << 20))
    before = snapshot(containerd_node)
    daemon = agent(containerd_node)
    eventually("something is written", lambda: snapshot(containerd_node) != before)
    if killed:
        daemon.kill()
    done = daemon.control("restore")
    assert done.returncode == 0, done.stdout + done.stderr
    assert changes(before, snapshot(containerd_node)) == {}


def test_a_container_started_under_the_agent_is_restored_to_what_the_kubelet_wanted(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    untouched = run_pod(labelled_be("before", cpu_request=500))
    wanted = weight(untouched["main"])
    daemon = agent(containerd_node)
    batch = run_pod(labelled_be("after", cpu_request=500))
    eventually("it is bounded", lambda: weight(batch["main"]) <= 2)
    done = daemon.control("restore", "--output", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weight(batch["main"]) == wanted
    everywhere = containerd_node.cgroups.directory("cpuset", os.path.dirname(batch["main"].group))
    name = "cpuset.cpus.effective" if containerd_node.cgroups.v2 else "cpuset.cpus"
    assert cpus(batch["main"]) in {"", read(everywhere, name)}
