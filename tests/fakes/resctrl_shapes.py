"""Machines with cache and bandwidth control, as data: what their registers offer, and what a kernel makes of it.

``INTEL``, ``INTEL_L2`` and ``AMD`` are the machines of the recorded transcripts (tests/fixtures/resctrl); the others
are the same with another mount option or less hardware. Kernels: 5.10, 6.1 and 6.12 are proved; a release between two
of them follows the version at which the kernel's source changed. ``MPAM`` and ``MPAM_COARSE`` are Arm's as the kernel's
documentation (arch/arm64/mpam) and source have it; nobody has recorded one. That its monitoring ids are of one control
group each is left out.
"""

from dataclasses import dataclass, replace
from typing import Literal

Release = tuple[int, int]
Options = tuple[str, ...]

MB_PER_SECOND = "mba_MBps"
ALL_EVENTS = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache with ``ways``; ``shareable`` is the mask that hardware uses too.

    ``lenient``: AMD's rules for masks; ``sparse``: those of MPAM, which takes holes, but no empty mask.
    """

    name: Literal["L2", "L3"]
    ways: int
    size: int
    domains: tuple[int, ...]
    closids: int
    shareable: int = 0
    min_bits: int = 1
    lenient: bool = False
    sparse: bool = False
    cdp: bool = False

    @property
    def full(self) -> int:
        return (1 << self.ways) - 1


@dataclass(frozen=True, kw_only=True)
class BandwidthShape:
    """Memory bandwidth. Intel: per cent in steps of ``step``; AMD: ``absolute`` eighths of a GB/s up to ``maximum``.

    ``bits``: MPAM keeps a per cent as a fraction of so many bits, and shows what came of it.
    """

    name: Literal["MB", "SMBA"]
    domains: tuple[int, ...]
    closids: int
    minimum: int = 10
    step: int = 10
    maximum: int = 100
    absolute: bool = False
    bits: int = 0
    since: Release = (0, 0)

    def kept(self, percent: int) -> int:
        """What MPAM shows of a per cent that was written: each number of the fraction stands for its upper end."""
        steps = 1 << self.bits
        number = min(steps, max(1, (2 * percent * steps + 100) // 200))
        return (2 * 100 * number + steps) // (2 * steps)


@dataclass(frozen=True, kw_only=True)
class MonitorShape:
    """What can be measured. ``unit``: bytes a count; ``threshold``: a freed RMID is given out again below it.

    ``configurable``: which kinds of traffic count can be set (AMD's BMEC, from 6.3). ``nodes``: into how many NUMA
    nodes each cache is split (sub-NUMA clusters, known from 6.11 on); ``domains`` are then the nodes.
    """

    rmids: int
    domains: tuple[int, ...]
    threshold: int
    cache_bytes: int
    events: tuple[str, ...] = ALL_EVENTS
    unit: int = 65_536
    configurable: bool = False
    nodes: int = 1

    @property
    def caches(self) -> dict[int, tuple[int, ...]]:
        """For each cache the domains in it."""
        parts = range(0, len(self.domains), self.nodes)
        return {cache: self.domains[start : start + self.nodes] for cache, start in enumerate(parts)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One machine. ``options``: how its resctrl is mounted. Nothing but a name: it has no resctrl."""

    name: str
    vendor: Literal["GenuineIntel", "AuthenticAMD", "Arm"] = "GenuineIntel"
    cpus: int = 4
    caches: tuple[CacheShape, ...] = ()
    bandwidths: tuple[BandwidthShape, ...] = ()
    monitor: MonitorShape | None = None
    pseudo_lock: bool = False
    options: Options = ()

    @property
    def any(self) -> bool:
        return bool(self.caches or self.bandwidths or self.monitor)

    @property
    def cpuinfo(self) -> str:
        """What /proc/cpuinfo has of the first CPU, as far as it matters here."""
        if self.vendor == "Arm":
            return "Features\t: fp asimd\nCPU implementer\t: 0x41\n"
        return f"vendor_id\t: {self.vendor}\nflags\t\t: {' '.join(self.flags)}\n"

    @property
    def flags(self) -> tuple[str, ...]:
        """What /proc/cpuinfo says of it."""
        flags = ["fpu", "sse"]
        if self.caches or self.bandwidths:
            flags.append("rdt_a")
        for cache in self.caches:
            flags += [f"cat_{cache.name.lower()}", *([f"cdp_{cache.name.lower()}"] if cache.cdp else [])]
        flags += [{"MB": "mba", "SMBA": "smba"}[part.name] for part in self.bandwidths]
        if self.monitor is not None:
            flags += ["cqm", "cqm_llc"]
            flags += [{"llc_occupancy": "cqm_occup_llc"}.get(name, f"cqm_{name[:9]}") for name in self.monitor.events]
            flags += ["bmec"] if self.monitor.configurable else []
        return tuple(flags)


@dataclass(frozen=True)
class Schema:
    """One line of a schemata file. ``peer``: the other half of a cache whose code and data are kept apart."""

    name: str
    resource: CacheShape | BandwidthShape
    closids: int
    peer: str = ""


_L3 = CacheShape(name="L3", ways=12, size=16 << 20, domains=(0, 1), closids=8, shareable=0xC00, cdp=True)
_L2 = CacheShape(name="L2", ways=8, size=4 << 20, domains=(0, 1, 2, 3), closids=4, cdp=True)
_MB = BandwidthShape(name="MB", domains=(0, 1), closids=8)
_AMD_DOMAINS = (0, 1, 2, 3)
_AMD_L3 = CacheShape(name="L3", ways=16, size=16 << 20, domains=_AMD_DOMAINS, closids=16, lenient=True, cdp=True)
_AMD_MB = BandwidthShape(name="MB", domains=_AMD_DOMAINS, closids=16, minimum=0, step=1, maximum=2048, absolute=True)

INTEL = Shape(
    name="intel",
    caches=(_L3,),
    bandwidths=(_MB,),
    monitor=MonitorShape(rmids=32, domains=(0, 1), threshold=524_288, cache_bytes=16 << 20),
)
INTEL_CDP = replace(INTEL, name="intel-cdp", options=("cdp",))
INTEL_MBPS = replace(INTEL, name="intel-mbps", options=(MB_PER_SECOND,))
INTEL_L2 = replace(INTEL, name="intel-l2", caches=(_L3, _L2))
INTEL_SNC = replace(
    INTEL,
    name="intel-snc",
    monitor=MonitorShape(rmids=16, domains=(0, 1, 2, 3), nodes=2, threshold=524_288, cache_bytes=16 << 20),
)
L2_ONLY = Shape(
    name="l2-only",
    caches=(CacheShape(name="L2", ways=8, size=1 << 20, domains=(0, 1), closids=4),),
    pseudo_lock=True,
)
AMD = Shape(
    name="amd",
    vendor="AuthenticAMD",
    caches=(_AMD_L3,),
    bandwidths=(_AMD_MB, replace(_AMD_MB, name="SMBA", since=(6, 3))),
    monitor=MonitorShape(rmids=32, domains=_AMD_DOMAINS, threshold=0, cache_bytes=16 << 20, configurable=True),
)
_MPAM_L3 = CacheShape(
    name="L3", ways=16, size=32 << 20, domains=(1, 2), closids=32, shareable=0xFFFF, sparse=True, cdp=True
)
_MPAM_MB = BandwidthShape(name="MB", domains=(1, 2), closids=32, minimum=0, step=1, bits=16)
MPAM = Shape(
    name="mpam",
    vendor="Arm",
    caches=(_MPAM_L3,),
    bandwidths=(_MPAM_MB,),
    monitor=MonitorShape(
        rmids=64,
        domains=(1, 2),
        threshold=0,
        cache_bytes=32 << 20,
        events=("llc_occupancy", "mbm_total_bytes"),
    ),
)
MPAM_COARSE = replace(MPAM, name="mpam-coarse", bandwidths=(replace(_MPAM_MB, minimum=13, step=13, bits=3),))
NONE = Shape(name="none")

SHAPES = {shape.name: shape for shape in (INTEL, INTEL_CDP, INTEL_MBPS, INTEL_L2, L2_ONLY, AMD, NONE)}
"""Machines that every kernel knows."""
MPAM_SHAPES = {shape.name: shape for shape in (MPAM, MPAM_COARSE)}
"""Arm's, with kernels that have resctrl for it."""
ALL_SHAPES = {**SHAPES, **MPAM_SHAPES, INTEL_SNC.name: INTEL_SNC}


def schemas(shape: Shape, release: Release, options: Options) -> tuple[Schema, ...]:
    """The lines in the order of this kernel: before 5.15 caches first, later the other way round."""
    found: list[Schema] = []
    for cache in shape.caches:
        option = "cdp" if cache.name == "L3" else "cdpl2"
        if option in options:
            code, data = f"{cache.name}CODE", f"{cache.name}DATA"
            halves = [Schema(code, cache, cache.closids // 2, data), Schema(data, cache, cache.closids // 2, code)]
            found += halves if release >= (5, 15) else halves[::-1]
        else:
            found.append(Schema(cache.name, cache, cache.closids))
    found += [Schema(part.name, part, part.closids) for part in shape.bandwidths if release >= part.since]
    return tuple(found[::-1] if release >= (5, 15) else found)


def name_width(shape: Shape, release: Release) -> int:
    """How wide names are printed: room for the CODE and DATA halves is kept where the hardware could have them."""
    widths = [len(cache.name) + 4 * cache.cdp for cache in shape.caches]
    return max([*widths, *(len(part.name) for part in shape.bandwidths if release >= part.since)])


def data_width(shape: Shape, release: Release) -> int:
    """How wide values are padded."""
    widths = [(cache.ways + 3) // 4 for cache in shape.caches]
    return max([*widths, *(len(str(part.maximum)) for part in shape.bandwidths if release >= part.since)])
