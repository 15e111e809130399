"""The catalog of knobs: every value this agent may set, in one unit, with its file and text form on cgroup v1 and v2.

A knob's value is a `CpuSet` (cpu.set, cpu.mems), a `DeviceLimits` (disks), an int in the knob's unit, or None for "no
limit". Everything here is pure: text in, value out. Sources: kernel documentation admin-guide/cgroup-v1/* and
admin-guide/cgroup-v2, and measurements on kernels 5.10, 6.1, 6.12 and 6.18.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, Literal, NamedTuple, final

from cgroupfs.codecs import (
    BURST,
    CLASS,
    FLAG,
    FROZEN_V1,
    IDENTITY,
    IDLE,
    LIMIT_V1,
    LIMIT_V2,
    NO_LIMIT_V1,
    PERIOD_V1,
    PERIOD_V2,
    PIDS,
    PROTECTION,
    QOS,
    QUOTA_V1,
    QUOTA_V2,
    SET,
    SHARES,
    SWAP_V2,
    WEIGHT,
    Codec,
    DeviceLimits,
    Value,
    Version,
)
from cgroupfs.cpuset import CpuSet
from cgroupfs.device_codecs import (
    BFQ_WEIGHT_V1,
    BFQ_WEIGHT_V2,
    CFQ_WEIGHT,
    IO_COST_MODEL,
    IO_COST_QOS,
    IO_LATENCY,
    IO_MAX,
    IO_WEIGHT,
    READ_BPS,
    READ_IOPS,
    WRITE_BPS,
    WRITE_IOPS,
)


class ParentRule(StrEnum):
    """What a parent's value demands of its children's."""

    NONE = "none"
    SUBSET = "child inside parent"
    RATIO = "child ratio at most parent ratio"


class KnobForm(NamedTuple):
    """A knob on one cgroup version: its file, its text form, the text of a fresh group, the first kernel with it."""

    file: str
    codec: Codec
    default: str
    since: str = "2.6.24"
    rule: ParentRule = ParentRule.NONE


_KEPT: Final = 64
"""Texts up to this length are decoded once: the files of a node's groups have a few dozen different ones."""


@lru_cache(maxsize=512)
def _decoded(decode: Callable[[str], Value], text: str) -> Value:
    return decode(text)


@lru_cache(maxsize=512)
def _normal(normal: Callable[[str], str], text: str) -> str:
    return normal(text)


@final
class Knob(NamedTuple):
    """One kernel parameter of a group, with one unit on both cgroup versions.

    ``lowering_is_slow``: a tighter value may make the kernel reclaim memory within the write (1 ms per 25 MB).
    ``one_way``: the kernel never takes a higher value again (EINVAL); the group must be made again. ``resets``: a knob
    of the same group that the kernel sets to its default when this one is written back to 0, and whose file is
    meaningless meanwhile. ``root_only``: its file is in the root group, for the machine as a whole.
    """

    name: str
    controller: str
    unit: Literal["CPUs", "nodes", "µs", "shares", "flag", "level", "bytes", "pids", "weight", "devices", "class"]
    forms: Mapping[Version, KnobForm]
    lowering_is_slow: bool = False
    one_way: bool = False
    resets: str | None = None
    root_only: bool = False

    def file(self, version: Version) -> str | None:
        """The control file's name, None where this version has no such thing."""
        form = self.forms.get(version)
        return form.file if form else None

    def encode(self, value: Value, version: Version) -> str:
        """The text to write.

        Errors: `ValueError` for a value that the kernel would refuse or silently change, that would kill, or that has
        no text of its own (cpu.period on v2: see `cpu_max`).
        """
        return self._form(version).codec.encode(value)

    def decode(self, text: str, version: Version) -> Value:
        """The value in what the file reads. An unset cpuset is the empty `CpuSet`.

        Errors: `ValueError` for text that this file cannot hold.
        """
        decode = self._form(version).codec.decode
        return decode(text) if len(text) > _KEPT else _decoded(decode, text)

    def normal(self, text: str, version: Version) -> str:
        """How the kernel will show ``text`` once it is accepted: compare this, never the texts themselves."""
        normal = self._form(version).codec.normal
        return normal(text) if len(text) > _KEPT else _normal(normal, text)

    def writes(self, seen: str, text: str, version: Version) -> Sequence[str]:
        """The single writes that lead from what the file reads to ``text``: several where devices have lines.

        Errors: `ValueError` for a ``seen`` that this file cannot hold.
        """
        writes = self._form(version).codec.writes
        return (text,) if writes is None else writes(seen, text)

    def default(self, version: Version) -> str:
        """What the file of a fresh group reads (without the newline)."""
        return self._form(version).default

    def rule(self, version: Version) -> ParentRule:
        """What the parent's value demands."""
        return self._form(version).rule

    def probe(self, version: Version, files: Collection[str]) -> bool:
        """True when this kernel offers the knob, by the file names of any group but the root."""
        form = self.forms.get(version)
        return form is not None and form.file in files

    def same(self, item: Value, other: Value, version: Version) -> bool:
        """True when both values are one and the same to the kernel (rounding to pages and to weights included)."""
        if item == other:
            return True
        try:
            return self.normal(self.encode(item, version), version) == self.normal(self.encode(other, version), version)
        except ValueError:
            return False

    def looser(self, item: Value, other: Value) -> bool:
        """True when ``item`` allows everything that ``other`` allows, and more. A longer period is *tighter*."""
        if isinstance(item, CpuSet) and isinstance(other, CpuSet):
            return item > other
        if item is None or other is None:
            return item is None and other is not None
        if isinstance(item, CpuSet | DeviceLimits) or isinstance(other, CpuSet | DeviceLimits):
            raise TypeError(f"{self.name}: {item!r} and {other!r} cannot be compared")
        return item < other if self.name == "cpu.period" else item > other

    def slow(self, have: Value, want: Value) -> bool:
        """True when going from ``have`` to ``want`` may take milliseconds inside the kernel: never in the loop."""
        return self.lowering_is_slow and self.looser(have, want)

    def _form(self, version: Version) -> KnobForm:
        form = self.forms.get(version)
        if form is None:
            raise ValueError(f"{self.name} does not exist on cgroup v{version}")
        return form


def _catalog(*knobs: Knob) -> Mapping[str, Knob]:
    table = {knob.name: knob for knob in knobs}
    if len(table) != len(knobs):
        raise ValueError("two knobs share a name")
    return table


SETS: Final = ("cpu.set", "cpu.mems")
"""The knobs whose value in one group is a part of the set of the group above it."""

CATALOG: Final[Mapping[str, Knob]] = _catalog(
    Knob(
        "cpu.set",
        "cpuset",
        "CPUs",
        {1: KnobForm("cpuset.cpus", SET, "", rule=ParentRule.SUBSET), 2: KnobForm("cpuset.cpus", SET, "", "5.0")},
    ),
    Knob(
        "cpu.mems",
        "cpuset",
        "nodes",
        {1: KnobForm("cpuset.mems", SET, "", rule=ParentRule.SUBSET), 2: KnobForm("cpuset.mems", SET, "", "5.0")},
    ),
    # With 1 a change of cpu.mems moves the pages that processes have already, within the write; v2 always does so.
    Knob("cpu.mems_migrate", "cpuset", "flag", {1: KnobForm("cpuset.memory_migrate", FLAG, "0", "2.6.16")}),
    Knob(
        "cpu.quota",
        "cpu",
        "µs",
        {
            1: KnobForm("cpu.cfs_quota_us", QUOTA_V1, "-1", "3.2", ParentRule.RATIO),
            2: KnobForm("cpu.max", QUOTA_V2, "max 100000", "4.15"),
        },
    ),
    Knob(
        "cpu.period",
        "cpu",
        "µs",
        {
            1: KnobForm("cpu.cfs_period_us", PERIOD_V1, "100000", "3.2", ParentRule.RATIO),
            2: KnobForm("cpu.max", PERIOD_V2, "max 100000", "4.15"),
        },
    ),
    Knob(
        "cpu.weight",
        "cpu",
        "shares",
        {1: KnobForm("cpu.shares", SHARES, "1024"), 2: KnobForm("cpu.weight", WEIGHT, "100", "4.15")},
    ),
    Knob(
        "cpu.burst",
        "cpu",
        "µs",
        {1: KnobForm("cpu.cfs_burst_us", BURST, "0", "5.14"), 2: KnobForm("cpu.max.burst", BURST, "0", "5.14")},
    ),
    Knob(
        "cpu.idle",
        "cpu",
        "flag",
        {1: KnobForm("cpu.idle", IDLE, "0", "5.15"), 2: KnobForm("cpu.idle", IDLE, "0", "5.15")},
        resets="cpu.weight",
    ),
    # Group identity of Anolis and Alibaba Cloud kernels: 2 is the highest, -1 yields to all others.
    Knob(
        "cpu.identity",
        "cpu",
        "level",
        {
            1: KnobForm("cpu.bvt_warp_ns", IDENTITY, "0", "4.19 of Anolis"),
            2: KnobForm("cpu.bvt_warp_ns", IDENTITY, "0", "4.19 of Anolis"),
        },
    ),
    # openEuler's QoS scheduling: 0 is online, -1 offline. A new group has its parent's.
    Knob(
        "cpu.qos",
        "cpu",
        "level",
        {
            1: KnobForm("cpu.qos_level", QOS, "0", "4.19 of openEuler"),
            2: KnobForm("cpu.qos_level", QOS, "0", "4.19 of openEuler"),
        },
        one_way=True,
    ),
    Knob(
        "memory.max",
        "memory",
        "bytes",
        {
            1: KnobForm("memory.limit_in_bytes", LIMIT_V1, NO_LIMIT_V1),
            2: KnobForm("memory.max", LIMIT_V2, "max", "4.5"),
        },
        lowering_is_slow=True,
    ),
    # v1 limits memory and swap together, v2 only the swap; `swap_value` converts from the runtime's number.
    Knob(
        "memory.swap",
        "memory",
        "bytes",
        {
            1: KnobForm("memory.memsw.limit_in_bytes", LIMIT_V1, NO_LIMIT_V1),
            2: KnobForm("memory.swap.max", SWAP_V2, "max", "4.5"),
        },
        lowering_is_slow=True,
    ),
    Knob("memory.high", "memory", "bytes", {2: KnobForm("memory.high", LIMIT_V2, "max", "4.5")}, lowering_is_slow=True),
    Knob("memory.low", "memory", "bytes", {2: KnobForm("memory.low", PROTECTION, "0", "4.5")}),
    Knob("memory.min", "memory", "bytes", {2: KnobForm("memory.min", PROTECTION, "0", "4.18")}),
    # Where the whole machine is short of memory, a v1 group above it is reclaimed first. Nothing happens in the write.
    Knob("memory.soft", "memory", "bytes", {1: KnobForm("memory.soft_limit_in_bytes", LIMIT_V1, NO_LIMIT_V1)}),
    # 1: the OOM killer takes all processes of the group (those with oom_score_adj -1000 excepted) or none.
    Knob("memory.oom_group", "memory", "flag", {2: KnobForm("memory.oom.group", FLAG, "0", "4.19")}),
    Knob(
        "pids.max",
        "pids",
        "pids",
        {1: KnobForm("pids.max", PIDS, "max", "4.3"), 2: KnobForm("pids.max", PIDS, "max", "4.5")},
    ),
    # All tasks of the group and of those below it stop until it is 0 again; they keep their memory. On v1 they do not
    # even die by SIGKILL meanwhile.
    Knob(
        "freeze",
        "freezer",
        "flag",
        {1: KnobForm("freezer.state", FROZEN_V1, "THAWED"), 2: KnobForm("cgroup.freeze", FLAG, "0", "5.2")},
    ),
    # What the group's sockets are to traffic control, ``major << 16 | minor``; a new group copies its parent's.
    Knob("net.classid", "net_cls", "class", {1: KnobForm("net_cls.classid", CLASS, "0", "2.6.29")}),
    # Disks. v1 has a file for each of the four, v2 one for all; a v1 throttle binds the group's own tasks only, none of
    # the groups below it (the kernel's documentation, and tried on 6.18).
    Knob("blkio.read_bps", "blkio", "devices", {1: KnobForm("blkio.throttle.read_bps_device", READ_BPS, "", "2.6.37")}),
    Knob(
        "blkio.write_bps", "blkio", "devices", {1: KnobForm("blkio.throttle.write_bps_device", WRITE_BPS, "", "2.6.37")}
    ),
    Knob(
        "blkio.read_iops", "blkio", "devices", {1: KnobForm("blkio.throttle.read_iops_device", READ_IOPS, "", "2.6.37")}
    ),
    Knob(
        "blkio.write_iops",
        "blkio",
        "devices",
        {1: KnobForm("blkio.throttle.write_iops_device", WRITE_IOPS, "", "2.6.37")},
    ),
    # CFQ's, removed with it in 5.0; BFQ's has a file of its own, and iocost's is v2's io.weight.
    Knob("blkio.weight", "blkio", "weight", {1: KnobForm("blkio.weight", CFQ_WEIGHT, "500", "2.6.33 to 4.20")}),
    Knob("blkio.bfq_weight", "blkio", "weight", {1: KnobForm("blkio.bfq.weight", BFQ_WEIGHT_V1, "100", "4.12")}),
    Knob("io.max", "io", "devices", {2: KnobForm("io.max", IO_MAX, "", "4.5")}),
    Knob("io.weight", "io", "weight", {2: KnobForm("io.weight", IO_WEIGHT, "default 100", "5.4")}),
    Knob("io.bfq_weight", "io", "weight", {2: KnobForm("io.bfq.weight", BFQ_WEIGHT_V2, "default 100", "5.0")}),
    Knob("io.latency", "io", "devices", {2: KnobForm("io.latency", IO_LATENCY, "", "4.19")}),
    Knob("io.cost_qos", "io", "devices", {2: KnobForm("io.cost.qos", IO_COST_QOS, "", "5.4")}, root_only=True),
    Knob("io.cost_model", "io", "devices", {2: KnobForm("io.cost.model", IO_COST_MODEL, "", "5.4")}, root_only=True),
)
"""Every knob by its name."""
