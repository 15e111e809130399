import pytest
from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, order_changes
from reconciler.control.planner import plan, plan_node, plan_pod
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.numa_memory import NumaMemoryPolicyConfig, nodes_with_memory
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences
from state.machine import parse
from state.model import Phase, Pod, PodClass, Resources, RuntimeSpec, Setting
from tests.reconciler.nodes import NONE, container, cpus, kubelet, node, pod

ON = PoliciesConfig(numa_memory=NumaMemoryPolicyConfig(enabled=True), exclusive=ExclusiveConfig())
TWO = parse("2 sockets x 4 cores x 2 threads")
ASKED = Resources(cpu_milli=4000)


def dedicated(wish: CpuPreferences, spec: RuntimeSpec | None = None) -> Pod:
    main = container("main", requests=ASKED, limits=ASKED, spec=spec)
    return replace(pod("db", main, cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED), wish=wish)


def mems(item: Pod, **more: object) -> list[Setting]:
    view = node(item, topology=TWO, **{"kubelet": NONE, **more})
    return [setting for setting in plan(view, None, ON).settings.values() if setting.knob == "cpu.mems"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_bound_dedicated_container_takes_memory_where_its_cpus_are(number: int) -> None:
    item = dedicated(CpuPreferences(numa_binding=True, nodes=(number,)))
    (setting,) = mems(item)
    assert (setting.path, str(setting.value)) == (f"{item.group.path}/id-main", str(number))


@pytest.mark.parametrize(
    ("one", "more"),
    [
        pytest.param(dedicated(CpuPreferences()), {}, id="not bound"),
        pytest.param(
            dedicated(CpuPreferences(numa_binding=True, nodes=(1,)), RuntimeSpec(mems="1")), {}, id="the kubelet's spec"
        ),
        pytest.param(
            dedicated(CpuPreferences(numa_binding=True, nodes=(1,))),
            {"kubelet": replace(NONE, affinity={"db/main": {"memory": cpus("1")}})},
            id="the kubelet's memory manager",
        ),
        pytest.param(
            dedicated(CpuPreferences(numa_binding=True)),
            {"kubelet": kubelet(default="0-7", exclusive={"db/main": "8-11"})},
            id="the kubelet's own CPUs",
        ),
        pytest.param(pod("web", cls=PodClass.SHARED, qos=QosClass.BURSTABLE), {}, id="an ordinary online pod"),
    ],
)
def test_everybody_else_is_left_alone(one: Pod, more: dict[str, object]) -> None:
    assert mems(one, **more) == []


def test_devices_of_a_node_are_no_choice_of_memory() -> None:
    item = dedicated(CpuPreferences(numa_binding=True, nodes=(1,)))
    (setting,) = mems(item, kubelet=replace(NONE, affinity={"db/main": {"vendor/gpu": cpus("1")}}))
    assert str(setting.value) == "1"


def test_a_be_pod_that_asks_for_a_node_takes_its_memory_there() -> None:
    item = replace(pod("be"), wish=CpuPreferences(numa_binding=True, nodes=(1,)))
    (setting,) = mems(item)
    assert str(setting.value) == "1"


def test_an_online_pod_of_a_pool_on_one_node_does_so_too() -> None:
    item = pod("web", cls=PodClass.SHARED, qos=QosClass.BURSTABLE)
    view = node(item, topology=TWO)
    whole = plan_node(view, None, ON)
    bound = replace(whole, pools=replace(whole.pools, bound={"web": "shared/batch-NUMA1"}))
    settings, refusals = plan_pod(item, view, bound, ON)
    assert [str(setting.value) for setting in settings if setting.knob == "cpu.mems"] == ["1"]
    assert not refusals
    settings, _ = plan_pod(item, view, replace(whole, pools=replace(whole.pools, bound={"web": "shared/batch"})), ON)
    assert not [setting for setting in settings if setting.knob == "cpu.mems"]


def test_a_node_without_memory_means_the_nearest_that_has_some() -> None:
    machine = parse("2 sockets x 2 cores x 1 threads; memory nodes 1 of 1T")
    assert nodes_with_memory(cpus("0-1"), machine) == cpus("0-1")
    bare = replace(
        machine,
        numa=tuple(replace(numa_node, memory_bytes=0 if numa_node.id == 1 else 1 << 30) for numa_node in machine.numa),
    )
    assert nodes_with_memory(cpus("1"), bare) == cpus("0")


@pytest.mark.parametrize(
    ("have", "version", "slow"),
    [("0-1", 2, True), ("0-1", 1, False), ("", 2, True)],
    ids=["v2 moves pages", "v1 does not", "what it had is unknown"],
)
def test_moving_pages_is_never_done_in_the_loop(have: str, version: int, slow: bool) -> None:
    change = KnobChange(path="/kubepods/a", knob="cpu.mems", want=cpus("1"), have=cpus(have) if have else EMPTY)
    known = {("/kubepods", "cpu.mems"): cpus("0-1")}
    steps = order_changes([change], known, {"cpuset": version}).steps
    assert [step.slow for step in steps] == [slow]


def migrating(phase: Phase = Phase.SETTLED, version: int = 1, *, migrate: bool = True) -> dict[str, object]:
    """What is wanted of a bound container, by knob."""
    item = dedicated(CpuPreferences(numa_binding=True, nodes=(1,)))
    item = replace(item, containers=tuple(replace(box, phase=phase) for box in item.containers))
    on = replace(ON, numa_memory=NumaMemoryPolicyConfig(enabled=True, migrate=migrate))
    knobs = frozenset({"cpu.mems", "cpu.mems_migrate"} if version == 1 else {"cpu.mems"})
    view = node(item, topology=TWO, kubelet=NONE, versions={"cpuset": version, "cpu": version}, knobs=knobs)
    values_view = plan(view, None, on).settings.values()
    return {setting.knob: setting.value for setting in values_view if setting.knob.startswith("cpu.mems")}


def test_pages_of_running_containers_follow_where_that_is_asked_for_and_possible() -> None:
    both = {"cpu.mems": cpus("1"), "cpu.mems_migrate": 1}
    assert migrating() == both
    assert migrating(Phase.CREATING).keys() == {"cpu.mems"}
    assert migrating(migrate=False).keys() == {"cpu.mems"}
    assert migrating(version=2).keys() == {"cpu.mems"}


def moves(*changes: KnobChange, flag: int | None = None) -> list[tuple[str, str, bool]]:
    known: dict[tuple[str, str], Value] = {("/kubepods", "cpu.mems"): cpus("0-1")}
    if flag is not None:
        known["/kubepods/a", "cpu.mems_migrate"] = flag
    steps = order_changes(changes, known, {"cpuset": 1}).steps
    return [(step.path, step.file, step.slow) for step in steps]


def test_the_flag_is_written_before_the_nodes_and_makes_them_slow() -> None:
    nodes = KnobChange(path="/kubepods/a", knob="cpu.mems", want=cpus("1"), have=cpus("0-1"))
    flag = KnobChange(path="/kubepods/a", knob="cpu.mems_migrate", want=1, have=0)
    assert moves(nodes, flag) == [
        ("/kubepods/a", "cpuset.memory_migrate", False),
        ("/kubepods/a", "cpuset.mems", True),
    ]
    assert moves(nodes, flag=1) == [("/kubepods/a", "cpuset.mems", True)]
    assert moves(nodes, flag=0) == [("/kubepods/a", "cpuset.mems", False)]


def test_taking_both_back_moves_nothing() -> None:
    back = KnobChange(path="/kubepods/a", knob="cpu.mems", want=cpus("0"), have=cpus("1"))
    off = KnobChange(path="/kubepods/a", knob="cpu.mems_migrate", want=0, have=1)
    assert moves(back, off) == [
        ("/kubepods/a", "cpuset.memory_migrate", False),
        ("/kubepods/a", "cpuset.mems", False),
    ]


def test_what_comes_after_a_slow_step_in_the_tree_waits_for_it() -> None:
    child = KnobChange(path="/kubepods/a/b", knob="cpu.mems", want=cpus("1"), have=cpus("0-1"))
    above = KnobChange(path="/kubepods/a", knob="cpu.mems", want=cpus("1"), have=cpus("0-1"))
    flag = KnobChange(path="/kubepods/a/b", knob="cpu.mems_migrate", want=1, have=0)
    assert moves(above, child, flag) == [
        ("/kubepods/a/b", "cpuset.memory_migrate", False),
        ("/kubepods/a/b", "cpuset.mems", True),
        ("/kubepods/a", "cpuset.mems", True),
    ]
