"""The settings of control planes in ours: one table of each kind of object, value by value.

Two features share it: ``bypassctl init --from`` (`reconciler.config.imported`), and the settings of this node that the
daemon reads at the API server (``apiserver.node_settings``, `reconciler.config.node_layer`). Every value that a control
plane has is a setting here, or has the reason why not and the nearest setting.

Source: Koordinator's apis/configuration, apis/extension and slo/v1alpha1 (v1.8), Katalyst's config/v1alpha1 (v0.6),
Volcano's pkg/agent/config/api (v1.13).
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from cgroupfs.cpuset import CpuSet
from reconciler.settings.units import milli

Leaf = str | int | float | bool | None
# Longer texts are not parsed: they come from objects of others.
_LONGEST_LIST: Final = 400
_LONGEST_QUANTITY: Final = 24
NODE_SECTIONS: Final = ("policies.", "eviction.triggers.")
"""The only sections in which a node's settings may set something: laws of what is written, and when evictions are due.

Whether anything is written or evicted, credentials, paths, commands, servers, what is published, and where alerts are
sent is decided by files of the node alone.
"""


class Source(NamedTuple):
    """One kind of object. ``rows``: by the value's path in it, what it becomes."""

    name: str
    rows: Mapping[str, "Row"]


class Row(NamedTuple):
    """One value of a control plane."""

    setting: str  # ours, "" if there is none
    text: Callable[[Leaf], str | None]  # its value in our file; None: it has none, as the note says
    note: str = ""  # the difference in meaning, or why it has no setting, and the nearest one


def _same(value: Leaf) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else None


def _percent(value: Leaf) -> str | None:
    return f"{value:g}%" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _part(value: Leaf) -> str | None:
    """Of a ratio of 1, as percent."""
    return f"{100 * value:g}%" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _cpus(value: Leaf) -> str | None:
    """A CPU list; a single number is one, too."""
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > _LONGEST_LIST:
        return None
    try:
        return str(CpuSet.parse(str(value))) or None
    except ValueError:
        return None


def _milli(value: Leaf) -> str | None:
    """Thousandths of a CPU, of a quantity of CPUs; None: it is none."""
    if isinstance(value, bool) or value is None or len(str(value)) > _LONGEST_QUANTITY:
        return None
    try:
        return str(milli(str(value)))
    except ValueError:
        return None


def _whole_cpus(value: Leaf) -> str | None:
    """CPUs, of a quantity of CPUs, rounded up; None: it is none."""
    amount = _milli(value)
    return None if amount is None else str(-(-int(amount) // 1000))


def _flag(value: Leaf) -> str | None:
    """Also of 0 and 1."""
    # True is 1, and False is 0.
    return "true" if value == 1 else "false" if value == 0 else None


def _text_flag(value: Leaf) -> str | None:
    """Of a label, which is a text."""
    return str(value).lower() if str(value).lower() in {"true", "false"} else None


def _dry(value: Leaf) -> str | None:
    # An entry of a list of plug-ins: each of them means the same here.
    return None if not isinstance(value, str) else "true"


def _never(_: Leaf) -> str | None:
    return None


def _burst_percent(value: Leaf) -> str | None:
    # Koordinator's default is 1000 %; the kernel refuses a burst above the quota.
    return _same(min(value, 100)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _chosen(texts: Mapping[str, str]) -> Callable[[Leaf], str | None]:
    return lambda value: texts.get(value) if isinstance(value, str) else None


_SUPPRESS: Final = _chosen({"cpuset": "cpuset", "cfsQuota": "quota"})
_BURST: Final = _chosen({"cfsQuotaBurstOnly": "true", "auto": "true", "cpuBurstOnly": "false", "none": "false"})


def _either(yes: str, no: str) -> Callable[[Leaf], str | None]:
    return lambda value: (yes if value else no) if isinstance(value, bool) else None


def _identity(value: Leaf) -> str | None:
    # Of the class BE, whose identity is -1 where the feature is in use.
    return _same(value == -1) if isinstance(value, int) and not isinstance(value, bool) else None


def _none(note: str) -> Row:
    return Row("", _never, note)


def _below(prefix: str, **rows: Row) -> dict[str, Row]:
    return {f"{prefix}.{name}": row for name, row in rows.items()}


_SHARES: Final = _none("shares of an interface are at the interface: policies.network.interfaces")
_SPEED: Final = "the speed of an interface is at the interface: policies.network.interfaces"
_STAYS: Final = _none("the control plane's own, which stays")
_EVICTS: Final = "with eviction.enabled and the trigger's own; a dry run until eviction.dry_run is false"

_IO: Final = (
    *("readIOPS", "writeIOPS", "readBPS", "writeBPS", "ioWeightPercent", "readLatency", "writeLatency"),
    *("readLatencyPercent", "writeLatencyPercent", "enableUserModel", "modelReadBPS", "modelWriteBPS"),
    *("modelReadSeqIOPS", "modelWriteSeqIOPS", "modelReadRandIOPS", "modelWriteRandIOPS"),
)
_OF_CLASS: Final[Mapping[str, Row]] = {
    "cpuQOS.enable": _none("the values of cpuQOS each have a policy of their own"),
    **{
        f"cpuQOS.{name}": _none("of BE alone: policies.group_identity, policies.idle_class, policies.core_sched")
        for name in ("groupIdentity", "schedIdle", "coreExpeller")
    },
    **{
        f"{part}.{name}": _none("of the classes of pods, not of the system's or the root group")
        for part, names in (
            ("memoryQOS", ("minLimitPercent", "lowLimitPercent", "throttlingPercent", "oomKillGroup")),
            ("resctrlQOS", ("catRangeStartPercent", "catRangeEndPercent", "mbaPercent")),
        )
        for name in names
    },
    **{f"networkQOS.{name}": _SHARES for name in ("ingressRequest", "ingressLimit", "egressRequest", "egressLimit")},
    **{
        f"blkioQOS.blocks[].{name}": _none("limits of a disk are at the disk: policies.disk.devices")
        for name in ("name", "type", *(f"ioCfg.{field}" for field in _IO))
    },
    "resctrlQOS.enable": Row("policies.cache.enabled", _flag, "of all classes"),
    "memoryQOS.enable": Row("policies.memory_qos.enabled", _flag, "of all classes"),
    "blkioQOS.enable": Row("policies.disk.enabled", _flag, "list policies.disk.devices"),
    "networkQOS.enable": Row("policies.network.enabled", _flag, "list policies.network.interfaces"),
    **{
        f"memoryQOS.{name}": _none("a kernel of theirs reclaims in the background; here: policies.be_memory")
        for name in ("wmarkRatio", "wmarkScalePermill", "wmarkMinAdj")
    },
    **{
        f"memoryQOS.{name}": _none("a kernel of theirs has it; the order of the OOM killer: policies.oom_score")
        for name in ("priorityEnable", "priority")
    },
    **{
        f"memoryQOS.{name}": _none("a kernel of theirs has it; page cache: policies.memory_reclaim")
        for name in ("pageCacheEnable", "pageCacheLimitPercent", "pageCacheLimitSize", "pageCacheReclaimSync")
    },
}
KOORDINATOR: Final = Source(
    "Koordinator's slo-controller-config",
    {
        "colocation-config.enable": Row("headroom.publish", _either("koordinator", "off")),
        **{
            f"colocation-config.{name}": _STAYS
            for name in (
                *("metricAggregateDurationSeconds", "metricReportIntervalSeconds", "metricMemoryCollectPolicy"),
                *("cpuReclaimThresholdPercent", "cpuCalculatePolicy", "memoryReclaimThresholdPercent"),
                *("memoryCalculatePolicy", "degradeTimeMinutes", "updateTimeThresholdSeconds", "resourceDiffThreshold"),
                *("batchCPUThresholdPercent", "batchMemoryThresholdPercent", "midCPUThresholdPercent"),
                *("midMemoryThresholdPercent", "midUnallocatedPercent", "midReclaimMode"),
                *("midStaticCPUReservedPercent", "midStaticMemoryReservedPercent"),
            )
        },
        **_below(
            "resource-threshold-config.clusterStrategy",
            enable=Row("policies.reclaimed.enabled", _flag),
            cpuSuppressThresholdPercent=Row("policies.reclaimed.budget.limit_percent", _percent),
            cpuSuppressPolicy=Row("policies.reclaimed.form", _SUPPRESS),
            cpuSuppressMinPercent=Row("policies.reclaimed.budget.floor_percent", _percent),
            memoryEvictThresholdPercent=Row("eviction.triggers.node_memory.threshold_percent", _percent, _EVICTS),
            memoryEvictLowerPercent=Row("eviction.triggers.node_memory.lower_percent", _percent),
            cpuEvictThresholdPercent=Row("eviction.triggers.node_cpu.threshold_percent", _percent, _EVICTS),
            cpuEvictLowerPercent=Row("eviction.triggers.node_cpu.lower_percent", _percent),
            cpuEvictBESatisfactionLowerPercent=Row(
                "eviction.triggers.cpu_satisfaction.lower_percent", _percent, _EVICTS
            ),
            cpuEvictBESatisfactionUpperPercent=_none("relief is at 80 %, a constant"),
            cpuEvictBEUsageThresholdPercent=_none("90 %, a constant"),
            cpuEvictTimeWindowSeconds=_none("60 s, a constant"),
        ),
        **{
            f"resource-threshold-config.clusterStrategy.{name}": _none(
                "evictions by allocatable: eviction.triggers.reclaimed_resource, a ratio of requests to headroom"
            )
            for name in (
                *("cpuAllocatableEvictThresholdPercent", "cpuAllocatableEvictLowerPercent"),
                *("memoryAllocatableEvictThresholdPercent", "memoryAllocatableEvictLowerPercent"),
                "allocatableEvictPriorityThreshold",
            )
        },
        "resource-threshold-config.clusterStrategy.cpuEvictPolicy": _none("satisfaction is of the real limit"),
        "resource-threshold-config.clusterStrategy.evictEnabledPriorityThreshold": _none(
            "who may be evicted: eviction.classes, eviction.spared"
        ),
        **_below(
            "cpu-burst-config.clusterStrategy",
            policy=Row("policies.quota_burst.enabled", _BURST),
            cpuBurstPercent=Row(
                "policies.burst.percent",
                _burst_percent,
                "of the quota, at most 100; enable policies.burst where Koordinator's policy is auto",
            ),
            cfsQuotaBurstPercent=Row("policies.quota_burst.percent", _same),
            cfsQuotaBurstPeriodSeconds=Row("policies.quota_burst.budget_s", _same),
            sharePoolThresholdPercent=Row("policies.quota_burst.threshold_percent", _percent),
        ),
        "system-config.clusterStrategy.watermarkScaleFactor": Row("policies.watermarks.scale_factor", _same),
        "system-config.clusterStrategy.minFreeKbytesFactor": Row("policies.watermarks.min_free_factor", _same),
        **{
            f"system-config.clusterStrategy.{name}": _none("a kernel of their own has it")
            for name in (
                *("memcgReapBackGround", "schedGroupIdentityEnabled", "schedIdleSaverWmark", "pageCacheLimitEnabled"),
            )
        },
        "system-config.clusterStrategy.totalNetworkBandwidth": _none(_SPEED),
        "cpu-normalization-config.enable": _none(
            "the ratio of this node is an annotation there: policies.normalise.ratio"
        ),
        "cpu-normalization-config.defaultRatio": Row(
            "policies.normalise.ratio", _same, "of this node, whatever its CPU model"
        ),
        "resource-qos-config.clusterStrategy.policies.cpuPolicy": _none(
            "policies.group_identity, policies.idle_class and policies.core_sched are enabled one by one"
        ),
        "resource-qos-config.clusterStrategy.policies.netQOSPolicy": _none("policies.network has one form"),
        # Those of one class, below, replace some of them.
        **{
            f"resource-qos-config.clusterStrategy.{theirs}.{name}": row
            for theirs in ("lsrClass", "lsClass", "beClass", "systemClass", "cgroupRoot")
            for name, row in _OF_CLASS.items()
        },
        **_below(
            "resource-qos-config.clusterStrategy.beClass.cpuQOS",
            groupIdentity=Row("policies.group_identity.enabled", _identity),
            schedIdle=Row("policies.idle_class.enabled", _flag),
            coreExpeller=Row("policies.core_sched.enabled", _flag),
        ),
        **{
            f"resource-qos-config.clusterStrategy.{theirs}.resctrlQOS.{name}": Row(
                f"policies.cache.{ours}.{setting}", _percent, "enable policies.cache"
            )
            for theirs, ours in (("lsrClass", "dedicated"), ("lsClass", "shared"), ("beClass", "reclaimed"))
            for name, setting in (
                ("catRangeStartPercent", "cat_range_start_percent"),
                ("catRangeEndPercent", "cat_range_end_percent"),
                ("mbaPercent", "mba_percent"),
            )
        },
        **{
            f"resource-qos-config.clusterStrategy.{theirs}.memoryQOS.{name}": Row(
                f"policies.memory_qos.{ours}.{setting}", convert, "enable policies.memory_qos"
            )
            for theirs, ours in (("lsrClass", "dedicated"), ("lsClass", "shared"), ("beClass", "reclaimed"))
            for name, setting, convert in (
                ("minLimitPercent", "min_percent", _percent),
                ("lowLimitPercent", "low_percent", _percent),
                ("throttlingPercent", "throttling_percent", _percent),
                ("oomKillGroup", "oom_group", _flag),
            )
        },
    },
)
_MEASURED: Final = "headroom is measured; its floors and margins: headroom"
_REPORTED: Final = ("reservedResource", "minReclaimedResource", "minIgnoredReclaimedResource")
_CPU_HEADROOM: Final = ("enable", "maxReclaimedCoreUtilization", "maxOversoldRate", "maxHeadroomCapacityRate")
_MEMORY_HEADROOM: Final = ("enable", "freeBasedRatio", "staticBasedCapacity", "cacheBasedRatio", "maxOversoldRate")
_CPU_EVICTION: Final = (
    *("loadLowerBoundRatio", "loadThresholdMetPercentage", "loadMetricRingSize", "loadEvictionCoolDownTime"),
    *("minSuppressionToleranceDuration", "gracePeriod"),
)
_NUMA_EVICTION: Final = (
    *("thresholdMetPercentage", "metricRingSize", "gracePeriod", "thresholdExpandFactor", "candidateCount"),
    "skippedPodKinds[]",
)
_TOLERANCE: Final = "thresholdMetToleranceDuration"
_KSWAPD: Final = _none(
    "the rate of kswapd is a signal of interference rules (docs/detectors.md); no trigger of its own"
)
KATALYST: Final = Source(
    "Katalyst's AdminQoSConfiguration",
    {
        "reclaimedResourceConfig.enableReclaim": Row("policies.reclaimed.enabled", _flag),
        "reclaimedResourceConfig.reservedResourceForAllocate.cpu": Row(
            "policies.idle_buffer.buffer_milli", _milli, "with policies.idle_buffer.enabled"
        ),
        "reclaimedResourceConfig.minReclaimedResourceForAllocate.cpu": Row(
            "policies.reclaimed.minimum_cpus", _whole_cpus, "whole CPUs"
        ),
        **{
            f"reclaimedResourceConfig.{name}": _none(_MEASURED)
            for name in (
                *(f"{part}ForReport.{kind}" for part in _REPORTED for kind in ("cpu", "memory")),
                *("reservedResourceForAllocate.memory", "minReclaimedResourceForAllocate.memory"),
                *("maxNodeUtilizationPercent.cpu", "maxNodeUtilizationPercent.memory"),
                *(f"cpuHeadroomConfig.utilBasedConfig.{field}" for field in _CPU_HEADROOM),
                *(f"memoryHeadroomConfig.utilBasedConfig.{field}" for field in _MEMORY_HEADROOM),
            )
        },
        **{
            f"evictionConfig.{name}": _none("a constant of the trigger, or the pod's own grace")
            for name in (
                *(f"cpuPressureEvictionConfig.{field}" for field in _CPU_EVICTION),
                *(f"cpuPressureEvictionConfig.numaCPUPressureEvictionConfig.{field}" for field in _NUMA_EVICTION),
                *(f"reclaimedResourcesEvictionConfig.{field}" for field in ("gracePeriod", _TOLERANCE)),
                *("rootfsPressureEvictionConfig.gracePeriod", "networkEvictionConfig.gracePeriod"),
            )
        },
        "reclaimedResourceConfig.cpuHeadroomConfig.utilBasedConfig.targetReclaimedCoreUtilization": Row(
            "policies.reclaimed.budget.limit_percent", _part, "of all CPUs, not of those that BE work has"
        ),
        "advisorConfig.cpuAdvisorConfig.allowSharedCoresOverlapReclaimedCores": Row(
            "policies.shared.mode", _either("overlap", "separate")
        ),
        "advisorConfig.memoryAdvisorConfig.memoryGuardConfig.enable": Row("policies.be_memory.enabled", _flag),
        **_below(
            "evictionConfig.cpuPressureEvictionConfig",
            enableLoadEviction=Row("eviction.triggers.pool_load.enabled", _flag, _EVICTS),
            loadUpperBoundRatio=Row("eviction.triggers.pool_load.hard_ratio", _same),
            enableSuppressionEviction=Row("eviction.triggers.suppression.enabled", _flag, _EVICTS),
            maxSuppressionToleranceRate=Row("eviction.triggers.suppression.tolerance_ratio", _same),
        ),
        "evictionConfig.cpuPressureEvictionConfig.numaCPUPressureEvictionConfig.enableEviction": Row(
            "eviction.triggers.numa_cpu.enabled", _flag, _EVICTS
        ),
        "evictionConfig.cpuPressureEvictionConfig.numaCPUPressureEvictionConfig.cpuUsageRatioThreshold": Row(
            "eviction.triggers.numa_cpu.threshold_percent", _part
        ),
        **_below(
            "evictionConfig.memoryPressureEvictionConfig",
            enableNumaLevelEviction=Row("eviction.triggers.numa_memory.enabled", _flag, _EVICTS),
            numaFreeBelowWatermarkTimesReclaimedThreshold=Row("eviction.triggers.numa_memory.reclaimed_passes", _same),
            numaFreeBelowWatermarkTimesThreshold=Row("eviction.triggers.numa_memory.all_passes", _same),
            enableSystemLevelEviction=Row("eviction.triggers.memory_pressure.enabled", _flag, _EVICTS),
            systemKswapdRateThreshold=_KSWAPD,
            systemKswapdRateExceedDurationThreshold=_KSWAPD,
            enableRSSOveruseEviction=Row("eviction.triggers.rss_overuse.enabled", _flag, _EVICTS),
            rssOveruseRateThreshold=Row("eviction.triggers.rss_overuse.ratio", _same),
            gracePeriod=_none("the pod's own"),
        ),
        "evictionConfig.rootfsPressureEvictionConfig.enableRootfsPressureEviction": Row(
            "eviction.triggers.disk.enabled", _flag, _EVICTS
        ),
        "evictionConfig.reclaimedResourcesEvictionConfig.evictionThreshold.resource.katalyst.kubewharf.io/"
        "reclaimed_millicpu": Row("eviction.triggers.reclaimed_resource.cpu_ratio", _same, _EVICTS),
        "evictionConfig.reclaimedResourcesEvictionConfig.evictionThreshold.resource.katalyst.kubewharf.io/"
        "reclaimed_memory": Row("eviction.triggers.reclaimed_resource.memory_ratio", _same, _EVICTS),
        "evictionConfig.networkEvictionConfig.enableNICNetworkEviction": _none("the health of NICs is not watched"),
        "evictionConfig.dryRun[]": Row("eviction.dry_run", _dry, "there by plug-in: eviction.triggers.NAME.dry_run"),
    },
)
VOLCANO: Final = Source(
    "the ConfigMap of Volcano's agent",
    {
        "globalConfig.cpuQosConfig.enable": Row("policies.qos_level.enabled", _flag, "on kernels of openEuler"),
        "globalConfig.cpuBurstConfig.enable": Row("policies.burst.enabled", _flag),
        "globalConfig.memoryQosConfig.enable": Row("policies.be_memory.enabled", _flag),
        "globalConfig.memoryQosV2Config.enable": Row("policies.memory_qos.enabled", _flag),
        "globalConfig.networkQosConfig.enable": Row(
            "policies.network.enabled", _flag, "list policies.network.interfaces"
        ),
        **{
            f"globalConfig.networkQosConfig.{name}": _SHARES
            for name in (
                *("onlineBandwidthWatermarkPercent", "offlineLowBandwidthPercent", "offlineHighBandwidthPercent"),
                "qosCheckInterval",
            )
        },
        "globalConfig.overSubscriptionConfig.enable": _none("its agent's patch of the node: headroom.publish: node"),
        "globalConfig.overSubscriptionConfig.overSubscriptionTypes": _none("CPU and memory, as measured"),
        **_below(
            "globalConfig.evictingConfig",
            evictingCPUHighWatermark=Row("eviction.triggers.node_cpu.threshold_percent", _percent, _EVICTS),
            evictingCPULowWatermark=Row("eviction.triggers.node_cpu.lower_percent", _percent),
            evictingMemoryHighWatermark=Row("eviction.triggers.node_memory.threshold_percent", _percent, _EVICTS),
            evictingMemoryLowWatermark=Row("eviction.triggers.node_memory.lower_percent", _percent),
        ),
        **_below(
            "globalConfig.cpuThrottlingConfig",
            enable=Row("policies.reclaimed.enabled", _flag),
            cpuThrottlingThreshold=Row("policies.reclaimed.budget.limit_percent", _percent),
            cpuJitterLimitPercent=_none("a tenth of the CPUs per step, a constant"),
            cpuRecoverLimitPercent=_none("a tenth of the CPUs per step, a constant"),
        ),
        "globalConfig.nodeLabelConfig.nodeColocationEnable": _none("protect of this file"),
        "globalConfig.nodeLabelConfig.nodeOverSubscriptionEnable": _none("headroom.publish: node"),
    },
)

# What a node has of its own

_SECTIONS: Final[Mapping[str, str]] = {
    "resource-threshold-config": "resourceUsedThresholdWithBE",
    "resource-qos-config": "resourceQOSStrategy",
    "cpu-burst-config": "cpuBurstStrategy",
    "system-config": "systemStrategy",
}
"""A part of slo-controller-config, and what the manager makes of it in the specification of a NodeSLO."""
_DOMAIN: Final = "node.koordinator.sh/"
RESERVATION: Final = f"{_DOMAIN}reservation"
SYSTEM_QOS: Final = f"{_DOMAIN}system-qos-resource"
STRATEGY: Final = f"{_DOMAIN}colocation-strategy"
AMPLIFICATION: Final = f"{_DOMAIN}resource-amplification-ratio"
NODE_DOMAINS: Final = (_DOMAIN,)
"""Annotations and labels of a Node with these prefixes are settings of Koordinator, or its reports."""
JSON_ANNOTATIONS: Final = frozenset({RESERVATION, SYSTEM_QOS, STRATEGY, AMPLIFICATION})
"""Their text is an object; that of others is one value."""
REPORTS: Final = frozenset(
    f"{_DOMAIN}{name}"
    for name in (
        *("cpu-topology", "cpu-shared-pools", "be-cpu-shared-pools", "pod-cpu-allocs", "cpu-basic-info"),
        *("raw-capacity", "raw-allocatable", "resctrl", "extended-resource-spec"),
    )
)
"""Annotations that Koordinator's own programs write for each other: they set nothing."""
_SCHEDULERS: Final = _none("the scheduler's own, which stays")
NODE_KOORDINATOR: Final = Source(
    "Koordinator's annotations of the node and its NodeSLO",
    {
        f"{RESERVATION}.reservedCPUs": Row("policies.reserve.cpus", _cpus),
        f"{RESERVATION}.resources.cpu": Row("policies.reserve.count", _whole_cpus, "whole CPUs"),
        f"{RESERVATION}.resources.memory": _none("memory of the system: the kubelet's --system-reserved"),
        f"{RESERVATION}.applyPolicy": _SCHEDULERS,
        f"{SYSTEM_QOS}.cpuset": _none("CPUs of the system, without a pool for its pods: policies.reserve.cpus"),
        f"{SYSTEM_QOS}.cpusetExclusive": _none("policies.reserve.strict, for all reserved CPUs"),
        f"{_DOMAIN}cpu-normalization-ratio": Row("policies.normalise.ratio", _same, "with policies.normalise.enabled"),
        f"{_DOMAIN}cpu-normalization-enabled": Row("policies.normalise.enabled", _text_flag),
        **{f"{AMPLIFICATION}.{name}": _SCHEDULERS for name in ("cpu", "memory")},
        f"{_DOMAIN}network-bandwidth": _none(_SPEED),
        **{
            f"{_DOMAIN}{name}": _STAYS
            for name in (
                *("cpu-reclaim-ratio", "memory-reclaim-ratio", "mid-static-cpu-reserved-ratio"),
                "mid-static-memory-reserved-ratio",
            )
        },
        **{
            f"{_DOMAIN}{name}": _SCHEDULERS
            for name in ("cpu-bind-policy", "numa-allocate-strategy", "numa-topology-policy", "numa-topology-alignment")
        },
        **{
            f"{STRATEGY}.{path.partition('.')[2]}": row
            for path, row in KOORDINATOR.rows.items()
            if path.startswith("colocation-config.")
        },
        **{
            f"{_SECTIONS[part]}.{rest.removeprefix('clusterStrategy.')}": row
            for path, row in KOORDINATOR.rows.items()
            for part, _, rest in (path.partition("."),)
            if part in _SECTIONS
        },
        **{
            f"hostApplications[].{name}": _none(
                "host_workloads measures programs of the host; nothing is written to them"
            )
            for name in (
                *("name", "priority", "qos", "cgroupPath.base", "cgroupPath.parentDir", "cgroupPath.relativePath"),
                "strategy",
            )
        },
    },
)
"""The same rows as of slo-controller-config, and annotations and labels of the Node, by name."""
