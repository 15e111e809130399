import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.batch import BatchConfig
from reconciler.policies.memory_qos import (
    ClassMemory,
    MemoryAmounts,
    MemoryQosConfig,
    OnlineMemory,
    ReclaimedMemory,
    amounts,
)
from reconciler.policies.table import PoliciesConfig
from state.memory import MemoryPreferences, NodeMemoryReading
from state.model import Container, ContainerKind, PodClass, Resources
from state.plan import Desired
from tests.reconciler.nodes import MAINLINE, V1, V2, container, node, pod

MEGA = 1 << 20
GIGA = 1 << 30
ON = PoliciesConfig(memory_qos=MemoryQosConfig(enabled=True))
MEMORY = NodeMemoryReading(total_bytes=64 * GIGA, available_bytes=60 * GIGA)


def sized(request: int | None, limit: int | None, name: str = "main", *, batch: bool = False) -> Container:
    field = "batch_memory_bytes" if batch else "memory_bytes"
    empty = Resources()
    return container(name, requests=replace(empty, **{field: request}), limits=replace(empty, **{field: limit}))


def of(desired: Desired, path: str) -> dict[str, object]:
    return {
        setting.knob: setting.value
        for setting in desired.settings.values()
        if setting.path == path and setting.policy == "memory_qos"
    }


@pytest.mark.parametrize(
    ("request_", "limit", "percents", "expected"),
    [
        pytest.param(GIGA, 2 * GIGA, (0, 0, 0), MemoryAmounts(), id="all percentages 0"),
        pytest.param(
            GIGA, 2 * GIGA, (50, 100, 0), MemoryAmounts(min_bytes=GIGA // 2, low_bytes=GIGA), id="protections"
        ),
        pytest.param(
            GIGA, None, (60, 20, 0), MemoryAmounts(min_bytes=644243456, low_bytes=644243456), id="low up to min"
        ),
        pytest.param(GIGA, None, (60, 0, 0), MemoryAmounts(min_bytes=644243456), id="no low at all"),
        pytest.param(GIGA, 2 * GIGA, (0, 0, 50), MemoryAmounts(high_bytes=3 * GIGA // 2), id="half way to the limit"),
        pytest.param(0, 10000, (0, 0, 90), MemoryAmounts(high_bytes=8192), id="whole pages"),
        pytest.param(0, None, (0, 0, 50), MemoryAmounts(high_bytes=32 * GIGA), id="without a limit: the node's memory"),
        pytest.param(GIGA, GIGA, (0, 0, 50), MemoryAmounts(), id="no way between request and limit"),
        pytest.param(GIGA, 2 * GIGA, (0, 0, 100), MemoryAmounts(), id="at the limit it bounds nothing"),
        pytest.param(0, 4096, (0, 0, 50), MemoryAmounts(), id="less than a page"),
    ],
)
def test_the_formula(request_: int, limit: int | None, percents: tuple[int, int, int], expected: MemoryAmounts) -> None:
    of_class = ClassMemory(min_percent=percents[0], low_percent=percents[1], throttling_percent=percents[2])
    assert amounts(request_, limit, 64 * GIGA, of_class) == expected


@given(st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 40), *(st.integers(0, 100) for _ in range(3)))
def test_what_is_protected_is_asked_for_and_what_is_bounded_is_above_it(
    request: int, limit: int | None, lowest: int, low: int, throttling: int
) -> None:
    of_class = ClassMemory(min_percent=lowest, low_percent=low, throttling_percent=throttling)
    memory_amounts = amounts(request, limit, 1 << 40, of_class)
    assert memory_amounts.min_bytes <= request
    assert memory_amounts.low_bytes == 0 or memory_amounts.min_bytes <= memory_amounts.low_bytes <= request
    if memory_amounts.high_bytes is not None:
        assert memory_amounts.min_bytes <= memory_amounts.high_bytes < (1 << 40 if limit is None else limit)
        assert request - PAGE < memory_amounts.high_bytes
    assert not any(
        number % PAGE for number in (memory_amounts.min_bytes, memory_amounts.low_bytes, memory_amounts.high_bytes or 0)
    )


def test_online_requests_are_protected_all_the_way_up_and_be_is_throttled_near_its_limit() -> None:
    web = pod("web", sized(GIGA, None), sized(MEGA, None, "side"), cls=PodClass.SHARED, qos=QosClass.BURSTABLE)
    db = pod("db", sized(2 * GIGA, 2 * GIGA), cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED)
    be = pod("be", sized(GIGA, 2 * GIGA, batch=True))
    desired = plan(node(web, db, be, versions=V2, node_memory=MEMORY), None, ON)
    assert of(desired, f"{web.group.path}/id-main") == {"memory.low": GIGA}
    assert of(desired, web.group.path) == {"memory.low": GIGA + MEGA}
    assert of(desired, "/kubepods/burstable") == {"memory.low": GIGA + MEGA}
    assert of(desired, db.group.path) == {"memory.low": 2 * GIGA}
    assert of(desired, "/kubepods") == {"memory.low": 3 * GIGA + MEGA}
    assert of(desired, "/kubepods/besteffort") == of(desired, be.group.path) == {}
    assert of(desired, f"{be.group.path}/id-main") == {"memory.high": GIGA * 19 // 10 // PAGE * PAGE}
    assert not [refusal for refusal in desired.refusals if refusal.setting.policy == "memory_qos"]


def test_on_v1_there_are_soft_limits_and_nothing_else() -> None:
    web = pod("web", sized(GIGA, None), cls=PodClass.SHARED, qos=QosClass.BURSTABLE)
    be = pod("be", sized(GIGA, 2 * GIGA, batch=True))
    desired = plan(node(web, be, versions=V1, node_memory=MEMORY, knobs=frozenset({"memory.soft"})), None, ON)
    values = {setting.key: setting.value for setting in desired.settings.values() if setting.policy == "memory_qos"}
    assert values == {(f"{be.group.path}/id-main", "memory.soft"): GIGA * 19 // 10 // PAGE * PAGE}
    assert "cgroup v1 has no memory.low" in desired.plan.reasons["memory_qos"]


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        (MemoryPreferences(off=True), {}),
        (MemoryPreferences(low_percent=0), {}),
        (MemoryPreferences(min_percent=100), {"memory.min": GIGA, "memory.low": GIGA}),
        (MemoryPreferences(low_percent=0, throttling_percent=50), {"memory.high": 3 * GIGA // 2}),
        (MemoryPreferences(low_percent=0, oom_group=True), {"memory.oom_group": 1}),
    ],
)
def test_a_pods_own_percentages_go_before_its_classes(wish: MemoryPreferences, wanted: dict[str, int]) -> None:
    web = replace(pod("web", sized(GIGA, 2 * GIGA), cls=PodClass.SHARED, qos=QosClass.BURSTABLE), memory=wish)
    assert of(plan(node(web, versions=V2, node_memory=MEMORY), None, ON), f"{web.group.path}/id-main") == wanted


def test_the_pause_container_gets_nothing_and_an_unlimited_container_of_an_unknown_node_no_bound() -> None:
    be = pod("be", sized(GIGA, None), container("pause", kind=ContainerKind.SANDBOX))
    assert not [
        setting for setting in plan(node(be, versions=V2), None, ON).settings.values() if setting.policy == "memory_qos"
    ]


def test_without_directories_only_pods_and_containers_are_protected() -> None:
    config = PoliciesConfig(memory_qos=MemoryQosConfig(enabled=True, directories=False))
    web = pod("web", sized(GIGA, None), cls=PodClass.SHARED, qos=QosClass.BURSTABLE)
    desired = plan(node(web, versions=V2), None, config)
    assert of(desired, "/kubepods") == of(desired, "/kubepods/burstable") == {}
    assert of(desired, web.group.path) == {"memory.low": GIGA}


SWAP = NodeMemoryReading(total_bytes=64 * GIGA, available_bytes=60 * GIGA, swap_bytes=8 * GIGA)
BOUNDED = MemoryQosConfig(enabled=True, shared=OnlineMemory(swap_percent=0), reclaimed=ReclaimedMemory(swap_percent=50))


def swap(desired: Desired) -> dict[str, object]:
    return {item.path: item.value for item in desired.settings.values() if item.knob == "memory.swap"}


@pytest.mark.parametrize(
    ("versions", "online", "be", "unlimited"),
    [
        pytest.param(V2, 0, GIGA, 32 * GIGA, id="v2: swap alone, of the node's memory without a limit"),
        pytest.param(V1, 2 * GIGA, 3 * GIGA, None, id="v1: memory and swap together, nothing without a limit"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_swap_is_bounded_by_class(
    versions: dict[str, int], online: int, be: int, unlimited: int | None, batch: bool
) -> None:
    """Also where `batch` writes the memory limit, and would leave no swap beside it; v1 needs that limit."""
    web = pod("web", sized(GIGA, 2 * GIGA), cls=PodClass.SHARED, qos=QosClass.BURSTABLE)
    db = pod("db", sized(GIGA, 2 * GIGA), cls=PodClass.DEDICATED)
    work, free = pod("be", sized(GIGA, 2 * GIGA, batch=True)), pod("free", sized(None, None))
    config = PoliciesConfig(memory_qos=BOUNDED, batch=BatchConfig(enabled=batch))
    desired = plan(node(web, db, work, free, versions=versions, node_memory=SWAP), None, config)
    paths = {f"{web.group.path}/id-main": online, f"{work.group.path}/id-main": be}
    if versions is V1 and not batch:
        del paths[f"{work.group.path}/id-main"]
        assert "swap of 2 pods without a memory limit is not bounded on cgroup v1" in desired.plan.reasons["memory_qos"]
    assert swap(desired) == paths | ({f"{free.group.path}/id-main": unlimited} if unlimited else {})
    assert ("not bounded on cgroup v1, such as " in desired.plan.reasons["memory_qos"]) is (unlimited is None)


@pytest.mark.parametrize(
    ("config", "reading", "knobs"),
    [
        pytest.param(MemoryQosConfig(enabled=True), SWAP, MAINLINE, id="unless configured the runtime's stays"),
        pytest.param(BOUNDED, MEMORY, MAINLINE, id="a node without swap"),
        pytest.param(BOUNDED, SWAP, MAINLINE - {"memory.swap"}, id="a kernel that does not account it"),
        pytest.param(replace(BOUNDED, enabled=False), SWAP, MAINLINE, id="off"),
    ],
)
def test_where_swap_is_not_bounded_batch_leaves_none(
    config: MemoryQosConfig, reading: NodeMemoryReading, knobs: frozenset[str]
) -> None:
    work = replace(pod("be", sized(GIGA, 2 * GIGA, batch=True)), memory=MemoryPreferences(auto=True))
    view = node(work, versions=V2, node_memory=reading, knobs=knobs)
    expected = {f"{work.group.path}/id-main": 0} if "memory.swap" in knobs else {}
    assert swap(plan(view, None, PoliciesConfig(memory_qos=config))) == expected


@pytest.mark.parametrize(("versions", "value"), [(V2, GIGA), (V1, 3 * GIGA)])
def test_swap_of_a_pod_with_a_kernel_of_its_own_is_bounded_as_a_whole(versions: dict[str, int], value: int) -> None:
    boxes = sized(GIGA, GIGA, batch=True), sized(GIGA, GIGA, "side", batch=True)
    work = replace(pod("be", *boxes), sandbox="gVisor")
    desired = plan(node(work, versions=versions, node_memory=SWAP), None, PoliciesConfig(memory_qos=BOUNDED))
    assert swap(desired)[work.group.path] == value


@pytest.mark.parametrize("versions", [V1, V2])
@pytest.mark.parametrize("percent", [0, 50, 1000])
def test_a_dry_run_leaves_the_bound_of_batch_in_force(versions: dict[str, int], percent: int) -> None:
    """Else a container had its batch limit and no bound on swap."""
    work = pod("be", sized(GIGA, 2 * GIGA, batch=True))
    trial = replace(BOUNDED, dry_run=True, reclaimed=ReclaimedMemory(swap_percent=percent))
    desired = plan(node(work, versions=versions, node_memory=SWAP), None, PoliciesConfig(memory_qos=trial))
    setting = desired.settings[f"{work.group.path}/id-main", "memory.swap"]
    assert (setting.policy, setting.value) == ("batch", 2 * GIGA if versions is V1 else 0)


@pytest.mark.parametrize("limit", [65 * GIGA, 1 << 62])
def test_a_limit_above_the_nodes_memory_does_not_raise_the_bound(limit: int) -> None:
    work = pod("be", sized(GIGA, limit, batch=True))
    path = f"{work.group.path}/id-main"
    config = PoliciesConfig(memory_qos=BOUNDED)
    assert swap(plan(node(work, versions=V2, node_memory=SWAP), None, config))[path] == 32 * GIGA
    assert swap(plan(node(work, versions=V1, node_memory=SWAP), None, config))[path] == limit + 32 * GIGA


def test_the_reason_names_the_amount_of_which_it_is_a_share() -> None:
    free, work = pod("free", sized(None, None)), pod("be", sized(GIGA, 2 * GIGA))
    desired = plan(node(free, work, versions=V2, node_memory=SWAP), None, PoliciesConfig(memory_qos=BOUNDED))
    reasons = {item.path: item.reason for item in desired.settings.values() if item.knob == "memory.swap"}
    assert reasons == {
        f"{free.group.path}/id-main": "swap up to 50 % of the memory of the node",
        f"{work.group.path}/id-main": "swap up to 50 % of the memory limit",
    }


@pytest.mark.parametrize(
    ("wish", "config", "applied"),
    [
        pytest.param(MemoryPreferences(auto=True), MemoryQosConfig(), True, id="requested"),
        pytest.param(MemoryPreferences(auto=True, off=True), MemoryQosConfig(), False, id="refused"),
        pytest.param(MemoryPreferences(auto=True), MemoryQosConfig(pods=False), False, id="pods may not"),
        pytest.param(MemoryPreferences(low_percent=50), MemoryQosConfig(), False, id="numbers alone are no request"),
    ],
)
def test_a_pod_may_request_it_where_it_is_off_for_the_node(
    wish: MemoryPreferences, config: MemoryQosConfig, *, applied: bool
) -> None:
    mine = replace(pod("a", sized(GIGA, 2 * GIGA), cls=PodClass.SHARED, qos=QosClass.BURSTABLE), memory=wish)
    other = pod("b", sized(GIGA, 2 * GIGA), cls=PodClass.SHARED, qos=QosClass.BURSTABLE)
    desired = plan(node(mine, other, versions=V2, node_memory=MEMORY), None, PoliciesConfig(memory_qos=config))
    low = {path: of(desired, path).get("memory.low") for path in (mine.group.path, "/kubepods/burstable", "/kubepods")}
    assert set(low.values()) == ({GIGA} if applied else {None})
    assert of(desired, other.group.path) == {}
    assert desired.plan.reasons["memory_qos"].startswith("off, except for 1 pod" if applied else "off")


@pytest.mark.parametrize("mid", [False, True])
def test_overcommitted_memory_is_not_protected_by_the_pods_own_word(*, mid: bool) -> None:
    own = MemoryPreferences(auto=True, min_percent=100, low_percent=100, throttling_percent=50)
    sizes = Resources(batch_memory_bytes=GIGA, mid=mid)
    item = pod(
        "a",
        container("main", requests=sizes, limits=replace(sizes, batch_memory_bytes=2 * GIGA)),
        cls=PodClass.SHARED if mid else PodClass.RECLAIMED,
    )
    item = replace(item, memory=own)
    desired = plan(node(item, versions=V2, node_memory=MEMORY), None, PoliciesConfig())
    protected = {"memory.low": GIGA} if mid else {}  # the class's percentage counts for a mid-tier pod
    assert of(desired, f"{item.group.path}/id-main") == {**protected, "memory.high": 3 * GIGA // 2}
    assert of(desired, item.group.path) == of(desired, "/kubepods") == protected
    by_class = MemoryQosConfig(reclaimed=ReclaimedMemory(min_percent=50), shared=OnlineMemory(min_percent=50))
    desired = plan(node(item, versions=V2, node_memory=MEMORY), None, PoliciesConfig(memory_qos=by_class))
    assert of(desired, "/kubepods")["memory.min"] == GIGA // 2


def test_an_online_pods_mid_tier_memory_is_its_request_and_limit() -> None:
    both = Resources(batch_memory_bytes=GIGA, mid=True)
    item = pod("a", container("main", requests=both, limits=both), cls=PodClass.SHARED)
    desired = plan(node(item, versions=V2, node_memory=MEMORY), None, ON)
    assert of(desired, item.containers[0].group.path)["memory.low"] == GIGA
