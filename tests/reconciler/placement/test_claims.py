"""What policies leave to each other, and the report on a claim that did not get what it requested."""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.control.planner import plan_pools
from reconciler.placement.claims import CpuClaim, cpu_claims
from reconciler.placement.cpu_accumulator import CpuAccumulator
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.shared import SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences
from state.model import NodeView, NumaMemory, Pod, PodClass, Pools, Resources
from state.topology import NumaNode, Topology, uniform
from tests.reconciler.nodes import container, cpus, kubelet, node, pod
from tests.reconciler.nodes import cpu as cpu_use

TWO = uniform(sockets=2, nodes=2, cores=16, threads=1)
CONFIG = PoliciesConfig()
OFF = ExclusiveConfig(enabled=False)
SEPARATE = PoliciesConfig(shared=SharedConfig(mode=SharedPoolMode.SEPARATE))


def asking(uid: str, cpus: float, cls: PodClass = PodClass.SHARED, *, memory: int | None = None, **wish: Any) -> Pod:
    requests = Resources(cpu_milli=round(1000 * cpus), memory_bytes=memory)
    return replace(pod(uid, container("main", requests=requests), cls=cls), wish=CpuPreferences(**wish))


def dedicated(uid: str, cpus: float, **wish: Any) -> Pod:
    return asking(uid, cpus, PodClass.DEDICATED, **wish)


def bound(uid: str, cpus: float, on: int | None = 0, **wish: Any) -> Pod:
    return asking(uid, cpus, numa_binding=True, nodes=() if on is None else (on,), **wish)


def lived(*events: list[Pod], topology: Topology = TWO, config: PoliciesConfig = CONFIG) -> tuple[NodeView, Pools]:
    """The pools after these pods were there one after the other."""
    pools = None
    for pods in events:
        view = node(*pods, topology=topology)
        pools = plan_pools(view, pools, config)
    assert pools is not None
    return view, pools


@pytest.mark.parametrize("count", [7, 8, 9])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_a_dedicated_pod_leaves_the_pools_of_a_node_what_they_request(count: int, at_once: bool, expand: bool) -> None:
    web, db = bound("web", 6), dedicated("db", count)
    config = PoliciesConfig(shared=SharedConfig(expand=expand))
    view, pools = lived(*(([web, db],) if at_once else ([web], [web, db])), config=config)
    claim = next(claim for claim in cpu_claims(view, pools) if claim.owner == "shared/share-NUMA0")
    assert (claim.asked, claim.cut) == (6, False)
    assert claim.got == len(pools.named["shared/share-NUMA0"])
    assert claim.got >= 6 if expand else claim.got == 6
    assert len(pools.dedicated["db/main"]) == count
    assert pools.bound == {"web": "shared/share-NUMA0"}


def test_a_pod_is_bound_to_a_node_that_has_its_request() -> None:
    """Node 0 has the smaller load, and one CPU."""
    pods = [dedicated("db", 7, nodes=(0,), numa_binding=True), bound("old", 1, 1)]
    view, pools = lived(pods, [*pods, bound("web", 6, None)])
    assert pools.bound["web"] == "shared/share-NUMA1"
    assert len(pools.named["shared/share-NUMA1"]) == 7
    assert not [claim for claim in cpu_claims(view, pools) if claim.cut]


def test_pods_that_come_together_are_bound_so_that_all_fit() -> None:
    """By load alone, or the largest first, one of them finds no room: only 3, 3 and 2 fill a node beside 4 and 4."""
    machine = uniform(nodes=3, cores=24, threads=1)
    pods = [bound(uid, size, None) for uid, size in zip("abcde", (3, 3, 2, 4, 4), strict=True)]
    _, pools = lived([*pods, bound("z", 7, 2)], topology=machine)
    assert {name: len(cpus) for name, cpus in pools.named.items()} == {
        "shared/share-NUMA0": 8,
        "shared/share-NUMA1": 8,
        "shared/share-NUMA2": 7,
    }


def test_isolated_cpus_are_not_given_out_exclusively() -> None:
    topology = replace(uniform(cores=8, threads=1), isolated=cpus("6-7"))
    pods = [dedicated(uid, 1) for uid in "abcd"]
    view, pools = lived([*pods, pod("be")], topology=topology)
    assert pools.dedicated_cpus == cpus("0-3")
    assert not (pools.shared | pools.reclaimed) & topology.isolated
    view, pools = lived([dedicated("a", 6), pod("be")], topology=topology)
    (claim,) = [claim for claim in cpu_claims(view, pools) if claim.cut]
    assert (claim.owner, claim.asked, claim.got) == ("dedicated/a/main", 6, 0)


def test_isolated_cpus_that_a_container_has_stay_its_own() -> None:
    machine = uniform(cores=8, threads=1)
    view, pools = lived([dedicated("a", 4)], topology=machine)
    view = replace(view, topology=replace(machine, isolated=cpus("2-3")))
    assert plan_pools(view, pools, CONFIG).dedicated["a/main"] == pools.dedicated["a/main"]


def test_nodes_on_which_every_resource_fits_come_before_what_different_sets_have_in_common() -> None:
    """What the CPUs' and the memory's sets have in common is too little; two nodes have both."""
    giga = 1 << 30
    machine = replace(
        uniform(sockets=2, nodes=8, cores=64, threads=1),
        numa=tuple(NumaNode(id=number, memory_bytes=16 * giga) for number in range(8)),
    )
    free = dict(enumerate((16, 16, 15, 16, 15, 4, 16, 16)))
    used = {0: 3, 1: 3, 2: 1, 3: 1, 4: 3, 6: 3}
    first = [dedicated(f"d{number}", count, nodes=(number,), numa_binding=True) for number, count in used.items()]
    view, pools = lived(first, topology=machine)
    known = NumaMemory(free={number: giga * amount for number, amount in free.items()}, age_s=1.0)
    big = dedicated("big", 15, memory=31 * giga)
    for memory in (known, None):
        view = replace(node(*first, big, topology=machine), numa_memory=memory)
        after = plan_pools(view, pools, CONFIG)
        nodes = {machine.node_of(number) for number in after.dedicated["big/main"]}
        assert len(nodes) == 2
        assert memory is None or sum(free[number] for number in nodes) >= 31


def test_in_mode_separate_be_work_takes_what_online_pools_leave() -> None:
    """The default pool has a node of its own there, and BE work not a whole one before it."""
    machine = uniform(sockets=2, nodes=2, cores=16, threads=1)
    _, pools = lived([bound("web", 3), asking("app", 5), pod("be")], topology=machine, config=SEPARATE)
    assert len(pools.shared) == 5
    assert pools.shared <= machine.node_cpus(1), "not beside the bound pool"
    assert pools.separate
    assert not pools.reclaimed & (pools.shared | pools.named["shared/share-NUMA0"])


@pytest.mark.parametrize("cls", [PodClass.SHARED, PodClass.RECLAIMED])
def test_a_scheduler_of_either_dialect_decides_the_node(cls: PodClass) -> None:
    from reconciler.control.planner import plan
    from reconciler.pods.cpu_annotations import parse

    texts = {
        "katalyst": {
            "katalyst.kubewharf.io/memory_enhancement": '{"numa_binding":"true"}',
            "katalyst.kubewharf.io/numa_bind_result": "1",
        },
        "koordinator": {
            "scheduling.koordinator.sh/resource-status": '{"numaNodeResources":[{"node":1,"resources":{"cpu":"3"}}]}'
        },
    }
    got = []
    for annotations in texts.values():
        wish, problems = parse({}, annotations)
        assert problems == ()
        item = replace(asking("a", 3, cls), wish=wish)
        desired = plan(node(item, asking("b", 1), topology=TWO), None, CONFIG)
        got.append(desired.settings[item.containers[0].group.path, "cpu.set"].value)
    assert got[0] == got[1]
    assert isinstance(got[0], CpuSet)
    assert got[0]
    assert got[0] <= TWO.node_cpus(1)


def test_a_pod_of_several_nodes_is_in_a_pool_of_them_all() -> None:
    """14 CPUs of nodes 1 and 2, beside a pool of node 1 and dedicated CPUs: none of them is cut."""
    machine = uniform(sockets=2, nodes=4, cores=32, threads=1)
    wide = asking("wide", 12, numa_binding=True, nodes=(1, 2))
    pods = [bound("web", 3, 1), dedicated("db", 16), wide]
    for events in ([pods], [pods[:1], pods], [[wide], pods]):
        view, pools = lived(*events, topology=machine)
        assert not [claim.message for claim in cpu_claims(view, pools) if claim.cut]
        assert pools.bound["wide"] == "shared/share-NUMA1+2"
        assert pools.named["shared/share-NUMA1+2"] <= machine.node_cpus(1) | machine.node_cpus(2)
        assert plan_pools(view, pools, CONFIG).named == pools.named


def test_a_be_pod_of_two_nodes_runs_on_both() -> None:
    from reconciler.control.planner import plan

    machine = uniform(sockets=2, nodes=4, cores=16, threads=1)
    item = asking("a", 1, PodClass.RECLAIMED, numa_binding=True, nodes=(2, 3))
    desired = plan(node(item, topology=machine, cpu=cpu_use()), None, CONFIG)
    value = desired.settings[item.containers[0].group.path, "cpu.set"].value
    assert value == desired.plan.pools.reclaimed & (machine.node_cpus(2) | machine.node_cpus(3))


# Shrinking


def test_what_shrinks_to_the_size_of_one_node_keeps_no_second_one() -> None:
    """Two whole cores of node 0 and single threads of node 1: the threads alone are enough."""
    fitter = CpuAccumulator(uniform(nodes=2, cores=16, threads=2))
    held = cpus("0-1,16-17,8-13")
    assert CpuSet.from_mask(fitter.shrink(held.mask, 6)) == cpus("8-13")
    assert CpuSet.from_mask(fitter.shrink(held.mask, 4)) <= cpus("8-13")
    assert CpuSet.from_mask(fitter.shrink(held.mask, 8)) >= cpus("0-1,16-17"), "both are needed"


def test_what_shrinks_stays_spread_over_cores() -> None:
    machine = uniform(cores=8, threads=2)
    wish = {"spread_cores": True}
    big, small = dedicated("a", 10, **wish), dedicated("a", 4, **wish)
    _, pools = lived([big], [small], topology=machine)
    own = pools.dedicated["a/main"]
    assert len(own) == 4
    assert sum(1 for core in machine.cores() if core & own) == 4


# What is said


def found(view: NodeView, pools: Pools) -> dict[str, CpuClaim]:
    return {claim.owner: claim for claim in cpu_claims(view, pools)}


def test_every_claim_names_what_it_asked_and_got_and_where() -> None:
    view, pools = lived([bound("web", 6), dedicated("db", 4), asking("app", 2), asking("x", 1.5, pool="x"), pod("be")])
    claims = found(view, pools)
    assert {owner: (claim.asked, claim.got, claim.nodes, claim.cut) for owner, claim in claims.items()} == {
        "dedicated/db/main": (4, 4, (1,), False),
        "shared": (2, 4, claims["shared"].nodes, False),
        "shared/share-NUMA0": (6, 6, (0,), False),
        "shared/x": (2, 2, (0,), False),
        "reclaimed": (claims["reclaimed"].got, len(pools.reclaimed), claims["reclaimed"].nodes, False),
    }
    assert claims["shared/share-NUMA0"].pods == ("web",)
    assert claims["shared/share-NUMA0"].bound == (0,)
    assert all(claim.rule for claim in claims.values())


def test_a_claim_that_is_cut_names_the_owners_of_the_cpus() -> None:
    pods = [dedicated("db", 6, nodes=(0,), numa_binding=True), bound("web", 4)]
    view, pools = lived(pods[:1], pods)
    claim = found(view, pools)["shared/share-NUMA0"]
    assert (claim.asked, claim.got, claim.cut) == (4, 2, True)
    assert claim.against == "of 8 CPUs on NUMA node 0: dedicated/db/main 6"
    assert claim.message == "shared/share-NUMA0 has 2 of 4 CPUs: of 8 CPUs on NUMA node 0: dedicated/db/main 6"


def test_a_claim_off_its_decided_node_is_cut() -> None:
    pods = [dedicated("a", 8, nodes=(0,), numa_binding=True), dedicated("b", 2, nodes=(0,), numa_binding=True)]
    view, pools = lived(pods[:1], pods)
    claim = found(view, pools)["dedicated/b/main"]
    assert (claim.got, claim.cut, claim.bound) == (2, True, (0,))
    assert claim.against == "not on NUMA node 0, as decided; of 8 CPUs on NUMA node 0: dedicated/a/main 8"


def test_what_the_kubelet_gave_is_what_was_asked() -> None:
    view = node(dedicated("a", 3), topology=8, kubelet=kubelet(default="3-7", exclusive={"a/main": "0-2"}))
    claim = found(view, plan_pools(view, None, CONFIG))["dedicated/a/main"]
    assert (claim.asked, claim.got, claim.against) == (3, 3, "")


def test_nothing_that_is_not_confined_is_bound() -> None:
    """A kubelet that rewrites every CPU set: no pool beside the default one, and no claim is cut for one."""
    view = node(bound("web", 6), topology=TWO, kubelet=kubelet(default="0-15", reasserts_s=10.0))
    pools = plan_pools(view, None, CONFIG)
    assert (dict(pools.named), pools.terms, pools.dedicated_cpus) == ({}, None, EMPTY)


def test_nodes_that_do_not_exist_are_no_reason_to_fail() -> None:
    wishes: list[dict[str, Any]] = [{"full_cores": True}, {"spread_cores": True, "strict_cores": True}, {}]
    pods = [dedicated(f"p{at}", 1, nodes=(1, 7), **wish) for at, wish in enumerate(wishes)]
    view, pools = lived(pods, topology=uniform(cores=8, threads=1))
    assert {key: len(own) for key, own in pools.dedicated.items()} == {f"p{at}/main": 1 for at in range(3)}
    assert len(cpu_claims(view, pools)) == 5


def test_a_pool_without_any_cpu_is_a_claim_that_is_cut() -> None:
    """Three CPUs, four pools."""
    pods = [bound("a", 1), asking("b", 1, pool="b"), asking("c", 1, pool="c"), asking("d", 1), pod("be")]
    view, pools = lived(pods, topology=uniform(cores=2, threads=1))
    claims = found(view, pools)
    assert {name for name, claim in claims.items() if claim.cut} >= {"shared/b", "shared/c"}
    assert {*pools.bound.values()} <= {*claims}


def test_a_refused_container_names_the_owners_and_what_is_kept_for_others() -> None:
    pods = [dedicated(f"d{at}", 3) for at in range(4)] + [asking("web", 2)]
    view, pools = lived(pods, topology=uniform(cores=12, threads=1))
    claim = found(view, pools)["dedicated/d3/main"]
    assert (claim.asked, claim.got, claim.cut) == (3, 0, True)
    assert claim.rule.startswith("did not get its CPUs: requests 3 CPUs")
    assert claim.against == (
        "requests 3 CPUs on node 0; 3 free, 1 of them not kept for other pods; of 12 CPUs on NUMA node 0: "
        "dedicated/d0/main 3, dedicated/d1/main 3, dedicated/d2/main 3, shared 3"
    )


def test_cpus_of_pools_that_run_in_the_shared_one_are_counted_once() -> None:
    view, pools = lived([asking(f"n{at}", 1 + at, pool=f"n{at}") for at in range(6)], topology=uniform(cores=4))
    for claim in found(view, pools).values():
        if claim.cut:
            owners = claim.against.partition("NUMA node 0: ")[2].split(", ")
            assert sum(int(owner.rpartition(" ")[2]) for owner in owners) <= len(pools.online_cpus)


def test_a_node_that_does_not_exist_has_no_owners() -> None:
    view, pools = lived([bound("web", 2, on=5)])
    (claim,) = (claim for claim in cpu_claims(view, pools) if claim.owner.startswith("shared/"))
    assert claim.against == "not on NUMA node 5, as decided; NUMA node 5 has no online CPUs"


def test_where_the_policy_is_off_no_container_requests_cpus_of_its_own() -> None:
    view, pools = lived([dedicated("db", 6), asking("web", 2)], config=replace(CONFIG, exclusive=OFF))
    claims = found(view, pools)
    assert not any(claim.cut for claim in claims.values())
    assert (claims["shared"].asked, claims["shared"].pods) == (8, ("db", "web"))
    more, pools = lived([dedicated("db", 15), asking("web", 2)], config=replace(CONFIG, exclusive=OFF))
    assert [claim.owner for claim in cpu_claims(more, pools) if claim.cut] == ["shared"]


def test_cpus_of_be_work_alone_are_named_too() -> None:
    view, pools = lived([asking("web", 16), pod("be")], config=SEPARATE)
    claim = found(view, pools)["shared"]
    assert pools.separate
    assert claim.against.endswith(f"reclaimed {len(pools.reclaimed)}")
