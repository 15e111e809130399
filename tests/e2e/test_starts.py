"""BE pods start, answer a probe and end beside busy ones at the floor of the BE budget, as fast as without the agent.

The burners are Koordinator's: their requests give them a weight, which a plain BE pod does not have from the kubelet.
The same starts are measured without the agent before and after those with it, so that a load that lasts for one half of
the run is in both medians. A median and not each start: on a shared machine one start in ten takes several times as
long, with and without the agent.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.agent import eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.node import Node, Running
from tests.e2e.pods import PodSpec, best_effort, new_uid
from tests.e2e.test_first_instruction import FULL, Property
from tests.e2e.values import besteffort_quota

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.timeout(3600 if FULL else 400),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="BE pods kept off some CPUs need a second one"),
]

BURNERS = 4
STARTS = 200 if FULL else 8
AT_FLOOR = {"policies": {"reclaimed": {"budget": {"limit_percent": 1}}}}
"""The law's target is then below its floor, whatever the machine's load."""
FLOOR_US = "10000"
FACTOR = 2.0
PACE_S = 6.0 if FULL else 0.0
"""Between two pods while the agent runs: a start, a probe and a removal have the allowance for some 0.8 s together, and
it may last a tenth of the time. So the long form takes half an hour."""
SLOW_S = 20.0
"""A start that takes this long fails the test: kubelets give up sooner or later."""


def burner(name: str) -> PodSpec:
    """A BE pod that asks for a whole batch CPU, and uses all it gets."""
    resources = {"requests": {"kubernetes.io/batch-cpu": 1000}}
    spec = best_effort(name, run=("burn", "1"), labels={"koordinator.sh/qosClass": "BE"})
    text = json.dumps({"containers": {"main": resources}})
    return PodSpec(
        name=name,
        uid=new_uid(),
        labels=spec.labels,
        annotations={"node.koordinator.sh/extended-resource-spec": text},
        containers=spec.containers,
    )


def probe(node: Node, container: Running) -> float:
    """Seconds for an exec as containerd's shim makes it for a probe."""
    began = time.monotonic()
    command = ("runc", "--root", node.containerd.runc_root, "exec", container.id, "/app", "-", "exit", "0")
    subprocess.run(command, check=True, timeout=SLOW_S)
    return time.monotonic() - began


def at_floor(node: Node) -> None:
    """Wait until what an act had beside the budget is over."""
    eventually("BE is at its floor", lambda: besteffort_quota(node) == FLOOR_US)


def lives(
    node: Node, count: int, *, settled: Callable[[Node], object] = id, pace_s: float = 0.0
) -> Iterator[tuple[float, float, float]]:
    """Seconds from the first call to the runtime to the first instruction, of a probe, and of the removal of pods.

    ``settled`` waits from one act to the next.
    """
    for number in range(count):
        began = time.monotonic()
        pod = node.run_pod(best_effort(f"plain-{number}"))
        first = pod["main"].report(within_s=SLOW_S).first_ns / 1e9
        settled(node)
        answered = probe(node, pod["main"])
        settled(node)
        ending = time.monotonic()
        node.remove_pod(pod)
        yield first - began, answered, time.monotonic() - ending
        time.sleep(pace_s)


def test_plain_be_pods_start_answer_and_end_beside_burners_at_the_floor(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, record_property: Property
) -> None:
    for number in range(BURNERS):
        run_pod(burner(f"burner-{number}"))
    without = list(lives(containerd_node, STARTS // 2))
    daemon = agent(containerd_node, **AT_FLOOR)
    at_floor(containerd_node)
    beside = list(lives(containerd_node, STARTS, settled=at_floor, pace_s=PACE_S))
    at_floor(containerd_node)
    assert daemon.stop() == 0
    without += lives(containerd_node, STARTS // 2)
    for what, index in (("start", 0), ("probe", 1), ("removal", 2)):
        alone, both = ([times[index] for times in measured] for measured in (without, beside))
        text = ", ".join(f"{statistics.median(values):.3f} s (most {max(values):.3f})" for values in (alone, both))
        record_property(f"{what} without and with the agent", text)
        print(f"  {what} without and with the agent: {text}")
        assert statistics.median(both) <= FACTOR * statistics.median(alone), daemon.tail()
