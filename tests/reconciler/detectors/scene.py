"""A made-up past for detectors: series by subject and signal, played frame by frame through `History`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from reconciler.detectors.base import AnyDetector, VictimView
from reconciler.signals.history import STALE_S, History
from state.evidence import NODE, DetectorVerdict, PodSnapshot, Sample, SampleFrame, Verdict
from state.model import PodClass

VICTIM: Final = "pod:v"
Values = Sequence[float | None] | Callable[[int], float | None] | float


def facts(uid: str, pod_class: PodClass = PodClass.SHARED, **more: Any) -> PodSnapshot:
    defaults: dict[str, Any] = {"title": f"ns/{uid}", "group": f"/kubepods/pod{uid}", "pool": "shared", "cpus": "0-3"}
    return PodSnapshot(uid=uid, pod_class=pod_class, **{**defaults, **more})


def be(uid: str, **more: Any) -> PodSnapshot:
    return facts(uid, PodClass.RECLAIMED, **more)


def value_at(values: Values, index: int) -> float | None:
    if callable(values):
        return values(index)
    if isinstance(values, int | float):
        return float(values)
    return values[index] if index < len(values) else None


class Scene:
    """Plays ``steps`` frames, ``every_s`` apart; None in a series is a missing sample."""

    def __init__(
        self,
        signals: Mapping[str, Mapping[str, Values]],
        pods: Iterable[PodSnapshot] = (),
        *,
        every_s: float = 1.0,
        start_s: float = 1000.0,
        confidence: float = 1.0,
    ) -> None:
        self.signals = signals
        self.pods = {pod.uid: pod for pod in (facts("v"), *pods)}
        self.every_s = every_s
        self.start_s = start_s
        self.confidence = confidence
        self.history = History()
        self.index = 0

    def step(self, subject: str = VICTIM) -> VictimView:
        samples: dict[str, dict[str, Sample]] = {name: {} for name in (NODE, *(f"pod:{uid}" for uid in self.pods))}
        for name, signals in self.signals.items():
            for signal, values in signals.items():
                value = value_at(values, self.index)
                if value is not None:
                    samples.setdefault(name, {})[signal] = Sample(value, 0.0, self.confidence)
        at = self.start_s + self.index * self.every_s
        frame = SampleFrame(at_s=at, wall_s=1_800_000_000.0 + at, pods=self.pods, samples=samples)
        self.history.add(frame)
        self.index += 1
        pod = self.pods.get(subject.removeprefix("pod:"))
        return VictimView(subject=subject, pod=pod, frame=frame, history=self.history, fresh_s=STALE_S * self.every_s)

    def play(self, steps: int, subject: str = VICTIM) -> VictimView:
        sight = self.step(subject)
        for _ in range(steps - 1):
            sight = self.step(subject)
        return sight


def judged(
    detector: AnyDetector, config: Any, scene: Scene, steps: int, memory: Any = None, subject: str = VICTIM
) -> list[DetectorVerdict]:
    """Every opinion of ``steps`` frames."""
    opinions = []
    for _ in range(steps):
        opinion, memory = detector.judge(config, scene.step(subject), memory)
        assert isinstance(memory, detector.memory_type)
        assert opinion.evidence
        opinions.append(opinion)
    return opinions


def verdicts(opinions: Iterable[DetectorVerdict]) -> str:
    """One letter a frame: o(k), s(uspect), i(nterfered), u(nknown)."""
    letters = {Verdict.OK: "o", Verdict.SUSPECT: "s", Verdict.INTERFERED: "i", Verdict.UNKNOWN: "u"}
    return "".join(letters[opinion.verdict] for opinion in opinions)
