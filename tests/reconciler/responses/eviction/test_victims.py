"""Who is spared and why, the ranking, and how few go."""

import random
from typing import Any

import pytest

from reconciler.pods.selectors import LabelSelector, PodSelector, SelectorOperator, SelectorRequirement
from reconciler.responses.eviction.config import EvictionConfig
from reconciler.responses.eviction.exemptions import ExemptionsConfig, exemption_reason, name_of, policy_allows
from reconciler.responses.eviction.limits import owner_of
from reconciler.responses.eviction.resources import EvictedResource, format_amount, usage_of
from reconciler.responses.eviction.triggers.base import Shortage
from reconciler.responses.eviction.victims import Candidate, pick_minimum, rank, render, standing_of
from state.evidence import ContainerSnapshot, PodSnapshot
from state.model import Hold, PodClass, Resources
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.world import GI, MI, START, World, batch, be

BE_ONLY = (PodClass.RECLAIMED,)
HOLD = Hold(target="pod:a", reason="debugging", by="jo")


def spared(
    pod: PodSnapshot, config: ExemptionsConfig | None = None, holds: dict[str, Hold] | None = None
) -> str | None:
    return exemption_reason(pod, config or ExemptionsConfig(), BE_ONLY, World(pod).frame(), holds or {})


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"terminating": True}, "already terminating"),
        ({"held": True}, "on hold by an operator"),
        ({"certain": False}, "labels not known yet"),
        ({"cls": PodClass.SYSTEM}, "system class"),
        ({"static": True}, "static pod: the kubelet cannot recreate it elsewhere"),
        ({"priority_class": "system-node-critical"}, "critical: priority class system-node-critical"),
        ({"priority": 2_000_000_000}, "critical: its priority"),
        ({"cls": PodClass.SHARED}, "class shared is not in eviction.classes"),
        ({"cls": PodClass.DEDICATED}, "class dedicated is not in eviction.classes"),
        ({"annotations": {"bypassd/do-not-evict": "true"}}, "annotation bypassd/do-not-evict=true"),
        ({"annotations": {"bypassd/do-not-evict": "false"}}, None),
        ({"labels": {"koordinator.sh/eviction-enabled": "false"}}, "label koordinator.sh/eviction-enabled=false"),
        ({"labels": {"koordinator.sh/eviction-enabled": "true"}}, None),
        ({"annotations": {"karpenter.sh/do-not-disrupt": "true"}}, "annotation karpenter.sh/do-not-disrupt=true"),
        ({"annotations": {"karpenter.sh/do-not-evict": "true"}}, "annotation karpenter.sh/do-not-evict=true"),
        # It keeps the autoscaler from removing the node, and says nothing about a node in need.
        ({"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}}, None),
        ({"namespace": "kube-system", "title": "kube-system/a"}, "namespace kube-system"),
        ({"owner": "DaemonSet/logs"}, "owned by DaemonSet/logs"),
        ({"owner": "Job/logs"}, None),
        ({"owner": None}, None),
        ({"age_s": 59.0}, "too young: 59 s of 60 s"),
        ({"age_s": 60.0}, None),
        ({"created_s": 0.0}, "age unknown"),
    ],
)
def test_who_is_spared_and_why(facts: dict[str, Any], reason: str | None) -> None:
    assert spared(be("a", **facts)) == reason


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ExemptionsConfig(ownerless=True), None),
        (ExemptionsConfig(owner_kinds=("ReplicaSet",)), "owned by ReplicaSet/a"),
        (ExemptionsConfig(namespaces=("c*",)), "namespace ci"),
        (ExemptionsConfig(namespaces=()), None),
        (ExemptionsConfig(marks=("keep",)), "label keep=yes"),
        (ExemptionsConfig(marks=("keep=no",)), None),
        (ExemptionsConfig(selectors=(PodSelector(pods=("a",)),)), "selector a"),
        (ExemptionsConfig(selectors=(PodSelector(name="mine", pods=("b",)), PodSelector(namespaces=("x",)))), None),
        (
            ExemptionsConfig(selectors=(PodSelector(labels=LabelSelector(match_labels={"keep": "yes"})),)),
            "selector keep=yes",
        ),
        (
            ExemptionsConfig(
                selectors=(
                    PodSelector(
                        labels=LabelSelector(
                            match_expressions=(SelectorRequirement(key="keep", operator=SelectorOperator.EXISTS),)
                        )
                    ),
                )
            ),
            "selector keep Exists",
        ),
        (varied(ExemptionsConfig(), young_s=7200), "too young: 60 min of 2 h"),
    ],
)
def test_the_configuration_names_who_is_spared(config: ExemptionsConfig, reason: str | None) -> None:
    assert spared(be("a", labels={"keep": "yes"}), config) == reason


def test_pods_without_a_controller_are_spared_where_that_is_asked_for() -> None:
    assert spared(be("a", owner=None), ExemptionsConfig(ownerless=True)) == "no controller would recreate it"
    assert spared(be("a", created_s=0.0), varied(ExemptionsConfig(), young_s=0)) is None
    with pytest.raises(ValueError, match="a selector needs"):
        PodSelector(name="all")


@pytest.mark.parametrize(
    ("target", "is_held"),
    [
        ("node", True),
        ("pod:a", True),
        ("pod:b", False),
        ("file:/kubepods/besteffort/poda", True),
        ("file:/kubepods/besteffort/poda/c1", True),
        ("file:/kubepods/besteffort/poda/c1:cpu.quota", False),
        ("knob:cpu.set", False),
    ],
)
def test_what_a_person_holds_is_left_alone(target: str, is_held: bool) -> None:
    pod = be("a", containers=(ContainerSnapshot(id="c1", path="/kubepods/besteffort/poda/c1"),))
    hold = Hold(target=target, reason="debugging", by="jo")
    assert spared(pod, holds={target: hold}) == ("on hold by jo: debugging" if is_held else None)


@pytest.mark.parametrize(
    ("policy", "features", "accepted"),
    [
        (None, (), True),
        ('["BECPUEvict"]', ("BECPUEvict",), True),
        ('["BECPUEvict"]', ("CPUEvict",), False),
        ('["BECPUEvict"]', (), False),
        ("[]", ("BECPUEvict",), False),
        ("BECPUEvict", ("BECPUEvict",), False),
        ("[1]", ("BECPUEvict",), False),
    ],
)
def test_a_pods_own_list_of_what_it_may_go_for(policy: str | None, features: tuple[str, ...], accepted: bool) -> None:
    """A broken or empty list accepts nothing."""
    annotations = {} if policy is None else {"koordinator.sh/eviction-policy": policy}
    assert (policy_allows(be("a", annotations=annotations), features) is None) is accepted


def test_names_are_known_only_where_somebody_told_them() -> None:
    assert name_of(be("a")) == "a"
    assert name_of(be("a", title="a", namespace=None)) is None


@pytest.mark.parametrize(
    ("facts", "standing"),
    [
        ({}, (0, 0, 0, 0, 0)),
        ({"cls": PodClass.DEDICATED, "priority": 7}, (2, 0, 7, 7, 0)),
        ({"priority": 5000, "labels": {"koordinator.sh/priority": "12"}}, (0, 0, 5000, 12, 0)),
        ({"annotations": {"koordinator.sh/eviction-priority": "-3"}}, (0, -3, 0, 0, 0)),
        ({"annotations": {"koordinator.sh/eviction-priority": "soon"}}, (0, 0, 0, 0, 0)),
        ({"annotations": {"koordinator.sh/eviction-priority": "9" * 5000}}, (0, 0, 0, 0, 0)),
        ({"labels": {"koordinator.sh/priority-class": "koord-free"}}, (0, 0, 3500, 3500, 0)),
        ({"priority": 5001, "labels": {"koordinator.sh/priority-class": "koord-free"}}, (0, 0, 5001, 5001, 0)),
        ({"annotations": {"bypassd/evict": "first"}}, (0, 0, 0, 0, -1)),
        ({"labels": {"bypassd/evict": "last"}}, (0, 0, 0, 0, 1)),
        ({"annotations": {"descheduler.alpha.kubernetes.io/prefer-no-eviction": "true"}}, (0, 0, 0, 0, 1)),
    ],
)
def test_what_others_have_said_of_a_pod(facts: dict[str, Any], standing: tuple[int, ...]) -> None:
    assert tuple(standing_of(be("a", **facts), ExemptionsConfig())) == standing


RANKED = [
    # (uid, facts, memory held): the first victim is listed first
    ("marked", {"annotations": {"koordinator.sh/eviction-priority": "-1"}, "priority": 9000}, 1),
    ("lowest", {"priority": -10}, 1),
    ("label", {"labels": {"koordinator.sh/priority": "-5"}}, 1),
    ("first", {"annotations": {"bypassd/evict": "first"}}, 1),
    ("fresh", {"age_s": 100.0}, 1),
    ("big", {"age_s": 3600.0}, 30),
    ("newer", {"age_s": 3600.0 - 1}, 1),
    ("older", {"age_s": 3600.0}, 1),
    ("older2", {"age_s": 3600.0}, 1),
    ("last", {"annotations": {"bypassd/evict": "last"}, "age_s": 70.0}, 99),
    ("high", {"priority": 10, "age_s": 70.0}, 99),
    ("online", {"cls": PodClass.SHARED, "priority": -99, "age_s": 70.0}, 99),
]


def test_the_ranking_and_that_the_order_of_the_pods_does_not_matter() -> None:
    pressure = Shortage(trigger="node_memory", good=EvictedResource.MEMORY, evidence="", classes=tuple(PodClass))
    for seed in range(5):
        rows = random.Random(seed).sample(RANKED, len(RANKED))
        world = World(*(be(uid, **facts) for uid, facts, _ in rows))  # type: ignore[arg-type]
        for uid, _, gib in rows:
            world.put(f"pod:{uid}", memory__rss=gib * GI)
        ranking = rank(EvictionConfig(), world.scene(), pressure, need=GI, spared={}, features=())
        assert [candidate.pod.uid for candidate in ranking.candidates] == [uid for uid, _, _ in RANKED]


def test_a_line_is_printed_for_each_who_was_weighed() -> None:
    pods = [be("a"), be("b", priority=5, annotations={"bypassd/evict": "last"}), be("c"), be("d"), be("e"), be("f")]
    world = World(*pods)
    for uid, gib in (("a", 2), ("b", 3), ("c", 1), ("d", 0.001), ("f", 0)):
        world.put(f"pod:{uid}", memory__rss=gib * GI)
    pressure = Shortage(trigger="node_memory", good=EvictedResource.MEMORY, evidence="")
    weighed = rank(EvictionConfig(), world.scene(), pressure, need=GI, spared={"c": "young", "f": "young"}, features=())
    assert list(render(pressure, weighed, weighed.candidates[:1], {})) == [
        "1. evict: ci/a: class reclaimed, priority 0, 2 GiB of memory, age 60 min, may return here",
        (
            "2. not needed: pressure already covered: ci/b: class reclaimed, priority 5, avoided, 3 GiB of memory, "
            "age 60 min, may return here"
        ),
        "-. exempt: ci/c: young (1 GiB of memory)",
        "-. exempt: ci/d: uses too little: 1 MiB of memory (1 MiB of memory)",
        "-. exempt: ci/e: usage unknown (usage unknown)",
    ]
    assert (weighed.small, weighed.unknown) == (1, 1)
    assert "wait: the cap" in render(pressure, weighed, (), {"a": "the cap"})[0]


def candidates(*rows: tuple[str, float] | tuple[str, float, int]) -> list[Candidate]:
    """(name, relief, priority): ranked as given within a priority."""
    result = []
    for index, (uid, relief, *rest) in enumerate(rows):
        pod = be(uid, priority=rest[0] if rest else 0)
        age = 1.0 + index * relief if relief else 1.0
        result.append(Candidate(pod=pod, standing=standing_of(pod, ExemptionsConfig()), relief=relief, age_s=age))
    return sorted(result, key=lambda candidate: candidate.order)


@pytest.mark.parametrize(
    ("rows", "need", "going"),
    [
        ([("a", 3), ("b", 5), ("c", 9)], 4, ["b"]),  # the first that is enough alone
        ([("a", 1), ("b", 1), ("c", 1), ("d", 3)], 3, ["d"]),  # one instead of three
        ([("a", 2), ("b", 5), ("c", 4)], 8, ["b", "c"]),  # two instead of three
        ([("a", 2), ("b", 5), ("c", 4)], 6.5, ["a", "b"]),  # of two ways with two, who ranks first
        ([("a", 1), ("b", 1)], 5, ["a", "b"]),  # not enough: all
        ([("a", 1, 0), ("b", 9, 5)], 1, ["a"]),  # a priority is never weighed against the relief
        ([("a", 1, 0), ("b", 9, 5)], 2, ["b"]),  # b has to go in any case: a may stay
        ([("a", 3, 0), ("b", 3, 5), ("c", 3, 9)], 5, ["a", "b"]),
        ([("a", 3)], None, ["a"]),
        ([("a", 3), ("b", 9)], None, ["a"]),
        ([], 3, []),
        ([], None, []),
    ],
)
def test_the_fewest_go_that_are_enough(rows: list[Any], need: float | None, going: list[str]) -> None:
    ranked = candidates(*rows)
    result = pick_minimum(ranked, need, {owner_of(candidate.pod): 9 for candidate in ranked}, owner_of)
    assert [candidate.pod.uid for candidate in result] == going


def test_an_owner_whose_pods_have_gone_is_passed_over() -> None:
    ranked = candidates(("a", 5), ("b", 5))
    assert [candidate.pod.uid for candidate in pick_minimum(ranked, 4, {"ci/ReplicaSet/b": 1}, owner_of)] == ["b"]
    assert pick_minimum(ranked, 4, {}, owner_of) == []
    assert pick_minimum(ranked, None, {}, owner_of) == []


@pytest.mark.parametrize(
    ("good", "place", "amount"),
    [
        (EvictedResource.CPU, "node", 700),
        (EvictedResource.CPU_REQUEST, "node", 2000),
        (EvictedResource.MEMORY_REQUEST, "node", 3 * GI),
        (EvictedResource.LOAD, "pool:reclaimed", 1.0),
        (EvictedResource.LOAD, "pool:shared", None),  # another pool's pod holds none of its tasks
        (EvictedResource.MEMORY, "node", GI),
        (EvictedResource.MEMORY, "numa:0", 300 * MI),
        (EvictedResource.MEMORY, "numa:1", None),  # of two nodes: not known which
        (EvictedResource.DISK, "fs:nodefs", 5 * GI),
        (EvictedResource.DISK, "fs:imagefs", None),
        (EvictedResource.INODES, "fs:nodefs", None),
        (EvictedResource.IO, "node", 30),
        (EvictedResource.CACHE, "node", None),
        (EvictedResource.NETWORK, "node", None),
    ],
)
def test_what_a_pod_holds_of_each_good(good: EvictedResource, place: str, amount: float | None) -> None:
    pod = be("a", requests=batch(2000, 3 * GI))
    world = World(pod)
    world.put("pod:a", cpu__use=700, cpu__wait_milli=300, memory__rss=GI, fs__use=5 * GI, disk__read=10, disk__write=20)
    world.put("pod:a@numa:0", memory__numa_rss=300 * MI)
    world.put("numa:0", memory__total=GI)
    world.put("numa:1", memory__total=GI)
    assert usage_of(good, pod, place, world.scene()) == amount


def test_the_whole_pod_counts_where_there_is_one_numa_node_and_all_memory_where_rss_is_not_known() -> None:
    pod = be("a", requests=Resources(cpu_milli=500))
    world = World(pod)
    world.put("numa:0", memory__total=GI)
    world.put("pod:a", memory__use=2 * GI)
    assert usage_of(EvictedResource.MEMORY, pod, "numa:0", world.scene()) == 2 * GI
    assert usage_of(EvictedResource.CPU_REQUEST, pod, "node", world.scene()) == 500
    world.at = START + 60
    world.samples["pod:a"].clear()
    assert usage_of(EvictedResource.MEMORY, pod, "node", world.scene()) is None


@pytest.mark.parametrize(
    ("good", "value", "words"),
    [
        (EvictedResource.CPU, 1234, "1.23 CPU"),
        (EvictedResource.LOAD, 2.5, "2.5 tasks"),
        (EvictedResource.MEMORY, 1536 * MI, "1.5 GiB of memory"),
        (EvictedResource.DISK, 100, "100 B of disk"),
        (EvictedResource.INODES, 1200, "1200 inodes"),
        (EvictedResource.IO, 5 * MI, "5 MiB/s of disks"),
    ],
)
def test_amounts_in_words(good: EvictedResource, value: float, words: str) -> None:
    assert format_amount(good, value) == words
