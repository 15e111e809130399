"""The agent's own planning on an offline node: a copied tree, with its recordings.

The same parts as the daemon's (tree, bundles, checkpoints, classes, policies, order of writes), without its loop. The
node is read once and nothing is written.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from cgroupfs.codecs import Value
from cgroupfs.errors import AgentError, SourceError, StoreError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.plan import KnobChange, WritePlan, order_changes
from cgroupfs.probe import cpus_in_effect, offered
from reconciler.actuators.holds import active, holding
from reconciler.cli.limits import read_value, wanted_text
from reconciler.cli.nodeview import NO_MARKS, class_rules, read_text
from reconciler.cli.nodeview import InspectedNode as Node
from reconciler.cli.recorded import RecordedNode
from reconciler.config.model import Lower
from reconciler.config.read_keys import read_keys
from reconciler.control.inventory import Inventory
from reconciler.control.persistence import POOLS, convert_plan
from reconciler.control.planner import plan
from reconciler.pods.marks import MarkReader
from reconciler.policies.cacheplan import begin, plan_cache
from reconciler.policies.yielding import scheduler_of
from reconciler.runtime import format as fmt
from reconciler.runtime.safe_files import FileRule
from reconciler.signals.cpu import CpuReading, CpuSampler, parse_stat
from reconciler.signals.memory import parse_meminfo
from reconciler.sources.checkpoints import CheckpointSource
from reconciler.sources.disks import find_disks
from reconciler.sources.manifests import ManifestDirectory, resolve
from resctrl.capability import read_capability
from resctrl.files import REAL as REAL_GROUPS
from resctrl.groups import ControlGroups
from state.cache import CachePlan, CacheRequest
from state.dump import HOLD_DEFAULTS
from state.memory import NodeMemoryReading
from state.model import Hold, NodeView, PodMeta, Setting
from state.plan import Desired, NodePlan
from state.reader import StoreDeniedError, read_dump
from state.topology_sysfs import read_topology

_BOUNDING: Final = ("cpu.set", "cpu.mems", "cpu.quota", "cpu.period", "cpu.burst", "cpu.idle", "cpu.qos")
"""Knobs whose values in force decide in which order the kernel takes others."""


class OfflineSetting(NamedTuple):
    """One planned setting and the actual value. ``state``: in place, would write, held, missing, blocked, wanted.

    *wanted*: the machine is only described, so that the actual value is unknown.
    """

    setting: Setting
    state: str
    wanted: str
    actual: str | None
    detail: str
    control_file: str = ""
    """The file's name in its hierarchy; empty: not known, or there is none."""


class PlanResult(NamedTuple):
    """The node's inventory, its plan, and the writes in their order."""

    view: NodeView
    desired: Desired
    settings: tuple[OfflineSetting, ...]
    writes: WritePlan
    sources: Mapping[str, str]
    problems: tuple[str, ...]
    cache: CachePlan | None = None
    """The groups for cache and memory bandwidth; None: nothing is wanted, or the machine is only described."""


def plan_node(node: Node, recorded_node: RecordedNode, *, files: FileOps = REAL) -> PlanResult:
    """Read and plan. Errors: `SourceError` without a hierarchy or a kubepods tree to plan for."""
    if node.hierarchy is None:
        raise SourceError("cgroups", node.problems.get("cgroups", "no hierarchy"))
    if node.layout is None:
        raise SourceError("cgroups", "no kubepods directory and no kubelet configuration with its location")
    problems = [*node.kubelet.problems, *map(str, node.runtime.problems), *recorded_node.problems]
    manifests: dict[str, PodMeta] = {}
    disks, unknown = find_disks((rule.name for rule in node.config.policies.disk.devices), node.root)
    problems += unknown
    rules, refused = class_rules(node.config)
    problems += refused
    marks = MarkReader(read_keys(node.config, rules))
    knowledge = Inventory(
        topology=read_topology(node.root),
        versions=node.hierarchy.versions(),
        layout=node.layout,
        dirs=node.runtime,
        rules=lambda: rules,
        metas=lambda uid: [*recorded_node.metas(uid), *([manifests[uid]] if uid in manifests else [])],
        signalled=lambda _: False,
        awaited=lambda _: False,
        disks=lambda: disks,
        indicators=dict,
        marks=marks,
        scheduler=scheduler_of((read_text(node.root, "proc/sys/kernel/osrelease") or "").strip()),
    )
    knowledge.take(
        knobs=offered(node.hierarchy, node.layout.kubepods, files),
        kubepods_cpus=cpus_in_effect(node.hierarchy, node.layout.kubepods, files),
    )
    for uid, dirs in node.pods.items():
        knowledge.sample(uid, dirs)
    # A manifest is found by the pod's name, which the first pass over the pods has; `reassemble` uses it.
    manifests |= _manifests(node, knowledge, marks, problems)
    if node.config.kubelet.enabled:
        checkpoints = CheckpointSource(NO_MARKS, root=node.root, kubelet_root=node.kubelet.root_dir)
        reserved, strict = node.kubelet.reserved_cpus, node.kubelet.strict_reserved
        kubelet = checkpoints.view(knowledge.pods, reserved=reserved, strict_reserved=strict)
        knowledge.take(kubelet=kubelet)
        if kubelet.problem:
            problems.append(kubelet.problem)
    for uid in node.pods:
        knowledge.reassemble(uid)
    usage = _measure(recorded_node, knowledge, problems)
    knowledge.take(node_memory=_memory(node, problems))
    actual = dict(_values(node.hierarchy, knowledge, files))
    previous, holds = _remembered(node, recorded_node, problems)
    view = knowledge.view(time.monotonic(), actual)
    desired = plan(view, previous, node.config.policies)
    reclaim = node.config.memory.lower is Lower.RECLAIM
    settings, writes = _against(desired, holds, node.hierarchy, actual, files, reclaim=reclaim)
    unread = any(problem.startswith(f"{node.store}:") for problem in problems)
    sources = {
        "kubelet": _count(recorded_node.kubelet),
        "cri": _count(recorded_node.cri.pods if recorded_node.cri is not None else None),
        "cpu": usage,
        "store": node.path_there(node.store)
        if previous is not None
        else "not readable"
        if unread
        else "no stored pools",
    }
    problems += [
        f"{pod.title}: {problem}" for pod in knowledge.pods.values() for problem in pod.classification.problems
    ]
    cache = _cache(desired.plan.cache, view, node.root)
    return PlanResult(view, desired, settings, writes, sources, tuple(dict.fromkeys(problems)), cache)


def _cache(request: CacheRequest | None, view: NodeView, root: str) -> CachePlan | None:
    """The groups as a daemon would make them at its start: BE's share, where it moves, begins low."""
    if request is None:
        return None
    try:
        capability = read_capability(root)
        groups = ControlGroups(capability.root, REAL_GROUPS) if capability.root is not None else None
        foreign, ours = (groups.foreign(), groups.ours()) if groups is not None else ((), ())
    except AgentError as exc:
        return CachePlan(problems=(str(exc),))
    level = begin(request.levels).level
    pods = view.pods.values()
    return plan_cache(request, pods, capability, level=level, foreign=len(foreign), existing=frozenset(ours))


def _count(pods: tuple[PodMeta, ...] | None) -> str:
    return "no answer" if pods is None else fmt.plural(len(pods), "pod")


def _manifests(node: Node, knowledge: Inventory, marks: MarkReader, problems: list[str]) -> dict[str, PodMeta]:
    directory = node.config.static_manifests or node.kubelet.static_pod_path
    if directory is None:
        return {}
    try:
        rule = FileRule.OPERATOR if node.config.static_manifests else FileRule.ROOT
        manifests = ManifestDirectory(directory, marks, node.root, rule).read()
    except SourceError as exc:
        problems.append(str(exc))
        return {}
    problems += manifests.problems
    names = {uid: (pod.namespace or "", pod.name or "") for uid, pod in knowledge.pods.items()}
    return {meta.uid: meta for meta in resolve(manifests.found, names, node.kubelet.node_name)}


def _measure(node: RecordedNode, knowledge: Inventory, problems: list[str]) -> str:
    """CPU use between the two recorded readings, as the agent would have sampled it."""
    if len(node.usage) < 2:
        return "unknown"
    sampler = CpuSampler()
    classes = {uid: pod.pod_class for uid, pod in knowledge.pods.items()}
    last = node.usage[-1].at
    now = time.monotonic()
    try:
        for usage_reading in node.usage:
            # On this process's clock, and ending now: an old capture's reading is of the moment that it shows.
            reading = CpuReading(
                at_s=now - (last - usage_reading.at), cpus=parse_stat(usage_reading.stat), pods=usage_reading.pods
            )
            knowledge.take(cpu=sampler.sample(reading, classes))
    except ValueError as exc:
        problems.append(f"recorded CPU use: {exc}")
        return "not usable"
    return f"measured over {last - node.usage[0].at:.1f} s"


def _memory(node: Node, problems: list[str]) -> NodeMemoryReading | None:
    """The node's /proc/meminfo, as of now; None where it cannot be read."""
    text = read_text(node.root, "proc/meminfo")
    try:
        return msgspec.structs.replace(parse_meminfo(text), age_s=0.0) if text is not None else None
    except ValueError as exc:
        problems.append(f"/proc/meminfo: {exc}")
        return None


def _values(hierarchy: Hierarchy, knowledge: Inventory, files: FileOps) -> Iterator[tuple[tuple[str, str], Value]]:
    """What bounds the writes, of every group."""
    above = (knowledge.layout.kubepods, *(group for group in _qos(knowledge)))
    pods = knowledge.pods.values()
    paths = [
        *above,
        *(pod.group.path for pod in pods),
        *(container.group.path for pod in pods for container in pod.containers),
    ]
    for path in paths:
        for name in _BOUNDING:
            text = read_value(hierarchy, path, CATALOG[name], files)
            version = hierarchy.version(CATALOG[name].controller)
            if text is not None and version is not None:
                yield (path, name), CATALOG[name].decode(text, version)


def _qos(knowledge: Inventory) -> tuple[str, str]:
    view = knowledge.view(0.0, {})
    return view.besteffort, view.burstable


def _remembered(
    node: Node, recorded_node: RecordedNode, problems: list[str]
) -> tuple[NodePlan | None, dict[str, Hold]]:
    """The plan of the agent that ran there, so that the plan moves no CPU that it would not, and its holds."""
    try:
        dump: Any = read_dump(node.store, history=0)
    except StoreDeniedError as exc:
        problems.append(str(exc))
        return None, {}
    except StoreError:
        return None, {}
    at = recorded_node.about.at if recorded_node.about is not None else time.time()
    holds = active((msgspec.convert({**HOLD_DEFAULTS, **row}, Hold) for row in dump["holds"]), at)
    row = dump["assignments"].get(POOLS)
    if row is None:
        return None, holds
    try:
        return convert_plan(row), holds
    except (msgspec.MsgspecError, ValueError) as exc:
        problems.append(f"cannot read the pools in {node.path_there(node.store)}: {exc}")
        return None, holds


def _against(
    desired: Desired,
    holds: Mapping[str, Hold],
    hierarchy: Hierarchy,
    actual: Mapping[tuple[str, str], Value],
    files: FileOps,
    *,
    reclaim: bool,
) -> tuple[tuple[OfflineSetting, ...], WritePlan]:
    """Every setting against what is there; and the writes in the kernel's order."""
    compared: dict[tuple[str, str], OfflineSetting] = {}
    changes: list[KnobChange] = []
    for key, setting in desired.settings.items():
        compared[key] = item = _compared(setting, holds, hierarchy, files)
        if item.state == "would write":
            changes.append(_change(item, hierarchy, files, reclaim=reclaim))
    writes = order_changes(changes, actual, hierarchy.versions())
    for blocked in writes.blocked:
        key = blocked.change.path, blocked.change.knob
        compared[key] = compared[key]._replace(state="blocked", detail=f"{blocked.rule}: {blocked.reason}")
    return tuple(compared.values()), writes


def _compared(setting: Setting, holds: Mapping[str, Hold], hierarchy: Hierarchy, files: FileOps) -> OfflineSetting:
    knob = CATALOG[setting.knob]
    version = hierarchy.version(knob.controller)
    actual = read_value(hierarchy, setting.path, knob, files)
    if version is None or actual is None:
        return OfflineSetting(setting, "missing", "", None, f"{knob.name} is not available there")
    file = knob.file(version) or ""
    try:
        wanted = wanted_text(knob, setting.value, version)
    except ValueError as exc:
        return OfflineSetting(setting, "missing", "", actual, f"{setting.value!r} is not writable: {exc}", file)
    if wanted == actual:
        return OfflineSetting(setting, "in place", wanted, actual, "", file)
    hold = holding(holds, path=setting.path, knob=setting.knob, pod_uid=setting.pod_uid)
    if hold is not None:
        return OfflineSetting(setting, "held", wanted, actual, f"{hold.reason} (by {hold.by})", file)
    return OfflineSetting(setting, "would write", wanted, actual, "", file)


def _change(setting: OfflineSetting, hierarchy: Hierarchy, files: FileOps, *, reclaim: bool) -> KnobChange:
    knob = CATALOG[setting.setting.knob]
    version = hierarchy.version(knob.controller)
    usage: int | None = None
    if version == 2 and knob.controller == "memory":
        # On v2 a limit below the use kills: such a write is blocked.
        try:
            usage = int(files.read(hierarchy.directory("memory", setting.setting.path), "memory.current"))
        except (OSError, ValueError):
            usage = None
    have = UNSET if version is None or setting.actual is None else knob.decode(setting.actual, version)
    return KnobChange(
        path=setting.setting.path,
        knob=knob.name,
        want=setting.setting.value,
        have=have,
        why=f"{setting.setting.policy}: {setting.setting.reason}",
        usage_bytes=usage,
        reclaim=reclaim,
    )
