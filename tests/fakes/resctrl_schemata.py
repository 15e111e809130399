"""Groups of the resctrl model and their schemata: refused with the kernel's reasons, applied whole.

Source: kernel documentation, filesystems/resctrl; transcripts of 5.10, 6.1 and 6.12 (tests/fixtures/resctrl). What they
do not reach (pseudo-locking, CDP beside exclusive groups) follows the kernel's source.
"""

import errno
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_shapes import MB_PER_SECOND, BandwidthShape, CacheShape, Options, Release, Schema, Shape

Mode = Literal["shareable", "exclusive", "pseudo-locksetup", "pseudo-locked"]
Values = dict[str, dict[int, int]]
LETTERS: dict[Mode, str] = {"shareable": "S", "exclusive": "E", "pseudo-locked": "P"}
NO_LIMIT_MBPS = 0xFFFFFFFF
BLANKS = " \t\n\v\f\r"
STATUS_BYTES = 512
NUMBERS = {
    0: r"\+?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)\n?",
    10: r"\+?([0-9]+)\n?",
    16: r"\+?((?:0[xX])?[0-9a-fA-F]+)\n?",
}


def unsigned(text: str, base: int, bits: int = 64) -> int | None:
    """kstrtoul: digits, perhaps a plus before and a newline after them; None where the kernel refuses."""
    match = re.fullmatch(NUMBERS[base], text)
    if match is None:
        return None
    number = int(match[1], 8 if base == 0 and re.match("0[0-7]", match[1]) else base)
    return number if number < 1 << bits else None


class LastStatus:
    """``info/last_cmd_status``: 512 bytes that grow line by line. What does not fit is lost, and all after it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._text, self._full = "", False

    def puts(self, line: str) -> None:
        self._full = self._full or len(self._text) + len(line) + 2 > STATUS_BYTES
        self._text += "" if self._full else f"{line}\n"

    def refuse(self, line: str, code: int = errno.EINVAL) -> NoReturn:
        """Add the reason and raise."""
        self.puts(line)
        raise OSError(code, line)

    def refuse_first(self, *checks: tuple[object, str], code: int = errno.EINVAL) -> None:
        """Refuse with the reason of the first check that is true."""
        for refused, line in checks:
            if refused:
                self.refuse(line, code)

    def show(self) -> str:
        return self._text or "ok\n"


@dataclass(eq=False, slots=True)
class Group:
    """A control group, or a monitoring group of the control group ``parent``. Removed: not ``alive``."""

    closid: int
    rmid: int = 0
    parent: "Group | None" = None
    mode: Mode = "shareable"
    values: Values = field(default_factory=dict)
    cpus: int = 0
    mons: "list[Group]" = field(default_factory=list)
    directory: Any = None
    alive: bool = True


class Allocation:
    """The divisible resources of a machine and their division between the control groups."""

    def __init__(
        self,
        shape: Shape,
        release: Release,
        options: Options,
        status: LastStatus,
        groups: Callable[[], Iterable[Group]],
    ) -> None:
        self._mbps = MB_PER_SECOND in options
        self._cpus, self._release, self._status, self._groups = shape.cpus, release, status, groups
        bandwidths = [part for part in shape.bandwidths if release >= part.since]
        parts: list[CacheShape | BandwidthShape] = [*shape.caches, *bandwidths]
        self.schemas: list[Schema] = []
        for part in parts if release < (5, 15) else parts[::-1]:
            halves = (f"{part.name}DATA", f"{part.name}CODE")
            if {"L3": "cdp", "L2": "cdpl2"}.get(part.name) in options:
                self.schemas += [Schema(names, part, part.closids // 2) for names in (halves, halves[::-1])]
            else:
                self.schemas.append(Schema((part.name,), part, part.closids))
        # Names are as wide as those of the halves would be.
        self._name_width = max(len(part.name) + 4 * (isinstance(part, CacheShape) and part.cdp) for part in parts)
        self._width = max([(c.ways + 3) // 4 for c in shape.caches] + [len(str(part.full)) for part in bandwidths])

    def default(self) -> Values:
        """The default group's values after a mount: no limit."""
        full = {schema.name: schema.resource.full for schema in self.schemas}
        if self._mbps:
            full["MB"] = NO_LIMIT_MBPS
        return {schema.name: dict.fromkeys(schema.resource.domains, full[schema.name]) for schema in self.schemas}

    def initial(self) -> Values:
        """A new group's values: all ways that are shared or unused, and no limit. ENOSPC: no way is left."""
        values = self.default()
        for schema in self.schemas:
            cache = schema.resource
            if isinstance(cache, CacheShape):
                for domain in cache.domains:
                    shared = cache.shareable | self._masks(schema.names, domain, "shareable")
                    used = shared | self._masks(schema.names, domain, "exclusive", "pseudo-locked")
                    values[schema.name][domain] = mask = _first_run(shared | (cache.full & ~used))
                    if mask.bit_count() < self.min_bits(cache):
                        self._status.refuse(f"No space on {schema.name}:{domain}", errno.ENOSPC)
        return values

    def min_bits(self, cache: CacheShape) -> int:
        return 0 if cache.empty and self._release >= (6, 1) else 1

    def write(self, group: Group, text: str) -> None:
        """One write to a schemata file.

        All lines are parsed before any is applied, but for a limit in MB/s, which from 5.19 on is applied at once.
        """
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        self._status.clear()
        self._status.refuse_first((group.mode == "pseudo-locked", "Resource group is pseudo-locked"))
        parsed: Values = {}
        for line in text[:-1].split("\n"):
            name, colon, rest = line.partition(":")
            name = name.strip(BLANKS)
            self._status.refuse_first((not colon, "Missing ':'"), (not rest, f"Missing '{name}' value"))
            schema = next((schema for schema in self.schemas if schema.name == name), None)
            if schema is None:
                self._status.refuse(f"Unknown or unsupported resource name '{name}'")
            self._parse_line(schema, rest, group, parsed)
        if group.mode == "pseudo-locksetup":
            self._lock(group, parsed)
        for name, domains in parsed.items():
            group.values[name].update(domains)

    def _parse_line(self, schema: Schema, rest: str, group: Group, parsed: Values) -> None:
        part, values = schema.resource, parsed.setdefault(schema.name, {})
        while rest:
            word, _, rest = rest.partition(";")
            number, equals, text = word.partition("=")
            domain = unsigned(number, 10)
            if not equals or domain is None:
                self._status.refuse("Missing '=' or non-numeric domain")
            if domain not in part.domains:
                fail(errno.EINVAL)
            self._status.refuse_first((domain in values, f"Duplicate domain {domain}"))
            if isinstance(part, CacheShape):
                values[domain] = self._mask(schema, part, domain, text.strip(BLANKS), group)
            else:
                at_once = self._mbps and self._release >= (5, 19)
                limits = group.values[schema.name] if at_once else values
                limits[domain] = self._bandwidth(part, text.strip(BLANKS))

    def _bandwidth(self, part: BandwidthShape, text: str) -> int:
        new = self._release >= (6, 1)
        number = unsigned(text, 10, 32 if new else 64)
        if number is None:
            self._status.refuse(f"{'Invalid MB value' if new else 'Non-decimal digit in MB value'} {text}")
        if not self._mbps and not part.minimum <= number <= part.full:
            self._status.refuse(f"MB value {number} out of range [{part.minimum},{part.full}]")
        if self._mbps and new:
            return number
        # Before 6.1 a limit in MB/s is rounded too, and cut to 32 bits without an error.
        return part.shown(-(-number // part.step) * part.step & 0xFFFFFFFF)

    def _mask(self, schema: Schema, cache: CacheShape, domain: int, text: str, group: Group) -> int:
        mask = unsigned(text, 16)
        if mask is None:
            self._status.refuse(f"Non-hex character in the mask {text}")
        run, least = _first_run(mask), self.min_bits(cache)
        exclusive = self._masks(schema.names, domain, "exclusive", own=group)
        used = cache.shareable | exclusive | self._masks(schema.names, domain, "shareable", own=group)
        self._status.refuse_first(
            (mask > cache.full or (mask == 0 and not cache.empty), "Mask out of range"),
            (run != mask and not cache.holes, f"The mask {mask:x} has non-consecutive 1-bits"),
            (run.bit_count() < least, f"Need at least {least} bits in the mask"),
            (mask & self._masks(schema.names, domain, "pseudo-locked"), "CBM overlaps with pseudo-locked region"),
            (mask & exclusive, "Overlaps with exclusive group"),
            (group.mode != "shareable" and mask & used, "Overlaps with other group"),
        )
        return mask

    def check_exclusive(self, group: Group) -> None:
        """EINVAL: another group, or the hardware, shares a way with the group."""
        for schema in self.schemas:
            cache = schema.resource
            if isinstance(cache, CacheShape):
                for domain, mask in group.values[schema.name].items():
                    used = self._masks(schema.names, domain, "shareable", "exclusive", own=group) | cache.shareable
                    self._status.refuse_first((mask & used, "Schemata overlaps"))

    def _masks(self, names: tuple[str, ...], domain: int, *modes: Mode, own: Group | None = None) -> int:
        """The ways of all groups of these modes together, but for ``own``."""
        mask = 0
        for group in self._groups():
            if group is not own and group.mode in modes:
                for name in names:
                    mask |= group.values.get(name, {}).get(domain, 0)
        return mask

    def _lock(self, group: Group, values: Values) -> None:
        """The group holds only these ways from now on, and shows the CPUs beside them."""
        group.values, group.mode = values, "pseudo-locked"
        for schema in self.schemas:
            domains = schema.resource.domains
            share = self._cpus // len(domains)
            for domain in values.get(schema.name, {}):
                group.cpus |= ((1 << share) - 1) << share * domains.index(domain)

    # What files show

    def show(self, group: Group) -> str:
        """The schemata file."""
        if group.mode == "pseudo-locksetup":
            return "".join(f"{schema.name}:uninitialized\n" for schema in self.schemas)
        locked = group.mode == "pseudo-locked"
        width = 0 if locked else self._width
        formats = {CacheShape: f"0{width}x", BandwidthShape: f"{width}d"}
        shown = self._lines(group, lambda part, value: f"{value:{formats[type(part)]}}")
        return shown.lstrip() if locked else shown

    def size(self, group: Group) -> str:
        """The size file: bytes of cache, or the bandwidth's number."""
        scale = 0 if group.mode == "pseudo-locksetup" else 1
        return self._lines(group, lambda part, value: str(part.amount(value) * scale))

    def _lines(self, group: Group, text: Callable[[CacheShape | BandwidthShape, int], str]) -> str:
        lines = ""
        for schema in self.schemas:
            if schema.name in group.values:
                values = sorted(group.values[schema.name].items())
                shown = ";".join(f"{domain}={text(schema.resource, value)}" for domain, value in values)
                lines += f"{schema.name:>{self._name_width}}:{shown}\n"
        return lines

    def bit_usage(self, schema: Schema) -> str:
        """One letter for each way, highest first: X, H, S, E, P or 0."""
        cache, shown = schema.resource, []
        assert isinstance(cache, CacheShape)
        for domain in cache.domains:
            masks = {mode: self._masks((schema.name,), domain, mode) for mode in LETTERS}
            letters = ""
            for way in reversed(range(cache.ways)):
                letter = next((LETTERS[mode] for mode, mask in masks.items() if mask >> way & 1), "0")
                hardware = {"S": "X"}.get(letter, "H")
                letters += hardware if cache.shareable >> way & 1 else letter
            shown.append(f"{domain}={letters}")
        return ";".join(shown) + "\n"


def _first_run(mask: int) -> int:
    """The lowest unbroken run of bits."""
    return mask & ~(mask + (mask & -mask))
