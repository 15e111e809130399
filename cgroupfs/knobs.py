"""The catalog of knobs: every value this agent may set, in one unit, with its file and text form on cgroup v1 and v2.

A knob's value is a `CpuSet` (cpu.set, cpu.mems), a `DeviceLimits` (disks), an int in the knob's unit, or None for "no
limit". Everything here is pure: text in, value out. Sources: kernel documentation admin-guide/cgroup-v1/* and
admin-guide/cgroup-v2, and measurements on kernels 5.10, 6.1, 6.12 and 6.18.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, Literal, NamedTuple, final

from cgroupfs import codecs, device_codecs
from cgroupfs.codecs import NO_LIMIT_V1, Codec, DeviceLimits, Value, Version
from cgroupfs.cpuset import CpuSet

Unit = Literal["CPUs", "nodes", "µs", "shares", "flag", "level", "bytes", "pids", "weight", "devices", "class"]


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
    """One kernel parameter of a group, with one unit on both cgroup versions."""

    name: str
    controller: str
    unit: Unit
    forms: Mapping[Version, KnobForm] = {}
    # A tighter value may make the kernel reclaim memory within the write (1 ms per 25 MB).
    lowering_is_slow: bool = False
    one_way: bool = False  # the kernel never takes a higher value again (EINVAL): the group must be made again
    # A knob of the same group that the kernel sets to its default when this one is written back to 0, and whose file is
    # meaningless meanwhile.
    resets: str | None = None
    root_only: bool = False  # its file is in the root group, for the machine as a whole

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


SETS: Final = ("cpu.set", "cpu.mems")
"""The knobs whose value in one group is a part of the set of the group above it."""

_V1: Final[Mapping[str, KnobForm]] = {
    "cpu.set": KnobForm("cpuset.cpus", codecs.SET, "", rule=ParentRule.SUBSET),
    "cpu.mems": KnobForm("cpuset.mems", codecs.SET, "", rule=ParentRule.SUBSET),
    "cpu.mems_migrate": KnobForm("cpuset.memory_migrate", codecs.FLAG, "0", "2.6.16"),
    "cpu.quota": KnobForm("cpu.cfs_quota_us", codecs.QUOTA_V1, "-1", "3.2", ParentRule.RATIO),
    "cpu.period": KnobForm("cpu.cfs_period_us", codecs.PERIOD_V1, "100000", "3.2", ParentRule.RATIO),
    "cpu.weight": KnobForm("cpu.shares", codecs.SHARES, "1024"),
    "cpu.burst": KnobForm("cpu.cfs_burst_us", codecs.BURST, "0", "5.14"),
    "cpu.idle": KnobForm("cpu.idle", codecs.IDLE, "0", "5.15"),
    "cpu.identity": KnobForm("cpu.bvt_warp_ns", codecs.IDENTITY, "0", "4.19 of Anolis"),
    "cpu.qos": KnobForm("cpu.qos_level", codecs.QOS, "0", "4.19 of openEuler"),
    "memory.max": KnobForm("memory.limit_in_bytes", codecs.LIMIT_V1, NO_LIMIT_V1),
    "memory.swap": KnobForm("memory.memsw.limit_in_bytes", codecs.LIMIT_V1, NO_LIMIT_V1),
    "memory.soft": KnobForm("memory.soft_limit_in_bytes", codecs.LIMIT_V1, NO_LIMIT_V1),
    "pids.max": KnobForm("pids.max", codecs.PIDS, "max", "4.3"),
    "freeze": KnobForm("freezer.state", codecs.FROZEN_V1, "THAWED"),
    "net.classid": KnobForm("net_cls.classid", codecs.CLASS, "0", "2.6.29"),
    "blkio.read_bps": KnobForm("blkio.throttle.read_bps_device", device_codecs.READ_BPS, "", "2.6.37"),
    "blkio.write_bps": KnobForm("blkio.throttle.write_bps_device", device_codecs.WRITE_BPS, "", "2.6.37"),
    "blkio.read_iops": KnobForm("blkio.throttle.read_iops_device", device_codecs.READ_IOPS, "", "2.6.37"),
    "blkio.write_iops": KnobForm("blkio.throttle.write_iops_device", device_codecs.WRITE_IOPS, "", "2.6.37"),
    "blkio.weight": KnobForm("blkio.weight", device_codecs.CFQ_WEIGHT, "500", "2.6.33 to 4.20"),
    "blkio.bfq_weight": KnobForm("blkio.bfq.weight", device_codecs.BFQ_WEIGHT_V1, "100", "4.12"),
}
_V2: Final[Mapping[str, KnobForm]] = {
    "cpu.set": KnobForm("cpuset.cpus", codecs.SET, "", "5.0"),
    "cpu.mems": KnobForm("cpuset.mems", codecs.SET, "", "5.0"),
    "cpu.quota": KnobForm("cpu.max", codecs.QUOTA_V2, "max 100000", "4.15"),
    "cpu.period": KnobForm("cpu.max", codecs.PERIOD_V2, "max 100000", "4.15"),
    "cpu.weight": KnobForm("cpu.weight", codecs.WEIGHT, "100", "4.15"),
    "cpu.burst": KnobForm("cpu.max.burst", codecs.BURST, "0", "5.14"),
    "cpu.idle": KnobForm("cpu.idle", codecs.IDLE, "0", "5.15"),
    "cpu.identity": KnobForm("cpu.bvt_warp_ns", codecs.IDENTITY, "0", "4.19 of Anolis"),
    "cpu.qos": KnobForm("cpu.qos_level", codecs.QOS, "0", "4.19 of openEuler"),
    "memory.max": KnobForm("memory.max", codecs.LIMIT_V2, "max", "4.5"),
    "memory.swap": KnobForm("memory.swap.max", codecs.AMOUNT_V2, "max", "4.5"),
    "memory.high": KnobForm("memory.high", codecs.LIMIT_V2, "max", "4.5"),
    "memory.low": KnobForm("memory.low", codecs.AMOUNT_V2, "0", "4.5"),
    "memory.min": KnobForm("memory.min", codecs.AMOUNT_V2, "0", "4.18"),
    "memory.oom_group": KnobForm("memory.oom.group", codecs.FLAG, "0", "4.19"),
    "pids.max": KnobForm("pids.max", codecs.PIDS, "max", "4.5"),
    "freeze": KnobForm("cgroup.freeze", codecs.FLAG, "0", "5.2"),
    "io.max": KnobForm("io.max", device_codecs.IO_MAX, "", "4.5"),
    "io.weight": KnobForm("io.weight", device_codecs.IO_WEIGHT, "default 100", "5.4"),
    "io.bfq_weight": KnobForm("io.bfq.weight", device_codecs.BFQ_WEIGHT_V2, "default 100", "5.0"),
    "io.latency": KnobForm("io.latency", device_codecs.IO_LATENCY, "", "4.19"),
    "io.cost_qos": KnobForm("io.cost.qos", device_codecs.IO_COST_QOS, "", "5.4"),
    "io.cost_model": KnobForm("io.cost.model", device_codecs.IO_COST_MODEL, "", "5.4"),
}


def _catalog(*knobs: Knob) -> Mapping[str, Knob]:
    table = {
        knob.name: knob._replace(
            forms={version: forms[knob.name] for version, forms in ((1, _V1), (2, _V2)) if knob.name in forms}
        )
        for knob in knobs
    }
    if len(table) != len(knobs) or table.keys() != _V1.keys() | _V2.keys():
        raise ValueError("two knobs share a name, or one has no file")
    return table


CATALOG: Final[Mapping[str, Knob]] = _catalog(
    Knob("cpu.set", "cpuset", "CPUs"),
    Knob("cpu.mems", "cpuset", "nodes"),
    # With 1 a change of cpu.mems moves the pages that processes have already, within the write; v2 always does so.
    Knob("cpu.mems_migrate", "cpuset", "flag"),
    Knob("cpu.quota", "cpu", "µs"),
    Knob("cpu.period", "cpu", "µs"),
    Knob("cpu.weight", "cpu", "shares"),
    Knob("cpu.burst", "cpu", "µs"),
    Knob("cpu.idle", "cpu", "flag", resets="cpu.weight"),
    # Group identity of Anolis and Alibaba Cloud kernels: 2 is the highest, -1 yields to all others.
    Knob("cpu.identity", "cpu", "level"),
    # openEuler's QoS scheduling: 0 is online, -1 offline. A new group has its parent's.
    Knob("cpu.qos", "cpu", "level", one_way=True),
    Knob("memory.max", "memory", "bytes", lowering_is_slow=True),
    # v1 limits memory and swap together, v2 only the swap; `swap_value` converts from the runtime's number.
    Knob("memory.swap", "memory", "bytes", lowering_is_slow=True),
    Knob("memory.high", "memory", "bytes", lowering_is_slow=True),
    Knob("memory.low", "memory", "bytes"),
    Knob("memory.min", "memory", "bytes"),
    # Where the whole machine is short of memory, a v1 group above it is reclaimed first. Nothing happens in the write.
    Knob("memory.soft", "memory", "bytes"),
    # 1: the OOM killer takes all processes of the group (those with oom_score_adj -1000 excepted) or none.
    Knob("memory.oom_group", "memory", "flag"),
    Knob("pids.max", "pids", "pids"),
    # All tasks of the group and of those below it stop until it is 0 again; they keep their memory. On v1 they do not
    # even die by SIGKILL meanwhile.
    Knob("freeze", "freezer", "flag"),
    # What the group's sockets are to traffic control, ``major << 16 | minor``; a new group copies its parent's.
    Knob("net.classid", "net_cls", "class"),
    # Disks. v1 has a file for each of the four, v2 one for all; a v1 throttle binds the group's own tasks only, none of
    # the groups below it (the kernel's documentation, and tried on 6.18).
    Knob("blkio.read_bps", "blkio", "devices"),
    Knob("blkio.write_bps", "blkio", "devices"),
    Knob("blkio.read_iops", "blkio", "devices"),
    Knob("blkio.write_iops", "blkio", "devices"),
    # CFQ's, removed with it in 5.0; BFQ's has a file of its own, and iocost's is v2's io.weight.
    Knob("blkio.weight", "blkio", "weight"),
    Knob("blkio.bfq_weight", "blkio", "weight"),
    Knob("io.max", "io", "devices"),
    Knob("io.weight", "io", "weight"),
    Knob("io.bfq_weight", "io", "weight"),
    Knob("io.latency", "io", "devices"),
    Knob("io.cost_qos", "io", "devices", root_only=True),
    Knob("io.cost_model", "io", "devices", root_only=True),
)
"""Every knob by its name."""
