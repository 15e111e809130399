"""A configuration from what a cluster's control plane already has: its settings, in ours, and a list of what is left.

Read are Koordinator's ConfigMap ``slo-controller-config``, Katalyst's AdminQoSConfiguration, and the ConfigMap of
Volcano's agent, as ``kubectl get -o json`` writes them. Every value of the source is accounted for: it becomes a
setting, it is named with the reason why it does not and the nearest setting, or it is unknown. Values for some nodes
only (``nodeStrategies``, ``nodeConfigs``, ``nodesConfig``) are not taken: which nodes they are of is not known here.

A value that our reader refuses (`fitting`) is named like one without a counterpart.

Source: Koordinator's apis/configuration and slo/v1alpha1 (v1.8), Katalyst's config/v1alpha1 (v0.6), Volcano's
pkg/agent/config/api (v1.13).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError
from reconciler.config.load import load
from reconciler.settings.binder import ConfigError, Text
from state.printable import printable

_MOST_LEAVES: Final = 2000
_LONGEST: Final = 60
_DEEPEST: Final = 24
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?", re.ASCII)

Leaf = str | int | float | bool | None


class Source(NamedTuple):
    """One kind of object. ``rows``: by the value's path in it, what it becomes."""

    name: str
    rows: Mapping[str, "Row"]


class Row(NamedTuple):
    """``setting``: ours, "" if there is none. ``text``: its value in our file; None: as ``note`` says.

    ``note``: the difference in meaning, or why it has none, and what is nearest.
    """

    setting: str
    text: Callable[[Leaf], str | None]
    note: str = ""


class ImportedSetting(NamedTuple):
    """A line of the configuration, and where its value comes from."""

    setting: str
    text: str
    origin: str
    note: str


class Imported(NamedTuple):
    """``settings``: one of each value; those of one setting are equal. ``left``: each other value with its reason."""

    source: str
    settings: tuple[ImportedSetting, ...]
    left: tuple[str, ...]


def _same(value: Leaf) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else None


def _percent(value: Leaf) -> str | None:
    return f"{value:g}%" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _part(value: Leaf) -> str | None:
    """Of a ratio of 1, as percent."""
    return f"{100 * value:g}%" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _flag(value: Leaf) -> str | None:
    """Also of 0 and 1."""
    # True is 1, and False is 0.
    return "true" if value == 1 else "false" if value == 0 else None


def _dry(value: Leaf) -> str | None:
    return None if not isinstance(value, str) else "true"


def _never(_: Leaf) -> str | None:
    return None


def _seconds(value: Leaf) -> str | None:
    return f"{value}s" if isinstance(value, int) and not isinstance(value, bool) else None


def _suppress(value: Leaf) -> str | None:
    return {"cpuset": "cpuset", "cfsQuota": "quota"}.get(str(value))


def _burst(kinds: frozenset[str]) -> Callable[[Leaf], str | None]:
    return lambda value: ("true" if value in kinds else "false") if isinstance(value, str) else None


def _none(note: str) -> Row:
    return Row("", _never, note)


_STAYS: Final = _none("the control plane's own, which stays")
_EVICTS: Final = "with eviction.enabled and the trigger's own; a dry run until eviction.dry_run is false"

_OF_CLASS: Final[Mapping[str, Row]] = {
    "cpuQOS.enable": _none("the values of cpuQOS each have a policy of their own"),
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
        "colocation-config.enable": Row("headroom.publish", lambda value: "koordinator" if value is True else "off"),
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
        "resource-threshold-config.clusterStrategy.enable": Row("policies.reclaimed.enabled", _flag),
        "resource-threshold-config.clusterStrategy.cpuSuppressThresholdPercent": Row(
            "policies.reclaimed.budget.limit_percent", _percent
        ),
        "resource-threshold-config.clusterStrategy.cpuSuppressPolicy": Row("policies.reclaimed.form", _suppress),
        "resource-threshold-config.clusterStrategy.cpuSuppressMinPercent": Row(
            "policies.reclaimed.budget.floor_percent", _percent
        ),
        "resource-threshold-config.clusterStrategy.memoryEvictThresholdPercent": Row(
            "eviction.triggers.node_memory.threshold_percent", _percent, _EVICTS
        ),
        "resource-threshold-config.clusterStrategy.memoryEvictLowerPercent": Row(
            "eviction.triggers.node_memory.lower_percent", _percent
        ),
        "resource-threshold-config.clusterStrategy.cpuEvictThresholdPercent": Row(
            "eviction.triggers.node_cpu.threshold_percent", _percent, _EVICTS
        ),
        "resource-threshold-config.clusterStrategy.cpuEvictLowerPercent": Row(
            "eviction.triggers.node_cpu.lower_percent", _percent
        ),
        "resource-threshold-config.clusterStrategy.cpuEvictBESatisfactionLowerPercent": Row(
            "eviction.triggers.cpu_satisfaction.lower_percent", _percent, _EVICTS
        ),
        "resource-threshold-config.clusterStrategy.cpuEvictBESatisfactionUpperPercent": _none(
            "relief is at 80 %, a constant"
        ),
        "resource-threshold-config.clusterStrategy.cpuEvictBEUsageThresholdPercent": _none("90 %, a constant"),
        "resource-threshold-config.clusterStrategy.cpuEvictTimeWindowSeconds": _none("60 s, a constant"),
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
        "cpu-burst-config.clusterStrategy.policy": Row(
            "policies.quota_burst.enabled", _burst(frozenset({"cfsQuotaBurstOnly", "auto"}))
        ),
        "cpu-burst-config.clusterStrategy.cpuBurstPercent": Row(
            "policies.burst.percent", _same, "of the quota; enable policies.burst where Koordinator's policy is auto"
        ),
        "cpu-burst-config.clusterStrategy.cfsQuotaBurstPercent": Row("policies.quota_burst.percent", _same),
        "cpu-burst-config.clusterStrategy.cfsQuotaBurstPeriodSeconds": Row("policies.quota_burst.budget_s", _same),
        "cpu-burst-config.clusterStrategy.sharePoolThresholdPercent": Row(
            "policies.quota_burst.threshold_percent", _percent
        ),
        "system-config.clusterStrategy.watermarkScaleFactor": Row("policies.watermarks.scale_factor", _same),
        "system-config.clusterStrategy.minFreeKbytesFactor": Row("policies.watermarks.min_free_factor", _same),
        **{
            f"system-config.clusterStrategy.{name}": _none("a kernel of their own has it")
            for name in (
                *("memcgReapBackGround", "schedGroupIdentityEnabled", "schedIdleSaverWmark", "pageCacheLimitEnabled"),
                "totalNetworkBandwidth",
            )
        },
        "cpu-normalization-config.enable": _none(
            "the ratio of this node is an annotation there: policies.normalise.ratio"
        ),
        "cpu-normalization-config.defaultRatio": Row(
            "policies.normalise.ratio", _same, "of this node, whatever its CPU model"
        ),
        "resource-qos-config.clusterStrategy.beClass.cpuQOS.groupIdentity": Row(
            "policies.group_identity.enabled", lambda value: "true" if value == -1 else "false"
        ),
        "resource-qos-config.clusterStrategy.beClass.cpuQOS.schedIdle": Row("policies.idle_class.enabled", _flag),
        "resource-qos-config.clusterStrategy.beClass.cpuQOS.coreExpeller": Row("policies.core_sched.enabled", _flag),
        **{
            f"resource-qos-config.clusterStrategy.{theirs}.{name}": row
            for theirs in ("lsrClass", "lsClass", "beClass", "systemClass", "cgroupRoot")
            for name, row in _OF_CLASS.items()
        },
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
KATALYST: Final = Source(
    "Katalyst's AdminQoSConfiguration",
    {
        "reclaimedResourceConfig.enableReclaim": Row("policies.reclaimed.enabled", _flag),
        "reclaimedResourceConfig.cpuHeadroomConfig.utilBasedConfig.maxOversoldRate": _none("headroom is measured"),
        "reclaimedResourceConfig.cpuHeadroomConfig.utilBasedConfig.targetReclaimedCoreUtilization": Row(
            "policies.reclaimed.budget.limit_percent", _part, "of all CPUs, not of those that BE work has"
        ),
        "advisorConfig.cpuAdvisorConfig.allowSharedCoresOverlapReclaimedCores": Row(
            "policies.shared.mode", lambda value: {True: "overlap", False: "separate"}.get(value is True)
        ),
        "advisorConfig.memoryAdvisorConfig.memoryGuardConfig.enable": Row("policies.be_memory.enabled", _flag),
        "evictionConfig.cpuPressureEvictionConfig.enableLoadEviction": Row(
            "eviction.triggers.pool_load.enabled", _flag, _EVICTS
        ),
        "evictionConfig.cpuPressureEvictionConfig.loadUpperBoundRatio": Row(
            "eviction.triggers.pool_load.hard_ratio", _same
        ),
        "evictionConfig.cpuPressureEvictionConfig.enableSuppressionEviction": Row(
            "eviction.triggers.suppression.enabled", _flag, _EVICTS
        ),
        "evictionConfig.cpuPressureEvictionConfig.maxSuppressionToleranceRate": Row(
            "eviction.triggers.suppression.tolerance_ratio", _same
        ),
        "evictionConfig.cpuPressureEvictionConfig.numaCPUPressureEvictionConfig.enableEviction": Row(
            "eviction.triggers.numa_cpu.enabled", _flag, _EVICTS
        ),
        "evictionConfig.cpuPressureEvictionConfig.numaCPUPressureEvictionConfig.cpuUsageRatioThreshold": Row(
            "eviction.triggers.numa_cpu.threshold_percent", _part
        ),
        "evictionConfig.memoryPressureEvictionConfig.enableNumaLevelEviction": Row(
            "eviction.triggers.numa_memory.enabled", _flag, _EVICTS
        ),
        "evictionConfig.memoryPressureEvictionConfig.numaFreeBelowWatermarkTimesReclaimedThreshold": Row(
            "eviction.triggers.numa_memory.reclaimed_passes", _same
        ),
        "evictionConfig.memoryPressureEvictionConfig.numaFreeBelowWatermarkTimesThreshold": Row(
            "eviction.triggers.numa_memory.all_passes", _same
        ),
        "evictionConfig.memoryPressureEvictionConfig.enableSystemLevelEviction": Row(
            "eviction.triggers.memory_pressure.enabled", _flag, _EVICTS
        ),
        "evictionConfig.memoryPressureEvictionConfig.systemKswapdRateThreshold": _none(
            "the rate of kswapd is a signal of interference rules (docs/detectors.md); no trigger of its own"
        ),
        "evictionConfig.memoryPressureEvictionConfig.systemKswapdRateExceedDurationThreshold": _none(
            "the rate of kswapd is a signal of interference rules (docs/detectors.md); no trigger of its own"
        ),
        "evictionConfig.memoryPressureEvictionConfig.enableRSSOveruseEviction": Row(
            "eviction.triggers.rss_overuse.enabled", _flag, _EVICTS
        ),
        "evictionConfig.memoryPressureEvictionConfig.rssOveruseRateThreshold": Row(
            "eviction.triggers.rss_overuse.ratio", _same
        ),
        "evictionConfig.memoryPressureEvictionConfig.gracePeriod": _none(
            "the pod's own: eviction.means.default_grace_s"
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
            f"globalConfig.networkQosConfig.{name}": _none(
                "shares of an interface are at the interface: policies.network.interfaces"
            )
            for name in (
                *("onlineBandwidthWatermarkPercent", "offlineLowBandwidthPercent", "offlineHighBandwidthPercent"),
                "qosCheckInterval",
            )
        },
        "globalConfig.overSubscriptionConfig.enable": _none("its agent's patch of the node: headroom.publish: node"),
        "globalConfig.overSubscriptionConfig.overSubscriptionTypes": _none("CPU and memory, as measured"),
        "globalConfig.evictingConfig.evictingCPUHighWatermark": Row(
            "eviction.triggers.node_cpu.threshold_percent", _percent, _EVICTS
        ),
        "globalConfig.evictingConfig.evictingCPULowWatermark": Row(
            "eviction.triggers.node_cpu.lower_percent", _percent
        ),
        "globalConfig.evictingConfig.evictingMemoryHighWatermark": Row(
            "eviction.triggers.node_memory.threshold_percent", _percent, _EVICTS
        ),
        "globalConfig.evictingConfig.evictingMemoryLowWatermark": Row(
            "eviction.triggers.node_memory.lower_percent", _percent
        ),
        "globalConfig.cpuThrottlingConfig.enable": Row("policies.reclaimed.enabled", _flag),
        "globalConfig.cpuThrottlingConfig.cpuThrottlingThreshold": Row(
            "policies.reclaimed.budget.limit_percent", _percent
        ),
        "globalConfig.cpuThrottlingConfig.cpuJitterLimitPercent": _none("policies.reclaimed.budget.grow_percent"),
        "globalConfig.cpuThrottlingConfig.cpuRecoverLimitPercent": _none("policies.reclaimed.budget.grow_percent"),
        "globalConfig.nodeLabelConfig.nodeColocationEnable": _none("protect of this file"),
        "globalConfig.nodeLabelConfig.nodeOverSubscriptionEnable": _none("headroom.publish: node"),
    },
)
_OTHER_NODES: Final = ("nodeStrategies[]", "nodeConfigs[]", "nodesConfig[]")


def imported(document: object) -> Imported:
    """The configuration of one object. Errors: `InputError` for an object that is none of these, or too large."""
    source, config, problems = _recognized(document)
    settings: list[ImportedSetting] = []
    left = list(problems)
    for number, (path, value) in enumerate(_leaves(config, "")):
        if number >= _MOST_LEAVES:
            raise InputError("the object", f"more than {_MOST_LEAVES} values", "a configuration")
        if (place := next((part for part in _OTHER_NODES if part in path), None)) is not None:
            whole = printable(f"{path.partition(place)[0]}{place}", 200)
            if (text := f"{whole}: of some nodes only: which ones is not known here") not in left:
                left.append(text)
            continue
        row = source.rows.get(path)
        shown = f"{printable(path, 200)} = {printable(str(value), _LONGEST)}"
        if row is None:
            left.append(f"{shown}: not known to this version")
        elif (converted := row.text(value)) is None:
            left.append(f"{shown}: no counterpart: {row.note or 'the value has none'}")
        else:
            settings.append(ImportedSetting(row.setting, converted, shown, row.note))
    kept, others = _one_value_each(settings)
    return Imported(source.name, kept, (*left, *others))


def _one_value_each(settings: Iterable[ImportedSetting]) -> tuple[tuple[ImportedSetting, ...], list[str]]:
    """Of several values of one setting (theirs are by class, ours of the node) one, with each that equals it.

    A policy is enabled if it is for any class; of other values the first is kept. The others are named.
    """
    found: dict[str, list[ImportedSetting]] = {}
    for item in settings:
        found.setdefault(item.setting, []).append(item)
    kept: list[ImportedSetting] = []
    out: list[str] = []
    for items in found.values():
        flags = {item.text for item in items} <= {"true", "false"}
        first = next((item for item in items if flags and item.text == "true"), items[0])
        for item in items:
            if item.text == first.text:
                kept.append(item)
            else:
                out.append(f"{item.origin}: {item.setting} has one value here: {first.text}, of {first.origin}")
    return tuple(kept), out


def fitting(found: Imported) -> Imported:
    """Without the settings that our configuration refuses, each named with the reason. Errors: none."""
    try:
        load("/imported/config.yaml", edited=Text("/imported/config.yaml", "\n".join(lines(found.settings))))
    except ConfigError as exc:
        kept: list[ImportedSetting] = []
        out: list[str] = []
        for item in found.settings:
            # A bound between two settings is a problem of their section.
            inside = (problem for problem in exc.problems if f"{item.setting}.".startswith(f"{problem.path}."))
            if (problem := next(inside, None)) is None:
                kept.append(item)
            else:
                out.append(f"{item.origin}: {item.setting}: {problem.message}")
        if not out:
            raise
        return fitting(Imported(found.source, tuple(kept), (*found.left, *out)))
    return found


def lines(settings: Iterable[ImportedSetting]) -> Iterator[str]:
    """Lines of the configuration, by section; comments have each origin and the difference in meaning."""
    tree: dict[str, Any] = {}
    for item in settings:
        *sections, name = item.setting.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section.setdefault(name, []).append(item)
    yield from _lines(tree, "")


def _lines(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, list):
            first, *others = value
            note = f"; {first.note}" if first.note else ""
            yield f"{indent}{name}: {first.text}  # {first.origin}{note}"
            yield from (f"{indent}# and {item.origin}" for item in others)
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")


def _recognized(document: object) -> tuple[Source, object, list[str]]:
    """The kind, its values, and problems of parts that cannot be read."""
    if not isinstance(document, dict):
        raise InputError("the file", type(document).__name__, "one Kubernetes object")
    spec, data = document.get("spec"), document.get("data")
    if isinstance(spec, dict) and isinstance(spec.get("config"), dict):
        return KATALYST, spec["config"], []
    if not isinstance(data, dict):
        raise InputError("the object", document.get("kind", "no kind"), "a ConfigMap, or an AdminQoSConfiguration")
    parts: dict[str, object] = {}
    problems: list[str] = []
    for name, text in data.items():
        try:
            parts[str(name)] = decoded(msgspec.json.decode, str(text).encode(), deepest=_DEEPEST)
        except (ValueError, UnicodeError) as exc:
            problems.append(f"{printable(str(name), _LONGEST)}: not JSON: {printable(str(exc), 100)}")
    first = parts.get("colocation-config")
    if isinstance(first, dict) and ("globalConfig" in first or "nodesConfig" in first):
        return VOLCANO, first, problems
    if any(name in parts for name in ("colocation-config", "resource-threshold-config", "resource-qos-config")):
        return KOORDINATOR, parts, problems
    raise InputError(
        "the ConfigMap", ", ".join(map(str, list(data)[:4])) or "no data", "colocation-config and the like"
    )


def _leaves(value: object, path: str) -> Iterator[tuple[str, Leaf]]:
    """Paths and values; an element of a list is of its list."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, f"{path}[]")
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        # Of a YAML file, where our reader leaves fractions as text.
        yield path, float(value) if "." in value else int(value)
    elif value is None or isinstance(value, str | int | float | bool):
        yield path, value
