"""Online pods that are disturbed, each in another way, on the embedded node; what the agent makes of it, and how fast.

=======  ==============================  ========================================  ================================
scene    victim                          disturber                                 is lacking
=======  ==============================  ========================================  ================================
cpu      ``think``: 3 ms in each 10      ``spin``: more processes than CPUs        the CPU
quota    the same with a quota of 200m   itself; BE work is calm                   its own quota
memory   ``reread``: a file of 256 MiB   ``hoard``: so much that it no longer      page cache below kubepods' limit
                                         fits
io       ``fetch``: one block each 12 ms ``flood``: random writes of 1 MiB         the disk
=======  ==============================  ========================================  ================================

Beside the disturber there is a calm BE pod that uses a little of everything: another possible suspect.
"""

import contextlib
import json
import mmap
import os
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from tests.e2e.agent import eventually
from tests.e2e.node import RunningPod
from tests.e2e.pods import ContainerSpec, PodSpec, new_uid
from tests.fakes.kubelet.cgroups import write
from tests.fakes.kubelet.fake import playing_the_kubelet
from tests.node.bypassd import BypassdProcess, configuration
from tests.node.client import Sample, percentile, read_samples
from tests.node.scripted import ScriptedNode

MEGA: Final = 1 << 20
PODS_BYTES: Final = 768 * MEGA
FILE_MIB: Final = 256
HOARD_MIB: Final = 640
"""With the file it is more than kubepods may have, alone it is less: nobody is killed."""
_LIVE: Final = {"koordinator.sh/qosClass": "LS"}
_BE: Final = {"koordinator.sh/qosClass": "BE"}


class Scene(Struct, frozen=True, kw_only=True):
    """One way to suffer. ``rule``: the one that must find it; None: none may. ``hog`` None: no other work runs."""

    name: str
    victim: tuple[str, ...]
    hog: tuple[str, ...] | None
    rule: str | None
    cpu_limit: int = 0
    responses: tuple[str, ...] = ("hold", "squeeze")


SCENES: Final = {
    scene.name: scene
    for scene in (
        Scene(name="cpu", victim=("think", "3000", "10000"), hog=("spin", "0", "6"), rule="cpu"),
        Scene(name="quota", victim=("think", "3000", "10000"), hog=None, rule=None, cpu_limit=200),
        Scene(
            name="memory",
            victim=("reread", str(FILE_MIB), "10000"),
            hog=("hoard", str(HOARD_MIB), "1"),
            rule="memory",
            responses=("hold", "squeeze", "evict"),
        ),
        Scene(name="io", victim=("fetch", "64", "12000"), hog=("flood", "256", "12"), rule="io"),
    )
}


class Outcome(Struct, frozen=True, kw_only=True):
    """One run. Times in seconds from the moment at which the disturber began; None: it did not happen.

    ``found``: rules that said ``interfered`` of the victim (who floods a disk takes CPU time as well). ``first``: the
    title of the suspect that was ranked first then. Latencies in milliseconds: the medians of a second's turns.
    """

    found: tuple[str, ...]
    first: str | None
    verdict_s: float | None
    recovered_s: float | None
    calm_ms: float
    worst_ms: float
    steps: tuple[str, ...]


def online(name: str, run: tuple[str, ...], cpu_limit: int = 0) -> PodSpec:
    container = ContainerSpec(run=run, cpu_request=200, cpu_limit=cpu_limit, memory_request=16 * MEGA)
    return PodSpec(name=name, namespace="shop", uid=new_uid(), labels=dict(_LIVE), containers=(container,))


def best_effort(name: str, run: tuple[str, ...]) -> PodSpec:
    """BE by its label, with an online pod's share of the CPU: only the agent limits it."""
    container = ContainerSpec(run=run, cpu_request=200)
    return PodSpec(name=name, namespace="batch", uid=new_uid(), labels=dict(_BE), containers=(container,))


_OTHERS: Final = (
    *("cpu_satisfaction", "suppression", "pool_load", "numa_cpu", "node_cpu", "node_memory", "numa_memory"),
    *("memory_pressure", "rss_overuse", "disk", "reclaimed_resource"),
)
EVICTION: Final[dict[str, Any]] = {
    "enabled": True,
    "dry_run": False,
    "triggers": {name: {"enabled": False} for name in _OTHERS},
    # A run a minute for an hour is what the limits are there to prevent.
    "limits": {
        "per_minute": 1000,
        "per_10_minutes": 1000,
        "per_owner": 1000,
        "per_owner_percent": 100,
    },
    "means": {"order": ["signal"]},
}
CONSTANTS: Final[dict[str, Any]] = {
    "interference.settle_s": 2,
    **{
        f"interference.responses.{name}": value
        for name, value in {
            "effect_s": 3,
            "recover_s": 2,
            "recover_percent": 100,
            "remember_s": 0,
            "evict_effect_s": 10,
        }.items()
    },
    "eviction.interval_s": 1,
    "eviction.triggers.interference._cooldown_s": 0,
    **{f"eviction.limits.{name}": 0 for name in ("quiet_s", "retry_s", "again_s")},
    "eviction.spared.young_s": 0,
    "eviction.means.default_grace_s": 1,
    "eviction.means.margin_s": 1,
    "eviction.means.restarts.watch_s": 0,
}
"""Judged and undone soon; a pod that was ended may be ended again at once."""


class Theatre:
    """The node with one scene's pods and the agent on it."""

    def __init__(self, node: ScriptedNode, agent: BypassdProcess, scene: Scene) -> None:
        self.node, self.agent, self.scene = node, agent, scene
        self.victim = node.run_pod(online("victim", scene.victim, scene.cpu_limit))
        self.calm = node.run_pod(best_effort("calm", ("beat", "3")))
        self.hog: RunningPod | None = None
        self._samples: list[Sample] = []
        self._offset = 0
        self.ready()

    def ready(self) -> None:
        """Have the disturber there, at rest: created again where it has been evicted."""
        if self.scene.hog is None:
            return
        if self.hog is not None and not self._alive(self.hog):
            self.node.remove_pod(self.hog)
            self.hog = None
        if self.hog is None:
            self.hog = self.node.run_pod(best_effort("hog", self.scene.hog))
            path = self._file(self.hog)
            eventually(f"{path} is there", lambda: os.path.exists(path) and os.path.getsize(path) >= 8, within_s=60)

    def run(self, *, calm_s: float = 4.0, within_s: float = 40.0, recover_s: float = 30.0) -> Outcome:
        """Disturb once: how it was found and eased. The disturber is at rest again afterwards."""
        self.ready()
        time.sleep(calm_s)
        began = time.monotonic()
        calm = self._median(began - calm_s, began) or 0.0
        self._switch(on=True)
        fields: dict[str, dict[str, Any]] = {}
        verdict_s = recovered_s = None
        until = began + within_s
        try:
            while time.monotonic() < until and recovered_s is None:
                # Each answer takes some ms of the small part of a busy CPU that the agent has.
                time.sleep(0.5)
                now = time.monotonic()
                document = self.document()
                for finding in self._findings(document):
                    fields.setdefault(finding["rule"], finding)
                    verdict_s = verdict_s if verdict_s is not None else now - began
                if verdict_s is not None:
                    until = max(until, began + verdict_s + recover_s)
                    last = self._median(now - 1.0, now)
                    recovered = now - began > verdict_s + 1.0 and last is not None and last < self._good(calm)
                    # Before the agent's first step it is the disturber or the machine that paused.
                    if recovered and self._steps(document):
                        recovered_s = now - began
            steps = self._steps(self.document())
        finally:
            self._switch(on=False)
        worst = max(self._per_second(began, time.monotonic()), default=0.0)
        first = fields.get(self.scene.rule or "", next(iter(fields.values()), None))
        suspects = first["suspects"] if first is not None else []
        return Outcome(
            found=tuple(fields),
            first=suspects[0]["title"] if suspects else None,
            verdict_s=verdict_s,
            recovered_s=recovered_s,
            calm_ms=calm,
            worst_ms=worst,
            steps=steps,
        )

    def rest(self) -> None:
        """Wait until the agent has taken everything back: the next run is to begin like the first."""

        def is_well() -> bool:
            document = self.document()
            return not self._findings(document) and not self._steps(document)

        eventually("the victim is well again", is_well, within_s=90)

    def _good(self, calm: float) -> float:
        """Well again: within a half of what it was, and equal to it where that is next to nothing."""
        return max(1.5 * calm, calm + 0.5)

    def _alive(self, pod: RunningPod) -> bool:
        procs = self.node.cgroups.directory("cpuset", pod["main"].group) + "/cgroup.procs"
        try:
            with open(procs, encoding="ascii") as file:
                return bool(file.read().strip())
        except OSError:
            return False

    def document(self) -> Mapping[str, Any]:
        """The section ``interference`` of the agent's document."""
        fields: Mapping[str, Any] = json.loads(self.agent.ask("GET", "/state?section=interference"))["interference"]
        return fields

    def _findings(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        findings: Sequence[dict[str, Any]] = document.get("findings", ())
        return [
            finding for finding in findings if finding["verdict"] == "interfered" and finding["title"] == "shop/victim"
        ]

    def _steps(self, document: Mapping[str, Any]) -> tuple[str, ...]:
        climbs = document.get("ladder", ())
        return tuple(step["words"] for climb in climbs for step in climb["steps"])

    def _file(self, pod: RunningPod) -> str:
        return f"{self.node.out_directory(pod.spec, 'main')}/work"

    def _switch(self, *, on: bool) -> None:
        if self.hog is None:
            return
        with open(self._file(self.hog), "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
            struct.pack_into("<q", memory, 0, int(on))

    def _turns(self, begin: float, end: float) -> list[float]:
        """Milliseconds of the victim's turns that were due in this time."""
        fresh, self._offset = read_samples(self._file(self.victim), self._offset)
        self._samples += fresh
        return [sample.latency * 1000 for sample in self._samples if begin <= sample.due < end]

    def _median(self, begin: float, end: float) -> float | None:
        """Of the 90th percentile of what was due: what a caller notices."""
        return percentile(self._turns(begin, end), 0.9)

    def _per_second(self, begin: float, end: float) -> Iterator[float]:
        while begin < end:
            value = self._median(begin, begin + 1.0)
            if value is not None:
                yield value
            begin += 1.0


def interference(scene: Scene) -> dict[str, Any]:
    """The agent's section: every rule acts, and what is done is judged and taken back fast."""
    rules = {name: {"dry_run": False, "responses": list(scene.responses)} for name in ("cpu", "memory", "io")}
    return {
        "enabled": True,
        "private_cgroup2": True,
        "rules": {**rules, "cache": {"enabled": False}},
    }


@contextlib.contextmanager
def theatre(scene: Scene, cgroup_root: str) -> Iterator[Theatre]:
    """A node, the pods of a scene, and the agent; all is undone afterwards."""
    with (
        playing_the_kubelet(),
        ScriptedNode.start(cpu_policy="none", reserved=frozenset(), cgroup_root=cgroup_root) as node,
    ):
        node.kubelet.listen()
        if scene.name == "memory":
            kubepods = node.cgroups.directory("memory", node.cgroups.group("kubepods"))
            write(kubepods, "memory.limit_in_bytes", PODS_BYTES)
        agent = BypassdProcess(node, cri_socket=None)
        agent.forked = True
        agent.write_config(
            {
                **configuration(node, agent.directory, cri_socket=None),
                # BE work is not limited before: the test is about what follows.
                "policies": {"reclaimed": {"enabled": False}, "idle_buffer": {"enabled": False}},
                "interference": interference(scene),
                "eviction": EVICTION if "evict" in scene.responses else {},
                "constants": CONSTANTS,
            }
        )
        result = Theatre(node, agent, scene)
        agent.start()
        try:
            agent.wait_ready()
            try:
                eventually("the agent watches", lambda: bool(result.document().get("passes")), within_s=20)
            except AssertionError as exc:
                raise AssertionError(f"{exc}\n{agent.tail()}") from exc
            yield result
        finally:
            agent.stop()


def told(scene: Scene, outcomes: Sequence[Outcome]) -> str:
    """One line for people: how many were found, with the first suspect, and how fast, median and worst."""

    def times(of: Callable[[Outcome], float | None]) -> str:
        known = sorted(value for outcome in outcomes if (value := of(outcome)) is not None)
        return f"{statistics.median(known):.1f} s, worst {known[-1]:.1f} s" if known else "-"

    right = sum(outcome.first == "batch/hog" for outcome in outcomes)
    blamed = sum(bool(outcome.found) for outcome in outcomes)
    if scene.rule is None:
        return f"{scene.name}: blamed on a neighbour {blamed} times of {len(outcomes)}"
    recovered = sum(outcome.recovered_s is not None for outcome in outcomes)
    return (
        f"{scene.name}: found with the right suspect first {right} of {len(outcomes)}; verdict after "
        f"{times(lambda outcome: outcome.verdict_s)}; latency recovered {recovered} times after "
        f"{times(lambda outcome: outcome.recovered_s)} "
        f"(calm {statistics.median(outcome.calm_ms for outcome in outcomes):.1f} ms, "
        f"disturbed {statistics.median(outcome.worst_ms for outcome in outcomes):.1f} ms)"
    )
