import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.policies.memory_reclaim import (
    ReclaimHistory,
    has_swap,
    missing_bytes,
    pressure_percent,
    probe,
    relieve,
)
from reconciler.signals.memory import shortages
from state.memory import GroupMemory, MemoryShortage, NodeMemoryReading, ReclaimRequest, ZoneNode

MEGA = 1 << 20
GIGA = 1 << 30
WISH = ReclaimRequest()
PLAIN = NodeMemoryReading(total_bytes=64 * GIGA, available_bytes=30 * GIGA)
SWAP = NodeMemoryReading(total_bytes=64 * GIGA, available_bytes=30 * GIGA, swap_bytes=100, swap_free_bytes=50)


def group(
    stalled_us: int | None = 0,
    *,
    used: int = 8 * GIGA,
    cache: int = 4 * GIGA,
    path: str = "/be",
    asked: int = 0,
    on: dict[int, int] | None = None,
) -> GroupMemory:
    return GroupMemory(
        path=path,
        pod_uid="u",
        at_s=106.0,
        used_bytes=used,
        droppable_bytes=cache,
        droppable_on=on,
        stalled_us=stalled_us,
        asked_bytes=asked,
    )


BEFORE = ReclaimHistory(at_s=100.0, stalled_us=0)


@pytest.mark.parametrize(
    ("before", "stalled_us", "percent"),
    [
        (None, 0, None),
        (ReclaimHistory(at_s=100.0), 5, None),
        (BEFORE, None, None),
        (BEFORE, 0, 0.0),
        (BEFORE, 60_000, 1.0),
        (BEFORE, 99_000_000, 100.0),
        (ReclaimHistory(at_s=100.0, stalled_us=9), 5, None),
        (ReclaimHistory(at_s=106.0, stalled_us=0), 5, None),
    ],
)
def test_pressure_is_the_time_waited_between_two_looks(
    before: ReclaimHistory | None, stalled_us: int | None, percent: float | None
) -> None:
    assert pressure_percent(before, group(stalled_us)) == percent


@pytest.mark.parametrize(
    ("swap", "free", "room"),
    [(0, 0, False), (100, 100, True), (100, 21, True), (100, 20, False), (100, 0, False)],
)
def test_swap_is_room_while_it_is_less_full_than_its_threshold(swap: int, free: int, room: bool) -> None:
    node = NodeMemoryReading(total_bytes=GIGA, available_bytes=GIGA, swap_bytes=swap, swap_free_bytes=free)
    assert has_swap(node, WISH) is room


@pytest.mark.parametrize(
    ("now", "node", "want"),
    [
        pytest.param(group(), PLAIN, 8 * GIGA // 100, id="no pressure: one percent"),
        pytest.param(group(600), PLAIN, 8 * GIGA // 100, id="a tenth of the bound: still all of it"),
        pytest.param(group(3000), PLAIN, int(8 * GIGA / 100 * 0.04), id="half of the bound: a twenty-fifth"),
        pytest.param(group(6000), PLAIN, None, id="at the bound: nothing"),
        pytest.param(group(None), PLAIN, None, id="unknown: nothing"),
        pytest.param(group(cache=10 * MEGA), PLAIN, 10 * MEGA, id="no swap: page cache only"),
        pytest.param(group(cache=10 * MEGA), SWAP, 8 * GIGA // 100, id="room in swap: anything"),
        pytest.param(group(cache=MEGA - 1), PLAIN, None, id="not worth it"),
        pytest.param(group(used=100 * GIGA, cache=90 * GIGA), PLAIN, 256 * MEGA, id="at most so much at once"),
        pytest.param(group(used=101 * MEGA, cache=90 * MEGA), PLAIN, None, id="what is left is too little"),
    ],
)
def test_a_probe(now: GroupMemory, node: NodeMemoryReading, want: int | None) -> None:
    action, _ = probe(BEFORE, now, node, WISH)
    assert (action.want_bytes if action is not None else None) == want
    assert action is None or action.cache_only is (node is PLAIN)


def test_who_waited_is_left_alone_for_a_while() -> None:
    action, tried = probe(BEFORE, group(6000), PLAIN, WISH)
    assert (action, tried.rest_until) == (None, 166.0)
    calm = ReclaimHistory(at_s=100.0, stalled_us=0, rest_until=106.1)
    assert probe(calm, group(), PLAIN, WISH) == (None, ReclaimHistory(at_s=106.0, stalled_us=0, rest_until=106.1))
    over = ReclaimHistory(at_s=100.0, stalled_us=0, rest_until=106.0)
    assert probe(over, group(), PLAIN, WISH)[0] is not None


@given(
    used=st.integers(0, 1 << 40),
    cache=st.integers(0, 1 << 40),
    stalled_us=st.none() | st.integers(0, 10_000_000),
    free=st.integers(0, 100),
)
def test_a_probe_is_small_and_never_where_somebody_waits(
    used: int, cache: int, stalled_us: int | None, free: int
) -> None:
    node = NodeMemoryReading(total_bytes=GIGA, available_bytes=GIGA, swap_bytes=100, swap_free_bytes=free)
    action, _ = probe(BEFORE, group(stalled_us, used=used, cache=cache), node, WISH)
    if action is not None:
        assert stalled_us is not None
        assert stalled_us < 6000
        assert MEGA <= action.want_bytes <= min(used // 100 + 1, WISH.most_bytes)
        assert action.want_bytes <= cache or free > 20


ZONES = {
    0: ZoneNode(managed_bytes=10 * GIGA, free_bytes=9 * GIGA, low_bytes=100 * MEGA, high_bytes=150 * MEGA),
    1: ZoneNode(managed_bytes=10 * GIGA, free_bytes=50 * MEGA, low_bytes=100 * MEGA, high_bytes=150 * MEGA),
}


def test_a_short_node_lacks_what_brings_it_to_rest() -> None:
    assert missing_bytes(ZONES, {0: MemoryShortage.NONE, 1: MemoryShortage.HARD}) == {
        1: ZONES[1].rest_bytes - 50 * MEGA
    }
    assert missing_bytes(ZONES, {0: MemoryShortage.SOFT, 1: MemoryShortage.SOFT}) == missing_bytes(ZONES, {}) == {}


@pytest.mark.parametrize(
    ("groups", "version", "chosen", "want"),
    [
        pytest.param([group(path="/a"), group(path="/b", cache=5 * GIGA)], 2, "/b", 150 * MEGA, id="the largest cache"),
        pytest.param([group(path="/b"), group(path="/a")], 2, "/a", 150 * MEGA, id="of equals the first by name"),
        pytest.param([group(path="/a", cache=70 * MEGA)], 2, "/a", 70 * MEGA, id="no more than there is"),
        pytest.param([group(path="/a", cache=63 * MEGA)], 2, None, 0, id="not worth it"),
        pytest.param([group(path="/a", asked=9 * GIGA)], 2, "/a", 150 * MEGA, id="v2 takes little, from anybody"),
        pytest.param([group(path="/a", asked=9 * GIGA)], 1, None, 0, id="v1 takes all: not from the modest"),
        pytest.param([group(path="/a", asked=7 * GIGA)], 1, "/a", 0, id="only from who is over"),
        pytest.param(
            [group(path="/old", cache=9 * GIGA), group(path="/a")], 2, "/a", 150 * MEGA, id="not again at once"
        ),
    ],
)
def test_whose_cache_goes(groups: list[GroupMemory], version: int, chosen: str | None, want: int) -> None:
    tried = {
        "/old": ReclaimHistory(at_s=100.0, relieved_until=106.1),
        "/a": ReclaimHistory(at_s=100.0, rest_until=200.0),
    }
    action = relieve(groups, tried, {1: 150 * MEGA}, WISH, version=version)
    assert (action.path if action is not None else None) == chosen
    assert action is None or action.want_bytes == want


def test_what_is_missing_ends_the_shortage() -> None:
    short = ZONES[1]
    given = missing_bytes(ZONES, {1: MemoryShortage.HARD})[1]
    helped = replace(short, free_bytes=short.free_bytes + given)
    assert shortages({1: helped}, {1: MemoryShortage.HARD}) == {1: MemoryShortage.NONE}
    assert shortages({1: replace(helped, free_bytes=helped.free_bytes - 1)}, {1: MemoryShortage.HARD}) == {
        1: MemoryShortage.HARD
    }


@pytest.mark.parametrize("version", [1, 2])
def test_only_cache_on_the_short_node_counts(version: int) -> None:
    elsewhere = group(path="/a", cache=5 * GIGA, on={0: 5 * GIGA, 1: 0})
    little = group(path="/b", cache=4 * GIGA, on={0: 4 * GIGA, 1: 63 * MEGA})
    there = group(path="/c", cache=2 * GIGA, on={0: GIGA, 1: GIGA})
    action = relieve([elsewhere, little, there], {}, {1: 150 * MEGA}, WISH, version=version)
    assert action is not None
    assert (action.path, action.cache_only) == ("/c", True)
    assert action.why.endswith("page cache of this container: 1 GiB there")
    assert relieve([elsewhere, little], {}, {1: 150 * MEGA}, WISH, version=version) is None
    both = relieve([elsewhere, there], {}, {0: MEGA, 1: MEGA}, WISH, version=version)
    assert both is not None
    assert both.path == "/a"


def test_no_more_is_taken_than_lies_on_the_short_node() -> None:
    action = relieve([group(on={0: 3 * GIGA, 1: 80 * MEGA})], {}, {1: 150 * MEGA}, WISH, version=2)
    assert action is not None
    assert action.want_bytes == 80 * MEGA


@pytest.mark.parametrize(
    ("used", "cache", "version", "want"),
    [
        pytest.param(70, 66, 2, None, id="it has less than that"),
        pytest.param(101, 90, 2, 1, id="down to that"),
        pytest.param(1000, 900, 2, 150, id="far from it"),
        pytest.param(150, 66, 1, None, id="v1 takes all: too much"),
        pytest.param(166, 66, 1, 0, id="v1 takes all, and enough is left"),
    ],
)
def test_relief_leaves_each_container_something(used: int, cache: int, version: int, want: int | None) -> None:
    group_memory = group(used=used * MEGA, cache=cache * MEGA)
    action = relieve([group_memory], {}, {1: 150 * MEGA}, WISH, version=version)
    assert (None if action is None else action.want_bytes // MEGA) == want


def test_nobody_is_relieved_of_anything_where_no_node_is_short() -> None:
    assert relieve([group()], {}, {}, WISH, version=2) is None
