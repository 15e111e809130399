"""Memory: how much there is for pods, whether directories count what is below them, and what the policies lack here.

Of what is switched off only the lacks are told.
"""

import os
from collections.abc import Iterator

from cgroupfs.codecs import LIMIT_V1, LIMIT_V2
from cgroupfs.pressure import PressureResource, group_pressure_file
from cgroupfs.probe import offered
from reconciler.cli import words
from reconciler.cli.checks.finding import CheckResult, CheckState
from reconciler.cli.nodeview import InspectedNode, read_number, read_text
from reconciler.signals.memory import parse_meminfo
from state.memory import MARKS, NodeMemoryReading


def memory(node: InspectedNode) -> Iterator[CheckResult]:
    """What there is, and what the memory policies need."""
    found = _meminfo(node)
    if found is None:
        yield CheckResult(
            "memory", CheckState.WARN, "not known", "mount /proc; Linux 3.14 or later tells what is available"
        )
        return
    first = _memory(node, found)
    policies = node.config.policies
    wanted = (policies.be_memory, policies.memory_qos, policies.memory_reclaim, policies.numa_memory)
    if first.state is not CheckState.OK or policies.watermarks.enabled or any(one.enabled for one in wanted):
        yield first
    version = node.hierarchy.version("memory") if node.hierarchy is not None else None
    if version is not None:
        yield from _protection(node, version)
        yield from _bound(node, version, found)
        yield from _reclaim(node, version, found)
    yield from _migration(node)
    yield from _marks(node)


def _meminfo(node: InspectedNode) -> NodeMemoryReading | None:
    try:
        return parse_meminfo(read_text(node.root, "proc/meminfo") or "")
    except ValueError:
        return None


def _memory(node: InspectedNode, found: NodeMemoryReading) -> CheckResult:
    swap = f"{words.size(found.swap_bytes)} of swap" if found.swap_bytes else "no swap"
    told = f"{words.size(found.total_bytes)}, {swap}"
    limit = _limit(node)
    if limit is not None and limit < found.total_bytes:
        told += f"; pods may use {words.size(limit)}"
    if _kubepods_file(node, "memory.use_hierarchy") == "0":
        fix = (
            "bounds on directories hold nobody below them: write 1 to memory.use_hierarchy of the root before any group"
        )
        return CheckResult(
            "memory", CheckState.WARN, f"{told}; kubepods does not count its pods", f"{fix}, or Linux 5.11"
        )
    return CheckResult("memory", CheckState.OK, told)


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
        found = "cgroup v1 has no memory.min, .low, .high: soft limits of BE pods only"
        yield CheckResult(
            "memory protection", CheckState.WARN, found, "cgroup v2; or bound BE work (policies.be_memory)"
        )


def _bound(node: InspectedNode, version: int, found: NodeMemoryReading) -> Iterator[CheckResult]:
    """What happens to BE work that reaches its bound."""
    policies = node.config.policies
    if not policies.be_memory.enabled:
        return
    name = "memory bound"
    if version == 1 and not policies.be_memory.hard_percent:
        told = "a soft limit: BE work is held only where the whole machine is short"
        yield CheckResult(name, CheckState.WARN, told, "policies.be_memory.hard_percent: 5 adds a limit")
    elif version == 2 and not found.swap_bytes and not policies.be_memory.hard_percent:
        told = "no swap: BE work that cannot be reclaimed stands nearly still above memory.high, and keeps what it has"
        yield CheckResult(
            name, CheckState.WARN, told, "policies.be_memory.hard_percent: 10 ends it, or give the node swap"
        )
    else:
        yield CheckResult(name, CheckState.OK, "memory.high" if version == 2 else "a soft limit, and a limit above it")


def _reclaim(node: InspectedNode, version: int, found: NodeMemoryReading) -> Iterator[CheckResult]:
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
        yield CheckResult(name, CheckState.WARN, "no memory pressure per group: nobody is probed", "boot with psi=1")
    elif version == 1:
        yield CheckResult(name, CheckState.OK, "page cache only, all of a container's at once (cgroup v1)")
    else:
        yield CheckResult(
            name, CheckState.OK, "pages go to swap" if found.swap_bytes else "page cache only: there is no swap"
        )


def _migration(node: InspectedNode) -> Iterator[CheckResult]:
    wanted = node.config.policies.numa_memory
    if not (wanted.enabled and wanted.migrate) or node.hierarchy is None or node.layout is None:
        return
    if node.hierarchy.version("cpuset") == 1 and "cpu.mems_migrate" not in offered(
        node.hierarchy, node.layout.kubepods
    ):
        fix = "a kernel with CONFIG_MIGRATION; or policies.numa_memory.migrate: false"
        yield CheckResult("page migration", CheckState.WARN, "cpuset has no memory_migrate here", fix)


def _marks(node: InspectedNode) -> Iterator[CheckResult]:
    if not node.config.policies.watermarks.enabled:
        return
    values = {name: read_number(node.root, f"proc/sys/{name.replace('.', '/')}") for name in MARKS}
    told = ", ".join(f"{name} {value if value is not None else 'missing'}" for name, value in sorted(values.items()))
    writable = node.copied or all(os.access(f"/proc/sys/{name.replace('.', '/')}", os.W_OK) for name in MARKS)
    if None in values.values():
        yield CheckResult("memory marks", CheckState.WARN, told, "Linux 4.6 or later, with /proc mounted")
    elif not writable:
        yield CheckResult(
            "memory marks", CheckState.WARN, f"{told}: read-only here", "a privileged container, or the unit file"
        )
    else:
        yield CheckResult("memory marks", CheckState.OK, told)
