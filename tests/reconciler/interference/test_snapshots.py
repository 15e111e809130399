from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.interference.snapshots import snapshot_of
from reconciler.pods.assemble import PodInput, assemble
from reconciler.pods.selectors import ClassRules
from reconciler.responses.eviction.resources import cpu_request, memory_request
from reconciler.signals.besteffort import requested
from state.model import ContainerKind, ContainerMeta, GroupRef, PodClass, PodMeta, Pools, Resources
from tests.reconciler.nodes import container, cpus, pod


def pools(**changes: object) -> Pools:
    base = Pools(
        online_cpus=cpus("0-7"),
        reserved=cpus("0"),
        dedicated={"own/main": cpus("6-7")},
        shared=cpus("1-5"),
        reclaimed=cpus("4-5"),
        budget_milli=2000,
        named={"shared/web": cpus("2-3")},
        bound={"bound": "shared/web"},
    )
    return replace(base, **changes)


def test_requests_are_the_sum_of_app_containers_and_missing_ones_are_marked() -> None:
    item = pod(
        "be",
        container("main", requests=Resources(batch_cpu_milli=2000, batch_memory_bytes=1 << 30)),
        container("side", requests=Resources(batch_cpu_milli=500)),
        container("pause", kind=ContainerKind.SANDBOX),
        container("init", kind=ContainerKind.INIT, requests=Resources(batch_cpu_milli=9000)),
    )
    facts = snapshot_of(item, None)
    assert facts.requests == Resources(batch_cpu_milli=2500, batch_memory_bytes=1 << 30)
    assert facts.partial == ("batch_memory_bytes",)
    assert facts.limits == Resources()
    assert [(each.name, each.sandbox) for each in facts.containers] == [
        ("main", False),
        ("side", False),
        ("pause", True),
        ("init", False),
    ]
    assert (facts.pool, facts.cpus, facts.created_s, facts.subject) == (None, "", 0.0, "pod:be")


def test_a_pods_batch_requests_follow_one_rule_for_each_container() -> None:
    item = pod(
        "be",
        container("main", requests=Resources(batch_cpu_milli=2000, memory_bytes=3 << 30)),
        container("side", requests=Resources(cpu_milli=500, memory_bytes=5 << 30, batch_memory_bytes=1 << 30)),
        container("none", requests=Resources(batch_cpu_milli=0, cpu_milli=700)),
        container("init", kind=ContainerKind.INIT, requests=Resources(batch_cpu_milli=9000)),
    )
    facts = snapshot_of(item, None)
    assert (facts.be_cpu_milli, facts.be_memory_bytes) == (2500, 4 << 30)
    assert (cpu_request(facts), memory_request(facts)) == requested([item], 8000) == (2500, 4 << 30)
    old = replace(facts, be_cpu_milli=None, be_memory_bytes=None)
    assert (cpu_request(old), memory_request(old)) == (2000, 1 << 30)
    nothing = snapshot_of(pod("bare", container("main")), None)
    assert (cpu_request(nothing), memory_request(nothing)) == (None, None)


def test_the_cpus_are_those_of_its_pool() -> None:
    there = pools()
    assert snapshot_of(pod("be"), there).cpus == "4-5"
    assert snapshot_of(pod("be"), there, cpus=cpus("4")).cpus == "4"
    own = snapshot_of(pod("own", cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED), there)
    assert (own.pool, own.cpus) == ("dedicated", "6-7")
    bound = snapshot_of(pod("bound", cls=PodClass.SHARED, qos=QosClass.BURSTABLE), there)
    assert (bound.pool, bound.cpus) == ("shared/web", "2-3")
    system = snapshot_of(pod("sys", cls=PodClass.SYSTEM), there)
    assert (system.pool, system.cpus) == (None, "")


def test_the_strongest_source_has_the_grace_and_any_source_the_termination() -> None:
    known = PodInput(
        uid="a",
        qos=QosClass.BURSTABLE,
        group=GroupRef(path="/kubepods/burstable/poda"),
        containers={"c1": GroupRef(path="/kubepods/burstable/poda/c1")},
        metas=(
            PodMeta(uid="a", source="cri", deleting=True),
            PodMeta(
                uid="a",
                source="kubelet",
                namespace="ns",
                name="web",
                owner="DaemonSet/web",
                labels={},
                annotations={},
                grace_s=7.0,
                containers=(ContainerMeta(name="main", id="c1"),),
            ),
        ),
    )
    facts = snapshot_of(assemble(known, ClassRules()), None, created_s=1000.0, held=True)
    assert (facts.terminating, facts.grace_s, facts.owner) == (True, 7.0, "DaemonSet/web")
    assert (facts.created_s, facts.held, facts.certain, facts.title) == (1000.0, True, True, "ns/web")
