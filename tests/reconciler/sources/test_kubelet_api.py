import json
import os
import ssl
from pathlib import Path

import pytest
import trio
import trustme
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from cgroupfs.naming import QosClass
from reconciler.httpclient import HttpSession, Peer
from reconciler.sources.kubelet_api import KubeletAccess, KubeletPods, choose_peer, decode_pods
from reconciler.sources.kubelet_config import KubeletConfig
from state.model import ContainerKind, PodMeta, Resources
from tests.fakes.http_peer import HttpPeer, Reply

FIXTURES = Path(__file__).parents[2] / "fixtures/meta"
EMPTY = b'{"kind":"PodList","apiVersion":"v1","metadata":{},"items":null}'


def pod_json(uid: str, **metadata: object) -> dict[str, object]:
    return {
        "metadata": {"uid": uid, "name": f"pod-{uid}", "namespace": "default", **metadata},
        "spec": {"containers": []},
    }


def pod_list(*pods: object) -> bytes:
    return json.dumps({"kind": "PodList", "items": pods}).encode()


def by_name(pods: tuple[PodMeta, ...]) -> dict[str, PodMeta]:
    return {pod.name or "": pod for pod in pods}


def test_a_recorded_list_is_read_with_everything_we_use() -> None:
    pods, problems = decode_pods((FIXTURES / "kubelet-pods.json").read_bytes())
    assert problems == ()
    assert len(pods) == 6
    pod = by_name(pods)["burstable-node1"]
    assert (pod.uid, pod.source, pod.namespace) == ("33333333-3333-4333-8333-333333333333", "kubelet", "default")
    assert pod.qos is QosClass.BURSTABLE
    assert pod.labels == {"app": "web", "qos.example.io/class": "BE"}
    assert pod.annotations is not None
    assert pod.annotations["example.io/priority"] == "low"
    assert pod.static
    main, side = pod.containers
    assert (main.name, main.kind) == ("main", ContainerKind.APP)
    assert main.id == "3a0df93a9a6d150560c1e2aa4fe9258cd11ca5e74d77b6c77326681d9ad523fc"
    assert main.requests == Resources(cpu_milli=0, memory_bytes=32 << 20)
    assert main.limits == Resources(cpu_milli=500, memory_bytes=64 << 20)
    assert side.limits == Resources()


def test_init_containers_and_finished_pods_are_read() -> None:
    pods, problems = decode_pods((FIXTURES / "kubelet-pods-with-finished-job.json").read_bytes())
    assert problems == ()
    kinds = {(pod.name, one.name): one.kind for pod in pods for one in pod.containers}
    assert ContainerKind.INIT in {kind for (name, _), kind in kinds.items() if name == "with-init-node1"}
    assert any((name or "").startswith("job") for name, _ in kinds)


def test_a_uid_made_by_the_kubelet_has_no_dashes() -> None:
    pods, _ = decode_pods((FIXTURES / "kubelet-pods.json").read_bytes())
    assert by_name(pods)["besteffort-node1"].uid == "d2085bd852f8a7a1c753ef7b3991f0a9"


@pytest.mark.parametrize(
    ("metadata", "spec", "deleting", "grace_s"),
    [
        ({}, {"terminationGracePeriodSeconds": 45}, False, 45.0),
        ({}, {}, False, None),
        (
            {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 5},
            {"terminationGracePeriodSeconds": 45},
            True,
            5.0,
        ),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"terminationGracePeriodSeconds": 45}, True, 45.0),
        ({}, {"terminationGracePeriodSeconds": -1}, False, None),
    ],
)
def test_a_pod_that_is_being_deleted_and_its_grace(
    metadata: dict[str, object], spec: dict[str, object], deleting: bool, grace_s: float | None
) -> None:
    pod = pod_json("a", **metadata)
    pod["spec"] = {"containers": [], **spec}
    (meta,), problems = decode_pods(pod_list(pod))
    assert (meta.deleting, meta.grace_s, problems) == (deleting, grace_s, ())


@pytest.mark.parametrize(
    ("status", "ip"),
    [
        ({"podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}]}, "10.0.0.7"),
        ({"podIPs": [{"ip": "fd00:0::7"}]}, "fd00::7"),
        ({"podIP": "", "podIPs": None}, None),
        ({"podIP": "evil.example/x"}, None),
        ({}, None),
    ],
)
def test_a_pods_address_is_told_once_it_has_one(status: object, ip: str | None) -> None:
    pods, problems = decode_pods(pod_list({**pod_json("a"), "status": status}))
    assert ([pod.ip for pod in pods], problems) == ([ip], ())


@pytest.mark.parametrize(
    ("annotations", "uid", "static"),
    [
        ({"kubernetes.io/config.mirror": "static-1", "kubernetes.io/config.hash": "static-1"}, "static-1", True),
        ({"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "static-2"}, "static-2", True),
        ({"kubernetes.io/config.source": "http"}, "api-1", True),
        ({"kubernetes.io/config.source": "api", "kubernetes.io/config.hash": "x"}, "api-1", False),
        ({}, "api-1", False),
    ],
)
def test_a_mirror_pod_is_known_by_the_uid_of_its_cgroup(annotations: dict[str, str], uid: str, static: bool) -> None:
    pods, _ = decode_pods(pod_list(pod_json("api-1", annotations=annotations)))
    assert (pods[0].uid, pods[0].static) == (uid, static)


def test_owner_priority_sidecars_and_ephemeral_containers() -> None:
    pod = pod_json(
        "1",
        ownerReferences=[
            {"kind": "Node", "name": "n"},
            {"kind": "ReplicaSet", "name": "web-5d", "controller": True},
        ],
    )
    pod["spec"] = {
        "priorityClassName": "high",
        "priority": 100,
        "initContainers": [{"name": "once"}, {"name": "proxy", "restartPolicy": "Always"}],
        "containers": [{"name": "main", "resources": {"limits": {"kubernetes.io/batch-cpu": 500, "cpu": "x"}}}],
        "ephemeralContainers": [{"name": "debug"}],
    }
    pod["status"] = {
        "qosClass": "None",
        "containerStatuses": [{"name": "main"}, {"name": "main", "containerID": "cri-o://ab"}],
    }
    (meta,), problems = decode_pods(pod_list(pod))
    assert problems == ()
    assert (meta.owner, meta.priority_class, meta.priority, meta.qos) == ("ReplicaSet/web-5d", "high", 100, None)
    assert [(one.name, one.kind.value, one.id) for one in meta.containers] == [
        ("once", "init", None),
        ("proxy", "app", None),
        ("main", "app", "ab"),
        ("debug", "app", None),
    ]
    assert meta.containers[2].limits == Resources(batch_cpu_milli=500)
    assert meta.problems == ("container main: limits: cpu: 'x': expected a quantity such as 100m, 4Gi, 1e3 or 0.5",)


def test_long_and_unused_annotations_are_not_kept() -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "a": "1", "b": "x" * 20_000}
    (meta,), _ = decode_pods(pod_list(pod_json("1", annotations=annotations)))
    assert meta.annotations == {"a": "1"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"metadata": {"name": "x", "namespace": "y"}}, "kubelet: pod 2 of its list: pod y/x has no uid"),
        ({"metadata": {"uid": "1", "labels": {"a": 1}}}, "kubelet: pod 2 of its list: Expected `str`, got `int`"),
        (7, "kubelet: pod 2 of its list: Expected `object`, got `int`"),
        (
            {"metadata": {"uid": "1"}, "spec": {"containers": [{}]}},
            "kubelet: pod 2 of its list: Object missing required",
        ),
    ],
)
def test_a_broken_pod_is_one_message_and_the_others_hold(bad: object, message: str) -> None:
    pods, problems = decode_pods(pod_list(pod_json("a"), bad, pod_json("b")))
    assert [pod.uid for pod in pods] == ["a", "b"]
    assert len(problems) == 1
    assert problems[0].startswith(message)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"<html>",
        b"null",
        b"{}",
        b'{"kind":"Status","code":500}',
        b'{"items": 5}',
        EMPTY[:30],
        b"\xff",
    ],
)
def test_what_is_no_pod_list_is_refused_whole(body: bytes) -> None:
    with pytest.raises(ValueError, match="the answer is not a pod list"):
        decode_pods(body)


def test_an_empty_list_is_an_answer() -> None:
    assert decode_pods(EMPTY) == ((), ())


# Against a server


async def ask(nursery: trio.Nursery, reply: Reply, timeout_s: float = 5.0) -> tuple[KubeletPods, SourceError | None]:
    port = await nursery.start(HttpPeer([reply]).serve)
    pods = KubeletPods(Peer(name="kubelet", url=f"http://127.0.0.1:{port}", timeout_s=timeout_s), gap_s=0)
    await nursery.start(pods.run)
    try:
        await pods.refresh()
    except SourceError as exc:
        return pods, exc
    return pods, None


async def test_a_good_answer_is_known_with_its_age(nursery: trio.Nursery) -> None:
    pods, error = await ask(nursery, Reply((FIXTURES / "kubelet-pods.json").read_bytes()))
    assert error is None
    assert len(pods.known) == 6
    status = pods.status(trio.current_time())
    assert status.ok
    assert status.age_s is not None
    assert status.age_s < 5
    assert status.detail.startswith("6 pods from http://127.0.0.1:")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(status="401 Unauthorized"), "/pods: 401: it does not accept no credentials"),
        (Reply(status="403 Forbidden"), "/pods: 403: it knows no credentials but does not let it read this"),
        (Reply(b"etcd is\n gone", status="500 Internal Server Error"), "/pods: it answered 500 etcd is gone"),
        (Reply(status="302 Found"), "/pods: it answered 302"),
        (Reply(EMPTY[:20], cut=43), "/pods: "),
        (Reply(b"<html>login</html>"), "/pods: the answer is not a pod list"),
        (Reply(raw=b"SSH-2.0-OpenSSH\r\n\r\n"), "/pods: "),
        (Reply(raw=b""), "/pods: "),
        (Reply(EMPTY, hang_s=60), "/pods: no answer within 0.2 s"),
    ],
)
async def test_each_failure_is_one_clear_error(nursery: trio.Nursery, reply: Reply, message: str) -> None:
    pods, error = await ask(nursery, reply, timeout_s=0.2)
    assert error is not None
    assert str(error).startswith("kubelet: http://127.0.0.1:")
    assert message in str(error)
    assert "\n" not in str(error)
    status = pods.status(trio.current_time())
    assert (status.ok, status.age_s, status.detail) == (False, None, str(error))
    nursery.cancel_scope.cancel()


async def test_nobody_listening_is_one_clear_error(nursery: trio.Nursery) -> None:
    pods = KubeletPods(Peer(name="kubelet", url="http://127.0.0.1:9"))
    await nursery.start(pods.run)
    assert pods.status(0).detail.startswith("kubelet: http://127.0.0.1:9: /pods: ")
    assert "refused" in pods.status(0).detail.lower()
    nursery.cancel_scope.cancel()


async def test_no_failure_and_no_empty_list_shrinks_what_is_known(nursery: trio.Nursery) -> None:
    server = HttpPeer(
        [
            Reply(pod_list(pod_json("a"), pod_json("b"))),
            Reply(EMPTY),
            Reply(status="500 Oops"),
            Reply(pod_list(pod_json("a", labels={"x": "y"}))),
        ]
    )
    port = await nursery.start(server.serve)
    changes: list[frozenset[str]] = []
    pods = KubeletPods(Peer(name="kubelet", url=f"http://127.0.0.1:{port}"), on_change=changes.append, gap_s=0)
    await nursery.start(pods.run)
    assert set(pods.known) == {"a", "b"}
    await pods.refresh()
    assert set(pods.known) == {"a", "b"}
    assert "empty list" in pods.status(trio.current_time()).detail
    with pytest.raises(SourceError, match="500"):
        await pods.refresh()
    assert set(pods.known) == {"a", "b"}
    pods.keep_only(())
    assert set(pods.known) == {"a", "b"}, "the last full list had both"
    known = await pods.refresh()
    assert known["a"].labels == {"x": "y"}
    assert set(known) == {"a", "b"}
    pods.keep_only({"b"})
    assert set(pods.known) == {"a", "b"}
    pods.keep_only(())
    assert set(pods.known) == {"a"}
    assert changes == [frozenset("ab"), frozenset("a")]
    assert server.connections == 1
    nursery.cancel_scope.cancel()


async def test_questions_that_come_together_are_one_question(nursery: trio.Nursery) -> None:
    server = HttpPeer([Reply(EMPTY), Reply(EMPTY, hang_s=0.1), Reply(pod_list(pod_json("a")))])
    port = await nursery.start(server.serve)
    pods = KubeletPods(Peer(name="kubelet", url=f"http://127.0.0.1:{port}"), gap_s=0.05)
    await nursery.start(pods.run)
    async with trio.open_nursery() as askers:
        for _ in range(20):
            askers.start_soon(pods.refresh)
    assert len(server.requests) == 2
    pods.ask()
    pods.ask()
    known = await pods.refresh()
    assert len(server.requests) == 3
    assert set(known) == {"a"}
    nursery.cancel_scope.cancel()


async def test_it_is_asked_again_after_the_period(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    autojump_clock.autojump_threshold = 0.05
    server = HttpPeer([Reply(EMPTY)])
    port = await nursery.start(server.serve)
    pods = KubeletPods(Peer(name="kubelet", url=f"http://127.0.0.1:{port}", timeout_s=1000), period_s=30)
    await nursery.start(pods.run)
    await trio.sleep(95)
    assert len(server.requests) == 4
    nursery.cancel_scope.cancel()


async def test_who_waits_when_it_stops_is_told(nursery: trio.Nursery) -> None:
    port = await nursery.start(HttpPeer([Reply(EMPTY), Reply(EMPTY, hang_s=60)]).serve)
    pods = KubeletPods(Peer(name="kubelet", url=f"http://127.0.0.1:{port}"), gap_s=0)
    told: list[str] = []

    async def wait() -> None:
        with pytest.raises(SourceError) as caught:
            await pods.refresh()
        told.append(str(caught.value))

    async with trio.open_nursery() as runner:
        await runner.start(pods.run)
        nursery.start_soon(wait)
        await trio.sleep(0.05)
        nursery.start_soon(wait)
        await trio.sleep(0.05)
        runner.cancel_scope.cancel()
    await trio.sleep(0.05)
    assert told == ["kubelet: is no longer asked", "kubelet: is no longer asked"]
    nursery.cancel_scope.cancel()


# TLS and credentials


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_tls(authority: trustme.CA, name: str, *, ask_client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    if ask_client:
        context.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(context)
    return context


async def test_a_token_is_sent_and_read_again_when_its_file_changes(
    nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    token = tmp_path / "token"
    token.write_text("first\n")
    server = HttpPeer([Reply(EMPTY)])
    port = await nursery.start(server.serve, server_tls(authority, "node1"))
    peer = Peer(
        name="kubelet",
        url=f"https://127.0.0.1:{port}",
        ca_file=str(tmp_path / "ca.crt"),
        token_file=str(token),
        server_name="node1",
    )
    async with HttpSession(peer) as session:
        await session.get("/pods")
        (tmp_path / "new").write_text("second")
        os.rename(tmp_path / "new", token)
        await session.get("/pods")
        token.unlink()
        with pytest.raises(SourceError, match="cannot read the token of"):
            await session.get("/pods")
    assert [request.get("authorization") for request in server.requests] == ["Bearer first", "Bearer second"]
    assert server.connections == 1
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
async def test_a_refused_token_is_named_by_its_file_never_by_its_value(
    nursery: trio.Nursery, tmp_path: Path, status: str
) -> None:
    (tmp_path / "token").write_text("very-secret")
    port = await nursery.start(HttpPeer([Reply(status=status)]).serve)
    async with HttpSession(
        Peer(name="kubelet", url=f"http://127.0.0.1:{port}", token_file=str(tmp_path / "token"))
    ) as session:
        with pytest.raises(SourceError, match=f"{status[:3]}.*token of {tmp_path}/token") as caught:
            await session.get("/pods")
    assert "very-secret" not in str(caught.value)
    nursery.cancel_scope.cancel()


async def test_a_client_certificate_is_shown(nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    mine = authority.issue_cert("agent@node1")
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "client.crt"))
    mine.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    port = await nursery.start(HttpPeer([Reply(EMPTY)]).serve, server_tls(authority, "127.0.0.1", ask_client=True))
    peer = Peer(
        name="kubelet",
        url=f"https://127.0.0.1:{port}",
        ca_file=str(tmp_path / "ca.crt"),
        cert_file=str(tmp_path / "client.crt"),
        key_file=str(tmp_path / "client.key"),
    )
    async with HttpSession(peer) as session:
        assert await session.get("/pods") == EMPTY
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("insecure", "good"), [(False, False), (True, True)])
async def test_an_unknown_certificate_is_refused_unless_the_operator_says_otherwise(
    nursery: trio.Nursery, authority: trustme.CA, insecure: bool, good: bool
) -> None:
    port = await nursery.start(HttpPeer([Reply(EMPTY)]).serve, server_tls(authority, "127.0.0.1"))
    async with HttpSession(Peer(name="kubelet", url=f"https://127.0.0.1:{port}", insecure=insecure)) as session:
        if good:
            assert await session.get("/pods") == EMPTY
        else:
            with pytest.raises(SourceError, match="its certificate is not trusted"):
                await session.get("/pods")
    nursery.cancel_scope.cancel()


async def test_a_certificate_of_another_name_is_refused(
    nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    port = await nursery.start(HttpPeer([Reply(EMPTY)]).serve, server_tls(authority, "node2"))
    peer = Peer(name="k", url=f"https://127.0.0.1:{port}", ca_file=str(tmp_path / "ca.crt"), server_name="node1")
    async with HttpSession(peer) as session:
        with pytest.raises(SourceError, match="Hostname mismatch"):
            await session.get("/pods")
    nursery.cancel_scope.cancel()


async def test_a_renewed_authority_opens_a_new_connection(nursery: trio.Nursery, tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    old.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    server = HttpPeer([Reply(EMPTY)])
    port = await nursery.start(server.serve, server_tls(new, "127.0.0.1"))
    async with HttpSession(
        Peer(name="k", url=f"https://127.0.0.1:{port}", ca_file=str(tmp_path / "ca.crt"))
    ) as session:
        with pytest.raises(SourceError, match="not trusted"):
            await session.get("/pods")
        new.cert_pem.write_to_path(str(tmp_path / "ca.new"))
        os.rename(tmp_path / "ca.new", tmp_path / "ca.crt")
        assert await session.get("/pods") == EMPTY
    nursery.cancel_scope.cancel()


async def test_certificate_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    async with HttpSession(Peer(name="k", url="https://127.0.0.1:1", ca_file=f"{tmp_path}/none.crt")) as session:
        with pytest.raises(SourceError, match=r"cannot use .*/none\.crt: No such file"):
            await session.get("/pods")


# Whom to ask


@pytest.mark.parametrize(
    ("access", "kubelet", "url", "ca", "name"),
    [
        (KubeletAccess(), KubeletConfig(read_only_port=10255), "http://127.0.0.1:10255", None, None),
        (
            KubeletAccess(token_file="/t"),
            KubeletConfig(read_only_port=10255, node_name="n1"),
            "https://127.0.0.1:10250",
            "/var/lib/kubelet/pki/kubelet.crt",
            "n1",
        ),
        (
            KubeletAccess(cert_file="/c", ca_file="/ca", server_name="x"),
            KubeletConfig(port=1, address="::", node_name="n1"),
            "https://[::1]:1",
            "/ca",
            "x",
        ),
        (
            KubeletAccess(),
            KubeletConfig(address="10.0.0.7", tls_cert_file="/tls.crt", node_name="n1"),
            "https://10.0.0.7:10250",
            "/tls.crt",
            "n1",
        ),
        (KubeletAccess(url="https://h:1"), KubeletConfig(node_name="n1"), "https://h:1", None, None),
        (KubeletAccess(url="http://h:1", server_name="x"), KubeletConfig(), "http://h:1", None, None),
        (KubeletAccess(insecure=True), KubeletConfig(node_name="n1"), "https://127.0.0.1:10250", None, "n1"),
    ],
)
def test_whom_to_ask_follows_from_the_kubelets_own_configuration(
    access: KubeletAccess, kubelet: KubeletConfig, url: str, ca: str | None, name: str | None
) -> None:
    peer = choose_peer(access, kubelet)
    assert (peer.url, peer.ca_file, peer.server_name) == (url, ca, name)


def test_messages_name_the_credentials_by_file() -> None:
    assert Peer(name="k", url="u", token_file="/t").credentials == "the token of /t"
    assert Peer(name="k", url="u", cert_file="/c").credentials == "the certificate /c"
