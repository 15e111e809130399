"""The disks and network interfaces that the configuration names: whether they are there and can do what is asked.

Says nothing of what is switched off.
"""

import os
from collections.abc import Iterator
from typing import Final

from cgroupfs.errors import SourceError
from cgroupfs.probe import offered
from reconciler.cli.checks.finding import Finding, State
from reconciler.cli.nodeview import NodeView
from reconciler.sources.disks import find_disk

_WEIGHING: Final = frozenset({"bfq", "cfq"})
_THROTTLES: Final = frozenset({"blkio.write_bps", "io.max"})


def devices(node: NodeView) -> Iterator[Finding]:
    """What ``policies.disk`` and ``policies.network`` need."""
    there = offered(node.hierarchy, node.layout.kubepods) if node.hierarchy and node.layout else frozenset[str]()
    disk, network = node.config.policies.disk, node.config.policies.network
    if disk.enabled:
        for rule in disk.devices:
            yield _disk(node, rule.name, weighed=disk.weight_be is not None or disk.weight_online is not None)
        if there and not there & _THROTTLES:
            yield Finding("disks", State.WARN, "this kernel limits no disk", "a kernel with CONFIG_BLK_DEV_THROTTLING")
    if network.enabled:
        if there and "net.classid" not in there:
            fix = "mount cgroup v1's net_cls before the runtime starts, on a kernel with CONFIG_CGROUP_NET_CLASSID"
            yield Finding("network", State.WARN, "no net_cls: BE's packets cannot be told from others", fix)
        for interface in network.interfaces:
            if not os.path.isdir(os.path.join(node.root, "sys/class/net", interface.name)):
                found = f"{interface.name}: there is no such interface"
                yield Finding("network", State.WARN, found, "correct policies.network.interfaces")


def _disk(node: NodeView, name: str, *, weighed: bool) -> Finding:
    try:
        disk = find_disk(name, node.root)
    except SourceError as exc:
        return Finding("disk", State.WARN, str(exc), "correct policies.disk.devices")
    words = f"{name} is {disk.title}, scheduler {disk.scheduler or 'not known'}"
    if weighed and disk.scheduler and disk.scheduler not in _WEIGHING:
        fix = f"weights need BFQ: echo bfq > /sys/block/{disk.kernel}/queue/scheduler (or iocost on cgroup v2)"
        return Finding("disk", State.WARN, words, fix)
    return Finding("disk", State.OK, words)
