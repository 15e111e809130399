"""Which cookie each thread is to get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.actuators.core_sched.tasks import (
    CookieAssignment,
    CookieSteps,
    ObservedThreads,
    ThreadTally,
    current,
    decide,
    tally,
)

BE, WEB = "/be", "/web"


def seen(**places: dict[int, int]) -> dict[str, ObservedThreads]:
    return {f"/{name}": ObservedThreads(threads=threads) for name, threads in places.items()}


def share(group: str, cookie: int, source: int, *tids: int) -> CookieAssignment:
    return CookieAssignment(group=group, cookie=cookie, source=source, tids=tids)


@pytest.mark.parametrize(
    ("wanted", "there", "ours", "left", "expected"),
    [
        pytest.param({}, {}, {}, (), CookieSteps(), id="nothing is wanted and nothing there"),
        pytest.param({BE: "be"}, seen(be={}), {}, (), CookieSteps(), id="no threads"),
        pytest.param({BE: "be"}, {}, {}, (), CookieSteps(), id="the container is gone"),
        pytest.param(
            {BE: "be"},
            seen(be={1: 0, 2: 0}),
            {},
            (),
            CookieSteps(assignments=(share("be", 0, 0, 1, 2),)),
            id="a first cookie",
        ),
        pytest.param({BE: "be"}, seen(be={1: 7, 2: 7}), {7: "be"}, (), CookieSteps(), id="all have it"),
        pytest.param(
            {BE: "be"},
            seen(be={1: 7, 2: 0}),
            {7: "be"},
            (),
            CookieSteps(assignments=(share("be", 7, 1, 2),)),
            id="one came by exec",
        ),
        pytest.param(
            {BE: "be", "/later": "be"},
            seen(be={1: 7}, later={5: 0}),
            {7: "be"},
            (),
            CookieSteps(assignments=(share("be", 7, 1, 5),)),
            id="a container more, from the thread of another",
        ),
        pytest.param(
            {BE: "be", WEB: "web"},
            seen(be={1: 0}, web={2: 0}),
            {},
            (),
            CookieSteps(assignments=(share("be", 0, 0, 1), share("web", 0, 0, 2))),
            id="two groups",
        ),
        pytest.param(
            {BE: "be"}, seen(be={1: 7}), {}, (), CookieSteps(), id="a cookie of the program's own is left alone"
        ),
        pytest.param(
            {BE: "be"},
            seen(be={1: 9, 2: 7, 3: 7}),
            {7: "be", 9: "be"},
            (),
            CookieSteps(assignments=(share("be", 7, 2, 1),)),
            id="two cookies of one group: the one that more have",
        ),
        pytest.param(
            {WEB: "web"},
            seen(web={1: 7}),
            {7: "be"},
            (),
            CookieSteps(assignments=(share("web", 0, 0, 1),)),
            id="the pod's class has changed",
        ),
        pytest.param({}, seen(be={1: 7, 2: 0, 3: 8}), {7: "be"}, (), CookieSteps(clears=(1,)), id="wanted no more"),
        pytest.param({BE: "be"}, seen(be={1: 0}), {}, (BE,), CookieSteps(), id="held"),
        pytest.param({}, seen(be={1: 7}), {7: "be"}, (BE,), CookieSteps(), id="held where it is wanted no more"),
        pytest.param(
            {BE: "be", "/later": "be"},
            seen(be={1: 7}, later={5: 0}),
            {7: "be"},
            (BE,),
            CookieSteps(assignments=(share("be", 7, 1, 5),)),
            id="a held container still shows which cookie it is",
        ),
        pytest.param(
            {BE: "be"},
            seen(be={1: 0}, web={2: 7}),
            {7: "be"},
            (),
            CookieSteps(assignments=(share("be", 0, 0, 1),), clears=(2,)),
            id="a cookie that only a stranger still has is not taken up",
        ),
    ],
)
def test_what_is_to_be_done(
    wanted: dict[str, str],
    there: dict[str, ObservedThreads],
    ours: dict[int, str],
    left: tuple[str, ...],
    expected: CookieSteps,
) -> None:
    assert decide(wanted, there, ours, left) == expected


def test_a_container_is_counted() -> None:
    now = {"be": 7}
    assert tally(
        "be", ObservedThreads(threads={1: 7, 2: 7, 3: 0, 4: 9, 5: 8}), now, {7: "be", 9: "web"}
    ) == ThreadTally(right=2, foreign=1, wrong=2)
    assert tally("be", ObservedThreads(threads={1: 0}), {}, {}) == ThreadTally(wrong=1)


PATHS = ("/a", "/b", "/c")
COOKIES = st.integers(0, 5)


@given(
    wanted=st.dictionaries(st.sampled_from(PATHS), st.sampled_from(("be", "web"))),
    threads=st.dictionaries(st.sampled_from(PATHS), st.lists(COOKIES, max_size=4), min_size=1),
    ours=st.dictionaries(st.integers(1, 5), st.sampled_from(("be", "web", "old"))),
)
def test_doing_it_leads_to_a_state_where_nothing_is_left_to_do(
    wanted: dict[str, str], threads: dict[str, list[int]], ours: dict[int, str]
) -> None:
    numbers = iter(range(1, 100))
    there = {path: {next(numbers): cookie for cookie in cookies} for path, cookies in threads.items()}
    first = decide(wanted, {path: ObservedThreads(threads=here) for path, here in there.items()}, ours)
    given_out = dict.fromkeys(first.clears, 0)
    for new, assignment in enumerate(first.assignments, start=1000):
        cookie = assignment.cookie or new
        ours = {**ours, cookie: assignment.group}
        given_out |= dict.fromkeys(assignment.tids, cookie)
    after = {
        path: ObservedThreads(threads={tid: given_out.get(tid, cookie) for tid, cookie in here.items()})
        for path, here in there.items()
    }
    assert not decide(wanted, after, ours)
    now = current(wanted, after, ours)
    assert len(set(now.values())) == len(now)
    for path, observed_threads in after.items():
        for cookie in observed_threads.threads.values():
            # A foreign one, the group's, or (where none is wanted) none.
            assert cookie not in ours or cookie == now.get(wanted.get(path, ""), 0)
