"""Kernel, CPUs, cgroups, and what else the kernel and the CPU offer."""

import os
from collections.abc import Iterable, Iterator
from typing import Final

from cgroupfs.codecs import LIMIT_V1, LIMIT_V2
from cgroupfs.errors import AgentError, SourceError
from cgroupfs.hierarchy import UNIFIED
from cgroupfs.knobs import CATALOG
from cgroupfs.lines import lines_of
from cgroupfs.pressure import PressureResource, group_pressure_file, node_pressure_file, read_pressure
from cgroupfs.scheduling import runner_keeps_cpu
from reconciler.actuators.core_sched.prctl import RealPrctl, unable
from reconciler.actuators.network.netlink import link_mbit
from reconciler.cli.asking import release
from reconciler.cli.checks import CheckResult, CheckState, bad, ok, warn
from reconciler.cli.checks.offers import pressure_of_groups
from reconciler.cli.nodeview import InspectedNode, has_capability, read_number, read_text
from reconciler.policies.disk import DiskPolicyConfig, by_device
from reconciler.runtime import format as fmt
from reconciler.signals.memory import parse_meminfo
from reconciler.sources.disks import find_disk
from resctrl.capability import ResctrlStatus, read_capability
from resctrl.groups import ControlGroups
from state.disk import Disk
from state.memory import MARKS, NodeMemoryReading
from state.topology_sysfs import read_topology

# Schedulers that heed the weights of groups.
_WEIGHING: Final = frozenset({"bfq", "cfq"})
# By these modules packets of pods with a network namespace of their own are led to an IFB, where they are limited.
_LEADING: Final = ("ifb", "sch_ingress", "sch_htb", "cls_u32", "act_mirred")
_THROTTLES: Final = frozenset({"blkio.write_bps", "io.max"})


def devices(node: InspectedNode) -> Iterator[CheckResult]:
    """What ``policies.disk`` and ``policies.network`` need."""
    offered = node.knobs
    disk, network = node.config.policies.disk, node.config.policies.network
    if disk.enabled:
        yield from _disks(node, disk)
        if offered and not offered & _THROTTLES:
            yield warn("disks", "this kernel has no disk limits", "a kernel with CONFIG_BLK_DEV_THROTTLING")
    if network.enabled:
        if offered and "net.classid" not in offered:
            message = "BE pods in the host network are not limited" if network.pods else "no BE traffic is limited"
            fix = "mount cgroup v1's net_cls before the runtime starts, on a kernel with CONFIG_CGROUP_NET_CLASSID"
            yield warn("network", f"no net_cls to identify BE packets: {message}", fix)
        if network.pods and (absent := _absent(node, _LEADING)):
            text = f"this kernel lacks {', '.join(absent)}: BE pods with their own network namespace are not limited"
            yield warn("network", text, "install the distribution's package with additional kernel modules")
        for interface in network.interfaces:
            places = os.path.join(node.root, "sys/class/net")
            if not os.path.isdir(os.path.join(places, interface.name)):
                text = f"{interface.name}: no such interface: no limit applies"
                yield warn("network", text, "correct policies.network.interfaces")
            elif interface.link_mbit is None and link_mbit(interface.name, places) is None:
                text = f"{interface.name}: its driver reports no speed: no limit applies"
                yield warn("network", text, "set its link_mbit in policies.network.interfaces")


def _absent(node: InspectedNode, names: Iterable[str]) -> list[str]:
    """The modules that this kernel has neither built in nor on disk; none where its lists cannot be read."""
    try:
        with open(os.path.join(node.root, "proc/sys/kernel/osrelease"), encoding="ascii", newline="\n") as file:
            place = os.path.join(node.root, "lib/modules", file.read().strip())
        known: set[str] = set()
        for table in ("modules.builtin", "modules.dep"):
            with open(os.path.join(place, table), encoding="utf-8", errors="replace", newline="\n") as file:
                # kernel/drivers/net/ifb.ko.zst: what it needs
                known |= {os.path.basename(line.partition(":")[0]).partition(".")[0].strip() for line in file}
    except OSError:
        return []
    return [name for name in names if name not in known]


def _disks(node: InspectedNode, config: DiskPolicyConfig) -> Iterator[CheckResult]:
    weighed = config.weight_be is not None or config.weight_online is not None
    disks: dict[str, Disk] = {}
    for rule in config.devices:
        try:
            disks[rule.name] = find_disk(rule.name, node.root)
        except SourceError as exc:
            yield warn("disk", str(exc), "correct policies.disk.devices")
        else:
            yield _disk(rule.name, disks[rule.name], weighed=weighed)
    for message in by_device(config.devices, disks)[1]:
        yield warn("disk", message, "list each disk once in policies.disk.devices")


def _disk(name: str, disk: Disk, *, weighed: bool) -> CheckResult:
    message = f"{name} is {disk.title}, scheduler {disk.scheduler or 'unknown'}"
    if weighed and disk.scheduler and disk.scheduler not in _WEIGHING:
        fix = f"weights need BFQ: echo bfq > /sys/block/{disk.kernel}/queue/scheduler (or iocost on cgroup v2)"
        return warn("disk", message, fix)
    return ok("disk", message)


def memory(node: InspectedNode) -> Iterator[CheckResult]:
    """What there is, and what the memory policies need."""
    reading = _meminfo(node)
    if reading is None:
        yield warn("memory", "unknown", "mount /proc; needs Linux 3.14 or later")
        return
    first = _memory(node, reading)
    policies = node.config.policies
    wanted = (policies.be_memory, policies.memory_qos, policies.memory_reclaim, policies.numa_memory)
    if first.state is not CheckState.OK or policies.watermarks.enabled or any(item.enabled for item in wanted):
        yield first
    version = node.hierarchy.version("memory") if node.hierarchy is not None else None
    if version is not None:
        if policies.memory_qos.enabled and version == 1:
            text = "cgroup v1 has no memory.min, .low, .high: only soft limits for BE pods"
            yield warn("memory protection", text, "use cgroup v2; or limit BE work (policies.be_memory)")
        yield from _bound(node, version, reading)
        yield from _reclaim(node, version, reading)
    yield from _migration(node)
    yield from _marks(node)


def _meminfo(node: InspectedNode) -> NodeMemoryReading | None:
    try:
        return parse_meminfo(read_text(node.root, "proc/meminfo") or "")
    except ValueError:
        return None


def _memory(node: InspectedNode, reading: NodeMemoryReading) -> CheckResult:
    swap = f"{fmt.size(reading.swap_bytes)} of swap" if reading.swap_bytes else "no swap"
    huge = f" beside {fmt.size(reading.huge_bytes)} of huge pages" if reading.huge_bytes else ""
    text = f"{fmt.size(reading.total_bytes)}{huge}, {swap}"
    limit = _limit(node)
    if limit is not None and limit < reading.total_bytes:
        text += f"; pods may use {fmt.size(limit)}"
    if _kubepods_file(node, "memory.use_hierarchy") == "0":
        fix = "limits on directories have no effect: write 1 to memory.use_hierarchy of the root before creating groups"
        return warn("memory", f"{text}; kubepods does not count the memory of its pods", f"{fix}, or Linux 5.11")
    return ok("memory", text)


def _kubepods_file(node: InspectedNode, file: str) -> str | None:
    """A memory file of kubepods, None where there is none."""
    if node.hierarchy is None or node.layout is None or node.hierarchy.version("memory") is None:
        return None
    path = os.path.join(node.hierarchy.directory("memory", node.layout.kubepods), file)
    text = read_text("/", path)
    return None if text is None else text.strip()


def _limit(node: InspectedNode) -> int | None:
    v1 = _kubepods_file(node, "memory.limit_in_bytes")
    text, codec = (v1, LIMIT_V1) if v1 is not None else (_kubepods_file(node, "memory.max"), LIMIT_V2)
    try:
        value = codec.decode(text) if text is not None else None
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _bound(node: InspectedNode, version: int, reading: NodeMemoryReading) -> Iterator[CheckResult]:
    """What happens to BE work that reaches its bound."""
    policies = node.config.policies
    if not policies.be_memory.enabled:
        return
    name = "memory limit"
    if version == 1 and not policies.be_memory.hard_percent:
        text = "soft limit: BE work is reclaimed only when the whole machine is short of memory"
        yield warn(name, text, "set policies.be_memory.hard_percent: 5 to add a hard limit")
    elif version == 2 and not reading.swap_bytes and not policies.be_memory.hard_percent:
        text = "no swap: BE work above memory.high is throttled until almost stopped, and keeps its memory"
        yield warn(name, text, "set policies.be_memory.hard_percent: 10, or add swap")
    else:
        yield ok(name, "memory.high" if version == 2 else "a soft limit and a hard limit above it")


def _reclaim(node: InspectedNode, version: int, reading: NodeMemoryReading) -> Iterator[CheckResult]:
    wanted = node.config.policies.memory_reclaim
    if not wanted.enabled or node.hierarchy is None or node.layout is None:
        return
    name = "memory reclaim"
    if version == 2 and _kubepods_file(node, "memory.reclaim") is None and _kubepods_file(node, "memory.max"):
        yield warn(name, "this kernel has no memory.reclaim", "Linux 5.19 or later")
    elif (
        wanted.probe
        and version == 2
        and not group_pressure_file(node.hierarchy, node.layout.kubepods, PressureResource.MEMORY)
    ):
        yield warn(name, "no memory pressure per group: no proactive reclaim", "boot with psi=1")
    elif version == 1:
        yield ok(name, "page cache only, and the whole cache of a container at once (cgroup v1)")
    else:
        yield ok(name, "anonymous pages are swapped" if reading.swap_bytes else "page cache only: no swap")


def _migration(node: InspectedNode) -> Iterator[CheckResult]:
    wanted = node.config.policies.numa_memory
    if not (wanted.enabled and wanted.migrate) or node.hierarchy is None or node.layout is None:
        return
    if node.hierarchy.version("cpuset") == 1 and "cpu.mems_migrate" not in node.knobs:
        fix = "use a kernel with CONFIG_MIGRATION; or set policies.numa_memory.migrate: false"
        yield warn("page migration", "no cpuset.memory_migrate on this node", fix)


def _marks(node: InspectedNode) -> Iterator[CheckResult]:
    if not node.config.policies.watermarks.enabled:
        return
    values = {name: read_number(node.root, f"proc/sys/{name.replace('.', '/')}") for name in MARKS}
    text = ", ".join(f"{name} {value if value is not None else 'missing'}" for name, value in sorted(values.items()))
    writable = node.copied or all(os.access(f"/proc/sys/{name.replace('.', '/')}", os.W_OK) for name in MARKS)
    if None in values.values():
        yield warn("memory watermarks", text, "Linux 4.6 or later, with /proc mounted")
    elif not writable:
        yield warn("memory watermarks", f"{text}: read-only", "use a privileged container, or the systemd unit")
    else:
        yield ok("memory watermarks", text)


_SHOWN: Final = ("cpuset", "cpu", "cpuacct", "memory", "pids", "blkio", "io")
_NEEDED: Final = ("cpuset", "cpu", "memory")
_SYS_RESOURCE: Final = 24
"""CAP_SYS_RESOURCE: without it a trigger's window is a multiple of 2 s."""
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
        return warn("kernel", "release unknown: cannot read proc/sys/kernel/osrelease", "mount /proc")
    if version < (5, 10):
        return warn(
            "kernel",
            f"{text}: older than the oldest tested release (5.10)",
            "5.10 or later identifies writers and has PSI",
        )
    if runner_keeps_cpu(text):
        return warn(
            "kernel",
            f"{text}: beside busy pods other groups (the kubelet's, the runtime's) may have no CPU for seconds",
            "6.18.45 or later has the scheduler's commit 101f3498b4bd",
        )
    return ok("kernel", text)


def _cpus(node: InspectedNode) -> CheckResult:
    try:
        topology = read_topology(node.root)
    except SourceError as exc:
        return bad("CPUs", str(exc), "mount /sys")
    parts = [fmt.plural(len(topology.sockets()), "socket"), fmt.plural(len(topology.nodes()), "NUMA node")]
    parts.append("hyper-threads" if topology.smt else "no SMT")
    return ok("CPUs", f"{topology.online}: {', '.join(parts)}")


def _cgroups(node: InspectedNode) -> Iterator[CheckResult]:
    hierarchy = node.hierarchy
    if hierarchy is None:
        fix = "mount the cgroup hierarchies (in a container: mount the host's /sys/fs/cgroup)"
        yield bad("cgroups", node.problems["cgroups"], fix)
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
        yield bad("cgroups", f"{text}; without {', '.join(missing)}", "mount or enable the controllers")
    elif read_only:
        yield bad("cgroups", f"{text}; {', '.join(read_only)} read-only", "mount them read-write")
    else:
        yield ok("cgroups", text)


def _scheduler(node: InspectedNode) -> CheckResult:
    """What the policies burst, idle_class, group_identity and qos_level need of the kernel."""
    name = "scheduler"
    offered = node.knobs
    if not offered:
        return warn(name, "unknown: no kubepods directory", "start the kubelet, then run doctor again")
    text = ", ".join(message for knob, message in (_SCHEDULER | _DISTRIBUTIONS).items() if knob in offered) or "neither"
    switch = (read_text(node.root, f"proc/sys/{_IDENTITY_SYSCTL.replace('.', '/')}") or "").strip()
    if "cpu.identity" in offered and switch == "0":
        return warn(name, f"{text} (disabled)", f"sysctl -w {_IDENTITY_SYSCTL}=1")
    lacking = [knob for knob in _SCHEDULER if knob not in offered]
    if lacking:
        versions = " and ".join(f"{_SCHEDULER[knob]}: Linux {CATALOG[knob].forms[1].since}" for knob in lacking)
        return warn(name, text, f"{versions} or later")
    return ok(name, text)


def _core_scheduling(node: InspectedNode) -> Iterator[CheckResult]:
    """Whether the policy core_sched can work; none for a copied node: only its kernel could show it."""
    wanted = node.config.policies.core_sched.enabled
    if node.copied:
        return
    why = unable(RealPrctl())
    if not why:
        yield ok("core scheduling", "here" if wanted else "available; policies.core_sched is disabled")
    elif wanted:
        yield warn("core scheduling", why, "set policies.core_sched.enabled: false, or use another kernel")
    else:
        yield ok("core scheduling", f"not used; {why}")


def _no_psi(node: InspectedNode) -> CheckResult:
    """Whether the kernel supports it, by its build configuration where that is available."""
    release_text = (read_text(node.root, "proc/sys/kernel/osrelease") or "").strip()
    built = lines_of(read_text(node.root, f"boot/config-{release_text}") or "")
    if "CONFIG_PSI=y" in built:
        off = "psi=0" in (read_text(node.root, "proc/cmdline") or "").split()
        fix = f"boot with psi=1{' instead of psi=0' if off else ''}: needed to distinguish interference from load"
        return warn("PSI", "compiled in, but disabled", fix)
    if built:
        return warn("PSI", "not in this kernel", "use a kernel with CONFIG_PSI (4.20 or later)")
    return warn("PSI", "none", "boot with psi=1: needed to distinguish interference from load")


def _psi(node: InspectedNode) -> CheckResult:
    try:
        read_pressure(node_pressure_file(PressureResource.CPU, node.root))
    except AgentError:
        return _no_psi(node)
    interference = node.config.interference
    groups = "groups" if pressure_of_groups(node) else ""
    if not groups and interference.enabled and interference.private_cgroup2:
        groups = "private groups of pods"
    privileged = has_capability(node.root, _SYS_RESOURCE)
    text = f"node, {groups or 'not per group'}, triggers {'any' if privileged else '2 s'} window"
    if not groups:
        return warn("PSI", text, "mount cgroup2 where the runtime uses it, or set interference.private_cgroup2: true")
    return ok("PSI", text)


def hardware_counters(node: InspectedNode) -> list[str]:
    """The processor's own counters, as the kernel calls them; none in most virtual machines."""
    devices = os.path.join(node.root, "sys/bus/event_source/devices")
    return [name for name in ("cpu", "cpu_core", "cpu_atom", "armv8_pmuv3_0") if os.path.exists(f"{devices}/{name}")]


def _pmu(node: InspectedNode) -> CheckResult:
    counters = hardware_counters(node)
    if not counters:
        return warn("PMU", "no hardware counters", "in a VM: pass the PMU through; without it CPI is not measured")
    return ok("PMU", ", ".join(counters))


def _resctrl(node: InspectedNode) -> CheckResult:
    try:
        capability = read_capability(node.root)
    except AgentError as exc:
        return warn("resctrl", str(exc), "cache and bandwidth are not partitioned")
    if capability.status is not ResctrlStatus.READY:
        fix = {
            ResctrlStatus.NOT_MOUNTED: "mount -t resctrl resctrl /sys/fs/resctrl",
            ResctrlStatus.NO_KERNEL: "use a kernel with CONFIG_X86_CPU_RESCTRL",
        }.get(capability.status, "no action possible: this CPU has no resctrl; cache and bandwidth are not partitioned")
        return warn("resctrl", capability.reason, fix)
    parts = [f"{cache.name} {cache.ways} ways" for cache in capability.caches] + [
        bandwidth_capability.name for bandwidth_capability in capability.bandwidths
    ]
    offered = f"{', '.join(parts) or 'monitoring only'}; {capability.control_groups} groups"
    if capability.monitoring is not None:
        offered += f", {capability.monitoring.groups} monitoring ids"
    ours, others = _resctrl_groups(capability.root or "")
    if ours or others:
        offered += f"; {ours} of bypassd, {others} of other programs"
    # One is the default group.
    if others and capability.control_groups - 1 - others <= 0:
        return warn("resctrl", offered, "all control groups are used by other programs: none left for pod classes")
    return ok("resctrl", offered)


def _resctrl_groups(root: str) -> tuple[int, int]:
    """How many control groups are bypassd's and others'."""
    try:
        groups = ControlGroups(root)
        return len(groups.ours()), len(groups.foreign())
    except AgentError:
        return 0, 0
