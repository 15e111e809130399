"""The kubelet, what it allocated, and the container runtime."""

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from typing import Final

from reconciler.cli import words
from reconciler.cli.asking import QueryResults, release
from reconciler.cli.checks.finding import CheckResult, CheckState
from reconciler.cli.nodeview import InspectedNode
from reconciler.config.model import EndpointSection
from reconciler.policies.reclaimed import ReclaimedForm
from state.kubelet import CPU_STATE, CheckpointError, CheckpointFault, parse_cpu_manager_state, read_checkpoint
from state.model import CpuPolicy

_LITERAL: Final = re.compile(r"[^:]*\.slice:[A-Za-z-]+:[0-9a-f]{12,}")


def kubelet(node: InspectedNode, asked: QueryResults) -> Iterator[CheckResult]:
    """The kubelet and what it allocated."""
    yield _kubelet(node, asked)
    yield _pods(node)
    yield _checkpoint(node)
    yield _cpu_manager(node, asked)
    yield _endpoint(node, asked)


def runtime(node: InspectedNode, asked: QueryResults) -> Iterator[CheckResult]:
    """The container runtime: its signal, its CRI socket, NRI."""
    yield _signal(node)
    yield _cri(node, asked)
    yield _nri(node, asked)


def _kubelet(node: InspectedNode, asked: QueryResults) -> CheckResult:
    found = node.kubelet
    if not node.config.kubelet.enabled:
        return CheckResult("kubelet", CheckState.OK, "not used (kubelet.enabled: false)")
    version = f"{asked.kubelet_version or 'version not known'}, " if not node.copied else ""
    who = f"pid {found.pid}" if found.pid is not None else "does not run" if not node.copied else "copied"
    words_ = f"{version}{who}, {found.config_path or 'no configuration file'}"
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        fix = "see kubelet.config_file and kubelet.executable"
        return CheckResult("kubelet", CheckState.WARN, f"{words_}: {found.problems[0]}{more}", fix)
    if found.pid is None and not found.sources:
        return CheckResult(
            "kubelet",
            CheckState.WARN,
            "no process and no configuration",
            "start the kubelet, or name kubelet.config_file",
        )
    return CheckResult("kubelet", CheckState.OK, words_)


def _pods(node: InspectedNode) -> CheckResult:
    if node.layout is None:
        fix = "start the kubelet; with a --cgroup-root of its own, set node.cgroup_root"
        return CheckResult("kubepods", CheckState.BAD, "no kubepods directory and nothing tells where it would be", fix)
    if node.hierarchy is not None and not os.path.isdir(node.hierarchy.trigger_directory(node.layout.kubepods)):
        return CheckResult(
            "kubepods", CheckState.WARN, f"{node.layout.kubepods} does not exist yet", "start the kubelet"
        )
    pods, containers = len(node.pods), len(node.containers)
    found = f"{node.layout.kubepods}: {words.plural(pods, 'pod')}, {words.plural(containers, 'container')}"
    outside = _outside(node)
    if outside:
        fix = "give kubelet and runtime the same cgroup driver (containerd: SystemdCgroup = true for runc)"
        told = f"{found}; {len(outside)} outside, such as {outside[0][:80]}…"
        return CheckResult("kubepods", CheckState.WARN, told, fix)
    return CheckResult("kubepods", CheckState.OK, found)


def _outside(node: InspectedNode) -> list[str]:
    """Groups of containers that a runtime with the other cgroup driver made: ``….slice:cri-containerd:ID``, literally.

    They are at the root or in the runtime's own service, and nothing that is set on kubepods or a pod reaches them.
    """
    if node.hierarchy is None:
        return []
    root = node.hierarchy.trigger_directory("/")
    services = glob.glob(os.path.join(glob.escape(root), "system.slice", "*.service"))
    found: list[str] = []
    for directory in (root, *sorted(services)):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            found += [entry.path for entry in entries if _LITERAL.fullmatch(entry.name)]
    return [f"/{os.path.relpath(path, root)}" for path in sorted(found)]


def _checkpoint(node: InspectedNode) -> CheckResult:
    path = os.path.join(node.root, node.kubelet.root_dir.lstrip("/"), CPU_STATE)
    try:
        state = read_checkpoint(path, parse_cpu_manager_state)
    except CheckpointError as exc:
        fix = "the agent keeps the last good allocations; restart the kubelet if it stays"
        if exc.fault is CheckpointFault.MISSING:
            fix = "see kubelet.root_dir; without it exclusive CPUs are not known"
        return CheckResult("checkpoints", CheckState.WARN, str(exc), fix)
    owners = sum(len(containers) for containers in state.entries.values()) + len(state.by_id)
    sum_ = "checksum right" if state.verified else "no checksum"
    return CheckResult(
        "checkpoints",
        CheckState.OK,
        f"policy {state.policy.value}, {words.plural(owners, 'exclusive container')}, {sum_}",
    )


def _cpu_manager(node: InspectedNode, asked: QueryResults) -> CheckResult:
    """Where the static CPU manager and the agent's settings would meet."""
    policy = node.kubelet.cpu_manager_policy
    path = os.path.join(node.root, node.kubelet.root_dir.lstrip("/"), CPU_STATE)
    try:
        policy = read_checkpoint(path, parse_cpu_manager_state).policy.value
    except CheckpointError:
        policy = str(policy)
    reclaimed = node.config.policies.reclaimed
    if policy != CpuPolicy.STATIC.value:
        return CheckResult("CPU manager", CheckState.OK, f"policy {policy}: nothing to meet")
    if reclaimed.besteffort_cpuset:
        fix = "policies.reclaimed.besteffort_cpuset: false (the planner refuses it: container starts would fail)"
        return CheckResult(
            "CPU manager", CheckState.WARN, "static, and the besteffort directory is to be narrowed", fix
        )
    version = release(asked.kubelet_version)
    if version is not None and version < (1, 22) and reclaimed.form is not ReclaimedForm.QUOTA:
        fix = "nothing to do: BE is held by quota there; policies.reclaimed.form: quota says so"
        return CheckResult("CPU manager", CheckState.WARN, "static before 1.22 rewrites every CPU set every 10 s", fix)
    return CheckResult(
        "CPU manager", CheckState.OK, f"static, reserved {node.kubelet.reserved_cpus or 'none'}; exclusive CPUs kept"
    )


def _endpoint(node: InspectedNode, asked: QueryResults) -> CheckResult:
    kubelet_ = node.config.kubelet
    if not kubelet_.enabled or kubelet_.endpoint is EndpointSection.OFF:
        return CheckResult("kubelet /pods", CheckState.OK, "not asked (kubelet.endpoint: off)")
    if node.copied:
        return CheckResult("kubelet /pods", CheckState.OK, "a copied node: not asked")
    if asked.kubelet_body is not None:
        found = f"{asked.kubelet_url}: {words.plural(len(asked.kubelet_pods), 'pod')}"
        if asked.kubelet_problem:
            return CheckResult(
                "kubelet /pods", CheckState.WARN, f"{found}; {asked.kubelet_problem}", "see the pod named"
            )
        return CheckResult("kubelet /pods", CheckState.OK, found)
    if asked.kubelet_url is None:
        return CheckResult(
            "kubelet /pods", CheckState.WARN, "no kubelet to ask", "set kubelet.address where it is elsewhere"
        )
    fix = (
        "give credentials (kubelet.token_file, or client_cert_file and client_key_file) and the CA of its certificate "
        "(kubelet.ca_file), or open its read-only port"
    )
    return CheckResult("kubelet /pods", CheckState.WARN, asked.kubelet_problem, fix)


# The runtime


def _signal(node: InspectedNode) -> CheckResult:
    states = [path for path in node.runtime.states if os.path.isdir(path)]
    bundles = [path for path in (*node.runtime.bundles, *node.runtime.nested) if os.path.isdir(path)]
    if node.runtime.problems:
        fix = "correct it, or set runtime.state_dir and runtime.runc_roots"
        return CheckResult("runtime", CheckState.WARN, str(node.runtime.problems[0]), fix)
    if not states:
        fix = "set runtime.runc_roots; until then new containers are verified until their values stay"
        return CheckResult("runtime", CheckState.WARN, "no runc root found: no signal when a container is ready", fix)
    told = sum(node.runtime.state_file(cid) is not None for cid in node.containers)
    found = f"signal from {', '.join(_shown(node, path) for path in states)}"
    if node.containers and not told:
        fix = "set runtime.runc_roots to where the runtime keeps <id>/state.json"
        return CheckResult(
            "runtime", CheckState.WARN, f"{found}, but none of {len(node.containers)} containers is there", fix
        )
    if not bundles:
        fix = "set runtime.state_dir; without bundles a container's spec is known late"
        return CheckResult("runtime", CheckState.WARN, f"{found}; no bundles", fix)
    return CheckResult(
        "runtime", CheckState.OK, f"{found}: {told} of {words.plural(len(node.containers), 'container')}"
    )


def _shown(node: InspectedNode, path: str) -> str:
    return f"/{os.path.relpath(path, node.root)}"


def _cri(node: InspectedNode, asked: QueryResults) -> CheckResult:
    if node.copied:
        return CheckResult("CRI", CheckState.OK, "a copied node: not asked")
    if asked.cri_version is None:
        fix = "set runtime.sockets; without CRI and the kubelet's list, labels are not known"
        return CheckResult("CRI", CheckState.WARN, asked.cri_problem or "no CRI socket", fix)
    version = asked.cri_version
    found = f"{version.name} {version.version}, {version.api}, {words.plural(len(asked.cri_pods), 'pod')}"
    sick = [f"{one.type}: {one.message}" for one in asked.cri_conditions if not one.ok]
    if sick:
        return CheckResult("CRI", CheckState.WARN, f"{found}; {'; '.join(sick)}", "see the runtime's log")
    return CheckResult("CRI", CheckState.OK, found)


def _nri(node: InspectedNode, asked: QueryResults) -> CheckResult:
    if any(os.path.exists(os.path.join(node.root, path)) for path in ("run/nri/nri.sock", "var/run/nri/nri.sock")):
        return CheckResult(
            "NRI", CheckState.WARN, "this runtime has it switched on", "a plugin could do this work; do not run both"
        )
    version = asked.cri_version
    number = release(version.version) if version is not None else None
    if version is not None and version.name == "containerd" and number is not None and number >= (1, 7):
        return CheckResult("NRI", CheckState.OK, f"containerd {version.version} could have it; it is off")
    return CheckResult("NRI", CheckState.OK, "none: bypass mode is what this node needs")
