"""core scheduling: BE work never runs on the sibling thread of a core that runs online work (Linux 5.14).

Two threads of a core share its caches and execution units, and a CPU set cannot separate two pods of one pool there.
The kernel can: tasks with different cookies never run on one core at the same time; the kernel leaves a thread of the
core idle instead. Opt-in, because of that cost. It needs hyper-threads and a kernel with CONFIG_SCHED_CORE. It has no
control file: `reconciler.actuators.core_sched.actuator` gives the cookies to the threads.

Source: kernel documentation, admin-guide/hw-vuln/core-scheduling; Koordinator's coresched and its labels.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, process_groups, setting_of
from state.cpu import CORE_COOKIE, CORE_SCHED, CookieGroups
from state.model import NodeView, Pod, PodClass
from state.plan import CookieMember, CookiePlan, NodePlan
from state.pod_index import in_order

NAME: Final = CORE_SCHED
POLICY_LABEL: Final = "koordinator.sh/core-sched-policy"
GROUP_LABEL: Final = "koordinator.sh/core-sched-group-id"
RECLAIMED: Final = "reclaimed"
ONLINE: Final = "online"
_POLICIES: Final = ("", "none", "exclusive")
"""Koordinator's values of the label."""
_REASONS: Final[Mapping[CookieGroups, str]] = {
    CookieGroups.RECLAIMED: "BE pods share cores only with BE pods",
    CookieGroups.CLASS: "BE pods share cores only with BE pods, online pods only with online pods",
    CookieGroups.POD: "BE pods share cores only with BE pods, online pods with no other pod",
}


class CoreSchedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pods share a core."""

    enabled: Annotated[
        bool,
        Meta(description="BE work never runs on the sibling thread of online work; needs SMT and core scheduling"),
    ] = False
    # Tasks without a cookie are a group as well, which includes the kernel's own threads and the kubelet: with a cookie
    # of their own online pods are also kept from those, and leave half of a core idle whenever one of them runs beside.
    # That is for pods that do not trust each other, not for latency. Koordinator's default is a group for each class.
    groups: Annotated[
        CookieGroups,
        Meta(description="who forms a group: BE pods (reclaimed), online pods, too (class), each online pod (pod)"),
    ] = CookieGroups.RECLAIMED

    # A program that exec started has no cookie until then; a search reads every BE process.
    sweep_s: ClassVar[float] = 5.0


class CoreGroup(NamedTuple):
    """The group whose cookie a pod's threads get, and the reason."""

    name: str
    reason: str


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: CoreSchedConfig) -> NodePlan:
    """The group of every container; nothing where no core has two threads."""
    if not view.topology.smt:
        why = "no core of this machine has two online threads: core scheduling has no effect"
        return replace(plan, reasons={**plan.reasons, NAME: why})
    members: dict[str, CookieMember] = {}
    for pod in in_order(view.pods):
        if (group := core_group(pod, config.groups)) is None:
            continue
        for container in process_groups(pod):
            setting = setting_of(pod, container, CORE_COOKIE, None, policy=NAME, reason=group.reason)
            members[setting.path] = CookieMember(setting=setting, group=group.name)
    cookies = CookiePlan(members=members, sweep_s=config.sweep_s, dry_run=config.dry_run)
    return replace(plan, cookies=cookies, reasons={**plan.reasons, NAME: _REASONS[config.groups]})


def core_group(pod: Pod, groups: CookieGroups) -> CoreGroup | None:
    """The group of a pod; None: its threads have no cookie. System pods, like the pause containers, never have one.

    Groups of online and of BE pods are never the same. A label with an unknown value is named in the reason, and counts
    as absent.
    """
    if pod.pod_class is PodClass.SYSTEM:
        return None
    text = pod.labels.get(POLICY_LABEL, "")
    unknown = "" if text in _POLICIES else f"; {POLICY_LABEL}: {text!r} is none of {', '.join(map(repr, _POLICIES))}"
    group = pod.labels.get(GROUP_LABEL, "")
    side = ONLINE if pod.pod_class.online else RECLAIMED
    # A BE pod cannot opt out: it would run beside online work.
    if text == "none" and pod.pod_class.online:
        return None
    if text == "exclusive":
        return CoreGroup(f"pod/{pod.uid}", f"{POLICY_LABEL}: exclusive")
    if group:
        return CoreGroup(f"{side}/{group}", f"{GROUP_LABEL}: {group}; the pod is {pod.pod_class}{unknown}")
    if side == RECLAIMED:
        return CoreGroup(RECLAIMED, f"the pod is BE{unknown}")
    if groups is CookieGroups.CLASS:
        return CoreGroup(ONLINE, f"the pod is {pod.pod_class}{unknown}")
    if groups is CookieGroups.POD:
        return CoreGroup(f"pod/{pod.uid}", f"one group per online pod{unknown}")
    return None


POLICY = Policy(
    name=NAME,
    summary="BE work never on the sibling thread of online work",
    config_type=CoreSchedConfig,
    precedence=48,
    decide_resources=decide_resources,
)
