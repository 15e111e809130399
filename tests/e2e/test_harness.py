"""The real node of these tests does what a kubelet, containerd and runc do, and leaves nothing behind."""

import glob
import os
import subprocess
import sys
import time

import pytest

from tests.e2e import leftovers
from tests.e2e.agent import eventually
from tests.e2e.conftest import DRIVER, PodFactory
from tests.e2e.mounts import directories, mounts, pure_v2
from tests.e2e.node import Node, Running
from tests.e2e.pods import best_effort, burstable, guaranteed
from tests.e2e.statewatch import StateWatch
from tests.fakes.kubelet.cgroups import SYSTEMD, read
from tests.fakes.kubelet.cpu_manager import STATIC

pytestmark = pytest.mark.containerd

needs_v1 = pytest.mark.skipif(pure_v2(), reason="this machine has no cgroup v1 controllers; these values are v1's")


def _limits(container: Running) -> tuple[str, str]:
    """CPU quota and memory limit in whichever files this machine has."""
    if container.node.cgroups.v2:
        return container.read("cpu", "cpu.max").split()[0], container.read("memory", "memory.max")
    return container.read("cpu", "cpu.cfs_quota_us"), container.read("memory", "memory.limit_in_bytes")


@pytest.mark.core
def test_containers_are_where_the_kubelets_driver_puts_them_with_their_limits(
    containerd_node: Node, run_pod: PodFactory
) -> None:
    idle = run_pod(best_effort("idle"))
    web = run_pod(burstable("web", cpu_request=250, cpu_limit=500, memory_limit=64 << 20))
    assert _limits(web["main"]) == ("50000", str(64 << 20))
    assert _limits(idle["main"])[0] in {"-1", "max"}
    top, qos, pod = web["main"].group.split("/")[-4:-1]
    if containerd_node.cgroups.driver == SYSTEMD:
        assert (top, qos) == ("kubepods.slice", "kubepods-burstable.slice")
        assert web["main"].group.endswith(f".slice/cri-containerd-{web['main'].id}.scope")
    else:
        assert (top, qos, pod) == ("kubepods", "burstable", f"pod{web.spec.uid}")
        assert web["main"].group.endswith(f"/{web['main'].id}")
    for container in (idle["main"], web["main"]):
        assert str(container.init_pid()) in container.read("cpu", "cgroup.procs").split()


@pytest.mark.core
def test_a_container_reports_the_values_of_its_first_instruction(containerd_node: Node, run_pod: PodFactory) -> None:
    report = run_pod(burstable("web", cpu_request=250, cpu_limit=500, memory_limit=64 << 20))["main"].report()
    if containerd_node.cgroups.v2:
        assert (report.values["cpu.max"], report.values["memory.max"]) == ("50000 100000", str(64 << 20))
    else:
        assert (report.values["cpu.cfs_quota_us"], report.values["cpu.shares"]) == ("50000", "256")
        assert report.values["memory.limit_in_bytes"] == str(64 << 20)
    assert report.affinity == os.sched_getaffinity(0)


@needs_v1
def test_pod_directories_have_the_kubelets_values(containerd_node: Node, run_pod: PodFactory) -> None:
    idle = run_pod(best_effort("idle"))
    web = run_pod(burstable("web", cpu_request=250, cpu_limit=500, memory_limit=64 << 20))
    cgroups = containerd_node.cgroups
    assert read(cgroups.directory("cpu", cgroups.pod_group(idle.spec)), "cpu.shares") == "2"
    pod = cgroups.directory("cpu", cgroups.pod_group(web.spec))
    assert (read(pod, "cpu.shares"), read(pod, "cpu.cfs_quota_us")) == ("256", "50000")
    everywhere = read(cgroups.directory("cpuset", cgroups.group("kubepods")), "cpuset.cpus")
    assert idle["main"].read("cpuset", "cpuset.cpus") == everywhere


@pytest.mark.core
def test_the_runtime_renames_state_before_the_program_runs_and_at_every_update(
    containerd_node: Node, run_pod: PodFactory
) -> None:
    with StateWatch(containerd_node.containerd.runc_root) as watch:
        pod = run_pod(burstable("web"))
        signal_ns = watch.wait(pod["main"].id)
        # On a busy machine the watcher may run long after the rename; the file's change time is that of the rename.
        changed = os.stat(f"{containerd_node.containerd.runc_root}/{pod['main'].id}/state.json").st_ctime_ns
        renamed_ns = changed - (time.time_ns() - time.monotonic_ns())
        assert min(signal_ns, renamed_ns) < pod["main"].report().first_ns
        before = len(watch.renames[pod["main"].id])
        containerd_node.reassert(pod)
        assert watch.wait(pod["main"].id, times=before + 1) > signal_ns


@needs_v1
def test_an_update_overwrites_what_an_outsider_wrote(containerd_node: Node, run_pod: PodFactory) -> None:
    pod = run_pod(burstable("web", cpu_request=250))
    with open(f"{pod['main'].directory('cpu')}/cpu.shares", "w", encoding="utf-8") as file:
        file.write("77")
    containerd_node.reassert(pod)
    assert pod["main"].read("cpu", "cpu.shares") == "256"


@pytest.mark.core
def test_labels_and_annotations_of_a_pod_come_back_through_the_runtime(
    containerd_node: Node, run_pod: PodFactory
) -> None:
    pod = run_pod(best_effort("marked", labels={"koordinator.sh/qosClass": "BE"}))
    (sandbox,) = [pod_sandbox for pod_sandbox in containerd_node.cri.list_sandboxes() if pod_sandbox.id == pod.sandbox]
    assert sandbox.labels["koordinator.sh/qosClass"] == "BE"
    assert sandbox.metadata.uid == pod.spec.uid


@pytest.mark.core
def test_a_removed_pod_leaves_no_group(containerd_node: Node, run_pod: PodFactory) -> None:
    pod = run_pod(best_effort("short"))
    containerd_node.remove_pod(pod)
    # A hybrid node's cgroup2 directories of pods stay (recorded); the container's own must be gone there too.
    assert [d for d in directories() if os.path.exists(d + pod["main"].group)] == []
    assert not os.path.exists(containerd_node.cgroups.directory("cpuset", containerd_node.cgroups.pod_group(pod.spec)))


def _traces(root: str, directory: str) -> list[str]:
    """What is left of a kubelet's cgroup root, by either driver's name, and of the mounts in a node's directory."""
    names = (root, f"{root.replace('-', '_')}.slice")
    traces = [mount + name for mount in directories() for name in names if os.path.exists(mount + name)]
    traces += [mount.target for mount in mounts() if mount.target.startswith(f"{directory}/")]
    return traces


@pytest.mark.core
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="an exclusive CPU needs a second one")
def test_a_static_kubelet_gives_cpus_and_nothing_is_left_after_the_node() -> None:
    root = "/bypassd-test-static"
    with Node.start(cpu_policy=STATIC, cgroup_root=root, driver=DRIVER) as node:
        shared = node.run_pod(best_effort("shared"))
        alone = node.run_pod(guaranteed("alone", cpus=1))
        assert alone["main"].report().affinity == {1}
        assert node.cpus.entries == {alone.spec.uid: {"main": "1"}}
        assert 1 in shared["main"].report().affinity  # the kubelet takes it away with its next update only
        node.reassert(shared)
        assert shared["main"].read("cpuset", "cpuset.cpus") == node.cpus.cpus_of(shared.spec, "main")
        directory = node.directory
        sockets = set(glob.glob(f"{leftovers.SHIM_SOCKETS}/*"))
    assert _traces(root, directory) == []
    assert not os.path.exists(directory)
    # A killed process is in the process table, and a shim's socket there, until each has been scheduled again.
    eventually("no process is left", lambda: not list(leftovers.processes_of(directory)), within_s=60)
    eventually(
        "both shims' sockets are removed",
        lambda: len(sockets - set(glob.glob(f"{leftovers.SHIM_SOCKETS}/*"))) == 2,
        within_s=60,
    )


_CRASH = """
import os, sys
from tests.e2e.node import Node, Running
from tests.e2e.pods import best_effort
with Node.start(cgroup_root="/bypassd-test-crash") as node:
    pod = node.run_pod(best_effort("crunch", run=("burn", "1")))
    pod["main"].report()
    print(node.directory, flush=True)
    os._exit(9)
"""


def test_what_a_crashed_run_left_is_removed_by_the_next() -> None:
    done = subprocess.run([sys.executable, "-c", _CRASH], capture_output=True, text=True, check=False, cwd=os.getcwd())
    assert done.returncode == 9, done.stderr
    directory = done.stdout.strip()
    assert list(leftovers.processes_of(directory))
    wiped = leftovers.clean_up_crashed_runs()
    assert any(what.startswith("processes") for what in wiped[directory])
    assert _traces("/bypassd-test-crash", directory) == []
    eventually("no process is left", lambda: not list(leftovers.processes_of(directory)), within_s=60)
    assert not os.path.exists(directory)
    assert leftovers.clean_up_crashed_runs() == {}
