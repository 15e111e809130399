"""Whether BE pods yield the CPU to every other task by themselves: an idle class is in force, and effective, for each.

Or the least weight of the besteffort directory, where the idle class policy leaves the class out for it
(`Pools.weight_yields`) and no online pod is in that directory.

What is in force is read from the kernel, never from the configuration. The CPU is divided among sibling groups level by
level, by weight, so neither class nor weight reaches beyond the directory that it is in (measured: docs/cpu.md).
"""

from collections.abc import Mapping
from typing import Final

from cgroupfs.naming import QosClass
from cgroupfs.scheduling import has_eevdf, kernel_version, runner_keeps_cpu
from reconciler.policies.base import SHARES_MIN, owns_cpus
from state.cpu import KernelScheduler
from state.model import NodeView, Phase, Pod, Pools
from state.pod_index import derived, index_of

_GROUP_SIDES: Final = (("cpu.idle", 1), ("cpu.qos", -1), ("cpu.identity", -1))
"""Linux 5.15; openEuler's ``cpu.qos_level``; Anolis' ``cpu.bvt_warp_ns``."""
_FRESH_S: Final = 2.0
"""A container's class is set before its program is executed, and is read back a moment later."""
_WITHIN_GROUPS: Final = (6, 6)
"""Commit faa42d29419d is in 6.12, and in the stable releases of 6.6, 6.10 and 6.11 from October 2024 on. From which of
them on is not compared: distributions take such commits earlier."""


def scheduler_of(release: str) -> KernelScheduler:
    """What is known of the scheduler of a kernel by its ``release``, as in /proc/sys/kernel/osrelease."""
    number = kernel_version(release)
    if number is None:
        return KernelScheduler(threads_yield=False)
    return KernelScheduler(
        threads_yield=number < _WITHIN_GROUPS, eevdf=has_eevdf(release), runner_keeps=runner_keeps_cpu(release)
    )


def obstacle(view: NodeView, pools: Pools) -> str | None:
    """Why BE pods do not all yield, naming one of them; None: they do. Without a BE pod that is not known."""
    pods = derived(view.pods, _reclaimed_by_title)
    if not pods:
        return "no BE pod"
    guaranteed = min(
        (pod.title for pod in derived(view.pods, _online_guaranteed) if _shares_from_above(pod, pools)), default=None
    )
    seen = False
    for pod in pods:
        # Real-time threads run before every usual thread of the node.
        if pod.uid in view.realtime:
            return f"{pod.title} has real-time threads, to which no idle class applies"
        yields = (weight_suffices(pod, view, pools) and _is_last(view.besteffort, view, unread=False)) or _yields(
            pod, view, pools, least=view.online_in_besteffort or pod.qos is not QosClass.BESTEFFORT
        )
        if yields is False:
            return f"{pod.title} is in no effective idle class"
        if pod.qos is QosClass.BURSTABLE and guaranteed is not None:
            return f"{pod.title} has the weight of the burstable directory against {guaranteed}, in any idle class"
        # A busy pod in the idle class still has all that the directory above it gets.
        if pod.qos is QosClass.BESTEFFORT and not _is_last(view.besteffort, view, unread=True):
            return "the besteffort directory has more than the minimum CPU weight"
        seen = seen or yields is True
    # New pods are believed only beside one whose class was read back: the class may not be configured at all.
    return None if seen else "no BE pod has been in an idle class for two seconds"


def weight_suffices(pod: Pod, view: NodeView, pools: Pools) -> bool:
    """Whether a BE pod needs no idle class of its own. A weight that was not read is taken for the kubelet's."""
    return (
        pools.weight_yields
        and pod.qos is QosClass.BESTEFFORT
        and _is_last(view.besteffort, view, unread=True)
        and not view.online_in_besteffort
    )


def _shares_from_above(pod: Pod, pools: Pools) -> bool:
    """A Guaranteed pod beside the burstable directory, with a container that has no CPUs of its own."""
    return not all(owns_cpus(pod, container, pools) for container in pod.members)


def _online_guaranteed(pods: Mapping[str, Pod]) -> list[Pod]:
    return [pod for pod in index_of(pods).online if pod.qos is QosClass.GUARANTEED]


def _reclaimed_by_title(pods: Mapping[str, Pod]) -> list[Pod]:
    return sorted(index_of(pods).reclaimed, key=lambda pod: pod.title)


def _is_idle(path: str, view: NodeView) -> bool:
    return any(view.actual.get((path, knob)) == level for knob, level in _GROUP_SIDES)


def _is_last(path: str, view: NodeView, *, unread: bool) -> bool:
    """Whether the groups beside this one are first: it is idle, or has the least weight. ``unread``: if not known."""
    weight = view.actual.get((path, "cpu.weight"))
    return _is_idle(path, view) or (unread if weight is None else weight == SHARES_MIN)


def _yields(pod: Pod, view: NodeView, pools: Pools, *, least: bool) -> bool | None:
    """Whether a pod yields to what is beside it, by what was read; None: it is too new, or has nothing that could.

    ``least``: idle threads need the least weight too, as online pods are beside it.
    """
    if _is_idle(pod.group.path, view):
        return True
    containers = [container for container in pod.workload if container.phase is Phase.SETTLED]
    counted = [container for container in containers if not owns_cpus(pod, container, pools)]
    # A group of idle threads has what its weight gets. They count only where the kernel compares threads of different
    # groups by their class (`scheduler_of`); a container with threads of another policy is not among them.
    if pod.sandbox is None and counted and all(container.group.path in view.idle_threads for container in counted):
        return not least or _is_last(pod.group.path, view, unread=False)
    fresh = {cid for cid, at in view.arrived.items() if view.now - at < _FRESH_S}
    if any(container.id in fresh for container in pod.containers) or (pod.sandbox is None and not counted):
        return None
    return False
