"""Real cgroup directories for tests: made under a name of their own, and always removed."""

import os
from pathlib import Path

import pytest


def mount_of(controller: str) -> str:
    """Where a v1 controller is mounted here, from mountinfo; skips the test, loudly, where it is not."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup" and controller in options.replace(" ", ",").split(","):
            return before.split(" ")[4]
    pytest.skip(f"REAL KERNEL TEST NOT RUN: no cgroup v1 {controller} hierarchy is mounted")


def make_root(controller: str, name: str) -> str:
    """An empty group ``/bypassd-test-<name>`` in one hierarchy; skips, loudly, where it may not be made."""
    path = f"{mount_of(controller)}/bypassd-test-{name}"
    if os.path.isdir(path):
        remove_tree(path)
    try:
        os.mkdir(path)
    except OSError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: cannot make {path}: {exc.strerror}")
    return path


def remove_tree(path: str) -> None:
    """Remove a group and every group below it."""
    if not os.path.isdir(path):
        return
    for child in os.scandir(path):
        if child.is_dir(follow_symlinks=False):
            remove_tree(child.path)
    os.rmdir(path)
