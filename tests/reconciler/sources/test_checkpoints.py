import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import QosClass
from reconciler.sources import checkpoints
from reconciler.sources.checkpoints import CheckpointSource
from state import checksum
from state.checkpoint import CheckpointError, CheckpointFault
from state.kubelet import CpuManagerState
from state.model import Classification, Container, CpuPolicy, GroupRef, Pod, PodClass, Resources
from tests.fakes.kubelet.cpu_manager import checkpoint as cpu_state
from tests.until import until

KUBELET = "var/lib/kubelet"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "kubelet"


class Marks:
    def __init__(self) -> None:
        self.log: list[str] = []

    def mark(self, key: str) -> None:
        self.log.append(key)

    def mark_all(self, why: str) -> None:
        self.log.append(f"*{why}")


def pod(uid: str) -> dict[str, Pod]:
    return {
        uid: Pod(
            uid=uid,
            qos=QosClass.GUARANTEED,
            group=GroupRef(path=f"/kubepods/pod{uid}"),
            containers=(Container(id="c", group=GroupRef(path="/kubepods/c"), name="main"),),
            classification=Classification(pod_class=PodClass.SHARED, source="test"),
        )
    }


class Node:
    """A node below ``root`` with the kubelet's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kubelet = root / KUBELET
        self.plugins = self.kubelet / "device-plugins"
        self.marks = Marks()

    def write(self, content: str, name: str = "cpu_manager_state", directory: Path | None = None) -> None:
        """As the kubelet does: a temporary dot name, then a rename."""
        directory = directory or self.kubelet
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".1234567").write_text(content)
        os.rename(directory / ".1234567", directory / name)

    def write_devices(self, directory: Path | None = None) -> None:
        fixture = FIXTURES / "memory-static-device-allocated/kubelet_internal_checkpoint"
        self.write(fixture.read_text(), "kubelet_internal_checkpoint", directory or self.plugins)

    def start_kubelet(self) -> None:
        """Its socket is there anew."""
        self.plugins.mkdir(parents=True, exist_ok=True)
        (self.plugins / "kubelet.sock").unlink(missing_ok=True)
        (self.plugins / "kubelet.sock").touch()

    def source(self, **options: Any) -> CheckpointSource:
        return CheckpointSource(self.marks, root=str(self.root), **options)

    async def watched(self, nursery: trio.Nursery, **options: Any) -> CheckpointSource:
        source = self.source(**options)
        await nursery.start(source.run)
        return source


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_without_a_loop_the_files_are_read_once(node: Node) -> None:
    node.write(cpu_state("static", "0", {"u": {"main": "1"}}))
    source = node.source()
    view = source.view(pod("u"))
    assert (view.policy, view.exclusive) == (CpuPolicy.STATIC, {"u": {"main": CpuSet([1])}})
    assert source.status().ok
    assert isinstance(source.memory, CheckpointError)
    assert source.memory.fault is CheckpointFault.MISSING


def test_a_node_without_a_kubelet_is_a_status_and_no_error(node: Node) -> None:
    source = node.source()
    assert source.view({}).policy is CpuPolicy.UNKNOWN
    status = source.status()
    assert (status.ok, status.name) == (False, "kubelet checkpoints")
    assert f"{node.root}/{KUBELET}/cpu_manager_state" in status.detail


async def test_a_rename_into_place_is_read_and_marks_the_node(node: Node, nursery: trio.Nursery) -> None:
    node.write(cpu_state("static", "0-1"))
    source = await node.watched(nursery)
    node.write(cpu_state("static", "0", {"u": {"main": "1"}}))
    await until(lambda: bool(node.marks.log))
    assert node.marks.log == ["node"]
    assert source.view(pod("u")).exclusive == {"u": {"main": CpuSet([1])}}


async def test_half_written_dot_names_unchanged_contents_and_strangers_mark_nothing(
    node: Node, nursery: trio.Nursery
) -> None:
    content = cpu_state("static", "0-1")
    node.write(content)
    await node.watched(nursery)
    (node.kubelet / ".999").write_text('{"policyName":')
    (node.kubelet / "pki").mkdir()
    node.write(content)
    node.write(cpu_state("static", "0"))
    await until(lambda: bool(node.marks.log))
    assert node.marks.log == ["node"]


async def test_a_directory_that_appears_later_is_found(node: Node, nursery: trio.Nursery) -> None:
    source = await node.watched(nursery)
    (node.root / "var").mkdir()
    await trio.sleep(0.02)
    node.write(cpu_state("static", "0-3"))
    await until(lambda: source.status().ok)
    assert "node" in node.marks.log
    assert source.view({}).default_cpus == CpuSet.span(4)


async def test_a_new_kubelet_socket_is_a_restart_and_everything_is_looked_at(node: Node, nursery: trio.Nursery) -> None:
    node.start_kubelet()
    node.write(cpu_state("static", "0-1"))
    source = node.source(clock=lambda: 31.0)
    for at in (0.0, 10.0, 20.0, 30.0):
        source.reassertion.updated("c", at, changed=False)
    assert source.reassertion.period(31.0) is not None
    await nursery.start(source.run)
    (node.plugins / "kubelet.sock").unlink()
    await trio.sleep(0.02)
    assert node.marks.log == []
    node.start_kubelet()
    await until(lambda: bool(node.marks.log))
    assert node.marks.log == ["*kubelet restarted"]
    assert source.reassertion.period(31.0) is None


async def test_sockets_that_come_and_go_count_as_one_start_for_a_while(
    node: Node, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_GAP_S", 3600.0)
    node.write(cpu_state("static", "0-1"))
    starts: list[None] = []
    source = await node.watched(nursery, on_restart=lambda: starts.append(None))
    for number in range(20):
        node.start_kubelet()
        node.write(cpu_state("static", f"0,{number + 2}"))
        await until(lambda number=number: str(number + 2) in str(source.cpus))  # type: ignore[misc]
    assert len(starts) == 1


async def test_a_start_soon_after_another_one_is_not_lost(
    node: Node, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_GAP_S", 0.05)
    await node.watched(nursery)
    for number in (1, 2):
        node.start_kubelet()
        await until(lambda number=number: node.marks.log.count("*kubelet restarted") == number)  # type: ignore[misc]


def test_a_file_that_is_the_same_is_not_parsed_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum of a node's device checkpoint takes up to 64 ms, and each file is due once a minute."""
    node.write(cpu_state("static", "0-1"))
    node.write_devices()
    source = node.source()
    known = (source.cpus, source.devices)
    with monkeypatch.context() as patched:
        patched.setattr(checksum, "fnv1a", pytest.fail)
        source.read_all()
    assert (source.cpus, source.devices) == known
    node.write(cpu_state("static", "0-2"))
    source.read_all()
    assert isinstance(source.cpus, CpuManagerState)
    assert str(source.cpus.default_cpus) == "0-2"
    (node.kubelet / "cpu_manager_state").unlink()
    source.read_all()
    assert isinstance(source.cpus, CheckpointError)


async def test_a_link_in_the_place_of_the_socket_is_not_followed(node: Node) -> None:
    """A pod of a device plug-in may make one, to a file system whose server does not answer."""
    node.plugins.mkdir(parents=True)
    (node.root / "target").touch()
    (node.plugins / "kubelet.sock").symlink_to(node.root / "target")
    source = node.source()
    before = source._find_socket()
    assert before is not None
    (node.root / "target").unlink()
    assert source._find_socket() == before


@pytest.mark.parametrize("link", [None, "to the root directory", "to its parent"])
async def test_with_another_root_directory_the_socket_and_the_devices_are_where_kubernetes_has_them(
    node: Node, nursery: trio.Nursery, link: str | None
) -> None:
    """The device manager's directory is a constant; only the other checkpoints follow --root-dir."""
    own = node.root / "data/kubelet"
    own.mkdir(parents=True)
    (node.root / "var/lib").mkdir(parents=True)
    if link == "to the root directory":
        node.kubelet.symlink_to(own)
    elif link == "to its parent":
        (own.parent / "lib").mkdir()
        (node.root / "var/lib").rmdir()
        (node.root / "var/lib").symlink_to(own.parent / "lib")
    restarts: list[bool] = []
    source = await node.watched(nursery, kubelet_root="/data/kubelet", on_restart=lambda: restarts.append(True))
    node.start_kubelet()
    await until(lambda: bool(restarts))
    assert "*kubelet restarted" in node.marks.log
    node.write_devices()
    await until(lambda: not isinstance(source.devices, CheckpointError | None))
    node.write(cpu_state("static", "0-1"), directory=own)
    await until(lambda: source.view({}).default_cpus == CpuSet.span(2))
    assert len(restarts) == 1
    node.start_kubelet()
    await until(lambda: len(restarts) == 2)


async def test_what_is_below_another_root_directory_is_not_the_device_managers(node: Node) -> None:
    node.write_devices(node.root / "data/kubelet/device-plugins")
    source = node.source(kubelet_root="/data/kubelet")
    assert isinstance(source.devices, CheckpointError)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_device_checkpoint_that_is_no_file_is_a_fault_and_no_wait(node: Node, make: Callable[[Path], None]) -> None:
    node.plugins.mkdir(parents=True)
    make(node.plugins / "kubelet_internal_checkpoint")
    source = node.source()
    assert isinstance(source.devices, CheckpointError)
    assert source.devices.fault is not CheckpointFault.MISSING


async def test_the_rhythm_is_logged_when_it_begins_and_ends_and_the_node_is_planned_again_then(
    node: Node, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now = 30.0
    source = await node.watched(nursery, clock=lambda: now)
    for at in (0.0, 10.0, 20.0, 30.0):
        source.reassertion.updated("c", at, changed=False)
    assert [source.view({}).reasserts_s for _ in range(3)] == [10.0] * 3
    assert len([row for row in caplog.records if "rewrites every container" in row.message]) == 1
    node.marks.log.clear()
    now = 44.99
    source.view({})
    await until(lambda: node.marks.log == ["node"])
    now = 45.01
    assert [source.view({}).reasserts_s for _ in range(3)] == [None] * 3
    assert len([row for row in caplog.records if "rewrites every container" in row.message]) == 2


async def test_the_device_checkpoint_is_watched_in_its_own_directory(node: Node, nursery: trio.Nursery) -> None:
    node.plugins.mkdir(parents=True)
    source = await node.watched(nursery)
    node.write_devices()
    await until(lambda: not isinstance(source.devices, CheckpointError | None))
    assert not isinstance(source.devices, CheckpointError | None)
    assert source.devices.entries[0].resource == "example.io/widget"


async def test_a_torn_file_keeps_what_was_known_and_is_shown(node: Node, nursery: trio.Nursery) -> None:
    node.write(cpu_state("static", "0", {"u": {"main": "1"}}))
    source = await node.watched(nursery)
    node.write('{"policyName":"static","defa')
    await until(lambda: not source.status().ok)
    view = source.view(pod("u"))
    assert (view.exclusive, view.held) == ({"u": {"main": CpuSet([1])}}, True)
    assert "whole JSON" in source.status().detail


async def test_when_waiting_is_over_the_node_is_marked_without_any_event(
    node: Node, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.sources.allocations._CONFIRM_S", 0.2)
    node.write(cpu_state("static", "0", {"u": {"main": "1"}}))
    source = await node.watched(nursery)
    assert not source.view(pod("u")).held
    node.write(cpu_state("static", "0-1"))
    await until(lambda: bool(node.marks.log))
    assert source.view(pod("u")).held
    node.marks.log.clear()
    await until(lambda: bool(node.marks.log))
    assert not source.view(pod("u")).held
    assert source.allocations.recheck_at is None


async def test_the_directory_made_anew_is_watched_again(node: Node, nursery: trio.Nursery) -> None:
    node.write(cpu_state("static", "0-1"))
    source = await node.watched(nursery)
    os.rename(node.kubelet, node.root / "aside")
    await until(lambda: not source.status().ok)
    node.write(cpu_state("static", "0-2"))
    await until(lambda: source.status().ok)
    node.write(cpu_state("static", "0-3"))
    await until(lambda: source.view({}).default_cpus == CpuSet.span(4))


@pytest.mark.parametrize("kubelet_root", ["/data/kubelet", "/data/kubelet/"])
def test_another_root_directory_of_the_kubelet_is_used(node: Node, kubelet_root: str) -> None:
    node.write(cpu_state("none", ""), directory=node.root / "data/kubelet")
    source = node.source(kubelet_root=kubelet_root)
    assert source.view({}).policy is CpuPolicy.NONE


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        ("memory-static-exclusive", {"1/main memory", "7/main example.io/widget"}),
        ("memory-static-device-allocated", {"7/main example.io/widget"}),
        ("memory-static-device-registered", set()),
        ("none", set()),
    ],
)
def test_memory_and_devices_in_use_tell_their_nodes(node: Node, recording: str, expected: set[str]) -> None:
    for name in ("memory_manager_state", "kubelet_internal_checkpoint"):
        if (FIXTURES / recording / name).exists():
            directory = node.plugins if "internal" in name else node.kubelet
            node.write((FIXTURES / recording / name).read_text(), name, directory)
    view = node.source().view({})
    texts = {f"{key[35:]} {name}" for key, near in view.affinity.items() for name in near}
    assert texts == expected
    assert all(nodes == CpuSet((0,)) for near in view.affinity.values() for nodes in near.values())


# In-place resizing


def allocations(cpu: str) -> str:
    """allocated_pods_state of 1.34: one container of pod ``u``."""
    data = json.dumps({"entries": {"u": {"ContainerResources": {"main": {"requests": {"cpu": cpu}}}}}})
    return json.dumps({"data": data, "checksum": checksum.text(data)})


def granted_cpu(source: CheckpointSource) -> int | None:
    resize = source.view(pod("u")).granted.get("u", {}).get("main")
    return resize.requests.cpu_milli if resize is not None and resize.requests is not None else None


def test_recorded_allocations_are_granted(node: Node) -> None:
    recorded = FIXTURES / "inplace-1.27-three-pods" / "pod_status_manager_state"
    node.write(recorded.read_text(), "pod_status_manager_state")
    source = node.source()
    resize = source.view({}).granted["11111111-1111-4111-8111-111111111111"]["main"]
    assert resize.requests == Resources(cpu_milli=1000, memory_bytes=64 * 2**20)
    assert resize.limits is None


def test_the_newer_file_alone_counts_where_there_is_one(node: Node) -> None:
    node.write('{"allocationEntries":{"u":{"main":{"cpu":"1"}}},"checksum":0}', "pod_status_manager_state")
    assert granted_cpu(node.source()) == 1000
    node.write(allocations("2"), "allocated_pods_state")
    assert granted_cpu(node.source()) == 2000


@pytest.mark.parametrize(
    ("files", "may_resize"),
    [
        pytest.param({}, True, id="not known"),
        pytest.param({"cpu_manager_state": cpu_state("none", "")}, False, id="no checkpoint of resizing"),
        pytest.param({"cpu_manager_state": "{"}, False, id="a torn file is a kubelet's, too"),
        pytest.param(
            {
                "cpu_manager_state": cpu_state("none", ""),
                "pod_status_manager_state": '{"allocationEntries":{},"checksum":0}',
            },
            True,
            id="1.27 with the feature gate",
        ),
        pytest.param(
            {"cpu_manager_state": cpu_state("none", ""), "allocated_pods_state": "from the future"},
            True,
            id="a format that is not known",
        ),
    ],
)
def test_a_kubelet_that_can_resize_pods_is_known_by_its_checkpoint(
    node: Node, files: dict[str, str], may_resize: bool
) -> None:
    for name, content in files.items():
        node.write(content, name)
    assert node.source().view({}).may_resize is may_resize


async def test_a_new_allocation_marks_the_node_and_a_bad_file_keeps_the_last_one(
    node: Node, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    node.write(cpu_state("none", ""))
    node.write(allocations("1"), "allocated_pods_state")
    source = await node.watched(nursery)
    assert granted_cpu(source) == 1000
    node.marks.log.clear()
    node.write(allocations("2"), "allocated_pods_state")
    await until(lambda: bool(node.marks.log))
    assert (node.marks.log, granted_cpu(source)) == (["node"], 2000)
    node.write(allocations("3")[:-9], "allocated_pods_state")
    await until(lambda: len(node.marks.log) == 2)
    assert granted_cpu(source) == 2000
    assert not source.status().ok
    assert "allocated_pods_state" in source.status().detail
    source.read_all()
    errors = [getattr(record, "fields", {}).get("error", "") for record in caplog.records]
    assert len([error for error in errors if "allocated_pods_state" in error]) == 1
    os.unlink(node.kubelet / "allocated_pods_state")
    await until(lambda: len(node.marks.log) == 3)
    assert (granted_cpu(source), source.status().ok) == (None, True)


async def test_a_file_that_the_kernel_does_not_let_be_read_is_tried_again_soon(
    node: Node, nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.write(cpu_state("none", ""))
    real, failures = os.open, [5]

    def refuse(path: str, *arguments: int, **more: int) -> int:
        if str(path).endswith("cpu_manager_state") and failures[0] > 0:
            failures[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("reconciler.sources.checkpoints._RESYNC_S", 1000.0)
    source = await node.watched(nursery)
    assert not source.status().ok
    await trio.sleep(20)
    assert failures == [0]
    assert source.status().ok
