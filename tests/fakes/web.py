"""A daemon as the web part sees it: what it shows is set by the test, its commands are recorded."""

from collections.abc import Iterator, Mapping, Sequence

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, InputError
from reconciler.runtime.cooperative import Steps
from reconciler.settings.binder import ConfigError
from reconciler.settings.nodes import ConfigProblem, SourceLocation
from reconciler.telemetry.metrics import MetricsSnapshot
from reconciler.web.interface import AlertTest, HoldRequest, OffRequest, RestoreRequest
from state.model import Hold


class FakePulse:
    def __init__(self) -> None:
        self.alive = True
        self.age_s = 0.25


class FakeShown:
    sections = ("pods", "pools")
    views: Sequence[str] = ()

    def __init__(self) -> None:
        self.pulse = FakePulse()
        self.reasons: list[str] = []
        self.asked: list[Sequence[str]] = []
        self.pods: dict[str, object] = {"u1": {"class": "reclaimed", "cpus": CpuSet.parse("0-3")}}
        self.broken = False
        self.pods_asked: list[str] = []
        self.events_asked: list[tuple[int | None, str, float | None]] = []
        self.event_rows: Sequence[Mapping[str, object]] = ()
        self.events_s = 0.0

    def not_ready(self) -> Sequence[str]:
        return self.reasons

    def metrics_steps(self) -> Steps[MetricsSnapshot]:
        yield
        return MetricsSnapshot(version="1", mode="observe", ready=not self.reasons)

    def hour(self, uid: str) -> Mapping[str, object] | None:
        return {"use_milli": [1, None]} if uid in self.pods else None

    async def events(
        self, after: int | None, run: str, since: float | None
    ) -> tuple[Mapping[str, object], Iterator[Mapping[str, object]], float]:
        self.events_asked.append((after, run, since))
        return {"run": run, "next": after, "missing": 0, "since": since}, iter(self.event_rows), self.events_s

    async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
        self.pods_asked.append(pod)
        return iter(self.state(sections).items()), 0.0

    def state(self, sections: Sequence[str]) -> Mapping[str, object]:
        self.asked.append(sections)
        if self.broken:
            raise ZeroDivisionError("a mistake")
        whole: dict[str, object] = {"pods": self.pods, "pools": {("a", 1): frozenset({2})}}
        return {name: whole[name] for name in sections}


class FakeControl:
    def __init__(self) -> None:
        self.told: list[object] = []
        self.error: AgentError | None = None

    async def hold(self, request: HoldRequest) -> Hold:
        self.told.append(request)
        if request.target == "nonsense":
            raise InputError("hold target", request.target, "node or pod:UID")
        return Hold(target=request.target, reason=request.reason, by=request.by, until=request.seconds)

    async def release(self, target: str) -> bool:
        self.told.append(f"release {target}")
        return target.startswith("file:/")

    async def restore(self, request: RestoreRequest) -> Mapping[str, object]:
        self.told.append(request)
        if self.error is not None:
            raise self.error
        return {"restored": 3}

    async def off(self, request: OffRequest) -> Mapping[str, object]:
        self.told.append(request)
        return {"restored": 2}

    async def test_alerts(self, request: AlertTest) -> Mapping[str, object]:
        self.told.append(request)
        return {"sinks": []}

    async def reload(self) -> Mapping[str, object]:
        self.told.append("reload")
        raise ConfigError([ConfigProblem(SourceLocation("/c.yaml", 1, 2), "mode", "no")])
