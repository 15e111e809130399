import pytest

from reconciler.actuators.cgroup.work import Found, Move, compare
from state.entry import US, Entry


def entry(writer: str) -> Entry:
    return Entry(controller="cpu", path="/p", file="cpu.shares", knob="cpu.weight", writer=writer)


@pytest.mark.parametrize(
    ("known", "actual", "wanted", "seen", "restore", "move"),
    [
        (None, "2", "2", None, None, Move.NOTHING),
        (None, "1024", "2", None, None, Move.FIRST),
        (None, "1024", None, None, None, Move.NOTHING),
        (US, "2", "2", "2", "1024", Move.NOTHING),
        (US, "2", "10", "2", "1024", Move.CHANGE),
        (US, "50", "2", "2", "1024", Move.FOREIGN),
        (US, "2", None, "2", "1024", Move.RELEASE),
        (US, "2", None, "2", None, Move.STUCK),
        (US, "2", None, "2", "2", Move.DROP),
        (US, "50", None, "2", "1024", Move.DROP),
        # Recorded, not yet written: the runtime may have written in between, that is no fight.
        ("", "1024", "2", None, "1024", Move.CHANGE),
        ("", "512", "2", None, "1024", Move.CHANGE),
        ("", "1024", None, None, "1024", Move.DROP),
        # Their value was noted before and still stands.
        ("kubelet", "50", "2", "50", "1024", Move.FOREIGN),
        ("kubelet", "2", "2", "50", "1024", Move.NOTHING),
        ("kubelet", "50", None, "50", "1024", Move.DROP),
    ],
)
def test_one_file_needs(
    known: str | None, actual: str, wanted: str | None, seen: str | None, restore: str | None, move: Move
) -> None:
    found = Found(actual=actual, wanted=wanted, seen=seen, restore=restore)
    assert compare(None if known is None else entry(known), found) is move
