"""Whether BE pods yield the CPU to every other task by themselves: an idle class is in force, and effective, for each.

What is in force is read from the kernel, never from the configuration. Group side: ``cpu.idle`` of the pod's directory
(Linux 5.15), openEuler's ``cpu.qos_level``, Anolis' ``cpu.bvt_warp_ns``. Thread side (SCHED_IDLE): only where the
kernel compares tasks of different groups by it, see `threads_count`; containers with threads of another policy are not
among `NodeView.idle_threads`.

A pod with real-time threads does not yield (`NodeView.realtime`): these run before every usual thread of the node.

A container that is being made does not count, nor one in its first two seconds: the class is set before its program is
executed, and is read back a moment later.
"""

import re
from typing import Final

from reconciler.policies.base import containers_of, owns_cpus
from state.model import NodeView, Phase, Pod, PodClass, Pools

_GROUP_SIDES: Final = (("cpu.idle", 1), ("cpu.qos", -1), ("cpu.identity", -1))
_FRESH_S: Final = 2.0
_RELEASE: Final = re.compile(r"(\d{1,4})\.(\d{1,4})")
_WITHIN_GROUPS: Final = (6, 6)
"""Commit faa42d29419d is in 6.12, and in the stable releases of 6.6, 6.10 and 6.11 from October 2024 on. From which of
them on is not compared: distributions take such commits earlier."""


def threads_count(release: str) -> bool:
    """Whether SCHED_IDLE of a thread is effective beyond its own group in this kernel; False where it is not known.

    ``release``: as in /proc/sys/kernel/osrelease.
    """
    match = _RELEASE.match(release)
    return match is not None and (int(match[1]), int(match[2])) < _WITHIN_GROUPS


def obstacle(view: NodeView, pools: Pools) -> str | None:
    """Why BE pods do not all yield, naming one of them; None: they do. Without a BE pod that is not known."""
    pods = [pod for pod in view.pods.values() if pod.pod_class is PodClass.RECLAIMED]
    if not pods:
        return "no BE pod"
    seen = False
    for pod in sorted(pods, key=lambda pod: pod.title):
        if pod.uid in view.realtime:
            return f"{pod.title} has real-time threads, to which no idle class applies"
        yields = _yields(pod, view, pools)
        if yields is False:
            return f"{pod.title} is in no effective idle class"
        seen = seen or yields is True
    # New pods are believed only beside one whose class was read back: the class may not be configured at all.
    return None if seen else "no BE pod has been in an idle class for two seconds"


def _yields(pod: Pod, view: NodeView, pools: Pools) -> bool | None:
    """Whether a pod yields, by what was read; None: it is too new for that, or has nothing that could."""
    for knob, level in _GROUP_SIDES:
        if view.actual.get((pod.group.path, knob)) == level:
            return True
    containers = [container for container in containers_of(pod) if container.phase is Phase.SETTLED]
    counted = [container for container in containers if not owns_cpus(pod, container, pools)]
    if pod.sandbox is None and counted and all(container.group.path in view.idle_threads for container in counted):
        return True
    fresh = {cid for cid, at in view.arrived.items() if view.now - at < _FRESH_S}
    if any(container.id in fresh for container in pod.containers) or (pod.sandbox is None and not counted):
        return None
    return False
