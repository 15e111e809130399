"""What judging costs: CPU time of the brain's passes over made-up pods with every signal that the shipped rules want.

Two thirds of the pods are online. All signals are there and move a little, each sample is of its own moment, so that no
pass is cheaper than a real one; cycles are read once a minute and caches each ten seconds, as their readers have them.
"""

import io
import random
import statistics
import time
from collections.abc import Generator
from typing import Final

from reconciler.cli.simulate import replay
from reconciler.cli.windowed import WindowedConfig
from reconciler.config.load import Loaded
from reconciler.detectors.base import VictimView
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.suspects import rank
from reconciler.detectors.uses import ResourceUses
from reconciler.interference.engine import InterferenceEngine
from reconciler.interference.recording import HEAD, RecordingWriter
from state.evidence import NODE, ContendedResource, PodSnapshot, Sample, SampleFrame, pod_subject
from state.model import PodClass, Resources
from tests.reconciler.interference.recorded import frames

_START_S: Final = 10_000.0
_WALL_S: Final = 1_790_000_000.0
_ONLINE: Final = 75 / 110
_PAST: Final = 150
_PASSES: Final = 60
_VICTIMS: Final = 10
_SLOW: Final = {"cpi": 60, "llc.occupancy": 10, "memory.bandwidth": 10}
"""Signals that are not measured each second, with the seconds between two samples."""
_HEALTHY: Final[dict[str, tuple[float, float]]] = {
    "cpu.use": (900.0, 60.0),
    "cpu.throttled": (0.0, 0.0),
    "cpu.wait": (0.8, 0.2),
    "cpu.wait_milli": (8.0, 2.0),
    "cpu.delay": (40.0, 9.0),
    "cpu.pressure": (1.5, 0.5),
    "cpi": (1.1, 0.02),
    "llc.occupancy": (4e6, 3e5),
    "memory.bandwidth": (2e8, 1e7),
    "memory.use": (8e8, 1e6),
    "memory.limit": (4e9, 0.0),
    "memory.refaults": (2.0, 1.0),
    "memory.pressure": (0.3, 0.2),
    "io.pressure": (0.6, 0.3),
    "disk.read": (3e5, 1e5),
    "disk.write": (2e5, 1e5),
    "disk.ops": (30.0, 8.0),
    "oom.kills": (0.0, 0.0),
}
"""Mean and deviation of a pod's signals while all is well."""
_NODE: Final[dict[str, tuple[float, float]]] = {
    "be.budget": (3000.0, 0.0),
    "be.use": (2000.0, 100.0),
    "cpu.pressure": (4.0, 1.0),
    "cpu.use": (8000.0, 500.0),
    "io.pressure": (2.0, 0.5),
    "memory.bandwidth": (2e10, 1e9),
    "memory.pressure": (1.0, 0.3),
    "memory.refaults": (30.0, 5.0),
    "memory.kswapd": (50.0, 20.0),
    "memory.direct": (3.0, 1.0),
    "memory.free": (4e9, 1e8),
    "memory.low": (1e8, 0.0),
    "memory.pods_hits": (0.0, 0.0),
}
_BAD: Final = {"cpu.wait": 30.0, "cpu.delay": 4000.0, "cpu.wait_milli": 600.0, "memory.pressure": 30.0}
"""What a pod that suffers has as the mean instead: two of the shipped rules find it."""


class World:
    """A node with this many pods; frame by frame, one each second, the clock a little early or late."""

    def __init__(self, pods: int, *, online: int | None = None, seed: int = 1) -> None:
        self._made = random.Random(seed)
        online = round(pods * _ONLINE) if online is None else online
        every = [_facts(f"{number:03d}", be=number >= online) for number in range(pods)]
        self.pods = {facts.uid: facts for facts in every}
        self.victims = every[:online]
        self._slow: dict[tuple[str, str], tuple[float, float]] = {}
        self._second = 0

    def frame(self, suffering: int = 0) -> SampleFrame:
        """The next second; so many online pods suffer in it."""
        made, self._second = self._made, self._second + 1
        at = _START_S + self._second + made.uniform(-0.005, 0.005)
        bad = {pod.uid for pod in self.victims[:suffering]}
        node = {signal: Sample(max(0.0, made.gauss(mean, sigma))) for signal, (mean, sigma) in _NODE.items()}
        samples = {NODE: node}
        for uid in self.pods:
            current = samples[pod_subject(uid)] = {}
            for signal, (mean, sigma) in _HEALTHY.items():
                usual = _BAD.get(signal, mean) if uid in bad else mean
                current[signal] = self._sample(uid, signal, max(0.0, made.gauss(usual, sigma)), at)
        return SampleFrame(at_s=at, wall_s=_WALL_S + self._second, pods=self.pods, samples=samples)

    def _sample(self, uid: str, signal: str, value: float, at: float) -> Sample:
        every = _SLOW.get(signal)
        if every is None:
            return Sample(value)
        known = self._slow.get((uid, signal))
        if known is None or at - known[0] >= every:
            known = self._slow[uid, signal] = at, value
        return Sample(known[1], at - known[0])


def _facts(uid: str, *, be: bool) -> PodSnapshot:
    return PodSnapshot(
        uid=uid,
        title=f"ns/{'batch' if be else 'web'}-{uid}",
        pod_class=PodClass.RECLAIMED if be else PodClass.SHARED,
        group=f"/kubepods/pod{uid}",
        namespace="ns",
        owner=f"owner-{uid}",
        labels={"app": "it", "tier": "one"},
        pool="reclaimed" if be else "shared",
        cpus="0-15",
        limits=Resources(cpu_milli=4000),
    )


class Clock:
    """CPU time of generators, and the longest that one ran without a yield (ms)."""

    def __init__(self) -> None:
        self._spent: list[float] = []
        self._longest: list[float] = []

    def run(self, work: Generator[None, None, object]) -> None:
        """All of it."""
        began = before = time.thread_time()
        longest = 0.0
        for _ in work:
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        end = time.thread_time()
        self._spent.append(end - began)
        self._longest.append(max(longest, end - before))

    def figures(self) -> dict[str, float]:
        return {
            "ms": round(1000.0 * statistics.median(self._spent), 2),
            "longest_without_a_yield_ms": round(1000.0 * statistics.median(self._longest), 2),
        }


def passes(pods: int, suffering: int) -> dict[str, float]:
    """Whole passes, with a past of two minutes of which the last half minute was like them."""
    world, brain, clock = World(pods), InterferenceEngine(InterferenceConfig(enabled=True)), Clock()
    for second in range(_PAST):
        brain.evaluate_now(world.frame(suffering if second >= _PAST - 30 else 0))
    whole: list[float] = []
    for _ in range(_PASSES):
        clock.run(brain.evaluate(world.frame(suffering)))
        frame = world.frame(suffering)
        # Without a look at the clock at each yield, which costs as much as what is measured.
        began = time.thread_time()
        brain.evaluate_now(frame)
        whole.append(time.thread_time() - began)
    return {**clock.figures(), "ms": round(1000.0 * statistics.median(whole), 2)}


def ranking(be: int) -> dict[str, dict[str, float]]:
    """Suspects of one victim after the other, among so many BE pods: the first of a frame, and the others."""
    world, brain = World(be + _VICTIMS, online=_VICTIMS), InterferenceEngine(InterferenceConfig(enabled=True))
    for second in range(_PAST):
        brain.evaluate_now(world.frame(_VICTIMS if second >= _PAST - 30 else 0))
    values: dict[str, dict[str, float]] = {}
    for resource in (ContendedResource.CPU, ContendedResource.MEMORY, ContendedResource.IO):
        first, others = Clock(), Clock()
        for _ in range(_PASSES // _VICTIMS):
            frame = world.frame(_VICTIMS)
            brain.evaluate_now(frame)
            lately = ResourceUses(frame, brain.history, brain.fresh_s)
            for number, pod in enumerate(world.victims):
                sight = VictimView(
                    subject=pod.subject, pod=pod, frame=frame, history=brain.history, fresh_s=brain.fresh_s
                )
                (others if number else first).run(rank(sight, resource, 30.0, lately))
        values[f"{resource}, first"], values[f"{resource}, others"] = first.figures(), others.figures()
    return values


def simulating(pods: int, seconds: int = 600) -> dict[str, float]:
    """``bypassctl simulate`` over a recording, from its bytes on."""
    world, packer, file = World(pods), RecordingWriter(), io.BytesIO()
    file.write(HEAD)
    for second in range(seconds):
        packer.add(world.frame())
        if second % 30 == 29:
            file.write(packer.block())
    file.seek(0)
    report = replay(WindowedConfig(Loaded()), frames(file, "bench"), None, None)
    assert report.frames == seconds
    a_frame = report.took_s / seconds
    return {
        "ms_a_frame": round(1000.0 * a_frame, 2),
        "s_for_8_h": round(8 * 3600 * a_frame, 1),
        "bytes_a_frame": round(file.getbuffer().nbytes / seconds),
    }


def run(pods: int) -> dict[str, object]:
    """All of it; passes of ``pods``, ranking among 100 BE pods, a recording of 30 pods."""
    return {
        "pods": pods,
        "healthy pass": passes(pods, 0),
        "pass, 10 suffer": passes(pods, 10),
        "ranking, 100 BE pods": ranking(100),
        "simulate, 30 pods": simulating(30),
    }
