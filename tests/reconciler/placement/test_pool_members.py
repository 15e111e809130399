"""The pool of each online pod, its node, and its request."""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.pool_members import DEFAULT, bound_nodes, members
from state.cpu import CpuPreferences
from state.model import ContainerKind, Pod, PodClass, Resources, RuntimeSpec
from state.topology import uniform
from tests.reconciler.nodes import container, cpus, pod

TWO = uniform(sockets=2, nodes=2, cores=8, threads=1)
ALL = CpuSet.span(8)


def asking(uid: str, milli: int = 1000, cls: PodClass = PodClass.SHARED, **wish: object) -> Pod:
    item = pod(uid, container("main", requests=Resources(cpu_milli=milli)), cls=cls)
    return replace(item, wish=CpuPreferences(**wish))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "pool"),
    [
        (asking("a"), None),
        (asking("a", pool="share"), None),
        (asking("a", pool="batch"), "shared/batch"),
        (asking("a", pool="batch", numa_binding=True, nodes=(1,)), "shared/batch-NUMA1"),
        (asking("a", numa_binding=True, nodes=(1,)), "shared/share-NUMA1"),
        (asking("a", numa_binding=True, nodes=(1, 0)), "shared/share-NUMA0+1"),
        (asking("a", numa_binding=True, nodes=(1, 7)), "shared/share-NUMA1"),
        (asking("a", numa_binding=True), "shared/share-NUMA0"),
        (asking("a", numa_binding=True, nodes=(7,)), "shared/share-NUMA0"),
        (asking("a", cls=PodClass.SYSTEM), None),
        (asking("a", cls=PodClass.SYSTEM, pool="agents"), "system/agents"),
        (asking("a", cls=PodClass.RECLAIMED, pool="batch"), None),
        (asking("a", cls=PodClass.DEDICATED, pool="batch"), None),
        (asking("a", cls=PodClass.DEDICATED, numa_binding=True), "shared/share-NUMA0"),
    ],
    ids=str,
)
def test_the_pool_of_a_pod(one: Pod, pool: str | None) -> None:
    result = members({"a": one}, ALL, TWO, {})
    assert result.bound.get("a") == pool
    if pool is not None:
        assert [each.uid for each in result.pods[pool]] == ["a"]
    assert next(iter(result.pods)) == DEFAULT


def test_pods_bound_to_no_node_yet_go_where_the_least_is_asked_for() -> None:
    pods = {uid: asking(uid, milli, numa_binding=True) for uid, milli in (("a", 3000), ("b", 1000), ("c", 1000))}
    result = members(pods, ALL, TWO, {})
    assert result.bound == {"a": "shared/share-NUMA0", "b": "shared/share-NUMA1", "c": "shared/share-NUMA1"}
    assert result.nodes == {"shared/share-NUMA0": (0,), "shared/share-NUMA1": (1,)}


def test_a_pod_stays_on_its_node_whatever_comes_later() -> None:
    pods = {uid: asking(uid, numa_binding=True) for uid in ("a", "b")}
    assert members(pods, ALL, TWO, {"b": "shared/share-NUMA0"}).bound == {
        "a": "shared/share-NUMA1",
        "b": "shared/share-NUMA0",
    }


@pytest.mark.parametrize(
    ("first", "second", "owner", "expected"),
    [
        ({}, {}, None, "0 1"),
        ({"milli": 500}, {"milli": 500}, 0, "0 1"),
        ({"milli": 500}, {"numa_share": False}, None, "0 1"),
        ({"numa_share": False, "milli": 1}, {"milli": 1000}, None, "0 1"),
        ({"numa_share": False, "milli": 1}, {"milli": 1000, "nodes": (0,)}, None, "1 0"),
        ({"milli": 1}, {"milli": 1}, 0, "0 1"),
        ({"numa_share": False}, {}, 0, "1 0"),
    ],
    ids=["load", "owners that do not mind", "wants no company", "has none", "decided", "an owner", "off an owner"],
)
def test_pods_that_share_their_node_with_no_other_bound_one(
    first: dict[str, Any], second: dict[str, Any], owner: int | None, expected: str
) -> None:
    pods = {uid: asking(uid, numa_binding=True, **more) for uid, more in (("a", first), ("b", second))}
    owners = {}
    if owner is not None:
        pods["own"] = asking("own", cls=PodClass.DEDICATED, numa_binding=True)
        owners["own"] = CpuSet((owner,))
    result = members(pods, ALL, TWO, {}, owners)
    assert " ".join(result.bound[uid][-1] for uid in "ab") == expected
    assert bound_nodes({**result.bound, "c": "shared/batch", "d": "shared/x-NUMA"}) == {
        uid: CpuSet((int(result.bound[uid][-1]),)) for uid in "ab"
    }


def test_a_node_that_is_not_to_be_shared_is_taken_when_there_is_no_other() -> None:
    pods = {"a": asking("a", numa_binding=True, numa_share=False), "b": asking("b", numa_binding=True)}
    assert set(members(pods, cpus("0-3"), TWO, {}).bound.values()) == {"shared/share-NUMA0"}


def test_a_node_without_free_cpus_is_none() -> None:
    result = members({"a": asking("a", numa_binding=True, nodes=(0,))}, cpus("4-7"), TWO, {"a": "shared/share-NUMA0"})
    assert result.bound == {"a": "shared/share-NUMA1"}


def test_who_owns_cpus_is_in_no_pool() -> None:
    pods = {uid: asking(uid, cls=PodClass.DEDICATED) for uid in ("a", "b")}
    assert [item.uid for item in members(pods, ALL, TWO, {}, {"a": cpus("0")}).pods[DEFAULT]] == ["b"]


def test_a_pod_asks_for_what_its_app_containers_ask_for() -> None:
    item = pod(
        "a",
        container("init", kind=ContainerKind.INIT, requests=Resources(cpu_milli=9000)),
        container("main", requests=Resources(cpu_milli=1500)),
        container("told-by-shares", spec=RuntimeSpec(shares=512)),
        container("pause", kind=ContainerKind.SANDBOX, spec=RuntimeSpec(shares=1024)),
    )
    assert item.request_milli == 2000


@pytest.mark.parametrize("milli", [10, 100, 333, 1000, 1001, 1500, 63_999])
def test_a_request_is_found_again_in_the_shares_that_the_kubelet_makes_of_it(milli: int) -> None:
    assert container("main", spec=RuntimeSpec(shares=milli * 1024 // 1000)).request_milli == milli


def test_the_least_shares_tell_of_no_request() -> None:
    assert container("main", spec=RuntimeSpec(shares=2)).request_milli is None
