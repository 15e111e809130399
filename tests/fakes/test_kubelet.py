"""What the fake kubelet writes again and when, its checkpoint's bytes, what it lists, and how it fails to."""

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.sources.kubelet_api import decode_pods
from state.kubelet import CPU_STATE, parse_cpu_manager_state
from tests.e2e.pods import PodSpec, burstable, guaranteed
from tests.fakes.kubelet.api import Behaviour
from tests.fakes.kubelet.cpu_manager import CpuManager
from tests.fakes.kubelet.fake import ID_DELAY_S, Assigned, FakeKubelet, Version, due, recorded_at_start
from tests.fakes.marks import MARKS

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
    assert [recorded_at_start(SHARED), recorded_at_start(ALONE)] == [False, True]


def _manager(directory: Path, policy: str) -> CpuManager:
    return CpuManager(str(directory), policy=policy, cpus={0, 1}, reserved={0})


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
    assert file.read_bytes() == _recorded("static-one-exclusive"), "the CPUs return at the next tick only"
    manager.tick()
    assert file.read_bytes() == _recorded("static-after-removal")


def test_checkpoints_agree_with_the_agents_own_reader(tmp_path: Path) -> None:
    manager = CpuManager(str(tmp_path), policy="static", cpus=set(range(8)), reserved={0})
    pods = [guaranteed(f"p{number}", cpus=number) for number in (1, 2)]
    for pod in pods:
        manager.allocate(pod)
    data = (tmp_path / CPU_STATE).read_bytes()
    manager_state = parse_cpu_manager_state(data)
    assert manager_state.verified
    assert manager_state.exclusive_cpus == CpuSet.parse("1-3")


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    made = FakeKubelet(str(tmp_path))
    yield made
    made.stop()


def test_a_pod_is_listed_at_once_and_its_ids_later(kubelet: FakeKubelet) -> None:
    assert json.loads(kubelet.api.answer("/pods")[1])["items"] is None
    pod = burstable("web", cpu_request=250)
    kubelet.admit(pod)
    kubelet.started(pod, "main", "f" * 64)
    now = time.monotonic()
    (listed,) = kubelet.items_at(now)
    assert (listed["metadata"]["uid"], listed["status"]["qosClass"]) == (pod.uid, "Burstable")
    assert listed["status"]["containerStatuses"] == []
    (later,) = kubelet.items_at(now + ID_DELAY_S[1])
    assert later["status"]["containerStatuses"][0]["containerID"] == f"containerd://{'f' * 64}"
    assert kubelet.items_at(now + ID_DELAY_S[0] - 0.01)[0]["status"]["containerStatuses"] == []
    kubelet.removed(pod)
    assert kubelet.items_at(now) == []


def test_the_agent_understands_the_endpoint(kubelet: FakeKubelet) -> None:
    kubelet.api.start()
    pod = burstable("web", cpu_request=250, cpu_limit=500, memory_limit=64 << 20)
    kubelet.admit(pod)
    with urllib.request.urlopen(f"http://127.0.0.1:{kubelet.api.port}/pods", timeout=60) as answer:
        metas, problems = decode_pods(answer.read(), MARKS)
    assert problems == ()
    (meta,) = metas
    assert (meta.uid, meta.name, meta.qos) == (pod.uid, "web", "Burstable")
    assert meta.containers[0].requests.cpu_milli == 250
    assert meta.containers[0].limits.memory_bytes == 64 << 20


@pytest.mark.parametrize(
    ("behaviour", "path", "status", "whole"),
    [
        (Behaviour.GOOD, "/pods", 200, True),
        (Behaviour.GOOD, "/configz", 404, True),
        (Behaviour.UNAUTHORIZED, "/pods", 401, True),
        (Behaviour.BROKEN, "/pods", 500, True),
        (Behaviour.HALF, "/pods", 200, False),
        (Behaviour.EMPTY, "/pods", 200, True),
    ],
)
def test_each_behaviour_has_its_status_and_length(
    kubelet: FakeKubelet, behaviour: Behaviour, path: str, status: int, whole: bool
) -> None:
    kubelet.admit(burstable("web"))
    kubelet.api.behaviour = behaviour
    answered, body, length = kubelet.api.answer(path)
    assert (answered, len(body) == length) == (status, whole)
    if behaviour is Behaviour.EMPTY:
        assert json.loads(body)["items"] is None


def test_a_stopped_api_closes_its_connections_and_returns_on_the_same_port(kubelet: FakeKubelet) -> None:
    kubelet.api.start()
    port = kubelet.api.port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /pods HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        kubelet.api.stop()
        while connection.recv(1 << 16):
            pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    kubelet.api.start()
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    assert kubelet.api.port == port


def test_only_a_reconciling_kubelet_keeps_a_removed_pods_cpus_until_its_tick(tmp_path: Path) -> None:
    for reconciles in (False, True):
        kubelet = FakeKubelet(str(tmp_path), policy="static", cpus={0, 1}, reserved={0}, reconciles=reconciles)
        pod = guaranteed("alone")
        kubelet.admit(pod)
        kubelet.removed(pod)
        assert (kubelet.cpus.default == {0, 1}) is not reconciles
        kubelet.tick()
        assert kubelet.cpus.default == {0, 1}
