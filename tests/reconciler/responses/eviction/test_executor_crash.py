"""SIGKILL of the daemon between any two steps of an eviction, with real processes in a real, frozen pod.

Each life is a forked process with the real evictor on a real store. Life n of a series is killed at its n-th point:
before and after every commit, every request, every signal and every thaw. Then another one takes up what is left.
Whatever the point, exactly one pod has ended, each end was reported once, and nothing is left frozen.
"""

import json
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from cgroupfs.subtree import Subtree
from reconciler.alerts.alert import Alert
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.responses.eviction.executor import Evictor
from reconciler.responses.eviction.journal import cases_of
from reconciler.responses.means.api import ApiEviction
from reconciler.responses.means.config import ApiMeans, EvictionMeans, NoticeConfig, NoticeKind, RestartRules
from reconciler.responses.means.cri import CriEviction
from reconciler.responses.means.processes import PodTermination
from reconciler.responses.means.signal import SignalEviction
from reconciler.runtime.notefile import NoteFile
from state.eviction import EvictionCase, EvictionMethodName, EvictionOutcome, EvictionStep
from state.evidence import PodSnapshot
from state.model import PodClass, PodMeta
from state.schema import EVICTIONS
from state.store import Store, StoreBatch
from tests.fakes.constants import varied
from tests.fakes.victims import IGNORES_TERM, Victim, a_victim, an_order

pytestmark = pytest.mark.kernel
FULL = "BYPASSD_FULL" in os.environ


def config_for(answers: str) -> EvictionMeans:
    """Short waits where they have no effect."""
    return varied(
        varied(
            EvictionMeans(
                api=varied(ApiMeans(), refused_s=0.03, failing_s=0.01, first_wait_s=0.01, longest_wait_s=0.05),
                notice=NoticeConfig(kind=NoticeKind.VOLUME, wait_s=0.02),
            ),
            margin_s=0.02 if answers == "fails" else 10.0,
            restarts=RestartRules(watch_s=0.02),
        ),
        kill_s=10.0,
    )


class World:
    """What outlives the daemon: two pods, the store, and a line for each act on a pod from outside the cgroups."""

    def __init__(self, victim: Victim, other: Victim, directory: Path) -> None:
        self.victim, self.other, self.directory = victim, other, directory
        self.store = str(directory / "state.db")
        volumes = directory / "pods" / an_order(victim).uid / "volumes/kubernetes.io~empty-dir"
        self.notice = volumes / "eviction-notice/notice.json"
        self.notice.parent.mkdir(parents=True)

    def end_from_outside(self) -> None:
        """What a kubelet or a runtime does: it needs the pod to run."""
        for pid in self.victim.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Stubs:
    """The API server and the runtime of one life, as far as they go in it."""

    def __init__(self, world: World, answers: str) -> None:
        self.world = world
        self.answers = answers

    def unreachable(self) -> None:
        return None

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> HttpResponse:
        await trio.lowlevel.checkpoint()
        if method == "GET":
            listed = [{"name": "pods/eviction", "kind": "Eviction", "group": "policy", "version": "v1"}]
            return HttpResponse(status=200, body=json.dumps({"resources": listed}).encode())
        assert body["deleteOptions"]["preconditions"] == {"uid": an_order(self.world.victim).uid}
        if self.answers == "refuses":
            return HttpResponse(status=429, body=b'{"kind":"Status","message":"budget"}')
        if self.answers == "denies":
            return HttpResponse(status=401, body=b'{"kind":"Status","message":"Unauthorized"}')
        if self.answers != "accepts":
            return HttpResponse(status=500, body=b"{}")
        self.world.end_from_outside()
        return HttpResponse(status=201, body=b"{}")

    async def pod(self, uid: str) -> PodMeta:
        await trio.lowlevel.checkpoint()
        return PodMeta(uid=uid, source="cri", sandbox_ids=("sandbox",))

    async def stop_sandbox(self, _: str, **__: Any) -> bool:
        await trio.lowlevel.checkpoint()
        if self.answers == "stops":
            self.world.end_from_outside()
        return True


def armed(point: Callable[[], None]) -> None:
    """Have ``point`` called before and after everything that changes the world. In a forked process only."""

    def wrap(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def around(*arguments: Any, **named: Any) -> Any:
            point()
            done = real(*arguments, **named)
            point()
            return done

        async def around_async(*arguments: Any, **named: Any) -> Any:
            point()
            done = await real(*arguments, **named)
            point()
            return done

        setattr(owner, name, around_async if name in {"request", "stop_sandbox", "signal"} else around)

    for owner, name in (
        (Store, "apply"),
        (Stubs, "request"),
        (Stubs, "stop_sandbox"),
        (PodTermination, "signal"),
        (Subtree, "kill"),
        (Subtree, "thawing"),
        (NoteFile, "write"),
    ):
        wrap(owner, name)


async def one_life(world: World, stubs: Stubs) -> None:
    """The daemon: takes up what is left, or evicts the pod as the plan would want it again. Ends when all has ended."""
    victim = world.victim
    store = Store(world.store, boot="boot-1")
    facts = PodSnapshot(
        uid=an_order(victim).uid, title="v", pod_class=PodClass.RECLAIMED, group=victim.group, grace_s=1.0
    )

    async def stage(batch: StoreBatch, alert: Alert) -> Callable[[], None]:
        batch.append(msgspec.msgpack.encode({"kind": alert.kind, "key": alert.key}))
        return lambda: None

    config = config_for(stubs.answers)
    evictor = Evictor(
        config,
        hierarchy=victim.hierarchy,
        store=store,
        lane=trio.CapacityLimiter(1),
        stage=stage,
        api=KubeApi(ApiServer(enabled=False)),
        cri=lambda: None,
        kubelet_dir=str(world.directory),
        pods={facts.uid: facts}.get,
        closing=lambda: False,
        forbidden=lambda _: None,
        ways=[
            ApiEviction(config, standing_in(stubs)),
            CriEviction(config, lambda: standing_in(stubs)),
            SignalEviction(config),
        ],
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(evictor.run)
            if not evictor.cases():
                # Where the API server fails, only a shortage that would kill online pods continues without it.
                critical = stubs.answers in {"fails", "stops"}
                evictor.submit(an_order(victim, grace_s=0.1, critical=critical))
            while True:
                if evictor.cases() and not any(case.open for case in evictor.cases()):
                    break
                await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
    store.close()


def standing_in(stubs: Stubs) -> Any:
    """The clients are final classes, so nothing typed can replace them."""
    return stubs


def live(world: World, answers: str, die_at: int) -> bool:
    """One life in a process of its own; True when it ended by itself."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            left = die_at

            def point() -> None:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

            armed(point)
            trio.run(one_life, world, Stubs(world, answers))
            code = 0
        except BaseException:  # noqa: BLE001  # nothing may get out of a forked child
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def final(world: World) -> tuple[EvictionCase, Counter[str]]:
    store = Store(world.store, boot="boot-1")
    (case,) = cases_of(store.rows(EVICTIONS))
    counts = Counter[str]()
    for _, body in store.history():
        entry = msgspec.msgpack.decode(body)
        if "key" in entry:
            counts[entry["kind"]] += 1
    store.close()
    return case, counts


@pytest.fixture
def other() -> Iterator[Victim]:
    with a_victim("other") as victim:
        victim.sleep()
        yield victim


def series(
    tmp_path: Path, other: Victim, answers: str, check: Callable[[World, EvictionCase, Counter[str]], None]
) -> int:
    """Kill the first life at its first, second, ... point, until it is not reached; how many there were.

    All of them with BYPASSD_FULL, and then lives that are killed again; else a third, another one in each series.
    """
    for point in range(0 if FULL else len(answers) % 3, 1000, 1 if FULL else 3):
        with a_victim(f"crash-{point}") as victim:
            victim.python(IGNORES_TERM)
            victim.sleep()
            victim.freeze()
            directory = tmp_path / str(point)
            directory.mkdir()
            world = World(victim, other, directory)
            whole = live(world, answers, point)
            later = 0
            while not whole and not live(world, answers, later if FULL and later < 6 else 10_000):
                later += 1
            case, counts = final(world)
            check(world, case, counts)
            assert {victim.frozen(), victim.frozen("/c")} == {"THAWED"}, point
            assert len(other.pids()) == 1, point
            assert case.step is EvictionStep.ENDED
            unguarded = int(answers in {"fails", "stops"})
            assert sum(counts.values()) == 2 + unguarded, (point, counts)
            assert (counts["eviction-planned"], counts["eviction-unguarded"]) == (1, unguarded)
        if whole:
            return point
    raise AssertionError("it never came to its own end")


@pytest.mark.parametrize(
    ("answers", "means"),
    [("accepts", EvictionMethodName.API), ("stops", EvictionMethodName.CRI), ("fails", EvictionMethodName.SIGNAL)],
)
def test_killed_at_any_point_one_pod_ends_one_end_is_told_and_nothing_stays_frozen(
    tmp_path: Path, other: Victim, answers: str, means: EvictionMethodName
) -> None:
    def check(world: World, case: EvictionCase, counts: Counter[str]) -> None:
        assert world.victim.empty()
        assert (case.outcome, case.means) == (EvictionOutcome.DONE, means)
        assert counts["eviction-done"] == 1

    begun = time.monotonic()
    points = series(tmp_path, other, answers, check)
    assert points >= 12
    print(f"{answers}: {points} points in {time.monotonic() - begun:.1f} s")


@pytest.mark.parametrize("answers", ["refuses", "denies"])
def test_killed_at_any_point_a_refused_pod_lives_runs_and_its_notice_is_withdrawn(
    tmp_path: Path, other: Victim, answers: str
) -> None:
    def check(world: World, case: EvictionCase, counts: Counter[str]) -> None:
        assert len(world.victim.pids()) == 2
        assert (case.outcome, counts["eviction-refused"]) == (EvictionOutcome.REFUSED, 1)
        assert not world.notice.exists()

    assert series(tmp_path, other, answers, check) >= 8
