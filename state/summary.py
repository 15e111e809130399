"""What is known and planned, as plain values for people: one wording for the document, the plan and the store. Pure."""

from state.model import NodeCpu, Pod, Pools
from state.plan import NodePlan


def pod_facts(pod: Pod, pools: Pools | None) -> dict[str, object]:
    """A pod for people: names, class, where the class came from, and the pool it runs in."""
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
        "meta_source": pod.meta_source,
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
    """What BE work may use and why, and who used the CPUs (None: not known). Thousandths of a CPU."""
    pools, used = plan.pools, None
    if cpu is not None:
        used = {
            "busy_milli": cpu.busy_milli,
            "online_milli": cpu.online_milli,
            "reclaimed_milli": cpu.reclaimed_milli,
            "system_milli": cpu.system_milli,
        }
    return {
        "budget_milli": pools.budget_milli,
        "quota_milli": dict(pools.quota_milli or {}),
        "reasons": {**pools.reasons, **plan.reasons},
        "used": used,
    }
