"""Outages of a real control plane: what the daemon says meanwhile, and how soon after it knows the node's pods again.

The node is one of directories (tests/daemon). Its kubelet is not read, so all that is known of a pod's class comes from
the API server's watch.
"""

import contextlib
import json
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from reconciler.cli.rights import RightsUse, manifest
from tests.cluster.control_plane import ControlPlane, Object, control_plane
from tests.cluster.test_closed_node import until
from tests.cluster.test_shortage import node
from tests.daemon.process import Daemon
from tests.fakes.node import DirectoryNode

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

__all__ = ["node"]
BACK_S = 45.0
"""From the API server's first answer until the daemon has a pod that was made meanwhile: the longest delay is 30 s."""
SEEN_S = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as plane:
        plane.add_node("n1")
        plane.apply(manifest([RightsUse.PODS], "kube-system"))
        yield plane


class Watcher:
    """The daemon, and pods that exist at the API server and, as directories, on its node."""

    def __init__(self, plane: ControlPlane, node: DirectoryNode) -> None:
        self.plane = plane
        self.node = node
        self.kubeconfig = plane.account_kubeconfig()
        self.daemon = Daemon(
            node,
            mode="observe",
            node={"name": "n1"},
            kubelet={"endpoint": "off"},
            apiserver={"kubeconfig": str(self.kubeconfig), "watch_pods": "on"},
        )

    def create(self, name: str) -> str:
        """A BE pod of QoS Burstable: without its label it counts as online. Returns the uid."""
        container = {"name": "main", "image": "localhost/be:1", "resources": {"requests": {"cpu": "100m"}}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": {"koordinator.sh/qosClass": "BE"}},
            "spec": {"nodeName": "n1", "containers": [container], "terminationGracePeriodSeconds": 0},
        }
        code, answer = self.plane.call("POST", "/api/v1/namespaces/default/pods", body)
        assert code == 201, answer
        uid: str = answer["metadata"]["uid"]
        self.node.add(name, qos="burstable", uid=uid, shares=102, listed=False)
        return uid

    def knows(self, uid: str) -> bool:
        return self.daemon.pod(uid).get("class") == "reclaimed"

    def source(self) -> Object:
        rows: list[Object] = self.daemon.state("sources")["sources"]
        return next((row for row in rows if row["name"] == "pod watch"), {})

    def ok(self) -> bool:
        return bool(self.source().get("ok"))

    def back(self, name: str, within_s: float = BACK_S) -> None:
        """A pod that is made now is known soon, and the source says so."""
        uid = self.create(name)
        until(lambda: self.knows(uid), within_s, told=self._told)
        assert self.ok()
        assert "refused" not in self.source()["detail"]

    def _told(self) -> str:
        return f"{self.source()}\n{self.daemon.tail()}"


@pytest.fixture
def watcher(plane: ControlPlane, node: DirectoryNode) -> Iterator[Watcher]:
    made = Watcher(plane, node)
    made.daemon.up()
    try:
        until(made.ok, told=made.daemon.tail)
        made.back("before", 30.0)
        yield made
    finally:
        made.daemon.stop()
        plane.call("DELETE", "/api/v1/namespaces/default/pods")
        until(lambda: not plane.pods())


def test_a_killed_api_server(watcher: Watcher) -> None:
    plane = watcher.plane
    plane.kill("kube-apiserver")
    until(lambda: not watcher.ok(), 10.0)
    time.sleep(20.0)  # long enough for the delay to have doubled to its most
    plane.start_again("kube-apiserver")
    watcher.back("after")


def test_a_frozen_api_server_is_not_ok_and_is_used_when_it_goes_on(watcher: Watcher) -> None:
    server = watcher.plane.process("kube-apiserver")
    server.send_signal(signal.SIGSTOP)
    try:
        until(lambda: not watcher.ok(), SEEN_S)
        assert "does not respond" in watcher.source()["detail"]
    finally:
        server.send_signal(signal.SIGCONT)
    watcher.back("after")


def test_a_token_of_an_account_that_was_made_anew_is_refused_until_the_file_has_a_valid_one(watcher: Watcher) -> None:
    plane = watcher.plane
    account = "/api/v1/namespaces/kube-system/serviceaccounts/bypassd"
    assert plane.call("DELETE", account)[0] == 200
    # The connection is from before: the next one is refused.
    server = plane.process("kube-apiserver")
    assert server.poll() is None
    plane.kill("kube-apiserver")
    plane.start_again("kube-apiserver")
    until(lambda: not watcher.ok() and "401" in watcher.source()["detail"], BACK_S, told=lambda: str(watcher.source()))
    assert plane.account_kubeconfig() == watcher.kubeconfig
    watcher.back("after")


def test_a_version_that_the_server_does_not_have_any_more_is_a_new_list(watcher: Watcher) -> None:
    plane = watcher.plane
    plane.kill("kube-apiserver")
    plane.compact()
    plane.start_again("kube-apiserver")
    watcher.back("after")


def test_a_store_that_was_restored_to_an_older_version(watcher: Watcher) -> None:
    """It reports nothing until its version has passed the one that the watch continues from."""
    plane = watcher.plane
    with plane.restored_later():
        for number in range(20):
            body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"c{number}"}}
            assert plane.call("POST", "/api/v1/namespaces/default/configmaps", body)[0] == 201
        watcher.back("lost")
    # At most the silence that is awaited of a server that sends bookmarks.
    watcher.back("after", 150.0)


FLOWS = "/apis/flowcontrol.apiserver.k8s.io/v1beta3"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
HOLDER = "holder"
SEATS = 12
"""More than a priority level with one share has."""


@contextlib.contextmanager
def all_seats_taken(plane: ControlPlane) -> Iterator[None]:
    """The API server refuses each request of bypassd: 429 with ``Retry-After``, by its own Priority and Fairness.

    For ten seconds: its level's seats are held by requests that wait for an admission webhook, which never answers.
    """
    level = {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1beta3",
        "kind": "PriorityLevelConfiguration",
        "metadata": {"name": "narrow"},
        "spec": {
            "type": "Limited",
            "limited": {
                "nominalConcurrencyShares": 1,
                "borrowingLimitPercent": 0,
                "lendablePercent": 0,
                "limitResponse": {"type": "Reject"},
            },
        },
    }
    every = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
    named = [{"kind": "User", "user": {"name": plane.account(name)}} for name in ("bypassd", HOLDER)]
    flow = {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1beta3",
        "kind": "FlowSchema",
        "metadata": {"name": "narrow"},
        "spec": {
            "priorityLevelConfiguration": {"name": "narrow"},
            "matchingPrecedence": 2,
            "rules": [{"subjects": named, "resourceRules": [every]}],
        },
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": HOLDER},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "namespace": "kube-system", "name": HOLDER}],
    }
    silent = socket.create_server(("127.0.0.1", 0), backlog=64)
    webhook = {
        "name": "silent.example.com",
        "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["*"], "resources": ["configmaps"]}],
        "clientConfig": {"url": f"https://127.0.0.1:{silent.getsockname()[1]}/"},
        "failurePolicy": "Ignore",
        "timeoutSeconds": 30,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    hook = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "silent"},
        "webhooks": [webhook],
    }
    made: tuple[tuple[str, Object], ...] = (
        (f"{FLOWS}/prioritylevelconfigurations", level),
        (f"{FLOWS}/flowschemas", flow),
        (BINDINGS, binding),
        (WEBHOOKS, hook),
    )
    config = json.loads(plane.account_kubeconfig(HOLDER).read_text())
    token = config["users"][0]["user"]["token"]
    context = ssl.create_default_context(cafile=str(plane.pki / "ca.crt"))

    def hold(number: int) -> None:
        body = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"held{number}"}}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(
            f"{plane.url}/api/v1/namespaces/default/configmaps", method="POST", data=body, headers=headers
        )
        try:
            urllib.request.urlopen(request, context=context, timeout=60).close()
        except urllib.error.HTTPError as exc:
            exc.close()
        except OSError:
            pass

    try:
        for path, item in made:
            assert plane.call("POST", path, item)[0] == 201
        time.sleep(2.0)  # the API server's own watches of them
        holders = [threading.Thread(target=hold, args=(number,), daemon=True) for number in range(SEATS)]
        for holder in holders:
            holder.start()
        time.sleep(1.0)
        yield
    finally:
        for path, item in reversed(made):
            plane.call("DELETE", f"{path}/{item['metadata']['name']}")
        silent.close()


def test_a_list_that_the_api_server_refuses_is_repeated_when_it_allows_it(watcher: Watcher) -> None:
    plane, daemon = watcher.plane, watcher.daemon
    daemon.stop()
    with all_seats_taken(plane):
        before = len(plane.audited())
        daemon.up()
        until(lambda: "429" in watcher.source().get("detail", ""), 20, told=lambda: str(watcher.source()))
        assert not watcher.ok()
        # The webhook's connections fail after ten seconds, and the seats are free.
        until(watcher.ok, BACK_S, told=lambda: str(watcher.source()))
        refused = plane.audited()[before:].count(("list", "pods", 429))
        print(f"\n{refused} lists were refused")
        assert 2 <= refused <= 10
    watcher.back("after")
