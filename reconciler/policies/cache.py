"""Cache and memory bandwidth: which class gets how much of them. Opt-in; needs resctrl (CAT, MBA, or AMD's QoS).

BE work fills a shared cache with lines that are not read twice, and the memory bus with the traffic of filling it; no
CPU set keeps that from online pods. So BE gets a part of the ways, and less than all of the bandwidth, statically or
stepped down while online pods are slowed and slowly back up.

It has no control file: `cacheplan` computes the groups, `reconciler.actuators.resctrl.actuator` makes them.

Source: Koordinator's resctrl-qos and its pod annotation, rubik's dynCache, kernel documentation filesystems/resctrl.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, convert
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from reconciler.policies.responses import in_force
from state.cache import (
    CACHE,
    CacheLayout,
    CacheMode,
    CacheRequest,
    ClassShare,
    LevelControl,
    MountOption,
    ReclaimedShare,
    ShareLevels,
)
from state.model import NodeView
from state.plan import NodePlan

NAME: Final = CACHE


class CachePolicyConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of caches and memory bandwidth, by class.

    ``system`` is the share of the default group: system pods, the kubelet, every process of the host. With its default,
    all of everything, that group is not changed.
    """

    enabled: Annotated[bool, Meta(description="partition the last-level cache and memory bandwidth (resctrl)")] = False
    mount: Annotated[bool, Meta(description="mount resctrl if needed; only our own mount is ever unmounted")] = False
    mount_options: Annotated[
        tuple[MountOption, ...],
        Meta(description="cdp and cdpl2 halve the number of groups; mba_MBps uses MB/s"),
    ] = ()
    dedicated: ClassShare = ClassShare()
    shared: ClassShare = ClassShare()
    reclaimed: ReclaimedShare = ReclaimedShare()
    layout: Annotated[
        CacheLayout,
        Meta(
            description="overlapping: ranges as configured; exclusive: ranges of the same widths without a shared way"
        ),
    ] = CacheLayout.OVERLAPPING
    mode: Annotated[
        CacheMode,
        Meta(description="static: fixed BE share; dynamic: low to high, by cache misses of online pods"),
    ] = CacheMode.STATIC
    l2: Annotated[bool, Meta(description="apply the ranges to L2 caches too, where the hardware can")] = False
    avoid_shared: Annotated[
        bool, Meta(description="keep online classes off the ways that devices write to (shareable_bits)")
    ] = False
    pods: Annotated[
        bool,
        Meta(description="shares by annotation (node.koordinator.sh/resctrl, volcano.sh/cache-limit)"),
    ] = True
    bandwidth_mbps: Annotated[
        int,
        Meta(
            ge=100,
            le=10_000_000,
            description="memory bandwidth of one domain (MB/s), for hardware with absolute values and the dynamic mode",
        ),
    ] = 20_000
    slow_bandwidth_mbps: Annotated[
        int, Meta(ge=0, le=10_000_000, description="the same for slow (CXL) memory (MB/s); 0: no limit")
    ] = 0
    monitor: Annotated[
        bool,
        Meta(
            description="a monitoring group per pod for occupancy and bandwidth; in turns if the hardware has too few"
        ),
    ] = True

    # Pods of the system are not limited.
    system: ClassVar[ClassShare] = ClassShare()
    # Rubik's three sizes, that a BE pod requests by annotation; they bound the dynamic share.
    levels: ClassVar[ShareLevels] = ShareLevels()
    # See `LevelControl`.
    law: ClassVar[LevelControl] = LevelControl()
    # A turn of a pod, where monitoring groups are fewer than pods: several readings of ten seconds.
    dwell_s: ClassVar[float] = 30.0
    # A program that exec started has the default share until then.
    sweep_s: ClassVar[float] = 2.0


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: CachePolicyConfig) -> NodePlan:
    """Say what is wanted; what the machine offers is the actuator's knowledge.

    A response to interference leaves BE a part of its share only.
    """
    wish = replace(
        convert(config, CacheRequest, from_attributes=True),
        reclaimed=config.reclaimed,
        system=config.system if config.system != ClassShare() else None,
        caches=("L2", "L3") if config.l2 else ("L3",),
        slow_bandwidth_mbps=config.slow_bandwidth_mbps or None,
    )
    reason = _reason(wish)
    measures = in_force(view, plan.pools)
    if (part := measures.cache_percent) is not None:
        wish = reduced(wish, part)
        reason = f"{_reason(wish)}, reduced to {part} % of it: {measures.cache_reason}"
    return replace(plan, cache=wish, reasons={**plan.reasons, NAME: reason})


def signals_of(config: CachePolicyConfig) -> frozenset[str]:
    """What others have to measure for it: cache misses, while BE's share moves."""
    return frozenset({"llc.misses"} if config.enabled and config.mode is CacheMode.DYNAMIC else ())


def reduced(wish: CacheRequest, percent: int) -> CacheRequest:
    """The same shares with BE's reduced to a level, in any mode: at least one percent of ways and of bandwidth."""

    def part(of: int) -> int:
        return max(1, of * percent // 100)

    share, levels = wish.reclaimed, wish.levels
    width = share.cat_range_end_percent - share.cat_range_start_percent
    return replace(
        wish,
        reclaimed=replace(
            share,
            cat_range_end_percent=share.cat_range_start_percent + part(width),
            mba_percent=part(share.mba_percent),
        ),
        levels=replace(levels, **{name: part(getattr(levels, name)) for name in levels.__struct_fields__}),
    )


def _reason(wish: CacheRequest) -> str:
    if wish.mode is CacheMode.DYNAMIC:
        low, high = wish.levels.low, wish.levels.high
        cache, memory = f"{low.cache_percent}-{high.cache_percent}", f"{low.mba_percent}-{high.mba_percent}"
        return (
            f"BE has {cache} % of the cache and {memory} % of the memory bandwidth, by the cache misses of online pods"
        )
    share = wish.reclaimed
    cache = f"{share.cat_range_start_percent}-{share.cat_range_end_percent}"
    return f"BE has {cache} % of the cache and {share.mba_percent} % of the memory bandwidth"


POLICY = Policy(
    name=NAME,
    summary="shares of the last-level cache and the memory bandwidth",
    config_type=CachePolicyConfig,
    precedence=58,
    decide_resources=decide_resources,
)
