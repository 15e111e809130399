"""Ending a pod through a runtime: all its containers with their grace, then its sandbox."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from msgspec.structs import replace

from cgroupfs.subtree import Subtree
from reconciler.responses.means.base import EvictionResult
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.cri import CriEviction
from reconciler.sources.cri import CriClient
from reconciler.sources.criapi import cri_pb2
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome, EvictionStep, EvictionTarget
from state.model import ContainerKind, ContainerMeta, PodMeta
from tests.fakes.constants import varied
from tests.fakes.cri_runtime import FakeRuntime
from tests.fakes.work import FakeWork

UID = "33333333-3333-4333-8333-333333333333"
SANDBOX = "43e0f39a54e822c3ee834d53d8a26947f6ba0abcf7b2966ad48e4a8e3f19f5b0"
CONFIG = varied(EvictionMeans(), margin_s=0.5)
Stops = list[tuple[str, int]]


@pytest.fixture
def runtime(place: Path) -> Iterator[FakeRuntime]:
    """It ends a pod's processes with the sandbox; ``stops`` are the orders that it got."""
    with FakeRuntime(place / "c.sock") as fake:
        yield fake


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Subtree]:
    (tmp_path / "cgroup.procs").write_text("4242\n")
    with Subtree({"x": (os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), 1)}) as subtree:
        yield subtree


def order(grace_s: float | None = None) -> EvictionOrder:
    return EvictionOrder(
        id="o", uid=UID, title="t", namespace="n", name="p", owner=None, cause="", evidence="", grace_s=grace_s
    )


@pytest.fixture
def stops(runtime: FakeRuntime, tmp_path: Path) -> Stops:
    """What was stopped, with its grace (-1: a sandbox, with which the pod's processes end)."""
    found: Stops = []

    def on_stop(identifier: str, grace: int) -> None:
        found.append((identifier, grace))
        if grace == -1:
            (tmp_path / "cgroup.procs").write_text("")

    runtime.on_stop = on_stop
    return found


def then(runtime: FakeRuntime, act: Callable[[str], object]) -> None:
    """Do this with each stop, too, after it."""
    before = runtime.on_stop

    def on_stop(identifier: str, grace: int) -> None:
        before(identifier, grace)
        act(identifier)

    runtime.on_stop = on_stop


async def evict(runtime: FakeRuntime, work: FakeWork, timeout_s: float = 60) -> EvictionResult:
    async with CriClient(str(runtime.socket), timeout_s=timeout_s) as cri:
        return await CriEviction(CONFIG, lambda: cri).terminate(work)


def work_on(tree: Subtree, grace_s: float | None = None, *, own_s: float | None = None, **more: Any) -> FakeWork:
    """``grace_s``: the order's; ``own_s``: the pod's. ``more``: of the case."""
    step = more.get("step")
    case = EvictionCase(order=order(grace_s), target=EvictionTarget(grace_s=own_s), **more)
    return FakeWork(case, tree, resumed=step)


def ids(runtime: FakeRuntime) -> set[str]:
    return {container.id for container in runtime.containers if container.pod_sandbox_id == SANDBOX}


@pytest.mark.parametrize(
    ("own", "ordered", "used"), [(None, None, 2), (40.0, None, 40), (40.0, 7.0, 7), (1.0, 7.0, 1), (None, 1.0, 1)]
)
async def test_all_containers_get_their_grace_and_then_the_sandbox_goes(
    runtime: FakeRuntime,
    tree: Subtree,
    stops: Stops,
    own: float | None,
    ordered: float | None,
    used: int,
) -> None:
    work = work_on(tree, ordered, own_s=own)
    result = await evict(runtime, work)
    assert (result.outcome, work.steps) == (EvictionOutcome.DONE, [EvictionStep.STOP])
    assert set(stops[:-1]) == {(text, used) for text in ids(runtime)}
    assert len(stops) == 3
    assert stops[-1] == (SANDBOX, -1)


async def test_taken_up_again_only_what_is_left_of_the_grace_is_given(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    work = work_on(tree, own_s=300.0, step=EvictionStep.STOP, step_s=time.time() - 200.0)
    result = await evict(runtime, work)
    assert (result.outcome, work.steps) == (EvictionOutcome.DONE, [])
    assert {text for text, _ in stops[:-1]} == ids(runtime)
    assert all(40 < left_s <= 100 for _, left_s in stops[:-1]), "a busy machine takes its time"


async def test_who_may_never_have_been_asked_gets_a_little_grace_however_long_ago_that_was(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    """The daemon may have died between the journal and the act; 0 would be SIGKILL at once."""
    result = await evict(runtime, work_on(tree, own_s=30.0, step=EvictionStep.STOP))
    assert result.outcome is EvictionOutcome.DONE
    assert set(stops[:-1]) == {(text, 2) for text in ids(runtime)}


async def test_a_container_that_is_started_meanwhile_is_reported_and_neither_stopped_nor_killed_with_its_sandbox(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    first = sorted(ids(runtime))

    def kubelet(identifier: str) -> None:
        if identifier == first[0]:
            late = cri_pb2.Container()
            late.CopyFrom(next(container for container in runtime.containers if container.id == identifier))
            late.id, late.state = f"{identifier}+", cri_pb2.CONTAINER_RUNNING
            runtime.containers.append(late)

    then(runtime, kubelet)
    work = work_on(tree)
    result = await evict(runtime, work)
    assert (result.outcome, result.returned) == (None, True)
    assert sorted(identifier for identifier, _ in stops) == first
    assert set(work.case.stopped) == {*first, SANDBOX}
    # The caller decides that it is ended again, with its own grace, before the sandbox.
    work.case = replace(work.case, stopped=())
    again = await evict(runtime, work)
    assert (again.outcome, again.returned) == (EvictionOutcome.DONE, False)
    assert stops[2:] == [(f"{first[0]}+", 2), (SANDBOX, -1)]


async def test_a_container_that_was_being_started_is_stopped_when_it_runs_in_the_ended_sandbox(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    late = next(container for container in runtime.containers if container.pod_sandbox_id == SANDBOX)
    late.state = cri_pb2.CONTAINER_CREATED

    def started(identifier: str) -> None:
        if identifier == late.id and (SANDBOX, -1) in stops:
            late.state = cri_pb2.CONTAINER_RUNNING

    then(runtime, started)
    result = await evict(runtime, work_on(tree))
    assert (result.outcome, result.detail) == (EvictionOutcome.DONE, "containers stopped by the runtime")
    assert (late.state, stops[-2:]) == (cri_pb2.CONTAINER_EXITED, [(SANDBOX, -1), (late.id, 2)])


async def test_a_container_that_the_kubelet_adds_to_the_ended_sandbox_for_a_moment_is_reported(tree: Subtree) -> None:
    """While it is there, nothing else is stopped: what still runs is the next round's."""
    one = PodMeta(
        uid=UID,
        source="cri",
        containers=(ContainerMeta(name="a", id="a", kind=ContainerKind.APP),),
        sandbox_ids=(SANDBOX,),
    )
    more = replace(one, containers=(*one.containers, ContainerMeta(name="b", id="b", kind=ContainerKind.APP)))
    client = mock.create_autospec(CriClient, instance=True)
    client.pod.side_effect = [one, one, more, one]
    result = await CriEviction(CONFIG, lambda: client).terminate(work_on(tree))
    assert (result.outcome, result.returned) == (None, True)


async def test_taken_up_again_what_the_kubelet_has_started_since_the_first_read_is_not_stopped(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    first = min(ids(runtime))
    stopped = (first, "ended before", SANDBOX)
    result = await evict(runtime, work_on(tree, step=EvictionStep.STOP, step_s=time.time(), stopped=stopped))
    assert (result.outcome, result.returned, [identifier for identifier, _ in stops]) == (None, True, [first])


async def test_a_pod_that_the_runtime_lists_after_its_processes_are_there_is_stopped(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    """The kubelet starts it again at that moment."""
    expected = ids(runtime)
    sandboxes, containers = runtime.sandboxes, runtime.containers
    runtime.sandboxes, runtime.containers = [], []

    def created(step: EvictionStep) -> None:
        runtime.sandboxes, runtime.containers = sandboxes, containers

    work = FakeWork(EvictionCase(order=order()), tree, before=created)
    result = await evict(runtime, work)
    assert result.outcome is EvictionOutcome.DONE
    assert {identifier for identifier, _ in stops} == {*expected, SANDBOX} == set(work.case.stopped)
    assert stops[-1] == (SANDBOX, -1)


async def test_where_the_runtime_does_not_list_the_pod_again_its_sandbox_is_left_to_the_next_method(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    then(runtime, lambda _: setattr(runtime, "refusal", (grpc.StatusCode.UNAVAILABLE, "restarting")))
    result = await evict(runtime, work_on(tree))
    assert (result.outcome, result.returned) == (None, False)
    assert "restarting" in result.detail
    assert all(grace >= 0 for _, grace in stops)


async def test_a_container_that_cannot_be_stopped_does_not_keep_the_sandbox_from_it(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    before = runtime.on_stop

    def on_stop(identifier: str, grace: int) -> None:
        if grace >= 0:
            raise KeyError(identifier)
        before(identifier, grace)

    runtime.on_stop = on_stop
    result = await evict(runtime, work_on(tree))
    assert (result.outcome, stops) == (EvictionOutcome.DONE, [(SANDBOX, -1)]), "and its containers with it"


async def test_a_pod_that_is_started_again_before_its_groups_are_seen_empty_is_reported(
    runtime: FakeRuntime, tree: Subtree, stops: Stops, tmp_path: Path
) -> None:
    def kubelet(identifier: str) -> None:
        if identifier == SANDBOX:
            late = cri_pb2.PodSandbox()
            late.CopyFrom(next(sandbox for sandbox in runtime.sandboxes if sandbox.id == SANDBOX))
            late.id = f"{SANDBOX}+"
            runtime.sandboxes.append(late)
            (tmp_path / "cgroup.procs").write_text("4243\n")

    then(runtime, kubelet)
    result = await evict(runtime, work_on(tree))
    assert (result.outcome, result.returned) == (None, True)
    assert stops[-1] == (SANDBOX, -1)


async def test_processes_that_outlive_what_the_runtime_says_are_left_to_the_next_means(
    runtime: FakeRuntime, tree: Subtree
) -> None:
    result = await evict(runtime, work_on(tree))
    assert (result.outcome, result.detail) == (None, "the runtime reports it stopped, but processes are running")


async def test_a_runtime_without_the_pod_that_refuses_or_hangs_is_followed_by_the_next_means(
    runtime: FakeRuntime, tree: Subtree
) -> None:
    runtime.answers.clear()
    assert "no answer within 300 ms" in (await evict(runtime, work_on(tree), timeout_s=0.3)).detail
    runtime.answers.set()
    runtime.refusal = (grpc.StatusCode.INTERNAL, "shim is dead")
    assert "INTERNAL: shim is dead" in (await evict(runtime, work_on(tree))).detail
    runtime.refusal = None
    runtime.sandboxes.clear()
    for container in runtime.containers:
        container.state = cri_pb2.CONTAINER_EXITED
    assert (await evict(runtime, work_on(tree))).detail == "pod unknown to the runtime"


async def test_a_stop_that_hangs_ends_after_the_grace_and_the_margin(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    over = threading.Event()

    def stop(_: str, grace: int) -> None:
        """A container's stop hangs, a sandbox's fails."""
        if grace < 0:
            raise KeyError
        over.wait(120)

    runtime.on_stop = stop
    async with CriClient(str(runtime.socket), timeout_s=60) as cri:
        way = CriEviction(varied(EvictionMeans(), margin_s=0.2), lambda: cri)
        result = await way.terminate(work_on(tree, 0.1, own_s=0.1))
    *containers, sandbox = result.detail.split("; ")
    assert len(containers) == len(ids(runtime))
    assert all("StopContainer: no answer within" in problem for problem in containers)
    assert "StopPodSandbox: " in sandbox
    over.set()


async def test_without_a_socket_it_is_not_tried_until_there_is_one(
    runtime: FakeRuntime, tree: Subtree, stops: Stops
) -> None:
    clients: list[CriClient] = []
    way = CriEviction(CONFIG, lambda: clients[0] if clients else None)
    work = FakeWork(EvictionCase(order=order()), tree)
    assert way.unusable(work.case) == EvictionResult(outcome=None, detail="no CRI socket")
    assert (await way.terminate(work)).detail == "no CRI socket"
    assert work.steps == []
    async with CriClient(str(runtime.socket), timeout_s=60) as cri:
        clients.append(cri)
        assert way.unusable(work.case) is None
        assert (await way.terminate(work)).outcome is EvictionOutcome.DONE
