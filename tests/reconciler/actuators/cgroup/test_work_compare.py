import pytest

from reconciler.actuators.cgroup.compare import FileAction, FileState, compare
from state.entry import US, LedgerEntry


def entry(writer: str) -> LedgerEntry:
    return LedgerEntry(controller="cpu", path="/p", file="cpu.shares", knob="cpu.weight", writer=writer)


@pytest.mark.parametrize(
    ("known", "actual", "wanted", "seen", "restore", "move"),
    [
        (None, "2", "2", None, None, FileAction.NOTHING),
        (None, "1024", "2", None, None, FileAction.FIRST),
        (None, "1024", None, None, None, FileAction.NOTHING),
        (US, "2", "2", "2", "1024", FileAction.NOTHING),
        (US, "2", "10", "2", "1024", FileAction.CHANGE),
        (US, "50", "2", "2", "1024", FileAction.FOREIGN),
        (US, "2", None, "2", "1024", FileAction.RELEASE),
        (US, "2", None, "2", None, FileAction.UNRECOVERABLE),
        (US, "2", None, "2", "2", FileAction.DROP),
        (US, "50", None, "2", "1024", FileAction.DROP),
        # Recorded, not yet written: the runtime may have written in between, that is no fight.
        ("", "1024", "2", None, "1024", FileAction.CHANGE),
        ("", "512", "2", None, "1024", FileAction.CHANGE),
        ("", "1024", None, None, "1024", FileAction.DROP),
        # Their value was noted before and is still in force.
        ("kubelet", "50", "2", "50", "1024", FileAction.FOREIGN),
        ("kubelet", "2", "2", "50", "1024", FileAction.NOTHING),
        ("kubelet", "50", None, "50", "1024", FileAction.DROP),
    ],
)
def test_one_file_needs(
    known: str | None, actual: str, wanted: str | None, seen: str | None, restore: str | None, move: FileAction
) -> None:
    file_state = FileState(actual=actual, wanted=wanted, seen=seen, restore=restore)
    assert compare(None if known is None else entry(known), file_state) is move
