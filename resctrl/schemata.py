"""The schemata file: parse it, check new values, write them in the kernel's format, compare the text read back.

A `Schemata` is resource name -> domain -> number: a bit mask for caches, the kernel's own unit for bandwidths. The text
is never compared: kernels differ in the order of lines, pad masks with zeros and numbers with blanks, and round.

Source: kernel documentation, filesystems/resctrl; transcripts of 5.10, 6.1 and 6.12.
"""

import re
from collections.abc import Mapping
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
    """The text of one write: all lines are parsed by the kernel before any is applied.

    It ends in a newline, without which the kernel answers EINVAL and not why.
    """
    return "".join(
        f"{name}:{';'.join(f'{domain}={_shown(name, value)}' for domain, value in sorted(domains.items()))}\n"
        for name, domains in sorted(schemata.items())
        if domains
    )


def _shown(name: str, value: int) -> str:
    return f"{value:x}" if holds_masks(name) else str(value)


def check_schemata(schemata: Schemata, capability: Capability) -> None:
    """Refuse values that the kernel would refuse, and an empty mask also where it would not.

    A group without any way cannot cache at all, which no policy intends. Errors: `InputError` naming the resource, the
    domain and the rule.
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
    """Smallest and largest useful number; the largest means no limit. Units: the resource's own.

    AMD and MB/s accept 0 literally: such a group would never finish a memory access, so that one step is the minimum.

    """
    if part.unit is BandwidthUnit.PERCENT:
        return max(1, part.minimum), 100
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
    """No limit, as a number that is safe to write.

    5.10 rounds MB/s up to its step in 32 bits: the initial number overflows to 4 MB/s.
    """
    most = bandwidth_bounds(part)[1]
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
            there = actual.get(name, {}).get(domain)
            if there is None or not (there == value or (part is not None and _same(part, value, there))):
                numbers.setdefault(name, {})[domain] = value
    return numbers


def _same(part: BandwidthCapability, wanted: int, there: int) -> bool:
    if min(wanted, there) >= largest(part):
        return True
    nearly = max(1, part.step) if part.unit is BandwidthUnit.PERCENT else 1
    # MPAM keeps a fraction of a few bits: what it shows of a percent may be beside the step by less than one.
    return abs(there - rounded(part, wanted)) < nearly
