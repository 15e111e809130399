"""A node for measuring: pods of real cgroups (v1, cgroupfs names) with runc's and the kubelet's files, made fast.

Everything lies under one cgroup root of our own and one temporary directory; `close` removes both.
"""

import hashlib
import http.server
import json
import os
import shutil
import threading
import time
from types import TracebackType
from typing import Final, Self

HIERARCHIES: Final = ("cpuset", "memory", "cpu", "cpuacct", "pids")
MOUNT: Final = "/sys/fs/cgroup"
CGROUP_ROOT: Final = "/bypassd-bench"
KUBEPODS: Final = f"{CGROUP_ROOT}/kubepods"
SPEC_SHARES: Final = 2
HTTP_PORT: Final = 19470


class BenchNode:
    """The node's directories and files, and the kubelet's read-only pod list."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.runc_root = f"{directory}/runc"
        self.bundles = f"{directory}/containerd/io.containerd.runtime.v2.task/k8s.io"
        self.kubelet_root = f"{directory}/kubelet"
        self.socket = f"{directory}/bypassd.sock"
        self.pods: dict[str, dict[str, object]] = {}
        self._server: http.server.ThreadingHTTPServer | None = None
        for path in (self.runc_root, self.bundles, self.kubelet_root):
            os.makedirs(path)

    def __enter__(self) -> Self:
        self.remove_groups()
        for path in (CGROUP_ROOT, KUBEPODS, f"{KUBEPODS}/besteffort", f"{KUBEPODS}/burstable"):
            self._group(path)
        with open(f"{self.kubelet_root}/cpu_manager_state", "w") as file:
            file.write('{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
        self._serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self.remove_groups()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def port(self) -> int:
        """The pod list's port on loopback."""
        assert self._server is not None
        return int(self._server.server_address[1])

    def config(self, **more: object) -> dict[str, object]:
        """A configuration for the agent: the defaults, but for where this node is."""
        return {
            "mode": "enforce",
            "node": {"cgroup_root": CGROUP_ROOT},
            "kubelet": {
                "root_dir": self.kubelet_root,
                "endpoint": "http",
                "address": "127.0.0.1",
                "http_port": self.port,
            },
            "runtime": {"state_dir": f"{self.directory}/containerd", "runc_roots": [self.runc_root]},
            "store": {"path": f"{self.directory}/state/state.db"},
            "http": {"socket": self.socket, "port": HTTP_PORT},
            **more,
        }

    def pod(self, number: int, *, qos: str = "besteffort", containers: int = 2) -> tuple[str, list[str]]:
        """A running pod: directories, bundles, state.json, and its place in the pod list."""
        uid = f"{number:08x}-0000-4000-8000-000000000000"
        path = f"{KUBEPODS}/{qos}/pod{uid}" if qos else f"{KUBEPODS}/pod{uid}"
        self._group(path)
        ids = []
        for index in range(containers):
            cid = hashlib.sha256(f"{number}/{index}".encode()).hexdigest()
            ids.append(cid)
            self.bundle(path, cid, uid, index)
            self.start(path, cid)
            self.settle(path, cid)
        self.pods[uid] = self._listed(number, uid, qos, ids)
        return path, ids

    def bundle(self, path: str, cid: str, uid: str, index: int) -> None:
        """What containerd writes before runc starts: index 0 is the pause container."""
        kind = "sandbox" if index == 0 else "container"
        annotations = {
            "io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.sandbox-uid": uid,
            "io.kubernetes.cri.sandbox-namespace": "bench",
            "io.kubernetes.cri.sandbox-name": f"pod-{uid[:8]}",
        }
        if index:
            annotations["io.kubernetes.cri.container-name"] = f"c{index}"
        config = {
            "ociVersion": "1.0.2",
            "annotations": annotations,
            "linux": {
                "cgroupsPath": f"{path}/{cid}",
                "resources": {"cpu": {"shares": SPEC_SHARES, "period": 100000}, "memory": {}},
            },
        }
        os.makedirs(f"{self.bundles}/{cid}", exist_ok=True)
        with open(f"{self.bundles}/{cid}/config.json", "w") as file:
            json.dump(config, file, separators=(",", ":"))

    def start(self, path: str, cid: str) -> None:
        """What runc does first: its directory, then the groups."""
        os.makedirs(f"{self.runc_root}/{cid}", exist_ok=True)
        self._group(f"{path}/{cid}")

    def settle(self, path: str, cid: str) -> int:
        """What runc does last: its values, then the rename; returns the monotonic ns just before it."""
        with open(f"{MOUNT}/cpu{path}/{cid}/cpu.shares", "w") as file:
            file.write(str(SPEC_SHARES))
        state = {
            "id": cid,
            "init_process_pid": 1,
            "config": {"cgroups": {"path": f"{path}/{cid}", "cpu_shares": SPEC_SHARES}},
        }
        name = f"{self.runc_root}/{cid}/state.json"
        with open(f"{name}.tmp", "w") as file:
            json.dump(state, file)
        at = time.monotonic_ns()
        os.rename(f"{name}.tmp", name)
        return at

    def remove(self, path: str, ids: list[str]) -> None:
        """The pod is gone."""
        for cid in ids:
            shutil.rmtree(f"{self.runc_root}/{cid}", ignore_errors=True)
            shutil.rmtree(f"{self.bundles}/{cid}", ignore_errors=True)
            for hierarchy in HIERARCHIES:
                os.rmdir(f"{MOUNT}/{hierarchy}{path}/{cid}")
        for hierarchy in HIERARCHIES:
            os.rmdir(f"{MOUNT}/{hierarchy}{path}")
        self.pods.pop(path.rpartition("/pod")[2], None)

    def _group(self, path: str) -> None:
        for hierarchy in HIERARCHIES:
            directory = f"{MOUNT}/{hierarchy}{path}"
            os.makedirs(directory, exist_ok=True)
            if hierarchy == "cpuset":
                above = directory.rpartition("/")[0]
                for file in ("cpuset.cpus", "cpuset.mems"):
                    with open(f"{above}/{file}") as source, open(f"{directory}/{file}", "w") as target:
                        target.write(source.read().strip())

    def remove_groups(self) -> None:
        """Remove all of our groups, deepest first."""
        for hierarchy in HIERARCHIES:
            top = f"{MOUNT}/{hierarchy}{CGROUP_ROOT}"
            for directory, _, _ in os.walk(top, topdown=False):
                os.rmdir(directory)

    @staticmethod
    def _listed(number: int, uid: str, qos: str, ids: list[str]) -> dict[str, object]:
        return {
            "metadata": {
                "name": f"pod-{number}",
                "namespace": "bench",
                "uid": uid,
                "labels": {"app": f"app-{number % 7}", "pod-template-hash": f"{number:010d}"},
                "annotations": {"kubernetes.io/config.seen": "2026-01-01T00:00:00Z"},
            },
            "spec": {
                "priority": 0,
                "containers": [
                    {"name": f"c{index}", "image": "app:1", "resources": {}} for index in range(1, len(ids))
                ],
            },
            "status": {
                "phase": "Running",
                "qosClass": {"besteffort": "BestEffort", "burstable": "Burstable", "": "Guaranteed"}[qos],
                "containerStatuses": [
                    {"name": f"c{index}", "containerID": f"containerd://{cid}"}
                    for index, cid in enumerate(ids)
                    if index
                ],
            },
        }

    def _serve(self) -> None:
        pods = self.pods

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = json.dumps(
                    {"kind": "PodList", "apiVersion": "v1", "items": list(pods.values()) or None}
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
