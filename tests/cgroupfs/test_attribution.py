import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cgroupfs import attribution
from cgroupfs.attribution import FanotifyWatch, InotifyWrites, ObservedWrite, WriterKind, WriteWatch, watch_writes
from cgroupfs.errors import SourceError
from tests.real_cgroups import make_root, mount_of, remove_tree

pytestmark = pytest.mark.kernel
GROUP = "/bypassd-test-watch"


@pytest.fixture
def cpu() -> Iterator[str]:
    path = make_root("cpu", "watch")
    yield path.removesuffix(GROUP)
    remove_tree(path)


@pytest.fixture
def watch(cpu: str) -> Iterator[FanotifyWatch]:
    try:
        made = FanotifyWatch([cpu, mount_of("memory")], below=GROUP)
    except SourceError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
    yield made
    made.close()


def run(*command: str) -> str:
    """Run another process to its end; its error output when it failed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stderr.strip() or "failed" if done.returncode else ""


def write(path: str, text: str) -> None:
    """Let another process write and end."""
    assert run("sh", "-c", f"echo {text} > {path}") == ""


async def writes(watch: WriteWatch, seconds: float = 60) -> list[ObservedWrite]:
    with trio.fail_after(seconds):
        return list(await watch.next_batch())


async def quiet(watch: WriteWatch) -> bool:
    with trio.move_on_after(0.1):
        await watch.next_batch()
        return False
    return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_write_is_told_with_group_file_and_writer(
    watch: FanotifyWatch, cpu: str, tmp_path: Path, nursery: trio.Nursery
) -> None:
    shutil.copy("/bin/sh", tmp_path / "kubelet")
    for shell, kind in (("sh", WriterKind.PERSON), (str(tmp_path / "kubelet"), WriterKind.KUBELET)):
        # The writer stays until it has been looked at.
        script = f"echo 512 > {cpu}{GROUP}/cpu.shares; sleep 0.3"
        nursery.start_soon(trio.to_thread.run_sync, run, shell, "-c", script)
        result = await writes(watch)
        assert [(item.directory, item.group, item.file) for item in result] == [(cpu, GROUP, "cpu.shares")]
        assert result[0].writer.kind is kind
        assert result[0].writer.pid > 0


async def test_own_writes_are_dropped_and_no_descriptor_stays_open(watch: FanotifyWatch, cpu: str) -> None:
    before = descriptors()
    for number in range(300):
        Path(f"{cpu}{GROUP}/cpu.shares").write_text(str(100 + number))
    assert await quiet(watch)
    write(f"{cpu}{GROUP}/cpu.shares", "77")
    assert (await writes(watch))[0].file == "cpu.shares"
    assert descriptors() == before


async def test_a_writer_that_has_ended_is_unknown_but_its_write_is_told(watch: FanotifyWatch, cpu: str) -> None:
    write(f"{cpu}{GROUP}/cpu.shares", "99")
    result = await writes(watch)
    assert result[0].writer.kind is WriterKind.UNKNOWN
    assert result[0].writer.pid > 0
    assert result[0].group == GROUP


async def test_only_files_and_groups_of_interest_are_told(watch: FanotifyWatch, cpu: str) -> None:
    picky = FanotifyWatch([cpu], files={"cpu.cfs_quota_us"}, below=f"{GROUP}/kubepods")
    os.makedirs(f"{cpu}{GROUP}/kubepods/pod")
    for path in (f"{GROUP}/cpu.cfs_quota_us", f"{GROUP}/kubepods/pod/cpu.shares"):
        write(f"{cpu}{path}", "50000")
    assert await quiet(picky)
    write(f"{cpu}{GROUP}/kubepods/pod/cpu.cfs_quota_us", "50000")
    assert [item.group for item in await writes(picky)] == [f"{GROUP}/kubepods/pod"]
    picky.close()


async def test_a_followed_group_outside_of_the_subtree_is_reported_until_it_is_forgotten(
    watch: FanotifyWatch, cpu: str
) -> None:
    picky = FanotifyWatch([cpu], below=f"{GROUP}/kubepods")
    picky.follow(cpu, GROUP)
    write(f"{cpu}{GROUP}/cpu.shares", "77")
    assert [(item.group, item.file) for item in await writes(picky)] == [(GROUP, "cpu.shares")]
    picky.forget(cpu, GROUP)
    write(f"{cpu}{GROUP}/cpu.shares", "78")
    assert await quiet(picky)
    picky.close()


async def test_a_write_from_another_mount_namespace_is_placed(watch: FanotifyWatch, cpu: str, tmp_path: Path) -> None:
    os.mkdir(f"{cpu}{GROUP}/pod")
    loop = f"for value in 60 61; do echo $value > {tmp_path}{GROUP}/pod/cpu.shares; done"
    failed = run("unshare", "-m", "sh", "-c", f"mount --bind {cpu} {tmp_path} && {loop}")
    if failed:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no mount namespace can be made: {failed}")
    assert {(item.directory, item.group, item.file) for item in await writes(watch)} == {
        (cpu, f"{GROUP}/pod", "cpu.shares")
    }


async def test_paths_of_other_mount_namespaces_are_bounded(watch: FanotifyWatch, cpu: str) -> None:
    os.mkdir(f"{cpu}{GROUP}/pod")
    file = f"{GROUP}/pod/cpu.shares"
    stat = os.stat(f"{cpu}{file}")
    for number in range(1000):
        assert watch._group(f"/mnt/{number}{file}", cpu, stat) == f"{GROUP}/pod"
    assert len(watch._elsewhere) <= 64


STORM = """
import os, sys
turns, paths = int(sys.argv[1]), sys.argv[2:]
for turn in range(turns):
    child = os.fork()
    if not child:
        for path in paths:
            fd = os.open(path, os.O_WRONLY)
            os.write(fd, b"50")
        os._exit(0)
    os.waitpid(child, 0)
"""


async def test_a_write_below_a_mount_of_a_pods_own_groups_is_not_placed_in_the_hosts(
    watch: FanotifyWatch, cpu: str
) -> None:
    """A node in a pod has groups of the host's names at the host's path."""
    os.makedirs(f"{cpu}{GROUP}/pod{GROUP}")
    script = f"mount --bind {cpu}{GROUP}/pod {cpu} && echo 512 > {cpu}{GROUP}/cpu.shares && sleep 0.3"
    failed: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, lambda: failed.append(run("unshare", "-m", "sh", "-c", script)))
        with trio.move_on_after(5):
            result = await writes(watch)
    if failed != [""]:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no mount namespace can be made: {failed}")
    assert [(item.group, item.file) for item in result] == [("", "cpu.shares")]
    write(f"{cpu}{GROUP}/cpu.shares", "77")
    assert [item.group for item in await writes(watch)] == [GROUP]


async def test_a_write_deep_in_a_tenants_groups_that_cannot_be_placed_costs_few_lookups(
    watch: FanotifyWatch, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(attribution, "_inode", looked.append)
    assert watch._group("/n" * 2000 + "/cpu.shares", cpu, os.stat(cpu)) == ""
    assert 10 < len(looked) <= 32


async def test_a_full_queue_is_told_as_lost(watch: FanotifyWatch, cpu: str) -> None:
    limit = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip(f"fs.fanotify.max_queued_events is {limit}: filling it takes too long")
    # Events of one process on one file merge: many processes write to many files.
    groups = [f"{cpu}{GROUP}/{number}" for number in range(200)]
    for group in groups:
        os.mkdir(group)
    before = descriptors()
    paths = [f"{group}/cpu.shares" for group in groups]
    run(sys.executable, "-c", STORM, str(limit // len(groups) + 2), *paths)
    seen: list[ObservedWrite] = []
    while not any(item.lost for item in seen):
        seen = await writes(watch)
    assert descriptors() == before


async def test_a_group_that_is_gone_before_its_write_was_read_is_no_loss(watch: FanotifyWatch, cpu: str) -> None:
    os.mkdir(f"{cpu}{GROUP}/short")
    write(f"{cpu}{GROUP}/short/cpu.shares", "512")
    os.rmdir(f"{cpu}{GROUP}/short")
    write(f"{cpu}{GROUP}/cpu.shares", "512")
    assert [(item.group, item.lost) for item in await writes(watch)] == [(GROUP, False)]


async def test_cancelled_nothing_is_lost_and_closing_ends_the_reader(watch: FanotifyWatch, cpu: str) -> None:
    write(f"{cpu}{GROUP}/cpu.shares", "44")
    with trio.CancelScope() as scope:
        scope.cancel()
        await watch.next_batch()
    assert (await writes(watch))[0].group == GROUP
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.next_batch)
            await trio.testing.wait_all_tasks_blocked()
            watch.close()
    with pytest.raises(trio.ClosedResourceError):
        await watch.next_batch()


async def test_who_has_read_a_foreign_value_finds_its_writer_without_waiting(watch: FanotifyWatch, cpu: str) -> None:
    assert watch.take() == []
    write(f"{cpu}{GROUP}/cpu.shares", "45")
    assert [(item.group, item.file) for item in watch.take()] == [(GROUP, "cpu.shares")]
    assert await quiet(watch)
    watch.close()
    assert not watch.take()


def test_a_hierarchy_that_cannot_be_marked_is_told(cpu: str) -> None:
    with pytest.raises(SourceError, match="ENOENT"):
        FanotifyWatch(["/nowhere"])
    with pytest.raises(SourceError, match="anything"):
        FanotifyWatch([])
    watch = watch_writes([cpu, "/nowhere"])
    assert isinstance(watch, FanotifyWatch)
    assert "/nowhere (ENOENT)" in str(watch.problem)
    watch.close()


async def test_without_fanotify_writes_are_told_without_the_writer(
    cpu: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cgroupfs.attribution.ctypes.CDLL", lambda *_, **__: NoFanotify())
    watch = watch_writes([cpu], files={"cpu.shares"})
    assert isinstance(watch, InotifyWrites)
    assert len(caplog.messages) == 1
    assert "ENOSYS" in caplog.messages[0]
    watch.follow(cpu, GROUP)
    write(f"{cpu}{GROUP}/cpu.cfs_quota_us", "50000")
    write(f"{cpu}{GROUP}/cpu.shares", "55")
    result = await writes(watch)
    assert [(item.directory, item.group, item.file) for item in result] == [(cpu, GROUP, "cpu.shares")]
    assert result[0].writer.kind is WriterKind.UNKNOWN
    watch.forget(cpu, GROUP)
    write(f"{cpu}{GROUP}/cpu.shares", "56")
    assert await quiet(watch)
    watch.close()


class NoFanotify:
    """A C library on a kernel without fanotify."""

    def fanotify_init(self, *_: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1


def test_events_that_are_lost_one_after_another_are_logged_once(
    watch: FanotifyWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, length: int) -> bytes:
        raise OSError(errno.EMFILE, "too many")

    caplog.set_level("INFO")
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", refused)
        batches = [watch.take() for _ in range(100)]
    assert all(batch[0].lost for batch in batches)
    assert len(caplog.records) == 1
    monkeypatch.setattr(os, "read", lambda fd, length: b"")
    watch.take()
    assert len(caplog.records) == 2
