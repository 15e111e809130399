import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from reconciler.sources.allocations import Allocations
from state.checkpoint import CheckpointError, CheckpointFault
from state.kubelet import CpuManagerState, parse_cpu_manager_state
from state.model import Classification, Container, CpuPolicy, GroupRef, Pod, PodClass

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kubelet"
UID = "11111111-1111-4111-8111-111111111111"


def state(default: str, policy: CpuPolicy = CpuPolicy.STATIC, **entries: str) -> CpuManagerState:
    """``a="1"``: pod a has a container main with CPU 1."""
    return CpuManagerState(
        policy=policy,
        default_cpus=CpuSet.parse(default),
        entries={uid: {"main": CpuSet.parse(cpus)} for uid, cpus in entries.items()},
    )


def by_id(default: str, **entries: str) -> CpuManagerState:
    """As of a kubelet before 1.18: the keys are container ids."""
    return CpuManagerState(
        policy=CpuPolicy.STATIC,
        default_cpus=CpuSet.parse(default),
        entries={"": {cid: CpuSet.parse(cpus) for cid, cpus in entries.items()}},
    )


def pods(*uids: str) -> dict[str, Pod]:
    return {
        uid: Pod(
            uid=uid,
            qos=QosClass.GUARANTEED,
            group=GroupRef(path=f"/kubepods/pod{uid}"),
            containers=(Container(id=f"id{uid}", group=GroupRef(path=f"/kubepods/pod{uid}/id{uid}"), name="main"),),
            classification=Classification(pod_class=PodClass.SHARED, source="test"),
        )
        for uid in uids
    }


def broken(fault: CheckpointFault) -> CheckpointError:
    return CheckpointError(fault, "/var/lib/kubelet/cpu_manager_state", "…", "better")


def owners(known: Allocations, existing: Iterable[str] | None, now: float) -> dict[str, str]:
    view = known.view(None if existing is None else pods(*existing), now)
    return {uid: str(cpus) for uid, containers in view.exclusive.items() for cpus in containers.values()}


def begun(first: CpuManagerState, *uids: str, at: float = 0) -> Allocations:
    """They have read this, and seen these pods."""
    known = Allocations()
    known.read(first, at)
    if uids:
        known.view(pods(*uids), at)
    return known


def test_a_good_file_is_believed_at_once() -> None:
    known = begun(state("0,2-3", a="1"))
    view = known.view(pods("a"), 0, reserved=CpuSet([0]), strict_reserved=True, reasserts_s=10.0)
    assert (view.policy, view.default_cpus) == (CpuPolicy.STATIC, CpuSet([0, 2, 3]))
    assert view.exclusive == {"a": {"main": CpuSet([1])}}
    assert (view.reserved, view.strict_reserved, view.reasserts_s) == (CpuSet([0]), True, 10.0)
    assert (view.held, view.problem, known.recheck_at) == (False, None, None)


def test_nothing_read_yet_is_unknown_and_says_why() -> None:
    known = Allocations()
    assert known.view({}, 0).policy is CpuPolicy.UNKNOWN
    known.read(broken(CheckpointFault.MISSING), 1)
    view = known.view({}, 1)
    assert (view.policy, view.held) == (CpuPolicy.UNKNOWN, False)
    assert view.problem is not None
    assert "cpu_manager_state" in view.problem


@pytest.mark.parametrize("fault", CheckpointFault)
def test_no_file_that_is_no_use_shrinks_protection_while_the_pod_exists(fault: CheckpointFault) -> None:
    known = begun(state("0", a="1"), "a")
    known.read(broken(fault), 1)
    view = known.view(pods("a"), 10_000)
    assert view.exclusive == {"a": {"main": CpuSet([1])}}
    assert (view.policy, view.held, view.default_cpus) == (CpuPolicy.STATIC, True, CpuSet([0]))
    assert view.problem is not None
    known.read(state("0", a="1"), 10_001)
    assert not known.view(pods("a"), 10_001).held


def test_under_a_file_that_is_no_use_the_cgroups_still_tell_who_is_gone() -> None:
    known = begun(state("0", a="1", b="2"), "a", "b")
    known.read(broken(CheckpointFault.TORN), 1)
    assert owners(known, ["b"], 2) == {"b": "2"}


def test_an_entry_that_outlives_its_pod_no_longer_counts() -> None:
    known = begun(state("0", a="1"))
    assert owners(known, ["a"], 1) == {"a": "1"}
    view = known.view({}, 2)
    assert view.exclusive == {}
    # The kubelet has not given the CPU back to its default set, and no list shows that the pod is gone.
    assert (view.default_cpus, view.held) == (CpuSet([0]), False)


def test_the_cpus_of_a_stale_entry_are_free_when_cgroup_and_list_are_without_the_pod() -> None:
    known = begun(state("0", a="1", b="2"))
    known.view(pods("a", "b"), 0, listed={"a", "b"})
    # Its cgroup is gone, and the list is older than that: it may start again.
    view = known.view(pods("b"), 2, listed={"a", "b"})
    assert (view.default_cpus, view.exclusive) == (CpuSet([0]), {"b": {"main": CpuSet([2])}})
    assert known.view(pods("b"), 100, listed={"a", "b"}).default_cpus == CpuSet([0])
    view = known.view(pods("b"), 101, listed={"b"})
    assert (view.default_cpus, view.exclusive) == (CpuSet([0, 1]), {"b": {"main": CpuSet([2])}})
    # Its cgroup again: its CPUs are its own at once, whatever the list says.
    view = known.view(pods("a", "b"), 102, listed={"b"})
    assert (view.default_cpus, view.exclusive["a"]) == (CpuSet([0]), {"main": CpuSet([1])})


def test_without_a_list_they_are_free_after_the_confirmation_time() -> None:
    known = begun(state("0", a="1"), "a")
    assert (known.view({}, 2).default_cpus, known.recheck_at) == (CpuSet([0]), 32)
    assert known.view({}, 31.9).default_cpus == CpuSet([0])
    assert known.view({}, 32).default_cpus == CpuSet([0, 1])
    # It was there in between: the time restarts.
    assert known.view(pods("a"), 33).default_cpus == CpuSet([0])
    assert known.view({}, 34).default_cpus == CpuSet([0])


def test_a_stale_entry_frees_no_cpu_that_another_container_has() -> None:
    known = begun(state("0,3", a="1-2"), "a")
    known.read(state("0,2-3", b="1"), 1)
    assert known.view(pods("b"), 2, listed={"b"}).default_cpus == CpuSet([0, 2, 3])
    known.read(state("0,3", b="1", c="1-2"), 3)
    assert known.view(pods("b"), 100, listed={"b"}).default_cpus == CpuSet([0, 2, 3])
    # While it is not known which pods have a cgroup, nothing is free.
    assert known.view(None, 200, listed=()).default_cpus == CpuSet([0, 3])


def test_an_entry_whose_pod_was_never_seen_is_free_after_the_time_of_an_admission() -> None:
    known = begun(state("0", a="1"))
    assert known.view({}, 29, listed={"x"}).default_cpus == CpuSet([0])
    assert known.view({}, 31, listed={"a"}).default_cpus == CpuSet([0])
    assert known.view({}, 31, listed={"x"}).default_cpus == CpuSet([0, 1])


def test_an_entry_comes_before_its_pod_and_counts_but_not_for_ever() -> None:
    known = begun(state("0", a="1"), at=100)
    assert owners(known, [], 100) == {"a": "1"}
    assert known.recheck_at == 130
    assert owners(known, [], 130) == {}
    assert owners(known, ["a"], 131) == {"a": "1"}


def test_while_the_tree_is_not_known_everything_counts() -> None:
    known = begun(state("0", a="1"))
    assert owners(known, None, 10_000) == {"a": "1"}
    known.read(state("0-1"), 10_000)
    assert owners(known, None, 10_001) == {"a": "1"}


def test_an_allocation_seen_between_its_two_renames_changes_nothing_yet() -> None:
    known = begun(state("0-3"))
    known.read(state("0-2"), 10)
    view = known.view(pods(), 10)
    assert (view.default_cpus, view.held, known.recheck_at) == (CpuSet.span(4), False, 10.25)
    known.read(state("0-2", a="3"), 10.001)
    assert owners(known, [], 10.001) == {"a": "3"}
    assert known.view(pods("a"), 10.001).default_cpus == CpuSet.span(3)


def test_a_release_seen_between_its_two_renames_changes_nothing_yet() -> None:
    known = begun(state("0-2", a="3"), "a")
    known.read(state("0-2"), 10)
    assert owners(known, ["a"], 10.001) == {"a": "3"}
    known.read(state("0-3"), 10.002)
    view = known.view({}, 10.002)
    assert (view.exclusive, view.default_cpus) == ({}, CpuSet.span(4))


def test_when_the_second_rename_never_comes_the_first_counts() -> None:
    known = begun(state("0-3"))
    known.read(state("0-2"), 10)
    assert known.view(pods(), 10.25).default_cpus == CpuSet.span(3)
    known.read(state("0-1"), 20)
    known.read(state("0-1"), 20.3)
    assert known.view(pods(), 20.3).default_cpus == CpuSet.span(2)


def test_a_file_emptied_by_a_restart_does_not_take_a_running_pods_cpus() -> None:
    known = begun(state("0", a="1"), "a")
    known.restarted(99)
    known.read(state(""), 100)
    known.read(state("0-1"), 100.001)
    view = known.view(pods("a"), 101)
    assert view.exclusive == {"a": {"main": CpuSet([1])}}
    assert (view.default_cpus, view.held, known.recheck_at) == (CpuSet([0]), True, 130.001)
    assert view.problem == (
        "CPUs 1 of a/main are held: the checkpoint left them out after the kubelet's restart, but the pod still runs"
    )
    # The kubelet admits the pod again and says so itself.
    known.read(state("0", a="1"), 105)
    assert not known.view(pods("a"), 105).held


def test_what_a_good_file_leaves_out_for_long_is_given_up() -> None:
    known = begun(state("0", a="1"), "a")
    known.read(state("0-1"), 100)
    assert owners(known, ["a"], 129.9) == {"a": "1"}
    view = known.view(pods("a"), 130)
    assert (view.exclusive, view.default_cpus, view.held) == ({}, CpuSet.span(2), False)


def test_a_held_pod_that_ends_is_released_at_once() -> None:
    known = begun(state("0", a="1"), "a")
    known.read(state("0-1"), 100)
    view = known.view({}, 100)
    assert (view.exclusive, view.default_cpus, view.held) == ({}, CpuSet.span(2), False)


def test_a_held_cpu_that_the_kubelet_gives_to_another_is_the_others() -> None:
    known = begun(state("0,3", a="1-2"), "a")
    known.read(state("0,2-3", b="1"), 1)
    view = known.view(pods("a", "b"), 1)
    assert view.exclusive == {"b": {"main": CpuSet([1])}, "a": {"main": CpuSet([2])}}
    assert view.default_cpus == CpuSet([0, 3])


def test_from_static_to_none_is_careful_and_from_none_to_static_is_at_once() -> None:
    known = begun(state("0", a="1"), "a")
    known.read(state("", CpuPolicy.NONE), 100)
    view = known.view(pods("a"), 101)
    assert (view.policy, view.held, view.exclusive) == (CpuPolicy.STATIC, True, {"a": {"main": CpuSet([1])}})
    view = known.view(pods("a"), 140)
    assert (view.policy, view.held, view.exclusive) == (CpuPolicy.NONE, False, {})
    known.read(state("0-1"), 200)
    assert known.view(pods("a"), 200).policy is CpuPolicy.STATIC


def test_version_one_entries_find_their_pod_by_container_id() -> None:
    known = begun(by_id("0", ida="1", idz="2"))
    view = known.view(pods("a"), 1)
    assert view.exclusive == {"a": {"main": CpuSet([1])}, "container:idz": {"idz": CpuSet([2])}}
    assert known.view(pods("a"), 31).exclusive == {"a": {"main": CpuSet([1])}}
    known.read(by_id("0-1,2"), 32)
    assert known.view(pods("a"), 33).held
    assert known.view(pods(), 34).exclusive == {}


def test_without_a_uid_to_find_in_the_list_they_are_free_after_the_confirmation_time() -> None:
    known = begun(by_id("0", ida="1"), "a")
    assert (known.view({}, 2, listed={"x"}).default_cpus, known.recheck_at) == (CpuSet([0]), 32)
    assert known.view({}, 32, listed={"x"}).default_cpus == CpuSet.span(2)


def test_the_recorded_life_of_an_exclusive_pod_is_followed_without_a_gap() -> None:
    """The renames of a real 1.22 kubelet: allocation in two steps, removal 7 s after the cgroup was gone."""
    lines = [json.loads(line) for line in (FIXTURES / "renames.jsonl").read_text().splitlines()]
    renames = [
        (line["t"] / 1e6, line["content"])
        for line in lines
        if line["recording"] == "static-1.22" and line["name"] == "cpu_manager_state"
    ]
    assert len(renames) >= 4
    known = Allocations()
    seen: list[tuple[str, str]] = []
    for at, content in renames:
        known.read(parse_cpu_manager_state(content.encode()), at)
        view = known.view(pods(UID), at)
        assert not view.held or view.exclusive
        seen.append(
            (str(view.default_cpus), ",".join(str(cpus) for c in view.exclusive.values() for cpus in c.values()))
        )
    assert ("0", "1") in seen
    before = seen.index(("0", "1"))
    assert all(owned == "1" for _, owned in seen[before:]), "the pod exists all the time here: it is never unprotected"
    assert all(owned == "" and default in {"", "0-1"} for default, owned in seen[:before])


CPUS = st.sets(st.integers(0, 7)).map(CpuSet)
READINGS = st.one_of(
    st.sampled_from(CheckpointFault).map(broken),
    st.builds(
        lambda default, a, b, policy: CpuManagerState(
            policy=policy,
            default_cpus=default - a - b,
            entries={uid: {"main": cpus} for uid, cpus in (("a", a), ("b", b - a)) if cpus},
        ),
        CPUS,
        CPUS,
        CPUS,
        st.sampled_from([CpuPolicy.STATIC, CpuPolicy.NONE]),
    ),
)


@given(st.lists(st.tuples(READINGS, st.sampled_from([0.001, 0.3, 5.0])), max_size=12))
def test_whatever_is_read_a_running_pod_keeps_its_cpus_for_the_confirmation_time(
    readings: list[tuple[CheckpointError | CpuManagerState, float]],
) -> None:
    known = begun(state("0-6", a="7"), "a", "b")
    now = 0.0
    for result, later in readings:
        if now + later >= 30:
            break
        now += later
        known.read(result, now)
        view = known.view(pods("a", "b"), now)
        parts = [cpus for containers in view.exclusive.values() for cpus in containers.values()]
        union = EMPTY
        for cpus in (*parts, view.default_cpus):
            assert not union & cpus, "no CPU has two places"
            union |= cpus
        named = isinstance(result, CpuManagerState) and {"a", "b"} & result.entries.keys()
        if not named and "a" not in view.exclusive:
            # Only another owner's claim may have ended it.
            assert view.exclusive.keys() <= {"b"}
            assert view.exclusive
