"""What is known and planned, as plain values for people: one wording for the document, the plan and the store. Pure."""

from collections.abc import Callable

from msgspec import to_builtins

from cgroupfs.lines import lines_of
from cgroupfs.scheduling import policy_text
from resctrl.schemata import format_schemata
from state.cache import CachePlan
from state.model import NodeCpu, Pod, Pools
from state.plan import NodePlan, ProcessValuePlan


def pod_facts(pod: Pod, pools: Pools | None) -> dict[str, object]:
    """A pod for people: names, class, the source of the class, and the pool it runs in."""
    return {
        "uid": pod.uid,
        "title": pod.title,
        "namespace": pod.namespace,
        "name": pod.name,
        "qos": pod.qos.value,
        "class": pod.pod_class.value,
        "class_source": pod.classification.source,
        "class_certain": pod.classification.certain,
        "last_class": last.pod_class.value if (last := pod.classification.last) is not None else None,
        "last_class_source": last.source if last is not None else None,
        "pool": pools.pool_of(pod) if pools is not None else None,
        "problems": list(pod.classification.problems),
        "unobeyed": list(pod.unobeyed),
        "meta_source": pod.meta_source,
        "spec_known": pod.spec_known,
        "sandbox": pod.sandbox,
        "group": pod.group.path,
    }


def pool_lists(pools: Pools) -> dict[str, str]:
    """The pools by name as CPU lists; a container's own CPUs are ``dedicated/<uid>/<container>``."""
    named = {"reserved": pools.reserved, "shared": pools.shared, "reclaimed": pools.reclaimed, **pools.named}
    if pools.interrupt:
        named["interrupt"] = pools.interrupt
    named |= {f"dedicated/{owner}": cpus for owner, cpus in pools.dedicated.items()}
    return {name: str(cpus) for name, cpus in named.items()}


def budget_facts(plan: NodePlan, cpu: NodeCpu | None) -> dict[str, object]:
    """BE work's budget and reason, and CPU use by class (None: unknown). Thousandths of a CPU."""
    pools, used = plan.pools, None
    if cpu is not None:
        used = {
            "busy_milli": cpu.busy_milli,
            "online_milli": cpu.online_milli,
            "reclaimed_milli": cpu.reclaimed_milli,
            "system_milli": cpu.system_milli,
            "host_be_milli": cpu.host_be_milli,
        }
    return {
        "budget_milli": pools.budget_milli,
        "quota_milli": dict(pools.quota_milli or {}),
        "reasons": {**pools.reasons, **plan.reasons},
        "used": used,
    }


def resource_facts(plan: NodePlan, cache: CachePlan | None) -> dict[str, object]:
    """Everything that is planned for the node besides its CPUs; None: not managed.

    ``cache``: the groups that follow from the shares and from what resctrl offers; None: that is not known.
    """
    cookies = plan.cookies
    return {
        "memory": to_builtins(plan.memory),
        "disk": to_builtins(plan.disk),
        "network": to_builtins(plan.network),
        "cache": None if plan.cache is None else {**to_builtins(plan.cache), **_group_facts(cache)},
        "cookies": None
        if cookies is None
        else {
            "dry_run": cookies.dry_run,
            "groups": {path: member.group for path, member in sorted(cookies.members.items())},
        },
        "oom_scores": _value_facts(plan.oom_scores, "scores", int),
        "idle_threads": _value_facts(plan.idle_threads, "policies", policy_text),
        "files": {
            name: {
                "value": None if target.setting is None else target.setting.value,
                "policy": None if target.setting is None else target.setting.policy,
                "most_rise": target.most_rise,
                "only_raise": target.only_raise,
                "dry_run": target.dry_run,
            }
            for name, target in sorted(plan.files.items())
        },
        "interrupts": None
        if (places := plan.interrupts) is None
        else {"dry_run": places.dry_run, "avoid": str(places.avoid), "free": str(places.free)},
        "daemons": dict(sorted(plan.daemons.items())),
        "capacity": None
        if plan.capacity is None
        else {
            "dry_run": plan.capacity.dry_run,
            "file": plan.capacity.file,
            "pods": {uid: to_builtins(pod) for uid, pod in sorted(plan.capacity.pods.items())},
        },
        "starts": {
            "even": plan.starts.even,
            "pods": sorted(plan.starts.pods),
            "raised": sorted(plan.starts.raised),
            "floor_milli": plan.starts.floor_milli,
            "spent_s": round(plan.starts.spent_s, 3),
        },
        "reasons": dict(plan.reasons),
    }


def _value_facts(part: ProcessValuePlan | None, items: str, shown: Callable[[int], object]) -> dict[str, object] | None:
    if part is None:
        return None
    values = {path: setting.value for path, setting in sorted(part.settings.items())}
    return {
        "dry_run": part.dry_run,
        items: {path: shown(value) for path, value in values.items() if isinstance(value, int)},
    }


def _group_facts(cache: CachePlan | None) -> dict[str, object]:
    if cache is None:
        return {"groups": None, "members": {}, "problems": []}
    return {
        "groups": {
            group.name: {"schemata": lines_of(format_schemata(group.schemata)), "reason": group.reason}
            for group in cache.groups
        },
        # The default group's name is empty.
        "members": {uid: group for uid, group in sorted(cache.members.items()) if group},
        "problems": list(cache.problems),
    }
