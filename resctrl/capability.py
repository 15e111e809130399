"""What this machine's resctrl offers: which caches and bandwidths can be divided, how finely, what can be measured.

Source: kernel documentation, filesystems/resctrl (earlier x86/resctrl); recorded on 5.10, 6.1 and 6.12.
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from cgroupfs.bounded import digits
from cgroupfs.errors import InputError
from cgroupfs.lines import lines_of

_FLAGS: Final = frozenset(
    {"rdt_a", "cat_l3", "cat_l2", "cdp_l3", "cdp_l2", "mba", "smba", "bmec"}
    | {"cqm", "cqm_llc", "cqm_occup_llc", "cqm_mbm_total", "cqm_mbm_local", "abmc"}
)
_USUAL_PLACE: Final = "/sys/fs/resctrl"
_LINE: Final = re.compile(r"^\s*([A-Z0-9]+):(.*)$", re.MULTILINE)
_VALUE: Final = re.compile(r"(?:^|;)\s*(\d{1,10})=\s*(\w*)", re.ASCII)


_LONGEST: Final = 64
"""Characters that are read of a number in ``info``: none is longer."""


class ResctrlStatus(StrEnum):
    """How far the machine is from dividing its cache."""

    NO_KERNEL = "no-kernel"
    NO_CPU = "no-cpu"
    NOT_MOUNTED = "not-mounted"
    READY = "ready"


class BandwidthUnit(StrEnum):
    """What the numbers of a bandwidth line mean."""

    PERCENT = "percent"
    MBPS = "MB/s"
    EIGHTH_GBPS = "1/8 GB/s"


class CacheCapability(Struct, frozen=True, kw_only=True):
    """A cache whose ways can be shared out: ``L3``, ``L2``, or their CODE and DATA halves under CDP.

    ``full`` is the mask of all ways, ``shared_ways`` those that hardware uses too. ``min_ways`` 0: a group may have
    none. ``sparse``: ways need not be contiguous. ``domains`` are the kernel's cache ids.
    """

    name: str
    full: int
    min_ways: int
    groups: int
    shared_ways: int = 0
    sparse: bool = False
    domains: tuple[int, ...] = ()

    @property
    def ways(self) -> int:
        """How many ways there are to share out."""
        return self.full.bit_count()


class BandwidthCapability(Struct, frozen=True, kw_only=True):
    """A memory bandwidth that can be limited: ``MB``, or ``SMBA`` for slow (CXL) memory. Numbers in ``unit``."""

    name: str
    unit: BandwidthUnit
    minimum: int
    step: int
    groups: int
    domains: tuple[int, ...] = ()


class MonitorCapability(Struct, frozen=True, kw_only=True):
    """What can be measured per group. ``groups``: how many may be watched at once, all control groups included."""

    features: tuple[str, ...]
    groups: int


class Capability(Struct, frozen=True, kw_only=True):
    """Features of resctrl here, and the obstacles. ``root`` is where it is mounted, prefix included."""

    status: ResctrlStatus
    reason: str
    root: str | None = None
    options: tuple[str, ...] = ()
    caches: tuple[CacheCapability, ...] = ()
    bandwidths: tuple[BandwidthCapability, ...] = ()
    monitoring: MonitorCapability | None = None
    unknown: tuple[str, ...] = ()

    @property
    def divisible(self) -> tuple[CacheCapability | BandwidthCapability, ...]:
        return (*self.caches, *self.bandwidths)

    @property
    def control_groups(self) -> int:
        """How many control groups fit, the default one included: the scarcest resource decides. 0: none at all."""
        return min((part.groups for part in self.divisible), default=0)


def read_capability(root: str = "/") -> Capability:
    """What this node (or copied node) offers.

    Errors: `InputError` for an ``info`` file that does not hold what the kernel documents.
    """
    prefix = root.rstrip("/")
    cpuinfo = _text(f"{prefix}/proc/cpuinfo") or ""
    place, options = _mount(_text(f"{prefix}/proc/self/mountinfo") or "", prefix)
    info = f"{place}/info"
    names = _listed(info)
    if names is None:
        known = "resctrl" in (_text(f"{prefix}/proc/filesystems") or "").split()
        status, reason = _missing(known, _flagged(cpuinfo), place)
        return Capability(status=status, reason=reason)
    lines = {match[1]: _VALUE.findall(match[2]) for match in _LINE.finditer(_text(f"{place}/schemata") or "")}
    domains = {name: tuple(int(domain) for domain, _ in values) for name, values in lines.items()}
    amd = "AuthenticAMD" in cpuinfo or "HygonGenuine" in cpuinfo
    caches: list[CacheCapability] = []
    bandwidths: list[BandwidthCapability] = []
    unknown: list[str] = []
    for name in names:
        directory = f"{info}/{name}"
        if name.endswith("_MON") or not os.path.isdir(directory):
            continue
        if os.path.exists(f"{directory}/cbm_mask"):
            caches.append(_cache(directory, name, domains, amd=amd))
        elif os.path.exists(f"{directory}/min_bandwidth"):
            # A minimum of 0 does not prove AMD's numbers: Arm's MPAM may have that, too, and counts in percent.
            absolute = amd or any((digits(value) or 0) > 100 for _, value in lines.get(name, ()))
            bandwidths.append(_bandwidth(directory, name, domains, absolute=absolute, mbps="mba_MBps" in options))
        else:
            unknown.append(name)
    return Capability(
        status=ResctrlStatus.READY,
        reason=f"mounted at {place}",
        root=place,
        options=options,
        caches=tuple(caches),
        bandwidths=tuple(bandwidths),
        monitoring=_monitoring(f"{info}/L3_MON"),
        unknown=tuple(unknown),
    )


def _listed(directory: str) -> list[str] | None:
    """The names in it, sorted; None without the directory: resctrl may be unmounted at any moment."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return None


def _flagged(cpuinfo: str) -> bool:
    """Whether the first CPU has a flag of resource control; never on machines other than x86."""
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return match is not None and not _FLAGS.isdisjoint(match[1].split())


def _mount(mountinfo: str, prefix: str) -> tuple[str, tuple[str, ...]]:
    for line in lines_of(mountinfo):
        before, _, after = line.partition(" - ")
        parts, fields = after.split(" "), before.split(" ")
        if after.startswith("resctrl ") and len(fields) > 4 and len(parts) > 2:
            point = fields[4]
            # The table of a copied node has no prefix.
            inside = bool(prefix) and point.startswith(f"{prefix}/")
            # The first option is rw or ro.
            return point if inside else prefix + point, tuple(parts[2].split(",")[1:])
    return prefix + _USUAL_PLACE, ()


def _missing(known: bool, flagged: bool, place: str) -> tuple[ResctrlStatus, str]:
    if not known and not flagged:
        return (
            ResctrlStatus.NO_CPU,
            "the CPU has no resource control (no rdt_a, cat_l3, mba or cqm among its flags)",
        )
    if not known:
        return (
            ResctrlStatus.NO_KERNEL,
            "the CPU supports it, but the kernel has no resctrl file system (CONFIG_X86_CPU_RESCTRL)",
        )
    return (
        ResctrlStatus.NOT_MOUNTED,
        f"the kernel offers resctrl, but it is not mounted: mount -t resctrl resctrl {place}",
    )


def _cache(directory: str, name: str, domains: Mapping[str, tuple[int, ...]], *, amd: bool) -> CacheCapability:
    sparse = _text(f"{directory}/sparse_masks")
    return CacheCapability(
        name=name,
        full=_number(f"{directory}/cbm_mask", 16),
        min_ways=_number(f"{directory}/min_cbm_bits"),
        groups=_number(f"{directory}/num_closids"),
        shared_ways=_number(f"{directory}/shareable_bits", 16, default=0),
        # Kernels before 6.7 do not report it; AMD has always taken any mask, Intel contiguous ones only.
        sparse=amd if sparse is None else sparse.strip() == "1",
        domains=domains.get(name, ()),
    )


def _bandwidth(
    directory: str, name: str, domains: Mapping[str, tuple[int, ...]], *, absolute: bool, mbps: bool
) -> BandwidthCapability:
    """``absolute``: the numbers are AMD's: by the vendor, or because one is above 100, which no percent is."""
    unit = BandwidthUnit.PERCENT
    if mbps:
        unit = BandwidthUnit.MBPS
    elif absolute:
        unit = BandwidthUnit.EIGHTH_GBPS
    return BandwidthCapability(
        name=name,
        unit=unit,
        minimum=_number(f"{directory}/min_bandwidth"),
        step=_number(f"{directory}/bandwidth_gran"),
        groups=_number(f"{directory}/num_closids"),
        domains=domains.get(name, ()),
    )


def _monitoring(directory: str) -> MonitorCapability | None:
    features = _text(f"{directory}/mon_features")
    if features is None:
        return None
    return MonitorCapability(
        features=tuple(features.split()),
        groups=_number(f"{directory}/num_rmids"),
    )


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return file.read()
    except OSError:
        return None


def _number(path: str, base: int = 10, *, default: int | None = None) -> int:
    text = _text(path)
    if text is None and default is not None:
        return default
    try:
        return int((text or "")[:_LONGEST], base)
    except ValueError as exc:
        raise InputError(path, text, "a number" if base == 10 else "a hexadecimal mask") from exc
