"""Many processes of one pod: little work for each, and turns for others meanwhile."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cgroupfs.subtree import Subtree, SubtreeGroup
from reconciler.responses.means.processes import PodTermination

MANY = 1500
FIRST = 100_000_000  # more than any kernel has: a mistake reaches no process


@pytest.mark.parametrize(("descriptors", "listings"), [(65536, 2), (1024, 1 + -(-MANY // 64))])
async def test_a_group_is_listed_again_for_many_processes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: int, listings: int
) -> None:
    group, proc = tmp_path / "group", tmp_path / "proc"
    group.mkdir()
    pids = range(FIRST, FIRST + MANY)
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    for pid in pids:
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(f"{pid} (x) S 1 {'0 ' * 17}77 {'0 ' * 10}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    sent, listed, turns, real = list[int](), 0, 0, SubtreeGroup.pids
    monkeypatch.setattr(os, "kill", lambda pid, _: sent.append(pid))

    def counted(group: SubtreeGroup) -> Iterator[int]:
        nonlocal listed
        listed += 1
        return real(group)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(SubtreeGroup, "pids", counted)
    ours = PodTermination(str(proc))
    ours._pidfd = False
    with Subtree({"": (os.open(group, os.O_RDONLY), 2)}) as tree:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            assert await ours.signal(tree, signal.SIGTERM) == MANY
            nursery.cancel_scope.cancel()
    assert sorted(sent) == list(pids)
    assert listed == listings
    # Each process takes three reads of 10 µs or more: of a slice that is more than one turn for 40 of them.
    assert turns > MANY // 64 + 2
