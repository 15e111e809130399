"""Which cgroups a host workload's entry names: never one of the pods, and a fair share for each entry."""

import json
import os
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.files import REAL
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals import host_groups
from reconciler.signals.host_config import parse_match
from reconciler.signals.host_groups import (
    HostGroupFinder,
    HostGroupsFound,
    fair_shares,
    outermost,
    read_docker_container,
)
from tests.reconciler.signals.podtree import Tree

CID = "ab" * 32


def find(tree: Tree, kubepods: str = "/kubepods", **entries: str) -> dict[str, HostGroupsFound]:
    finder = HostGroupFinder(tree.hierarchy, kubepods, REAL, str(tree.root))

    async def run() -> dict[str, HostGroupsFound]:
        return await finder.find({name: parse_match(text) for name, text in entries.items()}, TimeSlice())

    return trio.run(run)


def docker_file(tree: Tree, content: bytes) -> None:
    config = tree.root / "var/lib/docker/containers" / CID / "config.v2.json"
    config.parent.mkdir(parents=True)
    config.write_bytes(content)


def paths(found: HostGroupsFound) -> list[str]:
    return [group.path for group in found.groups]


@pytest.mark.parametrize(("version", "unified"), [(1, False), (1, True), (2, False)])
def test_units_are_found_in_slices_and_never_inside_of_a_unit(tmp_path: Path, version: int, unified: bool) -> None:
    tree = Tree(tmp_path, version, unified=unified)
    for path in (
        "/system.slice/db@main.service",
        "/system.slice/system-db.slice/db@two.service",
        # A user's own units, in a subtree that is his.
        "/user.slice/user-7.slice/user@7.service/app.slice/db@mine.service",
        "/kubepods/burstable/poda/db@pod.service",
    ):
        tree.group(path)
    found = find(tree, db="unit:db@*", user="unit:user@*.service", none="unit:absent")
    assert paths(found["db"]) == [
        "/system.slice/db@main.service",
        "/system.slice/system-db.slice/db@two.service",
    ]
    assert paths(found["user"]) == ["/user.slice/user-7.slice/user@7.service"]
    assert found["none"] == ((), 0)


def test_on_v1_a_unit_without_cpu_accounting_is_found_in_systemds_own_hierarchy(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 1, unified=True)
    only = tree.hierarchy.directory("unified", "/system.slice/db.service")
    os.makedirs(only)
    (group,) = find(tree, db="unit:db")["db"].groups
    assert group == ("/system.slice/db.service", only, os.stat(only).st_ino)


def test_a_path_has_globs_in_its_parts_and_pods_are_left_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for path in ("/batch/job-1/a", "/batch/job-2/a", "/batch/job-2/b", "/kubepods/burstable/podx", "/other"):
        tree.group(path)
    found = find(tree, jobs="cgroup:/batch/job-*/a", all="cgroup:/*", pods="cgroup:/kubepods/*", pod="cgroup:/kubepods")
    assert paths(found["jobs"]) == ["/batch/job-1/a", "/batch/job-2/a"]
    assert paths(found["all"]) == ["/batch", "/other"]
    assert found["pods"] == found["pod"] == ((), 0)


def test_pods_are_those_of_the_kubelets_own_tree_and_not_of_a_name(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for path in ("/kube.slice/kubepods.slice/pod1", "/user.slice/kubepods/pod1", "/kubepods/pod1"):
        tree.group(path)
    found = find(tree, kubepods="/kube.slice/kubepods.slice", all="cgroup:/*/*", above="cgroup:/kube.slice")
    assert paths(found["all"]) == ["/kubepods/pod1", "/user.slice/kubepods"]
    assert found["above"] == ((), 0)


def test_containers_of_docker_are_found_by_id_or_by_the_name_in_dockers_file(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    other, scope = "cd" * 32, "ef" * 32
    for path in (f"/docker/{CID}", f"/docker/{other}", f"/system.slice/docker-{scope}.scope", "/docker/buildx"):
        tree.group(path)
    # Not one of the two places of docker: a user's.
    tree.group(f"/user.slice/docker-{'12' * 32}.scope")
    docker_file(tree, json.dumps({"ID": CID, "Name": "/web-1", "Config": {"Labels": {"app/name": "front-2"}}}).encode())
    every = [f"/docker/{CID}", f"/docker/{other}", f"/system.slice/docker-{scope}.scope"]
    for text, expected in (
        ("web-*", every[:1]),
        ("*", every),
        (other[:12], every[1:2]),
        ("app/name=front-*", every[:1]),
        ("app/name=back", []),
    ):
        assert paths(find(tree, entry=f"docker:{text}")["entry"]) == expected


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"Name": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_of_docker_names_nothing(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError):
        read_docker_container(content)
    tree = Tree(tmp_path)
    tree.group(f"/docker/{CID}")
    docker_file(tree, content)
    assert find(tree, web="docker:web")["web"] == ((), 0)


def test_a_broad_entry_before_others_leaves_them_their_share(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for number in range(400):
        tree.group(f"/a/many-{number}")
    tree.group("/z/one")
    found = find(tree, broad="cgroup:/a/*", late="cgroup:/z/*")
    assert found["broad"].matched == 400
    assert len(found["broad"].groups) == host_groups.MOST - 1
    assert paths(found["late"]) == ["/z/one"]


def test_the_walk_is_bounded_and_the_bound_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_groups, "_LISTINGS", 40)
    tree = Tree(tmp_path, 2)
    for number in range(60):
        tree.group(f"/a/{number:02}/x")
    tree.group("/z/one")
    found = find(tree, deep="cgroup:/a/*/*", late="cgroup:/z/*")
    # Of 40 listings 20 are this entry's, and the first of them is of /a.
    assert found["deep"].matched == 19
    assert paths(found["late"]) == ["/z/one"]


def test_a_group_that_is_made_again_is_another_one(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.group("/batch")
    (before,) = find(tree, batch="cgroup:/batch")["batch"].groups
    finder = HostGroupFinder(tree.hierarchy, "/kubepods", REAL)
    assert finder.is_same(before)
    os.rename(before.directory, f"{before.directory}-old")
    assert not finder.is_same(before)
    os.mkdir(before.directory)
    assert not finder.is_same(before)


@given(st.dictionaries(st.text("abc", max_size=3), st.integers(0, 300), max_size=20), st.integers(0, 300))
def test_shares_are_fair_whatever_is_wanted(wanted: dict[str, int], most: int) -> None:
    shares = fair_shares(wanted, most)
    assert sum(shares.values()) == min(most, sum(wanted.values()))
    least = min((share for name, share in shares.items() if share < wanted[name]), default=None)
    assert all(share <= wanted[name] for name, share in shares.items())
    assert least is None or all(share <= least + 1 for share in shares.values())


def test_a_group_inside_another_one_of_its_entry_is_in_its_numbers_already(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for path in ("/user.slice/user-7.slice", "/user.slice/user-8.slice", "/userland.slice"):
        tree.group(path)
    found = find(tree, users="unit:user*.slice", seven="unit:user-7.slice")
    assert (paths(found["users"]), found["users"].matched) == (["/user.slice", "/userland.slice"], 2)
    assert paths(found["seven"]) == ["/user.slice/user-7.slice"]


def test_of_groups_inside_each_other_the_outermost_counts() -> None:
    assert outermost(["/a/b", "/a", "/ab", "/a/b/c"]) == ["/a", "/ab"]
