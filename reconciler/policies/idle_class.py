"""idle class: BE pods run only when no other task wants the CPU.

Two sides, each its own choice. ``group``: the pod's directory (``cpu.idle``, Linux 5.15); inside the pod the containers
keep their weights among each other. ``threads``: every thread of the pod's containers (SCHED_IDLE, any kernel), from
before the first instruction of its program; `reconciler.actuators.processes.idle_threads` sets it and records the
originals. What each does on which kernel: docs/cpu.md. Opt-in: BE pods may starve while online work fills their CPUs.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.scheduling import IDLE
from reconciler.policies.base import Policy, PolicyConfig, owns_cpus, setting_of, unsupported_reason
from reconciler.policies.yielding import weight_suffices
from state.cpu import THREAD_POLICY
from state.model import NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan, ProcessValuePlan
from state.pod_index import in_order, of_each

NAME: Final = "idle_class"
KNOB: Final = "cpu.idle"
_REASON: Final = "BE runs only on idle CPU time"


class IdleClassConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sides."""

    enabled: Annotated[bool, Meta(description="BE pods run only on otherwise idle CPU time, and may starve")] = False
    group: Annotated[bool, Meta(description="BE pods' directories in it (cpu.idle, Linux 5.15)")] = True
    threads: Annotated[
        bool,
        Meta(description="BE containers' threads in it (SCHED_IDLE); from Linux 6.6 on not beside `group`"),
    ] = False
    always: Annotated[
        bool,
        Meta(description="`group` also where besteffort's least weight does the same (from Linux 6.6 on)"),
    ] = False

    # Threads inherit the class; only those moved in by others are found so late.
    sweep_s: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        if self.enabled and not (self.group or self.threads):
            raise ValueError("enabled: true without a side; expected group or threads")


def announce(view: NodeView, pools: Pools, previous: Pools | None, config: IdleClassConfig) -> Pools:
    """Whether besteffort's least weight replaces the idle class, for the budget's law."""
    # From Linux 6.6 on the kernel balances a CPU whose tasks are all in the idle class as often as an idle one: BE
    # threads change CPUs several times as often, and a group that comes to a CPU may run until the next tick, before a
    # server that was interrupted there (measured on 6.18: docs/protection.md). So there only a BE pod with online pods
    # beside it gets the class: the directory's least weight puts the others after every online pod outside.
    return replace(
        pools, weight_yields=config.group and not config.always and not config.dry_run and view.scheduler.eevdf
    )


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: IdleClassConfig) -> Pools:
    """Say what this kernel can, of the sides that are on."""
    lacking = unsupported_reason(view, KNOB) if config.group else None
    groups = "groups beside online pods, else the least weight" if pools.weight_yields else "groups"
    sides = ([groups] if config.group and lacking is None else []) + (
        ["threads"] if _uses_threads(view, config) else []
    )
    texts = [f"BE pods run only on idle CPU time ({', '.join(sides)})"] if sides else []
    reason = "; ".join([*texts, *([lacking] if lacking is not None else [])])
    return replace(pools, reasons={**pools.reasons, NAME: reason})


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: IdleClassConfig) -> NodePlan:
    """The idle class for the threads of every BE container, those in creation too."""
    if not _uses_threads(view, config):
        return plan
    each, settings = of_each(view.pods, _thread_settings), dict[str, Setting]()
    for pod in in_order(view.pods):
        if _is_idle(pod, plan.pools):
            settings.update(each[pod.uid])
    part = ProcessValuePlan(settings=settings, sweep_s=config.sweep_s, dry_run=config.dry_run)
    return replace(plan, idle_threads=part)


def _thread_settings(pod: Pod) -> Mapping[str, Setting]:
    """Of all containers but the pause container, which sleeps."""
    return {
        container.group.path: setting_of(pod, container, THREAD_POLICY, IDLE, policy=NAME, reason=_REASON)
        for container in pod.workload
    }


def _uses_threads(view: NodeView, config: IdleClassConfig) -> bool:
    """Whether threads have the class: not beside idle groups where the kernel heeds it within groups only."""
    groups = config.group and unsupported_reason(view, KNOB) is None
    # From Linux 6.6 on both together do harm: a CPU that runs nothing but such threads is chosen for an online task
    # that wakes up, and is not given up (measured on 6.18: docs/cpu.md).
    return config.threads and (view.scheduler.threads_yield or not groups)


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: IdleClassConfig) -> list[Setting]:
    """The ``group`` side. The pod's weight, which the kernel drops meanwhile, is written when the class ends."""
    if not config.group or unsupported_reason(view, KNOB) is not None or not _is_idle(pod, plan.pools):
        return []
    if weight_suffices(pod, view, plan.pools):
        return []
    # A weight of 2 by itself lets BE work finish its time slice when another task wakes up; the idle class does not.
    # Only the pod's own directory: while cpu.idle is 1 writing shares fails (EINVAL), and the kubelet writes those of
    # the QoS directories every minute (with Koordinator's, there, it cannot restart: 2732, 2986), the runtime those of
    # its containers. A kubelet that resizes pods in place writes a pod's own, too: `refusals.idle_resized`.
    return [setting_of(pod, None, KNOB, 1, policy=NAME, reason=_REASON)]


def _is_idle(pod: Pod, pools: Pools) -> bool:
    """A BE pod; not where a container of it owns CPUs, which it would then share."""
    return pod.pod_class is PodClass.RECLAIMED and not any(
        owns_cpus(pod, container, pools) for container in pod.workload
    )


POLICY = Policy(
    name=NAME,
    summary="BE pods in the kernel's idle class",
    config_type=IdleClassConfig,
    precedence=42,
    announce=announce,
    decide_node=decide_node,
    decide_resources=decide_resources,
    pod=for_pod,
)
