import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.errors import InputError
from resctrl.capability import BandwidthCapability, CacheCapability
from resctrl.schemata import bandwidth, check_schemata, overlay, partitions, percent_mask, range_mask, without_shared
from tests.resctrl.machines import AMD_L3, AMD_MB, INTEL_L3, INTEL_MB, INTEL_MBPS, ready

PERCENTS = st.tuples(st.integers(0, 99), st.integers(1, 100)).filter(lambda pair: pair[0] < pair[1])


@st.composite
def caches(draw: st.DrawFn) -> CacheCapability:
    ways = draw(st.integers(1, 32))
    return CacheCapability(
        name="L3",
        full=(1 << ways) - 1,
        min_ways=draw(st.integers(0, min(ways, 4))),
        groups=4,
        shared_ways=draw(st.integers(0, (1 << ways) - 1)),
        sparse=draw(st.booleans()),
        domains=(0,),
    )


def legal(cache: CacheCapability, mask: int) -> None:
    check_schemata({"L3": {0: mask}}, ready(cache))


@pytest.mark.parametrize(
    ("ways", "start", "end", "mask"),
    [
        (12, 0, 100, 0xFFF),
        (12, 0, 30, 0xF),
        (11, 0, 30, 0xF),
        (20, 0, 30, 0x3F),
        (11, 30, 100, 0x7F0),
        (12, 50, 75, 0x1C0),
        (11, 1, 9, 0x2),
        (11, 95, 100, 0x400),
        (1, 99, 100, 0x1),
    ],
)
def test_ranges_are_rounded_up_at_both_ends_and_never_empty(ways: int, start: int, end: int, mask: int) -> None:
    assert range_mask(replace(INTEL_L3, full=(1 << ways) - 1), start, end) == mask


@pytest.mark.parametrize(
    ("ways", "percent", "mask"), [(12, 20, 0x3), (12, 30, 0x7), (12, 50, 0x3F), (11, 5, 0x1), (12, 100, 0xFFF)]
)
def test_levels_are_rounded_down_from_the_first_way(ways: int, percent: int, mask: int) -> None:
    assert percent_mask(replace(INTEL_L3, full=(1 << ways) - 1), percent) == mask


@given(caches(), PERCENTS)
def test_every_range_is_a_legal_mask(cache: CacheCapability, pair: tuple[int, int]) -> None:
    legal(cache, range_mask(cache, *pair))


@given(caches(), st.integers(1, 100), st.integers(0, 40))
def test_every_level_is_a_legal_mask(cache: CacheCapability, percent: int, first: int) -> None:
    legal(cache, percent_mask(cache, percent, first))


@given(caches(), PERCENTS, PERCENTS)
def test_a_range_inside_a_partition_is_legal_and_stays_inside(
    cache: CacheCapability, outer: tuple[int, int], inner: tuple[int, int]
) -> None:
    partition = range_mask(cache, *outer)
    mask = overlay(cache, partition, *inner)
    legal(cache, mask)
    assert mask & ~partition == 0


@given(caches(), PERCENTS)
def test_leaving_the_shared_ways_is_legal_and_only_ever_gives_up_ways(
    cache: CacheCapability, pair: tuple[int, int]
) -> None:
    mask = range_mask(cache, *pair)
    left = without_shared(cache, mask)
    legal(cache, left)
    assert left & ~mask == 0
    assert left == mask or not left & cache.shared_ways


@given(caches(), st.dictionaries(st.sampled_from("abcde"), st.integers(1, 40), min_size=1))
def test_partitions_are_legal_apart_and_in_order_or_refused(cache: CacheCapability, percents: dict[str, int]) -> None:
    least = max(1, cache.min_ways)
    if sum(percents.values()) > 100 or least * len(percents) > cache.ways:
        with pytest.raises(InputError, match="cache partitions"):
            partitions(cache, percents)
        return
    masks = partitions(cache, percents)
    assert list(masks) == list(percents)
    for mask in masks.values():
        legal(cache, mask)
    assert sum(masks.values()) == (1 << sum(mask.bit_count() for mask in masks.values())) - 1
    ordered = sorted(percents, key=lambda name: percents[name])
    sizes = [masks[name].bit_count() for name in ordered]
    assert all(size <= later + 1 for size, later in pairwise(sizes))


@pytest.mark.parametrize(
    ("percents", "masks"),
    [
        ({"be": 30, "ls": 40, "lsr": 30}, {"be": 0x7, "ls": 0x1F8, "lsr": 0xE00}),
        ({"be": 10, "ls": 90}, {"be": 0x1, "ls": 0xFFE}),
        ({"be": 1, "ls": 1, "lsr": 98}, {"be": 0x1, "ls": 0x2, "lsr": 0xFFC}),
        ({"be": 50}, {"be": 0x3F}),
    ],
)
def test_partitions_of_twelve_ways(percents: dict[str, int], masks: dict[str, int]) -> None:
    assert partitions(INTEL_L3, percents) == masks


def test_shared_ways_in_the_middle_leave_the_longer_side_and_sparse_caches_both() -> None:
    middle = replace(INTEL_L3, shared_ways=0b0000_0001_1000)
    assert without_shared(middle, 0xFFF) == 0xFE0
    assert without_shared(replace(middle, sparse=True), 0xFFF) == 0xFE7
    assert without_shared(middle, 0x018) == 0x018
    assert without_shared(AMD_L3, 0xFF) == 0xFF


@pytest.mark.parametrize(
    ("part", "percent", "full", "value"),
    [
        (INTEL_MB, 100, None, 100),
        (INTEL_MB, 51, None, 60),
        (INTEL_MB, 1, None, 10),
        (AMD_MB, 100, None, 2048),
        (AMD_MB, 50, 20_000, 80),
        (AMD_MB, 99, 1_000_000, 2047),
        (AMD_MB, 1, 1000, 1),
        (INTEL_MBPS, 100, None, 4_294_967_290),
        (INTEL_MBPS, 30, 20_000, 6000),
        (INTEL_MBPS, 1, 100, 10),
    ],
)
def test_bandwidths_in_the_hardwares_unit(
    part: BandwidthCapability, percent: int, full: int | None, value: int
) -> None:
    assert bandwidth(part, percent, full) == value


@pytest.mark.parametrize(("start", "end"), [(0, 0), (50, 50), (60, 50), (-1, 5), (0, 101)])
def test_a_range_that_is_none_is_refused(start: int, end: int) -> None:
    with pytest.raises(InputError, match=re.escape("0 <= start < end <= 100")):
        range_mask(INTEL_L3, start, end)


def test_bad_percents_and_an_unknown_full_scale_are_refused() -> None:
    with pytest.raises(InputError, match="1 to 100"):
        percent_mask(INTEL_L3, 0)
    with pytest.raises(InputError, match="1 to 100"):
        bandwidth(INTEL_MB, 0, None)
    with pytest.raises(InputError, match="what 100 percent is, as MB counts in 1/8 GB/s"):
        bandwidth(AMD_MB, 50, None)
