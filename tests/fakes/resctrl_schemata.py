"""What a schemata write does on the resctrl model: parsed line by line, refused with the kernel's words, applied whole.

Source: kernel documentation, filesystems/resctrl; transcripts of 5.10, 6.1 and 6.12 (tests/fixtures/resctrl). What they
do not reach (pseudo-locking, CDP beside exclusive groups) follows the kernel's source.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_parts import LastStatus, unsigned
from tests.fakes.resctrl_shapes import (
    MB_PER_SECOND,
    BandwidthShape,
    CacheShape,
    Options,
    Release,
    Schema,
    Shape,
    data_width,
    name_width,
    schemas,
)

Mode = Literal["shareable", "exclusive", "pseudo-locksetup", "pseudo-locked"]
Values = dict[str, dict[int, int]]
NO_LIMIT_MBPS = 0xFFFFFFFF
BLANKS = " \t\n\v\f\r"


@dataclass(eq=False, slots=True)
class Control:
    """What a control group holds of the hardware: its number, its mode, and a value for every line and domain."""

    closid: int
    mode: Mode = "shareable"
    values: Values = field(default_factory=dict)

    @property
    def allocated(self) -> bool:
        """A locked group gives its number back; the cache it holds stays its own."""
        return self.mode != "pseudo-locked"


class Allocation:
    """The divisible part of a machine, and who has what of it."""

    def __init__(
        self,
        shape: Shape,
        release: Release,
        options: Options,
        status: LastStatus,
        groups: Callable[[], list[Control]],
    ) -> None:
        self.schemas = schemas(shape, release, options)
        self.mbps = MB_PER_SECOND in options
        self._shape = shape
        self._release = release
        self._status = status
        self._groups = groups

    @property
    def closids(self) -> int:
        """How many control groups there can be, the default one included."""
        return min(schema.closids for schema in self.schemas)

    def default(self) -> Values:
        """What the default group has after a mount."""
        return {schema.name: dict.fromkeys(schema.resource.domains, self._full(schema)) for schema in self.schemas}

    def initial(self, own: Control) -> Values:
        """What a new group gets: all ways that are shared or unused, and no limit. ENOSPC where none are left."""
        found: Values = {}
        for schema in self.schemas:
            part = schema.resource
            found[schema.name] = {}
            for domain in part.domains:
                value = self._full(schema)
                if isinstance(part, CacheShape):
                    value = _first_run(self._usable(schema, domain, own), part.ways)
                    if value.bit_count() < self.min_bits(part):
                        raise self._status.refuse(f"No space on {schema.name}:{domain}", errno.ENOSPC)
                found[schema.name][domain] = value
        return found

    def min_bits(self, cache: CacheShape) -> int:
        return 0 if cache.lenient and self._release >= (6, 1) else cache.min_bits

    def write(self, group: Control, text: str) -> None:
        """One write to a schemata file.

        All lines are parsed before any is applied, but for a limit in MB/s, which from 5.19 on holds at once.
        """
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        self._status.clear()
        if group.mode == "pseudo-locked":
            raise self._status.refuse("Resource group is pseudo-locked")
        staged: Values = {}
        for line in text[:-1].split("\n"):
            name, colon, rest = line.partition(":")
            name = name.strip(BLANKS)
            if not colon:
                raise self._status.refuse("Missing ':'")
            if not rest:
                raise self._status.refuse(f"Missing '{name}' value")
            schema = next((schema for schema in self.schemas if schema.name == name), None)
            if schema is None:
                raise self._status.refuse(f"Unknown or unsupported resource name '{name}'")
            self._parse_line(schema, rest, group, staged)
        if group.mode == "pseudo-locksetup":
            group.values = {name: dict(domains) for name, domains in staged.items()}
            group.mode = "pseudo-locked"
            return
        for name, domains in staged.items():
            group.values[name].update(domains)

    def _parse_line(self, schema: Schema, rest: str, group: Control, staged: Values) -> None:
        part = schema.resource
        if group.mode == "pseudo-locksetup" and isinstance(part, BandwidthShape):
            raise self._status.refuse("Cannot pseudo-lock MBA resource")
        while rest:
            word, _, rest = rest.partition(";")
            number, equals, value = word.partition("=")
            domain = unsigned(number, 10)
            if not equals or domain is None:
                raise self._status.refuse("Missing '=' or non-numeric domain")
            if domain not in part.domains:
                fail(errno.EINVAL)
            lines = staged.setdefault(schema.name, {})
            if domain in lines:
                raise self._status.refuse(f"Duplicate domain {domain}")
            value = value.strip(BLANKS)
            if isinstance(part, CacheShape):
                lines[domain] = self._mask(schema, part, domain, value, group)
                if group.mode == "pseudo-locksetup":
                    return
            elif self.mbps and self._release >= (5, 19):
                group.values[schema.name][domain] = self._bandwidth(part, value)
            else:
                lines[domain] = self._bandwidth(part, value)

    def _bandwidth(self, part: BandwidthShape, text: str) -> int:
        new = self._release >= (6, 1)
        number = unsigned(text, 10, 32 if new else 64)
        if number is None:
            words = "Invalid MB value" if new else "Non-decimal digit in MB value"
            raise self._status.refuse(f"{words} {text}")
        if not self.mbps and not part.minimum <= number <= part.maximum:
            raise self._status.refuse(f"MB value {number} out of range [{part.minimum},{part.maximum}]")
        if self.mbps and new:
            return number
        # Before 6.1 a limit in MB/s is rounded too, and cut to 32 bits without a word.
        rounded = -(-number // part.step) * part.step & 0xFFFFFFFF
        return part.kept(rounded) if part.bits and not self.mbps else rounded

    def _mask(self, schema: Schema, cache: CacheShape, domain: int, text: str, group: Control) -> int:
        if group.mode == "pseudo-locksetup" and any(
            domain in domains for other in self._locked() for domains in other.values.values()
        ):
            raise self._status.refuse("Pseudo-locked region in hierarchy")
        mask = unsigned(text, 16)
        if mask is None:
            raise self._status.refuse(f"Non-hex character in the mask {text}")
        least = self.min_bits(cache)
        if (mask == 0 and not cache.lenient) or mask > cache.full:
            raise self._status.refuse("Mask out of range")
        run = _first_run(mask, cache.ways)
        if run != mask and not (cache.lenient or cache.sparse):
            raise self._status.refuse(f"The mask {mask:x} has non-consecutive 1-bits")
        if run.bit_count() < least:
            raise self._status.refuse(f"Need at least {least} bits in the mask")
        if group.mode != "pseudo-locksetup" and mask & self._locked_bits(cache, domain):
            raise self._status.refuse("CBM overlaps with pseudo-locked region")
        if self._overlaps(schema, domain, mask, group, only_exclusive=True):
            raise self._status.refuse("Overlaps with exclusive group")
        if group.mode != "shareable" and self._overlaps(schema, domain, mask, group):
            raise self._status.refuse("Overlaps with other group")
        return mask

    def exclusive(self, group: Control) -> None:
        """Check that nobody, hardware included, shares a way with the group. EINVAL."""
        lines = [schema for schema in self.schemas if isinstance(schema.resource, CacheShape)]
        for schema in lines:
            for domain in schema.resource.domains:
                if self._overlaps(schema, domain, group.values[schema.name][domain], group):
                    raise self._status.refuse("Schemata overlaps")
        if not lines:
            raise self._status.refuse("Cannot be exclusive without CAT/CDP")

    def _overlaps(self, schema: Schema, domain: int, mask: int, own: Control, *, only_exclusive: bool = False) -> bool:
        assert isinstance(schema.resource, CacheShape)
        if not only_exclusive and mask & schema.resource.shareable:
            return True
        wanted = ("exclusive",) if only_exclusive else ("exclusive", "shareable")
        return any(
            mask & other.values[name][domain]
            for other in self._groups()
            if other is not own and other.mode in wanted
            for name in (schema.name, schema.peer)
            if name
        )

    def _usable(self, schema: Schema, domain: int, own: Control) -> int:
        cache = schema.resource
        assert isinstance(cache, CacheShape)
        used = wanted = cache.shareable
        for other in self._groups():
            if other is own or other.mode not in {"shareable", "exclusive"}:
                continue
            bits = other.values[schema.name][domain] | (other.values[schema.peer][domain] if schema.peer else 0)
            used |= bits
            if other.mode == "shareable":
                wanted |= bits
        used |= self._locked_bits(cache, domain)
        return wanted | (cache.full & ~used)

    def _locked(self) -> list[Control]:
        return [group for group in self._groups() if group.mode == "pseudo-locked"]

    def _locked_bits(self, cache: CacheShape, domain: int) -> int:
        bits = 0
        for group in self._locked():
            for name, domains in group.values.items():
                if name.startswith(cache.name):
                    bits |= domains.get(domain, 0)
        return bits

    def _full(self, schema: Schema) -> int:
        part = schema.resource
        if isinstance(part, CacheShape):
            return part.full
        return NO_LIMIT_MBPS if self.mbps else part.maximum

    # What files show

    def show(self, group: Control) -> str:
        """The schemata file."""
        if group.mode == "pseudo-locksetup":
            return "".join(f"{schema.name}:uninitialized\n" for schema in self.schemas)
        if group.mode == "pseudo-locked":
            return "".join(f"{name}:{domain}={mask:x}\n" for name, domain, mask in _regions(group))
        width = data_width(self._shape, self._release)

        def text(schema: Schema, value: int) -> str:
            return f"{value:0{width}x}" if isinstance(schema.resource, CacheShape) else f"{value:{width}d}"

        return self._lines(group, text)

    def size(self, group: Control) -> str:
        """The size file: bytes of cache, or the bandwidth's number."""
        if group.mode == "pseudo-locked":
            width = name_width(self._shape, self._release)
            found = ""
            for name, domain, mask in _regions(group):
                schema = next(schema for schema in self.schemas if schema.name == name)
                found += f"{name:>{width}}:{domain}={_bytes(schema, mask)}\n"
            return found
        if group.mode == "pseudo-locksetup":
            return self._lines(group, lambda _schema, _value: "0")
        return self._lines(group, lambda schema, value: str(_bytes(schema, value)))

    def _lines(self, group: Control, text: Callable[[Schema, int], str]) -> str:
        width = name_width(self._shape, self._release)
        found = ""
        for schema in self.schemas:
            shown = (f"{domain}={text(schema, value)}" for domain, value in sorted(group.values[schema.name].items()))
            found += f"{schema.name:>{width}}:{';'.join(shown)}\n"
        return found

    def bit_usage(self, schema: Schema) -> str:
        """One letter for each way, highest first: X, H, S, E, P or 0."""
        cache = schema.resource
        assert isinstance(cache, CacheShape)
        shown = []
        for domain in cache.domains:
            shared = exclusive = 0
            for group in self._groups():
                if group.mode == "shareable":
                    shared |= group.values[schema.name][domain]
                elif group.mode == "exclusive":
                    exclusive |= group.values[schema.name][domain]
            locked = self._locked_bits(cache, domain)
            letters = ""
            for bit in reversed(range(cache.ways)):
                hardware, here = cache.shareable >> bit & 1, shared >> bit & 1
                letters += (
                    ("X" if here else "H")
                    if hardware
                    else "S"
                    if here
                    else "E"
                    if exclusive >> bit & 1
                    else "P"
                    if locked >> bit & 1
                    else "0"
                )
            shown.append(f"{domain}={letters}")
        return ";".join(shown) + "\n"


def _regions(group: Control) -> Iterator[tuple[str, int, int]]:
    for name, domains in group.values.items():
        for domain, mask in domains.items():
            yield name, domain, mask


def _bytes(schema: Schema, value: int) -> int:
    part = schema.resource
    return part.size // part.ways * value.bit_count() if isinstance(part, CacheShape) else value


def _first_run(mask: int, ways: int) -> int:
    """The lowest unbroken run of bits."""
    if not mask:
        return 0
    low = mask & -mask
    end = low
    while mask & end and end < 1 << ways:
        end <<= 1
    return mask & (end - low)
