from collections.abc import Collection, Mapping

import trio
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.pods.assemble import merge_metas
from reconciler.pods.metadata import Metadata
from reconciler.runtime.workqueue import DirtyKeys
from state.model import ContainerMeta, PodMeta, SourceStatus


def meta(uid: str, source: str = "cri") -> PodMeta:
    return PodMeta(uid=uid, source=source, labels={"app": uid}, annotations={})


class FakeCri:
    """A runtime that lists a pod from a given time on, and notes every question."""

    def __init__(self, listed_at: Mapping[str, float], *, takes_s: float = 0.0) -> None:
        self.listed_at = listed_at
        self.takes_s = takes_s
        self.asked: list[tuple[float, str]] = []
        self.failing = False
        self.connected = False
        self.problems: tuple[str, ...] = ()
        self.closed = 0

    async def pod(self, uid: str) -> PodMeta | None:
        self.asked.append((round(trio.current_time(), 3), uid))
        await trio.sleep(self.takes_s)
        if self.failing:
            raise SourceError("cri", "connection refused")
        self.connected = True
        return meta(uid) if trio.current_time() >= self.listed_at.get(uid, float("inf")) else None

    async def pods(self) -> tuple[PodMeta, ...]:
        self.asked.append((round(trio.current_time(), 3), "*"))
        await trio.sleep(self.takes_s)
        if self.failing:
            raise SourceError("cri", "connection refused")
        return tuple(meta(uid) for uid, at in self.listed_at.items() if trio.current_time() >= at)

    async def version(self) -> object:
        self.connected = True
        return "containerd 1.6"

    async def aclose(self) -> None:
        self.connected = False
        self.closed += 1


class FakeKubelet:
    """A kubelet's list, as `KubeletPods` keeps it."""

    def __init__(self, answer: Mapping[str, PodMeta], *, takes_s: float = 0.0) -> None:
        self.known: Mapping[str, PodMeta] = {}
        self.answer = answer
        self.takes_s = takes_s
        self.asks = 0
        self.age_s: float | None = 0.0

    def status(self, now: float) -> SourceStatus:
        return SourceStatus(name="kubelet", ok=True, age_s=self.age_s)

    def fetch(self) -> None:
        self.asks += 1

    async def refresh(self) -> Mapping[str, PodMeta]:
        await trio.sleep(self.takes_s)
        self.known = self.answer
        return self.known

    def keep_only(self, alive: Collection[str]) -> None:
        self.known = {uid: pod for uid, pod in self.known.items() if uid in alive}


async def started(nursery: trio.Nursery, cri: FakeCri, dirty: DirtyKeys | None = None) -> Metadata:
    metadata = Metadata(DirtyKeys() if dirty is None else dirty, cri=cri)
    await nursery.start(metadata.run)
    return metadata


async def test_a_new_pod_is_asked_about_at_once_and_marked_when_it_is_told(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    dirty = DirtyKeys()
    cri = FakeCri({"u": 0.05})
    metadata = await started(nursery, cri, dirty)
    metadata.request(["u"])
    await trio.sleep(1)
    assert dirty.take_nowait().keys == {"pod:u"}
    assert [at for at, _ in cri.asked] == [0.0, 0.003, 0.013, 0.063]
    assert [pod_meta.labels for pod_meta in metadata.get("u")] == [{"app": "u"}]


async def test_a_pod_that_another_source_has_reported_meanwhile_is_not_marked_a_second_time(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    dirty, kubelet = DirtyKeys(), FakeKubelet({})
    cri = FakeCri({"u": 0.05})
    metadata = Metadata(dirty, kubelet=kubelet, cri=cri)
    await nursery.start(metadata.run)
    metadata.request(["u"])
    await trio.sleep(0.02)
    # A kubelet's list marks what it changes itself.
    kubelet.known = {"u": meta("u", "kubelet")}
    await trio.sleep(1)
    assert (dirty.take_nowait().keys, [at for at, _ in cri.asked]) == (frozenset(), [0.0, 0.003, 0.013])


async def test_wanting_does_not_wait_and_what_is_known_is_not_asked_again(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    cri = FakeCri({"u": 0.0}, takes_s=5)
    metadata = await started(nursery, cri)
    metadata.request(["u"])
    metadata.request(["u"])
    assert trio.current_time() == 0
    await trio.sleep(6)
    metadata.request(["u"])
    await trio.sleep(6)
    assert len(cri.asked) == 1


async def test_many_pods_at_once_are_one_question(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    cri = FakeCri({f"u{n}": 0.0 for n in range(15)})
    dirty = DirtyKeys()
    metadata = await started(nursery, cri, dirty)
    metadata.request([f"u{n}" for n in range(15)])
    await trio.sleep(1)
    assert [what for _, what in cri.asked] == ["*"]
    assert len(dirty.take_nowait().keys) == 15


async def test_of_a_runtime_that_does_not_list_many_pods_they_are_not_requested_one_by_one(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """Each would wait for the timeout, and a new pod for all of them."""
    uids = [f"pod-{number}" for number in range(100)]
    cri = FakeCri(dict.fromkeys(uids, 0.0), takes_s=2.0)
    cri.failing = True
    metadata = Metadata(DirtyKeys(), cri=cri)
    await nursery.start(metadata.run)
    metadata.request(uids)
    await trio.sleep(5.0)
    cri.failing = False
    await trio.sleep(5.0)
    assert {name for _, name in cri.asked} == {"*"}
    assert all(metadata.get(uid) for uid in uids)


async def test_the_first_look_waits_for_the_kubelet_and_then_for_the_runtime(
    autojump_clock: MockClock,
) -> None:
    kubelet = FakeKubelet({"a": meta("a", "kubelet")}, takes_s=0.2)
    cri = FakeCri({"b": 0.0}, takes_s=0.1)
    metadata = Metadata(DirtyKeys(), kubelet=kubelet, cri=cri)
    await metadata.prefetch(["a", "b"], 1.0)
    assert round(trio.current_time(), 3) == 0.3
    assert [pod_meta.source for uid in ("a", "b") for pod_meta in metadata.get(uid)] == ["kubelet", "cri"]


async def test_the_first_look_does_not_wait_for_ever(autojump_clock: MockClock) -> None:
    metadata = Metadata(DirtyKeys(), kubelet=FakeKubelet({}, takes_s=60))
    await metadata.prefetch(["a"], 1.0)
    assert trio.current_time() == 1.0


async def test_a_runtime_that_fails_is_told_and_asked_again_more_slowly(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    cri = FakeCri({"u": 0.0})
    cri.failing = True
    metadata = await started(nursery, cri)
    metadata.request(["u"])
    await trio.sleep(20)
    assert len(cri.asked) < 12
    (status,) = metadata.statuses(trio.current_time())
    assert (status.ok, status.detail) == (False, "cri: connection refused")
    cri.failing = False
    await trio.sleep(6)
    assert metadata.get("u") != []


async def test_the_runtime_is_greeted_before_the_first_pod_needs_it(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    cri = FakeCri({"u": 0.0})
    await started(nursery, cri)
    await trio.sleep(1)
    assert cri.connected
    assert cri.asked == []


async def test_pods_that_are_gone_are_forgotten(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    cri = FakeCri({"u": 0.0})
    metadata = await started(nursery, cri)
    metadata.request(["u", "never"])
    await trio.sleep(0.5)
    metadata.keep_only([])
    assert metadata.get("u") == []
    number = len(cri.asked)
    await trio.sleep(30)
    assert len(cri.asked) == number


def test_news_of_a_known_pod_has_the_kubelet_asked_and_nobody_else() -> None:
    kubelet, cri = FakeKubelet({"u": meta("u", "kubelet")}), FakeCri({"u": 0.0})
    Metadata(DirtyKeys(), kubelet=kubelet, cri=cri).refresh()
    assert (kubelet.asks, cri.asked) == (1, [])
    Metadata(DirtyKeys(), cri=cri).refresh()
    assert cri.asked == []


class FakeWatch:
    """A watch of the pods, as `PodWatch` keeps it."""

    def __init__(self, known: Mapping[str, PodMeta]) -> None:
        self.known = known
        self.heard_at: float | None = None
        self.live = True
        self.lists = 0
        self.kept: list[frozenset[str]] = []

    def fresh_at(self, now: float) -> float | None:
        return now if self.live else self.heard_at

    def status(self, now: float) -> SourceStatus:
        return SourceStatus(name="pod watch", ok=self.live)

    def relist(self) -> None:
        self.lists += 1

    def keep_only(self, alive: Collection[str]) -> None:
        self.kept.append(frozenset(alive))


def labelled(uid: str, source: str, app: str) -> PodMeta:
    return PodMeta(
        uid=uid, source=source, labels={"app": app}, annotations={}, containers=(ContainerMeta(name=source),)
    )


def merged(metadata: Metadata, uid: str) -> tuple[object, tuple[str, ...]]:
    """Labels and containers as the pod gets them."""
    meta = merge_metas(uid, metadata.get(uid))
    assert meta is not None
    return meta.labels, tuple(container.name for container in meta.containers)


async def test_labels_of_a_connected_watch_come_before_the_kubelets_and_the_rest_after_them() -> None:
    kubelet = FakeKubelet({})
    kubelet.known = {"u": labelled("u", "kubelet", "old")}
    watch = FakeWatch({"u": labelled("u", "apiserver", "new"), "v": labelled("v", "apiserver", "new")})
    metadata = Metadata(DirtyKeys(), kubelet=kubelet, watch=watch)
    assert merged(metadata, "u") == ({"app": "new"}, ("kubelet",))
    assert merged(metadata, "v") == ({"app": "new"}, ("apiserver",))
    assert [status.name for status in metadata.statuses(0.0)] == ["kubelet", "pod watch"]
    metadata.relist()
    metadata.keep_only({"u"})
    assert (watch.lists, watch.kept) == (1, [frozenset("u")])


async def test_after_a_break_the_kubelets_labels_count_once_they_are_newer(
    autojump_clock: MockClock,
) -> None:
    kubelet = FakeKubelet({})
    kubelet.known = {"u": labelled("u", "kubelet", "kubelet")}
    watch = FakeWatch({"u": labelled("u", "apiserver", "watch")})
    metadata = Metadata(DirtyKeys(), kubelet=kubelet, watch=watch)
    await trio.sleep(100)
    watch.live = False
    for heard_at, age_s, labels in (
        (95.0, 10.0, "watch"),
        (95.0, 1.0, "kubelet"),
        (95.0, None, "watch"),
        (None, 50.0, "kubelet"),
    ):
        watch.heard_at, kubelet.age_s = heard_at, age_s
        assert merged(metadata, "u")[0] == {"app": labels}, (heard_at, age_s)


async def test_the_runtime_s_connection_ends_with_the_part(autojump_clock: MockClock) -> None:
    cri = FakeCri({})
    metadata = Metadata(DirtyKeys(), cri=cri)
    async with trio.open_nursery() as nursery:
        await nursery.start(metadata.run)
        await trio.sleep(1)
        assert (cri.connected, cri.closed) == (True, 0)
        nursery.cancel_scope.cancel()
    assert (cri.connected, cri.closed) == (False, 1)
