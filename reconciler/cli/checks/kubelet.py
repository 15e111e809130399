"""The kubelet, what it allocated, and the container runtime."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Final

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import AgentError, SourceError
from cgroupfs.probe import cpus_in_effect
from reconciler.cli.asking import QueryResults, release
from reconciler.cli.checks import CheckResult, bad, ok, warn
from reconciler.cli.nodeview import InspectedNode
from reconciler.config.model import EndpointSection
from reconciler.control.controllers import directories, lacking, not_passed_on, without_prefix
from reconciler.policies.reclaimed import ReclaimedForm
from reconciler.runtime import format as fmt
from reconciler.sources.bundles import Bundle, read_bundle
from reconciler.sources.outside import groups_outside
from reconciler.sources.runtime_files import STATE_JSON
from state.checkpoint import CheckpointError, CheckpointFault, read_checkpoint
from state.kubelet import CPU_STATE, CpuManagerState, parse_cpu_manager_state
from state.model import ContainerKind, CpuPolicy

_MOST_SHOWN: Final = 3
_ID_SHOWN: Final = 13


def kubelet(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """The kubelet and what it allocated."""
    yield _kubelet(node, results)
    yield _pods(node)
    yield _checkpoint(node)
    yield _cpu_manager(node, results)
    yield _endpoint(node, results)


def runtime(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """The container runtime: its signal, its CRI socket, NRI."""
    yield _signal(node)
    yield _cri(node, results)
    yield _nri(node, results)


def _kubelet(node: InspectedNode, results: QueryResults) -> CheckResult:
    kubelet_config = node.kubelet
    if not node.config.kubelet.enabled:
        return ok("kubelet", "not used (kubelet.enabled: false)")
    version = f"{results.kubelet_version or 'version unknown'}, " if not node.copied else ""
    who = (
        f"pid {kubelet_config.pid}"
        if kubelet_config.pid is not None
        else "not running"
        if not node.copied
        else "copied"
    )
    if kubelet_config.inside is not None:
        who = f"{who}, inside {kubelet_config.inside}"
    text = f"{version}{who}, {kubelet_config.config_path or 'no configuration file'}"
    if kubelet_config.problems:
        fix = "see kubelet.config_file and kubelet.executable"
        return warn("kubelet", f"{text}: {fmt.first_of(kubelet_config.problems, 1)}", fix)
    if kubelet_config.pid is None and not kubelet_config.sources:
        return warn("kubelet", "no process and no configuration found", "start the kubelet, or set kubelet.config_file")
    return ok("kubelet", text)


def _pods(node: InspectedNode) -> CheckResult:
    if node.layout is None:
        fix = "start the kubelet; with a --cgroup-root of its own, set node.cgroup_root"
        return bad("kubepods", "no kubepods directory and no configured location", fix)
    if node.hierarchy is not None and not os.path.isdir(node.hierarchy.trigger_directory(node.layout.kubepods)):
        return warn("kubepods", f"{node.layout.kubepods} does not exist yet", "start the kubelet")
    pods, containers = len(node.pods), len(node.containers)
    text = f"{node.layout.kubepods}: {fmt.plural(pods, 'pod')}, {fmt.plural(containers, 'container')}"
    outside = groups_outside(node.hierarchy) if node.hierarchy is not None else []
    if outside:
        fix = "configure the same cgroup driver for kubelet and runtime (containerd: SystemdCgroup = true for runc)"
        message = f"{text}; {len(outside)} outside, such as {outside[0][:80]}…"
        return warn("kubepods", message, fix)
    if taken_out := _taken_out(node):
        fix = "the daemon puts it back in kubepods and below; above: systemctl set-property or Delegate= of that unit"
        return warn("kubepods", f"{text}; {taken_out[0]}", fix)
    return ok("kubepods", text)


def _taken_out(node: InspectedNode) -> list[str]:
    """Directories that do not pass a controller on to the pods (v2), as text; a cpuset without its usual names (v1)."""
    if node.hierarchy is None or node.layout is None:
        return []
    pods = [
        pod.group.path
        for pod in node.pods.values()
        if pod.containers and not any(node.runtime.sandbox(cid) for cid in pod.containers)
    ]
    found = ((path, lacking(node.hierarchy, path)) for path, _ in directories(node.layout, pods))
    texts = [not_passed_on(path, lacks) for path, lacks in found if lacks]
    return [*texts, *([prefix] if (prefix := without_prefix(node.hierarchy)) else [])]


def _cpu_state(node: InspectedNode) -> CpuManagerState:
    """Errors: `CheckpointError`."""
    path = os.path.join(node.root, node.kubelet.root_dir.lstrip("/"), CPU_STATE)
    return read_checkpoint(path, parse_cpu_manager_state)


def _checkpoint(node: InspectedNode) -> CheckResult:
    try:
        state = _cpu_state(node)
    except CheckpointError as exc:
        fix = "bypassd keeps the last valid allocations; restart the kubelet if the problem persists"
        if exc.fault is CheckpointFault.MISSING:
            fix = "check kubelet.root_dir; without it exclusive CPUs are unknown"
        return warn("checkpoints", str(exc), fix)
    owners = sum(map(len, state.entries.values()))
    checksum = "checksum OK" if state.verified else "no checksum"
    return ok("checkpoints", f"policy {state.policy.value}, {fmt.plural(owners, 'exclusive container')}, {checksum}")


def _cpu_manager(node: InspectedNode, results: QueryResults) -> CheckResult:
    """Where the static CPU manager and the agent's settings would meet."""
    policy = str(node.kubelet.cpu_manager_policy)
    state, fault = None, None
    try:
        state = _cpu_state(node)
        policy = state.policy.value
    except CheckpointError as exc:
        fault = exc.fault
    reclaimed = node.config.policies.reclaimed
    if policy != CpuPolicy.STATIC.value:
        by = "" if fault is None else " by the kubelet's configuration"
        return ok("CPU manager", f"CPU manager policy {policy}{by}: OK")
    if state is None:
        reason = f" ({fault.value})" if fault is not None else ""
        text = f"static policy, but exclusive CPUs are unknown: the checkpoint is not usable{reason}"
        fix = "see checkpoints; a running daemon keeps the last valid allocations, BE may run on newer ones"
        return warn("CPU manager", text, fix)
    if reclaimed.besteffort_cpuset:
        fix = "set policies.reclaimed.besteffort_cpuset: false (the planner refuses it: container starts would fail)"
        return warn("CPU manager", "static policy, but besteffort_cpuset is enabled", fix)
    version = release(results.kubelet_version)
    if version is not None and version < (1, 22) and reclaimed.form is not ReclaimedForm.QUOTA:
        fix = "no action needed: BE is limited by quota; policies.reclaimed.form: quota makes it explicit"
        return warn("CPU manager", "static policy before 1.22 rewrites every CPU set every 10 s", fix)
    text = f"static policy, reserved {node.kubelet.reserved_cpus or 'none'}"
    wrong = _contradictions(node, state)
    if wrong:
        fix = (
            "run doctor again after 10 s; if it persists, restart that pod (kubernetes 120230); meanwhile BE work is "
            "kept off the CPUs where it runs"
        )
        return warn("CPU manager", f"{text}; {fmt.first_of(wrong, 1)}", fix)
    owners = sum(map(len, state.entries.values()))
    own = "exclusive CPUs are those of the kernel's files" if owners else "no container has exclusive CPUs"
    return ok("CPU manager", f"{text}; {own}")


def _contradictions(node: InspectedNode, state: CpuManagerState) -> list[str]:
    """Containers whose CPU set differs from the checkpoint, as text; of a pod in a kernel of its own, the pod's set."""
    if node.hierarchy is None:
        return []
    texts: list[str] = []
    # Entries outlive their pods for a while.
    present = [cpus for uid, names in state.entries.items() if uid in node.pods for cpus in names.values()]
    exclusive = CpuSet.union(present) if not node.config.policies.reclaimed.share_exclusive else EMPTY
    for uid, pod in sorted(node.pods.items()):
        for cid, group in sorted(pod.containers.items()):
            bundle, path = _bundle(node, cid), group.path
            name = (bundle.container_name if bundle is not None else None) or ""
            record = state.exclusive_of(uid, name, cid)
            with contextlib.suppress(SourceError):
                path = pod.group.path if node.runtime.sandbox(cid) is not None else path
            kernel = cpus_in_effect(node.hierarchy, path)
            others = exclusive - CpuSet.union(state.entries.get(uid, {}).values())
            if not record:
                # A pause container's kind is in its bundle; of what has none nothing is known.
                if bundle is not None and bundle.kind is not ContainerKind.SANDBOX and kernel & others:
                    who = f"{name or cid[:_ID_SHOWN]} of pod {uid}"
                    texts.append(f"{who} may run on exclusive CPU {kernel & others}")
                continue
            if kernel and kernel != record:
                texts.append(
                    f"the checkpoint gives {name or cid[:_ID_SHOWN]} of pod {uid} CPU {record}, "
                    f"its CPU set file has CPU {kernel}"
                )
    return texts


def _bundle(node: InspectedNode, cid: str) -> Bundle | None:
    """What the runtime got for a container; None where that is not known."""
    with contextlib.suppress(AgentError):
        directory = node.runtime.bundle(cid)
        return None if directory is None else read_bundle(directory, cid)
    return None


def _endpoint(node: InspectedNode, results: QueryResults) -> CheckResult:
    section = node.config.kubelet
    if not section.enabled or section.endpoint is EndpointSection.OFF:
        return ok("kubelet /pods", "not used (kubelet.endpoint: off)")
    if node.copied:
        return ok("kubelet /pods", "copied node: not read")
    if results.kubelet_body is not None:
        text = f"{results.kubelet_url}: {fmt.plural(len(results.kubelet_pods), 'pod')}"
        if results.kubelet_problem:
            return warn("kubelet /pods", f"{text}; {results.kubelet_problem}", "see the named pod")
        return ok("kubelet /pods", text)
    without = "batch requests and limits of BE pods are not known without it, nor applied"
    if results.kubelet_url is None:
        fix = f"set kubelet.address if it listens elsewhere; {without}"
        return warn("kubelet /pods", "kubelet not reachable", fix)
    fix = (
        "make credentials (bypassctl init credentials --use kubelet, docs/credentials.md), or set kubelet.token_file "
        "and kubelet.ca_file, or enable its read-only port, or set kubelet.endpoint: off; "
        f"{without}"
    )
    return warn("kubelet /pods", results.kubelet_problem, fix)


# The runtime


def _signal(node: InspectedNode) -> CheckResult:
    states = [path for path in node.runtime.states if os.path.isdir(path)]
    bundles = [path for path in (*node.runtime.bundles, *node.runtime.nested) if os.path.isdir(path)]
    if node.runtime.problems:
        fix = "correct it, or set runtime.state_dir and runtime.runc_roots"
        return warn("runtime", str(node.runtime.problems[0]), fix)
    if not states:
        fix = "set runtime.runc_roots; without it new containers are verified until their values are stable"
        return warn("runtime", "no runc root found: no event when a container starts", fix)
    sandboxed = {cid for cid in node.containers if node.runtime.sandbox(cid) is not None}
    containers = [cid for cid in node.containers if cid not in sandboxed]
    files = {cid: os.path.basename(path) for cid in containers if (path := node.runtime.state_file(cid)) is not None}
    number = len(files)
    text = f"events from {', '.join(map(node.path_there, states))}"
    if containers and not number:
        fix = "set runtime.runc_roots to where the runtime keeps <id>/state.json (runc) or <id>/status (crun)"
        return warn("runtime", f"{text}, but none of {len(containers)} containers found there", fix)
    if not bundles:
        fix = "set runtime.state_dir; without bundles a container's spec is known late"
        return warn("runtime", f"{text}; no bundles", fix)
    text += f": {number} of {fmt.plural(len(containers), 'container')}"
    counts = Counter(files.values())
    if counts.keys() - {STATE_JSON}:
        text += f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})"
    if sandboxed:
        text += f"; {fmt.plural(len(sandboxed), 'group')} of kata or gVisor: settings apply to the pod as a whole"
    if number < len(containers):
        without = [cid[:_ID_SHOWN] for cid in containers if cid not in files]
        text += f"; without a runtime's file: {', '.join(without[:_MOST_SHOWN])}"
        fix = "none, unless runtime.runc_roots misses a root: their values are verified until they stay"
        return warn("runtime", text, fix)
    return ok("runtime", text)


def _cri(node: InspectedNode, results: QueryResults) -> CheckResult:
    if node.copied:
        return ok("CRI", "copied node: not read")
    if results.cri_version is None:
        fix = "set runtime.sockets; without CRI and the kubelet's pod list, labels are unknown"
        return warn("CRI", results.cri_problem or "no CRI socket", fix)
    version = results.cri_version
    text = f"{version.name} {version.version}, {version.api}, {fmt.plural(len(results.cri_pods), 'pod')}"
    sick = [f"{condition.type}: {condition.message}" for condition in results.cri_conditions if not condition.ok]
    if sick:
        return warn("CRI", f"{text}; {'; '.join(sick)}", "see the runtime's log")
    return ok("CRI", text)


def _nri(node: InspectedNode, results: QueryResults) -> CheckResult:
    if any(os.path.exists(os.path.join(node.root, path)) for path in ("run/nri/nri.sock", "var/run/nri/nri.sock")):
        return warn("NRI", "enabled in this runtime", "an NRI plugin can do this work; do not use both")
    version = results.cri_version
    number = release(version.version) if version is not None else None
    if version is not None and version.name == "containerd" and number is not None and number >= (1, 7):
        return ok("NRI", f"containerd {version.version} supports it; disabled")
    return ok("NRI", "none: this node needs bypassd")
