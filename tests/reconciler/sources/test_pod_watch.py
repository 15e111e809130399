"""The watch of this node's pods: what it knows, what it requests, and how it ends and begins again."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from reconciler.clients.http import HttpResponse, Take
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.sources import pod_watch
from reconciler.sources.pod_watch import Lines, PodWatch
from state.model import PodMeta
from tests.fakes.api_server import FakeApiServer
from tests.fakes.constants import varied
from tests.fakes.marks import MARKS
from tests.until import until

BE = {"koordinator.sh/qosClass": "BE"}
LS = {"koordinator.sh/qosClass": "LS"}


class Watched:
    """A watch of a server, with what it reported."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.changes: list[frozenset[str]] = []
        self.breaks = 0
        config = varied(ApiServer(server=f"http://127.0.0.1:{server.port}"), timeout_s=5)
        self.watch = PodWatch(
            KubeApi(config),
            "n1",
            beside=KubeApi(config),
            on_change=self.changes.append,
            on_break=self._broke,
            marks=MARKS,
            fraction=lambda: 0.0,
        )

    def _broke(self) -> None:
        self.breaks += 1

    def labels(self, uid: str) -> object:
        return self.watch.known[uid].labels

    @property
    def ok(self) -> bool:
        return self.watch.status(trio.current_time()).ok


@asynccontextmanager
async def watching(*uids: str) -> AsyncIterator[Watched]:
    server = FakeApiServer()
    for uid in uids:
        server.change(uid, labels=LS)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        watched = Watched(server)
        await nursery.start(watched.watch.run)
        await until(lambda: len(server.watches) == 1)
        yield watched
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "_FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(pod_watch, "_SHORT_S", 0.0)


async def test_one_list_from_the_cache_and_a_watch_from_its_version_for_this_node_only() -> None:
    async with watching("a", "b") as watched:
        assert watched.server.lists == [
            "GET /api/v1/pods?fieldSelector=spec.nodeName%3Dn1&resourceVersion=0",
        ]
        (path,) = watched.server.watches
        assert "fieldSelector=spec.nodeName%3Dn1&watch=true&allowWatchBookmarks=true&timeoutSeconds=240" in path
        assert path.endswith("&resourceVersion=102")
        assert watched.changes == [frozenset("ab")]
        assert (watched.ok, set(watched.watch.known)) == (True, {"a", "b"})


async def test_a_changed_label_is_reported_and_a_change_that_only_the_kubelet_made_is_not() -> None:
    async with watching("a") as watched:
        watched.server.change("a", labels=BE)
        await until(lambda: watched.labels("a") == BE)
        assert watched.changes[1:] == [frozenset("a")]
        pod = watched.server.pods["a"]
        pod["status"] = {"podIP": "10.0.0.1"}
        watched.server._emit("MODIFIED", pod)
        await until(lambda: watched.watch.known["a"].ip == "10.0.0.1")
        assert len(watched.changes) == 2


async def test_a_deleted_pod_is_known_until_its_directory_is_gone() -> None:
    async with watching("a", "b") as watched:
        watched.watch.keep_only(())
        assert set(watched.watch.known) == {"a", "b"}, "the API server has both"
        watched.server.delete("a")
        watched.server.change("b", labels=BE)
        await until(lambda: watched.labels("b") == BE)
        watched.watch.keep_only({"a"})
        assert set(watched.watch.known) == {"a", "b"}
        watched.watch.keep_only(())
        assert set(watched.watch.known) == {"b"}


async def test_a_watch_that_ends_is_continued_from_the_last_version_of_an_event_or_bookmark() -> None:
    async with watching("a") as watched:
        watched.server.bookmark()
        await until(lambda: watched.watch._bookmarked)
        watched.server.end_watches()
        await until(lambda: len(watched.server.watches) == 2)
        assert watched.server.watches[1].endswith("&resourceVersion=102")
        assert (len(watched.server.lists), watched.ok, watched.breaks) == (1, True, 0)


@pytest.mark.parametrize("on_a_watch", [True, False])
async def test_an_expired_version_means_a_list_from_the_cache(on_a_watch: bool) -> None:
    async with watching("a") as watched:
        if on_a_watch:
            watched.server.expire()
        else:
            watched.server.oldest = watched.server.version = 500
            watched.server.end_watches()
        watched.server.pods["a"]["metadata"]["labels"] = BE
        await until(lambda: len(watched.server.lists) == 2)
        assert watched.server.lists[1].endswith("resourceVersion=0")
        await until(lambda: watched.labels("a") == BE)


async def test_a_failing_server_is_tried_again_ever_less_often_and_the_pods_stay_known() -> None:
    async with watching("a") as watched:
        watched.server.refusal = 403, "pods is forbidden"
        watched.server.end_watches()
        await until(lambda: not watched.ok)
        assert (watched.breaks, watched.labels("a")) == (1, LS)
        status = watched.watch.status(trio.current_time())
        assert status.detail.endswith("HTTP 403 pods is forbidden")
        heard = watched.watch.fresh_at(trio.current_time())
        await until(lambda: watched.watch._failures >= 4)
        assert watched.watch.fresh_at(trio.current_time()) == heard
        watched.server.refusal = None
        watched.server.change("a", labels=BE)
        await until(lambda: watched.ok and watched.labels("a") == BE)
        assert len(watched.server.lists) == 1, "the version is still there"
        assert watched.breaks == 1


@pytest.mark.parametrize("failures", [1, 3, 40])
async def test_the_delay_doubles_up_to_30_seconds_with_jitter(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "_FIRST_DELAY_S", 1.0)
    delays = []
    for fraction in (0.0, 1.0):
        api = KubeApi(varied(ApiServer(server="http://127.0.0.1:9"), timeout_s=5))
        watch = PodWatch(api, "n1", on_change=lambda _: None, marks=MARKS, fraction=partial(float, fraction))
        watch._failures = failures - 1
        delays.append(await watch._connected())
        await api.aclose()
    whole = {1: 1.0, 3: 4.0, 40: 20.0}[failures]
    assert delays == [(whole * 0.5, 0.0), (whole * 1.5, 0.0)]


@pytest.mark.parametrize("sign", ["it responds", "retry"])
async def test_a_server_that_was_silent_is_connected_as_soon_as_something_shows_that_it_may_respond(
    sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "_PROBE_S", 0.05 if sign == "it responds" else 60.0)
    monkeypatch.setattr(pod_watch, "_ALIVE_S", 0.05)
    monkeypatch.setattr(pod_watch, "_FIRST_DELAY_S", 40.0)
    monkeypatch.setattr(pod_watch, "_LONGEST_DELAY_S", 40.0)
    async with watching("a") as watched:
        watched.server.raw = b""  # connections are closed without a word
        watched.server.end_watches()
        await until(lambda: not watched.ok)
        failed = len(watched.server.watches)
        await trio.sleep(0.3)
        assert len(watched.server.watches) == failed, "the delay is 20 s"
        watched.server.raw = None
        if sign == "retry":
            watched.watch.retry()
        await until(lambda: watched.ok)
        assert len(watched.server.watches) == failed + 1


async def test_a_server_that_responds_but_refuses_is_not_asked_sooner_for_responding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_watch, "_PROBE_S", 0.02)
    monkeypatch.setattr(pod_watch, "_FIRST_DELAY_S", 40.0)
    monkeypatch.setattr(pod_watch, "_LONGEST_DELAY_S", 40.0)
    async with watching("a") as watched:
        watched.server.refusal = 403, "forbidden"
        watched.server.end_watches()
        await until(lambda: not watched.ok)
        asked = len(watched.server.requests)
        await trio.sleep(0.3)
        assert len(watched.server.requests) == asked
        watched.server.refusal = None
        watched.watch.retry()  # such as other credentials
        await until(lambda: watched.ok)


async def test_a_delay_that_the_server_requests_is_kept(autojump_clock: MockClock) -> None:
    api = KubeApi(varied(ApiServer(server="http://127.0.0.1:9"), timeout_s=5))
    watch = PodWatch(api, "n1", on_change=lambda _: None, marks=MARKS)
    watch.retry()
    await watch._pause(30.0, 12.0)
    assert trio.current_time() == 12.0
    await watch._pause(30.0, 0.0)
    assert trio.current_time() == 42.0


@pytest.mark.parametrize("listed", [False, True], ids=["list", "watch"])
async def test_a_list_and_a_watch_that_are_refused_keep_the_requested_delay(
    nursery: trio.Nursery, listed: bool
) -> None:
    server = FakeApiServer()
    await nursery.start(server.serve)
    api = KubeApi(varied(ApiServer(server=f"http://127.0.0.1:{server.port}"), timeout_s=5))
    watch = PodWatch(api, "n1", on_change=lambda _: None, marks=MARKS)
    if listed:
        await watch._list()
    server.raw = b"HTTP/1.1 429 X\r\nRetry-After: 120\r\nContent-Length: 0\r\n\r\n"
    assert await watch._connected() == (120.0, 120.0)
    await api.aclose()


async def test_connected_again_it_is_ok_before_the_first_event() -> None:
    async with watching("a") as watched:
        watched.server.raw = b""
        watched.server.end_watches()
        await until(lambda: not watched.ok)
        watched.server.raw = None
        watched.watch.retry()
        await until(lambda: watched.ok)
        assert watched.watch.status(trio.current_time()).detail == "1 pod of n1, watched"
        assert watched.server.events[-1][0] <= 101, "nothing was sent since"


async def test_a_server_that_is_stopped_with_its_connections_open_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "_SUSPECT_S", 0.1)
    monkeypatch.setattr(pod_watch, "_ALIVE_S", 0.1)
    monkeypatch.setattr(pod_watch, "_PROBE_S", 0.05)
    async with watching("a") as watched:
        await until(lambda: "GET /version" in watched.server.requests)
        await trio.sleep(0.3)
        assert (watched.ok, len(watched.server.watches)) == (True, 1), "silent, and it responds"
        watched.server.frozen = True
        await until(lambda: not watched.ok)
        assert watched.watch.status(trio.current_time()).detail == (
            "pod watch: connected, but the API server does not respond to another request within 100 ms"
        )
        assert watched.breaks == 1
        watched.server.frozen = False
        watched.server.change("a", labels=BE)
        await until(lambda: watched.ok and watched.labels("a") == BE)
        assert len(watched.server.lists) == 1, "its version is the same"


@pytest.mark.parametrize("bookmarked", [True, False])
async def test_a_store_of_an_earlier_time_is_listed_after_a_watch_without_a_word(
    monkeypatch: pytest.MonkeyPatch, bookmarked: bool
) -> None:
    """Also after an outage in the first minute, before any bookmark."""
    async with watching("a") as watched:
        if bookmarked:
            watched.server.bookmark()
            await until(lambda: watched.watch._bookmarked)
        monkeypatch.setattr(pod_watch, "_SILENCE_S", 0.2)
        watched.server.restore(50)
        watched.server.change("a", labels=BE)
        assert watched.server.version == 51
        await until(lambda: watched.labels("a") == BE)
        assert len(watched.server.lists) == 2
        await until(lambda: watched.server.watches[-1].endswith("&resourceVersion=51"))


async def test_a_bookmark_from_before_our_version_means_a_list() -> None:
    async with watching("a") as watched:
        watched.server.version = 10
        # The older store has no event of a later version; the watch that follows the list would have it again.
        watched.server.events = [(0, line) for _, line in watched.server.events]
        watched.server.say(b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"10"}}}')
        watched.server.events[-1] = (1000, watched.server.events[-1][1])
        await until(lambda: len(watched.server.lists) == 2)


async def test_a_version_that_is_no_number_of_usual_length_is_not_compared() -> None:
    async with watching("a") as watched:
        digits = b"9" * 5000
        watched.server.say(b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"%b"}}}' % digits)
        watched.server.change("a", labels=BE)
        await until(lambda: watched.labels("a") == BE)
        assert (len(watched.server.lists), watched.breaks) == (1, 0)


async def test_silence_after_bookmarks_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching("a") as watched:
        watched.server.bookmark()
        await until(lambda: watched.watch._bookmarked)
        monkeypatch.setattr(pod_watch, "_SILENCE_S", 0.05)
        watched.server.end_watches()
        await until(lambda: watched.breaks == 1)
        await until(lambda: len(watched.server.lists) == 2)  # nothing came in all of the second watch


@pytest.mark.parametrize(
    "line",
    [
        b"<html>login</html>",
        b"[]",
        b'{"type":"MODIFIED"}',
        b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"etcd"}}',
        b'{"type":"ADDED","object":' + b"[" * 5000,
    ],
)
async def test_what_is_no_event_ends_the_watch_and_no_pod_is_lost(line: bytes) -> None:
    async with watching("a") as watched:
        watched.server.say(line)
        await until(lambda: watched.breaks >= 1)
        watched.server.change("a", labels=BE)
        await until(lambda: watched.labels("a") == BE)


@pytest.mark.parametrize(
    "object",
    [
        b'{"metadata":{"name":"x"}}',
        b'{"metadata":{"uid":7}}',
        b'{"metadata":{"uid":"z","labels":[1]}}',
        b'{"metadata":{"uid":"a","labels":"x"},"spec":[]}',
        b'{"metadata":{"uid":"z","resourceVersion":"..\\u000a&watch=x"}}',
    ],
)
async def test_an_unusable_pod_is_its_own_problem(object: bytes) -> None:  # noqa: A002
    async with watching("a") as watched:
        watched.server.say(b'{"type":"ADDED","object":%s}' % object)
        watched.server.change("b", labels=BE)
        await until(lambda: "b" in watched.watch.known)
        assert (watched.ok, watched.breaks, watched.labels("a")) == (True, 0, LS)
        assert watched.watch._version == "102"


@pytest.mark.parametrize(
    "annotations",
    [
        {"kubernetes.io/config.mirror": "victim"},
        {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "victim"},
    ],
)
async def test_no_pod_can_pass_for_another(annotations: dict[str, str]) -> None:
    async with watching("victim") as watched:
        watched.server.change("attacker", labels=BE, annotations=annotations)
        watched.server.change("b", labels=BE)
        await until(lambda: "b" in watched.watch.known)
        assert watched.labels("victim") == LS
        assert set(watched.watch.known) == {"victim", "b"}


@pytest.mark.parametrize(
    ("labels", "annotations", "connects"),
    [
        (LS, {"kubernetes.io/config.seen": "x", "kubernetes.io/config.source": "api"}, 1),
        (None, {}, 1),
        (LS, None, 1),
        (BE, {}, 2),
        (LS, {"volcano.sh/preemptable": "true"}, 2),
    ],
)
async def test_a_watch_that_differs_from_the_kubelets_new_list_is_connected_again_from_its_version(
    labels: dict[str, str] | None, annotations: dict[str, str] | None, connects: int
) -> None:
    async with watching("a") as watched:
        # The server has the change, and the watch does not deliver it.
        watched.server.version += 1
        watched.server.pods["a"]["metadata"].update(labels=BE, resourceVersion="102")
        for _ in range(3):
            watched.watch.compare(PodMeta(uid="a", source="kubelet", labels=labels, annotations=annotations))
        watched.watch.compare(PodMeta(uid="z", source="kubelet", labels=BE, annotations={}))
        if connects == 2:
            await until(lambda: len(watched.server.watches) == 2)
            watched.watch.compare(PodMeta(uid="a", source="kubelet", labels=labels, annotations=annotations))
        watched.server.change("a", labels={"x": "y"})
        await until(lambda: watched.labels("a") == {"x": "y"})
        assert len(watched.server.watches) == connects
        assert (len(watched.server.lists), watched.breaks) == (1, 0)


async def test_other_keys_to_read_mean_another_list() -> None:
    async with watching("a") as watched:
        watched.watch.relist()
        await until(lambda: len(watched.server.watches) == 2)
        assert len(watched.server.lists) == 2
        assert watched.breaks == 0


async def test_an_event_that_is_at_hand_already_does_not_replace_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "_STEP", 64)
    async with watching("a") as watched:
        monkeypatch.setattr(watched.watch, "_on_change", lambda _: watched.watch.relist())
        pod = b'{"metadata": {"name": "b", "namespace": "default", "uid": "b", "resourceVersion": "200"}, "spec": {}}'
        bookmark = b'{"metadata": {"resourceVersion": "201"}, "nothing": "of a length that another part has the end"}'
        watched.server.say(
            b'{"type": "ADDED", "object": %b}\n{"type": "BOOKMARK", "object": %b}' % (pod, bookmark),
        )
        await until(lambda: len(watched.server.watches) == 2)
        assert len(watched.server.lists) == 2


async def test_the_number_of_pods_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "MOST_PODS", 3)
    async with watching("a", "b", "c") as watched:
        watched.server.change("d", labels=BE)
        watched.server.change("a", labels=BE)
        await until(lambda: watched.labels("a") == BE)
        assert set(watched.watch.known) == {"a", "b", "c"}
        assert "more than 3 pods" in watched.watch.status(0).detail


def test_a_line_may_come_in_parts_and_a_long_one_is_cut() -> None:
    taken: list[tuple[bytes, int]] = []
    lines = Lines(lambda line, length: taken.append((line, length)), longest=4)
    for part in (b"ab", b"c\n\nxy", b"z", b"0123\nlast", b"\n"):
        lines.feed(part)
    assert taken == [(b"abc", 3), (b"xyz0", 7), (b"last", 4)]


class Flood:
    """`KubeApi`: answers each list, and each watch, with these parts."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts, self.taken = parts, 0

    async def read(self, path: str, take: Take) -> None:
        del path
        for part in self.parts:
            await take(part)
            self.taken += len(part)

    async def follow(
        self, path: str, take: Take, *, silence_s: float, longest_s: float, begun: Callable[[], None]
    ) -> HttpResponse:
        del silence_s, longest_s
        await self.read(path, take)
        return HttpResponse(status=200)

    async def aclose(self) -> None:
        """Nothing is open."""


def flooded(parts: Iterable[bytes]) -> tuple[Flood, PodWatch]:
    api = Flood(parts)
    return api, PodWatch(cast(KubeApi, api), "n1", on_change=lambda _: None, marks=MARKS, fraction=lambda: 0.0)


async def test_a_list_without_an_end_is_paced_and_refused(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(pod_watch, "_LONGEST_LIST", 8 << 20)
    pod = b'{"metadata":{"name":"' + b"x" * (65 << 10) + b'"}},'
    api, watch = flooded([b'{"kind":"PodList","items":[', *([pod] * 1000)])
    began = trio.current_time()
    await watch._connected()
    assert api.taken <= 8 << 20
    # Ten times what the transport costs, parsing apart.
    assert trio.current_time() - began > 1.5
    assert "larger than 8 MiB" in watch.status(began).detail


async def test_a_list_of_usual_size_is_not_delayed(autojump_clock: MockClock) -> None:
    _, watch = flooded([b'{"kind":"PodList","metadata":{"resourceVersion":"7"},"items":[', *([b"  "] * 10), b"]}"])
    began = trio.current_time()
    await watch._list()
    assert trio.current_time() == began


async def test_the_parts_of_a_watch_are_paced_also_where_they_hold_nothing(
    autojump_clock: MockClock,
) -> None:
    _, watch = flooded([b"\n"] * 10_000)
    began = trio.current_time()
    await watch._watch("7")
    assert trio.current_time() - began > 9.0
