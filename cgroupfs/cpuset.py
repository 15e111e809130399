"""An immutable set of CPU (or NUMA node) numbers over one int mask, in the kernel's list format."""

import re
from collections.abc import Iterable, Iterator
from typing import Final, final

MAX_CPUS: Final = 8192
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?", re.ASCII)
_BLANKS: Final = " \t\n\v\f\r"  # the kernel's; str.strip alone knows more, such as the no-break space


@final
class CpuSet:
    """CPU numbers 0 … 8191. Value semantics: hashable, comparable by inclusion, all operators return a new set.

    Source: kernel documentation, admin-guide/cgroup-v1/cpusets ("List format").
    """

    __slots__ = ("mask",)
    mask: int

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        mask = 0
        for cpu in cpus:
            if not 0 <= cpu < MAX_CPUS:
                raise ValueError(f"CPU {cpu} is outside 0-{MAX_CPUS - 1}")
            mask |= 1 << cpu
        object.__setattr__(self, "mask", mask)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"CpuSet is immutable: cannot set {name}")

    @classmethod
    def from_mask(cls, mask: int) -> "CpuSet":
        """A set from a bit mask: bit n is CPU n."""
        if mask < 0 or mask.bit_length() > MAX_CPUS:
            raise ValueError(f"mask {mask:#x} is outside 0-{MAX_CPUS - 1}")
        made = cls.__new__(cls)
        object.__setattr__(made, "mask", mask)
        return made

    @classmethod
    def span(cls, count: int) -> "CpuSet":
        """CPUs 0 … count-1."""
        return cls.from_mask((1 << count) - 1)

    @classmethod
    def union(cls, sets: "Iterable[CpuSet]") -> "CpuSet":
        """All CPUs of some set; empty for no sets."""
        mask = 0
        for one in sets:
            mask |= one.mask
        return cls.from_mask(mask)

    @classmethod
    def parse(cls, text: str) -> "CpuSet":
        """Read the kernel's list format: ``0-3,8``, blanks and empty items allowed, ``0-31:2/4`` too.

        Errors: `ValueError` for anything the kernel would refuse with EINVAL.
        """
        mask = 0
        for item in text.split(","):
            word = item.strip(_BLANKS)
            if not word:
                continue
            match = _RANGE.fullmatch(word)
            if match is None:
                raise ValueError(f"{text.strip()!r} is not a CPU list: {word!r} is neither N nor N-M")
            first = int(match[1])
            last = int(match[2]) if match[2] is not None else first
            if last < first:
                raise ValueError(f"{text.strip()!r} is not a CPU list: {word!r} runs backwards")
            if last >= MAX_CPUS:
                raise ValueError(f"{text.strip()!r} is not a CPU list: {last} is beyond {MAX_CPUS - 1}")
            if match[3] is None:
                mask |= ((1 << (last - first + 1)) - 1) << first
                continue
            used, group = int(match[3]), int(match[4])
            if group == 0 or used > group:
                raise ValueError(f"{text.strip()!r} is not a CPU list: {word!r} uses more than its group")
            for start in range(first, last + 1, group):
                for cpu in range(start, min(start + used, last + 1)):
                    mask |= 1 << cpu
        return cls.from_mask(mask)

    def __str__(self) -> str:
        """The kernel's normal form: ascending, ranges joined, empty for no CPU."""
        parts: list[str] = []
        mask, base = self.mask, 0
        while mask:
            skip = (mask & -mask).bit_length() - 1
            mask >>= skip
            base += skip
            run = (~mask & (mask + 1)).bit_length() - 1
            parts.append(str(base) if run == 1 else f"{base}-{base + run - 1}")
            mask >>= run
            base += run
        return ",".join(parts)

    def __repr__(self) -> str:
        return f"CpuSet.parse({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        mask = self.mask
        while mask:
            low = mask & -mask
            yield low.bit_length() - 1
            mask ^= low

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __bool__(self) -> bool:
        return self.mask != 0

    def __contains__(self, cpu: int) -> bool:
        return cpu >= 0 and bool(self.mask >> cpu & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuSet) and self.mask == other.mask

    def __hash__(self) -> int:
        return hash((CpuSet, self.mask))

    def __or__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_mask(self.mask | other.mask)

    def __and__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_mask(self.mask & other.mask)

    def __sub__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_mask(self.mask & ~other.mask)

    def __xor__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_mask(self.mask ^ other.mask)

    def __le__(self, other: "CpuSet") -> bool:
        return self.mask & ~other.mask == 0

    def __lt__(self, other: "CpuSet") -> bool:
        return self <= other and self != other

    def __ge__(self, other: "CpuSet") -> bool:
        return other <= self

    def __gt__(self, other: "CpuSet") -> bool:
        return other < self

    def lowest(self, count: int) -> "CpuSet":
        """The ``count`` lowest numbers of the set, or all of it when it is smaller."""
        mask, kept = self.mask, 0
        for _ in range(min(count, len(self))):
            low = mask & -mask
            kept |= low
            mask ^= low
        return CpuSet.from_mask(kept)


EMPTY: Final = CpuSet()
