"""A plan is the same whether what follows from the pods alone was computed now or when they last changed."""

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_node
from reconciler.policies.table import PoliciesConfig
from state.model import Classification, NodeView, Pod, PodClass
from state.pod_index import FixedTable
from tests.bench.planning import CONFIG, SEPARATE, machine, node


def changed(view: NodeView, step: int) -> dict[str, Pod]:
    """The pods after one change: one ends, starts again, is of another class or place, or is being deleted."""
    pods = dict(view.pods)
    uid = sorted(pods)[step * 7 % len(pods)]
    pod = pods[uid]
    if step % 5 == 0:
        del pods[uid]
    elif step % 5 == 1:
        pods[uid] = replace(pod, deleting=True)
    elif step % 5 == 2:
        pods[uid] = replace(pod, qos=QosClass.BESTEFFORT)
    elif step % 5 == 3:
        pods[uid] = replace(pod, classification=Classification(pod_class=PodClass.DEDICATED, source="test"))
    else:
        pods[uid] = replace(pod, wish=replace(pod.wish, pool="other", numa_share=False))
    return pods


@pytest.mark.parametrize("config", [CONFIG, SEPARATE], ids=["shared", "pools of their own"])
def test_plans_by_a_kept_table_equal_plans_by_a_fresh_one(config: PoliciesConfig) -> None:
    view, table = node(machine(16), 24), FixedTable[str, Pod]({})
    plain, kept = plan_node(view, None, config), plan_node(replace(view, pods=FixedTable(view.pods)), None, config)
    for step in range(30):
        pods = changed(view, step)
        table = FixedTable(pods, table)
        for _ in range(3):
            view = replace(view, pods=pods, now=view.now + 1.0)
            wanted, got = plan(view, plain, config), plan(replace(view, pods=table), kept, config)
            assert got == wanted
            plain, kept = wanted.plan, got.plan
