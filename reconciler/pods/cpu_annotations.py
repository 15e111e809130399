"""A pod's CPU and memory requests in labels and annotations, parsed into `CpuPreferences` and `MemoryPreferences`.

Pure; never fails. Three dialects are read, so that a cluster of either can put bypassd on its legacy nodes:

- **Katalyst**, CPU: ``cpu_enhancement`` and ``memory_enhancement`` (JSON objects whose values are all strings),
  ``numa_number``, ``numa_ids``, ``main-container-name``, and the decision ``numa_bind_result``. Memory:
  ``oom_priority`` in ``memory_enhancement``.
- **Koordinator**, CPU: ``resource-status`` (the scheduler's decision), ``resource-spec``, ``numa-topology-spec``,
  ``cpuBurst``, and the meaning of the classes LSE and LSR for BE pods. Memory: ``memoryQOS`` (``policy`` and the
  percentages of its strategy), ``oom-score-adj`` and ``oom-score-adj-spec``.
- **rubik** and Volcano's agent: ``quota-burst-time``, the burst of each container in microseconds.

Source: Katalyst's API constants (pkg/consts) and manual; Koordinator's API (apis/extension, apis/slo/v1alpha1).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from reconciler.pods.annotations import (
    NUMA_NODES,
    JsonAnnotation,
    UnusableError,
    amount,
    bool_text,
    cpu_list,
    node_list,
    one_of,
    read_plain,
    text_of,
    whole_number,
    whole_text,
)
from state.cpu import AntiAffinity, BurstLimit, CpuPreferences, TopologyPolicy
from state.memory import MemoryPreferences

CPU_ENHANCEMENT: Final = "katalyst.kubewharf.io/cpu_enhancement"
MEMORY_ENHANCEMENT: Final = "katalyst.kubewharf.io/memory_enhancement"
NUMA_NUMBER: Final = "katalyst.kubewharf.io/numa_number"
NUMA_IDS: Final = "katalyst.kubewharf.io/numa_ids"
NUMA_BIND_RESULT: Final = "katalyst.kubewharf.io/numa_bind_result"
RESOURCE_STATUS: Final = "scheduling.koordinator.sh/resource-status"
RESOURCE_SPEC: Final = "scheduling.koordinator.sh/resource-spec"
NUMA_TOPOLOGY_SPEC: Final = "scheduling.koordinator.sh/numa-topology-spec"
CPU_BURST: Final = "koordinator.sh/cpuBurst"
MAIN_CONTAINER: Final = "kubernetes.io/main-container-name"
QUOTA_BURST_TIME: Final = "volcano.sh/quota-burst-time"
QOS_CLASS: Final = "koordinator.sh/qosClass"

# Pools that bypassd or Katalyst makes; a pod may not select them.
_OWN_POOLS: Final = frozenset({"reserve", "reserved", "reclaim", "reclaimed", "interrupt", "dedicated", "fallback"})
_POOL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_POOL_OF_NODE: Final = re.compile(r".*-NUMA\d+", re.ASCII)
_NOT_BOUND: Final = "-1"
_CONTAINER: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_MOST_BURST_US: Final = (1 << 44) - 1
"""The kernel's largest quota and burst together."""
_LONGEST_SHOWN: Final = 100

# "default" is the node's own setting: no opinion. Katalyst has reserved "dynamic" and does nothing for it yet.
_KATALYST_BURST: Final[Mapping[str, BurstLimit | None]] = {
    "default": None,
    "closed": BurstLimit.CLOSED,
    "static": BurstLimit.STATIC,
    "dynamic": BurstLimit.AUTO,
}
_KOORDINATOR_BURST: Final[Mapping[str, BurstLimit | None]] = {
    "": None,
    "none": BurstLimit.CLOSED,
    "cpuBurstOnly": BurstLimit.STATIC,
    "cfsQuotaBurstOnly": BurstLimit.QUOTA,
    "auto": BurstLimit.AUTO,
}
_BIND: Final[Mapping[str, Mapping[str, bool]]] = {
    "": {},
    "Default": {},
    "FullPCPUs": {"full_cores": True},
    "SpreadByPCPUs": {"full_cores": False, "spread_cores": True},
    # Narrows the pools of a burstable pod to its NUMA nodes, which are in numaNodeResources.
    "ConstrainedBurst": {},
}
_APART: Final[Mapping[str, AntiAffinity | None]] = {
    "": None,
    "None": None,
    "PCPULevel": AntiAffinity.CORE,
    "NUMANodeLevel": AntiAffinity.NODE,
}
_TOPOLOGY: Final[Mapping[str, TopologyPolicy | None]] = {
    "": None,
    "BestEffort": TopologyPolicy.BEST_EFFORT,
    "Restricted": TopologyPolicy.RESTRICTED,
    "SingleNUMANode": TopologyPolicy.SINGLE_NUMA_NODE,
}
# BE pods may run on an LSR pod's CPUs and never on an LSE pod's.
_LENDS: Final[Mapping[str | None, bool]] = {"LSE": False, "LSR": True}
_CPU_RESOURCES: Final = ("cpu", "kubernetes.io/batch-cpu")

_MOST_ENTRIES: Final = 128
"""Of a list in an annotation, which names NUMA nodes: more than any machine has."""

_Fields = dict[str, object]
"""Fields of `CpuPreferences`; None: it does not say."""


def parse(labels: Mapping[str, str], annotations: Mapping[str, str]) -> tuple[CpuPreferences, tuple[str, ...]]:
    """The pod's requests, and a message for every part of them that could not be used. Unknown fields are ignored."""
    problems: list[str] = []
    fields = {name: value for name, value in _katalyst(annotations, problems).items() if value is not None}
    for name, value in _koordinator(labels, annotations, problems).items():
        # Where two dialects disagree, Katalyst's counts, as it does for the class.
        if value is not None and fields.setdefault(name, value) != value:
            values = f"Katalyst's annotations give {name} {_shown(fields[name])}, Koordinator's give {_shown(value)}"
            problems.append(f"{values}: the first applies")
    return replace(CpuPreferences(), **fields), tuple(problems)


def within_request(wish: CpuPreferences, request_milli: int) -> tuple[CpuPreferences, str | None]:
    """The same without CPUs that the pod does not request, and a message if it names more than that.

    ``request_milli``: the pod's CPU request (thousandths of a CPU); 0 is unknown or none, and bounds nothing, as a
    container without a request gets no CPUs of its own.
    """
    most = -(-request_milli // 1000)
    if wish.cpus is None or not most or len(wish.cpus) <= most:
        return wish, None
    where = f"annotation {RESOURCE_STATUS}: cpuset"
    return replace(wish, cpus=None), str(InputError(where, f"{len(wish.cpus)} CPUs", f"at most its request, {most}"))


def _katalyst(annotations: Mapping[str, str], problems: list[str]) -> _Fields:
    # A broken value costs its field only. Katalyst itself drops the whole annotation when one value is not a string.
    cpu = JsonAnnotation(annotations, CPU_ENHANCEMENT, problems)
    memory = JsonAnnotation(annotations, MEMORY_ENHANCEMENT, problems)
    requested = read_plain(annotations, NUMA_IDS, node_list, problems)
    decided = read_plain(annotations, NUMA_BIND_RESULT, _bind_result, problems)
    return {
        "pool": cpu.read("cpuset_pool", _pool),
        "numa_share": cpu.read("numa_share", bool_text),
        "burst_policy": cpu.read("cpu_burst_policy", lambda value: one_of(value, _KATALYST_BURST)),
        "burst_percent": cpu.read("cpu_burst_percent", _percent),
        "align_socket": cpu.read("align_by_socket", bool_text),
        "distribute": cpu.read("distribute_evenly_across_numa", bool_text),
        "full_cores": cpu.read("full_pcpus_pairing", bool_text),
        "numa_binding": memory.read("numa_binding", bool_text),
        "numa_exclusive": memory.read("numa_exclusive", bool_text),
        "node_count": read_plain(annotations, NUMA_NUMBER, _node_count, problems),
        # The scheduler's decision has precedence over the pod's request.
        "nodes": decided or requested,
        "main": read_plain(annotations, MAIN_CONTAINER, _container_name, problems),
        "burst_us": read_plain(annotations, QUOTA_BURST_TIME, _burst_us, problems),
    }


def _koordinator(labels: Mapping[str, str], annotations: Mapping[str, str], problems: list[str]) -> _Fields:
    status = JsonAnnotation(annotations, RESOURCE_STATUS, problems)
    spec = JsonAnnotation(annotations, RESOURCE_SPEC, problems)
    required = spec.read("requiredCPUBindPolicy", lambda value: one_of(value, _BIND))
    preferred = spec.read("preferredCPUBindPolicy", lambda value: one_of(value, _BIND))
    topology = JsonAnnotation(annotations, NUMA_TOPOLOGY_SPEC, problems)
    burst = JsonAnnotation(annotations, CPU_BURST, problems)
    nodes = status.read("numaNodeResources", _node_resources)
    return {
        **(required or preferred or {}),
        "strict_cores": True if required else None,
        "lends": _LENDS.get(labels.get(QOS_CLASS)),
        "cpus": status.read("cpuset", _some_cpus),
        "nodes": nodes,
        # The same claim as Katalyst's numa_binding with a result: the pod remains on these nodes, whatever its class.
        "numa_binding": True if nodes else None,
        "apart": spec.read("preferredCPUExclusivePolicy", lambda value: one_of(value, _APART)),
        "topology_policy": topology.read("numaTopologyPolicy", lambda value: one_of(value, _TOPOLOGY)),
        "burst_policy": burst.read("policy", lambda value: one_of(value, _KOORDINATOR_BURST)),
        # Koordinator's percentages are of the limit, which is what the quota is. Above 100 the kernel refuses a
        # burst; the policy that sets it caps it, as Koordinator should (its default of 1000 is refused on v2).
        "burst_percent": burst.read("cpuBurstPercent", lambda value: whole_number(value, 0, 10_000)),
        "quota_burst_percent": burst.read("cfsQuotaBurstPercent", lambda value: whole_number(value, 0, 1_000_000)),
        "quota_burst_s": burst.read("cfsQuotaBurstPeriodSeconds", lambda value: whole_number(value, -1, 2**31)),
    }


def _percent(value: object) -> int:
    """Per cent of the quota, as a string. More than 100 is 100, as Katalyst reads it; parts are rounded down."""
    expected = "a number from 0 to 100"
    return min(100, int(amount(text_of(value, expected), expected)))


def _pool(value: object) -> str:
    expected = "a pool name: letters, digits, '-', '_' and '.', at most 63"
    name = text_of(value, expected)
    if not _POOL.fullmatch(name):
        raise UnusableError(expected)
    if name in _OWN_POOLS:
        raise UnusableError(f"a pool for pods (none of {', '.join(sorted(_OWN_POOLS))})")
    if _POOL_OF_NODE.fullmatch(name):
        raise UnusableError(
            "a name that does not end in -NUMA and a number: that suffix names a pool's part on one node"
        )
    return name


def _container_name(value: object) -> str:
    expected = "a container's name: lower-case letters, digits and '-', at most 63"
    name = text_of(value, expected)
    if not _CONTAINER.fullmatch(name):
        raise UnusableError(expected)
    return name


def _burst_us(value: object) -> int:
    return whole_text(value, 0, _MOST_BURST_US, "microseconds")


def _node_count(value: object) -> int:
    return whole_text(value, 1, NUMA_NODES, "a number of NUMA nodes")


def _bind_result(value: str) -> tuple[int, ...] | None:
    """The scheduler's decision: one node in older releases, several in later ones; -1 is "not bound"."""
    return None if value.strip() == _NOT_BOUND else node_list(value)


def _some_cpus(value: object) -> CpuSet | None:
    # An empty set decides nothing.
    return cpu_list(value) or None


def _node_resources(value: object) -> tuple[int, ...] | None:
    """The NUMA nodes of which the scheduler gave CPU time; entries for only memory or devices bind no CPUs."""
    expected = 'a list of {"node": NUMBER, "resources": {NAME: QUANTITY}}'
    if not isinstance(value, list):
        raise UnusableError(expected)
    if len(value) > _MOST_ENTRIES:
        raise UnusableError(f"{expected} of at most {_MOST_ENTRIES} entries")
    nodes: set[int] = set()
    for item in value:
        if not isinstance(item, dict):
            raise UnusableError(expected)
        resources: Any = item.get("resources") or {}  # untrusted JSON; checked at once
        if not isinstance(resources, dict):
            raise UnusableError(expected)
        if any(amount(resources[name], expected) > 0 for name in _CPU_RESOURCES if name in resources):
            nodes.add(whole_number(item.get("node"), 0, NUMA_NODES - 1))
    return tuple(sorted(nodes)) or None


def _shown(value: object) -> str:
    """For a message, bounded."""
    text = _text(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


MEMORY_QOS: Final = "koordinator.sh/memoryQOS"
OOM_SCORE_ADJ: Final = "koordinator.sh/oom-score-adj"
OOM_SCORE_ADJ_SPEC: Final = "koordinator.sh/oom-score-adj-spec"
_MOST_CONTAINERS: Final = 64
# All but "none" take the node's own percentages; with "auto" also where the node's policy is off.
_POLICIES: Final[Mapping[str, Mapping[str, bool]]] = {
    "": {},
    "default": {},
    "auto": {"auto": True},
    "none": {"off": True},
}


def memory_wish_of(annotations: Mapping[str, str]) -> tuple[MemoryPreferences, tuple[str, ...]]:
    """The pod's requests, and a message for every part of them that could not be used. Unknown fields are ignored.

    So are Koordinator's watermarks, priorities and page-cache limits, which need a kernel of their own.
    """
    problems: list[str] = []
    qos = JsonAnnotation(annotations, MEMORY_QOS, problems)
    enhancement = JsonAnnotation(annotations, MEMORY_ENHANCEMENT, problems)
    scores = JsonAnnotation(annotations, OOM_SCORE_ADJ_SPEC, problems)
    wish = MemoryPreferences(
        **(qos.read("policy", lambda value: one_of(value, _POLICIES)) or {}),
        min_percent=qos.read("minLimitPercent", _limit_percent),
        low_percent=qos.read("lowLimitPercent", _limit_percent),
        throttling_percent=qos.read("throttlingPercent", _limit_percent),
        oom_group=qos.read("oomKillGroup", lambda value: bool(whole_number(value, 0, 1))),
        oom_priority=enhancement.read("oom_priority", lambda value: _number(value, -300, 300)),
        oom_score_adj=read_plain(annotations, OOM_SCORE_ADJ, lambda value: _number(value, -1000, 1000), problems),
        container_oom_scores=scores.items(lambda value: whole_number(value, -1000, 1000), _MOST_CONTAINERS),
    )
    return wish, tuple(problems)


def _limit_percent(value: object) -> int:
    return whole_number(value, 0, 100)


def _number(value: object, low: int, high: int) -> int:
    """A whole number written as a string, which may be negative."""
    expected = f"a whole number from {low} to {high}"
    text = text_of(value, expected)
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 4 and low <= int(text) <= high):
        raise UnusableError(f"{expected}, as a string")
    return int(text)
