"""The tests' node with real processes: one of the two fake nodes (the other: tests/fakes/node.py).

Imitates a whole legacy node on this machine's kernel, cgroup v1, hybrid or v2: the fake kubelet (tests/fakes/kubelet)
makes groups and checkpoints, and a runtime starts processes in them. `Node` uses Debian's containerd 1.6 and runc 1.1;
`tests.node.scripted.ScriptedNode` has own processes and an imitation of runc instead. Not imitated: the network of
pods (they use the host's), image pulls, probes, and the API server.

    with Node.start() as node:
        pod = node.run_pod(best_effort("crunch", run=("burn", "2")))
        report = pod["main"].report()      # what the container saw at its first instruction

Everything is undone at the end, also on failure; what an earlier run left is removed at the next start.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from tests.e2e import leftovers
from tests.e2e.containerd import Containerd
from tests.e2e.cri import Cri, CriError
from tests.e2e.criapi import runtime_pb2 as pb
from tests.e2e.images import oci
from tests.e2e.pods import PERIOD_US, ContainerSpec, PodSpec, quota_of, shares_of
from tests.fakes.kubelet.cgroups import CGROUPFS, SYSTEMD, KubeletCgroups, read
from tests.fakes.kubelet.cpu_manager import NONE
from tests.fakes.kubelet.fake import FakeKubelet, RuntimeFailed

# Two test runs on one machine would make the same /kubepods: its user holds this lock.
LOCK: Final = "/run/lock/bypassd-kubepods.lock"

# What the container reads of itself first, where the runtime shows it its own cgroup.
_V1_FILES: Final = (
    *("cpuset/cpuset.cpus", "cpuset/cpuset.mems", "cpu/cpu.shares", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"),
    *("cpu/cpu.cfs_burst_us", "cpu/cpu.idle", "memory/memory.limit_in_bytes"),
)
_V2_FILES: Final = ("cpuset.cpus", "cpuset.mems", "cpu.weight", "cpu.max", "cpu.idle", "memory.max", "memory.high")


class NodeBusy(Exception):
    """Another's kubepods tree is here: a real node, or another test run that does not end."""


class Report(Struct, frozen=True, kw_only=True):
    """What a container saw at its first instruction. ``values``: control file's name to text; "!" if there was none.

    ``policy``: of scheduling, the kernel's number.

    Units: nanoseconds of CLOCK_MONOTONIC, the host's.
    """

    first_ns: int
    read_ns: int
    affinity: frozenset[int]
    policy: int
    values: Mapping[str, str]


class Running(Struct, frozen=True, kw_only=True):
    """One started container."""

    node: "Node"
    pod: PodSpec
    spec: ContainerSpec
    id: str

    @property
    def group(self) -> str:
        return self.node.cgroups.container_group(self.pod, self.id)

    def directory(self, controller: str) -> str:
        """Its directory in a controller's hierarchy."""
        return self.node.cgroups.directory(controller, self.group)

    def read(self, controller: str, file: str) -> str:
        """A control file's text now."""
        return read(self.directory(controller), file)

    def report(self, *, within_s: float = 20.0) -> Report:
        """What it saw first; waits for it."""
        return self.node.first_report(self.pod, self.spec.name, within_s=within_s)

    def init_pid(self) -> int:
        """The host's pid of its program, as the runtime has it."""
        directory = os.path.join(self.node.containerd.runc_root, self.id)
        name, field = ("status", "pid") if self.pod.runtime_handler == "crun" else ("state.json", "init_process_pid")
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            return int(json.load(file)[field])


class RunningPod(Struct, frozen=True, kw_only=True):
    """One pod that the node runs; containers by name."""

    spec: PodSpec
    sandbox: str
    containers: Mapping[str, Running]

    def __getitem__(self, name: str) -> Running:
        return self.containers[name]


def read_report(path: str, within_s: float) -> Report:
    """Parse a report file; wait until it is there."""
    deadline = time.monotonic() + within_s
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no report at {path} after {within_s:.0f} s")
        time.sleep(0.005)
    with open(path, encoding="utf-8") as file:
        rows = dict(line.rstrip("\n").partition("\t")[::2] for line in file)
    first, done, cpus = (rows.pop(name) for name in ("first_ns", "read_ns", "affinity"))
    policy = int(rows.pop("policy"))
    return Report(
        first_ns=int(first),
        read_ns=int(done),
        affinity=frozenset(int(cpu) for cpu in cpus.split(",") if cpu),
        policy=policy,
        values={os.path.basename(name): text for name, text in rows.items()},
    )


@contextlib.contextmanager
def kubepods_lock(*, within_s: float = 240.0) -> Iterator[None]:
    """Hold the machine's kubepods tree alone."""
    with open(LOCK, "a", encoding="utf-8") as file:
        deadline = time.monotonic() + within_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NodeBusy(f"{LOCK} is held by another run for {within_s:.0f} s") from None
                time.sleep(0.2)
        yield


class Node:
    """A runtime, the kubelet, and the pods of both. Make it with `Node.start`.

    ``whole_kubelet``: its kubelet has a pod list in config.yaml and reconciles; else a test calls for each act.
    """

    kind = "real containers (containerd and runc)"
    whole_kubelet = False

    def __init__(self, record: leftovers.Record, *, cpu_policy: str, reserved: set[int], snapshotter: str) -> None:
        self.record = record
        self.directory = record.directory
        self.kubelet_root = f"{self.directory}/kubelet"
        os.makedirs(f"{self.kubelet_root}/pods")
        self.cgroups = KubeletCgroups(driver=record.driver, cgroup_root=record.cgroup_root)
        self.kubelet = FakeKubelet(
            self.kubelet_root,
            policy=cpu_policy,
            cpus=os.sched_getaffinity(0),
            reserved=reserved,
            cgroups=self.cgroups,
            reconciles=self.whole_kubelet,
            update=self._update,
        )
        self.kubelet.write_config(port=self.whole_kubelet)
        self.cpus = self.kubelet.cpus
        self.containerd = Containerd(self.directory, systemd_cgroup=record.driver == SYSTEMD, snapshotter=snapshotter)
        self.pods: dict[str, RunningPod] = {}
        self._cri: Cri | None = None

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        *,
        cpu_policy: str = NONE,
        reserved: frozenset[int] = frozenset({0}),
        driver: str = CGROUPFS,
        cgroup_root: str = "/",
        snapshotter: str = "overlayfs",
    ) -> Iterator[Self]:
        """A running node; everything of it is gone when the block ends."""
        with kubepods_lock() if cgroup_root == "/" else contextlib.nullcontext():
            leftovers.clean_up_crashed_runs()
            if KubeletCgroups(driver=driver, cgroup_root=cgroup_root).exists():
                raise NodeBusy("a kubepods tree that no test made is here: this machine is a node, tests keep off")
            own = leftovers.start_time(os.getpid())
            assert own is not None
            record = leftovers.Record(
                pid=os.getpid(),
                started=own,
                directory=tempfile.mkdtemp(prefix="bypassd-e2e-"),
                cgroup_root=cgroup_root,
                driver=driver,
            )
            record.save()
            try:
                node = cls(record, cpu_policy=cpu_policy, reserved=set(reserved), snapshotter=snapshotter)
                node._start()
                try:
                    yield node
                finally:
                    node._stop()
            finally:
                leftovers.wipe(record)

    @property
    def cri(self) -> Cri:
        """The client; only while the node runs."""
        assert self._cri is not None
        return self._cri

    def out_directory(self, pod: PodSpec, container: str) -> str:
        """The host side of a container's /out."""
        return f"{self.directory}/out/{pod.uid}/{container}"

    def run_pod(self, pod: PodSpec) -> RunningPod:
        """Everything a kubelet does for a new pod, up to started containers."""
        self.kubelet.admit(pod)
        running = self._run_pod(pod)
        for name, container in running.containers.items():
            self.kubelet.started(pod, name, container.id)
        return running

    def _run_pod(self, pod: PodSpec) -> RunningPod:
        """The runtime's part."""
        config = self._sandbox_config(pod)
        os.makedirs(config.log_directory, exist_ok=True)
        sandbox = self.cri.run_sandbox(config, pod.runtime_handler)
        running = RunningPod(spec=pod, sandbox=sandbox, containers={})
        self.pods[pod.uid] = running
        for spec in pod.init:
            self._wait_for_end(self.run_container(running, spec))
        started = {spec.name: self.run_container(running, spec) for spec in pod.containers}
        running = RunningPod(spec=pod, sandbox=sandbox, containers=started)
        self.pods[pod.uid] = running
        return running

    def restart_container(self, pod: RunningPod, name: str, *, attempt: int = 1) -> RunningPod:
        """What a kubelet does about a container that has ended: a new one, and the old one is removed."""
        old = pod[name]
        self.cri.stop_container(old.id, grace_s=0)
        again = self.run_container(pod, old.spec, attempt=attempt)
        self.cri.remove_container(old.id)
        self.kubelet.started(pod.spec, name, again.id, attempt=attempt)
        running = RunningPod(spec=pod.spec, sandbox=pod.sandbox, containers={**pod.containers, name: again})
        self.pods[pod.spec.uid] = running
        return running

    def resize(self, pod: RunningPod, *containers: ContainerSpec) -> RunningPod:
        """An in-place resize: the pod's directory first where it grows and last where it shrinks, as a kubelet does."""
        spec = replace(pod.spec, containers=containers)
        running = RunningPod(spec=spec, sandbox=pod.sandbox, containers=pod.containers)
        grows = sum(container_spec.cpu_request for container_spec in containers) > sum(
            container_spec.cpu_request for container_spec in pod.spec.containers
        )
        if grows:
            self.cgroups.set_pod(spec)
        for container in containers:
            self.cri.update_container(pod[container.name].id, self._resources(spec, container))
        if not grows:
            self.cgroups.set_pod(spec)
        self.pods[spec.uid] = running
        self.kubelet.resized(spec)
        return running

    def first_report(self, pod: PodSpec, container: str, *, within_s: float = 20.0) -> Report:
        """What a container saw at its first instruction, also of one that has ended since."""
        return read_report(os.path.join(self.out_directory(pod, container), "report"), within_s)

    def _wait_for_end(self, container: Running, *, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while self.cri.container_status(container.id).state != pb.CONTAINER_EXITED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"init container {container.spec.name} does not end within {within_s:.0f} s")
            time.sleep(0.01)

    def run_pods(self, pods: list[PodSpec], *, at_once: int | None = None) -> list[RunningPod]:
        """Many pods, all at once (a thread each, as a kubelet's pod workers do) or ``at_once`` at a time."""
        with ThreadPoolExecutor(max_workers=at_once or max(1, len(pods))) as pool:
            return list(pool.map(self.run_pod, pods))

    def run_container(self, pod: RunningPod, spec: ContainerSpec, *, attempt: int = 0) -> Running:
        """Create and start one more container in a pod (a restart has a higher ``attempt``)."""
        out = self.out_directory(pod.spec, spec.name)
        shutil.rmtree(out, ignore_errors=True)
        os.makedirs(out)
        config = self._container_config(pod.spec, spec, attempt, out)
        container = self.cri.create_container(pod.sandbox, config, self._sandbox_config(pod.spec))
        self.cri.start_container(container)
        return Running(node=self, pod=pod.spec, spec=spec, id=container)

    def reassert(self, pod: RunningPod) -> None:
        """The kubelet's CPU manager writes a pod's values again: UpdateContainerResources, thus ``runc update``."""
        for running in pod.containers.values():
            self.cri.update_container(running.id, self._resources(pod.spec, running.spec))

    def remove_pod(self, pod: RunningPod, *, grace_s: int = 0) -> None:
        """Stop and remove a pod, then its directories, then its CPUs."""
        self.kubelet.leaving(pod.spec)
        self._remove_pod(pod, grace_s=grace_s)
        self._after_exit(pod.spec)
        self.kubelet.removed(pod.spec)
        self.pods.pop(pod.spec.uid, None)

    def _remove_pod(self, pod: RunningPod, *, grace_s: int) -> None:
        """The runtime's part."""
        for running in pod.containers.values():
            self.cri.stop_container(running.id, grace_s=grace_s)
            self.cri.remove_container(running.id)
        self.cri.stop_sandbox(pod.sandbox)
        self.cri.remove_sandbox(pod.sandbox)

    def remove_pods(self, pods: list[RunningPod]) -> None:
        """Many at once."""
        with ThreadPoolExecutor(max_workers=max(1, min(8, len(pods)))) as pool:
            list(pool.map(self.remove_pod, pods))

    def _after_exit(self, pod: PodSpec, *, within_s: float = 10.0) -> None:
        """Remove the pod's directories once runc has removed the containers' (after the call's answer)."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                self.cgroups.remove_pod(pod)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _start(self) -> None:
        self.cgroups.start()
        self._cri = self.containerd.start()

    def _update(self, pod: PodSpec, spec: ContainerSpec, container: str) -> None:
        """The kubelet's UpdateContainerResources. Errors: `RuntimeFailed`."""
        try:
            self.cri.update_container(container, self._resources(pod, spec))
        except CriError as exc:
            raise RuntimeFailed(str(exc)) from exc

    def _stop(self) -> None:
        self.kubelet.stop()
        # What cannot be removed in order here is removed by force in `leftovers.wipe`, right after.
        try:
            for pod in list(self.pods.values()):
                with contextlib.suppress(CriError, OSError):
                    self.remove_pod(pod)
            for sandbox in self.cri.list_sandboxes():
                with contextlib.suppress(CriError):
                    self.cri.stop_sandbox(sandbox.id)
                    self.cri.remove_sandbox(sandbox.id)
        except CriError:
            pass
        finally:
            self.cri.close()
            self.containerd.stop()

    def _sandbox_config(self, pod: PodSpec) -> pb.PodSandboxConfig:
        namespaces = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
        return pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=pod.name, uid=pod.uid, namespace=pod.namespace),
            log_directory=f"{self.directory}/log/{pod.namespace}_{pod.name}_{pod.uid}",
            labels={**pod.labels, **_pod_labels(pod)},
            annotations={**pod.annotations, "kubernetes.io/config.source": "api"},
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=self.cgroups.cri_parent(pod),
                security_context=pb.LinuxSandboxSecurityContext(namespace_options=namespaces),
            ),
        )

    def _container_config(self, pod: PodSpec, spec: ContainerSpec, attempt: int, out: str) -> pb.ContainerConfig:
        files = _V2_FILES if self.cgroups.v2 else _V1_FILES
        namespaces = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
        return pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=spec.name, attempt=attempt),
            image=pb.ImageSpec(image=oci.APP),
            args=["/out/report", *spec.run, *(f"/sys/fs/cgroup/{name}" for name in files)],
            mounts=[pb.Mount(container_path="/out", host_path=out)],
            labels={**_pod_labels(pod), "io.kubernetes.container.name": spec.name},
            annotations={
                "io.kubernetes.container.restartCount": str(attempt),
                "io.kubernetes.pod.terminationGracePeriod": "2",
            },
            log_path=f"{spec.name}_{attempt}.log",
            linux=pb.LinuxContainerConfig(
                resources=self._resources(pod, spec),
                security_context=pb.LinuxContainerSecurityContext(namespace_options=namespaces),
            ),
        )

    def _resources(self, pod: PodSpec, spec: ContainerSpec) -> pb.LinuxContainerResources:
        return pb.LinuxContainerResources(
            cpu_shares=shares_of(spec.cpu_request),
            cpu_period=PERIOD_US,
            cpu_quota=quota_of(spec.cpu_limit) if spec.cpu_limit else 0,
            memory_limit_in_bytes=spec.memory_limit,
            cpuset_cpus=self.cpus.cpus_of(pod, spec.name),
            oom_score_adj=1000,
        )


def _pod_labels(pod: PodSpec) -> dict[str, str]:
    return {
        "io.kubernetes.pod.name": pod.name,
        "io.kubernetes.pod.namespace": pod.namespace,
        "io.kubernetes.pod.uid": pod.uid,
    }
