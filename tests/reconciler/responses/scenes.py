"""A small world for the ladder: pods with numbers, a victim as described, and the measures in force."""

from collections.abc import Iterable, Mapping, Sequence

from reconciler.responses.config import LadderConfig
from reconciler.responses.ladder import EscalationChange, EscalationMemory, RuleFindings, advance
from reconciler.responses.measure import demands_of
from reconciler.signals.history import History
from state.evidence import NODE, ContendedResource, PodSnapshot, RuleVerdict, Sample, SampleFrame, Suspect, Verdict
from state.measures import Response, Restrictions
from state.model import PodClass

BAD, WELL, UNSURE, LOST = Verdict.INTERFERED, Verdict.OK, Verdict.SUSPECT, Verdict.UNKNOWN
HOLD, SQUEEZE, PARTITION, _, FREEZE, EVICT = Response
EFFECT = LadderConfig().effect_s
KNOBS = ("cpu.quota", "memory.high", "io.max", "freeze")


def facts(
    uid: str, cls: PodClass = PodClass.RECLAIMED, *, certain: bool = True, terminating: bool = False
) -> PodSnapshot:
    return PodSnapshot(
        uid=uid,
        title=f"ns/{uid}",
        pod_class=cls,
        group=f"/kubepods/pod{uid}",
        namespace="ns",
        owner=uid.partition("-")[0],
        certain=certain,
        terminating=terminating,
    )


def blamed(uids: Iterable[str], severity: float) -> tuple[RuleVerdict, ...]:
    """Findings of one moment: each of these pods suffers from ``hog``."""
    return tuple(
        RuleVerdict(
            rule="cpu",
            victim=f"pod:{uid}",
            title=f"ns/{uid}",
            verdict=Verdict.INTERFERED,
            since_s=0,
            severity=severity,
            gap=600.0,
            suspects=(Suspect(uid="hog", title="ns/hog", score=0.9, reason=""),),
        )
        for uid in uids
    )


class World:
    """``uses``: samples by pod and signal. One rule, named cpu, with the given responses."""

    def __init__(
        self,
        *responses: Response,
        config: LadderConfig | None = None,
        resource: ContendedResource = ContendedResource.CPU,
        knobs: Sequence[str] = KNOBS,
        shadow: bool = False,
    ) -> None:
        self.config = config or LadderConfig()
        self.responses = responses
        self.resource = resource
        self.knobs = tuple(knobs)
        self.shadow = shadow
        self.now = 100.0
        self.memory = EscalationMemory()
        self.history = History()
        self.pods = {"web": facts("web", PodClass.SHARED), "hog": facts("hog"), "calm": facts("calm")}
        self.uses: dict[str, dict[str, float]] = {
            NODE: {"be.budget": 3000.0, "be.use": 2000.0},
            "pod:hog": {"cpu.use": 1800.0, "memory.use": float(8 << 30), "disk.read": 9e7, "disk.write": 1e6},
            "pod:calm": {"cpu.use": 200.0, "memory.use": float(1 << 30), "disk.read": 0.0, "disk.write": 0.0},
        }
        self.suspects: tuple[tuple[str, float], ...] = (("hog", 0.9), ("calm", 0.3))
        self.log: list[str] = []
        self.evicts = True
        self.be_yields = False

    def go(
        self,
        verdict: Verdict,
        severity: float = 0.0,
        *,
        seconds: float = 1.0,
        gap: float | None = 600.0,
        victim: str = "web",
    ) -> tuple[EscalationChange, ...]:
        """One moment further; what happened, also in the log as ``turn: words``."""
        self.now += seconds
        frame = self.frame()
        self.history.add(frame)
        finding = RuleVerdict(
            rule="cpu",
            victim=f"pod:{victim}",
            title=f"ns/{victim}",
            verdict=verdict,
            since_s=self.now,
            resource=self.resource,
            severity=severity,
            gap=gap,
            suspects=tuple(Suspect(uid=uid, title=f"ns/{uid}", score=score, reason="") for uid, score in self.suspects),
        )
        findings = (finding,) if victim in self.pods else ()
        ascent = RuleFindings(rule="cpu", shadow=self.shadow, responses=self.responses, findings=findings)
        self.memory, changes = advance(
            self.memory, [ascent], (frame, self.history), self.config, fresh_s=3.0, evicts=self.evicts
        )
        self.log += [f"{change.turn}: {change.words}" for change in changes]
        return changes

    def frame(self) -> SampleFrame:
        samples: Mapping[str, Mapping[str, Sample]] = {
            subject: {name: Sample(value) for name, value in values.items()} for subject, values in self.uses.items()
        }
        return SampleFrame(
            at_s=self.now,
            wall_s=1e9 + self.now,
            pods=self.pods,
            samples=samples,
            knobs=self.knobs,
            disks=("8:0",),
            be_yields=self.be_yields,
        )

    @property
    def measures(self) -> Restrictions:
        return demands_of(self.memory, self.frame())
