"""A real control plane on loopback: etcd, API server, controllers, scheduler. Nodes are objects, or `real_node`'s.

The programs are those of the directory in KUBEBUILDER_ASSETS, the convention of Kubernetes' own test tools (etcd may be
the machine's). All processes are this one's children, and end with `stop`.

The nodes' objects are kept Ready here, and a pod that is scheduled there counts as running, as a kubelet reports it,
and as ready after the delay of its probe: so a scheduler that is the real one decides where replacements go.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import trustme

Object = dict[str, Any]  # the JSON of the API

MERGE_PATCH: Final = "application/strategic-merge-patch+json"
VARIABLE: Final = "KUBEBUILDER_ASSETS"
PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_BEAT_S: Final = 0.5
_READY_S: Final = 90.0
_STOP_S: Final = 20.0
_NODE_CAPACITY: Final = {"cpu": "8", "memory": "16Gi", "pods": "110", "kubernetes.io/batch-cpu": "1000000"}


def missing_programs(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why there is none here; None: all programs are there."""
    assets = environ.get(VARIABLE)
    if not assets:
        return f"{VARIABLE} is not set: the directory with {', '.join(PROGRAMS)} and etcd"
    absent = [name for name in PROGRAMS if not os.access(os.path.join(assets, name), os.X_OK)]
    if _etcd(assets) is None:
        absent.append("etcd")
    return f"{VARIABLE}={assets} lacks {', '.join(absent)}" if absent else None


def _etcd(assets: str) -> str | None:
    own = os.path.join(assets, "etcd")
    return own if os.access(own, os.X_OK) else shutil.which("etcd")


def _free_ports(count: int) -> list[int]:
    """All open at the same time, so that no two are the same."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Request(NamedTuple):
    """One request, by the audit log. ``resource`` with its subresource after a slash, or the path of what is none."""

    user: str
    agent: str
    verb: str
    group: str
    resource: str
    code: int
    body: Object


class ControlPlane:
    """Starts and stops the control plane. ``directory``: for keys, etcd's data and logs.

    ``in_cluster``: pods get tokens, and the address of the service ``kubernetes`` is the API server's own, so that no
    proxy is needed.
    """

    def __init__(self, directory: Path, assets: str, *, in_cluster: bool = False) -> None:
        self.directory = directory
        self.assets = assets
        self.in_cluster = in_cluster
        self._etcd_port, self._peer_port, port, self._kcm_port, self._scheduler_port = _free_ports(5)
        # Two runs on a machine have different ones: all of 127.0.0.0/8 is loopback.
        self._network = f"127.{100 + os.getpid() // 256 % 100}.{os.getpid() % 256}" if in_cluster else "10.0.0"
        self.host, self._port = (f"{self._network}.1", 443) if in_cluster else ("127.0.0.1", port)
        self.url = f"https://{self.host}:{self._port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._spawner = ThreadPoolExecutor(1)
        """The kernel sends the signal of a parent's death when the thread that made the process ends, not the process.

        A program that a worker thread has started again would end with that thread.
        """
        self._commands: dict[str, tuple[str, ...]] = {}
        self._nodes: set[str] = set()
        self._without_batch: set[str] = set()
        self._started: dict[str, float] = {}
        """When a pod began to run, by uid (monotonic seconds)."""
        self._ended = threading.Event()
        self._kubelets: threading.Thread | None = None
        self.bound: Callable[[Object], None] = lambda _: None
        """Called, in the kubelets' thread, for a pod that begins to run on one of the nodes."""
        self.gone: Callable[[Object], None] = lambda _: None
        """The same for one that ends there."""
        self.pki = directory / "pki"
        """Keys, certificates, kubeconfigs."""
        self._context: ssl.SSLContext | None = None

    # Start and end

    def start(self) -> None:
        """Returns when the API server is ready."""
        self._make_keys()
        etcd, assets = _etcd(self.assets), self.assets
        assert etcd is not None
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self._spawn(
            "etcd",
            *(etcd, f"--data-dir={self.directory}/etcd", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            f"--initial-cluster=default={peer}",
        )
        audit = self.directory / "audit.json"
        audit.write_text(
            json.dumps(
                {
                    "apiVersion": "audit.k8s.io/v1",
                    "kind": "Policy",
                    "omitStages": ["RequestReceived"],
                    # Those of controllers are among them; a kubelet asks here whether bypassd may use its own port.
                    "rules": [
                        {"level": "Request", "userGroups": ["system:serviceaccounts:kube-system"]},
                        {"level": "Request", "resources": [{"group": "authorization.k8s.io"}]},
                        {"level": "None"},
                    ],
                }
            )
        )
        pki = self.pki
        self._spawn(
            "kube-apiserver",
            f"{assets}/kube-apiserver",
            f"--etcd-servers={client}",
            *(f"--bind-address={self.host}", f"--secure-port={self._port}"),
            *(f"--tls-cert-file={pki}/server.crt", f"--tls-private-key-file={pki}/server.key"),
            f"--client-ca-file={pki}/ca.crt",
            *(f"--service-account-key-file={pki}/sa.key", f"--service-account-signing-key-file={pki}/sa.key"),
            *(f"--service-account-issuer={self.url}", f"--service-cluster-ip-range={self._network}.0/24"),
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
            *(f"--audit-policy-file={audit}", f"--audit-log-path={self.directory}/audit.log"),
            # Without a kubelet nothing would mount the token.
            *(() if self.in_cluster else ("--disable-admission-plugins=ServiceAccount",)),
        )
        self._wait("the API server", lambda: self.call("GET", "/readyz")[0] == 200)
        for name, port, more in (
            (
                "kube-controller-manager",
                self._kcm_port,
                (
                    f"--root-ca-file={pki}/ca.crt",
                    f"--service-account-private-key-file={pki}/sa.key",
                    # Each controller has rights of its own, the whole has few.
                    "--use-service-account-credentials=true",
                ),
            ),
            ("kube-scheduler", self._scheduler_port, ()),
        ):
            config = f"{pki}/{name}.json"
            self._spawn(
                name,
                f"{assets}/{name}",
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                *("--bind-address=127.0.0.1", f"--secure-port={port}", "--leader-elect=false"),
                *more,
            )
        self._wait(
            "the default service account", lambda: self.get("/api/v1/namespaces/default/serviceaccounts/default")
        )
        self._kubelets = threading.Thread(target=self._be_kubelets, daemon=True)
        self._kubelets.start()

    def stop(self) -> None:
        """End all of it, the last first."""
        self._ended.set()
        if self._kubelets is not None:
            self._kubelets.join(_STOP_S)
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._spawner.shutdown()

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """One of the programs, for faults."""
        return self._processes[name]

    # Faults

    def kill(self, name: str) -> None:
        """End one of the programs at once, as the machine's power would; the others go on."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def start_again(self, name: str) -> None:
        """With its command line and its data; returns when it responds."""
        self._spawn(name, *self._commands[name])
        if name == "etcd":
            self._wait("etcd", lambda: self._etcd_call("/v3/maintenance/status"))
        else:
            self._wait("the API server", lambda: self.call("GET", "/readyz")[0] == 200)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The API server, stopped by a signal meanwhile."""
        server = self._processes["kube-apiserver"]
        server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            server.send_signal(signal.SIGCONT)

    def compact(self) -> None:
        """Forget every version of every object but the newest."""
        revision = self._etcd_call("/v3/maintenance/status")["header"]["revision"]
        self._etcd_call("/v3/kv/compaction", {"revision": revision, "physical": True})

    @contextlib.contextmanager
    def restored_later(self) -> Iterator[None]:
        """What is done inside is lost at the end: API server and etcd start again with the data of the beginning."""
        data, kept = self.directory / "etcd", self.directory / "etcd-kept"
        for name in ("kube-apiserver", "etcd"):
            self.kill(name)
        shutil.copytree(data, kept)
        for name in ("etcd", "kube-apiserver"):
            self.start_again(name)
        yield
        for name in ("kube-apiserver", "etcd"):
            self.kill(name)
        shutil.rmtree(data)
        kept.rename(data)
        for name in ("etcd", "kube-apiserver"):
            self.start_again(name)

    def _etcd_call(self, path: str, body: Object | None = None) -> Object:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._etcd_port}{path}", method="POST", data=json.dumps(body or {}).encode()
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: Object = json.loads(answer.read())
            return found

    def _spawn(self, name: str, *command: str) -> None:
        self._commands[name] = command
        # A run that is killed leaves none of them.
        ends_with_us = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
        with open(self.directory / f"{name}.log", "ab") as log:
            self._processes[name] = self._spawner.submit(
                subprocess.Popen[bytes],
                (*ends_with_us, *command),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            ).result()

    def _wait(self, what: str, there: Callable[[], object], longest_s: float = _READY_S) -> None:
        deadline = time.monotonic() + longest_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if there():
                    return
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} has ended: {self._log(name)}")
            time.sleep(0.1)
        raise RuntimeError(f"no {what} within {longest_s:.0f} s: {self._log('kube-apiserver')}")

    def _log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")[-2000:]

    def _make_keys(self) -> None:
        self.pki.mkdir(parents=True)
        ca = trustme.CA()
        ca.cert_pem.write_to_path(str(self.pki / "ca.crt"))
        server = ca.issue_cert(*dict.fromkeys((self.host, f"{self._network}.1", "kubernetes.default")))
        server.cert_chain_pems[0].write_to_path(str(self.pki / "server.crt"))
        server.private_key_pem.write_to_path(str(self.pki / "server.key"))
        signing = trustme.CA(key_type=trustme.KeyType.RSA)
        signing.private_key_pem.write_to_path(str(self.pki / "sa.key"))
        for name, user, group in (
            ("admin", "admin", "system:masters"),
            ("kube-controller-manager", "system:kube-controller-manager", ""),
            ("kube-scheduler", "system:kube-scheduler", ""),
        ):
            self.kubeconfig(ca, name, user, group)
        self._ca = ca
        context = ssl.create_default_context(cafile=str(self.pki / "ca.crt"))
        context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
        self._context = context

    def kubeconfig(self, ca: trustme.CA, name: str, user: str, group: str = "") -> Path:
        """A kubeconfig with a client certificate of its own."""
        # With a name: an empty list of names, which is critical, is none that Go accepts.
        cert = ca.issue_cert(f"{name}.invalid", common_name=user, organization_name=group or None)
        cert.cert_chain_pems[0].write_to_path(str(self.pki / f"{name}.crt"))
        cert.private_key_pem.write_to_path(str(self.pki / f"{name}.key"))
        user_part = {"client-certificate": f"{self.pki}/{name}.crt", "client-key": f"{self.pki}/{name}.key"}
        return self._write_kubeconfig(self.pki / f"{name}.json", user_part)

    def _write_kubeconfig(self, path: Path, user: Object) -> Path:
        cluster = {"server": self.url, "certificate-authority": f"{self.pki}/ca.crt"}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": user}],
                }
            )
        )
        path.chmod(0o600)
        return path

    def serving_certificate(self, directory: Path, *names: str) -> None:
        """Certificate and key of a kubelet's port, signed by the cluster's CA."""
        cert = self._ca.issue_cert(*names)
        cert.cert_chain_pems[0].write_to_path(str(directory / "kubelet.crt"))
        cert.private_key_pem.write_to_path(str(directory / "kubelet.key"))

    def node_kubeconfig(self, node: str) -> Path:
        """The credentials of a node's kubelet."""
        return self.kubeconfig(self._ca, f"kubelet-{node}", f"system:node:{node}", "system:nodes")

    # What a cluster's administrator does

    @staticmethod
    def account(name: str, namespace: str = "kube-system") -> str:
        """The user name of a service account."""
        return f"system:serviceaccount:{namespace}:{name}"

    def account_kubeconfig(self, name: str = "bypassd", namespace: str = "kube-system") -> Path:
        """A kubeconfig with a token of the service account, which is made where it does not exist."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.call("POST", accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
        code, answer = self.call(
            "POST",
            f"{accounts}/{name}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}},
        )
        assert code == 201, answer
        return self._write_kubeconfig(self.pki / f"account-{name}.json", {"token": answer["status"]["token"]})

    def call(
        self, method: str, path: str, body: object | None = None, kind: str = "application/json"
    ) -> tuple[int, Any]:  # the JSON of the API, or a text
        """A request as cluster administrator: status and answer. Errors: `OSError` without one."""
        headers = {"Content-Type": kind, "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, method=method, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=60) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()
        except urllib.error.HTTPError as exc:
            text = exc.read()
            return exc.code, json.loads(text) if text[:1] == b"{" else text.decode()

    def get(self, path: str) -> Object | None:
        """An object; None: there is none."""
        code, answer = self.call("GET", path)
        return answer if code == 200 else None

    def apply(self, manifests: str) -> None:
        """Create what documents of YAML have (of kinds whose collection is known here)."""
        import yaml

        for item in yaml.safe_load_all(manifests):
            code, answer = self.call("POST", _collection(item), item)
            assert code in {201, 409}, answer

    def add_node(self, name: str, *, labels: Object | None = None, batch: bool = True) -> None:
        """A node that is Ready until the end. ``batch``: with batch-cpu that no manager computes."""
        if not batch:
            self._without_batch.add(name)
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        }
        code, answer = self.call("POST", "/api/v1/nodes", body)
        assert code == 201, answer
        self._nodes.add(name)
        self._wait(f"ready node {name}", lambda: self.is_schedulable(name))

    def forget_node(self, name: str) -> None:
        """Delete a node's object; its kubelet does not make it again."""
        self._nodes.discard(name)
        assert self.call("DELETE", f"/api/v1/nodes/{name}")[0] == 200

    def is_schedulable(self, name: str) -> bool:
        """Ready, and without the taints that a new node has at first."""
        node = self.get(f"/api/v1/nodes/{name}") or {}
        conditions = node.get("status", {}).get("conditions", [])
        ready = any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
        taints = node.get("spec", {}).get("taints", [])
        return ready and not any(item["key"].startswith("node.kubernetes.io/") for item in taints)

    def taints(self, name: str) -> list[Object]:
        """All taints of a node."""
        node = self.get(f"/api/v1/nodes/{name}")
        assert node is not None
        return list(node["spec"].get("taints", []))

    def pods(self, label: str = "", namespace: str = "default") -> list[Object]:
        """Pods that are not being deleted."""
        code, answer = self.call("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector={label}")
        assert code == 200, answer
        return [pod for pod in answer["items"] if "deletionTimestamp" not in pod["metadata"]]

    def audited(self) -> list[tuple[str, str, int]]:
        """Verb, resource with its subresource, and status of each request of the service account bypassd."""
        own = self.account("bypassd")
        return [(item.verb, item.resource, item.code) for item in self.requests() if item.user == own]

    def requests(self) -> list[Request]:
        """All in the audit log: of service accounts in kube-system, and what kubelets ask about rights."""
        found: dict[str, Request] = {}
        for event in map(json.loads, (self.directory / "audit.log").read_text().splitlines()):
            ref = event.get("objectRef", {})
            # A watch has two entries, at its begin and at its end.
            found.setdefault(
                event["auditID"],
                Request(
                    user=event["user"]["username"],
                    agent=event.get("userAgent", ""),
                    verb=event["verb"],
                    group=ref.get("apiGroup", ""),
                    resource="/".join(filter(None, (ref.get("resource", event["requestURI"]), ref.get("subresource")))),
                    code=event["responseStatus"]["code"],
                    body=event.get("requestObject") or {},
                ),
            )
        return list(found.values())

    # What kubelets do

    def _be_kubelets(self) -> None:
        while not self._ended.wait(_BEAT_S):
            # An API server that ends in the middle of an answer is among them.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                for name in list(self._nodes):
                    self._beat(name)
                self._run_pods()

    def _beat(self, name: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now, "message": ""}
        kept = {"cpu", "memory", "pods"} if name in self._without_batch else _NODE_CAPACITY.keys()
        amounts = {key: amount for key, amount in _NODE_CAPACITY.items() if key in kept}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        self.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE_PATCH)

    def _run_pods(self) -> None:
        """Report pods as running, and delete those that are to go."""
        code, answer = self.call("GET", "/api/v1/pods")
        for pod in answer["items"] if code == 200 else ():
            meta, phase = pod["metadata"], pod["status"].get("phase")
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            if pod["spec"].get("nodeName") not in self._nodes:
                continue
            if "deletionTimestamp" in meta:
                self.gone(pod)
                self.call("DELETE", f"{path}?gracePeriodSeconds=0")
            elif phase == "Pending":
                self.bound(pod)
                self._started[meta["uid"]] = time.monotonic()
                self._report(path, ready=_unready_s(pod) == 0)
            elif not _is_ready(pod) and time.monotonic() - self._started.get(meta["uid"], 0.0) >= _unready_s(pod):
                self._report(path, ready=True)

    def _report(self, path: str, *, ready: bool) -> None:
        # Without the time it is never available by minReadySeconds.
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        self.call("PATCH", f"{path}/status", {"status": {"phase": "Running", "conditions": [condition]}}, MERGE_PATCH)


def _unready_s(pod: Object) -> float:
    """How long no probe of the pod can have succeeded."""
    probes = (container.get("readinessProbe", {}) for container in pod["spec"]["containers"])
    return max(float(probe.get("initialDelaySeconds", 0)) for probe in probes)


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _collection(item: Object) -> str:
    """The path to which an object is posted."""
    group, _, version = item["apiVersion"].rpartition("/")
    base = f"/apis/{group}/{version}" if group else f"/api/{version}"
    namespace = item["metadata"].get("namespace")
    plural = item["kind"].lower() + "s"
    return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"


@contextlib.contextmanager
def control_plane(directory: Path, *, in_cluster: bool = False) -> Iterator[ControlPlane]:
    """One for a module's tests. Skips with the reason where the programs are missing."""
    problem = missing_programs()
    if problem is not None:
        pytest.skip(f"no control plane: {problem}")
    plane = ControlPlane(directory, os.environ[VARIABLE], in_cluster=in_cluster)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
