"""A node of real cgroup directories (v1, cgroupfs names), with the files of runc, containerd and the kubelet.

Everything lies under one cgroup root of its own and one temporary directory. What the runtime writes, it writes through
a process of its name; what a container runs is at most one sleeping process.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from msgspec import Struct

from state import checksum
from state.allocated import ALLOCATED_PODS
from state.kubelet import CPU_STATE, render_cpu_manager_state
from tests.daemon.kubelet import PodListServer
from tests.daemon.writers import Scribe
from tests.e2e.mounts import hierarchies
from tests.node.runc import rename_in, values

HIERARCHIES: Final = ("cpuset", "memory", "cpu", "cpuacct", "pids")
# Two runs of the tests may stand side by side.
CGROUP_ROOT: Final = f"/bypassd-test-daemon-{os.getpid()}"
_QOS: Final = {"besteffort": "BestEffort", "burstable": "Burstable", "": "Guaranteed"}
# Counters that the kernel moves by itself, and files that cannot be read or do something when written.
_RESTLESS: Final = ("usage", "stat", "failcnt", "procs", "tasks", "peak", "events", "pressure", "numa", "current")


class Box(Struct):
    """One container on the node."""

    id: str
    name: str
    group: str
    resources: dict[str, Any]
    process: "subprocess.Popen[bytes] | None" = None


class NodePod(Struct):
    """One pod on the node. ``boxes[0]`` is the pause container."""

    uid: str
    name: str
    namespace: str
    qos: str
    group: str
    meta: dict[str, Any]
    boxes: list[Box]
    listed: bool = True

    @property
    def main(self) -> Box:
        """Its first container that is no pause container."""
        return self.boxes[1]


class DirectoryNode:
    """See the module's text."""

    def __init__(self, directory: str, *, cgroup_root: str = CGROUP_ROOT) -> None:
        self.directory = directory
        self.cgroup_root = cgroup_root
        self.kubepods = f"{cgroup_root}/kubepods"
        self.besteffort = f"{self.kubepods}/besteffort"
        self.runc_root = f"{directory}/runc"
        self.bundles = f"{directory}/containerd/io.containerd.runtime.v2.task/k8s.io"
        self.kubelet_root = f"{directory}/kubelet"
        self.manifests = f"{directory}/manifests"
        self.store = f"{directory}/state/state.db"
        self.pods: dict[str, NodePod] = {}
        self._mounts = hierarchies()
        self._numbers = itertools.count(1)
        self._runc: Scribe | None = None
        self.kubelet = PodListServer(self._items)
        for path in (self.runc_root, self.bundles, self.kubelet_root, self.manifests):
            os.makedirs(path)

    def __enter__(self) -> Self:
        self.remove_groups()
        for path in (self.cgroup_root, self.kubepods, self.besteffort, f"{self.kubepods}/burstable"):
            self._group(path)
        self.cpu_manager("none", "")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kubelet.gone()
        if self._runc is not None:
            self._runc.__exit__(None, None, None)
        for pod in self.pods.values():
            for box in pod.boxes:
                _end(box)
        self.remove_groups()

    def config(self, **more: object) -> dict[str, object]:
        """A configuration for the daemon: quick to notice, and with a budget that the machine's noise does not move."""
        base: dict[str, Any] = {
            "mode": "enforce",
            "operator_file": f"{self.directory}/classes.yaml",
            "node": {"cgroup_root": self.cgroup_root},
            "kubelet": {
                "root_dir": self.kubelet_root,
                "endpoint": "http",
                "address": "127.0.0.1",
                "http_port": self.kubelet.port,
                "period_s": 1,
                "timeout_s": 2.0,
            },
            "runtime": {"state_dir": f"{self.directory}/containerd", "runc_roots": [self.runc_root], "cri": "off"},
            "policies": {
                "idle_buffer": {"enabled": False},
                # Always at its floor: half of the machine.
                "reclaimed": {"budget": {"limit_percent": 1, "floor_percent": 50}},
            },
            "store": {"path": self.store},
            "http": {"enabled": False, "socket": f"{self.directory}/bypassd.sock"},
            "log": {"format": "json"},
        }
        return _merged(base, more)

    # Pods

    def add(
        self,
        name: str = "",
        *,
        qos: str = "besteffort",
        uid: str = "",
        namespace: str = "default",
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        priority_class: str = "",
        cpus: str = "",
        shares: int = 2,
        quota_us: int = 0,
        memory: int = 0,
        containers: int = 1,
        requests: dict[str, str] | None = None,
        limits: dict[str, str] | None = None,
        listed: bool = True,
        process: bool = False,
    ) -> NodePod:
        """A running pod. ``cpus`` etc. are its containers' OCI values, ``requests`` and ``limits`` the pod list's."""
        uid = uid or str(uuid.uuid4())
        name = name or f"pod-{next(self._numbers)}"
        group = f"{self.kubepods}/{qos}/pod{uid}" if qos else f"{self.kubepods}/pod{uid}"
        meta = {
            "labels": labels or {},
            "annotations": annotations or {},
            "priorityClassName": priority_class or None,
            "resources": {key: value for key, value in (("requests", requests), ("limits", limits)) if value},
        }
        pod = NodePod(uid=uid, name=name, namespace=namespace, qos=qos, group=group, meta=meta, boxes=[], listed=listed)
        cpu: dict[str, Any] = {"shares": shares, "period": 100_000} | ({"quota": quota_us} if quota_us else {})
        resources = {"cpu": cpu | ({"cpus": cpus} if cpus else {}), "memory": {"limit": memory} if memory else {}}
        self.pods[uid] = pod
        self._group(group)
        self.write(group, "cpu", "cpu.shares", str(shares * containers) if qos != "besteffort" else "2")
        self.start(pod, "", {"cpu": {"shares": 2}, "memory": {}})
        for index in range(containers):
            self.start(pod, "main" if index == 0 else f"side-{index}", resources, process=process)
        return pod

    def start(self, pod: NodePod, name: str, resources: dict[str, Any], *, process: bool = False) -> Box:
        """One whole container; no name: the pause container. ``process``: something runs in it."""
        box = self.create(pod, name, resources, process=process)
        self.settle(box)
        return box

    def create(
        self,
        pod: NodePod,
        name: str,
        resources: dict[str, Any],
        *,
        process: bool = False,
        meanwhile: Callable[[Box], object] = lambda _: None,
    ) -> Box:
        """One container in runc's order, up to where runc is about to write its values.

        ``meanwhile`` is called when there is its cpuset directory and nothing else, not even CPUs in it.
        """
        cid = os.urandom(32).hex()
        box = Box(id=cid, name=name, group=f"{pod.group}/{cid}", resources=resources)
        self._bundle(pod, box)
        os.makedirs(f"{self.runc_root}/{cid}")
        os.mkdir(self.path(box.group, "cpuset"))
        meanwhile(box)
        self._group(box.group)
        if process:
            box.process = subprocess.Popen(["/bin/sleep", "3600"])
            for hierarchy in ("cpuset", "cpu"):
                self.write(box.group, hierarchy, "cgroup.procs", str(box.process.pid))
        pod.boxes.append(box)
        return box

    def settle(self, box: Box, resources: dict[str, Any] | None = None) -> None:
        """What ``runc create`` and ``runc update`` do last: their values, then state.json is renamed into place."""
        box.resources = resources or box.resources
        for value in values(box.resources, v2=False):
            if "memsw" not in value.file:
                self.runc.write(self.path(box.group, value.controller, value.file), value.text)
        cpu, memory = box.resources["cpu"], box.resources["memory"]
        cgroups = {
            "path": box.group,
            "cpu_shares": cpu.get("shares", 0),
            "cpu_quota": cpu.get("quota", 0),
            "cpu_period": cpu.get("period", 0),
            "cpuset_cpus": cpu.get("cpus", ""),
            "memory": memory.get("limit", 0),
        }
        state = {"id": box.id, "init_process_pid": 1, "config": {"cgroups": cgroups}}
        rename_in(f"{self.runc_root}/{box.id}/state.json", json.dumps(state))

    def end(self, pod: NodePod, box: Box) -> None:
        """The container has exited."""
        _end(box)
        shutil.rmtree(f"{self.runc_root}/{box.id}", ignore_errors=True)
        shutil.rmtree(f"{self.bundles}/{box.id}", ignore_errors=True)
        self._remove(box.group)
        pod.boxes.remove(box)

    def restart(self, pod: NodePod) -> Box:
        """The main container ends and a new one takes its place; its new cgroup has the spec's values."""
        old = pod.main
        self.end(pod, old)
        return self.start(pod, old.name, old.resources)

    def remove(self, pod: NodePod) -> None:
        """The pod is gone."""
        for box in list(pod.boxes):
            self.end(pod, box)
        self._remove(pod.group)
        self.pods.pop(pod.uid, None)

    # The kubelet's files

    def cpu_manager(self, policy: str, default: str, entries: dict[str, dict[str, str]] | None = None) -> None:
        """A good cpu_manager_state, renamed into place."""
        self.checkpoint(render_cpu_manager_state(policy, default, entries))

    def checkpoint(self, text: str | bytes, name: str = CPU_STATE) -> None:
        """Any checkpoint, by default cpu_manager_state, renamed into place."""
        temporary = f"{self.kubelet_root}/.1234567"
        with open(temporary, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        os.rename(temporary, f"{self.kubelet_root}/{name}")

    def granted(self, pod: NodePod, requests: dict[str, str], limits: dict[str, str]) -> None:
        """allocated_pods_state with one pod's main container, as a kubelet from 1.34 on writes it."""
        resources = {"requests": requests, "limits": limits}
        data = json.dumps({"entries": {pod.uid: {"ContainerResources": {pod.main.name: resources}}}})
        self.checkpoint(json.dumps({"data": data, "checksum": checksum.text(data)}), ALLOCATED_PODS)

    def delete_checkpoint(self) -> None:
        """As an operator does before changing the policy."""
        os.unlink(f"{self.kubelet_root}/{CPU_STATE}")

    # Values

    @property
    def runc(self) -> Scribe:
        """A process of that name."""
        if self._runc is None:
            self._runc = Scribe("runc")
        return self._runc

    def path(self, group: str, controller: str, file: str = "") -> str:
        """A group's directory, or a control file of it."""
        return f"{self._mounts[controller]}{group}" + (f"/{file}" if file else "")

    def read(self, group: str, controller: str, file: str) -> str:
        with open(self.path(group, controller, file)) as opened:
            return opened.read().strip()

    def write(self, group: str, controller: str, file: str, text: str) -> None:
        """Write as this very process."""
        with open(self.path(group, controller, file), "w") as opened:
            opened.write(text)

    def cpus(self, box: Box) -> str:
        return self.read(box.group, "cpuset", "cpuset.cpus")

    def shares(self, box: Box) -> str:
        return self.read(box.group, "cpu", "cpu.shares")

    def quota(self, group: str) -> str:
        return self.read(group, "cpu", "cpu.cfs_quota_us")

    def tree(self) -> dict[str, str]:
        """Every file of the node's groups that holds a setting: what must be as before, byte for byte."""
        found: dict[str, str] = {}
        for hierarchy in HIERARCHIES:
            for directory, _, files in os.walk(self.path(self.kubepods, hierarchy)):
                for file in files:
                    path = f"{directory}/{file}"
                    if os.stat(path).st_mode & 0o200 and not any(word in file for word in _RESTLESS):
                        with contextlib.suppress(OSError), open(path) as opened:
                            found[path] = opened.read()
        return found

    def directories(self) -> list[str]:
        """Every cgroup directory of the node, in every hierarchy."""
        return [
            directory for hierarchy in HIERARCHIES for directory, _, _ in os.walk(self.path(self.kubepods, hierarchy))
        ]

    # Within

    def _bundle(self, pod: NodePod, box: Box) -> None:
        """What containerd writes before runc starts."""
        notes = {
            "io.kubernetes.cri.container-type": "container" if box.name else "sandbox",
            "io.kubernetes.cri.sandbox-uid": pod.uid,
            "io.kubernetes.cri.sandbox-namespace": pod.namespace,
            "io.kubernetes.cri.sandbox-name": pod.name,
        }
        if box.name:
            notes["io.kubernetes.cri.container-name"] = box.name
        config = {
            "ociVersion": "1.0.2",
            "annotations": notes,
            "linux": {"cgroupsPath": box.group, "resources": box.resources},
        }
        os.makedirs(f"{self.bundles}/{box.id}")
        with open(f"{self.bundles}/{box.id}/config.json", "w") as file:
            json.dump(config, file)

    def _group(self, path: str) -> None:
        for hierarchy in HIERARCHIES:
            directory = self.path(path, hierarchy)
            os.makedirs(directory, exist_ok=True)
            if hierarchy == "cpuset":
                above = os.path.dirname(directory)
                for file in ("cpuset.cpus", "cpuset.mems"):
                    with open(f"{above}/{file}") as source, open(f"{directory}/{file}", "w") as target:
                        target.write(source.read().strip())

    def _remove(self, path: str) -> None:
        for hierarchy in HIERARCHIES:
            os.rmdir(self.path(path, hierarchy))

    def remove_groups(self) -> None:
        """Remove all of our groups, deepest first."""
        for hierarchy in HIERARCHIES:
            for directory, _, _ in os.walk(self.path(self.cgroup_root, hierarchy), topdown=False):
                os.rmdir(directory)

    def _items(self) -> list[dict[str, Any]]:
        return [_listed(pod) for pod in list(self.pods.values()) if pod.listed]


def _end(box: Box) -> None:
    if box.process is not None:
        box.process.kill()
        box.process.wait()
        box.process = None


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged, everything else replaced."""
    found = dict(base)
    for key, value in more.items():
        known = found.get(key)
        found[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return found


def _listed(pod: NodePod) -> dict[str, Any]:
    """A pod as the kubelet lists it."""
    boxes = [box for box in pod.boxes if box.name]
    return {
        "metadata": {
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": pod.uid,
            "labels": pod.meta["labels"],
            "annotations": pod.meta["annotations"],
        },
        "spec": {
            "priorityClassName": pod.meta["priorityClassName"],
            "containers": [{"name": box.name, "image": "app:1", "resources": pod.meta["resources"]} for box in boxes],
        },
        "status": {
            "phase": "Running",
            "qosClass": _QOS[pod.qos],
            "containerStatuses": [{"name": box.name, "containerID": f"containerd://{box.id}"} for box in boxes],
            **pod.meta.get("status", {}),
        },
    }
