"""The embedded node on the strict fake kernel: for machines without root or writable cgroups. Nothing real is bounded.

The control files behave as a kernel's do (every refusal, every normal form); the processes do not exist, and what they
would use of the CPU is computed ten times a second from the quotas and weights in force. Latency and work are not
measured, because there is nothing to measure.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from cgroupfs.files import REAL, Directory, FileOps
from tests.e2e.pods import BEST_EFFORT, BURSTABLE, GUARANTEED, MIN_SHARES, PERIOD_US, PodSpec, pod_values, whole_cpus
from tests.fakes.kernel import FakeKernel
from tests.node.kubelet import TickingCpuManager, Version
from tests.node.podserver import PodServer
from tests.node.runc import INIT_NAME, Runtime, rename_in, state
from tests.node.scripted import PAUSE_SHARES, config, resources

LABEL: Final = "FAKE KERNEL"
CPUS: Final = 4
_STEP_S: Final = 0.1
_TICKS: Final = 100
_NS: Final = 1_000_000_000
_QOS: Final = {BEST_EFFORT: ("besteffort",), BURSTABLE: ("burstable",), GUARANTEED: ()}


class FakeFiles:
    """`FileOps`: control files from the fake kernel, everything else (its /proc) from the directory that holds it."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel = kernel
        self._top = f"{kernel.root}/sys/fs/cgroup/"

    def _of(self, directory: Directory) -> FileOps:
        return self._kernel if isinstance(directory, int) or f"{directory}/".startswith(self._top) else REAL

    def open_dir(self, path: str) -> int:
        return self._kernel.open_dir(path)

    def close_dir(self, number: int) -> None:
        self._kernel.close_dir(number)

    def inode(self, directory: Directory) -> int:
        return self._of(directory).inode(directory)

    def read(self, directory: Directory, file: str) -> str:
        return self._of(directory).read(directory, file)

    def write(self, directory: Directory, file: str, text: str) -> None:
        self._kernel.write(directory, file, text)

    def write_now(self, directory: Directory, file: str, text: str) -> int:
        return self._kernel.write_now(directory, file, text)

    def groups(self, directory: Directory) -> list[str]:
        return self._of(directory).groups(directory)

    def files(self, directory: Directory) -> list[str]:
        return self._of(directory).files(directory)


class FakeGroups:
    """The kubelet's names, on the fake kernel."""

    def group(self, *parts: str) -> str:
        return "/" + "/".join(parts)

    def pod_group(self, pod: PodSpec) -> str:
        return self.group("kubepods", *_QOS[pod.qos], f"pod{pod.uid}")


class FakeContainer(Struct, frozen=True, kw_only=True):
    """As `tests.e2e.node.Running`, as far as the demo uses it."""

    id: str
    group: str
    spec: Any  # tests.e2e.pods.ContainerSpec; None for a sandbox
    pid: int


class FakePod(Struct, frozen=True, kw_only=True):
    """As `tests.e2e.node.RunningPod`."""

    spec: PodSpec
    sandbox: FakeContainer
    containers: Mapping[str, FakeContainer]


class FakeNode:
    """A node in one directory: a fake /sys/fs/cgroup, /proc, /run/containerd and /var/lib/kubelet."""

    kind = "a simulated node on the strict fake kernel; nothing real is bounded"

    def __init__(self, directory: str, version: Version) -> None:
        self.directory = directory
        self.kernel = FakeKernel("hybrid", root=directory, cpus=CPUS, mirror=True)
        self.kernel.install()
        self.files = FakeFiles(self.kernel)
        self.groups = FakeGroups()
        self.pods: dict[str, FakePod] = {}
        self.failures: list[str] = []
        self.refused: list[str] = []
        self.updates = 0
        self.version = version
        self.kubelet_root = f"{directory}/var/lib/kubelet"
        self.runc_root = f"{directory}/run/containerd/runc/k8s.io"
        self.bundles = f"{directory}/run/containerd/io.containerd.runtime.v2.task/k8s.io"
        self.api = PodServer()
        self._busy = [0.0] * CPUS
        self._now = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulation", daemon=True)
        self._mounts = {
            tree.controllers[0].name if tree.controllers else "unified": tree.mount for tree in self.kernel.trees
        }
        self._make_machine()
        self.cpus = TickingCpuManager(self.kubelet_root, policy=version.policy, cpus=set(range(CPUS)), reserved={0})

    @classmethod
    @contextlib.contextmanager
    def start(cls, version: Version) -> Iterator["FakeNode"]:
        """The node while the block runs."""
        directory = tempfile.mkdtemp(prefix="bypassd-fake-")
        try:
            node = cls(directory, version)
            node.api.start()
            node._thread.start()
            try:
                yield node
            finally:
                node._stopping.set()
                node._thread.join()
                node.api.stop()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def out_directory(self, pod: PodSpec, container: str) -> str:
        return f"{self.directory}/out/{pod.uid}/{container}"

    def run_pod(self, pod: PodSpec) -> FakePod:
        self.api.admit(pod)
        self.cpus.allocate(pod)
        group = self.groups.pod_group(pod)
        # A kubelet sets a pod's values within a millisecond of its directories; the mirrored files here take twenty.
        # Nobody sees the fake kernel in between.
        with self.kernel._lock:
            self.kernel.make_group(group)
            self._set(group, pod_values(pod))
        sandbox = self._start(pod, None, secrets.token_hex(32), "")
        found = FakePod(spec=pod, sandbox=sandbox, containers={})
        self.pods[pod.uid] = found
        started = {one.name: self._start(pod, one, secrets.token_hex(32), sandbox.id) for one in pod.containers}
        for name, container in started.items():
            self.api.started(pod, name, container.id)
        found = FakePod(spec=pod, sandbox=sandbox, containers=started)
        self.pods[pod.uid] = found
        return found

    def remove_pod(self, pod: FakePod) -> None:
        for one in (*pod.containers.values(), pod.sandbox):
            self.kernel.kill(one.pid)
            for tree in self.kernel.trees:
                with contextlib.suppress(FileNotFoundError):
                    self.kernel.rmdir(tree.mount + one.group)
            for directory in (f"{self.runc_root}/{one.id}", f"{self.bundles}/{one.id}"):
                shutil.rmtree(directory)
            shutil.rmtree(f"{self.directory}/proc/{one.pid}")
        self.kernel.remove_group(self.groups.pod_group(pod.spec))
        self.cpus.release(pod.spec)
        self.cpus.settle()
        self.api.removed(pod.spec)
        self.pods.pop(pod.spec.uid, None)

    def _start(self, pod: PodSpec, spec: Any, cid: str, sandbox: str) -> FakeContainer:
        group = f"{self.groups.pod_group(pod)}/{cid}"
        cpus = self.cpus.cpus_of(pod, spec.name) if spec is not None else ""
        asked = resources(spec, cpus) if spec is not None else {"cpu": {"shares": PAUSE_SHARES}}
        words = list(spec.run) if spec is not None else ["pause"]
        bundle = f"{self.bundles}/{cid}"
        os.makedirs(bundle)
        found = config(pod, group, sandbox or cid, spec, words, asked)
        with open(f"{bundle}/config.json", "w", encoding="utf-8") as file:
            json.dump(found, file)
        pid = self.kernel.spawn()
        os.makedirs(f"{self.directory}/proc/{pid}")
        self._name(pid, INIT_NAME)
        # One trace of runc, on the fake kernel's hands: the same steps with the same waits as elsewhere.
        runtime = Runtime(self.kernel.as_process(pid), self._mounts)
        pace = runtime.create(group, asked, pid)
        os.makedirs(f"{self.runc_root}/{cid}")
        rename_in(f"{self.runc_root}/{cid}/state.json", json.dumps(state(cid, pid, found, self._mounts, bundle)))
        pace.until(26.7)
        rename_in(f"{bundle}/init.pid", str(pid))
        pace.until(34.6)
        self._name(pid, "app")
        return FakeContainer(id=cid, group=group, spec=spec, pid=pid)

    def _name(self, pid: int, name: str) -> None:
        with open(f"{self.directory}/proc/{pid}/comm", "w", encoding="utf-8") as file:
            file.write(f"{name}\n")

    def _set(self, group: str, values: dict[str, int]) -> None:
        cpu, memory = self._mounts["cpu"] + group, self._mounts["memory"] + group
        if "memory" in values:
            self.kernel.write(memory, "memory.limit_in_bytes", str(values["memory"]))
        self.kernel.write(cpu, "cpu.shares", str(values["shares"]))
        if "quota" in values:
            self.kernel.write(cpu, "cpu.cfs_period_us", str(PERIOD_US))
            self.kernel.write(cpu, "cpu.cfs_quota_us", str(values["quota"]))

    def _make_machine(self) -> None:
        root = self.directory
        for path in (self.runc_root, self.bundles, f"{self.kubelet_root}/pods", f"{root}/sys/devices/system/cpu"):
            os.makedirs(path)
        with open(f"{root}/sys/devices/system/cpu/online", "w", encoding="ascii") as file:
            file.write(f"0-{CPUS - 1}\n")
        with open(f"{self.kubelet_root}/config.yaml", "w", encoding="utf-8") as file:
            file.write(
                "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncgroupDriver: cgroupfs\n"
                f'cpuManagerPolicy: {self.version.policy}\nreservedSystemCPUs: "0"\n'
                f"address: 127.0.0.1\nreadOnlyPort: {self.api.port}\n"
            )
        self._write_stat()
        for group in ("/kubepods", "/kubepods/burstable", "/kubepods/besteffort"):
            self.kernel.make_group(group)
            self._set(group, {"shares": MIN_SHARES if group != "/kubepods" else 1024 * CPUS})

    # What the processes would use

    def _run(self) -> None:
        tick_at = time.monotonic() + 10.0
        while not self._stopping.wait(_STEP_S):
            try:
                self._use()
                if time.monotonic() >= tick_at:
                    self.cpus.settle()
                    tick_at = time.monotonic() + 10.0
            except OSError as exc:
                # A pod that went while its use was computed is no failure.
                if not isinstance(exc, FileNotFoundError):
                    self.failures.append(f"simulation: {exc}")

    def _use(self) -> None:
        """One step: what each pod uses, online first; BE gets what is left, within the quotas in force."""
        left = CPUS - 0.1
        used = {}
        for pod in sorted(self.pods.values(), key=lambda one: one.spec.namespace == "batch"):
            online = pod.spec.namespace != "batch"
            own = any(whole_cpus(pod.spec, one) for one in pod.spec.containers)
            want = (0.2 if own else 0.3) if online else left / 2
            for one in pod.containers.values():
                amount = min(
                    want,
                    left,
                    self._quota(one.group),
                    self._quota(self.groups.group("kubepods", "besteffort")) if pod.spec.qos == BEST_EFFORT else left,
                )
                left -= amount
                used[one.group] = amount
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
