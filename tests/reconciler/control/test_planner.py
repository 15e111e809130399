from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from reconciler.config.load import load
from reconciler.config.model import Protection
from reconciler.control.planner import plan, plan_node, plan_parents, plan_pod, plan_pools
from reconciler.policies.base import Policy
from reconciler.policies.batch import BatchConfig
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm, choose_cpus
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.table import POLICIES, PoliciesConfig
from state.memory import MemoryPlan
from state.model import (
    Container,
    ContainerKind,
    CpuPolicy,
    KubeletView,
    NodeView,
    Pod,
    PodClass,
    Pools,
    Resources,
    Setting,
)
from state.plan import Desired, NodePlan
from state.topology import Topology, uniform
from tests.cputime import least_cpu_s
from tests.examples import examples
from tests.reconciler.nodes import V1, V2, container, cpu, cpus, kubelet, node, online, pod

CONFIG = PoliciesConfig()


def dump(desired: Desired) -> bytes:
    """Every part of a plan, in its own order, as bytes."""
    return msgspec.json.encode(
        [desired.plan, list(desired.settings.items()), desired.refusals],
        enc_hook=str,
        order=None,
    )


# --- structure -----------------------------------------------------------------------------------------------------


def test_the_whole_plan_is_its_parts() -> None:
    view = node(pod("b"), pod("a"), online("c"))
    desired = plan(view, None, CONFIG)
    parts = [*plan_parents(view, desired.plan, CONFIG)[0]]
    for item in view.pods.values():
        parts += plan_pod(item, view, desired.plan, CONFIG)[0]
    assert list(desired.settings) == sorted(setting.key for setting in parts)
    assert set(desired.settings.values()) == set(parts)


@pytest.mark.parametrize("name", [policy.name for policy in POLICIES])
def test_a_policy_that_is_off_has_no_say(name: str) -> None:
    section = replace(getattr(CONFIG, name), enabled=False)
    desired = plan(node(pod("b"), pod("a"), online("c")), None, replace(CONFIG, **{name: section}))
    assert not [setting for setting in desired.settings.values() if setting.policy == name]
    policy = next(policy for policy in POLICIES if policy.name == name)
    assert desired.plan.pools.reasons.get(name) == ("off" if policy.decide_node is not None else None)
    assert desired.plan.reasons.get(name) == ("off" if policy.decide_resources is not None else None)


def test_a_policy_that_only_shows_plans_as_if_it_wrote() -> None:
    view = node(pod("b"), online("c"))
    shown = replace(CONFIG, reclaimed=replace(CONFIG.reclaimed, dry_run=True))
    desired = plan(view, None, shown)
    # The other policies see no quota that is not written.
    assert desired.plan.pools.quota_milli is None
    quotas = desired.plan.pools.trials["reclaimed"].quota_milli
    pools = replace(desired.plan.pools, quota_milli=quotas, trials={})
    assert replace(desired, plan=replace(desired.plan, pools=pools)) == plan(view, None, CONFIG)


def test_a_new_policy_needs_nothing_but_its_registration() -> None:
    def caps(pod: Pod, view: NodeView, plan: NodePlan, config: ReserveConfig) -> list[Setting]:
        return [
            Setting(path=item.group.path, knob="pids.max", value=100, policy="caps", reason="test", pod_uid=pod.uid)
            for item in pod.containers
        ]

    extra = Policy(name="reserve", summary="pids", config_type=ReserveConfig, precedence=99, pod=caps)
    desired = plan(node(online("a")), None, CONFIG, (*POLICIES, extra))
    assert desired.settings["/kubepods/burstable/poda/id-main", "pids.max"].value == 100


@pytest.mark.parametrize(
    ("knob", "mine", "theirs", "winner"),
    [
        ("cpu.weight", 100, 50, 100),
        ("cpu.quota", 9000, 5000, 5000),
        ("cpu.quota", None, 5000, 5000),
        ("cpu.quota", 9000, None, 9000),
        ("memory.max", 1 << 20, 1 << 21, 1 << 20),
    ],
)
def test_limits_go_to_the_tighter_wish_and_all_else_by_precedence(
    knob: str, mine: int | None, theirs: int | None, winner: int
) -> None:
    def wish(name: str, value: int | None) -> Policy[ReserveConfig]:
        def settings_of(pod: Pod, view: NodeView, plan: NodePlan, config: ReserveConfig) -> list[Setting]:
            return [Setting(path=pod.containers[0].group.path, knob=knob, value=value, policy=name, reason="test")]

        rank = {"mine": 1, "theirs": 2}[name]
        return Policy(name="reserve", summary=name, config_type=ReserveConfig, precedence=rank, pod=settings_of)

    view = node(online("a"))
    before = plan_node(view, None, CONFIG)
    for table in ((wish("mine", mine), wish("theirs", theirs)), (wish("theirs", theirs), wish("mine", mine))):
        (setting,), refusals = plan_pod(view.pods["a"], view, before, CONFIG, table)
        assert (setting.value, refusals) == (winner, ())


@pytest.mark.parametrize(("knob", "mine", "theirs"), [("cpu.weight", 100, 50), ("cpu.quota", 3000, 5000)])
def test_a_dry_run_takes_nothing_from_what_is_written(knob: str, mine: int, theirs: int) -> None:
    """It would not be written, and so the file would have neither value."""

    def wish(name: str, value: int) -> Policy[ReserveConfig]:
        def settings_of(pod: Pod, view: NodeView, plan: NodePlan, config: ReserveConfig) -> list[Setting]:
            return [Setting(path=pod.containers[0].group.path, knob=knob, value=value, policy=name, reason="test")]

        rank = {"reserve": 1, "shared": 2}[name]
        return Policy(name=name, summary=name, config_type=ReserveConfig, precedence=rank, pod=settings_of)

    view, config = node(online("a")), replace(CONFIG, reserve=ReserveConfig(dry_run=True))
    before = plan_node(view, None, CONFIG)
    tables = ((wish("reserve", mine), wish("shared", theirs)), (wish("shared", theirs), wish("reserve", mine)))
    for table in tables:
        assert plan_pod(view.pods["a"], view, before, config, table)[0][0].value == theirs
        assert plan_pod(view.pods["a"], view, before, CONFIG, table)[0][0].value == mine
    # Alone it is shown.
    assert plan_pod(view.pods["a"], view, before, config, tables[0][:1])[0][0].value == mine


def test_a_dry_run_of_batch_leaves_be_its_part_of_the_budget() -> None:
    limits = Resources(batch_cpu_milli=10)
    # An online pod in besteffort: the quota is that of the containers.
    pods = pod("b", container("main", requests=limits, limits=limits)), online("c", qos=QosClass.BESTEFFORT)
    path = pods[0].containers[0].group.path
    shown = PoliciesConfig(batch=BatchConfig(dry_run=True))
    assert plan(node(*pods), None, CONFIG).settings[path, "cpu.quota"].policy == "batch"
    for knob in ("cpu.quota", "cpu.weight"):
        assert plan(node(*pods), None, shown).settings[path, knob].policy == "reclaimed"


def test_refusals_are_sorted_and_their_settings_are_not_in_the_plan() -> None:
    view = node(pod("b"), pod("a"), versions={"cpu": 1})
    desired = plan(view, None, CONFIG)
    assert [(refusal.rule, refusal.setting.path) for refusal in desired.refusals] == [
        ("controller-missing", "/kubepods/besteffort/poda/id-main"),
        ("controller-missing", "/kubepods/besteffort/podb/id-main"),
    ]
    assert not {refusal.setting.key for refusal in desired.refusals} & set(desired.settings)


# --- properties ----------------------------------------------------------------------------------------------------

TOPOLOGIES: list[Topology] = [
    uniform(cores=2, threads=1),
    uniform(cores=4, threads=2),
    uniform(sockets=2, nodes=2, cores=8, threads=2),
]
quantities = st.builds(
    Resources, cpu_milli=st.none() | st.integers(0, 4000), batch_cpu_milli=st.none() | st.integers(0, 9000)
)
classes = st.sampled_from(list(PodClass))
levels = st.sampled_from(list(QosClass))


@st.composite
def containers(draw: st.DrawFn, name: str) -> Container:
    resources = draw(quantities)
    return container(name, kind=draw(st.sampled_from(list(ContainerKind))), requests=resources, limits=resources)


@st.composite
def pods(draw: st.DrawFn, uid: str) -> Pod:
    names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    return pod(uid, *(draw(containers(name)) for name in names), cls=draw(classes), qos=draw(levels))


@st.composite
def kubelets(draw: st.DrawFn, online_cpus: CpuSet) -> KubeletView:
    """A kubelet as it can be: exclusive CPUs disjoint, reserved ones never exclusive, the rest the default set."""
    policy = draw(st.sampled_from(list(CpuPolicy)))
    reserved = online_cpus.lowest(draw(st.integers(0, len(online_cpus) - 1)))
    exclusive: dict[str, str] = {}
    free = online_cpus - reserved
    if policy is CpuPolicy.STATIC:
        for uid in draw(st.lists(st.sampled_from("pqrs"), max_size=3, unique=True)):
            own = free.lowest(draw(st.integers(1, 3)))
            if own and free - own | reserved:
                exclusive[f"{uid}/a"] = str(own)
                free -= own
    default = str(free | reserved) if policy is CpuPolicy.STATIC else ""
    return kubelet(
        policy,
        default=default,
        exclusive=exclusive,
        reserved=str(reserved),
        held=draw(st.booleans()) and policy is not CpuPolicy.NONE,
        reasserts_s=draw(st.sampled_from([None, None, 10.0])) if policy is CpuPolicy.STATIC else None,
    )


uses = st.none() | st.builds(
    cpu,
    online=st.integers(0, 9000),
    reclaimed=st.integers(0, 9000),
    system=st.integers(0, 2000),
    age=st.none() | st.sampled_from([0.0, 2.0, 5.0, 100.0]),
)


@st.composite
def nodes(draw: st.DrawFn, topology: Topology | None = None, now: float = 1000.0) -> NodeView:
    shape = topology if topology is not None else draw(st.sampled_from(TOPOLOGIES))
    uids = draw(st.lists(st.sampled_from("pqrstu"), max_size=6, unique=True))
    return node(
        *(draw(pods(uid)) for uid in uids),
        topology=shape,
        kubelet=draw(kubelets(shape.online)),
        cpu=draw(uses),
        versions=draw(st.sampled_from([{"cpu": 1, "cpuset": 1, "memory": 1}, {"cpu": 2, "cpuset": 2, "memory": 2}])),
        reclaimed_ceiling_milli=draw(st.none() | st.integers(0, 9000)),
        now=now,
    )


configs = st.builds(
    PoliciesConfig,
    reclaimed=st.builds(
        ReclaimedConfig,
        form=st.sampled_from(list(ReclaimedForm)),
        budget=st.builds(BudgetConfig, limit_percent=st.integers(1, 100)),
        share_reserved=st.booleans(),
        besteffort_cpuset=st.booleans(),
    ),
)


@st.composite
def histories(draw: st.DrawFn) -> list[NodeView]:
    """One machine over time: pods start and end, the kubelet allocates, forgets and recovers, signals fail."""
    shape = draw(st.sampled_from(TOPOLOGIES))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.0, 60.0]), min_size=1, max_size=6))
    now, views = 1000.0, []
    for gap in gaps:
        now += gap
        views.append(draw(nodes(shape, now)))
    return views


def within_the_rules(view: NodeView, desired: Desired) -> None:
    """What holds for every plan, whatever preceded."""
    pools = desired.plan.pools
    online_cpus = view.topology.online
    assert pools.reclaimed, "BE work always has a CPU"
    assert pools.reclaimed <= online_cpus
    if online_cpus - pools.dedicated_cpus:
        assert not pools.reclaimed & pools.dedicated_cpus
    assert pools.budget_milli >= 10
    assert pools.shared
    assert list(desired.settings) == sorted(desired.settings)
    directory: int | None = None
    for (path, knob), setting in desired.settings.items():
        assert (path, knob) == setting.key
        assert path.startswith("/kubepods")
        if knob == "cpu.set":
            assert isinstance(setting.value, CpuSet)
            assert setting.value
        if knob == "cpu.quota":
            assert setting.value is None or (isinstance(setting.value, int) and setting.value >= 1000)
            assert path not in ("/kubepods", view.burstable)
            if path == view.besteffort and isinstance(setting.value, int):
                directory = setting.value
    for one in view.pods.values():
        if one.pod_class is not PodClass.RECLAIMED:
            ours = {
                (setting.knob, setting.policy)
                for key, setting in desired.settings.items()
                if one.uid == setting.pod_uid
            }
            assert ours <= {("cpu.set", "exclusive"), ("cpu.set", "shared"), ("cpu.quota", "pinned")}
            if not (pools.confine_shared or one.uid in pools.bound or pools.placed):
                assert ("cpu.set", "shared") not in ours
        for item in one.containers:
            if item.kind is ContainerKind.SANDBOX:
                assert {key[1] for key in desired.settings if key[0] == item.group.path} <= {"cpu.set"}
            own = f"{one.uid}/{item.name}"
            if own in pools.dedicated:
                wanted = desired.settings.get((item.group.path, "cpu.set"))
                assert (wanted is not None and wanted.value == pools.dedicated[own]) is (own in pools.placed)
        if view.versions["cpu"] == 1 and directory is not None and one.qos is QosClass.BESTEFFORT:
            for item in one.containers:
                quota = desired.settings.get((item.group.path, "cpu.quota"))
                value = quota.value if quota is not None else None
                assert not isinstance(value, int) or value <= directory


@settings(max_examples=examples(150), deadline=None)
@given(history=histories(), config=configs)
def test_every_plan_of_every_history_keeps_the_rules(history: list[NodeView], config: PoliciesConfig) -> None:
    previous: NodePlan | None = None
    for view in history:
        desired = plan(view, previous, config)
        within_the_rules(view, desired)
        if previous is not None and (view.kubelet.held or view.kubelet.policy is CpuPolicy.UNKNOWN):
            adopted = {key: own for key, own in previous.pools.dedicated.items() if key not in previous.pools.placed}
            assert all(own <= desired.plan.pools.dedicated_cpus for own in adopted.values())
        previous = desired.plan


@settings(max_examples=examples(100), deadline=None)
@given(history=histories(), config=configs)
def test_the_same_history_gives_the_same_plan_byte_for_byte(history: list[NodeView], config: PoliciesConfig) -> None:
    def run(views: list[NodeView]) -> bytes:
        previous: NodePlan | None = None
        out = b""
        for view in views:
            desired = plan(view, previous, config)
            out += dump(desired)
            previous = desired.plan
        return out

    shuffled = [replace(view, pods=dict(reversed(list(view.pods.items())))) for view in history]
    assert run(history) == run(shuffled)


@settings(max_examples=examples(100), deadline=None)
@given(view=nodes(), config=configs)
def test_planning_again_on_the_same_node_changes_nothing(view: NodeView, config: PoliciesConfig) -> None:
    once = plan(view, None, config)
    assert dump(plan(view, once.plan, config)) == dump(once)


@settings(max_examples=examples(100), deadline=None)
@given(history=histories(), blind=uses.filter(lambda use: use is None or use.age_s is None or use.age_s > 3.0))
def test_an_unknown_signal_never_raises_the_budget(history: list[NodeView], blind: object) -> None:
    previous: NodePlan | None = None
    for view in history:
        previous = plan_node(view, previous, CONFIG)
    view = replace(history[-1], cpu=blind, now=history[-1].now + 100.0)
    assert previous is not None
    assert plan_node(view, previous, CONFIG).pools.budget_milli <= previous.pools.budget_milli


@settings(max_examples=examples(100), deadline=None)
@given(
    budgets=st.lists(st.integers(0, 16_000), min_size=2, max_size=30),
    owners=st.lists(st.integers(0, 7), min_size=30, max_size=30),
)
def test_pods_that_come_and_go_move_fewer_cpus_than_planning_from_scratch(
    budgets: list[int], owners: list[int]
) -> None:
    """An exclusive pod of 0-7 CPUs, somewhere else each time, and changing online use."""
    shape = uniform(sockets=2, nodes=2, cores=8, threads=2)
    held: Pools | None = None
    moves = {"sticky": 0, "scratch": 0}
    for turn, (use, size) in enumerate(zip(budgets, owners, strict=False)):
        own = CpuSet((turn * 3 + step) % 16 for step in range(size))
        view = node(
            topology=shape,
            kubelet=kubelet(default=str(shape.online - own), exclusive={"g/main": str(own)} if own else {}),
            cpu=cpu(online=use),
            now=turn * 60.0,
        )
        after = plan_pools(view, held, CONFIG)
        scratch = choose_cpus(len(after.reclaimed), shape.online - own, EMPTY, own, shape)
        if held is not None:
            moves["sticky"] += len(held.reclaimed ^ after.reclaimed)
            moves["scratch"] += len(held.reclaimed ^ scratch)
        held = after
    assert moves["sticky"] <= moves["scratch"]


# --- price ---------------------------------------------------------------------------------------------------------


def crowd(count: int) -> dict[str, Pod]:
    resources = Resources(batch_cpu_milli=500, batch_memory_bytes=1 << 30)
    batch = (container("a", requests=resources, limits=resources), container("b", requests=resources, limits=resources))
    return {
        item.uid: item
        for item in (
            pod(f"u{number:04}", *batch) if number % 2 else online(f"u{number:04}", container("a"), container("b"))
            for number in range(count)
        )
    }


def calls(view: NodeView, previous: NodePlan | None) -> float:
    return least_cpu_s(lambda: plan(view, previous, CONFIG), 0.0)


def test_the_cost_of_a_plan_grows_no_faster_than_the_pods() -> None:
    shape = uniform(sockets=2, nodes=2, cores=64, threads=2)
    small = replace(node(topology=shape), pods=crowd(50))
    large = replace(node(topology=shape), pods=crowd(400))
    before = plan_node(small, None, CONFIG)
    assert calls(large, before) < 3 * 8 * calls(small, before)


def test_the_default_pools_of_an_idle_node_are_these() -> None:
    plan = plan_node(node(), None, CONFIG)
    pools = plan.pools
    assert (pools.shared, pools.reclaimed, pools.budget_milli) == (cpus("0-7"), cpus("2-7"), 5120)
    assert pools.reasons == {
        "dedicated": "no container has exclusive CPUs",
        "exclusive": "no pod requests exclusive CPUs",
        "reserved": "no reserved CPUs",
        "shared": "neither reserved nor dedicated; online pods keep the CPU set from the kubelet",
        "idle_buffer": "idle buffer inactive (no BE work running)",
        "budget": "target 65 % of 8 CPUs - 0.00 used by system - 0.00 online, in steps of 0.16 CPU",
        "law": "quota: no BE pod",
        "reclaimed": "BE runs on CPU 2-7 (6 of 8 eligible)",
        "cpuset": "BE containers are limited to the BE pool",
        "quota": "CPU quota on kubepods/besteffort",
        "normalise": "off: quotas are unchanged",
        "burst": "off",
        "idle_class": "off",
        "group_identity": "off",
        "qos_level": "off",
    }
    assert plan.reasons == dict.fromkeys(
        [
            policy.name
            for policy in POLICIES
            if policy.decide_resources is not None and not policy.config_type().enabled
        ],
        "off",
    )
    memory = MemoryPlan(batch_limits=True)
    assert plan == NodePlan(pools=pools, memory=memory, reasons=plan.reasons)


@pytest.mark.parametrize("level", [level for level in Protection if level is not Protection.OBSERVE])
@pytest.mark.parametrize("versions", [V1, V2], ids=["v1", "v2"])
def test_a_be_pod_that_starts_changes_no_part_of_the_plan_from_which_the_settings_of_others_follow(
    tmp_path: Path, level: Protection, versions: dict[str, int]
) -> None:
    """Else each start plans, and compares, every BE pod of the node again. A divided quota has to follow."""
    file = tmp_path / "config.yaml"
    file.write_text(f"protect: {level}\nkubelet: {{enabled: false}}\n")
    policies = load(str(file)).config.policies
    pods = [online("web"), pod("a"), pod("b")]
    before = plan_node(node(*pods, versions=versions), None, policies)
    after = plan_node(node(*pods, pod("c"), versions=versions), before, policies)
    parts = {name for name in NodePlan.__struct_fields__ if getattr(before, name) != getattr(after, name)}
    per_container = {"cookies", "oom_scores", "idle_threads"}
    assert parts <= {"pools", *per_container}
    assert replace(before.pools, quota_milli=after.pools.quota_milli) == after.pools
