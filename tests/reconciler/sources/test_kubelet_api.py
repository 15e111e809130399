"""The kubelet's pod list is requested: every way in which it may fail, and with which credentials."""

import itertools
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import trustme
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http import HttpSession
from reconciler.sources.kubelet_api import KubeletPods
from tests.fakes.http_peer import HttpPeer, Reply, server_tls
from tests.fakes.marks import MARKS
from tests.reconciler.sources.podlists import EMPTY, FIXTURES, pod_json, pod_list


def listing(peer: HttpEndpoint, **given: Any) -> KubeletPods:
    return KubeletPods(peer, marks=MARKS, **{"on_change": lambda _: None, "gap_s": 0.0, **given})


async def kubelet(nursery: trio.Nursery, server: HttpPeer, **given: Any) -> HttpEndpoint:
    return await server.endpoint(nursery, name="kubelet", **given)


async def running(nursery: trio.Nursery, server: HttpPeer, *, timeout_s: float = 5.0, **given: Any) -> KubeletPods:
    """The list of this kubelet, requested once."""
    pods = listing(await kubelet(nursery, server, timeout_s=timeout_s), **given)
    await nursery.start(pods.run)
    return pods


async def test_a_kubelet_that_responds_again_is_reported_once(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    good = Reply(pod_list(pod_json("a")))
    server = HttpPeer([good, Reply(status="500 Internal"), good, good])
    recovered: list[int] = []
    pods = await running(nursery, server, on_recovery=lambda: recovered.append(len(server.requests)))
    for _ in range(3):
        with suppress(SourceError):
            await pods.refresh()
    assert recovered == [3]


async def ask(nursery: trio.Nursery, reply: Reply, timeout_s: float = 5.0) -> tuple[KubeletPods, SourceError | None]:
    pods = await running(nursery, HttpPeer([reply]), timeout_s=timeout_s)
    try:
        await pods.refresh()
    except SourceError as exc:
        return pods, exc
    return pods, None


async def test_a_good_answer_is_known_with_its_age(nursery: trio.Nursery, idle_clock: MockClock) -> None:
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
        (Reply(status="401 Unauthorized"), "/pods: 401: unauthorized with no credentials"),
        (Reply(status="403 Forbidden"), "/pods: 403: forbidden with no credentials"),
        (Reply(b"etcd is\n gone", status="500 Internal Server Error"), "/pods: HTTP 500 etcd is gone"),
        (Reply(status="302 Found"), "/pods: HTTP 302"),
        (Reply(EMPTY[:20], cut=43), "/pods: "),
        (Reply(b"<html>login</html>"), "/pods: the answer is not a pod list"),
        (Reply(raw=b"SSH-2.0-OpenSSH\r\n\r\n"), "/pods: "),
        (Reply(raw=b""), "/pods: "),
        (Reply(EMPTY, hang_s=60), "/pods: no answer within 200 ms"),
    ],
)
async def test_each_failure_is_one_clear_error(
    nursery: trio.Nursery, reply: Reply, message: str, idle_clock: MockClock
) -> None:
    pods, error = await ask(nursery, reply, timeout_s=0.2)
    assert error is not None
    assert str(error).startswith("kubelet: http://127.0.0.1:")
    assert message in str(error)
    assert "\n" not in str(error)
    status = pods.status(trio.current_time())
    assert (status.ok, status.age_s, status.detail) == (False, None, str(error))


async def test_nobody_listening_is_one_clear_error(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    pods = listing(HttpEndpoint(name="kubelet", url="http://127.0.0.1:9"))
    await nursery.start(pods.run)
    assert pods.status(0).detail.startswith("kubelet: http://127.0.0.1:9: /pods: ")
    assert "refused" in pods.status(0).detail.lower()


async def test_no_failure_and_no_empty_list_shrinks_what_is_known(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = HttpPeer(
        [
            Reply(pod_list(pod_json("a"), pod_json("b"))),
            Reply(EMPTY),
            Reply(status="500 Oops"),
            Reply(pod_list(pod_json("a", labels={"x": "y"}))),
        ]
    )
    changes: list[frozenset[str]] = []
    pods = await running(nursery, server, on_change=changes.append)
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


BE = {"koordinator.sh/qosClass": "BE"}


@pytest.mark.parametrize(
    "second",
    [
        Reply(pod_list({"metadata": {"uid": "a", "labels": 5}})),
        Reply(pod_list({"metadata": {"uid": "a", "labels": {"koordinator.sh/qosClass": None}}})),
        Reply(b'{"items":[{"metadata":{"uid":"a","name":' + b"[" * 5000 + b"]" * 5000 + b"}}]}"),
        Reply(b'{"items":[{"metadata":{"uid":"a","labels":{"x":"' + b"y" * (5 << 20) + b'"}}}]}'),
    ],
    ids=["labels", "label", "nesting", "size"],
)
async def test_what_cannot_be_read_of_a_pod_this_time_stays_as_it_was_and_is_said(
    nursery: trio.Nursery, second: Reply, idle_clock: MockClock
) -> None:
    whole = {**pod_json("a", labels=BE), "spec": {"containers": [{"name": "main"}]}}
    first = Reply(pod_list(whole, pod_json("b")))
    pods = await running(nursery, HttpPeer([first, second]))
    known = await pods.refresh()
    assert known["a"].labels == BE
    assert known["a"].containers
    assert len(known["a"].problems) == 1
    assert len(known["a"].problems[0]) < 500
    assert set(known) == {"a", "b"}
    assert pods.status(trio.current_time()).ok


async def test_the_pods_before_a_break_are_known(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    body = pod_list(pod_json("a", labels=BE), pod_json("b"))
    pods = await running(nursery, HttpPeer([Reply(body[:-20])]))
    with pytest.raises(SourceError, match="not a pod list"):
        await pods.refresh()
    assert pods.known["a"].labels == BE
    assert not pods.status(trio.current_time()).ok


async def test_a_list_of_any_length_is_known_and_the_loop_goes_on(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    around = {f"x{number}": "y" * 200 for number in range(5000)}
    item = json.dumps(pod_json("UID", annotations=around, labels=BE))
    items = ",".join(item.replace("UID", f"u{number}") for number in range(70))
    body = f'{{"kind":"PodList","items":[{items}]}}'.encode()
    assert len(body) > 64 << 20
    pods = await running(nursery, HttpPeer([Reply(body)]), timeout_s=120)
    assert {meta.labels["koordinator.sh/qosClass"] for meta in pods.known.values() if meta.labels} == {"BE"}
    assert len(pods.known) == 70


class Steps(trio.abc.Instrument):
    """The longest step of the tasks of one name: CPU time between two points where others may run. Seconds."""

    def __init__(self, name: str) -> None:
        self.longest = 0.0
        self._name = name
        self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._name in task.name:
            self.longest = max(self.longest, time.thread_time() - self._began)


async def test_no_pod_of_a_list_holds_the_loop(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    full = {f"{number}": "" for number in range(100_000)}
    deep = b'{"metadata":{"uid":"d"},"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    items = [
        pod_json("a", annotations=full, labels={**full, **BE}),
        {**pod_json("b", labels=BE), "spec": {"containers": [{"name": "a"}] * 100_000}},
        {**pod_json("c", labels=BE), "spec": {"volumes": ["\0" * 1_000_000]}},
    ]
    body = pod_list(*items)[:-2] + b"," + deep + b"]}"
    pods = await running(nursery, HttpPeer([Reply(body)]), timeout_s=60)
    for _ in range(10):
        steps = Steps("KubeletPods.run")
        trio.lowlevel.add_instrument(steps)
        await pods.refresh()
        trio.lowlevel.remove_instrument(steps)
        if steps.longest < 0.1:
            break
    # Less than 10 ms where nothing else runs.
    assert 0 < steps.longest < 0.1
    assert {uid: meta.labels for uid, meta in pods.known.items()} == {"a": BE, "b": BE, "c": BE, "d": {}}


async def test_questions_that_come_together_are_one_question(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = HttpPeer([Reply(EMPTY), Reply(EMPTY, hang_s=0.1), Reply(pod_list(pod_json("a")))])
    pods = await running(nursery, server, gap_s=0.05)
    async with trio.open_nursery() as askers:
        for _ in range(20):
            askers.start_soon(pods.refresh)
    assert len(server.requests) == 2
    pods.fetch()
    pods.fetch()
    known = await pods.refresh()
    assert len(server.requests) == 3
    assert set(known) == {"a"}


async def answered(pods: KubeletPods, server: HttpPeer, count: int) -> None:
    """Until the answer to so many requests is read, however long that takes: virtual time does not go on meanwhile."""
    while len(server.requests) < count or pods.status(trio.current_time()).age_s != 0:
        await trio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked()


async def test_it_is_asked_again_after_the_period(nursery: trio.Nursery, mock_clock: MockClock) -> None:
    server = HttpPeer([Reply(EMPTY)])
    pods = await running(nursery, server, timeout_s=1000, period_s=30, gap_s=0.2)
    for count in (1, 2, 3):
        await answered(pods, server, count)
        mock_clock.jump(29)
        await trio.testing.wait_all_tasks_blocked()
        assert len(server.requests) == count
        mock_clock.jump(1)
    await answered(pods, server, 4)


async def test_pods_around_those_that_cost_the_most_are_known_in_the_same_round(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    terms = ",".join(["{}"] * 1_000_000)
    hostile = '{"metadata":{"name":"h","namespace":"s","uid":"h%d"},"spec":{"affinity":{"a":[%s]}}}'
    first, last = (json.dumps(pod_json(uid)) for uid in ("before", "after"))
    items = ",".join([first, *(hostile % (number, terms) for number in range(8)), last])
    # What took 3 s a round before, and no round is longer than the time for an answer.
    pods, error = await ask(nursery, Reply(f'{{"kind":"PodList","items":[{items}]}}'.encode()), timeout_s=60)
    assert error is None
    assert {"before", "after"} <= pods.known.keys()
    assert len(pods.known) == 10


async def test_the_more_a_list_costs_the_later_comes_the_next(
    nursery: trio.Nursery, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = HttpPeer([Reply(EMPTY)])
    pods = listing(await kubelet(nursery, server, timeout_s=1000), gap_s=0.2)
    clock = itertools.count(0.0, 0.7)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    await nursery.start(pods.run)
    await answered(pods, server, 1)
    pods.fetch()
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(6.5)
    await trio.testing.wait_all_tasks_blocked()
    assert len(server.requests) == 1
    mock_clock.jump(1)
    await answered(pods, server, 2)


async def test_who_waits_when_it_stops_is_told(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    pods = listing(await kubelet(nursery, HttpPeer([Reply(EMPTY), Reply(EMPTY, hang_s=60)])))
    texts: list[str] = []

    async def wait() -> None:
        with pytest.raises(SourceError) as caught:
            await pods.refresh()
        texts.append(str(caught.value))

    async with trio.open_nursery() as runner:
        await runner.start(pods.run)
        nursery.start_soon(wait)
        await trio.sleep(0.05)
        nursery.start_soon(wait)
        await trio.sleep(0.05)
        runner.cancel_scope.cancel()
    await trio.sleep(0.05)
    assert texts == ["kubelet: is no longer used", "kubelet: is no longer used"]


# TLS and credentials


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
async def test_a_refused_token_is_named_by_its_file_never_by_its_value(
    nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA, status: str, idle_clock: MockClock
) -> None:
    (tmp_path / "token").write_text("very-secret")
    server = HttpPeer([Reply(status=status)])
    async with HttpSession(
        await kubelet(nursery, server, authority=authority, token_file=f"{tmp_path}/token")
    ) as session:
        with pytest.raises(SourceError, match=f"{status[:3]}.*token of {tmp_path}/token") as caught:
            await session.get("/pods")
    assert "very-secret" not in str(caught.value)


async def test_a_client_certificate_is_shown(
    nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA, idle_clock: MockClock
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    mine = authority.issue_cert("agent@node1")
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "client.crt"))
    mine.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    port = await nursery.start(HttpPeer([Reply(EMPTY)]).serve, server_tls(authority, ask_client=True))
    peer = HttpEndpoint(
        name="kubelet",
        url=f"https://127.0.0.1:{port}",
        ca_file=str(tmp_path / "ca.crt"),
        cert_file=str(tmp_path / "client.crt"),
        key_file=str(tmp_path / "client.key"),
    )
    async with HttpSession(peer) as session:
        assert await session.get("/pods") == EMPTY


async def test_a_certificate_of_another_name_is_refused(
    nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA, idle_clock: MockClock
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    port = await nursery.start(HttpPeer([Reply(EMPTY)]).serve, server_tls(authority, "node2"))
    peer = HttpEndpoint(
        name="k", url=f"https://127.0.0.1:{port}", ca_file=str(tmp_path / "ca.crt"), server_name="node1"
    )
    async with HttpSession(peer) as session:
        with pytest.raises(SourceError, match="Hostname mismatch"):
            await session.get("/pods")


async def test_a_renewed_authority_opens_a_new_connection(
    nursery: trio.Nursery, tmp_path: Path, idle_clock: MockClock
) -> None:
    old, new = trustme.CA(), trustme.CA()
    old.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    server = HttpPeer([Reply(EMPTY)])
    port = await nursery.start(server.serve, server_tls(new))
    async with HttpSession(
        HttpEndpoint(name="k", url=f"https://127.0.0.1:{port}", ca_file=str(tmp_path / "ca.crt"))
    ) as session:
        with pytest.raises(SourceError, match="not trusted"):
            await session.get("/pods")
        new.cert_pem.write_to_path(str(tmp_path / "ca.new"))
        os.rename(tmp_path / "ca.new", tmp_path / "ca.crt")
        assert await session.get("/pods") == EMPTY


async def test_certificate_files_that_cannot_be_used_are_named(tmp_path: Path, idle_clock: MockClock) -> None:
    async with HttpSession(
        HttpEndpoint(name="k", url="https://127.0.0.1:1", ca_file=f"{tmp_path}/none.crt")
    ) as session:
        with pytest.raises(SourceError, match=r"cannot use .*/none\.crt: No such file"):
            await session.get("/pods")


def test_messages_name_the_credentials_by_file() -> None:
    assert HttpEndpoint(name="k", url="u", token_file="/t").credentials == "the token of /t"
    assert HttpEndpoint(name="k", url="u", cert_file="/c").credentials == "the certificate /c"


async def test_credentials_that_change_are_used_from_the_next_request_on(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    """A token inside of a kubeconfig that an administrator replaces, for example before it expires."""
    server = HttpPeer([Reply((FIXTURES / "kubelet-pods.json").read_bytes())])
    first = await kubelet(nursery, server, authority=trustme.CA(), token="first")
    second = replace(first, inline=replace(first.inline, token="second"))
    now: list[HttpEndpoint | None] = [first]
    pods = listing(first, find=lambda: now[0])
    await nursery.start(pods.run)
    # Unreadable for a moment: the one before counts.
    for now[0] in (None, second, second):
        await pods.refresh()
    sent = [request["authorization"] for request in server.requests]
    assert sent == ["Bearer first", "Bearer first", "Bearer second", "Bearer second"]
    assert server.connections == 2
