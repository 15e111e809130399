"""Which disk a name means: on a made-up /sys, and on this machine."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.runtime.workqueue import DirtyKeys
from reconciler.sources import disks
from reconciler.sources.disks import DiskSource, find_disk, find_disks
from state.disk import Disk


def made(root: Path) -> str:
    """sda with a partition, an LVM volume on it, and a controller's disk with a slash in its name."""
    shape = {
        "sda": ("8:0", "none [bfq] mq-deadline", ()),
        "dm-0": ("253:0", "none", ()),
        "cciss!c0d0": ("104:0", "", ()),
    }
    block, numbers = root / "sys/devices/block", root / "sys/dev/block"
    names = root / "sys/class/block"
    numbers.mkdir(parents=True)
    names.mkdir(parents=True)
    for name, (number, scheduler, _) in shape.items():
        (block / name / "queue").mkdir(parents=True)
        (block / name / "dev").write_text(f"{number}\n")
        if scheduler:
            (block / name / "queue/scheduler").write_text(f"{scheduler}\n")
        (numbers / number).symlink_to(block / name)
        (names / name).symlink_to(block / name)
    part = block / "sda/sda2"
    part.mkdir()
    (part / "dev").write_text("8:2\n")
    (part / "partition").write_text("2\n")
    (numbers / "8:2").symlink_to(part)
    (names / "sda2").symlink_to(part)
    return str(root)


SDA = Disk(device="8:0", kernel="sda", scheduler="bfq")


@pytest.mark.parametrize(
    ("name", "disk"),
    [
        ("8:0", SDA),
        ("8:2", SDA),
        ("sda", SDA),
        ("sda2", SDA),
        ("dm-0", Disk(device="253:0", kernel="dm-0", scheduler="none")),
        ("cciss!c0d0", Disk(device="104:0", kernel="cciss/c0d0")),
    ],
    ids=str,
)
def test_a_partition_stands_for_its_disk(tmp_path: Path, name: str, disk: Disk) -> None:
    assert find_disk(name, made(tmp_path)) == disk


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("9:9", "no block device 9:9"),
        ("sdz", "expected a directory, a path below /dev, a disk's name or its major:minor"),
        ("a b", "expected a directory"),
        ("/missing", "No such file"),
        ("/file", "neither a block device nor a directory"),
    ],
    ids=str,
)
def test_what_is_no_disk_is_told(tmp_path: Path, name: str, words: str) -> None:
    root = made(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match=words):
        find_disk(name, root)


def test_a_file_system_on_no_disk_is_told() -> None:
    with pytest.raises(SourceError, match="is on proc, which has no single disk"):
        find_disk("/proc")


@pytest.mark.kernel
def test_a_directory_stands_for_the_disk_below_it(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    if not os.path.isdir(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"):
        pytest.skip("REAL KERNEL TEST NOT RUN: the temporary directory is on no block device")
    disk = find_disk(str(tmp_path))
    assert disk == find_disk(disk.device) == find_disk(disk.kernel.replace("/", "!"))
    assert Path(f"/sys/block/{disk.kernel.replace('/', '!')}/dev").read_text().strip() == disk.device


async def test_a_disk_that_comes_is_found_and_told_once(tmp_path: Path) -> None:
    names = ["8:0", "9:9"]
    dirty = DirtyKeys()
    source = DiskSource(lambda: names, dirty, root=made(tmp_path))
    await source.refresh()
    assert source.found == {"8:0": SDA}
    assert source.status().ok is False
    assert source.status().detail == "disks: 9:9: no block device 9:9"
    assert find_disks(names, str(tmp_path)) == ({"8:0": SDA}, ["disks: 9:9: no block device 9:9"])
    assert dirty.take_nowait().everything == ("disks",)
    await source.refresh()
    assert not dirty
    names.remove("9:9")
    names.append("dm-0")
    await source.refresh()
    assert dirty
    assert source.status().ok is True
    assert source.status().detail == "8:0 is sda 8:0, dm-0 is dm-0 253:0"


@pytest.fixture
def still_clock() -> MockClock:
    """Time passes only by `MockClock.jump`: no machine is too busy for a time limit."""
    return MockClock()


async def met(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.to_thread.run_sync(time.sleep, 0.01)


async def test_a_file_system_that_does_not_answer_stops_neither_the_loop_nor_the_other_disks(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still_clock: MockClock
) -> None:
    answers = threading.Event()
    answers.set()
    asked: list[str] = []

    def find(name: str, root: str) -> Disk:
        asked.append(name)
        assert answers.wait(60)
        return find_disk("8:0", root)

    monkeypatch.setattr(disks, "find_disk", lambda name, root: (find if name == "/hangs" else find_disk)(name, root))
    names = ["/hangs", "8:0"]
    source = DiskSource(lambda: names, DirtyKeys(), root=made(tmp_path))
    await nursery.start(source.run)
    assert source.found == {"/hangs": SDA, "8:0": SDA}
    answers.clear()
    names.append("dm-0")
    source.again.set()
    await met(lambda: len(asked) == 2)
    still_clock.jump(2.1)
    await met(lambda: "dm-0" in source.found)
    # The last answer holds.
    assert source.found["/hangs"] == SDA
    assert source.status().ok is False
    assert source.status().detail == "disks: /hangs: no answer within 2 s"
    before = source.found
    source.again.set()
    # It waits for the thread: once it does so, the time that it may take has begun.
    for _ in range(20):
        await trio.testing.wait_all_tasks_blocked()
        still_clock.jump(0.2)
    await met(lambda: source.found is not before)
    assert len(asked) == 2, "one thread waits"
    answers.set()
    source.again.set()
    await met(lambda: source.status().ok)
    nursery.cancel_scope.cancel()
