"""Kernel, CPUs, cgroups, and what else the kernel and the CPU offer."""

import os
from collections.abc import Iterator
from typing import Final

from cgroupfs.errors import AgentError, SourceError
from cgroupfs.hierarchy import UNIFIED
from cgroupfs.knobs import CATALOG
from cgroupfs.pressure import PressureResource, group_pressure_file, node_pressure_file, read_pressure
from reconciler.actuators.core_sched.prctl import RealPrctl, unable
from reconciler.cli.asking import release
from reconciler.cli.checks.devices import devices
from reconciler.cli.checks.finding import CheckResult, CheckState
from reconciler.cli.checks.memory import memory
from reconciler.cli.nodeview import InspectedNode, has_capability, read_text
from reconciler.runtime import format as fmt
from resctrl.capability import ResctrlStatus, read_capability
from resctrl.groups import ControlGroups
from state.topology_sysfs import read_topology

_SHOWN: Final = ("cpuset", "cpu", "cpuacct", "memory", "pids", "blkio", "io")
_NEEDED: Final = ("cpuset", "cpu", "memory")
_SYS_RESOURCE: Final = 24
_SCHEDULER: Final = {"cpu.burst": "CFS burst", "cpu.idle": "idle class"}
_DISTRIBUTIONS: Final = {"cpu.identity": "group identity", "cpu.qos": "QoS level"}
_IDENTITY_SYSCTL: Final = "kernel.sched_group_identity_enabled"


def machine(node: InspectedNode) -> Iterator[CheckResult]:
    """Kernel, cgroups, and what else the kernel offers."""
    yield _kernel(node)
    yield _cpus(node)
    yield from _cgroups(node)
    yield _scheduler(node)
    yield from _core_scheduling(node)
    yield _psi(node)
    yield _pmu(node)
    yield _resctrl(node)
    yield from memory(node)
    yield from devices(node)


def _kernel(node: InspectedNode) -> CheckResult:
    text = (read_text(node.root, "proc/sys/kernel/osrelease") or "").strip()
    version = release(text)
    if version is None:
        return CheckResult(
            "kernel", CheckState.WARN, "release unknown: cannot read proc/sys/kernel/osrelease", "mount /proc"
        )
    if version < (5, 10):
        return CheckResult(
            "kernel",
            CheckState.WARN,
            f"{text}: older than the oldest tested release (5.10)",
            "5.10 or later identifies writers and has PSI",
        )
    return CheckResult("kernel", CheckState.OK, text)


def _cpus(node: InspectedNode) -> CheckResult:
    try:
        topology = read_topology(node.root)
    except SourceError as exc:
        return CheckResult("CPUs", CheckState.BAD, str(exc), "mount /sys")
    parts = [fmt.plural(len(topology.sockets()), "socket"), fmt.plural(len(topology.nodes()), "NUMA node")]
    parts.append("hyper-threads" if topology.smt else "no SMT")
    return CheckResult("CPUs", CheckState.OK, f"{topology.online}: {', '.join(parts)}")


def _cgroups(node: InspectedNode) -> Iterator[CheckResult]:
    hierarchy = node.hierarchy
    if hierarchy is None:
        fix = "mount the cgroup hierarchies (in a container: mount the host's /sys/fs/cgroup)"
        yield CheckResult("cgroups", CheckState.BAD, node.problems["cgroups"], fix)
        return
    versions = hierarchy.versions()
    parts = [
        f"v{number}: {' '.join(name for name in _SHOWN if versions.get(name) == number)}"
        for number in (1, 2)
        if any(versions.get(name) == number for name in _SHOWN)
    ]
    if UNIFIED in versions and 2 not in {versions.get(name) for name in _SHOWN}:
        parts.append("cgroup2 without controllers")
    driver = f", {node.layout.driver.value} driver" if node.layout is not None else ""
    missing = [name for name in _NEEDED if name not in versions]
    read_only = [] if node.copied else [name for name in _NEEDED if name in versions and not hierarchy.writable(name)]
    text = f"{hierarchy.mode.value}{driver}; {'; '.join(parts)}"
    if missing:
        yield CheckResult(
            "cgroups", CheckState.BAD, f"{text}; without {', '.join(missing)}", "mount or enable the controllers"
        )
    elif read_only:
        yield CheckResult(
            "cgroups", CheckState.BAD, f"{text}; {', '.join(read_only)} read-only", "mount them read-write"
        )
    else:
        yield CheckResult("cgroups", CheckState.OK, text)


def _scheduler(node: InspectedNode) -> CheckResult:
    """What the policies burst, idle_class, group_identity and qos_level need of the kernel."""
    name = "scheduler"
    there = node.knobs
    if not there:
        return CheckResult(
            name, CheckState.WARN, "unknown: no kubepods directory", "start the kubelet, then run doctor again"
        )
    text = ", ".join(message for knob, message in (_SCHEDULER | _DISTRIBUTIONS).items() if knob in there) or "neither"
    switch = (read_text(node.root, f"proc/sys/{_IDENTITY_SYSCTL.replace('.', '/')}") or "").strip()
    if "cpu.identity" in there and switch == "0":
        return CheckResult(name, CheckState.WARN, f"{text} (disabled)", f"sysctl -w {_IDENTITY_SYSCTL}=1")
    lacking = [knob for knob in _SCHEDULER if knob not in there]
    if lacking:
        told = " and ".join(f"{_SCHEDULER[knob]}: Linux {CATALOG[knob].forms[1].since}" for knob in lacking)
        return CheckResult(name, CheckState.WARN, text, f"{told} or later")
    return CheckResult(name, CheckState.OK, text)


def _core_scheduling(node: InspectedNode) -> Iterator[CheckResult]:
    """Whether the policy core_sched can work; none for a copied node: only its kernel could show it."""
    wanted = node.config.policies.core_sched.enabled
    if node.copied:
        return
    why = unable(RealPrctl())
    if not why:
        yield CheckResult(
            "core scheduling", CheckState.OK, "here" if wanted else "available; policies.core_sched is disabled"
        )
    elif wanted:
        yield CheckResult(
            "core scheduling", CheckState.WARN, why, "set policies.core_sched.enabled: false, or use another kernel"
        )
    else:
        yield CheckResult("core scheduling", CheckState.OK, f"not used; {why}")


def _no_psi(node: InspectedNode) -> CheckResult:
    """Whether the kernel supports it, by its build configuration where that is available."""
    release_ = (read_text(node.root, "proc/sys/kernel/osrelease") or "").strip()
    built = (read_text(node.root, f"boot/config-{release_}") or "").splitlines()
    if "CONFIG_PSI=y" in built:
        off = "psi=0" in (read_text(node.root, "proc/cmdline") or "").split()
        fix = f"boot with psi=1{' instead of psi=0' if off else ''}: needed to distinguish interference from load"
        return CheckResult("PSI", CheckState.WARN, "compiled in, but disabled", fix)
    if built:
        return CheckResult("PSI", CheckState.WARN, "not in this kernel", "use a kernel with CONFIG_PSI (4.20 or later)")
    return CheckResult("PSI", CheckState.WARN, "none", "boot with psi=1: needed to distinguish interference from load")


def _psi(node: InspectedNode) -> CheckResult:
    try:
        read_pressure(node_pressure_file(PressureResource.CPU, node.root))
    except AgentError:
        return _no_psi(node)
    groups = False
    if node.hierarchy is not None and node.layout is not None:
        groups = group_pressure_file(node.hierarchy, node.layout.kubepods, PressureResource.CPU) is not None
    privileged = has_capability(node.root, _SYS_RESOURCE)
    text = f"node, {'groups' if groups else 'not per group'}, triggers {'any' if privileged else '2 s'} window"
    if not groups:
        return CheckResult(
            "PSI",
            CheckState.WARN,
            text,
            "mount cgroup2 where the runtime uses it, or set interference.private_cgroup2: true",
        )
    return CheckResult("PSI", CheckState.OK, text)


def hardware_counters(node: InspectedNode) -> list[str]:
    """The processor's own counters, as the kernel calls them; none in most virtual machines."""
    devices = os.path.join(node.root, "sys/bus/event_source/devices")
    return [name for name in ("cpu", "cpu_core", "cpu_atom", "armv8_pmuv3_0") if os.path.exists(f"{devices}/{name}")]


def _pmu(node: InspectedNode) -> CheckResult:
    there = hardware_counters(node)
    if not there:
        return CheckResult(
            "PMU",
            CheckState.WARN,
            "no hardware counters",
            "in a VM: pass the PMU through; without it CPI is not measured",
        )
    return CheckResult("PMU", CheckState.OK, ", ".join(there))


def _resctrl(node: InspectedNode) -> CheckResult:
    try:
        capability = read_capability(node.root)
    except AgentError as exc:
        return CheckResult("resctrl", CheckState.WARN, str(exc), "cache and bandwidth are not partitioned")
    if capability.status is not ResctrlStatus.READY:
        fix = {
            ResctrlStatus.NOT_MOUNTED: "mount -t resctrl resctrl /sys/fs/resctrl",
            ResctrlStatus.NO_KERNEL: "use a kernel with CONFIG_X86_CPU_RESCTRL",
        }.get(capability.status, "no action possible: this CPU has no resctrl; cache and bandwidth are not partitioned")
        return CheckResult("resctrl", CheckState.WARN, capability.reason, fix)
    parts = [f"{cache.name} {cache.ways} ways" for cache in capability.caches] + [
        bandwidth_capability.name for bandwidth_capability in capability.bandwidths
    ]
    offered = f"{', '.join(parts) or 'monitoring only'}; {capability.control_groups} groups"
    if capability.monitoring is not None:
        offered += f", {capability.monitoring.groups} monitoring ids"
    ours, others = _resctrl_groups(capability.root or "")
    if ours or others:
        offered += f"; {ours} of bypassd, {others} of other programs"
    if others and capability.control_groups - 1 - others <= 0:
        return CheckResult(
            "resctrl",
            CheckState.WARN,
            offered,
            "all control groups are used by other programs: none left for pod classes",
        )
    return CheckResult("resctrl", CheckState.OK, offered)


def _resctrl_groups(root: str) -> tuple[int, int]:
    """How many control groups are bypassd's and others'."""
    try:
        groups = ControlGroups(root)
        return len(groups.ours()), len(groups.foreign())
    except AgentError:
        return 0, 0
