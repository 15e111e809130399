"""A node in a short notation: samples that stay until they are changed, pods, and frames second by second."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from reconciler.responses.eviction.config import EvictionConfig, TriggerConfig
from reconciler.responses.eviction.plan import EvictionDecision, EvictionPlanState, decide, initial_state
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import Trigger, TriggerResult
from reconciler.responses.eviction.triggers.named import RequestedVictim
from reconciler.signals.catalog import SIGNALS
from reconciler.signals.history import History
from state.closing import NodeClosing
from state.eviction import EvictionCase
from state.evidence import NODE, PodSnapshot, RuleVerdict, Sample, SampleFrame
from state.model import Hold, PodClass, Resources

GI = 1 << 30
MI = 1 << 20
WALL = 1_700_000_000.0
START = 10_000.0

C = TypeVar("C", bound=TriggerConfig)
M = TypeVar("M", bound=Struct)


def be(uid: str, *, age_s: float = 3600.0, cls: PodClass = PodClass.RECLAIMED, **facts: Any) -> PodSnapshot:
    """A pod of namespace ci that has run for an hour when the world begins."""
    base: dict[str, Any] = {
        "uid": uid,
        "title": f"ci/{uid}",
        "namespace": "ci",
        "pod_class": cls,
        "group": f"/kubepods/besteffort/pod{uid}",
        "owner": f"ReplicaSet/{uid}",
        "pool": "reclaimed" if cls is PodClass.RECLAIMED else "shared",
        "created_s": WALL - age_s,
    }
    return PodSnapshot(**(base | facts))


def batch(cpu_milli: int | None = None, memory_bytes: int | None = None) -> Resources:
    return Resources(batch_cpu_milli=cpu_milli, batch_memory_bytes=memory_bytes)


class World:
    """``at`` is the monotonic clock; the wall clock runs with it from WALL."""

    def __init__(self, *pods: PodSnapshot) -> None:
        self.at = START
        self.wall_shift = 0.0
        self.pods = {pod.uid: pod for pod in pods}
        self.samples: dict[str, dict[str, float]] = {}
        self.history = History()
        self.enforce = True
        self.closing: NodeClosing | None = None

    def put(self, subject: str = NODE, /, **signals: float | None) -> None:
        """Set samples from now on, ``memory__free=1``; None: no longer measured."""
        values = self.samples.setdefault(subject, {})
        for key, value in signals.items():
            name = key.replace("__", ".")
            assert name in SIGNALS, name
            if value is None:
                values.pop(name, None)
            else:
                values[name] = value

    @property
    def wall(self) -> float:
        """Seconds since the epoch now."""
        return WALL + self.wall_shift + self.at - START

    def frame(self) -> SampleFrame:
        frame = SampleFrame(
            at_s=self.at,
            wall_s=self.wall,
            pods=dict(self.pods),
            samples={
                subject: {name: Sample(value) for name, value in signals.items()}
                for subject, signals in self.samples.items()
            },
            enforce=self.enforce,
            closing=self.closing,
        )
        self.history.add(frame)
        return frame

    def scene(self, fresh_s: float = 15.0) -> EvictionContext:
        return EvictionContext(frame=self.frame(), history=self.history, fresh_s=fresh_s)


class Judge:
    """One trigger with its memory, evaluated each ``step_s`` of a world."""

    def __init__(self, trigger: Trigger[Any, Any], world: World, config: TriggerConfig | None = None) -> None:
        self.trigger = trigger
        self.world = world
        self.config = config if config is not None else trigger.config_type()
        self.memory: Any = None

    def now(self) -> TriggerResult:
        reading, self.memory = self.trigger.judge(self.config, self.world.scene(), self.memory or {})
        return reading

    def after(self, seconds: float, step_s: float = 1.0) -> TriggerResult:
        """The reading after this time, with one each step (and one at its very begin)."""
        reading = self.now() if self.memory is None else None
        end = self.world.at + seconds
        while self.world.at < end:
            self.world.at += step_s
            reading = self.now()
        assert reading is not None
        return reading


class Planner:
    """The whole decision, a frame a second; ``cases`` is what its carrying out says."""

    def __init__(self, world: World, config: EvictionConfig, *, started: bool = True) -> None:
        self.world = world
        self.config = config
        self.memory: EvictionPlanState | None = None
        self.cases: list[EvictionCase] = []
        self.holds: dict[str, Hold] = {}
        self.named: list[RequestedVictim] = []
        self.findings: list[RuleVerdict] | None = None
        self.decision = EvictionDecision()
        self.log: list[str] = []
        if started:
            self.memory = initial_state(world.frame())
            self.world.at += config.limits.quiet_s

    def step(self, seconds: float = 1.0) -> EvictionDecision:
        self.world.at += seconds
        self.decision, self.memory = decide(
            self.config,
            self.world.frame(),
            self.world.history,
            self.memory,
            self.cases,
            self.holds,
            self.named,
            self.findings,
        )
        self.log += self.decision.news
        return self.decision

    def first(self, seconds: float = 120.0) -> EvictionDecision:
        """The first decision with an order or a would-be one, else the last."""
        for _ in range(int(seconds)):
            decision = self.step()
            if decision.orders or decision.would:
                break
        return self.decision

    def run(self, seconds: float) -> list[str]:
        """uids ordered in this time."""
        texts: list[str] = []
        for _ in range(int(seconds)):
            texts += [order.uid for order in self.step().orders]
        return texts


def uids(pressures: Iterable[Any]) -> list[str]:
    return sorted(uid for pressure in pressures for uid in pressure.only or ())


def reasons(decision: EvictionDecision) -> Mapping[str, str]:
    """Why no pod is evicted, by trigger."""
    return {refusal.trigger: f"{refusal.why}: {refusal.reason}" for refusal in decision.refusals}
