import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from cgroupfs.attribution import ObservedWrite, WriterKind, WriterProcess
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.cgroup.conflict import WriteAttribution
from reconciler.runtime.workqueue import DirtyKeys, files_key
from tests.reconciler.actuators.acting import GROUP, POD, UID, make_node


class Told:
    """A watch whose kernel has reported something that its reader has not been scheduled to read."""

    problem = None

    def __init__(self) -> None:
        self.told: list[ObservedWrite] = []
        self.followed: list[tuple[str, str]] = []

    def follow(self, directory: str, group: str) -> None:
        self.followed.append((directory, group))

    def forget(self, directory: str, group: str) -> None:
        self.followed.remove((directory, group))

    async def next_batch(self) -> Sequence[ObservedWrite]:
        await trio.sleep_forever()
        raise AssertionError

    def take(self) -> Sequence[ObservedWrite]:
        writes, self.told = self.told, []
        return writes

    def close(self) -> None: ...


def attribution(hierarchy: Hierarchy, dirty: DirtyKeys, watch: Told, *, ours: bool = True) -> WriteAttribution:
    return WriteAttribution(
        hierarchy, dirty, kubepods="/kubepods", owner=lambda _: UID, ours=lambda _: ours, watch=lambda *_, **__: watch
    )


async def test_a_writer_is_known_as_soon_as_the_kernel_has_told_it(tmp_path: Path, nursery: trio.Nursery) -> None:
    _, hierarchy = make_node(tmp_path)
    watch, dirty = Told(), DirtyKeys()
    witness = attribution(hierarchy, dirty, watch)
    directory = hierarchy.directory("cpu", GROUP)
    assert witness.last_writer(directory, "cpu.shares") is None
    await nursery.start(witness.run)
    runc = WriterProcess(kind=WriterKind.RUNTIME, pid=5, name="runc")
    watch.told.append(ObservedWrite(directory.removesuffix(GROUP), GROUP, "cpu.shares", runc))
    assert witness.last_writer(directory, "cpu.shares") == ("runtime", str(runc))
    assert (witness.writes, set(dirty.take_nowait().keys)) == (1, {files_key(UID)})
    assert witness.last_writer(directory, "cpu.shares") == ("runtime", str(runc))


async def test_a_person_who_wrote_is_described_in_the_log_once(
    tmp_path: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    """From the kernel's event to the log: name, command, user and age, which are gone when the process ends."""
    caplog.set_level(logging.INFO)
    _, hierarchy = make_node(tmp_path)
    watch = Told()
    witness = attribution(hierarchy, DirtyKeys(), watch)
    directory = hierarchy.directory("cpu", GROUP)
    await nursery.start(witness.run)
    for kind in (WriterKind.RUNTIME, WriterKind.PERSON, WriterKind.PERSON):
        writer = WriterProcess(kind=kind, pid=os.getpid(), name="vim")
        watch.told.append(ObservedWrite(directory.removesuffix(GROUP), GROUP, "cpu.shares", writer))
    assert witness.last_writer(directory, "cpu.shares") == ("person", str(writer))
    (record,) = caplog.records
    fields: Any = vars(record)["fields"]
    assert record.getMessage() == "written by a person"
    assert (fields["path"], fields["file"]) == (GROUP, "cpu.shares")
    assert (fields["pid"], fields["uid"]) == (os.getpid(), os.getuid())
    assert fields["command"]
    assert fields["age_s"] > 0


async def test_a_group_is_followed_in_every_hierarchy_until_it_is_forgotten_with_its_writers(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    _, hierarchy = make_node(tmp_path)
    watch = Told()
    witness = attribution(hierarchy, DirtyKeys(), watch)
    witness.follow(GROUP)
    assert watch.followed == [], "there is no watch yet"
    await nursery.start(witness.run)
    witness.follow(POD)
    mounts = [mount.directory for mount in hierarchy.mounts()]
    assert watch.followed == [(directory, path) for path in (GROUP, POD) for directory in mounts]
    runc = WriterProcess(kind=WriterKind.RUNTIME, pid=5, name="runc")
    directories = [hierarchy.directory("cpu", path) for path in (GROUP, POD)]
    base = directories[0].removesuffix(GROUP)
    watch.told += [ObservedWrite(base, path, "cpu.shares", runc) for path in (GROUP, POD)]
    assert [witness.last_writer(directory, "cpu.shares") is not None for directory in directories] == [True, True]
    for _ in range(2):
        witness.forget(GROUP)
        assert watch.followed == [(directory, POD) for directory in mounts]
    assert [witness.last_writer(directory, "cpu.shares") is not None for directory in directories] == [False, True]


async def test_bounds_that_another_program_writes_are_counted_in_groups_that_are_not_managed_too(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    _, hierarchy = make_node(tmp_path)
    watch = Told()
    witness = attribution(hierarchy, DirtyKeys(), watch, ours=False)
    await nursery.start(witness.run)
    directory = hierarchy.directory("cpu", GROUP)
    for kind, pid, file, counted in (
        (WriterKind.PERSON, 5, "cpu.cfs_quota_us", 1),
        (WriterKind.OTHER, 5, "cpu.max", 2),
        (WriterKind.UNKNOWN, 5, "memory.limit_in_bytes", 3),
        (WriterKind.SYSTEMD, 1, "cpuset.cpus", 4),
        (WriterKind.RUNTIME, 5, "cpu.cfs_quota_us", 4),
        (WriterKind.KUBELET, 5, "cpuset.cpus", 4),
        (WriterKind.OTHER, 5, "cpu.shares", 4),
        (WriterKind.UNKNOWN, 0, "cpu.cfs_quota_us", 4),
    ):
        writer = WriterProcess(kind=kind, pid=pid)
        watch.told.append(ObservedWrite(directory.removesuffix(GROUP), GROUP, file, writer))
        witness.last_writer(directory, file)
        assert witness.bounds_written == counted, (kind, file)
