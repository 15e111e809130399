"""The configured disks and network interfaces: whether they exist and support their settings.

Disabled policies are not checked.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Final

from cgroupfs.errors import SourceError
from reconciler.actuators.network.netlink import link_mbit
from reconciler.cli.checks.finding import CheckResult, CheckState
from reconciler.cli.nodeview import InspectedNode
from reconciler.policies.disk import DiskPolicyConfig
from reconciler.policies.diskrules import by_device
from reconciler.sources.disks import find_disk
from state.disk import Disk

_WEIGHING: Final = frozenset({"bfq", "cfq"})
_LEADING: Final = ("ifb", "sch_ingress", "sch_htb", "cls_u32", "act_mirred")
_THROTTLES: Final = frozenset({"blkio.write_bps", "io.max"})


def devices(node: InspectedNode) -> Iterator[CheckResult]:
    """What ``policies.disk`` and ``policies.network`` need."""
    there = node.knobs
    disk, network = node.config.policies.disk, node.config.policies.network
    if disk.enabled:
        yield from _disks(node, disk)
        if there and not there & _THROTTLES:
            yield CheckResult(
                "disks", CheckState.WARN, "this kernel has no disk limits", "a kernel with CONFIG_BLK_DEV_THROTTLING"
            )
    if network.enabled:
        if there and "net.classid" not in there:
            message = "BE pods in the host network are not limited" if network.pods else "no BE traffic is limited"
            fix = "mount cgroup v1's net_cls before the runtime starts, on a kernel with CONFIG_CGROUP_NET_CLASSID"
            yield CheckResult("network", CheckState.WARN, f"no net_cls to identify BE packets: {message}", fix)
        if network.pods and (absent := _absent(node, _LEADING)):
            text = f"this kernel lacks {', '.join(absent)}: BE pods with their own network namespace are not limited"
            yield CheckResult(
                "network", CheckState.WARN, text, "install the distribution's package with additional kernel modules"
            )
        for interface in network.interfaces:
            places = os.path.join(node.root, "sys/class/net")
            if not os.path.isdir(os.path.join(places, interface.name)):
                text = f"{interface.name}: no such interface: no limit applies"
                yield CheckResult("network", CheckState.WARN, text, "correct policies.network.interfaces")
            elif interface.link_mbit is None and link_mbit(interface.name, places) is None:
                text = f"{interface.name}: its driver reports no speed: no limit applies"
                yield CheckResult("network", CheckState.WARN, text, "set its link_mbit in policies.network.interfaces")


def _absent(node: InspectedNode, names: Iterable[str]) -> list[str]:
    """The modules that this kernel has neither built in nor on disk; none where its lists cannot be read."""
    try:
        with open(os.path.join(node.root, "proc/sys/kernel/osrelease"), encoding="ascii") as file:
            place = os.path.join(node.root, "lib/modules", file.read().strip())
        known: set[str] = set()
        for table in ("modules.builtin", "modules.dep"):
            with open(os.path.join(place, table), encoding="utf-8", errors="replace") as file:
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
            yield CheckResult("disk", CheckState.WARN, str(exc), "correct policies.disk.devices")
        else:
            yield _disk(rule.name, disks[rule.name], weighed=weighed)
    for message in by_device(config.devices, disks)[1]:
        yield CheckResult("disk", CheckState.WARN, message, "list each disk once in policies.disk.devices")


def _disk(name: str, disk: Disk, *, weighed: bool) -> CheckResult:
    message = f"{name} is {disk.title}, scheduler {disk.scheduler or 'unknown'}"
    if weighed and disk.scheduler and disk.scheduler not in _WEIGHING:
        fix = f"weights need BFQ: echo bfq > /sys/block/{disk.kernel}/queue/scheduler (or iocost on cgroup v2)"
        return CheckResult("disk", CheckState.WARN, message, fix)
    return CheckResult("disk", CheckState.OK, message)
