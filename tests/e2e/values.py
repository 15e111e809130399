"""Snapshots of the control files that the agent may write, of a whole kubepods tree."""

import os
from typing import Final

from tests.e2e.mounts import directories
from tests.e2e.node import Node, Report, Running, RunningPod
from tests.fakes.kubelet.cgroups import read

FILES: Final = (
    *("cpuset.cpus", "cpuset.mems", "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.cfs_burst_us"),
    *("cpu.idle", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    *("cpu.weight", "cpu.max", "memory.max", "memory.high", "memory.low", "memory.min", "pids.max"),
)


def snapshot(node: Node) -> dict[str, str]:
    """Every such file below kubepods: path to text."""
    texts = {}
    for mount in directories():
        for path, _names, files in os.walk(mount + node.cgroups.group("kubepods")):
            for name in FILES:
                if name in files:
                    texts[f"{path}/{name}"] = read(path, name)
    return texts


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Files that read otherwise than before: path to both texts.

    On v2 a set that was empty ("as the parent's") can never be made empty again while there are processes: the kernel
    answers ENOSPC. The parent's set itself is as near as it gets, and counts as the same.
    """
    pairs = {}
    for path, text in after.items():
        directory, name = os.path.split(path)
        again = {before[path]}
        if not before[path] and name in {"cpuset.cpus", "cpuset.mems"}:
            again.add(read(os.path.dirname(directory), f"{name}.effective"))
        if text not in again:
            pairs[path] = (before[path], text)
    return pairs


def cpus(container: Running) -> str:
    """The CPUs a container is confined to; on v2 "" means as its parent."""
    return container.read("cpuset", "cpuset.cpus")


def is_restored(container: Running, before: str) -> bool:
    """Whether its CPU set is ``before`` again; for an empty one (v2) all CPUs of its parent, as in `changes`."""
    text = cpus(container)
    if before:
        return text == before
    return text in {"", read(os.path.dirname(container.directory("cpuset")), "cpuset.cpus.effective")}


def quota(container: Running) -> int | None:
    """A container's quota in microseconds; None without one."""
    return _quota(container.read("cpu", "cpu.max" if container.node.cgroups.v2 else "cpu.cfs_quota_us"))


def pod_quota(pod: RunningPod) -> int | None:
    """The same of a pod's own directory."""
    cgroups = next(iter(pod.containers.values())).node.cgroups
    directory = cgroups.directory("cpu", cgroups.pod_group(pod.spec))
    return _quota(read(directory, "cpu.max" if cgroups.v2 else "cpu.cfs_quota_us"))


def reported_quota(report: Report) -> int | None:
    """The quota that a container saw at its first instruction."""
    return _quota(report.values.get("cpu.max") or report.values["cpu.cfs_quota_us"])


def _quota(text: str) -> int | None:
    first = text.split(maxsplit=1)[0]
    return None if first in {"-1", "max"} else int(first)


def weight(container: Running) -> int:
    """``cpu.shares``, or ``cpu.weight`` on v2."""
    return int(container.read("cpu", "cpu.weight" if container.node.cgroups.v2 else "cpu.shares"))


def besteffort_quota(node: Node) -> str:
    """The quota of the besteffort directory: -1 or max without one."""
    directory = node.cgroups.directory("cpu", node.cgroups.group("kubepods", "besteffort"))
    if node.cgroups.v2:
        return read(directory, "cpu.max").split()[0]
    return read(directory, "cpu.cfs_quota_us")
