"""The steps that stop a suspect: freezing it for a while, and asking for its eviction."""

import pytest
from msgspec.structs import replace

from reconciler.responses.config import FreezeConfig, LadderConfig
from reconciler.responses.ladder import RuleFindings, Transition, advance, in_force
from state.measures import Response, Restrictions
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.scenes import (
    BAD,
    EVICT,
    FREEZE,
    LOST,
    SQUEEZE,
    WELL,
    World,
    blamed,
    facts,
)


def test_a_freeze_ends_in_time_whatever_happens_and_the_pod_rests() -> None:
    world = World(FREEZE, config=varied(LadderConfig(freeze=varied(FreezeConfig(max_s=20), rest_s=60)), effect_s=5))
    world.suspects = (("hog", 0.9),)
    world.go(BAD, 4.0)
    assert world.measures.frozen == {"hog": "for victim ns/web (cpu), at most 20 s"}
    for second in range(1, 20):
        world.go(LOST if second > 6 else BAD, 1.0)
        assert world.measures.frozen
    world.go(BAD, 9.0)
    assert world.measures.frozen == {}
    assert any(line == "ended: freeze ns/hog for at most 20 s: time limit reached" for line in world.log)
    world.go(BAD, 9.0, seconds=59)
    assert world.measures.frozen == {}
    world.go(BAD, 9.0, seconds=2)
    assert world.measures.frozen, "rested"


def test_a_freeze_that_ends_early_is_followed_by_a_rest_as_well() -> None:
    config = varied(LadderConfig(freeze=varied(FreezeConfig(max_s=20), rest_s=60)), effect_s=5, recover_s=5)
    for verdict in (BAD, WELL):
        world = World(FREEZE, config=config)
        world.suspects = (("hog", 0.9),)
        world.go(BAD, 4.0)
        for _ in range(8):
            world.go(verdict, 4.0 if verdict is BAD else 0.0)
        assert world.measures.frozen == {}, "useless, or the victim has recovered"
        world.memory = replace(world.memory, useless={})
        world.go(BAD, 4.0, seconds=50)
        assert world.measures.frozen == {}
        world.go(BAD, 4.0, seconds=10)
        assert world.measures.frozen, "rested"


def test_a_removed_victim_leaves_its_suspect_a_cooldown_after_the_freeze() -> None:
    world = World(FREEZE)
    world.pods["api"] = facts("api", PodClass.SHARED)
    world.go(BAD, 4.0)
    del world.pods["web"]
    world.go(BAD, 4.0)
    world.go(BAD, 4.0, victim="api")
    assert world.measures.frozen == {}


def test_a_pod_is_frozen_for_one_victim_at_a_time_so_that_its_bound_holds_for_all_of_them() -> None:
    config = varied(LadderConfig(freeze=varied(FreezeConfig(max_s=20), rest_s=60)), effect_s=5)
    world = World(FREEZE, config=config)
    names = ("web", "api", "db", "mq")
    world.pods |= {uid: facts(uid, PodClass.SHARED) for uid in names}
    frozen = []
    for second in range(80):
        world.now += 1
        frame = world.frame()
        world.history.add(frame)
        # Each is helped, so that its step is kept, and it is the next one's turn.
        findings = blamed(names, 4.0 * 0.9**second)
        ascent = RuleFindings(rule="cpu", shadow=False, responses=(FREEZE,), findings=findings)
        world.memory, _ = advance(world.memory, [ascent], (frame, world.history), config, fresh_s=3.0)
        frozen.append("hog" in world.measures.frozen)
    assert sum(frozen) == 20
    assert frozen[:20] == [True] * 20


def test_what_a_shadow_would_freeze_leaves_the_real_one_alone() -> None:
    shadow = World(FREEZE, shadow=True)
    shadow.go(BAD, 4.0)
    shadow.go(BAD, 4.0, seconds=shadow.config.freeze.max_s)
    shadow.shadow = False
    shadow.go(BAD, 4.0)
    assert shadow.measures.frozen


@pytest.mark.parametrize("response", [FREEZE, EVICT])
def test_no_pod_is_stopped_that_could_not_free_most_of_the_shortage(response: Response) -> None:
    world = World(response)
    world.suspects = (("calm", 0.9),)
    world.go(BAD, 4.0, gap=600.0)
    assert world.log == ["exhausted: no further step available"]
    world.uses["pod:calm"]["cpu.use"] = 300.0
    world.go(BAD, 4.0, gap=600.0)
    assert len(world.log) == 2


def test_an_eviction_is_requested_once_with_a_longer_wait() -> None:
    world = World(EVICT, config=varied(LadderConfig(), effect_s=5, evict_effect_s=60))
    changes = world.go(BAD, 4.0)
    assert [(change.turn, change.words) for change in changes] == [(Transition.ASKED, "evict ns/hog")]
    for _ in range(59):
        assert world.go(BAD, 4.0) == ()
    assert world.measures == Restrictions(), "the plan has no part in it"


def test_an_eviction_that_was_not_carried_out_leads_to_the_next_request() -> None:
    world = World(EVICT, config=varied(LadderConfig(), evict_effect_s=60))
    world.uses["pod:calm"]["cpu.use"] = 400.0
    world.go(BAD, 4.0)
    changes = world.go(BAD, 4.0, seconds=60)
    assert [(change.turn, change.words) for change in changes] == [
        (Transition.ENDED, "evict ns/hog: not carried out"),
        (Transition.ASKED, "evict ns/calm"),
    ]
    assert world.memory.useless == {}
    world.go(BAD, 4.0, seconds=60)
    assert world.log[-1] == "exhausted: no further step available"
    assert world.go(BAD, 4.0, seconds=300) == ()
    assert [change.words for change in world.go(BAD, 4.0, seconds=300)] == ["evict ns/hog"], "limits are over by then"


def test_a_victim_that_gets_well_before_anybody_is_evicted_was_not_helped_by_that() -> None:
    world = World(EVICT)
    world.go(BAD, 4.0)
    world.go(WELL)
    assert world.log[1:] == ["ended: evict ns/hog: ns/web has recovered"]
    assert world.memory.climbs == {}


@pytest.mark.parametrize("gone", [False, True])
def test_an_eviction_is_judged_when_its_pod_has_been_ending_long_enough(gone: bool) -> None:
    world = World(EVICT, config=varied(LadderConfig(), evict_effect_s=60))
    world.go(BAD, 4.0)
    world.go(BAD, 4.0, seconds=50)
    world.pods["hog"] = facts("hog", terminating=True)
    world.go(BAD, 4.0)
    if gone:
        del world.pods["hog"]
        world.suspects = (("hog-2", 0.9),)
        world.pods["hog-2"], world.uses["pod:hog-2"] = facts("hog-2"), {"cpu.use": 1800.0}
    else:
        # Ended in place, and started again: it is no longer ending.
        world.pods["hog"] = facts("hog")
    assert world.go(BAD, 4.0, seconds=59) == ()
    changes = world.go(BAD, 4.0)
    assert changes[0].words == "evict ns/hog: no effect (severity 4.00 -> 4.00)"
    assert changes[0].turn is Transition.ENDED, "there is nothing to undo"
    assert len(world.memory.useless) == 1
    assert not [change for change in changes[1:] if "ns/hog" in change.words], "of this workload nobody else goes"


def test_an_eviction_that_helped_ends_with_its_pod() -> None:
    world = World(EVICT)
    world.go(BAD, 4.0)
    del world.pods["hog"]
    world.go(BAD, 4.0)
    world.go(WELL)
    world.go(WELL)
    assert world.log[1:] == ["helped: evict ns/hog: severity 4.00 -> 0.00", "ended: evict ns/hog: the pod is gone"]
    assert world.memory.useless == {}


def test_a_dry_run_reports_its_pod_and_waits_for_nothing() -> None:
    world = World(EVICT, SQUEEZE)
    world.evicts = False
    changes = world.go(BAD, 4.0)
    assert [(change.turn, change.shadow, change.words) for change in changes] == [
        (Transition.ASKED, True, "evict ns/hog"),
        (Transition.APPLIED, False, "squeeze ns/hog: 1.80 -> 1.20 CPU"),
    ]
    assert [step.response for _, step in in_force(world.memory)] == [SQUEEZE]
    world.go(BAD, 4.0, seconds=LadderConfig().evict_effect_s)
    assert not [key for key in world.memory.useless if "evict" in key]
    assert len([line for line in world.log if line.startswith("asked")]) == 1
    world.go(WELL)
    assert "ended: evict ns/hog: ns/web has recovered" in world.log


def test_the_pod_of_a_dry_run_may_still_be_frozen() -> None:
    world = World(FREEZE, EVICT, config=LadderConfig(freeze=varied(FreezeConfig(max_s=10), rest_s=60)))
    world.suspects, world.evicts = (("hog", 0.9),), False
    world.go(BAD, 4.0)
    world.go(BAD, 4.0, seconds=10)
    assert "asked: evict ns/hog" in world.log
    assert world.measures.frozen == {}
    world.go(BAD, 4.0, seconds=61)
    assert world.measures.frozen


def test_the_reported_eviction_is_requested_once_dry_run_is_off() -> None:
    world = World(EVICT)
    world.evicts = False
    assert [change.shadow for change in world.go(BAD, 4.0) if change.turn is Transition.ASKED] == [True]
    world.evicts = True
    assert [change.shadow for change in world.go(BAD, 4.0) if change.turn is Transition.ASKED] == [False]
