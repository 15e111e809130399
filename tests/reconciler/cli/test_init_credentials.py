"""``bypassctl init credentials``: the printed rights, the kubeconfig, and one line for each tested access."""

import base64
import json
import os
import re
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from reconciler.cli.rights import RIGHTS, RightsUse, manifest
from reconciler.clients.kubeconfig import read_kubeconfig
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.reconciler.cli.conftest import Run

ADMIN, OWN = "adm1n-s3cret", "own-t0ken"


class World:
    """An API server with TLS, an administrator's kubeconfig, and the places of this node."""

    def __init__(self, server: FakeApiServer, ca: trustme.CA, path: Path) -> None:
        self.server = server
        self.path = path
        self.to = path / "etc/kubeconfig"
        self.pem = ca.cert_pem.bytes().decode()
        self.url = f"https://127.0.0.1:{server.port}"
        (path / "ca.crt").write_text(self.pem)
        (path / "token").write_text(f"{OWN}\n")
        (path / "config.yaml").write_text("kubelet: {endpoint: off}\nnode: {name: n1}\n")
        data = base64.b64encode(self.pem.encode()).decode()
        (path / "admin.conf").write_text(
            f"clusters: [{{name: c, cluster: {{server: '{self.url}', certificate-authority-data: {data}}}}}]\n"
            f"users: [{{name: u, user: {{token: {ADMIN}}}}}]\n"
            "contexts: [{name: x, context: {cluster: c, user: u}}]\n"
        )

    @property
    def admin(self) -> tuple[str, ...]:
        return ("--from", str(self.path / "admin.conf"), *self.common)

    @property
    def given(self) -> tuple[str, ...]:
        files = ("--ca", str(self.path / "ca.crt"), "--token-file", str(self.path / "token"))
        return ("--server", self.url, *files, *self.common)

    @property
    def common(self) -> tuple[str, ...]:
        return ("--to", str(self.to), "--config", str(self.path / "config.yaml"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    ca = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    with in_thread(FakeApiServer, context) as server:
        server.issues = OWN
        yield World(server, ca, tmp_path)


def rows(text: str) -> dict[str, str]:
    """Name of each tested access with its mark."""
    table = text[text.index("ACCESS") :].splitlines()[1:]
    names = (
        "list pods",
        "list, watch pods",
        "create pods/eviction",
        "create, patch events",
        "get nodes",
        "kubelet /pods",
    )
    return {name: line.split()[0] for line in table for name in names if line[4:].lstrip().startswith(name)}


def test_with_an_administrators_kubeconfig_a_token_of_the_service_account_is_all_that_is_kept(
    run: Run, world: World
) -> None:
    code, out, err = run("init", "credentials", *world.admin, "--days", "30")
    assert (code, err) == (0, "")
    assert stat.S_IMODE(os.stat(world.to).st_mode) == 0o600
    text = world.to.read_text()
    peer = read_kubeconfig(str(world.to), name="x")
    assert (peer.url, peer.inline.ca, peer.inline.token, peer.token_file) == (world.url, world.pem, OWN, None)
    assert ADMIN not in text
    assert ADMIN not in out
    assert OWN not in out
    path = "POST /api/v1/namespaces/kube-system/serviceaccounts/bypassd/token"
    assert world.server.requests.count(path) == 1
    assert json.loads(world.server.bodies[world.server.requests.index(path)])["spec"] == {"expirationSeconds": 2592000}
    used = dict(zip(world.server.requests, world.server.tokens, strict=True))
    assert {path: used.pop(path)} == {path: ADMIN}
    assert set(used.values()) == {OWN}, "the test uses what was written"
    assert "2030-01-01" in out
    assert set(os.listdir(world.to.parent)) == {"kubeconfig"}


def test_with_server_ca_and_token_no_request_precedes_the_test(run: Run, world: World) -> None:
    code, out, _ = run("init", "credentials", *world.given)
    assert code == 0
    assert set(world.server.tokens) == {OWN}
    assert rows(out) == {
        "list pods": "ok",
        "list, watch pods": "ok",
        "create pods/eviction": "ok",
        "create, patch events": "ok",
        "get nodes": "ok",
        "kubelet /pods": "-",
    }
    assert any("fieldSelector=spec.nodeName%3Dn1" in path for path in world.server.requests)
    assert not any(path.startswith("POST") and "reviews" not in path for path in world.server.requests)


def test_a_dry_run_writes_nothing_and_masks_the_token(run: Run, world: World) -> None:
    for arguments in (world.given, world.admin):
        code, out, _ = run("init", "credentials", *arguments, "--dry-run")
        assert code == 0
        assert yaml.safe_load(out)["users"][0]["user"] == {"token": "***"}
        assert yaml.safe_load(out)["clusters"][0]["cluster"]["server"] == world.url
        assert OWN not in out
        assert ADMIN not in out
    assert not world.to.exists()


def test_what_the_configuration_needs_and_may_not_do_is_one_line_and_a_failure(run: Run, world: World) -> None:
    world.server.rights = {"list pods", "watch pods"}
    code, out, _ = run("init", "credentials", *world.given)
    assert code == 0, "evictions are off"
    assert rows(out)["create pods/eviction"] == "-"
    (world.path / "config.yaml").write_text("eviction: {enabled: true}\nkubelet: {endpoint: off}\n")
    code, out, _ = run("init", "credentials", *world.given)
    assert (code, rows(out)["create pods/eviction"]) == (1, "bad")
    # Each access once, whatever number of uses need it.
    assert sum(line[4:].lstrip().startswith("patch nodes/status") for line in out.splitlines()) == 1
    world.server.token = "another"
    code, out, _ = run("init", "credentials", *world.given)
    assert (code, rows(out)["list pods"]) == (1, "bad")
    assert "Unauthorized" in out


def test_the_kubelets_port_is_tried_with_the_same_token(run: Run, world: World) -> None:
    (world.path / "config.yaml").write_text(
        f"kubelet: {{address: 127.0.0.1, https_port: {world.server.port}, ca_file: {world.path}/ca.crt}}\n"
        "node: {name: 127.0.0.1}\n"
    )
    code, out, _ = run("init", "credentials", *world.given)
    assert (code, rows(out)["kubelet /pods"]) == (0, "ok")
    assert world.server.requests[-1] == "GET /pods"
    assert world.server.tokens[-1] == OWN


def test_an_older_kubeconfig_is_replaced_and_kept_where_nothing_new_is_there(run: Run, world: World) -> None:
    world.to.parent.mkdir()
    world.to.write_text("older")
    os.chmod(world.to, 0o644)
    world.server.issues = ""
    code, _, err = run("init", "credentials", *world.admin)
    assert (code, world.to.read_text()) == (4, "older")
    assert "first: bypassctl init credentials | kubectl apply" in err
    world.server.issues = OWN
    assert run("init", "credentials", *world.admin).code == 0
    assert OWN in world.to.read_text()
    assert stat.S_IMODE(os.stat(world.to).st_mode) == 0o600


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"status":{"token":"a b"}}', b'{"status":{"token":' + b"[" * 9999])
def test_an_answer_without_a_token_is_refused_and_not_quoted(run: Run, world: World, answer: bytes) -> None:
    head = f"HTTP/1.1 201 Created\r\nContent-Length: {len(answer)}\r\n\r\n"
    world.server.raw = head.encode() + answer
    code, out, err = run("init", "credentials", *world.admin)
    assert code == 4
    assert "the answer has no usable token" in err
    assert "a b" not in out + err
    assert not world.to.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--server", "http://h", "--token-file", "/t"), "expected a URL such as https"),
        (("--server", "https://h"), "--server requires --token-file"),
        (("--token-file", "/t"), "require --server or --from"),
        (("--from", "/k", "--server", "https://h"), "only one of them"),
        (("--from", "/k", "--test"), "--test tests the credentials in force"),
        (("--from", "/nonexistent"), "No such file"),
        (("--root", "/tmp"), "not for a copied one"),
        (("--days", "0"), "from 1 to 3650"),
        (("--namespace", "../x"), "expected a namespace"),
    ],
)
def test_a_wrong_command_line_is_one_message(run: Run, arguments: tuple[str, ...], text: str) -> None:
    code, _, err = run("init", "credentials", *arguments)
    assert (code, text in err) == (2, True), err


@pytest.mark.parametrize("wrong", ["insecure-skip-tls-verify: true", "server: 'http://h'"])
def test_no_token_is_sent_to_a_server_that_is_not_verified(run: Run, world: World, wrong: str) -> None:
    file = world.path / "admin.conf"
    cluster = f"{{server: '{world.url}', insecure-skip-tls-verify: true}}" if "insecure" in wrong else f"{{{wrong}}}"
    file.write_text(
        f"clusters: [{{name: c, cluster: {cluster}}}]\nusers: [{{name: u, user: {{token: {ADMIN}}}}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\n"
    )
    code, out, err = run("init", "credentials", *world.admin)
    assert (code, world.server.requests) == (2, [])
    assert ADMIN not in out + err


# The rights


def roles(text: str) -> dict[str, Any]:
    return {item["metadata"]["name"]: item for item in yaml.safe_load_all(text) if item["kind"] == "ClusterRole"}


def test_the_printed_rights_are_those_of_the_configuration(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("mode: observe\n")
    assert set(roles(run("init", "credentials", "--config", str(config)).out)) == {"bypassd-pods"}
    config.write_text("eviction: {enabled: true}\nalerts: {sinks: {e: {kubernetes: {}}}}\n")
    printed = run("init", "credentials", "--config", str(config)).out
    assert set(roles(printed)) == {"bypassd-pods", "bypassd-eviction", "bypassd-events"}
    only = run("init", "credentials", "--use", "kubelet", "--namespace", "agents", "--config", str(config)).out
    assert set(roles(only)) == {"bypassd-kubelet"}
    config.write_text("closing: {enabled: true, mark: auto}\n")
    assert set(roles(run("init", "credentials", "--config", str(config)).out)) == {"bypassd-pods"}
    (more,) = re.findall(r"configuration,\s+without ([^)]*)\)", run("init", "--help").out)
    assert " ".join(more.split()) == "kubelet, renewal, and taint where closing.mark is auto"
    account, _, binding = yaml.safe_load_all(only)
    assert (account["kind"], account["metadata"]["namespace"]) == ("ServiceAccount", "agents")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "bypassd", "namespace": "agents"}]
    assert binding["roleRef"]["name"] == "bypassd-kubelet"


@pytest.mark.parametrize("publish", ["node", "koordinator", "katalyst"])
def test_printed_rights_to_publish_headroom_are_for_this_nodes_objects(run: Run, tmp_path: Path, publish: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"node: {{name: n1}}\nheadroom: {{publish: {publish}}}\n")
    printed = run("init", "credentials", "--config", str(config)).out
    role = roles(printed)[f"bypassd-headroom-{publish}-n1"]
    assert {verb for rule in role["rules"] if "resourceNames" not in rule for verb in rule["verbs"]} <= {"create"}
    assert [rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule].count(["n1"]) >= 2


def test_each_right_to_a_nodes_status_says_what_else_it_can_write() -> None:
    broad = [right.reason for right in RIGHTS if right.resource == "nodes/status"]
    assert len(broad) == 2
    assert all("labels and annotations" in reason for reason in broad)


def test_each_rule_has_its_reason_above_it_and_no_right_is_wider_than_its_request() -> None:
    text = manifest(list(RightsUse), "kube-system")
    rules = [rule for role in roles(text).values() for rule in role["rules"]]
    assert len(rules) == len(RIGHTS)
    verbs: dict[str, set[str]] = {}
    for rule in rules:
        for resource in rule["resources"]:
            verbs.setdefault(resource, set()).update(rule["verbs"])
    assert verbs == {
        "pods": {"list", "watch"},
        "nodes/pods": {"get"},
        "nodes/proxy": {"get"},
        "pods/eviction": {"create"},
        "events": {"create", "patch"},
        "nodes": {"get", "patch"},
        "nodes/status": {"patch"},
        "serviceaccounts/token": {"create"},
        "nodemetrics": {"get"},
        "nodemetrics/status": {"patch"},
        "customnoderesources": {"get", "create"},
        "customnoderesources/status": {"patch"},
        "nodeslos": {"get"},
        "customnodeconfigs": {"get"},
        "adminqosconfigurations": {"get"},
    }
    named = roles(manifest(list(RightsUse), "kube-system", "n1"))
    own_node = (
        "taint",
        "condition",
        "headroom-node",
        "headroom-koordinator",
        "headroom-katalyst",
        "settings-koordinator",
    )
    (of_node, of_name) = named["bypassd-settings-katalyst-n1"]["rules"]
    assert (of_node["resourceNames"], of_name.get("resourceNames")) == (["n1"], None)
    for use in own_node:
        rules = named[f"bypassd-{use}-n1"]["rules"]
        # A name cannot restrict the verb create, and a rule with both would allow nothing to create.
        assert all("resourceNames" not in rule for rule in rules if "create" in rule["verbs"])
        assert all(rule["verbs"] == ["create"] for rule in rules if "create" in rule["verbs"])
        assert all(rule["resourceNames"] == ["n1"] for rule in rules if "create" not in rule["verbs"])
    (renewal,) = roles(text)["bypassd-renewal"]["rules"]
    assert renewal["resourceNames"] == ["bypassd"]
    binding = next(item for item in yaml.safe_load_all(text) if item["kind"] == "RoleBinding")
    assert (binding["metadata"]["namespace"], binding["roleRef"]["name"]) == ("kube-system", "bypassd-renewal")
    lines = text.splitlines()
    assert all(
        lines[number - 1].startswith("# ") for number, line in enumerate(lines) if line.startswith("- apiGroups")
    )
