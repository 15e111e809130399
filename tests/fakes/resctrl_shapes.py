"""Machines with cache and bandwidth control, as data: what their registers offer, and what a kernel makes of it.

``INTEL``, ``INTEL_L2`` and ``AMD`` are the machines of the recorded transcripts (tests/fixtures/resctrl); the others
are the same with another mount option or less hardware. Releases 5.10, 6.1 and 6.12 were recorded; a release between
two of them follows the kernel's source. ``MPAM`` and ``MPAM_COARSE`` are Arm's as the kernel's documentation
(arch/arm64/mpam) and source have it; no recording exists. Monitoring ids of one control group each are left out.
"""

from dataclasses import dataclass, replace
from typing import Literal

Release = tuple[int, int]
Options = tuple[str, ...]

MB_PER_SECOND = "mba_MBps"
EVENTS = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache with ``ways``; ``shareable`` is the mask that hardware uses too.

    ``holes``: a mask may have holes (AMD, MPAM); ``empty``: it may be 0, from 6.1 on (AMD). ``cdp``: CDP.
    """

    name: Literal["L2", "L3"]
    ways: int
    size: int
    domains: tuple[int, ...]
    closids: int
    shareable: int = 0
    holes: bool = False
    empty: bool = False
    cdp: bool = False

    @property
    def full(self) -> int:
        return (1 << self.ways) - 1

    def amount(self, mask: int) -> int:
        return self.size // self.ways * mask.bit_count()


@dataclass(frozen=True, kw_only=True)
class BandwidthShape:
    """Memory bandwidth. Intel: per cent in steps of ``step``; AMD: ``absolute`` eighths of a GB/s up to ``full``.

    ``bits``: MPAM keeps a per cent as a fraction of so many bits. ``since``: the first kernel that has it.
    """

    name: Literal["MB", "SMBA"]
    domains: tuple[int, ...]
    closids: int
    minimum: int = 10
    step: int = 10
    full: int = 100
    absolute: bool = False
    bits: int = 0
    since: Release = (0, 0)

    def amount(self, value: int) -> int:
        return value

    def shown(self, value: int) -> int:
        """What a file shows after a write: MPAM the upper end of the fraction's step."""
        if not self.bits:
            return value
        steps = 1 << self.bits
        number = min(steps, max(1, (2 * value * steps + 100) // 200))
        return (2 * 100 * number + steps) // (2 * steps)


@dataclass(frozen=True, kw_only=True)
class MonitorShape:
    """Monitoring. ``threshold``: a freed RMID is given out again below this occupancy."""

    rmids: int
    domains: tuple[int, ...]
    threshold: int
    events: tuple[str, ...] = EVENTS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One machine. ``flags``: the CPU's; ``options``: how its resctrl is mounted. Only a name: it has no resctrl."""

    name: str
    vendor: Literal["GenuineIntel", "AuthenticAMD", "Arm"] = "GenuineIntel"
    flags: str = ""
    caches: tuple[CacheShape, ...] = ()
    bandwidths: tuple[BandwidthShape, ...] = ()
    monitor: MonitorShape | None = None
    options: Options = ()

    @property
    def any(self) -> bool:
        return bool(self.caches or self.bandwidths or self.monitor)


_MONITOR = MonitorShape(rmids=32, domains=(0, 1), threshold=524_288)
_L3 = CacheShape(name="L3", ways=12, size=16 << 20, domains=(0, 1), closids=8, shareable=0xC00, cdp=True)
_L2 = CacheShape(name="L2", ways=8, size=4 << 20, domains=(0, 1, 2, 3), closids=4, cdp=True)
_MB = BandwidthShape(name="MB", domains=(0, 1), closids=8)
_FLAGS = "rdt_a cat_l3 cdp_l3 mba cqm cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local"
INTEL = Shape(name="intel", flags=_FLAGS, caches=(_L3,), bandwidths=(_MB,), monitor=_MONITOR)
INTEL_CDP = replace(INTEL, name="intel-cdp", options=("cdp",))
INTEL_MBPS = replace(INTEL, name="intel-mbps", options=(MB_PER_SECOND,))
INTEL_L2 = replace(INTEL, name="intel-l2", flags=f"{_FLAGS} cat_l2 cdp_l2", caches=(_L3, _L2))
L2_ONLY = Shape(name="l2-only", flags="rdt_a cat_l2", caches=(replace(_L2, size=1 << 20, domains=(0, 1), cdp=False),))
_FOUR = (0, 1, 2, 3)
_AMD_L3 = CacheShape(name="L3", ways=16, size=16 << 20, domains=_FOUR, closids=16, holes=True, empty=True, cdp=True)
_AMD_MB = BandwidthShape(name="MB", domains=_FOUR, closids=16, minimum=0, step=1, full=2048, absolute=True)
AMD = Shape(
    name="amd",
    vendor="AuthenticAMD",
    flags=f"{_FLAGS} smba bmec",
    caches=(_AMD_L3,),
    bandwidths=(_AMD_MB, replace(_AMD_MB, name="SMBA", since=(6, 3))),
    monitor=replace(_MONITOR, domains=_FOUR, threshold=0),
)
_MPAM_L3 = replace(_L3, ways=16, size=32 << 20, domains=(1, 2), closids=32, shareable=0xFFFF, holes=True)
_MPAM_MB = BandwidthShape(name="MB", domains=(1, 2), closids=32, minimum=0, step=1, bits=16)
_MPAM_MONITOR = replace(_MONITOR, rmids=64, domains=(1, 2), threshold=0, events=EVENTS[:2])
MPAM = Shape(name="mpam", vendor="Arm", caches=(_MPAM_L3,), bandwidths=(_MPAM_MB,), monitor=_MPAM_MONITOR)
MPAM_COARSE = replace(MPAM, name="mpam-coarse", bandwidths=(replace(_MPAM_MB, minimum=13, step=13, bits=3),))
NONE = Shape(name="none")

SHAPES = {shape.name: shape for shape in (INTEL, INTEL_CDP, INTEL_MBPS, INTEL_L2, L2_ONLY, AMD, NONE)}
"""Machines that every kernel knows."""
MPAM_SHAPES = {shape.name: shape for shape in (MPAM, MPAM_COARSE)}
"""Arm's, with kernels that have resctrl for it."""
