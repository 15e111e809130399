"""What online pods need: by use, by request, by the fallback; the fading peak."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.placement.estimate import DemandEstimate, EstimateConfig, estimate, of_group, remembered, used_now
from state.cpu import GroupUse
from state.model import ContainerKind, Pod, Resources
from tests.reconciler.nodes import container, online

CONFIG = EstimateConfig()


def use(milli: int = 0, **more: Any) -> GroupUse:
    return GroupUse(cpu_milli=milli, **more)


def web(request: int | None = None, limit: int | None = None) -> Pod:
    item = container("main", requests=Resources(cpu_milli=request), limits=Resources(cpu_milli=limit))
    return online("web", item)


@pytest.mark.parametrize(
    ("of", "request_milli", "limit", "wanted"),
    [
        pytest.param(use(1000), 4000, None, DemandEstimate(1250, used=1), id="use with a quarter on top"),
        pytest.param(use(1000, peak_milli=2000.0), None, None, DemandEstimate(2500, used=1), id="its peak of late"),
        pytest.param(use(1900), None, 2000, DemandEstimate(2000, used=1), id="no margin beyond a limit"),
        pytest.param(use(2600), None, 2000, DemandEstimate(2600, used=1), id="a lent burst counts as used"),
        pytest.param(use(0), 4000, None, DemandEstimate(0, used=1), id="idle needs nothing, whatever it requested"),
        pytest.param(use(100, known_s=29.9), 4000, None, DemandEstimate(4000, young=1), id="young: its request"),
        pytest.param(
            use(6000, known_s=5.0), 4000, None, DemandEstimate(7500, young=1), id="young but busier than asked"
        ),
        pytest.param(use(100, known_s=30.0), 4000, None, DemandEstimate(125, used=1), id="no longer young"),
        pytest.param(use(100, known_s=None), 4000, None, DemandEstimate(125, used=1), id="older than the agent"),
        pytest.param(use(100, age_s=16.0), 4000, None, DemandEstimate(4000, asked=1), id="old reading: the request"),
        pytest.param(use(6000, age_s=16.0), 4000, None, DemandEstimate(7500, asked=1), id="old reading never lowers"),
        pytest.param(None, 4000, None, DemandEstimate(4000, asked=1), id="unknown: the request"),
        pytest.param(None, 4000, 2000, DemandEstimate(2000, asked=1), id="a request above the limit"),
        pytest.param(None, None, None, DemandEstimate(1000, guessed=1), id="nothing known: one CPU"),
        pytest.param(None, None, 200, DemandEstimate(200, guessed=1), id="nothing known but a small limit"),
    ],
)
def test_one_group(of: GroupUse | None, request_milli: int | None, limit: int | None, wanted: DemandEstimate) -> None:
    assert of_group(of, request_milli, limit, CONFIG) == wanted


def test_a_pod_is_told_by_its_containers_else_its_directory_else_its_requests() -> None:
    pod = online(
        "two",
        container("pause", kind=ContainerKind.SANDBOX),
        container("a", requests=Resources(cpu_milli=1000)),
        container("b", requests=Resources(cpu_milli=3000)),
    )
    a = pod.containers[1].group.path
    assert estimate([pod], {a: use(200)}, CONFIG) == DemandEstimate(3250, used=1, asked=1)
    assert estimate([pod], {pod.group.path: use(400)}, CONFIG) == DemandEstimate(500, used=1)
    assert estimate([pod], {pod.group.path: use(400, known_s=1.0)}, CONFIG) == DemandEstimate(4000, young=1)
    assert estimate([pod], {a: use(200), pod.group.path: use(400)}, CONFIG) == DemandEstimate(500, used=1)
    b = pod.containers[2].group.path
    both = {a: use(200), b: use(200, known_s=1.0), pod.group.path: use(400)}
    assert estimate([pod], both, CONFIG) == DemandEstimate(3250, used=1, young=1)
    assert estimate([pod], {}, CONFIG) == DemandEstimate(4000, asked=2)


def test_a_pods_limit_holds_only_when_every_container_has_one() -> None:
    both = online(
        "both", container("a", limits=Resources(cpu_milli=500)), container("b", limits=Resources(cpu_milli=500))
    )
    pod = online("one", container("a", limits=Resources(cpu_milli=500)), container("b"))
    assert estimate([both], {both.group.path: use(990)}, CONFIG).milli == 1000
    assert estimate([pod], {pod.group.path: use(990)}, CONFIG).milli == 1238


def test_use_of_now_knows_what_it_does_not_know() -> None:
    pods = [web(), online("other")]
    first, other = pods[0].group.path, pods[1].containers[0].group.path
    assert used_now(pods, {first: use(300), other: use(200, age_s=2.0)}, CONFIG) == (500, 2, 2, 2.0)
    assert used_now(pods, {first: use(300), other: use(200, age_s=99.0)}, CONFIG) == (300, 2, 1, 0.0)
    assert used_now(pods, {}, CONFIG) == (0, 2, 0, 0.0)


def test_words_do_not_follow_the_numbers() -> None:
    pods = [web(2000)]
    busy, idle = ({pods[0].group.path: use(milli)} for milli in (900, 10))
    assert estimate(pods, busy, CONFIG).describe == estimate(pods, idle, CONFIG).describe == "1 by use"


# The memory


def test_a_peak_fades_by_half_in_its_half_life_and_is_never_below_the_newest_use() -> None:
    first = remembered(None, {"/a": use(4000)}, 0.0, 300.0)
    later = remembered(first, {"/a": use(100)}, 300.0, 300.0)
    assert later["/a"].peak_milli == pytest.approx(2000.0)
    assert remembered(later, {"/a": use(3000)}, 1.0, 300.0)["/a"].peak_milli == 3000.0


def test_many_small_steps_fade_as_much_as_one_large_one() -> None:
    start = many = remembered(None, {"/a": use(100)}, 0.0, 300.0)
    for _ in range(300):
        many = remembered(many, {"/a": use(0)}, 1.0, 300.0)
    group_uses = remembered(start, {"/a": use(0)}, 300.0, 300.0)
    assert many["/a"].peak_milli == pytest.approx(group_uses["/a"].peak_milli)


def test_only_what_comes_after_the_start_is_young() -> None:
    first = remembered(None, {"/old": use(1)}, 0.0, 300.0)
    second = remembered(first, {"/old": use(1), "/new": use(1)}, 1.0, 300.0)
    third = remembered(second, {"/old": use(1), "/new": use(1)}, 1.0, 300.0)
    assert [first["/old"].known_s, third["/old"].known_s] == [None, None]
    assert [second["/new"].known_s, third["/new"].known_s] == [0.0, 1.0]


def test_a_reading_that_only_grows_older_fades_nothing() -> None:
    first = remembered(None, {"/a": use(4000)}, 0.0, 300.0)
    second = remembered(first, {"/a": use(100)}, 1.0, 300.0)
    assert second["/a"].peak_milli == pytest.approx(3990.8, abs=0.1)
    for age in range(1, 100):
        second = remembered(second, {"/a": use(100, age_s=float(age))}, 1.0, 300.0)
    assert second["/a"].peak_milli == pytest.approx(3990.8, abs=0.1)


def test_what_is_gone_is_forgotten() -> None:
    first = remembered(None, {"/a": use(4000)}, 0.0, 300.0)
    gone = remembered(first, {}, 1.0, 300.0)
    assert gone == {}
    again = remembered(gone, {"/a": use(10)}, 1.0, 300.0)
    assert (again["/a"].peak_milli, again["/a"].known_s) == (10.0, 0.0)


_USE = st.builds(
    GroupUse,
    cpu_milli=st.integers(0, 10**6),
    age_s=st.sampled_from([0.0, 1.0, 15.0, 15.1, 1e9]),
    peak_milli=st.none() | st.floats(0, 1e6),
    known_s=st.none() | st.floats(0, 1e4),
)
_AMOUNT = st.none() | st.integers(0, 10**6)


@given(_USE, _AMOUNT, _AMOUNT)
def test_a_reading_that_grows_old_never_lowers_the_need(of: GroupUse, asked: int | None, limit: int | None) -> None:
    fresh, old = (GroupUse(cpu_milli=of.cpu_milli, peak_milli=of.peak_milli, age_s=age) for age in (0.0, 3600.0))
    assert of_group(old, asked, limit, CONFIG).milli >= of_group(fresh, asked, limit, CONFIG).milli


@given(_USE, _AMOUNT, _AMOUNT)
def test_the_need_covers_the_use_and_nothing_beyond_a_limit(of: GroupUse, asked: int | None, limit: int | None) -> None:
    milli = of_group(of, asked, limit, CONFIG).milli
    assert milli >= of.cpu_milli
    if limit is not None:
        assert milli <= max(limit, of.cpu_milli, asked or 0)


@given(st.lists(_USE, max_size=6), st.randoms())
def test_the_order_of_pods_does_not_matter(uses: list[GroupUse], random: Any) -> None:
    pods = [online(f"p{index}") for index in range(len(uses))]
    group_uses = {pod.group.path: of for pod, of in zip(pods, uses, strict=True)}
    before = estimate(pods, group_uses, CONFIG)
    random.shuffle(pods)
    assert estimate(pods, group_uses, CONFIG) == before
