"""Rows of the store of what an earlier run decided: the plan in the form of older versions, which is read as well."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from reconciler.control.persistence import (
    POD,
    POOLS,
    convert_plan,
    decode_plan,
    encoded,
    plan_row,
    read_classes,
    read_plan,
)
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
from state.model import LastClass, PodClass
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


def stored(directory: Path, rows: dict[str, bytes]) -> Store:
    store = Store(str(directory / "state.db"), boot="boot-1")
    batch = StoreBatch()
    for key, body in rows.items():
        batch.put(ASSIGNMENTS, key, body)
    store.apply(batch)
    return store


def test_a_plan_is_read_as_it_was_written_less_what_is_planned_anew(tmp_path: Path) -> None:
    plan = planned()
    with closing(stored(tmp_path, {POOLS: plan_row(plan)})) as store:
        back = read_plan(store)
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


LAST = LastClass(pod_class=PodClass.RECLAIMED, source="label x=BE")


@pytest.mark.parametrize(
    ("row", "last"),
    [
        (
            {
                "class": "shared",
                "class_source": "override: a",
                "last_class": "reclaimed",
                "last_class_source": LAST.source,
            },
            LAST,
        ),
        ({"class": "shared", "class_source": "kubernetes QoS", "class_certain": False, "last_class": None}, None),
        # Of the version before.
        ({"class": "reclaimed", "class_source": LAST.source}, LAST),
        ({"class": "shared", "class_source": "kubernetes QoS: Burstable"}, None),
        ({"class": "fast", "class_source": "x"}, None),
        ({"class_source": 5}, None),
    ],
)
def test_the_last_class_of_a_row(tmp_path: Path, row: dict[str, object], last: LastClass | None) -> None:
    with closing(stored(tmp_path, {f"{POD}u": encoded(row), f"{POD}broken": b"\xc1"})) as store:
        assert read_classes(store) == ({} if last is None else {"u": last})
