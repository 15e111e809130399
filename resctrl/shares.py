"""From percents to masks and bandwidths: pure arithmetic on the capability of one machine.

Three peers are sources. Koordinator: a class has the ways from ``ceil(w*start/100)`` to ``ceil(w*end/100)`` of the
cache. rubik: a level has ``floor(w*percent/100)`` ways from the first. goresctrl: partitions that share no way, in
proportion to their requests, and classes laid over them. In all three the result for a narrow range can be empty, below
the hardware's minimum or with holes, and the kernel refuses it; here every result is a legal mask.

Percents are rounded as they do, so that the same numbers give the same masks where theirs were legal.
"""

from collections.abc import Mapping
from fractions import Fraction

from cgroupfs.errors import InputError
from resctrl.capability import BandwidthCapability, BandwidthUnit, CacheCapability
from resctrl.schemata import bandwidth_bounds, contiguous, largest, rounded


def range_mask(cache: CacheCapability, start_percent: int, end_percent: int) -> int:
    """The ways from ``start`` to ``end`` percent, 0 <= start < end <= 100, never fewer than the hardware's minimum.

    A range that is too narrow grows upwards, at the upper end of the cache downwards.
    Source: Koordinator's resctrl-qos (catRangeStartPercent, catRangeEndPercent), which has no guard for 1-9 % of 11
    ways (both round to 1: an empty mask).
    """
    _check_range(start_percent, end_percent)
    ways = cache.ways
    low, high = -(-ways * start_percent // 100), -(-ways * end_percent // 100)
    return _between(cache, low, high)


def percent_mask(cache: CacheCapability, percent: int, first: int = 0) -> int:
    """``percent`` of all ways, rounded down, from way number ``first``. Source: rubik's dynCache (``first`` 0)."""
    if not 0 < percent <= 100:
        raise InputError("cache share", percent, "a percent from 1 to 100")
    return _between(cache, first, first + cache.ways * percent // 100)


def partitions(cache: CacheCapability, percents: Mapping[str, int]) -> dict[str, int]:
    """Masks that share no way, laid out in the order of ``percents`` from the first way.

    The smallest request is served first, each gets its part of the rest in proportion to the remaining requests, at
    least the minimum, and the last takes the rest of the sum of requests. Errors: `InputError` when the requests exceed
    100 percent, or the minimums alone do not fit. Source: goresctrl's partitions, which lays them out by name; here the
    caller gives the order.
    """
    total = sum(percents.values())
    if any(percent <= 0 for percent in percents.values()) or total > 100:
        raise InputError("cache partitions", dict(percents), "percents above 0 that are no more than 100 together")
    least = max(1, cache.min_ways)
    left, number = max(least * len(percents), cache.ways * total // 100), total
    if left > cache.ways:
        raise InputError("cache partitions", dict(percents), f"at most {cache.ways // least} on {cache.ways} ways")
    sizes: dict[str, int] = {}
    by_size = sorted(percents, key=lambda name: (percents[name], name))
    for place, name in enumerate(by_size):
        rest = least * (len(by_size) - place - 1)
        share = int(Fraction(percents[name] * left, number)) if place < len(by_size) - 1 else left
        sizes[name] = min(max(least, share), left - rest)
        left -= sizes[name]
        number -= percents[name]
    masks: dict[str, int] = {}
    low = 0
    for name in percents:
        masks[name] = _between(cache, low, low + sizes[name])
        low += sizes[name]
    return masks


def overlay(cache: CacheCapability, partition: int, start_percent: int, end_percent: int) -> int:
    """A range inside a partition instead of the whole cache; widened to the minimum, as far as the partition extends.

    Source: goresctrl's classes inside partitions.
    """
    _check_range(start_percent, end_percent)
    bits = _bits(partition)
    ways = len(bits)
    low, high = -(-ways * start_percent // 100), -(-ways * end_percent // 100)
    return _join(bits, *_widened(low, high, ways, max(1, cache.min_ways)))


def without_shared(cache: CacheCapability, mask: int) -> int:
    """A mask without the ways that devices write into, if the rest is legal; else unchanged.

    ``shareable_bits`` are ways that DMA fills beside the CPUs: an online pod there loses its lines to network traffic.
    All peers ignore them. Where ways must be contiguous the longest run counts, the lower one of two.
    """
    return _longest(cache, mask & ~cache.shared_ways) or mask


def bandwidth(part: BandwidthCapability, percent: int, full: int | None) -> int:
    """``percent`` of a memory bandwidth as the number to write. 100 means no limit.

    ``full``: what 100 percent is where the hardware takes absolute numbers, in MB/s per domain.
    Errors: `InputError` for a percent outside 1-100, or where ``full`` is needed and None.
    Source: Koordinator's mbaPercent. It assumes steps of 10 and, on every AMD machine, 20 GB/s a domain.

    """
    if not 1 <= percent <= 100:
        raise InputError(f"{part.name} share", percent, "a percent from 1 to 100")
    least, most = bandwidth_bounds(part)
    if percent == 100:
        return largest(part)
    if part.unit is BandwidthUnit.PERCENT:
        return rounded(part, percent)
    if full is None:
        raise InputError(f"{part.name} share", percent, f"what 100 percent is, as {part.name} counts in {part.unit}")
    mbps = full * percent // 100
    return min(most - 1, max(least, mbps * 8 // 1000 if part.unit is BandwidthUnit.EIGHTH_GBPS else mbps))


def _check_range(start_percent: int, end_percent: int) -> None:
    if not 0 <= start_percent < end_percent <= 100:
        raise InputError("cache range", [start_percent, end_percent], "0 <= start < end <= 100 percent")


def _between(cache: CacheCapability, low: int, high: int) -> int:
    bits = _bits(cache.full)
    return _join(bits, *_widened(low, high, len(bits), max(1, cache.min_ways)))


def _widened(low: int, high: int, ways: int, least: int) -> tuple[int, int]:
    high = min(ways, max(high, low + least))
    return max(0, min(low, high - least)), high


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _join(bits: list[int], low: int, high: int) -> int:
    return sum(1 << bit for bit in bits[low:high])


def _longest(cache: CacheCapability, mask: int) -> int:
    """The mask where it is legal, else its longest run; 0 when that is too short."""
    least = max(1, cache.min_ways)
    if not cache.sparse and not contiguous(mask):
        runs: list[int] = []
        rest = mask
        while rest:
            # Adding the lowest set bit carries through the whole run above it.
            run = rest & ~(rest + (rest & -rest))
            runs.append(run)
            rest &= ~run
        mask = max(runs, key=lambda run: (run.bit_count(), -run))
    return mask if mask.bit_count() >= least else 0
