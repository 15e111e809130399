"""Joins the node's cgroup namespace: in a container of its own namespace, every group path would be relative to it.

On cgroup v2 containerd and CRI-O give an unprivileged container a cgroup namespace. There ``/proc/PID/cgroup`` names
another pod's group ``/../../podUID/ID``: without ``kubepods``, by which bypassd identifies the processes of pods.

Source: cgroup_namespaces(7), setns(2). Python 3.11 has no call for it.
"""

import os
from typing import Final

from cgroupfs.errors import errno_name

_CLONE_NEWCGROUP: Final = 0x02000000
_OUTSIDE: Final = "/.."


def join_host_cgroups(host: str = "/proc/1") -> str | None:
    """Join it, for this thread and the threads that it starts later; why not, if group paths are relative now.

    Does nothing where this process is in it already, or the kernel has no such namespaces. ``host``: the directory of
    process 1.
    """
    try:
        # Process 1 is the node's where the pod has ``hostPID``; this needs CAP_SYS_PTRACE, and setns CAP_SYS_ADMIN.
        if os.readlink(f"{host}/ns/cgroup") == os.readlink("/proc/self/ns/cgroup"):
            return None
        number = os.open(f"{host}/ns/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        return _problem(host, errno_name(exc.errno))
    import ctypes  # bypassctl starts without it

    try:
        if ctypes.CDLL(None, use_errno=True).setns(number, _CLONE_NEWCGROUP) != 0:
            return _problem(host, errno_name(ctypes.get_errno()))
    finally:
        os.close(number)
    return None


def _problem(host: str, error: str) -> str | None:
    """The message; None where group paths are not relative: they can be used as they are."""
    try:
        # Process 1 is outside of this process's namespace then.
        with open(f"{host}/cgroup", encoding="utf-8", errors="replace", newline="\n") as file:
            relative = any(line.partition(":")[2].partition(":")[2].startswith(_OUTSIDE) for line in file)
    except OSError:
        relative = False
    if not relative:
        return None
    return (
        f"this process has a cgroup namespace of its own and cannot join the node's ({error}): no kubelet and no "
        "runtime is identified; give the pod hostPID, SYS_ADMIN and SYS_PTRACE"
    )
