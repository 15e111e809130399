"""The agent and a kubelet that writes again what it wants: counted by the kernel, file by file, nobody fights.

Up to 1.21 the static CPU manager writes every container again in a fixed rhythm: once that is learnt, nothing that it
writes is written by the agent, and what the agent needs it has elsewhere. From 1.22 on it writes at its own reasons:
one correction for each of its writes, never two.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from cgroupfs.errors import SourceError
from tests.e2e.agent import eventually
from tests.e2e.mounts import hierarchies
from tests.e2e.node import RunningPod
from tests.e2e.pods import ContainerSpec, PodSpec, best_effort, burstable, guaranteed, new_uid
from tests.fakes.kubelet.fake import TICK_S, Version, playing_the_kubelet
from tests.node.bypassd import BypassdProcess
from tests.node.scripted import ScriptedNode
from tests.node.writes import WriteLog, Written, count

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="REAL KERNEL TEST NOT RUN: cgroups are made by root only"),
    pytest.mark.skipif("cpuset" not in hierarchies(), reason="REAL KERNEL TEST NOT RUN: it counts writes to v1 files"),
    pytest.mark.skipif(os.cpu_count() != 2, reason="REAL KERNEL TEST NOT RUN: it divides two CPUs"),
]
FULL = bool(os.environ.get("BYPASSD_FULL"))
ROUNDS = 3
WINDOWS = 5
REWRITTEN = frozenset({"cpuset.cpus", "cpu.shares"})
"""What the static CPU manager's updates carry for every container."""
SLOW_S = 0.25
POOL = {"katalyst.kubewharf.io/cpu_enhancement": '{"cpuset_pool": "batch"}'}
BE = {"koordinator.sh/qosClass": "BE"}
Property = Callable[[str, object], None]
ROOT = "/bypassd-test-node-nofight"


def labelled(name: str, *, labels: dict[str, str] | None = None, notes: dict[str, str] | None = None) -> PodSpec:
    container = ContainerSpec(cpu_request=500)
    return PodSpec(name=name, uid=new_uid(), labels=labels or {}, annotations=notes or {}, containers=(container,))


class Scene:
    """An online pod, one in a pool, two BE pods; the agent; everybody's writes."""

    def __init__(self, node: ScriptedNode, agent: BypassdProcess, log: WriteLog, pods: dict[str, RunningPod]) -> None:
        self.node = node
        self.agent = agent
        self.log = log
        self.pods = pods

    def cpus(self, name: str) -> str:
        return self.pods[name]["main"].read("cpuset", "cpuset.cpus")

    def group(self, name: str) -> str:
        return self.pods[name]["main"].group

    def ours(self, began: float, until: float = float("inf")) -> list[Written]:
        return [one for one in self.log.since(began, until) if one.pid == self.agent.pid]

    def corrections(self, began: float) -> dict[tuple[str, str], int]:
        """How often the agent wrote each CPU set and weight. BE work's quotas follow the load, not the kubelet."""
        return count(one for one in self.ours(began) if one.file in REWRITTEN)

    def theirs(self, began: float, until: float = float("inf")) -> list[Written]:
        return [one for one in self.log.since(began, until) if one.pid != self.agent.pid]

    def story(self, began: float) -> str:
        """Who wrote what when, for a failure's text."""
        names = {self.group(name): name for name in self.pods}
        return "\n".join(
            f"{one.at - began:7.3f} {'agent' if one.pid == self.agent.pid else 'runtime'} "
            f"{names.get(one.group, one.group)} {one.file}"
            for one in self.log.since(began)
        )

    def told(self) -> dict[str, Any]:
        """The ``agent`` section of its document."""
        found: dict[str, Any] = self.agent.state("agent")["agent"]
        return found


@contextmanager
def scene() -> Iterator[Scene]:
    """Everything is undone afterwards."""
    with playing_the_kubelet(), ScriptedNode.start(cpu_policy="static", reserved=frozenset(), cgroup_root=ROOT) as node:
        node.kubelet.listen()
        try:
            log = WriteLog(ROOT)
        except SourceError as exc:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
        with log:
            specs = (
                burstable("web"),
                labelled("batch", notes=POOL),
                labelled("executor", labels=BE),
                best_effort("crunch"),
            )
            pods = {spec.name: node.run_pod(spec) for spec in specs}
            agent = BypassdProcess(node, cri_socket=None)
            agent.start()
            try:
                agent.wait_ready()
                found = Scene(node, agent, log, pods)
                eventually("online pods are divided", lambda: {found.cpus("web"), found.cpus("batch")} == {"0", "1"})
                eventually("BE pods are confined", lambda: {found.cpus("executor"), found.cpus("crunch")} < {"0", "1"})
                eventually("the agent is at rest", _at_rest(found))
                yield found
                assert not log.lost
            finally:
                agent.stop()


def _at_rest(found: Scene) -> Callable[[], bool]:
    return lambda: not [one for one in found.log.since(time.monotonic() - 0.5) if one.file in REWRITTEN]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "tick_s",
    [
        pytest.param(1.5, id="each 1.5 s"),
        pytest.param(
            TICK_S, id="each 10 s", marks=pytest.mark.skipif(not FULL, reason="takes two minutes: only in make e2e")
        ),
    ],
)
def test_writes_that_a_kubelet_up_to_1_21_repeats_are_not_answered_for_ever(
    tick_s: float, record_property: Property
) -> None:
    with scene() as found:
        began = time.monotonic()
        found.node.kubelet.begin_ticks(Version.STATIC_121, tick_s=tick_s)
        rounds = found.node.kubelet.rounds

        def learnt() -> bool:
            return found.told()["kubelet_reasserts_s"] is not None

        def gave_way() -> bool:
            return found.cpus("crunch") == "0-1"

        eventually("the agent has learnt the rhythm", learnt, within_s=12 * tick_s)
        eventually("and gives way", gave_way, within_s=2 * tick_s)
        learning, known_after = found.corrections(began), len(rounds)
        for _ in range(WINDOWS):
            eventually("it knows the rhythm", lambda: learnt() and gave_way(), within_s=12 * tick_s)
            first = len(rounds)
            _wait_for_round(rounds, first + ROUNDS, tick_s)
            if regular(rounds[first : first + ROUNDS + 1]):
                break
        else:
            pytest.skip("REAL KERNEL TEST NOT RUN: this machine is too busy for a rhythm")
        begin, end = rounds[first], rounds[first + ROUNDS]
        theirs, ours = count(found.theirs(begin, end)), count(found.ours(begin, end))
        figures = {
            "rounds until the rhythm was known": known_after,
            "the agent's writes to one file until it was given up, at most": max(learning.values()),
            f"the runtime's writes in {ROUNDS} rounds after that": sum(theirs.values()),
            "the agent's to the same files": sum(ours.get(place, 0) for place in theirs),
            "the agent's to any CPU set or weight": sum(
                number for (_, file), number in ours.items() if file in REWRITTEN
            ),
        }
        for name, value in figures.items():
            record_property(name, value)
            print(f"  {name}: {value}")
        groups = [found.group(name) for name in found.pods]
        written = {place: theirs.get(place) for place in ((group, "cpuset.cpus") for group in groups)}
        assert set(written.values()) == {ROUNDS}, f"the kubelet has not written each once a round: {written}"
        assert not set(ours) & set(theirs), "both write the same files"
        assert not [place for place in ours if place[1] in REWRITTEN], ours
        told = found.told()
        assert told["alerts"].get("yield", 0) == 0, told["alerts"]
        assert told["kubelet_reasserts_s"] == pytest.approx((end - begin) / ROUNDS, rel=0.3)
        # Bounded all the same, by what that kubelet leaves alone.
        besteffort = found.node.cgroups.directory("cpu", found.node.cgroups.group("kubepods", "besteffort"))
        with open(f"{besteffort}/cpu.cfs_quota_us", encoding="utf-8") as file:
            assert int(file.read()) > 0
        assert int(found.pods["executor"]["main"].read("cpu", "cpu.cfs_quota_us")) > 0
        pod = found.node.cgroups.directory("cpu", found.node.cgroups.pod_group(found.pods["executor"].spec))
        with open(f"{pod}/cpu.shares", encoding="utf-8") as file:
            assert file.read() == "2\n"


def test_each_write_of_a_kubelet_from_1_22_on_is_corrected_once(record_property: Property) -> None:
    with scene() as found:
        began = time.monotonic()
        wanted = {name: found.cpus(name) for name in found.pods}
        found.node.kubelet.version = Version.STATIC_122
        moved, executor = {"web", "batch", "executor", "crunch"}, found.group("executor")
        # The first tick after a container's start, and after a restart of the kubelet; nothing at the ticks between.
        for restart in (False, True, True):
            if restart:
                found.node.kubelet.restart()
            at = time.monotonic()
            assert len(found.node.kubelet.tick()) == len(moved)
            eventually("corrected", lambda: {name: found.cpus(name) for name in found.pods} == wanted)
            eventually("and at rest", _at_rest(found))
            expected = {*((found.group(name), "cpuset.cpus") for name in moved)} | {(executor, "cpu.shares")}
            assert found.corrections(at).keys() == expected, found.story(at)
            assert not needless(found.log.since(at), found.agent.pid), found.story(at)
            at = time.monotonic()
            assert found.node.kubelet.tick() == []
            assert found.corrections(at) == {}, found.story(at)
        # A container takes a CPU for itself: everybody is told of the smaller default set, and there is one CPU left.
        at = time.monotonic()
        alone = found.node.run_pod(guaranteed("alone", cpus=1))
        own = alone["main"].read("cpuset", "cpuset.cpus")
        left = {"0": "1", "1": "0"}[own]
        eventually("the others leave its CPU", lambda: {found.cpus(name) for name in found.pods} == {left})
        eventually("all at rest", _at_rest(found))
        assert max(found.corrections(at).values()) == 1, found.story(at)
        ticked = time.monotonic()
        assert sorted(found.node.kubelet.tick()) == sorted(found.pods[name]["main"].id for name in moved)
        eventually("and again", _at_rest(found))
        assert not needless(found.log.since(ticked), found.agent.pid), found.story(ticked)
        assert alone["main"].read("cpuset", "cpuset.cpus") == own
        assert (alone["main"].group, "cpuset.cpus") not in found.corrections(at)
        theirs, ours = (
            sum(one.file in REWRITTEN and one.group != alone["main"].group for one in side)
            for side in (found.theirs(began), found.ours(began))
        )
        record_property("the runtime's and the agent's writes of CPU sets and weights", f"{theirs}, {ours}")
        print(f"  CPU sets and weights: {theirs} written by the runtime, {ours} by the agent")
        told = found.told()
        assert (told["alerts"].get("yield", 0), told["kubelet_reasserts_s"]) == (0, None)


def _wait_for_round(rounds: list[float], number: int, tick_s: float) -> None:
    eventually("rounds go by", lambda: len(rounds) > number, within_s=3 * tick_s * (ROUNDS + 2))


def regular(rounds: list[float]) -> bool:
    """Whether rounds came at equal distances: a machine that others keep busy has no rhythm to learn."""
    gaps = [later - earlier for earlier, later in pairwise(rounds)]
    return max(gaps) < 1.1 * min(gaps)


def needless(entries: list[Written], agent: int) -> list[Written]:
    """The agent's second and later writes to a file after one of the runtime's.

    Not those after a runtime that took long from its write to its signal, which is not waited for without end: the file
    is corrected then, and once more at the signal.
    """
    answered: dict[tuple[str, str], int] = {}
    written_at: dict[tuple[str, str], float] = {}
    found = []
    for one in entries:
        if one.file not in REWRITTEN:
            continue
        if one.pid != agent:
            answered[one.place], written_at[one.place] = 0, one.at
        elif one.place in answered:
            answered[one.place] += 1
            if answered[one.place] > 1 and one.at - written_at[one.place] < SLOW_S:
                found.append(one)
    return found
