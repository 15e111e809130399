"""The threads of a container and of the groups that its tenant has made in it."""

import errno

import pytest

from cgroupfs.files import RealFiles
from reconciler.actuators.core_sched.tasks import observe


class NestedGroups(RealFiles):
    """Groups ``/g/g/...`` to a depth, each with the thread of its depth. ``error``: of the deepest one's list."""

    def __init__(self, depth: int, error: int = 0) -> None:
        self.depth = depth
        self.error = error

    def read(self, directory: str, file: str) -> str:
        depth = directory.count("/")
        if self.error and depth == self.depth:
            raise OSError(self.error, "refused")
        return f"{depth}\n"

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return ["g"] if directory.count("/") < self.depth else []


class NoCookies:
    def get(self, tid: int) -> int:
        return 0

    def create(self) -> None: ...

    def share_from(self, tid: int) -> None: ...

    def share_to(self, tid: int) -> None: ...


def test_a_tenants_groups_may_be_nested_as_deep_as_a_path_allows() -> None:
    """Names of one letter fit a path of 4,096 bytes some 2,000 times: no reading is as deep as its call stack."""
    threads = observe([("box", "/g")], "tasks", NoCookies(), NestedGroups(2000))["box"]
    assert (len(threads.threads), threads.problem) == (2000, "")


@pytest.mark.parametrize(
    ("error", "seen", "problem"),
    [
        (errno.ENODEV, {1: 0, 2: 0}, ""),
        (errno.EACCES, {}, "cannot list its threads: refused"),
        (errno.ENAMETOOLONG, {1: 0, 2: 0}, "groups in it are nested too deeply to be listed"),
    ],
)
def test_a_group_inside_may_be_removed_meanwhile_but_not_unreadable(
    error: int, seen: dict[int, int], problem: str
) -> None:
    threads = observe([("box", "/g")], "tasks", NoCookies(), NestedGroups(3, error))["box"]
    assert (threads.threads, threads.problem) == (seen, problem)


def test_of_a_tenants_groups_without_number_some_are_read_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconciler.actuators.core_sched.tasks.MOST_GROUPS", 20)
    threads = observe([("box", "/g")], "tasks", NoCookies(), NestedGroups(2000))["box"]
    assert (len(threads.threads), threads.problem) == (21, "only the threads of 20 groups in it are listed")
