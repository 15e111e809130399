import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.policies.cacheplan import CACHE_LIMIT, RESCTRL, CacheLevelName, PodCacheShare, plan_cache, pod_share
from resctrl.capability import BandwidthCapability, CacheCapability, Capability, ResctrlStatus
from resctrl.schemata import check_schemata
from state.cache import CacheLayout, CacheMode, CachePlan, CacheRequest, ClassShare, ShareLevel, ShareLevels
from state.model import Pod, PodClass
from tests.reconciler.nodes import pod
from tests.resctrl.machines import AMD, AMD_L3, CDP, INTEL, INTEL_L3, INTEL_WITH_L2, MBPS, MONITOR_ONLY, ready

LOW = ShareLevels().low
BE, LS, LSR = "bypassd-be", "bypassd-ls", "bypassd-lsr"


def be(uid: str, **annotations: object) -> Pod:
    return annotated(pod(uid), annotations)


def online(uid: str, cls: PodClass = PodClass.SHARED, **annotations: object) -> Pod:
    return annotated(pod(uid, cls=cls, qos=QosClass.BURSTABLE), annotations)


def annotated(item: Pod, annotations: dict[str, object]) -> Pod:
    names = {"resctrl": RESCTRL, "limit": CACHE_LIMIT}
    return replace(
        item,
        annotations={
            names[key]: value if isinstance(value, str) else json.dumps(value) for key, value in annotations.items()
        },
    )


def llc(low: int, high: int) -> dict[str, object]:
    return {"llc": {"schemata": {"range": [low, high]}}}


def held(plan: CachePlan) -> dict[str, dict[str, dict[int, int]]]:
    return {group.name: {name: dict(values) for name, values in group.schemata.items()} for group in plan.groups}


def planned(
    wish: CacheRequest, *pods: Pod, machine: Capability = INTEL, level: ShareLevel = LOW, foreign: int = 0
) -> CachePlan:
    return plan_cache(wish, pods, machine, level=level, foreign=foreign)


ALL = (be("b"), online("s"), online("d", PodClass.DEDICATED))


def test_by_default_only_be_leaves_the_default_group() -> None:
    plan = planned(CacheRequest(), be("b"), online("s"), online("d", PodClass.DEDICATED), online("y", PodClass.SYSTEM))
    assert held(plan) == {BE: {"L3": {0: 0xF, 1: 0xF}, "MB": {0: 100, 1: 100}}}
    assert plan.members == {"b": BE, "s": "", "d": "", "y": ""}
    assert plan.default is None
    assert not plan.problems


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        pytest.param(AMD, {"L3": 0x1F, "MB": 80}, id="AMD, eighths of GB/s; slow memory is left"),
        pytest.param(MBPS, {"L3": 0xF, "MB": 10_000}, id="MB/s"),
        pytest.param(CDP, {"L3CODE": 0xF, "L3DATA": 0xF, "MB": 50}, id="code and data alike"),
        pytest.param(INTEL_WITH_L2, {"L3": 0xF}, id="the L2 is left whole"),
    ],
)
def test_every_machine_gets_its_own_numbers(machine: Capability, expected: dict[str, int]) -> None:
    wish = CacheRequest(reclaimed=ClassShare(cat_range_end_percent=30, mba_percent=50))
    group = planned(wish, be("b"), machine=machine).groups[0]
    assert {name: set(values.values()) for name, values in group.schemata.items()} == {
        name: {value} for name, value in expected.items()
    }


def test_slow_memory_and_the_l2_are_divided_when_asked() -> None:
    wish = CacheRequest(reclaimed=ClassShare(cat_range_end_percent=50, mba_percent=50), slow_bandwidth_mbps=4000)
    assert planned(wish, be("b"), machine=AMD).groups[0].schemata["SMBA"] == dict.fromkeys(range(4), 16)
    both = replace(wish, caches=("L2", "L3"))
    assert planned(both, be("b"), machine=INTEL_WITH_L2).groups[0].schemata["L2"] == dict.fromkeys(range(4), 0xF)


def test_online_classes_leave_shared_ways_by_choice() -> None:
    plan = planned(CacheRequest(avoid_shared=True), *ALL)
    assert held(plan)[LS]["L3"] == held(plan)[LSR]["L3"] == {0: 0x3FF, 1: 0x3FF}
    assert held(plan)[BE]["L3"] == {0: 0xF, 1: 0xF}


def test_exclusive_classes_share_no_way_or_say_why_they_do() -> None:
    wish = CacheRequest(
        layout=CacheLayout.EXCLUSIVE,
        dedicated=ClassShare(cat_range_start_percent=70),
        shared=ClassShare(cat_range_start_percent=30, cat_range_end_percent=70),
    )
    plan = planned(wish, *ALL)
    assert {name: values["L3"][0] for name, values in held(plan).items()} == {BE: 0x7, LS: 0x1F8, LSR: 0xE00}
    plan = planned(CacheRequest(layout=CacheLayout.EXCLUSIVE), *ALL)
    assert len(plan.problems) == 1
    assert plan.problems[0].startswith("L3 is not partitioned exclusively: cache partitions: ")
    assert held(plan)[BE]["L3"][0] == 0xF


def test_a_moving_share_follows_the_level_inside_its_place() -> None:
    wish = CacheRequest(mode=CacheMode.DYNAMIC)
    plan = planned(wish, be("b"), level=ShareLevel(cache_percent=25, mba_percent=35))
    assert held(plan)[BE] == {"L3": {0: 0x7, 1: 0x7}, "MB": {0: 40, 1: 40}}
    moved = replace(wish, reclaimed=ClassShare(cat_range_start_percent=50))
    assert held(planned(moved, be("b"), level=ShareLevel(cache_percent=25, mba_percent=35)))[BE]["L3"][0] == 0x1C0


def test_the_default_group_is_touched_only_when_it_has_a_share() -> None:
    wish = CacheRequest(system=ClassShare(cat_range_start_percent=50))
    plan = planned(wish, online("s"), be("b"))
    assert plan.default == {"L3": {0: 0xFC0, 1: 0xFC0}, "MB": {0: 100, 1: 100}}
    assert plan.members == {"s": LS, "b": BE}
    assert held(plan)[LS]["L3"][0] == 0xFFF


def test_an_online_pod_has_what_it_asks_for_and_equals_share_one_group() -> None:
    asking = llc(50, 100)
    plan = planned(CacheRequest(), online("a", resctrl=asking), online("b", resctrl=asking), online("c"))
    own = plan.members["a"]
    assert own.startswith("bypassd-own-")
    assert plan.members == {"a": own, "b": own, "c": ""}
    assert held(plan)[own] == {"L3": {0: 0xFC0, 1: 0xFC0}, "MB": {0: 100, 1: 100}}


def test_single_domains_differ_and_unknown_ones_are_named() -> None:
    asking = {
        "llc": {"schemata": {"range": [0, 50]}, "schemataPerCache": [{"cacheID": 1, "range": [50, 100]}]},
        "mb": {"schemataPerCache": [{"percent": 20}, {"cacheID": 7, "percent": 30}]},
    }
    plan = planned(CacheRequest(), online("a", resctrl=asking))
    assert held(plan)[plan.members["a"]] == {"L3": {0: 0x3F, 1: 0xFC0}, "MB": {0: 20, 1: 100}}
    assert plan.problems == ("ns/a: cache 7 of its annotation does not exist on this machine",)


def test_a_be_pod_never_gets_more_than_its_class() -> None:
    wish = CacheRequest(reclaimed=ClassShare(cat_range_end_percent=50, mba_percent=40))
    wide = {"llc": {"schemata": {"range": [25, 100]}}, "mb": {"schemata": {"percent": 90}}}
    plan = planned(wish, be("wide", resctrl=wide), be("off", resctrl=llc(60, 100)), be("less", resctrl=llc(0, 10)))
    assert held(plan)[plan.members["wide"]] == {"L3": {0: 0x38, 1: 0x38}, "MB": {0: 40, 1: 40}}
    assert plan.members["off"] == BE
    assert held(plan)[plan.members["less"]]["L3"] == {0: 0x3, 1: 0x3}


def test_levels_of_be_pods() -> None:
    pods = [be(name, limit=name) for name in ("low", "middle", "high", "max", "dynamic")]
    plan = planned(CacheRequest(), *pods, level=ShareLevel(cache_percent=42, mba_percent=22))
    assert plan.members == {
        **{name: f"bypassd-be-{name}" for name in ("low", "middle", "high", "dynamic")},
        "max": BE,
    }
    assert shown(plan) == {
        BE: (0xF, 100),
        "bypassd-be-low": (0x3, 10),
        "bypassd-be-middle": (0x7, 30),
        "bypassd-be-high": (0xF, 50),
        "bypassd-be-dynamic": (0xF, 30),
    }


def shown(plan: CachePlan) -> dict[str, tuple[int, int]]:
    return {name: (numbers["L3"][0], numbers["MB"][0]) for name, numbers in held(plan).items()}


def test_no_level_lifts_a_pod_above_its_class() -> None:
    few = CacheRequest(reclaimed=ClassShare(cat_range_end_percent=30, mba_percent=20))
    plan = planned(few, be("b"), be("high", limit="high"), be("low", limit="low"))
    assert shown(plan) == {BE: (0xF, 20), "bypassd-be-low": (0x3, 10)}
    assert plan.members["high"] == BE
    moving = CacheRequest(mode=CacheMode.DYNAMIC)
    pods = [be("b"), be("high", limit="high"), be("middle", limit="middle")]
    squeezed = planned(moving, *pods, level=ShareLevel(cache_percent=20, mba_percent=10))
    assert shown(squeezed) == {BE: (0x3, 10)}
    assert set(squeezed.members.values()) == {BE}
    grown = planned(moving, *pods, level=ShareLevel(cache_percent=42, mba_percent=30))
    assert shown(grown) == {BE: (0x1F, 30), "bypassd-be-middle": (0x7, 30)}


def test_when_groups_run_out_pods_share_by_class_and_it_shows() -> None:
    pods = [online(f"p{number}", resctrl=llc(0, 20 + 10 * number)) for number in range(5)]
    plan = planned(CacheRequest(), *pods, be("b"), foreign=3)
    assert len(plan.groups) == 4
    assert len(plan.crowded) == 2
    for uid in plan.crowded:
        assert plan.members[uid] == ""
        assert f"ns/{uid}: no free control group (4 available): uses the default group" in plan.problems


def test_a_class_without_pods_keeps_its_group_until_somebody_needs_the_place() -> None:
    existing = frozenset({BE})
    assert [group.name for group in plan_cache(CacheRequest(), [], INTEL, level=LOW, existing=existing).groups] == [BE]
    asking = [online(f"p{number}", resctrl=llc(0, 20 + 10 * number)) for number in range(7)]
    full = plan_cache(CacheRequest(), asking, INTEL, level=LOW, existing=existing)
    assert len(full.groups) == 7
    assert BE not in {group.name for group in full.groups}
    assert plan_cache(CacheRequest(), [], INTEL, level=LOW).groups == ()


def test_who_has_a_group_keeps_it() -> None:
    pods = [online(f"p{number}", resctrl=llc(0, 20 + 10 * number)) for number in range(6)]
    first = plan_cache(CacheRequest(), pods[:2], INTEL, level=LOW, foreign=5)
    existing = frozenset(group.name for group in first.groups)
    then = plan_cache(CacheRequest(), pods, INTEL, level=LOW, foreign=5, existing=existing)
    assert {uid: then.members[uid] for uid in ("p0", "p1")} == {uid: first.members[uid] for uid in ("p0", "p1")}


def test_without_any_group_left_everybody_stays_and_it_shows() -> None:
    plan = planned(CacheRequest(), be("b"), foreign=7)
    assert plan.members == {"b": ""}
    assert plan.problems == ("no free control group for class reclaimed: its pods stay in the default group",)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Capability(status=ResctrlStatus.NOT_MOUNTED, reason="not mounted"), "not mounted"),
        (MONITOR_ONLY, "no resource can be partitioned here"),
    ],
)
def test_a_machine_that_cannot_says_so(machine: Capability, words: str) -> None:
    assert planned(CacheRequest(), be("b"), machine=machine) == CachePlan(problems=(words,))


def test_annotations_of_pods_count_only_where_the_operator_lets_them() -> None:
    plan = planned(CacheRequest(pods=False), online("a", resctrl=llc(50, 100)), be("b", limit="low"))
    assert plan.members == {"a": "", "b": BE}


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        ("{", "a JSON object"),
        ({"llc": 5}, "an object with schemata or schemataPerCache"),
        ({"llc": {"schemata": {"range": [5]}}}, r"a range \[start, end\] of percents"),
        ({"llc": {"schemata": {"range": [50, 50]}}}, "0 <= start < end <= 100"),
        ({"llc": {"schemata": 7}}, "an object with range"),
        ({"llc": {"schemataPerCache": {}}}, None),
        ({"llc": {"schemataPerCache": 3}}, "schemataPerCache as a list"),
        ({"llc": {"schemataPerCache": [{"cacheID": -1, "range": [0, 5]}]}}, "a whole number from 0"),
        ({"mb": {"schemata": {"percent": 0}}}, "a whole number from 1 to 100"),
        ({"mb": {"schemata": {"percent": True}}}, "a whole number from 1 to 100"),
        ({"mb": {"schemata": {"percent": None}}}, None),
        ({"other": 1}, None),
    ],
)
def test_a_broken_annotation_is_one_message_and_no_opinion(annotation: object, words: str | None) -> None:
    share, problems = pod_share(online("a", resctrl=annotation))
    assert share == PodCacheShare()
    assert len(problems) == (0 if words is None else 1)
    assert words is None or re.search(words, problems[0])
    assert all(f"annotation {RESCTRL}" in problem for problem in problems)


def test_levels_are_for_be_pods_and_come_second() -> None:
    share, problems = pod_share(online("a", limit="low"))
    assert not share
    assert problems == (f"annotation {CACHE_LIMIT}: 'low': levels are for BE pods; this one is shared",)
    assert pod_share(be("b", limit="tiny"))[1] == (
        f"annotation {CACHE_LIMIT}: 'tiny': expected one of low, middle, high, max, dynamic",
    )
    assert pod_share(be("b", limit="low"))[0].level is CacheLevelName.LOW
    assert pod_share(be("b", limit="low", resctrl=llc(0, 10)))[0] == PodCacheShare(range=(0, 10))


@st.composite
def machines(draw: st.DrawFn) -> Capability:
    parts: list[CacheCapability | BandwidthCapability] = [
        draw(st.sampled_from([INTEL_L3, AMD_L3, replace(INTEL_L3, full=0x7FF, min_ways=2)]))
    ]
    base = draw(st.sampled_from([INTEL, AMD, MBPS]))
    return ready(*parts, *draw(st.sampled_from([(), base.bandwidths])))


@st.composite
def shares(draw: st.DrawFn) -> ClassShare:
    low = draw(st.integers(0, 99))
    return ClassShare(
        cat_range_start_percent=low,
        cat_range_end_percent=draw(st.integers(low + 1, 100)),
        mba_percent=draw(st.integers(1, 100)),
    )


@given(
    machines(),
    st.builds(
        CacheRequest,
        dedicated=shares(),
        shared=shares(),
        reclaimed=shares(),
        system=st.none() | shares(),
        layout=st.sampled_from(CacheLayout),
        mode=st.sampled_from(CacheMode),
        avoid_shared=st.booleans(),
        slow_bandwidth_mbps=st.none() | st.just(5000),
    ),
    st.lists(
        st.tuples(
            st.sampled_from([PodClass.RECLAIMED, PodClass.SHARED, PodClass.DEDICATED]),
            st.integers(0, 99),
            st.integers(1, 100),
        ),
        max_size=8,
    ),
    st.integers(0, 16),
)
def test_every_plan_is_legal_within_the_budget_and_the_same_again(
    machine: Capability, wish: CacheRequest, asking: list[tuple[PodClass, int, int]], foreign: int
) -> None:
    pods = [
        (be if cls is PodClass.RECLAIMED else online)(
            f"p{number}", resctrl={**llc(low, min(100, low + width)), "mb": {"schemata": {"percent": width}}}
        )
        for number, (cls, low, width) in enumerate(asking)
    ]
    plan = planned(wish, *pods, machine=machine, foreign=foreign)
    names = [group.name for group in plan.groups]
    assert len(names) == len(set(names)) <= max(0, machine.control_groups - 1 - foreign)
    for group in plan.groups:
        check_schemata(group.schemata, machine)
    if plan.default is not None:
        check_schemata(plan.default, machine)
    assert plan.members.keys() == {item.uid for item in pods}
    assert set(plan.members.values()) <= {"", *names}
    assert planned(wish, *reversed(pods), machine=machine, foreign=foreign) == plan
