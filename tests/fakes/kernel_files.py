"""The control files of the fake kernel: per controller, what is accepted, what is refused with which errno, what reads.

Every rule here was seen on a real kernel (6.18 for v1; 5.10, 6.1 and 6.12 for v2); tests/fakes/test_kernel.py runs the
same operations on both where the machine has the controller.
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
MAX_BANDWIDTH_US = (1 << 44) - 1
MAX_NODES = 1024
PIDS_LIMIT = 4_194_304


def fail(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))


@dataclass(slots=True, eq=False)
class Group:
    """One directory of one hierarchy, with the state of every controller that it could have."""

    name: str
    parent: "Group | None"
    inode: int
    alive: bool = True
    children: dict[str, "Group"] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    clone_children: int = 0
    subtree: set[str] = field(default_factory=set)
    frozen: int = 0
    cpus: int = 0
    mems: int = 0
    cpu_exclusive: int = 0
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
    oom_group: int = 0
    max_pids: int | None = None
    cpu_ns: int = 0
    disks: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    io_weight: int = 100
    bfq_weight: int = 100
    rendered: dict[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator["Group"]:
        yield self
        for child in list(self.children.values()):
            yield from child.walk()

    def above(self) -> Iterator["Group"]:
        """The group and its ancestors."""
        here: Group | None = self
        while here is not None:
            yield here
            here = here.parent

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


class Cpuset:
    name = "cpuset"

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine = machine
        self._version = version

    def born(self, group: Group) -> None:
        if group.parent is None:
            group.cpus = (1 << self._machine.cpus) - 1
            group.mems = (1 << self._machine.nodes) - 1
            group.cpu_exclusive = 1
        elif self._version == 1 and group.parent.clone_children:
            group.cpus, group.mems = group.parent.cpus, group.parent.mems

    def files(self, group: Group) -> Files:
        if self._version == 2:
            table: Files = {
                "cpuset.cpus.effective": (lambda group: show(self.effective(group, "cpus")), None),
                "cpuset.mems.effective": (lambda group: show(self.effective(group, "mems")), None),
            }
            if group.is_root:
                return table
            return {
                **table,
                "cpuset.cpus": (self._shown("cpus"), self._cpus),
                "cpuset.mems": (self._shown("mems"), self._mems),
            }
        return {
            "cpuset.cpus": (self._shown("cpus"), self._cpus),
            "cpuset.mems": (self._shown("mems"), self._mems),
            "cpuset.effective_cpus": (self._shown("cpus"), None),
            "cpuset.effective_mems": (self._shown("mems"), None),
            "cpuset.cpu_exclusive": (lambda group: f"{group.cpu_exclusive}\n", self._exclusive),
        }

    def may_attach(self, group: Group) -> None:
        if self._version == 1 and not (group.cpus and group.mems):
            fail(errno.ENOSPC)

    def effective(self, group: Group, kind: str) -> int:
        own = _mask(group, kind)
        if group.parent is None:
            return own
        above = self.effective(group.parent, kind)
        return own & above or above

    @staticmethod
    def _shown(kind: str) -> Reader:
        return lambda group: show(_mask(group, kind))

    def _cpus(self, group: Group, text: str) -> None:
        if group.is_root:
            fail(errno.EACCES)
        mask = kernel_list(text, self._machine.cpus)
        if self._version == 1 and mask & ~list(group.above())[-1].cpus:
            fail(errno.EINVAL)
        if mask != group.cpus:
            self._validate(group, mask, group.mems, group.cpu_exclusive)
            group.cpus = mask

    def _mems(self, group: Group, text: str) -> None:
        if group.is_root:
            fail(errno.EACCES)
        mask = kernel_list(text, MAX_NODES)
        if mask >> self._machine.nodes:
            fail(errno.EINVAL)
        if mask != group.mems:
            self._validate(group, group.cpus, mask, group.cpu_exclusive)
            group.mems = mask

    def _exclusive(self, group: Group, text: str) -> None:
        flag = int(unsigned(text) != 0)
        self._validate(group, group.cpus, group.mems, flag)
        group.cpu_exclusive = flag

    def _validate(self, group: Group, cpus: int, mems: int, exclusive: int) -> None:
        # The order matters: the kernel answers the first rule that is broken.
        if self._version == 1 or self._machine.release < (6, 1):
            for child in group.children.values():
                if child.cpus & ~cpus or child.mems & ~mems or child.cpu_exclusive > exclusive:
                    fail(errno.EBUSY)
        parent = group.parent
        if parent is None:
            return
        if self._version == 1 and (cpus & ~parent.cpus or mems & ~parent.mems or exclusive > parent.cpu_exclusive):
            fail(errno.EACCES)
        if group.populated and ((group.cpus and not cpus) or (group.mems and not mems)):
            fail(errno.ENOSPC)
        for sibling in parent.children.values():
            if sibling is not group and (exclusive or sibling.cpu_exclusive) and sibling.cpus & cpus:
                fail(errno.EINVAL)


def _mask(group: Group, kind: str) -> int:
    return group.cpus if kind == "cpus" else group.mems


class Cpu:
    name = "cpu"

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine = machine
        self._version = version

    def born(self, group: Group) -> None:
        """A fresh group has the defaults of `Group`, but for what distributions' kernels hand down."""
        if group.parent is not None:
            group.identity, group.qos_level = group.parent.identity, group.parent.qos_level

    def may_attach(self, group: Group) -> None:
        """Everything may (real-time classes aside)."""

    def files(self, group: Group) -> Files:
        release = self._machine.release
        if self._version == 1:
            table: dict[str, tuple[Reader, Writer | None]] = {
                "cpu.shares": (lambda group: f"{group.shares}\n", self._shares),
                "cpu.cfs_quota_us": (lambda group: f"{group.quota}\n", self._quota),
                "cpu.cfs_period_us": (lambda group: f"{group.period}\n", self._period),
                "cpu.stat": (lambda _: "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n", None),
            }
            burst = "cpu.cfs_burst_us"
        else:
            table = {
                "cpu.stat": (
                    lambda group: f"usage_usec {group.cpu_ns // 1000}\nnr_throttled 0\nthrottled_usec 0\n",
                    None,
                )
            }
            if group.is_root:
                return table
            table["cpu.max"] = (_shown_max, self._max)
            table["cpu.weight"] = (self._shown_weight, self._weight)
            burst = "cpu.max.burst"
        if release >= (5, 14):
            table[burst] = (lambda group: f"{group.burst}\n", self._burst)
        if release >= (5, 15):
            table["cpu.idle"] = (lambda group: f"{group.idle}\n", self._idle)
        # Not seen on a real kernel here: by Anolis' and openEuler's documentation and what their agents rely on.
        if self._machine.distribution == "anolis":
            table["cpu.bvt_warp_ns"] = (lambda group: f"{group.identity}\n", self._identity)
        if self._machine.distribution == "openeuler":
            table["cpu.qos_level"] = (lambda group: f"{group.qos_level}\n", self._qos_level)
        return table

    @staticmethod
    def _identity(group: Group, text: str) -> None:
        number = signed(text)
        if group.is_root or not -1 <= number <= 2:
            fail(errno.EINVAL)
        group.identity = number

    @staticmethod
    def _qos_level(group: Group, text: str) -> None:
        number = signed(text)
        if group.is_root or number not in {0, -1} or number > group.qos_level:
            fail(errno.EINVAL)
        group.qos_level = number

    def _shares(self, group: Group, text: str) -> None:
        number = unsigned(text)
        if group.is_root or group.idle:
            fail(errno.EINVAL)
        group.shares = min(262_144, max(2, number))

    def _weight(self, group: Group, text: str) -> None:
        number = unsigned(text)
        if not 1 <= number <= 10_000:
            fail(errno.ERANGE)
        if group.idle:
            fail(errno.EINVAL)
        group.shares = (number * 1024 + 50) // 100

    def _shown_weight(self, group: Group) -> str:
        weight = (group.shares * 100 + 512) // 1024
        return f"{max(weight, 1) if self._machine.release >= (6, 12) else weight}\n"

    def _idle(self, group: Group, text: str) -> None:
        flag = signed(text)
        if group.is_root or flag not in {0, 1}:
            fail(errno.EINVAL)
        if flag != group.idle:
            group.idle = flag
            group.shares = 3 if flag else 1024

    def _quota(self, group: Group, text: str) -> None:
        number = signed(text)
        self._set(group, -1 if number < 0 else number, group.period, group.burst)

    def _period(self, group: Group, text: str) -> None:
        self._set(group, group.quota, unsigned(text), group.burst)

    def _burst(self, group: Group, text: str) -> None:
        self._set(group, group.quota, group.period, unsigned(text))

    def _max(self, group: Group, text: str) -> None:
        words = text.split()
        if not words:
            fail(errno.EINVAL)
        number = re.match(r"\d+", words[0])
        if number is None and words[0] != "max":
            fail(errno.EINVAL)
        second = re.match(r"\d+", words[1]) if len(words) > 1 else None
        self._set(group, int(number[0]) if number else -1, int(second[0]) if second else group.period, group.burst)

    def _set(self, group: Group, quota: int, period: int, burst: int) -> None:
        if group.is_root or (0 <= quota < 1000) or not 1000 <= period <= 1_000_000 or quota > MAX_BANDWIDTH_US:
            fail(errno.EINVAL)
        if quota >= 0 and (burst > quota or burst + quota > MAX_BANDWIDTH_US):
            fail(errno.EINVAL)
        old = group.quota, group.period
        group.quota, group.period = quota, period
        if self._version == 1 and not _schedulable(next(top for top in group.above() if top.is_root), None):
            group.quota, group.period = old
            fail(errno.EINVAL)
        group.burst = burst


def _schedulable(group: Group, limit: int | None) -> bool:
    ratio = None if group.quota < 0 else (group.quota << 20) // group.period
    if ratio is not None and limit is not None and ratio > limit:
        return False
    return all(_schedulable(child, limit if ratio is None else ratio) for child in group.children.values())


def _shown_max(group: Group) -> str:
    return f"{'max' if group.quota < 0 else group.quota} {group.period}\n"


class Cpuacct:
    name = "cpuacct"

    def __init__(self, machine: Machine, version: int) -> None:
        del machine, version

    def born(self, group: Group) -> None:
        """Counters start at zero."""

    def may_attach(self, group: Group) -> None:
        """Everything may."""

    def files(self, group: Group) -> Files:
        return {"cpuacct.usage": (lambda group: f"{group.cpu_ns}\n", None)}


class Memory:
    name = "memory"

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine = machine
        self._version = version

    def born(self, group: Group) -> None:
        group.limits = dict.fromkeys(("max", "memsw", "soft", "high", "swap"), PAGE_COUNTER_MAX) | {"low": 0, "min": 0}

    def may_attach(self, group: Group) -> None:
        """Charges stay where they were made."""

    def files(self, group: Group) -> Files:
        if self._version == 1:
            return {
                "memory.usage_in_bytes": (lambda group: f"{group.usage}\n", None),
                "memory.limit_in_bytes": (_shown_v1("max"), self._limit_v1),
                "memory.memsw.limit_in_bytes": (_shown_v1("memsw"), self._memsw),
                "memory.soft_limit_in_bytes": (_shown_v1("soft"), self._soft),
                "memory.force_empty": (_no_reading, self._force_empty),
                "memory.stat": (_stat(1), None),
            }
        if group.is_root:
            return {}
        return {
            "memory.current": (lambda group: f"{group.usage}\n", None),
            "memory.max": (_shown_v2("max"), self._limit_v2),
            "memory.high": (_shown_v2("high"), self._high),
            "memory.low": (_shown_v2("low"), _set_v2("low")),
            "memory.min": (_shown_v2("min"), _set_v2("min")),
            "memory.swap.max": (_shown_v2("swap"), _set_v2("swap")),
            "memory.oom.group": (lambda group: f"{group.oom_group}\n", self._oom_group),
            "memory.stat": (_stat(2), None),
            **({"memory.reclaim": (_no_reading, self._reclaim)} if self._machine.release >= (5, 19) else {}),
        }

    def _limit_v1(self, group: Group, text: str) -> None:
        pages = kernel_bytes(text, "-1")
        if group.is_root or pages > group.limits["memsw"]:
            fail(errno.EINVAL)
        self._resize(group, "max", pages)

    def _memsw(self, group: Group, text: str) -> None:
        pages = kernel_bytes(text, "-1")
        if group.is_root or pages < group.limits["max"]:
            fail(errno.EINVAL)
        self._resize(group, "memsw", pages)

    def _soft(self, group: Group, text: str) -> None:
        group.limits["soft"] = kernel_bytes(text, "-1")

    def _resize(self, group: Group, name: str, pages: int) -> None:
        reclaim(group, pages * PAGE)
        if group.usage > pages * PAGE:
            fail(errno.EBUSY)
        group.limits[name] = pages

    def _limit_v2(self, group: Group, text: str) -> None:
        group.limits["max"] = kernel_bytes(text, "max")
        reclaim(group, group.limits["max"] * PAGE)
        # The limit stands whatever happens: what does not fit under it is killed.
        for member in group.walk():
            for pid in sorted(member.pids):
                if group.usage > group.limits["max"] * PAGE:
                    self._machine.kill(pid)

    def _high(self, group: Group, text: str) -> None:
        group.limits["high"] = kernel_bytes(text, "max")
        reclaim(group, group.limits["high"] * PAGE)

    def _reclaim(self, group: Group, text: str) -> None:
        wanted = kernel_bytes(text, "") * PAGE
        before = group.usage
        reclaim(group, before - wanted)
        if before - group.usage < wanted:
            fail(errno.EAGAIN)

    def _oom_group(self, group: Group, text: str) -> None:
        number = kernel_int(text.strip(), -(1 << 31), (1 << 31) - 1)
        if number not in (0, 1):
            fail(errno.EINVAL)
        group.oom_group = number

    def _force_empty(self, group: Group, text: str) -> None:
        del text
        if group.is_root:
            fail(errno.EINVAL)
        reclaim(group, 0)


def _no_reading(group: Group) -> str:
    del group
    fail(errno.EINVAL)


def _stat(version: int) -> Reader:
    """The lines that tell the page cache, with all groups below (on v1 their names begin with ``total_``)."""

    def read(group: Group) -> str:
        anon, cache = (sum(getattr(one, name) for one in group.walk()) for name in ("anon", "cache"))
        if version == 1:
            lines = {"cache": group.cache, "rss": group.anon, "total_cache": cache, "total_rss": anon}
            lines |= {"total_mapped_file": 0, "total_inactive_file": cache, "total_active_file": 0}
        else:
            lines = {"anon": anon, "file": cache, "file_mapped": 0, "inactive_file": cache, "active_file": 0}
        return "".join(f"{name} {number}\n" for name, number in lines.items())

    return read


def reclaim(group: Group, limit: int) -> None:
    """Drop page cache below the group until its usage fits, as far as there is any."""
    for member in group.walk():
        excess = group.usage - limit
        if excess <= 0:
            return
        member.cache -= min(member.cache, -(-excess // PAGE) * PAGE)


def _shown_v1(name: str) -> Reader:
    return lambda group: f"{group.limits[name] * PAGE}\n"


def _shown_v2(name: str) -> Reader:
    def read(group: Group) -> str:
        pages = group.limits[name]
        return "max\n" if pages == PAGE_COUNTER_MAX else f"{pages * PAGE}\n"

    return read


def _set_v2(name: str) -> Writer:
    def write(group: Group, text: str) -> None:
        group.limits[name] = kernel_bytes(text, "max")

    return write


class Pids:
    name = "pids"

    def __init__(self, machine: Machine, version: int) -> None:
        del machine, version

    def born(self, group: Group) -> None:
        """A fresh group has no limit."""

    def may_attach(self, group: Group) -> None:
        """Attaching over the limit is accepted; only fork is refused."""

    def files(self, group: Group) -> Files:
        if group.is_root:
            return {}
        return {
            "pids.max": (lambda group: "max\n" if group.max_pids is None else f"{group.max_pids}\n", self._max),
            "pids.current": (lambda group: f"{sum(len(member.pids) for member in group.walk())}\n", None),
        }

    @staticmethod
    def _max(group: Group, text: str) -> None:
        text = text.strip()
        if text == "max":
            group.max_pids = None
            return
        number = signed(text)
        if not 0 <= number <= PIDS_LIMIT:
            fail(errno.EINVAL)
        group.max_pids = number


class Blkio:
    """v1 limits per disk. Weights are BFQ's; nothing is enforced."""

    name = "blkio"

    def __init__(self, machine: Machine, version: int) -> None:
        del version
        self._machine = machine

    def born(self, group: Group) -> None:
        """A fresh group has no limits."""

    def may_attach(self, group: Group) -> None:
        """Everything may."""

    def files(self, group: Group) -> Files:
        table: dict[str, tuple[Reader, Writer | None]] = {
            f"blkio.throttle.{kind}_device": self._throttle(kind)
            for kind in ("read_bps", "write_bps", "read_iops", "write_iops")
        }
        if not group.is_root:
            table["blkio.bfq.weight"] = (lambda group: f"{group.bfq_weight}\n", _bfq_weight)
        return table

    def _throttle(self, kind: str) -> tuple[Reader, Writer]:
        def read(group: Group) -> str:
            # The newest device first.
            rows = reversed(group.disks.get(kind, {}).items())
            return "".join(f"{device} {row['']}\n" for device, row in rows if row[""])

        def write(group: Group, text: str) -> None:
            device, rest = self._device(text)
            match = re.match(r"\d+", rest)
            if match is None:
                fail(errno.EINVAL)
            most = 64 if kind.endswith("bps") else 32
            number = int(match[0]) % (1 << most)
            none = number in {0, (1 << most) - 1} and int(match[0]) != 1 << most
            group.disks.setdefault(kind, {})[device] = {"": "" if none else str(number)}

        return read, write

    def _device(self, text: str) -> tuple[str, str]:
        return disk_of(self._machine, text)


def disk_of(machine: Machine, text: str) -> tuple[str, str]:
    """The device and what follows it; like every parser of blk-cgroup, it sees the first line only."""
    match = re.match(r"\s*(\d+:\d+)\s+([^\n]*)", text)
    if match is None:
        fail(errno.EINVAL)
    if match[1] not in machine.disks:
        fail(errno.ENODEV)
    return match[1], match[2]


def _bfq_weight(group: Group, text: str) -> None:
    number = unsigned(text)
    if not 1 <= number <= 1000:
        fail(errno.ERANGE)
    group.bfq_weight = number


class Io:
    """v2 limits per disk, of a kernel with throttling, BFQ and iocost (6.1, 6.12); io.latency by its documentation."""

    name = "io"

    def __init__(self, machine: Machine, version: int) -> None:
        del version
        self._machine = machine

    def born(self, group: Group) -> None:
        """A fresh group has no limits."""

    def may_attach(self, group: Group) -> None:
        """Everything may."""

    def files(self, group: Group) -> Files:
        if group.is_root:
            return {
                "io.cost.qos": (_shown_rows("qos", ()), self._qos),
                "io.cost.model": (_shown_rows("model", ()), self._model),
            }
        return {
            "io.max": (_shown_rows("max", IO_MAX), self._max),
            "io.latency": (_shown_rows("latency", ("target",)), self._latency),
            "io.weight": (lambda group: f"default {group.io_weight}\n", self._weight),
            "io.bfq.weight": (lambda group: f"default {group.bfq_weight}\n", self._bfq_weight),
        }

    def _max(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        row = dict(group.disks.get("max", {}).get(device) or dict.fromkeys(IO_MAX, "max"))
        for word in _words_of(text, rest):
            key, _, value = word.partition("=")
            if key not in IO_MAX or not re.fullmatch(r"\d+|max", value):
                fail(errno.EINVAL)
            if value == "0":
                fail(errno.ERANGE)
            top = (1 << (64 if key.endswith("bps") else 32)) - 1
            row[key] = "max" if value == "max" or int(value) >= top else value
        group.disks.setdefault("max", {})[device] = row

    def _latency(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        match = re.fullmatch(r"target=(\d+)", rest.strip())
        if match is None:
            fail(errno.EINVAL)
        group.disks.setdefault("latency", {})[device] = {"target": "max" if match[1] == "0" else match[1]}

    def _qos(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        row = dict(group.disks.get("qos", {}).get(device) or {"enable": "0", **QOS_AUTO})
        for word in _words_of(text, rest):
            key, _, value = word.partition("=")
            if key == "enable" and value in {"0", "1"}:
                row[key] = value
            elif key == "ctrl" and value in {"auto", "user"}:
                row |= QOS_AUTO if value == "auto" else {"ctrl": "user"}
            elif key in {"rlat", "wlat"} and value.isdigit():
                row |= {"ctrl": "user", key: value}
            elif key in {"rpct", "wpct", "min", "max"} and re.fullmatch(r"\d+(\.\d+)?", value):
                low, high = (1, 10_000) if key in {"min", "max"} else (0, 100)
                if low == 0 and float(value) > high:
                    fail(errno.EINVAL)
                row |= {"ctrl": "user", key: f"{min(max(float(value), low), high):.2f}"}
            else:
                fail(errno.EINVAL)
        if float(row["min"]) > float(row["max"]):
            fail(errno.EINVAL)
        group.disks.setdefault("qos", {})[device] = row

    def _model(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        row = dict(group.disks.get("model", {}).get(device) or MODEL_AUTO)
        for word in _words_of(text, rest):
            key, _, value = word.partition("=")
            if key == "ctrl" and value in {"auto", "user"}:
                row |= MODEL_AUTO if value == "auto" else {"ctrl": "user"}
            elif key == "model" and value == "linear":
                continue
            elif key in MODEL_AUTO and value.isdigit():
                row |= {"ctrl": "user", key: value}
            else:
                fail(errno.EINVAL)
        group.disks.setdefault("model", {})[device] = row

    @staticmethod
    def _weight(group: Group, text: str) -> None:
        group.io_weight = _default_weight(text, 10_000)

    @staticmethod
    def _bfq_weight(group: Group, text: str) -> None:
        group.bfq_weight = _default_weight(text, 1_000)


IO_MAX = ("rbps", "wbps", "riops", "wiops")
QOS_AUTO = {
    "ctrl": "auto",
    "rpct": "0.00",
    "rlat": "25000",
    "wpct": "0.00",
    "wlat": "25000",
    "min": "1.00",
    "max": "10000.00",
}
MODEL_AUTO = {
    "ctrl": "auto",
    "model": "linear",
    "rbps": "488636629",
    "rseqiops": "8932",
    "rrandiops": "8518",
    "wbps": "427891549",
    "wseqiops": "28755",
    "wrandiops": "21940",
}


def _words_of(text: str, rest: str) -> list[str]:
    """The pairs of a line; a second line is no part of a pair."""
    if "\n" in text.rstrip("\n") or not rest.split():
        fail(errno.EINVAL)
    return rest.split()


def _shown_rows(kind: str, limits: tuple[str, ...]) -> Reader:
    def read(group: Group) -> str:
        rows = group.disks.get(kind, {})
        shown = {device: row for device, row in rows.items() if not limits or any(row[key] != "max" for key in limits)}
        return "".join(f"{device} {' '.join(f'{key}={row[key]}' for key in row)}\n" for device, row in shown.items())

    return read


def _default_weight(text: str, high: int) -> int:
    match = re.fullmatch(r"(?:default )?(\d+)\n?", text)
    if match is None:
        fail(errno.EINVAL)
    if not 1 <= int(match[1]) <= high:
        fail(errno.ERANGE)
    return int(match[1])


Controller = Cpuset | Cpu | Cpuacct | Memory | Pids | Blkio | Io
CONTROLLERS: Mapping[str, Callable[[Machine, int], Controller]] = {
    "cpuset": Cpuset,
    "cpu": Cpu,
    "cpuacct": Cpuacct,
    "memory": Memory,
    "pids": Pids,
    "blkio": Blkio,
    "io": Io,
}
