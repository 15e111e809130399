import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import QosClass
from reconciler.sources import checkpoints
from reconciler.sources.checkpoints import CheckpointSource
from state import checksum
from state.checkpoint import CheckpointError, CheckpointFault
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


def rename_in(root: Path, content: str, name: str = "cpu_manager_state") -> None:
    """As the kubelet does: a temporary dot name, then a rename."""
    directory = root / KUBELET
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".1234567").write_text(content)
    os.rename(directory / ".1234567", directory / name)


async def watching(root: Path, nursery: trio.Nursery) -> tuple[CheckpointSource, Marks]:
    marks = Marks()
    source = CheckpointSource(marks, root=str(root))
    await nursery.start(source.run)
    return source, marks


def test_without_a_loop_the_files_are_read_once(tmp_path: Path) -> None:
    rename_in(tmp_path, cpu_state("static", "0", {"u": {"main": "1"}}))
    source = CheckpointSource(Marks(), root=str(tmp_path))
    view = source.view(pod("u"))
    assert (view.policy, view.exclusive) == (CpuPolicy.STATIC, {"u": {"main": CpuSet([1])}})
    assert source.status().ok
    assert isinstance(source.memory, CheckpointError)
    assert source.memory.fault is CheckpointFault.MISSING


def test_a_node_without_a_kubelet_is_a_status_and_no_error(tmp_path: Path) -> None:
    source = CheckpointSource(Marks(), root=str(tmp_path))
    assert source.view({}).policy is CpuPolicy.UNKNOWN
    status = source.status()
    assert (status.ok, status.name) == (False, "kubelet checkpoints")
    assert f"{tmp_path}/{KUBELET}/cpu_manager_state" in status.detail


async def test_a_rename_into_place_is_read_and_marks_the_node(tmp_path: Path, nursery: trio.Nursery) -> None:
    rename_in(tmp_path, cpu_state("static", "0-1"))
    source, marks = await watching(tmp_path, nursery)
    marks.log.clear()
    rename_in(tmp_path, cpu_state("static", "0", {"u": {"main": "1"}}))
    await until(lambda: bool(marks.log))
    assert marks.log == ["node"]
    assert source.view(pod("u")).exclusive == {"u": {"main": CpuSet([1])}}


async def test_half_written_dot_names_unchanged_contents_and_strangers_mark_nothing(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    content = cpu_state("static", "0-1")
    rename_in(tmp_path, content)
    _, marks = await watching(tmp_path, nursery)
    (tmp_path / KUBELET / ".999").write_text('{"policyName":')
    (tmp_path / KUBELET / "pki").mkdir()
    rename_in(tmp_path, content)
    rename_in(tmp_path, cpu_state("static", "0"))
    await until(lambda: bool(marks.log))
    assert marks.log == ["node"]


async def test_a_directory_that_appears_later_is_found(tmp_path: Path, nursery: trio.Nursery) -> None:
    source, marks = await watching(tmp_path, nursery)
    (tmp_path / "var").mkdir()
    await trio.sleep(0.02)
    rename_in(tmp_path, cpu_state("static", "0-3"))
    await until(lambda: source.status().ok)
    assert "node" in marks.log
    assert source.view({}).default_cpus == CpuSet.span(4)


async def test_a_new_kubelet_socket_is_a_restart_and_everything_is_looked_at(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    plugins = tmp_path / KUBELET / "device-plugins"
    plugins.mkdir(parents=True)
    (plugins / "kubelet.sock").touch()
    rename_in(tmp_path, cpu_state("static", "0-1"))
    marks = Marks()
    source = CheckpointSource(marks, root=str(tmp_path), clock=lambda: 31.0)
    for at in (0.0, 10.0, 20.0, 30.0):
        source.reassertion.updated("c", at, changed=False)
    assert source.reassertion.period(31.0) is not None
    await nursery.start(source.run)
    marks.log.clear()
    (plugins / "kubelet.sock").unlink()
    await trio.sleep(0.02)
    assert marks.log == []
    (plugins / "kubelet.sock").touch()
    await until(lambda: bool(marks.log))
    assert marks.log == ["*kubelet restarted"]
    assert source.reassertion.period(31.0) is None


async def test_sockets_that_come_and_go_count_as_one_start_for_a_while(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_GAP_S", 3600.0)
    rename_in(tmp_path, cpu_state("static", "0-1"))
    plugins = tmp_path / KUBELET / "device-plugins"
    plugins.mkdir()
    starts: list[None] = []
    source = CheckpointSource(Marks(), root=str(tmp_path), on_restart=lambda: starts.append(None))
    await nursery.start(source.run)
    for number in range(20):
        (plugins / "kubelet.sock").touch()
        (plugins / "kubelet.sock").unlink()
        rename_in(tmp_path, cpu_state("static", f"0,{number + 2}"))
        await until(lambda number=number: str(number + 2) in str(source.cpus))  # type: ignore[misc]
    assert len(starts) == 1


async def test_a_start_soon_after_another_one_is_not_lost(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_RESTART_GAP_S", 0.05)
    plugins = tmp_path / KUBELET / "device-plugins"
    plugins.mkdir(parents=True)
    _, marks = await watching(tmp_path, nursery)
    for number in (1, 2):
        (plugins / "kubelet.sock").touch()
        await until(lambda number=number: marks.log.count("*kubelet restarted") == number)  # type: ignore[misc]
        (plugins / "kubelet.sock").unlink()


@pytest.mark.parametrize("link", [None, "to the root directory", "to its parent"])
async def test_with_another_root_directory_the_socket_and_the_devices_are_where_kubernetes_has_them(
    tmp_path: Path, nursery: trio.Nursery, link: str | None
) -> None:
    """The device manager's directory is a constant; only the other checkpoints follow --root-dir."""
    own = tmp_path / "data/kubelet"
    own.mkdir(parents=True)
    (tmp_path / "var/lib").mkdir(parents=True)
    if link == "to the root directory":
        (tmp_path / KUBELET).symlink_to(own)
    elif link == "to its parent":
        (own.parent / "lib").mkdir()
        (tmp_path / "var/lib").rmdir()
        (tmp_path / "var/lib").symlink_to(own.parent / "lib")
    marks = Marks()
    restarts: list[bool] = []
    source = CheckpointSource(
        marks, root=str(tmp_path), kubelet_root="/data/kubelet", on_restart=lambda: restarts.append(True)
    )
    await nursery.start(source.run)
    plugins = tmp_path / KUBELET / "device-plugins"
    plugins.mkdir(parents=True)
    (plugins / "kubelet.sock").touch()
    await until(lambda: bool(restarts))
    assert "*kubelet restarted" in marks.log
    fixture = FIXTURES / "memory-static-device-allocated/kubelet_internal_checkpoint"
    (plugins / ".5").write_bytes(fixture.read_bytes())
    os.rename(plugins / ".5", plugins / "kubelet_internal_checkpoint")
    await until(lambda: not isinstance(source.devices, CheckpointError | None))
    (own / ".7").write_text(cpu_state("static", "0-1"))
    os.rename(own / ".7", own / "cpu_manager_state")
    await until(lambda: source.view({}).default_cpus == CpuSet.span(2))
    assert len(restarts) == 1
    (plugins / "kubelet.sock").unlink()
    (plugins / "kubelet.sock").touch()
    await until(lambda: len(restarts) == 2)


async def test_what_is_below_another_root_directory_is_not_the_device_managers(tmp_path: Path) -> None:
    other = tmp_path / "data/kubelet/device-plugins"
    other.mkdir(parents=True)
    fixture = FIXTURES / "memory-static-device-allocated/kubelet_internal_checkpoint"
    (other / "kubelet_internal_checkpoint").write_bytes(fixture.read_bytes())
    source = CheckpointSource(Marks(), root=str(tmp_path), kubelet_root="/data/kubelet")
    assert isinstance(source.devices, CheckpointError)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_device_checkpoint_that_is_no_file_is_a_fault_and_no_wait(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / KUBELET / "device-plugins").mkdir(parents=True)
    make(tmp_path / KUBELET / "device-plugins/kubelet_internal_checkpoint")
    source = CheckpointSource(Marks(), root=str(tmp_path))
    assert isinstance(source.devices, CheckpointError)
    assert source.devices.fault is not CheckpointFault.MISSING


async def test_the_rhythm_is_logged_when_it_begins_and_ends_and_the_node_is_planned_again_then(
    tmp_path: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    now = 30.0
    marks = Marks()
    source = CheckpointSource(marks, root=str(tmp_path), clock=lambda: now)
    await nursery.start(source.run)
    for at in (0.0, 10.0, 20.0, 30.0):
        source.reassertion.updated("c", at, changed=False)
    assert [source.view({}).reasserts_s for _ in range(3)] == [10.0] * 3
    assert len([row for row in caplog.records if "rewrites every container" in row.message]) == 1
    marks.log.clear()
    now = 44.99
    source.view({})
    await until(lambda: marks.log == ["node"])
    now = 45.01
    assert [source.view({}).reasserts_s for _ in range(3)] == [None] * 3
    assert len([row for row in caplog.records if "rewrites every container" in row.message]) == 2


async def test_the_device_checkpoint_is_watched_in_its_own_directory(tmp_path: Path, nursery: trio.Nursery) -> None:
    plugins = tmp_path / KUBELET / "device-plugins"
    plugins.mkdir(parents=True)
    source, _ = await watching(tmp_path, nursery)
    fixture = Path(__file__).parents[2] / "fixtures/kubelet/memory-static-device-allocated/kubelet_internal_checkpoint"
    (plugins / ".5").write_bytes(fixture.read_bytes())
    os.rename(plugins / ".5", plugins / "kubelet_internal_checkpoint")
    await until(lambda: not isinstance(source.devices, CheckpointError | None))
    assert not isinstance(source.devices, CheckpointError | None)
    assert source.devices.entries[0].resource == "example.io/widget"


async def test_a_torn_file_keeps_what_was_known_and_is_shown(tmp_path: Path, nursery: trio.Nursery) -> None:
    rename_in(tmp_path, cpu_state("static", "0", {"u": {"main": "1"}}))
    source, _ = await watching(tmp_path, nursery)
    rename_in(tmp_path, '{"policyName":"static","defa')
    await until(lambda: not source.status().ok)
    view = source.view(pod("u"))
    assert (view.exclusive, view.held) == ({"u": {"main": CpuSet([1])}}, True)
    assert "whole JSON" in source.status().detail


async def test_when_waiting_is_over_the_node_is_marked_without_any_event(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.sources.allocations._CONFIRM_S", 0.2)
    rename_in(tmp_path, cpu_state("static", "0", {"u": {"main": "1"}}))
    source, marks = await watching(tmp_path, nursery)
    assert not source.view(pod("u")).held
    rename_in(tmp_path, cpu_state("static", "0-1"))
    await until(lambda: bool(marks.log))
    assert source.view(pod("u")).held
    marks.log.clear()
    await until(lambda: bool(marks.log))
    assert not source.view(pod("u")).held
    assert source.allocations.recheck_at is None


async def test_the_directory_made_anew_is_watched_again(tmp_path: Path, nursery: trio.Nursery) -> None:
    rename_in(tmp_path, cpu_state("static", "0-1"))
    source, _ = await watching(tmp_path, nursery)
    os.rename(tmp_path / KUBELET, tmp_path / "aside")
    await until(lambda: not source.status().ok)
    rename_in(tmp_path, cpu_state("static", "0-2"))
    await until(lambda: source.status().ok)
    rename_in(tmp_path, cpu_state("static", "0-3"))
    await until(lambda: source.view({}).default_cpus == CpuSet.span(4))


@pytest.mark.parametrize("kubelet_root", ["/data/kubelet", "/data/kubelet/"])
def test_another_root_directory_of_the_kubelet_is_used(tmp_path: Path, kubelet_root: str) -> None:
    (tmp_path / "data/kubelet").mkdir(parents=True)
    (tmp_path / "data/kubelet/cpu_manager_state").write_text(cpu_state("none", ""))
    source = CheckpointSource(Marks(), root=str(tmp_path), kubelet_root=kubelet_root)
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
def test_memory_and_devices_in_use_tell_their_nodes(tmp_path: Path, recording: str, expected: set[str]) -> None:
    for name in ("memory_manager_state", "kubelet_internal_checkpoint"):
        if (FIXTURES / recording / name).exists():
            directory = tmp_path / KUBELET / ("device-plugins" if "internal" in name else "")
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text((FIXTURES / recording / name).read_text())
    view = CheckpointSource(Marks(), root=str(tmp_path)).view({})
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


def test_recorded_allocations_are_granted(tmp_path: Path) -> None:
    recorded = FIXTURES / "inplace-1.27-three-pods" / "pod_status_manager_state"
    rename_in(tmp_path, recorded.read_text(), "pod_status_manager_state")
    source = CheckpointSource(Marks(), root=str(tmp_path))
    resize = source.view({}).granted["11111111-1111-4111-8111-111111111111"]["main"]
    assert resize.requests == Resources(cpu_milli=1000, memory_bytes=64 * 2**20)
    assert resize.limits is None


def test_the_newer_file_alone_counts_where_there_is_one(tmp_path: Path) -> None:
    rename_in(tmp_path, '{"allocationEntries":{"u":{"main":{"cpu":"1"}}},"checksum":0}', "pod_status_manager_state")
    assert granted_cpu(CheckpointSource(Marks(), root=str(tmp_path))) == 1000
    rename_in(tmp_path, allocations("2"), "allocated_pods_state")
    assert granted_cpu(CheckpointSource(Marks(), root=str(tmp_path))) == 2000


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
    tmp_path: Path, files: dict[str, str], may_resize: bool
) -> None:
    for name, content in files.items():
        rename_in(tmp_path, content, name)
    assert CheckpointSource(Marks(), root=str(tmp_path)).view({}).may_resize is may_resize


async def test_a_new_allocation_marks_the_node_and_a_bad_file_keeps_the_last_one(
    tmp_path: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    rename_in(tmp_path, cpu_state("none", ""))
    rename_in(tmp_path, allocations("1"), "allocated_pods_state")
    source, marks = await watching(tmp_path, nursery)
    assert granted_cpu(source) == 1000
    marks.log.clear()
    rename_in(tmp_path, allocations("2"), "allocated_pods_state")
    await until(lambda: bool(marks.log))
    assert (marks.log, granted_cpu(source)) == (["node"], 2000)
    rename_in(tmp_path, allocations("3")[:-9], "allocated_pods_state")
    await until(lambda: len(marks.log) == 2)
    assert granted_cpu(source) == 2000
    assert not source.status().ok
    assert "allocated_pods_state" in source.status().detail
    source.read_all()
    assert (
        len(
            [
                record
                for record in caplog.records
                if "allocated_pods_state" in getattr(record, "fields", {}).get("error", "")
            ]
        )
        == 1
    )
    os.unlink(tmp_path / KUBELET / "allocated_pods_state")
    await until(lambda: len(marks.log) == 3)
    assert (granted_cpu(source), source.status().ok) == (None, True)


async def test_a_file_that_the_kernel_does_not_let_be_read_is_tried_again_soon(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "var/lib/kubelet"
    directory.mkdir(parents=True)
    (directory / "cpu_manager_state").write_text(cpu_state("none", ""))
    real, failures = os.open, [5]

    def refuse(path: str, *arguments: int, **more: int) -> int:
        if str(path).endswith("cpu_manager_state") and failures[0] > 0:
            failures[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("reconciler.sources.checkpoints._RESYNC_S", 1000.0)
    source, _ = await watching(tmp_path, nursery)
    assert not source.status().ok
    await trio.sleep(20)
    assert failures == [0]
    assert source.status().ok
