"""A CPU is really offline and online again under the daemon: only in a virtual machine that belongs to the tests."""

import os
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.agent import eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.node import Node, Running
from tests.e2e.pods import best_effort, burstable
from tests.e2e.values import cpus
from tests.fakes.kubelet.cgroups import read

DEVICE = "/sys/devices/system/cpu"
MAY = "BYPASSD_TEST_HOTPLUG"
"""Set by the virtual machine's start script, and by nobody on a machine that others use too."""

pytestmark = [pytest.mark.containerd, pytest.mark.core]

Switch = Callable[[int], None]


@pytest.fixture
def switch() -> Iterator[Switch]:
    """``switch(0)`` takes CPU 1 offline, ``switch(1)`` brings it back; it is back afterwards in any case."""
    file = f"{DEVICE}/cpu1/online"
    if os.environ.get(MAY) != "1":
        pytest.skip(f"CPU HOT-PLUG TEST NOT RUN: it takes CPUs away from everybody here; only with {MAY}=1 (make vm)")
    if not os.access(file, os.W_OK):
        pytest.skip(f"CPU HOT-PLUG TEST NOT RUN: {file} cannot be written")

    def write(state: int) -> None:
        with open(file, "w", encoding="ascii") as opened:
            opened.write(str(state))

    try:
        yield write
    finally:
        if read(f"{DEVICE}/cpu1", "online") == "0":
            write(1)


def usable(container: Running) -> str:
    """The CPUs that its processes may run on now: what is configured, less what is offline."""
    v2 = container.node.cgroups.v2
    return container.read("cpuset", "cpuset.cpus.effective" if v2 else "cpuset.effective_cpus")


def test_a_cpu_that_is_unplugged_and_plugged_is_followed_and_restored(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, switch: Switch
) -> None:
    everywhere = read(DEVICE, "online")
    web = run_pod(burstable("web"))
    crunch = run_pod(best_effort("crunch"))
    daemon = agent(containerd_node)
    eventually("the BE pod is confined", lambda: cpus(crunch["main"]) not in {"", everywhere})
    before = usable(web["main"])

    def known() -> tuple[str, set[str]]:
        state = daemon.state("agent", "pods")
        pods = [pod for pod in state["pods"] if pod["uid"] == crunch.spec.uid]
        settings = [setting for pod in pods for box in pod["containers"] for setting in box["settings"]]
        return state["agent"]["cpus"], {setting["state"] for setting in settings if setting["knob"] == "cpu.set"}

    for _ in range(2):
        switch(0)
        left = read(DEVICE, "online")
        eventually("the agent knows that it is gone", lambda: known() == (read(DEVICE, "online"), {"in place"}))
        assert usable(crunch["main"]) == usable(web["main"]) == left
        switch(1)
        eventually("the agent knows that it is back", lambda: known() == (everywhere, {"in place"}))
        # On v1 the kernel has taken it from every cpuset up to kubepods, and gives it to none again.
        eventually("the online pod may run there again", lambda: usable(web["main"]) == before)
        assert cpus(crunch["main"]) not in {"", everywhere}
    later = run_pod(burstable("later"))
    assert usable(later["main"]) == before
    assert daemon.state("agent")["agent"]["alerts"]["hotplug"] >= 4
