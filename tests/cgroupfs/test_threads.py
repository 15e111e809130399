"""The threads of groups that a tenant has made."""

import os
from pathlib import Path

from cgroupfs.files import REAL
from cgroupfs.threads import threads_below


def test_groups_nested_too_deeply_for_a_path_are_said_to_be_missing_and_the_others_listed(tmp_path: Path) -> None:
    """The threads of the container itself would have no cookie otherwise."""
    (tmp_path / "tasks").write_text("7\n")
    number = os.open(tmp_path, os.O_RDONLY)
    for level in range(20):
        os.mkdir("n" * 250, dir_fd=number)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=number)
        os.close(number)
        number = below
        file = os.open("tasks", os.O_CREAT | os.O_WRONLY, dir_fd=number)
        os.write(file, f"{100 + level}\n".encode())
        os.close(file)
    os.close(number)
    listed = threads_below(str(tmp_path), "tasks", REAL)
    assert {7, 100} <= listed.ids < {7, *range(100, 120)}
    assert listed.missing == "groups in it are nested too deeply to be listed"
