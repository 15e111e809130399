"""What the planner refuses from any policy: rules of the kernel, the kubelet and the runtime.

Each rule checks one setting in its context and returns a reason as text for people, or None. The kernel's rules are in
the kernel's own documentation (cgroup-v1, cgroup-v2); the kubelet's and the runtime's were measured on a node with
containerd 1.6 and kubelets from 1.21 to 1.27: what is refused here made container starts fail, or was rewritten.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from reconciler.policies.base import OF_KUBELET, OWN_CPUS, PERIOD_US, QUOTA_MIN_US, owns_cpus, period_us, placed_cpus
from reconciler.runtime.format import duration
from state.model import Container, ContainerKind, CpuPolicy, NodeView, Pod, Pools, Refusal, Setting
from state.pod_index import index_of


class RefusalContext(Struct, frozen=True, kw_only=True):
    """Input of a rule: the node, and all settings of the same plan by (path, knob).

    ``pod`` is None for the directories above the pods. ``containers`` are the pod's, by group path.
    """

    view: NodeView
    pools: Pools
    wanted: Mapping[tuple[str, str], Setting]
    pod: Pod | None = None
    containers: Mapping[str, Container] = {}

    def value(self, path: str, knob: str) -> tuple[bool, Value]:
        """The planned value, else the value last read; (False, None) when neither is known."""
        setting = self.wanted.get((path, knob))
        if setting is not None:
            return True, setting.value
        if (path, knob) in self.view.actual:
            return True, self.view.actual[path, knob]
        return False, None


Rule = Callable[[Setting, RefusalContext], str | None]


def outside_kubepods(setting: Setting, context: RefusalContext) -> str | None:
    """The rest of the machine is systemd's, the runtime's and other agents'."""
    root = context.view.kubepods
    if setting.path == root or setting.path.startswith(f"{root}/"):
        return None
    if _of_machine(setting) or _of_daemons(setting, context.view):
        return None
    return f"{setting.path} is outside {root}: not managed by the kubelet"


def unknown_group(setting: Setting, context: RefusalContext) -> str | None:
    """A directory other than a QoS level and not of this pod may belong to another program by now."""
    if context.pod is None:
        if setting.path in _levels(context.view) or _of_machine(setting) or _of_daemons(setting, context.view):
            return None
        return "not a QoS directory"
    if setting.path == context.pod.group.path or setting.path in context.containers:
        return None
    return f"no existing directory of pod {context.pod.title}"


def sandbox(setting: Setting, context: RefusalContext) -> str | None:
    """The pause container sleeps; writing to it gains nothing and costs a write per pod."""
    container = context.containers.get(setting.path)
    if container is None or container.kind is not ContainerKind.SANDBOX:
        return None
    # On v1 a narrowed besteffort directory must contain all below it.
    if setting.knob == "cpu.set" and context.pod is not None and (context.pod.group.path, "cpu.set") in context.wanted:
        return None
    return "pause containers are not managed"


def controller_missing(setting: Setting, context: RefusalContext) -> str | None:
    """No mount, no file."""
    controller = _CONTROLLERS.get(setting.knob) or setting.knob.partition(".")[0]
    if controller in context.view.versions:
        return None
    return f"no {controller} controller is mounted on this node"


def exclusive_container(setting: Setting, context: RefusalContext) -> str | None:
    """The static CPU manager's own containers are adopted, never fought."""
    container = context.containers.get(setting.path)
    if container is None or context.pod is None:
        return None
    if context.pod.sandbox is not None and setting.policy in (OWN_CPUS, OF_KUBELET):
        return None  # all groups of such a pod have the set of its directory
    if placed_cpus(context.pod, container, context.pools) is not None:
        return None if setting.policy == OWN_CPUS else "it or its pod has exclusive CPUs"
    return (
        "the kubelet allocated exclusive CPUs to this container"
        if owns_cpus(context.pod, container, context.pools)
        else None
    )


def kubelets_memory(setting: Setting, context: RefusalContext) -> str | None:
    """Memory nodes of containers whose CPUs are the kubelet's own choice are the kubelet's as well."""
    container = context.containers.get(setting.path)
    if container is None or context.pod is None or placed_cpus(context.pod, container, context.pools) is not None:
        return None
    return (
        "the kubelet allocated exclusive CPUs to this container"
        if owns_cpus(context.pod, container, context.pools)
        else None
    )


def mems_without_memory(setting: Setting, context: RefusalContext) -> str | None:
    """EINVAL for a node that has none."""
    if not isinstance(setting.value, CpuSet):
        return None
    gone = setting.value - context.view.topology.memory_nodes()
    return f"NUMA node {gone} has no memory" if gone else None


def kubelet_reasserts(setting: Setting, context: RefusalContext) -> str | None:
    """Up to 1.21 the static CPU manager rewrites what its spec has, for every app container, every few seconds."""
    every = context.view.kubelet.reasserts_s
    if every is None:
        return None
    container = context.containers.get(setting.path)
    if container is None or container.kind is ContainerKind.SANDBOX:
        return None
    spec = container.spec
    if setting.knob == "cpu.set":
        rewritten = True
    elif setting.knob == "cpu.weight":
        # Every spec has shares; a rewrite of the same value changes nothing.
        rewritten = spec is None or spec.shares != setting.value
    elif setting.knob == "cpu.quota":
        rewritten = spec is not None and spec.quota_us is not None and spec.quota_us > 0
    elif setting.knob == "memory.max":
        rewritten = spec is not None and spec.memory_bytes is not None and spec.memory_bytes > 0
    elif setting.knob == "memory.swap":
        rewritten = spec is not None and spec.swap_bytes is not None and spec.swap_bytes > 0
    else:
        rewritten = False
    return f"this kubelet rewrites it every {duration(every)}" if rewritten else None


def empty_cpuset(setting: Setting, context: RefusalContext) -> str | None:
    """A populated group cannot be emptied (ENOSPC), and "no limit" is not a CPU set."""
    if isinstance(setting.value, CpuSet) and setting.value:
        return None
    return "a CPU set needs at least one CPU"


def cpuset_not_online(setting: Setting, context: RefusalContext) -> str | None:
    """v1 refuses a CPU that is not in the parent's set; v2 accepts it and then does not use it."""
    if not isinstance(setting.value, CpuSet):
        return None
    if gone := setting.value - context.view.topology.online:
        return f"CPU {gone} is not online"
    outside = setting.value - context.view.cpus
    return f"CPU {outside} is outside of the CPU set of {context.view.kubepods}" if outside else None


def cpuset_outside_parent(setting: Setting, context: RefusalContext) -> str | None:
    """v1: EACCES. Known only for the pod's directory and besteffort, which the view always reads."""
    pod, value = context.pod, setting.value
    if context.view.versions.get("cpuset") != 1 or pod is None or not isinstance(value, CpuSet):
        return None
    level = _level_of(pod, context.view)
    parent = level if setting.path == pod.group.path else pod.group.path
    have = _set_above(parent, setting.knob, context)
    if have is None or value <= have:
        return None
    if parent == level and setting.knob == "cpu.set" and have <= context.pools.reclaimed:
        return None  # besteffort as we narrowed it: it is loosened in the same plan, before this
    part = _possible_part(setting, context)
    what = "CPU" if setting.knob == "cpu.set" else "NUMA node"
    rest = f": of {value}, {what} {part} is set" if part is not None else ""
    return f"its parent {parent} has only {what} {have}{rest}"


def _set_above(parent: str, knob: str, context: RefusalContext) -> CpuSet | None:
    """The set of a directory as planned or read; None: not known."""
    _, have = context.value(parent, knob)
    return have if isinstance(have, CpuSet) and have else None


def _possible_part(setting: Setting, context: RefusalContext) -> CpuSet | None:
    """What its parent has of a set of CPUs or memory nodes; None: nothing, or no part is of use."""
    pod, value = context.pod, setting.value
    # What a pod is to leave, it leaves as far as it can. An owner's exclusive CPUs are a claim, kept whole or not.
    if pod is None or not isinstance(value, CpuSet) or setting.policy == OWN_CPUS:
        return None
    parent = _level_of(pod, context.view) if setting.path == pod.group.path else pod.group.path
    have = _set_above(parent, setting.knob, context)
    return (value & have) or None if have is not None else None


def besteffort_cpuset(setting: Setting, context: RefusalContext) -> str | None:
    """Under the static policy the runtime then fails to start containers: their spec names CPUs outside (EACCES)."""
    view = context.view
    if setting.path not in _levels(view) or not isinstance(setting.value, CpuSet):
        return None
    if setting.path != view.besteffort:
        return "the kubelet places online pods below it"
    if setting.value >= view.cpus:
        return None
    if view.kubelet.policy is not CpuPolicy.NONE:
        return (
            f"the kubelet's CPU manager policy is {view.kubelet.policy}: container starts in a narrowed besteffort "
            "directory would fail"
        )
    inside = [pod.title for pod in index_of(view.pods).beside]
    return f"{min(inside)} is an online pod inside besteffort" if inside else None


def quota_minimum(setting: Setting, context: RefusalContext) -> str | None:
    """EINVAL on v1 and v2."""
    if setting.value is None or (isinstance(setting.value, int) and setting.value >= QUOTA_MIN_US):
        return None
    return f"the kernel takes no quota below {QUOTA_MIN_US} µs"


def quota_below_child(setting: Setting, context: RefusalContext) -> str | None:
    """The runtime writes a container's own quota at each start: EINVAL under a smaller one on v1, a crash loop."""
    view, pod = context.view, context.pod
    if not isinstance(setting.value, int) or isinstance(setting.value, bool):
        return None
    # Which quotas pods will bring is not known; in besteffort none has one.
    if setting.path in (view.kubepods, view.burstable):
        return "pods that start later set their own quotas; a larger one would fail the container start"
    if pod is None or setting.path != pod.group.path:
        return None
    own = period_us(view, setting.path)
    for container in pod.workload:
        spec = container.spec
        if spec is None:
            return f"the quota of container {container.name or container.id[:12]} is unknown and may be larger"
        if spec.quota_us is not None and spec.quota_us * own > setting.value * (spec.period_us or PERIOD_US):
            return (
                f"container {container.name or container.id[:12]} has its own quota of {spec.quota_us} µs: "
                "its next start would fail"
            )
    return None


def online_under_quota(setting: Setting, context: RefusalContext) -> str | None:
    """The besteffort directory's quota binds all below it, BE or not."""
    view = context.view
    if setting.path != view.besteffort or setting.value is None:
        return None
    for pod in index_of(view.pods).beside:
        return f"{pod.title} is an online pod inside besteffort"
    return None


def online_under_memory(setting: Setting, context: RefusalContext) -> str | None:
    """The besteffort directory's memory bounds throttle, reclaim or kill all below it, BE or not."""
    return online_under_quota(setting, context)


def v1_quota_above_parent(setting: Setting, context: RefusalContext) -> str | None:
    """v1: a child's share of time may not exceed its parent's (EINVAL). v2 takes any."""
    pod, value, view = context.pod, setting.value, context.view
    if view.versions.get("cpu") != 1 or pod is None or not isinstance(value, int):
        return None
    container = context.containers.get(setting.path)
    own = period_us(view, setting.path, container)
    above = (pod.group.path, _level_of(pod, view)) if container is not None else (_level_of(pod, view),)
    for parent in above:
        limit = _quota_of(parent, context)
        if limit is not None and value * limit[1] > limit[0] * own:
            return f"{parent} is limited to {limit[0]} of {limit[1]} µs, and v1 refuses a child above its parent"
    return None


def burst_above_quota(setting: Setting, context: RefusalContext) -> str | None:
    """EINVAL on both versions; without a quota there is nothing to burst over."""
    if not isinstance(setting.value, int) or setting.value == 0:
        return None
    container = context.containers.get(setting.path)
    wanted = (setting.path, "cpu.quota") in context.wanted
    if wanted or container is None or container.spec is None:
        _, quota = context.value(setting.path, "cpu.quota")
    else:
        # The runtime's, whatever the file has now: a quota of bypassd's is removed in the same plan.
        quota = container.spec.quota_us
    if isinstance(quota, int) and quota > 0 and setting.value <= quota:
        return None
    return f"a burst of {setting.value} µs needs a quota of at least as much; it is {quota or 'unset or unknown'}"


def idle_not_pod(setting: Setting, context: RefusalContext) -> str | None:
    """While cpu.idle is 1 a write of shares fails: the kubelet's on a QoS directory, the runtime's on a container."""
    if setting.value in (0, None) or (context.pod is not None and setting.path == context.pod.group.path):
        return None
    return "with cpu.idle set, writes of cpu.shares fail, and the kubelet or the runtime writes them here"


def idle_resized(setting: Setting, context: RefusalContext) -> str | None:
    """The kubelet writes a pod's own shares when it resizes the pod in place; a BestEffort pod it never resizes."""
    if setting.value in (0, None) or context.pod is None or context.pod.qos is QosClass.BESTEFFORT:
        return None
    if not context.view.kubelet.may_resize:
        return None
    return "this kubelet may resize the pod in place, and with cpu.idle set its write of cpu.shares would fail"


def one_way(setting: Setting, context: RefusalContext) -> str | None:
    """EINVAL for ever on openEuler's kernels: offline work never becomes online again."""
    if setting.value == 0 and context.view.actual.get((setting.path, setting.knob)) == -1:
        return "this kernel cannot put an offline group back online; recreate the pod"
    return None


def shared_level(setting: Setting, context: RefusalContext) -> str | None:
    """Every group made below an offline directory is offline for good, online pods that start later too."""
    if setting.value in (0, None) or context.pod is not None:
        return None
    return "pods started later below it would be offline permanently"


def qos_weight(setting: Setting, context: RefusalContext) -> str | None:
    """The kubelet sets the shares of the QoS levels from the pods below them, every minute."""
    if setting.path not in _levels(context.view):
        return None
    return "the kubelet rewrites the weight of QoS directories every 60 s and on each pod change"


_OF_EVERY_KNOB: Final[tuple[Rule, ...]] = (
    outside_kubepods,
    unknown_group,
    controller_missing,
    sandbox,
    kubelet_reasserts,
)
_OF_KNOB: Final[Mapping[str, tuple[Rule, ...]]] = {
    "cpu.set": (empty_cpuset, cpuset_not_online, exclusive_container, besteffort_cpuset, cpuset_outside_parent),
    "cpu.mems": (empty_cpuset, kubelets_memory, mems_without_memory, cpuset_outside_parent),
    "cpu.quota": (quota_minimum, quota_below_child, online_under_quota, v1_quota_above_parent),
    "cpu.burst": (burst_above_quota,),
    "cpu.idle": (idle_not_pod, idle_resized),
    "cpu.qos": (one_way, shared_level),
    "cpu.weight": (qos_weight,),
    "memory.high": (online_under_memory,),
    "memory.max": (online_under_memory,),
    "memory.swap": (online_under_memory,),
    "memory.soft": (online_under_memory,),
}
_RULES: Final[Mapping[str, tuple[Rule, ...]]] = {knob: _OF_EVERY_KNOB + rules for knob, rules in _OF_KNOB.items()}
_NAMES: Final[Mapping[Rule, str]] = {
    rule: rule.__name__.replace("_", "-") for rules in (_OF_EVERY_KNOB, *_OF_KNOB.values()) for rule in rules
}
"""By which metrics and statuses name a rule: renaming the function renames it there."""
OUTSIDE_PARENT: Final = _NAMES[cpuset_outside_parent]
ABOVE_PARENT: Final = _NAMES[v1_quota_above_parent]
"""A quota that the one above makes needless."""
_CONTROLLERS: Final[Mapping[str, str]] = {
    "cpu.set": "cpuset",
    "cpu.mems": "cpuset",
    "cpu.mems_migrate": "cpuset",
    "net.classid": "net_cls",
    "freeze": "freezer",
}


def check(context: RefusalContext) -> tuple[dict[tuple[str, str], Setting], list[Refusal]]:
    """Split the plan into settings that may be written and those that may not, each with the first rule against it.

    Of a CPU set of which the directory above has only a part, that part is written and the whole refused.
    """
    allowed: dict[tuple[str, str], Setting] = {}
    refusals: list[Refusal] = []
    wanted = dict(context.wanted)
    context = replace(context, wanted=wanted)
    # Parents first: what is possible there bounds the groups below.
    for key, setting in sorted(wanted.items(), key=lambda item: item[0][0].count("/")):
        for rule in _RULES.get(setting.knob, _OF_EVERY_KNOB):
            reason = rule(setting, context)
            if reason is not None:
                refusals.append(Refusal(setting=setting, rule=_NAMES[rule], reason=reason))
                if rule is cpuset_outside_parent:
                    _take_part(key, setting, context, wanted, allowed)
                break
        else:
            allowed[key] = setting
    return allowed, refusals


def _take_part(
    key: tuple[str, str],
    setting: Setting,
    context: RefusalContext,
    wanted: dict[tuple[str, str], Setting],
    allowed: dict[tuple[str, str], Setting],
) -> None:
    """The possible part of a set is wanted in place of the whole; without one the set read last bounds those below."""
    part = _possible_part(setting, context)
    if part is None:
        del wanted[key]
    else:
        reason = f"{setting.reason}; of {setting.value} what its parent has"
        wanted[key] = allowed[key] = replace(setting, value=part, reason=reason)


def _of_machine(setting: Setting) -> bool:
    """What the kernel has for the machine as a whole, such as the cost model of a disk."""
    return setting.path == "/" and setting.knob in CATALOG and CATALOG[setting.knob].root_only


def _of_daemons(setting: Setting, view: NodeView) -> bool:
    """The weight of another group directly below the root; that of the pods and bypassd's own are not among them."""
    return setting.knob == "cpu.weight" and setting.path in view.daemons.groups


def _levels(view: NodeView) -> tuple[str, str, str]:
    return view.kubepods, view.besteffort, view.burstable


def _level_of(pod: Pod, view: NodeView) -> str:
    if pod.qos is QosClass.BESTEFFORT:
        return view.besteffort
    return view.burstable if pod.qos is QosClass.BURSTABLE else view.kubepods


def _quota_of(path: str, context: RefusalContext) -> tuple[int, int] | None:
    """Quota and period of a directory above: as planned for besteffort, as wanted or as read; None: no limit known."""
    period = period_us(context.view, path)
    share = (context.pools.quota_milli or {}).get(path)
    if share is not None:
        return max(QUOTA_MIN_US, share * period // 1000), period
    known, value = context.value(path, "cpu.quota")
    return (value, period) if known and isinstance(value, int) and value > 0 else None
