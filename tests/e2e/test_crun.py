"""Real crun beside runc under one containerd: containers that start, that already run, and that are updated.

With -s the figures are printed: how many of crun's and runc's starts in the same run had their settings before exec.
"""

import os
from typing import Any

import pytest
from msgspec.structs import replace

from tests.e2e.agent import Agent, eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.containerd import Containerd
from tests.e2e.mounts import pure_v2
from tests.e2e.node import Node
from tests.e2e.pods import PodSpec
from tests.e2e.test_first_instruction import Property, be_pod, late

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.quiet,
    pytest.mark.skipif(Containerd.missing_crun() is not None, reason=str(Containerd.missing_crun())),
    pytest.mark.skipif(pure_v2(), reason="the files that containers report here are cgroup v1's"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="BE pods kept off some CPUs need a second one"),
]

STARTS = int(os.environ.get("BYPASSD_CRUN_STARTS") or (60 if os.environ.get("BYPASSD_FULL") else 8))
RUNTIMES = ("runc", "crun") if STARTS >= 20 else ("crun",)
"""runc beside it is a figure to compare with: what holds for its containers is test_first_instruction.py's."""
IN_TIME = 0.9 if STARTS >= 20 else 0.75


def crun_pod(name: str) -> PodSpec:
    return replace(be_pod(name), runtime_handler="crun")


def source(agent: Agent) -> dict[str, Any]:
    """The daemon's words about the runtimes' signals."""
    return next(item for item in agent.state("sources")["sources"] if item["name"] == "runtime signal")


def test_containers_of_crun_are_bounded_before_their_first_instruction_like_those_of_runc(
    containerd_node: Node, agent: StartAgent, record_property: Property
) -> None:
    daemon = agent(containerd_node)
    missed: dict[str, list[list[str]]] = {runtime: [] for runtime in RUNTIMES}
    before_exec: dict[str, list[bool | None]] = {runtime: [] for runtime in RUNTIMES}
    for number in range(STARTS):
        for runtime in RUNTIMES:
            name = f"{runtime}-{number}"
            spec = be_pod(name) if runtime == "runc" else crun_pod(name)
            pod = containerd_node.run_pod(spec)
            missed[runtime].append(late(pod["main"].report()))

            def times(uid: str = spec.uid, cid: str = pod["main"].id) -> dict[str, Any]:
                known = daemon.pod(uid) or {"containers": []}
                return next((c["times"] for c in known["containers"] if c["id"] == cid), {})

            eventually("the start is recorded", lambda: bool(times().get("verified_at")))
            before_exec[runtime].append(times()["before_exec"])
            containerd_node.remove_pod(pod)
    for runtime, misses in missed.items():
        seen = f"{misses.count([])} of {STARTS} in place, {before_exec[runtime].count(True)} counted as such"
        record_property(runtime, seen)
        print(f"  {runtime}: {seen}")
    assert missed["crun"].count([]) >= IN_TIME * STARTS, [what for what in missed["crun"] if what]
    # What is counted as before exec was in place at the first instruction.
    for what, counted in zip(missed["crun"], before_exec["crun"], strict=True):
        assert not (counted and what)
    # Between the unlink of exec.fifo and the exec, a millisecond, a start in time is counted as a late one or unknown.
    assert before_exec["crun"].count(True) > 0
    assert before_exec["crun"].count(False) <= STARTS - missed["crun"].count([]) + max(1, STARTS // 10)


def test_containers_of_crun_that_run_already_are_bounded_at_the_start_and_counted(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    running = run_pod(crun_pod("already"))
    running["main"].report()
    daemon = agent(containerd_node)
    group = running["main"]
    eventually("the weight of the running container is written", lambda: group.read("cpu", "cpu.shares") == "307")
    assert group.read("cpuset", "cpuset.cpus") != "0-1"
    eventually("the source is ok", lambda: source(daemon)["ok"])
    # The container and its sandbox.
    assert "status 2" in source(daemon)["detail"]


def test_an_update_by_crun_which_has_no_event_is_corrected(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    daemon = agent(containerd_node)
    pod = run_pod(crun_pod("updated"))
    pod["main"].report()
    group = pod["main"]
    eventually("its weight is written", lambda: group.read("cpu", "cpu.shares") == "307")
    containerd_node.reassert(pod)
    eventually("its weight is written again", lambda: group.read("cpu", "cpu.shares") == "307")
    assert source(daemon)["ok"]
