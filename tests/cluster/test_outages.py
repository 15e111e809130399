"""Outages of a real control plane: what the daemon says meanwhile, and how soon after it knows the node's pods again.

The node is one of directories (tests/daemon). Its kubelet is not read, so all that is known of a pod's class comes from
the API server's watch.
"""

import signal
import time
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
