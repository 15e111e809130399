"""A real kubelet with Debian's containerd, as a node of a `ControlPlane`; the machine keeps nothing of it.

Both run in a mount namespace of their own, in which the paths of a node (/run/containerd, /var/lib/kubelet, ...) are
directories of the run: their defaults are used, and the DaemonSet's manifest is applied unchanged. The kernel's
settings that a kubelet changes are files of the run there, too. Their cgroups are below a root of the run.

Not imitated: the network of pods (they use the host's, which needs no plug-in) and registries (images are imported).
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.cluster.control_plane import VARIABLE, ControlPlane, Object, _free_ports
from tests.e2e import leftovers
from tests.e2e.agent import Agent
from tests.e2e.images import oci
from tests.e2e.mounts import directories, hierarchies
from tests.e2e.node import Report, read_report
from tests.e2e.programs import program
from tests.fakes.daemonprocess import ROOT
from tests.fakes.kubelet.cgroups import CGROUPFS, read, write
from tests.fakes.node import merged

NODE: Final = "real1"
KUBELET: Final = "/opt/bypassd-test/kubelet"
"""Of the namespace. The daemon trusts no program below /tmp."""
SOCKET: Final = "/run/containerd/containerd.sock"
READY_S: Final = 120.0
_TOOLS: Final = ("containerd", "containerd-shim-runc-v2", "runc", "ctr", "nsenter", "unshare")
_CONTROLLERS: Final = frozenset({"cpu", "cpuset", "cpuacct", "memory", "systemd"})
_TOPS: Final = ("run", "var/lib", "var/log", "etc", "opt")
_BOUND: Final = {
    "containerd-state": "/run/containerd",
    "containerd-root": "/var/lib/containerd",
    "kubelet": "/var/lib/kubelet",
    "cni": "/etc/cni/net.d",
    "store": "/var/lib/bypassd",
    "run": "/run/bypassd",
}
_SYSCTLS: Final = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_CONTAINERD: Final = f"""\
version = 2
disabled_plugins = ["io.containerd.internal.v1.restart", "io.containerd.tracing.processor.v1.otlp"]

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{oci.PAUSE}"
  # A machine without CAP_SYS_RESOURCE refuses the negative scores that containerd asks for otherwise.
  restrict_oom_score_adj = true
  disable_tcp_service = true
"""
_FILES: Final = (
    *("cpuset/cpuset.cpus", "cpu/cpu.shares", "cpu/cpu.cfs_quota_us", "memory/memory.limit_in_bytes"),
    "memory/memory.usage_in_bytes",
)


def missing() -> str | None:
    """Why no kubelet can run here; None: it can."""
    if os.geteuid() != 0:
        return "not root"
    if absent := [name for name in _TOOLS if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)} (Debian: containerd, runc, util-linux)"
    if not os.access(os.path.join(os.environ.get(VARIABLE, ""), "kubelet"), os.X_OK):
        return f"{VARIABLE} lacks kubelet"
    absent = sorted(_CONTROLLERS - hierarchies().keys())
    return f"no cgroup v1 hierarchy of {', '.join(absent)}" if absent else None


class RealNode:
    """One node; made by `real_node`. ``record``: of the run, whose directory it uses."""

    def __init__(self, plane: ControlPlane, record: leftovers.Record) -> None:
        self.plane = plane
        self.record = record
        self.directory = Path(record.directory)
        self._environment = {**os.environ, leftovers.MARK: record.directory}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    # Start and end

    def start(self) -> None:
        """Returns when the node is Ready."""
        self._make_namespace()
        self._make_cgroup_root()
        self._spawn("containerd", "containerd", "--config", f"{self.directory}/containerd.toml")
        self._wait("containerd", lambda: self._ctr("version").returncode == 0)
        archive = f"{self.directory}/images.tar"
        oci.build(program("app"), archive)
        self.import_image(archive)
        self._start_kubelet()
        self._wait(f"ready node {NODE}", lambda: self.plane.is_schedulable(NODE))

    def stop(self) -> None:
        """End the processes that were started here, the last first; pods and groups are `leftovers.wipe`'s."""
        for process in reversed(self._children.values()):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def within(self, *command: str) -> tuple[str, ...]:
        """A command in the node's namespace."""
        return ("nsenter", f"--mount=/proc/{self._children['namespace'].pid}/ns/mnt", "--", *command)

    def import_image(self, archive: str) -> None:
        """Make an OCI layout's images known to the node."""
        done = self._ctr("images", "import", archive)
        assert done.returncode == 0, done.stderr

    def daemon(self, directory: Path, **more: object) -> Agent:
        """The daemon beside the kubelet, as its unit runs it: its defaults, enforcing, with ``more`` above them."""
        base: dict[str, object] = {
            "mode": "enforce",
            "on_stop": "restore",
            # Other tests' daemons and kubelets are on the machine, on which the group of its own is one name.
            "node": {"name": NODE, "own_shares": 1024},
            "kubelet": {"executable": KUBELET, "endpoint": "off"},
            "http": {"enabled": False},
        }
        made = Agent(merged(base, more), str(directory), http_socket=f"{self.directory}/run/bypassd.sock")
        made.within = self.within("env", f"PYTHONPATH={ROOT}")
        return made

    # Pods

    def group(self, pod: Object) -> str:
        """The group of a pod without requests and limits of CPU and memory."""
        return f"{self.record.cgroup_root}/kubepods/besteffort/pod{pod['metadata']['uid']}"

    def container_value(self, pod: Object, file: str) -> str:
        """A control file of the pod's container now, such as ``cpu/cpu.shares``."""
        (status,) = pod["status"]["containerStatuses"]
        container = status["containerID"].removeprefix("containerd://")
        controller, name = file.split("/")
        return read(f"{hierarchies()[controller]}{self.group(pod)}/{container}", name)

    def template(self, labels: Object, *run: str, resources: Object | None = None) -> Object:
        """A pod template whose container's first act is to write what it sees of its group (`report`).

        ``run``: what the test program then does (images/app.c).
        """
        out = self.directory / "out"
        out.mkdir(exist_ok=True)
        container = {
            "name": "main",
            "image": oci.APP,
            "imagePullPolicy": "Never",
            "args": ["/out/$(UID)", *(run or ("sleep",)), *(f"/sys/fs/cgroup/{name}" for name in _FILES)],
            "env": [{"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}],
            "resources": {"requests": resources or {}, "limits": resources or {}},
            "volumeMounts": [{"name": "out", "mountPath": "/out"}],
        }
        spec = {
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": [{"name": "out", "hostPath": {"path": str(out)}}],
        }
        return {"metadata": {"labels": labels}, "spec": spec}

    def report(self, pod: Object, *, within_s: float = 60.0) -> Report:
        """What the pod's container saw at its first instruction; waits for it."""
        return read_report(f"{self.directory}/out/{pod['metadata']['uid']}", within_s)

    def _make_namespace(self) -> None:
        lines = ["set -e"]
        for top in _TOPS:
            upper, work = (self.directory / "overlay" / top / name for name in ("upper", "work"))
            upper.mkdir(parents=True)
            work.mkdir()
            lines.append(f"mount -t overlay overlay -o lowerdir=/{top},upperdir={upper},workdir={work} /{top}")
        for name, target in _BOUND.items():
            (self.directory / name).mkdir()
            lines.append(f"mkdir -p {target} && mount --bind {self.directory}/{name} {target}")
        for number, name in enumerate(_SYSCTLS):
            with contextlib.suppress(FileNotFoundError):
                text = Path("/proc/sys", name).read_text()
                (self.directory / f"sysctl{number}").write_text(text)
                lines.append(f"mount --bind {self.directory}/sysctl{number} /proc/sys/{name}")
        assets = os.environ[VARIABLE]
        lines.append(f"mkdir -p {os.path.dirname(KUBELET)} && touch {KUBELET}")
        lines.append(f"mount --bind {assets}/kubelet {KUBELET}")
        # As systemd makes a node's root: mounts propagate into containers.
        lines += ["mount --make-rshared /", f"touch {self.directory}/made", "exec sleep infinity"]
        # Of a network that no pod of a test uses: without one the node is not Ready.
        network = '{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}'
        (self.directory / "cni/none.conflist").write_text(network)
        script = self.directory / "namespace.sh"
        script.write_text("\n".join(lines))
        self._launch("namespace", "unshare", "--mount", "--propagation", "private", "sh", str(script))
        self._wait("namespace", (self.directory / "made").exists)
        (self.directory / "containerd.toml").write_text(_CONTAINERD)

    def _make_cgroup_root(self) -> None:
        """The group that is the kubelet's ``cgroupRoot``, in each hierarchy; the kubelet makes what is below it."""
        mounted = hierarchies()
        for mount in directories():
            os.makedirs(mount + self.record.cgroup_root)
        for name in ("cpuset.cpus", "cpuset.mems"):
            write(mounted["cpuset"] + self.record.cgroup_root, name, read(mounted["cpuset"], name))

    def _start_kubelet(self) -> None:
        pki = self.directory / "kubelet/pki"
        pki.mkdir()
        port, health = _free_ports(2)
        self.plane.serving_certificate(pki, "127.0.0.1", NODE)
        config = {
            "kind": "KubeletConfiguration",
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self.plane.pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": CGROUPFS,
            "cgroupRoot": self.record.cgroup_root,
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": health,
            "readOnlyPort": 0,
            "tlsCertFile": "/var/lib/kubelet/pki/kubelet.crt",
            "tlsPrivateKeyFile": "/var/lib/kubelet/pki/kubelet.key",
            "failSwapOn": False,
            "maxPods": 250,
            "makeIPTablesUtilChains": False,
            "evictionHard": {"memory.available": "50Mi"},
            "enforceNodeAllocatable": ["pods"],
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "5s",
            # The defaults from 1.27 on: pods of a burst start sooner after each other.
            "kubeAPIQPS": 50,
            "kubeAPIBurst": 100,
        }
        (self.directory / "kubelet/config.yaml").write_text(yaml.safe_dump(config))
        self._spawn(
            "kubelet",
            *(KUBELET, "--config=/var/lib/kubelet/config.yaml", f"--kubeconfig={self.plane.node_kubeconfig(NODE)}"),
            *(f"--container-runtime-endpoint=unix://{SOCKET}", f"--hostname-override={NODE}"),
        )

    def _spawn(self, name: str, *command: str) -> None:
        self._launch(name, *self.within(*command))

    def _launch(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.log", "ab") as log:
            self._children[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
            )

    def _ctr(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = self.within("ctr", "--address", SOCKET, "--namespace", "k8s.io", *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def _wait(self, what: str, there: Callable[[], object]) -> None:
        deadline = time.monotonic() + READY_S
        while not there():
            for name, process in self._children.items():
                assert process.poll() is None, f"{name} has ended: {self.log(name)}"
            assert time.monotonic() < deadline, (
                f"no {what} within {READY_S:.0f} s: {self.log(list(self._children)[-1])}"
            )
            time.sleep(0.1)

    def log(self, name: str) -> str:
        """The end of a program's log."""
        return (self.directory / f"{name}.log").read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def real_node(plane: ControlPlane) -> Iterator[RealNode]:
    """A node of the control plane; everything of it is gone when the block ends. Skips with the reason."""
    problem = missing()
    if problem is not None:
        pytest.skip(f"no kubelet: {problem}")
    leftovers.clean_up_crashed_runs()
    own = leftovers.start_time(os.getpid())
    assert own is not None
    record = leftovers.Record(
        pid=os.getpid(),
        started=own,
        directory=tempfile.mkdtemp(prefix="bypassd-kubelet-"),
        cgroup_root=f"/bypassd-test-kubelet-{os.getpid()}",
        driver=CGROUPFS,
    )
    record.save()
    try:
        node = RealNode(plane, record)
        try:
            node.start()
            yield node
        finally:
            node.stop()
    finally:
        leftovers.wipe(record)
