"""From the node as it is to what is wanted: the node, then directories, then pods. Pure; the same view, the same plan.

The parts can be used separately: a container start needs only `plan_pod`, which looks at one pod and at a `NodePlan`
that is already there. Operators' holds are applied to the result, not here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY
from cgroupfs.knobs import SETS
from reconciler.policies.base import AnyPolicy, PolicyConfig
from reconciler.policies.refusals import RefusalContext, check
from reconciler.policies.table import POLICIES, PoliciesConfig, is_excluded
from reconciler.runtime.format import plural
from state.model import NodeView, Pod, Pools, Refusal, Setting
from state.plan import Desired, NodePlan
from state.pod_index import derived, of_each

Planned = tuple[tuple[Setting, ...], tuple[Refusal, ...]]

SANDBOXED: Final = "sandboxed"
"""The rule that refuses settings of containers in a machine or kernel of their own."""
READ_FOR_PODS: Final = (
    *("pods", "kubelet", "actual", "measures", "lent_us", "be_bonus", "uses", "topology", "kubepods_cpus", "disks"),
    *("knobs", "quota_floors", "scheduler"),
)
"""The fields of a view from which a pod's settings may follow, beside the plan and the node's amounts of memory."""


class _Wish(NamedTuple):
    """``dry``: its policy is a dry run."""

    dry: bool
    precedence: int
    setting: Setting


_Wishes = list[_Wish]

# For a limit the tighter of two wishes keeps both policies' promises; for anything else the precedence decides.
_LIMITS: Final = frozenset(
    {"cpu.quota", "cpu.burst", "memory.max", "memory.high", "memory.soft", "memory.swap", "pids.max"}
)


def plan_pools(
    view: NodeView, previous: Pools | None, config: PoliciesConfig, policies: Sequence[AnyPolicy] = POLICIES
) -> Pools:
    """Every CPU in its pool, and the BE budget. ``previous`` is the last answer: what is held now, and since when."""
    online = view.cpus
    pools = Pools(
        online_cpus=online,
        reserved=EMPTY,
        dedicated={},
        shared=online,
        reclaimed=EMPTY,
        budget_milli=1000 * len(online),
        reasons={"cpus": reason} if (reason := _outside(view)) else {},
        elsewhere={key: owner.kernel for key, owner in view.owners.items() if owner.runs_elsewhere},
    )
    section: PolicyConfig
    for policy in policies:
        section = getattr(config, policy.name)
        if policy.announce is not None and section.enabled and not section.dry_run:
            pools = policy.announce(view, pools, previous, section)
    off: dict[str, str] = {}
    for policy in policies:
        if policy.decide_node is None:
            continue
        section = getattr(config, policy.name)
        if not section.enabled:
            off[policy.name] = "off"
        elif section.dry_run:
            pools = _tried(policy, view, pools, previous, section)
        else:
            pools = policy.decide_node(view, pools, previous, section)
    return replace(pools, terms=None, reasons={**pools.reasons, **off})


def _tried(policy: AnyPolicy, view: NodeView, pools: Pools, previous: Pools | None, section: PolicyConfig) -> Pools:
    """The pools without what a dry run decides; that is kept beside them, for its own settings.

    Of what counts all the same the quotas are left out, as no group is below them.
    """
    assert policy.decide_node is not None
    before = previous.trials.get(policy.name, previous) if previous is not None else None
    trial = policy.decide_node(view, pools, before, section)
    trials = {**pools.trials, policy.name: replace(trial, terms=None, trials={})}
    if policy.counts_in_dry_run:
        return replace(trial, quota_milli=None, trials=trials) if trial.quota_milli is not None else trial
    reasons = {name: f"dry run: {text}" for name, text in trial.reasons.items() if pools.reasons.get(name) != text}
    return replace(pools, reasons={**pools.reasons, **reasons}, trials=trials)


def _plan_for(policy: AnyPolicy, node: NodePlan) -> NodePlan:
    """The plan from which a policy's own settings follow."""
    trial = node.pools.trials.get(policy.name)
    return node if trial is None else replace(node, pools=trial)


def _outside(view: NodeView) -> str:
    """Why pods cannot have all online CPUs, or that this is not known; empty: they can."""
    if view.kubepods_cpus is not None and view.cpus != view.kubepods_cpus & view.topology.online:
        return f"all online CPUs: those of {view.kubepods} are not known"
    outside = view.topology.online - view.cpus
    return f"CPU {view.cpus} only: CPU {outside} is outside of the CPU set of {view.kubepods}" if outside else ""


def plan_node(
    view: NodeView, previous: NodePlan | None, config: PoliciesConfig, policies: Sequence[AnyPolicy] = POLICIES
) -> NodePlan:
    """The pools, and everything else that is decided for the node as a whole. ``previous`` is the last answer."""
    pools = plan_pools(view, previous.pools if previous is not None else None, config, policies)
    node, reasons = NodePlan(pools=pools), dict[str, str]()
    requesting = derived(view.pods, _requesting_by_name, config, policies)
    for policy in policies:
        if policy.decide_resources is None and not requesting[policy.name]:
            continue
        section: PolicyConfig = getattr(config, policy.name)
        marked = 0 if section.enabled else requesting[policy.name]
        if policy.decide_resources is not None and (section.enabled or marked):
            node = policy.decide_resources(view, node, previous, section)
        elif policy.decide_resources is not None:
            reasons[policy.name] = "off"
        if marked:
            reasons[policy.name] = f"off, except for {plural(marked, 'pod')} that request it by annotation"
    return replace(node, reasons={**node.reasons, **reasons}) if reasons else node


def plan_parents(
    view: NodeView, node: NodePlan, config: PoliciesConfig, policies: Sequence[AnyPolicy] = POLICIES
) -> Planned:
    """What is wanted of the directories above the pods."""
    wishes = [
        _Wish(section.dry_run, policy.precedence, setting)
        for policy, section in _active(config, policies, derived(view.pods, _requesting_by_name, config, policies))
        if policy.parents is not None
        for setting in policy.parents(view, _plan_for(policy, node), section)
    ]
    return _planned(RefusalContext(view=view, pools=node.pools, wanted={}), wishes)


def plan_pod(
    pod: Pod, view: NodeView, node: NodePlan, config: PoliciesConfig, policies: Sequence[AnyPolicy] = POLICIES
) -> Planned:
    """What is wanted of one pod's directory and its containers. Called at each container start."""
    wishes = [
        _Wish(section.dry_run, policy.precedence, setting)
        for policy in policies
        if policy.pod is not None and ((section := getattr(config, policy.name)).enabled or _asks(policy, pod, config))
        for setting in policy.pod(pod, view, _plan_for(policy, node), section)
    ]
    unkept: list[Refusal] = []
    if pod.sandbox is not None:
        wishes, unkept = _as_a_whole(pod, wishes)
    if not wishes:
        return (), tuple(unkept)
    containers = {container.group.path: container for container in pod.containers}
    context = RefusalContext(view=view, pools=node.pools, wanted={}, pod=pod, containers=containers)
    settings, refusals = _planned(context, wishes)
    return settings, (*refusals, *unkept)


def same_for_pods(before: NodeView, now: NodeView) -> bool:
    """Whether `plan_pod` finds the same for each pod by both views, the plan of the node being the same."""
    return _memory_of(before) == _memory_of(now) and all(
        (then := getattr(before, name)) is (value := getattr(now, name)) or then == value for name in READ_FOR_PODS
    )


def _memory_of(view: NodeView) -> tuple[int, int] | None:
    return None if (memory := view.node_memory) is None else (memory.total_bytes, memory.swap_bytes)


def _as_a_whole(pod: Pod, wishes: _Wishes) -> tuple[_Wishes, list[Refusal]]:
    """A pod in a machine or kernel of its own is bounded at its directory.

    No group inside has one container's processes. Sets inside follow the directory's: on v1 it cannot be smaller than
    those below it. A setting that the directory does not have is refused, as it would be written to an empty group; no
    limit, and 0 of something, is what an empty group has.
    """
    whole = {wish.setting.knob for wish in wishes if wish.setting.container_id is None}
    kept, unkept = _Wishes(), dict[tuple[str, str | None], Refusal]()
    for wish in wishes:
        setting = wish.setting
        if setting.container_id is None or (setting.knob in SETS and setting.knob in whole):
            kept.append(wish)
        elif setting.knob not in whole and setting.value not in (None, 0):
            reason = (
                f"{pod.sandbox}: no group has the processes of this container alone, and the pod as a whole is not "
                f"bounded by {setting.knob}"
            )
            unkept[setting.knob, setting.container_id] = Refusal(setting=setting, rule=SANDBOXED, reason=reason)
    return kept, list(unkept.values())


def plan(
    view: NodeView, previous: NodePlan | None, config: PoliciesConfig, policies: Sequence[AnyPolicy] = POLICIES
) -> Desired:
    """The whole node's desired state, settings sorted by group and knob."""
    return plan_settings(view, plan_node(view, previous, config, policies), config, policies)


def plan_settings(
    view: NodeView, node: NodePlan, config: PoliciesConfig, policies: Sequence[AnyPolicy] = POLICIES
) -> Desired:
    """What follows from a plan of the node: all settings of control files, sorted by group and knob."""
    settings, refusals = plan_parents(view, node, config, policies)
    every, refused = list(settings), list(refusals)
    for uid in sorted(view.pods):
        settings, refusals = plan_pod(view.pods[uid], view, node, config, policies)
        every += settings
        refused += refusals
    return Desired(
        plan=node,
        settings={setting.key: setting for setting in sorted(every, key=_key)},
        refusals=tuple(sorted(refused, key=lambda refusal: (*refusal.setting.key, refusal.rule))),
    )


def _active(
    config: PoliciesConfig, policies: Sequence[AnyPolicy], requesting: Mapping[str, int]
) -> Iterator[tuple[AnyPolicy, PolicyConfig]]:
    for policy in policies:
        section: PolicyConfig = getattr(config, policy.name)
        if section.enabled or requesting[policy.name]:
            yield policy, section


def _asks(policy: AnyPolicy, pod: Pod, config: PoliciesConfig) -> bool:
    """Whether a pod requests a policy for itself that is off for the node."""
    return (
        policy.requested is not None
        and not is_excluded(policy.name, config)
        and policy.requested(pod, getattr(config, policy.name))
    )


def _requesting_by_name(
    pods: Mapping[str, Pod], config: PoliciesConfig, policies: Sequence[AnyPolicy]
) -> Mapping[str, int]:
    """How many of these pods request a policy for themselves, by its name; 0 where it is on for the node."""
    return {policy.name: _requesting(policy, pods, config) for policy in policies}


def _requesting(policy: AnyPolicy, pods: Mapping[str, Pod], config: PoliciesConfig) -> int:
    section: PolicyConfig = getattr(config, policy.name)
    if policy.requested is None or section.enabled or is_excluded(policy.name, config):
        return 0
    return sum(of_each(pods, policy.requested, section).values())


def _resolve(wishes: Iterable[_Wish]) -> Mapping[tuple[str, str], Setting]:
    """One setting per group and knob."""
    chosen: dict[tuple[str, str], _Wish] = {}
    for wish in wishes:
        key = wish.setting.key
        rival = chosen.get(key)
        if rival is None or _beats(wish, rival):
            chosen[key] = wish
    return {key: wish.setting for key, wish in chosen.items()}


def _beats(wish: _Wish, other: _Wish) -> bool:
    mine, theirs = wish.setting.value, other.setting.value
    if wish.setting.knob in _LIMITS and mine != theirs:
        return theirs is None or (isinstance(mine, int) and isinstance(theirs, int) and mine < theirs)
    return wish.precedence < other.precedence


def _planned(context: RefusalContext, wishes: _Wishes) -> Planned:
    written = _resolve(wish for wish in wishes if not wish.dry)
    allowed, refusals = check(replace(context, wanted=written))
    # What is not written displaces nothing that is, and forbids nothing: the file would have neither value.
    if shown := _resolve(wish for wish in wishes if wish.dry and wish.setting.key not in written):
        of_all = check(replace(context, wanted={**shown, **written}))
        allowed = {**{key: setting for key, setting in of_all[0].items() if key in shown}, **allowed}
        refusals += [refusal for refusal in of_all[1] if refusal.setting.key in shown]
    return tuple(sorted(allowed.values(), key=_key)), tuple(refusals)


def _key(setting: Setting) -> tuple[str, str]:
    return setting.path, setting.knob
