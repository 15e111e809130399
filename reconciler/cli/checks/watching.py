"""Interference, eviction, a dynamic share of the cache: what this node supports. Disabled parts are not checked.

Where a daemon runs, its own rights count and not those of the caller: its unit or container may lack some.
"""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Final

from cgroupfs.errors import AgentError
from cgroupfs.lines import status_mask
from cgroupfs.pressure import PressureResource, node_pressure_file, read_pressure
from cgroupfs.private import POINT, private_tree
from reconciler.cli.asking import QueryResults, token_life
from reconciler.cli.checks import CheckResult, CheckState, ok, warn
from reconciler.cli.checks.machine import hardware_counters
from reconciler.cli.checks.offers import pressure_of_groups
from reconciler.cli.nodeview import InspectedNode, read_text
from reconciler.config.model import AgentMode, EndpointSection
from reconciler.detectors.rule import RuleConfig, effective
from reconciler.detectors.table import DETECTORS, DetectorEntry
from reconciler.policies.cache import signals_of as cache_signals
from reconciler.responses.eviction.config import TriggersConfig
from reconciler.responses.eviction.plan import signals_of
from reconciler.runtime import format as fmt
from reconciler.signals.perf import misses_confidence
from resctrl.capability import ResctrlStatus, read_capability
from state.closing import NodeMark
from state.eviction import EvictionMethodName

_WAITING: Final = frozenset({"cpu.wait", "cpu.wait_milli", "cpu.wait_own", "cpu.delay"})
_COUNTED: Final = frozenset({"cpi", "llc.misses"})
_CACHE: Final = frozenset({"llc.occupancy", "memory.bandwidth"})
_LATENCY: Final = "service.latency"
# Capabilities by their numbers in linux/capability.h; the last two are SETGID and SETUID.
_KILL: Final = 5
_NET_ADMIN: Final = 12
_SYS_RESOURCE: Final = 24
_SETUID: Final = (6, 7)


def watching(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """What ``interference``, ``eviction`` and a share of the cache that moves need."""
    config = node.config
    if config.interference.enabled:
        rules = effective(config.interference.rules)
        yield _rules(node, results, rules)
        yield from _private(node, results)
        yield from _probes(node, results)
    if config.interference.enabled or config.eviction.enabled:
        yield from _run_queue(node, results)
        yield from _pressure_events(node, results)
    yield from _token(node)
    yield from _recording(node, results)
    yield from _moving(node, results)
    yield from _pool_sizes(node, results)
    if config.eviction.enabled:
        yield _eviction(node, results)
        yield _closing(node, results)
        yield from _notice(node, results)


# Rules


def _rules(node: InspectedNode, results: QueryResults, rules: Mapping[str, RuleConfig]) -> CheckResult:
    """Which rules can be evaluated: one group whose signals are all available is enough."""
    lacking = _lacking(node, results)
    blind: dict[str, str] = {}
    for name, rule in rules.items():
        groups = [[lack for entry in group for lack in _lacks(entry, lacking)] for group in rule.when]
        if groups and all(groups):
            blind[name] = min(groups, key=len)[0]
    enforced = sum(not rule.dry_run for rule in rules.values())
    text = f"{fmt.plural(len(rules), 'rule')}, {enforced} enforced"
    if enforced and node.config.mode is not AgentMode.ENFORCE:
        text += f" (mode is {node.config.mode.value}: no action is taken)"
    if not blind:
        others = _signals_of(rules) - _CHECKED
        known = "all their signals are available"
        if others:
            known = f"checked signals are available; {len(others)} unchecked: see bypassctl interference"
        return ok("interference", f"{text}; {known}")
    message = ", ".join(f"{name} (no {signal})" for name, signal in blind.items())
    fixes = dict.fromkeys(lacking[signal] for signal in blind.values())
    return warn(
        "interference",
        f"{text}; not available: {message}",
        f"{'; '.join(fixes)}; or set enabled: false for these rules",
    )


def _signals_of(rules: Mapping[str, RuleConfig]) -> frozenset[str]:
    """All signals that the rules' detectors use."""
    entries = [entry for rule in rules.values() for group in rule.when for entry in group]
    return frozenset(signal for entry in entries for signal in DETECTORS[entry.name].signals(entry.config))


def _lacks(entry: DetectorEntry, lacking: Mapping[str, str]) -> list[str]:
    """The signals that a detector lacks; the kernel has the node's pressure without groups."""
    of_node = getattr(entry.config, "of", None) == "node"
    wanted = set(DETECTORS[entry.name].signals(entry.config))
    missing = {
        text for text in wanted & lacking.keys() if not (of_node and text in _PRESSURE and lacking[text] != _NO_PSI)
    }
    enough = _ANY_OF.get(entry.name, frozenset()) & wanted
    if enough - missing:
        return []
    return sorted(enough or missing)


_ANY_OF: Final[Mapping[str, frozenset[str]]] = {
    "cpi": frozenset({"cpi", "cpu.wait", "memory.bandwidth", "cpu.pressure"}),
    "cache": frozenset({"llc.misses", "llc.occupancy"}),
}
"""Detectors that answer with any of these; the others need all their signals."""
_PRESSURE: Final = frozenset(f"{resource}.pressure{full}" for resource in PressureResource for full in ("", "_full"))
_NO_PSI: Final = "see PSI above"
_CHECKED: Final = _PRESSURE | _WAITING | _COUNTED | _CACHE | {_LATENCY}
"""What `_lacking` and `_run_queue` find out. Of others the running daemon knows: `bypassctl interference`."""


def _lacking(node: InspectedNode, results: QueryResults) -> dict[str, str]:
    """Signals of pods that are unavailable on this node, each with the remedy."""
    texts: dict[str, str] = {}
    try:
        read_pressure(node_pressure_file(PressureResource.CPU, node.root))
    except AgentError:
        texts |= dict.fromkeys(_PRESSURE, _NO_PSI)
    else:
        if not (node.config.interference.private_cgroup2 or pressure_of_groups(node)):
            texts |= dict.fromkeys(_PRESSURE, "set interference.private_cgroup2: true for the pressure of pods")
    counters = results.perf_problem
    if not hardware_counters(node):
        texts |= dict.fromkeys(_COUNTED, "see PMU above")
    elif counters:
        texts |= dict.fromkeys(_COUNTED, f"counters: {counters}")
    if not node.config.policies.cache.enabled:
        texts |= dict.fromkeys(_CACHE, "set policies.cache.enabled: true to measure cache and bandwidth")
    elif not _monitors(node):
        texts |= dict.fromkeys(_CACHE, "mount resctrl with monitoring (CMT, MBM)")
    if not node.config.interference.probes:
        texts[_LATENCY] = "configure a probe in interference.probes"
    return texts


def _monitors(node: InspectedNode) -> bool:
    try:
        capability = read_capability(node.root)
    except AgentError:
        return False
    return capability.status is ResctrlStatus.READY and capability.monitoring is not None


def _run_queue(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """Waiting is available from schedstat as well, of each thread alone, where taskstats is unavailable."""
    wanted = signals_of(node.config.eviction)
    if node.config.interference.enabled:
        wanted |= _signals_of(effective(node.config.interference.rules))
    if not wanted & _WAITING or node.copied:
        return
    problem = results.taskstats_problem
    if results.daemon_pid is not None and not _holds(results, _NET_ADMIN):
        problem = "taskstats: the daemon lacks CAP_NET_ADMIN"
    if not problem:
        return
    text = f"{problem}; using schedstat of each thread"
    fix = "grant the daemon CAP_NET_ADMIN and the host's network and PID namespaces, on a kernel with CONFIG_TASKSTATS"
    if read_text(node.root, "proc/self/schedstat") is None:
        text, fix = f"{problem}; no schedstat either: run queue wait of pods is unknown", f"{fix} or CONFIG_SCHED_INFO"
    yield warn("run queue", text, fix)


def _pressure_events(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """Whether the kernel reports when memory and CPU pressure begin; elsewhere they are polled."""
    if results.pressure_window_s is not None:
        text = f"memory and CPU pressure, within {results.pressure_window_s:g} s"
        if results.daemon_pid is not None and not _holds(results, _SYS_RESOURCE):
            text += "; the daemon lacks CAP_SYS_RESOURCE: within 2 s, or refused by kernels before 6.5"
        yield ok("pressure events", text)
    elif results.pressure_problem:
        text = f"none: {results.pressure_problem}; polled each {node.config.interference.sample_s:g} s"
        yield warn("pressure events", text, "psi=1 and CAP_SYS_RESOURCE; polling works too")


def _private(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """Whether the daemon could mount the groups that pressure of pods is counted in."""
    if not node.config.interference.private_cgroup2 or node.hierarchy is None or node.copied:
        return
    tree = private_tree(node.hierarchy)
    if tree is None or tree.root != POINT or results.daemon_pid is None:
        return
    mounts = read_text("/", f"proc/{results.daemon_pid}/mountinfo")
    if mounts is not None and f" {POINT} " not in mounts:
        fix = (
            "allow the system calls: SystemCallFilter=mount umount2 in a drop-in of the unit; else see the daemon's log"
        )
        yield warn("private cgroup2", f"the daemon has not mounted {POINT}", fix)


def _probes(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    probes = node.config.interference.probes
    others = [
        name for name, probe in probes.items() if probe.command is not None and probe.command.user not in {"root", "0"}
    ]
    if others and not node.copied and not all(_holds(results, bit) for bit in _SETUID):
        fix = "add CapabilityBoundingSet=CAP_SETUID CAP_SETGID to a drop-in of the unit (docs/probes.md)"
        yield warn("probes", f"{', '.join(others)}: the daemon cannot switch users", fix)
    kubelet = node.config.kubelet
    asks = kubelet.enabled and kubelet.endpoint is not EndpointSection.OFF
    if (
        any("{ip}" in str(_target(probe)) for probe in probes.values())
        and not node.copied
        and results.kubelet_body is None
    ):
        why = "the kubelet's pod list is not available" if asks else "the kubelet's pod list is not used"
        fix = "see kubelet /pods above" if asks else "kubelet.endpoint: auto"
        yield warn("probes", f"{{ip}} has no value: {why}", fix)


def _target(probe: object) -> object:
    """What of a probe may have placeholders."""
    command = getattr(probe, "command", None)
    if command is not None:
        return command.argv
    request = getattr(probe, "http", None) or getattr(probe, "prometheus", None)
    return getattr(request, "url", "")


def _recording(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    directory = node.config.interference.record.directory
    if directory is not None and not node.copied and not _writable(results, directory):
        inside = os.path.join(os.path.dirname(node.store), "recordings")
        yield warn("recording", f"{directory} is not writable", f"use a directory such as {inside}")


def _moving(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """The inputs of BE's share of cache and bandwidth, where it is dynamic."""
    if not cache_signals(node.config.policies.cache):
        return
    lacking = _lacking(node, results)
    if misses_confidence(node.root) < 1:
        lacking["llc.misses"] = "no action possible: this processor counts second-level cache misses only"
    parts = {"llc.misses": "cache misses", "memory.bandwidth": "memory bandwidth"}
    measured = [message for signal, message in parts.items() if signal not in lacking]
    missing = {message: lacking[signal] for signal, message in parts.items() if signal in lacking}
    if missing:
        text = f"BE share adjusted by {measured[0]} only" if measured else "BE share stays at level low"
        fix = "; ".join(dict.fromkeys(missing.values()))
        yield warn("cache share", f"{text}: no {' and no '.join(missing)} measured", fix)


def _pool_sizes(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """The indicators of the sizes of online pools; an unknown one keeps a pool from shrinking."""
    lacking = _lacking(node, results)
    if missing := sorted(node.config.policies.shared.signals & lacking.keys()):
        fixes = "; ".join(dict.fromkeys(lacking[signal] for signal in missing))
        fix = f"{fixes}; or no target for it in policies.shared.provision.pid"
        text = f"{', '.join(missing)} cannot be measured: online pools do not shrink"
        yield warn("pool sizes", text, fix)


# The API server


def _token(node: InspectedNode) -> Iterator[CheckResult]:
    """How long the token for the API server is valid, as far as it says so itself. No request is sent."""
    if node.copied:
        return
    life = token_life(node, node.config.apiserver)
    if life is None:
        return
    now = time.time()
    fix, state = "", CheckState.OK
    if life.is_due(now):
        state = CheckState.BAD if life.left_s(now) <= 0 else CheckState.WARN
        fix = "bypassctl init credentials --from or --token-file; or let the daemon renew it (--use renewal); "
        fix += "docs/credentials.md"
    yield CheckResult("API token", state, life.describe(now), fix)


# Eviction


def _eviction(node: InspectedNode, results: QueryResults) -> CheckResult:
    """Whether pods go, and which of the configured means could be used."""
    config = node.config.eviction
    dry = config.dry_run or node.config.mode is not AgentMode.ENFORCE
    triggers = [name for name in TriggersConfig.__struct_fields__ if getattr(config.triggers, name).enabled]
    reason = "eviction.dry_run" if config.dry_run else f"mode is {node.config.mode.value}"
    text = f"dry run ({reason})" if dry else "enforced"
    text += f", {fmt.plural(len(triggers), 'trigger')}"
    usable: list[str] = []
    lacking: list[str] = []
    for means in config.means.order:
        why = "" if node.copied else _unusable(means, results)
        (lacking if why else usable).append(f"{means}: {why}" if why else _how(node, means))
    text += f"; by {', '.join(usable)}" if usable else "; no usable method"
    if not lacking:
        return ok("eviction", text)
    state = CheckState.WARN if usable or dry else CheckState.BAD
    fix = "fix the connection (a disruption budget that cannot be asked refuses), or remove api/cri from "
    fix += "eviction.means.order"
    return CheckResult("eviction", state, f"{text}; unusable: {'; '.join(lacking)}", fix)


def _closing(node: InspectedNode, results: QueryResults) -> CheckResult:
    """What keeps new BE pods away while evictions are enforced for a shortage."""
    config = node.config.closing
    if not config.enabled:
        return ok("closing", "off: an evicted pod's replacement may come back at once")
    problem = "" if node.copied else results.mark_problem
    if config.mark is NodeMark.NONE or (config.mark is NodeMark.AUTO and problem):
        reason = f" ({problem})" if problem else ""
        return ok("closing", f"in a shortage headroom 0, and no mark on the node{reason}")
    what = "condition BypassdClosed" if config.mark is NodeMark.CONDITION else f"taint {config.mark.taint}"
    also = "; it keeps online pods away, too" if config.mark is NodeMark.NO_SCHEDULE else ""
    if not problem:
        return ok("closing", f"in a shortage headroom 0, and {what} on the node{also}")
    use = "condition" if config.mark is NodeMark.CONDITION else "taint"
    fix = f"bind its role: bypassctl init credentials --use {use} (docs/kubernetes.md); or closing.mark: none"
    return warn("closing", f"in a shortage headroom 0, but no {what}: {problem}", fix)


def _unusable(means: EvictionMethodName, results: QueryResults) -> str:
    match means:
        case EvictionMethodName.API:
            return results.api_problem or ""
        case EvictionMethodName.CRI:
            return "" if results.cri_version is not None else results.cri_problem or "no CRI socket"
        case EvictionMethodName.SIGNAL:
            return "" if _holds(results, _KILL) else "the daemon lacks CAP_KILL"


def _how(node: InspectedNode, means: EvictionMethodName) -> str:
    """How ``signal`` works here: a kernel with cgroup.kill includes processes that are just being forked."""
    if means is not EvictionMethodName.SIGNAL or node.hierarchy is None or node.layout is None:
        return str(means)
    kubepods = node.hierarchy.trigger_directory(node.layout.kubepods)
    return "signal (cgroup.kill)" if os.path.exists(os.path.join(kubepods, "cgroup.kill")) else "signal (per process)"


def _notice(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """Files for pods that want a notice: any pod may, by its annotation."""
    pods = os.path.join(node.root, node.kubelet.root_dir.lstrip("/"), "pods")
    if not node.copied and os.path.isdir(pods) and not _writable(results, pods):
        fix = f"add ReadWritePaths={pods} to a drop-in of the unit"
        yield warn("notices", f"{pods} is not writable: eviction notices in pod volumes are impossible", fix)


# The daemon's own rights


def _holds(results: QueryResults, bit: int) -> bool:
    """Whether the daemon, or without one this process, has a capability."""
    text = read_text("/", f"proc/{results.daemon_pid or 'self'}/status") or ""
    return bool(status_mask(text, "CapEff:") >> bit & 1)


def _writable(results: QueryResults, path: str) -> bool:
    """Whether the daemon can write there, or make the directory: seen with its mounts, where it has some of its own."""
    root = f"/proc/{results.daemon_pid}/root" if results.daemon_pid is not None else ""
    while path != "/" and not os.path.isdir(root + path):
        path = os.path.dirname(path)
    return os.access(root + path, os.W_OK)
