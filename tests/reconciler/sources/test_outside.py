"""Containers that a runtime with the other cgroup driver made: the daemon reports what doctor finds, and alerts."""

import os
from pathlib import Path

import pytest
import trio

from cgroupfs.hierarchy import Hierarchy
from reconciler.alerts.agent_alerts import SourceHealth, source_states
from reconciler.sources.outside import NAME, groups_outside, outside_status
from tests.fakes.livenode import LiveNode
from tests.until import until

CONTAINER = f"kubepods-besteffort-pod1.slice:cri-containerd:{'a' * 64}"


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    return LiveNode(tmp_path, files=False)


def make(live: LiveNode, name: str) -> str:
    path = Hierarchy.detect(live.root).trigger_directory(f"/{name}")
    os.makedirs(path)
    return path


def test_they_are_found_at_the_root_and_in_a_services_group(live: LiveNode) -> None:
    hierarchy = Hierarchy.detect(live.root)
    assert groups_outside(hierarchy) == []
    make(live, CONTAINER)
    make(live, f"system.slice/containerd.service/{CONTAINER}")
    make(live, "kubepods-besteffort-pod2.slice")  # the systemd driver's own
    assert groups_outside(hierarchy) == [f"/{CONTAINER}", f"/system.slice/containerd.service/{CONTAINER}"]


async def test_the_daemon_has_a_problem_and_an_alert_of_them_until_they_are_gone(live: LiveNode) -> None:
    path = make(live, CONTAINER)
    health = SourceHealth(60)
    with live.agent() as agent:
        async with trio.open_nursery() as nursery:
            (files,) = (each for layer in agent.components() for each in layer if each.name == "operator's files")
            await nursery.start(files.run)
            await until(lambda: agent.sources.outside)
            nursery.cancel_scope.cancel()
        (status,) = (item for item in agent.statuses() if item.name == NAME)
        assert not status.ok
        assert "1 container outside of the pods' directories, such as /kubepods-besteffort-pod1" in status.detail
        assert "different cgroup drivers" in status.detail
        assert not health.check(source_states([status]), 0.0, 0.0)
        (alert,) = health.check(source_states([status]), 60.0, 0.0)
        assert alert.labels == {"source": NAME}
        os.rmdir(path)
        agent.sources.outside = groups_outside(agent.place.hierarchy)
        assert not [item for item in agent.statuses() if item.name == NAME]
        (status,) = (item for item in agent.watched() if item.name == NAME)
        (ended,) = health.check(source_states([status]), 70.0, 0.0)
        assert ended.resolved


def test_a_name_of_any_length_is_cut() -> None:
    assert len(outside_status([f"/{'x' * 4000}"]).detail) < 300
