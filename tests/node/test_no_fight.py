"""The agent and a kubelet that writes again what it wants: counted by the kernel, file by file, without a conflict.

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
    pytest.mark.quiet,
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
    """An online pod, one in a pool, two BE pods; the agent; all writes."""

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
        return [written for written in self.log.since(began, until) if written.pid == self.agent.pid]

    def corrections(self, began: float) -> dict[tuple[str, str], int]:
        """How often the agent wrote each CPU set and weight. BE work's quotas follow the load, not the kubelet."""
        return count(written for written in self.ours(began) if written.file in REWRITTEN)

    def theirs(self, began: float, until: float = float("inf")) -> list[Written]:
        return [written for written in self.log.since(began, until) if written.pid != self.agent.pid]

    def story(self, began: float) -> str:
        """Who wrote what when, for a failure's text."""
        names = {self.group(name): name for name in self.pods}
        return "\n".join(
            f"{written.at - began:7.3f} {'agent' if written.pid == self.agent.pid else 'runtime'} "
            f"{names.get(written.group, written.group)} {written.file}"
            for written in self.log.since(began)
        )

    def told(self) -> dict[str, Any]:
        """The ``agent`` section of its document."""
        fields: dict[str, Any] = self.agent.state("agent")["agent"]
        return fields


@contextmanager
def scene(tick_s: float = TICK_S) -> Iterator[Scene]:
    """Everything is undone afterwards. ``tick_s``: the period in the kubelet's configuration."""
    with playing_the_kubelet(), ScriptedNode.start(cpu_policy="static", reserved=frozenset(), cgroup_root=ROOT) as node:
        node.kubelet.reconcile_every(tick_s)
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
            agent.forked = True
            agent.start()
            try:
                agent.wait_ready()
                result = Scene(node, agent, log, pods)
                eventually("online pods are divided", lambda: {result.cpus("web"), result.cpus("batch")} == {"0", "1"})
                eventually(
                    "BE pods are confined", lambda: {result.cpus("executor"), result.cpus("crunch")} < {"0", "1"}
                )
                eventually("the agent is at rest", _at_rest(result))
                yield result
                assert not log.lost
            finally:
                agent.stop()


def _at_rest(result: Scene) -> Callable[[], bool]:
    return lambda: not [written for written in result.log.since(time.monotonic() - 0.5) if written.file in REWRITTEN]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "tick_s",
    [
        pytest.param(1.2, id="each 1.2 s"),
        pytest.param(
            TICK_S, id="each 10 s", marks=pytest.mark.skipif(not FULL, reason="takes two minutes: only in make e2e")
        ),
    ],
)
def test_writes_that_a_kubelet_up_to_1_21_repeats_are_not_answered_for_ever(
    tick_s: float, record_property: Property
) -> None:
    with scene(tick_s) as result:
        began = time.monotonic()
        result.node.kubelet.begin_ticks(Version.STATIC_121, tick_s=tick_s)
        rounds = result.node.kubelet.rounds

        def learnt() -> bool:
            return result.told()["kubelet_reasserts_s"] is not None

        def gave_way() -> bool:
            return result.cpus("crunch") == "0-1"

        eventually("the agent has learnt the rhythm", learnt, within_s=12 * tick_s)
        eventually("and gives way", gave_way, within_s=2 * tick_s)
        learning, known_after = result.corrections(began), len(rounds)
        for _ in range(WINDOWS):
            eventually("it knows the rhythm", lambda: learnt() and gave_way(), within_s=12 * tick_s)
            first = len(rounds)
            _wait_for_round(rounds, first + ROUNDS, tick_s)
            if regular(rounds[first : first + ROUNDS + 1]):
                break
        else:
            pytest.skip("REAL KERNEL TEST NOT RUN: this machine is too busy for a rhythm")
        begin, end = rounds[first], rounds[first + ROUNDS]
        theirs, ours = count(result.theirs(begin, end)), count(result.ours(begin, end))
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
        groups = [result.group(name) for name in result.pods]
        written = {place: theirs.get(place) for place in ((group, "cpuset.cpus") for group in groups)}
        assert set(written.values()) == {ROUNDS}, f"the kubelet has not written each once a round: {written}"
        assert not set(ours) & set(theirs), "both write the same files"
        assert not [place for place in ours if place[1] in REWRITTEN], ours
        fields = result.told()
        assert fields["alerts"].get("yield", 0) == 0, fields["alerts"]
        assert fields["kubelet_reasserts_s"] == pytest.approx((end - begin) / ROUNDS, rel=0.3)
        # Bounded all the same, by what that kubelet leaves alone.
        besteffort = result.node.cgroups.directory("cpu", result.node.cgroups.group("kubepods", "besteffort"))
        with open(f"{besteffort}/cpu.cfs_quota_us", encoding="utf-8") as file:
            assert int(file.read()) > 0
        assert int(result.pods["executor"]["main"].read("cpu", "cpu.cfs_quota_us")) > 0
        pod = result.node.cgroups.directory("cpu", result.node.cgroups.pod_group(result.pods["executor"].spec))
        with open(f"{pod}/cpu.shares", encoding="utf-8") as file:
            assert file.read() == "2\n"


def test_each_write_of_a_kubelet_from_1_22_on_is_corrected_once(record_property: Property) -> None:
    with scene() as result:
        began = time.monotonic()
        wanted = {name: result.cpus(name) for name in result.pods}
        result.node.kubelet.version = Version.STATIC_122
        moved, executor = {"web", "batch", "executor", "crunch"}, result.group("executor")
        # The first tick after a container's start, and after a restart of the kubelet; nothing at the ticks between.
        for restart in (False, True, True):
            if restart:
                result.node.kubelet.restart()
            at = time.monotonic()
            assert len(result.node.kubelet.tick()) == len(moved)
            eventually("corrected", lambda: {name: result.cpus(name) for name in result.pods} == wanted)
            eventually("and at rest", _at_rest(result))
            expected = {*((result.group(name), "cpuset.cpus") for name in moved)} | {(executor, "cpu.shares")}
            assert result.corrections(at).keys() == expected, result.story(at)
            assert not needless(result.log.since(at), result.agent.pid), result.story(at)
            at = time.monotonic()
            assert result.node.kubelet.tick() == []
            assert result.corrections(at) == {}, result.story(at)
        # A container takes a CPU for itself: every container gets the smaller default set, and there is one CPU left.
        at = time.monotonic()
        alone = result.node.run_pod(guaranteed("alone", cpus=1))
        own = alone["main"].read("cpuset", "cpuset.cpus")
        left = {"0": "1", "1": "0"}[own]
        eventually("the others leave its CPU", lambda: {result.cpus(name) for name in result.pods} == {left})
        eventually("all at rest", _at_rest(result))
        assert max(result.corrections(at).values()) == 1, result.story(at)
        ticked = time.monotonic()
        assert sorted(result.node.kubelet.tick()) == sorted(result.pods[name]["main"].id for name in moved)
        eventually("and again", _at_rest(result))
        assert not needless(result.log.since(ticked), result.agent.pid), result.story(ticked)
        assert alone["main"].read("cpuset", "cpuset.cpus") == own
        assert (alone["main"].group, "cpuset.cpus") not in result.corrections(at)
        theirs, ours = (
            sum(written.file in REWRITTEN and written.group != alone["main"].group for written in side)
            for side in (result.theirs(began), result.ours(began))
        )
        record_property("the runtime's and the agent's writes of CPU sets and weights", f"{theirs}, {ours}")
        print(f"  CPU sets and weights: {theirs} written by the runtime, {ours} by the agent")
        fields = result.told()
        assert (fields["alerts"].get("yield", 0), fields["kubelet_reasserts_s"]) == (0, None)


def _wait_for_round(rounds: list[float], number: int, tick_s: float) -> None:
    eventually("rounds go by", lambda: len(rounds) > number, within_s=3 * tick_s * (ROUNDS + 2))


def regular(rounds: list[float]) -> bool:
    """Whether rounds came at equal distances: a machine that others keep busy has no rhythm to learn."""
    gaps = [later - earlier for earlier, later in pairwise(rounds)]
    return max(gaps) < 1.1 * min(gaps)


def needless(entries: list[Written], agent: int) -> list[Written]:
    """The agent's second and later writes to a file after one of the runtime's.

    Not those after a runtime that took long from its write to its signal, which is not waited for without end: the file
    is corrected then, and again at the signal.
    """
    answered: dict[tuple[str, str], int] = {}
    written_at: dict[tuple[str, str], float] = {}
    writtens = []
    for written in entries:
        if written.file not in REWRITTEN:
            continue
        if written.pid != agent:
            answered[written.place], written_at[written.place] = 0, written.at
        elif written.place in answered:
            answered[written.place] += 1
            if answered[written.place] > 1 and written.at - written_at[written.place] < SLOW_S:
                writtens.append(written)
    return writtens
