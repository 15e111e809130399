"""When new containers are read again."""

import math

import pytest

from reconciler.actuators.processes.early_sweeps import EarlySweeps
from state.model import GroupRef

ONE, TWO = GroupRef(path="/one", inode=1), GroupRef(path="/two", inode=2)


def test_each_new_container_has_its_own_sweeps() -> None:
    early = EarlySweeps((1.0, 3.0))
    early.follow({ONE: True}, 10.0)
    assert early.next_at() == 11.0
    early.follow({ONE: True, TWO: True}, 10.5)
    assert (early.take(10.9), early.take(11.0), early.take(11.0)) == (set(), {"/one"}, set())
    assert early.next_at() == 11.5
    assert early.take(13.2) == {"/one", "/two"}
    assert (early.next_at(), early.take(20.0)) == (13.5, {"/two"})
    assert early.next_at() == math.inf


def test_several_that_have_passed_are_one() -> None:
    early = EarlySweeps((1.0, 2.0, 3.0))
    early.follow({ONE: True}, 0.0)
    assert (early.take(2.5), early.next_at()) == ({"/one"}, 3.0)


@pytest.mark.parametrize(
    ("later", "at"),
    [
        pytest.param({}, math.inf, id="gone"),
        pytest.param({ONE: True}, 1.0, id="the same"),
        pytest.param({ONE: False}, 1.0, id="seen before: it keeps its sweeps"),
        pytest.param({GroupRef(path="/one", inode=9): True}, 1.5, id="made again under its name"),
        pytest.param({ONE: True, TWO: False}, 1.0, id="another one that needs none"),
    ],
)
def test_which_containers_have_sweeps(later: dict[GroupRef, bool], at: float) -> None:
    early = EarlySweeps((1.0,))
    early.follow({ONE: True}, 0.0)
    early.follow(later, 0.5)
    assert early.next_at() == at
