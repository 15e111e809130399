"""Starts of containers whose settings have to be in force at the first instruction."""

from collections.abc import Callable
from typing import Final

from tests.e2e.agent import Agent, eventually
from tests.e2e.conftest import PodFactory
from tests.e2e.node import Node, Report, RunningPod
from tests.e2e.pods import PodSpec

STARTS: Final = 3
"""A start that a busy neighbour has delayed is no broken promise, if the agent knows and tells that it was late."""


def told_in_time(agent: Agent, pod: RunningPod) -> bool:
    """The agent's own account of the start."""

    def times() -> list[bool | None]:
        known = agent.pod(pod.spec.uid) or {"containers": []}
        return [
            container["times"]["before_exec"] for container in known["containers"] if container["id"] == pod["main"].id
        ]

    eventually("the agent tells of the start", lambda: times() not in ([], [None]))
    return bool(times()[0])


def started_in_time(
    node: Node, run_pod: PodFactory, agent: Agent, make: Callable[[], PodSpec], settled: Callable[[Report], bool]
) -> tuple[RunningPod, Report]:
    """A pod that was ``settled`` at its first instruction. Late ones the agent must know to be late."""
    for _ in range(STARTS):
        pod = run_pod(make())
        report = pod["main"].report()
        if settled(report):
            return pod, report
        assert not told_in_time(agent, pod), f"told as in time: {report}"
        node.remove_pod(pod)
    raise AssertionError(f"{STARTS} starts in a row were too late:\n{agent.tail()}")
