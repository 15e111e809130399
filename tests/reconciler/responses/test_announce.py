"""Notice before a squeeze or freeze: what is new waits, what is in force stays, and no step waits twice."""

from hypothesis import given
from hypothesis import strategies as st

from reconciler.responses.measure import announced
from state.measures import AnnouncedStep, Response, Restrictions, SqueezeLimit

LIMITS = st.builds(SqueezeLimit, cpu_milli=st.none() | st.integers(10, 2000), disk_bps=st.none() | st.integers(1, 9))
UIDS = st.sampled_from(["a", "b", "c"])
WANTED = st.builds(
    Restrictions,
    squeezed=st.dictionaries(UIDS, LIMITS),
    frozen=st.dictionaries(UIDS, st.just("why")),
    budget_milli=st.none() | st.integers(0, 9),
)
SQUEEZE = Restrictions(squeezed={"a": SqueezeLimit(cpu_milli=500)})


def test_a_squeeze_begins_when_the_notice_is_over() -> None:
    first = announced(SQUEEZE, Restrictions(), {"a"}, 10.0, 2.0)
    assert first == Restrictions(
        announced={"a": AnnouncedStep(response=Response.SQUEEZE, at_s=12.0, squeeze=SqueezeLimit(cpu_milli=500))}
    )
    assert announced(SQUEEZE, first, {"a"}, 11.9, 2.0) == first
    assert announced(SQUEEZE, first, {"a"}, 12.0, 2.0) == SQUEEZE


def test_a_tighter_squeeze_is_announced_and_the_former_one_stays_meanwhile() -> None:
    tighter = Restrictions(squeezed={"a": SqueezeLimit(cpu_milli=200)})
    wait = announced(tighter, SQUEEZE, {"a"}, 10.0, 2.0)
    assert wait.squeezed == SQUEEZE.squeezed
    assert wait.announced["a"].squeeze == SqueezeLimit(cpu_milli=200)
    assert announced(SQUEEZE, tighter, {"a"}, 10.0, 2.0) == SQUEEZE, "what is given back needs no notice"


def test_a_freeze_in_the_time_of_a_squeezes_notice_does_not_prolong_it() -> None:
    first = announced(SQUEEZE, Restrictions(), {"a"}, 10.0, 2.0)
    both = Restrictions(squeezed=SQUEEZE.squeezed, frozen={"a": "why"})
    second = announced(both, first, {"a"}, 11.0, 2.0)
    assert (second.announced["a"].response, second.announced["a"].at_s) == (Response.FREEZE, 12.0)
    assert announced(both, second, {"a"}, 12.0, 2.0) == both


def test_a_step_that_is_withdrawn_in_its_notice_never_begins() -> None:
    first = announced(SQUEEZE, Restrictions(), {"a"}, 10.0, 2.0)
    assert announced(Restrictions(), first, {"a"}, 11.0, 2.0) == Restrictions()


@given(st.lists(st.tuples(WANTED, st.floats(0.1, 3)), min_size=1, max_size=15), st.sets(UIDS), st.floats(0.1, 5))
def test_nothing_is_kept_back_for_longer_than_the_notice(
    steps: list[tuple[Restrictions, float]], listeners: set[str], notice_s: float
) -> None:
    now, before, harsher_since = 0.0, Restrictions(), dict[str, float]()
    for wanted, step in steps:
        now += step
        after = announced(wanted, before, listeners, now, notice_s)
        assert after.announced.keys() <= listeners
        assert after.budget_milli == wanted.budget_milli
        for uid in {"a", "b", "c"} - after.announced.keys():
            assert after.squeezed.get(uid) == wanted.squeezed.get(uid)
            assert after.frozen.get(uid) == wanted.frozen.get(uid)
            harsher_since.pop(uid, None)
        for uid in after.announced:
            assert (uid in after.frozen) <= (uid in before.frozen)
            assert after.squeezed.get(uid) == before.squeezed.get(uid)
            assert now - harsher_since.setdefault(uid, now) < notice_s
        before = after
