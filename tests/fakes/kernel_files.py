"""What the fake kernel's control files have in common: a group's state, and how the kernel reads numbers and lists.

Each controller's files are in kernel_cpu.py, kernel_memory.py and kernel_disks.py. Every rule there and here was seen
on a real kernel (6.18 for v1; 5.10, 6.1 and 6.12 for v2); tests/fakes/test_kernel.py runs the same operations on both
where the machine has the controller.
"""

import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from cgroupfs.cpuset import CpuSet

PAGE = mmap.PAGESIZE
PAGE_COUNTER_MAX = ((1 << 63) - 1) // PAGE


def fail(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))


@dataclass(slots=True, eq=False)
class Group:
    """One directory of one hierarchy, with the state of every controller that it could have."""

    name: str
    parent: "Group | None"
    inode: int
    children: dict[str, "Group"] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    clone_children: int = 0
    subtree: set[str] = field(default_factory=set)
    frozen: int = 0
    cpus: int = 0
    mems: int = 0
    partition: str = "member"
    partition_error: str = ""
    memory_migrate: int = 0
    quota: int = -1
    period: int = 100_000
    burst: int = 0
    shares: int = 1024
    idle: int = 0
    identity: int = 0
    qos_level: int = 0
    limits: dict[str, int] = field(default_factory=dict)
    anon: int = 0
    cache: int = 0
    home: int = 0
    oom_group: int = 0
    oom_kill_disable: int = 0
    max_pids: int | None = None
    cpu_ns: int = 0
    throttled_ns: int = 0
    disks: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    io_weight: int = 100
    bfq_weight: int = 100
    rendered: dict[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator["Group"]:
        yield self
        for child in list(self.children.values()):
            yield from child.walk()

    def above(self) -> Iterator["Group"]:
        group: Group | None = self
        while group is not None:
            yield group
            group = group.parent

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def populated(self) -> bool:
        return any(group.pids for group in self.walk())

    @property
    def usage(self) -> int:
        return sum(group.anon + group.cache for group in self.walk())


class Machine(Protocol):
    """What control files need to know of the kernel around them."""

    release: tuple[int, int]
    cpus: int
    nodes: int
    distribution: str
    disks: tuple[str, ...]

    def kill(self, pid: int) -> None: ...


class PlainController:
    """A controller whose groups start empty and accept every process."""

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine = machine
        self._version = version

    def born(self, group: Group) -> None:
        """A fresh group has no limit and no count."""

    def may_attach(self, group: Group) -> None:
        """Every process may be attached; a limit is enforced later, if at all."""


Reader = Callable[[Group], str]
Writer = Callable[[Group, str], None]
Files = Mapping[str, tuple[Reader, Writer | None]]


def kernel_int(text: str, low: int, high: int) -> int:
    """kstrtoll with base 0: one final newline is fine, blanks are not. EINVAL for text, ERANGE beyond the type."""
    match = re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)\n?", text)
    if match is None or (match[1] == "-" and low == 0):
        fail(errno.EINVAL)
    digits = match[2]
    base = 16 if digits[:2] in {"0x", "0X"} else 8 if digits[0] == "0" else 10
    number = int(digits, base) * (-1 if match[1] == "-" else 1)
    if not low <= number <= high:
        fail(errno.ERANGE)
    return number


def unsigned(text: str) -> int:
    return kernel_int(text, 0, (1 << 64) - 1)


def signed(text: str) -> int:
    return kernel_int(text, -(1 << 63), (1 << 63) - 1)


def kernel_bytes(text: str, unlimited: str) -> int:
    """page_counter_memparse: pages; wraps silently beyond 64 bit, junk is EINVAL."""
    text = text.strip()
    if text == unlimited:
        return PAGE_COUNTER_MAX
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)?([KMGTPEkmgtpe])?", text)
    if match is None:
        fail(errno.EINVAL)
    digits = match[1] or "0"
    base = 16 if digits[:2] in {"0x", "0X"} else 8 if digits[0] == "0" else 10
    shift = 10 * ("KMGTPE".index(match[2].upper()) + 1) if match[2] else 0
    number = (int(digits, base) % (1 << 64) << shift) % (1 << 64)
    return min(number // PAGE, PAGE_COUNTER_MAX)


def kernel_list(text: str, count: int) -> int:
    """bitmap_parselist: the mask. Blanks separate like commas; ``N`` is the last one, ``all`` is all."""
    text = re.sub(r"\bN\b", str(count - 1), text.strip().replace("all", f"0-{count - 1}"))
    if re.search(r"\d-\D|\d-$|^-", text):
        fail(errno.EINVAL)
    numbers = [int(number) for item in re.split(r"[\s,]+", text) for number in re.findall(r"\d+", item.split(":")[0])]
    if numbers and max(numbers) >= count and re.fullmatch(r"[\d\s,:/-]*", text):
        fail(errno.ERANGE)
    try:
        return CpuSet.parse(",".join(text.split())).mask
    except ValueError:
        fail(errno.EINVAL)


def show(mask: int) -> str:
    return f"{CpuSet.from_mask(mask)}\n"
