"""Requests per disk; several names of one disk are merged."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.device_codecs import MAX_IOPS, MAX_LATENCY_US, cost_row
from cgroupfs.devices import Row
from state.disk import Disk

LEAST_BPS: Final = 65_536
"""No part of a limit is smaller: a program that cannot read a page in a second appears hung."""
LEAST_IOPS: Final = 10
KEYS: Final = {"rbps": "read_bps", "wbps": "write_bps", "riops": "read_iops", "wiops": "write_iops"}
"""The limits, by the kernel's names."""
_MOST_BPS: Final = 1 << 50
_NUMBERS: Final = (*KEYS.values(), "latency_us")
_LINES: Final = ("cost_qos", "cost_model")


class DiskRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One disk; what is not given is not limited."""

    name: Annotated[
        str, Meta(min_length=1, description="a directory on the disk, a path below /dev, its name, or its major:minor")
    ]
    read_bps: Annotated[
        Annotated[int, Meta(ge=LEAST_BPS, le=_MOST_BPS)] | None,
        Meta(description="BE read limit in bytes per second; null: none"),
    ] = None
    write_bps: Annotated[
        Annotated[int, Meta(ge=LEAST_BPS, le=_MOST_BPS)] | None,
        Meta(description="BE write limit in bytes per second; null: none"),
    ] = None
    read_iops: Annotated[
        Annotated[int, Meta(ge=LEAST_IOPS, le=MAX_IOPS)] | None,
        Meta(description="BE read limit in operations per second; null: none"),
    ] = None
    write_iops: Annotated[
        Annotated[int, Meta(ge=LEAST_IOPS, le=MAX_IOPS)] | None,
        Meta(description="BE write limit in operations per second; null: none"),
    ] = None
    latency_us: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_LATENCY_US)] | None,
        Meta(description="cgroup v2: latency target of online I/O; other groups are throttled above it; null: off"),
    ] = None
    cost_qos: Annotated[
        str | None,
        Meta(
            description="cgroup v2: the disk's io.cost.qos, such as rpct=95 rlat=5000 wpct=95 wlat=5000 min=50 "
            "max=150; empty: chosen by the kernel; null: iocost is unmanaged"
        ),
    ] = None
    cost_model: Annotated[
        str | None,
        Meta(
            description="cgroup v2: the disk's io.cost.model, all of rbps, rseqiops, rrandiops, wbps, wseqiops, "
            "wrandiops; null: estimated by the kernel"
        ),
    ] = None

    def __post_init__(self) -> None:
        for line, model in ((self.cost_qos, False), (self.cost_model, True)):
            if line is not None:
                cost_row(line, model=model)

    def limits(self) -> Row:
        """What is limited, under the kernel's names."""
        return {key: value for key, name in KEYS.items() if (value := getattr(self, name)) is not None}


def by_device(rules: Iterable[DiskRule], disks: Mapping[str, Disk]) -> tuple[dict[str, DiskRule], list[str]]:
    """The requests for each existing disk, by its number; and conflicts between two names of one disk.

    A directory and the disk below it are often both named. Of two limits, and of two latency targets, the smaller one
    counts; of two cost lines, which cannot be compared, the first.
    """
    disk_rules: dict[str, DiskRule] = {}
    texts: list[str] = []
    for rule in rules:
        disk = disks.get(rule.name)
        if disk is None:
            continue
        first = disk_rules.get(disk.device)
        disk_rules[disk.device] = rule if first is None else _both(first, rule, disk, texts)
    return disk_rules, texts


def _both(first: DiskRule, second: DiskRule, disk: Disk, texts: list[str]) -> DiskRule:
    """Two rules as one, under the first name; where they differ is added to ``texts``."""
    news: dict[str, int | str] = {}
    for name in (*_NUMBERS, *_LINES):
        item, other = getattr(first, name), getattr(second, name)
        if other is None or other == item:
            continue
        news[name] = other if item is None else min(item, other) if name in _NUMBERS else item
        if item is not None:
            which = "the smaller" if name in _NUMBERS else "the first"
            texts.append(f"{first.name} and {second.name} are both {disk.title}: {which} {name} applies")
    return replace(first, **news)
