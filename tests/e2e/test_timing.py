"""The order and the times of a container's start, by the container, by inotify and by the kernel; the bare C loop."""

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import trace
from tests.e2e.baseline.run import WatchWrite
from tests.e2e.conftest import PodFactory
from tests.e2e.mounts import hierarchies, pure_v2
from tests.e2e.node import Node
from tests.e2e.pods import best_effort, burstable
from tests.e2e.statewatch import StateWatch
from tests.fakes.kubelet.cgroups import read

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.quiet,
    pytest.mark.skipif(pure_v2(), reason="the bare loop and these files are cgroup v1's"),
]

STARTS = 5


def _files() -> dict[str, str]:
    mounted = hierarchies()
    return {
        f"{mounted['cpuset']}%s/cpuset.cpus": "0",
        f"{mounted['cpu']}%s/cpu.shares": "3",
        f"{mounted['cpu']}%s/cpu.cfs_quota_us": "20000",
        f"{mounted['memory']}%s/memory.limit_in_bytes": str(256 << 20),
    }


def _loop(node: Node, directory: Path) -> WatchWrite:
    containerd = node.containerd
    return WatchWrite(
        runc_root=containerd.runc_root, bundles=containerd.bundles, files=_files(), directory=str(directory)
    )


def test_the_bare_loop_is_in_time_and_leaves_pause_containers_alone(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with _loop(containerd_node, tmp_path) as loop:
        pods = [run_pod(best_effort(f"bounded-{n}")) for n in range(STARTS)]
        reports = [pod["main"].report() for pod in pods]
        answers = {answer.container: answer for answer in loop.answers()}
    assert set(answers) == {pod["main"].id for pod in pods}
    for pod, report in zip(pods, reports, strict=True):
        answer = answers[pod["main"].id]
        assert answer.failed == 0
        assert answer.last_write_ns < report.first_ns
        seen = report.values
        assert (seen["cpuset.cpus"], seen["cpu.shares"], seen["cpu.cfs_quota_us"]) == ("0", "3", "20000")
        assert seen["memory.limit_in_bytes"] == str(256 << 20)
        assert report.affinity == {0}
        pause = containerd_node.cgroups.container_group(pod.spec, pod.sandbox)
        assert read(containerd_node.cgroups.directory("cpu", pause), "cpu.cfs_quota_us") == "-1"
    record_property("signal to last write, C, median us", statistics.median(a.took_us for a in answers.values()))


@pytest.mark.skipif(trace.missing() is not None, reason=f"no kernel trace here: {trace.missing()}")
def test_the_kernel_sees_mkdir_then_rename_then_exec(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with (
        trace.KernelTrace(str(tmp_path)) as recording,
        StateWatch(containerd_node.containerd.runc_root) as watch,
        _loop(containerd_node, tmp_path) as loop,
    ):
        pods = [run_pod(best_effort(f"traced-{n}")) for n in range(STARTS)]
        reports = [pod["main"].report() for pod in pods]
        pids = [pod["main"].init_pid() for pod in pods]
        answers = {answer.container: answer for answer in loop.answers()}
        seen = recording.stop()
    to_state, to_exec = [], []
    for pod, report, pid in zip(pods, reports, pids, strict=True):
        container = pod["main"]
        made = seen.made(container.group).t_ns
        state = watch.renames[container.id][0]
        program = seen.exec_of(pid, "/app").t_ns
        # tracefs prints whole microseconds.
        assert made < state < program <= report.first_ns + 1000
        to_state.append((state - made) / 1e6)
        to_exec.append((program - state) / 1e6)
        if seen.writes is not None:
            ours = [w for w in seen.writes_to(container.group) if w.comm == "watchwrite"]
            assert [Path(w.path).name for w in ours] == [Path(name).name for name in _files()]
            assert answers[container.id].signal_ns < ours[0].t_ns <= ours[-1].t_ns < program
            runtime = [w for w in seen.writes_to(container.group) if w.comm.startswith("runc")]
            assert runtime
            assert max(w.t_ns for w in runtime if Path(w.path).name == "cpu.shares") < state
    record_property("trace by", seen.tool)
    record_property("mkdir to state.json, ms", [round(ms, 1) for ms in to_state])
    record_property("state.json to exec, ms", [round(ms, 1) for ms in to_exec])


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_strace_shows_the_writes_of_one_process_where_bpftrace_is_missing(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path
) -> None:
    with _loop(containerd_node, tmp_path) as loop, trace.StraceWrites(loop.pid, str(tmp_path)) as recording:
        pod = run_pod(burstable("traced"))
        first_ns = pod["main"].report().first_ns
        writes = recording.stop()
    assert [(Path(w.path).name, w.text) for w in writes] == [(Path(p).name, v) for p, v in _files().items()]
    assert all(pod["main"].group in w.path for w in writes)
    assert writes[0].t_ns < first_ns + 50_000_000
