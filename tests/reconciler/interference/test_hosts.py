"""Host workloads in verdicts: a victim leads to steps against BE pods, a suspect to evidence alone."""

import io
from collections.abc import Iterator, Mapping

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.config.model import Config
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.rule import RuleConfig, VictimSelector
from reconciler.interference.alerts import alerts_of
from reconciler.interference.engine import Evaluation, InterferenceEngine
from reconciler.interference.recording import HEAD, RecordingWriter
from reconciler.interference.snapshots import host_samples, host_snapshot
from reconciler.responses.config import LadderConfig
from reconciler.responses.eviction.config import EvictionConfig
from reconciler.responses.eviction.limits import EvictionHistory
from reconciler.responses.eviction.plan import decide, initial_state
from reconciler.responses.eviction.triggers.named import RequestedVictim
from state.evidence import NODE, ContendedResource, PodSnapshot, Sample, SampleFrame, Verdict
from state.hosts import CountsAs, HostValue, HostWorkload
from state.measures import Response
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.interference.recorded import frames

STEPS = (Response.SQUEEZE, Response.FREEZE, Response.EVICT)
RULE = RuleConfig(dry_run=False, responses=STEPS)
QUICK = varied(LadderConfig(), effect_s=3.0)


def pod(uid: str, cls: PodClass, cpus: str = "0-3") -> PodSnapshot:
    return PodSnapshot(
        uid=uid, title=f"ns/{uid}", pod_class=cls, group=f"/kubepods/pod{uid}", namespace="ns", cpus=cpus
    )


def host(name: str, role: CountsAs, *, use: float = 500.0, wait: float = 0.5, cpus: str = "0-3") -> HostWorkload:
    values = {
        "cpu.use": use,
        "cpu.throttled": 0.0,
        "cpu.throttled_milli": 0.0,
        "cpu.wait": wait,
        "cpu.wait_milli": 500.0 * wait / 100,
        "cpu.wait_own": 0.0,
        "cpu.delay": 3000.0 if wait > 5 else 20.0,
    }
    return HostWorkload(
        name=name,
        counts_as=role,
        match=f"unit:{name}",
        processes=1,
        cpus=CpuSet.parse(cpus),
        values={signal: HostValue(value) for signal, value in values.items()},
    )


def frame(second: float, pods: Mapping[str, tuple[PodSnapshot, float]], *hosts: HostWorkload) -> SampleFrame:
    """``pods`` with their CPU use."""
    samples: dict[str, Mapping[str, Sample]] = {NODE: {"be.budget": Sample(3000.0), "be.use": Sample(100.0)}}
    for uid, (_, use) in pods.items():
        samples[f"pod:{uid}"] = {
            **{name: Sample(0.0) for name in ("cpu.throttled", "cpu.throttled_milli", "cpu.wait_own", "cpu.wait")},
            **{name: Sample(0.0) for name in ("cpu.wait_milli", "cpu.delay")},
            "cpu.use": Sample(use),
        }
    samples |= {f"host:{item.name}": host_samples(item, 0.1) for item in hosts}
    return SampleFrame(
        at_s=1000.0 + second,
        wall_s=1.7e9 + second,
        pods={uid: snapshot for uid, (snapshot, _) in pods.items()},
        hosts={snapshot.uid: snapshot for snapshot in map(host_snapshot, hosts)},
        samples=samples,
        knobs=("cpu.quota", "freeze"),
    )


def played(items: Iterator[SampleFrame], **rule: object) -> tuple[list[Evaluation], SampleFrame, InterferenceEngine]:
    config = varied(
        InterferenceConfig(enabled=True, rules={"cpu": replace(RULE, **rule)}, responses=QUICK), settle_s=0.0
    )
    engine = InterferenceEngine(config)
    evaluations: list[Evaluation] = []
    last: SampleFrame | None = None
    for last in items:
        evaluations.append(engine.evaluate_now(last))
    assert last is not None
    return evaluations, last, engine


def victim_waits(hog_cpus: str = "0-3", seconds: int = 90) -> Iterator[SampleFrame]:
    """From the 40th second on a BE pod works, and a host workload waits."""
    for second in range(seconds):
        bad = second >= 40
        hog = pod("hog", PodClass.RECLAIMED, hog_cpus)
        db = host("db", CountsAs.VICTIM, wait=40.0 if bad else 0.5)
        yield frame(second, {"hog": (hog, 2500.0 if bad else 100.0)}, db)


def pod_waits(seconds: int = 90) -> Iterator[SampleFrame]:
    """From the 40th second on a host workload that counts as BE works, and an online pod waits."""
    for second in range(seconds):
        bad = second >= 40
        builds = host("builds", CountsAs.BE, use=2500.0 if bad else 100.0)
        web = pod("web", PodClass.SHARED)
        item = frame(second, {"web": (web, 500.0)}, builds)
        waits = host("web", CountsAs.VICTIM, wait=40.0 if bad else 0.5)
        yield replace(item, samples={**item.samples, "pod:web": host_samples(waits, 0.0)})


def test_a_victim_beside_the_pods_leads_to_steps_against_be_pods() -> None:
    evaluations, _, _ = played(victim_waits())
    found = [finding for item in evaluations for finding in item.begun]
    assert [(finding.victim, finding.title) for finding in found] == [("host:db", "host workload db")]
    assert found[0].suspects[0].uid == "hog"
    assert any("hog" in item.measures.squeezed for item in evaluations)
    # As for a pod, the ladder's last step is an eviction of the BE pod.
    assert {named.uid for item in evaluations for named in item.named} == {"hog"}


def test_a_suspect_beside_the_pods_is_evidence_and_never_acted_on() -> None:
    evaluations, last, _ = played(pod_waits())
    begun = [finding for item in evaluations for finding in item.begun]
    assert [(finding.victim, finding.suspects[0].uid) for finding in begun] == [("pod:web", "host:builds")]
    assert "host workload: reported, never limited" in begun[0].suspects[0].reason
    for item in evaluations:
        assert not item.measures.squeezed
        assert not item.measures.frozen
        assert not item.named
        assert not item.would
    alerts = [alert for item in evaluations for alert in alerts_of(item, last, ())]
    assert any("suspect host workload builds" in alert.summary for alert in alerts)


def test_a_be_pod_on_other_cpus_is_no_suspect_of_a_victim_beside_the_pods() -> None:
    evaluations, _, _ = played(victim_waits(hog_cpus="4-7"))
    findings = [finding for item in evaluations for finding in item.findings]
    assert not [suspect for finding in findings for suspect in finding.suspects]
    assert all(finding.verdict is not Verdict.INTERFERED for finding in findings)
    assert not any(item.measures.squeezed for item in evaluations)


@pytest.mark.parametrize(
    ("selector", "watched"),
    [
        (VictimSelector(), True),
        (VictimSelector(classes=frozenset({PodClass.DEDICATED})), False),
        (VictimSelector(classes=frozenset({PodClass.RECLAIMED, PodClass.SHARED})), True),
        (VictimSelector(namespaces=("*",)), False),
    ],
)
def test_rules_for_chosen_pods_do_not_watch_what_is_no_pod(selector: VictimSelector, watched: bool) -> None:
    hosts = host("db", CountsAs.VICTIM), host("builds", CountsAs.BE)
    evaluations, _, _ = played(iter([frame(0, {}, *hosts)]), victims=selector)
    found = {finding.victim for finding in evaluations[0].findings if finding.rule == "cpu"}
    assert found == ({"host:db"} if watched else set())


def test_an_eviction_that_is_requested_of_one_has_no_victim() -> None:
    _, last, engine = played(pod_waits())
    named = [
        RequestedVictim(uid=uid, rule="cpu", victim="ns/web", evidence="", resource=ContendedResource.CPU)
        for uid in ("host:builds", "builds")
    ]
    config = EvictionConfig(enabled=True, dry_run=False)
    decision, _ = decide(config, last, engine.history, initial_state(last, EvictionHistory()), (), {}, named, ())
    assert not decision.orders
    assert not decision.would


def test_a_workload_that_is_gone_is_named_as_what_it_is() -> None:
    def items() -> Iterator[SampleFrame]:
        yield from victim_waits(seconds=60)
        yield frame(61, {"hog": (pod("hog", PodClass.RECLAIMED), 2500.0)})

    evaluations, _, _ = played(items())
    assert [finding.evidence for finding in evaluations[-1].over] == [("the host workload is gone",)]


def test_a_recording_has_them() -> None:
    writer = RecordingWriter()
    given = [
        frame(0, {}, host("db", CountsAs.VICTIM)),
        frame(1, {}, host("db", CountsAs.VICTIM), host("builds", CountsAs.BE)),
        frame(2, {}, host("db", CountsAs.VICTIM), host("builds", CountsAs.BE)),
        frame(3, {}),
    ]
    for item in given:
        writer.add(item)
    read = list(frames(io.BytesIO(HEAD + writer.block()), "test"))
    assert [item.hosts for item in read] == [item.hosts for item in given]
    assert [item.samples for item in read] == [item.samples for item in given]


def test_nothing_is_configured_by_default() -> None:
    assert not Config().host_workloads
