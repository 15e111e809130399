"""The tests' node of directories and files: one of the two fake nodes (the other, with processes: tests/e2e/node.py).

Imitates, for one kernel (the fake one in memory, or real v1 hierarchies of this machine):

- containerd 1.6: a bundle for each container before its groups are made;
- runc 1.1: groups first, then values, then state.json renamed into place, each step at the test's call;
- a kubelet 1.22 to 1.34 by `tests.fakes.kubelet` (groups with cgroupfs names, checkpoints, the pod list).

Not imitated: CRI and shims; the runtime's waits between its steps; systemd names; processes, but for one that sleeps in
a container where a test wants it.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, Protocol, Self

from msgspec import Struct

from reconciler.sources.runtime_files import FIFO
from tests.daemon.writers import Scribe
from tests.e2e.mounts import hierarchies
from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet.api import ListedContainer, pod_item
from tests.fakes.kubelet.fake import FakeKubelet
from tests.fakes.oci import bundle
from tests.node.runc import SWAP, rename_in, state, values

HIERARCHIES: Final = ("cpuset", "memory", "cpu", "cpuacct", "pids")
"""The hierarchies of the real kernel in which groups are made."""
PAUSE: Final[dict[str, Any]] = {"cpu": {"shares": 2}, "memory": {}}
_QOS: Final = {"besteffort": "BestEffort", "burstable": "Burstable", "": "Guaranteed"}
# Counters that the kernel moves by itself, and files that cannot be read or do something when written.
_RESTLESS: Final = ("usage", "stat", "failcnt", "procs", "tasks", "peak", "events", "pressure", "numa", "current")


class NodeKernel(Protocol):
    """The part of `FakeKernel` that a node needs; `RealKernel` has it too."""

    def make_group(self, group_path: str) -> None: ...

    def remove_group(self, group_path: str) -> None: ...

    def read(self, directory: str, file: str) -> str: ...

    def write(self, directory: str, file: str, text: str) -> None: ...


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A configuration: sections are merged, everything else replaced."""
    result = dict(base)
    for key, value in more.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


class RealKernel:
    """This machine's v1 hierarchies, of which groups are made in those of `HIERARCHIES`."""

    def __init__(self) -> None:
        self.mounts = hierarchies()

    def make_group(self, group_path: str) -> None:
        """One group whose parent exists, with its parent's CPUs and memory nodes."""
        for hierarchy in HIERARCHIES:
            directory = f"{self.mounts[hierarchy]}{group_path}"
            os.makedirs(directory, exist_ok=True)
            if hierarchy == "cpuset":
                above = os.path.dirname(directory)
                for file in ("cpuset.cpus", "cpuset.mems"):
                    self.write(directory, file, self.read(above, file).strip())

    def remove_group(self, group_path: str) -> None:
        """The group and all below it, deepest first; no process may be in them."""
        for hierarchy in HIERARCHIES:
            for directory, _, _ in os.walk(f"{self.mounts[hierarchy]}{group_path}", topdown=False):
                os.rmdir(directory)

    def read(self, directory: str, file: str) -> str:
        with open(f"{directory}/{file}") as control:
            return control.read()

    def write(self, directory: str, file: str, text: str) -> None:
        with open(f"{directory}/{file}", "w") as control:
            control.write(text)


def mounts_of(kernel: FakeKernel) -> dict[str, str]:
    """Controller, or ``unified``, to its mount's directory."""
    mounts: dict[str, str] = {}
    for tree in kernel.trees:
        mounts |= dict.fromkeys((controller.name for controller in tree.controllers), tree.mount)
        if tree.version == 2:
            mounts["unified"] = tree.mount
    return mounts


class Box(Struct):
    """One container on the node. ``name`` is "" for the pause container; ``resources`` are OCI's."""

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
    """A node whose files are all below ``root`` and whose groups are all below ``cgroup_root`` of ``kernel``.

    ``runc``: the name of the process that writes a runtime's values; "" for this process. ``kubelet``: one that lists
    other pods than those of `add`.
    """

    def __init__(
        self,
        root: str,
        kernel: NodeKernel,
        mounts: dict[str, str],
        *,
        cgroup_root: str = "",
        runc: str = "",
        kubelet: FakeKubelet | None = None,
    ) -> None:
        self.root = root
        self.cgroup_root = cgroup_root
        self.kubepods = f"{cgroup_root}/kubepods"
        self.besteffort = f"{self.kubepods}/besteffort"
        self.state_dir = f"{root}/run/containerd"
        self.runc_root = f"{self.state_dir}/runc/k8s.io"
        self.bundles = f"{self.state_dir}/io.containerd.runtime.v2.task/k8s.io"
        self.kubelet_root = f"{root}/var/lib/kubelet"
        self.store = f"{root}/var/lib/bypassd/state.db"
        self.socket = f"{root}/bypassd.sock"
        self.pods: dict[str, NodePod] = {}
        self._kernel = kernel
        self._mounts = mounts
        self._numbers = itertools.count(1)
        self._runc_name = runc
        self._runc: Scribe | None = None
        self.kubelet = kubelet or FakeKubelet(self.kubelet_root, items=self._items)
        for path in (self.runc_root, self.bundles):
            os.makedirs(path)

    def __enter__(self) -> Self:
        self.remove_groups()
        for path in (self.cgroup_root, self.kubepods, self.besteffort, f"{self.kubepods}/burstable"):
            if path:
                self._kernel.make_group(path)
        self.least_weight(self.besteffort)
        self.kubelet.api.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kubelet.api.stop()
        if self._runc is not None:
            self._runc.__exit__(None, None, None)
        for pod in self.pods.values():
            for box in pod.boxes:
                _end(box)
        self.remove_groups()

    def daemon_config(self, **more: object) -> dict[str, object]:
        """A daemon's configuration for this node, with the sections of ``more`` above it."""
        base: dict[str, Any] = {
            "mode": "enforce",
            "node": {"cgroup_root": self.cgroup_root},
            "kubelet": {
                "root_dir": self.kubelet_root,
                "endpoint": "http",
                "address": "127.0.0.1",
                "http_port": self.kubelet.api.port,
            },
            "runtime": {"state_dir": self.state_dir, "runc_roots": [self.runc_root]},
            "store": {"path": self.store},
            "http": {"socket": self.socket},
        }
        return merged(base, more)

    def put(self, path: str, text: str) -> None:
        """Any file below ``root``."""
        full = f"{self.root}/{path}"
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(text)

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
            "priorityClassName": priority_class,
            "resources": {key: value for key, value in (("requests", requests), ("limits", limits)) if value},
        }
        pod = NodePod(uid=uid, name=name, namespace=namespace, qos=qos, group=group, meta=meta, boxes=[], listed=listed)
        cpu: dict[str, Any] = {"shares": shares, "period": 100_000} | ({"quota": quota_us} if quota_us else {})
        resources = {"cpu": cpu | ({"cpus": cpus} if cpus else {}), "memory": {"limit": memory} if memory else {}}
        self.pods[uid] = pod
        self._kernel.make_group(group)
        self.write(group, "cpu", "cpu.shares", str(shares * containers) if qos != "besteffort" else "2")
        self.start(pod, "", PAUSE)
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
        box = self.prepare(pod, name, resources)
        self.make_groups(pod, box, meanwhile=meanwhile)
        if process:
            box.process = subprocess.Popen(["/bin/sleep", "3600"])
            for hierarchy in ("cpuset", "cpu"):
                self.write(box.group, hierarchy, "cgroup.procs", str(box.process.pid))
        return box

    def prepare(self, pod: NodePod, name: str, resources: dict[str, Any], *, container_id: str = "") -> Box:
        """What containerd writes before runc starts."""
        cid = container_id or os.urandom(32).hex()
        box = Box(id=cid, name=name, group=f"{pod.group}/{cid}", resources=resources)
        self.write_bundle(pod, box)
        return box

    def make_groups(self, pod: NodePod, box: Box, *, meanwhile: Callable[[Box], object] = lambda _: None) -> None:
        """What runc does first: its directory with the FIFO, then the groups, cpuset's before the others."""
        os.makedirs(f"{self.runc_root}/{box.id}")
        os.mkfifo(f"{self.runc_root}/{box.id}/{FIFO}")
        os.mkdir(self.path(box.group, "cpuset"))
        meanwhile(box)
        self._kernel.make_group(box.group)
        pod.boxes.append(box)

    def write_bundle(self, pod: NodePod, box: Box, **more: Any) -> None:
        """The container's config.json. ``more``: what `tests.fakes.oci.bundle` takes besides."""
        config = bundle(
            uid=pod.uid,
            namespace=pod.namespace,
            pod=pod.name,
            group=box.group,
            resources=box.resources,
            container=box.name,
            **more,
        )
        os.makedirs(f"{self.bundles}/{box.id}", exist_ok=True)
        with open(f"{self.bundles}/{box.id}/config.json", "w") as file:
            json.dump(config, file, separators=(",", ":"))  # compact, as containerd writes it

    def settle(self, box: Box, resources: dict[str, Any] | None = None) -> int:
        """What ``runc create`` and ``runc update`` do last: their values, then state.json is renamed into place.

        Returns the monotonic nanoseconds just before the rename.
        """
        box.resources = resources or box.resources
        has = int(self.read(box.group, "memory", "memory.limit_in_bytes"))
        for value in values(box.resources, v2=False, has_bytes=has):
            path = self.path(box.group, value.controller, value.file)
            if value.file not in SWAP or os.path.exists(path):
                self.runc_write(path, value.text)
        return self.write_state(box)

    def write_state(self, box: Box, *, pid: int = 1, annotations: dict[str, str] | None = None) -> int:
        """runc's record, renamed into place; the monotonic nanoseconds just before the rename."""
        config = {"linux": {"resources": box.resources, "cgroupsPath": box.group}, "annotations": annotations or {}}
        os.makedirs(f"{self.runc_root}/{box.id}", exist_ok=True)
        text = json.dumps(state(box.id, pid, config, self._mounts, f"{self.bundles}/{box.id}"))
        renamed_at = time.monotonic_ns()
        rename_in(f"{self.runc_root}/{box.id}/state.json", text)
        with contextlib.suppress(FileNotFoundError):
            # ``runc start`` follows at once: the program is executed.
            os.unlink(f"{self.runc_root}/{box.id}/{FIFO}")
        return renamed_at

    def end(self, pod: NodePod, box: Box) -> None:
        """The container has exited."""
        _end(box)
        shutil.rmtree(f"{self.runc_root}/{box.id}", ignore_errors=True)
        shutil.rmtree(f"{self.bundles}/{box.id}", ignore_errors=True)
        self._kernel.remove_group(box.group)
        pod.boxes.remove(box)

    def restart(self, pod: NodePod) -> Box:
        """The main container ends and a new one takes its place; its new cgroup has the spec's values."""
        old = pod.main
        self.end(pod, old)
        return self.start(pod, old.name, old.resources)

    def remove(self, pod: NodePod) -> None:
        for box in list(pod.boxes):
            self.end(pod, box)
        self._kernel.remove_group(pod.group)
        self.pods.pop(pod.uid, None)

    # Values

    def runc_write(self, path: str, text: str) -> None:
        """Write one control file as the runtime."""
        if self._runc_name and self._runc is None:
            self._runc = Scribe(self._runc_name)
        if self._runc is not None:
            self._runc.write(path, text)
        else:
            self._kernel.write(*os.path.split(path), text)

    def path(self, group: str, controller: str, file: str = "") -> str:
        """A group's directory, or a control file of it."""
        return f"{self._mounts[controller]}{group}" + (f"/{file}" if file else "")

    def read(self, group: str, controller: str, file: str) -> str:
        return self._kernel.read(self.path(group, controller), file).strip()

    def write(self, group: str, controller: str, file: str, text: str) -> None:
        """Write as this very process."""
        self._kernel.write(self.path(group, controller), file, text)

    def least_weight(self, group: str) -> None:
        """What a kubelet gives the besteffort directory and each pod in it."""
        if self._mounts["cpu"] == self._mounts.get("unified"):
            self.write(group, "cpu", "cpu.weight", "1")
        else:
            self.write(group, "cpu", "cpu.shares", "2")

    def cpus(self, box: Box) -> str:
        return self.read(box.group, "cpuset", "cpuset.cpus")

    def shares(self, box: Box) -> str:
        return self.read(box.group, "cpu", "cpu.shares")

    def quota(self, group: str) -> str:
        """As in the file: ``-1``, or on v2 ``max``, is no limit."""
        v2 = self._mounts["cpu"] == self._mounts.get("unified")
        return self.read(group, "cpu", "cpu.max").split()[0] if v2 else self.read(group, "cpu", "cpu.cfs_quota_us")

    def tree(self) -> dict[str, str]:
        """Every file of the node's groups that holds a setting: what must be as before, byte for byte."""
        settings: dict[str, str] = {}
        for hierarchy in HIERARCHIES:
            for directory, _, files in os.walk(self.path(self.kubepods, hierarchy)):
                for file in files:
                    path = f"{directory}/{file}"
                    if os.stat(path).st_mode & 0o200 and not any(word in file for word in _RESTLESS):
                        with contextlib.suppress(OSError):
                            settings[path] = self._kernel.read(directory, file)
        return settings

    def directories(self) -> list[str]:
        """Every cgroup directory of the node, in every hierarchy."""
        return [
            directory for hierarchy in HIERARCHIES for directory, _, _ in os.walk(self.path(self.kubepods, hierarchy))
        ]

    def remove_groups(self) -> None:
        """Remove all of our groups, deepest first."""
        self._kernel.remove_group(self.cgroup_root or self.kubepods)

    def _items(self) -> list[dict[str, Any]]:
        return [_listed(pod) for pod in list(self.pods.values()) if pod.listed]


def _end(box: Box) -> None:
    if box.process is not None:
        box.process.kill()
        box.process.wait()
        box.process = None


def _listed(pod: NodePod) -> dict[str, Any]:
    """A pod as the kubelet lists it."""
    boxes = [box for box in pod.boxes if box.name]
    return pod_item(
        uid=pod.uid,
        name=pod.name,
        namespace=pod.namespace,
        qos=_QOS[pod.qos],
        containers=[ListedContainer(name=box.name, id=box.id, resources=pod.meta["resources"]) for box in boxes],
        labels=pod.meta["labels"],
        annotations=pod.meta["annotations"],
        priority_class=pod.meta["priorityClassName"],
        status=pod.meta.get("status"),
    )
