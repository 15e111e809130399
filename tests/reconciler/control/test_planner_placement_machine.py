"""Pods start and end, grow, restart; the agent restarts; CPUs go offline: what holds after every single event.

Every plan is also carried out on a model of the cgroup tree, write by write in the planner's order, as the kernel's v1
rule demands: each set inside its parent's, at every moment.
"""

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, order_changes
from reconciler.control.persistence import decode_plan, plan_row
from reconciler.control.planner import plan
from reconciler.placement.chain import PlacementContext, Plugin, Scored
from reconciler.placement.config import PlacementConfig
from reconciler.placement.demand import CpuDemand
from reconciler.policies.exclusive import ExclusiveConfig, whole_cpus
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.shared import PoolSizing, SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import AntiAffinity, CpuPreferences, GroupUse, TopologyPolicy
from state.model import (
    Container,
    ContainerKind,
    CpuPolicy,
    NodeView,
    NumaMemory,
    Pod,
    PodClass,
    Pools,
    Resources,
)
from state.plan import Desired, NodePlan
from state.topology import Cpu, CpuKind, NumaNode, Topology, uniform
from tests.examples import examples
from tests.reconciler.nodes import container, cpu, kubelet, node, pod

UIDS = "abcdefgh"
LEVELS = ("/kubepods", "/kubepods/besteffort", "/kubepods/burstable")


class BeOffTheFirst(Plugin):
    """A site's rule: no BE work on the lowest CPU, and the odd ones before the others."""

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return cpus.lowest(1) if demand.pod_class is PodClass.RECLAIMED else EMPTY

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> list[Scored]:
        return [(CpuSet(cpu for cpu in cpus if cpu % 2), 1.0)]


def odd(topology: Topology, slow: int, gone: int) -> Topology:
    """Its highest CPUs are efficiency cores, and some of the others offline."""
    offline = CpuSet(number for number in topology.online if number % 5 == 3).lowest(gone)
    cpus = tuple(
        Cpu(
            id=item.id,
            core=item.core,
            socket=item.socket,
            node=item.node,
            l3=item.l3,
            thread=item.thread,
            kind=CpuKind.EFFICIENCY if item.id >= len(topology.online) - slow else CpuKind.PERFORMANCE,
        )
        for item in topology.cpus
        if item.id not in offline
    )
    numa = tuple(NumaNode(id=node, memory_bytes=8) for node in sorted({item.node for item in cpus}))
    return Topology(online=topology.online - offline, cpus=cpus, offline=offline, numa=numa)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    threads = draw(st.sampled_from([1, 1, 2, 2, 4]))
    sockets = draw(st.sampled_from([1, 2]))
    nodes = sockets * draw(st.sampled_from([1, 2, 3]))
    shape = uniform(sockets=sockets, nodes=nodes, cores=nodes * draw(st.integers(1, 4)), threads=threads)
    if len(shape.online) < 3:
        return uniform(cores=3, threads=1)
    return odd(shape, draw(st.sampled_from([0, 0, 2])), draw(st.sampled_from([0, 0, 1, 2])))


configs = st.builds(
    PoliciesConfig,
    reserve=st.builds(ReserveConfig, count=st.integers(0, 2)),
    exclusive=st.builds(
        ExclusiveConfig, full_cores=st.booleans(), distribute=st.booleans(), keep_cpus=st.integers(1, 2)
    ),
    shared=st.builds(
        SharedConfig,
        mode=st.sampled_from(list(SharedPoolMode)),
        sizing=st.sampled_from(list(PoolSizing)),
        leave_cpus=st.integers(1, 2),
    ),
    reclaimed=st.builds(
        ReclaimedConfig,
        minimum_cpus=st.integers(1, 2),
        minimum_per_node=st.integers(0, 1),
        share_exclusive=st.sampled_from([False, False, True]),
        placement=st.sampled_from([PlacementConfig(), PlacementConfig(plugins={f"{__name__}:BeOffTheFirst": 1})]),
    ),
)
wishes = st.builds(
    CpuPreferences,
    pool=st.sampled_from([None, None, "x", "y"]),
    numa_binding=st.booleans(),
    numa_exclusive=st.sampled_from([False, False, True]),
    nodes=st.sampled_from([(), (), (0,), (1,), (7,)]),
    node_count=st.sampled_from([None, None, 1, 2]),
    full_cores=st.sampled_from([None, True]),
    distribute=st.sampled_from([None, True]),
    spread_cores=st.sampled_from([None, None, True]),
    strict_cores=st.booleans(),
    apart=st.sampled_from([None, *AntiAffinity]),
    numa_share=st.sampled_from([None, True, False]),
    lends=st.sampled_from([None, True, False]),
    topology_policy=st.sampled_from([None, *TopologyPolicy]),
)


class PlacementMachine(RuleBasedStateMachine):
    """One node over time."""

    @initialize(topology=topologies(), config=configs)
    def boot(self, topology: Topology, config: PoliciesConfig) -> None:
        self.config = config
        self.view: NodeView = node(topology=topology, kubelet=kubelet(CpuPolicy.NONE), cpu=cpu(online=500))
        self.pools: Pools | None = None
        self.tree: dict[str, CpuSet] = dict.fromkeys(LEVELS, topology.online)
        self.sticky: dict[str, CpuSet] = {}
        self.look()

    # What happens

    @precondition(lambda self: len(self.view.pods) < len(UIDS))
    @rule(
        cls=st.sampled_from([PodClass.DEDICATED, PodClass.SHARED, PodClass.RECLAIMED, PodClass.SYSTEM]),
        qos=st.sampled_from(list(QosClass)),
        milli=st.lists(st.integers(0, 5000), min_size=1, max_size=3),
        init=st.sampled_from([None, None, 1000, 4000]),
        memory=st.integers(0, 12),
        wish=wishes,
    )
    def arrives(
        self, cls: PodClass, qos: QosClass, milli: list[int], init: int | None, memory: int, wish: CpuPreferences
    ) -> None:
        uid = next(text for text in UIDS if text not in self.view.pods)
        kinds: list[Container] = [container("pause", kind=ContainerKind.SANDBOX)]
        if init is not None:
            kinds.append(container("init", kind=ContainerKind.INIT, requests=Resources(cpu_milli=init)))
        kinds += [
            container(f"c{at}", requests=Resources(cpu_milli=number, memory_bytes=memory))
            for at, number in enumerate(milli)
        ]
        self._set(replace(pod(uid, *kinds, cls=cls, qos=qos), wish=wish))

    @precondition(lambda self: self.view.pods)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.view.pods)))
        gone = self.view.pods[uid]
        self.view = replace(self.view, pods={key: item for key, item in self.view.pods.items() if key != uid})
        self.tree = {path: cpus for path, cpus in self.tree.items() if not path.startswith(gone.group.path)}
        self.sticky = {key: cpus for key, cpus in self.sticky.items() if not key.startswith(f"{uid}/")}
        self.look()

    @precondition(lambda self: self.view.pods)
    @rule(data=st.data(), milli=st.integers(0, 5000))
    def is_resized(self, data: st.DataObject, milli: int) -> None:
        uid = data.draw(st.sampled_from(sorted(self.view.pods)))
        item = self.view.pods[uid]
        resources = Resources(cpu_milli=milli)
        self.sticky = {key: cpus for key, cpus in self.sticky.items() if not key.startswith(f"{uid}/")}
        self._set(
            replace(
                item,
                containers=tuple(
                    replace(each, requests=resources) if each.name == "c0" else each for each in item.containers
                ),
            )
        )

    @precondition(lambda self: self.view.pods)
    @rule(data=st.data())
    def restarts_a_container(self, data: st.DataObject) -> None:
        """Its directory is removed; it is made again with the next event that concerns it, or with the pod."""
        uid = data.draw(st.sampled_from(sorted(self.view.pods)))
        whole = self.view.pods[uid]
        without = replace(whole, containers=tuple(item for item in whole.containers if item.name != "c0"))
        self._set(without)
        self._set(whole)

    @rule(online=st.integers(0, 16_000), reclaimed=st.integers(0, 8000), later=st.sampled_from([0.1, 2.0, 40.0]))
    def is_used(self, online: int, reclaimed: int, later: float) -> None:
        uses = {
            item.group.path: GroupUse(cpu_milli=online // max(1, len(self.view.pods)))
            for item in self.view.pods.values()
            if item.pod_class.online
        }
        used = cpu(online=online, reclaimed=reclaimed)
        self.view = replace(self.view, cpu=used, uses=uses, now=self.view.now + later)
        self.look()

    @rule(free=st.lists(st.integers(0, 8), min_size=6, max_size=6), age_s=st.sampled_from([None, 1.0, 99.0]))
    def memory_is_used(self, free: list[int], age_s: float | None) -> None:
        known = NumaMemory(free={node: free[node] for node in self.view.topology.nodes()}, age_s=age_s)
        self.view = replace(self.view, numa_memory=known)
        self.look()

    @rule(mask=st.integers(0, 255))
    def interrupts_move(self, mask: int) -> None:
        self.view = replace(self.view, irq_cpus=CpuSet.from_mask(mask))
        self.look()

    @rule()
    def the_agent_restarts(self) -> None:
        assert self.pools is not None
        self.pools = decode_plan(plan_row(NodePlan(pools=self.pools))).pools
        self.look()

    @rule()
    def the_node_restarts(self) -> None:
        """All pods are gone for a moment and start again."""
        assert self.pools is not None
        pods, held = self.view.pods, {key: self.pools.dedicated[key] for key in self.pools.placed}
        self.view, self.sticky = replace(self.view, pods={}), {}
        self.tree = dict.fromkeys(LEVELS, self.view.topology.online)
        self.pools = decode_plan(plan_row(NodePlan(pools=self.pools))).pools
        self.look()
        self.view = replace(self.view, pods=pods)
        for item in pods.values():
            self._make(item)
        self.look()
        for key, cpus in held.items():
            if not key.endswith("(init)"):
                assert self.pools.dedicated.get(key) == cpus, "what was there before finds its CPUs again"

    # What is looked at

    def _set(self, item: Pod) -> None:
        known = self.view.pods.get(item.uid)
        if known is not None:
            for group in (each.group.path for each in known.containers if each not in item.containers):
                self.tree.pop(group, None)
        self.view = replace(self.view, pods={**self.view.pods, item.uid: item})
        self._make(item)
        self.look()

    def _make(self, item: Pod) -> None:
        """As the runtime makes them: the pod's directory has all CPUs, its containers what their parent has."""
        everything = self.tree["/kubepods"]
        self.tree.setdefault(item.group.path, everything)
        for each in item.containers:
            self.tree.setdefault(each.group.path, self.tree[item.group.path])

    def look(self) -> None:
        before = NodePlan(pools=self.pools) if self.pools is not None else None
        desired = plan(self.view, before, self.config)
        turned = replace(self.view, pods=dict(reversed(list(self.view.pods.items()))))
        again = plan(turned, before, self.config)
        assert _bytes(again) == _bytes(desired), "the same input, the same plan"
        self.pools = desired.plan.pools
        self._carry_out(desired)
        for key in self.pools.placed:
            last = self.sticky.get(key)
            now = self.pools.dedicated[key]
            # One that was refused a part of its request may get the rest later.
            assert last is None or now == last or (last < now and len(last) < self._asked(key)), f"{key} never moves"
        self.sticky = {key: self.pools.dedicated[key] for key in self.pools.placed}

    def _asked(self, key: str) -> int:
        uid, _, name = key.partition("/")
        item = self.view.pods[uid]
        return max((whole_cpus(each) for each in item.containers if each.name == name), default=0)

    def _carry_out(self, desired: Desired) -> None:
        changes = [
            KnobChange(
                path=setting.path, knob="cpu.set", have=self.tree[setting.path], want=setting.value, why=setting.reason
            )
            for setting in desired.settings.values()
            if setting.knob == "cpu.set"
        ]
        known = {(path, "cpu.set"): cpus for path, cpus in self.tree.items()}
        steps = order_changes(changes, known, self.view.versions)
        assert not steps.blocked
        for step in steps.steps:
            value = CpuSet.parse(step.text)
            assert value
            self.tree[step.path] = value
            parent = self.tree[step.path.rpartition("/")[0]]
            assert value <= parent
            below = [cpus for path, cpus in self.tree.items() if path.startswith(f"{step.path}/")]
            assert all(cpus <= value for cpus in below)
        for item in desired.settings.values():
            if item.knob == "cpu.set":
                assert self.tree[item.path] == item.value

    # What holds

    @invariant()
    def nobody_shares_what_is_owned(self) -> None:
        if self.pools is None:
            return
        pools = self.pools
        own = list(pools.dedicated.values())
        assert sum(map(len, own)) == len(pools.dedicated_cpus), "no CPU in two exclusive pools"
        others = [pools.shared, *pools.named.values()]
        assert not any(cpus & pools.dedicated_cpus for cpus in others)
        lent = self.config.reclaimed.share_exclusive
        refused = CpuSet.union(
            cpus
            for key, cpus in pools.dedicated.items()
            if not lent or self.view.pods[key.partition("/")[0]].wish.lends is False
        )
        assert pools.reclaimed
        assert not pools.reclaimed & refused
        assert not pools.dedicated_cpus & pools.reserved
        assert all(others), "no pool is empty"

    @invariant()
    def reserved_cpus_are_never_handed_out(self) -> None:
        if self.pools is None:
            return
        pools = self.pools
        left = self.view.topology.online - pools.reserved - pools.dedicated_cpus
        for given in (pools.shared, pools.reclaimed, *pools.named.values()):
            assert not given & pools.reserved or not left

    @invariant()
    def be_work_keeps_its_minimum(self) -> None:
        if self.pools is None:
            return
        pools, config = self.pools, self.config.reclaimed
        usable = self.view.topology.online - pools.reserved - pools.dedicated_cpus
        if pools.separate:
            usable -= CpuSet.union([pools.shared, *pools.named.values()])
        # The site's rule takes one CPU away.
        ruled = config.placement != PlacementConfig()
        assert len(pools.reclaimed) >= min(config.minimum_cpus, max(1, len(usable) - ruled))

    @invariant()
    def online_pools_are_disjoint(self) -> None:
        if self.pools is None:
            return
        pools = self.pools
        # With fewer CPUs than pools some run in the shared one, as the reasons say.
        own = [cpus for cpus in pools.named.values() if cpus != pools.shared]
        assert sum(map(len, own)) == len(CpuSet.union(own))
        bound = {key.rpartition("-NUMA")[2] for key in pools.named if "-NUMA" in key}
        free = CpuSet.union([pools.shared, *own]) | (EMPTY if pools.separate else pools.reclaimed)
        assert not CpuSet.union(own) & pools.shared or len(free) < len(bound) + 1
        if pools.separate and len(self.view.topology.online - pools.reserved - pools.dedicated_cpus) > len(own) + 1:
            assert not pools.reclaimed & CpuSet.union([pools.shared, *own])


def _bytes(desired: Desired) -> bytes:
    return msgspec.json.encode(
        [desired.plan, list(desired.settings.values()), desired.refusals], enc_hook=str, order="deterministic"
    )


PlacementMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=25, deadline=None)
TestPlacement = PlacementMachine.TestCase
