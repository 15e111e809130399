"""The demo's node on the strict fake kernel: for machines without root or writable cgroups. Nothing real is bounded.

The control files behave as a kernel's do (every refusal, every normal form); the processes do not exist, and what they
would use of the CPU is computed ten times a second from the quotas and weights in force. Latency and work are not
measured, because there is nothing to measure.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from cgroupfs.files import REAL, FileOps
from tests.e2e.pods import BEST_EFFORT, MIN_SHARES, PERIOD_US, PodSpec, pod_values, whole_cpus
from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet.cgroups import KubeletNames
from tests.fakes.kubelet.fake import FakeKubelet, Version
from tests.fakes.node import Box, DirectoryNode, NodePod, mounts_of
from tests.node.runc import EXEC_MS, INIT_NAME, INIT_PID_MS, Runtime, rename_in
from tests.node.scripted import PAUSE_SHARES, resources

LABEL: Final = "FAKE KERNEL"
CPUS: Final = 4
_STEP_S: Final = 0.1
_TICKS: Final = 100
_NS: Final = 1_000_000_000


class FakeFiles:
    """`FileOps`: control files from the fake kernel, everything else (its /proc) from the directory that holds it."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel = kernel
        self._top = f"{kernel.root}/sys/fs/cgroup/"

    def _of(self, directory: str) -> FileOps:
        return self._kernel if f"{directory}/".startswith(self._top) else REAL

    def inode(self, directory: str) -> int:
        return self._of(directory).inode(directory)

    def read(self, directory: str, file: str) -> str:
        return self._of(directory).read(directory, file)

    def write(self, directory: str, file: str, text: str) -> None:
        self._kernel.write(directory, file, text)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return self._of(directory).groups(directory, most)

    def files(self, directory: str) -> list[str]:
        return self._of(directory).files(directory)


class SimulatedContainer(Struct, frozen=True, kw_only=True):
    """As `tests.e2e.node.Running`, as far as the demo uses it."""

    id: str
    group: str
    spec: Any  # tests.e2e.pods.ContainerSpec; None for a sandbox
    pid: int


class SimulatedPod(Struct, frozen=True, kw_only=True):
    """As `tests.e2e.node.RunningPod`."""

    spec: PodSpec
    sandbox: SimulatedContainer
    containers: Mapping[str, SimulatedContainer]


class SimulatedStage:
    """The demo's stage on a `DirectoryNode` of the fake kernel; the pods' CPU use is computed."""

    kind = "a simulated node on the strict fake kernel; nothing real is bounded"

    def __init__(self, directory: str, version: Version) -> None:
        self.directory = directory
        self.kernel = FakeKernel("hybrid", root=directory, cpus=CPUS, mirror=True)
        self.kernel.install()
        self.files = FakeFiles(self.kernel)
        self.cgroups = KubeletNames()
        self.pods: dict[str, SimulatedPod] = {}
        self.kubelet = FakeKubelet(
            f"{directory}/var/lib/kubelet", policy=version.policy, cpus=range(CPUS), reserved={0}
        )
        self._mounts = mounts_of(self.kernel)
        self._node = DirectoryNode(directory, self.kernel, self._mounts, kubelet=self.kubelet)
        self._busy = [0.0] * CPUS
        self._now = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulation", daemon=True)
        self._make_machine()

    @classmethod
    @contextlib.contextmanager
    def start(cls, version: Version) -> Iterator["SimulatedStage"]:
        """The node while the block runs."""
        directory = tempfile.mkdtemp(prefix="bypassd-fake-")
        try:
            node = cls(directory, version)
            node.kubelet.api.start()
            node._thread.start()
            try:
                yield node
            finally:
                node._stopping.set()
                node._thread.join()
                node.kubelet.stop()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def out_directory(self, pod: PodSpec, container: str) -> str:
        return f"{self.directory}/out/{pod.uid}/{container}"

    def run_pod(self, pod: PodSpec) -> SimulatedPod:
        self.kubelet.admit(pod)
        group = self.cgroups.pod_group(pod)
        # A kubelet sets a pod's values within a millisecond of its directories; the mirrored files here take twenty.
        # Nothing reads the fake kernel in between.
        with self.kernel._lock:
            self.kernel.make_group(group)
            self._set(group, pod_values(pod))
        listed = NodePod(
            uid=pod.uid, name=pod.name, namespace=pod.namespace, qos=pod.qos, group=group, meta={}, boxes=[]
        )
        sandbox = self._start(listed, pod, None, "")
        running = SimulatedPod(spec=pod, sandbox=sandbox, containers={})
        self.pods[pod.uid] = running
        started = {spec.name: self._start(listed, pod, spec, sandbox.id) for spec in pod.containers}
        for name, container in started.items():
            self.kubelet.started(pod, name, container.id)
        running = SimulatedPod(spec=pod, sandbox=sandbox, containers=started)
        self.pods[pod.uid] = running
        return running

    def remove_pod(self, pod: SimulatedPod) -> None:
        for container in (*pod.containers.values(), pod.sandbox):
            self.kernel.kill(container.pid)
            for tree in self.kernel.trees:
                with contextlib.suppress(FileNotFoundError):
                    self.kernel.rmdir(tree.mount + container.group)
            for directory in (f"{self._node.runc_root}/{container.id}", f"{self._node.bundles}/{container.id}"):
                shutil.rmtree(directory)
            shutil.rmtree(f"{self.directory}/proc/{container.pid}")
        self.kernel.remove_group(self.cgroups.pod_group(pod.spec))
        self.kubelet.removed(pod.spec)
        self.pods.pop(pod.spec.uid, None)

    def _start(self, listed: NodePod, pod: PodSpec, spec: Any, sandbox: str) -> SimulatedContainer:
        cpus = self.kubelet.cpus.cpus_of(pod, spec.name) if spec is not None else ""
        box = Box(
            id=(cid := secrets.token_hex(32)),
            name=spec.name if spec is not None else "",
            group=f"{listed.group}/{cid}",
            resources=resources(spec, cpus) if spec is not None else {"cpu": {"shares": PAUSE_SHARES}},
        )
        self._node.write_bundle(
            listed, box, sandbox=sandbox or cid, args=list(spec.run) if spec is not None else ["pause"]
        )
        pid = self.kernel.spawn()
        self._name(pid, INIT_NAME)
        # One trace of runc on the fake kernel: the same steps with the same waits as elsewhere.
        pace = Runtime(self.kernel.as_process(pid), self._mounts).create(box.group, box.resources, pid)
        self._node.write_state(box, pid=pid)
        pace.until(INIT_PID_MS)
        rename_in(f"{self._node.bundles}/{cid}/init.pid", str(pid))
        pace.until(EXEC_MS)
        self._name(pid, "app")
        return SimulatedContainer(id=cid, group=box.group, spec=spec, pid=pid)

    def _name(self, pid: int, name: str) -> None:
        self._node.put(f"proc/{pid}/comm", f"{name}\n")

    def _set(self, group: str, values: dict[str, int]) -> None:
        cpu, memory = self._mounts["cpu"] + group, self._mounts["memory"] + group
        if "memory" in values:
            self.kernel.write(memory, "memory.limit_in_bytes", str(values["memory"]))
        self.kernel.write(cpu, "cpu.shares", str(values["shares"]))
        if "quota" in values:
            self.kernel.write(cpu, "cpu.cfs_period_us", str(PERIOD_US))
            self.kernel.write(cpu, "cpu.cfs_quota_us", str(values["quota"]))

    def _make_machine(self) -> None:
        os.makedirs(f"{self._node.kubelet_root}/pods")
        self._node.put("sys/devices/system/cpu/online", f"0-{CPUS - 1}\n")
        self.kubelet.write_config(port=True)
        self._write_stat()
        for group in ("/kubepods", "/kubepods/burstable", "/kubepods/besteffort"):
            self.kernel.make_group(group)
            self._set(group, {"shares": MIN_SHARES if group != "/kubepods" else 1024 * CPUS})

    # What the processes would use

    def _run(self) -> None:
        while not self._stopping.wait(_STEP_S):
            try:
                self._use()
            except OSError as exc:
                # A pod that went while its use was computed is no failure.
                if not isinstance(exc, FileNotFoundError):
                    self.kubelet.failures.append(f"simulation: {exc}")

    def _use(self) -> None:
        """One step: what each pod uses, online first; BE gets what is left, within the quotas in force."""
        left = CPUS - 0.1
        used = {}
        for pod in sorted(self.pods.values(), key=lambda pod: pod.spec.namespace == "batch"):
            online = pod.spec.namespace != "batch"
            own = any(whole_cpus(pod.spec, spec) for spec in pod.spec.containers)
            want = (0.2 if own else 0.3) if online else left / 2
            for container in pod.containers.values():
                amount = min(
                    want,
                    left,
                    self._quota(container.group),
                    self._quota(self.cgroups.group("kubepods", "besteffort")) if pod.spec.qos == BEST_EFFORT else left,
                )
                left -= amount
                used[container.group] = amount
        for group, amount in used.items():
            with contextlib.suppress(FileNotFoundError):
                self.kernel.charge(self._mounts["cpuacct"] + group, cpu_ns=int(amount * _STEP_S * _NS))
        total = 0.1 + sum(used.values())
        self._now += _STEP_S
        for cpu in range(CPUS):
            self._busy[cpu] += _STEP_S * total / CPUS
        self._write_stat()

    def _quota(self, group: str) -> float:
        quota = int(self.kernel.read(self._mounts["cpu"] + group, "cpu.cfs_quota_us"))
        return CPUS if quota < 0 else quota / PERIOD_US

    def _write_stat(self) -> None:
        rows = [(int(busy * _TICKS), int((self._now - busy) * _TICKS)) for busy in self._busy]
        every = (sum(busy for busy, _ in rows), sum(idle for _, idle in rows))
        lines = [f"cpu  {every[0]} 0 0 {every[1]} 0 0 0 0 0 0"]
        lines += [f"cpu{number} {busy} 0 0 {idle} 0 0 0 0 0 0" for number, (busy, idle) in enumerate(rows)]
        rename_in(f"{self.directory}/proc/stat", "\n".join(lines) + "\n")
