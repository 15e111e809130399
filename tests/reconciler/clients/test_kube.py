"""The API server's client: which server it finds, what it shows, and its result for every kind of answer."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from trio.testing import MockClock

from cgroupfs.errors import InputError, SourceError
from reconciler.clients import api_identity, kubeconfig
from reconciler.clients.api_identity import OWN_KUBECONFIG, SERVICE_ACCOUNT, find_peer, own_identity, watches_pods
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import ApiStatus, ApiStatusDetails, KubeApi, status_of, wait_s_of
from reconciler.clients.kube_config import ApiIdentity, ApiServer
from reconciler.clients.kubeconfig import read_kubeconfig
from reconciler.settings.schema import FeatureSwitch
from tests.fakes.http_peer import HttpPeer, Reply, server_tls

KUBELETS = """\
apiVersion: v1
kind: Config
clusters:
- name: default-cluster
  cluster:
    certificate-authority-data: {ca}
    server: {server}
contexts:
- name: default-context
  context: {{cluster: default-cluster, namespace: default, user: default-auth}}
current-context: default-context
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
"""


def simple_kubeconfig(server: str, user: str = "token: own") -> str:
    return (
        f"clusters: [{{name: c, cluster: {{server: {server}}}}}]\n"
        f"users: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n"
    )


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def write(root: Path, path: str, text: str) -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_the_kubelets_own_kubeconfig_names_server_ca_and_rotating_certificate(tmp_path: Path) -> None:
    write(tmp_path, "/etc/kubernetes/kubelet.conf", KUBELETS.format(ca=encoded("CA"), server="https://10.0.0.1:6443"))
    peer = find_peer(ApiServer(), root=str(tmp_path))
    assert (peer.url, peer.inline.ca, peer.insecure) == ("https://10.0.0.1:6443", "CA", False)
    assert peer.cert_file == peer.key_file == f"{tmp_path}/var/lib/kubelet/pki/kubelet-client-current.pem"
    assert "CA" not in repr(peer).replace("Inline(ca)", "")


def test_what_the_kubelets_command_line_names_comes_before_the_usual_places(tmp_path: Path) -> None:
    write(tmp_path, "/etc/kubernetes/kubelet.conf", "nonsense")
    write(tmp_path, "/srv/k", KUBELETS.format(ca=encoded("CA"), server="https://b:1"))
    assert find_peer(ApiServer(), root=str(tmp_path), kubelets="/srv/k").url == "https://b:1"


def test_inside_a_pod_without_a_kubeconfig_the_service_account_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    peer = find_peer(ApiServer(), root=str(tmp_path))
    assert (peer.url, peer.token_file, peer.ca_file) == (
        "https://[fd00::1]:6443",
        f"{SERVICE_ACCOUNT}/token",
        f"{SERVICE_ACCOUNT}/ca.crt",
    )


def test_a_server_of_the_operators_own_hand_needs_no_kubeconfig() -> None:
    config = ApiServer(server="https://api:6443/", token_file="/t", ca_file="/ca")
    peer = find_peer(config)
    assert (peer.url, peer.token_file, peer.ca_file) == ("https://api:6443", "/t", "/ca")


@pytest.mark.parametrize(
    ("config", "words"),
    [(ApiServer(enabled=False), "apiserver.enabled is false"), (ApiServer(), "neither a kubeconfig nor")],
)
def test_no_way_to_the_api_server_is_said_before_it_is_asked(tmp_path: Path, config: ApiServer, words: str) -> None:
    assert words in (KubeApi(config, root=str(tmp_path)).unreachable() or "")


USER = "- name: default-auth\n  user:\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            (
                "    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem",
                "    exec: {command: aws, args: [eks]}",
            ),
            "/k:15:5: user.exec: 'aws': expected a client certificate, token or tokenFile",
        ),
        (
            ("    client-key: /var/lib", "    auth-provider: {name: gcp}\n    client-key: /var/lib"),
            "/k:16:5: user.auth-provider: 'gcp'",
        ),
        (("    client-key: /var/lib", "    username: admin\n    client-key: /var/lib"), "user.username: 'admin'"),
        (("client-key: /var", "other: /var"), "/k:14:3: 'a certificate without its key"),
        (("current-context: default-context", "current-context: other"), "/k:8:1: contexts: 'default-context'"),
        (("user: default-auth}", "user: nobody}"), "users: 'default-auth': expected one named 'nobody'"),
        (("server: https://h", "server: tcp://h"), "/k:7:5: clusters[0].cluster.server: 'tcp://h': expected a URL"),
        (("server: https://h", "server: https://h\n    proxy-url: http://p"), "expected no proxy"),
        (("certificate-authority-data: ", "certificate-authority-data: =="), "expected base64 of PEM text"),
        (("users:", "others:"), "expected the key users in it"),
    ],
)
def test_what_a_kubeconfig_asks_in_vain_is_one_message_with_its_place(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    text = KUBELETS.format(ca=encoded("CA"), server="https://h")
    assert change[0] in text
    write(tmp_path, "/k", text.replace(*change))
    with pytest.raises(InputError) as caught:
        read_kubeconfig("/k", name="x", root=str(tmp_path))
    assert message in str(caught.value)
    assert "Q0E" not in str(caught.value)


def test_relative_paths_and_tokens_of_a_kubeconfig(tmp_path: Path) -> None:
    text = KUBELETS.format(ca=encoded("CA"), server="https://h").split("users:")[0]
    write(tmp_path, "/etc/k", text + f"users:\n{USER}    tokenFile: pki/token\n")
    peer = read_kubeconfig("/etc/k", name="x", root=str(tmp_path))
    assert peer.token_file == f"{tmp_path}/etc/pki/token"
    write(tmp_path, "/etc/k", text + f"users:\n{USER}    token: s3cret\n")
    peer = read_kubeconfig("/etc/k", name="x", root=str(tmp_path))
    assert peer.inline.token == "s3cret"
    assert "s3cret" not in repr(peer)


async def test_over_tls_with_certificates_that_stand_in_the_kubeconfig_itself(
    tmp_path: Path, nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    ca = trustme.CA()
    server = HttpPeer([Reply(b'{"kind":"Pod"}', status="201 Created")])
    port = await nursery.start(server.serve, server_tls(ca, ask_client=True))
    client = ca.issue_cert("node.local", common_name="system:node:n1")
    text = KUBELETS.format(ca=encoded(ca.cert_pem.bytes().decode()), server=f"https://127.0.0.1:{port}")
    user = (
        f"    client-certificate-data: {encoded(client.cert_chain_pems[0].bytes().decode())}\n"
        f"    client-key-data: {encoded(client.private_key_pem.bytes().decode())}\n"
    )
    write(tmp_path, "/k", text.split("users:")[0] + f"users:\n{USER}{user}")
    api = KubeApi(ApiServer(kubeconfig="/k"), root=str(tmp_path))
    assert api.unreachable() is None
    answer = await api.request("POST", "/api/v1/x", {"a": 1})
    await api.aclose()
    assert (answer.status, answer.ok) == (201, True)
    assert (server.bodies, server.requests[0]["content-type"]) == ([b'{"a":1}'], "application/json")


async def test_a_changed_kubeconfig_is_followed_and_a_broken_one_is_an_error_until_it_is_mended(
    tmp_path: Path, nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    servers = [HttpPeer([Reply(b"{}")]), HttpPeer([Reply(b"{}")])]
    texts = [simple_kubeconfig((await server.endpoint(nursery)).url, "") for server in servers]
    write(tmp_path, "/k", texts[0])
    api = KubeApi(ApiServer(kubeconfig="/k"), root=str(tmp_path))
    await api.request("GET", "/a")
    write(tmp_path, "/k", "{")
    with pytest.raises(SourceError, match=r"API server: kubeconfig /k:"):
        await api.request("GET", "/b")
    assert "kubeconfig /k" in (api.unreachable() or "")
    write(tmp_path, "/k", texts[1])
    await api.request("GET", "/c")
    await api.aclose()
    assert [[request[""] for request in server.requests] for server in servers] == [
        ["GET /a HTTP/1.1"],
        ["GET /c HTTP/1.1"],
    ]


async def test_one_that_hangs_is_an_error_after_the_deadline_and_is_asked_again(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply(hang_s=60), Reply(b"{}")])
    port = await nursery.start(server.serve)
    api = KubeApi(ApiServer(server=f"http://127.0.0.1:{port}"))
    with pytest.raises(SourceError, match=r"no answer within 500 ms"):
        await api.request("GET", "/a", timeout_s=0.5)
    assert (await api.request("GET", "/b")).status == 200
    await api.aclose()


def test_a_refusals_own_account_is_read_and_anything_else_is_none() -> None:
    body = {
        "kind": "Status",
        "reason": "TooManyRequests",
        "details": {"retryAfterSeconds": 9, "causes": [{"reason": "DisruptionBudget", "message": "m"}]},
    }
    status = status_of(HttpResponse(status=429, body=json.dumps(body).encode()))
    assert status.details is not None
    assert (status.reason, status.details.retry_after_s) == ("TooManyRequests", 9)
    assert status.has_cause("DisruptionBudget")
    assert not status.has_cause("other")
    for text in (b"<html>", b"", b'{"kind":"Pod"}', b"[]", b"\xff"):
        assert status_of(HttpResponse(status=500, body=text)) == ApiStatus()


def test_a_settings_mistake_is_one_message() -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"server": "api:6443"}, "expected a URL"),
        ({"token_file": "/t"}, "require server"),
        ({"server": "https://a", "client_cert_file": "/c"}, "must both be set"),
        ({"server": "https://a", "kubeconfig": "/k"}, "only one of them"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(ValueError, match=message):
            ApiServer(**wrong)


@pytest.mark.parametrize(
    ("header", "told", "wait_s"),
    [
        (None, 0, None),
        (None, 9, 9.0),
        (None, 1 << 40, 3600.0),
        (None, -1, None),
        ("0", 9, 0.0),
        ("7", 9, 7.0),
        ("soon", 9, 9.0),
        ("Thu, 01 Jan 1970 00:17:10 GMT", 9, 30.0),
    ],
)
def test_how_long_it_wants_not_to_be_asked_is_in_the_header_else_in_its_own_account(
    header: str | None, told: int, wait_s: float | None
) -> None:
    answer = HttpResponse(status=429, headers={} if header is None else {"retry-after": header})
    assert wait_s_of(answer, ApiStatus(details=ApiStatusDetails(retry_after_s=told)), 1000.0) == wait_s


@pytest.mark.parametrize(
    ("identity", "files", "url"),
    [
        ("auto", {OWN_KUBECONFIG, "/etc/kubernetes/kubelet.conf"}, OWN_KUBECONFIG),
        ("auto", {"/etc/kubernetes/kubelet.conf"}, "/etc/kubernetes/kubelet.conf"),
        ("own", {OWN_KUBECONFIG, "/etc/kubernetes/kubelet.conf"}, OWN_KUBECONFIG),
        ("own", {"/etc/kubernetes/kubelet.conf"}, None),
        ("kubelet", {OWN_KUBECONFIG, "/etc/kubernetes/kubelet.conf"}, "/etc/kubernetes/kubelet.conf"),
        ("kubelet", {OWN_KUBECONFIG}, None),
    ],
)
def test_whose_credentials_are_used_is_one_setting(
    tmp_path: Path, identity: str, files: set[str], url: str | None
) -> None:
    for file in files:
        write(tmp_path, file, simple_kubeconfig(f"https://h{file}"))
    config = ApiServer(identity=ApiIdentity(identity))
    if url is None:
        with pytest.raises(SourceError, match="neither a kubeconfig"):
            find_peer(config, root=str(tmp_path))
    else:
        assert find_peer(config, root=str(tmp_path)).url == f"https://h{url}"
    own = own_identity(config, root=str(tmp_path))
    assert (own is not None) == (identity != "kubelet" and OWN_KUBECONFIG in files)


@pytest.mark.parametrize(
    ("config", "files", "watched"),
    [
        ({}, set(), False),
        ({}, {"/etc/kubernetes/kubelet.conf"}, False),
        ({"identity": ApiIdentity.KUBELET}, {"/etc/kubernetes/kubelet.conf"}, True),
        ({"watch_pods": FeatureSwitch.ON}, {"/etc/kubernetes/kubelet.conf"}, True),
        ({}, {OWN_KUBECONFIG}, True),
        ({"watch_pods": FeatureSwitch.OFF}, {OWN_KUBECONFIG}, False),
        ({"enabled": False}, {OWN_KUBECONFIG}, False),
        ({"kubeconfig": "/k"}, set(), True),
        ({"server": "https://a"}, set(), True),
    ],
)
def test_pods_are_watched_with_credentials_that_were_given_for_it(
    tmp_path: Path, config: dict[str, Any], files: set[str], watched: bool
) -> None:
    for file in files:
        write(tmp_path, file, simple_kubeconfig("https://h"))
    assert watches_pods(ApiServer(**config), root=str(tmp_path)) is watched


@pytest.mark.parametrize(
    ("config", "files", "kubelets", "environ", "expected"),
    [
        # A node whose kubelet has no cluster, and one whose operator switched the API server off: no budget exists.
        ({}, set(), "none", {}, False),
        ({"enabled": False}, {OWN_KUBECONFIG}, "/k", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        # A cluster whose credentials are there, or are missing.
        ({}, {OWN_KUBECONFIG}, None, {}, True),
        ({}, {"/etc/kubernetes/kubelet.conf"}, None, {}, True),
        ({}, set(), "/lost/kubelet.conf", {}, True),
        ({}, {"/etc/kubernetes/kubelet.conf"}, "none", {}, True),
        ({}, set(), "none", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),  # a pod without a token
        ({}, set(), None, {}, True),  # the kubelet was not found, or is KubeEdge's
        ({"identity": ApiIdentity.OWN}, set(), None, {}, True),
        ({"identity": ApiIdentity.KUBELET}, set(), None, {}, True),
        ({"kubeconfig": "/lost"}, set(), None, {}, True),
        ({"server": "https://a"}, set(), None, {}, True),
    ],
)
def test_an_api_server_that_cannot_be_asked_is_not_taken_for_none(
    tmp_path: Path,
    config: dict[str, Any],
    files: set[str],
    kubelets: str | None,
    environ: dict[str, str],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for file in files:
        write(tmp_path, file, simple_kubeconfig("https://h"))
    standalone, given = kubelets == "none", None if kubelets == "none" else kubelets
    api = KubeApi(ApiServer(**config), root=str(tmp_path), kubelets=given, standalone=standalone)
    assert api.expected is expected


async def test_a_service_account_token_that_rotates_is_read_again(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, idle_clock: MockClock
) -> None:
    ca = trustme.CA()
    server = HttpPeer([Reply(b"{}")])
    port = await nursery.start(server.serve, server_tls(ca))
    # As the kubelet projects it: a link to a directory that is replaced.
    for name in ("1", "2"):
        write(tmp_path, f"{name}/token", f"token-{name}\n")
        write(tmp_path, f"{name}/ca.crt", ca.cert_pem.bytes().decode())
    (tmp_path / "..data").symlink_to("1")
    for name in ("token", "ca.crt"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    monkeypatch.setattr(api_identity, "SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    api = KubeApi(ApiServer(), root="/")
    await api.request("GET", "/a")
    (tmp_path / "new").symlink_to("2")
    os.replace(tmp_path / "new", tmp_path / "..data")
    await api.request("GET", "/b")
    await api.aclose()
    assert [request["authorization"] for request in server.requests] == ["Bearer token-1", "Bearer token-2"]


@pytest.mark.parametrize("kind", ["a user's", "a link", "a pipe"])
async def test_a_kubeconfig_that_the_kubelet_names_is_root_s_and_what_the_operator_names_is_his(
    tmp_path: Path, kind: str, idle_clock: MockClock
) -> None:
    path = tmp_path / "kubelet.conf"
    if kind == "a link":
        path.symlink_to("/etc/shadow")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text(KUBELETS.format(ca=encoded("CA"), server="https://10.0.0.1:6443"))
        os.chmod(path, 0o666)
    with pytest.raises(SourceError) as caught:
        find_peer(ApiServer(), kubelets=str(path))
    assert "root:" not in str(caught.value)
    assert KubeApi(ApiServer(), kubelets=str(path)).unreachable()
    if kind == "a user's":
        peer = find_peer(ApiServer(kubeconfig=str(path)))
        assert (peer.url, peer.root_only) == ("https://10.0.0.1:6443", ())


def test_the_files_that_such_a_kubeconfig_names_are_root_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    text = KUBELETS.format(ca=encoded("CA"), server="https://10.0.0.1:6443")
    monkeypatch.setattr(kubeconfig, "read_file", lambda *_, **__: text.encode())
    peer = find_peer(ApiServer(), kubelets="/etc/hostname")
    assert set(peer.root_only) == {"/var/lib/kubelet/pki/kubelet-client-current.pem"}


def test_credentials_that_would_not_be_sent_are_no_way_to_the_api_server(tmp_path: Path) -> None:
    for server, more in (("http://10.0.0.1", ""), ("https://10.0.0.1", ", insecure-skip-tls-verify: true")):
        (tmp_path / "k").write_text(simple_kubeconfig(f"'{server}'{more}", "token: hush"))
        problem = KubeApi(ApiServer(kubeconfig=str(tmp_path / "k"))).unreachable() or ""
        assert "is not sent" in problem
        assert "hush" not in problem


@pytest.mark.parametrize(
    "change",
    [
        ("    client-certificate: ", '    token: "s3cr3t\\ns3cr3t"\n    client-certificate: '),
        ("    client-certificate: ", "    token: s3cr3t x\n    client-certificate: "),
        ("    client-certificate: ", "    token: [s3cr3t]\n    client-certificate: "),
        ("    client-certificate: ", "    token: *s3cr3t\n    client-certificate: "),
        ("    client-certificate: ", "    token: s3cr3t: x\n    client-certificate: "),
        ("    client-certificate: ", "    client-key-data: s3cr3t-\n    client-certificate: "),
        ("    client-certificate: ", "    exec: s3cr3t\n    client-certificate: "),
        ("server: https://h", "server: ftp://u:s3cr3t@h"),
        ("users:\n", "users: s3cr3t\nothers:\n"),
    ],
)
def test_nothing_that_may_be_a_secret_is_quoted_from_a_kubeconfig(tmp_path: Path, change: tuple[str, str]) -> None:
    text = KUBELETS.format(ca=encoded("CA"), server="https://h")
    assert change[0] in text
    write(tmp_path, "/k", text.replace(*change))
    with pytest.raises(InputError) as caught:
        read_kubeconfig("/k", name="x", root=str(tmp_path))
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cr3t" not in str(error)
        assert "s3cr3t" not in repr(vars(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
