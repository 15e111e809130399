"""A policy in dry run shows its settings; what the others write, and what is done by the plan, is as without it."""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.placement.claims import cpu_claims
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.capacity import ANNOTATION, CapacityConfig
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.normalise import NormaliseConfig
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.shared import ConfineMode, SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.measures import Restrictions, SqueezeLimit
from state.memory import NodeMemoryReading
from state.model import NodeView, PodClass, Resources, RuntimeSpec
from state.plan import Desired
from tests.reconciler.nodes import V1, V2, container, node, online, pod

CONFIG = PoliciesConfig(
    reserve=ReserveConfig(count=2),
    normalise=NormaliseConfig(ratio=2.0),
    be_memory=BeMemoryConfig(enabled=True),
    cache=CachePolicyConfig(enabled=True),
    capacity=CapacityConfig(enabled=True),
)
GIGA = 1 << 30


def scene(**more: Any) -> NodeView:
    sizes = Resources(batch_cpu_milli=500, batch_memory_bytes=GIGA)
    work = pod("be", container("main", requests=sizes, limits=sizes))
    return node(
        replace(work, annotations={ANNOTATION: "volume:state"}),
        online("web"),
        pod("db", cls=PodClass.SHARED, qos=QosClass.GUARANTEED),
        versions=V2,
        measures=Restrictions(
            budget_milli=900,
            budget_reason="ns/web suffers",
            squeezed={"be": SqueezeLimit(cpu_milli=300, reason="for ns/web")},
            cache_percent=50,
            cache_reason="ns/web suffers",
        ),
        reclaimed_ceiling_milli=600,
        reclaimed_memory_bytes=4 * GIGA,
        node_memory=NodeMemoryReading(total_bytes=64 * GIGA, available_bytes=60 * GIGA),
        **more,
    )


def done(desired: Desired, but: str) -> tuple[object, ...]:
    """The other policies' settings, and the parts of the plan that others follow."""
    pools, memory = desired.plan.pools, desired.plan.memory
    settings = {key: item.value for key, item in desired.settings.items() if item.policy != but}
    files = (
        {uid: replace(item, reason="") for uid, item in capacity.pods.items()}
        if (capacity := desired.plan.capacity) is not None
        else {}
    )
    return (
        settings,
        pools.reserved,
        pools.budget_milli,
        pools.reclaimed,
        memory.reclaimed_high_bytes,
        desired.plan.cache,
        files,
    )


@pytest.mark.parametrize("name", ["reserve", "normalise", "idle_buffer", "responses", "be_memory", "batch"])
def test_a_dry_run_changes_nothing_that_others_write(name: str) -> None:
    section = getattr(CONFIG, name)
    off = plan(scene(), None, replace(CONFIG, **{name: replace(section, enabled=False)}))
    shown = plan(scene(), None, replace(CONFIG, **{name: replace(section, dry_run=True)}))
    assert done(shown, name) == done(off, name)
    assert done(shown, name) != done(plan(scene(), None, CONFIG), name)


def test_cpus_that_a_pod_only_would_own_change_nothing_else() -> None:
    """Without its quota such a pod would use the CPUs of all others."""
    limited = RuntimeSpec(shares=2048, quota_us=200_000, period_us=100_000)
    sizes = Resources(cpu_milli=2000)
    db = pod("db", container("main", spec=limited, requests=sizes), cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED)
    view = node(db, pod("be"), online("web"), versions=V2)
    path = f"{db.group.path}/id-main"
    assert plan(view, None, PoliciesConfig()).settings[path, "cpu.quota"].policy == "pinned"
    off = plan(view, None, PoliciesConfig(exclusive=ExclusiveConfig(enabled=False)))
    before = None
    for _ in range(2):
        shown = plan(view, before, PoliciesConfig(exclusive=ExclusiveConfig(dry_run=True)))
        assert done(shown, "exclusive") == done(off, "exclusive")
        assert len(shown.settings[path, "cpu.set"].value) == 2  # type: ignore[arg-type]  # a CPU set
        assert shown.plan.pools.dedicated == {}
        assert shown.plan.pools.reasons["dedicated/db/main"].startswith("dry run: ")
        assert not any(claim.cut for claim in cpu_claims(view, shown.plan.pools))
        before = shown.plan


def test_a_quota_that_is_only_shown_replaces_no_limit_of_batch() -> None:
    sizes = Resources(batch_cpu_milli=4000)
    work = pod("be", container("main", requests=sizes, limits=sizes))
    view = node(work, online("web"), versions=V1, reclaimed_ceiling_milli=600)
    path = f"{work.group.path}/id-main"
    assert plan(view, None, PoliciesConfig()).settings[path, "cpu.quota"].value is None
    before = None
    for _ in range(2):
        shown = plan(view, before, PoliciesConfig(reclaimed=ReclaimedConfig(dry_run=True)))
        assert shown.settings[path, "cpu.quota"].value == 400_000
        assert shown.settings["/kubepods/besteffort", "cpu.quota"].policy == "reclaimed"
        before = shown.plan


def test_online_pods_that_only_seem_confined_keep_their_room() -> None:
    """BE work may fill CPUs of its own; these are not, as online pods still run everywhere."""
    separate = SharedConfig(mode=SharedPoolMode.SEPARATE, confine=ConfineMode.ALWAYS)
    view = scene()
    assert plan(view, None, PoliciesConfig(shared=separate)).plan.pools.separate
    shown = plan(view, None, PoliciesConfig(shared=replace(separate, dry_run=True)))
    assert not shown.plan.pools.separate
    assert [item for item in shown.settings.values() if item.policy == "shared"]
