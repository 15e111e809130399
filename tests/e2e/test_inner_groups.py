"""Groups that a tenant makes inside a real BE container, and controllers that are taken out above one, on each layout.

The layout is docker's own: on v1 copies of the container's CPUs below it, on v2 the processes in a group of their own
first, as none may be in a group that passes controllers on.
"""

import json
import os
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.agent import Agent, eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.node import Node, Running
from tests.e2e.pods import best_effort, burstable
from tests.e2e.test_cpu import KATALYST, ONE, OTHER, dedicated
from tests.e2e.test_memory_and_disks import BATCH, V2, batch, limit, memory
from tests.e2e.values import besteffort_quota, cpus, snapshot
from tests.fakes.kubelet.cgroups import read

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.core,
    pytest.mark.skipif(os.cpu_count() != 2, reason="INNER GROUPS NOT TESTED: the tests divide two CPUs"),
]
DOCKER = f"docker/{'cd' * 32}"
BUDGET = {"reclaimed": {"form": "quota", "budget": {"law": "quota", "limit_percent": 1, "floor_percent": 50}}}
"""One of two CPUs."""
LONG_S = 30.0
Inner = Callable[[Running], dict[str, str]]


def write(directory: str, file: str, text: str) -> None:
    with open(f"{directory}/{file}", "w", encoding="utf-8") as control:
        control.write(text)


def make_v1(container: Running) -> dict[str, str]:
    made = {}
    for controller in ("cpu", "cpuset"):
        path = container.directory(controller)
        for part in DOCKER.split("/"):
            above, path = path, f"{path}/{part}"
            os.makedirs(path, exist_ok=True)
            if controller == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    write(path, file, read(above, file))
        made[controller] = path
    return made


def make_v2(container: Running) -> dict[str, str]:
    top = container.directory("cpu")
    os.mkdir(f"{top}/init")
    for pid in read(top, "cgroup.procs").split():
        write(f"{top}/init", "cgroup.procs", pid)
    path = top
    for part in DOCKER.split("/"):
        write(path, "cgroup.subtree_control", "+cpu +cpuset")
        path = f"{path}/{part}"
        os.mkdir(path)
    return dict.fromkeys(("cpu", "cpuset"), path)


@pytest.fixture
def inner(containerd_node: Node) -> Iterator[Inner]:
    """Make docker's groups inside a container; its program is moved into the innermost one."""
    made: list[str] = []

    def make(container: Running) -> dict[str, str]:
        groups = make_v2(container) if containerd_node.cgroups.v2 else make_v1(container)
        made.extend(set(groups.values()))
        for directory in set(groups.values()):
            write(directory, "cgroup.procs", str(container.init_pid()))
        return groups

    yield make
    assert [path for path in made if os.path.isdir(path)] == [], "the runtime removes them with the container"


def floor(node: Node) -> str:
    """The least that the kernel takes of besteffort above an inner quota of two CPUs: v2 has no such rule."""
    return "100000" if node.cgroups.v2 else "200000"


def limited(node: Node, groups: dict[str, str]) -> None:
    if node.cgroups.v2:
        write(groups["cpu"], "cpu.max", "200000 100000")
    else:
        write(groups["cpu"], "cpu.cfs_quota_us", "200000")


def problems(agent: Agent, text: str) -> list[str]:
    return [line for line in agent.state("problems")["problems"] if text in line]


def test_an_inner_quota_above_the_budget_leaves_no_be_pod_unbounded(
    containerd_node: Node, inner: Inner, run_pod: PodFactory, agent: StartAgent
) -> None:
    ci = run_pod(best_effort("ci"))
    run_pod(best_effort("other"))
    limited(containerd_node, inner(ci["main"]))
    daemon = agent(containerd_node, policies=BUDGET)
    expected = floor(containerd_node)
    eventually(f"besteffort has {expected}", lambda: besteffort_quota(containerd_node) == expected, within_s=LONG_S)
    eventually("the problem is shown", lambda: bool(problems(daemon, "cpu.quota")) == (expected != "100000"))
    containerd_node.remove_pod(ci)
    eventually("the budget is whole", lambda: besteffort_quota(containerd_node) == "100000", within_s=LONG_S)
    eventually("no problem is left", lambda: not problems(daemon, "cpu.quota"), within_s=LONG_S)


def test_an_owned_cpu_is_free_of_what_runs_in_groups_inside_a_be_container(
    containerd_node: Node, inner: Inner, run_pod: PodFactory, agent: StartAgent
) -> None:
    ci = run_pod(best_effort("ci", run=("burn", "1")))
    groups = inner(ci["main"])
    if containerd_node.cgroups.v2:
        write(groups["cpuset"], "cpuset.cpus", "0-1")
    pid = ci["main"].init_pid()
    before = snapshot(containerd_node)
    daemon = agent(containerd_node)
    pinned = run_pod(dedicated("pinned", annotations=KATALYST))
    eventually("it has one CPU", lambda: cpus(pinned["main"]) in ONE, within_s=LONG_S)
    rest = OTHER[cpus(pinned["main"])]
    eventually("BE has the other one", lambda: os.sched_getaffinity(pid) == {int(rest)}, within_s=LONG_S)
    if not containerd_node.cgroups.v2:
        assert read(groups["cpuset"], "cpuset.cpus") == rest
    assert problems(daemon, "exclusive") == []
    shown = daemon.control("why", pinned.spec.uid).stdout
    assert "not exclusive" not in shown
    assert "exclusive CPU" in shown
    restored = daemon.control("restore")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    after = snapshot(containerd_node)
    wide = {path: text for path, text in before.items() if path.startswith(groups["cpuset"])}
    assert {path: after[path] for path in wide} == wide
    eventually("it runs everywhere again", lambda: os.sched_getaffinity(pid) == {0, 1})


@V2
def test_a_controller_that_is_taken_out_is_put_back_with_the_cpu_set(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    run_pod(burstable("web"))
    be = run_pod(best_effort("be", run=("burn", "1")))
    daemon = agent(containerd_node, policies={"reclaimed": {"form": "cpuset"}})
    eventually("BE is limited to one CPU", lambda: cpus(be["main"]) in ONE, within_s=LONG_S)
    mine = cpus(be["main"])
    above = os.path.dirname(be["main"].directory("cpuset"))
    write(above, "cgroup.subtree_control", "-cpuset")
    assert not os.path.exists(f"{be['main'].directory('cpuset')}/cpuset.cpus")
    eventually(
        "it is put back",
        lambda: os.path.exists(f"{be['main'].directory('cpuset')}/cpuset.cpus") and cpus(be["main"]) == mine,
        within_s=LONG_S,
    )
    eventually("no problem is left", lambda: not problems(daemon, "subtree_control"), within_s=LONG_S)
    recent = json.dumps(daemon.state("history")["history"])
    assert "put back" in recent


def test_a_batch_limit_bounds_memory_and_swap_together(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object]
) -> None:
    pod = run_pod(batch("batch"))
    swap = "memory.swap.max" if containerd_node.cgroups.v2 else "memory.memsw.limit_in_bytes"
    if not os.path.exists(f"{pod['main'].directory('memory')}/{swap}"):
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel accounts no swap")
    before = memory(pod["main"], swap)
    daemon = agent(containerd_node, **pod_list)
    eventually("memory has its limit", lambda: limit(pod["main"]) == str(BATCH), within_s=LONG_S)
    expected = "0" if containerd_node.cgroups.v2 else str(BATCH)
    eventually("swap has its limit", lambda: memory(pod["main"], swap) == expected, within_s=LONG_S)
    assert daemon.control("restore").returncode == 0
    assert memory(pod["main"], swap) == before
