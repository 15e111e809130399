"""The ladder: one change at a time, judged by its effect, undone when useless, given back in small steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.responses.config import FreezeConfig, LadderConfig
from reconciler.responses.ladder import RuleFindings, Transition, advance, in_force
from reconciler.responses.steps import Dimension
from state.evidence import NODE, ContendedResource, Verdict
from state.measures import Response, Restrictions, SqueezeLimit
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.scenes import (
    BAD,
    EFFECT,
    EVICT,
    FREEZE,
    HOLD,
    LOST,
    PARTITION,
    SQUEEZE,
    UNSURE,
    WELL,
    World,
    blamed,
    facts,
)


def test_a_healthy_victim_restricts_no_pod() -> None:
    world = World(HOLD, SQUEEZE)
    for verdict in (WELL, UNSURE, LOST):
        assert world.go(verdict) == ()
    assert world.measures == Restrictions()
    assert world.memory.climbs == {}


def test_first_be_work_stops_growing_then_the_likeliest_suspect_gives_what_the_victim_lacks() -> None:
    world = World(HOLD, SQUEEZE)
    world.go(BAD, 4.0)
    assert world.measures == Restrictions(budget_milli=2000, budget_reason="for victim ns/web (cpu)")
    world.go(BAD, 4.0)
    assert world.measures.squeezed == {"hog": SqueezeLimit(cpu_milli=1200, reason="for victim ns/web (cpu)")}
    assert world.log == [
        "applied: hold: BE budget at most 2.00 CPU",
        "applied: squeeze ns/hog: 1.80 -> 1.20 CPU",
    ]


@pytest.mark.parametrize("response", [HOLD, SQUEEZE])
def test_be_work_that_yields_gets_no_quota_for_waiting_for_a_cpu_but_for_memory(response: Response) -> None:
    for resource, bounded in ((ContendedResource.CPU, False), (ContendedResource.MEMORY, True)):
        world = World(response, resource=resource, knobs=("cpu.quota",))
        world.be_yields = True
        world.go(BAD, 4.0)
        assert (world.measures != Restrictions()) is bounded


def test_be_work_that_yields_is_frozen_for_waiting_for_a_cpu_where_that_is_configured() -> None:
    world = World(HOLD, SQUEEZE, FREEZE)
    world.be_yields = True
    world.go(BAD, 4.0)
    assert any("freeze" in text for text in world.log)


def test_nothing_else_is_changed_while_an_effect_is_waited_for() -> None:
    world = World(SQUEEZE)
    world.go(BAD, 4.0)
    for _ in range(int(EFFECT) - 1):
        assert world.go(BAD, 9.0) == ()


def test_what_helped_is_kept_and_the_next_step_is_as_large_as_the_gap_is_then() -> None:
    world = World(SQUEEZE)
    world.go(BAD, 4.0)
    world.uses["pod:hog"]["cpu.use"] = 1200.0
    changes = world.go(BAD, 2.0, seconds=EFFECT, gap=300.0)
    assert [change.turn for change in changes] == [Transition.HELPED, Transition.APPLIED]
    assert world.measures.squeezed["hog"].cpu_milli == 900


def test_what_did_not_help_is_undone_remembered_and_the_next_suspect_tried() -> None:
    world = World(SQUEEZE)
    world.go(BAD, 4.0)
    world.go(BAD, 3.9, seconds=EFFECT)
    changes = world.go(BAD, 3.9, seconds=EFFECT)
    assert [(change.turn, change.step.suspect) for change in changes if change.step is not None] == [
        (Transition.UNDONE, "hog"),
        (Transition.APPLIED, "calm"),
    ]
    assert "no effect (severity 4.00 -> 3.90)" in changes[0].words
    assert set(world.measures.squeezed) == {"calm"}
    world.go(BAD, 3.9, seconds=EFFECT)
    assert world.log[-1] == "exhausted: no further step available"
    assert world.measures.squeezed == {}
    for _ in range(30):
        assert world.go(BAD, 5.0) == (), "told once, and nothing useless is tried again"


def test_a_small_squeeze_without_effect_proves_nothing_and_is_enlarged_once() -> None:
    world = World(SQUEEZE)
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0, gap=20.0)
    assert world.measures.squeezed["hog"].cpu_milli == 1620, "a tenth at least"
    world.uses["pod:hog"]["cpu.use"] = 1620.0
    assert world.go(BAD, 3.9, seconds=EFFECT - 1) == ()
    (change,) = world.go(BAD, 3.9)
    assert (change.turn, change.words) == (
        Transition.APPLIED,
        "squeeze ns/hog: 1.80 -> 0.90 CPU (severity 4.00 -> 3.90)",
    )
    assert world.measures.squeezed["hog"].cpu_milli == 900
    assert not world.memory.useless
    assert world.go(BAD, 3.9, seconds=EFFECT - 1) == (), "it has its time, too"
    assert [change.turn for change in world.go(BAD, 3.9)] == [Transition.UNDONE, Transition.EXHAUSTED]
    assert world.measures.squeezed == {}


def test_what_an_enlarged_squeeze_brought_is_measured_against_what_was_before_the_small_one() -> None:
    world = World(SQUEEZE)
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0, gap=20.0)
    world.go(BAD, 3.7, seconds=EFFECT)
    world.uses["pod:hog"]["cpu.use"] = 900.0
    changes = world.go(BAD, 3.5, seconds=EFFECT, gap=20.0)
    assert (changes[0].turn, changes[0].words) == (
        Transition.HELPED,
        "squeeze ns/hog: 1.80 -> 0.90 CPU: severity 4.00 -> 3.50",
    )
    assert world.measures.squeezed["hog"].cpu_milli == 810, "and the next is small again"


def test_a_shadow_takes_nothing_so_it_enlarges_nothing() -> None:
    world = World(SQUEEZE, shadow=True)
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0, gap=20.0)
    assert [change.turn for change in world.go(BAD, 4.0, seconds=EFFECT, gap=20.0)] == [Transition.EXHAUSTED]
    assert world.log[0] == "applied: squeeze ns/hog: 1.80 -> 1.62 CPU"


def test_a_useless_squeeze_is_tried_again_when_it_has_been_forgotten_and_for_the_same_workloads_only() -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), remember_s=100))
    world.suspects = (("hog-1", 0.9),)
    world.pods["hog-1"] = facts("hog-1")
    world.uses["pod:hog-1"] = {"cpu.use": 1800.0}
    world.go(BAD, 4.0, gap=1200.0)
    world.go(BAD, 4.0, seconds=EFFECT)
    world.pods["hog-2"] = facts("hog-2")
    world.uses["pod:hog-2"] = {"cpu.use": 1800.0}
    world.suspects = (("hog-2", 0.9),)
    assert world.go(BAD, 4.0) == (), "another pod of the same owner is no other workload"
    assert [change.turn for change in world.go(BAD, 4.0, seconds=101)] == [Transition.APPLIED]


def test_a_second_squeeze_without_effect_leaves_the_first_which_helped() -> None:
    world = World(SQUEEZE)
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0)
    world.uses["pod:hog"]["cpu.use"] = 1200.0
    world.go(BAD, 2.0, seconds=EFFECT)
    assert world.measures.squeezed["hog"].cpu_milli == 600
    world.go(BAD, 2.0, seconds=EFFECT)
    assert world.measures.squeezed["hog"].cpu_milli == 1200
    assert world.go(BAD, 2.0, seconds=EFFECT) == ()
    assert not world.memory.useless, "it did help once"


def test_a_suspect_at_the_bottom_is_left_with_what_it_may_keep() -> None:
    world = World(SQUEEZE)
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0, gap=10_000.0)
    assert world.measures.squeezed["hog"].cpu_milli == 50
    world.uses["pod:hog"]["cpu.use"] = 50.0
    world.go(BAD, 3.0, seconds=EFFECT)
    assert world.log[-1] == "exhausted: no further step available"
    assert world.measures.squeezed["hog"].cpu_milli == 50, "it helped: it stays"


@pytest.mark.parametrize(
    ("resource", "knobs", "expected"),
    [
        (ContendedResource.MEMORY, ("memory.high",), SqueezeLimit(memory_high_bytes=(8 << 30) - (2 << 30))),
        (ContendedResource.MEMORY, ("cpu.quota",), SqueezeLimit(cpu_milli=900)),
        (ContendedResource.IO, ("io.max",), SqueezeLimit(disk_bps=45_000_000, disks=("8:0",))),
        (ContendedResource.IO, ("blkio.read_bps",), SqueezeLimit(disk_bps=45_000_000, disks=("8:0",))),
        (ContendedResource.IO, (), SqueezeLimit(cpu_milli=900)),
        (ContendedResource.CACHE, (), SqueezeLimit(cpu_milli=900)),
        (ContendedResource.NETWORK, (), SqueezeLimit(cpu_milli=900)),
    ],
)
def test_each_shortage_has_its_squeeze_and_cpu_where_the_kernel_has_none(
    resource: ContendedResource, knobs: tuple[str, ...], expected: SqueezeLimit
) -> None:
    world = World(SQUEEZE, resource=resource, knobs=knobs)
    world.go(BAD, 4.0, gap=float(2 << 30) if resource is ContendedResource.MEMORY else 5.0)
    squeeze_limit = world.measures.squeezed["hog"]
    assert (squeeze_limit.cpu_milli, squeeze_limit.memory_high_bytes, squeeze_limit.disk_bps, squeeze_limit.disks) == (
        expected.cpu_milli,
        expected.memory_high_bytes,
        expected.disk_bps,
        expected.disks,
    )


def test_where_memory_high_did_not_help_its_cpu_is_tried_before_another_pod() -> None:
    world = World(SQUEEZE, resource=ContendedResource.MEMORY)
    world.go(BAD, 4.0)
    world.go(BAD, 4.0, seconds=EFFECT)
    world.go(BAD, 4.0, seconds=EFFECT)
    (step,) = [step for _, step in in_force(world.memory)]
    assert (step.suspect, step.what) == ("hog", Dimension.CPU)


@pytest.mark.parametrize(
    "why", ["online", "unsure class", "terminating", "gone", "low score", "nothing known of its use"]
)
def test_who_may_not_be_touched_is_not(why: str) -> None:
    world = World(SQUEEZE, FREEZE, EVICT)
    world.suspects = (("hog", 0.9),)
    match why:
        case "online":
            world.pods["hog"] = facts("hog", PodClass.SHARED)
        case "unsure class":
            world.pods["hog"] = facts("hog", certain=False)
        case "terminating":
            world.pods["hog"] = facts("hog", terminating=True)
        case "gone":
            del world.pods["hog"]
        case "low score":
            world.suspects = (("hog", 0.1),)
        case _:
            world.responses = (SQUEEZE,)
            del world.uses["pod:hog"]
    world.go(BAD, 4.0)
    assert world.measures == Restrictions()
    assert world.log == ["exhausted: no further step available"]


def test_a_well_victim_gives_back_in_small_steps_the_last_taken_first() -> None:
    config = varied(LadderConfig(), recover_s=10, recover_percent=50)
    world = World(HOLD, SQUEEZE, config=config)
    world.go(BAD, 4.0)
    world.go(BAD, 4.0)
    seen = []
    for _ in range(80):
        world.go(WELL)
        seen.append((world.measures.budget_milli, getattr(world.measures.squeezed.get("hog"), "cpu_milli", None)))
    assert list(dict.fromkeys(seen)) == [(2000, 1200), (2000, 1500), (2000, None), (None, None)]
    assert world.log[2:] == [
        "helped: squeeze ns/hog: 1.80 -> 1.20 CPU: severity 4.00 -> 0.00",
        "eased: squeeze ns/hog: 1.80 -> 1.50 CPU",
        "ended: squeeze ns/hog: 1.80 -> 1.50 CPU: ns/web has recovered",
        "ended: hold: BE budget at most 2.00 CPU: ns/web has recovered",
    ]
    assert world.memory.climbs == {}


@pytest.mark.parametrize(
    ("use", "second"), [(1200.0, 600), (1500.0, 900)], ids=["what it may", "more, as the first one was slow"]
)
def test_of_two_squeezes_each_step_back_gives_something_and_the_lower_ones_stay_what_they_are(
    use: float, second: int
) -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), recover_s=10))
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0)
    world.uses["pod:hog"]["cpu.use"] = use
    world.go(BAD, 2.0, seconds=EFFECT)
    before = world.measures.squeezed["hog"].cpu_milli
    assert before == second
    world.go(WELL)
    while world.memory.climbs:
        changes = world.go(WELL, seconds=10)
        if not changes or changes[0].turn is Transition.HELPED:
            continue
        (change,) = changes
        now = world.measures.squeezed["hog"].cpu_milli if world.measures.squeezed else 1800
        assert before is not None
        assert now is not None
        assert now > before, change.words
        assert change.step is not None
        assert change.turn is Transition.ENDED or now == int(change.step.amount), "what is told is what is given"
        before = now
    assert before == 1800


def test_each_relapse_makes_the_way_back_slower() -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), recover_s=10, effect_s=5))

    def seconds_to_ease() -> int:
        for second in range(1, 500):
            if any(change.turn in {Transition.EASED, Transition.ENDED} for change in world.go(WELL)):
                return second
        raise AssertionError

    world.go(BAD, 4.0)
    first = seconds_to_ease()
    world.go(BAD, 4.0)
    second = seconds_to_ease()
    world.go(BAD, 4.0)
    assert first < second < seconds_to_ease()
    for _ in range(3):
        world.go(BAD, 4.0)
        assert seconds_to_ease() <= 10 * 8 + 2


@pytest.mark.parametrize("verdict", [LOST, UNSURE])
def test_an_unknown_verdict_neither_escalates_nor_releases(verdict: Verdict) -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), recover_s=5, effect_s=5))
    world.go(BAD, 4.0)
    before = world.measures
    for _ in range(100):
        assert world.go(verdict) == ()
    assert world.measures == before


def test_wellness_is_counted_anew_after_something_unknown() -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), recover_s=10))
    world.go(BAD, 4.0)
    for _ in range(9):
        world.go(WELL)
    world.go(LOST)
    for _ in range(10):
        assert not [change for change in world.go(WELL) if change.turn is Transition.EASED]


def test_what_was_done_to_a_pod_ends_with_it() -> None:
    world = World(SQUEEZE)
    world.go(BAD, 4.0)
    del world.pods["hog"]
    world.suspects = ()
    world.go(BAD, 4.0)
    assert world.measures == Restrictions()
    assert "ended: squeeze ns/hog: 1.80 -> 1.20 CPU: the pod is gone" in world.log


@pytest.mark.parametrize(
    ("response", "becomes", "why"),
    [
        (SQUEEZE, {"pod_class": PodClass.SHARED}, "the pod is no longer a BE pod"),
        (EVICT, {"pod_class": PodClass.SHARED}, "the pod is no longer a BE pod"),
        (FREEZE, {"terminating": True}, "the pod is being terminated"),
    ],
)
def test_what_was_done_to_a_pod_ends_when_it_may_not_be_done_to_it_any_more(
    response: Response, becomes: dict[str, object], why: str
) -> None:
    world = World(response)
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0)
    (began,) = [step for _, step in in_force(world.memory)]
    world.pods["hog"] = replace(world.pods["hog"], **becomes)
    world.go(UNSURE, 4.0)
    assert list(in_force(world.memory)) == []
    assert world.measures == Restrictions()
    assert world.log[-1] == f"ended: {began.describe}: {why}"
    assert world.memory.useless == {}, "which proves nothing"


def test_a_squeezed_pod_that_is_being_terminated_stays_so() -> None:
    world = World(SQUEEZE)
    world.go(BAD, 4.0)
    world.pods["hog"] = facts("hog", terminating=True)
    world.go(UNSURE, 4.0)
    assert set(world.measures.squeezed) == {"hog"}


@pytest.mark.parametrize("verdict", [BAD, UNSURE, LOST])
def test_a_response_that_the_rule_does_not_have_any_more_ends(verdict: Verdict) -> None:
    world = World(HOLD, SQUEEZE)
    world.go(BAD, 4.0)
    world.go(BAD, 4.0)
    world.responses = (HOLD,)
    world.go(verdict, 4.0)
    assert world.measures == Restrictions(budget_milli=2000, budget_reason="for victim ns/web (cpu)")
    assert "ended: squeeze ns/hog: 1.80 -> 1.20 CPU: the rule has no response squeeze any more" in world.log
    assert world.memory.useless == {}


def test_what_was_done_for_a_victim_ends_with_it() -> None:
    world = World(HOLD, SQUEEZE)
    world.go(BAD, 4.0)
    world.go(BAD, 4.0)
    del world.pods["web"]
    changes = world.go(BAD, 4.0)
    assert [change.turn for change in changes] == [Transition.ENDED, Transition.ENDED]
    assert all(change.words.endswith("rule cpu no longer evaluates ns/web") for change in changes)
    assert world.measures == Restrictions()
    assert world.memory.climbs == {}


def test_a_rule_in_shadow_shows_the_same_steps_and_takes_none() -> None:
    real, shadow = World(HOLD, SQUEEZE), World(HOLD, SQUEEZE, shadow=True)
    for _ in range(3):
        real.go(BAD, 4.0)
        changes = shadow.go(BAD, 4.0)
        assert all(change.shadow for change in changes)
    assert shadow.log == real.log
    assert shadow.measures == Restrictions()


def test_what_was_useless_by_a_clock_that_was_ahead_is_tried_again_after_the_usual_time() -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), effect_s=5, remember_s=600))
    world.suspects = (("hog", 0.9),)
    while not world.memory.useless:
        world.go(BAD, 4.0)
    year_s = 365 * 86400.0
    world.memory = replace(world.memory, useless={key: until + year_s for key, until in world.memory.useless.items()})
    world.go(BAD, 4.0)
    assert not world.measures.squeezed
    world.go(BAD, 4.0, seconds=601)
    assert world.measures.squeezed


def test_a_shadow_step_is_never_called_useless_because_it_could_not_help() -> None:
    world = World(SQUEEZE, shadow=True)
    for _ in range(5):
        world.go(BAD, 4.0, seconds=EFFECT)
    assert world.memory.useless == {}
    assert not [line for line in world.log if line.startswith("undone")]


def test_promoted_from_shadow_a_rule_starts_on_the_floor() -> None:
    world = World(HOLD, SQUEEZE, shadow=True)
    world.go(BAD, 4.0)
    world.go(BAD, 4.0)
    world.shadow = False
    ended = [change for change in world.go(BAD, 4.0) if change.turn is Transition.ENDED]
    assert len(ended) == 2
    assert all(change.shadow and change.words.endswith(": the rule enforces from now on") for change in ended)
    assert world.measures.budget_milli == 2000
    assert world.measures.squeezed == {}


def test_steps_of_a_rule_that_is_a_dry_run_from_now_on_end_for_that_reason() -> None:
    world = World(HOLD)
    world.go(BAD, 4.0)
    world.shadow = True
    ended, would = world.go(BAD, 4.0)
    assert (ended.turn, ended.shadow) == (Transition.ENDED, False)
    assert ended.words.endswith(": the rule is a dry run from now on")
    assert (would.turn, would.shadow) == (Transition.APPLIED, True)


def test_a_suspect_that_one_victim_waits_for_is_not_squeezed_for_another() -> None:
    world = World(SQUEEZE)
    world.pods["api"] = facts("api", PodClass.SHARED)
    world.go(BAD, 4.0)
    # Both findings in one moment: it is the second victim's turn while the first waits.
    frame = world.frame()
    findings = blamed(("web", "api"), 4.0)
    ascent = RuleFindings(rule="cpu", shadow=False, responses=(SQUEEZE,), findings=findings)
    memory, _ = advance(world.memory, [ascent], (frame, world.history), world.config, fresh_s=3.0)
    assert len([step for _, step in in_force(memory)]) == 1


def test_two_rules_change_one_thing_at_a_time_for_the_same_victim() -> None:
    world = World(SQUEEZE)

    def both(seconds: float) -> list[tuple[str, str]]:
        world.now += seconds
        frame = world.frame()
        world.history.add(frame)
        finding = blamed(("web",), 4.0)[0]
        suspects = (*finding.suspects, replace(finding.suspects[0], uid="calm", title="ns/calm", score=0.3))
        ascents = [
            RuleFindings(
                rule=rule,
                shadow=False,
                responses=(HOLD, SQUEEZE),
                findings=(replace(finding, rule=rule, suspects=suspects),),
            )
            for rule in ("cpu", "cache")
        ]
        world.memory, _ = advance(world.memory, ascents, (frame, world.history), world.config, fresh_s=3.0)
        return [(climb.rule, step.title) for climb, step in in_force(world.memory) if step.response is SQUEEZE]

    both(1.0)
    assert both(1.0) == [("cpu", "ns/hog")]
    assert both(EFFECT - 2) == [("cpu", "ns/hog")]
    both(2.0)
    both(EFFECT)
    assert both(1.0) == [("cpu", "ns/calm")], "the first had no effect"


def test_of_two_who_bound_the_same_pod_the_tighter_counts_and_both_are_named() -> None:
    world = World(SQUEEZE, config=varied(LadderConfig(), effect_s=2))
    world.pods["api"] = facts("api", PodClass.SHARED)
    world.go(BAD, 4.0, gap=600.0)
    saved = world.memory.climbs
    world.memory = type(world.memory)()
    world.go(BAD, 4.0, gap=1000.0, victim="api")
    world.memory = type(world.memory)(climbs={**saved, **world.memory.climbs})
    squeeze = world.measures.squeezed["hog"]
    assert squeeze.cpu_milli == 800
    assert squeeze.reason == "for victim ns/web (cpu); for victim ns/api (cpu)"


@given(
    st.lists(st.tuples(st.sampled_from([BAD, WELL, UNSURE, LOST]), st.floats(0, 10), st.sampled_from([1.0, 7.0, 40.0])))
)
def test_whatever_happens_bounds_hold(life: list[tuple[Verdict, float, float]]) -> None:
    config = varied(LadderConfig(freeze=varied(FreezeConfig(max_s=10), rest_s=20)), effect_s=5, recover_s=5)
    world = World(HOLD, SQUEEZE, PARTITION, FREEZE, EVICT, config=config, resource=ContendedResource.CACHE)
    frozen: dict[str, float] = {}
    for verdict, severity, seconds in life:
        world.go(verdict, severity, seconds=seconds, gap=None)
        steps = [step for _, step in in_force(world.memory)]
        assert sum(not step.judged for step in steps) <= 1, "one change at a time"
        for squeeze in world.measures.squeezed.values():
            assert squeeze.cpu_milli is not None
            assert squeeze.cpu_milli >= 50
        frozen = {uid: frozen.get(uid, world.now) for uid in world.measures.frozen}
        assert all(world.now - since < config.freeze.max_s for since in frozen.values())
        if world.measures.budget_milli is not None:
            assert world.measures.budget_milli <= world.uses[NODE]["be.use"], "BE work does not grow meanwhile"
