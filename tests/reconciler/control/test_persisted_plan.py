"""The row of the store that has the last plan: its form is that of older versions, which is read as well."""

from pathlib import Path

import msgspec

from reconciler.control.persistence import POOLS, convert_plan, decode_plan, plan_row, read_plan
from reconciler.control.planner import plan_node
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.core_sched import CoreSchedConfig
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.network import InterfaceRule, NetworkConfig
from reconciler.policies.oom_score import OomScoreConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.watermarks import WatermarksConfig
from state.cache import CacheRequest, ClassShare
from state.network import InterfaceRequest, NetworkRequest
from state.plan import NodePlan
from state.schema import ASSIGNMENTS
from state.store import Store, StoreBatch
from tests.reconciler.nodes import cpus, node, online, pod

OLD_ROW = Path(__file__).parents[2] / "fixtures" / "pools_row.msgpack"
"""As the version before `NodePlan` wrote it, with every resource switched on."""
GIGA = 1 << 30
ON = PoliciesConfig(
    be_memory=BeMemoryConfig(enabled=True),
    network=NetworkConfig(enabled=True, interfaces=(InterfaceRule(name="eth0", link_mbit=1000),)),
    cache=CachePolicyConfig(enabled=True),
    core_sched=CoreSchedConfig(enabled=True),
    oom_score=OomScoreConfig(enabled=True),
    idle_class=IdleClassConfig(enabled=True, threads=True),
    watermarks=WatermarksConfig(enabled=True),
)


def planned() -> NodePlan:
    return plan_node(node(pod("be"), online("web"), reclaimed_memory_bytes=50 * GIGA), None, ON)


def test_an_older_versions_row_is_read_with_all_that_the_next_plan_starts_from() -> None:
    plan = decode_plan(OLD_ROW.read_bytes())
    assert (plan.pools.shared, plan.pools.reclaimed, plan.pools.budget_milli) == (cpus("0-7"), cpus("1-3,5-7"), 5120)
    assert plan.memory.reclaimed_high_bytes == 50 * GIGA
    assert plan.memory.reclaim is not None
    assert plan.network == NetworkRequest(
        interfaces=(InterfaceRequest(name="eth0", link_mbit=1000),), classes=False, pods_by="eth0"
    )
    assert plan.cache == CacheRequest(reclaimed=ClassShare(cat_range_end_percent=30))


def test_a_row_has_every_key_that_an_older_version_wrote_but_the_requests_by_pod() -> None:
    old = msgspec.msgpack.decode(OLD_ROW.read_bytes())
    new = msgspec.msgpack.decode(plan_row(planned()))
    assert old.keys() - new.keys() == {"cores"}
    assert new.keys() <= old.keys()
    assert set(new["reasons"]) == {*old["reasons"], "capacity", "interrupts", "law", "node_daemons"}


def test_a_plan_is_read_as_it_was_written_less_what_is_planned_anew(tmp_path: Path) -> None:
    plan = planned()
    store = Store(str(tmp_path / "state.db"), boot="boot-1")
    batch = StoreBatch()
    batch.put(ASSIGNMENTS, POOLS, plan_row(plan))
    store.apply(batch)
    back = read_plan(store)
    store.close()
    assert back is not None
    assert (back.memory, back.disk, back.network) == (plan.memory, plan.disk, plan.network)
    assert msgspec.to_builtins(back.cache) == msgspec.to_builtins(plan.cache)
    assert plan.idle_threads is not None
    assert (back.cookies, back.oom_scores, back.idle_threads, back.files) == (None, None, None, {})
    assert (back.pools.shared, back.pools.reclaimed) == (plan.pools.shared, plan.pools.reclaimed)
    assert convert_plan(msgspec.msgpack.decode(plan_row(plan))) == back


def test_the_bound_of_be_memory_is_kept_over_a_restart() -> None:
    before = decode_plan(OLD_ROW.read_bytes())
    assert plan_node(node(pod("be")), before, ON).memory.reclaimed_high_bytes == 50 * GIGA
