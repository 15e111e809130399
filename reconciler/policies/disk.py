"""disk: what BE pods may read and write per disk, and which class has priority on a busy disk.

Limits (bytes and operations a second) apply whether or not other work uses the disk; weights count only while the disk
is busy, and only under a scheduler that supports them (BFQ, or iocost on v2). Opt-in, as no default fits two disks. A
pod may limit itself further, whatever its class (rubik's ``blkio-limit``, Koordinator's ``blkioQOS``).

While a setting exists in one of these files, lines of other devices there are removed; a restore brings them back.
Source: kernel documentation, cgroup-v1/blkio-controller and cgroup-v2; measured on 6.1, 6.12 (v2) and 6.18 (v1).
Defaults of the weights: rubik has 1000 to 10.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.codecs import DeviceLimits, Row, Value
from cgroupfs.device_codecs import MAX_BFQ_WEIGHT, MAX_IOPS, MAX_LATENCY_US, MIN_CFQ_WEIGHT, cost_row
from cgroupfs.naming import QosClass
from reconciler.policies.base import Policy, PolicyConfig, process_groups, setting_of, unsupported_reason
from state.disk import Disk, DiskPlan
from state.model import NodeView, Pod, PodClass, Setting
from state.plan import NodePlan
from state.pod_index import index_of

LEAST_BPS: Final = 65_536
"""No part of a limit is smaller: a program that cannot read a page in a second appears hung."""
LEAST_IOPS: Final = 10
KEYS: Final = {"rbps": "read_bps", "wbps": "write_bps", "riops": "read_iops", "wiops": "write_iops"}
"""The limits, by the kernel's names."""
_MOST_BPS: Final = 1 << 50
_NUMBERS: Final = (*KEYS.values(), "latency_us")
_LINES: Final = ("cost_qos", "cost_model")
NAME: Final = "disk"
_LEAST: Final = {"rbps": LEAST_BPS, "wbps": LEAST_BPS, "riops": LEAST_IOPS, "wiops": LEAST_IOPS}
_MOST: Final = {"riops": MAX_IOPS, "wiops": MAX_IOPS}
_BY_MARK: Final = ", and its own by annotation"
# CFQ's (v1, up to Linux 4.20) or iocost's (v2), and BFQ's. `_supported` leaves out what this kernel does not have.
_WEIGHTS: Final = {1: ("blkio.weight", "blkio.bfq_weight"), 2: ("io.weight", "io.bfq_weight")}


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
            "max=150; empty: the kernel's choice; null: unmanaged"
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
    """The requests for each existing disk, by its number; and conflicts between two names of one disk."""
    disk_rules: dict[str, DiskRule] = {}
    texts: list[str] = []
    for rule in rules:
        disk = disks.get(rule.name)
        if disk is None:
            continue
        # A directory and the disk below it are often both named.
        first = disk_rules.get(disk.device)
        disk_rules[disk.device] = rule if first is None else _merged(first, rule, disk, texts)
    return disk_rules, texts


def _merged(first: DiskRule, second: DiskRule, disk: Disk, texts: list[str]) -> DiskRule:
    """Two rules as one, under the first name; where they differ is added to ``texts``."""
    changes: dict[str, int | str] = {}
    for name in (*_NUMBERS, *_LINES):
        item, other = getattr(first, name), getattr(second, name)
        if other is None or other == item:
            continue
        # Of two cost lines, which cannot be compared, the first.
        changes[name] = other if item is None else min(item, other) if name in _NUMBERS else item
        if item is not None:
            which = "the smaller" if name in _NUMBERS else "the first"
            texts.append(f"{first.name} and {second.name} are both {disk.title}: {which} {name} applies")
    return replace(first, **changes)


class DiskShare(StrEnum):
    """Scope of the limits."""

    NODE = "node"
    POD = "pod"


class DiskPolicyConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which disks, and how much of each."""

    enabled: Annotated[bool, Meta(description="limits and weights for the disk I/O of BE pods")] = False
    share: Annotated[
        DiskShare,
        Meta(description="limits apply to all BE pods together (node) or each (pod)"),
    ] = DiskShare.NODE
    weight_online: Annotated[
        Annotated[int, Meta(ge=MIN_CFQ_WEIGHT, le=MAX_BFQ_WEIGHT)] | None,
        Meta(description="I/O weight of online pods, kernel default 100; null: unmanaged"),
    ] = None
    weight_be: Annotated[
        Annotated[int, Meta(ge=MIN_CFQ_WEIGHT, le=MAX_BFQ_WEIGHT)] | None,
        Meta(description="I/O weight of BE pods, kernel default 100; null: unmanaged"),
    ] = 10
    devices: Annotated[tuple[DiskRule, ...], Meta(description="the disks with limits")] = ()

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.devices]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"devices has {twice!r} twice; expected each disk once")


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: DiskPolicyConfig) -> NodePlan:
    """Count the takers that share the limits, and report which limits this node supports."""
    index = index_of(view.pods)
    disk = DiskPlan(weighed=not index.beside)
    # Only with limits to share: with each container that starts it changes, and every BE pod is planned again.
    if config.share is DiskShare.NODE and any(rule.limits() for rule in config.devices):
        if view.versions.get("io") == 2:
            disk = replace(disk, takers=len(index.reclaimed), in_directory=len(index.inside) if disk.weighed else 0)
        else:
            disk = replace(disk, takers=sum(len(process_groups(pod)) for pod in index.reclaimed))
    return replace(plan, disk=disk, reasons={**plan.reasons, NAME: _reason(view, config, disk)})


def for_parents(view: NodeView, plan: NodePlan, config: DiskPolicyConfig) -> list[Setting]:
    """The besteffort directory's limits and weight, what protects its neighbours, and the root's cost model."""
    settings: list[Setting] = []
    disk = plan.disk
    # On v2 a limit binds all groups below it: one for all BE pods while only such are in besteffort.
    if disk.in_directory and (limits := _part(view, config, disk.in_directory, disk.takers)) is not None:
        settings.append(
            _setting(view.besteffort, "io.max", limits, f"limits of {disk.in_directory} of {disk.takers} BE pods")
        )
    if disk.weighed and config.weight_be is not None:
        settings += _weights(view, view.besteffort, config.weight_be, "minimum I/O weight: online pods go first")
    if config.weight_online is not None:
        settings += _weights(view, view.burstable, config.weight_online, "higher I/O weight for online pods")
    # io.latency protects a group from siblings without a target or with a larger one: so it is on those of besteffort.
    settings += _latency_targets(view, view.burstable, config)
    # iocost belongs to the machine: its files are in the root group. Without the device's own model line
    # (tools/cgroup/iocost_coef_gen.py of the kernel makes it) it uses estimates.
    for knob, model in (("io.cost_qos", False), ("io.cost_model", True)):
        rows = {
            device: cost_row(line, model=model)
            for device, rule in _rules(view, config).items()
            if (line := rule.cost_model if model else rule.cost_qos) is not None
        }
        if rows:
            settings.append(_setting("/", knob, DeviceLimits(rows), "from policies.disk.devices"))
    return _supported(settings, view)


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: DiskPolicyConfig) -> list[Setting]:
    """A BE pod's part of the limits and its weight; an online pod's weight and protection; a pod's own limits."""
    path, settings = pod.group.path, []
    settings += _limits(pod, view, plan.disk, config)
    if pod.pod_class is PodClass.RECLAIMED:
        under = plan.disk.weighed and pod.qos is QosClass.BESTEFFORT
        if config.weight_be is not None and not under:
            settings += _weights(view, path, config.weight_be, "minimum I/O weight: online pods go first")
    else:
        if config.weight_online is not None:
            settings += _weights(view, path, config.weight_online, "higher I/O weight for online pods")
        # Guaranteed pods are siblings of besteffort; other online pods are below burstable, which has the target.
        if pod.qos is QosClass.GUARANTEED:
            settings += _latency_targets(view, path, config)
    return [replace(setting, pod_uid=pod.uid) for setting in _supported(settings, view)]


def _limits(pod: Pod, view: NodeView, plan: DiskPlan, config: DiskPolicyConfig) -> list[Setting]:
    """A pod's part of BE's limits, and its own."""
    be, alone = pod.pod_class is PodClass.RECLAIMED, config.share is DiskShare.POD
    if view.versions.get("io") == 2:
        part, message = None, "limits of this pod"
        # Those in besteffort have their part there, together.
        if be and not (plan.in_directory and pod.qos is QosClass.BESTEFFORT):
            part = _part(view, config, 1, 1 if alone else plan.takers)
            message = message if alone else f"1/{plan.takers} of the BE limits"
        limits, own = _tighter(part, _own(pod, view, config, 1))
        if limits is None:
            return []
        return [_setting(pod.group.path, "io.max", limits, f"{message}{_BY_MARK if own else ''}")]
    # On v1 a throttle binds the tasks of its own group and of none below it: a limit on a pod's directory has no effect
    # (Koordinator writes it on the BE directory). Page cache that is written back later counts on v2 only.
    groups = process_groups(pod)
    parts = len(groups) if alone else plan.takers
    part = _part(view, config, 1, parts) if be else None
    limits, own = _tighter(part, _own(pod, view, config, len(groups)))
    if limits is None:
        return []
    message = f"1/{parts} of the {'pod' if alone else 'BE'} limits" if part is not None else "limits of this pod"
    message += _BY_MARK if own else ""
    return [
        setting_of(pod, group, f"blkio.{name}", _one_limit(limits, key), policy=NAME, reason=message)
        for group in groups
        for key, name in KEYS.items()
    ]


def _own(pod: Pod, view: NodeView, config: DiskPolicyConfig, parts: int) -> dict[str, dict[str, int]]:
    """An equal part of the limits that the pod requests for itself, by device; of disks in the configuration only."""
    names: dict[str, str] = {}
    for rule in config.devices:
        if (disk := view.disks.get(rule.name)) is not None:
            names |= dict.fromkeys((rule.name, disk.kernel, f"/dev/{disk.kernel}", disk.device), disk.device)
    own: dict[str, dict[str, int]] = {}
    for preference in pod.disks:
        if (device := names.get(preference.disk)) is None:
            continue
        limits = own.setdefault(device, {})
        for key, value in preference.limits.items():
            most = min(max(_LEAST[key], value // max(parts, 1)), _MOST.get(key, value))
            limits[key] = min(most, limits.get(key, most))
    return own


def _tighter(part: DeviceLimits | None, own: Mapping[str, Mapping[str, int]]) -> tuple[DeviceLimits | None, bool]:
    """The smaller of both for each limit, and whether the pod's own is in it."""
    rows: dict[str, dict[str, int | str]] = {device: dict(part[device]) for device in part} if part is not None else {}
    used = False
    for device, limits in own.items():
        row = rows.setdefault(device, {})
        for key, value in limits.items():
            before = row.get(key)
            if not isinstance(before, int) or value < before:
                row[key], used = value, True
    return (DeviceLimits(rows) if rows else None), used


def _rules(view: NodeView, config: DiskPolicyConfig) -> dict[str, DiskRule]:
    return by_device(config.devices, view.disks)[0]


def _part(view: NodeView, config: DiskPolicyConfig, mine: int, of: int) -> DeviceLimits | None:
    """``mine`` of ``of`` equal parts of every limit; None where nothing is limited on a disk that is there."""
    # Fixed parts: what one taker leaves is not used by another. On v1, with a part for each container, ``share: pod``
    # may fit better than ``share: node``.
    rows = {
        device: {
            key: max(_LEAST[key], value * mine // max(of, 1)) if isinstance(value, int) else value
            for key, value in rule.limits().items()
        }
        for device, rule in _rules(view, config).items()
        if rule.limits()
    }
    return DeviceLimits(rows) if rows else None


def _one_limit(limits: DeviceLimits, key: str) -> DeviceLimits | None:
    rows = {device: {key: limits[device][key]} for device in limits if key in limits[device]}
    return DeviceLimits(rows) if rows else None


def _latency_targets(view: NodeView, path: str, config: DiskPolicyConfig) -> list[Setting]:
    rows: Mapping[str, Row] = {
        device: {"target": rule.latency_us}
        for device, rule in _rules(view, config).items()
        if rule.latency_us is not None
    }
    return [_setting(path, "io.latency", DeviceLimits(rows), "latency target of online I/O")] if rows else []


def _weights(view: NodeView, path: str, weight: int, reason: str) -> list[Setting]:
    return [_setting(path, knob, weight, reason) for knob in _WEIGHTS[2 if view.versions.get("io") == 2 else 1]]


def _setting(path: str, knob: str, value: Value, reason: str) -> Setting:
    return Setting(path=path, knob=knob, value=value, policy=NAME, reason=reason)


def _supported(settings: Iterable[Setting], view: NodeView) -> list[Setting]:
    """Those of them that set something, by knobs that this kernel has."""
    return [
        setting for setting in settings if setting.value is not None and unsupported_reason(view, setting.knob) is None
    ]


def _reason(view: NodeView, config: DiskPolicyConfig, plan: DiskPlan) -> str:
    version = 2 if view.versions.get("io") == 2 else 1
    parts = []
    if any(rule.limits() for rule in config.devices):
        knob = "io.max" if version == 2 else "blkio.write_bps"
        missing = unsupported_reason(view, knob)
        who = "pods" if version == 2 else "containers"
        shared = (
            f"{plan.takers} BE {who} share the limits"
            if config.share is DiskShare.NODE
            else "each BE pod has the limits"
        )
        parts.append(missing or shared)
    if config.weight_be is not None or config.weight_online is not None:
        parts.append(_weights_status(view, version))
    if any(rule.latency_us is not None for rule in config.devices) and (
        missing := unsupported_reason(view, "io.latency")
    ):
        parts.append(missing)
    if any(rule.cost_qos is not None for rule in config.devices) and (
        missing := unsupported_reason(view, "io.cost_qos")
    ):
        parts.append(missing)
    lost = sorted(rule.name for rule in config.devices if rule.name not in view.disks)
    if lost:
        parts.append(f"no disk found for {', '.join(lost)}")
    parts += by_device(config.devices, view.disks)[1]
    return "; ".join(parts) or "no limit configured"


def _weights_status(view: NodeView, version: int) -> str:
    supported = [knob for knob in _WEIGHTS[version] if unsupported_reason(view, knob) is None]
    if not supported:
        return f"no weights: {unsupported_reason(view, _WEIGHTS[version][1])}"
    # An empty name: the scheduler is not known.
    idle = sorted(disk.kernel for disk in view.disks.values() if disk.scheduler not in {"", "bfq", "cfq"})
    if idle and version == 1:
        return f"weights have no effect on {', '.join(idle)}: the scheduler does not support them"
    if idle:
        return f"weights need iocost on {', '.join(idle)}: the scheduler does not support them"
    return "lower I/O weight for BE pods"


POLICY = Policy(
    name=NAME,
    summary="disk limits and weight of BE pods; latency targets and iocost for online pods",
    config_type=DiskPolicyConfig,
    precedence=56,
    decide_resources=decide_resources,
    parents=for_parents,
    pod=for_pod,
)
