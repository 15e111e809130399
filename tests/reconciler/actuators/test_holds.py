import pytest

from cgroupfs.errors import InputError
from reconciler.actuators.holds import active, check_target, file_target, group_of, holding, pod_hold
from state.model import Hold


def test_only_holds_whose_time_has_not_come_are_in_force() -> None:
    holds = [
        Hold(target="node", reason="r", by="me", until=10),
        Hold(target="pod:u", reason="r", by="me"),
    ]
    assert set(active(holds, 9.9)) == {"node", "pod:u"}
    assert set(active(holds, 10)) == {"pod:u"}


@pytest.mark.parametrize(
    ("target", "covered"),
    [
        ("node", True),
        ("pod:u", True),
        ("pod:v", False),
        ("knob:cpu.set", True),
        ("knob:cpu.quota", False),
        ("file:/kubepods/podu/c", True),
        ("file:/kubepods/podu", False),
        ("file:/kubepods/podu/c:cpu.set", True),
        ("file:/kubepods/podu/c:cpu.weight", False),
    ],
)
def test_a_hold_covers_its_target_and_nothing_else(target: str, covered: bool) -> None:
    holds = active([Hold(target=target, reason="r", by="me")], 0)
    hold = holding(holds, path="/kubepods/podu/c", knob="cpu.set", pod_uid="u")
    assert (hold is not None) is covered


@pytest.mark.parametrize(
    ("target", "covered"),
    [
        ("node", True),
        ("pod:u", True),
        ("pod:v", False),
        ("knob:cpu.set", False),
        ("file:/kubepods/podu", True),
        ("file:/kubepods/podu/c", True),
        ("file:/kubepods/podv", False),
        ("file:/kubepods/podu:cpu.set", False),
    ],
)
def test_a_pod_is_held_as_a_whole_by_what_covers_all_of_it(target: str, covered: bool) -> None:
    holds = active([Hold(target=target, reason="r", by="me")], 0)
    assert (pod_hold(holds, "u", ("/kubepods/podu", "/kubepods/podu/c")) is not None) is covered
    assert (pod_hold(holds) is not None) is (target == "node")


@pytest.mark.parametrize("target", ["", "pods:u", "pod:", "knob:cpu.sett", "nodes"])
def test_a_target_that_is_none_is_refused_with_what_it_may_be(target: str) -> None:
    with pytest.raises(InputError, match="hold target"):
        check_target(target)


def test_each_kind_of_target_is_accepted() -> None:
    for target in ("node", "pod:u", "knob:memory.max", "file:/x", "file:/x:cpu.set"):
        assert check_target(target) == target


def test_a_file_target_names_its_group() -> None:
    assert group_of("file:/kubepods/podu") == "/kubepods/podu"
    assert group_of(file_target("/kubepods/podu", "cpu.set")) == "/kubepods/podu"
    assert group_of("pod:u") is None


@pytest.mark.parametrize("knob", ["memory.reclaim", "capacity"])
def test_what_an_actuator_obeys_may_be_held_though_it_is_no_setting(knob: str) -> None:
    assert check_target(f"knob:{knob}") == f"knob:{knob}"
    assert group_of(file_target("/kubepods/podu", knob)) == "/kubepods/podu"
