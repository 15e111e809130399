"""Groups of this machine's own kernel, for tests on it: made below one name, removed afterwards."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import Hierarchy


@contextmanager
def kernel_groups(name: str, *controllers: str) -> Iterator[tuple[Hierarchy, str]]:
    """One group in each controller's hierarchy, as ``(hierarchy, group path)``; or a skip that says what is missing."""
    try:
        hierarchy = Hierarchy.detect()
    except SourceError as exc:
        pytest.skip(f"needs this machine's cgroup controllers: {exc}")
    missing = [controller for controller in controllers if not hierarchy.writable(controller)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and writable hierarchies; missing: {', '.join(missing) or 'root'}")
    group = f"/bypassd-test-{name}-{os.getpid()}"
    directories = sorted({hierarchy.directory(controller, group) for controller in controllers})
    try:
        for directory in directories:
            os.mkdir(directory)
        yield hierarchy, group
    finally:
        for directory in directories:
            remove_tree(directory)


def remove_tree(directory: str, patience_s: float = 2.0) -> None:
    """Remove a group with all below it, waiting for processes that are just ending."""
    deadline = time.monotonic() + patience_s
    for below, _, _ in os.walk(directory, topdown=False):
        while True:
            try:
                os.rmdir(below)
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                break
