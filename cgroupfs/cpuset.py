"""An immutable set of CPU (or NUMA node) numbers over one int mask, in the kernel's list format."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

MAX_CPUS: Final = 8192
LONGEST_LIST: Final = 100 + 6 * MAX_CPUS
"""Characters of a list: the kernel takes no longer one (``max_write_len`` of cpuset.cpus), and no set needs one."""
MOST_STRIDES: Final = 64
"""Items such as ``0-31:2/4`` in one list: a person's shorthand, which the kernel reads and never writes."""
# Four digits name every CPU; leading zeros are allowed as in the kernel, thousands of digits are not.
_RANGE: Final = re.compile(r"(\d{1,8})(?:-(\d{1,8})(?::(\d{1,8})/(\d{1,8}))?)?", re.ASCII)
_RUN: Final = re.compile("1+")
_LONGEST_SHOWN: Final = 60
_BLANKS: Final = " \t\n\v\f\r"  # the kernel's; plain str.strip strips more, such as the no-break space


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
        return _made(mask)

    @classmethod
    def span(cls, count: int) -> "CpuSet":
        """CPUs 0 … count-1."""
        return cls.from_mask((1 << count) - 1)

    @classmethod
    def union(cls, sets: "Iterable[CpuSet]") -> "CpuSet":
        """All CPUs of some set; empty for no sets."""
        mask = 0
        for cpus in sets:
            mask |= cpus.mask
        return cls.from_mask(mask)

    @classmethod
    def parse(cls, text: str) -> "CpuSet":
        """Read the kernel's list format: ``0-3,8``, blanks and empty items allowed, ``0-31:2/4`` too.

        The text is untrusted: the work is linear in its length, which is bounded, and so are the messages.

        Errors: `ValueError` for anything the kernel would refuse with EINVAL, for a text longer than `LONGEST_LIST`,
        a number of more than eight digits, and more than `MOST_STRIDES` items with a stride.

        """
        if len(text) > LONGEST_LIST:
            raise ValueError(f"{_shown(text)} is not a CPU list: {len(text)} characters, at most {LONGEST_LIST}")
        mask = strides = 0
        for item in text.split(","):
            word = item.strip(_BLANKS)
            if not word:
                continue
            match = _RANGE.fullmatch(word)
            if match is None:
                raise ValueError(f"{_shown(text)} is not a CPU list: {_shown(word)} is neither N nor N-M")
            first_text, last_text, used_text, group_text = match.groups()
            first = int(first_text)
            last = first if last_text is None else int(last_text)
            if last < first:
                raise ValueError(f"{_shown(text)} is not a CPU list: {_shown(word)} runs backwards")
            if last >= MAX_CPUS:
                raise ValueError(f"{_shown(text)} is not a CPU list: {last} is beyond {MAX_CPUS - 1}")
            length = last - first + 1
            if used_text is None:
                mask |= ((1 << length) - 1) << first
                continue
            strides += 1
            if strides > MOST_STRIDES:
                raise ValueError(f"{_shown(text)} is not a CPU list: more than {MOST_STRIDES} items with a stride")
            used, group = int(used_text), int(group_text)
            if group == 0 or used > group:
                raise ValueError(f"{_shown(text)} is not a CPU list: {_shown(word)} uses more than its group")
            mask |= _stride(used, group, length) << first
        return cls.from_mask(mask)

    def __str__(self) -> str:
        """The kernel's normal form: ascending, ranges joined, empty for no CPU."""
        parts: list[str] = []
        # Over the digits and not by shifting: a mask of 8192 CPUs would be copied for each of its ranges.
        for run in _RUN.finditer(bin(self.mask)[:1:-1]):
            first, end = run.span()
            parts.append(str(first) if end - first == 1 else f"{first}-{end - 1}")
        return ",".join(parts)

    def __repr__(self) -> str:
        return f"CpuSet.parse({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        for run in _RUN.finditer(bin(self.mask)[:1:-1]):
            yield from range(*run.span())

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
        return _made(self.mask | other.mask)

    def __and__(self, other: "CpuSet") -> "CpuSet":
        return _made(self.mask & other.mask)

    def __sub__(self, other: "CpuSet") -> "CpuSet":
        return _made(self.mask & ~other.mask)

    def __xor__(self, other: "CpuSet") -> "CpuSet":
        return _made(self.mask ^ other.mask)

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


_new: Final = object.__new__
_set_mask: Final[Callable[[CpuSet, int], None]] = vars(CpuSet)["mask"].__set__


def _made(mask: int) -> CpuSet:
    """A set of a mask that is known to be in bounds, as that of two sets is. Plans make hundreds of thousands."""
    made = _new(CpuSet)
    _set_mask(made, mask)
    return made


EMPTY: Final = CpuSet()


def _stride(used: int, group: int, length: int) -> int:
    """The lowest ``used`` of each ``group`` bits, in the first ``length`` bits. Doubled, so in few steps."""
    pattern, width = (1 << min(used, length)) - 1, group
    while width < length:
        pattern |= pattern << width
        width *= 2
    return pattern & ((1 << length) - 1)


def _shown(text: str) -> str:
    """For a message: a bounded part of an untrusted text."""
    text = text[: _LONGEST_SHOWN + len(_BLANKS)].strip()
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
