"""Long answers: how often their bytes are kept, how many there may be, and who waits for whose builds."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from reconciler.daemon.status import shown_marks
from reconciler.runtime.cooperative import Steps
from reconciler.web import answers as answers_module
from reconciler.web import connection, limits
from reconciler.web.answers import READERS, ROOT, SHARE, Answers, Pace, Rounds
from reconciler.web.limits import Bodies, Busy, HttpCounts
from tests.fakes.web import FakeShown
from tests.reconciler.web.site import raw_unix, serving

GET = b"GET /state%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
BIG = 8 << 20


def slow_readers(path: str, requests: Sequence[bytes], stack: ExitStack) -> None:
    """Connections that ask and do not read."""
    for request in requests:
        item = stack.enter_context(socket.socket(socket.AF_UNIX))
        item.connect(path)
        item.sendall(request)


async def test_many_slow_readers_are_sent_one_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: dict[trio.SocketStream, object] = {}
    all_ask = trio.Event()
    longest = 0
    real = trio.SocketStream.send_all

    async def send_all(self: trio.SocketStream, data: bytes | bytearray | memoryview) -> None:
        nonlocal longest
        view = memoryview(data)
        longest = max(longest, len(view))
        whole = view.obj
        if isinstance(whole, bytes | bytearray) and len(whole) >= BIG:
            bodies[self] = whole
            if len(bodies) == 12:
                all_ask.set()
        await real(self, data)

    monkeypatch.setattr(trio.SocketStream, "send_all", send_all)

    class Late(FakeShown):
        """Has the first parts when all twelve wait."""

        async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
            if not self.pods_asked:
                await trio.testing.wait_all_tasks_blocked(0.02)
            return await super().parts(sections, pod)

    async with serving(tmp_path, shown=Late()) as site:
        site.shown.pods = {"big": "x" * BIG}
        with ExitStack() as stack:
            slow_readers(site.path, [GET % b""] * 12, stack)
            with trio.fail_after(60):
                await all_ask.wait()
            # The first has a build of its own, those that wait for it have the second. On main: twelve of 8 MiB.
            assert len({id(body) for body in bodies.values()}) <= 2
            assert longest <= connection.SLICE
        monkeypatch.setattr(connection, "SEND_S", 0.1)


async def test_a_body_arrives_whole_in_slices(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        site.shown.pods = {"big": "x" * (1 << 20), "end": 1}
        for version in (b"1.1", b"1.0"):
            answer = await raw_unix(site, (GET % b"").replace(b"1.1", version))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}".encode() in head
            assert body.startswith(b'{"pods":{"big":"xxx')
            assert body.endswith(b'"pools":{"a 1":[2]}}\n')


async def test_bodies_in_flight_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_clock: MockClock
) -> None:
    monkeypatch.setattr(Bodies.__init__, "__defaults__", (12 << 20,))
    async with serving(tmp_path) as site:
        site.shown.pods = {"big": "x" * BIG}
        with ExitStack() as stack:
            slow_readers(site.path, [GET % b"?section=pods"], stack)
            await trio.testing.wait_all_tasks_blocked(0.02)
            answer = await raw_unix(site, GET % b"?section=pods,pools")
        assert answer[9:12] == b"503"
        assert b"\r\nretry-after: " in answer.lower()
        # When the slow reader has gone there is room again.
        with trio.fail_after(60):
            while (await raw_unix(site, GET % b""))[9:12] != b"200":  # noqa: ASYNC110  (no event)
                await trio.sleep(0.1)


def test_a_body_counts_once_and_the_first_may_have_any_size() -> None:
    bodies, data, other = Bodies(10), b"x" * 20, b"y" * 5
    with bodies.sending(data), bodies.sending(data):
        assert bodies.bytes == 20
        with pytest.raises(Busy), bodies.sending(other):
            pass
        assert bodies.bytes == 20
    assert bodies.bytes == 0
    with bodies.sending(other), bodies.sending(b"z" * 5):
        assert bodies.bytes == 10


async def test_documents_of_one_round_are_one_object_and_within_the_budget(idle_clock: MockClock) -> None:
    shown = FakeShown()
    answers = Answers(shown, HttpCounts())
    chunks: list[bytes] = []

    async def ask() -> None:
        chunks.append(await answers.state(["pods"], "json"))

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(ask)
    assert len({id(data) for data in chunks}) <= 2
    with answers.bodies.sending(b"x" * limits.BODY_BYTES), pytest.raises(Busy):
        await answers.state(["pods"], "json")


# Rounds


class Timed:
    """Builds whose threads take ``spent_s`` of CPU time, after ``waited_s`` of waiting."""

    def __init__(self, spent_s: float, waited_s: float = 0.0) -> None:
        self.spent_s = spent_s
        self.waited_s = waited_s
        self.at: list[float] = []

    async def __call__(self, keys: frozenset[str]) -> tuple[Iterator[tuple[str, Steps[None]]], float]:
        del keys
        await trio.sleep(self.waited_s)
        self.at.append(trio.current_time())
        return iter(()), self.spent_s


@pytest.mark.parametrize(
    ("pace", "spent_s", "pause_s"),
    [
        (READERS, 0.02, 0.02 * (1 / SHARE - 1)),
        (READERS, 0.46, 5.0),
        (READERS, 3.0, 12.0),
        (ROOT, 0.02, 0.02 * (1 / SHARE - 1)),
        (ROOT, 0.46, 1.0),
        (ROOT, 3.0, 1.0),
    ],
)
async def test_the_pause_after_a_build_has_an_end(
    autojump_clock: trio.testing.MockClock, pace: Pace, spent_s: float, pause_s: float
) -> None:
    build = Timed(spent_s)
    rounds = Rounds(build, pace)
    await rounds.get(frozenset(("a",)))
    await rounds.get(frozenset(("a",)))
    # The loop's own work for no keys is microseconds.
    assert build.at[1] - build.at[0] == pytest.approx(pause_s, abs=0.05)


async def test_waiting_for_a_thread_is_not_spent(autojump_clock: trio.testing.MockClock) -> None:
    build = Timed(0.0, waited_s=3.0)
    rounds = Rounds(build, READERS)
    began = trio.current_time()
    for _ in range(3):
        await rounds.get(frozenset(("a",)))
    assert rounds.spent_s < 0.1
    assert trio.current_time() - began < 9.5


async def test_root_waits_for_no_readers_build(tmp_path: Path, idle_clock: MockClock) -> None:
    """A reader whose build never ends: root is answered."""
    started = trio.Event()

    class Stuck(FakeShown):
        async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
            if "pools" not in sections:
                started.set()
                await trio.sleep_forever()
            return await super().parts(sections, pod)

    async with serving(tmp_path, state_over_tcp=True, shown=Stuck()) as site, trio.open_nursery() as nursery:
        nursery.start_soon(site.tcp.get, "/state?section=pods")
        with trio.fail_after(60):
            await started.wait()
            answer = await site.unix.get("/state?section=pools")
        assert answer.json() == {"pools": {"a 1": [2]}}
        nursery.cancel_scope.cancel()


async def test_events_are_built_one_after_the_other_and_rarely(autojump_clock: trio.testing.MockClock) -> None:
    """A reader that requests the whole history again and again, each time from another moment."""
    at: list[float] = []
    building = most = 0

    class Counted(FakeShown):
        async def events(
            self, after: int | None, run: str, since: float | None
        ) -> tuple[Mapping[str, object], Iterator[Mapping[str, object]], float]:
            nonlocal building, most
            building += 1
            most = max(most, building)
            await trio.lowlevel.checkpoint()
            at.append(trio.current_time())
            return await super().events(after, run, since)

    shown = Counted()
    shown.events_s, shown.event_rows = 0.46, [{"number": 1, "text": "a\x1bb"}]
    answers = Answers(shown, HttpCounts())
    texts: list[bytes] = []

    async def ask(since: float) -> None:
        nonlocal building
        texts.append(await answers.events(None, "", since))
        building -= 1

    async with trio.open_nursery() as nursery:
        for since in (1.0, 2.0, 3.0, 3.0):
            nursery.start_soon(ask, since)
    assert len(at) == 3, "the same request is the same build"
    assert most == 1
    assert min(after - before for before, after in pairwise(at)) == pytest.approx(5.0, abs=0.1)
    assert all(b'"events":[{"number":1,"text":"a\\u001bb"}]' in text for text in texts)
    with answers.bodies.sending(b"x" * (limits.BODY_BYTES + 1)), pytest.raises(Busy):
        await answers.events(None, "", 4.0)
    assert len(at) == 3, "refused before it is built"


async def test_large_documents_of_different_pods_are_not_in_memory_together(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of texts mean all pods of a node: readers with one each would have as many whole documents made."""
    monkeypatch.setattr(answers_module, "LARGEST_BUILD", 1000)
    built: list[list[str]] = []

    class Large(FakeShown):
        async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
            if not built or trio.current_time() > times[-1]:
                built.append([])
                times.append(trio.current_time())
            built[-1].append(pod)
            return iter([(name, "x" * (800 if pod else 10)) for name in sections]), 0.46

    times: list[float] = []
    answers = Answers(Large(), HttpCounts())
    bodies: dict[tuple[str, str], bytes] = {}

    async def ask(pod: str, section: str) -> None:
        bodies[pod, section] = await answers.state([section], "json", pod)

    wanted = [("a", "pods"), ("b", "pods"), ("b", "pools"), ("c", "pods"), ("d", "pods"), ("", "pods")]
    async with trio.open_nursery() as nursery:
        for pod, section in wanted:
            nursery.start_soon(ask, pod, section)
    assert sorted(bodies) == sorted(wanted)
    assert all(body.count(b"x") == (800 if pod else 10) for (pod, _), body in bodies.items())
    # No further one is begun beyond the bound; every one is made once.
    assert sorted(pod for pods in built for pod in pods) == ["", "a", "b", "c", "d"]
    assert max(sum(1600 if pod == "b" else 800 for pod in pods if pod) for pods in built) <= 1000 + 1600
    assert len(built) > 1


# What is shown


def test_labels_and_annotations_are_cut_each_and_in_all() -> None:
    marks = {f"long{number}": "\x01" * 16_000 for number in range(12)} | {"a": "short"}
    shown = shown_marks(marks)
    assert list(shown) == list(marks)
    assert shown["a"] == "short"
    assert sum(map(len, shown.values())) < 9_000
    assert all("(16000 characters)" in text for key, text in shown.items() if key != "a")
    whole = {"x": "y" * 2048, "z": ""}
    assert shown_marks(whole) == whole


async def test_a_path_with_a_slash_is_no_redirect(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        for client in (site.tcp, site.unix):
            answer = await client.get("/healthz/")
            assert (answer.status_code, "location" in answer.headers) == (404, False)
