"""The questions that the state of a setting answers, for every state; none of them is a guess."""

import subprocess
import sys

import pytest

from state.setting_state import SettingState

IN_FORCE = {"in place", "written"}
SETTLED = {*IN_FORCE, "prepared"}
LEFT = {"held", "yielded", "waiting"}
FAILING = {"refused", "unreadable", "not recorded", "blocked"}


@pytest.mark.parametrize("state", SettingState)
def test_every_state_answers(state: SettingState) -> None:
    assert state.is_in_force() is (state in IN_FORCE)
    assert state.is_settled() is (state in SETTLED)
    assert state.is_left_to_others() is (state in LEFT)
    assert state.is_waiting() is (state in {"waiting", "yielded"})
    assert state.is_failing() is (state in FAILING)
    assert state.is_absent() is (state in {"missing", "gone"})


def test_a_text_of_another_version_is_unknown_and_so_never_fine() -> None:
    state = SettingState("half done")
    assert state is SettingState.UNKNOWN
    assert {state.is_settled(), state.is_left_to_others(), state.is_absent()} == {False}


def test_the_command_line_asks_without_loading_the_daemon() -> None:
    program = "import sys, reconciler.cli.diff; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not {"trio", "sqlite3"} & set(loaded)
