"""Alerts of an evaluation: one incident for each finding and each response, open as long as it lasts."""

from msgspec.structs import replace

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.alerts.incident import Incident, Incidents
from reconciler.detectors.rule import RuleConfig
from reconciler.interference.alerts import alerts_of, resolutions
from reconciler.interference.engine import Evaluation, InterferenceEngine
from reconciler.responses.config import LadderConfig
from reconciler.responses.ladder import EscalationChange
from state.evidence import Verdict
from state.measures import Response
from tests.fakes.constants import varied
from tests.reconciler.interference.test_engine import config, frame, trouble
from tests.reconciler.responses.scenes import World, facts

BAD, WELL = Verdict.INTERFERED, Verdict.OK
HOLD, SQUEEZE, PARTITION, _, FREEZE, EVICT = Response


class Told:
    """What a receiver knows, by kind and key."""

    def __init__(self) -> None:
        self.incidents = Incidents(3600.0)
        self.known: dict[tuple[AlertKind, str], Incident] = {}

    def take(self, alert: Alert) -> Alert:
        self.known[alert.kind.began, alert.key] = self.incidents.take(alert)
        return alert

    def hear(self, world: World, changes: tuple[EscalationChange, ...]) -> list[AlertKind]:
        judgement = Evaluation(at_s=world.now, changes=changes)
        alerts = alerts_of(judgement, world.frame(), world.memory.climbs.values())
        return [self.take(alert).kind for alert in alerts]

    def open(self) -> set[str]:
        """Keys of what lasts and has not ended."""
        return {key for (kind, key), incident in self.known.items() if kind.lasts and not incident.has_ended}


def in_force(world: World) -> set[str]:
    return {
        f"cpu pod:web {step.response} {step.what} {step.suspect or 'all'}{' shadow' if climb.shadow else ''}"
        for climb in world.memory.climbs.values()
        for step in climb.steps
    }


def test_undoing_one_suspects_squeeze_says_nothing_of_the_others() -> None:
    world, message = World(SQUEEZE, config=varied(LadderConfig(), effect_s=5)), Told()
    message.hear(world, world.go(BAD, 4.0, gap=1500.0))
    world.uses["pod:hog"]["cpu.use"] = 300.0
    message.hear(world, world.go(BAD, 2.0, seconds=5))
    world.suspects = (("calm", 0.9),)
    message.hear(world, world.go(BAD, 2.0, seconds=5))
    assert message.open() == in_force(world) == {"cpu pod:web squeeze CPU hog", "cpu pod:web squeeze CPU calm"}
    message.hear(world, world.go(BAD, 2.0, seconds=5))
    assert message.open() == in_force(world) == {"cpu pod:web squeeze CPU hog"}
    assert message.known[AlertKind.RESPONSE, "cpu pod:web squeeze CPU calm"].has_ended


def test_a_response_ends_with_its_last_step_and_not_when_it_is_eased() -> None:
    world, message = World(SQUEEZE, config=varied(LadderConfig(), effect_s=5, recover_s=5, recover_percent=40)), Told()
    message.hear(world, world.go(BAD, 4.0, gap=300.0))
    world.uses["pod:hog"]["cpu.use"] = 1500.0
    message.hear(world, world.go(BAD, 2.0, seconds=5, gap=300.0))
    (climb,) = world.memory.climbs.values()
    assert len(climb.steps) == 2, "squeezed twice"
    kinds: list[AlertKind] = []
    while world.memory.climbs:
        kinds += message.hear(world, world.go(WELL))
        assert message.open() == in_force(world)
    assert kinds == [*[AlertKind.RESPONSE] * (len(kinds) - 1), AlertKind.UNDONE]
    assert len(kinds) > 2
    assert len(message.known) == 1


def test_what_a_shadow_would_have_done_ends_apart_from_what_is_done() -> None:
    world, message = World(SQUEEZE, shadow=True), Told()
    message.hear(world, world.go(BAD, 4.0))
    world.shadow = False
    message.hear(world, world.go(BAD, 4.0))
    assert message.open() == in_force(world) == {"cpu pod:web squeeze CPU hog"}


def test_an_eviction_request_and_its_end_are_reported_carried_out_or_not() -> None:
    world, message = World(EVICT), Told()
    (alert,) = alerts_of(Evaluation(at_s=0.0, changes=world.go(BAD, 4.0)), world.frame(), world.memory.climbs.values())
    assert alert.summary == "victim ns/web (cpu), asked: evict ns/hog"
    message.take(alert)
    assert message.open() == in_force(world) == {"cpu pod:web evict running hog"}
    message.hear(world, world.go(BAD, 4.0, seconds=world.config.evict_effect_s))
    assert message.open() == in_force(world) == set()


def test_the_pod_of_a_dry_run_is_reported_as_such_and_resolved() -> None:
    world, message = World(EVICT), Told()
    world.evicts = False
    changes = world.go(BAD, 4.0)
    alert = next(alerts_of(Evaluation(at_s=0.0, changes=changes), world.frame(), world.memory.climbs.values()))
    assert alert.summary == "victim ns/web (cpu), would do: evict ns/hog"
    assert alert.labels["mode"] == "dry_run"
    message.hear(world, changes)
    assert message.open() == {"cpu pod:web evict running hog shadow"}
    message.hear(world, world.go(WELL))
    assert message.open() == set()


def test_that_nothing_is_left_to_try_is_an_event_which_needs_no_end() -> None:
    world, message = World(), Told()
    assert message.hear(world, world.go(BAD, 4.0)) == [AlertKind.EXHAUSTED]
    assert message.open() == set()


def test_a_victim_that_is_gone_leaves_nothing_open() -> None:
    world, message = World(HOLD, SQUEEZE), Told()
    message.hear(world, world.go(BAD, 4.0))
    message.hear(world, world.go(BAD, 4.0))
    assert len(message.open()) == 2
    del world.pods["web"]
    message.hear(world, world.go(BAD, 4.0))
    assert message.open() == set()


def test_an_eviction_that_helped_is_open_until_that_is_known() -> None:
    world, message = World(EVICT), Told()
    message.hear(world, world.go(BAD, 4.0))
    assert message.open() == in_force(world) == {"cpu pod:web evict running hog"}
    del world.pods["hog"]
    world.suspects = ()
    while world.memory.climbs:
        message.hear(world, world.go(WELL))
        assert message.open() == in_force(world)
    assert message.known[AlertKind.RESPONSE, "cpu pod:web evict running hog"].has_ended


def test_a_pod_that_was_frozen_and_whose_squeeze_stays_is_still_squeezed() -> None:
    responses = varied(LadderConfig(), effect_s=5)
    world, message = (
        World(SQUEEZE, FREEZE, config=replace(responses, freeze=replace(responses.freeze, max_s=20))),
        Told(),
    )
    world.suspects = (("hog", 0.9),)
    world.uses["pod:hog"]["cpu.use"] = 700.0
    severity = 8.0
    for _ in range(80):
        message.hear(world, world.go(BAD, severity, seconds=1))
        severity *= 0.9
        assert message.open() == in_force(world)


def test_the_end_of_monitoring_resolves_every_incident() -> None:
    brain, message = InterferenceEngine(config(cpu=RuleConfig(dry_run=False))), Told()
    for sample_frame in trouble():
        for alert in alerts_of(brain.evaluate_now(sample_frame), sample_frame, brain.ladder.climbs.values()):
            message.take(alert)
    assert message.open() == {"cpu pod:web", "cpu pod:web hold budget all"}
    last = frame(90, hog_milli=2500.0, wait=40.0)
    for alert in resolutions(brain.active, brain.ladder.climbs.values(), last, "interference detection stopped"):
        message.take(alert)
        assert "interference detection stopped" in alert.summary
    assert message.open() == set()


def test_a_pods_facts_route_an_alert_of_a_response() -> None:
    world, message = World(SQUEEZE), Told()
    world.pods["web"] = facts("web")
    message.hear(world, world.go(BAD, 4.0))
    (incident,) = message.known.values()
    assert incident.labels == {"rule": "cpu", "namespace": "ns", "pod": "web", "uid": "web", "mode": "enforce"}
    assert incident.alert.details == {"suspect": "ns/hog"}
