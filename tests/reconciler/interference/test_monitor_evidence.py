"""The observer keeps the evidence for and against rules, and records the planner's input beside its frames."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from reconciler.alerts.alert import AlertKind, Severity
from reconciler.config.model import AgentMode, Config
from reconciler.detectors.config import RecordConfig
from reconciler.interference.monitor import read_kept
from reconciler.interference.nodesteps import NodeStep
from reconciler.interference.recording import read
from reconciler.responses.config import PromotionConfig
from reconciler.responses.promotion import DAY_S, EvidenceMemory, RuleRecord
from state.measures import Restrictions
from tests.fakes.constants import varied
from tests.fakes.livenode import LiveNode
from tests.reconciler.interference.test_monitor import Stage, configured, stage

ENFORCING = RuleRecord(enforcing=True)
PROMOTION = varied(PromotionConfig(enabled=True, days=1), verdicts=1, actions=1)


def by_evidence(live: LiveNode, *, dry_run: bool = True, promote: bool = True, enabled: bool = True) -> Config:
    config = configured(live)
    rules = dict(config.interference.rules)
    rules["cpu"] = replace(rules["cpu"], dry_run=dry_run, promote=promote)
    promotion = replace(PROMOTION, enabled=enabled)
    return replace(config, interference=replace(config.interference, rules=rules, promotion=promotion))


def with_record(scene: Stage, record: RuleRecord) -> None:
    scene.observer.engine.evidence = EvidenceMemory(records={"cpu": record})


async def test_a_day_without_regret_makes_a_rule_enforcing_and_responses_without_effect_make_it_a_dry_run_again(
    live: LiveNode,
) -> None:
    async with stage(live, by_evidence(live)) as scene:
        with_record(scene, RuleRecord(watched_s=DAY_S - 100))
        await scene.harmed(60)
        assert scene.measures == Restrictions(), "a dry run"
        scene.script.bad = False
        await scene.seconds(60)
        assert scene.observer.engine.enforces("cpu")
        (alert,) = [alert for alert in scene.told if alert.kind is AlertKind.OTHER]
        assert (alert.key, alert.severity, alert.labels["mode"]) == ("rule cpu", Severity.INFO, "enforce")
        assert read_kept(scene.agent.record.store).brain.records["cpu"].enforcing, "kept at once"
        assert scene.another().engine.enforces("cpu"), "after a restart"
        await scene.harmed(20)
        assert scene.observer.changes["squeeze", "applied"], "the script does not heed the quota"
        await scene.seconds(40)
        assert not scene.observer.engine.enforces("cpu")
        assert scene.measures == Restrictions()
        last = [alert for alert in scene.told if alert.kind is AlertKind.OTHER][-1]
        assert (last.severity, last.labels["mode"]) == (Severity.WARNING, "dry_run")


@pytest.mark.parametrize(
    ("words", "enforces"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"promote": False}, False),
        ({"dry_run": False, "enabled": False}, True),
        ({"dry_run": False}, True),
    ],
)
async def test_what_a_person_configured_has_precedence(live: LiveNode, words: dict[str, bool], enforces: bool) -> None:
    config = by_evidence(live, **words)
    async with stage(live, config) as scene:
        with_record(scene, ENFORCING)
        assert scene.observer.engine.enforces("cpu") is enforces
        by_record = config.interference.promotion.enabled and words.get("dry_run", True) and words.get("promote", True)
        rule = scene.shown()[0]["rules"]["cpu"]
        assert rule["dry_run"] is not enforces
        assert (rule["record"] is not None) is by_record


async def test_observing_a_rule_with_the_best_record_takes_no_step(live: LiveNode) -> None:
    async with stage(live, replace(by_evidence(live), mode=AgentMode.OBSERVE)) as scene:
        with_record(scene, ENFORCING)
        await scene.harmed(20)
        assert scene.measures == Restrictions()
        assert not scene.observer.changes["squeeze", "applied"]
        assert scene.observer.changes["squeeze", "would-applied"]


async def test_the_planners_input_is_recorded_beside_each_frame(live: LiveNode, tmp_path: Path) -> None:
    config = configured(live)
    record = RecordConfig(directory=str(tmp_path / "rec"))
    async with stage(live, replace(config, interference=replace(config.interference, record=record))) as scene:
        await scene.seconds(3)
        plan = scene.agent.control.reconciler.plan
        await scene.observer.recorder.aclose()
    (path,) = (tmp_path / "rec").iterdir()
    with path.open("rb") as file:
        steps = [item for item in read(file, path.name) if isinstance(item, NodeStep)]
    assert len(steps) == 3
    assert plan is not None
    assert steps[0].plan is not None
    assert steps[0].plan.pools.reclaimed == plan.pools.reclaimed
    assert steps[0].view.pods.keys() == scene.agent.control.inventory.pods.keys()
    assert steps[0].settings.policies == config.policies
