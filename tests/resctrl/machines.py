"""Capabilities of machines, as `read_capability` reads them from the recorded kernels."""

from resctrl.capability import (
    BandwidthCapability,
    BandwidthUnit,
    CacheCapability,
    Capability,
    MonitorCapability,
    ResctrlStatus,
)

COUNTERS = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")


def ready(
    *parts: CacheCapability | BandwidthCapability,
    rmids: int = 32,
    root: str = "/sys/fs/resctrl",
    features: tuple[str, ...] = COUNTERS,
) -> Capability:
    return Capability(
        status=ResctrlStatus.READY,
        reason=f"mounted at {root}",
        root=root,
        caches=tuple(part for part in parts if isinstance(part, CacheCapability)),
        bandwidths=tuple(part for part in parts if isinstance(part, BandwidthCapability)),
        monitoring=MonitorCapability(features=features, groups=rmids) if rmids else None,
    )


INTEL_L3 = CacheCapability(name="L3", full=0xFFF, min_ways=1, groups=8, shared_ways=0xC00, domains=(0, 1))
INTEL_MB = BandwidthCapability(name="MB", unit=BandwidthUnit.PERCENT, minimum=10, step=10, groups=8, domains=(0, 1))
INTEL_MBPS = BandwidthCapability(name="MB", unit=BandwidthUnit.MBPS, minimum=10, step=10, groups=8, domains=(0, 1))
INTEL_L2 = CacheCapability(name="L2", full=0xFF, min_ways=1, groups=4, domains=(0, 1, 2, 3))
AMD_L3 = CacheCapability(name="L3", full=0xFFFF, min_ways=0, groups=16, sparse=True, domains=(0, 1, 2, 3))
AMD_MB = BandwidthCapability(
    name="MB", unit=BandwidthUnit.EIGHTH_GBPS, minimum=0, step=1, groups=16, domains=(0, 1, 2, 3)
)
AMD_SMBA = BandwidthCapability(
    name="SMBA", unit=BandwidthUnit.EIGHTH_GBPS, minimum=0, step=1, groups=16, domains=(0, 1, 2, 3)
)
CODE = CacheCapability(name="L3CODE", full=0xFFF, min_ways=1, groups=4, shared_ways=0xC00, domains=(0, 1))
DATA = CacheCapability(name="L3DATA", full=0xFFF, min_ways=1, groups=4, shared_ways=0xC00, domains=(0, 1))

INTEL = ready(INTEL_L3, INTEL_MB)
INTEL_WITH_L2 = ready(INTEL_L2, INTEL_L3)
MBPS = ready(INTEL_L3, INTEL_MBPS)
CDP = ready(CODE, DATA, INTEL_MB)
AMD = ready(AMD_L3, AMD_MB, AMD_SMBA)
MONITOR_ONLY = ready()
