"""Memory: how much pods have, whether directories count their children, and what the policies lack here.

For disabled policies only the lacks are reported.
"""

import os
from collections.abc import Iterator

from cgroupfs.codecs import LIMIT_V1, LIMIT_V2
from cgroupfs.pressure import PressureResource, group_pressure_file
from reconciler.cli.checks.finding import CheckResult, CheckState
from reconciler.cli.nodeview import InspectedNode, read_number, read_text
from reconciler.runtime import format as fmt
from reconciler.signals.memory import parse_meminfo
from state.memory import MARKS, NodeMemoryReading


def memory(node: InspectedNode) -> Iterator[CheckResult]:
    """What there is, and what the memory policies need."""
    reading = _meminfo(node)
    if reading is None:
        yield CheckResult("memory", CheckState.WARN, "unknown", "mount /proc; needs Linux 3.14 or later")
        return
    first = _memory(node, reading)
    policies = node.config.policies
    wanted = (policies.be_memory, policies.memory_qos, policies.memory_reclaim, policies.numa_memory)
    if first.state is not CheckState.OK or policies.watermarks.enabled or any(item.enabled for item in wanted):
        yield first
    version = node.hierarchy.version("memory") if node.hierarchy is not None else None
    if version is not None:
        yield from _protection(node, version)
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
        return CheckResult(
            "memory",
            CheckState.WARN,
            f"{text}; kubepods does not count the memory of its pods",
            f"{fix}, or Linux 5.11",
        )
    return CheckResult("memory", CheckState.OK, text)


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


def _protection(node: InspectedNode, version: int) -> Iterator[CheckResult]:
    if node.config.policies.memory_qos.enabled and version == 1:
        text = "cgroup v1 has no memory.min, .low, .high: only soft limits for BE pods"
        yield CheckResult(
            "memory protection", CheckState.WARN, text, "use cgroup v2; or limit BE work (policies.be_memory)"
        )


def _bound(node: InspectedNode, version: int, reading: NodeMemoryReading) -> Iterator[CheckResult]:
    """What happens to BE work that reaches its bound."""
    policies = node.config.policies
    if not policies.be_memory.enabled:
        return
    name = "memory limit"
    if version == 1 and not policies.be_memory.hard_percent:
        text = "soft limit: BE work is reclaimed only when the whole machine is short of memory"
        yield CheckResult(name, CheckState.WARN, text, "set policies.be_memory.hard_percent: 5 to add a hard limit")
    elif version == 2 and not reading.swap_bytes and not policies.be_memory.hard_percent:
        text = "no swap: BE work above memory.high is throttled until almost stopped, and keeps its memory"
        yield CheckResult(name, CheckState.WARN, text, "set policies.be_memory.hard_percent: 10, or add swap")
    else:
        yield CheckResult(
            name, CheckState.OK, "memory.high" if version == 2 else "a soft limit and a hard limit above it"
        )


def _reclaim(node: InspectedNode, version: int, reading: NodeMemoryReading) -> Iterator[CheckResult]:
    wanted = node.config.policies.memory_reclaim
    if not wanted.enabled or node.hierarchy is None or node.layout is None:
        return
    name = "memory reclaim"
    if version == 2 and _kubepods_file(node, "memory.reclaim") is None and _kubepods_file(node, "memory.max"):
        yield CheckResult(name, CheckState.WARN, "this kernel has no memory.reclaim", "Linux 5.19 or later")
    elif (
        wanted.probe
        and version == 2
        and not group_pressure_file(node.hierarchy, node.layout.kubepods, PressureResource.MEMORY)
    ):
        yield CheckResult(
            name, CheckState.WARN, "no memory pressure per group: no proactive reclaim", "boot with psi=1"
        )
    elif version == 1:
        yield CheckResult(
            name, CheckState.OK, "page cache only, and the whole cache of a container at once (cgroup v1)"
        )
    else:
        yield CheckResult(
            name, CheckState.OK, "anonymous pages are swapped" if reading.swap_bytes else "page cache only: no swap"
        )


def _migration(node: InspectedNode) -> Iterator[CheckResult]:
    wanted = node.config.policies.numa_memory
    if not (wanted.enabled and wanted.migrate) or node.hierarchy is None or node.layout is None:
        return
    if node.hierarchy.version("cpuset") == 1 and "cpu.mems_migrate" not in node.knobs:
        fix = "use a kernel with CONFIG_MIGRATION; or set policies.numa_memory.migrate: false"
        yield CheckResult("page migration", CheckState.WARN, "no cpuset.memory_migrate on this node", fix)


def _marks(node: InspectedNode) -> Iterator[CheckResult]:
    if not node.config.policies.watermarks.enabled:
        return
    values = {name: read_number(node.root, f"proc/sys/{name.replace('.', '/')}") for name in MARKS}
    text = ", ".join(f"{name} {value if value is not None else 'missing'}" for name, value in sorted(values.items()))
    writable = node.copied or all(os.access(f"/proc/sys/{name.replace('.', '/')}", os.W_OK) for name in MARKS)
    if None in values.values():
        yield CheckResult("memory watermarks", CheckState.WARN, text, "Linux 4.6 or later, with /proc mounted")
    elif not writable:
        yield CheckResult(
            "memory watermarks",
            CheckState.WARN,
            f"{text}: read-only",
            "use a privileged container, or the systemd unit",
        )
    else:
        yield CheckResult("memory watermarks", CheckState.OK, text)
