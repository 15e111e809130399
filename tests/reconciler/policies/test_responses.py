"""What the ladder requests becomes settings of BE pods, and of no other."""

import pytest
from msgspec.structs import replace

from cgroupfs.codecs import DeviceLimits
from reconciler.control.planner import plan
from reconciler.policies.cache import CachePolicyConfig, reduced
from reconciler.policies.responses import ResponsesConfig
from reconciler.policies.table import PoliciesConfig
from state.measures import Restrictions, SqueezeLimit
from state.model import NodeView, Pod, Resources, RuntimeSpec
from state.plan import Desired
from tests.reconciler.nodes import MAINLINE, V1, V2, container, node, online, pod

ALL_V1 = V1 | {"blkio": 1, "freezer": 1}
ALL_V2 = V2 | {"io": 2, "freezer": 2}
BE = "/kubepods/besteffort/podbe"
YIELDS = (BE, "cpu.weight")
"""With a quota goes the least weight."""


def wanted(view: NodeView, measures: Restrictions) -> dict[tuple[str, str], object]:
    desired = planned(view, measures)
    assert not [refusal for refusal in desired.refusals if refusal.setting.policy == "responses"]
    return {key: setting.value for key, setting in desired.settings.items() if setting.policy == "responses"}


def planned(view: NodeView, measures: Restrictions) -> Desired:
    return plan(replace(view, measures=measures), None, PoliciesConfig())


def test_without_measures_nothing_is_asked_for() -> None:
    assert wanted(node(pod("be"), online("web"), versions=ALL_V1), Restrictions()) == {}


def test_a_held_budget_is_a_ceiling_and_says_why() -> None:
    view = node(pod("be"), online("web"))
    free = planned(view, Restrictions()).plan.pools.budget_milli
    held = planned(view, Restrictions(budget_milli=700, budget_reason="ns/web suffers")).plan.pools
    assert held.budget_milli <= 700 < free
    assert held.reasons["responses"] == "BE budget limited to 0.70 CPU: ns/web suffers"
    assert planned(view, Restrictions(budget_milli=10**6)).plan.pools.budget_milli == free, "it never raises anything"


@pytest.mark.parametrize("versions", [ALL_V1, ALL_V2], ids=["v1", "v2"])
def test_a_squeezed_pod_of_one_container_has_its_quota_there(versions: dict[str, int]) -> None:
    squeeze = Restrictions(squeezed={"be": SqueezeLimit(cpu_milli=250, reason="for ns/web")})
    fields = wanted(node(pod("be"), online("web"), versions=versions), squeeze)
    assert fields == {(f"{BE}/id-main", "cpu.quota"): 25_000, YIELDS: 2}


def test_several_containers_without_quotas_of_their_own_share_the_pods() -> None:
    two = pod("be", container("a"), container("b"))
    assert wanted(node(two, versions=ALL_V1), Restrictions(squeezed={"be": SqueezeLimit(cpu_milli=250)})) == {
        (BE, "cpu.quota"): 25_000,
        YIELDS: 2,
    }


def test_containers_that_the_runtime_gives_quotas_are_bounded_each_by_what_they_asked_for() -> None:
    def asks(name: str, milli: int) -> Pod:
        spec = RuntimeSpec(shares=2, quota_us=50_000, period_us=100_000)
        return pod(
            "be",
            container(name, spec=spec, requests=Resources(batch_cpu_milli=milli)),
            container("small", spec=spec, requests=Resources(batch_cpu_milli=100)),
        )

    fields = wanted(
        node(asks("big", 300), versions=ALL_V1),
        Restrictions(squeezed={"be": SqueezeLimit(cpu_milli=200)}),
    )
    assert fields == {(f"{BE}/id-big", "cpu.quota"): 15_000, (f"{BE}/id-small", "cpu.quota"): 5_000, YIELDS: 2}


def test_a_weight_that_it_has_asked_for_waits_until_it_is_squeezed_no_more() -> None:
    asks = pod("be", container("main", requests=Resources(batch_cpu_milli=4000)))
    view = node(asks, versions=ALL_V1)
    squeezed = planned(view, Restrictions(squeezed={"be": SqueezeLimit(cpu_milli=250)})).settings[YIELDS]
    assert (squeezed.value, squeezed.policy) == (2, "responses")
    free = planned(view, Restrictions()).settings[YIELDS]
    assert (free.value, free.policy) == (4096, "batch")


def test_a_quota_is_never_below_what_the_kernel_takes() -> None:
    fields = wanted(node(pod("be"), versions=ALL_V1), Restrictions(squeezed={"be": SqueezeLimit(cpu_milli=1)}))
    assert fields == {(f"{BE}/id-main", "cpu.quota"): 1_000, YIELDS: 2}


def test_memory_is_squeezed_where_the_kernel_has_a_bound_that_does_not_kill() -> None:
    squeeze = Restrictions(squeezed={"be": SqueezeLimit(memory_high_bytes=64 << 20)})
    assert wanted(node(pod("be"), versions=ALL_V2), squeeze) == {(BE, "memory.high"): 64 << 20}
    assert wanted(node(pod("be"), versions=ALL_V1, knobs=MAINLINE - {"memory.high"}), squeeze) == {}


def test_disks_are_squeezed_where_a_limit_binds() -> None:
    squeeze = Restrictions(squeezed={"be": SqueezeLimit(disk_bps=2_000_000, disks=("8:0", "254:0"))})
    two = pod("be", container("a"), container("b"))
    both = {"8:0": {"rbps": 2_000_000, "wbps": 2_000_000}, "254:0": {"rbps": 2_000_000, "wbps": 2_000_000}}
    assert wanted(node(two, versions=ALL_V2), squeeze) == {(BE, "io.max"): DeviceLimits(both)}
    half = {"8:0": 1_000_000, "254:0": 1_000_000}
    assert wanted(node(two, versions=ALL_V1), squeeze) == {
        (f"{BE}/id-{name}", f"blkio.{way}_bps"): DeviceLimits(
            {disk: {f"{way[0]}bps": bps} for disk, bps in half.items()}
        )
        for name in ("a", "b")
        for way in ("read", "write")
    }


@pytest.mark.parametrize("versions", [ALL_V1, ALL_V2], ids=["v1", "v2"])
@pytest.mark.parametrize("runtime", ["gVisor", "kata"])
def test_a_pod_in_a_machine_of_its_own_is_squeezed_at_its_directory(runtime: str, versions: dict[str, int]) -> None:
    """Where its processes are: no group below has any, and in kata there is none."""
    one = replace(pod("be"), sandbox=runtime)
    one = one if runtime == "gVisor" else replace(one, containers=())
    squeeze = SqueezeLimit(cpu_milli=250, disk_bps=2_000_000, disks=("8:0",))
    fields = wanted(node(one, versions=versions), Restrictions(squeezed={"be": squeeze}))
    disk: dict[tuple[str, str], object] = {
        (BE, "blkio.read_bps"): DeviceLimits({"8:0": {"rbps": 2_000_000}}),
        (BE, "blkio.write_bps"): DeviceLimits({"8:0": {"wbps": 2_000_000}}),
    }
    if versions is ALL_V2:
        disk = {(BE, "io.max"): DeviceLimits({"8:0": {"rbps": 2_000_000, "wbps": 2_000_000}})}
    assert fields == {(BE, "cpu.quota"): 25_000, YIELDS: 2, **disk}


@pytest.mark.parametrize("versions", [ALL_V1, ALL_V2], ids=["v1", "v2"])
def test_a_frozen_pod_is_frozen_as_a_whole(versions: dict[str, int]) -> None:
    fields = wanted(node(pod("be"), versions=versions), Restrictions(frozen={"be": "for ns/web, at most 30 s"}))
    assert fields == {(BE, "freeze"): 1}


def test_an_online_pod_is_left_alone_whatever_is_asked() -> None:
    everything = Restrictions(
        squeezed={"web": SqueezeLimit(cpu_milli=10, memory_high_bytes=1 << 20, disk_bps=1, disks=("8:0",))},
        frozen={"web": "a mistake"},
    )
    assert wanted(node(online("web"), versions=ALL_V1), everything) == {}


def test_switched_off_responses_reach_nobody() -> None:
    view = replace(node(pod("be"), versions=ALL_V1), measures=Restrictions(frozen={"be": "x"}, budget_milli=1))
    desired = plan(view, None, PoliciesConfig(responses=ResponsesConfig(enabled=False)))
    assert not [setting for setting in desired.settings.values() if setting.policy == "responses"]
    assert desired.plan.pools.budget_milli > 1


def test_partitioning_leaves_be_a_part_of_its_share_of_the_caches_in_every_mode() -> None:
    on = PoliciesConfig(cache=CachePolicyConfig(enabled=True))
    view = replace(node(pod("be")), measures=Restrictions(cache_percent=50, cache_reason="ns/web suffers (cache)"))
    node_plan = plan(view, None, on).plan
    assert node_plan.cache is not None
    assert (node_plan.cache.reclaimed.cat_range_end_percent, node_plan.cache.reclaimed.mba_percent) == (15, 50)
    assert (node_plan.cache.levels.low_cache_percent, node_plan.cache.levels.high_mba_percent) == (10, 25)
    assert node_plan.reasons["cache"].endswith("reduced to 50 % of it: ns/web suffers (cache)")
    whole = plan(node(pod("be")), None, on).plan.cache
    assert whole is not None
    assert whole.reclaimed.cat_range_end_percent == 30
    assert reduced(whole, 1).reclaimed.cat_range_end_percent == 1, "never an empty range"
