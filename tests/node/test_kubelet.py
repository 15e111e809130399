"""What the embedded kubelet writes again and when, its checkpoint's bytes, and what it lists."""

import json
import time
import urllib.request
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.sources.kubelet_api import decode_pods
from state.kubelet import CPU_STATE, parse_cpu_manager_state, render_cpu_manager_state
from tests.e2e.pods import PodSpec, burstable, guaranteed
from tests.node.kubelet import Assigned, TickingCpuManager, Version, due, noted_at_start
from tests.node.podserver import ID_DELAY_S, PodServer

RECORDED = Path(__file__).parents[1] / "fixtures/kubelet"
SHARED, ALONE = Assigned("shared", "0", exclusive=False), Assigned("alone", "1", exclusive=True)


@pytest.mark.parametrize(
    ("version", "last", "updated"),
    [
        (Version.NONE, {}, []),
        (Version.NONE, {"shared": "0-1"}, []),
        (Version.STATIC_122, {"alone": "1"}, ["shared"]),
        (Version.STATIC_122, {"shared": "0", "alone": "1"}, []),
        (Version.STATIC_122, {"shared": "0-1", "alone": "1"}, ["shared"]),
        (Version.STATIC_122, {}, ["shared", "alone"]),
        (Version.STATIC_121, {"shared": "0", "alone": "1"}, ["shared", "alone"]),
    ],
    ids=["none", "none, moved", "first tick", "second tick", "default set changed", "after a restart", "1.21"],
)
def test_a_tick_updates_what_that_kubelet_would(version: Version, last: dict[str, str], updated: list[str]) -> None:
    assert due(version, [SHARED, ALONE], last) == updated


def test_only_an_exclusive_containers_start_counts_as_its_update() -> None:
    assert [noted_at_start(SHARED), noted_at_start(ALONE)] == [False, True]


def _manager(directory: Path, policy: str) -> TickingCpuManager:
    return TickingCpuManager(str(directory), policy=policy, cpus={0, 1}, reserved={0})


def _recorded(name: str) -> bytes:
    return (RECORDED / name / CPU_STATE).read_bytes()


def test_checkpoints_are_the_recorded_ones_byte_for_byte(tmp_path: Path) -> None:
    file = tmp_path / CPU_STATE
    _manager(tmp_path, "none")
    assert file.read_bytes() == _recorded("none")
    manager = _manager(tmp_path, "static")
    assert file.read_bytes() == _recorded("static-fresh")
    pod = guaranteed("one")
    pod = PodSpec(name=pod.name, uid="11111111-1111-4111-8111-111111111111", containers=pod.containers)
    manager.allocate(pod)
    assert file.read_bytes() == _recorded("static-one-exclusive")
    manager.release(pod)
    assert file.read_bytes() == _recorded("static-one-exclusive"), "the CPUs come back at the next tick only"
    manager.settle()
    assert file.read_bytes() == _recorded("static-after-removal")


def test_checkpoints_agree_with_the_agents_own_reader_and_renderer(tmp_path: Path) -> None:
    manager = TickingCpuManager(str(tmp_path), policy="static", cpus=set(range(8)), reserved={0})
    pods = [guaranteed(f"p{number}", cpus=number) for number in (1, 2)]
    for pod in pods:
        manager.allocate(pod)
    data = (tmp_path / CPU_STATE).read_bytes()
    found = parse_cpu_manager_state(data)
    assert found.verified
    assert found.exclusive_cpus == CpuSet.parse("1-3")
    assert json.loads(data) == json.loads(render_cpu_manager_state("static", found.default_cpus, found.entries))


def test_a_pod_is_listed_at_once_and_its_ids_later() -> None:
    server = PodServer()
    try:
        assert server.listing(0.0)["items"] is None
        pod = burstable("web", cpu_request=250)
        server.admit(pod)
        server.started(pod, "main", "f" * 64)
        now = time.monotonic()
        (listed,) = server.listing(now)["items"]
        assert (listed["metadata"]["uid"], listed["status"]["qosClass"]) == (pod.uid, "Burstable")
        assert listed["status"]["containerStatuses"] == []
        (later,) = server.listing(now + ID_DELAY_S[1])["items"]
        assert later["status"]["containerStatuses"][0]["containerID"] == f"containerd://{'f' * 64}"
        assert server.listing(now + ID_DELAY_S[0] - 0.01)["items"][0]["status"]["containerStatuses"] == []
    finally:
        server.stop()


def test_the_agent_understands_the_endpoint() -> None:
    server = PodServer()
    server.start()
    try:
        pod = burstable("web", cpu_request=250, cpu_limit=500, memory_limit=64 << 20)
        server.admit(pod)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/pods", timeout=5) as answer:
            metas, problems = decode_pods(answer.read())
        assert problems == ()
        (meta,) = metas
        assert (meta.uid, meta.name, meta.qos) == (pod.uid, "web", "Burstable")
        assert meta.containers[0].requests.cpu_milli == 250
        assert meta.containers[0].limits.memory_bytes == 64 << 20
    finally:
        server.stop()
