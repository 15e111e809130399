"""Where this machine's cgroup hierarchies are mounted, read without the code under test."""

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

UNIFIED: Final = "unified"

# The order in which the kubelet makes a pod's directories on v1 (recorded; the rarer ones by libcontainer's list).
KUBELET_ORDER: Final = (
    *("cpuset", "memory", "cpu", "cpuacct", "pids", "hugetlb", "blkio", "perf_event", "freezer"),
    *("net_cls", "net_prio", "systemd"),
)


class Mount(NamedTuple):
    """One line of mountinfo."""

    target: str
    kind: str
    options: str


def mounts() -> Iterator[Mount]:
    """All mounts of this process, in mount order."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            target = left.split()[4].encode().decode("unicode_escape")
            kind, _source, options = right.split(maxsplit=2)
            yield Mount(target, kind, options.strip())


def hierarchies() -> dict[str, str]:
    """Controller (or `UNIFIED`, or ``systemd``) to its mount's directory. First mount wins."""
    texts: dict[str, str] = {}
    for mount in mounts():
        if mount.kind == "cgroup2":
            texts.setdefault(UNIFIED, mount.target)
        elif mount.kind == "cgroup":
            for option in mount.options.split(","):
                name = option.removeprefix("name=")
                if name in KUBELET_ORDER or name == "devices":
                    texts.setdefault(name, mount.target)
    return texts


def directories() -> list[str]:
    """Every hierarchy's mount directory once, the v1 ones in the kubelet's order."""
    texts = hierarchies()
    ordered = [texts[name] for name in (*KUBELET_ORDER, "devices", UNIFIED) if name in texts]
    return list(dict.fromkeys(ordered))


def pure_v2() -> bool:
    """True where cpu and memory live in the one cgroup2 hierarchy."""
    texts = hierarchies()
    return UNIFIED in texts and "cpu" not in texts and "memory" not in texts


def tree(directory: str) -> list[str]:
    """The directory and all below it, deepest first; empty if it is not there."""
    texts: list[str] = []
    for path, _names, _files in os.walk(directory, topdown=False):
        texts.append(path)
    return texts
