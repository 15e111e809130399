"""The schemata file: parse it, check new values, write them in the kernel's format, compare the text read back.

A `Schemata` is resource name -> domain -> number: a bit mask for caches, the kernel's own unit for bandwidths. The text
is never compared: kernels differ in the order of lines, pad masks with zeros and numbers with blanks, and round.

Source: kernel documentation, filesystems/resctrl; transcripts of 5.10, 6.1 and 6.12.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final, TypeAlias

from cgroupfs.errors import InputError
from cgroupfs.lines import lines_of
from resctrl.capability import BandwidthCapability, BandwidthUnit, CacheCapability, Capability

Schemata: TypeAlias = Mapping[str, Mapping[int, int]]

NO_LIMIT_EIGHTHS: Final = 2048
"""AMD's largest number: no limit."""
NO_LIMIT_MBPS: Final = 4_294_967_295
"""What ``mba_MBps`` shows where nothing is limited."""
_LINE: Final = re.compile(r"\s*([A-Z0-9_]+):(.+)", re.ASCII)
# The kernel pads with zeros; no mask and no bandwidth has more digits.
_PART: Final = re.compile(r"(\d{1,10})=\s*(?:0x)?([0-9a-fA-F]{1,20})\s*", re.ASCII)


def holds_masks(name: str) -> bool:
    """Whether the resource of that name is a cache, whose numbers are hexadecimal masks."""
    return name.startswith("L") and name[1:2].isdigit()


def parse_schemata(text: str) -> dict[str, dict[int, int]]:
    """A schemata file as the kernel shows it, blanks, zeros and order as they come.

    Errors: `InputError` naming the line.
    """
    numbers: dict[str, dict[int, int]] = {}
    for line in lines_of(text):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError("schemata", line, "a line such as L3:0=fff;1=fff")
        name = match[1]
        domains: dict[int, int] = {}
        for text_of_one in match[2].rstrip().rstrip(";").split(";"):
            part = _PART.fullmatch(text_of_one)
            if part is None or int(part[1]) in domains:
                raise InputError(f"schemata: {name}", text_of_one, "each domain once, as NUMBER=VALUE")
            try:
                domains[int(part[1])] = int(part[2], 16 if holds_masks(name) else 10)
            except ValueError as exc:
                raise InputError(f"schemata: {name}", text_of_one, "a number after the =") from exc
        if name in numbers:
            raise InputError("schemata", line, "each resource once")
        numbers[name] = domains
    return numbers


def format_schemata(schemata: Schemata) -> str:
    """The text of one write: the kernel parses all lines before it applies any."""
    # Without the last newline the kernel answers EINVAL without a reason.
    return "".join(
        f"{name}:{';'.join(f'{domain}={_shown(name, value)}' for domain, value in sorted(domains.items()))}\n"
        for name, domains in sorted(schemata.items())
        if domains
    )


def _shown(name: str, value: int) -> str:
    return f"{value:x}" if holds_masks(name) else str(value)


def check_schemata(schemata: Schemata, capability: Capability) -> None:
    """Refuse values that the kernel would refuse, and an empty mask also where it would not.

    Errors: `InputError` naming the resource, the domain and the rule.
    """
    parts = {part.name: part for part in capability.divisible}
    for name, domains in sorted(schemata.items()):
        part = parts.get(name)
        if part is None:
            raise InputError("schemata", name, f"one of {', '.join(sorted(parts)) or 'none: no resource available'}")
        for domain, value in sorted(domains.items()):
            where = f"schemata: {name}:{domain}"
            if domain not in part.domains:
                raise InputError(where, domain, f"a domain of {', '.join(map(str, part.domains))}")
            expected = _mask_rule(part, value) if isinstance(part, CacheCapability) else _bandwidth_rule(part, value)
            if expected is not None:
                raise InputError(where, _shown(name, value), expected)


def _mask_rule(cache: CacheCapability, mask: int) -> str | None:
    """Why a mask is illegal; None when it is not."""
    # A group without any way cannot cache at all, which no policy intends.
    least = max(1, cache.min_ways)
    if mask <= 0 or mask & ~cache.full:
        return f"a mask of ways in {cache.full:x}, not empty"
    if mask.bit_count() < least:
        return f"at least {least} ways"
    if not cache.sparse and not contiguous(mask):
        return "contiguous ways"
    return None


def _bandwidth_rule(part: BandwidthCapability, value: int) -> str | None:
    least, most = bandwidth_bounds(part)
    return None if least <= value <= most else f"a number from {least} to {most} ({part.unit})"


def bandwidth_bounds(part: BandwidthCapability) -> tuple[int, int]:
    """Smallest and largest useful number; the largest means no limit. Units: the resource's own."""
    if part.unit is BandwidthUnit.PERCENT:
        return max(1, part.minimum), 100
    # At least one step: AMD and MB/s accept 0 literally, and such a group would never finish a memory access.
    return max(1, part.minimum, part.step), NO_LIMIT_EIGHTHS if part.unit is BandwidthUnit.EIGHTH_GBPS else (
        NO_LIMIT_MBPS
    )


def contiguous(mask: int) -> bool:
    """Whether the set bits lie side by side; the empty mask's do."""
    if mask == 0:
        return True
    low = mask // (mask & -mask)
    return low & (low + 1) == 0


def rounded(part: BandwidthCapability, value: int) -> int:
    """What the kernel makes of a number: percent and (before 6.x) MB/s are rounded up to the hardware's step."""
    least, most = bandwidth_bounds(part)
    step = max(1, part.step)
    return min(most, max(least, -(-value // step) * step))


def largest(part: BandwidthCapability) -> int:
    """No limit, as a number that is safe to write."""
    most = bandwidth_bounds(part)[1]
    # 5.10 rounds MB/s up to its step in 32 bits: the initial number overflows to 4 MB/s.
    return most - most % max(1, part.step) if part.unit is BandwidthUnit.MBPS else most


def writable(schemata: Schemata, capability: Capability) -> dict[str, dict[int, int]]:
    """The same values with every number that is beyond `largest` brought down to it: it means the same."""
    tops = {part.name: largest(part) for part in capability.bandwidths}
    return {
        name: {domain: min(value, tops.get(name, value)) for domain, value in domains.items()}
        for name, domains in schemata.items()
    }


def differing(wanted: Schemata, actual: Schemata, capability: Capability) -> dict[str, dict[int, int]]:
    """What of ``wanted`` the file does not hold, as the kernel would round it. Domains left out keep their value."""
    bandwidths = {part.name: part for part in capability.bandwidths}
    numbers: dict[str, dict[int, int]] = {}
    for name, domains in wanted.items():
        part = bandwidths.get(name)
        for domain, value in domains.items():
            present = actual.get(name, {}).get(domain)
            if present is None or not (present == value or (part is not None and _same(part, value, present))):
                numbers.setdefault(name, {})[domain] = value
    return numbers


def _same(part: BandwidthCapability, wanted: int, present: int) -> bool:
    if min(wanted, present) >= largest(part):
        return True  # both mean no limit
    nearly = max(1, part.step) if part.unit is BandwidthUnit.PERCENT else 1
    # MPAM keeps a fraction of a few bits: what it shows of a percent may be beside the step by less than one.
    return abs(present - rounded(part, wanted)) < nearly


# Percents become masks and bandwidths by arithmetic on the capability of one machine, rounded as three peers do it
# (Koordinator, rubik, goresctrl), so that the same numbers give the same masks where theirs are legal. Their result for
# a narrow range can be empty, below the hardware's minimum or with holes, and the kernel refuses it; none is so here.


def range_mask(cache: CacheCapability, start_percent: int, end_percent: int) -> int:
    """The ways from ``start`` to ``end`` percent, 0 <= start < end <= 100, never fewer than the hardware's minimum.

    A range that is too narrow grows upwards, and at the upper end of the cache downwards.
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
    100 percent, or even the minimums do not fit. Source: goresctrl's partitions, which lays them out by name; here the
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

    Where ways must be contiguous the longest run counts, the lower one of two. Peers ignore these ways.
    """
    # ``shareable_bits`` are filled by DMA, too: an online pod there loses its lines to network traffic.
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
    # Below the largest number: that would be no limit.
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
